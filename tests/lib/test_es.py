"""ESConfig and ESTrainer: what they refuse, what a step does, and the surface of a Hugging Face trainer."""

import copy
import dataclasses
import json
import math
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import PROMPTS, random_model, tokenizer
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    TrainerCallback,
)

from evoalign_lib import ledger, models, noise
from evoalign_lib.es import ESConfig, ESTrainer, step_indices
from evoalign_lib.rewards import RewardError

ROWS = [{"prompt": p, "number": i} for i, p in enumerate(PROMPTS)]


def token_sum(completion_ids, **columns):
    return [float(sum(ids)) for ids in completion_ids]


def constant(completions, **columns):
    return [0.1 + 0.2] * len(completions)


def config(tmp_path, **changed) -> ESConfig:
    settings = {
        "population_size": 4, "sigma": 0.05, "alpha": 0.05, "max_steps": 2, "max_completion_length": 4, "workers": 1,
        "disable_tqdm": True, "save_strategy": "no",
    } | changed  # fmt: skip
    # a new run in the folder of another is refused: those without checkpoints get one each
    tmp_path.mkdir(exist_ok=True)
    folder = tempfile.mkdtemp(dir=tmp_path) if settings["save_strategy"] == "no" else tmp_path / "run"
    return ESConfig(**{"output_dir": str(folder)} | settings)


def trainer(tmp_path, reward=token_sum, rows=ROWS, callbacks=None, eval_dataset=None, model=None, **changed):
    model = random_model() if model is None else model
    return ESTrainer(model, reward, config(tmp_path, **changed), rows, eval_dataset, tokenizer(), callbacks)


def weights(model) -> bytes:
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters())


# ---- ESConfig

BAD_VALUES = {
    "population_size": [1, 2.5, True, None],
    "sigma": [0, -1e-3, math.nan, math.inf, "1e-3", True],
    "alpha": [0.0, None],
    "anchor_decay": [-0.1, 1, 1 - 1e-9, math.nan, "0.1", True],  # the third is 1 in float32
    "sigma_final_fraction": [0.0, 0.5],  # of a schedule, which is not set
    "num_generations": [0, 2],  # greedy completions are all alike
    "temperature": [0, math.inf, 0.5],  # greedy decoding has none
    "top_p": [1.5],
    "stop_strings": ["END", [""]],
    "weight_decay": [0.01],
    "lr_scheduler_type": ["cosine"],
} | {name: [0] for name in ("prompts_per_step", "max_completion_length", "chunk_rows", "workers", "top_k")}
BAD_VALUES |= {"top_k": [-1], "num_generations_eval": [0], "rank": [4, 0], "gpus": [-1], "tensor_parallel": [2]}
BAD_VALUES |= {
    "learning_rate": [1e-6],
    "optim": ["sgd"],
    "bf16": [True],
    "push_to_hub": [True],
    "eval_on_start": [True],
}
BAD_VALUES |= {"load_best_model_at_end": [True], "save_strategy": ["best"], "engine_kwargs": [{"max_loras": 2}]}
MISSPELT = {
    "fitness": "rewards", "decoder": "generat", "fitness_shaping": "ranks", "sigma_schedule": "cosin",
    "sampling": "comon", "noise": "gaussan", "precision": "mster", "perturbation": "lowrank",
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD_VALUES.items() for value in values])
def test_bad_values_are_named(name, value):
    with pytest.raises(ValueError, match=f"{name}(={re.escape(repr(value))}| needs)"):
        ESConfig(**{name: value})


