"""The models of runs: the base that a spec names, what evaluates it, and its KL from what it becomes.

A user's own file of questions enters a spec by its digest alone. The process that made the spec remembers where the
file is (`know_file`), and tells the processes that it starts (`known_files`).
"""

from __future__ import annotations

import gc
import hashlib
import os
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from evoalign_lib import models, tiny
from evoalign_lib.analysis import kl
from evoalign_lib.engines import open_engine
from evoalign_lib.engines.local import LocalEngine, Prompts
from evoalign_lib.engines.vllm import PushedEngine
from evoalign_lib.records import Spec
from evoalign_lib.study import families

ENGINE_FIELDS = ("engine", "gpus", "tensor_parallel")
"""Fields of a spec that say who generates; a spec without them is the local engine's."""


def is_local(spec: Mapping[str, Any]) -> bool:
    """Say whether a spec, or settings, have the local engine."""
    return spec.get("engine", "local") == "local"


@lru_cache(maxsize=64)
def base_digest(base: str) -> str:
    """Return what identifies a base: a shipped one's weights, another model's files or revision, 16 digits."""
    return models.base_digest(tiny.load(base)[0]) if base in tiny.SHIPPED else models.origin_digest(base)


def model_of(spec: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return model and tokenizer of a spec's base: float32 locally and to be trained by gradients, else bfloat16.

    The model of an ES run on another engine is its name: the trainer loads it, and the engine must know from where.
    """
    import torch
    from transformers import AutoTokenizer

    if spec["base"] in tiny.SHIPPED:
        return tiny.load(spec["base"])
    trained = spec["kind"] == "train"
    if is_local(spec) or (trained and not families.of(spec["arm"]).has_members):
        return models.load(spec["base"])
    if trained:
        return spec["base"], AutoTokenizer.from_pretrained(spec["base"])
    return models.load(spec["base"], keywords={"dtype": torch.bfloat16})


@lru_cache(maxsize=2)
def reference(base: str, engine: str) -> Any:
    """Return the base itself in the dtype of an engine's runs, once per process. Nothing may train it."""
    return model_of({"kind": "base", "base": base, "engine": engine})[0]


def evaluation_engine(spec: Spec, model: Any, tokenizer: Any, rows: Mapping[str, list]) -> Any:
    """Return an engine that decodes prompts with weights that somebody else trains.

    rows: of each set but the training set, by its name.
    """
    prompts = {name: Prompts(found, tokenizer) for name, found in rows.items()}
    common = {"max_completion_length": spec["max_completion_length"]}
    if is_local(spec):
        return LocalEngine(model, tokenizer, None, prompts, **common)
    if spec["kind"] == "train":  # in the dtype in which ES is measured; it holds the float32 weights beside
        measured, _ = model_of(spec | {"kind": "base"})
        return PushedEngine(measured, tokenizer, prompts, folder=spec["base"], **common)
    where = {k: spec[k] for k in ENGINE_FIELDS if k in spec}
    return open_engine(where.pop("engine"), model, tokenizer, None, prompts, folder=spec["base"], **where, **common)


def plan(spec: Spec, engine: Any) -> dict[str, Any]:
    """Return how another engine than the local one decodes, for a record that trains nothing or by gradients."""
    return {} if is_local(spec) else {"plan": engine.plan}


def kl_from_base(spec: Spec, engine: Any, name: str = "validation") -> dict[str, Any]:
    """Return KL(trained || base) in nats, on one sample at temperature 1 per prompt of a set (see `kl.measure`)."""
    import torch

    engine.write_model()
    base, _ = model_of(spec | {"kind": "base"})
    prompts = engine.prompts[name]
    (samples,) = engine.generate(name, samples=1, seed=spec["seed"])
    completions = [ids for _, ids in samples]
    compared, device = (engine.model, base), "cpu"
    if not is_local(spec):  # what generated makes room on the GPU
        engine.close()
        device = _roomy_device(sum(p.numel() * p.itemsize for m in compared for p in m.parameters()))
    try:
        for model in compared:
            model.to(device)
        found = kl.measure(engine.model, base, prompts.ids, prompts.mask, completions, engine.eos_ids)
    finally:
        if device != "cpu":  # the next run's engine is another process, which must find the GPU empty
            for model in compared:
                model.to("cpu")
            gc.collect()
            torch.cuda.empty_cache()
    return {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in found.items()}


def _roomy_device(needed: int, seconds: int = 60) -> str:
    """The GPU, as soon as what generated has left it this many bytes; the CPU, slower, where that takes too long."""
    import torch

    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
    for _ in range(seconds if torch.cuda.is_available() else 0):
        if torch.cuda.mem_get_info()[0] > needed + (4 << 30):  # and some for activations
            return "cuda"
        time.sleep(1)
    return "cpu"


# ---- a user's files

_FILES: dict[str, str] = {}


def known_files() -> dict[str, str]:
    """Return the path of every file that specs of this process name by its digest."""
    return dict(_FILES)


def know_files(known: Mapping[str, str]) -> None:
    """Take over what another process knows (`known_files`)."""
    _FILES.update(known)


def know_file(path: str | os.PathLike[str]) -> str:
    """Return the digest by which specs name a file, 16 digits of its SHA-256, and remember where the file is.

    Raises FileNotFoundError where there is no such file.
    """
    found = Path(path).expanduser().resolve()
    if not found.is_file():
        raise FileNotFoundError(f"{str(path)!r} is not a file: give the path of one.")
    digest = _file_digest(found)
    _FILES[digest] = str(found)
    return digest


def file_of(digest: str) -> Path:
    """Return the file that a spec names.

    Raises FileNotFoundError where this process was not told where it is, or it is gone; ValueError where it changed.
    """
    known = _FILES.get(digest)
    if known is None or not Path(known).is_file():
        where = "this process was not told where it is" if known is None else f"{known} is gone"
        raise FileNotFoundError(
            f"the file with the SHA-256 {digest}...: {where}. Make the specs again with the path of the file."
        )
    if (found := _file_digest(Path(known))) != digest:
        raise ValueError(
            f"{known} has changed: its SHA-256 is {found}..., that of the spec {digest}... Restore the file, or make "
            "the specs again."
        )
    return Path(known)


def _file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
