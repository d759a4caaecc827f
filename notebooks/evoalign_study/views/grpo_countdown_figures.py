"""The figures of notebook 02, each with what it plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from evoalign_lib import arms
from evoalign_lib.analysis import curves, stats
from evoalign_study import loading, style
from evoalign_study import nb02_grpo_countdown as study
from evoalign_study.loading import Records
from evoalign_study.views import grpo_countdown as view

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame


# ---- figures


def curve_points(of: Records) -> DataFrame:
    """Return the learning curves of both arms, and each long run of GRPO alone: a row per point, for both decodings.

    Columns: the four axes (means over seeds); mean, low and high of validation accuracy, %; decoding; n; group; run.
    """
    import pandas as pd

    named = [(group, "mean", of[group]) for group in study.ARMS]
    named += [("grpo_long", str(r["spec"]["seed"]), [r]) for r in of["grpo_long"]]
    frames = []
    for group, name, found in named:
        lines = [r["curve"] for r in found]
        budgets = {axis: np.mean([line[axis] for line in lines], axis=0) for axis in view.AXES}
        for decoding in loading.DECODINGS:
            band = stats.curve_band(100 * np.array([line[f"validation_{decoding}"] for line in lines]))
            frame = pd.DataFrame(budgets | dict(zip(("mean", "low", "high"), band, strict=True)))
            labels = {"decoding": decoding, "n": len(found), "group": group, "run": name}
            frames.append(frame.assign(**labels).iloc[1:])  # a logarithmic axis has no 0
    return pd.concat(frames, ignore_index=True)


def draw_curves(of: Records) -> tuple[Figure, DataFrame]:
    """Draw validation accuracy against four budgets, forward FLOPs large; return the figure and `curve_points`."""
    from matplotlib import pyplot as plt

    points, start = curve_points(of), of["base"][0]["validation"]
    before = {"greedy": 100 * start["greedy"], "t1": 100 * start["pass@1"]}
    fig = plt.figure(figsize=(style.PAGE, 4.3))
    above, below = fig.subfigures(2, 1, height_ratios=[1.5, 1])
    large = above.subplots(1, 2, sharey=True)
    for ax, (decoding, look) in zip(large, style.DECODINGS.items(), strict=True):
        _draw_budget(ax, points, before, "forward_flops", decoding)
        _label_curves(ax, points[points["decoding"] == decoding], before[decoding])
        ax.set_title(f"{'greedy decoding' if decoding == 'greedy' else look.label}", fontsize=10)
        ax.set_xlabel("forward FLOPs spent on training", fontsize=9)
        ax.tick_params(labelsize=8.5)
    large[0].set_ylabel("validation accuracy, %", fontsize=9)
    small = below.subplots(1, 3, sharey=True)
    for ax, axis in zip(small, [axis for axis in view.AXES if axis != "forward_flops"], strict=True):
        for decoding in style.DECODINGS:
            _draw_budget(ax, points[points["group"].isin(study.ARMS)], before, axis, decoding)
        ax.set_xlabel(view.AXES[axis], fontsize=8.5)
    small[0].set_ylabel("accuracy, %", fontsize=8.5)
    return fig, points


def _draw_budget(ax: Axes, points: DataFrame, before: Mapping[str, float], axis: str, decoding: str) -> None:
    """Draw all curves of one decoding against one budget, and the untrained base."""
    for (group, _), part in points[points["decoding"] == decoding].groupby(["group", "run"]):
        arm = group.removesuffix("_long")
        thin = {"lw": 0.6, "marker": None, "alpha": 0.8} if group == "grpo_long" else {}
        ax.plot(part[axis], part["mean"], **style.line(arm, decoding) | thin)
        style.band(ax, part[axis], part["low"], part["high"], style.ARMS[arm].color)
    ax.axhline(before[decoding], lw=0.8, color=style.ARMS["base"].color, ls=style.DECODINGS[decoding].linestyle)
    ax.set_xscale("log")


def _label_curves(ax: Axes, part: DataFrame, start: float) -> None:
    """Write the name of each curve beside it."""
    curve = dict(iter(part.groupby("group")))
    middle, end = curve["grpo"].iloc[len(curve["grpo"]) // 2], curve["es"].iloc[-1]
    risen = end["mean"] > start + 5  # then there is room below the curve, otherwise above it
    _beside(ax, middle, f"GRPO\n(n = {middle['n']})", "grpo", (-8, 6), "right", "bottom")
    below, above = ("\n", (4, -9), "center", "top"), (" ", (0, 13), "right", "bottom")
    between, *place = below if risen else above
    _beside(ax, end, f"ES{between}(n = {end['n']})", "es", *place)
    across = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "fontsize": 9}
    ax.annotate("base", (0.99, start), (0, -3), ha="right", va="top", color=style.ARMS["base"].color, **across)
    if "grpo_long" in curve:
        highest = curve["grpo_long"].loc[curve["grpo_long"]["mean"].idxmax()]
        _beside(ax, highest, "single runs,\ncarried on", "grpo", (-17, 4), "right", "top", fontweight="normal")


def _beside(
    ax: Axes, point: Any, text: str, arm: str, offset: tuple[int, int], ha: str, va: str, fontweight: str = "bold"
) -> None:
    """Write a text in an arm's colour beside a point of a curve."""
    size = 9.5 if fontweight == "bold" else 8
    how = {"textcoords": "offset points", "fontsize": size, "fontweight": fontweight, "ha": ha, "va": va}
    ax.annotate(text, (point["forward_flops"], point["mean"]), offset, color=style.ARMS[arm].color, **how)


