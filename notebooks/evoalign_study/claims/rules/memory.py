"""Rule "memory": how many times less memory one method needs than others, by a formula that is held against real steps.

A record of kind "memory" has what a step took, counted while it ran, beside what the formula gives for it, and what the
formula gives for published models. The claim is about the latter. No number here is a draw: there is no seed, and what
an interval shows is by how much the formula missed a step, in either direction on either side of a ratio. The rule
favours no arm, for nothing is learned: a null arm takes the bytes of the arm whose place it has.
"""

from __future__ import annotations

from collections.abc import Iterator

from evoalign_lib.analysis.stats import Interval
from evoalign_study.claims.checks import check_keys, check_named
from evoalign_study.claims.findings import Finding
from evoalign_study.claims.rules.rule import Rule
from evoalign_study.claims.selection import Claim, Evidence, Record, Runs


def _find(claim: Claim, evidence: Evidence) -> list[Finding]:
    """Find the ratio of every method's bytes to those of the one that should need less, for each size."""
    rule = claim["rule"]
    named = dict.fromkeys([rule["of"], *rule.get("also", ()), *rule["against"]])
    chosen = {name: evidence.select(claim, name, {}) for name in named}
    error = max((_error(record) for name in named for record in chosen[name].records), default=0.0)
    findings = []
    for less in (rule["of"], *rule.get("also", ())):
        for more in rule["against"]:
            for size in rule["sizes"]:
                pair = chosen[more], chosen[less]
                found = _compare(pair, f"{_words(more)} over {_words(less)} at {size}", size, error, rule["error"])
                low, high = rule["between"]
                for bound, side in ((low, "above"), (high, "below")):
                    label = f"{found['label']}, {side} {bound:g}"
                    decisive = less == rule["of"]
                    findings.append(Finding(**found | {"label": label}, bound=bound, side=side, decisive=decisive))
    return findings


def _compare(pair: tuple[Runs, Runs], label: str, size: str, error: float, most: float) -> dict:
    """Return the fields of a finding that do not depend on its bound."""
    n = min(sum(len(record["cells"]) for record in runs.records) for runs in pair)
    found = {"label": label, "n": n, "have": f"{label}: {n} measured steps", "interval": None}
    if not n:
        return found
    more, less = (_published(runs, size) for runs in pair)
    ratio = more / less
    if error > most:
        off = f"(not decided: the formula misses a step by {100 * error:.1f} %, at most {100 * most:g} % is asked)"
        return found | {"value": f"{ratio:.3g}", "context": off}
    spread = (1 + error) / (1 - error)
    interval = Interval(ratio, ratio / spread, ratio * spread, n)
    value = f"{ratio:.3g} [{interval.low:.3g}, {interval.high:.3g}]"
    within = f"(formula within {100 * error:.1f} % of every step, n = {n})"
    return found | {"interval": interval, "value": value, "context": within}


def _published(runs: Runs, size: str) -> float:
    """Return the bytes that the formula gives. Raises ValueError where records of one method disagree."""
    found = {sum(record["published"][size]["bytes"].values()) for record in runs.records}
    if len(found) > 1:
        raise ValueError(f"records of one method give {sorted(found)} bytes for {size}: make them again by one formula")
    return found.pop()


def _error(record: Record) -> float:
    """Return by how much the formula misses a step of a record at most, as a share of what was measured."""
    return max(abs(predicted / measured - 1) for predicted, measured in _totals(record))


def _totals(record: Record) -> Iterator[tuple[float, float]]:
    for cell in record["cells"].values():
        yield sum(cell["predicted"].values()), sum(cell["measured"].values())


def _words(name: str) -> str:
    return name.replace("_", " ")


def _check(claim: Claim) -> None:
    rule, name = claim["rule"], f"claim {claim['id']}"
    check_named(claim, [rule["of"], *rule["against"], *rule.get("also", ())])
    for arm, wanted in claim["arms"].items():
        check_keys(f"{name}, arm {arm}", wanted, ("kind", "method"))
    between = rule["between"]
    if len(between) != 2 or not 0 < between[0] < between[1]:
        raise ValueError(f"{name}: between {between}: declare two ratios above 0, the lower one first")
    if not 0 < rule["error"] < 1:
        raise ValueError(f"{name}: error {rule['error']}: declare a share between 0 and 1")
    if not rule["against"] or not rule["sizes"]:
        raise ValueError(f"{name}: declare at least one method in 'against' and one model in 'sizes'")


MEMORY = Rule(_find, ("of", "against", "between", "sizes", "error"), ("also",), check=_check)
