"""The figures of notebook 05, each with what it plots."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np

from evoalign_lib import arms
from evoalign_lib.analysis import stats
from evoalign_study import nb05_stability as study
from evoalign_study import style
from evoalign_study.loading import DECODINGS, Records
from evoalign_study.views import stability as view

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame


# ---- what the figures plot: a row per point


def seed_curves(of: Records) -> DataFrame:
    """Return the greedy validation accuracy of every tuned run, in %, by completions."""
    from pandas import DataFrame, concat

    lines = []
    for r in (r for arm in study.ARMS for r in of[arm]):
        line = {"completions": r["curve"]["completions"], "accuracy": 100 * np.array(r["curve"]["validation_greedy"])}
        lines.append(DataFrame(line).assign(arm=r["spec"]["arm"], seed=r["spec"]["seed"]))
    return concat(lines, ignore_index=True)


def falls(of: Records) -> DataFrame:
    """Return the tuned runs as `frame`, with the largest drawdown of each, in points, in the place of its accuracy."""
    found = view.frame(of, study.ARMS)
    for decoding in DECODINGS:
        found[decoding] = np.concatenate([100 * study.drawdowns(of, arm, decoding) for arm in study.ARMS])
    return found


def worst_run(of: Records, arm: str) -> DataFrame:
    """Return completions, greedy validation accuracy and its running maximum, in %, of the run that falls furthest."""
    from pandas import DataFrame

    curve = of[arm][int(study.drawdowns(of, arm, "greedy").argmax())]["curve"]
    line = 100 * np.array(curve["validation_greedy"])
    return DataFrame(
        {"arm": arm, "completions": curve["completions"], "accuracy": line, "maximum": np.maximum.accumulate(line)}
    )


def population_curves(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return the mean greedy validation accuracy, in %, with its 95 % band, by population and completions."""
    from pandas import DataFrame, concat

    lines = []
    for N, group in study.of_sizes(run).items():
        mean, low, high = stats.curve_band(100 * np.array([r["curve"]["validation_greedy"] for r in of[group]]))
        band = {"completions": of[group][0]["curve"]["completions"], "mean": mean, "low": low, "high": high}
        lines.append(DataFrame({"panel": "greedy", "population_size": N} | band))
    return concat(lines, ignore_index=True)


