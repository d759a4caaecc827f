"""Notebook 01, ES on Countdown: presets, groups of runs, results, and the answers, tables and figures made of them."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame

from evoalign_lib import tiny
from evoalign_lib.analysis import stats
from evoalign_lib.analysis.stats import Interval
from evoalign_study import loading, runs, style
from evoalign_study.kinds.decode import base_specs
from evoalign_study.kinds.exact import estimator_specs
from evoalign_study.kinds.train import audit_specs
from evoalign_study.loading import DECODINGS, Group, Groups, Records
from evoalign_study.records import Record, accuracy_matrix
from evoalign_study.tidy import Results, curve_band

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


def groups(run: SimpleNamespace, records: Records) -> Groups:
    """Return the runs by name; "decodings" needs the records of what it measures."""
    settings, here = loading.of_runs(vars(run)), run.bases[:1]
    scale, exact = of_tiny_world(run)
    audited = loading.of_runs(exact)
    small = audited | PUBLISHED | {"curve_points": 2}  # generates nothing in training, so there is no curve to show
    seeds = range(exact["audit_seeds"])
    return {
        "es": Group("es", run.bases, run.n_seeds, settings, ledgers=here),
        "base": base_specs(run.bases, settings, run.scale),
        "decodings": loading.decodings(run, records, run.decoded),
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


# ---- tidy frames


def accuracies(records: Records, arm: str, base: str, decoding: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the share of right answers on the test set after training (seeds, problems) and before it (problems,)."""
    after, before = (accuracy_matrix(_on(records[group], base), decoding) for group in (arm, "base"))
    return after, before[0]


def _on(records: Sequence[Record], base: str) -> list[Record]:
    return [record for record in records if record["spec"]["base"] == base]


def trained(run: SimpleNamespace, records: Records) -> list[tuple[str, str]]:
    """Return the arms with the bases on which they have runs."""
    return [(arm, base) for arm in ("es", "es_shuffled") for base in run.bases if _on(records[arm], base)]


def test_points(run: SimpleNamespace, records: Records) -> DataFrame:
    """Return test accuracy in %, a row per decoding, base, arm and seed; the untrained base has no seed."""
    cells = [(decoding, base, arm) for decoding in DECODINGS for base in run.bases for arm in ("es", "es_shuffled")]
    rows = []
    for decoding, base, arm in cells:
        own = {"base": base, "decoding": decoding}
        if arm == "es":
            rows.append(own | {"arm": "base", "accuracy": 100 * accuracies(records, "es", base, decoding)[1].mean()})
        if _on(records[arm], base):
            ends = 100 * accuracies(records, arm, base, decoding)[0].mean(axis=1)
            rows += [own | {"arm": arm, "accuracy": end, "seed": seed} for seed, end in enumerate(ends)]
    return DataFrame(rows)[["base", "arm", "decoding", "accuracy", "seed"]]


def curve_points(run: SimpleNamespace, records: Records) -> DataFrame:
    """Return validation accuracy, as a share, against completions: a row per base, arm, decoding and point."""
    cells = [(base, arm) for base in run.bases for arm in ("es", "es_shuffled") if _on(records[arm], base)]
    bands = [
        curve_band(_on(records[arm], base), ["completions"], d, scale=1).assign(base=base, arm=arm, decoding=d)
        for base, arm in cells
        for d in DECODINGS
    ]
    points = pd.concat(bands, ignore_index=True).astype({"completions": int})
    return points[["completions", "mean", "low", "high", "base", "arm", "decoding", "n"]]


_GAINS = [f"{kind}gain_{part}" for kind in ("", "greedy_") for part in ("aligned", "orthogonal", "full")]
_MEASURED = ["cosine", "predicted_cosine", "rho", *_GAINS]


def single_steps(records: Sequence[Record]) -> DataFrame:
    """Return single steps by targets, fitness and N: means with the ends of their 95 % intervals, as shares.

    Columns: targets, fitness, N, repeats, tied (how many had no direction), and of each measured field its mean, with
    _low and _high its ends.
    """
    rows = []
    steps = DataFrame([record["spec"] | record["estimator"] for record in records])
    for (targets, fitness, N), group in steps.groupby(["targets", "fitness", "N"]):
        row = {"targets": targets, "fitness": fitness, "N": N, "repeats": len(group), "tied": int(group["tied"].sum())}
        for field in _MEASURED:
            mean = stats.bootstrap_mean(group[field].dropna().to_numpy(float))
            row |= {field: mean.value, f"{field}_low": mean.low, f"{field}_high": mean.high}
        rows.append(row)
    return DataFrame(rows)


