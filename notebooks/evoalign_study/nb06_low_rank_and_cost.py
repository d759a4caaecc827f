"""Notebook 06, low rank and cost: its presets and its groups of runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from evoalign_lib import arms, footprint, tiny
from evoalign_study import loading
from evoalign_study.kinds.decode import base_specs
from evoalign_study.kinds.memory import SIZES, memory_specs, storage_specs
from evoalign_study.kinds.scaling import MACHINES, PUBLISHED, measured_spec, simulated_spec
from evoalign_study.kinds.train import sweep_specs
from evoalign_study.loading import Group, Groups, Records, of_runs, own_settings

NOTEBOOK = "06_low_rank_and_cost"
CLAIMS = ("C12", "C13", "C14", "C15b", "C15c", "C16", "C32")
"""The claims that the notebook's runs decide."""
OVER_ADAPTERS = ("es_lora", "grpo_lora")
"""Arms that train an adapter with and without ESSA's warm start."""
TINY = {
    "bases": ["A0"],
    "retrain": [],  # groups that `force` makes anew; none: all
    "ranks": [1, 4, 16],  # of the noise; the first has as many seeds as full rank
    "adapter_ranks": [4, 8, 16, 32],  # of LoRA adapters whose singular values ESSA searches
    "populations": [8, 16, 32, 64, 128, 256],  # of ESSA, at as many evaluations
    "precisions": ["float32", "int8", "int4"],  # of the base below ESSA's adapter
    "starts": ["cold", "warm"],  # of ES and GRPO over an adapter: a new one, or one fine-tuned as ESSA's
    "warm_shares": [64, 320, 640, 1280],  # rows of ESSA's warm start: 5 to 100 % of the last
    "seeds_match": 16,  # of full rank, of noise of low rank, of GRPO and of each precision
    "seeds_compare": 8,  # of all others
    "seeds_describe": 4,  # of the other ranks of the noise
    "seeds_null": 4,  # of random fitness where a search has it
    "sweep_size": 12,  # settings an arm, and a rank
    "sweep_factors": {},
    "es_population_size": 30,
    "es_prompts_per_step": 128,
    "es_steps": 208,
    "grpo_num_generations": 16,
    "grpo_prompts_per_step": 16,
    "grpo_steps": 250,
    "essa_population_size": 32,
    "essa_prompts_per_step": 50,
    "essa_steps": 90,
    "essa_lora_rank": 8,
    "essa_warm_rows": 64,  # right answers that an adapter is fine-tuned on before the search
    "essa_warm_epochs": 3,
    "essa_warm_learning_rate": 1e-3,
    "essa_curve_points": 7,
    "essa_sweep_points": 4,
    "adapter_curve_points": 13,  # of GRPO over an adapter
    "adapter_sweep_points": 6,  # of ES and GRPO over an adapter, evenly in steps
    "essa_population_points": 13,
    "null_points": 3,  # of the curves of random fitness
    "temperatures": [0.6],  # between greedy decoding and 1, at which models are measured again
    "max_completion_length": tiny.MAX_COMPLETION_LENGTH,
    "validation_problems": 512,
    "test_problems": 2000,
    "curve_points": 25,
    "curve_spacing": "log",
    "memory_methods": list(footprint.METHODS),
    "memory_sizes": list(SIZES),
    "memory_rows": [8, 16, 32],  # prompts of a member, completions of a micro-batch
    "stored_arms": ["es", "es_low_rank", "es_lora", "essa", "grpo", "grpo_lora"],
    "scaling_workers": [1, 2],
    "scaling_members": 60,
    "scaling_prompts": 128,
    "scaling_rounds": 13,  # of which the first starts the processes
    "scaling_gpus": [1, 2, 4, 8, 16, 32, 64, 128, 256],
    "scaling_lengths": ["released", "tiny"],  # whose lengths are simulated; published times are fitted by the first
    "scaling_tokens": 256,  # their mean, to which they are stretched
    "scaling_draws": 20,
}
SMOKE = TINY | {
    "ranks": [1],
    "adapter_ranks": [4],
    "populations": [4, 8],
    "precisions": ["int8"],
    "starts": ["warm"],
    "warm_shares": [16],
    "seeds_match": 2,
    "seeds_compare": 2,
    "seeds_describe": 2,
    "seeds_null": 1,
    "sweep_size": 1,
    "es_population_size": 4,
    "es_prompts_per_step": 8,
    "es_steps": 4,
    "grpo_num_generations": 4,
    "grpo_prompts_per_step": 4,
    "grpo_steps": 4,
    "essa_population_size": 4,
    "essa_prompts_per_step": 8,
    "essa_steps": 4,
    "essa_lora_rank": 4,
    "essa_warm_rows": 16,
    "essa_warm_epochs": 1,
    "essa_curve_points": 3,
    "essa_sweep_points": 3,
    "adapter_curve_points": 3,
    "adapter_sweep_points": 3,
    "essa_population_points": 3,
    "validation_problems": 16,
    "test_problems": 32,
    "curve_points": 3,
    "memory_methods": ["es", "grpo"],
    "memory_sizes": ["0.14M"],
    "memory_rows": [4],
    "stored_arms": ["es", "grpo"],
    "scaling_members": 4,
    "scaling_prompts": 8,
    "scaling_rounds": 2,
    "scaling_gpus": [1, 4],
    "scaling_lengths": ["tiny"],
    "scaling_draws": 2,
}
FULL = TINY | {
    "sweep_factors": {"sigma": 0.1, "alpha": 0.05, "learning_rate": 0.01, "beta": 0.1},
    "max_completion_length": 1024,
    "micro_batch": 16,  # completions in a backward pass
    "tensor_parallel": 1,  # GPUs that share a copy of the model
}


