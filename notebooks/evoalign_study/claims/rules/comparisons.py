"""Rules "compare" and "interval_above": two arms, cell by cell, by means, rates or spreads.

A comparison takes a difference of accuracies over seeds and problems, or of one score a run over seeds. A rule that
declares `decodings` makes each comparison under each of them; a decoding that too few runs were measured under is named
and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import exp, inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evoalign_lib.analysis import stats
from evoalign_lib.analysis.stats import Interval
from evoalign_study.claims import measures
from evoalign_study.claims.checks import check_keys, check_named
from evoalign_study.claims.findings import MISSING, Finding, Undecided, defined
from evoalign_study.claims.rules.rule import Rule
from evoalign_study.claims.selection import DECODINGS, Claim, Evidence, Record, Runs, cells, check_one_base, lacking

_Comparison = Mapping[str, Any]
_Compared = tuple[Interval, float | None, str, str]
"""The interval, the p-value of the rule's own test or None, and value and context in words, {n} for the counts."""


def _find(claim: Claim, evidence: Evidence) -> list[Finding]:
    """Find, in each cell, every declared comparison, and those that are only reported."""
    findings = []
    for cell, where in cells(claim):
        for comparison, decisive in declared_comparisons(claim["rule"]):
            winner = favoured(comparison)
            if evidence.null and not (decisive and winner):
                continue
            joint = "over" if comparison.get("by") == "spread" else "-"
            of, to = (evidence.name(claim, comparison[side], comparison[side] == winner) for side in ("of", "to"))
            arms = f"{cell} {of} {joint} {to}".strip()
            decodings = claim["rule"].get("decodings", ()) if decisive else ()
            for each in _under(comparison, decodings):
                label = f"{arms}, {measures.words(each['measure'])}"
                compared = f"{arms}, {measures.words(each['measure'], decoding=False)}"
                findings.append(_compare(claim, evidence, each, where, label, compared, decisive, bool(decodings)))
        if "trend" in claim["rule"] and not evidence.null:
            findings += _trend(claim, evidence, where)
    return findings


def _find_above(claim: Claim, evidence: Evidence) -> list[Finding]:
    """Find, in each cell, the mean difference of test accuracy between treatment and comparison."""
    comparison, decodings = _above(claim), claim["rule"].get("decodings", ())
    return [
        _compare(
            claim,
            evidence,
            each,
            where,
            f"{cell} {measures.words(each['measure'])}".strip() if decodings else cell,
            f"{cell} {measures.words(each['measure'], decoding=False)}".strip(),
            among_decodings=bool(decodings),
        )
        for cell, where in cells(claim)
        for each in _under(comparison, decodings)
    ]


def _above(claim: Claim) -> _Comparison:
    return {"measure": {"test": claim["rule"]["decoding"]}, "of": "treatment", "to": "comparison", "above": 0}


def declared_comparisons(rule: Mapping[str, Any]) -> list[tuple[_Comparison, bool]]:
    """Return the comparisons of a rule and whether each is decisive; those only reported are held against 0."""
    reported = [(comparison | {"above": 0}, False) for comparison in rule.get("also", ())]
    return [(comparison, True) for comparison in rule.get("comparisons", ())] + reported


def favoured(comparison: _Comparison) -> str | None:
    """Return the arm that wins a comparison; None where nobody does, as in a match.

    >>> favoured({"measure": {"drawdown": "greedy"}, "of": "grpo", "to": "es", "above": 0})
    'es'
    """
    by = comparison.get("by", "difference")
    if by == "equivalence":
        return None
    more = by != "spread" and measures.MEASURES[measures.kind_of(comparison["measure"])].more_is_better
    return comparison["of"] if more == ("above" in comparison) else comparison["to"]


def _favours(claim: Claim) -> tuple[str, ...]:
    winners = [favoured(comparison) for comparison, decisive in declared_comparisons(claim["rule"]) if decisive]
    return tuple(dict.fromkeys(winner for winner in winners if winner))


