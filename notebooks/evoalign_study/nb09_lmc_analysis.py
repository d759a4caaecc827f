"""Notebook 09, linear mode connectivity: groups of runs, barriers, noise on the weights, tables and figures."""

from collections.abc import Sequence
from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from pandas import DataFrame, concat

from evoalign_lib import arms, tiny
from evoalign_lib.analysis import connectivity, stats
from evoalign_study import collapse, loading, path_points, plots, runs, sequences, style, weight_cache
from evoalign_study.kinds.weights import begin_path, noise_spec, path_spec
from evoalign_study.loading import After, Group, Groups, Records
from evoalign_study.records import Spec
from evoalign_study.results import MISSING, Results, stated

NOTEBOOK = "09_lmc_analysis"
CLAIMS = ("C25", "C26", "C27b", "C28b", "C39b", "C39c", "C39d", "E24")
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
        **sequences.SETTINGS,
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
DECODINGS = tuple(style.STROKES)
"""Decodings under which problems are answered at every point of a line."""
_RESAMPLES, _REGIME_RESAMPLES = 1000, 200  # as in the verdicts, so that tables show the same numbers


# ---- groups of runs


def groups(run: SimpleNamespace, records: Records) -> Groups:
    """Return the groups of runs by name: notebook 02's arms, lines between their ends, noise."""
    scale, exact = loading.of_tiny_world(run, TINY)
    settings = SimpleNamespace(**exact)
    begin_path(settings.bases[0], exact, scale)  # before there are ends of runs
    shared = runs.countdown(records, scale, exact)
    declared = {name: shared[name] for name in shared if name in (*TRAINED, BASE) or name.startswith("sweep")}
    for pair in (*PAIRS, *product([BASE], REACHED)):
        declared[name_of(*pair)] = After(_lines(settings, records, *pair, scale), _needed(*pair))
    for end in SHAKEN:
        shaken = _ends(settings, records, end)[: 1 if end == BASE else settings.pairs]
        specs = [noise_spec(settings.bases[0], each, exact, scale) for each in shaken]
        declared[f"noise on {end}"] = After(specs, _needed(end))
    return declared | _regimes(settings, records, scale) | sequences.groups(settings, records, scale)


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
    return entries | sequences.results(records)


_ASKED = ("es", "grpo", "es_random")
# ---- figures: each returns the figure and the data that it plots


def _looks(ends: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return kind of end -> line style."""
    own = {MEAN: {"color": "#0B3C5D", "marker": "v"}, RANDOM: {"color": style.ARMS["es_random"].color, "marker": "x"}}
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
    """Draw accuracy on the way from the base to each kind of end, greedily and at temperature 1."""
    points = concat(
        DataFrame(
            {"panel": style.STROKES[decoding].label, "end": end, "x": np.linspace(0, 1, len(right)), "value": right}
        )
        for decoding, end in product(("greedy", "t1"), REACHED)
        for right in [100 * (1 - errors(records, BASE, end, decoding).mean((0, 1)))]
    )
    labels = {"xlabel": "share of the way from the base", "ylabel": "accuracy, %", "ylim": (0, None)}
    looks = {end: look | {"ms": 4, "markevery": 4} for end, look in _looks(REACHED).items()}
    fig, _ = plots.grid(points, "x", "value", "end", looks, 2.7, 3, **labels)
    return fig, points


def figure_noise(run: SimpleNamespace, records: Records) -> tuple[plt.Figure, DataFrame]:
    """Draw accuracy against the standard deviation of isotropic noise on the weights, greedily and at temperature 1."""
    shown = (BASE, "es", "grpo", "sft", "es_random")

    def right(end: str, decoding: str) -> np.ndarray:
        shaken = records[f"noise on {end}"]
        each = [[r["clean"][decoding], *np.mean(r["isotropic"][decoding], axis=1)] for r in shaken]
        return 100 * np.mean(each, axis=0)

    points = concat(
        DataFrame({"panel": style.STROKES[d].label, "end": end, "x": [0, *run.noise_sigmas], "value": right(end, d)})
        for d, end in product(("greedy", "t1"), shown)
    )
    labels = {"xlabel": "standard deviation of the noise", "ylabel": "accuracy, %", "ylim": (0, None)}
    fig, _ = plots.grid(points, "x", "value", "end", _looks(shown), 2.5, 5, **labels)
    return fig, points
