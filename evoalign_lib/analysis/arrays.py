"""Validation of the arrays that analyses take: their shape, range and whole numbers."""

from math import inf

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evoalign_lib.checks import require


def array(
    name: str,
    values: ArrayLike,
    *ndim: int,
    least: int = 1,
    low: float = -inf,
    high: float = inf,
    whole: bool = False,
    why: str = "",
) -> NDArray[np.float64]:
    """Return values as float64, or raise a ValueError that names them if their shape or range is wrong.

    Args:
        name: name of the values, for the error.
        values: finite numbers.
        ndim: allowed numbers of dimensions; any number if none is given.
        least: entries that the first axis needs at least; every other axis needs 1.
        low: the smallest value allowed.
        high: the largest value allowed.
        whole: whether the values must be whole numbers.
        why: a hint that ends the error.

    >>> array("shares", [0.5, 1.5], 1, low=0, high=1)
    Traceback (most recent call last):
    ...
    ValueError: shares has the value 1.5: pass finite numbers from 0 to 1.
    """
    found = np.asarray(values, np.float64)
    told = f": {why}" if why else ""
    wrong = (ndim and found.ndim not in ndim) or (found.size < 1 <= least) or (found.ndim and len(found) < least)
    shape = f"{least} or more entries, {' or '.join(map(str, ndim)) or 'any number of'} dimension(s)"
    require(not wrong, f"{name} has the shape {found.shape}: pass {shape}{told}.")
    fit = np.isfinite(found) & (found >= low) & (found <= high)
    fit &= (found == np.rint(found)) | (not whole)
    if not fit.all():
        bounds = "" if low == -inf else f" of at least {low:g}" if high == inf else f" from {low:g} to {high:g}"
        kind = "whole" if whole else "finite"
        raise ValueError(f"{name} has the value {found[~fit].flat[0]:g}: pass {kind} numbers{bounds}{told}.")
    return found
