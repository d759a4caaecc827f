"""Notebook 07's 2 x 2 of rollouts and updates, and its arms run in sequence: runs, tables, answers, figures."""

from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from matplotlib import pyplot as plt
from pandas import DataFrame, concat

from evoalign_lib import arms
from evoalign_lib.analysis import coverage, stats
from evoalign_lib.analysis.coverage import SOLVED_WITHIN, Effects
from evoalign_lib.analysis.stats import Interval
from evoalign_study import plots, runs, style
from evoalign_study.claims import quantities
from evoalign_study.kinds.train import composed_specs, sweep_specs
from evoalign_study.loading import After, Group, Records
from evoalign_study.records import Record, Spec
from evoalign_study.results import Results, stated

BASE = "base"
ROLLOUTS = {"temperature": "the weights themselves", "perturbed": "perturbed copies"}
"""Levels of the first factor -> what generates the completions."""
UPDATES = {"es": "ES", "gradient": "policy gradient"}
"""Levels of the second factor."""
CELLS = {
    ("temperature", "es"): "es_weighted",
    ("temperature", "gradient"): "grpo",
    ("perturbed", "es"): "es_members",
    ("perturbed", "gradient"): "grpo_perturbed",
}
"""Rollouts and update -> the group of runs that combines them; all use the same number of completions."""
SLOWER = "grpo slower"
"""Runs of GRPO with the learning rate that the policy gradient on perturbed copies' completions uses."""
PLAIN = "sft_perturbed"
"""Runs that are fine-tuned on right answers of perturbed copies."""
ALONE = "es alone"
"""Runs of ES that spend as many FLOPs as those of GRPO."""
FIRST = ("es first", "grpo first")
"""Groups of the first parts."""
COMPOSED = {"es then grpo": ("es first", "grpo"), "grpo then es": ("grpo first", "es")}
"""Group of two-part runs -> the group of their first parts, and the arm of the second."""
ORDERS = {"ES alone": ALONE, "GRPO alone": "grpo", "ES, then GRPO": "es then grpo", "GRPO, then ES": "grpo then es"}
"""Order of arms, compared at equal FLOPs -> its group of runs."""
ALONG = {
    "validation_greedy": "right greedily",
    f"reach_t1@{SOLVED_WITHIN}": f"solved within {SOLVED_WITHIN} samples at temperature 1",
}
"""Field of a run's curve -> its description."""
_RESAMPLES = 2000


# ---- groups of runs


def on_own_seeds(declared: Group, run: SimpleNamespace) -> Group:
    """Return notebook 02's runs of an arm with this notebook's own seeds, and coverage measured along the way."""
    own = dict(declared.settings) | {"test_problems": run.test_problems, "validation_problems": run.validation_problems}
    if "curve_points" in own:
        own |= {"curve_points": run.curve_points, "reach_at": run.reach_at}
    return declared._replace(seeds=run.own_seeds, settings=own, ledgers=())


