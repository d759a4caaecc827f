"""Notebook 05, stability: settings, groups of runs, results, tables and figures."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt

from evoalign_lib import arms, tiny
from evoalign_lib.analysis import curves, stats
from evoalign_lib.checks import require
from evoalign_study import loading, plots, series, style
from evoalign_study.kinds.decode import base_specs
from evoalign_study.loading import DECODINGS, Group, Groups, Records
from evoalign_study.records import Record, accuracy_matrix
from evoalign_study.results import Results, stated, under
from evoalign_study.runs import FACTORS, MEASURED, TUNED_SIZES, scales, sweep, where

NOTEBOOK = "05_stability"
ARMS = ("es", "grpo")
STEP = {"es": "alpha", "grpo": "learning_rate"}
"""Arm -> the setting that is its step size."""
CLAIMS = ("C8c", "C9", "C9c", "C10", "C11", "C33", "C33b", "C37", "C37b", "C38", *series.CLAIMS)
"""The claims that the notebook's runs decide."""
presets, TINY, SMOKE, FULL = scales(
    {
        "bases": (["A0", "A1", "A2"], ["A0", "A1"]),  # the sweeps tune on the first
        "retrain": [],  # groups that `force` runs again; empty: all of them
        **TUNED_SIZES,
        "es_prompts_per_step": (128, 8),
        "grpo_prompts_per_step": (16, 2),
        "seeds_match": (16, 3),  # of the tuned runs
        "seeds_compare": (8, 2),  # of all others except the maps
        "sweep_size": (12, 2),  # settings per arm
        # factors on the settings of sweep and maps; at scale smoke they make weights move in so few steps
        "sweep_factors": ({}, {"sigma": 10, "alpha": 10, "learning_rate": 10}, FACTORS),
        # arm -> what changes in its best setting where it is tuned again at full length (claim C8c); empty: none
        "again": ({"es": {"alpha": 0.0025, "prompts_per_step": 32, "steps": 832}, "grpo": {"beta": 0.04}}, {}, {}),
        "matched_mean": 0.26,  # mean accuracy at which spreads are compared, too
        "other_means": [0.20, 0.23, 0.25, 0.265, 0.27, 0.275],
        "map_seeds": (3, 1),  # seeds of the maps, besides the sweep's own
        "map_sigma": ([0.003, 0.01, 0.03], [0.003]),
        "map_alpha": ([0.0025, 0.005, 0.01], [0.0025]),
        "map_learning_rate": ([1e-4, 3e-4, 1e-3], [3e-5]),
        "map_beta": ([0.0, 0.04], [0.0]),
        "populations": ([8, 30, 128], [2, 4, 8]),  # sizes of ES
        "transfer_size": (4, 2),  # settings that other bases may choose from
        # unique problems; at scale full as many as are public
        "prompt_counts": ([2, 50, 200, 1000], [2, 8], [2, 50, 200]),
        "horizons": ([4, 16, 64], [4, 16], []),  # steps of thinking, which need the tiny world
        "horizon_base": "H0",
        "horizon_steps": ({"es": 52, "grpo": 125}, {"es": 2, "grpo": 2}),
        "few_points": (5, 3),  # points of the curves where problems are few or thinking is long
        "temperatures": [0.6],  # besides greedy decoding and 1: temperatures at which models are measured again
        "decoded": ([], ["prompts="], []),  # groups so measured, by part of their name: "best", "N=", "filler="
        **MEASURED,
    }
)


