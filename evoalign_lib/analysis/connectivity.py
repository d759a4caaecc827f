"""Linear mode connectivity: barriers on the path between two models, and where a gain sets in, from measured curves.

The path is theta(a) = (1 - a) theta_A + a theta_B, and E(a) an error measured on it, the lower the better. Points lie
evenly on it, ends included.

    barrier_mean = sup_a E(a) - (E_A + E_B) / 2               Frankle et al. 2020 (arXiv 1912.05671)
    barrier_line = sup_a [E(a) - (1 - a) E_A - a E_B]

Neither is ever negative. barrier_mean is at least |E_A - E_B| / 2, which two ends of unequal error have on a path
without any barrier; barrier_line is 0 there. Average outcomes over problems before taking a sup: the mean of the
problems' sups is another number, and a large one.

The sup of measured points is too high. Each point has noise of its own, and the sup picks the largest: a flat path of
25 points on 100 problems shows a barrier of several points. `estimate_barrier` subtracts what noise alone adds, and its
docstring says where the rest of the bias lies.
"""

from math import nan
from typing import Literal, NamedTuple

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

from evoalign_lib.analysis.arrays import array
from evoalign_lib.analysis.stats import Interval, interval_of
from evoalign_lib.checks import choose, require, whole_number

Array = NDArray[np.float64]

NEAR = 1.5
"""Standard deviations below the sup within which `estimate_barrier` counts a point as a candidate for the sup."""


# ---- barriers of measured curves


def barrier_line(curve: ArrayLike) -> Array:
    """Return how far the error rises above the line between the ends: sup_a [E(a) - (1 - a) E_A - a E_B] >= 0.

    Args:
        curve: (..., points), errors at evenly spaced points, ends included. Not corrected for noise: see
            `estimate_barrier`.

    Returns:
        (...) heights, in the unit of the curve; NaN where the curve has a NaN.

    Raises:
        ValueError: fewer than 3 points.

    >>> round(float(barrier_line([0.1, 0.5, 0.3])), 3)
    0.3
    """
    errors = _inner(curve)
    return (errors - _line(errors)).max(-1)


def barrier_mean(curve: ArrayLike) -> Array:
    """Return how far the error rises above the mean of the ends: sup_a E(a) - (E_A + E_B) / 2 >= |E_A - E_B| / 2.

    Argument, result and errors are those of `barrier_line`. Source: Frankle et al. 2020 (arXiv 1912.05671), section 2.
    """
    errors = _inner(curve)
    return (errors - (errors[..., :1] + errors[..., -1:]) / 2).max(-1)


def _inner(curve: ArrayLike) -> Array:
    errors = np.asarray(curve, np.float64)
    inner = errors.ndim and errors.shape[-1] > 2
    require(inner, f"a curve of shape {errors.shape} has no inner point: give (..., points), 3 at least")
    return errors


def _line(errors: Array) -> Array:
    """Return the line between the ends of each curve, exact at both."""
    alphas = np.linspace(0, 1, errors.shape[-1])
    start, end = errors[..., :1], errors[..., -1:]
    return np.where(alphas <= 0.5, start + alphas * (end - start), end - (1 - alphas) * (end - start))


# ---- the sup without its bias


class BarrierEstimate(NamedTuple):
    """A barrier corrected for noise, with what `upper_bound` and `regimes` need."""

    interval: Interval
    """The corrected height; n is the number of runs, of the smaller arm."""
    raw: float
    """The height as measured, in the unit of the outcomes."""
    pairs: Array
    """(runs_a, runs_b), corrected height of each pair; NaN where not measured."""
    pair_draws: Array
    """(n_resamples, runs_a, runs_b), the same with problems resampled, centred at `pairs`."""
    bounds: Array
    """(n_resamples, k), draws that are not corrected: their largest quantile over k bounds the barrier from above."""


