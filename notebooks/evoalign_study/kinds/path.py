"""Straight lines between two models: error, likelihood of right answers, reward and KL at points along them.

The barriers of linear mode connectivity (Frankle et al. 2020, arXiv 1912.05671) are read off these curves
(`analysis.connectivity`). Every point answers the same problems, with the same random numbers.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import numpy as np

from evoalign_lib import tiny
from evoalign_lib.analysis import kl
from evoalign_study import base_models, measures, specs, training, weight_cache
from evoalign_study.records import Record, Spec, pack_bits

_SIZES = ("max_completion_length", "validation_problems", "path_points")
_JUDGED = ("task", "measure", "validation_problems")
"""Settings that `specs.begin` reads: the task, the measure of length that conciseness is rewarded by, and how many
questions are asked of it, which has no more than its split."""
DECODINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "t0.6": {"samples": 1, "temperature": 0.6},
    "t1": {"samples": 1, "temperature": 1.0},
}
"""One completion of every problem at every point. At a temperature all points have the same random numbers."""


def path_spec(
    base: str, first: Mapping[str, Any] | None, last: Mapping[str, Any] | None, settings: Mapping[str, Any], scale: str
) -> Spec:
    """Return the spec of the line (1 - a) * first + a * last, for a from 0 to 1.

    Args:
        base: that all runs started from, a plain one of the tiny world, of the task.
        first, last: ends, of `trained.end`; None: the base itself.
        settings: max_completion_length, validation_problems (asked at every point) and path_points, 3 to 50; task
            ("countdown" where it is missing), and of conciseness its measure.
        scale: of the notebook.

    Raises:
        ValueError: two ends that are one, ends of another base, too few or too many points, a setting that is missing,
            a base outside the tiny world or of another task, or what the task refuses.
    """
    asked = {name: settings[name] for name in _JUDGED if name in settings}
    spec = specs.begin_tiny("path", base, scale, asked, tiny.BASES + tiny.QUESTION_BASES)
    spec |= specs.take(settings, _SIZES, "a path")
    if first == last:
        raise ValueError("both ends of the path are the same model: give two.")
    if not 3 <= spec["path_points"] <= 50:
        raise ValueError(f"path_points={spec['path_points']}: a path has 3 to 50.")
    if (asked := spec["path_points"] * spec["validation_problems"]) > 7000:
        raise ValueError(
            f"{spec['path_points']} path_points on {spec['validation_problems']} problems are {asked} answers, too many"
            " for a record of 8 kB: take at most 7,000, such as 21 points on 256 problems."
        )
    for end in (first, last):
        if end is not None and end["of"]["run"]["base"] != base:
            raise ValueError(
                f"an end of the path started from base {end['of']['run']['base']!r}, the path from {base!r}."
            )
    return spec | {name: dict(end) for name, end in (("first", first), ("last", last)) if end is not None}


def run(spec: Spec) -> Record:
    """Return what every point of a line does.

    The record has the distance between the ends and, for each point, in lists: under each of `DECODINGS` which problems
    are right, and the mean reward; the negative log-likelihood of a right answer, one fixed for each problem, nats per
    answer; and the KL from the base along these answers, nats per token. What is right, the reward and the right answer
    are those of the task (`Measures.judged`, `Measures.right_answer`).
    """
    measure = measures.get(spec["task"])
    model, tokenizer, sets = training.world(spec)
    problems = sets["validation"]
    rng = random.Random("answers of paths")
    written = [measure.right_answer(problem, rng) for problem in problems]
    answers = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in written]
    base, _ = base_models.model_of(spec | {"kind": "base"})
    points: dict[str, list] = {}
    with closing(training.evaluation_engine(spec, model, tokenizer, sets)) as engine:
        start, prompts = engine.master.copy(), engine.prompts["validation"]
        ends = [_end(spec.get(name), start, engine) for name in ("first", "last")]
        for a in np.linspace(0, 1, spec["path_points"]):
            engine.master[:] = weight_cache.moved(start, (1 - a) * ends[0] + a * ends[1])
            engine.write_model()
            found = kl.compare(engine.model, base, prompts.ids, prompts.mask, answers, engine.eos_ids)
            point = {
                "nll": -float(found.log_policy.sum()) / len(problems),
                "kl": float(found.exact.sum() / found.mask.sum()),
            }
            for name, how in DECODINGS.items():
                (row,) = engine.generate("validation", **how)
                rewards, right = measure.judged(spec, engine, problems, row)
                point[f"reward_{name}"] = float(rewards.mean())
                point[f"{name}_bits"] = pack_bits(right.astype(int))
            for name, value in point.items():
                points.setdefault(name, []).append(float(f"{value:.6g}") if isinstance(value, float) else value)
        distance = float(np.linalg.norm(ends[1] - ends[0]))
    return {"n": len(problems), "distance": float(f"{distance:.7g}"), "points": points}


def _end(named: Mapping[str, Any] | None, start: np.ndarray, engine: Any) -> np.ndarray:
    if named is None:
        return np.zeros(len(start))
    return weight_cache.displacement(named, start, engine.layout)
