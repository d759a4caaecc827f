"""Rules "compare" and "interval_above": compare two arms in each cell, by means, rates or spreads.

A comparison is a difference in accuracy over seeds and problems, or in one score per run over seeds. A rule that
declares `decodings` repeats each comparison under each of them; a decoding for which too few runs were measured is
reported and decides nothing. A comparison with a `walk` takes the loss of that arm, which has random fitness, off that
of its first arm. "interval_above" is a single comparison of test accuracy whose findings are labelled by their cells.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import exp, inf
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evoalign_lib.analysis import stats
from evoalign_lib.analysis.stats import Interval
from evoalign_study.claims import run_scores
from evoalign_study.claims.checks import Schema
from evoalign_study.claims.findings import Finding, Measured, defined, hold, mean_interval, sizes, versus
from evoalign_study.claims.rules.rule import Asks, Comparison, Rule, as_declared, asked, declared_comparisons, in_place
from evoalign_study.claims.run_scores import Taken
from evoalign_study.claims.selection import DECODINGS, Case, Claim, Runs, cells, check_one_base
from evoalign_study.records import accuracy_matrix

_Arrays = Sequence[NDArray[np.float64]]


def _find(case: Case) -> Iterator[Finding]:
    """Make, in each cell, every declared comparison, and those that are only reported."""
    rule = case.rule

    def winner_of(comparison: Comparison) -> str | None:
        winner = favoured(comparison) and rule.get("favours", favoured(comparison))
        return winner if winner in (comparison["of"], comparison["to"]) else None

    for cell, where in cells(case.claim):
        for comparison, decisive, winner in asked(case, winner_of):
            for each in _under(comparison, rule.get("decodings", ()) if decisive else ()):
                yield _compare(case, each, cell, where, decisive, winner)
        if "trend" in rule and not case.null:
            yield from _trend(case, where)


def favoured(comparison: Comparison) -> str | None:
    """Return the arm that wins a comparison; None if no arm does, as in a test of equivalence.

    >>> favoured({"measure": {"drawdown": "greedy"}, "of": "grpo", "to": "es", "above": 0})
    'es'
    """
    by = comparison.get("by", "difference")
    if by == "equivalence":
        return None
    more = by != "spread" and Taken.of(comparison["measure"]).measure.more_is_better
    return comparison["of"] if more == ("above" in comparison) else comparison["to"]


def winners(claim: Claim, favoured: Callable[[Comparison], str | None]) -> tuple[str, ...]:
    """Return the arms that win the decisive comparisons of a rule, each once."""
    names = (favoured(comparison) for comparison, decisive in declared_comparisons(claim["rule"]) if decisive)
    return tuple(dict.fromkeys(name for name in names if name))


def _under(comparison: Comparison, decodings: Sequence[str]) -> list[Comparison]:
    """Return a comparison under each decoding, or as it is declared if no decodings are given."""
    measure = comparison["measure"]
    kind, declared, _ = Taken.of(measure)
    return [comparison | {"measure": measure | {kind: each}} for each in decodings or (declared,)]


def _under_other(claim: Claim, decoding: str) -> Claim | None:
    """Return the claim with the decisive comparisons it does not make under a decoding; None if there are none."""
    rule = claim["rule"]
    comparisons = [comparison for comparison, decisive in declared_comparisons(rule) if decisive]
    known = [each for comparison in comparisons for each in _under(comparison, rule.get("decodings", ()))]
    under = [each for comparison in comparisons for each in _under(comparison, (decoding,))]
    others = [each for i, each in enumerate(under) if each not in known + under[:i]]
    return claim | {"rule": {"kind": rule["kind"], "comparisons": others, "decodings": (decoding,)}} if others else None


def _compare(
    case: Case, comparison: Comparison, cell: str, where: Mapping[str, Any], decisive: bool, winner: str | None
) -> Finding:
    """Make one comparison in one cell."""
    taken, by = Taken.of(comparison["measure"]), comparison.get("by", "difference")
    names = [comparison[side] for side in ("of", "to", "walk") if side in comparison]
    among_decodings, alone = decisive and "decodings" in case.rule, case.rule["kind"] == "interval_above"
    joint = " over " if by == "spread" else " - "
    told = "" if alone else joint.join(case.name(name, name == winner) for name in names[:2]) + ","
    told += " less its walk's loss," if "walk" in comparison else ""
    label, compared = (" ".join(filter(None, (cell, told, taken.words(decoding)))) for decoding in (True, False))
    if alone and not among_decodings:
        label = cell

    def measure(arms: Sequence[Runs]) -> Measured:
        check_one_base(label, [record for runs in arms for record in runs.records])
        arrays = taken.measure.read(case, taken, [runs.records for runs in arms])
        scores = [array.mean(axis=1) if array.ndim == 2 else array for array in arrays]
        if arms[1].fixed and arrays[1].ndim == 2:
            arrays = [arrays[0], arrays[1][0]]
        interval, value, before, beside, *test = COMPARED[by](case, comparison, arrays, scores)
        if taken.kind == "right":
            beside += f", {len(scores[0])} v {len(scores[1])} get there"
        return interval, value, f"{before} (n = {versus(sizes(arms))}, {beside})".strip(), *test

    side = next((side for side in ("above", "below") if side in comparison), "within")
    kept = {"bound": float(comparison.get(side, 0)), "side": side, "decisive": decisive, "compared": compared}
    kept |= {
        "asked": f"{cell} {as_declared(comparison)}",
        "decoded": taken.has if among_decodings else None,
        "least": case.claim["min_seeds"],
    }
    arms = case.select(names, where, [winner]).values()
    return hold(label, [*arms], measure, decoding=taken.decoding, **kept)


_Compared = tuple[Interval, str, str, str] | tuple[Interval, str, str, str, float | None]
"""Like `Measured`, with the context in two parts: the level of the second arm, and the words that follow n."""


def _difference(case: Case, comparison: Comparison, arrays: _Arrays, scores: _Arrays) -> _Compared:
    """Compare means over seeds and problems if there are results on each problem, otherwise over seeds."""
    interval = mean_interval(arrays, case.evidence.resamples)
    drawn = 2 * case.evidence.resamples
    test = defined(stats.mann_whitney, *scores, n_resamples=drawn) if "p" in comparison else None
    return interval, f"{interval.format()} points", *_level(comparison, interval, scores), test


def _equivalence(case: Case, comparison: Comparison, arrays: _Arrays, scores: _Arrays) -> _Compared:
    """Test means for equivalence within the claim's margin, by two one-sided tests; see `_difference`."""
    margin = case.claim["margin"]
    if arrays[0].ndim == 2:
        test = defined(stats.equivalence, *arrays, margin, n_resamples=case.evidence.resamples)
    else:
        test = defined(stats.welch_equivalence, *scores, margin)
    value = f"{test.interval.format()} points (90 % interval)"
    if abs(test.interval.value) >= margin:
        value += f", {comparison['of' if test.interval.value > 0 else 'to']} ahead"
    return test.interval, value, *_level(comparison, test.interval, scores), test.p


