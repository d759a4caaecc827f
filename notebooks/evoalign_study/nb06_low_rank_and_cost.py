"""Notebook 06, low rank and cost: presets, groups of runs, results, answers, tables and figures."""

import json
from collections.abc import Mapping, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from matplotlib import pyplot as plt
from pandas import DataFrame

from evoalign_lib import arms, footprint, tiny
from evoalign_lib.analysis import curves, stats
from evoalign_study import loading, plots, style
from evoalign_study.kinds.decode import base_specs
from evoalign_study.kinds.memory import SIZES, memory_specs, storage_specs
from evoalign_study.kinds.scaling import measured_spec
from evoalign_study.kinds.train import sweep_specs
from evoalign_study.loading import DECODINGS, Group, Groups, Records, of_runs, own_settings
from evoalign_study.measures.base import label
from evoalign_study.records import Record, accuracy_matrix
from evoalign_study.results import Results, under
from evoalign_study.runs import FACTORS, MEASURED, TUNED_SIZES, curve_bands, scales

NOTEBOOK = "06_low_rank_and_cost"
CLAIMS = ("C12b", "C13b", "C14b", "C15b", "C15c", "C16b", "C32b")
"""The claims that the notebook's runs decide."""
OVER_ADAPTERS = ("es_lora", "grpo_lora")
"""Arms that train an adapter, each with and without ESSA's warm start."""
presets, TINY, SMOKE, FULL = scales(
    {
        "bases": ["A0"],
        "retrain": [],  # groups that `force` trains again; empty: all
        "ranks": ([1, 4, 16], [1]),  # of the noise; the first has as many seeds as full rank
        "adapter_ranks": ([4, 8, 16, 32], [4]),  # of LoRA adapters whose singular values ESSA searches
        "populations": ([8, 16, 32, 64, 128, 256], [4, 8]),  # of ESSA, all with the same number of evaluations
        "precisions": (["float32", "int8", "int4"], ["int8"]),  # of the base under ESSA's adapter
        "starts": (["cold", "warm"], ["warm"]),  # adapters of ES and GRPO: new, or fine-tuned like ESSA's
        "warm_shares": ([64, 320, 640, 1280], [16]),  # rows of ESSA's warm start: 5 to 100 % of the last
        "seeds_match": (16, 2),  # of full rank, low-rank noise, GRPO and each precision
        "seeds_compare": (8, 2),  # of all others
        "seeds_describe": (4, 2),  # of the other ranks of the noise
        "seeds_null": (4, 1),  # of random fitness, for each search that has it
        "sweep_size": (12, 1),  # settings per arm and rank
        "sweep_factors": ({}, {}, FACTORS),
        **TUNED_SIZES,
        "es_prompts_per_step": (128, 8),
        "essa_population_size": (32, 4),
        "essa_prompts_per_step": (50, 8),
        "essa_steps": (90, 4),
        "essa_lora_rank": (8, 4),
        "essa_warm_rows": (64, 16),  # right answers that an adapter is fine-tuned on before the search
        "essa_warm_epochs": (3, 1),
        "essa_warm_learning_rate": 1e-3,
        "essa_curve_points": (7, 3),
        "essa_sweep_points": (4, 3),
        "adapter_curve_points": (13, 3),  # of GRPO over an adapter
        "adapter_sweep_points": (6, 3),  # of ES and GRPO over an adapter, evenly spaced in steps
        "essa_population_points": (13, 3),
        "null_points": 3,  # of the curves of random fitness
        "temperatures": [0.6],  # further temperatures between greedy decoding and 1 for measurements
        **MEASURED,
        "memory_methods": (list(footprint.METHODS), ["es", "grpo"]),
        "memory_sizes": (list(SIZES), ["0.14M"]),
        "memory_rows": ([8, 16, 32], [4]),  # prompts of a member, completions of a micro-batch
        "stored_arms": (["es", "es_low_rank", "es_lora", "essa", "grpo", "grpo_lora"], ["es", "grpo"]),
        "scaling_workers": [1, 2],
        "scaling_members": (60, 4),
        "scaling_prompts": (128, 8),
        "scaling_rounds": (13, 2),  # including the first, which starts the processes
    }
)