def draw_sweep(run: SimpleNamespace, of: Records) -> tuple[Figure, DataFrame]:
    """Draw the scores of both sweeps as maps and the expected best of k settings; return the latter, too.

    The data's columns: arm, settings tried, expected maximum (a fraction).
    """
    import pandas as pd
    from matplotlib import pyplot as plt

    ranking = {arm: arms.ranked(of[f"sweep {arm}"]) for arm in study.ARMS}
    tried = []
    for arm, ranked in ranking.items():
        best = curves.expected_maximum([score for score, _ in ranked])
        tried += [{"arm": arm, "settings tried": k, "expected maximum": v} for k, v in enumerate(best, 1)]
    tried = pd.DataFrame(tried)
    every = [100 * score for ranked in ranking.values() for score, _ in ranked]
    fig, axes = plt.subplots(1, 3, figsize=(style.PAGE, 2.15), width_ratios=[1.2, 1.2, 1.0])
    for ax, arm in zip(axes, study.ARMS, strict=False):
        _draw_map(ax, arm, ranking[arm], (min(every), max(every)))
    ax = axes[2]
    for arm, part in tried.groupby("arm"):
        best = 100 * part["expected maximum"].to_numpy()
        ax.plot(part["settings tried"], best, **style.line(arm) | {"label": None})
        ax.annotate(
            style.ARMS[arm].label,
            (part["settings tried"].iloc[-1], best[-1]),
            (0, -5),
            textcoords="offset points",
            ha="right",
            va="top",
            color=style.ARMS[arm].color,
            fontsize=8.5,
            fontweight="bold",
        )
    ax.set_xticks(range(1, max(map(len, ranking.values())) + 1, 2))
    ax.set(xlabel="settings tried, k", ylabel="validation accuracy, %", title="expected best of k settings")
    return fig, tried


_STEP_SIZES = {"es": ("alpha", "sigma"), "grpo": ("learning_rate", "beta")}
"""Arm -> the setting on the horizontal axis of its map, its step size, and the one on the vertical axis."""


def _draw_map(
    ax: Axes, arm: str, ranked: Sequence[tuple[float, Mapping[str, float]]], limits: tuple[float, float]
) -> None:
    """Draw the scores of an arm's settings, the tuned one framed: step size to the right, the other setting upwards."""
    from matplotlib import patheffects
    from matplotlib import pyplot as plt
    from pandas import DataFrame

    across, up = _STEP_SIZES[arm]
    frame = DataFrame([{"score": 100 * score} | dict(setting) for score, setting in ranked])
    grid = frame.pivot(index=up, columns=across, values="score")
    ax.imshow(grid, cmap="Greys", aspect="auto", origin="lower", vmin=limits[0], vmax=limits[1] + 1)
    for which, values in ((ax.set_xticks, grid.columns), (ax.set_yticks, grid.index)):
        which(range(len(values)), _ticks(values))
    place = grid.index.get_loc(ranked[0][1][up]), grid.columns.get_loc(ranked[0][1][across])
    for (i, j), value in np.ndenumerate(grid.to_numpy()):
        if not np.isnan(value):
            dark = value > (limits[0] + limits[1]) / 2
            text = f"{value:.1f}\ntuned" if (i, j) == place else f"{value:.1f}"
            ax.text(j, i, text, ha="center", va="center", fontsize=7.5, color="white" if dark else "black")
    i, j = place
    frame = {"fill": False, "lw": 2.5, "color": style.ARMS[arm].color, "clip_on": False, "zorder": 5}
    rim = [
        patheffects.withStroke(linewidth=4.5, foreground="white")
    ]  # in a grey print the frame is a grey like the map
    ax.add_patch(plt.Rectangle((j - 0.47, i - 0.46), 0.94, 0.92, path_effects=rim, **frame))
    ax.set(
        xlabel=view.SETTINGS[across],
        ylabel=view.SETTINGS[up],
        title=f"{style.ARMS[arm].label}: validation accuracy, %",
    )
    ax.grid(False)


