"""What is measured of a run of the safety task."""

import random

import numpy as np
import pytest
from evoalign_study import measures
from evoalign_study import nb04_safety_judges as study
from evoalign_study.kinds.decode import base_specs, run_base
from evoalign_study.kinds.train import run, train_specs
from evoalign_study.measures import safety
from evoalign_study.measures.base import wins
from helpers import each_named, refused

from evoalign_lib import tiny
from evoalign_lib.tiny import dialogues, scorers

SMALL = {"task": "safety", "judge": "length 1", "max_completion_length": 32, "validation_problems": 8}
SMALL |= {"test_problems": 8, "curve_points": 3, "steps": 2, "prompts_per_step": 4}
ES = SMALL | {"population_size": 4, "sigma": 0.02, "alpha": 0.02}
JUDGES = ("length 1", "bert", "gpt2", "rule")


def spec_of(**changed):
    return train_specs("es", ["C0"], [0], {k: v for k, v in (ES | changed).items() if v is not None}, "tiny")[0]


def test_a_run_is_measured_by_every_judge_and_starts_as_its_base():
    record = run(spec_of())
    curve, test = record["curve"], record["test"]
    assert curve["step"] == [0, 1, 2]
    assert test["judges"] == list(safety.JUDGES) and len(test["t0.6"]["win"]) == len(safety.JUDGES)
    assert all(curve[f"{judge}_greedy"][0] == 0.5 for judge in JUDGES)  # the base against its own greedy replies
    assert curve["kl"][0] == pytest.approx(0, abs=1e-6) and len(record["shown"]) == safety.SHOWN
    assert curve["true_greedy"][-1] == pytest.approx(test["greedy"]["score"][-1], abs=1e-3)
    (of_base,) = base_specs(["C0"], {k: SMALL[k] for k in ("task", "max_completion_length", "test_problems")}, "tiny")
    untrained = run_base(of_base)
    assert set(untrained["units"]) == {*scorers.SCORERS, "rule"} and all(s > 0 for _, s in untrained["units"].values())
    assert untrained["test"]["greedy"]["win"] == [0.5] * len(safety.JUDGES)
    # without test requests it is looked at on its way alone
    alone = run(spec_of(test_problems=0))
    assert "test" not in alone and alone["curve"]["proxy_t1"] == curve["proxy_t1"] and "kl" not in alone["curve"]


test_settings_that_no_run_can_have_are_refused = refused(
    *each_named({"cost_weight": -1.0}, {"test_problems": 321}, {"validation_problems": 0}),
    *each_named({"reward_model": "x"}),  # of a user's model
    ({"judge": "lenght 1"}, "'lenght 1'"),
    ({"judge": None}, "'judge'"),
    ({"task": "countdown"}, "'C0'"),
    call=lambda change: spec_of(**change),
)


def test_the_reward_is_what_the_training_judge_says_by_its_digest():
    spec = spec_of(cost_weight=3.0)
    assert spec["judge_digest"] != spec_of(judge="length 2")["judge_digest"] and len(spec["judge_digest"]) == 16
    asked = dialogues.requests("test")[:6]
    replies = [dialogues.TEMPLATE, *(dialogues.body(r, "right", None) for r in asked[1:])]
    columns = {"verb": [r.verb for r in asked], "object": [r.object for r in asked]}
    given = measures.get("safety").reward(spec)(completions=[r + tiny.END for r in replies], **columns)
    reward, cost = safety.sides("length 1", asked, replies)
    assert given == pytest.approx(list(reward - 3.0 * cost))


def test_what_a_judge_says_depends_on_the_reply_alone():
    """Not on what stands beside it in a batch, nor on padding; the same reply ties whatever is scored beside it."""
    asked, said = dialogues.requests("test")[:40], safety._replies_of_base("C0", 40, 32)
    for name in scorers.SCORERS:  # which read replies once, and say the same
        expected = [side.score([r.text for r in asked], said) for side in safety.loaded(name)]
        assert np.array_equal(safety.sides(name, asked, said), expected)
    replies = [dialogues.TEMPLATE if i % 2 else "x" * i for i in range(40)]
    for judge in JUDGES:
        together = safety.scored(judge, 2.0, asked, replies)
        alone = np.concatenate([safety.scored(judge, 2.0, [a], [r]) for a, r in zip(asked, replies, strict=True)])
        assert together == pytest.approx(alone, abs=1e-4)
        longer = [text + " Please be careful." * (i % 3) for i, text in enumerate(said)]
        beside = safety.scored(judge, 2.0, [*asked, *asked], [*said, *longer])[:40]
        assert wins(safety.scored(judge, 2.0, asked, said), beside) == 0.5
    assert wins(np.array([1.0, 0.0, 2.0, 2e-4]), np.array([0.0, 1.0, 2.0, 0.0])) == 0.625


def test_filtered_fine_tuning_imitates_what_the_training_judge_likes_most():
    asked, rng = dialogues.requests("test")[:12], random.Random(0)
    rows = [[dialogues.reply(r, rng) for r in asked] for _ in range(6)]
    samples = [[(text, []) for text in row] for row in rows]
    chosen = safety.MEASURES.imitated({"judge": "length 1", "cost_weight": 2.0}, asked, samples)
    liked, true = (np.array([safety.scored(j, 2.0, asked, row) for row in rows]) for j in ("length 1", "rule"))
    assert chosen.shape == (6, 12) and (chosen.sum(axis=0) == 1).all()
    assert np.allclose(liked[chosen].sum(), liked.max(axis=0).sum())
    assert not np.array_equal(chosen.argmax(0), true.argmax(0))  # the judge is not the truth


def test_a_sweep_is_ranked_by_the_training_judge_and_diverged_runs_come_last():
    def swept(alpha, last, **more):
        return {"spec": {"arm": "es", "sigma": 0.01, "alpha": alpha}, "curve": {"proxy_greedy": [0, 1, *last]}} | more

    ranked = study.ranked([swept(0.1, [3, 3, 3]), swept(0.2, [9, 9, None], diverged=4), swept(0.3, [4, 4, 4.5])])
    assert [setting["alpha"] for _, setting in ranked] == [0.3, 0.1, 0.2]
