"""The ledger of claims: declared in paper/claims.yaml before they are tested, judged by code from the run records.

A claim selects its runs by the fields of their specs, compares them by a named rule, and gets one of six verdicts.
`decide` is the whole of the judgement; `verdict_rules` selects records and makes the findings that are judged. The
rules themselves are kept by paper/claims.lock: one that changes after its records exist needs an entry in LOG.md.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evoalign_lib import paths
from evoalign_lib.analysis import stats
from evoalign_lib.analysis.stats import Interval
from evoalign_lib.claims.rules import RULES, Finding, check_keys, check_rule, has_runs
from evoalign_lib.records import canonical_json, read_records

VERDICTS = ("supported", "contradicted", "within margin", "underpowered", "not testable at this scale", "open")
"""All verdicts; "open" is a claim that has no rule yet, or of which no run exists yet."""

_Record = dict[str, Any]
_Claim = dict[str, Any]
_REQUIRED = ("id", "title", "notebooks", "statement", "scales", "quantity", "rule", "source")
_JUDGED = ("unit", "arms", "test", "margin", "min_seeds")
_OPTIONAL = ("cells", "primary", "not_testable", "note")
_UNHASHED = ("title", "notebooks", "note")
_SCALES = ("tiny", "full")
_FEWEST_SEEDS = 8
_MOST_PRIMARY = 4


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
    intervals: dict[str, Interval]
    """The interval of each finding, by its label, in the unit of the quantity."""
    n: int
    """Units (seeds, repeats) in the smallest cell."""
    p: float | None
    """The largest p-value of the findings, all of which must hold; of a primary claim after Holm's correction. None
    where a finding has none."""
    rule_hash: str
    """`rule_hash` of the claim as it was judged."""


def load_claims(path: Path | None = None) -> list[_Claim]:
    """Return the declared claims, each checked.

    path: a claims.yaml; by default the paper's. Raises ValueError for unknown or missing keys, repeated ids, and more
    than four primary claims of a notebook.
    """
    import yaml

    claims = yaml.safe_load((path or paths.PAPER / "claims.yaml").read_text(encoding="utf-8"))
    if not isinstance(claims, list):
        raise ValueError(f"claims.yaml holds a {type(claims).__name__}: it must be a list of claims")
    for claim in claims:
        check_claim(claim)
    for name, times in Counter(claim["id"] for claim in claims).items():
        if times > 1:
            raise ValueError(f"claim id {name!r} is used {times} times in claims.yaml: ids are unique")
    for notebook, number in Counter(claim["primary"] for claim in claims if "primary" in claim).items():
        if number > _MOST_PRIMARY:
            raise ValueError(
                f"notebook {notebook} has {number} primary claims: at most {_MOST_PRIMARY}, or eight seeds cannot pass "
                "Holm's correction"
            )
    return claims


def check_claim(claim: _Claim) -> None:
    """Raise ValueError, naming the claim and the field, where a claim is not well declared."""
    name = f"claim {claim.get('id', '(without id)')}"
    missing = [key for key in _REQUIRED if key not in claim]
    is_open = claim.get("rule", {}).get("kind") == "open"
    missing += [key for key in _JUDGED if key not in claim and not is_open]
    if missing:
        raise ValueError(f"{name} does not declare {', '.join(missing)}")
    check_keys(f"{name}, claim", claim, (), (*_REQUIRED, *_JUDGED, *_OPTIONAL))
    check_keys(f"{name}, scales", claim["scales"], (), _SCALES)
    check_keys(f"{name}, not_testable", claim.get("not_testable", ()), (), _SCALES)
    if len(claim.get("cells", {})) > 1:
        raise ValueError(f"{name}: cells vary one field of the spec, got {', '.join(claim['cells'])}")
    if claim.get("margin", 0) < 0:
        raise ValueError(f"{name}: margin {claim['margin']} is negative; 0 declares none")
    if claim.get("min_seeds", _FEWEST_SEEDS) < _FEWEST_SEEDS:
        raise ValueError(f"{name}: min_seeds {claim['min_seeds']}: a verdict needs at least {_FEWEST_SEEDS} in a cell")
    if claim.get("primary", claim["notebooks"][0]) not in claim["notebooks"]:
        raise ValueError(f"{name} is primary of {claim['primary']}, which is none of its notebooks")
    check_rule(claim)


def rule_hash(claim: _Claim) -> str:
    """Return the SHA-256 (hexadecimal) of what a claim declares: all but its title, its notebooks and its note."""
    declared = {key: value for key, value in claim.items() if key not in _UNHASHED}
    return hashlib.sha256(canonical_json(declared).encode()).hexdigest()


# ---- judgement


def evaluate(
    claim: _Claim, records: Iterable[_Record], scale: str = "tiny", declared: Sequence[_Claim] | None = None
) -> Verdict:
    """Judge one claim by run records.

    claim: as in claims.yaml. records: run records of any notebooks; finished ones of this scale are used.
    declared: all claims, among which are those that share Holm's correction with a primary one; by default the paper's.
    Returns the verdict. Raises ValueError for a claim that is not well declared, and for records that do not form the
    cells it declares: a seed twice, other hyper-parameters or another base in one cell.
    """
    family = [claim]
    if "primary" in claim:
        others = load_claims() if declared is None else declared
        family += [c for c in others if c.get("primary") == claim["primary"] and c["id"] != claim["id"]]
    return evaluate_together(family, records, scale)[0]


def evaluate_together(claims: Sequence[_Claim], records: Iterable[_Record], scale: str = "tiny") -> list[Verdict]:
    """Judge claims by run records; the primary ones of a notebook share Holm's correction (p = 1: no runs).

    Arguments, result and errors: as `evaluate`.
    """
    for claim in claims:
        check_claim(claim)
    used = [r for r in records if r["status"] == "finished" and r["spec"]["scale"] == scale]
    judged, families = [], {}
    for claim in claims:
        try:
            findings = RULES[claim["rule"]["kind"]].find(claim, used) if scale in claim["scales"] else []
        except ValueError as error:
            raise ValueError(f"claim {claim['id']}: {error}") from error
        p = _p(findings, claim)
        judged.append((claim, findings, p))
        if "primary" in claim:  # one that cannot be judged yet counts: a verdict must not hang on the order of runs
            families.setdefault(claim["primary"], {})[claim["id"]] = 1.0 if p is None else p
    judgeable = {claim["id"] for claim, _, p in judged if p is not None}
    corrections = {
        name: (p, len(family))
        for family in families.values()
        for name, p in stats.holm(family).items()
        if name in judgeable
    }
    return [_verdict(claim, findings, p, corrections.get(claim["id"]), scale) for claim, findings, p in judged]


def evaluate_all(scale: str = "tiny") -> list[Verdict]:
    """Judge every claim of paper/claims.yaml by the committed records of all notebooks at one scale."""
    return evaluate_together(load_claims(), committed_records(scale), scale)


def committed_records(scale: str = "tiny") -> list[_Record]:
    """Return the records in paper/results/*/<scale>.jsonl, notebook by notebook, without a torn last line.

    Raises ValueError for a damaged or edited line (`experiments.read_records`), and for a spec that has two records.
    """
    records, files = [], {}
    for file in sorted(paths.RESULTS.glob(f"*/{scale}.jsonl")):
        for record in read_records(file):
            if (name := record["spec_hash"]) in files:
                raise ValueError(
                    f"the spec {name} has two records, in {files[name]} and in {file}: delete one of the two lines, "
                    "and the ledger that it alone names"
                )
            files[name] = file
            records.append(record)
    return records