def groups(run: SimpleNamespace, records: Records) -> Groups:
    """Return the groups of runs by name. Each arm and each rank follows the sweep that chooses its settings.

    "processes" is timed: load it on its own.
    """
    found: dict[str, Any] = {"base": base_specs(run.bases, of_runs(vars(run)), run.scale)}

    def sweep(name: str, arm: str, **changes: Any) -> None:
        own = own_settings(run, _like(arm)) | changes
        choices = loading.swept_choices(run, arms.get(arm).sweep)
        found[f"sweep {name}"] = sweep_specs(arm, run.bases[0], own, run.scale, choices)

    def train(name: str, arm: str, seeds: int, after: str = "", **changes: Any) -> None:
        after = f"sweep {after or name}"
        choices = loading.ranked_choices(run, arms.get(arm).sweep, records.get(after))
        settings = own_settings(run, _like(arm)) | choices[0]
        found[name] = Group(arm, run.bases, seeds, settings, [changes], after=loading.chosen_by(after, choices))

    def search(name: str, arm: str, seeds: int, nulls: int, after: str = "", **changes: Any) -> None:
        """Add runs of an arm, measured at all temperatures, and runs with random fitness instead of its reward."""
        changes = {"sampled_at": run.temperatures} | changes
        train(name, arm, seeds, after or name, **changes)
        train(f"random {name}", f"{arm}_random", nulls, after or name, **changes)

    sweep("es", "es")
    train("es", "es", run.seeds_match)
    train("es_random", "es_random", run.seeds_compare, "es")
    sweep("grpo", "grpo")
    train("grpo", "grpo", run.seeds_match)
    first, tuned = run.ranks[0], f"adapter {run.essa_lora_rank}"
    fewer, seeds = (run.seeds_describe, run.seeds_null), (run.seeds_compare, run.seeds_null)
    for rank in run.ranks:
        sweep(f"rank {rank}", "es_low_rank", rank=rank)
        judged = (run.seeds_match, run.seeds_compare)
        search(f"rank {rank}", "es_low_rank", *(judged if rank == first else fewer), rank=rank)
    search(f"as full rank, rank {first}", "es_low_rank", *fewer, "es", rank=first)
    for rank in run.adapter_ranks:
        sweep(f"adapter {rank}", "essa", lora_rank=rank, curve_points=run.essa_sweep_points)
        search(f"adapter {rank}", "essa", *seeds, lora_rank=rank)
    for N in run.populations:  # only their curves are compared
        steps = run.essa_population_size * run.essa_steps // N
        change = {"population_size": N, "steps": steps, "test_problems": 0}
        train(f"population {N}", "essa", seeds[0], tuned, **change, curve_points=run.essa_population_points)
        train(f"random population {N}", "essa_random", seeds[1], tuned, **change, curve_points=run.null_points)
    for rows in run.warm_shares:
        search(f"warm start {rows}", "essa", *seeds, tuned, warm_rows=rows)
    for precision in precisions(run):  # of the frozen base, with which members are evaluated
        search(f"precision={precision}", "essa", run.seeds_match, run.seeds_null, tuned, base_precision=precision)
    essa = own_settings(run, "essa")
    warm = {name: essa[name] for name in ("warm_rows", "warm_epochs", "warm_learning_rate")}
    as_essa = {name: essa[name] for name in ("population_size", "prompts_per_step", "steps", "curve_points")}
    even = {"curve_points": run.adapter_sweep_points, "curve_spacing": None}
    for start in run.starts:
        began = {"lora_rank": run.essa_lora_rank} | (warm if start == "warm" else {})
        name, change = f"es_lora, start={start}", began | as_essa
        sweep(name, "es_lora", **change | even)
        search(name, "es_lora", *seeds, **change)
        name, change = f"grpo_lora, start={start}", began | {"curve_points": run.adapter_curve_points}
        sweep(name, "grpo_lora", **change | even)
        train(name, "grpo_lora", seeds[0], **change, sampled_at=run.temperatures)
    scale, exact = loading.of_tiny_world(run, TINY)
    own, base = SimpleNamespace(**exact), exact["bases"][0]
    found["memory"] = memory_specs(exact["memory_methods"], exact["memory_sizes"], exact, scale)
    ranks = {"rank": exact["ranks"][0], "lora_rank": exact["essa_lora_rank"]}
    choices = {arm: arms.SWEEP[arms.get(arm).sweep][0] for arm in exact["stored_arms"]}
    stored = {arm: own_settings(own, _like(arm)) | ranks | choice for arm, choice in choices.items()}
    found["storage"] = storage_specs(stored, base, scale)
    exact = exact | {"sigma": 0.01}  # times do not depend on sigma
    found["processes"] = [measured_spec(base, exact, scale)]
    return found


