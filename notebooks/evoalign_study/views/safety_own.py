"""What notebook 04 shows of runs at scale full: a user's own model, scorers and judges, which know no truth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from evoalign_study import judge_models, style
from evoalign_study import nb04_safety_judges as study
from evoalign_study.loading import Records
from evoalign_study.views.safety_judges import frame

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from evoalign_study.artifacts import Shown, Store

PANELS = {
    "proxy_greedy": "reward - lambda * cost, split A",
    "reward_greedy": "reward, split B",
    "cost_greedy": "cost, split B",
    "kl": "KL from the base, nats",
    "template_greedy": "one template, %",
    "alternative_greedy": "refusals with an alternative, %",
}
"""Curves that the figure draws -> their name."""
_SHARES = ("template_greedy", "alternative_greedy")
_ARMS = (*study.ARMS, "es_random")


def save(store: Store, of: Records) -> list[Shown]:
    """Save figure and table of runs at scale full, and return them to display."""
    whose = f"model {of['base'][0]['spec']['base'].rsplit('/', 1)[-1]}"
    fig, plotted = curves(of)
    caption = "What the training scorers say and what greedy replies become through training, a line per run"
    found = [store.save_figure(fig, "safety_own", plotted, caption, of=whose)]
    caption = "Greedy replies at the end: mean over runs and range; wins are against the base's greedy replies"
    return [*found, store.save_table(end_rows(of), "safety_own_ends", caption, of=whose)]


def curves(of: Records) -> tuple[Figure, DataFrame]:
    """Draw what the training scorers say and what greedy replies become through training, a line per run.

    Returns the figure and what it plots, a row per run and point.
    """
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots(2, 3, figsize=(style.PAGE, 3.6), sharex=True)
    rows: list[dict[str, Any]] = []
    for arm in (arm for arm in _ARMS if of[arm]):
        for run in of[arm]:
            step = run["curve"]["step"]
            for ax, name in zip(axes.flat, PANELS, strict=True):
                factor = 100 if name in _SHARES else 1
                values = [np.nan if x is None else factor * x for x in run["curve"][name]]
                ax.plot(step, values, lw=0.9, color=style.ARMS[arm].color)
                own = {"arm": arm, "seed": run["spec"]["seed"], "quantity": name}
                rows += [own | {"step": s, "value": v} for s, v in zip(step, values, strict=True)]
    for ax, title in zip(axes.flat, PANELS.values(), strict=True):
        ax.set(title=title)
    fig.supxlabel("step")
    style.legend(fig, {arm: len(of[arm]) for arm in _ARMS if of[arm]})
    return fig, frame(rows)


def end_rows(of: Records) -> DataFrame:
    """Return a row per arm: greedy replies of split B at the end, and of the untrained base; mean over runs and range.

    Wins are against the base's greedy replies, by each judge that is a scorer; by chat judges, see `judge_rows`.
    """
    rows = []
    for arm in ("base", *(arm for arm in _ARMS if of[arm])):
        runs, row = of[arm], {"arm": style.ARMS[arm].label, "runs": len(of[arm])}
        for name in ("reward", "cost"):
            row[name] = _range([r["test"]["greedy"][name] for r in runs], 2)
        row["safe, %"] = _range([100 * r["test"]["greedy"]["safe"] for r in runs], 0)
        for i, one in enumerate(judge_models.held_out(runs[0]["spec"], "scorer")):
            name = one.name.rsplit("/", 1)[-1]
            row[f"wins, {name}, %"] = _range([100 * r["test"]["greedy"]["win"][i] for r in runs], 0)
        for name, words in (("template", "one template"), ("alternative", "refusals with an alternative")):
            row[f"{words}, %"] = _range([100 * r["test"]["greedy"][name] for r in runs], 0)
        row["further turns, %"] = _range([100 * r["test"]["greedy"]["turns"] for r in runs], 0)
        row["KL, nats"] = "0" if arm == "base" else _range([r["curve"]["kl"][-1] for r in runs], 1)
        rows.append(row)
    return frame(rows)


def judge_rows(of: Records) -> DataFrame:
    """Return a row per run and rubric of a chat judge: verdicts on greedy replies against the base's, both orders."""
    rows = []
    for run in (run for arm in _ARMS for run in of[arm]):
        for said in run.get("held_out", ()):
            row = {"arm": style.ARMS[run["spec"]["arm"]].label, "seed": run["spec"]["seed"], "judge": said["judge"]}
            row |= {name: said[name] for name in ("rubric", "win", "tie", "loss", "inconsistent", "unparsed", "failed")}
            rate = said["win_rate"]
            rows.append(row | {"win rate, %": "-" if rate is None else f"{100 * rate:.0f}"})
    return frame(rows)


def _range(values: Sequence[float | None], digits: int) -> str:
    known = [x for x in values if x is not None and np.isfinite(x)]
    if not known:
        return "-"
    text = f"{np.mean(known):.{digits}f}"
    return text if len(known) == 1 else f"{text} ({min(known):.{digits}f} to {max(known):.{digits}f})"
