"""Notebook 01, ES on Countdown: settings, groups of runs, results, and the answers, tables and figures from them."""

from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from pandas import DataFrame

from evoalign_lib import tiny
from evoalign_lib.analysis import stats
from evoalign_study import loading, plots, runs, style
from evoalign_study.kinds.decode import base_specs
from evoalign_study.kinds.exact import estimator_specs
from evoalign_study.kinds.train import audit_specs
from evoalign_study.loading import DECODINGS, Group, Groups, Records
from evoalign_study.records import Record, accuracy_matrix
from evoalign_study.results import Results

NOTEBOOK = "01_es_countdown"
CLAIMS = ("E1", "E1b", "E2", "E3", "E4")
presets, TINY, SMOKE, FULL = runs.scales(
    {
        "bases": (list(tiny.BASES), ["A0"]),
        "null_bases": (["A0"], ["A0"], []),  # bases on which ES with shuffled fitness runs too
        "retrain": [],  # groups that `force` runs again; empty: all of them
        **runs.ES_COUNTDOWN,
        "temperatures": [0.6],  # besides greedy decoding and 1: temperatures at which models are measured again
        "decoded": (["es", "es_shuffled"], ["es_shuffled"]),  # groups measured at those temperatures
        "estimator_problems": (128, 8),  # problems that each single step in section 5 uses
        "populations": ([4, 8, 30, 128], [2, 4]),
        "repeats": (16, 2),
        "ledger_steps": (500, 4),  # length of the run that the appendix replays
        "audit_seeds": (4, 2),  # seeds for each arithmetic in the appendix
    }
)
PUBLISHED = {name: FULL[name] for name in ("sigma", "alpha")}
"""Sigma and alpha of Qiu et al. (arXiv 2509.24372), which scale full uses too."""
ARITHMETICS = [(*how, "reward") for how in (("master", "gaussian"), ("inplace", "gaussian"), ("inplace", "tied"))]
ARITHMETICS += [(precision, "gaussian", "random") for precision in ("master", "inplace", "kahan")]
"""Arithmetics: precision, noise and fitness. Those with random fitness run at the published sigma and alpha."""


