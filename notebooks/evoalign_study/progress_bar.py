"""One bar for the runs of a sweep, which moves with the steps of those that train.

How far each run is stands in memory that processes share. A process writes the numbers of its own runs alone, without a
lock: nothing is shared that a process could hold when it is killed.
"""

import sys
from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from evoalign_study.records import Spec, spec_hash

SECONDS = 1.0
"""between two looks at how far the runs are"""
QUIET_SECONDS = 15.0
"""between two drawings of the bar where it goes into a file or a notebook"""

_places: Mapping[str, int] = {}
_shares: MutableSequence[float] = []


def tell_in(places: Mapping[str, int], shares: MutableSequence[float]) -> None:
    """Let this process tell how far its runs are.

    Args:
        places: spec hash -> place of the run.
        shares: what is done of the run in each place, 0 to 1.
    """
    global _places, _shares
    _places, _shares = places, shares


def tell(spec: Spec, step: int) -> None:
    """Say that a run of this process has done so many of its steps."""
    if _places and (place := _places.get(spec_hash(spec))) is not None:
        _shares[place] = step / spec["steps"]


def followed(futures: Sequence[Future], shares: MutableSequence[float], name: str) -> Iterator[Future]:
    """Yield futures as they complete, and show a bar meanwhile.

    Args:
        futures: one for each run, in the order of their places.
        shares: of `tell_in`.
        name: before the bar.
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
