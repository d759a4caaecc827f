"""The style of every figure, in the notebooks and in `evoalign compare`: sizes, fonts, and reproducible PNG bytes."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
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
    """Return a figure as PNG, at full size and in full colour; the same figure gives the same bytes.

    Args:
        fig: the figure.
        dpi: pixels per inch.
        optimize: compress it as much as possible, which takes as long as drawing it.
    """
    return packed(picture(fig, dpi), dpi, optimize)


def picture(fig: Figure, dpi: int) -> PIL.Image.Image:
    """Return a figure as a full-colour picture at `dpi` pixels per inch."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    # fig.savefig gives the same pixels, but goes through the whole figure twice
    own, screen = fig.canvas, fig.dpi
    canvas, fig.dpi = FigureCanvasAgg(fig), dpi
    canvas.draw()
    drawn = Image.frombytes("RGBA", canvas.get_width_height(physical=True), canvas.buffer_rgba()).convert("RGB")
    fig.dpi = screen
    fig.set_canvas(own)
    return drawn


def packed(drawn: PIL.Image.Image, dpi: int, optimize: bool) -> bytes:
    """Return a picture as PNG, compressed as in `png`."""
    file = BytesIO()
    drawn.save(file, "png", optimize=optimize, dpi=(dpi, dpi))
    return file.getvalue()


# "DejaVu Sans" comes with matplotlib, so every machine draws the same letters; fonttype 42 (TrueType) keeps text in
# PDFs searchable, and journals reject type 3
_RC: dict[str, Any] = json.loads(Path(__file__).with_name("figure_style.json").read_text(encoding="utf-8"))
