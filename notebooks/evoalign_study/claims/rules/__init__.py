"""Kinds of rule that a claim may declare: a new kind is a file here and a line in `RULES`.

All of them compare quantities with bounds (`findings.hold`); a kind says which quantities, of which runs.
"""

from evoalign_lib.checks import require
from evoalign_study.claims import checks
from evoalign_study.claims.findings import Finding
from evoalign_study.claims.rules import comparisons, ends, factorial, judged, over_cells, recorded, weights
from evoalign_study.claims.rules.rule import Rule
from evoalign_study.claims.selection import DECODINGS, Case, Claim, Evidence

RULES: dict[str, Rule] = {
    "interval_above": comparisons.INTERVAL_ABOVE,
    "compare": comparisons.COMPARE,
    "regret": over_cells.REGRET,
    "regrets": over_cells.REGRETS,
    "interaction": over_cells.INTERACTION,
    "optimum": over_cells.OPTIMUM,
    "reach": over_cells.REACH,
    "gaps": ends.GAPS,
    "collapse": ends.COLLAPSE,
    "weights": weights.WEIGHTS,
    "factorial": factorial.FACTORIAL,
    "judged": judged.JUDGED,
    "laws": judged.LAWS,
    "regimes": ends.REGIMES,
    "memory": recorded.MEMORY,
    "open": Rule(lambda case: []),
}
RULES |= dict.fromkeys(("estimator_bounds", "ledger_bounds", "kl_bounds"), recorded.BOUNDS)
"""The kinds of rule; "open" stands for a claim without a rule."""


def find(claim: Claim, evidence: Evidence) -> list[Finding]:
    """Return the findings behind a claim's verdict. Raises ValueError for records that do not belong together."""
    return list(RULES[claim["rule"]["kind"]].find(Case(claim, evidence)))


def check_rule(claim: Claim) -> None:
    """Raise ValueError, naming the claim and the field, if the declaration of a claim's rule is malformed."""
    name, declared, arms = f"claim {claim['id']}", claim["rule"], claim.get("arms", {})
    checks.check(f"{name}, rule kind", declared.get("kind"), RULES)
    rule = RULES[declared["kind"]]
    checks.check(f"{name}, arms", arms, dict.fromkeys(rule.arms or arms, checks.arm))
    checks.check(f"{name}, rule", declared, {"kind": str} | rule.schema(tuple(arms)))
    decodings = declared.get("decodings", DECODINGS)
    some = len(decodings) > 1 and set(decodings) <= set(DECODINGS)
    require(some, f"{name}: decodings {decodings}: declare two or more of {', '.join(DECODINGS)}")
    for holds, why in rule.asks(claim):
        require(holds, f"{name}: {why}")
