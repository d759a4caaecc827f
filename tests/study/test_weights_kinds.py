"""Kinds that look at weights: coverage, answers, noise, lines, merged models and products, of the same short runs."""

import itertools
import random

import numpy as np
import pytest
import torch
from evoalign_study import measures, sweep, training, warm_starts, weight_cache
from evoalign_study.kinds import weights
from evoalign_study.kinds.decode import base_specs
from evoalign_study.kinds.train import train_specs
from evoalign_study.kinds.weights import (
    LONGEST,
    answers_spec,
    coverage_spec,
    merge_specs,
    noise_spec,
    pack_texts,
    path_spec,
    perturbed_specs,
    products_specs,
    unpack_texts,
)
from evoalign_study.records import (
    MAX_RECORD,
    pack_integers,
    pack_probabilities,
    record_line,
    unpack_bits,
    unpack_counts,
    unpack_integers,
    unpack_probabilities,
)
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from evoalign_lib import tiny
from evoalign_lib.analysis import kl as kl_analysis
from evoalign_lib.analysis import robustness
from evoalign_lib.engines.local import LocalEngine, Prompts
from evoalign_lib.tasks import conciseness, countdown
from evoalign_lib.tiny import questions

SETTINGS = {
    "max_completion_length": 16, "validation_problems": 20, "test_problems": 10, "steps": 2, "prompts_per_step": 4,
    "curve_points": 3, "population_size": 3, "sigma": 0.03, "alpha": 0.03, "reach_at": [0.6, 1],
}  # fmt: skip
RUNS = [("es", 3)]
SIZES = {
    "max_completion_length": 16, "validation_problems": 20, "test_problems": 10, "skill_messages": 12,
    "coverage_problems": 24, "coverage_samples": 200, "coverage_temperatures": [0.6, 1.0, 1.4],
    "coverage_sampled_at": [0.6, 1.0], "noise_sigmas": [1e-9, 0.05], "noise_trials": 2, "path_points": 3,
    "perturbed_members": 12, "perturbed_problems": 24, "perturbed_validation": 10,
}  # fmt: skip
MEASURE = measures.get("countdown")


def run_of(spec):
    return sweep.run(spec, "nb", "commit")


@pytest.fixture(scope="module")
def runs(es_runs):
    (records,) = es_runs
    return records


@pytest.fixture(scope="module")
def end(runs):
    return weight_cache.end(runs[:1])


@pytest.fixture(scope="module")
def covered(end):
    return run_of(coverage_spec("A0", end, SIZES, "tiny"))


@pytest.fixture(scope="module")
def engine():
    model, tokenizer = tiny.load("A0")
    problems = [countdown.Problem((3, 8), "24"), countdown.Problem((2, 7, 9), "18")]
    prompts = {"few": Prompts(tiny.dataset(problems, tokenizer), tokenizer)}
    opened = LocalEngine(model, tokenizer, None, prompts, max_completion_length=16)
    opened.problems = problems
    return opened


# ---- coverage


def tree(engine, problem: int, temperature: float, least: float) -> tuple[float, float]:
    """The probability of right completions that are likely enough, token by token, and that of what was cut off."""
    prompts, right, cut = engine.prompts["few"], 0.0, 0.0
    ids, mask = (torch.as_tensor(array[problem : problem + 1]) for array in (prompts.ids, prompts.mask))
    ids = ids[:, mask[0].bool()]
    leaves, chances = torch.zeros((1, 0), dtype=torch.int64), torch.ones(1, dtype=torch.float64)
    for _ in range(16):
        with torch.inference_mode():
            logits = engine.model(input_ids=torch.cat([ids.expand(len(leaves), -1), leaves], 1)).logits[:, -1]
        joint = chances[:, None] * (logits.double() / temperature).softmax(-1)
        kept = joint >= least
        cut += float(joint[~kept].sum())
        rows, tokens = kept.nonzero(as_tuple=True)
        leaves, chances = torch.cat([leaves[rows], tokens[:, None]], 1), joint[rows, tokens]
        ended = torch.isin(tokens, torch.tensor(engine.eos_ids))
        for leaf, chance in zip(leaves[ended], chances[ended], strict=True):
            right += float(chance) * MEASURE.right(engine.problems[problem], engine.tokenizer.decode(leaf[:-1]))
        leaves, chances = leaves[~ended], chances[~ended]
        if not len(leaves):
            break
    return right, cut + float(chances.sum())  # cut off by the length