def cells(run: SimpleNamespace, records: Records, declared: Mapping[str, Any], scale: str) -> dict[str, Any]:
    """Return the runs that separate rollouts from updates, and the sweeps that choose their settings.

    A sweep takes half of the steps, and its best settings are tried again with all of them: an ES step that is best for
    half of the run may drift off later. The fourth cell is GRPO itself, with notebook 02's setting. Fine-tuning on
    perturbed copies' answers uses the learning rate of the usual fine-tuning.
    """
    size = {"steps": run.cell_steps, "population_size": run.cell_members, "prompts_per_step": run.cell_prompts}
    es, grpo = dict(declared["es"].settings) | size | {"num_generations": run.cell_samples}, declared["grpo"]
    gradient = dict(grpo.settings) | {"beta": 0.0}
    made: dict[str, Any] = {}
    for name, arm, settings, after, swept in (
        ("es_weighted", "es_weighted", es, (), "es_weighted"),
        ("es_members", "es_sampled", es, (), "es_weighted"),
        ("grpo_perturbed", "grpo_perturbed", gradient, grpo.after, "grpo_perturbed"),
    ):
        sweep, finals, choices = f"sweep {name}", f"finals {name}", arms.SWEEP[swept][: run.sweep_size]
        made[sweep] = After(sweep_specs(arm, run.bases[0], settings, scale, choices), after)
        tried = [setting for _, setting in arms.ranked(records[sweep])] if sweep in records else choices
        whole = settings | {"steps": 2 * settings["steps"]}  # a sweep takes half of them
        specs = sweep_specs(arm, run.bases[0], whole, scale, tried[: run.finalists]) if sweep in records else []
        made[finals] = After(specs, (*after, sweep))
        best = arms.ranked(records[finals])[0][1] if finals in records else tried[0]
        group = Group(arm, run.bases[:1], run.own_seeds, settings | best, after=(*after, sweep, finals), scale=scale)
        made[name] = on_own_seeds(group, run)
    few = run.own_seeds[:4]  # enough, since no verdict uses these runs
    rate = {"learning_rate": made["grpo_perturbed"].settings["learning_rate"]}
    slower = dict(on_own_seeds(grpo, run).settings) | rate
    # seeds that no claim uses
    made[SLOWER] = made["grpo_perturbed"]._replace(arm="grpo", seeds=[seed + 8 for seed in few], settings=slower)
    plain = on_own_seeds(declared["sft"]._replace(arm=PLAIN), run)
    made[PLAIN] = plain._replace(seeds=few, settings=dict(plain.settings) | {"sigma": run.perturbed_sigma})
    return made


