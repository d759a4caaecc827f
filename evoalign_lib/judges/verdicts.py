"""Judge pairs in both orders, or single texts, and count what is no verdict."""

import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evoalign_lib.checks import whole_number
from evoalign_lib.judges.answers import Answer
from evoalign_lib.judges.cache import Cache, key_of
from evoalign_lib.judges.endpoint import EndpointError
from evoalign_lib.judges.rubrics import Reading, Rubric
from evoalign_lib.judges.texts import quote

# ------------------------------------------------------------------------------------------------------ what is judged


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt.

    Attributes:
        prompt: what both answer.
        a: an answer.
        b: the other one.
    """

    prompt: str
    a: str
    b: str

    def __post_init__(self) -> None:
        _check_texts(self.prompt, self.a, self.b)


def _check_texts(*texts: Any) -> None:
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"prompts and answers must be texts, got {text!r:.200}.")


# --------------------------------------------------------------------------------------------------- what is said of it


@dataclass(frozen=True)
class Order:
    """What a chat judge said of a pair in one of the two orders.

    Attributes:
        first: the text that it saw first, "a" or "b".
        raw: its answer as it came; None after a failure.
        winner: "a", "b" or "tie"; None where there is no verdict.
        strength: 0 for a tie, 1 for a win, 2 for a strong one.
        scores: of a and of b, if it gives scores.
        error: why there is no answer (`answers.ERRORS`); None where there is one.
    """

    first: str
    raw: str | None
    winner: str | None
    strength: int = 0
    scores: tuple[float, float] | None = None
    error: str | None = None


@dataclass(frozen=True)
class Judgement:
    """The verdict on a pair.

    Attributes:
        verdict: "a", "b" or "tie"; None where an order has no verdict.
        inconsistent: the orders disagree, and the verdict is a tie.
        unparsed: there are answers, but not in both of them a verdict.
        failed: why an answer is missing; None where none is.
        scores: of a and b, the mean over the orders; None where there are none.
        orders: a first, then b first; empty for a judge that scores texts alone.
    """

    verdict: str | None
    inconsistent: bool = False
    unparsed: bool = False
    failed: str | None = None
    scores: tuple[float, float] | None = None
    orders: tuple[Order, ...] = ()


@dataclass(frozen=True)
class Spent:
    """What judging took, and which texts a judge did not see as they were.

    Attributes:
        questions: put to a chat judge, equal ones counted once.
        cached: of these, answered by the cache.
        prompt_tokens: of this time's answers, as far as the backend says.
        completion_tokens: of this time's answers, as far as the backend says.
        errors: questions left without an answer after all retries, by kind.
        broken: texts in which marks were broken.
        replaced: texts in which characters were replaced.
        cut: texts that were cut.
    """

    questions: int = 0
    cached: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    broken: int = 0
    replaced: int = 0
    cut: int = 0


@dataclass(frozen=True)
class Judged:
    """The verdicts of one judge on pairs.

    Attributes:
        judge: its name.
        judgements: one per pair, in their order.
        spent: on them.
    """

    judge: str
    judgements: list[Judgement]
    spent: Spent

    @property
    def verdicts(self) -> list[str | None]:
        """One per pair; None where there is none: such pairs are to be left out, and counted."""
        return [judgement.verdict for judgement in self.judgements]

    @property
    def counts(self) -> dict[str, int]:
        """Pairs by outcome: "a", "b", "tie" (with the inconsistent ones), "unparsed", "failed"; they add up."""
        outcomes = ["failed" if j.failed else "unparsed" if j.unparsed else j.verdict for j in self.judgements]
        return {name: outcomes.count(name) for name in ("a", "b", "tie", "unparsed", "failed")}

    @property
    def inconsistent(self) -> int:
        """Pairs whose orders disagree."""
        return sum(judgement.inconsistent for judgement in self.judgements)

    @property
    def first_share(self) -> float:
        """Share of wins of the text that stood first, over both orders of pairs with two verdicts.

        A judge without preference has 0.5, whichever texts are better; NaN where there is no win.
        """
        both = [order for judgement in self.judgements if judgement.verdict for order in judgement.orders]
        wins = [order.winner == order.first for order in both if order.winner != "tie"]
        return sum(wins) / len(wins) if wins else math.nan


@dataclass(frozen=True)
class JudgedTexts:
    """The scores of one judge for single texts.

    Attributes:
        judge: its name.
        scores: (texts,) float64; NaN where there is none.
        errors: (texts,) why there is no answer; None where there is one.
        spent: on them.
        raw: (texts,) the answers as they came; empty for a judge that scores texts alone.
    """

    judge: str
    scores: np.ndarray
    errors: list[str | None]
    spent: Spent
    raw: tuple[str | None, ...] = ()

    @property
    def failed(self) -> int:
        """Texts without an answer."""
        return sum(error is not None for error in self.errors)

    @property
    def unparsed(self) -> int:
        """Texts whose answer holds no score."""
        return int(np.isnan(self.scores).sum()) - self.failed


# -------------------------------------------------------------------------------------------------------------- judges


class ScoreJudge:
    """A judge that scores each text alone: a reward model, a rule.

    It needs no orders, and nothing of it is cached: its scores are computed again.

    Args:
        score: (prompts, completions) -> one number each; a NaN or infinity counts as a failure.
        name: goes into records.
        margin: greatest difference of two scores that is a tie.
    """

    def __init__(self, score: Callable[[list[str], list[str]], Any], name: str, margin: float = 0.0):
        if not 0 <= margin < math.inf:
            raise ValueError(f"margin={margin} must be 0 or greater.")
        self.score, self.name, self.margin = score, name, float(margin)

    def scores(self, texts: Sequence[tuple[str, str]]) -> dict[tuple[str, str], float]:
        """Return the score of each different (prompt, completion), computed once."""
        if not (different := list(dict.fromkeys(texts))):
            return {}
        scores = np.asarray(self.score(*map(list, zip(*different, strict=True))), float)
        if scores.shape != (len(different),):
            raise ValueError(
                f"judge {self.name!r} returned scores of shape {scores.shape} for {len(different)} texts: one each."
            )
        return dict(zip(different, scores.tolist(), strict=True))


class ChatJudge:
    """A language model that judges by a rubric.

    Args:
        backend: `Endpoint`, `LocalChat` or `VLLMChat`.
        rubric: for pairs or for single texts.
        max_characters: of a prompt or a completion that the judge sees; what is longer is cut, said so and counted.
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
    """Judge pairs, by a chat judge in both orders.

    Args:
        judge: one for pairs.
        pairs: equal ones are asked once.
        cache: of a chat judge's answers, or its path; None: answers are kept for this call alone.

    Raises:
        ValueError: a rubric for single texts.
        EndpointError: every further request would fail. What was answered is in the cache: call again.
        CacheError: the cache is damaged.
    """
    if isinstance(judge, ScoreJudge):
        scores = judge.scores([(pair.prompt, text) for pair in pairs for text in (pair.a, pair.b)])
        return Judged(judge.name, [_compared(pair, scores, judge.margin) for pair in pairs], Spent())
    shown = [(pair.prompt, *texts) for pair in pairs for texts in ((pair.a, pair.b), (pair.b, pair.a))]
    answers, spent = _ask(judge, shown, cache, pairwise=True)
    both = zip(answers[::2], answers[1::2], strict=True)
    return Judged(judge.name, [_judgement(judge.rubric, *orders) for orders in both], spent)


