"""One run, however it is run: replayed, resumed, on workers, in chunks; and what each variant does otherwise."""

import json
import math

import numpy as np
import pytest
import torch
from es_runs import ROWS, Ending, cut, digest, model_bytes, outcome, read, token_sum, trained, trainer
from helpers import PROMPTS, chained, random_model, tokenizer
from transformers import AutoModelForCausalLM, EarlyStoppingCallback

from evoalign_lib import _ledger_lines, ledger, noise
from evoalign_lib.es import step_indices

SAVING = {"save_strategy": "steps", "save_steps": 2}
VARIANTS = {
    "plain": {},
    "antithetic": {"antithetic": True},
    "fitness_shaping": {"fitness_shaping": "centred_ranks"},
    "sigma_schedule": {"sigma_schedule": "cosine", "alpha_schedule": "linear", "alpha_final_fraction": 0.25},
    "sampling": {"sampling": "common", "num_generations": 2},
    "anchor_decay": {"anchor_decay": 0.1},
    "rank": {"perturbation": "low_rank", "rank": 2},
    "all": {
        "antithetic": True, "fitness_shaping": "centred_ranks", "sigma_schedule": "linear", "alpha_schedule": "cosine",
        "sampling": "common", "fitness": "shuffled",
    },
    "random": {"antithetic": True, "fitness_shaping": "centred_ranks", "fitness": "random"},
    "low rank, one by one": {
        "perturbation": "low_rank", "antithetic": True, "chunk_rows": 6, "noise": "byte_sum",
        "sigma_schedule": "linear",
    },
    "inplace": {"precision": "inplace", "noise": "tied", "dtype": torch.bfloat16},
    "kahan": {"precision": "kahan", "dtype": torch.bfloat16},
}  # fmt: skip
SLOW = {
    "float16": {"precision": "inplace", "dtype": torch.float16},
    "float32": {"precision": "inplace", "noise": "byte_sum", "dtype": torch.float32},
    "kahan float16": {"precision": "kahan", "noise": "byte_sum", "dtype": torch.float16},
    "half master": {"noise": "tied", "dtype": torch.bfloat16},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> dict:
    return outcome(trained(tmp_path_factory.mktemp("plain")))


@pytest.mark.parametrize("variant", [*VARIANTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_ways_of_running_the_same_settings_end_with_the_same_bits(tmp_path, monkeypatch, plain, variant):
    monkeypatch.setattr(ledger, "DIGEST_EVERY", 2)
    settings = {"dtype": torch.float32} | (VARIANTS | SLOW)[variant]
    dtype = settings.pop("dtype")

    def run(name, **more):
        return trained(tmp_path / name, model=random_model().to(dtype), **settings | more)

    whole = run("whole")
    path, expected = tmp_path / "whole" / ledger.NAME, outcome(whole)
    assert (expected["weights"] == plain["weights"]) == (not settings and dtype == torch.float32)
    model = random_model().to(dtype)
    assert ledger.verify(path, model).weights == expected["weights"] and 2 in read(tmp_path / "whole").weights
    assert ledger.replay(path, model).tobytes() == whole.engine.weights.float32().tobytes()
    assert model_bytes(model.float()) == model_bytes(random_model().to(dtype).float())  # which a replay leaves alone
    for name, saving in (("ledger", {}), ("checkpoint", SAVING)):
        if "fitness" in settings:  # which may score nothing
            run(name, callbacks=[Ending(3)], **saving)
        else:
            cut(tmp_path / name, 3, model=random_model().to(dtype), **settings | saving)
        assert outcome(run(name, resume=True, **saving)) == expected
        assert read(tmp_path / name).weights.items() >= read(tmp_path / "whole").weights.items()
    if settings.get("precision", "master") == "master":  # chunks change rounding, not tokens, of which rewards are made
        chunks = {} if "perturbation" in settings else {"chunk_rows": 2}
        assert digest(run("workers", workers=2, **chunks)) == expected["weights"]


def test_a_run_with_a_variant_is_not_resumed_without_it(tmp_path):
    trained(tmp_path / "plain", max_steps=1)
    for name in list(VARIANTS)[1:7]:
        trained(tmp_path / name, max_steps=1, **VARIANTS[name])
        for folder, settings in (("plain", VARIANTS[name]), (name, {})):
            with pytest.raises(ValueError, match=f"with ({name}|num_gen|max_steps|alpha_s|least_m)"):
                trainer(tmp_path / folder, **settings).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("name", ["antithetic", "sampling", "anchor_decay", "rank"])
def test_an_older_format_says_who_can_replay(tmp_path, name):
    tested = trained(tmp_path, max_steps=1, **VARIANTS[name])
    path = tmp_path / ledger.NAME
    head, *rest = map(json.loads, path.read_bytes().splitlines())
    written = 5 if name == "rank" else 4
    assert head["evoalign_ledger"] == written
    assert ("rank" in head["settings"], "anchor_decay" in head["settings"]) == (written == 5, name == "anchor_decay")
    # sampled rewards are rewards: a reader of format 1 replays them rightly
    least = 1 if name == "sampling" else written
    for number in (1, 4, 5):
        path.write_bytes(chained([head | {"evoalign_ledger": number}, *rest]))
        if number < least:
            with pytest.raises(ledger.LedgerError, match=f"is {number}, .* format {least}"):
                ledger.read(path)
        else:
            assert ledger.replay(path, random_model()).tobytes() == tested.engine.weights.float32().tobytes()


def test_a_ledger_from_before_the_variants(tmp_path, plain):
    """Its header names none of them: it replays, goes on without them, in its own form, and is refused with one."""
    tested = trained(tmp_path, callbacks=[Ending(2)])
    path = tmp_path / ledger.NAME
    head, *rest = map(json.loads, path.read_bytes().splitlines())
    head["evoalign_ledger"] = 1
    for name in (*_ledger_lines._SINCE[4], *_ledger_lines._SINCE[1]):
        head["settings"].pop(name, None)
    path.write_bytes(chained([head, *rest]))
    assert ledger.replay(path, random_model()).tobytes() == tested.engine.master.tobytes()
    with pytest.raises(ValueError, match="with antithetic=False, this one has True"):
        trainer(tmp_path, antithetic=True).train(resume_from_checkpoint=True)
    assert outcome(trained(tmp_path, resume=True))["weights"] == plain["weights"]
    first, *others = path.read_bytes().splitlines()
    assert b'"hash"' not in path.read_bytes() and b'"prev"' not in first and all(b'"prev"' in line for line in others)


# ---- schedules


def test_sigma_and_alpha_of_each_step(tmp_path):
    settings = {"sigma_schedule": "linear", "sigma_final_fraction": 0.5, "alpha_schedule": "cosine", "max_steps": 5}
    tested = trainer(tmp_path, **settings)
    seen, evaluate = [], tested.engine.evaluate
    tested.engine.evaluate = lambda members, sigma, *rest: seen.append(sigma) or evaluate(members, sigma, *rest)
    path, tell = [tested.engine.master.copy()], tested.tell
    tested.tell = lambda *told: (tell(*told), path.append(tested.engine.master.copy()))[0]
    tested.train()
    assert seen == pytest.approx([0.05, 0.04375, 0.0375, 0.03125, 0.025])
    alphas = 0.05 * np.array([1, 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2, 0.55, 0.1 + 0.9 * (1 - math.sqrt(0.5)) / 2, 0.1])
    # z-scores have the mean square 1
    norms = [np.linalg.norm(after - before) for before, after in zip(path, path[1:], strict=False)]
    assert norms == pytest.approx(alphas * math.sqrt(tested.engine.layout.d / 6), rel=0.1)
    assert [log["sigma"] for log in tested.state.log_history] == pytest.approx(seen)
    assert [log["alpha"] for log in tested.state.log_history] == pytest.approx(alphas)
    for longer in (trainer(tmp_path, **settings | {"max_steps": 8}), tested):  # it cannot be prolonged
        longer.args.max_steps = 8
        with pytest.raises(ValueError, match="with max_steps=5, this one has 8"):
            longer.train(resume_from_checkpoint=True)


# ---- sampling


def by_inversion(model, prompt: str, uniforms: np.ndarray) -> list[int]:
    """Sample at temperature 0.6, one token after the other, from the float64 distribution."""
    ids, new = tokenizer()(prompt)["input_ids"], []
    for u in uniforms:
        with torch.inference_mode():
            p = model(torch.tensor([ids + new])).logits[0, -1].double().div(0.6).softmax(-1)
        new.append(int((p.cumsum(-1) <= float(u)).sum()))
        if new[-1] == tokenizer().eos_token_id:
            break
    return new


def test_members_sample_with_common_random_numbers(tmp_path):
    seen = []

    def noted(prompts, completion_ids, **columns):
        seen.append(list(zip(prompts, completion_ids, strict=True)))
        return token_sum(completion_ids)

    # so small a sigma that the members are the same model: they must say the same
    settings = {"sampling": "common", "num_generations": 2, "sigma": 1e-9, "alpha": 1e-9, "max_steps": 2}
    settings |= {"temperature": 0.6}
    tested = trained(tmp_path, noted, **settings)
    assert tested.counts["tied"] == 2 and all(one == seen[0] for one in seen[:6]) and seen[6] == seen[11]
    # by hand: each prompt twice, with other numbers
    model, different = random_model(), 0
    for step in range(2):
        rows = np.repeat(step_indices(8, 3, 5, step), 2)
        for i, (row, (prompt, ids)) in enumerate(zip(rows, seen[6 * step], strict=True)):
            assert prompt == PROMPTS[row]
            key = noise.sampling_key(noise.run_key("es", 5), step)
            different += by_inversion(model, prompt, noise.uniforms(key, np.array([row]), 4, sample=i % 2)[0]) != ids
    assert different <= 1  # of 12: a number may fall on the edge between two tokens
    assert len({tuple(ids) for one in seen for _, ids in one}) > 8
    assert tested.budget["completions"] == 2 * 6 * 3 * 2
    assert tested.state.log_history[0]["completions/mean_length"] <= 4


# ---- the best weights

EVALUATING = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "max_steps": 8}
EVALUATING |= {"eval_dataset": ROWS[:2]}


def peaking(completion_ids, trainer_state, **columns):
    """Members are compared as ever; the evaluation of the third step is the best."""
    if len(completion_ids) == 2:  # the evaluation set
        return [-abs(trainer_state.global_step - 3.0)] * 2
    return token_sum(completion_ids)


@pytest.mark.parametrize("mode", ["master", "kahan"])
def test_the_best_weights_come_back(tmp_path, mode):
    dtype = torch.bfloat16 if mode == "kahan" else torch.float32
    tested = trained(tmp_path / "run", peaking, random_model().to(dtype), precision=mode, **EVALUATING)
    assert tested.args.metric_for_best_model == "reward" and tested.args.greater_is_better
    assert (tested.state.best_global_step, tested.state.best_metric, tested.state.global_step) == (3, 0.0, 8)
    run, anew = read(tmp_path / "run"), random_model().to(dtype)
    best, last = ledger.replay(run, anew, 3), ledger.replay(run, anew, 8)
    assert tested.engine.weights.float32().tobytes() == best.tobytes() != last.tobytes()
    assert run.ended and run.weights[8] != digest(tested)
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


def test_early_stopping_has_the_same_patience_after_a_checkpoint(tmp_path):
    settings = EVALUATING | SAVING
    trained(tmp_path, peaking, callbacks=[EarlyStoppingCallback(3), Ending(5)], **settings)
    checkpoint = str(tmp_path / "checkpoint-4")
    resumed = trained(tmp_path, peaking, callbacks=[EarlyStoppingCallback(3)], resume=checkpoint, **settings)
    # steps 4, 5 and 6 are worse than 3; the first of them is in the checkpoint
    assert (resumed.state.global_step, resumed.state.best_global_step) == (6, 3)


def test_a_smaller_metric_can_be_better_and_nan_never_is(tmp_path):
    def worsening(completion_ids, trainer_state, log_metric, **columns):
        log_metric("length_loss", abs(trainer_state.global_step - 2.0))
        if len(completion_ids) == 2 and trainer_state.global_step == 1:
            return [None] * 2
        return token_sum(completion_ids)

    settings = EVALUATING | {"max_steps": 3}
    tested = trained(tmp_path / "loss", worsening, metric_for_best_model="length_loss", **settings)
    assert (tested.state.best_global_step, tested.state.best_metric) == (2, 0.0)
    assert tested.args.greater_is_better is False
    tested = trained(tmp_path / "nan", worsening, **settings)
    assert math.isnan(tested.state.log_history[1]["eval_reward"]) and tested.state.best_global_step > 1


def test_saving_the_best(tmp_path):
    trained(tmp_path, peaking, **EVALUATING | {"save_strategy": "best", "save_total_limit": 1})
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]