AUDITED = ["row", "precision", "noise", "fitness", "seed", "sigma", "update", "path", "gain"]
"""Columns of `audits` that a figure draws."""
_FATE = {"update": "update_cosine", "layers": "layers_cosine", "changed": "restore_changed", "drift": "restore_drift"}
"""Further columns, and what they are in the records."""


def audits(records: Records) -> DataFrame:
    """Return what became of the steps of each audited run, in the order of `ARITHMETICS`.

    Columns: row (of `ARITHMETICS`), precision, noise, fitness, seed, sigma; update and path, the cosines of an update
    and of the whole path with the intended ones, NaN where a run never moved; gain of greedy accuracy in points, NaN
    without rewards; layers, the cosine within layers; changed and drift, what restoring the
    members did to the weights.
    """
    before, rows = accuracy_matrix(records["audit base"], "greedy").mean(), []
    for record in records["audit"]:
        spec = record["spec"]
        case = tuple(spec[name] for name in ("precision", "noise", "fitness"))
        row = {
            "row": ARITHMETICS.index(case),
            **{n: spec[n] for n in ("precision", "noise", "fitness", "seed", "sigma")},
        }
        row |= {name: record["audit"].get(field, np.nan) for name, field in _FATE.items()}
        gain = 100 * (accuracy_matrix([record], "greedy").mean() - before) if spec["fitness"] == "reward" else np.nan
        rows.append(row | {"path": record["path"]["cosine"][-1], "gain": gain})
    numeric = dict.fromkeys((*_FATE, "path", "gain"), float)
    return DataFrame(rows).astype(numeric).sort_values("row", kind="stable", ignore_index=True)


# ---- results, and what the paper quotes of them

_SETTINGS = ("sigma", "alpha", "population_size", "steps", "prompts_per_step", "test_problems", "audit_seeds")


def results(run: SimpleNamespace, records: Records) -> Results:
    """Return what the notebook found, read-only: shares, cosines and kilobytes by name.

    Test accuracy before and after each arm on each base, and of ES as a mean over bases (seed k of every base makes one
    unit), with the gain as an interval; the parts of single steps at the population nearest to 30; what a ledger takes;
    and what each arithmetic makes of the steps. What has no runs is left out.
    """
    values: dict[str, Interval | float] = {name: getattr(run, name) for name in _SETTINGS}
    values |= {"bases": len(run.bases), "seeds": len(_on(records["es"], run.bases[0]))}
    values |= {"completions": max(r["curve"]["completions"][-1] for r in records["es"])}
    for decoding in DECODINGS:
        sides = {f"{arm} on {base}": accuracies(records, arm, base, decoding) for arm, base in trained(run, records)}
        each = [sides[f"es on {base}"] for base in run.bases]
        sides["es"] = tuple(np.mean(side, axis=0) for side in zip(*each, strict=True))
        for name, (after, before) in sides.items():
            values |= {f"before {name}, {decoding}": before.mean(), f"after {name}, {decoding}": after.mean()}
            values[f"gain of {name}, {decoding}"] = stats.crossed_bootstrap(after, before)
    for (targets, fitness), part in single_steps(records["estimator"]).groupby(["targets", "fitness"]):
        step, name = part.loc[(part["N"] - 30).abs().idxmin()], f"{fitness} fitness, {targets}"
        values[f"N, {name}"] = step["N"]
        for field in _MEASURED:
            ends = step[[field, f"{field}_low", f"{field}_high", "repeats"]]
            values[f"{field}, {name}"] = Interval(*ends)
    # a step across the gradient and one along it are the legs of a right-angled triangle
    values["times longer"] = np.sqrt(1 / values["cosine, expected fitness, not the sum"].value ** 2 - 1)
    (long_run,) = records["ledger"]
    kept = [record["ledger"] for record in (*records["es"], long_run) if "ledger" in record]
    values |= {"ledgers": len(kept), "replay error": max(ledger["replay_error"] for ledger in kept)}
    steps, size = long_run["spec"]["steps"], long_run["ledger"]
    values |= {"ledger steps": steps, "ledger kB": size["bytes"] / 1000, "gzipped kB": size["gzip_bytes"] / 1000}
    values["least kB"] = 12 * run.population_size * steps / 1000  # a key and a coefficient per member
    untrained = accuracy_matrix(records["audit base"], "greedy")[0]
    for place, part in audits(records).groupby("row"):
        name, path = ", ".join(ARITHMETICS[place]), part["path"].to_numpy()
        values |= {f"{field}, {name}": part[field].mean() for field in ("sigma", *_FATE)}
        values |= {f"path, {name}": path.mean(), f"least path, {name}": path.min(), f"most path, {name}": path.max()}
        if part["gain"].notna().all():
            audited = [r for r in records["audit"] if ", ".join(_arithmetic(r)) == name]
            values[f"gain, {name}"] = stats.crossed_bootstrap(accuracy_matrix(audited, "greedy"), untrained)
    return MappingProxyType(values)


