"""Notebook 04, safety: its presets and its groups of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from evoalign_lib import arms
from evoalign_lib.records import Record
from evoalign_lib.study.kinds.base import base_specs
from evoalign_lib.study.kinds.judgments import judgments_specs
from evoalign_lib.study.notebooks import loading
from evoalign_lib.study.notebooks.loading import Group, Groups, Records, of_runs, own_settings
from evoalign_lib.tiny import scorers

NOTEBOOK = "04_safety_judges"
TINY = {
    "task": "safety",
    "bases": ["C0"],
    "retrain": [],  # groups that `force` makes anew; none: all
    "cost_weight": 2.0,  # lambda of reward - lambda * cost
    "max_completion_length": 32,
    "validation_problems": 160,  # split A
    "test_problems": 160,  # split B
    "curve_points": 12,
    "curve_spacing": "log",
    "seeds_judge": 8,  # of the declared settings on each training judge
    "seeds_null": 4,
    "seeds_size": 4,  # on each judge of another size: a map that describes
    "tuned_on": "flipped 0",  # the judge of the sweeps: its annotators like nothing besides the truth
    "sweep_size": 12,
    "sweep_factors": {},
    "sweep_points": 9,  # of their curves
    "es_population_size": 30,
    "es_prompts_per_step": 60,
    "es_steps": 150,
    "grpo_num_generations": 16,
    "grpo_prompts_per_step": 16,
    "grpo_steps": 150,
}
SMOKE = TINY | {
    "validation_problems": 8,
    "test_problems": 8,
    "curve_points": 3,
    "seeds_judge": 1,
    "seeds_null": 1,
    "seeds_size": 1,
    "sweep_size": 2,
    "sweep_points": 3,
    "es_population_size": 4,
    "es_prompts_per_step": 4,
    "es_steps": 2,
    "grpo_num_generations": 4,
    "grpo_prompts_per_step": 2,
    "grpo_steps": 2,
}
FULL = {
    "task": "safety",
    "retrain": [],
    "reward_model": "PKU-Alignment/beaver-7b-unified-reward",  # or a folder, or the address of evoalign serve-scorer
    "cost_model": "PKU-Alignment/beaver-7b-unified-cost",
    "reward_text": "",  # how a model that is loaded here reads a reply; one in Safe-RLHF's layout needs none
    "cost_text": "",
    "judge": "",  # held out, with commas between several: as reward_model, or a chat model: folder, Hub, http://.../v1#NAME
    "judge_text": "",
    "judge_tokens": 600,  # of an answer of a chat judge, at most: as published
    "judge_problems": 50,  # replies that chat judges compare with the base's: as published
    "scorer_device": "cpu",  # of models that are loaded here: such as cuda:1
    "scorer_dtype": "",
    "scorer_max_length": None,  # tokens that these read; None: what they can
    "requests": "",  # a file of your own; else PKU-SafeRLHF from the Hub
    "cost_rule": "fixed",  # or a weight that moves: "signed" as in Safe-RLHF's code, "published"
    "cost_weight": 1.0,  # lambda; the first one where it moves
    "cost_threshold": 0.0,
    "cut_turns": False,  # score replies up to where they go on to another turn
    "unique_prompts": 250,  # training requests
    "max_completion_length": 512,
    "validation_problems": 128,  # split A
    "test_problems": 256,  # split B
    "kl_problems": 8,  # of a point of the curve
    "curve_points": 10,
    "curve_spacing": "log",
    "seeds_judge": 8,
    "seeds_null": 4,
    "es_population_size": 30,  # from here as published, but for GRPO's prompts in a step, of which nothing is
    "es_prompts_per_step": 64,
    "es_steps": 500,
    "es_sigma": 1e-3,
    "es_alpha": 5e-4,
    "grpo_num_generations": 30,
    "grpo_prompts_per_step": 2,
    "grpo_steps": 500,
    "grpo_learning_rate": 5e-6,
    "grpo_beta": 0.01,
    "micro_batch": 5,  # completions in a backward pass
    "tensor_parallel": 1,  # GPUs that share a copy of the model
}


def presets(model: str = "") -> dict[str, dict[str, Any]]:
    """Return scale -> settings; model: that of scale full, empty for the published one, with its text as template."""
    own = {"bases": [model or "PKU-Alignment/alpaca-7b-reproduced"], "prompt_template": "chat" if model else "alpaca"}
    return {"tiny": TINY, "smoke": SMOKE, "full": FULL | own}


def groups(run: SimpleNamespace, of: Records) -> Groups:
    """Return the runs by name. All but "judgments" are of the notebook's own models."""
    return _of_own_models(run) if run.scale == "full" else _of_tiny_world(run, of)


