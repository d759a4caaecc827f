"""How the figures of notebook 03 are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from evoalign_lib.analysis import hacking, stats
from evoalign_study import collapse, style
from evoalign_study import nb03_conciseness as study
from evoalign_study.loading import DECODINGS, Records
from evoalign_study.records import Record
from evoalign_study.views import conciseness as view

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

_NEAREST = 0.02  # characters: on a logarithmic axis a run at the target itself has no place
_LEAST_KL = 3e-3  # nats, likewise for the untrained base
_AXES = {
    "KL": ("KL from the base, nats per completion", lambda c, _: np.maximum(c["kl"], _LEAST_KL)),
    "proxy": ("reward on split A, characters", lambda c, d: np.array(c[f"proxy_{d}"])),
    "away": (
        "distance from the target length, characters",
        lambda c, d: np.maximum(-np.array(c[f"proxy_{d}"]), _NEAREST),
    ),
    "right": ("right answers on split B, %", lambda c, d: 100 * np.array(c[f"right_{d}"])),
}
_BOUND = {"color": "black", "lw": 1.2, "ls": (0, (1, 2))}
_COMPARED = [("at_proxy", -15), ("at_proxy", -5), ("at_kl", 0.2), ("at_kl", 0.5)]


# ---- the answer: ends, and differences at matched reward and KL


def answer(run: SimpleNamespace, of: Records) -> tuple[Figure, DataFrame]:
    """Draw right answers at the ends of the declared runs, and ES - GRPO at matched reward and KL, by decoding.

    Returns the figure and what it plots, a row per mark.
    """
    import pandas as pd
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots(1, 2, figsize=(style.PAGE, 2.8), width_ratios=(1, 1.25))
    rows = _ends_by_decoding(axes[0], of, study.untrained(of)[run.bases[0]])
    rows += _differences(axes[1], of)
    handles = _arms(of)
    handles += [*_hacked(), _handle("the base", ls="-", lw=1.4, color=style.ARMS["base"].color)]
    handles += [_handle("20 points below the base", **_BOUND)]
    _key(fig, handles)
    return fig, pd.DataFrame(rows)


def _ends_by_decoding(ax: Axes, of: Records, base: Record) -> list[dict[str, Any]]:
    rows, places = [], {}
    for i, decoding in enumerate(DECODINGS):
        start = 100 * base["point"][f"right_{decoding}"]
        ax.plot([i - 0.42, i + 0.42], [start] * 2, color=style.ARMS["base"].color, lw=1.4)
        ax.plot([i - 0.42, i + 0.42], [start - 100 * hacking.DROP] * 2, **_BOUND)
        for arm, offset in zip(study.ARMS, (-0.2, 0.2), strict=True):
            ends = np.array([collapse.end(r, decoding) for r in of[arm]])
            right = np.array([100 * study.end(r, f"right_{decoding}") for r in of[arm]])
            x = i + offset + style.jitter(len(right), 0.28)
            _scatter(ax, x, right, ends == "hacked", arm, 16)
            rows += [{"panel": "end", "decoding": decoding, "arm": arm, "value": value} for value in right]
            places[i] = view.decoding_label(decoding)
    ax.set(xticks=list(places), xticklabels=list(places.values()), xlim=(-0.5, len(places) - 0.5))
    ax.set(title="at the end of training", ylabel=_AXES["right"][0])
    ax.grid(axis="x", visible=False)
    return rows


def _differences(ax: Axes, of: Records) -> list[dict[str, Any]]:
    rows = []
    for i, (axis, level) in enumerate(reversed(_COMPARED)):
        for decoding, offset in zip(DECODINGS, (0.17, -0.17), strict=True):
            y, found = i + offset, study.matched(of, decoding, axis, level)
            if found.difference is None:
                fewest = min(found.right, key=lambda arm: len(found.right[arm]))
                words = f"{view.arm_label(fewest)} does not get there"
                ax.text(0.6, y, words, va="center", fontsize=6, color="#555555")
                continue
            mean, low, high = (100 * x for x in (found.difference.value, found.difference.low, found.difference.high))
            inside = "black" if decoding == "greedy" else "white"
            bar = {"color": "black", "lw": 1, "mfc": inside, "ms": 4.5, "capsize": 2}
            ax.errorbar(mean, y, xerr=[[mean - low], [high - mean]], marker="o", **bar)
            row = {"panel": "matched", "decoding": decoding, "at": view.level_label(axis, level)}
            rows.append(row | {"value": mean, "low": low, "high": high})
    ax.axvline(0, color="black", lw=0.7)
    names = [view.level_label(*level) for level in reversed(_COMPARED)]
    ax.set(yticks=range(len(names)), yticklabels=names, ylim=(-0.5, len(names) - 0.5))
    ax.set(title="where a run first comes to a level", xlabel="right answers, ES - GRPO, points")
    ax.grid(axis="y", visible=False)
    for decoding, inside in zip(DECODINGS, ("black", "white"), strict=True):
        ax.plot([], [], "o", color="black", mfc=inside, ms=4.5, label=view.decoding_label(decoding))
    ax.legend(loc="upper right", handlelength=1)
    return rows


# ---- ways and ends of the runs


def ways_and_ends(run: SimpleNamespace, of: Records) -> tuple[Figure, DataFrame]:
    """Draw right answers against the distance from the target, by decoding: ways of the declared runs, and all ends.

    Returns the figure and what it plots: every point of every declared run, and the ends of the maps.
    """
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots(2, 2, figsize=(style.PAGE, 4.0), sharey="row", sharex="col")
    for column, decoding in zip(axes.T, DECODINGS, strict=True):
        _ways(column[0], of, "away", "right", decoding)
        _ends(column[1], of, "away", "right", decoding)
        column[0].set_title(view.decoding_label(decoding))
        column[1].set_xlabel(_AXES["away"][0])
        column[0].set_xscale("log")
        column[0].invert_xaxis()
        bound = study.untrained(of)[run.bases[0]]["point"][f"right_{decoding}"] - hacking.DROP
        for ax in column:
            ax.axhline(100 * bound, **_BOUND)
            _plain_ticks(ax)
    for row, what in zip(axes, ("on the way", "at the end"), strict=True):
        row[0].set_ylabel(f"{what}:\n{_AXES['right'][0]}")
    handles = _arms(of)
    handles += [_handle("setting compared by C3", marker="o", color="#555555", ms=4.5)]
    handles += [_handle("other settings", marker="o", color="#555555", mfc="none", ms=3)]
    _key(fig, [*handles, *_hacked(), _handle("20 points below the base", **_BOUND)])
    return fig, _plotted(of, "away", "right", ends=True)


def fronts(of: Records) -> tuple[Figure, DataFrame]:
    """Draw the proxy reward against the KL from the base along the declared runs, by decoding.

    Returns the figure and what it plots: every point of every declared run.
    """
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots(1, 2, figsize=(style.PAGE, 2.3), sharey=True)
    for ax, decoding in zip(axes, DECODINGS, strict=True):
        _ways(ax, of, "KL", "proxy", decoding, size=2.4)
        ax.set(title=view.decoding_label(decoding), xlabel=_AXES["KL"][0], xscale="log")
        _plain_ticks(ax)
    axes[0].set_ylabel(_AXES["proxy"][0])
    _key(fig, _arms(of))
    return fig, _plotted(of, "KL", "proxy", ends=False)


def _ways(ax: Axes, of: Records, x: str, y: str, decoding: str, size: float = 3) -> None:
    """Mean way of each arm with a band over seeds, and marks of a size in points where runs were measured."""
    for arm in study.ARMS:
        xs, ys, look = _values(of[arm], x, decoding), _values(of[arm], y, decoding), style.ARMS[arm]
        mean, low, high = stats.curve_band(ys)
        style.band(ax, xs.mean(0), low, high, look.color)
        ax.plot(xs.mean(0), mean, color=look.color, lw=1.6, marker=look.marker, ms=size)


def _ends(ax: Axes, of: Records, x: str, y: str, decoding: str) -> None:
    """A mark where each run ends: filled for the declared setting, open for others of the map, a cross if hacked."""
    for arm in study.ARMS:
        others = _others(of, arm)
        for found, size, filled in ((others, 12, False), (of[arm], 24, True)):
            if found:
                at = [_values(found, axis, decoding)[:, -1] for axis in (x, y)]
                hacked = np.array([collapse.end(r, decoding) == "hacked" for r in found])
                _scatter(ax, *at, hacked, arm, size, filled)


def _others(of: Records, arm: str) -> list[Record]:
    declared = study.setting(of[arm][0]["spec"])
    return [r for r in of[f"{arm}_map"] if study.setting(r["spec"]) != declared]


def _values(found: Sequence[Record], axis: str, decoding: str) -> np.ndarray:
    return np.array([_AXES[axis][1](r["curve"], decoding) for r in found])


def _plotted(of: Records, x: str, y: str, ends: bool) -> DataFrame:
    import pandas as pd

    rows = []
    for arm in study.ARMS:
        for r in [*of[arm], *(_others(of, arm) if ends else [])]:
            for decoding in DECODINGS:
                row = {"arm": arm, "setting": study.setting(r["spec"]), "seed": r["spec"]["seed"]}
                row |= {"decoding": decoding, "end": collapse.end(r, decoding)}
                pairs = list(zip(*(_values([r], axis, decoding)[0] for axis in (x, y)), strict=True))
                rows += [row | {x: at[0], y: at[1]} for at in (pairs if r in of[arm] else pairs[-1:])]
    return pd.DataFrame(rows).drop_duplicates()


# ---- the map of ES


def es_map(run: SimpleNamespace, of: Records) -> tuple[Figure, DataFrame]:
    """Draw a map of right answers over sigma and alpha for each base, with the two lines of the base; darker is worse.

    In brackets stands the distance from the target length. Returns the figure and what it plots, a row per
    setting.
    """
    from matplotlib import pyplot as plt

    table, bases = view.map_rows(of), study.untrained(of)
    fig, axes = plt.subplots(1, len(bases), figsize=(style.PAGE, 2.2), sharey=True, squeeze=False)
    fig.get_layout_engine().set(wspace=0.06)
    for ax, (base, record) in zip(axes[0], bases.items(), strict=True):
        _heat(ax, table, base)
        _lines(ax, table[table["base"] == base], run, collapse.breaking_sigma(record))
        ax.set_title(f"{base}: right answers, % (distance)", pad=16)
        ax.set_xlabel("alpha")
    axes[0, 0].set_ylabel("sigma")
    return fig, table


def _heat(ax: Axes, table: DataFrame, base: str) -> None:
    """The numbers of each cell on a pale ground that is darker where it is worse, and whether its runs collapsed."""
    import seaborn
    from matplotlib.colors import ListedColormap

    own = table[table["base"] == base]
    right, away, fallen = (
        own.pivot(index="sigma", columns="alpha", values=name) for name in ("right", "away", "collapsed")
    )
    scale = ListedColormap(seaborn.light_palette("#98A1B0", n_colors=5, reverse=True))
    ax.imshow(right, cmap=scale, aspect="auto", origin="lower", vmin=table["right"].min(), vmax=table["right"].max())
    for (i, j), value in np.ndenumerate(right.to_numpy()):
        cross = " ✕" if fallen.to_numpy()[i, j] >= 0.5 else ""
        text = f"{value:.0f}{cross} ({away.to_numpy()[i, j]:.1f})"
        ax.text(j, i, text, ha="center", va="center", color="black", fontsize=7)
    ax.set_xticks(range(right.shape[1]), [f"{alpha:g}" for alpha in right.columns])
    ax.set_yticks(range(right.shape[0]), [f"{sigma:g}" for sigma in right.index])
    ax.grid(False)


def _lines(ax: Axes, table: DataFrame, run: SimpleNamespace, critical: float) -> None:
    """Where noise and random walk are as large as the noise that halves the base's right answers, with their names."""
    limits = ax.get_xlim(), ax.get_ylim()
    sigmas, alphas = (np.sort(table[name].unique()) for name in ("sigma", "alpha"))
    walk = critical * (run.es_population_size / run.es_steps) ** 0.5
    x, y = _place(alphas, walk), _place(sigmas, critical)
    how = {"color": "black", "lw": 1.2}
    ax.axvline(x, ls=(0, (4, 2)), **how)
    ax.axhline(y, ls=(0, (1, 1.5)), **how)
    ax.set(xlim=limits[0], ylim=limits[1])
    words = {"fontsize": 6.5, "annotation_clip": False, "textcoords": "offset points"}
    ax.annotate("walk breaks the base →", (x, limits[1][1]), (0, 3), ha="left", **words)
    if ax.get_subplotspec().is_last_col():
        ax.annotate("↑ noise\nbreaks\nthe base", (limits[0][1], y), (3, -2), va="bottom", **words)


