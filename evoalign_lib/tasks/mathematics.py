r"""Mathematics graded by math-verify: GSM8K, MATH500, Minerva and OlympiadBench, by name.

| name | on the Hub | splits |
|---|---|---|
| gsm8k | openai/gsm8k, main | train, validation (the last 500 of train), test |
| math500 | nlile/hendrycks-MATH-benchmark: 12,000 problems for training, and MATH500 | the same |
| minerva | math-ai/minervamath | test |
| olympiadbench | Hothan/OlympiadBench, OE_TO_maths_en_COMP: open-ended, text only | test |

Reward: 1 for a right answer, else 0, as in the published studies; `format_reward` is a function of its own, to be added
with a weight. A completion's answer is what stands in its last \boxed{}; `functools.partial(reward, extraction=...)`
takes other forms. Like es-at-scale, which calls math-verify in the end, an answer equal to the reference as text is
right before anything is parsed. An expression that is left to be worked out, such as 48 + 24, counts as its value.

Completions are untrusted. What was read in math-verify 0.9.0, latex2sympy2_extended 1.11.0 and SymPy 1.14.0:

1. LaTeX is parsed by a grammar, letter by letter: `print(7)` is a product of symbols. Arguments of functions are parsed
   by the same grammar. Functions are taken by names that the code lists; a name in \operatorname becomes a symbol.
2. Plain expressions reach SymPy's `parse_expr`, which is Python's `eval`, but a pattern lets through only digits, dots,
   blanks, brackets and + - * / ^. Numbers reach `sympify`, and consist of digits. No letter is ever evaluated: a test
   watches `eval` while hostile answers are graded.
3. Its time limits use SIGALRM, which works in the main thread alone and cancels the alarms of others: they are off.
   SymPy can hang on 9^{9^{9}} or 99999999!, and its patterns take quadratic time. So numbers raised to large powers and
   answers of more than `MAX_ANSWER` characters are wrong without being read, and `REWARD_TIMEOUT` holds for the rest:
   `ESTrainer` and this library's GRPO kill the process that grades, score the floor and count it. Called in another way
   (by TRL's own trainers), the functions have no limit of time.
"""

import json
import logging
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from evoalign_lib import tasks
from evoalign_lib.checks import choose, require
from evoalign_lib.rewards import DataError

REWARD_FLOOR = 0.0
REWARD_TIMEOUT = 10.0
"""Seconds that a call may take where `reward_timeout` is not set (`rewards.Rewards`)."""
MAX_COMPLETION_LENGTH = 1024
MAX_ANSWER = 1_000
"""Characters of the longest answer that is read."""
EXTRACTIONS = ("boxed", "hashes", "anywhere")
r"""Where an answer stands: in the last \boxed{}; after the last "####", as in GSM8K; or where math-verify finds one."""

_STEPS = "Please reason step by step, and put your final answer within \\boxed{}."
PROMPTS = {"boxed": (_STEPS, ""), "boxed_user": ("", "\n" + _STEPS), "question": ("", "")}
"""Name -> system message and what follows the question: that of Qwen2.5-Math, which es-at-scale uses; the same sentence
after the question, for models without system messages; and the question alone."""


class Source(NamedTuple):
    """Where a set lies on the Hub: its id, configuration and columns, and the Hub's name of each split."""

    hub: str
    config: str | None
    question: str
    answer: str
    splits: dict[str, str]


_WHOLE = {"train": "train", "validation": "train", "test": "test"}
SOURCES: dict[str, Source] = {
    "gsm8k": Source("openai/gsm8k", "main", "question", "answer", _WHOLE),
    "math500": Source("nlile/hendrycks-MATH-benchmark", None, "problem", "answer", _WHOLE),
    "minerva": Source("math-ai/minervamath", None, "question", "answer", {"test": "test"}),
    "olympiadbench": Source(
        "Hothan/OlympiadBench", "OE_TO_maths_en_COMP", "question", "final_answer", {"test": "train"}
    ),
}
_VALIDATION = 500


class Problem(NamedTuple):
    """A question and its reference answers, of which any one is right."""

    question: str
    answers: tuple[str, ...]


def names() -> list[str]:
    """Return the names of the sets."""
    return list(SOURCES)


def reference(answer: str | Sequence[str]) -> tuple[str, ...]:
    """Return the reference answers in a column: GSM8K's stand after "####", those of OlympiadBench are a list.

    >>> reference("48/2 = 24. 48 + 24 = 72.\\n#### 1,072"), reference(["$2$", "4"])
    (('1072',), ('2', '4'))
    """
    if not isinstance(answer, str):
        return tuple(part for each in answer for part in reference(each))
    last = answer.rpartition("####")[2].strip() if "####" in answer else answer.strip()
    last = last.replace(",", "") if re.fullmatch(r"-?\d{1,3}(,\d{3})+(\.\d+)?", last) else last
    return (last.strip("$") if last.count("$") == 2 and last[0] == last[-1] == "$" else last,)


