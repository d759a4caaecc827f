"""Notebook 01, ES on Countdown: its presets, groups of runs, and the numbers that the paper quotes."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from evoalign_lib import tiny
from evoalign_lib.analysis import stats
from evoalign_lib.records import Record, accuracy_matrix
from evoalign_lib.study.kinds.audit import audit_specs
from evoalign_lib.study.kinds.base import base_specs
from evoalign_lib.study.kinds.estimator import estimator_specs
from evoalign_lib.study.notebooks import loading
from evoalign_lib.study.notebooks.loading import Group, Groups, Records

NOTEBOOK = "01_es_countdown"
TINY = {
    "bases": list(tiny.BASES),
    "n_seeds": 8,
    "null_bases": ["A0"],  # on which shuffled fitness runs, too
    "retrain": [],  # groups that `force` makes anew; none: all
    "population_size": 30,
    "sigma": 1e-2,
    "alpha": 1e-2,
    "steps": 100,
    "prompts_per_step": 128,
    "curve_points": 21,
    "max_completion_length": tiny.MAX_COMPLETION_LENGTH,
    "validation_problems": 512,
    "test_problems": 2000,
    "temperatures": [0.6],  # between greedy decoding and 1, at which models are measured again
    "decoded": [],  # groups that are: "es" and "es_shuffled"; none yet
    "estimator_problems": 128,  # of the single steps in section 6
    "populations": [4, 8, 30, 128],
    "repeats": 16,
    "ledger_steps": 500,  # of the long run in section 7
    "audit_seeds": 4,  # of the arithmetics in section 8
}
SMOKE = TINY | {
    "bases": ["A0"],
    "n_seeds": 2,
    "steps": 3,
    "population_size": 4,
    "prompts_per_step": 16,
    "validation_problems": 32,
    "test_problems": 64,
    "curve_points": 4,
    "estimator_problems": 8,
    "populations": [2, 4],
    "repeats": 2,
    "ledger_steps": 4,
    "audit_seeds": 2,
}
PUBLISHED = {"sigma": 1e-3, "alpha": 5e-4}
"""Sigma and alpha of Qiu et al. (arXiv 2509.24372), which scale full takes over."""
FULL = TINY | PUBLISHED
FULL |= {"steps": 500, "prompts_per_step": 200, "max_completion_length": 1024, "null_bases": []}
FULL |= {"tensor_parallel": 1}  # GPUs that share a copy of the model, with engine vllm
ARITHMETICS = [
    ("master", "gaussian", "reward"),
    ("inplace", "gaussian", "reward"),
    ("inplace", "tied", "reward"),
    ("master", "gaussian", "random"),
    ("inplace", "gaussian", "random"),
    ("kahan", "gaussian", "random"),
]
"""The rows of section 8: precision, noise and fitness. With random fitness sigma and alpha are the published ones."""


def presets(model: str = "") -> dict[str, dict[str, Any]]:
    """Return scale -> settings; model: that of scale full, empty for the scale's own."""
    return {"tiny": TINY, "smoke": SMOKE, "full": FULL | {"bases": [model or "Qwen/Qwen2.5-0.5B-Instruct"]}}


def groups(run: SimpleNamespace, of: Records) -> Groups:
    """Return the runs by name; "decodings" needs the records of what it measures."""
    settings, here = loading.of_runs(vars(run)), run.bases[:1]
    scale, exact = of_tiny_world(run)
    audited = loading.of_runs(exact)
    small = audited | PUBLISHED | {"curve_points": 2}  # generates nothing in training, so there is no curve to show
    seeds = range(exact["audit_seeds"])
    return {
        "es": Group("es", run.bases, run.n_seeds, settings, ledgers=here),
        "base": base_specs(run.bases, settings, run.scale),
        "decodings": loading.decodings(run, of, run.decoded),
        "es_shuffled": Group("es_shuffled", [b for b in run.bases if b in run.null_bases], run.n_seeds, settings),
        "estimator": [
            spec
            for N, fitness, targets in _single_steps(exact["populations"])
            for spec in estimator_specs(exact["bases"][0], N, exact["repeats"], fitness, targets, exact, scale)
        ],
        "ledger": Group("es", here, [0], settings, [{"steps": run.ledger_steps}], ledgers=here),
        "audit": [
            spec
            for *arithmetic, fitness in ARITHMETICS
            for spec in audit_specs(
                exact["bases"][0], *arithmetic, fitness, seeds, audited if fitness == "reward" else small, scale
            )
        ],
        "audit base": base_specs(exact["bases"][:1], audited, scale),
    }


def of_tiny_world(run: SimpleNamespace) -> tuple[str, dict[str, Any]]:
    """Return scale and settings of sections 6 and 8, which only small models allow (`loading.of_tiny_world`)."""
    return loading.of_tiny_world(run, TINY)


