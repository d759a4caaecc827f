"""The published judgments and responses of notebook 04: what they say, in numbers and words, and their figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt

from evoalign_lib.analysis import refusals
from evoalign_lib.analysis.stats import Interval
from evoalign_lib.tasks import safety_published as data
from evoalign_study import marks, style
from evoalign_study.kinds import judged as kind
from evoalign_study.records import Record
from evoalign_study.results import Results, listed, stated

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

RATINGS: dict[str, style.Look] = {
    "elo": style.Look("#E0A98C", "D", "-", "published Elo, and the same games in other orders"),
    "plain": style.Look("#A9532C", "o", "-", "Bradley-Terry"),
    "equal": style.Look("#4A1D0B", "s", "--", "Bradley-Terry, length held equal"),
}
"""Ways to rate a model from its games -> their look."""
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
"""Cuts between helpful and unhelpful rewards R that the figure draws -> their name."""


def results(records: Sequence[Record]) -> Results:
    """Return what is quoted of the published judgments: leads in Elo points, shares of verdicts as shares.

    Raises:
        ValueError: a record is missing.
    """
    games_, elo, rewards = part(records, "games"), part(records, "elo"), responses(records)
    found: Results = {"questions": games_["prompts"], "orders": elo["spec"]["orders"]}
    for dimension in data.DIMENSIONS:
        own, rated = games_["dimensions"][dimension], elo["dimensions"][dimension]["models"]
        second = max((m for m in own["strength"] if m != kind.LEADER), key=lambda m: own["strength"][m][0])
        found |= {
            f"{dimension} {name}": Interval(*own[name][second], games_["prompts"])
            for name in ("lead", "equal_length_lead")
        }
        found |= {f"{dimension} longer": 100 * own["longer"][second], f"{dimension} second": second}
        found |= {
            f"{dimension} first": 100 * rated[kind.LEADER]["first"],
            f"{dimension} std": rated[kind.LEADER]["std"],
        }
        spreads = [row["std"] for model, row in rated.items() if model != data.BASE]
        found |= {f"{dimension} least std": min(spreads), f"{dimension} most std": max(spreads)}
        for quantity, games_of in product(own["agreement"], ("all", "without the base")):
            three = own["agreement"][quantity][games_of]
            found[f"{dimension} {quantity} {games_of}"] = Interval(*three, games_["prompts"])
    for model, cut in product(_SAFE_AND_HELPFUL, CUTS):
        found[f"{model} safe and helpful {cut}"] = 100 * rewards[model]["quadrants"][cut]["shares"]["SH"]
    return found


_SAFE_AND_HELPFUL = (kind.LEADER, "Beaver-V3")


def part(records: Iterable[Record], name: str) -> Record:
    """Return the published record of the ratings ("elo") or of the games ("games").

    Raises:
        ValueError: it is missing.
    """
    own = [r for r in records if r["spec"]["part"] == name]
    if len(own) != 1:
        raise ValueError(f"{len(own)} records of part {name!r}: run the specs of `judgments_specs`")
    return own[0]


def responses(records: Iterable[Record]) -> dict[str, Record]:
    """Return model -> record of its published responses, in the order of `MODELS`.

    Raises:
        ValueError: one is missing.
    """
    own = {r["spec"]["model"]: r for r in records if r["spec"]["part"] == "responses"}
    if missing := [model for model in data.MODELS if model not in own]:
        raise ValueError(f"no record of the responses of {', '.join(missing)}: run the specs of `judgments_specs`")
    return {model: own[model] for model in data.MODELS}


MACROS = {"JudgedQuestions": ("questions", "d"), "JudgedOrders": ("orders", ",d")}
MACROS |= {
    "JudgedLongerHelpful": ("helpfulness longer", ".0f"),
    "JudgedSpreadHelpful": ("helpfulness std", ".0f"),
}
for _dimension in data.DIMENSIONS:
    _name = _dimension.removesuffix("ness").title()
    for _macro, _result, _form in (
        ("Lead", "lead", ".0f"),
        ("LeadEqual", "equal_length_lead", ".0f"),
        ("First", "first", ".0f"),
        ("Reward", "reward all", ".1%"),
        ("Length", "length all", ".1%"),
    ):
        MACROS |= {f"Judged{_macro}{_name}": (f"{_dimension} {_result}", _form)}
"""The paper's numbers about the published judgments: macro -> name of a result, and format."""


def answers(found: Results) -> dict[str, str]:
    """Return question -> the sentence that answers it, with its numbers and intervals; found: of `results`."""
    helpful, harmless = data.DIMENSIONS
    leads = {
        name: listed([f"{stated(found[f'{d} {name}'], '.0f')} Elo points in {d}" for d in data.DIMENSIONS])
        for name in ("lead", "equal_length_lead")
    }
    wins = []
    names = {"reward": "with the higher training reward", "length": "that is longer", "-cost": "of lower cost"}
    for name, words in names.items():
        shares = [stated(found[f"{d} {name} without the base"]) for d in data.DIMENSIONS]
        wins.append(f"the answer {words} wins {' and '.join(shares)} %")
    cuts = []
    for cut, name in CUTS.items():
        shares = [f"{found[f'{model} safe and helpful {cut}']:.0f}" for model in _SAFE_AND_HELPFUL]
        cuts.append(f"{' and '.join(shares)} % if that is {name}")
    longer, first = (listed([f"{found[f'{d} {what}']:.0f}" for d in data.DIMENSIONS]) for what in ("longer", "first"))
    least, most = (
        end(found[f"{d} {what} std"] for d in data.DIMENSIONS) for end, what in ((min, "least"), (max, "most"))
    )
    return {
        "Do the published judgments put the model that ES trained first?": (
            f"By Bradley and Terry over {found['questions']} questions {kind.LEADER} leads "
            f"{found['helpfulness second']}, the next, by {leads['lead']}. With length held equal it leads by "
            f"{leads['equal_length_lead']}. Its answer is the longer one in {longer} % of these games."
        ),
        "What else predicts the published verdicts?": (
            f"Without the base's games, and for {helpful} and {harmless}: {'; '.join(wins)}."
        ),
        "How much of the published ratings is the order of the games?": (
            f"Over {found['orders']:,} random orders of the same games a rating has a standard deviation of "
            f"{least:.0f} to {most:.0f} points; {kind.LEADER} comes first in {first} %."
        ),
        "Do the published shares of safe and helpful responses depend on the cut?": (
            f"Safe and helpful are, of the responses of {' and of '.join(_SAFE_AND_HELPFUL)}: {'; '.join(cuts)}."
        ),
    }


