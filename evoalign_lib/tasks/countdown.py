"""Countdown: reach a target by arithmetic on given numbers. Data, prompts, solver and graders.

The task of Qiu et al. (arXiv 2509.24372) in the form of the public repository jbejjani2022/evolutionary-alignment:
reward = 0.1 * format + answer. The prompt says that each number "can only be used once"; the graders, like the
published one, require each number exactly once.

Two graders share the format score and differ in the answer score:

- `strict` (default): `+ - * /`, unary minus and brackets, in exact rational arithmetic. An integer target must be met
  exactly. The file's non-integer targets are rounded doubles ("266.6666666666667"), so a value meets them if it lies
  within 1e-9 * max(1, |target|), compared exactly.
- `released`: the decisions of the published scorer, which passes the answer to Python's `eval`: `**`, `//` and unary
  plus are allowed as well, the arithmetic is Python's (int and float), and the value must lie within 1e-5 of
  float(target).

To handle hostile text in bounded time, `released` departs from the published scorer in three cases, which all score 0:

1. a response of more than 65,536 characters is not read (this also holds for `strict`, and for the format);
2. an integer power of more than 32,768 bits is an error (the published scorer computes it, or hangs);
3. an answer of more than 2,000 characters, not counting spaces, is an error. Longer or deeper chains of signs, brackets
   and operators than Python's parser and its limit of recursion bear are an error in both, and where that begins
   depends on Python's version; answers of some hundred characters are far from it.

No text is ever evaluated as code: Python's own parser reads an answer of digits, operators, brackets and blanks, and
only the operators named above are then applied.
"""

import ast
import hashlib
import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import chain, combinations, product
from numbers import Integral, Rational
from typing import Any

import numpy as np

from evoalign_lib import tasks
from evoalign_lib.checks import choose, require, whole_number
from evoalign_lib.rewards import DataError

PUBLIC_PATH = "countdown/data/countdown.json"  # in `tasks.PUBLIC_REPOSITORY`
PUBLIC_SHA256 = "f1b5c5865d9f4bc517991740175f14f6869a2f8e4b00f8602f4655fdc6ccd8ba"
PUBLIC_TRAIN = 200  # the published studies train on the first 200 items and test on the other 2,000

SYSTEM_MESSAGE = (
    "You are a helpful assistant. You first think about the reasoning process in your mind and then provide the user "
    "with the answer."
)
USER_TEMPLATE = (
    "Using the numbers {numbers}, create an equation that equals {target}. You can use basic arithmetic operations "
    "(+, -, *, /) and each number can only be used once. Show your work in <think> </think> tags. And return the final "
    "answer in <answer> </answer> tags, for example <answer> (1 + 2) / 3 </answer>."
)
RESPONSE_PREFIX = "Let me solve this step by step.\n<think>"

GRADERS = ("strict", "released")
SPLITS = ("train", "validation", "test")
REWARD_FLOOR = 0.0

Target = str | int | float | Fraction

_MAX_RESPONSE = 65_536  # characters; longer responses score 0 without being read
_MAX_SYMBOLS = 2_000  # characters of an answer, not counting spaces
_MAX_BITS = 32_768  # of an integer power, for the released grader
_MAX_SOLVER_NUMBERS = 6
_FULL_DRAW = 65_536  # most candidates that the generator draws at once


# ---------------------------------------------------------------------------------------------------------------- data


@dataclass(frozen=True, slots=True)
class Problem:
    """One Countdown problem.

    Attributes:
        numbers: non-negative integers, in the order of the prompt.
        target: the value to reach, as written in the prompt: an integer, a decimal or a fraction.
        id: position in the public file; None for generated problems.
    """

    numbers: tuple[int, ...]
    target: str
    id: int | None = None

    def __post_init__(self) -> None:
        numbers, target = self.numbers, self.target
        fits = type(numbers) is tuple and numbers and all(type(n) is int and n >= 0 for n in numbers)
        require(fits, f"numbers must be a non-empty tuple of non-negative integers, got {numbers!r}")
        require(type(target) is str, f"target must be a string such as '98' or '27.4', got {target!r}")
        _exact_target(self.target)


