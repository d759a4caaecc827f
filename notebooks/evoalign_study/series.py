"""How far the tiny world reaches: claims of 2026 with their nulls, and series with predictions made beforehand."""

import sys
from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from pandas import DataFrame

from evoalign_lib.analysis import stats
from evoalign_lib.checks import choose
from evoalign_study import loading, plots, runs, style
from evoalign_study.kinds.exact import pairs_specs, rank_specs, signal_specs
from evoalign_study.kinds.memory import SIZES
from evoalign_study.kinds.train import audit_specs, train_specs
from evoalign_study.kinds.weights import pruned_specs
from evoalign_study.loading import Group, Groups, Records
from evoalign_study.records import Spec, accuracy_matrix, spent_to_gain
from evoalign_study.results import Results
from evoalign_study.sweep import load_or_run

CLAIMS = ("C41", "C41b", "C42", "C43", "C44", "C45", "C46", "E21", "E22", "E23")
"""Claims of papers of 2026, and this project's own predictions."""
_NOTEBOOK = "05_stability"
SHORT = {"population_size": 30, "prompts_per_step": 32, "sigma": 0.01, "alpha": 0.0025, "steps": 262}
"""The setting of ES that won where the arms are compared (claim C2c)."""
AUDITED = (*product(("inplace", "master"), ("random", "reward")), ("kahan", "reward"))
"""Precision and fitness of the audits, at the sigma and alpha of Qiu et al."""
WIDTHS = (16, 32, 64, 128, 256, 512, 0)
"""Widths of square matrices with noise of rank 1; 0: all tensors of the base."""


def groups(run: SimpleNamespace, of: Records) -> Groups:
    """Return groups of runs of notebook 05, which has the group "es"; they are empty outside scale tiny."""
    base, common = "A0", loading.of_runs(vars(run)) | SHORT
    few = common | {"steps": 50, "curve_points": 2, "curve_spacing": None}
    exact = few | {"test_problems": 500, "pruned_shares": [0.78, 0.93], "estimator_problems": 64, "pairs_members": 60}

    def audited(precision: str, fitness: str) -> list[Spec]:
        own = few | {"sigma": 1e-3, "alpha": 5e-4, "prompts_per_step": 16}
        own |= {"validation_problems": 32, "test_problems": 32}
        return audit_specs(base, precision, "gaussian", fitness, range(8), own, "tiny", largest=144)

    def pairs(ends: Sequence[Any] = (None,)) -> list[Spec]:
        asked = ("greedy", "sampled")
        return [each for how in asked for each in pairs_specs(base, ends[:8], how, range(1, 17), exact, "tiny")]

    n2 = [loading.of_size(common, 2)]
    found = {
        **{f"audit {precision} {fitness}": audited(precision, fitness) for precision, fitness in AUDITED},
        "rank": rank_specs(base, WIDTHS, 8, 20_000, "tiny"),
        "pairs": pairs(),
        "pairs at ends": runs.after(of, ["es"], pairs),
        "pruned": runs.after(of, ["es"], lambda ends: pruned_specs(ends[:8], exact, "tiny")),
        **{name: series_specs(name) for name in SERIES},
        "es short": Group("es", [base], 16, common | {"sampled_at": [0.6]}),
        **{f"{arm} short N=2": Group(arm, [base], 8, common | {"curve_points": 13}, n2) for arm in ("es", "es_random")},
    }
    return found if run.scale == "tiny" else dict.fromkeys(found, [])


# ---- series of bases that are not shipped

_SILENT = dict.fromkeys(("adds up", "careless", "wrong numbers", "broken format"), 0.0)


def _rare(right: float, wrong: str) -> dict[str, Any]:
    """Return how a base is made whose other answers come from one author, who is never right."""
    return {"start": "A0", "seed": 0, "steps": 300, "authors": _SILENT | {"right": right, wrong: round(1 - right, 4)}}


