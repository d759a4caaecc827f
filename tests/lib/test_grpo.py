"""The gradient arms: every setting of TRL is stated, what runs cost is counted, and nothing is lost or swallowed."""

import dataclasses
import itertools
import math
import re
import time

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset
from grpo_runs import QUIET, SAVING, SETTINGS, adapted, built, length_reward, rows, same, weights
from helpers import fails_later, random_model, refused
from transformers import TrainerCallback, TrainerState, TrainingArguments

from evoalign_lib import _checkpoints, grpo, tiny
from evoalign_lib.engines.local import Prompts
from evoalign_lib.essa import lora_config
from evoalign_lib.rewards import RewardError

# ---- settings

# fields of TRL's configurations that a run's mathematics does not depend on, or only through one that is stated
IRRELEVANT = """
of how and where a model is loaded: model_init_kwargs trust_remote_code ds3_gather_for_generation
of logging: log_completions log_completions_hub_repo log_multimodal log_unique_prompts num_completions_to_print
of evaluation, of which TRL does none: num_generations_eval eval_packing
of memory, and padding, which is masked: activation_offloading pad_to_multiple_of
follows from steps_per_generation: generation_batch_size
no tools: max_tool_calling_iterations
sync_ref_model is off: ref_model_mixup_alpha ref_model_sync_steps
use_adaptive_entropy is off: entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target
of other values of loss_type: sapo_temperature_neg sapo_temperature_pos vespo_k_neg vespo_k_pos vespo_lambda_neg
the same: vespo_lambda_pos
use_transformers_continuous_batching is off: transformers_continuous_batching_config
deprecated: use_transformers_paged pad_token
filtered_sft gives token ids, no text to prepare, pack or cut: chat_template_path dataset_kwargs dataset_num_proc
the same: dataset_text_field eos_token packing_strategy truncation_mode
vllm_mode is colocate: vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port
vllm_importance_sampling_correction is off: vllm_importance_sampling_mode vllm_importance_sampling_cap
the same: vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
"""
VLLM = {"eos_ids": [1, 2], "max_model_length": 80, "gpu_memory": 0.2}


class Stated(Exception):
    """Raised in the place of making a configuration."""


def tuned(folder="x", data=(([1], [2]),), model=None, **changed):
    settings = {"seed": 0, "learning_rate": 3e-3, "batch_size": 3} | QUIET | changed
    model = tiny.load("A0")[0] if model is None else model
    return grpo.filtered_sft(model, tiny.tokenizer(), list(data), output_dir=str(folder), **settings)


@pytest.mark.parametrize(
    ("name", "make"),
    [("GRPOConfig", lambda: grpo.config("dapo", output_dir="x", **SETTINGS))]
    + [("RLOOConfig", lambda: grpo.config("rloo", output_dir="x", **SETTINGS))]
    + [("GRPOConfig", lambda: grpo.config("grpo", output_dir="x", vllm=VLLM, **SETTINGS))]
    + [("SFTConfig", tuned)],
)
def test_every_setting_of_trl_is_stated_or_known_to_be_irrelevant(monkeypatch, name, make):
    fields = {f.name for f in dataclasses.fields(getattr(trl, name))}
    general = {f.name for f in dataclasses.fields(TrainingArguments)}

    def record(**settings):
        raise Stated(settings)

    monkeypatch.setattr(trl, name, record)
    with pytest.raises(Stated) as raised:
        make()
    (stated,) = raised.value.args
    assert stated.keys() <= fields | general
    # TRL gives these general ones other defaults than transformers
    assert {"learning_rate", "bf16", "gradient_checkpointing", "lr_scheduler_type", "optim"} <= stated.keys()
    irrelevant = {field for line in IRRELEVANT.strip().splitlines() for field in line.split(": ")[1].split()}
    unknown = fields - general - stated.keys() - irrelevant
    if not stated.get("use_vllm"):
        unknown = {f for f in unknown if not f.startswith("vllm_")}
    assert not unknown, f"TRL {trl.__version__}: state these in grpo.py, or add them to IRRELEVANT with the reason"
    assert not irrelevant & stated.keys()


