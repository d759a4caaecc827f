"""The surface of TRL's trainers on `ESTrainer`: completions, other data sets, reward models, cards, the Hub, ties."""

import json
import logging
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import PROMPTS, random_model, tokenizer
from transformers import LlamaConfig, LlamaForSequenceClassification, TrainerCallback
from transformers.trainer_utils import TrainOutput

from evoalign_lib import ledger
from evoalign_lib.es import ESConfig, ESTrainer
from evoalign_lib.reward_models import ModelReward

ROWS = [{"prompt": p, "number": i} for i, p in enumerate(PROMPTS[:4])]


def token_sum(completion_ids, **columns):
    return [float(sum(ids)) for ids in completion_ids]


def config(folder, **changed):
    settings = {"population_size": 4, "sigma": 0.05, "alpha": 0.05, "max_steps": 2, "max_completion_length": 4}
    settings |= {"workers": 1, "disable_tqdm": True, "save_strategy": "no", "report_to": "none"} | changed
    return ESConfig(output_dir=str(folder), **settings)


def trainer(folder, reward=token_sum, eval_dataset=None, callbacks=None, rows=ROWS, rest=None, **changed):
    args = config(folder, **changed)
    return ESTrainer(random_model(), reward, args, rows, eval_dataset, tokenizer(), callbacks, **(rest or {}))


# ---- train


def test_train_returns_a_short_output(tmp_path):
    tested = trainer(tmp_path)
    output = tested.train()
    assert isinstance(output, TrainOutput) and output.global_step == 2 and math.isnan(output.training_loss)
    assert output.metrics["train_reward"] == tested.state.log_history[-1]["reward"]
    assert output.metrics["completions"] == 2 * 4 * len(ROWS) and output.metrics["train_runtime"] > 0
    assert len(repr(output)) < 400


# ---- evaluate, predict


class Evaluations(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        self.seen.append(metrics)


@pytest.mark.parametrize("workers", [1, 2])
def test_other_rows_can_be_evaluated_at_any_time(tmp_path, workers):
    seen = Evaluations()
    tested = trainer(tmp_path, eval_dataset=ROWS, callbacks=[seen], workers=workers, chunk_rows=2)
    own = tested.evaluate()
    assert tested.evaluate(ROWS[:2], metric_key_prefix="test")["test_reward"] != own["eval_reward"]
    pool = tested.engine._pool
    assert tested.evaluate(ROWS[:2], metric_key_prefix="test") == seen.seen[-1]
    assert tested.engine._pool is pool  # the same rows cost no new processes
    more = tested.evaluate([*ROWS, {"prompt": "longer than any before it", "number": 9}])
    assert set(more) == {"eval_reward"} and tested.evaluate() == own
    tested.engine.close()


def test_several_sets_have_metrics_of_their_own(tmp_path):
    sets = {"first": ROWS[:2], "second": ROWS[2:]}
    settings = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "second_reward"}
    tested = trainer(tmp_path, eval_dataset=sets, **settings)
    alone = {f"eval_{name}_reward": trainer(tmp_path, eval_dataset=rows).evaluate()["eval_reward"]
             for name, rows in sets.items()}  # fmt: skip
    assert tested.evaluate() == alone
    assert tested.evaluate("second") == {"eval_second_reward": alone["eval_second_reward"]}
    assert tested.evaluate({"x": ROWS[:2]}, "test") == {"test_x_reward": alone["eval_first_reward"]}
    with pytest.raises(ValueError, match=r"no eval_dataset is called 'secnd'; .*Did you mean 'second'\?"):
        tested.evaluate("secnd")
    tested.train()
    logged = [entry["eval_second_reward"] for entry in tested.state.log_history if "eval_second_reward" in entry]
    assert tested.state.best_metric == max(logged[:1] + logged[3:])  # of the trainer's own sets, not of "second" alone
    with pytest.raises(ValueError, match="eval_dataset 'bad': the data set is empty"):
        trainer(tmp_path, eval_dataset={"bad": []})


