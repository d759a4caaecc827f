"""What notebook 02 shows: its answers in words, the rows of its tables, and its checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from evoalign_lib import arms, tiny
from evoalign_lib.analysis import curves, kl, power, stats
from evoalign_lib.analysis.stats import Interval
from evoalign_study import loading, style
from evoalign_study import nb02_grpo_countdown as study
from evoalign_study.loading import Records
from evoalign_study.records import Record, accuracy_matrix

if TYPE_CHECKING:
    from pandas import DataFrame


# ---- the answers, in words


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
    if effect_ := study.decision(decided, "DrGrpoEffect"):
        found["Do the details of GRPO matter?"] = (
            f"Dr.GRPO - GRPO is {_points(effect_)} of greedy test accuracy: {_within(effect_, run.margin)} "
            f"{100 * run.margin:g} points (n = {effect_.n})."
        )
    both = [study.decision(decided, name) for name in ("GreedyFitnessEffect", "GreedyFitnessSampled")]
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
        after = study.accuracies(of, group, decoding, base)
        gain = stats.crossed_bootstrap(after, study.accuracies(of, "base", decoding, base)[0])
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
    tests = {axis: study.match(of, axis, "greedy", run.margin).test for axis in study.UNITS}
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
    if (larger := study.larger_alpha(of, before)) is not None:
        found += (
            f" The tuned step of ES suits long runs: with alpha {before[0]['spec']['alpha']:g} ES is "
            f"{_points(larger[2])} behind at equal completions (95 %, n = {len(larger[1])})."
        )
    return found


def _filtering_in_words(of: Records, here: str) -> str:
    """What fine-tuning once on the base's own right answers reaches, beside ES."""
    ends = {g: {d: 100 * study.accuracies(of, g, d, here).mean() for d in loading.DECODINGS} for g in ("sft", "es")}
    less = of["es"][0]["budget"]["completions"] / of["sft"][0]["budget"]["completions"]
    lead = stats.crossed_bootstrap(*(study.accuracies(of, group, "greedy", here) for group in ("sft", "es")))
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
    return ", ".join(sorted({r["environment"]["device"] for r in study.trained(of)}))


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
    for arm in study.ARMS:
        for name, value in arms.ranked(of[f"sweep {arm}"])[0][1].items():
            grid = sorted({choice[name] for choice in loading.swept_choices(run, arm)})
            where = "inside" if grid[0] < value < grid[-1] else "at an end" if value else "at its natural end"
            row = {"arm": style.ARMS[arm].label, "setting": SETTINGS[name], "tuned": f"{value:g}"}
            rows.append(row | {"tried": ", ".join(f"{v:g}" for v in grid), "the tuned value is": where})
    return DataFrame(rows)


SETTINGS = {"sigma": "noise sigma", "alpha": "step alpha", "learning_rate": "learning rate", "beta": "KL weight beta"}
"""Setting -> its name on the axes of maps and in tables."""


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
    for arm in study.ARMS:
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
    for group in [*study.designed(of, run.bases[0]), "best_of_n"]:
        spent = DataFrame([r["budget"] for r in of[group]])
        row = {"arm": label_of(of, group)}
        row |= {head: _figure(spent[axis].mean() / study.UNITS[axis]) for axis, head in HEADS.items()}
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
    for axis in study.UNITS:
        for decoding in loading.DECODINGS:
            budget, scores, test = study.match(of, axis, decoding, run.margin)
            row = {"axis": HEADS[axis], "budget": f"{budget / study.UNITS[axis]:.3g}"}
            row["decoding"] = style.DECODINGS[decoding].label
            row |= {f"{style.ARMS[arm].label}, %": f"{100 * np.mean(values):.1f}" for arm, values in scores.items()}
            row["GRPO - ES, points [90 %]"] = test.interval.format() if test else "no spread"
            rows.append(row | {"match": "yes" if test and test.equivalent else "no", "seeds": len(scores["es"])})
    return DataFrame(rows)


def hindsight_table(of: Records) -> DataFrame:
    """Return the best setting of each sweep at equal budgets, as text (`hindsight`)."""
    from pandas import DataFrame

    rows = []
    for axis in study.UNITS:
        budget, best = study.hindsight(of, axis)
        row = {"axis": HEADS[axis], "budget": f"{budget / study.UNITS[axis]:.3g}"}
        for arm, (score, setting) in best.items():
            name = style.ARMS[arm].label
            row[f"best {name} setting"] = ", ".join(f"{k.replace('_', ' ')} {v:g}" for k, v in setting.items())
            row[f"{name}, %"] = f"{100 * score:.1f}"
        rows.append(row | {"GRPO - ES, points": f"{100 * (best['grpo'][0] - best['es'][0]):.1f}"})
    return DataFrame(rows)


