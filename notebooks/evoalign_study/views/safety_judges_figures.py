"""How the figures of notebook 04 about its own models are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from evoalign_lib.analysis import overoptimisation
from evoalign_lib.analysis.stats import Interval
from evoalign_lib.tiny import scorers
from evoalign_study import nb04_safety_judges as study
from evoalign_study import style
from evoalign_study.loading import DECODINGS, Records
from evoalign_study.records import Record
from evoalign_study.views import safety_judges as view

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

GAINS = np.linspace(0, 3, 25)
"""Of the training judge, in spreads, at which curves are averaged."""
_GAINED = "training judge's score has risen by, spreads"
_ZERO = {"color": "black", "lw": 1.0}


def answer(of: Records) -> tuple[Figure, DataFrame]:
    """Draw the true reward along the training judge's gain, and ES - GRPO in wins where the claims compare them.

    Returns the figure and what it plots, a row per mark or point.
    """
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots(1, 2, figsize=(style.PAGE, 2.7), width_ratios=(1.15, 1))
    rows = []
    for decoding in DECODINGS:
        for arm in study.ARMS:
            rows += _along(axes[0], of, arm, study.TRUE, decoding)
    axes[0].axvline(study.GAIN, color="black", lw=0.8, ls=(0, (1, 2)))
    axes[0].set(xlabel=_GAINED, ylabel="true reward", title="along the runs, mean over six training judges")
    rows += _differences(axes[1], of)
    style.legend(fig, {arm: len(of[arm]) for arm in study.ARMS})
    return fig, view.frame(rows)


def _along(ax: Axes, of: Records, arm: str, quantity: str, decoding: str, factor: float = 1.0) -> list[dict[str, Any]]:
    """Draw a quantity of an arm along the training judge's gain, as far as three of four runs on each judge get."""
    rows = []
    for gain in GAINS:
        found = study.mean(of, arm, quantity, decoding, float(gain))
        if found is None:
            break
        row = {"quantity": quantity, "arm": arm, "decoding": decoding, "gain": round(float(gain), 4)}
        ends = dict(zip(("value", "low", "high"), (round(factor * x, 4) for x in _three(found)), strict=True))
        rows.append(row | ends | {"seeds": found.n})
    if rows:
        x = [row["gain"] for row in rows]
        ax.plot(x, [row["value"] for row in rows], **style.line(arm, decoding))
        style.band(ax, x, *([row[end] for row in rows] for end in ("low", "high")), style.ARMS[arm].color)
    return rows


def _three(found: Interval) -> tuple[float, float, float]:
    return found.value, found.low, found.high


def _differences(ax: Axes, of: Records) -> list[dict[str, Any]]:
    """Draw ES - GRPO in wins under each judge, and under each less the training judge, with intervals over seeds."""
    asked = [(judge, "") for judge in study.JUDGES] + [(judge, study.TRAINING) for judge in study.JUDGES[1:]]
    rows = []
    for i, (judge, less) in enumerate(reversed(asked)):
        for decoding, offset in zip(DECODINGS, (0.17, -0.17), strict=True):
            found = study.difference(of, judge, decoding, study.GAIN, less)
            if found is None:
                ax.text(0, i + offset, "too few get there", va="center", ha="center", fontsize=6, color="#555555")
                continue
            mean, low, high = (100 * x for x in _three(found))
            inside = "black" if decoding == "greedy" else "white"
            bar = {"color": "black", "lw": 1, "mfc": inside, "ms": 4.2, "capsize": 2}
            ax.errorbar(mean, i + offset, xerr=[[mean - low], [high - mean]], marker="o", **bar)
            rows.append({"quantity": f"wins, {judge}" + (" - training judge" if less else ""), "arm": "es - grpo"})
            rows[-1] |= {"decoding": decoding, "gain": study.GAIN, "value": mean, "low": low, "high": high}
    names = [f"{judge}" if not less else f"{judge} - training" for judge, less in reversed(asked)]
    ax.axvline(0, **_ZERO)
    ax.set(yticks=range(len(names)), yticklabels=names, ylim=(-0.5, len(names) - 0.5))
    ax.set(xlabel="wins against the base, ES - GRPO, points", title=f"at {study.GAIN:g} spreads, by judge")
    ax.grid(axis="y", visible=False)
    for decoding, inside in zip(DECODINGS, ("black", "white"), strict=True):
        ax.plot([], [], "o", color="black", mfc=inside, ms=4.2, label=style.STROKES[decoding].label)
    ax.legend(loc="upper left", handlelength=1)
    return rows


REPLIES = ("template", "alternative", "complied")
"""Quantities that `replies` draws, a panel each."""


def replies(of: Records) -> tuple[Figure, DataFrame]:
    """Draw what the replies are like along the training judge's gain, a panel per quantity.

    Returns the figure and what it plots, a row per point.
    """
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots(1, len(REPLIES), figsize=(style.PAGE, 2.0))
    rows = []
    for ax, quantity in zip(axes, REPLIES, strict=True):
        for decoding in ("greedy",) if quantity == "template" else DECODINGS:
            for arm in study.ARMS:
                rows += _along(ax, of, arm, quantity, decoding, 100.0)
        ax.set_title(view.WORDS[quantity].replace(" with ", "\nwith ").replace(" lawful", "\nlawful"))
        ax.set_xlabel("judge's gain, spreads")
    style.legend(fig, {arm: len(of[arm]) for arm in study.ARMS})
    return fig, view.frame(rows)