def _place(values: np.ndarray, at: float) -> float:
    """Where a value lies on an axis whose cells are even steps of the logarithm."""
    return float(np.polyval(np.polyfit(np.log(values.astype(float)), range(len(values)), 1), np.log(at)))


# ---- Jensen gaps

_OUTLIERS = 3  # a setting is named whose runs all lie so many times farther from the median than three runs of four


def gaps(of: Records) -> tuple[Figure, DataFrame]:
    """Draw the Jensen gap of every run by arm and end, with medians; settings far from the others are named.

    At the middle sigma, with which the declared ES trains. Returns the figure and what it plots, a row per run.
    """
    from matplotlib import pyplot as plt

    table = view.gap_rows(of)
    sigma = table.columns[-2]
    fig, ax = plt.subplots(figsize=(1.3 * style.COLUMN, 2.6))
    spread = (table[sigma] - table[sigma].median()).abs().quantile(0.75)
    kinds = [(arm, end) for arm in study.ARMS for end in ("clean", "hacked")]
    for x, (arm, end) in enumerate(kinds):
        part = table[(table["arm"] == arm) & (table["end"] == end)]
        if len(part):
            places = x + style.jitter(len(part), 0.5)
            _scatter(ax, places, part[sigma].to_numpy(), np.full(len(part), end == "hacked"), arm, 12)
            ax.plot([x - 0.36, x + 0.36], [part[sigma].median()] * 2, color="black", lw=1.4, zorder=5)
            _name_outliers(ax, x, part, sigma, spread)
    names = [f"{view.arm_label(arm)},\n{end}" for arm, end in kinds]
    ax.axhline(0, color="#999999", lw=0.8, zorder=0.5)
    ax.set(ylabel=f"Jensen gap at sigma {sigma}, characters", xticks=range(len(kinds)), xticklabels=names)
    ax.set_xlim(-0.6, len(kinds) - 0.4)
    ax.grid(axis="x", visible=False)
    _key(fig, [_handle("median", color="black", lw=1.4)])
    return fig, table


