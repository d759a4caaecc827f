"""Load and check the claims that paper/claims.yaml declares, and lock each by the hash of its declaration.

The lock, paper/claims.lock, keeps the hash of every rule, so that no rule can change unnoticed after its runs. A rule
that changes once its records exist needs an entry in LOG.md that quotes the new hash. Lines are only ever added to the
lock: the git history reveals a hash that was overwritten.
"""

import hashlib
import re
from collections import Counter
from numbers import Real
from pathlib import Path

from evoalign_lib.checks import require
from evoalign_study import history, paths
from evoalign_study.claims.checks import Schema, check, of_spec, some
from evoalign_study.claims.rules import check_rule
from evoalign_study.claims.selection import Claim, committed_records, has_runs
from evoalign_study.records import canonical_json

SCALES = ("tiny", "full", "real")
"""The scales at which a claim may be decided."""

_SCHEMA: dict[str, Schema] = dict.fromkeys(("id", "title", "statement", "quantity", "source"), str)
_SCHEMA |= {"notebooks": [str], "scales": [SCALES], "rule": dict, "cells?": dict, "not_testable?": some(SCALES, str)}
_SCHEMA |= dict.fromkeys(("primary?", "note?", "caveat?", "superseded?"), str)
_JUDGED = {"unit": str, "arms": dict, "test": str, "margin": Real, "min_seeds": int}
"""Further fields of a claim, required unless its rule is open."""
_UNHASHED = ("title", "notebooks", "note", "caveat", "superseded")
_FEWEST_SEEDS = 8
_FEWEST_REAL = 6  # at scale "real" alone: a run costs minutes of a GPU, and effects are expected to be large
_MOST_PRIMARY = 4


