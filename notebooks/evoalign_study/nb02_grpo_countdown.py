"""Notebook 02, GRPO and ES: presets, groups of runs, comparisons, and the numbers that the paper quotes.

Its answers and tables are in `study.views.grpo_countdown`, its figures in `study.views.grpo_countdown_figures`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from evoalign_lib import arms
from evoalign_lib.analysis import curves, stats
from evoalign_lib.analysis.stats import Equivalence, Interval
from evoalign_study import loading, runs
from evoalign_study.kinds.decode import base_specs, best_of_n_specs, label, measured_spec
from evoalign_study.kinds.exact import kl_specs
from evoalign_study.loading import After, Groups, Records
from evoalign_study.records import Record, accuracy_matrix, spec_hash

if TYPE_CHECKING:
    pass

NOTEBOOK = "02_grpo_countdown"
ARMS = runs.TUNED
TINY = {
    "bases": ["A0", "A1", "A2"],  # the first is tuned on
    "retrain": [],  # groups that `force` makes anew; none: all
    **runs.COUNTDOWN["tiny"],
    "grpo_long_steps": 3125,  # of the runs with as many completions as ES
    "best_of": 64,  # samples of best-of-n
    "seeds_long": 2,
    "gains": [0.05, 0.10, 0.15],  # over the base, to which section 8 asks for the budget
    "margin": 0.02,  # of a match
    "temperatures": [0.4, 0.6],  # between greedy decoding and 1, at which models are measured again
    "decoded": [  # besides base, ES and GRPO
        "dapo",
        "dr_grpo",
        "dr_grpo_scaled",
        "es_random",
        "es_sampled",
        "grpo_random",
        "grpo_unscaled",
        "rloo",
        "sft",
    ],
    "curve_temperature": 0.6,  # at which whole curves are measured again
    "decoded_curves": ["es", "es_elsewhere", "grpo", "grpo_elsewhere"],  # groups whose curves are
    "kl_sigmas": [0.003, 0.01, 0.03],  # of the noise that moves the base in section 4
    "kl_problems": 128,
    "kl_samples": 16,
    "kl_repeats": 16,
}
SMOKE = TINY | {
    **runs.COUNTDOWN["smoke"],
    "bases": ["A0"],
    "grpo_long_steps": 6,
    "best_of": 4,
    "seeds_long": 1,
    "decoded": [],
    "decoded_curves": ["grpo"],
    "kl_sigmas": [0.01],
    "kl_problems": 4,
    "kl_samples": 2,
    "kl_repeats": 2,
}
FULL = TINY | runs.COUNTDOWN["full"]


def presets(model: str = "") -> dict[str, dict[str, Any]]:
    """Return scale -> settings; model: that of scale full, empty for the scale's own."""
    return {"tiny": TINY, "smoke": SMOKE, "full": FULL | {"bases": [model or "Qwen/Qwen2.5-0.5B-Instruct"]}}


def groups(run: SimpleNamespace, of: Records) -> Groups:
    """Return the runs by name. All arms come after the sweeps, which choose their settings on the first base.

    Raises ValueError for seeds=1, which leaves nothing to compare arms by.
    """
    if run.seeds == 1:
        raise ValueError("seeds=1: arms are compared by their spread over seeds, take 2 or more.")
    here, elsewhere, settings = run.bases[:1], run.bases[1:], loading.of_runs(vars(run))
    many, some, few = run.seeds_match, run.seeds_compare, run.seeds_describe
    scale, exact = of_tiny_world(run)
    train = partial(runs.tuned, run, of)
    return {
        "base": base_specs(run.bases, settings, run.scale),
        **runs.sweep(run, "es"),
        **runs.sweep(run, "grpo"),
        "kl": [s for sigma in exact["kl_sigmas"] for s in kl_specs("A0", sigma, exact["kl_repeats"], exact, scale)],
        "es": train("es", here, many, ledgers=here),  # later notebooks replay them
        "grpo": train("grpo", here, many),
        "dr_grpo": train("dr_grpo", here, some),
        "es_random": train("es_random", here, some),
        "grpo_random": train("grpo_random", here, some),
        "es_elsewhere": train("es", elsewhere, some),
        "grpo_elsewhere": train("grpo", elsewhere, some),
        "es_sampled": train("es_sampled", here, some),
        "grpo_unscaled": train("grpo", here, some, scale_rewards="none"),
        "dr_grpo_scaled": train("dr_grpo", here, some, scale_rewards="group"),
        "dapo": train("dapo", here, few),
        "rloo": train("rloo", here, few),
        "sft": train("sft", here, few),
        "grpo_long": train("grpo", here, run.seeds_long, steps=run.grpo_long_steps),
        "best_of_n": best_of_n_specs(
            here[0], range(loading.seed_count(run, "best_of_n", few)), run.best_of, settings, run.scale
        ),
        "decodings": _decodings(run, of),
    }


