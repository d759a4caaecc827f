"""The generators of reasoning-gym as tasks, by name: sudoku, arc_1d, gsm_symbolic and about 100 more.

Puzzles are made here, from a seed, by exactly version 0.1.25 of the library (Apache-2.0): other versions make other
puzzles, are refused, and the version is in every row. A row has all that the library's `score_answer` needs.

1. The library makes puzzle i of a set from seed + i, so sets with seeds 0 and 1 share nearly all puzzles. Here each
   split of each seed has its own range of 2^20. Generators with few puzzles repeat themselves all the same: a question
   that the test set has is left out of validation and training, and one of validation out of training.
2. Rewards are the library's: 1 for a right answer, for wrong ones often something above 0 (a text that contains the
   right answer, a share of right cells), which can be gained without solving a puzzle. `right` gives 1 or 0.
3. Some of its graders evaluate the answer as code: by Python's `eval` (string_insertion, spiral_matrix, binary_matrix,
   n_queens), or by SymPy's `parse_expr`, which calls it (simple_integration, intermediate_integration,
   polynomial_multiplication, countdown). Two evaluate the row: number_sorting and bitwise_arithmetic. Here `eval` reads
   only literals, and what SymPy or bitwise_arithmetic evaluates must consist of numbers, operators and names of
   mathematics. A test searches the installed library for such calls. What remains can be slow: `REWARD_TIMEOUT` holds
   as in `mathematics`.
4. Some generators draw from Python's and NumPy's global random numbers: those are seeded for each puzzle, and restored.
   Five take an order from Python's hashes, so that their puzzles are the same in other processes only with the same
   PYTHONHASHSEED: isomorphic_strings, knight_swap, polynomial_multiplication, ransom_note, word_ladder.
5. Left out: see `REFUSED`.

The prompts with which Qiu et al. (arXiv 2509.24372) trained on Sudoku and ARC-AGI are not in their published code; the
library's own are options here.
"""

import ast
import importlib
import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import numpy as np

from evoalign_lib import tasks
from evoalign_lib.checks import choose, require, whole_number
from evoalign_lib.rewards import DataError
from evoalign_lib.tasks import mathematics

VERSION = "0.1.25"
REWARD_FLOOR = 0.0
REWARD_TIMEOUT = 10.0
MAX_COMPLETION_LENGTH = 1024
MAX_ANSWER = 10_000
"""Characters of the longest answer that is read."""
EXTRACTIONS = ("tags", "boxed", "whole")
r"""Where an answer stands: in the last <answer> tags, in the last \boxed{}, or it is the whole completion."""
PROMPTS = ("default", "simple", "direct", "chain_of_draft", "DeepSeekZero", "boxed", "question")
r"""System messages of the library, which ask for <answer> tags; that of `mathematics`, for \boxed{}; none."""
REFUSED = {
    "codeio": "its generator executes the programs of a data file",
    "composite": "it mixes other generators: join their rows instead",
    "game_of_life_halting": "its grader takes every text for right",
    "puzzle24": "its grader takes 24 from any four numbers for right, so that one answer serves for all",
}
"""Generators that are left out, and why."""
SPLITS = ("test", "validation", "train")

_RANGE = 1 << 20
_EVALUATE = ("string_insertion", "spiral_matrix", "number_sorting", "binary_matrix", "n_queens")  # all in algorithmic
# generators that parse answers as expressions -> where a row has another one
_PARSE = dict.fromkeys(("polynomial_multiplication", "countdown"), "answer")
_PARSE |= dict.fromkeys(("simple_integration", "intermediate_integration"), "integrand") | {
    "bitwise_arithmetic": "problem"
}
_NAME = r"(?:a?(?:sin|cos|tan|sinh|cosh|tanh)|exp|log|ln|sqrt|Abs|pi|0x[0-9a-fA-F]++|[A-Za-z])(?![A-Za-z])"
# possessive: a long number could otherwise be split in 2^digits ways before the text behind it is refused
_EXPRESSION = re.compile(rf"(?:\s|\d++(?:\.\d*+)?+|\.\d++|[-+*/^()<>&|~]|(?<![A-Za-z\d.]){_NAME})*")


class Puzzle(NamedTuple):
    """A question, an answer of the library (None: it knows none), and the row for its grader, as JSON."""

    question: str
    answer: str | None
    puzzle: str


