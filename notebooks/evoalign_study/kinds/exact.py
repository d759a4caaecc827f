"""Compare estimates with exact values: single ES steps with the exact gradient, KL estimators with the exact KL."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from evoalign_lib import checks, noise, tiny, update_rules
from evoalign_lib.analysis import gradient, kl
from evoalign_lib.engines.local import LocalEngine, Prompts
from evoalign_lib.tasks import countdown
from evoalign_study import measures, specs
from evoalign_study.measures.base import significant
from evoalign_study.records import Record, Settings, Spec

FITNESS = ("expected", "greedy")
MEASURE = measures.get("countdown")


def kl_specs(base: str, sigma: float, repeats: int, settings: Settings, scale: str) -> list[Spec]:
    """Return specs that compare KL estimators with the exact KL between a base and the same base moved by noise.

    Args:
        base: a plain base of the tiny world.
        sigma: standard deviation of the noise on every weight; it determines the size of the KL.
        repeats: number of draws of the noise, each with its own samples.
        settings: max_completion_length, kl_problems (of the validation set), kl_samples (completions per problem).
        scale: scale of the notebook.

    Raises:
        ValueError: an odd number of samples, which cannot be halved; a base outside the tiny world, or one that needs
            filler_steps; a task other than Countdown; an engine other than the local one.
    """
    wanted = specs.take(settings, ("max_completion_length", "kl_problems", "kl_samples"), "the estimate of KL")
    n = wanted["kl_samples"]
    checks.require(n >= 2 and n % 2 == 0, f"kl_samples={n} must be even: errors come from two halves of the samples.")
    spec = specs.begin_tiny("kl", base, scale, settings) | wanted | {"sigma": sigma}
    return [spec | {"repeat": repeat} for repeat in range(repeats)]


def run_kl(spec: Spec) -> Record:
    """Return KL(policy || ref) of a base moved by noise, by every estimator, and the gradients of these as losses."""
    (policy, tokenizer), (reference, _) = tiny.load(spec["base"]), tiny.load(spec["base"])
    prompts = Prompts(countdown.dataset(tiny.problems("validation", spec["kl_problems"]), tokenizer), tokenizer)
    length = spec["max_completion_length"]
    engine = LocalEngine(policy, tokenizer, None, {"validation": prompts}, max_completion_length=length)
    key = noise.member_key(noise.run_key("kl", spec["repeat"]), 0, 0)
    noise.perturb(engine.master, engine.master.copy(), engine.layout, key, spec["sigma"])
    engine.write_model()
    samples = engine.generate("validation", samples=spec["kl_samples"], seed=spec["repeat"])
    completions = [ids for sample in samples for _, ids in sample]
    repeated = [np.tile(a, (spec["kl_samples"], 1)) for a in (prompts.ids, prompts.mask)]
    arguments = policy, reference, kl.samples(*repeated, completions, engine.eos_ids)
    comparison = kl.compare(*arguments)
    result = {"sequences": len(completions), "tokens": int(comparison.mask.sum())}
    result |= kl.estimator_errors(comparison) | kl.gradient_errors(*arguments)
    return {"kl": {k: significant(v) if isinstance(v, float) else v for k, v in result.items()}}


def estimator_specs(
    base: str, N: int, repeats: int, fitness: str, targets: str, settings: Settings, scale: str
) -> list[Spec]:
    """Return specs that compare single ES steps with the exact gradient, on two-number problems.

    Args:
        base: a plain base of the tiny world.
        N: population size.
        repeats: number of populations drawn.
        fitness: "expected" (at temperature 1, exact) or "greedy".
        targets: "any", or "not the sum": problems that are not solved by adding up, the bases' habit.
        settings: sigma, alpha, estimator_problems.
        scale: scale of the notebook.

    Raises:
        ValueError: a base outside the tiny world, or one that needs filler_steps; a task other than Countdown; an
            engine other than the local one.
    """
    wanted = specs.take(settings, ("sigma", "alpha", "estimator_problems"), "the estimator")
    spec = specs.begin_tiny("estimator", base, scale, settings) | wanted
    spec |= {"fitness": fitness, "targets": targets, "N": N}
    return [spec | {"repeat": repeat} for repeat in range(repeats)]


def run_estimator(spec: Spec) -> Record:
    """Return the comparison of one ES step with the exact gradient of expected reward (see `ExactObjective`)."""
    objective = _objective(spec["base"], spec["estimator_problems"], spec["targets"])
    result = objective.run(**{name: spec[name] for name in ("N", "sigma", "alpha", "repeat", "fitness")})
    return {"estimator": {k: round(v, 9) if isinstance(v, float) else v for k, v in result.items()}}


@lru_cache(maxsize=2)
def _objective(base: str, n: int, targets: str) -> ExactObjective:
    """Return the objective of a base, made once per process: enumerating completions takes longer than a step."""
    drawn = countdown.generate(4 * n, 0, split="train", **tiny.PROBLEMS | {"count": 2})
    chosen = [p for p in drawn if targets == "any" or sum(p.numbers) != int(p.target)][:n]
    few = f"only {len(chosen)} of {n} two-number problems have targets {targets!r}: set a smaller estimator_problems."
    checks.require(len(chosen) == n, few)
    # compared with 1e-6, the gradient has cosine 0.99999998, and a step takes a third of the time
    return ExactObjective(*tiny.load(base), chosen, min_probability=1e-5)


class ExactObjective:
    """Countdown problems with a model's exact expected answer, its gradient, and ES steps measured against both.

    R is only the answer part of the reward, under the strict grader: 1 for a right answer, 0 for any other completion.
    The completions are enumerated once, at the given weights; a right answer that is too improbable there to be
    enumerated is missed at other weights, too.

    Args:
        model: a Hugging Face decoder-only model of at most a few million weights; it is copied and never changed.
        tokenizer: its tokenizer.
        problems: the problems; with two numbers each, thousands of completions per problem are enumerated.
        min_probability: completions less probable than this are left out.

    Attributes:
        enumeration: the completions.
        rewards: (completions,) 0 or 1.
        layout: the model's parameters.
        start: float32 (layout.size,) weights.
        gradient: float32 (layout.size,) of the expected answer, at the start.
        expected, greedy: expected answer, and share of right greedy answers, at the start.

    Raises:
        ValueError: there are no problems, or none has a right answer among its completions.
    """

    def __init__(self, model: Any, tokenizer: Any, problems: Sequence[Any], min_probability: float = 1e-7):
        self.problems, self._tokenizer = list(problems), tokenizer
        prompts = Prompts(countdown.dataset(self.problems, tokenizer), tokenizer)
        self._model = copy.deepcopy(model).eval()
        # one process: its master holds the weights to be measured
        longest = tiny.MAX_COMPLETION_LENGTH
        self._engine = LocalEngine(self._model, tokenizer, None, {"problems": prompts}, max_completion_length=longest)
        self.layout, self.start = self._engine.layout, self._engine.master.copy()
        asked = [row[-n:].tolist() for row, n in zip(prompts.ids, prompts.lengths, strict=True)]
        limits = {"max_new_tokens": longest, "min_probability": min_probability}
        self.enumeration = gradient.enumerate_completions(self._model, asked, eos_ids=self._engine.eos_ids, **limits)
        texts = tokenizer.batch_decode(self.enumeration.completions(), skip_special_tokens=True)
        right = [MEASURE.right(self.problems[i], text) for i, text in zip(self.enumeration.prompt, texts, strict=True)]
        self.rewards = np.array(right, np.float64)
        none = f"none of {len(self.rewards)} completions is right: use another model or other problems."
        checks.require(self.rewards.any(), none)
        self._packed = gradient.pack(self.enumeration, self.rewards)
        exact = gradient.expected_reward_gradient(self._model, self.enumeration, self.rewards)
        self.gradient = gradient.flat(self.layout, exact)
        self.expected, self.greedy = self.expected_at(self.start), self.greedy_at(self.start)

    def expected_at(self, weights: np.ndarray) -> float:
        """Return the expected answer when sampling at temperature 1 with flat weights, averaged over the problems."""
        self._engine.master[...] = weights
        self._engine.write_model()
        return gradient.expected(self._model, self._packed, len(self.problems))

    def greedy_at(self, weights: np.ndarray) -> float:
        """Return the share of problems that greedy decoding with flat weights (layout.size,) answers rightly."""
        self._engine.master[...] = weights
        return float(MEASURE.graded(self.problems, self._engine.generate("problems")).mean())

    def run(self, N: int, sigma: float, alpha: float, repeat: int, fitness: str = "expected") -> dict[str, Any]:
        """Take one ES step from the start and measure it.

        Args:
            N: population size.
            sigma: standard deviation of the perturbation, weight units.
            alpha: step size with 1/sigma absorbed, weight units.
            repeat: number of the population; member i has the key (run key of arm "estimator" and seed `repeat`, step
                0, i).
            fitness: "expected", the exact expected answer of each member; or "greedy", its share of right greedy
                answers, as in training.

        Returns:
            `tied` (then there is no step; undefined values are None); `cosine` of step and gradient; `rho`;
            `predicted_cosine` rho sqrt(N/d); `norm_ratio` |step| / (alpha sqrt(d/N)); `improving`, the share of members
            fitter than the start; changes of the expected answer from the whole step and from its parts along and
            orthogonal to the gradient (`gain_full`, `gain_aligned`, `gain_orthogonal`), and of the greedy answer
            (`greedy_gain_full`, ...); `covered`, the minimum over the problems; `expected_reward` and `greedy` at the
            start; `d`, the number of weights; `problems`, their number.

        Raises:
            ValueError: an argument out of range.
        """
        checks.whole_number("N", N, 2, why="z-scores need two members")
        checks.require(alpha > 0 and math.isfinite(alpha), f"alpha must be positive and finite, got {alpha!r}")
        checks.choose("fitness", fitness, FITNESS)
        measure, base = (self.expected_at, self.expected) if fitness == "expected" else (self.greedy_at, self.greedy)
        root, d = noise.run_key("estimator", repeat), self.layout.d
        keys = np.array([noise.member_key(root, 0, i) for i in range(N)], np.uint64)
        values, member = np.empty(N), np.empty_like(self.start)
        for i, key in enumerate(keys):
            noise.perturb(member, self.start, self.layout, int(key), sigma)
            values[i] = measure(member)
        z = update_rules.standardise(values)
        displacement = gradient.step(self.layout, keys, z, alpha)
        aligned, orthogonal = gradient.decompose(displacement, self.gradient)
        rho = gradient.fitness_correlation(values, gradient.projections(self.layout, keys, self.gradient))
        result = {
            "tied": not z.any(),
            "cosine": gradient.cosine(displacement, self.gradient),
            "rho": rho,
            "predicted_cosine": rho * math.sqrt(N / d),
            "norm_ratio": float(np.linalg.norm(displacement.astype(np.float64))) / (alpha * math.sqrt(d / N)),
            "improving": float((values > base).mean()),
            "covered": float(self.enumeration.covered.min()),
            "expected_reward": self.expected,
            "greedy": self.greedy,
            "d": d,
            "problems": len(self.problems),
        }
        for name, part in (("full", displacement), ("aligned", aligned), ("orthogonal", orthogonal)):
            moved = (self.start + part).astype(np.float32)
            result[f"gain_{name}"] = self.expected_at(moved) - self.expected
            result[f"greedy_gain_{name}"] = self.greedy_at(moved) - self.greedy
        return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in result.items()}
