"""What a run leaves on disk, byte by byte: the model, what it goes on from after a kill, and its ledger.

A run has the arm's own steps, members and prompts, which decide how long a ledger is, and next to no validation. It
stores as a run at scale full does, with checkpoints; the last one is counted.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evoalign_lib import ledger
from evoalign_study import specs
from evoalign_study.kinds import train
from evoalign_study.records import Record, Spec

_FEW = {"validation_problems": 2, "test_problems": 0, "curve_points": 3}
_NAMED = {
    "model.safetensors": "model",
    "adapter_model.safetensors": "model",
    "master.safetensors": "master",
    "optimizer.pt": "moments",
}
"""Names of files -> what they hold; every other file of a checkpoint is small ("other")."""


def storage_specs(arms: Mapping[str, Mapping[str, Any]], base: str, scale: str) -> list[Spec]:
    """Return the specs of what a run of each arm leaves on disk.

    Args:
        arms: arm -> settings, as for `train_specs`; what is measured of the run is replaced by less.
        base: a shipped one, of Countdown.
        scale: of the notebook.

    Raises:
        ValueError: a base from outside, or what `train_specs` refuses.
    """
    found = []
    for arm, settings in arms.items():
        specs.begin_tiny("storage", base, scale, settings)  # refuses other bases
        [spec] = train.train_specs(arm, [base], [0], {**settings, **_FEW}, scale)
        found.append(spec | {"kind": "storage"})
    return found


def run(spec: Spec) -> Record:
    """Return what is stored of one run.

    The record has `d`, parameters in the model's file, those of an adapter where one is trained; `bytes`, what the last
    checkpoint holds: "model", "master", "moments", "other", and "ledger" beside it; of a run with a ledger `packed` and
    `start`, too: the ledger's bytes with gzip, and those of an adapter that it begins from, without which it cannot be
    replayed (0: none).
    """
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        with train.trained(spec | {"kind": "train"}, folder, lasting=True):
            pass
        checkpoint = folder / f"checkpoint-{spec['steps']}"
        record: Record = {"d": _parameters(checkpoint), "bytes": dict(_bytes(checkpoint))}
        if (kept := folder / ledger.NAME).is_file():
            record["bytes"]["ledger"] = kept.stat().st_size
            record["packed"] = len(ledger.pack(kept))
            record["start"] = _bytes(folder / "start")["model"]
        return record


def _bytes(folder: Path) -> Counter[str]:
    """Return what a folder's files hold -> bytes."""
    found: Counter[str] = Counter()
    for file in folder.glob("*"):
        found[_NAMED.get(file.name, "other")] += file.stat().st_size
    return found


def _parameters(checkpoint: Path) -> int:
    """Return how many numbers the model's file holds."""
    from safetensors import safe_open

    [file] = (file for file in checkpoint.glob("*.safetensors") if _NAMED[file.name] == "model")
    with safe_open(file, "numpy") as tensors:
        return sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())


def sent(spec: Spec, d: int) -> int | None:
    """Return the bytes that a step sends to each process that generates, where it is not the one that trains.

    An update of ES is a key (8 bytes) and a coefficient (4) for each member, by which every process moves its own
    weights (`engines.ray`); a gradient step sends what it changed, in bfloat16. None: ESSA, whose candidates the local
    engine alone evaluates.
    """
    if "leading_share" in spec:
        return None
    if "population_size" in spec:
        return 12 * spec["population_size"]
    return 2 * d
