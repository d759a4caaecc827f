"""What git's history has of files, whatever its configuration and the attributes of the files say."""

import subprocess
from pathlib import Path

from evoalign_study import paths

# a merge may add lines that none of its parents has
_ADDED = "log --full-history --format= --patch --unified=0 --no-ext-diff --no-textconv --no-color --no-renames"
_ADDED += " --reverse --text --diff-merges=first-parent --relative --src-prefix=a/ --dst-prefix=b/"


def added_lines(files: str) -> list[tuple[Path, str]]:
    """Return every line that any commit has added to the matching files, with its file; none without git.

    files: a pattern relative to the checkout's top folder, such as "paper/results/*/*.index"; deleted files count.
    """
    pattern = f":(glob){files}"
    added, file = [], paths.ROOT
    for line in git(*_ADDED.split(), "--", pattern).split("\n") if commits(pattern)[0] else ():
        if line.startswith("+++ "):
            file = paths.ROOT / line.removeprefix("+++ b/")
        elif line.startswith("+"):
            added.append((file, line[1:].rstrip("\r")))
    return list(dict.fromkeys(added))


def commits(*files: str) -> tuple[int, bool]:
    """Return how many commits have changed files, 0 without git, and whether the clone is shallow: lacks older ones."""
    try:
        number = int(git("rev-list", "--count", "--full-history", "HEAD", "--", *files))
        return number, git("rev-parse", "--is-shallow-repository").strip() == "true"
    except (OSError, subprocess.CalledProcessError):
        return 0, False


def git(*arguments: str) -> str:
    """Run git in the checkout and return its output."""
    how = {"cwd": paths.ROOT, "capture_output": True, "encoding": "utf-8", "errors": "replace", "check": True}
    return subprocess.run(["git", *arguments], **how).stdout
