"""Notebook 05, stability: its presets, groups of runs, measures, and the numbers that the paper quotes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from evoalign_lib import arms, style, tiny
from evoalign_lib.analysis import curves, power, stats
from evoalign_lib.analysis.stats import Interval
from evoalign_lib.records import Record, accuracy_matrix
from evoalign_lib.study.kinds.base import base_specs
from evoalign_lib.study.kinds.train import sweep_specs
from evoalign_lib.study.notebooks.loading import (
    DECODINGS,
    Group,
    Groups,
    Records,
    decodings,
    of_runs,
    own_settings,
    ranked_choices,
    scaled,
    swept_choices,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

NOTEBOOK = "05_stability"
ARMS = ("es", "grpo")
STEP = {"es": "alpha", "grpo": "learning_rate"}
"""The step size of an arm."""
CLAIMS = ("C8", "C9", "C9b", "C10", "C11", "C33", "C33b", "C37", "C37b", "C38")
"""The claims that the notebook's runs decide."""
AT_END = ("test", "greedy")
"""Where C8 measures the spread at the end (`scores`)."""
_QIU, _ALIGNMENT = "Qiu et al.", "Evolutionary Alignment"
PUBLISHED_SPREAD = (
    (_QIU, "GRPO", "beta 0, without hacked runs", "0.867", "0.054"),
    (_QIU, "GRPO", "beta 0.01, without hacked runs", "0.871", "0.060"),
    (_QIU, "GRPO", "beta 0.0167", "0.911", "0.038"),
    (_QIU, "GRPO", "beta 0.0464", "0.881", "0.062"),
    (_QIU, "ES", "sigma 0.001, alpha 0.0005", "0.889", "0.004"),
    (_QIU, "ES", "sigma 0.0015, alpha 0.00075", "0.919", "0.008"),
    (_ALIGNMENT, "GRPO", "beta 0", "0.9989", "0.0005"),
    (_ALIGNMENT, "GRPO", "beta 0.0464", "0.9988", "0.0005"),
    (_ALIGNMENT, "GRPO", "beta 0.1", "0.9834", "0.0268"),
    (_ALIGNMENT, "ES", "sigma 0.001, alpha 0.0005", "0.9700", "0.0112"),
    (_ALIGNMENT, "ES", "sigma 0.001, alpha 0.0015", "0.9903", "0.0105"),
    (_ALIGNMENT, "ES", "sigma 0.005, alpha 0.001", "0.9972", "0.0008"),
    (_ALIGNMENT, "ES", "sigma 0.01, alpha 0.0005", "0.9826", "0.0098"),
    (_ALIGNMENT, "ES", "sigma 0.01, alpha 0.0015", "0.9944", "0.0000"),
)
"""Study, arm, setting, mean and standard deviation over four seeds (fewer without hacked runs) of the scaled reward.

Conciseness with Qwen2.5-7B-Instruct. Qiu et al.: arXiv 2509.24372 v2, Table 2. Evolutionary Alignment: the evaluation
reports of the repository.
"""
_WORDS = {name: style.DECODINGS[name].label for name in DECODINGS}
_LABELS = {arm: style.ARMS[arm].label for arm in ARMS}
_FIELDS = ("arm", "base", "seed", "sigma", "alpha", "learning_rate", "beta")
_FIELDS += ("population_size", "unique_prompts", "filler_steps")
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
        found[f"es N={N}"] = train["es"](here, seeds, changes=[_of_size(run, own["es"]["alpha"], N)])
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


def _of_size(run: SimpleNamespace, alpha: float, N: int) -> dict[str, Any]:
    """Return what a population of N members changes, at the same number of evaluated members (section 6)."""
    members = run.es_steps * run.es_population_size
    return {"population_size": N, "steps": round(members / N), "alpha": alpha * N / run.es_population_size}


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


def answers(
    run: SimpleNamespace, of: Records, stated: Mapping[str, Interval | Mapping[str, Interval] | None]
) -> dict[str, str]:
    """Return question -> the answer of the records, with its interval and the number of seeds; stated: of `stated`."""
    std = {arm: f"{100 * scores(run, of, arm)[AT_END].std(ddof=1):.2f}" for arm in ARMS}
    fall = {arm: _points(drawdowns(of, arm, "greedy")) for arm in ARMS}
    gain = {arm: _points(accuracy_matrix(of[arm]) - accuracy_matrix(of["base"])) for arm in ARMS}
    cells = {arm: map_cells(of, arm) for arm in ARMS}
    near = [f"{near_the_best(cells[arm])} of {len(cells[arm])} settings of {_LABELS[arm]}" for arm in ARMS]
    bad = [f"{cells[arm]['failed'].sum()} of {cells[arm]['runs'].sum()} runs of {_LABELS[arm]}" for arm in ARMS]
    sizes = {N: accuracy_matrix(of[group]) for N, group in of_sizes(run).items()}
    own, n = run.es_population_size, len(of["es"])
    apart = [
        f"N = {own} minus N = {N} is {stats.crossed_bootstrap(sizes[own], right).format()} points"
        for N, right in sizes.items()
        if N != own
    ]
    level, ratios = f"{100 * run.matched_mean:g} %", [_stated_ratio(stated[f"Spread{at}"]) for at in ("End", "Matched")]
    found = {
        "Do results differ less from seed to seed?": (
            f"Over seeds, greedy test accuracy has a standard deviation of {std['es']} points for ES and {std['grpo']} "
            f"for GRPO: a ratio of {ratios[0]} at the end, and of {ratios[1]} on validation problems, where the mean "
            f"of the arm reaches {level} (n = {n} seeds per arm)."
        ),
        "Do curves rise more steadily?": (
            f"The largest fall of greedy accuracy below its earlier best averages {fall['es']} points over the runs of "
            f"ES and {fall['grpo']} over those of GRPO: GRPO - ES {stated['Drawdown'].format()} points (n = {n}). Over "
            f"the base, ES gains {gain['es']} points and GRPO {gain['grpo']}."
        ),
        "How exactly must the settings be right?": (
            f"{' and '.join(near)} come within two points of the arm's best; {' and '.join(bad)} failed "
            f"({len(map_seeds(run))} seeds per setting)."
        ),
        f"Does a population of {own} suffice?": (
            f"In greedy test accuracy, at equally many evaluated members in all, {' and '.join(apart)} (n = {n} and "
            f"{run.seeds_compare})."
        ),
    }
    if sides := stated["Regret"]:
        found["Does one setting serve other bases?"] = (
            f"Keeping the setting tuned on {run.bases[0]}, instead of the best of {run.transfer_size} there, costs "
            f"{_stated_sides(sides, 'GRPO - ES')}. A negative cost means that the kept setting was the better one."
        )
    if sides := stated["PromptSlope"]:
        found["Does ES need fewer problems?"] = (
            f"Ten times as many unique problems are worth {_stated_sides(sides, 'GRPO - ES')}."
        )
    if sides := stated["HorizonChange"]:
        first, *_, last = run.horizons
        found["Does ES tolerate a long way to the answer?"] = (
            f"From {first} to {last} steps of thinking the gain changes by {_stated_sides(sides, 'ES - GRPO')}."
        )
    exact = sum(r["ledger"]["replay_error"] == 0 for r in of["es"])
    found["Can a run be had again?"] = (
        f"{exact} of {n} tuned runs of ES replay from their ledgers to their very weights."
    )
    return found


