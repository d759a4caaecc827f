"""Notebook 01, ES on Countdown: presets, groups of runs, answers, tables, figures, and the numbers of the paper."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from evoalign_lib import tiny
from evoalign_lib.analysis import stats
from evoalign_study import loading, runs, style
from evoalign_study.kinds.decode import base_specs
from evoalign_study.kinds.exact import estimator_specs
from evoalign_study.kinds.train import audit_specs
from evoalign_study.loading import DECODINGS, Group, Groups, Records
from evoalign_study.records import Record, accuracy_matrix

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

NOTEBOOK = "01_es_countdown"
CLAIMS = ("E1", "E1b", "E2", "E3", "E4")
TINY = {
    "bases": list(tiny.BASES),
    "null_bases": ["A0"],  # on which shuffled fitness runs, too
    "retrain": [],  # groups that `force` makes anew; none: all
    **runs.ES_COUNTDOWN["tiny"],
    "temperatures": [0.6],  # between greedy decoding and 1, at which models are measured again
    "decoded": ["es", "es_shuffled"],  # groups that are
    "estimator_problems": 128,  # of the single steps in section 7
    "populations": [4, 8, 30, 128],
    "repeats": 16,
    "ledger_steps": 500,  # of the long run in section 8
    "audit_seeds": 4,  # of the arithmetics in section 9
}
SMOKE = TINY | {
    **runs.ES_COUNTDOWN["smoke"],
    "decoded": ["es_shuffled"],
    "bases": ["A0"],
    "estimator_problems": 8,
    "populations": [2, 4],
    "repeats": 2,
    "ledger_steps": 4,
    "audit_seeds": 2,
}
FULL = TINY | runs.ES_COUNTDOWN["full"] | {"null_bases": []}
PUBLISHED = {name: FULL[name] for name in ("sigma", "alpha")}
"""Sigma and alpha of Qiu et al. (arXiv 2509.24372), which scale full takes over."""
ARITHMETICS = [
    ("master", "gaussian", "reward"),
    ("inplace", "gaussian", "reward"),
    ("inplace", "tied", "reward"),
    ("master", "gaussian", "random"),
    ("inplace", "gaussian", "random"),
    ("kahan", "gaussian", "random"),
]
"""The rows of section 9: precision, noise and fitness. With random fitness sigma and alpha are the published ones."""


def presets(model: str = "") -> dict[str, dict[str, Any]]:
    """Return scale -> settings; model: that of scale full, empty for the scale's own."""
    return {"tiny": TINY, "smoke": SMOKE, "full": FULL | {"bases": [model or "Qwen/Qwen2.5-0.5B-Instruct"]}}


def groups(run: SimpleNamespace, of: Records) -> Groups:
    """Return the runs by name; "decodings" needs the records of what it measures."""
    settings, here = loading.of_runs(vars(run)), run.bases[:1]
    scale, exact = of_tiny_world(run)
    audited = loading.of_runs(exact)
    small = audited | PUBLISHED | {"curve_points": 2}  # generates nothing in training, so there is no curve to show
    seeds = range(exact["audit_seeds"])
    return {
        "es": Group("es", run.bases, run.n_seeds, settings, ledgers=here),
        "base": base_specs(run.bases, settings, run.scale),
        "decodings": loading.decodings(run, of, run.decoded),
        "es_shuffled": Group("es_shuffled", [b for b in run.bases if b in run.null_bases], run.n_seeds, settings),
        "estimator": [
            spec
            for N, fitness, targets in _single_steps(exact["populations"])
            for spec in estimator_specs(exact["bases"][0], N, exact["repeats"], fitness, targets, exact, scale)
        ],
        "ledger": Group("es", here, [0], settings, [{"steps": run.ledger_steps}], ledgers=here),
        "audit": [
            spec
            for *arithmetic, fitness in ARITHMETICS
            for spec in audit_specs(
                exact["bases"][0], *arithmetic, fitness, seeds, audited if fitness == "reward" else small, scale
            )
        ],
        "audit base": base_specs(exact["bases"][:1], audited, scale),
    }


