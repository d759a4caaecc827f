"""How the figures of notebook 08 are drawn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from evoalign_lib.analysis import attenuation, geometry
from evoalign_study import nb08_weight_geometry as study
from evoalign_study import style
from evoalign_study.loading import Records
from evoalign_study.views import weight_geometry as view

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

_AVERAGED = ("es", "grpo", "es_random")
_DRIFTING = ("es", "es_sampled", "es_random", "grpo", "grpo_random", "sft")
_NULL = {"color": "black", "lw": 0.9, "ls": (0, (1, 2))}


def signal(run: SimpleNamespace, of: Records) -> tuple[Figure, DataFrame]:
    """Draw what the mean of K runs can do, and how far it drifts off the task, against K.

    Returns the figure and what it plots, a row per mark.
    """
    import pandas as pd
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots(1, 3, figsize=(style.PAGE, 2.7), width_ratios=(1, 1, 1))
    rows = []
    for ax, decoding in zip(axes, ("greedy", "t1"), strict=False):
        base = 100 * float(np.mean(of["base"][0]["test"][decoding]))
        ax.axhline(base, color=style.ARMS["base"].color, lw=1, label=style.ARMS["base"].label)
        rows += _against_count(ax, run, of, decoding, lambda r, d=decoding: 100 * view.accuracies([r], d)[0])
        rows += _short(ax, run, of, decoding, lambda r, d=decoding: 100 * view.accuracies([r], d)[0])
        ax.set(title=f"test accuracy, {style.STROKES[decoding].label}", ylabel="%", ylim=(0, None))
    rows += _against_count(axes[2], run, of, "drift", lambda r: view.skill(r, "kl"))
    rows += _short(axes[2], run, of, "drift", lambda r: view.skill(r, "kl"))
    axes[2].set(title="KL off the task", ylabel="nats per token", yscale="log")
    for ax in axes:
        ax.set(xlabel="runs in the mean", xscale="log")
        counts = run.means["es"]
        ax.set_xticks(counts, [str(n) for n in counts])
        ax.minorticks_off()
    _key(fig, axes[0], 6)
    return fig, pd.DataFrame(rows)


def _against_count(ax: Axes, run: SimpleNamespace, of: Records, what: str, read: Any) -> list[dict[str, Any]]:
    """Draw the mean over models against the number of runs that a model is the mean of, with every model as a dot."""
    rows = []
    for arm in _AVERAGED:
        sizes = [size for size in run.means[arm] if of[f"{arm} mean={size}"]]
        values = [[read(r) for r in of[f"{arm} mean={size}"]] for size in sizes]
        look = style.ARMS[arm]
        ax.plot(sizes, [np.mean(v) for v in values], color=look.color, marker=look.marker, ms=4, label=look.label)
        for size, each in zip(sizes, values, strict=True):
            ax.plot([size] * len(each), each, ".", color=look.color, ms=2.5, alpha=0.5)
            rows += [{"panel": what, "arm": arm, "runs": size, "value": value} for value in each]
    return rows


def _short(ax: Axes, run: SimpleNamespace, of: Records, what: str, read: Any) -> list[dict[str, Any]]:
    """Draw single ES runs as short as a mean, at the number of runs of that mean."""
    sizes = {run.shrunk["es"]: f"es shrunk={run.shrunk['es']}", run.shrunk_far: "es shrunk far"}
    look, rows = style.ARMS["es"], []
    found = {size: [read(r) for r in of[group]] for size, group in sizes.items()}
    means = [np.mean(values) for values in found.values()]
    words = f"{look.label}, one run as short"
    ax.plot(list(found), means, color=look.color, marker=look.marker, mfc="white", ms=5, ls=":", label=words)
    for size, values in found.items():
        ax.plot([size] * len(values), values, ".", color=look.color, ms=2.5, alpha=0.5)
        rows += [{"panel": what, "arm": "es, one run as short", "runs": size, "value": value} for value in values]
    return rows


def norms(run: SimpleNamespace, of: Records) -> tuple[Figure, DataFrame]:
    """Draw the norm of every run, and of ES arms the norm over that of a walk, with the band of a random direction."""
    import pandas as pd
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots(1, 2, figsize=(style.PAGE, 2.8), width_ratios=(1.8, 1))
    rows = []
    for i, arm in enumerate(study.TRAINED):
        values = view.norms(of, arm)
        style.dots(axes[0], i, values, np.zeros(len(values), bool), arm, 0.3)
        rows += [{"panel": "norm", "arm": arm, "value": value} for value in values]
    axes[0].set(ylim=(0, None), ylabel="norm of the displacement", title="every run")
    _names(axes[0], study.TRAINED)
    walkers = [arm for arm in study.TRAINED if view.is_es(arm)]
    low, high = geometry.norm_band(view.displacements(of, "es").d)
    axes[1].axhspan(low, high, color="#DDDDDD", lw=0)
    axes[1].axhline(1, **_NULL)
    for i, arm in enumerate(walkers):
        values = view.over_walk(of, arm)
        style.dots(axes[1], i, values, np.zeros(len(values), bool), arm, 0.3)
        rows += [{"panel": "over the walk's", "arm": arm, "value": value} for value in values]
    axes[1].set(ylabel="norm / norm of a walk", title="ES arms")
    _names(axes[1], walkers)
    return fig, pd.DataFrame(rows)


def layers(run: SimpleNamespace, of: Records) -> tuple[Figure, DataFrame]:
    """Draw each layer's share of the squared displacement over its share of the weights, mean and range over runs."""
    import pandas as pd
    from matplotlib import pyplot as plt

    arms = ("es", "es_random", "grpo", "grpo_sgd", "grpo_random", "sft")
    fig, ax = plt.subplots(figsize=(style.PAGE, 2.6))
    rows, names = [], view.displacements(of, "es").names
    for k, arm in enumerate(arms):
        found, look = view.displacements(of, arm), style.ARMS[arm]
        ratio = found.shares / found.size_shares[:, None]
        x = np.arange(len(names)) + 0.12 * (k - (len(arms) - 1) / 2)
        mean = ratio.mean(1)
        ends = [mean - ratio.min(1), ratio.max(1) - mean]
        ax.errorbar(x, mean, ends, fmt=look.marker, color=look.color, ms=4, lw=0.8, capsize=1.5, label=look.label)
        for name, values in zip(names, ratio, strict=True):
            row = {"arm": arm, "layer": name, "value": values.mean()}
            rows.append(row | {"low": values.min(), "high": values.max()})
    ax.axhline(1, **_NULL)
    ax.set(yscale="log", ylabel="share of |D|² / share of weights")
    ax.set_xticks(range(len(names)), names)
    ax.grid(axis="x", visible=False)
    _key(fig, ax, 6)
    return fig, pd.DataFrame(rows)


