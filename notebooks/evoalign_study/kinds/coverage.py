"""What a model can solve within k samples: exact where its right answers are listed, and counted from samples beside.

A model of family A writes an answer in few ways, and all right ones are listed (`Measures.reach`). So the chance that
one sample is right is a sum of probabilities, at any temperature and without drawing a sample, and pass@k has no noise
of sampling. Right answers that are written in another way are not in it: samples say how many they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np

from evoalign_lib.analysis import coverage
from evoalign_study import measures, specs, training, weight_cache
from evoalign_study.measures.base import Measures, label, temperatures
from evoalign_study.records import Record, Spec, pack_bits, pack_integers, pack_probabilities

VALIDATED_BY = 64
"""Samples within which a validation problem counts as solved where a model's best temperature is chosen."""
_SIZES = (
    "max_completion_length", "validation_problems", "coverage_problems", "coverage_temperatures", "coverage_samples",
    "coverage_sampled_at",
)  # fmt: skip


def coverage_spec(base: str, end: Mapping[str, Any] | None, settings: Mapping[str, Any], scale: str) -> Spec:
    """Return the spec of what a model can solve.

    Args:
        base: that the runs started from, one of the tiny world whose right answers are listed.
        end: the model, of `trained.end`; None: the base itself.
        settings: max_completion_length; validation_problems, on which temperatures are compared; coverage_problems, of
            the test set; coverage_temperatures, at which everything is exact; coverage_samples of each problem, 2 to
            4,095, at each of coverage_sampled_at.
        scale: of the notebook.

    Raises:
        ValueError: temperatures that are none, there twice or not above 0; too few samples or too many; too many test
            problems; an end of another base, a setting that is missing, or a base whose right answers are not listed.
    """
    spec = specs.begin_tiny("coverage", base, scale, {}) | specs.take(settings, _SIZES, "coverage")
    for name in ("coverage_temperatures", "coverage_sampled_at"):
        spec[name] = temperatures(name, spec[name])
    if not 2 <= spec["coverage_samples"] <= 4095:
        raise ValueError(f"coverage_samples={spec['coverage_samples']}: take 2 to 4,095.")
    spec["test_problems"] = spec.pop("coverage_problems")
    measures.get(spec["task"]).spec_fields(base, spec)  # refuses more test problems than there are
    return weight_cache.at_end(spec, end)


def run(spec: Spec) -> Record:
    """Return what a model can solve.

    The record has `greedy_bits`; `reach`, temperature -> the chance that one sample of a test problem is right
    (`records.pack_probabilities`); `validation`, temperature -> pass@64 on the validation set; and `drawn`, temperature
    -> what samples say: how many are right of each test problem (`records.pack_integers`), whether the most frequent
    answer is (`vote_bits`), the mean entropy of the answers, nats, plain and corrected for few samples, and how many of
    all right samples are among the listed answers.
    """
    measure = measures.get(spec["task"])
    model, tokenizer, sets = training.world(spec)
    with closing(training.evaluation_engine(spec, model, tokenizer, sets)) as engine:
        if "end" in spec:
            start, layout = engine.master.copy(), engine.layout
            engine.master[:] = weight_cache.moved(start, weight_cache.displacement(spec["end"], start, layout))
        engine.write_model()
        asked = spec["coverage_temperatures"]
        reached, validated = (
            measure.reach(engine.model, engine.prompts[name], engine, sets[name], asked)
            for name in ("test", "validation")
        )
        greedy = measure.accuracy(engine, "test", sets["test"], 0)[0]
        pairs = zip(asked, reached, validated, strict=True)
        result: Record = {"n": len(sets["test"]), "greedy_bits": pack_bits(greedy.astype(int))}
        result |= {"reach": {}, "validation": {}}
        for temperature, of_test, of_validation in pairs:
            result["reach"][label(temperature)] = pack_probabilities(of_test)
            solved = float(coverage.pass_at(of_validation, VALIDATED_BY).mean())
            result["validation"][label(temperature)] = round(solved, 6)
        result["drawn"] = {
            label(temperature): _drawn(measure, engine, sets["test"], spec["coverage_samples"], temperature)
            for temperature in spec["coverage_sampled_at"]
        }
        return result


def _drawn(measure: Measures, engine: Any, problems: Sequence[Any], samples: int, temperature: float) -> dict[str, Any]:
    warmth = {} if temperature == 1.0 else {"temperature": temperature}
    rows = engine.generate("test", samples=samples, seed=0, **warmth)
    return summary(measure, engine, problems, [[text for text, _ in row] for row in rows])


def summary(measure: Measures, engine: Any, problems: Sequence[Any], rows: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return what samples of each problem say, for a record: see `run`, of which this is `drawn`.

    rows: (samples, problems) completions, without their end tokens.
    """
    n_right, voted, entropies, among_listed = [], [], [], 0
    for problem, texts in zip(problems, zip(*rows, strict=True), strict=True):
        listed = {answer.removesuffix(engine.tokenizer.eos_token) for answer in measure.right_answers(problem)}
        graded = {text: measure.right(problem, text) for text in set(texts)}
        answered = {text: measure.answer(text) for text in set(texts)}
        right, answers = [graded[text] for text in texts], [answered[text] for text in texts]
        n_right.append(sum(right))
        voted.append(vote_is_right(measure, problem, texts))
        entropies.append(coverage.answer_entropy(list(Counter(answers).values())))
        among_listed += sum(text in listed for text, is_right in zip(texts, right, strict=True) if is_right)
    plain, corrected = np.mean(entropies, axis=0)
    return {
        "right": pack_integers(np.array(n_right)),
        "vote_bits": pack_bits(np.array(voted, dtype=int)),
        "entropy": round(float(plain), 5),
        "entropy_corrected": round(float(corrected), 5),
        "right_samples": sum(n_right),
        "listed": among_listed,
    }


def vote_is_right(measure: Measures, problem: Any, texts: Sequence[str]) -> bool:
    """Say whether the answer that most completions of a problem give is right; where most give none, it is not."""
    answers = [measure.answer(text) for text in texts]
    chosen = coverage.vote(answers)
    return chosen is not None and measure.right(problem, texts[answers.index(chosen)])