SERIES: dict[str, dict[str, tuple[dict[str, Any], str]]] = {
    "rare": {
        "rare 13 %, habit": (_rare(0.65, "divides"), "824e15f2fac56e12"),
        "rare 1 %, habit": (_rare(0.065, "divides"), "080d0172d4639c91"),
        "rare 4 %, habit": (_rare(0.2, "divides"), "b54b6a1fe13a19fa"),
        "rare 0.3 %, habit": (_rare(0.027, "divides"), "8c33110d5e605fb1"),
        "rare 13 %, no habit": (_rare(0.65, "leaves out"), "68bdabf1411f0582"),
        "rare 4 %, no habit": (_rare(0.2, "leaves out"), "ca0f007822a57c7f"),
        "rare 1 %, no habit": (_rare(0.075, "leaves out"), "736dd0a756eab085"),
        "rare 0.3 %, no habit": (_rare(0.03, "leaves out"), "ea66c1fbbf4c072f"),
    },
    "large": {"large 1M": ({"seed": 0, "steps": 800, "sizes": dict(SIZES["1M"])}, "44d749cc2e4b7200")},
}
"""Series -> its bases -> how `tiny.recipe` makes each, and the digest of what it makes.

"rare": by pass@1 on validation problems, with one wrong answer to each problem (a habit) or many; the shares of right
authors were calibrated, and the digest keeps specs free of training. "large": by the number of weights, at about the
accuracy of A0, on which the same runs are made.
"""
JUDGED = ("rare 13 %, habit", "rare 1 %, habit")
"""Bases of claim E23, which have eight seeds; the others of the series have one."""
_GRPO = {"steps": 125, "prompts_per_step": 16, "num_generations": 16, "learning_rate": 1e-4, "beta": 0.0}
LARGE = (8, 30, 128)
"""Populations of the series "large", at equal evaluations."""


def series_specs(name: str) -> list[Spec]:
    """Return the specs of a series, "rare" or "large", without making its bases."""
    common = loading.of_runs(runs.settings_at("tiny", runs.MEASURED)) | SHORT
    common |= {"steps": 131, "test_problems": 500, "curve_points": 3}
    rare = common | {"alpha": 0.005, "test_problems": 0, "curve_points": 17}
    settings = {"es": rare, "es_sampled": rare, "es_random": rare, "grpo": rare | _GRPO}

    def of_base(base: str) -> list[Spec]:
        if name == "large":
            wanted = [("es", 2, common | loading.of_size(common, N)) for N in LARGE]
        elif base in JUDGED:
            wanted = [(arm, 4 if arm == "es_random" else 8, how) for arm, how in settings.items()]
        else:
            wanted = [(arm, 2, how) for arm, how in settings.items() if arm != "es_random"]
        return [each for arm, n, how in wanted for each in train_specs(arm, ["A0"], range(n), how, "tiny")]

    found = of_base("A0") if name == "large" else []
    for base, (how, digest) in SERIES[name].items():
        repeats = (name == "rare") * (4 if base in JUDGED else 2)
        own = signal_specs("A0", repeats, rare | {"signal_populations": 16}, "tiny")
        found += [spec | {"base": base, "made": how, "base_digest": digest} for spec in (*own, *of_base(base))]
    return found


# ---- predictions

_LEFT = {78: 0.681, 93: 0.350}
"""Share of the squared norm of a Gaussian vector that is left without so many % of its entries, the smallest."""
_TWO = 0.564 / 0.975
"""Signal of two members over that of 30: the mean standard deviation of so many normal numbers."""


def predictions(of: Records) -> DataFrame:
    """Return what was foretold and what was measured, a row per prediction, with n, the number of runs.

    value, low and high are the measured mean over the predicted one, with its 95 % interval over runs.
    """
    rows: list[dict[str, Any]] = []

    def add(what: str, predicted: float, values: Sequence[float]) -> None:
        found = stats.bootstrap_mean(values)
        told = {"what": what, "predicted": predicted, "measured": found.value, "n": found.n}
        rows.append(told | plots.ends(found, 1 / predicted))

    for width in WIDTHS:
        blocks = [record["estimator"] for record in runs.where(of["rank"], width=width)]
        what = f"rank 1 adds variance, width {width}" if width else "rank 1 adds variance, whole model"
        add(what, blocks[0]["formula"], [block["excess"] for block in blocks])
    for share, left in _LEFT.items():
        what = f"squared length left without the smallest {share} %"
        add(what, left, [record["squares"][f"smallest_{share}"] for record in of["pruned"]])
    base = accuracy_matrix(of["base"]).mean()
    gains = {N: accuracy_matrix(of[f"es N={N}" if N != 30 else "es"]).mean(1) - base for N in (8, 30, 128)}
    for N in (8, 128):
        add(f"gain of {N} members over that of 30", 1.0, gains[N] / gains[30].mean())
    for at, N in product(("A0", *SERIES["large"]) if of["large"] else (), (8, 128)):
        add(f"gain of {N} members over that of 30, {at}", 1.0, _gains(of, at, N) / _gains(of, at, 30).mean())
    two, short = (accuracy_matrix(of[name]).mean(1) - base for name in ("es short N=2", "es short"))
    add("gain of 2 members over that of 30, short runs", _TWO, two / short.mean())
    pairs = (*of["pairs"], *of["pairs at ends"])
    for cell in dict.fromkeys(record["spec"]["at"] for record in pairs):
        blocks = [record["estimator"] for record in runs.where(pairs, at=cell)]
        add(f"error with the mean over pairs', {cell}", 0.5, [block["mean_over_pairs"] for block in blocks])
    return DataFrame(rows)


