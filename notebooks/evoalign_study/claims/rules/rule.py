"""What a kind of rule is: how it is declared, what it finds in the records, and which arms it favours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from evoalign_study.claims.checks import Schema
from evoalign_study.claims.findings import Finding
from evoalign_study.claims.selection import Claim, Evidence


def _declared(claim: Claim) -> tuple[str, ...]:
    favours = claim["rule"].get("favours", ())
    return (favours,) if isinstance(favours, str) else tuple(favours)


@dataclass(frozen=True)
class Rule:
    """A kind of rule. Each brings its own check of the declaration."""

    find: Callable[[Claim, Evidence], list[Finding]]
    """Makes the findings that the verdict rests on. Where the evidence has a null, it stands in the place of what is
    favoured, and findings that favour no arm are left out."""
    schema: Callable[[tuple[str, ...]], dict[str, Schema]] = lambda arm: {}
    """Returns what a declaration has besides its kind, from the names of the claim's arms."""
    arms: tuple[str, ...] | None = None
    """Names of the arms that the claim declares; None: any."""
    check: Callable[[Claim], None] = lambda claim: None
    """Raises ValueError, naming claim and field, where the declaration is wrong in another way."""
    favours: Callable[[Claim], tuple[str, ...]] = _declared
    """Returns the arms that win when the claim is supported; by default those that the rule names so."""
    under: Callable[[Claim, str], Claim | None] = lambda claim, decoding: None
    """Returns the claim with its comparisons under another decoding, those that it does not declare so already; None
    where there are none."""
