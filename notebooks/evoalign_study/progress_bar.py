"""One bar for the runs of a sweep, which moves with the steps of those that train.

Each process writes how far its run is into a file of its own, and the process with the bar reads these files: nothing
is shared that a process could hold when it is killed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

from evoalign_study.records import Spec, run_name

SECONDS = 1.0
"""between two looks at the files, and between two lines of a process at least"""
QUIET_SECONDS = 15.0
"""between two drawings of the bar where it goes into a file or a notebook, unless a run has ended"""

_file: Path | None = None
_told = float("-inf")


def tell_in(folder: Path | None) -> None:
    """Let this process tell in a folder how far its runs are; None: nowhere."""
    global _file
    _file = None if folder is None else folder / f"{os.getpid()}.json"


def tell(spec: Spec, step: int, reward: float | None) -> None:
    """Say that a run of this process has done so many of its steps, the last one with this reward."""
    global _told
    if _file is None or time.monotonic() - _told < SECONDS:
        return
    _told = time.monotonic()
    text = json.dumps({"run": run_name(spec), "step": step, "steps": spec["steps"], "reward": reward})
    with suppress(OSError):  # a full disk ends no run for its bar's sake
        written = _file.with_suffix(".part")
        written.write_text(text, encoding="utf-8")
        written.replace(_file)


def end() -> None:
    """Say that the run of this process has ended."""
    global _told
    _told = float("-inf")
    if _file is not None:
        with suppress(OSError):
            _file.unlink(missing_ok=True)


def followed(futures: Sequence[Future], folder: Path, name: str) -> Iterator[Future]:
    """Yield futures as they complete, and show a bar meanwhile.

    Args:
        futures: one for each run.
        folder: of `tell_in`, in the processes that run them.
        name: before the bar.
    """
    from tqdm import tqdm

    form = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} runs [{elapsed}<{remaining}{postfix}]"
    pending, drawn, quiet = set(futures), float("-inf"), 0 if sys.stderr.isatty() else QUIET_SECONDS
    with tqdm(total=len(futures), desc=name, smoothing=0, bar_format=form) as bar:
        while pending:
            done, pending = wait(pending, timeout=SECONDS, return_when=FIRST_COMPLETED)
            if done or time.monotonic() - drawn >= quiet:
                drawn = time.monotonic()
                show(bar, len(futures) - len(pending), told(folder))
            yield from done


def show(bar: Any, ended: int, running: Sequence[dict[str, Any]]) -> None:
    """Draw a bar: runs that have ended, and the share of the others that is done."""
    shares = sum(run["step"] / run["steps"] for run in running)
    bar.n = min(round(ended + shares, 1), bar.total)
    bar.set_postfix_str("; ".join(map(_line, running)), refresh=False)
    bar.refresh()


def told(folder: Path) -> list[dict[str, Any]]:
    """Return what processes have told last of the runs that they are at, in a lasting order."""
    found = []
    for file in sorted(folder.glob("*.json")):
        with suppress(OSError, ValueError):  # it has ended meanwhile
            found.append(json.loads(file.read_text(encoding="utf-8")))
    return found


def _line(run: dict[str, Any]) -> str:
    reward = "" if run["reward"] is None else f", reward {run['reward']:.3g}"
    return f"{run['run']}: step {run['step']} of {run['steps']}{reward}"
