"""What records of kind "path" hold of the points along a line, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evoalign_lib.records import unpack_bits

Record = dict[str, Any]


def errors(records: Sequence[Record], decoding: str) -> NDArray[np.float64]:
    """Return which problems are answered wrongly at each point of each line, (lines, problems, points), 0 or 1.

    records: of kind "path", of equally many problems and points. decoding: "greedy", "t0.6" or "t1".
    Raises ValueError for no records, lines of unequal sizes, and a decoding that they lack.
    """
    sizes = {(record["n"], len(record["points"]["nll"])) for record in records}
    if len(sizes) != 1:
        raise ValueError(f"lines of {sorted(sizes)} problems and points make no array: give lines of one size")
    ((n, _),) = sizes
    key = f"{decoding}_bits"
    if any(key not in record["points"] for record in records):
        raise ValueError(f"a line was not decoded so: {decoding!r}. Use greedy, t0.6 or t1.")
    rights = [[unpack_bits(bits, n) for bits in record["points"][key]] for record in records]
    return 1.0 - np.array(rights, np.float64).transpose(0, 2, 1)


def curves(records: Sequence[Record], name: str) -> NDArray[np.float64]:
    """Return a number per point of each line, (lines, points).

    name: "nll" (nats per answer), "kl" (nats per token) or "reward_greedy", "reward_t0.6", "reward_t1".
    Raises ValueError for no records and lines of unequal numbers of points.
    """
    found = [record["points"][name] for record in records]
    if len({len(values) for values in found}) != 1:
        raise ValueError("lines with unequal numbers of points make no array: give lines of one size")
    return np.array(found, np.float64)
