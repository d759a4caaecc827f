"""Notebook 08, weight geometry: its presets, groups of runs, and what the records say of signal and walk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from evoalign_lib import arms, tiny
from evoalign_study import loading
from evoalign_study import nb01_es_countdown as es_countdown
from evoalign_study import nb02_grpo_countdown as grpo_countdown
from evoalign_study.kinds.decode import base_specs
from evoalign_study.kinds.train import sweep_specs
from evoalign_study.kinds.weights import merge_specs, products_specs
from evoalign_study.loading import After, Group, Groups, Records
from evoalign_study.records import Record, ledger_file

NOTEBOOK = "08_weight_geometry"
CLAIMS = ("E5", "E6", "E6b", "E7", "E8", "E9", "E10", "E11", "C20", "C21", "C22", "C23", "C24")
FACTORIAL = ("grpo_sgd", "grpo_rounded", "grpo_sgd_rounded")
"""Groups of runs of GRPO that tell its optimiser and rounding apart."""
TRAINED = ("es", "es_sampled", "es_shuffled", "es_random", "grpo", "dr_grpo", "grpo_random", "sft", *FACTORIAL)
"""Groups of training runs, whose displacements are compared."""
FIRST_STEP = "first step"
"""Group of runs of GRPO's first step alone, by SGD on many prompts: its gradient at the base, with little noise."""
TINY = {
    "bases": ["A0"],
    "retrain": [],  # groups that `force` makes anew; none: all
    "seeds_es": 32,  # of ES, half of them new here
    "seeds_random": [*range(8), *range(16, 24)],  # of ES with random fitness
    "seeds_sampled": [*range(8), *range(16, 32)],  # of ES with sampled fitness
    "means": {  # arm -> numbers of runs of which the mean is taken
        "es": [1, 2, 4, 8, 16, 32],
        "es_sampled": [1, 4, 8],
        "es_random": [1, 4, 16],
        "grpo": [1, 2, 4, 8, 16],
        "dr_grpo": [1, 8],
        "grpo_sgd": [1, 8],
        "grpo_rounded": [1, 8],
        "grpo_sgd_rounded": [1, 8],
        "grpo_random": [1, 8],
        "sft": [1, 4],
    },
    "means_of_each": 8,  # means of one number of runs, at most
    "shrunk": {"es": 4, "es_random": 4},  # arm -> size of the means, to whose lengths runs are shrunk one by one
    "shrunk_far": 16,  # runs of ES to the length of whose mean single ones are shrunk
    "multiples": [0.0, 2.0, 3.0],  # of the mean of all ES runs; 0 is the base
    "anchor_decays": [0.005, 0.02],  # share of the way from the base that a step takes back; the first is the published
    "populations": [8, 128],  # besides the tuned one, at as many evaluated members
    "shares": [0.125, 0.25, 0.5],  # of the steps of ES and GRPO, of shorter runs
    "sgd_rates": [0.03, 0.1, 0.3, 1.0, 3.0],  # learning rates of GRPO with SGD, of which a sweep chooses
    "seeds_factorial": 8,
    "first_step_prompts": 1024,  # of GRPO's first step, taken alone
    "first_step_rate": 0.1,  # learning rate of that step, which no cosine depends on
    "skill_messages": 256,  # of each skill that no reward touches
    "ends": [],  # two folders, ledgers or adapters of your own, compared with `model`; none: two runs of ES
    "max_completion_length": tiny.MAX_COMPLETION_LENGTH,
    "validation_problems": 512,
    "test_problems": 2000,
}
SMOKE = TINY | {
    "seeds_es": 2,
    "seeds_random": [0, 1],
    "seeds_sampled": [0, 1],
    "means": {"es": [1, 2], "es_random": [1, 2], "grpo": [1, 2]}
    | {arm: [1] for arm in ("es_sampled", "dr_grpo", *FACTORIAL, "grpo_random", "sft")},
    "means_of_each": 2,
    "shrunk": {"es": 2, "es_random": 2},
    "shrunk_far": 2,
    "anchor_decays": [0.02],
    "populations": [2],
    "shares": [0.5],
    "sgd_rates": [0.1],
    "seeds_factorial": 2,
    "first_step_prompts": 16,
    "skill_messages": 8,
    "validation_problems": 16,
    "test_problems": 32,
}
FULL = TINY


