"""Intervals and tests over seeds and problems.

The usual input is a matrix (seeds x problems) of the share of right answers, or one score per seed: seeds are the
units, problems a random effect. Shares, rates and p-values are fractions; p-values are two-sided unless a function says
otherwise; bootstrap intervals are percentile intervals. Random draws come from a Generator made from `seed`; the global
random state is neither read nor changed. A sample too small to say anything raises a ValueError.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, zip_longest
from math import isnan, nan
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import scipy  # its submodules are loaded on first use
from numpy.typing import ArrayLike, NDArray

from evoalign_lib.analysis.arrays import array
from evoalign_lib.checks import positive, require

Groups = Sequence[ArrayLike]
"""One sample per group."""
_CHUNK = 256
# draws of up to 2,000 problems in 10,000 resamples are cached, 20 megabytes each; larger ones are drawn every time
_KEPT_DRAWS = 20_000_000
# enough for all 12,870 ways to assign 8 + 8 runs: up to this many, permutation tests are exact
_PERMUTATIONS = 20_000


@dataclass(frozen=True)
class Interval:
    """A value with its interval and the number of units behind it."""

    value: float
    """The estimate, in the unit of the quantity."""
    low: float
    """Lower end; NaN if a single unit gives no interval."""
    high: float
    """Upper end; NaN if a single unit gives no interval."""
    n: int
    """Number of units (seeds, repeats)."""
    level: float = 0.95
    """Share of such intervals that contain the true value."""

    def format(self, percent: bool = True, digits: int = 1) -> str:
        """Return "value [low, high]" with this many decimals, times 100 if percent.

        >>> Interval(0.412, 0.39, 0.4304, 8).format()
        '41.2 [39.0, 43.0]'
        """
        scale = 100 if percent else 1
        # adding 0.0 after rounding turns -0.0 into 0.0
        value, low, high = (f"{round(scale * x, digits) + 0.0:.{digits}f}" for x in (self.value, self.low, self.high))
        return f"{value} [no interval, n = {self.n}]" if isnan(self.low) else f"{value} [{low}, {high}]"

    def detectable(self) -> float:
        """Return the smallest effect that a two-sided 5 % test detects with 80 % power, in the quantity's unit.

        It is (z.975 + z.80) standard errors, where the standard error is the interval's width / (2 z), with z.975 at
        level 95 %.

        >>> round(Interval(0.0, -1.96, 1.96, 8).detectable(), 2)
        2.8
        """
        z = NormalDist().inv_cdf
        return (self.high - self.low) * (z(0.975) + z(0.8)) / (2 * z((1 + self.level) / 2))


class Equivalence(NamedTuple):
    """Two one-sided 5 % tests (TOST) of whether a difference lies within a margin of 0."""

    interval: Interval
    """The difference with its 90 % interval, in the unit of the quantity."""
    margin: float
    """The largest difference that still counts as a match, in the same unit."""
    p: float
    """The larger of the two one-sided p-values."""

    @property
    def equivalent(self) -> bool:
        """Whether the 90 % interval lies inside (-margin, margin)."""
        return -self.margin < self.interval.low and self.interval.high < self.margin


def crossed_bootstrap(
    matrix: ArrayLike, baseline: ArrayLike | None = None, level: float = 0.95, n_resamples: int = 10_000, seed: int = 0
) -> Interval:
    """Return the mean over seeds, or its difference from a baseline on the same problems, with an interval.

    Seeds and problems are resampled independently of one another (the pigeonhole bootstrap); both arms of a difference
    share each resample of the problems. The interval is too wide where chance on single problems dominates (it counts
    that variance three times) and too narrow where the spread between few seeds dominates (by 1 - 1/seeds in variance:
    with 8 seeds it then covers about 91 %).

    matrix: (seeds, problems), share of right answers. A single row gives an interval over problems only. For two arms
    with paired seeds, pass the difference of their matrices, so that pairs are resampled.
    baseline: None; or (problems,), a fixed model; or (other seeds, problems), an arm whose seeds are resampled too.
    Returns the interval; n is the number of seeds, of the smaller arm if there are two.
    Raises ValueError for wrong shapes, and for values that are not finite.
    Source: Owen, The pigeonhole bootstrap, Annals of Applied Statistics 2007.
    """
    return _crossed(matrix, baseline, level, n_resamples, seed)[0]


def equivalence(
    matrix: ArrayLike, baseline: ArrayLike | None, margin: float, *, n_resamples: int = 10_000, seed: int = 0
) -> Equivalence:
    """Test whether two arms match: TOST by the 90 % interval of the crossed bootstrap.

    matrix, baseline: as in `crossed_bootstrap`. margin: in the unit of the matrix (0.02 is two percentage points).
    p is the larger share of resamples at or beyond one end of the margin, with the observed sample counted as one.
    Simulated arms of 2,000 problems whose true difference equals the margin should match in 5 % of cases. They do in 0
    to 3 % if chance on problems matters (margin 0.02, seeds' standard deviation about 0.01), and in 6 % with 16 seeds
    and 7 % with 8 if only seeds vary (margin 0.1, standard deviation about 0.05).
    Raises ValueError for a margin that is not positive, for an arm of one seed, and as `crossed_bootstrap` does.
    Source: Schuirmann, Journal of Pharmacokinetics and Biopharmaceutics 1987.
    """
    positive("margin", margin)
    interval, draws = _crossed(matrix, baseline, 0.9, n_resamples, seed, least=2)
    beyond = max(np.count_nonzero(draws <= -margin), np.count_nonzero(draws >= margin))
    return Equivalence(interval, float(margin), (1 + int(beyond)) / (n_resamples + 1))


def welch_equivalence(values: ArrayLike, baseline: ArrayLike, margin: float) -> Equivalence:
    """Test whether the means of two arms match: TOST by Welch's t test (statsmodels' CompareMeans).

    values, baseline: (seeds,) and (other seeds,), one score per seed. margin: in the same unit.
    Raises ValueError for a margin that is not positive, an arm of one seed, or two arms without any spread.
    """
    from statsmodels.stats.weightstats import CompareMeans

    positive("margin", margin)
    arm, other = _two_arms(values, baseline, 2, "without spread there is no t interval. Report both values.")
    compared = CompareMeans.from_data(arm, other)
    p = compared.ttost_ind(-margin, margin, usevar="unequal")[0]
    low, high = compared.tconfint_diff(alpha=0.1, usevar="unequal")
    interval = Interval(float(arm.mean() - other.mean()), float(low), float(high), min(len(arm), len(other)), 0.9)
    return Equivalence(interval, float(margin), float(p))


def bootstrap_mean(values: ArrayLike, n_resamples: int = 10_000, seed: int = 0) -> Interval:
    """Return the mean over seeds with its percentile bootstrap interval (scipy.stats.bootstrap, not BCa).

    BCa is undefined for a sample of equal values, such as censored or saturated runs give. With few seeds the interval
    is too narrow: in 1,500 simulated samples of normal scores, nominal 95 % intervals covered the mean in 88 % with 8
    seeds and in 92 % with 16.

    values: (seeds,). A single value has no interval: low and high are NaN.
    Raises ValueError for another shape, an empty sample, or values that are not finite.
    """
    sample = array("values", values, 1)
    if len(sample) == 1:
        return Interval(float(sample[0]), nan, nan, 1)
    return _bootstrap([sample], np.mean, 0.95, n_resamples, seed)


def stratified_bootstrap(
    strata: Groups, baseline: Groups | None = None, *, level: float = 0.95, n_resamples: int = 10_000, seed: int = 0
) -> Interval:
    """Return the mean over the seeds of several bases, or its difference from another arm, with an interval.

    Seeds are resampled within each base, independently in the two arms. Bases have equal weight.

    Few seeds give too narrow an interval, as in `bootstrap_mean`: in 1,500 simulations with 8 normal scores per base,
    nominal 95 % intervals covered the difference of two arms in 92 %, on one base and on three; with 16 scores in 92 to
    94 %.

    strata: one (seeds,) array of scores per base. baseline: those of the other arm, the same bases in the same order.
    Returns the interval; n is the smallest number of seeds of any base.
    Raises ValueError for a base with one seed, or arms with different numbers of bases.
    Source: Agarwal et al. 2021 (arXiv 2108.13264).
    """
    other = () if baseline is None else baseline
    same = len(strata) and (baseline is None or len(other) == len(strata))
    require(same, f"{len(strata)} strata against {len(other)}: pass the same bases in the same order")
    arm, other = (
        [array(f"base {i} of the {name}", sample, 1, least=2) for i, sample in enumerate(samples)]
        for name, samples in (("strata", strata), ("baseline", other))
    )

    def difference(*samples: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
        means = [sample.mean(axis) for sample in samples]
        own, others = (sum(part) / len(arm) for part in (means[: len(arm)], means[len(arm) :]))
        return own - others

    return _bootstrap([*arm, *other], difference, level, n_resamples, seed)


def nested_bootstrap(
    groups: Groups,
    baseline: Groups | None = None,
    *,
    shared: bool = False,
    level: float = 0.95,
    n_resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Return the mean of group means, or its difference from that of other groups, with an interval.

    Runs of different settings differ more than seeds of one setting, so settings are resampled, then the runs of each
    setting drawn. Settings have equal weight. With a single setting only its runs are resampled, and the interval
    describes that setting only.

    Few settings give too narrow an interval: in 150 simulations with four runs each, and twice as much spread between
    settings as within, nominal 95 % intervals covered the difference in 72 % with two settings on each side, in 85 %
    with three, and in 87 to 90 % with five to eight.

    groups, baseline: one (runs,) array of scores per setting; the two sides are treated as independent.
    shared: both sides have the same groups (such as training judges) in the same order, and share each resample of
    them. The interval is then Student's over the groups, with the standard error of the resamples. In 1,000
    simulations with 8 runs a side in each of six groups (four), it covered the difference in 95 to 99 % (96 to 100 %),
    `crossed_bootstrap` over runs and groups in 87 to 98 % (82 to 97 %), least where groups differ most.
    Returns the interval; n is the number of runs, of the smaller side if there are two; of groups, if they are shared.
    Raises ValueError for no groups, an empty group, a side with one run, values that are not finite, or shared groups
    of which there is one, or not as many on both sides.
    """
    sides = [[array("a group", group, 1) for group in side] for side in (groups, baseline) if side is not None]
    require(all(sides), "a side has no groups: pass the scores of at least one setting")
    counts = [*map(len, sides)]
    require(not shared or min(counts) == max(counts) > 1, f"{counts} shared groups: pass the same two or more")
    for side in sides:
        array("a side", np.concatenate(side), 1, least=2)
    rng, draws, value = np.random.default_rng(seed), np.zeros(n_resamples), 0.0
    for sign, side in zip((1, -1), sides, strict=False):
        sizes = np.array([len(group) for group in side])
        padded = np.array(list(zip_longest(*side, fillvalue=0.0))).T.copy()  # (groups, runs)
        if sign == 1 or not shared:
            drawn = rng.integers(len(side), size=(n_resamples, len(side)))
        size = sizes[drawn][..., None]
        runs = (rng.random((*drawn.shape, sizes.max())) * size).astype(int)
        counted = np.arange(sizes.max()) < size
        draws += sign * ((padded[drawn[..., None], runs] * counted).sum(-1) / size[..., 0]).mean(-1)
        value += sign * float(np.mean([group.mean() for group in side]))
    if shared:
        n = len(sides[0])
        half = float(scipy.stats.t.ppf((1 + level) / 2, n - 1) * draws.std() * (n / (n - 1)) ** 0.5)
        return Interval(value, value - half, value + half, n, level)
    return interval_of(value, draws, min(sum(map(len, side)) for side in sides), level)


