"""The ledger: exact rewards, a chain that finds every damage, and the bytes it costs."""

import base64
import gzip
import hashlib
import json
import math
import os
import re
import resource
import sys
import traceback
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import PROMPTS, random_model, tokenizer
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from evoalign_lib import ledger, models, noise, precision, tiny
from evoalign_lib.cli import app
from evoalign_lib.es import ESConfig, ESTrainer
from evoalign_lib.ledger import Ledger, LedgerError, Step
from evoalign_lib.rewards import RewardError
from evoalign_lib.update_rules import population

ROWS = [{"prompt": p, "number": i} for i, p in enumerate(PROMPTS)]


def token_mean(completion_ids, log_metric, **columns):
    log_metric("first", float(np.mean([ids[0] for ids in completion_ids])))
    return [sum(ids) / 4 for ids in completion_ids]


def trainer(folder: Path, reward=token_mean, model=None, **changed) -> ESTrainer:
    config = {
        "output_dir": str(folder), "population_size": 4, "sigma": 0.05, "alpha": 0.05, "max_steps": 12,
        "prompts_per_step": 3, "max_completion_length": 3, "workers": 1, "disable_tqdm": True, "report_to": "none",
        "save_strategy": "no", "seed": 5,
    } | changed  # fmt: skip
    return ESTrainer(random_model() if model is None else model, reward, ESConfig(**config), ROWS, None, tokenizer())


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A folder with a finished run of 12 steps; nothing may change it."""
    folder = tmp_path_factory.mktemp("run")
    random_model().save_pretrained(folder / "base")
    tokenizer().save_pretrained(folder / "base")
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    trainer(folder / "out", model=model, save_strategy="steps", save_steps=5).train()
    trainer(folder / "none").train()  # without checkpoints, and without a name of its model
    return folder


@pytest.fixture
def copy(run, tmp_path) -> Path:
    """A copy of the run's ledger, to be damaged."""
    path = tmp_path / "copy.jsonl"
    path.write_bytes((run / "out/ledger.jsonl").read_bytes())
    return path


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines()


def rewrite(path: Path, changed: list[bytes], rechain: bool = False) -> None:
    if rechain:  # a forger's work
        for i in range(1, len(changed)):
            line = json.loads(changed[i]) | {"prev": hashlib.sha256(changed[i - 1]).hexdigest()[:32]}
            changed[i] = json.dumps(line, separators=(",", ":")).encode()
    path.write_bytes(b"\n".join(changed) + b"\n")


# ---- rewards, exactly

FINITE = st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=True, width=64)


def round_trip(rewards: np.ndarray, prompts: int) -> dict:
    line = json.loads(json.dumps(ledger.encode_rewards(rewards, prompts)))
    assert ledger.decode_rewards(line).tobytes() == rewards.tobytes()
    return line


@given(st.lists(FINITE, min_size=2, max_size=40), st.integers(1, 5000))
def test_any_rewards_come_back_with_their_bits(values, prompts):
    line = round_trip(np.array(values), prompts)
    assert len(line["rewards"]) <= 4 * math.ceil(8 * len(values) / 3)


@given(
    st.integers(1, 600),
    st.lists(st.sampled_from([0.0, 0.06, 0.1, 1.1, 0.5, 2.0, 0.125]), min_size=1, max_size=6),
    st.sampled_from([1, -1]),  # of one sign: where rewards cancel, a mean is many units in its last place off
    st.integers(0, 2**32),
)
def test_means_over_prompts_are_short_fractions(prompts, values, sign, seed):
    rng = np.random.default_rng(seed)
    rewards = np.array([rng.choice(values, prompts).mean() * sign for _ in range(30)]) + 0.0  # no -0
    line = round_trip(rewards, prompts)
    assert line["of"] % prompts == 0 and len(line["rewards"]) < 30 * 11


EDGES = [0.0, -0.0, 5e-324, -5e-324, 2.2250738585072014e-308, 1.7976931348623157e308, -1.7976931348623157e308, 1e-17]


def test_edges_of_float64():
    for i, x in enumerate(EDGES):
        for y in [*EDGES[i:], 1.0, 1 / 3]:
            round_trip(np.array([x, y]), 128)


def test_the_two_forms_by_hand():
    third = 1 / 3
    line = ledger.encode_rewards(np.array([0.25, math.nextafter(0.25, 1), -math.nextafter(third, 0), 0.0]), 12)
    assert line == {"of": 12, "rewards": "3 3+1 -4-1 0"}
    assert ledger.encode_rewards(np.array([0.5, 12.34]), 1) == {"of": 100, "rewards": "50 1234"}
    irrational = np.array([math.pi, -0.0])
    assert ledger.encode_rewards(irrational, 1) == {"rewards": base64.b64encode(irrational.tobytes()).decode()}


