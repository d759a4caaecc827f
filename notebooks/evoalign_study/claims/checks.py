"""Checks that the declarations of claims share: their keys, the arms that they name, the settings of these arms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from evoalign_lib import arms


def require(holds: Any, message: str) -> None:
    """Raise ValueError with a message unless something holds."""
    if not holds:
        raise ValueError(message)


def check_keys(where: str, given: Iterable[str], wanted: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    """Raise ValueError where a declaration has an unknown key or lacks one."""
    given = list(given)
    for key in given:
        require(key in wanted + optional, f"{where}: unknown key {key!r}; known: {', '.join(wanted + optional)}")
    for key in wanted:
        require(key in given, f"{where} must declare {key!r}")


def check_known(where: str, what: str, value: Any, known: Iterable[str]) -> None:
    """Raise ValueError where a declaration names something that is none of the known ones."""
    require(value in known, f"{where}: unknown {what} {value!r}; known: {', '.join(known)}")


def check_named(claim: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise ValueError, naming the claim, where a rule names an arm that the claim does not declare."""
    declared = claim.get("arms", {})
    for name in names:
        message = f"claim {claim['id']}: arm {name!r} of the rule is not declared; declared: {', '.join(declared)}"
        require(name in declared, message)


def check_comparisons(
    claim: Mapping[str, Any],
    wanted: tuple[str, ...],
    optional: tuple[str, ...] = (),
    quantities: Iterable[str] | None = None,
) -> list[Mapping[str, Any]]:
    """Return the comparisons of a rule, those that are only reported last.

    Raises ValueError, naming the claim, where one has other keys, or another quantity than these.
    """
    rule, name = claim["rule"], f"claim {claim['id']}"
    comparisons = [*rule.get("comparisons", ()), *(each | {"above": 0} for each in rule.get("also", ()))]
    for comparison in comparisons:
        check_keys(f"{name}, comparison", comparison, wanted, optional)
        if quantities is not None:
            check_known(name, "quantity", comparison["quantity"], quantities)
    return comparisons


def check_arms(claim: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the claim, where an arm is unknown or its setting is not well declared."""
    for label, wanted in claim.get("arms", {}).items():
        name = f"claim {claim['id']}, arm {label}"
        if "arm" in wanted:
            try:
                arms.get(wanted["arm"])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        seeds = wanted.get("seeds", 1)
        counted = isinstance(seeds, int) and not isinstance(seeds, bool) and seeds > 0
        require(counted, f"{name}: seeds {seeds!r}: declare how many, from 0 on, judge")
        if "setting" in wanted:
            check_setting(claim, f"arm {label}", wanted["setting"])


def check_setting(claim: Mapping[str, Any], where: str, setting: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the claim, where it is not well declared which setting of a sweep counts."""
    name, best_of = f"claim {claim['id']}, setting of {where}", setting.get("best_of")
    check_keys(name, setting, ("best_of", "base"), ("among",))
    for arm, choices in setting.get("among", {}).items():
        n = len(choices)
        require(n == best_of, f"{name}: {n} {arm} settings where the best of {best_of} is taken")
        for choice in choices:
            check_keys(f"{name}, {arm}", choice, arms.swept(arm))