def logistic_over_groups(
    predictors: Groups, shares: Groups, *, n_resamples: int = 10_000, seed: int = 0
) -> tuple[Interval, list[Interval]]:
    """Return how well a logistic regression ranks groups that it was not fitted to, and its slopes fitted to all.

    The cells (settings) of each group (base) are ranked by a regression fitted to the other groups. The area under the
    curve is the chance that a failed run is ranked above one that did not fail, averaged over groups. Predictors are
    standardised over all cells, and a ridge penalty of half the squared slopes keeps them finite under perfect
    separation. Cells have equal weight and are resampled within each group; a resample in which all or no runs of a
    group failed has no area and is left out of its interval.

    predictors: (cells, predictors) for each group. shares: (cells,) for each group, shares of failed runs.
    Returns the area and the slope of each predictor; n is the number of cells of the smallest group.
    Raises ValueError for a single group, shapes that do not fit, shares outside [0, 1], a predictor that does not vary,
    or a group in which all or no runs failed.
    """
    x = [array("predictors", matrix, 2) for matrix in predictors]
    y = [array("shares", share, 1, low=0, high=1) for share in shares]
    same = len(x) > 1 and [len(matrix) for matrix in x] == [len(share) for share in y]
    require(same, f"{len(x)} groups of predictors and {len(y)} of shares: pass both for the same two groups or more")
    for group, share in enumerate(y):
        failed = "all" if share.mean() else "no"
        require(0 < share.mean() < 1, f"{failed} runs of group {group} failed, so they cannot be ranked: leave it out")
    rng, cells = np.random.default_rng(seed), min(map(len, y))
    # the first row counts every cell once: the estimate itself
    counts = [np.vstack([np.ones(len(share)), resample_counts(rng, n_resamples, len(share))]) for share in y]
    pooled = np.vstack(x)
    require(pooled.std(0).all(), "a predictor is the same in all cells, so it predicts nothing: leave it out")
    x = [(matrix - pooled.mean(0)) / pooled.std(0) for matrix in x]

    def interval(draws: NDArray[np.float64]) -> Interval:
        return interval_of(draws[0], draws[np.isfinite(draws)][1:], cells)

    areas = np.zeros(n_resamples + 1)
    for out, (left, share) in enumerate(zip(x, y, strict=True)):
        fitted = [i for i in range(len(x)) if i != out]
        slopes = _logistic(*([part[i] for i in fitted] for part in (x, y, counts)))
        areas += _area(slopes @ left.T, share, counts[out]) / len(x)
    return interval(areas), [interval(slope) for slope in _logistic(x, y, counts).T]


