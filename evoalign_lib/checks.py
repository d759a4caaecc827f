"""Check settings (names, choices, whole numbers, addresses, keys) with the same error messages everywhere."""

import difflib
import json
import os
import sys
from collections.abc import Iterable
from numbers import Integral
from typing import Any
from urllib.parse import quote, urlsplit


def require(holds: Any, message: str) -> None:
    """Raise ValueError with a message unless a condition holds."""
    if not holds:
        raise ValueError(message)


def plain(value: Any) -> Any:
    """Return a value with the numbers and arrays of NumPy and torch, at any depth, as Python's numbers and lists.

    Everything else is returned as it is.

    >>> import numpy as np
    >>> plain({"top_k": np.int64(5), "weights": [np.float32(0.5), "a"]})
    {'top_k': 5, 'weights': [0.5, 'a']}
    """
    if type(value) is dict:
        return {name: plain(part) for name, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    return plain(value.tolist()) if hasattr(value, "tolist") else value


def nearest(name: Any, known: Iterable[str], cutoff: float = 0.4) -> str:
    """Return a hint at the known name nearest to a mistyped one, to append to an error; empty if none is near.

    Args:
        name: the mistyped name.
        known: the known names.
        cutoff: minimum similarity of a suggested name, from 0 (any) to 1 (equal).

    >>> "unknown task 'cuntdown'." + nearest("cuntdown", ["conciseness", "countdown"])
    "unknown task 'cuntdown'. Did you mean 'countdown'?"
    >>> nearest("x", ["conciseness", "countdown"])
    ''
    >>> nearest("ab", {"ac", "ad"}) == nearest("ab", ["ad", "ac"])  # the same one whatever the order
    True
    """
    near = difflib.get_close_matches(str(name)[:100], sorted(map(str, known)), n=1, cutoff=cutoff)
    return f" Did you mean {near[0]!r}?" if near else ""


def choose(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raise ValueError unless a setting has one of the allowed values.

    Args:
        name: name of the setting.
        value: value of the setting.
        choices: the allowed values.

    Raises:
        ValueError: a value that is not allowed; the message suggests the nearest choice.

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
        name: name of the setting.
        value: a Python or NumPy integer, but not a bool.
        least, most: bounds of the value; most None: no upper bound.
        why: the reason for the bounds, for the error.

    Raises:
        ValueError: a value that is not a whole number from least to most.

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
    number = plain(value)
    if isinstance(number, bool) or not (isinstance(number, int | float) and 0 < number <= most):  # nor is NaN
        bounds = "a positive number" if most == sys.float_info.max else f"a number above 0 and at most {most}"
        raise ValueError(f"{name}={value!r} must be {bounds}.")


def single(name: str, value: Any) -> None:
    """Raise ValueError unless a setting is a positive number that float32, the dtype of noise and weights, can hold."""
    positive(name, value, (2 - 2**-23) * 2.0**127)
    require(value >= 2.0**-126, f"{name}={value!r} is below the smallest number of float32.")


def address(name: str, url: str) -> str:
    """Return the address of a server without a trailing slash; `name` is the setting's name for errors.

    Raises:
        ValueError: not an address, or one with a password or a query, which logs would show.
    """
    parts = urlsplit(url)
    open_to_all = parts.username is parts.password is None and not parts.query
    require(open_to_all, f"{name} holds a password or a query: set api_key_env to a variable that holds the key.")
    known = parts.scheme in ("http", "https") and parts.hostname
    require(known, f"{name}={url!r} must be an address such as http://localhost:8000.")
    return url.rstrip("/")


def key_in(variable: str, needed: bool = True) -> str:
    """Return a server's key from an environment variable.

    Args:
        variable: name of the variable.
        needed: whether a missing key is an error; otherwise it is returned as "".

    Raises:
        ValueError: no key, or one that no HTTP header can hold, which errors of HTTP libraries would reveal.
    """
    key = os.environ.get(variable, "").strip()
    require(key or not needed, f"no key in the environment: set {variable}.")
    plain = key.isascii() and key.isprintable()
    require(plain, f"the key in {variable} is not a single line of printable ASCII characters: set it again.")
    return key


def without_key(text: str, key: str) -> str:
    """Return what a server said with its key masked, which some servers repeat; "" is no key."""
    for spelt in {key, json.dumps(key)[1:-1], repr(key)[1:-1], quote(key)} if key else ():
        text = text.replace(spelt, "***")
    return text


def as_told(text: str, key: str, most: int) -> str:
    """Return what a server said for an error: in printable characters, without its key, at most so many of them.

    >>> as_told('401 for "Bearer sk-1"\\n', "sk-1", 100)
    '401 for "Bearer ***"\\\\n'
    """
    return repr(without_key(text, key))[1:-1][:most]
