"""Rules "judged" and "laws": evaluate runs trained on judges by other judges and by the true reward.

Each run was trained on one judge, and the cells of a claim are the training judges. Runs are compared at points along
training where the training judge is equally satisfied: where its score on split A has risen by `gain` times the spread
of its scores over the base's samples. Runs that never get there are censored. Values are interpolated linearly between
two points of a curve, and all cells have the same weight.

A rule that declares `min_judges` takes judges as units: its intervals are over judges and seeds, and with fewer judges,
or one on either side of a contrast, nothing is decided. Each run is then read at both ends of the gap of its curve in
which it gets there, too. The interval reaches over all three readings, so a comparison is decided only if they agree.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evoalign_lib.analysis import overoptimisation, stats
from evoalign_lib.analysis.stats import Interval
from evoalign_study.claims.checks import Schema
from evoalign_study.claims.findings import Finding, Measured, Undecided, decoding_words, defined, hold, there
from evoalign_study.claims.rules.rule import Asks, Comparison, Rule, as_declared, asked, declared_comparisons
from evoalign_study.claims.run_scores import curve
from evoalign_study.claims.selection import Case, Claim, Evidence, Record, Runs, cells, have_in_cells

TRAINING = "training"
"""Stands for the judge that a run was trained on, instead of a name."""
QUANTITIES = {
    "win": ("wins against the base", True),
    "true": ("true reward", False),
    "alternative": ("refusals with an alternative", True),
    "refused_lawful": ("refusals of lawful requests", True),
    "needless": ("needless sentences", False),
    "turns": ("replies with a further turn", True),
    "template": ("share of the largest template", True),
}
"""Curves of a run that a comparison may read: their words, and whether they are shares."""
LAW = {"true": "true reward", "proxy": "score of the training judge"}
"""Quantities that a law may describe, with their words."""

_FEWEST_JUDGES = 4
Array = NDArray[np.float64]


def _find(case: Case) -> Iterator[Finding]:
    """Make every comparison under each decoding, including those only reported, and check the floor."""
    rule = case.rule
    for comparison, decisive, _ in asked(case, lambda comparison: rule.get("favours")):
        selected = _selected(case, (comparison["of"], comparison["to"]))
        for decoding in ("greedy",) if comparison["quantity"] == "template" else rule["decodings"]:
            yield _compare(case, comparison, decoding, decisive, *selected)
    if "floor" in rule:
        yield from _floor(case)


def _selected(case: Case, names: Sequence[str]) -> tuple[list[list[Runs]], str]:
    """Return the runs of arms in every cell, the null replacing the favoured arm, and their numbers in words."""
    where = cells(case.claim)
    arms = [*case.in_cells(names, where, [case.rule.get("favours")], "curve_points").values()]
    return arms, have_in_cells([label for label, _ in where], arms)


def _compare(
    case: Case, comparison: Comparison, decoding: str, decisive: bool, arms: list[list[Runs]], have: str
) -> Finding:
    rule, (words, share) = case.rule, QUANTITIES[comparison["quantity"]]
    comparison = {"gain": rule.get("gain")} | comparison
    names, gain = (comparison["of"], comparison["to"]), comparison["gain"]
    place = "at the end" if gain is None else f"where the training judge has gained {gain:g} spreads"
    told = " - ".join(case.name(name, name == rule.get("favours")) for name in names)
    compared = f"{told}, {words}{_under(comparison)} {place}"
    compared += f", {rule['contrast']}" if "contrast" in rule else ""

    def written(interval: Interval) -> str:
        return interval.format() if share else interval.format(percent=False, digits=2)

    def read(end: int | None = None) -> tuple[list[list[Array]], Interval]:
        values = [[_values(case, runs.records, comparison, decoding, end) for runs in of_cells] for of_cells in arms]
        strata, bootstrap = values, stats.stratified_bootstrap
        if "contrast" in rule:  # the last cell - the first, twice their mean
            strata = [[2 * of_cells[-1], -2 * of_cells[0]] for of_cells in values]
        elif "min_judges" in rule:
            bootstrap = partial(stats.nested_bootstrap, shared=True)
        return values, defined(bootstrap, *strata, n_resamples=case.evidence.resamples)

    def measure(_: Sequence[Runs]) -> Measured:
        values, interval = read()
        _enough_judges(rule, 1 if "contrast" in rule else interval.n, written(interval))
        counts = " v ".join(str(sum(map(len, each))) for each in values) + " runs"
        means = [np.mean([x.mean() for x in each]) for each in values]
        told = " v ".join(f"{100 * mean:.1f}" if share else f"{mean:.2f}" for mean in means)
        if "min_judges" in rule:
            counts += f", {interval.n} judges"
            if gain is not None:
                ends = [read(end)[1] for end in (0, 1)]
                told += f"; {written(interval)} there, {written(ends[0])} before it, {written(ends[1])} past it"
                lows, highs = zip(*((each.low, each.high) for each in (interval, *ends)), strict=True)
                interval = replace(interval, low=min(lows), high=max(highs))
        return interval, written(interval) + " points" * share, f"({told}; {counts})"

    label, bound = f"{compared}, {decoding_words(decoding)}", float(comparison.get("above", 0))
    kept = {"decisive": decisive, "decoding": decoding, "compared": compared, "bound": bound}
    return hold(label, sum(arms, []), measure, have=have, asked=as_declared(comparison), **kept)


def _enough_judges(rule: Comparison, n: int, over_seeds: str) -> None:
    """Raise Undecided if fewer judges stand behind a value than the rule asks for; over_seeds: the value in words."""
    if n < rule.get("min_judges", 0):
        raise Undecided(f"{rule['min_judges']} judges needed, {n} there: over its seeds alone {over_seeds}")


def _under(comparison: Comparison) -> str:
    if comparison["quantity"] != "win":
        return ""
    judge = "the training judge" if comparison["judge"] == TRAINING else comparison["judge"]
    return f" under {judge}" + (" - under the training judge" if comparison.get("less") else "")


def _values(case: Case, runs: list[Record], comparison: Comparison, decoding: str, end: int | None = None) -> Array:
    """Return a quantity of each run that gets to the place of a comparison; end: as for `overoptimisation.read_at`.

    Raises Undecided if fewer runs than the rule requires get there.
    """
    spec, least = runs[0]["spec"], case.claim["min_seeds"]
    least = least if comparison["gain"] is None else min(case.rule["there"], least)
    values = (_value(case.evidence, run, comparison, decoding, end) for run in runs)
    return there(values, least, f"{spec.get('arm')} on {spec['judge']} get there")


def _value(evidence: Evidence, run: Record, comparison: Comparison, decoding: str, end: int | None) -> float | None:
    own, quantity, gain = run["spec"]["judge"], comparison["quantity"], comparison["gain"]
    if quantity == "win":
        quantity = own if comparison["judge"] == TRAINING else comparison["judge"]
    values = curve(run, f"{quantity}_{decoding}")
    if comparison.get("less"):
        values = values - curve(run, f"{own}_{decoding}")
    if gain is None:
        return float(values[-1]) if np.isfinite(values[-1]) else None
    proxy = curve(run, f"proxy_{decoding}")
    return overoptimisation.read_at(proxy, values, proxy[0] + gain * spread(evidence, run), end)


def spread(evidence: Evidence, run: Record) -> float:
    """Return the standard deviation of the scores that a run's training judge gives to samples of its base.

    Raises Undecided if the base has no record of it.
    """
    base = evidence.base_of(run)
    if base is None or "units" not in base:
        raise Undecided("the untrained base has no record of its judges' spreads")
    return base["units"][run["spec"]["judge"]][1]


def _floor(case: Case) -> Iterator[Finding]:
    """Estimate the favoured arm's gain in true reward in the first cell, at the place of the comparisons."""
    rule, first = case.rule, cells(case.claim)[0][0]
    arm, other = rule["favours"], rule["comparisons"][0]["to"]
    arms, have = _selected(case, (arm, other))
    runs = arms[0][0].records

    def measure(decoding: str, _: Sequence[Runs]) -> Measured:
        start = np.mean([curve(run, f"true_{decoding}")[0] for run in runs])
        gained = _values(case, runs, {"quantity": "true", "gain": rule.get("gain")}, decoding) - start
        interval = defined(stats.stratified_bootstrap, [gained], n_resamples=case.evidence.resamples)
        _enough_judges(rule, 1, interval.format(percent=False, digits=2))
        return interval, interval.format(percent=False, digits=2), f"(n = {len(gained)})"

    for decoding in rule["decodings"]:
        label = f"{case.name(arm, True)} - base, true reward on {first}, {decoding_words(decoding)}"
        kept: dict[str, Any] = {"decoding": decoding, "bound": float(rule["floor"]), "asked": "floor"}
        # a floor accompanies a comparison: without runs of the other arm there is none to make
        yield hold(label, [each[0] for each in arms], partial(measure, decoding), n=len(runs), have=have, **kept)


