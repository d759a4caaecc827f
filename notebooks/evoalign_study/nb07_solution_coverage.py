"""Notebook 07, solution coverage: groups of runs, pass@k and support, results, tables and figures.

The sections on rollouts and updates, and on training with two arms in turn, are in `evoalign_study.coverage_factors`,
that on tricks of ES in `evoalign_study.es_tricks`.
"""

from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from pandas import DataFrame

from evoalign_lib import tiny
from evoalign_lib.analysis import coverage, stats
from evoalign_lib.analysis.coverage import SOLVED_WITHIN, Support
from evoalign_study import coverage_factors as factors
from evoalign_study import es_tricks, loading, plots, runs, style, weight_cache
from evoalign_study.coverage_factors import BASE, CELLS, COMPOSED, chances, reach_name
from evoalign_study.kinds.decode import sampled_specs
from evoalign_study.kinds.weights import answers_spec, coverage_spec, perturbed_specs
from evoalign_study.loading import After, Groups, Records
from evoalign_study.measures.base import label
from evoalign_study.records import Record, ledger_file, unpack_bits, unpack_integers, unpack_probabilities
from evoalign_study.results import Results, stated

NOTEBOOK = "07_solution_coverage"
CLAIMS = ("C18", "C18c", "C19b", "E13", "C36", "E12", "E15", "E16")
TRAINED = ("es", "es_sampled", "grpo", "dr_grpo", "sft", "es_random", "grpo_random")
"""Groups of training runs whose coverage is compared."""
ELSEWHERE, MEAN = "es elsewhere", "mean of ES runs"
"""Notebook 08's ES runs, and models whose weights are means of those runs."""
MODELS = (BASE, *TRAINED, MEAN)
"""All models in tables."""
OWN = "own"
"""Stands for a temperature: each model's own, chosen on the validation set."""
KS = (1, 16, 256, 1024)
"""Numbers of samples k at which tables show pass@k."""
CURVE = np.unique(np.geomspace(1, 1024, 41).round()).astype(int)
"""Numbers of samples k at which curves are drawn and crossings are sought."""
_RESAMPLES = 2000
presets, TINY, SMOKE, FULL = runs.scales(
    {
        "bases": ["A0"],
        "retrain": [],  # groups that `force` runs again; empty: all of them
        "own_seeds": (list(range(32, 40)), [32, 33]),  # seeds that no other notebook uses
        "seeds_es": (32, 2),  # of ES in notebook 08
        "seeds_random": [],  # of notebook 08, unused here, as is the next
        "seeds_sampled": [],
        "mean": (8, 2),  # ES runs per mean
        "cell_steps": (250, 4),  # of ES where rollouts and updates are varied separately: as many completions as GRPO's
        "cell_members": (16, 4),
        "cell_prompts": (16, 4),
        "cell_samples": (16, 4),  # per prompt, where the unperturbed weights generate
        "sweep_size": (12, 2),
        "finalists": (4, 1),  # settings of a sweep that are tried at full length
        "perturbed_sigma": 0.025,  # of copies that generate for fine-tuning: the best on validation problems
        "alone_steps": (66, 2),  # of ES at GRPO's FLOPs; each part of a composed run has half its arm's steps
        "tricks": ["es_pairs", "es_ranks", "es_scheduled", "es_anchored", es_tricks.MEAN, es_tricks.WALK],
        "trick_steps": (262, 4),  # of ES with a trick, at GRPO's FLOPs
        "trick_members": (30, 4),
        "trick_prompts": (32, 4),
        "trick_settings": (4, 2),  # that a trick tries
        "trick_seeds": (8, 2),
        "trick_compared": (16, 2),  # seeds of plain ES and of GRPO, notebook 02's
        "curve_points": (13, 3),
        "reach_at": [0.6, 1.0],  # temperatures at which every point of a curve is measured
        "max_completion_length": (tiny.MAX_COMPLETION_LENGTH, tiny.MAX_COMPLETION_LENGTH, 1024),
        "validation_problems": (512, 16),
        "test_problems": (512, 32),
        "coverage_problems": (256, 16),  # of the test set
        "coverage_temperatures": ([0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4], [0.6, 1.0]),
        "coverage_samples": (64, 8),  # per problem
        "coverage_sampled_at": [0.6, 1.0],
        "checked_samples": (1024, 16),  # per problem, for one run of each arm
        "perturbed_sigmas": ([0.01, 0.015, 0.02, 0.025, 0.03], [0.02]),  # of noise on the base's weights
        "perturbed_repeats": (4, 2),
        "perturbed_members": (512, 16),  # copies, each answering once
        "perturbed_problems": (256, 16),  # of the test set, the same as coverage_problems
        "perturbed_validation": (128, 8),
        "ends": [],  # your own folders, ledgers or adapters, sampled besides `model`; empty: a run of ES
        "sampled_problems": (64, 8, 512),  # of the test set, on which the model and its ends are sampled
        "sampled_block": (32, 4, 64),  # problems per record: the most that a kill loses
        "sampled_samples": (64, 8, 512),  # per problem
        "sampled_temperatures": [0.6, 1.0],
        "tensor_parallel": (..., ..., 1),  # GPUs that share a copy of the model
    }
)


