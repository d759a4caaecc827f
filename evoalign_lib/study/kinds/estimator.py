"""Single ES steps held against the exact gradient of expected reward."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from evoalign_lib import tiny
from evoalign_lib.records import Record, Spec
from evoalign_lib.study import specs
from evoalign_lib.tasks import countdown


def estimator_specs(
    base: str, N: int, repeats: int, fitness: str, targets: str, settings: Mapping[str, Any], scale: str
) -> list[Spec]:
    """Specs of the comparison of single ES steps with the exact gradient, on two-number problems.

    Args:
        N: members.
        repeats: populations drawn.
        fitness: "expected" (of temperature 1, exact) or "greedy".
        targets: "any", or "not the sum": problems that the bases' habit, adding up, does not solve.
        settings: sigma, alpha, estimator_problems.

    Raises:
        ValueError: a base outside the tiny world, or one that needs filler_steps.
    """
    wanted = specs.take(settings, ("sigma", "alpha", "estimator_problems"), "the estimator")
    spec = specs.begin_tiny("estimator", base, scale) | wanted | {"fitness": fitness, "targets": targets, "N": N}
    return [spec | {"repeat": repeat} for repeat in range(repeats)]


def run(spec: Spec) -> Record:
    """One ES step against the exact gradient of expected reward (see `geometry`)."""
    objective = _objective(spec["base"], spec["estimator_problems"], spec["targets"])
    arguments = {k: spec[k] for k in ("N", "sigma", "alpha", "repeat", "fitness")}
    result = objective.run(**arguments)
    return {
        "estimator": {k: round(v, 9) if isinstance(v, float) else v for k, v in result.items() if k not in arguments}
    }


@lru_cache(maxsize=2)
def _objective(base: str, n: int, targets: str):
    """The enumeration of a base's completions takes longer than a step: once a process."""
    drawn = countdown.generate(4 * n, 0, split="train", **tiny.PROBLEMS | {"count": 2})
    chosen = [p for p in drawn if targets == "any" or sum(p.numbers) != int(p.target)][:n]
    if len(chosen) < n:
        raise ValueError(f"only {len(chosen)} of {n} two-number problems have targets {targets!r}: ask for fewer.")
    # against 1e-6 the gradient's cosine is 0.99999998, and a step takes a third of the time
    return ExactObjective(*tiny.load(base), chosen, min_probability=1e-5)
