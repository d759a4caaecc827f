"""Family D of the tiny world: four tasks to be trained one after the other, each answer in a box.

The tasks stand in for those of Hoy et al. (arXiv 2604.01499), in their order: Countdown, arithmetic in words, multiple
choice about substances, and yes-or-no questions on a passage. An answer is right, and its reward 1 instead of 0, if the
last `\\boxed{...}` of a completion holds it. Only the question tells the tasks apart.

On every task authors have a habit that is wrong for some kinds of question: they add up the numbers, choose the last
letter, say yes, or overlook a "not". Greedy decoding follows the most frequent author, while samples still find right
answers. Skills that no reward touches are those of family A.
"""

import hashlib
import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from evoalign_lib.checks import choose, whole_number
from evoalign_lib.tasks import countdown as public
from evoalign_lib.tiny import countdown
from evoalign_lib.tiny.base import END, around, byte_tokenizer

TASKS = ("countdown", "math", "chemistry", "boolq")
"""The tasks in the published order, by the published names."""
MAX_COMPLETION_LENGTH = 14
"""Tokens; the longest right answer needs 13: "\\boxed{(10-12)*11}" and the end."""
FIXED = 128
"""Problems of each task in the fixed validation and test sets."""
REWARD_FLOOR = 0.0
SPLITS = ("train", "validation", "test")
SKILLS = 0.10  # share of the skills in all text

AUTHORS = ("right", "habit", "careless", "no box")
SHARES = {
    "countdown": (0.45, 0.30, 0.15, 0.10),
    "gets": (0.55, 0.20, 0.15, 0.10),
    "loses": (0.45, 0.30, 0.15, 0.10),
    "boxes": (0.30, 0.45, 0.15, 0.10),
    "known": (0.50, 0.25, 0.15, 0.10),
    "unsure": (0.30, 0.45, 0.15, 0.10),
    "plain": (0.50, 0.25, 0.15, 0.10),
    "negated": (0.30, 0.45, 0.15, 0.10),
}
"""Each author's share of the answers to a kind of question. "careless" answers at random in the right form; "no box" is
right but for the box."""

_NAMES, _THINGS = "Ann Bob Eve Tom Jan Kim Leo Mia".split(), "apples coins nuts pens".split()
_LETTERS = "ABCD"
_OBJECTS = "cup lamp door book tree ship coat desk kite drum ring sock".split()
_COLOURS = "blue black brown purple white pink yellow silver".split()  # the first half are dark
_WORDS = [a + b for a, b in itertools.product(("ba", "do", "ki", "lu", "me"), ("ran", "sil", "tor", "vex", "nim"))]
_ACIDS = dict(zip(_WORDS[::3], ["known"] * 5 + ["unsure"] * 4, strict=True))
_STRETCHES = (
    "Numbers: [",
    ", ",
    "]\nTarget: ",
    " has ",
    " and gets ",
    " more. How many now?",
    " and loses ",
    " boxes of ",
)
_STRETCHES += (
    ". How many now?",
    "Which is an acid",
    "?\n",
    "Passage: ",
    " has a ",
    " ",
    "\nQuestion: is it ",
    "not ",
    "dark?",
    "\\boxed{",
)


@dataclass(frozen=True)
class Problem:
    """A question of one of the tasks."""

    task: str
    """One of `TASKS`."""
    question: str
    answer: str
    """What the box must hold; for Countdown the numbers and the target, as in "3 5 12 = 20"."""
    kind: str
    """A key of `SHARES`."""
    habit: str
    """What authors with a habit answer."""


def tokenizer() -> Any:
    """Return the family's tokenizer: bytes, and one token for each word and fixed stretch of a question."""
    words = [*_NAMES, *(f" {thing}" for thing in _THINGS), *_WORDS, *_OBJECTS, *_COLOURS, "yes", "no"]
    pieces = [*_STRETCHES, *(f"{letter}: " for letter in _LETTERS), *words]
    return byte_tokenizer(
        [*pieces, *around(byte_tokenizer(())), *(f"{s.capitalize()}: " for s in countdown.SKILL_NAMES)]
    )