def log_std_ratio(values: ArrayLike, baseline: ArrayLike, level: float = 0.95) -> Interval:
    """Return the natural logarithm of the ratio of two arms' standard deviations over seeds, with an interval.

    The interval is Student's, with Welch's degrees of freedom, from the jackknife variance of each log standard
    deviation. In simulations with 8 v 8, 16 v 16 and 16 v 8 seeds, nominal 95 % intervals covered 95 % for normal
    scores and 90 to 91 % for exponential ones; the percentile bootstrap fell to 88 and 87 % (16 v 8), Bonett's interval
    to 93 and 87 %.

    values, baseline: (seeds,) and (other seeds,), one score per seed.
    Raises ValueError for fewer than 3 seeds, or an arm in which all values, or all but one, are equal.
    Source: Miller, Jackknifing variances, Annals of Mathematical Statistics 1968.
    """
    logs, variances, freedom = [], [], []
    for name, given in (("values", values), ("baseline", baseline)):
        sample = array(name, given, 1, least=3)
        kept = [np.delete(sample, i) for i in range(len(sample))]
        flat = f"{name}: all values, or all but one, equal {np.median(sample)}: the spread has no interval; report "
        require(all(map(np.ptp, kept)), f"{flat}the values, or compare at a mean at which scores are not saturated")
        without = np.log([rest.std(ddof=1) for rest in kept])
        logs.append(np.log(sample.std(ddof=1)))
        # variance of the mean of the pseudo-values n log s - (n - 1) log s without one
        variances.append((len(sample) - 1) ** 2 * without.var(ddof=1) / len(sample))
        freedom.append(len(sample) - 1)
    value, error = logs[0] - logs[1], np.sqrt(sum(variances))
    welch = sum(variances) ** 2 / sum(v**2 / df for v, df in zip(variances, freedom, strict=True))
    half = scipy.stats.t.ppf((1 + level) / 2, welch) * error
    return Interval(float(value), float(value - half), float(value + half), min(freedom) + 1, level)