REFUSED = {
    "grpo": {
        "num_generations": [1], "beta": [-0.01, math.nan], "learning_rate": [0.0, math.nan], "steps": [0],
        "prompts_per_step": [0], "max_completion_length": [0], "micro_batch": [3, 0], "scale_rewards": ["std"],
        "temperature": [0.7], "loss_type": ["dapo"], "bf16": [True], "max_steps": [5], "reward_weights": [[1.0]],
        "per_device_train_batch_size": [4],
    },
    "rloo": {"scale_rewards": ["group"], "restore_callback_states_from_checkpoint": [True]},
    "dapo": {"epsilon_high": [0.2]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("arm", "name", "value"), [(arm, n, v) for arm, changed in REFUSED.items() for n, vs in changed.items() for v in vs]
)
def test_settings_that_are_refused(arm, name, value):
    with pytest.raises(ValueError, match=f"{name}={re.escape(repr(value))}"):
        grpo.config(arm, output_dir="x", **SETTINGS | {name: value})


def half():
    model = tiny.load("A0")[0]
    model.model.layers[1].mlp.to(torch.float16)  # model.dtype is that of the first parameter
    return model


A0, FROM = str(tiny.bases_folder() / "A0"), [{"prompt": [{"from": "human", "value": "1+1"}]}] * 2
test_what_is_refused = refused(
    (lambda _: grpo.config("ppo", output_dir="x", **SETTINGS), "arm='ppo'"),
    (lambda _: grpo.shared(8, None, 3), "8 completions"),
    (lambda _: grpo.shared(9, 2, 3), "micro_batch=2"),
    (lambda folder: built(folder, model=half()), "weights in torch.float16"),
    (lambda _: tuned(model=half()), "weights in torch.float16"),
    (lambda folder: built(folder, model=A0, model_init_kwargs={"dtype": "bfloat16"}), "weights in torch.bfloat16"),
    (lambda folder: built(folder, model=random_model(), beta=0.04), "beta=0.04: .* by name, and this model has none"),
    *((lambda folder, arm=arm: built(folder, arm, data=FROM), "row 0 .*'from'") for arm in ("grpo", "rloo")),
    (lambda _: tuned(data=[]), "no completion passed the filter"),
    (lambda _: tuned(weight_decay=0.1), "weight_decay=0.1: it is fixed at 0.0"),
    call=lambda make, tmp_path: make(tmp_path),
)


def test_a_model_by_name_is_in_float32(tmp_path):
    assert built(tmp_path, model=A0)[0].model.dtype == torch.float32


def test_numbers_of_numpy_and_the_older_name_of_dtype():
    numpy = {"seed": np.int64(3), "learning_rate": np.float32(0.5), "model_init_kwargs": {"torch_dtype": "bfloat16"}}
    same = {"seed": 3, "learning_rate": 0.5, "model_init_kwargs": {"dtype": "bfloat16"}}
    texts = {grpo.config("grpo", output_dir="x", **SETTINGS | given).to_json_string() for given in (numpy, same)}
    assert len(texts) == 1


def test_processes_share_a_step(monkeypatch):
    assert [grpo.shared(64, None, 1), grpo.shared(64, 16, 8), grpo.shared(12, 3, 2)] == [(64, 64), (8, 8), (6, 3)]
    monkeypatch.setenv("WORLD_SIZE", "2")  # said, but nothing here connects them
    with pytest.raises(ValueError, match="2 processes were launched and TRL has found 1"):
        grpo.config("grpo", output_dir="x", **SETTINGS)


# ---- what a run does


class Gradients(TrainerCallback):
    """The gradient of each step, as the optimiser gets it."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append(torch.cat([p.grad.flatten() for p in model.parameters()]).clone())


def test_a_micro_batch_changes_gradients_by_rounding_only(tmp_path):
    """Completions of unequal length in every part: a mean of means would differ from the mean.

    Of all losses dapo's mean is over the tokens of the whole step, where that shows most. (`test_grpo_processes` splits
    the steps of grpo and rloo.)
    """
    found = []
    for micro_batch in (None, 2):
        gradients = Gradients()
        trainer, budget = built(tmp_path, "dapo", callbacks=[gradients], beta=0.04, micro_batch=micro_batch)
        start = weights(trainer.model)
        trainer.train()
        moved = torch.cat([(p - start[name]).flatten() for name, p in weights(trainer.model).items()])
        found.append((gradients.steps, moved, budget.spent(1)["generated_tokens"]))
    (whole, moved, tokens), (parts, moved_parts, tokens_parts) = found
    assert tokens == tokens_parts and len(whole) == len(parts) == 2
    assert (whole[0] - parts[0]).norm() < 1e-5 * whole[0].norm()
    # measured: 3e-7 of the gradient, and 1e-5 of the path of two steps, where Adam enlarges the smallest gradients
    assert (moved - moved_parts).norm() < 1e-3 * moved.norm()


def test_weights_in_bfloat16_are_what_rounding_leaves_of_a_step(tmp_path):
    """A step from rounded weights, rounded: nothing else differs, neither gradients nor moments."""

    def rounded(found):
        return {name: p.bfloat16().float() for name, p in found.items()}

    start = weights(tiny.load("A0")[0])
    trainer, _ = built(tmp_path, "grpo_rounded", steps=1, beta=0.1)
    # the reference, too, is the model that the run starts from
    for model in (trainer.model, trainer.ref_model):
        assert not same(start, weights(model)) and same(rounded(start), weights(model))
    trainer.train()
    model = tiny.load("A0")[0]
    model.load_state_dict(rounded(weights(model)), strict=False)  # the head is tied
    whole, _ = built(tmp_path, "grpo", steps=1, beta=0.1, model=model)
    whole.train()
    moments = [value for state in whole.optimizer.state.values() for name, value in state.items() if name != "step"]
    assert len(moments) == 2 * len(start) and {t.dtype for t in [*moments, *whole.model.parameters()]} == {
        torch.float32
    }
    assert not same(weights(whole.model), weights(trainer.model))
    assert same(rounded(weights(whole.model)), weights(trainer.model))


def test_a_model_that_reads_padding_is_refused_where_there_is_some(tmp_path):
    model = random_model("rwkv")
    data = [{"prompt": prompt} for prompt in ("a", "bc", "d")]
    with pytest.raises(ValueError, match="'rwkv'.*one length"):
        built(tmp_path, model=model, data=data, beta=0.0)
    built(tmp_path, model=model, data=data[::2], beta=0.0)


def test_the_reference_has_the_weights_that_the_run_starts_from(tmp_path):
    """TRL loads it by the model's name: alone, it would compare with a model that nobody trains."""

    def changed_model():
        model = tiny.load("A0")[0]
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
        return model

    start = weights(changed_model())
    for arm in ("grpo", "rloo"):
        trainer, _ = built(tmp_path, arm, model=changed_model(), beta=0.04)
        trainer.train()
        assert same(weights(trainer.ref_model), start) and not same(weights(trainer.model), start)
        # before the first update the policy is its own reference
        first, second = (entry["kl"] for entry in trainer.state.log_history if "kl" in entry)
        assert abs(first) < 1e-6 < abs(second)
    assert built(tmp_path)[0].ref_model is None


