"""How far the tiny world reaches: claims of 2026 with their nulls, and series with predictions made beforehand."""

from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

from evoalign_study import loading, runs
from evoalign_study.kinds.exact import pairs_specs, rank_specs
from evoalign_study.kinds.train import audit_specs
from evoalign_study.kinds.weights import pruned_specs
from evoalign_study.loading import Group, Groups, Records
from evoalign_study.records import Spec

CLAIMS = ("C41", "C41b", "C42", "C43", "C44", "C45", "C46", "E21", "E22")
"""Claims of papers of 2026, and this project's own predictions."""
SHORT = {"population_size": 30, "prompts_per_step": 32, "sigma": 0.01, "alpha": 0.0025, "steps": 262}
"""The setting of ES that won where the arms are compared (claim C2c)."""
AUDITED = (*product(("inplace", "master"), ("random", "reward")), ("kahan", "reward"))
"""Precision and fitness of the audits, at the sigma and alpha of Qiu et al."""
WIDTHS = (16, 32, 64, 128, 256, 512, 0)
"""Widths of square matrices with noise of rank 1; 0: all tensors of the base."""


def groups(run: SimpleNamespace, of: Records) -> Groups:
    """Return groups of runs of notebook 05, which has the group "es"; none outside scale tiny."""
    if run.scale != "tiny":
        return {}
    base, common = "A0", loading.of_runs(vars(run)) | SHORT
    few = common | {"steps": 50, "curve_points": 2, "curve_spacing": None}
    exact = few | {"test_problems": 500, "pruned_shares": [0.78, 0.93], "estimator_problems": 64, "pairs_members": 60}

    def audited(precision: str, fitness: str) -> list[Spec]:
        own = few | {"sigma": 1e-3, "alpha": 5e-4, "prompts_per_step": 16}
        own |= {"validation_problems": 32, "test_problems": 32}
        return audit_specs(base, precision, "gaussian", fitness, range(8), own, "tiny", largest=144)

    def pairs(ends: Sequence[Any] = (None,)) -> list[Spec]:
        asked = ("greedy", "sampled")
        return [each for how in asked for each in pairs_specs(base, ends[:8], how, range(1, 17), exact, "tiny")]

    two = [loading.of_size(common, 2)]
    return {
        "audits": [each for how in AUDITED for each in audited(*how)],
        "rank": rank_specs(base, WIDTHS, 8, 20_000, "tiny"),
        "pairs": pairs(),
        "pairs at ends": runs.after(of, ["es"], pairs),
        "pruned": runs.after(of, ["es"], lambda ends: pruned_specs(ends[:8], exact, "tiny")),
        **{f"{arm} N=2": Group(arm, [base], 8, common | {"curve_points": 13}, two) for arm in ("es", "es_random")},
    }
