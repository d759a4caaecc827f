"""Findings: the quantities that a claim rests on, each with its interval and the bound that it should lie beyond."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evoalign_lib.analysis import stats
from evoalign_lib.analysis.stats import Interval
from evoalign_study.claims.selection import Runs, lacking

MISSING = "missing"
"""The value of a finding under a decoding for which too few runs were measured."""
_Z = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Finding:
    """A quantity that should lie beyond a bound, or within a margin of it."""

    label: str
    """The cell, quantity or comparison, such as "A0"."""
    n: int
    """Units in the smaller arm; 0 if an arm has no runs."""
    have: str
    """The runs found, in words."""
    interval: Interval | None
    """The quantity; None if there are no runs, or if it is not defined on them (`context` says why)."""
    bound: float = 0.0
    """The value that the quantity is compared with."""
    side: str = "above"
    """Where the claim says the quantity lies: "above" or "below" the bound, or "within" the margin around it."""
    test: float | None = None
    """The two-sided p-value of the test that the rule names (for "within", of two one-sided tests); None: the p-value
    follows from the interval."""
    value: str = ""
    """The quantity with its interval, in words."""
    context: str = ""
    """What the verdict adds in words: base accuracy, n, smallest detectable effect."""
    decisive: bool = True
    """Whether the verdict rests on it; if not, it is only reported."""
    lacks: str = ""
    """What is missing from an unfinished sweep that decides which runs count."""
    decoding: str = ""
    """How the completions were decoded; empty if the quantity does not depend on it."""
    compared: str = ""
    """What is compared, without the decoding: findings that share this text repeat one comparison."""
    asked: str = ""
    """What the claim declares, whichever arms stand in for its own. With decoding and side it tells findings apart."""

    @property
    def key(self) -> tuple[str, str, str]:
        """What is the same for a finding of the claim and for one with other arms in their places."""
        return self.asked, self.decoding, self.side

    @property
    def text(self) -> str:
        """The quantity in words, with its context; empty if there are no runs."""
        return f"{self.label.replace('_', ' ')} {self.value} {self.context}".strip() if self.value else ""

    def excess(self) -> tuple[float, float, float]:
        """Return how far value, low and high lie beyond the bound in the claimed direction, the smaller end second."""
        value, low, high = (x - self.bound for x in (self.interval.value, self.interval.low, self.interval.high))
        return (-value, -high, -low) if self.side == "below" else (value, low, high)

    def sign(self) -> int:
        """Return 1 if the whole interval lies above 0, -1 if it lies below 0, and 0 otherwise."""
        if self.interval is None:
            return 0
        return int(self.interval.low > 0) - int(self.interval.high < 0)

    def p(self, margin: float) -> float:
        """Return the p-value for the quantity not lying where the claim says; 1 if it points the other way.

        It comes from the rule's own test if there is one. Otherwise it is two-sided and comes from the interval: the
        estimate is taken as normal, with the spread given by the interval's end nearer the bound, so that p is below
        0.05 exactly if the 95 % interval lies beyond the margin.
        """
        if self.side == "within":
            return self.test
        value, low, _ = self.excess()
        if value <= margin:
            return 1.0
        if self.test is not None:
            return self.test
        if low >= value:  # all units agree
            return 0.0
        return 2 * NormalDist().cdf(-_Z * (value - margin) / (value - low))

    def p_against(self, margin: float) -> float:
        """Return the p-value for the quantity lying where the claim says, below 0.05 exactly if that is contradicted.

        It comes from the interval, as in `p`: two-sided from 95 %, or, of a claimed match, one-sided from 90 %.
        """
        if self.interval is None:
            return 1.0
        value, low, high = self.excess()
        z, tails, beyond, width = _Z, 2, margin - value, high - value
        if self.side == "within":
            z, tails, beyond = NormalDist().inv_cdf(0.95), 1, abs(value) - margin
            width = value - low if value > 0 else high - value
        if beyond <= 0 or width <= 0:
            return float(beyond <= 0)
        return min(1.0, tails * NormalDist().cdf(-z * beyond / width))


class Undecided(Exception):
    """The quantity is not defined on the existing runs; the message says why."""


def defined(statistic: Callable[..., Any], *scores: Any, **options: Any) -> Any:
    """Return a statistic of scores. Raises Undecided if it rejects them as too few or without spread."""
    try:
        return statistic(*scores, **options)
    except ValueError as error:
        raise Undecided(str(error)) from error


def mean_interval(values: Sequence[NDArray[np.float64]], resamples: int) -> Interval:
    """Return the mean of an arm, or its difference from another, over seeds (and problems, if each has results).

    values: for each arm, an array (seeds, problems), or (seeds,) with one score per run; (problems,) for a fixed model.
    Raises Undecided if there are too few scores.
    """
    if np.ndim(values[0]) == 2:
        return stats.crossed_bootstrap(*values, n_resamples=resamples)
    if len(values) == 1:
        return defined(stats.bootstrap_mean, values[0], n_resamples=resamples)
    return defined(stats.stratified_bootstrap, *([each] for each in values), n_resamples=resamples)


def there(values: Iterable[Any], least: int, who: str) -> NDArray[np.float64]:
    """Return the values but None, which marks a run that never gets there. Raises Undecided if too few are left."""
    values = list(values)
    known = [value for value in values if value is not None]
    if len(known) < least:
        raise Undecided(f"{len(known)} of {len(values)} runs of {who}")
    return np.array(known, np.float64)


Measured = tuple[Interval, str, str] | tuple[Interval, str, str, float | None]
"""The interval of a quantity, its value and context in words, and the p-value of the rule's own test, if any."""


