"""Notebook 02, GRPO and ES: presets, groups of runs, comparisons, answers, tables, figures and the paper's numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from evoalign_lib import arms, style, tiny
from evoalign_lib.analysis import curves, kl, power, stats
from evoalign_lib.analysis.stats import Equivalence, Interval
from evoalign_lib.records import Record, accuracy_matrix, spec_hash
from evoalign_lib.study.kinds.base import base_specs
from evoalign_lib.study.kinds.best_of_n import best_of_n_specs
from evoalign_lib.study.kinds.decoding import label, measured_spec
from evoalign_lib.study.kinds.kl import kl_specs
from evoalign_lib.study.kinds.train import sweep_specs
from evoalign_lib.study.notebooks import loading
from evoalign_lib.study.notebooks.loading import After, Group, Groups, Records

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

NOTEBOOK = "02_grpo_countdown"
ARMS = ("es", "grpo")
TINY = {
    "bases": ["A0", "A1", "A2"],  # the first is tuned on
    "retrain": [],  # groups that `force` makes anew; none: all
    "es_population_size": 30,
    "es_prompts_per_step": 128,
    "es_steps": 208,
    "grpo_num_generations": 16,
    "grpo_prompts_per_step": 16,
    "grpo_steps": 250,
    "grpo_long_steps": 3125,  # of the runs with as many completions as ES
    "sft_prompts": 4096,
    "sft_num_generations": 16,
    "sft_batch_size": 64,
    "sft_epochs": 2,
    "best_of": 64,  # samples of best-of-n
    "seeds_match": 16,  # of the arms that may match
    "seeds_compare": 8,  # of arms that a claim compares
    "seeds_describe": 4,  # of all others
    "seeds_long": 2,
    "sweep_size": 12,  # settings an arm
    "sweep_factors": {},  # setting -> what multiplies it in the sweep, which was made for tiny models
    "gains": [0.05, 0.10, 0.15],  # over the base, to which section 8 asks for the budget
    "margin": 0.02,  # of a match
    "max_completion_length": tiny.MAX_COMPLETION_LENGTH,
    "validation_problems": 512,
    "test_problems": 2000,
    "curve_points": 25,
    "curve_spacing": "log",
    "temperatures": [0.4, 0.6],  # between greedy decoding and 1, at which models are measured again
    "decoded": ["dr_grpo", "es_random", "es_sampled"],  # groups that are, besides the base, ES and GRPO
    "curve_temperature": 0.6,  # at which whole curves are measured again
    "decoded_curves": ["es", "es_elsewhere", "grpo_elsewhere"],  # groups whose curves are
    "kl_sigmas": [0.003, 0.01, 0.03],  # of the noise that moves the base in section 4
    "kl_problems": 128,
    "kl_samples": 16,
    "kl_repeats": 16,
}
SMOKE = TINY | {
    "bases": ["A0"],
    "es_population_size": 4,
    "es_prompts_per_step": 16,
    "es_steps": 4,
    "grpo_num_generations": 4,
    "grpo_prompts_per_step": 4,
    "grpo_steps": 4,
    "grpo_long_steps": 6,
    "sft_prompts": 16,
    "best_of": 4,
    "seeds_match": 2,
    "seeds_compare": 1,
    "seeds_describe": 1,
    "seeds_long": 1,
    "sweep_size": 2,
    "decoded": [],
    "decoded_curves": ["grpo"],
    "validation_problems": 16,
    "test_problems": 32,
    "curve_points": 3,
    "kl_sigmas": [0.01],
    "kl_problems": 4,
    "kl_samples": 2,
    "kl_repeats": 2,
}
FULL = TINY | {
    "sweep_factors": {"sigma": 0.1, "alpha": 0.05, "learning_rate": 0.01, "beta": 0.1},
    "max_completion_length": 1024,
    "micro_batch": 16,  # completions in a backward pass
    "tensor_parallel": 1,  # GPUs that share a copy of the model
}


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
    sweeps = {
        f"sweep {arm}": sweep_specs(
            arm, here[0], loading.own_settings(run, arm), run.scale, loading.swept_choices(run, arm)
        )
        for arm in ARMS
    }

    def train(arm: str, bases: Sequence[str], seeds: int, ledgers: Sequence[str] = (), **changes: Any) -> Group:
        sweep = arms.get(arm).sweep or "grpo"  # filtered samples take GRPO's learning rate
        best = loading.ranked_choices(run, sweep, of.get(f"sweep {sweep}"))[0]
        own = loading.own_settings(run, arm) | best
        return Group(arm, bases, seeds, own, [changes], after=(f"sweep {sweep}",), ledgers=ledgers)

    return {
        "base": base_specs(run.bases, settings, run.scale),
        **sweeps,
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
    (of one model over problems), as fractions; and n, the runs.
    """
    measured: dict[str, dict[str, Any]] = {}
    for r in of["decodings"]:
        tests = measured.setdefault(spec_hash(measured_spec(r["spec"])), {"n": r["test"]["n"]})
        tests |= {f"{label(t)}_counts": r["test"][f"{label(t)}_counts"] for t in r["spec"]["temperatures"]}
    rows = []
    for group in (group for group in of if group != "decodings"):
        for base in dict.fromkeys(r["spec"]["base"] for r in of[group]):
            runs = [r for r in of[group] if r["spec"]["base"] == base and r["spec_hash"] in measured]
            if not runs:
                continue
            again = [{"test": measured[r["spec_hash"]]} for r in runs]
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


# ---- what the answers say


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