def brown_forsythe(values: ArrayLike, baseline: ArrayLike) -> float:
    """Return the p-value of equal spread of two arms over seeds: Levene's test about the medians.

    values, baseline: (seeds,) and (other seeds,). Raises ValueError for fewer than 3 seeds, or two arms without spread.
    Source: Brown and Forsythe, JASA 1974.
    """
    arm, other = _two_arms(values, baseline, 3, "neither arm has a spread to compare. Report both values.")
    return float(scipy.stats.levene(arm, other, center="median").pvalue)


class Source(NamedTuple):
    """A source of variance in `two_way`."""

    share: float
    """Share of the sum of squares (eta squared)."""
    p: float
    """p-value of the F test against the rest; NaN for the rest itself."""


def two_way(cells: Sequence[Groups]) -> dict[str, Source]:
    """Return the shares of variance that two factors and their interaction explain (statsmodels' anova_lm, type 2).

    cells: rows of columns, each (runs,), at least two runs; numbers of runs may differ.
    Returns the sources "rows", "columns", "interaction" and "rest".
    Raises ValueError for fewer than two rows or columns, cells with fewer than two runs, or values without variance.

    >>> two_way([[[0.0, 1.0], [0.0, 1.0]], [[4.0, 5.0], [4.0, 5.0]]])["rows"].share
    0.9411764705882353
    """
    import pandas as pd
    from statsmodels.formula.api import ols
    from statsmodels.stats.anova import anova_lm

    sizes = [len(row) for row in cells]
    require(min(len(sizes), *sizes, 2) > 1, f"cells have rows of {sizes} cells: pass at least two rows of two.")
    each = [(str(i), str(j), cell) for i, row in enumerate(cells) for j, cell in enumerate(row)]
    values = [(i, j, value) for i, j, cell in each for value in array(f"cell {i}, {j}", cell, 1, least=2)]
    frame = pd.DataFrame(values, columns=["row", "column", "value"])
    require(frame["value"].nunique() > 1, "all values are equal, so there is no variance to explain: report the value.")
    table = anova_lm(ols("value ~ C(row) * C(column)", frame).fit(), typ=2)
    shares = table["sum_sq"] / table["sum_sq"].sum()
    sources = map(Source, shares.tolist(), table["PR(>F)"].tolist())
    return dict(zip(("rows", "columns", "interaction", "rest"), sources, strict=True))