@pytest.mark.parametrize("name", MISSPELT)
def test_what_is_misspelt_is_named_with_its_neighbour(name):
    with pytest.raises(ValueError, match=f"{name}='{MISSPELT[name]}' is not one of .*Did you mean"):
        ESConfig(**{name: MISSPELT[name]})
    with pytest.raises(TypeError, match=f"no setting '{name[:-1]}'.*Did you mean '{name}'"):
        ESConfig(**{name[:-1]: 1})


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"max_new_tokens": 3}, "'max_new_tokens' is set elsewhere: max_completion_length"),
        ({"bad_words_ids": {3}}, "cannot be written down"),
        ({"min_p": 0.1}, "'min_p' has no effect"),
        ({"repetition_penlty": 2.0}, "Did you mean 'repetition_penalty'"),
        (3, "generation_kwargs=3"),
    ],
    ids=str,
)
def test_generation_kwargs_that_nothing_would_read(given, named):
    with pytest.raises(ValueError, match=named):
        ESConfig(generation_kwargs=given)


def test_what_two_settings_say_together():
    for precision in ("kahan", "inplace"):
        with pytest.raises(ValueError, match=f"anchor_decay=0.1 needs precision='master': precision='{precision}'"):
            ESConfig(anchor_decay=0.1, precision=precision)
    with pytest.raises(ValueError, match="population_size=5 must be even"):
        ESConfig(antithetic=True, population_size=5)
    assert ESConfig(perturbation="low_rank", rank=3).rank == 3
    for settings, arm in (({"fitness": "random"}, "es_random"), ({"fitness": "shuffled", "arm": "null"}, "null")):
        assert ESConfig(**settings).arm == arm  # null arms draw other noise


def test_all_that_is_wrong_is_said_at_once():
    wrong = {"learning_rate": 1e-6, "bf16": True, "sigma": 0, "decoder": "generat", "num_generations": 2}
    with pytest.raises(ValueError, match="5 settings") as caught:
        ESConfig(**wrong)
    assert all(f"- {name}={value!r}" in str(caught.value) for name, value in wrong.items())
    with pytest.raises(TypeError, match="3 settings") as caught:
        ESConfig(beta=0.1, use_vllm=True, optim="sgd")
    assert all(word in str(caught.value) for word in ("'beta'", "set engine='vllm'", "optim='sgd'"))


def test_a_config_can_be_copied():
    config = ESConfig(sigma=0.5, max_steps=3)
    for other in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert other.to_dict() == config.to_dict()
    known = {f.name for f in dataclasses.fields(config)}
    written = {name: value for name, value in json.loads(config.to_json_string()).items() if name in known}
    assert ESConfig(**written).to_dict() == config.to_dict()


COMMAND = [
    "--output_dir", "out", "--sigma", "0.01", "--population_size", "8", "--fitness", "random", "--workers", "2",
    "--reward_weights", "1", "0.5", "--prompts_per_step", "16", "--model_init_kwargs", '{"revision": "abc"}',
]  # fmt: skip


def test_hf_argument_parser():
    [c] = HfArgumentParser(ESConfig).parse_args_into_dataclasses(COMMAND)
    assert (c.sigma, c.population_size, c.fitness, c.workers) == (0.01, 8, "random", 2)
    assert (c.reward_weights, c.prompts_per_step) == ([1.0, 0.5], 16)
    assert c.model_init_kwargs == {"revision": "abc"}
    [c] = HfArgumentParser(ESConfig).parse_args_into_dataclasses([])
    assert (c.workers, c.prompts_per_step, c.reward_floor, c.model_init_kwargs) == (None, None, None, None)
    with pytest.raises(ValueError, match="population_size=1"):
        HfArgumentParser(ESConfig).parse_args_into_dataclasses(["--population_size", "1"])


# ---- what the trainer refuses before any work starts