def answers(
    run: SimpleNamespace, of: Records, before: Sequence[Record], decided: Mapping[str, Mapping[str, Interval]]
) -> dict[str, str]:
    """Return question -> answer in one sentence or two, with estimates, intervals and n; all from records.

    Args:
        before: the runs of notebook 01 (`pilot`).
        decided: claim -> the intervals of its verdict by label. A question whose claim was not judged has no answer.
    """
    here = run.bases[0]
    gains = {decoding: _gains(run, of, decoding) for decoding in loading.DECODINGS}
    found = {
        "Does ES learn?": f"On test problems ES - base is {gains['greedy']}, and {gains['t1']}.",
        "Does tuned GRPO match it?": _ahead_in_words(decided.get("C2b", {})),
        "Does the answer depend on the budget?": _axes_in_words(run, of, before),
        "Would something simpler do?": _filtering_in_words(of, here),
        "Do the details of GRPO matter?": "",
        "Should ES be rewarded for greedy or for sampled answers?": "",
        "Does the choice of KL estimator matter?": "",
    }
    if effect_ := _decision(decided, "DrGrpoEffect"):
        found["Do the details of GRPO matter?"] = (
            f"Dr.GRPO - GRPO is {_points(effect_)} of greedy test accuracy: {_within(effect_, run.margin)} "
            f"{100 * run.margin:g} points (n = {effect_.n})."
        )
    both = [_decision(decided, name) for name in ("GreedyFitnessEffect", "GreedyFitnessSampled")]
    if all(both):
        found["Should ES be rewarded for greedy or for sampled answers?"] = (
            f"Greedy - sampled fitness is {_points(both[0])} of test accuracy when the trained model answers greedily, "
            f"and {_points(both[1])} when it samples at temperature 1 (n = {both[0].n})."
        )
    if of_kl := decided.get("C29"):
        k2, spread, cosine = (of_kl.get(name) for name in _KL_FINDINGS)
        found["Does the choice of KL estimator matter?"] = (
            f"On average k2 is off by {k2.format()} % of the true KL, the standard deviation of k1 is "
            f"{spread.format(percent=False, digits=2)} times that of k3, and the gradient of k3 has a cosine of "
            f"{cosine.format(percent=False, digits=3)} with the gradient of the KL (n = {k2.n})."
        )
    return {question: answer for question, answer in found.items() if answer}


_KL_FINDINGS = ("k2_relative_bias", "k1_over_k3_std", "k3_gradient_cosine")
_READ = {"greedy": "greedily", "t0.6": "at temperature 0.6", "t1": "at temperature 1"}


def _points(interval: Interval) -> str:
    """An interval of accuracies in words, such as "4.0 [1.1, 6.9] points"."""
    return f"{interval.format()} points"


def _within(interval: Interval, margin: float) -> str:
    if -margin < interval.low and interval.high < margin:
        return "the whole interval lies within"
    return "the interval is not wholly within"


def _gains(run: SimpleNamespace, of: Records, decoding: str) -> str:
    """The gain of tuned ES over each base, in words."""
    named = []
    for base in run.bases:
        group = "es" if base == run.bases[0] else "es_elsewhere"
        after = accuracies(of, group, decoding, base)
        gain = stats.crossed_bootstrap(after, accuracies(of, "base", decoding, base)[0])
        named.append(f"{gain.format()} on {base} (n = {len(after)})")
    return f"{', '.join(named)} points {_READ[decoding]}"


def _ahead_in_words(decided: Mapping[str, Interval]) -> str:
    """GRPO - ES at equal FLOPs, under each decoding that claim C2b was judged by; empty before it was judged."""
    named = []
    for words in _READ.values():
        ending = f"problems {words.removeprefix('at ').replace('greedily', 'greedy')} at equal forward flops"
        named += [
            f"{found.format()} {words}" for label, found in decided.items() if label.replace("_", " ").endswith(ending)
        ]
    if not named:
        return ""
    head = "Neither is ahead under every decoding"
    if all(found.low > 0 for found in decided.values()):
        head = "It is ahead"
    elif all(found.high < 0 for found in decided.values()):
        head = "It is behind"
    n = min(found.n for found in decided.values())
    return (
        f"{head}. At equal forward FLOPs GRPO - ES is {', '.join(named)}, in points of validation accuracy (n = {n})."
    )


def _axes_in_words(run: SimpleNamespace, of: Records, before: Sequence[Record]) -> str:
    """GRPO - ES on each axis, greedily; and beside it an ES that is ahead of the tuned one at few completions."""
    tests = {axis: match(of, axis, "greedy", run.margin).test for axis in UNITS}
    if not all(tests.values()):
        return ""
    found = [test.interval for test in tests.values()]
    one_side = all(one.low > 0 for one in found) or all(one.high < 0 for one in found)
    head = (
        "The size of the difference does, its sign does not." if one_side else "Even the sign of the difference does."
    )
    named = [f"{test.interval.format()} at equal {AXES[axis]}" for axis, test in tests.items()]
    found = f"{head} In points of greedy validation accuracy GRPO - ES is {', '.join(named)} "
    found += f"(90 % intervals, n = {len(of['es'])})."
    if (larger := larger_alpha(of, before)) is not None:
        found += (
            f" The tuned step of ES suits long runs: with alpha {before[0]['spec']['alpha']:g} ES is "
            f"{_points(larger[2])} behind at equal completions (95 %, n = {len(larger[1])})."
        )
    return found


def _filtering_in_words(of: Records, here: str) -> str:
    """What fine-tuning once on the base's own right answers reaches, beside ES."""
    ends = {g: {d: 100 * accuracies(of, g, d, here).mean() for d in loading.DECODINGS} for g in ("sft", "es")}
    less = of["es"][0]["budget"]["completions"] / of["sft"][0]["budget"]["completions"]
    lead = stats.crossed_bootstrap(*(accuracies(of, group, "greedy", here) for group in ("sft", "es")))
    return (
        f"Fine-tuning once on the base's own right answers, with {less:.0f} times fewer completions than ES, reaches "
        f"{ends['sft']['greedy']:.1f} % greedily and {ends['sft']['t1']:.1f} % at temperature 1; ES reaches "
        f"{ends['es']['greedy']:.1f} and {ends['es']['t1']:.1f} %. Filtered fine-tuning - ES is {_points(lead)} "
        f"greedily (n = {len(of['sft'])} and {len(of['es'])}; it describes and decides nothing)."
    )


# ---- tables


