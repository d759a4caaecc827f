"""The kinds of run, by subject: what makes their specs, and what turns a spec into a record."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from evoalign_lib.checks import nearest

KINDS: dict[str, str] = {
    "train": "evoalign_study.kinds.train",
    "composed": "evoalign_study.kinds.train:run_composed",
    "audit": "evoalign_study.kinds.train:run_audit",
    "base": "evoalign_study.kinds.decode:run_base",
    "best_of_n": "evoalign_study.kinds.decode:run_best_of_n",
    "decoding": "evoalign_study.kinds.decode:run_decoding",
    "sampled": "evoalign_study.kinds.decode:run_sampled",
    "answers": "evoalign_study.kinds.weights:run_answers",
    "coverage": "evoalign_study.kinds.weights:run_coverage",
    "merge": "evoalign_study.kinds.weights:run_merge",
    "noise": "evoalign_study.kinds.weights:run_noise",
    "path": "evoalign_study.kinds.weights:run_path",
    "perturbed": "evoalign_study.kinds.weights:run_perturbed",
    "products": "evoalign_study.kinds.weights:run_products",
    "estimator": "evoalign_study.kinds.exact:run_estimator",
    "kl": "evoalign_study.kinds.exact:run_kl",
    "memory": "evoalign_study.kinds.memory:run_memory",
    "storage": "evoalign_study.kinds.memory:run_storage",
    "scaling": "evoalign_study.kinds.scaling",
    "judgments": "evoalign_study.kinds.judged:run_judgments",
    "published": "evoalign_study.kinds.judged:run_published",
    "tastes": "evoalign_study.kinds.judged:run_tastes",
    "tournament": "evoalign_study.kinds.judged:run_tournament",
}
"""The registry: a new kind of run is a file and a line here. A line names a module, and behind a colon the function
`run(spec) -> record`, "run" where there is no colon."""
ALONE = ("memory",)
"""Kinds whose run has to be the only one of its process."""


def get(kind: Any) -> Callable[..., dict[str, Any]]:
    """Import and return the function that runs specs of a kind.

    Raises:
        ValueError: an unknown kind; the message has the nearest known name.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind of run {kind!r}; known: {', '.join(KINDS)}.{nearest(kind, KINDS)}")
    module, _, function = KINDS[kind].partition(":")
    return getattr(import_module(module), function or "run")
