"""The interface of a kind of rule: its declaration, its findings in the records, and the arms that stand in.

Nulls replace the arm that a rule favours (`asked`), and the comparator replaces its challenger (`in_place`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from evoalign_study.claims.checks import Schema
from evoalign_study.claims.findings import Finding
from evoalign_study.claims.selection import BASE, NULLS, Case, Claim
from evoalign_study.records import canonical_json

Comparison = Mapping[str, Any]
Asks = Iterable[tuple[Any, str]]


@dataclass(frozen=True)
class Rule:
    """A kind of rule. Each one checks its own declaration."""

    find: Callable[[Case], Iterable[Finding]]
    """Returns the findings that the verdict rests on. If the evidence has a null, it replaces the favoured arms, and
    findings that favour no arm are left out."""
    schema: Callable[[tuple[str, ...]], dict[str, Schema]] = lambda arm: {}
    """Takes the names of the claim's arms; returns the schema of a declaration, without its kind."""
    arms: tuple[str, ...] | None = None
    """Names of the arms that the claim must declare; None: any names."""
    asks: Callable[[Claim], Asks] = lambda claim: ()
    """Returns further conditions on the declaration, each with a message for the case that it does not hold."""
    favours: Callable[[Claim], tuple[str, ...]] = lambda claim: declared_favourites(claim["rule"])
    """Returns the arms that win if the claim is supported; by default those under the rule's key "favours"."""
    under: Callable[[Claim, str], Claim | None] = lambda claim, decoding: None
    """Returns the claim with its comparisons moved to another decoding, without those it declares there already; None
    if none are left."""
    controls: Callable[[Claim], Iterable[Claim]] = lambda claim: ()
    """Returns the claim with a comparator in its challenger's place, once for each part that two equal arms pass."""
    turns: bool = False
    """Whether the rule's key "favours" may name any arm that it compares, for the nulls to replace."""


def declared_favourites(rule: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the arms that a rule declares as its favourites."""
    favours = rule.get("favours", ())
    return (favours,) if isinstance(favours, str) else tuple(favours)


def declared_comparisons(rule: Mapping[str, Any]) -> list[tuple[Comparison, bool]]:
    """Return the comparisons of a rule and whether each is decisive; the others are reported, with a bound of 0.

    A rule "interval_above" declares no comparisons and has exactly one.
    """
    only = {"measure": {"test": rule.get("decoding")}, "of": "treatment", "to": "comparison", "above": 0}
    reported = [(comparison | {"above": 0}, False) for comparison in rule.get("also", ())]
    return [(comparison, True) for comparison in rule.get("comparisons", [only])] + reported


def asked(case: Case, winner: Callable[[Comparison], str | None]) -> Iterator[tuple[Comparison, bool, str | None]]:
    """Yield the comparisons to make, whether each is decisive, and the arm that wins it.

    For a null, only decisive comparisons that some arm wins are made.
    """
    for comparison, decisive in declared_comparisons(case.rule):
        favoured = winner(comparison)
        if not case.null or (decisive and favoured):
            yield comparison, decisive, favoured


def as_declared(comparison: Comparison) -> str:
    """Return a comparison as text that is the same whichever arms stand in for those that its claim declares."""
    own = comparison | comparison.get("asked", {})
    return canonical_json({name: value for name, value in own.items() if name != "asked"})


def in_place(
    claim: Claim,
    quantity: Callable[[Comparison], str],
    of_pairs: Callable[[Comparison], float | None] = lambda comparison: None,
) -> Iterator[Claim]:
    """Yield the claim with one comparison and the comparator in its challenger's place, if two equal arms would pass.

    They pass two kinds of comparison. One allows the arms a tolerance: "matches", "loses at most", a cosine above .5.
    The comparator's runs then stand on both sides and are resampled independently, which gives the interval of equal
    arms at the same n; a quantity of pairs of runs is taken between two halves of them. The other is a threshold for
    one arm, over the untrained base, a null or a number, unless the claim says of the same quantity what the comparator
    has, or that the arms differ. "Better than the comparator" is not asked: no arm is better than itself.

    quantity: returns the quantity of a comparison. of_pairs: returns its value for equal arms, if it is one of pairs.
    """
    margin, arms = claim["margin"], claim["arms"]
    decisive = [comparison for comparison, counts in declared_comparisons(claim["rule"]) if counts]
    matches, differs = [], []  # comparisons of two arms, or of one, each with the arms that learned something
    for comparison in decisive:
        pair, equal = _trained(claim, comparison), of_pairs(comparison) or 0.0
        within = comparison.get("above", -inf) + margin < equal < comparison.get("below", inf) - margin
        tolerant = len(pair) == 2 and (within or comparison.get("by") == "equivalence")
        (matches if tolerant else differs).append((comparison, pair))
    for comparison, (_, other) in matches:
        again = f"{other} again"
        halves = ({}, {}) if of_pairs(comparison) is None else ({"half": 0}, {"half": 1})
        stand = {name: arms[other] | half for name, half in zip((other, again), halves, strict=True)}
        yield _instead(claim, comparison, {"of": comparison["to"], "to": _side(comparison["to"], again)}, stand)
    for comparison, pair in differs:
        others = [name for _, both in (*matches, *differs) if len(both) == 2 and set(pair) < set(both) for name in both]
        told = {name for each, names in differs if quantity(each) == quantity(comparison) for name in names}
        beside = [name for name in others if name not in pair]
        if _trained(claim, {"of": comparison["of"]}) == pair and beside and beside[0] not in told:
            yield _instead(claim, comparison, {"of": _side(comparison["of"], beside[0])}, {})


def _side(side: Any, arm: str) -> Any:
    """Return a side of a comparison, made in the same way from another arm."""
    return side | {"arm": arm} if isinstance(side, Mapping) else arm


def _instead(claim: Claim, comparison: Comparison, sides: Mapping[str, Any], arms: Mapping[str, Any]) -> Claim:
    """Return the claim with one comparison alone, of other sides."""
    rule = {name: value for name, value in claim["rule"].items() if name not in ("also", "trend")}
    asked = {name: comparison[name] for name in sides}
    rule["comparisons"] = [comparison | sides | {"asked": asked}]
    return claim | {"arms": claim["arms"] | arms, "rule": rule}


def trained(arm: Mapping[str, Any]) -> bool:
    """Return whether an arm, as a claim declares it, learned something."""
    return arm["kind"] != BASE and arm.get("arm") not in NULLS


def _trained(claim: Claim, comparison: Comparison) -> list[str]:
    sides = [comparison[name] for name in ("of", "to") if name in comparison]
    names = [side["arm"] if isinstance(side, Mapping) else side for side in sides]
    return [name for name in names if trained(claim["arms"][name])]
