"""Rules "compare" and "interval_above": two arms, cell by cell, by means, rates or spreads.

A comparison takes a difference of accuracies over seeds and problems, or of one score a run over seeds. A rule that
declares `decodings` makes each comparison under each of them; a decoding that too few runs were measured under is named
and decides nothing. "interval_above" is one comparison, of test accuracy, and names its findings by their cells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import exp, inf
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evoalign_lib.analysis import stats
from evoalign_lib.analysis.arrays import require
from evoalign_lib.analysis.stats import Interval
from evoalign_study.claims import run_scores
from evoalign_study.claims.checks import Schema
from evoalign_study.claims.findings import MISSING, Finding, Measured, defined, hold
from evoalign_study.claims.rules.rule import Rule
from evoalign_study.claims.selection import DECODINGS, Claim, Evidence, Record, Runs, cells, check_one_base, lacking

_Comparison = Mapping[str, Any]
_Arms = list[list[Record]]
_ABOVE = "interval_above"


def _find(claim: Claim, evidence: Evidence) -> list[Finding]:
    """Find, in each cell, every declared comparison, and those that are only reported."""
    findings, rule = [], claim["rule"]
    for cell, where in cells(claim):
        for comparison, decisive in declared_comparisons(rule):
            winner = favoured(comparison)
            if evidence.null and not (decisive and winner):
                continue
            joint = "over" if comparison.get("by") == "spread" else "-"
            of, to = (evidence.name(claim, comparison[side], comparison[side] == winner) for side in ("of", "to"))
            arms = "" if rule["kind"] == _ABOVE else f"{of} {joint} {to},"
            decodings = rule.get("decodings", ()) if decisive else ()
            for each in _under(comparison, decodings):
                label, compared = (
                    " ".join(part for part in (cell, arms, run_scores.words(each["measure"], told)) if part)
                    for told in (True, False)
                )
                if not arms and not decodings:
                    label = cell
                findings.append(_compare(claim, evidence, each, where, label, compared, decisive, bool(decodings)))
        if "trend" in rule and not evidence.null:
            findings += _trend(claim, evidence, where)
    return findings


def declared_comparisons(rule: Mapping[str, Any]) -> list[tuple[_Comparison, bool]]:
    """Return the comparisons of a rule and whether each is decisive; those only reported are held against 0."""
    declared = rule.get("comparisons", ())
    if rule["kind"] == _ABOVE and not declared:
        declared = [{"measure": {"test": rule["decoding"]}, "of": "treatment", "to": "comparison", "above": 0}]
    reported = [(comparison | {"above": 0}, False) for comparison in rule.get("also", ())]
    return [(comparison, True) for comparison in declared] + reported


def winners(claim: Claim, favoured: Callable[[_Comparison], str | None]) -> tuple[str, ...]:
    """Return the arms that win the decisive comparisons of a rule, each once."""
    names = [favoured(comparison) for comparison, decisive in declared_comparisons(claim["rule"]) if decisive]
    return tuple(dict.fromkeys(name for name in names if name))


def favoured(comparison: _Comparison) -> str | None:
    """Return the arm that wins a comparison; None where nobody does, as in a match.

    >>> favoured({"measure": {"drawdown": "greedy"}, "of": "grpo", "to": "es", "above": 0})
    'es'
    """
    by = comparison.get("by", "difference")
    if by == "equivalence":
        return None
    more = by != "spread" and run_scores.measure_of(comparison["measure"]).more_is_better
    return comparison["of"] if more == ("above" in comparison) else comparison["to"]


def _under(comparison: _Comparison, decodings: Sequence[str]) -> list[_Comparison]:
    """Return a comparison under each decoding, or as it is declared where there are none."""
    measure = comparison["measure"]
    kind = run_scores.kind_of(measure)
    return [comparison | {"measure": measure | {kind: each}} for each in decodings or (measure[kind],)]


def _under_other(claim: Claim, decoding: str) -> Claim | None:
    """Return the claim with the decisive comparisons that it does not make under a decoding, made under it."""
    rule = claim["rule"]
    comparisons = [comparison for comparison, decisive in declared_comparisons(rule) if decisive]
    known = [each for comparison in comparisons for each in _under(comparison, rule.get("decodings", ()))]
    others: list[_Comparison] = []
    for comparison in comparisons:
        others += [each for each in _under(comparison, (decoding,)) if each not in [*known, *others]]
    rule = {"kind": rule["kind"], "comparisons": others, "decodings": (decoding,)}
    return claim | {"rule": rule} if others else None


def _compare(
    claim: Claim,
    evidence: Evidence,
    comparison: _Comparison,
    where: Mapping[str, Any],
    label: str,
    compared: str,
    decisive: bool,
    among_decodings: bool,
) -> Finding:
    """Find one comparison in one cell."""
    measure = comparison["measure"]
    selected = evidence.select_pair(claim, (comparison["of"], comparison["to"]), where, favoured(comparison))
    side = next((side for side in ("above", "below") if side in comparison), "within")
    kept = {"bound": float(comparison.get(side, 0)), "side": side, "decisive": decisive, "compared": compared}
    kept["decoding"] = run_scores.decoding_of(measure)
    if among_decodings and all(runs.records for runs in selected):
        measured = [_measured(runs, measure) for runs in selected]
        if any(len(runs.records) < _least(claim, runs) for runs in measured):
            pairs = zip(measured, selected, strict=True)
            have = " v ".join(f"{len(runs.records)} of {all_.have}" for runs, all_ in pairs)
            kept |= {"decisive": False, "value": MISSING, "context": f"({have} were decoded so)"}
            return Finding(label, 0, have, None, **kept)
        selected = measured
    arms = [runs.records for runs in selected]
    have = f"{label}: {', '.join(runs.have for runs in selected)}"
    if not all(arms):
        return Finding(label, 0, have, None, lacks=lacking(selected), **kept)
    check_one_base(label, arms[0] + arms[1])
    fixed = _is_fixed(claim, arms[1])
    n = len(arms[0]) if fixed else min(map(len, arms))
    counts = f"n = {n}" if fixed or len(arms[0]) == len(arms[1]) else f"n = {len(arms[0])} v {len(arms[1])}"
    by = COMPARED[comparison.get("by", "difference")]
    finding = hold(label, n, have, partial(by, claim, evidence, comparison, arms), **kept)
    return finding if finding.interval is None else replace(finding, context=finding.context.format(n=counts))


def _measured(found: Runs, measure: Mapping[str, Any]) -> Runs:
    """Return the runs that were measured under the decoding of a measure."""
    has, decoding = run_scores.measure_of(measure).has, run_scores.decoding_of(measure)
    return found._replace(records=[record for record in found.records if has(record, decoding)])


def _least(claim: Claim, found: Runs) -> int:
    """Return how many of an arm's runs must be measured: of a fixed model, one."""
    return 1 if found.records and _is_fixed(claim, found.records) else claim["min_seeds"]