@pytest.mark.parametrize("temperature", [0.6, pytest.param(1.0, marks=pytest.mark.slow)])
def test_the_chance_of_a_right_answer_is_that_of_the_whole_tree(engine, temperature):
    (reached,) = MEASURE.reach(engine.model, engine.prompts["few"], engine, engine.problems, [temperature])
    for i, exact in enumerate(reached):
        right, cut = tree(engine, i, temperature, 1e-5)
        # right answers that are written in another way are few
        assert cut < 0.1 and right > 0.001 and 0.995 * right <= exact <= right + cut + 1e-9


def test_log_probabilities_are_those_of_the_comparison_of_two_models(engine):
    prompts, temperatures = engine.prompts["few"], [0.5, 1.5]
    ids = engine.tokenizer(["</think>\n<answer>3*8</answer><|im_end|>", "9"], add_special_tokens=False)["input_ids"]
    given_two = (prompts.ids, prompts.mask, ids, engine.eos_ids)
    rows = kl_analysis.log_probabilities(engine.model, *given_two, temperatures)
    for row, temperature in zip(rows, temperatures, strict=True):
        both = kl_analysis.compare(engine.model, engine.model, *given_two, temperature)
        assert torch.allclose(row, both.log_policy.sum(-1), rtol=1e-12, atol=1e-9)
    with pytest.raises(ValueError, match="must be positive"):
        kl_analysis.log_probabilities(engine.model, *given_two, [0.0])


def test_the_chances_are_those_of_samples(covered):
    for name, drawn in covered["drawn"].items():
        exact, counts = unpack_probabilities(covered["reach"][name]), unpack_integers(drawn["right"])
        assert len(exact) == len(counts) == covered["n"] == 24
        assert counts.sum() == drawn["right_samples"] and drawn["listed"] >= 0.97 * drawn["right_samples"]
        spread = np.sqrt(200 * exact * (1 - exact))
        assert (np.abs(counts - 200 * exact) < 5 * spread + 3).all()
        # together they tell a bias of a few percent
        assert abs(counts.sum() - 200 * exact.sum()) < 4 * np.sqrt((spread**2).sum()) + 3
        assert 0 < drawn["entropy"] < drawn["entropy_corrected"] < np.log(200)
        # an answer that most samples give is the vote
        assert unpack_bits(drawn["vote_bits"], 24)[exact > 0.6].all()
    # what grows with the problems: 256 of them at seven temperatures
    per_problem = sum(len(text) for text in covered["reach"].values()) / 3 / 24 * 7 + 2 * (2 + 0.25) + 0.25
    assert len(record_line(covered)) + 232 * per_problem < 8_000


def test_what_a_run_reaches_at_its_end_is_in_its_curve(runs, covered):
    curve = runs[0]["curve"]
    assert covered["validation"].keys() == {"t0.6", "t1", "t1.4"}
    for name in ("t0.6", "t1"):
        ends = [curve[f"reach_{name}@{k}"] for k in (1, 16, 256)]
        assert all(0 < one[-1] < more[-1] for one, more in itertools.pairwise(ends))
        assert ends[1][-1] < covered["validation"][name] < ends[2][-1]
        # before the first step the run is its base: what it wins and loses against it is chance
        assert curve[f"won_{name}"][0] == pytest.approx(curve[f"lost_{name}"][0], abs=1e-5)
        change = curve[f"won_{name}"][-1] - curve[f"lost_{name}"][-1]
        assert change == pytest.approx(ends[2][-1] - ends[2][0], abs=3e-5)
    # looking at a run does not change it
    [unseen] = train_specs("es", ["A0"], [0], SETTINGS | {"reach_at": None}, "smoke")
    assert run_of(unseen)["digest"] == runs[0]["digest"]


# ---- noise in the place of samples


