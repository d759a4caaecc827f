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
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evoalign_lib import arms
from evoalign_lib.analysis import collapse, connectivity, hacking, paths, regimes, stats
from evoalign_lib.analysis.stats import Interval
from evoalign_lib.claims.checks import check_named
from evoalign_lib.claims.findings import Finding, Undecided, decoding_words, defined
from evoalign_lib.claims.rules.comparisons import check_decodings
from evoalign_lib.claims.rules.rule import Rule
from evoalign_lib.claims.selection import BASE, Claim, Evidence, Record, lacking

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
    n = min(int(hacked.sum()), int((~hacked).sum()))
    resamples = min(200, evidence.resamples)
    matrix = barriers(evidence.records, runs, decoding, resamples)
    kl = np.array([record["curve"]["kl"][-1] for record in runs])

    def separate() -> Interval:
        found = regimes.regimes(*matrix, n_resamples=resamples)
        return regimes.separation(*matrix, found)

    find: dict[str, Callable[[], Interval]] = {
        "separate": separate,
        "agree": lambda: regimes.agreement(*matrix, hacked),
        "basin": lambda: regimes.basin(*matrix, hacked),
        "near": lambda: stats.stratified_bootstrap([kl[hacked]], [kl[~hacked]], n_resamples=evidence.resamples),
    }
    findings = []
    counted = f"(n = {int(hacked.sum())} hacked v {int((~hacked).sum())} unhacked)"
    for name, quantity in _QUANTITIES.items():
        label = f"{quantity} {decoding_words(decoding)}"
        kept: dict[str, Any] = {"decoding": decoding, "bound": AGREE if name == "agree" else 0.0}
        have = f"{label}: {counted}"
        if matrix is None or n < 2:
            reason = "(a line between two runs is not measured)" if matrix is None else counted
            findings.append(Finding(label, n if matrix else 0, have, None, value="not defined", context=reason, **kept))
            continue
        try:
            interval = defined(find[name])
        except Undecided as error:
            findings.append(Finding(label, n, have, None, value="not defined", context=f"({error})", **kept))
            continue
        kept["test"] = (
            regimes.within_between(matrix[0], list(hacked), only=True, n_resamples=2000).p if name == "basin" else None
        )
        unit = {"basin": " points", "near": " nats a completion"}.get(name, "")
        value = interval.format(percent=name == "basin", digits=1 if name == "basin" else 2) + unit
        findings.append(Finding(label, n, have, interval, value=value, context=counted, **kept))
    return findings


def barriers(
    records: Sequence[Record], runs: Sequence[Record], decoding: str, resamples: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Return barriers of the error between any two runs, and the same with problems resampled.

    Returns fractions, (runs, runs) and (resamples, runs, runs), above the diagonal; None where a line is missing.
    """
    lines = {}
    for record in records:
        ends = [record["spec"].get(name) for name in ("first", "last")]
        if record["spec"]["kind"] == "path" and all(end is not None and set(end) == {"of", "factor"} for end in ends):
            lines[tuple(tuple(end["of"]["digests"]) for end in ends)] = record
    outcomes: NDArray[np.float64] | None = None
    for i, j in combinations(range(len(runs)), 2):
        names = [(run["digest"],) for run in (runs[i], runs[j])]
        forwards, backwards = lines.get((names[0], names[1])), lines.get((names[1], names[0]))
        if (line := forwards or backwards) is None:
            return None
        found = paths.errors([line], decoding)[0]
        if outcomes is None:
            outcomes = np.full((len(runs), len(runs), *found.shape), np.nan)
        outcomes[i, j] = found if forwards else found[:, ::-1]
    if outcomes is None:
        return None
    estimate = connectivity.estimate_barrier(outcomes, kind="line", within=True, n_resamples=resamples)
    return estimate.pairs, estimate.pair_draws


def _check(claim: Claim) -> None:
    check_decodings(claim)
    check_named(claim, claim["rule"]["favours"])


def _favours(claim: Claim) -> tuple[str, ...]:
    return tuple(claim["rule"]["favours"])


REGIMES = Rule(_find, ("decodings", "favours"), check=_check, favours=_favours)
