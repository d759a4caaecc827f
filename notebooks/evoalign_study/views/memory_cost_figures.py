"""How memory is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from evoalign_study import style
from evoalign_study.records import Record
from evoalign_study.views import memory_cost as view

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

_LOOKS: dict[str, tuple[str, str]] = {
    "weights": ("#1B1B1B", ""),
    "working copy": ("#4F4F4F", ""),
    "master": ("#858585", ""),
    "compensation": ("#B9B9B9", ""),
    "rollout copy": ("#4F4F4F", "//"),
    "reference model": ("#858585", "//"),
    "adapter": ("#B9B9B9", "//"),
    "gradients": ("#7A3B0C", ""),
    "moments": ("#C98A57", ""),
    "saved activations": ("#EBCDB2", ""),
    "logits": ("#EBCDB2", "//"),
    "KV cache": ("#C5D6E3", ""),
    "noise or factors": ("#7FA3BD", ""),
    "search": ("#7FA3BD", "//"),
    "temporaries": ("white", "//"),
}
"""Component -> colour and hatch: greys are weights, browns what gradients need, blues what members need."""


def bars(records: Sequence[Record], size: str = "7B") -> tuple[Figure, DataFrame]:
    """Draw the bytes a parameter of each method on a GPU, by component.

    Args:
        records: of kind "memory".
        size: a key of `kinds.memory.PUBLISHED`.
    """
    from matplotlib import pyplot as plt

    data = view.bytes_a_parameter(records, size)
    drawn = [name for name in _LOOKS if name in data]
    fig, ax = plt.subplots(figsize=(style.PAGE, 0.9 + 0.24 * len(data)))
    left = 0 * data.iloc[:, 0]
    places = range(len(data))[::-1]
    for name in drawn:
        color, hatch = _LOOKS[name]
        how = {
            "color": color,
            "hatch": hatch,
            "edgecolor": "white" if color != "white" else "#555555",
            "linewidth": 0.4,
        }
        ax.barh(places, data[name], left=left, height=0.7, label=name, **how)
        left = left + data[name]
    for place, total in zip(places, left, strict=True):
        ax.annotate(f"{total:.1f}", (total, place), (3, 0), textcoords="offset points", va="center", fontsize=6.5)
    ax.set_yticks(places, data.index)
    ax.set(xlabel=f"bytes a parameter, {size}", xlim=(0, 1.06 * left.max()))
    ax.grid(axis="y", visible=False)
    fig.legend(loc="outside lower center", ncols=5)
    return fig, data.rename_axis("method").reset_index()