def _level(comparison: Comparison, interval: Interval, scores: _Arrays) -> tuple[str, str]:
    unit = Taken.of(comparison["measure"]).measure.unit
    return f"from {100 * scores[1].mean():.1f}{unit}", f"detectable {100 * interval.detectable():.1f}"


def _rate(case: Case, comparison: Comparison, arrays: _Arrays, scores: _Arrays) -> _Compared:
    """Compare shares of runs by their difference, with Newcombe's interval and Fisher's test."""
    counts = [count for values in scores for count in (int(values.sum()), len(values))]
    interval, (hits, n, other_hits, other_n) = stats.rate_difference(*counts), counts
    before, beside = f"from {other_hits} of {other_n} to {hits} of {n}", f"detectable {100 * interval.detectable():.0f}"
    return interval, f"{interval.format()} points", before, beside, stats.fisher(*counts)


def _spread(case: Case, comparison: Comparison, arrays: _Arrays, scores: _Arrays) -> _Compared:
    """Compare standard deviations over seeds by the logarithm of their ratio."""
    still = [np.ptp(values) == 0 for values in scores]
    if case.null and still == [True, False]:  # no spread can be smaller than that of a model that never moves
        return Interval(-inf, -inf, -inf, min(map(len, scores))), "0", "", "no spread at all"
    interval = defined(stats.log_std_ratio, *scores)
    ratio, low, high = (f"{exp(x):.2f}" for x in (interval.value, interval.low, interval.high))
    spread, other = (f"{100 * values.std(ddof=1):.2f}" for values in scores)
    beside = f"detectable {exp(-interval.detectable()):.2f}"
    return interval, f"{ratio} [{low}, {high}]", f"from {other} to {spread} points", beside


