"""The kinds of run, by subject: functions that build their specs, and functions that turn a spec into a record."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from evoalign_lib.checks import nearest

KINDS: dict[str, tuple[str, ...]] = {
    "train": ("train", "composed", "audit"),
    "decode": ("base", "best_of_n", "decoding", "sampled"),
    "weights": ("answers", "coverage", "merge", "noise", "path", "perturbed", "products", "pruned", "stretch"),
    "exact": ("estimator", "kl", "pairs", "rank", "signal"),
    "memory": ("memory", "storage"),
    "scaling": ("scaling",),
    "judged": ("judgments", "published", "tastes", "tournament"),
}
"""The registry: module -> its kinds. To add a kind of run, add a file, and a line here. The module's function
`run_KIND(spec) -> record` runs the specs of a kind; without one, its function `run` does."""
ALONE = ("memory",)
"""Kinds of which each run needs a process to itself."""


def get(kind: Any) -> Callable[..., dict[str, Any]]:
    """Import and return the function that runs specs of a kind.

    Raises:
        ValueError: an unknown kind; the message suggests the nearest known name.
    """
    modules = {name: module for module, names in KINDS.items() for name in names}
    if kind not in modules:
        raise ValueError(f"unknown kind of run {kind!r}. Use one of: {', '.join(modules)}.{nearest(kind, modules)}")
    module = import_module(f"{__name__}.{modules[kind]}")
    return getattr(module, f"run_{kind}", None) or module.run
