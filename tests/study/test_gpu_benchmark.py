"""The GPU benchmark runs, as far as a machine without a GPU can tell."""

import json
import os
import subprocess
import sys

import pytest
import torch
from evoalign_study import paths


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")
def test_it_runs_on_a_toy_and_leaves_what_others_measured(tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed; its wheels exist for Linux only")
    out, name = tmp_path / "bench.json", "toy (CPU, Triton's interpreter)"
    out.write_text(json.dumps({"a CPU": {"cpu": {"update": 1}}, name: {"gpu": {"update": 2, "other": 3}}}))
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.benchmarks.gpu", "--toy", "--out", out]
    done = subprocess.run(command, cwd=paths.ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text())
    assert results["a CPU"] == {"cpu": {"update": 1}}
    found = results[name]["gpu"]
    assert found.keys() == {"device", "toy", "update", "other"} and found["toy"]["memory"] == {}
    cells = found["toy"]["cells"]
    assert cells["perturb, gaussian"]["times_faster_than_public"] > 0 and len(cells) == 6


@pytest.mark.skipif(torch.cuda.is_available(), reason="says so where there is no GPU")
def test_without_a_gpu_it_says_so(capsys):
    pytest.importorskip("triton")
    from tests.benchmarks import gpu

    assert gpu.main([]) == 2 and "needs a GPU" in capsys.readouterr().err
