"""Displacements of runs, put together from recorded products (`kinds.weights`), so that no weights are needed."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from evoalign_lib.analysis.geometry import DTYPES, Displacements


def recorded(records: Iterable[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> Displacements:
    """Return the displacements of runs by layer, assembled from recorded blocks of products.

    Args:
        records: records of kind "products"; each has one block, (runs of a, runs of b), per layer.
        runs: training runs from one base, identified by the digest of their weights; runs that did not move share one.

    Returns:
        As `geometry.measure(...).by("layer")`: K = len(runs), dtypes float32 and bfloat16.

    Raises:
        ValueError: no run, or two runs whose products no record has.
    """
    digests = list(dict.fromkeys(run["digest"] for run in runs))
    place, first = {digest: row for row, digest in enumerate(digests)}, None
    for record in records:
        a, b = (
            [(i, place[digest]) for i, digest in enumerate(record["spec"][side]["digests"]) if digest in place]
            for side in ("a", "b")
        )
        if not a or not b:
            continue
        layers = record["layers"]
        if first is None:
            first, size = layers, len(digests)
            products = np.full((len(layers), size, size), np.nan)
            moved = {dtype: np.zeros((len(layers), size), np.int64) for dtype in DTYPES[:2]}
        for row, layer in enumerate(layers.values()):
            block = np.array(layer["products"])
            for i, k in a:
                for j, m in b:
                    products[row, k, m] = products[row, m, k] = block[i, j]
            for dtype, counts in layer.get("moved", {}).items():
                for i, k in a:
                    moved[dtype][row, k] = counts[i]
    if first is None or np.isnan(products).any():
        pair = [0, 0] if first is None else np.argwhere(np.isnan(products[0]))[0]
        named = " and ".join(digests[row] for row in dict.fromkeys(pair)) if digests else "no run"
        raise ValueError(f"no record has the products of the runs that ended with the weights {named}: measure them")
    rows = [place[run["digest"]] for run in runs]
    products = products[:, rows][:, :, rows]
    moved = {dtype: counts[:, rows] for dtype, counts in moved.items()}
    return Displacements(
        tuple(first),
        np.array([layer["entries"] for layer in first.values()]),
        np.array([layer["start"] for layer in first.values()]),
        products,
        moved,
        any("tied" in name for name in first),
    )
