"""Plotting functions that several notebooks share: panels, lines, marks, maps and legends, from tidy frames."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from pandas import DataFrame

from evoalign_lib.analysis.stats import Interval
from evoalign_study import style

Looks = Mapping[Any, Mapping[str, Any]]
"""Name of a line -> keyword arguments of `Axes.plot`."""
NULL = {"color": "black", "lw": 0.9, "ls": (0, (1, 2))}
"""Style of the line that marks the null value of a quantity."""
BASE = {"color": style.ARMS["base"].color, "lw": 1.0}
"""Style of the untrained base's line."""


def look(arm: str, **how: Any) -> dict[str, Any]:
    """Return the keyword arguments of `Axes.plot` for an arm's line; `how` overrides them."""
    entry = style.ARMS[arm]
    return {"color": entry.color, "marker": entry.marker or None, "label": entry.label} | how


def panels(
    points: DataFrame, by: str, height: float, **how: Any
) -> tuple[Figure, list[Axes], Iterator[tuple[Axes, Any, DataFrame]]]:
    """Return a figure as wide as the page with panels side by side, their axes, and (axes, name, rows) of each panel.

    Args:
        points: a row per point.
        by: the column whose values, in the order of the rows, get a panel each.
        height: inches.
        **how: keyword arguments of `plt.subplots`.
    """
    parts = list(points.groupby(by, sort=False))
    fig, axes = plt.subplots(1, len(parts), figsize=(style.PAGE, height), squeeze=False, **how)
    return fig, axes[0], ((ax, name, part) for ax, (name, part) in zip(axes[0], parts, strict=True))


def lines(ax: Axes, frame: DataFrame, x: str, y: str, by: Any, looks: Looks, **how: Any) -> None:
    """Draw a line through the points of each name in a column, with a band if the frame has columns low and high.

    Args:
        ax: the panel.
        frame: a row per point; columns low and high are the ends of a band.
        x: column for the x axis.
        y: column for the y axis.
        by: column of the names, or several columns; lines are drawn in the order of the rows.
        looks: looks of the lines.
        **how: keyword arguments for all lines, which a line's own look overrides.
    """
    for name, points in frame.groupby(by, sort=False):
        ax.plot(points[x], points[y], **how | looks[name])
        if "low" in points:
            style.band(ax, points[x], points["low"], points["high"], looks[name]["color"])


