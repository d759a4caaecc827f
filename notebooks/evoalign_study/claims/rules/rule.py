"""The interface of a kind of rule: its declaration, its findings in the records, and the arms that it favours."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from evoalign_study.claims.checks import Schema
from evoalign_study.claims.findings import Finding
from evoalign_study.claims.selection import Case, Claim

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
