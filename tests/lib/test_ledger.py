"""The ledger: exact rewards, a chain that finds every damage, replay, and what is refused."""

import base64
import errno
import fcntl
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
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from es_runs import Lagrangian, digest, never, read, trained, trainer
from helpers import chained, in_child, random_model, saved, typed
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from evoalign_lib import ledger, noise
from evoalign_lib.cli import app
from evoalign_lib.ledger import Ledger, LedgerError, Step
from evoalign_lib.rewards import RewardError


def token_mean(completion_ids, log_metric, **columns):
    log_metric("first", float(np.mean([ids[0] for ids in completion_ids])))
    return [sum(ids) / 4 for ids in completion_ids]


SETTINGS = {"population_size": 4, "max_steps": 12, "max_completion_length": 3}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A folder with a base, a finished run of 12 steps, and one with a stateful reward; nothing may change it."""
    folder = tmp_path_factory.mktemp("run")
    model = AutoModelForCausalLM.from_pretrained(saved(folder / "base"))
    trained(folder / "out", token_mean, model, save_strategy="steps", save_steps=5, **SETTINGS)
    trained(folder / "adaptive", Lagrangian(), **SETTINGS | {"max_steps": 4})  # without a name of its model
    return folder


@pytest.fixture
def copy(run, tmp_path) -> Path:
    """A copy of the run's ledger, to be damaged."""
    return shutil.copy(run / "out/ledger.jsonl", tmp_path / "copy.jsonl")


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines()


def forge(path: Path, number: int, **values) -> None:
    """Change entries of a line of a ledger, with a chain that fits."""
    changed = [json.loads(line) for line in lines(path)]
    changed[number - 1] |= values
    path.write_bytes(chained(changed))


# ---- rewards, exactly

FINITE = st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=True, width=64)


@given(st.lists(FINITE, min_size=2, max_size=40).map(np.array), st.integers(1, 5000))
def test_any_rewards_come_back_with_their_bits(rewards, prompts):
    line = json.loads(json.dumps(ledger.encode_rewards(rewards, prompts)))
    assert ledger.decode_rewards(line).tobytes() == rewards.tobytes()
    assert len(line["rewards"]) <= 4 * math.ceil(8 * len(rewards) / 3)


def test_the_two_forms_by_hand():
    third = 1 / 3
    line = ledger.encode_rewards(np.array([0.25, math.nextafter(0.25, 1), -math.nextafter(third, 0), 0.0]), 12)
    assert line == {"of": 12, "rewards": "3 3+1 -4-1 0"}
    assert ledger.encode_rewards(np.array([0.5, 12.34]), 1) == {"of": 100, "rewards": "50 1234"}
    irrational = np.array([math.pi, -0.0])
    assert ledger.encode_rewards(irrational, 1) == {"rewards": base64.b64encode(irrational.tobytes()).decode()}


@given(
    st.dictionaries(
        st.text("ab#.01", min_size=1, max_size=7) | st.builds("h.{}.w".format, st.integers(0, 12)),
        st.lists(st.integers(0, 3), max_size=2).map(tuple),
    )
)
def test_shapes_come_back(shapes):
    packed = json.loads(json.dumps(ledger.pack_shapes(shapes.items())))
    assert {name: tuple(shape) for name, shape in ledger.unpack_shapes(packed)} == shapes


# ---- what the file holds


