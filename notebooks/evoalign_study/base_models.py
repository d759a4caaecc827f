"""The models of runs: a spec's base, the engine that evaluates it, and the KL of a trained model from it.

Specs name a user's own file of questions, a user's own end of training, and a model behind an address only by their
digests. The process that made the spec remembers where they are (`know_file`, `know_end`, `know_files`), and tells the
processes that it starts (`known_files`).
"""

import gc
import hashlib
import json
import os
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from evoalign_lib import ledger, models, tiny
from evoalign_lib.analysis import kl
from evoalign_lib.checks import require
from evoalign_lib.engines import open_engine, vllm
from evoalign_lib.engines.cuda import PushedEngine
from evoalign_lib.engines.local import LocalEngine, Prompts
from evoalign_lib.files import canonical_json
from evoalign_study import paths, trainers
from evoalign_study.records import Spec

ENGINE_FIELDS = ("engine", "gpus", "tensor_parallel")
"""Fields of a spec that choose the engine; a spec without them uses the local one."""


def is_local(spec: Mapping[str, Any]) -> bool:
    """Return whether a spec, or settings, use the local engine."""
    return spec.get("engine", "local") == "local"


def kept(name: str) -> Path:
    """Return a folder for files that records name but do not contain: in EVOALIGN_RUN_DIR if set, else in `runs`."""
    return Path(os.environ.get("EVOALIGN_RUN_DIR") or paths.RUNS) / name


_DIGESTS: dict[str, str] = {}


def base_digest(base: str) -> str:
    """Return 16 digits that identify a base: by the weights of a shipped one, by files or revision of another model.

    For a folder without weights, return `models.NO_WEIGHTS`: its specs can be planned, but `check_base` refuses them.
    """
    if base not in _DIGESTS:
        file = tiny.bases_folder() / base / "model.safetensors"
        found = models.stored_digest(file) if base in tiny.SHIPPED else models.plan_digest(base)
        if found == models.NO_WEIGHTS:
            return found  # not remembered: weights may still come
        _DIGESTS[base] = found
    return _DIGESTS[base]


def check_base(spec: Spec) -> None:
    """Raise ValueError, before any work, for a spec whose model's files show that a run could not load it."""
    base = spec.get("base")
    if base is None or base in tiny.SHIPPED or not Path(base).is_dir():
        return
    if spec.get("base_digest") == models.NO_WEIGHTS:
        models.origin_digest(base)
        raise ValueError(f"model {base!r} had no weights when the specs were made: make them again.")
    models.tokenizer_of(base)


def made(how: Mapping[str, Any]) -> Path:
    """Return the folder of a model that `tiny.recipe` makes with these arguments; it is made once and kept."""
    folder = kept("bases") / hashlib.sha256(canonical_json(dict(how)).encode()).hexdigest()[:16]
    if not (folder / "tokenizer.json").is_file():  # written last
        tiny.recipe("A", out=folder, progress=False, **how)
    return folder


