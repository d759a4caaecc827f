"""The safety task on a user's model: specs, refusals, what a record has, servers and judges behind addresses."""

import contextlib
import json
import math
import shutil

import numpy as np
import pytest
from evoalign_study import base_models, judge_models, loading, parameters, preflight
from evoalign_study import nb04_safety_judges as study
from evoalign_study.kinds import train
from evoalign_study.kinds.decode import base_specs, run_base
from evoalign_study.measures import safety_public
from evoalign_study.records import record_line, spec_hash
from helpers import each_named, saved
from servers import answering, completion, running

from evoalign_lib import reward_models
from evoalign_lib.engines.base import Prompts
from evoalign_lib.engines.local import LocalEngine
from evoalign_lib.reward_models import RewardModel
from evoalign_lib.rewards import RewardOutage, Rewards
from evoalign_lib.scoring_server import app_of
from evoalign_lib.tiny import dialogues, scorers

SMALL = {"task": "safety", "cost_weight": 0.5, "max_completion_length": 8, "validation_problems": 2, "test_problems": 3}
SMALL |= {"curve_points": 2, "steps": 1, "prompts_per_step": 2, "population_size": 2, "sigma": 0.02, "alpha": 0.02}
SMALL |= {"reward_text": "continued", "cost_text": "continued", "kl_requests": 1, "judge_tokens": 20}
SMALL |= {"judge_problems": 2}
pytestmark = pytest.mark.filterwarnings("ignore:.*such texts are counted as 'truncated':UserWarning")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """What a user brings: a model, scorers and requests, by name."""
    place = tmp_path_factory.mktemp("files")
    saved(place / "policy")
    for name, source in (("reward", "length 1"), ("cost", "length 1"), ("other", "praise 1")):
        side = "cost" if name == "cost" else "reward"
        shutil.copytree(scorers.folder(source) / side, place / name)
        dialogues.tokenizer().save_pretrained(place / name)
    lines = [json.dumps({"prompt": f"How do I mend kettle number {i}?"}) for i in range(40)]
    (place / "asked.jsonl").write_text("\n".join(lines))
    (place / "few.jsonl").write_text(lines[0])
    return {path.stem: str(path) for path in place.iterdir()}


@pytest.fixture(scope="module")
def given(files):
    return SMALL | {"reward_model": files["reward"], "cost_model": files["cost"], "requests": files["asked"]}


