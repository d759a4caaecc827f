"""Measure runs of arithmetic: a fixed training set in the run's own order, and the grader of the last number."""

import random
from collections.abc import Sequence
from typing import Any

from evoalign_lib.checks import choose, whole_number
from evoalign_lib.tasks import arithmetic
from evoalign_study.measures.base import Measures, in_own_order, split_sizes
from evoalign_study.records import Settings, Spec


class _Arithmetic(Measures):
    task = "arithmetic"
    settings = ("operation",)
    prompt_tokens = 60

    def spec_fields(self, base: str, settings: Settings) -> dict[str, Any]:
        """Return the operation, by default "*".

        Raises:
            ValueError: an unknown operation, or more validation or test problems than there are.
        """
        operation = settings.get("operation", "*")
        choose("operation", operation, arithmetic.OPERATIONS)
        there = {name: len(arithmetic.problems(name, operation)) for name in ("validation", "test")}
        split_sizes(settings, there, f"problems of {operation}", least_test=0)
        return {"operation": operation}

    def sets(self, spec: Spec) -> dict[str, list]:
        """Return the first problems of validation and test, and, for training, all training problems in own order."""
        sizes = {name: spec.get(f"{name}_problems", 0) for name in ("validation", "test")}
        sets = {name: list(arithmetic.problems(name, spec["operation"])[:size]) for name, size in sizes.items() if size}
        if "prompts_per_step" in spec or "prompts" in spec:
            there = arithmetic.problems("train", spec["operation"])
            needed = spec.get("prompts") or whole_number("prompts_per_step", spec["prompts_per_step"], most=len(there))
            sets["train"] = in_own_order(spec, there, max(needed, len(there)))
        return sets

    def right(self, problem: arithmetic.Problem, completion: str) -> bool:
        """Return whether the last number of a completion is the right answer."""
        return arithmetic.grade(completion, problem.answer)

    def score(self, problem: arithmetic.Problem, completion: str) -> float:
        """Return 1.0 for a right answer, else 0.0."""
        return float(self.right(problem, completion))

    def answer(self, completion: str) -> str | None:
        """Return the last number in a completion as text."""
        found = arithmetic.answer(completion)
        return None if found is None else f"{found:g}"

    def right_answer(self, problem: arithmetic.Problem, rng: random.Random) -> str:
        """Return the number alone, as the prompt asks."""
        return str(problem.answer)

    def rows(self, spec: Spec, tokenizer: Any, problems: Sequence[Any]) -> list[dict[str, Any]]:
        """Return problems as rows whose prompts are messages."""
        return arithmetic.dataset(problems)


MEASURES = _Arithmetic()