# ---- groups of runs


def groups(run: SimpleNamespace, records: Records) -> Groups:
    """Return the groups of runs by name: notebook 02's arms on separate seeds, and the coverage of their models.

    At scale full these are still runs of the tiny world, the only one whose right answers are listed; the model itself
    and its ends are sampled.
    """
    scale, exact = loading.of_tiny_world(run, TINY)
    settings, base = SimpleNamespace(**exact), exact["bases"][0]
    shared = runs.countdown(records, scale, exact)
    declared: dict[str, Any] = {name: shared[name] for name in ("sweep es", "sweep grpo")}
    declared[ELSEWHERE] = shared["es"]
    declared |= {arm: factors.on_own_seeds(shared[arm], settings) for arm in TRAINED}
    declared |= factors.cells(settings, records, shared, scale) | factors.composed(settings, records, shared, scale)
    for measured, group in reached().items():  # the base, the means of notebook 08's runs, or each run of a group
        own = records.get(group, ())
        each = runs.means(own, settings.mean if group == ELSEWHERE else 1, len(own))
        models = [weight_cache.end(of_model) for of_model in each] if group else [None]
        specs = [coverage_spec(base, model, exact, scale) for model in models]
        declared[measured] = After(specs, (group,) if group else ())
    declared |= es_tricks.groups(settings, records, scale)
    declared["perturbed"] = perturbed_specs(base, settings.perturbed_sigmas, settings.perturbed_repeats, exact, scale)
    answering = tuple(group for name, group in reached().items() if group and name != reach_name(MEAN))
    many = exact | {"coverage_samples": settings.checked_samples}

    def firsts(groups: Sequence[str]) -> list[Any]:
        """Return the base (None) and the first run of each group."""
        return [None, *(weight_cache.end(records[group][:1]) for group in groups if group in records)]

    declared["answers"] = After([answers_spec(base, end, exact, scale) for end in firsts(answering)], answering)
    declared["checked"] = After([coverage_spec(base, end, many, scale) for end in firsts(TRAINED)], TRAINED)
    sampled = [s for end in (None, *ends(run, records)) for s in sampled_specs(run.bases[0], end, vars(run), run.scale)]
    return declared | {"sampled": After(sampled, (ELSEWHERE,))}


def reached() -> dict[str, str]:
    """Return each group of models whose coverage is measured -> the group of their runs, empty for the base."""
    cells = [group for group in CELLS.values() if group not in TRAINED]
    named = (*TRAINED, *cells, factors.SLOWER, factors.PLAIN, factors.ALONE, *COMPOSED, *factors.FIRST)
    return {reach_name(BASE): ""} | {reach_name(group): group for group in named} | {reach_name(MEAN): ELSEWHERE}


def ends(run: SimpleNamespace, records: Records) -> list[str]:
    """Return the ends of training sampled besides the model: `run.ends`, or for a shipped base a ledger of ES."""
    if run.ends or run.bases[0] not in tiny.SHIPPED:
        return list(run.ends)
    return [str(ledger_file(records[ELSEWHERE][0]))] if ELSEWHERE in records else []


