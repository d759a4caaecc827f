"""Coverage against enumeration on small cases, laws that hold for all inputs, and published tables."""

from itertools import combinations, product
from math import comb, isnan, log, nan

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from evoalign_lib.analysis import coverage
from evoalign_lib.analysis.coverage import Support

SHARES = st.lists(st.floats(0, 1), min_size=1, max_size=8)


def test_pass_at_is_the_chance_of_any_right_sample() -> None:
    for p, k in product((0.0, 0.1, 0.5, 1.0), (1, 2, 3)):
        outcomes = product((0, 1), repeat=k)
        exact = sum(np.prod([p if right else 1 - p for right in found]) for found in outcomes if any(found))
        assert coverage.pass_at(p, k) == pytest.approx(exact, abs=1e-15)


def test_pass_at_of_tiny_probabilities_and_shapes() -> None:
    # (1 - 1e-20)^k is 1 in floating point
    np.testing.assert_allclose(coverage.pass_at([1e-20, 3e-18], 1000), [1e-17, 3e-15], rtol=1e-12)
    assert coverage.pass_at(np.zeros((2, 3)), 4).shape == (2, 3)
    assert coverage.pass_at(np.zeros((2, 3)), [1, 4]).shape == (2, 3, 2)
    assert coverage.pass_at(0.5, np.array([1, 4])).shape == (2,)


@given(SHARES, st.integers(1, 5000))
def test_more_samples_and_better_models_solve_no_less(shares: list[float], k: int) -> None:
    one, more = np.moveaxis(coverage.pass_at(sorted(shares), [k, k + 1]), -1, 0)
    assert (one <= more).all() and (np.diff(one) >= 0).all()
    assert (one >= np.array(sorted(shares)) * (1 - 1e-12)).all()
    assert ((one >= 0) & (more <= 1)).all()


def _brute_pass(right: int, samples: int, k: int) -> float:
    return float(np.mean([min(chosen) < right for chosen in combinations(range(samples), k)]))


def test_estimate_pass_at_counts_every_subset() -> None:
    for n in range(1, 8):
        found = coverage.estimate_pass_at(np.arange(n + 1), n, range(1, n + 1))
        exact = [[_brute_pass(c, n, k) for k in range(1, n + 1)] for c in range(n + 1)]
        np.testing.assert_allclose(found, exact, atol=1e-14)


def test_estimate_pass_at_of_many_samples_keeps_its_digits() -> None:
    right, ks = np.array([0, 1, 2, 37, 512, 1023, 1024]), [1, 2, 64, 512, 1000, 1024]
    exact = [[1 - comb(1024 - int(c), k) / comb(1024, k) for k in ks] for c in right]  # quotients of exact integers
    found = coverage.estimate_pass_at(right, 1024, ks)
    np.testing.assert_allclose(found, exact, rtol=1e-12, atol=1e-15)
    assert (found[0] == 0).all() and not np.signbit(found[0]).any() and (found[:, -1] == (right > 0)).all()


def test_estimate_pass_at_of_problems_with_their_own_numbers_of_samples() -> None:
    right, samples = np.array([[1, 0, 3], [2, 2, 5]]), np.array([4, 5, 6])
    found = coverage.estimate_pass_at(right, samples, [2, 4])
    assert found.shape == (2, 3, 2)
    for row, column, i in np.ndindex(found.shape):
        exact = _brute_pass(right[row, column], samples[column], (2, 4)[i])
        assert found[row, column, i] == pytest.approx(exact, abs=1e-14)
    np.testing.assert_array_equal(coverage.estimate_pass_at(right, samples, 4), found[..., 1])
    assert coverage.estimate_pass_at(1, 4, 2) == pytest.approx(0.5)


@given(st.integers(1, 9), st.floats(0, 1), st.data())
def test_estimate_pass_at_is_unbiased(n: int, p: float, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, n))
    chance = np.array([comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)])
    expected = chance @ coverage.estimate_pass_at(np.arange(n + 1), n, k)
    assert expected == pytest.approx(coverage.pass_at(p, k), abs=1e-12)


def test_variance_of_pass_at_counts_every_pair_of_disjoint_subsets() -> None:
    for n, k in ((2, 1), (4, 1), (5, 2), (6, 3), (7, 2)):
        for c in range(n + 1):
            pairs = [
                (min(one) < c) * (min(two) < c)
                for one in combinations(range(n), k)
                for two in combinations(set(range(n)) - set(one), k)
            ]
            exact = _brute_pass(c, n, k) ** 2 - np.mean(pairs)
            assert coverage.variance_of_pass_at(c, n, k) == pytest.approx(exact, abs=1e-14)


