"""Runs that several notebooks share: the arms of notebooks 01, 02 and 03, with the settings that all of them have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from evoalign_lib import arms, tiny
from evoalign_study import loading
from evoalign_study.kinds.decode import base_specs
from evoalign_study.kinds.train import sweep_specs
from evoalign_study.loading import Group, Groups, Records
from evoalign_study.records import Record

TUNED = ("es", "grpo")
"""Arms that a sweep tunes."""

ES_COUNTDOWN: dict[str, dict[str, Any]] = {
    "tiny": {
        "n_seeds": 8,
        "population_size": 30,
        "sigma": 1e-2,
        "alpha": 1e-2,
        "steps": 100,
        "prompts_per_step": 128,
        "curve_points": 21,
        "max_completion_length": tiny.MAX_COMPLETION_LENGTH,
        "validation_problems": 512,
        "test_problems": 2000,
    },
    "smoke": {
        "n_seeds": 2,
        "population_size": 4,
        "steps": 3,
        "prompts_per_step": 16,
        "curve_points": 4,
        "validation_problems": 32,
        "test_problems": 64,
    },
    # sigma and alpha are those of Qiu et al. (arXiv 2509.24372)
    "full": {
        "sigma": 1e-3,
        "alpha": 5e-4,
        "steps": 500,
        "prompts_per_step": 200,
        "max_completion_length": 1024,
        "tensor_parallel": 1,  # GPUs that share a copy of the model, with engine vllm
    },
}
"""Scale -> settings of the runs of notebook 01; of the scales but tiny, what differs from it."""

COUNTDOWN: dict[str, dict[str, Any]] = {
    "tiny": {
        "es_population_size": 30,
        "es_prompts_per_step": 128,
        "es_steps": 208,
        "grpo_num_generations": 16,
        "grpo_prompts_per_step": 16,
        "grpo_steps": 250,
        "sft_prompts": 4096,
        "sft_num_generations": 16,
        "sft_batch_size": 64,
        "sft_epochs": 2,
        "seeds_match": 16,  # of the arms that may match
        "seeds_compare": 8,  # of arms that a claim compares
        "seeds_describe": 4,  # of all others
        "sweep_size": 12,  # settings an arm
        "sweep_factors": {},  # setting -> what multiplies it in the sweep, which was made for tiny models
        "max_completion_length": tiny.MAX_COMPLETION_LENGTH,
        "validation_problems": 512,
        "test_problems": 2000,
        "curve_points": 25,
        "curve_spacing": "log",
    },
    "smoke": {
        "es_population_size": 4,
        "es_prompts_per_step": 16,
        "es_steps": 4,
        "grpo_num_generations": 4,
        "grpo_prompts_per_step": 4,
        "grpo_steps": 4,
        "sft_prompts": 16,
        "seeds_match": 2,
        "seeds_compare": 1,
        "seeds_describe": 1,
        "sweep_size": 2,
        "validation_problems": 16,
        "test_problems": 32,
        "curve_points": 3,
    },
    "full": {
        "sweep_factors": {"sigma": 0.1, "alpha": 0.05, "learning_rate": 0.01, "beta": 0.1},
        "max_completion_length": 1024,
        "micro_batch": 16,  # completions in a backward pass
        "tensor_parallel": 1,  # GPUs that share a copy of the model
    },
}
"""Scale -> settings of the tuned runs of notebook 02; of the scales but tiny, what differs from it."""

CONCISENESS: dict[str, dict[str, Any]] = {
    "tiny": {
        "task": "conciseness",
        "unique_prompts": 200,  # training questions
        "max_completion_length": 24,
        "validation_problems": None,  # split A; None: all
        "test_problems": None,  # split B; None: all
        "noise_draws": None,  # under which a reward is measured; None: the task's own
        "curve_spacing": "log",
        "es_population_size": 30,
        "es_prompts_per_step": 100,
        "es_steps": 208,
        "es_sigma": 0.01,
        "es_alpha": 0.005,
        "grpo_num_generations": 16,
        "grpo_prompts_per_step": 16,
        "grpo_steps": 250,
        "grpo_learning_rate": 3e-4,
        "grpo_beta": 0.0,
        "temperatures": [0.6],  # between greedy decoding and 1, at which the repeated runs are measured, too
    },
    "smoke": {
        "validation_problems": 8,
        "test_problems": 8,
        "noise_draws": 2,
        "es_population_size": 4,
        "es_prompts_per_step": 4,
        "es_steps": 2,
        "grpo_num_generations": 4,
        "grpo_prompts_per_step": 2,
        "grpo_steps": 2,
    },
    "full": {
        "unique_prompts": None,
        "max_completion_length": 128,
        "es_sigma": 1e-3,
        "es_alpha": 5e-4,
        "grpo_learning_rate": 3e-6,
        "micro_batch": 16,  # completions in a backward pass
        "tensor_parallel": 1,  # GPUs that share a copy of the model
    },
}
"""Scale -> settings of the runs of notebook 03; of the scales but tiny, what differs from it."""


def settings_at(scale: str, shared: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return all settings of a scale, of `COUNTDOWN` and the like."""
    return {**shared["tiny"], **shared[scale]}


