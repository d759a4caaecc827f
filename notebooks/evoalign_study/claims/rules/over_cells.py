"""Rules "interaction", "regret" and "regrets": sums over the cells of a claim, whose seeds belong together.

Each is a weighted sum of accuracies over cells, of one arm or the difference of two. A `floor` asks besides that an arm
has learned something: its accuracy, mean of the cells, must exceed that of the untrained base by more than a gain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evoalign_lib.analysis import stats
from evoalign_lib.analysis.arrays import require
from evoalign_study.claims import checks, run_scores
from evoalign_study.claims.checks import Schema
from evoalign_study.claims.findings import MISSING, Finding, Measured, decoding_words, hold
from evoalign_study.claims.rules.rule import Rule
from evoalign_study.claims.selection import DECODINGS, Claim, Evidence, Record, Runs, cells, check_one_base, lacking
from evoalign_study.records import accuracy_matrix


class _Term(NamedTuple):
    """A cell of a weighted sum: its label, the fields of its runs' specs, its weight, and its weight in the floor."""

    label: str
    where: dict[str, Any]
    weight: float
    in_floor: float


class _Arm(NamedTuple):
    """An arm's runs in every cell, and the seeds that it has in all of them."""

    name: str
    runs: list[Runs]
    seeds: list[Any]

    def right(self, unit: str, decoding: str) -> NDArray[np.float64]:
        """Return right answers, (cells, seeds, problems)."""
        return _right([[cell[seed] for seed in self.seeds] for cell in _by_seed(self.runs, unit)], decoding)


def _by_seed(cells: Sequence[Runs], unit: str) -> list[dict[Any, Record]]:
    return [{record["spec"][unit]: record for record in cell.records} for cell in cells]


def _right(by_cell: Sequence[Sequence[Record]], decoding: str) -> NDArray[np.float64]:
    """Return right answers (cells, seeds, problems) of as many runs in every cell."""
    right = accuracy_matrix([record for cell in by_cell for record in cell], decoding)
    return right.reshape(len(by_cell), len(by_cell[0]), -1)


def _regret_terms(claim: Claim) -> list[_Term]:
    """Regret: accuracy of the best setting - that of the shared one, mean of cells.

    Runs of one seed belong together; where the best setting is the shared one, they are the same runs.
    """
    rule, found = claim["rule"], cells(claim)
    return [
        _Term(f"{label} {name}", where | {"setting": rule[name]}, sign / len(found), (sign < 0) / len(found))
        for label, where in found
        for name, sign in (("best", 1), ("shared", -1))
    ]


def _contrast_terms(claim: Claim) -> list[_Term]:
    found = cells(claim)
    weights = CONTRASTS[claim["rule"]["contrast"]]([value for _, where in found for value in where.values()])
    return [_Term(*cell, weight, 1 / len(found)) for cell, weight in zip(found, weights, strict=True)]


def _slope(levels: Sequence[float]) -> list[float]:
    """Return the weights of accuracies at these levels in the least-squares slope over their decimal logarithm."""
    x = np.log10(levels) - np.mean(np.log10(levels))
    return list(x / (x @ x))


CONTRASTS: dict[str, Callable[[Sequence[float]], list[float]]] = {
    "slope over log10": _slope,
    "last less first": lambda levels: [-1.0, *[0.0] * (len(levels) - 2), 1.0],
}
"""What a rule "interaction" may take of each arm over the cells: the weight of each cell's accuracy."""
_MORE_IS_BETTER = {"slope over log10": False, "last less first": True}
"""Whether more of a contrast favours an arm: a small slope is little dependence on what the cells vary."""


def _find(claim: Claim, evidence: Evidence) -> list[Finding]:
    """Find the difference of two arms' sums, or that of each arm, under each decoding, and the floor."""
    rule = claim["rule"]
    terms = _contrast_terms(claim) if "contrast" in rule else _regret_terms(claim)
    if "bounds" in rule:
        asked = [([arm], side, bound[side]) for arm, bound in rule["bounds"].items() for side in bound]
    else:
        asked = [([rule["of"], rule["to"]], "above", rule["above"])]
    return [
        _sum(claim, evidence, arms, terms, decoding, float(bound), side)
        for arms, side, bound in asked
        if not evidence.null or set(arms) & set(_winners(claim))
        for decoding in rule.get("decodings", (rule["decoding"],))
    ] + _floor(claim, evidence, terms)


def _arm(claim: Claim, evidence: Evidence, arm: str, terms: list[_Term]) -> _Arm:
    favoured = arm if arm in _winners(claim) else None
    pair = [arm, *(name for name in _compared(claim) if name != arm)]
    runs = [evidence.select_pair(claim, pair, term.where, favoured)[0] for term in terms]
    seeds = sorted(set.intersection(*map(set, _by_seed(runs, claim["unit"]))))
    return _Arm(evidence.name(claim, arm, favoured is not None), runs, seeds)


