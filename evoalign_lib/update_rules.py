"""The formulas of an ES step: its members, fitness shaping, the coefficients of the update, and schedules.

They depend only on a run's settings, the step and its rewards: the trainer moves the weights by them, and a replay
(`evoalign_lib.ledger`) does so again. Every variant is off by default.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from evoalign_lib import noise

SHAPINGS = ("zscore", "centred_ranks")
SCALINGS = ("mean", "hyperscale")
SCHEDULES = ("constant", "linear", "cosine")
_TIE = 1e-12  # relative to the largest reward: smaller differences are rounding, whatever the unit


def mean_reward(rewards: np.ndarray) -> float:
    """Return the mean over the completions, (completions,), to which a reward function applied; NaN if to none."""
    applied = rewards[~np.isnan(rewards)]
    return float(applied.mean()) if len(applied) else math.nan


class Member(NamedTuple):
    """One member of a population: the key of its noise and the sign of the perturbation."""

    key: int
    sign: int = 1


def population(run_key: int, step: int, n: int, antithetic: bool = False) -> list[Member]:
    """Return the members of a step, all distinct in key and sign.

    Args:
        run_key: key of the run's noise.
        step: 0, 1, ...
        n: N, members; even if antithetic.
        antithetic: members 2i and 2i + 1 form a pair: the key of pair i with the signs +1 and -1 (mirrored sampling,
            Brockhoff et al. 2010; Salimans et al. 2017).
    """
    signs = (1, -1) if antithetic else (1,)
    keys = [noise.member_key(run_key, step, i) for i in range(n // len(signs))]
    return [Member(key, sign) for key in keys for sign in signs]


def coefficients(
    fitness: np.ndarray, alpha: float, shaping: str = "zscore", antithetic: bool = False
) -> np.ndarray | None:
    """Return the factor of each noise in the update: fl32(alpha z_n / N), for pairs fl32(alpha (z+ - z-) / N).

    Args:
        fitness: (members,) reward units.
        alpha: step size, which already contains 1/sigma.
        shaping: how z is computed: "zscore" (`standardise`) or "centred_ranks".
        antithetic: members 2i and 2i + 1 share their noise, with the signs +1 and -1.

    Returns:
        float32, weight units: (members,), with antithetic pairs (members / 2,). None if the step moves nothing: the
        population is tied, or the two members of every pair are.

    Raises:
        ValueError: a coefficient that is not finite.

    >>> coefficients(np.array([1.0, 3.0]), alpha=0.5), coefficients(np.array([2.0, 2.0]), alpha=0.5)
    (array([-0.25,  0.25], dtype=float32), None)
    >>> coefficients(np.array([1.0, 3.0]), alpha=0.5, antithetic=True)
    array([-0.5], dtype=float32)
    """
    with np.errstate(over="ignore", invalid="ignore"):
        z = standardise(fitness) if shaping == "zscore" else centred_ranks(fitness)
        terms = z[::2] - z[1::2] if antithetic else z
        c = (alpha * terms / len(z)).astype(np.float32)
        finite = np.isfinite(c).all() and np.isfinite(np.var(fitness))
    if not finite:
        raise ValueError(f"the rewards {fitness.tolist()!s:.200} give no finite coefficients: scale the rewards down.")
    return c if terms.any() else None


def update_of(members: Sequence[Member], c: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the keys (uint64) and coefficients (float32) of an update; both empty if the step moves nothing.

    Args:
        members: the members of the step; the noise of an antithetic pair is drawn once, for its member with the sign
            +1.
        c: what `coefficients` returned.
    """
    if c is None:
        return np.zeros(0, np.uint64), np.zeros(0, np.float32)
    return np.array([m.key for m in members if m.sign == 1], np.uint64), c


def standardise(fitness: np.ndarray) -> np.ndarray:
    """Return z-scores (float64), by the population standard deviation; all zero if the population is tied.

    Args:
        fitness: (members,) reward units.

    >>> standardise(np.array([1.0, 3.0])), standardise(np.array([0.1 + 0.2, 0.3]))
    (array([-1.,  1.]), array([0., 0.]))
    """
    fitness = np.asarray(fitness, dtype=np.float64)
    deviation, scale = fitness.std(), np.abs(fitness).max()
    if deviation <= _TIE * scale:
        return np.zeros_like(fitness)
    return (fitness - fitness.mean()) / deviation