def load_claims(path: Path | None = None) -> list[Claim]:
    """Load the declared claims and check each of them.

    path: a claims.yaml; by default the paper's. Raises ValueError for unknown or missing keys, repeated ids, a claim
    superseded by an undeclared one, and more than four primary claims in a notebook.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C loader, if there: 8 times faster
    try:
        claims = yaml.load((path or paths.PAPER / "claims.yaml").read_text(encoding="utf-8"), loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"claims.yaml cannot be read: {error}") from error
    require(isinstance(claims, list), f"claims.yaml holds a {type(claims).__name__}: it must hold a list of claims")
    for claim in claims:
        check_claim(claim)
    times = Counter(claim["id"] for claim in claims)
    for name, n in times.items():
        require(n == 1, f"claim id {name!r} is used {n} times in claims.yaml: give each claim its own id")
    for claim in claims:
        by = claim.get("superseded", claim["id"])
        require(by in times, f"claim {claim['id']} is superseded by {by!r}, which is not declared: declare it")
    for notebook, n in Counter(claim["primary"] for claim in claims if "primary" in claim).items():
        why = f"declare at most {_MOST_PRIMARY}; with more, eight seeds cannot pass Holm's correction"
        require(n <= _MOST_PRIMARY, f"notebook {notebook} has {n} primary claims: {why}")
    return claims


def check_claim(claim: Claim) -> None:
    """Raise ValueError, naming the claim and the field, if the declaration of a claim is malformed."""
    require(isinstance(claim, dict), f"claims.yaml has {claim!r:.80} in the place of a claim")
    name = f"claim {claim.get('id', '(without id)')}"
    try:
        _check(name, claim)
        rule_hash(claim)  # what is no JSON
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        if str(error).startswith(name):
            raise
        raise ValueError(f"{name} is malformed ({type(error).__name__}: {error}): compare it with another") from error


def _check(name: str, claim: Claim) -> None:
    is_open = claim.get("rule", {}).get("kind") == "open"
    check(name, claim, _SCHEMA | ({f"{key}?": each for key, each in _JUDGED.items()} if is_open else _JUDGED))
    least = _FEWEST_REAL if claim["scales"] == ["real"] else _FEWEST_SEEDS
    cells, margin, seeds = claim.get("cells", {}), claim.get("margin", 0), claim.get("min_seeds", least)
    primary = claim.get("primary", claim["notebooks"][0])
    check(f"{name}, cells", list(cells.values()), [[of_spec]])
    require(len(cells) < 2, f"{name}: cells vary {', '.join(cells)}: declare one field of the spec")
    require(margin >= 0, f"{name}: margin {margin} is negative: declare 0 for no margin")
    require(seeds >= least, f"{name}: min_seeds {seeds}: declare at least {least}, which a verdict needs in each cell")
    require(primary in claim["notebooks"], f"{name} is primary of {primary}, which is not one of its notebooks")
    check_rule(claim)


def rule_hash(claim: Claim) -> str:
    """Return the SHA-256 (hexadecimal) of what a claim declares, without its title, notebooks and remarks."""
    declared = {key: value for key, value in claim.items() if key not in _UNHASHED}
    return hashlib.sha256(canonical_json(declared).encode()).hexdigest()


# ---- the lock


def read_lock() -> dict[str, list[str]]:
    """Read paper/claims.lock: the hashes of each claim's rule, oldest first.

    A line is "id date hash", written when a rule was declared or changed. Raises ValueError for any other line.
    """
    path = paths.PAPER / "claims.lock"
    locked: dict[str, list[str]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path.exists() else (), 1):
        match = _LINE.fullmatch(line)
        if not match:
            raise ValueError(f"claims.lock, line {number} is not 'id date hash': {line[:100]!r}; write it with --lock")
        locked.setdefault(match[1], []).append(match[2])
    return locked


def lock_problems() -> list[str]:
    """Return the problems of the claims and their lock, one line each.

    Every rule must match the last line of its claim. For every line of a claim after its first, and for every line that
    has disappeared from the lock (`once_locked`), LOG.md must quote the first 12 digits of the hash.
    """
    locked, log, problems = read_lock(), _log(), []
    declared = {claim["id"]: claim for claim in load_claims()}
    for name, claim in declared.items():
        present, hashes = rule_hash(claim), locked.get(name, [])
        if not hashes and claim["rule"]["kind"] != "open":
            why = "has a rule and no line in claims.lock: run python -m evoalign_study claims --lock"
            problems.append(f"claim {name} {why}")
        elif hashes and hashes[-1] != present:
            problems.append(f"claim {name} is not what claims.lock holds: it was changed, or the lock was")
        unquoted = [later[:12] for later in hashes[1:] if later[:12] not in log]
        problems += [f"claim {name} was changed: LOG.md must say why and quote {digits}" for digits in unquoted]
    for name, old in once_locked():
        if old not in locked.get(name, ()) and old[:12] not in log:
            problems.append(
                f"claims.lock has lost the rule {old[:12]} of claim {name}, which its history has: restore the line "
                f"from git, or say in LOG.md why it went, and quote {old[:12]}"
            )
    gone = sorted(locked.keys() - declared.keys())
    return problems + [f"claim {name} is in claims.lock and no longer declared: a claim stays" for name in gone]


def once_locked() -> list[tuple[str, str]]:
    """Return claim and hash of every line that any commit has added to claims.lock; none without git."""
    added = (_LINE.fullmatch(line) for _, line in history.added_lines("paper/claims.lock"))
    return [(match[1], match[2]) for match in added if match]


def lock(date: str) -> list[str]:
    """Add a line to paper/claims.lock for every rule that is not in it yet, and return these lines.

    date: year-month-day. A rule counts as changed if the claim was locked with another one, or if its runs exist
    already. Raises ValueError and writes nothing unless LOG.md quotes the first 12 digits of each changed rule's hash.
    """
    locked, log = read_lock(), _log()
    records = [record for scale in SCALES for record in committed_records(scale)]
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


_LINE = re.compile(r"(\w+) \d{4}-\d\d-\d\d ([0-9a-f]{64})")


def _log() -> str:
    path = paths.ROOT / "LOG.md"
    return path.read_text(encoding="utf-8") if path.exists() else ""