def _sum(
    claim: Claim, evidence: Evidence, names: list[str], terms: list[_Term], decoding: str, bound: float, side: str
) -> Finding:
    """Find a weighted sum of accuracies over cells, or its difference between two arms, each seed's in one row."""
    rule, unit = claim["rule"], claim["unit"]
    arms = [_arm(claim, evidence, name, terms) for name in names]
    compared = f"{rule.get('contrast', 'regret')}, {' - '.join(arm.name for arm in arms)}"
    label = f"{compared}, {decoding_words(decoding)}" if "decodings" in rule else compared
    by_cell = [[arm.runs[i] for arm in arms] for i in range(len(terms))]
    have = "; ".join(
        f"{term.label}: {', '.join(runs.have for runs in cell)}" for term, cell in zip(terms, by_cell, strict=True)
    )
    kept = {"decoding": decoding, "compared": compared, "bound": bound, "side": side}
    kept["lacks"] = lacking(runs for arm in arms for runs in arm.runs)
    for i, arm in enumerate(arms):
        if arm.seeds and "decodings" in rule:
            cells_ = _by_seed(arm.runs, unit)
            has = run_scores.MEASURES["test"].has
            measured = [seed for seed in arm.seeds if all(has(cell[seed], decoding) for cell in cells_)]
            if len(measured) < claim["min_seeds"]:
                context = f"({len(measured)} of {len(arm.seeds)} seeds of {arm.name} were decoded so)"
                kept |= {"decisive": False, "value": MISSING, "context": context, "lacks": ""}
                return Finding(label, 0, have, None, **kept)
            arms[i] = arm._replace(seeds=measured)
        if not arm.seeds:
            return Finding(label, 0, have, None, **kept)
    for term, cell in zip(terms, by_cell, strict=True):
        check_one_base(term.label, [record for runs in cell for record in runs.records])

    def measure() -> Measured:
        right = [arm.right(unit, decoding) for arm in arms]
        sums = [np.tensordot([term.weight for term in terms], each, axes=1) for each in right]
        interval = stats.crossed_bootstrap(*sums, n_resamples=evidence.resamples)
        told = []
        for arm, each in zip(arms, right, strict=True):
            means = zip(terms, each.mean(axis=(1, 2)), strict=True)
            words = ", ".join(f"{term.label} {100 * accuracy:.1f} %" for term, accuracy in means)
            told.append(f"{arm.name} {words}" if len(arms) > 1 else words)
        context = f"(n = {interval.n}, detectable {100 * interval.detectable():.1f}); {'; '.join(told)}"
        return interval, f"{interval.format()} points", context

    return hold(label, min(len(arm.seeds) for arm in arms), have, measure, **kept)


def _floor(claim: Claim, evidence: Evidence, terms: list[_Term]) -> list[Finding]:
    """Find what an arm has learned, mean of cells, above the untrained base; nothing where no floor is declared."""
    floor = claim["rule"].get("floor")
    if floor is None or (evidence.null and floor["of"] not in _winners(claim)):
        return []
    terms = [term for term in terms if term.in_floor]
    arm = _arm(claim, evidence, floor["of"], terms)
    bases = [evidence.base_of(cell.records[0]) if cell.records else None for cell in arm.runs]
    have = "; ".join(f"{term.label}: {cell.have}" for term, cell in zip(terms, arm.runs, strict=True))
    n = 0 if None in bases else len(arm.seeds)
    if not n:
        have += f"; {sum(base is not None for base in bases)} of base"

    def measure() -> Measured:
        weights, decoding = [term.in_floor for term in terms], claim["rule"]["decoding"]
        both = arm.right(claim["unit"], decoding), _right([[base] for base in bases], decoding)
        summed, (baseline,) = (np.tensordot(weights, right, axes=1) for right in both)
        interval = stats.crossed_bootstrap(summed, baseline, n_resamples=evidence.resamples)
        context = f"from {100 * baseline.mean():.1f} % (n = {interval.n}, detectable {100 * interval.detectable():.1f})"
        return interval, f"{interval.format()} points", context

    return [hold(f"gain over {floor['to']}, {arm.name}", n, have, measure, bound=float(floor["above"]))]


def _compared(claim: Claim) -> list[str]:
    """Return the arms that a rule compares."""
    rule = claim["rule"]
    return list(rule["bounds"]) if "bounds" in rule else [rule["of"], rule["to"]]


def _winners(claim: Claim) -> tuple[str, ...]:
    """Return the arms that are favoured: less regret is better, and of a contrast what is said of it."""
    rule = claim["rule"]
    if "bounds" in rule:
        return tuple(arm for arm, bound in rule["bounds"].items() if "below" in bound)
    return (rule["of"] if _MORE_IS_BETTER.get(rule.get("contrast"), False) else rule["to"],)


def _under_other(claim: Claim, decoding: str) -> Claim | None:
    """Return the claim with its difference, or its regrets, under another decoding; the floor is declared under one."""
    rule = claim["rule"]
    if decoding in rule.get("decodings", (rule["decoding"],)):
        return None
    kept = {name: value for name, value in rule.items() if name != "floor"}
    return claim | {"rule": kept | {"decodings": (decoding,)}}


def _check(claim: Claim) -> None:
    rule, name = claim["rule"], f"claim {claim['id']}"
    several = sum(map(len, claim.get("cells", {}).values())) > 1
    require(several, f"{name}: a rule of kind {rule['kind']} is made over two cells or more")
    for arm, bound in rule.get("bounds", {}).items():
        require(len(bound) == 1, f"{name}: regret of {arm}: declare one bound, that it lies below or above")


def _rule(bounded: bool = False, **own: Schema) -> Rule:
    """Make a kind of rule with a floor, of the difference of two arms, or of each one's own bound."""

    def schema(arm: tuple[str, ...]) -> dict[str, Schema]:
        of_two = {"of": arm, "to": arm, "above": Real}
        kept = {"decoding": DECODINGS, "floor?": of_two} | own
        bound = checks.some(("below", "above"), Real)
        return kept | ({"bounds": checks.some(arm, bound)} if bounded else of_two | {"decodings?": list})

    return Rule(_find, schema, check=_check, favours=_winners, under=_under_other)


_SETTINGS = {"shared": checks.setting, "best": checks.setting}
INTERACTION = _rule(contrast=CONTRASTS)
REGRET = _rule(**_SETTINGS)
REGRETS = _rule(bounded=True, **_SETTINGS)
