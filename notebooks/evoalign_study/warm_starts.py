"""The adapter that a run begins from: a new one, or one that was fine-tuned on a few right answers before.

The answers are to training problems of their own, which no run sees; for a model from outside the tiny world, whose
runs have few problems, to some of those. An arm over an adapter (`lora_rank`) may have such a warm start; ESSA needs
one. What it takes is in the budget of a run from its first step on.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evoalign_lib import _adapters, tiny
from evoalign_study import base_models, measures
from evoalign_study.records import Spec

SETTINGS = ("warm_rows", "warm_epochs", "warm_learning_rate")
"""Of a spec: how many right answers, and how the adapter is fine-tuned on them."""
_SEEDS = 1 << 20
"""What seeds of training problems for warm starts are apart from those of the runs."""


def adapted(spec: Spec, model: Any, tokenizer: Any, folder: Path) -> tuple[Any, dict[str, Any] | None]:
    """Return a model with the adapter that a spec begins from, drawn from its seed, and what fine-tuning it took.

    A spec without `warm_rows` has a new adapter, whose B is zero, and None. folder: for TRL's files.
    """
    from evoalign_lib.essa import fine_tune, lora_config  # and transformers, which no plan needs

    model = _adapters.attach(model, lora_config(spec["lora_rank"]), spec["seed"]).eval()
    if "warm_rows" not in spec:
        return model, None
    return model, fine_tune(model, tokenizer, rows(spec, tokenizer), arguments(spec, folder))


def added(budget: Mapping[str, Any], cost: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the budget of a run with what fine-tuning its adapter took; None: nothing."""
    if cost is None:
        return dict(budget)
    more = {name: budget[name] + cost[name] for name in ("forward_flops", "core_seconds")}
    return dict(budget) | more | {"sft_tokens": cost["tokens"]}


def rows(spec: Spec, tokenizer: Any) -> list[dict[str, Any]]:
    """Return prompts and right answers with the end token, `warm_rows` of them, drawn from the seed of a spec."""
    measure, rng = measures.get(spec["task"]), random.Random(f"warm start {spec['seed']}")
    drawn = {k: v for k, v in spec.items() if k not in ("steps", "prompts_per_step")} | {"prompts": spec["warm_rows"]}
    problems = measure.sets(drawn | {"seed": spec["seed"] + _SEEDS})["train"]
    answers = [measure.right_answer(problem, rng).removesuffix(tiny.END) for problem in problems]
    asked = measure.rows(spec, tokenizer, problems)
    return [
        {"prompt": row["prompt"], "completion": text + tokenizer.eos_token}
        for text, row in zip(answers, asked, strict=True)
    ]


def arguments(spec: Spec, folder: Path) -> Any:
    """Return the `trl.SFTConfig` of a spec. folder: for its files."""
    import torch
    from trl import SFTConfig

    return SFTConfig(
        output_dir=str(folder / "sft"),
        learning_rate=spec["warm_learning_rate"],
        lr_scheduler_type="constant",
        num_train_epochs=spec["warm_epochs"],
        per_device_train_batch_size=16,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=base_models.is_local(spec) or not torch.cuda.is_available(),
        seed=spec["seed"],
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
