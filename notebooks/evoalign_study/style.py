"""One plot style for every figure: sizes, fonts and fixed looks. Each colour has one meaning in the whole project."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evoalign_lib import arms, drawing
from evoalign_lib.drawing import COLUMN, PAGE, png  # noqa: F401

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

ARMS: dict[str, arms.Arm] = arms.ARMS | arms.UNTRAINED
"""All arms, trained and untrained, with their color, marker and label. The entries are in `evoalign_lib.arms`."""


class Look(NamedTuple):
    """The look of something other than an arm; no such look has the colour of an arm."""

    color: str
    """Hexadecimal RGB. The looks of one table are shades of one hue that differ in a grey print, too."""
    marker: str
    """Matplotlib marker."""
    linestyle: str
    """Matplotlib line style."""
    label: str
    """Name in legends and tables."""

    def line(self) -> dict[str, Any]:
        """Return the keyword arguments of `Axes.plot` for this look."""
        return self._asdict()


STROKES: dict[str, Look] = {
    "greedy": Look("black", "", "-", "greedy"),
    "t0.6": Look("black", "", ":", "temperature 0.6"),
    "t1": Look("black", "", "--", "temperature 1"),
}
"""Every decoding that can be drawn, by its key in the records, coldest first; curves take the colours of arms."""

DECODINGS: dict[str, Look] = {name: STROKES[name] for name in ("greedy", "t1")}
"""The decodings in every committed record: notebooks draw and tabulate each of them."""

ARITHMETICS: dict[tuple[str, str], Look] = {
    ("master", "gaussian"): Look("#241556", "o", "-", "float32 master"),
    ("kahan", "gaussian"): Look("#5A4A9C", "P", "-.", "compensated pair"),
    ("inplace", "gaussian"): Look("#8F83C6", "X", "--", "in place"),
    ("inplace", "tied"): Look("#C4BDE4", "D", ":", "in place, tied noise"),
}
"""Precision and noise of an audited run -> its look."""

KL_ESTIMATORS: dict[str, Look] = {
    "k1": Look("#1A1A1A", "o", "-", "k1"),
    "k2": Look("#B8860B", "s", "--", "k2"),
    "k3": Look("#008B8B", "^", "-.", "k3"),
}
"""Estimators of the KL divergence."""

PARTS: dict[str, Look] = {
    "full": Look("#2B3306", "D", "-", "whole step"),
    "aligned": Look("#66751C", "o", "--", "along g"),
    "orthogonal": Look("#A8B85A", "s", ":", "across g"),
}
"""A step of ES, and its parts along and across the gradient g."""

FITNESS: dict[str, Look] = {
    "expected": Look("#4A0D2C", "o", "-", "expected fitness"),
    "greedy": Look("#A35C6C", "s", "--", "greedy fitness"),
}
"""The fitness on which a single step of ES is taken."""

LOOKS = (ARITHMETICS, KL_ESTIMATORS, PARTS, FITNESS)
"""All tables of looks. Add a table here for anything new, in a new hue."""

SCREEN_DPI = 150
"""Resolution of the pictures in notebooks, pixels per inch."""

FURTHEST = 12
"""Largest change of a colour when a notebook embeds a figure, in steps of 255 per channel; it is not visible."""


def use() -> None:
    """Apply the style to all figures drawn from now on, and embed them in notebooks by `embedded`."""
    drawing.use()
    if "IPython" in sys.modules and (shell := sys.modules["IPython"].get_ipython()) is not None:
        # imported first, since the inline backend registers a formatter on import, which would replace this one
        import matplotlib_inline.backend_inline  # noqa: F401
        from matplotlib.figure import Figure

        shell.display_formatter.formatters["image/png"].for_type(Figure, embedded)


def embedded(fig: Figure, optimize: bool = True) -> bytes:
    """Return the PNG of a figure that a notebook embeds, at `SCREEN_DPI` pixels per inch.

    The picture is stored with a palette of its own colours, in a quarter of the bytes. From the most frequent colour
    down, each colour replaces those that differ from it by at most `FURTHEST`: lines and areas keep their colours, and
    their edges are reduced to a few. If 256 colours are not enough, the picture is stored in full colour.

    Args:
        fig: the figure.
        optimize: as for `drawing.png`.
    """
    from PIL import Image

    full = drawing.picture(fig, SCREEN_DPI)
    codes = np.asarray(full, np.int32) @ [1 << 16, 1 << 8, 1]
    found, places, counts = np.unique(codes.ravel(), return_inverse=True, return_counts=True)
    colors = found[:, None] >> [16, 8, 0] & 255
    entries, palette = np.full(len(found), -1), []
    for i in np.argsort(-counts, kind="stable"):
        if entries[i] < 0:
            if len(palette) == 256:
                return drawing.packed(full, SCREEN_DPI, optimize)
            entries[(abs(colors - colors[i]).max(1) <= FURTHEST) & (entries < 0)] = len(palette)
            palette.append(colors[i])
    picture = Image.fromarray(entries[places].reshape(codes.shape).astype(np.uint8), "P")
    picture.putpalette(np.array(palette, np.uint8).tobytes())
    return drawing.packed(picture, SCREEN_DPI, optimize)


def line(arm: str, decoding: str = "greedy") -> dict[str, Any]:
    """Return the keyword arguments of `Axes.plot` for one arm under one decoding.

    Args:
        arm: a key of `ARMS`.
        decoding: a key of `STROKES`.

    Raises:
        KeyError: an arm or decoding without a look.

    >>> line("es", "t1")["label"]
    'ES, temperature 1'
    """
    look, stroke = ARMS[arm], STROKES[decoding]
    drawn = {"linestyle": stroke.linestyle, "label": f"{look.label}, {stroke.label}"}
    # markers at fixed distances along the curve: with up to 50 points, a marker for each would be too many
    return drawn | {"color": look.color, "marker": look.marker, "markevery": 0.15}


def band(ax: Axes, x: ArrayLike, low: ArrayLike, high: ArrayLike, color: str) -> None:
    """Shade the interval of a curve.

    Args:
        ax: the axes.
        x, low, high: (points,), in the units of the axes.
        color: any matplotlib colour.
    """
    ax.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)


def dots(ax: Axes, x: float, values: ArrayLike, failed: ArrayLike, arm: str, width: float = 0.0) -> None:
    """Draw every run of an arm as a dot at x, failed ones as black crosses, and the mean of all as the arm's marker.

    Args:
        ax: the axes.
        x: position of the arm, in the units of the axes.
        values: (runs,), in the units of the axes.
        failed: (runs,), bool.
        arm: a key of `ARMS`.
        width: width over which the dots are spread around x, always in the same way, so that none hides another.
    """
    heights, crossed, look = np.asarray(values, float), np.asarray(failed, bool), ARMS[arm]
    places = x + jitter(len(heights), width)
    ax.scatter(places[~crossed], heights[~crossed], s=8, color=look.color, alpha=0.45, linewidths=0)
    ax.scatter(places[crossed], heights[crossed], s=14, color="black", marker="x", linewidths=0.8, zorder=4)
    ax.plot(x, heights.mean(), color=look.color, marker=look.marker, ms=5, mec="white", mew=0.5, zorder=3)


def jitter(n: int, width: float) -> NDArray[np.floating]:
    """Return n fixed offsets within width / 2 of 0, with neighbours far apart.

    >>> jitter(4, 1.0).round(2).tolist()
    [0.0, -0.38, 0.24, -0.15]
    """
    golden = (5**0.5 - 1) / 2  # its multiples fill an interval evenly, however many there are
    return width * ((np.arange(n) * golden + 0.5) % 1 - 0.5)


def legend(fig: Figure, arms: dict[str, int | None], decodings: Sequence[str] = ("greedy", "t1")) -> None:
    """Put one legend below a figure: an entry per arm, with its number of seeds, and an entry per decoding.

    Entries use as few rows as the width of the figure allows. An entry for each combination of three arms and two
    decodings would not fit into a column; one for each arm and each decoding does.

    Args:
        fig: the figure.
        arms: key of `ARMS` -> number of seeds (None: no seeds).
        decodings: keys of `STROKES`.
    """
    from matplotlib.lines import Line2D

    labels = {arm: ARMS[arm].label + ("" if n is None else f" (n = {n})") for arm, n in arms.items()}
    of_arms = [Line2D([], [], color=ARMS[arm].color, marker=ARMS[arm].marker, label=labels[arm]) for arm in arms]
    of_decodings = [Line2D([], [], **STROKES[decoding].line()) for decoding in decodings]
    widest = max(len(of_arms), len(of_decodings))
    one_row = [] if fig.get_figwidth() <= COLUMN else [[of_arms + of_decodings]]
    for rows in one_row + [_rows(of_arms, n) + _rows(of_decodings, n) for n in range(widest, 0, -1)]:
        columns = max(map(len, rows))
        empty = Line2D([], [], linestyle="", label=" ")
        grid = [row + [empty] * (columns - len(row)) for row in rows]
        # matplotlib fills column by column
        ordered = [row[column] for column in range(columns) for row in grid]
        made = fig.legend(handles=ordered, loc="outside lower center", ncols=columns, columnspacing=1.0)
        frame = 2 * made.borderpad * made.prop.get_size_in_points() * fig.dpi / 72  # not drawn
        if columns == 1 or made.get_window_extent().width - frame <= fig.bbox.width:
            return
        made.remove()


def _rows(handles: list[Line2D], columns: int) -> list[list[Line2D]]:
    return [handles[i : i + columns] for i in range(0, len(handles), columns)]
