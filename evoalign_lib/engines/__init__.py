"""Engines: who generates the completions of a population."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evoalign_lib.engines.base import Engine

ENGINES = ("local", "vllm", "ray")
# arguments of from_pretrained that say which files, and what vLLM calls them
_OF_VLLM = {"revision": "revision", "cache_dir": "download_dir", "token": "hf_token"}


def open_engine(
    model: Any, tokenizer: Any, rewards: Any, prompts: Mapping[str, Any], args: Any, folder: str | None
) -> Engine:
    """The engine of a configuration; what it needs is imported here alone.

    Args:
        model, tokenizer, rewards, prompts: of `engines.base.Engine`.
        args: an `ESConfig`.
        folder: where the model was loaded from, a folder or a name on the Hub; None: it was an object.

    Raises:
        ImportError: vLLM or Ray is needed and not installed; the message says how.
    """
    common = {"max_completion_length": args.max_completion_length, "distribution": args.noise}
    if args.engine == "local":
        from evoalign_lib.engines import local

        common |= {"chunk_rows": args.chunk_rows, "decoder": args.decoder, "precision": args.precision}
        workers = args.workers or (local.default_workers() if args.precision == "master" else 1)
        return local.LocalEngine(model, tokenizer, rewards, prompts, workers=workers, **common)
    common |= {"folder": folder, "tensor_parallel": args.tensor_parallel, "settings": args.engine_kwargs}
    if args.engine == "vllm" or args.gpus:  # vLLM loads the very files that the model was loaded from
        load = args.model_init_kwargs or {}
        if "subfolder" in load:
            raise ValueError("model_init_kwargs: vLLM loads no subfolder; download it and give it as the model.")
        common["settings"] = {_OF_VLLM[k]: v for k, v in load.items() if k in _OF_VLLM} | (args.engine_kwargs or {})
    if args.engine == "vllm" and args.gpus <= args.tensor_parallel:
        from evoalign_lib.engines import vllm

        return vllm.VLLMEngine(model, tokenizer, rewards, prompts, **common)
    from evoalign_lib.engines import ray

    common |= {"chunk_rows": args.chunk_rows, "decoder": args.decoder, "load": args.model_init_kwargs}
    return ray.RayEngine(model, tokenizer, rewards, prompts, workers=args.workers, gpus=args.gpus, **common)
