"""Runs in every precision mode and noise: against released statements, replayed, resumed, and what is refused."""

from functools import partial

import numpy as np
import pytest
import torch
from helpers import PROMPTS, random_model, reference_perturb, reference_update, tokenizer
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from evoalign_lib import ledger, noise, precision
from evoalign_lib.cli import app
from evoalign_lib.es import ESConfig, ESTrainer

ROWS = [{"prompt": p, "number": i} for i, p in enumerate(PROMPTS)]
N, SIGMA, ALPHA, SEED = 6, 0.02, 0.05, 5
# mode, dtype and noise of the runs that are gone through
RUNS = [
    ("inplace", torch.bfloat16, "tied"),
    ("inplace", torch.float16, "gaussian"),
    ("inplace", torch.float32, "byte_sum"),
    ("kahan", torch.bfloat16, "gaussian"),
    ("kahan", torch.float16, "byte_sum"),
    ("master", torch.bfloat16, "tied"),
]


def token_sum(completion_ids, **columns):
    return [float(sum(ids)) for ids in completion_ids]


def trainer(folder, mode="inplace", dtype=torch.bfloat16, law="gaussian", score=token_sum, model=None, **changed):
    config = {
        "output_dir": str(folder), "population_size": N, "sigma": SIGMA, "alpha": ALPHA, "max_steps": 3,
        "prompts_per_step": 4, "max_completion_length": 4, "disable_tqdm": True, "report_to": "none",
        "save_strategy": "no", "seed": SEED, "precision": mode, "noise": law, "workers": 1,
    } | changed  # fmt: skip
    model = random_model().to(dtype) if model is None else model
    return ESTrainer(model, score, ESConfig(**config), ROWS[:4], None, tokenizer())


def state(tested: ESTrainer) -> dict[str, bytes]:
    """All bits of the weights' state."""
    tensors = tested.engine.weights.tensors()
    return {
        name: t.view(torch.int16 if t.itemsize == 2 else torch.int32).numpy().tobytes() for name, t in tensors.items()
    }


def digest(tested: ESTrainer) -> str:
    return precision.digest(tested.engine.layout, *tested.engine.weights.planes)


# ---- the step


@pytest.mark.parametrize("law", noise.DISTRIBUTIONS)
def test_every_noise_with_a_master_is_its_formula(tmp_path, law):
    tested = trainer(tmp_path, "master", torch.float32, law)
    layout, start = tested.engine.layout, tested.engine.master.copy()
    members = tested.ask(0)
    evaluations = tested.engine.evaluate(members, SIGMA, "train", np.arange(4))
    alone = trainer(tmp_path / "alone", "master", torch.float32)
    for member, evaluation in zip(members, evaluations, strict=True):
        alone.engine.master[:] = reference_perturb(start, layout, member.key, SIGMA, 1, law)
        ((*completions,),) = alone.engine.generate("train")
        assert [float(sum(ids)) for _, ids in completions] == evaluation.scored.rewards.tolist()
    fitness = np.array([e.scored.rewards.mean() for e in evaluations])
    assert not tested.tell(members, fitness)
    c = (ALPHA * (fitness - fitness.mean()) / fitness.std() / N).astype(np.float32)
    keys = np.array([m.key for m in members], np.uint64)
    assert tested.engine.master.tobytes() == reference_update(start, layout, keys, c, law).tobytes()


# ---- what evaluating a population leaves behind


@pytest.mark.parametrize(("mode", "dtype", "law"), RUNS[::3], ids=str)
def test_each_step_logs_what_it_lost(tmp_path, mode, dtype, law):
    marks = []

    class Noted(ESTrainer):
        def _evaluate_members(self, step, members):
            before = self.engine.weights.float32().copy()
            record = super()._evaluate_members(step, members)
            views = [self.engine.layout.views(w) for w in (before, self.engine.weights.float32())]
            marks.append(precision.drift(*(np.concatenate([v.reshape(-1) for v in vs.values()]) for vs in views)))
            return record

    for fitness in ("reward", "random"):  # the null arm goes through the same arithmetic
        config = trainer(tmp_path / fitness, mode, dtype, law, fitness=fitness).args
        tested = Noted(random_model().to(dtype), token_sum, config, ROWS[:4], None, tokenizer())
        marks.clear()
        tested.train()
        logs = tested.state.log_history
        if mode == "master":
            assert marks == [(0, 0)] * 3 and not any("restore_changed" in log for log in logs)
            continue
        # the model is small: the sample is all of it
        logged = [(log["restore_changed"], log["restore_drift"]) for log in logs]
        assert np.array(logged) == pytest.approx(np.array(marks), rel=1e-12)
        assert all(share > 0 for share, _ in marks)
        steps = ledger.read(tmp_path / fitness / ledger.NAME).steps
        assert [step.log["restore_changed"] for step in steps] == [log["restore_changed"] for log in logs]


# ---- replay and resume


class Stop(Exception):
    pass


