"""ESConfig and ESTrainer: what they refuse, what a step does, and the surface of a Hugging Face trainer."""

import copy
import dataclasses
import json
import math
import pickle
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from es_runs import ROWS, config, constant, digest, model_bytes, never, read, token_sum, trained, trainer
from helpers import PROMPTS, fails_later, lora, ran, random_model, refused, saved, tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import PreTokenizer
from transformers import HfArgumentParser, TrainerCallback
from transformers.trainer_callback import ExportableState

from evoalign_lib import cli, ledger, models
from evoalign_lib.es import ESConfig, ESTrainer, step_indices
from evoalign_lib.rewards import RewardError

# ---- ESConfig

BAD_VALUES = {
    "population_size": [1, 2.5, True, None], "sigma": [0, -1e-3, math.nan, "1e-3", True], "alpha": [0.0, None],
    "anchor_decay": [-0.1, 1, 1 - 1e-9, math.nan, "0.1", True],  # the third is 1 in float32
    "sigma_final_fraction": [0.0, 0.5],  # of a schedule, which is not set
    "num_generations": [0, 2],  # greedy completions are all alike
    "temperature": [0, math.inf, 0.5],  # greedy decoding has none
    "top_p": [1.5], "stop_strings": ["END", [""]], "weight_decay": [0.01], "lr_scheduler_type": ["cosine"],
    "top_k": [-1, 0.5], "num_generations_eval": [0], "rank": [4, 0], "gpus": [-1], "tensor_parallel": [2],
    "learning_rate": [1e-6], "optim": ["sgd"], "bf16": [True], "push_to_hub": [True], "eval_on_start": [True],
    "load_best_model_at_end": [True], "save_strategy": ["best"], "engine_kwargs": [{"max_loras": 2}],
    "generation_kwargs": [3, {"max_new_tokens": 3}, {"bad_words_ids": {3}}, {"min_p": 0.1}, {"repetition_penlty": 2.0}],
    "model_init_kwargs": ["dtype=bfloat16", 3, "[1]"], "chat_template_kwargs": ["enable_thinking=false", " {}"],
    **{name: [0, True] for name in ("prompts_per_step", "max_completion_length", "chunk_rows", "workers")},
    "fitness": ["rewards"], "decoder": ["generat"], "fitness_shaping": ["zscor"], "sigma_schedule": ["cosin"],
    "sampling": ["comon"], "noise": ["gaussan"], "precision": ["mster"], "perturbation": ["lowrank"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD_VALUES.items() for value in values])
def test_bad_values_are_named(name, value):
    word = next(iter(value)) if isinstance(value, dict) else repr(value)
    with pytest.raises(ValueError, match=f"{name}(=|: ?| needs).*{re.escape(word)}|{name} needs"):
        ESConfig(**{name: value})


def test_what_two_settings_say_together():
    with pytest.raises(ValueError, match="anchor_decay=0.1 .*precision='kahan'"):
        ESConfig(anchor_decay=0.1, precision="kahan")
    with pytest.raises(ValueError, match="population_size=5 .*antithetic"):
        ESConfig(antithetic=True, population_size=5)
    with pytest.raises(ValueError, match="gpus=3 is not a multiple of tensor_parallel=2"):
        ESConfig(engine="vllm", gpus=3, tensor_parallel=2)
    assert ESConfig(perturbation="low_rank", rank=3).rank == 3
    for settings, arm in (({"fitness": "random"}, "es_random"), ({"fitness": "shuffled", "arm": "null"}, "null")):
        assert ESConfig(**settings).arm == arm  # null arms draw other noise


def test_all_that_is_wrong_is_said_at_once():
    wrong = {"learning_rate": 1e-6, "bf16": True, "sigma": 0, "decoder": "generat", "num_generations": 2}
    with pytest.raises(ValueError, match="5 settings") as caught:
        ESConfig(**wrong)
    assert all(f"- {name}={value!r}" in str(caught.value) for name, value in wrong.items())
    with pytest.raises(TypeError, match="4 settings") as caught:
        ESConfig(beta=0.1, use_vllm=True, optim="sgd", sigm=1)
    assert all(word in str(caught.value) for word in ("'beta'", "set engine='vllm'", "optim='sgd'", "mean 'sigma'"))