def larger_table(of: Records, before: Sequence[Record]) -> DataFrame:
    """Return tuned GRPO beside the ES of notebook 01 at GRPO's completions, as text (`larger_alpha`)."""
    from pandas import DataFrame

    if (larger := study.larger_alpha(of, before)) is None:
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
        for arm in study.ARMS:
            found = {axis: study.to_target(of, arm, gain, axis) for axis in study.UNITS}
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
        rates = {axis: study.exchange_rate(of, gain, axis) for axis in study.UNITS}
        words = {AXES[axis]: "an arm has no median" if r is None else f"{r:.2g}" for axis, r in rates.items()}
        rows.append({"gain, points": f"+{100 * gain:g}"} | words)
    return DataFrame(rows)


def accuracy_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return test accuracy and gain over the base of every group on every base, as text."""
    from pandas import DataFrame

    rows = []
    for base in run.bases:
        decodings = {d: look.label for d, look in style.DECODINGS.items()}
        untrained = {decoding: study.accuracies(of, "base", decoding, base)[0] for decoding in decodings}
        row = {"base": base, "arm": style.ARMS["base"].label, "completions": "0"}
        for decoding, name in decodings.items():
            row |= {f"{name}, %": f"{100 * untrained[decoding].mean():.1f}", f"gain, {name} [95 %]": ""}
        rows.append(row | {"seeds": ""})
        for group in study.designed(of, base):
            found = [r for r in of[group] if r["spec"]["base"] == base]
            row = {"base": base, "arm": label_of(of, group), "completions": f"{found[0]['budget']['completions']:,d}"}
            for decoding, name in decodings.items():
                after = study.accuracies(of, group, decoding, base)
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


def measured(of: Records, rows: DataFrame, base: str) -> dict[str, int]:
    """Return label -> number of runs of what was measured again on a base; rows: of `by_temperature`."""
    found = rows[rows["base"] == base].groupby("group", sort=False)["n"].first()
    return {label_of(of, group): n for group, n in found.items()}


def temperature_table(of: Records, rows: DataFrame, base: str) -> DataFrame:
    """Return accuracy on one base by temperature, as text; rows: of `by_temperature`, accuracies in %."""
    here = rows[rows["base"] == base].assign(arm=lambda part: [label_of(of, group) for group in part["group"]])
    table = here.pivot(index="arm", columns="temperature", values="accuracy").loc[here["arm"].unique()]
    table.columns = ["greedy" if not t else f"temperature {t:g}" for t in table.columns]
    return table.map(lambda x: "" if np.isnan(x) else f"{x:.1f}").reset_index()


def distance_table(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return how far the weights and the answers of each arm are from the first base, as text."""
    from pandas import DataFrame

    rows = []
    for group in study.designed(of, run.bases[0]):
        found = of[group]  # of a diverged run both measures are null
        spec, norms = found[0]["spec"], np.array([r["update_norm"] for r in found], float)
        row = {"arm": label_of(of, group), "distance": f"{norms.mean():.2f}", "walk": ""}
        if "sigma" in spec:
            walk = spec["alpha"] * np.sqrt(found[0]["d"] * spec["steps"] / spec["population_size"])
            row["walk"] = f"{walk:.2f}"
        nats = np.array([r["kl_policy_base"]["exact_nats_per_sequence"] for r in found], float)
        row |= {"KL from base, nats per sequence": f"{nats.mean():.2f}"}
        row |= {"least": f"{nats.min():.2f}", "largest": f"{nats.max():.2f}"}
        greedy = 100 * study.accuracies(of, group, "greedy", run.bases[0]).mean()
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
            found = stats.crossed_bootstrap(study.accuracies(of, group, decoding, run.bases[0]))
            row[f"{look.label}, % [95 %]"] = found.format()
        spent = DataFrame([r["budget"] | r["counts"] for r in of[group]]).mean()
        row |= {"length": f"{spent['generated_tokens'] / spent['completions']:.2f}"}
        row |= {"groups without spread, %": f"{100 * spent['zero_std_groups']:.1f}", "seeds": len(of[group])}
        rows.append(row)
    return DataFrame(rows)


def effects_of(run: SimpleNamespace, of: Records) -> dict[tuple[str, str], Interval]:
    """Return (key of EFFECTS, decoding) -> `effect` on the first base."""
    return {(what, d): study.effect(of, what, d, run.bases[0]) for what in study.EFFECTS for d in loading.DECODINGS}


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
    found, each = [], [r["spec_hash"] for r in study.judged(run, of)]
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
    for arm in study.ARMS:
        if flops_by_hand(of[arm][0])[2] != of[arm][0]["budget"]["forward_flops"]:
            found.append(f"the FLOPs of {arm} are not those of the formula")
    counts = [r.get("counts", {}) for r in study.trained(of)]
    for kind in ("nan", "exception", "timeout", "tied"):
        if number := sum(c.get(kind, 0) for c in counts):
            found.append(f"{number} rewards or populations counted as {kind}")
    return found
