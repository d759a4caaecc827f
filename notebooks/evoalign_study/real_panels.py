"""A real model beside the tiny world: the figure and the answers of the section "On a real model" of seven notebooks.

The left panel has the notebook's own runs, the right one the committed records of scale "real", whatever the notebook's
scale; so no weights are needed. At scale "real" there is the latter alone.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from pandas import DataFrame, concat

from evoalign_lib import tiny
from evoalign_lib.analysis import coverage
from evoalign_study import artifacts, claims, coverage_factors, displacements, path_points, plots, real_results, runs
from evoalign_study.artifacts import Shown
from evoalign_study.kinds.decode import measured_spec
from evoalign_study.loading import DECODINGS, Records
from evoalign_study.records import Record, spec_hash
from evoalign_study.results import answered, captioned
from evoalign_study.style import ARMS, STROKES, legend

MODEL = "SmolLM2-135M-Instruct"
_KS = range(1, 17)
_ALIKE = 8  # runs of an arm whose cosines are drawn


def shown(notebook: str, run: SimpleNamespace, own: Records) -> list[Shown]:
    """Return the figure, saved, and the answers of a notebook's section.

    Args:
        notebook: its name without suffix.
        run: its parameters.
        own: its groups of runs; none at scale "real".
    """
    records, number = claims.committed_records("real"), notebook.partition("_")[0]
    real, facts = (real_results.groups(records, task) for task in ("arithmetic", "facts"))
    asked = [c["id"] for c in claims.load_claims() if c["scales"] == ["real"] and number in c["notebooks"]]
    found = real_results.results(real, facts, claims.evaluate_named(asked, records, "real"))
    other = facts if notebook == "03_conciseness" else real
    fig, points = figure(notebook, own, other)
    used = [r for of in (own, other) for some in of.values() for r in some if "commit" in r]
    store = artifacts.Store(notebook, run.scale, list({r["spec_hash"]: r for r in used}.values()), fresh=run.aside)
    drawn = list(dict.fromkeys(points["arm"]))
    counts = {f"n{i}": _counted(of, drawn) for i, of in enumerate((own, other))}
    name, scales = f"real_{number}", f"scales {run.scale} and real"
    caption = captioned(name, **counts)
    if not own:  # a single panel, whose files stand beside those of both
        name += "_alone"
        about, _, panels = caption.partition("Left ")
        last = panels.partition(", right ")[2].replace(" (", " (seeds: ")
        caption, scales = about + last[:1].upper() + last[1:], "scale real"
    saved = store.save_figure(fig, name, points, caption, of=scales)
    return [saved, artifacts.answers(answered(f"{notebook}, real", found))]


def _own(of: Records, arm: str) -> Sequence[Record]:
    """Return the runs of an arm on the notebook's first base."""
    some = of.get(arm, ())
    first = [run["spec"]["base"] for run in of.get("es") or some]
    return [run for run in some if run["spec"]["base"] == first[0]]


def _counted(of: Records, arms: Sequence[str]) -> str:
    counts = {ARMS[arm].label.removeprefix("ES, "): len(_own(of, arm)) for arm in arms if arm != "base"}
    return ", ".join(f"{label} {n}" for label, n in counts.items() if n)


# ---- points of one world: a row is a dot (arm, at, y), or a point of a line (arm, decoding, x, y)


def _line(arm: str, decoding: str, x: Any, y: Any) -> DataFrame:
    return DataFrame({"arm": arm, "decoding": decoding, "x": x, "y": y})


def _ends(arms: Sequence[str], of: Records) -> Iterator[DataFrame]:
    again = {spec_hash(measured_spec(r["spec"])): r["test"] for r in of.get("decodings", ())}
    for (decoding, look), arm in product(STROKES.items(), arms):
        tests = [run["test"] | again.get(run["spec_hash"], {}) for run in _own(of, arm)]
        yield DataFrame({"arm": arm, "at": look.label, "y": [100 * t[decoding] for t in tests if decoding in t]})


def _apart(of: Records) -> Iterator[DataFrame]:
    return (each.assign(y=each["y"] - each["y"].mean()) for each in _ends(("es", "grpo"), of))


def _budgets(of: Records) -> Iterator[DataFrame]:
    named = [({"arm": arm}, some) for arm in ("es", "grpo") if (some := _own(of, arm))]
    yield runs.curve_bands(named, ["forward_flops"], first=1).rename(columns={"forward_flops": "x", "mean": "y"})


def _answers(of: Records) -> Iterator[DataFrame]:
    for arm, decoding in product(("es", "grpo", "es_random"), DECODINGS):
        if found := [run["curve"] for run in _own(of, arm)]:
            x, y = (np.mean([curve[f"{what}_{decoding}"] for curve in found], axis=0) for what in ("proxy", "right"))
            yield _line(arm, decoding, x, 100 * y)


