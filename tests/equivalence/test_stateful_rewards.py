"""A reward with a state, a Lagrange multiplier, in runs of ES and of gradient arms; `test_resume` kills such runs."""

import itertools

import pytest
import torch
from es_runs import KEY, Lagrangian, moved, read, token_sum, trained
from grpo_runs import SAVING, built
from transformers import TrainerState

from evoalign_lib import ledger


def test_the_state_follows_from_the_logged_costs(tmp_path):
    tested, log_lambda = trained(tmp_path, Lagrangian(), max_steps=7), 0.0
    assert read(tmp_path).settings["reward_state"] == {"Lagrangian": {"log_lambda": 0.0}}
    for step, log in zip(read(tmp_path).steps, tested.state.log_history, strict=True):
        before, log_lambda = log_lambda, moved(log_lambda, step.log["cost"])
        assert step.reward_state == {"Lagrangian": {"log_lambda": log_lambda}} and abs(log_lambda - before) > 0.01
        assert log[KEY] == log_lambda and log["cost"] == step.log["cost"]
    assert tested.rewards.functions[0].log_lambda == log_lambda


@pytest.mark.parametrize(
    ("first", "second"),
    [(Lagrangian, type("Other", (Lagrangian,), {})), (Lagrangian, lambda: token_sum), (lambda: token_sum, Lagrangian)]
    + [(Lagrangian, lambda: Lagrangian(0.5))],
)
def test_a_run_of_other_functions_does_not_go_on(tmp_path, first, second):
    trained(tmp_path, first(), max_steps=2)
    before = (tmp_path / ledger.NAME).read_bytes()
    with pytest.raises(ValueError, match="with reward_state="):
        trained(tmp_path, second(), resume=True)
    assert (tmp_path / ledger.NAME).read_bytes() == before


def test_a_state_that_leaves_the_numbers_is_not_recorded(tmp_path):
    class Explodes(Lagrangian):
        def end_of_step(self, metrics):
            super().end_of_step(metrics)
            self.log_lambda = self.log_lambda if len(self.seen) < 3 else float("inf")

    with pytest.raises(ValueError, match="'log_lambda'.*'Explodes' is inf"):
        trained(tmp_path, Explodes())
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