def test_copies_without_noise_answer_as_the_base_does():
    [spec] = perturbed_specs("A0", [1e-9], 1, SIZES, "tiny")
    record, few = run_of(spec), SIZES | {"coverage_samples": 2, "coverage_temperatures": [1.0]}
    base = run_of(coverage_spec("A0", None, few | {"coverage_sampled_at": [1.0]}, "tiny"))
    greedy = unpack_bits(base["greedy_bits"], 24)
    assert np.array_equal(unpack_integers(record["drawn"]["right"]), 12 * greedy.astype(int))
    mean = record["member"]["mean"]
    assert record["member"]["sd"] == record["drawn"]["entropy"] == 0 and mean == pytest.approx(greedy.mean(), abs=1e-6)
    assert record["best"] == {"1": {"mean": mean, "vote": mean}}


def test_copies_with_noise_solve_other_problems_and_are_the_same_when_made_again():
    first, other = perturbed_specs("A0", [0.03], 2, SIZES, "tiny")
    record, again, others = (run_of(spec) for spec in (first, first, other))
    assert all(record[name] == again[name] != others[name] for name in ("drawn", "validation", "member"))
    counts = unpack_integers(record["drawn"]["right"])
    assert counts.mean() / 12 == pytest.approx(record["member"]["mean"], abs=1e-6)
    assert record["member"]["sd"] > 0 < record["drawn"]["entropy"] and ((counts > 0) & (counts < 12)).any()
    # the vote of one copy is what it answers
    assert record["best"]["1"]["mean"] == pytest.approx(record["best"]["1"]["vote"], abs=1e-6)


# ---- answers


@pytest.mark.parametrize("whose", ["base", "run"])
def test_the_texts_are_those_of_the_engine_and_are_graded_whole(end, runs, whose):
    spec = answers_spec("A0", end if whose == "run" else None, SIZES | {"coverage_problems": 64}, "tiny")
    record, problems = run_of(spec), tiny.problems("test", 64)
    with training.opened(spec) as (engine, sets):
        assert sets["test"] == problems and record["longest"] == LONGEST
        if whose == "run":
            (engine.master[:],) = weight_cache.of_group(end["of"])
        for decoding, samples in (("greedy", 0), ("t1", 1)):
            (row,) = engine.generate("test", samples=samples, seed=0)
            right = unpack_bits(record[f"{decoding}_bits"], 64)
            written = unpack_texts(record[decoding], 64)
            for problem, (text, _), one, is_right in zip(problems, row, written, right, strict=True):
                answer = MEASURE.answer(text)
                assert one == (answer or text[:LONGEST], answer is not None, answer is None and len(text) > LONGEST)
                assert is_right == MEASURE.right(problem, text)
            assert len(set(written)) > 30


@pytest.mark.parametrize("text", ["\ufffd" * 200, '"\\\n' * 60, "<|im_end|> " * 20, "12+3*(24-6)"])
def test_texts_of_any_kind_fit_into_a_record(monkeypatch, text):
    monkeypatch.setattr(weights, "_answered", lambda measure, completion: (text, False))
    record = run_of(answers_spec("A0", None, SIZES | {"coverage_problems": 256}, "tiny"))
    assert len(record_line(record)) <= MAX_RECORD
    (one,) = set(unpack_texts(record["t1"], 256))
    assert one.text == text[: record["longest"]] and one.cut == (len(text) > record["longest"])


def test_bases_whose_right_answers_are_not_listed_are_asked_too():
    thinking = {"coverage_problems": 4, "max_completion_length": 24, "filler_steps": 4}
    asked = {"coverage_problems": 4, "max_completion_length": 32, "task": "conciseness", "validation_problems": 9999}
    for base, settings in (("H0", thinking), ("B0", asked)):
        record = run_of(answers_spec(base, None, settings, "tiny"))
        written = unpack_texts(record["greedy"], record["n"])
        # conciseness looks for no answer in a completion, so that these are completions
        assert len(written) == 4 and (base == "H0" or all(one.answered and one.text for one in written))


# surrogates are no characters of a text that a tokenizer decodes
@given(st.lists(st.tuples(st.text(st.characters(exclude_categories=["Cs"])), st.booleans()), min_size=1, max_size=20))
def test_packed_texts_come_back(texts):
    packed = pack_texts(texts)
    assert packed.isascii() and not {'"', "\\", "\n"} & set(packed)
    assert unpack_texts(packed, len(texts)) == [(t[:LONGEST], a, len(t) > LONGEST) for t, a in texts]