BAD_REWARDS = [
    {"rewards": "AAAA"}, {"rewards": "no base 64!"}, {"rewards": 3}, {"rewards": None}, {},
    {"rewards": "1 2", "of": 0}, {"rewards": "1 2", "of": 1.5}, {"rewards": "1  2", "of": 4}, {"rewards": "", "of": 4},
    {"rewards": "1 two", "of": 4}, {"rewards": "1 1_0", "of": 4}, {"rewards": "1 ٣", "of": 4},
    {"rewards": "1\n2", "of": 4},
    {"rewards": "1 2+10", "of": 4}, {"rewards": "1 2", "of": 2**60},
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD_REWARDS, ids=str)
def test_what_is_no_list_of_rewards(copy, bad):
    changed = lines(copy)
    line = json.loads(changed[3])
    del line["rewards"], line["of"]
    changed[3] = json.dumps(line | bad).encode()
    rewrite(copy, changed, rechain=True)
    with pytest.raises(LedgerError, match="copy.jsonl, line 4"):
        ledger.read(copy)


# ---- what the file holds


def test_the_file_line_by_line(run):
    header, *steps, end = lines(run / "out/ledger.jsonl")
    header = json.loads(header)
    assert header["evoalign_ledger"] == header["noise"] == 1 and header["digest_every"] == 10
    assert header["run_key"] == hex(noise.run_key("es", 5))
    assert header["settings"] == trainer(run / "new")._settings()
    model = random_model()
    by_hand = hashlib.sha256()
    for name, p in sorted(model.named_parameters()):
        by_hand.update(name.encode() + b"\0" + p.detach().numpy().tobytes())
    assert header["model"]["digest"] == by_hand.hexdigest()
    assert header["model"]["digest"].startswith(models.base_digest(model))
    assert header["model"]["name"] == str(run / "base") and header["model"]["dtype"] == "float32"
    # every line holds the hash of the one before
    for one, other in zip(lines(run / "out/ledger.jsonl"), [*steps, end], strict=False):
        assert json.loads(other)["prev"] == hashlib.sha256(one).hexdigest()[:32]
    steps = [json.loads(step) for step in steps]
    assert [step["step"] for step in steps] == list(range(12))
    assert [i for i, step in enumerate(steps) if "weights" in step] == [10]
    assert [i for i, step in enumerate(steps) if "names" in step] == [0]
    assert steps[0]["names"] == ["first", "completions/clipped_ratio", "rewards/token_mean/mean"]
    assert list(json.loads(end)) == ["end", "weights", "prev"] and json.loads(end)["end"] == 12


def test_the_ledger_holds_what_the_run_computed_with(run, tmp_path):
    told = []

    class Noted(ESTrainer):
        def tell(self, members, fitness):
            told.append(fitness.tobytes())
            return super().tell(members, fitness)

    for fitness in ("reward", "shuffled", "random"):
        told.clear()
        config = trainer(tmp_path / fitness, fitness=fitness, max_steps=3).args
        tested = Noted(random_model(), token_mean, config, ROWS, None, tokenizer())
        tested.train()
        log = ledger.read(tmp_path / fitness / "ledger.jsonl")
        assert [step.rewards.tobytes() for step in log.steps] == told and len(told) == 3
        assert sum(step.tokens for step in log.steps) == tested.budget["generated_tokens"]
        assert log.weights[3] == precision.digest(tested.engine.layout, tested.engine.master)


def test_reading_changes_nothing(copy):
    copy.write_bytes(copy.read_bytes() + b'{"step":12')
    before = copy.read_bytes()
    log = ledger.read(copy)
    assert log.torn == b'{"step":12' and len(log.steps) == 12 and copy.read_bytes() == before


def test_a_compressed_ledger(run, copy, tmp_path):
    packed = tmp_path / "ledger.jsonl.gz"
    packed.write_bytes(gzip.compress(copy.read_bytes()))
    one, other = ledger.read(packed), ledger.read(copy)
    assert one.header == other.header and one.weights == other.weights and one.tips == other.tips
    with pytest.raises(LedgerError, match=r"is compressed: unpack it \(gunzip\)"):
        Ledger.open(packed)
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(LedgerError, match="is damaged .*: restore it from a copy"):
        ledger.read(packed)


@given(
    st.dictionaries(
        st.text("ab#.01", min_size=1, max_size=7) | st.builds("h.{}.w".format, st.integers(0, 12)),
        st.lists(st.integers(0, 3), max_size=2).map(tuple),
    )
)
def test_shapes_come_back(shapes):
    packed = json.loads(json.dumps(ledger.pack_shapes(shapes.items())))
    assert {name: tuple(shape) for name, shape in ledger.unpack_shapes(packed)} == shapes


