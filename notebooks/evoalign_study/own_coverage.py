"""Coverage of a user's own models from their samples: pass@k, support won and lost, cover@tau, as tables and curves.

Most functions take models, name -> records of kind "sampled": the first is the starting model, the others were trained
from it. All have the same problems and number of samples. Intervals are over problems.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import cycle, product

import numpy as np
from matplotlib import pyplot as plt
from pandas import DataFrame

from evoalign_lib.analysis import coverage, stats
from evoalign_study import plots
from evoalign_study.measures.base import label
from evoalign_study.records import Record, unpack_integers
from evoalign_study.results import stated
from evoalign_study.runs import where

Models = Mapping[str, Sequence[Record]]
"""Name -> records of all blocks and temperatures; the starting model first."""
TAUS = (0.01, 0.1, 0.5, 0.9)
"""Chances of a right sample at which tables count problems."""
_RESAMPLES = 2000


def temperatures(models: Models) -> list[float]:
    """Return the temperatures at which all models were sampled.

    Raises:
        ValueError: models that were sampled at different temperatures.
    """
    asked = {name: sorted({record["spec"]["temperature"] for record in records}) for name, records in models.items()}
    first, *others = asked.values()
    if any(other != first for other in others):
        raise ValueError(f"models were sampled at different temperatures: {asked}. Sample all at the same ones.")
    return first


def samples(models: Models) -> int:
    """Return the number of samples per problem.

    Raises:
        ValueError: models with different numbers of samples.
    """
    n = {record["spec"]["samples"] for records in models.values() for record in records}
    if len(n) != 1:
        raise ValueError(f"records have {sorted(n)} samples per problem: compare models with equally many.")
    return n.pop()


def counts(records: Sequence[Record], temperature: float) -> np.ndarray:
    """Return how many samples of each problem are right, (problems,), from the blocks of one model at a temperature.

    Raises:
        ValueError: blocks that are missing or overlap, or records of more than one model.
    """
    own = sorted(where(records, temperature=temperature), key=lambda r: r["spec"]["block"])
    if len({str(sorted((k, v) for k, v in record["spec"].items() if k != "block")) for record in own}) > 1:
        raise ValueError(f"{len(own)} records differ in more than their blocks: pass those of one model and setting.")
    held = Counter(problem for record in own for problem in range(*record["spec"]["block"]))
    n = own[0]["spec"]["test_problems"] if own else 1
    wrong, twice = sorted(held.keys() ^ set(range(n))), [i for i in held if held[i] > 1]
    if wrong or twice:
        told = f"{wrong[0]} to {wrong[-1]} missing or beyond them" if wrong else f"{twice[0]} to {twice[-1]} twice"
        counted = f"{len(held)} of {n} problems at {label(temperature)} are there"
        raise ValueError(f"{counted}, {told}: load every block of the model once.")
    return np.concatenate([unpack_integers(record["right"]) for record in own])


def ks(n: int) -> list[int]:
    """Return the values of k in tables: 1, 4, 16, ... and n."""
    return sorted({4**i for i in range(n.bit_length()) if 4**i <= n} | {n})


def solved(right: np.ndarray, n: int, k: int) -> stats.Interval:
    """Return unbiased pass@k with its interval over problems. right: (problems,), right samples among n each."""
    return stats.crossed_bootstrap(coverage.estimate_pass_at(right, n, k)[None], n_resamples=_RESAMPLES)


def pass_table(models: Models, temperature: float) -> DataFrame:
    """Return a row per model and k: pass@k with its interval over problems, and its standard error of sampling.

    The standard error is for new samples of the same problems; it is unknown if k is more than half of the samples.
    """
    n, rows = samples(models), []
    for name, records in models.items():
        right = counts(records, temperature)
        for k in ks(n):
            row = {"model": name, "problems": len(right), "k": k, "pass@k, % [95 %]": solved(right, n, k).format()}
            error = float(np.sqrt(coverage.variance_of_pass_at(right, n, k).sum()) / len(right))  # NaN where 2k > n
            rows.append(row | {"standard error of sampling, points": stated(error, ".2%", "not known")})
    return DataFrame(rows)


def change(before: np.ndarray, after: np.ndarray, n: int, k: int) -> stats.Interval:
    """Return the net support change rate within k samples, from counts of n, with its interval over problems."""
    base, end = (coverage.estimate_pass_at(right, n, k) for right in (before, after))
    return coverage.support_change(base, end[None], 1, n_resamples=_RESAMPLES)


def support_table(models: Models, temperature: float) -> DataFrame:
    """Return a row per trained model: problems kept, won, lost and out within half of the samples, and the NSCR.

    Half of the samples, since the null compares two halves of the starting model's own samples. The numbers of problems
    are expected counts, which are unbiased.

    Raises:
        ValueError: a trained model with another number of problems than the starting model.
    """
    n = samples(models)
    k = n // 2
    (own, records), *ends = models.items()
    before = counts(records, temperature)
    null = coverage.null_of_halves(before, n)
    changes: dict[str, tuple[coverage.Support, str]] = {f"{own}, two halves": (null.support, "0 (the null)")}
    for name, records in ends:
        after = counts(records, temperature)
        if len(after) != len(before):
            raise ValueError(f"{name!r} has {len(after)} problems, {own!r} {len(before)}: sample the same ones.")
        support = coverage.support(*(coverage.estimate_pass_at(right, n, k) for right in (before, after)))
        changes[name] = (support, change(before, after, n, k).format(percent=False, digits=3))
    parts = {"kept P": "kept", "won E": "won", "lost S": "lost", "out": "out"}
    return DataFrame(
        {"model": name, "k": k}
        | {words: f"{getattr(support, part):.1f}" for words, part in parts.items()}
        | {words: stated(getattr(support, words.lower()), ".3f", "not defined") for words in ("SRR", "NDR")}
        | {"NSCR [95 %]": net, "null, 95 %": f"{null.low:.3f} to {null.high:.3f}"}
        for name, (support, net) in changes.items()
    )


def cover_table(models: Models, temperature: float, taus: Sequence[float] = TAUS) -> DataFrame:
    """Return a row per model: the share of problems solved with at least each chance per sample, and those unsolved.

    The chances are shares of the samples. "None right" counts the problems without a right sample; with 95 %
    confidence, the chance of a right sample on such a problem is below the last column.
    """
    n = samples(models)
    return DataFrame(
        {"model": name, "samples": n}
        | {f"cover@{tau:g}, %": f"{100 * coverage.cover_at(right / n, tau):.1f}" for tau in taus}
        | {"none right": int((right == 0).sum()), "then below, %": f"{100 * coverage.threshold(n):.2f}"}
        for name, records in models.items()
        for right in [counts(records, temperature)]
    )


def token_table(models: Models) -> DataFrame:
    """Return a row per model and temperature: tokens generated, mean length of a sample, and how many were cut off."""
    n, rows = samples(models), []
    for (name, records), temperature in product(models.items(), temperatures(models)):
        counted = DataFrame(where(records, temperature=temperature))[["n_problems", "generated_tokens", "clipped"]]
        problems, tokens, clipped = counted.sum()
        row = {"model": name, "temperature": f"{temperature:g}", "samples": f"{n * problems:,}"}
        row |= {"tokens": f"{tokens:,}", "mean length": f"{tokens / (n * problems):.1f}"}
        rows.append(row | {"cut off, %": f"{100 * clipped / (n * problems):.2f}"})
    return DataFrame(rows)


def figure_pass_at_k(models: Models) -> tuple[plt.Figure, DataFrame]:
    """Draw pass@k of each model with its interval over problems, in one panel per temperature.

    Returns the figure and its data, a row per point of a line.
    """
    n, heat = samples(models), temperatures(models)
    across = np.unique(np.geomspace(1, n, 33).round()).astype(int)
    points = DataFrame(
        {"panel": f"temperature {temperature:g}", "model": name, "k": k}
        | plots.ends(stats.crossed_bootstrap(solved_by[None], n_resamples=500), 100)
        for temperature in heat
        for name, records in models.items()
        for right in [counts(records, temperature)]
        for k, solved_by in zip(across, coverage.estimate_pass_at(right, n, across.tolist()).T, strict=True)
    )
    own, *ends = models  # the trained models have the colours of `evoalign compare`
    turns = product(("-", "--", ":", "-."), (("#0A332C", "o"), ("#7CB9BF", "s")))
    looks = {
        name: {"color": color, "marker": marker, "ls": stroke, "label": name}
        for name, (stroke, (color, marker)) in zip(ends, cycle(turns), strict=False)
    }
    looks[own] = plots.look("base", ls="-", label=own)
    labels = {"xlabel": "samples k", "ylabel": "problems solved, %", "ylim": (0, 100)}
    fig, axes = plots.grid(points, "k", "value", "model", looks, 2.9, 3, **labels)
    for ax in axes:
        plots.plain_ticks(ax, ks(n))
    return fig, points
