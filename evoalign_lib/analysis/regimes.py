"""Whether runs fall into two regimes: clusters of a matrix of barriers or other dissimilarities, and tests of them.

Clustering finds two clusters in anything, and may find the same two every time: a cloud that is longer than wide is
always cut across its length. So there are two questions. Are the clusters better separated than in matrices for which
one cluster is as good (`Regimes.p_one`)? And do they agree with a label known beforehand (`adjusted_rand`,
`within_between`)? A claim of two regimes needs the first.
"""

from collections.abc import Callable, Sequence
from itertools import combinations
from math import comb, nan
from typing import Any, NamedTuple

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

from evoalign_lib.analysis.stats import Interval, interval_of, ratio
from evoalign_lib.checks import require, whole_number

_PERMUTATIONS = 20_000  # up to this many permutations, the test is exact


class Regimes(NamedTuple):
    """Two clusters of runs, and the evidence for them."""

    labels: NDArray[np.int64]
    """(runs,), 0 or 1; the first run has 0."""
    silhouette: float
    """Mean silhouette width of the runs, -1 to 1."""
    p_one: float
    """One-sided p-value of one cluster: the largest share, over `nulls`, of draws that are as well separated."""
    nulls: dict[str, NDArray[np.float64]]
    """"cloud", "pairs" and "runs" -> (n_resamples,), silhouettes of two clusters cut from one; see `regimes`."""


def two_clusters(dissimilarity: ArrayLike) -> NDArray[np.int64]:
    """Split runs into two clusters by agglomerative clustering with average linkage.

    dissimilarity: (runs, runs), at least 3 runs. Only the upper triangle counts; negative entries, which corrected
    barriers may have, count as 0.
    Returns (runs,) labels, 0 for the cluster of the first run, 1 for the other.
    Raises ValueError for another shape, fewer runs, or an entry above the diagonal that is not finite.
    """
    matrix = _square(dissimilarity)
    pairs = scipy.spatial.distance.squareform(matrix, checks=False)
    merges = scipy.cluster.hierarchy.linkage(pairs, "average")[:, :2].astype(int).tolist()
    members = list(np.eye(len(matrix), dtype=np.int64))  # of each run, then of each merge: 1 for the runs that it has
    for one, other in merges:
        members.append(members[one] + members[other])
    # the last merge joins the two clusters. fcluster cuts at a height, where ties hide; to_tree takes ten times as long
    labels = members[merges[-1][1]]
    return labels if labels[0] == 0 else 1 - labels


def silhouette(dissimilarity: ArrayLike, labels: ArrayLike) -> float:
    """Return the mean silhouette width of runs, (b - a) / max(a, b).

    For each run, a is its mean dissimilarity to the other runs of its cluster, b that to the nearest other cluster.

    dissimilarity: as in `two_clusters`. labels: (runs,), at least two different ones. The width is 0 for a run alone in
    its cluster, and for one whose a and b are both 0.
    Raises ValueError as `two_clusters` does, and for labels that do not fit.
    Source: Rousseeuw, J. Computational and Applied Mathematics 1987.
    """
    matrix = _square(dissimilarity)
    codes = _labels(labels, len(matrix))
    members = codes[:, None] == np.arange(codes.max() + 1)  # (runs, clusters)
    sizes, totals = members.sum(0), matrix @ members
    own = sizes[codes]
    with np.errstate(invalid="ignore", divide="ignore"):
        a = totals[np.arange(len(codes)), codes] / (own - 1)
        b = np.where(members, np.inf, totals / sizes).min(1)
        widths = (b - a) / np.maximum(a, b)
    return float(np.where((own > 1) & (np.maximum(a, b) > 0), widths, 0.0).mean())


