"""Barriers of known curves, and estimates of planted ones in simulations: what noise adds is what is taken away."""

from itertools import product

import numpy as np
import pytest
from scipy.special import ndtri

from evoalign_lib.analysis import connectivity as lmc

POINTS = 11
ALPHAS = np.linspace(0, 1, POINTS)
BUMP = 4 * ALPHAS * (1 - ALPHAS)  # quadratic, height 1 in the middle


def _outcomes(rng: np.random.Generator, problems: int, height: float, slope: float = 0.0, shape=BUMP) -> np.ndarray:
    """Return (problems, points), 0 or 1: errors whose rate has this bump; a hard problem is hard at all points."""
    rate = 0.3 + slope * ALPHAS + height * shape
    kernel = 0.7 + 0.3 * np.exp(-np.abs(ALPHAS[:, None] - ALPHAS) / 0.3)
    difficulty = rng.standard_normal((problems, POINTS)) @ np.linalg.cholesky(kernel).T
    return (difficulty < ndtri(rate)).astype(float)


def test_the_half_gain_of_known_climbs() -> None:
    late = np.maximum(0, ALPHAS - 0.8)
    found = lmc.half_gain([ALPHAS, late, -ALPHAS, 0 * ALPHAS])
    assert found[:2] == pytest.approx([0.5, 0.9]) and np.isnan(found[2:]).all()
    # against a KL that grows with the square of the distance, a linear climb is half done at a quarter
    assert lmc.half_gain(ALPHAS, 8 * ALPHAS**2, relative=True) == pytest.approx(0.25, abs=0.01)
    assert lmc.half_gain([ALPHAS, late], [8 * ALPHAS**2, ALPHAS]) == pytest.approx([2.0, 0.9], abs=0.1)
    # isotonic regression: a spike before the rise is no rise
    spiked = np.where(np.arange(POINTS) == 2, 0.15, late)
    assert lmc.half_gain(spiked) < 0.2 < 0.85 < lmc.half_gain(spiked, monotone=True)
    assert np.isnan(lmc.half_gain([0, np.nan, 1])) and np.isnan(lmc.half_gain([0, np.nan, 1], monotone=True))


# ---- barriers


def test_heights_of_curves_by_hand() -> None:
    errors = [0.2, 0.5, 0.1, 0.7, 0.4]
    # above the line 0.2, 0.25, 0.3, 0.35, 0.4; above the mean of the ends, 0.3
    assert lmc.barrier_line(errors) == pytest.approx(0.35)
    assert lmc.barrier_mean(errors) == pytest.approx(0.4)
    scaled = lmc.barrier_line([[3 + 2 * e for e in errors[::-1]], [0.1, np.nan, 0.3, 0.2, 0.3]])
    assert scaled[0] == pytest.approx(0.7) and np.isnan(scaled[1])
    straight = 0.1 + ALPHAS
    assert lmc.barrier_line(straight) == pytest.approx(0, abs=1e-12)
    assert lmc.barrier_mean(straight) == pytest.approx(0.5)


@pytest.mark.parametrize(("height", "most_bias", "least_covered"), [(0.0, 0.008, 0.85), (0.2, 0.025, 0.8)])
def test_what_noise_adds_to_a_sup_is_taken_away(height: float, most_bias: float, least_covered: float) -> None:
    """Over simulated single paths: bias and coverage of a flat one and of a planted bump."""
    missed, raw_missed, covered = [], [], []
    for seed in range(60):
        outcomes = _outcomes(np.random.default_rng(seed), 100, height)
        found = lmc.estimate_barrier(outcomes, n_resamples=150)
        assert found.raw == pytest.approx(lmc.barrier_line(outcomes.mean(0)))
        missed.append(found.interval.value - height)
        raw_missed.append(found.raw - height)
        covered.append(found.interval.low <= height <= found.interval.high)
    assert abs(np.mean(missed)) < most_bias < np.mean(raw_missed) and np.mean(covered) >= least_covered


