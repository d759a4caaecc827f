"""What a comparison may take of a run: its results on each problem, or one score.

A new measure is an entry in `MEASURES`. It says whether more of it is better, so that a rule knows whom it favours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evoalign_lib.analysis import curves, hacking
from evoalign_lib.analysis.arrays import require
from evoalign_study import collapse
from evoalign_study.claims.checks import check, some
from evoalign_study.claims.findings import Undecided, decoding_words
from evoalign_study.claims.selection import BUDGETS, DECODINGS, Claim, Evidence, Record
from evoalign_study.records import accuracy_matrix

_Arms = Sequence[Sequence[Record]]
_Arrays = list[NDArray[np.float64]]
_CLOSE = 0.05
"""Two budgets that differ by no more than this share count as equal."""


@dataclass(frozen=True)
class Measure:
    """A measure: its words, its sense, and how it is read from the records of several arms."""

    words: str
    """What it is called in labels."""
    has: Callable[[Record, str], bool]
    """Whether a record has what is needed under a decoding."""
    scores: Callable[[Evidence, Claim, Mapping[str, Any], _Arms], _Arrays] | None = None
    """One score a run of each arm, (seeds,); None: the mean of `problems`."""
    problems: Callable[[Evidence, Claim, Mapping[str, Any], _Arms], _Arrays] | None = None
    """Right answers of each arm, (seeds, problems); None: it has no results on each problem."""
    more_is_better: bool = True
    """Whether an arm with more of it is favoured."""
    at: tuple[str, ...] = ()
    """Where it is taken, for those that need to say it: one of these."""
    unit: str = " %"
    """Behind a mean in words."""
    rate: bool = False
    """Whether a score is 0 or 1: such arms are compared by rate, and no others."""


def curve(record: Record, name: str) -> NDArray[np.float64]:
    """Return a curve as numbers, NaN where a diverged run has none. Raises ValueError where there is no such curve."""
    try:
        return np.array(record["curve"][name], np.float64)
    except KeyError as error:
        raise ValueError(f"a record's curve has no {name!r}") from error


def _key(decoding: str) -> str:
    return "greedy_bits" if decoding == "greedy" else f"{decoding}_counts"


def _test(evidence: Evidence, claim: Claim, measure: Mapping[str, Any], arms: _Arms) -> _Arrays:
    return [accuracy_matrix(arm, measure["test"]) for arm in arms]


def _validation(evidence: Evidence, claim: Claim, measure: Mapping[str, Any], arms: _Arms) -> _Arrays:
    """Read validation accuracy where the arms' means first reach a level, or at the largest budget both reached."""
    found = [[curve(record, f"validation_{measure['validation']}") for record in arm] for arm in arms]
    if "at_mean" in measure:
        reached = [np.mean(arm, axis=0).max() for arm in found]
        if min(reached) < measure["at_mean"]:
            raise Undecided(
                "an arm's mean stays below it, at most " + " and ".join(f"{100 * r:.1f} %" for r in reached)
            )
        return [curves.scores_at_mean(arm, measure["at_mean"])[1] for arm in found]
    spent = [[curve(record, measure["at_equal"]) for record in arm] for arm in arms]
    budget = min(axis[-1] for arm in spent for axis in arm)
    if not budget > 0:  # random fitness generates nothing
        raise Undecided("a run spent nothing")
    if not budget > max(axis[0] for arm in spent for axis in arm):  # of which a warm start may be all that it costs
        raise Undecided("a run spent no more than another one had before its first step")
    return [
        np.array([curves.score_at(*line, budget) for line in zip(axes, scores, strict=True)])
        for axes, scores in zip(spent, found, strict=True)
    ]


def _drawdown(evidence: Evidence, claim: Claim, measure: Mapping[str, Any], arms: _Arms) -> _Arrays:
    name = f"validation_{measure['drawdown']}"
    return [np.array([curves.largest_drawdown(curve(record, name)) for record in arm]) for arm in arms]