def estimate_barrier(
    outcomes: ArrayLike, *, across: Literal["pairs", "curve"] = "pairs", within: bool = False, n_resamples: int = 1000
) -> BarrierEstimate:
    """Return `barrier_line` without what noise adds to a sup, with an interval over problems and runs.

    What is estimated: for across="pairs" the mean over pairs of runs of each pair's height; for "curve" the height of
    the mean curve, which is lower where pairs have their barriers at different places, and far less noisy.

    The correction. Outcomes of the same problems at all points are centred at each point, problems are resampled (all
    points and pairs together, so points stay correlated), and the expected sup of a path with this noise and a known
    height is found: that of the measured curve lifted by `NEAR` standard deviations of each point, and cut at its sup.
    Points near the sup compete as under the line between the ends, points far below do not. Chernozhukov, Lee and Rosen
    select points likewise.

    In 1,000 simulated single paths of 25 points on 100 problems, four heights were estimated: 0, a quadratic bump of 20
    points, a narrow one of 5 points (about twice a point's standard deviation) and a narrow one of 20. The raw height
    was off by 5.2, 3.0, 2.2 and 0.5 points on average, the corrected one by 0.7, -1.0, -2.0 and -1.6: where few points
    stand out, it is too low. Nominal 95 % intervals covered the height in 96, 93, 87 and 90 % of cases.

    The interval: runs of each arm are resampled, so pairs with a run in common move together (the pigeonhole
    bootstrap), and problems with them; resampled heights are centred first, since the sup of a resample has the bias
    twice. Percentiles. It is too wide where chance on single problems dominates and too narrow with few runs, as
    `stats.crossed_bootstrap` is. With a single pair it speaks of that pair, over problems. In 120 simulations with 8 +
    8 runs, whose barriers had a mean of 20 points and runs' standard deviations of 3, nominal 95 % covered the mean in
    93 to 95 %; where no pair had a barrier, it covered 0 in all of them. What bias the correction leaves is the same
    for every pair: more pairs do not average it out, more problems make it smaller.

    Args:
        outcomes: errors of each problem at evenly spaced points: (problems, points) for one pair, or (runs_a, runs_b,
            problems, points) for run i of arm A with run j of arm B on the same problems. All NaN where a pair was not
            measured.
        across: what is estimated.
        within: both axes are runs of one arm, or of all arms: pairs i < j count, the rest is ignored, and one resample
            of runs serves both axes.
        n_resamples: of runs and problems.

    Raises:
        ValueError: other shapes, a pair measured in part, no pair, one problem, or an unknown across.

    Source:
        Owen, Annals of Applied Statistics 2007; Chernozhukov, Lee and Rosen, Econometrica 2013.
    """
    choose("across", across, ("pairs", "curve"))
    whole_number("n_resamples", n_resamples)
    errors, mask = _outcomes(outcomes, within)
    counts, weights = _resamples(np.random.default_rng(0), n_resamples, errors.shape[2], mask, within)

    # curves[0] is as measured: (1 + resamples, runs_a, runs_b, points), or one mean curve in the place of all pairs
    curves = _mean_over_problems(errors, counts)
    if across == "curve":
        curves = np.einsum("rij,rijp->rp", weights, curves)[:, None, None]
        weights = np.ones((len(curves), 1, 1))
    excess = curves - _line(curves)
    sups, noise = excess.max(-1), excess[1:] - excess[0]
    lifted = np.minimum(excess[0] + NEAR * noise.std(0) - sups[0][..., None], 0)

    pairs, centred = sups[0] - (lifted + noise).max(-1).mean(0), sups[1:] - sups[1:].mean(0)
    pair_draws = pairs + centred
    draws, raw_draws = ((weights[1:] * heights).sum((1, 2)) for heights in (pair_draws, sups[0] + centred))
    value, raw = (float((weights[0] * heights).sum()) for heights in (pairs, sups[0]))
    pairs, pair_draws = (np.where(weights[0] > 0, heights, nan) for heights in (pairs, pair_draws))
    return BarrierEstimate(
        interval_of(value, draws, min(mask.shape)),
        raw,
        pairs,
        pair_draws,
        bounds=raw_draws[:, None] if across == "pairs" else excess[1:, 0, 0],
    )