@pytest.fixture(autouse=True)
def kept_apart(monkeypatch, tmp_path):
    """Replies and answers of a test go to its own folder; a server that is gone is given up soon."""
    monkeypatch.setenv("EVOALIGN_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(reward_models, "_FIRST_WAIT", 0.01)
    monkeypatch.setattr(reward_models, "_LONGEST_WAIT", 0.02)
    for variable in ("EVOALIGN_SCORER_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(variable, raising=False)


@contextlib.contextmanager
def judging(status=200):
    """An OpenAI-compatible server with the model "judge", which likes whatever stands first; yields its address."""
    asked = []

    def reply(path, body, headers):
        if body is None:
            return status, {"object": "list", "data": [{"id": "judge", "object": "model"}]}
        asked.append(body)
        # the rubric of harmlessness gets words alone
        return completion("[[7, 5]]" if "helpful" in body["messages"][0]["content"][:60] else "I cannot say.")

    with answering(reply) as address:
        yield f"{address}/v1", asked


def one_spec(files, settings, arm="es"):
    (spec,) = train.train_specs(arm, [files["policy"]], [0], settings, "full")
    return spec


# ---- specs


def test_everything_that_a_run_reads_is_in_its_spec(files, given):
    spec = one_spec(files, given)
    assert (spec["reward_model"], spec["reward_at"]) == (files["reward"], "cpu")
    assert spec["reward_digest"] != spec["cost_digest"] and len(spec["requests_sha256"]) == 16
    changes = [{"reward_model": files["other"]}, {"cost_text": "beaver"}, {"cost_weight": 0.0}, {"cut_turns": True}]
    changes += [{"cost_rule": "signed", "cost_threshold": -0.5}, {"prompt_template": "alpaca"}, {"kl_requests": 2}]
    changes += [{"scorer_dtype": "bfloat16"}, {"scorer_max_length": 100}]
    changes += [{"held_out": files["other"], "held_out_text": "continued"}]
    assert len({spec_hash(one_spec(files, given | change)) for change in ({}, *changes)}) == len(changes) + 1
    assert one_spec(files, given | {"cost_weight": 0.0})["cost_weight"] == 0.0


NOBODY = "http://127.0.0.1:9"


REFUSED = [  # what is changed, and what the error names
    *each_named({"cost_model": "./nowhere"}, {"reward_model": NOBODY}, {"scorer_device": "gpu"}),
    *each_named({"scorer_dtype": "half"}, {"cost_weight": -1.0}, {"cost_threshold": 1.0}, {"judge": "length 1"}),
    *each_named({"requests": "none.jsonl"}, {"test_problems": 40}, {"curve_points": 50}, {"prompt_template": "plain"}),
    ({"reward_model": ""}, "reward_model is not set"),
    ({"reward_model": "{policy}"}, "Qwen2ForCausalLM"),
    ({"reward_text": ""}, "Set reward_text"),
    ({"held_out": f"{NOBODY}/v1#m"}, f"judge='m' at {NOBODY}"),
    ({"held_out": "{reward}", "held_out_text": "continued"}, "trains the run"),
    ({"held_out": "{other}, {other}", "held_out_text": "continued"}, "given twice"),
    ({"held_out_text": "chat"}, "judge_text='chat'"),
    ({"scorer_max_length": 10_000}, "max_length=10000"),
    ({"engine": "vllm", "tensor_parallel": 1}, "engine='vllm'.*evoalign serve-scorer"),
    ({"cost_rule": "sined"}, "Did you mean 'signed'"),
    ({"cost_rule": "signed", "cost_weight": 9.0}, "9.0"),
    ({"requests": "{few}"}, "no request for"),
    ({"requests": ""}, "PKU-SafeRLHF.*requests=FILE"),  # without a network
    ({"sampled_at": [0.6]}, "sampled_at"),
]


@pytest.mark.parametrize(("change", "named"), REFUSED)
def test_what_no_run_can_have_is_refused(files, given, change, named, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    change = {k: v.format(**files) if isinstance(v, str) and "{" in v else v for k, v in change.items()}
    with pytest.raises((ValueError, FileNotFoundError), match=named):
        one_spec(files, given | change)


def test_judges_behind_addresses_are_looked_at(files, given):
    """One that trains the run, and endpoints that would refuse every question."""
    served = app_of(RewardModel(files["cost"], text="continued"))
    with running(served) as url, pytest.raises(ValueError, match="'cost' trains the run"):
        one_spec(files, given | {"held_out": url})
    for status, name, named in ((401, "judge", "OPENAI_API_KEY"), (200, "jugde", "'jugde'"), (200, "", "judge=''")):
        with judging(status) as (url, _), pytest.raises(ValueError, match=named):
            one_spec(files, given | {"held_out": f"{url}#{name}"})


# ---- runs


@pytest.fixture(scope="module")
def without(given):
    """The settings without a reward model, for one behind a server."""
    return {name: value for name, value in given.items() if name not in ("reward_text", "reward_model")}


def test_a_run_is_measured_by_scorers_detectors_and_judges(files, without):
    """A reward model behind a server, a cost model here, one judge that scores and one that chats."""
    served = app_of(RewardModel(files["reward"], text="continued", name="helpful"))
    with judging() as (judge, asked), running(served) as url:
        settings = without | {"reward_model": url, "cost_rule": "published", "cost_weight": 1.0, "cost_threshold": -9.0}
        settings |= {"held_out": f"{files['other']}, {judge}#judge", "held_out_text": "continued"}
        spec = one_spec(files, settings)
        assert (spec["reward_model"], spec["reward_at"]) == ("helpful", "server")
        assert spec["held_out_ats"] == ["cpu", "endpoint"] and url not in json.dumps(spec)
        record, again = train.run(spec), train.run(spec)
        assert len(asked) == 2 * 2 * 2  # pairs, orders, rubrics; the second time the cache answers
        assert again["curve"]["proxy_t1"] == record["curve"]["proxy_t1"] and again["digest"] == record["digest"]
        of_training = ("curve_points", "steps", "prompts_per_step", "population_size", "sigma", "alpha")
        measured = {name: value for name, value in settings.items() if name not in of_training}
        (of_base,) = base_specs([files["policy"]], measured, "full")
        untrained = run_base(of_base)
    curve, test = record["curve"], record["test"]
    assert curve["win 0_greedy"][0] == 0.5 and curve["kl"][0] == pytest.approx(0, abs=1e-6) and curve["kl"][1] > 0
    assert curve["lambda"][0] == 1.0 < curve["lambda"][1] and curve["unscored_t1"] == [0, 0]
    assert untrained["test"]["greedy"]["reward"] == curve["reward_greedy"][0]
    assert untrained["test"]["greedy"]["win"] == [0.5] and set(untrained["units"]) > {"reward helpful"}
    shares = sum(test["t1"]["quadrants"]), sum(test["greedy"]["kinds"])
    assert test["n"] == 3 and shares == pytest.approx((1, 1), abs=1e-3)
    helpful, harmless = record["held_out"]
    expected = {"rubric": "helpful", "tie": 2, "inconsistent": 2, "win_rate": 0.5, "first_share": 1.0}
    assert helpful | expected == helpful
    assert (harmless["unparsed"], harmless["failed"], harmless["win_rate"]) == (2, 0, None)
    groups = {"base": [untrained | {"spec": of_base}], "es": [record | {"spec": spec}], "grpo": [], "es_random": []}
    of_base_row, of_es = study.own_ends(groups).to_dict("records")
    assert of_base_row["wins, other, %"] == "50" and of_base_row["KL, nats"] == "0"
    assert of_es["reward"] == f"{test['greedy']['reward']:.2f}" and of_es["runs"] == 1
    assert study.own_judges(groups)["win rate, %"].tolist() == ["50", "-"]
    fig, plotted = study.own_curves(groups)
    assert plotted.groupby("quantity")["value"].first()["kl"] == curve["kl"][0] and len(fig.axes) == 6
    found = safety_public.read_replies(record | {"spec": spec})
    assert len(found["replies"]) == 3 and np.mean(found["reward"]) == pytest.approx(test["greedy"]["reward"], abs=1e-4)
    assert record["scorers"]["reward"]["texts"] > 0 and "failed" not in record["scorers"]["reward"]
    whole = {"spec": spec, "spec_hash": spec_hash(spec), "notebook": "n", "status": "finished", "commit": "c"}
    assert len(record_line(whole | {"environment": {}} | record)) < 8000


def test_the_reward_is_reward_less_cost_and_a_server_that_is_gone_ends_the_run(files, without):
    asked, said = ["How do I mend it?"] * 2, ["Take glue.", "I will not say.\nUSER: more"]
    cost = RewardModel(files["cost"], text="continued")
    with running(app_of(RewardModel(files["reward"], text="continued"))) as url:
        spec = one_spec(files, without | {"reward_model": url, "cut_turns": True})
        function = safety_public.MEASURES.reward(spec)
        cut = ["Take glue.", "I will not say."]
        expected = RewardModel(files["reward"], text="continued").score(asked, cut) - 0.5 * cost.score(asked, cut)
        assert function(completions=said, request=asked) == pytest.approx(list(expected))
    judge_models.opened(spec, judge_models.of(spec)[0]).scorer.retries = 1
    with pytest.raises(RewardOutage, match="run this again"):
        Rewards(function)(["p"] * 2, said, [[1]] * 2, {"request": asked})


def test_what_cannot_be_scored_is_counted_and_no_zero(files, without):
    """The server refuses long texts: the floor in training, left out and counted in measuring."""
    strict = RewardModel(files["reward"], text="continued", max_length=60, truncation="refuse")
    with running(app_of(strict)) as url:
        spec = one_spec(files, without | {"reward_model": url})
        asked, said = ["How?"] * 2, ["Glue.", "so " * 80]
        scored = Rewards(safety_public.MEASURES.reward(spec))(["p"] * 2, said, [[1]] * 2, {"request": asked})
        assert scored.rewards[1] == -20 < scored.rewards[0] and scored.counts["exception"] == 1
        problems = [safety_public.Problem(text) for text in asked]
        reward, cost = safety_public._sides(spec, problems, said)
        assert math.isnan(reward[1]) and safety_public._said(reward, cost)["unscored"] == 1
        with pytest.raises(reward_models.ScorerError, match="longer than 60 tokens"):
            safety_public._sides(spec, problems[1:], said[1:])


def test_another_model_at_the_address_and_a_changed_folder_are_refused(files, without, tmp_path, monkeypatch):
    shutil.copytree(files["cost"], tmp_path / "cost")
    with running(app_of(RewardModel(files["reward"], text="continued"))) as url:
        spec = one_spec(files, without | {"reward_model": url, "cost_model": str(tmp_path / "cost")})
    shutil.copy(f"{files['other']}/model.safetensors", tmp_path / "cost")
    reward, cost = judge_models.of(spec)
    with running(app_of(RewardModel(files["other"], text="continued"))) as other:
        base_models.know_files({reward.digest: other})
        with pytest.raises(ValueError, match="'reward' is another one now"):
            judge_models.opened(spec, reward)
    with pytest.raises(ValueError, match="cost model .* is another one now"):
        judge_models.opened(spec, cost)
    monkeypatch.setattr(base_models, "_FILES", {})
    with pytest.raises(FileNotFoundError, match=reward.digest):
        judge_models.opened(spec, reward)


def test_the_bases_replies_are_made_where_its_weights_are_alone(files, given):
    spec = one_spec(files, given)
    model, tok = base_models.model_of(spec | {"kind": "base"})
    rows = safety_public.MEASURES.rows(spec, tok, safety_public.splits(spec)["test"][:3])
    engine = LocalEngine(model, tok, None, {"test": Prompts(rows, tok)}, max_completion_length=8)
    with pytest.raises(FileNotFoundError, match="base-"):
        safety_public._replies_of_base(spec, engine, 3, first=False)
    made = safety_public._replies_of_base(spec, engine, 3, first=True)
    engine.master[:] = 0
    assert safety_public._replies_of_base(spec, engine, 3, first=False) == made


# ---- memory, the notebook


def test_a_plan_refuses_a_scorer_on_a_gpu_of_the_run_or_on_none(files, given, monkeypatch):
    spec = one_spec(files, given)
    monkeypatch.setattr(preflight, "_visible_gpus", lambda: (2, 80.0))
    for place, gpus in (("cpu", 2), ("cuda:1", 1)):
        preflight.check([spec | {"reward_at": place, "gpus": gpus}], workers=1)
    for place, gpus in (("cuda:0", 1), ("cuda:2", 1)):
        with pytest.raises(preflight.DoesNotFit, match=f"scorer_device='{place}'"):
            preflight.check([spec | {"reward_at": place, "gpus": gpus}], workers=1)


def test_the_notebooks_groups_at_scale_full(files):
    given = {"scale": "full", "model": files["policy"], "engine": "local", "gpus": 0, "seeds": 2, "force": False}
    given |= {"dry_run": True, "reward_model": files["reward"], "cost_model": files["cost"], "judge": files["other"]}
    given |= {"reward_text": "continued", "cost_text": "continued", "judge_text": "continued"}
    given |= {"requests": files["asked"], "unique_prompts": 20, "validation_problems": 2, "test_problems": 4}
    run = parameters.check_parameters(given, study.presets(files["policy"]))
    specs = loading.Loader(study.NOTEBOOK, run, study.groups).specs()
    there = {name: len(own) for name, own in specs.items() if own}
    assert there == {"base": 1, "es": 2, "grpo": 2, "es_random": 2, "judgments": 8}
    assert {"es_sweep", "grpo_noise", "tournaments"} < specs.keys() - there.keys()  # of the tiny world's judges alone
    assert all(specs[arm][0]["held_out_names"] == [files["other"]] for arm in ("es", "grpo"))
    assert "judge_tokens" not in specs["es"][0]
