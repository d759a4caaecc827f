"""Runs that several notebooks share: the arms of notebooks 01, 02 and 03 with their common settings."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd

from evoalign_lib import arms, tiny
from evoalign_lib.analysis import stats
from evoalign_study import loading
from evoalign_study.kinds.decode import base_specs
from evoalign_study.kinds.train import sweep_specs
from evoalign_study.loading import After, Group, Groups, Records
from evoalign_study.records import Record, Spec

TUNED = ("es", "grpo")
"""Arms that a sweep tunes."""

Table = Mapping[str, Any]
"""Setting -> its value at every scale, or a tuple of its values at scales tiny, smoke and full.

A scale beyond the end of the tuple takes the value of tiny; ... means that a scale does not have the setting.
"""
ES_COUNTDOWN: Table = {
    "n_seeds": (8, 2),
    "population_size": (30, 4),
    "sigma": (1e-2, 1e-2, 1e-3),  # at scale full sigma and alpha are those of Qiu et al. (arXiv 2509.24372)
    "alpha": (1e-2, 1e-2, 5e-4),
    "steps": (100, 3, 500),
    "prompts_per_step": (128, 16, 200),
    "curve_points": (21, 4),
    "max_completion_length": (tiny.MAX_COMPLETION_LENGTH, tiny.MAX_COMPLETION_LENGTH, 1024),
    "validation_problems": (512, 32),
    "test_problems": (2000, 64),
    "tensor_parallel": (..., ..., 1),  # GPUs that share a copy of the model, with engine vllm
}
"""Settings of the runs of notebook 01."""

TUNED_SIZES: Table = {
    "es_population_size": (30, 4),
    "es_prompts_per_step": (128, 16),
    "es_steps": (208, 4),
    "grpo_num_generations": (16, 4),
    "grpo_prompts_per_step": (16, 4),
    "grpo_steps": (250, 4),
}
"""Settings of the ES and GRPO runs that notebooks 02, 05 and 06 tune."""
MEASURED: Table = {
    "max_completion_length": (tiny.MAX_COMPLETION_LENGTH, tiny.MAX_COMPLETION_LENGTH, 1024),
    "validation_problems": (512, 16),
    "test_problems": (2000, 32),
    "curve_points": (25, 3),
    "curve_spacing": "log",
    "micro_batch": (..., ..., 16),  # completions per backward pass
    "tensor_parallel": (..., ..., 1),  # GPUs that share a copy of the model
}
"""Settings of how these runs are measured, and of how a user's own model is held in memory."""
FACTORS = {"sigma": 0.1, "alpha": 0.05, "learning_rate": 0.01, "beta": 0.1}
"""Setting -> the factor that scales it at scale full, in sweeps that were designed for tiny models."""
COUNTDOWN: Table = {
    **TUNED_SIZES,
    "sft_prompts": (4096, 16),
    "sft_num_generations": 16,
    "sft_batch_size": 64,
    "sft_epochs": 2,
    "seeds_match": (16, 2),  # of the arms tested for a match
    "seeds_compare": (8, 1),  # of arms that a claim compares
    "seeds_describe": (4, 1),  # of all others
    "sweep_size": (12, 2),  # settings per arm
    "sweep_factors": ({}, {}, FACTORS),
    **MEASURED,
}
"""Settings of the tuned runs of notebook 02."""

