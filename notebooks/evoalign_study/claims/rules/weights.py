"""Rule "weights": what the weights of runs say, and models that are made of them.

Each comparison takes a quantity of `quantities.QUANTITIES` of one side, or of two, and holds it against a bound. The
rule names the arm that it favours, in whose place the nulls are put.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import exp
from numbers import Real
from typing import Any

from evoalign_lib.analysis.arrays import require
from evoalign_lib.analysis.stats import Interval
from evoalign_study.claims.checks import Schema
from evoalign_study.claims.findings import Finding, Measured, decoding_words, hold
from evoalign_study.claims.quantities import QUANTITIES, Chosen, Quantity, Side, check_side, side_of
from evoalign_study.claims.rules.comparisons import declared_comparisons
from evoalign_study.claims.rules.rule import Rule
from evoalign_study.claims.selection import BASE, Claim, Evidence, Runs, lacking

_Comparison = Mapping[str, Any]


def _find(claim: Claim, evidence: Evidence) -> list[Finding]:
    """Find every comparison, and those that are only reported."""
    rule, findings = claim["rule"], []
    asked = [QUANTITIES[each["quantity"]] for each in rule["comparisons"]]
    if evidence.null == BASE and not all(quantity.of_base for quantity in asked):  # it has no displacement
        return []
    for comparison, decisive in declared_comparisons(rule):
        arms = {side.arm for side in _sides(comparison)}
        if evidence.null and not (decisive and rule.get("favours") in arms):
            continue
        quantity = QUANTITIES[comparison["quantity"]]
        bounds = [side for side in ("above", "below") if side in comparison]
        for decoding in rule["decodings"] if quantity.decoded else ("",):
            if quantity.sampled and decoding == "greedy":
                continue
            found = _compare(claim, evidence, comparison, quantity, decoding, decisive)
            for side in bounds:
                label = f"{found.label}, {side} {comparison[side]:g}" if len(bounds) > 1 else found.label
                findings.append(replace(found, label=label, bound=float(comparison[side]), side=side))
    return findings


def _sides(comparison: _Comparison) -> list[Side]:
    return [side_of(comparison[name]) for name in ("of", "to") if name in comparison]


def _compare(
    claim: Claim, evidence: Evidence, comparison: _Comparison, quantity: Quantity, decoding: str, decisive: bool
) -> Finding:
    """Find one quantity under one decoding, before it is held against its bounds."""
    favoured, sides = claim["rule"].get("favours"), _sides(comparison)
    selected = {name: evidence.select(claim, name, {}) for name in dict.fromkeys(side.arm for side in sides)}
    if evidence.null == BASE and favoured in selected:
        frozen = [run | {"digest": None} for run in selected[favoured].records]
        selected[favoured] = Runs(frozen, f"{len(frozen)} of {BASE}")
    elif evidence.null and favoured in selected:
        beside = [selected[favoured].records, *(found.records for found in selected.values())]
        seeds = claim["arms"][favoured].get("seeds")
        selected[favoured] = evidence.stand_in(beside, claim["unit"], *([seeds] if seeds else []))
    named = [f"{evidence.name(claim, side.arm, side.arm == favoured)} {side.words}".strip() for side in sides]
    joint = " over " if quantity.unit == "ratio" else " to " if quantity.sides == (2,) else " - "
    compared = f"{joint.join(named)}, {quantity.words}"
    label = f"{compared} {decoding_words(decoding)}" if decoding else compared
    kept: dict[str, Any] = {"decisive": decisive, "decoding": decoding}
    if decoding and 0 in (comparison.get("above"), comparison.get("below")):  # another bound is no order of two sides
        kept["compared"] = compared
    have = f"{label}: {', '.join(found.have for found in selected.values())}"
    if not all(found.records for found in selected.values()):
        return Finding(label, 0, have, None, lacks=lacking(selected.values()), **kept)
    chosen = [Chosen(side, selected[side.arm].records) for side in sides]
    units = quantity.units(evidence, chosen)
    counts = " v ".join(map(str, dict.fromkeys(units)))

    def measure() -> Measured:
        interval = quantity.find(evidence, chosen, decoding)
        return interval, _words(interval, quantity.unit), f"(n = {counts})"

    n = min(units)
    return hold(label, n, have if n else f"{have}, {counts} measured", measure, **kept)


def _words(interval: Interval, unit: str) -> str:
    if unit == "points":
        return f"{interval.format()} points"
    ends = [exp(x) if unit == "ratio" else x for x in (interval.value, interval.low, interval.high)]
    texts: list[str] = []
    for digits in range(3, 8):  # more where three would write an end as the estimate
        texts = [f"{x:.{digits}g}" for x in ends]
        if len(set(texts)) == 3:
            break
    return f"{texts[0]} [{texts[1]}, {texts[2]}]"


def _schema(arm: tuple[str, ...]) -> dict[str, Schema]:
    side = partial(check_side, arm)
    comparisons = [{"quantity": QUANTITIES, "of": side, "to?": side, "above?": Real, "below?": Real}]
    return {"comparisons": comparisons, "also?": comparisons, "decodings?": list, "favours?": arm}


def _check(claim: Claim) -> None:
    rule, name = claim["rule"], f"claim {claim['id']}"
    for comparison, _ in declared_comparisons(rule):
        what, quantity, n = comparison["quantity"], QUANTITIES[comparison["quantity"]], len(_sides(comparison))
        require(n in quantity.sides, f"{name}: {what} has {n} sides, it needs {quantity.sides[0]}")
        decoded = "decodings" in rule or not quantity.decoded
        require(decoded, f"{name}: {what} depends on the decoding: declare decodings")
        bounded = {"above", "below"} & comparison.keys()
        require(bounded, f"{name}: a comparison lies above or below a value, or between two: declare them")


WEIGHTS = Rule(_find, _schema, check=_check)
