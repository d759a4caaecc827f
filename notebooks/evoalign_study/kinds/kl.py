"""Estimators of the KL held against its exact value, of a base moved by noise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from evoalign_lib import noise, tiny
from evoalign_lib.analysis import kl
from evoalign_lib.engines.local import LocalEngine, Prompts
from evoalign_lib.tasks import countdown
from evoalign_study import specs
from evoalign_study.records import Record, Spec


def kl_specs(base: str, sigma: float, repeats: int, settings: Mapping[str, Any], scale: str) -> list[Spec]:
    """Specs of the comparison of KL estimators with the exact KL, of a base moved by noise from the base itself.

    Args:
        sigma: standard deviation of the noise on every weight: it decides the size of the KL.
        repeats: draws of the noise, each with samples of its own.
        settings: max_completion_length, kl_problems (of the validation set), kl_samples (completions per problem).

    Raises:
        ValueError: an odd number of samples, which has no two halves; a base outside the tiny world, or one that needs
            filler_steps; another task than Countdown; another engine than the local one.
    """
    if settings["kl_samples"] < 2 or settings["kl_samples"] % 2:
        raise ValueError(
            f"kl_samples={settings['kl_samples']} must be even: errors come from two halves of the samples."
        )
    wanted = specs.take(settings, ("max_completion_length", "kl_problems", "kl_samples"), "the estimate of KL")
    spec = specs.begin_tiny("kl", base, scale, settings) | wanted | {"sigma": sigma}
    return [spec | {"repeat": repeat} for repeat in range(repeats)]


def run(spec: Spec) -> Record:
    """KL(policy || ref) of a base moved by noise, by every estimator, and their gradients as losses (see `kl`)."""
    (policy, tokenizer), (reference, _) = tiny.load(spec["base"]), tiny.load(spec["base"])
    problems = tiny.problems("validation", spec["kl_problems"])
    prompts = Prompts(countdown.dataset(problems, tokenizer), tokenizer)
    length = spec["max_completion_length"]
    engine = LocalEngine(policy, tokenizer, None, {"validation": prompts}, max_completion_length=length)
    key = noise.member_key(noise.run_key("kl", spec["repeat"]), 0, 0)
    noise.perturb(engine.master, engine.master.copy(), engine.layout, key, spec["sigma"])
    engine.write_model()
    samples = engine.generate("validation", samples=spec["kl_samples"], seed=spec["repeat"])
    completions = [ids for sample in samples for _, ids in sample]
    repeated = [np.tile(a, (spec["kl_samples"], 1)) for a in (prompts.ids, prompts.mask)]
    arguments = policy, reference, *repeated, completions, engine.eos_ids
    comparison = kl.compare(*arguments)
    result = {"sequences": len(completions), "tokens": int(comparison.mask.sum())}
    result |= kl.estimator_errors(comparison) | kl.gradient_errors(*arguments)
    return {"kl": {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in result.items()}}
