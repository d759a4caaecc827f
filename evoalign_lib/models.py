"""Models: where they are loaded from and what identifies them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from evoalign_lib.es import load_model as load  # noqa: F401


def flat_digest(master: np.ndarray) -> str:
    """Return what a record calls the digest of trained weights: SHA-256 of the flat float32 master, 16 digits."""
    return hashlib.sha256(master.tobytes()).hexdigest()[:16]


def base_digest(model: Any) -> str:
    """SHA-256 of a model's parameters in float32, by name, 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode() + b"\0" + parameter.detach().float().numpy().tobytes())
    return digest.hexdigest()[:16]


def origin_digest(name: str) -> str:
    """What a model of the user's is, without loading it, 16 hexadecimal digits.

    Args:
        name: a folder, of whose weights and configuration it is the SHA-256; or a name on the Hub, of which it is the
            revision's commit, so that no weights are fetched for it.

    Raises:
        ValueError: no such model, or a folder without weights in safetensors files.
    """
    from transformers import AutoConfig

    folder = Path(name)
    if not folder.is_dir():
        try:
            commit = AutoConfig.from_pretrained(name, trust_remote_code=False)._commit_hash
        except (OSError, ValueError):
            commit = None
        return commit[:16] if commit else base_digest(load(name)[0])  # which says what is wrong with the name
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"model {name!r} has no *.safetensors: weights of other formats are not loaded, since they may hold code. "
            "Save it anew with save_pretrained()."
        )
    digest = hashlib.sha256()
    for path in (folder / "config.json", *files):
        digest.update(path.name.encode() + b"\0")
        with open(path, "rb") as file:
            for block in iter(lambda: file.read(1 << 24), b""):
                digest.update(block)
    return digest.hexdigest()[:16]
