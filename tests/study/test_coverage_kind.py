"""What a model can solve, exactly: held to its whole tree of answers, to samples, and to the run's own curve."""

import numpy as np
import pytest
import torch
from evoalign_study import measures, sweep, weight_cache
from evoalign_study.kinds.train import train_specs
from evoalign_study.kinds.weights import coverage_spec, perturbed_specs
from evoalign_study.records import (
    pack_integers,
    pack_probabilities,
    record_line,
    unpack_bits,
    unpack_integers,
    unpack_probabilities,
)
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from evoalign_lib import tiny
from evoalign_lib.analysis import coverage
from evoalign_lib.analysis import kl as kl_analysis
from evoalign_lib.engines.local import LocalEngine, Prompts
from evoalign_lib.tasks import countdown

SIZES = {
    "max_completion_length": 16, "validation_problems": 20, "coverage_problems": 24, "coverage_samples": 200,
    "coverage_temperatures": [0.6, 1.0, 1.4], "coverage_sampled_at": [0.6, 1.0],
}  # fmt: skip
SETTINGS = {
    "max_completion_length": 16, "validation_problems": 20, "test_problems": 10, "steps": 2, "prompts_per_step": 4,
    "curve_points": 3, "population_size": 3, "sigma": 0.03, "alpha": 0.03, "reach_at": [0.6, 1],
}  # fmt: skip
RUNS = [("es", 1)]
MEASURE = measures.get("countdown")
needs_bases = pytest.mark.skipif(not (tiny.bases_folder() / "A0").is_dir(), reason="the bases have not been trained")


@pytest.fixture(scope="module")
def runs(es_runs):
    (found,) = es_runs
    return found


@pytest.fixture(scope="module")
def covered(runs):
    return sweep.run(coverage_spec("A0", weight_cache.end(runs), SIZES, "tiny"), "nb", "commit")


@pytest.fixture(scope="module")
def engine():
    model, tokenizer = tiny.load("A0")
    problems = [countdown.Problem((3, 8), "24"), countdown.Problem((2, 7, 9), "18")]
    prompts = {"few": Prompts(tiny.dataset(problems, tokenizer), tokenizer)}
    found = LocalEngine(model, tokenizer, None, prompts, max_completion_length=16)
    found.problems = problems
    yield found
    found.close()


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
            text = engine.tokenizer.decode(leaf[:-1])
            right += float(chance) * MEASURE.right(engine.problems[problem], text)
        leaves, chances = leaves[~ended], chances[~ended]
        if not len(leaves):
            return right, cut
    return right, cut + float(chances.sum())  # cut off by the length


@needs_bases
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_the_chance_of_a_right_answer_is_that_of_the_whole_tree(engine, temperature):
    (reached,) = MEASURE.reach(engine.model, engine.prompts["few"], engine, engine.problems, [temperature])
    for i, exact in enumerate(reached):
        right, cut = tree(engine, i, temperature, 1e-5)
        assert cut < 0.1 and right > 0.001
        # right answers that are written in another way are few
        assert 0.995 * right <= exact <= right + cut + 1e-9


def test_the_chances_are_those_of_samples(covered):
    for label, drawn in covered["drawn"].items():
        exact, counts = unpack_probabilities(covered["reach"][label]), unpack_integers(drawn["right"])
        assert len(exact) == len(counts) == covered["n"] == 24
        assert counts.sum() == drawn["right_samples"] and drawn["listed"] >= 0.97 * drawn["right_samples"]
        spread = np.sqrt(200 * exact * (1 - exact))
        assert (np.abs(counts - 200 * exact) < 5 * spread + 3).all()
        # together they tell a bias of a few percent
        assert abs(counts.sum() - 200 * exact.sum()) < 4 * np.sqrt((spread**2).sum()) + 3
        assert 0 < drawn["entropy"] < drawn["entropy_corrected"] < np.log(200)
        # an answer that most samples give is the vote
        likely = exact > 0.6
        assert unpack_bits(drawn["vote_bits"], 24)[likely].all()