def _under(comparison: _Comparison, decodings: tuple[str, ...]) -> list[_Comparison]:
    """Return a comparison under each decoding, or as it is declared where there are none."""
    measure = comparison["measure"]
    kind = measures.kind_of(measure)
    return [comparison | {"measure": measure | {kind: each}} for each in decodings or (measure[kind],)]


def _under_other(claim: Claim, decoding: str) -> Claim | None:
    """Return the claim with the decisive comparisons that it does not make under a decoding, made under it."""
    rule, found = claim["rule"], []
    comparisons = [comparison for comparison, decisive in declared_comparisons(rule) if decisive]
    declared = [each for comparison in comparisons for each in _under(comparison, rule.get("decodings", ()))]
    for comparison in comparisons:
        (other,) = _under(comparison, (decoding,))
        if other not in [*declared, *found]:
            found.append(other)
    return claim | {"rule": {"kind": rule["kind"], "comparisons": found, "decodings": (decoding,)}} if found else None


def _above_under_other(claim: Claim, decoding: str) -> Claim | None:
    rule = claim["rule"]
    return None if decoding == rule["decoding"] else claim | {"rule": rule | {"decodings": (decoding,)}}


def _compare(
    claim: Claim,
    evidence: Evidence,
    comparison: _Comparison,
    where: Mapping[str, Any],
    label: str,
    compared: str = "",
    decisive: bool = True,
    among_decodings: bool = False,
) -> Finding:
    """Find one comparison in one cell."""
    pair = comparison["of"], comparison["to"]
    selected = evidence.select_pair(claim, pair, where, favoured(comparison))
    decoding = measures.decoding_of(comparison["measure"])
    side = next((side for side in ("above", "below") if side in comparison), "within")
    kept = {"bound": float(comparison.get(side, 0)), "side": side, "decisive": decisive}
    kept |= {"decoding": decoding, "compared": compared}
    if among_decodings and all(found.records for found in selected):
        measured = [_measured(found, comparison["measure"]) for found in selected]
        if any(len(found.records) < _least(claim, found) for found in measured):
            have = " v ".join(
                f"{len(found.records)} of {of.have}" for found, of in zip(measured, selected, strict=True)
            )
            kept |= {"decisive": False, "value": MISSING, "context": f"({have} were decoded so)"}
            return Finding(label, 0, have, None, **kept)
        selected = measured
    arms = [found.records for found in selected]
    have = f"{label}: {', '.join(found.have for found in selected)}"
    if not all(arms):
        return Finding(label, 0, have, None, lacks=lacking(selected), **kept)
    check_one_base(label, arms[0] + arms[1])
    fixed = _is_fixed(claim, arms[1])
    n = len(arms[0]) if fixed else min(map(len, arms))
    counts = f"n = {n}" if fixed or len(arms[0]) == len(arms[1]) else f"n = {len(arms[0])} v {len(arms[1])}"
    try:
        found = COMPARED[comparison.get("by", "difference")](claim, evidence, comparison, arms)
    except Undecided as error:
        return Finding(label, n, have, None, value="not defined", context=f"({error})", **kept)
    interval, test, value, context = found
    return Finding(label, n, have, interval, test=test, value=value, context=context.format(n=counts), **kept)


def _measured(found: Runs, measure: Mapping[str, Any]) -> Runs:
    """Return the runs that were measured under the decoding of a measure."""
    has, decoding = measures.MEASURES[measures.kind_of(measure)].has, measures.decoding_of(measure)
    return found._replace(records=[record for record in found.records if has(record, decoding)])


def _least(claim: Claim, found: Runs) -> int:
    """Return how many of an arm's runs must be measured: of a fixed model, one."""
    return 1 if found.records and _is_fixed(claim, found.records) else claim["min_seeds"]


