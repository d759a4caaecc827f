"""A training run that has a folder, killed at a point of its curve, has the record of one that was left alone."""

import os
import signal
import threading
import warnings

import pytest
from tqdm import tqdm

from evoalign_lib import runs

SETTINGS = {"max_completion_length": 16, "validation_problems": 6, "test_problems": 10}
SETTINGS |= {"steps": 6, "prompts_per_step": 4, "curve_points": 4, "curve_spacing": "log"}
SETTINGS |= {"population_size": 3, "sigma": 0.03, "alpha": 0.01}
SETTINGS |= {"num_generations": 4, "learning_rate": 1e-3, "beta": 0.01}


def untimed(record):
    """A record without times."""
    if isinstance(record, dict):
        return {name: untimed(value) for name, value in record.items() if name != "core_seconds"}
    return record


def killed(spec, folder, step: int) -> None:
    """Run a spec in a child that kills itself when it has stored the point after a step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking a process with threads
        pid = os.fork()
    if pid == 0:
        tqdm.set_lock(threading.RLock())
        add = runs._Progress.add

        def deadly(self, point):
            add(self, point)
            if point["step"] == step:
                os.kill(os.getpid(), signal.SIGKILL)

        runs._Progress.add = deadly
        try:
            runs.run_train(spec, None, folder)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL


@pytest.mark.parametrize("arm", ["es", "grpo"])
def test_a_killed_run_ends_with_the_record_of_one_left_alone(arm, tmp_path):
    (spec,) = runs.train_specs(arm, ["A0"], [0], SETTINGS, "smoke")
    whole = runs.run_train(spec, None, tmp_path / "whole")
    assert whole["curve"]["step"] == [0, 1, 2, 6]
    for step in (2, 6):
        killed(spec, tmp_path / "killed", step)
    assert list((tmp_path / "killed").glob("checkpoint-*"))
    again = runs.run_train(spec, None, tmp_path / "killed")
    assert untimed(again) == untimed(whole) == untimed(runs.run_train(spec))
    assert not list((tmp_path / "killed").glob("checkpoint-*"))
