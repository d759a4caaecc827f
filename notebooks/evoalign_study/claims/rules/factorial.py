"""Rule "factorial": which of two factors, of two levels each, does more to what models can solve.

Four arms make the cells. The effect of a factor is the difference of its levels, the mean over the levels of the other;
the verdict rests on the size of the one that the claim names - the size of the other, under every decoding. It favours
no arm. The effects themselves and their interaction are reported.

At the ends of runs a cell that learned nothing keeps what the base solves, so that a factor may seem to matter that
only decides who learns. "support_change_matched" therefore compares along the runs, where single samples are equally
often right: half way to where the cell that gains least ends up, if all gain more than `LEAST_GAIN`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from operator import attrgetter
from typing import Any

import numpy as np

from evoalign_lib.analysis import coverage, overoptimisation
from evoalign_lib.analysis.stats import Interval
from evoalign_study.claims.checks import Schema
from evoalign_study.claims.findings import Finding, Measured, Undecided, decoding_words, hold, there
from evoalign_study.claims.quantities import Side, base_chances, chances, covered
from evoalign_study.claims.rules.rule import Asks, Rule
from evoalign_study.claims.selection import DECODINGS, Case, Claim, Runs

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


def _find(case: Case) -> Iterator[Finding]:
    if case.null:
        return
    rule = case.rule
    arms = case.select(arm for row in rule["cells"] for arm in row)
    for quantity in (rule["quantity"], *rule.get("also", ())):
        decisive = quantity == rule["quantity"]
        for decoding in rule["decodings"] if decisive else ("greedy", *rule["decodings"]):
            if quantity == "right" or decoding != "greedy":
                yield from _effects(case, arms, quantity, decoding, decisive)


def _effects(case: Case, arms: dict[str, Runs], quantity: str, decoding: str, decisive: bool) -> Iterator[Finding]:
    """Find the effects on one quantity under one decoding."""
    rule, (words, within) = case.rule, QUANTITIES[quantity]
    share = quantity in ("right", "solved")
    chosen = [Side(arm, runs=runs.records, evidence=case.evidence) for arm, runs in arms.items()]
    n = min(len(side.runs if quantity == MATCHED else covered(side)) for side in chosen)
    have = ", ".join(runs.have for runs in arms.values()) + ("" if n else ", 0 measured")

    @cache
    def effects() -> tuple[coverage.Effects, str]:
        if quantity == MATCHED:
            cells, context = _matched(arms, decoding, case.claim["min_seeds"])
            return coverage.effects_of_runs([cells[:2], cells[2:]], n_resamples=case.evidence.resamples), context
        cells = [chances(covered(side), decoding) for side in chosen]
        base = None if share else base_chances(case.evidence, decoding)
        return coverage.effects([cells[:2], cells[2:]], base, within, n_resamples=case.evidence.resamples), f"(n = {n})"

    def measure(read: Callable[[coverage.Effects], Interval], _: Sequence[Runs]) -> Measured:
        both, context = effects()
        if math.isnan(both.larger.low):
            raise Undecided("neither the base nor a run solves a problem")
        interval = read(both)
        return interval, f"{interval.format()} points" if share else interval.format(percent=False, digits=3), context

    def larger(both: coverage.Effects) -> Interval:
        size = both.larger
        turned = replace(size, value=-size.value, low=-size.high, high=-size.low)
        return size if rule["larger"] == rule["rows"] else turned

    def finding(what: str, read: Callable[[coverage.Effects], Interval], **kept: Any) -> Finding:
        label = f"{what}, {words} {decoding_words(decoding)}"
        kept |= {"decoding": decoding, "compared": f"{what}, {quantity}"}
        return hold(label, [*arms.values()], partial(measure, read), n=n, have=have, **kept)

    what = f"size of the effect of the {rule['larger']} - that of the {rule['smaller']}"
    first = finding(what, larger, decisive=decisive)
    yield first
    if decisive and first.interval is not None:
        for name in ("rows", "columns"):
            yield finding(f"effect of the {rule[name]}", attrgetter(name), decisive=False)
        yield finding("interaction", attrgetter("interaction"), decisive=False)


def _matched(arms: dict[str, Runs], decoding: str, least: int) -> tuple[list[np.ndarray], str]:
    """Return problems won - lost of each run that gets there, by cell, where single samples are equally often right.

    They are shares of the validation problems, on the line between points of a run's curve. Raises Undecided where a
    cell gains too little, or too few of its runs get there.
    """
    fields = f"reach_{decoding}@1", f"won_{decoding}", f"lost_{decoding}"
    curves = {arm: [run.get("curve", {}) for run in runs.records] for arm, runs in arms.items()}
    if not all(set(fields) <= curve.keys() for of_arm in curves.values() for curve in of_arm):
        raise Undecided(f"the curves do not say what is reached at {decoding_words(decoding)}")
    reached = {arm: [curve[fields[0]] for curve in of_arm] for arm, of_arm in curves.items()}
    gain, arm = min((float(np.mean([one[-1] - one[0] for one in each])), arm) for arm, each in reached.items())
    if gain <= LEAST_GAIN:
        told = f"{arm} gains {100 * gain:.1f} points of single samples"
        raise Undecided(f"{told}, and all need more than {100 * LEAST_GAIN:g}")
    level = next(iter(reached.values()))[0][0] + gain / 2
    cells = []
    for arm, of_arm in curves.items():
        lines = ([np.array(curve[field]) for field in fields] for curve in of_arm)
        values = (overoptimisation.read_at(one, won - lost, level) for one, won, lost in lines)
        cells.append(there(values, max(2, least), f"{arm} are right so often"))
    counts = " v ".join(str(len(cell)) for cell in cells)
    return cells, f"(where {100 * level:.1f} % of single samples are right, n = {counts})"


def _schema(arm: tuple[str, ...]) -> dict[str, Schema]:
    named = dict.fromkeys(("rows", "columns", "larger", "smaller"), str)
    # support is that of samples: temperatures alone
    decodings = [DECODINGS[1:]]
    return named | {"cells": [[arm]], "quantity": QUANTITIES, "also?": [QUANTITIES], "decodings": decodings}


def _asks(claim: Claim) -> Asks:
    rule = claim["rule"]
    yield [len(row) for row in rule["cells"]] == [2, 2], f"cells {rule['cells']}: declare two rows of two arms"
    factors = {rule["larger"], rule["smaller"]} == {rule["rows"], rule["columns"]}
    yield factors, "larger and smaller are the names of rows and columns, each once"


FACTORIAL = Rule(_find, _schema, asks=_asks)
