"""How the figures of notebook 09 are drawn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np

from evoalign_lib.analysis import gram_matrix
from evoalign_study import nb09_lmc_analysis as study
from evoalign_study import path_points, style
from evoalign_study.loading import Records
from evoalign_study.views import lmc_analysis as view

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

_NULL = {"color": "black", "lw": 0.9, "ls": (0, (1, 2))}
_MARGIN = 2.0  # points
_LOOKS = {study.MEAN: ("#0B3C5D", "v"), study.RANDOM: ("black", "x")}


def _look(end: str) -> tuple[str, str]:
    """Return color and marker of a kind of end."""
    return _LOOKS.get(end) or (style.ARMS[end].color, style.ARMS[end].marker)


def barriers(run: SimpleNamespace, of: Records) -> tuple[Figure, DataFrame]:
    """Draw the accuracy along lines from ES to GRPO, and the barrier of each kind of line under each decoding."""
    import pandas as pd
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots(1, 2, figsize=(style.PAGE, 3.3), width_ratios=(1, 1.3))
    rows = []
    for decoding in view.DECODINGS:
        right = 100 * (1 - view.errors(of, "es", "grpo", decoding).mean(1))
        alphas, look = np.linspace(0, 1, right.shape[1]), style.STROKES[decoding]
        axes[0].plot(alphas, right.mean(0), color="black", ls=look.linestyle, label=look.label)
        axes[0].fill_between(alphas, right.min(0), right.max(0), color="black", alpha=0.08, lw=0)
        axes[0].plot(alphas[[0, -1]], right.mean(0)[[0, -1]], color="#999999", lw=0.8)
        rows += [{"panel": decoding, "alpha": a, "value": v} for a, v in zip(alphas, right.mean(0), strict=True)]
    axes[0].set(xlabel="from ES (0) to GRPO (1)", ylabel="accuracy, %", title="along the line", ylim=(0, None))
    axes[0].legend(fontsize=6.5)
    shades = {"greedy": "black", "t0.6": "#888888", "t1": "white"}
    for i, pair in enumerate(reversed(view.PAIRS)):
        for decoding, offset in zip(view.DECODINGS, (0.22, 0, -0.22), strict=True):
            found = view.barrier(of, *pair, decoding).interval
            value, low, high = (100 * x for x in (found.value, found.low, found.high))
            bar = {"color": "black", "lw": 0.9, "mfc": shades[decoding], "ms": 4, "capsize": 1.5}
            bar["label"] = style.STROKES[decoding].label if i == 0 else None
            axes[1].errorbar(value, i + offset, xerr=[[value - low], [high - value]], fmt="o", **bar)
            name = view.line_label(*pair)
            rows.append(
                {"panel": "barrier", "line": name, "decoding": decoding, "value": value, "low": low, "high": high}
            )
    names = [f"{'null: ' if pair in view.NULLS else ''}{view.line_label(*pair)}" for pair in reversed(view.PAIRS)]
    axes[1].set_yticks(range(len(names)), names, fontsize=6)
    axes[1].axvline(0, color="black", lw=0.7)
    axes[1].axvline(_MARGIN, **_NULL)
    axes[1].set(xlabel="largest error above the line, points", title="barrier")
    axes[1].grid(axis="y", visible=False)
    axes[1].legend(fontsize=6.5, loc="best")
    return fig, pd.DataFrame(rows)


def from_base(run: SimpleNamespace, of: Records) -> tuple[Figure, DataFrame]:
    """Draw the accuracy on the way from the base to each kind of end, by weights and by KL."""
    import pandas as pd
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots(1, 3, figsize=(style.PAGE, 2.7), sharey=False)
    rows = []
    for ax, (decoding, by) in zip(axes, (("greedy", "weights"), ("t1", "weights"), ("greedy", "kl")), strict=True):
        for end in view.ends_from_base():
            color, marker = _look(end)
            right = 100 * (1 - view.errors(of, study.BASE, end, decoding).mean((0, 1)))
            x = np.linspace(0, 1, len(right))
            if by == "kl":
                x = path_points.curves(of[study.name_of(study.BASE, end)], "kl").mean(0)
            ax.plot(x, right, color=color, marker=marker, ms=3, markevery=5, label=view.end_label(end))
            panel = f"{decoding}, {by}"
            rows += [{"panel": panel, "end": end, "x": a, "value": b} for a, b in zip(x, right, strict=True)]
        ax.set(title=f"{style.STROKES[decoding].label}, by {'KL' if by == 'kl' else by}", ylim=(0, None))
        ax.set_xlabel("share of the way from the base" if by == "weights" else "KL from the base, nats per token")
    axes[0].set_ylabel("accuracy, %")
    axes[2].set_xscale("symlog", linthresh=0.01)
    axes[2].set_xlim(left=-1e-3, right=1.3 * axes[2].get_xlim()[1])
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncol=6, fontsize=6.5)
    return fig, pd.DataFrame(rows)


def plane(run: SimpleNamespace, of: Records) -> tuple[Figure, DataFrame]:
    """Draw all runs in the plane through the base, the mean of the ES runs and the mean of the GRPO runs.

    A run lies where its displacement falls on the plane; how far it lies off it is written beside the arm. The means
    are those of all other runs: a run would lie near a mean that it is part of, whatever it learned.
    """
    import pandas as pd
    from matplotlib import pyplot as plt

    runs = [record for arm in study.TRAINED for record in of[arm]]
    arms = np.array([arm for arm in study.TRAINED for _ in of[arm]])
    gram = gram_matrix.gram(of["products"], runs).total
    places = np.array([_place(gram, arms, i) for i in range(len(runs))])
    off = np.sqrt(np.maximum(np.diagonal(gram) - np.square(places).sum(1), 0))
    fig, ax = plt.subplots(figsize=(style.COLUMN + 0.9, 2.7))
    rows = []
    for arm in study.TRAINED:
        chosen, (color, marker) = arms == arm, _look(arm)
        label = f"{view.end_label(arm)}: {off[chosen].mean():.2f} off"
        ax.plot(*places[chosen].T, marker, color=color, ms=4, ls="", alpha=0.8, label=label)
        for (a, b), c in zip(places[chosen], off[chosen], strict=True):
            rows.append({"arm": arm, "along GRPO": a, "across": b, "off the plane": c})
    ax.plot(0, 0, "+", color="black", ms=10)
    ax.annotate("base", (0, 0), (5, -10), textcoords="offset points", fontsize=7)
    ax.set(xlabel="along the mean of GRPO, weight units", ylabel="across, to the mean of ES, weight units")
    ax.legend(fontsize=6, loc="upper right")
    return fig, pd.DataFrame(rows)


def _place(gram: np.ndarray, arms: np.ndarray, i: int) -> np.ndarray:
    """Return where run i falls on the plane of the means of the other runs: along GRPO's, and across it."""
    others = np.arange(len(arms)) != i
    means = {arm: (chosen := others & (arms == arm)) / max(chosen.sum(), 1) for arm in ("es", "grpo")}
    x = _unit(means["grpo"], gram)
    y = _unit(means["es"] - (means["es"] @ gram @ x) * x, gram)
    return np.array([x, y]) @ gram[i]


