"""What a notebook finds, by name: the numbers that its sentences, its tables and the paper's macros are read from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evoalign_lib.analysis.stats import Interval

Results = dict[str, Interval | float | int | None]
"""Name -> number, or interval; None where too few runs give none."""

UNDER = {"greedy": "greedily", "t0.6": "at temperature 0.6", "t1": "at temperature 1"}
"""Decoding -> its name in a sentence."""


def macros(results: Results, table: Mapping[str, tuple[str, str]]) -> dict[str, tuple[Any, str]]:
    """Return macro -> value and format, as `Store.save_numbers` takes them.

    Args:
        results: what the notebook found.
        table: macro -> name in the results, and format; of an interval as for `stated`. "NAME/low" names an end of an
            interval, "NAME/value" its value. What the results lack, as at another scale, has no macro.
    """
    found: dict[str, tuple[Any, str]] = {}
    for macro, (name, form) in table.items():
        name, _, end = name.partition("/")
        value = results.get(name)
        if end and value is not None:
            factor = 100 if form[-1] == "%" else 1
            found[macro] = (factor * getattr(value, end), form.replace("%", "f"))
        elif name in results and not end:
            found[macro] = (stated(value, form), "") if value is None or isinstance(value, Interval) else (value, form)
    return found


def stated(interval: Interval | None, form: str = ".1%", missing: str = "none") -> str:
    """Return an interval as text.

    Args:
        interval: what is stated.
        form: ".1%" for points with one decimal, ".2f" for the unit that it has, with two.
        missing: stands in the place of no interval.

    >>> stated(Interval(0.412, 0.39, 0.43, 8)), stated(Interval(0.412, 0.39, 0.43, 8), ".2f"), stated(None)
    ('41.2 [39.0, 43.0]', '0.41 [0.39, 0.43]', 'none')
    """
    return missing if interval is None else interval.format(percent=form[-1] == "%", digits=int(form[1:-1]))


def excludes_zero(interval: Interval) -> bool:
    """Say whether an interval has one sign."""
    return interval.low * interval.high > 0


def listed(words: Sequence[str]) -> str:
    """Return words as a list in a sentence.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def sentence(parts: Sequence[str]) -> str:
    """Return parts of a sentence, joined, with a capital at the beginning."""
    text = "; ".join(parts)
    return text[0].upper() + text[1:]
