"""Laws of reward over-optimisation: how a reward changes with a policy's distance from its base.

The distance d is the square root of the KL divergence from the base in nats per completion. For rewards that are 0 at
the base, Gao et al. 2022 (arXiv 2210.10760, equations 1 and 2) fit d (a - b d) to best-of-n and d (a - b log d) to
reinforcement learning. Both are linear in a and b, so they are fitted by linear least squares.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evoalign_lib.analysis.arrays import array
from evoalign_lib.checks import choose, require

LAWS = ("linear", "best of n", "rl")
"""a d, without over-optimisation; d (a - b d); d (a - b log d)."""


class Fit(NamedTuple):
    """A law with its coefficients."""

    law: str
    a: float
    b: float
    """Coefficient of the term that bends the law down; 0 for "linear"."""

    def at(self, d: ArrayLike) -> NDArray[np.float64]:
        """Return the gain in reward at distances d, (n,)."""
        return _columns(self.law, np.asarray(d, float)) @ np.array([self.a, self.b])


def _columns(law: str, d: NDArray[np.float64]) -> NDArray[np.float64]:
    choose("law", law, LAWS)
    bend = {"linear": np.zeros_like(d), "best of n": d**2, "rl": d * np.log(np.where(d > 0, d, 1.0))}[law]
    return np.stack([d, -bend], axis=1)


def distance(kl: ArrayLike) -> NDArray[np.float64]:
    """Return d for KLs in nats per completion; estimates that are negative by sampling count as 0."""
    return np.sqrt(np.maximum(np.asarray(kl, float), 0.0))


def fit(law: str, d: ArrayLike, gain: ArrayLike) -> Fit:
    """Fit a law by least squares.

    law: one of `LAWS`. d, gain: (n,) distances, and rewards minus the base's. Raises ValueError for an unknown law,
    arrays of different lengths, numbers that are not finite, or fewer than three points.

    >>> fit("best of n", [1, 2, 3, 4], [3, 4, 3, 0])
    Fit(law='best of n', a=4.0, b=1.0)
    """
    d, gain = array("distances", d, 1, least=3), array("gains", gain, 1, least=3)
    require(d.shape == gain.shape, f"{d.shape} distances and {gain.shape} gains: pass one gain per distance.")
    a, b = np.linalg.lstsq(_columns(law, d), gain, rcond=None)[0]
    return Fit(law, float(round(a, 12)), float(round(b, 12)))


def explained(found: Fit, d: ArrayLike, gain: ArrayLike) -> float:
    """Return R squared: 1 - residual sum of squares / sum of squares around the mean gain; NaN if all are equal.

    It may be negative on points that the law was not fitted to.
    """
    gain = np.asarray(gain, float)
    around = float(((gain - gain.mean()) ** 2).sum())
    return float("nan") if around == 0 else 1 - float(((gain - found.at(d)) ** 2).sum()) / around


def read_at(proxy: ArrayLike, values: ArrayLike, level: float, end: int | None = None) -> float | None:
    """Return a quantity where the training judge's score first reaches a level, interpolated linearly.

    proxy, values: (points,) the score and the quantity along a curve, NaN where missing; the first point is the base.
    end: 0 to read it at the last point before the level, 1 at the first that reaches it; None: between the two.
    Returns None if the score never reaches the level.

    >>> read_at([0, 1, 3], [10, 20, 40], 2)
    30.0
    >>> read_at([0, 1, 3], [10, 20, 40], 2, end=1)
    40.0
    """
    proxy, values = np.asarray(proxy, float), np.asarray(values, float)
    reached = np.flatnonzero(proxy[1:] >= level)  # never where it is NaN
    if not len(reached):
        return None
    i = int(reached[0])
    part = (level - proxy[i]) / (proxy[i + 1] - proxy[i]) if end is None else end
    return float(values[i] + part * (values[i + 1] - values[i]))


Run = tuple[ArrayLike, ArrayLike]


def held_out(law: str, fitted: Sequence[Run], asked: Sequence[Run]) -> float:
    """Return the R squared of a law on some runs after fitting it to others.

    law: as for `fit`. fitted, asked: (d, gain) of each run to fit to, and to explain. Raises ValueError as `fit` does.
    """
    d, gain = (np.concatenate([np.asarray(run[i], float) for run in fitted]) for i in (0, 1))
    rest = [np.concatenate([np.asarray(run[i], float) for run in asked]) for i in (0, 1)]
    return explained(fit(law, d, gain), *rest)