def test_a_config_can_be_copied():
    config = ESConfig(sigma=0.5, max_steps=3)
    known = {f.name for f in dataclasses.fields(config)}
    written = {name: value for name, value in json.loads(config.to_json_string()).items() if name in known}
    for other in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), ESConfig(**written)):
        assert other.to_dict() == config.to_dict()


NUMPY = {
    "seed": (np.int64(3), 3), "sigma": (np.float32(0.5), 0.5), "alpha": (np.array([0.25]), 0.25),
    "population_size": (np.array(4), 4), "antithetic": (np.bool_(True), True), "max_steps": (np.int32(1), 1),
    "prompts_per_step": (np.int64(2), 2), "save_steps": (np.int64(1), 1), "reward_weights": (np.ones(1), [1.0]),
    "generation_kwargs": ({"repetition_penalty": np.float32(1.5)}, {"repetition_penalty": 1.5}),
}  # fmt: skip


def test_numbers_of_numpy_are_numbers(tmp_path):
    both = [{name: pair[i] for name, pair in NUMPY.items()} | {"save_strategy": "steps"} for i in (0, 1)]
    assert len({config(tmp_path, **given).to_json_string() for given in both}) == 1
    runs = [trained(tmp_path / str(i), **given) for i, given in enumerate(both)]
    assert digest(runs[0]) == digest(runs[1]) and read(tmp_path / "0").header == read(tmp_path / "1").header
    assert trainer(tmp_path / "0", **both[1] | {"max_steps": 2}).train("True").global_step == 2  # goes on with ours


COMMAND = "--output_dir out --sigma 0.01 --population_size 8 --fitness random --workers 2 --reward_weights 1 0.5"


def test_hf_argument_parser():
    parser = HfArgumentParser(ESConfig)
    [c] = parser.parse_args_into_dataclasses([*COMMAND.split(), "--model_init_kwargs", '{"revision": "abc"}'])
    assert (c.sigma, c.population_size, c.fitness, c.workers) == (0.01, 8, "random", 2)
    assert c.reward_weights == [1.0, 0.5] and c.model_init_kwargs == {"revision": "abc"}
    [c] = parser.parse_args_into_dataclasses([])
    assert (c.workers, c.prompts_per_step, c.reward_floor, c.model_init_kwargs) == (None, None, None, None)
    with pytest.raises(ValueError, match="population_size=1"):
        parser.parse_args_into_dataclasses(["--population_size", "1"])


# ---- what the trainer refuses


test_what_the_trainer_refuses = refused(
    ({"rows": []}, "empty"),
    ({"rows": None}, "train_dataset"),
    ({"rows": {"train": ROWS}}, TypeError, r"\['train'\]"),
    ({"eval_dataset": []}, "eval_dataset.*empty"),
    ({"prompts_per_step": 9}, "prompts_per_step=9 .* 8"),
    ({"reward": "some/reward-model"}, "'some/reward-model'"),
    ({"model_init_kwargs": {"revision": "x"}}, "model_init_kwargs"),
    ({"seed": -1}, "seed"),
    ({"eval_strategy": "steps", "eval_steps": 1}, "eval_strategy='steps'"),
    ({"reward": lambda other, **columns: None}, TypeError, "'other'"),
    ({"reward": lambda number, **columns: None, "eval_dataset": {"its": [{"prompt": "a"}]}}, TypeError,
     "eval_dataset 'its'.*'number'"),
    ({"arm": ""}, "arm"),
    *(({"model": name}, f"'{name}'") for name in ("/no/such/folder", "./none", "nobody/no-model")),
    call=lambda how, tmp_path: trainer(tmp_path, **how),
)  # fmt: skip


def test_a_model_without_its_tokenizer(tmp_path):
    for model, named in ((str(tmp_path), str(tmp_path)), (random_model(), "processing_class")):
        with pytest.raises(ValueError, match=named):
            ESTrainer(model, token_sum, config(tmp_path), ROWS)
    with pytest.raises(ValueError, match=r"tokenizer\.eos_token"):
        models.load(random_model(), SimpleNamespace(pad_token_id=None, eos_token_id=None))


