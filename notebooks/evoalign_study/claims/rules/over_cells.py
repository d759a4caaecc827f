"""Rules "interaction", "regret" and "regrets": sums over the cells of a claim, whose seeds belong together.

A `floor` asks besides that an arm has learned something: its accuracy, mean of the cells, must exceed that of the
untrained base by more than a given gain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evoalign_lib.analysis import stats
from evoalign_study.claims import measures
from evoalign_study.claims.checks import check_keys, check_named, check_setting
from evoalign_study.claims.findings import MISSING, Finding, decoding_words
from evoalign_study.claims.rules.comparisons import check_decodings
from evoalign_study.claims.rules.rule import Rule
from evoalign_study.claims.selection import Claim, Evidence, Record, cells, check_one_base, lacking
from evoalign_study.records import accuracy_matrix


class _Term(NamedTuple):
    """A cell of a weighted sum: its label, the fields of its runs' specs, its weight, and its weight in the floor."""

    label: str
    where: dict[str, Any]
    weight: float
    in_floor: float


def _find_regret(claim: Claim, evidence: Evidence) -> list[Finding]:
    """Find the difference of two arms' regret: accuracy of the best setting - that of the shared one, mean of cells.

    Runs of one seed belong together; where the best setting is the shared one, they are the same runs.
    """
    return _contrast(claim, evidence, _regret_terms(claim), "regret")


def _find_regrets(claim: Claim, evidence: Evidence) -> list[Finding]:
    """Find the regret of each arm by itself, which should lie below or above a bound of its own."""
    found = []
    for arm, bound in claim["rule"]["bounds"].items():
        if evidence.null and arm not in _winners(claim):
            continue
        (side,) = bound
        for decoding in claim["rule"].get("decodings", (claim["rule"]["decoding"],)):
            terms = _regret_terms(claim)
            found.append(_of_arm(claim, evidence, arm, terms, "regret", decoding, float(bound[side]), side))
    return found + _floor(claim, evidence, _regret_terms(claim))


def _regret_terms(claim: Claim) -> list[_Term]:
    rule, found = claim["rule"], cells(claim)
    return [
        _Term(f"{label} {name}", where | {"setting": rule[name]}, sign / len(found), (sign < 0) / len(found))
        for label, where in found
        for name, sign in (("best", 1), ("shared", -1))
    ]


def _find_interaction(claim: Claim, evidence: Evidence) -> list[Finding]:
    """Find the difference of two arms' contrast of accuracy over the cells."""
    found, contrast = cells(claim), claim["rule"]["contrast"]
    weights = CONTRASTS[contrast]([value for _, where in found for value in where.values()])
    terms = [_Term(*cell, weight, 1 / len(found)) for cell, weight in zip(found, weights, strict=True)]
    return _contrast(claim, evidence, terms, contrast)


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


def _contrast(claim: Claim, evidence: Evidence, terms: list[_Term], quantity: str) -> list[Finding]:
    """Find the difference of two arms' weighted sums under each decoding, and the floor."""
    rule = claim["rule"]
    found = [
        _weighted(claim, evidence, terms, quantity, decoding) for decoding in rule.get("decodings", (rule["decoding"],))
    ]
    return found + _floor(claim, evidence, terms)


