"""A reference for the noise law's members and updates in plain NumPy, without PyTorch and transformers."""

import numpy as np

from evoalign_lib import noise


def bits(values: np.ndarray) -> np.ndarray:
    """Return the bits of float32 numbers as 32-bit words."""
    return np.ascontiguousarray(values).view(np.uint32)


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