def test_a_name_on_the_hub_and_its_revision(tmp_path):
    repository = tmp_path / "hub/models--someone--model"
    (repository / "refs").mkdir(parents=True)
    for i, (revision, seed) in enumerate({"main": 2, "other": 7}.items()):
        (repository / "refs" / revision).write_text(f"{i:040x}")
        folder = repository / f"snapshots/{i:040x}"
        saved(folder, random_model(seed=seed))
        settings = folder / "tokenizer_config.json"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"model_max_length": 100 + seed}))
    for chosen, seed in (({}, 2), ({"revision": "main"}, 2), ({"revision": "other"}, 7)):
        load = {"cache_dir": str(tmp_path / "hub")} | chosen
        tested = ESTrainer("someone/model", token_sum, config(tmp_path, model_init_kwargs=load), ROWS)
        assert model_bytes(tested.model) == model_bytes(random_model(seed=seed))
        assert tested.processing_class.model_max_length == 100 + seed


def none(completions, **columns):
    return [None] * len(completions)


def test_a_member_without_a_reward_is_named(tmp_path):
    with pytest.raises(ValueError, match="member 0 of step 0 has no reward"):
        trainer(tmp_path, none).train()


@pytest.mark.parametrize(
    ("status", "steps", "error"), [(None, 2, RuntimeError), (3, 2, SystemExit), (None, 1, SystemExit)]
)
def test_a_run_that_ends_early_says_so(tmp_path, status, steps, error):
    """sys.exit() ends a process with status 0 and no message, as if the run had finished."""

    class Leaving(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            sys.exit(status)

    with pytest.raises(error):
        trainer(tmp_path, callbacks=[Leaving()], max_steps=steps).train()


def test_failures_of_a_step_are_logged_recorded_and_counted(tmp_path):
    def mixed(completions, number, trainer_state, **columns):
        if len(completions) == 1 and number[0] == 1:
            raise KeyError("no such answer")
        while trainer_state.global_step == 1 and number[0] == 2:
            pass
        if len(completions) > 1:
            raise MemoryError
        return [{3: math.nan, 4: None}.get(number[0], float(len(completions[0])))]

    settings = {"reward_floor": -1.0, "reward_timeout": 1.0, "population_size": 2, "workers": 2, "max_steps": 2}
    tested = trained(tmp_path, mixed, prompts_per_step=None, **settings)
    kinds = ("none", "nan", "exception", "timeout")
    logs = tested.state.log_history
    assert [[log.get(f"rewards/{kind}") for kind in kinds] for log in logs] == [[2, 2, 2, None], [2, 2, 2, 2]]
    assert tested.counts == {"tied": tested.counts["tied"], "none": 4, "nan": 4, "exception": 4, "timeout": 2}
    steps = read(tmp_path).steps
    assert [step.counts for step in steps] == [{"none": 2, "nan": 2, "exception": 2}, dict.fromkeys(kinds, 2)]


@pytest.mark.parametrize("workers", [1, 2])
def test_what_fails_on_every_completion_stops_the_run(tmp_path, workers):
    rewards = [token_sum, fails_later]
    tested = trainer(tmp_path, rewards, reward_floor=0.0, workers=workers, eval_dataset=ROWS[:2])
    with pytest.raises(RewardError, match="'fails_later' gave ZeroDivisionError"):
        tested.train()
    assert len(read(tmp_path).steps) == 1 and tested.evaluate()["eval_rewards/exception"] == 2
    tested.engine.close()


# ---- a step


def test_a_tied_population_moves_nothing_and_is_counted(tmp_path):
    tested = trainer(tmp_path, constant, max_steps=3)
    tested.engine.master[:8] = -0.0  # a zero with a sign would lose it in an update that adds nothing
    before = tested.engine.master.tobytes()
    tested.train()
    assert tested.engine.master.tobytes() == before and tested.counts["tied"] == 3
    assert [log["tied"] for log in tested.state.log_history] == [1.0] * 3
    assert tested.state.log_history[0]["reward_std"] < 1e-15


def constant_from_step_two(completion_ids, trainer_state, **columns):
    return token_sum(completion_ids) if trainer_state.global_step < 2 else [1.0] * len(completion_ids)


def test_a_tied_population_decays_toward_the_start(tmp_path):
    tested, path = trainer(tmp_path, constant_from_step_two, max_steps=6, anchor_decay=0.25), []
    start = tested.engine.master.copy()
    tested.add_callback(
        type("Noted", (TrainerCallback,), {"on_step_end": lambda *_, **__: path.append(tested.engine.master.copy())})
    )
    tested.train()
    assert [log["tied"] for log in tested.state.log_history] == [0, 0, 1, 1, 1, 1] and tested.counts["tied"] == 4
    assert (path[1] != start).mean() > 0.9 and not tested.engine.weights.start.flags.writeable
    for before, after in zip(path[1:], path[2:], strict=False):  # to the bit
        assert after.tobytes() == (before - np.float32(0.25) * (before - start)).tobytes()
    # so does the ledger, whose lines say nothing else than that they were tied
    run = read(tmp_path)
    assert ledger.replay(run, random_model()).tobytes() == path[5].tobytes()
    assert [len(keys) for keys, _ in ledger.updates(run, 6)] == [6, 6, 0, 0, 0, 0]


def test_shuffled_permutes_the_rewards_of_its_own_members(tmp_path):
    # the same noise in both, by an explicit arm
    runs = [trained(tmp_path / f, fitness=f, arm="paired", max_steps=1) for f in ("reward", "shuffled")]
    plain, shuffled = (run.ledger.steps[0].rewards for run in runs)
    assert sorted(plain) == sorted(shuffled) and (plain != shuffled).any()


def test_random_fitness_generates_nothing(tmp_path):
    tested = trainer(tmp_path, never, fitness="random", workers=2, decoder="generate")
    before = tested.engine.master.copy()
    tested.train()
    assert tested.engine._pool is None and (tested.engine.master != before).any() and tested.counts["tied"] == 0
    assert tested.budget["completions"] == tested.budget["generated_tokens"] == tested.budget["prompt_tokens"] == 0
    assert "completions/mean_length" not in tested.state.log_history[0]


@given(
    st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))),
    st.integers(0, 2**32),
    st.integers(0, 5),
)
def test_step_indices_cover_each_epoch_once(sizes, seed, epoch):
    n, per_step = sizes
    first, last = epoch * n // per_step, ((epoch + 1) * n - 1) // per_step
    drawn = np.concatenate([step_indices(n, per_step, seed, step) for step in range(first, last + 1)])
    assert sorted(drawn[epoch * n - first * per_step :][:n]) == list(range(n))