def sampled(run: SimpleNamespace, records: Records) -> dict[str, Sequence[Record]]:
    """Return name -> records of the model and of its ends, in order."""
    by_end: dict[str | None, list[Record]] = {}
    for record in records["sampled"]:
        by_end.setdefault(record["spec"].get("end"), []).append(record)
    own = run.ends or run.bases[0] not in tiny.SHIPPED
    named = [run.bases[0], *run.ends] if own else [f"base {run.bases[0]}", "a run of ES"]
    return dict(zip(named, by_end.values(), strict=True))


# ---- pass@k


def name(run: SimpleNamespace, model: str) -> str:
    """Return the name of a model in tables and legends."""
    return f"mean of {run.mean} ES runs" if model == MEAN else style.ARMS[model].label


def _model(run: SimpleNamespace, records: Records, model: str) -> dict[str, Any]:
    """Return the first columns of a model's row: its name, and how many of its kind were measured."""
    return {"model": name(run, model), "n": len(records[reach_name(model)])}


def solved(records: Records, model: str, at: str, k: int = SOLVED_WITHIN) -> stats.Interval:
    """Return pass@k averaged over runs and problems, with its interval; at: as in `coverage_factors.chances`."""
    return stats.crossed_bootstrap(coverage.pass_at(chances(records, model, at), k), n_resamples=_RESAMPLES)


def own_temperatures(records: Records, model: str) -> str:
    """Return the temperatures chosen on the validation set for a model's runs, the most frequent first."""
    own = [coverage.own_temperature(record["validation"]).removeprefix("t") for record in records[reach_name(model)]]
    counted = sorted(dict.fromkeys(own), key=lambda t: (-own.count(t), t))
    return ", ".join(t if len(counted) == 1 else f"{t} ({own.count(t)})" for t in counted)


def pass_table(run: SimpleNamespace, records: Records) -> DataFrame:
    """Return a row per model: pass@k at temperature 1, the model's own temperature, and pass@256 there."""
    return DataFrame(
        _model(run, records, model)
        | {f"pass@{k}": solved(records, model, "t1", k).format() for k in KS}
        | {"own temperature": own_temperatures(records, model)}
        | {f"pass@{SOLVED_WITHIN} there": solved(records, model, OWN).format()}
        for model in MODELS
    )


def crossing(records: Records, model: str, at: str) -> stats.Interval:
    """Return the number of samples from which on the base solves more than a model.

    Infinity: not within 1,024 samples; minus infinity: from the first sample on. Runs are resampled, and problems
    jointly for base and runs; for a single run the ends of the interval are NaN.
    """
    base, own = chances(records, BASE, at)[0], chances(records, model, at)
    return coverage.overtaken(base, own, CURVE.tolist(), n_resamples=_RESAMPLES)


def crossing_told(crossed: stats.Interval) -> str:
    """Return a crossing and its interval in words."""

    def word(k: float) -> str:
        return {np.inf: f"over {CURVE[-1]:,}", -np.inf: "1"}.get(k) or f"{k:.0f}"

    never = {np.inf: f"not up to {CURVE[-1]:,}", -np.inf: "from the first"}
    value = never.get(crossed.value) or word(crossed.value)
    return value if np.isnan(crossed.low) else f"{value} [{word(crossed.low)}, {word(crossed.high)}]"


def crossing_table(run: SimpleNamespace, records: Records) -> DataFrame:
    """Return a row per trained model: where the base overtakes it, and the net change of support on either side."""
    columns = {"temperature 0.6": "t0.6", "temperature 1": "t1", "each at its own": OWN}
    return DataFrame(
        _model(run, records, model)
        | {words: crossing_told(crossing(records, model, at)) for words, at in columns.items()}
        | {f"NSCR within {k:,}": stated(change(records, model, "t1", k), ".3f") for k in (64, 1024)}
        for model in MODELS[1:]
    )


