"""ESConfig and ESTrainer: what they refuse, what a step does, and the surface of a Hugging Face trainer."""

import concurrent.futures
import copy
import dataclasses
import json
import math
import os
import pickle
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import PROMPTS, in_child, random_model, tokenizer
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    EarlyStoppingCallback,
    HfArgumentParser,
    TrainerCallback,
    TrainingArguments,
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
        "population_size": 4,
        "sigma": 0.05,
        "alpha": 0.05,
        "max_steps": 2,
        "max_completion_length": 4,
        "workers": 1,
        "disable_tqdm": True,
        "save_strategy": "no",
    } | changed
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


def test_the_defaults_are_those_of_the_study():
    c = ESConfig()
    assert (c.population_size, c.sigma, c.alpha, c.prompts_per_step) == (30, 1e-3, 5e-4, None)
    assert (c.fitness, c.arm, c.decoder, c.max_completion_length) == ("reward", "es", "auto", 1024)


BAD_VALUES = [
    ("population_size", 1, "population_size=1 must be a whole number of at least 2"),
    ("population_size", 2.5, "population_size=2.5 must be a whole number"),
    ("population_size", True, "population_size=True"),
    ("population_size", None, "population_size=None"),
    ("sigma", 0, "sigma=0 must be a positive number, for example 0.001"),
    ("sigma", -1e-3, "sigma=-0.001 must be a positive"),
    ("sigma", math.nan, "sigma=nan"),
    ("sigma", math.inf, "sigma=inf"),
    ("sigma", "1e-3", "sigma='1e-3'"),
    ("sigma", True, "sigma=True"),
    ("alpha", 0.0, "alpha=0.0 must be a positive number, for example 0.0005"),
    ("alpha", None, "alpha=None"),
    ("prompts_per_step", 0, "prompts_per_step=0 .* or None for the whole training set"),
    ("max_completion_length", 0, "max_completion_length=0"),
    ("chunk_rows", 0, "chunk_rows=0"),
    ("workers", 0, "workers=0 .* or None for one per core"),
    ("fitness", "rewards", r"fitness='rewards' is not one of .*Did you mean 'reward'\?"),
    ("fitness", "shuffle", r"Did you mean 'shuffled'\?"),
    ("fitness", "xyz", "fitness='xyz' is not one of"),
    ("decoder", "generat", r"decoder='generat' is not one of .*Did you mean 'generate'\?"),
    ("learning_rate", 1e-6, "learning_rate=1e-06 has no effect on ES: the step size of ES is alpha. Remove it."),
    ("per_device_train_batch_size", 2, "prompts_per_step"),
    ("gradient_accumulation_steps", 4, "has no effect on ES"),
    ("max_grad_norm", 0.5, "no gradient norm"),
    ("weight_decay", 0.1, "ES has no optimiser"),
    ("adam_beta2", 0.99, "ES has no optimiser"),
    ("optim", "sgd", "ES has no optimiser"),
    ("lr_scheduler_type", "cosine", "the step size of ES is alpha; see alpha_schedule"),
    ("warmup_steps", 3, "alpha starts at its full value"),
    ("gradient_checkpointing", True, "stores no activations"),
    ("bf16", True, "the master is float32"),
    ("fp16", True, "the master is float32"),
    ("fitness_shaping", "ranks", r"fitness_shaping='ranks' is not one of .*Did you mean 'centred_ranks'\?"),
    ("sigma_schedule", "cosin", r"Did you mean 'cosine'\?"),
    ("alpha_final_fraction", 0.5, "alpha_final_fraction=0.5 has no effect while alpha is constant: set"),
    ("sigma_final_fraction", 0.0, "sigma_final_fraction=0.0 must be above 0 and at most 1"),
    ("sampling", "random", r"sampling='random' is not one of \['greedy', 'common'\]"),
    ("num_generations", 0, "num_generations=0 must be a whole number of at least 1"),
    ("num_generations", 2, "num_generations=2: greedy completions of a prompt are all alike. Set sampling='common'"),
    ("load_best_model_at_end", True, "needs evaluations: set eval_strategy='steps' and eval_steps"),
    ("save_strategy", "best", "save_strategy='best' needs metric_for_best_model, such as 'reward'"),
    ("push_to_hub", True, "has no effect on ES"),
    ("weight_decay", 0.01, "anchor_decay decays toward the starting weights. Remove it"),
    ("anchor_decay", -0.1, "anchor_decay=-0.1 must be 0 .off. or a number above 0 and below 1, .*for example 0.01"),
    ("anchor_decay", 1, "anchor_decay=1 must be"),
    ("anchor_decay", 1 - 1e-9, "anchor_decay=0.999999999 must be"),  # 1 in float32
    ("anchor_decay", math.nan, "anchor_decay=nan must be"),
    ("anchor_decay", "0.1", "anchor_decay='0.1' must be"),
    ("anchor_decay", True, "anchor_decay=True must be"),
    ("eval_on_start", True, "has no effect on ES"),
    ("num_generations_eval", 0, "num_generations_eval=0 must be a whole number of at least 1: or None for greedy"),
    ("temperature", 0.5, "temperature=0.5 has no effect on greedy decoding: set sampling='common' for members or"),
    ("temperature", 0, "temperature=0 must be a number above 0"),
    ("temperature", math.inf, "temperature=inf must be"),
    ("top_p", 1.5, "top_p=1.5 must be a number above 0 and at most 1"),
    ("top_k", -1, "top_k=-1 must be a whole number of at least 0"),
    ("stop_strings", "END", "stop_strings='END' must be a list of texts"),
    ("stop_strings", [""], "none of them empty"),
    ("generation_kwargs", {"max_new_tokens": 3}, "'max_new_tokens' is set elsewhere: max_completion_length"),
    ("generation_kwargs", {"bad_words_ids": {3}}, "cannot be written down"),
    ("generation_kwargs", {"min_p": 0.1}, "'min_p' has no effect, since samples are drawn here"),
    ("generation_kwargs", {"repetition_penlty": 2.0}, r"Did you mean 'repetition_penalty'\?"),
    ("log_unique_prompts", True, "has no effect without log_completions=True"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD_VALUES, ids=[f"{n}={v}" for n, v, _ in BAD_VALUES])
def test_bad_values_are_named(name, value, message):
    with pytest.raises(ValueError, match=message):
        ESConfig(**{name: value})


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("scale_rewards", ": rewards are standardised over the population; see fitness_shaping"),
        ("beta", ": ES has no KL penalty; anchor_decay pulls toward the starting weights"),
        ("populaton_size", r"\. Did you mean 'population_size'\?"),
        ("xyzzy", r"\. Remove it"),
    ],
)
def test_a_setting_that_there_is_not(name, remedy):
    with pytest.raises(TypeError, match=rf"ESConfig has no setting '{name}'{remedy}"):
        ESConfig(**{"max_steps": 3, name: 8})


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(ValueError, match="5 settings cannot stay as they are") as caught:
        ESConfig(learning_rate=1e-6, bf16=True, sigma=0, decoder="generat", num_generations=2)
    lines = str(caught.value).splitlines()[1:]
    assert all(line.startswith("- ") for line in lines)
    for name in ("learning_rate=1e-06", "bf16=True", "sigma=0", "decoder='generat'", "num_generations=2"):
        assert sum(line.startswith(f"- {name}") for line in lines) == 1
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