def precisions(run: SimpleNamespace) -> list[str]:
    """Return the precisions of the frozen base to compare: those of the settings; none without the local engine."""
    return run.precisions if run.engine == "local" else []


def _like(arm: str) -> str:
    """Return the arm whose sizes (such as steps) an arm uses: that of its family."""
    return {"es": "es", "cma": "essa", "gradient": "grpo"}[arms.get(arm).family]


# ---- groups of records


def shown(run: SimpleNamespace) -> list[str]:
    """Return the groups whose runs are compared: full rank, each rank of the noise, ESSA and GRPO."""
    return ["es", *(f"rank {rank}" for rank in run.ranks), f"adapter {run.essa_lora_rank}", "grpo"]


def adapted(run: SimpleNamespace) -> list[str]:
    """Return the groups that train an adapter of one rank: ESSA, and ES and GRPO from each start."""
    others = [f"{arm}, start={start}" for arm in OVER_ADAPTERS for start in run.starts]
    return [f"adapter {run.essa_lora_rank}", *others]


def compared(run: SimpleNamespace) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return the pairs of groups whose difference is shown: first for noise, then for training over an adapter."""
    first, own = f"rank {run.ranks[0]}", f"as full rank, rank {run.ranks[0]}"
    noise = [(f"rank {rank}", "es") for rank in run.ranks] + [(own, "es"), (own, first)]
    over = [(group, adapted(run)[0]) for group in adapted(run) if group.endswith("warm")]
    return noise, over + [(group, "grpo") for group in adapted(run) if group.startswith("grpo_lora")]


def decodings(run: SimpleNamespace) -> list[str]:
    """Return the decodings under which the searches are measured, by their key in the records."""
    return ["greedy", *(label(t) for t in run.temperatures), "t1"]


def dimension(record: Mapping[str, Any]) -> int:
    """Return how many singular values an ESSA run searches: those of two matrices per projection, four per layer.

    Raises:
        KeyError: the run has no adapter.
    """
    spec = record["spec"]
    if spec["base"] in tiny.SHIPPED:  # read directly: transformers takes seconds to import
        text = (tiny.bases_folder() / spec["base"] / "config.json").read_text(encoding="utf-8")
        layers = json.loads(text)["num_hidden_layers"]
    else:
        from transformers import AutoConfig

        layers = AutoConfig.from_pretrained(spec["base"]).num_hidden_layers
    return layers * 4 * 2 * int(round(spec["lora_rank"] * spec["leading_share"], 9))


def moved(records: Records, group: str) -> int:
    """Return the number of trained parameters; for an adapter trained by TRL, `d` is the size of the merged model."""
    first = records[group][0]
    rank = first["spec"].get("lora_rank")
    if rank is None or arms.get(first["spec"]["arm"]).family != "gradient":
        return first["d"]
    searched = [run for run, *_ in records.values() if run["spec"].get("arm") in ("essa", "es_lora")]
    return next(run["d"] for run in searched if run["spec"].get("lora_rank") == rank)


def name(records: Records, group: str) -> str:
    """Return the name of a group of runs in tables and legends."""
    spec = records[group][0]["spec"]
    words = style.ARMS[spec["arm"]].label.split(", ")
    own = [word for word in words[1:] if word not in ("low rank", "LoRA")]
    if "rank" in spec:
        own.insert(0, f"rank {spec['rank']}")
    elif "lora_rank" in spec:
        start = [] if words[0] == "ESSA" else ["warm" if "warm_rows" in spec else "cold"]
        own[:0] = [f"adapter of rank {spec['lora_rank']}", *start]
    elif words == ["ES"]:
        own = ["full rank"]
    if "as full rank" in group:
        own.append("full rank's settings")
    return ", ".join([words[0], *own])


# ---- tidy frames

AXES = {
    "completions": (1e3, "completions, thousands", "after {} thousand completions"),
    "forward_flops": (1e12, "forward FLOPs, 1e12", "after {}e12 forward FLOPs"),
    "core_seconds": (1.0, "core-seconds", "after {} core-seconds"),
}
"""Budget axes: unit in tables, column heading, and heading of scores at equal budgets."""


def curve_points(records: Records, groups: Sequence[str], axis: str) -> DataFrame:
    """Return validation accuracy during training: a row per group, decoding and point, without the first point.

    Columns: the axis (mean over seeds); mean, low and high of accuracy in %; group, decoding, n.
    """
    points = curve_bands([({"group": group}, records[group]) for group in groups], [axis], first=1)
    return points[[axis, "mean", "low", "high", "group", "decoding", "n"]]


def target(records: Records, run: SimpleNamespace, share: float = 0.95) -> float:
    """Return a share of the best mean greedy validation accuracy at the end of training over all populations."""
    return share * max(_greedy(records[f"population {N}"], -1).mean() for N in run.populations)


def _greedy(runs: Sequence[Record], point: int) -> np.ndarray:
    """Return greedy validation accuracy at a point of the curve, (runs,)."""
    return np.array([r["curve"]["validation_greedy"][point] for r in runs])


def population_points(records: Records, run: SimpleNamespace) -> DataFrame:
    """Return a row per ESSA run: population, seed, whether it reached the `target`, accuracy at the end (%)."""
    aim = target(records, run)
    return DataFrame(
        {"population": r["spec"]["population_size"], "seed": r["spec"]["seed"]}
        | {"reached": max(accuracy) >= aim, "at the end": 100 * accuracy[-1]}
        for r in (r for N in run.populations for r in records[f"population {N}"])
        for accuracy in [r["curve"]["validation_greedy"]]
    )


LESS = ("es", "es_kahan", "es_inplace", "es_low_rank", "es_lora", "essa")
MORE = ("grpo", "grpo_reference", "grpo_mixed", "grpo_lora", "grpo_adam8bit", "grpo_adam8bit_bfloat16")
"""Methods whose memory is compared, as the ratio of MORE over LESS."""


def memory_bytes(records: Sequence[Record]) -> DataFrame:
    """Return the formula's bytes for published models on a GPU: method (of LESS and MORE), size, d, components."""
    found = {record["spec"]["method"]: record["published"] for record in records}
    return DataFrame(
        {"method": method, "size": size, "d": at["d"], **{c: at["bytes"].get(c, 0) for c in footprint.COMPONENTS}}
        for method in (*LESS, *MORE)
        for size, at in found.get(method, {}).items()
    )