def _decodings(run: SimpleNamespace, of: Records) -> After:
    """Runs that measure models again; those of ES also at the FLOPs of GRPO, for claim C2b, and both along curves."""
    es: dict[str, Any] = {"groups": ["es"], "temperatures": run.temperatures}
    if "es" in of and "grpo" in of:
        es["at_step"] = equal_flops_step(of["es"], of["grpo"])
    along = [
        {
            "groups": [group],
            "temperatures": [run.curve_temperature] if group in DECODED else run.temperatures,
            "curve_temperature": run.curve_temperature,
        }
        for group in run.decoded_curves
    ]
    return loading.decodings(run, of, ["base", "grpo", *run.decoded], es, *along)


DECODED = ("base", "es", "grpo")
"""Groups that are measured at all temperatures, whatever else is."""


def equal_flops_step(es: Sequence[Record], grpo: Sequence[Record]) -> int:
    """Return the last step by which no ES run has spent more forward FLOPs than any GRPO run spends in all."""
    least, curves_ = min(r["budget"]["forward_flops"] for r in grpo), [r["curve"] for r in es]
    steps = np.arange(es[0]["spec"]["steps"] + 1)
    spent = [np.interp(steps, curve["step"], curve["forward_flops"]) for curve in curves_]
    return min(int(np.searchsorted(flops, least, side="right")) - 1 for flops in spent)


def by_temperature(of: Records) -> list[dict[str, Any]]:
    """Return test accuracy against the temperature of the samples, 0 being greedy decoding.

    A row per group, base and temperature that was measured again: accuracy with its interval, over seeds and problems
    (of one model over problems), as fractions; and n, the runs. Where no model is measured again (`loading.decodings`)
    the arms, and the base, have their rows of greedy decoding and temperature 1.
    """
    measured: dict[str, dict[str, Any]] = {}
    for r in of["decodings"]:
        tests = measured.setdefault(spec_hash(measured_spec(r["spec"])), {"n": r["test"]["n"]})
        tests |= {f"{label(t)}_counts": r["test"][f"{label(t)}_counts"] for t in r["spec"]["temperatures"]}
    rows = []
    for group in (group for group in of if group != "decodings"):
        for base in dict.fromkeys(r["spec"]["base"] for r in of[group]):
            runs = [r for r in of[group] if r["spec"]["base"] == base]
            if of["decodings"]:
                runs = [r for r in runs if r["spec_hash"] in measured]
            elif group not in (*arms.ARMS, "base"):
                continue
            if not runs:
                continue
            again = [{"test": measured.get(r["spec_hash"], {})} for r in runs]
            matrices = {0.0: accuracy_matrix(runs, "greedy"), 1.0: accuracy_matrix(runs, "t1")}
            asked = sorted({t for r in of["decodings"] for t in r["spec"]["temperatures"]})
            asked = [t for t in asked if all(f"{label(t)}_counts" in r["test"] for r in again)]
            matrices |= {t: accuracy_matrix(again, label(t)) for t in asked}
            for temperature in sorted(matrices):
                found = stats.crossed_bootstrap(matrices[temperature])
                row = {"group": group, "base": base, "temperature": temperature, "accuracy": found.value}
                rows.append(row | {"low": found.low, "high": found.high, "n": found.n})
    return rows


def of_tiny_world(run: SimpleNamespace) -> tuple[str, dict[str, Any]]:
    """Return scale and settings of section 4, which only small models allow (`loading.of_tiny_world`)."""
    return loading.of_tiny_world(run, TINY)


