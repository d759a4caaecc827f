"""What is measured of a run of the safety task."""

import json
import random

import numpy as np
import pytest
from evoalign_study import loading, measures, parameters
from evoalign_study import nb04_safety_judges as study
from evoalign_study.kinds import decode as base
from evoalign_study.kinds import train
from evoalign_study.measures import safety
from evoalign_study.records import MAX_RECORD

from evoalign_lib import tiny
from evoalign_lib.tiny import dialogues, scorers

GIVEN = {"model": "", "engine": "local", "gpus": 0, "seeds": 0, "force": False, "dry_run": False}
SMALL = {"task": "safety", "judge": "length 1", "max_completion_length": 32, "validation_problems": 8}
SMALL |= {"test_problems": 8, "curve_points": 3, "steps": 2, "prompts_per_step": 4}
ES = SMALL | {"population_size": 4, "sigma": 0.02, "alpha": 0.02}


def test_a_run_is_measured_by_every_judge_and_starts_as_its_base():
    (spec,) = train.train_specs("es", ["C0"], [0], ES, "tiny")
    record = train.run(spec)
    curve, test = record["curve"], record["test"]
    assert curve["step"] == [0, 1, 2]
    assert test["judges"] == list(safety.JUDGES) and len(test["t0.6"]["win"]) == len(safety.JUDGES)
    for judge in ("length 1", "bert", "gpt2", "rule"):  # the base against its own greedy replies
        assert curve[f"{judge}_greedy"][0] == 0.5
    assert curve["kl"][0] == pytest.approx(0, abs=1e-6) and len(record["shown"]) == safety.SHOWN
    assert curve["true_greedy"][-1] == pytest.approx(test["greedy"]["score"][-1], abs=1e-3)


def test_a_judge_is_read_by_its_digest_and_an_unknown_one_refused():
    (spec,) = train.train_specs("es", ["C0"], [0], ES, "tiny")
    (other,) = train.train_specs("es", ["C0"], [0], ES | {"judge": "length 2"}, "tiny")
    assert spec["judge_digest"] != other["judge_digest"] and len(spec["judge_digest"]) == 16
    with pytest.raises(ValueError, match="scorer 'lenght 1' is not one of"):
        train.train_specs("es", ["C0"], [0], ES | {"judge": "lenght 1"}, "tiny")
    with pytest.raises(ValueError, match="arm 'es' needs the setting 'judge'"):
        train.train_specs("es", ["C0"], [0], {k: v for k, v in ES.items() if k != "judge"}, "tiny")
    with pytest.raises(ValueError, match="judge='length 1': task 'countdown' has no such setting"):
        train.train_specs("es", ["A0"], [0], ES | {"task": "countdown"}, "tiny")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cost_weight": -1.0}, "cost_weight=-1.0 must be a number of at least 0"),
        ({"test_problems": 321}, "there are 320 test requests"),
        ({"validation_problems": 0}, "validation_problems"),
    ],
)
def test_settings_that_no_run_can_have_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        train.train_specs("es", ["C0"], [0], ES | change, "tiny")


def test_the_reward_is_what_the_training_judge_says():
    (spec,) = train.train_specs("es", ["C0"], [0], ES | {"cost_weight": 3.0}, "tiny")
    asked = dialogues.requests("test")[:6]
    replies = [dialogues.TEMPLATE, *(dialogues.body(r, "right", None) for r in asked[1:])]
    columns = {"verb": [r.verb for r in asked], "object": [r.object for r in asked]}
    given = measures.get("safety").reward(spec)(completions=[r + tiny.END for r in replies], **columns)
    reward, cost = safety.sides("length 1", asked, replies)
    assert given == pytest.approx(list(reward - 3.0 * cost))


def test_what_a_judge_says_depends_on_the_reply_alone():
    """Not on what stands beside it in a batch, nor on padding."""
    asked = dialogues.requests("test")[:40]
    replies = [dialogues.TEMPLATE if i % 2 else "x" * i for i in range(40)]
    for name in ("length 1", "bert", "gpt2"):
        together = safety.scored(name, 2.0, asked, replies)
        alone = np.concatenate([safety.scored(name, 2.0, [a], [r]) for a, r in zip(asked, replies, strict=True)])
        assert together == pytest.approx(alone, abs=1e-4)