def sweep(run: SimpleNamespace, arm: str) -> Groups:
    """Return the sweep that tunes an arm of notebook 02 on the first base, under its name."""
    choices = loading.swept_choices(run, arm)
    return {f"sweep {arm}": sweep_specs(arm, run.bases[0], loading.own_settings(run, arm), run.scale, choices)}


def tuned(
    run: SimpleNamespace,
    records: Records,
    arm: str,
    bases: Sequence[str],
    seeds: int | Sequence[int],
    ledgers: Sequence[str] = (),
    **changes: Any,
) -> Group:
    """Return runs of an arm with the setting that its sweep chose, or before that has run with the first it tries.

    Args:
        run: settings of notebook 02, with `bases` and `scale`.
        records: of the sweeps, where they are loaded.
        arm: an arm without a sweep, such as filtered fine-tuning, takes GRPO's learning rate.
        bases: on which it runs.
        seeds: as in `Group`.
        ledgers: as in `Group`.
        **changes: of the arm's settings.
    """
    by = arms.get(arm).sweep or "grpo"
    best = loading.ranked_choices(run, by, records.get(f"sweep {by}"))[0]
    own = loading.own_settings(run, arm) | best
    return Group(arm, bases, seeds, own, [changes], after=(f"sweep {by}",), ledgers=ledgers)


def countdown(run: SimpleNamespace, records: Records, scale: str, exact: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tuned arms of notebook 02 on one base, with the sweeps that tune them, notebook 01's nulls, the base.

    Args:
        run: the notebook's parameters.
        records: of the groups loaded so far.
        scale: of the runs.
        exact: the notebook's settings at this scale (`loading.of_tiny_world`), with seeds_es, seeds_random and
            seeds_sampled.
    """
    here = exact["bases"][:1]
    own = settings_at(scale, COUNTDOWN)
    if scale == "smoke":  # arms are compared by their spread
        own |= {"seeds_compare": 2, "seeds_describe": 2}
    tune = SimpleNamespace(**own, bases=here, scale=scale)
    seeds = {
        "es": exact["seeds_es"],
        "es_sampled": exact["seeds_sampled"],
        "es_random": exact["seeds_random"],
        "grpo": tune.seeds_match,
        "dr_grpo": tune.seeds_compare,
        "grpo_random": tune.seeds_compare,
        "sft": tune.seeds_describe,
    }
    shuffled = settings_at(scale, ES_COUNTDOWN)
    groups: dict[str, Any] = sweep(tune, "es") | sweep(tune, "grpo")
    groups |= {
        arm: tuned(tune, records, arm, here, n, here if arm == "es" else ())._replace(scale=scale)
        for arm, n in seeds.items()
    }
    groups["es_shuffled"] = Group("es_shuffled", here, shuffled["n_seeds"], loading.of_runs(shuffled), scale=scale)
    return groups | {"base": base_specs(here, loading.of_runs(own), scale)}


def conciseness(scale: str, arm: str) -> dict[str, Any]:
    """Return an arm's settings in notebook 03, measured at its start and end only, at all its temperatures."""
    run = SimpleNamespace(**settings_at(scale, CONCISENESS))
    return loading.own_settings(run, arm) | {"curve_points": 3, "sampled_at": run.temperatures}


def means(records: Sequence[Record], size: int, most: int) -> list[Sequence[Record]]:
    """Return groups of so many runs, in the order of their seeds; no run is in two of them."""
    return [records[first : first + size] for first in range(0, len(records) - size + 1, size)][:most]


def known(records: Records, *names: str) -> bool:
    """Say whether all these groups are loaded."""
    return all(name in records for name in names)
