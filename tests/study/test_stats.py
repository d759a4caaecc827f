"""Intervals and tests against enumeration and hand-computed values; the packed results against their definition."""

from itertools import combinations, product
from math import log, sqrt

import numpy as np
import pytest
from evoalign_study.records import accuracy_matrix, pack_bits, pack_counts, unpack_bits, unpack_counts
from helpers import every_resample, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import t as student
from statsmodels.stats.multitest import multipletests

from evoalign_lib.analysis import stats
from evoalign_lib.analysis.stats import Interval


def _two_sided(observed: float, null: np.ndarray) -> float:
    """Return twice the smaller tail of equally likely values, at most 1; equal but for rounding counts as equal."""
    return min(1.0, 2 * min(np.mean(null >= observed - 1e-9), np.mean(null <= observed + 1e-9)))


def _deals(values: np.ndarray, n: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return every way to deal values into a first group of n and a second of the rest."""
    chosen = [np.isin(np.arange(len(values)), first) for first in combinations(range(len(values)), n)]
    return [(values[first], values[~first]) for first in chosen]


def test_bootstrap_mean_is_the_quantile_of_all_resamples() -> None:
    interval = stats.bootstrap_mean([0.1, 0.25, 0.7])
    # the smallest and the largest of the 27 means have probability 1/27 > 2.5 %: they are the ends
    assert (interval.low, interval.high) == pytest.approx((0.1, 0.7))
    assert (interval.value, interval.n) == (pytest.approx(0.35), 3)


def test_crossed_bootstrap_pairs_a_fixed_baseline_by_problem() -> None:
    # every run solves exactly the base's problems and no other: without pairing, problems would make an interval
    base = np.array([1, 0, 1, 0, 1, 0, 0, 0], dtype=float)
    assert stats.crossed_bootstrap(np.tile(base, (4, 1)), base) == Interval(0.0, 0.0, 0.0, 4)
    assert stats.crossed_bootstrap(np.ones((4, 8)), base).value == 5 / 8


def test_crossed_bootstrap_of_two_arms_matches_the_enumeration() -> None:
    arm = np.array([[1, 1, 0], [1, 0, 1]], dtype=float)
    other = np.array([[0, 1, 0], [0, 0, 0], [0, 1, 1]], dtype=float)
    every = product(every_resample(2), every_resample(3), every_resample(3))
    exact = np.array([arm[np.ix_(s, p)].mean() - other[np.ix_(t, p)].mean() for s, t, p in every])
    drawn = stats._crossed_resamples([arm, other], 20_000, 1)
    assert drawn.mean() == pytest.approx(exact.mean(), abs=0.006)
    assert drawn.std() == pytest.approx(exact.std(), rel=0.02)
    interval = stats.crossed_bootstrap(arm, other)
    assert (interval.value, interval.n) == (pytest.approx(1 / 3), 2)


def test_draws_that_are_kept_are_those_that_are_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    arms = [np.random.default_rng(7).random((n, 40)) for n in (8, 3)]
    kept = [stats._crossed_resamples(arms, 1_000, seed) for seed in (0, 1, 0)]
    monkeypatch.setattr(stats, "_KEPT_DRAWS", 0)
    assert np.array_equal(kept, [stats._crossed_resamples(arms, 1_000, seed) for seed in (0, 1, 0)])


def test_welch_equivalence_by_hand() -> None:
    # means 1 and 1, variances 1 and 1, standard error sqrt(2/3), 4 degrees of freedom: t.95 = 2.1318
    match = stats.welch_equivalence([0, 1, 2], [0, 1, 2], 2.0)
    assert (match.interval.low, match.interval.high) == pytest.approx((-1.7406, 1.7406), abs=1e-4)
    assert match.p == pytest.approx(student.sf(2 / sqrt(2 / 3), 4)) and match.equivalent
    assert match.interval.level == 0.9 and match.interval.n == 3
    assert not stats.welch_equivalence([0, 1, 2], [0, 1, 2], 1.7).equivalent
    # variances 1 and 4 of 3: Satterthwaite's (5/3)^2 / ((1/3)^2 / 2 + (4/3)^2 / 2) = 50/17 degrees of freedom
    unequal = stats.welch_equivalence([0, 1, 2], [0, 2, 4], 5.0)
    assert unequal.p == pytest.approx(student.sf(4 / sqrt(5 / 3), 50 / 17))


def test_intervals_follow_the_seed_and_leave_the_global_state_alone() -> None:
    matrix = np.random.default_rng(5).random((8, 30))
    before = np.random.get_state()[1].copy()  # noqa: NPY002 - the state that must not move
    first, again = stats.crossed_bootstrap(matrix), stats.crossed_bootstrap(matrix)
    assert first == again != stats.crossed_bootstrap(matrix, seed=1)
    assert stats.bootstrap_mean(matrix[:, 0]) == stats.bootstrap_mean(matrix[:, 0])
    assert stats.bootstrap_mean(matrix[:, 0]) != stats.bootstrap_mean(matrix[:, 0], seed=1)
    assert (np.random.get_state()[1] == before).all()  # noqa: NPY002


def test_stratified_bootstrap_of_a_difference_matches_the_enumeration() -> None:
    arm, other = np.array([[0.3, 0.5], [0.6, 1.0]]), np.array([[0.1, 0.2], [0.5, 0.9]])
    every = product(*(base[every_resample(2)].mean(1) for base in (*arm, *other)))
    exact = np.array([(a + b - c - d) / 2 for a, b, c, d in every])
    interval = stats.stratified_bootstrap(arm, other, level=0.8)
    assert interval.value == pytest.approx(np.mean(arm) - np.mean(other))
    low, high = np.quantile(exact, [0.1, 0.9], method="inverted_cdf")
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=0.026)


def test_log_std_ratio_by_hand() -> None:
    # without one of 0, 1, 2 the deviation is sqrt(1/2), sqrt(2), sqrt(1/2): jackknife variance of the log (2/3 log 2)^2
    interval = stats.log_std_ratio([0, 2, 4], [0, 1, 2])
    assert interval.value == pytest.approx(log(2))
    half = student.ppf(0.975, 4) * sqrt(2) * 2 / 3 * log(2)
    assert (interval.low, interval.high) == pytest.approx((log(2) - half, log(2) + half))
    assert (interval.n, interval.level) == (3, 0.95)
    assert stats.log_std_ratio([0, 2, 4], [0, 1, 2], level=0.8).low > interval.low


@given(st.integers(2, 5), st.integers(2, 4), st.data())
@settings(max_examples=40)
def test_mann_whitney_is_the_enumeration(n: int, m: int, data: st.DataObject) -> None:
    arm, other = (np.array(data.draw(st.lists(st.integers(0, 6), min_size=k, max_size=k))) / 7 for k in (n, m))
    deals = _deals(np.concatenate([arm, other]), n)
    wins = np.array([np.sign(a[:, None] - b).sum() for a, b in deals])
    assert stats.mann_whitney(arm, other) == pytest.approx(_two_sided(np.sign(arm[:, None] - other).sum(), wins))


def test_holm_is_that_of_statsmodels_to_the_bit() -> None:
    p_values = [0.3, 0.004, 0.02, 1.0, 0.02, 0.0, 0.011]
    expected = multipletests(p_values, method="holm")[1].tolist()
    assert list(stats.holm({str(i): p for i, p in enumerate(p_values)}).values()) == expected


def test_interval_format_and_detectable_effect() -> None:
    assert Interval(-0.0001, -0.02, 0.5, 8).format(percent=False, digits=2) == "0.00 [-0.02, 0.50]"
    assert stats.bootstrap_mean([0.25]).format() == "25.0 [no interval, n = 1]"
    assert Interval(0, -1.644854, 1.644854, 8, level=0.9).detectable() == pytest.approx(2.801585)


def _record(greedy: list[int], counts: list[int]) -> dict:
    bits, digits = pack_bits(greedy), pack_counts(counts)
    return {"test": {"n": len(greedy), "greedy_bits": bits, "t1_counts": digits}}


def test_accuracy_matrix() -> None:
    records = [_record([1, 0, 1], [16, 0, 8]), _record([0, 0, 1], [4, 1, 12])]
    np.testing.assert_array_equal(accuracy_matrix(records), [[1, 0, 1], [0, 0, 1]])
    np.testing.assert_array_equal(accuracy_matrix(records, "t1"), [[1, 0, 0.5], [0.25, 0.0625, 0.75]])


RECORD = _record([1, 0, 1], [16, 0, 8])


test_packed_results_that_are_none_are_refused = refused(
    (lambda: accuracy_matrix([RECORD, _record([1], [1])]), "one test set"),
    (lambda: accuracy_matrix([RECORD], "beam"), "unknown decoding 'beam'"),
    (lambda: accuracy_matrix([{"test": RECORD["test"] | {"t1_counts": "g"}}], "t1"), "damaged"),
    (lambda: pack_bits([0, 2]), "0 and 1"),
    (lambda: pack_counts([17]), "0..16"),
    (lambda: unpack_bits("ff", 9), "need 2"),
    (lambda: unpack_bits("f8", 4), "beyond problem 4"),
    (lambda: unpack_counts("0h"), "'h'"),
)


def test_nested_bootstrap_resamples_settings_and_their_runs() -> None:
    found = stats.nested_bootstrap([[1, 2, 3], [4, 5]], [[0, 1, 0, 1]])
    assert found.value == pytest.approx((2 + 4.5) / 2 - 0.5) and found.n == 4
    # settings that differ: an interval over runs alone, as if they were of one setting, is far too narrow
    apart = [np.array([0.0, 0.1, -0.1, 0.0]) + shift for shift in (-2, -1, 0, 1, 2)]
    pooled, nested = stats.nested_bootstrap([np.concatenate(apart)]), stats.nested_bootstrap(apart)
    assert nested.value == pytest.approx(pooled.value) == pytest.approx(0)
    assert nested.high - nested.low > 1.7 * (pooled.high - pooled.low)
    # of one setting the runs are what moves
    assert stats.nested_bootstrap([[1.0, 1.0, 1.0]]).high == 1


def test_groups_that_two_sides_share_are_compared_within() -> None:
    level, runs = np.array([-4.0, 0.0, 3.0, 9.0]), np.array([-0.1, 0.0, 0.1])
    other = [each + runs for each in level]
    own = [each + change for each, change in zip(other, (0.9, 1.0, 1.0, 1.1), strict=True)]
    found = stats.nested_bootstrap(own, other, shared=True)
    assert found.value == pytest.approx(1) and found.n == 4 and 0.7 < found.low < found.high < 1.3
    # without runs that differ it is Student's interval over the four differences
    exact = stats.nested_bootstrap([[0.9], [1.0], [1.0], [1.1]], [[0.0]] * 4, shared=True, n_resamples=40_000)
    assert exact.high - 1 == pytest.approx(3.182 * np.std([0.9, 1, 1, 1.1], ddof=1) / 2, rel=0.03)
    with pytest.raises(ValueError, match="shared groups"):
        stats.nested_bootstrap(own, other[1:], shared=True)


GRID = np.array([[a, b] for a in (-1.0, 0.0, 1.0) for b in (-1.0, 0.0, 1.0)])


def test_logistic_over_groups_finds_which_predictors_matter() -> None:
    both, second = (GRID.sum(1) > 0.5).astype(float), (GRID[:, 1] > 0.5).astype(float)
    area, slopes = stats.logistic_over_groups([GRID, GRID], [both, both])
    assert area.value == 1 and area.low > 0.5 and area.n == 9
    assert all(slope.low > 0 for slope in slopes) and slopes[0].value == pytest.approx(slopes[1].value)
    area, slopes = stats.logistic_over_groups([GRID, GRID], [second, second])
    assert area.value == 1 and slopes[0].low < 0 < slopes[0].high and slopes[1].low > 0
    # what another base contradicts does not carry over
    area, _ = stats.logistic_over_groups([GRID, GRID], [second, 1 - second])
    assert area.value == 0
