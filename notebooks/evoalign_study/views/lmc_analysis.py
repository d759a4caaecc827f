"""What notebook 09 says and tabulates: barriers, ways from the base, and noise on the weights."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from evoalign_lib import arms
from evoalign_lib.analysis import connectivity, regimes, stats
from evoalign_lib.analysis.connectivity import BarrierEstimate
from evoalign_lib.analysis.stats import Interval
from evoalign_study import collapse, path_points, style
from evoalign_study import nb09_lmc_analysis as study
from evoalign_study.loading import Records
from evoalign_study.records import Record

if TYPE_CHECKING:
    from pandas import DataFrame

DECODINGS = tuple(style.STROKES)
"""Under which every point of a line is answered."""
PAIRS = tuple(pair for pair in study.LINES if study.BASE not in pair)
"""Kinds of line between two trained ends."""
NULLS = (("es_random", "grpo"), (study.RANDOM, "grpo"), ("es", "es_random"), ("grpo_random", "grpo"))
"""Lines with an end that learned nothing."""
_RESAMPLES = 1000
"""As many as the verdicts take (`claims.quantities`): table and verdict show one number."""


def end_label(end: str) -> str:
    """Return the name of a kind of end in tables and legends."""
    if end == study.MEAN:
        return "mean of ES runs"
    return "base + random direction" if end == study.RANDOM else style.ARMS[end].label


def line_label(first: str, last: str) -> str:
    """Return the name of a kind of line."""
    other = " (another seed)" if first == last else ""
    return f"{end_label(first)} to {end_label(last)}{other}"


def errors(of: Records, first: str, last: str, decoding: str) -> np.ndarray:
    """Return the errors along all lines of a kind, (lines, problems, points)."""
    return path_points.errors(of[study.name_of(first, last)], decoding)


def barrier(of: Records, first: str, last: str, decoding: str) -> BarrierEstimate:
    """Return the height of the mean error over the straight line between the ends' errors, a fraction."""
    found = errors(of, first, last, decoding)
    outcomes = np.full((len(found), *found.shape), np.nan)
    outcomes[np.arange(len(found)), np.arange(len(found))] = found
    return connectivity.estimate_barrier(outcomes, kind="line", across="curve", n_resamples=_RESAMPLES)


def barrier_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return a row per kind of line: the barrier of the error under each decoding, and that of the likelihood."""
    from pandas import DataFrame

    rows = []
    for first, last in PAIRS:
        found = of[study.name_of(first, last)]
        row = {"line": line_label(first, last), "lines": len(found)}
        row["distance"] = f"{np.mean([r['distance'] for r in found]):.2f}"
        for decoding in DECODINGS:
            each = barrier(of, first, last, decoding)
            row[f"{style.STROKES[decoding].label} [95 %]"] = each.interval.format()
        greedy, nll = (errors(of, first, last, "greedy").mean((0, 1)), path_points.curves(found, "nll").mean(0))
        row["over the mean of the ends, greedy"] = f"{100 * connectivity.barrier_mean(greedy).height:.1f}"
        row["NLL, nats"] = f"{connectivity.barrier_line(nll).height:.2f}"
        rows.append(row)
    return DataFrame(rows)


# ---- from the base


def ends_from_base() -> list[str]:
    """Return the kinds of end to which lines lead from the base."""
    return [last for first, last in study.LINES if first == study.BASE]


def half_gain(of: Records, end: str, decoding: str, by: str = "weights") -> Interval:
    """Return where on the way from the base half of the gain of accuracy lies: a share of the way, or of the final KL.

    by: "weights" or "kl". NaN where no line of the kind has a gain.
    """
    rewards = 1 - errors(of, study.BASE, end, decoding)
    kl = path_points.curves(of[study.name_of(study.BASE, end)], "kl")
    how: dict[str, Any] = {"x": kl, "relative": True} if by == "kl" else {}
    return connectivity.half_gain_interval(rewards, monotone=True, n_resamples=_RESAMPLES, **how)


def from_base_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return a row per kind of end: gain, and where half of it lies, by weights and by KL."""
    from pandas import DataFrame

    rows = []
    for end in ends_from_base():
        for decoding in DECODINGS:
            found = errors(of, study.BASE, end, decoding)
            gain = stats.crossed_bootstrap(found[:, :, 0] - found[:, :, -1])
            row = {"end": end_label(end), "decoding": style.STROKES[decoding].label, "lines": len(found)}
            row["gain, points [95 %]"] = gain.format()
            for by in ("weights", "kl"):
                half = half_gain(of, end, decoding, by)
                # without a gain of its own a line has no half of it
                told = gain.low > 0 and np.isfinite(half.low)
                row[f"half of it, by {'KL' if by == 'kl' else by}"] = interval(half) if told else "no gain"
            rows.append(row)
    return DataFrame(rows)


