"""The families of arms: which trainer runs them, where it runs, and how many completions it draws."""

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
    """Module of the trainer; after a colon its context manager `(spec, place, lasting, keep)`, if not named `train`."""
    completions: tuple[str, ...]
    """Settings whose product is the number of completions that a run draws in training."""
    has_members: bool = False
    """Whether a run keeps a ledger and evaluates members on an engine, which it drives from its own process and which
    may span several machines. If not, TRL trains a float32 model in separate processes on one machine."""
    samples_first: bool = False
    """For a family without members: whether a run draws all its completions first, then trains on one GPU in batches of
    batch_size. If not, it draws some in every step, which are split over GPUs and micro batches."""


FAMILIES: dict[str, Family] = {
    "es": Family("evoalign_study.evolution", ("steps", "population_size", "prompts_per_step"), has_members=True),
    "cma": Family("evoalign_study.evolution", ("steps", "population_size", "prompts_per_step"), has_members=True),
    "gradient": Family("evoalign_study.gradients", ("steps", "prompts_per_step", "num_generations")),
    "sft": Family("evoalign_study.gradients:fine_tune", ("prompts", "num_generations"), samples_first=True),
}
"""Name -> family. To add a family, write a module with `train` and add an entry here."""


def of(arm: str) -> Family:
    """Return the family of an arm.

    Raises:
        ValueError: the arm is unknown.
    """
    return FAMILIES[arms.get(arm).family]


def check(spec: Spec) -> None:
    """Raise ValueError for settings of a training run that its trainer would refuse, by making its configuration."""
    module, _, name = of(spec["arm"]).trainer.partition(":")
    if not name:  # fine-tuning has no configuration without its samples
        options = arms.get(spec["arm"]).options if of(spec["arm"]).has_members else {}
        import_module(module).configuration(spec, **options)


def train(spec: Spec, place: Path, lasting: bool = False, keep: Path | None = None) -> AbstractContextManager[Trained]:
    """Return a context that trains as a spec says and holds the trained model while it lasts.

    Args:
        spec: of a training run.
        place: folder to work in.
        lasting: whether checkpoints and logs stay in the folder, and the run resumes from what is there; families
            without members leave the model there too, or its adapter alone.
        keep: where the compressed ledger of a family with members goes; None: it is not kept.
    """
    module, _, name = of(spec["arm"]).trainer.partition(":")
    return getattr(import_module(module), name or "train")(spec, place, lasting, keep)
