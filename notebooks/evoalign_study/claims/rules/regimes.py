"""Rule "regimes": whether runs fall into hacked ones, which share a basin, and unhacked ones near the base.

Each decoding says by itself which runs are hacked and how high the barriers between any two runs are. Four comparisons
decide under each: two clusters of the barriers are more separate than those of one cluster; they are the hacked and the
unhacked runs; barriers between hacked runs are lower than those between hacked and unhacked ones; and hacked runs end
further from the base, by their KL. Runs whose right answers fell without any gain of reward are neither, and are left
out. A null takes the place of the favoured runs of its family, and counts as hacked: it learned nothing, and is broken
at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evoalign_lib import arms
from evoalign_lib.analysis import hacking, regimes, stats
from evoalign_study import collapse, path_points
from evoalign_study.claims.findings import Finding, Measured, Undecided, decoding_words, defined, hold
from evoalign_study.claims.rules.rule import Rule
from evoalign_study.claims.selection import BASE, Claim, Evidence, Record, lacking

AGREE = 0.5
"""The adjusted Rand index, beyond chance, that clusters and labels must have: half of the way to being the same."""


def _find(claim: Claim, evidence: Evidence) -> list[Finding]:
    if evidence.null == BASE:  # it is where all lines begin, and no end of them
        return []
    favoured = claim["rule"]["favours"]
    selected = {name: evidence.select(claim, name, {}) for name in claim["arms"]}
    broken: set[str] = set()
    if evidence.null:
        family = arms.get(evidence.null).family
        for name in favoured:
            own = claim["arms"][name]
            if arms.get(own["arm"]).family == family:
                beside = [selected[name].records] * 2
                selected[name] = evidence.stand_in(beside, claim["unit"], *([own["seeds"]] if "seeds" in own else []))
                broken = {record["digest"] for record in selected[name].records}
            else:
                del selected[name]
    have = ", ".join(found.have for found in selected.values())
    runs = [record for found in selected.values() for record in found.records]
    lacks = lacking(selected.values())
    complete = all(found.records for found in selected.values())
    findings = []
    for decoding in claim["rule"]["decodings"]:
        if complete and all(f"right_{decoding}" in record["curve"] for record in runs):
            kinds = ["hacked" if r["digest"] in broken else _kind(r, decoding) for r in runs]
            taken = [record for record, kind in zip(runs, kinds, strict=True) if kind != "worse"]
            hacked = np.array([kind == "hacked" for kind in kinds if kind != "worse"])
            findings += _of_decoding(evidence, taken, hacked, decoding)
        else:
            words = {name: f"{quantity} {decoding_words(decoding)}" for name, quantity in _QUANTITIES.items()}
            findings += [Finding(each, 0, f"{each}: {have}", None, lacks=lacks) for each in words.values()]
    return findings


def _kind(record: Record, decoding: str) -> str:
    """Return "hacked"; "worse", where right answers fell and the reward did not rise; or "unhacked"."""
    if collapse.end(record, decoding) == "hacked":
        return "hacked"
    right = record["curve"][f"right_{decoding}"]
    return "worse" if hacking.fell(right[-1], right[0]) else "unhacked"


_QUANTITIES = {
    "separate": "two clusters, silhouette over that of one",
    "agree": "two clusters v hacked and unhacked, adjusted Rand index",
    "basin": "barrier hacked to unhacked - hacked to hacked",
    "near": "KL from the base, hacked - unhacked",
}


def _of_decoding(evidence: Evidence, runs: Sequence[Record], hacked: NDArray[np.bool_], decoding: str) -> list[Finding]:
    counted = f"{int(hacked.sum())} hacked v {int((~hacked).sum())} unhacked"
    n, resamples = min(int(hacked.sum()), int((~hacked).sum())), min(200, evidence.resamples)
    kl = np.array([record["curve"]["kl"][-1] for record in runs])
    try:
        measured, missing = path_points.barriers(evidence.having("kind", "path"), runs, decoding, resamples), ""
    except ValueError as error:
        measured, missing = None, str(error)

    def separate() -> tuple[Any, ...]:
        return regimes.separation(*measured, regimes.regimes(measured[0], n_resamples=resamples)), ""

    def agree() -> tuple[Any, ...]:
        return regimes.agreement(*measured, hacked), ""

    def basin() -> tuple[Any, ...]:
        p = regimes.within_between(measured[0], list(hacked), only=True, n_resamples=2000).p
        return regimes.basin(*measured, hacked), " points", p

    def near() -> tuple[Any, ...]:
        found = stats.stratified_bootstrap([kl[hacked]], [kl[~hacked]], n_resamples=evidence.resamples)
        return found, " nats a completion"

    def measure(find: Callable[[], tuple[Any, ...]]) -> Measured:
        if measured is None:
            raise Undecided(missing)
        interval, unit, *p = defined(find)
        points = unit == " points"
        return interval, interval.format(percent=points, digits=1 if points else 2) + unit, f"(n = {counted})", *p

    findings = []
    for find in (separate, agree, basin, near):
        label = f"{_QUANTITIES[find.__name__]} {decoding_words(decoding)}"
        kept = {"decoding": decoding, "bound": AGREE if find is agree else 0.0}
        found = hold(label, 1, f"{label}: {counted}", partial(measure, find), **kept)
        findings.append(replace(found, n=n if measured else 0))
    return findings


REGIMES = Rule(_find, lambda arm: {"decodings": list, "favours": [arm]})