def test_layers_are_written_once():
    model = random_model(num_hidden_layers=30)
    packed = ledger.pack_shapes((name, tuple(p.shape)) for name, p in model.named_parameters())
    assert len(packed) < 16 < 300 < len(ledger.unpack_shapes(packed))


def test_a_shipped_base_is_known_by_its_name(tmp_path):
    model, tok = tiny.load("A0")
    config = trainer(tmp_path / "run", fitness="random", max_steps=2).args
    tested = ESTrainer(model, token_mean, config, ROWS, None, tok)
    tested.train()
    log = ledger.read(tmp_path / "run/ledger.jsonl")
    assert log.header["model"]["name"] == "A0"
    assert ledger.replay(log, "A0").tobytes() == tested.engine.master.tobytes()
    assert str(Path(tiny.bases_folder())) not in (tmp_path / "run/ledger.jsonl").read_text()


def test_metrics_that_come_and_go_and_are_no_numbers(tmp_path):
    def reward(completions, trainer_state, log_metric, **columns):
        if trainer_state.global_step != 1:
            log_metric("a", math.nan if trainer_state.global_step else math.inf)
        return [float(len(c)) for c in completions]

    tested = trainer(tmp_path / "run", reward, max_steps=3)
    tested.train()
    read = [step.log for step in ledger.read(tmp_path / "run/ledger.jsonl").steps]
    assert [list(log) for log in read] == [list(log) for log in (s.log for s in tested.ledger.steps)]
    assert read[0]["a"] == math.inf and "a" not in read[1] and math.isnan(read[2]["a"])
    # no NaN or Infinity, which are not JSON
    for line in lines(tmp_path / "run/ledger.jsonl"):
        json.loads(line, parse_constant=lambda name: pytest.fail(name))


# ---- the state of reward functions


class Adaptive:
    """Rewards that shift by a bias, which falls by a third of the mean of `first` after a step."""

    def __init__(self):
        self.bias = 0.25

    def __call__(self, completion_ids, log_metric, **columns):
        return [r + self.bias for r in token_mean(completion_ids, log_metric)]

    def state(self):
        return {"bias": self.bias}

    def load_state(self, state):
        self.bias = state["bias"]

    def end_of_step(self, metrics):
        self.bias -= float(np.mean(metrics["first"])) / 3


@pytest.fixture(scope="module")
def adaptive(tmp_path_factory) -> bytes:
    """The ledger of a run of 4 steps whose reward has a state."""
    folder = tmp_path_factory.mktemp("adaptive")
    trainer(folder, Adaptive(), max_steps=4).train()
    return (folder / "ledger.jsonl").read_bytes()


def test_a_state_in_header_and_lines(run, adaptive, tmp_path):
    assert b"reward_state" not in (run / "out/ledger.jsonl").read_bytes()
    header, *steps, end = map(json.loads, adaptive.splitlines())
    assert header["evoalign_ledger"] == 1 and header["settings"]["reward_state"] == {"Adaptive": {"bias": 0.25}}
    bias = 0.25
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(adaptive)
    log = ledger.read(path)
    for line, step in zip(steps, log.steps, strict=True):
        bias -= step.log["first"] / 3
        assert step.reward_state == line["reward_state"] == {"Adaptive": {"bias": bias}}
    assert "reward_state" not in end
    # a replay takes rewards as they are
    assert ledger.verify(path, random_model()).recomputed


BAD_STATES = [
    None, 3, [], {"Adaptive": 1.0}, {"Adaptive": {"bias": "1"}}, {"Adaptive": {"bias": True}},
    {"Adaptive": {"bias": None}}, {"Adaptive": {"bias": 10**400}}, {"Adaptive": {"bias": math.inf}},
    {"Adaptive": [0.5]}, {"Adaptive": {"bias": math.nan}}, {"Adaptive": {"bias": {}}},
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD_STATES, ids=lambda bad: f"{bad!s:.40}")
@pytest.mark.parametrize("number", [1, 3])
def test_what_is_no_state(adaptive, tmp_path, number, bad):
    changed = adaptive.splitlines()
    line = json.loads(changed[number - 1])
    (line["settings"] if number == 1 else line)["reward_state"] = bad
    changed[number - 1] = json.dumps(line).encode()
    rewrite(tmp_path / "ledger.jsonl", changed, rechain=True)
    with pytest.raises(LedgerError, match=f"line {number}: reward_state .* is no state of reward functions"):
        ledger.read(tmp_path / "ledger.jsonl")


