"""A reward with a state, a Lagrange multiplier: one for the run, whoever scores and however often the run is killed."""

import itertools
import json
import os
import signal
from pathlib import Path

import es_runs
import pytest
import torch
from es_runs import KEY, ROWS, TIMING, Lagrangian, digest, moved, read, token_sum
from grpo_runs import SAVING, built
from helpers import fork, wait
from transformers import TrainerState

from evoalign_lib import ledger
from evoalign_lib.es import ESTrainer

STEPS = 7
FATAL = 4  # the step of the kill: after a checkpoint, and not after an evaluation, which scores in the trainer
SETTINGS = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 3}
SETTINGS |= {"eval_dataset": ROWS[:2]}


def trainer(folder: Path, reward=None, **changed) -> ESTrainer:
    return es_runs.trainer(folder, Lagrangian() if reward is None else reward, **SETTINGS | changed)


def outcome(tested: ESTrainer) -> dict:
    return {
        "weights": digest(tested),
        "log": [{k: v for k, v in log.items() if k not in TIMING} for log in tested.state.log_history],
        "log_lambda": [f.log_lambda for f in tested.rewards.functions],
        "steps": [[s.log["cost"], s.reward_state, s.rewards.tolist()] for s in tested.ledger.steps],
    }


class Fatal(Lagrangian):
    """Kills its process while it scores, or before or after it moves the state."""

    def __init__(self, where: str):
        super().__init__()
        self.where, self.ends = where, 0

    def die(self, here: str, step: int) -> None:
        if (here, step) == (self.where, FATAL):
            os.kill(os.getpid(), signal.SIGKILL)

    def __call__(self, trainer_state, **arguments):
        self.die("scoring", trainer_state.global_step)
        return super().__call__(**arguments)

    def end_of_step(self, metrics):
        self.die("before", self.ends)
        super().end_of_step(metrics)
        self.die("after", self.ends)
        self.ends += 1


Fatal.__name__ = "Lagrangian"


def work(folder: Path, settings: dict, where: str = "") -> None:
    """Start the run or go on with it and leave its outcome in a file; perhaps die in step FATAL."""
    tested = trainer(folder, Fatal(where) if where else Lagrangian(), **settings)
    tested.train(resume_from_checkpoint=(folder / ledger.NAME).exists())
    (folder / "outcome.json").write_text(json.dumps(outcome(tested)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict:
    """A run that nobody disturbed, in one process."""
    folder = tmp_path_factory.mktemp("whole")
    assert wait(fork(work, folder, {})) == 0
    assert read(folder).settings["reward_state"] == {"Lagrangian": {"log_lambda": 0.0}}
    return json.loads((folder / "outcome.json").read_text())


def test_the_state_follows_from_the_logged_costs(whole):
    logs, log_lambda = [log for log in whole["log"] if "reward" in log], 0.0
    for (cost, state, _), log in zip(whole["steps"], logs, strict=True):
        before, log_lambda = log_lambda, moved(log_lambda, cost)
        assert state == {"Lagrangian": {"log_lambda": log_lambda}} and abs(log_lambda - before) > 0.01
        assert log[KEY] == log_lambda and log["cost"] == cost
    assert whole["log_lambda"] == [log_lambda] and len(logs) == STEPS


@pytest.mark.parametrize(("where", "workers"), [("scoring", 2), ("before", 1), ("after", 2)])
def test_killed_and_resumed(tmp_path, whole, where, workers):
    settings = {"workers": workers}
    # where the worker dies train() says so
    assert wait(fork(work, tmp_path, settings, where)) == (1 if where == "scoring" else -signal.SIGKILL)
    assert len(read(tmp_path).steps) == FATAL
    assert wait(fork(work, tmp_path, settings)) == 0
    assert json.loads((tmp_path / "outcome.json").read_text()) == whole


def other() -> Lagrangian:
    reward = Lagrangian()
    reward.__name__ = "other"
    return reward


@pytest.mark.parametrize(
    ("first", "second"),
    [(Lagrangian, other), (Lagrangian, lambda: token_sum), (lambda: token_sum, Lagrangian)]
    + [(Lagrangian, lambda: Lagrangian(0.5))],
)
def test_a_run_of_other_functions_does_not_go_on(tmp_path, first, second):
    trainer(tmp_path, first(), max_steps=2, save_strategy="no").train()
    before = (tmp_path / ledger.NAME).read_bytes()
    with pytest.raises(ValueError, match="with reward_state="):
        trainer(tmp_path, second(), save_strategy="no").train(resume_from_checkpoint=True)
    assert (tmp_path / ledger.NAME).read_bytes() == before


def test_a_state_that_leaves_the_numbers_is_not_recorded(tmp_path):
    class Explodes(Lagrangian):
        def end_of_step(self, metrics):
            super().end_of_step(metrics)
            self.log_lambda = self.log_lambda if len(self.seen) < 3 else float("inf")

    tested = trainer(tmp_path, Explodes(), save_strategy="no")
    with pytest.raises(ValueError, match="'log_lambda'.*'Explodes' is inf"):
        tested.train()
    assert len(read(tmp_path).steps) == 2


# ---- gradient arms

GRADIENT = {"max_completion_length": 8, "micro_batch": 4, "steps": 4, **SAVING}


def curve(tested) -> list[float]:
    return [log[KEY] for log in tested.state.log_history if "loss" in log]


@pytest.mark.parametrize("arm", ["grpo", "rloo"])
def test_a_gradient_arm_goes_on_with_its_multiplier(tmp_path, arm):
    reward = Lagrangian()
    undisturbed, _ = built(tmp_path, arm, reward, **GRADIENT)
    undisturbed.train()
    # once a step, in spite of two micro batches, from one batch of completions
    assert [len(metrics["cost"]) for metrics in reward.seen] == [1] * 4
    expected = list(itertools.accumulate((m["cost"] for m in reward.seen), moved, initial=0.0))
    assert curve(undisturbed) == expected[1:] and len(set(expected)) == 5
    saved = TrainerState.load_from_json(str(tmp_path / "checkpoint-2/trainer_state.json")).stateful_callbacks["Budget"]
    assert saved["attributes"]["reward_state"] == {"Lagrangian": {"log_lambda": expected[2]}}
    # a function that moved on elsewhere goes back to the checkpoint's state
    resumed, _ = built(tmp_path, arm, Lagrangian(0.7), **GRADIENT)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert curve(resumed) == curve(undisturbed) and resumed.state.global_step == 4
    for one, two in zip(resumed.model.parameters(), undisturbed.model.parameters(), strict=True):
        assert torch.equal(one, two)