def _validated(evidence: Evidence, claim: Claim, measure: Mapping[str, Any], arms: _Arms) -> _Arrays:
    """Read right answers on each validation problem at an equal budget, from decoding records.

    The budget is that of the cheapest run at its end. An arm whose runs end with it, within 5 %, is taken there, and
    another arm at the earlier step at which its decoding records measured it.
    """
    lacking = sum(not _has_validated(record, measure["validated"]) for arm in arms for record in arm)
    if lacking:
        raise Undecided(f"{lacking} runs have no decoding record")
    axis = measure["at_equal"]
    budget = min(curve(record, axis)[-1] for arm in arms for record in arm)
    if not budget > 0:
        raise Undecided("a run spent nothing")
    matrices = []
    for arm in arms:
        ends = np.mean([curve(record, axis)[-1] for record in arm])
        steps = sorted(set.intersection(*(set(record["decoded"]["validation_at"]) for record in arm)))
        if abs(ends / budget - 1) <= _CLOSE:
            blocks = [record["decoded"]["validation"] for record in arm]
        else:
            spent = {step: np.mean([_spent(record, axis, step) for record in arm]) for step in steps}
            step = min(steps, key=lambda step: abs(spent[step] / budget - 1), default=None)
            if step is None or abs(spent[step] / budget - 1) > _CLOSE:
                shares = ", ".join(f"{100 * spent[step] / budget:.0f} % at step {step}" for step in steps)
                raise Undecided(f"an arm was decoded at no step of that budget: {shares or 'at its end alone'}")
            blocks = [record["decoded"]["validation_at"][step] for record in arm]
        matrices.append(accuracy_matrix([{"test": block} for block in blocks], measure["validated"]))
    return matrices


def _spent(record: Record, axis: str, step: int) -> float:
    return float(np.interp(step, curve(record, "step"), curve(record, axis)))


def _has_validated(record: Record, decoding: str) -> bool:
    decoded = record.get("decoded", {"validation": {}, "validation_at": {}})
    return all(_key(decoding) in block for block in (decoded["validation"], *decoded["validation_at"].values()))


def _hacked(evidence: Evidence, claim: Claim, measure: Mapping[str, Any], arms: _Arms) -> _Arrays:
    return [np.array([collapse.end(r, measure["hacked"]) == "hacked" for r in arm], np.float64) for arm in arms]


def _fell(evidence: Evidence, claim: Claim, measure: Mapping[str, Any], arms: _Arms) -> _Arrays:
    """Say of each run whether its right answers on the test questions fell below those of its untrained base."""
    decoding, found = measure["fell"], []
    for arm in arms:
        bases = [evidence.base_of(record) for record in arm]
        if None in bases or not all(decoding in base["test"] for base in bases):
            raise Undecided("the untrained base of a run has no record under this decoding")
        pairs = zip(arm, bases, strict=True)
        found.append(np.array([hacking.fell(r["test"][decoding], b["test"][decoding]) for r, b in pairs], np.float64))
    return found


def _right_at(evidence: Evidence, claim: Claim, measure: Mapping[str, Any], arms: _Arms) -> _Arrays:
    """Read right answers on split B at each run's first point whose proxy reward, or KL, is at the level.

    Runs that never get there are censored; raises Undecided where fewer than the claim's seeds do.
    """
    level = {name: measure[name] for name in MEASURES["right"].at if name in measure}
    matrices = []
    for arm in arms:
        found = [collapse.right_at(record, measure["right"], **level) for record in arm]
        rows = [row for row in found if row is not None]
        if len(rows) < claim["min_seeds"]:
            raise Undecided(f"{len(rows)} of {len(arm)} runs of an arm get there")
        matrices.append(np.array(rows, np.float64))
    return matrices


def _on_curve(*names: str) -> Callable[[Record, str], bool]:
    return lambda record, decoding: all(f"{name}_{decoding}" in record.get("curve", {}) for name in names)


