"""Facts: short questions with short answers, for small instruct models that are rewarded for length alone.

The reward is that of `conciseness`: minus the difference, in characters, between the lengths of a completion and of the
reference answer. It ignores whether the answer is right, which is graded apart. Questions and answers are this
project's own (`facts.json`), in kinds such as capitals or past tenses.

An answer of the kind, right or wrong, is recognised in a completion whatever words surround it: answers to the other
questions of the kind, and further wrong ones in the file. The first of them counts, unless the question has it, so that
reciting many gains nothing. Splits share neither questions nor reference answers. Prompts are messages, for the model's
chat template; they do not ask for short answers.
"""

import json
import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from evoalign_lib.checks import choose, require
from evoalign_lib.tasks import conciseness

REWARD_FLOOR = conciseness.REWARD_FLOOR
MAX_COMPLETION_LENGTH = 24
"""Maximum number of new tokens: long enough for the first answer, and for a long completion to be told from a short."""
SPLITS = {"train": 250, "validation": 60}
"""Split -> its number of facts, or one or two more, since facts with one answer stay together; the rest is "test"."""

reward = conciseness.reward


class Fact(NamedTuple):
    """A question, its kind, the reference answer, and other right answers."""

    question: str
    kind: str
    answer: str
    accepted: tuple[str, ...] = ()


@lru_cache(maxsize=1)
def _file() -> dict[str, Any]:
    return json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


@lru_cache(maxsize=3)
def problems(split: str) -> tuple[Fact, ...]:
    """Return the facts of a split, always in the same order. Raises ValueError for an unknown split."""
    choose("split", split, (*SPLITS, "test"))
    every = [
        Fact(own["question"].format(asked), kind, *answers[:1], tuple(answers[1:]))
        for kind, own in _file().items()
        for asked, answers in own["facts"].items()
    ]
    every.sort(key=lambda fact: (_key(fact.answer), fact.question))
    groups = [list(group) for _, group in groupby(every, key=lambda fact: _key(fact.answer))]
    found: dict[str, list[Fact]] = {"train": [], "validation": [], "test": []}
    for i in np.random.default_rng(2026).permutation(len(groups)):
        found[next((name for name, size in SPLITS.items() if len(found[name]) < size), "test")] += groups[i]
    return tuple(found[split])


def dataset(asked: Iterable[Fact], tokenizer: Any = None, chat_template: bool = True) -> list[dict[str, Any]]:
    """Return rows for a trainer: the question as messages, and the column `answer` that `reward` takes.

    Args:
        asked: the facts.
        tokenizer: not needed, since prompts are messages, which the trainers render.
        chat_template: must be True.

    Raises:
        ValueError: chat_template is False; these are questions to instruct models.
    """
    require(chat_template, "chat_template=False: these are questions to instruct models. Leave it out.")
    return [{"prompt": [{"role": "user", "content": fact.question}], "answer": fact.answer} for fact in asked]


def _key(text: str) -> str:
    return text.casefold().replace(",", "")


@lru_cache(maxsize=64)
def _answers(kind: str) -> re.Pattern[str]:
    own = _file()[kind]
    known = {_key(text) for answers in (own["others"], *own["facts"].values()) for text in answers}
    words = [re.escape(text) for text in sorted(known, key=len, reverse=True)]
    return re.compile(f"(?<!\\w)(?:{'|'.join([*words, *([own['pattern']] if 'pattern' in own else [])])})(?!\\w)")


def answer(fact: Fact, completion: str) -> str | None:
    """Return the first answer of the question's kind in a completion, without case and commas; None if it has none.

    >>> france = Fact("What is the capital of France?", "capital", "Paris")
    >>> [answer(france, text) for text in ("It is PARIS, not Rome.", "**London**", "Parisian", "")]
    ['paris', 'london', None, None]
    """
    known = _answers(fact.kind)
    asked = set(known.findall(_key(fact.question)))
    return next((each for each in known.findall(_key(conciseness.measured(completion))) if each not in asked), None)


def grade(fact: Fact, completion: str) -> bool:
    """Return whether the first answer in a completion is a right one."""
    return answer(fact, completion) in map(_key, (fact.answer, *fact.accepted))