def _is_fixed(claim: Claim, arm: list[Record]) -> bool:
    """Return whether an arm is one model without seed, which moves with the problems alone and needs no replicates."""
    return claim["unit"] not in arm[0]["spec"]


def _difference(claim: Claim, evidence: Evidence, comparison: _Comparison, arms: list[list[Record]]) -> _Compared:
    """Compare means: over seeds and problems where there are results on each problem, otherwise over seeds."""
    measure, resampled = comparison["measure"], {"n_resamples": evidence.resamples}
    matrices = measures.problems(evidence, claim, measure, arms)
    if matrices is not None:
        scores = [matrix.mean(axis=1) for matrix in matrices]
        matrix, baseline = matrices
        interval = stats.crossed_bootstrap(matrix, baseline[0] if _is_fixed(claim, arms[1]) else baseline, **resampled)
    else:
        scores = measures.scores(evidence, claim, measure, arms)
        interval = defined(stats.stratified_bootstrap, [scores[0]], [scores[1]], **resampled)
    test = (
        defined(stats.mann_whitney, *scores, n_resamples=2 * evidence.resamples)
        if comparison.get("p") == "mann_whitney"
        else None
    )
    context = _context(interval, scores[1], measure)
    if "right" in measure:
        context = f"{context[:-1]}, {len(scores[0])} v {len(scores[1])} get there)"
    return interval, test, f"{interval.format()} points", context


def _rate(claim: Claim, evidence: Evidence, comparison: _Comparison, arms: list[list[Record]]) -> _Compared:
    """Compare shares of runs: their difference with Newcombe's interval, and Fisher's test."""
    found = measures.scores(evidence, claim, comparison["measure"], arms)
    counts = [(int(values.sum()), len(values)) for values in found]
    interval = stats.rate_difference(*counts[0], *counts[1])
    of, to = (f"{hits} of {n}" for hits, n in counts)
    context = f"from {to} to {of} ({{n}}, detectable {100 * interval.detectable():.0f})"
    return interval, stats.fisher(*counts[0], *counts[1]), f"{interval.format()} points", context


def _equivalence(claim: Claim, evidence: Evidence, comparison: _Comparison, arms: list[list[Record]]) -> _Compared:
    """Compare means by two one-sided tests, within the margin of the claim; seeds and problems as in `_difference`."""
    measure = comparison["measure"]
    matrices = measures.problems(evidence, claim, measure, arms)
    if matrices is not None:
        scores = [matrix.mean(axis=1) for matrix in matrices]
        found = defined(stats.equivalence, *matrices, claim["margin"], n_resamples=evidence.resamples)
    else:
        scores = measures.scores(evidence, claim, measure, arms)
        found = defined(stats.welch_equivalence, *scores, claim["margin"])
    value = f"{found.interval.format()} points (90 % interval)"
    if abs(found.interval.value) >= claim["margin"]:
        value += f", {comparison['of' if found.interval.value > 0 else 'to']} ahead"
    return found.interval, found.p, value, _context(found.interval, scores[1], measure)


def _spread(claim: Claim, evidence: Evidence, comparison: _Comparison, arms: list[list[Record]]) -> _Compared:
    """Compare standard deviations over seeds: the logarithm of their ratio."""
    scores = measures.scores(evidence, claim, comparison["measure"], arms)
    still = [np.ptp(values) == 0 for values in scores]
    if evidence.null and still == [True, False]:  # a model that never moves has the least spread there can be
        return Interval(-inf, -inf, -inf, min(map(len, scores))), None, "0", "({n}, no spread at all)"
    interval = defined(stats.log_std_ratio, *scores)
    ratio, low, high = (f"{exp(x):.2f}" for x in (interval.value, interval.low, interval.high))
    of, to = (f"{100 * values.std(ddof=1):.2f}" for values in scores)
    context = f"from {to} to {of} points ({{n}}, detectable {exp(-interval.detectable()):.2f})"
    return interval, None, f"{ratio} [{low}, {high}]", context