# ---- budget


class Busy(TrainerCallback):
    """Uses 0.2 s of CPU time after each step, as an evaluation would."""

    def on_step_end(self, args, state, control, **kwargs):
        end = time.process_time() + 0.2
        while time.process_time() < end:
            pass


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("arm", "beta", "passes"),
    [("grpo", 0.04, 5), ("rloo", 1, 6)]
    + [pytest.param(*case, marks=SLOW) for case in (("grpo", 0, 4), ("rloo", 0, 5))],
)
def test_the_budget_is_what_a_count_by_hand_gives(tmp_path, arm, beta, passes):
    seen = []

    def reward(prompts, completions, completion_ids, **columns):
        seen.append((prompts, completion_ids))
        return length_reward(prompts, completions)

    trainer, budget = built(tmp_path, arm, reward, beta=beta, callbacks=[Busy()])
    scored = []  # forward passes over a step's completions, policy and reference, besides those that generate

    def count(module, arguments, inputs):
        if "labels" in inputs:
            scored.append(torch.is_grad_enabled())

    for model in filter(None, (trainer.model, trainer.ref_model)):
        model.register_forward_pre_hook(count, with_kwargs=True)
    started = time.process_time()
    trainer.train()
    total = time.process_time() - started
    spent = budget.spent(1000)
    assert spent["completions"] == sum(len(ids) for _, ids in seen) == 2 * 2 * 4
    assert spent["generated_tokens"] == sum(len(row) for _, ids in seen for row in ids)
    # the very prompts that ES decodes
    lengths = Prompts(rows(), tiny.tokenizer()).lengths
    assert spent["prompt_tokens"] == 4 * lengths.sum()
    # generation, passes without gradient, and three for a pass with its gradient
    assert passes == 1 + (scored.count(False) + 3 * scored.count(True)) / 2 and scored.count(True) == 2
    assert spent["forward_flops"] == 2 * 1000 * passes * (spent["prompt_tokens"] + spent["generated_tokens"])
    assert 0 < spent["core_seconds"] < total - 2 * 0.2
    before = budget.state()
    trainer.evaluate(Dataset.from_list(rows()))
    assert len(seen) == 4 and budget.state() == before  # scored, not counted


