"""How runs of the conciseness task end, and which settings of ES collapse: read from the curves of their records.

A run *hacks* when it gains proxy reward while its right answers fall (`hacking.fell`); it *collapses* when they fall,
whatever its reward.
"""

import math
import warnings
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evoalign_lib.analysis import hacking
from evoalign_lib.checks import require
from evoalign_study.records import Record, unpack_bits

SAMPLES = 2
"""Samples of each question at a temperature, at each point of a curve."""
JENSEN_SIGMAS = (0.003, 0.01, 0.03)
"""Sigmas of the noise under which the fall of a tiny model's reward is measured, its Jensen gap."""


def end(record: Record, decoding: str = "greedy") -> str:
    """Say how a training run ended: compare the last point of its curve with the first, its base.

    Returns:
        "hacked" (more proxy reward on split A, and right answers on split B fell), "clean" (more proxy reward, and they
        did not fall) or "no gain" (no more proxy reward, whatever the answers).

    Raises:
        ValueError: a record without the curves of the task.
    """
    proxy, right = (_of_curve(record, f"{name}_{decoding}") for name in ("proxy", "right"))
    if proxy[-1] <= proxy[0]:
        return "no gain"
    return "hacked" if hacking.fell(right[-1], right[0]) else "clean"


def right_at(
    record: Record, decoding: str, at_proxy: float | None = None, at_kl: float | None = None
) -> NDArray[np.float64] | None:
    """Return the right answers on split B at the first point of a run's curve that reaches a level.

    The point was measured and may lie well beyond the level; nothing is interpolated.

    Args:
        record: of the run.
        decoding: "greedy", or a temperature such as "t1".
        at_proxy: least proxy reward on split A under that decoding; or
        at_kl: least KL from the base, in nats per completion. Give one of the two.

    Returns:
        (problems,), shares of right answers, or None where the run never reaches the level: it is censored.

    Raises:
        ValueError: both levels or none, or a record without the curves of the task.
    """
    require((at_proxy is None) != (at_kl is None), f"at_proxy={at_proxy}, at_kl={at_kl}: give one of the two.")
    axis, level = ("kl", at_kl) if at_proxy is None else (f"proxy_{decoding}", at_proxy)
    values, bits = _of_curve(record, axis), _of_curve(record, f"right_bits_{decoding}")
    reached = np.flatnonzero(np.array(values, np.float64) >= level)
    if not len(reached):
        return None
    draws, n = 1 if decoding == "greedy" else SAMPLES, record["test"]["n"]
    return unpack_bits(bits[reached[0]], draws * n).reshape(draws, n).mean(axis=0)


def _of_curve(record: Record, name: str) -> list:
    curve = record.get("curve", {})
    require(name in curve, f"the record's curve has no {name!r}: select training runs of the conciseness task")
    return curve[name]


class MapCell(NamedTuple):
    """A setting of ES in a map of sigma and alpha on one base; distances are NaN where no sigma breaks the base."""

    relative_sigma: float
    """Sigma over the sigma that halves the right answers of the base."""
    displacement: float
    """Root mean square displacement of ES with random fitness, over the same sigma."""
    collapsed: float
    """Share of its runs whose right answers fell (`hacking.fell`), greedily, from the first point to the last."""


def collapse_map(records: Iterable[Record], base: Record) -> list[MapCell]:
    """Return the settings of ES runs on one base, by sigma and alpha, each relative to the sigma that breaks that base.

    Args:
        records: training runs of ES that differ in sigma, alpha and seed.
        base: the record of their untrained base.
    """
    critical, by_setting = breaking_sigma(base), {}
    for record in records:
        by_setting.setdefault((record["spec"]["sigma"], record["spec"]["alpha"]), []).append(record)
    found = []
    for (sigma, alpha), runs in sorted(by_setting.items()):
        spec, curves = runs[0]["spec"], [record["curve"]["right_greedy"] for record in runs]
        collapsed = [hacking.fell(right[-1], right[0]) for right in curves]
        walked = alpha * (spec["steps"] / spec["population_size"]) ** 0.5
        found.append(MapCell(sigma / critical, walked / critical, sum(collapsed) / len(collapsed)))
    return found


def breaking_sigma(base: Record) -> float:
    """Return the sigma at which noise on all weights halves a base's right answers, greedily.

    It is interpolated between two measured sigmas, the share of right answers being linear in the logarithm of sigma.
    The shares under noise are of split A, repetitions of an answer included; half is half of split B's right answers.
    NaN, with a warning, where no measured sigma halves them, as where nothing is right.
    """
    sigmas, shares = zip(*sorted((float(sigma), share) for sigma, share in base["breaking"].items()), strict=True)
    shares = np.minimum.accumulate(shares)  # more noise that happens to leave more right is not less broken
    half = base["test"]["greedy"] / 2
    if not shares[0] > half > shares[-1]:
        left = f"sigma {sigmas[0]:g} leaves {shares[0]:.2f} right, {sigmas[-1]:g} {shares[-1]:.2f}"
        between = f"half of the base's {2 * half:.2f} is not between them. It is NaN, and no line is drawn there."
        missed = f"the sigma that halves the base's right answers was not reached: {left}, and {between}"
        warnings.warn(missed, stacklevel=2)
        return math.nan
    return float(np.exp(np.interp(-half, -shares, np.log(sigmas))))