def _is_fixed(claim: Claim, arm: list[Record]) -> bool:
    """Return whether an arm is one model without seed, which moves with the problems alone and needs no replicates."""
    return claim["unit"] not in arm[0]["spec"]


def _difference(claim: Claim, evidence: Evidence, comparison: _Comparison, arms: _Arms) -> Measured:
    """Compare means: over seeds and problems where there are results on each problem, otherwise over seeds."""
    measure, resampled = comparison["measure"], {"n_resamples": evidence.resamples}
    matrices = run_scores.problems(evidence, claim, measure, arms)
    if matrices is not None:
        scores = [matrix.mean(axis=1) for matrix in matrices]
        matrix, baseline = matrices
        interval = stats.crossed_bootstrap(matrix, baseline[0] if _is_fixed(claim, arms[1]) else baseline, **resampled)
    else:
        scores = run_scores.scores(evidence, claim, measure, arms)
        interval = defined(stats.stratified_bootstrap, [scores[0]], [scores[1]], **resampled)
    test = defined(stats.mann_whitney, *scores, n_resamples=2 * evidence.resamples) if "p" in comparison else None
    context = _context(interval, scores[1], measure)
    if "right" in measure:
        context = f"{context[:-1]}, {len(scores[0])} v {len(scores[1])} get there)"
    return interval, f"{interval.format()} points", context, test


def _rate(claim: Claim, evidence: Evidence, comparison: _Comparison, arms: _Arms) -> Measured:
    """Compare shares of runs: their difference with Newcombe's interval, and Fisher's test."""
    found = run_scores.scores(evidence, claim, comparison["measure"], arms)
    counts = [(int(values.sum()), len(values)) for values in found]
    interval = stats.rate_difference(*counts[0], *counts[1])
    of, to = (f"{hits} of {n}" for hits, n in counts)
    context = f"from {to} to {of} ({{n}}, detectable {100 * interval.detectable():.0f})"
    return interval, f"{interval.format()} points", context, stats.fisher(*counts[0], *counts[1])


