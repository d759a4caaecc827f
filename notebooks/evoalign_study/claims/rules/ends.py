"""Rules "gaps", "collapse" and "regimes": how runs end, hacked or clean (`collapse.end`).

"gaps" compares the ends of training, and "collapse" tests which settings of a map collapse. In both, runs have several
settings, and settings are the units.

"regimes" tests whether runs fall into two groups: hacked runs, which share a basin, and unhacked ones near the base.
Each decoding has its own hacked runs and its own barriers between any two runs. Under each, four comparisons decide:
clustering by barriers separates the runs better than it would a single cluster; its two clusters match the hacked and
the unhacked runs; barriers between two hacked runs are lower than those between a hacked and an unhacked run; and
hacked runs end further from the base, measured by KL. Runs whose right answers fell without any gain in reward are in
neither group and are left out. A null replaces the favoured runs of its family and counts as hacked: as it learned
nothing, it can at most be broken.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from numbers import Real
from typing import Any

import numpy as np

from evoalign_lib import arms
from evoalign_lib.analysis import hacking, regimes, stats
from evoalign_lib.analysis.stats import Interval
from evoalign_lib.checks import require
from evoalign_study import collapse, path_points
from evoalign_study.claims import selection
from evoalign_study.claims.checks import Schema
from evoalign_study.claims.findings import Finding, Measured, Undecided, decoding_words, defined, hold
from evoalign_study.claims.rules.comparisons import winners
from evoalign_study.claims.rules.rule import Comparison, Rule, asked
from evoalign_study.claims.selection import BASE, Case, Claim, Evidence, Record, Runs, cells, judges, matches

AGREE = 0.5
"""The adjusted Rand index that clusters and labels must exceed: half-way from chance to a perfect match."""
_VARIED = ("sigma", "alpha", "learning_rate", "beta")


def _find_gaps(case: Case) -> Iterator[Finding]:
    """Compare how far reward falls under weight noise at different ends of training.

    A side is an arm, whose runs may have several settings, and an end, hacked or clean (`collapse.end`). The comparison
    is not defined if a side has fewer runs with its end than the claim requires.
    """
    claim, unit = case.claim, case.claim["unit"]
    for comparison, decisive, winner in asked(case, partial(_winner, claim)):
        sides, sigma = [comparison["of"], comparison["to"]], comparison["sigma"]
        on_map = {arm: _on_map(case.evidence, claim["arms"][arm]) for arm, _ in sides}
        if case.null:
            on_map[winner] = case.stand_in(winner, on_map).records
        # the gaps of the runs with this end, one list for each setting that has any
        ends = []
        for arm, end in sides:
            of_settings = _map(arm, on_map[arm], unit)
            gaps = [[r["jensen"]["gaps"][sigma] for r in runs if collapse.end(r) == end] for runs in of_settings]
            ends.append([of_setting for of_setting in gaps if of_setting])
        counts = " v ".join(
            f"{sum(map(len, end))} of {len(on_map[arm])} runs, of {len(end)} setting{'s' if len(end) != 1 else ''}"
            for (arm, _), end in zip(sides, ends, strict=True)
        )

        label = " - ".join(f"{end} {case.name(arm, arm == winner)}" for arm, end in sides) + f", gap at {sigma}"
        n, kept = min(len(on_map[arm]) for arm, _ in sides), {"bound": float(comparison["above"]), "decisive": decisive}
        finding = hold(label, [], partial(_gap, case, ends, counts), n=n, have=f"{label}: {counts}", **kept)
        yield finding if finding.interval is None else replace(finding, n=finding.interval.n)


def _gap(case: Case, ends: list[list[list[float]]], counts: str, arms: Sequence[Runs]) -> Measured:
    """Compare the gaps of two ends; counts: their numbers of runs in words."""
    if min(sum(map(len, end)) for end in ends) < case.claim["min_seeds"]:
        raise Undecided(f"{counts} end so")
    interval = stats.nested_bootstrap(*ends, n_resamples=case.evidence.resamples)
    context = f"characters ({counts}, detectable {interval.detectable():.2g})"
    return interval, interval.format(percent=False, digits=2), context


def _winner(claim: Claim, comparison: Comparison) -> str | None:
    """Return the arm that falls less under noise; None if both sides are ends of the same arm."""
    (arm, _), (other, _) = comparison["of"], comparison["to"]
    return other if claim["arms"][arm].get("arm") != claim["arms"][other].get("arm") else None


def _on_map(evidence: Evidence, wanted: Mapping[str, Any]) -> list[Record]:
    """Return the runs of a map with any setting, but not those of later seeds, made for another purpose."""
    return [record for record in evidence.records if matches(record, wanted) and judges(record)]


def _map(label: str, records: list[Record], unit: str) -> list[list[Record]]:
    """Group runs by setting and sort them by unit. Raises ValueError if they differ in anything else."""
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
    """Estimate how many settings of a map are safe, and how well sigma and alpha predict collapse on another base.

    A run has collapsed if its right answers fell (`hacking.fell`), whatever its reward. There are two predictors: the
    logarithms of sigma and of alpha sqrt(steps / population), which is the root mean square displacement of ES with
    random fitness. Both are relative to the sigma at which noise alone halves the base's right answers.
    """
    predictors, shares, have, sizes = [], [], [], []
    for label, where in cells(case.claim):
        runs_of = _map(label, _on_map(case.evidence, case.claim["arms"]["treatment"] | where), case.claim["unit"])
        base = case.select(["base"], where)["base"]
        sizes.append([len(each) for each in runs_of])
        have.append(f"{label}: {sum(sizes[-1])} runs of {len(runs_of)} settings, {base.have}")
        if runs_of and base.records:
            selection.check_one_base(label, runs_of[0] + base.records)
            mapped = collapse.collapse_map(sum(runs_of, []), base.records[0])
            predictors.append(np.log([[cell.relative_sigma, cell.displacement] for cell in mapped]))
            shares.append(np.array([cell.collapsed for cell in mapped]))
    n = min(map(len, shares)) if len(shares) == len(have) else 0

    @cache
    def fitted() -> list[Interval]:
        if np.isnan(np.concatenate(predictors)).any():
            raise ValueError("no measured noise halves the right answers of a base")
        area, slopes = stats.logistic_over_groups(predictors, shares, n_resamples=case.evidence.resamples)
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
        require(ended, f"{where}: {value!r} is not an arm and an end: declare both, the end as hacked or clean")

    sigmas = [f"{sigma:g}" for sigma in collapse.JENSEN_SIGMAS]
    comparisons = [{"of": side, "to": side, "sigma": dict.fromkeys(sigmas), "above?": Real}]
    return {"comparisons": comparisons, "also?": comparisons}


GAPS = Rule(_find_gaps, _schema, favours=lambda claim: winners(claim, partial(_winner, claim)))
COLLAPSE = Rule(_find_collapse, arms=("treatment", "base"))


# ---- regimes


def _find_regimes(case: Case) -> Iterator[Finding]:
    if case.null == BASE:  # all lines begin there, so it cannot be the end of one
        return
    declared, favoured = case.claim["arms"], case.rule["favours"]
    names = [*declared]
    if case.null:  # a null replaces the runs of its family
        family = arms.get(case.null).family
        names = [n for n in names if n not in favoured or arms.get(declared[n]["arm"]).family == family]
    selected = case.select(names, favoured=favoured)
    broken = {run["digest"] for name in favoured if case.null and name in selected for run in selected[name].records}
    for decoding in case.rule["decodings"]:
        yield from _of_decoding(case, [*selected.values()], broken, decoding)


def _kind(record: Record, decoding: str) -> str:
    """Return "hacked", "worse" (right answers fell, but the reward did not rise) or "unhacked"."""
    if collapse.end(record, decoding) == "hacked":
        return "hacked"
    right = record["curve"][f"right_{decoding}"]
    return "worse" if hacking.fell(right[-1], right[0]) else "unhacked"


def _of_decoding(case: Case, arms: Sequence[Runs], broken: Collection[str], decoding: str) -> Iterator[Finding]:
    """Make the four comparisons under one decoding; runs whose digest is in `broken` count as hacked."""
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

    def separate() -> Interval:
        return regimes.separation(*barriers, regimes.regimes(barriers[0], n_resamples=resamples))

    def agree() -> Interval:
        return regimes.agreement(*barriers, hacked)

    def basin() -> Interval:
        return regimes.basin(*barriers, hacked)

    def near() -> Interval:
        kl = np.array([run["curve"]["kl"][-1] for run in taken])
        return stats.stratified_bootstrap([kl[hacked]], [kl[~hacked]], n_resamples=case.evidence.resamples)

    def measure(find: Callable[[], Interval], unit: str, _: Sequence[Runs]) -> Measured:
        if barriers is None:
            raise Undecided(missing)
        test = None
        if find is basin:
            test = defined(regimes.within_between, barriers[0], list(hacked), only=True, n_resamples=2000).p
        interval = defined(find)
        text = interval.format() if unit == " points" else interval.format(percent=False, digits=2)
        return interval, text + unit, f"(n = {counts[0]} hacked v {counts[1]} unhacked)", test

    for words, bound, unit, find in (
        ("two clusters, silhouette over that of one", 0.0, "", separate),
        ("two clusters v hacked and unhacked, adjusted Rand index", AGREE, "", agree),
        ("barrier hacked to unhacked - hacked to hacked", 0.0, " points", basin),
        ("KL from the base, hacked - unhacked", 0.0, " nats a completion", near),
    ):
        label, kept = f"{words} {decoding_words(decoding)}", {"decoding": decoding, "bound": bound}
        have = f"{label}: {counts[0]} hacked v {counts[1]} unhacked" if complete else ""
        finding = hold(label, arms, partial(measure, find, unit), n=int(complete), have=have, **kept)
        yield replace(finding, n=min(counts) if barriers else 0)


REGIMES = Rule(_find_regimes, lambda arm: {"decodings": list, "favours": [arm]})
