"""The families of arms: who trains their runs, where those run, and what they draw."""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from evoalign_lib import arms

if TYPE_CHECKING:
    from evoalign_study.records import Spec
    from evoalign_study.training import Trained


class Family(NamedTuple):
    """What the arms of a family (`arms.Arm.family`) have in common."""

    trainer: str
    """A module, and behind a colon its context `(spec, place, lasting, keep)`, where that is not called `train`."""
    completions: tuple[str, ...]
    """Settings whose product is the number of completions that a run draws in training."""
    has_members: bool = False
    """Whether a run evaluates members on an engine, which it drives from its own process and which may be on several
    machines, and keeps a ledger. Else TRL trains a float32 model in processes of its own, on one machine."""
    samples_first: bool = False
    """Of a family without members: whether a run draws all its completions before it trains, in batches of batch_size
    on one GPU. Else it draws some in every step, which GPUs and micro batches share."""


FAMILIES: dict[str, Family] = {
    "es": Family("evoalign_study.evolution", ("steps", "population_size", "prompts_per_step"), has_members=True),
    "cma": Family("evoalign_study.evolution", ("steps", "population_size", "prompts_per_step"), has_members=True),
    "gradient": Family("evoalign_study.gradients", ("steps", "prompts_per_step", "num_generations")),
    "sft": Family("evoalign_study.gradients:fine_tune", ("prompts", "num_generations"), samples_first=True),
}
"""The registry: a new family is a file with `train` and an entry here."""


def of(arm: str) -> Family:
    """Return the family of an arm.

    Raises:
        ValueError: an unknown arm.
    """
    return FAMILIES[arms.get(arm).family]


def train(spec: Spec, place: Path, lasting: bool = False, keep: Path | None = None) -> AbstractContextManager[Trained]:
    """Train as a spec says; the model is there as long as the context lasts.

    Args:
        spec: of a training run.
        place: folder to work in.
        lasting: whether checkpoints and logs stay there, and the run goes on from what is there; of a family without
            members the model stays in it, too, or its adapter alone.
        keep: where the ledger of a family with members goes, compressed; None: it is not kept.
    """
    module, _, name = of(spec["arm"]).trainer.partition(":")
    return getattr(import_module(module), name or "train")(spec, place, lasting, keep)
