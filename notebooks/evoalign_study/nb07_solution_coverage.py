"""Notebook 07, solution coverage: its presets and groups of runs.

Its answers and tables are in `study.views.solution_coverage`, its figures in `study.views.solution_coverage_figures`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from evoalign_lib import arms, tiny
from evoalign_study import loading, weight_cache
from evoalign_study import nb08_weight_geometry as weight_geometry
from evoalign_study.kinds.decode import sampled_specs
from evoalign_study.kinds.train import composed_specs, sweep_specs
from evoalign_study.kinds.weights import answers_spec, coverage_spec, perturbed_specs
from evoalign_study.loading import After, Group, Groups, Records
from evoalign_study.records import Record, Spec, ledger_file

NOTEBOOK = "07_solution_coverage"
CLAIMS = ("C18", "C18b", "C19", "E13", "C36", "E12")
TRAINED = ("es", "es_sampled", "grpo", "dr_grpo", "sft", "es_random", "grpo_random")
"""Groups of training runs, whose reach is compared."""
CELLS = {
    ("temperature", "es"): "es_weighted",
    ("temperature", "gradient"): "grpo",
    ("perturbed", "es"): "es_members",
    ("perturbed", "gradient"): "grpo_perturbed",
}
"""Rollouts and update -> the group of runs that has both, all at as many completions."""
SLOWER = "grpo slower"
"""Runs of GRPO with the learning rate of the policy gradient on what perturbed copies wrote."""
PLAIN = "sft_perturbed"
"""Runs that are fine-tuned on right answers of perturbed copies."""
ALONE = "es alone"
"""Runs of ES that spend as many FLOPs as those of GRPO."""
FIRST = ("es first", "grpo first")
"""Groups of the first parts."""
COMPOSED = {"es then grpo": ("es first", "grpo"), "grpo then es": ("grpo first", "es")}
"""Group of runs in two parts -> the group of their first parts, and what the second one is."""
BASE, ELSEWHERE, MEAN = "base", "es elsewhere", "mean of ES runs"
"""The base itself; notebook 08's runs of ES; and models whose weights are means of these."""
TINY = {
    "bases": ["A0"],
    "retrain": [],  # groups that `force` makes anew; none: all
    "own_seeds": list(range(32, 40)),  # no seed that another notebook has
    "seeds_es": 32,  # of ES in notebook 08
    "seeds_random": [],  # weight_geometry's, which nothing here takes
    "seeds_sampled": [],
    "mean": 8,  # ES runs of which a mean is taken
    "cell_steps": 250,  # of ES where rollouts and updates are taken apart: as many completions as GRPO has
    "cell_members": 16,
    "cell_prompts": 16,
    "cell_samples": 16,  # of each prompt, where the unperturbed weights write
    "sweep_size": 12,
    "finalists": 4,  # settings of a sweep that are tried at full length
    "perturbed_sigma": 0.025,  # of the copies that write for fine-tuning: that which solves most validation problems
    "alone_steps": 66,  # of ES at the FLOPs of GRPO; the parts of composed runs have half of each
    "curve_points": 13,
    "reach_at": [0.6, 1.0],  # temperatures at which every point of a curve is measured
    "max_completion_length": tiny.MAX_COMPLETION_LENGTH,
    "validation_problems": 512,
    "test_problems": 512,
    "coverage_problems": 256,  # of the test set
    "coverage_temperatures": [0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4],
    "coverage_samples": 64,  # of each problem
    "coverage_sampled_at": [0.6, 1.0],
    "checked_samples": 1024,  # of each problem, of one run of each arm
    "perturbed_sigmas": [0.01, 0.015, 0.02, 0.025, 0.03],  # of noise on the base's weights
    "perturbed_repeats": 4,
    "perturbed_members": 512,  # copies, each of which answers once
    "perturbed_problems": 256,  # of the test set, those of coverage_problems
    "perturbed_validation": 128,
    "ends": [],  # folders, ledgers or adapters of your own, sampled beside `model`; none: a run of ES
    "sampled_problems": 64,  # of the test set, of which the model and its ends are sampled
    "sampled_block": 32,  # problems of a record: as much is lost by a kill
    "sampled_samples": 64,  # of each problem
    "sampled_temperatures": [0.6, 1.0],
}
SMOKE = TINY | {
    "own_seeds": [32, 33],
    "seeds_es": 2,
    "mean": 2,
    "cell_steps": 4,
    "cell_members": 4,
    "cell_prompts": 4,
    "cell_samples": 4,
    "sweep_size": 2,
    "finalists": 1,
    "alone_steps": 2,
    "curve_points": 3,
    "validation_problems": 16,
    "test_problems": 32,
    "coverage_problems": 16,
    "coverage_temperatures": [0.6, 1.0],
    "coverage_samples": 8,
    "checked_samples": 16,
    "perturbed_sigmas": [0.02],
    "perturbed_repeats": 2,
    "perturbed_members": 16,
    "perturbed_problems": 16,
    "perturbed_validation": 8,
    "sampled_problems": 8,
    "sampled_block": 4,
    "sampled_samples": 8,
}
FULL = TINY | {
    "sampled_problems": 512,
    "sampled_block": 64,
    "sampled_samples": 512,
    "max_completion_length": 1024,
    "tensor_parallel": 1,  # GPUs that share a copy of the model
}


