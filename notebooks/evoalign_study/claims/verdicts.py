"""Verdicts: the claims of paper/claims.yaml judged by code from the run records, and put into words.

A claim selects its runs by the fields of their specs, and its rule makes findings of them. `decide` is the whole of the
judgement; what an arm that learned nothing would win by the same rule is no evidence (`placebos`).

ES optimises greedy decoding and GRPO samples at temperature 1, so that a comparison under one of the two favours an
arm. So each comparison that a verdict rests on is made again under every decoding of `DECODINGS` that its claim does
not declare. Where the order of the arms changes, both intervals excluding 0, the verdict is "depends on decoding".
Nothing else about a verdict rests on these.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from evoalign_lib.analysis import stats
from evoalign_lib.analysis.stats import Interval
from evoalign_lib.checks import nearest
from evoalign_study.claims import placebos
from evoalign_study.claims.decision import decide, nearness, p_value
from evoalign_study.claims.declarations import check_claim, load_claims, rule_hash
from evoalign_study.claims.findings import MISSING, Finding, decoding_words
from evoalign_study.claims.placebos import Placebo
from evoalign_study.claims.rules import RULES, find
from evoalign_study.claims.selection import DECODINGS, Claim, Evidence, Record, committed_records

VERDICTS = (
    "supported",
    "contradicted",
    "within margin",
    "depends on decoding",
    "not evidence",
    "underpowered",
    "not testable at this scale",
    "superseded",
    "open",
)
"""All verdicts; "open" is a claim that has no rule yet, or no run."""


@dataclass(frozen=True)
class Verdict:
    """What the records say of one claim."""

    id: str
    """The claim's identifier, such as "E1"."""
    title: str
    """What is claimed, in a few words."""
    rule: str
    """The kind of its rule; "open" has none yet."""
    statement: str
    """What is claimed."""
    verdict: str
    """One of `VERDICTS`."""
    text: str
    """The reason in words: intervals, n, base accuracy, smallest detectable effect."""
    key: str
    """The finding that speaks most against the claim, in short. Empty where there are no runs."""
    placebo: str
    """Which arms that learned nothing were put in the place of the favoured one, and whether the rule held for them.
    Empty where there is nothing to judge."""
    decodings: str
    """Under which other decodings its comparisons keep their order. Empty where there is nothing to decode otherwise,
    or to judge."""
    findings: tuple[Finding, ...]
    """Every comparison: those that the claim declares, then those under other decodings."""
    intervals: dict[str, Interval]
    """The interval of each finding that the claim declares, by its label, in the unit of the quantity."""
    n: int
    """Units (seeds, repeats) in the smallest cell."""
    p: float | None
    """The largest p-value of the findings, since all must hold; for a primary claim after Holm's correction. None
    where a finding has none."""
    rule_hash: str
    """`rule_hash` of the claim as it was judged."""


def evaluate_named(
    ids: Sequence[str],
    records: Iterable[Record],
    scale: str = "tiny",
    declared: Sequence[Claim] | None = None,
    *,
    resamples: int = 10_000,
) -> list[Verdict]:
    """Judge claims by run records; the primary ones of a notebook share Holm's correction (p = 1: no runs).

    ids: of the claims. records: run records of any notebooks; finished ones of this scale are used. declared: all
    claims, among which are those that share a correction with these; by default the paper's. resamples: of every
    bootstrap interval.
    Returns the verdicts, in the order of the ids. Raises ValueError for an id that is not declared, for a claim that is
    not well declared, and for records that do not form the cells it declares: a seed twice, other hyper-parameters or
    another base in one cell.
    """
    known = {claim["id"]: claim for claim in (load_claims() if declared is None else declared)}
    for name in ids:
        if name not in known:
            raise ValueError(f"no claim {name!r} in claims.yaml.{nearest(name, known)} Known: {', '.join(known)}.")
    corrected = {known[name]["primary"] for name in ids if "primary" in known[name]}
    claims = [claim for claim in known.values() if claim["id"] in ids or claim.get("primary") in corrected]
    for claim in claims:
        check_claim(claim)
    evidence = Evidence.of(records, scale, resamples)
    judged = {claim["id"]: _judge(claim, evidence, scale) for claim in claims}
    families: dict[str, dict[str, float]] = defaultdict(dict)
    for name, each in judged.items():
        if "primary" in each.claim:
            # one that cannot be judged yet counts: a verdict must not hang on the order of runs
            families[each.claim["primary"]][name] = 1.0 if each.p is None else each.p
    corrections = {name: (p, len(family)) for family in families.values() for name, p in stats.holm(family).items()}
    return [_verdict(judged[name], None if judged[name].p is None else corrections.get(name), scale) for name in ids]


def evaluate_all(scale: str = "tiny") -> list[Verdict]:
    """Judge every claim of paper/claims.yaml by the committed records of all notebooks at one scale."""
    declared = load_claims()
    return evaluate_named([claim["id"] for claim in declared], committed_records(scale), scale, declared)