# ---- curves at equal budgets

UNITS = {"completions": 1e3, "generated_tokens": 1e6, "forward_flops": 1e12, "core_seconds": 1}
"""The axes of budget, by their key in the records, and the unit in which tables give them."""


class Match(NamedTuple):
    """Both arms at the largest budget that every run of both has reached."""

    budget: float
    scores: dict[str, list[float]]
    """Arm -> validation accuracy of each run."""
    test: Equivalence | None
    """GRPO - ES, tested for equivalence over seeds; None where no run differs from another."""


def match(of: Records, axis: str, decoding: str, margin: float) -> Match:
    """Compare tuned GRPO with tuned ES on an axis: a match is a difference within the margin."""
    budget = min(r["curve"][axis][-1] for arm in ARMS for r in of[arm])
    scores = {arm: [at_budget(r, axis, budget, decoding) for r in of[arm]] for arm in ARMS}
    spread = max(np.ptp(values) for values in scores.values())  # none at scale smoke, where nothing is learned
    test = stats.welch_equivalence(scores["grpo"], scores["es"], margin) if spread else None
    return Match(budget, scores, test)


def at_budget(record: Record, axis: str, budget: float, decoding: str = "greedy") -> float:
    """Return a run's validation accuracy at a budget, interpolated in its logarithm."""
    return curves.score_at(record["curve"][axis], record["curve"][f"validation_{decoding}"], budget)


def best_at(sweep: Sequence[Record], axis: str, budget: float) -> tuple[float, dict[str, float]]:
    """Return the best greedy validation accuracy of a sweep at a budget, and its setting.

    NaN where no run has a point by then, as at scale smoke, and then the setting is the sweep's best at its end.
    """
    names = arms.swept(sweep[0]["spec"]["arm"])
    begun = [r for r in sweep if r["curve"][axis][1] <= budget]
    scored = [(at_budget(r, axis, budget), r["spec"]) for r in begun]
    score, spec = max(scored, key=lambda pair: pair[0], default=(np.nan, arms.ranked(sweep)[0][1]))
    return score, {name: spec[name] for name in names}


def hindsight(of: Records, axis: str) -> tuple[float, dict[str, tuple[float, dict[str, float]]]]:
    """Return the largest budget that all runs of both sweeps reached, and arm -> `best_at` there."""
    sweeps = {arm: of[f"sweep {arm}"] for arm in ARMS}
    budget = min(r["curve"][axis][-1] for found in sweeps.values() for r in found)
    return budget, {arm: best_at(found, axis, budget) for arm, found in sweeps.items()}


def larger_alpha(of: Records, pilot: Sequence[Record]) -> tuple[int, np.ndarray, Interval] | None:
    """Compare tuned GRPO with the ES runs of notebook 01, whose alpha is larger, at GRPO's completions.

    Returns the completions, greedy validation accuracy of the pilot's runs (seeds,), and GRPO - ES; None where no run
    of the pilot has a point by then, as at scale smoke.
    """
    least = min(r["budget"]["completions"] for r in of["grpo"])
    begun = [r for r in pilot if r["curve"]["completions"][1] <= least]
    if not begun:
        return None
    sides = [np.array([at_budget(r, "completions", least) for r in found]) for found in (of["grpo"], begun)]
    return least, sides[1], stats.stratified_bootstrap(sides[:1], sides[1:])


def pilot(committed: Sequence[Record]) -> list[Record]:
    """Return the ES runs of notebook 01 on base A0 among committed records."""
    wanted = {"kind": "train", "arm": "es", "base": "A0", "steps": 100}
    return [r for r in committed if r["notebook"] == "01_es_countdown" and wanted.items() <= r["spec"].items()]


# ---- budgets to a gain


def to_target(of: Records, arm: str, gain: float, axis: str) -> curves.ToTarget:
    """Return when an arm's runs first gained so much greedy validation accuracy over the base, in units of `UNITS`."""
    lines = [(np.array(r["curve"][axis]) / UNITS[axis], r["curve"]["validation_greedy"]) for r in of[arm]]
    return curves.completions_to_target(lines, of["base"][0]["validation"]["greedy"] + gain)