def adjusted_rand(first: ArrayLike, second: ArrayLike) -> float:
    """Return the adjusted Rand index of two clusterings of the same runs: 1 if equal up to names, 0 expected by chance.

    first, second: (runs,) labels of any kind. Two clusterings that both have a single cluster, or both have one cluster
    per run, are equal.
    Raises ValueError for lengths that differ, or no runs.
    Source: Hubert and Arabie, J. Classification 1985.

    >>> adjusted_rand([0, 0, 1, 1], ["b", "b", "a", "a"]), round(adjusted_rand([0, 0, 1, 1], [0, 1, 0, 1]), 2)
    (1.0, -0.5)
    """
    a, b = np.ravel(first), np.ravel(second)
    require(len(a) == len(b) > 0, f"{len(a)} labels against {len(b)}: pass one label per run, for the same runs")
    table = scipy.stats.contingency.crosstab(a, b).count

    def pairs(counts: NDArray[np.float64]) -> float:
        return float((counts * (counts - 1) / 2).sum())

    both, of_a, of_b, total = pairs(table), pairs(table.sum(1)), pairs(table.sum(0)), comb(len(a), 2)
    expected = of_a * of_b / total if total else 0.0
    most = (of_a + of_b) / 2
    return (both - expected) / (most - expected) if most != expected else 1.0


def regimes(dissimilarity: ArrayLike, *, n_resamples: int = 500) -> Regimes:
    """Split runs into two clusters, and test whether one cluster would be as good.

    Matrices of three kinds in which the runs form one cluster are split in the same way; p_one is the largest of three
    p-values of the silhouette, one for each kind:

    - "cloud": distances between points uniform in a box with the side lengths of the measured runs, which classical
      scaling places. It covers clouds that are longer than wide.
    - "pairs": the measured entries, shuffled over the pairs. It covers noise, in which runs have no positions.
    - "runs": a level for each run, fitted to the measured entries, with the residuals shuffled over the pairs. It
      covers runs that lie far from all others, each in a different direction.

    All three are needed: each one alone found two regimes in another kind's matrices in over half of 300 simulated sets
    of 10 exchangeable runs. Together, at 5 %, they did so in 0 to 1 % of sets from normal distributions in 1, 2 and 20
    dimensions, 0 % of uniform sets on a line, 4 % of noise around 0, and 1 % of matrices whose entries are the larger
    of two runs' exponential levels. In the last, clusters of resampled runs agreed with an adjusted Rand index of 0.34
    to 0.77: stability is no evidence. One tight cluster among scattered runs does not count as two regimes here; use
    `within_between` with `only` for that.

    dissimilarity: as in `two_clusters`, such as `BarrierEstimate.pairs` of all runs with within=True.
    Raises ValueError as `two_clusters` does, and for fewer than 4 runs.
    Source: Tibshirani, Walther and Hastie, JRSS B 2001 (the box).
    """
    matrix, rng = _square(dissimilarity), np.random.default_rng(0)
    n, labels = len(matrix), two_clusters(matrix)
    require(n > 3, f"{n} runs are too few for two regimes: pass at least 4")
    whole_number("n_resamples", n_resamples)
    width = silhouette(matrix, labels)

    rng.integers(n, size=(n_resamples, n))  # advances the generator, so that nulls match those of published records
    nulls = {
        name: np.array([silhouette(drawn, two_clusters(drawn)) for drawn in (draw() for _ in range(n_resamples))])
        for name, draw in _one_cluster(matrix, rng).items()
    }
    as_separate = max(int(np.count_nonzero(null >= width - 1e-12)) for null in nulls.values())
    return Regimes(labels, width, (1 + as_separate) / (n_resamples + 1), nulls)


class WithinBetween(NamedTuple):
    """Whether runs with the same label are closer to each other than to runs with other labels."""

    within: float
    """Mean dissimilarity of pairs with the same label."""
    between: float
    """Mean dissimilarity of pairs with different labels."""
    p: float
    """One-sided p-value of the null that labels are arbitrary, against within < between."""


