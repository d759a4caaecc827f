"""Notebook 08, weight geometry: groups of runs, signal and random walk in their displacements, tables and figures."""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from matplotlib import pyplot as plt
from pandas import DataFrame, concat

from evoalign_lib import arms, tiny
from evoalign_lib.analysis import attenuation, curves, geometry, stats
from evoalign_study import loading, plots, runs, specs, style, trainers
from evoalign_study.claims import quantities
from evoalign_study.claims.quantities import skills
from evoalign_study.claims.selection import Evidence
from evoalign_study.displacements import recorded
from evoalign_study.kinds.decode import decoding_specs
from evoalign_study.kinds.train import sweep_specs
from evoalign_study.kinds.weights import TEMPERATURE, gram_of_stretch, merge_specs, products_specs, stretch_specs
from evoalign_study.loading import After, Group, Groups, Records
from evoalign_study.records import Record, accuracy_matrix, ledger_file
from evoalign_study.results import Results, stated, under

NOTEBOOK = "08_weight_geometry"
CLAIMS = ("E5", "E6", "E6b", "E7", "E8", "E9", "E10", "E11", "E14", "C20", "C21b", "C22", "C23b", "C24b")
FACTORIAL = ("grpo_sgd", "grpo_rounded", "grpo_sgd_rounded")
"""Groups of GRPO runs that separate the effects of optimiser and rounding."""
TRAINED = ("es", "es_sampled", "es_shuffled", "es_random", "grpo", "dr_grpo", "grpo_random", "sft", *FACTORIAL)
"""Groups of training runs whose displacements are compared."""
FIRST_STEP = "first step"
"""Group of runs that take only GRPO's first step, by SGD on many prompts: its gradient at the base, with low noise."""
presets, TINY, SMOKE, FULL = runs.scales(
    {
        "bases": ["A0"],
        "retrain": [],  # groups that `force` runs again; empty: all of them
        "seeds_es": (32, 2),  # of ES; half of these runs are new here
        "seeds_random": ([*range(8), *range(16, 24)], [0, 1]),  # of ES with random fitness
        "seeds_sampled": ([*range(8), *range(16, 32)], [0, 1]),  # of ES with sampled fitness
        "means": (  # arm -> numbers of runs to average
            {"es": [1, 2, 4, 8, 16, 32], "es_sampled": [1, 4, 8], "es_random": [1, 4, 16], "grpo": [1, 2, 4, 8, 16]}
            | {arm: [1, 8] for arm in ("dr_grpo", *FACTORIAL, "grpo_random")}
            | {"sft": [1, 4]},
            {"es": [1, 2], "es_random": [1, 2], "grpo": [1, 2]}
            | {arm: [1] for arm in ("es_sampled", "dr_grpo", *FACTORIAL, "grpo_random", "sft")},
        ),
        "means_of_each": (8, 2),  # at most so many means of each number of runs
        # arm -> number of runs in the means to whose lengths single runs are shrunk
        "shrunk": ({"es": 4, "es_random": 4}, {"es": 2, "es_random": 2}),
        "shrunk_far": (16, 2),  # ES runs in the mean to whose length single runs are shrunk
        # arm -> number of runs that are compared with the mean of its other runs and a fresh walk
        "others": ({"es": 16, "es_random": 8}, {"es": 2, "es_random": 2}),
        "decoded": (16, 2),  # of these, ES runs that are measured at temperature 0.6, too
        # steps between which the movements of ES runs are compared
        "stretches": (
            [*([0, last] for last in (8, 16, 32, 65, 112, 160, 208)), [32, 65], [65, 112], [112, 160], [160, 208]],
            [[0, 2], [0, 4], [2, 4]],
        ),
        "early": (32, 2),  # first steps of ES runs, whose rho is compared with the rest's
        "turn": (65, 2),  # steps after which pairs of ES runs tell nothing more in common
        "multiples": [0.0, 2.0, 3.0],  # of the mean of all ES runs; 0 is the base
        "anchor_decays": ([0.005, 0.02], [0.02]),  # share of the displacement from the base that each step takes back
        "populations": ([8, 128], [2]),  # besides the tuned one, at equally many evaluated members
        "shares": ([0.125, 0.25, 0.5], [0.5]),  # lengths of shorter ES and GRPO runs, relative to the full ones
        "sgd_rates": ([0.03, 0.1, 0.3, 1.0, 3.0], [0.1]),  # learning rates of GRPO with SGD that a sweep chooses from
        "seeds_factorial": (8, 2),
        "first_step_prompts": (1024, 16),  # of the runs with GRPO's first step alone
        "first_step_rate": 0.1,  # learning rate of that step; no cosine depends on it
        "skill_messages": (256, 8),  # per skill that no reward touches
        "ends": [],  # two folders, ledgers or adapters of yours, compared with `model`; empty: two runs of ES
        "max_completion_length": tiny.MAX_COMPLETION_LENGTH,
        "validation_problems": (512, 16),
        "test_problems": (2000, 32),
    }
)
SHORTER = ("es", "grpo")
"""Arms that also have runs with fewer steps."""
PAIRS = (
    *(("es", arm) for arm in ("grpo", "dr_grpo", "sft", "es_sampled")),
    ("es_sampled", "grpo"),
    *((arm, "grpo_sgd") for arm in ("es", "es_sampled")),
    *(("grpo", arm) for arm in ("dr_grpo", "grpo_sgd", "grpo_rounded")),
    ("grpo_sgd", "grpo_sgd_rounded"),
    ("grpo", "sft"),
    *((arm, FIRST_STEP) for arm in ("grpo", "grpo_sgd", "es", "es_sampled")),
    *((arm, "grpo") for arm in ("es_random", "grpo_random")),
)
"""Pairs of arms whose cosine is shown."""
REWARDED = {"es": "greedy answers rewarded", "es_sampled": "sampled answers rewarded"}
STEPPED = {"grpo": "AdamW", "grpo_sgd": "SGD"}
"""The two by two of the answer: ES by what it is rewarded for, GRPO by what steps it."""
LIMITS = (("es_sampled", FIRST_STEP), ("grpo", "grpo_sgd"), ("grpo", FIRST_STEP), ("es", "es_sampled"))
"""Pairs that bound what the two by two says."""
PILOT = 16
"""Seeds of ES below this had been seen in a pilot before the claims were written."""
DECODINGS = tuple(style.STROKES)
"""Decodings under which merged models are measured."""