MEASURES: dict[str, Measure] = {
    "test": Measure("test", lambda r, decoding: _key(decoding) in r.get("test", {}), problems=_test),
    "validation": Measure("validation", _on_curve("validation"), _validation, at=("at_equal", "at_mean")),
    "validated": Measure("validation problems", _has_validated, problems=_validated, at=("at_equal",)),
    "drawdown": Measure(
        "largest drawdown of validation", _on_curve("validation"), _drawdown, more_is_better=False, unit=""
    ),
    "right": Measure("right answers", _on_curve("right_bits"), problems=_right_at, at=("at_proxy", "at_kl")),
    "hacked": Measure("hacked runs", _on_curve("proxy", "right"), _hacked, more_is_better=False, rate=True),
    "fell": Measure(
        "runs whose right answers fell",
        lambda r, decoding: decoding in r.get("test", {}),
        _fell,
        more_is_better=False,
        rate=True,
    ),
}
"""What a comparison may take of a run, by the key that declares it."""


AT: dict[str, Callable[[Any], str]] = {
    "at_equal": lambda axis: f"at equal {axis.replace('_', ' ')}",
    "at_proxy": lambda level: f"at proxy {level:g}",
    "at_kl": lambda level: f"at KL {level:g}",
    "at_mean": lambda level: f"at mean {100 * level:g} %",
}
"""Where a measure may be taken, in words."""


def kind_of(measure: Mapping[str, Any]) -> str:
    """Return the key of a declared measure that is one of `MEASURES`."""
    (kind,) = measure.keys() & MEASURES.keys()
    return kind


def measure_of(measure: Mapping[str, Any]) -> Measure:
    """Return the entry of `MEASURES` that a measure is declared by."""
    return MEASURES[kind_of(measure)]


def decoding_of(measure: Mapping[str, Any]) -> str:
    """Return the decoding under which a measure is declared."""
    return measure[kind_of(measure)]


def words(measure: Mapping[str, Any], decoding: bool = True) -> str:
    """Return a measure in words, with or without its decoding.

    >>> words({"right": "t1", "at_kl": 0.5})
    'right answers temperature 1 at KL 0.5'
    """
    told = f" {decoding_words(decoding_of(measure))}" if decoding else ""
    at = [AT[name](measure[name]) for name in AT if name in measure]
    return " ".join([f"{measure_of(measure).words}{told}", *at])


def problems(evidence: Evidence, claim: Claim, measure: Mapping[str, Any], arms: _Arms) -> _Arrays | None:
    """Return right answers of each arm, (seeds, problems), or None where a measure has no results on each problem.

    Raises Undecided where the measure has no value.
    """
    read = measure_of(measure).problems
    return None if read is None else read(evidence, claim, measure, arms)


def scores(evidence: Evidence, claim: Claim, measure: Mapping[str, Any], arms: _Arms) -> _Arrays:
    """Return one score a run of each arm, (seeds,) fractions. Raises Undecided where the measure has no value."""
    kind = measure_of(measure)
    if kind.scores is not None:
        return kind.scores(evidence, claim, measure, arms)
    return [matrix.mean(axis=1) for matrix in kind.problems(evidence, claim, measure, arms)]


def check_measure(where: str, measure: Mapping[str, Any]) -> None:
    """Raise ValueError where a measure is not well declared."""
    levels = {"at_equal?": BUDGETS} | some(AT.keys() - {"at_equal"}, Real)
    check(where, measure, levels | some(MEASURES, DECODINGS))
    kinds = sorted(measure.keys() & MEASURES.keys())
    require(len(kinds) == 1, f"{where}: measure {dict(measure)}: declare one of {', '.join(MEASURES)}")
    wanted, at = MEASURES[kinds[0]].at, [key for key in measure if key not in kinds]
    placed = len(at) == bool(wanted) and set(at) <= set(wanted)
    require(placed, f"{where}: {kinds[0]} is measured {' or '.join(wanted) or 'without a place'}, got {at or 'none'}")
