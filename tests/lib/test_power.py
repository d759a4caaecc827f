"""Power against published tables, closed forms, and the tests themselves run on drawn scores."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import f
from statsmodels.stats.power import TTestIndPower

from evoalign_lib.analysis import power, stats


def test_difference_is_the_non_central_t_and_goes_on_where_that_is_nan() -> None:
    for n, effect in ((2, 3.0), (3, 1.0), (8, 0.5), (16, 1.0), (100, 0.3)):
        assert power.difference(n, effect, 1.0) == pytest.approx(TTestIndPower().power(effect, n, 0.05), abs=1e-9)
    for n, effect in ((16, 10.0), (64, 2.0), (393, 1.0), (20_000, 0.5)):
        assert power.difference(n, effect, 1.0) == pytest.approx(1.0, abs=1e-9)


def test_equivalence_is_the_share_of_drawn_samples_that_tost_declares_a_match() -> None:
    rng = np.random.default_rng(1)
    for difference in (0.0, 0.3):
        found = [stats.welch_equivalence(rng.normal(difference, 1, 8), rng.normal(0, 1, 8), 1.2) for _ in range(500)]
        share = np.mean([match.equivalent for match in found])
        assert share == pytest.approx(power.equivalence(8, 1.2, 1.0, difference), abs=0.07)


def test_std_ratio_is_the_share_of_drawn_samples_that_an_f_test_tells_apart() -> None:
    rng = np.random.default_rng(2)
    ratio = rng.normal(0, 2, (16, 8000)).var(axis=0, ddof=1) / rng.normal(0, 1, (16, 8000)).var(axis=0, ddof=1)
    found = np.mean((ratio > f.ppf(0.975, 15, 15)) | (ratio < f.ppf(0.025, 15, 15)))
    assert found == pytest.approx(power.std_ratio(16, 2.0), abs=0.02)
    assert power.std_ratio(16, 0.5) == pytest.approx(power.std_ratio(16, 2.0))
    assert power.std_ratio(16, 1.0) == pytest.approx(0.05)


@given(st.integers(2, 64), st.floats(0.2, 0.95), st.sampled_from([0.05, 0.0125]), st.floats(1e-3, 10))
@settings(max_examples=6)
def test_a_detectable_effect_has_the_power_it_was_asked_for(n: int, share: float, alpha: float, std: float) -> None:
    effect = power.detectable_difference(n, std, share, alpha)
    assert power.difference(n, effect, std, alpha) == pytest.approx(share, abs=1e-6)
    margin = power.detectable_margin(n, std, share, alpha)
    assert power.equivalence(n, margin, std, 0.0, alpha) == pytest.approx(share, abs=1e-5)
    ratio = power.detectable_std_ratio(n, share, alpha)
    assert ratio > 1 and power.std_ratio(n, ratio, alpha) == pytest.approx(share, abs=1e-6)