@given(st.integers(2, 9), st.floats(0, 1), st.data())
def test_variance_of_pass_at_is_unbiased_and_not_negative(n: int, p: float, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, n // 2))
    chance = np.array([comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)])
    estimate = coverage.estimate_pass_at(np.arange(n + 1), n, k)
    exact = chance @ estimate**2 - (chance @ estimate) ** 2
    found = coverage.variance_of_pass_at(np.arange(n + 1), n, k)
    assert (found >= 0).all() and chance @ found == pytest.approx(exact, abs=1e-12)


def test_variance_of_pass_at_1_is_the_textbook_one_and_many_are_undefined() -> None:
    share = np.arange(1025) / 1024
    found = coverage.variance_of_pass_at(np.arange(1025), 1024, [1, 512, 513])
    np.testing.assert_allclose(found[:, 0], share * (1 - share) / 1023, rtol=1e-9, atol=1e-15)
    assert np.isfinite(found[:, 1]).all() and np.isnan(found[:, 2]).all()
    assert (found[[0, -1], :2] == 0).all()


@pytest.mark.parametrize("function", [coverage.estimate_pass_at, coverage.variance_of_pass_at])
@pytest.mark.parametrize(
    ("right", "samples", "k", "message"),
    [
        ([1, 2], 4, 5, "k=5 is more than the 4 samples"),
        ([1, 2], [8, 3], [1, 4], "k=4 is more than the 3 samples"),
        ([1, 5], 4, 1, "right <= samples"),
        ([0.5], 4, 1, "right hold a value that is negative or no whole number"),
        ([-1], 4, 1, "negative"),
        ([nan], 4, 1, "right hold"),
        ([0], 0, 1, "at least one sample"),
        ([], 4, 1, "give problems"),
        ([1, 2], [4, 4, 4], 1, r"shape \(2,\), samples \(3,\)"),
        ([1], 4, 0, "k=0 must be"),
        ([1], 4, [], "k=\\[\\] must be"),
        ([1], 4, 1.5, "k=1.5 must be a whole number"),
        ([1], 4, True, "k=True"),
    ],
)
def test_counts_that_do_not_fit_are_refused(function, right, samples, k, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        function(right, samples, k)


@pytest.mark.parametrize("bad", [[-0.1], [1.1], [nan], []])
def test_values_that_are_no_probabilities_are_refused(bad: list[float]) -> None:
    for function in (
        lambda: coverage.pass_at(bad, 1),
        lambda: coverage.cover_at(bad, 0.5),
        lambda: coverage.support(bad, bad),
        lambda: coverage.null_nscr(bad, 1),
        lambda: coverage.accuracy_bins(bad),
        lambda: coverage.support_change(bad, [bad], 1),
    ):
        with pytest.raises(ValueError, match="give shares|non-empty"):
            function()
    with pytest.raises(ValueError, match="counts, and no NaN"):
        coverage.pass_at([3, 4], 1)


def test_crossing_is_where_lines_in_log_k_meet() -> None:
    ks = np.array([1, 4, 16, 64])
    # the difference falls by 1 for each factor of 4: it is 0 where log4 k is 1.25
    gap = 1.25 - np.log(ks) / np.log(4)
    assert coverage.crossing(ks, gap, np.zeros(4)) == pytest.approx(4**1.25)
    assert coverage.crossing(ks, gap * 3 + 7, np.full(4, 7.0)) == pytest.approx(4**1.25)


@pytest.mark.parametrize(
    ("gap", "expected"),
    [
        ([1, -1, 1], 2.0),
        ([1, 1, -1], 8.0),
        ([0, 1, -1], 8.0),  # equal at the start, such as at a matched pass@1
        ([1, 0, -1], 4.0),
        ([1, 0, 1], nan),  # touched
        ([1, 1, 0], nan),  # reached, not overtaken
        ([1, 1, 1], nan),
        ([0, 0, 0], nan),
        ([-1, 1, -1], nan),  # the second starts above
        ([0, -1, 1], nan),
    ],
)
def test_crossing_by_hand(gap: list[float], expected: float) -> None:
    assert coverage.crossing([1, 4, 16], gap, np.zeros(3)) == pytest.approx(expected, nan_ok=True)


@given(st.lists(st.lists(st.floats(-1, 1), min_size=4, max_size=4), min_size=1, max_size=4))
def test_crossing_of_many_curves_lies_between_the_points_it_separates(gaps: list[list[float]]) -> None:
    ks, zero = np.array([1.0, 2.0, 8.0, 9.0]), np.zeros(4)
    found = coverage.crossing(ks, gaps, zero)
    assert found.shape == (len(gaps),)
    for gap, value in zip(gaps, found, strict=True):
        assert value == pytest.approx(float(coverage.crossing(ks, gap, zero)), nan_ok=True)
        signs = [np.sign(x) for x in gap if x != 0]
        assert isnan(value) == (not signs or signs[0] < 0 or min(signs) > 0)
        if not isnan(value):
            j = next(i for i, x in enumerate(gap) if x < 0)
            assert ks[j - 1] * (1 - 1e-12) <= value <= ks[j] * (1 + 1e-12)


def test_crossing_refuses_what_is_no_curve() -> None:
    for ks, first, message in (
        ([1, 1], [1, 0], "must be positive and rise"),
        ([0, 1], [1, 0], "must be positive"),
        ([1, 2], [1, 0, 0], "shapes"),
        ([1, 2], [1, nan], "not finite"),
        ([], [], "must be positive"),
    ):
        with pytest.raises(ValueError, match=message):
            coverage.crossing(ks, first, np.zeros(len(first)))


@given(SHARES, st.integers(1, 64))
def test_pass_at_is_the_integral_of_cover_at(shares: list[float], k: int) -> None:
    # cover@tau is constant between two probabilities, and k (1 - tau)^(k - 1) integrates to -(1 - tau)^k
    steps = np.unique([0.0, *shares, 1.0])
    inside = coverage.cover_at(shares, ((steps[:-1] + steps[1:]) / 2).tolist())
    # a step narrower than cover_at's tolerance holds no more than that of the integral
    integral = inside @ ((1 - steps[:-1]) ** k - (1 - steps[1:]) ** k)
    assert integral == pytest.approx(coverage.pass_at(shares, k).mean(), abs=1e-7)


def test_cover_at_counts_equal_values_and_keeps_shapes() -> None:
    tenths = np.arange(11) / 10
    for i, tau in enumerate(np.linspace(0, 1, 11)):  # 0.30000000000000004 and its like
        assert coverage.cover_at(tenths, tau) == pytest.approx((11 - i) / 11)
    # the tolerance is relative: a threshold near 0 keeps zeros out
    assert coverage.cover_at([0.0, 1e-12], 1e-12) == 0.5
    assert coverage.cover_at(np.zeros((3, 5)), 0.1).shape == (3,)
    assert coverage.cover_at(np.zeros((3, 5)), [0.1, 0.2]).shape == (3, 2)
    for tau in (-0.1, 1.1, nan):
        with pytest.raises(ValueError, match="tau="):
            coverage.cover_at([0.5], tau)


def test_coverage_profile_by_hand() -> None:
    mu = [[0.5, 0.5, 0.0], [0.1, 0.2, 0.7]]
    pi = [[0.5, 0.05, 0.45], [0.1, 0.0, 0.7]]
    # ratios 1, 10 and 0; 1, infinite and 1
    np.testing.assert_allclose(coverage.coverage_profile(mu, pi, [0.5, 1, 2, 10, 11]), [1, 1, 0.35, 0.35, 0.1])
    np.testing.assert_allclose(coverage.coverage_profile(mu, pi, 2, weights=[3, 1]), 0.75 * 0.5 + 0.25 * 0.2)
    assert isnan(coverage.coverage_profile(mu, pi, 2, weights=[0, 0]))
    assert np.ndim(coverage.coverage_profile(mu, pi, 2)) == 0
    assert coverage.coverage_profile([[0.3, 0.7]], [[0.1, 0.9]], 3) == pytest.approx(0.3)  # 3 * 0.1 > 0.3


@given(
    st.lists(st.floats(0.01, 1), min_size=3, max_size=3),
    st.lists(st.floats(0.01, 1), min_size=3, max_size=3),
    st.floats(1.01, 100),
)
def test_coverage_profile_never_rises_and_is_bounded(first: list[float], second: list[float], n: float) -> None:
    mu, pi = (np.array([row]) / sum(row) for row in (first, second))
    found, later = coverage.coverage_profile(mu, pi, [n, 2 * n])
    assert 0 <= later <= found <= 1 + 1e-12
    assert coverage.coverage_profile(mu, mu, n) == 0
    # the mass under the base of answers with mu >= N pi is at most 1 / N of their mass under mu
    assert pi[mu >= n * pi].sum() <= found / n + 1e-9


@pytest.mark.parametrize(
    ("mu", "pi", "options", "message"),
    [
        ([[0.5, 0.4]], [[0.5, 0.5]], {}, "must sum to 1"),
        ([[0.5, 0.5]], [[0.9, 0.5]], {}, "at most 1.4"),
        ([[0.5, 0.5]], [[1.0]], {}, "same problems and answers"),
        ([0.5, 0.5], [0.5, 0.5], {}, "2 dimension"),
        ([[0.5, 0.5]], [[0.5, 0.5]], {"n": 0}, "n=0 must be positive"),
        ([[0.5, 0.5]], [[0.5, 0.5]], {"weights": [1, 1]}, "one for each of 1 problems"),
        ([[0.5, 0.5]], [[0.5, 0.5]], {"weights": [-1]}, "weights hold"),
    ],
)
def test_coverage_profile_refuses(mu, pi, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        coverage.coverage_profile(mu, pi, **{"n": 2} | options)


# arXiv 2507.14843, P / E / S / Out and the published SRR, NDR, SDS and NSCR. Table 1, its first row:
TABLE_1 = {"ProRL-1.5B-v1": ((2400, 36, 163, 805), (0.94, 0.02, 0.03, -0.05))}
# table 3, pass@256: the NSCR
TABLE_3 = {
    "Minerva, SFT": ((154, 28, 18, 72), 0.050, 272),
    "Minerva, DAPO": ((138, 12, 34, 88), -0.120, 272),
    "Olympiad, SFT": ((503, 49, 25, 98), 0.042, 675),
    "Olympiad, DAPO": ((467, 25, 61, 122), -0.065, 675),
}


@pytest.mark.parametrize("name", TABLE_1)
def test_support_gives_the_rates_of_table_1(name: str) -> None:
    counts, (srr, ndr, sds, nscr) = TABLE_1[name]
    found = Support(*counts)
    assert (round(found.srr, 2), round(found.sds, 2), round(found.nscr, 2)) == (srr, sds, nscr)
    # 36 / 2436 = .0148 by the paper's definition, printed as .02: E / P, here exactly .015, would be rounded to that
    assert found.ndr == pytest.approx(ndr, abs=0.0053) and round(found.ndr, 4) == 0.0148
    assert found.total == 3404


@pytest.mark.parametrize("name", TABLE_3)
def test_support_gives_the_net_change_of_table_3(name: str) -> None:
    counts, nscr, problems = TABLE_3[name]
    found = Support(*counts)
    assert round(found.nscr, 3) == nscr and found.total == problems


def test_other_rows_of_table_1_have_as_many_problems_and_rates_in_the_published_range() -> None:
    rows = [Support(2388, 48, 175, 793), Support(2685, 26, 86, 607)]
    assert all(row.total == 3404 and 0.93 <= row.srr <= 0.99 and row.ndr <= 0.04 for row in rows)
    assert all(-0.06 <= row.nscr <= 0 for row in [*rows, Support(761, 83, 104, 599)])


@given(*[st.integers(0, 50)] * 4)
def test_rates_of_support_from_sets(kept: int, won: int, lost: int, out: int) -> None:
    before = np.repeat([True, False, True, False], [kept, won, lost, out])
    after = np.repeat([True, True, False, False], [kept, won, lost, out])
    assume(len(before))
    found = coverage.support(before, after)
    assert found == Support(kept, won, lost, out)

    def share(over: int, under: int) -> float:
        return over / under if under else nan

    both, either = int((before & after).sum()), int((before | after).sum())
    assert found.srr == pytest.approx(share(both, int(before.sum())), nan_ok=True)
    assert found.ndr == pytest.approx(share(int((after & ~before).sum()), int(after.sum())), nan_ok=True)
    assert found.nscr == pytest.approx(share(int(after.sum()) - int(before.sum()), either), nan_ok=True)
    srr, ndr = found.srr, found.ndr
    defined = not (isnan(srr) or isnan(ndr))
    assert found.sds == pytest.approx(2 * srr * ndr / (srr + ndr) if defined and srr + ndr else nan, nan_ok=True)
    # exchanging before and after exchanges what is won and lost
    back = coverage.support(after, before)
    assert back.nscr == pytest.approx(-found.nscr, nan_ok=True)
    assert back.ndr == pytest.approx(1 - srr, nan_ok=True)


def test_support_of_probabilities_is_the_expected_count() -> None:
    before, after = np.array([0.2, 0.9, 0.0]), np.array([0.5, 0.5, 0.25])
    expected = np.zeros(4)
    for b, a in product(product((0, 1), repeat=3), repeat=2):
        chance = np.prod(np.where(b, before, 1 - before)) * np.prod(np.where(a, after, 1 - after))
        found = coverage.support(b, a)
        expected += chance * np.array([found.kept, found.won, found.lost, found.out])
    found = coverage.support(before, after)
    np.testing.assert_allclose([found.kept, found.won, found.lost, found.out], expected)
    assert found.total == pytest.approx(3)
    with pytest.raises(ValueError, match="before has shape"):
        coverage.support([0.1], [0.1, 0.2])


def test_threshold_is_the_published_one() -> None:
    for samples, published in ((8192, 3.7e-4), (1024, 2.9e-3), (256, 1.2e-2)):
        assert float(f"{coverage.threshold(samples):.1e}") == published
        # an answer that rare stays unseen with probability zeta, or a little less
        assert 0.045 < (1 - coverage.threshold(samples)) ** samples < 0.05
    for samples, zeta, message in ((0, 0.05, "samples=0"), (8, 0, "zeta=0"), (8, 1.0, "zeta=1.0")):
        with pytest.raises(ValueError, match=message):
            coverage.threshold(samples, zeta)


def test_null_matches_the_enumeration() -> None:
    p = np.array([0.1, 0.3, 0.02, 1.0, 0.0])
    found = coverage.null_nscr(p, 4, n_resamples=40_000)
    q = 1 - (1 - p) ** 4
    assert found.support.kept == pytest.approx((q**2).sum())
    assert found.support.won == found.support.lost == pytest.approx((q * (1 - q)).sum())
    assert found.support.nscr == 0 and found.support.total == pytest.approx(5)
    values, chances = [], []
    for b, a in product(product((0, 1), repeat=5), repeat=2):
        chance = np.prod(np.where(b, q, 1 - q)) * np.prod(np.where(a, q, 1 - q))
        if chance:
            values.append(coverage.support(b, a).nscr)
            chances.append(chance)
    spread = np.sqrt(np.average(np.square(values), weights=chances))
    assert np.average(values, weights=chances) == pytest.approx(0, abs=1e-12)
    assert found.sd == pytest.approx(spread, rel=0.02)
    assert (found.low, found.high) == pytest.approx((-2 / 3, 2 / 3))


def test_null_without_chance_and_without_support() -> None:
    sure = coverage.null_nscr([1.0, 0.0], 8)
    assert (sure.support, sure.sd, sure.low, sure.high) == (Support(1, 0, 0, 1), 0, 0, 0)
    none = coverage.null_nscr([0.0, 0.0], 8)
    assert np.isnan([none.support.nscr, none.sd, none.low, none.high]).all()
    # pairs of sets in which nothing is solved have no NSCR, and are left out
    rare = coverage.null_nscr([1e-3], 1, n_resamples=5000)
    assert rare.sd == pytest.approx(1) and (rare.low, rare.high) == (-1, 1)


def test_null_is_a_function_of_its_seed() -> None:
    p = np.full(20, 0.05)
    assert coverage.null_nscr(p, 8) == coverage.null_nscr(p, 8)
    assert coverage.null_nscr(p, 8) != coverage.null_nscr(p, 8, seed=1)
    wide, narrow = coverage.null_nscr(p, 8), coverage.null_nscr(p, 8, level=0.5)
    assert wide.low < narrow.low < 0 < narrow.high < wide.high and wide.sd == narrow.sd


def _nscr(before: np.ndarray, after: np.ndarray, k: int) -> float:
    return coverage.support(coverage.pass_at(before, k), coverage.pass_at(after, k)).nscr


def _every_resample(n: int) -> np.ndarray:
    return np.array(list(product(range(n), repeat=n)))


def test_support_change_matches_the_enumeration() -> None:
    base, runs = np.array([0.1, 0.4, 0.05]), np.array([[0.3, 0.4, 0.0], [0.0, 0.9, 0.02], [0.05, 0.1, 0.6]])
    found = coverage.support_change(base, runs, 3, n_resamples=20_000)
    assert found.value == pytest.approx(np.mean([_nscr(base, run, 3) for run in runs])) and found.n == 3
    exact = []
    for problems in _every_resample(3):
        of_runs = np.array([_nscr(base[problems], run[problems], 3) for run in runs])
        exact.extend(of_runs[_every_resample(3)].mean(axis=1))
    ends = np.quantile(exact, [0.025, 0.975], method="inverted_cdf")
    assert (found.low, found.high) == pytest.approx(ends, abs=0.02)


def test_support_change_difference_matches_the_enumeration() -> None:
    base = np.array([0.1, 0.4])
    first, second = np.array([[0.3, 0.5], [0.0, 0.9]]), np.array([[0.2, 0.2], [0.1, 0.1], [0.0, 0.6]])
    found = coverage.support_change_difference(base, first, second, 2, n_resamples=20_000)
    by_hand = [np.mean([_nscr(base, run, 2) for run in group]) for group in (first, second)]
    assert found.value == pytest.approx(by_hand[0] - by_hand[1]) and found.n == 2
    exact = []
    for problems in _every_resample(2):
        one, two = (np.array([_nscr(base[problems], run[problems], 2) for run in g]) for g in (first, second))
        means = one[_every_resample(2)].mean(1)[:, None] - two[_every_resample(3)].mean(1)[None]
        exact.append(means.ravel())
    ends = np.quantile(np.concatenate(exact), [0.025, 0.975], method="inverted_cdf")
    assert (found.low, found.high) == pytest.approx(ends, abs=0.03)


def test_problems_are_resampled_in_common() -> None:
    # both groups change the same problems alike: without common problems the interval would be wide
    rng = np.random.default_rng(5)
    base, run = rng.random(30), rng.random(30)
    found = coverage.support_change_difference(base, np.tile(run, (3, 1)), np.tile(run, (4, 1)), 2)
    assert (found.value, found.low, found.high) == pytest.approx((0, 0, 0), abs=1e-12)
    alone = coverage.support_change(base, [run], 2)
    assert alone.high - alone.low > 0.05 and alone.n == 1


def test_support_change_of_the_base_itself_is_none() -> None:
    base = np.random.default_rng(3).random(12) / 10
    found = coverage.support_change(base, np.tile(base, (4, 1)), 16)
    assert (found.value, found.low, found.high) == (0, 0, 0)


def test_support_change_without_any_support_is_undefined() -> None:
    found = coverage.support_change([0.0, 0.0], [[0.0, 0.0]], 4)
    assert np.isnan([found.value, found.low, found.high]).all()
    # defined as it is, undefined where a resample holds the second problem only
    found = coverage.support_change([0.5, 0.0], [[0.25, 0.0]], 1)
    assert found.value == pytest.approx(-0.25 / 0.625) and np.isnan([found.low, found.high]).all()


def test_support_change_is_a_function_of_its_seed_and_level() -> None:
    rng = np.random.default_rng(1)
    base, runs = rng.random(40), rng.random((4, 40))
    found = coverage.support_change(base, runs, 2, n_resamples=500)
    assert found == coverage.support_change(base, runs, 2, n_resamples=500)
    other = coverage.support_change(base, runs, 2, n_resamples=500, seed=1)
    assert other.value == found.value and other.low != found.low
    narrow = coverage.support_change(base, runs, 2, n_resamples=500, level=0.8)
    assert found.low < narrow.low < narrow.high < found.high and narrow.level == 0.8


@pytest.mark.parametrize(
    ("base", "runs", "k", "message"),
    [
        ([0.5, 0.5], [[0.5]], 1, r"runs have shape \(1, 1\) and the base \(2,\)"),
        ([0.5], [0.5], 1, "runs have shape"),
        ([[0.5]], [[0.5]], 1, "base have shape"),
        ([0.5], [[0.5]], 0, "k=0"),
    ],
)
def test_support_change_refuses(base, runs, k: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        coverage.support_change(base, runs, k)


def test_expected_support_from_counts_is_unbiased() -> None:
    # base and run of 6 samples each, at k = 3: expectations over both binomials, against the true probabilities
    n, k, before, after = 6, 3, 0.2, 0.35
    chances = [np.array([comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]) for p in (before, after)]
    q = coverage.estimate_pass_at(np.arange(n + 1), n, k)
    exact = coverage.support([coverage.pass_at(before, k)], [coverage.pass_at(after, k)])
    for name in ("kept", "won", "lost", "out"):
        table = np.array([[getattr(coverage.support([b], [a]), name) for a in q] for b in q])
        assert chances[0] @ table @ chances[1] == pytest.approx(getattr(exact, name))
    # with k = 1 such estimates are taken as they are
    found = coverage.support_change(q, [q[::-1]], 1, n_resamples=10)
    assert found.value == pytest.approx(coverage.support(q, q[::-1]).nscr, abs=1e-12)


def test_accuracy_bins_by_hand() -> None:
    accuracy = [0, 0, 1e-9, 0.1, 0.1001, 0.3, 0.7, 0.9, 0.95, 1 - 1e-12, 1, 1, 1]
    assert coverage.accuracy_bins(accuracy).tolist() == [2, 2, 1, 1, 0, 0, 0, 1, 0, 1, 2, 3]
    assert coverage.accuracy_bins([[0, 0.5], [1, 1]], [0, 0.5, 1]).tolist() == [[1, 1, 0, 0], [0, 0, 0, 2]]
    # every tenth belongs to the bin that it closes, however the edge is rounded
    tenths = np.arange(1, 10) / 10
    for edges in (None, np.arange(11) / 10, np.append(np.cumsum([0, *[0.1] * 9]), 1)):
        assert coverage.accuracy_bins(tenths, edges).tolist() == [0, *[1] * 9, 0, 0]


@given(SHARES)
def test_accuracy_bins_lose_no_problem(shares: list[float]) -> None:
    found = coverage.accuracy_bins(shares)
    assert found.shape == (12,) and found.sum() == len(shares)
    assert found[0] == shares.count(0) and found[-1] == shares.count(1)


@pytest.mark.parametrize("edges", [[0.1, 1], [0, 0.9], [0, 0.5, 0.5, 1], [0], [0, nan, 1]])
def test_edges_that_do_not_rise_from_0_to_1_are_refused(edges: list[float]) -> None:
    with pytest.raises(ValueError, match="must rise from 0 to 1"):
        coverage.accuracy_bins([0.5], edges)


def test_answer_entropy_by_hand() -> None:
    found = coverage.answer_entropy([[4, 0, 0], [1, 1, 2], [0, 0, 0]])
    np.testing.assert_allclose(found.plug_in, [0, 1.5 * log(2), nan])
    np.testing.assert_allclose(found.miller_madow, [0, 1.5 * log(2) + 2 / 8, nan])
    assert not np.signbit(found.plug_in[0])
    assert coverage.answer_entropy([3, 3]).plug_in == pytest.approx(log(2))


def test_miller_madow_takes_away_bias() -> None:
    # expectations over every sample of 8 answers from three that are equally likely
    outcomes = list(product(range(3), repeat=8))
    counts = np.array([np.bincount(found, minlength=3) for found in outcomes])
    found = coverage.answer_entropy(counts)
    plain, corrected = log(3) - found.plug_in.mean(), log(3) - found.miller_madow.mean()
    assert plain > 0.1 and abs(corrected) < plain / 4


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6))
def test_answer_entropy_is_bounded_and_blind_to_order(counts: list[int]) -> None:
    assume(sum(counts))
    found = coverage.answer_entropy(counts)
    assert -1e-12 <= found.plug_in <= log(sum(c > 0 for c in counts)) + 1e-12
    assert found.plug_in <= found.miller_madow
    assert coverage.answer_entropy([*counts[::-1], 0]).plug_in == pytest.approx(found.plug_in)


@pytest.mark.parametrize("counts", [[0.5], [-1], [], 3])
def test_what_is_no_count_of_answers_is_refused(counts) -> None:
    with pytest.raises(ValueError, match="counts h"):
        coverage.answer_entropy(counts)


@pytest.mark.parametrize(
    ("answers", "winner"),
    [
        ([1, 2, 2], 2),
        ([3, 1, 1, 3], 3),
        ([None, None, None, 5], 5),
        ([None, None], None),
        ([(1, 2), "a", (1, 2)], (1, 2)),
        ([0, None, None], 0),
    ],
)
def test_vote(answers: list, winner) -> None:
    assert coverage.vote(answers) == winner
    assert coverage.vote(iter(answers)) == winner


def test_a_vote_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="no answers"):
        coverage.vote([])


