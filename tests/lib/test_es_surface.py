"""The surface of TRL's trainers on `ESTrainer`: completions, other data sets, reward models, cards, the Hub, ties."""

import copy
import json
import logging
from functools import partial
from unittest.mock import create_autospec

import huggingface_hub
import numpy as np
import pytest
import torch
from es_runs import ROWS as EIGHT
from es_runs import config, constant, digest, never, outcome, read, token_sum, trained, trainer
from helpers import PROMPTS, random_model, tokenizer
from test_engine import engine as local_engine

from evoalign_lib import ledger
from evoalign_lib.engines.base import Options
from evoalign_lib.es import ESTrainer
from evoalign_lib.reward_models import ModelReward

ROWS = EIGHT[:4]
SAVING = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}


# ---- evaluate, predict


@pytest.mark.parametrize("workers", [1, 2])
def test_other_rows_can_be_evaluated_at_any_time(tmp_path, workers):
    tested = trainer(tmp_path, eval_dataset=ROWS, workers=workers, chunk_rows=2)
    before = digest(tested)
    own, two = tested.evaluate(), tested.evaluate(ROWS[:2], metric_key_prefix="test")
    assert two["test_reward"] != own["eval_reward"] and digest(tested) == before
    assert own == {"eval_reward": np.mean([sum(ids) for _, ids in tested.engine.generate("eval")[0]])}
    pool = tested.engine._pool
    assert tested.evaluate(ROWS[:2], metric_key_prefix="test") == two
    assert tested.engine._pool is pool  # the same rows cost no new processes
    more = tested.evaluate([*ROWS, {"prompt": "longer than any before it", "number": 9}])
    assert set(more) == {"eval_reward"} and tested.evaluate() == own
    with pytest.raises(ValueError, match="prompt"):  # the model's context has 256 positions
        tested.evaluate([{"prompt": "x" * 300, "number": 1}])
    assert tested.budget["completions"] == 0
    tested.train()
    assert tested.evaluate() != own  # of the current weights
    tested.engine.close()


def test_several_sets_have_metrics_of_their_own(tmp_path):
    sets = {"first": ROWS[:2], "second": ROWS[2:]}
    settings = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2, "metric_for_best_model": "second_reward"}
    tested = trainer(tmp_path, eval_dataset=sets, **settings)
    first, second = (trainer(tmp_path, eval_dataset=rows).evaluate()["eval_reward"] for rows in sets.values())
    assert tested.evaluate() == {"eval_first_reward": first, "eval_second_reward": second}
    assert tested.evaluate("second") == {"eval_second_reward": second}
    assert tested.evaluate({"x": ROWS[:2]}, "test") == {"test_x_reward": first}
    with pytest.raises(ValueError, match="'secnd'.*Did you mean 'second'"):
        tested.evaluate("secnd")
    tested.train()
    logged = [entry["eval_second_reward"] for entry in tested.state.log_history if "eval_second_reward" in entry]
    assert tested.state.best_metric == max(logged[:1] + logged[2:])  # of the trainer's own sets, not of "second" alone
    for wrong, named in (
        ({"metric_for_best_model": "reward"}, "metric_for_best_model='reward'.*'first_reward'"),
        ({"eval_dataset": {"bad": []}}, "eval_dataset 'bad'"),
    ):
        with pytest.raises(ValueError, match=named):
            trainer(tmp_path, **{"eval_dataset": sets} | settings | wrong)


def explained(completions, log_extra, **columns):
    log_extra("first", [c[:1] for c in completions])
    return [float(len(c)) for c in completions]


def test_predict_gives_completions_and_an_evaluation_may_sample(tmp_path):
    tested = trainer(tmp_path, explained)
    greedy = tested.predict(ROWS[:2])
    assert greedy.label_ids is None and not tested.state.log_history
    assert greedy.metrics["test_reward"] == np.mean([len(text) for text in greedy.predictions])
    [answer] = tested.predict([{"prompt": [{"role": "user", "content": "hi"}]}], "final").predictions
    assert [message["role"] for message in answer] == ["assistant"]
    tested = trainer(tmp_path, explained, eval_dataset=ROWS, num_generations_eval=3, temperature=0.8)
    texts = tested.predict(ROWS).predictions
    draws = tested.engine.generate("eval", samples=3, seed=tested.args.seed, temperature=0.8)
    assert texts == [draw[i][0] for i in range(len(ROWS)) for draw in draws]
    assert tested.evaluate() == tested.evaluate() == {"eval_reward": np.mean([len(text) for text in texts])}