COMPARED: dict[str, Callable[[Case, Comparison, _Arrays, _Arrays], _Compared]] = {
    "difference": _difference,
    "equivalence": _equivalence,
    "spread": _spread,
    "rate": _rate,
}
"""Ways to compare two arms, each from the arrays read from them and from one score per run."""


def _trend(case: Case, where: Mapping[str, Any]) -> Iterator[Finding]:
    """Report the trend of greedy test accuracy over arms in their declared order, if each has two runs or more."""
    arms = {name: runs.records for name, runs in case.select(case.rule["trend"], where).items()}
    n = min(map(len, arms.values()))
    if n < 2:
        return
    scores = [accuracy_matrix(records, "greedy").mean(axis=1) for records in arms.values()]
    drawn = 2 * case.evidence.resamples
    rise, fall = (stats.jonckheere(each, n_resamples=drawn) for each in (scores, scores[::-1]))
    means = ", ".join(f"{name} {100 * values.mean():.1f} %" for name, values in zip(arms, scores, strict=True))
    value = f"{means}; Jonckheere's p {rise:.2g} of a rise, {fall:.2g} of a fall"
    yield Finding("trend", n, "", None, value=value, decisive=False)


def _schema(arm: tuple[str, ...]) -> dict[str, Schema]:
    compared = {"measure": run_scores.check_measure, "of": arm, "to": arm, "walk?": arm, "by?": COMPARED}
    comparisons = [compared | {"above?": Real, "below?": Real, "p?": ("mann_whitney",)}]
    return {"comparisons": comparisons, "also?": comparisons, "trend?": [arm], "decodings?": list}


def _asks(claim: Claim) -> Asks:
    for comparison, _ in declared_comparisons(claim["rule"]):
        by, bounds = comparison.get("by", "difference"), len({"above", "below"} & comparison.keys())
        if by == "equivalence":
            matches = claim["margin"] > 0 and not bounds
            yield matches, "an equivalence is tested within the claim's margin: declare a positive one, and no bound"
        else:
            yield bounds == 1, "a comparison needs one bound: declare that it lies above or below a value"
        yield "p" not in comparison or by == "difference", "p names a test of a difference only: leave it out"
        walks = Taken.of(comparison["measure"]).measure.walks and by == "difference"
        yield "walk" not in comparison or walks, "a walk's loss is taken off differences of right answers only"
        rate = Taken.of(comparison["measure"]).measure.rate
        yield (by == "rate") == rate, "measures of 0 or 1, such as hacked runs, and only these, are compared by rate"


COMPARE = Rule(
    _find,
    _schema,
    asks=_asks,
    favours=partial(winners, favoured=favoured),
    under=_under_other,
    controls=partial(in_place, quantity=lambda comparison: Taken.of(comparison["measure"]).kind),
    turns=True,
)
INTERVAL_ABOVE = replace(
    COMPARE, schema=lambda arm: {"decoding": DECODINGS}, arms=("treatment", "comparison"), asks=Rule.asks
)