@lru_cache(maxsize=1 << 10)
def _expressions(numbers: tuple[int, ...]) -> dict[int, tuple[str, ...]]:
    """Return the expressions of sorted numbers by value, for values that are whole numbers from 1 to 60."""
    found = countdown.expressions(numbers)
    return {int(value): texts for value, texts in found.items() if value.denominator == 1 and 1 <= value <= 60}


def draw(task: str, rng: random.Random) -> Problem:
    """Return a random problem of a task, of any split. Raises ValueError for an unknown task."""
    choose("task", task, TASKS)
    if task == "countdown":
        numbers = [rng.randint(1, 12) for _ in range(3)]
        target = rng.choice(list(_expressions(tuple(sorted(numbers)))))
        asked = f"Numbers: [{', '.join(map(str, numbers))}]\nTarget: {target}"
        return Problem(task, asked, f"{' '.join(map(str, numbers))} = {target}", task, "+".join(map(str, numbers)))
    if task == "math":
        kind, a, b = rng.choice(("gets", "loses", "boxes")), rng.randint(2, 9), rng.randint(2, 9)
        a, b = (max(a, b), min(a, b)) if kind == "loses" else (a, b)
        begun, thing = f"{rng.choice(_NAMES)} has {a}", rng.choice(_THINGS)
        asked, right = {
            "gets": (f"{begun} {thing} and gets {b} more. How many now?", a + b),
            "loses": (f"{begun} {thing} and loses {b}. How many now?", a - b),
            "boxes": (f"{begun} boxes of {b} {thing}. How many now?", a * b),
        }[kind]
        return Problem(task, asked, str(right), kind, str(a + b))
    if task == "chemistry":
        right, *others = rng.choice(list(_ACIDS)), *rng.sample([w for w in _WORDS if w not in _ACIDS], 3)
        shown = rng.sample([right, *others], 4)
        listed = "\n".join(f"{letter}: {word}" for letter, word in zip(_LETTERS, shown, strict=True))
        return Problem(task, f"Which is an acid?\n{listed}", _LETTERS[shown.index(right)], _ACIDS[right], "D")
    colour, negated = rng.choice(_COLOURS), rng.random() < 0.4
    passage = f"Passage: {rng.choice(_NAMES)} has a {colour} {rng.choice(_OBJECTS)}."
    asked = f"{passage}\nQuestion: is it {'not ' if negated else ''}dark?"
    plain, other = ("yes", "no") if colour in _COLOURS[:4] else ("no", "yes")
    return Problem(task, asked, other if negated else plain, *(("negated", plain) if negated else ("plain", "yes")))


def split_of(problem: Problem) -> str:
    """Return a problem's split by a hash that ignores the order of numbers: 80 % "train", 10 % each of the others."""
    numbers = sorted(re.findall(r"\d+", problem.question)) if problem.task == "countdown" else ()
    key = " ".join(numbers) or problem.question
    bucket = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") % 20
    return {0: "test", 1: "test", 2: "validation", 3: "validation"}.get(bucket, "train")


def problems(task: str, split: str, n: int, seed: int = 0) -> list[Problem]:
    """Return problems of a task. Those of "validation" and "test" are distinct, a smaller set a prefix of a larger.

    Args:
        task: one of `TASKS`.
        split: one of `SPLITS`; training problems may repeat.
        n: how many; of a fixed set at most 128.
        seed: seed of the draw; the fixed sets in use have seed 0.

    Raises:
        ValueError: an unknown task or split, or more problems than a fixed set has.
    """
    choose("split", split, SPLITS)
    whole_number("n", n, 0, None if split == "train" else FIXED)
    rng, found = random.Random(f"{task} {split} {seed}"), []
    while len(found) < n:
        drawn = draw(task, rng)
        if split_of(drawn) == split and (split == "train" or drawn not in found):
            found.append(drawn)
    return found


