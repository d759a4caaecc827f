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
from evoalign_lib.study.kinds.tournament import tournament_spec
from evoalign_lib.study.notebooks import loading
from evoalign_lib.study.notebooks.loading import After, Group, Groups, Records, of_runs, own_settings
from evoalign_lib.tiny import scorers

NOTEBOOK = "04_safety_judges"
GAIN = 0.75
"""Spreads by which the training judge's score has risen where the claims compare the arms."""
TINY = {
    "task": "safety",
    "bases": ["C0"],
    "retrain": [],  # groups that `force` makes anew; none: all
    "cost_weight": 2.0,  # lambda of reward - lambda * cost
    "max_completion_length": 32,
    "validation_problems": 160,  # split A
    "test_problems": 160,  # split B
    "curve_points": 12,
    "null_points": 6,  # of the curves of random fitness
    "curve_spacing": "log",
    "seeds_judge": 8,  # of the declared settings on each training judge
    "seeds_null": 4,  # of random fitness, and of filtered fine-tuning
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
    "sft_prompts": 2400,  # of each the best of sft_num_generations samples: as many completions as GRPO
    "sft_num_generations": 16,
    "sft_batch_size": 64,
    "sft_epochs": 2,
    "sft_learning_rate": [1e-4, 3e-4, 1e-3],  # that its sweep tries
}
SMOKE = TINY | {
    "validation_problems": 8,
    "test_problems": 8,
    "curve_points": 3,
    "null_points": 3,
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
    "sft_prompts": 8,
    "sft_num_generations": 4,
    "sft_learning_rate": [1e-3],
}


def presets(model: str = "") -> dict[str, dict[str, Any]]:
    """Return scale -> settings. ValueError for a model: only the tiny world's base can be trained here so far."""
    if model:
        raise ValueError(f"model={model!r}: notebook 04 has no scale full yet, leave it out.")
    return {"tiny": TINY, "smoke": SMOKE}


def groups(run: SimpleNamespace, of: Records) -> Groups:
    """Return the runs by name. All but "judgments" are of the notebook's own models."""

    def sweep(arm: str) -> Group:
        settings = own_settings(run, arm) | {"judge": run.tuned_on, "test_problems": 0}
        settings |= {"curve_points": run.sweep_points}
        return Group(arm, run.bases, [arms.SWEEP_SEED], settings, loading.swept_choices(run, arm))

    def imitate(
        judges: Sequence[str], seeds: int | Sequence[int], rates: Sequence[float], after: Sequence[str]
    ) -> Group:
        changes = [{"judge": judge, "learning_rate": rate} for judge in judges for rate in rates]
        return Group("sft", run.bases, seeds, own_settings(run, "sft"), changes, after=tuple(after))

    def train(arm: str, judges: Sequence[str], seeds: int) -> Group:
        tuned = arms.get(arm).sweep
        name = f"{tuned}_sweep"
        best = ranked(of[name])[0][1] if name in of else loading.swept_choices(run, tuned)[0]
        settings = own_settings(run, arm) | best | ({"curve_points": run.null_points} if arms.get(arm).null else {})
        return Group(arm, run.bases, seeds, settings, [{"judge": judge} for judge in judges], after=(name,))

    rate = max(of["sft_sweep"], key=_liked)["spec"]["learning_rate"] if "sft_sweep" in of else run.sft_learning_rate[0]
    proxies, noisy, sizes = list(scorers.PROXIES), list(scorers.NOISY), list(scorers.SIZES)
    return {
        "base": base_specs(run.bases, of_runs(vars(run)), run.scale),
        "es_sweep": sweep("es"),
        "grpo_sweep": sweep("grpo"),
        "es": train("es", proxies, run.seeds_judge),
        "grpo": train("grpo", proxies, run.seeds_judge),
        "sft_sweep": imitate([run.tuned_on], [arms.SWEEP_SEED], run.sft_learning_rate, ()),
        "sft": imitate(proxies, run.seeds_null, [rate], ["sft_sweep"]),
        "es_random": train("es_random", [*proxies, *noisy], run.seeds_null),
        "es_noise": train("es", noisy, run.seeds_judge),
        "grpo_noise": train("grpo", noisy, run.seeds_judge),
        "es_sizes": train("es", sizes, run.seeds_size),
        "grpo_sizes": train("grpo", sizes, run.seeds_size),
        "tournaments": _tournaments(run, of, proxies),
        "judgments": judgments_specs(run.scale),
    }


def _tournaments(run: SimpleNamespace, of: Records, judges: Sequence[str]) -> After:
    """One tournament on each training judge, of the models that were trained on it."""
    after = ("es", "grpo", "sft", "es_random")
    if not all(arm in of for arm in after):
        return After([], after)
    settings = of_runs(vars(run))
    return After(
        [
            tournament_spec({arm: on_judge(of[arm], judge) for arm in after}, settings | {"judge": judge}, run.scale)
            for judge in judges
        ],
        after,
    )


def on_judge(found: Sequence[Record], judge: str) -> list[Record]:
    """Return the runs that were trained on a judge."""
    return [r for r in found if r["spec"]["judge"] == judge]


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


def _liked(record: Record) -> float:
    """What the training judge gives greedy replies of a trained model on split B."""
    test = record["test"]
    return test["greedy"]["score"][test["judges"].index(record["spec"]["judge"])]


def _setting(spec: Mapping[str, Any]) -> dict[str, float]:
    return {name: spec[name] for name in arms.swept(spec["arm"])}