def _unit(combination: np.ndarray, gram: np.ndarray) -> np.ndarray:
    """Return a combination of displacements scaled to length 1; one without length stays."""
    length = np.sqrt(max(combination @ gram @ combination, 0.0))
    return combination / length if length else combination


def noise(run: SimpleNamespace, of: Records) -> tuple[Figure, DataFrame]:
    """Draw the accuracy under noise on the weights against its standard deviation, by kind of noise and decoding."""
    import pandas as pd
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots(1, 4, figsize=(style.PAGE, 2.5), sharey=True)
    rows = []
    sigmas = run.noise_sigmas
    panels = [(part, decoding) for part in ("isotropic", "relative") for decoding in ("greedy", "t1")]
    for ax, (part, decoding) in zip(axes, panels, strict=True):
        for end in study.SHAKEN:
            color, marker = _look(end)
            found = of[f"noise on {end}"]
            right = 100 * np.array([[r["clean"][decoding], *np.mean(r[part][decoding], axis=1)] for r in found]).mean(0)
            ax.plot([0, *sigmas], right, color=color, marker=marker, ms=3, label=view.end_label(end))
            panel = f"{part}, {decoding}"
            rows += [{"panel": panel, "end": end, "x": a, "value": b} for a, b in zip([0, *sigmas], right, strict=True)]
        ax.set(title=f"{part},\n{style.STROKES[decoding].label}", ylim=(0, None), xlabel="deviation, weight units")
    axes[0].set_ylabel("accuracy, %")
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncol=4, fontsize=6.5)
    return fig, pd.DataFrame(rows)


