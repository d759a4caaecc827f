"""A reference for the noise law's members and updates in plain NumPy, without PyTorch and transformers."""

import math
from functools import partial

import numpy as np
from hypothesis import strategies as st

from evoalign_lib import _noise_cpu, noise


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


def _window(kind, key, param_id, rows, cols, stream) -> np.ndarray:
    """Return the window rows x cols of a tensor's noise of full rank."""
    quads = np.arange(cols[0] >> 2, (cols[1] + 3) >> 2)
    words = np.moveaxis(_noise_cpu.words(key, np.arange(*rows), quads, param_id, stream), -1, 0)
    whole = np.stack(_noise_cpu._REFERENCES[kind](*words), -1).reshape(rows[1] - rows[0], 4 * len(quads))
    return whole[:, (cols[0] & 3) :][:, : cols[1] - cols[0]]


def by_numpy(key, param_id, shape, rank=0, *, rows=None, cols=None, stream=0, distribution="gaussian", draw=_window):
    """Return what `noise.eps` and `noise.normals` return; draw: what draws a window instead of NumPy."""
    kind, number = noise._law(distribution, param_id)
    sizes, drawn = noise._matrix_shape(shape), partial(draw, kind, key, number)
    places = [given or (0, size) for given, size in zip((rows, cols), sizes, strict=True)]
    if noise.is_low_rank(shape, rank):
        a, b = (drawn((0, rank), place, stream) for stream, place in enumerate(places, 1))
        found = np.full((a.shape[1], b.shape[1]), -0.0, np.float32)
        for one, other in zip(a * _noise_cpu.root(rank), b, strict=True):
            found = found + one[:, None] * other
    else:
        found = drawn(*places, stream)
    return found if rows or cols else found.reshape(shape)


def reference_perturb(master, layout, key, sigma, sign=1, distribution="gaussian", rank=0) -> np.ndarray:
    """Compute in plain NumPy what `noise.perturb` writes to its first argument."""
    out = master.copy()
    for entry, weights in zip(layout.entries, layout.views(out).values(), strict=True):
        weights[...] = weights + np.float32(sign * sigma) * by_numpy(
            key, entry.id, entry.shape, rank, distribution=distribution
        )
    return out


def reference_update(master, layout, keys, coefficients, distribution="gaussian", rank=0) -> np.ndarray:
    """Compute the master after `noise.update` in plain NumPy."""
    updated = master.copy()
    for entry, weights in zip(layout.entries, layout.views(updated).values(), strict=True):
        total = np.zeros(entry.shape, np.float32)
        for key, coefficient in zip(keys, coefficients, strict=True):
            total = total + coefficient * by_numpy(int(key), entry.id, entry.shape, rank, distribution=distribution)
        weights[...] = weights + total
    return updated
