"""Budgets to a target, spread at a matched mean, drawdown and expected maxima against hand-computed cases."""

from itertools import combinations
from math import inf, isnan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=12))
def test_largest_drawdown_is_the_largest_fall_between_two_points(scores: list[float]) -> None:
    falls = [a - b for a, b in combinations(scores, 2)]
    assert curves.largest_drawdown(scores) == pytest.approx(max([0.0, *falls]), abs=1e-9)


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=9))
def test_expected_maximum_is_the_mean_over_all_choices(scores: list[float]) -> None:
    exact = [np.mean([max(c) for c in combinations(scores, k)]) for k in range(1, len(scores) + 1)]
    found = curves.expected_maximum(scores)
    np.testing.assert_allclose(found, exact, atol=1e-12)
    assert (np.diff(found) >= -1e-12).all()


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
