"""Rules "interaction", "regret", "regrets", "optimum" and "reach": combine the cells of a claim.

The first three take a weighted sum of accuracies over cells with paired seeds, for one arm or as the difference between
two. With a `floor`, an arm must also have learned something: its accuracy, averaged over the cells, must exceed that of
the untrained base by more than the given gain.

"optimum" locates the level of a setting, such as the population, at which the fewest completions reach a target. The
cells are the levels. The target is a share of the best mean greedy validation accuracy at the end over all levels. The
completions to reach it are read from each run's curve, interpolated linearly in the logarithm of completions; a run
that never gets there counts with all that it drew, which favours its level. A quadratic is fitted to their logarithm
over the logarithm of the level, both to base 2. The optimum is its minimum over the range of the levels (an edge, if
the parabola has no minimum inside). The interval comes from a bootstrap over the seeds of each level. If `there` is
declared, there is no optimum unless so many runs of each level reach the target. In addition, the runs must have
learned: all together gain more than `gain` in greedy validation accuracy from their first point.

"reach" takes the completions of one arm over those of another to a gain in validation accuracy over the first point,
and compares this ratio in the last cell with that in the first. A run that never gains so much is censored: it counts
with all that it drew, which bounds the ratio from one side. Nothing is decided where that leaves the bound open.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evoalign_lib.analysis import curves, stats
from evoalign_lib.analysis.stats import Interval
from evoalign_study.claims import checks, selection
from evoalign_study.claims.checks import Schema
from evoalign_study.claims.findings import Finding, Measured, Undecided, decoding_words, hold, significant
from evoalign_study.claims.rules.rule import Asks, Rule, declared_favourites
from evoalign_study.claims.run_scores import MEASURES, curves_of
from evoalign_study.claims.selection import DECODINGS, Case, Claim, Fields, Record, Runs, cells, have_in_cells
from evoalign_study.records import accuracy_matrix, spent_to_gain

Array = NDArray[np.float64]


Weights = Mapping[str, float]
"""Weights of cells, by their labels."""


def _terms(claim: Claim) -> tuple[dict[str, Fields], Weights, Weights]:
    """Return the cells of a weighted sum (label -> spec fields), and their weights in the sum and in the floor.

    Regret is the accuracy of the best setting minus that of the shared one, averaged over cells. Runs are paired by
    seed; if the best setting is the shared one, both are the same runs.
    """
    rule, declared = claim["rule"], dict(cells(claim))
    if "contrast" in rule:
        weights = dict(zip(declared, CONTRASTS[rule["contrast"]](_levels(claim)[0]), strict=True))
        return declared, weights, dict.fromkeys(declared, 1 / len(declared))
    terms, weights = {}, {}
    for (label, where), (name, sign) in product(declared.items(), (("best", 1), ("shared", -1))):
        terms[f"{label} {name}"] = where | {"setting": rule[name]}
        weights[f"{label} {name}"] = sign / len(declared)
    return terms, weights, {label: -weight for label, weight in weights.items() if weight < 0}


def _slope(levels: Sequence[float]) -> list[float]:
    """Return the weights of the accuracies at these levels in the least-squares slope over log10 of the level."""
    x = np.log10(levels) - np.mean(np.log10(levels))
    return list(x / (x @ x))


_RISE = "last less first"
CONTRASTS: dict[str, Callable[[Sequence[float]], list[float]]] = {
    "slope over log10": _slope,
    _RISE: lambda levels: [-1.0, *[0.0] * (len(levels) - 2), 1.0],
}
"""Contrasts over the cells that a rule "interaction" may take for each arm, as the weight of each cell's accuracy."""


def _find(case: Case) -> Iterator[Finding]:
    """Estimate the sum of each arm, or the difference between two arms' sums, under each decoding, and the floor."""
    rule, winners, (terms, weights, in_floor) = case.rule, _winners(case.claim), _terms(case.claim)
    bounds = [((arm,), *bound) for arm, declared in rule.get("bounds", {}).items() for bound in declared.items()]
    compared = bounds or [((rule["of"], rule["to"]), "above", rule["above"])]
    floor = [rule["floor"]["of"]] if "floor" in rule else []
    selected = case.in_cells([*(name for arms, *_ in compared for name in arms), *floor], terms.items(), winners)
    for arms, side, bound in compared:
        for decoding in rule.get("decodings", (rule["decoding"],)):
            if not case.null or set(arms) & set(winners):
                of_arms = {arm: selected[arm] for arm in arms}
                yield _sum(case, of_arms, weights, decoding, bound=float(bound), side=side)
    for arm in floor:
        if not case.null or arm in winners:
            runs = [runs for label, runs in zip(terms, selected[arm], strict=True) if label in in_floor]
            yield _floor(case, arm, runs, in_floor)