AXES = {
    "completions": "completions",
    "generated_tokens": "generated tokens",
    "forward_flops": "forward FLOPs",
    "core_seconds": "core-seconds",
}
HEADS = {
    "completions": "completions, thousands",
    "generated_tokens": "tokens, millions",
    "forward_flops": "FLOPs, 1e12",
    "core_seconds": "core-seconds",
}
"""The axes of budget in words, and as heads of tables in `UNITS`."""


def label_of(of: Records, group: str) -> str:
    """Return what a group of runs is called in tables."""
    spec = of[group][0]["spec"]
    words = {"none": ", not scaled", "group": ", scaled"}.get(spec.get("scale_rewards"), "")
    words += f", {spec['steps']:,d} steps" if group == "grpo_long" else ""
    return style.ARMS[spec.get("arm", spec["kind"])].label + words


def models(run: SimpleNamespace) -> str:
    """Return what captions call the models."""
    return "Tiny model, trained from scratch" if run.bases[0] in tiny.BASES else run.bases[0]


def device(of: Records) -> str:
    """Return the processors on which the training runs were made."""
    return ", ".join(sorted({r["environment"]["device"] for r in trained(of)}))


def power_table(planned: Mapping[str, Any], before: Sequence[Record], tests: int) -> DataFrame:
    """Return what the planned seeds can find, as text: a row per decoding, spread and kind of test.

    Args:
        planned: the settings of the scale that the pilot is of.
        before: the runs of notebook 01 (`pilot`); their spread, and twice that, stands for the spread of both arms.
        tests: how many claims share Holm's correction; the level is that of the strictest.
    """
    from pandas import DataFrame

    plans = []
    for decoding in loading.DECODINGS:
        ends = [r["curve"][f"validation_{decoding}"][-1] for r in before]
        asked = {
            "equivalence": (planned["seeds_match"], ends),
            "difference": (planned["seeds_compare"], accuracy_matrix(before, decoding).mean(axis=1)),
        }
        for factor in (1, 2):
            for test, (n, scores) in asked.items():
                what = f"{style.DECODINGS[decoding].label}, {factor} x the pilot's spread"
                plans.append(power.Plan(what, test, n, planned["margin"], factor * float(np.std(scores, ddof=1))))
    found = power.report(plans, alpha=0.05 / tests)
    return DataFrame(
        {
            "decoding and spread": found["quantity"],
            "test": found["test"],
            "seeds per arm": found["n"].map(str),
            "spread, points": found["pilot std"].map(lambda x: f"{100 * x:.2f}"),
            "effect, points": found["effect"].map(lambda x: f"{100 * x:g}"),
            "power, %": found["power"].map(lambda x: f"{100 * x:.0f}"),
            "detectable, points": found["detectable"].map(lambda x: f"{100 * x:.1f}"),
        }
    )


def kl_frame(found: Sequence[Record]) -> DataFrame:
    """Return a row per size of noise and estimator: means over repeats, relative to the exact KL of the repeat.

    Columns: sigma; estimator; KL, nats per token; bias / KL (an `Interval`, per token); std / KL, token and sequence;
    cosine, token and sequence; norm, token (NaN for k1, whose gradient is zero on average).
    """
    from pandas import DataFrame

    rows = []
    for sigma in dict.fromkeys(r["spec"]["sigma"] for r in found):
        measured = [r["kl"] for r in found if r["spec"]["sigma"] == sigma]
        true = {level: np.array([r[f"exact_{level}_mean"] for r in measured]) for level in ("token", "sequence")}
        for name in kl.ESTIMATORS:
            row = {"sigma": sigma, "estimator": name, "KL, nats per token": true["token"].mean()}
            row["bias / KL"] = stats.bootstrap_mean(
                np.array([r[f"{name}_token_bias"] for r in measured]) / true["token"]
            )
            for level, exact in true.items():
                row[f"std / KL, {level}"] = (np.array([r[f"{name}_{level}_std"] for r in measured]) / exact).mean()
            of_loss = {f"cosine, {level}": f"gradient_{level}_cosine" for level in true}
            for head, key in (of_loss | {"norm, token": "gradient_token_norm_ratio"}).items():
                row[head] = np.nan if name == "k1" else np.mean([r[f"{name}_{key}"] for r in measured])
            rows.append(row)
    return DataFrame(rows)


def kl_table(frame: DataFrame) -> DataFrame:
    """Return `kl_frame` as text."""
    shown = frame.assign(**{"bias / KL, %": [interval.format() for interval in frame["bias / KL"]]})
    shown["sigma"] = [f"{size:g}" for size in shown["sigma"]]
    heads = ["KL, nats per token", "std / KL, token", "std / KL, sequence"]
    heads += ["cosine, token", "cosine, sequence", "norm, token"]
    for head in heads:
        shown[head] = ["none" if np.isnan(value) else f"{value:.3g}" for value in shown[head]]
    return shown[["sigma", "estimator", heads[0], "bias / KL, %", *heads[1:]]]


