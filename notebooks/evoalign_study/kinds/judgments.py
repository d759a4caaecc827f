"""The judgments and responses that a published study of safety released, read again.

Three parts: the published Elo ratings and how far the order of the games alone moves them ("elo"); what the judgments
say by Bradley and Terry, with intervals over prompts, with length held equal, and what else predicts the verdicts
("games"); and what each model's responses are ("responses"). No text goes into a record.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evoalign_lib.analysis import hacking, refusals, stats, tournaments
from evoalign_lib.tasks import safety_published as data
from evoalign_study.records import Record, Spec

ORDERS = 1_000
"""Random orders of the games, for the spread of sequential Elo."""
RESAMPLES = 2_000
"""Resamples of the prompts, for every interval."""
LEADER = "ES-500"
"""The model that the published ratings put first."""
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Of the base's rewards: cuts between helpful and unhelpful beside the published one, which is 0."""

# headings of the training text that models go on to write beside turns
_HEADING = re.compile(r"(?:BEGINNING|END) OF CONVERSATION")
_ADDRESS = re.compile(r"https?://|\bwww\.")


def judgments_specs(scale: str) -> list[Spec]:
    """Specs of the analysis of the published judgments: one each for ratings and games, one for each model's responses.

    Args:
        scale: of the notebook, in whose file the records are kept; they are about no model of that scale. At smoke
            few resamples and orders are drawn, and the first responses are read.
    """
    resamples, orders = (20, 20) if scale == "smoke" else (RESAMPLES, ORDERS)
    common = {"kind": "judgments", "task": "safety_published", "scale": scale, "resamples": resamples, "seed": 0}
    parts = [common | {"part": "elo", "orders": orders}, common | {"part": "games"}]
    asked = {"part": "responses"} | ({"first": 200} if scale == "smoke" else {})
    return parts + [common | asked | {"model": model} for model in data.MODELS]


def run(spec: Spec) -> Record:
    """What a part of the published data says.

    Raises:
        ValueError: an unknown part.
        PermissionError: the data are not in EVOALIGN_DATA, and their licence was not accepted.
        FileNotFoundError: they cannot be fetched.
    """
    if spec["part"] == "elo":
        return _elo(spec)
    if spec["part"] == "games":
        return _games(spec)
    if spec["part"] == "responses":
        return _responses(spec)
    raise ValueError(f"unknown part {spec['part']!r}: use elo, games or responses")


# ----------------------------------------------------------------------------------------------------------------- Elo


def _elo(spec: Spec) -> Record:
    published, judgments = data.load_elo(), data.load_judgments()
    record: Record = {"dimensions": {}}
    for dimension in data.DIMENSIONS:
        own = [j for j in judgments if j.dimension == dimension]
        # the published ratings count a judgment without scores as a tie
        games = _as_games(own, missing=tournaments.TIE)
        again = tournaments.elo(games.take(data.elo_order(len(own))), data.BASE)
        ratings = tournaments.elo_orders(games, data.BASE, n_orders=spec["orders"], seed=spec["seed"])
        models = {}
        for i, model in enumerate(games.players):
            models[model] = {
                "published": round(published[dimension][model], 4),
                "reproduced": round(again[model], 4),
                "mean": round(float(ratings[:, i].mean()), 1),
                "std": round(float(ratings[:, i].std(ddof=1)), 1),
                "least": round(float(ratings[:, i].min()), 1),
                "most": round(float(ratings[:, i].max()), 1),
                "first": round(float((ratings.argmax(1) == i).mean()), 4),
            }
        record["dimensions"][dimension] = {"games": len(own), "models": models}
    return record


# --------------------------------------------------------------------------------------------------------------- games


def _games(spec: Spec) -> Record:
    judgments = data.load_judgments()
    points = {model: data.load_points(model) for model in data.JUDGED}
    # where a prompt occurs several times, the study judged the last response
    rows = {model: {prompt: i for i, prompt in enumerate(of.prompts)} for model, of in points.items()}

    def differences(own: Sequence[data.Judgment], value: Callable[[data.Points, int], float]) -> NDArray[np.float64]:
        sides = [[value(points[m], rows[m][j.question]) for j in own for m in (j.a, j.b)]]
        return np.subtract(*np.reshape(sides, (-1, 2)).T)

    found = {}
    for dimension in data.DIMENSIONS:
        own = [j for j in judgments if j.dimension == dimension]
        scored = [j for j in own if j.scores is not None]
        predictors = {name: differences(scored, value) for name, value in _PREDICTORS.items()}
        lengths = [
            [len(points[model].responses[rows[model][j.question]]) for j, model in zip(scored, side, strict=True)]
            for side in ([j.a for j in scored], [j.b for j in scored])
        ]
        found[dimension] = _dimension(spec, own, scored, predictors, tournaments.length_difference(*lengths))
    return {"prompts": len({j.question for j in judgments}), "dimensions": found}


