"""Tables of tidy frames: a row per group of rows, with every cell as it is printed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pandas import DataFrame, Series

MISSING = "-"
"""In a cell: no run has a value."""


def cells(
    frame: DataFrame, by: Sequence[str], columns: Mapping[str, tuple[str, str | Callable[[Series], Any]]]
) -> DataFrame:
    """Return a row per group of rows, in the order of the frame.

    Args:
        frame: a row per run, or per problem.
        by: columns that tell the groups apart; they begin the table.
        columns: head -> column, and the format of its mean (such as ".1f"; a dash where no row has a value), or what
            pandas makes of its values ("sum", "size") or a function of them.
    """
    import pandas as pd

    groups = frame.groupby(list(by), sort=False)
    found = {head: groups[name].agg(_function(how)) for head, (name, how) in columns.items()}
    return pd.DataFrame(found).reset_index()


def _function(how: str | Callable[[Series], Any]) -> str | Callable[[Series], Any]:
    if callable(how) or not how.startswith("."):
        return how
    return lambda values: format(values.mean(), how) if values.count() else MISSING