def presets(model: str = "") -> dict[str, dict[str, Any]]:
    """Return scale -> settings; model: that of scale full, empty for the scale's own."""
    return {"tiny": TINY, "smoke": SMOKE, "full": FULL | {"bases": [model or "Qwen/Qwen2.5-0.5B-Instruct"]}}


def groups(run: SimpleNamespace, of: Records) -> Groups:
    """Return the runs by name. Each arm, and each rank, comes after the sweep that chooses its settings.

    "processes" is timed: load it by itself.
    """

    def sweep(arm: str, **changes: Any) -> list[Any]:
        own = own_settings(run, _like(arm)) | changes
        return sweep_specs(arm, run.bases[0], own, run.scale, loading.swept_choices(run, arms.get(arm).sweep))

    def train(arm: str, seeds: int, after: str, **changes: Any) -> Group:
        choices = loading.ranked_choices(run, arms.get(arm).sweep, of.get(after))
        settings = own_settings(run, _like(arm)) | choices[0]
        return Group(arm, run.bases, seeds, settings, [changes], after=loading.chosen_by(after, choices))

    found: dict[str, Any] = {
        "base": base_specs(run.bases, of_runs(vars(run)), run.scale),
        "sweep es": sweep("es"),
        "es": train("es", run.seeds_match, "sweep es"),
        "es_random": train("es_random", run.seeds_compare, "sweep es"),
        "sweep grpo": sweep("grpo"),
        "grpo": train("grpo", run.seeds_match, "sweep grpo"),
    }

    def search(name: str, after: str, arm: str, seeds: int, nulls: int, change: Mapping[str, Any]) -> None:
        """Add runs of an arm, measured at all temperatures, and of random fitness in the place of its reward."""
        found[name] = train(arm, seeds, after, **{"sampled_at": run.temperatures} | change)
        found[f"random {name}"] = train(f"{arm}_random", nulls, after, **{"sampled_at": run.temperatures} | change)

    for rank in run.ranks:
        found[f"sweep rank {rank}"] = sweep("es_low_rank", rank=rank)
        judged = rank == run.ranks[0]
        of_seeds = (run.seeds_match, run.seeds_compare) if judged else (run.seeds_describe, run.seeds_null)
        search(f"rank {rank}", f"sweep rank {rank}", "es_low_rank", *of_seeds, {"rank": rank})
    change = {"rank": run.ranks[0], "sampled_at": run.temperatures}
    for group, arm, n in (("", "es_low_rank", run.seeds_describe), ("random ", "es_low_rank_random", run.seeds_null)):
        found[f"{group}as full rank, rank {run.ranks[0]}"] = train(arm, n, "sweep es", **change)
    seeds = (run.seeds_compare, run.seeds_null)
    for rank in run.adapter_ranks:
        found[f"sweep adapter {rank}"] = sweep("essa", lora_rank=rank, curve_points=run.essa_sweep_points)
        search(f"adapter {rank}", f"sweep adapter {rank}", "essa", *seeds, {"lora_rank": rank})
    tuned = f"sweep adapter {run.essa_lora_rank}"
    evaluated = run.essa_population_size * run.essa_steps
    for N in run.populations:  # of which curves are compared
        change = {"population_size": N, "steps": evaluated // N, "test_problems": 0}
        change |= {"curve_points": run.essa_population_points}
        found[f"population {N}"] = train("essa", run.seeds_compare, tuned, **change)
        change |= {"curve_points": run.null_points}
        found[f"random population {N}"] = train("essa_random", run.seeds_null, tuned, **change)
    for rows in run.warm_shares:
        search(f"warm start {rows}", tuned, "essa", *seeds, {"warm_rows": rows})
    for precision in precisions(run):  # of the frozen base, under which members are rewarded
        of_seeds = (run.seeds_match, run.seeds_null)
        search(f"precision={precision}", tuned, "essa", *of_seeds, {"base_precision": precision})
    essa = own_settings(run, "essa")
    warm = {name: essa[name] for name in ("warm_rows", "warm_epochs", "warm_learning_rate")}
    as_essa = {name: essa[name] for name in ("population_size", "prompts_per_step", "steps", "curve_points")}
    even = {"curve_points": run.adapter_sweep_points, "curve_spacing": None}
    for start in run.starts:
        began = {"lora_rank": run.essa_lora_rank} | (warm if start == "warm" else {})
        name, change = f"es_lora, start={start}", began | as_essa
        found[f"sweep {name}"] = sweep("es_lora", **change | even)
        search(name, f"sweep {name}", "es_lora", *seeds, change)
        name, change = f"grpo_lora, start={start}", began | {"curve_points": run.adapter_curve_points}
        found[f"sweep {name}"] = sweep("grpo_lora", **change | even)
        change |= {"sampled_at": run.temperatures}
        found[name] = train("grpo_lora", run.seeds_compare, f"sweep {name}", **change)
    scale, exact = loading.of_tiny_world(run, TINY)
    found["memory"] = memory_specs(exact["memory_methods"], exact["memory_sizes"], exact, scale)
    ranks = {"rank": exact["ranks"][0], "lora_rank": exact["essa_lora_rank"]}
    stored = {
        arm: own_settings(SimpleNamespace(**exact), _like(arm)) | ranks | arms.SWEEP[arms.get(arm).sweep][0]
        for arm in exact["stored_arms"]
    }
    found["storage"] = storage_specs(stored, exact["bases"][0], scale)
    base, exact = exact["bases"][0], exact | {"sigma": 0.01}  # no time depends on sigma
    found["processes"] = [measured_spec(base, exact, scale)]
    found["scaling"] = [
        *(simulated_spec(what, lengths, exact, scale) for lengths in exact["scaling_lengths"] for what in MACHINES),
        *(
            simulated_spec(of_times.simulated, exact["scaling_lengths"][0], exact, scale, fitted_to=name)
            for name, of_times in PUBLISHED.items()
        ),
    ]
    return found


def precisions(run: SimpleNamespace) -> list[str]:
    """Return the precisions of the frozen base that are compared: those of the settings, and none off the CPU."""
    return run.precisions if run.engine == "local" else []


def _like(arm: str) -> str:
    """Return the arm whose sizes are an arm's own: that of its family."""
    return {"es": "es", "cma": "essa", "gradient": "grpo"}[arms.get(arm).family]


def shown(run: SimpleNamespace) -> list[str]:
    """Return the groups whose runs are compared: full rank, each rank of the noise, ESSA and GRPO."""
    return ["es", *(f"rank {rank}" for rank in run.ranks), f"adapter {run.essa_lora_rank}", "grpo"]


def adapted(run: SimpleNamespace) -> list[str]:
    """Return the groups that train an adapter of one rank: ESSA, and ES and GRPO from each start."""
    return [
        f"adapter {run.essa_lora_rank}",
        *(f"{arm}, start={start}" for arm in OVER_ADAPTERS for start in run.starts),
    ]


def dimension(record: Mapping[str, Any]) -> int:
    """Return how many singular values a run of ESSA searches: of two matrices for each of four projections a layer.

    Raises KeyError for a run over no adapter.
    """
    spec = record["spec"]
    if spec["base"] in tiny.SHIPPED:  # read here: transformers takes seconds to be imported
        text = (tiny.bases_folder() / spec["base"] / "config.json").read_text(encoding="utf-8")
        layers = json.loads(text)["num_hidden_layers"]
    else:
        from transformers import AutoConfig

        layers = AutoConfig.from_pretrained(spec["base"]).num_hidden_layers
    return layers * 4 * 2 * int(round(spec["lora_rank"] * spec["leading_share"], 9))
