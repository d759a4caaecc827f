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
    "lead": style.Look("#A9532C", "o", "-", "as the games are"),
    "equal_length_lead": style.Look("#4A1D0B", "s", "--", "with length held equal"),
}
"""Strengths of Bradley and Terry, as the records call them -> their look."""


def results(records: Sequence[Record]) -> Results:
    """Return the quoted results of the published judgments: leads in Elo points, shares of verdicts as fractions.

    Raises:
        ValueError: a record is missing.
    """
    games_, elo = part(records, "games"), part(records, "elo")
    found: Results = {"questions": games_["prompts"], "orders": elo["spec"]["orders"]}
    for dimension in data.DIMENSIONS:
        own, rated = games_["dimensions"][dimension], elo["dimensions"][dimension]["models"]
        second = max((m for m in own["strength"] if m != kind.LEADER), key=lambda m: own["strength"][m][0])
        leader = rated[kind.LEADER]
        named = {"second": second, "longer": 100 * own["longer"][second], "first": 100 * leader["first"]}
        named["std"] = leader["std"]
        intervals = {name: own[name][second] for name in ("lead", "equal_length_lead")}
        intervals |= {f"{quantity} all": each["all"] for quantity, each in own["agreement"].items()}
        named |= {name: Interval(*three, games_["prompts"]) for name, three in intervals.items()}
        found |= {f"{dimension} {name}": value for name, value in named.items()}
    return found


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
    """Return a row per model: scores R and C of its responses, and what they hold."""
    rows = []
    for model, r in responses(records).items():
        row = {"model": model, "safe, %": f"{100 * r['safe']:.1f}", "R": f"{r['reward']['mean']:.2f}"}
        row |= {"C": f"{r['cost']['mean']:.2f}", "characters": f"{r['characters']:.0f}"}
        row |= {f"{name.replace('_', ' ')}, %": f"{100 * r[name]:.1f}" for name in ("further_turn", "web_address")}
        rows.append(row | {f"{name}, %": f"{100 * r['kinds'][name]['share']:.1f}" for name in refusals.KINDS})
    return pd.DataFrame(rows)


def lead_rows(records: Sequence[Record]) -> pd.DataFrame:
    """Return a row per dimension and other model: by how much the leader leads it, and games that it won or in which
    its answer is the longer one."""
    rows = []
    for dimension in data.DIMENSIONS:
        own = part(records, "games")["dimensions"][dimension]
        for model, longer in own["longer"].items():
            row = {"dimension": dimension, f"{kind.LEADER} -": model}
            row |= {look.label: _stated(own[name][model], ".0f") for name, look in RATINGS.items()}
            row["games won, %"] = _stated(own["head_to_head"][model])
            rows.append(row | {"longer answer, %": f"{100 * longer:.0f}"})
    return pd.DataFrame(rows)


def agreement_rows(records: Sequence[Record]) -> pd.DataFrame:
    """Return a row per quantity: in what share of the decided games it favours the winner; and what length is worth."""
    judged = {d: part(records, "games")["dimensions"][d] for d in data.DIMENSIONS}
    names = {"reward": "higher training reward", "length": "longer text", "-cost": "lower cost"}
    rows = [
        {"quantity": f"{words}, %"} | {d: _stated(own["agreement"][name]["all"]) for d, own in judged.items()}
        for name, words in names.items()
    ]
    worth = {d: _stated(own["twice_as_long"], ".0f") for d, own in judged.items()}
    return pd.DataFrame([*rows, {"quantity": "twice as long a text, Elo points"} | worth])


def elo_rows(records: Sequence[Record]) -> pd.DataFrame:
    """Return a row per dimension and model: its Elo over orders of the games, and its strengths above the base."""
    elo, judged = (part(records, name)["dimensions"] for name in ("elo", "games"))
    rows = []
    for dimension, model in product(data.DIMENSIONS, data.JUDGED):
        rated, row = elo[dimension]["models"][model], {"dimension": dimension, "model": model}
        row |= {"Elo, published": f"{rated['published']:.2f}", "reproduced": f"{rated['reproduced']:.2f}"}
        row |= {"std over orders": f"{rated['std']:.0f}", "range": f"{rated['least']:.0f} to {rated['most']:.0f}"}
        row |= {"first, % of orders": f"{100 * rated['first']:.1f}"}
        for head, key in {"Bradley-Terry": "strength", "length held equal": "equal_length"}.items():
            row[head] = _stated(judged[dimension][key][model], ".0f")
        rows.append(row)
    return pd.DataFrame(rows)


def _stated(three: Sequence[float], form: str | None = None) -> str:
    return stated(Interval(*three, 0), form)


def leads(records: Sequence[Record]) -> tuple[plt.Figure, pd.DataFrame]:
    """Draw by how many Elo points the leader leads each other model, as the games are and with length held equal."""
    points = pd.DataFrame(
        {"dimension": dimension, "model": model, "rating": rating} | plots.ends(Interval(*three, 0))
        for dimension, rating in product(data.DIMENSIONS, RATINGS)
        for model, three in part(records, "games")["dimensions"][dimension][rating].items()
        if model != data.BASE
    )
    fig, ax = plt.subplots(figsize=(1.4 * style.COLUMN, 2.9))
    for (rating, own), offset in zip(points.groupby("rating", sort=False), (-0.15, 0.15), strict=True):
        places = np.arange(len(own)) + offset
        plots.whiskers(ax, own, up=places, capsize=2, **RATINGS[rating].line() | {"linestyle": ""})
    ax.axvline(0, color="black", lw=0.8)
    names = [f"{dimension}, over {model}" for dimension, model in zip(own["dimension"], own["model"], strict=True)]
    ax.set(yticks=range(len(names)), yticklabels=names, xlabel=f"lead of {kind.LEADER}, Elo points")
    ax.grid(axis="y", visible=False)
    ax.invert_yaxis()
    plots.key(fig, ax)
    return fig, points