def at_equal_accuracy(run: SimpleNamespace, records: Records) -> Results:
    """Compare ES with GRPO at equal pass@1, at the "hot" and at the "cold" end of the range that both arms reach.

    The hot end is the pass@1 of GRPO at its hottest temperature, the cold end the best pass@1 of ES; the other arm is
    interpolated linearly between measured temperatures.

    "level" is that pass@1; "more" is how much more ES solves within 256 samples, its interval from the resamples in
    which both arms reach the end. All are fractions.
    Intervals are over runs and problems, with both arms on the same problems.
    """
    ats = [label(t) for t in sorted(run.coverage_temperatures)]
    solved_at = {}  # (one or many samples, temperatures, runs, problems)
    for arm in ("es", "grpo"):
        chance = np.stack([chances(records, arm, at) for at in ats])
        solved_at[arm] = np.stack([coverage.pass_at(chance, k) for k in (1, SOLVED_WITHIN)])

    def compare(draw: Any) -> list[list[float]]:
        problems, curves = draw(solved_at["es"].shape[3]), {}
        for arm, both in solved_at.items():
            weights = draw(both.shape[2])
            one, many = (np.tensordot(weights, each, (0, 1)) @ problems for each in both)
            best = int(one.argmax())  # hotter samples are right less often from there on
            curves[arm] = one[best:][::-1], many[best:][::-1]
        (es, es_many), (grpo, grpo_many) = curves["es"], curves["grpo"]
        low, high = float(grpo[0]), float(es[-1])
        more = np.interp([low, high], es, es_many) - np.interp([low, high], grpo, grpo_many)
        return [[low, high], more.tolist() if es[0] <= low <= high <= grpo[-1] else [np.nan, np.nan]]

    rng = np.random.default_rng(0)
    values = compare(lambda n: np.full(n, 1 / n))
    drawn = np.array([compare(lambda n: rng.multinomial(n, np.full(n, 1 / n)) / n)[1] for _ in range(_RESAMPLES)])
    n, found = min(both.shape[2] for both in solved_at.values()), {}
    for end, level, more, draws in zip(("hot", "cold"), *values, drawn.T, strict=True):
        known = [] if np.isnan(more) else draws[~np.isnan(draws)]
        found |= {f"{end} level": level, f"{end} more": stats.interval_of(more, known, n)}
    return found


# ---- problems won and lost


def supports(records: Records, model: str, at: str) -> list[Support]:
    """Return for each run the expected numbers of problems kept, won, lost and out within 256 samples."""
    before = coverage.pass_at(chances(records, BASE, at)[0], SOLVED_WITHIN)
    return [coverage.support(before, after) for after in coverage.pass_at(chances(records, model, at), SOLVED_WITHIN)]


def change(records: Records, model: str, at: str, k: int = SOLVED_WITHIN, less: str = "") -> stats.Interval:
    """Return the net change of support (NSCR) within k samples, less that of another model; the claims use 256."""
    of = [chances(records, each, at) for each in (model, less) if each]
    return coverage.support_change(chances(records, BASE, at)[0], of[0], k, *of[1:])


def null(records: Records, at: str) -> coverage.Null:
    """Return the null of the net change: what one set of 256 samples of the base wins and loses against another."""
    return coverage.null_nscr(chances(records, BASE, at)[0], SOLVED_WITHIN)


def support_table(run: SimpleNamespace, records: Records, at: str = "t1") -> DataFrame:
    """Return a row per model: problems kept, won, lost and out, their ratios, and the range of the null."""
    chance, rows = null(records, at), []
    for model in MODELS:
        each = supports(records, model, at)
        part = {name: np.mean([getattr(one, name) for one in each]) for name in (*_REGIONS, "srr", "ndr")}
        row = _model(run, records, model) | {name: f"{part[name]:.1f}" for name in _REGIONS}
        row |= {name.upper(): stated(part[name], ".3f", "not defined") for name in ("srr", "ndr")}
        row["NSCR [95 %]"] = "0 (the null)" if model == BASE else stated(change(records, model, at), ".3f")
        walk = model != "es_random" and runs.walk_of(records.get(model, ()), records["es_random"])
        row["less its walk's"] = stated(change(records, model, at, less="es_random"), ".3f") if walk else ""
        rows.append(row | {"null of counts": f"{chance.low:.3f} to {chance.high:.3f}"})
    return DataFrame(rows)


_REGIONS = ("kept", "won", "lost", "out")


def own_support_table(run: SimpleNamespace, records: Records) -> DataFrame:
    """Return `support_table` with the base and each model at its own temperature."""
    table = support_table(run, records, OWN)
    table.insert(2, "own temperature", [own_temperatures(records, model) for model in MODELS])
    return table


# ---- samples


