"""Kinds that judge: a tournament of trained models, the biases of judges, and the data that published studies released.

- *tournament*: models that were trained on one judge play each other, and each judge decides who wins. The players are
  the arms and the untrained base. Every run plays the base, and the runs of the other arms with the same seed, with its
  greedy reply to each test request. Judges score each reply by itself (`judges.ScoreJudge`), so order plays no part;
  equal scores are a tie. Strengths are Bradley-Terry strengths (`analysis.tournaments`), relative to the base.
- *tastes*: biases of the tiny world's judges: how their scores of good replies change when sentences are added. The
  replies are the best ones to the first requests of split B, on which nothing was trained.
- *published*: the completions of a study of conciseness, read again with every detector.
- *judgments*: the judgments and responses of a study of safety, in three parts: the published Elo ratings, and how far
  the order of the games alone moves them ("elo"); Bradley-Terry strengths from the judgments, with intervals over
  prompts, also with length held equal, and what else predicts the verdicts ("games"); and the properties of each
  model's responses ("responses"). No text goes into a record.
"""

import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evoalign_lib import judges, tiny
from evoalign_lib.analysis import hacking, refusals, stats, tournaments
from evoalign_lib.checks import choose, require
from evoalign_lib.tasks import conciseness
from evoalign_lib.tasks import safety as task
from evoalign_lib.tiny import dialogues, scorers
from evoalign_study import safety_published as data
from evoalign_study import specs, training, weight_cache
from evoalign_study.measures import safety
from evoalign_study.records import Record, Settings, Spec, pack_bits


def _three(interval: stats.Interval, digits: int = 1) -> list[float]:
    # adding 0.0 turns -0.0 into 0.0
    return [round(float(x), digits) + 0.0 for x in (interval.value, interval.low, interval.high)]


# ---- a tournament of trained models

BASE = "base"
"""The player that is the untrained base."""
_OUTCOMES = {"a": tournaments.A_WINS, "b": tournaments.B_WINS, "tie": tournaments.TIE}


def tournament_spec(runs: Mapping[str, Sequence[Record]], settings: Settings, scale: str) -> Spec:
    """Return the spec of a tournament.

    Args:
        runs: arm -> its runs, on one base of the tiny world and one training judge, which differ in their seeds.
        settings: judge (the training judge), max_completion_length, and other settings that the task reads.
        scale: scale of the notebook.

    Raises:
        ValueError: fewer than two arms; runs that do not form a group (`weight_cache.group`) or were trained on another
            judge than the settings'; a setting that is missing; or whatever `specs.begin` refuses.
    """
    require(len(runs) > 1, f"a tournament of {', '.join(runs) or 'no arms'}: pass the runs of at least two arms.")
    arms = {arm: weight_cache.group(records) for arm, records in runs.items()}
    base, judge = next(iter(arms.values()))["run"]["base"], settings.get("judge")
    for arm, group in arms.items():
        own, wanted = (group["run"]["base"], group["run"].get("judge")), (base, judge)
        require(own == wanted, f"the runs of {arm!r} have base and judge {own}, but the tournament has {wanted}.")
    spec = specs.begin_tiny("tournament", base, scale, settings, tiny.REQUEST_BASES)
    return spec | specs.take(settings, ("max_completion_length",), "a tournament") | {"arms": arms}


