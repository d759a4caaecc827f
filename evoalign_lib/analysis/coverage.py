"""Which problems a model can solve at all: pass@k, cover@tau, and support kept, won and lost, with its null by chance.

A problem's probability is the chance that one sample is right. With k samples the problem is solved with probability
pass@k, and given the problem, two models solve it independently of one another. A model's support is the set of
problems it solves; the four numbers of `Support` say how training changes it. At finite k, a problem with a probability
near 1/k is won or lost by chance: report `null_nscr` with every NSCR. A ratio whose denominator is 0 is NaN, never 0.

Probabilities may be exact, by enumeration, or shares of right answers. A share put into 1 - (1 - p)^k is biased
downward, most of all for rare right answers: where counts are known, use `estimate_pass_at`.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log, nan
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evoalign_lib.analysis import stats
from evoalign_lib.analysis.arrays import array
from evoalign_lib.analysis.stats import Interval, interval_of, ratio
from evoalign_lib.checks import require, whole_number

SOLVED_WITHIN = 256
"""Samples within which this project counts a problem as solved when it compares the support of models."""
_CHUNK = 256
_SLACK = 1e-9  # relative: a value that differs from a threshold by rounding counts as equal
_ROUNDING = 1e-6  # by which a float32 sum of probabilities may exceed 1
_Group = tuple[NDArray[np.float64], NDArray[np.float64]]


@dataclass(frozen=True)
class Support:
    """Problems solved before training, after it, both times or never: counts, or expected counts.

    Undefined ratios are NaN. Source: P, E, S and Out of arXiv 2507.14843.
    """

    kept: float
    """P, preservation: solved before and after."""
    won: float
    """E, expansion: solved only after."""
    lost: float
    """S, shrinkage: solved only before."""
    out: float
    """Out of support: solved neither before nor after."""

    @property
    def total(self) -> float:
        """Number of problems."""
        return self.kept + self.won + self.lost + self.out

    @property
    def srr(self) -> float:
        """Support retention rate, P / (P + S): the share of the old support that is kept."""
        return float(ratio(self.kept, self.kept + self.lost))

    @property
    def ndr(self) -> float:
        """Net discovery rate, E / (P + E): the share of the new support that was won."""
        return float(ratio(self.won, self.kept + self.won))

    @property
    def nscr(self) -> float:
        """Net support change rate, (E - S) / (P + E + S): positive if the support grows, negative if it shrinks."""
        return float(ratio(self.won - self.lost, self.kept + self.won + self.lost))


class Null(NamedTuple):
    """The change of support that two independent sets of samples of one and the same model would show."""

    support: Support
    """Expected counts; their NSCR is 0."""
    sd: float
    """Standard deviation of the NSCR of counts, over simulated pairs of sets in which some problem is solved."""
    low: float
    """Lower end of the 95 % range of the NSCR over such pairs."""
    high: float
    """Upper end of that range."""


def pass_at(probabilities: ArrayLike, k: int | Sequence[int]) -> NDArray[np.float64]:
    """Return the chance that at least one of k independent samples is right, 1 - (1 - p)^k; accurate for tiny p, too.

    probabilities: (...), that one sample is right. k: at least 1; one number, or several.
    Returns (...), for several k (..., len(k)).
    Raises ValueError for probabilities outside [0, 1] and for a k that is not a whole number of at least 1.

    >>> pass_at([0.0, 0.5, 1.0], [1, 2]).tolist()
    [[0.0, 0.0], [0.5, 0.75], [1.0, 1.0]]
    """
    p, ks = _probabilities(probabilities, "probabilities"), _ks(k)
    with np.errstate(divide="ignore"):  # log 0, for p = 1
        return -np.expm1(np.multiply.outer(np.log1p(-p), ks))


def estimate_pass_at(right: ArrayLike, samples: ArrayLike, k: int | Sequence[int]) -> NDArray[np.float64]:
    """Return the unbiased estimate of pass@k from counts, 1 - C(n - c, k) / C(n, k).

    It is the share of all subsets of k of the n samples that contain a right one. At k = 1 it is c / n; at k = n it is
    whether any sample is right.

    right: (...), number c of right samples of each problem. samples: number n of samples of each problem, of a shape
    that broadcasts with that of right, such as a single number. k: from 1 to n; one number, or several.
    Returns (...), for several k (..., len(k)).
    Raises ValueError for counts that are not whole numbers or do not fit, and for k > n.
    Source: Chen et al. 2021 (arXiv 2107.03374), equation 1.

    >>> estimate_pass_at([0, 1, 4], 4, [1, 2, 4]).round(3).tolist()
    [[0.0, 0.0, 0.0], [0.25, 0.5, 1.0], [1.0, 1.0, 1.0]]
    """
    return -np.expm1(_log_all_wrong(*_counted(right, samples, k))) + 0.0  # not -0.0


def variance_of_pass_at(right: ArrayLike, samples: ArrayLike, k: int | Sequence[int]) -> NDArray[np.float64]:
    """Return an unbiased estimate of the variance of `estimate_pass_at` over new samples of the same problems.

    With F_j = C(n - c, j) / C(n, j), an unbiased estimate of (1 - p)^j, it is F_k^2 - F_2k: the squared estimate minus
    an unbiased estimate, from disjoint sets of k, of its squared mean. It is never negative. The estimates are
    U-statistics. For a mean over fixed problems, add the variances and divide by the squared number of problems.

    right, samples, k: as in `estimate_pass_at`.
    Returns (...), for several k (..., len(k)); NaN where 2k > n, since no two sets of k are disjoint then.
    Raises ValueError as `estimate_pass_at` does.

    >>> variance_of_pass_at([0, 2, 4], 4, [1, 3]).round(3).tolist()
    [[0.0, nan], [0.083, nan], [0.0, nan]]
    """
    c, n, ks = _counted(right, samples, k)
    once, twice = _log_all_wrong(c, n, ks), _log_all_wrong(c, n, 2 * ks)
    never = np.isneginf(once)  # every set of k contains a right sample: F_k is 0
    logs = twice - 2 * np.where(never, 0.0, once)  # log F_2k / F_k^2, above 0 only by rounding
    return -np.exp(2 * once) * np.expm1(np.minimum(logs, 0.0)) + 0.0


def crossing(ks: ArrayLike, first: ArrayLike, second: ArrayLike) -> float:
    """Return the k at which the second curve overtakes the first; their difference is interpolated linearly in log k.

    The first curve must start above the second; points at the start where both are equal are skipped. It is overtaken
    where the second is strictly above it for the first time, not where they only touch or meet at the last point.

    ks: (points,), positive and rising. first, second: (points,).
    Returns a k between ks[0] and ks[-1]; NaN if the first curve is never overtaken, or does not start above: compare
    the first points to tell the two cases apart.
    Raises ValueError for wrong shapes, ks that do not rise, and values that are not finite.

    >>> round(crossing([1, 4, 16], [0.5, 0.6, 0.7], [0.4, 0.5, 0.8]), 3)
    8.0
    """
    x, one, two = array("ks", ks, 1), array("a curve", first, 1), array("a curve", second, 1)
    require(x[0] > 0 and (np.diff(x) > 0).all(), f"ks {x.tolist()} must be positive and rise: sort the points by k")
    same = one.shape == two.shape == x.shape
    require(same, f"curves of {len(one)} and {len(two)} points for {len(x)} ks: pass one point of each curve per k")
    gap, logs = one - two, np.log(x)
    below = np.flatnonzero(gap < 0)
    if not len(below) or not (gap[: below[0]] > 0).any():
        return nan
    at = below[0]
    part = gap[at - 1] / (gap[at - 1] - gap[at])
    return float(np.exp(logs[at - 1] + part * (logs[at] - logs[at - 1])))


def overtaken(base: ArrayLike, runs: ArrayLike, ks: Sequence[int], *, n_resamples: int = 2000) -> Interval:
    """Return the number of samples beyond which a base solves more than the runs trained from it do on average.

    Args:
        base: (problems,), probabilities that one sample is right.
        runs: (runs, problems), the same.
        ks: samples at which the two are compared, rising; the crossing is interpolated between them (`crossing`).
        n_resamples: resamples of runs, and of the problems that base and runs share.

    Returns:
        The crossing, in samples: infinite if the base is not ahead by the last of ks, minus infinite if it is ahead
        from the first on; ends are quantiles without interpolation, NaN for a single run.

    Raises:
        ValueError: wrong shapes, probabilities outside [0, 1], ks below 1.
    """
    own = pass_at(_probabilities(runs, "runs", 2), ks)
    before = pass_at(_probabilities(base, "base", 1), ks)
    n, problems = own.shape[:2]
    require(problems == len(before), f"runs have {problems} problems and the base {len(before)}: pass the same ones.")

    def crossed(mean: NDArray[np.float64], of_base: NDArray[np.float64]) -> float:
        k = crossing(ks, mean, of_base)
        return (-np.inf if mean[0] < of_base[0] else np.inf) if np.isnan(k) else k

    value = crossed(own.mean((0, 1)), before.mean(0))
    if n == 1:
        return Interval(value, np.nan, np.nan, n)
    rng, found = np.random.default_rng(0), []
    for _ in range(whole_number("n_resamples", n_resamples)):
        weights = rng.multinomial(problems, np.full(problems, 1 / problems)) / problems
        drawn = rng.multinomial(n, np.full(n, 1 / n)) / n
        found.append(crossed(weights @ np.tensordot(drawn, own, 1), weights @ before))
    low, high = np.quantile(found, [0.025, 0.975], method="inverted_cdf")
    return Interval(value, float(low), float(high), n)


def cover_at(probabilities: ArrayLike, tau: float | Sequence[float]) -> NDArray[np.float64]:
    """Return cover@tau, the share of problems that one sample solves with a probability of at least tau.

    It determines the mean pass@k, which is the integral over tau of k (1 - tau)^(k - 1) cover@tau.

    probabilities: (..., problems). tau: in [0, 1]; one number, or several.
    Returns (...), for several tau (..., len(tau)). A probability that is below tau only by rounding counts as tau.
    Raises ValueError for no problems, and for probabilities or tau outside [0, 1].
    Source: arXiv 2510.08325.

    >>> cover_at([0.0, 0.1, 0.5, 1.0], [0.1, 0.5, 1.0]).tolist()
    [0.75, 0.5, 0.25]
    """
    p, taus = _probabilities(probabilities, "probabilities"), array("tau", tau, 0, 1, low=0, high=1)
    return np.greater_equal.outer(np.moveaxis(p, -1, 0), taus * (1 - _SLACK)).mean(axis=0)


def own_temperature(solved: Mapping[str, float]) -> str:
    """Return the temperature that solves most, the first if several do. solved: temperature -> share or number."""
    return max(solved, key=lambda temperature: solved[temperature])


def support(before: ArrayLike, after: ArrayLike) -> Support:
    """Count the problems solved before and after training, or compute the expected counts.

    before, after: (problems,), the same problems in the same order: whether each is solved, as booleans; or the
    probability that it is, such as pass@k, the two being independent given the problem.
    Returns sums of products over problems, which are counts if the inputs are booleans.
    Raises ValueError for shapes that differ and values outside [0, 1].

    >>> support([True, True, False, False], [True, False, True, False])
    Support(kept=1.0, won=1.0, lost=1.0, out=1.0)
    """
    b, a = _probabilities(before, "before", 1), _probabilities(after, "after", 1)
    require(b.shape == a.shape, f"before has shape {b.shape}, after {a.shape}: pass the same problems in one order")
    return Support(float(b @ a), float((1 - b) @ a), float(b @ (1 - a)), float((1 - b) @ (1 - a)))


def threshold(samples: int, zeta: float = 0.05) -> float:
    """Return an upper bound, with confidence 1 - zeta, on the probability of an answer that no sample gave.

    It is eps = -ln(zeta) / samples, slightly more than the exact 1 - zeta^(1 / samples).

    Raises ValueError for no samples, or a zeta that is not between 0 and 1. Source: arXiv 2507.14843.

    >>> round(threshold(8192), 6)
    0.000366
    """
    require(0 < zeta < 1, f"zeta={zeta!r} must be between 0 and 1, such as 0.05")
    return -log(zeta) / whole_number("samples", samples)


def null_nscr(probabilities: ArrayLike, k: int, *, n_resamples: int = 10_000) -> Null:
    """Return the change of support that chance alone causes between two independent sets of k samples of one model.

    With q the pass@k of a problem, the expected counts are P = sum q^2 and E = S = sum q (1 - q). The spread is that of
    counts from single sets of samples; an NSCR of expected counts, as in `support_change`, has no such spread.

    probabilities: (problems,), that one sample is right; or of being solved, with k = 1. Shares of few samples contain
    zeros and ones, which never flip, so they make the spread too small.
    Returns the null. If no problem can be solved, its NSCR, spread and range are NaN.
    Raises ValueError for another shape, probabilities outside [0, 1], or a k below 1.

    >>> null_nscr([1.0, 0.5, 0.5, 0.0], 1).support
    Support(kept=1.5, won=0.5, lost=0.5, out=1.5)
    """
    q = pass_at(_probabilities(probabilities, "probabilities", 1), whole_number("k", k))
    uncertain, always = q[(q > 0) & (q < 1)], np.count_nonzero(q == 1)

    def pair(rng: np.random.Generator, n: int) -> Iterable[NDArray[np.bool_]]:
        return (rng.random((n, len(uncertain))) < uncertain for _ in range(2))

    return _null(support(q, q), pair, n_resamples, always)


def null_of_halves(right: ArrayLike, samples: int, *, n_resamples: int = 10_000) -> Null:
    """Return the change of support between two halves of one model's samples, from counts alone.

    The samples are split into random halves many times. A half solves a problem if it contains a right sample. Shares
    of right samples are never used as probabilities, so the expected counts are unbiased; those that `null_nscr`
    computes from shares are not, since a problem without a right sample never flips there.

    right: (problems,), number of right samples of each problem. samples: number of samples of each problem, at least 2;
    if it is odd, every split leaves one out.
    Returns the null for sets of samples // 2. If no problem is solved, its NSCR, spread and range are NaN.
    Raises ValueError for another shape, fewer samples, or counts that do not fit.

    >>> null_of_halves([4, 1, 0], 4).support
    Support(kept=1.0, won=0.5, lost=0.5, out=1.0)
    """
    half = whole_number("samples", samples, least=2, why="halves are compared") // 2
    c, n, _ = _counted(right, samples, 2 * half)
    require(c.ndim == 1, f"right has shape {c.shape}: pass the counts of one model, (problems,)")
    one, any_of_both = estimate_pass_at(c, n, half), estimate_pass_at(c, n, 2 * half)
    won = float((any_of_both - one).sum())
    expected = Support(float((2 * one - any_of_both).sum()), won, won, float((1 - any_of_both).sum()))

    def pair(rng: np.random.Generator, size: int) -> Iterable[NDArray[np.bool_]]:
        first = rng.hypergeometric(c, n - c, half, size=(size, len(c)))
        return first > 0, rng.hypergeometric(c - first, n - c - (half - first), half) > 0

    return _null(expected, pair, n_resamples)


def support_change(
    base: ArrayLike, runs: ArrayLike, k: int, baseline: ArrayLike | None = None, *, n_resamples: int = 10_000
) -> Interval:
    """Return the mean NSCR of runs against their base, or its difference from other runs, with an interval.

    A run's NSCR is that of its expected counts at k samples. Runs and problems are resampled independently of one
    another, as in `stats.crossed_bootstrap`, whose remarks on coverage apply; both groups and the base share each
    resample of the problems.

    Args:
        base: (problems,), probabilities that one sample is right.
        runs: (runs, problems), the same.
        k: samples of each. If you have counts, pass `estimate_pass_at(right, samples, k)` of base and runs, with k = 1
            here: the expected counts are then unbiased.
        baseline: (other runs, problems), from the same base, or None.
        n_resamples: resamples of the bootstrap.

    Returns:
        The interval; n is the number of runs, of the smaller group if there are two. Ends are NaN if the NSCR of any
        resample is undefined.

    Raises:
        ValueError: wrong shapes, probabilities outside [0, 1], or a k below 1.

    Source:
        arXiv 2507.14843 (NSCR); Owen, Annals of Applied Statistics 2007 (bootstrap).

    >>> support_change([0.5, 0.5], [[1.0, 0.5], [1.0, 0.5]], 1).value
    0.2857142857142857
    """
    named = {"runs": runs} if baseline is None else {"runs": runs, "baseline": baseline}
    groups = [_net_and_reached(base, name, each, k) for name, each in named.items()]
    means = _means(groups, n_resamples)
    changes = means[:, 0] if baseline is None else means[:, 0] - means[:, 1]
    return interval_of(changes[0], changes[1:], min(len(net) for net, _ in groups))


class Effects(NamedTuple):
    """The effects of two factors with two levels each on a quantity, with intervals."""

    rows: Interval
    """Second row minus first, averaged over columns."""
    columns: Interval
    """Second column minus first, averaged over rows."""
    interaction: Interval
    """Second column minus first in the second row, minus the same in the first row."""
    larger: Interval
    """Absolute effect of rows minus absolute effect of columns."""


def effects(
    cells: Sequence[Sequence[ArrayLike]], base: ArrayLike | None = None, k: int = 1, *, n_resamples: int = 10_000
) -> Effects:
    """Return the effects of two factors on the net support change rate within k samples, or on pass@k.

    Args:
        cells: two rows of two cells, each (runs, problems): probabilities that one sample is right, or 0 and 1. Cells
            may have different numbers of runs, but need the same problems.
        base: (problems,), for the NSCR against it; None: the quantity is pass@k.
        k: samples of the runs and of the base.
        n_resamples: resamples; each cell's runs are resampled separately, the problems jointly for all cells and base.

    Returns:
        The effects; n is the number of runs in the smallest cell. Ends are NaN where an NSCR is undefined.

    Raises:
        ValueError: cells that are not two rows of two, other shapes, probabilities outside [0, 1], a k below 1.

    >>> effects([[[[0.0, 0.0]], [[0.0, 0.5]]], [[[0.5, 0.5]], [[0.5, 1.0]]]]).rows.value
    0.5
    """
    groups = []
    for name, runs in _four(cells).items():
        if base is None:
            solved = pass_at(_probabilities(runs, name, 2), k)
            groups.append((solved, np.ones_like(solved)))
        else:
            groups.append(_net_and_reached(base, name, runs, k))
    problems = {net.shape[1] for net, _ in groups}
    require(len(problems) == 1, f"cells have {sorted(problems)} problems: pass the same problems in all cells.")
    return _effects(_means(groups, n_resamples), min(len(net) for net, _ in groups))


def effects_of_runs(cells: Sequence[Sequence[ArrayLike]], *, n_resamples: int = 10_000) -> Effects:
    """Return the effects of two factors on one number per run, with intervals over the runs of each cell.

    cells: two rows of two cells, each (runs,), finite, at least two runs. Raises ValueError for anything else.

    >>> effects_of_runs([[[0.0, 0.0], [1.0, 1.0]], [[0.0, 0.0], [3.0, 3.0]]]).columns.value
    2.0
    """
    runs = [array(name, cell, 1, least=2) for name, cell in _four(cells).items()]
    rng, n = np.random.default_rng(0), whole_number("n_resamples", n_resamples)
    means = [np.append(cell.mean(), cell[rng.integers(len(cell), size=(n, len(cell)))].mean(1)) for cell in runs]
    return _effects(np.stack(means, axis=1), min(map(len, runs)))


def _four(cells: Sequence[Sequence[ArrayLike]]) -> dict[str, ArrayLike]:
    """Return name -> cell of two rows and two columns, row by row."""
    sizes = [len(row) for row in cells]
    require(sizes == [2, 2], f"cells have rows of {sizes} cells: pass two rows of two.")
    return {f"runs of row {i}, column {j}": cell for i, row in enumerate(cells) for j, cell in enumerate(row)}


def _effects(means: NDArray[np.float64], n: int) -> Effects:
    """Return effects from the means of four cells, (1 + resamples, 4), the measured means first."""
    a, b, c, d = means.T
    rows, columns = (c + d - a - b) / 2, (b + d - a - c) / 2
    contrasts = rows, columns, d - c - b + a, np.abs(rows) - np.abs(columns)
    return Effects(*(interval_of(contrast[0], contrast[1:], n) for contrast in contrasts))


def answer_entropy(counts: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the Shannon entropy of the distinct final answers to each problem, nats, uncorrected and corrected.

    counts: (..., answers), how many samples gave each answer; pad shorter rows with 0. The caller decides whether
    samples without an answer are left out or counted as one answer.
    Returns two arrays (...), NaN for a problem without samples: the entropy of the answers' shares, which is too low
    for few samples; and the same plus (distinct answers - 1) / (2 samples), after Miller and Madow, which is closer but
    still too low if most answers were never seen.
    Raises ValueError for no answers, and for counts that are negative or not whole numbers.
    Source: Miller, Note on the bias of information estimates, 1955.

    >>> [round(float(value), 4) for value in answer_entropy([2, 2, 0])]
    [0.6931, 0.8181]
    """
    found = np.atleast_1d(array("counts", counts, low=0, whole=True))
    total = found.sum(axis=-1)
    share = ratio(found, total[..., None])
    plug_in = -(share * np.log(np.where(share > 0, share, 1.0))).sum(axis=-1) + 0.0
    return plug_in, plug_in + ratio((found > 0).sum(axis=-1) - 1, 2 * total)


