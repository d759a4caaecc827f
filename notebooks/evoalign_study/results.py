"""Turn a notebook's named results into its sentences, table cells and the paper's macros."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evoalign_lib.analysis.stats import Interval
from evoalign_study import style

if TYPE_CHECKING:
    from pandas import DataFrame

Results = Mapping[str, Any]
"""A notebook's results by name: numbers, intervals and words, and None where there are too few runs for a number."""
MISSING = "-"
"""Stands in a cell for which no run has a value."""
_NAME = re.compile(r"\{([^{}]+?)(?:\.(value|low|high|n))?(?::([^\s:{}]*))?\}")


def stated(value: Any, form: str | None = None, missing: str = "none") -> str:
    """Format a number or an interval as text.

    Args:
        value: a number, an interval, or a text, which is returned unchanged.
        form: a Python format spec, but percentages are written without the % sign. For an interval it sets the digits,
            ".1%" by default.
        missing: text for None and NaN. An interval of several units without ends becomes "not to be told".

    >>> stated(Interval(0.412, 0.39, 0.43, 8)), stated(Interval(0.412, 0.39, 0.43, 8), ".2f"), stated(0.5, ".0%")
    ('41.2 [39.0, 43.0]', '0.41 [0.39, 0.43]', '50')
    """
    if isinstance(value, Interval):
        form = form or ".1%"
        untold = value.n > 1 and value.low != value.low
        return "not to be told" if untold else value.format(percent=form[-1] == "%", digits=int(form[1:-1]))
    if value is None or value != value:
        return missing
    if isinstance(value, str):
        return value
    text = format(value, form or "").removesuffix("%")
    return text.removeprefix("-") if form and form[-1] in "f%" and not float(text.replace(",", "")) else text


def told(sentence: str, results: Results, missing: str | None = None) -> str | None:
    """Fill the numbers into a sentence; return None if a number is missing.

    Args:
        sentence: names stand in braces, with a format after a colon (`stated`): {gain}, {share:.2%}; {gain.value} and
            {gain.n} are parts of an interval.
        results: numbers and intervals by name.
        missing: text for values that are None or NaN; without it, they count as missing.

    >>> told("{gain} points (n = {gain.n}), {solved:.0%} %", {"gain": Interval(0.412, 0.39, 0.43, 8), "solved": 0.5})
    '41.2 [39.0, 43.0] points (n = 8), 50 %'
    """

    def number(found: re.Match[str]) -> str:
        name, part, form = found.groups()
        value = results[name]
        if missing is None and (value is None or value != value):
            raise KeyError(name)
        return stated(getattr(value, part, None) if part else value, form, missing or "none")

    try:
        return _NAME.sub(number, sentence)
    except KeyError:
        return None


@cache
def _file(name: str) -> dict[str, dict[str, str | list[str]]]:
    import yaml

    return yaml.safe_load((Path(__file__).parent / name).read_text(encoding="utf-8"))


def answered(part: str, results: Results) -> dict[str, str]:
    """Return question -> answer with its numbers filled in, for a part of answers.yaml, which is a notebook's name.

    Of several sentences, the first with all its numbers is used; if there is none, the first whose names all exist in
    the results, with "unknown" for values that too few runs leave undefined. A question without either is left out.
    """
    answers = {}
    for question, sentences in _file("answers.yaml")[part].items():
        each = [sentences] if isinstance(sentences, str) else sentences
        texts = [told(sentence, results, missing) for missing in (None, "unknown") for sentence in each]
        if known := [text for text in texts if text]:
            answers[told(question, results) or question] = known[0]
    return answers


def macros(part: str, results: Results) -> dict[str, tuple[str, str]]:
    """Return macro -> (text, empty format), as `Store.save_numbers` takes them, for a part of numbers.yaml.

    Macros whose numbers are not in the results, for example at another scale, are left out.
    """
    texts = {macro: told(text, results) for macro, text in _file("numbers.yaml")[part].items()}
    return {macro: (text, "") for macro, text in texts.items() if text is not None}


def as_text(frame: DataFrame, formats: Mapping[str, str], missing: str = "") -> DataFrame:
    """Return a frame with the columns named in `formats` as text (`stated`), and the others unchanged."""
    texts = {head: [stated(value, form, missing) for value in frame[head]] for head, form in formats.items()}
    return frame.assign(**texts)


def cells(frame: DataFrame, by: Sequence[str], columns: Mapping[str, tuple[str, str | Callable]]) -> DataFrame:
    """Return a table with a row per group of rows, in the order of the frame.

    Args:
        frame: a row per run, or per problem.
        by: columns that define the groups; they come first in the table.
        columns: head -> column, and the format of its mean (such as ".1f"; a dash if no row has a value), or the name
            of a pandas aggregation ("sum", "size"), or a function of the values.
    """
    import pandas as pd

    def function(how: Any) -> Any:
        if callable(how) or not how.startswith("."):
            return how
        return lambda values: format(values.mean(), how) if values.count() else MISSING

    groups = frame.groupby(list(by), sort=False)
    return pd.DataFrame({head: groups[name].agg(function(how)) for head, (name, how) in columns.items()}).reset_index()


def under(head: str, cell: Callable[[str], Any], decodings: Iterable[str] = ("greedy", "t1")) -> dict[str, Any]:
    """Return the cells of a row for several decodings.

    Args:
        head: head of the columns, with {} where the decoding's label goes.
        cell: returns the cell for a decoding, given its key.
        decodings: keys of `style.STROKES`.
    """
    return {head.format(style.STROKES[decoding].label): cell(decoding) for decoding in decodings}


def three_digits(x: float, whole: float = 1000, digits: int = 3) -> str:
    """Format a number with three significant digits (or `digits`), and from `whole` upwards as a whole number."""
    return f"{x:,.0f}" if x >= whole else f"{x:.{digits}g}"


def listed(words: Sequence[str]) -> str:
    """Join words as a list in a sentence.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def captioned(name: str, **words: Any) -> str:
    """Return the caption of a figure or table, from captions.yaml.

    Args:
        name: name of the figure or table.
        **words: values for the names in the caption.

    Raises:
        KeyError: a name without a caption, or a caption with a name that has no value.
    """
    if (caption := told(_file("captions.yaml")[name], words, "none")) is None:
        raise KeyError(f"the caption of {name!r} has names besides {sorted(words)}: pass a value for each")
    return caption


def named(name: str, **words: Any) -> tuple[str, str]:
    """Return a name and its caption (`captioned`), as `Store.save_table` takes them."""
    return name, captioned(name, **words)