def groups(run: SimpleNamespace, records: Records) -> Groups:
    """Return the groups of runs by name; "decodings" needs the records of the models that it measures again."""
    settings, here = loading.of_runs(vars(run)), run.bases[:1]
    scale, exact = of_tiny_world(run)
    audited = loading.of_runs(exact)
    # training on random fitness generates nothing, so it has no curve to show
    audited_on = {"reward": audited, "random": audited | PUBLISHED | {"curve_points": 2}}
    seeds, sizes = range(exact["audit_seeds"]), exact["populations"]
    single_steps = [(N, "not the sum") for N in sizes] + [(sizes[len(sizes) // 2], "any")]  # N and targets
    return {
        "es": Group("es", run.bases, run.n_seeds, settings, ledgers=here),
        "base": base_specs(run.bases, settings, run.scale),
        "decodings": loading.decodings(run, records, run.decoded),
        "es_shuffled": Group("es_shuffled", [b for b in run.bases if b in run.null_bases], run.n_seeds, settings),
        "estimator": [
            spec
            for fitness, (N, targets) in product(("expected", "greedy"), single_steps)
            for spec in estimator_specs(exact["bases"][0], N, exact["repeats"], fitness, targets, exact, scale)
        ],
        "ledger": Group("es", here, [0], settings, [{"steps": run.ledger_steps}], ledgers=here),
        "audit": [
            spec
            for *how, fitness in ARITHMETICS
            for spec in audit_specs(exact["bases"][0], *how, fitness, seeds, audited_on[fitness], scale)
        ],
        "audit base": base_specs(exact["bases"][:1], audited, scale),
    }


def of_tiny_world(run: SimpleNamespace) -> tuple[str, dict[str, Any]]:
    """Return scale and settings of single steps and arithmetics, for small models only (`loading.of_tiny_world`)."""
    return loading.of_tiny_world(run, TINY)


# ---- tidy frames


def accuracies(records: Records, arm: str, base: str, decoding: str) -> np.ndarray:
    """Return the share of right answers on the test set, (seeds, problems); the arm "base" has a single row."""
    return accuracy_matrix(runs.where(records[arm], base=base), decoding)


def trained(run: SimpleNamespace, records: Records) -> list[tuple[str, str]]:
    """Return the pairs (arm, base) that have runs."""
    pairs = product(("es", "es_shuffled"), run.bases)
    return [(arm, base) for arm, base in pairs if runs.where(records[arm], base=base)]


def test_points(run: SimpleNamespace, records: Records) -> DataFrame:
    """Return test accuracy in %, a row per decoding, base, arm and seed; the untrained base has no seed."""
    cells = product(DECODINGS, run.bases, ("base", "es", "es_shuffled"))
    return DataFrame(
        {"base": base, "arm": arm, "decoding": decoding, "accuracy": accuracy, "seed": None if arm == "base" else seed}
        for decoding, base, arm in cells
        if arm == "base" or (arm, base) in trained(run, records)
        for seed, accuracy in enumerate(100 * accuracies(records, arm, base, decoding).mean(axis=1))
    )


def curve_points(run: SimpleNamespace, records: Records) -> DataFrame:
    """Return validation accuracy, a share, by completions: a row per base, arm, decoding and point of the curve."""
    pairs = sorted(trained(run, records), key=lambda pair: run.bases.index(pair[1]))
    named = [({"base": base, "arm": arm}, runs.where(records[arm], base=base)) for arm, base in pairs]
    points = runs.curve_bands(named, ["completions"], scale=1).astype({"completions": int})
    return points[["completions", "mean", "low", "high", "base", "arm", "decoding", "n"]]


_GAINS = [f"{kind}gain_{part}" for kind in ("", "greedy_") for part in ("aligned", "orthogonal", "full")]
_MEASURED = ["cosine", "predicted_cosine", "rho", *_GAINS]


def single_steps(records: Sequence[Record]) -> DataFrame:
    """Summarise single ES steps by targets, fitness and N: means with 95 % intervals, as shares.

    Columns: targets, fitness, N, repeats, tied (how many steps had no direction), and for each measured field its mean,
    with the ends of the interval under its name plus _low and _high.
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
"""Columns of `audits` that the figure draws."""
_FATE = {"update": "update_cosine", "layers": "layers_cosine", "changed": "restore_changed", "drift": "restore_drift"}
"""Further columns of `audits` -> their fields in the records."""


def audits(records: Records) -> DataFrame:
    """Return a row per audited run: what its arithmetic did to the steps and to the weights.

    Rows are in the order of the records, that of `ARITHMETICS`. Columns: row (of `ARITHMETICS`), precision, noise,
    fitness, seed, sigma; update and path, the cosines of one update and of the whole path with the intended ones, NaN
    if the run never moved; gain in greedy accuracy in points, NaN without rewards; layers, the cosine within layers;
    changed and drift, what restoring the members did to the weights.
    """
    before, rows = accuracy_matrix(records["audit base"], "greedy").mean(), []
    for record in records["audit"]:
        spec = record["spec"]
        row = {"row": ARITHMETICS.index((spec["precision"], spec["noise"], spec["fitness"]))}
        row |= {name: spec[name] for name in ("precision", "noise", "fitness", "seed", "sigma")}
        row |= {name: record["audit"].get(field, np.nan) for name, field in _FATE.items()}
        gain = 100 * (accuracy_matrix([record], "greedy").mean() - before) if spec["fitness"] == "reward" else np.nan
        rows.append(row | {"path": record["path"]["cosine"][-1], "gain": gain})
    numeric = dict.fromkeys((*_FATE, "path", "gain"), float)
    return DataFrame(rows).astype(numeric)


# ---- results


def results(run: SimpleNamespace, records: Records) -> Results:
    """Return the settings and the notebook's results by name: shares, cosines and kilobytes.

    Test accuracy before and after training and the gain as an interval, for each arm on each base and for ES as a mean
    over bases (seed k of every base forms one unit); the parts of single steps at the population nearest to 30; a
    ledger's size; and what each arithmetic does to the steps. Results without runs are left out.
    """
    here, n = run.bases[0], len(run.bases)
    values = vars(run) | {"bases": n, "seeds": len(runs.where(records["es"], base=here))}
    values |= {"completions": max(r["curve"]["completions"][-1] for r in records["es"])}
    for decoding in DECODINGS:
        sides = {}
        for arm, base in trained(run, records):
            after, (before,) = (accuracies(records, group, base, decoding) for group in (arm, "base"))
            sides[f"{arm} on {base}"] = after, before
        each = [sides[f"es on {base}"] for base in run.bases]
        sides["es"] = tuple(np.mean(side, axis=0) for side in zip(*each, strict=True))
        for name, (after, before) in sides.items():
            values |= {f"before {name}, {decoding}": before.mean(), f"after {name}, {decoding}": after.mean()}
            values[f"gain of {name}, {decoding}"] = stats.crossed_bootstrap(after, before)
    values |= {name.replace(f" on {here}", " here"): x for name, x in values.items() if f"on {here}" in name}
    whose = f"n = {values['gain of es, greedy'].n} seeds"
    whose = f"mean of {n} bases, {whose} of each" if n > 1 else f"base {here}, {whose}"
    values |= {"first base": here, "whose runs": whose}
    for (targets, fitness), part in single_steps(records["estimator"]).groupby(["targets", "fitness"]):
        step, name = part.loc[(part["N"] - 30).abs().idxmin()], f"{fitness} fitness, {targets}"
        for field in _MEASURED:
            values[f"{field}, {name}"] = stats.Interval(*step[[field, f"{field}_low", f"{field}_high", "repeats"]])
    (long_run,) = records["ledger"]
    steps, size = long_run["spec"]["steps"], long_run["ledger"]
    values |= {"ledger steps": steps, "ledger kB": size["bytes"] / 1000, "gzipped kB": size["gzip_bytes"] / 1000}
    values["least kB"] = 12 * run.population_size * steps / 1000  # 12 bytes per member: its key and its coefficient
    untrained = accuracy_matrix(records["audit base"], "greedy")[0]
    for place, part in audits(records).groupby("row"):
        name = ", ".join(ARITHMETICS[place])
        values |= {f"{field}, {name}": part[field].mean() for field in ("path", *_FATE)}
        if part["gain"].notna().all():
            audited = [records["audit"][i] for i in part.index]
            values[f"gain, {name}"] = stats.crossed_bootstrap(accuracy_matrix(audited, "greedy"), untrained)
    return values


# ---- words


def models_in_words(run: SimpleNamespace) -> str:
    """Describe the models for captions."""
    if not set(run.bases) <= set(tiny.BASES):
        return ", ".join(run.bases)
    several = "Tiny models" if len(run.bases) > 1 else f"Tiny base {run.bases[0]}"
    return f"{several}, trained from scratch"


# ---- figures, each drawn from a tidy frame


def figure_gain(points: DataFrame) -> plt.Figure:
    """Draw the test accuracy of every run and of its untrained base, a panel per decoding. points: `test_points`."""
    fig, axes, shown = plots.panels(points, "decoding", 2.4, sharey=True)
    for ax, decoding, panel in shown:
        sides = {}
        for place, (base, part) in enumerate(panel.groupby("base", sort=False)):
            (_, before), *arms = part.groupby("arm", sort=False)
            sides[f"base {base.split('/')[-1]}"] = arms
            ax.plot([place - 0.4, place + 0.4], [before["accuracy"]] * 2, **plots.BASE)
        plots.strip(ax, sides, "accuracy", 0.22)
        ax.set(title=style.DECODINGS[decoding].label, ylim=(0, None))
    axes[0].set_ylabel("test accuracy, %")
    seeds = points.dropna().groupby("arm", sort=False)["seed"].max() + 1
    style.legend(fig, {arm: int(n) for arm, n in seeds.items()} | {"base": None}, decodings=())
    return fig


def figure_curves(points: DataFrame, bases: Sequence[Record]) -> plt.Figure:
    """Draw validation accuracy against completions, a panel per base, with 95 % bands over seeds.

    Args:
        points: `curve_points`.
        bases: the records of the untrained bases.
    """
    factors = dict.fromkeys(("mean", "low", "high"), 100) | {"completions": 1e-3}
    percent = points.assign(**{name: factor * points[name] for name, factor in factors.items()})
    fig, axes, shown = plots.panels(percent, "base", 2.3, sharey=True)
    for (ax, base, panel), untrained in zip(shown, bases, strict=True):
        plots.curves(ax, panel, "completions", "mean")
        for decoding, key in (("greedy", "greedy"), ("t1", "pass@1")):
            ax.axhline(100 * untrained["validation"][key], ls=style.DECODINGS[decoding].linestyle, **plots.BASE)
        ax.set(title=f"base {base.split('/')[-1]}", xlabel="completions, thousands")
        ax.locator_params(axis="x", nbins=3)
    axes[0].set_ylabel("validation accuracy, %")
    style.legend(fig, points.groupby("arm", sort=False)["n"].last().to_dict() | {"base": None}, decodings=DECODINGS)
    return fig


def figure_estimator(steps: DataFrame) -> plt.Figure:
    """Draw a step's cosine with the gradient, and the accuracy its parts gain, against N. steps: `single_steps`."""
    drawn = steps[steps["targets"] == "not the sum"]
    fig, axes = plt.subplots(1, 3, figsize=(style.PAGE, 2.5))

    def bars(ax: plt.Axes, rows: DataFrame, field: str, look: style.Look, scale: float = 1) -> None:
        value, low, high = (scale * rows[f"{field}{end}"] for end in ("", "_low", "_high"))
        ax.errorbar(rows["N"], value, [value - low, high - value], capsize=2, **look.line())

    for ax, (fitness, rows) in zip(axes[1:], drawn.groupby("fitness"), strict=True):
        bars(axes[0], rows, "cosine", style.FITNESS[fitness])
        for part, look in style.PARTS.items():
            bars(ax, rows, f"{'greedy_' if fitness == 'greedy' else ''}gain_{part}", look, 100)
        ax.axhline(0, **plots.NULL)
        ax.set(title=f"{fitness} fitness", ylabel=f"change of {fitness} accuracy, points")
    axes[0].plot(rows["N"], rows["predicted_cosine"], label="rho sqrt(N/d)", **plots.NULL)
    axes[0].set(title="direction", ylabel="cosine of one step with g")
    for ax in axes:
        plots.plain_ticks(ax, sorted(set(drawn["N"])))
        ax.set(xlabel="population N")
    for ax in axes[:2]:
        ax.legend(handlelength=2.8)
    return fig


def figure_arithmetic(steps: DataFrame) -> plt.Figure:
    """Draw what each arithmetic does to the steps: a bar for the mean, a dot for each seed. steps: `audits`."""
    fig, axes = plt.subplots(1, 3, figsize=(style.PAGE, 2.3), sharey=True)
    titles = {
        "update": "cosine of one update\nwith the intended one",
        "path": "cosine of the run's path\nwith the intended one",
        "gain": "gain of greedy accuracy,\npoints",
    }
    for ax, (field, title) in zip(axes, titles.items(), strict=True):
        for (place, precision, noise), part in steps.groupby(["row", "precision", "noise"]):
            if part[field].isna().any():
                words = "no rewards" if field == "gain" else "not defined"
                ax.text(0.02, place, words, transform=ax.get_yaxis_transform(), va="center", fontsize=6.5)
                continue
            ax.barh(place, part[field].mean(), height=0.62, color=style.ARITHMETICS[precision, noise].color)
            ax.scatter(part[field], place + style.jitter(len(part), 0.45), s=9, color="white", ec="black", zorder=3)
        ax.set_title(title, fontsize=7)
        ax.grid(axis="y", visible=False)
    firsts = steps.groupby("row").first()
    names = [f"{style.ARITHMETICS[r.precision, r.noise].label}, sigma {r.sigma:g}" for r in firsts.itertuples()]
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    return fig