# ---- noise on trained models


def test_noise_begins_from_the_models_own_weights_and_differs_by_draw(runs, end):
    shaken = run_of(noise_spec("A0", end, SIZES, "tiny"))
    assert shaken["clean"]["greedy"] == pytest.approx(runs[0]["curve"]["validation_greedy"][-1], abs=1e-5)
    for part in weights.PARTS:
        for decoding, clean in shaken["clean"].items():
            still, loud = shaken[part][decoding]
            assert still == [clean, clean] and len(loud) == 2  # what the loud noise before left would show
    assert any(len(set(shaken[part][name][1])) == 2 for part in weights.PARTS for name in shaken["clean"])


def test_the_draws_are_those_of_no_run_and_the_same_for_all(monkeypatch, end):
    seen, perturb = [], robustness.perturb

    def noted(weights, sigma, key, **how):
        moved = perturb(weights, sigma, key, **how)
        seen.append({name: (moved[name] - weights[name]).numpy() for name in weights})
        return moved

    monkeypatch.setattr(robustness, "perturb", noted)
    few = SIZES | {"noise_sigmas": [0.5], "noise_trials": 1, "validation_problems": 2}
    for whose in (None, end):
        run_of(noise_spec("A0", whose, few, "tiny"))
    isotropic, relative, head, body, of_run = seen[:5]
    for name, eps in isotropic.items():
        # float32 sums round at the size of the weights
        assert np.allclose(eps, of_run[name], atol=1e-6) and np.array_equal(eps, head[name] + body[name])
    lengths = [sum(np.square(e, dtype=np.float64).sum() for e in each.values()) for each in (isotropic, relative)]
    assert lengths[1] == pytest.approx(lengths[0], rel=0.02)  # as long in all, but for the draw
    assert lengths[0] == pytest.approx(0.25 * sum(e.size for e in isotropic.values()), rel=0.02)


# ---- lines


@pytest.fixture(scope="module", params=["A0", "B0"])
def line(request, runs):
    """Base, sizes and two runs of a task, with the line from the base to the first."""
    base, sizes, own = request.param, SIZES, runs[:2]
    if base == "B0":
        sizes = SIZES | {"task": "conciseness", "max_completion_length": 24}
        more = {
            "task": "conciseness",
            "max_completion_length": 24,
            "noise_draws": 1,
            "unique_prompts": 200,
            "reach_at": None,
        }
        own = [run_of(spec) for spec in train_specs("es", [base], [0, 1], SETTINGS | more, "tiny")]
    return base, sizes, own, run_of(path_spec(base, None, weight_cache.end(own[:1]), sizes, "tiny"))


def test_the_ends_are_the_base_and_the_run(line):
    base, sizes, own, record = line
    spec, points, measure = record["spec"], record["points"], measures.get(record["spec"]["task"])
    assert record["n"] == 20 and points["kl"][0] == 0 < points["kl"][1] < points["kl"][2]
    assert record["distance"] == pytest.approx(own[0]["update_norm"], rel=1e-6)
    with training.opened(spec) as (engine, sets):
        asked = {"validation": sets["validation"]}
        for i, master in ((0, engine.master.copy()), (-1, weight_cache.of_group(weight_cache.group(own[:1]))[0])):
            engine.master[:] = master
            said = measure.sampled(spec, engine, asked, "validation", [0.6, 1.0], 1)
            for name in ("t0.6", "t1"):
                right = unpack_bits(points[f"{name}_bits"][i], 20)
                assert right.tolist() == unpack_counts(said[f"{name}_counts"]).tolist()
        if base == "B0":
            ends = [points["reward_greedy"][i] for i in (0, -1)]
            assert ends == pytest.approx([own[0]["curve"]["proxy_greedy"][i] for i in (0, -1)], abs=1e-3)


def test_the_middle_of_two_runs_is_their_mean_and_lines_have_no_direction(line):
    base, sizes, own, record = line
    ends = [weight_cache.end([run]) for run in own]
    between = run_of(path_spec(base, *ends, sizes, "tiny"))["points"]
    mean = run_of(path_spec(base, weight_cache.end(own), None, sizes, "tiny"))["points"]
    assert {name: values[1] for name, values in between.items()} == {name: v[0] for name, v in mean.items()}
    assert np.ptp(between["nll"]) > 0
    assert {name: values[0] for name, values in record["points"].items()} == {name: v[2] for name, v in mean.items()}