def test_what_a_run_reaches_at_its_end_is_in_its_curve(runs, covered):
    curve = runs[0]["curve"]
    for label in ("t0.6", "t1"):
        assert covered["validation"].keys() == {"t0.6", "t1", "t1.4"}
        ends = [curve[f"reach_{label}@{k}"] for k in (1, 16, 256)]
        assert all(0 < one[-1] < more[-1] for one, more in zip(ends, ends[1:], strict=False))
        assert curve[f"reach_{label}@16"][-1] < covered["validation"][label] < curve[f"reach_{label}@256"][-1]
        # before the first step the run is its base: what it wins and loses against it is chance
        assert curve[f"won_{label}"][0] == pytest.approx(curve[f"lost_{label}"][0], abs=1e-5)
        change = curve[f"won_{label}"][-1] - curve[f"lost_{label}"][-1]
        assert change == pytest.approx(ends[2][-1] - ends[2][0], abs=3e-5)
    assert curve["reach_t1@1"][-1] == pytest.approx(curve["validation_t1"][-1], abs=0.15)


def test_a_record_is_small_and_the_same_when_it_is_made_again(runs, covered):
    again = sweep.run(coverage_spec("A0", weight_cache.end(runs), SIZES, "tiny"), "nb", "commit")
    assert all(again[name] == covered[name] for name in ("reach", "validation", "drawn", "greedy_bits"))
    # what grows with the problems: 256 of them at seven temperatures
    per_problem = sum(len(text) for text in covered["reach"].values()) / 3 / 24 * 7 + 2 * (2 + 0.25) + 0.25
    assert len(record_line(covered)) + 232 * per_problem < 8_000


@needs_bases
@pytest.mark.parametrize("arm", ["es", "grpo"])
def test_looking_at_a_run_does_not_change_it(arm):
    settings = SETTINGS | {"learning_rate": 1e-3, "beta": 0.0, "num_generations": 4}
    digests = []
    for looked in (settings, {name: value for name, value in settings.items() if name != "reach_at"}):
        [spec] = train_specs(arm, ["A0"], [3], looked, "smoke")
        assert ("reach_at" in spec) == (looked is settings)
        digests.append(sweep.run(spec, "nb", "commit")["digest"])
    assert digests[0] == digests[1]


def test_the_base_itself_has_what_its_weights_reach(runs):
    few = SIZES | {"coverage_samples": 2, "coverage_sampled_at": [1.0]}
    found = sweep.run(coverage_spec("A0", None, few, "tiny"), "nb", "commit")
    solved = runs[0]["curve"]["reach_t1@256"][0]
    assert found["validation"]["t1"] < solved
    chances = unpack_probabilities(found["reach"]["t1"])
    assert 0.3 < float(coverage.pass_at(chances, 256).mean()) <= 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"coverage_temperatures": []}, r"coverage_temperatures=\[\]: give temperatures, each once"),
        ({"coverage_temperatures": [1, 1.0]}, "each once"),
        ({"coverage_sampled_at": [0.0]}, "temperature=0.0"),
        ({"coverage_samples": 1}, "take 2 to 4,095"),
        ({"coverage_samples": 5000}, "take 2 to 4,095"),
        ({"coverage_problems": 3000}, "the test set has 2000"),
    ],
)
def test_coverage_that_cannot_be_measured_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        coverage_spec("A0", None, SIZES | change, "tiny")


def test_a_model_of_another_base_is_refused(runs):
    with pytest.raises(ValueError, match="started from base 'A0', the spec is of 'A1'"):
        coverage_spec("A1", weight_cache.end(runs), SIZES, "tiny")


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        ("A0", {"reach_at": []}, r"reach_at=\[\]: give temperatures, each once"),
        ("A0", {"reach_at": [1, 1.0]}, "each once"),
        ("A0", {"reach_at": [0]}, "temperature=0"),
        ("H0", {"filler_steps": 4, "max_completion_length": 32}, "base 'H0' to task 'countdown' are not listed"),
        ("B0", {"task": "conciseness", "unique_prompts": 2}, "base 'B0' to task 'conciseness' are not listed"),
    ],
)
def test_a_reach_that_no_run_can_have_is_refused(base, change, message):
    with pytest.raises(ValueError, match=message):
        train_specs("es", [base], [0], SETTINGS | change, "tiny")


@needs_bases
def test_log_probabilities_are_those_of_the_comparison_of_two_models(engine):
    prompts, temperatures = engine.prompts["few"], [0.5, 1.0, 1.5]
    ids = engine.tokenizer(["</think>\n<answer>3*8</answer><|im_end|>", "9"], add_special_tokens=False)["input_ids"]
    found = kl_analysis.log_probabilities(engine.model, prompts.ids, prompts.mask, ids, engine.eos_ids, temperatures)
    for row, temperature in zip(found, temperatures, strict=True):
        both = kl_analysis.compare(
            engine.model, engine.model, prompts.ids, prompts.mask, ids, engine.eos_ids, temperature
        )
        assert torch.allclose(row, both.log_policy.sum(-1), rtol=1e-12, atol=1e-9)
    with pytest.raises(ValueError, match="must be positive"):
        kl_analysis.log_probabilities(engine.model, prompts.ids, prompts.mask, ids, engine.eos_ids, [0.0])