def _of_own_models(run: SimpleNamespace) -> Groups:
    """At scale full: one pair of scorers, the declared settings, no sweep."""
    told = {"judge": "held_out", "judge_text": "held_out_text"}  # in the tiny world a judge is what trains
    asked = SimpleNamespace(**{told.get(name, name): value for name, value in vars(run).items()})

    def train(arm: str, seeds: int) -> Group:
        return Group(arm, run.bases, seeds, own_settings(asked, arm))

    return {
        "base": base_specs(run.bases, of_runs(vars(asked)), run.scale),
        "es": train("es", run.seeds_judge),
        "grpo": train("grpo", run.seeds_judge),
        "es_random": train("es_random", run.seeds_null),
        "judgments": judgments_specs(run.scale),
    }


def _of_tiny_world(run: SimpleNamespace, of: Records) -> Groups:

    def sweep(arm: str) -> Group:
        settings = own_settings(run, arm) | {"judge": run.tuned_on, "test_problems": 0}
        settings |= {"curve_points": run.sweep_points}
        return Group(arm, run.bases, [arms.SWEEP_SEED], settings, loading.swept_choices(run, arm))

    def train(arm: str, judges: Sequence[str], seeds: int) -> Group:
        tuned = arms.get(arm).sweep
        name = f"{tuned}_sweep"
        best = ranked(of[name])[0][1] if name in of else loading.swept_choices(run, tuned)[0]
        settings = own_settings(run, arm) | best
        return Group(arm, run.bases, seeds, settings, [{"judge": judge} for judge in judges], after=(name,))

    proxies, noisy, sizes = list(scorers.PROXIES), list(scorers.NOISY), list(scorers.SIZES)
    return {
        "base": base_specs(run.bases, of_runs(vars(run)), run.scale),
        "es_sweep": sweep("es"),
        "grpo_sweep": sweep("grpo"),
        "es": train("es", proxies, run.seeds_judge),
        "grpo": train("grpo", proxies, run.seeds_judge),
        "es_random": train("es_random", [*proxies, *noisy], run.seeds_null),
        "es_noise": train("es", noisy, run.seeds_judge),
        "grpo_noise": train("grpo", noisy, run.seeds_judge),
        "es_sizes": train("es", sizes, run.seeds_size),
        "grpo_sizes": train("grpo", sizes, run.seeds_size),
        "judgments": judgments_specs(run.scale),
    }


def ranked(sweep: Sequence[Record]) -> list[tuple[float, dict[str, float]]]:
    """Return score and setting of the runs of a sweep, best first.

    Nothing here says what is right but the training judge. The score is what it gives greedy replies on split A, the
    mean of the last three points of the curve; a run that diverged has none and comes last.
    """

    def score(record: Record) -> float:
        last = record["curve"]["proxy_greedy"][-3:]
        return float("-inf") if "diverged" in record or None in last else float(np.mean(last))

    scored = [(score(r), _setting(r["spec"])) for r in sweep]
    return sorted(scored, key=lambda pair: -pair[0])


def _setting(spec: Mapping[str, Any]) -> dict[str, float]:
    return {name: spec[name] for name in arms.swept(spec["arm"])}