PARTS = {"micro_batch": 4}
RESUMED = [("grpo", None, PARTS), ("rloo", None, PARTS), ("grpo", "new", {}), ("rloo", "own", {"beta": 0})]
RESUMED = [("grpo_rounded", None, PARTS), ("grpo", "own", {}), *(pytest.param(*case, marks=SLOW) for case in RESUMED)]


@pytest.mark.parametrize(("arm", "adapter", "changed"), RESUMED)
def test_a_resumed_run_has_the_bits_and_the_budget_of_an_uninterrupted_one(tmp_path, arm, adapter, changed):
    """With TRL's reference beside an adapter, transformers alone would go on from the adapter of the start."""
    settings = {"steps": 3, "beta": 0.04, "data": rows(6), **SAVING} | changed
    settings |= {"given": {"peft_config": lora_config(4)}} if adapter == "new" else {}

    def made():
        return built(tmp_path, arm, model=adapted() if adapter == "own" else None, **settings)

    whole, budget = made()
    whole.train()
    saved = TrainerState.load_from_json(str(tmp_path / "checkpoint-2/trainer_state.json"))
    spent = saved.stateful_callbacks["Budget"]["attributes"]
    resumed, again = made()
    start = weights(resumed.model)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert same(weights(resumed.model), weights(whole.model)) and not same(start, weights(whole.model))
    if whole.ref_model is not None:
        assert same(weights(resumed.ref_model), weights(whole.ref_model))
    ours, theirs = again.spent(1000), budget.spent(1000)
    assert 0 < spent["core_seconds"] < ours.pop("core_seconds") and theirs.pop("core_seconds")
    assert ours == theirs and ours["completions"] == 24 and again.counts == budget.counts
    assert spent["completions"] == 16
    rng, files = np.random.default_rng(0), sorted(p for p in (tmp_path / "checkpoint-2").rglob("*") if p.is_file())
    for path in files:  # one flipped bit in any of its files
        data = path.read_bytes()
        damaged, bit = bytearray(data), int(rng.integers(8 * len(data)))
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="checkpoint-2' is damaged"):
            resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        path.write_bytes(data)


def test_a_checkpoint_counts_once_it_is_complete_and_a_users_folders_stay(tmp_path):
    for mine in ("checkpoint-0", "checkpoint-best"):
        (tmp_path / mine).mkdir(), (tmp_path / mine / "notes.txt").write_text("a user's")
    trainer, _ = built(tmp_path, steps=3, data=rows(6), **SAVING | {"save_steps": 1, "save_total_limit": 2})
    trainer.train()
    names = {"checkpoint-0", "checkpoint-best", "checkpoint-2", "checkpoint-3"}
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == names
    (tmp_path / "checkpoint-3" / _checkpoints.SUMS).unlink()  # a kill left the newest without
    assert [path.name for path in _checkpoints.complete(tmp_path)] == ["checkpoint-2"]
    for path in tmp_path.glob("checkpoint-[23]/*"):
        path.unlink()
    for bad, resume in ((tmp_path, True), *((bad, str(bad)) for bad in (tmp_path / "checkpoint-0", tmp_path / "none"))):
        with pytest.raises(ValueError, match=f"complete.*{re.escape(str(bad))}|{re.escape(str(bad))}.*complete"):
            trainer.train(resume_from_checkpoint=resume)