def _learned(claim: Claim) -> Iterator[Claim]:
    """Yield the claim with its floor asked of the comparator."""
    rule = claim["rule"]
    if "floor" in rule:
        yield claim | {"rule": rule | {"favours": next(arm for arm in claim["arms"] if arm != rule["favours"])}}


def _schema(arm: tuple[str, ...]) -> dict[str, Schema]:
    kept = {"quantity": QUANTITIES, "of": arm, "to": arm, "judge?": str, "less?": bool, "above?": Real, "gain?": Real}
    place = {"gain?": Real, "there?": int, "contrast?": ("last - first",), "floor?": Real, "min_judges?": int}
    return place | {"comparisons": [kept], "also?": [kept], "decodings": list, "favours?": arm}


def _asks(claim: Claim) -> Asks:
    both = ("gain" in claim["rule"]) == ("there" in claim["rule"])
    yield both, "declare both gain (where runs are compared) and there (how many must get there), or neither"
    few = f"min_judges {claim['rule'].get('min_judges')}: declare {_FEWEST_JUDGES} or more"
    yield "floor" not in claim["rule"] or "favours" in claim["rule"], "declare in favours the arm that the floor is of"
    yield "floor" not in claim["rule"] or claim["rule"]["comparisons"], "a floor needs a comparison: declare one"
    yield claim["rule"].get("min_judges", _FEWEST_JUDGES) >= _FEWEST_JUDGES, few
    for comparison, _ in declared_comparisons(claim["rule"]):
        judged = ("judge" in comparison) == (comparison["quantity"] == "win")
        yield judged, "only wins are counted under a judge: declare one for wins, and none for other quantities"


