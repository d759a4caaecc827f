"""Robustness to noise on the weights: how fast a reward falls, the noise that halves it, and the Jensen gap.

Rewards are measured under perturbations (`perturb`) and compared with the same model's own. Give every model
the same keys: perturbations are then shared as problems are, and a slope for each run and perturbation goes into
`stats.crossed_bootstrap` with the other arm's as its baseline, which resamples both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import nan, sqrt
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from evoalign_lib import noise
from evoalign_lib.analysis.stats import Interval, crossed_bootstrap
from evoalign_lib.checks import choose, whole_number


def perturb(
    weights: Mapping[str, Tensor],
    sigma: float,
    key: int,
    *,
    mode: Literal["isotropic", "per-tensor relative"] = "isotropic",
    only: Callable[[str], bool] | None = None,
) -> dict[str, Tensor]:
    """Return weights with Gaussian noise added, a pure function of key and name; the given weights do not move.

    The noise is that of `noise.normals`: a key gives the same noise at every sigma, to every model and on every
    machine, so differences between models are paired. It is made for one tensor at a time.

    weights: tensors of any shape, tied weights under one name: a second name would get noise of its own. sigma: the
    noise's standard deviation, not negative; in weight units for "isotropic", which gives the bits of `noise.perturb`;
    for "per-tensor relative" in units of the root mean square of each tensor, so that a tensor of zeros stays as it is.
    key: 64 bits, such as `noise.member_key(noise.run_key("robustness", seed), 0, trial)`; the arm's name keeps it apart
    from the noise that a run of ES was trained with. only: whether the tensor of a name is perturbed, by default all
    are.
    Returns new tensors under the same names, copies where nothing was added.
    Raises ValueError for a sigma or key out of range, an unknown mode, and an `only` that no name passes; TypeError for
    tensors that are not float32 on a CPU.
    """
    if not (0 <= sigma <= float(np.finfo(np.float32).max)):
        raise ValueError(f"sigma={sigma} must be from 0 to the largest float32")
    choose("mode", mode, ("isotropic", "per-tensor relative"))
    ids = noise.parameter_ids(weights)
    chosen = {name for name in ids if only is None or only(name)}
    if not chosen:
        raise ValueError(f"no tensor is perturbed: `only` refuses all of {len(ids)} names, such as {sorted(ids)[:3]}")
    found = {}
    for name in weights:
        tensor = weights[name].detach()
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            raise TypeError(
                f"{name!r} is {tensor.dtype} on {tensor.device}: give the weights as .float().cpu(), or use"
                " noise.device_weights"
            )
        found[name] = tensor.clone()
        if name in chosen and sigma > 0:
            scale = sigma if mode == "isotropic" else sigma * float(tensor.double().square().mean().sqrt())
            eps = torch.from_numpy(noise.normals(key, ids[name], tensor.shape))
            found[name] += eps.mul_(float(np.float32(scale)))
    return found


def degradation_slope(
    sigmas: ArrayLike, baseline: ArrayLike, perturbed: ArrayLike, *, power: float = 1.0
) -> NDArray[np.float64]:
    """Return the slope of a reward's fall, baseline - perturbed, against sigma to a power: least squares through 0.

    A fall smooth in the weights begins with sigma squared, where the slope at power 2 is half the trace of the Hessian,
    its sign turned; beyond that, and for rewards that jump, no power is right, and arms are compared at the same
    sigmas.

    sigmas: (sigmas,), positive. baseline: (...), unperturbed rewards. perturbed: (..., sigmas), or (..., trials,
    sigmas) for several perturbations of each model, the same keys at every sigma.
    Returns (...) or (..., trials), reward units per unit of sigma to this power; a positive slope is a fall.
    Raises ValueError for shapes that do not fit, and for sigmas and a power that are not positive.

    >>> round(degradation_slope([0.1, 0.2], 1.0, [0.8, 0.6]).item(), 6)
    2.0
    """
    levels, before, after = _sigmas(sigmas), np.asarray(baseline, np.float64), np.asarray(perturbed, np.float64)
    if not power > 0:
        raise ValueError(f"power is {power}: it must be positive")
    more = after.ndim - before.ndim
    if more not in (1, 2) or after.shape[-1:] != levels.shape or after.shape[: before.ndim] != before.shape:
        raise ValueError(
            f"perturbed has the shape {after.shape}, baseline {before.shape}, sigmas {levels.shape}: give baseline"
            " (...) and perturbed (..., sigmas) or (..., trials, sigmas)"
        )
    fall, axis = before.reshape(*before.shape, *[1] * more) - after, levels**power
    return (fall * axis).sum(-1) / (axis**2).sum()


def halving_sigma(
    sigmas: ArrayLike, baseline: ArrayLike, rewards: ArrayLike, *, floor: float = 0.0
) -> NDArray[np.float64]:
    """Return the sigma at which a reward falls halfway to its floor: the first crossing, linear in log sigma.

    sigmas: (sigmas,), positive, rising. baseline: (...), unperturbed. rewards: (..., sigmas), means over perturbations.
    floor: the reward of a model that does nothing right, reward units.
    Returns (...), the unit of sigma; NaN where no measured sigma brings the reward that low, where the first one does
    already, and where the baseline is not above the floor.
    Raises ValueError for shapes that do not fit, and for sigmas that are not positive or do not rise.

    >>> round(halving_sigma([0.01, 0.1], 0.8, [0.6, 0.2]).item(), 4)
    0.0316
    """
    levels, before, after = _sigmas(sigmas), np.asarray(baseline, np.float64), np.asarray(rewards, np.float64)
    if after.shape != (*before.shape, *levels.shape) or (np.diff(levels) <= 0).any():
        raise ValueError(
            f"rewards have the shape {after.shape}, baseline {before.shape}, for sigmas {levels}: give baseline (...),"
            " rewards (..., sigmas) and rising sigmas"
        )
    half = (floor + (before - floor) / 2)[..., None]
    at = (after <= half).argmax(-1)[..., None]
    left = np.maximum(at - 1, 0)
    y0, y1 = (np.take_along_axis(after, i, -1) for i in (left, at))
    with np.errstate(invalid="ignore", divide="ignore"):
        share = ((y0 - half) / (y0 - y1))[..., 0]
        logs = np.log(levels)
        found = np.exp(logs[left[..., 0]] + share * (logs[at[..., 0]] - logs[left[..., 0]]))
    return np.where((at[..., 0] > 0) & (before > floor) & ~np.isnan(after).any(-1), found, nan)


def jensen_gap(
    baseline: ArrayLike, perturbed: ArrayLike, *, level: float = 0.95, n_resamples: int = 10_000, seed: int = 0
) -> Interval:
    """Return R(theta) - E R(theta + sigma eps) of one model, with an interval over perturbations and problems.

    baseline: (problems,), rewards of the unperturbed model. perturbed: (perturbations, problems). For an interval over
    perturbations alone, give means: (1,) and (perturbations, 1).
    Returns the gap in reward units, positive where noise costs reward; n is the number of perturbations.
    Raises ValueError as `stats.crossed_bootstrap`.
    """
    before, after = np.asarray(baseline, np.float64), np.asarray(perturbed, np.float64)
    if before.ndim != 1 or after.shape[1:] != before.shape:
        raise ValueError(
            f"baseline has the shape {before.shape} and perturbed {after.shape}: give (problems,) and"
            " (perturbations, problems)"
        )
    return crossed_bootstrap(before - after, level=level, n_resamples=n_resamples, seed=seed)


def _sigmas(sigmas: ArrayLike) -> NDArray[np.float64]:
    found = np.asarray(sigmas, np.float64)
    if found.ndim != 1 or not len(found) or not (np.isfinite(found) & (found > 0)).all():
        raise ValueError(f"sigmas {found} must be a list of positive numbers: the baseline stands for sigma 0")
    return found


# ---- displacement over sigma


class PublishedSetting(NamedTuple):
    """A published setting of ES whose displacement is compared with its sigma."""

    task: str
    alpha: float
    """Step size, 1/sigma digested, weight units."""
    sigma: float
    """Weight units."""
    steps: int
    population: int
    source: str


PUBLISHED_SETTINGS = (
    PublishedSetting("Countdown", 5e-4, 1e-3, 500, 30, "Qiu et al., arXiv 2509.24372"),
    PublishedSetting("one of four tasks", 5e-4, 1e-3, 100, 30, "Hoy et al., arXiv 2604.01499, configuration files"),
    PublishedSetting("conciseness", 5e-4, 1e-3, 1000, 30, "Evolutionary Alignment"),
)
"""Settings of public code and papers; `displacement_ratio` gives 2.0, 0.9 and 2.9. The paper of Hoy et al. states alpha
7.5e-4 and sigma 1.5e-3, which is the same ratio."""


def displacement_ratio(alpha: float, sigma: float, steps: int, population: int) -> float:
    """Return rho = (alpha / sigma) sqrt(T / N), how far ES with random fitness moves, over the sigma it is smoothed by.

    With z-scored fitness the mean square displacement of a weight is alpha^2 T / N whatever the reward is: rho is its
    root over sigma, in standard deviations of the noise that members were evaluated under.

    alpha: step size with 1/sigma digested, weight units. sigma: weight units. steps: those whose population was not
    tied, since a tied one moves nothing. population: N.
    Raises ValueError for an alpha, a sigma or numbers out of range.

    >>> [round(displacement_ratio(*s[1:5]), 1) for s in PUBLISHED_SETTINGS]
    [2.0, 0.9, 2.9]
    """
    for name, number in (("alpha", alpha), ("sigma", sigma)):
        if not (np.isfinite(number) and number > 0):
            raise ValueError(f"{name} is {number}: it must be positive and finite, in weight units")
    steps = whole_number("steps", steps, 0)
    return float(alpha / sigma * sqrt(steps / whole_number("population", population)))