def test_the_likelihood_is_that_of_the_answer_alone(line):
    base, _, _, record = line
    if base == "A0":
        pytest.skip("the right answer is drawn")
    model, tok = tiny.load(base)
    total = 0.0
    for problem in questions.problems("validation")[:20]:
        before = tok(conciseness.prompt(problem, tokenizer=tok), add_special_tokens=False)["input_ids"]
        said = tok(problem.answer + tiny.END, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([before + said])).logits[0].double().log_softmax(-1)
        total -= sum(float(logits[len(before) - 1 + i, token]) for i, token in enumerate(said))
    assert record["points"]["nll"][0] == pytest.approx(total / 20, rel=1e-4)


@pytest.mark.parametrize("task", ["countdown", "conciseness"])
def test_right_answers_are_right(task):
    asked = tiny.problems("validation", 64) if task == "countdown" else questions.problems("validation")
    measure, rng = measures.get(task), random.Random(0)
    for problem in asked:
        written = measure.right_answer(problem, rng)
        text = written.removesuffix(tiny.END)
        assert text != written and measure.right(problem, text)
        if task == "conciseness":
            assert conciseness.reward([problem.question], [text], [problem.answer]) == [0.0]  # the best there is


def test_right_answers_to_public_problems_are_right_and_end_as_the_model_does(external_data):
    asked, rng = countdown.load_public("train"), random.Random(0)
    assert {len(problem.numbers) for problem in asked} == {3, 4}
    for problem in asked:
        assert MEASURE.score(problem, MEASURE.right_answer(problem, rng).removesuffix(tiny.END)) == 1.1
    with pytest.raises(ValueError, match="98000"):
        MEASURE.right_answer(countdown.Problem((44, 19, 35, 3), "98000"), rng)
    other = tiny.tokenizer()
    other.eos_token = other.pad_token
    rows = warm_starts.rows({"task": "countdown", "base": "some/model", "seed": 0, "warm_rows": 40}, other)
    assert len(rows) == 40 and all(row["completion"].endswith(f"</answer>{other.eos_token}") for row in rows)


# ---- merged models


def merged(records, **how):
    return run_of(merge_specs(records, SIZES, "tiny", **how))


def outcome(record):
    return {name: record["test"][name] for name in ("n", "greedy", "greedy_bits", "t1", "t1_counts")}


def test_one_run_alone_is_the_run_and_nothing_of_it_the_base(runs):
    alone, nothing = merged(runs[:1]), merged(runs, factor=0.0)
    sizes = {name: SIZES[name] for name in ("max_completion_length", "validation_problems", "test_problems")}
    assert outcome(alone) == outcome(runs[0]) and outcome(nothing) == outcome(run_of(base_specs(["A0"], sizes, "t")[0]))
    assert alone["norm"] == pytest.approx(runs[0]["update_norm"], rel=1e-6) and nothing["norm"] == 0
    assert alone["kl_policy_base"]["exact_nats_per_token"] > 0 == nothing["kl_policy_base"]["exact_nats_per_token"]
    assert alone["skills"].keys() == set(tiny.SKILL_NAMES) and "t0.6_counts" in alone["test"]
    assert all(skill["kl"] == 0 for skill in nothing["skills"].values())
    assert nothing["skills"]["copy"]["greedy"] == 1  # what the base has learned


def test_lengths_of_means_and_of_what_is_made_as_long(runs):
    start, layout = weight_cache.of_base("A0"), weight_cache.layout_of("A0")

    def moved(records, **how):
        return weight_cache.displacement(weight_cache.end(records, **how), start, layout)

    masters = [master.astype(np.float64) for master in weight_cache.of_group(weight_cache.group(runs))]
    apart = sum(np.sum((one - other) ** 2) for one, other in itertools.combinations(masters, 2))
    squared = (3 * sum(r["update_norm"] ** 2 for r in runs) - apart) / 9  # of the mean of three, by their distances
    short = float(np.linalg.norm(moved(runs)))
    # walks of their own average to less
    assert short == pytest.approx(squared**0.5, rel=1e-5) and short < np.linalg.norm(moved(runs[:1]))
    for records, how, times in (
        (runs[:1], {"as_long_as": runs}, 1),
        (runs, {"factor": 2.0}, 2),
        (runs, {"draw": 0}, 1),
    ):
        assert np.linalg.norm(moved(records, **how)) == pytest.approx(times * short, rel=1e-6)
    random, again, other = (moved(runs, draw=draw) for draw in (0, 0, 1))
    assert np.array_equal(random, again) and abs(random @ other) < 0.1 * short**2


