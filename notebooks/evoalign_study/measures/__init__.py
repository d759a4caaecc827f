"""What a run of each task is trained on and measured by: a file a task, called as the task is in `tasks.TASKS`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

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


def of(spec: Mapping[str, Any]) -> Measures:
    """Return the measures of a spec's task, for the base of the spec."""
    return get(spec["task"]).for_base(spec["base"])
