"""Runs of the arms that TRL trains, GRPO's relatives and filtered fine-tuning, measured by this project's engines.

An arm with `lora_rank` trains an adapter over the frozen base, in the places that ESSA adapts (`essa.lora_config`). The
adapter's initial weights are drawn from the seed of the run, and may first be fine-tuned on right answers
(`training.adapted`). All measurements are of the merged model (`training.take_weights`).
"""

import copy
import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from evoalign_lib import arms, grpo, noise
from evoalign_lib.engines import processes
from evoalign_lib.engines.local import Prompts
from evoalign_study import base_models, measures, preflight, rollouts, training
from evoalign_study.records import Record, Spec


@contextmanager
def train(spec: Spec, place: Path, lasting: bool, keep: Path | None = None) -> Iterator[training.Trained]:
    """Train with one of TRL's trainers in this process (see `grpo`), and yield the model.

    Arguments as for `trainers.train`.
    """
    import trl

    model, tokenizer, sets = training.world(spec)
    # adding an adapter changes the model's own layers, and the engine measures a model without them
    measured, warm = copy.deepcopy(model) if "lora_rank" in spec else model, None
    if "warm_rows" in spec:
        model, warm = training.adapted(spec, model, tokenizer, place)
    with closing(training.evaluation_engine(spec, measured, tokenizer, sets)) as engine:
        training.take_weights(engine, model)  # the engine's own model may have another dtype
        start = engine.master.copy()
        result, diverged = _train(spec, place, lasting, model, tokenizer, sets, engine, warm)
        del model  # frees the trainer's optimiser as well, which may have filled a GPU
        gc.collect()
        yield training.Trained(engine, start, sets, result | {"trl": trl.__version__}, diverged)


def _train(
    spec: Spec, place: Path, lasting: bool, model: Any, tokenizer: Any, sets: Mapping[str, list], engine: Any, warm: Any
) -> tuple[Record, list[int]]:
    """Train a model with one of TRL's trainers, measuring it along the way by an engine, which holds it at the end.

    warm: cost of fine-tuning the adapter beforehand.

    Returns:
        Budget, counts, curve, the decoder of the samples (`grpo.DECODERS`, or "vllm") and, for engines other than the
        local one, the plan; and the steps after which the model had weights that were not finite.
    """
    from transformers import PrinterCallback

    from evoalign_lib.essa import lora_config

    def take() -> None:
        training.take_weights(engine, trainer.model)

    def look() -> tuple[Any, Mapping[str, Any]]:
        take()
        return engine, training.with_warm_start(budget.spent(engine.layout.d), warm)

    local, arm = base_models.is_local(spec), arms.get(spec["arm"])
    progress = training.Progress(place if lasting else None)
    curve = training.curve_callback(spec, sets, progress, look)
    settings: dict[str, Any] = {}
    rows = training.rows(spec, tokenizer, sets["train"])
    # with an adapter TRL's vLLM would round the base (`grpo.trainer`): the model itself generates, vLLM only measures
    colocated = not local and "lora_rank" not in spec
    if colocated:
        asked = Prompts(rows[: spec["steps"] * spec["prompts_per_step"]], tokenizer)
        longest = max(each.width for each in (asked, *engine.prompts.values())) + spec["max_completion_length"]
        settings["vllm"] = {"eos_ids": engine.eos_ids, "max_model_length": longest}
        settings["vllm"]["gpu_memory"] = preflight.colocated_share(spec)
    elif not local:
        engine.settings["gpu_memory_utilization"] = preflight.colocated_share(spec)
    args = configuration(spec, place, **settings | training.reports(spec, lasting) | _device(spec))
    reward = grpo.random_reward(spec["seed"]) if arm.reward == "random" else measures.of(spec).reward(spec)
    written = None  # who writes the completions instead of the model itself
    if arm.rollouts != "own":
        own = spec["arm"], spec["seed"], spec["sigma"], spec["num_generations"]
        written = rollouts.PerturbedRollouts(engine, *own, take)
    adapter = lora_config(spec["lora_rank"]) if "lora_rank" in spec and "warm_rows" not in spec else None
    trainer, budget = grpo.trainer(model, reward, args, rows, tokenizer, [curve], rollouts=written, peft_config=adapter)
    if colocated:
        engine.llm = trainer.vllm_generation.llm
    trainer.remove_callback(PrinterCallback)
    training.watch_divergence(trainer, progress)
    trainer.train(resume_from_checkpoint=_last_checkpoint(place, processes.world_size()))
    counts = dict(budget.counts)
    if spec.get("scale_rewards") != "batch":  # with "batch", TRL logs whether the whole batch has no spread
        zero_std = [e["frac_reward_zero_std"] for e in trainer.state.log_history if "frac_reward_zero_std" in e]
        counts["zero_std_groups"] = round(float(np.mean(zero_std)), 5)
    if lasting:
        trainer.save_model(str(place / "model"))
    result = {"budget": look()[1], "counts": counts, "curve": progress.curve}
    result |= {"decoder": "vllm" if colocated else spec.get("decoder", "generate")}  # of the training samples
    if written is not None:
        result |= {"decoder": engine.decoder, "rollouts": written.summary()}
    return result | base_models.plan(spec, engine), progress.diverged


def configuration(spec: Spec, folder: Path = Path("run"), **changed: Any) -> Any:
    """Return the configuration of a spec's trainer (`grpo.config`, which refuses what it cannot train with).

    folder: of the run. changed: further settings.
    """
    names = ("seed", "steps", "prompts_per_step", "num_generations", "max_completion_length", "learning_rate", "beta")
    settings = {name: spec[name] for name in (*names, "scale_rewards", "micro_batch", "decoder") if name in spec}
    general = {"report_to": "none", "disable_tqdm": True, "logging_steps": 1}
    return grpo.config(spec["arm"], output_dir=str(folder), **settings | general | changed)


