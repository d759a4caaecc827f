"""A reference for the noise law's members and updates in plain NumPy, without PyTorch and transformers."""

import math

import numpy as np
from hypothesis import strategies as st

from evoalign_lib import noise


def bits(values: np.ndarray) -> np.ndarray:
    """Return the bits of float32 numbers as 32-bit words."""
    return np.ascontiguousarray(values).view(np.uint32)


def filled(weights) -> tuple[noise.Layout, np.ndarray]:
    """Return the layout of named weights, and a master that holds them."""
    layout = noise.Layout.from_shapes((name, tuple(values.shape)) for name, values in weights.items())
    master = np.zeros(layout.size, np.float32)
    for name, view in layout.views(master).items():
        view[...] = weights[name]
    return layout, master


def window(data, shape):
    """Draw a window of a tensor, viewed as a matrix: its rows, its columns, and the matrix's shape."""
    sizes = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
    ends = (st.tuples(st.integers(0, size), st.integers(0, size)).map(sorted) for size in sizes)
    return *(tuple(data.draw(each)) for each in ends), sizes


def keys_and_coefficients(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return keys and coefficients for an update by n members."""
    keys = np.array([noise.member_key(noise.run_key("test", 1), 0, i) for i in range(n)], np.uint64)
    return keys, np.random.default_rng(n).normal(0, 1e-4, n).astype(np.float32)


def reference_perturb(master, layout, key, sigma, sign=1, distribution="gaussian", rank=0) -> np.ndarray:
    """Compute in plain NumPy what `noise.perturb` writes to its first argument."""
    out, law = master.copy(), {"distribution": distribution, "backend": "numpy"}
    for entry, weights in zip(layout.entries, layout.views(out).values(), strict=True):
        weights[...] = weights + np.float32(sign * sigma) * noise.eps(key, entry.id, entry.shape, rank, **law)
    return out


def reference_update(master, layout, keys, coefficients, distribution="gaussian", rank=0) -> np.ndarray:
    """Compute the master after `noise.update` in plain NumPy."""
    updated, law = master.copy(), {"distribution": distribution, "backend": "numpy"}
    for entry, weights in zip(layout.entries, layout.views(updated).values(), strict=True):
        total = np.zeros(entry.shape, np.float32)
        for key, coefficient in zip(keys, coefficients, strict=True):
            total = total + coefficient * noise.eps(int(key), entry.id, entry.shape, rank, **law)
        weights[...] = weights + total
    return updated