def problem_key(problem: Problem) -> tuple[tuple[int, ...], str]:
    """Return a key that identifies a problem regardless of the order of its numbers.

    Args:
        problem: the problem.

    Returns:
        (sorted numbers, target).

    >>> problem_key(Problem((44, 19, 35), "98"))
    ((19, 35, 44), '98')
    """
    return tuple(sorted(problem.numbers)), problem.target


def split_of(problem: Problem) -> str:
    """Assign a problem to a split by a hash of its key alone: train 90 %, validation 5 %, test 5 %.

    Args:
        problem: the problem.

    Returns:
        "train", "validation" or "test"; problems that differ only in the order of the numbers share a split.
    """
    numbers, target = problem_key(problem)
    key = f"{','.join(map(str, numbers))}={target}"
    bucket = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") % 20
    return "test" if bucket == 0 else "validation" if bucket == 1 else "train"


def load_public(split: str = "train") -> list[Problem]:
    """Load the public problems: three or four numbers in 1..99, some targets negative or decimal, a few unsolvable.

    The file's `solution` field is unreliable (null for some solvable items) and is not read; see `solve`.

    Args:
        split: "train" (the first 200), "test" (the other 2,000) or "all".

    Returns:
        The problems in file order; `id` is the position in the file.

    Raises:
        ValueError: unknown split, or a file that is not the published one.
        FileNotFoundError: the file is not in EVOALIGN_DATA and cannot be fetched.
    """
    ranges = {"train": slice(0, PUBLIC_TRAIN), "test": slice(PUBLIC_TRAIN, None), "all": slice(None)}
    choose("split", split, ranges)
    path = tasks.public_file("countdown.json", PUBLIC_PATH, PUBLIC_SHA256)
    rows = json.loads(path.read_text(encoding="utf-8"))[ranges[split]]
    return [Problem(tuple(row["numbers"]), row["target"], row["id"]) for row in rows]


def generate(
    n: int,
    seed: int | np.random.SeedSequence,
    *,
    count: int = 3,
    low: int = 1,
    high: int = 50,
    target_low: int = 1,
    target_high: int = 100,
    split: str | None = None,
    distinct: bool = True,
) -> list[Problem]:
    """Draw random solvable problems: random numbers, with the value of a random expression over all of them as target.

    There are 16,292 distinct problems of three numbers in 1..high with targets in 1..100 for high = 20, 42,273 for 30
    and 141,697 for 50; a twentieth of them are test problems.

    Args:
        n: number of problems.
        seed: seed of `np.random.default_rng`; a different n with the same seed gives different problems.
        count: numbers per problem, 2 to 6.
        low, high: range of the numbers, both ends included.
        target_low, target_high: range of the integer targets, both ends included.
        split: keep only problems of this split (see `split_of`); None keeps all.
        distinct: whether all problems must differ in their `problem_key`.

    Returns:
        n problems, each with at least one exact solution.

    Raises:
        ValueError: an argument out of range, or ranges with too few (distinct) problems.

    >>> [problem] = generate(1, seed=0, high=9)
    >>> solve(problem.numbers, problem.target) is not None
    True
    """
    whole_number("n", n, 0)
    whole_number("count", count, 2, 6)
    fits = 0 <= low <= high and (2 * high) ** count < 2**62
    require(fits, f"need 0 <= low <= high and (2 * high)**count < 2**62, got low={low}, high={high}")
    rises = target_low <= target_high
    require(rises, f"target_low must not exceed target_high, got {target_low} > {target_high}")
    if split is not None:
        choose("split", split, SPLITS)
    rng = np.random.default_rng(seed)
    problems: list[Problem] = []
    seen = set()
    size = n * (4 if split in (None, "train") else 80)
    while len(problems) < n:
        size = min(_FULL_DRAW, max(64, size))
        before = len(problems)
        numbers = rng.integers(low, high + 1, size=(size, count))
        numerator, denominator = _random_expressions(rng, numbers)
        target = numerator // denominator
        kept = (numerator == target * denominator) & (target >= target_low) & (target <= target_high)
        numbers = numbers[kept]
        keys = np.column_stack([np.sort(numbers, axis=1), target[kept]])
        for row, key in zip(numbers.tolist(), map(tuple, keys.tolist()), strict=True):
            if distinct and key in seen:
                continue
            seen.add(key)  # whatever its split: for a large n nearly all draws are repetitions
            problem = Problem(tuple(row), str(key[-1]))
            if split is not None and split_of(problem) != split:
                continue
            problems.append(problem)
            if len(problems) == n:
                break
        if size == _FULL_DRAW and len(problems) == before:
            found = f"found only {len(problems)} of {n} problems with {count} numbers in {low}..{high}, targets in "
            found += f"{target_low}..{target_high}, split {split}"
            raise ValueError(f"{found}: widen the ranges, ask for fewer, or pass distinct=False")
        size *= 2
    return problems


