"""Coverage against enumeration on small cases, laws that hold for all inputs, and published tables."""

from itertools import combinations, product
from math import comb, isnan, log, nan

import numpy as np
import pytest
from hypothesis import assume, given
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


def test_cover_at_counts_equal_values_and_keeps_shapes() -> None:
    tenths = np.arange(11) / 10
    for i, tau in enumerate(np.linspace(0, 1, 11)):  # 0.30000000000000004 and its like
        assert coverage.cover_at(tenths, tau) == pytest.approx((11 - i) / 11)
    # the tolerance is relative: a threshold near 0 keeps zeros out
    assert coverage.cover_at([0.0, 1e-12], 1e-12) == 0.5
    assert coverage.cover_at(np.zeros((3, 5)), 0.1).shape == (3,)
    assert coverage.cover_at(np.zeros((3, 5)), [0.1, 0.2]).shape == (3, 2)


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


def test_threshold_is_the_published_one() -> None:
    for samples, published in ((8192, 3.7e-4), (1024, 2.9e-3), (256, 1.2e-2)):
        assert float(f"{coverage.threshold(samples):.1e}") == published
        # an answer that rare stays unseen with probability zeta, or a little less
        assert 0.045 < (1 - coverage.threshold(samples)) ** samples < 0.05


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


def test_support_change_without_any_support_is_undefined() -> None:
    found = coverage.support_change([0.0, 0.0], [[0.0, 0.0]], 4)
    assert np.isnan([found.value, found.low, found.high]).all()
    # defined as it is, undefined where a resample holds the second problem only
    found = coverage.support_change([0.5, 0.0], [[0.25, 0.0]], 1)
    assert found.value == pytest.approx(-0.25 / 0.625) and np.isnan([found.low, found.high]).all()


def test_accuracy_bins_by_hand() -> None:
    accuracy = [0, 0, 1e-9, 0.1, 0.1001, 0.3, 0.7, 0.9, 0.95, 1 - 1e-12, 1, 1, 1]
    assert coverage.accuracy_bins(accuracy).tolist() == [2, 2, 1, 1, 0, 0, 0, 1, 0, 1, 2, 3]
    assert coverage.accuracy_bins([[0, 0.5], [1, 1]], [0, 0.5, 1]).tolist() == [[1, 1, 0, 0], [0, 0, 0, 2]]
    # every tenth belongs to the bin that it closes, however the edge is rounded
    tenths = np.arange(1, 10) / 10
    for edges in (None, np.arange(11) / 10, np.append(np.cumsum([0, *[0.1] * 9]), 1)):
        assert coverage.accuracy_bins(tenths, edges).tolist() == [0, *[1] * 9, 0, 0]


def test_answer_entropy_by_hand() -> None:
    found = coverage.answer_entropy([[4, 0, 0], [1, 1, 2], [0, 0, 0]])
    np.testing.assert_allclose(found.plug_in, [0, 1.5 * log(2), nan])
    np.testing.assert_allclose(found.miller_madow, [0, 1.5 * log(2) + 2 / 8, nan])
    assert not np.signbit(found.plug_in[0])
    assert coverage.answer_entropy([3, 3]).plug_in == pytest.approx(log(2))


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


def test_effective_samples_by_hand() -> None:
    assert coverage.effective_samples([1, 1, 1, 1]) == 4
    assert coverage.effective_samples([[3, 1], [0, 2]]) == pytest.approx([16 / 10, 1])
    assert isnan(coverage.effective_samples([0.0, 0.0]))
    assert isnan(coverage.effective_samples([-np.inf, -np.inf], log=True))
    assert coverage.effective_samples([5e-324, 1e-320]) > 1 and coverage.effective_samples([1e300, 1e300]) == 2


# ---- from where on the base is ahead


def test_a_base_overtakes_where_the_curves_cross():
    """One problem solved in half of the samples and one never, against two solved in a tenth: 6 or 7 samples."""
    ks, base = [1, 2, 4, 6, 7, 8, 16], [0.1, 0.1]
    found = coverage.overtaken(base, [[0.5, 0.0], [0.5, 0.0]], ks)
    assert 6 < found.value < 7 and found.low <= found.value <= found.high and found.n == 2
    assert coverage.overtaken(base, [[0.5, 0.5], [0.5, 0.5]], ks).value == np.inf
    behind = coverage.overtaken(base, [[0.0, 0.0]], ks)
    assert behind.value == -np.inf and np.isnan(behind.low)


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


def test_problems_are_resampled_in_common() -> None:
    """Both groups change the same problems alike: without common problems the interval would be wide."""
    rng = np.random.default_rng(5)
    base, run = rng.random(30), rng.random(30)
    found = coverage.support_change(base, np.tile(run, (3, 1)), 2, np.tile(run, (4, 1)))
    assert (found.value, found.low, found.high) == pytest.approx((0, 0, 0), abs=1e-12) and found.n == 3
    alone = coverage.support_change(base, [run], 2)
    assert alone.high - alone.low > 0.05 and alone.n == 1