@pytest.mark.parametrize(
    ("error", "named", "how"),
    [
        (ValueError, "the data set is empty", {"rows": []}),
        (ValueError, "train_dataset is missing", {"rows": None}),
        (TypeError, r"mapping with the keys \['train'\]", {"rows": {"train": ROWS}}),
        (ValueError, "eval_dataset: the data set is empty", {"eval_dataset": []}),
        (ValueError, "prompts_per_step=9 but the training set has 8", {"prompts_per_step": 9}),
        (TypeError, "is not callable", {"reward": 7}),
        (ValueError, "'some/reward-model' is no folder", {"reward": "some/reward-model"}),
        (ValueError, "reward_weights has 1 entries for 2", {"reward": [token_sum] * 2, "reward_weights": [1.0]}),
        (ValueError, "model_init_kwargs is for a model given by name", {"model_init_kwargs": {"revision": "x"}}),
        (ValueError, "seed", {"seed": -1}),
        (ValueError, "eval_strategy='steps' needs an eval_dataset", {"eval_strategy": "steps", "eval_steps": 1}),
        (ValueError, "arm", {"arm": ""}),
        *(
            (ValueError, f"model '{name}' ", {"model": name})
            for name in ("/no/such/folder", "./none", "nobody/no-model")
        ),
    ],
)
def test_what_the_trainer_refuses(tmp_path, error, named, how):
    with pytest.raises(error, match=named):
        trainer(tmp_path, **how)


def test_a_model_without_its_tokenizer(tmp_path):
    with pytest.raises(ValueError, match=f"'{tmp_path}' is neither a folder with a model"):
        ESTrainer(str(tmp_path), token_sum, config(tmp_path), ROWS)
    with pytest.raises(ValueError, match=r"no tokenizer lies beside the model .*processing_class"):
        ESTrainer(random_model(), token_sum, config(tmp_path), ROWS)
    with pytest.raises(ValueError, match=r"set tokenizer\.eos_token"):
        models.load(random_model(), SimpleNamespace(pad_token_id=None, eos_token_id=None))


def cached(folder: Path, name: str, revisions: dict[str, int]) -> None:
    """Lay out a cache of the Hub: for each revision a model of another seed, and a tokenizer that tells which."""
    repository = folder / f"models--{name.replace('/', '--')}"
    for i, (revision, seed) in enumerate(revisions.items()):
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / revision).write_text(f"{i:040x}")
        random_model(seed=seed).save_pretrained(repository / f"snapshots/{i:040x}")
        tokenizer().save_pretrained(repository / f"snapshots/{i:040x}")
        settings = repository / f"snapshots/{i:040x}/tokenizer_config.json"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"model_max_length": 100 + seed}))


def test_a_name_on_the_hub_and_its_revision(tmp_path):
    cached(tmp_path / "hub", "someone/model", {"main": 2, "other": 7})
    name, keywords = "someone/model", {"cache_dir": str(tmp_path / "hub")}
    for revision, seed in ((None, 2), ("main", 2), ("other", 7)):
        chosen = keywords | ({"revision": revision} if revision else {})
        tested = ESTrainer(name, token_sum, config(tmp_path, model_init_kwargs=chosen), ROWS)
        assert weights(tested.model) == weights(random_model(seed=seed))
        assert tested.processing_class.model_max_length == 100 + seed


def test_a_failing_reward_stops_the_run_and_names_member_and_prompt(tmp_path):
    def wrong_length(completions, **columns):
        return [0.0]

    def fails(completions, number, **columns):
        return [1 / (n - 3) for n in number]

    with pytest.raises(ValueError, match="'wrong_length' returned 1 rewards for 8 completions"):
        trainer(tmp_path, wrong_length).train()
    with pytest.raises(RewardError, match="member 0: .*'fails' gave ZeroDivisionError.*on prompt '12'"):
        trainer(tmp_path, fails).train()
    with pytest.raises(ValueError, match="member 0 of step 0 has no reward"):
        trainer(tmp_path, lambda completions, **kw: [None] * len(completions)).train()
    floored = trainer(tmp_path, fails, reward_floor=-1.0)
    floored.train()
    assert floored.counts["exception"] == 2 * 4 and floored.counts["tied"] == 2


class Leaving(TrainerCallback):
    """Calls sys.exit() after a step."""

    def __init__(self, step: int, status: object = None):
        self.step, self.status = step, status

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            sys.exit(self.status)