def interval(found: Interval, digits: int = 2) -> str:
    """Return an interval in words, in its own unit."""
    return found.format(percent=False, digits=digits)


# ---- noise on the weights


def kept(found: Sequence[Record], part: str, decoding: str) -> np.ndarray:
    """Return the share of its accuracy that each model keeps under each noise, mean over draws: (models, sigmas).

    Models that solve less than a hundredth without noise are left out: they have nothing to keep.
    """
    able = [r for r in found if r["clean"][decoding] >= 0.01]
    shares = [np.mean(r[part][decoding], axis=1) / r["clean"][decoding] for r in able]
    return np.array(shares).reshape(len(able), len(found[0][part][decoding]))


def noise_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return a row per kind of model and decoding: accuracy without noise, and the share that is kept of it."""
    from pandas import DataFrame

    rows = []
    for end in study.SHAKEN:
        found = of[f"noise on {end}"]
        for decoding in DECODINGS:
            clean = 100 * np.mean([r["clean"][decoding] for r in found])
            row = {"model": end_label(end), "decoding": style.STROKES[decoding].label, "models": len(found)}
            row["without noise, %"] = f"{clean:.1f}"
            for part in ("isotropic", "relative", "head", "body"):
                row[f"kept, {part}, %"] = _kept_in_words(kept(found, part, decoding), len(found))
            rows.append(row)
    return DataFrame(rows)


def _kept_in_words(shares: np.ndarray, models: int = 0) -> str:
    """Return the mean share of models in words, with their number unless it is `models`."""
    values = shares.mean(axis=1) if len(shares) else shares
    if len(values) < 2:
        return f"{100 * values[0]:.1f}" if len(values) else "nothing to keep"
    counted = "" if len(values) == models else f" (n = {len(values)})"
    return stats.bootstrap_mean(values).format() + counted


# ---- regimes of hacked and unhacked runs


def regime_label(name: str) -> str:
    """Return the name of a group of `study.REGIMES` in tables and figures."""
    arm, steps = study.REGIMES[name]
    return f"{style.ARMS[arm].label}, {steps} steps"


def regime_barriers(of: Records, names: Sequence[str], decoding: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the barriers between any two runs of some groups, and the same with problems resampled (`paths`)."""
    runs = [record for name in names for record in of[name]]
    return path_points.barriers(of["regimes"], runs, decoding, _REGIME_RESAMPLES)


_REGIME_RESAMPLES = 200  # as many as the verdict takes
_BROKEN = next(name for name, (arm, _) in study.REGIMES.items() if arms.get(arm).reward == "random")


def regime_table(of: Records) -> DataFrame:
    """Return a row per group of runs: how they end, and their barriers to one another and to runs with small steps."""
    from pandas import DataFrame

    rows = []
    for name in study.REGIMES:
        runs = of[name]
        row: dict[str, Any] = {"runs": regime_label(name), "n": len(runs)}
        row["hacked"] = ", ".join(
            str(sum(collapse.end(r, decoding) == "hacked" for r in runs)) for decoding in DECODINGS
        )
        row["right, %"] = f"{100 * np.mean([r['curve']['right_greedy'][-1] for r in runs]):.0f}"
        row["KL"] = f"{np.mean([r['curve']['kl'][-1] for r in runs]):.1f}"
        heights = np.array([_mean_barriers(of, name, decoding) for decoding in DECODINGS])
        for column, values in zip(("barriers among them", "to small steps"), 100 * heights.T, strict=True):
            row[column] = ", ".join("-" if np.isnan(value) else f"{value:.0f}" for value in values)
        rows.append(row)
    return DataFrame(rows)


def _mean_barriers(of: Records, name: str, decoding: str) -> tuple[float, float]:
    """Return the mean barrier among the runs of a group, NaN of one alone, and to the runs with small steps."""
    n = len(of[name])
    matrix, _ = regime_barriers(of, dict.fromkeys((name, *study.SMALL)), decoding)
    matrix = np.fmax(np.nan_to_num(matrix), np.nan_to_num(matrix.T))
    among = matrix[:n, :n][np.triu_indices(n, 1)]
    return float(among.mean()) if len(among) else float("nan"), float(matrix[:n, n:].mean())