def decide(
    findings: Sequence[Finding], margin: float, min_seeds: int, correction: tuple[float, int] | None = None
) -> tuple[str, str]:
    """Return the verdict and, where it needs one, the reason.

    Each finding has an excess: how far the quantity lies beyond its bound in the claimed direction. A finding with too
    few units, or one unit, is underpowered. Otherwise, by the 95 % interval of the excess: wholly above the margin
    supports; wholly within +-margin (if there is one) is within margin; wholly below the margin contradicts; anything
    else is underpowered. Where the claim says that two arms match, the 90 % interval (two one-sided tests at 5 %)
    supports it wholly inside +-margin, contradicts it wholly outside, and is underpowered otherwise. A finding whose
    quantity is not defined on its runs is underpowered. A claim is contradicted by any finding, supported only by all:
    no correction for several cells is needed to support it, and none is made to contradict it. Where no cell has runs
    of all arms it is open.

    correction: of a primary claim the p-value after Holm's correction and the number of claims corrected for; what
    would be supported is underpowered unless that p-value is below 0.05.
    """
    findings = [finding for finding in findings if finding.decisive]
    if all(finding.n == 0 for finding in findings):
        lacking = dict.fromkeys(finding.lacks for finding in findings if finding.lacks)
        return "open", "; ".join(["nothing to compare yet", *lacking])
    few = [finding for finding in findings if finding.n < min_seeds]
    if few:
        return "underpowered", f"needs {min_seeds} a cell, has " + "; ".join(finding.have for finding in few)
    outcomes = {finding.label: _outcome(finding, margin) for finding in findings}
    for name in ("contradicted", "underpowered", "within margin"):
        labels = [label for label, outcome in outcomes.items() if outcome == name]
        if labels:
            reason = "the interval does not decide" if name == "underpowered" else name
            return name, f"{reason} on {', '.join(labels)}" if len(findings) > 1 else ""
    if correction and correction[0] >= 0.05:
        p, claims = correction
        return "underpowered", f"supported by itself, but p = {p:.2g} after Holm's correction, family of {claims}"
    return "supported", ""


