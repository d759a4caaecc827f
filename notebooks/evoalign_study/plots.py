"""What the figures of several notebooks share: lines from a tidy frame, and a legend below the panels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from evoalign_lib.analysis.stats import Interval
from evoalign_study import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

NULL = {"color": "black", "lw": 0.9, "ls": (0, (1, 2))}
"""How the line is drawn at which a quantity says nothing."""


def look(arm: str, **how: Any) -> dict[str, Any]:
    """Return the keyword arguments with which `Axes.plot` draws the line of an arm, with `how` in their place."""
    entry = style.ARMS[arm]
    return {"color": entry.color, "marker": entry.marker or None, "label": entry.label} | how


def lines(
    ax: Axes, frame: DataFrame, x: str, y: str, by: str, looks: Mapping[str, Mapping[str, Any]], **how: Any
) -> None:
    """Draw a line through the points of each name in a column.

    Args:
        ax: the panel.
        frame: a row per point.
        x: column of what is across.
        y: column of what is up.
        by: column of the names, in the order in which they are drawn.
        looks: name -> keyword arguments of `Axes.plot`.
        **how: the same for all lines, where their own look says nothing else.
    """
    for name, points in frame.groupby(by, sort=False):
        ax.plot(points[x], points[y], **how | looks[name])


def key(fig: Figure, ax: Axes, columns: int, size: float = 7) -> None:
    """Put the legend of one panel below the figure, in so many columns."""
    handles, labels = ax.get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=size)


def whiskers(ax: Axes, frame: DataFrame, across: Any = None, up: Any = None, **how: Any) -> None:
    """Draw values with their intervals, the columns value, low and high: up at `across`, or across at `up`."""
    ends = [frame["value"] - frame["low"], frame["high"] - frame["value"]]
    place = (
        {"x": across, "y": frame["value"], "yerr": ends} if up is None else {"x": frame["value"], "y": up, "xerr": ends}
    )
    ax.errorbar(**place, **how)


def ends(interval: Interval, scale: float = 1) -> dict[str, float]:
    """Return an interval as columns of a tidy frame, value, low and high, times `scale`."""
    return {name: scale * getattr(interval, name) for name in ("value", "low", "high")}