def _by_seed(of_cells: Sequence[Runs], unit: str) -> Runs:
    """Return an arm's runs with a row of records, one per cell, for each seed found in all cells."""
    by_seed = [{record["spec"][unit]: record for record in runs.records} for runs in of_cells]
    rows = [[cell[seed] for cell in by_seed] for seed in sorted(set.intersection(*map(set, by_seed)))]
    return Runs(rows, f"{len(rows)} seeds", selection.lacking(of_cells))


def _right(rows: Sequence[Sequence[Record]], decoding: str) -> Array:
    """Return the right answers of rows of runs, (cells, seeds, problems)."""
    right = accuracy_matrix([record for cell in zip(*rows, strict=True) for record in cell], decoding)
    return right.reshape(len(rows[0]), len(rows), -1)


def _weighted(weights: Weights, right: Array) -> Array:
    return np.tensordot([*weights.values()], right, axes=1)


def _sum(case: Case, selected: dict[str, list[Runs]], weights: Weights, decoding: str, **kept: Any) -> Finding:
    """Estimate a weighted sum of accuracies over cells, or its difference between two arms, with paired seeds."""
    names = [case.name(arm, arm in _winners(case.claim)) for arm in selected]
    label = compared = f"{case.rule.get('contrast', 'regret')}, {' - '.join(names)}"

    def measure(arms: Sequence[Runs]) -> Measured:
        of_cells = zip(*(row for arm in arms for row in arm.records), strict=True)
        for cell, records in zip(weights, of_cells, strict=True):
            selection.check_one_base(cell, records)
        right = [_right(arm.records, decoding) for arm in arms]
        sums = [_weighted(weights, each) for each in right]
        interval = stats.crossed_bootstrap(*sums, n_resamples=case.evidence.resamples)
        told = []
        for name, each in zip(names, right, strict=True):
            means = zip(weights, each.mean(axis=(1, 2)), strict=True)
            words = ", ".join(f"{cell} {100 * accuracy:.1f} %" for cell, accuracy in means)
            told.append(f"{name} {words}" if len(names) > 1 else words)
        return interval, f"{interval.format()} points", f"({_counted(interval)}); {'; '.join(told)}"

    if "decodings" in case.rule:
        label, has = f"{compared}, {decoding_words(decoding)}", MEASURES["test"].has
        kept |= {"decoded": lambda row: all(has(run, decoding) for run in row), "least": case.claim["min_seeds"]}
    arms = [_by_seed(runs, case.claim["unit"]) for runs in selected.values()]
    have = have_in_cells(weights, selected.values())
    return hold(label, arms, measure, have=have, decoding=decoding, compared=compared, asked=str([*selected]), **kept)


def _floor(case: Case, name: str, runs: list[Runs], weights: Weights) -> Finding:
    """Estimate an arm's gain over the untrained base, averaged over the cells."""
    floor, decoding = case.rule["floor"], case.rule["decoding"]
    bases = [base for cell in runs if cell.records and (base := case.evidence.base_of(cell.records[0]))]
    arm, have = _by_seed(runs, case.claim["unit"]), have_in_cells(weights, [runs])
    n = len(arm.records) if len(bases) == len(runs) else 0

    def measure(arms: Sequence[Runs]) -> Measured:
        right = _right(arm.records, decoding), _right([bases], decoding)
        summed, (baseline,) = (_weighted(weights, each) for each in right)
        interval = stats.crossed_bootstrap(summed, baseline, n_resamples=case.evidence.resamples)
        return interval, f"{interval.format()} points", f"from {100 * baseline.mean():.1f} % ({_counted(interval)})"

    label = f"gain over {floor['to']}, {case.name(name, name in _winners(case.claim))}"
    have += "" if n else f"; {len(bases)} of base"
    return hold(label, [arm], measure, n=n, have=have, bound=float(floor["above"]), asked="floor")


def _counted(interval: Interval) -> str:
    return f"n = {interval.n}, detectable {100 * interval.detectable():.1f}"


