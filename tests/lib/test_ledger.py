"""The ledger: exact rewards, a chain that finds every damage, and the bytes it costs."""

import base64
import errno
import fcntl
import gzip
import hashlib
import json
import math
import os
import re
import resource
import shutil
import signal
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import PROMPTS, chained, in_child, random_model, tokenizer
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from typer.testing import CliRunner

from evoalign_lib import ledger, models, noise
from evoalign_lib.cli import app
from evoalign_lib.es import ESConfig, ESTrainer
from evoalign_lib.ledger import Ledger, LedgerError, Step
from evoalign_lib.rewards import RewardError

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
    # a forger's work
    path.write_bytes(chained(map(json.loads, changed)) if rechain else b"\n".join(changed) + b"\n")


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
    assert (header["evoalign_ledger"], header["noise"], header["digest_every"]) == (4, 1, 10)
    assert header["run_key"] == hex(noise.run_key("es", 5))
    assert header["settings"] == trainer(run / "new")._settings()
    model = random_model()
    by_hand = hashlib.sha256()
    for name, p in sorted(model.named_parameters()):
        by_hand.update(name.encode() + b"\0" + p.detach().numpy().tobytes())
    assert header["model"]["digest"] == by_hand.hexdigest()
    assert header["model"]["digest"].startswith(models.base_digest(model))
    assert header["model"]["name"] == str(run / "base") and header["model"]["dtype"] == "float32"
    # every line ends with the hash of itself and of the hash before
    last = b""
    for line in lines(run / "out/ledger.jsonl"):
        text, found = line.split(b',"hash":')
        last = hashlib.sha256(last + text).hexdigest()[:32].encode()
        assert found == b'"' + last + b'"}'
    steps = [json.loads(step) for step in steps]
    assert [step["step"] for step in steps] == list(range(12))
    assert [i for i, step in enumerate(steps) if "weights" in step] == [10]
    assert [i for i, step in enumerate(steps) if "names" in step] == [0]
    assert steps[0]["names"] == ["first", "completions/clipped_ratio", "rewards/token_mean/mean"]
    assert list(json.loads(end)) == ["end", "weights", "hash"] and json.loads(end)["end"] == 12


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
    assert header["settings"]["reward_state"] == {"Adaptive": {"bias": 0.25}}
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
    refused = rf"line {number}(: reward_state .* is no state of reward functions| is not JSON \((NaN|Infinity) is no)"
    with pytest.raises(LedgerError, match=refused):
        ledger.read(tmp_path / "ledger.jsonl")


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


def change(line: bytes, **values) -> bytes:
    return json.dumps(json.loads(line) | values, separators=(",", ":")).encode()


def test_an_edited_reward(copy):
    good = lines(copy)
    for i in range(1, 13):
        text = json.loads(good[i])["rewards"]
        edited = text.replace(text[0], "9" if text[0] != "9" else "8", 1)
        rewrite(copy, [*good[:i], change(good[i], rewards=edited), *good[i + 1 :]])
        with pytest.raises(LedgerError, match=f"line {i + 1}: its hash is another: the line is damaged or was edited"):
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
        with pytest.raises(LedgerError, match=f"line {number}: its hash is another"):
            ledger.read(copy)
    # a forger's chain does not help
    rewrite(copy, [*good[:4], good[5], good[4], *good[6:]], rechain=True)
    with pytest.raises(LedgerError, match="line 5: step 4 is out of order: the next one in .* is 3"):
        ledger.read(copy)
    rewrite(copy, [*good[:4], *good[-1:]], rechain=True)
    with pytest.raises(LedgerError, match="line 5: it closes the ledger after 12 steps, but 3 are recorded"):
        ledger.read(copy)


DAMAGED = [b"", b"{", b"\x00" * 40, b"\xff\xfe", b"[" * 5000, b"9" * 5000, b"[]", b"3", b"null", b"{}", b'{"prev":[]}']


@pytest.mark.parametrize("bad", DAMAGED, ids=repr)
def test_a_damaged_line(copy, bad):
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
    key = data.draw(st.sampled_from(sorted(where.keys() - {"hash"})))
    where[key] = data.draw(values)
    path = tmp_path_factory.mktemp("hostile") / "ledger.jsonl"
    rewrite(path, [*good[:i], json.dumps(line).encode(), *good[i + 1 :]], rechain=True)
    try:
        assert len(ledger.read(path).steps) == 12
    except LedgerError as error:
        assert f"line {i + 1}" in str(error)


