"""Barriers of known curves, and estimates of planted ones in simulations: what noise adds is what is taken away."""

from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.special import ndtri

from evoalign_lib.analysis import connectivity as lmc

POINTS = 11
ALPHAS = np.linspace(0, 1, POINTS)
BUMP = 4 * ALPHAS * (1 - ALPHAS)  # quadratic, height 1 in the middle
CURVES = hnp.arrays(np.float64, st.tuples(st.integers(1, 3), st.integers(3, 8)), elements=st.floats(-5, 5))


def _outcomes(rng: np.random.Generator, problems: int, height: float, slope: float = 0.0, shape=BUMP) -> np.ndarray:
    """Return (problems, points), 0 or 1: errors whose rate has this bump; a hard problem is hard at all points."""
    rate = 0.3 + slope * ALPHAS + height * shape
    kernel = 0.7 + 0.3 * np.exp(-np.abs(ALPHAS[:, None] - ALPHAS) / 0.3)
    difficulty = rng.standard_normal((problems, POINTS)) @ np.linalg.cholesky(kernel).T
    return (difficulty < ndtri(rate)).astype(float)


# ---- measured curves


@given(st.floats(-5, 5), st.floats(-5, 5), st.integers(3, 31))
def test_a_straight_path_has_no_barrier_and_half_the_difference_of_its_ends_above_their_mean(start, end, n) -> None:
    line = start + np.linspace(0, 1, n) * (end - start)
    assert lmc.barrier_line(line).height == pytest.approx(0, abs=1e-12)
    assert lmc.barrier_mean(line).height == pytest.approx(abs(end - start) / 2, abs=1e-12)
    assert lmc.dip(line).height == pytest.approx(0, abs=1e-12)


@given(CURVES, st.floats(0.1, 10), st.floats(-3, 3))
def test_heights_swap_scale_and_shift_as_they_should(curves: np.ndarray, scale: float, shift: float) -> None:
    alphas = np.linspace(0, 1, curves.shape[1]) ** 2  # any grid
    for height in (lmc.barrier_line, lmc.barrier_mean, lmc.dip):
        found = height(curves, alphas)
        assert found.height.shape == curves.shape[:1] and (found.height >= 0).all()
        swapped = height(curves[:, ::-1], 1 - alphas[::-1])
        assert swapped.height == pytest.approx(found.height, abs=1e-9)
        assert height(scale * curves + shift, alphas).height == pytest.approx(scale * found.height, abs=1e-9)
        rewards = height(-curves, alphas, rewards=True)
        assert rewards.height == pytest.approx(found.height, abs=1e-12) and (rewards.alpha == found.alpha).all()
    gap = np.abs(curves[:, 0] - curves[:, -1]) / 2
    line, mean = lmc.barrier_line(curves, alphas).height, lmc.barrier_mean(curves, alphas).height
    assert (mean >= gap - 1e-12).all() and (np.abs(mean - line) <= gap + 1e-9).all()


def test_heights_of_a_curve_by_hand() -> None:
    errors = [0.2, 0.5, 0.1, 0.7, 0.4]
    # above the line 0.2, 0.25, 0.3, 0.35, 0.4; above the mean 0.3; below the better end 0.2
    assert lmc.barrier_line(errors) == pytest.approx((0.35, 0.75))
    assert lmc.barrier_mean(errors) == pytest.approx((0.4, 0.75))
    assert lmc.dip(errors) == pytest.approx((0.1, 0.5))
    assert lmc.dip(errors, base=0.05) == pytest.approx((-0.05, 0.5))
    assert lmc.dip([-x for x in errors], base=-0.25, rewards=True) == pytest.approx((0.15, 0.5))
    both = lmc.dip([errors, errors], base=[0.05, 0.25])
    assert both.height == pytest.approx([-0.05, 0.15])


def test_a_point_that_is_not_measured_leaves_no_height_and_wrong_grids_are_refused() -> None:
    found = lmc.barrier_line([[0.1, np.nan, 0.3], [0.1, 0.3, 0.3]])
    assert np.isnan([found.height[0], found.alpha[0]]).all()
    assert found.height[1] == pytest.approx(0.1) and found.alpha[1] == 0.5
    for curve, alphas in (
        ([0, 1], None),
        ([0, 1, 0], [0, 1]),
        ([0, 1, 0], [0, 0.5, 0.9]),
        ([0, 1, 0, 0], [0, 0.5, 0.5, 1]),
    ):
        with pytest.raises(ValueError, match="alphas|inner point"):
            lmc.barrier_mean(curve, alphas)