def groups(run: SimpleNamespace, of: Records) -> Groups:
    """Return the groups of runs by name; the first word of a name is the arm.

    An arm's sweep on the first base chooses its settings, so all its other groups wait for it. The "transfer" groups
    try settings on the other bases and choose those of the "best" groups.

    Raises ValueError as `check` does.
    """
    check(run)
    here, elsewhere, seeds, common = run.bases[:1], run.bases[1:], run.seeds_compare, loading.of_runs(vars(run))
    own = {arm: loading.own_settings(run, arm) | tuned(run, of, arm) for arm in ARMS}
    train = {arm: partial(Group, arm, settings=own[arm], after=(f"{arm} sweep",)) for arm in ARMS}
    found: dict[str, Any] = {f"{arm} sweep": specs for arm in ARMS for specs in sweep(run, arm).values()}
    found["base"] = base_specs(here, common, run.scale)
    for arm in ARMS:
        half = {"steps": own[arm]["steps"] // 2}
        pairs = product(*(vars(run)[f"map_{name}"] for name in arms.swept(arm)))
        cells = loading.scaled(run, [dict(zip(arms.swept(arm), pair, strict=True)) for pair in pairs])
        on_grid = [half | {"test_problems": 0} | cell for cell in cells]
        tried = [half | {"test_problems": 0} | choice for choice in contenders(run, of, arm)]
        found[arm] = train[arm](here, run.seeds_match, ledgers=here if arm == "es" else ())  # claim C38 replays them
        found[f"{arm} again"] = train[arm](here, run.seeds_match, changes=[run.again[arm]] if run.again else [])
        found[f"{arm} map"] = train[arm](here, map_seeds(run), changes=on_grid)
        found[f"{arm} elsewhere"] = train[arm](elsewhere, seeds)
        found[f"{arm} transfer"] = train[arm](elsewhere, [arms.SWEEP_SEED], changes=tried)
        for n in run.prompt_counts:
            change = half | {"curve_points": run.few_points, "unique_prompts": n}
            found[f"{arm} prompts={n}"] = train[arm](here, seeds, changes=[change])
        for n in run.horizons:
            change = _thinking(run, n) | {"steps": run.horizon_steps[arm]}
            found[f"{arm} filler={n}"] = train[arm]([run.horizon_base], seeds, changes=[change])
    for N in [N for N in run.populations if N != run.es_population_size]:
        found[f"es N={N}"] = train["es"](here, seeds, changes=[loading.of_size(own["es"], N)])
    for n in run.horizons:
        found[f"base filler={n}"] = base_specs([run.horizon_base], common | _thinking(run, n), run.scale)
    for arm in ARMS:
        after = (f"{arm} sweep", f"{arm} transfer")
        found[f"{arm} best"] = train[arm](elsewhere, seeds, changes=_winning(run, of, arm), after=after)
    again = [name for name in found if any(part in name for part in run.decoded)]
    return found | {"decodings": loading.decodings(run, of, again)} | series.groups(run, of)


def check(run: SimpleNamespace) -> None:
    """Raise ValueError, with the remedy, for settings that would fail only after hours or yield meaningless results."""
    seeds, sizes, own = (run.seeds, run.seeds_match, run.seeds_compare), run.populations, run.es_population_size
    require(1 not in seeds, "one seed per arm has no spread: set seeds, seeds_match and seeds_compare to 2 or more.")
    rising = len(sizes) == 3 and list(sizes) == sorted({*sizes, own})
    require(rising, f"populations={sizes} must be three in rising order that include the tuned {own}.")
    members = [round(run.es_steps * own / N) * N for N in sizes]
    remedy = "pass sizes for which these are about equal."
    require(max(members) <= 1.01 * min(members), f"populations={sizes} evaluate {members} members: {remedy}")
    for name in ("prompt_counts", "horizons"):
        given = vars(run)[name]
        require(len(given) != 1, f"{name}={given}: one value allows no comparison. Pass two or more, or none.")
    in_tiny_world = run.bases[0] in tiny.BASES
    require(in_tiny_world or not run.horizons, f"horizons={run.horizons} need a tiny base: pass none.")


def tuned(run: SimpleNamespace, of: Records, arm: str) -> dict[str, float]:
    """Return the best setting of an arm's sweep; until its records are loaded, the first one that it tries."""
    return loading.ranked_choices(run, arm, of.get(f"{arm} sweep"))[0]


def contenders(run: SimpleNamespace, of: Records, arm: str) -> list[dict[str, float]]:
    """Return an arm's best setting at each of its `transfer_size` best step sizes, in the order of their values.

    The tuned setting is always among them.
    """
    best: dict[float, dict[str, float]] = {}
    for setting in loading.ranked_choices(run, arm, of.get(f"{arm} sweep")):
        best.setdefault(setting[STEP[arm]], setting)
    return sorted(list(best.values())[: run.transfer_size], key=lambda setting: tuple(setting.values()))


def tries(run: SimpleNamespace, of: Records) -> dict[tuple[str, str], list[tuple[float, dict[str, float]]]]:
    """Return (arm, other base) -> score and setting of each contender in one short run there, best first."""
    cells = product(ARMS, run.bases[1:])
    return {(arm, base): arms.ranked(where(of[f"{arm} transfer"], base=base)) for arm, base in cells}


def winners(run: SimpleNamespace, of: Records) -> dict[tuple[str, str], dict[str, float]]:
    """Return (arm, other base) -> the contender that wins there."""
    return {cell: ranked[0][1] for cell, ranked in tries(run, of).items()}


def map_seeds(run: SimpleNamespace) -> list[int]:
    """Return the seeds of the maps: the sweep's own, whose runs they share, and a few more."""
    return [arms.SWEEP_SEED, *range(run.map_seeds)]


def _thinking(run: SimpleNamespace, steps: int) -> dict[str, Any]:
    """Return the settings that give so many steps of thinking before the answer."""
    return {"filler_steps": steps, "max_completion_length": steps + 24, "curve_points": run.few_points}


def _winning(run: SimpleNamespace, of: Records, arm: str) -> dict[str, list[dict[str, float]]]:
    """Return other base -> the setting that won there; empty if that is the tuned one, whose runs exist already.

    Until the contenders have run, the tuned one stands for every winner, so that plans count the most runs possible.
    """
    own = tuned(run, of, arm)
    if f"{arm} transfer" not in of:
        return {base: [own] for base in run.bases[1:]}
    return {base: [won] if won != own else [] for (of_arm, base), won in winners(run, of).items() if of_arm == arm}


LABELS = {arm: look.label for arm, look in style.ARMS.items()}
"""Arm -> its name in tables and legends."""


# ---- what is measured


def outcome(record: Record) -> str:
    """Classify how a run ended, by its greedy validation accuracy: "failed", "fell back" or "kept".

    A run failed if its last point is not above its first, which is the base; it fell back if it ended with less than
    half of its largest gain.
    """
    line = np.array(record["curve"]["validation_greedy"])
    gain = line - line[0]
    return "failed" if gain[-1] <= 0 else "fell back" if gain[-1] < gain.max() / 2 else "kept"


def failed(found: Sequence[Record]) -> int:
    """Return how many runs failed."""
    return sum(outcome(r) == "failed" for r in found)


def greedy_curves(runs: Sequence[Record], decoding: str = "greedy") -> np.ndarray:
    """Return the validation accuracy of runs along training: (runs, points)."""
    return np.array([r["curve"][f"validation_{decoding}"] for r in runs])


def scores(of: Records, group: str, kind: str, at: str | float) -> np.ndarray | None:
    """Return one score per run of a group, or None if their mean never reaches the accuracy.

    kind and at: "test" and a decoding, or "validation" and "greedy", for accuracy at the end; "best" and "greedy", for
    the highest validation accuracy; or "at mean" and an accuracy, for validation accuracy at the point where the runs'
    mean first reaches it.
    """
    if kind == "test":
        return accuracy_matrix(of[group], str(at)).mean(axis=1)
    lines = greedy_curves(of[group])
    if kind in ("validation", "best"):
        return lines[:, -1] if kind == "validation" else lines.max(axis=1)
    return curves.scores_at_mean(lines, float(at))[1] if lines.mean(axis=0).max() >= float(at) else None


def spread_ratio(es: np.ndarray | None, grpo: np.ndarray | None) -> stats.Interval | None:
    """Return the ratio of the arms' standard deviations, ES over GRPO.

    None if an arm has no scores, or if there is no interval because runs are too few or do not differ.
    """
    if es is None or grpo is None:
        return None
    try:
        log = stats.log_std_ratio(es, grpo)
    except ValueError:
        return None
    return stats.Interval(*np.exp([log.value, log.low, log.high]).tolist(), log.n, log.level)


def drawdowns(of: Records, arm: str, decoding: str = "greedy") -> np.ndarray:
    """Return the largest drawdown of each tuned run's validation accuracy: (seeds,)."""
    return curves.largest_drawdown(greedy_curves(of[arm], decoding))


def high_points(of: Records) -> dict[str, np.ndarray]:
    """Return arm -> the points at which its mean curve over seeds is in the upper half of its gain."""
    means = {arm: greedy_curves(of[arm]).mean(axis=0) for arm in ARMS}
    return {arm: np.flatnonzero(mean >= (mean[0] + mean[-1]) / 2) for arm, mean in means.items()}


def thinned(of: Records, arm: str, draws: int = 500) -> np.ndarray:
    """Return each run's mean largest drawdown over random sets of high points, of one size for both arms: (seeds,)."""
    high = high_points(of)
    rng, fewest = np.random.default_rng(0), min(map(len, high.values()))
    chosen = [np.sort(rng.choice(high[arm], fewest, replace=False)) for _ in range(draws)]
    return np.array([np.mean([curves.largest_drawdown(path[at]) for at in chosen]) for path in greedy_curves(of[arm])])


def last_high(of: Records, arm: str) -> np.ndarray:
    """Return each run's largest drawdown over as many last points as the arm with fewer high ones has: (seeds,)."""
    fewest = min(map(len, high_points(of).values()))
    return np.array([curves.largest_drawdown(path[-fewest:]) for path in greedy_curves(of[arm])])


def never_falling(run: SimpleNamespace, of: Records, arm: str, samples: int = 4, draws: int = 2000) -> np.ndarray:
    """Return the largest drawdowns that sampling noise gives curves at temperature 1 that never fall: (draws,)."""
    share, of_test = accuracy_matrix(of[arm], "t1"), 16  # samples of each test problem
    variance = (share * (1 - share)).mean() * of_test / (of_test - 1) / (samples * run.validation_problems)
    mean = np.maximum.accumulate(greedy_curves(of[arm], "t1").mean(axis=0))
    noisy = mean + np.sqrt(variance) * np.random.default_rng(0).standard_normal((draws, len(mean)))
    return np.array([curves.largest_drawdown(line) for line in noisy])


def map_cells(of: Records, arm: str) -> pd.DataFrame:
    """Return a row per setting of an arm's map: mean and range of the score, numbers of failed and all runs."""
    runs = frame(of, [f"{arm} map"])
    columns = {"mean": ("score", "mean"), "low": ("score", "min"), "high": ("score", "max")}
    columns |= {"failed": ("outcome", lambda ended: (ended == "failed").sum()), "runs": ("score", "size")}
    return runs.groupby(list(arms.swept(arm))).agg(**columns).reset_index()


def full_runs(run: SimpleNamespace, of: Records, arm: str, base: str, which: str) -> list[Record]:
    """Return full runs on another base; which: "shared" for the tuned setting, "best" for the best setting there."""
    moved = which == "best" and winners(run, of)[arm, base] != tuned(run, of, arm)
    return where(of[f"{arm} {'best' if moved else 'elsewhere'}"], base=base)


def regret(run: SimpleNamespace, of: Records, arm: str, bases: Sequence[str]) -> np.ndarray:
    """Return accuracy with the best setting minus that with the shared one, mean over bases: (seeds, problems)."""
    cells = [full_runs(run, of, arm, base, which) for which in ("best", "shared") for base in bases]
    best, shared = np.split(together(cells), 2)
    return (best - shared).mean(axis=0)


def ties(run: SimpleNamespace, of: Records) -> list[tuple[str, str]]:
    """Return (arm, base) wherever the shared setting tied with the winner and lost by the order of settings."""
    own = {arm: tuned(run, of, arm) for arm in ARMS}
    return [cell for cell, ((best, _), *others) in tries(run, of).items() if (best, own[cell[0]]) in others]


def of_sizes(run: SimpleNamespace) -> dict[int, str]:
    """Return population -> the group of its runs."""
    return {N: "es" if N == run.es_population_size else f"es N={N}" for N in run.populations}


def together(found: Sequence[Sequence[Record]]) -> np.ndarray:
    """Return the accuracies of several groups of runs on the seeds that all groups have: (groups, seeds, problems)."""
    matrices = [accuracy_matrix(each) for each in found]
    return np.array([matrix[: min(map(len, matrices))] for matrix in matrices])


def contrast(of: Records, field: str, levels: Sequence[int], weights: Sequence[float]) -> dict[str, np.ndarray]:
    """Return arm -> a weighted sum of greedy test accuracy over the levels of a field: (seeds, problems)."""
    cells = {arm: together([of[f"{arm} {field}={level}"] for level in levels]) for arm in ARMS}
    return {arm: np.tensordot(weights, matrices, axes=1) for arm, matrices in cells.items()}


def slope_weights(levels: Sequence[float]) -> np.ndarray:
    """Return the weights that turn accuracies at these levels into their least-squares slope over log10(level)."""
    x = np.log10(levels) - np.mean(np.log10(levels))
    return x / (x @ x)


def change_of_gain(of: Records, first: int, to: int) -> dict[str, np.ndarray]:
    """Return arm -> how its gain over the base changes from the first horizon to another: (seeds, problems)."""
    bases = [accuracy_matrix(of[f"base filler={length}"])[0] for length in (first, to)]
    change = contrast(of, "filler", [first, to], [-1.0, 1.0])
    return {arm: matrix - (bases[1] - bases[0]) for arm, matrix in change.items()}


def compared(of_arm: Mapping[str, np.ndarray], one: str, other: str) -> dict[str, stats.Interval]:
    """Return the interval of each arm's values, given as (seeds, problems), and of the "difference" one - other."""
    found = {arm: stats.crossed_bootstrap(matrix) for arm, matrix in of_arm.items()}
    return found | {"difference": stats.crossed_bootstrap(of_arm[one], of_arm[other])}


def slopes(of: Records, counts: Sequence[int]) -> dict[str, stats.Interval]:
    """Return each arm's slope of accuracy over log10(unique problems), and GRPO - ES; empty below two counts."""
    return compared(contrast(of, "prompts", counts, slope_weights(counts)), "grpo", "es") if len(counts) > 1 else {}


# ---- results


def results(run: SimpleNamespace, of: Records) -> Results:
    """Return by name the settings and what answers, tables and paper quote; results without runs are left out.

    Accuracies are in %; intervals are shares, but those of a "spread" are ratios. "regret",
    "regret if ties keep", "slope" and "change to" another horizon exist for each arm and for the "difference".
    """
    elsewhere = run.bases[1:]
    found: Results = vars(run) | {"seeds": len(of["es"]), "map seeds": len(map_seeds(run))}
    found |= {"level": 100 * run.matched_mean}
    for arm in ARMS:
        cells = map_cells(of, arm)
        found |= {f"{arm} failed": failed(of[arm])}
        found |= {f"{arm} map {name}": int(cells[name].sum()) for name in ("failed", "runs")}
        near = int((cells["mean"] > cells["mean"].max() - 2).sum())
        found |= {f"{arm} map settings": len(cells), f"{arm} map near": near}
        for end, count in zip(("fewest", "most"), run.prompt_counts[:1] + run.prompt_counts[-1:], strict=False):
            right = 100 * accuracy_matrix(of[f"{arm} prompts={count}"]).mean()
            found |= {f"{end} prompts": count, f"{arm} {end} prompts": right}
    places: dict[str, tuple] = {"end": ("test", "greedy"), "best": ("best", "greedy")}
    for name, place in (places | {"matched": ("at mean", run.matched_mean)}).items():
        found[f"spread {name}"] = spread_ratio(*(scores(of, arm, *place) for arm in ARMS))
    for name, place in places.items() if run.again else ():
        found[f"spread {name} again"] = spread_ratio(*(scores(of, f"{arm} again", *place) for arm in ARMS))
    falls: dict[str, Any] = {f"drawdown {d}": partial(drawdowns, decoding=d) for d in DECODINGS}
    if min(map(len, high_points(of).values())) > 1:
        falls |= {"drawdown sets": thinned, "drawdown last": last_high}  # on equally many high points of both arms
    for name, fall in falls.items():
        found[name] = stats.stratified_bootstrap([fall(of, "grpo")], [fall(of, "es")])
    for place, (N, group) in zip(("small", "middle", "large"), of_sizes(run).items(), strict=True):
        right = 100 * accuracy_matrix(of[group]).mean()
        found |= {f"{place} population": N, f"{place} population greedy": right}
    sides: dict[str, dict[str, stats.Interval]] = {"slope": slopes(of, run.prompt_counts)}
    if elsewhere:
        sides["regret"] = compared({arm: regret(run, of, arm, elsewhere) for arm in ARMS}, "grpo", "es")
        if tied := ties(run, of):
            kept = {arm: [regret(run, of, arm, [b]) * ((arm, b) not in tied) for b in elsewhere] for arm in ARMS}
            means = {arm: np.mean(each, axis=0) for arm, each in kept.items()}
            sides["regret if ties keep"] = compared(means, "grpo", "es")
    for to in run.horizons[1:]:
        sides[f"change to {to}"] = compared(change_of_gain(of, run.horizons[0], to), "es", "grpo")
    found |= series.results(of)
    return found | {f"{name} {side}": x for name, each in sides.items() for side, x in each.items()}


# ---- tables


def sides_rows(found: Results, names: Mapping[str, str], one: str, other: str) -> pd.DataFrame:
    """Return a row per available quantity, in points: each arm's interval and that of the difference one - other.

    names: label of the row -> name in the results.
    """
    rows = []
    for quantity, name in names.items():
        if (apart := found.get(f"{name} difference")) is not None:
            row = {"quantity, points [95 %]": quantity} | {LABELS[arm]: stated(found[f"{name} {arm}"]) for arm in ARMS}
            rows.append(row | {f"{LABELS[one]} - {LABELS[other]}": stated(apart), "seeds": apart.n})
    return pd.DataFrame(rows)


_FIELDS = "arm base seed sigma alpha learning_rate beta population_size unique_prompts filler_steps".split()


def frame(of: Records, groups: Iterable[str], **labels: Any) -> pd.DataFrame:
    """Return a row per run: the fields of its spec, how it ended and, in %, its score and its test accuracy.

    The score is the one by which sweeps choose (`arms.ranked`).
    """
    rows = []
    for r in (r for group in groups for r in of[group]):
        tested = {decoding: 100 * r["test"][decoding] for decoding in DECODINGS} if "test" in r else {}
        measured = {"outcome": outcome(r), "score": 100 * arms.ranked([r])[0][0], "reward": r["curve"]["reward"][-1]}
        rows.append({name: r["spec"].get(name) for name in _FIELDS} | measured | tested | labels)
    return pd.DataFrame(rows)


def tested(found: Sequence[Record], start: Record | None = None) -> dict[str, Any]:
    """Return table cells of runs: test accuracy, or its gain over the model `start`, then failures and seeds."""

    def interval(decoding: str) -> str:
        baseline = None if start is None else accuracy_matrix([start], decoding)[0]
        return stated(stats.crossed_bootstrap(accuracy_matrix(found, decoding), baseline))

    head = "{}, % [95 %]" if start is None else "{}, gain [95 %]"
    return under(head, interval) | {"failed": failed(found), "seeds": len(found)}


def setting_in_words(setting: Mapping[str, float]) -> str:
    """Return a setting in words, such as "sigma 0.01, alpha 0.005"."""
    return ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in setting.items())


