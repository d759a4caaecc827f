"""Checks of arguments that the noise law and its implementation on GPUs share."""

from __future__ import annotations

import operator

import numpy as np


def unsigned(name: str, value: int, bits: int) -> int:
    """Return an unsigned integer of this many bits; raise TypeError or ValueError for anything else."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if not 0 <= number < 1 << bits:
        raise ValueError(f"{name} must be from 0 to 2**{bits} - 1, got {number}")
    return number


def check_members(keys: np.ndarray, coefficients: np.ndarray) -> None:
    """Raise TypeError or ValueError unless keys are uint64 and coefficients finite float32, (members,) each."""
    if keys.dtype != np.uint64:
        raise TypeError(f"keys must be uint64, got {keys.dtype}")
    if coefficients.dtype != np.float32:
        raise TypeError(f"coefficients must be float32, got {coefficients.dtype}")
    if keys.ndim != 1 or keys.shape != coefficients.shape:
        raise ValueError(
            f"keys and coefficients must be one list of members, got {keys.shape} and {coefficients.shape}"
        )
    if not np.isfinite(coefficients).all():
        member = int(np.flatnonzero(~np.isfinite(coefficients))[0])
        raise ValueError(f"coefficients must be finite, got {coefficients[member]} for member {member}")


def signed_sigma(sigma: float, sign: int) -> np.float32:
    """Return fl32(sign * sigma); raise ValueError for another sign than 1 and -1, or a sigma float32 cannot hold."""
    if sign not in (1, -1):
        raise ValueError(f"sign must be 1 or -1, got {sign!r}")
    if not (0 < sigma <= float(np.finfo(np.float32).max) and np.float32(sigma) > 0):
        raise ValueError(f"sigma must be positive and finite in float32, got {sigma!r}")
    return np.float32(sign * sigma)
