"""How the figures of notebook 07 are drawn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from evoalign_lib.analysis import coverage
from evoalign_lib.analysis.coverage import SOLVED_WITHIN
from evoalign_study import nb07_solution_coverage as study
from evoalign_study import style
from evoalign_study.loading import Records
from evoalign_study.measures.base import label
from evoalign_study.views import solution_coverage as view
from evoalign_study.views import solution_coverage_factors as factors

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

_DRAWN = tuple(model for model in view.models() if model != "grpo_random")
"""Models in figures. A random reward leaves GRPO at 0: it stands in the tables."""
_CURVES = tuple(model for model in _DRAWN if model != "dr_grpo")
"""Models with curves of their own: those of Dr.GRPO are GRPO's."""
_BANDS = (study.BASE, "es", "grpo")
"""Models whose intervals are drawn."""
_ALONG = ("es", "es_sampled", "grpo", "dr_grpo", "es_random")
"""Arms that are measured along their runs."""
_PANELS = {"t1": "temperature 1", view.OWN: "each at its own temperature"}


def pass_at_k(run: SimpleNamespace, of: Records) -> tuple[Figure, DataFrame]:
    """Draw what is solved within k samples, at temperature 1 and at each model's own.

    Returns the figure and what it plots, a row per point of a line.
    """
    import pandas as pd
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots(1, 2, figsize=(style.PAGE, 2.8), sharey=True)
    rows = []
    for ax, (temperature, title) in zip(axes, _PANELS.items(), strict=True):
        for model in _CURVES:
            found = view.curve(run, of, model, temperature)
            values = 100 * np.array([each.value for each in found])
            ax.plot(view.CURVE, values, **_look(run, model))
            if model in _BANDS:
                low, high = (100 * np.array([getattr(each, end) for each in found]) for end in ("low", "high"))
                style.band(ax, view.CURVE, low, high, style.ARMS[model].color)
            rows += [
                {"panel": title, "model": view.name(run, model), "k": int(k), "value": value}
                for k, value in zip(view.CURVE, values, strict=True)
            ]
        ax.set(title=title, xlabel="samples k", xscale="log")
        _powers(ax)
    axes[0].set(ylabel="problems solved, %", ylim=(0, 100))
    _key(fig, axes[0])
    return fig, pd.DataFrame(rows)


def matched(run: SimpleNamespace, of: Records) -> tuple[Figure, DataFrame]:
    """Draw what is solved within 256 samples against what one sample solves, a curve through the temperatures."""
    import pandas as pd
    from matplotlib import pyplot as plt

    fig, ax = plt.subplots(figsize=(0.8 * style.PAGE, 3.0))
    rows = []
    for model in _CURVES:
        one, many = (
            np.array([_solved(run, of, model, label(t), k) for t in run.coverage_temperatures])
            for k in (1, SOLVED_WITHIN)
        )
        look = _look(run, model)
        ax.plot(one, many, **look | {"markevery": None, "ms": 3, "mfc": "white"})
        at = run.coverage_temperatures.index(1.0)
        ax.plot(one[at], many[at], marker=look["marker"] or "o", color=look["color"], ms=6)
        rows += [
            {"model": view.name(run, model), "temperature": t, "across": x, "value": y}
            for t, x, y in zip(run.coverage_temperatures, one, many, strict=True)
        ]
    ax.set(xlabel="solved by one sample, %", ylabel=f"solved within {SOLVED_WITHIN} samples, %", xlim=(0, None))
    _key(fig, ax)
    return fig, pd.DataFrame(rows)


def support(run: SimpleNamespace, of: Records) -> tuple[Figure, DataFrame]:
    """Draw the four regions as a concept, and what each model wins and loses within 256 samples at temperature 1."""
    import pandas as pd
    from matplotlib import pyplot as plt

    fig, (left, right) = plt.subplots(1, 2, figsize=(style.PAGE, 3.2), width_ratios=(1, 2.2), layout="constrained")
    _regions(left)
    rows, names = [], []
    for y, model in enumerate(_DRAWN):
        found = view.supports(run, of, model, "t1")
        won, lost = (float(np.mean([getattr(each, part) for each in found])) for part in ("won", "lost"))
        color = style.ARMS["es" if model == study.MEAN else model].color
        for value, hatch in ((won, ""), (-lost, "////")):
            right.barh(y, value, color="white" if hatch else color, edgecolor=color, hatch=hatch, height=0.62, lw=0.8)
        net = won - lost
        right.plot(net, y, marker="|", ms=11, mew=2, color="black", ls="", label="net" if y == 0 else None)
        rows.append({"model": view.name(run, model), "won": won, "lost": lost, "value": net})
        names.append("base, once more" if model == study.BASE else view.name(run, model))
    right.axvline(0, color="black", lw=0.8)
    right.set_yticks(range(len(names)), names)
    right.invert_yaxis()
    right.set(xlabel=f"lost (hatched)  ·  won, of {view.records(run, of, study.BASE)[0]['n']} problems")
    right.legend(fontsize=7, loc="lower left")
    right.tick_params(axis="y", length=0)
    return fig, pd.DataFrame(rows)