def sweep_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return where each tuned setting lies on the grid that was tried, as text."""
    from pandas import DataFrame

    rows = []
    for arm in ARMS:
        for name, value in arms.ranked(of[f"sweep {arm}"])[0][1].items():
            grid = sorted({choice[name] for choice in loading.swept_choices(run, arm)})
            where = "inside" if grid[0] < value < grid[-1] else "at an end" if value else "at its natural end"
            row = {"arm": style.ARMS[arm].label, "setting": _SETTINGS[name], "tuned": f"{value:g}"}
            rows.append(row | {"tried": ", ".join(f"{v:g}" for v in grid), "the tuned value is": where})
    return DataFrame(rows)


_SETTINGS = {"sigma": "noise sigma", "alpha": "step alpha", "learning_rate": "learning rate", "beta": "KL weight beta"}


def flops_by_hand(record: Record) -> tuple[int, int, int]:
    """Return passes per token, tokens read or written, and forward-equivalent FLOPs of a run of ES or GRPO."""
    budget, spec = record["budget"], record["spec"]
    passes = 1 if spec["arm"] == "es" else 5 if spec["beta"] else 4
    tokens = budget["prompt_tokens"] + budget["generated_tokens"]
    return passes, tokens, 2 * record["d"] * passes * tokens


def flops_table(of: Records) -> DataFrame:
    """Return the FLOPs of one run of each arm, multiplied out, as text."""
    from pandas import DataFrame

    rows = []
    for arm in ARMS:
        r = of[arm][0]
        passes, tokens, flops = flops_by_hand(r)
        each = r["budget"]["forward_flops"] / r["budget"]["completions"]
        row = {"arm": style.ARMS[arm].label, "passes": str(passes), "parameters": f"{r['d']:,d}"}
        row |= {"tokens": f"{tokens:,d}", "2 x passes x parameters x tokens": f"{flops:.3g}"}
        rows.append(row | {"as recorded": f"{r['budget']['forward_flops']:.3g}", "per completion": f"{each:.3g}"})
    return DataFrame(rows)


def costs_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return what a run of each arm on the first base spends on training, as text."""
    from pandas import DataFrame

    rows = []
    for group in [*designed(of, run.bases[0]), "best_of_n"]:
        spent = DataFrame([r["budget"] for r in of[group]])
        row = {"arm": label_of(of, group)}
        row |= {head: _figure(spent[axis].mean() / UNITS[axis]) for axis, head in HEADS.items()}
        seconds = spent["core_seconds"]
        row[HEADS["core_seconds"]] += f" ({_figure(seconds.min())} to {_figure(seconds.max())})"
        rows.append(row | {"runs": len(of[group])})
    return DataFrame(rows)


def _figure(x: float) -> str:
    """Three digits, and all of those before the point."""
    return f"{x:,.0f}" if x >= 1000 else f"{x:.3g}"


def match_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return both arms at equal budgets on each axis, under either decoding, as text (`match`)."""
    from pandas import DataFrame

    rows = []
    for axis in UNITS:
        for decoding in loading.DECODINGS:
            budget, scores, test = match(of, axis, decoding, run.margin)
            row = {"axis": HEADS[axis], "budget": f"{budget / UNITS[axis]:.3g}"}
            row["decoding"] = style.DECODINGS[decoding].label
            row |= {f"{style.ARMS[arm].label}, %": f"{100 * np.mean(values):.1f}" for arm, values in scores.items()}
            row["GRPO - ES, points [90 %]"] = test.interval.format() if test else "no spread"
            rows.append(row | {"match": "yes" if test and test.equivalent else "no", "seeds": len(scores["es"])})
    return DataFrame(rows)


def hindsight_table(of: Records) -> DataFrame:
    """Return the best setting of each sweep at equal budgets, as text (`hindsight`)."""
    from pandas import DataFrame

    rows = []
    for axis in UNITS:
        budget, best = hindsight(of, axis)
        row = {"axis": HEADS[axis], "budget": f"{budget / UNITS[axis]:.3g}"}
        for arm, (score, setting) in best.items():
            name = style.ARMS[arm].label
            row[f"best {name} setting"] = ", ".join(f"{k.replace('_', ' ')} {v:g}" for k, v in setting.items())
            row[f"{name}, %"] = f"{100 * score:.1f}"
        rows.append(row | {"GRPO - ES, points": f"{100 * (best['grpo'][0] - best['es'][0]):.1f}"})
    return DataFrame(rows)


def larger_table(of: Records, before: Sequence[Record]) -> DataFrame:
    """Return tuned GRPO beside the ES of notebook 01 at GRPO's completions, as text (`larger_alpha`)."""
    from pandas import DataFrame

    if (larger := larger_alpha(of, before)) is None:
        return DataFrame([{"ES of notebook 01": "no run has a point by then"}])
    completions, reached, lead = larger
    spec = before[0]["spec"]
    row = {"ES of notebook 01": f"sigma {spec['sigma']:g}, alpha {spec['alpha']:g}"}
    row |= {"completions": f"{completions:,d}", "ES, %": f"{100 * reached.mean():.1f}", "seeds": str(len(reached))}
    return DataFrame([row | {"tuned GRPO - this ES, points [95 %]": lead.format()}])


def long_table(of: Records) -> DataFrame:
    """Return the single runs of GRPO that were carried on, one by one, as text."""
    from pandas import DataFrame

    rows = []
    for r in of["grpo_long"]:
        row = {"seed": str(r["spec"]["seed"]), "completions": f"{r['budget']['completions']:,}"}
        row |= {f"{look.label}, %": f"{100 * r['test'][d]:.1f}" for d, look in style.DECODINGS.items()}
        row["largest fall, points"] = f"{100 * curves.largest_drawdown(r['curve']['validation_greedy']):.1f}"
        rows.append(row | {"groups without signal, %": f"{100 * r['counts']['zero_std_groups']:.0f}"})
    return DataFrame(rows)


def target_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return the budget that each arm takes to each gain, as text (`to_target`)."""
    from pandas import DataFrame

    rows = []
    for gain in run.gains:
        for arm in ARMS:
            found = {axis: to_target(of, arm, gain, axis) for axis in UNITS}
            reached = found["completions"].reached
            row = {"gain": f"+{100 * gain:g}", "arm": style.ARMS[arm].label}
            row["reached"] = f"{reached.sum()} of {len(reached)}"
            medians = {axis: curves.median_to_target(one) for axis, one in found.items()}
            rows.append(row | {HEADS[axis]: _median_in_words(median) for axis, median in medians.items()})
    return DataFrame(rows)


def _median_in_words(median: Interval) -> str:
    """A Kaplan-Meier median and its interval, three digits."""
    value, low, high = ("never" if np.isinf(x) else f"{x:.3g}" for x in (median.value, median.low, median.high))
    return value if np.isnan(median.low) else f"{value} [{low}, {high}]"


def exchange_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return how many times as much ES takes to each gain as GRPO does, as text (`exchange_rate`)."""
    from pandas import DataFrame

    rows = []
    for gain in run.gains:
        rates = {axis: exchange_rate(of, gain, axis) for axis in UNITS}
        words = {AXES[axis]: "an arm has no median" if r is None else f"{r:.2g}" for axis, r in rates.items()}
        rows.append({"gain, points": f"+{100 * gain:g}"} | words)
    return DataFrame(rows)


