"""Runs of the conciseness task: specs, the questions of a run, and what a record has of it."""

import json

import numpy as np
import pytest

from evoalign_lib import conciseness_runs, hacking, runs, stats, tiny, tiny_questions
from evoalign_lib.engines.local import LocalEngine, Prompts
from evoalign_lib.tasks import conciseness

SETTINGS = {"task": "conciseness", "max_completion_length": 24, "unique_prompts": 200, "curve_points": 3}
SETTINGS |= {"curve_spacing": "log", "steps": 2, "prompts_per_step": 4}
ES = SETTINGS | {"population_size": 4, "sigma": 0.01, "alpha": 0.005}
GRPO = SETTINGS | {"num_generations": 4, "learning_rate": 1e-4, "beta": 0.0}


@pytest.fixture(autouse=True)
def fewer_draws(monkeypatch):
    monkeypatch.setattr(conciseness_runs, "JENSEN_DRAWS", 2)
    monkeypatch.setattr(conciseness_runs, "BREAKING_DRAWS", 2)


@pytest.fixture(scope="module")
def engine():
    model, tok = tiny.load("B0")
    prompts = {
        name: Prompts(conciseness.dataset(tiny_questions.problems(name), tok), tok) for name in ("validation", "test")
    }
    return LocalEngine(model, tok, None, prompts, max_completion_length=24)


@pytest.mark.parametrize("base", tiny.QUESTION_BASES)
def test_the_bases_know_the_answers_and_prefer_sentences(base):
    model, tok = tiny.load(base)
    asked = tiny_questions.problems("test")
    prompts = {"test": Prompts(conciseness.dataset(asked, tok), tok)}
    engine = LocalEngine(model, tok, None, prompts, max_completion_length=24)
    (greedy,), sampled = engine.generate("test"), engine.generate("test", samples=4)
    right = [conciseness.is_correct(text, p) for (text, _), p in zip(greedy, asked, strict=True)]
    assert np.mean(right) > 0.97
    rewards = conciseness.reward(asked, [text for text, _ in greedy], [p.answer for p in asked])
    assert np.mean(rewards) < 5 * conciseness.empty_reward(asked)
    # everything that a reward for length could select is there, and rare
    texts = [text for row in sampled for text, _ in row]
    report = hacking.hack_report(texts, prompts=[p.question for p in asked] * 4)
    for name in ("empty", "repetitive", "further_turn", "other_script"):
        assert 0 < report.shares[name] < 0.2
    short = np.mean([text == p.answer for text, p in zip(texts, asked * 4, strict=True)])
    assert 0.08 < short < 0.25


def test_specs_say_task_and_measure_and_refuse_what_cannot_be():
    (spec,) = runs.train_specs("es", ["B1"], [3], ES, "tiny")
    assert spec["task"] == "conciseness" and spec["measure"] == "strict" and spec["unique_prompts"] == 200
    assert not {"grader", "validation_problems", "test_problems"} & spec.keys()
    (released,) = runs.train_specs("grpo", ["B0"], [0], GRPO | {"measure": "released"}, "tiny")
    assert released["measure"] == "released"
    for changed, message in [
        ({"unique_prompts": 50}, "unique_prompts=50: take 2, as published, or 200"),
        ({"unique_prompts": None}, "unique_prompts=None"),
        ({"measure": "words"}, "measure='words': use one of strict, released"),
    ]:
        with pytest.raises(ValueError, match=message):
            runs.train_specs("es", ["B0"], [0], ES | changed, "tiny")
    with pytest.raises(ValueError, match="base 'A0' has read no questions: take one of B0, B1, B2"):
        runs.train_specs("es", ["A0"], [0], ES, "tiny")
    with pytest.raises(ValueError, match="arm 'sft' fine-tunes on right answers"):
        runs.train_specs("sft", ["B0"], [0], ES | GRPO, "tiny")
    with pytest.raises(ValueError, match="base 'B0' knows no Countdown: set task='conciseness'"):
        runs.base_specs(["B0"], {"max_completion_length": 16, "validation_problems": 8, "test_problems": 8}, "tiny")


def test_a_run_sees_its_questions_equally_often_and_two_are_always_the_same():
    (spec,) = runs.train_specs("es", ["B0"], [3], ES | {"steps": 100}, "tiny")
    _, _, sets = conciseness_runs.world(spec)
    asked = [p.question for p in sets["train"]]
    assert len(asked) == 400 and {asked.count(q) for q in asked} == {2}
    assert set(asked) == {p.question for p in tiny_questions.problems("train")}
    pairs = [
        {(p.question, p.answer) for p in conciseness_runs.world(spec | {"unique_prompts": 2, "seed": seed})[2]["train"]}
        for seed in (0, 1)
    ]
    assert pairs[0] == pairs[1] and len(pairs[0]) == 2
    assert {answer for _, answer in pairs[0]} > {"no"} and any("+" in question for question, _ in pairs[0])