class Published(NamedTuple):
    """Times to reach an accuracy on two numbers of GPUs, read off a figure in the ESSA paper (arXiv 2507.04453)."""

    what: str
    """Method, version of the paper, target."""
    gpus: tuple[int, int]
    minutes: tuple[float, float]
    """"Under 20" and "under 80" are taken as 20 and 80."""


PUBLISHED = {
    "essa_v1": Published("ESSA v1, to .76", (8, 128), (290.0, 80.0)),
    "essa_v3": Published("ESSA v3, to .835", (16, 128), (200.0, 20.0)),
    "grpo_v3": Published("GRPO in ESSA v3, to .835", (16, 128), (400.0, 150.0)),
}


# ---- results

_RESAMPLES = 2000


def results(run: SimpleNamespace, records: Records, verdicts: Mapping[str, Any]) -> Results:
    """Return the notebook's results by name; accuracies are fractions.

    "GROUP, DECODING" is test accuracy, and "gain of GROUP, DECODING" its difference from the base; "start of", "end of"
    and "search adds to" are greedy validation accuracy. Further results are the differences between the groups that are
    `compared`, scores at equal budgets, memory ratios by the formula, published speed-ups, and the intervals of
    verdicts as "CLAIM: label".

    Args:
        run: parameters and settings.
        records: of every group.
        verdicts: claim -> its verdict.
    """
    values: Results = {f"{c}: {words}": x for c, each in verdicts.items() for words, x in each.intervals.items()}
    searched = {g: r for g, r in records.items() if r and "curve" in r[0] and not g.startswith("sweep")}
    tested = {group: runs for group, runs in (records | searched).items() if group == "base" or group in searched}
    for group in [group for group in searched if group.startswith("precision")]:
        tested[f"{group} over float32"] = [record | {"test": record["over_loaded"]} for record in searched[group]]
    for group, runs in tested.items():
        for d in decodings(run):
            if all(f"{d}_bits" in r.get("test", {}) or f"{d}_counts" in r.get("test", {}) for r in runs):
                values[f"{group}, {d}"] = stats.crossed_bootstrap(accuracy_matrix(runs, d), n_resamples=_RESAMPLES)
                if d in DECODINGS and group in searched:
                    values[f"gain of {group}, {d}"] = _difference(records, group, "base", d)
    for group, runs in searched.items():
        start, end = _greedy(runs, 0), _greedy(runs, -1)
        values |= {f"start of {group}": start.mean(), f"end of {group}": _mean(end)}
        values[f"search adds to {group}"] = _mean(end - start)
    noise, over = compared(run)
    for (one, other), d in product(noise + over, DECODINGS):
        values[f"{one} - {other}, {d}"] = _difference(records, one, other, d)
    values |= _at_equal_budgets(records, [*shown(run), *adapted(run)[1:]])
    values["target"] = target(records, run)
    values |= {"searches": len(points := population_points(records, run)), "missed": int((~points["reached"]).sum())}
    memory = memory_bytes(records["memory"])
    whole = memory.set_index(["method", "size"])[list(footprint.COMPONENTS)].sum(axis=1)
    for more, less, size in product(MORE, LESS, memory["size"].unique()):
        if more in whole and less in whole:
            values[f"{more} over {less}, {size}"] = whole[more, size] / whole[less, size]
    for key, (_, gpus, minutes) in PUBLISHED.items():
        faster, more = minutes[0] / minutes[1], gpus[1] / gpus[0]
        values |= {f"{key}, times faster": faster, f"{key}, times the GPUs": more, f"{key}, share": faster / more}
    return values


