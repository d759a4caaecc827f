"""Rule "weights": compare the weights of runs, and models made from them.

Each comparison takes a quantity of `quantities.QUANTITIES` for one side, or for two, and compares it with a bound. The
rule names the arm that it favours, which the nulls replace.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import exp
from numbers import Real
from typing import Any

from evoalign_lib.analysis.stats import Interval
from evoalign_study.claims.checks import Schema
from evoalign_study.claims.findings import Finding, Measured, decoding_words, hold, significant, versus
from evoalign_study.claims.quantities import QUANTITIES, Side, check_side, covered, noisy, side_of
from evoalign_study.claims.rules.rule import Asks, Comparison, Rule, as_declared, asked, declared_comparisons, in_place
from evoalign_study.claims.selection import BASE, Case, Claim, Runs


def _find(case: Case) -> Iterator[Finding]:
    """Make every decisive comparison, and those that are only reported."""
    rule = case.rule
    measured = {QUANTITIES[comparison["quantity"]].measured for comparison in rule["comparisons"]}
    if case.null == BASE and not measured <= {covered, noisy}:
        return  # the base has no displacement

    def winner(comparison: Comparison) -> str | None:
        return rule.get("favours") if rule.get("favours") in (side.arm for side in _sides(comparison)) else None

    for comparison, decisive, favoured in asked(case, winner):
        quantity = QUANTITIES[comparison["quantity"]]
        bounds = [side for side in ("above", "below") if side in comparison]
        for decoding in rule["decodings"] if quantity.decoded else ("",):
            if quantity.sampled and decoding == "greedy":
                continue
            finding = _compare(case, comparison, decoding, favoured, decisive)
            for side in bounds:
                bound = exp(comparison[side]) if quantity.unit == "ratio" else comparison[side]  # as it is shown
                label = f"{finding.label}, {side} {bound:.3g}" if len(bounds) > 1 else finding.label
                yield replace(finding, label=label, bound=float(comparison[side]), side=side)


def _sides(comparison: Comparison) -> list[Side]:
    return [side_of(comparison[name]) for name in ("of", "to") if name in comparison]


def _compare(case: Case, comparison: Comparison, decoding: str, favoured: str | None, decisive: bool) -> Finding:
    """Measure one quantity under one decoding, before it is compared with its bounds."""
    quantity, sides = QUANTITIES[comparison["quantity"]], _sides(comparison)
    arms = case.select([side.arm for side in sides], favoured=[favoured] if case.null != BASE else [])
    if case.null == BASE:
        frozen = [run | {"digest": None} for run in arms[favoured].records]
        arms[favoured] = Runs(frozen, f"{len(frozen)} of {BASE}")
    shared = {"evidence": case.evidence, "decoding": decoding}
    sides = [side._replace(runs=arms[side.arm].records, **shared) for side in sides]
    units = quantity.units(sides)
    joint = " over " if quantity.unit == "ratio" else " to " if quantity.sides == (2,) else " - "
    named = [f"{case.name(side.arm, side.arm == favoured)} {side.words}".strip() for side in sides]
    compared = f"{joint.join(named)}, {quantity.words}"
    label = f"{compared} {decoding_words(decoding)}" if decoding else compared
    kept: dict[str, Any] = {"decisive": decisive, "decoding": decoding, "asked": as_declared(comparison)}
    if decoding and 0 in (comparison.get("above"), comparison.get("below")):  # only a bound of 0 orders two sides
        kept["compared"] = compared
    have = f"{label}: {', '.join(runs.have for runs in arms.values())}"
    if not min(units) and all(runs.records for runs in arms.values()):
        have += f", {versus(units)} measured"

    def measure(_: Sequence[Runs]) -> Measured:
        interval = quantity.find(sides)
        return interval, _words(interval, quantity.unit), f"(n = {versus(units)})"

    return hold(label, [*arms.values()], measure, n=min(units), have=have, **kept)


def _words(interval: Interval, unit: str) -> str:
    if unit == "points":
        return f"{interval.format()} points"
    if unit == "ratio":
        interval = replace(interval, value=exp(interval.value), low=exp(interval.low), high=exp(interval.high))
    ends = (interval.value, interval.low, interval.high)
    # more digits if three would write an end like the estimate
    digits = next((n for n in range(3, 7) if len({f"{x:.{n}g}" for x in ends}) == 3), 7)
    return significant(interval, digits)


def _schema(arm: tuple[str, ...]) -> dict[str, Schema]:
    side = partial(check_side, arm)
    comparisons = [{"quantity": QUANTITIES, "of": side, "to?": side, "above?": Real, "below?": Real}]
    return {"comparisons": comparisons, "also?": comparisons, "decodings?": list, "favours?": arm}


def _asks(claim: Claim) -> Asks:
    for comparison, _ in declared_comparisons(claim["rule"]):
        what, n = comparison["quantity"], len(_sides(comparison))
        quantity = QUANTITIES[what]
        yield n in quantity.sides, f"{what} has {n} sides: declare {quantity.sides[0]}"
        yield "decodings" in claim["rule"] or not quantity.decoded, f"{what} depends on the decoding: declare decodings"
        bounded = {"above", "below"} & comparison.keys()
        yield bounded, "a comparison needs a bound: declare that it lies above or below a value, or both"


_CONTROLS = partial(
    in_place,
    quantity=lambda comparison: comparison["quantity"],
    of_pairs=lambda comparison: QUANTITIES[comparison["quantity"]].equal_pairs,
)
WEIGHTS = Rule(_find, _schema, asks=_asks, controls=_CONTROLS, turns=True)
