"""Budgets to a target, spread at a matched mean, drawdown and expected maxima against hand-computed cases."""

from itertools import combinations
from math import inf, isnan, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from evoalign_lib.analysis import curves
from evoalign_lib.analysis.curves import ToTarget


def _found(x: list[float], reached: list[int]) -> ToTarget:
    return ToTarget(np.array(x, float), np.array(reached, bool))


def test_completions_to_target_is_the_first_point_at_it_or_the_end_of_the_run() -> None:
    x = [0, 100, 1000, 10_000]
    runs = [
        (x, [0.1, 0.2, 0.4, 0.3]),
        (x, [0.1, 0.1, 0.1, 0.39]),  # never: censored at its own end
        ([0, 50], [0.1, 0.2]),  # a shorter run, censored there
        (x, [0.5, 0.1, 0.1, 0.1]),  # there before training
        (x, [0.1, 0.4, 0.2, 0.6]),  # the first time counts, though it falls back
    ]
    found = curves.completions_to_target(runs, 0.4)
    np.testing.assert_array_equal(found.x, [1000, 10_000, 50, 0, 100])
    np.testing.assert_array_equal(found.reached, [True, False, False, True, True])


@given(st.lists(st.floats(0, 1), min_size=2, max_size=12), st.floats(0, 1), st.floats(0, 1))
def test_a_higher_target_takes_no_less(scores: list[float], target: float, other: float) -> None:
    run = [(np.arange(len(scores)) * 10.0, scores)]
    first, second = (curves.completions_to_target(run, goal) for goal in sorted((target, other)))
    assert first.x[0] <= second.x[0] and first.reached[0] >= second.reached[0]
    assert second.reached[0] == (max(scores) >= max(target, other))


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([], "no curves"),
        ([([1, 2], [0.1])], "curve 0 has x of shape"),
        ([([1, 2], [0.1, 0.2]), ([2, 2], [0.1, 0.2])], "curve 1: x must rise"),
        ([([-1, 2], [0.1, 0.2])], "from 0 or more"),
        ([([1, 2], [0.1, np.nan])], "be finite"),
    ],
)
def test_completions_to_target_refuses(runs: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        curves.completions_to_target(runs, 0.3)


def test_completions_to_target_refuses_a_target_that_is_no_score() -> None:
    with pytest.raises(ValueError, match="target nan"):
        curves.completions_to_target([([1, 2], [0.1, 0.2])], float("nan"))


def test_median_to_target_of_uncensored_runs_is_the_lower_median() -> None:
    for n in range(2, 17):
        assert curves.median_to_target(_found(list(range(1, n + 1)), [1] * n)).value == (n + 1) // 2


def test_median_to_target_with_censored_runs_by_hand() -> None:
    # survival after 1, 3, 5: 5/6, 5/6 * 3/4 = 0.625, 0.625 * 1/2 = 0.3125; the runs at 2 and 4 left before
    found = curves.median_to_target(_found([1, 2, 3, 4, 5, 6], [1, 0, 1, 0, 1, 0]))
    assert (found.value, found.n) == (5, 6)


def test_median_to_target_interval_by_hand() -> None:
    # 16 runs without censoring: survival s after k runs has the variance s (1 - s) / 16, on the scale log(-log s)
    survival = 1 - np.arange(1, 16) / 16
    error = np.sqrt(survival * (1 - survival) / 16) / np.abs(survival * np.log(survival))
    z = (np.log(-np.log(survival)) - np.log(-np.log(0.5))) / error
    undecided = 1 + np.flatnonzero(np.abs(z) <= norm.ppf(0.975))
    found = curves.median_to_target(_found(list(range(1, 17)), [1] * 16))
    assert (found.low, found.high) == (undecided[0], undecided[-1] + 1)
    assert 1 < found.low < 8 < found.high < 16
    narrow = curves.median_to_target(_found(list(range(1, 17)), [1] * 16), level=0.5)
    assert found.low < narrow.low <= narrow.high < found.high


def test_median_to_target_says_what_can_be_said_of_runs_that_never_reach_it() -> None:
    few = curves.median_to_target(_found([3, *[9] * 7], [1, *[0] * 7]))
    assert (few.value, few.low, few.high) == (inf, 3, inf)
    # 1 of 200 by the end of the budget: the median surely lies beyond it
    rare = curves.median_to_target(_found([3, *[9] * 199], [1, *[0] * 199]))
    assert (rare.value, rare.low, rare.high) == (inf, 9, inf)
    none = curves.median_to_target(_found([9] * 8, [0] * 8))
    assert none.value == inf and isnan(none.low) and isnan(none.high)
    assert none.format(percent=False) == "inf [no interval, n = 8]"
    together = curves.median_to_target(_found([3] * 8, [1] * 8))
    assert (together.value, together.low, together.high) == (3, 3, 3)
    with pytest.raises(ValueError, match="train more seeds"):
        curves.median_to_target(_found([3], [1]))


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=2, max_size=16))
def test_the_median_lies_in_its_interval(runs: list[tuple[int, bool]]) -> None:
    found = curves.median_to_target(_found([x for x, _ in runs], [reached for _, reached in runs]))
    assert isnan(found.low) or found.low <= found.value <= found.high


def test_score_at_a_budget_is_interpolated_over_log_x() -> None:
    x, scores = [0, 100, 1000, 10_000], [0.1, 0.2, 0.4, 0.3]
    for budget, expected in ((100, 0.2), (10**2.25, 0.25), (1000, 0.4), (10**3.5, 0.35), (10_000, 0.3)):
        assert curves.score_at(x, scores, budget) == pytest.approx(expected)
    for budget in (0, 99, 10_001):  # between 0 and 100 there is no logarithm to go by, beyond the end no curve
        with pytest.raises(ValueError, match=f"a curve from 100 to 10000 has no score at {budget}"):
            curves.score_at(x, scores, budget)
    with pytest.raises(ValueError, match="has no score at 1"):
        curves.score_at([0], [0.1], 1)  # nothing was spent


