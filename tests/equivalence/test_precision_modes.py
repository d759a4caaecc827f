"""Runs in every precision mode and noise: against released statements, replayed, resumed, and what is refused."""

import hashlib
import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from helpers import PROMPTS, chained, random_model, tokenizer
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from evoalign_lib import ledger, noise, precision
from evoalign_lib.cli import app
from evoalign_lib.engines.local import LocalEngine, Prompts
from evoalign_lib.es import ESConfig, ESTrainer
from evoalign_lib.ledger import LedgerError
from evoalign_lib.update_rules import Member

ROWS = [{"prompt": p, "number": i} for i, p in enumerate(PROMPTS)]
N, SIGMA, ALPHA, SEED = 6, 0.02, 0.05, 5
# mode, dtype and noise of the runs that are gone through
RUNS = [
    ("inplace", torch.bfloat16, "tied"),
    ("inplace", torch.float16, "gaussian"),
    ("inplace", torch.float32, "rademacher"),
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


@torch.no_grad()
@pytest.mark.parametrize(
    ("dtype", "law"),
    [(torch.bfloat16, law) for law in noise.DISTRIBUTIONS] + [(torch.float16, "tied"), (torch.float32, "tied")],
    ids=str,
)
def test_inplace_is_the_statement_sequence_of_released_codes(tmp_path, dtype, law):
    tested = trainer(tmp_path, "inplace", dtype, law, decoder="generate", max_steps=2)
    tested.train()

    model = random_model().to(dtype)
    parameters = dict(model.named_parameters())
    prompts = Prompts(ROWS[:4], tokenizer())
    ids, mask = torch.from_numpy(prompts.ids), torch.from_numpy(prompts.mask)

    def eps(name, key):  # in place of torch.randn with a seed
        number = 0 if law == "tied" else noise.parameter_id(name)
        kind = "gaussian" if law == "tied" else law
        made = noise.normals(key, number, parameters[name].shape, distribution=kind, backend="numpy")
        return torch.from_numpy(made).to(dtype)

    for step in range(2):
        keys = [noise.member_key(noise.run_key("es", SEED), step, i) for i in range(N)]
        fitness = []
        for key in keys:
            for name, p in parameters.items():
                p.data.add_(SIGMA * eps(name, key))
            new = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)[:, ids.shape[1] :]
            ended = (new == tokenizer().eos_token_id).cumsum(1).cumsum(1) > 1  # behind the end token
            fitness.append(float(new.masked_fill(ended, 0).sum()) / 4)
            for name, p in parameters.items():
                p.data.sub_(SIGMA * eps(name, key))
        mean = math.fsum(fitness) / N
        deviation = math.sqrt(math.fsum((f - mean) ** 2 for f in fitness) / N)
        for key, f in zip(keys, fitness, strict=True):
            c = float(np.float32(ALPHA * ((f - mean) / deviation) / N))
            for name, p in parameters.items():
                p.data.add_(c * eps(name, key))
    found = tested.engine.weights.tensors()
    for name, p in parameters.items():
        assert (found[name] == p).all(), name
    # the trained model is the replica
    assert all((p == found[name]).all() for name, p in tested.model.named_parameters())
    assert (parameters["model.norm.weight"] != random_model().to(dtype).model.norm.weight).any()


@pytest.mark.parametrize("law", noise.DISTRIBUTIONS)
def test_every_noise_with_a_master_is_its_formula(tmp_path, law):
    tested = trainer(tmp_path, "master", torch.float32, law)
    layout, start = tested.engine.layout, tested.engine.master.copy()
    members = tested.ask(0)
    evaluations = tested.engine.evaluate(members, SIGMA, "train", np.arange(4))
    alone = trainer(tmp_path / "alone", "master", torch.float32)
    for member, evaluation in zip(members, evaluations, strict=True):
        alone.engine.master[:] = noise.reference_perturb(start, layout, member.key, SIGMA, 1, law)
        ((*completions,),) = alone.engine.generate("train")
        assert [float(sum(ids)) for _, ids in completions] == evaluation.scored.rewards.tolist()
    fitness = np.array([e.scored.rewards.mean() for e in evaluations])
    assert not tested.tell(members, fitness)
    c = (ALPHA * (fitness - fitness.mean()) / fitness.std() / N).astype(np.float32)
    keys = np.array([m.key for m in members], np.uint64)
    assert tested.engine.master.tobytes() == noise.reference_update(start, layout, keys, c, law).tobytes()


