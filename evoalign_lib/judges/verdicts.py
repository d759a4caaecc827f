"""Judge pairs in both orders, and count answers without a verdict."""

import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evoalign_lib.checks import require, whole_number
from evoalign_lib.judges.answers import Answer
from evoalign_lib.judges.cache import Cache, key_of
from evoalign_lib.judges.endpoint import EndpointError
from evoalign_lib.judges.rubrics import Rubric
from evoalign_lib.judges.texts import quote

# -------------------------------------------------------------------------------------------------------------- inputs


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt.

    Attributes:
        prompt: the prompt of both answers.
        a: one answer.
        b: the other answer.
    """

    prompt: str
    a: str
    b: str

    def __post_init__(self) -> None:
        for text in (self.prompt, self.a, self.b):
            if not isinstance(text, str):
                raise TypeError(f"prompts and answers must be strings, got {text!r:.200}.")


# ------------------------------------------------------------------------------------------------------------- results


@dataclass(frozen=True)
class Order:
    """A chat judge's answer on a pair in one of the two orders.

    Attributes:
        first: the text that it saw first, "a" or "b".
        raw: its answer, unprocessed; None after a failure.
        winner: "a", "b" or "tie"; None if there is no verdict.
        scores: of a and of b; None if there is no verdict.
        error: why there is no answer (`answers.ERRORS`); None if there is one.
    """

    first: str
    raw: str | None
    winner: str | None
    scores: tuple[float, float] | None = None
    error: str | None = None


@dataclass(frozen=True)
class Judgement:
    """The verdict on a pair.

    Attributes:
        verdict: "a", "b" or "tie"; None if an order has no verdict.
        inconsistent: whether the orders disagree, which makes the verdict a tie.
        unparsed: whether both answers are there, but at least one has no verdict.
        failed: why an answer is missing; None if none is.
        scores: of a and b, averaged over the orders; None if there are none.
        orders: a first, then b first; empty for a judge that scores each text alone.
    """

    verdict: str | None
    inconsistent: bool = False
    unparsed: bool = False
    failed: str | None = None
    scores: tuple[float, float] | None = None
    orders: tuple[Order, ...] = ()


@dataclass(frozen=True)
class Spent:
    """The cost of judging.

    Attributes:
        questions: number of different questions to a chat judge.
        cached: how many of them the cache answered.
        prompt_tokens: of the answers that were not cached, as far as the backend reports them.
        completion_tokens: of the answers that were not cached, as far as the backend reports them.
        errors: number of questions without an answer after all retries, by kind of error.
    """

    questions: int = 0
    cached: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    errors: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Judged:
    """The verdicts of one judge on pairs.

    Attributes:
        judge: its name.
        judgements: one per pair, in their order.
        spent: the cost of judging.
    """

    judge: str
    judgements: list[Judgement]
    spent: Spent

    @property
    def verdicts(self) -> list[str | None]:
        """Verdict on each pair; None if there is none: leave such pairs out, and count them."""
        return [judgement.verdict for judgement in self.judgements]

    @property
    def counts(self) -> dict[str, int]:
        """Number of pairs by outcome: "a", "b", "tie" (inconsistent ones included), "unparsed" and "failed"."""
        outcomes = ["failed" if j.failed else "unparsed" if j.unparsed else j.verdict for j in self.judgements]
        return {name: outcomes.count(name) for name in ("a", "b", "tie", "unparsed", "failed")}

    @property
    def inconsistent(self) -> int:
        """Number of pairs whose orders disagree."""
        return sum(judgement.inconsistent for judgement in self.judgements)

    @property
    def first_share(self) -> float:
        """Share of wins that went to the text shown first, over both orders of pairs with two verdicts.

        For a judge without position bias it is 0.5, whichever texts are better; NaN if there are no wins.
        """
        both = [order for judgement in self.judgements if judgement.verdict for order in judgement.orders]
        wins = [order.winner == order.first for order in both if order.winner != "tie"]
        return sum(wins) / len(wins) if wins else math.nan


# -------------------------------------------------------------------------------------------------------------- judges


class ScoreJudge:
    """A judge that scores each text alone, such as a reward model or a rule.

    The order of a pair does not matter to it, and its scores are not cached but computed again.

    Args:
        score: (prompts, completions) -> one number per completion; NaN or infinity counts as a failure.
        name: name in records.
        margin: greatest difference between two scores that still counts as a tie.
    """

    def __init__(self, score: Callable[[list[str], list[str]], Any], name: str, margin: float = 0.0):
        require(0 <= margin < math.inf, f"margin={margin} must be 0 or greater.")
        self.score, self.name, self.margin = score, name, float(margin)

    def scores(self, texts: Sequence[tuple[str, str]]) -> dict[tuple[str, str], float]:
        """Return the score of each distinct (prompt, completion), computed once."""
        if not (different := list(dict.fromkeys(texts))):
            return {}
        scores = np.asarray(self.score(*map(list, zip(*different, strict=True))), float)
        what = f"judge {self.name!r} returned shape {scores.shape} for {len(different)} texts"
        require(scores.shape == (len(different),), f"{what}: return a score each.")
        return dict(zip(different, scores.tolist(), strict=True))


class ChatJudge:
    """A language model that judges by a rubric.

    Args:
        backend: an `Endpoint`, or another backend (`answers`).
        rubric: by which it compares.
        max_characters: most characters of a prompt or completion that the judge sees; longer ones are cut, with a note
            to the judge.
    """

    def __init__(self, backend: Any, rubric: Rubric, max_characters: int = 20_000):
        self.backend, self.rubric = backend, rubric
        self.max_characters = whole_number("max_characters", max_characters)
        self.name = f"{rubric.name}: {backend.model}"


def judge_pairs(
    judge: ScoreJudge | ChatJudge,
    pairs: Sequence[Pair],
    cache: Cache | str | os.PathLike[str] | None = None,
) -> Judged:
    """Judge pairs; a chat judge sees each pair in both orders.

    Args:
        judge: a score judge or a chat judge.
        pairs: the pairs; equal pairs are judged once.
        cache: a cache of a chat judge's answers, or its path; None: answers are kept for this call only.

    Raises:
        EndpointError: every further request would fail. Answers received so far are in the cache: call again.
        CacheError: the cache is damaged.
    """
    if isinstance(judge, ScoreJudge):
        scores = judge.scores([(pair.prompt, text) for pair in pairs for text in (pair.a, pair.b)])
        return Judged(judge.name, [_compared(pair, scores, judge.margin) for pair in pairs], Spent())
    shown = [(pair.prompt, *texts) for pair in pairs for texts in ((pair.a, pair.b), (pair.b, pair.a))]
    answers, spent = _ask(judge, shown, cache)
    both = zip(answers[::2], answers[1::2], strict=True)
    return Judged(judge.name, [_judgement(judge.rubric, *orders) for orders in both], spent)


# ------------------------------------------------------------------------------------------------------------- verdicts


def _compared(pair: Pair, scores: dict[tuple[str, str], float], margin: float) -> Judgement:
    a, b = (scores[pair.prompt, text] for text in (pair.a, pair.b))
    if not (math.isfinite(a) and math.isfinite(b)):
        return Judgement(None, failed="not finite")
    return Judgement("tie" if abs(a - b) <= margin else "a" if a > b else "b", scores=(a, b))


def _order(rubric: Rubric, answer: Answer, first: str, second: str) -> Order:
    # an answer that was cut has lost its last words
    reading = None if answer.text is None or answer.cut else rubric.read(answer.text)
    if reading is None:
        return Order(first, answer.text, None, error=answer.error)
    winner = {"first": first, "second": second, "tie": "tie"}[reading.winner]
    scores = reading.scores if first == "a" else reading.scores[::-1]
    return Order(first, answer.text, winner, scores)


def _judgement(rubric: Rubric, a_first: Answer, b_first: Answer) -> Judgement:
    """Return the verdict on a pair."""
    orders = (_order(rubric, a_first, "a", "b"), _order(rubric, b_first, "b", "a"))
    winners = {order.winner for order in orders}
    failed = orders[0].error or orders[1].error
    if failed or None in winners:
        return Judgement(None, unparsed=not failed, failed=failed, orders=orders)
    agree = len(winners) == 1
    return Judgement(
        orders[0].winner if agree else "tie",
        inconsistent=not agree,
        scores=tuple((one + other) / 2 for one, other in zip(*(order.scores for order in orders), strict=True)),
        orders=orders,
    )


# ------------------------------------------------------------------------------------------------------------ questions


def _ask(
    judge: ChatJudge, shown: Sequence[tuple[str, str, str]], cache: Cache | str | os.PathLike[str] | None
) -> tuple[list[Answer], Spent]:
    """Return an answer to each question, from the cache if it has one, and the cost.

    shown: for each question, the prompt and the texts to judge, in their order.
    """
    backend = judge.backend
    cache = cache if isinstance(cache, Cache) else Cache(cache)
    cache.refresh()
    different = dict.fromkeys(itertools.chain.from_iterable(shown))
    quoted = {text: quote(text, judge.max_characters) for text in different}
    questions = [judge.rubric.messages(quoted[prompt], (quoted[one], quoted[other])) for prompt, one, other in shown]
    keys = [key_of(backend.identity(), messages) for messages in questions]
    by_key = dict(zip(keys, questions, strict=True))
    waiting = [key for key in by_key if cache.get(key) is None]
    try:
        answers = backend.answers([by_key[key] for key in waiting], lambda i, answer: cache.put(waiting[i], answer))
    except EndpointError as error:
        left = sum(cache.get(key) is None for key in waiting)
        kept = f"in {cache.path}" if cache.path else "of this process only: pass a path to keep answers"
        told = f"{error} {left} of {len(by_key)} questions are left; the other answers are in the cache {kept}."
        raise EndpointError(told) from None
    failed = {key: answer for key, answer in zip(waiting, answers, strict=True) if answer.error}
    spent = Spent(
        questions=len(by_key),
        cached=len(by_key) - len(waiting),
        prompt_tokens=sum(answer.prompt_tokens or 0 for answer in answers),
        completion_tokens=sum(answer.completion_tokens or 0 for answer in answers),
        errors=dict(sorted(Counter(answer.error for answer in failed.values()).items())),
    )
    return [failed.get(key) or cache.get(key) for key in keys], spent