def checked_table(run: SimpleNamespace, records: Records) -> DataFrame:
    """Return a row per checked model: exact and sampled pass@k, spread of counts, share of right samples listed."""
    rows = []
    for model, record in zip((BASE, *TRAINED), records["checked"], strict=True):
        samples, drawn = record["spec"]["coverage_samples"], record["drawn"]["t1"]
        exact, right = unpack_probabilities(record["reach"]["t1"]), unpack_integers(drawn["right"])
        row: dict[str, Any] = {"model": name(run, model), "samples": f"{samples:,}"}
        for k in (k for k in KS if k <= samples and k != KS[1]):
            both = coverage.pass_at(exact, k), coverage.estimate_pass_at(right, samples, k)
            row[f"pass@{k}"] = ", ".join(f"{100 * each.mean():.2f}" for each in both)
        variances = samples * exact * (1 - exact)
        often = variances > 1  # where a normal deviate is a fair description
        deviates = (right - samples * exact)[often] / np.sqrt(variances)[often]
        row["spread over chance's"] = f"{np.sqrt(np.mean(deviates**2)):.2f}" if often.any() else ""
        row["listed, %"] = f"{100 * drawn['listed'] / drawn['right_samples']:.2f}" if drawn["right_samples"] else ""
        rows.append(row | {"entropy": f"{drawn['entropy_corrected']:.2f}"})
    return DataFrame(rows)


def voted(records: Records, model: str, at: str) -> np.ndarray:
    """Return whether the most frequent answer to each problem is right, (runs, problems)."""
    return np.array([unpack_bits(r["drawn"][at]["vote_bits"], r["n"]) for r in records[reach_name(model)]], float)


def variety_table(run: SimpleNamespace, records: Records) -> DataFrame:
    """Return a row per model: greedy accuracy, and at two temperatures accuracy of the vote and entropy of answers."""
    rows = []
    for model in MODELS:
        row = _model(run, records, model) | {"greedy": solved(records, model, "greedy", 1).format()}
        for t in run.coverage_sampled_at:
            vote = stats.crossed_bootstrap(voted(records, model, label(t)), n_resamples=_RESAMPLES)
            drawn = DataFrame([r["drawn"][label(t)] for r in records[reach_name(model)]])
            row |= {f"vote at {t:g}": vote.format(), f"entropy at {t:g}": f"{drawn['entropy'].mean():.2f}"}
            row[f"corrected at {t:g}"] = f"{drawn['entropy_corrected'].mean():.2f}"
        rows.append(row)
    return DataFrame(rows)


# ---- noise on the weights against temperature


def copies(records: Records, sigma: float, k: int = SOLVED_WITHIN, part: str = "right") -> np.ndarray:
    """Return pass@k of k copies of the base with noise of one sigma instead of k samples, (repeats, problems).

    If there are fewer than k copies, all are used. part: "right" for test problems, or "validation".
    """
    repeats = runs.where(records["perturbed"], sigma=sigma)
    (members,) = {record["spec"]["members"] for record in repeats}
    packed = [record["validation"] if part == "validation" else record["drawn"]["right"] for record in repeats]
    return coverage.estimate_pass_at(np.array(list(map(unpack_integers, packed))), members, min(k, members))


def solved_by_copies(records: Records, sigma: float, k: int = SOLVED_WITHIN) -> stats.Interval:
    """Return the share of test problems that k copies with noise of one sigma solve, or all copies if fewer."""
    return stats.crossed_bootstrap(copies(records, sigma, k), n_resamples=_RESAMPLES)


