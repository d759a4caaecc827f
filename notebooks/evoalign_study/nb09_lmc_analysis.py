"""Notebook 09, linear mode connectivity: its runs, what they say of barriers and of noise, tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import pyplot as plt
from pandas import DataFrame, concat

from evoalign_lib import arms, tiny
from evoalign_lib.analysis import connectivity, gram_matrix, regimes, stats
from evoalign_lib.analysis.connectivity import BarrierEstimate
from evoalign_lib.analysis.stats import Interval
from evoalign_study import collapse, loading, path_points, plots, runs, style, weight_cache
from evoalign_study.kinds.weights import noise_spec, path_spec, products_specs
from evoalign_study.loading import After, Group, Groups, Records
from evoalign_study.records import Record, Spec
from evoalign_study.results import UNDER, Results, stated
from evoalign_study.sentences import told, worded

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTEBOOK = "09_lmc_analysis"
CLAIMS = ("C25", "C26", "C27", "C28")
TRAINED = ("es", "es_sampled", "es_random", "grpo", "grpo_random", "sft")
"""Groups of training runs, between whose ends lines are drawn."""
TINY = {
    "bases": ["A0"],
    "retrain": [],  # groups that `force` makes anew; none: all
    "seeds_es": 32,  # of ES, of which means are taken
    "seeds_random": list(range(8)),  # of ES with random fitness
    "seeds_sampled": list(range(8)),  # of ES with sampled fitness
    "mean": 4,  # ES runs whose mean is an end
    "pairs": 8,  # lines of each kind
    "path_points": 21,
    "max_completion_length": tiny.MAX_COMPLETION_LENGTH,
    "validation_problems": 256,  # asked at every point, and under every noise
    "noise_sigmas": [0.005, 0.01, 0.02, 0.03],  # weight units
    "noise_trials": 4,  # draws of each noise
    "regime_base": "B0",  # of the task of notebook 03, on which runs are hacked
    "regime_seeds": list(range(16, 20)),  # no seed that notebook 03 has
    "regime_steps": {  # small steps and large ones of each arm: what notebook 03's maps end clean and hacked with
        "es": {"small": {"alpha": 0.0015}, "large": {"alpha": 0.015}},
        "grpo": {"small": {"learning_rate": 1e-4}, "large": {"learning_rate": 1e-3}},
        "es_random": {"large": {"alpha": 0.015}},
        "grpo_random": {"large": {"learning_rate": 1e-3}},
    },
    "regime_points": 11,
    "regime_problems": 128,
}
SMOKE = TINY | {
    "seeds_es": 4,
    "seeds_random": [0, 1],
    "seeds_sampled": [0, 1],
    "mean": 2,
    "pairs": 2,
    "path_points": 3,
    "validation_problems": 16,
    "noise_sigmas": [0.01],
    "noise_trials": 1,
    "regime_seeds": [16],
    "regime_points": 3,
    "regime_problems": 8,
}
FULL = TINY
BASE, MEAN, RANDOM = "base", "es mean", "random"
"""Ends that are no runs: the base, means of ES runs, and random directions with an ES run's norms in each tensor."""
PAIRS = (
    ("es", "grpo"),
    ("es", "es"),
    ("grpo", "grpo"),
    ("es", "es_sampled"),
    ("es", "sft"),
    (MEAN, "grpo"),
    ("es", "es_random"),
    ("es_random", "grpo"),
    ("grpo_random", "grpo"),
    (RANDOM, "grpo"),
)
"""Kinds of end that lines join. A line between two runs of one arm joins different seeds."""
NULLS = (("es_random", "grpo"), (RANDOM, "grpo"), ("es", "es_random"), ("grpo_random", "grpo"))
"""Lines with an end that learned nothing."""
REACHED = ("es", "grpo", "sft", MEAN, "es_random", RANDOM)
"""Kinds of end to which lines lead from the base."""
SHAKEN = (BASE, "es", "grpo", "sft", MEAN, "es_random", "grpo_random", RANDOM)
"""Kinds of end whose weights get noise."""
REGIMES = {f"{arm}, {steps} steps": (arm, steps) for arm, every in TINY["regime_steps"].items() for steps in every}
"""Groups of runs on the task of notebook 03, of which some are hacked; each with its arm and what steps it takes."""
LEARNED = tuple(name for name, (arm, _) in REGIMES.items() if not arms.get(arm).null)
SMALL = tuple(name for name in LEARNED if REGIMES[name][1] == "small")
"""Groups of runs that learned something, and of these the ones with small steps."""
BROKEN = next(name for name, (arm, _) in REGIMES.items() if arms.get(arm).reward == "random")
"""Group of runs that a random reward has destroyed."""
DECODINGS = tuple(style.STROKES)
"""Under which every point of a line is answered."""
_RESAMPLES, _REGIME_RESAMPLES = 1000, 200  # as many as the verdicts take: table and verdict show one number


