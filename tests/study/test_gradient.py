"""The exact objective equals brute force and sampling, its gradient finite differences; steps keep their algebra."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from evoalign_study.kinds.exact import ExactObjective, pairs_specs, rank_specs, run_pairs, run_rank
from helpers import random_model
from test_kl import END, LENGTH, PROMPTS, SMALL, VOCABULARY

from evoalign_lib import noise, tiny
from evoalign_lib.analysis import gradient as exact
from evoalign_lib.engines.local import LocalEngine, Prompts
from evoalign_lib.tasks import countdown

# All strings that end with the end token, or reach the length without one.
STRINGS = [s for n in range(1, LENGTH + 1) for s in itertools.product(range(VOCABULARY), repeat=n)]
STRINGS = [s for s in STRINGS if END not in s[:-1] and (s[-1] == END or len(s) == LENGTH)]


@pytest.fixture(scope="module")
def model():
    return random_model(seed=0, **SMALL)


@pytest.fixture(scope="module")
def full(model):
    return enumerate_(model, min_probability=0.0)


@pytest.fixture(scope="module")
def rewards(full):
    # half of them 0, as in the task itself
    rng = np.random.default_rng(0)
    return rng.random(len(full)) * (rng.random(len(full)) < 0.5)


@pytest.fixture(scope="module")
def base():
    return tiny.load("A0")


@pytest.fixture(scope="module")
def objective(base):
    return ExactObjective(*base, countdown.generate(3, 0, split="validation", **tiny.PROBLEMS | {"count": 2}))


def enumerate_(model, **settings):
    return exact.enumerate_completions(model, PROMPTS, eos_ids=[END], max_new_tokens=LENGTH, **settings)


def keys_of(repeat, n, arm="test"):
    root = noise.run_key(arm, repeat)
    return np.array([noise.member_key(root, 0, i) for i in range(n)], np.uint64)


# ---- enumeration


def test_everything_is_enumerated_once(model, full):
    assert len(STRINGS) == 1 + 7 + 49 * 8
    assert full.covered == pytest.approx(np.ones(3), abs=1e-5)
    assert full.prompt.tolist() == sorted(full.prompt)
    pairs = zip(full.prompt.tolist(), map(tuple, full.completions()), strict=True)
    assert sorted(pairs) == sorted(itertools.product(range(len(PROMPTS)), STRINGS))


@pytest.mark.parametrize("rows", [7, 1024])
def test_pruning_leaves_out_the_improbable_and_nothing_else(model, full, rows, monkeypatch):
    monkeypatch.setattr(exact, "_ROWS", rows)
    pruned = enumerate_(model, min_probability=2e-3)

    def pairs(enumeration, kept):
        return {(p, *s) for p, s, k in zip(enumeration.prompt, enumeration.completions(), kept, strict=True) if k}

    kept = full.log_probability >= math.log(2e-3)
    assert 0 < kept.sum() < len(full)
    assert pairs(pruned, np.full(len(pruned), True)) == pairs(full, kept)
    expected = [np.exp(full.log_probability[kept & (full.prompt == p)]).sum() for p in range(len(PROMPTS))]
    assert pruned.covered == pytest.approx(expected, abs=1e-6)


# ---- objective and gradient


def test_gradient_equals_finite_differences(model, full, rewards, monkeypatch):
    gradient = exact.expected_reward_gradient(model, full, rewards)
    monkeypatch.setattr(exact, "_MASK_ELEMENTS", 1)  # values are of one prompt a forward pass
    parameters = dict(model.named_parameters())
    assert list(gradient) == list(parameters) and "lm_head.weight" not in gradient
    assert all(gradient[k].shape == tuple(p.shape) and gradient[k].dtype == np.float32 for k, p in parameters.items())
    moved = copy.deepcopy(model)
    rng = np.random.default_rng(2)

    def value(direction, h):
        with torch.no_grad():
            for name, p in moved.named_parameters():
                p.copy_(parameters[name] + h * torch.from_numpy(direction[name]))
        return exact.expected(moved, exact.pack(full, rewards), len(full.prompts))

    def draw():
        return {k: 0.3 * rng.standard_normal(g.shape).astype(np.float32) for k, g in gradient.items()}

    # directions through all tensors, and through one tensor alone each, so that none hides behind the others
    directions = [draw() for _ in range(2)]
    directions += [{k: 3 * d * (k == only) for k, d in draw().items()} for only in gradient]
    slopes = [sum(float((gradient[k] * d).sum()) for k, d in direction.items()) for direction in directions]
    assert np.abs(slopes).max() > 0.2
    for direction, slope in zip(directions, slopes, strict=True):
        near, far = ((value(direction, h) - value(direction, -h)) / (2 * h) for h in (2e-3, 4e-3))
        # Richardson's extrapolation; what remains is float32 rounding over h
        assert slope == pytest.approx((4 * near - far) / 3, abs=3e-4)


# ---- Countdown


def test_the_objective_agrees_with_the_engine(objective, base):
    (model, tokenizer), problems, samples, longest = base, objective.problems, 100, tiny.MAX_COMPLETION_LENGTH
    prompts = {"problems": Prompts(countdown.dataset(problems, tokenizer), tokenizer)}
    engine = LocalEngine(model, tokenizer, None, prompts, max_completion_length=longest, decoder="generate")

    def right(row):
        graded = zip(row, problems, strict=True)
        return [countdown.grade(text, p.numbers, p.target).answer for (text, _), p in graded]

    (greedy,) = engine.generate("problems")
    assert objective.greedy == np.mean(right(greedy))
    engine.decoder = "loop"  # sampling with transformers takes a minute
    drawn = np.array([right(c) for c in engine.generate("problems", samples=samples, seed=5)])
    engine.close()
    error = np.sqrt((drawn.var(0, ddof=1) / samples).sum()) / len(problems)
    assert abs(objective.expected - drawn.mean()) < 4 * error + (1 - objective.enumeration.covered).mean()
    enumerated = np.exp(objective.enumeration.log_probability) @ objective.rewards / len(problems)
    assert objective.expected == pytest.approx(enumerated, rel=1e-5)
    assert set(objective.rewards) == {0.0, 1.0}


def test_a_run_measures_one_step(objective, base):
    before = [p.detach().clone() for p in base[0].parameters()]
    first = objective.run(8, 1e-2, 1e-2, repeat=0)
    assert first == objective.run(8, 1e-2, 1e-2, repeat=0)
    other = objective.run(8, 1e-2, 1e-2, repeat=1)
    assert other["cosine"] != first["cosine"] and other["rho"] != first["rho"]
    assert all(torch.equal(p, q) for p, q in zip(before, base[0].parameters(), strict=True))
    assert objective.expected_at(objective.start) == objective.expected

    assert first["d"] == sum(p.numel() for p in base[0].parameters())
    assert first["predicted_cosine"] == first["rho"] * math.sqrt(8 / first["d"])
    assert first["norm_ratio"] == pytest.approx(1, abs=0.02)
    # with the spread of the projections and the step's true norm the prediction becomes an identity
    spread = exact.projections(objective.layout, keys_of(0, 8, "estimator"), objective.gradient).std()
    spread /= np.linalg.norm(objective.gradient.astype(float))
    assert first["cosine"] == pytest.approx(first["predicted_cosine"] * spread / first["norm_ratio"], rel=1e-4)
    assert not first["tied"] and 0 <= first["improving"] <= 1
    # what is added up is the step, not the gains; along the gradient, a short way, the gain is that of the slope
    short = objective.run(8, 1e-2, 1e-4, repeat=0)
    slope = 1e-4 * math.sqrt(first["d"] / 8) * short["norm_ratio"] * short["cosine"]
    slope *= np.linalg.norm(objective.gradient.astype(float))
    assert short["gain_aligned"] == pytest.approx(slope, rel=0.05)


def test_a_tied_run_says_so(objective):
    # no perturbation of this size changes a greedy answer
    result = objective.run(4, 1e-7, 1e-2, repeat=0, fitness="greedy")
    assert result["tied"] and result["cosine"] is None and result["rho"] is None and result["predicted_cosine"] is None
    assert result["norm_ratio"] == result["gain_full"] == result["greedy_gain_orthogonal"] == 0


def test_noise_of_rank_1_adds_the_variance_of_wisharts_moments():
    measured = [run_rank(spec)["estimator"] for spec in rank_specs("A0", [8, 0], 1, 20_000, "smoke")]
    assert measured[0]["formula"] == pytest.approx(2 * 17 / 65, rel=1e-5)
    assert all(each["excess"] == pytest.approx(each["formula"], rel=0.1) for each in measured)


@pytest.mark.parametrize("fitness", ["greedy", "sampled"])
def test_errors_of_estimates_at_equal_evaluations(fitness):
    settings = {"sigma": 0.02, "estimator_problems": 8, "pairs_members": 12}
    first, again, other = (
        run_pairs(pairs_specs("A0", [None], fitness, [repeat], settings, "smoke")[0]) for repeat in (0, 0, 1)
    )
    assert first == again != other
    for error in (each["estimator"] for each in (first, other)):
        spread = error["none"] - error["mean"] * 11 / 12  # the square of the mean, which a baseline removes
        assert spread > 0 and error["mean_over_pairs"] == pytest.approx(error["mean"] / error["pairs"], rel=1e-4)
