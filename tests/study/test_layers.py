"""The contract of layers that `make lint` checks: it holds, and a forbidden import breaks it, inside a function too."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from evoalign_study import paths


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """A folder with a copy of the package's code."""
    folder = tmp_path_factory.mktemp("package")
    ignored = shutil.ignore_patterns("__pycache__", "bases")
    shutil.copytree(paths.ROOT / "evoalign_lib", folder / "evoalign_lib", ignore=ignored)
    return folder


def lint(folder: Path) -> tuple[bool, str]:
    """Whether the contract holds for the package in a folder, and what import-linter says."""
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--config", paths.ROOT / "pyproject.toml"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder), "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    return done.returncode == 0, done.stdout + done.stderr


def test_the_contract_holds(package):
    kept, said = lint(package)
    assert kept and " 0 broken" in said, said


@pytest.mark.parametrize(
    ("module", "imported", "named"),
    [
        ("es", "study.sweep", "evoalign_lib.es -> evoalign_study.sweep"),  # the library knows no study
        ("noise", "es", "No circle of any length BROKEN"),  # es imports noise
        ("analysis/stats", "engines.local", "evoalign_lib.analysis.stats -> evoalign_lib.engines.local"),
        ("claims/verdicts", "study.training", "evoalign_study.claims.verdicts -> evoalign_study.training"),
        ("tasks/countdown", "grpo", "evoalign_lib.tasks.countdown -> evoalign_lib.grpo"),
    ],
)
def test_a_forbidden_import_inside_a_function_breaks_it(package, module, imported, named):
    file = package / "evoalign_lib" / f"{module}.py"
    before = file.read_text(encoding="utf-8")
    parent, _, name = f"evoalign_lib.{imported}".rpartition(".")
    try:
        file.write_text(f"{before}\n\ndef forbidden():\n    from {parent} import {name}\n", encoding="utf-8")
        kept, said = lint(package)
    finally:
        file.write_text(before, encoding="utf-8")
    assert not kept and named in said, said


def test_a_module_without_a_layer_breaks_it(package):
    stray = package / "evoalign_lib" / "stray.py"
    stray.touch()
    try:
        kept, said = lint(package)
    finally:
        stray.unlink()
    assert not kept and "evoalign_lib.stray" in said, said