def presets(model: str = "") -> dict[str, dict[str, Any]]:
    """Return scale -> settings; model: that of scale full, empty for the scale's own."""
    return {"tiny": TINY, "smoke": SMOKE, "full": FULL | {"bases": [model or "Qwen/Qwen2.5-0.5B-Instruct"]}}


# ---- groups of runs


def groups(run: SimpleNamespace, records: Records) -> Groups:
    """Return the runs by name: notebook 02's arms, products of their displacements, lines, noise."""
    scale, exact = loading.of_tiny_world(run, TINY)
    settings = SimpleNamespace(**exact)
    shared = runs.countdown(run, records, scale, exact)
    declared = {name: shared[name] for name in shared if name in (*TRAINED, BASE) or name.startswith("sweep")}
    complete = runs.known(records, *TRAINED)
    declared["products"] = After(
        products_specs([records[name] for name in TRAINED], scale) if complete else [], TRAINED
    )
    for first, last in (*PAIRS, *product([BASE], REACHED)):
        needed = tuple(dict.fromkeys(_arm(end) for end in (first, last) if end != BASE))
        specs = _lines(settings, records, first, last, scale) if runs.known(records, *needed) else []
        declared[name_of(first, last)] = After(specs, needed)
    for end in SHAKEN:
        needed, n = ((), 1) if end == BASE else ((_arm(end),), settings.pairs)
        ends = _ends(settings, records, end)[:n] if runs.known(records, *needed) else []
        declared[f"noise on {end}"] = After(
            [noise_spec(settings.bases[0], each, exact, scale) for each in ends], needed
        )
    return declared | _regimes(settings, records, scale)


def _regimes(run: SimpleNamespace, records: Records, scale: str) -> dict[str, Any]:
    """Return runs of notebook 03's task with small steps and with large ones, and the lines between them.

    Every two runs of `LEARNED` are joined. Runs with a random reward are joined with one another, and with those that
    took small steps.
    """
    settings = {arm: runs.conciseness(scale, arm) for arm in run.regime_steps}
    declared: dict[str, Any] = {
        name: Group(
            arm, [run.regime_base], run.regime_seeds, settings[arm], [run.regime_steps[arm][steps]], scale=scale
        )
        for name, (arm, steps) in REGIMES.items()
    }
    pairs: list[tuple[Any, Any]] = []
    if runs.known(records, *REGIMES):
        ends = {name: [weight_cache.end([record]) for record in records[name]] for name in REGIMES}
        pairs += combinations([end for name in LEARNED for end in ends[name]], 2)
        small = [end for name in SMALL for end in ends[name]]
        for nulls in (ends[name] for name in REGIMES if name not in LEARNED):
            pairs += [*combinations(nulls, 2), *((end, null) for null in nulls for end in small)]
    asked = {"task": "conciseness", "max_completion_length": settings["es"]["max_completion_length"]}
    asked |= {"validation_problems": run.regime_problems, "path_points": run.regime_points}
    specs = [path_spec(run.regime_base, *pair, asked, scale) for pair in pairs]
    return declared | {"regimes": After(specs, tuple(REGIMES))}