HOSTILE = {
    "run_key": ["0x1", "-0x123456789abcdef", "0x" + "f" * 17, 10**400, None],
    "digest_every": [0, 2.5, math.inf, 10**4000],
    "settings": [None, [], "x"],
    "model": [None, [], "x"],
}
HOSTILE_SETTINGS = {
    "alpha": [math.inf, math.nan, 10**400, -1, 0, True, "1"],
    "sigma": [math.inf, 10**4000, [], None],
    "population_size": [10**400, 1, 4.0, True, math.inf],
    "prompts_per_step": [2**60, 0, "3"],
    "noise": [[], {}, 1, "rademacher"], "precision": [None, ["master"]], "anchor_decay": [math.inf, 10**400, "x", 1],
    "antithetic": ["yes"], "fitness_shaping": ["z"], "alpha_schedule": ["step"], "num_generations": [0],
    "rank": [-1, 2**16], "update_scaling": ["x"], "frozen": ["0" * 63], "search": ["x"],
}  # fmt: skip
HOSTILE_MODEL = {
    "name": [3, ["A0"], {}], "dtype": ["float64", "float8_e4m3fn", "device", None], "digest": ["0" * 63, 7, None],
    "parameters": [
        None, {}, "x", [3], [[]], [["w"]], [["w", 3]], [[3, [1]]], [["w", [1], 1, 1]], [["w", [-1]]], [["w", [1.5]]],
        [["w", [10**400]]], [["w", [1] * 100]], [["w", ["1"]]], [["w", [1], 0]], [["w.#", [1], 10**12]],
        [["w" * 10**6, [1], 10**4]], [[f"w{i}.#", [1], 150_000] for i in range(2)],
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("where", "values"),
    [(None, HOSTILE), ("settings", HOSTILE_SETTINGS), ("model", HOSTILE_MODEL)],
    ids=["header", "settings", "model"],
)
def test_a_hostile_header_is_refused_before_anything_is_made_by_it(copy, where, values):
    good, model = lines(copy), random_model()
    tracemalloc.start()
    for name, bad in values.items():
        for value in bad:
            header = json.loads(good[0])
            (header[where] if where else header)[name] = value
            rewrite(copy, [json.dumps(header).encode(), *good[1:]], rechain=True)
            tracemalloc.reset_peak()
            with pytest.raises(LedgerError, match=r"copy\.jsonl, line 1") as error:
                ledger.verify(copy, model)
            assert len(str(error.value)) < 1000 and tracemalloc.get_traced_memory()[1] < 50_000_000, name
    tracemalloc.stop()


@pytest.mark.parametrize(
    "text", [b"", b'{"evoalign_ledger":4,"noise"', b'{"some": "json"}\n', b'{"step":0}\n{"step":1}\n']
)
def test_no_ledger(tmp_path, text):
    with pytest.raises(LedgerError, match="there is no ledger '.*/none.jsonl'"):
        ledger.read(tmp_path / "none.jsonl")
    (tmp_path / "ledger.jsonl").write_bytes(text)
    with pytest.raises(LedgerError, match=r"ledger\.jsonl.*( has no | is not the )header"):
        ledger.read(tmp_path / "ledger.jsonl")


def test_other_versions(copy):
    good = lines(copy)
    rewrite(copy, [change(good[0], noise=2), *good[1:]], rechain=True)
    with pytest.raises(LedgerError, match="the run has version 2 of the noise law, this evoalign has 1: use an"):
        ledger.read(copy)
    rewrite(copy, [change(good[0], evoalign_ledger="x"), *good[1:]], rechain=True)
    with pytest.raises(LedgerError, match="the run has version 'x' of the format, this evoalign has 1"):
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


@pytest.mark.parametrize("own", [b"my notes", b"my notes\n", b'{"step": 1}\n{"step": 2}\n{"step": 3}\n', b"\xff\n"])
@pytest.mark.parametrize("resume", [None, True])
def test_a_file_of_the_users_own_is_never_overwritten(tmp_path, own, resume):
    (tmp_path / "ledger.jsonl").write_bytes(own)
    with pytest.raises(LedgerError, match=r"is there and is no ledger of a run: use another|lost its first line|is no"):
        trainer(tmp_path, counted := Counted()).train(resume)
    assert (tmp_path / "ledger.jsonl").read_bytes() == own and counted.calls == 0


def test_a_folder_that_cannot_be_used_is_found_before_any_work(tmp_path):
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "file", tmp_path / "file/below", Path("/proc/none/here")):
        with pytest.raises(OSError, match=r"nothing can be written to this output_dir \(.*\): name another one"):
            trainer(folder, counted := Counted()).train()
        assert counted.calls == 0
    (tmp_path / "run/ledger.jsonl").mkdir(parents=True)
    with pytest.raises(LedgerError, match=r"ledger\.jsonl is there and is no ledger"):
        trainer(tmp_path / "run", counted).train()
    assert counted.calls == 0


class Counted:
    """Counts the calls of a reward."""

    REWARD_FLOOR = None

    def __init__(self):
        self.calls = 0

    def __call__(self, completion_ids, log_metric, **columns):
        self.calls += 1
        return token_mean(completion_ids, log_metric)


# ---- one run a folder