def _regions(ax: Axes) -> None:
    """Draw who solves a problem within k samples: base across, trained model up."""
    words = {(0, 1): "won", (1, 1): "kept", (0, 0): "out", (1, 0): "lost"}
    shades = {"won": "#FFFFFF", "kept": "#DDDDDD", "out": "#FFFFFF", "lost": "#FFFFFF"}
    for (x, y), word in words.items():
        hatch = "////" if word == "lost" else ""
        ax.fill_between([x, x + 1], y, y + 1, facecolor=shades[word], edgecolor="#888888", hatch=hatch, lw=0.8)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5} if hatch else None
        ax.text(x + 0.5, y + 0.5, word, ha="center", va="center", fontsize=9, bbox=box)
    ax.set(xlim=(0, 2), ylim=(0, 2), xlabel="base solves it", ylabel="trained model solves it", aspect="equal")
    ax.set_xticks([0.5, 1.5], ["no", "yes"])
    ax.set_yticks([0.5, 1.5], ["no", "yes"])
    ax.tick_params(length=0)


def training(run: SimpleNamespace, of: Records) -> tuple[Figure, DataFrame]:
    """Draw along the runs what is won and lost within 256 samples against the base, at temperature 1."""
    import pandas as pd
    from matplotlib import pyplot as plt

    panels = {
        "won_t1": "won",
        "lost_t1": "lost",
    }
    fig, axes = plt.subplots(1, 2, figsize=(style.PAGE, 2.6), sharey=True)
    rows = []
    for ax, (field, title) in zip(axes, panels.items(), strict=True):
        for arm in _ALONG:
            steps = np.array(of[arm][0]["curve"]["step"])
            values = 100 * np.mean([record["curve"][field] for record in of[arm]], axis=0)
            ax.plot(100 * steps / steps[-1], values, **_look(run, arm))
            rows += [
                {"panel": title, "model": view.name(run, arm), "step": int(step), "value": value}
                for step, value in zip(steps, values, strict=True)
            ]
        ax.set(title=title, xlabel="steps of the run, %")
    axes[0].set(ylabel="validation problems, %", ylim=(0, None))
    _key(fig, axes[0])
    return fig, pd.DataFrame(rows)


def accuracies(run: SimpleNamespace, of: Records) -> tuple[Figure, DataFrame]:
    """Draw how many problems have which chance that one sample at temperature 1 is right."""
    import pandas as pd
    from matplotlib import pyplot as plt

    edges = np.array([0.0, 0.001, 0.01, 0.03, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0])
    names = ["0", *(f"to {edge:g}" for edge in edges[1:-1]), "below 1", "1"]
    shown = (study.BASE, "es", "es_sampled", "grpo", "sft")
    fig, ax = plt.subplots(figsize=(style.PAGE, 2.8))
    rows = []
    for model in shown:
        counts = coverage.accuracy_bins(view.chances(run, of, model, "t1"), edges).mean(0)
        ax.plot(range(len(names)), counts, drawstyle="steps-mid", **_look(run, model) | {"marker": None, "lw": 1.6})
        rows += [
            {"model": view.name(run, model), "chance": each, "value": value}
            for each, value in zip(names, counts, strict=True)
        ]
    ax.set_xticks(range(len(names)), names)
    ax.set(xlabel="chance that one sample is right, up to", ylabel="problems", ylim=(0, None))
    _key(fig, ax)
    return fig, pd.DataFrame(rows)


def _solved(run: SimpleNamespace, of: Records, model: str, temperature: str, k: int) -> float:
    """Return pass@k in percent."""
    return 100 * float(coverage.pass_at(view.chances(run, of, model, temperature), k).mean())


def _look(run: SimpleNamespace, model: str) -> dict[str, Any]:
    """Return how a model's line is drawn; the mean of ES runs has the colour of ES."""
    look = style.ARMS["es" if model == study.MEAN else model]
    stroke = "--" if model == study.MEAN or look.null else "-"
    return {
        "color": look.color,
        "marker": look.marker or None,
        "markevery": 0.2,
        "ms": 4,
        "lw": 1.2,
        "ls": stroke,
        "label": view.name(run, model),
    }


def _powers(ax: Axes) -> None:
    ax.set_xticks([1, 4, 16, 64, 256, 1024], ["1", "4", "16", "64", "256", "1,024"])
    ax.minorticks_off()