def presets(model: str = "") -> dict[str, dict[str, Any]]:
    """Return scale -> settings; model: that of scale full, empty for the scale's own."""
    return {"tiny": TINY, "smoke": SMOKE, "full": FULL | {"bases": [model or "Qwen/Qwen2.5-0.5B-Instruct"]}}


def groups(run: SimpleNamespace, of: Records) -> Groups:
    """Return the runs by name: those of notebook 02's arms, their products, and models that are merged from them.

    At scale full the runs are those of the tiny world, and the model's own ends are compared apart from them.
    """
    scale, exact = loading.of_tiny_world(run, TINY)
    found = trained(run, of, scale, exact)
    found |= _factorial(SimpleNamespace(**exact), of, found["grpo"], scale)
    compared = (*TRAINED, FIRST_STEP)
    complete = all(name in of for name in compared)
    found["products"] = After(products_specs([of[name] for name in compared], scale) if complete else [], compared)
    found |= _remedies(SimpleNamespace(**exact), found["es"])
    found |= (shorter := _shorter(SimpleNamespace(**exact), found))
    return found | _merged(SimpleNamespace(**exact), of, scale, shorter)


def trained(run: SimpleNamespace, of: Records, scale: str, exact: Mapping[str, Any]) -> dict[str, Any]:
    """Return notebook 02's groups of the first base as it declares them, with more seeds, and 01's shuffled runs.

    exact: the notebook's settings at this scale (`loading.of_tiny_world`), with seeds_es, seeds_random, seeds_sampled.
    """
    few = {"seeds_match": 2, "seeds_compare": 2, "seeds_describe": 2} if scale == "smoke" else {}
    common = {"scale": scale, "seeds": run.seeds, "force": run.force, "retrain": run.retrain}
    other = SimpleNamespace(**grpo_countdown.presets()[scale] | few | common)
    declared = grpo_countdown.groups(other, of)
    found = {name: declared[name] for name in ("sweep es", "sweep grpo", *TRAINED) if name in declared}
    found["es"] = declared["es"]._replace(seeds=exact["seeds_es"])
    for arm, seeds in {"es_random": exact["seeds_random"], "es_sampled": exact["seeds_sampled"]}.items():
        found[arm] = declared[arm]._replace(seeds=seeds)
    first = es_countdown.presets()[scale]
    found["es_shuffled"] = Group("es_shuffled", exact["bases"][:1], first["n_seeds"], loading.of_runs(first))
    found = {name: each._replace(scale=scale) if isinstance(each, Group) else each for name, each in found.items()}
    return found | {"base": base_specs(exact["bases"][:1], loading.of_runs(vars(other)), scale)}


