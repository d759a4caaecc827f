"""Memory of the models beside the one that is trained (`Measures.companions`), by device, before anything is loaded.

Parameters are counted from configurations, on no device. Of what a model needs while it works `WORKING_GIB` is assumed:
the activations of a batch of texts, or the caches of a judge's answers. Scorers work as long as a run trains. A judge
that chats is loaded when the run has ended, where the policy's memory is free; it is counted all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from evoalign_lib.engines.memory import USABLE
from evoalign_study import base_models, measures
from evoalign_study.measures.base import Companion

GIB = 2**30
WORKING_GIB = 2.0
"""GiB of each model besides its weights: assumed."""
_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}


@lru_cache(maxsize=32)
def weight_bytes(name: str, dtype: str) -> float | None:
    """Return the bytes of a model's weights; None where its configuration cannot be read or is of an unknown kind.

    name: folder or name on the Hub. dtype: in which it is loaded; empty: that of its configuration.
    """
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        chats = next(iter(config.architectures or ()), "").endswith("ForCausalLM")
        with torch.device("meta"):
            model = (AutoModelForCausalLM if chats else AutoModel).from_config(config)
    except (OSError, ValueError):
        return None
    width = _WIDTHS.get(dtype or str(config.dtype).removeprefix("torch."), 4)
    return width * sum(p.numel() for p in model.parameters())  # a scorer's head is one row


def check(
    specs: Sequence[Mapping[str, Any]], runs: int, seen: int, gpu_gib: float, host_gib: float | None
) -> list[str]:
    """Print what runs need beside their models, equal needs once, and return why some do not fit.

    Args:
        specs: of training runs.
        runs: at once on the machine; with the local engine each loads its own.
        seen: GPUs that are visible; 0: the runs may be for another machine.
        gpu_gib: memory of each GPU, GiB.
        host_gib: memory of the machine that the runs leave, GiB; None: not known.
    """
    needs = dict.fromkeys(
        (tuple(measures.get(spec["task"]).companions(spec)), _gpus_of(spec), runs if base_models.is_local(spec) else 1)
        for spec in specs
    )
    problems = []
    for models, gpus, copies in needs:
        if models:
            lines, found = _plan(models, gpus, copies, seen, gpu_gib, host_gib)
            print("\n".join(lines), end="\n\n")
            problems += found
    return problems


def _gpus_of(spec: Mapping[str, Any]) -> int:
    """GPUs of the run itself, the first ones."""
    return 0 if base_models.is_local(spec) else spec.get("gpus") or spec.get("tensor_parallel", 1)


def _plan(
    models: Sequence[Companion], gpus: int, copies: int, seen: int, gpu_gib: float, host_gib: float | None
) -> tuple[list[str], list[str]]:
    """Return a table of the models by device, and why they do not fit."""
    lines, problems = [f"{'beside':13}models of these runs besides their own, GiB by device"], []
    for at in dict.fromkeys(one.at for one in models):
        own = [one for one in models if one.at == at]
        lines.append(f"{'':13}{at}")
        if at in ("server", "endpoint"):
            for one in own:
                asked = f", {one.requests:,} questions a run" if one.requests else ""
                lines.append(f"{'':13}  {'elsewhere':>9}  {one.role} {one.name}{asked}")
            continue
        total = 0.0
        for one in own:
            size = weight_bytes(one.name, one.dtype or ("float32" if at == "cpu" else ""))
            total += copies * ((size or 0.0) / GIB + WORKING_GIB)
            shown = "not known" if size is None else f"{size / GIB:9.1f}"
            lines.append(f"{'':13}  {shown:>9}  {one.role} {one.name}")
        number = f", {copies} runs at once, each with its own" if copies > 1 else ""
        room = host_gib if at == "cpu" else USABLE * gpu_gib
        of = f"of {room:.1f}" if room is not None else "what the machine has is not known here"
        lines.append(
            f"{'':13}  {total:9.1f}  in all, with {WORKING_GIB:g} for the work of each (assumed){number}; {of}"
        )
        index = -1 if at == "cpu" else int(at.rpartition(":")[2])
        if 0 <= index < gpus:
            problems.append(
                f"scorer_device={at!r} is one of the {gpus} GPUs on which the run trains: take 'cuda:{gpus}' or 'cpu', "
                "or serve the models elsewhere (evoalign serve-scorer)."
            )
        elif index >= 0 and 0 < seen <= index:
            problems.append(f"scorer_device={at!r}: this machine has {seen} GPUs.")
        elif room is not None and total > room:
            problems.append(
                f"the models beside the policy need {total:.1f} GiB on {at}, and {room:.1f} may be used: give "
                "scorer_dtype='bfloat16', another device, or serve them elsewhere (evoalign serve-scorer)."
            )
    return lines, problems
