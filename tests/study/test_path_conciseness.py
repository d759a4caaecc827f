"""Lines between models of conciseness: what is right, the reward and the right answers are those of that task."""

import random

import numpy as np
import pytest
import torch
from evoalign_study import measures, sweep, warm_starts, weight_cache
from evoalign_study.kinds.weights import path_spec
from evoalign_study.records import record_line, unpack_bits, unpack_counts

from evoalign_lib import tiny
from evoalign_lib.analysis.hacking import hack_report
from evoalign_lib.engines.local import LocalEngine, Prompts
from evoalign_lib.tasks import conciseness, countdown
from evoalign_lib.tiny import questions

BASE, N = "B0", 48
SIZES = {"task": "conciseness", "max_completion_length": 24, "validation_problems": N, "path_points": 3}
SETTINGS = {
    "task": "conciseness", "max_completion_length": 24, "validation_problems": N, "test_problems": 8, "noise_draws": 1,
    "unique_prompts": 200, "steps": 2, "prompts_per_step": 4, "curve_points": 2,
    "population_size": 3, "sigma": 0.03, "alpha": 0.03,
}  # fmt: skip
RUNS = [("es", 2)]
MEASURES = measures.get("conciseness")


@pytest.fixture(scope="module")
def runs(es_runs):
    (found,) = es_runs
    return found


@pytest.fixture(scope="module")
def line(runs):
    return sweep.run(path_spec(BASE, None, weight_cache.end(runs[:1]), SIZES, "tiny"), "nb", "commit")


@pytest.fixture(scope="module")
def engine():
    model, tok = tiny.load(BASE)
    asked = Prompts(conciseness.dataset(questions.problems("validation")[:N], tok), tok)
    return LocalEngine(model, tok, None, {"validation": asked}, max_completion_length=24)


def test_the_ends_are_the_base_and_the_run(runs, line, engine):
    asked, points, start = questions.problems("validation")[:N], line["points"], engine.master.copy()
    assert line["n"] == N and points["kl"][0] == 0 < points["kl"][1] < points["kl"][2]
    assert line["distance"] == pytest.approx(runs[0]["update_norm"], rel=1e-6)
    for i, master in ((0, start), (-1, weight_cache.again(runs[0]["spec"], runs[0]["digest"])[0])):
        engine.master[:] = master
        found = MEASURES.sampled(line["spec"], engine, {"validation": asked}, "validation", [0.6, 1.0], 1)
        for name in ("t0.6", "t1"):
            right = unpack_bits(points[f"{name}_bits"][i], N)
            assert 0 < right.mean() < 1 and right.tolist() == unpack_counts(found[f"{name}_counts"]).tolist()
            assert points[f"reward_{name}"][i] == pytest.approx(found[f"reward_{name}"], abs=1e-4)
        greedy = runs[0]["curve"]["proxy_greedy"]
        assert points["reward_greedy"][i] == pytest.approx(greedy[i], abs=1e-3)
    engine.master[:] = start
    engine.write_model()