def test_predict_gives_completions(tmp_path):
    tested = trainer(tmp_path, explained)
    found = tested.predict(ROWS[:2])
    assert all(isinstance(text, str) for text in found.predictions) and found.label_ids is None
    assert found.metrics["test_reward"] == np.mean([len(text) for text in found.predictions])
    assert not tested.state.log_history
    messages = [{"prompt": [{"role": "user", "content": "hi"}]}]
    [answer] = tested.predict(messages, "final").predictions
    assert [message["role"] for message in answer] == ["assistant"]


# ---- what a Hugging Face trainer has besides


def test_callbacks_come_and_go(tmp_path):
    seen = Evaluations()
    tested = trainer(tmp_path, eval_dataset=ROWS)
    tested.add_callback(seen)
    tested.evaluate()
    assert tested.pop_callback(Evaluations) is seen
    tested.evaluate()
    tested.add_callback(Evaluations)
    tested.remove_callback(Evaluations)
    assert len(seen.seen) == 1 and tested.pop_callback(Evaluations) is None


def test_attributes_and_files(tmp_path, capsys):
    sets = ROWS[:1]
    tested = trainer(tmp_path / "run", eval_dataset=sets)
    assert tested.train_dataset is ROWS and tested.eval_dataset is sets and tested.reward_funcs == [token_sum]
    assert tested.is_world_process_zero() and tested.is_local_process_zero()
    assert tested.get_num_trainable_parameters() == sum(p.numel() for p in tested.model.parameters())
    metrics = tested.evaluate()
    tested.log_metrics("eval", metrics)
    assert "***** eval metrics *****" in capsys.readouterr().out
    tested.save_metrics("eval", metrics)
    tested.save_state()
    assert json.loads((tmp_path / "run/eval_results.json").read_text()) == metrics
    assert json.loads((tmp_path / "run/all_results.json").read_text()) == metrics
    assert json.loads((tmp_path / "run/trainer_state.json").read_text())["log_history"][0]["eval_reward"]


def test_the_card_says_how_to_get_the_weights(tmp_path):
    from huggingface_hub import ModelCard

    tested = trainer(tmp_path / "run")
    tested.create_model_card()
    assert "no step is recorded" in (tmp_path / "run/README.md").read_text()
    tested.train()
    tested.create_model_card("my-model", dataset_name="me/prompts", tags="mine")
    card = ModelCard.load(tmp_path / "run/README.md")
    assert card.data.datasets == "me/prompts" and "mine" in card.data.tags and card.data.base_model is None
    run = ledger.read(tmp_path / "run" / ledger.NAME)
    for said in (run.tips[-1], run.weights[2], "| sigma | `0.05` |", "# my-model", "`token_sum`", "2 steps"):
        assert said in card.text, said
    assert str(tmp_path) not in card.content


def test_what_goes_to_the_hub(tmp_path, monkeypatch):
    import huggingface_hub

    calls = []

    class Repository:
        repo_id = "me/run"

    class Api:
        def __init__(self, token):
            calls.append(("token", token))

        def create_repo(self, name, private, exist_ok):
            calls.append(("create", name, private))
            return Repository

        def create_branch(self, name, branch, exist_ok):
            calls.append(("branch", name, branch))

        def upload_folder(self, repo_id, folder_path, ignore_patterns, **rest):
            files = [str(path.relative_to(folder_path)) for path in Path(folder_path).rglob("*") if path.is_file()]
            kept = list(huggingface_hub.utils.filter_repo_objects(files, ignore_patterns=ignore_patterns))
            calls.append(("upload", repo_id, sorted(kept), rest))

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)  # the network is the one thing that is not there
    tested = trainer(tmp_path / "run", save_strategy="steps", save_steps=1, hub_private_repo=True, hub_token="hf_x")
    tested.train()
    tested.push_to_hub(revision="trial", tags="mine")
    assert calls[:3] == [("token", "hf_x"), ("create", "run", True), ("branch", "me/run", "trial")]
    _, name, files, rest = calls[3]
    assert name == "me/run" and {"model.safetensors", "README.md", ledger.NAME, "tokenizer.json"} <= set(files)
    assert not any("checkpoint" in file or ".lock" in file for file in files)
    assert rest == {"commit_message": "End of training", "revision": "trial", "run_as_future": False}


