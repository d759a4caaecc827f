"""The contract of layers that `make lint` checks: it holds, and a forbidden import breaks it, inside a function too."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from evoalign_study import paths


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> Path:
    """A folder with a copy of the code of library and study."""
    folder = tmp_path_factory.mktemp("packages")
    for package in (paths.ROOT / "evoalign_lib", paths.NOTEBOOKS / "evoalign_study"):
        shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__", "bases"))
    return folder


def lint(folder: Path) -> tuple[bool, str]:
    """Whether the contract holds for the packages in a folder, and what import-linter says."""
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--config", paths.ROOT / "pyproject.toml"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder), "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    return done.returncode == 0, done.stdout + done.stderr


def test_the_contract_holds(packages):
    kept, said = lint(packages)
    assert kept and " 0 broken" in said, said


FORBIDDEN = [
    ("evoalign_lib.es", "evoalign_study.sweep"),  # the library knows no study
    ("evoalign_lib.noise", "evoalign_lib.es"),  # es imports noise: a circle
    ("evoalign_lib.analysis.stats", "evoalign_lib.engines.local"),
    ("evoalign_study.claims.verdicts", "evoalign_study.training"),
    ("evoalign_lib.tasks.countdown", "evoalign_lib.grpo"),
]


def test_forbidden_imports_inside_functions_break_it(packages):
    """All at once: each is named. A module without a layer, too."""
    stray = packages / "evoalign_lib" / "stray.py"
    stray.touch()
    for module, imported in FORBIDDEN:
        file = packages / f"{module.replace('.', '/')}.py"
        parent, _, name = imported.rpartition(".")
        with file.open("a", encoding="utf-8") as text:
            text.write(f"\n\ndef forbidden():\n    from {parent} import {name}\n")
    kept, said = lint(packages)
    assert not kept and "evoalign_lib.stray" in said, said
    stray.unlink()
    kept, said = lint(packages)
    missed = [pair for pair in FORBIDDEN if f"{pair[0]} -> {pair[1]}" not in said and pair[0] != "evoalign_lib.noise"]
    assert not kept and not missed and "No circle of any length BROKEN" in said, said
