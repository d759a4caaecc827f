"""Checks of what analyses are made of: arrays of a shape and a range, and what must hold besides."""

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
    """Return values as float64; raise ValueError, naming them, unless they have the shape and the range wanted.

    Args:
        name: what the values are, for the error.
        values: finite numbers.
        ndim: numbers of dimensions that they may have; any, if none is given.
        least: entries that there must be on the first axis, and 1 on all others.
        low: the smallest value allowed.
        high: the largest.
        whole: whether they must be whole numbers.
        why: what to do about it, for the error.

    >>> array("shares", [0.5, 1.5], 1, low=0, high=1)
    Traceback (most recent call last):
    ...
    ValueError: shares hold 1.5: give finite numbers from 0 to 1.
    """
    found = np.asarray(values, np.float64)
    told = f": {why}" if why else ""
    wrong = (ndim and found.ndim not in ndim) or (found.size < 1 <= least) or (found.ndim and len(found) < least)
    shape = f"{least} or more entries, {' or '.join(map(str, ndim)) or 'any number of'} dimension(s)"
    require(not wrong, f"{name} has the shape {found.shape}: give {shape}{told}.")
    fit = np.isfinite(found) & (found >= low) & (found <= high)
    fit &= (found == np.rint(found)) | (not whole)
    if not fit.all():
        bounds = "" if low == -inf else f" of at least {low:g}" if high == inf else f" from {low:g} to {high:g}"
        kind = "whole" if whole else "finite"
        raise ValueError(f"{name} hold {found[~fit].flat[0]:g}: give {kind} numbers{bounds}{told}.")
    return found
