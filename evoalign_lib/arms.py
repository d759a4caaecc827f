"""The arms of the study in one table: required settings, options of the trainer, and style in figures.

To add an arm, add an entry here; no other code depends on the names of arms. `SWEEP` holds the hyper-parameters from
which tuned arms are chosen, and `ranked` orders the runs of such a sweep.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from evoalign_lib.checks import choose, require


@dataclass(frozen=True)
class Arm:
    """A way to train a model, or a baseline that does not train one."""

    family: Literal["es", "gradient", "sft", "cma", "none"]
    """The trainer that runs the arm; "none" for a baseline without training."""
    color: str
    """Hexadecimal RGB, of one meaning everywhere: base grey, ES blue, GRPO orange and filtered SFT green, as in the
    colour-blind-safe palette of Okabe and Ito (2008); variants in shades of these; nulls light grey."""
    marker: str | tuple[int, int, int]
    """Matplotlib marker, unique to each arm so that figures can be read in greyscale. (n, 1, 0) is a star of n
    points."""
    label: str
    """Name in legends and tables."""
    settings: tuple[str, ...] = ()
    """Settings that every spec of the arm must have."""
    optional: tuple[str, ...] = ()
    """Settings that a spec of the arm may have."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of the family's trainer: fields of `ESConfig`, or of TRL's configuration."""
    sweep: str | None = None
    """Key of the `SWEEP` whose winner sets the arm's hyper-parameters; None: no sweep."""
    null: bool = False
    """Whether the arm is a null, which cannot learn anything by construction, so that no rule may favour it."""
    reward: Literal["task", "random"] = "task"
    """Reward that the arm is trained on: the task's, or 0 and 1 with equal probability."""
    trl: Literal["GRPO", "RLOO"] = "GRPO"
    """For family "gradient": which of TRL's trainers runs it, with that trainer's configuration."""
    weights: Literal["float32", "bfloat16"] = "float32"
    """For family "gradient": the dtype to which the weights are rounded before the first step and after every step."""
    rollouts: Literal["own", "perturbed", "unperturbed"] = "own"
    """Which model generates the rollouts: "own", the usual one of the arm's family; "perturbed", copies with noise on
    their weights, like the members of ES, for a gradient or fine-tuning; "unperturbed", the model itself, for ES, whose
    members are then scored by importance weights (`evoalign_study.rollouts`)."""


_PERTURBED: dict[str, Any] = {"rollouts": "perturbed"}
_ES = ("population_size", "sigma", "alpha", "steps", "prompts_per_step", "curve_points")
_GRADIENT = ("learning_rate", "beta", "num_generations", "steps", "prompts_per_step", "curve_points")
_CMA = ("population_size", "sigma", "leading_share", "steps", "prompts_per_step", "curve_points")
_WARM = ("warm_rows", "warm_epochs", "warm_learning_rate")
_FROZEN = ("base_precision",)  # of the frozen base under an adapter
_CMA += ("lora_rank", *_WARM)
_SFT = ("learning_rate", "num_generations", "prompts", "batch_size", "epochs")
_OPTIONAL = ("curve_spacing", "unique_prompts", "sampled_at")
_CURVED = (*_OPTIONAL, "reach_at")
_DECAYING = (*_CURVED, "anchor_decay")
_GRPO_LOSS = {"loss_type": "grpo", "scale_rewards": "group", "epsilon_high": None}
_SGD = {"optim": "sgd"}


def _es(color: str, marker: Any, label: str, *needs: str, optional: tuple[str, ...] = _DECAYING, **others: Any) -> Arm:
    """Return an ES arm; needs: settings besides those of all ES arms; others: fields of `Arm` and `ESConfig`."""
    known = {name: others.pop(name) for name in Arm.__dataclass_fields__ if name in others}
    return Arm("es", color, marker, label, (*_ES, *needs), optional, others, **{"sweep": "es"} | known)


def _gradient(color: str, marker: Any, label: str, loss: Mapping[str, Any], *needs: str, **others: Any) -> Arm:
    """Return an arm that TRL trains; needs, more: required and optional settings besides those of all such arms."""
    settings, optional = (*_GRADIENT, *needs), (*_CURVED, "scale_rewards", "micro_batch", *others.pop("more", ()))
    return Arm("gradient", color, marker, label, settings, optional, loss, **{"sweep": "grpo"} | others)


def _own(arm: str, fitness: str = "reward") -> dict[str, Any]:
    """Return the options of an ES arm with its own noise draws."""
    return {"fitness": fitness, "arm": arm} | ({"null": True} if fitness == "random" else {})