def name_of(first: str, last: str) -> str:
    """Return the name of the group of lines from one kind of end to another."""
    return f"{first} to {last}"


def _arm(end: str) -> str:
    return "es" if end in (MEAN, RANDOM) else end


def _lines(run: SimpleNamespace, records: Records, first: str, last: str, scale: str) -> list[Spec]:
    starts, ends = (_ends(run, records, end) for end in (first, last))
    if first == last:  # each run with that half of the runs further
        starts, ends = starts[: run.pairs], (starts[run.pairs :] or starts[1:])
    pairs = list(zip(starts, ends, strict=False))[: run.pairs]
    return [path_spec(run.bases[0], *pair, vars(run), scale) for pair in pairs]


def _ends(run: SimpleNamespace, records: Records, end: str) -> Sequence[dict[str, Any] | None]:
    """Return the ends of one kind, as specs name them, in the order of their seeds; the base is always the same."""
    if end == BASE:
        return [None] * run.pairs
    if end == MEAN:
        return [weight_cache.end(each) for each in runs.means(records["es"], run.mean, run.pairs)]
    return [
        weight_cache.end([record], draw=record["spec"]["seed"]) if end == RANDOM else weight_cache.end([record])
        for record in records[_arm(end)]
    ]


# ---- lines


def end_label(end: str) -> str:
    """Return the name of a kind of end in tables and legends."""
    return {MEAN: "mean of ES runs", RANDOM: "base + random direction"}.get(end) or style.ARMS[end].label


def line_label(first: str, last: str) -> str:
    """Return the name of a kind of line."""
    return f"{end_label(first)} to {end_label(last)}{' (another seed)' if first == last else ''}"


def errors(records: Records, first: str, last: str, decoding: str) -> np.ndarray:
    """Return the errors along all lines of a kind, (lines, problems, points)."""
    return path_points.errors(records[name_of(first, last)], decoding)


def barrier(records: Records, first: str, last: str, decoding: str) -> BarrierEstimate:
    """Return the height of the mean error over the straight line between the ends' errors, a fraction."""
    wrong = errors(records, first, last, decoding)
    outcomes = np.full((len(wrong), *wrong.shape), np.nan)
    outcomes[np.arange(len(wrong)), np.arange(len(wrong))] = wrong
    return connectivity.estimate_barrier(outcomes, across="curve", n_resamples=_RESAMPLES)


def half_gain(records: Records, end: str, decoding: str, by: str = "weights") -> Interval:
    """Return where on the way from the base half of the gain of accuracy lies: a share of the way, or of the final KL.

    by: "weights" or "KL". NaN where no line of the kind has a gain.
    """
    kl = path_points.curves(records[name_of(BASE, end)], "kl")
    how: dict[str, Any] = {"x": kl, "relative": True} if by == "KL" else {}
    rewards = 1 - errors(records, BASE, end, decoding)
    return connectivity.half_gain_interval(rewards, monotone=True, n_resamples=_RESAMPLES, **how)


def barrier_table(run: SimpleNamespace, records: Records) -> DataFrame:
    """Return a row per kind of line: the barrier of the error under each decoding, and that of the likelihood."""
    rows = []
    for pair in PAIRS:
        lines = records[name_of(*pair)]
        greedy, nll = errors(records, *pair, "greedy").mean((0, 1)), path_points.curves(lines, "nll").mean(0)
        row = {"line": line_label(*pair), "lines": len(lines)}
        row["distance"] = f"{np.mean([r['distance'] for r in lines]):.2f}"
        row |= {f"{style.STROKES[d].label} [95 %]": barrier(records, *pair, d).interval.format() for d in DECODINGS}
        row["over the mean of the ends, greedy"] = f"{100 * connectivity.barrier_mean(greedy).height:.1f}"
        rows.append(row | {"NLL, nats": f"{connectivity.barrier_line(nll).height:.2f}"})
    return DataFrame(rows)