# ---- the sup without its bias


def test_a_flat_path_has_no_barrier_where_the_raw_sup_claims_one_and_a_planted_one_is_covered() -> None:
    """Over simulated single paths: bias, coverage, and the level of the test of flatness."""
    for height, most_bias, least_covered in ((0.0, 0.006, 0.88), (0.2, 0.02, 0.83)):
        missed, raw_missed, covered, raw_covered, flat = [], [], [], [], []
        for seed in range(100):
            outcomes = _outcomes(np.random.default_rng(seed), 100, height)
            found = lmc.estimate_barrier(outcomes, n_resamples=200)
            raw = lmc.barrier_line(outcomes.mean(0))
            assert found.raw == pytest.approx(raw.height) and found.alpha == raw.alpha
            assert found.correction == pytest.approx(found.raw - found.interval.value) and found.correction > 0
            missed.append(found.interval.value - height)
            raw_missed.append(found.raw - height)
            covered.append(found.interval.low <= height <= found.interval.high)
            raw_covered.append(
                found.interval.low + found.correction <= height <= found.interval.high + found.correction
            )
            flat.append(found.p_flat < 0.05)
        # the mean of 100 has a standard error of 0.003 to 0.004
        assert abs(np.mean(missed)) < most_bias < np.mean(raw_missed)
        assert np.mean(covered) >= least_covered
        if height == 0:
            assert np.mean(raw_covered) < 0.8 and np.mean(flat) <= 0.12
        else:
            assert np.mean(flat) == 1


def test_the_null_of_a_line_subtracts_more_and_is_exact_for_a_flat_path() -> None:
    """The expected sup of a flat path, against the mean over fresh samples of problems."""
    rng = np.random.default_rng(0)
    fresh = [lmc.barrier_line(_outcomes(rng, 100, 0.0).mean(0)).height for _ in range(400)]
    outcomes = [_outcomes(rng, 100, 0.0) for _ in range(3)]
    outcomes.append(_outcomes(rng, 100, 0.4, shape=np.arange(POINTS) == 5))
    of_line = [lmc.estimate_barrier(o, null="line", n_resamples=400).correction for o in outcomes]
    of_near = [lmc.estimate_barrier(o, n_resamples=400).correction for o in outcomes]
    assert np.mean(of_line[:3]) == pytest.approx(np.mean(fresh), rel=0.12)
    assert all(near <= line for near, line in zip(of_near, of_line, strict=True))
    assert of_near[3] < 0.1 * of_line[3]  # nothing competes with a single high point


def test_the_estimate_swaps_ends_and_signs() -> None:
    outcomes = _outcomes(np.random.default_rng(1), 60, 0.1, slope=0.2).reshape(1, 60, POINTS) + np.zeros((2, 1, 1, 1))
    outcomes[1] += _outcomes(np.random.default_rng(2), 60, 0.0)
    for kind in ("line", "mean", "dip"):
        found = lmc.estimate_barrier(outcomes, ALPHAS, kind=kind, n_resamples=100)
        swapped = lmc.estimate_barrier(outcomes.swapaxes(0, 1)[..., ::-1], kind=kind, n_resamples=100)
        rewards = lmc.estimate_barrier(3 - 2 * outcomes, rewards=True, kind=kind, n_resamples=100)
        assert swapped.raw == pytest.approx(found.raw) and swapped.alpha == pytest.approx(1 - found.alpha)
        assert swapped.interval.value == pytest.approx(found.interval.value, abs=0.01)
        assert rewards.pairs == pytest.approx(2 * found.pairs) and rewards.draws == pytest.approx(2 * found.draws)
        assert rewards.p_flat == pytest.approx(found.p_flat, abs=0.02)