def results(of: Records) -> Results:
    """Return by how much greedy accuracy falls without parts of an update, and rank 1's variance over its formula."""
    models = [record["models"] for record in of["pruned"]]
    if not models:
        return {}
    right = {name: accuracy_matrix([each[name] for each in models]) for name in models[0]}
    found = {f"lost to {name}": stats.crossed_bootstrap(right["whole"] - left) for name, left in right.items()}
    over = [row["value"] for row in predictions(of).to_dict("records") if row["what"].startswith("rank 1")]
    return found | {"rank 1 least": min(over), "rank 1 most": max(over)}


def figure_predictions(points: DataFrame) -> plt.Figure:
    """Draw measured over predicted, a line per prediction: filled within a tenth of 1, open beyond it."""
    fig, ax = plt.subplots(figsize=(style.PAGE, 0.6 + 0.19 * len(points)))
    ax.axvspan(0.9, 1.1, color="#EEEEEE", lw=0)
    ax.axvline(1, **plots.NULL)
    for up, row in enumerate(points[::-1].to_dict("records")):
        fill = "black" if abs(row["value"] - 1) <= 0.1 else "white"
        plots.whiskers(ax, DataFrame([row]), up=up, marker="o", ms=5, color="black", mfc=fill, capsize=2, lw=1)
    ax.set(yticks=range(len(points)), yticklabels=points["what"][::-1], xlabel="measured over predicted")
    ax.grid(axis="y", visible=False)
    return fig


# ---- what the series show

GAIN = 0.03
"""Gain in validation accuracy to which completions are counted."""
FORMATS = {"pass@1": ".4f", "|g|": ".3f", "rho": ".2f", "foretold": ",.0f", "needed": ",.0f"}
"""Formats of the table of what was foretold."""
_RHO = {"es": "greedy", "es_sampled": "sampled"}
_SHAPES, _LAW = {"habit": "o", "no habit": "s"}, {"habit": "--", "no habit": ":"}
_NEVER, _MARK = {"mfc": "none", "marker": "^"}, {"ls": "", "ms": 4, "alpha": 0.8}


def sparsity(of: Records) -> tuple[DataFrame, DataFrame]:
    """Return completions to a gain of three points on the bases of the series "rare", by run, and what was foretold.

    By the law of the share a step of ES gains alpha rho |g| at temperature 1; both are measured at the base, as is the
    way to the target, since a curve begins with few samples. A hit: no run is censored and their geometric mean lies
    within a factor of 1.5 of what was foretold, or more was foretold than was drawn and all are.
    """
    points: list[dict[str, Any]] = []
    told: list[dict[str, Any]] = []
    for base in SERIES["rare"]:
        here = runs.where(of["rare"], base=base)
        signals = DataFrame([record["signal"] for record in here if "signal" in record]).mean()
        own = {"base": base, "pass@1": signals["pass@1"]}
        for decoding, arm in product(loading.DECODINGS, ("es", "es_sampled", "grpo", "es_random")):
            found = runs.where(here, arm=arm)
            needed = [spent_to_gain(run, decoding, GAIN) for run in found]
            row = {"decoding": decoding, "arm": arm} | own
            points += [row | {"completions": spent, "reached": reached} for spent, reached in needed]
            if arm not in _RHO or decoding == "greedy":
                continue
            spec, rho = found[0]["spec"], signals[_RHO[arm]]
            drawn = spec["population_size"] * spec["prompts_per_step"]
            way = found[0]["curve"]["validation_t1"][0] + GAIN - own["pass@1"]
            step = spec["alpha"] * rho * signals["gradient"]
            foretold = drawn * way / step if step > 0 else np.inf
            never, mean = sum(not reached for _, reached in needed), np.exp(np.mean(np.log([x for x, _ in needed])))
            late = foretold > drawn * spec["steps"]
            hit = never == len(found) if late else not never and 2 / 3 < mean / foretold < 1.5
            row = own | {"fitness": _RHO[arm], "|g|": signals["gradient"], "rho": rho, "foretold": foretold}
            told.append(row | {"needed": mean, "never": never, "n": len(found), "hit": "yes" if hit else "no"})
    return DataFrame(points), DataFrame(told)


