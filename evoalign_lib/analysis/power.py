"""Power and smallest detectable effects: what a sweep can show with its seeds, printed before it starts.

All arms have n seeds each and normal scores with the same standard deviation, that of a pilot (n - 1 in the
denominator). Effects, margins and standard deviations are in the unit of the quantity; power and alpha are fractions.
For m tests under Holm's rule pass alpha / m, the level of the strictest test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, nan, sqrt
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import scipy
from numpy.typing import NDArray

from evoalign_lib.checks import choose, positive, require, whole_number

if TYPE_CHECKING:
    from pandas import DataFrame


class Plan(NamedTuple):
    """One comparison of two arms that a sweep is about to make."""

    quantity: str
    """What is compared, such as "test accuracy, ES - GRPO"."""
    test: str
    """"difference" (two-sided t test of means), "equivalence" (TOST) or "std ratio" (F test)."""
    n: int
    """Seeds in each arm."""
    effect: float
    """The difference, margin or ratio of standard deviations to detect."""
    std: float = nan
    """Standard deviation over the pilot's seeds; not needed for "std ratio"."""


def report(plans: Sequence[Plan], power: float = 0.8, alpha: float = 0.05) -> DataFrame:
    """Return a table of what each comparison can show; print it before the sweep starts.

    Columns: quantity, test, n, pilot std, effect, power (to detect that effect), detectable (the smallest effect,
    margin or ratio detected with the given power). A standard deviation from 4 pilot runs may be wrong by a factor of 2
    or more either way, and so may detectable effects.
    Raises ValueError, naming the quantity, for an unknown test or a value out of range.
    """
    import pandas as pd

    rows = []
    for plan in plans:
        try:
            choose("test", plan.test, _TESTS)
            finds, detects = _TESTS[plan.test]
            spread = {} if plan.test == "std ratio" else {"std": plan.std}
            found = finds(plan.n, plan.effect, alpha=alpha, **spread)
            smallest = detects(plan.n, power=power, alpha=alpha, **spread)
        except ValueError as error:
            raise ValueError(f"{plan.quantity}: {error}") from error
        rows.append((plan.quantity, plan.test, plan.n, plan.std, plan.effect, found, smallest))
    return pd.DataFrame(rows, columns=["quantity", "test", "n", "pilot std", "effect", "power", "detectable"])


def difference(n: int, effect: float, std: float, alpha: float = 0.05) -> float:
    """Return the power of a two-sided t test to detect a difference of two arms' means (pooled variance, exact).

    Raises ValueError for n < 2, a standard deviation that is not positive, or alpha outside (0, 1).
    """
    _check(n, std, alpha)
    normal, reach, shift = scipy.stats.norm, scipy.stats.t.isf(alpha / 2, 2 * n - 2), effect / (std * sqrt(2 / n))
    return _over_estimates(lambda u: normal.sf(reach * u - shift) + normal.cdf(-reach * u - shift), n)


def detectable_difference(n: int, std: float, power: float = 0.8, alpha: float = 0.05) -> float:
    """Return the smallest difference of means that a two-sided t test detects with the given power.

    >>> round(detectable_difference(16, 0.01), 4)
    0.0102
    """
    _check(n, std, alpha)
    return std * _smallest(lambda effect: difference(n, effect, 1.0, alpha), 0.0, power, alpha)


def equivalence(n: int, margin: float, std: float, true_difference: float = 0.0, alpha: float = 0.05) -> float:
    """Return the power of TOST to show two arms' means equal within a margin (pooled variance, exact).

    Raises ValueError for n < 2, a standard deviation or margin that is not positive, or alpha outside (0, 1).
    """
    _check(n, std, alpha)
    positive("margin", margin)
    error, reach = std * sqrt(2 / n), scipy.stats.t.isf(alpha, 2 * n - 2)
    upper, lower = (margin - true_difference) / error, (-margin - true_difference) / error
    # beyond margin / (error * reach) the interval is wider than the margin, so no difference can lie inside
    widest = margin / (error * reach)
    below = scipy.stats.norm.cdf
    return _over_estimates(lambda u: below(upper - reach * u) - below(lower + reach * u), n, widest)


def detectable_margin(n: int, std: float, power: float = 0.8, alpha: float = 0.05) -> float:
    """Return the smallest margin within which TOST shows two equal means equivalent with the given power."""
    _check(n, std, alpha)
    return std * _smallest(lambda margin: equivalence(n, margin, 1.0, 0.0, alpha) if margin else 0.0, 0.0, power, 0.0)


def std_ratio(n: int, ratio: float, alpha: float = 0.05) -> float:
    """Return the power of a two-sided F test to detect a ratio of two arms' standard deviations.

    `stats.log_std_ratio` and `stats.brown_forsythe`, which do not assume normal scores, have slightly less power.
    Raises ValueError for n < 2, a ratio that is not positive, or alpha outside (0, 1).
    """
    _check(n, 1.0, alpha)
    positive("ratio", ratio)
    law = scipy.stats.f(n - 1, n - 1)
    critical = law.isf(alpha / 2)
    return float(law.sf(critical / ratio**2) + law.cdf(1 / critical / ratio**2))


def detectable_std_ratio(n: int, power: float = 0.8, alpha: float = 0.05) -> float:
    """Return the smallest ratio above 1 of two arms' standard deviations that an F test detects with the given power.

    >>> round(detectable_std_ratio(16), 2)
    2.11
    """
    _check(n, 1.0, alpha)
    return _smallest(lambda ratio: std_ratio(n, ratio, alpha), 1.0, power, alpha)


def _check(n: int, std: float, alpha: float) -> None:
    whole_number("n", n, least=2, why="each arm needs at least 2 seeds")
    positive("std", std)
    require(0 < alpha < 1, f"alpha is {alpha}: pass a fraction between 0 and 1, such as 0.05")


def _over_estimates(rejected: Callable[[NDArray], NDArray], n: int, widest: float = inf) -> float:
    """Return a probability of rejection, averaged over u = estimated / true standard deviation of two arms, u < widest.

    It is a Gauss-Legendre quadrature over the distribution of u: the closed form, scipy's non-central t, is NaN for
    large effects, and so is statsmodels' TTestIndPower.
    """
    freedom = 2 * n - 2
    law = scipy.stats.chi2(freedom)
    low, high = sqrt(law.ppf(1e-15) / freedom), min(sqrt(law.isf(1e-15) / freedom), widest)
    if high <= low:
        return 0.0
    nodes, weights = np.polynomial.legendre.leggauss(200)
    u = low + (high - low) * (nodes + 1) / 2
    density = 2 * freedom * u * law.pdf(freedom * u * u)
    return min(1.0, float((weights * density * rejected(u)).sum() * (high - low) / 2))


def _smallest(power_of: Callable[[float], float], start: float, power: float, least: float) -> float:
    """Return the effect, at least start, at which the wanted power is reached; power rises from least."""
    require(least < power < 1, f"power is {power}: pass a fraction above {least} and below 1, such as 0.8")
    width = 1.0
    while power_of(start + width) < power:
        width *= 2
    return float(scipy.optimize.brentq(lambda effect: power_of(effect) - power, start, start + width, xtol=1e-10))


# the power to detect an effect, and the smallest effect detected with a power
_TESTS: dict[str, tuple[Callable[..., float], Callable[..., float]]] = {
    "difference": (difference, detectable_difference),
    "equivalence": (equivalence, detectable_margin),
    "std ratio": (std_ratio, detectable_std_ratio),
}
