"""Rules "gaps" and "collapse": runs of several settings; settings are the units.

"gaps" compares ends of training, hacked or clean; "collapse" asks of a map of settings which of them collapse.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from numbers import Real
from typing import Any

import numpy as np

from evoalign_lib.analysis import stats
from evoalign_lib.analysis.arrays import require
from evoalign_lib.analysis.stats import Interval
from evoalign_study import collapse
from evoalign_study.claims import selection
from evoalign_study.claims.checks import Schema
from evoalign_study.claims.findings import Finding, Measured, Undecided, defined, hold
from evoalign_study.claims.rules.comparisons import winners
from evoalign_study.claims.rules.rule import Comparison, Rule, asked
from evoalign_study.claims.selection import Case, Claim, Evidence, Record, Runs, cells, judges, matches

_VARIED = ("sigma", "alpha", "learning_rate", "beta")


def _find_gaps(case: Case) -> list[Finding]:
    """Find how much further reward falls under noise on the weights at some ends of training than at others.

    A side is an arm, whose runs may be of several settings, and an end, hacked or clean (`collapse.end`). With fewer
    runs of an end than the claim asks for, the comparison is not defined.
    """
    claim, unit, findings = case.claim, case.claim["unit"], []
    for comparison, decisive, winner in asked(case, partial(_winner, claim)):
        sides, sigma = [comparison["of"], comparison["to"]], comparison["sigma"]
        found = {arm: _on_map(case.evidence, claim["arms"][arm]) for arm, _ in sides}
        if case.null:
            found[winner] = case.stand_in(winner, found).records
        # the gaps of the runs that end so, a list for each setting that has any
        ends = []
        for arm, end in sides:
            of_settings = _map(arm, found[arm], unit)
            gaps = [[r["jensen"]["gaps"][sigma] for r in runs if collapse.end(r) == end] for runs in of_settings]
            ends.append([of_setting for of_setting in gaps if of_setting])
        counts = " v ".join(
            f"{sum(map(len, end))} of {len(found[arm])} runs, of {len(end)} setting{'s' if len(end) != 1 else ''}"
            for (arm, _), end in zip(sides, ends, strict=True)
        )

        label = " - ".join(f"{end} {case.name(arm, arm == winner)}" for arm, end in sides) + f", gap at {sigma}"
        n, kept = min(len(found[arm]) for arm, _ in sides), {"bound": float(comparison["above"]), "decisive": decisive}
        finding = hold(label, [], partial(_gap, case, ends, counts), n=n, have=f"{label}: {counts}", **kept)
        findings.append(finding if finding.interval is None else replace(finding, n=finding.interval.n))
    return findings


def _gap(case: Case, ends: list[list[list[float]]], counts: str, arms: Sequence[Runs]) -> Measured:
    """Compare gaps of two ends, of so many runs each."""
    if min(sum(map(len, end)) for end in ends) < case.claim["min_seeds"]:
        raise Undecided(f"{counts} end so")
    interval = stats.nested_bootstrap(*ends, **case.resampled)
    context = f"characters ({counts}, detectable {interval.detectable():.2g})"
    return interval, interval.format(percent=False, digits=2), context


def _winner(claim: Claim, comparison: Comparison) -> str | None:
    """Return the arm whose ends fall less under noise; None where both sides are ends of one arm."""
    (of, _), (to, _) = comparison["of"], comparison["to"]
    return to if claim["arms"][of].get("arm") != claim["arms"][to].get("arm") else None


def _on_map(evidence: Evidence, wanted: Mapping[str, Any]) -> list[Record]:
    """Return the runs of a map, of whatever setting; those with later seeds were made for another purpose."""
    return [record for record in evidence.records if matches(record, wanted) and judges(record)]


def _map(label: str, records: list[Record], unit: str) -> list[list[Record]]:
    """Return runs by setting and unit, in their order; they differ in nothing but these."""
    selection.check_one_base(label, records)
    selection.check_alike(label, records, {*_VARIED, unit})
    of_setting: dict[tuple, dict[Any, Record]] = defaultdict(dict)
    for record in records:
        spec = record["spec"]
        runs_of = of_setting[tuple(spec[name] for name in _VARIED if name in spec)]
        require(spec[unit] not in runs_of, f"{label}: two records of one setting have {unit} {spec[unit]}")
        runs_of[spec[unit]] = record
    return [[runs_of[unit] for unit in sorted(runs_of)] for _, runs_of in sorted(of_setting.items())]


def _find_collapse(case: Case) -> list[Finding]:
    """Find how many settings of a map are safe, and whether sigma and alpha say which runs collapse, on another base.

    A run has collapsed when its right answers fell (`hacking.fell`), whatever its reward. Both predictors are
    logarithms, relative to the sigma that halves the right answers of the base under noise alone: of sigma itself, and
    of alpha sqrt(steps / population), the root mean square displacement of ES with random fitness.
    """
    predictors, shares, have, sizes = [], [], [], []
    for label, where in cells(case.claim):
        runs_of = _map(label, _on_map(case.evidence, case.claim["arms"]["treatment"] | where), case.claim["unit"])
        base = case.select(["base"], where)["base"]
        sizes.append([len(each) for each in runs_of])
        have.append(f"{label}: {sum(sizes[-1])} runs of {len(runs_of)} settings, {base.have}")
        if runs_of and base.records:
            selection.check_one_base(label, runs_of[0] + base.records)
            found = collapse.collapse_map(sum(runs_of, []), base.records[0])
            predictors.append(np.log([[cell.relative_sigma, cell.displacement] for cell in found]))
            shares.append(np.array([cell.collapsed for cell in found]))
    n = min(map(len, shares)) if len(shares) == len(have) else 0

    @cache
    def fitted() -> list[Interval]:
        if np.isnan(np.concatenate(predictors)).any():
            raise ValueError("no measured noise halves the right answers of a base")
        area, slopes = stats.logistic_over_groups(predictors, shares, **case.resampled)
        return [area, *slopes]

    def measure(place: int, arms: Sequence[Runs]) -> Measured:
        safe = np.concatenate(shares) < 0.5
        interval = defined(fitted)[place - 1] if place else stats.wilson(int(safe.sum()), len(safe))
        context = f"({len(safe)} settings of {min(map(min, sizes))} to {max(map(max, sizes))} runs)"
        return interval, interval.format(percent=False, digits=2), context

    labels = ("settings without collapse", "AUC on the base left out", "slope of sigma", "slope of displacement")
    bounds = ({"bound": 0.5, "side": "below"}, {"bound": 0.5}, {}, {})
    return [
        hold(label, [], partial(measure, place), n=n, have="; ".join(have), **bound)
        for place, (label, bound) in enumerate(zip(labels, bounds, strict=True))
    ]


def _schema(arm: tuple[str, ...]) -> dict[str, Schema]:
    def side(where: str, value: Any) -> None:
        ended = len(value) == 2 and value[0] in arm and value[1] in ("hacked", "clean")
        require(ended, f"{where}: {value!r} is no arm and end: declare two, the end as hacked or clean")

    sigmas = [f"{sigma:g}" for sigma in collapse.JENSEN_SIGMAS]
    comparisons = [{"of": side, "to": side, "sigma": dict.fromkeys(sigmas), "above?": Real}]
    return {"comparisons": comparisons, "also?": comparisons}


GAPS = Rule(_find_gaps, _schema, favours=lambda claim: winners(claim, partial(_winner, claim)))
COLLAPSE = Rule(_find_collapse, arms=("treatment", "base"))
