"""Arrays of the points along a line, from records of kind "path"."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evoalign_lib.analysis import connectivity
from evoalign_lib.checks import require
from evoalign_study.records import Record, unpack_bits


class Model(NamedTuple):
    """A point defined by runs, as records name it (`study.trained.end`)."""

    digests: tuple[str, ...]
    """Digests of the runs whose mean displacement it has."""
    as_long_as: tuple[str, ...] = ()
    draw: int | None = None
    factor: float = 1.0
    walk: int | None = None


def model_of(named: Mapping[str, Any] | None) -> Model | None:
    """Return the point that a spec names; None is the base itself."""
    if named is None:
        return None
    long = named.get("as_long_as", {"digests": ()})["digests"]
    return Model(tuple(named["of"]["digests"]), tuple(long), named.get("draw"), named["factor"], named.get("walk"))


def by_ends(records: Sequence[Record]) -> dict[tuple[Model | None, Model | None], Record]:
    """Return (first, last) end of a line -> its record, for the records of kind "path" among these."""
    lines = [record for record in records if record["spec"]["kind"] == "path"]
    return {(model_of(line["spec"].get("first")), model_of(line["spec"].get("last"))): line for line in lines}


def errors(records: Sequence[Record], decoding: str) -> NDArray[np.float64]:
    """Return which problems are answered wrongly at each point of each line, (lines, problems, points), 0 or 1.

    records: of kind "path", with equally many problems and points. decoding: "greedy", "t0.6" or "t1".
    Raises ValueError for no records, lines of different sizes, or a decoding that they lack.
    """
    sizes = {(record["n"], len(record["points"]["greedy_bits"])) for record in records}
    require(len(sizes) == 1, f"lines have {sorted(sizes)} problems and points: pass at least one, all of one size")
    ((n, _),) = sizes
    key = f"{decoding}_bits"
    decoded = all(key in record["points"] for record in records)
    require(decoded, f"a line was not decoded with {decoding!r}: use greedy, t0.6 or t1.")
    rights = [[unpack_bits(bits, n) for bits in record["points"][key]] for record in records]
    return 1.0 - np.array(rights, np.float64).transpose(0, 2, 1)


def mean_barrier(errors: NDArray[np.float64], n_resamples: int) -> connectivity.BarrierEstimate:
    """Return how far the mean curve of several lines rises above the line between its ends, as a fraction.

    errors: as returned by `errors`. The lines share no run, and are resampled together with the problems.
    """
    outcomes = np.full((len(errors), *errors.shape), np.nan)
    outcomes[np.arange(len(errors)), np.arange(len(errors))] = errors
    return connectivity.estimate_barrier(outcomes, across="curve", n_resamples=n_resamples)


def curves(records: Sequence[Record], name: str) -> NDArray[np.float64]:
    """Return a number per point of each line, (lines, points).

    name: "nll" (nats per answer), "kl" (nats per token) or "reward_greedy", "reward_t0.6", "reward_t1".
    Raises ValueError for no records, or lines with different numbers of points.
    """
    lines = [record["points"][name] for record in records]
    require(len(set(map(len, lines))) == 1, "pass at least one line, all with the same number of points")
    return np.array(lines, np.float64)


def barriers(
    records: Sequence[Record], runs: Sequence[Record], decoding: str, n_resamples: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the error barriers on the lines between every two runs, and the same with problems resampled.

    records: any records; those of kind "path" between these runs are used, in either direction. runs: training runs,
    (runs,). decoding: as in `errors`.
    Returns fractions, (runs, runs) and (resamples, runs, runs), above the diagonal, corrected for noise
    (`connectivity.estimate_barrier`, which leaves out the few resamples of a single run).
    Raises ValueError for fewer than two runs, or if a line between two of them was not measured.
    """
    n, lines, along = len(runs), by_ends(records), []
    require(n > 1, f"{n} runs have no line between them: pass at least two")
    for one, other in combinations([run["digest"] for run in runs], 2):
        there, back = (lines.get((Model((a,)), Model((b,)))) for a, b in ((one, other), (other, one)))
        require(there or back, f"no line between the runs with the weights {one} and {other} has a record: measure it")
        along.append(errors([there or back], decoding)[0][:, :: 1 if there else -1])
    outcomes = np.full((n, n, *along[0].shape), np.nan)
    outcomes[np.triu_indices(n, 1)] = along
    estimate = connectivity.estimate_barrier(outcomes, within=True, n_resamples=n_resamples)
    return estimate.pairs, estimate.pair_draws