# ---- groups of runs


def groups(run: SimpleNamespace, records: Records) -> Groups:
    """Return the groups of runs by name: notebook 02's arms, inner products of their displacements, and merged models.

    At scale full these are still runs of the tiny world; the ends of the model itself are compared separately.
    """
    scale, exact = loading.of_tiny_world(run, TINY)
    settings = SimpleNamespace(**exact)
    specs.begin("merge", settings.bases[0], scale, exact)  # refuses sizes before there are runs to merge
    declared = runs.countdown(records, scale, exact)
    declared |= _factorial(settings, records, declared["grpo"], scale)
    compared = (*TRAINED, FIRST_STEP)
    declared["products"] = runs.after(records, compared, lambda *each: products_specs(each, scale))
    own = partial(stretch_specs, stretches=settings.stretches, scale=scale)
    declared["stretches"] = runs.after(records, ("es", FIRST_STEP), own)
    varied = _varied(settings, declared)
    return declared | varied | _merged(settings, records, scale, varied)


def _factorial(run: SimpleNamespace, records: Records, grpo: Group, scale: str) -> dict[str, Any]:
    """Return GRPO runs with SGD, with bfloat16 weights and with both, and runs of its first step alone.

    SGD gets its own learning rate, chosen by a sweep.
    """
    rates = [{"learning_rate": rate, "beta": grpo.settings["beta"]} for rate in run.sgd_rates]
    sweep = sweep_specs("grpo_sgd", run.bases[0], grpo.settings, scale, rates)
    best = arms.ranked(records["sweep grpo_sgd"])[0][1] if "sweep grpo_sgd" in records else rates[0]
    declared: dict[str, Any] = {"sweep grpo_sgd": After(sweep, grpo.after)}
    by_sgd = grpo._replace(settings=dict(grpo.settings) | best, after=(*grpo.after, "sweep grpo_sgd"))
    for arm in FACTORIAL:
        declared[arm] = (grpo if arm == "grpo_rounded" else by_sgd)._replace(arm=arm, seeds=run.seeds_factorial)
    step = {"learning_rate": run.first_step_rate, "steps": 1, "prompts_per_step": run.first_step_prompts}
    # in sixteen parts: the completions of all prompts at once would not fit into memory
    step |= {"curve_points": 3, "micro_batch": grpo.settings["num_generations"] * run.first_step_prompts // 16}
    settings = dict(grpo.settings) | step
    return declared | {FIRST_STEP: grpo._replace(arm="grpo_sgd", seeds=run.seeds_factorial, settings=settings)}


def _varied(run: SimpleNamespace, groups: Mapping[str, Group]) -> dict[str, Group]:
    """Return ES runs that may drift less, anchored to the base or with another population, and runs with fewer steps.

    A shorter run draws its prompts as a full run does, but gets different ones.
    """
    changed = {f"es_anchored={decay:g}": ("es_anchored", {"anchor_decay": decay}) for decay in run.anchor_decays}
    changed |= {f"es N={N}": ("es", loading.of_size(groups["es"].settings, N)) for N in run.populations}
    for arm in SHORTER:
        shorter = shorter_names(run, arm, groups[arm].settings["steps"])
        changed |= {name: (arm, {"steps": steps}) for name, steps in shorter.items()}
    few = {arm: groups[arm]._replace(seeds=run.means_of_each, ledgers=()) for arm in SHORTER}
    few["es_anchored"] = few["es"]
    return {name: few[arm]._replace(arm=arm, changes=[change]) for name, (arm, change) in changed.items()}


def shorter_names(run: SimpleNamespace, arm: str, steps: int) -> dict[str, int]:
    """Return group -> number of steps of an arm's shorter runs; steps: the number that its full runs take."""
    return {f"{arm} T={round(share * steps)}": round(share * steps) for share in run.shares}


def _merged(run: SimpleNamespace, records: Records, scale: str, varied: Iterable[str]) -> dict[str, After]:
    """Return the models that are merged from several runs, a group for each way of merging."""
    make = partial(merge_specs, settings=vars(run), scale=scale)
    es = records.get("es", ())
    singles, far = es[: run.means_of_each], es[: run.shrunk_far]

    def means(arm: str, size: int) -> list[Sequence[Record]]:
        return runs.means(records.get(arm, ()), size, run.means_of_each)

    merged = {
        f"{arm} mean={size}": After([make(each) for each in means(arm, size)], (arm,))
        for arm, sizes in run.means.items()
        for size in sizes
    }
    for arm, size in run.shrunk.items():
        pairs = zip(records.get(arm, ()), means(arm, size), strict=False)
        merged[f"{arm} shrunk={size}"] = After([make([record], as_long_as=mean) for record, mean in pairs], (arm,))
    merged["es shrunk far"] = After([make([record], as_long_as=far) for record in singles], ("es",))
    merged["random"] = After([make([record], draw=record["spec"]["seed"]) for record in singles], ("es",))
    for arm, size in run.others.items():
        own = list(records.get(arm, ()))
        asked = enumerate(own[:size] if len(own) > 2 else [])  # one other run would be as long as the run itself
        others = [make(own[:i] + own[i + 1 :], as_long_as=[one], walk=one["spec"]["seed"]) for i, one in asked]
        merged[f"{arm} others"] = After(others, (arm,))
    decoded = decoding_specs(es[: run.decoded], [TEMPERATURE], curve_temperature=TEMPERATURE) if es else []
    merged["es decoded"] = After(decoded, ("es",))
    for factor in run.multiples:
        merged[f"es times {factor:g}"] = After([make(es, factor=factor)] if es else [], ("es",))
    return merged | {f"{name} mean=1": After([make(each) for each in means(name, 1)], (name,)) for name in varied}


def ends(run: SimpleNamespace, records: Records) -> tuple[str, str, str]:
    """Return what the appendix compares: a base and two ends of training from it.

    Raises:
        ValueError: `run.ends` is neither empty nor a pair.
    """
    if not run.ends:
        return records["es"][0]["spec"]["base"], *(str(ledger_file(record)) for record in records["es"][:2])
    if len(run.ends) != 2:
        raise ValueError(f"ends={run.ends} must be empty or two models that started from {run.bases[0]!r}.")
    return run.bases[0], *run.ends


# ---- displacements


def label(arm: str) -> str:
    """Return the name of a group of training runs in tables and legends."""
    return "GRPO's first step" if arm == FIRST_STEP else style.ARMS[arm].label


def displacements(records: Records, *names: str) -> geometry.Displacements:
    """Return the inner products of the displacements of all runs of some arms, by layer, in the order of the arms."""
    return recorded(records["products"], [run for arm in names for run in records[arm]])


def norms(records: Records, arm: str) -> np.ndarray:
    """Return the norm of each run's displacement, weight units."""
    return np.sqrt(np.diagonal(displacements(records, arm).total))


def over_walk(records: Records, arm: str) -> np.ndarray:
    """Return norm / (alpha sqrt(d T / N)), T without tied steps, of each run of an ES arm that moved at all."""
    ratios = quantities.norms_over_walk(displacements(records, arm), records[arm])
    return ratios[~np.isnan(ratios)]


def stays(records: Records, arm: str) -> stats.Interval:
    """Return the share of weights equal to the base's after an arm's training, both rounded to bfloat16."""
    return stats.bootstrap_mean(quantities.unmoved(displacements(records, arm), "bfloat16"))


def _mean_and_std(values: Sequence[float] | np.ndarray, form: str) -> str:
    if not len(values):
        return ""
    spread = f" ± {np.std(values, ddof=1):{form}}" if len(values) > 1 else ""
    return f"{np.mean(values):{form}}{spread}"


def displacement_table(run: SimpleNamespace, records: Records) -> DataFrame:
    """Return a row per arm: norm, norm over a random walk's, evenness over layers, the head, and unchanged weights."""
    rows = []
    for arm in TRAINED:
        moved = displacements(records, arm)
        row = {"arm": label(arm), "runs": len(records[arm]), "norm": _mean_and_std(norms(records, arm), ".2f")}
        row["over a walk's"] = _mean_and_std(over_walk(records, arm), ".4f") if trainers.of(arm).has_members else ""
        row["distance from even"] = _mean_and_std(quantities.unevenness(moved), ".3f")
        row["head over its size"] = _mean_and_std(quantities.head_shares(moved), ".2f")
        for dtype in ("float32", "bfloat16"):  # rounding the base by itself moves nearly every weight
            counts = dtype == "bfloat16" or style.ARMS[arm].weights == "float32"
            row[f"stay, {dtype}, %"] = _mean_and_std(100 * quantities.unmoved(moved, dtype), ".1f") if counts else ""
        rows.append(row)
    null = geometry.size_null(displacements(records, "es").entries)
    random = {"arm": "a random direction", "norm": "any", "head over its size": "1.00"}
    rows.append(dict.fromkeys(rows[0], "") | random | {"distance from even": f"< {null.distance:.3f}"})
    return DataFrame(rows)


# ---- cosines


def corrected(records: Records, a: str, b: str) -> attenuation.Corrected:
    """Return the cosine of two arms' signals, corrected for the noise of single runs."""
    n, both = len(records[a]), displacements(records, a, b).total
    return attenuation.corrected_cosine(both, list(range(n)), list(range(n, len(both))))


def signal(records: Records, arm: str) -> attenuation.Signal:
    """Return an arm's signal: the displacement that its runs have in common."""
    return attenuation.signal(displacements(records, arm).total)


def signal_table(run: SimpleNamespace, records: Records) -> DataFrame:
    """Return a row per arm: how much of a run's displacement is common to all its runs."""
    return DataFrame(
        {"arm": label(arm), "runs": len(records[arm]), "common share of |D|^2 [95 %]": stated(own.share, ".4f")}
        | {"norm of the common part": f"{np.sqrt(own.square.value):.2f}" if own.square.value > 0 else "none"}
        | {"norm of the mean": f"{own.mean_norm:.2f}", "cosine of two runs": f"{own.run_cosine:.4f}"}
        for arm, own in ((arm, signal(records, arm)) for arm in (*TRAINED, FIRST_STEP) if len(records[arm]) > 1)
    )


def cosine_table(run: SimpleNamespace, records: Records) -> DataFrame:
    """Return a row per pair of arms: the cosine of two runs, of the arms' means, and of their common displacements."""
    return DataFrame(
        {"arms": f"{label(a)} and {label(b)}", "runs": f"{len(records[a])} and {len(records[b])}"}
        | {"two runs": f"{cosine.run_cosine:.4f}", "means": f"{cosine.mean_cosine:.3f}"}
        | {"in common [95 %]": stated(cosine.value, ".2f")}
        for a, b in PAIRS
        if min(len(records[a]), len(records[b])) > 1
        for cosine in [corrected(records, a, b)]
    )


# ---- along runs


class Along(NamedTuple):
    """What ES runs moved in a stretch of their steps."""

    first: int
    last: int
    norm: stats.Interval
    """Mean over runs, weight units."""
    signal: attenuation.Signal
    """What all runs have in common."""
    new: attenuation.Signal | None
    """The same of the runs with seeds from 16, which were no pilot; None for fewer than two."""
    z: float
    """The share in common in standard deviations of its value without a signal."""
    rho: float
    """Correlation of the z-scores with the noise along the signal, from the share; 0 where that is below 0."""
    along: stats.Interval
    """Mean over runs of the correlation of the z-scores with the noise along GRPO's first step."""


def along_runs(records: Records) -> list[Along]:
    """Return what ES runs moved in each stretch of their steps, in the order of the records."""
    rows = []
    for record in records["stretches"]:
        spec, gram = record["spec"], gram_of_stretch(record)
        at, d, T = spec["runs"]["run"], record["d"], spec["last"] - spec["first"]
        new = [row for row, seed in enumerate(spec["runs"]["seeds"]) if seed >= PILOT]
        own, whole = attenuation.signal(gram), attenuation.expected_share(1, T, at["population_size"], d)
        rows.append(
            Along(
                spec["first"],
                spec["last"],
                stats.bootstrap_mean(np.array(record["norms"])),
                own,
                attenuation.signal(gram, new) if len(new) > 1 else None,
                attenuation.pairs_z(own.share.value, d, len(gram)),
                math.sqrt(max(own.share.value, 0) / whole),
                stats.bootstrap_mean(np.array(record["along"]) / (at["alpha"] * T)),
            )
        )
    return rows


def along_table(run: SimpleNamespace, records: Records) -> DataFrame:
    """Return a row per stretch of steps: what runs have in common, and how well their fitness tells its direction."""
    return DataFrame(
        {"steps": f"{each.first} to {each.last}", "norm": f"{each.norm.value:.3f}"}
        | {"common share of |D|^2 [95 %]": stated(each.signal.share, ".4f"), "z": f"{each.z:.1f}"}
        | {"of seeds 16 to 31": stated(each.new and each.new.share, ".4f"), "rho": f"{each.rho:.2f}"}
        | {"correlation along GRPO's first step [95 %]": stated(each.along, ".3f")}
        for each in along_runs(records)
    )


def own_part(records: Records, arm: str, decoding: str) -> stats.Interval | None:
    """Return how much more often an arm's runs are right than the mean of the others with a fresh walk as long."""
    if not (models := records[f"{arm} others"]):
        return None
    evidence = Evidence.of([*records[arm], *records["es decoded"], *models], models[0]["spec"]["scale"])
    side = quantities.Side(arm, runs=evidence.having("kind", "train"), evidence=evidence, decoding=decoding)
    return quantities.QUANTITIES["own_part"].find([side])


# ---- models merged from several runs


def accuracies(models: Sequence[Record], decoding: str = "greedy") -> np.ndarray:
    """Return the test accuracy of each merged model, fractions."""
    return accuracy_matrix(models, decoding).mean(axis=1)


def accuracy_difference(records: Records, a: str, b: str, decoding: str = "greedy") -> stats.Interval:
    """Return the difference in accuracy between the models of two groups, a - b, fractions."""
    return stats.crossed_bootstrap(accuracy_matrix(records[a], decoding), accuracy_matrix(records[b], decoding))


def drift_ratio(records: Records, a: str, b: str) -> stats.Interval:
    """Return the ratio a / b of two groups' geometric mean KL on other skills; NaN if a KL is not above 0."""
    over, under = (skills(records[group], "kl") for group in (a, b))
    if min(*over, *under) <= 0:
        return stats.Interval(np.nan, np.nan, np.nan, min(len(over), len(under)))
    ratio = stats.stratified_bootstrap([np.log(over)], [np.log(under)])
    return stats.Interval(*np.exp([ratio.value, ratio.low, ratio.high]).tolist(), ratio.n, ratio.level)


def by_steps(run: SimpleNamespace, records: Records, arm: str) -> list[tuple[int, Sequence[Record]]]:
    """Return the numbers of steps and the measured models of an arm's shorter runs and of its full ones.

    A shorter run is not the start of a longer one, since its prompts differ; figures draw it as if it were.
    """
    full = records[arm][0]["spec"]["steps"]
    shorter = [(steps, records[f"{name} mean=1"]) for name, steps in shorter_names(run, arm, full).items()]
    return [*shorter, (full, records[f"{arm} mean=1"])]


def equal_gain(run: SimpleNamespace, records: Records) -> list[tuple[int, stats.Interval]]:
    """Return the drift of GRPO over that of ES at equal greedy accuracy.

    An entry per number of steps of ES: the steps, and the ratio (`curves.cost_at_equal_score`, starting from the base,
    whose KL is 0).
    """
    base = _base_right(records)
    es, grpo = (
        {steps: (accuracies(models), skills(models, "kl")) for steps, models in by_steps(run, records, arm)}
        for arm in SHORTER
    )
    return [(steps, curves.cost_at_equal_score([*grpo.values()], own, start=base)) for steps, own in es.items()]


def equal_gain_table(run: SimpleNamespace, records: Records) -> DataFrame:
    """Return a row per number of steps of ES: its accuracy and drift, and GRPO's drift over it at equal accuracy."""
    return DataFrame(
        {"steps of ES": steps, "runs": len(models), "greedy, %": f"{100 * accuracies(models).mean():.1f}"}
        | {"KL off the task": f"{skills(models, 'kl').mean():.3f}", "GRPO's there, times [95 %]": stated(ratio, ".2f")}
        for (steps, ratio), (_, models) in zip(equal_gain(run, records), by_steps(run, records, "es"), strict=True)
    )


def merged_models(run: SimpleNamespace, records: Records) -> dict[str, Sequence[Record]]:
    """Return the name of each kind of merged model -> its records."""
    es = label("es")
    named = {label("base"): records["es times 0"]} if 0 in run.multiples else {}
    for arm, size in ((arm, size) for arm, sizes in run.means.items() for size in sizes):
        named[f"{label(arm)}, {'one run' if size == 1 else f'mean of {size}'}"] = records[f"{arm} mean={size}"]
    for arm, size in run.shrunk.items():
        named[f"{label(arm)}, one run as short as the mean of {size}"] = records[f"{arm} shrunk={size}"]
    named[f"{es}, one run as short as the mean of {run.shrunk_far}"] = records["es shrunk far"]
    named[f"random directions with the norms of {es}"] = records["random"]
    for factor in filter(None, run.multiples):
        named[f"{es}, {factor:g} times the mean of all"] = records[f"es times {factor:g}"]
    for arm in SHORTER:
        named |= {f"{label(arm)}, {steps} steps": models for steps, models in by_steps(run, records, arm)[:-1]}
    return {name: models for name, models in named.items() if models}


def merged_table(run: SimpleNamespace, records: Records) -> DataFrame:
    """Return a row per kind of merged model: norm, accuracy under each decoding, KL on the task and off it, skills."""
    return DataFrame(
        {"model": name, "models": len(models), "norm": f"{np.mean([r['norm'] for r in models]):.2f}"}
        | {f"{style.STROKES[d].label}, %": f"{100 * accuracies(models, d).mean():.1f}" for d in DECODINGS}
        | {"KL on the task": f"{np.mean([r['kl_policy_base']['exact_nats_per_token'] for r in models]):.4f}"}
        | {"KL off the task": f"{skills(models, 'kl').mean():.4f}"}
        | {"other skills, %": f"{100 * skills(models, 'greedy').mean():.1f}"}
        for name, models in merged_models(run, records).items()
    )


def remedies(run: SimpleNamespace) -> dict[str, str]:
    """Return the name of each kind of run that may drift less -> the group of its models."""
    named = {f"{label('es_anchored')}, {decay:g} a step": f"es_anchored={decay:g}" for decay in run.anchor_decays}
    named |= {f"{label('es')}, N = {N}": f"es N={N}" for N in run.populations}
    return {words: f"{name} mean=1" for words, name in named.items()}


def remedy_table(run: SimpleNamespace, records: Records) -> DataFrame:
    """Return a row per remedy for drift: norm, and drift and accuracies relative to a run of ES."""
    size, one = run.shrunk["es"], "es mean=1"
    kinds = remedies(run) | {f"{label('es')}, mean of {size}": f"es mean={size}"}
    return DataFrame(
        {"model": name, "models": len(records[group]), "norm": f"{np.mean([r['norm'] for r in records[group]]):.2f}"}
        | {"drift, times [95 %]": stated(drift_ratio(records, group, one), ".2f")}
        | under(
            "{}, points [95 %]", lambda d, group=group: accuracy_difference(records, group, one, d).format(), DECODINGS
        )
        for name, group in kinds.items()
    )


# ---- results


def results(run: SimpleNamespace, records: Records) -> Results:
    """Return by name the numbers that the answers and the paper's macros quote; shares are fractions."""
    size, many = run.shrunk["es"], max(run.means["es"])
    entries: Results = {"size": size, "many": many}
    entries |= {f"{arm} runs": len(records[arm]) for arm in ("es", "es_sampled", "grpo", "grpo_sgd")}
    for arm in ("es", "grpo"):
        entries |= {f"{arm} norm": norms(records, arm).mean(), f"{arm} common": signal(records, arm).share}
    for arm in ("grpo", "grpo_sgd"):
        entries[f"{arm} head"] = quantities.head_shares(displacements(records, arm)).mean()
    ratios = over_walk(records, "es")
    entries["es walk"] = stats.bootstrap_mean(ratios) if len(ratios) else None
    entries |= {f"{arm} stays": stays(records, arm) for arm in ("grpo_rounded", "grpo_sgd_rounded")}
    pairs = [*product(REWARDED, (*STEPPED, FIRST_STEP)), *LIMITS]
    cosines = {pair: corrected(records, *pair) for pair in pairs}
    entries |= {f"{a} {b} cosine": cosine.value for (a, b), cosine in cosines.items()}
    entries["raw cosine"] = cosines["es", "grpo"].run_cosine
    entries |= _along_results(run, records) | {"null own greedy": own_part(records, "es_random", "greedy")}
    entries |= {f"own {decoding}": own_part(records, "es", decoding) for decoding in DECODINGS}
    if 0 in run.multiples:
        walks, base = (accuracy_matrix(records[group], "greedy") for group in ("random", "es times 0"))
        entries["fresh greedy"] = stats.crossed_bootstrap(walks, base[0])
    mean = f"es mean={size}"
    entries["kept greedy"] = accuracy_difference(records, mean, "es mean=1")
    entries["over shrunk"] = accuracy_difference(records, mean, f"es shrunk={size}")
    kinds = {"single": "es mean=1", "null": "es_random mean=1", "grpo": "grpo mean=1", "mean": mean}
    for name, group in (kinds | {"most": f"es mean={many}"}).items():
        entries[f"{name} right"] = accuracies(records[group]).mean()
        entries[f"{name} drift"] = stats.bootstrap_mean(skills(records[group], "kl"))
    for i, (steps, ratio) in enumerate(equal_gain(run, records)):
        entries |= {f"steps {i}": steps, "steps last": steps, f"equal {i}": ratio, "equal last": ratio}
    for i, group in enumerate(remedies(run).values()):
        gain = accuracy_difference(records, group, "es mean=1")
        entries |= {f"remedy {i}": drift_ratio(records, group, "es mean=1"), f"remedy {i} gain": gain}
    return entries


def _along_results(run: SimpleNamespace, records: Records) -> Results:
    """Return what the stretches of ES runs say, and the share and the cosine without the pilot's seeds."""
    along, record = along_runs(records), records["stretches"][0]
    from_base = {each.last: each for each in along if not each.first}
    early, turn, end = run.early, run.turn, max(from_base)
    N = record["spec"]["runs"]["run"]["population_size"]
    entries: Results = {"turn": turn, "early": early, "ceiling": attenuation.expected_share(1, end, N, record["d"])}
    for name, last in {"early": early, "turn": turn, "end": end}.items():
        found = from_base[last]
        entries |= {f"{name} share": found.signal.share, f"{name} rho": found.rho}
    entries["late z"] = max(each.z for each in along if each.first >= turn)
    entries["predicted end"] = entries["turn share"].value * turn / end
    new = records | {"es": [one for one in records["es"] if one["spec"]["seed"] >= PILOT]}
    enough = len(new["es"]) > 1
    entries["new common"] = signal(new, "es").share if enough else None
    return entries | {"new cosine": corrected(new, "es", "grpo").value if enough else None}


# ---- figures: each returns the figure and the data that it plots


def figure_signal(run: SimpleNamespace, records: Records) -> tuple[plt.Figure, DataFrame]:
    """Draw the test accuracy of the mean of K runs, and its drift off the task, against K."""
    short, size = "es, one run as short", run.shrunk["es"]
    groups = {(arm, n): records[f"{arm} mean={n}"] for arm in ("es", "grpo", "es_random") for n in run.means[arm]}
    groups |= {(short, size): records[f"es shrunk={size}"], (short, run.shrunk_far): records["es shrunk far"]}
    panels = {"greedy": accuracies, "t1": partial(accuracies, decoding="t1"), "drift": partial(skills, what="kl")}
    points = DataFrame(
        {"panel": panel, "arm": arm, "runs": size, "value": value}
        for panel, read in panels.items()
        for (arm, size), models in groups.items()
        if models
        for value in (1 if panel == "drift" else 100) * read(models)
    )
    looks = {arm: plots.look(arm, ms=4) for arm in ("es", "grpo", "es_random")}
    looks[short] = plots.look("es", ms=5, mfc="white", ls=":", label=f"{label('es')}, one run as short")
    means = points.groupby(["panel", "arm", "runs"], sort=False)["value"].mean().reset_index()
    fig, axes, shown = plots.panels(points, "panel", 2.7)
    for ax, what, panel in shown:
        plots.lines(ax, means[means["panel"] == what], "runs", "value", "arm", looks)
        dots = {arm: {"color": look["color"]} for arm, look in looks.items()}
        plots.lines(ax, panel, "runs", "value", "arm", dots, ls="", marker=".", ms=2.5, alpha=0.5)
        if what != "drift":
            ax.axhline(100 * _base_right(records, what), label=label("base"), **plots.BASE)
            ax.set(title=f"test accuracy, {style.STROKES[what].label}", ylabel="%", ylim=(0, None))
        ax.set(xlabel="runs in the mean")
        plots.plain_ticks(ax, run.means["es"])
    axes[2].set(title="KL off the task", ylabel="nats per token", yscale="log")
    plots.key(fig, axes[0], 5)
    return fig, points


def _base_right(records: Records, decoding: str = "greedy") -> float:
    return float(np.mean(records["base"][0]["test"][decoding]))


def figure_cosines(run: SimpleNamespace, records: Records) -> tuple[plt.Figure, DataFrame]:
    """Draw the cosines of what runs share, by what is rewarded and how GRPO steps, and those that bound the reading."""
    panels = {(a, b): (REWARDED[a], STEPPED[b]) for a, b in product(REWARDED, STEPPED)}
    panels |= {(a, b): ("limits", f"{label(a)} · {label(b)}") for a, b in reversed(LIMITS)}
    points = DataFrame(
        {"panel": panel, "pair": words} | plots.ends(corrected(records, *pair).value)
        for pair, (panel, words) in panels.items()
    ).dropna()  # NaN: arms whose runs have nothing in common
    fig, (left, right) = plt.subplots(1, 2, figsize=(style.PAGE, 2.8), width_ratios=(1, 1.1))
    for arm in REWARDED:
        own = points[points["panel"] == REWARDED[arm]]
        at = own["pair"].map({name: x for x, name in enumerate(STEPPED.values())})
        plots.whiskers(left, own, at, **plots.look(arm, ms=5, lw=1, capsize=3, label=f"ES, {REWARDED[arm]}"))
        for x, value in zip(at, own["value"], strict=True):
            left.annotate(f"{value:.2f}", (x, value), xytext=(7, -10), textcoords="offset points", fontsize=8)
    left.set(
        xlim=(-0.4, 1.5),
        ylim=(-0.1, 1.4),
        ylabel="cosine of what runs share",
        xlabel="GRPO is stepped by",
        title="ES and GRPO",
        yticks=np.arange(0, 1.1, 0.2),
    )
    left.set_xticks(range(len(STEPPED)), list(STEPPED.values()))
    left.legend(loc="upper left")
    limits = points[points["panel"] == "limits"]
    plots.whiskers(right, limits, up=limits["pair"], fmt="o", color="black", ms=4, lw=1, capsize=2)
    right.tick_params(axis="y", labelsize=7)
    right.set(xlabel="cosine of what runs share", title="what bounds the reading")
    for line in (left.axhline, right.axvline):
        for nothing in (0, 1):
            line(nothing, **plots.NULL)
    return fig, points


def figure_theory(run: SimpleNamespace, records: Records) -> tuple[plt.Figure, DataFrame]:
    """Draw norm, share and projection along the runs of ES, as predicted and as found.

    The norm is predicted without any free number, the share from the projection and the projection from the share, both
    with the cosine of the two directions at the ends of the runs.
    """
    from_base = [found for found in along_runs(records) if not found.first]
    d, at = records["stretches"][0]["d"], records["stretches"][0]["spec"]["runs"]["run"]
    alpha, N, c = at["alpha"], at["population_size"], corrected(records, "es", FIRST_STEP).value.value
    (early,) = (found.rho for found in from_base if found.last == run.early)
    T, every = np.array([found.last for found in from_base]), np.arange(1, run.turn + 1)
    along, rho = np.array([(found.along.value, found.rho) for found in from_base]).T
    share, projection = attenuation.expected_share, attenuation.projection_z
    lines = {
        ("norm", "predicted"): (T, geometry.es_norm(alpha, d, 1, N) * np.sqrt(T)),
        ("share in common, %", "predicted"): (T, 100 * share(along / c, T, N, d)),
        ("share in common, %", "if rho stayed"): (every, 100 * share(early, every, N, d)),
        ("along the gradient", "predicted"): (T, projection(rho, T, N, c)),
        ("along the gradient", "if rho stayed"): (every, projection(early, every, N, c)),
    }
    drawn = [
        DataFrame({"panel": panel, "what": what, "steps": x, "value": y}) for (panel, what), (x, y) in lines.items()
    ]
    found = DataFrame(
        {"panel": panel, "what": what, "steps": each.last} | plots.ends(interval, scale)
        for each in from_base
        for panel, what, interval, scale in (
            ("norm", "found", each.norm, 1),
            ("share in common, %", "found", each.signal.share, 100),
            ("share in common, %", "found, seeds 16 to 31", each.new and each.new.share, 100),
            ("along the gradient", "found", each.along, projection(1, each.last, N)),
        )
        if interval
    )
    points = concat([*drawn, found])
    looks = {"predicted": {"color": "black", "lw": 1.2, "label": "predicted"}}
    looks["if rho stayed"] = {"color": "black", "lw": 0.9, "ls": ":", "label": f"if rho of {run.early} steps stayed"}
    fig, axes, shown = plots.panels(points, "panel", 2.7)
    for ax, panel, part in shown:
        for what, each in part.groupby("what", sort=False):
            if what in looks:
                ax.plot(each["steps"], each["value"], **looks[what])
            else:
                hollow = {} if what == "found" else {"mfc": "white", "alpha": 0.6}
                plots.whiskers(ax, each, each["steps"], **plots.look("es", ls="", ms=4, label=what, capsize=2) | hollow)
        ax.set(xlabel="steps", title=panel)
    axes[1].set(ylabel="% of the squared length")
    axes[0].set(ylabel="weight units")
    axes[2].set(ylabel="standard deviations of a walk's")
    plots.key(fig, axes[1], 5)
    return fig, points


def figure_drift(run: SimpleNamespace, records: Records) -> tuple[plt.Figure, DataFrame]:
    """Draw the drift off the task against accuracy on it, of runs by their steps and of walks that learned nothing."""
    means = [records[f"es mean={size}"] for size in run.means["es"]]
    drawn = {arm: [models for _, models in by_steps(run, records, arm)] for arm in SHORTER} | {"means": means}
    drawn |= {"es_random": [[model] for model in records["es_random mean=1"]]}
    drawn |= {"random": [[model] for model in records["random"]]}
    looks = {arm: plots.look(arm, ms=4, lw=1.2, label=f"{label(arm)}, by steps") for arm in SHORTER}
    looks["means"] = plots.look("es", ms=4, mfc="white", ls=":", label="mean of more and more runs of ES")
    looks["es_random"] = plots.look("es_random", ms=4, ls="")
    looks["random"] = {"color": style.ARMS["es_random"].color, "marker": "x", "ms": 4, "ls": ""}
    looks["random"]["label"] = "random direction as long as ES"
    points = DataFrame(
        {"model": name, "x": 100 * accuracies(each).mean(), "y": skills(each, "kl").mean()}
        for name, several in drawn.items()
        for each in several
    )
    fig, ax = plt.subplots(figsize=(0.75 * style.PAGE, 2.6))
    plots.lines(ax, points, "x", "y", "model", looks)
    ax.axvline(100 * _base_right(records), **plots.BASE)
    ax.set(yscale="log", xlabel="greedy test accuracy, %", ylabel="KL off the task, nats per token")
    plots.key(fig, ax, 2)
    return fig, points
