"""What notebook 07 says and tabulates of rollouts and updates taken apart, and of arms one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from evoalign_lib.analysis import coverage, stats
from evoalign_lib.analysis.coverage import SOLVED_WITHIN, Effects
from evoalign_lib.analysis.stats import Interval
from evoalign_study import nb07_solution_coverage as study
from evoalign_study import style
from evoalign_study.loading import Records
from evoalign_study.records import Record, Spec, unpack_bits, unpack_probabilities

if TYPE_CHECKING:
    from pandas import DataFrame

ROLLOUTS = {"temperature": "the weights themselves", "perturbed": "perturbed copies"}
"""Levels of the first factor -> who writes."""
UPDATES = {"es": "ES", "gradient": "policy gradient"}
"""Levels of the second factor."""
ORDERS = {
    "ES alone": study.ALONE,
    "GRPO alone": "grpo",
    "ES, then GRPO": "es then grpo",
    "GRPO, then ES": "grpo then es",
}
"""What stands against one another at as many FLOPs -> its group of runs."""
_RESAMPLES = 2000


class Measured(NamedTuple):
    """What is asked of a group of runs."""

    words: str
    at: str
    """"greedy", "t0.6" or "t1"."""
    within: int = 1
    """Samples."""
    against_base: bool = False
    """Whether it is the net change of support."""

    def format(self, interval: Interval) -> str:
        """Return an interval in its unit: percent, or a ratio."""
        return interval.format(percent=False, digits=3) if self.against_base else interval.format()


ASKED = (
    Measured("right greedily, %", "greedy"),
    Measured("right at temperature 0.6, %", "t0.6"),
    Measured("right at temperature 1, %", "t1"),
    Measured(f"solved within {SOLVED_WITHIN} at temperature 1, %", "t1", SOLVED_WITHIN),
    Measured("net change of support at 0.6", "t0.6", SOLVED_WITHIN, True),
    Measured("net change of support at 1", "t1", SOLVED_WITHIN, True),
)
"""What tables have of every group; the changes are within 256 samples."""


def chances(of: Records, group: str, at: str) -> np.ndarray:
    """Return the chance that one answer of each run of a group is right, (runs, problems)."""
    found = of[study.reach_name(group)]
    if at == "greedy":
        return np.array([unpack_bits(record["greedy_bits"], record["n"]) for record in found], float)
    return np.array([unpack_probabilities(record["reach"][at]) for record in found])


def value(of: Records, group: str, asked: Measured) -> Interval:
    """Return the mean of what is asked over runs and problems, with its interval."""
    found = chances(of, group, asked.at)
    if asked.against_base:
        (base,) = chances(of, study.BASE, asked.at)
        return coverage.support_change(base, found, asked.within, n_resamples=_RESAMPLES)
    return stats.crossed_bootstrap(coverage.pass_at(found, asked.within), n_resamples=_RESAMPLES)


def null_in_words(of: Records) -> str:
    """Return between which net changes counts from two sets of samples of the base itself lie, at temperature 1."""
    found = coverage.null_nscr(chances(of, study.BASE, "t1")[0], SOLVED_WITHIN)
    return f"{found.low:.3f} to {found.high:.3f}"


def _spent(found: Sequence[Record], name: str) -> float:
    return float(np.mean([record["budget"][name] for record in found]))


# ---- rollouts and updates


def cells_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return a row per cell, and per way to fine-tune: what its models solve, with the null of counts."""
    from pandas import DataFrame

    rows = []
    for (who, update), group in _named_cells().items():
        row: dict[str, Any] = {"who writes": who, "update": update, "n": len(of[group])}
        row |= {asked.words: asked.format(value(of, group, asked)) for asked in (*ASKED[:4], ASKED[5])}
        rows.append(row | {"null of counts": null_in_words(of)})
    return DataFrame(rows)


