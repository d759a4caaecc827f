"""Weights between models: points on the line through two, and in the plane through three.

Weights are mappings from canonical name to float32 tensor, read one tensor at a time: state dicts, or
`weights.weights`, which reads files as it is asked. Nothing here changes a tensor it is given, and nothing loads or
runs a model: the caller measures what it is handed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from evoalign_lib.checks import whole_number

Weights = Mapping[str, Tensor]


def interpolate(a: Weights, b: Weights, alpha: float, *, extrapolate: bool = False) -> dict[str, Tensor]:
    """Return the weights (1 - alpha) A + alpha B, tensor by tensor in float32.

    They are computed as A + alpha (B - A), or B + (alpha - 1) (B - A) where B is nearer: a weight that A and B share is
    kept bit for bit at every alpha, and the ends are copies of A and B.

    a, b: the ends, with the same names and shapes. Neither may be the weights of the model that the result is loaded
    into, which the first point would overwrite. alpha: 0 is A, 1 is B. extrapolate: allow alpha below 0 and above 1.
    Returns new tensors under the names of A, in its order.
    Raises ValueError for an alpha out of range and for ends that differ in names or shapes, TypeError for tensors that
    are not float32.

    >>> ends = {"w": torch.tensor([0.0, 1.0])}, {"w": torch.tensor([4.0, 1.0])}
    >>> interpolate(*ends, 0.25)["w"]
    tensor([1., 1.])
    """
    if not np.isfinite(alpha) or not (extrapolate or 0 <= alpha <= 1):
        raise ValueError(f"alpha={alpha} is not on the path from 0 to 1; extrapolate=True allows finite numbers beyond")
    found = {}
    for name, (start, end) in _tensors(a, b):
        if alpha in (0, 1):
            found[name] = (end if alpha else start).clone()
        else:  # separate operations: a fused one would round otherwise on other hardware
            nearer, share = (start, alpha) if alpha <= 0.5 else (end, alpha - 1)
            found[name] = (end - start).mul_(share).add_(nearer)
    return found


def points(n: int = 25) -> NDArray[np.float64]:
    """Return the alphas of a path, (n,), evenly spaced from 0 to 1; 21 to 31 points show a barrier's shape.

    Raises ValueError for fewer than 3.
    """
    return np.linspace(0, 1, whole_number("n", n, 3, why="a path has two ends and something between them"))


def path(
    a: Weights, b: Weights, alphas: ArrayLike | None = None, *, extrapolate: bool = False
) -> Iterator[tuple[float, dict[str, Tensor]]]:
    """Yield (alpha, weights) along the path from A to B, one point's weights at a time.

    alphas: (points,), by default those of `points`. The rest is as in `interpolate`, whose errors it raises.
    """
    for alpha in points() if alphas is None else np.asarray(alphas, np.float64):
        yield float(alpha), interpolate(a, b, float(alpha), extrapolate=extrapolate)


def measure_path(
    a: Weights, b: Weights, measure: Callable[[Weights], Mapping[str, float]], alphas: ArrayLike | None = None
) -> dict[str, NDArray[np.float64]]:
    """Measure every point of the path from A to B.

    a, b, alphas: as in `path`, whose errors it raises. measure: what is measured of a model with given weights, name ->
    value. Cast the weights there, if the model runs in another dtype.
    Returns (points,) values of each measure, and the alphas as "alpha".
    Raises ValueError for a measure called "alpha" or one that is missing at some points.
    """
    measured = [(alpha, dict(measure(weights))) for alpha, weights in path(a, b, alphas)]
    names = set(measured[0][1])
    for alpha, values in measured:
        if set(values) != names or "alpha" in names:
            raise ValueError(
                f"measures {sorted(values)} at alpha={alpha:g}, {sorted(names)} at the first point: measure the same at"
                ' each, and call nothing "alpha"'
            )
    return {name: np.array([values[name] for _, values in measured], np.float64) for name in sorted(names)} | {
        "alpha": np.array([alpha for alpha, _ in measured])
    }


class Projection(NamedTuple):
    """Where a model lies relative to a plane, in weight units (Euclidean norm over all weights)."""

    x: float
    """Along the first axis."""
    y: float
    """Along the second axis."""
    distance: float
    """Off the plane; exact to about 1e-8 of the distance from the origin."""


@dataclass(frozen=True, eq=False)
class Plane:
    """The plane through three models, with orthonormal axes; made by `plane`."""

    origin: Weights
    """At (0, 0), usually the base."""
    u_end: Weights
    """At (|u|, 0)."""
    v_end: Weights
    """At `corners[2]`, above the first axis."""
    corners: NDArray[np.float64]
    """(3, 2), coordinates of the three models, weight units."""

    def coordinates(self, weights: Weights) -> Projection:
        """Project a model onto the plane, in one pass over the tensors of four models.

        Raises ValueError and TypeError as `interpolate` does.
        """
        (width, _), (c, s) = self.corners[1:]
        along_u = along_v = square = 0.0
        for _, (start, *others) in _tensors(self.origin, self.u_end, self.v_end, weights):
            u, v, m = (_difference(other, start) for other in others)
            along_u, along_v, square = along_u + float(m @ u), along_v + float(m @ v), square + float(m @ m)
        x = along_u / width
        y = (along_v - c * x) / s
        return Projection(float(x), float(y), sqrt(max(square - x**2 - y**2, 0.0)))

    def weights(self, x: float, y: float) -> dict[str, Tensor]:
        """Return the weights at a point of the plane, float32, rounded once; the corners are the three models' bits.

        Raises ValueError and TypeError as `interpolate` does.
        """
        (width, _), (c, s) = self.corners[1:]
        q = y / s
        p = (x - c * q) / width
        return {
            name: (start.double() + p * (u.double() - start.double()) + q * (v.double() - start.double())).float()
            for name, (start, u, v) in _tensors(self.origin, self.u_end, self.v_end)
        }

    def grid(self, xs: Iterable[float], ys: Iterable[float]) -> Iterator[tuple[float, float, dict[str, Tensor]]]:
        """Yield (x, y, weights) for a picture, row by row (y outside), one model at a time."""
        xs = list(xs)
        for y in ys:
            for x in xs:
                yield x, y, self.weights(x, y)


def plane(origin: Weights, u_end: Weights, v_end: Weights) -> Plane:
    """Return the plane through three models, such as base, ES and GRPO.

    The first axis points from the origin to u_end, the second to the side of v_end. Inner products are summed in
    float64 over tensors, so no difference of whole models is ever held.

    Raises ValueError for models on a line, which span no plane; otherwise as `interpolate`.
    Source: Garipov et al. 2018 (arXiv 1802.10026), the plane of three models in weight space.
    """
    uu = uv = vv = 0.0
    for _, (start, *others) in _tensors(origin, u_end, v_end):
        u, v = (_difference(other, start) for other in others)
        uu, uv, vv = uu + float(u @ u), uv + float(u @ v), vv + float(v @ v)
    rest = vv - uv**2 / uu if uu > 0 else 0.0
    if rest <= 1e-12 * vv:
        raise ValueError(f"the three models lie on a line (|u|={sqrt(uu):g}, |v|={sqrt(vv):g}): give ends that differ")
    return Plane(origin, u_end, v_end, np.array([[0.0, 0.0], [sqrt(uu), 0.0], [uv / sqrt(uu), sqrt(rest)]]))


def _difference(tensor: Tensor, start: Tensor) -> Tensor:
    return (tensor.double() - start.double()).reshape(-1)


def _tensors(first: Weights, *others: Weights) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield each name with the tensor of all models, read only now, and checked to fit."""
    for other in others:
        if odd := sorted(set(first) ^ set(other)):
            raise ValueError(
                f"models differ in names, {odd[:3]} among {len(odd)}: give state dicts of one architecture"
            )
    for name in first:
        found = [weights[name].detach() for weights in (first, *others)]
        for tensor in found:
            if tensor.dtype != torch.float32:
                raise TypeError(f"{name!r} is {tensor.dtype}: paths are made in float32, give the weights as .float()")
            if tensor.shape != found[0].shape:
                raise ValueError(f"{name!r} has the shapes {tuple(found[0].shape)} and {tuple(tensor.shape)}")
        yield name, found
