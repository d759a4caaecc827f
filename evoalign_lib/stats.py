"""Intervals over seeds and problems, and the packed per-problem results that they are computed from.

The one currency is a matrix (seeds x problems) of the share of right answers: seeds are the units, problems a random
effect. Every interval is a 95 % percentile bootstrap interval drawn from a Generator made here from `seed`; none reads
or moves the global random state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, nan
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_LEVELS = (0.025, 0.975)
_SAMPLES = 16
_DIGITS = "0123456789abcdefg"
_CHUNK = 256


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % interval and the number of units behind it."""

    value: float
    """The estimate, in the unit of the quantity."""
    low: float
    """Lower end; NaN where one unit gives no interval."""
    high: float
    """Upper end; NaN where one unit gives no interval."""
    n: int
    """Number of units (seeds, repeats)."""

    def format(self, percent: bool = True, digits: int = 1) -> str:
        """Return "value [low, high]", times 100 without the sign if percent, with so many decimals.

        >>> Interval(0.412, 0.39, 0.4304, 8).format()
        '41.2 [39.0, 43.0]'
        """
        scale = 100 if percent else 1
        # adding 0.0 after rounding turns -0.0 into 0.0
        value, low, high = (f"{round(scale * x, digits) + 0.0:.{digits}f}" for x in (self.value, self.low, self.high))
        return f"{value} [no interval, n = {self.n}]" if isnan(self.low) else f"{value} [{low}, {high}]"

    def detectable(self) -> float:
        """Return the smallest effect that an interval of this width detects with 80 % power, in the quantity's unit.

        (z.975 + z.80) standard errors, the standard error being the interval's width / (2 z.975).

        >>> round(Interval(0.0, -1.96, 1.96, 8).detectable(), 2)
        2.8
        """
        return (self.high - self.low) * (1.959964 + 0.841621) / (2 * 1.959964)


def crossed_bootstrap(
    matrix: ArrayLike, baseline: ArrayLike | None = None, n_resamples: int = 10_000, seed: int = 0
) -> Interval:
    """Return the mean of a matrix, or its mean difference to a baseline on the same problems, with an interval.

    Seeds and problems are resampled independently of one another (the pigeonhole bootstrap); both arms of a difference
    share each resample of the problems. The interval is too wide where chance on single problems dominates (it counts
    that variance three times) and too narrow where the spread between few seeds dominates (by 1 - 1/seeds in variance:
    with 8 seeds it then covers about 91 %).

    matrix: (seeds, problems), share of right answers. A single row gives the interval over problems only.
    baseline: None; or (problems,), a fixed model; or (other seeds, problems), an arm whose seeds are resampled too.
    Returns the interval, whose n is the number of seeds, of the smaller arm if there are two.
    Raises ValueError for other shapes and for values that are not finite.
    Source: Owen, The pigeonhole bootstrap, Annals of Applied Statistics 2007.
    """
    arm = _finite(matrix, "matrix", 2)
    arms = [arm]
    # a fixed model moves with the problems alone: subtracting it first keeps the pairing
    if baseline is not None:
        other = _finite(baseline, "baseline", np.ndim(baseline))
        if other.ndim not in (1, 2) or other.shape[-1] != arm.shape[1]:
            raise ValueError(
                f"baseline has shape {other.shape} and the matrix {arm.shape}: give ({arm.shape[1]},) or "
                f"(seeds, {arm.shape[1]}), the same problems in the same order"
            )
        arms = [arm - other] if other.ndim == 1 else [arm, other]
    value = arms[0].mean() - (arms[1].mean() if len(arms) == 2 else 0.0)
    low, high = np.quantile(_crossed_resamples(arms, n_resamples, np.random.default_rng(seed)), _LEVELS)
    return Interval(float(value), float(low), float(high), min(len(a) for a in arms))


def bootstrap_mean(values: ArrayLike, n_resamples: int = 10_000, seed: int = 0) -> Interval:
    """Return the mean over seeds with its percentile bootstrap interval (scipy.stats.bootstrap, not BCa).

    Percentile, because BCa is undefined for a sample of equal values, which censored and saturated runs give.

    values: (seeds,). One value has no interval: low and high are NaN.
    Raises ValueError for another shape, an empty sample, and values that are not finite.
    """
    from scipy.stats import bootstrap

    sample = _finite(values, "values", 1)
    value = float(sample.mean())
    if len(sample) == 1:
        return Interval(value, nan, nan, 1)
    rng = np.random.default_rng(seed)
    drawn = bootstrap((sample,), np.mean, n_resamples=n_resamples, method="percentile", vectorized=True, rng=rng)
    return Interval(value, float(drawn.confidence_interval.low), float(drawn.confidence_interval.high), len(sample))


def iqm(values: ArrayLike) -> float:
    """Return the interquartile mean: the mean without the floor(n/4) smallest and the floor(n/4) largest values.

    values: any shape, pooled. Source: Agarwal et al. 2021 (arXiv 2108.13264).
    Raises ValueError for an empty sample and values that are not finite.

    >>> iqm([100, 1, 2, 3, 4, 5, 6, -100])
    3.5
    """
    pooled = np.sort(_finite(np.ravel(values), "values", 1))
    cut = len(pooled) // 4
    return float(pooled[cut : len(pooled) - cut].mean())