def _name_outliers(ax: Axes, x: int, part: DataFrame, sigma: str, spread: float) -> None:
    for setting, own in part.groupby("setting"):
        if len(own) > 1 and (own[sigma] - part[sigma].median()).abs().min() > _OUTLIERS * spread:
            ax.annotate(setting.replace(", ", "\n"), (x + 0.35, own[sigma].mean()), va="center", fontsize=6)


# ---- published runs


def published_runs(points: DataFrame) -> Figure:
    """Draw right answers of the published runs against the distance from the target.

    points: of `views.conciseness.published_points`.
    """
    from matplotlib import pyplot as plt

    fig, ax = plt.subplots(figsize=(1.3 * style.COLUMN, 2.6))
    for (label, empty), part in points.groupby(["arm", "all_empty"]):
        look = style.ARMS[label.lower()]
        how = {"marker": look.marker, "s": 24, "color": "none" if empty else look.color, "edgecolors": look.color}
        ax.scatter(part["shortfall"], part["right"], **how)
    ax.set(xscale="log", xlabel=_AXES["away"][0], ylabel="right answers, %")
    ax.invert_xaxis()
    _plain_ticks(ax)
    handles = [_mark(label.lower(), f"{label} (n = {len(part)})") for label, part in points.groupby("arm")]
    _key(fig, [*handles, _handle("every answer empty", marker="o", color="#555555", mfc="none", ms=5)])
    return fig