@lru_cache(maxsize=1)
def _library() -> Any:
    """Import the library, in its pinned version, with `eval` replaced where answers are evaluated."""
    try:
        found = version("reasoning-gym")
    except PackageNotFoundError:
        found = "none"
    if found != VERSION:
        said = f"puzzles are made by reasoning-gym {VERSION}, and {found} is installed"
        raise ImportError(f"{said}: pip install 'evoalign[tasks]' reasoning-gym=={VERSION}")
    import reasoning_gym

    for name in _EVALUATE:
        room = "games" if name == "n_queens" else "algorithmic"
        vars(importlib.import_module(f"reasoning_gym.{room}.{name}"))["eval"] = ast.literal_eval
    return reasoning_gym


def names() -> list[str]:
    """Return the names of the generators. Raises ImportError if the library is missing or has another version."""
    return sorted(_library().factory.DATASETS.keys() - REFUSED.keys())


def _encoded(value: Any) -> Any:
    """Return a value for JSON, in which graders will find the tuples and the numbers as keys that they look for."""
    if isinstance(value, dict):
        return {"dict": [[_encoded(key), _encoded(each)] for key, each in value.items()]}
    if isinstance(value, (list, tuple, set)):
        return {type(value).__name__: [_encoded(each) for each in value]}
    if isinstance(value, Fraction):
        return {"fraction": [value.numerator, value.denominator]}
    return value.value if hasattr(value, "value") else value.item() if hasattr(value, "item") else value


def _decoded(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, parts),) = value.items()
    parts = [list(map(_decoded, each)) if kind == "dict" else _decoded(each) for each in parts]
    made = {"dict": dict, "list": list, "tuple": tuple, "set": set, "fraction": lambda parts: Fraction(*parts)}
    return made[kind](parts)


@lru_cache(maxsize=32)
def _generator(name: str, config: str) -> Any:
    return _library().create_dataset(name, **json.loads(config))


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    kept = random.getstate(), np.random.get_state()  # noqa: NPY002  # the library draws from them
    try:
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])  # noqa: NPY002


def _made(split: str, name: str, seed: int, n: int, settings: dict[str, Any], taken: set[str]) -> list[Puzzle]:
    start = (3 * seed + SPLITS.index(split)) * _RANGE
    attempts = 5 * n + 50
    config, found = json.dumps(settings | {"seed": start, "size": attempts}), []
    with _seeded(start):
        generator = _generator(name, config)
    for i in range(attempts):
        if len(found) == n:
            return found
        with _seeded(start + i):
            entry = generator[i]
        if entry["question"] not in taken:
            taken.add(entry["question"])
            row = {"name": name, "version": VERSION, "config": config, "entry": _encoded(entry)}
            found.append(Puzzle(entry["question"], entry["answer"], json.dumps(row)))
    few = f"{name} has made {len(found)} new questions of {n} for {split} in {attempts} attempts"
    raise ValueError(f"{few}: ask for fewer, or for longer ones by its settings, {settings}.")


@lru_cache(maxsize=32)
def _problems(split: str, name: str, sizes: tuple[int, ...], seed: int, config: str) -> tuple[Puzzle, ...]:
    settings, taken, found = json.loads(config), set(), []
    for part, n in zip(SPLITS, sizes, strict=True):
        found = _made(part, name, seed, n, settings, taken)
        if part == split:
            break
    return tuple(found)


