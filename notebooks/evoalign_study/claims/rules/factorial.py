"""Rule "factorial": which of two factors, of two levels each, does more to what models can solve.

Four arms make the cells. The effect of a factor is the difference of its levels, the mean over the levels of the other;
the verdict rests on the size of the one that the claim names - the size of the other, under every decoding. It favours
no arm. The effects themselves and their interaction are reported.

At the ends of runs a cell that learned nothing keeps what the base solves, so that a factor may seem to matter that
only decides who learns. "support_change_matched" therefore compares along the runs, where single samples are equally
often right: half way to where the cell that gains least ends up, if all gain more than `LEAST_GAIN`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from evoalign_lib.analysis import coverage
from evoalign_lib.analysis.arrays import require
from evoalign_lib.analysis.stats import Interval
from evoalign_study.claims.checks import Schema
from evoalign_study.claims.findings import Finding, Measured, Undecided, decoding_words, hold
from evoalign_study.claims.quantities import Chosen, base_chances, chances, side_of, with_coverage
from evoalign_study.claims.rules.rule import Rule
from evoalign_study.claims.selection import DECODINGS, Claim, Evidence, lacking

LEAST_GAIN = 0.02
"""What every cell must gain in single samples, mean over its runs, to be compared at matched accuracy."""
MATCHED = "support_change_matched"
QUANTITIES = {
    "support_change": ("net change of support", coverage.SOLVED_WITHIN),
    MATCHED: ("problems won - lost at matched accuracy", coverage.SOLVED_WITHIN),
    "right": ("right answers", 1),
    "solved": (f"solved within {coverage.SOLVED_WITHIN} samples", coverage.SOLVED_WITHIN),
}
"""What factors may change: its words, and the samples within which a problem counts as solved."""


def _find(claim: Claim, evidence: Evidence) -> list[Finding]:
    if evidence.null:
        return []
    rule, findings = claim["rule"], []
    selected = {arm: evidence.select(claim, arm, {}) for row in rule["cells"] for arm in row}
    chosen = [Chosen(side_of(arm), found.records) for arm, found in selected.items()]
    have, lacks = ", ".join(found.have for found in selected.values()), lacking(selected.values())
    measured = min(with_coverage(evidence, chosen))
    for quantity in (rule["quantity"], *rule.get("also", ())):
        decisive = quantity == rule["quantity"]
        n = min(len(side.runs) for side in chosen) if quantity == MATCHED else measured
        for decoding in rule["decodings"] if decisive else ("greedy", *rule["decodings"]):
            if quantity == "right" or decoding != "greedy":
                kept = {"decisive": decisive, "lacks": lacks}
                findings += _effects(claim, evidence, chosen, quantity, decoding, n, have, kept)
    return findings


def _effects(
    claim: Claim,
    evidence: Evidence,
    chosen: list[Chosen],
    quantity: str,
    decoding: str,
    n: int,
    have: str,
    kept: dict[str, Any],
) -> list[Finding]:
    """Find the effects on one quantity under one decoding."""
    rule, (words, within) = claim["rule"], QUANTITIES[quantity]
    share = quantity in ("right", "solved")
    larger = f"size of the effect of the {rule['larger']} - that of the {rule['smaller']}"
    told: dict[str, Interval] = {}
    context = f"(n = {n})"

    def measure() -> Measured:
        nonlocal context
        if quantity == MATCHED:
            cells, context = _matched(claim, chosen, decoding)
            found = coverage.effects_of_runs([cells[:2], cells[2:]], n_resamples=evidence.resamples)
        else:
            cells = [chances(evidence, side, decoding) for side in chosen]
            base = None if share else base_chances(evidence, decoding)
            found = coverage.effects([cells[:2], cells[2:]], base, within, n_resamples=evidence.resamples)
        if math.isnan(found.larger.low):
            raise Undecided("neither the base nor a run solves a problem")
        size = found.larger
        if rule["larger"] != rule["rows"]:
            size = Interval(-size.value, -size.high, -size.low, size.n, size.level)
        if quantity == rule["quantity"]:
            told.update({f"effect of the {rule[name]}": getattr(found, name) for name in ("rows", "columns")})
            told["interaction"] = found.interaction
        return _told(size)

    def _told(interval: Interval) -> Measured:
        text = f"{interval.format()} points" if share else interval.format(percent=False, digits=3)
        return interval, text, context

    def finding(what: str, measure: Callable[[], Measured], **kept: Any) -> Finding:
        label = f"{what}, {words} {decoding_words(decoding)}"
        found = have if n else f"{have}, 0 measured"
        return hold(label, n, found, measure, decoding=decoding, compared=f"{what}, {quantity}", **kept)

    first = finding(larger, measure, **kept)
    return [first, *(finding(what, partial(_told, told[what]), decisive=False) for what in told)]


def _matched(claim: Claim, chosen: list[Chosen], decoding: str) -> tuple[list[np.ndarray], str]:
    """Return problems won - lost of each run that gets there, by cell, where single samples are equally often right.

    They are shares of the validation problems, on the line between points of a run's curve. Raises Undecided where a
    cell gains too little, or too few of its runs get there.
    """
    fields = f"reach_{decoding}@1", f"won_{decoding}", f"lost_{decoding}"
    curves = [[run.get("curve", {}) for run in side.runs] for side in chosen]
    if not all(set(fields) <= curve.keys() for runs in curves for curve in runs):
        raise Undecided(f"the curves do not say what is reached at {decoding_words(decoding)}")
    gains = [float(np.mean([curve[fields[0]][-1] - curve[fields[0]][0] for curve in runs])) for runs in curves]
    least = min(range(len(gains)), key=gains.__getitem__)
    if gains[least] <= LEAST_GAIN:
        told = f"{chosen[least].side.arm} gains {100 * gains[least]:.1f} points of single samples"
        raise Undecided(f"{told}, and all need more than {100 * LEAST_GAIN:g}")
    level = curves[0][0][fields[0]][0] + gains[least] / 2
    cells = []
    for side, runs in zip(chosen, curves, strict=True):
        values = [_at(level, *(np.array(curve[field]) for field in fields)) for curve in runs]
        there = np.array([value for value in values if value is not None])
        if len(there) < max(2, claim["min_seeds"]):
            raise Undecided(f"{len(there)} of {len(values)} runs of {side.side.arm} are right so often")
        cells.append(there)
    counts = " v ".join(str(len(cell)) for cell in cells)
    return cells, f"(where {100 * level:.1f} % of single samples are right, n = {counts})"


def _at(level: float, one: np.ndarray, won: np.ndarray, lost: np.ndarray) -> float | None:
    """Return won - lost where one first reaches a level, on the line between two points; None where it never does."""
    reached = np.flatnonzero(one >= level)
    if not len(reached):
        return None
    net, i = won - lost, int(reached[0])
    return float(net[0] if i == 0 else np.interp(level, one[i - 1 : i + 1], net[i - 1 : i + 1]))


def _schema(arm: tuple[str, ...]) -> dict[str, Schema]:
    named = dict.fromkeys(("rows", "columns", "larger", "smaller"), str)
    # support is that of samples: temperatures alone
    decodings = [DECODINGS[1:]]
    return named | {"cells": [[arm]], "quantity": QUANTITIES, "also?": [QUANTITIES], "decodings": decodings}


def _check(claim: Claim) -> None:
    rule, name = claim["rule"], f"claim {claim['id']}"
    square = [len(row) for row in rule["cells"]] == [2, 2]
    require(square, f"{name}: cells {rule['cells']}: declare two rows of two arms")
    factors = {rule["larger"], rule["smaller"]} == {rule["rows"], rule["columns"]}
    require(factors, f"{name}: larger and smaller are the names of rows and columns, each once")


FACTORIAL = Rule(_find, _schema, check=_check)
