"""Rule "memory": how many times less memory one method needs than others, by a formula that is held against real steps.

A record of kind "memory" has what a step took, counted while it ran, beside what the formula gives for it, and what the
formula gives for published models. The claim is about the latter. No number here is a draw: there is no seed, and what
an interval shows is by how much the formula missed a step, in either direction on either side of a ratio. The rule
favours no arm, for nothing is learned: a null arm takes the bytes of the arm whose place it has.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from numbers import Real

from evoalign_lib.analysis.arrays import require
from evoalign_lib.analysis.stats import Interval
from evoalign_study.claims.checks import Schema
from evoalign_study.claims.findings import Finding, Measured, hold
from evoalign_study.claims.rules.rule import Rule
from evoalign_study.claims.selection import Claim, Evidence, Record, Runs


def _find(claim: Claim, evidence: Evidence) -> list[Finding]:
    """Find the ratio of every method's bytes to those of the one that should need less, for each size."""
    rule, (low, high) = claim["rule"], claim["rule"]["between"]
    lesser = (rule["of"], *rule.get("also", ()))
    chosen = {name: evidence.select(claim, name, {}) for name in dict.fromkeys([*lesser, *rule["against"]])}
    error = max((_error(record) for runs in chosen.values() for record in runs.records), default=0.0)
    findings = []
    for less, more, size in product(lesser, rule["against"], rule["sizes"]):
        pair, label = (chosen[more], chosen[less]), f"{_words(more)} over {_words(less)} at {size}"
        n = min(sum(len(record["cells"]) for record in runs.records) for runs in pair)
        have, measure = f"{label}: {n} measured steps", partial(_ratio, pair, size, error, n)
        for bound, side in ((low, "above"), (high, "below")):
            kept = {"bound": bound, "side": side, "decisive": less == rule["of"]}
            found = hold(f"{label}, {side} {bound:g}", n, have, measure, **kept)
            if n and error > rule["error"]:
                asked = f"the formula misses a step by {100 * error:.1f} %, at most {100 * rule['error']:g} % is asked"
                ratio = f"{found.interval.value:.3g}"
                found = replace(found, interval=None, value=ratio, context=f"(not decided: {asked})")
            findings.append(found)
    return findings


def _ratio(pair: tuple[Runs, Runs], size: str, error: float, n: int) -> Measured:
    more, less = (_published(runs, size) for runs in pair)
    ratio, spread = more / less, (1 + error) / (1 - error)
    interval = Interval(ratio, ratio / spread, ratio * spread, n)
    value = f"{ratio:.3g} [{interval.low:.3g}, {interval.high:.3g}]"
    return interval, value, f"(formula within {100 * error:.1f} % of every step, n = {n})"


def _published(runs: Runs, size: str) -> float:
    """Return the bytes that the formula gives. Raises ValueError where records of one method disagree."""
    found = {sum(record["published"][size]["bytes"].values()) for record in runs.records}
    if len(found) > 1:
        raise ValueError(f"records of one method give {sorted(found)} bytes for {size}: make them again by one formula")
    return found.pop()


def _error(record: Record) -> float:
    """Return by how much the formula misses a step of a record at most, as a share of what was measured."""
    totals = [[sum(cell[part].values()) for part in ("predicted", "measured")] for cell in record["cells"].values()]
    return max(abs(predicted / measured - 1) for predicted, measured in totals)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _schema(arm: tuple[str, ...]) -> dict[str, Schema]:
    sizes = {"between": [Real], "sizes": [str], "error": Real}
    return sizes | {"of": arm, "against": [arm], "also?": [arm]}


def _check(claim: Claim) -> None:
    rule, name = claim["rule"], f"claim {claim['id']}"
    between, error = rule["between"], rule["error"]
    rising = len(between) == 2 and 0 < between[0] < between[1]
    require(rising, f"{name}: between {between}: declare two ratios above 0, the lower one first")
    require(0 < error < 1, f"{name}: error {error}: declare a share between 0 and 1")
    some = rule["against"] and rule["sizes"]
    require(some, f"{name}: declare at least one method in 'against' and one model in 'sizes'")


MEMORY = Rule(_find, _schema, check=_check)
