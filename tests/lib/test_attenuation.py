"""A planted pair: signals far below the noise of single runs are found, with their cosine; without one nothing is."""

import math

import numpy as np
import pytest

from evoalign_lib.analysis import attenuation

K, D = 16, 20_000
A, B = range(K), range(K, 2 * K)


def runs(rng: np.random.Generator, share: float, cosine: float, k: int = K, d: int = D) -> np.ndarray:
    """(2 k, 2 k) products of two groups of runs: noise of norm 1, a signal of this squared norm in each group.

    Signals lie in the first two coordinates, which is any two directions of isotropic noise.
    """
    vectors = rng.standard_normal((2 * k, d)) / math.sqrt(d)
    vectors[:, 0] += math.sqrt(share) * np.where(np.arange(2 * k) < k, 1.0, cosine)
    vectors[k:, 1] += math.sqrt(share * (1 - cosine**2))
    return vectors @ vectors.T


def test_the_cosine_of_planted_signals_is_recovered_where_runs_look_orthogonal():
    rng, covered, known, values = np.random.default_rng(0), 0, 0, []
    for _ in range(12):
        found = attenuation.corrected_cosine(runs(rng, 0.02, 0.6), A, B)
        values.append(found.value.value)
        covered += found.value.low <= 0.6 <= found.value.high
        assert abs(found.run_cosine) < 0.02 and found.mean_cosine < 0.3  # neither shows that signals agree so much
        assert found.value.low > 0 and found.cross.low > 0
        known += sum(signal.low <= 0.02 <= signal.high for signal in found.signals)
    assert np.mean(values) == pytest.approx(0.6, abs=0.03) and covered >= 11 and known >= 21


def test_without_signal_nothing_is_found():
    rng, crossed, found_signal, found_cosine = np.random.default_rng(2), 0, 0, 0
    for _ in range(60):
        found = attenuation.corrected_cosine(runs(rng, 0.0, 0.0, k=8, d=500), range(8), range(8, 16))
        crossed += found.cross.low > 0 or found.cross.high < 0
        found_signal += any(s.low > 0 for s in found.signals)
        found_cosine += found.value.low > 0 or found.value.high < 0
        assert math.isnan(found.value.value) == any(s.value <= 0 for s in found.signals)
    assert crossed <= 6 and found_signal <= 8 and found_cosine <= 2


# ---- what to expect of ES


def climbs(rng: np.random.Generator, rho: float, K: int, T: int, N: int, d: int) -> np.ndarray:
    """(K, d) displacements of ES with alpha 1; fitness correlates so with the noise along the first coordinate."""
    moved = np.zeros((K, d))
    for _ in range(T):
        noise = rng.standard_normal((K, N, d))
        fitness = rho * noise[..., 0] + math.sqrt(1 - rho**2) * rng.standard_normal((K, N))
        z = fitness - fitness.mean(axis=1, keepdims=True)
        moved += np.einsum("kn,knd->kd", z / z.std(axis=1, keepdims=True), noise) / N
    return moved


def test_share_and_projection_of_es_are_the_expected_ones():
    rho, K, T, N, d = 0.6, 16, 8, 30, 3_000
    moved = climbs(np.random.default_rng(4), rho, K, T, N, d)
    found, share = attenuation.signal(moved @ moved.T).share, attenuation.expected_share(rho, T, N, d)
    assert found.low < share < found.high and found.value == pytest.approx(share, rel=0.2)
    assert attenuation.expected_share(1, T, N, d) == T * N / d
    along = moved / math.sqrt(T / N)  # in standard deviations of a walk's component
    assert along[:, 0].mean() == pytest.approx(attenuation.projection_z(rho, T, N), rel=0.1)
    aslant = along[:, :2] @ (0.6, 0.8)
    assert aslant.mean() == pytest.approx(attenuation.projection_z(rho, T, N, cosine=0.6), rel=0.15)
    assert along[:, 1:].std() == pytest.approx(1, abs=0.02) and abs(along[:, 1:].mean()) < 0.02
    # the norm is that of a walk, but for the signal
    assert np.square(moved).sum(1).mean() == pytest.approx(d * T / N * (1 + share), rel=0.01)


def test_pairs_without_a_signal_are_spread_as_expected():
    rng, K, d = np.random.default_rng(5), 6, 400
    grams = [moved @ moved.T for moved in (climbs(rng, 0.0, K, 3, 6, d) for _ in range(300))]
    z = [attenuation.pairs_z(attenuation.signal(gram).share.value, d, K) for gram in grams]
    assert np.std(z) == pytest.approx(1, abs=0.12) and abs(np.mean(z)) < 0.2
