"""One progress bar for a whole sweep, which advances with the training steps of its runs.

The progress of each run is kept in shared memory. Each process writes only the entries of its own runs, without a lock,
so that a killed process leaves nothing locked.
"""

import sys
from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from evoalign_study.records import Spec, spec_hash

SECONDS = 1.0
"""Interval at which the progress of the runs is read."""
QUIET_SECONDS = 15.0
"""Interval at which the bar is redrawn where it goes into a file or a notebook."""

_places: Mapping[str, int] = {}
_shares: MutableSequence[float] = []


def tell_in(places: Mapping[str, int], shares: MutableSequence[float]) -> None:
    """Let this process report the progress of its runs.

    Args:
        places: spec hash -> place of the run in `shares`.
        shares: completed share of the run in each place, 0 to 1.
    """
    global _places, _shares
    _places, _shares = places, shares


def tell(spec: Spec, step: int) -> None:
    """Report that a run of this process has completed `step` of its steps."""
    if _places and (place := _places.get(spec_hash(spec))) is not None:
        _shares[place] = step / spec["steps"]


def followed(futures: Sequence[Future], shares: MutableSequence[float], name: str) -> Iterator[Future]:
    """Yield futures as they complete, showing a progress bar meanwhile.

    Args:
        futures: one for each run, in the order of their places.
        shares: as for `tell_in`.
        name: text in front of the bar.
    """
    from tqdm import tqdm

    pending, often = set(futures), {"miniters": 0, "mininterval": 0 if sys.stderr.isatty() else QUIET_SECONDS}
    form = "{desc}: {percentage:3.0f}%|{bar}| {n:g}/{total_fmt} runs [{elapsed}<{remaining}]"
    with tqdm(total=len(futures), desc=name, smoothing=0, bar_format=form, **often) as bar:
        while pending:
            done, pending = wait(pending, timeout=SECONDS, return_when=FIRST_COMPLETED)
            for future in done:
                shares[futures.index(future)] = 1.0
            bar.n = round(sum(shares), 1)
            bar.update(0)
            yield from done
