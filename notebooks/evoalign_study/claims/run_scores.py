"""Measures that a comparison reads from a run: its results on each problem, or one score.

A new measure is an entry in `MEASURES`. It says whether more is better, so that a rule knows which arm it favours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evoalign_lib.analysis import curves, hacking
from evoalign_lib.checks import require
from evoalign_study import collapse
from evoalign_study.claims.checks import check, some
from evoalign_study.claims.findings import Undecided, decoding_words, defined, there
from evoalign_study.claims.selection import BUDGETS, DECODINGS, Case, Record
from evoalign_study.records import accuracy_matrix

_Arms = Sequence[Sequence[Record]]
_Arrays = list[NDArray[np.float64]]
_CLOSE = 0.05
"""Two budgets count as equal if they differ by no more than this share."""


class Taken(NamedTuple):
    """A measure as a claim declares it: its key in `MEASURES`, the decoding, and the place where it is read."""

    kind: str
    decoding: str
    at: Mapping[str, Any]

    @classmethod
    def of(cls, declared: Mapping[str, Any]) -> Taken:
        """Read a declaration, such as {"right": "t1", "at_kl": 0.5}."""
        (kind,) = declared.keys() & MEASURES.keys()
        return cls(kind, declared[kind], {key: declared[key] for key in AT if key in declared})

    @property
    def measure(self) -> Measure:
        """The entry of `MEASURES`."""
        return MEASURES[self.kind]

    def has(self, record: Record) -> bool:
        """Return whether a record has the measure under this decoding."""
        return self.measure.has(record, self.decoding)

    def words(self, decoding: bool = True) -> str:
        """Describe the measure, with or without its decoding.

        >>> Taken.of({"right": "t1", "at_kl": 0.5}).words()
        'right answers temperature 1 at KL 0.5'
        """
        told = [decoding_words(self.decoding)] if decoding else []
        return " ".join([self.measure.words, *told, *(AT[key](value) for key, value in self.at.items())])


@dataclass(frozen=True)
class Measure:
    """A measure: its name, its direction, and how it is read from the records of several arms."""

    words: str
    """Its name in labels."""
    has: Callable[[Record, str], bool]
    """Whether a record has the measure under a decoding."""
    read: Callable[[Case, Taken, _Arms], _Arrays]
    """Reads each arm's right answers, (seeds, problems), or one score per run, (seeds,), as fractions. Raises Undecided
    if the measure has no value. A third arm is the walk of the first (`walks`)."""
    more_is_better: bool = True
    """Whether an arm with more of it is favoured."""
    at: tuple[str, ...] = ()
    """Keys that say where it is read; a claim must declare exactly one of them. Empty: there is no such place."""
    unit: str = " %"
    """The unit written after a mean."""
    rate: bool = False
    """Whether a score is 0 or 1: these measures, and no others, are compared by rate."""
    walks: bool = False
    """Whether the loss of a random walk can be taken off the first arm: of ES with random fitness, as many steps of the
    same length. Runs and walks are paired in the order of their seeds, so that resampling seeds resamples both."""


def curve(record: Record, name: str) -> NDArray[np.float64]:
    """Return a curve as an array, with NaN where a diverged run has no value."""
    return np.array(record["curve"][name], np.float64)


def curves_of(arms: _Arms, name: str) -> list[list[NDArray[np.float64]]]:
    """Return the `curve` of each run of each arm."""
    return [[curve(record, name) for record in arm] for arm in arms]


def _key(decoding: str) -> str:
    return "greedy_bits" if decoding == "greedy" else f"{decoding}_counts"


def _validation(case: Case, taken: Taken, arms: _Arms) -> _Arrays:
    """Read validation accuracy where each arm's mean first reaches a level, or at the largest budget all runs reach."""
    accuracies = curves_of(arms, f"validation_{taken.decoding}")
    if "at_mean" in taken.at:
        level, reached = taken.at["at_mean"], [np.mean(arm, axis=0).max() for arm in accuracies]
        if min(reached) < level:
            most = " and ".join(f"{100 * r:.1f} %" for r in reached)
            raise Undecided(f"an arm's mean stays below it, at most {most}")
        return [curves.scores_at_mean(arm, level)[1] for arm in accuracies]
    spent = curves_of(arms, taken.at["at_equal"])
    budget = _smallest_budget(spent)
    if not budget > max(axis[0] for arm in spent for axis in arm):  # a warm start may cost as much as a whole run
        raise Undecided("a run spent no more than another one had before its first step")
    return [
        np.array([curves.score_at(*line, budget) for line in zip(axes, scores, strict=True)])
        for axes, scores in zip(spent, accuracies, strict=True)
    ]


