"""The ledger of claims: declared in paper/claims.yaml before they are tested, judged by code from the run records.

A claim selects its runs by the fields of their specs, compares them by a named rule, and gets one of six verdicts.
`decide` is the whole of the judgement; everything else selects records and words the result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evoalign_lib import paths
from evoalign_lib._render import canonical_json
from evoalign_lib.stats import Interval, accuracy_matrix, bootstrap_mean, crossed_bootstrap

VERDICTS = ("supported", "contradicted", "within margin", "underpowered", "not testable at this scale", "open")
"""All verdicts; "open" is a claim of which no run exists yet."""

_Record = dict[str, Any]
_REQUIRED = ("id", "statement", "scales", "quantity", "unit", "arms", "test", "margin", "min_seeds", "rule", "source")
_OPTIONAL = ("cells", "note")
_FEWEST_SEEDS = 8


@dataclass(frozen=True)
class Verdict:
    """What the records say of one claim."""

    id: str
    """The claim's identifier, such as "E1"."""
    statement: str
    """What is claimed."""
    verdict: str
    """One of `VERDICTS`."""
    text: str
    """The reason in words: intervals, n, base accuracy, smallest detectable effect."""
    intervals: dict[str, Interval]
    """The interval of each finding, by its label, in the unit of the quantity."""
    n: int
    """Units (seeds, repeats) in the smallest cell."""
    rule_hash: str
    """`rule_hash` of the claim as it was judged."""


@dataclass(frozen=True)
class Finding:
    """One comparison that a claim rests on: a quantity that should lie beyond a bound."""

    label: str
    """The cell or quantity, such as "A0"."""
    n: int
    """Units in the smaller arm; 0 where an arm has no run."""
    have: str
    """The runs found, in words."""
    interval: Interval | None
    """The quantity; None where an arm has no run."""
    bound: float = 0.0
    """The value that the quantity is compared with."""
    above: bool = True
    """Whether the claim says above the bound (otherwise below)."""
    text: str = ""
    """The quantity in words, with its context."""


def load_claims(path: Path | None = None) -> list[dict[str, Any]]:
    """Return the declared claims, each checked.

    path: a claims.yaml; by default the paper's. Raises ValueError for unknown or missing keys and repeated ids.
    """
    import yaml

    claims = yaml.safe_load((path or paths.PAPER / "claims.yaml").read_text(encoding="utf-8"))
    if not isinstance(claims, list):
        raise ValueError(f"claims.yaml holds a {type(claims).__name__}: it must be a list of claims")
    for claim in claims:
        check_claim(claim)
    ids = [claim["id"] for claim in claims]
    repeated = sorted({name for name in ids if ids.count(name) > 1})
    if repeated:
        raise ValueError(f"claim id {repeated[0]!r} is used twice in claims.yaml: ids are unique")
    return claims


def check_claim(claim: dict[str, Any]) -> None:
    """Raise ValueError, naming the claim and the field, where a claim is not well declared."""
    name = f"claim {claim.get('id', '(without id)')}"
    missing = [key for key in _REQUIRED if key not in claim]
    if missing:
        raise ValueError(f"{name} does not declare {', '.join(missing)}")
    _refuse_unknown(f"{name}, claim", claim, (*_REQUIRED, *_OPTIONAL))
    rule = claim["rule"]
    if rule.get("kind") not in RULES:
        raise ValueError(f"{name}: unknown rule kind {rule.get('kind')!r}; known: {', '.join(RULES)}")
    known = RULES[rule["kind"]]
    for where, given, wanted in (("rule", rule, ("kind", *known.keys)), ("arms", claim["arms"], known.arms)):
        _refuse_unknown(f"{name}, {where} of kind {rule['kind']}", given, wanted)
        lacking = [key for key in wanted if key not in given]
        if lacking:
            raise ValueError(f"{name}: {where} of kind {rule['kind']} must declare {lacking[0]!r}")
    for side in ("below", "above"):
        _refuse_unknown(f"{name}, {side}", rule.get(side, {}), tuple(QUANTITIES))
    _refuse_unknown(f"{name}, scales", claim["scales"], ("tiny", "full"))
    if len(claim.get("cells", {})) > 1:
        raise ValueError(f"{name}: cells vary one field of the spec, got {', '.join(claim['cells'])}")
    if claim["margin"] < 0:
        raise ValueError(f"{name}: margin {claim['margin']} is negative; 0 declares none")
    if claim["min_seeds"] < _FEWEST_SEEDS:
        raise ValueError(f"{name}: min_seeds {claim['min_seeds']}: a verdict needs at least {_FEWEST_SEEDS} in a cell")