def test_runs_are_resampled_as_pairs_that_share_them() -> None:
    """Without noise on problems the interval is that of the pigeonhole bootstrap, here of all resamples."""
    heights = np.array([[0.1, 0.3, 0.2], [0.0, 0.5, 0.4], [0.2, 0.9, 0.3]])
    outcomes = np.broadcast_to((heights[..., None] * BUMP)[:, :, None], (3, 3, 4, POINTS))
    found = lmc.estimate_barrier(outcomes, n_resamples=3000)
    every = [list(r) for r in product(range(3), repeat=3)]
    exact = np.array([heights[np.ix_(rows, columns)].mean() for rows in every for columns in every])
    assert (found.interval.low, found.interval.high) == pytest.approx(np.quantile(exact, [0.025, 0.975]), abs=0.02)
    assert found.pairs == pytest.approx(heights) and found.interval.n == 3
    # one arm against itself: pairs i < j; and a pair that is missing is left out
    inside = lmc.estimate_barrier(outcomes, within=True, n_resamples=50)
    assert inside.interval.value == pytest.approx(np.mean([0.3, 0.2, 0.4]))
    assert np.isnan(inside.pairs[np.tril_indices(3)]).all()
    fewer = np.array(outcomes)
    fewer[2, 1] = np.nan
    assert lmc.estimate_barrier(fewer, n_resamples=50).interval.value == pytest.approx((heights.sum() - 0.9) / 8)


def test_barriers_at_different_places_are_lower_in_the_mean_curve() -> None:
    early, late = np.zeros(POINTS), np.zeros(POINTS)
    early[3], late[7] = 0.2, 0.2
    rng = np.random.default_rng(0)
    outcomes = np.stack([np.stack([early, late])] * 2)[:, :, None] + rng.normal(0, 0.01, (2, 2, 50, 1))
    by_pairs, by_curve = (lmc.estimate_barrier(outcomes, across=a, n_resamples=100) for a in ("pairs", "curve"))
    assert by_pairs.interval.value == pytest.approx(0.2) and by_curve.raw == pytest.approx(0.1)


def test_equivalence_is_claimed_with_many_problems_and_not_for_a_barrier_at_the_margin() -> None:
    rng = np.random.default_rng(0)
    level = 0.3 + rng.normal(0, 0.2, (3000, 1))

    def bound(height: float) -> float:
        outcomes = level + height * BUMP + rng.normal(0, 0.2, (3000, POINTS))
        return lmc.upper_bound(lmc.estimate_barrier(outcomes, across="curve", n_resamples=150))

    assert 0.001 < bound(0.0) < 0.02
    # a barrier as high as the margin is called lower in about 5 % of samples at most
    assert np.mean([bound(0.02) < 0.02 for _ in range(30)]) <= 0.17


# ---- the half gain


def test_the_difference_of_two_arms_in_their_half_gain() -> None:
    rng, runs, problems = np.random.default_rng(0), 6, 80
    ease = rng.normal(0, 0.3, (problems, 1))  # shared by both arms
    linear, late = (
        np.array([ease + climb + rng.normal(0, 0.1, (problems, POINTS)) for _ in range(runs)])
        for climb in (ALPHAS, 5 * np.maximum(0, ALPHAS - 0.8))
    )
    both = lmc.half_gain_interval(late, None, linear, n_resamples=200)
    assert both.low < 0.4 < both.high and both.high - both.low < 0.05 and both.n == runs
    for kl in (4 * ALPHAS**2, np.tile(4 * ALPHAS**2, (runs, 1))):
        found = lmc.half_gain_interval(linear, kl, relative=True, monotone=True, n_resamples=50)
        assert found.value == pytest.approx(0.25, abs=0.02)
    linear[0] = 1 - ALPHAS  # a run that gains nothing is left out and not counted
    assert lmc.half_gain_interval(linear, n_resamples=50).n == runs - 1
    assert np.isnan(lmc.half_gain_interval(linear[:1], n_resamples=10).value)