def test_scores_at_mean_are_those_of_the_first_point_at_the_target() -> None:
    matrix = np.array([[0.0, 0.2, 0.5, 0.2], [0.0, 0.4, 0.7, 0.8]])  # means 0, 0.3, 0.6, 0.5
    point, scores = curves.scores_at_mean(matrix, 0.3)
    assert point == 1 and scores.tolist() == [0.2, 0.4]
    point, scores = curves.scores_at_mean(matrix, 0.31)
    assert point == 2 and scores.tolist() == [0.5, 0.7]
    with pytest.raises(ValueError, match="never reaches 0.7: its largest is 0.6"):
        curves.scores_at_mean(matrix, 0.7)
    with pytest.raises(ValueError, match="not finite"):
        curves.scores_at_mean([[0.1, np.nan]], 0.1)
    with pytest.raises(ValueError, match="shape"):
        curves.scores_at_mean([0.1, 0.2], 0.1)


def test_largest_drawdown_by_hand() -> None:
    # from 0.5 to 0.2, though the last value lies below the second maximum by less
    runs = [[0.1, 0.5, 0.2, 0.6, 0.4], [0.0, 0.1, 0.1, 0.2, 0.3], [0.9, 0.4, 0.4, 0.4, 0.0]]
    np.testing.assert_allclose(curves.largest_drawdown(runs), [0.3, 0.0, 0.9])
    assert curves.largest_drawdown(runs[0]) == pytest.approx(0.3)
    for wrong in ([], 0.3, [[0.1, np.nan]]):
        with pytest.raises(ValueError, match="scores ho|scores have"):
            curves.largest_drawdown(wrong)


def test_equal_drawdowns_are_equal_to_the_bit() -> None:
    assert 0.3 - 0.1 != 0.4 - 0.2 != 0.7 - 0.5
    assert len(set(curves.largest_drawdown([[0.3, 0.1], [0.4, 0.2], [0.7, 0.5]]))) == 1


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=12))
def test_largest_drawdown_is_the_largest_fall_between_two_points(scores: list[float]) -> None:
    falls = [a - b for a, b in combinations(scores, 2)]
    assert curves.largest_drawdown(scores) == pytest.approx(max([0.0, *falls]), abs=1e-9)


def test_expected_maximum_by_hand() -> None:
    # of 1, 2, 4: single draws average 7/3; pairs have the best 2, 4, 4
    np.testing.assert_allclose(curves.expected_maximum([4, 1, 2]), [7 / 3, 10 / 3, 4])
    with pytest.raises(ValueError, match="shape"):
        curves.expected_maximum([])


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=9))
def test_expected_maximum_is_the_mean_over_all_choices(scores: list[float]) -> None:
    exact = [np.mean([max(c) for c in combinations(scores, k)]) for k in range(1, len(scores) + 1)]
    found = curves.expected_maximum(scores)
    np.testing.assert_allclose(found, exact, atol=1e-12)
    assert (np.diff(found) >= -1e-12).all()


def test_expected_maximum_is_unbiased_where_drawing_with_replacement_is_not() -> None:
    # the best of 8 uniform scores is 8/9 on average
    sweeps = np.random.default_rng(0).random((2000, 12))
    best = np.mean([curves.expected_maximum(sweep)[7] for sweep in sweeps])
    cdf = (np.arange(13) / 12) ** 8
    replaced = np.mean(np.sort(sweeps, axis=1) @ np.diff(cdf))
    spread = sqrt(8 / (9**2 * 10)) / sqrt(2000)
    assert abs(best - 8 / 9) < 4 * spread < 8 / 9 - replaced


def test_costs_are_compared_where_scores_are_equal():
    """Planted: the other arm costs score squared, ours half of that; the line through its means is near its curve."""
    rng = np.random.default_rng(0)
    levels = np.linspace(0.1, 1, 10)
    other = [(at + rng.normal(0, 1e-3, 8), np.full(8, at**2)) for at in levels]
    own = (np.full(8, 0.5), np.full(8, 0.125))
    found = curves.cost_at_equal_score(other, own, start=0.0)
    assert found.value == pytest.approx(2, rel=0.02) and found.low < 2 < found.high and found.n == 8
    same = curves.cost_at_equal_score(other[:5], other[2], start=0.0)
    assert same.value == pytest.approx(1) and same.low <= 1 <= same.high
    # half way to the first group from a model that costs nothing
    half = curves.cost_at_equal_score([([0.4], [3.0])], ([0.2], [1.0]), start=0.0)
    assert half.value == pytest.approx(1.5)


@pytest.mark.parametrize(("score", "cost"), [(2.0, 1.0), (0.0, 1.0), (0.5, 0.0)])
def test_a_score_that_is_not_reached_and_a_cost_of_nothing_have_no_ratio(score, cost):
    found = curves.cost_at_equal_score([([1.0, 1.0], [1.0, 2.0])], ([score] * 2, [cost] * 2), start=0.0)
    assert np.isnan([found.value, found.low, found.high]).all()


def test_costs_of_nothing_are_refused():
    with pytest.raises(ValueError, match="not finite"):
        curves.cost_at_equal_score([([1.0], [np.nan])], ([1.0], [1.0]), start=0.0)
    with pytest.raises(ValueError, match="non-empty"):
        curves.cost_at_equal_score([([], [])], ([1.0], [1.0]), start=0.0)
