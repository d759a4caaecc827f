"""environment.yml's pip section has a solution: asked of the package index, so only where EVOALIGN_NETWORK=1 is set."""

import os
import subprocess
import sys

import pytest
from evoalign_study import paths


@pytest.mark.skipif(os.environ.get("EVOALIGN_NETWORK") != "1", reason="needs the network: set EVOALIGN_NETWORK=1")
def test_the_packages_of_gpu_machines_have_a_solution():
    extras = [f"--extra={name}" for name in ("notebooks", "gpu", "cluster", "dev", "judges", "site")]
    platform = ["--python-version=3.12", "--python-platform=x86_64-unknown-linux-gnu"]
    command = [sys.executable, "-m", "uv", "pip", "compile", "-q", "--no-config", "-c", "constraints.txt"]
    command += [*platform, *extras, "pyproject.toml"]
    done = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