def centred_ranks(fitness: np.ndarray) -> np.ndarray:
    """Return ranks in the population, from -0.5 for the worst member to 0.5 for the best; all zero if it is tied.

    This is the fitness shaping of Salimans et al. (arXiv 1703.03864, after Wierstra et al., "Natural Evolution
    Strategies", 2014), whose code breaks ties by member index. Here ties share their mean rank, and rewards that differ
    only by rounding are ties. The root mean square is at most about 0.29, that of z-scores 1: with equal alpha, steps
    are shorter by that factor.

    Args:
        fitness: (members,) reward units; at least 2.

    >>> centred_ranks(np.array([10.0, -3.0, 10.0, 0.5, 99.0])).tolist()
    [0.125, -0.5, 0.125, -0.25, 0.5]
    """
    fitness = np.asarray(fitness, dtype=np.float64)
    if not standardise(fitness).any():  # tied as for z-scores
        return np.zeros_like(fitness)
    order = np.argsort(fitness, kind="stable")
    # a gap starts a new group of ties; each group gets the mean of the ranks that it spans
    gaps = np.diff(fitness[order]) > _TIE * np.abs(fitness).max()
    group = np.concatenate(([0], np.cumsum(gaps)))
    mean_rank = np.bincount(group, weights=np.arange(len(fitness))) / np.bincount(group)
    ranks = np.empty_like(fitness)
    ranks[order] = mean_rank[group] / (len(fitness) - 1) - 0.5
    return ranks


def at_step(settings: Mapping[str, Any], name: str, step: int) -> float:
    """Return sigma or alpha at a step of a run: its value at the first step, the final fraction of it at the last.

    Args:
        settings: settings of the run: the value, NAME_schedule ("constant"; "linear"; or "cosine", half a period,
            Loshchilov and Hutter, arXiv 1608.03983), and with a schedule NAME_final_fraction and max_steps.
        name: "sigma" or "alpha".
        step: 0, 1, ...

    >>> settings = {"alpha": 2.0, "alpha_schedule": "linear", "alpha_final_fraction": 0.5, "max_steps": 5}
    >>> [at_step(settings, "alpha", step) for step in range(5)]
    [2.0, 1.75, 1.5, 1.25, 1.0]
    """
    value, schedule = settings[name], settings[f"{name}_schedule"]
    if schedule == "constant":
        return value
    last = settings[f"{name}_final_fraction"]
    done = min(step / max(1, settings["max_steps"] - 1), 1.0)
    left = 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    # 12 decimals: the last bit of a cosine depends on the library, and replays must not
    return value * round(last + (1 - last) * left, 12)


def step_size(settings: Mapping[str, Any], step: int) -> float:
    """Return the alpha that `coefficients` takes at a step of a run, according to its schedule and scaling.

    Args:
        settings: settings of the run, as for `at_step`, with sigma, population_size and update_scaling (if absent:
            "mean").
        step: 0, 1, ...

    >>> settings = {"alpha": 0.5, "sigma": 0.1, "population_size": 16, "update_scaling": "hyperscale"}
    >>> constant = {"alpha_schedule": "constant", "sigma_schedule": "constant"}
    >>> step_size(settings | constant, 0), step_size(settings | constant | {"update_scaling": "mean"}, 0)
    (0.2, 0.5)
    """
    alpha = at_step(settings, "alpha", step)
    if settings.get("update_scaling", "mean") == "mean":
        return alpha
    return alpha * at_step(settings, "sigma", step) * math.sqrt(settings["population_size"])


_PURPOSES = {"order": 0, "shuffled": 1, "random": 2, "shown": 3, "batches": 4}


def generator(seed: int, index: int, purpose: str) -> np.random.Generator:
    """Return a generator from the run's single tree of seeds; members' noise has a law of its own instead."""
    return np.random.default_rng(np.random.SeedSequence([seed, _PURPOSES[purpose], index]))
