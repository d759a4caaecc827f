"""What a model can solve by noise on its weights: each perturbed copy answers greedily, once.

That is how a generation of ES explores. A copy is to perturbation what a sample is to temperature, so that the two can
be compared at as many completions. The copies that do best on the validation set, with a vote among them, are the
baseline of arXiv 2603.12228, which trains nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np

from evoalign_lib import noise
from evoalign_study import measures, specs, training
from evoalign_study.kinds.coverage import summary, vote_is_right
from evoalign_study.measures.base import Measures
from evoalign_study.records import Record, Spec, pack_integers

_SIZES = ("max_completion_length", "perturbed_members", "perturbed_problems", "perturbed_validation")
BEST = (1, 16, 64)
"""How many copies, the best on the validation set, vote."""


def perturbed_specs(
    base: str, sigmas: Sequence[float], repeats: int, settings: Mapping[str, Any], scale: str
) -> list[Spec]:
    """Return the specs of a base under noise on its weights, one for each sigma and repeat.

    Args:
        base: one of the tiny world whose right answers are listed.
        sigmas: standard deviations of the noise, weight units.
        repeats: how many times with noise of its own.
        settings: max_completion_length; perturbed_members, copies, 2 to 4,095; perturbed_problems, of the test set;
            perturbed_validation, problems on which the best copies are chosen.
        scale: of the notebook.

    Raises:
        ValueError: sigmas that are none, there twice or not above 0; no repeats; too few copies or too many; too many
            test problems; a setting that is missing.
    """
    if not sigmas or len(set(sigmas)) < len(sigmas) or not all(0 < sigma < np.inf for sigma in sigmas):
        raise ValueError(f"sigmas={list(sigmas)}: give finite standard deviations above 0, each once.")
    if repeats < 1:
        raise ValueError(f"repeats={repeats}: take at least 1.")
    taken = specs.take(settings, _SIZES, "noise on the weights")
    if not 2 <= taken["perturbed_members"] <= 4095:
        raise ValueError(f"perturbed_members={taken['perturbed_members']}: take 2 to 4,095.")
    sizes = {"test_problems": taken["perturbed_problems"], "validation_problems": taken["perturbed_validation"]}
    common = specs.begin_tiny("perturbed", base, scale, sizes) | sizes
    common |= {"max_completion_length": taken["max_completion_length"], "members": taken["perturbed_members"]}
    return [common | {"sigma": float(sigma), "repeat": repeat} for sigma in sigmas for repeat in range(repeats)]


def run(spec: Spec) -> Record:
    """Return what perturbed copies of a base solve, each answering greedily.

    The record has `drawn`, as of kind "coverage", with a copy in the place of a sample; `validation`, how many copies
    solve each validation problem; `member`, mean and standard deviation over copies of the test accuracy; and `best`,
    number of copies chosen on the validation set -> their mean test accuracy and that of their vote.
    """
    from evoalign_study.rollouts import greedy_answers

    measure = measures.get(spec["task"])
    model, tokenizer, sets = training.world(spec)
    run_key = noise.run_key("perturbed", spec["repeat"])
    with closing(training.evaluation_engine(spec, model, tokenizer, sets)) as engine:
        answered = greedy_answers(engine, ["test", "validation"], run_key, spec["sigma"], spec["members"])
        rows = {name: [[text for text, _ in row] for row in found] for name, found in answered.items()}
        right = {
            name: np.array([[measure.right(p, text) for p, text in zip(sets[name], row, strict=True)] for row in found])
            for name, found in rows.items()
        }
        accuracies = right["test"].mean(1)
        # of equally good copies the earlier
        order = np.argsort(-right["validation"].mean(1), kind="stable")
        return {
            "n": len(sets["test"]),
            "drawn": summary(measure, engine, sets["test"], rows["test"]),
            "validation": pack_integers(right["validation"].sum(0)),
            "member": {"mean": round(float(accuracies.mean()), 6), "sd": round(float(accuracies.std(ddof=1)), 6)},
            "best": {
                str(size): {
                    "mean": round(float(accuracies[order[:size]].mean()), 6),
                    "vote": round(_voted(measure, sets["test"], [rows["test"][i] for i in order[:size]]), 6),
                }
                for size in BEST
                if size <= spec["members"]
            },
        }


def _voted(measure: Measures, problems: Sequence[Any], rows: Sequence[Sequence[str]]) -> float:
    """Return the accuracy of the most frequent answers."""
    return float(
        np.mean([vote_is_right(measure, *pair) for pair in zip(problems, zip(*rows, strict=True), strict=True)])
    )