def _mean(scores: np.ndarray) -> stats.Interval:
    return stats.bootstrap_mean(scores, n_resamples=_RESAMPLES)


def _difference(records: Records, one: str, other: str, decoding: str) -> stats.Interval:
    """Return a group's test accuracy minus that of another group, over seeds and problems."""
    after, before = (accuracy_matrix(records[group], decoding) for group in (one, other))
    return stats.crossed_bootstrap(after, before[0] if other == "base" else before, n_resamples=_RESAMPLES)


def _at_equal_budgets(records: Records, groups: Sequence[str]) -> Results:
    """Return each group's greedy validation accuracy at the budget of the cheapest run of all, on each axis.

    Curves are interpolated over the logarithm of the budget, which includes a warm start. A group is left out if its
    warm start, or its training up to the first measurement, already costs more.
    """
    values = {}
    for axis in AXES:
        budget = min(r["curve"][axis][-1] for group in groups for r in records[group])
        values[f"equal {axis}"] = budget
        for group in groups:
            lines = [(r["curve"][axis], r["curve"]["validation_greedy"]) for r in records[group]]
            if all(next(spent for spent in line if spent) <= budget for line, _ in lines):
                reached = [curves.score_at(line, accuracy, budget) for line, accuracy in lines]
                values[f"{group} at equal {axis}"] = _mean(np.array(reached))
    return values


