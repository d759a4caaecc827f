"""The contract of layers, which `make lint` checks: a forbidden import breaks it, inside a function too."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from evoalign_study import paths

FORBIDDEN = [
    ("evoalign_lib.es", "evoalign_study.sweep"),  # the library knows no study
    ("evoalign_lib.noise", "evoalign_lib.es"),  # es imports noise: a circle
    ("evoalign_lib.analysis.stats", "evoalign_lib.engines.local"),
    ("evoalign_study.claims.verdicts", "evoalign_study.training"),
    ("evoalign_lib.tasks.countdown", "evoalign_lib.grpo"),
]


def test_forbidden_imports_inside_functions_break_it(tmp_path):
    """All at once, in a copy of the code: each is named."""
    for package in (paths.ROOT / "evoalign_lib", paths.NOTEBOOKS / "evoalign_study"):
        shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("__pycache__", "bases"))
    for module, imported in FORBIDDEN:
        parent, _, name = imported.rpartition(".")
        with (tmp_path / f"{module.replace('.', '/')}.py").open("a", encoding="utf-8") as text:
            text.write(f"\n\ndef forbidden():\n    from {parent} import {name}\n")
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--config", paths.ROOT / "pyproject.toml"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "COLUMNS": "200"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    missed = [f"{one} -> {other}" for one, other in FORBIDDEN if one != "evoalign_lib.noise"]
    missed = [pair for pair in missed if pair not in done.stdout]
    assert done.returncode and not missed and "No circle of any length BROKEN" in done.stdout, done.stdout + done.stderr
