"""Products of the displacements of runs: from them follow norms, shares, cosines and what runs have in common.

A record has one block of the Gram matrix that `analysis.geometry` and `analysis.attenuation` read, so that runs can be
added without measuring the others again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from evoalign_lib.analysis import geometry
from evoalign_study import specs, weight_cache
from evoalign_study.records import Record, Spec

MOST = 8
"""Runs of each group in one record, which would grow too long with more."""


def products_specs(groups: Sequence[Sequence[Record]], scale: str) -> list[Spec]:
    """Return the specs of all products among runs of several groups: a record for each pair of blocks of `MOST` runs.

    Args:
        groups: records of training runs; those of a group differ in their seeds alone, and all start from one plain
            base of the tiny world.
        scale: of the notebook.

    Raises:
        ValueError: runs that make no group, groups from several bases, or a base outside the tiny world.
    """
    blocks = [
        weight_cache.group(records[first : first + MOST])
        for records in groups
        for first in range(0, len(records), MOST)
    ]
    bases = sorted({block["run"]["base"] for block in blocks})
    if len(bases) != 1:
        raise ValueError(f"displacements from {', '.join(bases) or 'no base'} have no products: give runs from one.")
    begun = specs.begin_tiny("products", bases[0], scale, {})
    return [begun | {"a": a, "b": b} for i, a in enumerate(blocks) for b in blocks[i:]]


def run(spec: Spec) -> Record:
    """Return the products of each displacement of block a with each of block b, by layer.

    The record has for each layer (`geometry.layer_of`) its entries, |start|^2, and the matrix of products, (runs of a,
    runs of b), weight units squared; of a block with itself also how many entries of each run moved at all, in float32
    and once both ends were rounded to bfloat16.
    """
    start, layout = weight_cache.of_base(spec["base"]), weight_cache.layout_of(spec["base"])
    a = weight_cache.of_group(spec["a"])
    own = spec["a"] == spec["b"]
    b = [] if own else weight_cache.of_group(spec["b"])
    views = [layout.views(torch.from_numpy(master)) for master in (start, *a, *b)]
    found = geometry.measure(views[0], views[1:], thresholds=(0.0,), dtypes=("float32", "bfloat16")).by("layer")
    rows, columns = slice(0, len(a)), slice(0, len(a)) if own else slice(len(a), None)
    layers = {}
    for i, name in enumerate(found.names):
        block = [[float(f"{x:.7g}") for x in row] for row in found.gram[i, rows, columns]]
        layers[name] = {"entries": int(found.entries[i]), "start": float(f"{found.start[i]:.7g}"), "products": block}
        if own:
            moved = {dtype: found.moved[dtype][0, i].tolist() for dtype in ("float32", "bfloat16")}
            layers[name]["moved"] = moved
    return {"d": layout.d, "layers": layers}
