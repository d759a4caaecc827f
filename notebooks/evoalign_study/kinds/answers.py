"""What a model answers to each test problem: greedily, and one sample at temperature 1, as short texts.

Coverage says how likely a right answer is; these texts show what a model writes instead. A record has room for some 500
of them, so that a text is what `Measures.answer` finds in a completion, and the completion itself where it finds
nothing or where the task does not tell answers from completions. Whether a text is right is graded on the whole
completion, never on what is stored.

The texts of the problems stand in their order with a space between two. Each is percent-encoded ASCII (RFC 3986), so
that it has no space, quote or backslash, and comes back by `unpack_texts`; "!" before a text says that it is a
completion without an answer, and "$" behind it that its end was cut off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from evoalign_lib import tiny
from evoalign_lib.files import canonical_json
from evoalign_study import measures, specs, training, weight_cache
from evoalign_study.measures.base import Measures
from evoalign_study.records import MAX_RECORD, Record, Spec, pack_bits

DECODINGS = {"greedy": 0, "t1": 1}
"""Name in the record -> samples of each problem that are drawn; 0: decoded greedily."""
MOST = 320
"""Problems of a record, at most."""
LONGEST = 40
"""Characters of a text, at most; fewer where the record has no room for so many."""
_REST = 700
"""Bytes of a record beside its spec, its texts and its bits: budget, commit, environment, names."""
_NONE, _CUT = "!", "$"
_SAFE = "+*/()=-.,:;<>?@[]^_{|}~#&'`"  # "!", "$", "%" and what JSON escapes are not


class Written(NamedTuple):
    """What a model wrote to a problem."""

    text: str
    """The answer, or the completion."""
    answered: bool
    """Whether it is an answer that the task found in the completion, or any completion of a task that looks for none;
    else it is the completion, which gives none."""
    cut: bool
    """Whether it goes on."""


def answers_spec(base: str, end: Mapping[str, Any] | None, settings: Mapping[str, Any], scale: str) -> Spec:
    """Return the spec of what a model answers.

    Args:
        base: that the runs started from, one of the tiny world.
        end: the model, of `trained.end`; None: the base itself.
        settings: max_completion_length; coverage_problems, of the test set, 1 to 320; and what the task reads.
        scale: of the notebook.

    Raises:
        ValueError: too few test problems or too many, an end of another base, a setting that is missing, or what
            `specs.begin` refuses.
    """
    taken = specs.take(settings, ("max_completion_length", "coverage_problems"), "a run of kind 'answers'")
    n = taken["coverage_problems"]
    if not 1 <= n <= MOST:
        raise ValueError(f"coverage_problems={n}: a record has room for the answers to 1 to {MOST}, take so many.")
    own = {"max_completion_length": taken["max_completion_length"], "test_problems": n}
    # a test set that says what is right needs no list of right answers: every base can be asked
    asked = {name: value for name, value in settings.items() if name != "validation_problems"} | own
    spec = specs.begin_tiny("answers", base, scale, asked, tiny.SHIPPED) | own
    return weight_cache.at_end(spec, end)


def run(spec: Spec) -> Record:
    """Return what a model answers to the test problems.

    The record has `n`, problems; `longest`, the characters after which texts are cut; `greedy` and `t1`, the texts
    (`pack_texts`), and `greedy_bits` and `t1_bits`, which of them are right (`records.pack_bits`). All models draw
    their sample with the same random numbers.

    Raises:
        ValueError: the spec is so long that the record has no room for the texts, or the weights are not those of
            their record.
    """
    measure = measures.get(spec["task"])
    model, tokenizer, sets = training.world(spec)
    problems = sets["test"]
    with closing(training.evaluation_engine(spec, model, tokenizer, {"test": problems})) as engine:
        if "end" in spec:
            start, layout = engine.master.copy(), engine.layout
            engine.master[:] = weight_cache.moved(start, weight_cache.displacement(spec["end"], start, layout))
        engine.write_model()
        result: Record = {"n": len(problems)}
        found = {}
        for name, samples in DECODINGS.items():
            (row,) = engine.generate("test", samples=samples, seed=0)
            texts = [text for text, _ in row]
            right = [int(measure.right(*pair)) for pair in zip(problems, texts, strict=True)]
            result[f"{name}_bits"] = pack_bits(right)
            found[name] = [_answered(measure, text) for text in texts]
    bits = sum(len(result[f"{name}_bits"]) for name in DECODINGS)
    room = MAX_RECORD - _REST - len(canonical_json(spec)) - bits
    return result | _fitting(found, room)


def _answered(measure: Measures, completion: str) -> tuple[str, bool]:
    """Return the answer of a completion, or the completion; and whether it is an answer."""
    try:
        answer = measure.answer(completion)
    except NotImplementedError:  # the task counts no answers together
        return completion, True
    return (completion, False) if answer is None else (answer, True)


def _fitting(found: Mapping[str, Sequence[tuple[str, bool]]], room: int) -> dict[str, Any]:
    """Return the packed texts of each decoding, cut to the greatest length at which they fit, and that length.

    room: bytes. Raises ValueError where not even empty texts fit.
    """
    for longest in range(LONGEST, -1, -1):
        packed = {name: pack_texts(texts, longest) for name, texts in found.items()}
        if sum(map(len, packed.values())) <= room:
            return {"longest": longest} | packed
    raise ValueError(
        f"answers in {room} bytes: the spec leaves no room for {len(next(iter(found.values())))} texts of each "
        "decoding. Ask fewer problems (coverage_problems)."
    )


def pack_texts(texts: Sequence[tuple[str, bool]], longest: int = LONGEST) -> str:
    """Return texts as one ASCII text, in their order; see the top of the module.

    texts: (problems,), each with whether it is an answer. longest: characters after which a text is cut.
    Raises ValueError for no texts.

    >>> pack_texts([("3*(2+4)", True), ("a b", False), ("123456", True)], longest=5)
    '3*(2+$ !a%20b 12345$'
    """
    if not texts:
        raise ValueError("no texts: a row of answers has at least one.")
    return " ".join(
        ("" if answered else _NONE)
        + quote(text[:longest], safe=_SAFE, errors="replace")
        + (_CUT if len(text) > longest else "")
        for text, answered in texts
    )


def unpack_texts(packed: str, n: int) -> list[Written]:
    """Return the (n,) texts that `pack_texts` wrote. Raises ValueError if they are not so many.

    >>> unpack_texts("3*(2+$ !a%20b", 2)
    [Written(text='3*(2+', answered=True, cut=True), Written(text='a b', answered=False, cut=False)]
    """
    parts = packed.split(" ")
    if len(parts) != n:
        raise ValueError(f"{len(parts)} texts where there are {n} problems: damaged record")
    return [
        Written(unquote(part.removeprefix(_NONE).removesuffix(_CUT)), not part.startswith(_NONE), part.endswith(_CUT))
        for part in parts
    ]