def vote(answers: Iterable[Hashable | None]) -> Hashable | None:
    """Return the most frequent answer (self-consistency); if several are, the one seen first.

    answers: final answers of samples in order, None for a sample without one. None wins only if no sample has an
    answer.
    Raises ValueError for no samples. Source: Wang et al. 2022 (arXiv 2203.11171).

    >>> vote([None, None, None, "7", "5", "5", "7"])
    '7'
    """
    given = list(answers)
    require(given, "no answers: pass those of at least one sample")
    ballots = Counter(answer for answer in given if answer is not None)
    return ballots.most_common(1)[0][0] if ballots else None


def effective_samples(weights: ArrayLike) -> NDArray[np.float64]:
    """Return the effective sample size of importance weights, (sum w)^2 / sum w^2: from 1 to the number of samples.

    weights: (..., samples), not negative, on any scale.
    Returns (...); NaN where all weights are 0.
    Raises ValueError for no samples, and for weights that are negative or not finite.
    Source: Kish, Survey Sampling, 1965.

    >>> float(effective_samples([1.0, 1.0, 0.0]))
    2.0
    """
    # a common factor cancels: dividing by the largest weight keeps the squares of tiny or huge weights finite
    w = array("weights", weights, low=0, why="if these are logarithms, pass their exponentials")
    w = np.nan_to_num(ratio(w, w.max(axis=-1, keepdims=True)))
    return ratio(w.sum(axis=-1) ** 2, (w**2).sum(axis=-1))