def _outcome(finding: Finding, margin: float) -> str:
    if finding.interval is None:
        return "underpowered"
    _, low, high = finding.excess()
    if finding.side == "within":
        if -margin < low and high < margin:
            return "supported"
        return "contradicted" if high <= -margin or margin <= low else "underpowered"
    if low > margin:
        return "supported"
    if margin > 0 and -margin <= low and high <= margin:
        return "within margin"
    return "contradicted" if high < margin else "underpowered"


def _p(findings: Sequence[Finding], claim: _Claim) -> float | None:
    """Return the p-value of a claim, the largest of its findings'; None unless all can be judged."""
    decisive = [finding for finding in findings if finding.decisive]
    if not decisive or any(f.interval is None or f.n < claim["min_seeds"] for f in decisive):
        return None
    return max(finding.p(claim["margin"]) for finding in decisive)


def _verdict(
    claim: _Claim, findings: list[Finding], p: float | None, correction: tuple[float, int] | None, scale: str
) -> Verdict:
    """Word what was found of one claim."""
    limit = claim.get("not_testable", {}).get(scale, "")
    decisive, key = [finding for finding in findings if finding.decisive], ""
    if scale not in claim["scales"]:
        name, parts = "not testable at this scale", [limit or f"declared for scale {', '.join(claim['scales'])}"]
    elif claim["rule"]["kind"] == "open":
        name, parts = "open", ["no rule yet"]
    else:
        name, reason = decide(findings, claim["margin"], claim["min_seeds"], correction)
        parts = [reason, "; ".join(finding.text for finding in findings if finding.text)]
        if name != "open":
            worst = min((f for f in decisive if f.value), key=lambda f: _nearness(f, claim["margin"]))
            key = f"{worst.label.replace('_', ' ')} {worst.value}".strip() + f" (n = {worst.n})"
        if correction and name == "supported":
            parts.append(f"p = {correction[0]:.2g} after Holm's correction, family of {correction[1]}")
    if limit and scale in claim["scales"]:
        parts.append(f"not testable at this scale: {limit}")
    return Verdict(
        id=claim["id"],
        title=claim["title"],
        statement=claim["statement"],
        rule=claim["rule"]["kind"],
        verdict=name,
        text=". ".join(part for part in parts if part),
        key=key,
        intervals={finding.label: finding.interval for finding in findings if finding.interval is not None},
        n=min((finding.n for finding in decisive), default=0),
        p=correction[0] if correction else p,
        rule_hash=rule_hash(claim),
    )