def _arithmetic(record: Record) -> tuple[str, ...]:
    return tuple(record["spec"][name] for name in ("precision", "noise", "fitness"))


_STEP = "expected fitness, not the sum"
_MACROS = {
    "EsBases": ("bases", "d"),
    "EsSeeds": ("seeds", "d"),
    "EsCompletions": ("completions", ",d"),
    "EsSigma": ("sigma", "g"),
    "EsAlpha": ("alpha", "g"),
    "EsPopulation": ("population_size", "d"),
    "EsSteps": ("steps", "d"),
    "EsPromptsPerStep": ("prompts_per_step", "d"),
    "EsTestProblems": ("test_problems", "d"),
    "EsGainMean": ("gain of es, greedy", ".1%"),
    "EsGain": ("gain of es, greedy", ".1%", "low", "high"),
    "EsBaseGreedy": ("before es, greedy", ".1%"),
    "LedgerSteps": ("ledger steps", "d"),
    "LedgerFloor": ("least kB", ".0f"),
    "LedgerKilobytes": ("ledger kB", ".0f"),
    "LedgerKilobytesGzipped": ("gzipped kB", ".0f"),
}
"""Macro -> key in `results`, and its format."""
_EXACT_MACROS = {
    "EstimatorCosine": (f"cosine, {_STEP}", ".3f"),
    "EstimatorPredicted": (f"predicted_cosine, {_STEP}", ".3f"),
    "EstimatorAligned": (f"gain_aligned, {_STEP}", ".5f"),
    "EstimatorOrthogonal": (f"gain_orthogonal, {_STEP}", ".5f"),
    "AuditSeeds": ("audit_seeds", "d"),
    "AuditPathMaster": ("path, master, gaussian, reward", ".3f"),
    "AuditPathInplace": ("path, inplace, gaussian, reward", ".3f"),
    "AuditPathMasterPublished": ("path, master, gaussian, random", ".3f"),
    "AuditPathInplacePublished": ("path, inplace, gaussian, random", ".3f"),
    "AuditUpdateInplace": ("update, inplace, gaussian, reward", ".3f"),
    "AuditUpdateInplacePublished": ("update, inplace, gaussian, random", ".3f"),
    "AuditChangedInplace": ("changed, inplace, gaussian, reward", ".1%"),
}
"""The same of sections 7 and 9, which are the tiny world's."""


def macros(run: SimpleNamespace) -> dict[str, tuple[str, ...]]:
    """Return what the paper quotes of the `results`, for `tidy.macros`; exact measurements at their own scale only."""
    on_first = {
        "EsGainFirst": (f"gain of es on {run.bases[0]}, greedy", ".1%"),
        "EsShuffledChange": (f"gain of es_shuffled on {run.bases[0]}, greedy", ".1%"),
    }
    return _MACROS | on_first | (_EXACT_MACROS if of_tiny_world(run)[0] == run.scale else {})


# ---- answers and tables