def from_base_table(run: SimpleNamespace, records: Records) -> DataFrame:
    """Return a row per kind of end: gain, and where half of it lies, by weights and by KL."""
    rows = []
    for end, decoding in product(REACHED, DECODINGS):
        wrong = errors(records, BASE, end, decoding)
        gain = stats.crossed_bootstrap(wrong[:, :, 0] - wrong[:, :, -1])
        row = {"end": end_label(end), "decoding": style.STROKES[decoding].label, "lines": len(wrong)}
        row["gain, points [95 %]"] = gain.format()
        for by in ("weights", "KL"):
            half = half_gain(records, end, decoding, by)
            # without a gain of its own a line has no half of it
            has_half = gain.low > 0 and np.isfinite(half.low)
            row[f"half of it, by {by}"] = stated(half, ".2f") if has_half else "no gain"
        rows.append(row)
    return DataFrame(rows)


# ---- noise on the weights


def kept(shaken: Sequence[Record], part: str, decoding: str) -> np.ndarray:
    """Return the share of its accuracy that each model keeps under each noise, mean over draws: (models, sigmas).

    Models that solve less than a hundredth without noise are left out: they have nothing to keep.
    """
    able = [r for r in shaken if r["clean"][decoding] >= 0.01]
    shares = [np.mean(r[part][decoding], axis=1) / r["clean"][decoding] for r in able]
    return np.array(shares).reshape(len(able), len(shaken[0][part][decoding]))


def noise_table(run: SimpleNamespace, records: Records) -> DataFrame:
    """Return a row per kind of model and decoding: accuracy without noise, and the share that is kept of it."""
    rows = []
    for end, decoding in product(SHAKEN, DECODINGS):
        shaken = records[f"noise on {end}"]
        row = {"model": end_label(end), "decoding": style.STROKES[decoding].label, "models": len(shaken)}
        row["without noise, %"] = f"{100 * np.mean([r['clean'][decoding] for r in shaken]):.1f}"
        for part in ("isotropic", "relative", "head", "body"):
            row[f"kept, {part}, %"] = kept_told(kept_share(records, end, part, decoding), len(shaken))
        rows.append(row)
    return DataFrame(rows)


def kept_share(records: Records, end: str, part: str, decoding: str) -> Interval | None:
    """Return the mean share over models and sizes of the noise; None where no model has anything to keep."""
    shares = kept(records[f"noise on {end}"], part, decoding)
    return stats.bootstrap_mean(shares.mean(axis=1)) if len(shares) else None


def kept_told(share: Interval | None, models: int = 0) -> str:
    """Return a share that is kept in words, with the number of its models unless that is `models`, or one."""
    if share is None or share.n == 1:
        return f"{100 * share.value:.1f}" if share else "nothing to keep"
    return stated(share) + ("" if share.n == models else f" (n = {share.n})")


# ---- regimes of hacked and unhacked runs


def regime_label(name: str) -> str:
    """Return the name of a group of `REGIMES` in tables and figures."""
    arm, steps = REGIMES[name]
    return f"{style.ARMS[arm].label}, {steps} steps"