# ---- logs, callbacks, evaluation


def test_what_is_logged(tmp_path):
    def accuracy(completion_ids, log_metric, **columns):
        log_metric("accuracy", 0.25)
        log_metric("reward", -99)  # not ours to overwrite
        return token_sum(completion_ids)

    tested = trained(tmp_path, [accuracy, none], population_size=4)
    logs = tested.state.log_history
    assert {
        "reward", "reward_std", "reward_max", "tied", "rewards/accuracy/mean", "accuracy", "completions/mean_length",
        "completions/clipped_ratio", "num_tokens", "completions", "members_per_second", "step_time", "core_seconds",
        "epoch", "step", "rewards/none",
    } == set(logs[0])  # fmt: skip
    assert all(log["accuracy"] == 0.25 and log["reward"] == log["rewards/accuracy/mean"] > 0 for log in logs)
    assert all(log["reward_max"] >= log["reward"] and log["reward_std"] > 0 for log in logs)
    # 4 members, 3 prompts of 8 a step, 4 tokens at most
    assert [log["completions"] for log in logs] == [12, 24, 36, 48]
    assert [log["epoch"] for log in logs] == [0.375, 0.75, 1.125, 1.5] and [log["step"] for log in logs] == [1, 2, 3, 4]
    tokens = [log["completions/mean_length"] * 12 for log in logs]
    assert tested.budget["generated_tokens"] == pytest.approx(sum(tokens)) and max(tokens) <= 48
    lengths = [len(tokenizer()(p)["input_ids"]) for p in PROMPTS]
    used = np.concatenate([step_indices(8, 3, 5, step) for step in range(4)])
    assert tested.budget["prompt_tokens"] == 4 * sum(lengths[i] for i in used)
    assert logs[-1]["num_tokens"] == tested.budget["generated_tokens"] + tested.budget["prompt_tokens"]
    assert tested.counts["none"] == 48 and [log["rewards/none"] for log in logs] == [12] * 4