COMPARED: dict[str, Callable[[Claim, Evidence, _Comparison, list[list[Record]]], _Compared]] = {
    "difference": _difference,
    "equivalence": _equivalence,
    "spread": _spread,
    "rate": _rate,
}
"""How two arms may be compared."""


def _context(interval: Interval, other: NDArray, measure: Mapping[str, Any]) -> str:
    unit = measures.MEASURES[measures.kind_of(measure)].unit
    return f"from {100 * other.mean():.1f}{unit} ({{n}}, detectable {100 * interval.detectable():.1f})"


def _trend(claim: Claim, evidence: Evidence, where: Mapping[str, Any]) -> list[Finding]:
    """Report the trend of greedy test accuracy over arms in their declared order; nothing where one has no runs."""
    names = claim["rule"]["trend"]
    arms = [evidence.select(claim, arm, where).records for arm in names]
    if min(map(len, arms)) < 2:
        return []
    scores = measures.scores(evidence, claim, {"test": "greedy"}, arms)
    rise, fall = (stats.jonckheere(each, n_resamples=2 * evidence.resamples) for each in (scores, scores[::-1]))
    means = ", ".join(f"{name} {100 * values.mean():.1f} %" for name, values in zip(names, scores, strict=True))
    value = f"{means}; Jonckheere's p {rise:.2g} of a rise, {fall:.2g} of a fall"
    return [Finding("trend", min(map(len, arms)), "", None, value=value, decisive=False)]


def _check(claim: Claim) -> None:
    rule, name = claim["rule"], f"claim {claim['id']}"
    check_decodings(claim)
    named = list(rule.get("trend", ()))
    for comparison, _ in declared_comparisons(rule):
        _check_comparison(name, comparison, claim["margin"])
        named += [comparison[side] for side in ("of", "to")]
    check_named(claim, named)


def check_decodings(claim: Claim) -> None:
    """Raise ValueError, naming the claim, where the decodings of a rule are unknown or repeated."""
    decodings = claim["rule"].get("decodings")
    if decodings is not None and (len(decodings) < 2 or not set(decodings) <= set(DECODINGS)):
        raise ValueError(f"claim {claim['id']}: decodings {decodings}: declare two or more of {', '.join(DECODINGS)}")


def _check_comparison(name: str, comparison: _Comparison, margin: float) -> None:
    check_keys(f"{name}, comparison", comparison, ("measure", "of", "to"), ("by", "above", "below", "p"))
    measures.check_measure(name, comparison["measure"])
    by = comparison.get("by", "difference")
    if by not in COMPARED:
        raise ValueError(f"{name}: arms cannot be compared by {by!r}; known: {', '.join(COMPARED)}")
    sides = sum(side in comparison for side in ("above", "below"))
    if by == "equivalence" and (sides or not margin > 0):
        raise ValueError(f"{name}: an equivalence lies within the claim's margin: declare a positive one, no bound")
    if by != "equivalence" and sides != 1:
        raise ValueError(f"{name}: a comparison lies above or below a value: declare one of the two")
    if comparison.get("p", "mann_whitney") != "mann_whitney" or ("p" in comparison and by != "difference"):
        raise ValueError(f"{name}: p must be 'mann_whitney', of a difference, or left to the interval")
    kind = measures.kind_of(comparison["measure"])
    if (by == "rate") != measures.MEASURES[kind].rate:
        raise ValueError(f"{name}: hacked runs are compared by rate, and nothing else is")


COMPARE = Rule(
    _find, ("comparisons",), ("also", "trend", "decodings"), check=_check, favours=_favours, under=_under_other
)
INTERVAL_ABOVE = Rule(
    _find_above,
    ("decoding",),
    arms=("treatment", "comparison"),
    favours=lambda claim: ("treatment",),
    under=_above_under_other,
)
