"""Notebook 07's tricks of evolution strategies at equal completions and equal tuning: runs, table and answers.

Every trick has as many completions as plain ES has for GRPO's forward FLOPs (claim C2c), and tries four settings there
on the validation set. The best one is run again with other seeds, and tested.
"""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from pandas import DataFrame

from evoalign_lib import arms
from evoalign_lib.analysis import stats
from evoalign_study import coverage_factors as factors
from evoalign_study import loading, runs, style, weight_cache
from evoalign_study.claims.findings import Finding
from evoalign_study.kinds.weights import merge_specs, path_spec
from evoalign_study.loading import Group, Groups, Records
from evoalign_study.records import Record, Spec, accuracy_matrix, unpack_bits
from evoalign_study.results import Results

_ALPHAS = (0.00125, 0.0025, 0.005, 0.01)
TRICKS: dict[str, list[dict[str, Any]]] = {
    "es_pairs": [{"alpha": alpha} for alpha in _ALPHAS],
    # ranks have .29 of the root mean square of z-scores
    "es_ranks": [{"alpha": float(f"{alpha * 12**0.5:.3g}")} for alpha in _ALPHAS],
    "es_scheduled": [
        {"alpha": alpha, "alpha_schedule": "linear"} | noise
        for alpha in (0.004, 0.008)
        for noise in ({}, {"sigma": 0.02, "sigma_schedule": "linear"})
    ],
    "es_anchored": [{"alpha": alpha, "anchor_decay": decay} for alpha in (0.0025, 0.005) for decay in (0.005, 0.02)],
    "es_low_rank": [{"alpha": alpha} for alpha in _ALPHAS],
}
"""Arm -> the four settings that are tried; both schedules end at a tenth."""
MEAN, PARTS = "mean of 4", 4
"""The mean of the weights of four runs, which have a quarter of the steps each."""
_SHORT, _FACTORS = (0.005, 0.01), (1, 2)
"""Alphas of these runs, and factors on their mean displacement: four settings, too."""
PLAIN, GRPO, WALK = "plain es", "tuned grpo", "plain walk"
"""Groups of notebook 02's runs of claim C2c, and of that ES with random fitness."""
DECODINGS = ("greedy", "t0.6", "t1")


