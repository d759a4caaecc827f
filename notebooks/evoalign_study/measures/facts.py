"""Measure runs of facts: rewarded by length alone, on split A, and right answers on split B, at every point of a curve.

Split A are the validation questions, whose reward is the proxy by which runs are matched; split B the test questions.
A completion is right if the first answer in it is, even if it was cut off: most completions of a base are.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from evoalign_lib.checks import whole_number
from evoalign_lib.tasks import facts
from evoalign_study.collapse import SAMPLES
from evoalign_study.measures.base import Measures, decodings_of_point, in_own_order, split_sizes
from evoalign_study.records import Settings, Spec, pack_bits


class _Facts(Measures):
    task = "facts"
    prompt_tokens = 60
    validated_by = None  # its validation is a proxy: a reward of length

    def spec_fields(self, base: str, settings: Settings) -> dict[str, Any]:
        """Return no fields. Raises ValueError for more validation or test questions than there are."""
        there = {name: len(facts.problems(name)) for name in ("validation", "test")}
        split_sizes(settings, there, "facts", least_test=0)
        return {}

    def sets(self, spec: Spec) -> dict[str, list]:
        """Return the first questions of splits A and B, and, for training, all training questions in own order."""
        sets = {name: list(facts.problems(name)[: spec.get(f"{name}_problems", 0)]) for name in ("validation", "test")}
        if "prompts_per_step" in spec:
            there = facts.problems("train")
            whole_number("prompts_per_step", spec["prompts_per_step"], most=len(there))
            sets["train"] = in_own_order(spec, there, len(there))
        return {name: there for name, there in sets.items() if there}

    def right(self, problem: facts.Fact, completion: str) -> bool:
        """Return whether the first answer in a completion is a right one."""
        return facts.grade(problem, completion)

    def score(self, problem: facts.Fact, completion: str) -> float:
        """Return the reward of a completion: that of its length."""
        return facts.reward([problem.question], [completion], [problem.answer])[0]

    def point(self, spec: Spec, engine: Any, sets: Mapping[str, list], step: int) -> dict[str, Any]:
        """Return the measurements at a point of the curve.

        For each decoding d: "proxy_d" (mean reward on split A), and on split B "reward_d", "right_d" (share) and
        "right_bits_d" (which questions, hexadecimal; of samples, all one after the other).
        """
        told: dict[str, Any] = {}
        for decoding, how in decodings_of_point(spec, SAMPLES, step).items():
            a, b = (engine.generate(name, **how) for name in ("validation", "test"))
            right = self.graded(sets["test"], b)
            proxy, reward = (self._scores(sets[name], rows) for name, rows in (("validation", a), ("test", b)))
            now = {"proxy": proxy, "reward": reward, "right": right}
            told |= {f"{name}_{decoding}": round(float(np.mean(values)), 4) for name, values in now.items()}
            told |= {f"right_bits_{decoding}": pack_bits(right.ravel())}
        return told

    def _scores(self, problems: Sequence[Any], rows: Sequence[Sequence[Any]]) -> list[float]:
        return [self.score(p, text) for row in rows for p, (text, _) in zip(problems, row, strict=True)]


MEASURES = _Facts()