def within_between(
    dissimilarity: ArrayLike, labels: Sequence[Any], *, only: Any = None, n_resamples: int = _PERMUTATIONS
) -> WithinBetween:
    """Test whether dissimilarities within labels are lower than between labels, by permuting labels over the runs.

    The p-value is that of between - within over all assignments of the labels to runs, or over n_resamples random ones
    if there are more assignments or more than two labels. Permuting runs rather than pairs respects that pairs share
    runs. With 4 + 4 runs the smallest possible p-value is 1/35.

    dissimilarity: as in `two_clusters`. labels: (runs,), such as clean and hacked. only: count only pairs of this label
    as within, to test whether, say, the hacked runs share a basin; between are then its pairs with the other runs.
    Returns means in the unit of the matrix; all NaN but between if no two runs share a label.
    Raises ValueError as `two_clusters` does, and for a single label or labels that do not fit.
    """
    matrix = _square(dissimilarity, least=2)
    codes = _labels(labels, len(matrix))
    if only is not None:
        codes = np.array([int(label == only) for label in labels])
        named = "all" if codes.all() else "none"
        require(codes.any() and not codes.all(), f"only={only!r} names {named} of the runs: pass the label of some")
    rows, columns = np.triu_indices(len(matrix), 1)

    def means(dealt: NDArray[np.int64]) -> NDArray[np.float64]:  # (deals, runs) -> (2, deals)
        same = dealt[:, rows] == dealt[:, columns]
        inside = same if only is None else same & (dealt[:, rows] == 1)
        return np.array([ratio(pairs @ matrix[rows, columns], pairs.sum(1)) for pairs in (inside, ~same)])

    within, between = means(codes[None])[:, 0]
    if np.isnan(within):
        return WithinBetween(nan, float(between), nan)
    n, counts, rng = len(codes), np.bincount(codes), np.random.default_rng(0)
    exact = len(counts) == 2 and comb(n, int(counts[1])) <= n_resamples
    if exact:
        deals = [np.isin(np.arange(n), ones) for ones in combinations(range(n), int(counts[1]))]
    else:
        deals = [rng.permutation(codes) for _ in range(n_resamples)]
    inner, outer = means(np.array(deals))
    as_far = outer - inner >= between - within - 1e-12  # values that differ by rounding count as equal
    # random assignments need the observed one added; the set of all assignments contains it
    p = (int(as_far.sum()) + (not exact)) / (len(as_far) + (not exact))
    return WithinBetween(float(within), float(between), p)


def separation(dissimilarity: ArrayLike, draws: ArrayLike, found: Regimes) -> Interval:
    """Return how much better two clusters are separated than one cluster's halves would be, with an interval.

    It is the silhouette minus the largest 95 % quantile of the nulls of `regimes`: positive if p_one is below 5 %. The
    interval is that of the same clusters' silhouette over draws, in which problems are resampled.

    dissimilarity, found: argument and result of `regimes`. draws: (resamples, runs, runs), with problems resampled.
    """
    beyond = max(float(np.quantile(null, 0.95)) for null in found.nulls.values())
    drawn = [silhouette(matrix, found.labels) for matrix in np.asarray(draws, np.float64)]
    return interval_of(found.silhouette - beyond, np.array(drawn) - beyond, len(found.labels))


def agreement(dissimilarity: ArrayLike, draws: ArrayLike, labels: Sequence[Any]) -> Interval:
    """Return the adjusted Rand index between two clusters and labels known beforehand, with an interval.

    The interval resamples problems and runs together: each draw is clustered on the distinct runs of a bootstrap
    sample.

    dissimilarity: as in `two_clusters`. draws: (resamples, runs, runs), the same with problems resampled. labels:
    (runs,), at least two different ones.
    Returns the index, 1 if clusters and labels are the same; n is the number of runs.
    Raises ValueError as `two_clusters` does, and for labels that do not fit.
    """
    matrix, rng = np.asarray(dissimilarity, np.float64), np.random.default_rng(0)
    codes = _labels(labels, len(matrix))
    found = []
    for drawn in np.asarray(draws, np.float64):
        runs = np.unique(rng.integers(len(codes), size=len(codes)))
        if len(runs) >= 3 and len(set(codes[runs])) > 1:
            found.append(adjusted_rand(codes[runs], two_clusters(drawn[np.ix_(runs, runs)])))
    return interval_of(adjusted_rand(codes, two_clusters(matrix)), found, len(codes))


