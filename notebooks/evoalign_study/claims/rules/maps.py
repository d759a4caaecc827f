"""Rules "gaps" and "collapse": runs of several settings; settings are the units.

"gaps" compares ends of training, hacked or clean; "collapse" asks of a map of settings which of them collapse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any

import numpy as np

from evoalign_lib.analysis import stats
from evoalign_lib.analysis.arrays import require
from evoalign_lib.analysis.stats import Interval
from evoalign_study import collapse
from evoalign_study.claims.checks import Schema
from evoalign_study.claims.findings import Finding, Measured, Undecided, hold
from evoalign_study.claims.rules.comparisons import declared_comparisons, winners
from evoalign_study.claims.rules.rule import Rule
from evoalign_study.claims.selection import Claim, Evidence, Record, cells, check_one_base, judges, matches

_VARIED = ("sigma", "alpha", "learning_rate", "beta")


def _find_gaps(claim: Claim, evidence: Evidence) -> list[Finding]:
    """Find how much further reward falls under noise on the weights at some ends of training than at others.

    A side is an arm, whose runs may be of several settings, and an end, hacked or clean (`collapse.end`). With fewer
    runs of an end than the claim asks for, the comparison is not defined.
    """
    findings = []
    for comparison, decisive in declared_comparisons(claim["rule"]):
        sides, winner = [comparison["of"], comparison["to"]], _winner(claim, comparison)
        if evidence.null and not (decisive and winner):
            continue
        found = {arm: _on_map(evidence, claim["arms"][arm]) for arm, _ in sides}
        if evidence.null:
            beside = [found[arm] for arm in (winner, *found)]
            found[winner] = evidence.stand_in(beside, claim["unit"]).records
        maps = [_map(claim, arm, found[arm]) for arm, _ in sides]
        ends = [_gaps_at(each, end, comparison["sigma"]) for each, (_, end) in zip(maps, sides, strict=True)]
        runs_of, ended = ([sum(map(len, side)) for side in part] for part in (maps, ends))
        counts = [
            f"{n} of {total} runs, of {len(end)} setting{'s' if len(end) != 1 else ''}"
            for n, total, end in zip(ended, runs_of, ends, strict=True)
        ]
        (of, to), n = (f"{end} {evidence.name(claim, arm, arm == winner)}" for arm, end in sides), min(runs_of)
        label = f"{of} - {to}, gap at {comparison['sigma']}"
        kept = {"bound": float(comparison["above"]), "decisive": decisive}
        measure = partial(_difference, ends, " v ".join(counts), claim["min_seeds"], evidence)
        found = hold(label, n, f"{label}: {' v '.join(counts)}", measure, **kept)
        findings.append(found if found.interval is None else replace(found, n=found.interval.n))
    return findings


def _difference(ends: list[list[list[float]]], counts: str, least: int, evidence: Evidence) -> Measured:
    """Compare gaps of two ends, of so many runs each."""
    if min(sum(map(len, end)) for end in ends) < least:
        raise Undecided(f"{counts} end so")
    interval = stats.nested_bootstrap(*ends, n_resamples=evidence.resamples)
    context = f"characters ({counts}, detectable {interval.detectable():.2g})"
    return interval, interval.format(percent=False, digits=2), context


def _winner(claim: Claim, comparison: dict[str, Any]) -> str | None:
    """Return the arm whose ends fall less under noise; None where both sides are ends of one arm."""
    (of, _), (to, _) = comparison["of"], comparison["to"]
    return to if claim["arms"][of].get("arm") != claim["arms"][to].get("arm") else None


def _favours_gaps(claim: Claim) -> tuple[str, ...]:
    return winners(claim, partial(_winner, claim))


def _on_map(evidence: Evidence, wanted: Mapping[str, Any]) -> list[Record]:
    """Return the runs of a map, of whatever setting; those with later seeds were made for another purpose."""
    return [record for record in evidence.records if matches(record, wanted) and judges(record)]


def _map(claim: Claim, label: str, records: list[Record]) -> list[list[Record]]:
    """Return runs by setting and unit, in their order; they differ in nothing but these."""
    check_one_base(label, records)
    of_setting: dict[tuple, dict[Any, Record]] = {}
    for record in records:
        spec, unit = record["spec"], record["spec"][claim["unit"]]
        first = records[0]["spec"]
        names = spec.keys() | first.keys()
        differing = sorted(k for k in names if spec.get(k) != first.get(k) and k not in (*_VARIED, claim["unit"]))
        require(not differing, f"{label}: runs of a map differ in {', '.join(differing)}")
        runs_of = of_setting.setdefault(tuple(spec[name] for name in _VARIED if name in spec), {})
        require(unit not in runs_of, f"{label}: two records of one setting have {claim['unit']} {unit}")
        runs_of[unit] = record
    return [[runs_of[unit] for unit in sorted(runs_of)] for _, runs_of in sorted(of_setting.items())]


def _gaps_at(found: list[list[Record]], end: str, sigma: str) -> list[list[float]]:
    """Return the Jensen gaps of the runs of a map that end so, a list for each setting that has any."""
    gaps = [[r["jensen"]["gaps"][sigma] for r in runs_of if collapse.end(r) == end] for runs_of in found]
    return [of_setting for of_setting in gaps if of_setting]


def _find_collapse(claim: Claim, evidence: Evidence) -> list[Finding]:
    """Find how many settings of a map are safe, and whether sigma and alpha say which runs collapse, on another base.

    A run has collapsed when its right answers fell (`hacking.fell`), whatever its reward. Both predictors are
    logarithms, relative to the sigma that halves the right answers of the base under noise alone: of sigma itself, and
    of alpha sqrt(steps / population), the root mean square displacement of ES with random fitness.
    """
    labels = ("settings without collapse", "AUC on the base left out", "slope of sigma", "slope of displacement")
    bounds = {"settings without collapse": (0.5, "below"), "AUC on the base left out": (0.5, "above")}
    predictors, shares, have, sizes = [], [], [], []
    for label, where in cells(claim):
        chosen = _on_map(evidence, claim["arms"]["treatment"] | where)
        runs_of = _map(claim, label, chosen)
        base, number, _ = evidence.select(claim, "base", where)
        sizes.append([len(each) for each in runs_of])
        have.append(f"{label}: {sum(sizes[-1])} runs of {len(runs_of)} settings, {number}")
        if runs_of and base:
            check_one_base(label, runs_of[0] + base)
            found = collapse.collapse_map(sum(runs_of, []), base[0])
            predictors.append(np.log([[cell.relative_sigma, cell.displacement] for cell in found]))
            shares.append(np.array([cell.collapsed for cell in found]))
    n = min(map(len, shares)) if len(shares) == len(have) else 0
    if not n:
        return [Finding(name, 0, "; ".join(have), None, 0.0, "above") for name in labels]
    safe, least, most = np.concatenate(shares) < 0.5, min(map(min, sizes)), max(map(max, sizes))
    quantities: list[Interval | None] = [stats.wilson(int(safe.sum()), len(safe)), None, None, None]
    why = ""
    try:
        if np.isnan(np.concatenate(predictors)).any():
            raise ValueError("no measured noise halves the right answers of a base")
        area, slopes = stats.logistic_over_groups(predictors, shares, n_resamples=evidence.resamples)
        quantities[1:] = [area, *slopes]
    except ValueError as error:
        why = f"({error})"
    findings = []
    for name, interval in zip(labels, quantities, strict=True):
        bound, side = bounds.get(name, (0.0, "above"))
        value = "not defined" if interval is None else interval.format(percent=False, digits=2)
        context = why if interval is None else f"({len(safe)} settings of {least} to {most} runs)"
        findings.append(Finding(name, n, "; ".join(have), interval, bound, side, value=value, context=context))
    return findings


def _schema(arm: tuple[str, ...]) -> dict[str, Schema]:
    def side(where: str, value: Any) -> None:
        ended = len(value) == 2 and value[0] in arm and value[1] in ("hacked", "clean")
        require(ended, f"{where}: {value!r} is no arm and end: declare two, the end as hacked or clean")

    sigmas = [f"{sigma:g}" for sigma in collapse.JENSEN_SIGMAS]
    comparisons = [{"of": side, "to": side, "sigma": dict.fromkeys(sigmas), "above?": Real}]
    return {"comparisons": comparisons, "also?": comparisons}


GAPS = Rule(_find_gaps, _schema, favours=_favours_gaps)
COLLAPSE = Rule(_find_collapse, arms=("treatment", "base"))
