"""Sentences and macros that read their numbers from what a notebook finds."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan
from string import Formatter
from typing import Any

from evoalign_lib.analysis.stats import Interval
from evoalign_study.results import Results, stated


def worded(value: Interval | float | int | None, form: str = "") -> str:
    """Return a number as a sentence has it.

    Args:
        value: of an interval of several units without ends, "not to be told"; of None, "none".
        form: as Python's format, but percent have no sign; an interval without form is in points with one decimal.

    >>> worded(Interval(0.412, 0.39, 0.43, 8)), worded(0.5, ".0%")
    ('41.2 [39.0, 43.0]', '50')
    """
    if not isinstance(value, Interval):
        return "none" if value is None else format(value, form).removesuffix("%")
    return "not to be told" if value.n > 1 and isnan(value.low) else stated(value, form or ".1%")


class _Teller(Formatter):
    def format_field(self, value: Any, form: str) -> str:
        return worded(value, form)


def told(sentence: str, results: Results) -> str:
    """Return a sentence with numbers in the place of their names.

    Args:
        sentence: names stand in braces, with a format after a colon (`worded`): {gain}, {share:.2%}; {gain.value} and
            {gain.n} are parts of an interval.
        results: the numbers and intervals by name.

    >>> told("{gain} points (n = {gain.n}), {solved:.0%} %", {"gain": Interval(0.412, 0.39, 0.43, 8), "solved": 0.5})
    '41.2 [39.0, 43.0] points (n = 8), 50 %'
    """
    return _Teller().vformat(sentence, (), results)


def macros_told(results: Results, table: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return macro -> text, as `Store.save_numbers` takes it; table: macro -> name and format, as in a sentence."""
    return {macro: (told(f"{{{name}}}", results), "") for macro, name in table.items()}