def test_a_run_that_ends_early_says_so(tmp_path):
    """sys.exit() ends a process with status 0 and no message, as if the run had finished."""

    def leaves(completions, number, **columns):
        return [float(n) if n != 3 else sys.exit() for n in number]

    with pytest.raises(RewardError, match=r"member \d: .*'leaves' gave SystemExit.* on prompt '12'"):
        trainer(tmp_path, leaves, workers=2).train()
    with pytest.raises(RuntimeError, match=r"sys.exit\(\) was called after step 1 of 2, and would have ended the proc"):
        trainer(tmp_path, callbacks=[Leaving(1)]).train()
    for leaving in (Leaving(1, 3), Leaving(2)):  # a status of its own; the last step
        with pytest.raises(SystemExit):
            trainer(tmp_path, callbacks=[leaving]).train()


@pytest.mark.parametrize("workers", [2])
def test_failures_of_a_step_are_logged_recorded_and_counted(tmp_path, workers):
    def mixed(completions, number, trainer_state, **columns):
        if len(completions) == 1 and number[0] == 1:
            raise KeyError("no such answer")
        while trainer_state.global_step == 1 and number[0] == 2:
            pass
        if len(completions) > 1:
            raise MemoryError
        return [{3: math.nan, 4: None}.get(number[0], float(len(completions[0])))]

    tested = trainer(tmp_path, mixed, reward_floor=-1.0, reward_timeout=1.0, population_size=2, workers=workers)
    tested.train()
    tested.engine.close()
    kinds = ("none", "nan", "exception", "timeout")
    logs = tested.state.log_history
    assert [[log.get(f"rewards/{kind}") for kind in kinds] for log in logs] == [[2, 2, 2, None], [2, 2, 2, 2]]
    assert tested.counts == {"tied": tested.counts["tied"], "none": 4, "nan": 4, "exception": 4, "timeout": 2}
    steps = ledger.read(Path(tested.args.output_dir) / ledger.NAME).steps
    assert [step.counts for step in steps] == [{"none": 2, "nan": 2, "exception": 2}, dict.fromkeys(kinds, 2)]


# ---- a step


def test_a_tied_population_moves_nothing_and_is_counted(tmp_path):
    tested = trainer(tmp_path, constant, max_steps=3)
    # a zero with a sign would lose it in an update that adds nothing
    tested.engine.master[:8] = -0.0
    before = tested.engine.master.tobytes()
    tested.train()
    assert tested.engine.master.tobytes() == before
    assert tested.counts["tied"] == 3
    assert [log["tied"] for log in tested.state.log_history] == [1.0] * 3
    assert tested.state.log_history[0]["reward_std"] < 1e-15


def constant_from_step_two(completion_ids, trainer_state, **columns):
    return token_sum(completion_ids) if trainer_state.global_step < 2 else [1.0] * len(completion_ids)