def grid(
    points: DataFrame, x: str, y: str, by: str, looks: Looks, height: float, columns: int = 4, **labels: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure with `lines` in a panel for each value of the column "panel", and one legend below.

    Args:
        points: as for `lines`, with a column "panel" of titles.
        x: as for `lines`.
        y: as for `lines`.
        by: as for `lines`.
        looks: as for `lines`.
        height: inches.
        columns: number of columns of the legend.
        **labels: keyword arguments of `Axes.set`, for every panel.
    """
    fig, axes, shown = panels(points, "panel", height)
    for ax, title, part in shown:
        lines(ax, part, x, y, by, looks)
        ax.set(title=title, **labels)
    key(fig, axes[0], columns)
    return fig, axes


def curves(ax: Axes, frame: DataFrame, x: str, y: str, **how: Any) -> None:
    """Draw a line with its band, in its fixed look, for each arm and decoding (columns of the frame)."""
    pairs = frame[["arm", "decoding"]].itertuples(index=False, name=None)
    lines(ax, frame, x, y, ["arm", "decoding"], {pair: style.line(*pair) | how for pair in pairs})


def whiskers(ax: Axes, frame: DataFrame, across: Any = None, up: Any = None, **how: Any) -> None:
    """Draw values with intervals (columns value, low, high): vertical at x = `across`, or horizontal at y = `up`."""
    value, low, high = frame["value"], frame["low"], frame["high"]
    error = {"yerr" if up is None else "xerr": [value - low, high - value]}
    ax.errorbar(*((across, value) if up is None else (value, up)), **error, **how)


def ends(interval: Interval, scale: float = 1) -> dict[str, float]:
    """Return an interval as columns of a tidy frame: value, low and high, times `scale`."""
    return {name: scale * getattr(interval, name) for name in ("value", "low", "high")}


def handle(label: str, **how: Any) -> Line2D:
    """Return a legend entry; without a line style or width it is a marker only."""
    return Line2D([], [], label=label, **({} if "ls" in how or "lw" in how else {"ls": ""}) | how)


def of_arm(arm: str, n: int | None = None, **how: Any) -> Line2D:
    """Return an arm's legend entry, by default a marker only. n: number of its runs."""
    of_runs = "" if n is None else f" (n = {n})"
    return handle(**look(arm, label=f"{style.ARMS[arm].label}{of_runs}") | how)


def key(fig: Figure, entries: Axes | Sequence[Any], columns: int = 0, size: float = 7) -> None:
    """Put a legend below a figure, with a panel's entries or the given ones.

    Args:
        fig: the figure.
        entries: a panel, or legend entries.
        columns: number of columns; by default one row of up to five entries, and two rows of more.
        size: font size, points.
    """
    handles = entries.get_legend_handles_labels()[0] if hasattr(entries, "get_legend_handles_labels") else entries
    columns = columns or (len(handles) if len(handles) < 6 else -(-len(handles) // 2))
    # matplotlib fills column by column
    ordered = [one for column in range(columns) for one in handles[column::columns]]
    fig.legend(handles=ordered, loc="outside lower center", ncols=columns, fontsize=size, columnspacing=1.4)


def plain_ticks(ax: Axes, ticks: Sequence[float] | None = None) -> None:
    """Make the x axis logarithmic with labels like 0.1, 1 and 10, not powers of ten. ticks: its only ticks, if any."""
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    if ticks is not None:
        ax.set_xticks(ticks)
        ax.minorticks_off()


def strip(ax: Axes, runs: Mapping[str, Sequence[tuple[str, DataFrame]]], column: str, width: float = 0.3) -> None:
    """Draw every run as a dot, failed ones as crosses, and means as the arms' markers.

    Args:
        ax: the panel.
        runs: tick label -> (arm, runs) pairs, drawn side by side there.
        column: the column to draw; a column outcome, if there is one, tells which runs have "failed".
        width: width over which one arm's dots are spread; ticks are 1 apart.
    """
    for at, sides in enumerate(runs.values()):
        for i, (arm, part) in enumerate(sides):
            crossed = part["outcome"] == "failed" if "outcome" in part else [False] * len(part)
            style.dots(ax, at + 1.4 * width * (i - (len(sides) - 1) / 2), part[column], crossed, arm, width)
    ax.set_xticks(range(len(runs)), list(runs))
    ax.set_xlim(-0.6, len(runs) - 0.4)
    ax.grid(axis="x", visible=False)


def differences(ax: Axes, asked: Mapping[str, Mapping[str, Interval | str]], legend: str) -> DataFrame:
    """Draw intervals of differences in percentage points, one line per name from the top; filled markers are greedy.

    Args:
        ax: the panel.
        asked: name -> decoding -> the interval, or the text to write instead of it.
        legend: location of the legend of the decodings.

    Returns:
        A row per interval, from the bottom: its name, decoding, value and ends.
    """
    rows, names, fills = [], list(asked)[::-1], {"greedy": "black", "t1": "white"}
    looks = {d: {"marker": "o", "color": "black", "ms": 4.5, "mfc": fill} for d, fill in fills.items()}
    for y, name in enumerate(names):
        for (decoding, each), offset in zip(asked[name].items(), (0.17, -0.17), strict=True):
            if isinstance(each, str):
                ax.text(0.6, y + offset, each, va="center", fontsize=6, color="#555555")
                continue
            rows.append({"name": name, "decoding": decoding} | ends(each, 100))
            whiskers(ax, DataFrame(rows[-1:]), up=y + offset, capsize=2, lw=1, **looks[decoding])
    ax.axvline(0, color="black", lw=0.8)
    ax.set(yticks=range(len(names)), yticklabels=names, ylim=(-0.5, len(names) - 0.5))
    ax.grid(axis="y", visible=False)
    entries = [handle(style.STROKES[decoding].label, **drawn) for decoding, drawn in looks.items()]
    ax.legend(handles=entries, loc=legend, handlelength=1)
    return DataFrame(rows)


def heat(
    ax: Axes, cells: DataFrame, axes: tuple[str, str], value: str, text: Callable[[dict[str, Any]], str], **how: Any
) -> DataFrame:
    """Draw cells as a heat map with a text in each; return the table of the values.

    Args:
        ax: the panel.
        cells: a row per cell.
        axes: columns for the x and y axes, in the order of their values.
        value: column that the colours show.
        text: returns the text for a row; it is white if the value is above `white`, which is optional.
        **how: keyword arguments of `Axes.imshow`, and `white`.
    """
    white = how.pop("white", float("inf"))
    table = cells.pivot(index=axes[1], columns=axes[0], values=value)
    ax.imshow(table, aspect="auto", origin="lower", **how)
    for cell in cells.to_dict("records"):
        at = table.columns.get_loc(cell[axes[0]]), table.index.get_loc(cell[axes[1]])
        color = "white" if cell[value] > white else "black"
        ax.text(*at, text(cell), ha="center", va="center", fontsize=6.5, color=color)
    ax.set_xticks(range(table.shape[1]), [f"{x:g}" for x in table.columns])
    ax.set_yticks(range(table.shape[0]), [f"{y:g}" for y in table.index])
    ax.grid(False)
    return table


def framed(ax: Axes, table: DataFrame, setting: Mapping[str, float], color: str) -> None:
    """Draw a frame around the cell of a `heat` map with this setting, if the map has one."""
    x, y = setting[table.columns.name], setting[table.index.name]
    if x in table.columns and y in table.index:
        corner = table.columns.get_loc(x) - 0.46, table.index.get_loc(y) - 0.46
        for width, edge in ((5, "white"), (2.5, color)):
            ax.add_patch(Rectangle(corner, 0.92, 0.92, fill=False, lw=width, color=edge))
