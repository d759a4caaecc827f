"""Two planted regimes are found; exchangeable runs are not called two, however stable their clusters are."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import pdist, squareform

from evoalign_lib.analysis import connectivity, regimes

LABELS = st.lists(st.integers(0, 3), min_size=1, max_size=9)


def _planted(rng: np.random.Generator, sizes: tuple[int, int] = (4, 5), far: float = 0.2) -> np.ndarray:
    """Return barriers of runs: 0 within a regime, `far` between, and noise."""
    labels = np.repeat([0, 1], sizes)
    matrix = far * (labels[:, None] != labels) + rng.normal(0, 0.02, (len(labels),) * 2)
    return np.triu(matrix, 1) + np.triu(matrix, 1).T


def _exchangeable(rng: np.random.Generator, runs: int, dimensions: int) -> np.ndarray:
    return squareform(pdist(rng.standard_normal((runs, dimensions))))


def _rand_by_pairs(first: list[int], second: list[int]) -> float:
    """Return the adjusted Rand index from its definition, pair by pair."""
    pairs = list(combinations(range(len(first)), 2))
    same = [[labels[i] == labels[j] for i, j in pairs] for labels in (first, second)]
    both, a, b = (sum(x) for x in ([p and q for p, q in zip(*same, strict=True)], *same))
    expected = a * b / len(pairs) if pairs else 0
    most = (a + b) / 2
    return 1.0 if most == expected else (both - expected) / (most - expected)


@given(st.data(), LABELS)
def test_the_adjusted_rand_index_is_that_of_its_definition(data, first) -> None:
    second = data.draw(st.lists(st.integers(0, 3), min_size=len(first), max_size=len(first)))
    found = regimes.adjusted_rand(first, second)
    assert found == pytest.approx(_rand_by_pairs(first, second))
    assert found == pytest.approx(regimes.adjusted_rand([f"run {x}" for x in second], [-x for x in first]))
    assert regimes.adjusted_rand(first, first) == 1


def test_two_clusters_are_those_of_scipy_and_follow_the_runs() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        matrix = _exchangeable(rng, 7, 3)
        labels = regimes.two_clusters(matrix)
        cut = fcluster(linkage(squareform(matrix), "average"), 2, "maxclust")
        assert labels[0] == 0 and regimes.adjusted_rand(labels, cut) == 1
        order = rng.permutation(7)
        again = regimes.two_clusters(matrix[np.ix_(order, order)])
        assert regimes.adjusted_rand(again, labels[order]) == 1
    # ties: two clusters even where all runs are equally far
    assert set(regimes.two_clusters(np.ones((5, 5)))) == {0, 1}
    # the upper triangle alone counts, and no negative barrier
    upper = np.triu(_planted(rng), 1) + np.tril(np.full((9, 9), np.nan))
    assert regimes.two_clusters(upper).tolist() == [0] * 4 + [1] * 5


@pytest.mark.parametrize("sizes", [(4, 4), (3, 6), (2, 8)])
def test_planted_regimes_are_found(sizes: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    for _ in range(3):
        matrix = _planted(rng, sizes)
        found = regimes.regimes(matrix, n_resamples=60)
        assert found.labels.tolist() == [0] * sizes[0] + [1] * sizes[1]
        assert found.silhouette == pytest.approx(regimes.silhouette(matrix, found.labels)) and found.silhouette > 0.7
        assert found.p_one < 0.05


ONE_CLUSTER = {  # matrices of 9 exchangeable runs
    "uniform on a line": lambda rng: squareform(pdist(rng.random((9, 1)))),
    "normal in 20 dimensions": lambda rng: squareform(pdist(rng.standard_normal((9, 20)))),
    "noise": lambda rng: rng.normal(0, 0.02, (9, 9)),  # corrected barriers where there is none
}


@pytest.mark.parametrize("kind", ONE_CLUSTER)
def test_exchangeable_runs_are_not_called_two_regimes(kind: str) -> None:
    rng = np.random.default_rng(1)
    found = [regimes.regimes(ONE_CLUSTER[kind](rng), n_resamples=30) for _ in range(10)]
    # 3 of 10 would exceed the level of the test in 1 of 90 cases
    assert sum(r.p_one <= 0.05 for r in found) <= 2
    assert all([len(null) for null in r.nulls.values()] == [30] * 3 for r in found)


def test_regimes_of_measured_barriers() -> None:
    """From outcomes of pairs, through corrected barriers and their draws, to clusters."""
    rng = np.random.default_rng(0)
    hacked = np.array([0, 0, 0, 1, 1, 1])
    bump = 4 * np.linspace(0, 1, 7) * np.linspace(1, 0, 7)
    heights = 0.3 * (hacked[:, None] != hacked)
    outcomes = (rng.random((6, 6, 80, 7)) < 0.3 + heights[..., None, None] * bump).astype(float)
    estimate = connectivity.estimate_barrier(outcomes, within=True, n_resamples=60)
    found = regimes.regimes(estimate.pairs, n_resamples=100)
    assert (found.labels == hacked).all()
    tested = regimes.within_between(estimate.pairs, hacked)
    assert tested.p == pytest.approx(0.1)  # 6 over 3 in 20 ways, each with its mirror: the least there is
    assert tested.within == pytest.approx(0, abs=0.06) and tested.between == pytest.approx(0.3, abs=0.06)
    beyond = max(np.quantile(null, 0.95) for null in found.nulls.values())
    separation = regimes.separation(estimate.pairs, estimate.pair_draws, found)
    assert separation.value == pytest.approx(found.silhouette - beyond)
    agreed = regimes.agreement(estimate.pairs, estimate.pair_draws, ["clean"] * 3 + ["hacked"] * 3)
    assert (agreed.value, agreed.n) == (1, 6) and agreed.low > 0.3
    nearer = regimes.basin(estimate.pairs, estimate.pair_draws, hacked == 1)
    assert 0.15 < nearer.low < nearer.value < nearer.high < 0.45 and nearer.n == 3


def test_within_between_is_the_permutation_test_of_all_deals() -> None:
    rng = np.random.default_rng(0)
    matrix = _exchangeable(rng, 7, 2)
    labels = np.array(["clean"] * 3 + ["hacked"] * 4)

    def statistic(first: tuple[int, ...]) -> float:
        one = np.isin(np.arange(7), first)
        same = one[:, None] == one
        upper = np.triu(np.ones((7, 7), bool), 1)
        return matrix[~same & upper].mean() - matrix[same & upper].mean()

    every = [statistic(first) for first in combinations(range(7), 3)]
    found = regimes.within_between(matrix, labels)
    assert found.between - found.within == pytest.approx(statistic((0, 1, 2)))
    assert found.p == pytest.approx(np.mean(np.array(every) >= statistic((0, 1, 2)) - 1e-9))
    drawn = regimes.within_between(matrix, labels, n_resamples=30)
    assert drawn.p == pytest.approx(found.p, abs=0.25) and drawn.p >= 1 / 31
    # three labels are drawn
    planted = _planted(rng, (4, 5))
    assert regimes.within_between(planted, [0, 0, 0, 0, 1, 1, 1, 1, 1]).p == pytest.approx(1 / 126)
    assert regimes.within_between(planted, [0, 0, 1, 1, 2, 2, 2, 2, 2], n_resamples=300).p < 0.05
    # hacked runs share a basin, clean ones are scattered: asked of the hacked ones alone
    scattered = np.full((9, 9), 0.2)
    scattered[4:, 4:] = 0.0
    alone = regimes.within_between(scattered, [0] * 4 + [1] * 5, only=1)
    assert (alone.within, alone.between) == pytest.approx((0, 0.2)) and alone.p == pytest.approx(1 / 126)
    assert regimes.within_between(scattered, [0] * 4 + [1] * 5, only=0).p > 0.3
