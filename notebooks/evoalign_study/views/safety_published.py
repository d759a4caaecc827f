"""What notebook 04 shows of the published judgments and responses: answers in words, tables and figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from evoalign_lib.analysis import refusals
from evoalign_lib.tasks import safety_published as data
from evoalign_study import style
from evoalign_study.kinds import judged as kind
from evoalign_study.records import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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


def part(found: Iterable[Record], name: str) -> Record:
    """Return the record of the ratings ("elo") or of the games ("games"). Raises ValueError where it is missing."""
    own = [r for r in found if r["spec"]["part"] == name]
    if len(own) != 1:
        raise ValueError(f"{len(own)} records of part {name!r}: run the specs of `judgments_specs`")
    return own[0]


def responses(found: Iterable[Record]) -> dict[str, Record]:
    """Return model -> record of its responses, in the order of `MODELS`. Raises ValueError where one is missing."""
    own = {r["spec"]["model"]: r for r in found if r["spec"]["part"] == "responses"}
    if missing := [model for model in data.MODELS if model not in own]:
        raise ValueError(f"no record of the responses of {', '.join(missing)}: run the specs of `judgments_specs`")
    return {model: own[model] for model in data.MODELS}


# ---- the answers, in words


def answers(found: Sequence[Record]) -> dict[str, str]:
    """Return question -> the sentence that answers it, with its numbers and intervals."""
    return {
        "Do the published judgments put the model that ES trained first?": _lead_in_words(found),
        "What else predicts the published verdicts?": _agreement_in_words(found),
        "How much of the published ratings is the order of the games?": _orders_in_words(found),
        "Do the published shares of safe and helpful responses depend on the cut?": _cuts_in_words(found),
    }


def _lead_in_words(found: Sequence[Record]) -> str:
    games = part(found, "games")
    of = {dimension: games["dimensions"][dimension] for dimension in data.DIMENSIONS}
    (second,) = {_second(each) for each in of.values()}
    lead, equal = (
        _and([f"{_interval(each[name][second])} Elo points in {dimension}" for dimension, each in of.items()])
        for name in ("lead", "equal_length_lead")
    )
    longer = _and([f"{100 * each['longer'][second]:.0f}" for each in of.values()])
    return (
        f"By Bradley and Terry over {games['prompts']} questions {kind.LEADER} leads {second}, the next, by {lead}. "
        f"With length held equal it leads by {equal}. Its answer is the longer one in {longer} % of these games."
    )


def _agreement_in_words(found: Sequence[Record]) -> str:
    of = part(found, "games")["dimensions"]
    each = []
    for name, words in (
        ("reward", "with the higher training reward"),
        ("length", "that is longer"),
        ("-cost", "of lower cost"),
    ):
        shares = [_percent(of[d]["agreement"][name]["without the base"]) for d in data.DIMENSIONS]
        each.append(f"the answer {words} wins {' and '.join(shares)} %")
    return f"Without the base's games, and for {' and '.join(data.DIMENSIONS)}: {'; '.join(each)}."


def _orders_in_words(found: Sequence[Record]) -> str:
    record = part(found, "elo")
    of = [record["dimensions"][dimension]["models"] for dimension in data.DIMENSIONS]
    spreads = [row["std"] for models in of for model, row in models.items() if model != data.BASE]
    first = [f"{100 * models[kind.LEADER]['first']:.0f}" for models in of]
    return (
        f"Over {record['spec']['orders']:,} random orders of the same games a rating has a standard deviation of "
        f"{min(spreads):.0f} to {max(spreads):.0f} points; {kind.LEADER} comes first in {' and '.join(first)} %."
    )


def _cuts_in_words(found: Sequence[Record]) -> str:
    of, models = responses(found), (kind.LEADER, "Beaver-V3")
    each = []
    for cut, name in CUTS.items():
        shares = [f"{100 * of[model]['quadrants'][cut]['shares']['SH']:.0f}" for model in models]
        each.append(f"{' and '.join(shares)} % if that is {name}")
    return f"Safe and helpful are, of the responses of {models[0]} and of {models[1]}: {'; '.join(each)}."


_PREDICTED = {
    "reward": "higher training reward",
    "-cost": "lower cost",
    "length": "longer text",
    "reward - cost": "higher reward - cost",
}


def _second(of: Mapping[str, Any]) -> str:
    """The strongest of the other models."""
    return max((model for model in of["strength"] if model != kind.LEADER), key=lambda m: of["strength"][m][0])


# ---- the paper's numbers


def numbers(found: Sequence[Record]) -> dict[str, tuple[Any, str]]:
    """Return macro -> value and format: how far the leader leads the next model, and what else predicts verdicts.

    Names end in the dimension, Helpful or Harmless.
    """
    games, elo = part(found, "games"), part(found, "elo")
    said: dict[str, tuple[Any, str]] = {"JudgedQuestions": (games["prompts"], "d")}
    said["JudgedOrders"] = (elo["spec"]["orders"], ",d")
    for dimension in data.DIMENSIONS:
        of, name = games["dimensions"][dimension], dimension.removesuffix("ness").title()
        second, rated = _second(of), elo["dimensions"][dimension]["models"]
        said[f"JudgedLead{name}"] = (_interval(of["lead"][second]), "")
        said[f"JudgedLeadEqual{name}"] = (_interval(of["equal_length_lead"][second]), "")
        said[f"JudgedLonger{name}"] = (100 * of["longer"][second], ".0f")
        said[f"JudgedSpread{name}"] = (rated[kind.LEADER]["std"], ".0f")
        said[f"JudgedFirst{name}"] = (100 * rated[kind.LEADER]["first"], ".0f")
        for quantity, words in (("reward", "Reward"), ("length", "Length")):
            said[f"Judged{words}{name}"] = (_percent(of["agreement"][quantity]["all"]), "")
    return said


# ---- tables


def rating_rows(found: Sequence[Record]) -> DataFrame:
    """Return a row per dimension and model: published Elo, its spread over orders, and strengths above the base."""
    elo, games, rows = part(found, "elo"), part(found, "games"), []
    for dimension in data.DIMENSIONS:
        rated, of = elo["dimensions"][dimension]["models"], games["dimensions"][dimension]
        for model in data.JUDGED:
            row, own = {"dimension": dimension, "model": model}, rated[model]
            row |= {"Elo, published": f"{own['published']:.2f}", "reproduced": f"{own['reproduced']:.2f}"}
            row |= {"std over orders": f"{own['std']:.0f}", "range": f"{own['least']:.0f} to {own['most']:.0f}"}
            row |= {"first, % of orders": f"{100 * own['first']:.1f}"}
            row |= {"Bradley-Terry": _interval(of["strength"][model])}
            rows.append(row | {"length held equal": _interval(of["equal_length"][model])})
    return _frame(rows)


def lead_rows(found: Sequence[Record]) -> DataFrame:
    """Return a row per dimension and other model: by how much the leader leads, with and without length held equal."""
    rows = []
    for dimension, of in part(found, "games")["dimensions"].items():
        for model, lead in of["lead"].items():
            row = {"dimension": dimension, f"{kind.LEADER} -": model, "Bradley-Terry": _interval(lead)}
            row |= {"length held equal": _interval(of["equal_length_lead"][model])}
            row |= {"games won, %": _percent(of["head_to_head"][model])}
            rows.append(row | {"longer answer, %": f"{100 * of['longer'][model]:.0f}"})
    return _frame(rows)


def agreement_rows(found: Sequence[Record]) -> DataFrame:
    """Return a row per quantity: in what share of the decided verdicts it favours the winner, by dimension."""
    dimensions, rows = part(found, "games")["dimensions"], []
    for name in _PREDICTED:
        row = {"quantity": _PREDICTED[name]}
        for dimension, of in dimensions.items():
            for games, share in of["agreement"][name].items():
                row[dimension if games == "all" else f"{dimension}, {games}"] = _percent(share)
        rows.append(row)
    return _frame(rows)


def judge_rows(found: Sequence[Record]) -> DataFrame:
    """Return a row per dimension: what the judge's verdicts are like, and what a longer answer is worth."""
    rows = []
    for dimension, of in part(found, "games")["dimensions"].items():
        most = max(of["scores"], key=of["scores"].get)
        row = {"dimension": dimension, "games": of["games"], "without scores": of["unparsed"], "ties": of["ties"]}
        row |= {"slot A wins, % of decided": _percent(of["slot_a"])}
        row |= {"twice as long, Elo points": _interval(of["twice_as_long"])}
        share = of["scores"][most] / sum(of["scores"].values())
        rows.append(row | {"most frequent score": most, "its share, %": f"{100 * share:.0f}"})
    return _frame(rows)


