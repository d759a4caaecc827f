"""Measure runs of Countdown: new training problems in every step, and the strict grader for all measurements."""

import itertools
import random
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import lru_cache
from typing import Any

import numpy as np

from evoalign_lib import tiny
from evoalign_lib.analysis import coverage
from evoalign_lib.checks import require, whole_number
from evoalign_lib.tasks import countdown
from evoalign_study import base_models
from evoalign_study.measures.base import Measures, in_own_order, label
from evoalign_study.records import Record, Settings, Spec

REACH_AT_K = (1, 16, 256)
"""Numbers of samples k for which a point of a curve has pass@k."""


class _Countdown(Measures):
    task = "countdown"
    settings = ("filler_steps",)

    def spec_fields(self, base: str, settings: Settings) -> dict[str, Any]:
        """Return the fields grader and, for base "H0", filler_steps.

        Raises:
            ValueError: more test problems than there are; filler_steps that are missing, are for another base, have a
                length that the base has not learned, or leave no room for an answer in a completion.
        """
        for name in ("validation_problems", "test_problems"):
            whole_number(name, settings.get(name, 0), 0, tiny.FIXED, "its set has no more")
        return {"grader": "strict"} | _filler(base, settings)

    def check(self, arm: str, base: str, settings: Settings) -> None:
        """Raise ValueError for more unique prompts than there are for a model from outside the tiny world."""
        if base not in tiny.SHIPPED and (unique := settings.get("unique_prompts")) is not None:
            whole_number("unique_prompts", unique, most=countdown.PUBLIC_TRAIN, why="it trains on the public problems")

    def sets(self, spec: Spec) -> dict[str, list]:
        """Return the problems of each split.

        In the tiny world, every step has new training problems, unless the spec has unique_prompts. Other models train
        on the public problems: all of them, or as many as unique_prompts, drawn by the seed. "sft" repeats them until
        it has as many prompts as its spec states.
        """
        sizes = {name: spec.get(f"{name}_problems", 0) for name in ("validation", "test")}
        needed = spec.get("prompts") or spec.get("steps", 0) * spec.get("prompts_per_step", 0)
        if spec["base"] in tiny.SHIPPED or "made" in spec:
            sets = {name: tiny.problems(name, size) for name, size in sizes.items() if size}
            if needed:
                unique, seed = spec.get("unique_prompts", needed), np.random.SeedSequence([spec["seed"], 1])
                sets["train"] = list(itertools.islice(itertools.cycle(tiny.problems("train", unique, seed)), needed))
            return sets
        sets = {"train": countdown.load_public("train")}
        if needed and not {"unique_prompts", "prompts"}.isdisjoint(spec):
            sets["train"] = in_own_order(spec, sets["train"], needed, spec.get("unique_prompts"))
        sets["validation"] = countdown.generate(sizes["validation"], 0, high=99, split="validation")
        sets["test"] = countdown.load_public("test")[: sizes["test"]]
        return {name: problems for name, problems in sets.items() if problems}

    def rows(self, spec: Spec, tokenizer: Any, problems: Sequence[Any]) -> list[dict[str, Any]]:
        """Return rows whose prompts ask for the number of filler steps in the spec."""
        return tiny.dataset(problems, tokenizer, spec.get("filler_steps"))

    def skills(self, spec: Spec, engine: Any) -> dict[str, dict[str, float]]:
        """Return how well a model of family A retains each skill that no reward touches (`tiny.SKILL_NAMES`).

        For each skill: greedy accuracy, as a fraction, and exact KL from the base, nats per token, on one sample per
        message at temperature 1.

        Args:
            spec: spec with skill_messages, the number of messages per skill.
            engine: engine with the model; the prompts of each skill are added to it.
        """
        told = {}
        for name in tiny.SKILL_NAMES:
            messages, asked = tiny.skill_set(name, spec["skill_messages"]), f"skill {name}"
            if asked not in engine.prompts:
                rows = [{"prompt": [{"role": "user", "content": question}]} for question, _ in messages]
                engine.add_prompts(asked, rows)
            (answers,) = engine.generate(asked)
            right = [text == reply for (text, _), (_, reply) in zip(answers, messages, strict=True)]
            drift = base_models.kl_from_base(spec | {"seed": 0}, engine, asked)
            told[name] = {"greedy": round(float(np.mean(right)), 6), "kl": drift["exact_nats_per_token"]}
        return told

    def right(self, problem: Any, completion: str) -> bool:
        """Return whether a completion is a right answer by the strict grader."""
        return bool(countdown.grade(completion, problem.numbers, problem.target).answer)

    def score(self, problem: Any, completion: str) -> float:
        """Return the reward of a completion under the strict grader."""
        return countdown.grade(completion, problem.numbers, problem.target).reward

    def lists_answers(self, base: str) -> bool:
        """Return True for family A; family H writes thinking steps before its answers, so they cannot be listed."""
        return base in tiny.BASES

    def right_answers(self, problem: Any) -> list[str]:
        """Return `tiny.right_answers`."""
        return tiny.right_answers(problem)

    def answer(self, completion: str) -> str | None:
        """Return the expression in a completion, without spaces."""
        found = countdown.last_answer(completion)
        return None if found is None else found.replace(" ", "")

    def point(self, spec: Spec, engine: Any, sets: Mapping[str, list], step: int) -> dict[str, Any]:
        """Return the point, and if the spec has `reach_at`, exact pass@k on the validation set, without sampling.

        For each temperature, here 1: `reach_t1@k`, exact pass@k; `won_t1`, the expected share of problems solved within
        `coverage.SOLVED_WITHIN` samples that the base does not solve; and `lost_t1`, the reverse.
        """
        shown = super().point(spec, engine, sets, step)
        if "reach_at" not in spec:
            return shown
        temperatures = tuple(spec["reach_at"])
        engine.write_model()
        reached = self.reach(engine, "validation", sets["validation"], temperatures)
        base = _base_reach(spec["base"], len(sets["validation"]), spec["max_completion_length"], temperatures)
        for temperature, own, before in zip(map(label, temperatures), reached, base, strict=True):
            shown |= {f"reach_{temperature}@{k}": float(coverage.pass_at(own, k).mean()) for k in REACH_AT_K}
            solved = [coverage.pass_at(probabilities, coverage.SOLVED_WITHIN) for probabilities in (before, own)]
            change = coverage.support(*solved)
            shown |= {f"won_{temperature}": change.won / len(own), f"lost_{temperature}": change.lost / len(own)}
        return shown

    def right_answer(self, problem: Any, rng: random.Random) -> str:
        """Return a randomly drawn expression that reaches the target, in the right format.

        For a public problem outside the tiny world (four numbers, or a target that is not an integer), it is the
        expression that `countdown.solve` finds, without an end token, since every model has a different one.
        """
        if len(problem.numbers) > 3 or not tiny.right_answers(problem):
            found = countdown.solve(problem.numbers, problem.target)
            require(found is not None, f"{problem} has no right answer. Leave it out of the training problems.")
            return f"</think>\n<answer>{found}</answer>"
        return tiny.answer(problem, "right", rng)

    def base_outcome(self, spec: Spec, engine: Any, sets: Mapping[str, list]) -> Record:
        """Return pass@k on the validation set, and the test set."""
        validation = tiny.measure(engine, sets["validation"], "validation")
        return {"validation": validation} | super().base_outcome(spec, engine, sets)