def _winners(claim: Claim) -> tuple[str, ...]:
    """Return the favoured arms: less regret is better, and so is less dependence on what the cells vary.

    For a rise from the first cell to the last, more is better.
    """
    rule = claim["rule"]
    if "favours" in rule:
        return declared_favourites(rule)
    if "bounds" in rule:
        return tuple(arm for arm, bound in rule["bounds"].items() if "below" in bound)
    return (rule["of"] if rule.get("contrast") == _RISE else rule["to"],)


def _learned(claim: Claim) -> Iterator[Claim]:
    """Yield the claim with its floor asked of the comparator."""
    rule = claim["rule"]
    if "floor" in rule:
        (other,) = {*rule.get("bounds", (rule.get("of"), rule.get("to")))} - {rule["floor"]["of"]}
        yield claim | {"rule": rule | {"floor": rule["floor"] | {"of": other}}}


def _under_other(claim: Claim, decoding: str) -> Claim | None:
    """Return the claim with its difference or its regrets under another decoding, and without its floor."""
    rule = claim["rule"]
    if decoding in rule.get("decodings", (rule["decoding"],)):
        return None
    kept = {name: value for name, value in rule.items() if name != "floor"}
    return claim | {"rule": kept | {"decodings": (decoding,)}}


def _levels(claim: Claim) -> tuple[list[Any], bool]:
    """Return what the cells vary, and whether all of it is positive numbers, which have logarithms."""
    levels = [value for _, where in cells(claim) for value in where.values()]
    return levels, all(isinstance(level, Real) and 0 < level < 2**53 for level in levels)


def _asks(claim: Claim) -> Asks:
    rule, (levels, logarithms) = claim["rule"], _levels(claim)
    yield len(levels) > 1, f"a rule of kind {rule['kind']} combines cells: declare at least two"
    yield logarithms or "log" not in rule.get("contrast", ""), f"cells {levels}: a slope over log10 needs positive ones"
    for arm, bound in rule.get("bounds", {}).items():
        yield len(bound) == 1, f"regret of {arm}: declare one bound, either below or above"


def _rule(bounded: bool = False, **own: Schema) -> Rule:
    """Make a kind of rule with an optional floor, for the difference between two arms or for a bound on each arm."""

    def schema(arm: tuple[str, ...]) -> dict[str, Schema]:
        of_two = {"of": arm, "to": arm, "above": Real}
        kept = {"decoding": DECODINGS, "floor?": of_two} | own
        bound = checks.some(("below", "above"), Real)
        return kept | ({"bounds": checks.some(arm, bound)} if bounded else of_two | {"decodings?": list})

    return Rule(_find, schema, asks=_asks, favours=_winners, under=_under_other, controls=_learned, turns=True)


_SETTINGS = {"shared": checks.setting, "best": checks.setting}
INTERACTION = _rule(contrast=CONTRASTS)
REGRET = _rule(**_SETTINGS)
REGRETS = _rule(bounded=True, **_SETTINGS)


# ---- the optimum


def _find_optimum(case: Case) -> list[Finding]:
    """Estimate the optimum, and the gain of all runs."""
    rule, levels = case.rule, cells(case.claim)
    (selected,) = case.in_cells(["searched"], levels, ["searched"], "curve_points").values()
    tried = [(value, runs) for (_, where), runs in zip(levels, selected, strict=True) for value in where.values()]
    if case.null:  # a null has runs at some levels only
        tried = [(level, runs) for level, runs in tried if runs.records]
    groups = [runs.records for _, runs in tried]
    n, have = min(map(len, groups), default=0), ", ".join(runs.have for runs in selected)
    selection.check_one_base("all levels", [record for records in groups for record in records])
    scores = curves_of(groups, "validation_greedy")

    def learned(arms: Sequence[Runs]) -> Measured:
        gains = [np.array([score[-1] - score[0] for score in level]) for level in scores]
        gain = stats.stratified_bootstrap(gains, n_resamples=case.evidence.resamples)
        return gain, f"{gain.format()} points", f"(n = {n} a level)"

    def optimum(arms: Sequence[Runs]) -> Measured:
        target = rule["share"] * max(np.mean([score[-1] for score in level]) for level in scores)
        needed = [
            np.array([curves.spent_until(*each, target) for each in zip(*level, strict=True)])
            for level in zip(curves_of(groups, "completions"), scores, strict=True)
        ]
        there = [sum(score.max() >= target for score in level) for level in scores]
        told = f"{sum(map(len, scores)) - sum(there)} of {sum(map(len, scores))} runs never get there"
        reached = zip(there, (level for level, _ in tried), strict=True)
        if few := [f"{number} with {level}" for number, level in reached if number < rule.get("there", 0)]:
            raise Undecided(f"target {100 * target:.1f} %, {told}; of {n} a level get there {', '.join(few)}")
        best = curves.minimum_interval(np.array([level for level, _ in tried], float), needed, case.evidence.resamples)
        told = f"n = {n} a level, {told}"
        value = f"{best.value:.0f} [{best.low:.0f}, {best.high:.0f}]"
        return best, value, f"(target {100 * target:.1f} %, {told})"

    arms = [runs for _, runs in tried]
    gain = hold("gain", arms, learned, n=n, have=have, bound=float(rule["gain"]))
    if case.null:
        return [gain]
    least, most = rule["between"]
    above = hold(f"optimum above {least:g}", arms, optimum, n=n, have=have, bound=float(least))
    below = replace(above, label=f"optimum below {most:g}", bound=float(most), side="below", context=f"(n = {n})")
    return [above, below, gain]


