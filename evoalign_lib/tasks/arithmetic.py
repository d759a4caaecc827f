"""Arithmetic for small instruct models: products of two numbers (dense), sums and differences (sparse).

A dense task is one where a fair share of samples is right before training, so that most groups of samples are mixed;
on a sparse one, most are not. A problem is an unordered pair of operands. The pairs of an operation are shuffled once,
by a fixed seed, and divided into disjoint splits; each pair is asked in one order, drawn with it, everywhere.

Prompts are messages, for the model's chat template. Models write their answers freely ("7 x 8 = 56", "The answer is
1,240."), so the last number of a completion counts, however it is written, whatever words follow. Reciting many numbers
gains nothing, since the others do not count.
"""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import combinations_with_replacement, product
from typing import Any, NamedTuple

import numpy as np

from evoalign_lib.checks import choose, require
from evoalign_lib.rewards import DataError
from evoalign_lib.tasks import check_lengths, completion_text

REWARD_FLOOR = 0.0
MAX_COMPLETION_LENGTH = 24
"""Maximum number of new tokens: with 14, some answers are cut off."""
OPERATIONS = ("*", "+", "-")
SPLITS = {"train": 256, "validation": 100}
"""Split -> its number of pairs; all others are "test"."""


class Problem(NamedTuple):
    """Two operands and the operation on them: "*", "+" or "-"."""

    left: int
    operation: str
    right: int

    @property
    def answer(self) -> int:
        """The right answer."""
        a, b = self.left, self.right
        return a * b if self.operation == "*" else a + b if self.operation == "+" else a - b


def _pairs(operation: str) -> set[tuple[int, int]]:
    """Return the unordered pairs of operands: * of 2-19 by 2-49, + of 2-49 by 2-49, - of two different 10-99."""
    if operation == "*":
        return {tuple(sorted(pair)) for pair in product(range(2, 20), range(2, 50))}
    if operation == "+":
        return set(combinations_with_replacement(range(2, 50), 2))
    return {(a, b) for a, b in product(range(10, 100), repeat=2) if a < b}


@lru_cache(maxsize=9)
def problems(split: str, operation: str = "*") -> tuple[Problem, ...]:
    """Return the problems of a split, always in the same order.

    Args:
        split: "train", "validation" or "test".
        operation: one of `OPERATIONS`; there are 711 pairs for "*", 1,176 for "+" and 4,005 for "-".

    Raises:
        ValueError: an unknown split or operation.
    """
    choose("split", split, (*SPLITS, "test"))
    choose("operation", operation, OPERATIONS)
    rng = np.random.default_rng(np.random.SeedSequence([2026, OPERATIONS.index(operation)]))
    pairs = sorted(_pairs(operation))
    order, turned = rng.permutation(len(pairs)), rng.integers(2, size=len(pairs))
    asked = [pairs[i][::-1] if turned[i] or operation == "-" else pairs[i] for i in order]  # no negative differences
    made = [Problem(left, operation, right) for left, right in asked]
    first = SPLITS["train"]
    last = first + SPLITS["validation"]
    return tuple({"train": made[:first], "validation": made[first:last], "test": made[last:]}[split])


def prompt(problem: Problem) -> list[dict[str, str]]:
    """Return a problem as messages."""
    asked = f"What is {problem.left} {problem.operation} {problem.right}? Answer with the number only."
    return [{"role": "user", "content": asked}]


def dataset(asked: Iterable[Problem], tokenizer: Any = None, chat_template: bool = True) -> list[dict[str, Any]]:
    """Return rows for a trainer: prompt and the column `answer` that `reward` takes.

    Args:
        asked: the problems.
        tokenizer: not needed, since prompts are messages, which the trainers render.
        chat_template: must be True.

    Raises:
        ValueError: chat_template is False; these are questions to instruct models.
    """
    require(chat_template, "chat_template=False: these are questions to instruct models. Leave it out.")
    return [{"prompt": prompt(problem), "answer": problem.answer} for problem in asked]


# the empty whole part is that of ".84"; after "..." a number is whole
_NUMBER = re.compile(r"(?<!\w)([-\u2212]?)(\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?<!\.)(?=\.\d))(\.\d+)?", re.ASCII)


def answer(completion: str) -> float | None:
    """Return the last number in a completion; None if there is none.

    Thousands may be separated by commas. A minus sign counts if it stands right before the number, and not right after
    a digit or a letter. Where a completion goes on to restate the problem, the last number is not its answer.

    >>> [answer(text) for text in ("The answer is 1,240.", "3 x 4 = 12.0", "**56**", "7 - 8", "7 -8", ".84", "no idea")]
    [1240.0, 12.0, 56.0, 8.0, -8.0, 0.84, None]
    """
    found = _NUMBER.findall(completion)
    if not found:
        return None
    sign, whole, part = found[-1]
    return float(("-" if sign else "") + whole.replace(",", "") + part)


def grade(completion: str, right: int) -> bool:
    """Return whether the last number in a completion is the right answer."""
    return answer(completion) == right


def reward(prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[int], **columns: Any) -> list[float]:
    """Score completions, 1 if right and else 0, as a reward function for TRL's trainers and `ESTrainer`.

    Args:
        prompts: (completions,) the prompts; only their number is checked.
        completions: (completions,) strings, or conversations, whose assistant messages are scored.
        answer: (completions,) the right answers.
        **columns: further columns of the data set, ignored.

    Raises:
        ValueError: columns of different lengths.
        TypeError: a completion that is neither a string nor a conversation.
        DataError (a TypeError and a ValueError): a right answer that is no number.
    """
    check_lengths(prompts=prompts, completions=completions, answer=answer)
    for right in answer:
        if not hasattr(right, "__float__"):
            raise DataError(f"an answer must be a number such as 56, got {right!r:.200}")
    return [float(grade(completion_text(text), right)) for text, right in zip(completions, answer, strict=True)]