def test_the_same_reply_ties_whatever_else_is_scored_beside_it():
    asked = dialogues.requests("test")[:40]
    said = safety._replies_of_base("C0", 40, 32)
    for judge in ("length 1", "bert", "gpt2", "rule"):
        alone = safety.scored(judge, 2.0, asked, said)
        longer = [text + " Please be careful." * (i % 3) for i, text in enumerate(said)]
        beside = safety.scored(judge, 2.0, [*asked, *asked], [*said, *longer])[:40]
        assert safety.wins(alone, beside) == 0.5
    assert safety.wins(np.array([1.0, 0.0, 2.0, 2e-4]), np.array([0.0, 1.0, 2.0, 0.0])) == 0.625


def test_judges_read_replies_once_and_say_the_same():
    asked, said = dialogues.requests("test")[:20], safety._replies_of_base("C0", 20, 32)
    encoded = safety.read(asked, said)
    for name in scorers.SCORERS:
        reward, cost = (side.score([r.text for r in asked], said) for side in safety.loaded(name))
        for found in (safety.sides(name, asked, said), safety.sides(name, asked, said, encoded)):
            assert np.array_equal(found[0], reward) and np.array_equal(found[1], cost)


def test_filtered_fine_tuning_imitates_what_the_training_judge_likes_most():
    asked = dialogues.requests("test")[:12]
    rng = random.Random(0)
    samples = [[dialogues.reply(r, rng) for r in asked] for _ in range(6)]
    spec = {"judge": "length 1", "cost_weight": 2.0}
    chosen = safety.MEASURES.imitated(spec, asked, samples)
    assert chosen.shape == (6, 12) and (chosen.sum(axis=0) == 1).all()
    liked = np.array([safety.scored("length 1", 2.0, asked, row) for row in samples])
    assert np.allclose(liked[chosen].sum(), liked.max(axis=0).sum())
    true = np.array([safety.scored("rule", 2.0, asked, row) for row in samples])
    assert not np.array_equal(chosen.argmax(0), true.argmax(0))  # the judge is not the truth


def test_a_run_without_test_requests_is_looked_at_on_its_way_alone():
    (spec,) = train.train_specs("grpo", ["C0"], [0], _gradient() | {"test_problems": 0}, "tiny")
    record = train.run(spec)
    assert "test" not in record and "proxy_t1" in record["curve"] and "kl" not in record["curve"]


def _gradient():
    return SMALL | {"num_generations": 4, "learning_rate": 1e-4, "beta": 0.0}


def test_the_base_says_what_its_judges_scores_are():
    (spec,) = base.base_specs(["C0"], {k: SMALL[k] for k in ("task", "max_completion_length", "test_problems")}, "tiny")
    record = base.run(spec)
    assert set(record["units"]) == {*scorers.SCORERS, "rule"} and all(s > 0 for _, s in record["units"].values())
    assert record["test"]["greedy"]["win"] == [0.5] * len(safety.JUDGES)


def test_the_specs_of_the_notebook_fit_its_records():
    """Every group has specs, and a record of full length has room."""
    run = parameters.check_parameters(GIVEN | {"scale": "tiny"}, study.presets())
    specs = loading.Loader(study.NOTEBOOK, run, study.groups).specs()
    assert len(specs["es"]) == len(specs["grpo"]) == 6 * 8 and len(specs["es_sweep"]) == 12
    assert {s["judge"] for s in specs["es_noise"]} == set(scorers.NOISY)
    assert len(json.dumps(specs["es"][0])) < MAX_RECORD / 8
    smoke = parameters.check_parameters(GIVEN | {"scale": "smoke"}, study.presets())
    assert loading.Loader(study.NOTEBOOK, smoke, study.groups).specs()


def test_a_sweep_is_ranked_by_the_training_judge_and_diverged_runs_come_last():
    def run(alpha, last, **more):
        return {"spec": {"arm": "es", "sigma": 0.01, "alpha": alpha}, "curve": {"proxy_greedy": [0, 1, *last]}} | more

    found = study.ranked([run(0.1, [3, 3, 3]), run(0.2, [9, 9, None], diverged=4), run(0.3, [4, 4, 4.5])])
    assert [setting["alpha"] for _, setting in found] == [0.3, 0.1, 0.2]