def _equivalence(claim: Claim, evidence: Evidence, comparison: _Comparison, arms: _Arms) -> Measured:
    """Compare means by two one-sided tests, within the margin of the claim; seeds and problems as in `_difference`."""
    measure = comparison["measure"]
    matrices = run_scores.problems(evidence, claim, measure, arms)
    if matrices is not None:
        scores = [matrix.mean(axis=1) for matrix in matrices]
        found = defined(stats.equivalence, *matrices, claim["margin"], n_resamples=evidence.resamples)
    else:
        scores = run_scores.scores(evidence, claim, measure, arms)
        found = defined(stats.welch_equivalence, *scores, claim["margin"])
    value = f"{found.interval.format()} points (90 % interval)"
    if abs(found.interval.value) >= claim["margin"]:
        value += f", {comparison['of' if found.interval.value > 0 else 'to']} ahead"
    return found.interval, value, _context(found.interval, scores[1], measure), found.p


def _spread(claim: Claim, evidence: Evidence, comparison: _Comparison, arms: _Arms) -> Measured:
    """Compare standard deviations over seeds: the logarithm of their ratio."""
    scores = run_scores.scores(evidence, claim, comparison["measure"], arms)
    still = [np.ptp(values) == 0 for values in scores]
    if evidence.null and still == [True, False]:  # a model that never moves has the least spread there can be
        return Interval(-inf, -inf, -inf, min(map(len, scores))), "0", "({n}, no spread at all)"
    interval = defined(stats.log_std_ratio, *scores)
    ratio, low, high = (f"{exp(x):.2f}" for x in (interval.value, interval.low, interval.high))
    of, to = (f"{100 * values.std(ddof=1):.2f}" for values in scores)
    context = f"from {to} to {of} points ({{n}}, detectable {exp(-interval.detectable()):.2f})"
    return interval, f"{ratio} [{low}, {high}]", context


COMPARED: dict[str, Callable[[Claim, Evidence, _Comparison, _Arms], Measured]] = {
    "difference": _difference,
    "equivalence": _equivalence,
    "spread": _spread,
    "rate": _rate,
}
"""How two arms may be compared."""


def _context(interval: Interval, other: NDArray, measure: Mapping[str, Any]) -> str:
    unit = run_scores.measure_of(measure).unit
    return f"from {100 * other.mean():.1f}{unit} ({{n}}, detectable {100 * interval.detectable():.1f})"


def _trend(claim: Claim, evidence: Evidence, where: Mapping[str, Any]) -> list[Finding]:
    """Report the trend of greedy test accuracy over arms in their declared order; nothing where one has no runs."""
    names = claim["rule"]["trend"]
    arms = [evidence.select(claim, arm, where).records for arm in names]
    if min(map(len, arms)) < 2:
        return []
    scores = run_scores.scores(evidence, claim, {"test": "greedy"}, arms)
    rise, fall = (stats.jonckheere(each, n_resamples=2 * evidence.resamples) for each in (scores, scores[::-1]))
    means = ", ".join(f"{name} {100 * values.mean():.1f} %" for name, values in zip(names, scores, strict=True))
    value = f"{means}; Jonckheere's p {rise:.2g} of a rise, {fall:.2g} of a fall"
    return [Finding("trend", min(map(len, arms)), "", None, value=value, decisive=False)]


def _schema(arm: tuple[str, ...]) -> dict[str, Schema]:
    compared = {"measure": run_scores.check_measure, "of": arm, "to": arm, "by?": COMPARED}
    comparisons = [compared | {"above?": Real, "below?": Real, "p?": ("mann_whitney",)}]
    return {"comparisons": comparisons, "also?": comparisons, "trend?": [arm], "decodings?": list}


def _check(claim: Claim) -> None:
    name = f"claim {claim['id']}"
    for comparison, _ in declared_comparisons(claim["rule"]):
        by, sides = comparison.get("by", "difference"), len({"above", "below"} & comparison.keys())
        if by == "equivalence":
            matches = claim["margin"] > 0 and not sides
            require(matches, f"{name}: an equivalence lies within the claim's margin: declare a positive one, no bound")
        else:
            require(sides == 1, f"{name}: a comparison lies above or below a value: declare one of the two")
        own = "p" not in comparison or by == "difference"
        require(own, f"{name}: p is of a difference, or left to the interval")
        rate = run_scores.measure_of(comparison["measure"]).rate
        require((by == "rate") == rate, f"{name}: hacked runs are compared by rate, and nothing else is")


def _favours(claim: Claim) -> tuple[str, ...]:
    return winners(claim, favoured)


COMPARE = Rule(_find, _schema, check=_check, favours=_favours, under=_under_other)
INTERVAL_ABOVE = Rule(
    _find,
    lambda arm: {"decoding": DECODINGS},
    arms=("treatment", "comparison"),
    favours=_favours,
    under=_under_other,
)
