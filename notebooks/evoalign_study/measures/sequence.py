"""Measure runs that train four tasks one after the other (`tiny.sequence`), each in a quarter of the steps.

The training problems come task by task, so that a sequence is one run: ES keeps its noise law and the start towards
which it decays, and GRPO the moments of its optimiser. The curve has one point before the first task and one after
each, on all tasks: the matrix from which forgetting is read.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from evoalign_lib import precision, tiny
from evoalign_lib.checks import choose, require, whole_number
from evoalign_lib.tiny import sequence
from evoalign_study import base_models
from evoalign_study.forgetting import ORDERS
from evoalign_study.measures.base import Measures, decodings_of_point, significant
from evoalign_study.measures.countdown import MEASURES as COUNTDOWN
from evoalign_study.records import Record, Settings, Spec

_MESSAGES = 64  # of each skill that no reward touches, after each task


class _Sequence(Measures):
    task = "sequence"
    settings = ("order",)
    in_order = True

    def spec_fields(self, base: str, settings: Settings) -> dict[str, Any]:
        """Return the field order, one of `ORDERS`.

        Raises:
            ValueError: another base than the tiny world's, an unknown order, or more problems than there are.
        """
        require(base in tiny.SEQUENCE_BASES, f"base {base!r} has not learned the four tasks: use 'D0'.")
        for name in ("validation_problems", "test_problems"):
            whole_number(name, settings.get(name, 0), 0, sequence.FIXED, "a fixed set of a task has no more")
        order = settings.get("order", "published")
        choose("order", order, ORDERS)
        return {"order": order}

    def check(self, arm: str, base: str, settings: Settings) -> None:
        """Raise ValueError unless the steps divide into tasks, and the curve has a point after each."""
        steps, tasks = settings.get("steps", 0), len(sequence.TASKS)
        require(steps % tasks == 0, f"steps={steps}: set a multiple of {tasks}, as many for each task.")
        points = settings.get("curve_points", tasks + 1)
        require(points == tasks + 1, f"curve_points={points}: set {tasks + 1}, one after each task.")

    def sets(self, spec: Spec) -> dict[str, list]:
        """Return the problems of each split; of the fixed ones as many for each task, in the published order."""
        asked = {name: spec.get(f"{name}_problems", 0) for name in ("validation", "test")}
        sets = {s: [p for t in sequence.TASKS for p in sequence.problems(t, s, n)] for s, n in asked.items() if n}
        if needed := spec.get("steps", 0) * spec.get("prompts_per_step", 0) // len(sequence.TASKS):
            order, seed = ORDERS[spec["order"]], spec["seed"]
            sets["train"] = [p for task in order for p in sequence.problems(task, "train", needed, seed + 1)]
        return sets

    def right(self, problem: sequence.Problem, completion: str) -> bool:
        """Return whether the box of a completion holds the answer."""
        return sequence.is_right(problem.task, problem.answer, completion)

    def score(self, problem: sequence.Problem, completion: str) -> float:
        """Return 1 for a right completion, else 0."""
        return float(self.right(problem, completion))

    def skills(self, spec: Spec, engine: Any) -> dict[str, dict[str, float]]:
        """Return how well a model retains the skills that no reward touches, as for family A."""
        return COUNTDOWN.skills({"skill_messages": _MESSAGES} | spec, engine)

    def outcome(self, spec: Spec, engine: Any, sets: Mapping[str, list]) -> Record:
        """Return nothing: the last point of the curve is the test."""
        return {}

    def point(self, spec: Spec, engine: Any, sets: Mapping[str, list], step: int) -> dict[str, Any]:
        """Return accuracy on each task under each decoding, drift, and the norm of the displacement from the base.

        They are measured on the test problems; in a run without them, on the validation problems, of which the mean
        accuracy is `validation_greedy` and so on. `kl` and `kl_skills` are exact KL from the base in nats per token, on
        all tasks and on the skills that no reward touches; `skills` is the greedy accuracy on these.
        """
        name, told = ("test" if "test" in sets else "validation"), {}
        for decoding, how in decodings_of_point(spec, 4, 0).items():
            right = self.accuracy(engine, name, sets[name], **how).mean(0)
            told |= {
                f"{t}_{decoding}": float(p.mean()) for t, p in zip(sequence.TASKS, np.split(right, 4), strict=True)
            }
            told |= {f"validation_{decoding}": float(right.mean())} if name == "validation" else {}
        drift = base_models.kl_from_base(spec | {"seed": 0}, engine, name)
        skills = self.skills(spec, engine).values()
        told |= {"kl": drift["exact_nats_per_token"], "kl_skills": float(np.mean([s["kl"] for s in skills]))}
        told |= {"skills": float(np.mean([s["greedy"] for s in skills]))}
        start = precision.open_weights(tiny.load(spec["base"])[0]).float32()
        return told | {"norm": significant(np.linalg.norm((engine.master - start).astype(np.float64)))}


MEASURES = _Sequence()
