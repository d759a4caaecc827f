"""Fitness shaping against its definitions, and what an update draws; `equivalence` has whole steps and schedules."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import rankdata

from evoalign_lib.update_rules import centred_ranks, standardise

FITNESS = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=40).map(np.array)


@given(FITNESS)
def test_standardise_has_mean_zero_and_deviation_one(fitness):
    z = standardise(fitness)
    assert z.dtype == np.float64 and z.shape == fitness.shape
    if not z.any():
        assert np.ptp(fitness) <= 1e-5 * max(1, np.abs(fitness).max())
        return
    assert abs(z.mean()) < 1e-3 and z.std() == pytest.approx(1, abs=1e-3)
    order = np.argsort(fitness, kind="stable")
    assert (np.diff(z[order]) >= 0).all()  # the best member stays the best


@pytest.mark.parametrize("shaped", [standardise, centred_ranks])
@given(st.floats(-1e6, 1e6), st.integers(2, 30), st.integers(0, 1000))
def test_ties_with_float_noise_are_ties(shaped, value, n, seed):
    # sums of the same rewards in different orders
    jitter = np.random.default_rng(seed).integers(-2, 3, n) * np.spacing(value)
    assert not shaped(value + jitter).any()


# ---- centred ranks


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=40).map(lambda values: np.array(values) / 8))
def test_centred_ranks_by_definition(fitness):
    ranks = centred_ranks(fitness)
    assert ranks.tolist() == pytest.approx(((rankdata(fitness) - 1) / (len(fitness) - 1) - 0.5).tolist(), abs=1e-15)
    assert abs(ranks.sum()) < 1e-12 and np.abs(ranks).max() <= 0.5
    # any increasing function of the reward gives the same
    assert centred_ranks(np.exp(3 * fitness) - 7).tolist() == ranks.tolist()