# ---- tables that several sections show

ONLY_LOCAL = "only the local engine has bases of another precision"


def percent(values: Results, group: str, decoding: str = "greedy") -> str:
    """Return a group's test accuracy in percent, as text."""
    return f"{100 * values[f'{group}, {decoding}'].value:.1f}"


def ends_table(records: Records, values: Results, groups: Sequence[str]) -> DataFrame:
    """Return each group's test accuracy and its gain over the base under two decodings, as text."""
    rows = [{"arm": "base"} | {f"{look.label}, %": percent(values, "base", d) for d, look in style.DECODINGS.items()}]
    for group in groups:
        row = {"arm": name(records, group)}
        for d, look in style.DECODINGS.items():
            row[f"{look.label}, %"] = percent(values, group, d)
            row[f"gain, {look.label} [95 %]"] = values[f"gain of {group}, {d}"].format()
        rows.append(row | {"seeds": str(len(records[group]))})
    return DataFrame(rows).fillna("")


def differences_table(records: Records, values: Results, pairs: Sequence[tuple[str, str]]) -> DataFrame:
    """Return the difference in test accuracy between pairs of groups under two decodings, as text."""
    return DataFrame(
        {"arms": f"{name(records, one)} - {name(records, other)}"}
        | under("{}, points [95 %]", lambda d, pair=f"{one} - {other}": values[f"{pair}, {d}"].format())
        | {"seeds": f"{len(records[one])}, {len(records[other])}"}
        for one, other in pairs
    )


def settings_table(records: Records, groups: Sequence[str]) -> DataFrame:
    """Return the tuned settings of each group."""
    names = ("sigma", "alpha", "leading_share", "learning_rate", "beta")
    specs = {name(records, group): records[group][0]["spec"] for group in groups}
    tuned = {arm: ", ".join(f"{key} {spec[key]:g}" for key in names if key in spec) for arm, spec in specs.items()}
    return DataFrame(tuned.items(), columns=["arm", "setting"])


# ---- figures, each drawn from a tidy frame


def draw_curves(points: DataFrame, records: Records) -> plt.Figure:
    """Draw validation accuracy against a budget on a logarithmic axis, one panel per decoding.

    Cold starts and the second rank of the noise are dashed; the third rank is dotted.

    Args:
        points: `curve_points`.
        records: of the groups in it, and of the base.
    """
    axis, looks = points.columns[0], {}
    budget = axis.replace("_", " ").replace("flops", "FLOPs")
    specs = {group: records[group][0]["spec"] for group in points["group"].unique()}
    ranks = sorted({spec["rank"] for spec in specs.values() if "rank" in spec})
    for group, spec in specs.items():
        cold = spec["arm"] in OVER_ADAPTERS and "warm_rows" not in spec
        nth = ranks.index(spec["rank"]) if "rank" in spec else int(cold)
        look = {"label": f"{name(records, group)} (n = {len(records[group])})", "ls": ("-", "--", ":", "-.")[nth % 4]}
        looks[group] = plots.look(spec["arm"], ms=4, **look | ({"mfc": "white"} if nth else {}))
    fig, axes, shown = plots.panels(points, "decoding", 3.0, sharey=True)
    for ax, decoding, panel in shown:
        plots.lines(ax, panel, axis, "mean", "group", looks, markevery=0.15)
        start = records["base"][0]["validation"]["greedy" if decoding == "greedy" else "pass@1"]
        ax.axhline(100 * start, **plots.BASE)
        ax.set(xscale="log", title=style.STROKES[decoding].label, xlabel=budget)
    axes[0].set_ylabel("validation accuracy, %")
    plots.key(fig, axes[0], 2, 8)
    return fig