def of_tiny_world(run: SimpleNamespace) -> tuple[str, dict[str, Any]]:
    """Return scale and settings of sections 7 and 9, which only small models allow (`loading.of_tiny_world`)."""
    return loading.of_tiny_world(run, TINY)


def _single_steps(populations: Sequence[int]) -> list[tuple[int, str, str]]:
    """Return members, fitness and targets of each set of single steps."""
    kinds = ("expected", "greedy")
    steps = [(N, fitness, "not the sum") for fitness in kinds for N in populations]
    return steps + [(populations[len(populations) // 2], fitness, "any") for fitness in kinds]


def accuracies(of: Records, arm: str, base: str, decoding: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the share of right answers on the test set after training (seeds, problems) and before it (problems,)."""
    after, before = (
        accuracy_matrix([r for r in of[group] if r["spec"]["base"] == base], decoding) for group in (arm, "base")
    )
    return after, before[0]


def of_arithmetic(found: Sequence[Record], precision: str, noise: str, fitness: str) -> list[Record]:
    """Return the audits of one arithmetic (see `ARITHMETICS`)."""
    wanted = {"precision": precision, "noise": noise, "fitness": fitness}
    return [r for r in found if wanted.items() <= r["spec"].items()]


def audit_means(found: Sequence[Record]) -> dict[str, float]:
    """Return what became of the updates in audits of one arithmetic, means over seeds.

    Keys are those of the record's `audit`, and "path": the cosine of the whole path with the intended one. A quantity
    that no run has is missing, one that was defined in none is NaN.
    """
    from pandas import DataFrame

    return DataFrame([r["audit"] | {"path": r["path"]["cosine"][-1]} for r in found], dtype=float).mean().to_dict()


def mean_gain(run: SimpleNamespace, of: Records, decoding: str) -> stats.Interval:
    """Return by how much ES changes test accuracy, the mean over bases; seed k of every base makes one unit."""
    both = [accuracies(of, "es", base, decoding) for base in run.bases]
    return stats.crossed_bootstrap(*(np.mean(side, axis=0) for side in zip(*both, strict=True)))


def models_in_words(run: SimpleNamespace) -> str:
    """Return what the models are, for captions."""
    if not set(run.bases) <= set(tiny.BASES):
        return ", ".join(run.bases)
    return (
        "Tiny models, trained from scratch" if len(run.bases) > 1 else f"Tiny base {run.bases[0]}, trained from scratch"
    )


# ---- the answers


def answers(run: SimpleNamespace, of: Records) -> dict[str, str]:
    """Return question -> one sentence with its number, interval and n; questions without runs are left out."""
    here, problems = run.bases[0], f"{run.test_problems:,} test problems"
    before, after = (
        100 * np.mean([accuracies(of, "es", base, "greedy")[side].mean() for base in run.bases]) for side in (1, 0)
    )
    gain, sampled = (mean_gain(run, of, decoding) for decoding in DECODINGS)
    several = len(run.bases) > 1
    whose = (
        f"mean of {len(run.bases)} bases, n = {gain.n} seeds of each" if several else f"base {here}, n = {gain.n} seeds"
    )
    found = {
        "Does ES learn Countdown?": (
            f"Greedy accuracy on {problems} goes from {before:.1f} % to {after:.1f} %, by {gain.format()} points "
            f"({whose}); accuracy at temperature 1 changes by {sampled.format()} points."
        )
    }
    if any(r["spec"]["base"] == here for r in of["es_shuffled"]):
        null, own = (stats.crossed_bootstrap(*accuracies(of, a, here, "greedy")) for a in ("es_shuffled", "es"))
        found["Does the gain need the reward?"] = (
            f"With its rewards permuted over the population, ES changes greedy accuracy on base {here} by "
            f"{null.format()} points (n = {null.n}); with its rewards by {own.format()} (n = {own.n})."
        )
    step = _step_at(of["estimator"], 30, "expected", "not the sum")
    found["Why is a population of thirty enough?"] = (
        f"A step with N = {step['N']} has cosine {_interval(step, 'cosine', 1, 4)} with the exact gradient "
        f"(n = {step['repeats']} steps). Its part along the gradient changes expected accuracy by "
        f"{_interval(step, 'gain_aligned')} points, its part across, {times_longer(step):.0f} times as long, by "
        f"{_interval(step, 'gain_orthogonal')}."
    )
    (long_run,) = of["ledger"]
    kept = [r["ledger"] for r in (*of["es"], long_run) if "ledger" in r]
    sizes = [f"{long_run['ledger'][key] / 1000:.0f} kB" for key in ("bytes", "gzip_bytes")]
    found["Is a run its seeds and rewards?"] = (
        f"Replayed from their ledgers, {len(kept)} runs differ from their own weights by at most "
        f"{max(ledger['replay_error'] for ledger in kept):g}; the ledger of {long_run['spec']['steps']} steps takes "
        f"{sizes[0]}, compressed {sizes[1]}."
    )
    return found | _answer_on_arithmetic(of["audit"])


def _answer_on_arithmetic(audits: Sequence[Record]) -> dict[str, str]:
    parts = []
    for precision, fitness in (("inplace", "reward"), ("inplace", "random"), ("master", "random")):
        runs = of_arithmetic(audits, precision, "gaussian", fitness)
        path = [r["path"]["cosine"][-1] for r in runs]
        if None in path:  # of runs that never moved it is not defined
            return {}
        parts.append(
            f"{np.mean(path):.3f} at sigma {runs[0]['spec']['sigma']:g} (from {min(path):.3f} to {max(path):.3f}"
        )
    sentence = (
        "In bfloat16, with members written in place and restored by subtraction, the cosine of a run's path with the "
        f"one that its coefficients meant is {parts[0]}, n = {len(path)} seeds) and {parts[1]}); with a float32 master "
        f"it is {parts[2]})."
    )
    return {"What does released arithmetic do?": sentence}


def _interval(row: dict[str, Any], field: str, scale: float = 100, digits: int = 2) -> str:
    """Return a field of a row of `single_steps` with its interval, times `scale`."""
    ends = (row[field], row[f"{field}_low"], row[f"{field}_high"])
    return stats.Interval(*(scale * end for end in ends), row["repeats"]).format(percent=False, digits=digits)


# ---- tables


def accuracy_rows(run: SimpleNamespace, of: Records) -> DataFrame:
    """Return the table of test accuracy before and after training: a row per base, arm and decoding."""
    from pandas import DataFrame

    rows = []
    for arm, bases in (("es", run.bases), ("es_shuffled", [b for b in run.null_bases if b in run.bases])):
        for base, decoding in ((base, decoding) for base in bases for decoding in DECODINGS):
            after, before = accuracies(of, arm, base, decoding)
            gain = stats.crossed_bootstrap(after, before)
            row = {"base": base, "arm": style.ARMS[arm].label, "decoding": style.DECODINGS[decoding].label}
            row |= {"before, %": f"{100 * before.mean():.1f}", "after, %": f"{100 * after.mean():.1f}"}
            rows.append(row | {"gain, points [95 %]": gain.format(), "seeds": gain.n, "problems": after.shape[1]})
    return DataFrame(rows)


def single_steps(found: Sequence[Record]) -> DataFrame:
    """Return single steps by targets, fitness and N: means with the ends of their 95 % intervals, as shares.

    Columns: targets, fitness, N, repeats, tied (how many had no direction), and of each measured field its mean, with
    _low and _high its ends.
    """
    from pandas import DataFrame

    steps, rows = DataFrame([r["spec"] | r["estimator"] for r in found]), []
    measured = ["cosine", "predicted_cosine", "rho"]
    measured += [f"{kind}gain_{part}" for kind in ("", "greedy_") for part in ("aligned", "orthogonal", "full")]
    for (targets, fitness, N), group in steps.groupby(["targets", "fitness", "N"]):
        row = {"targets": targets, "fitness": fitness, "N": N, "repeats": len(group), "tied": int(group["tied"].sum())}
        for field in measured:
            interval = stats.bootstrap_mean(group[field].dropna().to_numpy(float))
            row |= {field: interval.value, f"{field}_low": interval.low, f"{field}_high": interval.high}
        rows.append(row)
    return DataFrame(rows)


def _step_at(found: Sequence[Record], N: int, fitness: str, targets: str) -> dict[str, Any]:
    """Return the row of `single_steps` whose population is nearest to N."""
    chosen = single_steps([r for r in found if (r["spec"]["fitness"], r["spec"]["targets"]) == (fitness, targets)])
    return chosen.loc[(chosen["N"] - N).abs().idxmin()].to_dict()


def times_longer(step: dict[str, Any]) -> float:
    """Return how many times as long as its part along the gradient the part of a step across it is."""
    return float(np.sqrt(1 / step["cosine"] ** 2 - 1))


def parts_rows(found: Sequence[Record]) -> DataFrame:
    """Return the table of what the parts of a step at N = 30 change, in points of the accuracy that is its fitness."""
    from pandas import DataFrame

    rows = []
    for targets, fitness in (
        ("not the sum", "expected"),
        ("not the sum", "greedy"),
        ("any", "expected"),
        ("any", "greedy"),
    ):
        step, kind = _step_at(found, 30, fitness, targets), "greedy_" if fitness == "greedy" else ""
        row = {"targets": targets, "fitness": fitness, "N": step["N"], "rho": _interval(step, "rho", 1)}
        gains = {f"{look.label}, points": _interval(step, f"{kind}gain_{part}") for part, look in style.PARTS.items()}
        rows.append(row | gains | {"steps": step["repeats"]})
    return DataFrame(rows)


def arithmetic_rows(of: Records) -> DataFrame:
    """Return the table of arithmetics (`ARITHMETICS`): means over seeds; the gain, where a run had rewards."""
    from pandas import DataFrame

    rows, (base,) = [], of["audit base"]
    for precision, noise, fitness in ARITHMETICS:
        found = of_arithmetic(of["audit"], precision, noise, fitness)
        mean = audit_means(found)
        row = {"arithmetic": style.ARITHMETICS[precision, noise].label, "sigma": f"{found[0]['spec']['sigma']:g}"}
        row |= {"changed, %": f"{100 * mean['restore_changed']:.1f}", "drift": f"{mean['restore_drift']:.1e}"}
        row |= {"update": f"{mean.get('update_cosine', np.nan):.3f}"}
        row |= {"path": f"{mean['path']:.3f}", "layers": f"{round(mean.get('layers_cosine', np.nan), 2) + 0.0:.2f}"}
        gain = "no rewards"
        if fitness == "reward":
            untrained = accuracy_matrix([base], "greedy")[0]
            gain = stats.crossed_bootstrap(accuracy_matrix(found, "greedy"), untrained).format()
        rows.append(row | {"greedy gain, points [95 %]": gain, "seeds": len(found)})
    return DataFrame(rows)


# ---- figures: each returns the figure and the plotted data


def figure_gain(run: SimpleNamespace, of: Records) -> tuple[Figure, DataFrame]:
    """Draw test accuracy of every run beside its untrained base, a panel per decoding."""
    from matplotlib import pyplot as plt
    from pandas import DataFrame

    fig, axes = plt.subplots(1, len(DECODINGS), figsize=(style.PAGE, 2.4), sharey=True)
    rows, seeds = [], {}
    for ax, decoding in zip(axes, DECODINGS, strict=True):
        for place, base in enumerate(run.bases):
            before = 100 * accuracies(of, "es", base, decoding)[1].mean()
            ax.plot([place - 0.4, place + 0.4], [before] * 2, color=style.ARMS["base"].color, lw=1.2, zorder=1)
            rows.append({"base": base, "arm": "base", "decoding": decoding, "accuracy": before})
            arms = [a for a in ("es", "es_shuffled") if any(r["spec"]["base"] == base for r in of[a])]
            for arm, shift in zip(arms, (-0.18, 0.18) if len(arms) > 1 else (0,), strict=True):
                after = 100 * accuracies(of, arm, base, decoding)[0].mean(axis=1)
                style.dots(ax, place + shift, after, np.zeros(len(after)), arm, width=0.22)
                own = {"base": base, "arm": arm, "decoding": decoding}
                rows += [own | {"seed": seed, "accuracy": value} for seed, value in enumerate(after)]
                seeds[arm] = len(after)
        names = [f"base {base.split('/')[-1]}" for base in run.bases]
        ax.set_xticks(range(len(names)), names)
        ax.set(title=style.DECODINGS[decoding].label, xlim=(-0.6, len(names) - 0.4), ylim=(0, None))
        ax.grid(axis="x", visible=False)
    axes[0].set_ylabel("test accuracy, %")
    style.legend(fig, seeds | {"base": None}, decodings=())
    return fig, DataFrame(rows)


def figure_curves(run: SimpleNamespace, of: Records) -> tuple[Figure, DataFrame]:
    """Draw validation accuracy along the runs against completions, a panel per base, with 95 % bands over seeds."""
    from matplotlib import pyplot as plt
    from pandas import DataFrame, concat

    fig, axes = plt.subplots(1, len(run.bases), figsize=(style.PAGE, 2.3), sharey=True, squeeze=False)
    points, seeds = [], {}
    for ax, untrained in zip(axes[0], of["base"], strict=True):
        base = untrained["spec"]["base"]
        for arm in ("es", "es_shuffled"):
            curves = [r["curve"] for r in of[arm] if r["spec"]["base"] == base]
            for decoding in DECODINGS if curves else ():
                band = stats.curve_band(np.array([curve[f"validation_{decoding}"] for curve in curves]))
                x, look = np.array(curves[0]["completions"]), style.line(arm, decoding)
                ax.plot(x / 1000, 100 * band[0], **look)
                style.band(ax, x / 1000, 100 * band[1], 100 * band[2], look["color"])
                frame = DataFrame({"completions": x} | dict(zip(("mean", "low", "high"), band, strict=True)))
                points.append(frame.assign(base=base, arm=arm, decoding=decoding, n=len(curves)))
                seeds[arm] = len(curves)
        for decoding, key in (("greedy", "greedy"), ("t1", "pass@1")):
            at = {"color": style.ARMS["base"].color, "ls": style.DECODINGS[decoding].linestyle, "lw": 0.8}
            ax.axhline(100 * untrained["validation"][key], **at)
        ax.set(title=f"base {base.split('/')[-1]}", xlabel="completions (thousands)")
    axes[0][0].set_ylabel("validation accuracy, %")
    style.legend(fig, seeds | {"base": None}, decodings=DECODINGS)
    return fig, concat(points, ignore_index=True)


def figure_estimator(found: Sequence[Record]) -> tuple[Figure, DataFrame]:
    """Draw the cosine of a step with the gradient against N, and what the parts of a step change."""
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots(1, 3, figsize=(style.PAGE, 2.5))
    summary = single_steps(found)
    drawn = summary[summary["targets"] == "not the sum"]
    for fitness, look in style.FITNESS.items():
        chosen = drawn[drawn["fitness"] == fitness]
        _bars(axes[0], chosen, "cosine", look)
        label = "rho sqrt(N/d)" if fitness == "greedy" else None
        axes[0].plot(chosen["N"], chosen["predicted_cosine"], color="black", ls=":", lw=1.2, zorder=3, label=label)
    for ax, fitness, kind in ((axes[1], "expected", ""), (axes[2], "greedy", "greedy_")):
        for part, look in style.PARTS.items():
            _bars(ax, drawn[drawn["fitness"] == fitness], f"{kind}gain_{part}", look, 100)
        ax.axhline(0, color="black", lw=0.6)
        ax.set(title=f"{fitness} fitness", ylabel=f"change of {fitness} accuracy, points")
    axes[0].set(title="direction", ylabel="cosine of one step with g")
    for ax in axes:
        ax.set(xscale="log", xlabel="population N")
        ax.set_xticks(sorted(set(drawn["N"])), sorted(set(drawn["N"])), minor=False)
        ax.minorticks_off()
    for ax in axes[:2]:
        ax.legend(handlelength=2.8)
    return fig, summary


def _bars(ax: Axes, rows: DataFrame, field: str, look: style.Look, scale: float = 1) -> None:
    """Draw a field against N with its intervals."""
    value, low, high = (scale * rows[f"{field}{end}"] for end in ("", "_low", "_high"))
    ax.errorbar(rows["N"], value, [value - low, high - value], capsize=2, **look.line())


def figure_arithmetic(of: Records) -> tuple[Figure, DataFrame]:
    """Draw what became of the steps under each arithmetic: bars are means, every seed is a dot."""
    from matplotlib import pyplot as plt
    from pandas import DataFrame

    (base,) = of["audit base"]
    untrained, rows = accuracy_matrix([base], "greedy")[0].mean(), []
    for place, (precision, noise, fitness) in enumerate(ARITHMETICS):
        for r in of_arithmetic(of["audit"], precision, noise, fitness):
            row = {"row": place, "precision": precision, "noise": noise, "fitness": fitness, "seed": r["spec"]["seed"]}
            row |= {"sigma": r["spec"]["sigma"], "update": r["audit"].get("update_cosine", np.nan)}
            gain = 100 * (accuracy_matrix([r], "greedy")[0].mean() - untrained) if fitness == "reward" else np.nan
            rows.append(row | {"path": r["path"]["cosine"][-1], "gain": gain})
    data = DataFrame(rows)
    fig, axes = plt.subplots(1, 3, figsize=(style.PAGE, 2.3), sharey=True)
    titles = {
        "update": "cosine of one update\nwith the intended one",
        "path": "cosine of the run's path\nwith the intended one",
    }
    titles |= {"gain": "gain of greedy accuracy,\npoints"}
    for ax, (field, title) in zip(axes, titles.items(), strict=True):
        for place, part in data.groupby("row"):
            look = style.ARITHMETICS[part["precision"].iloc[0], part["noise"].iloc[0]]
            if part[field].isna().any():
                words = "no rewards" if field == "gain" else "not defined"
                ax.text(0.02, place, words, transform=ax.get_yaxis_transform(), va="center", fontsize=6.5)
                continue
            ax.barh(place, part[field].mean(), height=0.62, color=look.color)
            ax.scatter(
                part[field], place + style.jitter(len(part), 0.45), s=9, color="white", ec="black", lw=0.6, zorder=3
            )
        ax.set_title(title, fontsize=7)
        ax.grid(axis="y", visible=False)
    firsts = [part.iloc[0] for _, part in data.groupby("row")]
    names = [f"{style.ARITHMETICS[r['precision'], r['noise']].label}, sigma {r['sigma']:g}" for r in firsts]
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    return fig, data


# ---- the paper's numbers


def numbers(run: SimpleNamespace, of: Records) -> dict[str, tuple[Any, str]]:
    """Return macro -> value and format, of the training runs and, where it was measured here, of single steps."""
    here = run.bases[0]
    gain = stats.crossed_bootstrap(*accuracies(of, "es", here, "greedy"))
    gain_of_all = mean_gain(run, of, "greedy")
    found = {
        "EsSeeds": (sum(r["spec"]["base"] == here for r in of["es"]), "d"),
        "EsBases": (len(run.bases), "d"),
        "EsCompletions": (max(r["curve"]["completions"][-1] for r in of["es"]), ",d"),
        "EsSigma": (run.sigma, "g"),
        "EsAlpha": (run.alpha, "g"),
        "EsPopulation": (run.population_size, "d"),
        "EsSteps": (run.steps, "d"),
        "EsPromptsPerStep": (run.prompts_per_step, "d"),
        "EsTestProblems": (run.test_problems, "d"),
        "EsGainFirst": (100 * gain.value, ".1f"),
        "EsGainMean": (100 * gain_of_all.value, ".1f"),
        "EsGainLow": (100 * gain_of_all.low, ".1f"),
        "EsGainHigh": (100 * gain_of_all.high, ".1f"),
        "EsBaseGreedy": (100 * np.mean([r["test"]["greedy"] for r in of["base"]]), ".1f"),
    }
    if any(r["spec"]["base"] == here for r in of["es_shuffled"]):
        after, before = accuracies(of, "es_shuffled", here, "greedy")
        found["EsShuffledChange"] = (100 * (after - before).mean(), ".1f")
    return found | (_step_numbers(of["estimator"]) if of_tiny_world(run)[0] == run.scale else {})


def _step_numbers(steps: Sequence[Record]) -> dict[str, tuple[Any, str]]:
    """Single steps on expected accuracy, of the population nearest to 30: means over the populations drawn."""
    chosen = [r for r in steps if (r["spec"]["fitness"], r["spec"]["targets"]) == ("expected", "not the sum")]
    N = min((r["spec"]["N"] for r in chosen), key=lambda n: abs(n - 30))
    fields = {"Cosine": "cosine", "Predicted": "predicted_cosine", "Rho": "rho"}
    fields |= {"Aligned": "gain_aligned", "Orthogonal": "gain_orthogonal"}
    found = {}
    for macro, field in fields.items():
        values = [r["estimator"][field] for r in chosen if r["spec"]["N"] == N]
        mean = np.mean([value for value in values if value is not None])  # of a tied population it is not defined
        found[f"Estimator{macro}"] = (mean, ".5f" if "gain" in field else ".3f")
    return found


def ledger_numbers(run: SimpleNamespace, long_run: Record) -> dict[str, tuple[Any, str]]:
    """Return macro -> value and format, of the long run whose ledger is kept: steps, and sizes in kilobytes."""
    steps = long_run["spec"]["steps"]
    found = {"LedgerSteps": (steps, "d")}
    found["LedgerFloor"] = (12 * run.population_size * steps / 1000, ".0f")  # a key and a coefficient per member
    sizes = {"": "bytes", "Gzipped": "gzip_bytes"}
    return found | {f"LedgerKilobytes{s}": (long_run["ledger"][key] / 1000, ".0f") for s, key in sizes.items()}


def audit_numbers(run: SimpleNamespace, found: Sequence[Record]) -> dict[str, tuple[Any, str]]:
    """Return macro -> value and format, of the arithmetics; none where they were measured at another scale."""
    scale, exact = of_tiny_world(run)
    if scale != run.scale:
        return {}
    cases = {"Master": ("master", "gaussian", "reward"), "Inplace": ("inplace", "gaussian", "reward")}
    cases |= {f"{name}Published": (*case[:2], "random") for name, case in cases.items()}
    means = {name: audit_means(of_arithmetic(found, *case)) for name, case in cases.items()}
    numbers = {"AuditSeeds": (exact["audit_seeds"], "d")}
    numbers |= {f"AuditPath{name}": (mean["path"], ".3f") for name, mean in means.items()}
    for name in ("Inplace", "InplacePublished"):
        numbers[f"AuditUpdate{name}"] = (means[name].get("update_cosine", np.nan), ".3f")
    return numbers | {"AuditChangedInplace": (100 * means["Inplace"]["restore_changed"], ".1f")}