def test_runs_are_resampled_as_pairs_that_share_them() -> None:
    """Without noise on problems the draws are those of the pigeonhole bootstrap, here against all resamples."""
    heights = np.array([[0.1, 0.3, 0.2], [0.0, 0.5, 0.4], [0.2, 0.9, 0.3]])
    outcomes = np.broadcast_to((heights[..., None] * BUMP)[:, :, None], (3, 3, 4, POINTS))
    found = lmc.estimate_barrier(outcomes, n_resamples=4000)
    assert found.pairs == pytest.approx(heights) and found.correction == pytest.approx(0, abs=1e-12)
    every = [list(r) for r in product(range(3), repeat=3)]
    exact = np.array([heights[np.ix_(rows, columns)].mean() for rows in every for columns in every])
    assert found.draws.std() == pytest.approx(exact.std(), rel=0.05)
    assert (found.interval.low, found.interval.high) == pytest.approx(np.quantile(exact, [0.025, 0.975]), abs=0.02)
    assert found.interval.n == 3 and found.alpha == 0.5
    # one arm against itself: pairs i < j, of the runs drawn
    once = np.where(np.triu(np.ones((3, 3), bool), 1)[..., None, None], outcomes, np.nan)
    inside = lmc.estimate_barrier(once, within=True, n_resamples=4000)
    upper = np.triu(heights, 1)
    exact = []
    for drawn in every:
        times = np.bincount(drawn, minlength=3)
        weights = np.triu(np.outer(times, times), 1)
        if weights.any():
            exact.append((weights * upper).sum() / weights.sum())
    assert inside.interval.value == pytest.approx(np.mean([0.3, 0.2, 0.4]))
    assert inside.draws.std() == pytest.approx(np.std(exact), rel=0.05)
    assert np.isnan(inside.pairs[np.tril_indices(3)]).all() and len(inside.pair_draws) == len(inside.draws)
    # a pair that is missing is left out
    fewer = np.array(outcomes)
    fewer[2, 1] = np.nan
    assert lmc.estimate_barrier(fewer, n_resamples=50).interval.value == pytest.approx((heights.sum() - 0.9) / 8)


def test_barriers_at_different_places_are_lower_in_the_mean_curve() -> None:
    early, late = np.zeros(POINTS), np.zeros(POINTS)
    early[3], late[7] = 0.2, 0.2
    rng = np.random.default_rng(0)
    outcomes = np.stack([np.stack([early, late])] * 2)[:, :, None] + rng.normal(0, 0.01, (2, 2, 50, 1))
    by_pairs, by_curve = (lmc.estimate_barrier(outcomes, across=a, n_resamples=200) for a in ("pairs", "curve"))
    assert by_pairs.interval.value == pytest.approx(0.2) and by_curve.raw == pytest.approx(0.1)
    assert by_pairs.excess == pytest.approx(by_curve.excess) and by_curve.pairs.shape == (1, 1)


def test_intervals_over_pairs_and_problems_cover_the_mean_barrier() -> None:
    """4 + 4 runs whose barriers vary, on 60 problems shared by all pairs."""
    covered = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        a, b = (rng.normal(0.1, 0.03, 4) for _ in range(2))
        outcomes = np.array([[_outcomes(rng, 60, x + y) for y in b] for x in a])
        found = lmc.estimate_barrier(outcomes, n_resamples=150)
        covered.append(found.interval.low <= 0.2 <= found.interval.high)
    assert np.mean(covered) >= 0.8


def test_dips_are_found_and_a_flat_path_has_none() -> None:
    deep = _outcomes(np.random.default_rng(3), 300, -0.2)
    found = lmc.estimate_barrier(deep, kind="dip", n_resamples=200)
    assert found.interval.low > 0 and found.interval.low < 0.2 < found.interval.high + 0.03
    base = (np.random.default_rng(4).random(300) < 0.3).astype(float)
    below = lmc.estimate_barrier(deep, kind="base", base=base, n_resamples=200)
    assert below.raw == pytest.approx(base.mean() - deep.mean(0).min()) and below.interval.low > 0
    assert np.isnan(below.p_flat)
    flat = lmc.estimate_barrier(_outcomes(np.random.default_rng(5), 300, 0.0), kind="dip", n_resamples=200)
    assert flat.interval.low <= 0 <= flat.interval.high and flat.p_flat > 0.05
    # a path that stays above its base
    above = lmc.estimate_barrier(deep, kind="base", base=np.zeros(300), n_resamples=200)
    assert above.interval.high < 0


