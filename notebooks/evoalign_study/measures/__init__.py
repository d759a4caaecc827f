"""Training data and measurements of each task: one file per task, named as in `tasks.TASKS`."""

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
        ValueError: an unknown task; the message suggests the nearest known name.
    """
    tasks.get(task)
    return import_module(f"{__name__}.{task}").MEASURES


def of(spec: Mapping[str, Any]) -> Measures:
    """Return the measures of a spec's task, for the spec's base."""
    return get(spec["task"]).for_base(spec["base"])