def regime_barriers(records: Records, names: Sequence[str], decoding: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the barriers between any two runs of some groups, and the same with problems resampled (`path_points`)."""
    ends = [record for name in names for record in records[name]]
    return path_points.barriers(records["regimes"], ends, decoding, _REGIME_RESAMPLES)


def mean_barriers(records: Records, name: str, decoding: str) -> tuple[float, float]:
    """Return the mean barrier among the runs of a group, NaN of one alone, and to the runs with small steps."""
    n = len(records[name])
    matrix, _ = regime_barriers(records, dict.fromkeys((name, *SMALL)), decoding)
    matrix = np.fmax(np.nan_to_num(matrix), np.nan_to_num(matrix.T))
    among = matrix[:n, :n][np.triu_indices(n, 1)]
    return float(among.mean()) if len(among) else float("nan"), float(matrix[:n, n:].mean())


def regime_table(records: Records) -> DataFrame:
    """Return a row per group of runs: how they end, and their barriers to one another and to runs with small steps."""
    rows = []
    for name in REGIMES:
        ended = records[name]
        row: dict[str, Any] = {"runs": regime_label(name), "n": len(ended)}
        row["hacked"] = ", ".join(str(sum(collapse.end(r, d) == "hacked" for r in ended)) for d in DECODINGS)
        row["right, %"] = f"{100 * np.mean([r['curve']['right_greedy'][-1] for r in ended]):.0f}"
        row["KL"] = f"{np.mean([r['curve']['kl'][-1] for r in ended]):.1f}"
        heights = np.array([mean_barriers(records, name, decoding) for decoding in DECODINGS])
        for column, values in zip(("barriers among them", "to small steps"), 100 * heights.T, strict=True):
            row[column] = ", ".join("-" if np.isnan(value) else f"{value:.0f}" for value in values)
        rows.append(row)
    return DataFrame(rows)


# ---- what the notebook finds


def results(run: SimpleNamespace, records: Records) -> Results:
    """Return the numbers that the answers and the paper's macros are read from, by name; shares are fractions."""
    entries: Results = {"lines": len(records[name_of("es", "grpo")])}
    for decoding in DECODINGS:
        entries[f"barrier {decoding}"] = barrier(records, "es", "grpo", decoding).interval
        entries[f"null {decoding}"] = barrier(records, *NULLS[0], decoding).interval
    entries["barrier from the mean"] = barrier(records, MEAN, "grpo", "greedy").interval
    entries |= {f"half {end}": half_gain(records, end, "greedy") for end in ("es", "grpo")}
    entries |= {f"kept {end}": kept_share(records, end, "isotropic", "greedy") for end in _ASKED}
    hacked = np.array([collapse.end(run) == "hacked" for name in LEARNED for run in records[name]])
    entries |= {"hacked": int(hacked.sum()), "unhacked": int((~hacked).sum()), "basin": None}
    if hacked.sum() > 1 and not hacked.all():
        matrix, draws = regime_barriers(records, LEARNED, "greedy")
        found = regimes.within_between(matrix, list(hacked), only=True, n_resamples=2000)
        entries |= {"within": found.within, "between": found.between}
        entries["basin"] = regimes.basin(matrix, draws, hacked)
        entries["broken among"], entries["broken to small"] = mean_barriers(records, BROKEN, "greedy")
    return entries


_ASKED = ("es", "grpo", "es_random")
MACROS = {
    "LmcBarrierGreedy": "barrier greedy",
    "LmcNullGreedy": "null greedy",
    "LmcMeanGreedy": "barrier from the mean",
    "LmcHalfEs": "half es:.2f",
    "LmcHalfGrpo": "half grpo:.2f",
    "LmcBasin": "basin",
    "LmcKeptEs": "kept es:.0%",
    "LmcKeptGrpo": "kept grpo:.0%",
    "LmcKeptRandom": "kept es_random:.0%",
}
"""Macro of the paper -> name in the results, and format."""


def answers(results: Results) -> dict[str, str]:
    """Return question -> one sentence with its number, interval and n."""
    heights, nulls = (
        ", ".join(f"{worded(results[f'{what} {decoding}'])} {under}" for decoding, under in UNDER.items())
        for what in ("barrier", "null")
    )
    shares = ", ".join(f"{end_label(end)} {kept_told(results[f'kept {end}'])}" for end in _ASKED)
    two_regimes = (
        "Greedily the barrier is {within:.1%} points between two hacked runs, and between a hacked and an unhacked one "
        "{between:.1%}, that is {basin} more ({hacked} hacked and {unhacked} other runs). Runs with a random reward, "
        "which learned nothing, have {broken among:.1%} among them and {broken to small:.1%} to those that took small "
        "steps."
    )
    one_regime = "Greedily there are {hacked} hacked and {unhacked} other runs: no two regimes to tell apart."
    sentences = {
        "Is there a barrier between ES and GRPO?": f"The largest error above the line between the ends is, in points, "
        f"{heights} (n = {{lines}} lines). With random fitness in the place of ES it is {nulls}.",
        "Where does the gain set in on the way from the base?": "Half of the gain of greedy accuracy lies, on the way "
        "to ES at {half es:.2f} of it and to GRPO at {half grpo:.2f} of it (n = {lines} lines each).",
        "Who keeps more under noise on the weights?": "Of their greedy accuracy, under isotropic noise, mean over its "
        f"sizes, in %: {shares}.",
        "Do hacked runs share a basin?": one_regime if results["basin"] is None else two_regimes,
    }
    return {question: told(sentence, results) for question, sentence in sentences.items()}


# ---- figures: each returns the figure and what it plots


def _look(end: str) -> dict[str, Any]:
    if end in (MEAN, RANDOM):
        color, marker = {MEAN: ("#0B3C5D", "v"), RANDOM: ("black", "x")}[end]
        return {"color": color, "marker": marker, "label": end_label(end)}
    return plots.look(end)


def figure_barriers(run: SimpleNamespace, records: Records) -> tuple[Figure, DataFrame]:
    """Draw the accuracy along lines from ES to GRPO, and the barrier of each kind of line under each decoding."""
    along = DataFrame(
        {"panel": decoding, "alpha": alpha, "value": here.mean(), "low": here.min(), "high": here.max()}
        for decoding in DECODINGS
        for right in [100 * (1 - errors(records, "es", "grpo", decoding).mean(1))]
        for alpha, here in zip(np.linspace(0, 1, right.shape[1]), right.T, strict=True)
    )
    heights = DataFrame(
        {"panel": "barrier", "line": line_label(*pair), "decoding": decoding}
        | plots.ends(barrier(records, *pair, decoding).interval, 100)
        for pair in reversed(PAIRS)
        for decoding in DECODINGS
    )
    fig, (left, right) = plt.subplots(1, 2, figsize=(style.PAGE, 3.3), width_ratios=(1, 1.3))
    for decoding, line in along.groupby("panel", sort=False):
        look = style.STROKES[decoding]
        left.plot(line["alpha"], line["value"], color="black", ls=look.linestyle, label=look.label)
        left.fill_between(line["alpha"], line["low"], line["high"], color="black", alpha=0.08, lw=0)
        left.plot([0, 1], line["value"].iloc[[0, -1]], color="#999999", lw=0.8)
    left.set(xlabel="from ES (0) to GRPO (1)", ylabel="accuracy, %", title="along the line", ylim=(0, None))
    left.legend(fontsize=6.5)
    shades = {"greedy": "black", "t0.6": "#888888", "t1": "white"}
    for decoding, offset in zip(DECODINGS, (0.22, 0, -0.22), strict=True):
        bars = {"color": "black", "lw": 0.9, "mfc": shades[decoding], "ms": 4, "capsize": 1.5, "fmt": "o"}
        points = heights[heights["decoding"] == decoding]
        plots.whiskers(right, points, up=np.arange(len(points)) + offset, label=style.STROKES[decoding].label, **bars)
    names = [f"{'null: ' if pair in NULLS else ''}{line_label(*pair)}" for pair in reversed(PAIRS)]
    right.set_yticks(range(len(names)), names, fontsize=6)
    right.axvline(0, color="black", lw=0.7)
    right.axvline(2, **plots.NULL)  # points, of claim C25
    right.set(xlabel="largest error above the line, points", title="barrier")
    right.grid(axis="y", visible=False)
    right.legend(fontsize=6.5, loc="best")
    return fig, concat([along[["panel", "alpha", "value"]], heights])


def figure_from_base(run: SimpleNamespace, records: Records) -> tuple[Figure, DataFrame]:
    """Draw the accuracy on the way from the base to each kind of end, by weights and by KL."""

    def way(end: str, decoding: str, by: str) -> tuple[np.ndarray, np.ndarray]:
        right = 100 * (1 - errors(records, BASE, end, decoding).mean((0, 1)))
        kl = path_points.curves(records[name_of(BASE, end)], "kl").mean(0)
        return (kl if by == "kl" else np.linspace(0, 1, len(right))), right

    panels = (("greedy", "weights"), ("t1", "weights"), ("greedy", "kl"))
    points = DataFrame(
        {"panel": ", ".join(panel), "end": end, "x": x, "value": value}
        for panel in panels
        for end in REACHED
        for x, value in zip(*way(end, *panel), strict=True)
    )
    fig, axes = plt.subplots(1, 3, figsize=(style.PAGE, 2.7), sharey=False)
    for ax, (decoding, by) in zip(axes, panels, strict=True):
        panel = points[points["panel"] == f"{decoding}, {by}"]
        plots.lines(ax, panel, "x", "value", "end", {end: _look(end) for end in REACHED}, ms=3, markevery=5)
        ax.set(title=f"{style.STROKES[decoding].label}, by {'KL' if by == 'kl' else by}", ylim=(0, None))
        ax.set_xlabel("share of the way from the base" if by == "weights" else "KL from the base, nats per token")
    axes[0].set_ylabel("accuracy, %")
    axes[2].set_xscale("symlog", linthresh=0.01)
    axes[2].set_xlim(left=-1e-3, right=1.3 * axes[2].get_xlim()[1])
    plots.key(fig, axes[0], 6, 6.5)
    return fig, points


def figure_plane(run: SimpleNamespace, records: Records) -> tuple[Figure, DataFrame]:
    """Draw all runs in the plane through the base, the mean of the ES runs and the mean of the GRPO runs.

    A run lies where its displacement falls on the plane; how far it lies off it is written beside the arm. The means
    are those of all other runs: a run would lie near a mean that it is part of, whatever it learned.
    """
    arm_of = np.array([arm for arm in TRAINED for _ in records[arm]])
    gram = gram_matrix.gram(records["products"], [record for arm in TRAINED for record in records[arm]]).total
    places = np.array([_place(gram, arm_of, i) for i in range(len(arm_of))])
    off = np.sqrt(np.maximum(np.diagonal(gram) - np.square(places).sum(1), 0))
    points = DataFrame({"arm": arm_of, "along GRPO": places[:, 0], "across": places[:, 1], "off the plane": off})
    fig, ax = plt.subplots(figsize=(style.COLUMN + 0.9, 2.7))
    distances = points.groupby("arm")["off the plane"].mean()
    looks = {arm: _look(arm) | {"label": f"{end_label(arm)}: {distances[arm]:.2f} off"} for arm in TRAINED}
    plots.lines(ax, points, "along GRPO", "across", "arm", looks, ms=4, ls="", alpha=0.8)
    ax.plot(0, 0, "+", color="black", ms=10)
    ax.annotate("base", (0, 0), (5, -10), textcoords="offset points", fontsize=7)
    ax.set(xlabel="along the mean of GRPO, weight units", ylabel="across, to the mean of ES, weight units")
    ax.legend(fontsize=6, loc="upper right")
    return fig, points


def _place(gram: np.ndarray, arm_of: np.ndarray, i: int) -> np.ndarray:
    """Return where run i falls on the plane of the means of the other runs: along GRPO's, and across it."""
    others = np.arange(len(arm_of)) != i
    es, grpo = ((chosen := others & (arm_of == arm)) / max(chosen.sum(), 1) for arm in ("es", "grpo"))
    x = _unit(grpo, gram)
    y = _unit(es - (es @ gram @ x) * x, gram)
    return np.array([x, y]) @ gram[i]


def _unit(combination: np.ndarray, gram: np.ndarray) -> np.ndarray:
    """Return a combination of displacements scaled to length 1; one without length stays."""
    length = np.sqrt(max(combination @ gram @ combination, 0.0))
    return combination / length if length else combination


def figure_noise(run: SimpleNamespace, records: Records) -> tuple[Figure, DataFrame]:
    """Draw the accuracy under noise on the weights against its standard deviation, by kind of noise and decoding."""

    def right(end: str, part: str, decoding: str) -> np.ndarray:
        shaken = records[f"noise on {end}"]
        return 100 * np.mean([[r["clean"][decoding], *np.mean(r[part][decoding], axis=1)] for r in shaken], axis=0)

    panels = list(product(("isotropic", "relative"), ("greedy", "t1")))
    points = DataFrame(
        {"panel": ", ".join(panel), "end": end, "x": x, "value": value}
        for panel in panels
        for end in SHAKEN
        for x, value in zip([0, *run.noise_sigmas], right(end, *panel), strict=True)
    )
    fig, axes = plt.subplots(1, 4, figsize=(style.PAGE, 2.5), sharey=True)
    for ax, (part, decoding) in zip(axes, panels, strict=True):
        panel = points[points["panel"] == f"{part}, {decoding}"]
        plots.lines(ax, panel, "x", "value", "end", {end: _look(end) for end in SHAKEN}, ms=3)
        ax.set(title=f"{part},\n{style.STROKES[decoding].label}", ylim=(0, None), xlabel="deviation, weight units")
    axes[0].set_ylabel("accuracy, %")
    plots.key(fig, axes[0], 4, 6.5)
    return fig, points


def figure_likelihood(run: SimpleNamespace, records: Records) -> tuple[Figure, DataFrame]:
    """Draw the negative log-likelihood of right answers along the lines to GRPO, over the line between its ends."""

    def over(pair: tuple[str, str]) -> tuple[np.ndarray, np.ndarray]:
        curve = path_points.curves(records[name_of(*pair)], "nll").mean(0)
        alphas = np.linspace(0, 1, len(curve))
        return alphas, curve - (1 - alphas) * curve[0] - alphas * curve[-1]

    pairs = [pair for pair in PAIRS if pair[1] == "grpo"]
    points = DataFrame(
        {"line": line_label(*pair), "x": x, "value": value}
        for pair in pairs
        for x, value in zip(*over(pair), strict=True)
    )
    looks = {line_label(*pair): _look(pair[0]) | {"ls": "--" if pair[0] == pair[1] else "-"} for pair in pairs}
    fig, ax = plt.subplots(figsize=(style.COLUMN + 0.6, 2.5))
    plots.lines(ax, points, "x", "value", "line", looks, ms=3, markevery=5)
    ax.axhline(0, **plots.NULL)
    ax.set(xlabel="to GRPO (1)", ylabel="NLL above the line,\nnats per answer")
    ax.legend(fontsize=6)
    return fig, points


def figure_regimes(run: SimpleNamespace, records: Records) -> tuple[Figure, DataFrame]:
    """Draw the barriers between any two runs with small and with large steps, greedily and at temperature 1."""
    matrices = {decoding: 100 * regime_barriers(records, LEARNED, decoding)[0] for decoding in ("greedy", "t1")}
    named = [regime_label(name) for name in LEARNED for _ in records[name]]
    points = DataFrame(
        {
            "decoding": decoding,
            "first": named[i],
            "last": named[j],
            "first run": i,
            "last run": j,
            "barrier": matrix[i, j],
        }
        for decoding, matrix in matrices.items()
        for i, j in combinations(range(len(named)), 2)
    )
    fig, axes = plt.subplots(1, 2, figsize=(style.PAGE, 3.4), sharey=True, layout="constrained")
    sizes = np.array([len(records[name]) for name in LEARNED])
    ends, labels = np.cumsum(sizes), [regime_label(name) for name in LEARNED]
    for ax, (decoding, matrix) in zip(axes, matrices.items(), strict=True):
        both = np.where(np.isnan(matrix), matrix.T, matrix)  # the diagonal stays empty: a run has no line to itself
        image = ax.imshow(both, cmap="Blues", vmin=0, vmax=points["barrier"].max())
        for edge in ends[:-1] - 0.5:
            ax.axvline(edge, color="black", lw=0.7)
            ax.axhline(edge, color="black", lw=0.7)
        ax.set(title=style.STROKES[decoding].label)
        ax.set_xticks(ends - sizes / 2 - 0.5, labels, rotation=30, ha="right", rotation_mode="anchor")
        ax.set_yticks(ends - sizes / 2 - 0.5, labels)
        ax.grid(visible=False)
        ax.tick_params(length=0)
    fig.colorbar(image, ax=axes, label="barrier, points", shrink=0.8)
    return fig, points