def _smallest_budget(spent: list[list[NDArray[np.float64]]]) -> float:
    """Return the total budget of the cheapest run."""
    budget = min(axis[-1] for arm in spent for axis in arm)
    if not budget > 0:  # random fitness generates nothing
        raise Undecided("a run spent nothing")
    return budget


def _validated(case: Case, taken: Taken, arms: _Arms) -> _Arrays:
    """Read right answers on each validation problem at an equal budget, from decoding records.

    The budget is the total of the cheapest run. An arm whose runs spend this budget within 5 % is read at its end; any
    other arm at the earlier step, measured by its decoding records, that comes within 5 % of it.
    """
    lacking = sum(not _has_validated(record, taken.decoding) for arm in arms for record in arm)
    if lacking:
        raise Undecided(f"{lacking} runs have no decoding record")
    spent = curves_of(arms, taken.at["at_equal"])
    budget = _smallest_budget(spent)
    matrices = []
    for arm, axes in zip(arms, spent, strict=True):
        blocks = [record["decoded"]["validation"] for record in arm]
        if abs(np.mean([axis[-1] for axis in axes]) / budget - 1) > _CLOSE:
            steps = sorted(set.intersection(*(set(record["decoded"]["validation_at"]) for record in arm)))
            lines = [(curve(record, "step"), axis) for record, axis in zip(arm, axes, strict=True)]
            shares = {step: np.mean([np.interp(step, *line) for line in lines]) / budget for step in steps}
            step = min(steps, key=lambda step: abs(shares[step] - 1), default=None)
            if step is None or abs(shares[step] - 1) > _CLOSE:
                told = ", ".join(f"{100 * share:.0f} % at step {step}" for step, share in shares.items())
                raise Undecided(f"an arm was decoded at no step of that budget: {told or 'at its end alone'}")
            blocks = [record["decoded"]["validation_at"][step] for record in arm]
        matrices.append(accuracy_matrix([{"test": block} for block in blocks], taken.decoding))
    return matrices


def _has_validated(record: Record, decoding: str) -> bool:
    decoded = record.get("decoded", {"validation": {}, "validation_at": {}})
    return all(_key(decoding) in block for block in (decoded["validation"], *decoded["validation_at"].values()))


def _fell(case: Case, taken: Taken, arms: _Arms) -> _Arrays:
    """Return for each run whether its right answers on the test questions fell below those of its untrained base."""
    bases = [[case.evidence.base_of(record) for record in arm] for arm in arms]
    if any(base is None or taken.decoding not in base["test"] for arm in bases for base in arm):
        raise Undecided("the untrained base of a run has no record under this decoding")
    tests = ([[record["test"][taken.decoding] for record in arm] for arm in side] for side in (arms, bases))
    return [np.array([*map(hacking.fell, *pair)], np.float64) for pair in zip(*tests, strict=True)]


def _tested(case: Case, taken: Taken, arms: _Arms) -> _Arrays:
    """Read right answers on the test problems; what the walk of the first arm has lost is given back to it."""
    first, second, *walks = (accuracy_matrix(arm, taken.decoding) for arm in arms)
    for walk in walks:
        base = case.evidence.base_of(arms[0][0])
        if base is None or not taken.has(base):
            raise Undecided("the untrained base of a run has no record under this decoding")
        pairs = min(len(first), len(walk))
        first = first[:pairs] + accuracy_matrix([base], taken.decoding) - walk[:pairs]
    return [first, second]


def _tested_at_most(case: Case, taken: Taken, arms: _Arms) -> _Arrays:
    """Read right answers on the test problems at the ends, if the first arm spent no more than the second did."""
    first, second = (np.mean([axis[-1] for axis in arm]) for arm in curves_of(arms, taken.at["at_most"]))
    if not second > 0:  # random fitness generates nothing
        raise Undecided("the second arm spent nothing")
    if first > (1 + _CLOSE) * second:
        raise Undecided(f"the first arm spent {first / second:.2f} times as much as the second")
    return [accuracy_matrix(arm, taken.decoding) for arm in arms]