def basin(dissimilarity: ArrayLike, draws: ArrayLike, inside: ArrayLike) -> Interval:
    """Return how much closer some runs are to each other than to all others: between - within, with an interval.

    The interval resamples problems, through the draws, and the runs inside and outside; pairs with a common run move
    together.

    dissimilarity: (runs, runs); only the upper triangle counts. draws: (resamples, runs, runs), the same with problems
    resampled. inside: (runs,), whether a run belongs to them: at least two do, and at least one does not.
    Returns a difference of means, in the unit of the matrix; n is the smaller of the two numbers of runs.
    Raises ValueError as `two_clusters` does, and for too few runs inside or outside.
    """
    measured, chosen, rng = _square(dissimilarity), np.asarray(inside, bool), np.random.default_rng(0)
    n = len(measured)
    fit = chosen.shape == (n,) and chosen.sum() > 1 and not chosen.all()
    require(fit, f"{int(chosen.sum())} of {n} runs inside: pass at least two inside and one outside")
    upper = np.triu(np.ones((n, n), bool), 1)
    within, between = upper & chosen & chosen[:, None], upper & (chosen != chosen[:, None])

    def difference(matrix: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
        means = [np.average(matrix[pairs], weights=weights[pairs]) for pairs in (between, within)]
        return float(means[0] - means[1])

    found = []
    kinds = np.flatnonzero(chosen), np.flatnonzero(~chosen)
    for drawn in np.asarray(draws, np.float64):
        counts = np.bincount(np.concatenate([rng.choice(kind, len(kind)) for kind in kinds]), minlength=n)
        weights = np.outer(counts, counts)
        if weights[within].any():  # a resample of a single run has no pair
            found.append(difference(np.maximum(drawn, 0), weights))
    return interval_of(difference(measured, np.ones((n, n))), found, min(map(len, kinds)))


def _one_cluster(matrix: NDArray[np.float64], rng: np.random.Generator) -> dict[str, Callable[[], NDArray[np.float64]]]:
    """Return kind -> function that draws a matrix in which the runs form one cluster; see `regimes`."""
    n, pairs, square = len(matrix), np.triu_indices(len(matrix), 1), scipy.spatial.distance.squareform
    condensed, sides = matrix[pairs], np.ptp(_scaling(matrix), axis=0)
    # least-squares fit of each entry by the sum of its two runs' levels
    levels = matrix.sum(0) / (n - 2)
    fitted = levels[pairs[0]] + levels[pairs[1]] - condensed.mean() * n / (n - 2)
    left = condensed - fitted

    def cloud() -> NDArray[np.float64]:
        places = sides * rng.random((n, len(sides)))
        return np.sqrt(np.square(places[:, None] - places).sum(-1))

    return {
        "cloud": cloud,
        "pairs": lambda: square(rng.permutation(condensed)),
        "runs": lambda: square(np.maximum(fitted + rng.permutation(left), 0)),
    }


def _scaling(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return points (runs, dimensions) whose distances approximate the matrix: classical scaling (Torgerson 1952)."""
    n = len(matrix)
    centre = np.eye(n) - 1 / n
    values, vectors = np.linalg.eigh(-centre @ matrix**2 @ centre / 2)
    kept = values > 1e-12 * max(values.max(), 0)
    return vectors[:, kept] * np.sqrt(values[kept])


def _square(dissimilarity: ArrayLike, least: int = 3) -> NDArray[np.float64]:
    """Return the full symmetric matrix of an upper triangle, with negative entries set to 0."""
    matrix = np.asarray(dissimilarity, np.float64)
    square = matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1] >= least
    require(square, f"dissimilarity has the shape {matrix.shape}: pass (runs, runs), at least {least} runs")
    condensed = matrix[np.triu_indices(len(matrix), 1)]
    finite = np.isfinite(condensed).all()
    require(finite, "a dissimilarity above the diagonal is not finite: measure every pair, or leave out its runs")
    return scipy.spatial.distance.squareform(np.maximum(condensed, 0))


def _labels(labels: ArrayLike | Sequence[Any], n: int) -> NDArray[np.int64]:
    """Return labels as 0, 1, ...; raise ValueError unless there is one per run, and at least two differ."""
    names, codes = np.unique(np.asarray(labels), return_inverse=True)
    fit = len(codes) == n and len(names) > 1
    require(fit, f"{len(codes)} labels, {len(names)} of them different, for {n} runs: pass one each, of two kinds")
    return codes