def model_of(spec: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return model and tokenizer of a spec's base: float32 if local or trained by gradients, else bfloat16.

    With the field `made`, it is a model of the tiny world that is not shipped (`made`).

    For an ES run on another engine the model is its name: the trainer loads it, and the engine must know where from.
    """
    from transformers import AutoTokenizer

    if "made" in spec:
        found = models.stored_digest(made(spec["made"]) / "model.safetensors")
        fault = f"this machine makes another base: digest {found}, not {spec['base_digest']} as in the record"
        require(found == spec["base_digest"], f"{fault}. Make the specs again, and all runs from this base.")
        return models.load(str(made(spec["made"])))
    if spec["base"] in tiny.SHIPPED:
        return tiny.load(spec["base"])
    trained = spec["kind"] == "train"
    if trained and not trainers.of(spec["arm"]).has_members:
        return models.load(spec["base"])
    if trained and not is_local(spec):
        return spec["base"], AutoTokenizer.from_pretrained(spec["base"], trust_remote_code=False)
    return models.load(spec["base"], keywords=loaded_as(spec))


def loaded_as(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of `models.load` for the model with which a spec's engine decodes."""
    import torch

    return {} if is_local(spec) else {"dtype": torch.bfloat16}


@lru_cache(maxsize=2)
def reference(base: str, engine: str, made_by: str = "null") -> Any:
    """Return the base itself in the dtype of an engine's runs, loaded once per process. Do not train it.

    made_by: JSON of the spec's `made` and `base_digest`, if it has them.
    """
    return model_of({"kind": "base", "base": base, "engine": engine} | (json.loads(made_by) or {}))[0]


def evaluation_engine(spec: Spec, model: Any, tokenizer: Any, rows: Mapping[str, list]) -> Any:
    """Return an engine that decodes prompts with weights that are trained elsewhere.

    rows: name of each set except the training set -> its rows.
    """
    prompts = {name: Prompts(found, tokenizer) for name, found in rows.items()}
    common = {"max_completion_length": spec["max_completion_length"]}
    if is_local(spec):
        return LocalEngine(model, tokenizer, None, prompts, **common)
    if spec["kind"] == "train":  # in the dtype in which ES is measured, besides the float32 weights
        measured, _ = model_of(spec | {"kind": "base"})
        return vllm.PushedEngine(measured, tokenizer, prompts, folder=spec["base"], **common)
    if spec["engine"] == "cuda":
        return PushedEngine(model, tokenizer, None, prompts, population=1, **common)
    where = {k: spec[k] for k in ENGINE_FIELDS if k in spec}
    return open_engine(where.pop("engine"), model, tokenizer, None, prompts, folder=spec["base"], **where, **common)


def plan(spec: Spec, engine: Any) -> dict[str, Any]:
    """Return a non-local engine's decoding plan, for records without ES training; {} if local."""
    return {} if is_local(spec) else {"plan": engine.plan}


def kl_from_base(spec: Spec, engine: Any, name: str = "validation") -> dict[str, Any]:
    """Return KL(trained || base) in nats, on one sample at temperature 1 per prompt of a set (see `kl.measure`)."""
    import torch

    engine.write_model()
    own = {name: spec[name] for name in ("made", "base_digest")} if "made" in spec else None
    base = reference(spec["base"], spec.get("engine", "local"), canonical_json(own))
    prompts = engine.prompts[name]
    (samples,) = engine.generate(name, samples=1, seed=spec["seed"])
    completions = [ids for _, ids in samples]
    compared, device = (engine.model, base), "cpu"
    if not is_local(spec):  # closing the engine makes room on the GPU
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
    """Return "cuda" as soon as the engine has left it this many bytes; "cpu", slower, if that takes too long."""
    import torch

    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
    for _ in range(seconds if torch.cuda.is_available() else 0):
        if torch.cuda.mem_get_info()[0] > needed + (4 << 30):  # the 4 GiB are for activations
            return "cuda"
        time.sleep(1)
    return "cpu"


# ---- a user's own files and ends of training

_FILES: dict[str, str] = {}
_CONFIGS = ("config.json", "generation_config.json", "adapter_config.json")


def known_files() -> dict[str, str]:
    """Return digest -> path or address of everything that specs of this process name by digest."""
    return dict(_FILES)


def know_files(known: Mapping[str, str]) -> None:
    """Remember digest -> path or address, as another process knows it (`known_files`), or of a model on a server."""
    _FILES.update(known)


def know_file(setting: str, path: str | os.PathLike[str], line: str) -> str:
    """Remember where a user's file is, and return the digest by which specs name it, 16 digits of its SHA-256.

    Args:
        setting: name of the setting that gives the file.
        path: of the file.
        line: what each line must hold.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if not Path(path).expanduser().is_file():
        raise FileNotFoundError(f"{setting}={str(path)!r} is no file. Pass one whose lines have the form {line}.")
    return _remembered(path)


def place_of(digest: str) -> Path:
    """Return what a spec names by digest: a user's file, or the folder or ledger of an end of training.

    Raises:
        FileNotFoundError: this process was not told where it is, or it is gone.
        ValueError: it has changed.
    """
    known = _FILES.get(digest)
    if known is None or not Path(known).exists():
        where = "this process was not told where it is" if known is None else f"{known} is gone"
        raise FileNotFoundError(f"SHA-256 {digest}...: {where}. Make the specs again with its path.")
    now = _digest(Path(known))
    require(now == digest, f"{known} has changed: its SHA-256 is {now}, not {digest}. Restore it, or make new specs.")
    return Path(known)


def know_end(path: str | os.PathLike[str]) -> str:
    """Remember where an end of training is, and return the digest by which specs name it, 16 digits.

    For a ledger this is its SHA-256; for a folder, with a model or an adapter, it is the SHA-256 of names, sizes and
    SHA-256s of its configuration and safetensors files.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: it is neither a ledger nor such a folder.
    """
    place = Path(path).expanduser()
    if not place.exists():
        raise FileNotFoundError(f"{str(path)!r} does not exist. Pass the path of a model's folder or of a ledger.")
    fits = place.is_dir() or place.name.endswith((".jsonl", ".jsonl.gz"))
    require(fits, f"the end of training {str(path)!r} is no ledger (.jsonl, .jsonl.gz). Pass one, or a folder.")
    return _remembered(place)


def is_adapter(place: Path) -> bool:
    """Return whether a folder holds an adapter instead of a full model."""
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
    """Return the digest of a file or end; files: name, bytes and mtime of each, so that gigabytes are read once."""
    if path.is_file():
        return _sha256(path)[:16]
    lines = (f"{name} {size} {_sha256(path / name)}\n" for name, size, _ in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files_of_end(path: Path) -> list[Path]:
    """Return the files that define an end of training. Raises ValueError for a folder without them."""
    files = [*(path / name for name in _CONFIGS if (path / name).is_file()), *sorted(path.glob("*.safetensors"))]
    for lacking in ("config.json", "*.safetensors"):
        if not any(lacking in (file.name.removeprefix("adapter_"), f"*{file.suffix}") for file in files):
            raise ValueError(
                f"the end of training {str(path)!r} has no {lacking}. Pass the folder of a model (save_pretrained) or "
                f"of a LoRA adapter, or the file {ledger.NAME}. Other formats are not loaded: they may hold code."
            )
    return files