def spent_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return a row per cell, and per way to fine-tune: its setting, how far it went, its ratios, what was spent."""
    from pandas import DataFrame

    rows = []
    for (who, update), group in _named_cells().items():
        found = of[group]
        row: dict[str, Any] = {"who writes": who, "update": update, "setting": _setting(found[0]["spec"])}
        row["norm"] = f"{np.mean([record['update_norm'] for record in found]):.2f}"
        for what, words in (("effective_share", "effective samples, %"), ("clipped_share", "clipped, %")):
            shares = [record["rollouts"][what] for record in found if "rollouts" in record]
            row[words] = f"{100 * np.mean(shares):.1f}" if shares else ""
        row["TFLOP"] = f"{_spent(found, 'forward_flops') / 1e12:.1f}"
        row["core-seconds"] = f"{_spent(found, 'core_seconds'):.0f}"
        rows.append(row)
    return DataFrame(rows)


def _named_cells() -> dict[tuple[str, str], str]:
    """Return who writes and how weights are updated, in words -> group, for the cells and what stands beside them."""
    named = {(ROLLOUTS[who], UPDATES[update]): group for (who, update), group in study.CELLS.items()}
    return named | {
        (f"{ROLLOUTS['temperature']}, slower", UPDATES["gradient"]): study.SLOWER,
        (ROLLOUTS["temperature"], "filtered SFT"): "sft",
        (f"{ROLLOUTS['perturbed']}, greedily", "filtered SFT"): study.PLAIN,
    }


def _setting(spec: Spec) -> str:
    """Return what a sweep has chosen of a run, in words."""
    short = {"sigma": "sigma", "alpha": "alpha", "learning_rate": "rate"}
    return ", ".join(f"{words} {spec[name]:g}" for name, words in short.items() if name in spec)


def _cells(of: Records, asked: Measured) -> list[list[np.ndarray]]:
    return [[chances(of, study.CELLS[who, update], asked.at) for update in UPDATES] for who in ROLLOUTS]


def effects(of: Records, asked: Measured, resamples: int = 10_000) -> Effects:
    """Return the effects of rollouts (rows: perturbed - not) and updates (columns: policy gradient - ES)."""
    base = chances(of, study.BASE, asked.at)[0] if asked.against_base else None
    return coverage.effects(_cells(of, asked), base, asked.within, n_resamples=resamples)


def effects_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return a row per quantity: the effects with intervals, and what a two-way analysis of variance makes of them.

    The last row is of the norm of the displacement, its logarithm to base 2.
    """
    from pandas import DataFrame

    rows = []
    for asked in ASKED:
        found = effects(of, asked, _RESAMPLES)
        row = {"quantity": asked.words.removesuffix(", %"), "effect of the rollouts": asked.format(found.rows)}
        row |= {"effect of the update": asked.format(found.columns), "interaction": asked.format(found.interaction)}
        rows.append(row | _variance(_of_runs(of, asked)))
    norms = [[np.log2([r["update_norm"] for r in of[study.CELLS[w, u]]]) for u in UPDATES] for w in ROLLOUTS]
    of_norms = coverage.effects_of_runs(norms, n_resamples=_RESAMPLES)
    row = {"quantity": "norm, doublings"}
    named = {"effect of the rollouts": "rows", "effect of the update": "columns", "interaction": "interaction"}
    row |= {words: getattr(of_norms, part).format(percent=False, digits=2) for words, part in named.items()}
    rows.append(row | _variance(norms))
    return DataFrame(rows)


def _of_runs(of: Records, asked: Measured) -> list[list[np.ndarray]]:
    """Return one number per run of each cell."""
    solved = [[coverage.pass_at(cell, asked.within) for cell in row] for row in _cells(of, asked)]
    if not asked.against_base:
        return [[cell.mean(1) for cell in row] for row in solved]
    before = coverage.pass_at(chances(of, study.BASE, asked.at)[0], asked.within)
    return [[np.array([coverage.support(before, run).nscr for run in cell]) for cell in row] for row in solved]


