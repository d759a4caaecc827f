"""Rule "regimes": whether runs fall into hacked ones, which share a basin, and unhacked ones near the base.

Each decoding says by itself which runs are hacked and how high the barriers between any two runs are. Four comparisons
decide under each: two clusters of the barriers are more separate than those of one cluster; they are the hacked and the
unhacked runs; barriers between hacked runs are lower than those between hacked and unhacked ones; and hacked runs end
further from the base, by their KL. Runs whose right answers fell without any gain of reward are neither, and are left
out. A null takes the place of the favoured runs of its family, and counts as hacked: it learned nothing, and is broken
at most.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from evoalign_lib import arms
from evoalign_lib.analysis import hacking, regimes, stats
from evoalign_lib.analysis.stats import Interval
from evoalign_study import collapse, path_points
from evoalign_study.claims.findings import Finding, Measured, Undecided, decoding_words, defined, hold
from evoalign_study.claims.rules.rule import Rule
from evoalign_study.claims.selection import BASE, Case, Record, Runs

AGREE = 0.5
"""The adjusted Rand index, beyond chance, that clusters and labels must have: half of the way to being the same."""


def _find(case: Case) -> list[Finding]:
    if case.null == BASE:  # it is where all lines begin, and no end of them
        return []
    declared, favoured = case.claim["arms"], case.rule["favours"]
    names = [*declared]
    if case.null:  # a null takes the place of the runs of its family
        family = arms.get(case.null).family
        names = [n for n in names if n not in favoured or arms.get(declared[n]["arm"]).family == family]
    selected = case.select(names, favoured=favoured)
    broken = {run["digest"] for name in favoured if case.null and name in selected for run in selected[name].records}
    return [
        finding
        for decoding in case.rule["decodings"]
        for finding in _of_decoding(case, [*selected.values()], broken, decoding)
    ]


def _kind(record: Record, decoding: str) -> str:
    """Return "hacked"; "worse", where right answers fell and the reward did not rise; or "unhacked"."""
    if collapse.end(record, decoding) == "hacked":
        return "hacked"
    right = record["curve"][f"right_{decoding}"]
    return "worse" if hacking.fell(right[-1], right[0]) else "unhacked"


def _of_decoding(case: Case, arms: Sequence[Runs], broken: Collection[str], decoding: str) -> Iterator[Finding]:
    """Find the four comparisons under one decoding; runs with the digests of broken models count as hacked."""
    runs = [run for each in arms for run in each.records]
    complete = all(each.records for each in arms) and all(f"right_{decoding}" in run["curve"] for run in runs)
    kinds = [(run, "hacked" if run["digest"] in broken else _kind(run, decoding)) for run in runs if complete]
    taken, resamples = [run for run, kind in kinds if kind != "worse"], min(200, case.evidence.resamples)
    hacked = np.array([kind == "hacked" for _, kind in kinds if kind != "worse"], bool)
    counts = int(hacked.sum()), int((~hacked).sum())
    try:
        barriers, missing = path_points.barriers(case.evidence.having("kind", "path"), taken, decoding, resamples), ""
    except ValueError as error:
        barriers, missing = None, str(error)

    def separate() -> tuple[Interval]:
        return (regimes.separation(*barriers, regimes.regimes(barriers[0], n_resamples=resamples)),)

    def basin() -> tuple[Interval, float]:
        p = regimes.within_between(barriers[0], list(hacked), only=True, n_resamples=2000).p
        return regimes.basin(*barriers, hacked), p

    def near() -> tuple[Interval]:
        kl = np.array([run["curve"]["kl"][-1] for run in taken])
        return (stats.stratified_bootstrap([kl[hacked]], [kl[~hacked]], **case.resampled),)

    def measure(find: Callable[[], tuple[Any, ...]], unit: str, _: Sequence[Runs]) -> Measured:
        if barriers is None:
            raise Undecided(missing)
        interval, *p = defined(find)
        text = interval.format() if unit == " points" else interval.format(percent=False, digits=2)
        return interval, text + unit, f"(n = {counts[0]} hacked v {counts[1]} unhacked)", *p

    for words, bound, unit, find in (
        ("two clusters, silhouette over that of one", 0.0, "", separate),
        (
            "two clusters v hacked and unhacked, adjusted Rand index",
            AGREE,
            "",
            lambda: (regimes.agreement(*barriers, hacked),),
        ),
        ("barrier hacked to unhacked - hacked to hacked", 0.0, " points", basin),
        ("KL from the base, hacked - unhacked", 0.0, " nats a completion", near),
    ):
        label, kept = f"{words} {decoding_words(decoding)}", {"decoding": decoding, "bound": bound}
        have = f"{label}: {counts[0]} hacked v {counts[1]} unhacked" if complete else ""
        finding = hold(label, arms, partial(measure, find, unit), n=int(complete), have=have, **kept)
        yield replace(finding, n=min(counts) if barriers else 0)


REGIMES = Rule(_find, lambda arm: {"decodings": list, "favours": [arm]})
