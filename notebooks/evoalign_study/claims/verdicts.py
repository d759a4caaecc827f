"""Verdicts on the claims of paper/claims.yaml, judged from the run records and put into words.

A claim selects its runs by the fields of their specs, and its rule turns them into findings. `decide` alone makes the
judgement from these. What an arm without learning would also get is no evidence, and a comparison that the comparator
itself fails decides nothing (`placebos`).

ES optimises greedy decoding and GRPO samples at temperature 1, so a comparison under either decoding favours one arm.
Each comparison that a verdict rests on is therefore repeated under every decoding of `DECODINGS` that its claim does
not declare. If the order of the arms changes and both intervals exclude 0, the verdict is "depends on decoding". The
repeated comparisons affect a verdict in no other way.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from evoalign_lib.analysis import stats
from evoalign_lib.analysis.stats import Interval
from evoalign_lib.checks import nearest
from evoalign_study.claims import placebos
from evoalign_study.claims.decision import contradicting, decide, nearness, outcome, p_value
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
    "undecided",
    "not testable at this scale",
    "superseded",
    "open",
)
"""All verdicts; "undecided": the comparator fails the rule itself, "open": the claim has no rule yet, or no runs."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on one claim, with the findings behind it."""

    id: str
    """The claim's identifier, such as "E1"."""
    title: str
    """What is claimed, in a few words."""
    rule: str
    """The kind of its rule; "open": it has no rule yet."""
    statement: str
    """What is claimed."""
    verdict: str
    """One of `VERDICTS`."""
    text: str
    """The reason in words: intervals, n, base accuracy, smallest detectable effect."""
    key: str
    """The strongest finding against the claim, in short. Empty if there are no runs."""
    placebo: str
    """Which null arms replaced the favoured one, and whether the rule held for them. Empty if there is nothing to
    judge."""
    control: str
    """How many comparisons the comparator passes in the challenger's place, and which it fails. Empty if it can be
    asked none."""
    decodings: str
    """Whether its comparisons keep their order under other decodings. Empty if there is no other decoding to compare,
    or nothing to judge."""
    findings: tuple[Finding, ...]
    """Every comparison: first the declared ones, then those under other decodings."""
    intervals: dict[str, Interval]
    """The interval of each finding that the claim declares, by its label, in the unit of the quantity."""
    n: int
    """Units in the smallest cell."""
    units: str
    """What these units are, such as "seed", and how intervals are made from them."""
    p: float | None
    """The largest p-value of the findings, since all must hold; for a primary claim, after Holm's correction. None if
    a finding has none."""
    rule_hash: str
    """The claim's `rule_hash` when it was judged."""
    scale: str
    """The scale of the records."""