def cosines(run: SimpleNamespace, of: Records) -> tuple[Figure, DataFrame]:
    """Draw the cosine of the means of K runs of ES and K of GRPO, its ceilings and its null, against K."""
    import pandas as pd
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots(1, 2, figsize=(style.PAGE, 3.1), width_ratios=(1, 1))
    rows = []
    pairs = {("es", "grpo"): "ES, GRPO", ("es_random", "grpo"): "ES with random fitness, GRPO"}
    for (a, b), words in pairs.items():
        points = attenuation.cosine_by_count(view.displacements(of, a, b).total, *view.rows_of(of, a, b))
        look, counts = style.ARMS[a], [p.k for p in points]
        axes[0].plot(counts, [p.cosine for p in points], color=look.color, marker=look.marker, ms=3, label=words)
        rows += [{"panel": "means", "pair": words, "runs": p.k, "value": p.cosine} for p in points]
        if a == "es":
            predicted = [p.predicted for p in points]
            axes[0].plot(counts, predicted, color=look.color, ls=":", lw=1, label="foretold from all runs")
            rows += [{"panel": "foretold", "pair": words, "runs": p.k, "value": p.predicted} for p in points]
    axes[0].axhline(0, **_NULL)
    axes[0].set(xlabel="runs in each mean", ylabel="cosine of the means", title="as runs are averaged")
    axes[0].xaxis.get_major_locator().set_params(integer=True)
    axes[0].legend(fontsize=6, loc="center right")
    entries, places = [], []
    for a, b in view.PAIRS:
        found = view.corrected(of, a, b)
        if np.isnan(found.value.low):
            continue
        entries.append((f"{view.label(a)} · {view.label(b)}", found.value))
    for i, (words, found) in enumerate(reversed(entries)):
        ends = [[found.value - found.low], [found.high - found.value]]
        axes[1].errorbar(found.value, i, xerr=ends, fmt="o", color="black", ms=4, lw=1, capsize=2)
        rows.append({"panel": "in common", "pair": words, "value": found.value} | _ends(found))
        places.append(words)
    axes[1].axvline(0, **_NULL)
    axes[1].axvline(1, **_NULL)
    axes[1].set_yticks(range(len(places)), places, fontsize=6)
    axes[1].set(xlabel="cosine", title="of what runs have in common")
    axes[1].grid(axis="y", visible=False)
    return fig, pd.DataFrame(rows)