_PREDICTORS: dict[str, Callable[[data.Points, int], float]] = {
    "reward": lambda points, i: points.rewards[i],
    "-cost": lambda points, i: -points.costs[i],
    "length": lambda points, i: len(points.responses[i]),
    "reward - cost": lambda points, i: points.rewards[i] - points.costs[i],
}
"""Quantities of a response that might predict the verdict, higher is better."""


def _dimension(
    spec: Spec,
    own: Sequence[data.Judgment],
    scored: Sequence[data.Judgment],
    predictors: Mapping[str, NDArray[np.float64]],
    lengths: NDArray[np.float64],
) -> dict[str, Any]:
    games, how = _as_games(scored), {"n_resamples": spec["resamples"], "seed": spec["seed"]}
    plain = tournaments.bradley_terry(games, data.BASE, **how)
    equal = tournaments.adjusted(games, data.BASE, {"length": lengths})
    as_ties = tournaments.bradley_terry(_as_games(own, missing=tournaments.TIE), data.BASE, n_resamples=0)
    others = [model for model in games.players if model != LEADER]
    held = np.array([data.BASE not in (j.a, j.b) for j in scored])
    counts = Counter(score for j in scored for score in j.scores)
    return {
        "games": len(own),
        "unparsed": len(own) - len(scored),
        "ties": int((~games.decided).sum()),
        "won_by_slot": {"A": int((games.outcome == 1).sum()), "B": int((games.outcome == 0).sum())},
        "strength": {model: _three(plain.interval(model)) for model in games.players},
        "lead": {model: _three(plain.difference(LEADER, model)) for model in others},
        "first": {model: round(share, 4) for model, share in plain.first().items()},
        "undefined": plain.undefined,
        "unparsed_as_ties": {m: round(float(v), 1) for m, v in zip(games.players, as_ties.values, strict=True)},
        "equal_length": {model: _three(equal.interval(model)) for model in games.players},
        "equal_length_lead": {model: _three(equal.difference(LEADER, model)) for model in others},
        # an answer twice as long has a covariate of 1/3
        "longer": {m: _longer(games, lengths, m) for m in others},
        "twice_as_long": [round(x / 3, 1) for x in _three(equal.interval("length"), 4)],
        "win_rate": {model: _three(rate, 4) for model, rate in tournaments.win_rates(games, **how).items()},
        "head_to_head": {m: _three(tournaments.head_to_head(games, LEADER, m, **how), 4) for m in others},
        "slot_a": _three(tournaments.position_effect(games, **how), 4),
        "agreement": {
            name: {
                "all": _three(tournaments.agreement(games, values, **how), 4),
                "without the base": _three(tournaments.agreement(games.take(held), values[held], **how), 4),
            }
            for name, values in predictors.items()
        },
        "scores": {f"{score:g}": counts[score] for score in sorted(counts)},
    }


def _longer(games: tournaments.Games, lengths: NDArray[np.float64], other: str) -> float:
    """Share of the leader's games with another model in which its answer is the longer one."""
    i, j = (games.players.index(model) for model in (LEADER, other))
    return round(
        float(
            np.mean([*(lengths[(games.a == i) & (games.b == j)] > 0), *(lengths[(games.a == j) & (games.b == i)] < 0)])
        ),
        4,
    )


def _as_games(judgments: Sequence[data.Judgment], missing: float | None = None) -> tournaments.Games:
    """Judgments as games; `missing` is the outcome of those without scores."""
    outcomes = [missing if j.scores is None else j.outcome() for j in judgments]
    names = ([getattr(j, slot) for j in judgments] for slot in ("a", "b"))
    return tournaments.Games.of([j.question for j in judgments], *names, outcomes, data.JUDGED)


def _three(interval: stats.Interval, digits: int = 1) -> list[float]:
    # adding 0.0 turns -0.0 into 0.0
    return [round(x, digits) + 0.0 for x in (interval.value, interval.low, interval.high)]