def mann_whitney(values: ArrayLike, baseline: ArrayLike, *, n_resamples: int = _PERMUTATIONS, seed: int = 0) -> float:
    """Return the two-sided p-value of the Mann-Whitney rank test, ties counting one half.

    values, baseline: (seeds,) and (other seeds,). n_resamples: permutations to draw; if there are no more than that, as
    with 8 + 8 runs by default, all are used and the test is exact.
    Raises ValueError for fewer than 2 seeds.
    """
    arm, other = array("values", values, 1, least=2), array("baseline", baseline, 1, least=2)
    return _permute([arm, other], n_resamples, seed, alternative="two-sided")


def jonckheere(groups: Groups, *, n_resamples: int = _PERMUTATIONS, seed: int = 0) -> float:
    """Return the one-sided p-value of an increase over ordered groups of independent runs (Jonckheere-Terpstra test).

    The statistic counts the pairs of runs from two groups in which the later group's run scores higher, ties counting
    one half. Its null distribution is that over all permutations of the runs, or over `n_resamples` random ones if
    there are more. To test for a decrease, pass the groups in reverse order.

    groups: at least 3 (seeds,) arrays, in order. Raises ValueError for fewer groups, or fewer than 2 seeds in one.
    """
    require(len(groups) > 2, f"{len(groups)} groups show no trend: pass at least 3, or compare two by mann_whitney")
    samples = [array(f"group {i}", group, 1, least=2) for i, group in enumerate(groups)]
    return _permute(samples, n_resamples, seed, alternative="greater")


def wilson(hits: int, n: int, level: float = 0.95) -> Interval:
    """Return a rate hits/n with Wilson's score interval; n counts runs, which are the units, not completions.

    Raises ValueError unless 0 <= hits <= n and n >= 1. Source: Wilson, JASA 1927.
    """
    from statsmodels.stats.proportion import proportion_confint

    _rate(hits, n)
    low, high = proportion_confint(hits, n, alpha=1 - level, method="wilson")
    # clipped, since rounding moves ends at 0 and 1 by a last bit
    return Interval(hits / n, min(float(low), hits / n), max(float(high), hits / n), n, level)