def judge_texts(
    judge: ScoreJudge | ChatJudge,
    texts: Sequence[tuple[str, str]],
    cache: Cache | str | os.PathLike[str] | None = None,
) -> JudgedTexts:
    """Score single texts.

    Args:
        judge: one for single texts.
        texts: (prompt, completion) each; equal ones are asked once.
        cache: as for `judge_pairs`.

    Raises:
        ValueError: a rubric for pairs.
        TypeError: a prompt or a completion that is no text.
        EndpointError, CacheError: as for `judge_pairs`.
    """
    texts = [(prompt, completion) for prompt, completion in texts]
    _check_texts(*itertools.chain.from_iterable(texts))
    if isinstance(judge, ScoreJudge):
        by_text = judge.scores(texts)
        scores = np.array([by_text[text] for text in texts], float)
        finite = np.isfinite(scores)
        errors = [None if good else "not finite" for good in finite]
        return JudgedTexts(judge.name, np.where(finite, scores, math.nan), errors, Spent())
    answers, spent = _ask(judge, texts, cache, pairwise=False)
    scores = np.array([_read(judge.rubric, answer) for answer in answers], float)  # of None: NaN
    errors = [answer.error for answer in answers]
    return JudgedTexts(judge.name, scores, errors, spent, tuple(answer.text for answer in answers))