def accuracy_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return test accuracy and gain over the base of every group on every base, as text."""
    from pandas import DataFrame

    rows = []
    for base in run.bases:
        decodings = {d: look.label for d, look in style.DECODINGS.items()}
        untrained = {decoding: accuracies(of, "base", decoding, base)[0] for decoding in decodings}
        row = {"base": base, "arm": style.ARMS["base"].label, "completions": "0"}
        for decoding, name in decodings.items():
            row |= {f"{name}, %": f"{100 * untrained[decoding].mean():.1f}", f"gain, {name} [95 %]": ""}
        rows.append(row | {"seeds": ""})
        for group in designed(of, base):
            found = [r for r in of[group] if r["spec"]["base"] == base]
            row = {"base": base, "arm": label_of(of, group), "completions": f"{found[0]['budget']['completions']:,d}"}
            for decoding, name in decodings.items():
                after = accuracies(of, group, decoding, base)
                row[f"{name}, %"] = f"{100 * after.mean():.1f}"
                row[f"gain, {name} [95 %]"] = _gain_in_words(after, untrained[decoding])
            rows.append(row | {"seeds": str(len(found))})
    return DataFrame(rows)


def _gain_in_words(after: np.ndarray, untrained: np.ndarray) -> str:
    """A gain with its interval; of one or two runs their gains alone."""
    if len(after) > 2:
        return stats.crossed_bootstrap(after, untrained).format()
    return " and ".join(f"{gain:.1f}" for gain in np.sort(100 * (after - untrained).mean(axis=1)))


def best_of_table(of: Records) -> DataFrame:
    """Return the share of test problems that n samples of the base solve, as text: a column per n."""
    from pandas import DataFrame

    found = DataFrame([r["best_of_n"] for r in of["best_of_n"]])
    ordered = sorted(found, key=int)
    return DataFrame([{"n": "solved, %"} | {n: f"{100 * found[n].mean():.1f}" for n in ordered}])


def measured(rows: DataFrame, base: str) -> dict[str, int]:
    """Return group -> number of runs of what was measured again on a base; rows: of `by_temperature`."""
    return rows[rows["base"] == base].groupby("group", sort=False)["n"].first().to_dict()


def temperature_table(rows: DataFrame, base: str) -> DataFrame:
    """Return accuracy on one base by temperature, as text; rows: of `by_temperature`, accuracies in %."""
    here = rows[rows["base"] == base].assign(arm=lambda part: [style.ARMS[group].label for group in part["group"]])
    table = here.pivot(index="arm", columns="temperature", values="accuracy").loc[here["arm"].unique()]
    table.columns = ["greedy" if not t else f"temperature {t:g}" for t in table.columns]
    return table.map(lambda x: "" if np.isnan(x) else f"{x:.1f}").reset_index()


def distance_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return how far the weights and the answers of each arm are from the first base, as text."""
    from pandas import DataFrame

    rows = []
    for group in designed(of, run.bases[0]):
        found = of[group]  # of a diverged run both measures are null
        spec, norms = found[0]["spec"], np.array([r["update_norm"] for r in found], float)
        row = {"arm": label_of(of, group), "distance": f"{norms.mean():.2f}", "walk": ""}
        if "sigma" in spec:
            walk = spec["alpha"] * np.sqrt(found[0]["d"] * spec["steps"] / spec["population_size"])
            row["walk"] = f"{walk:.2f}"
        nats = np.array([r["kl_policy_base"]["exact_nats_per_sequence"] for r in found], float)
        row |= {"KL from base, nats per sequence": f"{nats.mean():.2f}"}
        row |= {"least": f"{nats.min():.2f}", "largest": f"{nats.max():.2f}"}
        greedy = 100 * accuracies(of, group, "greedy", run.bases[0]).mean()
        rows.append(row | {"greedy, %": f"{greedy:.1f}", "seeds": len(found)})
    return DataFrame(rows)


_FACTORIAL = {
    ("grpo", "group"): "grpo",
    ("grpo", "none"): "grpo_unscaled",
    ("dr_grpo", "group"): "dr_grpo_scaled",
    ("dr_grpo", "none"): "dr_grpo",
}
"""Whose loss, and what rewards are scaled by -> the group of runs."""


