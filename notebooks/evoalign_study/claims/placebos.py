"""Placebos: would an arm that learned nothing win by the same rule?

Steadier curves, less spread and less dependence on data are all won by a model that never moves. So a rule that favours
an arm is evaluated again with each null in the place of that arm: random or shuffled fitness, random reward, and the
untrained base. What a null wins is no evidence.

A null is judged on the runs that exist, of the claim's arm of its own family but for the hyper-parameters
(`Evidence.stand_in`), in the cells in which it has any; nobody tunes it, and `FEWEST` runs are enough.
"""

from dataclasses import replace
from typing import NamedTuple

from evoalign_lib import arms
from evoalign_study.claims.decision import decide
from evoalign_study.claims.findings import Finding
from evoalign_study.claims.rules import RULES, find
from evoalign_study.claims.selection import BASE, NULLS, Claim, Evidence, arm_words

FEWEST = 4
"""Runs that a null needs in a cell to be judged."""

_QUICK = 100


class Placebo(NamedTuple):
    """What became of a rule with a null in the place of the arm that it favours."""

    null: str
    """One of `NULLS`."""
    findings: tuple[Finding, ...]
    """The decisive findings of the cells in which the null has runs."""
    passed: bool
    """Whether the rule holds for the null."""

    @property
    def words(self) -> str:
        """The null and how many runs it has."""
        n = "" if self.null == BASE else f" (n = {min(finding.n for finding in self.findings)})"
        return _words(self.null) + n


_RANKS = {"rank", "lora_rank"}
"""Settings by which a null is one of noise of low rank, or over an adapter."""


def ask(claim: Claim, evidence: Evidence) -> list[Placebo]:
    """Evaluate a claim's rule with each null in the place of the favoured arm; nothing where no null has enough runs.

    Raises ValueError as the rule does.
    """
    asked = []
    for null in NULLS if RULES[claim["rule"]["kind"]].favours(claim) else ():
        # the values themselves do not depend on the number of resamples, and most nulls fail by them
        findings = _findings(claim, replace(evidence, null=null, resamples=min(_QUICK, evidence.resamples)))
        passed = all(f.interval is not None and f.excess()[0] > claim["margin"] for f in findings)
        if findings and passed:
            findings = _findings(claim, replace(evidence, null=null))
            passed = decide(findings, claim["margin"], FEWEST)[0] == "supported"
        if findings:
            asked.append(Placebo(null, tuple(findings), passed))
    return asked


def _findings(claim: Claim, evidence: Evidence) -> list[Finding]:
    """Return the decisive findings of a claim's rule in the cells in which the null has runs enough."""
    findings = find(claim | {"min_seeds": FEWEST}, evidence)
    return [finding for finding in findings if finding.decisive and finding.n >= FEWEST]


def summary(claim: Claim, placebos: list[Placebo]) -> str:
    """Return in words which nulls the rule held for, which not, and which have no runs to ask it of."""
    if not RULES[claim["rule"]["kind"]].favours(claim):
        return "favours no arm"
    if not placebos:
        return "no null runs"
    asked = {placebo.null for placebo in placebos}
    parts = {
        "passed by": [placebo.words for placebo in placebos if placebo.passed],
        "failed by": [placebo.words for placebo in placebos if not placebo.passed],
        "no runs of": [_words(null) for null in NULLS if null not in asked and _fits(claim, null)],
    }
    return "; ".join(f"{words} {', '.join(names)}" for words, names in parts.items() if names)


def _fits(claim: Claim, null: str) -> bool:
    """Return whether a null is of the family of an arm of a claim; the untrained base is one of every claim.

    A null over an adapter, or of noise of low rank, is one of a claim that has such an arm.
    """
    if null == BASE:
        return True
    compared, arm = [arms.get(each["arm"]) for each in claim["arms"].values() if "arm" in each], arms.get(null)
    ranks = {name for each in compared for name in each.settings}
    return arm.family in {each.family for each in compared} and _RANKS & {*arm.settings} <= ranks


def _words(null: str) -> str:
    return "the untrained base" if null == BASE else arm_words(null)
