"""Results, tables and figures of the published judgments and responses in notebook 04."""

from collections.abc import Iterable, Sequence
from itertools import product

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt

from evoalign_lib.analysis import refusals
from evoalign_lib.analysis.stats import Interval
from evoalign_study import plots, style
from evoalign_study import safety_published as data
from evoalign_study.kinds import judged as kind
from evoalign_study.records import Record
from evoalign_study.results import Results, stated

RATINGS: dict[str, style.Look] = {
    "elo": style.Look("#E0A98C", "D", "-", "published Elo, and the same games in other orders"),
    "plain": style.Look("#A9532C", "o", "-", "Bradley-Terry"),
    "equal": style.Look("#4A1D0B", "s", "--", "Bradley-Terry, length held equal"),
}
"""Ratings of a model from its games -> their look."""
QUADRANTS: dict[str, tuple[str, str, str]] = {
    "SH": ("#0B3D0A", "", "safe and helpful"),
    "SU": ("#2C7A1E", "", "safe and not helpful"),
    "UH": ("#6DBB58", "/////", "unsafe and helpful"),
    "UU": ("#BDEBAA", "/////", "unsafe and not helpful"),
}
"""Quadrants of a response -> colour, hatch and name."""
CUTS = {
    "0": "R > 0, as published",
    "50 % of the base": "R > base's median",
    "90 % of the base": "R > base's 90 % quantile",
}
"""Cut between helpful and unhelpful rewards R, as drawn in the figure -> its name."""


def results(records: Sequence[Record]) -> Results:
    """Return the quoted results of the published judgments: leads in Elo points, shares of verdicts as fractions.

    Raises:
        ValueError: a record is missing.
    """
    games_, elo, rewards = part(records, "games"), part(records, "elo"), responses(records)
    found: Results = {"questions": games_["prompts"], "orders": elo["spec"]["orders"]}
    for dimension in data.DIMENSIONS:
        own, rated = games_["dimensions"][dimension], elo["dimensions"][dimension]["models"]
        second = max((m for m in own["strength"] if m != kind.LEADER), key=lambda m: own["strength"][m][0])
        spreads, leader = [row["std"] for model, row in rated.items() if model != data.BASE], rated[kind.LEADER]
        named = {"second": second, "longer": 100 * own["longer"][second], "first": 100 * leader["first"]}
        named |= {"std": leader["std"], "least std": min(spreads), "most std": max(spreads)}
        intervals = {name: own[name][second] for name in ("lead", "equal_length_lead")}
        for quantity, games_of in product(own["agreement"], ("all", "without the base")):
            intervals[f"{quantity} {games_of}"] = own["agreement"][quantity][games_of]
        named |= {name: Interval(*three, games_["prompts"]) for name, three in intervals.items()}
        found |= {f"{dimension} {name}": value for name, value in named.items()}
    found["least std"] = min(found[f"{dimension} least std"] for dimension in data.DIMENSIONS)
    found["most std"] = max(found[f"{dimension} most std"] for dimension in data.DIMENSIONS)
    for model, cut in product(_SAFE_AND_HELPFUL, CUTS):
        found[f"{model} safe and helpful {cut}"] = 100 * rewards[model]["quadrants"][cut]["shares"]["SH"]
    return found


_SAFE_AND_HELPFUL = (kind.LEADER, "Beaver-V3")


def part(records: Iterable[Record], name: str) -> Record:
    """Return the record of the published ratings ("elo") or games ("games").

    Raises:
        ValueError: it is missing, or there are several.
    """
    own = [r for r in records if r["spec"]["part"] == name]
    if len(own) != 1:
        raise ValueError(f"{len(own)} records of part {name!r}: run the specs of `judgments_specs`")
    return own[0]


def responses(records: Iterable[Record]) -> dict[str, Record]:
    """Return model -> record of its published responses, in the order of `MODELS`.

    Raises:
        ValueError: the record of a model is missing.
    """
    own = {r["spec"]["model"]: r for r in records if r["spec"]["part"] == "responses"}
    if missing := [model for model in data.MODELS if model not in own]:
        raise ValueError(f"no record of the responses of {', '.join(missing)}: run the specs of `judgments_specs`")
    return {model: own[model] for model in data.MODELS}