@pytest.mark.parametrize("states", [{}, {"Other": {"bias": 0.5}}, {"Adaptive": {"bias": 0.5}, "Other": {}}], ids=str)
def test_states_of_other_functions_than_the_header(adaptive, tmp_path, states):
    path, message = tmp_path / "ledger.jsonl", r"has the state of the reward functions \[.*of \['Adaptive'\]"
    changed = adaptive.splitlines()[:-1]
    path.write_bytes(b"\n".join(changed) + b"\n")
    with pytest.raises(LedgerError, match=f"step 4 {message}"):
        Ledger.open(path).append(Step(4, np.arange(4.0), reward_state=states))
    changed[2] = json.dumps(json.loads(changed[2]) | {"reward_state": states}).encode()
    rewrite(path, changed, rechain=True)
    with pytest.raises(LedgerError, match=f"line 3: step 1 {message}"):
        ledger.read(path)


def test_a_state_in_a_run_without_one(copy):
    log = Ledger.open(copy)
    with pytest.raises(LedgerError, match=r"step 12 has the state of the reward functions \['f'\], the run .* \[\]"):
        log.append(Step(12, np.arange(4.0), reward_state={"f": {"a": 1.0}}))


# ---- size


def written(path: Path, steps: int, rewards, log) -> tuple[int, int]:
    """Bytes, plain and compressed, of a ledger of N = 30 members on a Qwen2.5-0.5B-shaped model."""
    shapes = [("model.embed_tokens.weight", (151936, 896)), ("model.norm.weight", (896,))]
    kinds = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    shapes += [(f"model.layers.{i}.some.{kind}.weight", (896, 896)) for i in range(24) for kind in kinds]
    settings = trainer(path / "none")._settings() | {"population_size": 30, "prompts_per_step": 128}
    log_file = Ledger.create(
        path / "ledger.jsonl",
        {
            "evoalign_ledger": 1, "noise": 1, "run_key": "0x0123456789abcdef", "settings": settings, "digest_every": 10,
            "model": {
                "name": "Qwen/Qwen2.5-0.5B-Instruct", "dtype": "bfloat16", "digest": "0" * 64,
                "parameters": ledger.pack_shapes(shapes),
            },
        },
    )  # fmt: skip
    rng = np.random.default_rng(0)
    for i in range(steps):
        drawn = rewards(rng, i / steps)
        step = Step(i, drawn, 30 * 128 * 11 + i, float(f"{5 + rng.random():.4g}"), round(10.5 * i, 3), {}, log(drawn))
        log_file.append(step, rng.bytes(32).hex() if i and i % 10 == 0 else None)
    log_file.end(rng.bytes(32).hex())
    data = (path / "ledger.jsonl").read_bytes()
    return len(data), len(gzip.compress(data, 9))


def countdown_rewards(rng, done):
    p = np.array([0.3 - 0.2 * done, 0.1, 0.5, 0.1 + 0.2 * done])
    return np.array([rng.choice([0, 0.06, 0.1, 1.1], 128, p=p).mean() for _ in range(30)])


