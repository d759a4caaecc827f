"""The claims as paper/claims.yaml declares them, checked, and the hash of what each declares."""

import hashlib
from collections import Counter
from numbers import Real
from pathlib import Path

from evoalign_lib.analysis.arrays import require
from evoalign_study import paths
from evoalign_study.claims.checks import Schema, check, some
from evoalign_study.claims.rules import check_rule
from evoalign_study.claims.selection import Claim
from evoalign_study.records import canonical_json

SCALES = ("tiny", "full")
"""At which a claim may be decided."""

_SCHEMA: dict[str, Schema] = dict.fromkeys(("id", "title", "statement", "quantity", "source"), str)
_SCHEMA |= {"notebooks": [str], "scales": [SCALES], "rule": dict, "cells?": dict, "not_testable?": some(SCALES, str)}
_SCHEMA |= dict.fromkeys(("primary?", "note?", "caveat?", "superseded?"), str)
_JUDGED = {"unit": str, "arms": dict, "test": str, "margin": Real, "min_seeds": int}
"""What a claim has besides whose rule is not open."""
_UNHASHED = ("title", "notebooks", "note", "caveat", "superseded")
_FEWEST_SEEDS = 8
_MOST_PRIMARY = 4


def load_claims(path: Path | None = None) -> list[Claim]:
    """Return the declared claims, each checked.

    path: a claims.yaml; by default the paper's. Raises ValueError for unknown or missing keys, repeated ids, a claim
    superseded by one that is not declared, and more than four primary claims of a notebook.
    """
    import yaml

    text = (path or paths.PAPER / "claims.yaml").read_text(encoding="utf-8")
    claims = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # in C, where PyYAML was built with it: 8x
    require(isinstance(claims, list), f"claims.yaml holds a {type(claims).__name__}: it must be a list of claims")
    for claim in claims:
        check_claim(claim)
    times = Counter(claim["id"] for claim in claims)
    for name, n in times.items():
        require(n == 1, f"claim id {name!r} is used {n} times in claims.yaml: ids are unique")
    for claim in claims:
        by = claim.get("superseded", claim["id"])
        require(by in times, f"claim {claim['id']} is superseded by {by!r}, which is not declared")
    for notebook, n in Counter(claim["primary"] for claim in claims if "primary" in claim).items():
        why = f"at most {_MOST_PRIMARY}, or eight seeds cannot pass Holm's correction"
        require(n <= _MOST_PRIMARY, f"notebook {notebook} has {n} primary claims: {why}")
    return claims


def check_claim(claim: Claim) -> None:
    """Raise ValueError, naming the claim and the field, where a claim is not well declared."""
    name = f"claim {claim.get('id', '(without id)')}"
    is_open = claim.get("rule", {}).get("kind") == "open"
    check(name, claim, _SCHEMA | ({f"{key}?": each for key, each in _JUDGED.items()} if is_open else _JUDGED))
    cells, margin, seeds = claim.get("cells", {}), claim.get("margin", 0), claim.get("min_seeds", _FEWEST_SEEDS)
    primary = claim.get("primary", claim["notebooks"][0])
    require(len(cells) < 2, f"{name}: cells vary one field of the spec, got {', '.join(cells)}")
    require(margin >= 0, f"{name}: margin {margin} is negative; 0 declares none")
    fewest = f"a verdict needs at least {_FEWEST_SEEDS} in a cell"
    require(seeds >= _FEWEST_SEEDS, f"{name}: min_seeds {seeds}: {fewest}")
    require(primary in claim["notebooks"], f"{name} is primary of {primary}, which is none of its notebooks")
    check_rule(claim)


def rule_hash(claim: Claim) -> str:
    """Return the SHA-256 (hexadecimal) of what a claim declares; title, notebooks and remarks are not part of it."""
    declared = {key: value for key, value in claim.items() if key not in _UNHASHED}
    return hashlib.sha256(canonical_json(declared).encode()).hexdigest()