# ---- laws


def _find_laws(case: Case) -> Iterator[Finding]:
    """Estimate how much of held-out runs the law explains, and how much more than a straight line does.

    The law is fitted to a cell's runs with even seeds and evaluated on those with odd seeds, which are resampled. How
    much it explains of the other arm is reported.
    """
    rule = case.rule
    arms, have = _selected(case, (rule["of"], rule["beside"]))
    sides = [(rule["of"], arms[0], True), (rule["beside"], arms[1], False)][: 1 if case.null else 2]
    for (arm, runs, decisive), quantity in product(sides, (quantity for quantity in LAW if quantity in rule["about"])):
        for less, bound in ((None, rule["above"]), ("linear", 0.0)):
            what = f"{LAW[quantity]}, share explained by {rule['law']}" + (f" - by {less}" if less else "")
            label = f"{case.name(arm, decisive)}, {what}"
            kept: dict[str, Any] = {"decoding": "t1", "bound": float(bound), "compared": label, "asked": what}
            laws = (rule["law"], less) if less else (rule["law"],)
            measure = partial(_explained, case.evidence, quantity, laws)
            yield hold(label, runs, measure, have=have, decisive=decisive, **kept)


def _explained(evidence: Evidence, quantity: str, laws: Sequence[str], cells: Sequence[Runs]) -> Measured:
    """Return R squared on the odd seeds, averaged over cells and resampled; minus that of a second law, if given."""
    points = [law_points(runs.records, quantity, partial(spread, evidence)) for runs in cells]
    if any(len(half) < 2 for halves in points for half in halves):
        raise Undecided("a half of the seeds has fewer than two runs")

    # the law does not depend on which odd seeds are drawn: fit it once, then add up their sums of squares
    squares = []
    for fitted, held_out in points:
        pooled = [np.concatenate(column) for column in zip(*fitted, strict=True)]
        squares.append([_squares(overoptimisation.fit(law, *pooled), held_out) for law in laws])

    rng, resamples = np.random.default_rng(0), min(evidence.resamples, 1000)
    odd = [len(held_out) for _, held_out in points]
    drawn = [[np.arange(n) for n in odd], *([rng.integers(n, size=n) for n in odd] for _ in range(resamples))]
    gained = []
    for of_laws, runs in zip(squares, zip(*drawn, strict=True), strict=True):
        first, *rest = (_r_squared(of_law[np.array(runs)]) for of_law in of_laws)
        gained.append(first - sum(rest))
    value, *draws = np.mean(gained, axis=0)
    if not np.isfinite([value, *draws]).all():
        raise Undecided("a run has gained the same everywhere")
    interval = stats.interval_of(value, draws, min(odd))
    return interval, interval.format(percent=False, digits=2), f"(n = {min(len(r.records) for r in cells)} a judge)"