def _variance(values: list[list[np.ndarray]]) -> dict[str, str]:
    """Return the shares of the variance over runs, percent: of the rollouts, the update, both jointly, and the rest."""
    names = {"rows": "rollouts", "columns": "update", "interaction": "both jointly", "rest": "the rest"}
    if np.ptp(np.concatenate([cell for row in values for cell in row])) == 0:  # a few steps may change nothing
        return {f"variance: {name}": "none" for name in names.values()} | {"p of rollouts, update": ""}
    found = stats.two_way(values)
    words = {f"variance: {name}": f"{100 * getattr(found, part).share:.0f}" for part, name in names.items()}
    return words | {"p of rollouts, update": f"{found.rows.p:.2g}, {found.columns.p:.2g}"}


# ---- one after the other


def parts(of: Records, group: str) -> list[tuple[Record, ...]]:
    """Return the records of the parts of each run of a group, first part first."""
    if group not in study.COMPOSED:
        return [(record,) for record in of[group]]
    first = {record["digest"]: record for record in of[study.COMPOSED[group][0]]}
    return [(first[record["spec"]["start"]["digests"][0]], record) for record in of[group]]


def total(of: Records, group: str, name: str) -> float:
    """Return the mean over runs of what all parts spent; name: of an axis of budgets."""
    return float(np.mean([sum(part["budget"][name] for part in each) for each in parts(of, group)]))


def composed_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return a row per order at as many FLOPs, and per first part alone: what was spent, and what the models solve."""
    from pandas import DataFrame

    rows = []
    halves = {"half of ES alone": "es first", "half of GRPO alone": "grpo first"}
    for words, group in (ORDERS | halves).items():
        steps = [part["spec"]["steps"] for part in parts(of, group)[0]]
        row: dict[str, Any] = {"trained by": words, "n": len(of[group]), "steps": " + ".join(map(str, steps))}
        row |= {"TFLOP": f"{total(of, group, 'forward_flops') / 1e12:.2f}"}
        row["core-seconds"] = f"{total(of, group, 'core_seconds'):.0f}"
        row |= {asked.words: asked.format(value(of, group, asked)) for asked in (*ASKED[:4], ASKED[5])}
        rows.append(row | {"null of counts": null_in_words(of)})
    return DataFrame(rows)


ALONG = {
    "right greedily, %": "validation_greedy",
    f"solved within {SOLVED_WITHIN} at temperature 1, %": f"reach_t1@{SOLVED_WITHIN}",
}
"""What is read along curves -> its field."""


def per_step(of: Records) -> dict[str, float]:
    """Return the core-seconds of a step of each arm: the mean over all of its runs that the orders are made of.

    Runs of one notebook share a machine with others of it, so that the same steps cost up to a quarter more in some of
    them: every step of an arm is charged alike.
    """
    spent: dict[str, list[float]] = {"es": [0.0, 0.0], "grpo": [0.0, 0.0]}
    for group in (*ORDERS.values(), "es"):
        for each in parts(of, group):
            for part in each:
                total_of = spent[part["spec"]["arm"]]
                total_of[0] += part["budget"]["core_seconds"]
                total_of[1] += part["spec"]["steps"]
    return {arm: seconds / steps for arm, (seconds, steps) in spent.items()}


def seconds_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return a row per order: what runs solve of the validation set when they have spent as many core-seconds.

    That is what a run in two parts has spent at its end, by `per_step`. ES alone is here the run of full length. Values
    lie on the line between the points of each run's curve, and intervals are over runs.
    """
    from pandas import DataFrame

    each_step = per_step(of)
    first, second = parts(of, "es then grpo")[0]
    seconds = sum(part["spec"]["steps"] * each_step[part["spec"]["arm"]] for part in (first, second))
    rows = []
    for words, group in (ORDERS | {"ES alone": "es"}).items():
        row: dict[str, Any] = {"trained by": words, "n": len(of[group]), "core-seconds": f"{seconds:.0f}"}
        for what, field in ALONG.items():
            values = [_at(each, field, seconds, each_step) for each in parts(of, group)]
            known = not np.isnan(values).any()
            row[what] = stats.bootstrap_mean(np.array(values), n_resamples=_RESAMPLES).format() if known else "ended"
        rows.append(row)
    return DataFrame(rows)