def test_the_curve_and_the_record_of_a_run_hold_what_the_module_says():
    settings = {"es": ES, "grpo": GRPO}
    found = {arm: runs.run_train(runs.train_specs(arm, ["B0"], [0], settings[arm], "tiny")[0]) for arm in settings}
    for arm, record in found.items():
        curve = record["curve"]
        # sixteen points fit into a record, with what is stored besides (600 bytes: environment, commit, hash)
        whole = record | {"spec": runs.train_specs(arm, ["B0"], [0], settings[arm], "tiny")[0]}
        size, *of_points = (len(json.dumps(part, separators=(",", ":"))) for part in (whole, *curve.values()))
        assert size + sum(of_points) * (16 / 3 - 1) + 600 < 8000
        assert len({len(values) for values in curve.values()}) == 1 and curve["step"] == [0, 1, 2]
        assert curve["kl"][0] == pytest.approx(0, abs=1e-6) and curve["kl"][-1] > 0
        for decoding, n in (("greedy", 256), ("t1", 512)):
            bits = [stats.unpack_bits(text, n).mean() for text in curve[f"right_bits_{decoding}"]]
            assert np.allclose(bits, curve[f"right_{decoding}"], atol=1e-4)
        assert record["test"]["n"] == 256 and len(record["shown"]) == conciseness_runs.SHOWN
        assert stats.accuracy_matrix([record]).mean() == pytest.approx(record["test"]["greedy"], abs=1e-6)
        assert stats.accuracy_matrix([record], "t1").mean() == pytest.approx(record["test"]["t1"], abs=1e-6)
        assert set(record["jensen"]["gaps"]) == {f"{s:g}" for s in conciseness_runs.JENSEN_SIGMAS}
        assert record["hacks"]["greedy"]["right"] > 0.5
    # before training all have the same weights, and measuring moves none
    first = [
        {name: values[0] for name, values in r["curve"].items() if name.startswith(("proxy", "right"))}
        for r in found.values()
    ]
    assert first[0] == first[1]
    again = runs.run_train(runs.train_specs("es", ["B0"], [0], ES | {"curve_points": 4, "steps": 2}, "tiny")[0])
    assert again["digest"] == found["es"]["digest"]


def test_measuring_under_noise_puts_the_weights_back(engine):
    before = engine.master.copy()
    jensen = conciseness_runs._jensen({"measure": "strict"}, engine, tiny_questions.problems("validation"))
    assert engine.master.tobytes() == before.tobytes()
    # noise of a size that breaks everything costs no reward where answers were far too long
    assert jensen["gaps"]["0.003"] == pytest.approx(0, abs=0.5)


def test_the_base_record_says_where_its_answers_break(engine):
    (spec,) = runs.base_specs(["B0"], {"task": "conciseness", "max_completion_length": 24}, "tiny")
    record = runs.RUNNERS["base"](spec)
    shares = list(record["breaking"].values())
    assert shares[0] > 0.95 and shares[-1] < 0.1 and min(np.diff(shares)) < 0
    assert record["point"]["kl"] == pytest.approx(0, abs=1e-6)


def test_the_analysis_of_published_completions_reproduces_their_rewards():
    found = []
    for spec in conciseness_runs.published_specs("tiny"):
        try:
            found.append(runs.RUNNERS["published"](spec) | {"spec": spec})
        except FileNotFoundError as error:
            pytest.skip(str(error))
    assert len(found) == 32 and sum(r["completions"] for r in found) == 5120
    for r in found:
        assert r["reproduced"] == r["completions"] == 160 and abs(r["reward"]["released"] - r["recorded"]) < 1e-4
        assert r["changed"] == 0 or r["reward"]["strict"] != r["reward"]["released"]
        assert stats.unpack_bits(r["right_bits"], 160).mean() == pytest.approx(r["right"])
        assert len(r["shown"]) == 8
    silent = [(r["spec"]["set"], r["spec"]["seed"]) for r in found if r["all_empty"]]
    assert silent == [("ES_alpha0.001_sigma0.005", 1), ("GRPO_temp_0.7_beta0.0", 0), ("GRPO_temp_0.7_beta0.0464", 3)]


def test_completions_of_any_script_leave_room_in_a_record():
    shown = [conciseness_runs._beginning(text * 100) for text in ("a", "\n", "好", "\U0001f600")]
    assert [len(text) for text in shown] == [80, 80, 39, 19]
    assert all(len(json.dumps(text)) <= 240 for text in shown)
