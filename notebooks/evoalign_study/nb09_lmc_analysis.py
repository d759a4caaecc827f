"""Notebook 09, linear mode connectivity: its presets, groups of runs, and the ends of its lines."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from types import SimpleNamespace
from typing import Any

from evoalign_lib import arms, tiny
from evoalign_study import loading, weight_cache
from evoalign_study import nb03_conciseness as conciseness
from evoalign_study import nb08_weight_geometry as weight_geometry
from evoalign_study.kinds.weights import noise_spec, path_spec, products_specs
from evoalign_study.loading import After, Group, Groups, Records
from evoalign_study.records import Record, Spec

NOTEBOOK = "09_lmc_analysis"
CLAIMS = ("C25", "C26", "C27", "C28")
TRAINED = ("es", "es_sampled", "es_random", "grpo", "grpo_random", "sft")
"""Groups of training runs, between whose ends lines are drawn."""
TINY = {
    "bases": ["A0"],
    "retrain": [],  # groups that `force` makes anew; none: all
    "seeds_es": 32,  # of ES, of which means are taken
    "seeds_random": list(range(8)),  # of ES with random fitness
    "seeds_sampled": list(range(8)),  # of ES with sampled fitness
    "mean": 4,  # ES runs whose mean is an end
    "pairs": 8,  # lines of each kind
    "path_points": 21,
    "max_completion_length": tiny.MAX_COMPLETION_LENGTH,
    "validation_problems": 256,  # asked at every point, and under every noise
    "noise_sigmas": [0.005, 0.01, 0.02, 0.03],  # weight units
    "noise_trials": 4,  # draws of each noise
    "regime_base": "B0",  # of the task of notebook 03, on which runs are hacked
    "regime_seeds": list(range(16, 20)),  # no seed that notebook 03 has
    "regime_steps": {  # small steps and large ones of each arm: what notebook 03's maps end clean and hacked with
        "es": {"small": {"alpha": 0.0015}, "large": {"alpha": 0.015}},
        "grpo": {"small": {"learning_rate": 1e-4}, "large": {"learning_rate": 1e-3}},
        "es_random": {"large": {"alpha": 0.015}},
        "grpo_random": {"large": {"learning_rate": 1e-3}},
    },
    "regime_points": 11,
    "regime_problems": 128,
}
SMOKE = TINY | {
    "seeds_es": 4,
    "seeds_random": [0, 1],
    "seeds_sampled": [0, 1],
    "mean": 2,
    "pairs": 2,
    "path_points": 3,
    "validation_problems": 16,
    "noise_sigmas": [0.01],
    "noise_trials": 1,
    "regime_seeds": [16],
    "regime_points": 3,
    "regime_problems": 8,
}
FULL = TINY
BASE = "base"
MEAN, RANDOM = "es mean", "random"
"""Ends that are made of ES runs: their means, and random directions with their norms in each tensor."""
LINES = (
    ("es", "grpo"),
    ("es", "es"),
    ("grpo", "grpo"),
    ("es", "es_sampled"),
    ("es", "sft"),
    (MEAN, "grpo"),
    ("es", "es_random"),
    ("es_random", "grpo"),
    ("grpo_random", "grpo"),
    (RANDOM, "grpo"),
    *((BASE, end) for end in ("es", "grpo", "sft", MEAN, "es_random", RANDOM)),
)
"""Kinds of end that lines join. A line between two runs of one arm joins different seeds."""

SHAKEN = (BASE, "es", "grpo", "sft", MEAN, "es_random", "grpo_random", RANDOM)
"""Kinds of end whose weights get noise."""
REGIMES = {f"{arm}, {steps} steps": (arm, steps) for arm, every in TINY["regime_steps"].items() for steps in every}
"""Groups of runs on the task of notebook 03, of which some are hacked; each with its arm and what steps it takes."""
LEARNED = tuple(name for name, (arm, _) in REGIMES.items() if not arms.get(arm).null)
SMALL = tuple(name for name in LEARNED if REGIMES[name][1] == "small")
"""Groups of runs that learned something, and of these the ones with small steps."""


def presets(model: str = "") -> dict[str, dict[str, Any]]:
    """Return scale -> settings; model: that of scale full, empty for the scale's own."""
    return {"tiny": TINY, "smoke": SMOKE, "full": FULL | {"bases": [model or "Qwen/Qwen2.5-0.5B-Instruct"]}}


