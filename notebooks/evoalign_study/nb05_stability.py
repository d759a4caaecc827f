"""Notebook 05, stability: its presets, groups of runs, measures, and the numbers that the paper quotes.

Its answers and tables are in `study.views.stability`, its figures in `study.views.stability_figures`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from evoalign_lib import arms, tiny
from evoalign_lib.analysis import curves, stats
from evoalign_lib.analysis.stats import Interval
from evoalign_study.kinds.decode import base_specs
from evoalign_study.kinds.train import sweep_specs
from evoalign_study.loading import (
    DECODINGS,
    Group,
    Groups,
    Records,
    decodings,
    of_runs,
    of_size,
    own_settings,
    ranked_choices,
    scaled,
    swept_choices,
)
from evoalign_study.records import Record, accuracy_matrix

if TYPE_CHECKING:
    from pandas import DataFrame

NOTEBOOK = "05_stability"
ARMS = ("es", "grpo")
STEP = {"es": "alpha", "grpo": "learning_rate"}
"""The step size of an arm."""
CLAIMS = ("C8", "C9", "C9b", "C10", "C11", "C33", "C33b", "C37", "C37b", "C38")
"""The claims that the notebook's runs decide."""
AT_END = ("test", "greedy")
"""Where C8 measures the spread at the end (`scores`)."""
TINY = {
    "bases": ["A0", "A1", "A2"],  # the first is tuned on; three at most
    "retrain": [],  # groups that `force` makes anew; none: all
    "es_population_size": 30,
    "es_prompts_per_step": 128,
    "es_steps": 208,
    "grpo_num_generations": 16,
    "grpo_prompts_per_step": 16,
    "grpo_steps": 250,
    "seeds_match": 16,  # of the tuned runs
    "seeds_compare": 8,  # of all others but the maps
    "sweep_size": 12,  # settings an arm
    "sweep_factors": {},  # setting -> what multiplies it in sweep and maps, which were made for tiny models
    "matched_mean": 0.26,  # at which section 3 compares spreads
    "other_means": [0.20, 0.23, 0.25, 0.265, 0.27, 0.275],
    "map_seeds": 3,  # of the maps in section 5, besides the sweep's own
    "map_sigma": [0.003, 0.01, 0.03],
    "map_alpha": [0.0025, 0.005, 0.01],
    "map_learning_rate": [1e-4, 3e-4, 1e-3],
    "map_beta": [0.0, 0.04],
    "populations": [8, 30, 128],  # of section 6
    "transfer_size": 4,  # settings that other bases may choose from in section 7
    "prompt_counts": [2, 50, 200, 1000],  # of section 8
    "horizons": [4, 16, 64],  # steps of thinking, of section 9
    "horizon_base": "H0",
    "horizon_steps": {"es": 52, "grpo": 125},
    "few_points": 5,  # of the curves of sections 8 and 9
    "temperatures": [0.6],  # between greedy decoding and 1, at which models are measured again
    "decoded": [],  # groups whose names have one of these are: "best", "N=", "prompts=", "filler="; none yet
    "max_completion_length": tiny.MAX_COMPLETION_LENGTH,
    "validation_problems": 512,
    "test_problems": 2000,
    "curve_points": 25,
    "curve_spacing": "log",
}
SMOKE = TINY | {
    "bases": ["A0", "A1"],
    "es_population_size": 4,
    "es_prompts_per_step": 8,
    "es_steps": 4,
    "grpo_num_generations": 4,
    "grpo_prompts_per_step": 2,
    "grpo_steps": 4,
    "seeds_match": 3,
    "seeds_compare": 2,
    "sweep_size": 2,
    "sweep_factors": {"sigma": 10, "alpha": 10, "learning_rate": 10},  # so that weights move in so few steps
    "map_seeds": 1,
    "map_sigma": [0.003],
    "map_alpha": [0.0025],
    "map_learning_rate": [3e-5],
    "map_beta": [0.0],
    "populations": [2, 4, 8],
    "transfer_size": 2,
    "prompt_counts": [2, 8],
    "horizons": [4, 16],
    "horizon_steps": {"es": 2, "grpo": 2},
    "few_points": 3,
    "decoded": ["prompts="],
    "validation_problems": 16,
    "test_problems": 32,
    "curve_points": 3,
}
FULL = TINY | {
    "sweep_factors": {"sigma": 0.1, "alpha": 0.05, "learning_rate": 0.01, "beta": 0.1},
    "prompt_counts": [2, 50, 200],  # as many as are public
    "horizons": [],  # they need the tiny world
    "max_completion_length": 1024,
    "micro_batch": 16,  # completions in a backward pass
    "tensor_parallel": 1,  # GPUs that share a copy of the model
}