def test_checkpoints_without_sums_are_resumed_with_a_warning(tmp_path, monkeypatch):
    """TRL itself writes such."""
    built(tmp_path, **SAVING | {"save_steps": 1, "save_total_limit": 5})[0].train()
    assert torch.load(tmp_path / "checkpoint-2/training_args.bin", weights_only=False).save_total_limit == 5
    said = []
    monkeypatch.setattr(_checkpoints.logger, "warning", lambda *text: said.append(text))
    assert _checkpoints.sound("last", tmp_path) == str(tmp_path / "checkpoint-2") and not said
    (tmp_path / "checkpoint-2" / _checkpoints.SUMS).unlink()
    assert _checkpoints.sound(True, tmp_path) == str(tmp_path / "checkpoint-1") and not said
    (tmp_path / "checkpoint-1" / _checkpoints.SUMS).unlink()
    for asked in (str(tmp_path / "checkpoint-2"), "True", True):
        assert _checkpoints.sound(asked, tmp_path) == str(tmp_path / "checkpoint-2")
    resumed, _ = built(tmp_path, steps=3, **SAVING)
    resumed.train(resume_from_checkpoint="last")
    assert resumed.state.log_history[0]["step"] == 1 and resumed.state.global_step == 3
    assert len(said) == 4 and _checkpoints.sound("false", tmp_path) is None


# ---- nulls and sanity arms


@pytest.mark.parametrize("arm", ["grpo", "rloo"])
def test_prompts_and_failures_are_treated_as_by_es(tmp_path, arm):
    answer = {"role": "assistant", "content": "It is "}
    data = [{"prompt": [{"role": "user", "content": asked}, answer]} for asked in ("1+1", "2+2")]
    tested, budget = built(tmp_path, arm, fails_later, data=data, given={"reward_floor": 0.0})
    with pytest.raises(RewardError, match="'fails_later' gave ZeroDivisionError"):
        tested.train()
    found = Prompts(data, tiny.tokenizer())  # whose answer goes on
    assert budget.total["prompt_tokens"] == 8 * found.width and tested.state.global_step == 1


def test_random_rewards_are_those_of_seed_and_step():
    def draws(seed, step, n=400, completions="x"):
        state = TrainerState(global_step=step)
        return grpo.random_reward(seed)(prompts=["p"] * n, completions=[completions] * n, trainer_state=state, target=1)

    assert draws(0, 5) == draws(0, 5, completions="another text")
    others = [draws(seed, step) for seed, step in ((0, 5), (0, 6), (1, 5), (5, 0), (0, 56), (0, 0))]
    # pairs of runs and steps agree as coins do: 0.5 +- 5 standard errors of 0.5 / sqrt(400)
    for a, b in itertools.combinations(others, 2):
        assert abs(np.mean(np.equal(a, b)) - 0.5) < 0.125
    many = [r for step in range(50) for r in draws(7, step)]
    assert set(many) == {0.0, 1.0} and abs(np.mean(many) - 0.5) < 5 * 0.5 / 20_000**0.5
    assert grpo.random_reward(3)(prompts=["p"], completions=["x"]) in ([0.0], [1.0])


def test_a_model_that_cannot_be_written_is_in_a_checkpoint(tmp_path):
    trainer, _ = built(tmp_path, **SAVING)
    trainer.train()
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="checkpoint-2.*/file"):
        trainer.save_model(str(tmp_path / "file/model"))


def test_fine_tuning_learns_completions_with_their_end_and_no_prompt(tmp_path):
    tok = tiny.tokenizer()
    prompts = [tok(row["prompt"])["input_ids"] for row in rows(6)]
    data = [(ids, tok("1" * (i + 1))["input_ids"] + [tok.eos_token_id]) for i, ids in enumerate(prompts)]
    trainer = tuned(tmp_path, data, batch_size=len(data), epochs=6)
    (batch,) = trainer.get_train_dataloader()
    learned = []
    for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        start = next(i for i, label in enumerate(labels) if label != -100)
        completion = [label for label in labels if label != -100]
        assert ids[start:][: len(completion)] == labels[start:][: len(completion)] == completion
        learned.append((ids[:start], completion))
    assert sorted(learned) == sorted(data)
    with torch.no_grad():
        logits = trainer.model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten()).item()
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] == pytest.approx(expected, rel=1e-4)
    assert len(losses) == 6 and losses[-1] < 0.5 * losses[0]