def problems(
    split: str,
    name: str = "gsm_symbolic",
    train: int = 1000,
    validation: int = 100,
    test: int = 200,
    seed: int = 0,
    **config: Any,
) -> tuple[Puzzle, ...]:
    """Return the puzzles of a split; the splits share no question.

    Args:
        split: "train", "validation" or "test".
        name: the generator, one of `names()`.
        train, validation, test: number of puzzles. The test set is the same whatever the others are, and validation
            whatever train is.
        seed: 0 to 1000; every seed has its own puzzles.
        **config: settings of the generator, such as min_empty=8 for mini_sudoku.

    Raises:
        ValueError: an unknown split, generator or setting, or more puzzles than the generator has.
        ImportError: reasoning-gym is not installed in version `VERSION`.
    """
    choose("split", split, SPLITS)
    require(name not in REFUSED, f"name={name!r} is left out: {REFUSED.get(name)}.")
    choose("name", name, names())
    whole_number("seed", seed, 0, 1000)
    sizes = {"test": test, "validation": validation, "train": train}
    for part, n in sizes.items():
        whole_number(part, n, 1, _RANGE // 10)
    known = _library().factory.DATASETS[name][1].__dataclass_fields__.keys() - {"seed", "size"}
    for setting in config:
        choose("setting", setting, sorted(known))
    return _problems(split, name, tuple(sizes.values()), seed, json.dumps(config, sort_keys=True))


def dataset(
    asked: Iterable[Puzzle], tokenizer: Any = None, chat_template: bool = True, prompt: str = "default"
) -> list[dict[str, Any]]:
    """Return rows for a trainer: the question as messages, the answer, and the column `puzzle` that `reward` takes.

    Args:
        asked: the puzzles.
        tokenizer: not needed, since prompts are messages, which the trainers render.
        chat_template: must be True.
        prompt: one of `PROMPTS`.

    Raises:
        ValueError: chat_template is False, or an unknown prompt.
    """
    require(chat_template, "chat_template=False: these are questions to instruct models. Leave it out.")
    choose("prompt", prompt, PROMPTS)
    own = {"boxed": mathematics.PROMPTS["boxed"][0], "question": ""}
    system = own[prompt] if prompt in own else _library().utils.SYSTEM_PROMPTS[prompt]
    return [
        {
            "prompt": [{"role": "system", "content": system}] * bool(system)
            + [{"role": "user", "content": each.question}],
            "answer": each.answer,
            "puzzle": each.puzzle,
        }
        for each in asked
    ]


def answer(completion: str, extraction: str = "tags") -> str | None:
    """Return the answer in a completion; None if it has none. Raises ValueError for an unknown extraction.

    >>> [answer(text) for text in ("<answer>1</answer> or <answer> 2\\n3 </answer>", "4")]
    ['2\\n3', None]
    """
    choose("extraction", extraction, EXTRACTIONS)
    if extraction != "tags":
        return mathematics.boxed(completion) if extraction == "boxed" else completion.strip()
    head, closed, _ = completion.rpartition("</answer>")
    return head.rpartition("<answer>")[2].strip() if closed and "<answer>" in head else None


@lru_cache(maxsize=4096)
def _row(puzzle: str) -> tuple[Any, dict[str, Any]]:
    """Return the generator and the entry of a row, checked."""
    try:
        row = json.loads(puzzle)
        name, made, entry = row["name"], row["version"], _decoded(row["entry"])
        config = json.loads(row["config"])
    except (TypeError, ValueError, KeyError) as error:
        raise DataError(f"a puzzle must be a row of `dataset`, got {puzzle!r:.200} ({error!r:.100})") from None
    if made != VERSION or name not in names():
        raise DataError(f"the puzzle is of {name!r} in reasoning-gym {made}: make it again, with {VERSION}.")
    own = {**entry["metadata"], "answer": entry["answer"]}.get(_PARSE.get(name), "")
    if not _EXPRESSION.fullmatch(str(own)):
        raise DataError(f"the puzzle of {name!r} has {own!r:.100} in the place of an expression")
    return _generator(name, json.dumps(config)), entry


def grade(completion: str, puzzle: str, extraction: str = "tags") -> float:
    """Return the library's score of the answer in a completion; what its grader cannot read is worth 0.

    Raises DataError for a puzzle that is not of this version or no row of `dataset`.
    """
    generator, entry = _row(puzzle)
    said = answer(completion, extraction)
    if said is None or len(said) > MAX_ANSWER:
        return 0.0
    name = json.loads(puzzle)["name"]
    if name in _PARSE and not _EXPRESSION.fullmatch(said):
        return 0.0
    try:
        return float(generator.score_answer(said, entry))
    except Exception:  # some graders raise on wrong answers: prime_factorization on "2 x three"
        return 0.0


def reward(
    prompts: Sequence[Any], completions: Sequence[Any], puzzle: Sequence[str], extraction: str = "tags", **columns: Any
) -> list[float]:
    """Score completions by the library's graders, as a reward function for TRL's trainers and `ESTrainer`.

    Args:
        prompts: (completions,) the prompts; only their number is checked.
        completions: (completions,) strings, or conversations, whose assistant messages are scored.
        puzzle: (completions,) the column of `dataset`.
        extraction: one of `EXTRACTIONS`.
        **columns: further columns of the data set, ignored.

    Raises:
        ValueError: columns of different lengths, or an unknown extraction.
        TypeError: a completion that is neither a string nor a conversation.
        DataError (a TypeError and a ValueError): a puzzle of another version, or no row of `dataset`.
    """
    tasks.check_lengths(prompts=prompts, completions=completions, puzzle=puzzle)
    texts = map(tasks.completion_text, completions)
    return [grade(text, row, extraction) for text, row in zip(texts, puzzle, strict=True)]


def right(prompts: Sequence[Any], completions: Sequence[Any], puzzle: Sequence[str], **columns: Any) -> list[float]:
    """Score completions 1 if the library's score is 1, else 0; arguments and errors are those of `reward`."""
    return [float(score >= 1) for score in reward(prompts, completions, puzzle, **columns)]
