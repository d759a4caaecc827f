"""Rule "weights": what the weights of runs say, and models that are made of them.

Each comparison takes a quantity of `quantities.QUANTITIES` of one side, or of two, and holds it against a bound. The
rule names the arm that it favours, in whose place the nulls are put.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import exp
from typing import Any

from evoalign_lib.analysis.stats import Interval
from evoalign_study.claims.checks import check_keys, check_named
from evoalign_study.claims.findings import Finding, Undecided, decoding_words
from evoalign_study.claims.quantities import QUANTITIES, Chosen, Quantity, check_side, side_of
from evoalign_study.claims.rules.comparisons import check_decodings
from evoalign_study.claims.rules.rule import Rule
from evoalign_study.claims.selection import BASE, Claim, Evidence, Runs, lacking

_Comparison = Mapping[str, Any]


def _find(claim: Claim, evidence: Evidence) -> list[Finding]:
    """Find every comparison, and those that are only reported."""
    rule, findings = claim["rule"], []
    asked = [QUANTITIES[each["quantity"]] for each in rule["comparisons"]]
    if evidence.null == BASE and not all(quantity.of_base for quantity in asked):  # it has no displacement
        return []
    declared = [(each, True) for each in rule["comparisons"]]
    declared += [(each | {"above": 0}, False) for each in rule.get("also", ())]
    for comparison, decisive in declared:
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


def _sides(comparison: _Comparison) -> list:
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
    joint = " to " if quantity.sides == (2,) and quantity.unit != "ratio" else " - "
    compared = f"{(' over ' if quantity.unit == 'ratio' else joint).join(named)}, {quantity.words}"
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
    if not min(units):
        return Finding(label, 0, f"{have}, {counts} measured", None, **kept)
    try:
        interval = quantity.find(evidence, chosen, decoding)
    except Undecided as error:
        return Finding(label, min(units), have, None, value="not defined", context=f"({error})", **kept)
    return Finding(
        label, min(units), have, interval, value=_words(interval, quantity.unit), context=f"(n = {counts})", **kept
    )


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


def _check(claim: Claim) -> None:
    rule, name = claim["rule"], f"claim {claim['id']}"
    check_decodings(claim)
    for comparison in [*rule["comparisons"], *rule.get("also", ())]:
        check_keys(f"{name}, comparison", comparison, ("quantity", "of"), ("to", "above", "below"))
        if comparison["quantity"] not in QUANTITIES:
            raise ValueError(f"{name}: unknown quantity {comparison['quantity']!r}; known: {', '.join(QUANTITIES)}")
        quantity = QUANTITIES[comparison["quantity"]]
        for side in ("of", "to"):
            if side in comparison:
                check_side(name, comparison[side])
        sides = _sides(comparison)
        check_named(claim, [side.arm for side in sides])
        if len(sides) not in quantity.sides:
            raise ValueError(f"{name}: {comparison['quantity']} has {len(sides)} sides, it needs {quantity.sides[0]}")
        if quantity.decoded and "decodings" not in rule:
            raise ValueError(f"{name}: {comparison['quantity']} depends on the decoding: declare decodings")
    for comparison in rule["comparisons"]:
        if not {"above", "below"} & comparison.keys():
            raise ValueError(f"{name}: a comparison lies above or below a value, or between two: declare them")
    if "favours" in rule:
        check_named(claim, [rule["favours"]])


def _favours(claim: Claim) -> tuple[str, ...]:
    return (claim["rule"]["favours"],) if "favours" in claim["rule"] else ()


WEIGHTS = Rule(_find, ("comparisons",), ("also", "decodings", "favours"), check=_check, favours=_favours)