@pytest.mark.parametrize("learning_rate", [TrainingArguments.learning_rate])
def test_a_default_spelled_out_is_no_error(learning_rate):
    assert ESConfig(learning_rate=learning_rate, optim=TrainingArguments().optim).learning_rate == learning_rate


@pytest.mark.parametrize(
    ("settings", "arm"),
    [
        ({}, "es"),
        ({"fitness": "shuffled"}, "es_shuffled"),
        ({"fitness": "random"}, "es_random"),
        ({"fitness": "random", "arm": "null"}, "null"),
        ({"arm": "es_low_rank"}, "es_low_rank"),
    ],
)
def test_null_arms_have_names_of_their_own(settings, arm):
    assert ESConfig(**settings).arm == arm


def test_a_config_goes_to_json_and_back(tmp_path):
    c = config(tmp_path, fitness="shuffled", reward_weights=[1.0, 2.0], model_init_kwargs={"revision": "main"})
    saved = json.loads(json.dumps(c.to_dict()))
    own = {f.name for f in dataclasses.fields(ESConfig)} - {f.name for f in dataclasses.fields(TrainingArguments)}
    assert own == {
        "population_size", "sigma", "alpha", "antithetic", "fitness_shaping", "sigma_schedule", "sigma_final_fraction",
        "alpha_schedule", "alpha_final_fraction", "anchor_decay", "prompts_per_step", "sampling", "num_generations",
        "max_completion_length", "fitness", "arm", "reward_weights", "reward_floor", "reward_timeout", "workers",
        "chunk_rows", "decoder", "precision", "noise", "model_init_kwargs", "engine", "gpus", "tensor_parallel",
        "engine_kwargs", "log_completions", "num_completions_to_print", "log_unique_prompts", "num_generations_eval",
        "temperature", "top_p", "top_k", "stop_strings", "generation_kwargs", "chat_template_kwargs",
        "overwrite_output_dir", "perturbation", "rank", "update_scaling",
    }  # fmt: skip
    again = ESConfig(**{name: saved[name] for name in own})
    assert {name: getattr(again, name) for name in own} == {name: getattr(c, name) for name in own}
    assert dataclasses.replace(c, sigma=0.5).arm == "es_shuffled"