def laws(of: Records) -> tuple[Figure, DataFrame]:
    """Draw gains of held-out runs against the distance from the base, with the laws, a panel per training judge.

    Returns the figure and what it plots: every point of the runs of odd seeds, at temperature 1. The laws are fitted to
    even seeds.
    """
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots(2, 3, figsize=(style.PAGE, 2.5), sharex=True, sharey=True)
    rows = []
    for ax, judge in zip(axes.flat, study.cells(of["es"]), strict=False):
        for arm in study.ARMS:
            halves, look = study.law_points(of, study.on_judge(of[arm], judge), study.TRUE), style.ARMS[arm]
            for d, gain in halves[1]:
                ax.scatter(d, gain, s=5, marker=look.marker, color=look.color, linewidths=0)
                rows += [
                    {"judge": judge, "arm": arm, "d": round(float(a), 3), "gain": round(float(b), 3)}
                    for a, b in zip(d, gain, strict=True)
                ]
            if not halves[0]:
                continue
            d, gain = (np.concatenate([run[i] for run in halves[0]]) for i in (0, 1))
            x = np.linspace(0, max(float(d.max()), 1e-3), 80)
            fitted = overoptimisation.fit("rl", d, gain)
            ax.plot(x, fitted.at(x), color=look.color, lw=1.1, ls="-" if arm == "es" else "--")
        ax.set_title(judge)
        ax.axhline(0, **_ZERO)
        ax.set_ylim(bottom=-4.2)
    for ax in axes[:, 0]:
        ax.set_ylabel("gain in\ntrue reward")
    axes[1, 1].set_xlabel("distance d from the base, square root of the KL in nats a completion")
    looks = {arm: {"ls": "-" if arm == "es" else "--", "marker": style.ARMS[arm].marker} for arm in study.ARMS}
    _key(fig, [_line(arm, lw=1.1, **look) for arm, look in looks.items()])
    return fig, view.frame(rows)


def noise(of: Records) -> tuple[Figure, DataFrame]:
    """Draw the true reward where the claim compares it, on judges of turned comparisons and on narrower ones.

    Returns the figure and what it plots: every run that gets there.
    """
    from matplotlib import pyplot as plt

    base, narrower = of["base"][0]["test"], list(scorers.SIZES)[::-1]
    fig, axes = plt.subplots(1, 2, figsize=(style.PAGE, 2.1))
    rows, judges = [], [*scorers.NOISY, *narrower]
    names = [f"{100 * judge.annotators.flips:g} %" for judge in scorers.NOISY.values()]
    names += [f"width\n{scorers.SIZES[name].hidden}" for name in narrower]
    places = [*range(len(scorers.NOISY)), *(len(scorers.NOISY) + 0.5 + i for i in range(len(narrower)))]
    for ax, decoding in zip(axes, DECODINGS, strict=True):
        for place, judge in zip(places, judges, strict=True):
            for arm, offset in zip(study.ARMS, (-0.17, 0.17), strict=True):
                runs = view.noisy_runs(of, arm, judge)
                values = [x for r in runs if (x := study.at(of, r, study.TRUE, decoding, study.GAIN)) is not None]
                if values:
                    style.dots(ax, place + offset, values, [False] * len(values), arm, 0.2)
                rows += [{"judge": judge, "arm": arm, "decoding": decoding, "true": round(x, 4)} for x in values]
        ax.axhline(base[decoding]["score"][-1], color=style.ARMS["base"].color, lw=1.2, ls=":")
        ax.set(xticks=places, xticklabels=names, title=style.STROKES[decoding].label)
        ax.set_xlabel("turned comparisons, or a narrower judge")
        ax.grid(axis="x", visible=False)
    axes[0].set_ylabel("true reward")
    handles = [_line(arm, marker=style.ARMS[arm].marker, ls="") for arm in study.ARMS]
    _key(fig, [*handles, _handle("the untrained base", color=style.ARMS["base"].color, lw=1.2, ls=":")])
    return fig, view.frame(rows)


def tournament(found: Sequence[Record]) -> tuple[Figure, DataFrame]:
    """Draw the share of games that each arm wins at the end of training, by who judges, a mark per training judge.

    Returns the figure and what it plots: a row per training judge, kind of judge and arm.
    """
    from matplotlib import pyplot as plt

    fig, ax = plt.subplots(figsize=(style.PAGE, 2.4))
    arms, rows = list(found[0]["spec"]["arms"]), []
    offsets = np.linspace(-0.3, 0.3, len(arms))
    for i, (kind, chosen) in enumerate(view.KINDS_OF_JUDGES.items()):
        for arm, offset in zip(arms, offsets, strict=True):
            shares = [100 * float(np.mean([said["wins"][arm] for said in chosen(r)])) for r in found]
            style.dots(ax, i + offset, shares, [False] * len(shares), arm, 0.1)
            rows += [
                {"training judge": r["spec"]["judge"], "judged by": kind, "arm": arm, "won": round(share, 2)}
                for r, share in zip(found, shares, strict=True)
            ]
    ax.axhline(50, **_ZERO)
    ax.set(xticks=range(len(view.KINDS_OF_JUDGES)), xticklabels=list(view.KINDS_OF_JUDGES), ylabel="games won, %")
    ax.grid(axis="x", visible=False)
    _key(fig, [_line(arm, marker=style.ARMS[arm].marker, ls="") for arm in arms])
    return fig, view.frame(rows)


def _line(arm: str, **how: Any) -> Any:
    return _handle(style.ARMS[arm].label, color=style.ARMS[arm].color, **how)


def _handle(label: str, **how: Any) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **how)


def _key(fig: Figure, handles: Sequence[Any]) -> None:
    fig.legend(handles=handles, loc="outside lower center", ncols=len(handles), columnspacing=1.4, handlelength=1.8)