def response_rows(found: Sequence[Record]) -> DataFrame:
    """Return a row per model: what its responses score, how long they are, and what they hold beside an answer."""
    rows = []
    for model, r in responses(found).items():
        row = {"model": model, "safe, %": f"{100 * r['safe']:.2f}"}
        row |= {"safe, % of prompts": _percent(r["per_prompt"]["safe"])}
        row |= {name: f"{r[key]['mean']:.3f} ± {r[key]['std']:.3f}" for name, key in (("R", "reward"), ("C", "cost"))}
        row |= {"R - C": _interval(r["per_prompt"]["reward - cost"], 2)}
        row |= {"characters": f"{r['characters']:.0f}", "of the answer": f"{r['answer_characters']:.0f}"}
        row |= {"further turn, %": f"{100 * r['further_turn']:.1f}", "heading, %": f"{100 * r['heading']:.1f}"}
        row |= {"web address, %": f"{100 * r['web_address']:.1f}", "R with length": f"{r['reward_with_length']:.2f}"}
        rows.append(row | {"one opening, %": f"{100 * r['opening']:.1f}", "template, %": f"{100 * r['template']:.2f}"})
    return _frame(rows)


def quadrant_rows(found: Sequence[Record]) -> DataFrame:
    """Return a row per model: the share of safe and helpful responses, by the cut of the reward; and the safe share."""
    rows = []
    for model, r in responses(found).items():
        row = {"model": model, "safe, %": f"{100 * r['safe']:.1f}"}
        for name, at in r["quadrants"].items():
            label = "R > 0" if name == "0" else f"R > {at['cut']:.2f} ({name})"
            row[label] = f"{100 * at['shares']['SH']:.1f}"
        rows.append(row)
    return _frame(rows)