def _asks_of_optimum(claim: Claim) -> Asks:
    rule, (levels, logarithms) = claim["rule"], _levels(claim)
    yield len(levels) > 2 and logarithms, f"cells {levels}: declare three positive levels or more, for a quadratic."
    share, (least, most) = rule["share"], rule["between"]
    well = 0 < share <= 1 and least < most
    yield well, f"share={share} must lie in (0, 1], and between={[least, most]} must rise."


_LEVELS = {"share": Real, "between": [Real], "gain": Real, "there?": int}
OPTIMUM = Rule(
    _find_optimum, lambda arm: _LEVELS, arms=("searched",), asks=_asks_of_optimum, favours=lambda claim: ("searched",)
)


# ---- completions to a gain


def _find_reach(case: Case) -> Iterator[Finding]:
    """Compare the completions of two arms to a gain, in the last cell over the first."""
    ends, favours = cells(case.claim), declared_favourites(case.rule)
    for comparison in case.rule["comparisons"]:
        names, decoding = (comparison["of"], comparison["to"]), comparison["decoding"]
        if case.null and not set(names) & set(favours):
            continue
        selected = case.in_cells(names, ends, favours, "curve_points")
        of, to = (case.name(name, name in favours) for name in names)
        label = f"{of} over {to}, {ends[-1][0]} over {ends[0][0]}, {decoding_words(decoding)}"
        arms = [selected[name][end] for end in (0, -1) for name in names]
        told = {"bound": float(comparison["below"]), "side": "below", "decoding": decoding, "asked": str(names)}
        yield hold(label, arms, partial(_reached, case, comparison), **told)


def _reached(case: Case, comparison: Mapping[str, Any], arms: Sequence[Runs]) -> Measured:
    """Return the ratio of ratios of completions, of four groups: two arms in the first cell, then in the last."""
    bound, by = comparison["below"], (comparison["decoding"], case.rule["gain"])
    found = [[spent_to_gain(record, *by) for record in runs.records] for runs in arms]
    needed = [np.log2([spent for spent, _ in group]) for group in found]
    censored = [sum(not reached for _, reached in group) for group in found]
    of_first, to_first, of_last, to_last = needed
    half = stats.stratified_bootstrap([of_last, to_first], [to_last, of_first], n_resamples=case.evidence.resamples)
    ratio = Interval(*(4.0**end for end in (half.value, half.low, half.high)), half.n)
    spread = ", ".join(f"{2.0 ** each.mean():,.0f}" for each in needed)
    told = f"(n = {ratio.n}, completions {spread}, of which {', '.join(map(str, censored))} runs never get there)"
    # where the arm is censored in the last cell, or its comparator in the first, the ratio is larger, else smaller
    larger, smaller = censored[2] + censored[1], censored[0] + censored[3]
    if (larger and (smaller or ratio.low <= bound)) or (smaller and ratio.high >= bound):
        raise Undecided(f"{significant(ratio)} or {'more' if larger else 'less'} {told}")
    return ratio, significant(ratio), told


def _reach_schema(arm: tuple[str, ...]) -> dict[str, Schema]:
    comparison = {"of": arm, "to": arm, "decoding": DECODINGS, "below": Real}
    return {"gain": Real, "favours": list, "comparisons": [comparison]}


REACH = Rule(_find_reach, _reach_schema, asks=lambda claim: [(len(cells(claim)) > 1, "declare two cells or more")])