# ------------------------------------------------------------------------------------------------------------- verdicts


def _compared(pair: Pair, scores: dict[tuple[str, str], float], margin: float) -> Judgement:
    a, b = (scores[pair.prompt, text] for text in (pair.a, pair.b))
    if not (math.isfinite(a) and math.isfinite(b)):
        return Judgement(None, failed="not finite")
    return Judgement("tie" if abs(a - b) <= margin else "a" if a > b else "b", scores=(a, b))


def _read(rubric: Rubric, answer: Answer) -> Reading | float | None:
    """Return what an answer says; None where it says nothing, or was cut: its last words are not its last."""
    return None if answer.text is None or answer.cut else rubric.read(answer.text)


def _order(rubric: Rubric, answer: Answer, first: str, second: str) -> Order:
    reading = _read(rubric, answer)
    if reading is None:
        return Order(first, answer.text, None, error=answer.error)
    winner = {"first": first, "second": second, "tie": "tie"}[reading.winner]
    scores = reading.scores if reading.scores is None or first == "a" else reading.scores[::-1]
    return Order(first, answer.text, winner, reading.strength, scores)


def _judgement(rubric: Rubric, a_first: Answer, b_first: Answer) -> Judgement:
    """Return the verdict on a pair."""
    orders = (_order(rubric, a_first, "a", "b"), _order(rubric, b_first, "b", "a"))
    winners = {order.winner for order in orders}
    failed = orders[0].error or orders[1].error
    if failed or None in winners:
        return Judgement(None, unparsed=not failed, failed=failed, orders=orders)
    agree = len(winners) == 1
    scores = [order.scores for order in orders if order.scores]
    return Judgement(
        orders[0].winner if agree else "tie",
        inconsistent=not agree,
        scores=tuple((one + other) / 2 for one, other in zip(*scores, strict=True)) if scores else None,
        orders=orders,
    )


# ------------------------------------------------------------------------------------------------------------ questions


def _ask(
    judge: ChatJudge, shown: Sequence[tuple[str, ...]], cache: Cache | str | os.PathLike[str] | None, *, pairwise: bool
) -> tuple[list[Answer], Spent]:
    """Return an answer to each question, from the cache where it has one, and what that took.

    shown: the prompt of a question and the texts to be judged, in their order.
    """
    if judge.rubric.pairwise != pairwise:
        what, call = ("pairs", "judge_pairs") if judge.rubric.pairwise else ("single texts", "judge_texts")
        raise ValueError(f"rubric {judge.rubric.name!r} is for {what}: call {call}, or take another one.")
    backend = judge.backend
    cache = cache if isinstance(cache, Cache) else Cache(cache)
    cache.refresh()
    different = dict.fromkeys(itertools.chain.from_iterable(shown))
    quoted = {text: quote(text, judge.max_characters, backend.special_tokens) for text in different}
    questions = [judge.rubric.messages(quoted[prompt], tuple(quoted[t] for t in texts)) for prompt, *texts in shown]
    keys = [key_of(backend.identity(), messages) for messages in questions]
    by_key = dict(zip(keys, questions, strict=True))
    waiting = [key for key in by_key if cache.get(key) is None]
    try:
        answers = backend.answers([by_key[key] for key in waiting], lambda i, answer: cache.put(waiting[i], answer))
    except EndpointError as error:
        left = sum(cache.get(key) is None for key in waiting)
        kept = f"in {cache.path}" if cache.path else "of this process alone: give a path to keep answers"
        raise EndpointError(
            f"{error} {left} of {len(by_key)} questions are left; the others' answers are in the cache {kept}."
        ) from None
    failed = {key: answer for key, answer in zip(waiting, answers, strict=True) if answer.error}
    spent = Spent(
        questions=len(by_key),
        cached=len(by_key) - len(waiting),
        prompt_tokens=sum(answer.prompt_tokens or 0 for answer in answers),
        completion_tokens=sum(answer.completion_tokens or 0 for answer in answers),
        errors=dict(sorted(Counter(answer.error for answer in failed.values()).items())),
        **{name: sum(getattr(q, name) > 0 for q in quoted.values()) for name in ("broken", "replaced", "cut")},
    )
    return [failed.get(key) or cache.get(key) for key in keys], spent