def presets(model: str = "") -> dict[str, dict[str, Any]]:
    """Return scale -> settings; model: that of scale full, empty for the scale's own."""
    return {"tiny": TINY, "smoke": SMOKE, "full": FULL | {"bases": [model or "Qwen/Qwen2.5-0.5B-Instruct"]}}


def groups(run: SimpleNamespace, of: Records) -> Groups:
    """Return the runs by name: notebook 02's arms on seeds of their own, and what each of their models can solve.

    At scale full these runs are those of the tiny world, since elsewhere no right answers are listed; the model and its
    ends are sampled.
    """
    scale, exact = loading.of_tiny_world(run, TINY)
    settings = SimpleNamespace(**exact)
    declared = weight_geometry.trained(run, of, scale, exact)
    found: dict[str, Any] = {name: declared[name] for name in ("sweep es", "sweep grpo")}
    found[ELSEWHERE] = declared["es"]
    for arm in TRAINED:
        found[arm] = _own(declared[arm], settings)
    found |= _cells(settings, of, declared, scale)
    found |= _composed(settings, of, declared, scale)
    for name, needed in reached().items():
        known = all(group in of for group in needed)
        found[name] = After(_reach(settings, of, name, needed, scale, exact) if known else [], needed)
    found["perturbed"] = perturbed_specs(
        settings.bases[0], settings.perturbed_sigmas, settings.perturbed_repeats, exact, scale
    )
    answered = {name: needed for name, needed in reached().items() if name != reach_name(MEAN)}
    needed = tuple(dict.fromkeys(group for groups in answered.values() for group in groups))
    found["answers"] = After(_answers(settings, of, answered, scale, exact), needed)
    found["checked"] = After(_checked(settings, of, scale, exact), TRAINED)
    sampled = [
        spec for end in (None, *ends(run, of)) for spec in sampled_specs(run.bases[0], end, vars(run), run.scale)
    ]
    found["sampled"] = After(sampled, (ELSEWHERE,))
    return found


def ends(run: SimpleNamespace, of: Records) -> list[str]:
    """Return the ends of training that are sampled beside the model; where a notebook has none, a ledger of ES."""
    if run.ends or run.bases[0] not in tiny.SHIPPED:
        return list(run.ends)
    return [str(ledger_file(of[ELSEWHERE][0]))] if ELSEWHERE in of else []


def sampled(run: SimpleNamespace, of: Records) -> dict[str, Sequence[Record]]:
    """Return name -> records of the model and its ends, in their order."""
    by_end: dict[str | None, list[Record]] = {}
    for record in of["sampled"]:
        by_end.setdefault(record["spec"].get("end"), []).append(record)
    names = [run.bases[0], *(Path(end).name for end in run.ends)]
    if len(names) < len(by_end):
        names = [f"base {run.bases[0]}", "a run of ES"]
    twice = {name for name in names if names.count(name) > 1}  # folders of one name: told apart by their place
    named = [f"{name} ({i})" if name in twice else name for i, name in enumerate(names)]
    return dict(zip(named, by_end.values(), strict=True))


def _cells(run: SimpleNamespace, of: Records, declared: Mapping[str, Any], scale: str) -> dict[str, Any]:
    """Return the runs that take rollouts and updates apart, and the sweeps that choose their settings.

    A sweep has half of the steps, and its best settings are tried again with all of them: a step of ES that is best for
    half as long may walk away later. The fourth cell is GRPO itself, with notebook 02's setting. Fine-tuning on what
    perturbed copies wrote has the learning rate of the other.
    """
    size = {"steps": run.cell_steps, "population_size": run.cell_members, "prompts_per_step": run.cell_prompts}
    es = dict(declared["es"].settings) | size | {"num_generations": run.cell_samples}
    arm_of = {"es_weighted": "es_weighted", "es_members": "es_sampled", "grpo_perturbed": "grpo_perturbed"}
    found: dict[str, Any] = {}
    for name, arm in arm_of.items():
        after, settings = (
            ((), es) if arms.get(arm).family == "es" else (declared["grpo"].after, declared["grpo"].settings)
        )
        choices = arms.SWEEP["grpo_perturbed" if arm == "grpo_perturbed" else "es_weighted"][: run.sweep_size]
        sweep = f"sweep {name}"
        settings = dict(settings) | ({"beta": 0.0} if arm == "grpo_perturbed" else {})
        found[sweep] = After(sweep_specs(arm, run.bases[0], settings, scale, choices), after)
        tried = [setting for _, setting in arms.ranked(of[sweep])] if sweep in of else choices
        finals, whole = f"finals {name}", settings | {"steps": 2 * settings["steps"]}  # of which a sweep takes half
        specs = sweep_specs(arm, run.bases[0], whole, scale, tried[: run.finalists]) if sweep in of else []
        found[finals] = After(specs, (*after, sweep))
        best = arms.ranked(of[finals])[0][1] if finals in of else tried[0]
        group = Group(arm, run.bases[:1], run.own_seeds, settings | best, after=(*after, sweep, finals), scale=scale)
        found[name] = _own(group, run)
    few = run.own_seeds[:4]  # no verdict uses them
    others = [seed + len(TINY["own_seeds"]) for seed in few]  # no seed that a claim counts
    other = found["grpo_perturbed"]
    slower = dict(_own(declared["grpo"], run).settings) | {"learning_rate": other.settings["learning_rate"]}
    found[SLOWER] = other._replace(arm="grpo", seeds=others, settings=slower)
    plain = _own(declared["sft"]._replace(arm=PLAIN), run)
    found[PLAIN] = plain._replace(seeds=few, settings=dict(plain.settings) | {"sigma": run.perturbed_sigma})
    return found