def _stated_ratio(interval: Interval | None) -> str:
    return "without interval" if interval is None else _ratio(interval)


def _stated_sides(sides: Mapping[str, Interval], difference: str) -> str:
    """Return the intervals of `compared` in words, in points."""
    of_arms = " and ".join(f"{_LABELS[arm]} {sides[arm].format()}" for arm in ARMS)
    return f"{of_arms} points: {difference} {sides['difference'].format()} (n = {sides['difference'].n})"


# ---- runs as rows, and what tables have in common


def frame(of: Records, groups: Iterable[str], **labels: Any) -> DataFrame:
    """Return one row per run: the fields of its spec, how it ended and, in %, its accuracy on the test set."""
    from pandas import DataFrame

    rows = []
    for r in (r for group in groups for r in of[group]):
        tested = {decoding: 100 * r["test"][decoding] for decoding in DECODINGS} if "test" in r else {}
        measured = {"outcome": outcome(r), "score": score(r), "reward": r["curve"]["reward"][-1]}
        rows.append({name: r["spec"].get(name) for name in _FIELDS} | measured | tested | labels)
    return DataFrame(rows)


def _tested(found: Sequence[Record], start: Record | None = None) -> dict[str, Any]:
    """Return cells of a table: test accuracy of runs, or their gain over one model, failures and seeds."""
    row: dict[str, Any] = {}
    for decoding, words in _WORDS.items():
        baseline = None if start is None else accuracy_matrix([start], decoding)[0]
        interval = stats.crossed_bootstrap(accuracy_matrix(found, decoding), baseline)
        row[f"{words}, {'%' if start is None else 'gain'} [95 %]"] = interval.format()
    return row | {"failed": failed(found), "seeds": len(found)}


