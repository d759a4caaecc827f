"""The models of runs: the base that a spec names, what evaluates it, and its KL from what it becomes.

A user's own file of questions enters a spec by its digest alone, and so does a user's own end of training, and a model
behind an address. The process that made the spec remembers where they are (`know_file`, `know_end`, `know_files`),
and tells the processes that it starts (`known_files`).
"""

import gc
import hashlib
import os
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from evoalign_lib import ledger, models, tiny
from evoalign_lib.analysis import kl
from evoalign_lib.checks import require
from evoalign_lib.engines import open_engine
from evoalign_lib.engines.local import LocalEngine, Prompts
from evoalign_lib.engines.vllm import PushedEngine
from evoalign_study import paths, trainers
from evoalign_study.records import Spec

ENGINE_FIELDS = ("engine", "gpus", "tensor_parallel")
"""Fields of a spec that say who generates; a spec without them is the local engine's."""


def is_local(spec: Mapping[str, Any]) -> bool:
    """Say whether a spec, or settings, have the local engine."""
    return spec.get("engine", "local") == "local"


def kept(name: str) -> Path:
    """Return a folder of what records name and do not hold: below EVOALIGN_RUN_DIR, or below `runs`."""
    return Path(os.environ.get("EVOALIGN_RUN_DIR") or paths.RUNS) / name


_DIGESTS: dict[str, str] = {}


def base_digest(base: str) -> str:
    """Return what identifies a base: a shipped one's weights, another model's files or revision, 16 digits.

    Of a folder without weights `models.NO_WEIGHTS`: specs of it can be planned, and `check_base` refuses to run them.
    """
    if base not in _DIGESTS:
        file = tiny.bases_folder() / base / "model.safetensors"
        found = models.stored_digest(file) if base in tiny.SHIPPED else models.plan_digest(base)
        if found == models.NO_WEIGHTS:
            return found  # until there are weights
        _DIGESTS[base] = found
    return _DIGESTS[base]


def check_base(spec: Spec) -> None:
    """Raise ValueError for a spec of a model that a run could not load, as far as its files say: before any work."""
    base = spec.get("base")
    if base is None or base in tiny.SHIPPED or not Path(base).is_dir():
        return
    if spec.get("base_digest") == models.NO_WEIGHTS:
        models.origin_digest(base)
        raise ValueError(f"model {base!r} had no weights when the specs were made: make them again.")
    models.tokenizer_of(base)


def model_of(spec: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return model and tokenizer of a spec's base: float32 locally and to be trained by gradients, else bfloat16.

    The model of an ES run on another engine is its name: the trainer loads it, and the engine must know from where.
    """
    from transformers import AutoTokenizer

    if spec["base"] in tiny.SHIPPED:
        return tiny.load(spec["base"])
    trained = spec["kind"] == "train"
    if trained and not trainers.of(spec["arm"]).has_members:
        return models.load(spec["base"])
    if trained and not is_local(spec):
        return spec["base"], AutoTokenizer.from_pretrained(spec["base"], trust_remote_code=False)
    return models.load(spec["base"], keywords=loaded_as(spec))


def loaded_as(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of `models.load` for a model that a spec's engine decodes with."""
    import torch

    return {} if is_local(spec) else {"dtype": torch.bfloat16}


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
        written = kl.samples(prompts.ids, prompts.mask, completions, engine.eos_ids)
        found = kl.measure(kl.compare(engine.model, base, written))
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


# ---- a user's files and ends of training

_FILES: dict[str, str] = {}
_CONFIGS = ("config.json", "generation_config.json", "adapter_config.json")


def known_files() -> dict[str, str]:
    """Return the path, or address, of everything that specs of this process name by its digest."""
    return dict(_FILES)


def know_files(known: Mapping[str, str]) -> None:
    """Remember digest -> path or address: what another process knows (`known_files`), or where a server has a model."""
    _FILES.update(known)


def know_file(setting: str, path: str | os.PathLike[str], line: str) -> str:
    """Return the digest by which specs name an own file, 16 digits of its SHA-256, and remember where the file is.

    Args:
        setting: that names the file.
        path: of it.
        line: what each line has to hold.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if not Path(path).expanduser().is_file():
        raise FileNotFoundError(f"{setting}={str(path)!r} is no file: give one with a line {line} for each.")
    return _remembered(path)


def place_of(digest: str) -> Path:
    """Return the file that a spec names by its digest, or the folder or ledger of an end of training.

    Raises:
        FileNotFoundError: this process was not told where it is, or it is gone.
        ValueError: it has changed.
    """
    known = _FILES.get(digest)
    if known is None or not Path(known).exists():
        where = "this process was not told where it is" if known is None else f"{known} is gone"
        raise FileNotFoundError(f"SHA-256 {digest}...: {where}. Make the specs again with the path of what has it.")
    now = _digest(Path(known))
    require(now == digest, f"{known} has changed: its SHA-256 is {now}, not {digest}. Restore it, or make new specs.")
    return Path(known)


def know_end(path: str | os.PathLike[str]) -> str:
    """Return the digest by which specs name an end of training, 16 digits, and remember where it is.

    That of a ledger is its SHA-256; that of a folder, with a model or an adapter, the SHA-256 of names, sizes and
    SHA-256s of its configurations and safetensors files.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: it is none of these.
    """
    place = Path(path).expanduser()
    if not place.exists():
        raise FileNotFoundError(f"{str(path)!r} is no model's folder, nor a ledger: give the path of one.")
    fits = place.is_dir() or place.name.endswith((".jsonl", ".jsonl.gz"))
    require(fits, f"the end of training {str(path)!r} is no ledger (.jsonl, .jsonl.gz): give one, or a folder.")
    return _remembered(place)


def is_adapter(place: Path) -> bool:
    """Say whether a folder holds an adapter over a model, and no model of its own."""
    return (place / "adapter_config.json").is_file()


def _remembered(path: str | os.PathLike[str]) -> str:
    place = Path(path).expanduser().resolve()
    digest = _digest(place)
    _FILES[digest] = str(place)
    return digest


def _digest(path: Path) -> str:
    files = [path] if path.is_file() else _files_of_end(path)
    return _digest_of(path, tuple((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files))


@lru_cache(maxsize=64)
def _digest_of(path: Path, files: tuple[tuple[str, int, int], ...]) -> str:
    """The digest of a file or of an end; files: name, bytes and time of change of each: gigabytes are read once."""
    if path.is_file():
        return _sha256(path)[:16]
    lines = (f"{name} {size} {_sha256(path / name)}\n" for name, size, _ in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files_of_end(path: Path) -> list[Path]:
    """The files that decide what an end of training is. Raises ValueError for a folder that holds none."""
    files = [*(path / name for name in _CONFIGS if (path / name).is_file()), *sorted(path.glob("*.safetensors"))]
    for lacking in ("config.json", "*.safetensors"):
        if not any(lacking in (file.name.removeprefix("adapter_"), f"*{file.suffix}") for file in files):
            raise ValueError(
                f"the end of training {str(path)!r} has no {lacking}: give the folder of a model (save_pretrained) or "
                f"of a LoRA adapter, or the file {ledger.NAME}. Other weights are not loaded: they may hold code."
            )
    return files
