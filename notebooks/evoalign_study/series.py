"""How far the tiny world reaches: claims of 2026 with their nulls, and series with predictions made beforehand."""

import sys
from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

from matplotlib import pyplot as plt
from pandas import DataFrame

from evoalign_lib import models
from evoalign_lib.analysis import stats
from evoalign_lib.checks import choose
from evoalign_study import base_models, loading, plots, runs, style
from evoalign_study.kinds.decode import base_specs
from evoalign_study.kinds.exact import pairs_specs, rank_specs
from evoalign_study.kinds.memory import SIZES
from evoalign_study.kinds.train import audit_specs, train_specs
from evoalign_study.kinds.weights import pruned_specs
from evoalign_study.loading import Group, Groups, Records
from evoalign_study.records import Spec, accuracy_matrix
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

    two = [loading.of_size(common, 2)]
    found = {
        **{f"audit {precision} {fitness}": audited(precision, fitness) for precision, fitness in AUDITED},
        "rank": rank_specs(base, WIDTHS, 8, 20_000, "tiny"),
        "pairs": pairs(),
        "pairs at ends": runs.after(of, ["es"], pairs),
        "pruned": runs.after(of, ["es"], lambda ends: pruned_specs(ends[:8], exact, "tiny")),
        "es short": Group("es", [base], 16, common | {"sampled_at": [0.6]}),
        **{f"{arm} N=2": Group(arm, [base], 8, common | {"curve_points": 13}, two) for arm in ("es", "es_random")},
    }
    return found if run.scale == "tiny" else dict.fromkeys(found, [])


# ---- series of bases that are not shipped, on which no run was made yet

_RARE = {str(share): {"adds up": 0.0, "subtracts": 0.75 - share, "right": share} for share in (0.1, 0.03, 0.01)}
_FROM_A0 = {"start": "A0", "seed": 0, "steps": 400}
SERIES: dict[str, dict[str, dict[str, Any]]] = {
    "rare": {share: _FROM_A0 | {"authors": authors} for share, authors in _RARE.items()},
    "large": {size: {"seed": 0, "steps": 3500, "sizes": dict(changed)} for size, changed in SIZES.items() if changed},
}
"""Series -> its bases, and how `tiny.recipe` makes each: by the share of right authors, with another habit, since
adding up is right for every ninth test problem; and by size."""
_GRPO = {"steps": 125, "prompts_per_step": 16, "num_generations": 16, "learning_rate": 1e-4, "beta": 0.0}


def series_specs(name: str) -> list[Spec]:
    """Return the specs of a series, "rare" or "large", making its bases: each base itself, and its runs."""
    common, found = loading.of_runs(runs.settings_at("tiny", runs.MEASURED)) | SHORT, []
    changed = [("es", {"steps": 131}), ("es_random", {"steps": 131}), ("grpo", _GRPO)]
    if name == "large":
        changed = [("es", loading.of_size(common, N)) for N in (8, 30, 128)]
    for what, how in SERIES[name].items():
        own = base_specs(["A0"], common, "tiny")
        own += [each for arm, change in changed for each in train_specs(arm, ["A0"], range(4), common | change, "tiny")]
        digest = models.stored_digest(base_models.made(how) / "model.safetensors")
        found += [spec | {"base": f"{name} {what}", "made": how, "base_digest": digest} for spec in own]
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
    two, short = (accuracy_matrix(of[name]).mean(1) - base for name in ("es N=2", "es short"))
    add("gain of 2 members over that of 30, short runs", _TWO, two / short.mean())
    pairs = (*of["pairs"], *of["pairs at ends"])
    for cell in dict.fromkeys(record["spec"]["at"] for record in pairs):
        blocks = [record["estimator"] for record in runs.where(pairs, at=cell)]
        add(f"error with the mean over pairs', {cell}", 0.5, [block["mean_over_pairs"] for block in blocks])
    return DataFrame(rows)


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


def main(name: str) -> None:
    """Make the runs of a series, stored with the records of notebook 05. Raises ValueError for another name."""
    choose("series", name, tuple(SERIES))
    load_or_run(series_specs(name), _NOTEBOOK, "tiny")


if __name__ == "__main__":  # python -m evoalign_study.series rare
    main(" ".join(sys.argv[1:]))
