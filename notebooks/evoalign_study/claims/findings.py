"""A finding: one quantity that a claim rests on, with its interval and the bound that it should lie beyond."""

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
"""The value of a finding under a decoding that too few runs were measured under."""
_Z = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Finding:
    """A quantity that should lie beyond a bound, or within a margin of it."""

    label: str
    """The cell, quantity or comparison, such as "A0"."""
    n: int
    """Units in the smaller arm; 0 where an arm has no run."""
    have: str
    """The runs found, in words."""
    interval: Interval | None
    """The quantity; None without runs, and where it is not defined on them (`context` says why)."""
    bound: float = 0.0
    """The value that the quantity is compared with."""
    side: str = "above"
    """Where the claim says that the quantity lies: "above" or "below" the bound, or "within" the margin of it."""
    test: float | None = None
    """The two-sided p-value of a test that the rule names (for "within" that of two one-sided tests); None: the
    interval's own."""
    value: str = ""
    """The quantity with its interval, in words."""
    context: str = ""
    """What the words of a verdict say of it besides: base accuracy, n, smallest detectable effect."""
    decisive: bool = True
    """Whether the verdict rests on it; otherwise it is only reported."""
    lacks: str = ""
    """The sweep that decides which runs count, while it is not finished."""
    decoding: str = ""
    """How the completions were decoded; empty where that is not a property of the quantity."""
    compared: str = ""
    """What is compared, without the decoding: findings that share it repeat one comparison."""

    @property
    def text(self) -> str:
        """The quantity in words, with its context; empty without runs."""
        return f"{self.label.replace('_', ' ')} {self.value} {self.context}".strip() if self.value else ""

    def excess(self) -> tuple[float, float, float]:
        """Return how far value, low and high lie beyond the bound in the claimed direction, smallest end second."""
        value, low, high = (x - self.bound for x in (self.interval.value, self.interval.low, self.interval.high))
        return (-value, -high, -low) if self.side == "below" else (value, low, high)

    def sign(self) -> int:
        """Return 1 or -1 where the whole interval lies above or below 0, and 0 otherwise."""
        if self.interval is None:
            return 0
        return int(self.interval.low > 0) - int(self.interval.high < 0)

    def p(self, margin: float) -> float:
        """Return the p-value that the quantity does not lie where the claim says; 1 where it points the other way.

        It is that of the rule's own test, or two-sided from the interval, as if the estimate were normal with the
        spread that the interval's end beside the bound shows: below 0.05 exactly where the 95 % interval lies beyond
        the margin.
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


class Undecided(Exception):
    """The runs are there, but the quantity is not defined on them; says why."""


def defined(statistic: Callable[..., Any], *scores: Any, **options: Any) -> Any:
    """Return a statistic of scores. Raises Undecided where it refuses them: too few, or without spread."""
    try:
        return statistic(*scores, **options)
    except ValueError as error:
        raise Undecided(str(error)) from error


def mean_interval(values: Sequence[NDArray[np.float64]], resamples: int) -> Interval:
    """Return the mean of an arm, or its difference from another, over seeds, and over problems where each has results.

    values: of each arm (seeds, problems), or (seeds,) of one score a run; of a fixed model (problems,). Raises
    Undecided where there are too few scores.
    """
    if np.ndim(values[0]) == 2:
        return stats.crossed_bootstrap(*values, n_resamples=resamples)
    if len(values) == 1:
        return defined(stats.bootstrap_mean, values[0], n_resamples=resamples)
    return defined(stats.stratified_bootstrap, *([each] for each in values), n_resamples=resamples)


def there(values: Iterable[Any], least: int, who: str) -> NDArray[np.float64]:
    """Return the values of the runs that get somewhere; None: one does not. Raises Undecided where too few do."""
    values = list(values)
    known = [value for value in values if value is not None]
    if len(known) < least:
        raise Undecided(f"{len(known)} of {len(values)} runs of {who}")
    return np.array(known, np.float64)


Measured = tuple[Interval, str, str] | tuple[Interval, str, str, float | None]
"""A quantity with its interval, value and context in words, and the p-value of the rule's own test, if it has one."""


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
    """Measure a quantity and hold it against a bound: the one rule of which every kind is made.

    Args:
        label: what is measured.
        arms: the runs that it is measured on. Where one of them has none nothing is measured.
        measure: measures it on such runs, or raises Undecided.
        n: units in the smaller arm; by default runs. Without any nothing is measured.
        have: the runs found, in words.
        decoded: whether a run was measured under the decoding, where that is asked. Only such runs count, and where an
            arm has fewer than `least` nothing is decided; of a fixed model one is enough.
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
    """Return how many runs arms have, without those that are one fixed model, if not all are."""
    return [len(runs.records) for runs in arms if not runs.fixed] or [1]


def versus(numbers: Iterable[int]) -> str:
    """Return numbers of the sides of a comparison in words, those that are equal once.

    >>> versus([16, 16]), versus([16, 12])
    ('16', '16 v 12')
    """
    return " v ".join(map(str, dict.fromkeys(numbers)))


def significant(interval: Interval, digits: int = 3) -> str:
    """Return an interval in words, in numbers of so many significant digits.

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