def curve_band(
    matrix: ArrayLike, n_resamples: int = 10_000, seed: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return mean, low and high of curves: pointwise 95 % percentile bootstrap over seeds, whole curves resampled.

    matrix: (seeds, points). Returns three arrays (points,); low and high are NaN for a single seed.
    Raises ValueError for another shape and values that are not finite.
    """
    curves = _finite(matrix, "matrix", 2)
    mean = curves.mean(axis=0)
    if len(curves) == 1:
        return mean, np.full_like(mean, nan), np.full_like(mean, nan)
    counts = _resample_counts(np.random.default_rng(seed), n_resamples, len(curves))
    low, high = np.quantile(counts @ curves / len(curves), _LEVELS, axis=0)
    return mean, low, high


def accuracy_matrix(records: Sequence[dict[str, Any]], decoding: str = "greedy") -> NDArray[np.float64]:
    """Return the test results of runs as a matrix (seeds x problems), rows in the order of the records.

    records: run records with a `test` block. decoding: "greedy" (0 or 1) or "t1" (share of 16 samples at
    temperature 1).
    Raises ValueError for no records, another decoding, and records with other numbers of problems.
    """
    if decoding not in ("greedy", "t1"):
        raise ValueError(f'unknown decoding {decoding!r}: use "greedy" or "t1"')
    sizes = {record["test"]["n"] for record in records}
    if len(sizes) != 1:
        raise ValueError(f"runs with {sorted(sizes)} test problems do not form one matrix: select runs of one test set")
    (n,) = sizes
    if decoding == "greedy":
        return np.stack([unpack_bits(record["test"]["greedy_bits"], n) for record in records]).astype(np.float64)
    rows = [unpack_counts(record["test"]["t1_counts"]) for record in records]
    if any(len(row) != n for row in rows):
        raise ValueError(f"t1_counts of length {[len(row) for row in rows]} where n = {n}: the record is damaged")
    return np.stack(rows) / _SAMPLES


def pack_bits(bits: ArrayLike) -> str:
    """Return 0/1 results as hexadecimal text, eight problems a byte, the first one in the highest bit.

    bits: (problems,), 0 or 1. Raises ValueError for other values.

    >>> pack_bits([1, 0, 0, 0, 0, 0, 0, 1, 1])
    '8180'
    """
    row = np.asarray(bits)
    if row.ndim != 1 or not np.isin(row, (0, 1)).all():
        raise ValueError(f"bits must be one row of 0 and 1, got shape {row.shape} with values {np.unique(row)[:5]}")
    return np.packbits(row.astype(np.uint8)).tobytes().hex()


def unpack_bits(text: str, n: int) -> NDArray[np.uint8]:
    """Return the (n,) 0/1 results that `pack_bits` wrote. Raises ValueError if the text is not that of n problems."""
    packed = np.frombuffer(bytes.fromhex(text), np.uint8)
    if len(packed) != (n + 7) // 8:
        raise ValueError(f"{len(packed)} bytes of results where {n} problems need {(n + 7) // 8}: damaged record")
    bits = np.unpackbits(packed)
    if bits[n:].any():
        raise ValueError(f"bits are set beyond problem {n}: the record belongs to a larger test set")
    return bits[:n]


def pack_counts(counts: ArrayLike) -> str:
    """Return the number of right samples of 16 for each problem as text, one base-17 digit (0-9a-g) a problem.

    counts: (problems,), integers 0..16. Raises ValueError for other values.

    >>> pack_counts([0, 9, 10, 16])
    '09ag'
    """
    row = np.asarray(counts)
    if row.ndim != 1 or not np.isin(row, np.arange(_SAMPLES + 1)).all():
        raise ValueError(f"counts must be one row of integers 0..{_SAMPLES}, got shape {row.shape}: {row.ravel()[:5]}")
    return "".join(_DIGITS[int(count)] for count in row)


def unpack_counts(text: str) -> NDArray[np.int64]:
    """Return the (problems,) counts 0..16 that `pack_counts` wrote. Raises ValueError for any other character."""
    strange = sorted(set(text) - set(_DIGITS))
    if strange:
        raise ValueError(f"{strange[0]!r} is no base-17 digit (0-9a-g): damaged record")
    return np.array([_DIGITS.index(digit) for digit in text], dtype=np.int64)


def _crossed_resamples(
    arms: list[NDArray[np.float64]], n_resamples: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Return (n_resamples,) means of the first arm less those of the second, all arms on the same problems."""
    problems = arms[0].shape[1]
    means = np.empty(n_resamples)
    # chunks keep the (resamples, problems) counts at a few megabytes
    for start in range(0, n_resamples, _CHUNK):
        size = min(_CHUNK, n_resamples - start)
        problem_counts = _resample_counts(rng, size, problems)
        total = np.zeros(size)
        for sign, arm in zip((1.0, -1.0), arms, strict=False):
            seed_counts = _resample_counts(rng, size, len(arm))
            total += sign * (seed_counts * (problem_counts @ arm.T)).sum(axis=1) / arm.size
        means[start : start + size] = total
    return means


def _resample_counts(rng: np.random.Generator, n_resamples: int, n: int) -> NDArray[np.float64]:
    """Return (n_resamples, n): how often each of n units is drawn when n are drawn with replacement."""
    drawn = rng.integers(n, size=(n_resamples, n)) + n * np.arange(n_resamples)[:, None]
    return np.bincount(drawn.ravel(), minlength=n_resamples * n).reshape(n_resamples, n).astype(np.float64)


def _finite(values: ArrayLike, name: str, ndim: int) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != ndim or array.size == 0:
        raise ValueError(f"{name} has shape {array.shape}: give a non-empty array of {ndim} dimension(s)")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} holds a value that is not finite: score failed runs with the floor before averaging")
    return array