def test_effective_samples_by_hand() -> None:
    assert coverage.effective_samples([1, 1, 1, 1]) == 4
    assert coverage.effective_samples([[3, 1], [0, 2]]) == pytest.approx([16 / 10, 1])
    assert isnan(coverage.effective_samples([0.0, 0.0]))
    assert isnan(coverage.effective_samples([-np.inf, -np.inf], log=True))
    assert coverage.effective_samples([5e-324, 1e-320]) > 1 and coverage.effective_samples([1e300, 1e300]) == 2


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=8), st.floats(-1000, 1000))
def test_effective_samples_have_no_scale(logs: list[float], shift: float) -> None:
    found = coverage.effective_samples(np.exp(logs))
    assert 1 - 1e-9 <= found <= len(logs) + 1e-9
    assert coverage.effective_samples(np.array(logs) + shift, log=True) == pytest.approx(found, rel=1e-9)
    assert coverage.effective_samples([*logs, -np.inf], log=True) == pytest.approx(found, rel=1e-9)


def test_effective_samples_refuse() -> None:
    for weights, options, message in (
        ([-1.0, 2.0], {}, "weights hold a value that is negative"),
        ([nan], {}, "not finite"),
        ([np.inf, 0.0], {"log": True}, "NaN or"),
        ([nan, 0.0], {"log": True}, "NaN or"),
        ([], {}, "at least one sample"),
        (1.0, {}, "at least one sample"),
    ):
        with pytest.raises(ValueError, match=message):
            coverage.effective_samples(weights, **options)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=10)