def details_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return the four combinations of GRPO's loss and scaling with Dr.GRPO's, as text."""
    from pandas import DataFrame

    rows = []
    for (loss, scaling), group in _FACTORIAL.items():
        row = {"loss of": style.ARMS[loss].label, "scaled by": scaling}
        for decoding, look in style.DECODINGS.items():
            found = stats.crossed_bootstrap(accuracies(of, group, decoding, run.bases[0]))
            row[f"{look.label}, % [95 %]"] = found.format()
        spent = DataFrame([r["budget"] | r["counts"] for r in of[group]]).mean()
        row |= {"length": f"{spent['generated_tokens'] / spent['completions']:.2f}"}
        row |= {"groups without spread, %": f"{100 * spent['zero_std_groups']:.1f}", "seeds": len(of[group])}
        rows.append(row)
    return DataFrame(rows)


def effects_of(run: SimpleNamespace, of: Records) -> dict[tuple[str, str], Interval]:
    """Return (key of EFFECTS, decoding) -> `effect` on the first base."""
    return {(what, d): effect(of, what, d, run.bases[0]) for what in EFFECTS for d in loading.DECODINGS}


def effects_table(effects: Mapping[tuple[str, str], Interval]) -> DataFrame:
    """Return the effects as text."""
    from pandas import DataFrame

    rows = []
    for (what, decoding), found in effects.items():
        row = {"effect": what, "decoding": style.DECODINGS[decoding].label, "points [95 %]": found.format()}
        rows.append(row | {"seeds": str(found.n)})
    return DataFrame(rows)


def losses_agree(arm: str, written: Callable[..., Any], folder: Path) -> dict[str, str]:
    """Say whether a loss that was written out is TRL's, in value and in gradient.

    TRL's trainer samples four completions of each of eight problems from base A0 and computes their advantages; then
    noise moves the policy, so that ratio, clip and KL all count, and both losses are computed.

    Args:
        arm: "grpo", "dr_grpo" or "dapo".
        written: takes log-probabilities under policy, old policy and reference, rewards and mask, in groups.
        folder: for what TRL writes.
    """
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()  # TRL loads a reference of half a megabyte
    trainer, batch = _toy_batch(arm, folder)
    policy, generator = trainer.model, torch.Generator().manual_seed(0)
    with torch.no_grad():
        batch["old_per_token_logps"] = _log_probabilities(policy, batch)
        for weights in policy.parameters():
            weights += 0.02 * torch.randn(weights.shape, generator=generator)
    terms = _log_probabilities(policy, batch), batch["old_per_token_logps"], batch["ref_per_token_logps"]
    *terms, mask = (term.view(8, 4, -1) for term in (*terms, batch["completion_mask"]))
    rewards = torch.tensor(trainer._logs["rewards"]["reward"]).view(8, 4)
    given = {"loss_type": arm, "beta": 0.04, "max_length": tiny.MAX_COMPLETION_LENGTH}
    losses = [written(*terms, rewards, mask, **given, high=0.28 if arm == "dapo" else 0.2)]
    losses.append(trainer.compute_loss(policy, batch))
    ours, trls = (torch.cat([g.ravel() for g in torch.autograd.grad(loss, policy.parameters())]) for loss in losses)
    same = torch.allclose(*losses, atol=1e-6), bool((ours - trls).norm() < 1e-4 * trls.norm())
    value, gradient = ("yes" if one else "no" for one in same)
    return {"loss of": style.ARMS[arm].label, "same value": value, "same gradient": gradient}


def _toy_batch(arm: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    """TRL's trainer of an arm, and the first batch that it samples."""
    from evoalign_lib import grpo
    from evoalign_lib.tasks import countdown

    policy, tokenizer = tiny.load("A0")
    toy = {"steps": 1, "prompts_per_step": 8, "num_generations": 4, "learning_rate": 1e-4, "beta": 0.04}
    toy |= {"max_completion_length": tiny.MAX_COMPLETION_LENGTH, "seed": 0, "report_to": "none"}
    args = grpo.config(arm, output_dir=str(folder), **toy)
    rows = countdown.dataset(tiny.problems("train", 8), tokenizer)
    trainer, _ = grpo.trainer(policy, countdown.reward, args, rows, tokenizer)
    trainer.args.dataloader_pin_memory = False
    return trainer, trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))


def _log_probabilities(policy: Any, batch: Mapping[str, Any]) -> Any:
    """(completions, tokens) log-probabilities of the completions' tokens, from the model's plain logits."""
    import torch

    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    seen = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    logits = policy(ids, attention_mask=seen).logits[:, batch["prompt_ids"].shape[1] - 1 : -1]
    return logits.log_softmax(-1).gather(-1, batch["completion_ids"][..., None])[..., 0]


def faults(run: SimpleNamespace, of: Records) -> list[str]:
    """Return what is wrong with the runs, in words: nothing, as a rule.

    Every run once; arms that are compared at their ends have spent what was declared; FLOPs are what the formula says;
    no reward failed, and no population of ES was tied.
    """
    found, each = [], [r["spec_hash"] for r in judged(run, of)]
    if len(set(each)) < len(each):
        found.append(f"{len(each) - len(set(each))} runs occur twice")
    declared = {
        ("grpo", "dr_grpo"): run.grpo_steps * run.grpo_prompts_per_step * run.grpo_num_generations,
        ("es", "es_sampled"): run.es_steps * run.es_prompts_per_step * run.es_population_size,
    }
    for names, completions in declared.items():
        spent = {r["budget"]["completions"] for group in names for r in of[group]}
        if spent != {completions}:
            found.append(f"{' and '.join(names)} spent {sorted(spent)} completions, declared {completions}")
    for arm in ARMS:
        if flops_by_hand(of[arm][0])[2] != of[arm][0]["budget"]["forward_flops"]:
            found.append(f"the FLOPs of {arm} are not those of the formula")
    counts = [r.get("counts", {}) for r in trained(of)]
    for kind in ("nan", "exception", "timeout", "tied"):
        if number := sum(c.get(kind, 0) for c in counts):
            found.append(f"{number} rewards or populations counted as {kind}")
    return found


# ---- figures


def curve_points(of: Records) -> DataFrame:
    """Return the learning curves of both arms, and each long run of GRPO alone: a row per point, for both decodings.

    Columns: the four axes (means over seeds); mean, low and high of validation accuracy, %; decoding; n; group; run.
    """
    import pandas as pd

    named = [(group, "mean", of[group]) for group in ARMS]
    named += [("grpo_long", str(r["spec"]["seed"]), [r]) for r in of["grpo_long"]]
    frames = []
    for group, name, found in named:
        lines = [r["curve"] for r in found]
        budgets = {axis: np.mean([line[axis] for line in lines], axis=0) for axis in AXES}
        for decoding in loading.DECODINGS:
            band = stats.curve_band(100 * np.array([line[f"validation_{decoding}"] for line in lines]))
            frame = pd.DataFrame(budgets | dict(zip(("mean", "low", "high"), band, strict=True)))
            labels = {"decoding": decoding, "n": len(found), "group": group, "run": name}
            frames.append(frame.assign(**labels).iloc[1:])  # a logarithmic axis has no 0
    return pd.concat(frames, ignore_index=True)