def run_tournament(spec: Spec) -> Record:
    """Play the tournament, and return how each judge decides it.

    The record has `games`, their number; `sides`, player -> judge ("rule", and the training judge) -> shares of the
    replies in the quadrants of `tasks.safety`, where helpful means above 0 for the rule, and above the median reward of
    the base's replies for the training judge; and `judges`, name -> the results by that judge: `wins`, arm -> share of
    games that each run won, ties as half a win; `strengths`, arm -> Elo points above the base with their interval over
    requests; and `lead`, first arm - second, with its intervals over requests and over seeds. Strengths that are not
    finite, since a player won or lost all games, are None.

    Raises:
        ValueError: weights are not those of their record.
    """
    replies, requests = _replies(spec), safety.MEASURES.sets(spec)["test"]
    by_text = {request.text: request for request in requests}
    games = []  # seed, and the players
    for arm, other in itertools.combinations([BASE, *spec["arms"]], 2):
        games += [(seed, (arm, other)) for seed in replies[other] if arm == BASE or seed in replies[arm]]
    pairs = []
    for seed, players in games:
        texts = (replies[player][-1 if player == BASE else seed] for player in players)
        pairs += [judges.Pair(*texts) for texts in zip(by_text, *texts, strict=True)]
    told = {}
    for judge in safety.judges_of(spec):

        def score(prompts: list[str], completions: list[str], judge: str = judge) -> np.ndarray:
            return safety.scored(judge, spec["cost_weight"], [by_text[prompt] for prompt in prompts], completions)

        verdicts = judges.judge_pairs(judges.ScoreJudge(score, judge), pairs).verdicts
        outcomes = np.array([_OUTCOMES[verdict] for verdict in verdicts]).reshape(len(games), len(by_text))
        told[judge] = _told(spec, games, outcomes)
    return {"games": len(pairs), "sides": _sides(spec, replies, requests), "judges": told}


def _replies(spec: Spec) -> dict[str, dict[int, list[str]]]:
    """Return player -> seed -> greedy replies to the test requests; the base has the seed -1."""
    masters = {arm: zip(g["seeds"], weight_cache.of_group(g), strict=True) for arm, g in spec["arms"].items()}
    with training.opened(spec) as (engine, _):
        replies: dict[str, dict[int, list[str]]] = {player: {} for player in (BASE, *masters)}
        for player, runs in ((BASE, [(-1, engine.master.copy())]), *masters.items()):
            for seed, master in runs:
                engine.master[:] = master
                (row,) = engine.generate("test")
                replies[player][seed] = [text.replace(tiny.END, "") for text, _ in row]
    return replies


def _sides(spec: Spec, replies: Mapping[str, Mapping[int, list[str]]], requests: list[Any]) -> dict[str, Any]:
    """Return player -> judge -> shares of its replies in the quadrants, in their order."""
    shares: dict[str, dict[str, list[float]]] = {player: {} for player in replies}
    for judge in (safety.RULE, spec["judge"]):
        cut = 0.0 if judge == safety.RULE else float(np.median(safety.sides(judge, requests, replies[BASE][-1])[0]))
        for player, by_seed in replies.items():
            texts = [text for said in by_seed.values() for text in said]
            rewards, costs = safety.sides(judge, requests * len(by_seed), texts)
            shares[player][judge] = [round(share, 4) for share in task.quadrants(rewards, costs, cut).values()]
    return shares


def _told(spec: Spec, games: Sequence[tuple[int, tuple[str, str]]], outcomes: np.ndarray) -> dict[str, Any]:
    """Return a judge's results; outcomes, (pairs of runs, requests), are the scores of the first players."""
    n, arms = outcomes.shape[1], list(spec["arms"])
    seeds, players = np.array([seed for seed, _ in games]), np.array([players for _, players in games])

    def share(arm: str, seed: int) -> float:
        won, lost = (outcomes[(seeds == seed) & (side == arm)] for side in players.T)
        return round(float(np.mean([*won, *(1 - lost)])), 3)

    def strengths(units: list[int]) -> tournaments.Strengths:
        pairs = (np.repeat(side, n).tolist() for side in players.T)
        played = tournaments.Games.of(units, *pairs, outcomes.ravel(), [BASE, *arms])
        return tournaments.bradley_terry(played, BASE, n_resamples=500)

    wins = {arm: [share(arm, seed) for seed in group["seeds"]] for arm, group in spec["arms"].items()}
    try:
        by_request = strengths(list(range(n)) * len(games))
        by_seed = strengths(np.repeat(seeds, n).tolist())
    except ValueError:  # some player won or lost everything
        return {"wins": wins, "strengths": None, "lead": None}
    lead = {"requests": by_request, "seeds": by_seed}
    return {
        "wins": wins,
        "strengths": {arm: _three(by_request.interval(arm)) for arm in arms},
        "lead": {units: _three(strength.difference(*arms[:2])) for units, strength in lead.items()},
    }