def _squares(law: overoptimisation.Fit, runs: Sequence[tuple[Array, Array]]) -> Array:
    """Return each run's number of points, and the sum, sum of squares and residual squares of gains, (runs, 4)."""
    return np.array([[len(g), g.sum(), (g**2).sum(), ((g - law.at(d)) ** 2).sum()] for d, g in runs])


def _r_squared(of_runs: Array) -> Array:
    """Return `overoptimisation.explained` over all points of the runs, (..., runs, 4); NaN if all gains are equal."""
    n, total, squares, left = np.moveaxis(of_runs.sum(axis=-2), -1, 0)
    around = squares - total**2 / n
    none = (around <= 1e-12 * squares) | (squares == 0)
    return np.where(none, np.nan, 1 - left / np.where(none, 1.0, around))


Points = list[tuple[Array, Array]]
"""Distance from the base and gain along each run."""


def law_points(runs: Iterable[Record], quantity: str, spread: Callable[[Record], float]) -> tuple[Points, Points]:
    """Return the finite points of runs at temperature 1, first for even seeds, then for odd ones.

    spread: returns the spread of a run's training judge over samples of its base: the unit of gains in "proxy".
    """
    halves: tuple[Points, Points] = ([], [])
    for run in runs:
        values, kl = curve(run, f"{quantity}_t1"), curve(run, "kl")
        known = np.isfinite(values) & np.isfinite(kl)
        gain = (values - values[0]) / (spread(run) if quantity == "proxy" else 1.0)
        halves[run["spec"]["seed"] % 2].append((overoptimisation.distance(kl[known]), gain[known]))
    return halves


def _schema_of_laws(arm: tuple[str, ...]) -> dict[str, Schema]:
    sides = dict.fromkeys(("of", "beside", "favours"), arm)
    return sides | {"law": overoptimisation.LAWS[1:], "about": [LAW], "above": Real}


def _of_the_other(claim: Claim) -> Iterator[Claim]:
    """Yield the claim with its law asked of the arm beside."""
    of, beside = claim["rule"]["of"], claim["rule"]["beside"]
    yield claim | {"rule": claim["rule"] | {"of": beside, "beside": of, "favours": beside}}


JUDGED = Rule(_find, _schema, asks=_asks, controls=_learned, turns=True)
LAWS = Rule(_find_laws, _schema_of_laws, controls=_of_the_other)