def _nearness(finding: Finding, margin: float) -> tuple[int, float, float]:
    """Return what sorts findings from the one that speaks most against a claim."""
    order = ("contradicted", "underpowered", "within margin", "supported").index(_outcome(finding, margin))
    return (order, -1.0, 0.0) if finding.interval is None else (order, -finding.p(margin), finding.excess()[1])


# ---- the lock


def read_lock() -> dict[str, list[str]]:
    """Return paper/claims.lock as the hashes of each claim's rule, oldest first.

    A line is "id date hash", written when a rule was declared or changed. Raises ValueError for any other line.
    """
    path = paths.PAPER / "claims.lock"
    locked: dict[str, list[str]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path.exists() else (), 1):
        found = re.fullmatch(r"(\w+) \d{4}-\d\d-\d\d ([0-9a-f]{64})", line)
        if not found:
            raise ValueError(f"claims.lock, line {number} is not 'id date hash': {line[:100]!r}; write it by --lock")
        locked.setdefault(found[1], []).append(found[2])
    return locked


def lock_problems() -> list[str]:
    """Return, one line each, the claims whose rule is not the locked one, or was changed without an entry in LOG.md."""
    locked, log, problems = read_lock(), _log(), []
    declared = load_claims()
    for claim in declared:
        name, present = claim["id"], rule_hash(claim)
        hashes = locked.get(name, [])
        if not hashes and claim["rule"]["kind"] != "open":
            problems.append(f"claim {name} has a rule and no line in claims.lock: run evoalign claims --lock")
        elif hashes and hashes[-1] != present:
            problems.append(f"claim {name} is not what claims.lock holds: it was changed, or the lock was")
        elif len(hashes) > 1 and present[:12] not in log:
            problems.append(f"claim {name} was changed: LOG.md must say why and quote {present[:12]}")
    gone = sorted(locked.keys() - {claim["id"] for claim in declared})
    return problems + [f"claim {name} is in claims.lock and no longer declared: a claim stays" for name in gone]


def lock(date: str) -> list[str]:
    """Add to paper/claims.lock a line for every rule that it does not hold yet, and return these lines.

    date: year-month-day. A rule that was locked before, or that is declared when its runs exist, is a change: raises
    ValueError, and writes nothing, unless LOG.md quotes the first 12 digits of its hash.
    """
    locked, log = read_lock(), _log()
    records = [record for scale in _SCALES for record in committed_records(scale)]
    added, refused = [], []
    for claim in load_claims():
        name, present = claim["id"], rule_hash(claim)
        hashes = locked.get(name, [])
        if hashes[-1:] == [present] or (claim["rule"]["kind"] == "open" and not hashes):
            continue
        why = "was locked with another rule" if hashes else "has runs already" if has_runs(claim, records) else ""
        if why and present[:12] not in log:
            refused.append(f"claim {name} {why}: say in LOG.md why it is this one now, and quote {present[:12]}")
        added.append(f"{name} {date} {present}")
    if refused:
        raise ValueError("\n".join(refused))
    if added:
        with open(paths.PAPER / "claims.lock", "a", encoding="utf-8", newline="\n") as file:
            file.write("".join(f"{line}\n" for line in added))
    return added


def _log() -> str:
    path = paths.ROOT / "LOG.md"
    return path.read_text(encoding="utf-8") if path.exists() else ""