def presets(model: str = "") -> dict[str, dict[str, Any]]:
    """Return scale -> settings; model: that of scale full, empty for the scale's own."""
    return {"tiny": TINY, "smoke": SMOKE, "full": FULL | {"bases": [model or "Qwen/Qwen2.5-0.5B-Instruct"]}}


def groups(run: SimpleNamespace, of: Records) -> Groups:
    """Return the runs by name; the first word is the arm.

    An arm's sweep on the first base chooses its settings, so that all its other groups come after it. The runs that try
    settings on other bases, "transfer", choose those of "best".

    Raises ValueError as `check`.
    """
    check(run)
    here, elsewhere, seeds, common = run.bases[:1], run.bases[1:], run.seeds_compare, of_runs(vars(run))
    own = {arm: own_settings(run, arm) | tuned(run, of, arm) for arm in ARMS}
    train = {arm: partial(Group, arm, settings=own[arm], after=(f"{arm} sweep",)) for arm in ARMS}
    found: dict[str, Any] = {
        f"{arm} sweep": sweep_specs(arm, here[0], own_settings(run, arm), run.scale, swept_choices(run, arm))
        for arm in ARMS
    }
    found["base"] = base_specs(here, common, run.scale)
    for arm in ARMS:
        half = {"steps": own[arm]["steps"] // 2}
        on_grid = [half | {"test_problems": 0} | cell for cell in _grid(run, arm)]
        tried = [half | {"test_problems": 0} | choice for choice in contenders(run, of, arm)]
        ledgers = here if arm == "es" else ()  # section 10 replays one
        found[arm] = train[arm](here, run.seeds_match, ledgers=ledgers)
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
        found[f"es N={N}"] = train["es"](here, seeds, changes=[of_size(own["es"], N)])
    for n in run.horizons:
        found[f"base filler={n}"] = base_specs([run.horizon_base], common | _thinking(run, n), run.scale)
    for arm in ARMS:
        after = (f"{arm} sweep", f"{arm} transfer")
        found[f"{arm} best"] = train[arm](elsewhere, seeds, changes=_winning(run, of, arm), after=after)
    again = [name for name in found if any(part in name for part in run.decoded)]
    return found | {"decodings": decodings(run, of, again)}


def check(run: SimpleNamespace) -> None:
    """Raise ValueError, with the remedy, for settings that fail only after hours, or mean nothing in the end."""
    members = [round(run.es_steps * run.es_population_size / N) * N for N in run.populations]
    if 1 in (run.seeds, run.seeds_match, run.seeds_compare):
        raise ValueError("one seed per arm has no spread: take 2 or more for seeds, seeds_match and seeds_compare.")
    if len(members) != 3 or list(run.populations) != sorted({*run.populations, run.es_population_size}):
        raise ValueError(
            f"populations={run.populations}: take three in rising order, the tuned {run.es_population_size} among them."
        )
    if max(members) > 1.01 * min(members):
        raise ValueError(
            f"populations={run.populations} evaluate {members} members: take sizes at which these are about equal."
        )
    for what, levels in (("prompt_counts", run.prompt_counts), ("horizons", run.horizons)):
        if len(levels) == 1:
            raise ValueError(f"{what}={levels}: one value makes no comparison, take two or more, or none.")
    if run.horizons and run.bases[0] not in tiny.BASES:
        raise ValueError(f"horizons={run.horizons} are for tiny bases: take none.")
    if len(run.bases) > 3:
        raise ValueError(f"bases={run.bases}: take at most three, figures have no look for a fourth.")


def tuned(run: SimpleNamespace, of: Records, arm: str) -> dict[str, float]:
    """Return the best setting of an arm's sweep; before its records are there, the first one."""
    return ranked_choices(run, arm, of.get(f"{arm} sweep"))[0]


def contenders(run: SimpleNamespace, of: Records, arm: str) -> list[dict[str, float]]:
    """Return the best setting of the sweep at each of `transfer_size` step sizes, in the order of their values.

    The step sizes are those of the best settings, so that the tuned setting is among them.
    """
    best: dict[float, dict[str, float]] = {}
    for setting in ranked_choices(run, arm, of.get(f"{arm} sweep")):
        best.setdefault(setting[STEP[arm]], setting)
    return sorted(list(best.values())[: run.transfer_size], key=lambda setting: tuple(setting.values()))


def winners(run: SimpleNamespace, of: Records) -> dict[tuple[str, str], dict[str, float]]:
    """Return (arm, other base) -> the contender that wins there, by one short run each."""
    return {(arm, base): arms.ranked(tries(of, arm, base))[0][1] for arm in ARMS for base in run.bases[1:]}


def tries(of: Records, arm: str, base: str) -> list[Record]:
    """Return the runs of an arm's contenders on another base."""
    return [r for r in of[f"{arm} transfer"] if r["spec"]["base"] == base]


def map_seeds(run: SimpleNamespace) -> list[int]:
    """Return the seeds of the maps: the sweep's, whose runs they share, and a few more."""
    return [arms.SWEEP_SEED, *range(run.map_seeds)]


def _grid(run: SimpleNamespace, arm: str) -> list[dict[str, float]]:
    """Return the settings of an arm's map."""
    names = arms.swept(arm)
    values = product(*(vars(run)[f"map_{name}"] for name in names))
    return scaled(run, [dict(zip(names, pair, strict=True)) for pair in values])


def _thinking(run: SimpleNamespace, steps: int) -> dict[str, Any]:
    """Return what so many steps of thinking before the answer change."""
    return {"filler_steps": steps, "max_completion_length": steps + 24, "curve_points": run.few_points}


def _winning(run: SimpleNamespace, of: Records, arm: str) -> dict[str, list[dict[str, float]]]:
    """Return other base -> the setting that won there; none where that is the tuned one, whose runs are there already.

    Before the contenders have run, it is the tuned one everywhere: so many runs there are at most.
    """
    own = tuned(run, of, arm)
    if f"{arm} transfer" not in of:
        return {base: [own] for base in run.bases[1:]}
    return {base: [won] if won != own else [] for (of_arm, base), won in winners(run, of).items() if of_arm == arm}


def work(specs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, tuple[int, int]]:
    """Return arm -> runs, and completions drawn in their training; specs: of groups, by name."""
    found = {}
    for arm in ARMS:
        own = [spec for group, each in specs.items() if group.split()[0] == arm for spec in each]
        drawn = [s["steps"] * s["prompts_per_step"] * (s.get("population_size") or s["num_generations"]) for s in own]
        found[arm] = (len(own), sum(drawn))
    return found


# ---- spread over seeds


def outcome(record: Record) -> str:
    """Say how a run ended, by its greedy validation accuracy: "failed", "fell back" or "kept".

    It failed if the last point is not above the first, its base; it fell back if it kept less than half of the largest
    gain that it had.
    """
    line = np.array(record["curve"]["validation_greedy"])
    gain = line - line[0]
    return "failed" if gain[-1] <= 0 else "fell back" if gain[-1] < gain.max() / 2 else "kept"


def failed(found: Sequence[Record]) -> int:
    """Return how many runs failed."""
    return sum(outcome(r) == "failed" for r in found)


Measure = tuple[str, str | float]
"""Where a spread is measured: ("test", decoding), ("validation", "greedy") at the end, or ("at mean", accuracy)."""


def scores(run: SimpleNamespace, of: Records, arm: str) -> dict[Measure, np.ndarray]:
    """Return one score per tuned run by what is measured; a mean over seeds that the arm never reaches is missing."""
    found: dict[Measure, np.ndarray] = {
        ("test", decoding): accuracy_matrix(of[arm], decoding).mean(axis=1) for decoding in DECODINGS
    }
    greedy = np.array([r["curve"]["validation_greedy"] for r in of[arm]])
    found["validation", "greedy"] = greedy[:, -1]
    means = sorted({*run.other_means, run.matched_mean})
    reached = [mean for mean in means if greedy.mean(axis=0).max() >= mean]
    return found | {("at mean", mean): curves.scores_at_mean(greedy, mean)[1] for mean in reached}


def log_ratio(by_arm: Mapping[str, Mapping[Measure, np.ndarray]], measure: Measure) -> Interval | None:
    """Return ln of the standard deviation of ES over that of GRPO.

    None where an arm never gets there, or where there is no interval: too few runs, or runs that do not differ.
    """
    if any(measure not in by_arm[arm] for arm in ARMS):
        return None
    try:
        return stats.log_std_ratio(*(by_arm[arm][measure] for arm in ARMS))
    except ValueError:
        return None


# ---- how far curves fall back


def drawdowns(of: Records, arm: str, decoding: str) -> np.ndarray:
    """Return the largest drawdown of each tuned run's validation accuracy: (seeds,)."""
    return curves.largest_drawdown([r["curve"][f"validation_{decoding}"] for r in of[arm]])


def high_points(of: Records) -> dict[str, np.ndarray]:
    """Return arm -> the points of its curves in the second half of the gain, by their mean over seeds."""
    means = {arm: np.mean([r["curve"]["validation_greedy"] for r in of[arm]], axis=0) for arm in ARMS}
    return {arm: np.flatnonzero(mean >= (mean[0] + mean[-1]) / 2) for arm, mean in means.items()}


def thinned(of: Records, arm: str, draws: int = 500) -> np.ndarray:
    """Return each run's mean largest drawdown over random sets of as many high points as either arm has: (seeds,)."""
    high = high_points(of)
    rng, fewest = np.random.default_rng(0), min(map(len, high.values()))
    paths = [np.array(r["curve"]["validation_greedy"]) for r in of[arm]]
    chosen = [np.sort(rng.choice(high[arm], fewest, replace=False)) for _ in range(draws)]
    return np.array([np.mean([curves.largest_drawdown(path[at]) for at in chosen]) for path in paths])


def last_high(of: Records, arm: str) -> np.ndarray:
    """Return the largest drawdown of each run over its last points, as many as either arm has high ones: (seeds,)."""
    fewest = min(map(len, high_points(of).values()))
    return np.array([curves.largest_drawdown(r["curve"]["validation_greedy"][-fewest:]) for r in of[arm]])


def never_falling(run: SimpleNamespace, of: Records, arm: str, samples: int = 4, draws: int = 2000) -> np.ndarray:
    """Return largest drawdowns at temperature 1 of curves that only rise, through the noise of samples: (draws,)."""
    share, of_test = accuracy_matrix(of[arm], "t1"), 16  # samples of each test problem
    variance = (share * (1 - share)).mean() * of_test / (of_test - 1) / (samples * run.validation_problems)
    mean = np.maximum.accumulate(np.mean([r["curve"]["validation_t1"] for r in of[arm]], axis=0))
    noisy = mean + np.sqrt(variance) * np.random.default_rng(0).standard_normal((draws, len(mean)))
    return np.array([curves.largest_drawdown(line) for line in noisy])


def drawdown_gaps(of: Records) -> dict[str, Interval]:
    """Return GRPO - ES of the largest drawdowns: by decoding, and "sets" and "last" of as many points of either arm.

    The last two are there if both arms have more than one point in the second half of their gain.
    """
    sides = {decoding: [drawdowns(of, arm, decoding) for arm in ("grpo", "es")] for decoding in DECODINGS}
    if min(map(len, high_points(of).values())) > 1:
        sides |= {
            "sets": [thinned(of, arm) for arm in ("grpo", "es")],
            "last": [last_high(of, arm) for arm in ("grpo", "es")],
        }
    return {name: stats.stratified_bootstrap([grpo], [es]) for name, (grpo, es) in sides.items()}


# ---- settings, and other models


def score(record: Record) -> float:
    """Return the score of a sweep: greedy validation accuracy, mean of the last three points, in %."""
    return 100 * float(np.mean(record["curve"]["validation_greedy"][-3:]))


def map_cells(of: Records, arm: str) -> DataFrame:
    """Return a row per setting of an arm's map: mean, spread and range of `score`, failed runs, runs."""
    from pandas import DataFrame

    names = list(arms.swept(arm))
    rows = [
        {name: r["spec"][name] for name in names} | {"score": score(r), "failed": failed([r])} for r in of[f"{arm} map"]
    ]
    columns = {"mean": ("score", "mean"), "std": ("score", "std"), "low": ("score", "min"), "high": ("score", "max")}
    columns |= {"failed": ("failed", "sum"), "runs": ("score", "size")}
    return DataFrame(rows).groupby(names).agg(**columns).reset_index()


def near_the_best(cells: DataFrame) -> int:
    """Return how many settings of a map have a mean within 2 points of the best one's."""
    return int((cells["mean"] > cells["mean"].max() - 2).sum())


def full_runs(run: SimpleNamespace, of: Records, arm: str, base: str, which: str) -> list[Record]:
    """Return full runs on another base; which: with the "shared" setting, the tuned one, or with the "best" there."""
    moved = which == "best" and winners(run, of)[arm, base] != tuned(run, of, arm)
    return [r for r in of[f"{arm} {'best' if moved else 'elsewhere'}"] if r["spec"]["base"] == base]


def regret(run: SimpleNamespace, of: Records, arm: str, bases: Sequence[str]) -> np.ndarray:
    """Return right answers with the best setting - those with the shared one, mean of bases: (seeds, problems)."""
    cells = [full_runs(run, of, arm, base, which) for which in ("best", "shared") for base in bases]
    best, shared = np.split(together(cells), 2)
    return (best - shared).mean(axis=0)


def ties(run: SimpleNamespace, of: Records) -> list[tuple[str, str]]:
    """Return (arm, base) where the shared setting scored as much as the winner and lost by the order of settings."""
    found = []
    for (arm, base), won in winners(run, of).items():
        of_setting = {tuple(setting.values()): score for score, setting in arms.ranked(tries(of, arm, base))}
        shared, winner = tuple(tuned(run, of, arm).values()), tuple(won.values())
        if shared != winner and of_setting[shared] == of_setting[winner]:
            found.append((arm, base))
    return found


def regret_if_ties_keep(run: SimpleNamespace, of: Records, arm: str) -> np.ndarray:
    """Return the `regret` on all other bases, 0 where the shared setting scored as much as the winner."""
    tied = ties(run, of)
    return np.mean([regret(run, of, arm, [base]) * ((arm, base) not in tied) for base in run.bases[1:]], axis=0)


# ---- numbers of an arm over several cells


def together(found: Sequence[Sequence[Record]]) -> np.ndarray:
    """Return right answers of several groups of runs, of the seeds that all have: (groups, seeds, problems)."""
    matrices = [accuracy_matrix(each) for each in found]
    return np.array([matrix[: min(map(len, matrices))] for matrix in matrices])


def contrast(of: Records, field: str, levels: Sequence[int], weights: Sequence[float]) -> dict[str, np.ndarray]:
    """Return arm -> a weighted sum of greedy test accuracy over the cells of a field: (seeds, problems)."""
    cells = {arm: together([of[f"{arm} {field}={level}"] for level in levels]) for arm in ARMS}
    return {arm: np.tensordot(weights, matrices, axes=1) for arm, matrices in cells.items()}


def slope_weights(levels: Sequence[float]) -> np.ndarray:
    """Return the weights of accuracies at these levels in the least-squares slope over their decimal logarithm."""
    x = np.log10(levels) - np.mean(np.log10(levels))
    return x / (x @ x)


def change_of_gain(of: Records, first: int, to: int) -> dict[str, np.ndarray]:
    """Return arm -> what another horizon than the first changes in its gain over the base: (seeds, problems)."""
    bases = [accuracy_matrix(of[f"base filler={length}"])[0] for length in (first, to)]
    change = contrast(of, "filler", [first, to], [-1.0, 1.0])
    return {arm: matrix - (bases[1] - bases[0]) for arm, matrix in change.items()}


def compared(of_arm: Mapping[str, np.ndarray], one: str, other: str) -> dict[str, Interval]:
    """Return the interval of a number of each arm, given as (seeds, problems), and of the "difference" one - other."""
    found = {arm: stats.crossed_bootstrap(matrix) for arm, matrix in of_arm.items()}
    return found | {"difference": stats.crossed_bootstrap(of_arm[one], of_arm[other])}


def of_sizes(run: SimpleNamespace) -> dict[int, str]:
    """Return population -> the group of its runs."""
    return {N: "es" if N == run.es_population_size else f"es N={N}" for N in run.populations}


# ---- the intervals that the notebook states, each made once


def regrets(run: SimpleNamespace, of: Records) -> dict[str, Interval]:
    """Return the regret of each arm, mean of all other bases, and GRPO - ES; empty without other bases."""
    elsewhere = run.bases[1:]
    return compared({arm: regret(run, of, arm, elsewhere) for arm in ARMS}, "grpo", "es") if elsewhere else {}


def regrets_of_ties(run: SimpleNamespace, of: Records) -> dict[str, Interval]:
    """Return the `regrets` if a tie kept the shared setting; empty where there is no tie."""
    if not ties(run, of):
        return {}
    return compared({arm: regret_if_ties_keep(run, of, arm) for arm in ARMS}, "grpo", "es")


def slopes(of: Records, counts: Sequence[int]) -> dict[str, Interval]:
    """Return the slope of accuracy over log10 of the number of unique problems, and GRPO - ES; empty below two."""
    return compared(contrast(of, "prompts", counts, slope_weights(counts)), "grpo", "es") if len(counts) > 1 else {}


def horizon_changes(run: SimpleNamespace, of: Records) -> dict[int, dict[str, Interval]]:
    """Return horizon -> what it changes in each arm's gain against the first one, and ES - GRPO."""
    return {to: compared(change_of_gain(of, run.horizons[0], to), "es", "grpo") for to in run.horizons[1:]}


def stated(run: SimpleNamespace, of: Records) -> dict[str, Interval | Mapping[str, Interval] | None]:
    """Return stem of a macro -> the interval that the notebook states and the paper quotes, as `numbers` takes them."""
    by_arm = {arm: scores(run, of, arm) for arm in ARMS}
    gaps, changes = drawdown_gaps(of), list(horizon_changes(run, of).values())
    return {
        "SpreadEnd": log_ratio(by_arm, AT_END),
        "SpreadMatched": log_ratio(by_arm, ("at mean", run.matched_mean)),
        "Drawdown": gaps["greedy"],
        "DrawdownThinned": gaps.get("sets"),
        "Regret": regrets(run, of),
        "RegretTies": regrets_of_ties(run, of).get("difference"),
        "PromptSlope": slopes(of, run.prompt_counts),
        "HorizonChange": changes[-1] if changes else {},
        "HorizonBetween": changes[0] if len(changes) > 1 else {},
    }


# ---- the paper's numbers


def numbers(
    run: SimpleNamespace, of: Records, stated: Mapping[str, Interval | Mapping[str, Interval] | None]
) -> dict[str, tuple[Any, str]]:
    """Return macro -> value and format.

    stated: stem of a macro -> the interval that the notebook states, or side -> interval (`compared`); None is left
    out. Those of "Spread..." are ln of a ratio (`log_ratio`) and are quoted as the ratio, all others are shares and are
    quoted in points.
    """
    found = {"StabSeeds": (len(of["es"]), "d"), "StabFewSeeds": (run.seeds_compare, "d")}
    found |= {"StabLevel": (100 * run.matched_mean, "g"), "StabMapSeeds": (len(map_seeds(run)), "d")}
    for stem, sides in stated.items():
        for side, interval in (sides if isinstance(sides, Mapping) else {"": sides}).items():
            found |= _ends(stem, side, interval) if interval else {}
    for arm in ARMS:
        cells = map_cells(of, arm)
        counts = {"Failed": failed(of[arm]), "MapFailed": cells["failed"].sum(), "MapRuns": cells["runs"].sum()}
        counts |= {"MapSettings": len(cells), "MapNear": near_the_best(cells)}
        found |= {f"Stab{what}{arm.title()}": (int(count), "d") for what, count in counts.items()}
    for size, (N, group) in zip(("Small", "Middle", "Large"), of_sizes(run).items(), strict=True):
        found[f"StabPopulation{size}"] = (N, "d")
        found[f"StabPopulation{size}Greedy"] = (100 * accuracy_matrix(of[group]).mean(), ".1f")
    for end, count in zip(("Fewest", "Most"), run.prompt_counts[:1] + run.prompt_counts[-1:], strict=False):
        found[f"StabPrompts{end}"] = (count, ",d")
        for arm in ARMS:
            solved = accuracy_matrix(of[f"{arm} prompts={count}"])
            found[f"StabPrompts{end}{arm.title()}"] = (100 * solved.mean(), ".1f")
    return found


def _ends(stem: str, side: str, interval: Interval) -> dict[str, tuple[float, str]]:
    ends = {end: getattr(interval, end) for end in ("value", "low", "high")}
    quoted = {
        end: (float(np.exp(x)), ".2f") if stem.startswith("Spread") else (100 * x, ".1f") for end, x in ends.items()
    }
    return {f"Stab{stem}{side.title()}{end.title()}": value for end, value in quoted.items()}