def _right_at(case: Case, taken: Taken, arms: _Arms) -> _Arrays:
    """Read right answers on split B at each run's first point where proxy reward, or KL, has reached the level.

    Runs that never get there are censored; raises Undecided if fewer than the claim's `min_seeds` do.
    """
    first, second, *walks = arms
    paired = [zip(first, walks[0] if walks else [None] * len(first), strict=False), ((run, None) for run in second)]
    right_at = partial(defined, collapse.right_at)  # a null may have been measured at other steps than the walk
    rows = [[right_at(run, taken.decoding, walk=walk, **taken.at) for run, walk in arm] for arm in paired]
    return [there(arm, case.claim["min_seeds"], "an arm get there") for arm in rows]


def _each_run(read: Callable[[Record, str], float]) -> Callable[[Case, Taken, _Arms], _Arrays]:
    """Make a reader of arms from a reader of one run's score."""
    return lambda case, taken, arms: [np.array([read(r, taken.decoding) for r in arm], np.float64) for arm in arms]


def _on_curve(*names: str) -> Callable[[Record, str], bool]:
    return lambda record, decoding: all(f"{name}_{decoding}" in record.get("curve", {}) for name in names)


def _of_curve(read: Callable[[NDArray[np.float64]], float]) -> Callable[[Case, Taken, _Arms], _Arrays]:
    """Make a reader of arms from a reader of one run's validation curve."""
    return _each_run(lambda record, decoding: read(curve(record, f"validation_{decoding}")))


_hacked = _each_run(lambda r, decoding: collapse.end(r, decoding) == "hacked")
_fewer: dict[str, Any] = {"more_is_better": False}

MEASURES: dict[str, Measure] = {
    "test": Measure(
        "test",
        lambda r, decoding: _key(decoding) in r.get("test", {}),
        _tested,
        walks=True,
    ),
    "tested": Measure(
        "test", lambda r, decoding: _key(decoding) in r.get("test", {}), _tested_at_most, at=("at_most",)
    ),
    "validation": Measure("validation", _on_curve("validation"), _validation, at=("at_equal", "at_mean")),
    "validated": Measure("validation problems", _has_validated, _validated, at=("at_equal",)),
    "best": Measure("best validation", _on_curve("validation"), _of_curve(np.max)),
    "gained": Measure("gain of validation", _on_curve("validation"), _of_curve(lambda line: line[-1] - line[0])),
    "drawdown": Measure(
        "largest drawdown of validation", _on_curve("validation"), _of_curve(curves.largest_drawdown), unit="", **_fewer
    ),
    "right": Measure("right answers", _on_curve("right_bits"), _right_at, at=("at_proxy", "at_kl"), walks=True),
    "hacked": Measure("hacked runs", _on_curve("proxy", "right"), _hacked, rate=True, **_fewer),
    "fell": Measure(
        "runs whose right answers fell", lambda r, decoding: decoding in r.get("test", {}), _fell, rate=True, **_fewer
    ),
}
"""Measures that a comparison may read from a run, by the key that declares them."""


AT: dict[str, Callable[[Any], str]] = {
    "at_equal": lambda axis: f"at equal {axis.replace('_', ' ')}",
    "at_most": lambda axis: f"at no more {axis.replace('_', ' ')}",
    "at_proxy": lambda level: f"at proxy {level:g}",
    "at_kl": lambda level: f"at KL {level:g}",
    "at_mean": lambda level: f"at mean {100 * level:g} %",
}
"""Places where a measure may be read, with their wording in labels."""


def check_measure(where: str, measure: Mapping[str, Any]) -> None:
    """Raise ValueError if the declaration of a measure is malformed."""
    budgets = {"at_equal", "at_most"}
    levels = some(budgets, BUDGETS) | some(AT.keys() - budgets, Real)
    check(where, measure, levels | some(MEASURES, DECODINGS))
    kinds = sorted(measure.keys() & MEASURES.keys())
    require(len(kinds) == 1, f"{where}: measure {dict(measure)}: declare one of {', '.join(MEASURES)}")
    wanted, at = MEASURES[kinds[0]].at, [key for key in measure if key not in kinds]
    placed = len(at) == bool(wanted) and set(at) <= set(wanted)
    require(placed, f"{where}: {kinds[0]} is measured {' or '.join(wanted) or 'without a place'}, got {at or 'none'}")
