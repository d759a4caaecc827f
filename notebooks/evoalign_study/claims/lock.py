"""The lock: paper/claims.lock keeps the hash of every rule, so that none changes after its runs without a word.

A rule that changes after its records exist needs an entry in LOG.md that quotes the new hash. Lines are added to the
lock, never changed: whoever writes a new hash over an old one is found by the history of git.
"""

import re
import subprocess

from evoalign_study import paths
from evoalign_study.claims.declarations import SCALES, load_claims, rule_hash
from evoalign_study.claims.selection import committed_records, has_runs


def read_lock() -> dict[str, list[str]]:
    """Return paper/claims.lock as the hashes of each claim's rule, oldest first.

    A line is "id date hash", written when a rule was declared or changed. Raises ValueError for any other line.
    """
    path = paths.PAPER / "claims.lock"
    locked: dict[str, list[str]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path.exists() else (), 1):
        match = _LINE.fullmatch(line)
        if not match:
            raise ValueError(f"claims.lock, line {number} is not 'id date hash': {line[:100]!r}; write it by --lock")
        locked.setdefault(match[1], []).append(match[2])
    return locked


def lock_problems() -> list[str]:
    """Return, one line each, what does not hold of the claims and their lock.

    Every rule is the one of its last line. Each line of a claim but the first, and each that was once in the lock and
    is no more (`once_locked`), is quoted in LOG.md by the first 12 digits of its hash.
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
    for name, old in once_locked() or ():
        if old not in locked.get(name, ()) and old[:12] not in log:
            problems.append(
                f"claims.lock has lost the rule {old[:12]} of claim {name}, which its history has: restore the line "
                f"from git, or say in LOG.md why it went, and quote {old[:12]}"
            )
    gone = sorted(locked.keys() - declared.keys())
    return problems + [f"claim {name} is in claims.lock and no longer declared: a claim stays" for name in gone]


def once_locked() -> list[tuple[str, str]] | None:
    """Return claim and hash of every line that any commit has added to claims.lock; None where there is no git."""
    command = ["git", "log", "--full-history", "--format=", "--patch", "--unified=0", "--no-ext-diff", "--no-color"]
    command += ["--", str(paths.PAPER / "claims.lock")]
    try:
        done = subprocess.run(command, cwd=paths.ROOT, capture_output=True, encoding="utf-8", check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    added = (_LINE.fullmatch(line[1:]) for line in done.stdout.splitlines() if line.startswith("+"))
    return [(match[1], match[2]) for match in added if match]


def lock(date: str) -> list[str]:
    """Add to paper/claims.lock a line for every rule that it does not hold yet, and return these lines.

    date: year-month-day. A rule that was locked before, or that is declared when its runs exist, is a change: raises
    ValueError, and writes nothing, unless LOG.md quotes the first 12 digits of its hash.
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