def groups(run: SimpleNamespace, of: Records) -> Groups:
    """Return the runs by name: notebook 02's arms, products of their displacements, lines, noise."""
    scale, exact = loading.of_tiny_world(run, TINY)
    found = weight_geometry.trained(run, of, scale, exact)
    found = {name: group for name, group in found.items() if name in (*TRAINED, "base") or name.startswith("sweep")}
    complete = all(name in of for name in TRAINED)
    found["products"] = After(products_specs([of[name] for name in TRAINED], scale) if complete else [], TRAINED)
    settings = SimpleNamespace(**exact)
    for first, last in LINES:
        needed = tuple(dict.fromkeys(_arm(end) for end in (first, last) if end != BASE))
        known = all(name in of for name in needed)
        found[name_of(first, last)] = After(_lines(settings, of, first, last, scale) if known else [], needed)
    for end in SHAKEN:
        needed = () if end == BASE else (_arm(end),)
        ends = _ends(settings, of, end)[: 1 if end == BASE else settings.pairs] if all(n in of for n in needed) else []
        specs = [noise_spec(settings.bases[0], each, exact, scale) for each in ends]
        found[f"noise on {end}"] = After(specs, needed)
    return found | _regimes(settings, of, scale)


def _regimes(run: SimpleNamespace, of: Records, scale: str) -> dict[str, Any]:
    """Return runs of notebook 03's task with small steps and with large ones, and the lines between them.

    Every two runs of `LEARNED` are joined. Runs with a random reward are joined with one another, and with those that
    took small steps.
    """
    other = SimpleNamespace(**conciseness.presets()[scale])
    found: dict[str, Any] = {}
    for arm, every in run.regime_steps.items():
        # as few points of the curve as there may be: what a run did to its base is told by its start and its end
        declared = loading.own_settings(other, arm) | {"curve_points": 3, "sampled_at": other.temperatures}
        for steps, change in every.items():
            found[f"{arm}, {steps} steps"] = Group(
                arm, [run.regime_base], run.regime_seeds, declared, [change], scale=scale
            )
    runs = {name: [weight_cache.end([record]) for record in of[name]] for name in found if name in of}
    pairs = []
    if len(runs) == len(found):
        learned = [end for name in LEARNED for end in runs[name]]
        pairs += combinations(learned, 2)
        small = [end for name in SMALL for end in runs[name]]
        for name in REGIMES:
            if name not in LEARNED:
                pairs += [*combinations(runs[name], 2), *((end, null) for null in runs[name] for end in small)]
    asked = {"task": "conciseness", "max_completion_length": other.max_completion_length}
    asked |= {"validation_problems": run.regime_problems, "path_points": run.regime_points}
    specs = [path_spec(run.regime_base, *pair, asked, scale) for pair in pairs]
    return found | {"regimes": After(specs, tuple(REGIMES))}


def name_of(first: str, last: str) -> str:
    """Return the name of the group of lines from one kind of end to another."""
    return f"{first} to {last}"


def _arm(end: str) -> str:
    return "es" if end in (MEAN, RANDOM) else end


def _lines(run: SimpleNamespace, of: Records, first: str, last: str, scale: str) -> list[Spec]:
    starts, ends = (_ends(run, of, end) for end in (first, last))
    if first == last:  # each run with that half of the runs further
        starts, ends = starts[: run.pairs], (starts[run.pairs :] or starts[1:])
    pairs = list(zip(starts, ends, strict=False))[: run.pairs]
    return [path_spec(run.bases[0], *pair, vars(run), scale) for pair in pairs]


def _ends(run: SimpleNamespace, of: Records, end: str) -> Sequence[dict[str, Any] | None]:
    """Return the ends of one kind, as specs name them, in the order of their seeds; the base is always the same."""
    if end == BASE:
        return [None] * run.pairs
    records: Sequence[Record] = of[_arm(end)]
    if end == MEAN:
        return [weight_cache.end(runs) for runs in weight_geometry.means(records, run.mean, run.pairs)]
    if end == RANDOM:
        return [weight_cache.end([record], draw=record["spec"]["seed"]) for record in records]
    return [weight_cache.end([record]) for record in records]