def _single_steps(populations: Sequence[int]) -> list[tuple[int, str, str]]:
    """Return members, fitness and targets of each set of single steps."""
    kinds = ("expected", "greedy")
    steps = [(N, fitness, "not the sum") for fitness in kinds for N in populations]
    return steps + [(populations[len(populations) // 2], fitness, "any") for fitness in kinds]


def accuracies(of: Records, arm: str, base: str, decoding: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the share of right answers on the test set after training (seeds, problems) and before it (problems,)."""
    after, before = (
        accuracy_matrix([r for r in of[group] if r["spec"]["base"] == base], decoding) for group in (arm, "base")
    )
    return after, before[0]


def of_arithmetic(found: Sequence[Record], precision: str, noise: str, fitness: str) -> list[Record]:
    """Return the audits of one arithmetic (see `ARITHMETICS`)."""
    wanted = {"precision": precision, "noise": noise, "fitness": fitness}
    return [r for r in found if wanted.items() <= r["spec"].items()]


def audit_means(found: Sequence[Record]) -> dict[str, float]:
    """Return what became of the updates in audits of one arithmetic, means over seeds.

    Keys are those of the record's `audit`, and "path": the cosine of the whole path with the intended one. A quantity
    that no run has is missing, one that was defined in none is NaN.
    """
    from pandas import DataFrame

    return DataFrame([r["audit"] | {"path": r["path"]["cosine"][-1]} for r in found], dtype=float).mean().to_dict()


def numbers(run: SimpleNamespace, of: Records) -> dict[str, tuple[Any, str]]:
    """Return macro -> value and format, of the training runs and, where it was measured here, of single steps."""
    here = run.bases[0]
    gain = stats.crossed_bootstrap(*accuracies(of, "es", here, "greedy"))
    both = [accuracies(of, "es", base, "greedy") for base in run.bases]
    mean_gain = stats.crossed_bootstrap(*(np.mean(side, axis=0) for side in zip(*both, strict=True)))
    found = {
        "EsSeeds": (sum(r["spec"]["base"] == here for r in of["es"]), "d"),
        "EsBases": (len(run.bases), "d"),
        "EsCompletions": (max(r["curve"]["completions"][-1] for r in of["es"]), ",d"),
        "EsSigma": (run.sigma, "g"),
        "EsAlpha": (run.alpha, "g"),
        "EsPopulation": (run.population_size, "d"),
        "EsSteps": (run.steps, "d"),
        "EsPromptsPerStep": (run.prompts_per_step, "d"),
        "EsTestProblems": (run.test_problems, "d"),
        "EsGainFirst": (100 * gain.value, ".1f"),
        "EsGainMean": (100 * mean_gain.value, ".1f"),
        "EsGainLow": (100 * mean_gain.low, ".1f"),
        "EsGainHigh": (100 * mean_gain.high, ".1f"),
        "EsBaseGreedy": (100 * np.mean([r["test"]["greedy"] for r in of["base"]]), ".1f"),
    }
    if any(r["spec"]["base"] == here for r in of["es_shuffled"]):
        after, before = accuracies(of, "es_shuffled", here, "greedy")
        found["EsShuffledChange"] = (100 * (after - before).mean(), ".1f")
    return found | (_step_numbers(of["estimator"]) if of_tiny_world(run)[0] == run.scale else {})


def _step_numbers(steps: Sequence[Record]) -> dict[str, tuple[Any, str]]:
    """Single steps on expected accuracy, of the population nearest to 30: means over the populations drawn."""
    chosen = [r for r in steps if (r["spec"]["fitness"], r["spec"]["targets"]) == ("expected", "not the sum")]
    N = min((r["spec"]["N"] for r in chosen), key=lambda n: abs(n - 30))
    fields = {"Cosine": "cosine", "Predicted": "predicted_cosine", "Rho": "rho"}
    fields |= {"Aligned": "gain_aligned", "Orthogonal": "gain_orthogonal"}
    found = {}
    for macro, field in fields.items():
        values = [r["estimator"][field] for r in chosen if r["spec"]["N"] == N]
        mean = np.mean([value for value in values if value is not None])  # of a tied population it is not defined
        found[f"Estimator{macro}"] = (mean, ".5f" if "gain" in field else ".3f")
    return found


def ledger_numbers(run: SimpleNamespace, long_run: Record) -> dict[str, tuple[Any, str]]:
    """Return macro -> value and format, of the long run whose ledger is kept: steps, and sizes in kilobytes."""
    steps = long_run["spec"]["steps"]
    found = {"LedgerSteps": (steps, "d")}
    found["LedgerFloor"] = (12 * run.population_size * steps / 1000, ".0f")  # a key and a coefficient per member
    sizes = {"": "bytes", "Gzipped": "gzip_bytes"}
    return found | {f"LedgerKilobytes{s}": (long_run["ledger"][key] / 1000, ".0f") for s, key in sizes.items()}


def audit_numbers(run: SimpleNamespace, found: Sequence[Record]) -> dict[str, tuple[Any, str]]:
    """Return macro -> value and format, of the arithmetics; none where they were measured at another scale."""
    scale, exact = of_tiny_world(run)
    if scale != run.scale:
        return {}
    cases = {"Master": ("master", "gaussian", "reward"), "Inplace": ("inplace", "gaussian", "reward")}
    cases |= {f"{name}Published": (*case[:2], "random") for name, case in cases.items()}
    means = {name: audit_means(of_arithmetic(found, *case)) for name, case in cases.items()}
    numbers = {"AuditSeeds": (exact["audit_seeds"], "d")}
    numbers |= {f"AuditPath{name}": (mean["path"], ".3f") for name, mean in means.items()}
    for name in ("Inplace", "InplacePublished"):
        numbers[f"AuditUpdate{name}"] = (means[name].get("update_cosine", np.nan), ".3f")
    return numbers | {"AuditChangedInplace": (100 * means["Inplace"]["restore_changed"], ".1f")}