def _at(each: Sequence[Record], field: str, seconds: float, per_step: Mapping[str, float]) -> float:
    """Return a field of the curve of a run, all of its parts in a row, at so many core-seconds; NaN beyond its end."""
    spent: list[float] = []
    values: list[float] = []
    for part in each:
        before = spent[-1] if spent else 0.0
        spent += [before + step * per_step[part["spec"]["arm"]] for step in part["curve"]["step"]]
        values += part["curve"][field]
    return float(np.interp(seconds, spent, values)) if seconds <= spent[-1] * (1 + 1e-9) else np.nan


def along(of: Records, group: str, field: str, axis: str = "forward_flops") -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the curve of each part of a group: what all parts spent so far, and the mean over runs of a field."""
    curves, before = [], 0.0
    for part in zip(*parts(of, group), strict=True):
        spent = np.mean([record["curve"][axis] for record in part], axis=0)
        curves.append((before + spent, np.mean([record["curve"][field] for record in part], axis=0)))
        before += spent[-1]
    return curves


# ---- the answers


def answers(run: SimpleNamespace, of: Records) -> dict[str, str]:
    """Return question -> one sentence with its number, interval and n."""
    change, right, solved = ASKED[5], ASKED[0], ASKED[3]
    support, greedy = effects(of, change, _RESAMPLES), effects(of, right, _RESAMPLES)
    ess = [np.mean([r["rollouts"]["effective_share"] for r in of[g]]) for g in ("grpo_perturbed", "es_weighted")]
    found = {
        "Is it who writes, or who updates?": (
            f"Of two by two ways to train on as many completions, a policy gradient in the place of ES moves the net "
            f"change of support at temperature 1 by {change.format(support.columns)} and greedy accuracy by "
            f"{right.format(greedy.columns)} points. Perturbed copies as writers, in the place of the weights "
            f"themselves, move them by {change.format(support.rows)} and {right.format(greedy.rows)} points (n = "
            f"{support.rows.n} runs of each; effective sample size {100 * ess[0]:.0f} % for the gradient, "
            f"{100 * ess[1]:.0f} % for ES)."
        )
    }
    at_once, within = (
        "; ".join(f"{words} {asked.format(value(of, group, asked))}" for words, group in ORDERS.items())
        for asked in (right, solved)
    )
    found["Do the two compose?"] = (
        f"At as many FLOPs these are right greedily, in percent: {at_once}; and within {SOLVED_WITHIN} samples at "
        f"temperature 1 they solve, in percent: {within} (n = {len(of['es then grpo'])} runs of each)."
    )
    return found


def numbers(run: SimpleNamespace, of: Records) -> dict[str, tuple[Any, str]]:
    """Return macro -> value and format, for the paper."""
    change, right = effects(of, ASKED[5]), effects(of, ASKED[0])
    found = {
        "CovRolloutsChange": (ASKED[5].format(change.rows), ""),
        "CovUpdateChange": (ASKED[5].format(change.columns), ""),
        "CovRolloutsRight": (ASKED[0].format(right.rows), ""),
        "CovUpdateRight": (ASKED[0].format(right.columns), ""),
    }
    once = ASKED[2]
    alone = chances(of, "grpo", once.at)
    for macro, group in zip(("Es", "Grpo", "EsGrpo", "GrpoEs"), ORDERS.values(), strict=True):
        found[f"CovOrder{macro}"] = (100 * value(of, group, ASKED[0]).value, ".1f")
        if group in study.COMPOSED:
            behind = stats.crossed_bootstrap(chances(of, group, once.at), alone)
            found[f"CovBehind{macro}"] = (once.format(behind), "")
    return found


# ---- figures' looks


def look(who: str, update: str) -> dict[str, Any]:
    """Return how a cell is drawn: the colour of its update, filled where the weights themselves write."""
    arm = {"es": "es", "gradient": "grpo"}[update]
    color, perturbed = style.ARMS[arm].color, who == "perturbed"
    label = f"{UPDATES[update]}, {ROLLOUTS[who]} write"
    return {"color": color, "marker": "s" if perturbed else "o", "ls": "--" if perturbed else "-", "label": label,
            "mfc": "white" if perturbed else color}  # fmt: skip