def fisher(hits: int, n: int, other_hits: int, other_n: int) -> float:
    """Return the p-value of equal rates hits/n and other_hits/other_n by Fisher's exact test; runs are the units.

    Raises ValueError unless 0 <= hits <= n and n >= 1 in both arms.

    >>> round(fisher(0, 8, 4, 8), 3)
    0.077
    """
    return float(scipy.stats.fisher_exact(_table(hits, n, other_hits, other_n)).pvalue)


def rate_difference(hits: int, n: int, other_hits: int, other_n: int, level: float = 0.95) -> Interval:
    """Return hits/n - other_hits/other_n with Newcombe's interval; runs are the units.

    Raises ValueError unless 0 <= hits <= n and n >= 1 in both arms. Source: Newcombe, Statistics in Medicine 1998,
    method 10 (from Wilson's intervals of both rates).

    >>> found = rate_difference(8, 16, 0, 16)
    >>> [round(x, 2) for x in (found.value, found.low, found.high)]
    [0.5, 0.21, 0.72]
    """
    from statsmodels.stats.proportion import confint_proportions_2indep

    _rate(hits, n)
    _rate(other_hits, other_n)
    low, high = confint_proportions_2indep(hits, n, other_hits, other_n, method="newcomb", alpha=1 - level)
    value = hits / n - other_hits / other_n
    return Interval(value, min(float(low), value), max(float(high), value), min(n, other_n), level)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return the p-values of a family of tests, by name, adjusted by Holm's step-down rule.

    Raises ValueError for an empty family, or values outside [0, 1]. Source: Holm, Scand. J. Statistics 1979.

    >>> {name: round(p, 3) for name, p in holm({"C1": 0.01, "C2": 0.04, "C8": 0.03}).items()}
    {'C1': 0.03, 'C2': 0.06, 'C8': 0.06}
    """
    for name, p in p_values.items():
        require(0 <= p <= 1, f"p-value {p} of {name!r} is not in [0, 1]: leave out tests that could not be run")
    require(p_values, "no p-values: pass those of at least one test")
    # statsmodels' multipletests gives the same numbers but runs the garbage collector, half a second with torch loaded
    names = sorted(p_values, key=p_values.get)
    raised = np.array([p_values[name] for name in names]) * np.arange(len(names), 0, -1)
    adjusted = dict(zip(names, np.minimum(np.maximum.accumulate(raised), 1).tolist(), strict=True))
    return {name: adjusted[name] for name in p_values}


def curve_band(
    matrix: ArrayLike, n_resamples: int = 10_000, seed: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return mean, low and high of curves: a pointwise 95 % percentile bootstrap that resamples whole curves.

    matrix: (seeds, points). Returns three arrays (points,); low and high are NaN for a single seed.
    Raises ValueError for another shape, or values that are not finite.
    """
    curves = array("matrix", matrix, 2)
    mean = curves.mean(axis=0)
    if len(curves) == 1:
        return mean, np.full_like(mean, nan), np.full_like(mean, nan)
    counts = resample_counts(np.random.default_rng(seed), n_resamples, len(curves))
    return mean, *np.quantile(counts @ curves / len(curves), ((1 - 0.95) / 2, (1 + 0.95) / 2), axis=0)


def _crossed(
    matrix: ArrayLike, baseline: ArrayLike | None, level: float, n_resamples: int, seed: int, least: int = 1
) -> tuple[Interval, NDArray[np.float64]]:
    """Return the first arm's mean minus the second's with its interval, and its draws; least: fewest seeds."""
    arms = [array("matrix", matrix, 2, least=least)]
    if baseline is not None:
        other, shape = array("baseline", baseline, 1, 2), arms[0].shape
        wanted = f"pass ({shape[1]},) or (seeds, {shape[1]}), the same problems in the same order"
        require(other.shape[-1] == shape[1], f"baseline has shape {other.shape} and the matrix {shape}: {wanted}")
        require(other.ndim == 1 or len(other) >= least, f"baseline has shape {other.shape}: pass {least} seeds or more")
        # a fixed model varies only with the problems, so subtracting it first keeps the pairing
        arms = [arms[0] - other] if other.ndim == 1 else [arms[0], other]
    value = arms[0].mean(1).mean() - (arms[1].mean(1).mean() if len(arms) == 2 else 0.0)
    draws = _crossed_resamples(arms, n_resamples, seed)
    return interval_of(value, draws, min(map(len, arms)), level), draws