def hold(
    label: str,
    arms: Sequence[Runs],
    measure: Callable[[Sequence[Runs]], Measured],
    *,
    n: int | None = None,
    have: str = "",
    decoded: Callable[[Any], bool] | None = None,
    least: int = 0,
    **kept: Any,
) -> Finding:
    """Measure a quantity and compare it with a bound: the step that every kind of rule is built from.

    Args:
        label: what is measured.
        arms: the runs that it is measured on. If an arm has no runs, nothing is measured.
        measure: measures the quantity on these runs, or raises Undecided.
        n: units in the smaller arm; by default, its runs. With 0 units nothing is measured.
        have: the runs found, in words.
        decoded: tells whether a run was measured under the decoding; None: all runs count. Runs that were not are
            left out.
        least: runs that each arm needs under the decoding, or else nothing is decided; one is enough for a fixed model.
        kept: further fields of the finding: bound, side, decoding and the like.
    """
    have = have or f"{label.replace('_', ' ')}: {', '.join(runs.have for runs in arms)}"
    if n == 0 or not all(runs.records for runs in arms):
        return Finding(label, 0, have, None, lacks=lacking(arms), **kept)
    if decoded is not None:
        measured = [runs._replace(records=[run for run in runs.records if decoded(run)]) for runs in arms]
        if any(len(runs.records) < (1 if runs.fixed else least) for runs in measured):
            have = " v ".join(f"{len(runs.records)} of {runs.have}" for runs in measured)
            kept |= {"decisive": False, "value": MISSING, "context": f"({have} were decoded so)"}
            return Finding(label, 0, have, None, **kept)
        arms = measured
    n = n or min(sizes(arms))
    try:
        interval, value, context, *test = measure(arms)
    except Undecided as error:
        return Finding(label, n, have, None, value="not defined", context=f"({error})", **kept)
    return Finding(label, n, have, interval, test=test[0] if test else None, value=value, context=context, **kept)


def sizes(arms: Iterable[Runs]) -> list[int]:
    """Return how many runs each arm has, leaving out fixed models unless all arms are fixed models."""
    return [len(runs.records) for runs in arms if not runs.fixed] or [1]


def versus(numbers: Iterable[int]) -> str:
    """Return the numbers of a comparison's sides as text, with equal numbers given once.

    >>> versus([16, 16]), versus([16, 12])
    ('16', '16 v 12')
    """
    return " v ".join(map(str, dict.fromkeys(numbers)))


def significant(interval: Interval, digits: int = 3) -> str:
    """Return an interval as text, rounded to this many significant digits.

    >>> significant(Interval(1.2345, 1.1, 12.34, 8))
    '1.23 [1.1, 12.3]'
    """
    value, low, high = (f"{end:.{digits}g}" for end in (interval.value, interval.low, interval.high))
    return f"{value} [{low}, {high}]"


def decoding_words(decoding: str) -> str:
    """Return a decoding in words.

    >>> decoding_words("t0.6")
    'temperature 0.6'
    """
    return "greedy" if decoding == "greedy" else f"temperature {decoding.removeprefix('t')}"