def test_the_likelihood_is_that_of_the_answer_alone(line, engine):
    _, tok = tiny.load(BASE)
    total = 0.0
    for problem in questions.problems("validation")[:N]:
        before = tok(conciseness.prompt(problem, tokenizer=tok), add_special_tokens=False)["input_ids"]
        said = tok(problem.answer + tiny.END, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logits = engine.model(torch.tensor([before + said])).logits[0].double().log_softmax(-1)
        total -= sum(float(logits[len(before) - 1 + i, token]) for i, token in enumerate(said))
    assert line["points"]["nll"][0] == pytest.approx(total / N, rel=1e-4)


def test_the_middle_of_two_runs_is_their_mean(runs):
    ends = [weight_cache.end([run]) for run in runs]
    record = sweep.run(path_spec(BASE, *ends, SIZES, "tiny"), "nb", "commit")
    between = record["points"]
    mean = sweep.run(path_spec(BASE, None, weight_cache.end(runs), SIZES, "tiny"), "nb", "commit")["points"]
    assert {name: values[1] for name, values in between.items()} == {name: v[2] for name, v in mean.items()}
    assert np.ptp(between["nll"]) > 0 and len(record_line(record)) < 8_000


def test_a_word_said_again_and_again_is_no_right_answer(engine):
    asked = questions.problems("validation")[:3]
    texts = [asked[0].answer, " ".join([asked[1].answer] * 12), "<|im_end|>"]
    row = [(text, engine.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    assert hack_report(texts, prompts=[p.question for p in asked]).degenerate.tolist() == [False, True, True]
    for measure, of_nothing in (("strict", len(asked[2].answer)), ("released", abs(10 - len(asked[2].answer)))):
        rewards, right = MEASURES.judged({"measure": measure, "max_completion_length": 24}, engine, asked, row)
        assert right.tolist() == [True, False, False]
        assert rewards[0] == 0 and rewards[1] == len(asked[1].answer) - len(texts[1]) and rewards[2] == -of_nothing


@pytest.mark.parametrize(("task", "asked"), [("countdown", tiny.problems("validation", 64)), ("conciseness", None)])
def test_right_answers_are_right(task, asked):
    asked = questions.problems("validation") if asked is None else asked
    measure, rng = measures.get(task), random.Random(0)
    for problem in asked:
        written = measure.right_answer(problem, rng)
        text = written.removesuffix(tiny.END)
        assert text != written and measure.right(problem, text)
        if task == "conciseness":
            assert conciseness.reward([problem.question], [text], [problem.answer]) == [0.0]  # the best there is
        else:
            assert countdown.grade(text, problem.numbers, problem.target).reward == 1.1


def test_right_answers_to_public_problems_are_right(external_data):
    """On which an adapter of a model from outside is fine-tuned: four numbers, and targets that are no integers."""
    measure, rng = measures.get("countdown"), random.Random(0)
    asked = countdown.load_public("train")
    assert {len(problem.numbers) for problem in asked} == {3, 4}
    for problem in asked:
        assert measure.score(problem, measure.right_answer(problem, rng).removesuffix(tiny.END)) == 1.1
    with pytest.raises(ValueError, match="has no right answer"):
        measure.right_answer(countdown.Problem((44, 19, 35, 3), "98000"), rng)


def test_a_model_from_outside_is_fine_tuned_on_answers_with_its_own_end_token(external_data):
    other = tiny.tokenizer()
    other.eos_token = other.pad_token
    assert other.eos_token != tiny.END
    spec = {"task": "countdown", "base": "some/model", "seed": 0, "warm_rows": 40}
    rows = warm_starts.rows(spec, other)
    assert len(rows) == 40 and all(row["completion"].endswith(f"</answer>{other.eos_token}") for row in rows)


def test_specs_say_task_and_measure_and_refuse_what_cannot_be(runs):
    end = weight_cache.end(runs[:1])
    spec = path_spec(BASE, None, end, SIZES, "tiny")
    assert spec["task"] == "conciseness" and spec["measure"] == "strict"
    assert not {"noise_draws", "test_problems", "grader"} & spec.keys()
    assert path_spec(BASE, None, end, SIZES | SETTINGS, "tiny") == spec  # settings of runs are none of a line
    assert path_spec(BASE, None, end, SIZES | {"measure": "released"}, "tiny")["measure"] == "released"
    without = {name: value for name, value in SIZES.items() if name != "task"}
    for base, sizes, message in (
        (BASE, without, "set task='conciseness'"),
        (BASE, SIZES | {"validation_problems": 129}, "there are 128 validation questions"),
        (BASE, SIZES | {"measure": "words"}, "measure='words': use one of strict, released"),
        ("B1", SIZES, "an end of the path started from base 'B0', the path from 'B1'"),
        ("A0", without, "an end of the path started from base 'B0', the path from 'A0'"),
        ("A0", without | {"measure": "released"}, "task 'countdown' has no such setting, set task='conciseness'"),
        ("H0", without, "one of A0, A1, A2, B0, B1, B2"),
    ):
        with pytest.raises(ValueError, match=message):
            path_spec(base, None, end, sizes, "tiny")