def _null(expected: Support, pair: Callable[..., Any], n_resamples: int, always: int = 0) -> Null:
    """Return a null from pairs of sets of solved problems, (n, problems) each; `always` more are solved in all."""
    rng, drawn = np.random.default_rng(0), []
    for start in range(0, whole_number("n_resamples", n_resamples), _CHUNK):
        one, two = pair(rng, min(_CHUNK, n_resamples - start))
        drawn.append(ratio(two.sum(1) - one.sum(1), (one | two).sum(1) + always))
    found = np.concatenate(drawn)
    found = found[~np.isnan(found)]  # drop pairs of sets in which nothing is solved
    interval = interval_of(0.0, found, len(found))
    return Null(expected, float(found.std()) if len(found) else nan, interval.low, interval.high)


def _means(groups: Sequence[_Group], n_resamples: int) -> NDArray[np.float64]:
    """Return the mean over runs of net / reached, (1 + n_resamples, groups): as measured, then crossed resamples.

    groups: net and reached of each, (runs, problems). Runs are resampled within each group, problems jointly for all.
    """
    means = [[ratio(net.sum(1), reached.sum(1)).mean() for net, reached in groups]]
    runs, problems = tuple(len(net) for net, _ in groups), groups[0][0].shape[1]
    whole_number("n_resamples", n_resamples)
    for counts, chosen in stats.crossed_draws(n_resamples, problems, runs, 0, multinomial=True):
        counts = counts.astype(np.float64)
        shares = (ratio(counts @ net.T, counts @ reached.T) for net, reached in groups)
        drawn = [np.take_along_axis(own, which, axis=1).mean(axis=1) for own, which in zip(shares, chosen, strict=True)]
        means.append(np.stack(drawn, axis=1))
    return np.vstack(means)


