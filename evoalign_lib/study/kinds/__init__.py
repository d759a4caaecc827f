"""The kinds of run: one file per kind, with what makes its specs and `run`, which turns one into a record."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

from evoalign_lib.checks import nearest

KINDS: dict[str, str] = {
    "answers": "evoalign_lib.study.kinds.answers",
    "base": "evoalign_lib.study.kinds.base",
    "train": "evoalign_lib.study.kinds.train",
    "composed": "evoalign_lib.study.kinds.composed",
    "best_of_n": "evoalign_lib.study.kinds.best_of_n",
    "audit": "evoalign_lib.study.kinds.audit",
    "estimator": "evoalign_lib.study.kinds.estimator",
    "judgments": "evoalign_lib.study.kinds.judgments",
    "kl": "evoalign_lib.study.kinds.kl",
    "coverage": "evoalign_lib.study.kinds.coverage",
    "decoding": "evoalign_lib.study.kinds.decoding",
    "memory": "evoalign_lib.study.kinds.memory",
    "merge": "evoalign_lib.study.kinds.merge",
    "noise": "evoalign_lib.study.kinds.noise",
    "path": "evoalign_lib.study.kinds.path",
    "products": "evoalign_lib.study.kinds.products",
    "perturbed": "evoalign_lib.study.kinds.perturbed",
    "published": "evoalign_lib.study.kinds.published",
    "sampled": "evoalign_lib.study.kinds.sampled",
    "scaling": "evoalign_lib.study.kinds.scaling",
    "storage": "evoalign_lib.study.kinds.storage",
    "tastes": "evoalign_lib.study.kinds.tastes",
    "tournament": "evoalign_lib.study.kinds.tournament",
}
"""The registry: a new kind of run is a file and a line here. Its module has `run(spec) -> record`, and `OWN_PROCESS`,
true, where a run has to be the only one of its process."""


def get(kind: Any) -> ModuleType:
    """Import and return the module of a kind. Raises ValueError for an unknown one, with the nearest known name."""
    if kind not in KINDS:
        raise ValueError(f"unknown kind of run {kind!r}; known: {', '.join(KINDS)}.{nearest(kind, KINDS)}")
    return import_module(KINDS[kind])
