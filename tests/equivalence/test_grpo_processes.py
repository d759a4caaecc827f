"""A gradient arm on several processes, by the committed configuration of accelerate, is the run of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import random_model

from evoalign_lib import grpo

HERE = Path(__file__).parent
CONFIG = Path(grpo.__file__).with_name("accelerate.yaml")


ARMS = ("grpo", "rloo")


def outcomes(path: Path, processes: int) -> dict:
    """What became of each arm, in one launch: starting the processes takes longer than their work."""
    launch = ["accelerate.commands.launch", "--config_file", CONFIG, "--num_processes", processes, "-m"]
    command = [sys.executable, "-m", *map(str, launch if processes > 1 else ()), "grpo_processes", str(path), *ARMS]
    paths = os.pathsep.join([str(HERE), str(HERE.parent)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def launches(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("launches")
    return [outcomes(folder / f"{n}.json", n) for n in (1, 2)]


@pytest.mark.parametrize("arm", ARMS)
def test_two_processes_train_the_model_of_one(launches, arm):
    one, two = (launch[arm] for launch in launches)
    start = {name: p.detach().flatten().numpy() for name, p in random_model().named_parameters()}
    moved, other = (np.concatenate([np.array(r["weights"][n]) - w for n, w in start.items()]) for r in (one, two))
    # AdamW divides by the gradient's size: where it is nearly zero rounding decides
    assert np.linalg.norm(moved) > 0.1 and np.linalg.norm(moved - other) < 1e-3 * np.linalg.norm(moved)
    assert np.allclose(one["rewards"], two["rewards"])
    for result in (one, two):
        assert result["spent"].pop("core_seconds") > 0
    assert one["spent"] == two["spent"] and one["spent"]["completions"] == 3 * 3 * 4
    assert one["counts"] == two["counts"] and one["counts"]["none"] > 0