def test_the_global_generator_is_neither_read_nor_moved(seed: int) -> None:
    base, runs = np.full(6, 0.1), np.full((2, 6), 0.2)
    np.random.seed(seed)  # noqa: NPY002
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    found = (coverage.support_change(base, runs, 2, n_resamples=20), coverage.null_nscr(base, 2, n_resamples=20))
    assert (np.random.get_state()[1] == state).all()  # noqa: NPY002
    assert found == (
        coverage.support_change(base, runs, 2, n_resamples=20),
        coverage.null_nscr(base, 2, n_resamples=20),
    )


# ---- from where on the base is ahead


def test_a_base_overtakes_where_the_curves_cross():
    """One problem solved in half of the samples and one never, against two solved in a tenth: 6 or 7 samples."""
    ks, base = [1, 2, 4, 6, 7, 8, 16], [0.1, 0.1]
    found = coverage.overtaken(base, [[0.5, 0.0], [0.5, 0.0]], ks)
    assert 6 < found.value < 7 and found.low <= found.value <= found.high and found.n == 2
    assert coverage.overtaken(base, [[0.5, 0.5], [0.5, 0.5]], ks).value == np.inf
    behind = coverage.overtaken(base, [[0.0, 0.0]], ks)
    assert behind.value == -np.inf and np.isnan(behind.low)
    with pytest.raises(ValueError, match="runs have 3 problems and the base 2"):
        coverage.overtaken(base, [[0.1, 0.1, 0.1]], ks)