@pytest.mark.parametrize("mode", precision.PRECISIONS)
def test_tied_noise_moves_layers_alike(tmp_path, mode):
    moved = {}
    for law in ("tied", "gaussian"):
        model = random_model().to(torch.bfloat16)
        for p in model.parameters():  # where rounding is the same for both
            p.data.fill_(0.125)
        tested = trainer(tmp_path / law, mode, law=law, model=model, fitness="random", max_steps=2)
        tested.train()
        views = tested.engine.layout.views(tested.engine.weights.float32())
        one, other = (views[f"model.layers.{i}.mlp.up_proj.weight"] for i in (0, 1))
        moved[law] = (one != other).mean()
        assert (one != 0.125).mean() > 0.5
    assert moved["tied"] == 0 and moved["gaussian"] > 0.5


# ---- what evaluating a population leaves behind


def test_the_marks_of_a_population(tmp_path):
    rms = {}
    for mode in precision.PRECISIONS:
        tested = trainer(tmp_path / mode, mode, population_size=10)
        before, start = tested.engine.weights.float32().copy(), digest(tested)
        tested.engine.evaluate(tested.ask(0), 1e-3, "train", np.arange(4))
        share, rms[mode] = precision.drift(before, tested.engine.weights.float32())
        print(f"{mode}: {share:.4f} of the weights changed in ten restores, by {rms[mode]:.2g} root mean square")
        assert (digest(tested) == start) == (mode == "master")
    assert rms["master"] == 0
    assert 0 < rms["kahan"] < rms["inplace"] / 50


@pytest.mark.parametrize(("mode", "dtype", "law"), RUNS, ids=str)
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


@pytest.mark.parametrize(("mode", "dtype", "law"), RUNS, ids=str)
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


@pytest.mark.parametrize("fitness", ["shuffled", "random"])
def test_null_arms_replay(tmp_path, fitness):
    tested = trainer(tmp_path, fitness=fitness)
    tested.train()
    found = ledger.verify(tmp_path / ledger.NAME, random_model().to(torch.bfloat16))
    assert found.weights == digest(tested) and found.recomputed


def test_a_tied_population_moves_nothing_but_leaves_its_marks(tmp_path):
    tested = trainer(tmp_path, score=lambda completions, **kw: [1.0] * len(completions), max_steps=1)
    expected = precision.open_weights(random_model().to(torch.bfloat16), precision="inplace")
    expected.retrace(tested.ask(0), SIGMA)
    tested.train()
    assert tested.counts["tied"] == 1
    assert (tested.engine.weights.float32() == expected.float32()).all()
    assert ledger.verify(tmp_path / ledger.NAME, random_model().to(torch.bfloat16)).weights == digest(tested)


# ---- digests


def test_digests_by_hand(tmp_path):
    value, compensation = precision.split(torch.tensor([1.001, -2.0]))
    layout = noise.Layout.from_shapes([("b", (1,)), ("a", (1,))])
    planes = [torch.zeros(layout.size, dtype=torch.bfloat16) for _ in range(2)]
    for plane, numbers in zip(planes, (value, compensation), strict=True):
        plane[0], plane[16] = numbers
    assert (value[0], compensation[1]) == (1, 0)
    c = compensation[:1].view(torch.int16).numpy().tobytes()
    by_hand = {1: b"a\0\x00\xc0" + b"b\0\x80\x3f", 2: b"a\0\x00\xc0\x00\x00" + b"b\0\x80\x3f" + c}
    for n, text in by_hand.items():
        assert precision.digest(layout, *planes[:n]) == hashlib.sha256(text).hexdigest()
    tested = trainer(tmp_path, "kahan")
    one = digest(tested)
    tested.engine.weights.planes[1][0] = 1e-3  # which the values do not show
    assert digest(tested) != one