def contender_scores(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return one row per contender and base: its score, and `step`, its step size as a multiple of the tuned one."""
    tries = view.frame(of, [f"{arm} {kind}" for arm in study.ARMS for kind in ("sweep", "transfer")], panel="settings")
    own = {arm: study.tuned(run, of, arm) for arm in study.ARMS}
    chosen = {(arm, *setting.values()) for arm in study.ARMS for setting in study.contenders(run, of, arm)}
    tries = tries[[(r.arm, *(getattr(r, name) for name in own[r.arm])) in chosen for r in tries.itertuples()]]
    steps = {arm: tries[name] / own[arm][name] for arm, name in study.STEP.items()}
    return tries.assign(step=steps["es"].fillna(steps["grpo"])).sort_values("step")


def transfer_runs(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return one row per full run on another base: arm, base, `which` setting, outcome and greedy accuracy in %."""
    from pandas import DataFrame

    rows = []
    for (arm, base), which in product(study.winners(run, of), ("shared", "best")):
        for r in study.full_runs(run, of, arm, base, which):
            row = {"panel": "test", "arm": arm, "base": base, "which": which, "outcome": study.outcome(r)}
            rows.append(row | {"greedy": 100 * r["test"]["greedy"]})
    return DataFrame(rows)


def horizon_runs(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return the runs of the horizons as `frame`, with their greedy gains over the base in the place of accuracies."""
    found = view.frame(of, [f"{arm} filler={n}" for arm in study.ARMS for n in run.horizons]).drop(columns="t1")
    starts = {length: 100 * of[f"base filler={length}"][0]["test"]["greedy"] for length in run.horizons}
    return found.assign(greedy=found["greedy"] - found["filler_steps"].map(starts))


# ---- the figures


def figure_seeds(run: SimpleNamespace, of: Records) -> tuple[Figure, DataFrame]:
    """Draw mean and range of the tuned runs, the spread over seeds against the mean, and the ends.

    A range is from the lowest to the highest run, and no interval. Returns the figure and the plotted data.
    """
    from matplotlib import pyplot as plt
    from pandas import concat

    lines, ends = seed_curves(of), view.frame(of, study.ARMS)
    points = lines.groupby(["arm", "completions"])["accuracy"].agg(["mean", "std", "min", "max"]).reset_index()
    fig, axes = plt.subplots(1, 3, figsize=(style.PAGE, 2.5), width_ratios=[1.2, 1.1, 0.9])
    for arm, part in points.groupby("arm"):
        after = part[part["completions"] > 0]  # 0 has no place on a logarithmic axis
        axes[0].plot(after["completions"], after["mean"], **style.line(arm))
        style.band(axes[0], after["completions"], after["min"], after["max"], style.ARMS[arm].color)
        axes[1].plot(part["mean"], part["std"], **style.line(arm) | {"markevery": 1, "lw": 0.5})
    _draw_ends(axes[2], ends)
    axes[0].set(xscale="log", xlabel="completions", ylabel="greedy validation accuracy, %")
    axes[1].axvline(100 * run.matched_mean, color="black", lw=0.6, ls=":")
    axes[1].set(xlabel="mean over seeds, %", ylabel="std over seeds, points")
    axes[2].set_ylabel("test accuracy, %")
    style.legend(fig, {arm: len(of[arm]) for arm in study.ARMS}, decodings=())
    return fig, concat([lines.assign(panel="curves"), points.assign(panel="spread"), ends.assign(panel="test")])


def figure_drawdowns(of: Records) -> tuple[Figure, DataFrame]:
    """Draw the worst run of each arm below its running maximum, and every drawdown; return the plotted data, too."""
    from matplotlib import pyplot as plt
    from pandas import concat

    fell, worst = falls(of), concat([worst_run(of, arm) for arm in study.ARMS])
    fig, axes = plt.subplots(1, 2, figsize=(style.PAGE, 2.4), width_ratios=[1.4, 1])
    for arm, one in worst[worst["completions"] > 0].groupby("arm"):  # 0 has no place on a logarithmic axis
        axes[0].plot(one["completions"], one["accuracy"], **style.line(arm))
        axes[0].plot(one["completions"], one["maximum"], color=style.ARMS[arm].color, lw=0.6)
        style.band(axes[0], one["completions"], one["accuracy"], one["maximum"], style.ARMS[arm].color)
    _draw_ends(axes[1], fell)
    axes[0].set(xscale="log", xlabel="completions", ylabel="greedy validation accuracy, %")
    axes[1].set(ylim=(0, None), ylabel="largest drawdown, points")
    style.legend(fig, {arm: len(of[arm]) for arm in study.ARMS}, decodings=())
    return fig, concat([worst.assign(panel="worst run"), fell.assign(panel="drawdown")])


def _draw_ends(ax: Axes, found: DataFrame) -> None:
    """Draw runs as dots, both arms side by side for each decoding."""
    for (i, arm), (j, decoding) in product(enumerate(study.ARMS), enumerate(DECODINGS)):
        part = found[found["arm"] == arm]
        style.dots(ax, 3 * j + i, part[decoding], part["outcome"] == "failed", arm, width=0.6)
    ax.set_xticks([3 * j + 0.5 for j in range(len(DECODINGS))], [view.WORDS[name] for name in DECODINGS])
    ax.set_xlim(-0.9, 3 * len(DECODINGS) - 1.1)


def figure_maps(run: SimpleNamespace, of: Records) -> tuple[Figure, DataFrame]:
    """Draw the maps, the step size to the right in both, and every run by the rank of its setting; return the runs."""
    from matplotlib import pyplot as plt
    from pandas import concat

    cells = {arm: study.map_cells(of, arm) for arm in study.ARMS}
    runs = {arm: view.frame(of, [f"{arm} map"]) for arm in study.ARMS}
    every = concat(cells.values())["mean"]
    fig, axes = plt.subplots(1, 3, figsize=(style.PAGE, 2.9), width_ratios=[1.4, 1.4, 0.9])
    for ax, arm, side in zip(axes, study.ARMS, (-0.2, 0.2), strict=False):
        _draw_map(ax, arm, cells[arm], study.tuned(run, of, arm), (every.min(), every.max()))
        settings = [part for _, part in runs[arm].groupby(list(arms.swept(arm)))]
        for rank, part in enumerate(sorted(settings, key=lambda part: -part["score"].mean()), 1):
            style.dots(axes[2], rank + side, part["score"], part["outcome"] == "failed", arm, width=0.3)
    axes[2].axhline(100 * of["base"][0]["validation"]["greedy"], lw=0.8, color=style.ARMS["base"].color)
    axes[2].set_xticks(range(1, max(map(len, cells.values())) + 1))
    axes[2].set(xlabel="rank of the setting", ylabel="greedy validation accuracy, %")
    style.legend(fig, dict.fromkeys(study.ARMS, len(study.map_seeds(run))) | {"base": None}, decodings=())
    return fig, concat(runs.values())


def _draw_map(ax: Axes, arm: str, cells: DataFrame, chosen: Mapping[str, float], limits: tuple[float, float]) -> None:
    """Draw the means of an arm's settings in grey, with their numbers; the chosen setting is framed."""
    from matplotlib.patches import Rectangle

    x, y = study.STEP[arm], next(name for name in chosen if name != study.STEP[arm])
    table = cells.pivot(index=y, columns=x, values="mean")
    ax.imshow(table, cmap="Greys", vmin=limits[0], vmax=limits[1], aspect="auto", origin="lower")
    for _, cell in cells.iterrows():
        at = table.columns.get_loc(cell[x]), table.index.get_loc(cell[y])
        text = f"{cell['mean']:.1f}\n({cell['low']:.1f}–{cell['high']:.1f})"
        text += f"\n{cell['failed']:.0f} failed" if cell["failed"] else ""
        color = "white" if cell["mean"] > np.mean(limits) else "black"  # whichever stands out from the grey below
        ax.text(*at, text, ha="center", va="center", fontsize=6, color=color)
        if chosen == {x: cell[x], y: cell[y]}:
            for width, edge in ((5, "white"), (2.5, style.ARMS[arm].color)):
                ax.add_patch(Rectangle((at[0] - 0.46, at[1] - 0.46), 0.92, 0.92, fill=False, lw=width, color=edge))
    ax.set_xticks(range(table.shape[1]), [f"{v:g}" for v in table.columns])
    ax.set_yticks(range(table.shape[0]), [f"{v:g}" for v in table.index])
    ax.set(xlabel=f"{x.replace('_', ' ')} (step size)", ylabel=y, title=f"{view.LABELS[arm]}, tuned setting framed")
    ax.grid(False)


def figure_populations(run: SimpleNamespace, of: Records) -> tuple[Figure, DataFrame]:
    """Draw the curves of ES with each population in shades of its blue, and every run by N; return the data, too."""
    from matplotlib import pyplot as plt
    from matplotlib.colors import to_rgb
    from pandas import concat

    blue = np.array(to_rgb(style.ARMS["es"].color))
    shades = ((1 - 0.45 * (1 - blue), "v", ":"), (blue, "o", "-"), (0.35 * blue, "s", "--"))
    bands, ends = population_curves(run, of), view.frame(of, study.of_sizes(run).values(), panel="test")
    fig, axes = plt.subplots(1, 2, figsize=(style.PAGE, 2.4), width_ratios=[1.4, 1])
    for (N, group), (color, marker, dash) in zip(study.of_sizes(run).items(), shades, strict=True):
        part = bands[(bands["population_size"] == N) & (bands["completions"] > 0)]
        look = {"color": color, "marker": marker, "ls": dash, "label": f"N = {N} (n = {len(of[group])})"}
        axes[0].plot(part["completions"], part["mean"], markevery=0.2, **look)
        style.band(axes[0], part["completions"], part["low"], part["high"], color)
    axes[0].set(xscale="log", xlabel="completions", ylabel="greedy validation accuracy, %")
    axes[0].legend()
    _draw_levels(axes[1], ends, "population_size", "greedy")
    axes[1].set(xlabel="N", ylabel="greedy test accuracy, %")
    return fig, concat([bands, ends])


def _draw_levels(ax: Axes, found: DataFrame, field: str, column: str) -> None:
    """Draw runs over the levels of a field, on a logarithmic axis, two arms a little apart; a line joins the means."""
    levels = sorted({float(level) for level in found[field]})
    unit = np.ptp(np.log10(levels)) / 25
    for arm, of_arm in found.groupby("arm"):
        side = 0 if found["arm"].nunique() == 1 else unit if arm == "grpo" else -unit
        for level, part in of_arm.groupby(field):
            at, failed = np.log10(float(level)) + side, part["outcome"] == "failed"
            style.dots(ax, at, part[column], failed, arm, width=1.4 * unit)
        means = of_arm.groupby(field)[column].mean()
        ax.plot(np.log10(means.index.to_numpy(float)) + side, means, color=style.ARMS[arm].color, lw=0.8)
    ax.set_xticks(np.log10(levels), [f"{level:,g}" for level in levels])


def figure_transfer(run: SimpleNamespace, of: Records) -> tuple[Figure, DataFrame]:
    """Draw the contenders by step size on each base, and full runs elsewhere; return the plotted data, too."""
    from matplotlib import pyplot as plt
    from pandas import concat

    tries, finals = contender_scores(run, of), transfer_runs(run, of)
    dashes = dict(zip(run.bases, ("-", "--", ":"), strict=False))
    fig, axes = plt.subplots(1, 2, figsize=(style.PAGE, 2.6), width_ratios=[1, 1.5])
    for (arm, base), part in tries.groupby(["arm", "base"]):
        axes[0].plot(part["step"], part["score"], **style.line(arm) | {"markevery": 1, "linestyle": dashes[base]})
    axes[0].set(xscale="log", xlabel="step size / tuned step size", ylabel="greedy validation accuracy, %")
    axes[0].set_xticks([0.1, 0.3, 1, 3], ["0.1", "0.3", "1", "3"])
    axes[0].minorticks_off()
    ticks, places = [], {"shared": 0, "best": 0.6}
    for i, (arm, base) in enumerate(study.winners(run, of)):
        for which, apart in places.items():
            part = finals[(finals["arm"] == arm) & (finals["base"] == base) & (finals["which"] == which)]
            style.dots(axes[1], 1.6 * i + apart, part["greedy"], part["outcome"] == "failed", arm, width=0.35)
            ticks.append((1.6 * i + apart, f"{which}\n{base.split('/')[-1]}"))
    axes[1].set_xticks(*zip(*ticks, strict=True))
    axes[1].set(ylabel="greedy test accuracy, %")
    n = finals.groupby(["arm", "base", "which"]).size().min()
    handles = [
        plt.Line2D([], [], **style.line(arm) | {"label": f"{view.LABELS[arm]} (right: n = {n})"}) for arm in study.ARMS
    ]
    short = {base.split("/")[-1]: dash for base, dash in dashes.items()}
    handles += [plt.Line2D([], [], color="black", ls=dash, label=f"base {name}") for name, dash in short.items()]
    fig.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return fig, concat([tries, finals])


def figure_prompts(run: SimpleNamespace, of: Records) -> tuple[Figure, DataFrame]:
    """Draw greedy test accuracy and training reward of every run by its number of unique problems; return the runs."""
    from matplotlib import pyplot as plt

    found = view.frame(of, [f"{arm} prompts={n}" for arm in study.ARMS for n in run.prompt_counts])
    fig, axes = plt.subplots(1, 2, figsize=(style.PAGE, 2.5))
    looks = {"greedy": ("greedy test accuracy, %", "other problems"), "reward": ("reward", "own problems, last step")}
    for ax, (column, (label, title)) in zip(axes, looks.items(), strict=True):
        _draw_levels(ax, found, "unique_prompts", column)
        ax.set(xlabel="unique problems", ylabel=label, title=title)
    axes[0].axhline(100 * of["base"][0]["test"]["greedy"], lw=0.8, color=style.ARMS["base"].color)
    n = int(found.groupby(["arm", "unique_prompts"]).size().min())
    style.legend(fig, dict.fromkeys(study.ARMS, n) | {"base": None}, decodings=())
    return fig, found


def figure_horizon(run: SimpleNamespace, of: Records) -> tuple[Figure, DataFrame]:
    """Draw the greedy gain of every run by its steps of thinking before the answer; return the runs, too."""
    from matplotlib import pyplot as plt

    found = horizon_runs(run, of)
    fig, ax = plt.subplots(figsize=(1.3 * style.COLUMN, 2.4))
    _draw_levels(ax, found, "filler_steps", "greedy")
    ax.axhline(0, lw=0.8, color=style.ARMS["base"].color)
    ax.set(xlabel="steps of thinking before the answer", ylabel="greedy gain, points")
    n = int(found.groupby(["arm", "filler_steps"]).size().min())
    style.legend(fig, dict.fromkeys(study.ARMS, n) | {"base": None}, decodings=())
    return fig, found
