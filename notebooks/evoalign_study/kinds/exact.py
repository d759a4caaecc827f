"""Compare estimates with exact values: single ES steps with the exact gradient, KL estimators with the exact KL."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from evoalign_lib import checks, noise, tiny, update_rules
from evoalign_lib.analysis import gradient, kl
from evoalign_lib.engines.local import LocalEngine, Prompts
from evoalign_lib.files import canonical_json
from evoalign_lib.precision import copy_to
from evoalign_lib.tasks import countdown
from evoalign_study import base_models, measures, specs, weight_cache
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
def _objective(base: str, n: int, targets: str, end: str = "null") -> ExactObjective:
    """Return the objective of a base, or of an end as JSON, made once per process, since enumerating is slow."""
    drawn = countdown.generate(4 * n, 0, split="train", **tiny.PROBLEMS | {"count": 2})
    chosen = [p for p in drawn if targets == "any" or sum(p.numbers) != int(p.target)][:n]
    few = f"only {len(chosen)} of {n} two-number problems have targets {targets!r}: set a smaller estimator_problems."
    checks.require(len(chosen) == n, few)
    model, tokenizer = tiny.load(base)
    if named := json.loads(end):
        start, layout = weight_cache.of_base(base), weight_cache.layout_of(base)
        copy_to(model, layout, weight_cache.moved(start, weight_cache.displacement(named, start, layout)))
    # compared with 1e-6, the gradient has cosine 0.99999998, and a step takes a third of the time
    return ExactObjective(model, tokenizer, chosen, min_probability=1e-5)


# ---- baselines, pairs and rank: the error of an estimate at equal evaluations


def pairs_specs(
    base: str, ends: Sequence[Record | None], fitness: str, repeats: Iterable[int], settings: Settings, scale: str
) -> list[Spec]:
    """Return specs that compare estimates without a baseline, with the mean as baseline, and from antithetic pairs.

    Args:
        base: a plain base of the tiny world.
        ends: records of runs from it, used in turn; None: the base itself.
        fitness: "greedy", or "sampled": one sample at temperature 1, with the same random numbers for all members.
        repeats: numbers of the populations drawn.
        settings: sigma, estimator_problems, pairs_members (members of a population).
        scale: scale of the notebook.

    Raises:
        ValueError: as for `estimator_specs`.
    """
    wanted = specs.take(settings, ("sigma", "estimator_problems", "pairs_members"), "the estimate")
    spec = specs.begin_tiny("pairs", base, scale, settings) | wanted | {"fitness": fitness}
    at = [{} if end is None else {"end": weight_cache.end([end])} for end in ends]
    spec |= {"at": f"{fitness}, {'end' if at[0] else 'base'}"}
    return [spec | {"repeat": repeat} | at[repeat % len(at)] for repeat in repeats]


def run_pairs(spec: Spec) -> Record:
    """Return mean squared errors of estimates of the gradient, for members with noise of either sign.

    A member contributes f eps, less its baseline; of a pair, (f+ - f-) eps / 2 counts as two evaluations. The error of
    their mean is the variance of one over their number. So for each estimate the record has that variance per
    evaluation: over all weights, in which |eps|^2 is d for all, and `along` the exact gradient at temperature 1.
    """
    objective = _objective(spec["base"], spec["estimator_problems"], "any", canonical_json(spec.get("end")))
    root, n, start = noise.run_key("pairs", spec["repeat"]), spec["pairs_members"], objective.start
    keys = np.array([noise.member_key(root, 0, i) for i in range(n)], np.uint64)
    fitness, member = np.empty((2, n)), np.empty_like(start)
    how = {} if spec["fitness"] == "greedy" else {"samples": 1, "seed": spec["repeat"]}
    for i, key in enumerate(keys):
        for row, sign in enumerate((1, -1)):
            noise.perturb(member, start, objective.layout, int(key), spec["sigma"], sign=sign)
            fitness[row, i] = objective.greedy_at(member, **how)
    along = gradient.projections(objective.layout, keys, objective.gradient / np.linalg.norm(objective.gradient))
    first, pair = fitness[0], (fitness[0] - fitness[1]) / 2
    parts = {"none": first, "mean": (first - first.mean()) * math.sqrt(n / (n - 1)), "pairs": math.sqrt(2) * pair}
    result = {name: float(np.mean(part**2)) for name, part in parts.items()}
    result |= {f"{name}_along": float(np.var(part * along, ddof=1)) for name, part in parts.items()}
    result |= {"slope": float(np.mean(pair * along)), "start": objective.greedy_at(start, **how)}
    for end in ("", "_along"):
        result[f"mean_over_pairs{end}"] = result[f"mean{end}"] / result[f"pairs{end}"]
        result[f"mean_over_none{end}"] = result[f"mean{end}"] / result[f"none{end}"]
    return {"estimator": {name: significant(value) for name, value in result.items()}}


def rank_specs(base: str, widths: Sequence[int], repeats: int, members: int, scale: str) -> list[Spec]:
    """Return specs that measure how much noisier an estimate is by noise of rank 1, for square matrices of widths.

    A width of 0 stands for all tensors of the base together. members: draws of the noise in each of the repeats.
    """
    spec = specs.begin_tiny("rank", base, scale, {}) | {"members": members}
    return [spec | {"width": width, "repeat": repeat} for width in widths for repeat in range(repeats)]


def run_rank(spec: Spec) -> Record:
    """Return the variance that noise of rank 1 adds to the estimate of a gradient, as a share of that of full rank.

    For the fitness <G, E>, averaged over the directions of G, a member's |f E|^2 is |E|^4 / d. Its mean is d + 2 for
    full rank. For rank 1 it is d (1 + v), v being the variance of |E|^2 / d, which is measured; by Wishart's moments
    one m x n matrix gets (m + 2)(n + 2), so that 2 (m + n + 1) / (m n + 1) is added, as in arXiv 2609.10980.
    """
    layout = weight_cache.layout_of(spec["base"])
    shapes = [(e.id, e.shape) for e in layout.entries] if not spec["width"] else [(1, (spec["width"],) * 2)]
    root, n = noise.run_key("rank", spec["repeat"]), spec["members"]
    keys = np.array([noise.member_key(root, 0, i) for i in range(n)], np.uint64)
    squares, formula, d = np.zeros(n), 0.0, sum(math.prod(shape) for _, shape in shapes)
    for param, shape in shapes:
        size = math.prod(shape)
        if len(shape) > 1:
            sides = [np.square(f, dtype=np.float64).sum((1, 2)) for f in noise.factors(keys, param, shape, 1)]
            squares += sides[0] * sides[1]
            formula += 2 * (shape[0] + size // shape[0] + 1) * size / d / (d + 1)
        else:
            squares += np.square(noise.vectors(keys, param, size), dtype=np.float64).sum(1)
    v = float(np.mean((squares / d - 1) ** 2))
    excess = (d * (1 + v) - 1) / (d + 1) - 1
    told = {"excess": excess, "formula": formula, "excess_over_formula": excess / formula}
    return {"estimator": {name: significant(value) for name, value in told.items()}}


# ---- the signal at a base


def signal_specs(base: str, repeats: int, settings: Settings, scale: str) -> list[Spec]:
    """Return specs that measure at a base what the law of the share foretells gains from.

    Args:
        base: a plain base of the tiny world.
        repeats: number of sets of populations, each with its own noise and training problems.
        settings: population_size, prompts_per_step, sigma, signal_populations (in a repeat), validation_problems.
        scale: scale of the notebook.

    Raises:
        ValueError: as for `estimator_specs`.
    """
    names = ("population_size", "prompts_per_step", "sigma", "signal_populations", "validation_problems")
    spec = specs.begin_tiny("signal", base, scale, settings) | specs.take(settings, names, "the signal")
    return [spec | {"repeat": repeat} for repeat in range(repeats)]


def run_signal(spec: Spec) -> Record:
    """Return the norm of the gradient g of pass@1 on validation problems, and rho of greedy and of sampled fitness.

    The gradient is that of the probability of all listed right answers, without a sample. rho is the mean of z times
    eps . g / |g| over members; each population has its own training problems, and a tied one counts as 0. So a step of
    ES gains alpha rho |g|, as long as the objective is linear and the rest of the step does no harm.
    """
    model, tokenizer = base_models.model_of(spec)
    size, step = spec["prompts_per_step"], spec["signal_populations"] * spec["prompts_per_step"]
    drawn = tiny.problems("train", step, spec["repeat"])
    asked = tiny.problems("validation", spec["validation_problems"])
    parts = {str(i): drawn[i : i + size] for i in range(0, step, size)}
    rows = {name: countdown.dataset(own, tokenizer) for name, own in (parts | {"at": asked}).items()}
    sets = {name: Prompts(own, tokenizer) for name, own in rows.items()}
    engine = LocalEngine(model, tokenizer, None, sets, max_completion_length=tiny.MAX_COMPLETION_LENGTH)
    listed = [MEASURE.right_answers(problem) for problem in asked]
    tokens = tokenizer([text for texts in listed for text in texts], add_special_tokens=False)["input_ids"]
    padded = np.full((len(tokens), max(map(len, tokens))), -1, np.int32)
    for row, ids in zip(padded, tokens, strict=True):
        row[: len(ids)] = ids
    prompts = [row[-n:].tolist() for row, n in zip(sets["at"].ids, sets["at"].lengths, strict=True)]
    of_prompt, ones = np.repeat(np.arange(len(asked)), [len(texts) for texts in listed]), np.ones(len(tokens))
    answers = gradient.Enumeration(prompts, of_prompt, padded, np.log(ones), np.ones(len(asked)))
    start, layout = engine.master.copy(), engine.layout
    exact = gradient.flat(layout, gradient.expected_reward_gradient(model, answers, ones))
    norm = float(np.linalg.norm(exact.astype(np.float64)))
    found = {"pass@1": gradient.expected(model, gradient.pack(answers, ones), len(asked)), "gradient": norm}
    root = noise.run_key("signal", spec["repeat"])
    rho: dict[str, list[float]] = {"greedy": [], "sampled": []}
    for population, (name, problems) in enumerate(parts.items()):
        keys = np.array([noise.member_key(root, population, i) for i in range(spec["population_size"])], np.uint64)
        fitness = np.empty((2, len(keys)))
        for i, key in enumerate(keys):
            noise.perturb(engine.master, start, layout, int(key), spec["sigma"])
            engine.write_model()
            for row, how in enumerate(({}, {"samples": 1, "seed": population})):
                fitness[row, i] = MEASURE.graded(problems, engine.generate(name, **how)).mean()
        along = gradient.projections(layout, keys, exact / norm)
        for values, own in zip(fitness, rho.values(), strict=True):
            own.append(float(update_rules.standardise(values) @ along) / len(keys))
    return {"signal": {k: significant(v) for k, v in (found | {k: np.mean(v) for k, v in rho.items()}).items()}}


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

    def greedy_at(self, weights: np.ndarray, **how: Any) -> float:
        """Return the share of right answers with flat weights (layout.size,), greedily or as `how` samples."""
        self._engine.master[...] = weights
        return float(MEASURE.graded(self.problems, self._engine.generate("problems", **how)).mean())

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