# ---- noise on the weights in the place of samples

NOISE = {"max_completion_length": 16, "perturbed_members": 12, "perturbed_problems": 24, "perturbed_validation": 10}


@needs_bases
def test_copies_without_noise_answer_as_the_base_does():
    [spec] = perturbed_specs("A0", [1e-9], 1, NOISE, "tiny")
    found = sweep.run(spec, "nb", "commit")
    counts = unpack_integers(found["drawn"]["right"])
    few = SIZES | {"coverage_samples": 2, "coverage_temperatures": [1.0], "coverage_sampled_at": [1.0]}
    greedy = unpack_bits(sweep.run(coverage_spec("A0", None, few, "tiny"), "nb", "commit")["greedy_bits"], 24)
    assert np.array_equal(counts, 12 * greedy.astype(int)) and found["member"]["sd"] == found["drawn"]["entropy"] == 0
    assert found["member"]["mean"] == pytest.approx(greedy.mean(), abs=1e-6)
    assert found["best"] == {"1": {"mean": found["member"]["mean"], "vote": found["member"]["mean"]}}


@needs_bases
def test_copies_with_noise_solve_other_problems_and_are_the_same_when_made_again():
    first, other = perturbed_specs("A0", [0.03], 2, NOISE, "tiny")
    found, again, others = (sweep.run(spec, "nb", "commit") for spec in (first, first, other))
    blocks = ("drawn", "validation", "member", "best")
    assert all(found[name] == again[name] != others[name] for name in blocks[:3]) and found["best"] == again["best"]
    counts = unpack_integers(found["drawn"]["right"])
    assert counts.mean() / 12 == pytest.approx(found["member"]["mean"], abs=1e-6)
    assert found["member"]["sd"] > 0 < found["drawn"]["entropy"] and ((counts > 0) & (counts < 12)).any()
    # the vote of one copy is what it answers
    assert found["best"]["1"]["mean"] == pytest.approx(found["best"]["1"]["vote"], abs=1e-6)
    assert unpack_integers(found["validation"]).max() <= 12


@pytest.mark.parametrize(
    ("sigmas", "repeats", "change", "message"),
    [
        ([], 1, {}, r"sigmas=\[\]: give finite standard deviations"),
        ([0.01, 0.01], 1, {}, "each once"),
        ([0.0], 1, {}, "above 0"),
        ([0.01], 0, {}, "repeats=0: take at least 1"),
        ([0.01], 1, {"perturbed_members": 1}, "take 2 to 4,095"),
        ([0.01], 1, {"perturbed_problems": 3000}, "the test set has 2000"),
    ],
)
def test_noise_that_cannot_be_sampled_is_refused(sigmas, repeats, change, message):
    with pytest.raises(ValueError, match=message):
        perturbed_specs("A0", sigmas, repeats, NOISE | change, "tiny")


# ---- packed numbers


@given(arrays(np.int64, st.integers(0, 50), elements=st.integers(0, 4095)))
def test_packed_integers_come_back(values):
    text = pack_integers(values)
    assert len(text) == 2 * len(values) and np.array_equal(unpack_integers(text), values)


@given(arrays(np.float64, st.integers(0, 50), elements=st.floats(0, 1)))
def test_packed_probabilities_come_back_to_a_quarter_of_a_percent(values):
    found = unpack_probabilities(pack_probabilities(values))
    small = values < 1.3e-9
    assert np.allclose(found[~small], values[~small], rtol=0.0026, atol=0)
    assert (found[small] < 1.4e-9).all()
    assert (found[values == 1] == 1).all() and (found[values == 0] == 0).all()


@pytest.mark.parametrize("values", [[-1], [4096], [0.5], [[1]]])
def test_what_is_no_row_of_small_integers_is_refused(values):
    with pytest.raises(ValueError, match=r"integers 0\.\.4095"):
        pack_integers(values)


@pytest.mark.parametrize("values", [[-0.1], [1.1], [float("nan")], [[0.5]]])
def test_what_is_no_row_of_probabilities_is_refused(values):
    with pytest.raises(ValueError, match="one row of probabilities"):
        pack_probabilities(values)


@pytest.mark.parametrize(("text", "message"), [("A", "1 digits are no pairs"), ("A+", "'.' is no digit of base 64")])
def test_a_damaged_text_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        unpack_integers(text)
