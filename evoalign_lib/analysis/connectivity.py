"""Linear mode connectivity: barriers on the path between two models, and where a gain sets in, from measured curves.

The path is theta(a) = (1 - a) theta_A + a theta_B (`interpolation.path`), and E(a) an error measured on it, the lower
the better. With rewards=True a curve holds rewards, whose error is their negative; heights keep the unit of the curve.

    barrier_mean = sup_a E(a) - (E_A + E_B) / 2               Frankle et al. 2020 (arXiv 1912.05671)
    barrier_line = sup_a [E(a) - (1 - a) E_A - a E_B]

Neither is ever negative. barrier_mean is at least |E_A - E_B| / 2, which two ends of unequal error have on a path
without any barrier; barrier_line is 0 there. Average outcomes over problems before taking a sup: the mean of the
problems' sups is another number, and a large one.

The sup of measured points is too high. Each point has noise of its own, and the sup picks the largest: a flat path of
25 points on 100 problems shows a barrier of several points. `estimate_barrier` subtracts what noise alone adds, and its
docstring says where the rest of the bias lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evoalign_lib.analysis.stats import Equivalence, Interval
from evoalign_lib.checks import choose, whole_number

Array = NDArray[np.float64]

HEIGHTS = ("line", "mean", "dip", "base")
"""What a sup is taken of: error above the line between the ends, above their mean, below the better end, below the
base."""
NEAR = 1.5
"""Standard deviations below the sup within which `estimate_barrier` counts a point as a candidate for the sup."""


# ---- barriers of measured curves


class Peak(NamedTuple):
    """The height of a barrier, or depth of a dip, and its place on the path."""

    height: Array
    """(...), in the unit of the curve; NaN where the curve has a NaN."""
    alpha: Array
    """(...), the first alpha at which the sup lies; 0 or 1 where no inner point exceeds the ends."""


def barrier_line(curve: ArrayLike, alphas: ArrayLike | None = None, *, rewards: bool = False) -> Peak:
    """Return how far the error rises above the line between the ends: sup_a [E(a) - (1 - a) E_A - a E_B] >= 0.

    curve: (..., points), ends included, errors, or rewards with rewards=True. alphas: (points,) from 0 to 1, evenly
    spaced by default. Not corrected for noise: see `estimate_barrier`.
    Raises ValueError for fewer than 3 points, and alphas that do not fit or do not rise from 0 to 1.

    >>> height, alpha = barrier_line([0.1, 0.5, 0.3])
    >>> round(float(height), 3), float(alpha)
    (0.3, 0.5)
    """
    return _peak("line", *_errors(curve, alphas, rewards))


def barrier_mean(curve: ArrayLike, alphas: ArrayLike | None = None, *, rewards: bool = False) -> Peak:
    """Return how far the error rises above the mean of the ends: sup_a E(a) - (E_A + E_B) / 2 >= |E_A - E_B| / 2.

    Arguments and errors are those of `barrier_line`. Source: Frankle et al. 2020 (arXiv 1912.05671), section 2.
    """
    return _peak("mean", *_errors(curve, alphas, rewards))


def dip(
    curve: ArrayLike, alphas: ArrayLike | None = None, *, base: ArrayLike | None = None, rewards: bool = False
) -> Peak:
    """Return how far the path dips below its better end, or below the base: what averaging the weights gains.

    curve, alphas, rewards: as in `barrier_line`, whose errors it raises. base: the base's error (reward), (...) or one
    number; None: the better end, below which the depth is never negative. A negative depth below the base says that the
    path stays above it.
    """
    errors, alphas = _errors(curve, alphas, rewards)
    if base is None:
        return _peak("dip", errors, alphas)
    return _peak("base", errors, alphas, np.asarray(base, np.float64) * (-1 if rewards else 1))


def _errors(curve: ArrayLike, alphas: ArrayLike | None, rewards: bool) -> tuple[Array, Array]:
    errors = np.asarray(curve, np.float64) * (-1 if rewards else 1)
    if errors.ndim == 0 or errors.shape[-1] < 3:
        raise ValueError(f"a curve of shape {errors.shape} has no inner point: give (..., points), 3 at least")
    return errors, _alphas(alphas, errors.shape[-1])


def _alphas(alphas: ArrayLike | None, n: int) -> Array:
    if alphas is None:
        return np.linspace(0, 1, n)
    found = np.asarray(alphas, np.float64)
    if found.shape != (n,) or found[0] != 0 or found[-1] != 1 or not (np.diff(found) > 0).all():
        raise ValueError(f"alphas {found} of shape {found.shape} must rise from 0 to 1, one for each of {n} points")
    return found


def _line(errors: Array, alphas: Array) -> Array:
    """Return the line between the ends of each curve, exact at both."""
    start, end = errors[..., :1], errors[..., -1:]
    return np.where(alphas <= 0.5, start + alphas * (end - start), end - (1 - alphas) * (end - start))


def _excess(kind: str, errors: Array, alphas: Array, base: Array | None = None, b_better: Array | None = None) -> Array:
    """Return (..., points), what a height is the sup of: linear in the errors and the base, for a given better end."""
    ends = errors[..., 0], errors[..., -1]
    if kind == "line":
        return errors - _line(errors, alphas)
    if kind == "mean":
        return errors - (sum(ends) / 2)[..., None]
    if kind == "dip":
        base = np.minimum(*ends) if b_better is None else np.where(b_better, ends[1], ends[0])
    return np.asarray(base)[..., None] - errors


def _peak(kind: str, errors: Array, alphas: Array, base: Array | None = None) -> Peak:
    excess = _excess(kind, errors, alphas, base)
    height = excess.max(-1)
    return Peak(height, np.where(np.isnan(height), nan, alphas[np.nan_to_num(excess, nan=-np.inf).argmax(-1)]))


# ---- the sup without its bias


@dataclass(frozen=True, eq=False)
class BarrierEstimate:
    """A barrier corrected for noise, with what `below_margin`, `within_margin` and `regimes` need."""

    interval: Interval
    """The corrected height; n is the number of runs, of the smaller arm."""
    raw: float
    """The height as measured, in the unit of the outcomes."""
    correction: float
    """What noise alone adds by the estimate: the height as measured - the corrected one."""
    alpha: float
    """Where `excess` is largest."""
    excess: Array
    """(points,), what the height is the sup of, at each point, the mean over pairs."""
    p_flat: float
    """One-sided p-value of "no pair has a barrier, all points lie on the line between the ends"; NaN with noise_paths,
    and for a dip below the base. For "pairs" it speaks of these runs, over problems."""
    pairs: Array
    """(runs_a, runs_b), corrected height of each pair; NaN where not measured."""
    pair_draws: Array
    """(n_resamples, runs_a, runs_b), the same with problems resampled, centred at `pairs`."""
    draws: Array
    """(n_resamples,), the corrected height with runs and problems resampled."""
    bounds: Array
    """(n_resamples, k), draws that are not corrected: their largest quantile over k bounds the barrier from above."""
    kind: str
    """An entry of `HEIGHTS`."""
    across: str
    """"pairs" or "curve"."""


def estimate_barrier(
    outcomes: ArrayLike,
    alphas: ArrayLike | None = None,
    *,
    kind: Literal["line", "mean", "dip", "base"] = "line",
    rewards: bool = False,
    base: ArrayLike | None = None,
    across: Literal["pairs", "curve"] = "pairs",
    null: Literal["near", "line"] = "near",
    within: bool = False,
    noise_paths: ArrayLike | None = None,
    level: float = 0.95,
    n_resamples: int = 1000,
    seed: int = 0,
) -> BarrierEstimate:
    """Return the height of a barrier without what noise adds to a sup, with an interval over problems and runs.

    What is estimated: for across="pairs" the mean over pairs of runs of each pair's height; for "curve" the height of
    the mean curve, which is lower where pairs have their barriers at different places, and far less noisy.

    The correction. Outcomes of the same problems at all points are centred at each point, problems are resampled (all
    points and pairs together, so points stay correlated), and the expected sup of a path with this noise and a known
    height is found. null="line" takes the line between the ends as that path: right where there is no barrier, too much
    by up to the whole correction where one point is far above the rest. null="near", the default, takes the measured
    curve lifted by `NEAR` standard deviations of each point, and cut at its sup: points near the sup compete as under
    the line, points far below do not. Chernozhukov, Lee and Rosen select points likewise.

    In 1,000 simulated single paths of 25 points on 100 problems, four heights were estimated: 0, a quadratic bump of 20
    points, a narrow one of 5 points (about twice a point's standard deviation) and a narrow one of 20. The raw height
    was off by 5.2, 3.0, 2.2 and 0.5 points on average, that by "line" by 0.1, -2.5, -3.0 and -4.8, that by "near" by
    0.7, -1.0, -2.0 and -1.6: where few points stand out, the corrected height is too low. Nominal 95 % intervals of
    "near" covered the height in 96, 93, 87 and 90 % of cases, those of "line" in 97, 91, 84 and 76 %. p_flat was at
    most 0.05 in 4 % of the flat paths.

    The interval: runs of each arm are resampled, so pairs with a run in common move together (the pigeonhole
    bootstrap), and problems with them; resampled heights are centred first, since the sup of a resample has the bias
    twice. Percentiles. It is too wide where chance on single problems dominates and too narrow with few runs, as
    `stats.crossed_bootstrap` is. With a single pair it speaks of that pair, over problems. In 120 simulations with 8 +
    8 runs, whose barriers had a mean of 20 points and runs' standard deviations of 3, nominal 95 % covered the mean in
    93 to 95 %; where no pair had a barrier, it covered 0 in all of them. What bias the correction leaves is the same
    for every pair: more pairs do not average it out, more problems make it smaller.

    outcomes: errors of each problem at each point: (problems, points) for one pair, or (runs_a, runs_b, problems,
    points) for run i of arm A with run j of arm B on the same problems. All NaN where a pair was not measured. Curves
    without problems have 1 problem, and need noise_paths.
    alphas, rewards: as in `barrier_line`. kind: an entry of `HEIGHTS`; the better end of a dip is chosen once, from the
    outcomes. base: (problems,), outcomes of the base, for kind "base" only.
    within: both axes are runs of one arm, or of all arms: pairs i < j count, the rest is ignored, and one resample of
    runs serves both axes.
    noise_paths: instead of the correction by problems, (repeats, points) or (runs_a, runs_b, repeats, points) of the
    mean outcome of one end point, evaluated anew as often as the path has points: the mean of their sups is subtracted.
    They hold the noise of decoding alone, not that of the choice of problems; a greedy path has none.
    Raises ValueError for other shapes, a pair measured in part, no pair, one problem without noise_paths, an unknown
    kind, across or null, and a base that is missing or not asked for.
    Source: Owen, Annals of Applied Statistics 2007; Chernozhukov, Lee and Rosen, Econometrica 2013.
    """
    choose("kind", kind, HEIGHTS)
    choose("across", across, ("pairs", "curve"))
    choose("null", null, ("near", "line"))
    whole_number("n_resamples", n_resamples)
    errors, mask, base_errors = _outcomes(outcomes, base, kind, rewards, within)
    alphas = _alphas(alphas, errors.shape[-1])
    if errors.shape[2] == 1 and noise_paths is None:
        raise ValueError("one problem says nothing of noise: give outcomes of each problem, or noise_paths")
    rng = np.random.default_rng(seed)
    counts, weights = _resamples(rng, n_resamples, errors.shape[2], mask, within)

    # curves[0] is as measured: (1 + resamples, runs_a, runs_b, points), or one mean curve in the place of all pairs
    curves = _mean_over_problems(errors, counts)
    if across == "curve":
        curves = np.einsum("rij,rijp->rp", weights, curves)[:, None, None]
        weights = np.ones((len(curves), 1, 1))
    base_means = None if base_errors is None else (counts @ base_errors / len(base_errors))[:, None, None]
    b_better = curves[0, ..., -1] < curves[0, ..., 0]
    excess = _excess(kind, curves, alphas, base_means, b_better)
    sups, noise = excess.max(-1), excess[1:] - excess[0]
    if noise_paths is None:
        straight = _line(curves[0], alphas)
        flat = _excess(kind, straight, alphas, None if base_means is None else base_means[0], b_better)
        lifted = np.minimum(excess[0] + NEAR * noise.std(0) - sups[0][..., None], 0)
        shape = lifted if null == "near" else flat - flat.max(-1, keepdims=True)
        added, moved = (shape + noise).max(-1).mean(0), 0.0
        by_noise = ((flat + noise).max(-1) * weights[0]).sum((1, 2))
        # equal but for rounding counts as equal
        as_high = np.count_nonzero(by_noise >= (sups[0] * weights[0]).sum() - 1e-12)
        p_flat = nan if kind == "base" else (1 + as_high) / (1 + len(by_noise))
    else:
        added, moved = _noise_sups(noise_paths, kind, alphas, rewards, mask, across, rng, len(noise))
        p_flat = nan

    pairs, centred = sups[0] - added, sups[1:] - sups[1:].mean(0)
    pair_draws = pairs + centred - moved
    draws, raw_draws = ((weights[1:] * heights).sum((1, 2)) for heights in (pair_draws, sups[0] + centred))
    mean_excess = np.einsum("ij,ijp->p", weights[0], excess[0])
    value, raw = (float((weights[0] * heights).sum()) for heights in (pairs, sups[0]))
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    measured = weights[0] > 0
    return BarrierEstimate(
        interval=Interval(value, float(low), float(high), min(mask.shape), level),
        raw=raw,
        correction=raw - value,
        alpha=float(alphas[mean_excess.argmax()]),
        excess=mean_excess,
        p_flat=p_flat,
        pairs=np.where(measured, pairs, nan),
        pair_draws=np.where(measured, pair_draws, nan),
        draws=draws,
        bounds=raw_draws[:, None] if across == "pairs" else excess[1:, 0, 0],
        kind=kind,
        across=across,
    )


@dataclass(frozen=True)
class Bound:
    """A one-sided 5 % test of whether a barrier is lower than a margin."""

    value: float
    """The corrected height."""
    high: float
    """Upper end of its one-sided 95 % interval, in the same unit."""
    margin: float
    """The height that would count as a barrier."""
    p: float
    """One-sided p-value of a barrier as high as the margin or higher."""

    @property
    def below(self) -> bool:
        """Whether the upper end is below the margin."""
        return self.high < self.margin


def below_margin(estimate: BarrierEstimate, margin: float = 0.02, *, corrected: bool = False) -> Bound:
    """Return whether a barrier is lower than a margin: equivalence to no barrier, for a height that is never negative.

    By default nothing is subtracted from the upper bound. For across="curve" it is the largest of the pointwise 95 %
    bounds of the mean curve, and needs no correction for many points: the barrier is below the margin only if every
    point is (an intersection-union test). For "pairs" it is the raw height with the resampled error of the mean over
    pairs; the sup's bias stays in it, so with few problems no number of pairs brings it below the margin.
    corrected=True takes the draws of the corrected height instead, which errs to the low side (`estimate_barrier`): in
    1,000 simulated single paths whose barrier is the margin it said "below" in 7 to 10 % for quadratic bumps and in 15
    to 19 % for narrow ones, where the default said so in at most 1 % and 6 %.

    margin: in the unit of the outcomes (0.02 is two points, the threshold of Frankle et al. 2020, arXiv 1912.05671).
    Raises ValueError for a margin that is not positive.
    Source: Berger, Technometrics 1982.
    """
    _check_margin(margin)
    draws = estimate.draws[:, None] if corrected else estimate.bounds
    high = float(np.quantile(draws, 0.95, axis=0).max())
    beyond = int(np.count_nonzero(draws >= margin, axis=0).max())
    return Bound(estimate.interval.value, high, float(margin), (1 + beyond) / (1 + len(draws)))


def within_margin(estimate: BarrierEstimate, margin: float = 0.02) -> Equivalence:
    """Return whether a mean curve is a line within a margin on either side: TOST at every point.

    estimate: of kind "line", across "curve". margin: as in `below_margin`.
    Returns the largest excess of the mean curve over the line, by absolute value and with its sign, with the least and
    the largest of the points' 90 % bounds; p is the largest one-sided p-value over points and sides.
    Raises ValueError for another estimate, and for a margin that is not positive.
    Source: Schuirmann, Journal of Pharmacokinetics and Biopharmaceutics 1987; Berger, Technometrics 1982.
    """
    _check_margin(margin)
    if (estimate.kind, estimate.across) != ("line", "curve"):
        raise ValueError(
            f"an estimate of kind {estimate.kind!r} across {estimate.across!r} has one side only: use below_margin, or"
            ' estimate kind "line" across "curve"'
        )
    low, high = np.quantile(estimate.bounds, [0.05, 0.95], axis=0)
    beyond = max(
        int(np.count_nonzero(side, axis=0).max()) for side in (estimate.bounds >= margin, estimate.bounds <= -margin)
    )
    interval = Interval(
        float(estimate.excess[np.abs(estimate.excess).argmax()]),
        float(low.min()),
        float(high.max()),
        estimate.interval.n,
        0.9,
    )
    return Equivalence(interval, float(margin), (1 + beyond) / (1 + len(estimate.bounds)))


def _check_margin(margin: float) -> None:
    if not margin > 0:
        raise ValueError(f"margin is {margin}: it must be positive, in the unit of the outcomes")


def _outcomes(
    outcomes: ArrayLike, base: ArrayLike | None, kind: str, rewards: bool, within: bool
) -> tuple[Array, NDArray[np.bool_], Array | None]:
    """Return errors (runs_a, runs_b, problems, points), 0 where not measured; the pairs that count; the base's."""
    sign = -1 if rewards else 1
    errors = np.asarray(outcomes, np.float64) * sign
    if errors.ndim == 2:
        errors = errors[None, None]
    if errors.ndim != 4 or errors.size == 0 or errors.shape[-1] < 3:
        raise ValueError(
            f"outcomes have the shape {np.shape(outcomes)}: give (problems, points) or (runs_a, runs_b, problems,"
            " points), with at least 3 points"
        )
    mask = np.ones(errors.shape[:2], bool)
    if within:
        if errors.shape[0] != errors.shape[1]:
            raise ValueError(f"{errors.shape[0]} x {errors.shape[1]} pairs are not those of one list of runs")
        mask = np.triu(mask, 1)
    finite = np.isfinite(errors)
    if (mask & finite.any((2, 3)) & ~finite.all((2, 3))).any():
        raise ValueError("a pair has some outcomes that are not finite: give all of a pair's, or NaN for all")
    mask &= finite.all((2, 3))
    if not mask.any():
        raise ValueError("no pair was measured: a barrier needs one at least")
    if (base is None) == (kind == "base"):
        raise ValueError(f'kind is {kind!r}: give base for kind "base", where it is needed, and for no other')
    if base is None:
        return np.where(mask[..., None, None], errors, 0.0), mask, None
    base_errors = np.asarray(base, np.float64) * sign
    if base_errors.shape != errors.shape[2:3] or not np.isfinite(base_errors).all():
        raise ValueError(
            f"base has the shape {base_errors.shape}: give one finite outcome for each of {errors.shape[2]} problems"
        )
    return np.where(mask[..., None, None], errors, 0.0), mask, base_errors


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


def _noise_sups(
    noise_paths: ArrayLike,
    kind: str,
    alphas: Array,
    rewards: bool,
    mask: NDArray[np.bool_],
    across: str,
    rng: np.random.Generator,
    n: int,
) -> tuple[Array, Array]:
    """Return the mean sup of the noise-only paths of each pair, and by how much it moves with repeats resampled."""
    paths = np.asarray(noise_paths, np.float64) * (-1 if rewards else 1)
    if paths.ndim not in (2, 4) or paths.shape[-1] != len(alphas) or paths.ndim == 4 and paths.shape[:2] != mask.shape:
        raise ValueError(
            f"noise_paths have the shape {paths.shape}: give (repeats, {len(alphas)}) or"
            f" ({mask.shape[0]}, {mask.shape[1]}, repeats, {len(alphas)})"
        )
    if paths.ndim == 4:
        if not np.isfinite(paths[mask]).all():
            raise ValueError(
                "noise_paths of a measured pair are not finite: measure them for every pair, or once for all"
            )
        paths = paths[mask].mean(0) if across == "curve" else np.where(mask[..., None, None], paths, 0.0)
    elif not np.isfinite(paths).all():
        raise ValueError("noise_paths are not finite: leave out repeats that were not measured")
    sups = _excess(kind, paths, alphas, paths.mean(-1)).max(-1)
    added, repeats = sups.mean(-1), sups.shape[-1]
    moved = np.moveaxis(sups[..., rng.integers(repeats, size=(n, repeats))].mean(-1), -1, 0) - added[None]
    return added, moved.reshape(n, *(added.shape if added.ndim else (1, 1)))


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
    if curves.ndim == 0 or curves.shape[-1] < 2:
        raise ValueError(f"a curve of shape {curves.shape} has no ends: give (..., points), 2 at least")
    n = curves.shape[-1]
    axis = np.linspace(0, 1, n) if x is None else np.asarray(x, np.float64)
    if axis.shape[-1:] != (n,) or axis.ndim > 1 and axis.shape != curves.shape:
        raise ValueError(f"x has the shape {axis.shape}: give ({n},) or that of the curves, {curves.shape}")
    axis = np.broadcast_to(axis, curves.shape)
    if monotone:
        curves = _isotonic(curves)
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
    baseline_x: ArrayLike | None = None,
    *,
    monotone: bool = False,
    relative: bool = False,
    level: float = 0.95,
    n_resamples: int = 1000,
    seed: int = 0,
) -> Interval:
    """Return an arm's mean place of the half gain, or its difference from another arm, with an interval.

    Runs and problems are resampled as in `stats.crossed_bootstrap`, and both arms share each resample of the problems.
    A run without gain has no such place: it is left out, and n tells how many are left. In resamples of the problems a
    run may lose its gain; it is then left out of these.

    outcomes: (runs, problems, points), rewards of each run's path from the base. x: (points,); (runs, points), the same
    for all problems; or (runs, problems, points), such as the KL on each problem, whose mean over problems is the axis;
    alphas by default. baseline, baseline_x: the same of another arm, on the same problems. monotone, relative: as in
    `half_gain`.
    Returns the interval in the unit of x; n is the number of runs with a gain, of the smaller arm. NaN where an arm has
    none.
    Raises ValueError for other shapes, other problems and outcomes that are not finite.
    """
    whole_number("n_resamples", n_resamples)
    arms = [(np.asarray(outcomes, np.float64), x)]
    if baseline is not None:
        arms.append((np.asarray(baseline, np.float64), baseline_x))
    for values, axis in arms:
        if values.ndim != 3 or values.size == 0 or values.shape[1] != arms[0][0].shape[1]:
            raise ValueError(
                f"outcomes have the shape {values.shape}: give (runs, problems, points), problems as in each"
            )
        if not all(np.isfinite(np.asarray(part, np.float64)).all() for part in (values, axis) if part is not None):
            raise ValueError("outcomes or x are not finite: leave out runs that were not measured")
    rng = np.random.default_rng(seed)
    counts = _counts(rng, n_resamples, arms[0][0].shape[1])
    value, draws, n = 0.0, np.zeros(n_resamples), []
    for sign, (values, axis) in zip((1, -1), arms, strict=False):
        places = half_gain(
            _mean_over_problems(values, counts), _axis(axis, values, counts), monotone=monotone, relative=relative
        )
        places = places[:, np.isfinite(places[0])]
        n.append(places.shape[1])
        if not n[-1]:
            return Interval(nan, nan, nan, 0, level)
        weights = _counts(rng, n_resamples, n[-1])[1:] * np.isfinite(places[1:])
        with np.errstate(invalid="ignore"):
            draws += sign * (weights * np.nan_to_num(places[1:])).sum(1) / weights.sum(1)
        value += sign * places[0].mean()
    draws = draws[np.isfinite(draws)]
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2]) if len(draws) else (nan, nan)
    return Interval(float(value), float(low), float(high), min(n), level)


def _axis(x: ArrayLike | None, values: Array, counts: Array) -> Array | None:
    """Return x for curves (resamples, runs, points) whose problems were resampled."""
    if x is None or np.ndim(x) == 1:
        return x
    axis = np.asarray(x, np.float64)
    if axis.shape not in (values.shape, values.shape[::2]):
        raise ValueError(f"x has the shape {axis.shape}: give (points,), {values.shape[::2]} or {values.shape}")
    if axis.ndim == 3:
        return _mean_over_problems(axis, counts)
    return np.broadcast_to(axis, (len(counts), *axis.shape))


def _isotonic(curves: Array) -> Array:
    from scipy.optimize import isotonic_regression

    rows = curves.reshape(-1, curves.shape[-1])
    whole = np.isfinite(rows).all(-1)
    fitted = np.full_like(rows, nan)
    for i in np.flatnonzero(whole):
        fitted[i] = isotonic_regression(rows[i]).x
    return fitted.reshape(curves.shape)
