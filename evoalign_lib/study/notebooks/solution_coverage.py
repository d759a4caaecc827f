"""Notebook 07, solution coverage: its presets and groups of runs.

Its answers and tables are in `study.views.solution_coverage`, its figures in `study.views.solution_coverage_figures`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from evoalign_lib import tiny
from evoalign_lib.records import Spec
from evoalign_lib.study import trained
from evoalign_lib.study.kinds.coverage import coverage_spec
from evoalign_lib.study.kinds.perturbed import perturbed_specs
from evoalign_lib.study.notebooks import loading, weight_geometry
from evoalign_lib.study.notebooks.loading import After, Group, Groups, Records

NOTEBOOK = "07_solution_coverage"
CLAIMS = ("C18", "C18b")
TRAINED = ("es", "es_sampled", "grpo", "dr_grpo", "sft", "es_random", "grpo_random")
"""Groups of training runs, whose reach is compared."""
BASE, ELSEWHERE, MEAN = "base", "es elsewhere", "mean of ES runs"
"""The base itself; notebook 08's runs of ES; and models whose weights are means of these."""
TINY = {
    "bases": ["A0"],
    "retrain": [],  # groups that `force` makes anew; none: all
    "own_seeds": list(range(32, 40)),  # no seed that another notebook has
    "seeds_es": 32,  # of ES in notebook 08
    "seeds_random": [],  # weight_geometry's, which nothing here takes
    "seeds_sampled": [],
    "mean": 8,  # ES runs of which a mean is taken
    "curve_points": 13,
    "reach_at": [0.6, 1.0],  # temperatures at which every point of a curve is measured
    "max_completion_length": tiny.MAX_COMPLETION_LENGTH,
    "validation_problems": 512,
    "test_problems": 512,
    "coverage_problems": 256,  # of the test set
    "coverage_temperatures": [0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4],
    "coverage_samples": 64,  # of each problem
    "coverage_sampled_at": [0.6, 1.0],
    "checked_samples": 1024,  # of each problem, of one run of each arm
    "perturbed_sigmas": [0.01, 0.015, 0.02, 0.025, 0.03],  # of noise on the base's weights
    "perturbed_repeats": 4,
    "perturbed_members": 512,  # copies, each of which answers once
    "perturbed_problems": 256,  # of the test set, those of coverage_problems
    "perturbed_validation": 128,
}
SMOKE = TINY | {
    "own_seeds": [32, 33],
    "seeds_es": 2,
    "mean": 2,
    "curve_points": 3,
    "validation_problems": 16,
    "test_problems": 32,
    "coverage_problems": 16,
    "coverage_temperatures": [0.6, 1.0],
    "coverage_samples": 8,
    "checked_samples": 16,
    "perturbed_sigmas": [0.02],
    "perturbed_repeats": 2,
    "perturbed_members": 16,
    "perturbed_problems": 16,
    "perturbed_validation": 8,
}
FULL = TINY


def presets(model: str = "") -> dict[str, dict[str, Any]]:
    """Return scale -> settings; model: that of scale full, empty for the scale's own."""
    return {"tiny": TINY, "smoke": SMOKE, "full": FULL | {"bases": [model or "Qwen/Qwen2.5-0.5B-Instruct"]}}


def groups(run: SimpleNamespace, of: Records) -> Groups:
    """Return the runs by name: notebook 02's arms on seeds of their own, and what each of their models can solve.

    At scale full the runs are those of the tiny world: elsewhere no right answers are listed.
    """
    scale, exact = loading.of_tiny_world(run, TINY)
    settings = SimpleNamespace(**exact)
    declared = weight_geometry.trained(run, of, scale, exact)
    found: dict[str, Any] = {name: declared[name] for name in ("sweep es", "sweep grpo")}
    found[ELSEWHERE] = declared["es"]
    for arm in TRAINED:
        found[arm] = _own(declared[arm], settings)
    for name, needed in reached().items():
        known = all(group in of for group in needed)
        found[name] = After(_reach(settings, of, name, needed, scale, exact) if known else [], needed)
    found["perturbed"] = perturbed_specs(
        settings.bases[0], settings.perturbed_sigmas, settings.perturbed_repeats, exact, scale
    )
    found["checked"] = After(_checked(settings, of, scale, exact), TRAINED)
    return found


def _own(declared: Group, run: SimpleNamespace) -> Group:
    """Return notebook 02's runs of an arm on seeds of their own, with what they reach along the way."""
    own = dict(declared.settings) | {"test_problems": run.test_problems, "validation_problems": run.validation_problems}
    if "curve_points" in own:
        own |= {"curve_points": run.curve_points, "reach_at": run.reach_at}
    return declared._replace(seeds=run.own_seeds, settings=own, ledgers=())


def reached() -> dict[str, tuple[str, ...]]:
    """Return the groups of models whose coverage is measured, each with the groups of runs that it comes after."""
    found: dict[str, tuple[str, ...]] = {reach_name(BASE): ()}
    found |= {reach_name(arm): (arm,) for arm in TRAINED}
    return found | {reach_name(MEAN): (ELSEWHERE,)}


def reach_name(of: str) -> str:
    """Return the name of the group that measures the models of another."""
    return f"reach of {of}"


def _reach(
    run: SimpleNamespace, of: Records, name: str, needed: Sequence[str], scale: str, settings: dict[str, Any]
) -> list[Spec]:
    if not needed:
        return [coverage_spec(run.bases[0], None, settings, scale)]
    (group,) = needed
    size = run.mean if group == ELSEWHERE else 1
    runs = weight_geometry.means(of[group], size, len(of[group]))
    return [coverage_spec(run.bases[0], trained.end(chosen), settings, scale) for chosen in runs]


def _checked(run: SimpleNamespace, of: Records, scale: str, settings: dict[str, Any]) -> list[Spec]:
    """Return the base and the first run of each arm with many samples, which the exact numbers are held against."""
    many = settings | {"coverage_samples": run.checked_samples}
    ends = [None, *(trained.end(of[arm][:1]) for arm in TRAINED)] if all(arm in of for arm in TRAINED) else []
    return [coverage_spec(run.bases[0], end, many, scale) for end in ends]