def test_a_second_run_in_the_folder_is_refused_while_the_first_trains(tmp_path):
    seen = []

    class Other(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                for how in (None, True):
                    with pytest.raises(
                        LedgerError, match="another run trains in .*use another output_dir, or end that"
                    ):
                        trainer(tmp_path / "run", seed=6).train(how)
                    seen.append(how)

    tested = trainer(tmp_path / "run", max_steps=3)
    tested.callback_handler.add_callback(Other())
    tested.train()
    assert seen == [None, True] and ledger.verify(tmp_path / "run/ledger.jsonl", random_model()).ended
    # afterwards the folder is free for a run that goes on
    again = trainer(tmp_path / "run", max_steps=4)
    again.train(resume_from_checkpoint=True)
    # and the first notices that it went on elsewhere, before it evaluates anything
    tested.args.max_steps = 5
    tested.rewards.functions[0] = counted = Counted()
    with pytest.raises(LedgerError, match="another process writes to it, or it was edited"):
        tested.train()
    assert counted.calls == 0


def test_a_killed_run_leaves_no_lock(tmp_path):
    """Nor do its forked workers, which live on for a moment."""

    def die(trainer_state, **columns):
        if trainer_state.global_step == 1:
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(0.4)
        return [float(len(c)) for c in columns["completions"]]

    assert in_child(lambda: trainer(tmp_path / "run", die, workers=2).train()) == -signal.SIGKILL
    trainer(tmp_path / "run", lambda completions, **kw: [1.0] * len(completions), max_steps=2).train(True)
    assert len(ledger.read(tmp_path / "run/ledger.jsonl").steps) == 2


def test_a_file_system_without_locks(tmp_path, monkeypatch, caplog):
    def none(fd, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", none)
    trainer(tmp_path / "run", max_steps=1).train()
    assert "this file system has no locks. Let no other run use the folder" in caplog.text


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


@pytest.mark.parametrize(("whole", "more"), [(0, 100), (5, 1), (13, 20)])
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
    base = "--model", run / "base"
    code, text = call(path, "--step", 5, "--out", tmp_path / "five", *base)
    assert code == 0 and "the model after step 5" in text
    for name in ("model.safetensors", "config.json", "chat_template.jinja"):
        assert (tmp_path / "five" / name).read_bytes() == (run / "out/checkpoint-5" / name).read_bytes(), name
    assert AutoTokenizer.from_pretrained(tmp_path / "five")("a<think>")["input_ids"]
    code, text = call(path, "--out", tmp_path / "all", *base, "--verify")
    assert code == 0 and "12 steps, chain intact, closed\n3 digests of weights, all computed again, equal" in text
    assert f"the model after step 12, weights {ledger.read(path).weights[12]}" in text
    code, text = call(path, "--step", 0, "--out", tmp_path / "none", *base)
    assert (tmp_path / "none/model.safetensors").read_bytes() == (run / "base/model.safetensors").read_bytes()


def test_the_command_says_what_is_wrong(run, tmp_path):
    path = run / "out/ledger.jsonl"
    assert call(path)[0] == 2 and "--out FOLDER, --verify, or both" in call(path)[1]
    for arguments, message in [
        ((path, "--out", run), "exists: give a new folder"),
        ((path, "--out", tmp_path / "x", "--model", run / "base", "--step", 99), "step 99 is not in"),
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
    for arguments in (["--verify"], ["--out", tmp_path / "out"]):
        code, text = call(path, *arguments)
        assert code == 1 and "has no name of the model that the run started from: give its folder or name" in text
        assert "chain intact" not in text
    random_model().save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    code, text = call(path, "--verify", "--model", tmp_path / "base")
    assert code == 0 and "1 steps, chain intact, closed\n2 digests of weights, all computed again, equal" in text


def test_a_ledger_does_not_choose_what_is_loaded(run, copy, tmp_path):
    """Its model is a name that anybody may have written: a folder with code beside it, say."""
    evil, mark = tmp_path / "evil", tmp_path / "ran"
    shutil.copytree(run / "base", evil)
    (evil / "code.py").write_text(f"open({str(mark)!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    own = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    config = json.loads((evil / "config.json").read_text()) | {"model_type": "evil", "auto_map": own}
    (evil / "config.json").write_text(json.dumps(config))
    good = lines(copy)
    for name in (str(evil), "someone/model", "\x1b[2J", "x" * 10**5):
        model = json.loads(good[0])["model"] | {"name": name}
        rewrite(copy, [change(good[0], model=model), *good[1:]], rechain=True)
        for arguments in (["--verify"], ["--out", tmp_path / "out"]):
            result = CliRunner().invoke(app, ["replay", str(copy), *map(str, arguments)], input="y\n" * 9)
            assert result.exit_code == 1 and "is no shipped base: give the folder or name of that" in result.output
            assert len(result.output) < 1000 and "\x1b" not in result.output
    # code is not run for who names the folder, either
    result = CliRunner().invoke(app, ["replay", str(copy), "--verify", "--model", str(evil)], input="y\n" * 9)
    assert result.exit_code == 1 and "is neither a folder with a model nor could it be loaded" in result.output
    assert not mark.exists()


def test_a_half_precision_model_is_replayed_in_its_dtype(run, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(run / "base", dtype=torch.bfloat16)
    tested = trainer(tmp_path / "run", model=model, max_steps=2)
    tested.train()
    tested.save_model(tmp_path / "live")
    code, _ = call(tmp_path / "run/ledger.jsonl", "--out", tmp_path / "replayed", "--model", run / "base")
    assert code == 0
    live, replayed = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("live", "replayed"))
    assert live == replayed
