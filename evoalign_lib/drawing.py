"""The look of every figure, in the notebooks and in `evoalign compare`: sizes, fonts, pictures of the same bytes."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import PIL.Image
    from matplotlib.figure import Figure

COLUMN = 3.25
"""Width of a figure that fills one column of the paper, inches."""

PAGE = 6.75
"""Width of a figure that spans both columns of the paper, inches."""


def use() -> None:
    """Apply the style to all figures drawn from now on."""
    import seaborn

    seaborn.set_theme(context="paper", style="ticks", rc=_RC)


def png(fig: Figure, dpi: int, optimize: bool = True) -> bytes:
    """Return a figure as PNG, of its whole size and in full colour; the same figure gives the same bytes.

    optimize: pack it as small as possible, which takes as long as drawing it.
    """
    return packed(picture(fig, dpi), dpi, optimize)


def picture(fig: Figure, dpi: int) -> PIL.Image.Image:
    """Return a figure as a picture in full colour. dpi: pixels per inch."""
    from PIL import Image

    drawn = BytesIO()
    fig.savefig(drawn, format="png", dpi=dpi, pil_kwargs={"compress_level": 1})  # read at once, and not kept
    return Image.open(drawn).convert("RGB")


def packed(drawn: PIL.Image.Image, dpi: int, optimize: bool) -> bytes:
    """Return a picture as PNG. optimize: see `png`."""
    file = BytesIO()
    drawn.save(file, "png", optimize=optimize, dpi=(dpi, dpi))
    return file.getvalue()


_RC: dict[str, Any] = {
    "figure.figsize": (COLUMN, 2.3),
    "figure.dpi": 96,
    "figure.constrained_layout.use": True,
    "font.family": "sans-serif",
    # shipped with matplotlib, so that every machine draws the same letters
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 7.5,
    "axes.labelsize": 7.5,
    "axes.titlesize": 8,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.linewidth": 0.4,
    "grid.color": "#E0E0E0",
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    "xtick.minor.width": 0.4,
    "ytick.minor.width": 0.4,
    "xtick.minor.size": 1.5,
    "ytick.minor.size": 1.5,
    "legend.fontsize": 6.5,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.2,
    # TrueType outlines: text in the PDF stays searchable, and journals refuse type 3 fonts
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
    "savefig.dpi": 200,
}