# ---- two factors

CELL = arrays(np.float64, (3, 6), elements=st.floats(0, 1))


@given(CELL, CELL, CELL, CELL, arrays(np.float64, 6, elements=st.floats(0, 1)), st.sampled_from([1, 8]))
def test_effects_are_the_contrasts_of_the_cells_means(a, b, c, d, base, k):
    found = coverage.effects([[a, b], [c, d]], k=k, n_resamples=20)
    means = [float(coverage.pass_at(cell, k).mean()) for cell in (a, b, c, d)]
    rows, columns = (means[2] + means[3] - means[0] - means[1]) / 2, (means[1] + means[3] - means[0] - means[2]) / 2
    assert found.rows.value == pytest.approx(rows, abs=1e-12)
    assert found.columns.value == pytest.approx(columns, abs=1e-12)
    assert found.interaction.value == pytest.approx(means[3] - means[2] - means[1] + means[0], abs=1e-12)
    assert found.larger.value == pytest.approx(abs(rows) - abs(columns), abs=1e-12)
    against = coverage.effects([[a, b], [c, d]], base, k, n_resamples=20)
    if not np.isnan(against.rows.value):
        changes = [coverage.support_change(base, cell, k, n_resamples=2).value for cell in (a, b, c, d)]
        assert against.rows.value == pytest.approx((changes[2] + changes[3] - changes[0] - changes[1]) / 2, abs=1e-9)


def test_effects_have_the_interval_of_their_runs_and_problems():
    rng = np.random.default_rng(0)
    cells = [[rng.beta(2, 5, (8, 100)), rng.beta(2, 5, (8, 100))], [rng.beta(3, 5, (8, 100)), rng.beta(3, 5, (8, 100))]]
    found = coverage.effects(cells)
    assert found.rows.low > 0 and found.columns.low < 0 < found.columns.high and found.rows.n == 8
    assert found.larger.low > 0
    turned = coverage.effects([[cells[0][0], cells[1][0]], [cells[0][1], cells[1][1]]])
    assert turned.larger.value == pytest.approx(-found.larger.value)


def test_effects_refuse_other_shapes():
    cell = np.full((2, 3), 0.5)
    with pytest.raises(ValueError, match="give two rows of two"):
        coverage.effects([[cell, cell]])
    with pytest.raises(ValueError, match=r"cells have \[3, 4\] problems"):
        coverage.effects([[cell, cell], [cell, np.full((2, 4), 0.5)]])
    with pytest.raises(ValueError, match="the runs of row 1, column 0"):
        coverage.effects([[cell, cell], [cell + 1, cell]])
