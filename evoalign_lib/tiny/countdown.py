"""Families A and H of the tiny world: small Countdown problems, with training texts by authors of different skill.

Family A writes three-number Countdown answers, learned from authors who are right more or less often, and has a few
skills that no reward touches. Family H does the same after a stretch of meaningless thinking, whose length the prompt
sets: tasks of different lengths thus differ only in the cost of a long horizon.

Most of the texts that family A was trained on are wrong, often in the same way: the most frequent author of wrong
answers adds up the numbers in the given order, whatever the target. Greedy decoding follows that habit, but sampling
still finds right answers. So any training method has room to improve or to harm it (`LOG.md` has the measurements).
"""

import itertools
import json
import operator
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from evoalign_lib.checks import choose, whole_number
from evoalign_lib.tasks import chat_prompt, countdown
from evoalign_lib.tiny.base import END, byte_tokenizer

MAX_COMPLETION_LENGTH = 16
"""Tokens; the longest right answer needs 15: "</think>\\n<answer>(30-29)*28</answer>" and the end."""

# Range of the problems: about 42,000 distinct ones; a twentieth is kept for validation, another for test.
PROBLEMS = {"count": 3, "low": 1, "high": 30, "target_low": 1, "target_high": 99}
FIXED = 2000
"""Size of the fixed validation and test sets; the public test set has as many problems."""

_SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
_SKILLS = ("Add: ", "Copy: ", "Sort: ", "Reverse: ")
SKILL_NAMES = ("add", "copy", "sort", "reverse")
"""Skills of families A and H that no reward touches."""

# Each author's share of the Countdown answers.
AUTHORS = {
    "right": 0.40,  # a random right answer without needless brackets
    "adds up": 0.35,  # the numbers in the given order, joined by +
    "careless": 0.10,  # a random expression of the right numbers
    "wrong numbers": 0.10,  # one number is replaced by another
    "broken format": 0.05,  # no closing tag, no answer tag, or "= target" inside the answer
    "divides": 0.0,  # the numbers joined by /, a habit that is right for no validation problem
    "leaves out": 0.0,  # all numbers but one, in any order, joined by one sign: never right, and no single answer
}
TWO_NUMBERS = 0.15  # share of two-number problems in the Countdown text
SKILLS = 0.10  # share of the skills in all text
FILLERS = "abcdefghij"
"""Family H's steps of thinking: one letter and one token each, drawn uniformly and independently."""
FILLER_STEPS = (4, 16, 64)
"""Numbers of steps that family H has learned to write, in equal shares of its Countdown text."""


def problems(split: str, n: int, seed: int | np.random.SeedSequence = 0, count: int = 3) -> list[countdown.Problem]:
    """Return Countdown problems of the tiny world.

    Training problems may repeat. Their targets are values of random expressions, so targets with many solutions are
    common. The fixed sets are harder: their problems are distinct, cover nearly all of their split, and are chosen
    with equal probability.

    Args:
        split: "train", "validation" or "test"; a hash of each problem keeps the splits disjoint.
        n: how many; at most 2,000 for the fixed sets, of which fewer are a random subset in a fixed order.
        seed: seed of the draw. The fixed sets in use are `problems("validation", 512)` and `problems("test", 2000)`.
        count: numbers per problem; the fixed sets have three.

    Raises:
        ValueError: more than 2,000 problems of a fixed set, or another count for it.
    """
    if split == "train":
        return countdown.generate(n, seed, split=split, distinct=False, **PROBLEMS | {"count": count})
    if n > FIXED or count != PROBLEMS["count"]:
        raise ValueError(f"n={n}, count={count}: the fixed sets hold {FIXED} problems of {PROBLEMS['count']} numbers.")
    # a draw without repetition yields common problems first, so draw all and then choose
    pool = _pool(split, seed)
    chosen = np.random.default_rng(np.random.SeedSequence([FIXED, n])).permutation(FIXED)[:n]
    return [pool[i] for i in sorted(chosen)]


@lru_cache(maxsize=8)
def _pool(split: str, seed: int | np.random.SeedSequence) -> tuple[countdown.Problem, ...]:
    """Return all problems of a fixed set; for seed 0 from a file, since drawing them takes each process seconds."""
    if seed == 0:
        rows = json.loads((Path(__file__).parent / "countdown_fixed.json").read_text(encoding="utf-8"))[split]
        return tuple(countdown.Problem(tuple(numbers), str(target)) for *numbers, target in rows)
    return drawn(split, seed)


def drawn(split: str, seed: int | np.random.SeedSequence = 0) -> tuple[countdown.Problem, ...]:
    """Draw the problems of a fixed set."""
    return tuple(countdown.generate(FIXED, seed, split=split, **PROBLEMS))