def upper_bound(estimate: BarrierEstimate) -> float:
    """Return the one-sided 95 % upper bound of a barrier: below a margin, such as 0.02, it says equivalence to none.

    Nothing is subtracted from it. For across="curve" it is the largest of the pointwise 95 % bounds of the mean curve,
    and needs no correction for many points: the barrier is below a margin only if every point is (an intersection-union
    test: Berger, Technometrics 1982). For "pairs" it is the raw height with the resampled error of the mean over pairs;
    the sup's bias stays in it, so with few problems no number of pairs brings it down. Two points are the threshold of
    Frankle et al. 2020 (arXiv 1912.05671).
    """
    return float(np.quantile(estimate.bounds, 0.95, axis=0).max())


def _outcomes(outcomes: ArrayLike, within: bool) -> tuple[Array, NDArray[np.bool_]]:
    """Return errors (runs_a, runs_b, problems, points), 0 where not measured, and the pairs that count."""
    errors = np.asarray(outcomes, np.float64)
    if errors.ndim == 2:
        errors = errors[None, None]
    wanted = "give ([runs_a, runs_b, ]problems, points), 3 points and 2 problems, or nothing is known of noise"
    fit = errors.ndim == 4 and errors.size and errors.shape[-1] > 2 and errors.shape[2] > 1
    require(fit, f"outcomes have the shape {np.shape(outcomes)}: {wanted}")
    rows, columns = errors.shape[:2]
    require(not within or rows == columns, f"{rows} x {columns} pairs are not those of one list of runs")
    mask = np.triu(np.ones((rows, columns), bool), 1 if within else -rows)
    finite = np.isfinite(errors)
    partly = (mask & finite.any((2, 3)) & ~finite.all((2, 3))).any()
    require(not partly, "a pair has some outcomes that are not finite: give all of a pair's, or NaN for all")
    mask &= finite.all((2, 3))
    require(mask.any(), "no pair was measured: a barrier needs one at least")
    return np.where(mask[..., None, None], errors, 0.0), mask


def _resamples(
    rng: np.random.Generator, n: int, problems: int, mask: NDArray[np.bool_], within: bool
) -> tuple[Array, Array]:
    """Return counts of problems (1 + n, problems) and weights of pairs (1 + n, runs_a, runs_b); all once in row 0."""
    counts, rows = _counts(rng, n, problems), _counts(rng, n, mask.shape[0])
    columns = rows if within else _counts(rng, n, mask.shape[1])
    weights = rows[:, :, None] * columns[:, None, :] * mask
    total = weights.sum((1, 2))
    drawn = total > 0  # not if one run alone was drawn, or pairs that were not measured
    return counts[drawn], weights[drawn] / total[drawn, None, None]


def _counts(rng: np.random.Generator, n: int, units: int) -> Array:
    drawn = rng.multinomial(units, np.full(units, 1 / units), size=n)
    return np.vstack([np.ones(units), drawn])


def _mean_over_problems(errors: Array, counts: Array) -> Array:
    """Return (resamples, ..., points), means of errors (..., problems, points) by counts (resamples, problems)."""
    by_problem = np.moveaxis(errors, -2, 0)
    means = counts @ by_problem.reshape(len(by_problem), -1) / len(by_problem)
    return means.reshape(len(counts), *by_problem.shape[1:])


# ---- where a gain sets in


