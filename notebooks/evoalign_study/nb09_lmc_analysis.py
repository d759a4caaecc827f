"""Notebook 09, linear mode connectivity: groups of runs, barriers, noise on the weights, tables and figures."""

from collections.abc import Sequence
from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from pandas import DataFrame, concat

from evoalign_lib import arms, tiny
from evoalign_lib.analysis import connectivity, regimes, stats
from evoalign_study import collapse, displacements, loading, path_points, plots, runs, style, weight_cache
from evoalign_study.kinds.weights import begin_path, noise_spec, path_spec, products_specs
from evoalign_study.loading import After, Group, Groups, Records
from evoalign_study.records import Spec
from evoalign_study.results import MISSING, Results, stated

NOTEBOOK = "09_lmc_analysis"
CLAIMS = ("C25", "C26", "C27b", "C28b")
TRAINED = ("es", "es_sampled", "es_random", "grpo", "grpo_random", "sft")
"""Groups of training runs whose ends are joined by lines in weight space."""
presets, TINY, SMOKE, FULL = runs.scales(
    {
        "bases": ["A0"],
        "retrain": [],  # groups that `force` runs again; empty: all of them
        "seeds_es": (32, 4),  # of ES; means are taken over these runs
        "seeds_random": (list(range(8)), [0, 1]),  # of ES with random fitness
        "seeds_sampled": (list(range(8)), [0, 1]),  # of ES with sampled fitness
        "mean": (4, 2),  # ES runs per mean
        "pairs": (8, 2),  # lines of each kind
        "path_points": (21, 3),
        "max_completion_length": tiny.MAX_COMPLETION_LENGTH,
        "validation_problems": (256, 16),  # answered at every point and under every noise
        "noise_sigmas": ([0.005, 0.01, 0.02, 0.03], [0.01]),  # weight units
        "noise_trials": (4, 1),  # draws of each noise
        "regime_base": "B0",  # for the task of notebook 03, where some runs hack the reward
        "regime_seeds": (list(range(16, 20)), [16]),  # seeds that notebook 03 does not use
        "regime_steps": {  # per arm: in notebook 03's maps runs end clean with small steps, hacked with large ones
            "es": {"small": {"alpha": 0.0015}, "large": {"alpha": 0.015}},
            "grpo": {"small": {"learning_rate": 1e-4}, "large": {"learning_rate": 1e-3}},
            "es_random": {"large": {"alpha": 0.015}},
            "grpo_random": {"large": {"learning_rate": 1e-3}},
        },
        "regime_points": (11, 3),
        "regime_problems": (128, 8),
    }
)
BASE, MEAN, RANDOM = "base", "es mean", "random"
"""Ends that are not runs: base, means of ES runs, and random directions with an ES run's norm in each tensor."""
PAIRS = (
    *(("es", end) for end in ("grpo", "es")),
    ("grpo", "grpo"),
    *(("es", end) for end in ("es_sampled", "sft")),
    (MEAN, "grpo"),
    ("es", "es_random"),
    *((end, "grpo") for end in ("es_random", "grpo_random", RANDOM)),
)
"""Pairs of kinds of end that lines join. A line within an arm joins runs with different seeds."""
NULLS = (("es_random", "grpo"), (RANDOM, "grpo"), ("es", "es_random"), ("grpo_random", "grpo"))
"""Lines with an end that learned nothing."""
REACHED = ("es", "grpo", "sft", MEAN, "es_random", RANDOM)
"""Kinds of end that lines from the base lead to."""
SHAKEN = (BASE, "es", "grpo", "sft", MEAN, "es_random", "grpo_random", RANDOM)
"""Kinds of model whose weights are perturbed with noise."""
REGIMES = {f"{arm}, {steps} steps": (arm, steps) for arm, every in TINY["regime_steps"].items() for steps in every}
"""Group of runs on the task of notebook 03 -> its arm and the size of its steps; some of these runs are hacked."""
LEARNED = tuple(name for name, (arm, _) in REGIMES.items() if not arms.get(arm).null)
SMALL = tuple(name for name in LEARNED if REGIMES[name][1] == "small")
"""Groups of runs whose arm is not a null, and those among them with small steps."""
BROKEN = next(name for name, (arm, _) in REGIMES.items() if arms.get(arm).reward == "random")
"""Group of runs whose models a random reward has destroyed."""
DECODINGS = tuple(style.STROKES)
"""Decodings under which problems are answered at every point of a line."""
_RESAMPLES, _REGIME_RESAMPLES = 1000, 200  # as in the verdicts, so that tables show the same numbers