def evaluate_named(
    ids: Sequence[str],
    records: Iterable[Record],
    scale: str = "tiny",
    declared: Sequence[Claim] | None = None,
    *,
    resamples: int = 10_000,
) -> list[Verdict]:
    """Judge claims from run records; primary claims of a notebook share Holm's correction (p = 1 without runs).

    ids: of the claims. records: run records of any notebooks; only finished ones at this scale are used. declared: all
    claims, including those that share a correction with these; by default the paper's. resamples: of every bootstrap
    interval.
    Returns the verdicts, in the order of the ids. Raises ValueError for an undeclared id, for a malformed claim, and
    for records that do not form the declared cells: a repeated seed, or different hyper-parameters or bases in one
    cell.
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
            # a claim that cannot be judged yet counts, so that no verdict depends on the order of the runs
            families[each.claim["primary"]][name] = 1.0 if each.p is None else each.p
    corrections = {name: (p, len(family)) for family in families.values() for name, p in stats.holm(family).items()}
    return [_verdict(judged[name], None if judged[name].p is None else corrections.get(name), scale) for name in ids]


def evaluate_all(scale: str = "tiny") -> list[Verdict]:
    """Judge every claim of paper/claims.yaml from the committed records of all notebooks at one scale.

    With the claims of scale tiny come those that are declared for scale real alone, judged there.
    """
    declared, verdicts = load_claims(), []
    real = [claim["id"] for claim in declared if scale == "tiny" and claim["scales"] == ["real"]]
    for at, ids in ((scale, [claim["id"] for claim in declared if claim["id"] not in real]), ("real", real)):
        verdicts += evaluate_named(ids, committed_records(at), at, declared) if ids else []
    return verdicts


class _Judged(NamedTuple):
    """A claim's findings, those under other decodings, and those with other arms in the places of its own."""

    claim: Claim
    findings: list[Finding]
    """Void ones decide nothing."""
    elsewhere: Sequence[Finding] = ()
    p: float | None = None
    nulls: Sequence[Placebo] = ()
    against: Sequence[Placebo] = ()
    """Nulls that contradict the claim as well."""
    control: str = ""
    void: Mapping[tuple[str, str, str], Finding] = {}
    """Positive controls that the comparator fails, by the key of the comparison."""

    def decide(self, correction: tuple[float, int] | None = None) -> tuple[str, str]:
        """Return the verdict and the reason, before other arms are considered."""
        elsewhere = [finding for finding in self.elsewhere if finding.key not in self.void]
        return decide(self.findings, self.claim["margin"], self.claim["min_seeds"], correction, elsewhere)


def _judge(claim: Claim, evidence: Evidence, scale: str) -> _Judged:
    """Return the findings of a claim, its placebos and its p-value before correction."""
    if scale not in claim["scales"]:
        return _Judged(claim, [])
    try:
        findings = find(claim, evidence)
        if not any(finding.decisive and finding.n for finding in findings):
            return _Judged(claim, findings)
        p = p_value(findings, claim["margin"], claim["min_seeds"])
        nulls, controls = placebos.ask(claim, evidence), placebos.controls(claim, evidence, findings)
        void = {control.key: control for control in controls if outcome(control, claim["margin"]) != "supported"}
        asked = {finding.key for finding in findings if finding.decisive}
        of_rule, failed = ([control for control in some if control.key in asked] for some in (controls, void.values()))
        findings = [_unless_void(finding, void, claim["margin"]) for finding in findings]
        judged = _Judged(claim, findings, _elsewhere(claim, evidence), p, nulls, (), _control(of_rule, failed), void)
        if judged.decide()[0] == "contradicted":
            against = contradicting(findings, claim["margin"])
            judged = judged._replace(against=placebos.ask_against(claim, evidence, against))
        return judged
    except ValueError as error:
        raise ValueError(f"claim {claim['id']}: {error}") from error
    except KeyError as error:
        raise ValueError(f"claim {claim['id']}: a record lacks the field {error}: restore it from git") from error


def _verdict(judged: _Judged, correction: tuple[float, int] | None, scale: str) -> Verdict:
    """Decide the verdict on one claim and put it into words."""
    claim, findings, p, elsewhere = judged.claim, judged.findings, judged.p, judged.elsewhere
    limit, key, placebo, decoded = claim.get("not_testable", {}).get(scale, ""), "", "", ""
    decisive = [finding for finding in findings if finding.decisive]
    if scale not in claim["scales"]:
        name, parts = "not testable at this scale", [limit or f"declared for scale {', '.join(claim['scales'])}"]
    elif claim["rule"]["kind"] == "open":
        name, parts = "open", ["no rule yet"]
    else:
        by_itself, reason = judged.decide(correction)
        name, parts = _in_other_places(by_itself, judged)
        parts += [reason, "; ".join(finding.text for finding in findings if finding.text)]
        reported = {finding.label for finding in findings}
        if more := "; ".join(f.text for f in elsewhere if f.interval is not None and f.label not in reported):
            parts.append(f"Under other decodings: {more}")
        if by_itself != "open":
            worst = min((f for f in decisive if f.value), key=lambda f: nearness(f, claim["margin"]))
            key = f"{worst.label.replace('_', ' ')} {worst.value}".strip() + f" (n = {worst.n})"
            placebo = placebos.summary(claim, judged.nulls)
            decoded = _kept_orders(judged)
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
        control=judged.control,
        decodings=decoded,
        findings=(*findings, *elsewhere),
        intervals={finding.label: finding.interval for finding in findings if finding.interval is not None},
        n=min((finding.n for finding in decisive), default=0),
        units=": ".join(claim[field] for field in ("unit", "test") if field in claim),
        p=correction[0] if correction else p,
        rule_hash=rule_hash(claim),
        scale=scale,
    )


