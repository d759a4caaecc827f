"""Best of n: the reward chooses among samples of an untrained base, and no weights change."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from typing import Any

import numpy as np

from evoalign_study import base_models, measures, specs, training
from evoalign_study.records import Record, Spec


def best_of_n_specs(
    base: str, seeds: Iterable[int], samples: int, settings: Mapping[str, Any], scale: str
) -> list[Spec]:
    """Specs of best-of-n: the reward chooses among n samples of an untrained base, for n = 1, 2, 4, ... samples.

    Args:
        samples: drawn for each problem, at least 1.
        settings: as for `base_specs`; max_completion_length and test_problems are needed.

    Raises:
        ValueError: no samples; a task whose reward says nothing of right answers; or what `base_specs` refuses.
    """
    if samples < 1:
        raise ValueError(f"samples={samples} must be at least 1.")
    specs.check_names(settings)
    task = settings.get("task", "countdown")
    if measures.get(task).validated_by is None:
        raise ValueError(f"best of n chooses right answers, and the reward of {task} does not know them.")
    wanted = specs.sizes(settings, ("test_problems",)) | {"samples": samples}
    wanted |= specs.engine_fields([base], settings)
    return [specs.begin("best_of_n", base, scale, settings) | wanted | {"seed": seed} for seed in seeds]


def run(spec: Spec) -> Record:
    """Accuracy when the reward chooses the best of n samples of the base, n = 1, 2, 4, ...: no weights change.

    The choice is by the very reward that is measured, so it is the share of problems that n samples solve: the bound of
    what choosing alone can give, at n completions for each test problem.
    """
    model, tokenizer, sets = training.world(spec)
    cpu, problems = time.process_time(), sets["test"]
    with closing(training.evaluation_engine(spec, model, tokenizer, sets)) as engine:
        samples = engine.generate("test", samples=spec["samples"], seed=spec["seed"])
        plan = base_models.plan(spec, engine)
    measure = measures.get(spec["task"])
    answers = [[(p, text) for (text, _), p in zip(row, problems, strict=True)] for row in samples]
    rewards = np.array([[measure.score(*answer) for answer in row] for row in answers])
    right = np.array([[measure.right(*answer) for answer in row] for row in answers])
    accuracy = {}
    for n in (2**k for k in range(spec["samples"].bit_length())):
        best = rewards[:n].argmax(0)  # the first of the best
        accuracy[str(n)] = round(float(right[best, np.arange(len(problems))].mean()), 6)
    tokens = sum(len(ids) for row in samples for _, ids in row)
    prompt_tokens = int(engine.prompts["test"].lengths.sum()) * len(samples)
    budget = {"completions": right.size, "generated_tokens": tokens, "prompt_tokens": prompt_tokens}
    budget |= {"forward_flops": 2 * engine.layout.d * (tokens + prompt_tokens)}
    budget |= {"core_seconds": round(time.process_time() - cpu, 2)}
    return {"budget": budget, "d": engine.layout.d, "best_of_n": accuracy} | plan