def perturbed_table(run: SimpleNamespace, records: Records) -> DataFrame:
    """Return a row per temperature and per sigma: what equally many completions of the base solve, and their vote."""
    (base,), rows = records[reach_name(BASE)], []
    for t, at in ((t, label(t)) for t in run.coverage_temperatures):
        row = {"completions differ by": f"temperature {t:g}"}
        row |= {f"pass@{k}": solved(records, BASE, at, k).format() for k in KS[:3]}
        rows.append(row | {"vote": f"{100 * voted(records, BASE, at).mean():.1f}" if at in base["drawn"] else ""})
    (there,) = coverage.pass_at(chances(records, BASE, OWN), SOLVED_WITHIN)
    for sigma in run.perturbed_sigmas:
        repeats = runs.where(records["perturbed"], sigma=sigma)
        enough = [k for k in KS[:3] if k <= repeats[0]["spec"]["members"]]
        row = {"completions differ by": f"noise, sigma {sigma:g}"}
        row |= {f"pass@{k}": solved_by_copies(records, sigma, k).format() for k in enough}
        votes = [unpack_bits(record["drawn"]["vote_bits"], record["n"]).mean() for record in repeats]
        row["vote"] = f"{100 * np.mean(votes):.1f}"
        for words, size, what in (("best copy", "1", "mean"), ("best 16", "16", "mean"), ("their vote", "16", "vote")):
            row[words] = f"{100 * np.mean([record['best'][size][what] for record in repeats]):.1f}"
        if SOLVED_WITHIN in enough:
            here = DataFrame([vars(coverage.support(there, each)) for each in copies(records, sigma)]).mean()
            row |= {"found here alone": f"{here['won']:.1f}", "found there alone": f"{here['lost']:.1f}"}
        rows.append(row)
    return DataFrame(rows).fillna("")


# ---- results


def results(run: SimpleNamespace, records: Records) -> Results:
    """Return by name the numbers that the answers and the paper's macros quote; shares are fractions."""
    entries: Results = {"problems": records[reach_name(BASE)][0]["n"], "within": SOLVED_WITHIN}
    entries["runs"] = len(records["es"])
    entries |= {f"{model} at 1": solved(records, model, "t1") for model in (BASE, "es", "grpo")}
    entries |= {f"{model} change": change(records, model, "t1") for model in ("es", "grpo")}
    for at in ("t0.6", "t1"):
        right, base = (chances(records, model, at) for model in ("es", BASE))
        entries[f"es gained {at}"] = stats.crossed_bootstrap(right, np.repeat(base, len(right), 0))
    return entries | at_equal_accuracy(run, records) | factors.results(records) | es_tricks.results(records)


# ---- figures: each returns the figure and the data that it plots

_DRAWN = tuple(model for model in MODELS if model != "grpo_random")
"""Models in figures. GRPO with random reward ends at 0 and is in the tables only."""
_CURVES = tuple(model for model in _DRAWN if model != "dr_grpo")
"""Models with curves. Those of Dr.GRPO are left out, as they coincide with GRPO's."""


def _looks(run: SimpleNamespace) -> dict[str, dict[str, Any]]:
    """Return model name -> line style; the mean of ES runs has the colour of ES."""
    looks = {}
    for model in MODELS:
        arm = "es" if model == MEAN else model
        stroke = "--" if model == MEAN or style.ARMS[arm].null else "-"
        looks[name(run, model)] = plots.look(arm, markevery=0.2, ms=4, lw=1.2, ls=stroke, label=name(run, model))
    return looks


def figure_pass_at_k(run: SimpleNamespace, records: Records) -> tuple[plt.Figure, DataFrame]:
    """Draw pass@k against k, at temperature 1 and at each model's own temperature."""
    panels = {"t1": "temperature 1", OWN: "each at its own temperature"}
    points = DataFrame(
        {"panel": title, "model": name(run, model), "k": k}
        | plots.ends(stats.crossed_bootstrap(within[..., i], n_resamples=500), 100)
        for at, title in panels.items()
        for model in _CURVES
        for within in [coverage.pass_at(chances(records, model, at), CURVE.tolist())]
        for i, k in enumerate(CURVE)
    )
    labels = {"xlabel": "samples k", "ylabel": "problems solved, %", "ylim": (0, 100)}
    fig, axes = plots.grid(points, "k", "value", "model", _looks(run), 2.8, 5, **labels)
    for ax in axes:
        plots.plain_ticks(ax, [1, 4, 16, 64, 256, 1024])
    return fig, points[["panel", "model", "k", "value"]]


