"""Perturbations follow the noise law; slopes, halving noise and Jensen gaps are those of known functions."""

import numpy as np
import pytest
import torch
from noise_by_numpy import filled

from evoalign_lib import noise
from evoalign_lib.analysis import robustness
from tests.helpers import STATE_SHAPES, flat, same_bits, state

KEY = noise.member_key(noise.run_key("robustness", 0), 0, 0)


def test_isotropic_noise_is_the_noise_law_and_leaves_the_model_alone() -> None:
    model, copy = state(0), state(0)
    layout, master = filled(model)
    member = np.zeros_like(master)
    noise.perturb(member, master, layout, KEY, 0.03)
    expected = {name: torch.from_numpy(np.array(view)) for name, view in layout.views(member).items()}
    found = robustness.perturb(model, 0.03, KEY)
    assert same_bits(found, expected)
    found["scale"] += 1
    still = robustness.perturb(model, 0.0, KEY)
    assert same_bits(model, copy) and same_bits(still, model)
    assert all(still[name] is not model[name] for name in STATE_SHAPES)


def test_relative_noise_has_the_size_that_was_asked_for() -> None:
    rng = np.random.default_rng(0)
    sizes = {"a": 1, "b": 0.01, "zero": 0}
    drawn = {name: size * rng.standard_normal((200, 100)) for name, size in sizes.items()}
    model = {name: torch.tensor(values, dtype=torch.float32) for name, values in drawn.items()}
    found = robustness.perturb(model, 0.2, KEY, mode="per-tensor relative")
    for name, size in sizes.items():
        moved = flat({0: found[name] - model[name]})
        assert np.sqrt(np.mean(np.square(moved))) == pytest.approx(0.2 * size, rel=0.03)
    # one key is one direction at every sigma
    half = robustness.perturb(model, 0.1, KEY, mode="per-tensor relative")
    difference = flat({0: found["a"] - model["a"]}) - 2 * flat({0: half["a"] - model["a"]})
    assert np.abs(difference).max() < 2e-6