def _solved(of: Records) -> Iterator[DataFrame]:
    for arm, decoding in product(("base", "es", "grpo"), ("t0.6", "t1")):
        if f"reach of {arm}" in of:  # exact chances, which the tiny world alone has
            yield _line(arm, decoding, _KS, _mean(coverage.pass_at(coverage_factors.chances(of, arm, decoding), _KS)))
        elif arm in of:
            yield _line(arm, decoding, _KS, _mean(real_results.pass_at(of[arm], decoding, _KS)))


def _mean(shares: np.ndarray) -> np.ndarray:
    return 100 * shares.mean(axis=(0, 1))


def _cosines(of: Records) -> Iterator[DataFrame]:
    for first, last in (("es", "es"), ("grpo", "grpo"), ("es", "grpo"), ("es_random", "grpo")):
        some, others = of.get(first, ())[:_ALIKE], of.get(last, ())[:_ALIKE]
        if some and others:
            moved = displacements.recorded(of["products"], [*some, *others])
            norms, n = np.sqrt(np.diagonal(moved.total)), len(some)
            pairs = combinations(range(n), 2) if first == last else product(range(n), range(n, n + len(others)))
            each = [moved.total[i, j] / (norms[i] * norms[j]) for i, j in pairs if norms[i] * norms[j] > 0]
            at = "\nand ".join(ARMS[arm].label.removeprefix("ES, ") for arm in (first, last))
            yield DataFrame({"arm": first, "at": at, "y": moved.d**0.5 * np.array(each)})


def _lines(of: Records) -> Iterator[DataFrame]:
    for arm, decoding in product(("es", "es_random"), DECODINGS):
        if found := of.get(f"{arm} to grpo"):
            right = 1 - path_points.errors(found, decoding)
            yield _line(arm, decoding, np.linspace(0, 1, right.shape[-1]), _mean(right))


_POINTS: Mapping[str, tuple[Callable[[Records], Iterable[DataFrame]], dict[str, Any]]] = {
    "01_es_countdown": (partial(_ends, ("base", "es", "es_shuffled", "es_random")), {"ylabel": "test accuracy, %"}),
    "02_grpo_countdown": (
        _budgets,
        {"ylabel": "validation accuracy, %", "xlabel": "forward FLOPs", "xscale": "log"},
    ),
    "03_conciseness": (_answers, {"ylabel": "right answers, %", "xlabel": "length reward, characters"}),
    "05_stability": (_apart, {"ylabel": "test accuracy less the\nmean of the arm, points"}),
    "07_solution_coverage": (_solved, {"ylabel": "problems solved, %", "xlabel": "samples k", "ylim": (0, None)}),
    "08_weight_geometry": (_cosines, {"ylabel": r"cosine of two runs, $1/\sqrt{d}$"}),
    "09_lmc_analysis": (_lines, {"ylabel": "right answers, %", "xlabel": "share of the way to GRPO"}),
}
"""Notebook -> the points of its figure in one world, and the panels' labels."""
NOTEBOOKS = tuple(_POINTS)
"""The notebooks that have the section."""


def figure(notebook: str, own: Records, real: Records) -> tuple[Figure, DataFrame]:
    """Draw a notebook's comparison twice, of its own runs and of the real model's, and return what is plotted.

    A world without runs has no panel; an arm without runs is left out.
    """
    (of_world, labels), parts = _POINTS[notebook], []
    for of in filter(None, (own, real)):
        base = next(run["spec"]["base"] for some in of.values() for run in some)
        world = MODEL if of is real else "tiny world" if base in tiny.SHIPPED else base
        parts += [part.assign(world=world) for part in of_world(of) if len(part)]
    points = concat(parts, ignore_index=True)
    fig, axes, panels = plots.panels(points, "world", 2.3)
    for ax, world, part in panels:
        if "x" in part:
            plots.curves(ax, part, "x", "y", markevery=0.2)
        else:
            if notebook == "08_weight_geometry":
                ax.set_yscale("symlog", linthresh=3)
            trained, ticks = part[part["arm"] != "base"], list(part["at"].unique())
            plots.strip(ax, {at: list(trained[trained["at"] == at].groupby("arm", sort=False)) for at in ticks}, "y")
            for row in part[part["arm"] == "base"].itertuples():
                at = ticks.index(row.at)
                ax.plot((at - 0.45, at + 0.45), (row.y, row.y), **plots.BASE)
        ax.set(title=world, **labels)
    decodings = list(points["decoding"].unique()) if "decoding" in points else ()
    legend(fig, dict.fromkeys(points["arm"]), decodings)
    return fig, points