# ---- what is refused


def rewrite(path, **changed) -> None:
    """A ledger with other settings (None: without), its chain made good."""
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    settings = lines[0]["settings"] | changed
    lines[0]["settings"] = {name: value for name, value in settings.items() if value is not None}
    path.write_bytes(chained(lines))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"mode": "kahan"}, "of a run with precision='inplace', this one has 'kahan'"),
        ({"mode": "master"}, "of a run with precision='inplace', this one has 'master'"),
        ({"law": "tied"}, "of a run with noise='gaussian', this one has 'tied'"),
    ],
    ids=str,
)
def test_other_settings_are_refused_on_resume(tmp_path, other, message):
    trainer(tmp_path).train()
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, **other).train(resume_from_checkpoint=True)


def test_older_ledgers_are_of_a_master_with_gaussian_noise(tmp_path):
    one = trainer(tmp_path, "master", torch.float32)
    one.train()
    path = tmp_path / ledger.NAME
    rewrite(path, precision=None, noise=None)
    assert ledger.replay(path, random_model()).tobytes() == one.engine.master.tobytes()
    for other in ({"mode": "inplace"}, {"mode": "master", "law": "tied"}):
        with pytest.raises(ValueError, match="of a run with (precision='master'|noise='gaussian'), this one has"):
            trainer(tmp_path, dtype=torch.float32, **other).train(resume_from_checkpoint=True)
    trainer(tmp_path, "master", torch.float32, max_steps=4).train(resume_from_checkpoint=True)
    assert len(ledger.read(path).steps) == 4


def test_edited_modes_are_found(tmp_path):
    trainer(tmp_path, fitness="random").train()
    path = tmp_path / ledger.NAME
    model = random_model().to(torch.bfloat16)
    for changed in ({"noise": "tied"}, {"sigma": 0.03}):
        before = path.read_bytes()
        rewrite(path, **changed)
        with pytest.raises(LedgerError, match="after 3 steps the weights have the digest"):
            ledger.replay(path, model)
        path.write_bytes(before)
    for changed in ({"precision": "exact"}, {"noise": 1}, {"sigma": "0.1"}, {"precision": ["inplace"]}):
        before = path.read_bytes()
        rewrite(path, **changed)
        with pytest.raises(LedgerError, match="line 1.*the header was edited"):
            ledger.read(path)
        path.write_bytes(before)
    with pytest.raises(
        LedgerError, match=r"computed in bfloat16 \(precision='inplace'\), this model is float32: load it in bfloat16"
    ):
        ledger.replay(path, random_model())


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
    with pytest.raises(ValueError, match="precision='in-place' is not one of .*Did you mean 'inplace'"):
        ESConfig(precision="in-place")
    with pytest.raises(ValueError, match="noise='normal' is not one of"):
        ESConfig(noise="normal")


def test_two_engines_of_one_model_do_not_disturb_each_other():
    model, train = random_model().to(torch.bfloat16), {"train": Prompts(ROWS, tokenizer())}
    one, other = (
        LocalEngine(model, tokenizer(), None, train, max_completion_length=4, precision="inplace", decoder="generate")
        for _ in range(2)
    )
    first = one.generate("train")
    other.update(np.array([1], np.uint64), np.array([0.5], np.float32))
    assert other.generate("train") != first
    assert one.generate("train") == first
    one.weights.retrace([Member(3)], SIGMA)
    other.write_model()
    assert (model.model.norm.weight == other.weights.tensors()["model.norm.weight"]).all()