def test_a_tied_population_decays_toward_the_start(tmp_path):
    path = []

    class Noted(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            path.append(tested.engine.master.copy())

    tested = trainer(tmp_path, constant_from_step_two, max_steps=6, anchor_decay=0.25, callbacks=[Noted()])
    start = tested.engine.master.copy()
    tested.train()
    assert [log["tied"] for log in tested.state.log_history] == [0, 0, 1, 1, 1, 1] and tested.counts["tied"] == 4
    moved = np.array([master - start for master in path])
    assert (moved[1] != 0).mean() > 0.9
    for t in range(2, 6):
        # to the bit, and exactly three quarters but for the rounding of weights of size 1
        assert path[t].tobytes() == (path[t - 1] - np.float32(0.25) * (path[t - 1] - start)).tobytes()
        assert np.abs(moved[t] - 0.75 * moved[t - 1]).max() < 2.0**-22
    assert np.linalg.norm(moved[5]) == pytest.approx(0.75**4 * np.linalg.norm(moved[1]), rel=1e-5)
    # so does the ledger, whose lines say nothing else than that they were tied
    run = ledger.read(tested._ledger_path)
    assert ledger.replay(run, random_model()).tobytes() == path[5].tobytes()
    assert [len(keys) for keys, _ in ledger.updates(run, 6)] == [4, 4, 0, 0, 0, 0]


def test_weights_that_moved_before_the_ledger_began_have_no_start_in_it(tmp_path):
    tested = trainer(tmp_path, anchor_decay=0.1)
    tested.step()
    with pytest.raises(RuntimeError, match="the weights are not those after step 0 .*Make a new trainer"):
        tested.train()


def test_rewards_are_maximised(tmp_path):
    """A quadratic bowl in the final norm's weights: its optimum is known, and ES has to go there."""
    model, goal = random_model(), 0.5

    def bowl(completions, **columns):
        engine = tested.engine
        gain = engine.layout.views(engine.weights.working)["model.norm.weight"]
        return [-float(np.square(gain - goal).sum())] * len(completions)

    tested = trainer(
        tmp_path, bowl, ROWS[:1], model=model,
        population_size=30, sigma=0.02, alpha=0.1, max_steps=30, max_completion_length=1,
    )  # fmt: skip
    gain = tested.engine.layout.views(tested.engine.master)["model.norm.weight"]
    before = np.square(gain - goal).sum()
    tested.train()
    assert np.square(gain - goal).sum() < 0.25 * before
    assert tested.state.log_history[-1]["reward"] > tested.state.log_history[0]["reward"]


def test_shuffled_permutes_the_rewards_of_its_own_members(tmp_path):
    told = []

    class Noted(ESTrainer):
        def tell(self, members, fitness):
            told.append((members, fitness))
            return super().tell(members, fitness)

    for fitness in ("reward", "shuffled"):
        # the same noise in both, by an explicit arm
        Noted(
            random_model(),
            token_sum,
            config(tmp_path, fitness=fitness, arm="paired", max_steps=1, population_size=8),
            ROWS,
            None,
            tokenizer(),
        ).train()
    (members, plain), (same, shuffled) = told
    assert members == same and sorted(plain) == sorted(shuffled) and (plain != shuffled).any()


def test_random_fitness_generates_nothing(tmp_path):
    def never(**columns):
        raise AssertionError("the random arm scores nothing")

    tested = trainer(tmp_path, never, fitness="random", workers=2, decoder="generate")
    before = tested.engine.master.copy()
    tested.train()
    assert tested.engine._pool is None and (tested.engine.master != before).any()
    assert tested.budget["completions"] == tested.budget["generated_tokens"] == tested.budget["prompt_tokens"] == 0
    assert "completions/mean_length" not in tested.state.log_history[0]
    assert tested.counts["tied"] == 0


def test_the_seed_decides(tmp_path):
    def run(seed, fitness):
        tested = trainer(tmp_path, seed=seed, fitness=fitness, prompts_per_step=3)
        tested.train()
        return tested.engine.master.tobytes()

    for fitness in ("reward", "shuffled", "random"):
        assert run(1, fitness) == run(1, fitness) != run(2, fitness)


@given(
    st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))),
    st.integers(0, 2**32),
    st.integers(0, 5),
)
def test_step_indices_cover_each_epoch_once(sizes, seed, epoch):
    n, per_step = sizes
    first, last = epoch * n // per_step, ((epoch + 1) * n - 1) // per_step
    drawn = np.concatenate([step_indices(n, per_step, seed, step) for step in range(first, last + 1)])
    of_epoch = drawn[epoch * n - first * per_step :][:n]
    assert sorted(of_epoch) == list(range(n))
    assert (step_indices(n, per_step, seed, first) == drawn[:per_step]).all()


# ---- logs, callbacks, evaluation


