"""Engines, which generate the completions of a population."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from evoalign_lib._adapters import is_adapted
from evoalign_lib.checks import choose, require

if TYPE_CHECKING:
    from evoalign_lib.engines.base import Engine
    from evoalign_lib.precision import Weights

ENGINES = ("local", "cuda", "vllm", "ray")
# the arguments of from_pretrained that select the files, and vLLM's names for them
_OF_VLLM = {"revision": "revision", "cache_dir": "download_dir", "token": "hf_token"}


def open_engine(
    engine: str,
    model: Any,
    tokenizer: Any,
    rewards: Any,
    prompts: Mapping[str, Any],
    *,
    precision: str = "master",
    chunk_rows: int = 256,
    decoder: str = "auto",
    workers: int | None = None,
    device: str = "cuda",
    population: int = 30,
    step_rows: int | None = None,
    gpus: int = 0,
    tensor_parallel: int = 1,
    engine_kwargs: Mapping[str, Any] | None = None,
    folder: str | None = None,
    load: Mapping[str, Any] | None = None,
    weights: Weights | None = None,
    **common: Any,
) -> Engine:
    """Open an engine; only the one that was asked for is imported.

    Args:
        engine: "local", "cuda", "vllm" or "ray".
        model, tokenizer, rewards, prompts: see `engines.base.Engine`.
        precision: how the weights are kept, with engine "local".
        chunk_rows, decoder: see `engines.local.LocalEngine`; used where transformers or our loop decodes, and
            chunk_rows with engine "cuda".
        workers: processes of engine "local", or actors without GPUs; None: one per core (without a master: 1).
        device, population, step_rows: see `engines.cuda.CudaEngine`; used with engine "cuda", and with "ray" and GPUs.
        gpus: GPUs to use; 0: as many as tensor_parallel with "vllm", none with "ray".
        tensor_parallel: GPUs that share a copy of the model.
        engine_kwargs: further arguments of `vllm.LLM`; with engine "cuda", only `members` (see `CudaEngine`).
        folder: where the model was loaded from, a folder or a name on the Hub; None: it was passed as an object.
        load: the arguments of from_pretrained that it was loaded with.
        weights: the run's weights if they exist already, with engine "local" or adapters (see `engines.base.Engine`).
        **common: max_completion_length, options, distribution, anchor_decay and rank of `engines.base.Engine`.

    Raises:
        ValueError: an unknown engine, GPUs that cannot be divided into copies of the model, an adapter with engine
            "ray" or several engines of vLLM, or what the engine refuses.
        ImportError: vLLM or Ray is needed and not installed; the message says how to install it.
    """
    choose("engine", engine, ENGINES)
    check_gpus(gpus, tensor_parallel)
    if engine == "local":
        from evoalign_lib.engines import local, processes

        if workers is None:
            workers = processes.default_workers() if precision == "master" else 1
        own = {"chunk_rows": chunk_rows, "decoder": decoder, "precision": precision, "weights": weights}
        return local.LocalEngine(model, tokenizer, rewards, prompts, workers=workers, **own, **common)
    if engine == "cuda":
        from evoalign_lib.engines import cuda

        if more := sorted(engine_kwargs.keys() - {"members"} if engine_kwargs else ()):
            raise ValueError(f"engine_kwargs: engine='cuda' takes members, not {more[0]!r}. Remove it.")
        own = {"chunk_rows": chunk_rows, "device": device, "population": population, "step_rows": step_rows}
        own |= engine_kwargs or {}
        return cuda.CudaEngine(model, tokenizer, rewards, prompts, **own, **common)
    single = engine == "vllm" and gpus <= tensor_parallel
    remedy = "use engine='local' or 'cuda', or engine='vllm' with gpus 0 or tensor_parallel"
    require(single or not is_adapted(model), f"adapters do not decode on actors of a cluster: {remedy}.")
    on_gpus = {"tensor_parallel": tensor_parallel, "settings": engine_kwargs}
    by_vllm = engine == "vllm" or (bool(gpus) and find_spec("vllm") is not None)
    if by_vllm:  # which loads the same files that the model was loaded from
        files = load or {}
        if taken := sorted(files.keys() & {"subfolder", "gguf_file"}):
            raise ValueError(f"model_init_kwargs: vLLM cannot load a {taken[0]}. Pass a folder of the model alone.")
        on_gpus["settings"] = {_OF_VLLM[k]: v for k, v in files.items() if k in _OF_VLLM} | dict(engine_kwargs or {})
        from evoalign_lib.engines import vllm

        kind = vllm.kind_of(model, common.get("rank", 0))
        if kind is vllm.VLLMEngine and "max_loras" in on_gpus["settings"]:
            remedy = "use an adapter, or perturb='linear' with perturbation='low_rank', or remove it"
            raise ValueError(f"engine_kwargs: max_loras has no effect, as members decode one by one: {remedy}.")
    if single:
        own = {vllm.AdapterEngine: {"weights": weights}, vllm.LowRankEngine: {"population": population}}.get(kind, {})
        return kind(model, tokenizer, rewards, prompts, folder=folder, **own, **on_gpus, **common)
    from evoalign_lib.engines import ray

    of_cuda = {"device": device, "population": population, "step_rows": step_rows}
    own = {"chunk_rows": chunk_rows} | (on_gpus | of_cuda | {"vllm": by_vllm} if gpus else {"decoder": decoder})
    where = {"workers": workers, "gpus": gpus, "folder": folder, "load": load}
    return ray.RayEngine(model, tokenizer, rewards, prompts, **where, **own, **common)


def check_gpus(gpus: int, tensor_parallel: int) -> None:
    """Raise ValueError unless the GPUs can be divided into copies of the model."""
    if gpus % tensor_parallel:
        raise ValueError(
            f"gpus={gpus} is not a multiple of tensor_parallel={tensor_parallel}, the GPUs of each engine."
        )
