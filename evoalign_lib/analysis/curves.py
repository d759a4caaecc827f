"""Measures of whole curves (score at a budget or a matched mean, drawdown) and of whole sweeps.

A curve is a pair (x, score), where x is the budget spent so far (completions, tokens, FLOPs, core-seconds) and rises.
"""

from collections.abc import Sequence
from math import comb, inf, nan

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evoalign_lib.analysis.arrays import array
from evoalign_lib.analysis.stats import Interval, interval_of
from evoalign_lib.checks import require

Curve = tuple[ArrayLike, ArrayLike]
"""Two arrays of the same length, such as x and score."""


def score_at(x: ArrayLike, score: ArrayLike, budget: float) -> float:
    """Return a curve's score at a budget, interpolated over log x.

    x, score: (points,); a first point at x = 0, which has no logarithm, is left out. budget: in the unit of x.
    Raises ValueError for a budget outside the curve; nothing is extrapolated.

    >>> round(score_at([0, 100, 10_000], [0.1, 0.2, 0.4], 1000), 3)
    0.3
    """
    spent, scores = np.asarray(x, np.float64), np.asarray(score, np.float64)
    begun = spent > 0
    first = spent[begun].min(initial=inf)
    require(first <= budget <= spent[-1], f"a curve from {first:g} to {spent[-1]:g} has no score at {budget:g}")
    return float(np.interp(np.log(budget), np.log(spent[begun]), scores[begun]))


def spent_until(x: ArrayLike, score: ArrayLike, target: float) -> float:
    """Return what a run had spent when its score first reached a target, interpolated between points over log x.

    If it never did, return all that it spent. A first point at x = 0, which has no logarithm, counts as 1.

    x, score: (points,), x rising; target: in the unit of the scores.

    >>> round(spent_until([0, 100, 10_000], [0.1, 0.1, 0.3], 0.2))
    1000
    """
    spent, scores = np.maximum(np.asarray(x, np.float64), 1), np.asarray(score, np.float64)
    reached = scores >= target
    i = int(reached.argmax()) if reached.any() else -1
    if i <= 0:
        return float(spent[i])
    share = (target - scores[i - 1]) / (scores[i] - scores[i - 1])
    return float(2 ** (np.log2(spent[i - 1]) + share * np.log2(spent[i] / spent[i - 1])))


def minimum(levels: ArrayLike, needed: Sequence[ArrayLike]) -> float:
    """Return the level at which a quadratic fit over log levels has its minimum, within the levels tried.

    If the parabola has no minimum inside, return the edge at which it is lower.

    levels: (k,) values of a setting, at least three, above 0. needed: k arrays, what each level's runs needed, above 0.

    >>> round(minimum([8, 16, 32, 64], [[4], [2], [2], [4]]), 1)
    22.6
    """
    return minimum_interval(levels, needed, n_resamples=0).value


def minimum_interval(levels: ArrayLike, needed: Sequence[ArrayLike], n_resamples: int = 10_000) -> Interval:
    """Return `minimum` with a bootstrap interval over the runs of each level; n is the smallest number of runs.

    levels, needed: as for `minimum`.
    """
    rng, logs = np.random.default_rng(0), [np.log2(np.asarray(each, np.float64)) for each in needed]
    x = np.log2(np.repeat(np.asarray(levels, np.float64), list(map(len, logs))))
    design = np.vander(x, 3)
    scale = np.sqrt((design * design).sum(0))  # as in np.polyfit, which would build the design again in each resample
    design = design / scale
    drawn = ([each[rng.integers(0, len(each), size=len(each))] for each in logs] for _ in range(n_resamples))
    value, *draws = (
        _vertex(np.linalg.lstsq(design, np.concatenate(y), rcond=len(x) * np.finfo(float).eps)[0] / scale, x)
        for y in (logs, *drawn)
    )
    return interval_of(value, draws, min(map(len, logs)))


def _vertex(coefficients: NDArray[np.float64], x: NDArray[np.float64]) -> float:
    """Return where a parabola over binary logarithms x has its minimum within their range."""
    (a, b, c), ends = coefficients, (x.min(), x.max())
    inside = -b / (2 * a) if a > 0 else inf
    if ends[0] <= inside <= ends[1]:
        return float(2**inside)
    return float(2 ** min(ends, key=lambda end: (a * end + b) * end + c))