def half_gain(
    curve: ArrayLike, x: ArrayLike | None = None, *, monotone: bool = False, relative: bool = False
) -> NDArray[np.float64]:
    """Return where a curve from the base to an end has half of the end's gain: the first crossing, linear in between.

    A linear climb has it at alpha 0.5, a plateau with a late rise beyond. Noise makes a first crossing too early.

    curve: (..., points), rewards, the base first (negate errors). x: (points,) or (..., points), the axis on which the
    place is read, such as the KL from the base at each point; alphas from 0 to 1 by default. monotone: replace the
    curve by its isotonic regression first, which takes most of the noise out of the crossing. relative: divide by x at
    the end, to compare ends of different KL.
    Returns (...), in the unit of x; NaN where the end has no gain over the base, and where the curve has a NaN.
    Raises ValueError for fewer than 2 points, and x of another shape.

    >>> round(half_gain([0.0, 0.1, 0.2, 1.0], [0.0, 0.2, 0.5, 0.7]).item(), 3)
    0.575
    """
    curves = np.asarray(curve, np.float64)
    ends = curves.ndim and curves.shape[-1] > 1
    require(ends, f"a curve of shape {curves.shape} has no ends: give (..., points), 2 at least")
    n = curves.shape[-1]
    axis = np.linspace(0, 1, n) if x is None else np.asarray(x, np.float64)
    fit = axis.shape[-1:] == (n,) and (axis.ndim == 1 or axis.shape == curves.shape)
    require(fit, f"x has the shape {axis.shape}: give ({n},) or that of the curves, {curves.shape}")
    axis = np.broadcast_to(axis, curves.shape)
    if monotone:
        curves = np.apply_along_axis(_isotonic, -1, curves)
    gain = curves[..., -1] - curves[..., 0]
    with np.errstate(invalid="ignore", divide="ignore"):
        level = (curves[..., 0] + gain / 2)[..., None]
        after = np.maximum((curves >= level).argmax(-1), 1)[..., None]
        (y0, y1), (x0, x1) = ([np.take_along_axis(v, i, -1) for i in (after - 1, after)] for v in (curves, axis))
        place = (x0 + (level - y0) / (y1 - y0) * (x1 - x0))[..., 0]
        place = place / axis[..., -1] if relative else place
    return np.where((gain > 0) & ~np.isnan(curves).any(-1), place, nan)


def half_gain_interval(
    outcomes: ArrayLike,
    x: ArrayLike | None = None,
    baseline: ArrayLike | None = None,
    *,
    monotone: bool = False,
    relative: bool = False,
    n_resamples: int = 1000,
) -> Interval:
    """Return an arm's mean place of the half gain, or its difference from another arm, with an interval.

    Runs and problems are resampled as in `stats.crossed_bootstrap`, and both arms share each resample of the problems.
    A run without gain has no such place: it is left out, and n tells how many are left. In resamples of the problems a
    run may lose its gain; it is then left out of these.

    outcomes: (runs, problems, points), rewards of each run's path from the base. x: (points,) or (runs, points), the
    same for all problems; alphas by default. baseline: outcomes of another arm, on the same problems, over alphas.
    monotone, relative: as in `half_gain`.
    Returns the interval in the unit of x; n is the number of runs with a gain, of the smaller arm. NaN where an arm has
    none.
    Raises ValueError for other shapes, other problems and outcomes that are not finite.
    """
    whole_number("n_resamples", n_resamples)
    wanted = "(runs, problems, points), without the runs that were not measured"
    arms = [array("outcomes", outcomes, 3, why=wanted)]
    if baseline is not None:
        arms.append(array("baseline", baseline, 3, why=wanted))
    sizes = [values.shape[1] for values in arms]
    require(len(set(sizes)) == 1, f"the arms have {sizes} problems: give the same ones in both")
    axis, shape = None if x is None else array("x", x), arms[0].shape[::2]
    fit = axis is None or axis.shape in (shape, shape[1:])
    require(fit, f"x has the shape {np.shape(x)}: give (points,) or (runs, points), {shape}")
    rng = np.random.default_rng(0)
    counts = _counts(rng, n_resamples, sizes[0])
    value, draws, n = 0.0, np.zeros(n_resamples), []
    for sign, values in zip((1, -1), arms, strict=False):
        curves = _mean_over_problems(values, counts)
        if axis is not None:
            axis = np.broadcast_to(axis, curves.shape)
        places = half_gain(curves, axis, monotone=monotone, relative=relative)
        places = places[:, np.isfinite(places[0])]
        n.append(places.shape[1])
        if not n[-1]:
            return Interval(nan, nan, nan, 0)
        axis = None  # the other arm's is alphas
        weights = _counts(rng, n_resamples, n[-1])[1:] * np.isfinite(places[1:])
        with np.errstate(invalid="ignore"):
            draws += sign * (weights * np.nan_to_num(places[1:])).sum(1) / weights.sum(1)
        value += sign * places[0].mean()
    return interval_of(value, draws[np.isfinite(draws)], min(n))


def _isotonic(curve: Array) -> Array:
    finite = np.isfinite(curve).all()
    return scipy.optimize.isotonic_regression(curve).x if finite else np.full_like(curve, nan)