# ---- biases of the judges

REQUESTS = 40
SENTENCES = {
    "praise": dialogues.PRAISE[0],
    "filler": dialogues.FILLER[2],
    "disclaimer": dialogues.DISCLAIMERS[0],
    "all three": f"{dialogues.PRAISE[0]} {dialogues.FILLER[2]} {dialogues.DISCLAIMERS[0]}",
}
"""Sentences that are appended to a reply."""


def tastes_spec(scale: str) -> Spec:
    """Return the spec that measures the biases of judges.

    Args:
        scale: scale of the notebook; at smoke, few replies are read.
    """
    asked = 4 if scale == "smoke" else REQUESTS
    digests = {name: safety.scorer_digest(name) for name in safety.JUDGES if name in scorers.SCORERS}
    fixed: dict[str, Any] = {"cost_weight": safety.COST_WEIGHT, "requests": asked, "sentences": SENTENCES}
    return {"kind": "tastes", "task": "safety", "scale": scale} | fixed | {"judges": digests}


def run_tastes(spec: Spec) -> Record:
    """Return `change`: judge -> sentences -> mean change in its score of a reply, in the judge's own units.

    Raises:
        ValueError: a judge is not the one in the spec.
    """
    for name, digest in spec["judges"].items():
        now = safety.scorer_digest(name)
        require(now == digest, f"judge {name!r} has digest {now}, but the spec has {digest}: make a new spec.")
    asked, rng = dialogues.requests("test")[: spec["requests"]], random.Random(0)
    plain = [dialogues.body(request, "reason" if request.harmful else "right", rng) for request in asked]

    def scores(judge: str, texts: Sequence[str]) -> NDArray[np.float64]:
        return safety.scored(judge, spec["cost_weight"], asked, texts)

    change: dict[str, dict[str, float]] = {}
    for judge in (*spec["judges"], safety.RULE):
        begun = scores(judge, plain)
        change[judge] = {
            name: round(float((scores(judge, [f"{text} {sentence}" for text in plain]) - begun).mean()), 6)
            for name, sentence in spec["sentences"].items()
        }
    return {"change": change}


# ---- the published completions of a study of conciseness

NEAREST_BASE = {"reward": -83.3, "right": 1.0}
"""Stand-in for the 7 B base, whose completions were not published: the published seed closest to it (KL 0.11 nats per
token), which answers in full sentences, all of them right."""


def published_specs(scale: str) -> list[Spec]:
    """Return specs that analyse the published completions of a 7 B model, one for each setting and training seed.

    Args:
        scale: scale of the notebook, in whose file the records are kept; they are about no model of that scale.
    """
    common = {"kind": "published", "task": "conciseness", "scale": scale}
    return [common | {"set": name, "seed": seed} for name in conciseness.COMPLETIONS for seed in range(4)]


def run_published(spec: Spec) -> Record:
    """Return the analysis of a published set of completions: reward under both measures, right answers, every detector.

    Raises:
        FileNotFoundError: the set is not in EVOALIGN_DATA, and cannot be fetched.
    """
    problems = {p.question: p for p in conciseness.load_public("eval")}
    (released,) = [one for one in conciseness.load_completions(spec["set"]) if one.seed == spec["seed"]]
    asked, texts = [problems[question] for question in released.questions], released.completions
    targets = [p.answer for p in asked]
    rewards = {m: conciseness.reward(targets, texts, targets, m) for m in conciseness.MEASURES}
    right = [conciseness.is_correct(text, p) for text, p in zip(texts, asked, strict=True)]
    of_texts = {"rewards": rewards["strict"], "right": right, "tokens": released.tokens}
    bounds = {"max_tokens": released.max_tokens, "best_reward": 0.0}
    bounds |= {"base_reward": NEAREST_BASE["reward"], "base_correct": NEAREST_BASE["right"]}
    report = hacking.hack_report(texts, prompts=released.questions, **of_texts, **bounds)
    first = dict(reversed(list(zip(released.questions, texts, strict=True))))
    return {
        "completions": len(asked),
        "reproduced": sum(map(float.__eq__, rewards["released"], released.rewards)),
        "changed": sum(map(float.__ne__, rewards["strict"], rewards["released"])),
        "reward": {name: round(float(np.mean(values)), 5) for name, values in rewards.items()},
        "recorded": round(float(np.mean(released.rewards)), 5),
        "kl_token": round(released.kl, 5),
        "right": round(float(np.mean(right)), 5),
        "right_bits": pack_bits(np.array(right, dtype=int)),
        "hacks": {name: round(share, 5) for name, share in report.shares.items() if share},
        "degenerate": round(float(report.degenerate.mean()), 5),
        "verdict": report.verdict,
        "all_empty": report.all_empty,
        "shown": [first[p.question][:60] for p in problems.values()],
    }