def _net_and_reached(base: ArrayLike, name: str, runs: ArrayLike, k: int) -> _Group:
    """Return the expected E - S and P + E + S for each run and problem, both (runs, problems)."""
    before = pass_at(_probabilities(base, "base", 1), whole_number("k", k))
    after = pass_at(_probabilities(runs, name, 2), k)
    wanted = f"pass (runs, {len(before)}), the same problems in the same order"
    require(after.shape[1] == len(before), f"{name} have shape {after.shape} and the base {before.shape}: {wanted}")
    return after - before, after + before - after * before


def _log_all_wrong(right: NDArray[np.int64], samples: NDArray[np.int64], ks: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return (..., *ks.shape), the log of the chance that k of n samples, drawn without replacement, are all wrong.

    -inf where fewer than k are wrong; NaN for k > n.
    """
    found = np.full((*right.shape, *ks.shape), nan)
    for n in np.unique(samples):
        # C(n - c, k) / C(n, k) is the product of 1 - k / i over i = n - c + 1 .. n: one table serves every c
        i = np.arange(n, 0, -1)
        with np.errstate(divide="ignore"):  # log 0
            steps = np.log(np.maximum(i - ks[..., None], 0) / i)
        table = np.concatenate([np.zeros((*ks.shape, 1)), np.cumsum(steps, axis=-1)], axis=-1)
        table[ks > n] = nan
        here = samples == n
        found[here] = table[..., right[here]].T
    return found


def _counted(
    right: ArrayLike, samples: ArrayLike, k: int | Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the counts of right answers and of samples, broadcast to one shape, and the ks."""
    c = array("right", right, low=0, whole=True).astype(np.int64)
    n = array("samples", samples, low=1, whole=True).astype(np.int64)
    c, n = np.broadcast_arrays(c, n)  # its error names two shapes that do not fit
    ks = _ks(k)
    require((c <= n).all(), "more answers are right than there are samples: pass right <= samples")
    most = ks.max()
    require(most <= n.min(), f"k={most} is more than the {n.min()} samples of a problem: draw more, or lower k")
    return c, n, ks


def _ks(k: int | Sequence[int]) -> NDArray[np.int64]:
    """Return k as an array: one whole number of at least 1, or several."""
    require(np.ndim(k) < 2 and np.size(k), f"k={k!r} must be a whole number, or a sequence of whole numbers")
    return np.array([whole_number("k", value) for value in np.ravel(k).tolist()]).reshape(np.shape(k))


def _probabilities(values: ArrayLike, name: str, *ndim: int) -> NDArray[np.float64]:
    """Return values in [0, 1], at least one."""
    given = array(name, values, *ndim, low=0, high=1 + _ROUNDING, why="shares, not counts")
    return np.minimum(given, 1.0)
