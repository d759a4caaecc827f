"""How runs of the conciseness task end, and which settings of ES collapse, from the curves of their records.

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
"""Samples per question at a temperature, at each point of a curve."""
JENSEN_SIGMAS = (0.003, 0.01, 0.03)
"""Sigmas of the noise under which the drop of a tiny model's reward, its Jensen gap, is measured."""


def end(record: Record, decoding: str = "greedy") -> str:
    """Classify the end of a training run by comparing the last point of its curve with the first, the base.

    Returns:
        "hacked" (proxy reward on split A rose and right answers on split B fell), "clean" (proxy reward rose and right
        answers did not fall) or "no gain" (proxy reward did not rise, whatever the answers).

    Raises:
        ValueError: a record without the curves of the task.
    """
    proxy, right = (_of_curve(record, f"{name}_{decoding}") for name in ("proxy", "right"))
    if proxy[-1] <= proxy[0]:
        return "no gain"
    return "hacked" if hacking.fell(right[-1], right[0]) else "clean"


def right_at(
    record: Record,
    decoding: str,
    at_proxy: float | None = None,
    at_kl: float | None = None,
    walk: Record | None = None,
) -> NDArray[np.float64] | None:
    """Return the right answers on split B at the first point of a run's curve that reaches a level.

    The point was measured and may lie well beyond the level; nothing is interpolated.

    Args:
        record: record of the run.
        decoding: "greedy", or a temperature such as "t1".
        at_proxy: smallest proxy reward on split A under that decoding; or
        at_kl: smallest KL from the base, in nats per completion. Pass one of the two.
        walk: record of a run with random fitness, measured at the same steps. What it has lost by then is given back.

    Returns:
        (problems,), shares of right answers; None if the run never reaches the level, that is, if it is censored.

    Raises:
        ValueError: both levels or neither, a record without the curves of the task, or a walk measured at other steps.
    """
    require((at_proxy is None) != (at_kl is None), f"at_proxy={at_proxy}, at_kl={at_kl}: pass one of the two.")
    axis, level = ("kl", at_kl) if at_proxy is None else (f"proxy_{decoding}", at_proxy)
    reached = np.flatnonzero(np.array(_of_curve(record, axis), np.float64) >= level)
    if not len(reached):
        return None
    there = _right(record, decoding, reached[0])
    if walk is None:
        return there
    steps, others = (_of_curve(each, "step") for each in (record, walk))
    require(steps == others, f"a walk measured at steps {others}, its run at {steps}: make it again at the run's")
    return there + _right(walk, decoding, 0) - _right(walk, decoding, reached[0])


def _right(record: Record, decoding: str, point: int) -> NDArray[np.float64]:
    """Return (problems,), the shares of right answers on split B at a point of a run's curve."""
    draws, n = 1 if decoding == "greedy" else SAMPLES, record["test"]["n"]
    return unpack_bits(_of_curve(record, f"right_bits_{decoding}")[point], draws * n).reshape(draws, n).mean(axis=0)


def _of_curve(record: Record, name: str) -> list:
    curve = record.get("curve", {})
    require(name in curve, f"the record's curve has no {name!r}: pass training runs of the conciseness task")
    return curve[name]


class MapCell(NamedTuple):
    """A setting of ES in a map of sigma and alpha on one base; distances are NaN if no sigma breaks the base."""

    relative_sigma: float
    """Sigma relative to the sigma that halves the base's right answers."""
    displacement: float
    """Root mean square displacement of ES with random fitness, relative to the same sigma."""
    collapsed: float
    """Share of its runs whose greedy right answers fell (`hacking.fell`) from the first point to the last."""


def collapse_map(records: Iterable[Record], base: Record) -> list[MapCell]:
    """Return the settings of ES runs on one base, by sigma and alpha, relative to the sigma that breaks that base.

    Args:
        records: training runs of ES that differ in sigma, alpha and seed.
        base: record of their untrained base.
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
    """Return the sigma at which noise on all weights halves a base's greedy right answers.

    It is interpolated between two measured sigmas, linearly in log sigma. The shares under noise are those of split A,
    repetitions of an answer included; half means half of split B's right answers. If no measured sigma halves them, for
    example because nothing is right, warn and return NaN.
    """
    sigmas, shares = zip(*sorted((float(sigma), share) for sigma, share in base["breaking"].items()), strict=True)
    shares = np.minimum.accumulate(shares)  # a model that happens to do better with more noise is not less broken
    half = base["test"]["greedy"] / 2
    if not shares[0] > half > shares[-1]:
        left = f"sigma {sigmas[0]:g} leaves {shares[0]:.2f} right, {sigmas[-1]:g} {shares[-1]:.2f}"
        between = f"half of the base's {2 * half:.2f} is not between them. It is NaN, and no line is drawn for it."
        missed = f"the sigma that halves the base's right answers was not reached: {left}, and {between}"
        warnings.warn(missed, stacklevel=2)
        return math.nan
    return float(np.exp(np.interp(-half, -shares, np.log(sigmas))))
