"""Training runs: their specs, those of the sweep that chooses their hyper-parameters, and who trains each family."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from evoalign_lib import arms, grpo
from evoalign_lib.arms import SWEEP, SWEEP_SEED
from evoalign_lib.records import MAX_CURVE, Record, Spec
from evoalign_lib.study import measures, specs, training

FAMILIES: dict[str, str] = {
    "es": "evoalign_lib.study.evolution",
    "gradient": "evoalign_lib.study.gradients",
    "sft": "evoalign_lib.study.baselines",
}
"""Who trains the arms of a family (`arms.Arm.family`): modules with `run(spec, place, lasting, keep)`."""


def train_specs(
    arm: str, bases: Sequence[str], seeds: Iterable[int], settings: Mapping[str, Any], scale: str
) -> list[Spec]:
    """Return specs of training runs: those of the bases, with arm, seed and hyper-parameters.

    Args:
        arm: a key of `arms.ARMS`.
        settings: as for `base_specs`, and those that the arm needs (`arms.Arm.settings`). Optional are:
            curve_spacing "log": points evenly spaced in the logarithm of the steps; else evenly in steps.
            unique_prompts: the run sees so many problems, again and again, each equally often in the whole run, a
            gradient arm in turn and ES in random order. Without it every step has new ones in the tiny world, and other
            models train on all public problems; conciseness needs it in the tiny world, 2 or 200.
            scale_rewards: in the place of the arm's own.
            micro_batch, of GRPO and its relatives: completions in a backward pass of one GPU; else all of its share of
            a step, too many for a large model.
            engine ("local", "vllm", "ray"), gpus, tensor_parallel: as `ESConfig` has them; the arms that TRL trains
            have vLLM beside the model (see `specs.engine_fields`).

    Raises:
        ValueError: an unknown arm, a setting that is missing, fewer curve points than hold the first step and the last
            or more than a record holds, an unknown curve_spacing, no prompts or more than there are, a step that does
            not fall into parts for GPUs and micro batches, or what `base_specs` refuses.
        FileNotFoundError: as `base_specs`.
    """
    entry = arms.get(arm)
    for base in bases:
        measures.get(settings.get("task", "countdown")).check(arm, base, settings)
    wanted = specs.sizes(settings) | specs.take(settings, entry.settings, f"arm {arm!r}")
    wanted |= {name: settings[name] for name in entry.optional if settings.get(name) is not None}
    wanted |= specs.engine_fields(bases, settings, entry.family)
    if entry.family == "gradient":
        rollouts = wanted["prompts_per_step"] * wanted["num_generations"]
        grpo.shared(rollouts, wanted.get("micro_batch"), wanted.get("gpus", 1))
    _check_curve(wanted)
    if wanted.get("unique_prompts", 1) < 1:
        raise ValueError(f"unique_prompts={wanted['unique_prompts']}: give at least 1, or leave it out for new ones.")
    return [
        specs.begin("train", base, scale, settings) | {"arm": arm, "seed": seed} | wanted
        for base in bases
        for seed in seeds
    ]


def _check_curve(wanted: Mapping[str, Any]) -> None:
    if wanted.get("curve_spacing", "log") != "log":
        raise ValueError(f"curve_spacing={wanted['curve_spacing']!r}: use 'log', or leave it out for even spacing.")
    points, least = wanted.get("curve_points", MAX_CURVE), 3 if "curve_spacing" in wanted else 2
    if points > MAX_CURVE:
        raise ValueError(f"curve_points={points} is more than a record holds: at most {MAX_CURVE}.")
    if points < least:
        raise ValueError(f"curve_points={points} leaves out the last step: at least {least} are needed.")


def sweep_specs(
    arm: str, base: str, settings: Mapping[str, Any], scale: str, choices: Sequence[Mapping[str, float]] | None = None
) -> list[Spec]:
    """Return specs of a sweep: each setting once, at half length, on the validation set only, with a seed of its own.

    Args:
        arm: a key of `arms.SWEEP`.
        settings: as for `train_specs`, at full length.
        choices: the settings compared; None: those of `arms.SWEEP`.

    Raises:
        ValueError: a task whose validation says nothing of right answers, by which `arms.ranked` ranks.
    """
    task = settings.get("task", "countdown")
    if measures.get(task).validated_by is None:
        raise ValueError(f"a sweep ranks by right answers, and {task} validates by a proxy: train a map instead.")
    half = dict(settings) | {"steps": settings["steps"] // 2, "test_problems": 0}
    choices = SWEEP[arm] if choices is None else choices
    return [spec for c in choices for spec in train_specs(arm, [base], [SWEEP_SEED], half | dict(c), scale)]


def run(spec: Spec, keep: Path | None = None, folder: Path | None = None) -> Record:
    """Return the record of a training run: its curve, and the test set once, at the end.

    Args:
        spec: of `train_specs`.
        keep: where the ledger of an ES run goes, compressed; None: it is not kept.
        folder: where the run keeps checkpoints, logs for TensorBoard and the points of its curve, and from where it
            goes on if it was killed ("sft" starts anew), until `training.settle` is told that its record is stored. Of
            a gradient arm the trained model stays there (an ES run's ledger stands for it). None: nothing is kept.

    Raises:
        RuntimeError: another process works in the folder; or the processes of a gradient arm failed, saying how.
    """
    train = import_module(FAMILIES[arms.get(spec["arm"]).family]).run
    with training.workplace(folder) as place:
        return train(spec, place, folder is not None, keep)
