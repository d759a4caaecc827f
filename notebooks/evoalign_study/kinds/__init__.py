"""The kinds of run, by subject: what makes their specs, and what turns a spec into a record."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from evoalign_lib.checks import nearest

KINDS: dict[str, tuple[str, ...]] = {
    "train": ("train", "composed", "audit"),
    "decode": ("base", "best_of_n", "decoding", "sampled"),
    "weights": ("answers", "coverage", "merge", "noise", "path", "perturbed", "products"),
    "exact": ("estimator", "kl"),
    "memory": ("memory", "storage"),
    "scaling": ("scaling",),
    "judged": ("judgments", "published", "tastes", "tournament"),
}
"""The registry: module -> its kinds. A new kind of run is a file and a line here. A module runs specs of a kind by its
function `run_KIND(spec) -> record`, or by `run` where it has none."""
ALONE = ("memory",)
"""Kinds whose run has to be the only one of its process."""


def get(kind: Any) -> Callable[..., dict[str, Any]]:
    """Import and return the function that runs specs of a kind.

    Raises:
        ValueError: an unknown kind; the message has the nearest known name.
    """
    modules = {name: module for module, names in KINDS.items() for name in names}
    if kind not in modules:
        raise ValueError(f"unknown kind of run {kind!r}; known: {', '.join(modules)}.{nearest(kind, modules)}")
    module = import_module(f"{__name__}.{modules[kind]}")
    return getattr(module, f"run_{kind}", None) or module.run