def _factorial(run: SimpleNamespace, of: Records, grpo: Group, scale: str) -> dict[str, Any]:
    """Return runs of GRPO with SGD, with weights in bfloat16, and with both; and of its first step alone.

    SGD chooses a learning rate of its own, by a sweep.
    """
    rates = [{"learning_rate": rate, "beta": grpo.settings["beta"]} for rate in run.sgd_rates]
    sweep = sweep_specs("grpo_sgd", run.bases[0], grpo.settings, scale, rates)
    best = arms.ranked(of["sweep grpo_sgd"])[0][1] if "sweep grpo_sgd" in of else rates[0]
    found: dict[str, Any] = {"sweep grpo_sgd": After(sweep, grpo.after)}
    for arm in FACTORIAL:
        own, after = ({}, grpo.after) if arm == "grpo_rounded" else (best, (*grpo.after, "sweep grpo_sgd"))
        settings = dict(grpo.settings) | own
        found[arm] = grpo._replace(arm=arm, seeds=run.seeds_factorial, settings=settings, after=after)
    step = {"learning_rate": run.first_step_rate, "steps": 1, "prompts_per_step": run.first_step_prompts}
    # in sixteen parts: the completions of all prompts at once would not fit into memory
    step |= {"curve_points": 3, "micro_batch": grpo.settings["num_generations"] * run.first_step_prompts // 16}
    settings = dict(grpo.settings) | step
    found[FIRST_STEP] = grpo._replace(arm="grpo_sgd", seeds=run.seeds_factorial, settings=settings)
    return found


def _remedies(run: SimpleNamespace, es: Group) -> dict[str, Group]:
    """Return ES runs that may drift less: pulled to the base, or with another population."""
    each = es._replace(seeds=run.means_of_each, ledgers=())
    anchored = {anchored_name(decay): {"anchor_decay": decay} for decay in run.anchor_decays}
    sized = {sized_name(N): loading.of_size(es.settings, N) for N in run.populations}
    found = {name: each._replace(arm="es_anchored", changes=[change]) for name, change in anchored.items()}
    return found | {name: each._replace(changes=[change]) for name, change in sized.items()}


def _shorter(run: SimpleNamespace, groups: Mapping[str, Any]) -> dict[str, Group]:
    """Return runs of ES and of GRPO with fewer steps. Their prompts are drawn as a full run's, and are others."""
    return {
        name: groups[arm]._replace(seeds=run.means_of_each, ledgers=(), changes=[{"steps": steps}])
        for arm in SHORTER
        for name, steps in shorter_names(run, arm, groups[arm].settings["steps"]).items()
    }


SHORTER = ("es", "grpo")
"""Arms whose runs are also made with fewer steps."""


def shorter_names(run: SimpleNamespace, arm: str, steps: int) -> dict[str, int]:
    """Return group -> steps of an arm's shorter runs; steps: those of its full ones."""
    return {f"{arm} T={round(share * steps)}": round(share * steps) for share in run.shares}


def anchored_name(decay: float) -> str:
    """Return the name of the group of runs with anchored weight decay."""
    return f"es_anchored={decay:g}"


def sized_name(N: int) -> str:
    """Return the name of the group of runs with N members."""
    return f"es N={N}"


def _merged(run: SimpleNamespace, of: Records, scale: str, shorter: Iterable[str]) -> dict[str, After]:
    """Return the models that are made of several runs, one group for each way."""
    found: dict[str, After] = {}
    make = partial(merge_specs, settings=vars(run), scale=scale)

    def add(name: str, arm: str, specs: Sequence[Any]) -> None:
        found[name] = After(list(specs), (arm,))

    for arm, sizes in run.means.items():
        for size in sizes:
            add(f"{arm} mean={size}", arm, [make(runs) for runs in means(of.get(arm, ()), size, run.means_of_each)])
    for arm, size in run.shrunk.items():
        pairs = zip(of.get(arm, ()), means(of.get(arm, ()), size, run.means_of_each), strict=False)
        add(f"{arm} shrunk={size}", arm, [make([record], as_long_as=mean) for record, mean in pairs])
    es = of.get("es", ())
    singles, far = es[: run.means_of_each], es[: run.shrunk_far]
    add("es shrunk far", "es", [make([record], as_long_as=far) for record in singles])
    add("random", "es", [make([record], draw=record["spec"]["seed"]) for record in singles])
    for factor in run.multiples:
        add(f"es times {factor:g}", "es", [make(es, factor=factor)] if es else [])
    for name in (*map(anchored_name, run.anchor_decays), *map(sized_name, run.populations), *shorter):
        add(f"{name} mean=1", name, [make([record]) for record in of.get(name, ())][: run.means_of_each])
    return found


def ends(run: SimpleNamespace, of: Records) -> tuple[str, str, str]:
    """Return what section 7 compares: a base and two ends of training from it.

    Raises ValueError for another number of ends than two.
    """
    if not run.ends:
        first, second = (str(ledger_file(record)) for record in of["es"][:2])
        return of["es"][0]["spec"]["base"], first, second
    if len(run.ends) != 2:
        raise ValueError(f"ends={run.ends}: give two models that started from {run.bases[0]!r}, or none.")
    return run.bases[0], *run.ends


def means(records: Sequence[Record], size: int, most: int) -> list[Sequence[Record]]:
    """Return groups of so many runs, in the order of their seeds; no run is in two of them."""
    return [records[first : first + size] for first in range(0, len(records) - size + 1, size)][:most]