def response_rows(records: Sequence[Record]) -> pd.DataFrame:
    """Return a row per model: the scores and lengths of its responses, and what they contain besides an answer."""
    rows = []
    for model, r in responses(records).items():
        safe, worth = (Interval(*r["per_prompt"][name], r["prompts"]) for name in ("safe", "reward - cost"))
        row = {"model": model, "safe, %": f"{100 * r['safe']:.2f}", "safe, % of prompts": stated(safe)}
        row |= {name: f"{r[key]['mean']:.3f} ± {r[key]['std']:.3f}" for name, key in (("R", "reward"), ("C", "cost"))}
        row |= {"R - C": stated(worth, ".2f"), "characters": f"{r['characters']:.0f}"}
        row |= {"of the answer": f"{r['answer_characters']:.0f}"}
        for name in ("further_turn", "heading", "web_address"):
            row[f"{name.replace('_', ' ')}, %"] = f"{100 * r[name]:.1f}"
        row |= {"R with length": f"{r['reward_with_length']:.2f}", "one opening, %": f"{100 * r['opening']:.1f}"}
        rows.append(row | {"template, %": f"{100 * r['template']:.2f}"})
    return pd.DataFrame(rows)


def refusal_rows(records: Sequence[Record]) -> pd.DataFrame:
    """Return a row per model: the share of its responses of each kind, and their mean reward."""
    rows = []
    for model, r in responses(records).items():
        kinds = {name: r["kinds"][name] for name in refusals.KINDS}
        rewards = {name: f" (R {own['reward']:.2f})" if "reward" in own else "" for name, own in kinds.items()}
        shares = {f"{name}, %": f"{100 * own['share']:.1f}{rewards[name]}" for name, own in kinds.items()}
        rows.append({"model": model} | shares)
    return pd.DataFrame(rows)


def ratings(records: Sequence[Record]) -> tuple[plt.Figure, pd.DataFrame]:
    """Draw each model's ratings by dimension: published Elo with its spread over orders of games, and two strengths.

    For Elo, low and high are one standard deviation from the mean over orders, least and most the extremes over orders.
    """
    models, rows = [model for model in data.JUDGED if model != data.BASE], []
    for dimension, model in product(data.DIMENSIONS, models):
        rated, own = (part(records, name)["dimensions"][dimension] for name in ("elo", "games"))
        elo = {name: rated["models"][model][name] - 1000 for name in ("published", "mean", "least", "most")}
        std = rated["models"][model]["std"]
        row = {"dimension": dimension, "model": model, "rating": "elo", "value": elo["published"]}
        ends = {"least": elo["least"], "most": elo["most"], "low": elo["mean"] - std, "high": elo["mean"] + std}
        rows.append(row | ends)
        for rating, key in (("plain", "strength"), ("equal", "equal_length")):
            rows.append(row | {"rating": rating} | dict(zip(("value", "low", "high"), own[key][model], strict=True)))
    points = pd.DataFrame(rows)
    fig, _, shown = plots.panels(points, "dimension", 2.7, sharey=True, sharex=True)
    for ax, dimension, panel in shown:
        for (rating, own), offset in zip(panel.groupby("rating", sort=False), (0.25, 0, -0.25), strict=True):
            look, places = RATINGS[rating], np.arange(len(models)) + offset
            if rating == "elo":
                ax.hlines(places, own["least"], own["most"], color=look.color, lw=0.8)
                ax.hlines(places, own["low"], own["high"], color=look.color, lw=3.2)
                ax.plot(own["value"], places, **look.line() | {"linestyle": ""})
            else:
                plots.whiskers(ax, own, up=places, capsize=2, **look.line() | {"linestyle": ""})
        ax.axvline(0, **plots.NULL)
        ax.set(title=dimension, xlabel=f"Elo points above {data.BASE}", yticks=range(len(models)), yticklabels=models)
        ax.grid(axis="y", visible=False)
    plots.key(fig, ax)
    return fig, points


def quadrants(records: Sequence[Record]) -> tuple[plt.Figure, pd.DataFrame]:
    """Draw each model's shares of the quadrants in % as stacked bars, at three cuts of the reward."""
    shares = pd.DataFrame(
        {"name": cut, "cut": r["quadrants"][cut]["cut"], "model": model, "quadrant": label}
        | {"share": 100 * r["quadrants"][cut]["shares"][quadrant]}
        for cut, (quadrant, (_, _, label)), (model, r) in product(CUTS, QUADRANTS.items(), responses(records).items())
    )
    fig, _, shown = plots.panels(shares, "name", 2.4, sharey=True)
    for ax, cut, panel in shown:
        left = 0.0
        for (_, own), (color, hatch, label) in zip(
            panel.groupby("quadrant", sort=False), QUADRANTS.values(), strict=True
        ):
            bars = {"color": color, "hatch": hatch, "edgecolor": "white", "height": 0.72, "label": label}
            ax.barh(own["model"], own["share"], left=left, **bars)
            left = left + own["share"].to_numpy()
        ax.set(title=f"helpful: {CUTS[cut]}", xlabel="responses, %", xlim=(0, 100))
        ax.grid(visible=False)
    ax.invert_yaxis()
    plots.key(fig, ax)
    return fig, shares.drop(columns="name")
