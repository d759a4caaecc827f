"""Runs of each variant: the step by hand, replay, resume, and the refusal of other settings."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import PROMPTS, chained, random_model, reference_update, tokenizer
from transformers import AutoModelForCausalLM, EarlyStoppingCallback, TrainerCallback

from evoalign_lib import _ledger_lines, ledger, noise, precision
from evoalign_lib.es import ESConfig, ESTrainer, step_indices

STEPS = 4
ROWS = [{"prompt": p, "number": i} for i, p in enumerate(PROMPTS)]
VARIANTS = {
    "antithetic": {"antithetic": True},
    "ranks": {"fitness_shaping": "centred_ranks"},
    "schedules": {"sigma_schedule": "cosine", "alpha_schedule": "linear", "alpha_final_fraction": 0.25},
    "sampling": {"sampling": "common", "num_generations": 2},
    "all": {
        "antithetic": True, "fitness_shaping": "centred_ranks", "sigma_schedule": "linear", "alpha_schedule": "cosine",
        "sampling": "common",
    },
    "random": {"antithetic": True, "fitness_shaping": "centred_ranks", "fitness": "random"},
    "decay": {"anchor_decay": 0.1},
    "low rank": {"perturbation": "low_rank", "rank": 2},
    "low rank, one by one": {
        "perturbation": "low_rank", "antithetic": True, "chunk_rows": 6, "noise": "byte_sum",
        "sigma_schedule": "linear",
    },
}  # fmt: skip


def token_sum(completion_ids, **columns):
    return [float(sum(ids)) for ids in completion_ids]


def trainer(folder: Path, reward=token_sum, model=None, callbacks=None, **changed) -> ESTrainer:
    config = {
        "output_dir": str(folder), "population_size": 6, "sigma": 0.05, "alpha": 0.05, "max_steps": STEPS,
        "prompts_per_step": 3, "max_completion_length": 5, "workers": 1, "disable_tqdm": True, "report_to": "none",
        "save_strategy": "no", "seed": 5,
    } | changed  # fmt: skip
    model = random_model() if model is None else model
    return ESTrainer(model, reward, ESConfig(**config), ROWS, ROWS[:2], tokenizer(), callbacks)


def digest(tested: ESTrainer) -> str:
    return precision.digest(tested.engine.layout, tested.engine.master)


class Stop(Exception):
    pass


def stopping(step: int):
    def token_sum(completion_ids, trainer_state, **columns):
        if trainer_state.global_step == step:
            raise Stop
        return [float(sum(ids)) for ids in completion_ids]

    return token_sum


class Ending(TrainerCallback):
    """Stops after some steps."""

    def __init__(self, step: int):
        self.last = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.last


# ---- every variant


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_replay_and_resume(tmp_path, settings):
    whole = trainer(tmp_path / "whole", **settings)
    whole.train()
    run = ledger.read(tmp_path / "whole" / ledger.NAME)
    assert ledger.replay(run, random_model()).tobytes() == whole.engine.master.tobytes()
    # without the variant it is another run
    plain = trainer(tmp_path / "plain", fitness=settings.get("fitness", "reward"))
    plain.train()
    assert digest(plain) != digest(whole)
    # stopped, and resumed from the ledger and from a checkpoint
    for saving in ({}, {"save_strategy": "steps", "save_steps": 2}):
        folder = tmp_path / f"run{len(saving)}"
        if "fitness" in settings:
            trainer(folder, callbacks=[Ending(3)], **settings, **saving).train()
        else:
            with pytest.raises(Exception, match="Stop"):
                trainer(folder, stopping(3), **settings, **saving).train()
        resumed = trainer(folder, **settings, **saving)
        resumed.train(resume_from_checkpoint=True)
        assert digest(resumed) == digest(whole) and resumed.counts == whole.counts
        assert [log.get("reward") for log in resumed.state.log_history] == [
            log.get("reward") for log in whole.state.log_history
        ]


@pytest.mark.parametrize("name", ["antithetic", "ranks", "schedules", "sampling", "decay", "low rank"])
def test_a_run_with_a_variant_is_not_resumed_without_it(tmp_path, name):
    for there, here in (({}, VARIANTS[name]), (VARIANTS[name], {})):
        folder = tmp_path / f"run{len(there)}"
        trainer(folder, callbacks=[Ending(1)], **there).train()
        named = "|".join(name[:5] for name in here | there)
        with pytest.raises(ValueError, match=f"is of a run with ({named}).*use the same settings"):
            trainer(folder, **here).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("name", VARIANTS)
def test_an_older_format_says_who_can_replay(tmp_path, name):
    tested = trainer(tmp_path, max_steps=1, **VARIANTS[name])
    tested.train()
    path = tmp_path / ledger.NAME
    head, *rest = map(json.loads, path.read_bytes().splitlines())
    written = 5 if name.startswith("low rank") else 4
    assert head["evoalign_ledger"] == written
    assert ("rank" in head["settings"], "anchor_decay" in head["settings"]) == (written == 5, name == "decay")
    # sampled rewards are rewards: a reader of format 1 replays them rightly
    least = 1 if name == "sampling" else written
    for number in (1, 4, 5):
        path.write_bytes(chained([head | {"evoalign_ledger": number}, *rest]))
        if number < least:
            with pytest.raises(ledger.LedgerError, match=f"is {number}, but the settings need format {least}"):
                ledger.read(path)
        else:
            assert ledger.replay(path, random_model()).tobytes() == tested.engine.weights.float32().tobytes()


def test_a_ledger_from_before_the_variants(tmp_path):
    """Its header names none of them: it replays, goes on without them, and is refused with one."""
    whole, cut = trainer(tmp_path / "whole"), trainer(tmp_path / "run", callbacks=[Ending(2)])
    whole.train(), cut.train()
    path = tmp_path / "run" / ledger.NAME
    head, *rest = map(json.loads, path.read_bytes().splitlines())
    head["evoalign_ledger"] = 1
    for name in (*_ledger_lines._SINCE[4], *_ledger_lines._EVALUATION):
        head["settings"].pop(name, None)
    path.write_bytes(chained([head, *rest]))
    assert ledger.replay(path, random_model()).tobytes() == cut.engine.master.tobytes()
    with pytest.raises(ValueError, match="with antithetic=False, this one has True"):
        trainer(tmp_path / "run", antithetic=True).train(resume_from_checkpoint=True)
    resumed = trainer(tmp_path / "run")
    resumed.train(resume_from_checkpoint=True)
    assert digest(resumed) == digest(whole)
    # in the form that it has
    assert (
        b'"hash"' not in path.read_bytes()
        and path.read_bytes().count(b'"prev"') == len(path.read_bytes().splitlines()) - 1
    )


# ---- antithetic pairs


def test_antithetic_steps_by_hand(tmp_path, monkeypatch):
    """Members, update and ranks in NumPy and transformers; and the update draws each pair's noise once."""
    tested = trainer(tmp_path, antithetic=True, decoder="generate", max_steps=2)
    drawn, update = [], precision.MasterWeights.update
    monkeypatch.setattr(
        precision.MasterWeights, "update", lambda self, keys, c: drawn.append(len(keys)) or update(self, keys, c)
    )
    layout, master, model = tested.engine.layout, tested.engine.master.copy(), random_model()
    tested.train()
    assert drawn == [3, 3]
    for step in range(2):
        keys = [noise.member_key(noise.run_key("es", 5), step, pair) for pair in range(3)]
        rewards = []
        for key in keys:
            eps = noise.noise_vector(layout, key)
            for member in (master + np.float32(0.05) * eps, master - np.float32(0.05) * eps):
                with torch.no_grad():
                    for name, view in layout.views(member).items():
                        dict(model.named_parameters())[name].copy_(torch.from_numpy(view))
                sums = []
                for row in step_indices(8, 3, 5, step):
                    ids = tokenizer()(ROWS[row]["prompt"])["input_ids"]
                    new = model.generate(torch.tensor([ids]), max_new_tokens=5, do_sample=False)[0, len(ids) :]
                    sums.append(float(new.sum()))
                rewards.append(math.fsum(sums) / 3)
        z = (np.array(rewards) - np.mean(rewards)) / np.std(rewards)
        c = np.array([np.float32(0.05 * (z[2 * i] - z[2 * i + 1]) / 6) for i in range(3)])
        master = reference_update(master, layout, np.array(keys, np.uint64), c)
    assert tested.engine.master.tobytes() == master.tobytes()


