"""Rule "factorial": which of two factors, of two levels each, does more to what models can solve.

Four arms make the cells. The effect of a factor is the difference of its levels, the mean over the levels of the other;
the verdict rests on the size of the one that the claim names - the size of the other, under every decoding. It favours
no arm. The effects themselves and their interaction are reported.
"""

from __future__ import annotations

import math
from typing import Any

from evoalign_lib.analysis import coverage
from evoalign_lib.analysis.stats import Interval
from evoalign_lib.claims.checks import check_named
from evoalign_lib.claims.findings import Finding, Undecided, decoding_words
from evoalign_lib.claims.quantities import Chosen, base_chances, chances, side_of, with_coverage
from evoalign_lib.claims.rules.comparisons import check_decodings
from evoalign_lib.claims.rules.rule import Rule
from evoalign_lib.claims.selection import Claim, Evidence, lacking

QUANTITIES = {
    "support_change": ("net change of support", coverage.SOLVED_WITHIN),
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
    n = min(with_coverage(evidence, chosen))
    for quantity in (rule["quantity"], *rule.get("also", ())):
        decisive = quantity == rule["quantity"]
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
    share = quantity != "support_change"
    words = f"{words} {decoding_words(decoding)}"
    by_name = {"rows": rule["rows"], "columns": rule["columns"]}
    larger = f"size of the effect of the {rule['larger']} - that of the {rule['smaller']}"
    try:
        cells = [chances(evidence, side, decoding) for side in chosen]
        base = None if share else base_chances(evidence, decoding)
        found = coverage.effects([cells[:2], cells[2:]], base, within, n_resamples=evidence.resamples)
        if math.isnan(found.larger.low):
            raise Undecided("neither the base nor a run solves a problem")
    except Undecided as error:
        context = f"({error})"
        return [Finding(f"{larger}, {words}", n, have, None, decisive=decisive, value="not defined", context=context)]
    size = found.larger
    if rule["larger"] != rule["rows"]:
        size = Interval(-size.value, -size.high, -size.low, size.n, size.level)
    told = [(larger, size, decisive)]
    told += [(f"effect of the {name}", getattr(found, part), False) for part, name in by_name.items()]
    told.append(("interaction", found.interaction, False))
    findings = []
    for what, interval, decides in told:
        text = f"{interval.format()} points" if share else interval.format(percent=False, digits=3)
        kept = {"decisive": decides, "decoding": decoding, "compared": f"{what}, {quantity}"}
        findings.append(Finding(f"{what}, {words}", n, have, interval, value=text, context=f"(n = {n})", **kept))
    return findings


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