def rule_hash(claim: dict[str, Any]) -> str:
    """Return the SHA-256 (hexadecimal) of everything a claim declares; only its note may change without changing it."""
    declared = {key: value for key, value in claim.items() if key != "note"}
    return hashlib.sha256(canonical_json(declared).encode()).hexdigest()


def evaluate(claim: dict[str, Any], records: Iterable[_Record], scale: str = "tiny") -> Verdict:
    """Judge one claim by run records; a pure function of its arguments.

    claim: as in claims.yaml. records: run records of any notebooks; finished ones of this scale are used.
    Returns the verdict. Raises ValueError for a claim that is not well declared, and for records that do not form the
    cells it declares: a seed twice, other hyper-parameters or another base in one cell.
    """
    check_claim(claim)

    def verdict(name: str, text: str, findings: list[Finding]) -> Verdict:
        intervals = {finding.label: finding.interval for finding in findings if finding.interval is not None}
        n = min((finding.n for finding in findings), default=0)
        return Verdict(claim["id"], claim["statement"], name, text, intervals, n, rule_hash(claim))

    if scale not in claim["scales"]:
        return verdict("not testable at this scale", f"declared for scale {', '.join(claim['scales'])}", [])
    used = [r for r in records if r["status"] == "finished" and r["spec"]["scale"] == scale]
    findings = RULES[claim["rule"]["kind"]].find(claim, used)
    name, reason = decide(findings, claim["margin"], claim["min_seeds"])
    measured = "; ".join(finding.text for finding in findings if finding.interval is not None)
    return verdict(name, ". ".join(part for part in (reason, measured) if part), findings)


def evaluate_all(scale: str = "tiny") -> list[Verdict]:
    """Judge every claim of paper/claims.yaml by the committed records of all notebooks at one scale."""
    records = committed_records(scale)
    return [evaluate(claim, records, scale) for claim in load_claims()]


