"""How the figure of scaling over GPUs is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from evoalign_study import style
from evoalign_study.kinds.scaling import PUBLISHED
from evoalign_study.records import Record
from evoalign_study.views import scaling as view

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

_LINES = {"es": "-", "es_adapters": "--", "grpo": "-"}
_MARKS = {"essa_v1": "s", "essa_v3": "D", "grpo_v3": "v"}


def _color(what: str) -> str:
    return style.ARMS["grpo" if what == "grpo" else "es"].color


def speed_ups(found: Sequence[Record], lengths: str = "released") -> tuple[Figure, DataFrame]:
    """Draw speed-up and efficiency of simulated steps over the number of GPUs, and published times beside.

    A line is the mean over draws of the lengths, a band their range. Published times begin at 8 or 16 GPUs; their first
    point is put on the ideal line.

    Args:
        found: records of kind "scaling".
        lengths: whose are drawn, a key of `views.scaling.WHOSE`.
    """
    import pandas as pd
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter, ScalarFormatter

    fig, axes = plt.subplots(1, 2, figsize=(style.PAGE, 3.1))
    of, rows = view.simulated(found, lengths), []
    gpus = np.array(of[0]["gpus"])
    ideal = {"color": "black", "lw": 0.8, "ls": ":", "label": "ideal"}
    axes[0].plot(gpus, gpus, **ideal)
    axes[1].plot(gpus, np.ones(len(gpus)), **ideal)
    for record in of:
        what = record["spec"]["what"]
        each = view.speed_ups(record)
        look = {"color": _color(what), "ls": _LINES[what], "label": view.LABELS[what]}
        look |= {"marker": style.ARMS["grpo" if what == "grpo" else "es"].marker}
        look |= {"mfc": "white"} if what == "es_adapters" else {}
        _draw(axes, gpus, each.mean(0), look)
        for ax, values in zip(axes, (each, each / gpus), strict=True):
            style.band(ax, gpus, values.min(0), values.max(0), _color(what))
        for i, n in enumerate(gpus):
            row = {"kind": "simulated", "what": what, "GPUs": n, "speed-up": each[:, i].mean()}
            rows.append(row | {"low": each[:, i].min(), "high": each[:, i].max()})
    for name, published in PUBLISHED.items():
        counts = np.array(published.gpus)
        values = counts[0] * published.minutes[0] / np.array(published.minutes)
        look = {"color": _color(published.simulated), "ls": "", "marker": _MARKS[name], "mfc": "none", "ms": 5}
        _draw(axes, counts, values, look | {"label": f"published: {published.what}"})
        rows += [
            {"kind": "published", "what": name, "GPUs": n, "speed-up": v} for n, v in zip(counts, values, strict=True)
        ]
    for ax in axes:
        ax.set_xscale("log", base=2)
        ax.xaxis.set(major_locator=FixedLocator(gpus[::2].tolist()), major_formatter=ScalarFormatter())
        ax.set_xlabel("GPUs")
    axes[0].set_yscale("log", base=2)
    axes[0].yaxis.set(major_locator=FixedLocator(gpus[::2].tolist()), major_formatter=ScalarFormatter())
    axes[0].yaxis.set_minor_locator(NullLocator())
    axes[0].set(ylabel="speed-up", title="times faster than one GPU")
    axes[1].yaxis.set_major_formatter(PercentFormatter(1.0, symbol=""))
    axes[1].set(ylabel="efficiency, %", title="speed-up / GPUs", ylim=(0, None))
    fig.suptitle(f"Simulation of a training step; lengths: {view.WHOSE[lengths]}", fontsize=8)
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncol=4, fontsize=6.5)
    return fig, pd.DataFrame(rows)


def _draw(axes: Sequence[Axes], gpus: np.ndarray, values: np.ndarray, look: dict[str, Any]) -> None:
    axes[0].plot(gpus, values, **look)
    axes[1].plot(gpus, values / gpus, **look)
