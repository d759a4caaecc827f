"""Spread at a matched mean, drawdown and expected maxima against hand-computed cases."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoalign_lib.analysis import curves


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