def test_weights_that_are_not_the_records_are_never_merged(runs):
    with pytest.raises(ValueError, match="0" * 16):
        merged([runs[0] | {"digest": "0" * 16}])


# ---- products


def test_blocks_are_the_products_of_the_weights(runs, monkeypatch):
    monkeypatch.setattr(weights, "BLOCK", 2)
    specs = products_specs([runs, runs[:1]], "tiny")
    sizes = [(len(s["a"]["seeds"]), len(s["b"]["seeds"])) for s in specs]
    assert sizes == [(2, 2), (2, 1), (2, 1), (1, 1), (1, 1), (1, 1)]
    start, records = weight_cache.of_base("A0"), [run_of(spec) for spec in specs[:2]]
    for record in records:
        a, b = ([m.astype(np.float64) - start for m in weight_cache.of_group(record["spec"][side])] for side in "ab")
        total = np.sum([layer["products"] for layer in record["layers"].values()], axis=0)
        assert total == pytest.approx(np.array([[x @ y for y in b] for x in a]), rel=1e-5, abs=1e-7)
    own = records[0]["layers"]
    assert sum(layer["entries"] for layer in own.values()) == records[0]["d"] == runs[0]["d"]
    assert sum(layer["start"] for layer in own.values()) == pytest.approx(start @ start, rel=1e-5)
    for layer in own.values():
        unrounded, rounded = (layer["moved"][dtype] for dtype in ("float32", "bfloat16"))
        assert all(0 < r < f <= layer["entries"] for r, f in zip(rounded, unrounded, strict=True))
    assert "moved" not in records[1]["layers"]["layer 0"]


# ---- what is refused


def changed(maker, base="A0", **more):
    return lambda end: maker(base, None, {k: v for k, v in (SIZES | more).items() if v is not ...}, "tiny")


