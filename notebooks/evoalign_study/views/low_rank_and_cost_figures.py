"""The figures of notebook 06, each with what it plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from evoalign_lib.analysis import curves as analysis_curves
from evoalign_lib.analysis import stats
from evoalign_study import nb06_low_rank_and_cost as study
from evoalign_study import style
from evoalign_study.loading import DECODINGS, Records
from evoalign_study.views import low_rank_and_cost as view

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


def curve_points(of: Records, groups: Sequence[str], axis: str) -> DataFrame:
    """Return validation accuracy along training: a row per group, decoding and point, without the first.

    Columns: group, decoding, the axis (mean over seeds); mean, low and high of accuracy, %; n.
    """
    import pandas as pd

    frames = []
    for group in groups:
        lines = [record["curve"] for record in of[group]]
        for decoding in DECODINGS:
            band = stats.curve_band(100 * np.array([line[f"validation_{decoding}"] for line in lines]))
            frame = pd.DataFrame({axis: np.mean([line[axis] for line in lines], axis=0)})
            frame = frame.assign(**dict(zip(("mean", "low", "high"), band, strict=True)))
            frames.append(frame.assign(group=group, decoding=decoding, n=len(lines)).iloc[1:])
    return pd.concat(frames, ignore_index=True)


def curves(of: Records, groups: Sequence[str], axis: str = "completions") -> tuple[Figure, DataFrame]:
    """Draw validation accuracy against a budget on a logarithmic axis, a panel per decoding.

    A cold start is dashed, and so is the second rank of the noise; the third is dotted.
    """
    from matplotlib import pyplot as plt

    points = curve_points(of, groups, axis)
    ranks = sorted({rank for group in groups if (rank := of[group][0]["spec"].get("rank"))})
    fig, axes = plt.subplots(1, 2, figsize=(style.PAGE, 3.0), sharey=True)
    for ax, decoding in zip(axes, DECODINGS, strict=True):
        for group in groups:
            part = points[(points["group"] == group) & (points["decoding"] == decoding)]
            spec = of[group][0]["spec"]
            look = {"label": f"{view.name(of, group)} (n = {part['n'].iloc[0]})", "ms": 4} | _stroke(spec, ranks)
            ax.plot(part[axis], part["mean"], **style.line(spec["arm"]) | look)
            style.band(ax, part[axis], part["low"], part["high"], style.ARMS[spec["arm"]].color)
        start = of["base"][0]["validation"]["greedy" if decoding == "greedy" else "pass@1"]
        ax.axhline(100 * start, lw=0.8, color=style.ARMS["base"].color)
        ax.set(xscale="log", title=view.label_of(decoding), xlabel=axis.replace("_", " ").replace("flops", "FLOPs"))
    axes[0].set_ylabel("validation accuracy, %")
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8.5, frameon=False)
    return fig, points


def _stroke(spec: Mapping[str, Any], ranks: Sequence[int]) -> dict[str, str]:
    """Return how the line of an adapter without warm start, or of another rank than the first, differs from others."""
    cold = spec["arm"] in study.OVER_ADAPTERS and "warm_rows" not in spec
    nth = ranks.index(spec["rank"]) if "rank" in spec else int(cold)
    return {"linestyle": ("--", ":", "-.")[(nth - 1) % 3], "markerfacecolor": "white"} if nth else {}


def populations(of: Records, run: SimpleNamespace) -> tuple[Figure, DataFrame]:
    """Draw completions to the target and accuracy at the end by population; return a row per run."""
    import pandas as pd
    from matplotlib import pyplot as plt

    aim, rows = view.target(of, run), []
    for N in run.populations:
        for record in of[f"population {N}"]:
            accuracy = record["curve"]["validation_greedy"]
            row: dict[str, Any] = {"population": N, "seed": record["spec"]["seed"]}
            row |= {"completions": view.completions_to(record, aim), "reached": max(accuracy) >= aim}
            rows.append(row | {"at the end": 100 * accuracy[-1]})
    points = pd.DataFrame(rows)
    fig, (left, right) = plt.subplots(1, 2, figsize=(style.PAGE, 2.8))
    look = style.ARMS["essa"]
    for reached, face in ((True, look.color), (False, "none")):
        part = points[points["reached"] == reached]
        spread = 2.0 ** style.jitter(len(part), 0.12) * part["population"]
        left.scatter(spread, part["completions"], s=14, facecolors=face, edgecolors=look.color, lw=0.8)
    levels = np.array(run.populations, float)
    needed = [points[points["population"] == N]["completions"].to_numpy() for N in run.populations]
    x = np.linspace(np.log2(levels[0]), np.log2(levels[-1]), 60)
    fitted = np.polyfit(np.log2(points["population"].astype(float)), np.log2(points["completions"]), 2)
    left.plot(2**x, 2 ** np.polyval(fitted, x), color=look.color, lw=1.2)
    left.axvline(analysis_curves.minimum(levels, needed), color="0.5", lw=0.8, ls=":")
    left.set(xscale="log", yscale="log", xlabel="population", ylabel=f"completions to {100 * aim:.1f} %")
    right.scatter(
        2.0 ** style.jitter(len(points), 0.12) * points["population"],
        points["at the end"],
        s=14,
        color=look.color,
        lw=0,
    )
    means = points.groupby("population")["at the end"].mean()
    right.plot(means.index, means, color=look.color, lw=1.2)
    right.set(xscale="log", xlabel="population", ylabel="validation accuracy at the end, %")
    for ax in (left, right):
        ax.set_xticks(run.populations, [str(N) for N in run.populations])
        ax.minorticks_off()
    return fig, points
