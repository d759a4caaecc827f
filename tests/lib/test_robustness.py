"""Perturbations follow the noise law; slopes, halving noise and Jensen gaps are those of known functions."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evoalign_lib import noise
from evoalign_lib.analysis import robustness, stats
from tests.helpers import STATE_SHAPES, flat, same_bits, state

KEY = noise.member_key(noise.run_key("robustness", 0), 0, 0)


def test_a_perturbation_is_a_function_of_its_key_and_leaves_the_model_alone() -> None:
    model, copy = state(0), state(0)
    once, again = (robustness.perturb(model, 0.1, KEY) for _ in range(2))
    assert same_bits(once, again) and same_bits(model, copy)
    other = robustness.perturb(model, 0.1, KEY + 1)
    assert all(not torch.equal(once[name], other[name]) for name in STATE_SHAPES)
    once["scale"] += 1
    assert same_bits(model, copy)
    still = robustness.perturb(model, 0.0, KEY)
    assert same_bits(still, model) and all(still[name] is not model[name] for name in STATE_SHAPES)


def test_isotropic_noise_is_the_noise_law() -> None:
    model = state(0)
    layout = noise.Layout.from_shapes(STATE_SHAPES.items())
    master, member = np.zeros(layout.size, np.float32), np.zeros(layout.size, np.float32)
    for name, view in layout.views(master).items():
        view[...] = model[name].numpy()
    noise.perturb(member, master, layout, KEY, 0.03)
    expected = {name: torch.from_numpy(np.array(view)) for name, view in layout.views(member).items()}
    assert same_bits(robustness.perturb(model, 0.03, KEY), expected)


@pytest.mark.parametrize("mode", ["isotropic", "per-tensor relative"])
def test_the_noise_has_the_size_that_was_asked_for(mode: str) -> None:
    rng = np.random.default_rng(0)
    model = {
        name: torch.tensor(size * rng.standard_normal((200, 100)), dtype=torch.float32)
        for name, size in (("a", 1), ("b", 0.01))
    }
    model["zero"] = torch.zeros(50)
    found = robustness.perturb(model, 0.2, KEY, mode=mode)
    moved = {name: np.sqrt(np.mean(np.square(flat({0: found[name] - model[name]})))) for name in model}
    sizes = (0.2, 0.002, 0.0) if mode == "per-tensor relative" else (0.2, 0.2, 0.2)
    assert moved["a"] == pytest.approx(sizes[0], rel=0.03) and moved["b"] == pytest.approx(sizes[1], rel=0.03)
    # 50 weights: the root mean square has a standard error of a tenth
    assert moved["zero"] == pytest.approx(sizes[2], rel=0.4)
    # one key is one direction at every sigma
    half = robustness.perturb(model, 0.1, KEY, mode=mode)
    difference = flat({0: found["a"] - model["a"]}) - 2 * flat({0: half["a"] - model["a"]})
    assert np.abs(difference).max() < 2e-6


def test_only_chosen_tensors_are_perturbed() -> None:
    model = state(0)
    found = robustness.perturb(model, 0.1, KEY, only=lambda name: name == "norm.bias")
    whole = robustness.perturb(state(0), 0.1, KEY)
    for name, tensor in found.items():
        assert torch.equal(tensor, whole[name] if name == "norm.bias" else state(0)[name])
    with pytest.raises(ValueError, match="refuses all of 3 names"):
        robustness.perturb(model, 0.1, KEY, only=lambda name: name == "lm_head")
    with pytest.raises(TypeError, match="float16 on cpu"):
        robustness.perturb({"w": torch.zeros(2, dtype=torch.float16)}, 0.1, KEY)
    with pytest.raises(ValueError, match="sigma=-1"):
        robustness.perturb(model, -1, KEY)
    with pytest.raises(ValueError, match="mode="):
        robustness.perturb(model, 0.1, KEY, mode="relative")


@given(st.floats(0.1, 10), st.floats(-5, 5), st.sampled_from([1.0, 2.0]))
def test_slopes_of_power_laws_are_exact_and_keep_their_axes(slope: float, level: float, power: float) -> None:
    sigmas = np.array([0.1, 0.2, 0.4])
    baseline = np.array([level, level + 1])
    factors = np.array([1.0, 2.0, 3.0])  # of three perturbations
    perturbed = baseline[:, None, None] - slope * factors[:, None] * sigmas**power
    found = robustness.degradation_slope(sigmas, baseline, perturbed, power=power)
    assert found == pytest.approx(np.tile(slope * factors, (2, 1)))
    # without the axis of perturbations, their mean
    means = robustness.degradation_slope(sigmas, baseline, perturbed.mean(1), power=power)
    assert means == pytest.approx(found.mean(1))


def test_the_slope_of_two_arms_is_compared_over_runs_and_shared_perturbations() -> None:
    rng, sigmas = np.random.default_rng(0), np.array([0.1, 0.2])
    shared = rng.normal(0, 0.05, (12, 2))  # what a perturbation does to every run
    arms = [
        robustness.degradation_slope(sigmas, np.ones(8), 1 - slope * sigmas + shared + rng.normal(0, 0.01, (8, 12, 2)))
        for slope in (2.0, 1.0)
    ]
    difference = stats.crossed_bootstrap(*arms, n_resamples=500)
    assert difference.low < 1 < difference.high
    assert difference.high - difference.low < 0.3  # the shared part cancels; alone it would make the interval wider
    single = stats.crossed_bootstrap(arms[0], n_resamples=500)
    assert single.high - single.low > 2 * (difference.high - difference.low)


def test_the_halving_sigma_is_the_first_crossing_and_nan_where_there_is_none() -> None:
    sigmas = [0.001, 0.01, 0.1]
    rewards = [[0.9, 0.7, 0.1], [0.9, 0.8, 0.7], [0.3, 0.2, 0.1], [0.9, 0.5, 0.6], [0.9, np.nan, 0.1]]
    found = robustness.halving_sigma(sigmas, [1.0] * 5, rewards)
    assert found[0] == pytest.approx(10 ** (-2 + 1 / 3)) and found[3] == pytest.approx(0.01)
    assert np.isnan(found[[1, 2, 4]]).all()
    # half of what is above the floor: 0.6
    assert robustness.halving_sigma(sigmas, 1.0, [0.9, 0.7, 0.5], floor=0.2) == pytest.approx(10**-1.5)
    assert np.isnan(robustness.halving_sigma(sigmas, 0.1, [0.9, 0.7, 0.5], floor=0.2))


def test_the_jensen_gap_of_a_quadratic_is_half_its_curvature_times_the_variance() -> None:
    rng, sigma, curvature = np.random.default_rng(0), 0.1, np.array([1.0, 3.0, 8.0])
    at = rng.standard_normal((5, 3))  # the best weights for each problem

    def reward(weights: np.ndarray) -> np.ndarray:
        return -0.5 * ((weights[:, None] - at) ** 2 @ curvature)  # (models, problems)

    theta, eps = np.zeros((1, 3)), rng.standard_normal((400, 3))
    gap = robustness.jensen_gap(reward(theta)[0], reward(theta + sigma * eps), n_resamples=500)
    assert gap.low < 0.5 * sigma**2 * curvature.sum() < gap.high
    assert gap.n == 400 and gap.high - gap.low < 0.3
    # means alone: no interval over problems, and the same gap
    means = robustness.jensen_gap(
        reward(theta).mean(1), reward(theta + sigma * eps).mean(1, keepdims=True), n_resamples=100
    )
    assert means.value == pytest.approx(gap.value)


def test_what_does_not_fit_is_refused() -> None:
    for sigmas, baseline, perturbed in (
        ([0.0, 0.1], 1.0, [1, 1]),
        ([0.1, 0.2], [1.0, 1.0], [1, 1]),
        ([0.1, 0.2], [1.0, 1.0, 1.0], np.ones((2, 2))),
        ([[0.1]], 1.0, [1]),
    ):
        with pytest.raises(ValueError, match="sigmas"):
            robustness.degradation_slope(sigmas, baseline, perturbed)
    with pytest.raises(ValueError, match="power is 0"):
        robustness.degradation_slope([0.1], 1.0, [1.0], power=0)
    with pytest.raises(ValueError, match="rising sigmas"):
        robustness.halving_sigma([0.2, 0.1], 1.0, [1, 1])
    with pytest.raises(ValueError, match="perturbations, problems"):
        robustness.jensen_gap([1.0, 1.0], np.ones((3, 1)))


def test_the_displacement_ratio_does_not_depend_on_the_unit_of_weights() -> None:
    one = robustness.displacement_ratio(1e-3, 1e-2, 100, 25)
    assert one == pytest.approx(0.2) and robustness.displacement_ratio(1.0, 10.0, 100, 25) == pytest.approx(one)
    assert robustness.displacement_ratio(1e-3, 1e-2, 0, 25) == 0
    # what the walk of random fitness does: z-scored coefficients, independent noise
    rng, alpha, sigma, steps, members = np.random.default_rng(0), 0.3, 0.1, 40, 8
    z = rng.standard_normal((steps, members))
    z = (z - z.mean(1, keepdims=True)) / z.std(1, keepdims=True)
    walk = alpha / members * np.einsum("tn,tnd->d", z, rng.standard_normal((steps, members, 4000)))
    ratio = robustness.displacement_ratio(alpha, sigma, steps, members)
    assert np.sqrt(np.mean(walk**2)) / sigma == pytest.approx(ratio, rel=0.05)
    for numbers in ((0, 1, 1, 1), (1, -1, 1, 1), (1, float("inf"), 1, 1), (1, 1, -1, 1), (1, 1, 1, 0)):
        with pytest.raises(ValueError):
            robustness.displacement_ratio(*numbers)