class _Judged(NamedTuple):
    """The findings of a claim, what nulls would find in the place of its favoured arm, and other decodings."""

    claim: Claim
    findings: list[Finding]
    nulls: list[Placebo]
    elsewhere: list[Finding]
    p: float | None


def _judge(claim: Claim, evidence: Evidence, scale: str) -> _Judged:
    """Return what is found of a claim."""
    if scale not in claim["scales"]:
        return _Judged(claim, [], [], [], None)
    try:
        findings = find(claim, evidence)
        if not any(finding.decisive and finding.n for finding in findings):
            return _Judged(claim, findings, [], [], None)
        p = p_value(findings, claim["margin"], claim["min_seeds"])
        return _Judged(claim, findings, placebos.ask(claim, evidence), _elsewhere(claim, evidence), p)
    except ValueError as error:
        raise ValueError(f"claim {claim['id']}: {error}") from error
    except KeyError as error:
        raise ValueError(f"claim {claim['id']}: a record lacks the field {error}: restore it from git") from error


def _verdict(judged: _Judged, correction: tuple[float, int] | None, scale: str) -> Verdict:
    """Word what was found of one claim."""
    claim, findings, nulls, elsewhere, p = judged
    limit, key, placebo, decoded = claim.get("not_testable", {}).get(scale, ""), "", "", ""
    decisive = [finding for finding in findings if finding.decisive]
    if scale not in claim["scales"]:
        name, parts = "not testable at this scale", [limit or f"declared for scale {', '.join(claim['scales'])}"]
    elif claim["rule"]["kind"] == "open":
        name, parts = "open", ["no rule yet"]
    else:
        by_itself, reason = decide(findings, claim["margin"], claim["min_seeds"], correction, elsewhere)
        name, parts = _with_placebos(by_itself, nulls)
        parts += [reason, "; ".join(finding.text for finding in findings if finding.text)]
        reported = {finding.label for finding in findings}
        if more := "; ".join(f.text for f in elsewhere if f.interval is not None and f.label not in reported):
            parts.append(f"Under other decodings: {more}")
        if by_itself != "open":
            worst = min((f for f in decisive if f.value), key=lambda f: nearness(f, claim["margin"]))
            key = f"{worst.label.replace('_', ' ')} {worst.value}".strip() + f" (n = {worst.n})"
            placebo = placebos.summary(claim, nulls)
            decoded = _kept_orders(findings, elsewhere)
        if correction and by_itself == "supported":
            parts.append(f"p = {correction[0]:.2g} after Holm's correction, family of {correction[1]}")
    if limit and scale in claim["scales"]:
        parts.append(f"not testable at this scale: {limit}")
    parts.append(claim.get("caveat", ""))
    if "superseded" in claim and name != "not testable at this scale":
        name, parts = "superseded", [f"superseded by {claim['superseded']}; by its own rule {name}", *parts]
    return Verdict(
        id=claim["id"],
        title=claim["title"],
        statement=claim["statement"],
        rule=claim["rule"]["kind"],
        verdict=name,
        text=". ".join(part for part in parts if part),
        key=key,
        placebo=placebo,
        decodings=decoded,
        findings=(*findings, *elsewhere),
        intervals={finding.label: finding.interval for finding in findings if finding.interval is not None},
        n=min((finding.n for finding in decisive), default=0),
        p=correction[0] if correction else p,
        rule_hash=rule_hash(claim),
    )


def _with_placebos(by_itself: str, nulls: list[Placebo]) -> tuple[str, list[str]]:
    """Return the verdict and the words that the placebos make of one.

    A rule that a null passes cannot support a claim, with however many runs. What it contradicts stays contradicted:
    the favoured arm lacks what even a null has.
    """
    passed = [null for null in nulls if null.passed]
    if not passed or by_itself not in ("supported", "within margin", "underpowered"):
        return by_itself, []
    won = "; ".join(finding.text for null in passed for finding in null.findings)
    holds = f"the rule holds as well for {', '.join(null.words for null in passed)} ({won})"
    return "not evidence", [f"{holds}; by itself {by_itself}"]


def _elsewhere(claim: Claim, evidence: Evidence) -> list[Finding]:
    """Return a claim's comparisons under the decodings that it does not declare; none decides by itself."""
    under = RULES[claim["rule"]["kind"]].under
    others = [under(claim, decoding) for decoding in DECODINGS]
    findings = [finding for other in others if other is not None for finding in find(other, evidence)]
    return [replace(finding, decisive=False) for finding in findings if finding.compared]


def _kept_orders(findings: Sequence[Finding], elsewhere: Sequence[Finding]) -> str:
    """Return in words, for each other decoding, how many comparisons keep their order; empty where there are none."""
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