_NULL, _RANDOM = "#B3B3B3", {"fitness": "random", "null": True}
_LOW_RANK = {"perturbation": "low_rank", "optional": _CURVED, "sweep": "es_low_rank"}
_SCHEDULED = {"optional": (*_CURVED, "sigma_schedule"), **_own("es_scheduled")}
_LORA: dict[str, Any] = {"optional": (*_CURVED, *_WARM, *_FROZEN), "sweep": "es_lora"}
_ESSA: dict[str, Any] = {"settings": _CMA, "optional": (*_CURVED, *_FROZEN), "sweep": "essa"}
_ESSA_RANDOM = {"fitness": "random", "arm": "essa_random"}
_RLOO_LOSS = {"normalize_advantages": False, "reward_clip_range": None, "epsilon_high": None}
_UNPERTURBED = _own("es_weighted") | {"sampling": "common", "sweep": "es_weighted", "rollouts": "unperturbed"}

ARMS: dict[str, Arm] = {
    "es": _es("#0072B2", "o", "ES", fitness="reward"),
    # the fitness of each generation is permuted over its members
    "es_shuffled": _es(_NULL, "s", "ES, shuffled fitness", fitness="shuffled", null=True),
    # random fitness, without generating anything
    "es_random": _es(_NULL, "<", "ES, random fitness", **_RANDOM),
    # rollouts at temperature 1 with common random numbers; its own noise draws
    "es_sampled": _es("#56B4E9", "h", "ES, sampled fitness", fitness="reward", sampling="common", arm="es_sampled"),
    # each step moves a fraction of the way back to the base; its own noise draws
    "es_anchored": _es("#1F4E9E", "p", "ES, anchored decay", "anchor_decay", optional=_CURVED, **_own("es_anchored")),
    # tricks of evolution strategies; their own noise draws
    "es_pairs": _es("#5B9BD5", (13, 1, 0), "ES, antithetic pairs", antithetic=True, **_own("es_pairs")),
    "es_ranks": _es("#2F5F8A", (14, 1, 0), "ES, centred ranks", fitness_shaping="centred_ranks", **_own("es_ranks")),
    "es_scheduled": _es("#8FC1E3", (15, 1, 0), "ES, falling steps", "alpha_schedule", **_SCHEDULED),
    # rollouts at temperature 1 from the unperturbed weights, as in a policy gradient
    "es_weighted": _es("#7FA8D9", (4, 1, 0), "ES, unperturbed rollouts", "num_generations", **_UNPERTURBED),
    # low-rank noise on each matrix; its own noise draws
    "es_low_rank": _es("#00466E", (8, 1, 0), "ES, low rank", "rank", **_own("es_low_rank"), **_LOW_RANK),
    "es_low_rank_random": _es(
        _NULL, (11, 1, 0), "ES, low rank, random fitness", "rank", **_own("es_low_rank_random", "random"), **_LOW_RANK
    ),
    # noise on an adapter over the frozen base, which may be warm-started; its own noise draws
    "es_lora": _es("#3A87C8", (7, 1, 0), "ES, LoRA", "lora_rank", **_own("es_lora"), **_LORA),
    "es_lora_sampled": _es(
        "#B3D7EE", (16, 1, 0), "ES, LoRA, sampled", "lora_rank", sampling="common", **_own("es_lora_sampled"), **_LORA
    ),
    "es_lora_random": _es(
        _NULL, (12, 1, 0), "ES, LoRA, random fitness", "lora_rank", **_own("es_lora_random", "random"), **_LORA
    ),
    # CMA-ES over the singular values of a warm-started LoRA adapter
    "essa": Arm("cma", "#7B3294", (10, 1, 0), "ESSA", options={"fitness": "reward"}, **_ESSA),
    "essa_random": Arm("cma", _NULL, (9, 1, 0), "ESSA, random fitness", options=_ESSA_RANDOM, null=True, **_ESSA),
    "grpo": _gradient("#D55E00", "^", "GRPO", _GRPO_LOSS),
    # an adapter over the frozen base, which may be warm-started
    "grpo_lora": _gradient("#C04A00", (5, 1, 0), "GRPO, LoRA", _GRPO_LOSS, "lora_rank", more=_WARM, sweep="grpo_lora"),
    # rollouts at temperature 1 from perturbed weights, as in ES
    "grpo_perturbed": _gradient(
        "#E8935A", (6, 1, 0), "GRPO, perturbed rollouts", _GRPO_LOSS, "sigma", **_PERTURBED, sweep="grpo_perturbed"
    ),
    "dr_grpo": _gradient("#A34700", "v", "Dr.GRPO", _GRPO_LOSS | {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "dapo": _gradient("#F2B27A", "D", "DAPO", _GRPO_LOSS | {"loss_type": "dapo", "epsilon_high": 0.28}),
    "rloo": _gradient("#B5651D", "P", "RLOO", _RLOO_LOSS, trl="RLOO"),
    "grpo_random": _gradient(_NULL, ">", "GRPO, random reward", _GRPO_LOSS, null=True, reward="random"),
    # separate the effects of the optimiser and of rounding on an update
    "grpo_sgd": _gradient("#E69F00", "d", "GRPO, SGD", _GRPO_LOSS | _SGD),
    "grpo_rounded": _gradient("#7A2E00", "H", "GRPO, bfloat16 weights", _GRPO_LOSS, weights="bfloat16"),
    "grpo_sgd_rounded": _gradient("#C98F00", "8", "GRPO, SGD, bfloat16 weights", _GRPO_LOSS | _SGD, weights="bfloat16"),
    # fine-tuning on the right answers among samples of the base
    "sft": Arm("sft", "#009E73", "X", "filtered SFT", _SFT, _OPTIONAL),
    "sft_perturbed": Arm(
        "sft", "#66C2A5", (3, 1, 0), "filtered SFT, perturbed rollouts", (*_SFT, "sigma"), _OPTIONAL, **_PERTURBED
    ),
}
"""The arms that train. Only nulls share a colour."""

UNTRAINED: dict[str, Arm] = {
    "best_of_n": Arm("none", "#000000", "*", "best of n"),
    "base": Arm("none", "#4D4D4D", "", "base"),
}
"""Baselines without training, shown next to the arms in figures and tables."""


def get(name: str) -> Arm:
    """Return the training arm of this name.

    Raises ValueError for any other name and suggests the nearest known one.
    """
    choose("arm", name, ARMS)
    return ARMS[name]


_OF_ES = [{"sigma": s, "alpha": a} for s in (3e-3, 1e-2, 3e-2) for a in (2.5e-3, 5e-3, 1e-2, 2e-2)]
SWEEP: dict[str, list[dict[str, float]]] = {
    "es": _OF_ES,
    "grpo": [{"learning_rate": r, "beta": b} for r in (3e-5, 1e-4, 3e-4, 1e-3) for b in (0.0, 0.01, 0.04)],
    "grpo_lora": [{"learning_rate": r, "beta": b} for r in (3e-4, 1e-3, 3e-3, 1e-2) for b in (0.0, 0.01, 0.04)],
    "es_weighted": _OF_ES,
    "es_low_rank": _OF_ES,
    "es_lora": [{"sigma": s, "alpha": a} for s in (2e-2, 4e-2, 8e-2) for a in (1e-2, 2e-2, 4e-2, 8e-2)],
    "essa": [{"sigma": s, "leading_share": a} for s in (0.01, 0.03, 0.1, 0.3, 1.0, 3.0) for a in (0.5, 1.0)],
    "grpo_perturbed": [{"learning_rate": r, "sigma": s} for r in (3e-5, 1e-4, 3e-4, 1e-3) for s in (3e-3, 1e-2, 3e-2)],
}
"""Twelve settings from which an arm's is chosen: for ES sigma and alpha, as published; for GRPO learning rate and
beta; for GRPO on perturbed rollouts their sigma instead of beta; for ESSA the initial sigma of the search and the share
of singular values that is searched."""

SWEEP_SEED = 100
"""Seed of the runs of a sweep, which no other run uses."""


def swept(name: str) -> tuple[str, ...]:
    """Return the hyper-parameters that an arm's sweep sets.

    Raises ValueError for an unknown arm and for one without a sweep.

    >>> swept("es_shuffled")
    ('sigma', 'alpha')
    """
    sweep = get(name).sweep
    require(sweep, f"arm {name!r} has no sweep: its settings are fixed, not chosen; name an arm with a sweep.")
    return tuple(SWEEP[sweep][0])


def ranked(runs: Sequence[Mapping[str, Any]]) -> list[tuple[float, dict[str, float]]]:
    """Return score and setting of the runs of a sweep, best first.

    The score is the mean greedy validation accuracy over the last three points of the curve, since single points differ
    by more than most settings do. Of equal scores, the earlier in the sweep comes first.

    runs: run records with a curve. Raises ValueError as `swept` does.
    """
    scores = (float(np.mean(run["curve"]["validation_greedy"][-3:])) for run in runs)
    settings = ({name: run["spec"][name] for name in swept(run["spec"]["arm"])} for run in runs)
    return sorted(zip(scores, settings, strict=True), key=lambda pair: -pair[0])