def _in_other_places(by_itself: str, judged: _Judged) -> tuple[str, list[str]]:
    """Return the verdict in view of placebos and positive controls, and the words that explain it.

    A rule that a null passes cannot support a claim, however many runs there are; nor can a contradiction stand that
    nulls give as well. Where the comparator fails a comparison, the others can only contradict the claim.
    """
    favourable = by_itself in ("supported", "within margin", "underpowered")
    void = any(finding.key in judged.void for finding in judged.findings)
    if void and (favourable or by_itself == "open"):
        left = "nothing decides" if by_itself == "open" else by_itself
        return "undecided", [f"its own comparator fails it; without what is void {left}"]
    passed = [null for null in judged.nulls if null.passed and favourable] or judged.against
    if not passed:
        return by_itself, []
    what, names = "the rule holds" if favourable else "it is contradicted", ", ".join(null.words for null in passed)
    won = "; ".join(finding.text for null in passed for finding in null.findings)
    return "not evidence", [f"{what} as well for {names} ({won}); by itself {by_itself}"]


def _control(controls: Sequence[Finding], failed: Sequence[Finding]) -> str:
    """Say how many comparisons the comparator passes in the challenger's place, and which it fails."""
    passed = f"passed {len(controls) - len(failed)} of {len(controls)}" if controls else ""
    return "; ".join(filter(None, (passed, f"failed {'; '.join(f.text for f in failed)}" if failed else "")))


def _unless_void(finding: Finding, void: Mapping[Any, Finding], margin: float) -> Finding:
    """Return a finding, which decides nothing if the comparator fails it.

    A contradiction is void only if the comparator gets it, too, or lies within the margin: that the comparator's
    interval is too wide to pass does not explain it.
    """
    control = void.get(finding.key)
    if control is None or (outcome(control, margin), outcome(finding, margin)) == ("underpowered", "contradicted"):
        return finding
    return replace(finding, decisive=False)


def _elsewhere(claim: Claim, evidence: Evidence) -> list[Finding]:
    """Return a claim's comparisons under the decodings it does not declare; none of them is decisive."""
    under = RULES[claim["rule"]["kind"]].under
    others = [under(claim, decoding) for decoding in DECODINGS]
    findings = [finding for other in others if other is not None for finding in find(other, evidence)]
    return [replace(finding, decisive=False) for finding in findings if finding.compared]


def _kept_orders(judged: _Judged) -> str:
    """Describe, for each other decoding, how many comparisons keep their order; empty if there are none."""
    parts = []
    for decoding in DECODINGS:
        outcomes = Counter(_outcome(judged, other) for other in judged.elsewhere if other.decoding == decoding)
        counted = [f"{n} {outcome}" if len(outcomes) > 1 else outcome for outcome, n in sorted(outcomes.items())]
        if counted:
            parts.append(f"{decoding_words(decoding)}: {', '.join(counted)}")
    return "; ".join(parts)


def _outcome(judged: _Judged, other: Finding) -> str:
    """Return in words whether a comparison keeps its order under another decoding."""
    if other.key in judged.void:
        return "void"
    if other.value == MISSING or not other.n:
        return "not measured"
    if other.interval is None:
        return "not defined"
    signs = {finding.sign() for finding in judged.findings if finding.decisive and finding.compared == other.compared}
    if other.sign() == 0 or signs == {0}:
        return "no clear order"
    return "reversed" if -other.sign() in signs else "same order"
