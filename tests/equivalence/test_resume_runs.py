"""A training run that has a folder, killed at a point of its curve, has the record of one that was left alone."""

import os
import signal

import pytest
from evoalign_study import training
from evoalign_study.kinds import train
from evoalign_study.kinds.train import train_specs
from evoalign_study.measures.base import Measures
from helpers import SMALL_RUN, in_child

from evoalign_lib import arms

SETTINGS = SMALL_RUN | {"steps": 6, "curve_points": 4, "curve_spacing": "log", "population_size": 4, "beta": 0.01}


def untimed(record):
    """A record without times."""
    if isinstance(record, dict):
        return {name: untimed(value) for name, value in record.items() if name != "core_seconds"}
    return record


def killed(spec, folder, step: int) -> None:
    """Run a spec in a child that kills itself when it has stored the point after a step."""
    add = training.Progress.add

    def deadly(self, point):
        add(self, point)
        if point["step"] == step:
            os.kill(os.getpid(), signal.SIGKILL)

    def work() -> None:
        training.Progress.add = deadly
        train.run(spec, None, folder)

    assert in_child(work) == -signal.SIGKILL


SLOW = ("grpo", "es_weighted", "es_lora", "essa", "grpo_lora", "grpo_perturbed")


@pytest.mark.parametrize("arm", ["es", *(pytest.param(arm, marks=pytest.mark.slow) for arm in SLOW)])
def test_a_killed_run_ends_with_the_record_of_one_left_alone(arm, tmp_path):
    rollouts = {"beta": 0.0} if arms.get(arm).rollouts != "own" else {}
    (spec,) = train_specs(arm, ["A0"], [0], SETTINGS | rollouts, "smoke")
    whole = train.run(spec, None, tmp_path / "whole")
    assert whole["curve"]["step"] == [0, 1, 2, 6]
    for step in (2, 6):
        killed(spec, tmp_path / "killed", step)
    assert list((tmp_path / "killed").glob("checkpoint-*"))
    if arm == "grpo":  # as a kill while it is written leaves it
        (tmp_path / "killed" / "checkpoint-99").mkdir()
        (tmp_path / "killed" / "checkpoint-99" / "trainer_state.json").write_text('{"global_step": ')
    again = train.run(spec, None, tmp_path / "killed")
    assert untimed(again) == untimed(whole)
    assert arm == "grpo" or untimed(train.run(spec)) == untimed(whole)  # without a folder it is the same run


@pytest.mark.parametrize("arm", ["es", "grpo"])
def test_a_run_whose_record_is_stored_begins_anew(arm, tmp_path, monkeypatch):
    """What it left behind must not stand in for the run when it is asked for again."""
    (spec,) = train_specs(arm, ["A0"], [0], SETTINGS | {"steps": 2}, "smoke")
    scored, reward = [], Measures.reward

    def counted(self, spec):
        def function(prompts, completions, **columns):
            scored.append(len(completions))
            return reward(self, spec)(prompts, completions, **columns)

        return function

    monkeypatch.setattr(Measures, "reward", counted)
    first = train.run(spec, None, tmp_path)
    assert list(tmp_path.glob("checkpoint-*"))  # until its record is safe
    training.settle(tmp_path)
    assert not list(tmp_path.glob("checkpoint-*"))
    spent = sum(scored)
    assert untimed(train.run(spec, None, tmp_path)) == untimed(first) and sum(scored) == 2 * spent


def test_one_process_at_a_time_works_in_a_folder(tmp_path):
    (spec,) = train_specs("es", ["A0"], [0], SETTINGS, "smoke")
    with training.workplace(tmp_path), pytest.raises(RuntimeError, match=str(tmp_path)):
        train.run(spec, None, tmp_path)