def models_in_words(run: SimpleNamespace) -> str:
    """Return what the models are, for captions."""
    if not set(run.bases) <= set(tiny.BASES):
        return ", ".join(run.bases)
    return (
        "Tiny models, trained from scratch" if len(run.bases) > 1 else f"Tiny base {run.bases[0]}, trained from scratch"
    )


def answers(run: SimpleNamespace, values: Results) -> dict[str, str]:
    """Return question -> one sentence with its number, interval and n; questions without runs are left out.

    values: the `results`.
    """
    here, gain, sampled = run.bases[0], values["gain of es, greedy"], values["gain of es, t1"]
    whose = f"base {here}, n = {gain.n} seeds"
    if len(run.bases) > 1:
        whose = f"mean of {len(run.bases)} bases, n = {gain.n} seeds of each"
    told = {
        "Does ES learn Countdown?": (
            f"Greedy accuracy on {run.test_problems:,} test problems goes from {100 * values['before es, greedy']:.1f} "
            f"% to {100 * values['after es, greedy']:.1f} %, by {gain.format()} points ({whose}); accuracy at "
            f"temperature 1 changes by {sampled.format()} points."
        )
    }
    null, own = (values.get(f"gain of {arm} on {here}, greedy") for arm in ("es_shuffled", "es"))
    if null:
        told["Does the gain need the reward?"] = (
            f"With its rewards permuted over the population, ES changes greedy accuracy on base {here} by "
            f"{null.format()} points (n = {null.n}); with its rewards by {own.format()} (n = {own.n})."
        )
    cosine, along, across = (values[f"{field}, {_STEP}"] for field in ("cosine", "gain_aligned", "gain_orthogonal"))
    told["Why is a population of thirty enough?"] = (
        f"A step with N = {values[f'N, {_STEP}']} has cosine {cosine.format(percent=False, digits=4)} with the exact "
        f"gradient (n = {cosine.n} steps). Its part along the gradient changes expected accuracy by "
        f"{along.format(digits=2)} points, its part across, {values['times longer']:.0f} times as long, by "
        f"{across.format(digits=2)}."
    )
    told["Is a run its seeds and rewards?"] = (
        f"Replayed from their ledgers, {values['ledgers']} runs differ from their own weights by at most "
        f"{values['replay error']:g}; the ledger of {values['ledger steps']} steps takes {values['ledger kB']:.0f} kB, "
        f"compressed {values['gzipped kB']:.0f} kB."
    )
    cases = [f"{case}, gaussian, {fitness}" for case, fitness in _TOLD]
    if not np.isnan([values[f"path, {case}"] for case in cases]).any():  # of runs that never moved it is not defined
        in_place, published, master = (
            f"{values[f'path, {case}']:.3f} at sigma {values[f'sigma, {case}']:g} (from "
            f"{values[f'least path, {case}']:.3f} to {values[f'most path, {case}']:.3f}"
            for case in cases
        )
        told["What does released arithmetic do?"] = (
            "In bfloat16, with members written in place and restored by subtraction, the cosine of a run's path with "
            f"the one that its coefficients meant is {in_place}, n = {values['audit_seeds']} seeds) and {published}); "
            f"with a float32 master it is {master})."
        )
    return told


_TOLD = (("inplace", "reward"), ("inplace", "random"), ("master", "random"))
"""Precision and fitness of the arithmetics that an answer names."""


# ---- figures, each of a tidy frame


def figure_gain(points: DataFrame) -> Figure:
    """Draw test accuracy of every run beside its untrained base, a panel per decoding. points: `test_points`."""
    fig, axes = plt.subplots(1, len(DECODINGS), figsize=(style.PAGE, 2.4), sharey=True)
    bases, trained = list(points["base"].unique()), points[points["arm"] != "base"]
    for ax, decoding in zip(axes, DECODINGS, strict=True):
        for place, base in enumerate(bases):
            cell = points[(points["decoding"] == decoding) & (points["base"] == base)].groupby("arm", sort=False)
            runs = dict(iter(cell["accuracy"]))
            before = runs.pop("base").iloc[0]
            ax.plot([place - 0.4, place + 0.4], [before] * 2, color=style.ARMS["base"].color, lw=1.2, zorder=1)
            for (arm, after), shift in zip(runs.items(), (-0.18, 0.18) if len(runs) > 1 else (0,), strict=True):
                style.dots(ax, place + shift, after, np.zeros(len(after)), arm, width=0.22)
        names = [f"base {base.split('/')[-1]}" for base in bases]
        ax.set_xticks(range(len(names)), names)
        ax.set(title=style.DECODINGS[decoding].label, xlim=(-0.6, len(names) - 0.4), ylim=(0, None))
        ax.grid(axis="x", visible=False)
    axes[0].set_ylabel("test accuracy, %")
    seeds = trained.groupby("arm", sort=False)["seed"].max() + 1
    style.legend(fig, {arm: int(n) for arm, n in seeds.items()} | {"base": None}, decodings=())
    return fig