def figure_sparsity(points: DataFrame, told: DataFrame) -> plt.Figure:
    """Draw each run's completions to the gain by the base's pass@1: filled, or open where it never got there."""
    fig, axes, parts = plots.panels(points, "decoding", 3, sharex=True, sharey=True)
    for ax, decoding, part in parts:
        for (arm, base), own in part.groupby(["arm", "base"], sort=False):
            wrong, color = base.partition(", ")[2], style.ARMS[arm].color
            aside = 0.08 * (np.arange(len(own)) / len(own) - 0.5) + (0.06 if wrong == "habit" else -0.06)
            for reached, marks in own.assign(across=100 * own["pass@1"] * 10**aside).groupby("reached"):
                how = {"mfc": color, "marker": _SHAPES[wrong]} if reached else _NEVER
                ax.plot(marks["across"], marks["completions"], color=color, **how, **_MARK)
        plots.plain_ticks(ax, [0.3, 1, 4, 13])
        ax.set(yscale="log", title=style.STROKES[decoding].label, xlabel="right samples of the base, %")
    axes[0].set_ylabel("completions to +3 points")
    for arm, wrong in product(_RHO, _LAW):
        law = told[(told["fitness"] == _RHO[arm]) & told["base"].str.endswith(f", {wrong}")].sort_values("pass@1")
        axes[-1].plot(100 * law["pass@1"], law["foretold"], _LAW[wrong], color=style.ARMS[arm].color, lw=1)
    black = {"color": "black"}
    entries = [plots.of_arm(arm, marker="o") for arm in points["arm"].unique()]
    entries += [plots.handle(wrong, **black, **_MARK, marker=marker) for wrong, marker in _SHAPES.items()]
    entries += [plots.handle("never", **black, **_MARK, **_NEVER)]
    plots.key(fig, [*entries, *(plots.handle(f"foretold, {wrong}", **black, ls=ls) for wrong, ls in _LAW.items())], 5)
    return fig


def _gains(of: Records, base: str, N: int, decoding: str = "greedy") -> np.ndarray:
    """Return the gain in validation accuracy of each run of the series "large", a fraction."""
    points = [run["curve"][f"validation_{decoding}"] for run in runs.where(of["large"], base=base, population_size=N)]
    return np.array([line[-1] - line[0] for line in points])


def sizes(of: Records) -> DataFrame:
    """Return the gain of runs of the series "large" at equal evaluations, a row per model and population."""
    rows = []
    for base, N in product(("A0", *SERIES["large"]), LARGE):
        here = runs.where(of["large"], base=base, population_size=N)
        row = {"weights": here[0]["d"], "N": N, "steps": here[0]["spec"]["steps"], "n": len(here)}
        for decoding in loading.DECODINGS:
            row[f"base {decoding}"] = f"{100 * here[0]['curve'][f'validation_{decoding}'][0]:.1f}"
            row[f"gain {decoding}"] = stats.bootstrap_mean(_gains(of, base, N, decoding)).format()
        rows.append(row)
    return DataFrame(rows)


def main(name: str) -> None:
    """Make the runs of a series, stored with the records of notebook 05. Raises ValueError for another name."""
    choose("series", name, tuple(SERIES))
    load_or_run(series_specs(name), _NOTEBOOK, "tiny")


if __name__ == "__main__":  # python -m evoalign_study.series rare
    main(" ".join(sys.argv[1:]))