def exchange_rate(of: Records, gain: float, axis: str) -> float | None:
    """Return the median budget of ES to a gain over that of GRPO; None where an arm has no median."""
    medians = [curves.median_to_target(to_target(of, arm, gain, axis)).value for arm in ARMS]
    return medians[0] / medians[1] if np.isfinite(medians).all() else None


# ---- the test set


def accuracies(of: Records, group: str, decoding: str, base: str) -> np.ndarray:
    """Return the share of right answers of a group's runs on a base: (seeds, problems)."""
    return accuracy_matrix([r for r in of[group] if r["spec"]["base"] == base], decoding)


EFFECTS = {
    "scaling off": {"grpo": -0.5, "grpo_unscaled": 0.5, "dr_grpo_scaled": -0.5, "dr_grpo": 0.5},
    "Dr.GRPO's loss": {"grpo": -0.5, "grpo_unscaled": -0.5, "dr_grpo_scaled": 0.5, "dr_grpo": 0.5},
    "both: Dr.GRPO - GRPO": {"grpo": -1, "dr_grpo": 1},
    "ES: greedy - sampled fitness": {"es": 1, "es_sampled": -1},
}
"""Effects of section 10: the weight of each group's accuracy."""


def effect(of: Records, what: str, decoding: str, base: str) -> Interval:
    """Return an effect on test accuracy, over the seeds that all its groups have; they are resampled as blocks."""
    sides = {group: accuracies(of, group, decoding, base) for group in EFFECTS[what]}
    blocks = min(map(len, sides.values()))
    return stats.crossed_bootstrap(sum(weight * sides[group][:blocks] for group, weight in EFFECTS[what].items()))


# ---- the runs, as answers and claims take them


def trained(of: Records) -> list[Record]:
    """Return the records of all bases, of all training runs with a test set, and of best-of-n."""
    return [r for group in ["base", *designed(of), "best_of_n"] for r in of[group]]


def swept(of: Records) -> list[Record]:
    """Return the records of both sweeps."""
    return [r for arm in ARMS for r in of[f"sweep {arm}"]]


def judged(run: SimpleNamespace, of: Records) -> list[Record]:
    """Return all records that the claims of this notebook are judged by."""
    of_kl = of["kl"] if of_tiny_world(run)[0] == run.scale else []
    return [*trained(of), *swept(of), *of_kl, *of["decodings"]]


def designed(of: Records, base: str = "") -> list[str]:
    """Return the groups that train and are tested; with a base, those that have runs on it."""
    found = [group for group in of if of[group] and of[group][0]["spec"].get("test_problems")]
    found = [group for group in found if group not in ("base", "best_of_n", "decodings")]
    return [group for group in found if not base or any(r["spec"]["base"] == base for r in of[group])]


# ---- the paper's numbers

_Numbers = dict[str, tuple[Any, str]]
_MACROS = {"greedy": "Greedy", "t1": "Sampled"}


def numbers(
    run: SimpleNamespace,
    of: Records,
    before: Sequence[Record],
    effects: Mapping[tuple[str, str], Interval],
    decided: Mapping[str, Mapping[str, Interval]],
) -> _Numbers:
    """Return macro -> value and format, of all but the KL estimators.

    Args:
        before: the runs of notebook 01 (`pilot`).
        effects: (key of EFFECTS, decoding) -> `effect`.
        decided: claim -> the intervals of its verdict by label; what C30 and C31 decide is quoted from there.
    """
    found = _settings(run, of) | _budgets(of) | _ends(run, of) | _compared(run, of)
    for axis in UNITS:
        _, best = hindsight(of, axis)
        found[f"Hindsight{_camel(axis)}"] = (100 * (best["grpo"][0] - best["es"][0]), ".1f")
    for gain, stem in zip((0.05, 0.10, 0.15), ("Five", "Ten", "Fifteen"), strict=True):
        rates = {axis: exchange_rate(of, gain, axis) for axis in UNITS} if gain in run.gains else {}
        found |= {f"Ratio{_camel(axis)}{stem}": (rate, ".2g") for axis, rate in rates.items() if rate is not None}
    named = _leads(run, of) | {
        "ScalingEffect": effects["scaling off", "greedy"],
        "LossEffect": effects["Dr.GRPO's loss", "greedy"],
        "DrGrpoEffect": effects["both: Dr.GRPO - GRPO", "greedy"],
        "GreedyFitnessEffect": effects["ES: greedy - sampled fitness", "greedy"],
        "GreedyFitnessSampled": effects["ES: greedy - sampled fitness", "t1"],
    }
    named |= {stem: found_ for stem in _DECIDED if (found_ := decision(decided, stem)) is not None}
    if (larger := larger_alpha(of, before)) is not None:
        found["LargerAlphaGreedy"] = (100 * larger[1].mean(), ".1f")
        named["LargerAlphaLead"] = larger[2]
    for row in by_temperature(of):
        if row["base"] == run.bases[0] and row["temperature"] == 0.6 and row["group"] in _STEMS:
            found[f"{_STEMS[row['group']]}AtSix"] = (100 * row["accuracy"], ".1f")
    for stem, interval in named.items():
        found |= _ends_of(stem, interval)
    return found


