"""Runs in every precision mode: the step, what it leaves behind and logs, and what is refused."""

import numpy as np
import pytest
import torch
from es_runs import ROWS, Stop, constant, digest, read, stopping, token_sum, trained, trainer
from helpers import random_model, saved

from evoalign_lib import ledger, precision
from evoalign_lib.es import ESTrainer

SIGMA = 0.02
SETTINGS = {"sigma": SIGMA, "rows": ROWS[:4], "prompts_per_step": None, "max_steps": 3}


def modal(folder, mode="inplace", dtype=torch.bfloat16, reward=token_sum, **changed):
    return trainer(folder, reward, random_model().to(dtype), precision=mode, **SETTINGS | changed)


@pytest.mark.parametrize("fitness", ["reward", "random"])  # the null arm goes through the same arithmetic
@pytest.mark.parametrize("mode", precision.PRECISIONS)
def test_each_step_logs_what_it_lost(tmp_path, mode, fitness):
    marks = []

    class Noted(ESTrainer):
        def _evaluate_members(self, step, members):
            before = self.engine.weights.float32().copy()
            record = super()._evaluate_members(step, members)
            views = [self.engine.layout.views(w) for w in (before, self.engine.weights.float32())]
            marks.append(precision.drift(*(np.concatenate([v.reshape(-1) for v in vs.values()]) for vs in views)))
            return record

    tested = modal(tmp_path, mode, kind=Noted, fitness=fitness)
    tested.train()
    logs = tested.state.log_history
    if mode == "master":
        assert marks == [(0, 0)] * 3 and not any("restore_changed" in log for log in logs)
        return
    # the model is small: the sample is all of it
    logged = [(log["restore_changed"], log["restore_drift"]) for log in logs]
    assert np.array(logged) == pytest.approx(np.array(marks), rel=1e-12) and all(share > 0 for share, _ in marks)
    steps = read(tmp_path).steps
    assert [step.log["restore_changed"] for step in steps] == [log["restore_changed"] for log in logs]


@pytest.mark.parametrize("mode", precision.PRECISIONS)
def test_a_replay_writes_the_folder_that_the_run_saves(tmp_path, mode):
    start = saved(tmp_path / "start", random_model().to(torch.bfloat16))
    settings = SETTINGS | {"precision": mode, "model_init_kwargs": {"dtype": "bfloat16"}}
    tested = trained(tmp_path / "run", model=start, **settings)
    tested.save_model(tmp_path / "saved")
    found = ledger.write_model(tmp_path / "run" / ledger.NAME, tmp_path / "written", start)
    assert found == digest(tested)
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("written", "saved"))
    assert one == other


def test_a_tied_population_moves_nothing_but_leaves_its_marks(tmp_path):
    tested = modal(tmp_path, reward=constant, max_steps=1)
    expected = precision.open_weights(random_model().to(torch.bfloat16), precision="inplace")
    expected.retrace(tested.ask(0), SIGMA)
    tested.train()
    assert tested.counts["tied"] == 1 and (tested.engine.weights.float32() == expected.float32()).all()
    assert ledger.verify(tmp_path / ledger.NAME, random_model().to(torch.bfloat16)).weights == digest(tested)


@pytest.mark.parametrize("mode", precision.PRECISIONS)
@pytest.mark.parametrize("step", [0, 1])  # before and after there is a ledger
def test_an_evaluation_that_broke_off_has_moved_the_weights(tmp_path, mode, step):
    tested = modal(tmp_path, mode, reward=stopping(step))
    with pytest.raises(Exception, match=Stop.__name__):
        tested.train()
    tested.rewards.functions[0] = token_sum
    if mode == "master":
        assert tested.train().global_step == 3
        return
    again = r"train\(resume_from_checkpoint=True\)" if step else r"train\(\)"
    with pytest.raises(RuntimeError, match=f"not those after step {step}.*call {again}"):
        tested.train()


@pytest.mark.parametrize("mode", ["inplace", "kahan"])
def test_modes_with_one_replica_take_one_worker(tmp_path, mode):
    tested = modal(tmp_path, mode, workers=None)
    assert tested.engine.workers == 1
    with pytest.raises(AttributeError, match=f"precision='{mode}'"):
        _ = tested.engine.master
    with pytest.raises(ValueError, match=f"workers=2 needs precision='master'.*'{mode}'"):
        modal(tmp_path, mode, workers=2)
