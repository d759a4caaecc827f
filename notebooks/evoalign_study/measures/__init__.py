"""What a run of each task is trained on and measured by: a file a task, called as the task is in `tasks.TASKS`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from evoalign_lib import tasks

if TYPE_CHECKING:
    from evoalign_study.measures.base import Measures


def get(task: str) -> Measures:
    """Return the measures of a task.

    Raises:
        ValueError: an unknown one; the message has the nearest known name.
    """
    tasks.get(task)
    return import_module(f"{__name__}.{task}").MEASURES