def stopping(step: int):
    def token_sum(completion_ids, trainer_state, **columns):
        if trainer_state.global_step == step:
            raise Stop
        return [float(sum(ids)) for ids in completion_ids]

    return token_sum


@pytest.mark.parametrize(
    ("mode", "dtype", "law"), [RUNS[0], *(pytest.param(*run, marks=pytest.mark.slow) for run in RUNS[1:])], ids=str
)
def test_replayed_resumed_and_uninterrupted_are_one(tmp_path, mode, dtype, law):
    live = {}

    class Noted(ESTrainer):
        def _step(self, recording):
            live[self.state.global_step] = state(self), self.engine.weights.float32().tobytes()
            return super()._step(recording)

    start = tmp_path / "start"
    small = partial(random_model, num_hidden_layers=1)  # noise is made a tensor at a time
    small().to(dtype).save_pretrained(start)
    tokenizer().save_pretrained(start)
    config = trainer(tmp_path / "whole", mode, dtype, law, max_steps=12).args

    def load():  # saved and loaded: .to() would round the rotary frequencies as well
        return AutoModelForCausalLM.from_pretrained(start)

    whole = Noted(load(), token_sum, config, ROWS[:4], None, tokenizer())
    whole.train()
    path = tmp_path / "whole" / ledger.NAME
    live[12] = state(whole), whole.engine.weights.float32().tobytes()
    assert len({weights for _, weights in live.values()}) == 13

    model = small().to(dtype)
    untouched = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in (0, 1, 7, 12):
        assert ledger.replay(path, model, step).tobytes() == live[step][1]
    assert all((p == untouched[name]).all() for name, p in model.named_parameters())
    report = ledger.verify(path, str(start))
    assert report.weights == digest(whole) and report.digests == 3
    # the folder that the command writes is the one that the trainer saves
    command = ["replay", str(path), "--model", str(start), "--out", str(tmp_path / "written"), "--verify"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    whole.save_model(tmp_path / "saved")
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("written", "saved"))
    assert one == other
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.dtype == dtype
    assert all((p == whole.model.get_parameter(name)).all() for name, p in again.named_parameters())

    # cut inside an evaluation: after a checkpoint, from the ledger alone, and from an old checkpoint
    for name, checkpoints in (("checkpoint", {"save_strategy": "steps", "save_steps": 4}), ("ledger", {})):
        settings = {"max_steps": 12, "model": load(), **checkpoints}
        with pytest.raises(Exception, match="Stop"):
            trainer(tmp_path / name, mode, dtype, law, stopping(10), **settings).train()
        resumed = trainer(tmp_path / name, mode, dtype, law, **settings | {"model": load()})
        resumed.train(resume_from_checkpoint=True)
        assert state(resumed) == live[12][0]
        assert ledger.read(tmp_path / name / ledger.NAME).weights == ledger.read(path).weights
    resumed = trainer(tmp_path / "old", mode, dtype, law, max_steps=12, model=load())
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint/checkpoint-4"))
    assert state(resumed) == live[12][0]


def test_a_tied_population_moves_nothing_but_leaves_its_marks(tmp_path):
    tested = trainer(tmp_path, score=lambda completions, **kw: [1.0] * len(completions), max_steps=1)
    expected = precision.open_weights(random_model().to(torch.bfloat16), precision="inplace")
    expected.retrace(tested.ask(0), SIGMA)
    tested.train()
    assert tested.counts["tied"] == 1
    assert (tested.engine.weights.float32() == expected.float32()).all()
    assert ledger.verify(tmp_path / ledger.NAME, random_model().to(torch.bfloat16)).weights == digest(tested)


# ---- what is refused


def test_an_evaluation_that_broke_off_has_moved_the_weights(tmp_path):
    for mode in precision.PRECISIONS:
        for step in (0, 1):  # before and after there is a ledger
            tested = trainer(tmp_path / f"{mode}{step}", mode, score=stopping(step))
            with pytest.raises(Exception, match="Stop"):
                tested.train()
            tested.rewards.functions[0] = token_sum
            if mode == "master":
                tested.train()
                continue
            again = r"train\(resume_from_checkpoint=True\)" if step else r"train\(\)"
            with pytest.raises(RuntimeError, match=f"the weights are not those after step {step}.*call {again}"):
                tested.train()


def test_modes_with_one_replica_take_one_worker(tmp_path):
    for mode in ("inplace", "kahan"):
        assert trainer(tmp_path, mode, workers=None).engine.workers == 1
        with pytest.raises(ValueError, match=f"workers=2 needs precision='master': precision='{mode}'.*Set workers=1"):
            trainer(tmp_path, mode, workers=2)
        with pytest.raises(AttributeError, match=f"precision='{mode}' keeps no master"):
            _ = trainer(tmp_path, mode).engine.master
    with pytest.raises(ValueError, match="'kahan' is for .*the model is torch.float32: load it in bfloat16"):
        trainer(tmp_path, "kahan", torch.float32)