_STEMS = {"base": "Untrained", "es": "Tuned", "grpo": "Grpo"}
_DECIDED = {
    "DrGrpoEffect": ("C30", "test greedy"),
    "GreedyFitnessEffect": ("C31", "test greedy"),
    "GreedyFitnessSampled": ("C31", "test temperature 1"),
}
"""Macro -> claim, and how the label of its interval ends in the verdict."""


def decision(decided: Mapping[str, Mapping[str, Interval]], macro: str) -> Interval | None:
    """Return the interval of a verdict that a macro quotes; None where its claim could not be judged."""
    claim, measure = _DECIDED[macro]
    # the first decides
    return next((found for label, found in decided.get(claim, {}).items() if label.endswith(f", {measure}")), None)


def _settings(run: SimpleNamespace, of: Records) -> _Numbers:
    """Seeds, tuned settings, and what tuning was worth."""
    found = {"GrpoSeeds": (len(of["grpo"]), "d"), "TunedSeeds": (len(of["es"]), "d")}
    found |= {"SweepSize": (len(of["sweep es"]), "d"), "GrpoGroup": (run.grpo_num_generations, "d")}
    ranking = {arm: arms.ranked(of[f"sweep {arm}"]) for arm in ARMS}
    names = {"Sigma": ("es", "sigma"), "Alpha": ("es", "alpha")}
    names |= {"Rate": ("grpo", "learning_rate"), "Beta": ("grpo", "beta")}
    found |= {f"Tuned{macro}": (ranking[arm][0][1][name], "g") for macro, (arm, name) in names.items()}
    for arm, stem in (("es", "Tuned"), ("grpo", "Grpo")):
        best = 100 * curves.expected_maximum([score for score, _ in ranking[arm]])
        found |= {f"{stem}OneTried": (best[0], ".1f"), f"{stem}AllTried": (best[-1], ".1f")}
    return found


def _budgets(of: Records) -> _Numbers:
    """Completions of a run, and how the long and the short runs of GRPO compare with those of ES."""
    groups = {"Tuned": "es", "Grpo": "grpo", "Long": "grpo_long"}
    spent = {stem: of[group][0]["budget"]["completions"] for stem, group in groups.items() if of[group]}
    found = {f"{stem}Completions": (completions, ",d") for stem, completions in spent.items()}
    found["CompletionsRatio"] = (spent["Tuned"] / spent["Grpo"], ".1f")
    found["FilteredRatio"] = (spent["Tuned"] / of["sft"][0]["budget"]["completions"], ".0f")
    found["FilteredSeeds"] = (len(of["sft"]), "d")
    if of["grpo_long"]:
        for macro, axis in (("LongFlops", "forward_flops"), ("LongSeconds", "core_seconds")):
            means = [np.mean([r["budget"][axis] for r in of[group]]) for group in ("grpo_long", "es")]
            found[f"{macro}Ratio"] = (means[0] / means[1], ".1f")
        for decoding, macro in _MACROS.items():
            ended = sorted(100 * r["test"][decoding] for r in of["grpo_long"])
            found |= {f"Long{macro}Least": (ended[0], ".1f"), f"Long{macro}Most": (ended[-1], ".1f")}
    return found


