"""What samples of a user's own models say of coverage: pass@k, support won and lost, cover@tau, as tables and curves.

Every function takes models, name -> records of kind "sampled"; the first is the model itself, the others are ends of
training from it. All have the same problems and samples. Intervals are over problems.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from evoalign_lib.analysis import coverage, stats
from evoalign_lib.analysis.stats import Interval
from evoalign_study import style
from evoalign_study.measures.base import label
from evoalign_study.records import Record, unpack_integers

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

Models = Mapping[str, Sequence[Record]]
"""Name -> records of all blocks and temperatures; the model itself first."""
TAUS = (0.01, 0.1, 0.5, 0.9)
"""Chances of a right sample at which tables count problems."""
_STROKES = ("-", "--", ":", "-.")
_RESAMPLES = 2000


def temperatures(models: Models) -> list[float]:
    """Return the temperatures at which all models were sampled. Raises ValueError where these differ."""
    found = {name: sorted({record["spec"]["temperature"] for record in of}) for name, of in models.items()}
    first, *others = found.values()
    if any(other != first for other in others):
        raise ValueError(f"models were sampled at other temperatures: {found}. Sample all at the same ones.")
    return first


def samples(models: Models) -> int:
    """Return how many samples each problem has. Raises ValueError where models differ in it."""
    found = {record["spec"]["samples"] for of in models.values() for record in of}
    if len(found) != 1:
        raise ValueError(f"records with {sorted(found)} samples of each problem: compare those with equally many.")
    return found.pop()


def counts(records: Sequence[Record], temperature: float) -> np.ndarray:
    """Return how many samples of each problem are right, (problems,), from the blocks of one model at a temperature.

    Raises ValueError for blocks that are missing or overlap, and for records of more than one model.
    """
    own = sorted((r for r in records if r["spec"]["temperature"] == temperature), key=lambda r: r["spec"]["block"])
    if len({str(sorted((k, v) for k, v in record["spec"].items() if k != "block")) for record in own}) > 1:
        raise ValueError(f"{len(own)} records differ in more than their blocks: give those of one model and setting.")
    at = 0
    for record in own:
        first, stop = record["spec"]["block"]
        if first != at:
            raise ValueError(
                f"problems from {min(at, first)} to {max(at, first) - 1} at {label(temperature)} are "
                f"{'missing' if first > at else 'there twice'}: load every block of the model once."
            )
        at = stop
    if not own or at != own[0]["spec"]["test_problems"]:
        wanted = own[0]["spec"]["test_problems"] if own else "all"
        raise ValueError(f"{at} of {wanted} problems at {label(temperature)} are there: load every block of the model.")
    return np.concatenate([unpack_integers(record["right"]) for record in own])


def ks(n: int) -> list[int]:
    """Return the numbers of samples at which tables say what is solved: 1, 4, 16, ... and n."""
    return sorted({4**i for i in range(n.bit_length()) if 4**i <= n} | {n})


def solved(right: np.ndarray, n: int, k: int) -> Interval:
    """Return pass@k, unbiased, with its interval over problems; right: (problems,), of n samples each."""
    return stats.crossed_bootstrap(coverage.estimate_pass_at(right, n, k)[None], n_resamples=_RESAMPLES)


def standard_error(right: np.ndarray, n: int, k: int) -> float:
    """Return the standard error that the samples alone give pass@k, on these problems; NaN where 2k > n."""
    return float(np.sqrt(coverage.variance_of_pass_at(right, n, k).sum()) / len(right))


def pass_table(models: Models, temperature: float) -> DataFrame:
    """Return a row per model and k: pass@k with its interval over problems, and its standard error from the samples.

    The latter is of new samples of the same problems; it is not known where k is more than half of the samples.
    """
    from pandas import DataFrame

    n, rows = samples(models), []
    for name, records in models.items():
        right = counts(records, temperature)
        for k in ks(n):
            error = standard_error(right, n, k)
            rows.append(
                {
                    "model": name,
                    "problems": len(right),
                    "k": k,
                    "pass@k, % [95 %]": solved(right, n, k).format(),
                    "standard error of sampling, points": "not known" if np.isnan(error) else f"{100 * error:.2f}",
                }
            )
    return DataFrame(rows)


def change(before: np.ndarray, after: np.ndarray, n: int, k: int) -> Interval:
    """Return the net change of support within k samples, from counts of n samples, with its interval over problems."""
    base, end = (coverage.estimate_pass_at(right, n, k) for right in (before, after))
    return coverage.support_change(base, end[None], 1, n_resamples=_RESAMPLES)


def support_table(models: Models, temperature: float) -> DataFrame:
    """Return a row per end: problems kept, won, lost and out against the model within half of the samples, and NSCR.

    Half, since the null is what two halves of the model's own samples win and lose of one another. The numbers of
    problems are expected ones, which are unbiased.
    """
    from pandas import DataFrame

    n = samples(models)
    k = n // 2
    (own, records), *ends = models.items()
    before = counts(records, temperature)
    null = coverage.null_of_halves(before, n)
    rows = [_support_row(f"{own}, two halves", k, null.support) | {"NSCR [95 %]": "0 (the null)"}]
    for name, found in ends:
        after = counts(found, temperature)
        if len(after) != len(before):
            raise ValueError(f"{name!r} has {len(after)} problems, {own!r} {len(before)}: sample the same ones.")
        solved_in = (coverage.estimate_pass_at(right, n, k) for right in (before, after))
        row = _support_row(name, k, coverage.support(*solved_in))
        rows.append(row | {"NSCR [95 %]": change(before, after, n, k).format(percent=False, digits=3)})
    return DataFrame([row | {"null, 95 %": f"{null.low:.3f} to {null.high:.3f}"} for row in rows])


def _support_row(name: str, k: int, found: coverage.Support) -> dict[str, Any]:
    parts = {"kept P": found.kept, "won E": found.won, "lost S": found.lost, "out": found.out}
    row = {"model": name, "k": k} | {part: f"{value:.1f}" for part, value in parts.items()}
    ratios = {"SRR": found.srr, "NDR": found.ndr}
    return row | {part: "not defined" if np.isnan(value) else f"{value:.3f}" for part, value in ratios.items()}


def cover_table(models: Models, temperature: float, taus: Sequence[float] = TAUS) -> DataFrame:
    """Return a row per model: the share of problems that a sample solves with at least each chance, and the unseen.

    The chances are shares of the samples. "None right": problems without a right sample; the chance of one of these is
    with 95 % confidence below the last column.
    """
    from pandas import DataFrame

    n, rows = samples(models), []
    for name, records in models.items():
        right = counts(records, temperature)
        shares = coverage.cover_at(right / n, list(taus))
        row: dict[str, Any] = {"model": name, "samples": n}
        row |= {f"cover@{tau:g}, %": f"{100 * share:.1f}" for tau, share in zip(taus, shares, strict=True)}
        row |= {"none right": int((right == 0).sum()), "then below, %": f"{100 * coverage.threshold(n):.2f}"}
        rows.append(row)
    return DataFrame(rows)


def token_table(models: Models) -> DataFrame:
    """Return a row per model and temperature: tokens generated, mean length of a sample, and how many were cut off."""
    from pandas import DataFrame

    n, rows = samples(models), []
    for name, records in models.items():
        for temperature in temperatures(models):
            own = [record for record in records if record["spec"]["temperature"] == temperature]
            drawn = n * sum(record["n_problems"] for record in own)
            tokens = sum(record["generated_tokens"] for record in own)
            rows.append(
                {
                    "model": name,
                    "temperature": f"{temperature:g}",
                    "samples": f"{drawn:,}",
                    "tokens": f"{tokens:,}",
                    "mean length": f"{tokens / drawn:.1f}",
                    "cut off, %": f"{100 * sum(record['clipped'] for record in own) / drawn:.2f}",
                }
            )
    return DataFrame(rows)


def pass_at_k(models: Models) -> tuple[Figure, DataFrame]:
    """Draw pass@k of each model with its interval over problems, a panel for each temperature.

    Returns the figure and what it plots, a row per point of a line.
    """
    import pandas as pd
    from matplotlib import pyplot as plt

    n, heat = samples(models), temperatures(models)
    across = np.unique(np.geomspace(1, n, 33).round()).astype(int)
    fig, axes = plt.subplots(1, len(heat), figsize=(style.PAGE, 2.9), sharey=True, squeeze=False)
    rows = []
    for ax, temperature in zip(axes[0], heat, strict=True):
        title = f"temperature {temperature:g}"
        for i, (name, records) in enumerate(models.items()):
            right = counts(records, temperature)
            estimates = coverage.estimate_pass_at(right, n, across.tolist())
            found = [stats.crossed_bootstrap(column[None], n_resamples=500) for column in estimates.T]
            value, low, high = (100 * np.array([getattr(x, part) for x in found]) for part in ("value", "low", "high"))
            look = _look(i, name)
            ax.plot(across, value, **look, ms=4, lw=1.2, markevery=0.2)
            style.band(ax, across, low, high, look["color"])
            rows += [
                {"panel": title, "model": name, "k": int(k), "value": v, "low": a, "high": b}
                for k, v, a, b in zip(across, value, low, high, strict=True)
            ]
        ax.set(title=title, xlabel="samples k", xscale="log")
        ax.set_xticks(ks(n), [f"{k:,}" for k in ks(n)])
        ax.minorticks_off()
    axes[0, 0].set(ylabel="problems solved, %", ylim=(0, 100))
    handles, labels = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=7)
    return fig, pd.DataFrame(rows)


def _look(i: int, name: str) -> dict[str, Any]:
    """Return how the line of a model is drawn: the first as the base, ends in turn in the colours of ends."""
    if i == 0:
        base = style.ARMS["base"]
        return {"color": base.color, "marker": base.marker or None, "ls": "-", "label": name}
    looks = list(style.ENDS.values())
    look, turn = looks[(i - 1) % len(looks)], (i - 1) // len(looks)
    return {"color": look.color, "marker": look.marker, "ls": _STROKES[turn % len(_STROKES)], "label": name}
