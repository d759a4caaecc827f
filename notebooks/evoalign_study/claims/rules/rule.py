"""What a kind of rule is: how it is declared, what it finds in the records, and which arms it favours."""

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
    """A kind of rule. Each brings its own check of the declaration."""

    find: Callable[[Case], Iterable[Finding]]
    """Makes the findings that the verdict rests on. Where the evidence has a null, it stands in the place of what is
    favoured, and findings that favour no arm are left out."""
    schema: Callable[[tuple[str, ...]], dict[str, Schema]] = lambda arm: {}
    """Returns what a declaration has besides its kind, from the names of the claim's arms."""
    arms: tuple[str, ...] | None = None
    """Names of the arms that the claim declares; None: any."""
    asks: Callable[[Claim], Asks] = lambda claim: ()
    """Returns what else must hold of the declaration, each with what to declare where it does not."""
    favours: Callable[[Claim], tuple[str, ...]] = lambda claim: declared_favourites(claim["rule"])
    """Returns the arms that win when the claim is supported; by default those that the rule names so."""
    under: Callable[[Claim, str], Claim | None] = lambda claim, decoding: None
    """Returns the claim with its comparisons under another decoding, those that it does not declare so already; None
    where there are none."""


def declared_favourites(rule: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the arms that a rule names as those which it favours."""
    favours = rule.get("favours", ())
    return (favours,) if isinstance(favours, str) else tuple(favours)


def declared_comparisons(rule: Mapping[str, Any]) -> list[tuple[Comparison, bool]]:
    """Return the comparisons of a rule and whether each is decisive; those only reported are held against 0.

    A rule "interval_above" declares none, and has one.
    """
    only = {"measure": {"test": rule.get("decoding")}, "of": "treatment", "to": "comparison", "above": 0}
    reported = [(comparison | {"above": 0}, False) for comparison in rule.get("also", ())]
    return [(comparison, True) for comparison in rule.get("comparisons", [only])] + reported


def asked(case: Case, winner: Callable[[Comparison], str | None]) -> Iterator[tuple[Comparison, bool, str | None]]:
    """Return the comparisons to make, whether each is decisive, and the arm that wins it.

    Of a null those alone that decide, and that an arm wins.
    """
    for comparison, decisive in declared_comparisons(case.rule):
        favoured = winner(comparison)
        if not case.null or (decisive and favoured):
            yield comparison, decisive, favoured
