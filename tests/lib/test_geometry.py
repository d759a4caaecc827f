"""Displacements measured in parts equal brute force; nulls are what simulated ES runs and random directions show."""

import math

import numpy as np
import pytest
import torch
from helpers import flat, state

from evoalign_lib import noise, update_rules
from evoalign_lib.analysis import geometry

SHAPES = {
    "model.embed_tokens.weight": (11, 4),
    "model.layers.0.self_attn.q_proj.weight": (4, 4),
    "model.layers.0.mlp.up_proj.weight": (6, 4),
    "model.layers.1.self_attn.q_proj.weight": (4, 4),
    "model.layers.1.input_layernorm.weight": (4,),
    "model.norm.weight": (4,),
    "lm_head.weight": (11, 4),
}


# names


NAMES = {
    "model.layers.12.self_attn.q_proj.weight": ("layer 12", "attention q"),
    "model.layers.12.self_attn.k_norm.weight": ("layer 12", "norm"),
    "model.norm.weight": ("final norm", "norm"),
    "transformer.wpe.weight": ("positions", "positions"),
    "transformer.h.3.attn.c_attn.weight": ("layer 3", "attention qkv"),
    "embed_out.weight": ("head", "head"),
    "vision.patch.weight": ("vision", "vision"),
}


def test_names_of_the_common_families_are_known():
    assert {name: (geometry.layer_of(name), geometry.kind_of(name)) for name in NAMES} == NAMES


def test_a_tied_head_is_the_embedding():
    tied = {name: shape for name, shape in SHAPES.items() if name != "lm_head.weight"}
    found = geometry.measure(None, [state(0, shapes=tied)])
    assert found.tied and found.by("layer").names == ("embedding (tied)", "layer 0", "layer 1", "final norm")
    layers = found.by("layer")
    assert geometry.head_concentration(found)[0] == layers.shares[0, 0] / layers.size_shares[0]
    assert found.by("kind").names == ("embedding (tied)", "attention q", "mlp", "norm")


# sums over the entries


@pytest.mark.parametrize("part", [1 << 20, 18])
def test_sums_equal_brute_force_however_tensors_are_cut(monkeypatch, part):
    monkeypatch.setattr(geometry, "_PART", part)
    monkeypatch.setattr(geometry, "_LEAST_PART", 1)
    start = state(0, shapes=SHAPES)
    moves = [state(k, 10.0 ** (1 - 2 * k), SHAPES) for k in (1, 2, 3)]
    ends = [{name: start[name] + move[name] for name in start} for move in moves]
    found = geometry.measure(start, ends)
    vectors = np.stack([flat(end) - flat(start) for end in ends])
    np.testing.assert_allclose(found.total, vectors @ vectors.T, rtol=1e-12, atol=1e-12)
    assert found.d == vectors.shape[1] == 152
    for row, name in enumerate(found.names):
        own = np.stack([flat({0: end[name]}) - flat({0: start[name]}) for end in ends])
        np.testing.assert_allclose(found.gram[row], own @ own.T, rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(found.start[row], flat({0: start[name]}) @ flat({0: start[name]}))
        np.testing.assert_allclose(found.relative_norms[row], np.linalg.norm(own, axis=1) / np.sqrt(found.start[row]))
        for k, end in enumerate(ends):
            assert found.moved["float32"][row, k] == np.count_nonzero(own[k])
            rounded = end[name].bfloat16().double() - start[name].bfloat16().double()
            assert found.moved["bfloat16"][row, k] == rounded.count_nonzero()


# the norm of ES


@pytest.mark.parametrize("antithetic", [False, True])
@pytest.mark.parametrize("shaping", update_rules.SHAPINGS)
def test_the_norm_of_an_es_with_random_fitness_follows_from_its_settings(antithetic, shaping):
    layout = noise.Layout.from_shapes([("a", (120, 100)), ("b", (80, 100))])
    alpha, n, steps, rng = 0.02, 6, 60, np.random.default_rng(0)
    master, coefficients = np.zeros(layout.size, np.float32), []
    for step in range(steps):
        members = update_rules.population(7, step, n, antithetic)
        c = update_rules.coefficients(rng.random(n), alpha, shaping, antithetic)
        noise.update(master, layout, np.array([m.key for m in members if m.sign == 1], np.uint64), c)
        coefficients.append(c)
    found = geometry.measure(None, [{name: torch.from_numpy(v) for name, v in layout.views(master).items()}])
    norm = math.sqrt(found.total[0, 0])
    exact = geometry.norm_of_coefficients(coefficients, layout.d)
    low, high = geometry.norm_band(layout.d)
    assert low <= norm / exact <= high
    if shaping == "zscore" and not antithetic:  # z-scores of independent members have sum z^2 = N in every step
        assert exact == pytest.approx(geometry.es_norm(alpha, layout.d, steps, n), rel=1e-6)
    # nothing but noise: shares of sizes, Gaussian entries
    null = geometry.size_null(found.entries, 0.999)
    assert geometry.total_variation(found.shares[:, 0], found.size_shares) < null.distance


# cosines and random directions


def test_the_cosine_of_random_directions_has_the_null_spread():
    shapes = {"big": (30, 20), "small": (10,)}
    norms = [{"big": 1.0, "small": 3.0}, {"big": 2.0, "small": 1.0}]
    zs, isotropic = [], []
    for key in range(0, 1200, 2):
        a, b = (geometry.random_like(norms[k], shapes, key + k) for k in range(2))
        found = geometry.cosine(geometry.measure(None, [a, b], ()))
        zs.append(found.z)
        isotropic.append(found.value * found.d**0.5)
        assert abs(found.value) <= found.band(1 - 1e-9)
    assert abs(np.mean(zs)) < 0.15 and 0.92 < np.std(zs) < 1.08
    assert np.std(isotropic) > 2  # small weighs more than by its size: 610 entries act as few
    assert found.effective_d < 100 and found.d == 610


def test_a_random_direction_has_the_norms_it_was_given():
    norms = {name: float(i) for i, name in enumerate(SHAPES)}
    found = geometry.random_like(norms, SHAPES, key=3)
    assert {name: tuple(found[name].shape) for name in found} == SHAPES and len(found) == 7
    for name in found:
        assert found[name].dtype == torch.float32
        assert float(found[name].double().norm()) == pytest.approx(norms[name], rel=1e-5)
    measured = geometry.measure(None, [found])
    assert measured.norms[:, 0].tolist() == pytest.approx(list(norms.values()), rel=1e-5)
    # the same whatever else is drawn, and another one by key and name
    alone = geometry.random_like({"lm_head.weight": 6.0}, SHAPES, key=3)["lm_head.weight"]
    assert torch.equal(alone, found["lm_head.weight"])
    assert not torch.equal(alone, geometry.random_like(norms, SHAPES, key=4)["lm_head.weight"])
    unit = geometry.random_like(dict.fromkeys(SHAPES, 1.0), SHAPES, key=3)
    assert not torch.equal(unit["lm_head.weight"], unit["model.embed_tokens.weight"])
