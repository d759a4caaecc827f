"""The other decodings: does a comparison keep its order where completions are decoded in another way?

ES optimises greedy decoding and GRPO samples at temperature 1, so that a comparison under one of the two favours an
arm. So each comparison that a verdict rests on is made again under every decoding of `DECODINGS` that its claim does
not declare. Where the order of the arms changes, both intervals excluding 0, the verdict is "depends on decoding"
(`decision.decide`). Nothing else about a verdict rests on these.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from evoalign_study.claims.findings import MISSING, Finding, decoding_words
from evoalign_study.claims.rules import RULES, find
from evoalign_study.claims.selection import DECODINGS, Claim, Evidence


def ask(claim: Claim, evidence: Evidence) -> list[Finding]:
    """Return a claim's comparisons under the decodings that it does not declare; none decides by itself.

    Raises ValueError as the rule does.
    """
    under = RULES[claim["rule"]["kind"]].under
    others = [under(claim, decoding) for decoding in DECODINGS]
    findings = [finding for other in others if other is not None for finding in find(other, evidence)]
    return [replace(finding, decisive=False) for finding in findings if finding.compared]


def summary(findings: Sequence[Finding], elsewhere: Sequence[Finding]) -> str:
    """Return in words, for each other decoding, how many comparisons keep their order; empty where there are none.

    findings: those of the claim as it is declared.
    """
    parts = []
    for decoding in DECODINGS:
        outcomes = Counter(_outcome(findings, other) for other in elsewhere if other.decoding == decoding)
        counted = [f"{n} {outcome}" if len(outcomes) > 1 else outcome for outcome, n in sorted(outcomes.items())]
        if counted:
            parts.append(f"{decoding_words(decoding)}: {', '.join(counted)}")
    return "; ".join(parts)


def _outcome(findings: Sequence[Finding], other: Finding) -> str:
    """Say what became of the order of a comparison under another decoding."""
    if other.value == MISSING or not other.n:
        return "not measured"
    if other.interval is None:
        return "not defined"
    signs = {finding.sign() for finding in findings if finding.decisive and finding.compared == other.compared}
    if other.sign() == 0 or signs == {0}:
        return "no clear order"
    return "reversed" if -other.sign() in signs else "same order"