def _weighted(claim: Claim, evidence: Evidence, terms: list[_Term], quantity: str, decoding: str) -> Finding:
    """Find the difference between two arms of a weighted sum of accuracies over cells, each seed's in one row."""
    rule, winner = claim["rule"], _winner(claim)
    pair = rule["of"], rule["to"]
    of, to = (evidence.name(claim, arm, arm == winner) for arm in pair)
    compared = f"{quantity}, {of} - {to}"
    label = f"{compared}, {decoding_words(decoding)}" if "decodings" in rule else compared
    by_term = [evidence.select_pair(claim, pair, term.where, winner) for term in terms]
    selected = dict(zip((of, to), zip(*by_term, strict=True), strict=True))
    have = "; ".join(
        f"{term.label}: {', '.join(found[i].have for found in selected.values())}" for i, term in enumerate(terms)
    )
    kept = {"decoding": decoding, "compared": compared}
    bound = float(rule["above"])
    matrices, words = [], []
    for arm, found in selected.items():
        by_seed = [{record["spec"][claim["unit"]]: record for record in cell.records} for cell in found]
        seeds = sorted(set.intersection(*map(set, by_seed)))
        if seeds and "decodings" in rule:
            measured = [seed for seed in seeds if all(_has(cell[seed], decoding) for cell in by_seed)]
            if len(measured) < claim["min_seeds"]:
                context = f"({len(measured)} of {len(seeds)} seeds of {arm} were decoded so)"
                return Finding(label, 0, have, None, bound, decisive=False, value=MISSING, context=context, **kept)
            seeds = measured
        if not seeds:
            return Finding(label, 0, have, None, bound, lacks=lacking(sum(map(list, selected.values()), [])), **kept)
        right = _right([[cell[seed] for seed in seeds] for cell in by_seed], decoding)
        matrices.append(np.tensordot([term.weight for term in terms], right, axes=1))
        accuracies = zip(terms, right.mean(axis=(1, 2)), strict=True)
        words.append(f"{arm} " + ", ".join(f"{term.label} {100 * accuracy:.1f} %" for term, accuracy in accuracies))
    for i, term in enumerate(terms):
        check_one_base(term.label, [record for found in selected.values() for record in found[i].records])
    interval = stats.crossed_bootstrap(*matrices, n_resamples=evidence.resamples)
    context = f"(n = {interval.n}, detectable {100 * interval.detectable():.1f}); {'; '.join(words)}"
    value = f"{interval.format()} points"
    return Finding(label, interval.n, have, interval, bound, value=value, context=context, **kept)


def _has(record: Record, decoding: str) -> bool:
    return measures.MEASURES["test"].has(record, decoding)


def _right(by_cell: Sequence[Sequence[Record]], decoding: str) -> NDArray[np.float64]:
    """Return right answers (cells, seeds, problems) of as many runs in every cell."""
    right = accuracy_matrix([record for cell in by_cell for record in cell], decoding)
    return right.reshape(len(by_cell), len(by_cell[0]), -1)


def _of_arm(
    claim: Claim,
    evidence: Evidence,
    arm: str,
    terms: list[_Term],
    quantity: str,
    decoding: str,
    bound: float,
    side: str,
) -> Finding:
    """Find a weighted sum of one arm's accuracies over cells."""
    seeds, found, compared, have = _seeds_of(claim, evidence, arm, terms, quantity)
    among = "decodings" in claim["rule"]
    label = f"{compared}, {decoding_words(decoding)}" if among else compared
    kept = {"decoding": decoding, "compared": compared}
    if not seeds:
        return Finding(label, 0, have, None, bound, side, lacks=lacking(found), **kept)
    if among:
        measured = [s for s in seeds if all(_has(cell[s], decoding) for cell in _by_seed(claim, found))]
        if len(measured) < claim["min_seeds"]:
            context = f"({len(measured)} of {len(seeds)} seeds of {arm} were decoded so)"
            return Finding(label, 0, have, None, bound, side, decisive=False, value=MISSING, context=context, **kept)
        seeds = measured
    right = _right([[cell[seed] for seed in seeds] for cell in _by_seed(claim, found)], decoding)
    summed = np.tensordot([term.weight for term in terms], right, axes=1)
    interval = stats.crossed_bootstrap(summed, n_resamples=evidence.resamples)
    accuracies = zip(terms, right.mean(axis=(1, 2)), strict=True)
    words = ", ".join(f"{term.label} {100 * accuracy:.1f} %" for term, accuracy in accuracies)
    context, value = f"(n = {interval.n}, detectable {100 * interval.detectable():.1f}); {words}", interval.format()
    return Finding(label, interval.n, have, interval, bound, side, value=f"{value} points", context=context, **kept)


def _floor(claim: Claim, evidence: Evidence, terms: list[_Term]) -> list[Finding]:
    """Find what an arm has learned, mean of cells, above the untrained base; nothing where no floor is declared."""
    floor = claim["rule"].get("floor")
    if floor is None or (evidence.null and floor["of"] not in _winners(claim)):
        return []
    terms, arm, bound = [term for term in terms if term.in_floor], floor["of"], float(floor["above"])
    seeds, found, label, have = _seeds_of(claim, evidence, arm, terms, f"gain over {floor['to']}")
    bases = [evidence.base_of(cell.records[0]) if cell.records else None for cell in found]
    if not seeds or None in bases:
        return [Finding(label, 0, f"{have}; {sum(b is not None for b in bases)} of base", None, bound)]
    decoding, weights = claim["rule"]["decoding"], [term.in_floor for term in terms]
    right = _right([[cell[seed] for seed in seeds] for cell in _by_seed(claim, found)], decoding)
    untrained = _right([[base] for base in bases], decoding)
    summed, baseline = (np.tensordot(weights, each, axes=1) for each in (right, untrained))
    interval = stats.crossed_bootstrap(summed, baseline[0], n_resamples=evidence.resamples)
    context = f"from {100 * baseline.mean():.1f} % (n = {interval.n}, detectable {100 * interval.detectable():.1f})"
    return [Finding(label, interval.n, have, interval, bound, value=f"{interval.format()} points", context=context)]