# ---- the published judgments of a study of safety

ORDERS = 1_000
"""Number of random orders of the games, for the spread of sequential Elo."""
RESAMPLES = 2_000
"""Number of resamples of the prompts, for every interval."""
LEADER = "ES-500"
"""The model that the published ratings rank first."""
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Quantiles of the base's rewards that serve as cuts between helpful and unhelpful, besides the published cut at 0."""

# headings of the training text that models go on to write, besides turns
_HEADING = re.compile(r"(?:BEGINNING|END) OF CONVERSATION")
_ADDRESS = re.compile(r"https?://|\bwww\.")
_PREDICTORS: dict[str, Callable[[data.Points, int], float]] = {
    "reward": lambda points, i: points.rewards[i],
    "-cost": lambda points, i: -points.costs[i],
    "length": lambda points, i: len(points.responses[i]),
    "reward - cost": lambda points, i: points.rewards[i] - points.costs[i],
}
"""Quantities of a response that might predict the verdict; higher is better."""


def judgments_specs(scale: str) -> list[Spec]:
    """Return specs that analyse the published judgments: ratings, games, and each model's responses.

    Args:
        scale: scale of the notebook, in whose file the records are kept; they are about no model of that scale. At
            smoke, few resamples and orders are drawn, and only the first responses are read.
    """
    resamples, orders = (20, 20) if scale == "smoke" else (RESAMPLES, ORDERS)
    common = {"kind": "judgments", "task": "safety_published", "scale": scale, "resamples": resamples, "seed": 0}
    parts = [common | {"part": "elo", "orders": orders}, common | {"part": "games"}]
    asked = {"part": "responses"} | ({"first": 200} if scale == "smoke" else {})
    return parts + [common | asked | {"model": model} for model in data.MODELS]


def run_judgments(spec: Spec) -> Record:
    """Return the analysis of one part of the published data.

    Raises:
        ValueError: an unknown part.
        PermissionError: the data are not in EVOALIGN_DATA, and their licence has not been accepted.
        FileNotFoundError: the data cannot be fetched.
    """
    parts = {"elo": _elo, "games": _games, "responses": _responses}
    choose("part", spec["part"], parts)
    return parts[spec["part"]](spec)


def _elo(spec: Spec) -> Record:
    published, judgments = data.load_elo(), data.load_judgments()
    record: Record = {"dimensions": {}}
    for dimension in data.DIMENSIONS:
        own = [j for j in judgments if j.dimension == dimension]
        # the published ratings count a judgment without scores as a tie
        games = _as_games(own, missing=tournaments.TIE)
        again = tournaments.elo(games.take(data.elo_order(len(own))), data.BASE)
        ratings = tournaments.elo_orders(games, data.BASE, n_orders=spec["orders"], seed=spec["seed"])
        least, most = ratings.min(0), ratings.max(0)
        spread = {"mean": ratings.mean(0), "std": ratings.std(0, ddof=1), "least": least, "most": most}
        models = {}
        for i, model in enumerate(games.players):
            elo = {"published": round(published[dimension][model], 4), "reproduced": round(again[model], 4)}
            elo |= {name: round(float(values[i]), 1) for name, values in spread.items()}
            models[model] = elo | {"first": round(float((ratings.argmax(1) == i).mean()), 4)}
        record["dimensions"][dimension] = {"games": len(own), "models": models}
    return record