def _ticks(values: Sequence[float]) -> list[str]:
    """Values as labels of ticks, all of them with a power of ten where the smallest needs one."""
    if 0 < min(values) < 1e-4:
        return [np.format_float_scientific(value, trim="-", exp_digits=1) for value in values]
    return [f"{value:g}" for value in values]


def draw_temperatures(rows: DataFrame, base: str) -> Figure:
    """Draw test accuracy on one base against the temperature, every arm that was measured named beside its line.

    rows: of `by_temperature`, with accuracies in %. ES and GRPO have their bands; other arms are thin lines. Groups of
    an arm that another group has, too, are left to the table.
    """
    from matplotlib import pyplot as plt

    fig, ax = plt.subplots(figsize=(style.COLUMN, 2.8))
    here = rows[(rows["base"] == base) & rows["group"].isin(list(style.ARMS))]
    ends: dict[str, tuple[float, str]] = {}
    for group, part in here.groupby("group", sort=False):
        strong = group in study.ARMS
        look = style.line(group) | {"label": None, "markevery": 1, "lw": 1.8 if strong else 0.8}
        ax.plot(
            part["temperature"], part["accuracy"], **look | ({} if strong else {"ms": 2.6}), zorder=3 if strong else 2
        )
        if strong:
            style.band(ax, part["temperature"], part["low"], part["high"], style.ARMS[group].color)
        ends[group] = part["accuracy"].iloc[-1], style.ARMS[group].label
    ax.set(xlabel="temperature (0: greedy)", ylabel="test accuracy, %", ylim=(0, None), xlim=(-0.03, 1.0))
    ax.set_xticks(sorted(here["temperature"].unique()))
    height = ax.get_ylim()[1]
    places = _apart([value for value, _ in ends.values()], height / 15)
    for (group, (value, name)), place in zip(ends.items(), places, strict=True):
        ax.annotate(
            name,
            (1, value),
            (1.06, place),
            va="center",
            annotation_clip=False,
            fontsize=6.5,
            color=style.ARMS[group].color,
            fontweight="bold" if group in study.ARMS else "normal",
            arrowprops={"arrowstyle": "-", "lw": 0.4, "color": style.ARMS[group].color, "shrinkA": 1, "shrinkB": 1},
        )
    return fig


def _apart(heights: Sequence[float], gap: float) -> np.ndarray:
    """Return places as near to the heights as possible, in the same order and at least a gap apart."""
    from scipy.optimize import isotonic_regression

    order, steps = np.argsort(heights, kind="stable"), gap * np.arange(len(heights))
    places = np.empty(len(heights))
    places[order] = isotonic_regression(np.asarray(heights, float)[order] - steps).x + steps
    return places


def draw_estimators(frame: DataFrame) -> tuple[Figure, DataFrame]:
    """Draw `kl_frame`: bias, spread and direction of the gradient of each estimator; return the plotted data, too."""
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D

    fig, axes = plt.subplots(1, 3, figsize=(style.PAGE, 2.15))
    for name, part in frame.groupby("estimator"):
        look = style.KL_ESTIMATORS[name].line() | {"label": None}
        at, bias = part["KL, nats per token"], part["bias / KL"]
        ends = 100 * np.array([[b.value - b.low, b.high - b.value] for b in bias]).T
        axes[0].errorbar(at, [100 * b.value for b in bias], ends, capsize=2, **look)
        for level, fill in (("token", {}), ("sequence", {"markerfacecolor": "white"})):
            axes[1].plot(at, part[f"std / KL, {level}"], **look | fill)
            axes[2].plot(at, part[f"cosine, {level}"], **look | fill)
    names = ("bias, % of the KL", "standard deviation / KL", "cosine with the KL's gradient")
    for ax, text in zip(axes, names, strict=True):
        ax.set(xscale="log", xlabel="exact KL, nats per token", ylabel=text)
    axes[0].set_yscale("symlog", linthresh=10)
    axes[0].yaxis.set_major_formatter("{x:g}")
    axes[0].axhline(0, lw=0.6, color="black")
    axes[1].set_yscale("log")
    axes[1].yaxis.set_major_formatter("{x:g}")
    handles = [Line2D([], [], **look.line()) for look in style.KL_ESTIMATORS.values()]
    levels = {"tokens": "black", "sequences": "white"}
    dots = {"color": "black", "marker": "o", "ls": ""}
    handles += [Line2D([], [], **dots, markerfacecolor=face, label=text) for text, face in levels.items()]
    fig.legend(handles=handles, loc="outside lower center", ncols=5)
    return fig, frame.assign(**{"bias / KL": [interval.value for interval in frame["bias / KL"]]})