def _key(fig: Figure, ax: Axes) -> None:
    handles, labels = ax.get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=7)


def cells(run: SimpleNamespace, of: Records) -> tuple[Figure, DataFrame]:
    """Draw what who writes and who updates do to support: along the runs against accuracy, and at their ends.

    Returns the figure and what it plots.
    """
    import pandas as pd
    from matplotlib import pyplot as plt

    fig, (left, right) = plt.subplots(1, 2, figsize=(style.PAGE, 2.6), width_ratios=(1.5, 1))
    rows, change = [], factors.ASKED[5]
    slower = factors.look("temperature", "gradient") | {"ls": ":", "marker": "D", "mfc": "white"}
    slower["label"] += ", slower"
    drawn = [(factors.look(*cell), group) for cell, group in study.CELLS.items()] + [(slower, study.SLOWER)]
    for look, group in drawn:
        curves = [record["curve"] for record in of[group]]
        one = 100 * np.mean([curve["reach_t1@1"] for curve in curves], axis=0)
        net = 100 * np.mean([np.subtract(curve["won_t1"], curve["lost_t1"]) for curve in curves], axis=0)
        left.plot(one, net, **look, ms=4, lw=1.2)
        rows += [
            {"panel": "along", "cell": look["label"], "step": step, "across": x, "value": y}
            for step, x, y in zip(curves[0]["step"], one, net, strict=True)
        ]
    left.set(xlabel="solved by one sample at temperature 1, %", ylabel="won - lost, % of problems")
    for update, words in factors.UPDATES.items():
        found = [factors.value(of, study.CELLS[who, update], change) for who in factors.ROLLOUTS]
        values = [each.value for each in found]
        ends = np.array([[each.value - each.low, each.high - each.value] for each in found]).T
        color = factors.look("temperature", update)["color"]
        right.errorbar([0, 1], values, yerr=ends, color=color, marker="D", ms=4, capsize=3, lw=1.2)
        rows += [
            {"panel": "ends", "cell": f"{words}, {who}", "value": each}
            for who, each in zip(factors.ROLLOUTS.values(), values, strict=True)
        ]
        right.annotate(words, (1, values[1]), xytext=(8, 0), textcoords="offset points", color=color, va="center")
    right.set_xticks([0, 1], ["the weights\nthemselves", "perturbed\ncopies"])
    right.set(xlim=(-0.25, 1.9), ylabel="net change of support", xlabel="who writes")
    right.axhline(0, color="#888888", lw=0.7)
    left.axhline(0, color="#888888", lw=0.7)
    handles, labels = left.get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=7)
    return fig, pd.DataFrame(rows)


def composed(run: SimpleNamespace, of: Records) -> tuple[Figure, DataFrame]:
    """Draw greedy accuracy and coverage along runs of one arm and of two, at as many FLOPs."""
    import pandas as pd
    from matplotlib import pyplot as plt

    fields = {
        "validation_greedy": "right greedily",
        f"reach_t1@{SOLVED_WITHIN}": f"solved within {SOLVED_WITHIN} samples at temperature 1",
    }
    fig, axes = plt.subplots(1, 2, figsize=(style.PAGE, 2.4))
    rows, strokes = [], ("-", "-", "--", ":")
    for ax, (field, title) in zip(axes, fields.items(), strict=True):
        for (words, group), stroke in zip(factors.ORDERS.items(), strokes, strict=True):
            for part, (spent, values) in zip(factors.parts(of, group)[0], factors.along(of, group, field), strict=True):
                look = style.ARMS[part["spec"]["arm"]]
                spent, values = spent / 1e12, 100 * values
                ax.plot(spent, values, color=look.color, ls=stroke, lw=1.4, marker=look.marker, ms=3.5, markevery=0.25)
                rows += [
                    {"panel": title, "runs": words, "arm": part["spec"]["arm"], "across": x, "value": y}
                    for x, y in zip(spent, values, strict=True)
                ]
        ax.set(title=title, xlabel="forward-equivalent TFLOP, all parts")
    axes[0].set(ylabel="validation problems, %")
    from matplotlib.lines import Line2D

    key = [Line2D([], [], color=style.ARMS[arm].color, marker=style.ARMS[arm].marker, ms=4, label=style.ARMS[arm].label)
           for arm in ("es", "grpo")]  # fmt: skip
    key += [
        Line2D([], [], color="#444444", ls=stroke, label=words)
        for words, stroke in zip(("one arm alone", *list(factors.ORDERS)[2:]), strokes[1:], strict=True)
    ]
    fig.legend(handles=key, loc="outside lower center", ncols=5, fontsize=7)
    return fig, pd.DataFrame(rows)