def test_the_file_line_by_line(run):
    header, *steps, end = map(json.loads, lines(run / "out/ledger.jsonl"))
    assert (header["evoalign_ledger"], header["noise"], header["digest_every"]) == (4, 1, 10)
    assert header["run_key"] == hex(noise.run_key("es", 5))
    assert header["settings"] == trainer(run / "new", token_mean, **SETTINGS)._settings()
    assert header["model"]["digest"] == digest(trainer(run / "new")) and "reward_state" not in header["settings"]
    assert header["model"]["name"] == str(run / "base") and header["model"]["dtype"] == "float32"
    last = b""  # every line ends with the hash of itself and of the hash before
    for line in lines(run / "out/ledger.jsonl"):
        text, found = line.split(b',"hash":')
        last = hashlib.sha256(last + text).hexdigest()[:32].encode()
        assert found == b'"' + last + b'"}'
    assert [step["step"] for step in steps] == list(range(12))
    assert [i for i, step in enumerate(steps) if "weights" in step] == [10]
    assert [i for i, step in enumerate(steps) if "names" in step] == [0]
    assert steps[0]["names"] == ["first", "completions/clipped_ratio", "rewards/token_mean/mean"]
    assert list(end) == ["end", "weights", "hash"] and end["end"] == 12 and not any("reward_state" in s for s in steps)


def test_metrics_that_come_and_go_and_are_no_numbers(tmp_path):
    def reward(completions, trainer_state, log_metric, **columns):
        if trainer_state.global_step != 1:
            log_metric("a", math.nan if trainer_state.global_step else math.inf)
        return [float(len(c)) for c in completions]

    tested = trained(tmp_path, reward, max_steps=3)
    logs = [step.log for step in read(tmp_path).steps]
    assert [list(log) for log in logs] == [list(step.log) for step in tested.ledger.steps]
    assert logs[0]["a"] == math.inf and "a" not in logs[1] and math.isnan(logs[2]["a"])
    for line in lines(tmp_path / ledger.NAME):  # no NaN or Infinity, which are not JSON
        json.loads(line, parse_constant=lambda name: pytest.fail(name))


# ---- what is refused


def step(i: int, rewards=(1.0, 2.0, 3.0, 4.0)) -> Step:
    return Step(i, np.array(rewards))


def test_appending_what_is_wrong(copy):
    log, before = Ledger.open(copy), copy.read_bytes()
    for wrong, named in [
        (step(11), "step 11 .* 12"),
        (step(13), "step 13"),
        (step(12, [1.0] * 5), r"\(5,\), .* N = 4"),
        (step(12, [1.0, math.nan, 0, 0]), "member 1 of step 12 has the reward nan"),
        (step(12, [1.0, 1, 1, -math.inf]), "member 3 of step 12 has the reward -inf"),
    ]:
        with pytest.raises(LedgerError, match=named):
            log.append(wrong)
    assert copy.read_bytes() == before
    log.append(step(12))
    assert [s.step for s in ledger.read(copy).steps] == list(range(13))


DAMAGED = [b"", b"{", b"\x00" * 40, b"\xff\xfe", b"[" * 5000, b"9" * 5000, b"[]", b"3", b"null", b"{}", b'{"prev":[]}']


def test_damaged_edited_missing_and_swapped_lines(copy):
    good = lines(copy)
    edited = [re.sub(rb'(?<="rewards":")\d', lambda m: b"%d" % ((int(m[0]) + 1) % 10), line) for line in good]
    cases = [([*good[:i], edited[i], *good[i + 1 :]], i + 1) for i in range(1, 13)]
    cases += [([*good[:5], bad, *good[6:]], 6) for bad in DAMAGED]
    cases += [(good[:4] + good[5:], 5), (good[:4] + good[3:], 5), (good[:1] + good[2:], 2)]
    cases += [([*good[:4], good[5], good[4], *good[6:]], 5)]
    for changed, number in cases:
        copy.write_bytes(b"\n".join(changed) + b"\n")
        with pytest.raises(LedgerError, match=f"line {number}"):
            ledger.read(copy)
    # a forger's chain does not help
    for changed, named in (
        ([*good[:4], good[5], good[4], *good[6:]], "line 5: step 4 .* 3"),
        ([*good[:4], *good[-1:]], "line 5: .* 12 steps, but 3"),
    ):
        copy.write_bytes(chained(map(json.loads, changed)))
        with pytest.raises(LedgerError, match=named):
            ledger.read(copy)


