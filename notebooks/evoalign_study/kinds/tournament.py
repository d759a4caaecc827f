"""A tournament of models that were trained on one judge: who wins, by what each other judge says of their replies.

The players are arms, and the untrained base. Every run plays the base, and the runs of the other arms that have its
seed, with its greedy reply to each test request. Judges score a reply alone (`judges.ScoreJudge`), so that there are no
orders; equal scores are a tie. Strengths are Bradley-Terry's (`analysis.tournaments`), above the base.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np

from evoalign_lib import judges, tiny
from evoalign_lib.analysis import tournaments
from evoalign_lib.tasks import safety as task
from evoalign_study import specs, training, weight_cache
from evoalign_study.measures import safety
from evoalign_study.records import Record, Spec

BASE = "base"
"""The player that trained nothing."""
_OUTCOMES = {"a": tournaments.A_WINS, "b": tournaments.B_WINS, "tie": tournaments.TIE}


def tournament_spec(runs: Mapping[str, Sequence[Record]], settings: Mapping[str, Any], scale: str) -> Spec:
    """Return the spec of a tournament.

    Args:
        runs: arm -> its runs, of one base of the tiny world and on one training judge, that differ in their seeds.
        settings: judge, the training judge, and what else the task reads; max_completion_length.
        scale: of the notebook.

    Raises:
        ValueError: fewer than two arms, runs that make no group (`trained.group`) or are not of the settings' judge, a
            setting that is missing, and what `specs.begin` refuses.
    """
    if len(runs) < 2:
        raise ValueError(f"a tournament of {', '.join(runs) or 'no arms'}: give the runs of two arms at least.")
    arms = {arm: weight_cache.group(found) for arm, found in runs.items()}
    base = next(iter(arms.values()))["run"]["base"]
    for arm, group in arms.items():
        played = (group["run"]["base"], group["run"].get("judge"))
        if played != (base, settings.get("judge")):
            raise ValueError(
                f"the runs of {arm!r} are of base and judge {played}, the tournament is of "
                f"{(base, settings.get('judge'))}."
            )
    spec = specs.begin_tiny("tournament", base, scale, settings, tiny.REQUEST_BASES)
    return spec | specs.take(settings, ("max_completion_length",), "a tournament") | {"arms": arms}


def run(spec: Spec) -> Record:
    """Return what each judge makes of the games.

    The record has `games`, their number; `sides`, player -> judge ("rule", and the training judge) -> shares of the
    replies in the quadrants of `tasks.safety`, helpful above 0 by the rule, and above the median reward of the
    base's replies by the training judge; and `judges`:
    name -> `wins`, arm -> share of games won of each run, ties as half a win; and `strengths`, arm -> Elo points above
    the base with their interval over requests, and `lead`, first arm - second with its intervals over requests and over
    seeds. Strengths that are not finite, since a player won or lost all games, are None.

    Raises:
        ValueError: weights that are not those of their record.
    """
    replies, requests = _replies(spec), safety.MEASURES.sets(spec)["test"]
    by_text = {request.text: request for request in requests}
    asked = list(by_text)
    games = [
        (seed, (arm, other))
        for arm, other in itertools.combinations([BASE, *spec["arms"]], 2)
        for seed in _seeds(replies, arm, other)
    ]
    pairs = [
        judges.Pair(prompt, *texts)
        for seed, players in games
        for prompt, *texts in zip(asked, *(_of(replies, player, seed) for player in players), strict=True)
    ]
    found: Record = {"games": len(pairs), "sides": _sides(spec, replies, requests), "judges": {}}
    for judge in safety.judges_of(spec):

        def score(prompts: list[str], completions: list[str], judge: str = judge) -> np.ndarray:
            return safety.scored(judge, spec["cost_weight"], [by_text[prompt] for prompt in prompts], completions)

        verdicts = judges.judge_pairs(judges.ScoreJudge(score, judge), pairs).verdicts
        outcomes = np.array([_OUTCOMES[verdict] for verdict in verdicts]).reshape(len(games), len(asked))
        found["judges"][judge] = _told(spec, games, outcomes)
    return found


def _replies(spec: Spec) -> dict[str, dict[int, list[str]]]:
    """Return player -> seed -> greedy replies to the test requests; the base has the seed -1."""
    model, tokenizer, sets = training.world(spec)
    found: dict[str, dict[int, list[str]]] = {BASE: {}}
    with closing(training.evaluation_engine(spec, model, tokenizer, {"test": sets["test"]})) as engine:

        def reply() -> list[str]:
            (row,) = engine.generate("test")
            return [text.replace(tiny.END, "") for text, _ in row]

        found[BASE][-1] = reply()
        for arm, group in spec["arms"].items():
            found[arm] = {}
            for seed, master in zip(group["seeds"], weight_cache.of_group(group), strict=True):
                engine.master[:] = master
                found[arm][seed] = reply()
    return found


def _sides(spec: Spec, replies: Mapping[str, Mapping[int, list[str]]], requests: list[Any]) -> dict[str, Any]:
    """Return player -> judge -> shares of its replies in the quadrants, in their order."""
    found: dict[str, dict[str, list[float]]] = {player: {} for player in replies}
    for judge in (safety.RULE, spec["judge"]):
        cut = 0.0 if judge == safety.RULE else float(np.median(safety.sides(judge, requests, replies[BASE][-1])[0]))
        for player, of_seed in replies.items():
            texts = [text for said in of_seed.values() for text in said]
            rewards, costs = safety.sides(judge, requests * len(of_seed), texts)
            shares = task.quadrants(rewards, costs, cut)
            found[player][judge] = [round(share, 4) for share in shares.values()]
    return found


def _of(replies: Mapping[str, Mapping[int, list[str]]], player: str, seed: int) -> list[str]:
    return replies[player][-1 if player == BASE else seed]


def _seeds(replies: Mapping[str, Mapping[int, Any]], arm: str, other: str) -> list[int]:
    return [seed for seed in replies[other] if arm == BASE or seed in replies[arm]]


def _told(spec: Spec, games: Sequence[tuple[int, tuple[str, str]]], outcomes: np.ndarray) -> dict[str, Any]:
    """Return what a judge makes of games: outcomes, (pairs of runs, requests), are what the first player scores."""
    players, n = [BASE, *spec["arms"]], outcomes.shape[1]
    wins = {arm: [_share(games, outcomes, arm, seed) for seed in group["seeds"]] for arm, group in spec["arms"].items()}
    seeds, sides = [seed for seed, _ in games for _ in range(n)], [pair for _, pair in games for _ in range(n)]
    first, second = ([pair[i] for pair in sides] for i in (0, 1))
    told: dict[str, Any] = {"wins": wins, "strengths": None, "lead": None}
    requests = list(range(n)) * len(games)
    try:
        by_request, by_seed = (
            tournaments.bradley_terry(
                tournaments.Games.of(units, first, second, outcomes.ravel(), players), BASE, n_resamples=500
            )
            for units in (requests, seeds)
        )
    except ValueError:  # some player won or lost everything
        return told
    arm, other = list(spec["arms"])[:2]
    told["strengths"] = {name: _rounded(by_request.interval(name)) for name in spec["arms"]}
    told["lead"] = {
        "requests": _rounded(by_request.difference(arm, other)),
        "seeds": _rounded(by_seed.difference(arm, other)),
    }
    return told


def _share(games: Sequence[tuple[int, tuple[str, str]]], outcomes: np.ndarray, arm: str, seed: int) -> float:
    """Return the share of its games that a run wins."""
    own = [
        row if players[0] == arm else 1 - row
        for (played, players), row in zip(games, outcomes, strict=True)
        if played == seed and arm in players
    ]
    return round(float(np.mean(own)), 3)


def _rounded(interval: Any) -> list[float]:
    return [round(float(x), 1) for x in (interval.value, interval.low, interval.high)]
