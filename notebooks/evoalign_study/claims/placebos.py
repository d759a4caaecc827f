"""Placebos and positive controls: which arms would get the same verdict by the same rule?

A model that never moves wins on steadier curves, less spread and less dependence on data. So a rule that favours an
arm is evaluated again with each null in place of that arm: random or shuffled fitness, random reward, and the
untrained base. A comparison that a null wins is no evidence. Nor is a contradiction, if each comparison that makes it
is contradicted as well with some null in the place of the arm that wins it: "ES drifts less" is nothing to GRPO if
random reward drifts more still. A null in the place of the loser shows nothing: it loses whatever has to be learned.

A null is judged on its existing runs, in the cells where it has any. They must have the spec of the claim's arm of the
same family, except for the hyper-parameters (`Evidence.stand_in`): nulls are not tuned. `FEWEST` runs are enough.

A positive control asks the opposite: would the comparator pass in the challenger's place (`rule.in_place`)?
A comparison that it fails is void, since failing it says nothing of the challenger.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from evoalign_lib import arms
from evoalign_study.claims.decision import decide, outcome
from evoalign_study.claims.findings import Finding
from evoalign_study.claims.rules import RULES, find
from evoalign_study.claims.rules.rule import trained
from evoalign_study.claims.selection import BASE, DECODINGS, NULLS, Claim, Evidence, arm_words

FEWEST = 4
"""Runs that a null needs in each cell to be judged."""

_QUICK = 100


class Placebo(NamedTuple):
    """The result of a rule with a null in place of the arm that it favours."""

    null: str
    """One of `NULLS`."""
    findings: tuple[Finding, ...]
    """The decisive findings from the cells where the null has runs."""
    passed: bool
    """Whether the rule holds for the null."""

    @property
    def words(self) -> str:
        """The null and how many runs it has."""
        n = "" if self.null == BASE else f" (n = {min(finding.n for finding in self.findings)})"
        return _words(self.null) + n


_RANKS = {"rank", "lora_rank"}
"""Settings that mark a null with low-rank noise, or one over an adapter."""


def ask(claim: Claim, evidence: Evidence) -> list[Placebo]:
    """Evaluate a claim's rule with each null in place of the favoured arm; nulls without enough runs are left out.

    Raises ValueError as the rule does.
    """
    asked = []
    for null in NULLS if RULES[claim["rule"]["kind"]].favours(claim) else ():
        # most nulls fail by the estimates alone, which do not depend on the number of resamples
        findings = _findings(claim, replace(evidence, null=null, resamples=min(_QUICK, evidence.resamples)))
        passed = all(f.interval is not None and f.excess()[0] > claim["margin"] for f in findings)
        if findings and passed:
            findings = _findings(claim, replace(evidence, null=null))
            passed = decide(findings, claim["margin"], FEWEST)[0] == "supported"
        if findings:
            asked.append(Placebo(null, tuple(findings), passed))
    return asked


def ask_against(claim: Claim, evidence: Evidence, against: Sequence[Finding]) -> list[Placebo]:
    """Return the nulls that contradict the claim as well, if every finding against it is contradicted with one of them.

    They take the place of each trained arm that the rule does not favour. against: the findings that contradict the
    claim. Raises ValueError as the rule does.
    """
    rule, wanted, found = RULES[claim["rule"]["kind"]], {finding.key for finding in against}, []
    kept = {name: value for name, value in claim["rule"].items() if name not in ("also", "trend", "floor")}
    favoured = rule.favours(claim)
    others = [name for name, arm in claim["arms"].items() if name not in favoured and trained(arm)]
    for null, arm in product(NULLS if rule.turns and favoured else (), others):
        turned = claim | {"rule": kept | {"favours": arm}}
        for resamples in (min(_QUICK, evidence.resamples), evidence.resamples):
            findings = _findings(turned, replace(evidence, null=null, resamples=resamples))
            alike = [f for f in findings if f.key in wanted and outcome(f, claim["margin"]) == "contradicted"]
            if not alike:
                break
        else:
            found.append(Placebo(null, tuple(alike), True))
    return found if wanted == {finding.key for null in found for finding in null.findings} else []


def controls(claim: Claim, evidence: Evidence, own: Sequence[Finding]) -> list[Finding]:
    """Return the findings of a claim's comparator in the place of its challenger, under the other decodings, too.

    own: the claim's findings, of which some may come again. Raises ValueError as the rule does.
    """
    rule, found, known = RULES[claim["rule"]["kind"]], {}, {finding.label for finding in own if finding.decisive}
    for claimed in rule.controls(claim | {"min_seeds": FEWEST}):
        others = (rule.under(claimed, decoding) for decoding in DECODINGS)
        for each in (claimed, *filter(None, others)):
            found |= {f.key: f for f in find(each, evidence) if f.decisive and f.label not in known}
    return [finding for finding in found.values() if finding.n >= FEWEST and finding.interval is not None]


def _findings(claim: Claim, evidence: Evidence) -> list[Finding]:
    """Return the decisive findings of a claim's rule in the cells where the null has enough runs."""
    findings = find(claim | {"min_seeds": FEWEST}, evidence)
    return [finding for finding in findings if finding.decisive and finding.n >= FEWEST]


def summary(claim: Claim, placebos: list[Placebo]) -> str:
    """Describe for which nulls the rule held, for which it failed, and which have no runs to test."""
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
    """Return whether a null belongs to the family of one of a claim's arms; the untrained base fits every claim.

    A null over an adapter, or with low-rank noise, fits only a claim that has such an arm.
    """
    if null == BASE:
        return True
    compared, arm = [arms.get(each["arm"]) for each in claim["arms"].values() if "arm" in each], arms.get(null)
    ranks = {name for each in compared for name in each.settings}
    return arm.family in {each.family for each in compared} and _RANKS & {*arm.settings} <= ranks


def _words(null: str) -> str:
    return "the untrained base" if null == BASE else arm_words(null)