def draw_curves(of: Records) -> tuple[Figure, DataFrame]:
    """Draw validation accuracy against four budgets, forward FLOPs large; return the figure and `curve_points`."""
    from matplotlib import pyplot as plt

    points, start = curve_points(of), of["base"][0]["validation"]
    before = {"greedy": 100 * start["greedy"], "t1": 100 * start["pass@1"]}
    fig = plt.figure(figsize=(style.PAGE, 4.3))
    above, below = fig.subfigures(2, 1, height_ratios=[1.5, 1])
    large = above.subplots(1, 2, sharey=True)
    for ax, (decoding, look) in zip(large, style.DECODINGS.items(), strict=True):
        _draw_budget(ax, points, before, "forward_flops", decoding)
        _label_curves(ax, points[points["decoding"] == decoding], before[decoding])
        ax.set_title(f"{'greedy decoding' if decoding == 'greedy' else look.label}", fontsize=10)
        ax.set_xlabel("forward FLOPs spent on training", fontsize=9)
        ax.tick_params(labelsize=8.5)
    large[0].set_ylabel("validation accuracy, %", fontsize=9)
    small = below.subplots(1, 3, sharey=True)
    for ax, axis in zip(small, [axis for axis in AXES if axis != "forward_flops"], strict=True):
        for decoding in style.DECODINGS:
            _draw_budget(ax, points[points["group"].isin(ARMS)], before, axis, decoding)
        ax.set_xlabel(AXES[axis], fontsize=8.5)
    small[0].set_ylabel("accuracy, %", fontsize=8.5)
    return fig, points


def _draw_budget(ax: Axes, points: DataFrame, before: Mapping[str, float], axis: str, decoding: str) -> None:
    """Draw all curves of one decoding against one budget, and the untrained base."""
    for (group, _), part in points[points["decoding"] == decoding].groupby(["group", "run"]):
        arm = group.removesuffix("_long")
        thin = {"lw": 0.6, "marker": None, "alpha": 0.8} if group == "grpo_long" else {}
        ax.plot(part[axis], part["mean"], **style.line(arm, decoding) | thin)
        style.band(ax, part[axis], part["low"], part["high"], style.ARMS[arm].color)
    ax.axhline(before[decoding], lw=0.8, color=style.ARMS["base"].color, ls=style.DECODINGS[decoding].linestyle)
    ax.set_xscale("log")


def _label_curves(ax: Axes, part: DataFrame, start: float) -> None:
    """Write the name of each curve beside it."""
    curve = dict(iter(part.groupby("group")))
    middle, end = curve["grpo"].iloc[len(curve["grpo"]) // 2], curve["es"].iloc[-1]
    risen = end["mean"] > start + 5  # then there is room below the curve, otherwise above it
    _beside(ax, middle, f"GRPO\n(n = {middle['n']})", "grpo", (-8, 6), "right", "bottom")
    below, above = ("\n", (4, -9), "center", "top"), (" ", (0, 13), "right", "bottom")
    between, *place = below if risen else above
    _beside(ax, end, f"ES{between}(n = {end['n']})", "es", *place)
    across = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "fontsize": 9}
    ax.annotate("base", (0.99, start), (0, -3), ha="right", va="top", color=style.ARMS["base"].color, **across)
    if "grpo_long" in curve:
        highest = curve["grpo_long"].loc[curve["grpo_long"]["mean"].idxmax()]
        _beside(ax, highest, "single runs,\ncarried on", "grpo", (-17, 4), "right", "top", fontweight="normal")


def _beside(
    ax: Axes, point: Any, text: str, arm: str, offset: tuple[int, int], ha: str, va: str, fontweight: str = "bold"
) -> None:
    """Write a text in an arm's colour beside a point of a curve."""
    size = 9.5 if fontweight == "bold" else 8
    how = {"textcoords": "offset points", "fontsize": size, "fontweight": fontweight, "ha": ha, "va": va}
    ax.annotate(text, (point["forward_flops"], point["mean"]), offset, color=style.ARMS[arm].color, **how)


def draw_sweep(run: SimpleNamespace, of: Records) -> tuple[Figure, DataFrame]:
    """Draw the scores of both sweeps as maps and the expected best of k settings; return the latter, too.

    The data's columns: arm, settings tried, expected maximum (a fraction).
    """
    import pandas as pd
    from matplotlib import pyplot as plt

    ranking = {arm: arms.ranked(of[f"sweep {arm}"]) for arm in ARMS}
    tried = []
    for arm, ranked in ranking.items():
        best = curves.expected_maximum([score for score, _ in ranked])
        tried += [{"arm": arm, "settings tried": k, "expected maximum": v} for k, v in enumerate(best, 1)]
    tried = pd.DataFrame(tried)
    every = [100 * score for ranked in ranking.values() for score, _ in ranked]
    fig, axes = plt.subplots(1, 3, figsize=(style.PAGE, 2.15), width_ratios=[1.2, 1.2, 1.0])
    for ax, arm in zip(axes, ARMS, strict=False):
        _draw_map(ax, arm, ranking[arm], (min(every), max(every)))
    ax = axes[2]
    for arm, part in tried.groupby("arm"):
        best = 100 * part["expected maximum"].to_numpy()
        ax.plot(part["settings tried"], best, **style.line(arm) | {"label": None})
        ax.annotate(
            style.ARMS[arm].label,
            (part["settings tried"].iloc[-1], best[-1]),
            (0, -5),
            textcoords="offset points",
            ha="right",
            va="top",
            color=style.ARMS[arm].color,
            fontsize=8.5,
            fontweight="bold",
        )
    ax.set_xticks(range(1, max(map(len, ranking.values())) + 1, 2))
    ax.set(xlabel="settings tried, k", ylabel="validation accuracy, %", title="expected best of k settings")
    return fig, tried


_STEP_SIZES = {"es": ("alpha", "sigma"), "grpo": ("learning_rate", "beta")}
"""Arm -> the setting on the horizontal axis of its map, its step size, and the one on the vertical axis."""