def _last_checkpoint(place: Path, n: int) -> str | None:
    """Return the newest complete checkpoint of a gradient arm on n processes; a kill may leave incomplete ones."""
    from evoalign_lib import _checkpoints  # imports transformers, which no plan needs

    states = [f"rng_state_{rank}.pth" for rank in range(n)] if n > 1 else []
    known = [str(path) for path in _checkpoints.complete(place) if all((path / name).is_file() for name in states)]
    return known[-1] if known else None


def _device(spec: Spec) -> dict[str, bool]:
    """Return where TRL trains: with the local engine on the CPU, as ES does, even on a machine with GPUs."""
    import torch

    gpus = torch.cuda.is_available()
    elsewhere = not base_models.is_local(spec) and gpus
    # set only if TRL would choose another device by itself
    return {"use_cpu": True} if not elsewhere and (gpus or processes.world_size() > 1) else {}


# ---- filtered fine-tuning, the cheapest method a user would try


@contextmanager
def fine_tune(spec: Spec, place: Path, lasting: bool, keep: Path | None = None) -> Iterator[training.Trained]:
    """Fine-tune on those of the base's samples that the task imitates (see `grpo.filtered_sft`), and yield the model.

    For an arm with perturbed rollouts, the greedy answers of num_generations copies of the base with noise on their
    weights are filtered instead of samples.

    Arguments as for `trainers.train`. After a kill the run starts from the beginning. If the base is never right,
    nothing passes the filter: the model does not change, and `counts` says that 0 were kept.
    """
    import trl

    model, tokenizer, sets = training.world(spec)
    engine = training.evaluation_engine(spec, model, tokenizer, sets)
    training.take_weights(engine, model)
    start, cpu = engine.master.copy(), time.process_time()
    engine.prompts["train"] = prompts = Prompts(training.rows(spec, tokenizer, sets["train"]), tokenizer)
    if arms.get(spec["arm"]).rollouts == "perturbed":
        key = noise.run_key(spec["arm"], spec["seed"])
        samples = rollouts.greedy_answers(engine, ["train"], key, spec["sigma"], spec["num_generations"])["train"]
    else:
        samples = engine.generate("train", samples=spec["num_generations"], seed=spec["seed"])
    pairs = imitated(spec, sets["train"], samples, prompts, engine.eos_ids)
    core_seconds = time.process_time() - cpu
    engine.close()  # leaves the GPU to the model
    progress = training.Progress(None)
    if pairs:
        core_seconds += _fit(spec, model, tokenizer, pairs, place, lasting, progress)
    elif lasting and processes.rank() == 0:
        for part in (model, tokenizer):
            part.save_pretrained(place / "model")
    training.take_weights(engine, model)
    del model
    gc.collect()
    budget = spent(spec, samples, prompts, pairs, engine.layout.d) | {"core_seconds": round(core_seconds, 2)}
    result = {"budget": budget, "counts": {"kept": len(pairs)}, "trl": trl.__version__}
    with closing(engine):
        yield training.Trained(engine, start, sets, result | base_models.plan(spec, engine), progress.diverged)


def imitated(spec: Spec, problems: Sequence[Any], samples: Sequence[Any], prompts: Prompts, eos: Any) -> list:
    """Return the ids of the prompts and samples that pass the task's filter and have ended (`eos`), a pair each."""
    good = measures.of(spec).imitated(spec, problems, samples)
    return [
        (prompts.ids[i][prompts.mask[i] == 1].tolist(), ids)
        for row, goods in zip(samples, good, strict=True)
        for i, ((_, ids), is_good) in enumerate(zip(row, goods, strict=True))
        if is_good and ids[-1] in eos
    ]


def spent(spec: Spec, samples: Sequence[Any], prompts: Prompts, pairs: Sequence[Any], d: int) -> dict[str, Any]:
    """Return the budget of filtered fine-tuning but for its seconds; samples: rows of `engine.generate`."""
    sampled = {
        "completions": len(samples) * len(prompts),
        "generated_tokens": sum(len(ids) for row in samples for _, ids in row),
        "prompt_tokens": int(prompts.lengths.sum()) * len(samples),
    }
    trained = spec["epochs"] * sum(len(prompt) + len(ids) for prompt, ids in pairs)
    passes = sampled["generated_tokens"] + sampled["prompt_tokens"] + 3 * trained
    return sampled | {"forward_flops": int(2 * d * passes)}


def _fit(
    spec: Spec, model: Any, tokenizer: Any, pairs: list, place: Path, lasting: bool, progress: training.Progress
) -> float:
    """Train a model on what passed the filter; return the core-seconds, without those of building the trainer."""
    from transformers import PrinterCallback

    settings = {name: spec[name] for name in ("seed", "learning_rate", "batch_size", "epochs")}
    settings |= training.reports(spec, lasting) | {"save_strategy": "no", "disable_tqdm": True} | _device(spec)
    trainer = grpo.filtered_sft(model, tokenizer, pairs, output_dir=str(place), **settings)
    trainer.remove_callback(PrinterCallback)
    training.watch_divergence(trainer, progress)
    cpu = time.process_time()
    trainer.train()
    cpu = time.process_time() - cpu
    if lasting:
        trainer.save_model(str(place / "model"))
    return cpu