def test_every_field_is_documented():
    own = {f.name: f for f in dataclasses.fields(ESConfig)}
    lines = Path(__import__("evoalign_lib.es").es.__file__).read_text().splitlines()
    for name in set(own) - {f.name for f in dataclasses.fields(TrainingArguments)}:
        assert own[name].metadata["help"], name
        [line] = [i for i, text in enumerate(lines) if text.startswith(f"    {name}: ")]
        assert lines[line + 1].strip().startswith('"""'), name


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


def test_trl_parser_reads_yaml(tmp_path):
    from trl import TrlParser

    file = tmp_path / "config.yaml"
    file.write_text("sigma: 0.002\nalpha: 1.0e-3\nfitness: shuffled\nmodel_init_kwargs:\n  revision: abc\n")
    [c] = TrlParser(ESConfig).parse_args_and_config(["--config", str(file), "--population_size", "6"])
    assert (c.sigma, c.alpha, c.arm, c.population_size) == (0.002, 1e-3, "es_shuffled", 6)
    assert c.model_init_kwargs == {"revision": "abc"}


# ---- what the trainer refuses before any work starts


def test_bad_data(tmp_path):
    with pytest.raises(ValueError, match="the data set is empty"):
        trainer(tmp_path, rows=[])
    with pytest.raises(ValueError, match="train_dataset is missing"):
        trainer(tmp_path, rows=None)
    with pytest.raises(ValueError, match="row 0 of the data set has no 'prompt'"):
        trainer(tmp_path, rows=[{"question": "?"}])
    with pytest.raises(ValueError, match="the data set is empty"):
        trainer(tmp_path, eval_dataset=[])
    with pytest.raises(ValueError, match="prompts_per_step=9 but the training set has 8 prompts: lower it"):
        trainer(tmp_path, prompts_per_step=9)
    assert trainer(tmp_path, prompts_per_step=8).prompts_per_step == trainer(tmp_path).prompts_per_step == 8


def test_a_dataset_without_rows_is_empty(tmp_path):
    import datasets

    with pytest.raises(ValueError, match="the data set is empty"):
        trainer(tmp_path, rows=datasets.Dataset.from_list([]))
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})
    with pytest.raises(TypeError, match=r"mapping with the keys \['train'\]: give one split"):
        trainer(tmp_path, rows=splits)


@pytest.mark.parametrize("name", ["/no/such/folder", "./none", "runs/none/here", "no-such-model", "nobody/no-model"])
def test_a_model_that_does_not_exist(name, tmp_path):
    with pytest.raises(ValueError, match=f"model '{name}' "):
        ESTrainer(name, token_sum, config(tmp_path), ROWS)


def test_a_name_on_the_hub_that_is_not_in_the_cache(tmp_path):
    with pytest.raises(
        ValueError, match="'nobody/no-model' is neither .* into a cache in the folder that HF_HOME names"
    ):
        ESTrainer("nobody/no-model", token_sum, config(tmp_path), ROWS)


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


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(ValueError, match="is neither a folder with a model nor"):
        ESTrainer(str(tmp_path), token_sum, config(tmp_path), ROWS)


def test_a_model_object_needs_its_tokenizer(tmp_path):
    with pytest.raises(ValueError, match="no tokenizer lies beside the model .*processing_class"):
        ESTrainer(random_model(), token_sum, config(tmp_path), ROWS)