# ---- schedules


def test_sigma_and_alpha_of_each_step(tmp_path):
    settings = {"sigma_schedule": "linear", "sigma_final_fraction": 0.5, "alpha_schedule": "cosine", "max_steps": 5}
    tested = trainer(tmp_path, **settings)
    seen, evaluate = [], tested.engine.evaluate
    tested.engine.evaluate = lambda members, sigma, *rest: seen.append(sigma) or evaluate(members, sigma, *rest)
    before, norms = tested.engine.master.copy(), []
    tell = tested.tell

    def measured(members, fitness):
        tied = tell(members, fitness)
        norms.append(np.linalg.norm(tested.engine.master - before))
        before[:] = tested.engine.master
        return tied

    tested.tell = measured
    tested.train()
    assert seen == pytest.approx([0.05, 0.04375, 0.0375, 0.03125, 0.025])
    alphas = 0.05 * np.array([1, 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2, 0.55, 0.1 + 0.9 * (1 - math.sqrt(0.5)) / 2, 0.1])
    # z-scores have the mean square 1
    assert norms == pytest.approx(alphas * math.sqrt(tested.engine.layout.d / 6), rel=0.1)
    assert [log["sigma"] for log in tested.state.log_history] == pytest.approx(seen)
    assert [log["alpha"] for log in tested.state.log_history] == pytest.approx(alphas)