# ---- groups of runs


def groups(run: SimpleNamespace, records: Records) -> Groups:
    """Return the groups of runs by name: notebook 02's arms, inner products of their displacements, lines, noise."""
    scale, exact = loading.of_tiny_world(run, TINY)
    settings = SimpleNamespace(**exact)
    begin_path(settings.bases[0], exact, scale)  # before there are ends of runs
    shared = runs.countdown(records, scale, exact)
    declared = {name: shared[name] for name in shared if name in (*TRAINED, BASE) or name.startswith("sweep")}
    declared["products"] = runs.after(records, TRAINED, lambda *each: products_specs(each, scale))
    for pair in (*PAIRS, *product([BASE], REACHED)):
        declared[name_of(*pair)] = After(_lines(settings, records, *pair, scale), _needed(*pair))
    for end in SHAKEN:
        shaken = _ends(settings, records, end)[: 1 if end == BASE else settings.pairs]
        specs = [noise_spec(settings.bases[0], each, exact, scale) for each in shaken]
        declared[f"noise on {end}"] = After(specs, _needed(end))
    return declared | _regimes(settings, records, scale)


def _regimes(run: SimpleNamespace, records: Records, scale: str) -> dict[str, Any]:
    """Return runs on notebook 03's task with small and with large steps, and the lines between them.

    All pairs of `LEARNED` runs are joined. Runs with a random reward are joined with the others of their arm, and with
    the runs that took small steps.
    """
    declared: dict[str, Any] = {}
    for name, (arm, steps) in REGIMES.items():
        settings, changes = runs.conciseness(scale, arm), [run.regime_steps[arm][steps]]
        declared[name] = Group(arm, [run.regime_base], run.regime_seeds, settings, changes, scale=scale)
    asked = {"task": "conciseness", "max_completion_length": runs.conciseness(scale, "es")["max_completion_length"]}
    asked |= {"validation_problems": run.regime_problems, "path_points": run.regime_points}
    begin_path(run.regime_base, asked, scale)
    ends = {name: [weight_cache.end([record]) for record in records.get(name, ())] for name in REGIMES}
    pairs = list(combinations([end for name in LEARNED for end in ends[name]], 2))
    small = [end for name in SMALL for end in ends[name]]
    for nulls in (ends[name] for name in REGIMES if name not in LEARNED):
        pairs += [*combinations(nulls, 2), *((end, null) for null in nulls for end in small)]
    lines = [path_spec(run.regime_base, *pair, asked, scale) for pair in pairs]
    return declared | {"regimes": After(lines, tuple(REGIMES))}


def name_of(first: str, last: str) -> str:
    """Return the name of the group of lines from one kind of end to another."""
    return f"{first} to {last}"


def _needed(*ends: str) -> tuple[str, ...]:
    """Return the groups of runs from which kinds of end are made."""
    return tuple(dict.fromkeys("es" if end in (MEAN, RANDOM) else end for end in ends if end != BASE))


def _lines(run: SimpleNamespace, records: Records, first: str, last: str, scale: str) -> list[Spec]:
    starts, ends = (_ends(run, records, end) for end in (first, last))
    if first == last:  # join each run with the one `pairs` places further on
        starts, ends = starts[: run.pairs], (starts[run.pairs :] or starts[1:])
    pairs = list(zip(starts, ends, strict=False))[: run.pairs]
    return [path_spec(run.bases[0], *pair, vars(run), scale) for pair in pairs]


def _ends(run: SimpleNamespace, records: Records, end: str) -> Sequence[dict[str, Any] | None]:
    """Return the ends of one kind as specs name them, in the order of their seeds; empty until its runs are loaded.

    The base is repeated for each line.
    """
    if end == BASE:
        return [None] * run.pairs
    own = records.get(*_needed(end), ())
    ended = runs.means(own, run.mean if end == MEAN else 1, len(own))
    return [weight_cache.end(each, draw=each[0]["spec"]["seed"] if end == RANDOM else None) for each in ended]


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