# ---- what a Hugging Face trainer has besides


def test_attributes_and_files(tmp_path, capsys):
    sets = ROWS[:1]
    tested = trainer(tmp_path / "run", rows=ROWS, eval_dataset=sets)
    assert tested.train_dataset is ROWS and tested.eval_dataset is sets and tested.reward_funcs == [token_sum]
    assert tested.is_world_process_zero() and tested.is_local_process_zero()
    assert tested.get_num_trainable_parameters() == sum(p.numel() for p in tested.model.parameters())
    metrics = tested.evaluate()
    tested.log_metrics("eval", metrics)
    assert "***** eval metrics *****" in capsys.readouterr().out
    tested.save_metrics("eval", metrics)
    tested.save_state()
    files = {name: json.loads((tmp_path / f"run/{name}.json").read_text()) for name in ("eval_results", "all_results")}
    assert files == dict.fromkeys(files, metrics)
    assert json.loads((tmp_path / "run/trainer_state.json").read_text())["log_history"][0]["eval_reward"]


def test_what_goes_to_the_hub(tmp_path, monkeypatch):
    api = create_autospec(huggingface_hub.HfApi)  # the network is the one thing that is not there
    monkeypatch.setattr(huggingface_hub, "HfApi", api)
    hub = api.return_value
    hub.create_repo.return_value.repo_id = "me/run"
    tested = trained(tmp_path / "run", hub_private_repo=True, hub_token="hf_x", **SAVING)
    tested.push_to_hub(revision="trial", tags="mine")
    api.assert_called_once_with(token="hf_x")
    hub.create_repo.assert_called_once_with("run", private=True, exist_ok=True)
    hub.create_branch.assert_called_once_with("me/run", branch="trial", exist_ok=True)
    how = hub.upload_folder.call_args.kwargs
    folder, ignored = how.pop("folder_path"), how.pop("ignore_patterns")
    files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    kept = set(huggingface_hub.utils.filter_repo_objects(files, ignore_patterns=ignored))
    assert folder == tmp_path / "run" and {"model.safetensors", "README.md", ledger.NAME, "tokenizer.json"} <= kept
    assert not any("checkpoint" in file or ".lock" in file for file in kept)
    expected = {"repo_id": "me/run", "commit_message": "End of training", "revision": "trial", "run_as_future": False}
    assert how == expected


# ---- completions