@lru_cache(maxsize=8)
def problems(split: str, name: str = "gsm8k") -> tuple[Problem, ...]:
    """Return the problems of a split, in the order of the file.

    A file EVOALIGN_DATA/mathematics/NAME.SPLIT.jsonl with the Hub's columns is used if there is one; then "validation"
    is a file, too.

    Raises:
        ValueError: an unknown set, or a split that it does not have; the message says which it has.
        FileNotFoundError: the set is not in the cache and the Hub cannot be reached.
    """
    choose("name", name, SOURCES)
    source = SOURCES[name]
    known = ", ".join(source.splits)
    require(split in source.splits, f"{name} has no split {split!r}, but {known}. Sets to train on: gsm8k, math500.")

    def made(row: dict[str, Any]) -> Problem:
        return Problem(row[source.question].strip(), reference(row[source.answer]))

    if found := tasks.local_file(own := f"mathematics/{name}.{split}.jsonl"):
        return tuple(tasks.json_lines(found.read_bytes(), found, made))
    from datasets import load_dataset

    try:
        rows = [made(row) for row in load_dataset(source.hub, source.config, split=source.splits[split])]
    except (OSError, ValueError) as error:  # without a network, and in offline mode
        where = f"cannot load {source.hub} from the Hub ({type(error).__name__}: {error!s:.200})"
        raise FileNotFoundError(f"{where}. Connect, or set EVOALIGN_DATA to a folder that holds {own}.") from error
    parts = {"train": rows[:-_VALIDATION], "validation": rows[-_VALIDATION:]} if "train" in source.splits else {}
    return tuple(parts.get(split, rows))


def dataset(
    asked: Iterable[Problem], tokenizer: Any = None, chat_template: bool = True, prompt: str = "boxed"
) -> list[dict[str, Any]]:
    """Return rows for a trainer: the question as messages, and the column `answer` that `reward` takes, as JSON.

    Args:
        asked: the problems.
        tokenizer: not needed, since prompts are messages, which the trainers render.
        chat_template: must be True.
        prompt: one of `PROMPTS`.

    Raises:
        ValueError: chat_template is False, an unknown prompt, or a reference answer that no answer would equal.
        ImportError: math-verify is not installed.
    """
    require(chat_template, "chat_template=False: these are questions to instruct models. Leave it out.")
    choose("prompt", prompt, PROMPTS)
    _library()  # missing, it would be missed hours later; loaded, forks have it
    system, then = PROMPTS[prompt]
    rows = []
    for problem in asked:
        _check(problem.answers)
        messages = [{"role": "system", "content": system}] * bool(system)
        messages.append({"role": "user", "content": problem.question + then})
        rows.append({"prompt": messages, "answer": json.dumps(problem.answers)})
    return rows


def boxed(text: str) -> str | None:
    r"""Return what stands in the last \boxed{} or \fbox{} of a text; None if there is none, or it is not closed.

    Empty ones do not count: small models repeat that their answer is "within \boxed{}".

    >>> [boxed(text) for text in (r"\boxed{1}, so \boxed{\frac{1}{2}}.", r"\boxed{\left\{1", "72")]
    ['\\frac{1}{2}', None, None]
    """
    for start in reversed(list(re.finditer(r"\\(?:boxed|fbox)\{", text))):
        depth, escaped = 1, False
        for i in range(start.end(), len(text)):
            depth += 0 if escaped else {"{": 1, "}": -1}.get(text[i], 0)
            escaped = text[i] == "\\" and not escaped
            if not depth:
                break
        else:
            return None
        if found := text[start.end() : i].strip():
            return found
    return None


def answer(completion: str, extraction: str = "boxed") -> str | None:
    """Return the answer in a completion; None if it has none.

    With "anywhere", that is the last `MAX_ANSWER` characters of a completion without a box, in which math-verify finds
    an answer or not; the numbers of a numbered list are left out. Raises ValueError for an unknown extraction.
    """
    choose("extraction", extraction, EXTRACTIONS)
    if extraction == "hashes":
        return completion.rpartition("####")[2].strip().partition("\n")[0] if "####" in completion else None
    found = boxed(completion)
    if extraction == "anywhere" and found is None:
        return re.sub(r"(?m)^[ \t]*\d{1,2}[.)][ \t]+(?=\S)", "", completion[-MAX_ANSWER:])
    return found