def barrier(records: Records, first: str, last: str, decoding: str) -> connectivity.BarrierEstimate:
    """Return the barrier: the height of the mean error above the straight line between the ends' errors, a fraction."""
    return path_points.mean_barrier(errors(records, first, last, decoding), _RESAMPLES)


def half_gain(records: Records, end: str, decoding: str, by: str = "weights") -> stats.Interval:
    """Return where on the way from the base half of the gain in accuracy is reached.

    by: "weights" for a share of the way, "KL" for a share of the final KL. NaN if no line of the kind has a gain.
    """
    kl = path_points.curves(records[name_of(BASE, end)], "kl") if by == "KL" else None
    gains = 1 - errors(records, BASE, end, decoding)
    return connectivity.half_gain_interval(gains, kl, monotone=True, relative=by == "KL", n_resamples=_RESAMPLES)


def barrier_table(run: SimpleNamespace, records: Records) -> DataFrame:
    """Return a row per kind of line: barriers of the error under each decoding, and of the negative log-likelihood."""
    rows = []
    for pair in PAIRS:
        lines = records[name_of(*pair)]
        row = {"line": line_label(*pair), "lines": len(lines)}
        row["distance"] = f"{np.mean([line['distance'] for line in lines]):.2f}"
        row |= {f"{style.STROKES[d].label} [95 %]": stated(barrier(records, *pair, d).interval) for d in DECODINGS}
        over_mean = connectivity.barrier_mean(errors(records, *pair, "greedy").mean((0, 1)))
        of_nll = connectivity.barrier_line(path_points.curves(lines, "nll").mean(0))
        row["over the mean of the ends, greedy"] = f"{100 * over_mean:.1f}"
        rows.append(row | {"NLL, nats": f"{of_nll:.2f}"})
    return DataFrame(rows)


def from_base_table(run: SimpleNamespace, records: Records) -> DataFrame:
    """Return a row per kind of end and decoding: gain, and where half of it is reached, by weights and by KL."""
    rows = []
    for end, decoding in product(REACHED, DECODINGS):
        wrong = errors(records, BASE, end, decoding)
        gain = stats.crossed_bootstrap(wrong[:, :, 0] - wrong[:, :, -1])
        row = {"end": end_label(end), "decoding": style.STROKES[decoding].label, "lines": len(wrong)}
        row["gain, points [95 %]"] = gain.format()
        for by in ("weights", "KL"):
            half = half_gain(records, end, decoding, by)
            # without a gain there is no half of it
            known = gain.low > 0 and np.isfinite(half.low)
            row[f"half of it, by {by}"] = stated(half, ".2f") if known else "no gain"
        rows.append(row)
    return DataFrame(rows)


# ---- noise on the weights


def noise_table(run: SimpleNamespace, records: Records) -> DataFrame:
    """Return a row per kind of model and decoding: accuracy without noise, and the share of it kept under noise."""
    parts = ("isotropic", "relative", "head", "body")
    return DataFrame(
        {"model": end_label(end), "decoding": style.STROKES[d].label, "models": len(shaken)}
        | {"without noise, %": f"{100 * np.mean([r['clean'][d] for r in shaken]):.1f}"}
        | {f"kept, {part}, %": kept_told(kept_share(records, end, part, d), len(shaken)) for part in parts}
        for end, d in product(SHAKEN, DECODINGS)
        for shaken in [records[f"noise on {end}"]]
    )


def kept_share(records: Records, end: str, part: str, decoding: str) -> stats.Interval | None:
    """Return the share of their accuracy that models keep under noise, the mean over its draws and sizes.

    Models that solve less than a hundredth without noise are left out; None if that leaves none.
    """
    able = [r for r in records[f"noise on {end}"] if r["clean"][decoding] >= 0.01]
    shares = [np.mean(np.mean(r[part][decoding], axis=1) / r["clean"][decoding]) for r in able]
    return stats.bootstrap_mean(shares) if able else None


def kept_told(share: stats.Interval | None, models: int = 0) -> str:
    """Return a kept share in words, with its number of models unless that is `models` or one."""
    if share is None or share.n == 1:
        return f"{100 * share.value:.1f}" if share else "nothing to keep"
    return stated(share) + ("" if share.n == models else f" (n = {share.n})")


# ---- regimes of hacked and unhacked runs


