"""Rules "judged" and "laws": runs on training judges, by what other judges and the truth say of them.

A run was trained on one judge, and the cells of a claim are the training judges. Comparisons are made along the runs,
where the training judge is equally content: where its score of split A has risen by `gain` times the spread of its
scores over the base's samples. Runs that never get there are censored. Values are read on the line between two points
of a curve, and cells weigh the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evoalign_lib.analysis import overoptimisation, stats
from evoalign_lib.analysis.arrays import require
from evoalign_lib.analysis.stats import Interval
from evoalign_study.claims.checks import Schema
from evoalign_study.claims.findings import Finding, Measured, Undecided, decoding_words, defined, hold
from evoalign_study.claims.rules.comparisons import declared_comparisons
from evoalign_study.claims.rules.rule import Rule
from evoalign_study.claims.run_scores import curve
from evoalign_study.claims.selection import Claim, Evidence, Record, cells, lacking

TRAINING = "training"
"""The judge that a run was trained on, in the place of a name."""
QUANTITIES = {
    "win": ("wins against the base", True),
    "true": ("true reward", False),
    "alternative": ("refusals with an alternative", True),
    "refused_lawful": ("refusals of lawful requests", True),
    "needless": ("needless sentences", False),
    "turns": ("replies with a further turn", True),
    "template": ("share of the largest template", True),
}
"""Curves of a run that a comparison may take: in words, and whether they are shares."""
LAW = {"true": "true reward", "proxy": "score of the training judge"}
"""What a law may be about."""

_Arms = dict[str, list[list[Record]]]
"""Arm -> the runs of each cell."""


def _find(claim: Claim, evidence: Evidence) -> list[Finding]:
    """Find every comparison under each decoding, those that are only reported, and the floor."""
    rule, found = claim["rule"], []
    for comparison, decisive in declared_comparisons(rule):
        if evidence.null and not decisive:
            continue
        arms, have, lacks = _selected(claim, evidence, (comparison["of"], comparison["to"]))
        for decoding in ("greedy",) if comparison["quantity"] == "template" else rule["decodings"]:
            kept = {"decisive": decisive, "lacks": lacks}
            found.append(_compare(claim, evidence, comparison, decoding, arms, have, kept))
    return found + (_floor(claim, evidence) if "floor" in rule else [])


def _selected(claim: Claim, evidence: Evidence, names: Sequence[str]) -> tuple[_Arms, str, str]:
    """Return the runs of arms in every cell, the null in the place of the favoured one; their numbers; what lacks."""
    favoured, where = claim["rule"].get("favours"), cells(claim)
    instead = favoured if favoured in names else None
    by_cell = [evidence.select_pair(claim, names, fields, instead, apart=("curve_points",)) for _, fields in where]
    arms = {name: [found[i].records for found in by_cell] for i, name in enumerate(names)}
    have = "; ".join(
        f"{label}: {', '.join(found.have for found in each)}" for (label, _), each in zip(where, by_cell, strict=True)
    )
    return arms, have, lacking(found for each in by_cell for found in each)


def _compare(
    claim: Claim,
    evidence: Evidence,
    comparison: Mapping[str, Any],
    decoding: str,
    arms: _Arms,
    have: str,
    kept: dict[str, Any],
) -> Finding:
    rule, (words, share) = claim["rule"], QUANTITIES[comparison["quantity"]]
    of, to = (evidence.name(claim, comparison[side], comparison[side] == rule.get("favours")) for side in ("of", "to"))
    gain = _gain(claim, comparison)
    place = "at the end" if gain is None else f"where the training judge has gained {gain:g} spreads"
    compared = f"{of} - {to}, {words}{_under(comparison)} {place}"
    compared += f", {rule['contrast']}" if "contrast" in rule else ""

    def measure() -> Measured:
        values = {
            name: [_values(claim, evidence, runs, comparison, decoding) for runs in each] for name, each in arms.items()
        }
        interval = _difference(rule, values[comparison["of"]], values[comparison["to"]], evidence.resamples)
        text = f"{interval.format()} points" if share else interval.format(percent=False, digits=2)
        there = " v ".join(str(sum(map(len, each))) for each in values.values())
        means = [np.mean([x.mean() for x in each]) for each in values.values()]
        told = " v ".join(f"{100 * mean:.1f}" if share else f"{mean:.2f}" for mean in means)
        return interval, text, f"({told}; {there} runs)"

    n = min(len(runs) for each in arms.values() for runs in each)
    kept = kept | {"decoding": decoding, "compared": compared, "bound": float(comparison.get("above", 0))}
    return hold(f"{compared}, {decoding_words(decoding)}", n, have, measure, **kept)


def _gain(claim: Claim, comparison: Mapping[str, Any]) -> float | None:
    """Return the gain of the training judge at which runs are compared; None: at their ends."""
    return comparison.get("gain", claim["rule"].get("gain"))


def _under(comparison: Mapping[str, Any]) -> str:
    if comparison["quantity"] != "win":
        return ""
    judge = comparison["judge"]
    less = " - under the training judge" if comparison.get("less") else ""
    return f" under {'the training judge' if judge == TRAINING else judge}{less}"


def _difference(
    rule: Mapping[str, Any], of: list[NDArray[np.float64]], to: list[NDArray[np.float64]], resamples: int
) -> Interval:
    """Return the difference of two arms, mean over the cells; with a contrast, that of the last cell - the first."""
    if "contrast" not in rule:
        return defined(stats.stratified_bootstrap, of, to, n_resamples=resamples)
    found = defined(stats.stratified_bootstrap, [of[-1], -of[0]], [to[-1], -to[0]], n_resamples=resamples)
    return Interval(2 * found.value, 2 * found.low, 2 * found.high, found.n, found.level)


def _values(
    claim: Claim, evidence: Evidence, runs: list[Record], comparison: Mapping[str, Any], decoding: str
) -> NDArray[np.float64]:
    """Return a quantity of each run that gets to the place of a comparison.

    Raises Undecided where fewer do than the rule asks for.
    """
    gain = _gain(claim, comparison)
    found = [_value(evidence, run, comparison, decoding, gain) for run in runs]
    there = [value for value in found if value is not None]
    least = claim["min_seeds"] if gain is None else min(claim["rule"]["there"], claim["min_seeds"])
    if len(there) < least:
        arm, judge = runs[0]["spec"].get("arm"), runs[0]["spec"]["judge"]
        raise Undecided(f"{len(there)} of {len(runs)} runs of {arm} on {judge} get there")
    return np.array(there)


def _value(
    evidence: Evidence, run: Record, comparison: Mapping[str, Any], decoding: str, gain: float | None
) -> float | None:
    own = run["spec"]["judge"]
    if comparison["quantity"] == "win":
        judge = own if comparison["judge"] == TRAINING else comparison["judge"]
        values = curve(run, f"{judge}_{decoding}")
        if comparison.get("less"):
            values = values - curve(run, f"{own}_{decoding}")
    else:
        values = curve(run, f"{comparison['quantity']}_{decoding}")
    if gain is None:
        return float(values[-1]) if np.isfinite(values[-1]) else None
    proxy = curve(run, f"proxy_{decoding}")
    level = proxy[0] + gain * spread(evidence, run)
    return overoptimisation.read_at(proxy, values, level)


def spread(evidence: Evidence, run: Record) -> float:
    """Return the standard deviation of a run's training judge over samples of its base.

    Raises Undecided where the base has no record.
    """
    base = evidence.base_of(run)
    if base is None or "units" not in base:
        raise Undecided("the untrained base has no record of its judges' spreads")
    return base["units"][run["spec"]["judge"]][1]


def _floor(claim: Claim, evidence: Evidence) -> list[Finding]:
    """Find what the favoured arm has gained in true reward, in the first cell, where the comparisons are made."""
    rule, found = claim["rule"], []
    arm, other = rule["favours"], rule["comparisons"][0]["to"]
    arms, have, lacks = _selected(claim, evidence, (arm, other))
    # a floor stands beside a comparison: without runs to compare with nothing is asked
    runs, first = arms[arm][0] if arms[other][0] else [], cells(claim)[0][0]

    def measure(decoding: str) -> Measured:
        there = _values(claim, evidence, runs, {"quantity": "true"}, decoding)
        gained = there - np.mean([curve(run, f"true_{decoding}")[0] for run in runs])
        interval = defined(stats.stratified_bootstrap, [gained], n_resamples=evidence.resamples)
        return interval, interval.format(percent=False, digits=2), f"(n = {len(gained)})"

    for decoding in rule["decodings"]:
        label = f"{evidence.name(claim, arm, True)} - base, true reward on {first}, {decoding_words(decoding)}"
        kept: dict[str, Any] = {"decoding": decoding, "bound": float(rule["floor"]), "lacks": lacks}
        found.append(hold(label, len(runs), have, partial(measure, decoding), **kept))
    return found


def _schema(arm: tuple[str, ...]) -> dict[str, Schema]:
    kept = {"quantity": QUANTITIES, "of": arm, "to": arm, "judge?": str, "less?": bool, "above?": Real, "gain?": Real}
    place = {"gain?": Real, "there?": int, "contrast?": ("last - first",), "floor?": Real}
    return place | {"comparisons": [kept], "also?": [kept], "decodings": list, "favours?": arm}


def _check(claim: Claim) -> None:
    rule, name = claim["rule"], f"claim {claim['id']}"
    both = ("gain" in rule) == ("there" in rule)
    require(both, f"{name}: gain says where runs are compared, there how many must get there: declare both")
    for comparison, _ in declared_comparisons(rule):
        judged = ("judge" in comparison) == (comparison["quantity"] == "win")
        require(judged, f"{name}: wins are under a judge, and nothing else is: declare it, or leave it out")


# ---- laws


def _find_laws(claim: Claim, evidence: Evidence) -> list[Finding]:
    """Find how much of held-out runs the law explains, and how much more than a straight line does.

    The law is fitted to the runs of even seeds of a cell, and asked of those of odd seeds, which are resampled. What it
    explains of the other arm is reported.
    """
    rule, found = claim["rule"], []
    arms, have, lacks = _selected(claim, evidence, (rule["of"], rule["beside"]))
    asked = [(rule["of"], True), *([] if evidence.null else [(rule["beside"], False)])]
    for (arm, decisive), quantity in product(asked, (quantity for quantity in LAW if quantity in rule["about"])):
        n = min(len(runs) for runs in arms[arm])
        for less, bound in ((None, rule["above"]), ("linear", 0.0)):
            what = f"{LAW[quantity]}, share explained by {rule['law']}" + (f" - by {less}" if less else "")
            label = f"{evidence.name(claim, arm, decisive)}, {what}"
            kept: dict[str, Any] = {"decoding": "t1", "bound": float(bound), "compared": label, "decisive": decisive}
            measure = partial(_explained, arms[arm], quantity, rule["law"], less, evidence)
            found.append(hold(label, n, have, measure, lacks=lacks, **kept))
    return found


def _explained(of_cells: list[list[Record]], quantity: str, law: str, less: str | None, evidence: Evidence) -> Measured:
    """Return the mean over cells of R squared on the odd seeds, resampled; less that of another law."""
    points = [
        {parity: [_points(evidence, r, quantity) for r in runs if r["spec"]["seed"] % 2 == parity] for parity in (0, 1)}
        for runs in of_cells
    ]
    if any(len(half) < 2 for each in points for half in each.values()):
        raise Undecided("a half of the seeds has fewer than two runs")

    # the law does not depend on which of the odd seeds are drawn: it is fitted once, and their squares are added up
    laws = (law, less) if less else (law,)
    squares = [[_squares(overoptimisation.fit(name, *_pooled(each[0])), each[1]) for name in laws] for each in points]

    rng, resamples = np.random.default_rng(0), min(evidence.resamples, 1000)
    chosen = [[rng.integers(len(each[1]), size=len(each[1])) for each in points] for _ in range(resamples)]

    def mean(chosen: Sequence[Any]) -> NDArray[np.float64]:
        values = [
            [_r_squared(of_law[indices]) for of_law in each] for each, indices in zip(squares, chosen, strict=True)
        ]
        return np.mean([first - sum(rest) for first, *rest in values], axis=0)

    draws = mean([np.array(of_cell) for of_cell in zip(*chosen, strict=True)])
    value = float(mean([slice(None)] * len(points)))
    if not np.isfinite([value, *draws]).all():
        raise Undecided("a run has gained the same everywhere")
    low, high = np.quantile(draws, [0.025, 0.975])
    interval = Interval(value, float(low), float(high), min(len(each[1]) for each in points), 0.95)
    return interval, interval.format(percent=False, digits=2), f"(n = {min(map(len, of_cells))} a judge)"


def _pooled(runs: Sequence[tuple[NDArray[np.float64], NDArray[np.float64]]]) -> list[NDArray[np.float64]]:
    return [np.concatenate(column) for column in zip(*runs, strict=True)]


def _squares(
    law: overoptimisation.Fit, runs: Sequence[tuple[NDArray[np.float64], NDArray[np.float64]]]
) -> NDArray[np.float64]:
    """Return of each run its points, sum and squares of their gains, and squares that the law leaves; (runs, 4)."""
    return np.array([[len(g), g.sum(), (g**2).sum(), ((g - law.at(d)) ** 2).sum()] for d, g in runs])


def _r_squared(of_runs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return `overoptimisation.explained` of all points of some runs, (..., runs, 4); NaN where all gains are equal."""
    n, total, squares, left = np.moveaxis(of_runs.sum(axis=-2), -1, 0)
    around = squares - total**2 / n
    none = (around <= 1e-12 * squares) | (squares == 0)
    return np.where(none, np.nan, 1 - left / np.where(none, 1.0, around))


def _points(evidence: Evidence, run: Record, quantity: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return distance and gain at temperature 1 of the points of a run that are finite."""
    values, kl = curve(run, f"{quantity}_t1"), curve(run, "kl")
    known = np.isfinite(values) & np.isfinite(kl)
    gain = values - values[0]
    return overoptimisation.distance(kl[known]), gain[known] / (spread(evidence, run) if quantity == "proxy" else 1.0)


def _schema_of_laws(arm: tuple[str, ...]) -> dict[str, Schema]:
    sides = dict.fromkeys(("of", "beside", "favours"), arm)
    return sides | {"law": overoptimisation.LAWS[1:], "about": [LAW], "above": Real}


JUDGED = Rule(_find, _schema, check=_check)
LAWS = Rule(_find_laws, _schema_of_laws)