@given(st.data())
def test_a_hostile_line_is_a_ledger_error(tmp_path_factory, run, data):
    values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just([]) | st.just({})
    changed = [json.loads(line) for line in lines(run / "out/ledger.jsonl")]
    i = data.draw(st.integers(0, 12))
    where = changed[i] if i else data.draw(st.sampled_from([changed[0], changed[0]["settings"], changed[0]["model"]]))
    where[data.draw(st.sampled_from(sorted(where.keys() - {"hash"})))] = data.draw(values)
    path = tmp_path_factory.mktemp("hostile") / "ledger.jsonl"
    path.write_bytes(chained(changed))
    try:
        assert len(ledger.read(path).steps) == 12
    except LedgerError as error:
        assert f"line {i + 1}" in str(error)


STATES = [None, 3, [], {"Lagrangian": 1.0}, {"Lagrangian": [0.5]}]
STATES += [{"Lagrangian": {"log_lambda": x}} for x in ("1", True, None, 10**400, math.inf, math.nan, {})]
REWARDS = [
    {"rewards": "AAAA"}, {"rewards": "no base 64!"}, {"rewards": 3}, {"rewards": None}, {"rewards": "1 2", "of": 0},
    {"rewards": "1 2", "of": 1.5}, {"rewards": "1  2", "of": 4}, {"rewards": "", "of": 4},
    {"rewards": "1 two", "of": 4}, {"rewards": "1 1_0", "of": 4}, {"rewards": "1 ٣", "of": 4},
    {"rewards": "1\n2", "of": 4}, {"rewards": "1 2+10", "of": 4}, {"rewards": "1 2", "of": 2**60},
]  # fmt: skip
SPENT = [{"tokens": -5}, {"tokens": 3.0}, {"seconds": -1.0}, {"core": "nan"}, {"counts": {"nan": -1}}, {"step": 1.0}]
HOSTILE = {
    "run_key": ["0x1", "-0x123456789abcdef", "0x" + "f" * 17, 10**400, None],
    "digest_every": [0, 2.5, math.inf, 10**4000], "noise": [2, "1"], "evoalign_ledger": ["x", 2, 3, 7],
    "settings": [None, [], "x"], "model": [None, [], "x"],
}  # fmt: skip
HOSTILE_SETTINGS = {
    "alpha": [math.inf, math.nan, 10**400, -1, 0, True, "1"], "sigma": [math.inf, 10**4000, [], None, 5e-324],
    "population_size": [10**400, 8_000_000, 1, 4.0, True, math.inf], "prompts_per_step": [2**60, 0, "3"],
    "noise": [[], {}, 1, "rademacher"], "precision": [None, ["master"]], "anchor_decay": [math.inf, 10**400, "x", 1],
    "antithetic": ["yes"], "fitness_shaping": ["z"], "alpha_schedule": ["step"], "num_generations": [0],
    "perturb": ["x"],
    "rank": [-1, 2**16], "update_scaling": ["x"], "frozen": ["0" * 63], "search": ["x"], "reward_state": STATES[1:],
}  # fmt: skip
HOSTILE_MODEL = {
    "name": [3, ["A0"], {}], "dtype": ["float64", "float8_e4m3fn", "device", None], "digest": ["0" * 63, 7, None],
    "parameters": [
        None, {}, "x", [3], [[]], [["w"]], [["w", 3]], [[3, [1]]], [["w", [1], 1, 1]], [["w", [-1]]], [["w", [1.5]]],
        [["w", [10**400]]], [["w", [1] * 100]], [["w", ["1"]]], [["w", [1], 0]], [["w.#", [1], 10**12]],
        [["w" * 10**6, [1], 10**4]], [[f"w{i}.#", [1], 150_000] for i in range(2)],
    ],
}  # fmt: skip


PLACES = {"header": HOSTILE, "settings": HOSTILE_SETTINGS, "model": HOSTILE_MODEL}