def test_a_run_with_a_schedule_cannot_be_prolonged(tmp_path):
    settings = {"alpha_schedule": "linear"}
    tested = trainer(tmp_path, **settings)
    tested.train()
    with pytest.raises(ValueError, match="with max_steps=4, this one has 8: use the same settings"):
        trainer(tmp_path, **settings, max_steps=8).train(resume_from_checkpoint=True)
    tested.args.max_steps = 8
    with pytest.raises(ValueError, match="with max_steps=4, this one has 8"):
        tested.train()


# ---- sampling


def by_inversion(model, prompt: str, uniforms: np.ndarray) -> list[int]:
    """Sample at temperature 1, one token after the other, from the float64 distribution."""
    ids = tokenizer()(prompt)["input_ids"]
    new = []
    for u in uniforms:
        with torch.inference_mode():
            p = model(torch.tensor([ids + new])).logits[0, -1].double().softmax(-1)
        new.append(int((p.cumsum(-1) <= float(u)).sum()))
        if new[-1] == tokenizer().eos_token_id:
            break
    return new


def test_members_sample_with_common_random_numbers(tmp_path):
    seen = []

    def noted(prompts, completion_ids, **columns):
        seen.append(list(zip(prompts, completion_ids, strict=True)))
        return [float(sum(ids)) for ids in completion_ids]

    # so small a sigma that the members are the same model: they must say the same
    tested = trainer(tmp_path / "one", noted, sampling="common", num_generations=2, sigma=1e-9, max_steps=2, alpha=1e-9)
    tested.train()
    assert tested.counts["tied"] == 2 and all(one == seen[0] for one in seen[:6]) and seen[6] == seen[11]
    # by hand: each prompt twice, with other numbers
    model, different = random_model(), 0
    for step in range(2):
        key = noise.sampling_key(noise.run_key("es", 5), step)
        rows = step_indices(8, 3, 5, step)
        for i, (prompt, ids) in enumerate(seen[6 * step]):
            row = rows[i // 2]
            assert prompt == PROMPTS[row]
            u = noise.uniforms(key, np.array([row]), 5, sample=i % 2)[0]
            different += by_inversion(model, prompt, u) != ids
    assert different <= 1  # of 12: a number may fall on the edge between two tokens
    assert len({tuple(ids) for one in seen for _, ids in one}) > 8
    assert tested.budget["completions"] == 2 * 6 * 3 * 2
    assert tested.state.log_history[0]["completions/mean_length"] <= 5


def test_samples_do_not_depend_on_workers_or_chunks(tmp_path):
    ends = set()
    for workers, chunk_rows in ((1, 256), (2, 256), (1, 2), (2, 1)):
        folder = tmp_path / f"{workers}-{chunk_rows}"
        tested = trainer(folder, workers=workers, chunk_rows=chunk_rows, sampling="common", num_generations=2)
        tested.train()
        tested.engine.close()
        ends.add(digest(tested))
    assert len(ends) == 1


# ---- the best weights


EVALUATING = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "max_steps": 8}