def ratio_in_words(es: np.ndarray | None, grpo: np.ndarray | None) -> tuple[str, str]:
    """Return the `spread_ratio` of two arms' scores and its Brown-Forsythe p-value, or why there is none."""
    if es is None or grpo is None:
        return "an arm never gets there", "none"
    if (ratio := spread_ratio(es, grpo)) is None:
        return "no interval: too few runs, or no spread", "none"
    return stated(ratio, ".2f"), f"{stats.brown_forsythe(es, grpo):.2g}"


# ---- figures: each returns the figure and the data that it plots


def figure_seeds(run: SimpleNamespace, of: Records) -> tuple[plt.Figure, pd.DataFrame]:
    """Draw mean and range (lowest to highest) of the tuned runs, spread against mean, and each run's test accuracy."""
    lines = []
    for r in (r for arm in ARMS for r in of[arm]):
        line = {"completions": r["curve"]["completions"], "accuracy": 100 * np.array(r["curve"]["validation_greedy"])}
        lines.append(pd.DataFrame(line).assign(arm=r["spec"]["arm"], seed=r["spec"]["seed"], panel="curves"))
    each, ends = pd.concat(lines, ignore_index=True), frame(of, ARMS, panel="test")
    points = each.groupby(["arm", "completions"])["accuracy"].agg(["mean", "std", "min", "max"]).reset_index()
    fig, axes = plt.subplots(1, 3, figsize=(style.PAGE, 2.5), width_ratios=[1.2, 1.1, 0.9])
    looks = {arm: plots.look(arm, markevery=0.15) for arm in ARMS}
    ranged = points[points["completions"] > 0].rename(columns={"min": "low", "max": "high"})
    plots.lines(axes[0], ranged, "completions", "mean", "arm", looks)
    plots.lines(axes[1], points, "mean", "std", "arm", {arm: plots.look(arm, lw=0.5) for arm in ARMS})
    _draw_ends(axes[2], ends)
    axes[0].set(xscale="log", xlabel="completions", ylabel="greedy validation accuracy, %")
    axes[1].axvline(100 * run.matched_mean, **plots.NULL)
    axes[1].set(xlabel="mean over seeds, %", ylabel="std over seeds, points")
    axes[2].set_ylabel("test accuracy, %")
    return _with_legend(fig, len(of["es"])), pd.concat([each, points.assign(panel="spread"), ends])


