"""Four tasks trained one after the other (`measures.sequence`): groups of runs, table, figure and results."""

from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from pandas import DataFrame, concat

from evoalign_lib import tiny
from evoalign_lib.analysis import stats
from evoalign_lib.tiny import sequence as world
from evoalign_study import forgetting, loading, plots, runs, style
from evoalign_study.kinds.train import sweep_specs
from evoalign_study.kinds.weights import merge_specs
from evoalign_study.loading import Group, Records
from evoalign_study.records import Record
from evoalign_study.results import MISSING, Results, stated

SETTINGS: runs.Table = {
    "sequence_seeds": (8, 2),
    "sequence_describe": (4, 1),  # seeds of runs that no verdict uses
    "sequence_steps": (96, 8),  # of ES, a quarter on each task
    "sequence_limited": (32, 4),  # the same on a limited budget
    "sequence_grpo_steps": (96, 8),
    "sequence_sizes": (
        {"population_size": 30, "prompts_per_step": 16, "test_problems": 128},
        {"population_size": 4, "prompts_per_step": 4, "test_problems": 8},
    ),
    "sequence_grpo": (
        {"num_generations": 16, "prompts_per_step": 8, "beta": 0.0},
        {"num_generations": 4, "prompts_per_step": 4, "beta": 0.0},
    ),
    "sequence_choices": {
        "es": [{"sigma": s, "alpha": a} for s, a in ((0.01, 0.01), (0.02, 0.01), (0.02, 0.02))],
        "grpo": [{"learning_rate": r} for r in (3e-4, 1e-3, 3e-3)],
    },
    "sequence_mean": (4, 2),  # runs per mean
    # share of the way from the base: over 96 steps as strong as the published one, 0.005, over the 208 of claim E9
    "sequence_decay": 0.01,
}
"""Settings of the runs, for a notebook's own."""
FIXED, LIMITED, WALK, LIMITED_WALK = "sequence es", "sequence es limited", "sequence walk", "sequence walk limited"
GRPO, NULL = "sequence grpo", "sequence grpo random"
ANCHORED, ANCHORED_NULL = "sequence anchored", "sequence anchored shuffled"