def test_the_sup_of_a_measured_noise_path_is_subtracted() -> None:
    rng, sd = np.random.default_rng(0), 0.02
    missed = []
    for _ in range(60):
        curves = 0.2 * BUMP * 0 + 0.3 + rng.normal(0, sd, (1, 1, 1, POINTS))
        noise = 0.3 + rng.normal(0, sd, (20, POINTS))
        found = lmc.estimate_barrier(curves, noise_paths=noise, n_resamples=50)
        assert found.correction == pytest.approx(lmc.barrier_line(noise).height.mean()) and np.isnan(found.p_flat)
        missed.append(found.interval.value)
    assert abs(np.mean(missed)) < 0.012 < found.correction
    # greedy decoding, evaluated again, changes nothing: its path has no noise, and nothing is subtracted
    assert lmc.estimate_barrier(curves, noise_paths=np.full((2, POINTS), 0.3)).correction == pytest.approx(0)
    # a path of noise for each pair
    both = np.concatenate([curves, curves])
    paths = np.stack([np.zeros((1, 5, POINTS)), noise[:5][None]])
    found = lmc.estimate_barrier(both, noise_paths=paths, n_resamples=50)
    assert found.raw - found.pairs[:, 0] == pytest.approx([0, lmc.barrier_line(noise[:5]).height.mean()])
    for wrong in (np.zeros((2, POINTS - 1)), np.zeros((3, 1, 5, POINTS)), np.full((2, POINTS), np.nan)):
        with pytest.raises(ValueError, match="noise_paths"):
            lmc.estimate_barrier(both, noise_paths=wrong)


def test_equivalence_is_claimed_with_many_problems_and_not_for_a_barrier_at_the_margin() -> None:
    rng = np.random.default_rng(0)
    level = 0.3 + rng.normal(0, 0.2, (3000, 1))

    def path(height: float) -> lmc.BarrierEstimate:
        return lmc.estimate_barrier(
            level + height * BUMP + rng.normal(0, 0.2, (3000, POINTS)), across="curve", n_resamples=150
        )

    flat = path(0.0)
    bound = lmc.below_margin(flat)
    assert bound.below and bound.p < 0.05 and bound.value <= bound.high < 0.02
    assert lmc.below_margin(flat, corrected=True).high < bound.high
    assert lmc.within_margin(flat).equivalent and lmc.within_margin(flat).p < 0.05
    assert not lmc.below_margin(flat, margin=0.001).below
    # a dip of four points is below any margin of a barrier, and not within it
    dipping = path(-0.04)
    assert lmc.below_margin(dipping).below and not lmc.within_margin(dipping).equivalent
    assert lmc.within_margin(dipping).interval.value == pytest.approx(-0.04, abs=0.015)
    # a barrier as high as the margin is called lower in about 5 % of samples at most
    called = [lmc.below_margin(path(0.02)).below for _ in range(40)]
    assert np.mean(called) <= 0.15
    with pytest.raises(ValueError, match="has one side only"):
        lmc.within_margin(lmc.estimate_barrier(_outcomes(rng, 20, 0.0), n_resamples=20))
    for test in (lmc.below_margin, lmc.within_margin):
        with pytest.raises(ValueError, match="margin is 0"):
            test(flat, 0)