def _games(spec: Spec) -> Record:
    judgments = data.load_judgments()
    points = {model: data.load_points(model) for model in data.JUDGED}
    # if a prompt occurs several times, the study judged the last response
    rows = {model: {prompt: i for i, prompt in enumerate(p.prompts)} for model, p in points.items()}

    def both(scored: Sequence[data.Judgment], value: Callable[[data.Points, int], float]) -> NDArray[np.float64]:
        """Return the values of the two responses of each game, (2, games)."""
        return np.array([[value(points[m], rows[m][j.question]) for m in (j.a, j.b)] for j in scored], float).T

    by_dimension = {name: [j for j in judgments if j.dimension == name] for name in data.DIMENSIONS}
    dimensions = {name: _dimension(spec, own, both) for name, own in by_dimension.items()}
    return {"prompts": len({j.question for j in judgments}), "dimensions": dimensions}


def _dimension(spec: Spec, own: Sequence[data.Judgment], both: Callable[..., NDArray[np.float64]]) -> dict[str, Any]:
    scored = [j for j in own if j.scores is not None]
    predictors = {name: np.subtract(*both(scored, value)) for name, value in _PREDICTORS.items()}
    lengths = tournaments.length_difference(*both(scored, _PREDICTORS["length"]))
    games, how = _as_games(scored), {"n_resamples": spec["resamples"], "seed": spec["seed"]}
    plain = tournaments.bradley_terry(games, data.BASE, **how)
    equal = tournaments.adjusted(games, data.BASE, {"length": lengths})
    as_ties = tournaments.bradley_terry(_as_games(own, missing=tournaments.TIE), data.BASE, n_resamples=0)
    players, others = games.players, [model for model in games.players if model != LEADER]
    held = np.array([data.BASE not in (j.a, j.b) for j in scored])
    counts = Counter(score for j in scored for score in j.scores)

    def agreement(values: NDArray[np.float64]) -> dict[str, list[float]]:
        pairs = {"all": (games, values), "without the base": (games.take(held), values[held])}
        return {name: _three(tournaments.agreement(*pair, **how), 4) for name, pair in pairs.items()}

    return {
        "games": len(own),
        "unparsed": len(own) - len(scored),
        "ties": int((~games.decided).sum()),
        "won_by_slot": {"A": int((games.outcome == 1).sum()), "B": int((games.outcome == 0).sum())},
        "strength": {model: _three(plain.interval(model)) for model in players},
        "lead": {model: _three(plain.difference(LEADER, model)) for model in others},
        "first": {model: round(share, 4) for model, share in plain.first().items()},
        "undefined": plain.undefined,
        "unparsed_as_ties": {m: round(float(v), 1) for m, v in zip(players, as_ties.values, strict=True)},
        "equal_length": {model: _three(equal.interval(model)) for model in players},
        "equal_length_lead": {model: _three(equal.difference(LEADER, model)) for model in others},
        "longer": {m: _longer(games, lengths, m) for m in others},
        # an answer twice as long has a covariate of 1/3
        "twice_as_long": [round(x / 3, 1) for x in _three(equal.interval("length"), 4)],
        "win_rate": {model: _three(rate, 4) for model, rate in tournaments.win_rates(games, **how).items()},
        "head_to_head": {m: _three(tournaments.head_to_head(games, LEADER, m, **how), 4) for m in others},
        "slot_a": _three(tournaments.position_effect(games, **how), 4),
        "agreement": {name: agreement(values) for name, values in predictors.items()},
        "scores": {f"{score:g}": counts[score] for score in sorted(counts)},
    }


def _longer(games: tournaments.Games, lengths: NDArray[np.float64], other: str) -> float:
    """Return the share of the leader's games with another model in which the leader's answer is longer."""
    i, j = (games.players.index(model) for model in (LEADER, other))
    own = [*(lengths[(games.a == i) & (games.b == j)] > 0), *(lengths[(games.a == j) & (games.b == i)] < 0)]
    return round(float(np.mean(own)), 4)