def _crossed_resamples(arms: list[NDArray[np.float64]], n_resamples: int, seed: int) -> NDArray[np.float64]:
    """Return (n_resamples,) means of the first arm minus those of the second, both on the same problems."""
    problems = arms[0].shape[1]
    draws = []
    # float32 holds sums of sixteenths, such as shares of 16 samples, exactly: the same draws in half the time
    exact = problems < 2**16 and all((arm * 16 == np.rint(arm * 16)).all() and abs(arm).max() <= 16 for arm in arms)
    dtype = np.float32 if exact else np.float64
    joint = [np.vstack(arms)] if exact else arms  # one product is faster, and just as exact
    joint = [arm.astype(dtype) for arm in joint]
    for counts, chosen in crossed_draws(n_resamples, problems, tuple(map(len, arms)), seed):
        counts = counts.astype(dtype)
        sums = np.hstack([counts @ arm.T for arm in joint]).astype(np.float64) / problems
        each = zip(np.split(sums, [len(arms[0])], axis=1), chosen, strict=False)
        first, *second = (np.take_along_axis(own, seeds, axis=1).mean(-1) for own, seeds in each)
        draws.append(first - sum(second))
    return np.concatenate(draws)


_Draws = Iterable[tuple[NDArray[np.integer], list[NDArray[np.int64]]]]


def crossed_draws(
    n_resamples: int, problems: int, runs: tuple[int, ...], seed: int, multinomial: bool = False
) -> _Draws:
    """Return resamples of problems, and of each arm's runs separately, chunk by chunk. Treat the arrays as read-only.

    Args:
        n_resamples: total over all chunks.
        problems: number of problems.
        runs: number of runs of each arm.
        seed: seed of the draws.
        multinomial: draw how often each problem is chosen instead of which problem is chosen each time: the same
            distribution from a different stream of random numbers.

    Returns:
        For each chunk, how often each problem is drawn, (resamples, problems), and for each arm the runs drawn,
        (resamples, runs).
    """
    # the comparisons of a paper have the same few shapes, and drawing takes longer than using the draws
    keep = n_resamples > _CHUNK and n_resamples * problems <= _KEPT_DRAWS
    return (_kept_draws if keep else _draws)(n_resamples, problems, runs, seed, multinomial)


def _draws(n_resamples: int, problems: int, runs: tuple[int, ...], seed: int, multinomial: bool) -> _Draws:
    rng = np.random.default_rng(seed)
    # chunks keep the (resamples, problems) counts to a few megabytes
    for start in range(0, n_resamples, _CHUNK):
        size = min(_CHUNK, n_resamples - start)
        if multinomial:
            counts = rng.multinomial(problems, np.full(problems, 1 / problems), size=size)
        else:
            counts = resample_counts(rng, size, problems)
        yield counts, [rng.integers(n, size=(size, n)) for n in runs]


@lru_cache(maxsize=8)
def _kept_draws(*shape: Any) -> _Draws:
    """Return the draws of `_draws`, with counts in the smallest integer type that holds them."""
    kept = [(counts.astype(np.min_scalar_type(counts.max())), chosen) for counts, chosen in _draws(*shape)]
    for counts, chosen in kept:
        for drawn in (counts, *chosen):
            drawn.flags.writeable = False
    return kept


def _bootstrap(
    samples: list[NDArray[np.float64]], statistic: Callable[..., Any], level: float, n_resamples: int, seed: int
) -> Interval:
    """Return a statistic of samples with its percentile interval; each sample is resampled separately."""
    options = {"n_resamples": n_resamples, "confidence_level": level, "method": "percentile", "vectorized": True}
    rng = np.random.default_rng(seed)
    low, high = scipy.stats.bootstrap(samples, statistic, **options, rng=rng).confidence_interval
    value = float(statistic(*samples, axis=-1))
    return Interval(value, float(low), float(high), min(map(len, samples)), level)


