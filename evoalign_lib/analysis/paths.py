"""What records of kind "path" hold of the points along a line, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evoalign_lib.analysis import connectivity
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


def barriers(
    records: Sequence[Record], runs: Sequence[Record], decoding: str, n_resamples: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the barriers of the error on the lines between any two runs, and the same with problems resampled.

    records: any; of kind "path" those between these runs are taken, in either direction. runs: of training, (runs,).
    decoding: as in `errors`.
    Returns fractions, (runs, runs) and (resamples, runs, runs), above the diagonal; corrected for noise
    (`connectivity.estimate_barrier`, which leaves out the few resamples that have one run alone).
    Raises ValueError for less than two runs, and where a line between two of them was not measured.
    """
    lines: dict[tuple[str, str], Record] = {}
    for record in records:
        ends = [record["spec"].get(name) for name in ("first", "last")]
        # ends that are one run each, as it ended
        if record["spec"]["kind"] == "path" and all(end and set(end) == {"of", "factor"} for end in ends):
            first, last = (end["of"]["digests"] for end in ends)
            if len(first) == len(last) == 1 and {end["factor"] for end in ends} == {1.0}:
                lines[first[0], last[0]] = record
    found: dict[tuple[int, int], NDArray[np.float64]] = {}
    for i, j in combinations(range(len(runs)), 2):
        a, b = runs[i]["digest"], runs[j]["digest"]
        if (a, b) not in lines and (b, a) not in lines:
            raise ValueError(f"no line was measured between the runs with the weights {a} and {b}")
        line = lines.get((a, b)) or lines[b, a]
        found[i, j] = errors([line], decoding)[0][:, :: 1 if (a, b) in lines else -1]
    if not found:
        raise ValueError(f"{len(runs)} runs have no line between them: give two at least")
    outcomes = np.full((len(runs), len(runs), *found[0, 1].shape), np.nan)
    for pair, values in found.items():
        outcomes[pair] = values
    estimate = connectivity.estimate_barrier(outcomes, kind="line", within=True, n_resamples=n_resamples)
    return estimate.pairs, estimate.pair_draws