def test_outcomes_that_do_not_fit_are_refused() -> None:
    good = np.zeros((2, 2, 5, POINTS))
    part = good.copy()
    part[0, 0, 0, 0] = np.nan
    cases = [
        ({"outcomes": np.zeros((2, 5, POINTS))}, "outcomes have the shape"),
        ({"outcomes": np.zeros((5, 2))}, "outcomes have the shape"),
        ({"outcomes": part}, "not finite"),
        ({"outcomes": np.full_like(good, np.nan)}, "no pair"),
        ({"outcomes": good[:1], "within": True}, "one list of runs"),
        ({"outcomes": good[:, :, :1]}, "one problem"),
        ({"outcomes": good, "kind": "base"}, "give base"),
        ({"outcomes": good, "base": np.zeros(5)}, "give base"),
        ({"outcomes": good, "kind": "base", "base": np.zeros(4)}, "base has the shape"),
        ({"outcomes": good, "kind": "sup"}, "kind='sup'"),
        ({"outcomes": good, "across": "runs"}, "across='runs'"),
        ({"outcomes": good, "null": "flat"}, "null='flat'"),
        ({"outcomes": good, "alphas": [0, 1]}, "alphas"),
        ({"outcomes": good, "n_resamples": 0}, "n_resamples"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            lmc.estimate_barrier(**arguments)


# ---- where a gain sets in


@given(CURVES, st.floats(0.1, 10), st.floats(-3, 3))
def test_the_half_gain_does_not_depend_on_the_scale_of_rewards(curves, scale, shift) -> None:
    assume((np.abs(curves[:, -1] - curves[:, 0]) > 0.01).all())
    x = np.arange(curves.shape[1]) ** 1.5
    found = lmc.half_gain(curves, x)
    assert (np.isnan(found) == (curves[:, -1] < curves[:, 0])).all()
    assert lmc.half_gain(curves, 2 * x) == pytest.approx(2 * found, nan_ok=True)
    assert lmc.half_gain(curves, x, relative=True) == pytest.approx(found / x[-1], nan_ok=True)
    # the place has the level of half the gain, and no earlier point reaches it
    for curve, place in zip(curves[np.isfinite(found)], found[np.isfinite(found)], strict=True):
        level = (curve[0] + curve[-1]) / 2
        assert np.interp(place, x, curve) == pytest.approx(level, abs=1e-6)
        assert (curve[x < place - 1e-9] < level + 1e-9).all()
        scaled = lmc.half_gain(scale * curve + shift, x)
        assert np.interp(scaled, x, curve) == pytest.approx(level, abs=1e-6)


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
    for wrong in (([1.0], None), (ALPHAS, [0, 1]), (np.zeros((2, 3)), np.zeros((3, 3)))):
        with pytest.raises(ValueError):
            lmc.half_gain(*wrong)


def test_noise_makes_a_first_crossing_early_and_a_monotone_fit_less_so() -> None:
    rng = np.random.default_rng(0)
    late = np.maximum(0, ALPHAS - 0.6) + rng.normal(0, 0.1, (400, POINTS))
    exact, first, fitted = 0.8, *(np.nanmean(lmc.half_gain(late, monotone=m)) for m in (False, True))
    # 400 curves: a standard error below 0.01
    assert first < exact - 0.05 and first + 0.02 < fitted < exact + 0.02


def test_the_difference_of_two_arms_in_their_half_gain() -> None:
    rng, runs, problems = np.random.default_rng(0), 6, 80
    ease = rng.normal(0, 0.3, (problems, 1))  # shared by both arms
    linear = np.array([ease + ALPHAS + rng.normal(0, 0.1, (problems, POINTS)) for _ in range(runs)])
    late = np.array(
        [ease + 5 * np.maximum(0, ALPHAS - 0.8) + rng.normal(0, 0.1, (problems, POINTS)) for _ in range(runs)]
    )
    both = lmc.half_gain_interval(late, None, linear, n_resamples=300)
    assert both.low < 0.4 < both.high and both.high - both.low < 0.05 and both.n == runs
    alone = lmc.half_gain_interval(late, n_resamples=300, monotone=True)
    assert alone.low < 0.9 < alone.high
    # against KL: on all problems alike, by run, by problem
    kl = 4 * ALPHAS**2
    by_run = np.tile(kl, (runs, 1))
    by_problem = by_run[:, None] * rng.uniform(0.5, 1.5, (runs, problems, 1))
    found = [lmc.half_gain_interval(linear, x, relative=True, n_resamples=100) for x in (kl, by_run, by_problem)]
    for interval in found:
        assert interval.low < 0.26 < interval.high + 0.01 and interval.value == pytest.approx(found[0].value)
    absolute = lmc.half_gain_interval(linear, by_problem, n_resamples=100)
    assert absolute.high - absolute.low > found[2].high - found[2].low
    # a run that gains nothing is left out and not counted
    stuck = linear.copy()
    stuck[0] = 1 - ALPHAS
    fewer = lmc.half_gain_interval(stuck, n_resamples=100)
    assert fewer.n == runs - 1 and fewer.value == pytest.approx(lmc.half_gain(linear[1:].mean(1)).mean())
    none = lmc.half_gain_interval(stuck[:1], n_resamples=10)
    assert none.n == 0 and np.isnan([none.value, none.low, none.high]).all()
    for wrong in ((linear[0],), (linear * np.nan,), (linear, None, late[:, :5]), (linear, np.zeros((2, POINTS)))):
        with pytest.raises(ValueError):
            lmc.half_gain_interval(*wrong)
