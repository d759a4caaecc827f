"""Schemas of declarations: their keys, the values that each key takes, and the arms that they name."""

from collections.abc import Mapping
from numbers import Real
from typing import Any

from evoalign_lib import arms
from evoalign_lib.checks import require

Schema = Any
"""A type; a collection of known values; a list of one schema, which every entry must fit; a mapping from keys to
schemas, where "?" after a key makes it optional; or a function of place and value that raises ValueError."""


def check(where: str, value: Any, schema: Schema) -> None:
    """Raise ValueError, naming the place and the value, if a declaration does not fit its schema.

    >>> check("claim X", {"above": 1}, {"above": Real, "below?": Real})
    >>> check("claim X", {"abvoe": 1}, {"above": Real, "below?": Real})
    Traceback (most recent call last):
    ...
    ValueError: claim X: unknown key 'abvoe'; known: above, below
    """
    if isinstance(schema, type):
        fits = isinstance(value, schema) and (schema in (bool, object) or not isinstance(value, bool))
        require(fits, f"{where} {value!r}: declare one of type {schema.__name__}")
    elif callable(schema):
        schema(where, value)
    elif isinstance(schema, list):
        check(where, value, list)
        for each in value:
            check(where, each, schema[0])
    elif isinstance(schema, Mapping) and isinstance(value, Mapping):
        known = {key.removesuffix("?"): each for key, each in schema.items()}
        for key, each in value.items():
            require(key in known, f"{where}: unknown key {key!r}; known: {', '.join(known)}")
            check(f"{where}, {key}", each, known[key])
        for key in schema:
            require(key.endswith("?") or key in value, f"{where} must declare {key!r}")
    else:
        known = isinstance(value, str) and value in schema
        require(known, f"{where}: unknown value {value!r}; known: {', '.join(schema)}")


def some(known: Any, schema: Schema) -> dict[str, Schema]:
    """Return the schema of a mapping whose keys are all optional and whose values share one schema."""
    return {f"{key}?": schema for key in known}


def setting(where: str, value: Any) -> None:
    """Raise ValueError if the declaration of which sweep setting counts is malformed."""
    check(where, value, {"best_of": int, "base": str, "among?": dict})
    for arm, choices in value.get("among", {}).items():
        n = len(choices)
        require(n == value["best_of"], f"{where}: {n} {arm} settings for a best of {value['best_of']}: declare as many")
        check(f"{where}, {arm}", choices, [dict.fromkeys(arms.swept(arm), Real)])


def of_spec(where: str, value: Any) -> None:
    """Raise ValueError unless a field of specs is a text, a number, a truth value or None, which no spec has."""
    plain = value is None or isinstance(value, str | Real)
    require(plain, f"{where} {value!r}: declare what specs have there, a text or a number")


def arm(where: str, value: Any) -> None:
    """Raise ValueError if an arm is unknown or its setting is malformed; its other fields are those of specs."""
    check(where, value, dict)
    check(f"{where}, names of fields", list(value), [str])
    own = {"kind": str, "task?": str, "arm?": arms.ARMS, "base?": str, "seeds?": int, "setting?": setting}
    check(where, value, own | {name: of_spec for name in value if not {name, f"{name}?"} & own.keys()})
    seeds = value.get("seeds", 1)
    require(seeds > 0, f"{where}: seeds {seeds}: declare how many seeds, counted from 0, judge the claim")