def _ends(found: Any) -> dict[str, float]:
    return {"low": found.low, "high": found.high}


def drift(run: SimpleNamespace, of: Records) -> tuple[Figure, DataFrame]:
    """Draw what models forget on skills that no reward touches against what they gain on the task.

    A line joins the means of an arm's runs at growing numbers of steps.
    """
    import pandas as pd
    from matplotlib import pyplot as plt

    size = run.shrunk["es"]
    shown = {f"{arm} mean=1": arm for arm in _DRIFTING}
    fig, axes = plt.subplots(1, 2, figsize=(style.PAGE, 2.9), sharex=True)
    rows = []
    for ax, what, factor in zip(axes, ("kl", "greedy"), (1, 100), strict=True):
        for group, arm in shown.items():
            look = style.ARMS[arm]
            x = [100 * view.accuracies([r], "greedy")[0] for r in of[group]]
            y = [factor * view.skill(r, what) for r in of[group]]
            ax.plot(x, y, look.marker, color=look.color, ms=4, ls="", label=f"{look.label}")
            rows += [{"panel": what, "model": group, "x": a, "y": b} for a, b in zip(x, y, strict=True)]
        for arm in study.SHORTER:
            look, ways = style.ARMS[arm], [models for _, models in view.by_steps(run, of, arm)]
            x = [100 * view.accuracies(models, "greedy").mean() for models in ways]
            y = [factor * np.mean([view.skill(r, what) for r in models]) for models in ways]
            ax.plot(x, y, ".-", color=look.color, ms=3, lw=1, label=f"{look.label}, by steps")
            rows += [{"panel": what, "model": f"{arm}, by steps", "x": a, "y": b} for a, b in zip(x, y, strict=True)]
        mean, look = of[f"es mean={size}"], style.ARMS["es"]
        x = [100 * view.accuracies([r], "greedy")[0] for r in mean]
        y = [factor * view.skill(r, what) for r in mean]
        ax.plot(x, y, look.marker, color=look.color, mfc="white", ms=5, ls="", label=f"{look.label}, mean of {size}")
        rows += [{"panel": what, "model": f"es mean={size}", "x": a, "y": b} for a, b in zip(x, y, strict=True)]
        for decay, fill in zip(run.anchor_decays, (style.ARMS["es_anchored"].color, "white"), strict=False):
            group, look = f"{study.anchored_name(decay)} mean=1", style.ARMS["es_anchored"]
            x = [100 * view.accuracies([r], "greedy")[0] for r in of[group]]
            y = [factor * view.skill(r, what) for r in of[group]]
            name = f"{look.label}, {decay:g} a step"
            ax.plot(x, y, look.marker, color=look.color, mfc=fill, ms=5, ls="", label=name)
            rows += [{"panel": what, "model": group, "x": a, "y": b} for a, b in zip(x, y, strict=True)]
        y = [factor * view.skill(r, what) for r in of["random"]]
        x = [100 * view.accuracies([r], "greedy")[0] for r in of["random"]]
        ax.plot(x, y, "x", color="black", ms=4, ls="", label="random direction as long as ES")
        rows += [{"panel": what, "model": "random", "x": a, "y": b} for a, b in zip(x, y, strict=True)]
        base = 100 * float(np.mean(of["base"][0]["test"]["greedy"]))
        ax.axvline(base, color=style.ARMS["base"].color, lw=1)
        ax.set(xlabel="greedy test accuracy, %")
    axes[0].set(yscale="log", ylabel="KL from the base, nats per token", title="drift off the task")
    axes[1].set(ylabel="right, %", title="other skills")
    _key(fig, axes[0], 4)
    return fig, pd.DataFrame(rows)


def _names(ax: Axes, arms: Any) -> None:
    names = [view.label(arm) for arm in arms]
    ax.set_xticks(range(len(arms)), names, fontsize=6, rotation=40, ha="right", rotation_mode="anchor")
    ax.grid(axis="x", visible=False)


def _key(fig: Figure, ax: Axes, columns: int) -> None:
    """Put the legend of one panel below the figure."""
    handles, labels = ax.get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncol=columns, fontsize=6.5)