# ---- marks and legends

_HACKED = {"es": "x", "grpo": "+"}  # two crosses, for a grey print


def _scatter(
    ax: Axes, x: np.ndarray, y: np.ndarray, hacked: np.ndarray, arm: str, size: float, filled: bool = True
) -> None:
    look = style.ARMS[arm]
    face, edge = (look.color, "white") if filled else ("none", look.color)
    clean = {"marker": look.marker, "facecolors": face, "edgecolors": edge, "linewidths": 0.4 if filled else 0.7}
    ax.scatter(x[~hacked], y[~hacked], s=size, **clean)
    wide = 1.1 if filled else 0.7
    ax.scatter(x[hacked], y[hacked], s=1.3 * size, marker=_HACKED[arm], color=look.color, linewidths=wide)


def _plain_ticks(ax: Axes) -> None:
    """Write 0.1, 1 and 10 on a logarithmic axis, not powers of ten."""
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _arms(of: Records) -> list[Any]:
    return [_mark(arm, f"{view.arm_label(arm)} (n = {len(of[arm])})") for arm in study.ARMS]


def _mark(arm: str, label: str) -> Any:
    look = style.ARMS[arm]
    return _handle(label, color=look.color, marker=look.marker, ms=4.5)


def _hacked() -> list[Any]:
    return [
        _handle(f"{view.arm_label(arm)}, hacked", marker=marker, color=style.ARMS[arm].color, ms=5)
        for arm, marker in _HACKED.items()
    ]


def _handle(label: str, **how: Any) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **({} if "ls" in how or "lw" in how else {"ls": ""}) | how)


def _key(fig: Figure, handles: Sequence[Any]) -> None:
    rows = 1 if len(handles) < 6 else 2
    columns = -(-len(handles) // rows)
    # matplotlib fills column by column
    ordered = [one for column in range(columns) for one in handles[column::columns]]
    fig.legend(handles=ordered, loc="outside lower center", ncols=columns, columnspacing=1.4, handlelength=1.8)