CONCISENESS: Table = {
    "task": "conciseness",
    "unique_prompts": (200, 200, None),  # training questions
    "max_completion_length": (24, 24, 128),
    "validation_problems": (None, 8),  # split A; None: all
    "test_problems": (None, 8),  # split B; None: all
    "noise_draws": (None, 2),  # draws of noise under which a reward is measured; None: the task's default
    "curve_spacing": "log",
    "es_population_size": (30, 4),
    "es_prompts_per_step": (100, 4),
    "es_steps": (208, 2),
    "es_sigma": (0.01, 0.01, 1e-3),
    "es_alpha": (0.005, 0.005, 5e-4),
    "grpo_num_generations": (16, 4),
    "grpo_prompts_per_step": (16, 2),
    "grpo_steps": (250, 2),
    "grpo_learning_rate": (3e-4, 3e-4, 3e-6),
    "grpo_beta": 0.0,
    "temperatures": [0.6],  # besides greedy decoding and 1: temperatures at which the repeated runs are measured
    "micro_batch": (..., ..., 16),  # completions per backward pass
    "tensor_parallel": (..., ..., 1),  # GPUs that share a copy of the model
}
"""Settings of the runs of notebook 03."""


def settings_at(scale: str, table: Table) -> dict[str, Any]:
    """Return the settings of a table at one scale."""
    place = ("tiny", "smoke", "full").index(scale)
    tuples = {name: value if isinstance(value, tuple) else (value,) for name, value in table.items()}
    chosen = {name: values[place if place < len(values) else 0] for name, values in tuples.items()}
    return {name: value for name, value in chosen.items() if value is not ...}


