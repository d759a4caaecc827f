"""Perturbations follow the noise law; slopes, halving noise and Jensen gaps are those of known functions."""

import numpy as np
import pytest
import torch
from noise_by_numpy import filled

from evoalign_lib import noise
from evoalign_lib.analysis import robustness
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
    layout, master = filled(model)
    member = np.zeros_like(master)
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