def figure_support(run: SimpleNamespace, records: Records) -> tuple[plt.Figure, DataFrame]:
    """Draw a diagram of the four regions, and each model's problems won and lost in 256 samples at temperature 1."""
    means = {model: DataFrame(map(vars, supports(records, model, "t1"))).mean() for model in _DRAWN}
    points = DataFrame(
        {"model": name(run, model), "won": mean["won"], "lost": mean["lost"], "value": mean["won"] - mean["lost"]}
        for model, mean in means.items()
    )
    fig, (left, right) = plt.subplots(1, 2, figsize=(style.PAGE, 3.2), width_ratios=(1, 2.2), layout="constrained")
    for x, y, word in ((0, 1, "won"), (1, 1, "kept"), (0, 0, "out"), (1, 0, "lost")):
        left.fill_between([x, x + 1], y, y + 1, facecolor="#DDDDDD" if word == "kept" else "white", edgecolor="#888888")
        left.text(x + 0.5, y + 0.5, word, ha="center", va="center")
    left.set(xlim=(0, 2), ylim=(0, 2), xlabel="base solves it", ylabel="trained model solves it", aspect="equal")
    left.set(xticks=[0.5, 1.5], xticklabels=["no", "yes"], yticks=[0.5, 1.5], yticklabels=["no", "yes"])
    rows, colors = range(len(points)), [style.ARMS["es" if model == MEAN else model].color for model in _DRAWN]
    right.barh(rows, points["won"], color=colors, height=0.62)
    right.barh(rows, -points["lost"], color="white", hatch="////", edgecolor=colors, height=0.62)
    right.plot(points["value"], rows, marker="|", ms=11, mew=2, color="black", ls="", label="net")
    right.axvline(0, color="black", lw=0.8)
    right.set_yticks(rows, ["base, once more", *points["model"][1:]])
    right.invert_yaxis()
    right.set(xlabel=f"lost (hatched)  ·  won, of {records[reach_name(BASE)][0]['n']} problems")
    right.legend(loc="lower left")
    return fig, points


def figure_matched(run: SimpleNamespace, records: Records) -> tuple[plt.Figure, DataFrame]:
    """Draw pass@256 against pass@1, with a curve per model through its temperatures."""
    points = DataFrame(
        {"model": name(run, model), "temperature": t, "across": 100 * one.mean(), "value": 100 * many.mean()}
        for model, t in product((each for each in _CURVES if each != MEAN), run.coverage_temperatures)
        for one, many in [[coverage.pass_at(chances(records, model, label(t)), k) for k in (1, SOLVED_WITHIN)]]
    )
    fig, ax = plt.subplots(figsize=(0.8 * style.PAGE, 3.0))
    hollow, full = {"ms": 3, "mfc": "white"}, {"ms": 6}
    for shown, how in ((points, hollow), (points[points["temperature"] == 1], full)):
        marked = {name: look | {"markevery": 1, "marker": look["marker"] or "o"} for name, look in _looks(run).items()}
        plots.lines(ax, shown, "across", "value", "model", {name: look | how for name, look in marked.items()})
    beside = {name(run, "es_random"): (-14, -21, "left"), name(run, "es_sampled"): (-4, -12, "right")}
    for model, each in points.groupby("model"):  # named at the coldest end, the null at its hottest
        end = each.iloc[-1 if model == name(run, "es_random") else 0][["across", "value"]]
        x, y, side = beside.get(model, (-6, -3, "right"))
        how = {"color": _looks(run)[model]["color"], "ha": side, "fontsize": 8}
        ax.annotate(model, end, xytext=(x, y), textcoords="offset points", **how)
    ax.set(xlabel="solved by one sample, %", ylabel=f"solved within {SOLVED_WITHIN} samples, %", xlim=(0, None))
    return fig, points


def figure_accuracies(run: SimpleNamespace, records: Records) -> tuple[plt.Figure, DataFrame]:
    """Draw the share of problems that one sample at temperature 1 solves with at least a given chance."""
    points = DataFrame(
        {"model": name(run, model), "chance": at, "value": 100 * (chances(records, model, "t1") >= at).mean()}
        for model in (BASE, "es", "es_sampled", "grpo", "sft")
        for at in np.geomspace(1e-5, 1, 61)
    )
    fig, ax = plt.subplots(figsize=(0.8 * style.PAGE, 2.8))
    plots.lines(ax, points, "chance", "value", "model", _looks(run))
    ax.set(xscale="log", xlabel="chance that one sample is right, at least", ylabel="problems, %", ylim=(0, 101))
    ax.axvline(1 / SOLVED_WITHIN, **plots.NULL)
    plots.key(fig, ax, 5)
    return fig, points