def test_what_is_logged(tmp_path):
    def accuracy(completion_ids, log_metric, **columns):
        log_metric("accuracy", 0.25)
        log_metric("reward", -99)  # not ours to overwrite
        return [float(sum(ids)) for ids in completion_ids]

    def sometimes(number, completions, log_metric, **columns):
        if len(completions[0]) % 2:
            log_metric("odd", 1.0)
        return [None] * len(number)

    tested = trainer(tmp_path, [accuracy, sometimes], prompts_per_step=3, max_steps=4)
    tested.train()
    logs = tested.state.log_history
    assert [log["step"] for log in logs] == [1, 2, 3, 4]
    assert {
        "reward", "reward_std", "reward_max", "tied", "rewards/accuracy/mean", "accuracy", "completions/mean_length",
        "completions/clipped_ratio", "num_tokens", "completions", "members_per_second", "step_time", "core_seconds",
        "epoch", "step",
    } <= set(logs[0])  # fmt: skip
    assert "rewards/sometimes/mean" not in logs[0]
    assert all(log["accuracy"] == 0.25 and log["reward"] == log["rewards/accuracy/mean"] > 0 for log in logs)
    assert all(log["reward_max"] >= log["reward"] and log["reward_std"] > 0 for log in logs)
    # 4 members, 3 prompts, 4 tokens at most
    assert [log["completions"] for log in logs] == [12, 24, 36, 48] and tested.budget["completions"] == 48
    tokens = [log["completions/mean_length"] * 12 for log in logs]
    assert tested.budget["generated_tokens"] == pytest.approx(sum(tokens)) and max(tokens) <= 48
    lengths = [len(tokenizer()(p)["input_ids"]) for p in PROMPTS]
    used = np.concatenate([step_indices(8, 3, 42, step) for step in range(4)])
    assert tested.budget["prompt_tokens"] == 4 * sum(lengths[i] for i in used)
    assert logs[-1]["num_tokens"] == tested.budget["generated_tokens"] + tested.budget["prompt_tokens"]
    # 8 prompts, 3 a step
    assert [log["epoch"] for log in logs] == [0.375, 0.75, 1.125, 1.5]
    assert tested.counts["none"] == 48 and [log["rewards/none"] for log in logs] == [12] * 4
    assert not {"rewards/nan", "rewards/exception", "rewards/timeout", "sigma", "alpha"} & set(logs[0])
    json.dumps(logs)


def test_logging_steps_and_epochs(tmp_path):
    tested = trainer(tmp_path, max_steps=-1, num_train_epochs=2, prompts_per_step=3, logging_steps=4)
    tested.train()
    assert tested.state.global_step == tested.state.max_steps == 6
    assert [log["step"] for log in tested.state.log_history] == [4]
    by_epoch = trainer(
        tmp_path, max_steps=5, prompts_per_step=4, logging_strategy="epoch", save_strategy="epoch",
        eval_strategy="epoch", eval_dataset=ROWS[:2],
    )  # fmt: skip
    by_epoch.train()
    assert [log["step"] for log in by_epoch.state.log_history if "reward" in log] == [2, 4]
    assert [log["step"] for log in by_epoch.state.log_history if "eval_reward" in log] == [2, 4]
    assert checkpoints(tmp_path) == ["checkpoint-2", "checkpoint-4"]


class Noted(TrainerCallback):
    """Writes down which events came, in which order, and with which weights in the model."""

    def __init__(self):
        self.events, self.models = [], []

    def _event(name):
        def note(self, args, state, control, model=None, **kwargs):
            self.events.append((name, state.global_step))
            self.models.append(weights(model))

        return note

    on_train_begin, on_train_end = _event("train_begin"), _event("train_end")
    on_epoch_begin, on_epoch_end = _event("epoch_begin"), _event("epoch_end")
    on_step_begin, on_step_end = _event("step_begin"), _event("step_end")
    on_log, on_evaluate, on_save = _event("log"), _event("evaluate"), _event("save")