def response_rows(records: Sequence[Record]) -> DataFrame:
    """Return a row per model: what its responses score, how long they are, and what they hold beside an answer."""
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


def refusal_rows(records: Sequence[Record]) -> DataFrame:
    """Return a row per model: which share of its responses is of which kind, and the mean reward of each kind."""
    rows = []
    for model, r in responses(records).items():
        kinds = {name: r["kinds"][name] for name in refusals.KINDS}
        rewards = {name: f" (R {own['reward']:.2f})" if "reward" in own else "" for name, own in kinds.items()}
        shares = {f"{name}, %": f"{100 * own['share']:.1f}{rewards[name]}" for name, own in kinds.items()}
        rows.append({"model": model} | shares)
    return pd.DataFrame(rows)


def ratings(records: Sequence[Record]) -> tuple[Figure, DataFrame]:
    """Draw the ratings of each model by dimension: published Elo with its spread over orders, and two strengths.

    For Elo, low and high are one standard deviation over orders about their mean, least and most the ends over orders.
    """
    fig, axes = plt.subplots(1, 2, figsize=(style.PAGE, 2.7), sharey=True, sharex=True)
    models, rows = [model for model in data.JUDGED if model != data.BASE], []
    for ax, dimension in zip(axes, data.DIMENSIONS, strict=True):
        rated, own = (part(records, name)["dimensions"][dimension] for name in ("elo", "games"))
        for y, model in enumerate(models):
            elo = {name: rated["models"][model][name] - 1000 for name in ("published", "mean", "least", "most")}
            std = rated["models"][model]["std"]
            row = {"dimension": dimension, "model": model, "rating": "elo", "value": elo["published"]}
            rows.append(
                row | {"least": elo["least"], "most": elo["most"], "low": elo["mean"] - std, "high": elo["mean"] + std}
            )
            look, at_elo = RATINGS["elo"], y + 0.25
            ax.plot([elo["least"], elo["most"]], [at_elo] * 2, color=look.color, lw=0.8)
            ax.plot([rows[-1]["low"], rows[-1]["high"]], [at_elo] * 2, color=look.color, lw=3.2, solid_capstyle="butt")
            ax.plot(elo["published"], at_elo, marker=look.marker, color=look.color, ms=4.5, mec="black", mew=0.6)
            for rating, key, offset in (("plain", "strength", 0), ("equal", "equal_length", -0.25)):
                (value, low, high), look = own[key][model], RATINGS[rating]
                rows.append(row | {"rating": rating, "value": value, "low": low, "high": high})
                how = {"color": look.color, "marker": look.marker, "ms": 4.5, "lw": 1.2, "capsize": 2}
                ax.errorbar(value, y + offset, xerr=[[value - low], [high - value]], **how)
        ax.axvline(0, color="black", lw=0.7)
        ax.set(title=dimension, xlabel=f"Elo points above {data.BASE}", yticks=range(len(models)), yticklabels=models)
        ax.set_ylim(-0.5, len(models) - 0.5)
        ax.grid(axis="y", visible=False)
    looks = [
        marks.handle(look.label, color=look.color, marker=look.marker, ms=4.5, ls="-") for look in RATINGS.values()
    ]
    marks.key(fig, looks)
    return fig, pd.DataFrame(rows)


def quadrants(records: Sequence[Record]) -> tuple[Figure, DataFrame]:
    """Draw the shares of the quadrants for each model as stacked bars, in %, at three cuts of the reward."""
    from matplotlib.patches import Patch

    of, rows = responses(records), []
    for cut, (quadrant, (_, _, label)), model in product(CUTS, QUADRANTS.items(), of):
        own = of[model]["quadrants"][cut]
        row = {"name": cut, "cut": own["cut"], "model": model, "quadrant": label}
        rows.append(row | {"share": 100 * own["shares"][quadrant]})
    shares = pd.DataFrame(rows)
    fig, axes = plt.subplots(1, len(CUTS), figsize=(style.PAGE, 2.4), sharey=True)
    places = np.arange(len(of))[::-1]
    for ax, (cut, name) in zip(axes, CUTS.items(), strict=True):
        left = np.zeros(len(of))
        for color, hatch, label in QUADRANTS.values():
            own = shares[(shares["name"] == cut) & (shares["quadrant"] == label)]["share"].to_numpy()
            ax.barh(places, own, left=left, color=color, hatch=hatch, edgecolor="white", linewidth=0.4, height=0.72)
            left += own
        ax.set(title=f"helpful: {name}", xlabel="responses, %", xlim=(0, 100), yticks=places, yticklabels=list(of))
        ax.grid(visible=False)
    handles = [Patch(facecolor=c, hatch=h, edgecolor="white", lw=0.4, label=text) for c, h, text in QUADRANTS.values()]
    marks.key(fig, handles)
    return fig, shares.drop(columns="name")
