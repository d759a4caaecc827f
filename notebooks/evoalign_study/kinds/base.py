"""Runs that measure an untrained base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from evoalign_study import base_models, measures, specs, training
from evoalign_study.records import Record, Spec


def base_specs(bases: Sequence[str], settings: Mapping[str, Any], scale: str) -> list[Spec]:
    """Return specs of the measurement of untrained bases.

    Args:
        bases: shipped bases ("A0", ...), or models on the Hub or in folders, which get the task's public problems.
        settings: task, max_completion_length and the sizes that the task needs (`Measures.sizes`); for the tiny world's
            base "H0" also filler_steps, how long all prompts ask it to think (see `tiny.dataset`); engine, gpus and
            tensor_parallel as `ESConfig` has them.
        scale: of the notebook.

    Raises:
        ValueError: a setting that no run reads, what `specs.begin` refuses, or a shipped base with another engine than
            the local one.
        FileNotFoundError: a file that the settings name is not there.
    """
    specs.check_names(settings)
    wanted = specs.sizes(settings) | specs.engine_fields(bases, settings)
    return [specs.begin("base", base, scale, settings) | wanted for base in bases]


def run(spec: Spec) -> Record:
    """Return what is measured of an untrained base (`Measures.base_outcome`)."""
    model, tokenizer, sets = training.world(spec)
    measure = measures.get(spec["task"])
    with measure.beside(spec), closing(training.evaluation_engine(spec, model, tokenizer, sets)) as engine:
        plan = base_models.plan(spec, engine)
        return measure.base_outcome(spec, engine, sets) | plan