def scores_at_mean(matrix: ArrayLike, target: float) -> tuple[int, NDArray[np.float64]]:
    """Return the first point at which an arm's mean over seeds reaches a target, and the scores (seeds,) there.

    Spread shrinks near a ceiling in any case, so compare the spreads of two arms where their means are equal.

    matrix: (seeds, points), scores of runs evaluated at the same points. target: in the unit of the scores.
    Raises ValueError for another shape, values that are not finite, or a target that the mean never reaches.
    """
    curves = array("scores", matrix, 2)
    mean = curves.mean(axis=0)
    above = np.flatnonzero(mean >= target)
    require(len(above), f"the arm's mean never reaches {target}: its largest is {mean.max():.4g}. Lower the target.")
    return int(above[0]), curves[:, above[0]]


def largest_drawdown(curves: ArrayLike) -> NDArray[np.float64]:
    """Return the largest drop of curves below their running maximum, in the unit of the scores; 0 if they never drop.

    It grows with the number of points and the noise of their evaluation: compare only arms evaluated alike.

    curves: (..., points). Returns (...,). Raises ValueError for no points and values that are not finite.
    """
    scores = array("scores", curves)
    # rounded: equal drops between different scores differ in their last bits, which would break ties in rank tests
    return (np.maximum.accumulate(scores, axis=-1) - scores).max(axis=-1).round(9)


def expected_maximum(scores: ArrayLike) -> NDArray[np.float64]:
    """Return the expected best of k configurations drawn from a sweep without replacement, for k = 1..n.

    Dodge et al. draw with replacement, which underestimates the expectation and, at k = n, the sweep's best. Without
    replacement every k is unbiased (Tang et al.): k = 1 gives the mean, k = n the best of the sweep.

    scores: (n,), validation scores of the configurations of one sweep. Returns (n,).
    Raises ValueError for another shape and values that are not finite.
    Source: Dodge et al. 2019 (arXiv 1909.03004); Tang et al. 2020 (arXiv 2004.13705).
    """
    ordered = np.sort(array("scores", scores, 1))
    n = len(ordered)
    # the i-th smallest is the best of k in comb(i - 1, k - 1) of the comb(n, k) choices
    return np.array([[comb(i, k - 1) / comb(n, k) for i in range(n)] for k in range(1, n + 1)]) @ ordered


def cost_at_equal_score(other: Sequence[Curve], own: Curve, start: float, *, n_resamples: int = 2000) -> Interval:
    """Return the ratio of another arm's cost to this arm's cost at equal mean score.

    The other arm's cost at a score is read from the line through the means of its groups, such as runs of growing
    length; it begins at the untrained model, which costs nothing. Where a mean score falls, the best so far holds.

    Args:
        other: groups in order, each (scores, costs) of its models, (models,) each.
        own: scores and costs of the arm's models, (models,) each.
        start: score of the untrained model.

    Returns:
        The ratio of mean costs with a percentile interval over models, resampled within every group of both arms; n is
        the smallest number of models. NaN if the line does not reach the score or a cost is 0; the ends are NaN if that
        happens in any resample.

    Raises:
        ValueError: an empty group, or values that are not finite.
    """
    groups = [tuple(array("scores or costs", values, 1) for values in group) for group in (*other, own)]
    rng = np.random.default_rng(0)
    means = []
    for scores, costs in groups:
        chosen = rng.integers(len(scores), size=(n_resamples + 1, len(scores)))
        chosen[0] = np.arange(len(scores))  # the first is the sample itself
        means.append((scores[chosen].mean(1), costs[chosen].mean(1)))
    *line, (score, cost) = means
    x = np.maximum.accumulate([np.full_like(score, start), *(found for found, _ in line)])
    y = np.array([np.zeros_like(cost), *(found for _, found in line)])
    there = np.array([np.interp(at, x[:, i], y[:, i], right=nan) for i, at in enumerate(score)])
    ratios = np.divide(there, cost, out=np.full_like(cost, nan), where=(there > 0) & (cost > 0))
    draws = ratios[1:] if np.isfinite(ratios).all() else ()
    return interval_of(ratios[0], draws, min(len(scores) for scores, _ in groups))