def figure_drawdowns(of: Records) -> tuple[plt.Figure, pd.DataFrame]:
    """Draw each arm's worst run below its running maximum, and every run's largest drawdown, in points."""
    falls = {d: 100 * np.concatenate([drawdowns(of, arm, d) for arm in ARMS]) for d in DECODINGS}
    fell, worst = frame(of, ARMS, panel="drawdown").assign(**falls), []
    for arm in ARMS:
        curve = of[arm][int(drawdowns(of, arm).argmax())]["curve"]
        line = 100 * np.array(curve["validation_greedy"])
        one = {"arm": arm, "completions": curve["completions"], "accuracy": line}
        worst.append(pd.DataFrame(one | {"maximum": np.maximum.accumulate(line), "panel": "worst run"}))
    fig, axes = plt.subplots(1, 2, figsize=(style.PAGE, 2.4), width_ratios=[1.4, 1])
    shaded = pd.concat(worst).query("completions > 0")  # 0 has no place on a logarithmic axis
    shaded = shaded.assign(low=shaded["accuracy"], high=shaded["maximum"])
    plots.lines(axes[0], shaded, "completions", "accuracy", "arm", {arm: plots.look(arm) for arm in ARMS})
    _draw_ends(axes[1], fell)
    axes[0].set(xscale="log", xlabel="completions", ylabel="greedy validation accuracy, %")
    axes[1].set(ylim=(0, None), ylabel="largest drawdown, points")
    return _with_legend(fig, len(of["es"])), pd.concat([*worst, fell])