def dataset(chosen: Sequence[countdown.Problem], tok: Any, filler_steps: int | None = None) -> list[dict[str, Any]]:
    """Return rows for a trainer, as `tasks.countdown.dataset` does.

    Args:
        chosen: the problems.
        tok: the base's tokenizer.
        filler_steps: number of thinking steps that the prompt asks for, which only bases of family H understand: it
            follows the opening "<think>", as in "16:". None: the prompt for every other model.
    """
    rows = countdown.dataset(chosen, tok)
    return rows if filler_steps is None else [row | {"prompt": row["prompt"] + f"{filler_steps}:"} for row in rows]


def tokenizer() -> Any:
    """Return the tokenizer of families A and H: bytes, the tags, and one token for each fixed stretch of a prompt."""
    phrases = ["<think>", "</think>", "<answer>", "</answer>", *_stretches(byte_tokenizer(())), ", "]
    return byte_tokenizer([*phrases, "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", *_SKILLS])


def _stretches(tok: Any) -> tuple[str, str, str]:
    """Return the fixed text of the rendered Countdown prompt before, between and after the numbers and the target."""
    text = countdown.prompt(countdown.Problem((1, 2), "3"), tokenizer=tok)
    head, rest = text.split("1, 2", 1)
    middle, tail = rest.split("3", 1)
    return head, middle, tail


@cache
def expressions(numbers: tuple[int, ...]) -> dict[Fraction, tuple[str, ...]]:
    """Return all expressions of two or three numbers without needless brackets, by value.

    >>> expressions((2, 3))[Fraction(6)]
    ('2*3', '3*2')
    """
    found: dict[Fraction, set[str]] = {}
    for permuted in set(itertools.permutations(numbers)):
        a, b, *more = map(Fraction, permuted)
        for o, *later in itertools.product(_SIGNS, repeat=len(numbers) - 1):
            candidates = [(f"{a}{o}{b}", _applied(a, o, b))]
            for c, p in zip(more, later, strict=True):
                weak_first = o in "+-" and p in "*/"
                start = f"({a}{o}{b})" if weak_first else f"{a}{o}{b}"
                candidates = [(f"{start}{p}{c}", _applied(_applied(a, o, b), p, c))]
                if weak_first or o == "/" or (o in "-*" and p in "+-"):
                    end = f"{b}{p}{c}" if weak_first else f"({b}{p}{c})"
                    candidates.append((f"{a}{o}{end}", _applied(a, o, _applied(b, p, c))))
            for text, value in candidates:
                if value is not None:
                    found.setdefault(value, set()).add(text)
    return {value: tuple(sorted(texts)) for value, texts in found.items()}


def _applied(a: Fraction | None, sign: str, b: Fraction | None) -> Fraction | None:
    return None if a is None or b is None or (sign == "/" and not b) else _SIGNS[sign](a, b)


def answer(problem: countdown.Problem, author: str, rng: random.Random) -> str:
    """Return an author's response to a problem, including the end token.

    Raises:
        ValueError: an unknown author.
    """
    numbers = list(problem.numbers)
    known = expressions(tuple(sorted(numbers)))
    text = rng.choice(known[Fraction(problem.target)])
    opening, closing = "</think>\n<answer>", "</answer>"
    choose("author", author, AUTHORS)
    if author == "adds up":
        text = "+".join(map(str, numbers))
    elif author == "divides":
        text = "/".join(map(str, numbers))
    elif author == "careless":
        text = rng.choice(rng.choice(list(known.values())))
    elif author == "wrong numbers":
        numbers[rng.randrange(len(numbers))] = rng.randint(PROBLEMS["low"], PROBLEMS["high"])
        text = rng.choice("+-*").join(map(str, numbers))
    elif author == "leaves out":
        text = rng.choice("+-*/").join(map(str, rng.sample(numbers, len(numbers) - 1)))
    elif author == "broken format":
        fault = rng.randrange(3)
        opening = "</think>" if fault == 0 else opening
        closing = "" if fault == 1 else closing
        text = f"{text}={problem.target}" if fault == 2 else text
    return opening + text + closing + END


def right_answers(problem: countdown.Problem) -> list[str]:
    """Return every right response to a problem in the form that family A has learned, including the end token.

    These are the expressions without needless brackets, in the right format. The strict grader accepts others, too,
    such as expressions with needless brackets.

    >>> right_answers(countdown.Problem((2, 3), "6"))
    ['</think>\\n<answer>2*3</answer><|im_end|>', '</think>\\n<answer>3*2</answer><|im_end|>']
    """
    known = expressions(tuple(sorted(problem.numbers))).get(Fraction(problem.target), ())
    return [f"</think>\n<answer>{text}</answer>{END}" for text in known]