def committed_records(scale: str = "tiny") -> list[_Record]:
    """Return the records in paper/results/*/<scale>.jsonl, notebook by notebook."""
    files = sorted(paths.RESULTS.glob(f"*/{scale}.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def decide(findings: list[Finding], margin: float, min_seeds: int) -> tuple[str, str]:
    """Return the verdict and, where it needs one, the reason.

    Each finding has an excess: how far the quantity lies beyond its bound in the claimed direction. A finding with too
    few units, or one unit, is underpowered. Otherwise, by the 95 % interval of the excess: wholly above the margin
    supports; wholly within +-margin (if there is one) is within margin; wholly below the margin contradicts; anything
    else is underpowered. A claim is contradicted by any finding, supported only by all: no correction for several
    cells is needed to support it, and none is made to contradict it. Where no cell has runs of all arms it is open.
    """
    if all(finding.n == 0 for finding in findings):
        return "open", "nothing to compare yet"
    few = [finding for finding in findings if finding.n < min_seeds]
    if few:
        return "underpowered", f"needs {min_seeds} a cell, has " + "; ".join(finding.have for finding in few)
    outcomes = {finding.label: _outcome(finding, margin) for finding in findings}
    for name in ("contradicted", "underpowered", "within margin"):
        labels = [label for label, outcome in outcomes.items() if outcome == name]
        if labels:
            reason = "the interval does not decide" if name == "underpowered" else name
            return name, f"{reason} on {', '.join(labels)}" if len(findings) > 1 else ""
    return "supported", ""


def _outcome(finding: Finding, margin: float) -> str:
    interval, bound = finding.interval, finding.bound
    low, high = interval.low - bound, interval.high - bound
    if not finding.above:
        low, high = -high, -low
    if low > margin:
        return "supported"
    if margin > 0 and -margin <= low and high <= margin:
        return "within margin"
    return "contradicted" if high < margin else "underpowered"


def _interval_above(claim: dict[str, Any], records: list[_Record]) -> list[Finding]:
    """Find, in each cell, the mean difference of test accuracy between treatment and comparison."""
    decoding = claim["rule"]["decoding"]
    treatment, comparison = (
        spec.get("arm", spec.get("kind")) for spec in (claim["arms"][arm] for arm in ("treatment", "comparison"))
    )
    findings = []
    for label, where in _cells(claim):
        treated = _select(claim, records, "treatment", where)
        compared = _select(claim, records, "comparison", where)
        have = f"{label}: {len(treated)} of {treatment}, {len(compared)} of {comparison}"
        if not treated or not compared:
            findings.append(Finding(label, 0, have, None))
            continue
        digests = sorted({record["spec"]["base_digest"] for record in treated + compared})
        if len(digests) > 1:
            raise ValueError(f"claim {claim['id']}, {label}: runs start from different bases ({', '.join(digests)})")
        arm, other = accuracy_matrix(treated, decoding), accuracy_matrix(compared, decoding)
        # a model without seed is one fixed thing: its row moves with the problems alone, and it needs no replicates
        fixed = claim["unit"] not in compared[0]["spec"]
        gain = crossed_bootstrap(arm, other[0] if fixed else other)
        text = (
            f"{label} {gain.format()} points from {100 * other.mean():.1f} % "
            f"(n = {gain.n}, detectable {100 * gain.detectable():.1f})"
        )
        findings.append(Finding(label, gain.n, have, gain, text=text))
    return findings


def _bounds(claim: dict[str, Any], records: list[_Record]) -> list[Finding]:
    """Find, in each cell, the means of record quantities that should lie below or above given values."""
    rule = claim["rule"]
    bounds = [(name, value, False) for name, value in rule["below"].items()]
    bounds += [(name, value, True) for name, value in rule.get("above", {}).items()]
    findings = []
    for cell, where in _cells(claim):
        selected = _select(claim, records, "treatment", where)
        for name, bound, above in bounds:
            label = f"{cell} {name}".strip()
            have = f"{label}: {len(selected)}"
            if not selected:
                findings.append(Finding(label, 0, have, None))
                continue
            try:
                values = [QUANTITIES[name](record) for record in selected]
            except KeyError as error:
                raise ValueError(f"claim {claim['id']}: a record has no {error}, of which {name!r} is made") from error
            interval = bootstrap_mean(values)
            low, high = (f"{end:.3g}" for end in (interval.low, interval.high))
            text = f"{label.replace('_', ' ')} {interval.value:.3g} [{low}, {high}] (n = {interval.n})"
            findings.append(Finding(label, interval.n, have, interval, float(bound), above, text))
    return findings


def _cells(claim: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the label and the spec field of every cell; one cell without field where none are declared."""
    cells = claim.get("cells", {})
    return [(str(value), {field: value}) for field, values in cells.items() for value in values] or [("", {})]


def _select(claim: dict[str, Any], records: list[_Record], arm: str, where: dict[str, Any]) -> list[_Record]:
    """Return the runs of one arm in one cell, sorted by unit; they differ in nothing else."""
    wanted = claim["arms"][arm] | where
    chosen = [r for r in records if all(r["spec"].get(field) == value for field, value in wanted.items())]
    unit, context = claim["unit"], f"claim {claim['id']}, {arm} {wanted}"
    if chosen and all(unit not in record["spec"] for record in chosen):
        if len(chosen) > 1:
            raise ValueError(f"{context}: {len(chosen)} records without {unit!r}: select one by its spec")
        return chosen
    units = [record["spec"].get(unit) for record in chosen]
    if len(set(units)) < len(units):
        raise ValueError(f"{context}: two records of one {unit} among {sorted(map(str, units))}: select by their specs")
    for record in chosen:
        differing = sorted(
            field
            for field in record["spec"].keys() | chosen[0]["spec"].keys()
            if field != unit and record["spec"].get(field) != chosen[0]["spec"].get(field)
        )
        if differing:
            raise ValueError(f"{context}: runs differ in {', '.join(differing)}: name its value in the claim's arms")
    return sorted(chosen, key=lambda record: record["spec"][unit])


def _refuse_unknown(where: str, given: Iterable[str], known: tuple[str, ...]) -> None:
    unknown = [key for key in given if key not in known]
    if unknown:
        raise ValueError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(known)}")


@dataclass(frozen=True)
class _Rule:
    """A kind of rule: how it finds what the verdict rests on, the keys it takes, the arms it compares."""

    find: Callable[[dict[str, Any], list[_Record]], list[Finding]]
    keys: tuple[str, ...]
    arms: tuple[str, ...]


QUANTITIES: dict[str, Callable[[_Record], float]] = {
    "absolute_cosine": lambda r: abs(r["estimator"]["cosine"]),
    "aligned_over_orthogonal_gain": lambda r: r["estimator"]["gain_aligned"] - abs(r["estimator"]["gain_orthogonal"]),
    "replay_error": lambda r: r["ledger"]["replay_error"],
    "ledger_bytes_a_step": lambda r: r["ledger"]["bytes"] / r["spec"]["steps"],
    "gzipped_bytes_a_step": lambda r: r["ledger"]["gzip_bytes"] / r["spec"]["steps"],
}
"""What a rule may ask of a record: numbers computed from its `estimator` or `ledger` block."""

RULES: dict[str, _Rule] = {
    "interval_above": _Rule(_interval_above, ("decoding",), ("treatment", "comparison")),
    "estimator_bounds": _Rule(_bounds, ("below", "above"), ("treatment",)),
    "ledger_bounds": _Rule(_bounds, ("below",), ("treatment",)),
}
"""The kinds of rule that a claim may declare."""