def dataset(chosen: Sequence[Problem], tok: Any = None) -> list[dict[str, Any]]:
    """Return rows for a trainer: the prompt as messages, and the columns that `reward` takes."""
    asked = ([{"role": "user", "content": problem.question}] for problem in chosen)
    return [{"prompt": a, "problem_task": p.task, "answer": p.answer} for a, p in zip(asked, chosen, strict=True)]


def is_right(task: str, answer: str, completion: str) -> bool:
    """Return whether the last box of a completion holds the answer; for Countdown, an expression that fits (strict).

    >>> is_right("countdown", "3 5 12 = 20", r"\\boxed{5+3+12}"), is_right("boolq", "yes", "yes")
    (True, False)
    """
    boxes = re.findall(r"\\boxed\{([^{}]*)\}", completion)
    if not boxes or task != "countdown":
        return bool(boxes) and boxes[-1].strip() == answer
    numbers, target = answer.split(" = ")
    return bool(public.grade(f"<answer>{boxes[-1]}</answer>", tuple(map(int, numbers.split())), target).answer)


def reward(prompts: Any, completions: Sequence[Any], problem_task: Any, answer: Any, **columns: Any) -> list[float]:
    """Return 1.0 for each right completion and 0.0 for others (TRL's signature for reward functions)."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [float(is_right(*each)) for each in zip(problem_task, answer, texts, strict=True)]


def reply(problem: Problem, author: str, rng: random.Random) -> str:
    """Return an author's completion, without the end token. Raises ValueError for an unknown author."""
    choose("author", author, AUTHORS)
    right, at_random = problem.answer, ""
    if problem.task == "countdown":
        numbers, target = problem.answer.split(" = ")
        known = _expressions(tuple(sorted(map(int, numbers.split()))))
        right, at_random = rng.choice(known[int(target)]), rng.choice(known[rng.choice(list(known))])
    elif author == "careless":
        near = str(max(0, int(right) + rng.choice((-3, -2, -1, 1, 2, 3)))) if problem.task == "math" else ""
        at_random = near or rng.choice(_LETTERS if problem.task == "chemistry" else ("yes", "no"))
    if author == "no box":
        return right
    return f"\\boxed{{{ {'right': right, 'habit': problem.habit, 'careless': at_random}[author] }}}"


def text(seed: int, tok: Any) -> Iterator[tuple[str, str]]:
    """Return an endless stream of rendered (prompt, completion) pairs, from training problems and skills."""
    rng, (before, after) = random.Random(f"family D, {seed}"), around(tok)
    while True:
        if rng.random() < SKILLS:
            question, written = countdown.skill(rng)
        elif split_of(problem := draw(rng.choice(TASKS), rng)) != "train":
            continue
        else:
            question, author = problem.question, rng.choices(AUTHORS, SHARES[problem.kind])[0]
            written = reply(problem, author, rng)
        yield before + question + after, written + END


def describe(engine_of: Callable[..., Any], tok: Any, family: str, n: int = 128, samples: int = 64) -> dict[str, Any]:
    """Return for each task a base's shares of right validation answers: greedy, one sample, any of many samples."""
    told = {}
    for task in TASKS:
        asked = problems(task, "validation", n)
        engine = engine_of(dataset(asked), MAX_COMPLETION_LENGTH)
        rows = [*engine.generate("asked"), *engine.generate("asked", samples=samples, seed=0)]
        right = [[is_right(task, p.answer, t) for p, (t, _) in zip(asked, row, strict=True)] for row in rows]
        shares = {"greedy": np.mean(right[0]), "t1": np.mean(right[1:])}
        shares[f"any of {samples}"] = np.any(right[1:], axis=0).mean()
        told[task] = {name: round(float(share), 4) for name, share in shares.items()}
    return told
