"""Intervals against enumerated resamples and hand-computed values; the packed results against their definition."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoalign_lib import stats
from evoalign_lib.stats import Interval


def _every_resample(n: int) -> np.ndarray:
    """Return (n**n, n): the indices of every resample of n units, each as likely as the others."""
    return np.array(list(product(range(n), repeat=n)))


def _ends(means: np.ndarray) -> np.ndarray:
    """Return the 2.5 % and 97.5 % points of equally likely means."""
    return np.quantile(means, [0.025, 0.975], method="inverted_cdf")


def test_bootstrap_mean_is_the_quantile_of_all_resamples() -> None:
    values = np.array([0.1, 0.25, 0.7])
    exact = values[_every_resample(3)].mean(axis=1)
    interval = stats.bootstrap_mean(values)
    # the smallest and the largest of the 27 means have probability 1/27 > 2.5 %: they are the ends
    assert (interval.low, interval.high) == pytest.approx(_ends(exact))
    assert (interval.low, interval.high) == pytest.approx((0.1, 0.7))
    assert (interval.value, interval.n) == (pytest.approx(0.35), 3)


def test_bootstrap_mean_of_five_matches_the_enumeration() -> None:
    values = np.array([0.0, 0.11, 0.23, 0.5, 1.0])
    low, high = _ends(values[_every_resample(5)].mean(axis=1))
    interval = stats.bootstrap_mean(values)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=0.01)


def test_bootstrap_mean_of_equal_values_and_of_one_value() -> None:
    assert stats.bootstrap_mean([0.5] * 8) == Interval(0.5, 0.5, 0.5, 8)
    single = stats.bootstrap_mean([0.5])
    assert single.n == 1 and np.isnan([single.low, single.high]).all()


def test_crossed_bootstrap_matches_the_enumeration() -> None:
    matrix = np.array([[1, 0, 1], [1, 0, 0], [1, 1, 1]], dtype=float)
    exact = np.array([matrix[np.ix_(s, p)].mean() for s in _every_resample(3) for p in _every_resample(3)])
    drawn = stats._crossed_resamples([matrix], 20_000, np.random.default_rng(0))
    assert drawn.mean() == pytest.approx(exact.mean(), abs=0.005)
    assert drawn.std() == pytest.approx(exact.std(), rel=0.02)
    assert set(drawn.round(9)) <= set(exact.round(9))
    # the law itself: the share of each possible value
    for value in sorted(set(exact.round(9))):
        assert np.mean(drawn.round(9) == value) == pytest.approx(np.mean(exact.round(9) == value), abs=0.012)
    interval = stats.crossed_bootstrap(matrix)
    assert (interval.low, interval.high) == pytest.approx(_ends(exact))
    assert (interval.value, interval.n) == (pytest.approx(2 / 3), 3)


def test_crossed_bootstrap_pairs_a_fixed_baseline_by_problem() -> None:
    # every run solves exactly the base's problems and no other: without pairing, problems would make an interval
    base = np.array([1, 0, 1, 0, 1, 0, 0, 0], dtype=float)
    assert stats.crossed_bootstrap(np.tile(base, (4, 1)), base) == Interval(0.0, 0.0, 0.0, 4)
    assert stats.crossed_bootstrap(np.ones((4, 8)), base).value == 5 / 8


def test_crossed_bootstrap_of_two_arms_matches_the_enumeration() -> None:
    arm = np.array([[1, 1, 0], [1, 0, 1]], dtype=float)
    other = np.array([[0, 1, 0], [0, 0, 0], [0, 1, 1]], dtype=float)
    exact = np.array(
        [
            arm[np.ix_(s, p)].mean() - other[np.ix_(t, p)].mean()
            for s in _every_resample(2)
            for t in _every_resample(3)
            for p in _every_resample(3)
        ]
    )
    drawn = stats._crossed_resamples([arm, other], 20_000, np.random.default_rng(1))
    assert drawn.mean() == pytest.approx(exact.mean(), abs=0.006)
    assert drawn.std() == pytest.approx(exact.std(), rel=0.02)
    interval = stats.crossed_bootstrap(arm, other)
    assert (interval.value, interval.n) == (pytest.approx(1 / 3), 2)


def test_a_single_seed_leaves_the_interval_of_the_problems() -> None:
    row = np.array([1, 0, 0, 1], dtype=float)
    exact = row[_every_resample(4)].mean(axis=1)
    interval = stats.crossed_bootstrap(row[None])
    assert (interval.low, interval.high) == pytest.approx(_ends(exact))


def test_intervals_follow_the_seed_and_leave_the_global_state_alone() -> None:
    matrix = np.random.default_rng(5).random((8, 30))
    before = np.random.get_state()[1].copy()  # noqa: NPY002 - the state that must not move
    first, again = stats.crossed_bootstrap(matrix), stats.crossed_bootstrap(matrix)
    assert first == again != stats.crossed_bootstrap(matrix, seed=1)
    assert stats.bootstrap_mean(matrix[:, 0]) == stats.bootstrap_mean(matrix[:, 0])
    assert stats.bootstrap_mean(matrix[:, 0]) != stats.bootstrap_mean(matrix[:, 0], seed=1)
    assert (np.random.get_state()[1] == before).all()  # noqa: NPY002


@pytest.mark.parametrize(
    ("matrix", "baseline", "message"),
    [
        (np.ones(3), None, "dimension"),
        (np.ones((0, 3)), None, "non-empty"),
        (np.ones((2, 3)), np.ones(4), "same problems"),
        (np.ones((2, 3)), np.ones((1, 2, 3)), "same problems"),
        (np.array([[1.0, np.nan]]), None, "not finite"),
    ],
)
def test_crossed_bootstrap_refuses(matrix: np.ndarray, baseline: np.ndarray | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stats.crossed_bootstrap(matrix, baseline)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2, 3], 2.0),  # floor(3/4) = 0 values cut
        ([0, 1, 2, 100], 1.5),  # one cut at each end
        ([8, 1, 7, 2, 6, 3, 5, 4], 4.5),  # two at each end: mean of 3, 4, 5, 6
        ([[0, 10], [2, 4]], 3.0),  # any shape is pooled
    ],
)
def test_iqm(values: list, expected: float) -> None:
    assert stats.iqm(values) == expected


def test_curve_band_resamples_whole_curves() -> None:
    curves = np.array([[0.0, 0.0, 0.2], [1.0, 0.4, 0.2], [2.0, 0.8, 0.2]])
    mean, low, high = stats.curve_band(curves)
    # with three seeds the ends are the smallest and the largest curve, as for a single mean
    np.testing.assert_allclose([mean, low, high], [[1.0, 0.4, 0.2], [0.0, 0.0, 0.2], [2.0, 0.8, 0.2]])
    alone = stats.curve_band(curves[:1])
    assert (alone[0] == curves[0]).all() and np.isnan(alone[1:]).all()


def test_interval_format_and_detectable_effect() -> None:
    assert Interval(0.4124, 0.39, 0.43, 8).format() == "41.2 [39.0, 43.0]"
    assert Interval(-0.0001, -0.02, 0.5, 8).format(percent=False, digits=2) == "0.00 [-0.02, 0.50]"
    assert stats.bootstrap_mean([0.25]).format() == "25.0 [no interval, n = 1]"
    # a standard error of 1 gives 1.96 + 0.84
    assert Interval(0, -1.959964, 1.959964, 8).detectable() == pytest.approx(2.801585)


def _record(greedy: list[int], counts: list[int]) -> dict:
    bits, digits = stats.pack_bits(greedy), stats.pack_counts(counts)
    return {"test": {"n": len(greedy), "greedy_bits": bits, "t1_counts": digits}}


def test_accuracy_matrix() -> None:
    records = [_record([1, 0, 1], [16, 0, 8]), _record([0, 0, 1], [4, 1, 12])]
    np.testing.assert_array_equal(stats.accuracy_matrix(records), [[1, 0, 1], [0, 0, 1]])
    np.testing.assert_array_equal(stats.accuracy_matrix(records, "t1"), [[1, 0, 0.5], [0.25, 0.0625, 0.75]])
    with pytest.raises(ValueError, match="one test set"):
        stats.accuracy_matrix([*records, _record([1], [1])])
    with pytest.raises(ValueError, match="unknown decoding 'beam'"):
        stats.accuracy_matrix(records, "beam")
    with pytest.raises(ValueError, match="one test set"):
        stats.accuracy_matrix([])
    records[0]["test"]["t1_counts"] = "g"
    with pytest.raises(ValueError, match="damaged"):
        stats.accuracy_matrix(records, "t1")


@given(st.lists(st.integers(0, 1), min_size=1, max_size=70))
def test_bits_survive_packing(bits: list[int]) -> None:
    assert stats.unpack_bits(stats.pack_bits(bits), len(bits)).tolist() == bits


@given(st.lists(st.integers(0, 16), min_size=1, max_size=70))
def test_counts_survive_packing(counts: list[int]) -> None:
    text = stats.pack_counts(counts)
    assert stats.unpack_counts(text).tolist() == counts
    assert [int(digit, 17) for digit in text] == counts


def test_packing_refuses_what_it_cannot_hold() -> None:
    with pytest.raises(ValueError, match="0 and 1"):
        stats.pack_bits([0, 2])
    with pytest.raises(ValueError, match="0..16"):
        stats.pack_counts([17])
    with pytest.raises(ValueError, match="need 2"):
        stats.unpack_bits("ff", 9)
    with pytest.raises(ValueError, match="beyond problem 4"):
        stats.unpack_bits("f8", 4)
    with pytest.raises(ValueError, match="'h'"):
        stats.unpack_counts("0h")