def countdown_log(rewards):
    accuracy = float(np.mean(np.round(rewards * 12800) // 140 / 128))
    names = ["accuracy", "format", "completions/clipped_ratio", "rewards/reward/mean"]
    return dict(zip(names, [accuracy, float(rewards.mean() / 3), accuracy / 7, float(rewards.mean())], strict=True))


def test_500_steps_cost_less_than_250_kB(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: None)  # 1,500 syncs take seconds on some disks
    plain, packed = written(tmp_path / "countdown", 500, countdown_rewards, countdown_log)
    assert plain <= 250_000 and packed <= 100_000
    # a reward model's scores are no fractions, and fill all the bits of a float32
    means = lambda rng, done: rng.normal(1.5, 1, (30, 128)).astype(np.float32).astype(float).mean(1)  # noqa: E731
    plain, packed = written(tmp_path / "model", 500, means, lambda rewards: {"rewards/model/mean": rewards.mean()})
    assert plain <= 250_000 and packed <= 125_000
    # and the null arm's normals fill those of a float64
    plain, packed = written(tmp_path / "random", 500, lambda rng, done: rng.standard_normal(30), lambda rewards: {})
    assert plain <= 250_000 and packed <= 150_000


def test_storage_beside_checkpoints():
    rows = ledger.storage(30, 500, {"plain": 250_000, "gzip": 100_000}, {"A0": 140_000, "7B": 7 * 10**9}, itemsize=4)
    assert [(r["model"], r["form"], r["bytes"]) for r in rows] == [
        (model, form, size)
        for model in ("A0", "7B")
        for form, size in (("seeds and coefficients", 180_000), ("plain", 250_000), ("gzip", 100_000))
    ]
    assert [r["checkpoint"] for r in rows[::3]] == [560_000, 28 * 10**9]
    assert all(r["ratio"] == r["checkpoint"] / r["bytes"] == 4 * r["parameters"] / r["bytes"] for r in rows)


# ---- what is refused


def step(i: int, rewards=(1.0, 2.0, 3.0, 4.0)) -> Step:
    return Step(i, np.array(rewards))


def test_appending_what_is_wrong(copy):
    log = Ledger.open(copy)
    before = copy.read_bytes()
    for wrong, message in [
        (step(11), "step 11 is out of order: the next one in .*copy.jsonl is 12"),
        (step(13), "step 13 is out of order"),
        (step(12, [1.0] * 5), r"step 12 has rewards of shape \(5,\), the population has N = 4"),
        (step(12, [1.0, math.nan, 0, 0]), "member 1 of step 12 has the reward nan: rewards must be finite"),
        (step(12, [1.0, 1, 1, -math.inf]), "member 3 of step 12 has the reward -inf"),
    ]:
        with pytest.raises(LedgerError, match=message):
            log.append(wrong)
    assert copy.read_bytes() == before
    log.append(step(12))
    assert [s.step for s in ledger.read(copy).steps] == list(range(13))


def test_two_writers(copy):
    one, other = Ledger.open(copy), Ledger.open(copy)
    one.append(step(12))
    with pytest.raises(LedgerError, match="another process writes to it, or it was edited"):
        other.append(step(12))
    with pytest.raises(LedgerError, match="another process writes to it, or it was edited"):
        other.end("0" * 64)
    one.append(step(13))
    assert len(ledger.read(copy).steps) == 14


def change(line: bytes, **values) -> bytes:
    return json.dumps(json.loads(line) | values, separators=(",", ":")).encode()


def test_an_edited_reward(copy):
    good = lines(copy)
    for i in range(1, 13):
        text = json.loads(good[i])["rewards"]
        edited = text.replace(text[0], "9" if text[0] != "9" else "8", 1)
        rewrite(copy, [*good[:i], change(good[i], rewards=edited), *good[i + 1 :]])
        with pytest.raises(
            LedgerError, match=f"line {i + 2}: it does not follow from the line before it: one of the two"
        ):
            ledger.read(copy)


def test_lines_missing_twice_or_swapped(copy):
    good = lines(copy)
    for changed, number in [
        (good[:4] + good[5:], 5),
        (good[:4] + good[3:], 5),
        ([*good[:4], good[5], good[4], *good[6:]], 5),
        (good[:1] + good[2:], 2),
    ]:
        rewrite(copy, changed)
        with pytest.raises(LedgerError, match=f"line {number}: it does not follow from the line before"):
            ledger.read(copy)
    # a forger's chain does not help
    rewrite(copy, [*good[:4], good[5], good[4], *good[6:]], rechain=True)
    with pytest.raises(LedgerError, match="line 5: step 4 is out of order: the next one in .* is 3"):
        ledger.read(copy)
    rewrite(copy, [*good[:4], *good[-1:]], rechain=True)
    with pytest.raises(LedgerError, match="line 5: it closes the ledger after 12 steps, but 3 are recorded"):
        ledger.read(copy)


@pytest.mark.parametrize("bad", [b"", b"{", b"\x00" * 40, b"\xff\xfe", b"[" * 5000, b"9" * 5000], ids=repr)
def test_a_damaged_line(copy, bad):
    good = lines(copy)
    rewrite(copy, [*good[:5], bad, *good[6:]])
    with pytest.raises(LedgerError, match=r"line 6 is n.*restore the file from a copy, or cut it off .*\(head -n 5\)"):
        ledger.read(copy)


@pytest.mark.parametrize("bad", [b"[]", b"3", b"null", b"{}", b'"prev"', b'{"prev":[]}'], ids=repr)
def test_a_line_of_something_else(copy, bad):
    good = lines(copy)
    rewrite(copy, [*good[:5], bad, *good[6:]])
    with pytest.raises(LedgerError, match="line 6"):
        ledger.read(copy)


@given(st.data())
def test_a_hostile_line_is_a_ledger_error(tmp_path_factory, run, data):
    values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just([]) | st.just({})
    good = lines(run / "out/ledger.jsonl")
    i = data.draw(st.integers(0, 12))
    line = json.loads(good[i])
    where = line if i else data.draw(st.sampled_from([line, line["settings"], line["model"]]))
    key = data.draw(st.sampled_from(sorted(where.keys() - {"prev"})))
    where[key] = data.draw(values)
    path = tmp_path_factory.mktemp("hostile") / "ledger.jsonl"
    rewrite(path, [*good[:i], json.dumps(line).encode(), *good[i + 1 :]], rechain=True)
    try:
        assert len(ledger.read(path).steps) == 12
    except LedgerError as error:
        assert f"line {i + 1}" in str(error)


def test_no_ledger(copy, tmp_path):
    with pytest.raises(LedgerError, match="there is no ledger '.*/nothing.jsonl'"):
        ledger.read(tmp_path / "nothing.jsonl")
    good = lines(copy)
    rewrite(copy, good[1:])
    with pytest.raises(
        LedgerError, match="line 1: this is not the header of a ledger: the file has lost its first line"
    ):
        ledger.read(copy)
    copy.write_text('{"some": "json"}\n')
    with pytest.raises(LedgerError, match="line 1: this is not the header of a ledger"):
        ledger.read(copy)
    for nothing in (b"", good[0][:50]):
        copy.write_bytes(nothing)
        with pytest.raises(LedgerError, match="has no header: no step was recorded in it, so nothing is lost"):
            ledger.read(copy)


def test_other_versions(copy):
    good = lines(copy)
    rewrite(copy, [change(good[0], noise=2), *good[1:]], rechain=True)
    with pytest.raises(
        LedgerError, match="the run has version 2 of the noise law, this evoalign has version 1: use an"
    ):
        ledger.read(copy)
    rewrite(copy, [change(good[0], evoalign_ledger="x"), *good[1:]], rechain=True)
    with pytest.raises(LedgerError, match="the run has version 'x' of the format, this evoalign has version 1"):
        ledger.read(copy)


def test_a_ledger_cut_at_any_byte(copy, tmp_path):
    data = copy.read_bytes()
    ends = [m.end() for m in re.finditer(b"\n", data)]
    path = tmp_path / "cut.jsonl"
    for cut in [*range(0, len(data), 7), *(end + i for end in ends for i in (-2, -1, 0, 1))]:
        path.write_bytes(data[:cut])
        whole = [end for end in ends if end <= cut]
        if not whole:
            with pytest.raises(LedgerError, match="has no header"):
                Ledger.open(path)
            continue
        log = Ledger.open(path)
        assert len(log.steps) == min(12, len(whole) - 1) and log.ended == (len(whole) == 14)
        assert log.torn == data[whole[-1] : cut] and path.read_bytes() == data[: whole[-1]]
        log.append(step(len(log.steps)))
        assert len(ledger.read(path).steps) == min(12, len(whole) - 1) + 1


def test_a_last_line_of_which_the_disk_lost_a_part(copy):
    """After a power cut a file may be as long as it should be, with zeros where a block was not written."""
    data = copy.read_bytes()
    last = data.rindex(b"\n", 0, -1) + 1
    copy.write_bytes(data[:last] + b"\0" * 20 + data[last + 20 :])
    log = Ledger.open(copy)
    assert len(log.steps) == 12 and not log.ended and copy.read_bytes() == data[:last]


# ---- a new run does not destroy an old one


def test_a_folder_with_a_ledger_is_refused(run, tmp_path):
    before = (run / "out/ledger.jsonl").read_bytes()
    with pytest.raises(LedgerError, match="is the ledger of another run: use another output_dir, or train.resume"):
        trainer(run / "out").train()
    with pytest.raises(LedgerError, match="is the ledger of another run"):
        Ledger.create(run / "out/ledger.jsonl", {})
    assert (run / "out/ledger.jsonl").read_bytes() == before


def test_a_run_that_failed_in_its_first_step_leaves_nothing_in_the_way(tmp_path):
    def fails(**columns):
        raise KeyError("answer")

    with pytest.raises(RewardError, match="KeyError"):
        trainer(tmp_path / "run", fails).train()
    assert not (tmp_path / "run/ledger.jsonl").exists()
    for torn in (b"", b'{"evoalign_le', b'{"evoalign_ledger":1}\n'):
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run/ledger.jsonl").write_bytes(torn)
        trainer(tmp_path / "run", max_steps=1).train()
        assert len(ledger.read(tmp_path / "run/ledger.jsonl").steps) == 1
        (tmp_path / "run/ledger.jsonl").unlink()


def test_a_step_alone_records_nothing(tmp_path):
    tested = trainer(tmp_path / "run")
    tested.step()
    assert not (tmp_path / "run").exists() and tested.state.global_step == 0


def test_weights_that_moved_outside_train_are_noticed(tmp_path):
    tested = trainer(tmp_path / "run", max_steps=2)
    tested.train()
    tested.args.max_steps = 4
    tested.train()  # goes on
    tested.step()
    tested.args.max_steps = 6
    with pytest.raises(RuntimeError, match="the weights are not those after step 4 of .*ledger.jsonl.* a new trainer"):
        tested.train()
    assert ledger.verify(tmp_path / "run/ledger.jsonl", random_model()).recomputed


def test_rewards_without_coefficients_are_not_recorded(tmp_path):
    def huge(number, completions, trainer_state, **columns):
        return [1e300 * len(completions[0])]  # the square in the deviation overflows

    tested = trainer(tmp_path / "run", huge, prompts_per_step=1)
    with pytest.raises(ValueError, match="give no finite coefficients: scale the rewards down"):
        tested.train()
    assert not (tmp_path / "run/ledger.jsonl").exists()


# ---- a full disk


def in_child(function) -> int:
    """Exit status of a function run in a forked process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking a process with threads
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            function()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize(("whole", "more"), [(0, 100), (1, 5), (1, 150), (5, 1), (13, 20)])
def test_a_full_disk_stops_the_run_and_loses_nothing(run, tmp_path, whole, more):
    """Room for some whole lines and a part of one; in the end for another line and a half."""
    path = tmp_path / "run/ledger.jsonl"
    room = sum(len(line) + 1 for line in lines(run / "none/ledger.jsonl")[:whole]) + more

    def until_full():
        tested = trainer(tmp_path / "run")
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        with pytest.raises(
            OSError, match=r"could not be recorded \(File too large\): the run stops, and what is"
        ) as error:
            tested.train()
        assert error.value.filename == str(path)
        done = tested.state.global_step
        # times are part of a line, so that this run's lines may be a byte longer than those measured
        kept = path.read_bytes().count(b"\n") if path.exists() else 0
        assert abs(kept - whole) <= 1 and done == max(0, kept - 1)
        assert ledger.recorded(path) == (kept > 1)
        # once there is room, the same trainer goes on
        resource.setrlimit(resource.RLIMIT_FSIZE, (room + 2500, resource.RLIM_INFINITY))
        if room + 2500 < len((run / "none/ledger.jsonl").read_bytes()):
            with pytest.raises(OSError, match="could not be recorded"):
                tested.train()
            assert tested.state.global_step > done
        else:
            tested.train()
            assert tested.state.global_step == 12

    assert in_child(until_full) == 0
    assert path.read_bytes().endswith(b"\n")  # whole lines only
    resumed = trainer(tmp_path / "run")
    resumed.train(resume_from_checkpoint=True)
    assert ledger.read(path).weights == ledger.read(run / "out/ledger.jsonl").weights


# ---- replay


def test_replay_is_the_run_at_every_step(tmp_path):
    live = {}

    class Noted(ESTrainer):
        def tell(self, members, fitness):
            live[self.state.global_step] = self.engine.master.tobytes()
            return super().tell(members, fitness)

    for fitness, model in (("reward", random_model()), ("shuffled", random_model()), ("random", random_model("llama"))):
        config = trainer(tmp_path / fitness, fitness=fitness, max_steps=6).args
        tested = Noted(model, token_mean, config, ROWS, None, tokenizer())
        start = random_model("llama") if fitness == "random" else random_model()
        tested.train()
        live[6] = tested.engine.master.tobytes()
        for i in range(7):
            assert ledger.replay(tmp_path / fitness / "ledger.jsonl", start, i).tobytes() == live[i]
        assert len(set(live.values())) == 7


def test_replay_of_tied_populations(tmp_path):
    tested = trainer(tmp_path / "run", lambda completions, **kw: [0.1 + 0.2] * len(completions), max_steps=3)
    tested.engine.master[:4] = -0.0  # a sign that adding nothing would lose
    start = tested.engine.master.copy()
    tested.engine.write_model()
    model = random_model()
    model.load_state_dict(tested.model.state_dict())
    tested.train()
    assert ledger.replay(tmp_path / "run/ledger.jsonl", model).tobytes() == start.tobytes()


def test_replay_by_hand(run):
    """Key, coefficient and noise of each member written out, in NumPy."""
    log = ledger.read(run / "out/ledger.jsonl")
    model = random_model()
    layout = noise.Layout.from_shapes((name, tuple(p.shape)) for name, p in model.named_parameters())
    master = np.zeros(layout.size, np.float32)
    for name, p in model.named_parameters():
        layout.views(master)[name][...] = p.detach().numpy()
    for record in log.steps:
        keys = [noise.member_key(noise.run_key("es", 5), record.step, i) for i in range(4)]
        assert keys == [m.key for m in population(noise.run_key("es", 5), record.step, 4)]
        mean = math.fsum(record.rewards) / 4
        deviation = math.sqrt(math.fsum((r - mean) ** 2 for r in record.rewards) / 4)
        c = np.array([np.float32(0.05 * ((r - mean) / deviation) / 4) for r in record.rewards], np.float32)
        master = noise.reference_update(master, layout, np.array(keys, np.uint64), c)
    assert master.tobytes() == ledger.replay(log, model).tobytes()


def test_the_wrong_model(run, copy):
    with pytest.raises(LedgerError, match="these are not the weights that the run started from .*Load that model anew"):
        ledger.replay(copy, random_model(seed=9))
    with pytest.raises(
        LedgerError, match="not the model that the run started from.*'model.layers.0.mlp.down_proj.weight'"
    ):
        ledger.replay(copy, random_model(intermediate_size=40))
    with pytest.raises(LedgerError, match="'lm_head.weight' has the shape .*, in the run None"):
        ledger.replay(copy, random_model(tie_word_embeddings=False))
    with pytest.raises(LedgerError, match="not the weights that the run started from"):
        ledger.replay(copy, str(run / "out/checkpoint-5"))
    with pytest.raises(ValueError, match="model '/no/such' does not exist"):
        ledger.replay(copy, "/no/such")


def test_a_step_that_is_not_there(run, copy):
    for wrong in (13, -1):
        with pytest.raises(LedgerError, match=f"step {wrong} is not in .*copy.jsonl, which has 12 steps"):
            ledger.replay(copy, random_model(), wrong)


def test_a_forged_chain_is_found_by_the_digests(copy):
    good = lines(copy)
    text = json.loads(good[4])["rewards"].split(" ")
    forged = " ".join([text[1], text[0], *text[2:]])
    assert forged != json.loads(good[4])["rewards"]
    rewrite(copy, [*good[:4], change(good[4], rewards=forged), *good[5:]], rechain=True)
    assert not ledger.verify(copy).recomputed  # the chain alone is in order
    with pytest.raises(LedgerError, match="after 10 steps the weights have the digest .*were edited, or this machine"):
        ledger.verify(copy, random_model())
    assert ledger.replay(copy, random_model(), 3).any()  # before the forged step


def test_verify(run, copy):
    found = ledger.verify(copy, random_model())
    assert (found.steps, found.ended, found.torn, found.digests, found.recomputed) == (12, True, 0, 3, True)
    assert found.weights == ledger.read(copy).weights[12]
    assert json.loads((run / "out/checkpoint-10/es_state.json").read_text())["weights"] == ledger.read(copy).weights[10]
    copy.write_bytes(copy.read_bytes()[:-30])
    found = ledger.verify(copy, random_model())
    assert (found.steps, found.ended, found.digests) == (12, False, 2) and found.torn > 50
    assert found.weights == ledger.read(run / "out/ledger.jsonl").weights[12]
    assert ledger.verify(copy).weights is None


# ---- the command


def call(*arguments) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["replay", *map(str, arguments)])
    return result.exit_code, result.output


def test_the_command_writes_the_folder_of_any_step(run, tmp_path):
    path = run / "out/ledger.jsonl"
    code, text = call(path, "--step", 5, "--out", tmp_path / "five")
    assert code == 0 and "the model after step 5" in text
    for name in ("model.safetensors", "config.json", "chat_template.jinja"):
        assert (tmp_path / "five" / name).read_bytes() == (run / "out/checkpoint-5" / name).read_bytes(), name
    assert AutoTokenizer.from_pretrained(tmp_path / "five")("a<think>")["input_ids"]
    code, text = call(path, "--out", tmp_path / "all", "--model", run / "base", "--verify")
    assert code == 0 and "12 steps, chain intact, closed\n3 digests of weights, all computed again, equal" in text
    assert f"the model after step 12, weights {ledger.read(path).weights[12]}" in text
    code, text = call(path, "--step", 0, "--out", tmp_path / "none")
    assert (tmp_path / "none/model.safetensors").read_bytes() == (run / "base/model.safetensors").read_bytes()


def test_the_command_says_what_is_wrong(run, tmp_path):
    path = run / "out/ledger.jsonl"
    assert call(path)[0] == 2 and "--out FOLDER, --verify, or both" in call(path)[1]
    for arguments, message in [
        ((path, "--out", run), "exists: give a new folder"),
        ((path, "--out", tmp_path / "x", "--step", 99), "step 99 is not in"),
        ((path, "--verify", "--model", run / "out/checkpoint-5"), "not the weights that the run started from"),
        ((path, "--verify", "--model", "no-such-model"), "model 'no-such-model'"),
        ((tmp_path / "none.jsonl", "--verify"), "there is no ledger"),
    ]:
        code, text = call(*arguments)
        assert code == 1 and message in text and "Traceback" not in text
    assert not (tmp_path / "x").exists()


def test_a_run_without_a_name_of_its_model(tmp_path):
    trainer(tmp_path / "run", max_steps=1).train()
    path = tmp_path / "run/ledger.jsonl"
    assert ledger.read(path).header["model"]["name"] is None
    code, text = call(path, "--verify")
    assert code == 0 and "1 steps, chain intact, closed" in text and "not computed again: give the model" in text
    code, text = call(path, "--out", tmp_path / "out")
    assert code == 1 and "has no name of the model that the run started from: give its folder or name" in text


def test_a_half_precision_model_is_replayed_in_its_dtype(run, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(run / "base", dtype=torch.bfloat16)
    tested = trainer(tmp_path / "run", model=model, max_steps=2)
    tested.train()
    tested.save_model(tmp_path / "live")
    code, _ = call(tmp_path / "run/ledger.jsonl", "--out", tmp_path / "replayed")
    assert code == 0
    live, replayed = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("live", "replayed"))
    assert live == replayed
