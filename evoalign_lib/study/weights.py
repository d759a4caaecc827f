"""Weights that runs of the tiny world ended with, kept on this machine in `runs/weights`.

A record names the digest of its weights and not the weights. To measure a trained model again, it is replayed from a
ledger or trained again, which takes minutes: so what was made once is kept here, by its digest, and read the next time.
The folder may be removed at any time.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from evoalign_lib import files, models, paths


def keep(master: np.ndarray) -> Path:
    """Keep flat float32 weights, and return the file. What is there already stays."""
    path = _path(models.flat_digest(master))
    if not path.is_file():
        written = io.BytesIO()
        np.save(written, master, allow_pickle=False)
        files.replace_bytes(path, written.getvalue())
    return path


def kept(digest: str) -> np.ndarray | None:
    """Return the flat float32 weights that have a digest (`models.flat_digest`); None where they are not kept here.

    Raises ValueError where the file of that name holds others.
    """
    path = _path(digest)
    if not path.is_file():
        return None
    master = np.load(path, allow_pickle=False)
    if (found := models.flat_digest(master)) != digest:
        raise ValueError(
            f"{path} holds weights with the digest {found}: it was damaged. Remove it, they are made anew."
        )
    return master


def _path(digest: str) -> Path:
    return paths.RUNS / "weights" / f"{digest}.npy"