def groups(run: SimpleNamespace, records: Records, scale: str) -> dict[str, Any]:
    """Return the groups of runs by name: sweeps, the arms, two of them in reversed order, and means."""
    sizes, base = run.sequence_sizes, tiny.SEQUENCE_BASES[0]
    common = {"task": "sequence", "max_completion_length": world.MAX_COMPLETION_LENGTH, "curve_points": 5}
    common |= {"sampled_at": [0.6], "validation_problems": sizes["test_problems"] // 2}
    of = {
        "es": {"steps": run.sequence_steps} | sizes,
        "grpo": {"steps": run.sequence_grpo_steps} | sizes | run.sequence_grpo,
    }
    declared: dict[str, Any] = {}
    for arm, choices in run.sequence_choices.items():
        declared[f"sequence sweep {arm}"] = sweep_specs(arm, base, common | of[arm], scale, choices)

    def group(arm: str, seeds: int, **changes: Any) -> Group:
        by = "grpo" if arm.startswith("grpo") else "es"
        sweep = f"sequence sweep {by}"
        best = loading.ranked_choices(run, by, records[sweep])[0] if records.get(sweep) else run.sequence_choices[by][0]
        return Group(arm, [base], range(seeds), common | of[by] | best | changes, after=(sweep,), scale=scale)

    many, few, limited = run.sequence_seeds, run.sequence_describe, run.sequence_limited
    decay = run.sequence_decay
    declared |= {
        FIXED: group("es", many),
        LIMITED: group("es", many, steps=limited),
        GRPO: group("grpo", many),
        WALK: group("es_random", many),
        LIMITED_WALK: group("es_random", many, steps=limited),
        NULL: group("grpo_random", few),
        ANCHORED: group("es_anchored", many, anchor_decay=decay),
        ANCHORED_NULL: group("es_shuffled", many, anchor_decay=decay),
    }
    both = ((FIXED, "es"), (GRPO, "grpo"))
    declared |= {f"{name} reversed": group(arm, many, order="reversed") for name, arm in both}
    declared["sequence means"] = runs.after(records, (FIXED,), lambda es: _means(run, es, sizes, scale))
    return declared


def _means(run: SimpleNamespace, es: Sequence[Record], sizes: dict[str, int], scale: str) -> list[Any]:
    """Return the specs of each run, of means of several, and of the runs shrunk to the length of such a mean."""
    asked = {"max_completion_length": world.MAX_COMPLETION_LENGTH, "skill_messages": 64}
    asked |= {f"{name}_problems": sizes["test_problems"] for name in ("validation", "test")}
    many = runs.means(es, run.sequence_mean, len(es))
    own = [merge_specs([one], asked, scale) for one in es]
    shrunk = [merge_specs([one], asked, scale, as_long_as=mean) for mean in many for one in mean[:2]]
    return own + [merge_specs(mean, asked, scale) for mean in many] + shrunk


LABELS = {
    FIXED: "ES",
    LIMITED: "ES, a third of the steps",
    GRPO: "GRPO",
    WALK: "ES, random fitness",
    LIMITED_WALK: "ES, random fitness, a third",
    NULL: "GRPO, random reward",
    ANCHORED: "ES, anchored decay",
    ANCHORED_NULL: "ES, anchored decay, shuffled fitness",
    f"{FIXED} reversed": "ES, reversed order",
    f"{GRPO} reversed": "GRPO, reversed order",
}
"""Group -> its name in tables."""


MERGED = {"run": "ES, the same runs", "mean": "mean of ES runs", "shrunk": "ES, shrunk to the mean's length"}
"""Kind of merged model -> its name in tables."""


def lost(records: Records, name: str, decoding: str, walk: str = "") -> stats.Interval:
    """Return what the runs of a group lost of earlier tasks; less what those of another group lost, paired by seed."""
    own = np.array([forgetting.forgotten(run, decoding) for run in records[name]])
    beside = [forgetting.forgotten(run, decoding) for run in records[walk]] if walk else np.zeros(len(own))
    return stats.bootstrap_mean(own - np.array(beside)[: len(own)])


def _ends(records: Records, name: str, curve: str) -> stats.Interval:
    return stats.bootstrap_mean([run["curve"][curve][-1] for run in records[name]])


def results(records: Records) -> Results:
    """Return by name the numbers that answers and macros quote; shares are fractions."""
    found: dict[str, Any] = {}
    reverse = ((f"{FIXED} reversed", ""), (f"{GRPO} reversed", ""))
    alone = ((name, "") for name in (GRPO, WALK, NULL, ANCHORED, ANCHORED_NULL))
    for name, walk in ((FIXED, WALK), (LIMITED, LIMITED_WALK), *alone, *reverse):
        for decoding in style.STROKES:
            found[f"{name} lost {decoding}"] = lost(records, name, decoding)
            found[f"{name} last {decoding}"] = _last(records, name, decoding)
            if walk:
                found[f"{name} own {decoding}"] = lost(records, name, decoding, walk)
        found[f"{name} kl"], found[f"{name} skills"] = (_ends(records, name, c) for c in ("kl_skills", "skills"))
    law = [
        np.abs(forgetting.norms_over_law(run) - 1).max()
        for name in (FIXED, WALK)
        for run in records[name]
        if forgetting.knows_ties(run)
    ]
    base = forgetting.matrix(records[FIXED][0], "greedy")[0].mean()
    found |= {"sequence off law": float(max(law)), "sequence base": float(base)}
    merged = _merged(records)
    found |= {
        f"merged {kind}": stats.bootstrap_mean([r["test"]["greedy"] for r in own]) for kind, own in merged.items()
    }
    return found | {f"merged {k} kl": float(np.mean([_kl(r) for r in own])) for k, own in merged.items()}


def _last(records: Records, name: str, decoding: str) -> stats.Interval:
    return stats.bootstrap_mean([forgetting.matrix(run, decoding)[-1].mean() for run in records[name]])


def _merged(records: Records) -> dict[str, list[Record]]:
    """Return the merged models by kind: single runs, means of several, and runs shrunk to a mean's length."""
    kinds: dict[str, list[Record]] = {"run": [], "mean": [], "shrunk": []}
    for record in records["sequence means"]:
        spec = record["spec"]
        kinds["shrunk" if "as_long_as" in spec else "mean" if len(spec["of"]["seeds"]) > 1 else "run"].append(record)
    return kinds


def _kl(record: Record) -> float:
    return float(np.mean([skill["kl"] for skill in record["skills"].values()]))


def table(records: Records) -> DataFrame:
    """Return a row per group of runs, then one per kind of merged model: accuracy, forgetting, drift, norm."""
    rows = []
    for name, label in LABELS.items():
        own = records[name]
        row = {"runs": label, "n": len(own), "all tasks at the end, %": stated(_last(records, name, "greedy"))}
        row |= {f"forgotten, {style.STROKES[d].label}": stated(lost(records, name, d)) for d in style.STROKES}
        skills, drift = (_ends(records, name, curve) for curve in ("skills", "kl_skills"))
        row |= {"other skills, %": stated(skills), "KL there": stated(drift, ".2f")}
        walked = "alpha" in own[0]["spec"]  # GRPO has no law
        told = [forgetting.norms_over_law(run) for run in own if walked and forgetting.knows_ties(run)]
        law = np.mean(told, axis=0) if told else ()
        norms = np.mean([run["curve"]["norm"][1:] for run in own], axis=0)
        row |= {"norm after each task": ", ".join(f"{norm:.1f}" for norm in norms)}
        rows.append(row | {"over its law": ", ".join(f"{ratio:.2f}" for ratio in law) or MISSING})
    for kind, label in MERGED.items():
        own = _merged(records)[kind]
        skills = [np.mean([skill["greedy"] for skill in model["skills"].values()]) for model in own]
        told = [stats.bootstrap_mean(each) for each in ([m["test"]["greedy"] for m in own], skills, [*map(_kl, own)])]
        row = {"runs": label, "n": len(own), "all tasks at the end, %": stated(told[0])}
        row |= {"other skills, %": stated(told[1]), "KL there": stated(told[2], ".2f")}
        rows.append(row | {"norm after each task": f"{np.mean([model['norm'] for model in own]):.1f} at the end"})
    return DataFrame(rows).fillna(MISSING)


SHOWN = {FIXED: "es", LIMITED: "es", ANCHORED: "es_anchored", GRPO: "grpo", WALK: "es_random", NULL: "grpo_random"}


def figure(records: Records) -> tuple[plt.Figure, DataFrame]:
    """Draw greedy accuracy on each task before the first task and after each, a line per arm; dotted: its own turn."""
    frames = []
    for (turn, task), name in product(enumerate(world.TASKS, start=1), SHOWN):
        band = stats.curve_band([[100 * right for right in run["curve"][f"{task}_greedy"]] for run in records[name]])
        points = dict(zip(("value", "low", "high"), band, strict=True))
        frames.append(DataFrame({"panel": f"{turn} {task}", "arm": name, "stage": range(len(band[0]))} | points))
    points = concat(frames, ignore_index=True)
    looks = {name: plots.look(arm, label=LABELS[name], ms=4) for name, arm in SHOWN.items()}
    looks[LIMITED] |= {"ls": "--", "mfc": "white"}
    labels = {"xlabel": "tasks trained", "ylabel": "right, %", "ylim": (0, 100), "xticks": range(5)}
    fig, axes = plots.grid(points, "stage", "value", "arm", looks, 2.7, 3, **labels)
    for turn, ax in enumerate(axes, start=1):
        ax.axvline(turn, **plots.NULL)
    return fig, points
