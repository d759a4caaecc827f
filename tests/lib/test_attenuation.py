"""A planted pair: signals far below the noise of single runs are found, with their cosine; without one nothing is."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

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


def test_orthogonal_signals_are_called_orthogonal():
    rng, significant = np.random.default_rng(1), 0
    for _ in range(12):
        found = attenuation.corrected_cosine(runs(rng, 0.02, 0.0), A, B)
        significant += found.value.low > 0 or found.value.high < 0
        assert abs(found.value.value) < 0.15
    assert significant <= 2


def test_without_signal_nothing_is_found():
    rng, crossed, found_signal, found_cosine = np.random.default_rng(2), 0, 0, 0
    for _ in range(120):
        found = attenuation.corrected_cosine(runs(rng, 0.0, 0.0, k=8, d=500), range(8), range(8, 16))
        crossed += found.cross.low > 0 or found.cross.high < 0
        found_signal += any(s.low > 0 for s in found.signals)
        found_cosine += found.value.low > 0 or found.value.high < 0
        assert math.isnan(found.value.value) == any(s.value <= 0 for s in found.signals)
    assert crossed <= 10 and found_signal <= 14 and found_cosine <= 3


def test_means_agree_more_and_more_with_their_number_and_the_corrected_value_stays():
    points = attenuation.cosine_by_count(runs(np.random.default_rng(3), 0.05, 0.6), A, B, draws=60)
    assert [p.k for p in points] == list(range(1, K + 1))
    assert points[0].cosine < 0.06 and points[-1].cosine > 0.2
    assert all(after.cosine > before.cosine for before, after in zip(points, points[1:], strict=False))
    assert all(p.cosine == pytest.approx(p.predicted, abs=0.02) for p in points)
    assert math.isnan(points[0].corrected) and points[0].undefined == 1
    assert all(p.corrected == pytest.approx(0.6, abs=0.08) for p in points[3:])


def test_signal_of_a_group_and_its_ceilings():
    gram = runs(np.random.default_rng(4), 0.1, 0.6)
    found = attenuation.signal(gram, A)
    assert found.square.low <= 0.1 <= found.square.high and found.square.n == K
    assert found.share.value == pytest.approx(0.1 / 1.1, abs=0.01) and found.run_cosine == pytest.approx(
        0.1 / 1.1, abs=0.01
    )
    assert found.mean_norm == pytest.approx(math.sqrt(0.1 + 1 / K), abs=0.01)
    # halves of 8: signal over signal + noise / 8
    assert attenuation.split_half(gram, A, draws=50) == pytest.approx(0.1 / (0.1 + 1 / 8), abs=0.02)
    assert attenuation.split_half(gram, range(3), draws=50) == pytest.approx(0.1 / 1.1, abs=0.04)


@given(hnp.arrays(np.float64, (5, 12), elements=st.floats(-1, 1)), st.floats(0.01, 100))
@settings(max_examples=40)
def test_products_of_different_runs_equal_brute_force_and_lengths_change_no_ratio(vectors, factor):
    gram = vectors @ vectors.T
    square = attenuation.signal(gram, range(3)).square.value
    brute = np.mean([vectors[i] @ vectors[j] for i in range(3) for j in range(3) if i != j])
    assert square == pytest.approx(brute, abs=1e-9)
    one, other = (attenuation.corrected_cosine(g, [0, 1, 2], [3, 4]) for g in (gram, factor**2 * gram))
    assert one.cross.value == pytest.approx(
        np.mean([vectors[i] @ vectors[j] for i in range(3) for j in (3, 4)]), abs=1e-9
    )
    means = vectors[:3].mean(0), vectors[3:].mean(0)
    lengths = np.prod([np.linalg.norm(m) for m in means])
    if lengths > 1e-3:
        assert one.mean_cosine == pytest.approx(means[0] @ means[1] / lengths, abs=1e-6)
        assert other.mean_cosine == pytest.approx(one.mean_cosine, abs=1e-6)
    if min(s.value for s in one.signals) > 1e-3:
        assert other.value.value == pytest.approx(one.value.value, rel=1e-6, abs=1e-9)


def test_runs_that_share_draws_are_not_multiplied():
    rng = np.random.default_rng(5)
    shared = rng.standard_normal((8, 4000))
    vectors = np.concatenate([shared + 0.1 * rng.standard_normal((8, 4000)) for _ in range(2)]) / math.sqrt(4000)
    vectors[:, 0] += 0.5  # signals of the two groups are equal: 0.25
    gram = vectors @ vectors.T
    plain, paired = (attenuation.corrected_cosine(gram, range(8), range(8, 16), paired=p) for p in (False, True))
    assert plain.value.value > 1.3  # every run has met its own noise
    assert paired.value.low <= 1 <= paired.value.high and paired.cross.value == pytest.approx(0.25, abs=0.02)


def test_a_projection_splits_a_displacement():
    rng = np.random.default_rng(6)
    vectors = rng.standard_normal((5, 30))
    vectors[3] = vectors[1] - 2 * vectors[2]  # dependent
    gram = vectors @ vectors.T
    found = attenuation.projection(gram, 0, [1, 2, 3])
    basis, _ = np.linalg.qr(vectors[1:3].T)
    inside = basis @ (basis.T @ vectors[0])
    assert found.rank == 2 and found.along == pytest.approx(np.linalg.norm(inside))
    assert found.rest == pytest.approx(np.linalg.norm(vectors[0] - inside))
    assert found.share == pytest.approx(found.along**2 / (vectors[0] @ vectors[0]))
    one = attenuation.projection(gram, 0, [4])
    assert one.along == pytest.approx(vectors[0] @ vectors[4] / np.linalg.norm(vectors[4]))  # with its sign
    whole = attenuation.projection(gram, 3, [1, 2])
    assert whole.share == pytest.approx(1) and whole.rest == pytest.approx(0, abs=1e-5)
    nothing = attenuation.projection(np.diag([1.0, 0.0]), 0, [1])
    assert (nothing.along, nothing.rest, nothing.share, nothing.rank) == (0, 1, 0, 0)
    assert math.isnan(attenuation.projection(np.diag([0.0, 1.0]), 0, [1]).share)


def test_groups_that_cannot_be_compared_are_refused():
    gram = np.eye(6)
    for a, b, message in (
        ([0], [1, 2], r"a is \[0\]: signal and noise"),
        ([0, 1], [1, 2], "run 1 is in both groups"),
        ([0, 0], [1, 2], "different runs"),
        ([0, 9], [1, 2], "there are runs 0 to 5"),
    ):
        with pytest.raises(ValueError, match=message):
            attenuation.corrected_cosine(gram, a, b)
    with pytest.raises(ValueError, match="as many runs each"):
        attenuation.corrected_cosine(gram, [0, 1, 2], [3, 4], paired=True)
    for bad in (np.ones((2, 3)), np.full((2, 2), math.nan)):
        with pytest.raises(ValueError, match="finite"):
            attenuation.signal(bad)
    with pytest.raises(ValueError, match="at least one"):
        attenuation.projection(gram, 0, [])
