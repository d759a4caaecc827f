"""A gradient arm on several processes, by the committed configuration of accelerate, is the run of one process."""

import itertools
import json
import os
import sys
from pathlib import Path

import evoalign_study
import grpo_processes
import numpy as np
import pytest
from es_runs import moved
from helpers import in_child, random_model

HERE = Path(__file__).parent
pytestmark = pytest.mark.slow  # starting three processes takes longer than all their work
CONFIG = Path(evoalign_study.__file__).with_name("accelerate.yaml")


def launched(folder: Path, processes: int) -> list[dict]:
    """What became of each arm in each process of one launch: starting the processes takes longer than their work.

    A single process and accelerate's launcher are forks of this one, which has imported all that they need.
    """
    folder.mkdir()
    log = folder / "log.txt"

    def start() -> None:
        with log.open("wb") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        if processes == 1:
            return grpo_processes.main(str(folder))
        from accelerate.commands import launch

        packages = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
        os.environ |= {"PYTHONPATH": os.pathsep.join(packages), "OMP_NUM_THREADS": "1"}
        command = ["--config_file", CONFIG, "--num_processes", processes, "-m", "grpo_processes", folder]
        sys.argv = ["accelerate-launch", *map(str, command)]
        return launch.main()

    assert in_child(start) == 0, log.read_text()[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]


@pytest.fixture(scope="module")
def launches(tmp_path_factory) -> list[list[dict]]:
    folder = tmp_path_factory.mktemp("launches")
    return [launched(folder / str(n), n) for n in (1, 2)]


@pytest.mark.parametrize("arm", grpo_processes.ARMS)
def test_two_processes_train_the_model_of_one(launches, arm):
    one, two = (launch[0][arm] for launch in launches)
    start = {name: p.detach().flatten().numpy() for name, p in random_model().named_parameters()}
    moved, other = (np.concatenate([np.array(r["weights"][n]) - w for n, w in start.items()]) for r in (one, two))
    # AdamW divides by the gradient's size: where it is nearly zero rounding decides
    assert np.linalg.norm(moved) > 0.1 and np.linalg.norm(moved - other) < 1e-3 * np.linalg.norm(moved)
    assert np.allclose(one["rewards"], two["rewards"])
    for result in (one, two):
        assert result["spent"].pop("core_seconds") > 0
    assert one["spent"] == two["spent"] and one["spent"]["completions"] == 3 * 3 * 4
    assert one["counts"] == two["counts"] and one["counts"]["none"] > 0


def test_processes_share_one_multiplier(launches):
    """They started with two, and what they score costs differently; the multiplier is the one of a single process."""
    (alone,), (first, second) = ([process["multiplier"] for process in launch] for launch in launches)
    assert first["log_lambda"] == second["log_lambda"] and len(first["log_lambda"]) == 3
    assert second["metrics"] == []  # the first process has moved it for both
    costs = [metrics["cost"] for metrics in first["metrics"]]
    assert [len(c) for c in costs] == [2] * 3 and all(one != other for one, other in costs)
    path = itertools.accumulate(costs, moved, initial=0.1)
    assert list(path)[1:] == first["log_lambda"] == first["logged"]
    assert np.allclose(alone["log_lambda"], first["log_lambda"], rtol=1e-12)
    for pair, whole in zip(costs, alone["metrics"], strict=True):
        assert np.isclose(np.mean(pair), whole["cost"][0], rtol=1e-12)