def likelihood(run: SimpleNamespace, of: Records) -> tuple[Figure, DataFrame]:
    """Draw the negative log-likelihood of right answers along the lines to GRPO, over the line between its ends."""
    import pandas as pd
    from matplotlib import pyplot as plt

    fig, ax = plt.subplots(figsize=(style.COLUMN + 0.6, 2.5))
    rows = []
    for first, last in [pair for pair in view.PAIRS if pair[1] == "grpo"]:
        color, marker = _look(first)
        curve = path_points.curves(of[study.name_of(first, last)], "nll").mean(0)
        alphas = np.linspace(0, 1, len(curve))
        over = curve - (1 - alphas) * curve[0] - alphas * curve[-1]
        ls = "-" if first != last else "--"
        ax.plot(alphas, over, color=color, marker=marker, ms=3, markevery=5, ls=ls, label=view.end_label(first))
        rows += [{"line": view.line_label(first, last), "x": a, "value": b} for a, b in zip(alphas, over, strict=True)]
    _zero(ax)
    ax.set(xlabel="to GRPO (1)", ylabel="NLL above the line,\nnats per answer")
    ax.legend(fontsize=6)
    return fig, pd.DataFrame(rows)


def regimes(run: SimpleNamespace, of: Records) -> tuple[Figure, DataFrame]:
    """Draw the barriers between any two runs with small and with large steps, greedily and at temperature 1."""
    import pandas as pd
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots(1, 2, figsize=(style.PAGE, 3.4), sharey=True, layout="constrained")
    names, rows = study.LEARNED, []
    sizes = [len(of[name]) for name in names]
    ends = np.cumsum(sizes)
    every = {decoding: 100 * view.regime_barriers(of, names, decoding)[0] for decoding in ("greedy", "t1")}
    most = max(np.nanmax(matrix) for matrix in every.values())
    for ax, (decoding, matrix) in zip(axes, every.items(), strict=True):
        both = np.where(np.isnan(matrix), matrix.T, matrix)  # the diagonal stays empty: a run has no line to itself
        drawn = ax.imshow(both, cmap="Blues", vmin=0, vmax=most)
        for edge in ends[:-1] - 0.5:
            ax.axvline(edge, color="black", lw=0.7)
            ax.axhline(edge, color="black", lw=0.7)
        ax.set(title=style.STROKES[decoding].label)
        middles, called = ends - np.array(sizes) / 2 - 0.5, [view.regime_label(name) for name in names]
        ax.set_xticks(middles, called, rotation=30, ha="right", rotation_mode="anchor")
        ax.set_yticks(middles, called)
        ax.grid(visible=False)
        ax.tick_params(length=0)
        labels = [view.regime_label(name) for name in names for _ in of[name]]
        for i, j in zip(*np.triu_indices(len(matrix), 1), strict=True):
            pair = {"decoding": decoding, "first": labels[i], "last": labels[j]}
            rows.append(pair | {"first run": i, "last run": j, "barrier": matrix[i, j]})
    fig.colorbar(drawn, ax=axes, label="barrier, points", shrink=0.8)
    return fig, pd.DataFrame(rows)


def _zero(ax: Axes) -> None:
    ax.axhline(0, **_NULL)