def peaking(completion_ids, trainer_state, **columns):
    """Members are compared as ever; the evaluation of the third step is the best."""
    if len(completion_ids) == 2:  # the evaluation set
        return [-abs(trainer_state.global_step - 3.0)] * 2
    return [float(sum(ids)) for ids in completion_ids]


@pytest.mark.parametrize("mode", ["master", "kahan"])
def test_the_best_weights_come_back(tmp_path, mode):
    settings = EVALUATING | {"precision": mode}
    model = random_model().to(torch.bfloat16) if mode == "kahan" else random_model()
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tested = trainer(tmp_path / "run", peaking, model, **settings)
    tested.train()
    assert tested.args.metric_for_best_model == "reward" and tested.args.greater_is_better
    assert (tested.state.best_global_step, tested.state.best_metric, tested.state.global_step) == (3, 0.0, 8)
    run = ledger.read(tmp_path / "run" / ledger.NAME)
    anew = random_model().to(model.dtype)
    anew.load_state_dict(start)
    best, last = ledger.replay(run, anew, 3), ledger.replay(run, anew, 8)
    assert tested.engine.weights.float32().tobytes() == best.tobytes() != last.tobytes()
    assert run.ended and run.weights[8] != tested.engine.weights.digest()
    # the model and what is saved hold them, in the model's dtype
    tested.save_model(tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto")
    values = tested.engine.layout.views(best)
    for name, parameter in saved.named_parameters():
        assert torch.equal(parameter, dict(tested.model.named_parameters())[name])
        assert torch.allclose(parameter.float(), torch.from_numpy(values[name]), atol=0, rtol=2**-8 * (mode == "kahan"))
    # and the run goes on from its own last weights
    tested.args.max_steps = 10
    tested.train()
    assert ledger.verify(run.path, anew).steps == 10
    assert tested.engine.weights.float32().tobytes() == best.tobytes() and tested.state.best_global_step == 3


@pytest.mark.parametrize("saving", [{}, {"save_strategy": "steps", "save_steps": 5}], ids=["ledger", "checkpoint"])
def test_the_best_weights_of_a_resumed_run(tmp_path, saving):
    whole = trainer(tmp_path / "whole", peaking, **EVALUATING)
    whole.train()
    trainer(tmp_path / "run", peaking, callbacks=[Ending(6)], **EVALUATING, **saving).train()
    # the checkpoint's weights are not the model's: the best ones are taken from it, too
    model = random_model(seed=9) if saving else None
    resumed = trainer(tmp_path / "run", peaking, model, **EVALUATING, **saving)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.best_global_step == 3 and digest(resumed) == digest(whole)
    assert weights(resumed.model) == weights(whole.model)


def weights(model) -> bytes:
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters())


def test_early_stopping_has_the_same_patience_after_a_checkpoint(tmp_path):
    settings = EVALUATING | {"save_strategy": "steps", "save_steps": 4}
    callbacks = [EarlyStoppingCallback(3), Ending(5)]
    trainer(tmp_path, peaking, callbacks=callbacks, **settings).train()
    resumed = trainer(tmp_path, peaking, callbacks=[EarlyStoppingCallback(3)], **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    # steps 4, 5 and 6 are worse than 3; the first of them is in the checkpoint
    assert (resumed.state.global_step, resumed.state.best_global_step) == (6, 3)


def test_a_smaller_metric_can_be_better_and_nan_never_is(tmp_path):
    def worsening(completion_ids, trainer_state, log_metric, **columns):
        log_metric("length_loss", abs(trainer_state.global_step - 2.0))
        if len(completion_ids) == 2 and trainer_state.global_step == 1:
            return [None] * 2
        return [float(sum(ids)) for ids in completion_ids]

    tested = trainer(tmp_path, worsening, **EVALUATING, metric_for_best_model="length_loss")
    tested.train()
    assert (tested.state.best_global_step, tested.state.best_metric) == (2, 0.0)
    assert tested.args.greater_is_better is False
    tested = trainer(tmp_path / "nan", worsening, **EVALUATING)
    tested.train()
    assert math.isnan(tested.state.log_history[1]["eval_reward"]) and tested.state.best_global_step > 1


def test_saving_the_best(tmp_path):
    settings = EVALUATING | {"save_strategy": "best", "save_total_limit": 1}
    trainer(tmp_path, peaking, **settings).train()
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-3"]
