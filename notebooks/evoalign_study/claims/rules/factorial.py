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
from typing import Any

import numpy as np

from evoalign_lib.analysis import coverage
from evoalign_lib.analysis.stats import Interval
from evoalign_study.claims.checks import check_named
from evoalign_study.claims.findings import Finding, Undecided, decoding_words
from evoalign_study.claims.quantities import Chosen, base_chances, chances, side_of, with_coverage
from evoalign_study.claims.rules.comparisons import check_decodings
from evoalign_study.claims.rules.rule import Rule
from evoalign_study.claims.selection import Claim, Evidence, lacking

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
    names = [arm for row in rule["cells"] for arm in row]
    selected = {arm: evidence.select(claim, arm, {}) for arm in names}
    chosen = [Chosen(side_of(arm), found.records) for arm, found in selected.items()]
    have = ", ".join(found.have for found in selected.values())
    measured = with_coverage(evidence, chosen)
    for quantity in (rule["quantity"], *rule.get("also", ())):
        decisive = quantity == rule["quantity"]
        n = min(len(side.runs) for side in chosen) if quantity == MATCHED else min(measured)
        for decoding in rule["decodings"] if decisive else ("greedy", *rule["decodings"]):
            if quantity != "right" and decoding == "greedy":
                continue
            words = f"{QUANTITIES[quantity][0]} {decoding_words(decoding)}"
            larger = f"size of the effect of the {rule['larger']} - that of the {rule['smaller']}"
            kept: dict[str, Any] = {"decoding": decoding, "compared": f"{larger}, {quantity}"}
            if not n:
                label = f"{larger}, {words}"
                lacks = lacking(selected.values())
                findings.append(
                    Finding(label, 0, f"{have}, {n} measured", None, decisive=decisive, lacks=lacks, **kept)
                )
                continue
            findings += _effects(claim, evidence, chosen, quantity, decoding, decisive, n, have)
    return findings


def _effects(
    claim: Claim,
    evidence: Evidence,
    chosen: list[Chosen],
    quantity: str,
    decoding: str,
    decisive: bool,
    n: int,
    have: str,
) -> list[Finding]:
    """Find the effects on one quantity under one decoding."""
    rule, (words, within) = claim["rule"], QUANTITIES[quantity]
    share = quantity in ("right", "solved")
    words = f"{words} {decoding_words(decoding)}"
    by_name = {"rows": rule["rows"], "columns": rule["columns"]}
    larger = f"size of the effect of the {rule['larger']} - that of the {rule['smaller']}"
    context = f"(n = {n})"
    try:
        if quantity == MATCHED:
            cells, context = _matched(claim, chosen, decoding)
            found = coverage.effects_of_runs([cells[:2], cells[2:]], n_resamples=evidence.resamples)
        else:
            cells = [chances(evidence, side, decoding) for side in chosen]
            base = None if share else base_chances(evidence, decoding)
            found = coverage.effects([cells[:2], cells[2:]], base, within, n_resamples=evidence.resamples)
        if math.isnan(found.larger.low):
            raise Undecided("neither the base nor a run solves a problem")
    except Undecided as error:
        kept = {"decoding": decoding, "compared": f"{larger}, {quantity}", "decisive": decisive}
        return [Finding(f"{larger}, {words}", n, have, None, value="not defined", context=f"({error})", **kept)]
    size = found.larger
    if rule["larger"] != rule["rows"]:
        size = Interval(-size.value, -size.high, -size.low, size.n, size.level)
    told = [(larger, size, decisive)]
    if quantity == rule["quantity"]:
        told += [(f"effect of the {name}", getattr(found, part), False) for part, name in by_name.items()]
        told.append(("interaction", found.interaction, False))
    findings = []
    for what, interval, decides in told:
        text = f"{interval.format()} points" if share else interval.format(percent=False, digits=3)
        kept = {"decisive": decides, "decoding": decoding, "compared": f"{what}, {quantity}"}
        findings.append(Finding(f"{what}, {words}", n, have, interval, value=text, context=context, **kept))
    return findings


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


def _check(claim: Claim) -> None:
    rule, name = claim["rule"], f"claim {claim['id']}"
    check_decodings(claim)
    if "greedy" in rule["decodings"]:
        raise ValueError(f"{name}: support is that of samples: declare temperatures alone")
    if len(rule["cells"]) != 2 or any(len(row) != 2 for row in rule["cells"]):
        raise ValueError(f"{name}: cells {rule['cells']}: declare two rows of two arms")
    check_named(claim, [arm for row in rule["cells"] for arm in row])
    for quantity in (rule["quantity"], *rule.get("also", ())):
        if quantity not in QUANTITIES:
            raise ValueError(f"{name}: unknown quantity {quantity!r}; known: {', '.join(QUANTITIES)}")
    if {rule["larger"], rule["smaller"]} != {rule["rows"], rule["columns"]}:
        raise ValueError(f"{name}: larger and smaller are the names of rows and columns, each once")


FACTORIAL = Rule(
    _find,
    ("cells", "rows", "columns", "quantity", "larger", "smaller", "decodings"),
    ("also",),
    check=_check,
)