def _composed(run: SimpleNamespace, of: Records, declared: Mapping[str, Any], scale: str) -> dict[str, Any]:
    """Return runs in two parts, their first parts, and ES alone at the FLOPs of GRPO.

    Each part has half of the steps that its arm has alone. ES has the setting that does best after so few steps of its
    sweep.
    """
    es, grpo = (_own(declared[arm], run) for arm in ("es", "grpo"))
    short = dict(es.settings) | {"steps": run.alone_steps}
    if "sweep es" in of:
        short |= best_after(of["sweep es"], run.alone_steps // 2)
    parts = {
        "es": es._replace(settings=short | {"steps": run.alone_steps // 2}),
        "grpo": grpo._replace(settings=dict(grpo.settings) | {"steps": grpo.settings["steps"] // 2}),
    }
    found: dict[str, Any] = {ALONE: es._replace(settings=short)}
    found |= {"es first": parts["es"], "grpo first": parts["grpo"]}
    for name, (first, second) in COMPOSED.items():
        needed = (*parts[second].after, first)
        known = all(group in of for group in needed)
        specs = composed_specs(parts[second].arm, of[first], parts[second].settings, scale) if known else []
        found[name] = After(specs, needed)
    return found


def best_after(sweep: Sequence[Record], steps: int) -> dict[str, float]:
    """Return the setting of a sweep of ES that is best on the validation set after so few steps.

    As in `arms.ranked` by the mean of three points of the curve: the last ones up to that step.
    """
    cut = []
    for record in sweep:
        known = sum(step <= steps for step in record["curve"]["step"])
        cut.append(record | {"curve": {name: values[:known] for name, values in record["curve"].items()}})
    return arms.ranked(cut)[0][1]


def _own(declared: Group, run: SimpleNamespace) -> Group:
    """Return notebook 02's runs of an arm on seeds of their own, with what they reach along the way."""
    own = dict(declared.settings) | {"test_problems": run.test_problems, "validation_problems": run.validation_problems}
    if "curve_points" in own:
        own |= {"curve_points": run.curve_points, "reach_at": run.reach_at}
    return declared._replace(seeds=run.own_seeds, settings=own, ledgers=())


def reached() -> dict[str, tuple[str, ...]]:
    """Return the groups of models whose coverage is measured, each with the groups of runs that it comes after."""
    found: dict[str, tuple[str, ...]] = {reach_name(BASE): ()}
    cells = [group for group in CELLS.values() if group not in TRAINED]
    found |= {reach_name(group): (group,) for group in (*TRAINED, *cells, SLOWER, PLAIN, ALONE, *COMPOSED, *FIRST)}
    return found | {reach_name(MEAN): (ELSEWHERE,)}


def reach_name(of: str) -> str:
    """Return the name of the group that measures the models of another."""
    return f"reach of {of}"


def _reach(
    run: SimpleNamespace, of: Records, name: str, needed: Sequence[str], scale: str, settings: dict[str, Any]
) -> list[Spec]:
    if not needed:
        return [coverage_spec(run.bases[0], None, settings, scale)]
    (group,) = needed
    size = run.mean if group == ELSEWHERE else 1
    runs = weight_geometry.means(of[group], size, len(of[group]))
    return [coverage_spec(run.bases[0], weight_cache.end(chosen), settings, scale) for chosen in runs]


def _answers(
    run: SimpleNamespace, of: Records, answered: Mapping[str, tuple[str, ...]], scale: str, settings: dict[str, Any]
) -> list[Spec]:
    """Return what the base and the first run of each group answer, for the page of the site that shows them."""
    if not all(group in of for groups in answered.values() for group in groups):
        return []
    ends = [weight_cache.end(of[groups[0]][:1]) if groups else None for groups in answered.values()]
    return [answers_spec(run.bases[0], end, settings, scale) for end in ends]


def _checked(run: SimpleNamespace, of: Records, scale: str, settings: dict[str, Any]) -> list[Spec]:
    """Return the base and the first run of each arm with many samples, which the exact numbers are held against."""
    many = settings | {"coverage_samples": run.checked_samples}
    ends = [None, *(weight_cache.end(of[arm][:1]) for arm in TRAINED)] if all(arm in of for arm in TRAINED) else []
    return [coverage_spec(run.bases[0], end, many, scale) for end in ends]