def draw_populations(points: DataFrame) -> plt.Figure:
    """Draw, against population, the share of runs that reach the target, with its interval, and accuracy at the end.

    points: `population_points`.
    """
    fig, (left, right) = plt.subplots(1, 2, figsize=(style.PAGE, 2.4))
    look, populations = style.ARMS["essa"], points.groupby("population")
    arrived = [stats.wilson(int(part.sum()), len(part)) for _, part in populations["reached"]]
    sizes, ends = [*populations.groups], DataFrame(plots.ends(share, 100) for share in arrived)
    plots.whiskers(left, ends, across=sizes, color=look.color, marker="o", ms=5, ls="", lw=1.2)
    right.scatter(points["population"], points["at the end"], s=14, color=look.color, alpha=0.5, lw=0)
    right.plot(sizes, populations["at the end"].mean(), color=look.color, marker="o", ms=5, lw=1.2)
    left.set(ylim=(-3, 103), ylabel="runs that reach the target, %", xlabel="population")
    right.set(ylabel="validation accuracy at the end, %", xlabel="population")
    for ax in (left, right):
        plots.plain_ticks(ax, sizes)
    return fig


DRAWN = ("es", "es_inplace", "es_lora", "essa", "grpo", "grpo_adam8bit", "grpo_adam8bit_bfloat16", "grpo_lora")
"""Methods whose memory is drawn; the table of ratios has more."""
KINDS = {
    "weights": ("#262626", ("weights", "master", "compensation", "adapter")),
    "copies of the weights": ("#666666", ("working copy", "rollout copy", "reference model")),
    "gradients and what they need": ("#D79A66", ("gradients", "moments", "saved activations", "logits", "temporaries")),
    "cache, noise and search": ("#DDDDDD", ("KV cache", "noise or factors", "search")),
}
"""What a step holds, in the order of the bars -> its colour, and the formula's components in it."""


def bytes_a_parameter(memory: DataFrame, size: str = "7B") -> DataFrame:
    """Return the bytes per parameter of the methods that are drawn, for a model, with a column per kind.

    memory: `memory_bytes`. size: a key of `kinds.memory.PUBLISHED`.
    """
    at = memory[memory["size"] == size].set_index("method")
    at = at.loc[[method for method in DRAWN if method in at.index]]
    each = {kind: at[list(names)].sum(axis=1) / at["d"] for kind, (_, names) in KINDS.items()}
    return DataFrame(each).rename(index=lambda method: footprint.METHODS[method].label)


def draw_bars(data: DataFrame, size: str = "7B") -> plt.Figure:
    """Draw each method's bytes per parameter on a GPU, by kind. data: `bytes_a_parameter`."""
    fig, ax = plt.subplots(figsize=(style.PAGE, 0.9 + 0.24 * len(data)))
    left = np.zeros(len(data))
    for kind, (color, _) in KINDS.items():
        bars = ax.barh(data.index, data[kind], 0.7, left, color=color, edgecolor="white", label=kind)
        left = left + data[kind].to_numpy()
    ax.bar_label(bars, [f"{total:.1f}" for total in left], padding=3, fontsize=7.5)
    ax.invert_yaxis()
    ax.set(xlabel=f"bytes a parameter, {size}", xlim=(0, 1.06 * left.max()))
    ax.grid(axis="y", visible=False)
    plots.key(fig, ax, 4, 8)
    return fig