@pytest.mark.parametrize("where", PLACES)
def test_a_hostile_header_is_refused_before_anything_is_made_by_it(copy, where):
    good, model = [json.loads(line) for line in lines(copy)], random_model()
    tracemalloc.start()
    for name, value in ((name, value) for name, bad in PLACES[where].items() for value in bad):
        header = json.loads(json.dumps(good[0]))
        header.get(where, header)[name] = value
        copy.write_bytes(chained([header, *good[1:]]))
        tracemalloc.reset_peak()
        with pytest.raises(LedgerError, match=r"copy\.jsonl, line 1") as error:
            ledger.verify(copy, model)
        assert len(str(error.value)) < 1000 and tracemalloc.get_traced_memory()[1] < 50_000_000, name
    tracemalloc.stop()


BAD = [*({"of": None} | bad for bad in REWARDS), *({"reward_state": bad} for bad in STATES), *SPENT]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: f"{bad!s:.60}")
def test_what_is_no_list_of_rewards_and_no_state_and_what_no_step_can_have_spent(run, tmp_path, bad):
    path = shutil.copy(run / "adaptive/ledger.jsonl", tmp_path / "copy.jsonl")
    forge(path, 3, **bad)
    with pytest.raises(LedgerError, match="line 3"):
        ledger.read(path)


NO_LEDGER = [None, b"", b'{"evoalign_ledger":4,"noise"', b'{"some": "json"}\n', b'{"step":0}\n{"step":1}\n']


@pytest.mark.parametrize("text", NO_LEDGER)
def test_no_ledger(tmp_path, text):
    if text is not None:
        (tmp_path / "ledger.jsonl").write_bytes(text)
    with pytest.raises(LedgerError, match=r"ledger\.jsonl"):
        ledger.read(tmp_path / "ledger.jsonl")


def test_a_ledger_cut_at_any_byte(copy, tmp_path):
    data = copy.read_bytes()
    ends = [m.end() for m in re.finditer(b"\n", data)]
    path = tmp_path / "cut.jsonl"
    for at in [*range(0, len(data), 29), *(end + i for end in ends for i in (-2, -1, 0, 1))]:
        path.write_bytes(data[:at])
        whole = [end for end in ends if end <= at]
        if not whole:
            with pytest.raises(LedgerError, match="has no header"):
                Ledger.open(path)
            continue
        log = Ledger.open(path)
        assert len(log.steps) == min(12, len(whole) - 1) and log.ended == (len(whole) == 14)
        assert log.torn == data[whole[-1] : at] and path.read_bytes() == data[: whole[-1]]
        log.append(step(len(log.steps)))
        assert len(ledger.read(path).steps) == min(12, len(whole) - 1) + 1


# ---- a new run does not destroy an old one


def test_a_run_that_failed_in_its_first_step_leaves_nothing_in_the_way(tmp_path):
    def fails(**columns):
        raise KeyError("answer")

    path = tmp_path / ledger.NAME
    with pytest.raises(RewardError, match="KeyError"):
        trained(tmp_path, fails)
    assert not path.exists()
    for torn in (b"", b'{"evoalign_le', b'{"evoalign_ledger":1}\n'):
        path.write_bytes(torn)
        trained(tmp_path, max_steps=1)
        assert len(read(tmp_path).steps) == 1
        path.unlink()


@pytest.mark.parametrize("own", [b"my notes", b"my notes\n", b'{"step": 1}\n{"step": 2}\n{"step": 3}\n', b"\xff\n"])
@pytest.mark.parametrize("resume", [None, True])
def test_a_file_of_the_users_own_is_never_overwritten(tmp_path, own, resume):
    (tmp_path / ledger.NAME).write_bytes(own)
    with pytest.raises(LedgerError, match=ledger.NAME):
        trained(tmp_path, never, resume=resume)
    assert (tmp_path / ledger.NAME).read_bytes() == own