def composed(run: SimpleNamespace, records: Records, declared: Mapping[str, Any], scale: str) -> dict[str, Any]:
    """Return two-part runs, their first parts, and ES alone at the FLOPs of GRPO.

    Each part takes half of the steps that its arm takes alone. ES uses the setting of its sweep that is best after that
    many steps.
    """
    es, grpo = (on_own_seeds(declared[arm], run) for arm in ("es", "grpo"))
    half = run.alone_steps // 2
    short = dict(es.settings) | {"steps": run.alone_steps}
    if "sweep es" in records:
        short |= best_after(records["sweep es"], half)
    parts = {
        "es": es._replace(settings=short | {"steps": half}),
        "grpo": grpo._replace(settings=dict(grpo.settings) | {"steps": grpo.settings["steps"] // 2}),
    }
    made: dict[str, Any] = {ALONE: es._replace(settings=short)}
    made |= {f"{arm} first": part for arm, part in parts.items()}
    for name, (first, second) in COMPOSED.items():
        part, needed = parts[second], (*parts[second].after, first)

        def specs(*each: Sequence[Record], part: Group = part) -> list[Spec]:
            return composed_specs(part.arm, each[-1], part.settings, scale)

        made[name] = runs.after(records, needed, specs)
    return made


def best_after(sweep: Sequence[Record], steps: int) -> dict[str, float]:
    """Return the setting of an ES sweep that is best on the validation set after a number of steps.

    As in `arms.ranked`, settings are ranked by the mean of three points of the curve: the last three up to that step.
    """
    cut = []
    for record in sweep:
        n = sum(step <= steps for step in record["curve"]["step"])
        cut.append(record | {"curve": {name: values[:n] for name, values in record["curve"].items()}})
    return arms.ranked(cut)[0][1]


def reach_name(group: str) -> str:
    """Return the name of the group that measures the models of another."""
    return f"reach of {group}"


# ---- quantities measured in every group


class Measured(NamedTuple):
    """A quantity to measure in a group of runs."""

    words: str
    at: str
    """"greedy", "t0.6" or "t1"."""
    within: int = 1
    """Number of samples."""
    against_base: bool = False
    """Whether it is the net change of support."""

    @property
    def form(self) -> str:
        """Format of the quantity: percent, or a ratio."""
        return ".3f" if self.against_base else ".1%"


ASKED = (
    Measured("right greedily, %", "greedy"),
    Measured("right at temperature 0.6, %", "t0.6"),
    Measured("right at temperature 1, %", "t1"),
    Measured(f"solved within {SOLVED_WITHIN} at temperature 1, %", "t1", SOLVED_WITHIN),
    Measured("net change of support at 0.6", "t0.6", SOLVED_WITHIN, True),
    Measured("net change of support at 1", "t1", SOLVED_WITHIN, True),
)
"""Quantities that tables show for every group; changes of support are within 256 samples."""
RIGHT, SOLVED, CHANGE = ASKED[0], ASKED[3], ASKED[5]


def chances(records: Records, group: str, at: str) -> np.ndarray:
    """Return the chance that one answer of each run of a group is right, (runs, problems).

    at: "greedy", or a temperature as records have it, such as "t1"; "own" is each model's own temperature, chosen on
    the validation set.
    """
    return quantities.chances(records[reach_name(group)], "" if at == "own" else at)


def value(records: Records, group: str, asked: Measured) -> Interval:
    """Return the mean of a quantity over runs and problems, with its interval."""
    own = chances(records, group, asked.at)
    if asked.against_base:
        (base,) = chances(records, BASE, asked.at)
        return coverage.support_change(base, own, asked.within, n_resamples=_RESAMPLES)
    return stats.crossed_bootstrap(coverage.pass_at(own, asked.within), n_resamples=_RESAMPLES)


def _solves(records: Records, group: str) -> dict[str, str]:
    """Return table columns of what the models of a group solve, with the null of counts."""
    null = coverage.null_nscr(chances(records, BASE, "t1")[0], SOLVED_WITHIN)
    solved = {asked.words: stated(value(records, group, asked), asked.form) for asked in (*ASKED[:4], CHANGE)}
    return solved | {"null of counts": f"{null.low:.3f} to {null.high:.3f}"}


# ---- rollouts and updates


def _named_cells() -> dict[tuple[str, str], str]:
    """Return (who writes, how weights are updated), in words -> group, for the cells and the additional runs."""
    named = {(ROLLOUTS[who], UPDATES[update]): group for (who, update), group in CELLS.items()}
    return named | {
        (f"{ROLLOUTS['temperature']}, slower", UPDATES["gradient"]): SLOWER,
        (ROLLOUTS["temperature"], "filtered SFT"): "sft",
        (f"{ROLLOUTS['perturbed']}, greedily", "filtered SFT"): PLAIN,
    }


def cells_table(run: SimpleNamespace, records: Records) -> DataFrame:
    """Return a row per cell and per kind of fine-tuning: what its models solve, with the null of counts."""
    return DataFrame(
        {"who writes": who, "update": update, "n": len(records[group])} | _solves(records, group)
        for (who, update), group in _named_cells().items()
    )


def _of_cells(read: Any) -> list[list[Any]]:
    """Apply a function to each cell's group; rows are the rollouts, columns the updates."""
    return [[read(CELLS[who, update]) for update in UPDATES] for who in ROLLOUTS]


def effects(records: Records, asked: Measured, resamples: int = 10_000) -> Effects:
    """Return the effects of rollouts (rows: perturbed minus not) and updates (columns: policy gradient minus ES)."""
    base = chances(records, BASE, asked.at)[0] if asked.against_base else None
    own = _of_cells(lambda group: chances(records, group, asked.at))
    return coverage.effects(own, base, asked.within, n_resamples=resamples)


def effects_table(run: SimpleNamespace, records: Records) -> DataFrame:
    """Return a row per quantity: the effects with intervals, and a two-way analysis of variance.

    The last row is the norm of the displacement, as its logarithm to base 2.
    """

    rows = []

    def add(words: str, found: Effects, form: str, values: list[list[np.ndarray]]) -> None:
        each = zip(("effect of the rollouts", "effect of the update", "interaction"), found[:3], strict=True)
        rows.append({"quantity": words} | {head: stated(effect, form) for head, effect in each} | _variance(values))

    def of_runs(asked: Measured, group: str) -> np.ndarray:
        solved = coverage.pass_at(chances(records, group, asked.at), asked.within)
        if not asked.against_base:
            return solved.mean(1)
        before = coverage.pass_at(chances(records, BASE, asked.at)[0], asked.within)
        return np.array([coverage.support(before, each).nscr for each in solved])

    for asked in ASKED:
        values = _of_cells(lambda group, asked=asked: of_runs(asked, group))
        add(asked.words.removesuffix(", %"), effects(records, asked, _RESAMPLES), asked.form, values)
    norms = _of_cells(lambda group: np.log2([record["update_norm"] for record in records[group]]))
    add("norm, doublings", coverage.effects_of_runs(norms, n_resamples=_RESAMPLES), ".2f", norms)
    return DataFrame(rows)


def _variance(values: list[list[np.ndarray]]) -> dict[str, str]:
    """Return the shares of the variance over runs due to rollouts, update, their interaction and the rest, percent."""
    names = {"rows": "rollouts", "columns": "update", "interaction": "both jointly", "rest": "the rest"}
    if np.ptp(np.concatenate([cell for row in values for cell in row])) == 0:  # a few steps may change nothing
        return {f"variance: {name}": "none" for name in names.values()} | {"p of rollouts, update": ""}
    parted = stats.two_way(values)
    words = {f"variance: {name}": f"{100 * parted[part].share:.0f}" for part, name in names.items()}
    return words | {"p of rollouts, update": f"{parted['rows'].p:.2g}, {parted['columns'].p:.2g}"}


# ---- one after the other


def parts(records: Records, group: str) -> list[tuple[Record, ...]]:
    """Return the records of the parts of each run of a group, in order."""
    if group not in COMPOSED:
        return [(record,) for record in records[group]]
    first = {record["digest"]: record for record in records[COMPOSED[group][0]]}
    return [(first[record["spec"]["start"]["digests"][0]], record) for record in records[group]]


def total(records: Records, group: str, name: str) -> float:
    """Return the mean over runs of what all parts together spent. name: an axis of the budget."""
    return float(np.mean([sum(part["budget"][name] for part in each) for each in parts(records, group)]))


def composed_table(run: SimpleNamespace, records: Records) -> DataFrame:
    """Return a row per order at equal FLOPs, and per first part alone: what was spent, and what the models solve."""
    halves = {"half of ES alone": "es first", "half of GRPO alone": "grpo first"}
    return DataFrame(
        {
            "trained by": words,
            "n": len(records[group]),
            "steps": " + ".join(str(part["spec"]["steps"]) for part in parts(records, group)[0]),
            "TFLOP": f"{total(records, group, 'forward_flops') / 1e12:.2f}",
            "core-seconds": f"{total(records, group, 'core_seconds'):.0f}",
        }
        | _solves(records, group)
        for words, group in (ORDERS | halves).items()
    )


def per_step(records: Records) -> dict[str, float]:
    """Return the core-seconds per step of each arm: the mean over all of its runs in the orders.

    Runs of a notebook share a machine with each other, so the same steps cost up to a quarter more in some runs;
    therefore every step of an arm is charged the same.
    """
    runs_ = [part for group in (*ORDERS.values(), "es") for each in parts(records, group) for part in each]
    spent = DataFrame([{"arm": r["spec"]["arm"], "steps": r["spec"]["steps"]} | r["budget"] for r in runs_])
    sums = spent.groupby("arm")[["core_seconds", "steps"]].sum()
    return (sums["core_seconds"] / sums["steps"]).to_dict()


def seconds_table(run: SimpleNamespace, records: Records) -> DataFrame:
    """Return a row per order: what runs solve of the validation set at equal core-seconds.

    The budget is what a two-part run has spent at its end, by `per_step`. ES alone is the full-length run here. Values
    are interpolated linearly between the points of each run's curve, and intervals are over runs.
    """
    each_step = per_step(records)
    first_run = parts(records, "es then grpo")[0]
    seconds = sum(part["spec"]["steps"] * each_step[part["spec"]["arm"]] for part in first_run)

    def at_seconds(run_parts: Sequence[Record], field: str) -> float:
        """Return a field of the curve of all parts in sequence at this budget; NaN beyond the end of the curve."""
        spent: list[float] = []
        for part in run_parts:
            before = spent[-1] if spent else 0.0
            spent += [before + step * each_step[part["spec"]["arm"]] for step in part["curve"]["step"]]
        values = [value for part in run_parts for value in part["curve"][field]]
        return float(np.interp(seconds, spent, values)) if seconds <= spent[-1] * (1 + 1e-9) else np.nan

    columns = dict(zip((RIGHT.words, SOLVED.words), ALONG, strict=True))
    rows = []
    for words, group in (ORDERS | {"ES alone": "es"}).items():
        row: dict[str, Any] = {"trained by": words, "n": len(records[group]), "core-seconds": f"{seconds:.0f}"}
        for what, field in columns.items():
            values = np.array([at_seconds(each, field) for each in parts(records, group)])
            ended = np.isnan(values).any()
            row[what] = "ended" if ended else stats.bootstrap_mean(values, n_resamples=_RESAMPLES).format()
        rows.append(row)
    return DataFrame(rows)


# ---- what these sections find


def results(records: Records) -> Results:
    """Return the numbers behind the answers and the paper's macros, by name; shares are fractions."""
    exact = effects(records, CHANGE)
    entries: Results = {"update change judged": exact.columns, "rollouts change judged": exact.rows}
    return entries | {f"{group} right": value(records, group, RIGHT) for group in ORDERS.values()}


# ---- figures: each returns the figure and what it plots


def look(who: str, update: str) -> dict[str, Any]:
    """Return how a cell is drawn: in the colour of its update, filled if the weights themselves write."""
    color, perturbed = style.ARMS[{"es": "es", "gradient": "grpo"}[update]].color, who == "perturbed"
    shape = {"marker": "s", "ls": "--", "mfc": "white"} if perturbed else {"marker": "o", "ls": "-", "mfc": color}
    return {"color": color, "label": f"{UPDATES[update]}, {ROLLOUTS[who]} write"} | shape


def figure_cells(run: SimpleNamespace, records: Records) -> tuple[plt.Figure, DataFrame]:
    """Draw how rollouts and updates change the support: along the runs against accuracy, and at their ends."""
    looks = {group: look(*cell) for cell, group in CELLS.items()}
    slower = look("temperature", "gradient")
    looks[SLOWER] = slower | {"ls": ":", "marker": "D", "mfc": "white", "label": f"{slower['label']}, slower"}

    def along_runs(group: str) -> Iterable[tuple[float, ...]]:
        curves = [record["curve"] for record in records[group]]
        across, won, lost = (np.array([c[f] for c in curves]) for f in ("reach_t1@1", "won_t1", "lost_t1"))
        return zip(curves[0]["step"], 100 * across.mean(0), 100 * (won - lost).mean(0), strict=True)

    course = DataFrame(
        {"panel": "along", "cell": how["label"], "step": step, "across": x, "value": y}
        for group, how in looks.items()
        for step, x, y in along_runs(group)
    )
    ends = DataFrame(
        {"panel": "ends", "cell": f"{UPDATES[update]}, {ROLLOUTS[who]}", "update": update, "who": ROLLOUTS[who]}
        | plots.ends(value(records, CELLS[who, update], CHANGE))
        for update in UPDATES
        for who in ROLLOUTS
    )
    fig, (left, right) = plt.subplots(1, 2, figsize=(style.PAGE, 2.6), width_ratios=(1.5, 1))
    plots.lines(left, course, "across", "value", "cell", {how["label"]: how for how in looks.values()}, ms=4, lw=1.2)
    left.set(xlabel="solved by one sample at temperature 1, %", ylabel="won - lost, % of problems")
    for update, both in ends.groupby("update", sort=False):
        how = {"color": look("temperature", update)["color"], "label": UPDATES[update]}
        plots.whiskers(right, both, both["who"], marker="D", ms=4, capsize=3, lw=1.2, **how)
    right.set(xlim=(-0.25, 1.25), ylabel="net change of support", xlabel="who writes")
    right.legend(loc="lower right")
    for ax in (left, right):
        ax.axhline(0, **plots.NULL)
    plots.key(fig, left, 2)
    return fig, concat([course, ends[["panel", "cell", "value"]]])
