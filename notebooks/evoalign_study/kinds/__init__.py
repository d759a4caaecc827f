"""The kinds of run: one file per kind, with what makes its specs and `run`, which turns one into a record."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

from evoalign_lib.checks import nearest

KINDS: dict[str, str] = {
    "answers": "evoalign_study.kinds.answers",
    "base": "evoalign_study.kinds.base",
    "train": "evoalign_study.kinds.train",
    "composed": "evoalign_study.kinds.composed",
    "best_of_n": "evoalign_study.kinds.best_of_n",
    "audit": "evoalign_study.kinds.audit",
    "estimator": "evoalign_study.kinds.estimator",
    "judgments": "evoalign_study.kinds.judgments",
    "kl": "evoalign_study.kinds.kl",
    "coverage": "evoalign_study.kinds.coverage",
    "decoding": "evoalign_study.kinds.decoding",
    "memory": "evoalign_study.kinds.memory",
    "merge": "evoalign_study.kinds.merge",
    "noise": "evoalign_study.kinds.noise",
    "path": "evoalign_study.kinds.path",
    "products": "evoalign_study.kinds.products",
    "perturbed": "evoalign_study.kinds.perturbed",
    "published": "evoalign_study.kinds.published",
    "sampled": "evoalign_study.kinds.sampled",
    "scaling": "evoalign_study.kinds.scaling",
    "storage": "evoalign_study.kinds.storage",
    "tastes": "evoalign_study.kinds.tastes",
    "tournament": "evoalign_study.kinds.tournament",
}
"""The registry: a new kind of run is a file and a line here. Its module has `run(spec) -> record`, and `OWN_PROCESS`,
true, where a run has to be the only one of its process."""


def get(kind: Any) -> ModuleType:
    """Import and return the module of a kind. Raises ValueError for an unknown one, with the nearest known name."""
    if kind not in KINDS:
        raise ValueError(f"unknown kind of run {kind!r}; known: {', '.join(KINDS)}.{nearest(kind, KINDS)}")
    return import_module(KINDS[kind])