def test_logging_steps_and_epochs(tmp_path):
    tested = trained(tmp_path / "a", max_steps=-1, num_train_epochs=2, logging_steps=4)
    assert tested.state.global_step == tested.state.max_steps == 6
    assert [log["step"] for log in tested.state.log_history] == [4]
    strategies = dict.fromkeys(("logging_strategy", "save_strategy", "eval_strategy"), "epoch")
    by_epoch = trained(tmp_path / "b", max_steps=5, prompts_per_step=4, eval_dataset=ROWS[:2], **strategies)
    for metric in ("reward", "eval_reward"):
        assert [log["step"] for log in by_epoch.state.log_history if metric in log] == [2, 4]
    assert checkpoints(tmp_path / "b") == ["checkpoint-2", "checkpoint-4"]


class Noted(TrainerCallback):
    """Writes down which events came, in which order, and with which weights in the model."""

    def __init__(self):
        self.events, self.models = [], []

    def _event(name):
        def note(self, args, state, control, model=None, **kwargs):
            self.events.append(f"{name} {state.global_step}")
            self.models.append(model_bytes(model))

        return note

    on_train_begin, on_train_end = _event("train_begin"), _event("train_end")
    on_epoch_begin, on_epoch_end = _event("epoch_begin"), _event("epoch_end")
    on_step_begin, on_step_end = _event("step_begin"), _event("step_end")
    on_log, on_evaluate, on_save = _event("log"), _event("evaluate"), _event("save")


EVENTS = "train_begin 0, epoch_begin 0, step_begin 0, step_end 1, log 1, step_begin 1, step_end 2, epoch_end 2, log 2, "
EVENTS += "log 2, evaluate 2, save 2, train_end 2"