def _seeds_of(
    claim: Claim, evidence: Evidence, arm: str, terms: list[_Term], quantity: str
) -> tuple[list, list, str, str]:
    """Return the seeds that an arm has in every cell, its runs in each, and label and number of runs in words."""
    favoured = arm if arm in _winners(claim) else None
    pair = [name for name in _compared(claim) if name != arm]
    found = [evidence.select_pair(claim, [arm, *pair], term.where, favoured)[0] for term in terms]
    seeds = sorted(set.intersection(*map(set, _by_seed(claim, found))))
    label = f"{quantity}, {evidence.name(claim, arm, favoured is not None)}"
    have = "; ".join(f"{term.label}: {cell.have}" for term, cell in zip(terms, found, strict=True))
    return seeds, found, label, have


def _by_seed(claim: Claim, found: Sequence[Any]) -> list[dict[Any, Record]]:
    return [{record["spec"][claim["unit"]]: record for record in cell.records} for cell in found]


def _compared(claim: Claim) -> list[str]:
    """Return the arms that a rule compares."""
    rule = claim["rule"]
    return list(rule["bounds"]) if "bounds" in rule else [rule["of"], rule["to"]]


def _winner(claim: Claim) -> str:
    """Return the arm that a difference favours: less regret is better, and of a contrast what is said of it."""
    rule = claim["rule"]
    return rule["of"] if _MORE_IS_BETTER.get(rule.get("contrast"), False) else rule["to"]


def _winners(claim: Claim) -> tuple[str, ...]:
    rule = claim["rule"]
    if "bounds" in rule:
        return tuple(arm for arm, bound in rule["bounds"].items() if "below" in bound)
    return (_winner(claim),)


def _under_other(claim: Claim, decoding: str) -> Claim | None:
    """Return the claim with its difference, or its regrets, under another decoding; the floor is declared under one."""
    rule = claim["rule"]
    if decoding in rule.get("decodings", (rule["decoding"],)):
        return None
    kept = {name: value for name, value in rule.items() if name != "floor"}
    return claim | {"rule": kept | {"decodings": (decoding,)}}


def _check(claim: Claim) -> None:
    rule, name = claim["rule"], f"claim {claim['id']}"
    if sum(map(len, claim.get("cells", {}).values())) < 2:
        raise ValueError(f"{name}: a rule of kind {rule['kind']} is made over two cells or more")
    for key in ("shared", "best"):
        if key in rule:
            check_setting(claim, key, rule[key])
    if rule.get("contrast", "slope over log10") not in CONTRASTS:
        raise ValueError(f"{name}: unknown contrast {rule['contrast']!r}; known: {', '.join(CONTRASTS)}")
    for arm, bound in rule.get("bounds", {}).items():
        if len(bound) != 1 or not bound.keys() <= {"below", "above"}:
            raise ValueError(f"{name}: regret of {arm}: declare a bound that it lies below, or one that it lies above")
    check_decodings(claim)
    named = _compared(claim)
    if "floor" in rule:
        check_keys(f"{name}, floor", rule["floor"], ("of", "to", "above"))
        named += [rule["floor"]["of"], rule["floor"]["to"]]
    check_named(claim, named)


INTERACTION = Rule(
    _find_interaction,
    ("decoding", "contrast", "of", "to", "above"),
    ("decodings", "floor"),
    check=_check,
    favours=_winners,
    under=_under_other,
)
REGRET = Rule(
    _find_regret,
    ("decoding", "shared", "best", "of", "to", "above"),
    ("decodings", "floor"),
    check=_check,
    favours=_winners,
    under=_under_other,
)
REGRETS = Rule(
    _find_regrets,
    ("decoding", "shared", "best", "bounds"),
    ("floor",),
    check=_check,
    favours=_winners,
    under=_under_other,
)