def regime_label(name: str) -> str:
    """Return the name of a group of `REGIMES` in tables and figures."""
    arm, steps = REGIMES[name]
    return f"{style.ARMS[arm].label}, {steps} steps"


def regime_barriers(records: Records, names: Sequence[str], decoding: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the barriers between all pairs of runs of groups, and resamples of them over problems (`path_points`)."""
    ends = [record for name in names for record in records[name]]
    return path_points.barriers(records["regimes"], ends, decoding, _REGIME_RESAMPLES)


def mean_barriers(records: Records, name: str, decoding: str) -> tuple[float, float]:
    """Return a group's mean barrier among its own runs, NaN if there is only one, and to the runs with small steps."""
    n = len(records[name])
    matrix, _ = regime_barriers(records, dict.fromkeys((name, *SMALL)), decoding)
    matrix = np.fmax(np.nan_to_num(matrix), np.nan_to_num(matrix.T))
    among = matrix[:n, :n][np.triu_indices(n, 1)]
    return float(among.mean()) if len(among) else float("nan"), float(matrix[:n, n:].mean())


def regime_table(records: Records) -> DataFrame:
    """Return a row per group of runs: how they end, and barriers among them and to the runs with small steps."""
    rows = []
    for name in REGIMES:
        ended, heights = records[name], 100 * np.array([mean_barriers(records, name, d) for d in DECODINGS])
        hacked = [sum(collapse.end(r, d) == "hacked" for r in ended) for d in DECODINGS]
        right, kl = (np.mean([r["curve"][what][-1] for r in ended]) for what in ("right_greedy", "kl"))
        row = {"runs": regime_label(name), "n": len(ended), "hacked": ", ".join(map(str, hacked))}
        row |= {"right, %": f"{100 * right:.0f}", "KL": f"{kl:.1f}"}
        among, to_small = (", ".join(stated(height, ".0f", MISSING) for height in each) for each in heights.T)
        rows.append(row | {"barriers among them": among, "to small steps": to_small})
    return DataFrame(rows)


# ---- results


def results(run: SimpleNamespace, records: Records) -> Results:
    """Return by name the numbers that the answers and the paper's macros quote; shares are fractions."""
    entries: Results = {"lines": len(records[name_of("es", "grpo")])}
    entries |= {f"barrier {decoding}": barrier(records, "es", "grpo", decoding).interval for decoding in DECODINGS}
    entries |= {f"null {decoding}": barrier(records, *NULLS[0], decoding).interval for decoding in DECODINGS}
    entries["barrier from the mean"] = barrier(records, MEAN, "grpo", "greedy").interval
    entries |= {f"half {end}": half_gain(records, end, "greedy") for end in _ASKED}
    entries |= {f"kept {end}": kept_share(records, end, "isotropic", "greedy") for end in _ASKED}
    entries |= {f"kept {end} warm": kept_share(records, end, "isotropic", "t0.6") for end in _ASKED}
    entries["shares kept"] = ", ".join(f"{end_label(end)} {kept_told(entries[f'kept {end}'])}" for end in _ASKED)
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
# ---- figures: each returns the figure and the data that it plots


def _looks(ends: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return kind of end -> line style."""
    own = {MEAN: {"color": "#0B3C5D", "marker": "v"}, RANDOM: {"color": "black", "marker": "x"}}
    return {end: own[end] | {"label": end_label(end)} if end in own else plots.look(end) for end in ends}


def figure_barriers(run: SimpleNamespace, records: Records) -> tuple[plt.Figure, DataFrame]:
    """Draw the accuracy along lines from ES to GRPO, and the barrier of each kind of line under each decoding."""
    lines = {d: 100 * (1 - errors(records, "es", "grpo", d).mean(1)) for d in DECODINGS}
    x = np.linspace(0, 1, lines["greedy"].shape[1])
    along = concat(
        DataFrame({"panel": d, "alpha": x, "value": right.mean(0), "low": right.min(0), "high": right.max(0)})
        for d, right in lines.items()
    )
    heights = DataFrame(
        {"panel": "barrier", "line": line_label(*pair), "decoding": d}
        | plots.ends(barrier(records, *pair, d).interval, 100)
        for pair, d in product(PAIRS[::-1], DECODINGS)
    )
    fig, (left, right) = plt.subplots(1, 2, figsize=(style.PAGE, 3.3), width_ratios=(1, 1.3))
    looks = {d: {"color": "black", "ls": look.linestyle, "label": look.label} for d, look in style.STROKES.items()}
    plots.lines(left, along, "alpha", "value", "panel", looks)
    for _, line in along.groupby("panel"):
        left.plot([0, 1], line["value"].iloc[[0, -1]], color="#999999", lw=0.8)
    left.set(xlabel="from ES (0) to GRPO (1)", ylabel="accuracy, %", title="along the line", ylim=(0, None))
    bars = {"color": "black", "lw": 0.9, "ms": 4, "capsize": 1.5, "fmt": "o"}
    for d, offset, fill in zip(DECODINGS, (0.22, 0, -0.22), ("black", "#888888", "white"), strict=True):
        up = np.arange(len(PAIRS)) + offset
        plots.whiskers(right, heights[heights["decoding"] == d], up=up, label=looks[d]["label"], mfc=fill, **bars)
    names = [f"{'null: ' if pair in NULLS else ''}{line_label(*pair)}" for pair in PAIRS[::-1]]
    right.set_yticks(range(len(names)), names, fontsize=6)
    right.axvline(2, **plots.NULL)  # points, as in claim C25
    right.set(xlabel="largest error above the line, points", title="barrier")
    for ax in (left, right):
        ax.legend(fontsize=6.5)
    return fig, concat([along[["panel", "alpha", "value"]], heights])


def figure_from_base(run: SimpleNamespace, records: Records) -> tuple[plt.Figure, DataFrame]:
    """Draw accuracy on the way from the base to each kind of end, by weights and by KL."""

    def way(end: str, decoding: str, by: str) -> dict[str, np.ndarray]:
        right = 100 * (1 - errors(records, BASE, end, decoding).mean((0, 1)))
        kl = path_points.curves(records[name_of(BASE, end)], "kl").mean(0)
        return {"x": kl if by == "kl" else np.linspace(0, 1, len(right)), "value": right}

    panels = (("greedy", "weights"), ("t1", "weights"), ("greedy", "kl"))
    points = concat(
        DataFrame({"panel": ", ".join(panel), "end": end} | way(end, *panel)) for panel, end in product(panels, REACHED)
    )
    labels = {"xlabel": "share of the way from the base", "ylabel": "accuracy, %", "ylim": (0, None)}
    fig, axes = plots.grid(points, "x", "value", "end", _looks(REACHED), 2.7, **labels)
    axes[2].set_xscale("symlog", linthresh=0.01)
    axes[2].set(xlabel="KL from the base, nats per token")
    return fig, points


def figure_plane(run: SimpleNamespace, records: Records) -> tuple[plt.Figure, DataFrame]:
    """Draw all runs in the plane through the base, the mean of the ES runs and the mean of the GRPO runs.

    Each displacement is projected onto the plane; the legend gives each arm's mean distance from it. A run is placed by
    the means of all other runs, since it would lie near a mean that includes it, whatever it learned.
    """
    arm_of = np.array([arm for arm in TRAINED for _ in records[arm]])
    trained = [record for arm in TRAINED for record in records[arm]]
    gram = displacements.recorded(records["products"], trained).total
    places = np.array([_place(gram, arm_of, i) for i in range(len(arm_of))])
    off = np.sqrt(np.maximum(np.diagonal(gram) - np.square(places).sum(1), 0))
    points = DataFrame({"arm": arm_of, "along GRPO": places[:, 0], "across": places[:, 1], "off the plane": off})
    distances = points.groupby("arm")["off the plane"].mean()
    looks = _looks(TRAINED)
    for arm, look in looks.items():
        look["label"] += f": {distances[arm]:.2f} off"
    fig, ax = plt.subplots(figsize=(style.COLUMN + 0.9, 2.7))
    plots.lines(ax, points, "along GRPO", "across", "arm", looks, ms=4, ls="", alpha=0.8)
    ax.plot(0, 0, "+", color="black", ms=10, label="base")
    ax.set(xlabel="along the mean of GRPO, weight units", ylabel="across, to the mean of ES, weight units")
    ax.legend(fontsize=6, loc="upper right")
    return fig, points


def _place(gram: np.ndarray, arm_of: np.ndarray, i: int) -> np.ndarray:
    """Project run i onto the plane of the other runs' means: return its coordinates along GRPO's mean and across it."""
    others = np.array([arm_of == arm for arm in ("grpo", "es")]) & (np.arange(len(arm_of)) != i)
    means = others / np.maximum(others.sum(1, keepdims=True), 1)
    # Gram-Schmidt; along a mean of zero length every coordinate is 0
    lengths = np.linalg.cholesky(means @ gram @ means.T + 1e-12 * np.eye(2))
    return np.linalg.solve(lengths, means @ gram[i])


def figure_noise(run: SimpleNamespace, records: Records) -> tuple[plt.Figure, DataFrame]:
    """Draw accuracy against the standard deviation of noise on the weights, by kind of noise and decoding."""

    def right(end: str, part: str, decoding: str) -> np.ndarray:
        shaken = records[f"noise on {end}"]
        return 100 * np.mean([[r["clean"][decoding], *np.mean(r[part][decoding], axis=1)] for r in shaken], axis=0)

    points = concat(
        DataFrame({"panel": ", ".join(panel), "end": end, "x": [0, *run.noise_sigmas], "value": right(end, *panel)})
        for panel, end in product(product(("isotropic", "relative"), ("greedy", "t1")), SHAKEN)
    )
    labels = {"xlabel": "deviation, weight units", "ylabel": "accuracy, %", "ylim": (0, None)}
    fig, _ = plots.grid(points, "x", "value", "end", _looks(SHAKEN), 2.5, **labels)
    return fig, points


def figure_likelihood(run: SimpleNamespace, records: Records) -> tuple[plt.Figure, DataFrame]:
    """Draw the negative log-likelihood of right answers along lines to GRPO, less the line between their ends."""
    pairs = [pair for pair in PAIRS if pair[1] == "grpo"]
    nll = {pair: path_points.curves(records[name_of(*pair)], "nll").mean(0) for pair in pairs}
    x = np.linspace(0, 1, len(nll[pairs[0]]))
    points = concat(
        DataFrame({"line": line_label(*pair), "x": x, "value": curve - (1 - x) * curve[0] - x * curve[-1]})
        for pair, curve in nll.items()
    )
    looks = {line_label(*pair): _looks(pair)[pair[0]] | {"label": line_label(*pair)} for pair in pairs}
    fig, ax = plt.subplots(figsize=(style.COLUMN + 0.6, 2.5))
    plots.lines(ax, points, "x", "value", "line", looks, ms=3, markevery=5)
    ax.axhline(0, **plots.NULL)
    ax.set(xlabel="to GRPO (1)", ylabel="NLL above the line,\nnats per answer")
    ax.legend(fontsize=6)
    return fig, points


def figure_regimes(run: SimpleNamespace, records: Records) -> tuple[plt.Figure, DataFrame]:
    """Draw the barriers between all pairs of runs with small and with large steps, greedily and at temperature 1."""
    matrices = {decoding: 100 * regime_barriers(records, LEARNED, decoding)[0] for decoding in ("greedy", "t1")}
    named = [regime_label(name) for name in LEARNED for _ in records[name]]
    points = DataFrame(
        {"decoding": d, "first": named[i], "last": named[j], "first run": i, "last run": j, "barrier": matrix[i, j]}
        for d, matrix in matrices.items()
        for i, j in combinations(range(len(named)), 2)
    )
    fig, axes = plt.subplots(1, 2, figsize=(style.PAGE, 3.4), sharey=True)
    firsts = [named.index(name) for name in dict.fromkeys(named)]
    for ax, (decoding, matrix) in zip(axes, matrices.items(), strict=True):
        both = np.where(np.isnan(matrix), matrix.T, matrix)  # the diagonal stays empty: a run has no line to itself
        image = ax.imshow(both, cmap="Blues", vmin=0, vmax=points["barrier"].max())
        ax.set_xticks(firsts, [named[i] for i in firsts], rotation=30, ha="right", rotation_mode="anchor")
        ax.set_yticks(firsts, [named[i] for i in firsts])
        ax.set(title=style.STROKES[decoding].label)
        ax.grid(visible=False)
    fig.colorbar(image, ax=axes, label="barrier, points", shrink=0.8)
    return fig, points