def scales(
    table: Table, model: str = "Qwen/Qwen2.5-0.5B-Instruct"
) -> tuple[Callable[..., dict[str, dict[str, Any]]], dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return a notebook's function `presets`, and its settings at scales tiny, smoke and full.

    Args:
        table: the notebook's settings.
        model: base at scale full. `presets(model)` returns scale -> settings with another one.
    """
    own = {scale: settings_at(scale, table) for scale in ("tiny", "smoke", "full")}
    own["full"] |= {"bases": [model]}

    def presets(model: str = "") -> dict[str, dict[str, Any]]:
        """Return scale -> settings; model: base at scale full, empty for the default."""
        return own | {"full": own["full"] | ({"bases": [model]} if model else {})}

    return presets, *own.values()


def sweep(run: SimpleNamespace, *tried: str) -> Groups:
    """Return by name the sweeps that tune these arms of notebook 02 on the first base."""
    own = {arm: (loading.own_settings(run, arm), run.scale, loading.swept_choices(run, arm)) for arm in tried}
    return {f"sweep {arm}": sweep_specs(arm, run.bases[0], *asked) for arm, asked in own.items()}


def tuned(
    run: SimpleNamespace,
    records: Records,
    arm: str,
    bases: Sequence[str],
    seeds: int | Sequence[int],
    ledgers: Sequence[str] = (),
    **changes: Any,
) -> Group:
    """Return runs of an arm with the setting that its sweep chose; until the sweep has run, the first that it tries.

    Args:
        run: settings of notebook 02, with `bases` and `scale`.
        records: the sweeps' records, if they are loaded.
        arm: one without a sweep, such as filtered fine-tuning, takes GRPO's learning rate.
        bases: the bases to run it on.
        seeds: as in `Group`.
        ledgers: as in `Group`.
        **changes: settings of the arm to change.
    """
    by = arms.get(arm).sweep or "grpo"
    best = loading.ranked_choices(run, by, records.get(f"sweep {by}"))[0]
    own = loading.own_settings(run, arm) | best
    return Group(arm, bases, seeds, own, [changes], after=(f"sweep {by}",), ledgers=ledgers)


def countdown(records: Records, scale: str, exact: Mapping[str, Any]) -> dict[str, Any]:
    """Return notebook 02's tuned arms on one base with their sweeps, notebook 01's shuffled fitness, and the base.

    Args:
        records: of the groups loaded so far.
        scale: of the runs.
        exact: the notebook's settings at this scale (`loading.of_tiny_world`), with seeds_es, seeds_random and
            seeds_sampled.
    """
    here = exact["bases"][:1]
    own, shuffled = settings_at(scale, COUNTDOWN), settings_at(scale, ES_COUNTDOWN)
    if scale == "smoke":  # a spread over seeds takes two runs
        own |= {"seeds_compare": 2, "seeds_describe": 2}
    tune = SimpleNamespace(**own, bases=here, scale=scale)
    seeds = {"es": exact["seeds_es"], "es_sampled": exact["seeds_sampled"], "es_random": exact["seeds_random"]}
    seeds |= {"grpo": tune.seeds_match, "dr_grpo": tune.seeds_compare, "grpo_random": tune.seeds_compare}
    groups: dict[str, Any] = sweep(tune, *TUNED)
    for arm, n in (seeds | {"sft": tune.seeds_describe}).items():
        groups[arm] = tuned(tune, records, arm, here, n, here if arm == "es" else ())._replace(scale=scale)
    groups["es_shuffled"] = Group("es_shuffled", here, shuffled["n_seeds"], loading.of_runs(shuffled), scale=scale)
    return groups | {"base": base_specs(here, loading.of_runs(own), scale)}


def conciseness(scale: str, arm: str) -> dict[str, Any]:
    """Return an arm's settings in notebook 03 with a minimal curve, measured at all of its temperatures."""
    run = SimpleNamespace(**settings_at(scale, CONCISENESS))
    return loading.own_settings(run, arm) | {"curve_points": 3, "sampled_at": run.temperatures}


def where(records: Sequence[Record], **fields: Any) -> list[Record]:
    """Return the records whose specs have these values."""
    return [record for record in records if fields.items() <= record["spec"].items()]


def walk_of(runs: Sequence[Record], random: Sequence[Record]) -> Sequence[Record]:
    """Return the runs of ES with random fitness if they are random walks of the steps of other runs; empty otherwise.

    These have as many steps of the same length, and a walk goes as far (`evoalign_lib.analysis.geometry.es_norm`).
    """
    names = ("base", "alpha", "sigma", "steps", "population_size")
    both = [{name: each[0]["spec"].get(name) for name in names} for each in (runs, random) if each]
    return random if len(both) == 2 and both[0] == both[1] else []


def means(records: Sequence[Record], size: int, most: int) -> list[Sequence[Record]]:
    """Return at most `most` disjoint groups of `size` runs each, in the order of their seeds."""
    return [records[first : first + size] for first in range(0, len(records) - size + 1, size)][:most]


def curve_bands(
    groups: Iterable[tuple[Mapping[str, Any], Sequence[Record]]], axes: Sequence[str], scale: int = 100, first: int = 0
) -> pd.DataFrame:
    """Return validation accuracy along training runs, a row per group, decoding and point.

    Args:
        groups: pairs of the columns that name a group, and its runs, which share one setting and number of points.
        axes: budgets of the curve, averaged over runs.
        scale: factor on accuracies, 1 for shares.
        first: index of the point at which rows begin; 1 leaves out the start, which a logarithmic axis cannot show.

    Returns:
        The axes; mean, low and high of accuracy (in %, if `scale` is 100), a 95 % band over seeds; decoding; n, the
        number of runs; and the columns of the groups.
    """
    bands = []
    for names, records in groups:
        curves = [record["curve"] for record in records]
        budgets = {axis: np.mean([curve[axis] for curve in curves], axis=0) for axis in axes}
        for decoding in loading.DECODINGS:
            band = stats.curve_band(scale * np.array([curve[f"validation_{decoding}"] for curve in curves]))
            points = pd.DataFrame(budgets | dict(zip(("mean", "low", "high"), band, strict=True)))
            bands.append(points.assign(decoding=decoding, n=len(curves), **names).iloc[first:])
    return pd.concat(bands, ignore_index=True)


def after(records: Records, needed: Sequence[str], make: Callable[..., Sequence[Spec]]) -> After:
    """Return the specs that `make` derives from the records of other groups; none until all of these are loaded."""
    ready = all(name in records for name in needed)
    return After(make(*(records[name] for name in needed)) if ready else [], tuple(needed))
