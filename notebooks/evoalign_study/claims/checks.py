"""Checks that the declarations of claims share: their keys, the arms that they name, the settings of these arms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from evoalign_lib import arms


def check_keys(where: str, given: Iterable[str], wanted: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    """Raise ValueError where a declaration has an unknown key or lacks one."""
    given = list(given)
    unknown = [key for key in given if key not in wanted + optional]
    if unknown:
        raise ValueError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(wanted + optional)}")
    absent = [key for key in wanted if key not in given]
    if absent:
        raise ValueError(f"{where} must declare {absent[0]!r}")


def check_named(claim: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise ValueError, naming the claim, where a rule names an arm that the claim does not declare."""
    declared = claim.get("arms", {})
    for name in names:
        if name not in declared:
            raise ValueError(
                f"claim {claim['id']}: arm {name!r} of the rule is not declared; declared: {', '.join(declared)}"
            )


def check_arms(claim: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the claim, where an arm is unknown or its setting is not well declared."""
    for label, wanted in claim.get("arms", {}).items():
        if "arm" in wanted:
            try:
                arms.get(wanted["arm"])
            except ValueError as error:
                raise ValueError(f"claim {claim['id']}, arm {label}: {error}") from error
        seeds = wanted.get("seeds", 1)
        if isinstance(seeds, bool) or not isinstance(seeds, int) or seeds < 1:
            raise ValueError(f"claim {claim['id']}, arm {label}: seeds {seeds!r}: declare how many, from 0 on, judge")
        if "setting" in wanted:
            check_setting(claim, f"arm {label}", wanted["setting"])


def check_setting(claim: Mapping[str, Any], where: str, setting: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the claim, where it is not well declared which setting of a sweep counts."""
    name = f"claim {claim['id']}, setting of {where}"
    check_keys(name, setting, ("best_of", "base"), ("among",))
    for arm, choices in setting.get("among", {}).items():
        if len(choices) != setting["best_of"]:
            raise ValueError(f"{name}: {len(choices)} {arm} settings where the best of {setting['best_of']} is taken")
        for choice in choices:
            check_keys(f"{name}, {arm}", choice, arms.swept(arm))