def _setting(setting: Mapping[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in setting.items())


def _ratio(interval: Interval) -> str:
    """Return the interval of ln of a ratio as that of the ratio."""
    return "{:.2f} [{:.2f}, {:.2f}]".format(*np.exp([interval.value, interval.low, interval.high]))


# ---- tables: a row each, cells in words


def tuned_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return the tuned setting of each arm, its score in the sweep, and how many settings were tried."""
    from pandas import DataFrame

    rows = []
    for arm in ARMS:
        (best, setting), *others = arms.ranked(of[f"{arm} sweep"])
        row = {"arm": _LABELS[arm], "tuned setting": _setting(setting), "score, %": f"{100 * best:.1f}"}
        rows.append(row | {"settings tried": 1 + len(others)})
    return DataFrame(rows)


def plans(committed: Sequence[Record]) -> DataFrame:
    """Return what so many runs could show of each claim, with spreads from runs that were there before its own.

    committed: records of all notebooks, among them the full runs of notebook 02 on base A0, at scale tiny.
    """
    from pandas import concat

    pilots: dict[str, list[Record]] = {}
    for arm in ARMS:
        like = {"kind": "train", "arm": arm, "base": "A0", "steps": TINY[f"{arm}_steps"], "test_problems": 2000}
        found = [r for r in committed if r["notebook"] == "02_grpo_countdown" and like.items() <= r["spec"].items()]
        pilots[arm] = [r for r in found if "scale_rewards" not in r["spec"]]
    at_end = {arm: accuracy_matrix(pilots[arm]).mean(axis=1).std(ddof=1) for arm in ARMS}
    fall = max(drawdowns(pilots, arm, "greedy").std(ddof=1) for arm in ARMS)
    many, few, worst = TINY["seeds_match"], TINY["seeds_compare"], max(at_end.values())
    slope = np.linalg.norm(slope_weights(TINY["prompt_counts"]))
    primary = [
        power.Plan("C8: std of ES / std of GRPO", "std ratio", many, 0.5),
        power.Plan("C33: drawdown, GRPO - ES", "difference", many, 0.02, fall),
        power.Plan("C10: accuracy, N = 30 - another N", "difference", few, 0.02, at_end["es"]),
        power.Plan("C9: regret, GRPO - ES", "difference", few, 0.02, worst),
    ]
    others = [
        power.Plan("C37: slope over a decade, GRPO - ES", "difference", few, 0.02, worst * slope),
        power.Plan("C11: change from 4 to 64, ES - GRPO", "difference", few, 0.02, worst * np.sqrt(2)),
    ]
    asked = {0.05 / len(primary): primary, 0.05: others}
    reports = [power.report(of_level, alpha=level).assign(level=level) for level, of_level in asked.items()]
    return concat(reports, ignore_index=True)


def runs_table(of: Records) -> DataFrame:
    """Return a row per kind of run: bases and seeds; and for each arm, settings, runs, and completions of a run.

    Groups whose names differ in a number alone, such as "es prompts=2" and "es prompts=50", are of one kind. Where the
    runs of a kind differ in a setting, its least and its largest value stand.
    """
    from pandas import DataFrame

    kinds: dict[str, dict[str, list[str]]] = {}  # kind -> arm -> groups
    for group in (group for group in of if group.split()[0] in ARMS and of[group]):
        arm, _, what = group.partition(" ")
        kinds.setdefault(what.partition("=")[0] or "tuned", {}).setdefault(arm, []).append(group)
    rows = []
    for kind, groups_of in kinds.items():
        found = {arm: [r for group in groups_of.get(arm, ()) for r in of[group]] for arm in ARMS}
        levels = ", ".join(group.partition("=")[2] for group in next(iter(groups_of.values())))
        specs = [r["spec"] for arm in ARMS for r in found[arm]]
        row: dict[str, Any] = {"runs": f"{kind}={levels}" if levels else kind}
        row |= {"bases": ", ".join(sorted({spec["base"] for spec in specs}))}
        row |= {"seeds": _seeds([spec["seed"] for spec in specs])}
        for arm, own in found.items():
            label = _LABELS[arm]
            row |= {label: _given(arm, own), f"{label} runs": len(own)}
            row |= {f"{label} completions": _span([r["budget"]["completions"] for r in own])}
        rows.append(row)
    return DataFrame(rows)


def _given(arm: str, found: Sequence[Record]) -> str:
    """Return the settings of runs in words."""
    names = [*arms.swept(arm), *(("population_size",) if arm == "es" else ()), "steps"]
    short = {"population_size": "N", "learning_rate": "learning rate"}
    return ", ".join(f"{short.get(name, name)} {_span([r['spec'][name] for r in found])}" for name in names if found)


def _span(values: Sequence[float]) -> str:
    """Return numbers as the least and the largest of them, or the one that all are."""
    ends = [f"{value:,}" if isinstance(value, int) else f"{value:.3g}" for value in sorted({*values})]
    return " to ".join(dict.fromkeys(ends[:1] + ends[-1:]))


def _seeds(values: Sequence[int]) -> str:
    each = sorted({*values})
    return _span(each) if len(each) > 2 and each == list(range(len(each))) else ", ".join(map(str, each))


def budgets(of: Records) -> DataFrame:
    """Return what a run of each group cost, the mean over its runs, on every axis."""
    from pandas import DataFrame

    rows = []
    for group in [group for arm in ARMS for group in of if group.split()[0] == arm and of[group]]:
        spent = DataFrame([r["budget"] for r in of[group]]).mean()
        arm, _, varied = group.partition(" ")
        row = {"arm": _LABELS[arm], "runs": varied or "tuned", "n": len(of[group])}
        row |= {"completions": f"{spent['completions']:,.0f}", "generated tokens": f"{spent['generated_tokens']:,.0f}"}
        row |= {"FLOPs, 1e12": f"{spent['forward_flops'] / 1e12:.1f}", "core-seconds": f"{spent['core_seconds']:.0f}"}
        rows.append(row)
    return DataFrame(rows)


def spread_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return the spread of both arms over seeds wherever `scores` measures it, and their ratio."""
    from pandas import DataFrame

    by_arm = {arm: scores(run, of, arm) for arm in ARMS}
    places = [*(("test", d) for d in DECODINGS), ("validation", "greedy")]
    rows = []
    for kind, at in [*places, *(("at mean", mean) for mean in sorted({*run.other_means, run.matched_mean}))]:
        words = (
            f"validation, greedy, at mean {100 * at:g} %" if kind == "at mean" else f"{kind}, {_WORDS[at]}, at the end"
        )
        row: dict[str, Any] = {"accuracy": words}
        for arm in ARMS:
            values = 100 * by_arm[arm].get((kind, at), np.array([np.nan, np.nan]))
            row |= {
                f"{_LABELS[arm]}, mean %": f"{values.mean():.1f}",
                f"{_LABELS[arm]}, std": f"{values.std(ddof=1):.2f}",
            }
        ratio, p = _ratio_in_words(by_arm, (kind, at))
        row |= {"std of ES / std of GRPO [95 %]": ratio, "Brown-Forsythe p": p}
        rows.append(row | {"seeds": min(len(of[arm]) for arm in ARMS)})
    return DataFrame(rows)


def _ratio_in_words(by_arm: Mapping[str, Mapping[Measure, np.ndarray]], measure: Measure) -> tuple[str, str]:
    """Return the ratio of the standard deviations and the p-value beside it; or why there is none."""
    if any(measure not in of_arm for of_arm in by_arm.values()):
        return "an arm never gets there", "none"
    if (interval := log_ratio(by_arm, measure)) is None:
        return "no interval: too few runs, or no spread", "none"
    return _ratio(interval), f"{stats.brown_forsythe(*(by_arm[arm][measure] for arm in ARMS)):.2g}"


def chance_table(of: Records) -> DataFrame:
    """Return the spread over seeds beside that of runs that solve problems independently of one another."""
    from pandas import DataFrame

    rows = []
    for decoding, words in _WORDS.items():
        for arm in ARMS:
            solved = accuracy_matrix(of[arm], decoding)
            seen, chance = solved.mean(axis=1).std(ddof=1), np.sqrt(solved.var(axis=0, ddof=1).mean() / solved.shape[1])
            row = {"decoding": words, "arm": _LABELS[arm], "spread, points": f"{100 * seen:.2f}"}
            row |= {"by chance, points": f"{100 * chance:.2f}", "ratio": f"{seen / chance:.1f}" if chance else "none"}
            rows.append(row | {"seeds": len(solved)})
    return DataFrame(rows)


def without_lowest(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return the ratio of spreads at the end without the lowest run of an arm or two; none below five seeds."""
    from pandas import DataFrame

    ends = {arm: np.sort(scores(run, of, arm)[AT_END]) for arm in ARMS}
    rows = []
    for arm, left_out in [(arm, k) for arm in ARMS for k in (1, 2) if min(map(len, ends.values())) > 4]:
        try:
            words = _ratio(stats.log_std_ratio(*(ends | {arm: ends[arm][left_out:]}).values()))
        except ValueError:
            words = "no interval: runs do not differ"
        rows.append({"left out": f"lowest {left_out} of {_LABELS[arm]}", "std of ES / std of GRPO [95 %]": words})
    return DataFrame(rows)


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


def drawdown_table(of: Records, gaps: Mapping[str, Interval]) -> DataFrame:
    """Return the largest drawdown of both arms, how far curves end below their maximum, and the difference.

    gaps: of `drawdown_gaps`.
    """
    from pandas import DataFrame

    rows = []
    for decoding, words in _WORDS.items():
        row, sides = {"validation": words}, {arm: drawdowns(of, arm, decoding) for arm in ARMS}
        for arm in ARMS:
            paths = np.array([r["curve"][f"validation_{decoding}"] for r in of[arm]])
            row[f"{_LABELS[arm]}, points [95 %]"] = stats.bootstrap_mean(sides[arm]).format()
            row[f"{_LABELS[arm]}, end"] = f"{100 * (paths.max(axis=1) - paths[:, -1]).mean():.1f}"
        row["GRPO - ES [95 %]"] = gaps[decoding].format()
        row["p"] = f"{stats.mann_whitney(sides['grpo'], sides['es']):.2g}"
        rows.append(row | {"seeds": len(sides["es"])})
    return DataFrame(rows)


def drawdown_controls(run: SimpleNamespace, of: Records, gaps: Mapping[str, Interval]) -> DataFrame:
    """Return drawdowns of as many high points of either arm, and what noise makes of curves that never fall.

    gaps: of `drawdown_gaps`.
    """
    from pandas import DataFrame

    high, rows = {arm: len(found) for arm, found in high_points(of).items()}, []
    for name, of_arm in (("sets", thinned), ("last", last_high)):
        if name in gaps:
            what = f"greedy, {'random sets of' if name == 'sets' else 'the last'} {min(high.values())} high points"
            row = {"curve": what} | {_LABELS[arm]: f"{100 * of_arm(of, arm).mean():.1f}" for arm in ARMS}
            rows.append(row | {"GRPO - ES [95 %]": gaps[name].format()})
    seen = {_LABELS[arm]: f"{100 * drawdowns(of, arm, 't1').mean():.1f}" for arm in ARMS}
    still = {arm: 100 * never_falling(run, of, arm) for arm in ARMS}
    noise = {_LABELS[arm]: f"{draws.mean():.1f} (std of one curve {draws.std():.1f})" for arm, draws in still.items()}
    rows.append({"curve": "temperature 1, as measured"} | seen | {"GRPO - ES [95 %]": gaps["t1"].format()})
    rows.append({"curve": "temperature 1, only rising, plus noise"} | noise | {"GRPO - ES [95 %]": ""})
    return DataFrame(rows)


def sensitivity_table(of: Records) -> DataFrame:
    """Return how much the settings of each arm's map matter, and how much its seeds do."""
    from pandas import DataFrame

    rows = []
    for arm in ARMS:
        cells = map_cells(of, arm)
        row = {"arm": _LABELS[arm], "settings": len(cells)}
        row |= {"best mean, %": f"{cells['mean'].max():.1f}", "worst mean, %": f"{cells['mean'].min():.1f}"}
        row |= {"within 2 points of the best": near_the_best(cells)}
        row |= {"std of settings": f"{cells['mean'].std(ddof=1):.2f}"}
        row |= {"std of seeds": f"{np.sqrt((cells['std'] ** 2).mean()):.2f}"}
        rows.append(row | {"failed runs": int(cells["failed"].sum()), "runs": int(cells["runs"].sum())})
    return DataFrame(rows)


def failures(of: Records) -> DataFrame:
    """Return the tuned groups and all that have a run that failed or fell back: how many, and which failed."""
    from pandas import DataFrame

    rows = []
    for group in [group for group in of if group.split()[0] in ARMS and of[group]]:
        ended = frame(of, [group])
        bad, back = ended[ended["outcome"] == "failed"], int((ended["outcome"] == "fell back").sum())
        names, where = list(arms.swept(group.split()[0])), []
        for values, part in bad.groupby(names):
            seeds = ", ".join(map(str, part["seed"]))
            where.append(f"{_setting(dict(zip(names, values, strict=True)))}: seeds {seeds}")
        if group in ARMS or len(bad) or back:
            share = f"{stats.wilson(len(bad), len(ended)).format()} %"
            row = {"group": group, "runs": len(ended), "failed": len(bad), "share [95 %]": share}
            rows.append(row | {"fell back": back, "failed runs": "; ".join(where) or "none"})
    return DataFrame(rows)


def failed_on_maps(of: Records) -> float:
    """Return the p-value of Fisher's test of as many failures on the map of either arm."""
    counts = [n for arm in ARMS for n in (failed(of[f"{arm} map"]), len(of[f"{arm} map"]))]
    return stats.fisher(*counts)


def population_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return steps, alpha, cost, distance moved and test accuracy of ES with each population."""
    from pandas import DataFrame

    rows = []
    for N, group in of_sizes(run).items():
        found, spec = of[group], of[group][0]["spec"]
        row = {"N": N, "steps": spec["steps"], "alpha": f"{spec['alpha']:.3g}"}
        row |= {"completions": f"{found[0]['budget']['completions']:,d}"}
        moved = np.array([r["update_norm"] for r in found], float).mean()
        rows.append(row | {"distance": f"{moved:.1f}"} | _tested(found))
    return DataFrame(rows)


def population_trend(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return the p-values of Jonckheere's test, of a rise and of a fall of test accuracy with N."""
    from pandas import DataFrame

    rows = []
    for decoding, words in _WORDS.items():
        cells = [accuracy_matrix(of[group], decoding).mean(axis=1) for group in of_sizes(run).values()]
        row = {"decoding": words, "p of a rise with N": f"{stats.jonckheere(cells):.2g}"}
        rows.append(row | {"p of a fall": f"{stats.jonckheere(cells[::-1]):.2g}"})
    return DataFrame(rows)


def transfer_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return for each arm and other base the best contender, its accuracy and the tuned one's, and the regret."""
    from pandas import DataFrame

    rows = []
    for (arm, base), won in winners(run, of).items():
        found = {which: full_runs(run, of, arm, base, which) for which in ("shared", "best")}
        row = {"base": base, "arm": _LABELS[arm], "best there": _setting(won)}
        row |= {f"{which}, %": f"{100 * accuracy_matrix(runs).mean():.1f}" for which, runs in found.items()}
        lost = "0, the same"
        if won != tuned(run, of, arm):
            lost = stats.crossed_bootstrap(regret(run, of, arm, [base])).format()
        rows.append(row | {"regret, points [95 %]": lost, "seeds": len(found["shared"])})
    return DataFrame(rows)


def ties_in_words(run: SimpleNamespace, of: Records) -> str:
    """Return where the shared setting scored as much as the winner, as `ties`."""
    return "; ".join(f"{_LABELS[arm]} on {base}" for arm, base in ties(run, of)) or "nowhere"


def sides_table(of_quantity: Mapping[str, Mapping[str, Interval]], one: str, other: str) -> DataFrame:
    """Return a row per quantity, in points: each arm's interval and that of the difference one - other (`compared`)."""
    from pandas import DataFrame

    rows = []
    for quantity, sides in of_quantity.items():
        row = {"quantity, points [95 %]": quantity} | {_LABELS[arm]: sides[arm].format() for arm in ARMS}
        row[f"{_LABELS[one]} - {_LABELS[other]}"] = sides["difference"].format()
        rows.append(row | {"seeds": sides["difference"].n})
    return DataFrame(rows)


def prompts_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return training reward, share of steps or groups without a signal, and test accuracy by number of problems."""
    from pandas import DataFrame

    rows = []
    for arm, count in product(ARMS, run.prompt_counts):
        found = of[f"{arm} prompts={count}"]
        spec = found[0]["spec"]
        idle = [r["counts"]["tied"] / spec["steps"] if arm == "es" else r["counts"]["zero_std_groups"] for r in found]
        row = {"arm": _LABELS[arm], "unique problems": count}
        row["each seen"] = f"{spec['steps'] * spec['prompts_per_step'] / count:,.0f} times"
        row |= {"training reward": f"{np.mean([r['curve']['reward'][-1] for r in found]):.2f}"}
        rows.append(row | {"no signal, %": f"{100 * np.mean(idle):.1f}"} | _tested(found))
    return DataFrame(rows)


def against_base(of: Records, found: Sequence[Record]) -> str:
    """Say how many runs are better than the base on the same problems, level and worse: exact test, 5 % each."""
    from scipy.stats import binomtest

    base, better, worse = accuracy_matrix(of["base"])[0], 0, 0
    for right in accuracy_matrix(found):
        won, lost = int((right > base).sum()), int((right < base).sum())
        decided = won + lost > 0 and binomtest(won, won + lost).pvalue < 0.05
        better, worse = better + (decided and won > lost), worse + (decided and won < lost)
    return f"{better} better, {len(found) - better - worse} level, {worse} worse"


def prompts_cells(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return the arms against one another and against the base at each number of problems."""
    from pandas import DataFrame

    rows = []
    for count in run.prompt_counts:
        cell = {arm: of[f"{arm} prompts={count}"] for arm in ARMS}
        apart = stats.crossed_bootstrap(*(accuracy_matrix(cell[arm]) for arm in ("grpo", "es")))
        row = {"unique problems": count, "GRPO - ES, points [95 %]": apart.format()}
        for arm, found in cell.items():
            unmoved = sum(r["update_norm"] == 0 for r in found)
            row |= {
                f"{_LABELS[arm]} against the base": against_base(of, found),
                f"{_LABELS[arm]}, never moved": unmoved,
            }
        rows.append(row)
    return DataFrame(rows)


def nulls_table(run: SimpleNamespace, of: Records, committed: Sequence[Record]) -> DataFrame:
    """Return what random fitness and random reward did on the first base, at the end and beside few problems half way.

    committed: records of all notebooks, among them notebook 02's nulls with the tuned settings. No rows at other scales
    than tiny, which have none.
    """
    from pandas import DataFrame

    rows = []
    for arm in ARMS if run.scale == "tiny" and run.prompt_counts else ():
        like = {"kind": "train", "arm": f"{arm}_random", "base": run.bases[0], "steps": own_settings(run, arm)["steps"]}
        if found := [r for r in committed if (like | tuned(run, of, arm)).items() <= r["spec"].items()]:
            few = of[f"{arm} prompts={run.prompt_counts[0]}"]
            half = [_gain_at(group, few[0]["spec"]["steps"]) for group in (few, found)]
            change = stats.crossed_bootstrap(accuracy_matrix(found), accuracy_matrix(of["base"])[0])
            row = {"arm": arms.ARMS[f"{arm}_random"].label, "test gain, points [95 %]": change.format()}
            row |= {"against the base": against_base(of, found), "validation gain at half length": _points(half[1])}
            row |= {f"with {run.prompt_counts[0]} problems": _points(half[0])}
            rows.append(row | {"difference [95 %]": stats.stratified_bootstrap(half[:1], half[1:]).format()})
    return DataFrame(rows)


def _points(shares: np.ndarray) -> str:
    return f"{100 * shares.mean():.1f}"


def _gain_at(found: Sequence[Record], step: int) -> np.ndarray:
    """Return the greedy validation gains of runs at the last evaluated step that is no later: (seeds,)."""
    lines = [(np.searchsorted(r["curve"]["step"], step, "right") - 1, r["curve"]["validation_greedy"]) for r in found]
    return np.array([line[at] - line[0] for at, line in lines])


def horizon_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return the gain over the base on the test set by steps of thinking before the answer."""
    from pandas import DataFrame

    rows = []
    for arm, length in product(ARMS, run.horizons):
        found, start = of[f"{arm} filler={length}"], of[f"base filler={length}"][0]
        spent = DataFrame([r["budget"] for r in found]).sum()
        row = {"arm": _LABELS[arm], "thinking": length, "base, greedy %": f"{100 * start['test']['greedy']:.1f}"}
        row["tokens an answer"] = f"{spent['generated_tokens'] / spent['completions']:.1f}"
        rows.append(row | _tested(found, start))
    return DataFrame(rows)


def replay_table(of: Records) -> DataFrame:
    """Return the largest replay error of the tuned ES runs, and the bytes a step of their ledgers."""
    from pandas import DataFrame

    kept = [r["ledger"] | {"steps": r["spec"]["steps"]} for r in of["es"]]
    plain, packed = (np.mean([k[size] / k["steps"] for k in kept]) for size in ("bytes", "gzip_bytes"))
    row = {"runs": len(kept), "largest replay error": f"{max(k['replay_error'] for k in kept):g}"}
    return DataFrame([row | {"bytes a step": f"{plain:.3g}", "bytes a step, gzipped": f"{packed:.3g}"}])


# ---- what the figures plot: a row per point


def seed_curves(of: Records) -> DataFrame:
    """Return the greedy validation accuracy of every tuned run, in %, by completions."""
    from pandas import DataFrame, concat

    lines = []
    for r in (r for arm in ARMS for r in of[arm]):
        line = {"completions": r["curve"]["completions"], "accuracy": 100 * np.array(r["curve"]["validation_greedy"])}
        lines.append(DataFrame(line).assign(arm=r["spec"]["arm"], seed=r["spec"]["seed"]))
    return concat(lines, ignore_index=True)


def falls(of: Records) -> DataFrame:
    """Return the tuned runs as `frame`, with the largest drawdown of each, in points, in the place of its accuracy."""
    found = frame(of, ARMS)
    for decoding in DECODINGS:
        found[decoding] = np.concatenate([100 * drawdowns(of, arm, decoding) for arm in ARMS])
    return found


def worst_run(of: Records, arm: str) -> DataFrame:
    """Return completions, greedy validation accuracy and its running maximum, in %, of the run that falls furthest."""
    from pandas import DataFrame

    curve = of[arm][int(drawdowns(of, arm, "greedy").argmax())]["curve"]
    line = 100 * np.array(curve["validation_greedy"])
    return DataFrame(
        {"arm": arm, "completions": curve["completions"], "accuracy": line, "maximum": np.maximum.accumulate(line)}
    )


def population_curves(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return the mean greedy validation accuracy, in %, with its 95 % band, by population and completions."""
    from pandas import DataFrame, concat

    lines = []
    for N, group in of_sizes(run).items():
        mean, low, high = stats.curve_band(100 * np.array([r["curve"]["validation_greedy"] for r in of[group]]))
        band = {"completions": of[group][0]["curve"]["completions"], "mean": mean, "low": low, "high": high}
        lines.append(DataFrame({"panel": "greedy", "population_size": N} | band))
    return concat(lines, ignore_index=True)


def contender_scores(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return one row per contender and base: its score, and `step`, its step size as a multiple of the tuned one."""
    tries = frame(of, [f"{arm} {kind}" for arm in ARMS for kind in ("sweep", "transfer")], panel="settings")
    own = {arm: tuned(run, of, arm) for arm in ARMS}
    chosen = {(arm, *setting.values()) for arm in ARMS for setting in contenders(run, of, arm)}
    tries = tries[[(r.arm, *(getattr(r, name) for name in own[r.arm])) in chosen for r in tries.itertuples()]]
    steps = {arm: tries[name] / own[arm][name] for arm, name in STEP.items()}
    return tries.assign(step=steps["es"].fillna(steps["grpo"])).sort_values("step")


def transfer_runs(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return one row per full run on another base: arm, base, `which` setting, outcome and greedy accuracy in %."""
    from pandas import DataFrame

    rows = []
    for (arm, base), which in product(winners(run, of), ("shared", "best")):
        for r in full_runs(run, of, arm, base, which):
            row = {"panel": "test", "arm": arm, "base": base, "which": which, "outcome": outcome(r)}
            rows.append(row | {"greedy": 100 * r["test"]["greedy"]})
    return DataFrame(rows)


def horizon_runs(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return the runs of the horizons as `frame`, with their greedy gains over the base in the place of accuracies."""
    found = frame(of, [f"{arm} filler={n}" for arm in ARMS for n in run.horizons]).drop(columns="t1")
    starts = {length: 100 * of[f"base filler={length}"][0]["test"]["greedy"] for length in run.horizons}
    return found.assign(greedy=found["greedy"] - found["filler_steps"].map(starts))


# ---- the figures


def figure_seeds(run: SimpleNamespace, of: Records) -> tuple[Figure, DataFrame]:
    """Draw mean and range of the tuned runs, the spread over seeds against the mean, and the ends.

    A range is from the lowest to the highest run, and no interval. Returns the figure and the plotted data.
    """
    from matplotlib import pyplot as plt
    from pandas import concat

    lines, ends = seed_curves(of), frame(of, ARMS)
    points = lines.groupby(["arm", "completions"])["accuracy"].agg(["mean", "std", "min", "max"]).reset_index()
    fig, axes = plt.subplots(1, 3, figsize=(style.PAGE, 2.5), width_ratios=[1.2, 1.1, 0.9])
    for arm, part in points.groupby("arm"):
        after = part[part["completions"] > 0]  # 0 has no place on a logarithmic axis
        axes[0].plot(after["completions"], after["mean"], **style.line(arm))
        style.band(axes[0], after["completions"], after["min"], after["max"], style.ARMS[arm].color)
        axes[1].plot(part["mean"], part["std"], **style.line(arm) | {"markevery": 1, "lw": 0.5})
    _draw_ends(axes[2], ends)
    axes[0].set(xscale="log", xlabel="completions", ylabel="greedy validation accuracy, %")
    axes[1].axvline(100 * run.matched_mean, color="black", lw=0.6, ls=":")
    axes[1].set(xlabel="mean over seeds, %", ylabel="std over seeds, points")
    axes[2].set_ylabel("test accuracy, %")
    style.legend(fig, {arm: len(of[arm]) for arm in ARMS}, decodings=())
    return fig, concat([lines.assign(panel="curves"), points.assign(panel="spread"), ends.assign(panel="test")])


def figure_drawdowns(of: Records) -> tuple[Figure, DataFrame]:
    """Draw the worst run of each arm below its running maximum, and every drawdown; return the plotted data, too."""
    from matplotlib import pyplot as plt
    from pandas import concat

    fell, worst = falls(of), concat([worst_run(of, arm) for arm in ARMS])
    fig, axes = plt.subplots(1, 2, figsize=(style.PAGE, 2.4), width_ratios=[1.4, 1])
    for arm, one in worst[worst["completions"] > 0].groupby("arm"):  # 0 has no place on a logarithmic axis
        axes[0].plot(one["completions"], one["accuracy"], **style.line(arm))
        axes[0].plot(one["completions"], one["maximum"], color=style.ARMS[arm].color, lw=0.6)
        style.band(axes[0], one["completions"], one["accuracy"], one["maximum"], style.ARMS[arm].color)
    _draw_ends(axes[1], fell)
    axes[0].set(xscale="log", xlabel="completions", ylabel="greedy validation accuracy, %")
    axes[1].set(ylim=(0, None), ylabel="largest drawdown, points")
    style.legend(fig, {arm: len(of[arm]) for arm in ARMS}, decodings=())
    return fig, concat([worst.assign(panel="worst run"), fell.assign(panel="drawdown")])


def _draw_ends(ax: Axes, found: DataFrame) -> None:
    """Draw runs as dots, both arms side by side for each decoding."""
    for (i, arm), (j, decoding) in product(enumerate(ARMS), enumerate(DECODINGS)):
        part = found[found["arm"] == arm]
        style.dots(ax, 3 * j + i, part[decoding], part["outcome"] == "failed", arm, width=0.6)
    ax.set_xticks([3 * j + 0.5 for j in range(len(DECODINGS))], [_WORDS[name] for name in DECODINGS])
    ax.set_xlim(-0.9, 3 * len(DECODINGS) - 1.1)


def figure_maps(run: SimpleNamespace, of: Records) -> tuple[Figure, DataFrame]:
    """Draw the maps, the step size to the right in both, and every run by the rank of its setting; return the runs."""
    from matplotlib import pyplot as plt
    from pandas import concat

    cells = {arm: map_cells(of, arm) for arm in ARMS}
    runs = {arm: frame(of, [f"{arm} map"]) for arm in ARMS}
    every = concat(cells.values())["mean"]
    fig, axes = plt.subplots(1, 3, figsize=(style.PAGE, 2.9), width_ratios=[1.4, 1.4, 0.9])
    for ax, arm, side in zip(axes, ARMS, (-0.2, 0.2), strict=False):
        _draw_map(ax, arm, cells[arm], tuned(run, of, arm), (every.min(), every.max()))
        settings = [part for _, part in runs[arm].groupby(list(arms.swept(arm)))]
        for rank, part in enumerate(sorted(settings, key=lambda part: -part["score"].mean()), 1):
            style.dots(axes[2], rank + side, part["score"], part["outcome"] == "failed", arm, width=0.3)
    axes[2].axhline(100 * of["base"][0]["validation"]["greedy"], lw=0.8, color=style.ARMS["base"].color)
    axes[2].set_xticks(range(1, max(map(len, cells.values())) + 1))
    axes[2].set(xlabel="rank of the setting", ylabel="greedy validation accuracy, %")
    style.legend(fig, dict.fromkeys(ARMS, len(map_seeds(run))) | {"base": None}, decodings=())
    return fig, concat(runs.values())


def _draw_map(ax: Axes, arm: str, cells: DataFrame, chosen: Mapping[str, float], limits: tuple[float, float]) -> None:
    """Draw the means of an arm's settings in grey, with their numbers; the chosen setting is framed."""
    from matplotlib.patches import Rectangle

    x, y = STEP[arm], next(name for name in chosen if name != STEP[arm])
    table = cells.pivot(index=y, columns=x, values="mean")
    ax.imshow(table, cmap="Greys", vmin=limits[0], vmax=limits[1], aspect="auto", origin="lower")
    for _, cell in cells.iterrows():
        at = table.columns.get_loc(cell[x]), table.index.get_loc(cell[y])
        text = f"{cell['mean']:.1f}\n({cell['low']:.1f}–{cell['high']:.1f})"
        text += f"\n{cell['failed']:.0f} failed" if cell["failed"] else ""
        color = "white" if cell["mean"] > np.mean(limits) else "black"  # whichever stands out from the grey below
        ax.text(*at, text, ha="center", va="center", fontsize=6, color=color)
        if chosen == {x: cell[x], y: cell[y]}:
            for width, edge in ((5, "white"), (2.5, style.ARMS[arm].color)):
                ax.add_patch(Rectangle((at[0] - 0.46, at[1] - 0.46), 0.92, 0.92, fill=False, lw=width, color=edge))
    ax.set_xticks(range(table.shape[1]), [f"{v:g}" for v in table.columns])
    ax.set_yticks(range(table.shape[0]), [f"{v:g}" for v in table.index])
    ax.set(xlabel=f"{x.replace('_', ' ')} (step size)", ylabel=y, title=f"{_LABELS[arm]}, tuned setting framed")
    ax.grid(False)


def figure_populations(run: SimpleNamespace, of: Records) -> tuple[Figure, DataFrame]:
    """Draw the curves of ES with each population in shades of its blue, and every run by N; return the data, too."""
    from matplotlib import pyplot as plt
    from matplotlib.colors import to_rgb
    from pandas import concat

    blue = np.array(to_rgb(style.ARMS["es"].color))
    shades = ((1 - 0.45 * (1 - blue), "v", ":"), (blue, "o", "-"), (0.35 * blue, "s", "--"))
    bands, ends = population_curves(run, of), frame(of, of_sizes(run).values(), panel="test")
    fig, axes = plt.subplots(1, 2, figsize=(style.PAGE, 2.4), width_ratios=[1.4, 1])
    for (N, group), (color, marker, dash) in zip(of_sizes(run).items(), shades, strict=True):
        part = bands[(bands["population_size"] == N) & (bands["completions"] > 0)]
        look = {"color": color, "marker": marker, "ls": dash, "label": f"N = {N} (n = {len(of[group])})"}
        axes[0].plot(part["completions"], part["mean"], markevery=0.2, **look)
        style.band(axes[0], part["completions"], part["low"], part["high"], color)
    axes[0].set(xscale="log", xlabel="completions", ylabel="greedy validation accuracy, %")
    axes[0].legend()
    _draw_levels(axes[1], ends, "population_size", "greedy")
    axes[1].set(xlabel="N", ylabel="greedy test accuracy, %")
    return fig, concat([bands, ends])


def _draw_levels(ax: Axes, found: DataFrame, field: str, column: str) -> None:
    """Draw runs over the levels of a field, on a logarithmic axis, two arms a little apart; a line joins the means."""
    levels = sorted({float(level) for level in found[field]})
    unit = np.ptp(np.log10(levels)) / 25
    for arm, of_arm in found.groupby("arm"):
        side = 0 if found["arm"].nunique() == 1 else unit if arm == "grpo" else -unit
        for level, part in of_arm.groupby(field):
            at, failed = np.log10(float(level)) + side, part["outcome"] == "failed"
            style.dots(ax, at, part[column], failed, arm, width=1.4 * unit)
        means = of_arm.groupby(field)[column].mean()
        ax.plot(np.log10(means.index.to_numpy(float)) + side, means, color=style.ARMS[arm].color, lw=0.8)
    ax.set_xticks(np.log10(levels), [f"{level:,g}" for level in levels])


def figure_transfer(run: SimpleNamespace, of: Records) -> tuple[Figure, DataFrame]:
    """Draw the contenders by step size on each base, and full runs elsewhere; return the plotted data, too."""
    from matplotlib import pyplot as plt
    from pandas import concat

    tries, finals = contender_scores(run, of), transfer_runs(run, of)
    dashes = dict(zip(run.bases, ("-", "--", ":"), strict=False))
    fig, axes = plt.subplots(1, 2, figsize=(style.PAGE, 2.6), width_ratios=[1, 1.5])
    for (arm, base), part in tries.groupby(["arm", "base"]):
        axes[0].plot(part["step"], part["score"], **style.line(arm) | {"markevery": 1, "linestyle": dashes[base]})
    axes[0].set(xscale="log", xlabel="step size / tuned step size", ylabel="greedy validation accuracy, %")
    axes[0].set_xticks([0.1, 0.3, 1, 3], ["0.1", "0.3", "1", "3"])
    axes[0].minorticks_off()
    ticks, places = [], {"shared": 0, "best": 0.6}
    for i, (arm, base) in enumerate(winners(run, of)):
        for which, apart in places.items():
            part = finals[(finals["arm"] == arm) & (finals["base"] == base) & (finals["which"] == which)]
            style.dots(axes[1], 1.6 * i + apart, part["greedy"], part["outcome"] == "failed", arm, width=0.35)
            ticks.append((1.6 * i + apart, f"{which}\n{base.split('/')[-1]}"))
    axes[1].set_xticks(*zip(*ticks, strict=True))
    axes[1].set(ylabel="greedy test accuracy, %")
    n = finals.groupby(["arm", "base", "which"]).size().min()
    handles = [plt.Line2D([], [], **style.line(arm) | {"label": f"{_LABELS[arm]} (right: n = {n})"}) for arm in ARMS]
    short = {base.split("/")[-1]: dash for base, dash in dashes.items()}
    handles += [plt.Line2D([], [], color="black", ls=dash, label=f"base {name}") for name, dash in short.items()]
    fig.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return fig, concat([tries, finals])


def figure_prompts(run: SimpleNamespace, of: Records) -> tuple[Figure, DataFrame]:
    """Draw greedy test accuracy and training reward of every run by its number of unique problems; return the runs."""
    from matplotlib import pyplot as plt

    found = frame(of, [f"{arm} prompts={n}" for arm in ARMS for n in run.prompt_counts])
    fig, axes = plt.subplots(1, 2, figsize=(style.PAGE, 2.5))
    looks = {"greedy": ("greedy test accuracy, %", "other problems"), "reward": ("reward", "own problems, last step")}
    for ax, (column, (label, title)) in zip(axes, looks.items(), strict=True):
        _draw_levels(ax, found, "unique_prompts", column)
        ax.set(xlabel="unique problems", ylabel=label, title=title)
    axes[0].axhline(100 * of["base"][0]["test"]["greedy"], lw=0.8, color=style.ARMS["base"].color)
    n = int(found.groupby(["arm", "unique_prompts"]).size().min())
    style.legend(fig, dict.fromkeys(ARMS, n) | {"base": None}, decodings=())
    return fig, found


def figure_horizon(run: SimpleNamespace, of: Records) -> tuple[Figure, DataFrame]:
    """Draw the greedy gain of every run by its steps of thinking before the answer; return the runs, too."""
    from matplotlib import pyplot as plt

    found = horizon_runs(run, of)
    fig, ax = plt.subplots(figsize=(1.3 * style.COLUMN, 2.4))
    _draw_levels(ax, found, "filler_steps", "greedy")
    ax.axhline(0, lw=0.8, color=style.ARMS["base"].color)
    ax.set(xlabel="steps of thinking before the answer", ylabel="greedy gain, points")
    n = int(found.groupby(["arm", "filler_steps"]).size().min())
    style.legend(fig, dict.fromkeys(ARMS, n) | {"base": None}, decodings=())
    return fig, found


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