def _random_expressions(rng: np.random.Generator, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the value of a random expression per row of numbers (rows, count): numerator and denominator (rows,).

    Two random operands are joined by a random operation until one is left, so every order and bracketing can occur. An
    expression that divides by zero gets the value 1/2, which equals no integer target.
    """
    numerator, denominator = numbers, np.ones_like(numbers)
    valid = np.ones(len(numbers), dtype=bool)
    while numerator.shape[1] > 1:
        order = np.argsort(rng.random(numerator.shape), axis=1)
        numerator = np.take_along_axis(numerator, order, axis=1)
        denominator = np.take_along_axis(denominator, order, axis=1)
        (a, b), (c, d) = numerator[:, :2].T, denominator[:, :2].T  # the operands a/c and b/d
        operation = rng.integers(0, 4, size=len(numbers))
        valid &= (operation != 3) | (b != 0)
        top = np.choose(operation, [a * d + b * c, a * d - b * c, a * b, a * d])
        bottom = np.choose(operation, [c * d, c * d, c * d, c * b])
        numerator = np.column_stack([top, numerator[:, 2:]])
        denominator = np.column_stack([bottom, denominator[:, 2:]])
    return np.where(valid, numerator[:, 0], 1), np.where(valid, denominator[:, 0], 2)


# -------------------------------------------------------------------------------------------------------------- solver


def attainable(numbers: Sequence[int]) -> dict[Fraction, str]:
    """Return every value that can be reached with `+ - * /` and brackets, using each number exactly once.

    Args:
        numbers: up to 6 non-negative integers. Four distinct numbers give about 1,200 values, five 27,000, six 800,000
            (this takes seconds and several hundred megabytes).

    Returns:
        value -> one expression with this value.

    Raises:
        ValueError: no numbers, or more than 6.

    >>> attainable([2, 3])[Fraction(2, 3)]
    '2 / 3'
    """
    full = _tables(numbers, len(numbers))[2 ** len(numbers) - 1]
    return {value: text[1:-1] if text.startswith("(") else text for value, text in full.items()}


def solve(numbers: Sequence[int], target: Target) -> str | None:
    """Search exhaustively for an expression that uses each number exactly once and equals the target.

    Args:
        numbers: up to 6 non-negative integers; six take about a second (ten seconds if the target is 0 or no integer).
        target: the value to reach, compared as the `strict` grader does.

    Returns:
        An expression that the `strict` grader accepts; None if there is none.

    Raises:
        ValueError: no numbers, more than 6, or a target that is not a number.

    >>> solve([44, 19, 35], "98"), solve([1, 1], 5)
    ('44 + (19 + 35)', None)
    """
    goal = _exact_target(target)
    count = len(numbers)
    if goal == 0 or goal.denominator != 1 or count == 1:
        return next((text for value, text in attainable(numbers).items() if _meets(value, goal)), None)
    # The last operation joins a value of one part to a value of the other, so only the parts need full tables.
    tables = _tables(numbers, count - 1)
    for left, table in tables.items():
        if 2 * left.bit_count() > count:
            break  # subsets come in order of size: from here on each split has been seen with its parts swapped
        right = tables[2**count - 1 - left]
        for a, text in table.items():
            needs = {"{a} + {b}": goal - a, "{a} - {b}": a - goal, "{b} - {a}": goal + a}
            if a:  # goal is not 0, so neither a nor b can be 0 here
                needs |= {"{a} * {b}": goal / a, "{b} / {a}": goal * a, "{a} / {b}": a / goal}
            for template, b in needs.items():
                if b in right:
                    return template.format(a=text, b=right[b])
    return None


def _tables(numbers: Sequence[int], size: int) -> dict[int, dict[Fraction, str]]:
    """Return values with bracketed expressions for every subset (a bit mask) of at most `size` numbers."""
    fits = 1 <= len(numbers) <= _MAX_SOLVER_NUMBERS
    require(fits, f"the solver takes 1 to {_MAX_SOLVER_NUMBERS} numbers, got {len(numbers)}")
    tables: dict[int, dict[Fraction, str]] = {}
    for chosen in chain.from_iterable(combinations(range(len(numbers)), parts) for parts in range(1, size + 1)):
        mask = sum(1 << i for i in chosen)
        table = tables[mask] = {Fraction(numbers[i]): str(numbers[i]) for i in chosen if len(chosen) == 1}
        left = (mask - 1) & mask
        while left:
            if left & mask & -mask:  # visit each unordered pair of parts once: the left part holds the first number
                _join(tables[left], tables[mask ^ left], table)
            left = (left - 1) & mask
    return tables


def _join(left: dict[Fraction, str], right: dict[Fraction, str], table: dict[Fraction, str]) -> None:
    for (a, first), (b, second) in product(left.items(), right.items()):
        ways = [(a + b, first, "+", second), (a - b, first, "-", second), (b - a, second, "-", first)]
        ways += [(a * b, first, "*", second)]
        ways += [(a / b, first, "/", second)] if b else []
        ways += [(b / a, second, "/", first)] if a else []
        for value, one, sign, other in ways:
            if value not in table:
                table[value] = f"({one} {sign} {other})"


# ------------------------------------------------------------------------------------------------------------- prompts


def messages(problem: Problem) -> list[dict[str, str]]:
    """Return the system and user messages of the chat prompt; `prompt` appends `RESPONSE_PREFIX` to the rendered text.

    Args:
        problem: the problem.

    Returns:
        Two messages with role and content.
    """
    user = USER_TEMPLATE.format(numbers=list(problem.numbers), target=problem.target)
    return [{"role": "system", "content": SYSTEM_MESSAGE}, {"role": "user", "content": user}]


def prompt(problem: Problem, *, chat_template: bool = True, tokenizer: Any = None) -> str:
    """Render a problem as the text that the model continues.

    Args:
        problem: the problem.
        chat_template: True renders the tokenizer's chat template with generation prompt and `RESPONSE_PREFIX`; False
            returns the published raw text, byte for byte (NumPy-style list, no spaces between its three parts).
        tokenizer: a Hugging Face tokenizer with a chat template; not needed if chat_template is False.

    Returns:
        The text, special tokens included: tokenise it with `add_special_tokens=False`.

    Raises:
        ValueError: chat_template without a tokenizer.
    """
    if not chat_template:
        width = max(len(str(n)) for n in problem.numbers)
        array = "[" + " ".join(str(n).rjust(width) for n in problem.numbers) + "]"
        return SYSTEM_MESSAGE + USER_TEMPLATE.format(numbers=array, target=problem.target) + RESPONSE_PREFIX
    return tasks.chat_prompt(messages(problem), tokenizer) + RESPONSE_PREFIX


def dataset(problems: Iterable[Problem], tokenizer: Any, chat_template: bool = True) -> list[dict[str, Any]]:
    """Return rows for a trainer: the rendered prompt and the columns that `reward` takes.

    Args:
        problems: the problems.
        tokenizer, chat_template: as for `prompt`.

    Returns:
        One dict per problem with keys prompt (str), numbers (list of int) and target (str).
    """
    asked = [(problem, prompt(problem, chat_template=chat_template, tokenizer=tokenizer)) for problem in problems]
    return [{"prompt": text, "numbers": list(p.numbers), "target": p.target} for p, text in asked]


# ------------------------------------------------------------------------------------------------------------- graders


@dataclass(frozen=True, slots=True)
class Grade:
    """The scores of one response.

    Attributes:
        format: 0, 0.1, 0.5, 0.6 or 1.
        answer: 1 for a right answer, else 0.
    """

    format: float
    answer: float

    @property
    def reward(self) -> float:
        """0.1 * format + answer, at most 1.1."""
        return 0.1 * self.format + self.answer


def grade(response: str, numbers: Sequence[int], target: Target, grader: str = "strict") -> Grade:
    """Score one response, read as "<think>" + response, since the prompt ends with the opening tag.

    A response that repeats the opening "<think>" gets the same score. The format score is 1 if the whole text is a
    think block, one newline and an answer block (one more newline may follow); otherwise it is 0.1 for a closed think
    block plus 0.5 for a closed answer block. The last answer block is graded: it may contain only digits, `+ - * / ( )`
    and spaces (one final newline may follow), use each given number exactly once, and have the right value.

    Args:
        response: the completion alone, without an end token, and never with the prompt (whose example answer would be
            graded). More than 65,536 characters score 0.
        numbers: the given integers.
        target: the value to reach.
        grader: "strict" or "released", see the module's docstring.

    Returns:
        Format and answer scores.

    Raises:
        ValueError: unknown grader.
        TypeError: a response that is not a string.
        DataError (a TypeError and a ValueError): numbers that are not integers, such as strings, or a target that is
            not a number.

    >>> grade("44 + 19 = 63</think>\\n<answer>44 + 19 + 35</answer>", [44, 19, 35], "98").reward
    1.1
    >>> grade("<answer>7 // 2</answer>", [7, 2], 3), grade("<answer>7 // 2</answer>", [7, 2], 3, "released")
    (Grade(format=0.5, answer=0.0), Grade(format=0.5, answer=1.0))
    """
    choose("grader", grader, GRADERS)
    if not isinstance(response, str):
        raise TypeError(f"a response must be a string, got {type(response).__name__}")
    given = numbers if isinstance(numbers, Iterable) else [None]
    if not all(isinstance(n, Integral) and not isinstance(n, bool) for n in given):
        raise DataError(f"numbers must be whole numbers such as [44, 19, 35], got {numbers!r:.200}")
    goal = _exact_target(target)
    if len(response) > _MAX_RESPONSE:
        return Grade(0.0, 0.0)
    right = _answer_is_right(last_answer(response), numbers, goal, grader)
    return Grade(_format_score("<think>" + response), float(right))


def reward(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    numbers: Sequence[Sequence[int]],
    target: Sequence[Target],
    grader: str = "strict",
    **columns: Any,
) -> list[float]:
    """Score completions with `grade`, as a reward function for TRL's trainers and `ESTrainer`.

    Args:
        prompts: (completions,) the prompts; only their number is checked.
        completions: (completions,) strings, or conversations (lists of {"role", "content"}), whose assistant messages
            are scored.
        numbers: (completions,) the given numbers of each problem.
        target: (completions,) the target of each problem.
        grader: "strict" or "released".
        **columns: further dataset columns, ignored; if the trainer passes `log_metric`, the mean answer and format
            scores are logged as "accuracy" and "format".

    Returns:
        (completions,) rewards in 0..1.1.

    Raises:
        ValueError: columns of different lengths, or unknown grader.
        TypeError: a completion that is neither a string nor a conversation.
        DataError: numbers that are not integers, or a target that is not a number.
    """
    tasks.check_lengths(prompts=prompts, completions=completions, numbers=numbers, target=target)
    grades = [
        grade(tasks.completion_text(completion), given, goal, grader)
        for completion, given, goal in zip(completions, numbers, target, strict=True)
    ]
    if grades and (log_metric := columns.get("log_metric")):
        log_metric("accuracy", sum(g.answer for g in grades) / len(grades))
        log_metric("format", sum(g.format for g in grades) / len(grades))
    return [g.reward for g in grades]


def _format_score(text: str) -> float:
    """Return the format score by string search, equal to that of the published regular expressions.

    These are, with the dot matching newlines: `^<think>.*?</think>\\n<answer>.*?</answer>$` for the whole text; failing
    that, 0.1 for `<think>.*?</think>` and 0.5 for `<answer>.*?</answer>`, found anywhere.
    """
    body = text.removesuffix("\n")  # `$` also matches before one final newline
    # the three pieces cannot overlap, so each may be searched for separately
    if body.startswith("<think>") and "</think>\n<answer>" in body and body.endswith("</answer>"):
        return 1.0
    think, answer = (f"</{tag}>" in text.partition(f"<{tag}>")[2] for tag in ("think", "answer"))
    return 0.1 * think + 0.5 * answer


def last_answer(text: str) -> str | None:
    """Return the content of the last block that `<answer>(.*?)</answer>` finds from the left; None if there is none.

    >>> last_answer("<answer>1 + 2</answer> or <answer>2 + 1</answer>")
    '2 + 1'
    """
    *closed, _ = text.split("</answer>")
    blocks = [part.split("<answer>", 1)[1] for part in closed if "<answer>" in part]
    return blocks[-1] if blocks else None


_FORBIDDEN = re.compile(r"[^0-9+\-*/() ]")
_DIGITS = re.compile(r"[0-9]+")


def _answer_is_right(answer: str | None, numbers: Sequence[int], goal: Fraction, grader: str) -> bool:
    if answer is None:
        return False
    answer = answer.removesuffix("\n")  # `$` again
    if _FORBIDDEN.search(answer) or len(answer) - answer.count(" ") > _MAX_SYMBOLS:
        return False
    # cached, as members of a population answer alike; but long answers, padded with spaces, would fill the memory
    return (_has_value if len(answer) <= 128 else _has_value.__wrapped__)(answer, tuple(numbers), goal, grader)


@lru_cache(maxsize=1 << 15)
def _has_value(expression: str, numbers: tuple[int, ...], goal: Fraction, grader: str) -> bool:
    used = _DIGITS.findall(expression)
    if len(used) != len(numbers):
        return False
    try:
        if sorted(map(int, used)) != sorted(numbers):
            return False
        if grader == "strict":
            return _meets(_evaluate(expression, Fraction, _EXACT), goal)
        return abs(float(_evaluate(expression, int, _PYTHON)) - float(goal)) < 1e-5
    # not an expression, too deep for the parser, a division by zero or an overflow
    except (SyntaxError, MemoryError, RecursionError, ValueError, ArithmeticError):
        return False


def _evaluate(text: str, number: Callable[[int], Any], functions: Mapping[type, Callable[..., Any]]) -> Any:
    """Return the value of a string of digits, `+ - * / ( )` and spaces, by Python's grammar.

    `number` converts an integer to a value; `functions` maps operators to functions. An operator not in it raises
    ValueError, as do calls such as `2(3)` and the empty tuple `()`; what Python cannot parse raises SyntaxError.
    """

    def value(node: ast.AST) -> Any:
        signs = []
        while isinstance(node, ast.UnaryOp):  # a loop: chains of signs may be long
            signs.append(node.op)
            node = node.operand
        match node:
            case ast.Constant(digits):
                found = number(digits)
            case ast.BinOp(left, sign, right) if type(sign) in functions:
                found = functions[type(sign)](value(left), value(right))
            case _:
                raise ValueError(f"{type(node).__name__} is not allowed")
        for sign in signs:
            require(type(sign) in functions, "a plus sign before a number is not allowed")
            found = functions[type(sign)](found)
        return found

    return value(ast.parse(text.strip(" "), mode="eval").body)


def _bounded_power(a: float, b: float) -> float:
    """Return a**b in Python's int and float arithmetic; raise OverflowError for a huge integer power."""
    if isinstance(a, int) and isinstance(b, int) and abs(a) > 1 and a.bit_length() * b > _MAX_BITS:
        raise OverflowError("power too large")
    power = a**b
    # a root of a negative number; no further operation can make its type real again
    if isinstance(power, complex):
        raise ValueError("complex value")
    return power


_EXACT: dict[type, Callable[..., Any]] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
_EXACT |= {ast.Div: operator.truediv, ast.USub: operator.neg}
_PYTHON = _EXACT | {ast.FloorDiv: operator.floordiv, ast.UAdd: operator.pos, ast.Pow: _bounded_power}


def _meets(value: Fraction, goal: Fraction) -> bool:
    if goal.denominator == 1:
        return value == goal
    return abs(value - goal) <= Fraction(1, 10**9) * max(1, abs(goal))


_TARGET = re.compile(r"[+-]?[0-9]{1,32}([./][0-9]{1,32})?")


def _exact_target(target: Target) -> Fraction:
    try:
        return _fraction(target)
    except (TypeError, ValueError, OverflowError, ZeroDivisionError):  # not a number, not finite, or a denominator of 0
        expected = "a finite number or a string such as '98', '-11' or '27.4'"
        raise DataError(f"target must be {expected}, got {target!r:.100}") from None


@lru_cache(maxsize=4096)
def _fraction(target: Target) -> Fraction:
    if isinstance(target, Rational):
        return Fraction(int(target.numerator), int(target.denominator))
    # the pattern bounds the length and excludes exponents: Fraction("1e999999999") would not return
    if isinstance(target, float) or (isinstance(target, str) and _TARGET.fullmatch(target)):
        return Fraction(target)
    raise ValueError