def _draw_map(
    ax: Axes, arm: str, ranked: Sequence[tuple[float, Mapping[str, float]]], limits: tuple[float, float]
) -> None:
    """Draw the scores of an arm's settings, the tuned one framed: step size to the right, the other setting upwards."""
    from matplotlib import patheffects
    from matplotlib import pyplot as plt
    from pandas import DataFrame

    across, up = _STEP_SIZES[arm]
    frame = DataFrame([{"score": 100 * score} | dict(setting) for score, setting in ranked])
    grid = frame.pivot(index=up, columns=across, values="score")
    ax.imshow(grid, cmap="Greys", aspect="auto", origin="lower", vmin=limits[0], vmax=limits[1] + 1)
    for which, values in ((ax.set_xticks, grid.columns), (ax.set_yticks, grid.index)):
        which(range(len(values)), _ticks(values))
    place = grid.index.get_loc(ranked[0][1][up]), grid.columns.get_loc(ranked[0][1][across])
    for (i, j), value in np.ndenumerate(grid.to_numpy()):
        if not np.isnan(value):
            dark = value > (limits[0] + limits[1]) / 2
            text = f"{value:.1f}\ntuned" if (i, j) == place else f"{value:.1f}"
            ax.text(j, i, text, ha="center", va="center", fontsize=7.5, color="white" if dark else "black")
    i, j = place
    frame = {"fill": False, "lw": 2.5, "color": style.ARMS[arm].color, "clip_on": False, "zorder": 5}
    rim = [
        patheffects.withStroke(linewidth=4.5, foreground="white")
    ]  # in a grey print the frame is a grey like the map
    ax.add_patch(plt.Rectangle((j - 0.47, i - 0.46), 0.94, 0.92, path_effects=rim, **frame))
    ax.set(xlabel=_SETTINGS[across], ylabel=_SETTINGS[up], title=f"{style.ARMS[arm].label}: validation accuracy, %")
    ax.grid(False)


def _ticks(values: Sequence[float]) -> list[str]:
    """Values as labels of ticks, all of them with a power of ten where the smallest needs one."""
    if 0 < min(values) < 1e-4:
        return [np.format_float_scientific(value, trim="-", exp_digits=1) for value in values]
    return [f"{value:g}" for value in values]


def draw_temperatures(rows: DataFrame, base: str) -> Figure:
    """Draw test accuracy on one base against the temperature, every measured group named beside its line.

    rows: of `by_temperature`, with accuracies in %. ES and GRPO have their bands; other groups are thin lines.
    """
    from matplotlib import pyplot as plt

    fig, ax = plt.subplots(figsize=(style.COLUMN, 2.8))
    here = rows[rows["base"] == base]
    ends: dict[str, tuple[float, str]] = {}
    for group, part in here.groupby("group", sort=False):
        strong = group in ARMS
        look = style.line(group) | {"label": None, "markevery": 1, "lw": 1.8 if strong else 0.8}
        ax.plot(
            part["temperature"], part["accuracy"], **look | ({} if strong else {"ms": 2.6}), zorder=3 if strong else 2
        )
        if strong:
            style.band(ax, part["temperature"], part["low"], part["high"], style.ARMS[group].color)
        ends[group] = part["accuracy"].iloc[-1], style.ARMS[group].label
    ax.set(xlabel="temperature (0: greedy)", ylabel="test accuracy, %", ylim=(0, None), xlim=(-0.03, 1.0))
    ax.set_xticks(sorted(here["temperature"].unique()))
    height = ax.get_ylim()[1]
    places = _apart([value for value, _ in ends.values()], height / 15)
    for (group, (value, name)), place in zip(ends.items(), places, strict=True):
        ax.annotate(
            name,
            (1, value),
            (1.06, place),
            va="center",
            annotation_clip=False,
            fontsize=6.5,
            color=style.ARMS[group].color,
            fontweight="bold" if group in ARMS else "normal",
            arrowprops={"arrowstyle": "-", "lw": 0.4, "color": style.ARMS[group].color, "shrinkA": 1, "shrinkB": 1},
        )
    return fig


def _apart(heights: Sequence[float], gap: float) -> np.ndarray:
    """Return places as near to the heights as possible, in the same order and at least a gap apart."""
    from scipy.optimize import isotonic_regression

    order, steps = np.argsort(heights, kind="stable"), gap * np.arange(len(heights))
    places = np.empty(len(heights))
    places[order] = isotonic_regression(np.asarray(heights, float)[order] - steps).x + steps
    return places


def draw_estimators(frame: DataFrame) -> tuple[Figure, DataFrame]:
    """Draw `kl_frame`: bias, spread and direction of the gradient of each estimator; return the plotted data, too."""
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D

    fig, axes = plt.subplots(1, 3, figsize=(style.PAGE, 2.15))
    for name, part in frame.groupby("estimator"):
        look = style.KL_ESTIMATORS[name].line() | {"label": None}
        at, bias = part["KL, nats per token"], part["bias / KL"]
        ends = 100 * np.array([[b.value - b.low, b.high - b.value] for b in bias]).T
        axes[0].errorbar(at, [100 * b.value for b in bias], ends, capsize=2, **look)
        for level, fill in (("token", {}), ("sequence", {"markerfacecolor": "white"})):
            axes[1].plot(at, part[f"std / KL, {level}"], **look | fill)
            axes[2].plot(at, part[f"cosine, {level}"], **look | fill)
    names = ("bias, % of the KL", "standard deviation / KL", "cosine with the KL's gradient")
    for ax, text in zip(axes, names, strict=True):
        ax.set(xscale="log", xlabel="exact KL, nats per token", ylabel=text)
    axes[0].set_yscale("symlog", linthresh=10)
    axes[0].yaxis.set_major_formatter("{x:g}")
    axes[0].axhline(0, lw=0.6, color="black")
    axes[1].set_yscale("log")
    axes[1].yaxis.set_major_formatter("{x:g}")
    handles = [Line2D([], [], **look.line()) for look in style.KL_ESTIMATORS.values()]
    levels = {"tokens": "black", "sequences": "white"}
    dots = {"color": "black", "marker": "o", "ls": ""}
    handles += [Line2D([], [], **dots, markerfacecolor=face, label=text) for text, face in levels.items()]
    fig.legend(handles=handles, loc="outside lower center", ncols=5)
    return fig, frame.assign(**{"bias / KL": [interval.value for interval in frame["bias / KL"]]})


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
    named |= {stem: found_ for stem in _DECIDED if (found_ := _decision(decided, stem)) is not None}
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


def _decision(decided: Mapping[str, Mapping[str, Interval]], macro: str) -> Interval | None:
    """The interval of a verdict that a macro quotes; None where its claim could not be judged."""
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