def test_callbacks_come_in_order_and_find_the_current_weights(tmp_path):
    for decoder in ("loop", "generate"):
        noted = Noted()
        tested = trainer(
            tmp_path / decoder, callbacks=[noted], eval_dataset=ROWS[:2], eval_strategy="steps", eval_steps=2,
            save_strategy="steps", save_steps=2, prompts_per_step=4, decoder=decoder,
        )  # fmt: skip
        start = weights(tested.model)
        tested.train()
        assert noted.events == [
            ("train_begin", 0), ("epoch_begin", 0), ("step_begin", 0), ("step_end", 1), ("log", 1),
            ("step_begin", 1), ("step_end", 2), ("epoch_end", 2), ("log", 2), ("log", 2), ("evaluate", 2), ("save", 2),
            ("train_end", 2),
        ]  # fmt: skip
        models = noted.models
        assert models[0] == models[2] == start != models[3]
        assert models[3] == models[4] == models[5] != models[6]
        assert set(models[6:]) == {weights(tested.model)}


def test_a_callback_stops_the_run(tmp_path):
    class Enough(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            control.should_training_stop = state.global_step == 2

    tested = trainer(tmp_path, callbacks=[Enough()], max_steps=10)
    assert tested.train().global_step == 2
    # and may go on: a new call of train() is not stopped by the old one
    tested.callback_handler.pop_callback(Enough)
    assert tested.train().global_step == 10


def test_no_secret_is_written(tmp_path, monkeypatch, caplog):
    """A planted token is in no file of a run, nor in its log."""
    secret = "hf_plantedtoken"
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    random_model().save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    given = {"token": secret, "revision": "main"}
    args = config(
        tmp_path, report_to="tensorboard", model_init_kwargs=given, hub_token=secret, save_strategy="steps",
        save_steps=1, max_steps=1,
    )  # fmt: skip
    tested = ESTrainer(str(tmp_path / "base"), token_sum, args, ROWS)
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


def test_evaluate_scores_the_current_weights_greedily(tmp_path):
    def reward(completion_ids, log_metric, **columns):
        log_metric("accuracy", 0.5)
        return token_sum(completion_ids)

    tested = trainer(tmp_path, reward, eval_dataset=ROWS[:3])
    before = tested.engine.master.tobytes()
    metrics = tested.evaluate()
    (completions,) = tested.engine.generate("eval")
    assert metrics == {"eval_reward": np.mean([sum(ids) for _, ids in completions]), "eval_accuracy": 0.5}
    assert tested.engine.master.tobytes() == before and tested.budget["completions"] == 0
    tested.train()
    assert tested.evaluate()["eval_reward"] != metrics["eval_reward"]


# ---- folders and checkpoints


def test_the_saved_model_is_the_master(tmp_path):
    tested = trainer(tmp_path)
    tested.step()
    tested.save_model(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, view in tested.engine.layout.views(tested.engine.master).items():
        assert (dict(model.named_parameters())[name].detach().numpy() == view).all()
    tok = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tok("a<think>")["input_ids"] == tokenizer()("a<think>")["input_ids"]
    # a folder is a model for the next run, with its own tokenizer
    again = ESTrainer(str(tmp_path / "out"), token_sum, config(tmp_path), ROWS)
    assert again.engine.master.tobytes() == tested.engine.master.tobytes()
    assert (again.train_prompts.ids == tested.train_prompts.ids).all()


def saving(tmp_path, **changed):
    return trainer(tmp_path, **({"save_strategy": "steps", "save_steps": 1, "max_steps": 3} | changed))


def checkpoints(tmp_path) -> list[str]:
    names = {p.name for p in (tmp_path / "run").iterdir()}
    assert "ledger.jsonl" in names
    return sorted(names - {"ledger.jsonl", ".ledger.jsonl.lock"})


def test_a_checkpoint_loads_as_a_model(tmp_path):
    tested = saving(tmp_path, max_steps=1)
    tested.train()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/checkpoint-1")
    assert weights(model) == weights(tested.model)
    state = json.loads((tmp_path / "run/checkpoint-1/es_state.json").read_text())
    assert state["budget"] == tested.budget and state["settings"]["sigma"] == 0.05
    # as it was at the save, at which the log of the step had been written
    assert json.loads((tmp_path / "run/checkpoint-1/trainer_state.json").read_text())["log_history"]


def test_rotation_never_removes_the_checkpoint_just_written(tmp_path):
    # of an older and longer run in the same folder, and one that a user named
    for name in ("checkpoint-100", "checkpoint-best"):
        (tmp_path / "run" / name).mkdir(parents=True)
    saving(tmp_path, save_total_limit=1, max_steps=1).train()
    assert checkpoints(tmp_path) == ["checkpoint-1", "checkpoint-best"]


def test_a_half_written_checkpoint_is_ignored(tmp_path):
    saving(tmp_path, max_steps=2).train()
    # killed while it wrote the third
    partial = tmp_path / "run/partial-3"
    shutil.copytree(tmp_path / "run/checkpoint-2", partial)
    (partial / "es_state.json").unlink()
    (partial / "model.safetensors").write_bytes(b"half")
    resumed, whole = saving(tmp_path, max_steps=4), trainer(tmp_path / "whole", max_steps=4)
    resumed.train(resume_from_checkpoint=True)
    whole.train()
    assert resumed.engine.master.tobytes() == whole.engine.master.tobytes()
    assert checkpoints(tmp_path) == [f"checkpoint-{i}" for i in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("name", "value"),
    [("sigma", 0.1), ("alpha", 0.1), ("population_size", 5), ("seed", 7), ("fitness", "shuffled"), ("arm", "other"),
     ("prompts_per_step", 3), ("max_completion_length", 5), ("chunk_rows", 2), ("decoder", "generate"),
     ("rows", ROWS[1:]), ("rows", [*ROWS[1:], {"prompt": "z", "number": 8}])],
)  # fmt: skip
def test_resuming_with_other_settings_is_refused(tmp_path, name, value):
    saving(tmp_path, max_steps=1).train()
    with pytest.raises(ValueError, match=f"is of a run with {'prompts' if name == 'rows' else name}"):
        saving(tmp_path, **{name: value}).train(resume_from_checkpoint=True)


def test_nothing_to_resume_from(tmp_path):
    with pytest.raises(ValueError, match="no checkpoint to resume from in .*run': call train"):
        saving(tmp_path).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="'/no/such' is not a checkpoint of ESTrainer"):
        saving(tmp_path).train(resume_from_checkpoint="/no/such")


def test_the_run_key_is_that_of_the_noise_law(tmp_path):
    tested = trainer(tmp_path, seed=11)
    assert tested.run_key == noise.run_key("es", 11)
    assert tested.ask(3)[2].key == noise.member_key(noise.run_key("es", 11), 3, 2)


BARE = """
import sys
for name in ("trl", "datasets", "pooch", "papermill", "pandas", "matplotlib", "seaborn", "statsmodels", "tensorboard"):
    sys.modules[name] = None
sys.path.insert(0, sys.argv[1])
from helpers import tokenizer
from evoalign_lib import es, noise, tiny
from evoalign_lib.engines import local
from evoalign_lib.tasks import countdown

config = es.ESConfig(output_dir=sys.argv[2], population_size=2, sigma=0.1, max_steps=1, max_completion_length=3,
                     workers=2, disable_tqdm=True)
rows = countdown.dataset(tiny.problems("train", 2), tokenizer())
trainer = es.ESTrainer("someone/model", countdown.reward, config, rows)
trainer.train()
print(trainer.state.global_step)
"""


@pytest.mark.slow  # study/test_environment.py has a faster one
def test_training_needs_torch_and_transformers_only(tmp_path):
    """A GPU image without the other requirements imports the trainer, and runs it on a model in the Hub's cache."""
    cached(tmp_path / "home/hub", "someone/model", {"main": 2})
    tests = str(Path(__file__).resolve().parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", BARE, tests, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"HF_HOME": str(tmp_path / "home")},
    )
    assert (done.stdout, done.returncode) == ("1\n", 0), done.stderr
    assert "Error" not in done.stderr  # the workers end quietly with the interpreter
    assert (tmp_path / "checkpoint-1/es_state.json").is_file()
