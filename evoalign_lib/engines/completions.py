"""Tables of a step's completions for inspection in the terminal, in trackers, and in files.

A population may write thousands of completions a step. Only those of the best and the worst member are kept: the
difference between them is what the step learns from.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers.utils import is_rich_available

from evoalign_lib.engines.base import Evaluation
from evoalign_lib.files import replace_text
from evoalign_lib.update_rules import standardise

Table = dict[str, list]
"""column -> (rows,) values"""

FOLDER = "completions"
"""folder in output_dir"""


def of_step(evaluations: Sequence[Evaluation], fitness: np.ndarray, step: int) -> Table:
    """Return the completions of the best and the worst member of a step.

    Args:
        evaluations: (members,).
        fitness: (members,) reward units; among ties the first member counts.
        step: 0, 1, ...

    Returns:
        "step", "member", then the columns of `Scored.table`, and "advantage": the member's reward, standardised over
        the population (0 where it is tied).
    """
    chosen = list(dict.fromkeys((int(np.argmax(fitness)), int(np.argmin(fitness)))))
    tables = [evaluations[member].scored.table for member in chosen]
    rows = [len(table["prompt"]) for table in tables]
    joined: Table = {"step": [step] * sum(rows), "member": np.repeat(chosen, rows).tolist()}
    for name in dict.fromkeys(name for table in tables for name in table):
        joined[name] = [v for table, n in zip(tables, rows, strict=True) for v in table.get(name, [None] * n)]
    return joined | {"advantage": np.repeat(standardise(fitness)[chosen], rows).tolist()}


def sample(table: Table, n: int | None, rng: np.random.Generator) -> Table:
    """Return n rows drawn at random, in their original order; None: all rows."""
    rows = len(table["prompt"])
    if n is None or n >= rows:
        return table
    chosen = np.sort(rng.choice(rows, n, replace=False))
    return {name: [values[i] for i in chosen] for name, values in table.items()}


def show(table: Table, functions: Sequence[str], title: str) -> None:
    """Print rows in a frame with rich, as TRL's trainers do.

    Args:
        table: from `of_step`, or with the columns of `Scored.table`.
        functions: names of the reward functions.
        title: text printed after "Step".
    """
    from trl.trainer.utils import print_prompt_completions_sample

    rewards = {name: [math.nan if v is None else v for v in table[name]] for name in functions}
    own = {"step", "prompt", "completion", "advantage", *functions}
    extra = {name: ["" if v is None else v for v in values] for name, values in table.items() if name not in own}
    print_prompt_completions_sample(
        table["prompt"], table["completion"], rewards, table.get("advantage"), title, extra=extra
    )


def check_rich() -> None:
    """Raise ImportError unless rich, which prints the table, is installed; the message says how to install it."""
    if not is_rich_available():
        raise ImportError("log_completions=True prints a table with rich: pip install rich, or set it to False.")


def write(table: Table, output_dir: str | os.PathLike, step: int, what: str) -> None:
    """Write rows to output_dir/completions/<what>_<step>.jsonl, one JSON object a line."""
    folder = Path(output_dir) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    rows = [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]
    lines = [json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows]
    replace_text(folder / f"{what.replace('/', '_')}_{step:05d}.jsonl", "".join(lines))


def send(table: Table, callbacks: Sequence[Any], step: int) -> None:
    """Send rows to wandb and trackio, if their callbacks are among these."""
    for callback in callbacks:
        kind = type(callback).__name__
        tracker = {"WandbCallback": "_wandb", "TrackioCallback": "_trackio"}.get(kind)
        tracker = getattr(callback, tracker) if tracker else None
        if tracker is not None and (kind == "TrackioCallback" or tracker.run is not None):
            import pandas as pd

            shown = pd.DataFrame({name: [_text(value) for value in values] for name, values in table.items()})
            tracker.log({"completions": tracker.Table(dataframe=shown)})


def _text(value: Any) -> Any:
    """Return a value for display: messages as role and content, other lists and dictionaries as text."""
    if isinstance(value, list) and all(isinstance(message, Mapping) and "role" in message for message in value):
        return "\n".join(f"{message['role'].upper()}\n{message.get('content', '')}" for message in value)
    return str(value) if isinstance(value, (list, dict)) else value