def figure_curves(points: DataFrame, bases: Sequence[Record]) -> Figure:
    """Draw validation accuracy along the runs against completions, a panel per base, with 95 % bands over seeds.

    Args:
        points: `curve_points`.
        bases: the records of the untrained bases.
    """
    fig, axes = plt.subplots(1, len(bases), figsize=(style.PAGE, 2.3), sharey=True, squeeze=False)
    for ax, untrained in zip(axes[0], bases, strict=True):
        base = untrained["spec"]["base"]
        for (arm, decoding), curve in points[points["base"] == base].groupby(["arm", "decoding"], sort=False):
            x, look = curve["completions"] / 1000, style.line(arm, decoding)
            ax.plot(x, 100 * curve["mean"], **look)
            style.band(ax, x, 100 * curve["low"], 100 * curve["high"], look["color"])
        for decoding, key in (("greedy", "greedy"), ("t1", "pass@1")):
            at = {"color": style.ARMS["base"].color, "ls": style.DECODINGS[decoding].linestyle, "lw": 0.8}
            ax.axhline(100 * untrained["validation"][key], **at)
        ax.set(title=f"base {base.split('/')[-1]}", xlabel="completions (thousands)")
    axes[0][0].set_ylabel("validation accuracy, %")
    style.legend(fig, points.groupby("arm", sort=False)["n"].last().to_dict() | {"base": None}, decodings=DECODINGS)
    return fig


def figure_estimator(steps: DataFrame) -> Figure:
    """Draw the cosine of a step with the gradient against N, and what its parts change. steps: `single_steps`."""
    fig, axes = plt.subplots(1, 3, figsize=(style.PAGE, 2.5))
    drawn = steps[steps["targets"] == "not the sum"]
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
    return fig


def _bars(ax: Axes, rows: DataFrame, field: str, look: style.Look, scale: float = 1) -> None:
    """Draw a field against N with its intervals."""
    value, low, high = (scale * rows[f"{field}{end}"] for end in ("", "_low", "_high"))
    ax.errorbar(rows["N"], value, [value - low, high - value], capsize=2, **look.line())


def figure_arithmetic(runs: DataFrame) -> Figure:
    """Draw what became of the steps under each arithmetic: bars are means, every seed is a dot. runs: `audits`."""
    fig, axes = plt.subplots(1, 3, figsize=(style.PAGE, 2.3), sharey=True)
    titles = {
        "update": "cosine of one update\nwith the intended one",
        "path": "cosine of the run's path\nwith the intended one",
        "gain": "gain of greedy accuracy,\npoints",
    }
    for ax, (field, title) in zip(axes, titles.items(), strict=True):
        for (place, precision, noise), part in runs.groupby(["row", "precision", "noise"]):
            if part[field].isna().any():
                words = "no rewards" if field == "gain" else "not defined"
                ax.text(0.02, place, words, transform=ax.get_yaxis_transform(), va="center", fontsize=6.5)
                continue
            ax.barh(place, part[field].mean(), height=0.62, color=style.ARITHMETICS[precision, noise].color)
            spread = place + style.jitter(len(part), 0.45)
            ax.scatter(part[field], spread, s=9, color="white", ec="black", lw=0.6, zorder=3)
        ax.set_title(title, fontsize=7)
        ax.grid(axis="y", visible=False)
    firsts = runs.groupby("row").first()
    names = [f"{style.ARITHMETICS[r.precision, r.noise].label}, sigma {r.sigma:g}" for r in firsts.itertuples()]
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    return fig