@pytest.mark.parametrize("workers", [1, 2])
def test_completions_are_shown_sent_and_kept(tmp_path, capsys, workers, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    settings = {"log_completions": True, "logging_steps": 2, "workers": workers, "report_to": "tensorboard"}
    settings |= {"rows": ROWS, "eval_dataset": ROWS[:1], "prompts_per_step": None, "max_steps": 2}
    tested = trained(tmp_path, [explained, token_sum], **settings)
    tested.evaluate()
    tested.engine.close()
    shown = capsys.readouterr().out
    assert "Step 2" in shown and "Step 1" not in shown and "Step 2, eval" in shown
    assert all(word in shown for word in ("Completion", "explained", "token_sum", "first", "Advantage", "member"))
    kept = tmp_path / "completions"
    assert sorted(path.name for path in kept.iterdir()) == ["eval_00002.jsonl", "step_00002.jsonl"]
    rows = [json.loads(line) for line in (kept / "step_00002.jsonl").read_text().splitlines()]
    best, worst = rows[: len(ROWS)], rows[len(ROWS) :]
    assert list(rows[0]) == ["step", "member", "prompt", "completion", "explained", "token_sum", "first", "advantage"]
    assert [row["prompt"] for row in best] == [row["prompt"] for row in worst] == [row["prompt"] for row in ROWS]
    rewards = read(tmp_path).steps[1].rewards
    for part, member in ((best, rewards.argmax()), (worst, rewards.argmin())):
        assert {(row["step"], row["member"]) for row in part} == {(1, member)}
        assert np.mean([row["explained"] + row["token_sum"] for row in part]) == pytest.approx(rewards[member])
        assert part[0]["advantage"] == pytest.approx((rewards[member] - rewards.mean()) / rewards.std())
    assert all(row["first"] == row["completion"][:1] for row in rows)


# ---- what is said


def by_prompt(prompts, **columns):
    """Fails on prompts of one letter."""
    return [1 / (len(prompt) - 1) for prompt in prompts]


TIED = [(constant, {}, ["0.3 ", "sigma=0.05", "100 %", "max_completion_length=4"])]
TIED += [(token_sum, {"sigma": 1e-9}, ["sigma=1e-09"])]
TIED += [(by_prompt, {"rows": ROWS, "prompts_per_step": 4, "reward_floor": -2.0}, ["sigma=0.05", " 6 ", " 24 "])]


@pytest.mark.parametrize(("reward", "settings", "told"), TIED)
def test_ties_are_said_once_with_their_cause(tmp_path, caplog, reward, settings, told):
    with caplog.at_level(logging.WARNING, logger="evoalign_lib"):
        trained(tmp_path / "a", reward, max_steps=8, **settings)
        [said] = [record.getMessage() for record in caplog.records]
        assert all(word in said for word in ("last 3 populations", *told))
        assert ("max_completion_length" in said) == (reward is not token_sum)
        caplog.clear()
        trained(tmp_path / "b", constant, max_steps=2)
        trained(tmp_path / "c")
    assert not caplog.records


def test_a_gpu_that_is_not_used_is_said_loudly(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("evoalign_lib.es.gpus_here", lambda: 2)
    logging.Logger.warning_once.cache_clear()
    trainer(tmp_path, use_cpu=True)
    assert not caplog.records
    trainer(tmp_path), trainer(tmp_path)
    [record] = caplog.records
    assert record.levelno == logging.WARNING and "2 GPU(s)" in record.getMessage()


# ---- reward models


classifier = partial(random_model, "scorer", num_labels=1)


@pytest.mark.parametrize("conversational", [False, True])
def test_a_reward_model_scores_as_in_trl(conversational):
    """TRL's own lines, `GRPOTrainer._calculate_rewards`, on its texts."""
    from trl.data_utils import apply_chat_template

    model, tok = classifier(), tokenizer()
    prompts, completions = PROMPTS[:3], ["a", "bcd", "12"]
    texts = [p + c for p, c in zip(prompts, completions, strict=True)]
    if conversational:
        prompts = [[{"role": "user", "content": p}] for p in prompts]
        completions = [[{"role": "assistant", "content": c}] for c in completions]
        pairs = zip(prompts, completions, strict=True)
        texts = [apply_chat_template({"messages": p + c}, tok)["text"] for p, c in pairs]
        prompts[1], [said] = [*prompts[1], completions[1][0] | {"content": "b"}], completions[1]
        completions[1] = [said | {"content": "cd"}]  # goes on with a prompt that ends in "b"
    model.config.pad_token_id = tok.pad_token_id
    inputs = tok(text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
    with torch.inference_mode():
        expected = model(**inputs).logits[:, 0]
    reward = ModelReward(model, tok, {"continue_final_message": True, "add_generation_prompt": False})
    assert reward(prompts, completions) == pytest.approx(expected.tolist(), abs=1e-6)
    reward.rows = 2
    assert reward(prompts, completions) == pytest.approx(expected.tolist(), abs=1e-5)


def test_reward_models_by_folder_or_object_beside_functions(tmp_path):
    folder, tok, runs = tmp_path / "scorer", tokenizer(), []
    classifier().save_pretrained(folder)
    tok.save_pretrained(folder)
    for i, (reward, tokenizers, shares) in enumerate(
        (
            ([str(folder), token_sum], None, [1.0, 0.0]),
            ([token_sum, classifier()], [None, tok], [0.0, 1.0]),
            (classifier(), tok, None),
        )
    ):
        settings = {"rest": {"reward_processing_classes": tokenizers}, "reward_weights": shares}
        settings |= {"rows": ROWS, "prompts_per_step": None, "population_size": 4, "seed": 42, "max_steps": 2}
        runs.append(trained(tmp_path / str(i), reward, **settings))
    found = [np.array([step.rewards for step in tested.ledger.steps]) for tested in runs]
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])
    assert "rewards/scorer/mean" in runs[0].state.log_history[0] and runs[0].counts["tied"] == 0


# ---- how completions are decoded


def engine(decoder, **options):
    return local_engine(rows=ROWS, max_completion_length=12, decoder=decoder, options=Options(**options))


@pytest.mark.parametrize("decoder", ["loop", "generate"])
def test_top_k_and_top_p_leave_tokens_out(decoder):
    [greedy] = engine(decoder).generate("train")
    for options in ({"top_k": 1}, {"top_p": 1e-6}):
        assert engine(decoder, **options).generate("train", samples=2, temperature=5.0) == [greedy, greedy]
    drawn = engine(decoder).generate("train", samples=1, temperature=5.0)
    assert engine(decoder, top_k=5).generate("train", samples=1, temperature=5.0) not in ([greedy], drawn)


@pytest.mark.parametrize("decoder", ["loop", "generate"])
def test_a_stop_string_ends_the_completions_that_have_it(decoder):
    """Where and how, `test_cuda` says, which has the local engine beside the other one."""
    [whole] = engine(decoder).generate("train")
    stop = whole[0][0][3:5]
    [found] = engine(decoder, stop_strings=(stop, "no such text")).generate("train")
    has = [stop in text for text, _ in whole]
    assert [stop in text for text, _ in found] == has and not all(has)
    assert [one != other for one, other in zip(whole, found, strict=True)] == has


def test_generation_kwargs_are_those_of_transformers():
    tested = engine("auto", generation_kwargs={"repetition_penalty": 3.0})
    assert tested.decoder == "generate" and engine("auto").decoder == "loop"
    prompts = tested.prompts["train"]
    common = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": tokenizer().pad_token_id}
    common |= {"repetition_penalty": 3.0, "eos_token_id": tested.eos_ids}
    ids, mask = torch.from_numpy(prompts.ids), torch.from_numpy(prompts.mask)
    expected = random_model().generate(ids, attention_mask=mask, **common)
    [found] = tested.generate("train")
    assert [row for _, row in found] == tested.until_end(expected[:, ids.shape[1] :].numpy())
    assert found != engine("generate").generate("train")[0]
    with pytest.raises(ValueError, match="decoder='loop'.*generation_kwargs"):
        engine("loop", generation_kwargs={"repetition_penalty": 3.0})


OPTIONS = {"sampling": "common", "temperature": 0.5, "top_p": 0.9, "top_k": 30, "stop_strings": ["a"]}
OPTIONS |= {"generation_kwargs": {"repetition_penalty": 1.5}}


def test_the_ledger_names_options_where_they_differ(tmp_path):
    trained(tmp_path / "a", max_steps=1, **OPTIONS)
    assert read(tmp_path / "a").header["settings"].items() >= OPTIONS.items()
    for name, value in {"temperature": 0.6, "stop_strings": ["b"], "generation_kwargs": {"length_penalty": 2}}.items():
        with pytest.raises(ValueError, match=f"with {name}="):
            trainer(tmp_path / "a", **OPTIONS | {name: value}).train(resume_from_checkpoint=True)
    assert trained(tmp_path / "a", resume=True, **OPTIONS).state.global_step == 4
    trained(tmp_path / "b", max_steps=1, num_generations_eval=2, temperature=0.5, eval_dataset=ROWS)
    settings = read(tmp_path / "b").header["settings"]
    assert not set(settings) & (set(OPTIONS) - {"sampling"})  # an evaluation is no part of the run


def test_the_template_gets_its_arguments(tmp_path):
    tok = copy.deepcopy(tokenizer())
    tok.chat_template = "{% if thinking %}think{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    rows = [{"prompt": [{"role": "user", "content": "hi"}]}]
    args = config(tmp_path, chat_template_kwargs={"thinking": True}, prompts_per_step=None)
    tested = ESTrainer(random_model(), token_sum, args, rows, rows, tok)
    for name in ("train", "eval"):
        [row] = tested.engine.prompts[name].ids
        assert tok.decode(row) == "thinkhi"
    with pytest.raises(ValueError, match="chat_template_kwargs={'thinking': True}"):
        ESTrainer(random_model(), token_sum, args, ROWS, None, tok)


# ---- a folder that holds a run


def test_a_complete_run_says_so(tmp_path, caplog):
    first = trained(tmp_path, **SAVING)
    data = (tmp_path / ledger.NAME).read_bytes()
    with pytest.raises(ledger.LedgerError, match="another run: use another output_dir"):
        trained(tmp_path, **SAVING)
    with caplog.at_level(logging.WARNING, logger="evoalign_lib"):
        assert first.train().global_step == 2  # the cell again
        again = trained(tmp_path, never, resume=True, **SAVING)
    assert outcome(again) == outcome(first)
    assert [f"{tmp_path} is complete" in r.getMessage() for r in caplog.records] == [True, True]
    assert (tmp_path / ledger.NAME).read_bytes() == data
