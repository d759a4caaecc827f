"""Measure runs of tasks with several sets of problems, mathematics and reasoning; `problem_set` names the set.

Graders run under the time limit that their task declares, in training and here: completions can make them hang.
"""

import random
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from evoalign_lib import tasks
from evoalign_lib.checks import require
from evoalign_lib.rewards import Rewards
from evoalign_study.measures.base import Measures, in_own_order, split_sizes
from evoalign_study.records import Settings, Spec


class Sets(Measures):
    """Measures of a task whose problems are right where its reward is 1."""

    settings = ("problem_set",)
    prompt_tokens = 600

    def __init__(self, task: str):
        self.task = task

    @cached_property
    def _rewards(self) -> Rewards:
        return Rewards(self.module.reward)

    def spec_fields(self, base: str, settings: Settings) -> dict[str, Any]:
        """Return the set and, for reasoning, the library's version.

        Raises:
            ValueError: no set or an unknown one, or more validation or test problems than it has.
            ImportError: the library that makes or grades the problems is missing, or has another version.
        """
        module, (name,) = tasks.named(f"{self.task}:{settings.get('problem_set', '')}")
        there = {split: len(module.problems(split, name)) for split in ("validation", "test")}
        split_sizes(settings, there, f"problems of {name}", least_test=0)
        return {"problem_set": name} | ({"library": module.VERSION} if self.task == "reasoning" else {})

    def sets(self, spec: Spec) -> dict[str, list]:
        """Return the first problems of validation and test, and, for training, all training problems in own order."""
        name, sizes = spec["problem_set"], {split: spec.get(f"{split}_problems", 0) for split in ("validation", "test")}
        sets = {split: list(self.module.problems(split, name)[:size]) for split, size in sizes.items() if size}
        if "prompts_per_step" in spec or "prompts" in spec:
            there = self.module.problems("train", name)
            sets["train"] = in_own_order(spec, there, max(spec.get("prompts", 0), len(there)))
        return sets

    def _scores(self, problems: Sequence[Any], texts: Sequence[str]) -> np.ndarray:
        rows = self.module.dataset(problems)
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        return self._rewards(columns.pop("prompt"), texts, [[]] * len(texts), columns).rewards

    def graded(self, problems: Sequence[Any], rows: Sequence[Sequence[Any]]) -> np.ndarray:
        """Return which completions in rows of `engine.generate` are right, bool (rows, problems)."""
        return np.array([self._scores(problems, [text for text, _ in row]) >= 1 for row in rows])

    def right(self, problem: Any, completion: str) -> bool:
        """Return whether the reward of a completion is 1."""
        return self.score(problem, completion) >= 1

    def score(self, problem: Any, completion: str) -> float:
        """Return the reward of a completion."""
        return float(self._scores([problem], [completion])[0])

    def answer(self, completion: str) -> str | None:
        """Return the answer in a completion."""
        return self.module.answer(completion)

    def right_answer(self, problem: Any, rng: random.Random) -> str:
        """Return a right answer in its form. Raises ValueError for a puzzle to which the library gives none."""
        if self.task == "mathematics":
            return f"\\boxed{{{problem.answers[0]}}}"
        require(problem.answer is not None, "the library gives no answer to its puzzle: choose another problem_set.")
        return f"<answer>{problem.answer}</answer>"


MEASURES = Sets("mathematics")