@lru_cache(maxsize=1)
def _library() -> Any:
    try:
        import math_verify
    except ImportError as error:
        remedy = "pip install 'evoalign[tasks]'"
        raise ImportError(f"mathematics is graded by math-verify, which is not installed: {remedy}") from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
    return math_verify


def _check(answers: Sequence[str]) -> None:
    fits = bool(answers) and all(type(each) is str and 0 < len(each) <= MAX_ANSWER for each in answers)
    if not fits:
        raise DataError(f"an answer must be a text of 1 to {MAX_ANSWER} characters, got {answers!r:.200}")


# a number to a power of at least five digits, or to one that is itself a power of a number
_TOWER = re.compile(r"(?:\^|\*\*)[\s{(+-]*\d(?:[\d,.]{4}|[\d,.]*[\s})]*(?:\^|\*\*|!))|\d{6}\s*!|![\s)}]*!")
_INTEGER = re.compile(r"-?\d{1,15}", re.ASCII)


def _plain(text: str) -> str:
    """Return a text without dollars, \\text around it and a last full stop, and 4.5e33 as math-verify reads it."""
    inner = re.fullmatch(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}", text.strip())
    text = re.sub(r"\\?\$|\s*\bdollars?\b", "", inner[1] if inner else text).replace("\n", " ").strip().rstrip(".")
    return re.sub(r"(?<=\d)[eE]([+-]?\d{1,4})\b", r"\\times 10^{\1}", text)


@lru_cache(maxsize=1 << 15)  # members of a population answer alike
def _equal(said: str, right: str, whole: bool) -> bool:
    """Return whether an answer, or with `whole` the answer that math-verify finds in a text, equals the reference."""
    said, right = said if whole else _plain(said), _plain(right)
    bare, wanted = (re.sub(r"(?<!\d)\s|\s(?!\d)|\\[ ,!;]", "", text) for text in (said, right))
    if not bare or bare == wanted:
        return bare == wanted
    if _INTEGER.fullmatch(bare) and _INTEGER.fullmatch(wanted):
        return int(bare) == int(wanted)
    if _TOWER.search(said):
        return False
    library = _library()
    own = library.LatexExtractionConfig(boxed_match_priority=0), library.ExprExtractionConfig()
    how: dict[str, Any] = {"fallback_mode": "no_fallback", "parsing_timeout": None}
    gold, found = (library.parse(text, own, **how) for text in (f"${right}$", said if whole else f"${said}$"))
    return library.verify(gold, found, timeout_seconds=None)


def grade(completion: str, answers: Sequence[str], extraction: str = "boxed") -> bool:
    r"""Return whether the answer in a completion equals one of the reference answers.

    >>> [grade(f"so \\boxed{{{text}}}", ["1/2"]) for text in (r"\frac{2}{4}", "0.5", "2", "9^{9^{9}}")]
    [True, True, False, False]
    """
    said = answer(completion, extraction)
    whole = extraction == "anywhere" and boxed(completion) is None
    return said is not None and len(said) <= MAX_ANSWER and any(_equal(said, each, whole) for each in answers)


def reward(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    answer: Sequence[str],
    extraction: str = "boxed",
    **columns: Any,
) -> list[float]:
    """Score completions, 1 if right and else 0, as a reward function for TRL's trainers and `ESTrainer`.

    Args:
        prompts: (completions,) the prompts; only their number is checked.
        completions: (completions,) strings, or conversations, whose assistant messages are scored.
        answer: (completions,) the reference answer as text, or several as a JSON list of texts.
        extraction: one of `EXTRACTIONS`.
        **columns: further columns of the data set, ignored.

    Raises:
        ValueError: columns of different lengths, or an unknown extraction.
        TypeError: a completion that is neither a string nor a conversation.
        DataError (a TypeError and a ValueError): a reference answer that is no text, empty or too long.
    """
    tasks.check_lengths(prompts=prompts, completions=completions, answer=answer)
    scores = []
    for text, right in zip(completions, answer, strict=True):
        listed = isinstance(right, str) and right.startswith('["')
        answers = tuple(json.loads(right)) if listed else (right,)
        _check(answers)
        scores.append(float(grade(tasks.completion_text(text), answers, extraction)))
    return scores


def format_reward(completions: Sequence[Any], **columns: Any) -> list[float]:
    r"""Score completions 1 if they have a closed \boxed{} that is not empty, else 0; to be given a small weight."""
    return [float(bool(boxed(tasks.completion_text(text)))) for text in completions]
