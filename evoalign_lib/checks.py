"""Checks of settings, with the same words everywhere: names, choices, whole numbers, keys."""

import difflib
import os
import sys
from collections.abc import Iterable
from numbers import Integral
from typing import Any
from urllib.parse import urlsplit


def require(holds: Any, message: str) -> None:
    """Raise ValueError with a message unless something holds."""
    if not holds:
        raise ValueError(message)


def nearest(name: Any, known: Iterable[str], cutoff: float = 0.4) -> str:
    """Return a hint at the known name nearest to a mistyped one, to end an error text; empty where none is near.

    Args:
        name: as it was given.
        known: names that there are.
        cutoff: likeness that a name must have at least, 0 (any) to 1 (equal).

    >>> "unknown task 'cuntdown'." + nearest("cuntdown", ["conciseness", "countdown"])
    "unknown task 'cuntdown'. Did you mean 'countdown'?"
    >>> nearest("x", ["conciseness", "countdown"])
    ''
    """
    near = difflib.get_close_matches(str(name)[:100], sorted(map(str, known)), n=1, cutoff=cutoff)
    return f" Did you mean {near[0]!r}?" if near else ""


def choose(name: str, value: Any, choices: Iterable[str]) -> None:
    """Refuse a setting that has none of these values.

    Args:
        name: of the setting.
        value: of the setting.
        choices: the values that it may have.

    Raises:
        ValueError: it has another; the message names the nearest choice.

    >>> choose("sampling", "greddy", ("greedy", "gumbel"))
    Traceback (most recent call last):
    ...
    ValueError: sampling='greddy' is not one of ['greedy', 'gumbel']. Did you mean 'greedy'?
    """
    choices = list(choices)
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not one of {choices}.{nearest(value, choices)}")


def whole_number(name: str, value: Any, least: int = 1, most: int | None = None, why: str = "") -> int:
    """Return a setting as an integer.

    Args:
        name: of the setting.
        value: an int, Python's or NumPy's, and no bool.
        least, most: bounds of the value; most None: no upper one.
        why: the reason of the bounds, for the error.

    Raises:
        ValueError: it is no whole number from least to most.

    >>> whole_number("population_size", 1, least=2, why="z-scores need two members")
    Traceback (most recent call last):
    ...
    ValueError: population_size=1 must be a whole number of at least 2: z-scores need two members.
    """
    if isinstance(value, Integral) and not isinstance(value, bool):
        if value >= least and (most is None or value <= most):
            return int(value)
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
    raise ValueError(f"{name}={value!r} must be a whole number {bounds}{f': {why}' if why else ''}.")


def positive(name: str, value: Any, most: float = sys.float_info.max) -> None:
    """Raise ValueError unless a setting is a finite number above 0 and at most `most`.

    >>> positive("top_p", 1.5, most=1)
    Traceback (most recent call last):
    ...
    ValueError: top_p=1.5 must be a number above 0 and at most 1.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and 0 < value <= most):  # NaN is in no range
        bounds = "a positive number" if most == sys.float_info.max else f"a number above 0 and at most {most}"
        raise ValueError(f"{name}={value!r} must be {bounds}.")


def address(name: str, url: str) -> str:
    """Return the address of a server without a slash at its end; `name` is the setting's.

    Raises:
        ValueError: it is none, or holds a password or a query, which logs would show.
    """
    parts = urlsplit(url)
    open_to_all = parts.username is parts.password is None and not parts.query
    require(open_to_all, f"{name} holds a password or a query: name a variable that holds the key as api_key_env.")
    known = parts.scheme in ("http", "https") and parts.hostname
    require(known, f"{name}={url!r} must be an address such as http://localhost:8000.")
    return url.rstrip("/")


def key_in(variable: str, needed: bool = True) -> str:
    """Return the key for a server that an environment variable holds.

    Args:
        variable: its name.
        needed: whether there has to be one; "" is returned where there is none and need not be.

    Raises:
        ValueError: there is none, or one that no HTTP header can hold: the errors of HTTP libraries would show it.
    """
    key = os.environ.get(variable, "").strip()
    require(key or not needed, f"no key in the environment: set {variable}.")
    plain = key.isascii() and key.isprintable()
    require(plain, f"the key in {variable} is no single line of ASCII characters, as a key must be: set it anew.")
    return key