def _ends(run: SimpleNamespace, of: Records) -> _Numbers:
    """Accuracy on the test set, KL and distance from the base; the nulls; best-of-n."""
    here, found = run.bases[0], {}
    stems = {"base": "Untrained", "es": "Tuned", "grpo": "Grpo", "es_sampled": "SampledFitness", "sft": "Filtered"}
    for group, stem in stems.items():
        for decoding, macro in _MACROS.items():
            found[stem + macro] = (100 * accuracies(of, group, decoding, here).mean(), ".1f")
    for group, stem in (("es", "Tuned"), ("grpo", "Grpo"), ("es_random", "RandomFitness")):
        # None of a run that diverged
        nats = np.array([r["kl_policy_base"]["exact_nats_per_sequence"] for r in of[group]], float)
        norms = np.array([r["update_norm"] for r in of[group]], float)
        found |= {f"{stem}Kl": (nats.mean(), ".2f"), f"{stem}Norm": (norms.mean(), ".1f")}
    untrained = accuracies(of, "base", "greedy", here)
    for group, stem in (("es_random", "RandomFitness"), ("grpo_random", "RandomReward")):
        change = accuracies(of, group, "greedy", here).mean() - untrained.mean()
        found[f"{stem}Change"] = (100 * change, ".1f")
    chosen = [r["best_of_n"] for r in of["best_of_n"]]
    most = max(chosen[0], key=int)
    share = round(100 * np.mean([one[most] for one in chosen]), 1)
    return found | {"BestOf": (run.best_of, "d"), "BestOfAccuracy": (share, ".1f")}


def _compared(run: SimpleNamespace, of: Records) -> _Numbers:
    """GRPO - ES at equal budgets, on each axis."""
    found = {}
    for axis in UNITS:
        for decoding, macro in _MACROS.items():
            test = match(of, axis, decoding, run.margin).test
            found |= _ends_of(f"Match{_camel(axis)}{macro}", test.interval) if test else {}
    return found


def _leads(run: SimpleNamespace, of: Records) -> dict[str, Interval]:
    """GRPO over sampled fitness, random fitness over the base, and GRPO over ES as a mean over the bases."""
    here, *elsewhere = run.bases
    sides = []
    for arm in ARMS:
        cells = [(arm, here), *((f"{arm}_elsewhere", base) for base in elsewhere)]
        sides.append(np.mean([accuracies(of, g, "greedy", base)[: run.seeds_compare] for g, base in cells], axis=0))
    random, base = (accuracies(of, group, "greedy", here) for group in ("es_random", "base"))
    return {
        "BehindSampled": stats.crossed_bootstrap(*(accuracies(of, g, "t1", here) for g in ("grpo", "es_sampled"))),
        "RandomFitnessGain": stats.crossed_bootstrap(random, base[0]),
        "GrpoAhead": stats.crossed_bootstrap(sides[1], sides[0]),
    }


def kl_numbers(run: SimpleNamespace, found: Sequence[Record]) -> _Numbers:
    """Return macro -> value and format, of the KL estimators at sigma 0.01; none where they were not measured."""
    scale, exact = of_tiny_world(run)
    middle = [r["kl"] for r in found if r["spec"]["sigma"] == 0.01]
    if scale != run.scale or not middle:
        return {}
    exact_kl = np.array([one["exact_token_mean"] for one in middle])
    bias = np.array([one["k2_token_bias"] for one in middle]) / exact_kl
    spread = [one["k1_token_std"] / one["k3_token_std"] for one in middle]  # a ratio per repeat, as claim C29 has it
    return {
        "KTwoBias": (100 * bias.mean(), ".0f"),
        "KThreeCosine": (np.mean([one["k3_gradient_token_cosine"] for one in middle]), ".2f"),
        "KOneSpread": (np.mean(spread), ".2f"),
        "KlRepeats": (exact["kl_repeats"], "d"),
    }


def _ends_of(stem: str, interval: Interval) -> _Numbers:
    return {f"{stem}{end.title()}": (100 * getattr(interval, end), ".1f") for end in ("value", "low", "high")}


def _camel(axis: str) -> str:
    return "".join(word.title() for word in axis.split("_"))
