"""Marks, legends and axes that figures of several notebooks share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evoalign_lib.analysis.stats import Interval
from evoalign_study import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from pandas import DataFrame


def handle(label: str, **how: Any) -> Line2D:
    """Return an entry of a legend; without line style or width it is a mark alone."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **({} if "ls" in how or "lw" in how else {"ls": ""}) | how)


def of_arm(arm: str, n: int | None = None, **how: Any) -> Line2D:
    """Return the entry of an arm in a legend, by default a mark alone; n: number of its runs."""
    look = style.ARMS[arm]
    label = look.label if n is None else f"{look.label} (n = {n})"
    return handle(**{"label": label, "color": look.color, "marker": look.marker} | how)


def key(fig: Figure, handles: Sequence[Any]) -> None:
    """Put a legend below a figure, in two rows if it has more than five entries."""
    rows = 1 if len(handles) < 6 else 2
    columns = -(-len(handles) // rows)
    # matplotlib fills column by column
    ordered = [one for column in range(columns) for one in handles[column::columns]]
    fig.legend(handles=ordered, loc="outside lower center", ncols=columns, columnspacing=1.4, handlelength=1.8)


def plain_ticks(ax: Axes) -> None:
    """Write 0.1, 1 and 10 on a logarithmic axis, not powers of ten."""
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def differences(ax: Axes, asked: Mapping[str, Mapping[str, Interval | str]], legend: str) -> list[dict[str, Any]]:
    """Draw intervals of differences in points, a line per name from the top, by decoding: filled marks are greedy.

    Args:
        ax: the panel.
        asked: name -> decoding -> the interval, or the words that stand in its place.
        legend: where the legend of the decodings stands.

    Returns:
        A row per interval, from the bottom: its name, decoding, value and ends.
    """
    rows, names = [], list(asked)[::-1]
    for y, name in enumerate(names):
        for (decoding, each), offset in zip(asked[name].items(), (0.17, -0.17), strict=True):
            if isinstance(each, str):
                ax.text(0.6, y + offset, each, va="center", fontsize=6, color="#555555")
                continue
            value, low, high = (100 * x for x in (each.value, each.low, each.high))
            ax.errorbar(value, y + offset, xerr=[[value - low], [high - value]], capsize=2, lw=1, **_dot(decoding))
            rows.append({"name": name, "decoding": decoding, "value": value, "low": low, "high": high})
    for decoding in style.DECODINGS:
        ax.plot([], [], ls="", label=style.STROKES[decoding].label, **_dot(decoding))
    ax.axvline(0, color="black", lw=0.8)
    ax.set(yticks=range(len(names)), yticklabels=names, ylim=(-0.5, len(names) - 0.5))
    ax.grid(axis="y", visible=False)
    ax.legend(loc=legend, handlelength=1)
    return rows


def _dot(decoding: str) -> dict[str, Any]:
    return {"marker": "o", "color": "black", "mfc": "black" if decoding == "greedy" else "white", "ms": 4.5}


def heat(
    ax: Axes, cells: DataFrame, axes: tuple[str, str], value: str, text: Callable[[dict[str, Any]], str], **how: Any
) -> DataFrame:
    """Draw cells of a map as a ground of colours with texts on it; returns the table of the values.

    Args:
        ax: the panel.
        cells: a row per cell.
        axes: columns that lie along x and along y, in the order of their values.
        value: the column that the ground shows.
        text: makes the text of a row; it is white where the value is above `white`, if that is given.
        **how: keywords of `Axes.imshow`, and `white`.
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
