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


def test_means_agree_more_and_more_with_their_number():
    points = attenuation.cosine_by_count(runs(np.random.default_rng(3), 0.05, 0.6), A, B, draws=60)
    assert [p.k for p in points] == list(range(1, K + 1))
    assert points[0].cosine < 0.06 and points[-1].cosine > 0.2
    assert all(after.cosine > before.cosine for before, after in zip(points, points[1:], strict=False))
    assert all(p.cosine == pytest.approx(p.predicted, abs=0.02) for p in points)