def test_a_tokenizer_without_any_end():
    class Endless:
        pad_token_id = eos_token_id = None

    with pytest.raises(ValueError, match="neither a padding nor an end token: set tokenizer.eos_token"):
        models.load(random_model(), Endless())


def test_other_mistakes(tmp_path):
    with pytest.raises(TypeError, match="is not callable"):
        trainer(tmp_path, reward=7)
    with pytest.raises(ValueError, match="'some/reward-model' is no folder, and cannot be fetched from the Hub"):
        trainer(tmp_path, reward="some/reward-model")
    with pytest.raises(ValueError, match="reward_weights has 1 entries for 2"):
        trainer(tmp_path, reward=[token_sum, constant], reward_weights=[1.0])
    with pytest.raises(ValueError, match="model_init_kwargs is for a model given by name"):
        trainer(tmp_path, model_init_kwargs={"revision": "x"})
    with pytest.raises(ValueError, match="seed"):
        trainer(tmp_path, seed=-1)
    with pytest.raises(ValueError, match="eval_strategy='steps' needs an eval_dataset"):
        trainer(tmp_path, eval_strategy="steps", eval_steps=1)
    with pytest.raises(ValueError, match="needs an eval_dataset"):
        trainer(tmp_path).evaluate()
    with pytest.raises(ValueError, match="arm"):
        trainer(tmp_path, arm="")


def test_a_failing_reward_stops_the_run_and_names_member_and_prompt(tmp_path):
    def wrong_length(completions, **columns):
        return [0.0]

    def fails(completions, number, **columns):
        return [1 / (n - 3) for n in number]

    with pytest.raises(ValueError, match="'wrong_length' returned 1 rewards for 8 completions"):
        trainer(tmp_path, wrong_length).train()
    with pytest.raises(RewardError, match="member 0: .*'fails' gave ZeroDivisionError.*on prompt '12'"):
        trainer(tmp_path, fails).train()
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


@pytest.mark.parametrize("workers", [1, 2])
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


def test_a_time_out_in_a_thread_is_refused_before_any_work(tmp_path):
    tested = trainer(tmp_path, reward_timeout=1.0)
    with concurrent.futures.ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="in the main thread"):
        pool.submit(tested.train).result()
    assert tested.state.global_step == 0 and tested.budget["core_seconds"] == 0


def test_a_step_on_which_no_reward_applies(tmp_path):
    with pytest.raises(ValueError, match="member 0 of step 0 has no reward: every reward function returned None"):
        trainer(tmp_path, lambda completions, **kw: [None] * len(completions)).train()


# ---- a step


def test_keys_are_unique_over_members_steps_arms_and_seeds(tmp_path):
    keys = []
    for settings in ({}, {"fitness": "shuffled"}, {"fitness": "random"}, {"seed": 1}, {"arm": "other"}):
        tested = trainer(tmp_path, population_size=30, **settings)
        for step in range(20):
            members = tested.ask(step)
            assert [m.sign for m in members] == [1] * 30 and members == tested.ask(step)
            keys += [m.key for m in members]
    assert len(set(keys)) == len(keys) == 5 * 20 * 30


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


@pytest.mark.parametrize("precision", ["kahan", "inplace"])
def test_decay_needs_a_master(precision):
    with pytest.raises(ValueError, match=f"anchor_decay=0.1 needs precision='master': precision='{precision}' keeps"):
        ESConfig(anchor_decay=0.1, precision=precision)


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


def test_without_a_decay_nothing_of_it_is_there(tmp_path):
    runs = [trainer(tmp_path, **changed) for changed in ({}, {"anchor_decay": 0.0}, {"anchor_decay": 0})]
    for tested in runs:
        tested.train()
        assert tested.engine.weights.start is None and "anchor_decay" not in tested.ledger.header["settings"]
        assert tested.engine.master.tobytes() == runs[0].engine.master.tobytes()