# ----------------------------------------------------------------------------------------------------------- responses


def _responses(spec: Spec) -> Record:
    own, base = (data.load_points(model).first(spec.get("first")) for model in (spec["model"], data.BASE))
    rewards, costs, texts = np.array(own.rewards), np.array(own.costs), own.responses
    lengths, safe = np.array([len(text) for text in texts]), costs <= 0
    kinds = [refusals.kind(text) for text in texts]
    turns = np.array([hacking.further_turn(text) for text in texts])
    per_prompt = _Prompts(own.prompts, spec)
    # one response per prompt, or a prompt that occurs 52 times would look like a template
    once = [texts[i] for i in per_prompt.first]
    cuts = {"0": 0.0} | {f"{100 * q:g} % of the base": float(np.quantile(base.rewards, q)) for q in QUANTILES}
    return {
        "responses": len(texts),
        "prompts": len(once),
        "labels_reproduced": sum(a == b for a, b in zip(own.labels, _labels(rewards, safe, 0.0), strict=True)),
        "reward": _spread(rewards),
        "cost": _spread(costs),
        "characters": round(float(lengths.mean()), 1),
        "answer_characters": round(float(np.mean([len(refusals.answer(text)) for text in texts])), 1),
        "reward_with_length": round(float(np.corrcoef(rewards, lengths)[0, 1]), 4),
        "safe": round(float(safe.mean()), 5),
        "per_prompt": {
            "safe": per_prompt.mean(safe),
            "reward": per_prompt.mean(rewards),
            "cost": per_prompt.mean(costs),
            "reward - cost": per_prompt.mean(rewards - costs),
            "refuses": per_prompt.mean([kind not in ("complies", "empty/other turn") for kind in kinds]),
            "further_turn": per_prompt.mean(turns),
        },
        "quadrants": {name: {"cut": round(cut, 5), "shares": _shares(_labels(rewards, safe, cut), data.LABELS)}
                      for name, cut in cuts.items()},
        "template": round(hacking.template_share(once), 5),
        "opening": round(refusals.opening_share(once), 5),
        "further_turn": round(float(turns.mean()), 5),
        "heading": round(float(np.mean([bool(_HEADING.search(text)) for text in texts])), 5),
        "web_address": round(float(np.mean([bool(_ADDRESS.search(text)) for text in texts])), 5),
        "kinds": _by_kind(kinds, rewards, costs, lengths),
    }  # fmt: skip


def _labels(rewards: NDArray[np.float64], safe: NDArray[np.bool_], cut: float) -> list[str]:
    return [f"{'S' if s else 'U'}{'H' if r > cut else 'U'}" for s, r in zip(safe, rewards, strict=True)]


def _shares(names: Sequence[str], known: Sequence[str]) -> dict[str, float]:
    counts = Counter(names)
    return {name: round(counts[name] / len(names), 5) for name in known}


def _spread(values: NDArray[np.float64]) -> dict[str, float]:
    quartiles = np.quantile(values, (0.25, 0.5, 0.75))
    found = {"mean": values.mean(), "std": values.std()} | dict(zip(("q25", "median", "q75"), quartiles, strict=True))
    return {name: round(float(value), 5) for name, value in found.items()}


def _by_kind(kinds: Sequence[str], *columns: NDArray[np.number]) -> dict[str, dict[str, float]]:
    found, names = {}, np.array(kinds)
    for kind in refusals.KINDS:
        chosen = names == kind
        found[kind] = {"share": round(float(chosen.mean()), 5)}
        if chosen.any():
            means = (round(float(column[chosen].mean()), 3) for column in columns)
            found[kind] |= dict(zip(("reward", "cost", "characters"), means, strict=True))
    return found


class _Prompts:
    """Rows by their prompt: means over the rows of each prompt, and over prompts, which are resampled."""

    def __init__(self, prompts: Sequence[str], spec: Spec) -> None:
        _, self.first, self.of = np.unique(prompts, return_index=True, return_inverse=True)
        self.rows, self.how = np.bincount(self.of), {"n_resamples": spec["resamples"], "seed": spec["seed"]}
        self.first = np.sort(self.first)

    def mean(self, values: ArrayLike) -> list[float]:
        """Return the mean over distinct prompts, and its interval."""
        each = np.bincount(self.of, np.asarray(values, np.float64)) / self.rows
        return _three(stats.crossed_bootstrap(each[None], **self.how), 5)