@pytest.mark.parametrize("decoder", ["loop", "generate"])
def test_callbacks_come_in_order_and_find_the_current_weights(tmp_path, decoder):
    noted, settings = Noted(), {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    settings |= {"prompts_per_step": 4, "decoder": decoder, "max_steps": 2, "eval_dataset": ROWS[:2]}
    tested = trained(tmp_path, callbacks=[noted], **settings)
    assert noted.events == EVENTS.split(", ")
    models = noted.models
    assert models[0] == models[2] == model_bytes(random_model()) != models[3]
    assert models[3] == models[4] == models[5] != models[6]
    assert set(models[6:]) == {model_bytes(tested.model)}


def test_no_secret_is_written(tmp_path, monkeypatch, caplog):
    """A planted token is in no file of a run, nor in its log."""
    secret = "hf_plantedtoken"
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    given = {"token": secret, "revision": "main", "proxies": {"https": f"http://user:{secret}@proxy"}}
    settings = {"report_to": "tensorboard", "save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    args = config(tmp_path / "run", model_init_kwargs=given, hub_token=secret, **settings)
    tested = ESTrainer(saved(tmp_path / "base"), token_sum, args, ROWS)
    tested.train()
    tested.save_model()
    assert tested.args.model_init_kwargs == given  # which loads with it
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 10 and any("tfevents" in path.name for path in files)
    assert [path for path in files if secret.encode() in path.read_bytes()] == []
    shown = [str(args), repr(args), args.to_json_string(), str(args.to_sanitized_dict()), caplog.text]
    assert not any(secret in text for text in shown) and "<TOKEN>" in shown[0] and "'revision': 'main'" in shown[0]
    served = ESConfig(engine="vllm", engine_kwargs={"hf_token": secret, "max_model_len": 8})
    assert served.to_dict()["engine_kwargs"] == {"hf_token": "<HF_TOKEN>", "max_model_len": 8}


# ---- folders and checkpoints

SAVING = {"save_strategy": "steps", "save_steps": 1}


def checkpoints(folder: Path) -> list[str]:
    return sorted({p.name for p in folder.iterdir()} - {"ledger.jsonl", ".ledger.jsonl.lock"})


def test_the_saved_model_and_a_checkpoint_are_the_master(tmp_path):
    tested = trained(tmp_path, max_steps=1, **SAVING)
    tested.save_model(tmp_path / "out")
    # a folder is a model for the next run, with its own tokenizer
    for folder in ("out", "checkpoint-1"):
        again = ESTrainer(str(tmp_path / folder), token_sum, config(tmp_path / "again"), ROWS)
        assert digest(again) == digest(tested) and (again.train_prompts.ids == tested.train_prompts.ids).all()
    state = json.loads((tmp_path / "checkpoint-1/es_state.json").read_text())
    assert state["budget"] == tested.budget and state["settings"]["sigma"] == 0.05
    # as it was at the save, at which the log of the step had been written
    assert json.loads((tmp_path / "checkpoint-1/trainer_state.json").read_text())["log_history"]


def test_nothing_that_a_run_has_keeps_it_from_being_saved(tmp_path):
    """Numbers of NumPy in its log, and a generation_config that transformers reads and does not write."""
    config_file = Path(saved(tmp_path / "base"), "generation_config.json")
    config_file.write_text('{"temperature": 0.6, "do_sample": false}')
    tested = ESTrainer(str(tmp_path / "base"), token_sum, config(tmp_path / "run", max_steps=1, **SAVING), ROWS)
    tested.log({"a": np.float32(0.5), "b": torch.tensor([1, 2]), "c": Path("x")})
    tested.train("False")
    tested.save_model()
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="`evoalign .*/file") as caught:
        tested.save_model(tmp_path / "file" / "model")
    command = re.search("`evoalign (.*?)`", str(caught.value))[1].replace("FOLDER", str(tmp_path / "out"))
    cli.app(command.split(), standalone_mode=False)
    assert model_bytes(models.load(str(tmp_path / "out"))[0]) == model_bytes(tested.model)
    for folder in ("run", "run/checkpoint-1", "out"):
        assert json.loads((tmp_path / folder / config_file.name).read_text())["temperature"] == 0.6
    state = json.loads((tmp_path / "run/checkpoint-1/trainer_state.json").read_text())
    assert state["log_history"][0].items() >= {"a": 0.5, "b": [1, 2], "c": "x"}.items()


class Unsaved(TrainerCallback, ExportableState):
    def state(self):
        return {"args": {}, "attributes": {"seen": {1}}}


@pytest.mark.parametrize("part", ["Qwen2Config", "Tokenizer", "Unsaved", "LoraConfig"])
def test_what_cannot_be_saved_is_refused_before_the_first_step(tmp_path, part):
    tested = trainer(tmp_path, never, rest={"peft_config": lora(revision=object())} if part == "LoraConfig" else {})
    tested.processing_class = copy.deepcopy(tokenizer())
    if part == "Qwen2Config":
        tested.model.config.seen = {1}
    elif part == "Unsaved":
        tested.add_callback(Unsaved)
    elif part == "Tokenizer":
        tested.processing_class.backend_tokenizer.pre_tokenizer = PreTokenizer.custom(object())
    with pytest.raises(ValueError, match=part):
        tested.train()


def test_rotation_keeps_the_checkpoint_just_written_and_folders_of_the_users_own(tmp_path):
    for name in ("checkpoint-100", "checkpoint-best"):  # of an older and longer run, and one that a user named
        (tmp_path / name).mkdir()
    for name in ("checkpoint-0", "checkpoint-2"):
        (tmp_path / name).mkdir(), (tmp_path / name / "notes.txt").write_text("mine")
    with pytest.raises(OSError, match="checkpoint-2") as error:
        trained(tmp_path, save_total_limit=1, max_steps=2, **SAVING)
    left = [f"checkpoint-{i}" for i in (0, 1, 2, "best")]
    assert "other files" in str(error.value) and checkpoints(tmp_path) == left
    (tmp_path / "checkpoint-2").rename(tmp_path / "mine")
    ran(trainer(tmp_path, max_steps=2, **SAVING), True)
    assert checkpoints(tmp_path) == [*left, "mine"]


OTHERS = {
    "sigma": 0.1, "alpha": 0.1, "population_size": 5, "seed": 7, "fitness": "shuffled", "arm": "other",
    "prompts_per_step": 2, "max_completion_length": 5, "chunk_rows": 2, "decoder": "generate", "rows": ROWS[1:],
}  # fmt: skip


def test_resuming_with_other_settings_is_refused(tmp_path):
    trained(tmp_path, max_steps=1, **SAVING)
    for name, value in [*OTHERS.items(), ("rows", [*ROWS[1:], {"prompt": "z", "number": 8}])]:
        with pytest.raises(ValueError, match=f"with {'prompts' if name == 'rows' else name}"):
            trainer(tmp_path, **SAVING | {name: value}).train(resume_from_checkpoint=True)


test_nothing_to_resume_from = refused(
    *((True, "run"), ("True", "run"), ("last", "run"), ("/no/such", "'/no/such'"), ("", "=''")),
    call=lambda resume, tmp_path: trainer(tmp_path / "run").train(resume_from_checkpoint=resume),
)