OTHER = {"spec": {"kind": "train", "base": "A1", "seed": 0}, "digest": ""}
REFUSED = [  # what makes a spec from an end, and what the error names
    (changed(coverage_spec, coverage_temperatures=[]), "coverage_temperatures="),
    (changed(coverage_spec, coverage_temperatures=[1, 1.0]), "coverage_temperatures="),
    (changed(coverage_spec, coverage_sampled_at=[0.0]), "temperature=0.0"),
    (changed(coverage_spec, coverage_samples=1), "coverage_samples=1"),
    (changed(coverage_spec, coverage_samples=5000), "coverage_samples=5000"),
    (changed(coverage_spec, coverage_problems=3000), "test_problems=3000"),
    (changed(answers_spec, coverage_problems=0), "coverage_problems=0"),
    (changed(answers_spec, coverage_problems=321), "coverage_problems=321"),
    (changed(answers_spec, max_completion_length=...), "'max_completion_length'"),
    (changed(answers_spec, task="conciseness"), "'countdown'"),
    (changed(answers_spec, "gpt2"), "'gpt2'"),
    (changed(noise_spec, noise_sigmas=[]), "noise_sigmas="),
    (changed(noise_spec, noise_sigmas=[0.01, -1.0]), "noise_sigmas="),
    (changed(noise_spec, noise_sigmas=[float("nan")]), "noise_sigmas="),
    (changed(noise_spec, noise_sigmas=[i + 1 for i in range(9)]), "noise_sigmas="),
    (changed(noise_spec, noise_trials=0), "noise_trials=0"),
    (lambda end: perturbed_specs("A0", [], 1, SIZES, "tiny"), "sigmas="),
    (lambda end: perturbed_specs("A0", [0.1, 0.1], 1, SIZES, "tiny"), "sigmas="),
    (lambda end: perturbed_specs("A0", [0.1], 0, SIZES, "tiny"), "repeats=0"),
    (lambda end: perturbed_specs("A0", [0.1], 1, SIZES | {"perturbed_members": 1}, "tiny"), "perturbed_members=1"),
    (lambda end: perturbed_specs("A0", [0.1], 1, SIZES | {"perturbed_problems": 3000}, "tiny"), "test_problems=3000"),
    (lambda end: path_spec("A0", end, end, SIZES, "tiny"), "same model"),
    (lambda end: path_spec("A0", None, None, SIZES, "tiny"), "same model"),
    (lambda end: path_spec("A0", None, end, SIZES | {"path_points": 2}, "tiny"), "path_points=2"),
    (lambda end: path_spec("A0", None, end, {"path_points": 3}, "tiny"), "a path needs"),
    (lambda end: path_spec("A0", None, end, SIZES | {"path_points": 50, "validation_problems": 256}, "t"), "12800"),
    (lambda end: path_spec("A1", None, end, SIZES, "tiny"), "'A0'.*'A1'"),
    (lambda end: path_spec("B0", None, None, SIZES, "tiny"), "task='conciseness'"),
    (lambda end: path_spec("B0", None, None, SIZES | {"task": "conciseness", "measure": "words"}, "t"), "'words'"),
    (lambda end: path_spec("B0", None, None, SIZES | {"task": "conciseness", "validation_problems": 129}, "t"), "=129"),
    (lambda end: path_spec("H0", None, end, SIZES, "tiny"), "'H0'"),
    (lambda end: merge_specs([], SIZES, "tiny"), "0 runs"),
    (lambda end: products_specs([], "tiny"), "no base"),
    (lambda end: products_specs([[OTHER], [{"spec": OTHER["spec"] | {"base": "A0"}, "digest": ""}]], "t"), "A0, A1"),
    *((lambda end, make=make: make("A1", end, SIZES, "tiny"), "'A0'.*'A1'") for make in (coverage_spec, answers_spec)),
]


@pytest.mark.parametrize(("make", "named"), REFUSED)
def test_what_cannot_be_measured_is_refused(end, make, named):
    with pytest.raises(ValueError, match=named):
        make(end)


def test_what_makes_no_group_is_refused(runs):
    other = runs[1] | {"spec": runs[1]["spec"] | {"sigma": 0.02}}
    for records in ([runs[0], other], [runs[0] | {"spec": runs[0]["spec"] | {"kind": "base"}}]):
        with pytest.raises(ValueError, match="make no group"):
            merge_specs(records, SIZES, "tiny")
    with pytest.raises(ValueError, match="factor=nan"):
        merge_specs(runs, SIZES, "tiny", factor=float("nan"))
    with pytest.raises(ValueError, match="'A1'.*'A0'"):
        merge_specs(runs[:1], SIZES, "tiny", as_long_as=[OTHER])


# ---- packed numbers


@given(arrays(np.int64, st.integers(0, 50), elements=st.integers(0, 4095)))
def test_packed_integers_come_back(values):
    text = pack_integers(values)
    assert len(text) == 2 * len(values) and np.array_equal(unpack_integers(text), values)


@given(arrays(np.float64, st.integers(0, 50), elements=st.floats(0, 1)))
def test_packed_probabilities_come_back_to_a_quarter_of_a_percent(values):
    back, small = unpack_probabilities(pack_probabilities(values)), values < 1.3e-9
    assert np.allclose(back[~small], values[~small], rtol=0.0026, atol=0)
    assert (back[small] < 1.4e-9).all() and (back[values == 1] == 1).all() and (back[values == 0] == 0).all()


DAMAGED = [(pack_integers, [-1]), (pack_integers, [4096]), (pack_integers, [0.5]), (pack_integers, [[1]])]
DAMAGED += [(pack_probabilities, values) for values in ([-0.1], [1.1], [float("nan")], [[0.5]])]
DAMAGED += [
    (unpack_integers, "A"),
    (unpack_integers, "A+"),
    (lambda text: unpack_texts(text, 3), "a b"),
    (pack_texts, []),
]


@pytest.mark.parametrize(("function", "value"), DAMAGED)
def test_what_is_no_row_of_numbers_or_texts_is_refused(function, value):
    with pytest.raises(ValueError):
        function(value)
