"""Runs that ES and GRPO are held against: filtered fine-tuning, which is the cheapest thing a user would try."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from evoalign_lib import arms, grpo, noise
from evoalign_lib.engines import processes
from evoalign_lib.engines.local import Prompts
from evoalign_study import base_models, gradients, measures, rollouts, training
from evoalign_study.records import Spec


@contextmanager
def train(spec: Spec, place: Path, lasting: bool, keep: Path | None = None) -> Iterator[training.Trained]:
    """Fine-tune on what the task imitates of the base's samples (see `grpo.filtered_sft`), and yield the model.

    Of an arm with perturbed rollouts, in the place of samples, among the greedy answers of copies of the base with
    noise on their weights, one for each of num_generations.

    Arguments as `evolution.train`. It has no ledger, and starts anew after a kill. Of a base that is never right
    nothing passes the filter: the model stays as it is, and `counts` says that 0 were kept.
    """
    import trl

    measure = measures.get(spec["task"])
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
    good = measure.imitated(spec, sets["train"], [[text for text, _ in row] for row in samples])
    pairs = [
        (prompts.ids[i][prompts.mask[i] == 1].tolist(), ids)
        for row, goods in zip(samples, good, strict=True)
        for i, ((_, ids), is_good) in enumerate(zip(row, goods, strict=True))
        if is_good and ids[-1] in engine.eos_ids
    ]
    core_seconds = time.process_time() - cpu
    sampled = {
        "completions": len(samples) * len(prompts),
        "generated_tokens": sum(len(ids) for row in samples for _, ids in row),
        "prompt_tokens": int(prompts.lengths.sum()) * len(samples),
    }
    engine.close()  # the model has the GPU for itself
    progress = training.Progress(None)
    if pairs:
        trainer = _trainer(spec, model, tokenizer, pairs, place, lasting)
        training.watch_divergence(trainer, progress)
        cpu = time.process_time()  # importing and making a trainer is no training
        trainer.train()
        core_seconds += time.process_time() - cpu
        if lasting:
            trainer.save_model(str(place / "model"))
        del trainer
    elif lasting and processes.rank() == 0:
        for part in (model, tokenizer):
            part.save_pretrained(place / "model")
    training.take_weights(engine, model)
    del model
    gc.collect()
    trained = spec["epochs"] * sum(len(prompt) + len(ids) for prompt, ids in pairs)
    passes = sampled["generated_tokens"] + sampled["prompt_tokens"] + 3 * trained
    budget = sampled | {"forward_flops": int(2 * engine.layout.d * passes)}
    budget |= {"core_seconds": round(core_seconds, 2)}
    result = {"budget": budget, "counts": {"kept": len(pairs)}, "trl": trl.__version__}
    with closing(engine):
        yield training.Trained(engine, start, sets, result | base_models.plan(spec, engine), progress.diverged)


def _trainer(spec: Spec, model: Any, tokenizer: Any, pairs: list, place: Path, lasting: bool) -> Any:
    """Return the trainer of a spec on what passed its filter."""
    from transformers import PrinterCallback

    settings = {name: spec[name] for name in ("seed", "learning_rate", "batch_size", "epochs")}
    general = (
        training.reports(spec, lasting)
        | {"save_strategy": "no", "disable_tqdm": True}
        | gradients.device_settings(spec)
    )
    trainer = grpo.filtered_sft(model, tokenizer, pairs, output_dir=str(place), **settings, **general)
    trainer.remove_callback(PrinterCallback)
    return trainer
