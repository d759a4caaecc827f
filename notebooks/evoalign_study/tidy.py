"""What several notebooks make of records in one way: curves as a frame, and the paper's macros from results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from evoalign_lib.analysis import stats
from evoalign_lib.analysis.stats import Interval
from evoalign_study.records import Record

if TYPE_CHECKING:
    from pandas import DataFrame

Results = Mapping[str, Interval | float]
"""What a notebook found, by name: the one place from which sentences, tables and macros take it."""
ENDS = ("value", "low", "high")
"""The parts of an interval that a macro can quote."""


def curve_band(records: Sequence[Record], axes: Sequence[str], decoding: str, scale: float = 100) -> DataFrame:
    """Return validation accuracy along runs of one setting, a row per point.

    Args:
        records: training runs with as many points.
        axes: budgets of the curve, of which the mean over runs is taken.
        decoding: its key in the records.
        scale: of the accuracies, 1 for shares.

    Returns:
        The axes; mean, low and high of accuracy (in %, if `scale` is 100), a 95 % band over seeds; and n, the runs.
    """
    import pandas as pd

    curves = [record["curve"] for record in records]
    budgets = {axis: np.mean([curve[axis] for curve in curves], axis=0) for axis in axes}
    band = stats.curve_band(scale * np.array([curve[f"validation_{decoding}"] for curve in curves]))
    return pd.DataFrame(budgets | dict(zip(("mean", "low", "high"), band, strict=True))).assign(n=len(curves))


def macros(results: Results, table: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[float, str]]:
    """Return macro -> value and format, as `Store.save_numbers` takes them.

    Args:
        results: of a notebook; what it lacks gets no macro.
        table: name -> key in the results, format, and for an interval the parts to quote, each a macro of its own:
            NAMEValue, NAMELow, NAMEHigh. Without parts the macro has the name alone, and of an interval the value. A
            format that ends in % gives the number in percent, without the sign.
    """
    made = {}
    for name, (key, form, *parts) in table.items():
        for part in parts or [""] if key in results else []:
            number = getattr(results[key], part or "value", results[key])
            number, shown = (100 * number, f"{form[:-1]}f") if form.endswith("%") else (number, form)
            made[name + part.title()] = number, shown
    return made


def as_text(frame: DataFrame, formats: Mapping[str, str], missing: str = "") -> DataFrame:
    """Return a frame with the columns of `formats` as text; others stay as they are.

    Args:
        frame: of numbers and intervals.
        formats: column -> format, as in `macros`; of an interval it has the digits, such as ".1%".
        missing: stands for None and NaN.
    """
    return frame.assign(
        **{head: [_text(value, form, missing) for value in frame[head]] for head, form in formats.items()}
    )


def _text(value: Interval | float | None, form: str, missing: str) -> str:
    if isinstance(value, Interval):
        return value.format(percent=form.endswith("%"), digits=int(form[1]))
    if value is None or np.isnan(value):
        return missing
    text = f"{100 * value:{form[:-1]}f}" if form.endswith("%") else f"{value:{form}}"
    return text.removeprefix("-") if form.endswith(("f", "%")) and not float(text) else text


def three_digits(x: float, whole: float = 1000, digits: int = 3) -> str:
    """Return a number with three digits (or `digits`), and from `whole` on with all of those before the point."""
    return f"{x:,.0f}" if x >= whole else f"{x:.{digits}g}"