def _logistic(x: list[NDArray], y: list[NDArray], counts: list[NDArray]) -> NDArray[np.float64]:
    """Return (resamples, predictors), slopes of logistic regressions of shares, one fit per row of counts."""
    design = np.column_stack([np.ones(sum(map(len, x))), np.vstack(x)])
    shares, weights = np.hstack(y), np.hstack(counts)
    ridge = np.diag([1e-6] + [1.0] * (design.shape[1] - 1))
    found = np.zeros((len(weights), design.shape[1]))
    for _ in range(12):  # Newton steps; with the penalty they converge in fewer
        p = 1 / (1 + np.exp(-np.clip(found @ design.T, -30, 30)))
        gradient = (weights * (shares - p)) @ design - found @ ridge
        hessian = np.einsum("rc,ci,cj->rij", weights * p * (1 - p), design, design) + ridge
        found = found + np.linalg.solve(hessian, gradient[..., None])[..., 0]
    return found[:, 1:]


def _area(scores: NDArray[np.float64], y: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (resamples,), areas under the curve of scores (resamples, cells), ties half; NaN where undefined."""
    failed, held = weights * y, weights * (1 - y)
    difference = scores[:, :, None] - scores[:, None, :]
    wins = (difference > 1e-9) + 0.5 * (np.abs(difference) <= 1e-9)
    with np.errstate(invalid="ignore"):
        return np.einsum("ri,rj,rij->r", failed, held, wins) / (failed.sum(1) * held.sum(1))


def _permute(samples: list[NDArray[np.float64]], n_resamples: int, seed: int, alternative: str) -> float:
    """Return the permutation p-value of the number of pairs that rise with the samples' order, ties counting half."""

    def rises(*drawn: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
        pairs = [(first[..., :, None], second[..., None, :]) for first, second in combinations(drawn, 2)]
        return sum((y > x).sum((-2, -1)) + (y >= x).sum((-2, -1)) for x, y in pairs) / 2

    options = {"n_resamples": n_resamples, "vectorized": True, "rng": np.random.default_rng(seed)}
    return float(scipy.stats.permutation_test(samples, rises, alternative=alternative, **options).pvalue)


def ratio(over: ArrayLike, under: ArrayLike) -> NDArray[np.float64]:
    """Return over / under, NaN where under is 0.

    >>> ratio([1.0, 2.0], [2.0, 0.0])
    array([0.5, nan])
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.asarray(under) == 0, nan, np.divide(over, under))[()]


def interval_of(value: float, draws: ArrayLike, n: int, level: float = 0.95) -> Interval:
    """Return a value with the percentile interval of its draws, NaN if there are none; n: the number of units."""
    low, high = np.quantile(draws, ((1 - level) / 2, (1 + level) / 2)) if len(draws) else (nan, nan)
    return Interval(float(value), float(low), float(high), n, level)


def resample_counts(rng: np.random.Generator, n_resamples: int, n: int) -> NDArray[np.int64]:
    """Return (n_resamples, n): how often each of n units is drawn when n are drawn with replacement."""
    if n > 512 and n_resamples:  # one row at a time fits into the cache
        return np.array([np.bincount(rng.integers(n, size=n), minlength=n) for _ in range(n_resamples)])
    drawn = rng.integers(n, size=(n_resamples, n)) + n * np.arange(n_resamples)[:, None]
    return np.bincount(drawn.ravel(), minlength=n_resamples * n).reshape(n_resamples, n)


def _two_arms(
    values: ArrayLike, baseline: ArrayLike, least: int, flat: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the scores of two arms; raise ValueError for too few seeds, or if neither arm has any spread."""
    arm, other = array("values", values, 1, least=least), array("baseline", baseline, 1, least=least)
    require(np.ptp(arm) or np.ptp(other), f"all values are {arm[0]} and {other[0]}: {flat}")
    return arm, other


def _table(hits: int, n: int, other_hits: int, other_n: int) -> list[list[int]]:
    """Return two rates as a table of hits and misses."""
    _rate(hits, n)
    _rate(other_hits, other_n)
    return [[hits, other_hits], [n - hits, other_n - other_hits]]


def _rate(hits: int, n: int) -> None:
    require(n >= 1 and 0 <= hits <= n, f"{hits} hits of {n} runs is not a rate: pass 0 <= hits <= n and n >= 1")