def groups(run: SimpleNamespace, records: Records, scale: str) -> Groups:
    """Return plain ES and GRPO, and of each of `run.tricks` trials ("tuned NAME") and, from their best, tested runs."""
    tiny = scale == "tiny"
    here, seeds = run.bases[:1], run.trick_seeds
    whole = loading.of_runs(runs.settings_at(scale, runs.COUNTDOWN)) | {"sampled_at": [0.6], "sigma": 0.01, "rank": 4}
    es = whole | {"population_size": run.trick_members, "prompts_per_step": run.trick_prompts, "alpha": 0.0025}
    es["steps"] = steps = run.trick_steps
    trial = {"test_problems": 0, "curve_points": 6 if tiny else 3, "curve_spacing": None, "sampled_at": None}
    short = es | trial | {"steps": steps // PARTS, "curve_points": 2}
    grpo = whole | {"learning_rate": 1e-4, "beta": 0.0, "num_generations": 16, "prompts_per_step": 16, "steps": 250}
    grpo |= {} if tiny else {"num_generations": 4, "prompts_per_step": 4, "steps": steps}
    made: dict[str, Any] = {PLAIN: Group("es", here, run.trick_compared, es, scale=scale)}
    made[GRPO] = Group("grpo", here, run.trick_compared, grpo, scale=scale)
    if WALK in run.tricks:
        made[WALK] = Group("es_random", here, max(1, seeds // 2), es, scale=scale)
    for arm, settings in ((arm, settings) for arm, settings in TRICKS.items() if arm in run.tricks):
        trials, tried = f"tuned {arm}", settings[: run.trick_settings]
        made[trials] = Group(arm, here, [arms.SWEEP_SEED], es | trial, tried, scale=scale)
        best = chosen(records[trials], settings) if trials in records else settings[0]
        made[arm] = Group(arm, here, seeds, es | {"curve_points": 3} | best, after=(trials,), scale=scale)
    if MEAN not in run.tricks:
        return made
    first = arms.SWEEP_SEED
    changes = [{"alpha": alpha} for alpha in _SHORT]
    made["short trials"] = Group("es", here, [*range(first, first + PARTS)], short, changes, scale=scale)

    def paths(shorts: Sequence[Record]) -> list[Spec]:
        ends = [weight_cache.end(runs.where(shorts, alpha=alpha), factor=_FACTORS[-1]) for alpha in _SHORT]
        return [path_spec(here[0], None, end, es | {"path_points": 3}, scale) for end in ends]

    made[f"tuned {MEAN}"] = runs.after(records, ["short trials"], paths)
    best = best_mean(records[f"tuned {MEAN}"]) if f"tuned {MEAN}" in records else {"alpha": _SHORT[0], "factor": 1}
    own = short | {"alpha": best["alpha"]}
    made["short runs"] = Group("es", here, PARTS * seeds, own, after=(f"tuned {MEAN}",), scale=scale)

    def merged(_: Sequence[Record], shorts: Sequence[Record]) -> list[Spec]:
        each = enumerate(runs.means(shorts, PARTS, len(shorts)))
        wanted = es | {"skill_messages": 8}
        return [merge_specs(some, wanted, scale, factor=best["factor"]) | {"seed": seed} for seed, some in each]

    made[MEAN] = runs.after(records, [f"tuned {MEAN}", "short runs"], merged)
    return made


def chosen(trials: Sequence[Record], settings: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the setting of a trick that is best on the validation set, as `arms.ranked` has it."""
    scored = zip((arms.ranked([trial])[0][0] for trial in trials), settings, strict=False)
    return max(scored, key=lambda pair: pair[0])[1]


def best_mean(paths: Sequence[Record]) -> dict[str, float]:
    """Return alpha and factor of the mean that is right most often on the validation set; paths: from the base."""
    tried = [
        (unpack_bits(record["points"]["greedy_bits"][factor], record["n"]).mean(), {"alpha": alpha, "factor": factor})
        for alpha, record in zip(_SHORT, paths, strict=True)
        for factor in _FACTORS
    ]
    return max(tried, key=lambda pair: pair[0])[1]


# ---- table

_HEADS = {"greedy": "greedily", "t0.6": "at 0.6", "t1": "at 1"}
_SHOWN = {"sigma": "sigma", "alpha": "alpha", "rank": "rank", "anchor_decay": "decay", "learning_rate": "rate"}
_TRIED = {PLAIN: 7, **dict.fromkeys((*TRICKS, MEAN), len(_ALPHAS))}


def _named(records: Records) -> dict[str, tuple[str, str, str]]:
    """Return the name of each row -> its group of models, and the groups of ES and GRPO that it is compared with."""
    own = {"ES": PLAIN} | {style.ARMS[arm].label: arm for arm in TRICKS} | {f"mean of {PARTS} short ES runs": MEAN}
    own |= {style.ARMS["es_random"].label: WALK, "GRPO": GRPO}
    orders = {words: group for words, group in factors.ORDERS.items() if group in factors.COMPOSED}
    named = {words: (group, PLAIN, GRPO) for words, group in own.items() if group in records}
    return named | {f"{words}, elsewhere": (group, factors.ALONE, "grpo") for words, group in orders.items()}


def _right(records: Records, group: str, at: str) -> np.ndarray:
    """Return right answers (runs, problems) of a group, or their chances where these were computed."""
    computed = group in (*factors.COMPOSED, factors.ALONE, "grpo")
    return factors.chances(records, group, at) if computed else accuracy_matrix(records[group], at)


def _setting(record: Record) -> str:
    """Return the setting of a tested model in words."""
    spec = record["spec"]
    run = spec["of"]["run"] if "of" in spec else spec
    words = [f"{word} {run[name]:g}" for name, word in _SHOWN.items() if name in run]
    words += [f"{name.partition('_')[0]} falls" for name in ("sigma_schedule", "alpha_schedule") if name in spec]
    return ", ".join(words + ([f"times {spec['factor']:g}"] if "factor" in spec else []))


def table(records: Records) -> DataFrame:
    """Return a row per trick: its setting, what is right under three decodings, and greedily the differences.

    p: of being better than plain ES, after Holm's correction over the tricks.
    """
    rows, p = {}, {}
    for words, (group, *beside) in _named(records).items():
        own = {at: _right(records, group, at) for at in DECODINGS}
        row = {"trained by": words, "n": len(own["greedy"]), "tried": f"{_TRIED.get(group, '')}"}
        row |= {"setting": "" if group in factors.COMPOSED else _setting(records[group][0])}
        row |= {head: stats.crossed_bootstrap(own[at]).format() for at, head in _HEADS.items()}
        row |= dict.fromkeys(("less ES", "p", "GRPO less it"), "")
        es, grpo = (None if group == name else _right(records, name, "greedy") for name in beside)
        if es is not None:
            better = stats.crossed_bootstrap(own["greedy"], es)
            row["less ES"] = better.format()
            p |= {words: Finding(words, better.n, "", better, 0.0, "above").p(0)} if group in (*TRICKS, MEAN) else {}
        row |= {} if grpo is None else {"GRPO less it": stats.crossed_bootstrap(grpo, own["greedy"]).format()}
        rows[words] = row
    for words, each in stats.holm(p).items():
        rows[words]["p"] = f"{each:.2g}"
    return DataFrame(rows.values())


def results(records: Records) -> Results:
    """Return what the best trick gains on plain ES, and the least lead of GRPO over a trick, greedily."""
    plain, grpo, *tricks = (_right(records, name, "greedy") for name in (PLAIN, GRPO, *TRICKS, MEAN) if name in records)
    gained = [stats.crossed_bootstrap(trick, plain) for trick in tricks]
    leads = [stats.crossed_bootstrap(grpo, trick) for trick in tricks]
    least, most = (pick(each, key=lambda one: one.value) for pick, each in ((min, leads), (max, gained)))
    return {"tricks": len(gained), "most gained by a trick": most, "least lead over a trick": least}
