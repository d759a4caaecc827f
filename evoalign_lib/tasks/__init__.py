"""The tasks by name. Each task is one module: data, prompts, graders.

What every task module offers: `reward(prompts, completions, **columns) -> list[float | None]` (the signature of TRL's
reward functions), `REWARD_FLOOR` (the least reward, given to a completion that cannot be scored) and
`dataset(problems, tokenizer, chat_template=True) -> list[dict]` (rows with `prompt` and the columns `reward` takes).
"""

from difflib import get_close_matches
from importlib import import_module
from types import ModuleType

TASKS = {"countdown": "evoalign_lib.tasks.countdown"}


def get(name: str) -> ModuleType:
    """Import and return the module of a task.

    Args:
        name: a key of `TASKS`.

    Returns:
        The task's module.

    Raises:
        ValueError: no task has that name; the message suggests the nearest one.

    >>> get("countdown").__name__
    'evoalign_lib.tasks.countdown'
    """
    if name not in TASKS:
        near = get_close_matches(str(name), TASKS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown task {name!r}{hint} (known tasks: {', '.join(sorted(TASKS))})")
    return import_module(TASKS[name])