def test_the_drift_of_a_random_walk_stops_where_the_decay_says(tmp_path):
    """alpha^2 d / (N (1 - (1 - lambda)^2)), where alpha^2 d T / N goes on."""
    norms = []

    class Noted(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            norms.append(np.square(tested.engine.master - start, dtype=np.float64).sum())

    for rate in (0.2, 0.0):
        norms.clear()
        tested = trainer(tmp_path, fitness="random", max_steps=40, anchor_decay=rate, callbacks=[Noted()])
        start = tested.engine.master.copy()
        tested.train()
        step = 0.05**2 * tested.engine.layout.d / 4
        if rate:  # after 20 steps it is there but for (1 - lambda)^40 = 1e-4
            assert np.mean(norms[20:]) == pytest.approx(step / (1 - 0.8**2), rel=0.02)
            expected = step * (1 - 0.8 ** (2 * np.arange(1, 41))) / (1 - 0.8**2)
        else:
            expected = step * np.arange(1, 41)
        assert norms == pytest.approx(expected, rel=0.06)


def test_weights_that_moved_before_the_ledger_began_have_no_start_in_it(tmp_path):
    tested = trainer(tmp_path, anchor_decay=0.1)
    tested.step()
    with pytest.raises(RuntimeError, match="the weights are not those after step 0 .*Make a new trainer"):
        tested.train()


def test_a_step_moves_the_master_by_the_size_that_alpha_says(tmp_path):
    tested = trainer(tmp_path)
    before = tested.engine.master.copy()
    metrics = tested.step()
    moved = np.linalg.norm(tested.engine.master - before)
    # N = 4 members whose z-scores have the mean square 1
    assert moved == pytest.approx(0.05 * math.sqrt(tested.engine.layout.d / 4), rel=0.1)
    assert metrics["tied"] == 0 and metrics["reward_std"] > 0


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


def test_training_raises_a_reward_of_the_text(tmp_path):
    """Tokens with an id below 100 are rewarded; shuffled rewards teach nothing."""

    def small_ids(completion_ids, **columns):
        return [float(np.mean([i < 100 for i in ids])) for ids in completion_ids]

    def run(fitness):
        tested = trainer(
            tmp_path, small_ids, eval_dataset=ROWS, population_size=20, alpha=0.1, max_steps=25, fitness=fitness
        )
        before = tested.evaluate()["eval_reward"]
        tested.train()
        return before, tested.evaluate()["eval_reward"]

    before, after = run("reward")
    assert after > before + 0.3
    before, null = run("shuffled")
    assert null < after - 0.3


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


def test_step_indices_change_with_epoch_and_seed():
    one, two = (np.concatenate([step_indices(50, 10, 0, s) for s in steps]) for steps in (range(5), range(5, 10)))
    assert (one != two).any() and (one != np.concatenate([step_indices(50, 10, 1, s) for s in range(5)])).any()
    # all prompts a step: the order would only change rounding
    assert step_indices(5, 5, 3, 7).tolist() == [0, 1, 2, 3, 4]


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


def test_early_stopping_of_transformers(tmp_path):
    # greedy text does not change with so small an alpha: the evaluation never improves on the first
    tested = trainer(
        tmp_path, callbacks=[EarlyStoppingCallback(2)], alpha=1e-9, max_steps=20, eval_dataset=ROWS,
        eval_strategy="steps", eval_steps=1, metric_for_best_model="reward", greater_is_better=True,
    )  # fmt: skip
    tested.train()
    assert tested.state.global_step == 3
    assert tested.state.best_metric == tested.state.log_history[1]["eval_reward"]
    assert tested.state.best_global_step == 1
    wrong = trainer(tmp_path, eval_dataset=ROWS, eval_strategy="steps", eval_steps=1, metric_for_best_model="acuracy")
    with pytest.raises(ValueError, match="metric_for_best_model: 'eval_acuracy' is not one of .*'eval_reward'"):
        wrong.train()


def test_tensorboard(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    tested = trainer(tmp_path, report_to="tensorboard", eval_dataset=ROWS[:2], eval_strategy="steps", eval_steps=2)
    tested.train()
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/reward")] == [
        (log["step"], pytest.approx(log["reward"])) for log in tested.state.log_history if "reward" in log
    ]
    assert {"train/reward_std", "train/completions", "eval/reward"} <= set(events.Tags()["scalars"])


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


def test_a_metric_called_reward_does_not_stand_in_for_the_reward(tmp_path):
    def reward(completion_ids, log_metric, **columns):
        log_metric("reward", -1.0)
        return token_sum(completion_ids)

    tested = trainer(tmp_path, reward, eval_dataset=ROWS[:3])
    (completions,) = tested.engine.generate("eval")
    assert tested.evaluate() == {"eval_reward": np.mean([sum(ids) for _, ids in completions])}


def test_the_progress_bar_shows_reward_and_accuracy(tmp_path, capsys):
    def reward(completion_ids, log_metric, **columns):
        log_metric("accuracy", 0.25)
        return token_sum(completion_ids)

    tested = trainer(tmp_path, reward, disable_tqdm=False, max_steps=3)
    tested.train()
    shown = capsys.readouterr().err
    assert "3/3" in shown and "accuracy=0.250" in shown and "reward=" in shown and "members/s=" in shown


# ---- data sets and conversations


def test_a_dataset_of_the_datasets_library(tmp_path):
    import datasets

    plain, other = trainer(tmp_path), trainer(tmp_path, rows=datasets.Dataset.from_list(ROWS))
    plain.train(), other.train()
    assert plain.engine.master.tobytes() == other.engine.master.tobytes()


def test_conversational_prompts(tmp_path):
    seen = []

    def reward(prompts, completions, answer, **columns):
        seen.append((prompts, completions, answer))
        return [float(len(c[0]["content"])) for c in completions]

    rows = [{"prompt": [{"role": "user", "content": text}], "answer": text} for text in ("hi", "there")]
    tested = trainer(tmp_path, reward, rows, max_steps=1)
    tested.train()
    prompts, completions, answer = seen[0]
    assert prompts == [row["prompt"] for row in rows] and answer == ["hi", "there"]
    assert all(len(c) == 1 and c[0]["role"] == "assistant" and isinstance(c[0]["content"], str) for c in completions)
    rendered = [tokenizer().apply_chat_template(p, tokenize=False, add_generation_prompt=True) for p in prompts]
    as_text = trainer(tmp_path, rows=[{"prompt": text} for text in rendered])
    assert (as_text.train_prompts.ids == tested.train_prompts.ids).all()


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


def test_a_half_precision_model_is_saved_in_its_dtype(tmp_path):
    tested = trainer(tmp_path, model=random_model().to(torch.bfloat16))
    tested.train()
    tested.save_model(tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    view = tested.engine.layout.views(tested.engine.master)["model.norm.weight"]
    assert (loaded.model.norm.weight == torch.from_numpy(view).to(torch.bfloat16)).all()


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


def test_save_total_limit_keeps_the_newest(tmp_path):
    saving(tmp_path, save_total_limit=2, max_steps=4).train()
    assert checkpoints(tmp_path) == ["checkpoint-3", "checkpoint-4"]


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


def test_a_full_disk_during_a_checkpoint_leaves_nothing_of_it(tmp_path):
    def until_full():
        tested = saving(tmp_path, max_steps=2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))  # the model has 80 kB
        with pytest.raises(OSError, match="the checkpoint could not be written .*Make room, or set save_total_limit"):
            tested.train()
        assert tested.state.global_step == 1 and checkpoints(tmp_path) == []
        # once there is room, the same trainer goes on, with the checkpoint first
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        tested.train()
        assert checkpoints(tmp_path) == ["checkpoint-1", "checkpoint-2"]

    assert in_child(until_full) == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("sigma", 0.1), ("alpha", 0.1), ("population_size", 5), ("seed", 7), ("fitness", "shuffled"), ("arm", "other"),
     ("prompts_per_step", 3), ("max_completion_length", 5), ("chunk_rows", 2), ("decoder", "generate")],
)  # fmt: skip
def test_resuming_with_other_settings_is_refused(tmp_path, name, value):
    saving(tmp_path, max_steps=1).train()
    with pytest.raises(ValueError, match=f"is of a run with {name}=.*, this one has {value!r}: use the same settings"):
        saving(tmp_path, **{name: value}).train(resume_from_checkpoint=True)


def test_resuming_with_other_prompts_is_refused(tmp_path):
    saving(tmp_path, max_steps=1).train()
    with pytest.raises(ValueError, match="is of a run with prompts_per_step=8, this one has 7"):
        saving(tmp_path, rows=ROWS[1:]).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="is of a run with prompts_digest="):
        saving(tmp_path, rows=[*ROWS[1:], {"prompt": "z", "number": 8}]).train(resume_from_checkpoint=True)


def test_more_steps_and_other_workers_are_no_other_run(tmp_path):
    saving(tmp_path, max_steps=1).train()
    resumed = saving(tmp_path, max_steps=2, workers=2, logging_steps=2)
    assert resumed.train(resume_from_checkpoint=True).global_step == 2
    resumed.engine.close()


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
