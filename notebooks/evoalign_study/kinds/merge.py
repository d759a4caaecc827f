"""Models merged from the weights of several runs, and what is left of the runs in them.

Runs of one arm from one base share what the reward taught them, and each has taken a random walk of its own. Their
average keeps what they share and sheds the walks: K walks of equal length average to one of 1/sqrt(K) of it. The same
record of one run shrunk to that length, and of a random direction, says what the average owes to being short.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np

from evoalign_study import base_models, measures, specs, training, weight_cache
from evoalign_study.records import Record, Spec

TEMPERATURE = 0.6
"""At which the test set is sampled, besides greedy decoding and temperature 1."""
_SIZES = ("max_completion_length", "validation_problems", "test_problems", "skill_messages")


def merge_specs(
    records: Sequence[Record],
    settings: Mapping[str, Any],
    scale: str,
    *,
    factor: float = 1.0,
    as_long_as: Sequence[Record] = (),
    draw: int | None = None,
) -> Spec:
    """Return the spec of a model at base + factor * (mean of the runs' weights - base), and of what it can do.

    Args:
        records: of the runs: training runs of one arm and setting from one plain base of the tiny world, which differ
            in their seeds. One run alone is measured as it is.
        settings: max_completion_length, validation_problems, test_problems, skill_messages (of each skill).
        scale: of the notebook.
        factor: what the mean displacement is multiplied by.
        as_long_as: runs whose mean displacement gives this one its length, before the factor; none: its own length.
        draw: instead of the mean displacement a random direction, the draw of this number, with the same norm in each
            tensor. None: the mean itself.

    Raises:
        ValueError: runs that make no group (`trained.group`), a factor that is not finite, a setting that is missing, a
            base outside the tiny world or of another task.
    """
    end = weight_cache.end(records, factor=factor, as_long_as=as_long_as, draw=draw)
    spec = specs.begin_tiny("merge", end["of"]["run"]["base"], scale, {})
    return spec | specs.take(settings, _SIZES, "a merged model") | {"arm": end["of"]["run"]["arm"]} | end


def run(spec: Spec) -> Record:
    """Return how far a merged model lies from its base, and what it can do.

    The record has the norm of the displacement; the test set greedily, at `TEMPERATURE` and at 1; the KL from the base
    on the task; and of each skill that no reward touches accuracy and KL.
    """
    measure = measures.get(spec["task"])
    model, tokenizer, sets = training.world(spec)
    with closing(training.evaluation_engine(spec, model, tokenizer, sets)) as engine:
        moved = weight_cache.displacement(spec, engine.master, engine.layout)
        engine.master[:] = weight_cache.moved(engine.master, moved)
        result: Record = {"d": engine.layout.d, "norm": float(f"{np.linalg.norm(moved):.7g}")}
        result["test"] = measure.tested(engine, sets["test"])
        result["test"] |= measure.sampled(spec, engine, sets, "test", [TEMPERATURE], 16)
        result["kl_policy_base"] = base_models.kl_from_base(spec | {"seed": 0}, engine)
        result["skills"] = measure.skills(spec, engine)
        return result