@lru_cache(maxsize=4)
def _base_reach(base: str, n: int, longest: int, temperatures: Sequence[float]) -> np.ndarray:
    """Return a base's `reach` on n validation problems, cached: every point of a curve is compared with it."""
    model, tokenizer = tiny.load(base)
    problems = tiny.problems("validation", n)
    rows = {"validation": MEASURES.rows({}, tokenizer, problems)}
    with closing(base_models.evaluation_engine({"max_completion_length": longest}, model, tokenizer, rows)) as engine:
        return MEASURES.reach(engine, "validation", problems, temperatures)


def _filler(base: str, settings: Settings) -> dict[str, int]:
    """Return the checked setting filler_steps for the base that needs it, and nothing for any other."""
    steps = settings.get("filler_steps")
    if base not in tiny.FILLER_BASES:
        other = tiny.FILLER_BASES[0]
        require(steps is None, f"filler_steps={steps!r}: leave it out, or use base {other!r}, which has them.")
        return {}
    known = list(tiny.FILLER_STEPS)
    require(steps in known, f"base {base!r} needs filler_steps, one of {known}, got {steps!r}.")
    length, needed = settings["max_completion_length"], steps + tiny.MAX_COMPLETION_LENGTH
    cut = f"max_completion_length={length} cuts {steps} filler steps and an answer off: set {needed}."
    require(length >= needed, cut)
    return {"filler_steps": steps}


MEASURES = _Countdown()
