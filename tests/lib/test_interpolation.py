"""Paths and planes of weights: exact where they should be, and read a tensor at a time."""

from collections.abc import Iterator, Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evoalign_lib.analysis import interpolation as paths
from tests.helpers import STATE_SHAPES, flat, same_bits, state


class _OnDisk(Mapping):
    """A mapping that makes a tensor when it is asked for it, and counts how many are alive at once."""

    def __init__(self, weights: Mapping[str, torch.Tensor]):
        self._weights, self.reads = weights, []

    def __getitem__(self, name: str) -> torch.Tensor:
        self.reads.append(name)
        return self._weights[name].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


@given(st.integers(0, 99), st.integers(100, 199), st.sampled_from([1e-30, 1e-3, 1.0, 1e30]))
def test_the_ends_of_a_path_are_the_models_bit_for_bit(one: int, other: int, spread: float) -> None:
    a, b = state(one, spread), state(other)
    a["embed.weight"][0, 0] = -0.0
    b["embed.weight"][1] = float("inf")  # 0 * inf is not 0
    found = dict(paths.path(a, b, [0, 0.5, 1]))
    assert same_bits(found[0.0], a) and same_bits(found[1.0], b)
    found[0.0]["norm.bias"].zero_()  # a copy, not the model
    assert not same_bits(found[0.0], a) and same_bits(state(one, spread) | {"embed.weight": a["embed.weight"]}, a)


@given(st.integers(0, 99), st.floats(-0.5, 1.5))
def test_points_lie_on_the_line_in_the_same_place_from_either_end(seed: int, alpha: float) -> None:
    a, b = state(seed), state(seed + 1)
    b["norm.bias"] = a["norm.bias"].clone()
    middle = paths.interpolate(a, b, alpha, extrapolate=True)
    assert same_bits({"": middle["norm.bias"]}, {"": a["norm.bias"]})  # what ends share never moves
    expected = (1 - alpha) * flat(a) + alpha * flat(b)
    # within a few roundings of float32 of the largest number that is added
    size = np.maximum(np.abs(flat(a)), np.abs(flat(b)))
    for found in (middle, paths.interpolate(b, a, 1 - alpha, extrapolate=True)):
        assert all(tensor.dtype == torch.float32 for tensor in found.values())
        assert (np.abs(flat(found) - expected) <= 3e-7 * size).all()


def test_a_path_is_read_tensor_by_tensor_and_refuses_what_does_not_fit() -> None:
    a, b = _OnDisk(state(0)), _OnDisk(state(1))
    assert len(dict(paths.path(a, b, paths.points(5)))) == 5
    assert a.reads == b.reads == list(STATE_SHAPES) * 5
    for alpha in (-0.01, 1.01, float("nan")):
        with pytest.raises(ValueError, match="extrapolate=True"):
            paths.interpolate(a, b, alpha)
    with pytest.raises(ValueError, match="differ in names"):
        paths.interpolate(a, {"scale": torch.zeros(())}, 0.5)
    with pytest.raises(ValueError, match="has the shapes"):
        paths.interpolate(a, state(1) | {"scale": torch.zeros(2)}, 0.5)
    with pytest.raises(TypeError, match="float16"):
        paths.interpolate(a, state(1) | {"scale": torch.zeros((), dtype=torch.float16)}, 0.5)


def test_measures_of_a_path_are_curves() -> None:
    a, b = state(0), state(1)
    found = paths.measure_path(
        a, b, lambda w: {"first": w["scale"].item(), "norm": np.linalg.norm(flat(w))}, [0, 0.25, 1]
    )
    assert found["alpha"].tolist() == [0, 0.25, 1]
    assert found["first"][1] == pytest.approx(0.75 * a["scale"].item() + 0.25 * b["scale"].item())
    assert found["norm"][[0, 2]] == pytest.approx([np.linalg.norm(flat(a)), np.linalg.norm(flat(b))])
    for measure in (lambda w: {"alpha": 0.0}, lambda w: {str(float(w["scale"])): 0.0}):
        with pytest.raises(ValueError, match="the same at"):
            paths.measure_path(a, b, measure, [0, 1])


@given(st.integers(0, 99), st.floats(-2, 2), st.floats(-2, 2))
@settings(max_examples=30)
def test_the_plane_holds_its_models_and_measures_the_distance_of_others(seed: int, x: float, y: float) -> None:
    base, u, v, other = (state(seed + 100 * i) for i in range(4))
    plane = paths.plane(base, u, v)
    for corner, model in zip(plane.corners, (base, u, v), strict=True):
        assert same_bits(plane.weights(*corner), model)
        found = plane.coordinates(model)
        assert (found.x, found.y) == pytest.approx(tuple(corner), abs=1e-6)
        assert found.distance == pytest.approx(0, abs=1e-6)
    # an orthonormal frame: coordinates are distances
    on_plane = flat(plane.weights(x, y)) - flat(base)
    assert np.linalg.norm(on_plane) == pytest.approx(np.hypot(x, y), abs=1e-5)
    assert plane.coordinates(plane.weights(x, y)) == pytest.approx((x, y, 0), abs=1e-5)
    # against the projection by least squares
    axes = np.column_stack([flat(u) - flat(base), flat(v) - flat(base)])
    residual = np.linalg.lstsq(axes, flat(other) - flat(base), rcond=None)[1][0]
    found = plane.coordinates(other)
    assert found.distance == pytest.approx(np.sqrt(residual), rel=1e-6)
    assert np.linalg.norm(found) == pytest.approx(np.linalg.norm(flat(other) - flat(base)))


def test_a_plane_needs_three_models_off_one_line_and_makes_grids() -> None:
    base, u = state(0), state(1)
    for third in (u, base, paths.interpolate(base, u, 2.0, extrapolate=True)):
        with pytest.raises(ValueError, match="on a line"):
            paths.plane(base, u, third)
    plane = paths.plane(base, u, state(2))
    grid = list(plane.grid([0, 1], [0, 2]))
    assert [(x, y) for x, y, _ in grid] == [(0, 0), (1, 0), (0, 2), (1, 2)]
    assert same_bits(grid[3][2], plane.weights(1, 2))