def refusal_rows(found: Sequence[Record]) -> DataFrame:
    """Return a row per model: which share of its responses is of which kind, and the mean reward of each kind."""
    rows = []
    for model, r in responses(found).items():
        row = {"model": model}
        for name in refusals.KINDS:
            of = r["kinds"][name]
            row[f"{name}, %"] = f"{100 * of['share']:.1f}" + (f" (R {of['reward']:.2f})" if "reward" in of else "")
        rows.append(row)
    return _frame(rows)


# ---- figures


def ratings(found: Sequence[Record]) -> tuple[Figure, DataFrame]:
    """Draw the ratings of each model by dimension: published Elo with its spread over orders, and two strengths.

    Returns the figure and what it plots: a row per dimension, model and way to rate. For Elo, low and high are one
    standard deviation over orders about their mean, least and most the ends over orders.
    """
    from matplotlib import pyplot as plt

    elo, games, rows = part(found, "elo"), part(found, "games"), []
    fig, axes = plt.subplots(1, 2, figsize=(style.PAGE, 2.7), sharey=True, sharex=True)
    shown = [model for model in reversed(data.JUDGED) if model != data.BASE]
    for ax, dimension in zip(axes, data.DIMENSIONS, strict=True):
        rated, of = elo["dimensions"][dimension]["models"], games["dimensions"][dimension]
        for y, model in enumerate(reversed(shown)):
            own = {"dimension": dimension, "model": model}
            at = {name: rated[model][name] - 1000 for name in ("published", "mean", "least", "most")}
            rows.append(own | {"rating": "elo", "value": at["published"], "least": at["least"], "most": at["most"]})
            rows[-1] |= {"low": at["mean"] - rated[model]["std"], "high": at["mean"] + rated[model]["std"]}
            for name, key in (("plain", "strength"), ("equal", "equal_length")):
                rows.append(own | {"rating": name} | dict(zip(("value", "low", "high"), of[key][model], strict=True)))
            for row, offset in zip(rows[-3:], (0.25, 0, -0.25), strict=True):
                _rating(ax, y + offset, row)
        ax.axvline(0, color="black", lw=0.7)
        ax.set(title=dimension, xlabel=f"Elo points above {data.BASE}", yticks=range(len(shown)))
        ax.set(yticklabels=list(reversed(shown)), ylim=(-0.5, len(shown) - 0.5))
        ax.grid(axis="y", visible=False)
    _key(fig, [_line(look) for look in RATINGS.values()])
    return fig, _frame(rows)


