"""Runs of the arms that TRL trains, measured by an engine of ours along the way.

An arm with `lora_rank` trains an adapter over the frozen base, where ESSA adapts it (`essa.lora_config`), with first
weights drawn from the seed of the run, which may be fine-tuned on right answers before (`warm_starts`). Everything is
measured of the merged model (`training.take_weights`).
"""

from __future__ import annotations

import copy
import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from evoalign_lib import arms, grpo
from evoalign_lib.engines import processes
from evoalign_lib.engines.local import Prompts
from evoalign_study import base_models, measures, preflight, rollouts, training, warm_starts
from evoalign_study.records import Record, Spec


@contextmanager
def train(spec: Spec, place: Path, lasting: bool, keep: Path | None = None) -> Iterator[training.Trained]:
    """Train by one of TRL's trainers in this process (see `grpo`), and yield the model.

    Arguments as `evolution.train`; keep: gradient arms have no ledger. With `lasting` the model stays in the folder, or
    its adapter alone.
    """
    import trl

    model, tokenizer, sets = training.world(spec)
    # an adapter's layers come into the model itself, and the engine measures one without them
    measured, warm = copy.deepcopy(model) if "lora_rank" in spec else model, None
    if "warm_rows" in spec:
        model, warm = warm_starts.adapted(spec, model, tokenizer, place)
    with closing(training.evaluation_engine(spec, measured, tokenizer, sets)) as engine:
        training.take_weights(engine, model)  # the engine's own model may have another dtype
        start = engine.master.copy()
        result, diverged = _train(spec, place, lasting, model, tokenizer, sets, engine, warm)
        del model  # and with it the trainer's optimiser, which may have filled a GPU
        gc.collect()
        yield training.Trained(engine, start, sets, result | {"trl": trl.__version__}, diverged)


def _train(
    spec: Spec,
    place: Path,
    lasting: bool,
    model: Any,
    tokenizer: Any,
    sets: Mapping[str, list],
    engine: Any,
    warm: Mapping[str, Any] | None,
) -> tuple[Record, list[int]]:
    """Train a model by one of TRL's trainers, and measure it by an engine along the way, which has it at the end.

    warm: what fine-tuning its adapter took.

    Returns:
        Budget, counts, curve, who decoded the samples (`grpo.DECODERS`, or "vllm") and, of another engine than the
        local one, its plan; and the steps after which the model had weights that were not finite.
    """
    from transformers import PrinterCallback

    def take() -> None:
        training.take_weights(engine, trainer.model)

    def look() -> tuple[Any, Mapping[str, Any]]:
        take()
        return engine, warm_starts.added(budget.spent(engine.layout.d), warm)

    progress = training.Progress(place if lasting else None)
    curve = training.curve_callback(spec, sets, progress, look)
    names = ("seed", "steps", "prompts_per_step", "num_generations", "max_completion_length", "learning_rate", "beta")
    settings = {name: spec[name] for name in names}
    settings |= {name: spec.get(name) for name in ("scale_rewards", "micro_batch")}
    rows = training.rows(spec, tokenizer, sets["train"])
    settings |= {"decoder": spec["decoder"]} if "decoder" in spec else {}
    # beside an adapter TRL's vLLM would round the base (`grpo.trainer`): the model itself generates, vLLM only measures
    colocated = not base_models.is_local(spec) and "lora_rank" not in spec
    if colocated:
        settings["vllm"] = _vllm_settings(spec, tokenizer, rows[: spec["steps"] * spec["prompts_per_step"]], engine)
    elif not base_models.is_local(spec):
        engine.settings["gpu_memory_utilization"] = preflight.colocated_share(spec)
    general = training.reports(spec, lasting) | {"disable_tqdm": True, "logging_steps": 1} | device_settings(spec)
    args = grpo.config(spec["arm"], output_dir=str(place), **settings, **general)
    written = _rollouts(spec, engine, take)
    given = {"rollouts": written, "peft_config": _adapter(spec)}
    trainer, budget = grpo.trainer(model, _reward(spec), args, rows, tokenizer, [curve], **given)
    if colocated:
        engine.llm = trainer.vllm_generation.llm
    trainer.remove_callback(PrinterCallback)
    training.watch_divergence(trainer, progress)
    trainer.train(resume_from_checkpoint=_last_checkpoint(place, processes.world_size()))
    counts = dict(budget.counts)
    if spec.get("scale_rewards") != "batch":  # where TRL logs whether the whole batch has no spread
        zero_std = [e["frac_reward_zero_std"] for e in trainer.state.log_history if "frac_reward_zero_std" in e]
        counts["zero_std_groups"] = round(float(np.mean(zero_std)), 5)
    if lasting:
        trainer.save_model(str(place / "model"))
    result = {"budget": look()[1], "counts": counts, "curve": progress.curve}
    result |= {"decoder": "vllm" if colocated else spec.get("decoder", "generate")}  # of the samples that it trains on
    if written is not None:
        result |= {"decoder": engine.decoder, "rollouts": written.summary()}
    return result | base_models.plan(spec, engine), progress.diverged


def _adapter(spec: Spec) -> Any:
    """The configuration of the adapter that an arm makes; None: it trains all weights, or the adapter that is there."""
    if "lora_rank" not in spec or "warm_rows" in spec:
        return None
    from evoalign_lib.essa import lora_config

    return lora_config(spec["lora_rank"])


def _rollouts(spec: Spec, engine: Any, take: Callable[[], None]) -> rollouts.PerturbedRollouts | None:
    """Who writes an arm's completions instead of the model itself; take: gives the engine the model's weights."""
    if arms.get(spec["arm"]).rollouts == "own":
        return None
    return rollouts.PerturbedRollouts(engine, spec["arm"], spec["seed"], spec["sigma"], spec["num_generations"], take)


def _reward(spec: Spec) -> Callable[..., list[float | None]]:
    """What an arm is trained on: the task's reward, or coins."""
    if arms.get(spec["arm"]).reward == "random":
        return grpo.random_reward(spec["seed"])
    return measures.get(spec["task"]).reward(spec)


def _last_checkpoint(place: Path, n: int) -> str | None:
    """The newest checkpoint of a gradient arm on n processes that no kill left incomplete."""
    complete = []
    for folder in place.glob("checkpoint-*"):
        try:
            json.loads((folder / "trainer_state.json").read_text())  # what the first process writes last
        except (OSError, ValueError):
            continue
        if n == 1 or all((folder / f"rng_state_{rank}.pth").is_file() for rank in range(n)):
            complete.append(str(folder))
    return max(complete, key=lambda name: int(name.rpartition("-")[2]), default=None)


def _vllm_settings(spec: Spec, tokenizer: Any, rows: Sequence[Mapping[str, Any]], engine: Any) -> dict[str, Any]:
    """What `grpo.config` is told of vLLM beside the model: the memory is that of the run's plan."""
    width = max(p.width for p in (Prompts(rows, tokenizer), *engine.prompts.values()))
    return {
        "eos_ids": engine.eos_ids,
        "max_model_length": width + spec["max_completion_length"],
        "gpu_memory": preflight.colocated_share(spec),
    }


def device_settings(spec: Spec) -> dict[str, bool]:
    """Return where TRL trains: with the local engine on the CPU, as ES does, even on a machine with GPUs."""
    import torch

    gpus = torch.cuda.is_available()
    elsewhere = not base_models.is_local(spec) and gpus
    # said only where TRL would find out something else by itself
    return {"use_cpu": True} if not elsewhere and (gpus or processes.world_size() > 1) else {}