def _as_games(judgments: Sequence[data.Judgment], missing: float | None = None) -> tournaments.Games:
    """Return judgments as games; `missing` is the outcome of those without scores."""
    outcomes = [missing if j.scores is None else j.outcome() for j in judgments]
    names = ([getattr(j, slot) for j in judgments] for slot in ("a", "b"))
    return tournaments.Games.of([j.question for j in judgments], *names, outcomes, data.JUDGED)


def _responses(spec: Spec) -> Record:
    own, base = (data.load_points(model).first(spec.get("first")) for model in (spec["model"], data.BASE))
    rewards, costs, texts = np.array(own.rewards), np.array(own.costs), own.responses
    lengths, safe = np.array([len(text) for text in texts]), costs <= 0
    kinds = np.array([refusals.kind(text) for text in texts])
    turns = np.array([hacking.further_turn(text) for text in texts])
    _, first, prompt = np.unique(own.prompts, return_index=True, return_inverse=True)
    # one response per prompt: otherwise a prompt that occurs 52 times would look like a template
    once = [texts[i] for i in np.sort(first)]
    cuts = {"0": 0.0} | {f"{100 * q:g} % of the base": float(np.quantile(base.rewards, q)) for q in QUANTILES}
    labels = {
        name: [f"{'S' if s else 'U'}{'H' if r > cut else 'U'}" for s, r in zip(safe, rewards, strict=True)]
        for name, cut in cuts.items()
    }

    def quadrants(name: str) -> dict[str, Any]:
        shares = {label: round(labels[name].count(label) / len(texts), 5) for label in data.LABELS}
        return {"cut": round(cuts[name], 5), "shares": shares}

    def per_prompt(values: ArrayLike) -> list[float]:
        """Return the mean, over distinct prompts, of the means over their rows, and its interval over prompts."""
        each = np.bincount(prompt, np.asarray(values, np.float64)) / np.bincount(prompt)
        return _three(stats.crossed_bootstrap(each[None], n_resamples=spec["resamples"], seed=spec["seed"]), 5)

    def mean(values: ArrayLike, digits: int = 5) -> float:
        return round(float(np.mean(values)), digits)

    by_kind, columns = {}, {"reward": rewards, "cost": costs, "characters": lengths}
    for kind in refusals.KINDS:
        by_kind[kind] = {"share": mean(kinds == kind)}
        if (kinds == kind).any():
            by_kind[kind] |= {name: mean(column[kinds == kind], 3) for name, column in columns.items()}
    units = {"safe": safe, "reward": rewards, "cost": costs, "reward - cost": rewards - costs}
    units |= {"refuses": ~np.isin(kinds, ("complies", "empty/other turn")), "further_turn": turns}
    return {
        "responses": len(texts),
        "prompts": len(once),
        "labels_reproduced": sum(a == b for a, b in zip(own.labels, labels["0"], strict=True)),
        "reward": _spread(rewards),
        "cost": _spread(costs),
        "characters": mean(lengths, 1),
        "answer_characters": mean([len(refusals.answer(text)) for text in texts], 1),
        "reward_with_length": round(float(np.corrcoef(rewards, lengths)[0, 1]), 4),
        "safe": mean(safe),
        "per_prompt": {name: per_prompt(values) for name, values in units.items()},
        "quadrants": {name: quadrants(name) for name in cuts},
        "template": round(hacking.template_share(once), 5),
        "opening": round(refusals.opening_share(once), 5),
        "further_turn": mean(turns),
        "heading": mean([bool(_HEADING.search(text)) for text in texts]),
        "web_address": mean([bool(_ADDRESS.search(text)) for text in texts]),
        "kinds": by_kind,
    }


def _spread(values: NDArray[np.float64]) -> dict[str, float]:
    q25, median, q75 = np.quantile(values, (0.25, 0.5, 0.75))
    told = {"mean": values.mean(), "std": values.std(), "q25": q25, "median": median, "q75": q75}
    return {name: round(float(value), 5) for name, value in told.items()}