def test_a_folder_that_cannot_be_used_is_found_before_any_work(tmp_path):
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "run" / ledger.NAME).mkdir(parents=True)
    for folder in (tmp_path / "file", tmp_path / "file/below", Path("/proc/none/here")):
        with pytest.raises(OSError, match="output_dir"):
            trained(folder, never)
    with pytest.raises(LedgerError, match="is no ledger"):
        trained(tmp_path / "run", never)


# ---- one run a folder


def test_a_second_run_in_the_folder_is_refused_while_the_first_trains(tmp_path):
    seen = []

    class Other(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            for how in (None, True) if state.global_step == 2 else ():
                with pytest.raises(LedgerError, match="another run trains in"):
                    trained(tmp_path, seed=6, resume=how)
                seen.append(how)

    tested = trained(tmp_path, callbacks=[Other()], max_steps=3)
    assert seen == [None, True] and ledger.verify(tmp_path / ledger.NAME, random_model()).ended
    trained(tmp_path, resume=True)  # afterwards the folder is free for a run that goes on
    # and the first notices that it went on elsewhere, before it evaluates anything
    tested.args.max_steps = 5
    tested.rewards.functions[0] = never
    with pytest.raises(LedgerError, match="another process writes to it, or it was edited"):
        tested.train()


def test_a_killed_run_leaves_no_lock(tmp_path):
    """Nor do its forked workers, which live on for a moment."""

    def die(trainer_state, completions, **columns):
        if trainer_state.global_step == 1:
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(0.4)
        return [float(len(c)) for c in completions]

    assert in_child(lambda: trained(tmp_path, die, workers=2)) == -signal.SIGKILL
    trained(tmp_path, lambda completions, **kw: [1.0] * len(completions), max_steps=2, resume=True)
    assert len(read(tmp_path).steps) == 2


def test_a_file_system_without_locks(tmp_path, monkeypatch, caplog):
    def none(fd, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", none)
    trained(tmp_path, max_steps=1)
    assert "has no locks" in caplog.text


def test_weights_that_moved_outside_train_are_noticed(tmp_path):
    tested = trained(tmp_path, max_steps=2)
    tested.args.max_steps = 4
    tested.train()  # goes on
    tested.step()
    tested.args.max_steps = 6
    with pytest.raises(RuntimeError, match="not those after step 4"):
        tested.train()
    assert ledger.verify(tmp_path / ledger.NAME, random_model()).recomputed


def test_rewards_without_coefficients_are_not_recorded(tmp_path):
    def huge(number, completions, **columns):
        return [1e300 * len(completions[0])]  # the square in the deviation overflows

    with pytest.raises(ValueError, match="scale the rewards down"):
        trained(tmp_path, huge, prompts_per_step=1)
    assert not (tmp_path / ledger.NAME).exists()


@pytest.mark.parametrize(("whole", "more"), [(0, 100), (5, 1), (13, 20)])
def test_a_full_disk_stops_the_run_and_loses_nothing(run, tmp_path, whole, more):
    """Room for some whole lines and a part of one; then for all of them."""
    path, written = tmp_path / ledger.NAME, lines(run / "out/ledger.jsonl")
    room = sum(len(line) + 1 for line in written[:whole]) + more

    def until_full():
        tested = trainer(tmp_path, token_mean, **SETTINGS)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        with pytest.raises(OSError, match=r"could not be recorded \(File too large\)") as error:
            tested.train()
        assert error.value.filename == str(path)
        # times and names are part of a line, so that this run's lines may be longer or shorter than those measured
        kept = path.read_bytes().count(b"\n") if path.exists() else 0
        assert abs(kept - whole) <= 1 and tested.state.global_step == max(0, kept - 1)
        assert ledger.recorded(path) == (kept > 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        tested.train()  # once there is room, the same trainer goes on

    assert in_child(until_full) == 0
    assert read(tmp_path).ended and read(tmp_path).weights == read(run / "out").weights


# ---- replay


def test_the_wrong_model_or_step(run, copy):
    for model, named in [
        (random_model(seed=9), "not the weights that the run started from"),
        (random_model(intermediate_size=40), "'model.layers.0.mlp.down_proj.weight'"),
        (random_model(tie_word_embeddings=False), "'lm_head.weight'.* None"),
    ]:
        with pytest.raises(LedgerError, match=named):
            ledger.replay(copy, model)
    for wrong in (13, -1):
        with pytest.raises(LedgerError, match=f"step {wrong} .* 12"):
            ledger.replay(copy, random_model(), wrong)


def test_verify(run, copy):
    found, weights = ledger.verify(copy, random_model()), ledger.read(copy).weights
    assert (found.steps, found.digests, found.torn, found.recomputed) == (12, 3, 0, True)
    assert found.ended and found.weights == weights[12]
    assert json.loads((run / "out/checkpoint-10/es_state.json").read_text())["weights"] == weights[10]
    copy.write_bytes(copy.read_bytes()[:-30])
    found = ledger.verify(copy, random_model())
    assert (found.steps, found.digests, found.ended) == (12, 2, False)
    assert found.torn > 50
    assert found.weights == weights[12] and ledger.verify(copy).weights is None


# ---- the command


call = partial(typed, app, "replay")


def test_the_command_writes_the_folder_of_any_step(run, tmp_path):
    path, base = run / "out/ledger.jsonl", ("--model", run / "base")
    code, text = call(path, "--step", 5, "--out", tmp_path / "five", *base)
    assert code == 0 and "step 5" in text
    for name in ("model.safetensors", "config.json", "chat_template.jinja"):
        assert (tmp_path / "five" / name).read_bytes() == (run / "out/checkpoint-5" / name).read_bytes(), name
    assert AutoTokenizer.from_pretrained(tmp_path / "five")("a<think>")["input_ids"]
    code, text = call(path, "--out", tmp_path / "all", *base, "--verify")
    assert code == 0 and "12 steps, chain intact, closed\n3 digests of weights, all computed again, equal" in text
    assert f"weights {read(run / 'out').weights[12]}" in text
    call(path, "--step", 0, "--out", tmp_path / "none", *base)
    assert (tmp_path / "none/model.safetensors").read_bytes() == (run / "base/model.safetensors").read_bytes()


def test_the_command_says_what_is_wrong(run, tmp_path):
    path, unnamed = run / "out/ledger.jsonl", run / "adaptive/ledger.jsonl"
    assert call(path)[0] == 2
    for arguments, named in [
        ((path, "--out", run), "exists"),
        ((path, "--verify", "--model", "no-such-model"), "'no-such-model'"),
        ((unnamed, "--verify"), "--model"),
        ((unnamed, "--out", tmp_path / "x"), "--model"),
    ]:
        code, text = call(*arguments)
        assert code == 1 and named in text
    assert not (tmp_path / "x").exists()
    assert call(unnamed, "--verify", "--model", run / "base")[0] == 0


def test_a_ledger_does_not_choose_what_is_loaded(run, copy, tmp_path):
    """Its model is a name that anybody may have written: a folder with code beside it, say."""
    evil, mark = tmp_path / "evil", tmp_path / "ran"
    shutil.copytree(run / "base", evil)
    (evil / "code.py").write_text(f"open({str(mark)!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    own = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    config = json.loads((evil / "config.json").read_text()) | {"model_type": "evil", "auto_map": own}
    (evil / "config.json").write_text(json.dumps(config))
    model = json.loads(lines(copy)[0])["model"]
    for name in (str(evil), "someone/model", "\x1b[2J", "x" * 10**5):
        forge(copy, 1, model=model | {"name": name})
        for arguments in (["--verify"], ["--out", tmp_path / "out"]):
            code, text = call(copy, *arguments)
            assert code == 1 and "no shipped base" in text and "\x1b" not in text and len(text) < 1500
    # code is not run for who names the folder, either
    code, text = call(copy, "--verify", "--model", evil)
    assert code == 1 and str(evil) in text and not mark.exists()