def _draw_ends(ax: plt.Axes, runs: pd.DataFrame) -> None:
    """Draw runs as dots, both arms side by side for each decoding."""
    sides = {style.STROKES[d].label: list(runs.assign(shown=runs[d]).groupby("arm")) for d in DECODINGS}
    plots.strip(ax, sides, "shown")


def _with_legend(fig: plt.Figure, n: int, base: bool = False) -> plt.Figure:
    style.legend(fig, dict.fromkeys(ARMS, n) | ({"base": None} if base else {}), decodings=())
    return fig


def _draw_levels(ax: plt.Axes, runs: pd.DataFrame, field: str, column: str) -> None:
    """Draw runs against the levels of a field, the two arms slightly apart, with a line through the means."""
    levels = {f"{level:,g}": list(part.groupby("arm")) for level, part in runs.groupby(field)}
    plots.strip(ax, levels, column, 0.2)
    for arm, means in runs.groupby(["arm", field])[column].mean().groupby("arm"):
        ax.plot(range(len(means)), means, color=style.ARMS[arm].color, lw=0.8)


def figure_prompts(run: SimpleNamespace, of: Records) -> tuple[plt.Figure, pd.DataFrame]:
    """Draw every run's greedy test accuracy and training reward against its number of unique problems."""
    runs = frame(of, [f"{arm} prompts={n}" for arm in ARMS for n in run.prompt_counts])
    fig, axes = plt.subplots(1, 2, figsize=(style.PAGE, 2.5))
    looks = {"greedy": ("greedy test accuracy, %", "other problems"), "reward": ("reward", "own problems, last step")}
    for ax, (column, (label, title)) in zip(axes, looks.items(), strict=True):
        _draw_levels(ax, runs, "unique_prompts", column)
        ax.set(xlabel="unique problems", ylabel=label, title=title)
    axes[0].axhline(100 * of["base"][0]["test"]["greedy"], **plots.BASE)
    return _with_legend(fig, int(runs.groupby(["arm", "unique_prompts"]).size().min()), base=True), runs