def _rating(ax: Axes, y: float, row: Mapping[str, Any]) -> None:
    look = RATINGS[row["rating"]]
    if "least" in row:
        ax.plot([row["least"], row["most"]], [y, y], color=look.color, lw=0.8)
        ax.plot([row["low"], row["high"]], [y, y], color=look.color, lw=3.2, solid_capstyle="butt")
        ax.plot(row["value"], y, marker=look.marker, color=look.color, ms=4.5, mec="black", mew=0.6)
        return
    away = [[row["value"] - row["low"]], [row["high"] - row["value"]]]
    ax.errorbar(row["value"], y, xerr=away, color=look.color, marker=look.marker, ms=4.5, lw=1.2, capsize=2)


def quadrants(found: Sequence[Record]) -> tuple[Figure, DataFrame]:
    """Draw the shares of the quadrants for each model as stacked bars, at three cuts of the reward.

    Returns the figure and what it plots: a row per cut, model and quadrant, shares in percent.
    """
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    of, rows = responses(found), []
    fig, axes = plt.subplots(1, len(CUTS), figsize=(style.PAGE, 2.4), sharey=True)
    places = np.arange(len(of))[::-1]
    for ax, (cut, name) in zip(axes, CUTS.items(), strict=True):
        left = np.zeros(len(of))
        for quadrant, (color, hatch, label) in QUADRANTS.items():
            shares = np.array([100 * r["quadrants"][cut]["shares"][quadrant] for r in of.values()])
            ax.barh(places, shares, left=left, color=color, hatch=hatch, edgecolor="white", linewidth=0.4, height=0.72)
            left += shares
            at = [r["quadrants"][cut]["cut"] for r in of.values()]
            table = zip(of, at, shares, strict=True)
            rows += [{"cut": x, "model": model, "quadrant": label, "share": share} for model, x, share in table]
        ax.set(title=f"helpful: {name}", xlabel="responses, %", xlim=(0, 100))
        ax.set(yticks=places, yticklabels=list(of))
        ax.grid(visible=False)
    handles = [Patch(facecolor=c, hatch=h, edgecolor="white", lw=0.4, label=text) for c, h, text in QUADRANTS.values()]
    _key(fig, handles)
    return fig, _frame(rows)


def _line(look: style.Look) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=look.color, marker=look.marker, ms=4.5, label=look.label)


def _key(fig: Figure, handles: Sequence[Any]) -> None:
    fig.legend(handles=handles, loc="outside lower center", ncols=len(handles), columnspacing=1.4, handlelength=1.8)


# ---- words


def _interval(three: Sequence[float], digits: int = 0) -> str:
    value, low, high = (f"{round(x, digits) + 0.0:.{digits}f}" for x in three)
    return f"{value} [{low}, {high}]"


def _percent(three: Sequence[float]) -> str:
    return _interval([100 * x for x in three], 1)


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _frame(rows: Iterable[Mapping[str, Any]]) -> DataFrame:
    from pandas import DataFrame

    return DataFrame(list(rows))