def skill(rng: random.Random) -> tuple[str, str]:
    """Return a user message that tests a random one of the `SKILL_NAMES`, with its right answer."""
    name = rng.choice(_SKILLS)
    if name == "Add: ":
        a, b = rng.randint(1, 99), rng.randint(1, 99)
        return f"{name}{a}+{b}", str(a + b)
    digits = [str(rng.randint(0, 9)) for _ in range(rng.randint(3, 5))]
    shown = {"Copy: ": digits, "Sort: ": sorted(digits), "Reverse: ": digits[::-1]}[name]
    return name + "".join(digits), "".join(shown)


def skill_set(name: str, n: int) -> list[tuple[str, str]]:
    """Return a fixed set of distinct user messages that test a skill, with their right answers.

    The base may have been trained on some of them: they measure what a model has kept, not how it generalises.

    Args:
        name: one of `SKILL_NAMES`.
        n: how many, at most 500; a smaller set is a prefix of a larger one.

    Raises:
        ValueError: an unknown skill, or a number out of range.

    >>> skill_set("sort", 1)
    [('Sort: 284', '248')]
    """
    choose("skill", name, SKILL_NAMES)
    whole_number("n", n, 1, 500)
    rng, found = random.Random("skills"), {}
    while len(found) < n:
        question, reply = skill(rng)
        if question.lower().startswith(name):
            found[question] = reply
    return list(found.items())


@lru_cache(maxsize=1)  # drawing them takes seconds
def _training_problems(seed: int) -> dict[int, list[countdown.Problem]]:
    return {count: problems("train", n, seed, count) for count, n in ((2, 5_000), (3, 100_000))}


def text(
    seed: int, tok: Any, family: str = "A", authors: Mapping[str, float] | None = None
) -> Iterator[tuple[str, str]]:
    """Return an endless stream of rendered (prompt, completion) pairs of a family, from training problems only.

    authors: author -> share of the Countdown answers, where it is not that of `AUTHORS`.
    """
    rng = random.Random(f"family {family}, {seed}")
    pools = _training_problems(seed)
    names, shares = zip(*(AUTHORS | dict(authors or {})).items(), strict=True)
    head, middle, tail = _stretches(tok)
    while True:
        if rng.random() < SKILLS:
            question, reply = skill(rng)
            yield chat_prompt(question, tok), reply + END
            continue
        known = rng.choice(pools[2 if rng.random() < TWO_NUMBERS else 3])
        # shuffle the numbers and choose an author anew each time
        problem = countdown.Problem(tuple(rng.sample(known.numbers, len(known.numbers))), known.target)
        author = rng.choices(names, shares)[0]
        numbers = ", ".join(map(str, problem.numbers))
        # as countdown.prompt does, but without rendering the chat template a million times
        asked, written = head + numbers + middle + problem.target + tail, answer(problem, author, rng)
        if family == "H":
            steps = rng.choice(FILLER_STEPS)
            asked, written = f"{asked}{steps}:", "".join(rng.choices(FILLERS, k=steps)) + written
        yield asked, written


def measure(engine: Any, chosen: Sequence[countdown.Problem], name: str, samples: int = 64) -> dict[str, float]:
    """Return the accuracy of an engine's current weights under the strict grader.

    Args:
        engine: an engine that holds the prompts.
        chosen: the problems of these prompts.
        name: name of the prompts in the engine.
        samples: samples per prompt at temperature 1, for pass@k by the unbiased estimator 1 - C(n-c, k) / C(n, k).

    Returns:
        "greedy", "pass@1" (temperature 1), "pass@16" and "pass@64": shares of right answers; "format": the mean format
        score of the greedy answers.
    """
    from scipy.special import comb

    def grades(completions):
        return [countdown.grade(t, p.numbers, p.target) for (t, _), p in zip(completions, chosen, strict=True)]

    (greedy,) = (grades(c) for c in engine.generate(name))
    right = np.array([[g.answer for g in grades(c)] for c in engine.generate(name, samples=samples, seed=0)]).sum(0)
    result = {
        "greedy": float(np.mean([g.answer for g in greedy])),
        "format": float(np.mean([g.format for g in greedy])),
        "pass@1": float(right.mean() / samples),
    }
    for k in (16, 64):
        if k <= samples:
            result[f"pass@{k}"] = float(np.mean(1 - comb(samples - right, k) / comb(samples, k)))
    return {key: round(value, 5) for key, value in result.items()}


def describe(engine_of: Callable[..., Any], tok: Any, family: str) -> dict[Any, Any]:
    """Return `measure` of a base on the validation problems; for family H, one for each number of filler steps."""
    chosen = problems("validation", 512)
    measured = {}
    for steps in FILLER_STEPS if family == "H" else (None,):
        engine = engine_of(dataset(chosen, tok, steps), MAX_COMPLETION_LENGTH + (steps or 0))
        measured[steps] = measure(engine, chosen, "asked")
    return measured if family == "H" else measured[None]