def _basin(of: Records) -> Interval | None:
    """Return by how much the greedy barrier is higher from hacked runs to unhacked ones than among hacked ones.

    None where fewer than two runs are hacked, or all.
    """
    hacked = _hacked(of)
    if hacked.sum() < 2 or hacked.all():
        return None
    return regimes.basin(*regime_barriers(of, study.LEARNED, "greedy"), hacked)


def _hacked(of: Records) -> np.ndarray:
    return np.array([collapse.end(run) == "hacked" for name in study.LEARNED for run in of[name]])


def _regimes_in_words(of: Records) -> str:
    """Return what the barriers between hacked and unhacked runs are."""
    hacked, nearer = _hacked(of), _basin(of)
    counted = f"{hacked.sum()} hacked and {(~hacked).sum()} other runs"
    if nearer is None:
        return f"Greedily there are {counted}: no two regimes to tell apart."
    matrix, _ = regime_barriers(of, study.LEARNED, "greedy")
    found = regimes.within_between(matrix, list(hacked), only=True, n_resamples=2000)
    among, small = (f"{100 * mean:.1f}" for mean in _mean_barriers(of, _BROKEN, "greedy"))
    return (
        f"Greedily the barrier is {100 * found.within:.1f} points between two hacked runs, and between a hacked and an "
        f"unhacked one {100 * found.between:.1f}, that is {nearer.format()} more ({counted}). Runs with a random "
        f"reward, which learned nothing, have {among} among them and {small} to those that took small steps."
    )


# ---- the answers


def answers(run: SimpleNamespace, of: Records) -> dict[str, str]:
    """Return question -> one sentence with its number, interval and n."""
    found = {}
    heights = {pair: [barrier(of, *pair, decoding) for decoding in DECODINGS] for pair in (("es", "grpo"), NULLS[0])}
    said = [
        ", ".join(
            f"{each.interval.format()} {_under(decoding)}" for decoding, each in zip(DECODINGS, every, strict=True)
        )
        for every in heights.values()
    ]
    n = len(of[study.name_of("es", "grpo")])
    found["Is there a barrier between ES and GRPO?"] = (
        f"The largest error above the line between the ends is, in points, {said[0]} (n = {n} lines). With random "
        f"fitness in the place of ES it is {said[1]}."
    )
    half = [f"to {end_label(end)} at {interval(half_gain(of, end, 'greedy'))} of it" for end in ("es", "grpo")]
    found["Where does the gain set in on the way from the base?"] = (
        f"Half of the gain of greedy accuracy lies, on the way {' and '.join(half)} (n = {n} lines each)."
    )
    parts = [f"{end_label(end)} {_kept_in_words(kept(of[f'noise on {end}'], 'isotropic', 'greedy'))}" for end in _ASKED]
    found["Who keeps more under noise on the weights?"] = (
        f"Of their greedy accuracy, under isotropic noise, mean over its sizes, in %: {', '.join(parts)}."
    )
    found["Do hacked runs share a basin?"] = _regimes_in_words(of)
    return found


_ASKED = ("es", "grpo", "es_random")


def _under(decoding: str) -> str:
    return "greedily" if decoding == "greedy" else f"at {style.STROKES[decoding].label}"


def numbers(run: SimpleNamespace, of: Records) -> dict[str, tuple[Any, str]]:
    """Return macro -> value and format, for the paper."""
    names = {"greedy": "Greedy", "t0.6": "Warm", "t1": "Sampled"}
    found: dict[str, tuple[Any, str]] = {"LmcLines": (len(of[study.name_of("es", "grpo")]), "d")}
    for decoding, name in names.items():
        found[f"LmcBarrier{name}"] = (barrier(of, "es", "grpo", decoding).interval.format(), "")
        found[f"LmcNull{name}"] = (barrier(of, *NULLS[0], decoding).interval.format(), "")
    found["LmcMeanGreedy"] = (barrier(of, study.MEAN, "grpo", "greedy").interval.format(), "")
    for end in ("es", "grpo"):
        found[f"LmcHalf{end.title()}"] = (interval(half_gain(of, end, "greedy")), "")
    basin = _basin(of)
    found["LmcBasin"] = ("-" if basin is None else basin.format(), "")
    for end, name in zip(_ASKED, ("Es", "Grpo", "Random"), strict=True):
        values = kept(of[f"noise on {end}"], "isotropic", "greedy").mean(1)
        found[f"LmcKept{name}"] = (stats.bootstrap_mean(values).format(digits=0) if len(values) else "-", "")
    return found