# ---- completions


def explained(completions, log_extra, **columns):
    log_extra("first", [c[:1] for c in completions])
    return [float(len(c)) for c in completions]


@pytest.mark.parametrize("workers", [1, 2])
def test_completions_are_shown_sent_and_kept(tmp_path, capsys, workers, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    settings = {"log_completions": True, "logging_steps": 2, "workers": workers, "report_to": "tensorboard"}
    settings |= {"num_completions_to_print": 2}
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    tested = trainer(tmp_path / "run", [explained, token_sum], ROWS[:1], **settings)
    tested.train()
    tested.evaluate()
    shown = capsys.readouterr().out
    assert "Step 2" in shown and "Step 1" not in shown and "eval after step 2" in shown
    assert all(word in shown for word in ("completion", "explained", "token_sum", "first", "advantage"))
    assert sorted(path.name for path in (tmp_path / "run/completions").iterdir()) == [
        "eval_00002.jsonl",
        "step_00002.jsonl",
    ]
    rows = [json.loads(line) for line in (tmp_path / "run/completions/step_00002.jsonl").read_text().splitlines()]
    best, worst = rows[: len(ROWS)], rows[len(ROWS) :]
    assert list(rows[0]) == ["step", "member", "prompt", "completion", "explained", "token_sum", "first", "advantage"]
    assert [row["prompt"] for row in best] == [row["prompt"] for row in worst] == [row["prompt"] for row in ROWS]
    rewards = ledger.read(tmp_path / "run" / ledger.NAME).steps[1].rewards
    for part, member in ((best, rewards.argmax()), (worst, rewards.argmin())):
        assert {row["member"] for row in part} == {member} and {row["step"] for row in part} == {1}
        assert np.mean([row["explained"] + row["token_sum"] for row in part]) == pytest.approx(rewards[member])
        assert part[0]["advantage"] == pytest.approx((rewards[member] - rewards.mean()) / rewards.std())
    assert all(row["first"] == row["completion"][:1] for row in rows)
    events = b"".join(path.read_bytes() for path in (tmp_path / "board").rglob("events*"))
    assert b"completions" in events and b"| advantage |" in events
    tested.engine.close()


def test_a_run_that_shows_completions_has_the_same_bits(tmp_path, capsys):
    runs = []
    for name, settings in {"a": {}, "b": {"log_completions": True, "log_unique_prompts": True}}.items():
        trainer(tmp_path / name, **settings).train()
        runs.append(ledger.read(tmp_path / name / ledger.NAME))
    assert runs[0].header == runs[1].header and runs[0].weights == runs[1].weights
    rows = (tmp_path / "b/completions/step_00001.jsonl").read_text().splitlines()
    assert len({json.loads(row)["prompt"] for row in rows}) == len(rows) == len(ROWS)


def test_the_terminal_gets_plain_text(tmp_path, capsys):
    from evoalign_lib.engines import completions

    conversation = [{"role": "assistant", "content": "[bold]x[/nothing]"}]
    completions.show({"prompt": ["a|b"], "completion": [conversation], "r": [None]}, "Step 1")
    shown = capsys.readouterr().out
    assert "ASSISTANT" in shown and "[bold]x[/nothing]" in shown
    with pytest.raises(ValueError, match="num_completions_to_print=3 has no effect without log_completions=True"):
        config(tmp_path, num_completions_to_print=3)


# ---- ties


def constant(completions, **columns):
    return [0.5] * len(completions)


def test_ties_are_said_once_with_their_causes(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="evoalign_lib"):
        trainer(tmp_path / "a", constant, max_steps=8).train()
        [said] = [record.getMessage() for record in caplog.records if "tied" in record.getMessage()]
        assert "last 3 populations were tied (the last one with a reward of 0.5)" in said
        assert all(word in said for word in ("sigma=0.05", "100 % of them were cut at max_completion_length=4"))
        caplog.clear()
        trainer(tmp_path / "b", constant, max_steps=2).train()
        trainer(tmp_path / "c", max_steps=4).train()
    assert not [record for record in caplog.records if "tied" in record.getMessage()]


def test_the_bar_shows_ties(tmp_path, capsys):
    trainer(tmp_path / "a", constant, disable_tqdm=False, max_steps=3).train()
    assert "tied=3" in capsys.readouterr().err
    trainer(tmp_path / "b", disable_tqdm=False).train()
    assert "tied" not in capsys.readouterr().err


# ---- reward models


def classifier(seed=0, **changed):
    tok = tokenizer()
    settings = {"vocab_size": len(tok), "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    settings |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_labels": 1, "initializer_range": 0.5}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForSequenceClassification(LlamaConfig(**settings | changed)).eval()


@pytest.mark.parametrize("conversational", [False, True])
def test_a_reward_model_scores_as_in_trl(tmp_path, conversational):
    """TRL's own lines, `GRPOTrainer._calculate_rewards`, on its texts."""
    from trl.data_utils import apply_chat_template

    model, tok = classifier(), tokenizer()
    prompts, completions = PROMPTS[:3], ["a", "bcd", "12"]
    if conversational:
        prompts = [[{"role": "user", "content": p}] for p in prompts]
        completions = [[{"role": "assistant", "content": c}] for c in completions]
        texts = [
            apply_chat_template({"messages": p + c}, tok)["text"] for p, c in zip(prompts, completions, strict=True)
        ]
    else:
        texts = [p + c for p, c in zip(prompts, completions, strict=True)]
    model.config.pad_token_id = tok.pad_token_id
    inputs = tok(text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
    with torch.inference_mode():
        expected = model(**inputs).logits[:, 0]
    reward = ModelReward(model, tok)
    assert reward(prompts, completions) == pytest.approx(expected.tolist(), abs=1e-6)
    reward.rows = 2
    assert reward(prompts, completions) == pytest.approx(expected.tolist(), abs=1e-5)


def test_reward_models_by_folder_or_object_beside_functions(tmp_path):
    folder = tmp_path / "scorer"
    classifier().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    by_folder = trainer(tmp_path / "a", [str(folder), token_sum], reward_weights=[1.0, 0.0])
    rest = {"reward_processing_classes": [None, tokenizer()]}
    by_object = trainer(tmp_path / "b", [token_sum, classifier()], rest=rest, reward_weights=[0.0, 1.0])
    alone = trainer(tmp_path / "c", classifier(), rest={"reward_processing_classes": tokenizer()})
    runs = []
    for tested in (by_folder, by_object, alone):
        tested.train()
        runs.append([step.rewards.tolist() for step in tested.ledger.steps])
    assert runs[0] == runs[1] == runs[2] and len(set(runs[0][0])) > 1
    assert "rewards/scorer/mean" in by_folder.state.log_history[0]


def test_reward_models_that_are_refused(tmp_path):
    with pytest.raises(ValueError, match="has 2 labels"):
        trainer(tmp_path, classifier(num_labels=2), rest={"reward_processing_classes": tokenizer()})
    with pytest.raises(ValueError, match="reward_processing_classes has 2 entries for 1 reward functions"):
        trainer(tmp_path, token_sum, rest={"reward_processing_classes": [None, None]})
    with pytest.raises(ValueError, match="which is a function and has no use for it"):
        trainer(tmp_path, token_sum, rest={"reward_processing_classes": tokenizer()})
    random_model().save_pretrained(tmp_path / "causal")
    with pytest.raises(ValueError, match="no sequence classifier: give a reward"):
        trainer(tmp_path, str(tmp_path / "causal"))
    with pytest.raises(ValueError, match="does not exist: give a folder"):
        trainer(tmp_path, "./none")


async def awaited(completions, **columns):
    return [float(len(c)) for c in completions]


def test_asynchronous_rewards_train_in_worker_processes(tmp_path):
    runs = []
    for workers in (1, 2):
        tested = trainer(tmp_path / str(workers), awaited, workers=workers, eval_dataset=ROWS)
        tested.evaluate()  # this process has its loop before the workers are forked
        tested.train()
        runs.append(tested.ledger.weights)
        tested.engine.close()
    assert runs[0] == runs[1]
