"""Coverage against enumeration on small cases, laws that hold for all inputs, and published tables."""

from itertools import combinations, product
from math import nan

import numpy as np
import pytest
from helpers import every_resample
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from evoalign_lib.analysis import coverage
from evoalign_lib.analysis.coverage import Support


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


def test_variance_of_pass_at_counts_every_pair_of_disjoint_subsets() -> None:
    for n, k in ((2, 1), (4, 1), (5, 2), (6, 3), (7, 2)):
        chosen = list(combinations(range(n), k))
        firsts = [(min(one), min(two)) for one, two in product(chosen, chosen) if not {*one} & {*two}]
        for c in range(n + 1):
            exact = _brute_pass(c, n, k) ** 2 - np.mean([max(both) < c for both in firsts])
            assert coverage.variance_of_pass_at(c, n, k) == pytest.approx(exact, abs=1e-14)


GAPS = [
    ([1, -1, 1], 2.0),
    ([1, 1, -1], 8.0),
    ([0, 1, -1], 8.0),  # equal at the start, such as at a matched pass@1
    ([1, 0, 1], nan),  # touched
    ([1, 1, 0], nan),  # reached, not overtaken
    ([-1, 1, -1], nan),  # the second starts above
]


@pytest.mark.parametrize(("gap", "expected"), GAPS)
def test_crossing_by_hand(gap: list[float], expected: float) -> None:
    assert coverage.crossing([1, 4, 16], gap, np.zeros(3)) == pytest.approx(expected, nan_ok=True)


@settings(max_examples=40)
@given(*[st.integers(0, 50)] * 4)
def test_rates_of_support_from_sets(kept: int, won: int, lost: int, out: int) -> None:
    before = np.repeat([True, False, True, False], [kept, won, lost, out])
    after = np.repeat([True, True, False, False], [kept, won, lost, out])
    assume(len(before))
    found = coverage.support(before, after)
    assert found == Support(kept, won, lost, out)

    def share(over: float, under: float) -> float:
        return over / under if under else nan

    srr, ndr = share(kept, kept + lost), share(won, kept + won)
    assert [found.srr, found.ndr] == pytest.approx([srr, ndr], nan_ok=True)
    assert found.nscr == pytest.approx(share(won - lost, kept + won + lost), nan_ok=True)


def test_null_matches_the_enumeration() -> None:
    p = np.array([0.1, 0.3, 0.02, 1.0, 0.0])
    found = coverage.null_nscr(p, 4, n_resamples=40_000)
    q = 1 - (1 - p) ** 4
    assert found.support.kept == pytest.approx((q**2).sum())
    assert found.support.won == found.support.lost == pytest.approx((q * (1 - q)).sum())
    assert found.support.nscr == 0 and found.support.total == pytest.approx(5)
    sets = [(solved, np.prod(np.where(solved, q, 1 - q))) for solved in product((0, 1), repeat=5)]
    pairs = [(coverage.support(b, a).nscr, one * two) for (b, one), (a, two) in product(sets, sets) if one * two]
    values, chances = zip(*pairs, strict=True)
    spread = np.sqrt(np.average(np.square(values), weights=chances))
    assert np.average(values, weights=chances) == pytest.approx(0, abs=1e-12)
    assert found.sd == pytest.approx(spread, rel=0.02)
    assert (found.low, found.high) == pytest.approx((-2 / 3, 2 / 3))


def _nscr(before: np.ndarray, after: np.ndarray, k: int) -> float:
    return coverage.support(coverage.pass_at(before, k), coverage.pass_at(after, k)).nscr


def test_support_change_matches_the_enumeration() -> None:
    base, runs = np.array([0.1, 0.4, 0.05]), np.array([[0.3, 0.4, 0.0], [0.0, 0.9, 0.02], [0.05, 0.1, 0.6]])
    found = coverage.support_change(base, runs, 3, n_resamples=20_000)
    assert found.value == pytest.approx(np.mean([_nscr(base, run, 3) for run in runs])) and found.n == 3
    each = [np.array([_nscr(base[own], run[own], 3) for run in runs]) for own in every_resample(3)]
    exact = [changes[chosen].mean() for changes in each for chosen in every_resample(3)]
    ends = np.quantile(exact, [0.025, 0.975], method="inverted_cdf")
    assert (found.low, found.high) == pytest.approx(ends, abs=0.02)


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


@settings(max_examples=25)
@given(CELL, CELL, CELL, CELL, arrays(np.float64, 6, elements=st.floats(0, 1)), st.sampled_from([1, 8]))
def test_effects_are_the_contrasts_of_the_cells_means(a, b, c, d, base, k):
    found = coverage.effects([[a, b], [c, d]], k=k, n_resamples=20)
    means = [float(coverage.pass_at(cell, k).mean()) for cell in (a, b, c, d)]
    rows, columns = (means[2] + means[3] - means[0] - means[1]) / 2, (means[1] + means[3] - means[0] - means[2]) / 2
    expected = rows, columns, means[3] - means[2] - means[1] + means[0], abs(rows) - abs(columns)
    assert [effect.value for effect in found] == pytest.approx(expected, abs=1e-12)
    against = coverage.effects([[a, b], [c, d]], base, k, n_resamples=20)
    if not np.isnan(against.rows.value):
        changes = [coverage.support_change(base, cell, k, n_resamples=2).value for cell in (a, b, c, d)]
        assert against.rows.value == pytest.approx((changes[2] + changes[3] - changes[0] - changes[1]) / 2, abs=1e-9)


def test_problems_are_resampled_in_common() -> None:
    """Both groups change the same problems alike: without common problems the interval would be wide."""
    rng = np.random.default_rng(5)
    base, run = rng.random(30), rng.random(30)
    found = coverage.support_change(base, np.tile(run, (3, 1)), 2, np.tile(run, (4, 1)))
    assert (found.value, found.low, found.high) == pytest.approx((0, 0, 0), abs=1e-12) and found.n == 3
    alone = coverage.support_change(base, [run], 2)
    assert alone.high - alone.low > 0.05 and alone.n == 1
