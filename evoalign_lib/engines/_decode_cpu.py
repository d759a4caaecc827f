"""Fused kernels for a decoding step outside its matrix products: one kernel where torch takes a dozen operations.

A decoding step of a small model spends more time on launching operations than on computing. `decode` leaves the
products to torch's BLAS and calls these kernels for the rest. Every row is computed on its own, with the same
operations whatever the other rows are. All arrays are float32; docstrings say which are changed in place.
"""

import numpy as np
from numba import njit

from evoalign_lib._noise_cpu import float32s, jit_cached

# Sums may be reordered and multiply-adds fused (as in BLAS), but in the same way for every row.
_FAST = {"reassoc", "contract", "nsz"}
_inline = njit(error_model="numpy", inline="always")


# exp(x) = 2^n exp(f), |f| <= ln(2)/2; the polynomial is the one in Cephes' expf, highest power first.
_EXP = float32s(1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_LOG2_E, _LN2_HIGH, _LN2_LOW = float32s(1.44269504088896341, 0.693359375, -2.12194440e-4)
_LOWEST, _HIGHEST = float32s(-87.0, 88.0)
_HALF, _ONE, _HUGE = float32s(0.5, 1.0, 3.4e38)


@_inline
def _exp(x):
    x = min(max(x, _LOWEST), _HIGHEST)
    n = np.floor(x * _LOG2_E + _HALF)
    f = x - n * _LN2_HIGH - n * _LN2_LOW
    total = _EXP[0]
    for i in range(1, 6):
        total = total * f + _EXP[i]
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23))
    return (total * f * f + f + _ONE) * power.view(np.float32)


def _add_norm(x, change, gains, owners, eps, out):
    """Set x += change; out = x / rms(x) * gains[owner].

    Shapes: x, change, out (rows, n); gains (members, n); owners (rows).
    """
    for r in range(len(x)):
        row, added, normed, gain = x[r], change[r], out[r], gains[owners[r]]
        total = np.float32(0.0)
        for i in range(len(row)):
            row[i] += added[i]
            total += row[i] * row[i]
        scale = _ONE / np.sqrt(total / np.float32(len(row)) + eps)
        for i in range(len(row)):
            normed[i] = row[i] * scale * gain[i]


def _attend(qkv, length, cos, sin, keys, values, slots, pads, prefix, first, out):
    """Compute causal attention for new tokens and add their keys and values to the cache.

    Args:
        qkv: (rows * length, (heads + 2 kv_heads) head_dim), changed: queries, keys, values before rotation, row by row.
        length: new tokens per row.
        cos, sin: (columns, head_dim / 2), the rotary embedding by position.
        keys, values: (slots, kv_heads, columns, head_dim), changed at columns first .. first + length.
        slots: (rows) int64: each row's entry in the cache.
        pads: (slots) int64: columns of padding between the shared prefix and the rest of a row's prompt.
        prefix: columns of the shared prefix.
        first: column of the first new token.
        out: (rows * length, heads head_dim).
    """
    kv_heads, dim = keys.shape[1], keys.shape[3]
    half, group = dim // 2, out.shape[1] // (keys.shape[1] * keys.shape[3])
    heads = kv_heads * group
    scale = _ONE / np.sqrt(np.float32(dim))
    scores = np.empty(first + length, np.float32)
    for r in range(len(out)):
        slot, column = slots[r // length], first + r % length
        pad = pads[slot]
        if prefix <= column < prefix + pad:
            out[r] = np.float32(0.0)
            continue
        position = column - pad if column >= prefix else column
        c, s = cos[position], sin[position]
        for h in range(heads + kv_heads):
            turned = qkv[r, h * dim : (h + 1) * dim]
            low, high = turned[:half], turned[half:]
            for i in range(half):
                a, b = low[i], high[i]
                low[i] = a * c[i] - b * s[i]
                high[i] = b * c[i] + a * s[i]
        for k in range(kv_heads):
            cached_keys, cached_values = keys[slot, k], values[slot, k]
            cached_keys[column] = qkv[r, (heads + k) * dim : (heads + k + 1) * dim]
            cached_values[column] = qkv[r, (heads + kv_heads + k) * dim : (heads + kv_heads + k + 1) * dim]
            for g in range(k * group, (k + 1) * group):
                query, target = qkv[r, g * dim : (g + 1) * dim], out[r, g * dim : (g + 1) * dim]
                largest, n = -_HUGE, 0  # scores of the visible columns, packed without gaps
                for j in range(column + 1):
                    if j < prefix or j >= prefix + pad:
                        score, line = np.float32(0.0), cached_keys[j]
                        for i in range(dim):
                            score += query[i] * line[i]
                        scores[n] = score * scale
                        largest = max(largest, scores[n])
                        n += 1
                total = np.float32(0.0)
                for j in range(n):
                    scores[j] = _exp(scores[j] - largest)
                    total += scores[j]
                target[:] = np.float32(0.0)
                n = 0
                for j in range(column + 1):
                    if j < prefix or j >= prefix + pad:
                        factor, line = scores[n] / total, cached_values[j]
                        for i in range(dim):
                            target[i] += factor * line[i]
                        n += 1


def _silu_product(gate_up, out):
    """Set out = silu(gate) * up. gate_up: (rows, 2 n), gates first; out: (rows, n)."""
    n = out.shape[1]
    for r in range(len(out)):
        gate, up, target = gate_up[r, :n], gate_up[r, n:], out[r]
        for i in range(n):
            target[i] = gate[i] / (_ONE + _exp(-gate[i])) * up[i]


def _add_own(x, y, first, owners, a, b):
    """Add the members' low-rank noise to a product: y[r, first + i] += sum_k (x[r] . b[m, k]) a[m, k, i].

    Args:
        x: (rows, cols), the input of the product.
        y: (rows, n), the product, changed.
        first: column of y where the matrix begins.
        owners: (rows) int64: the member m of each row.
        a, b: (members, rank, rows of the matrix) and (members, rank, cols).
    """
    for r in range(len(x)):
        m, row, target = owners[r], x[r], y[r, first : first + a.shape[2]]
        for k in range(a.shape[1]):
            inner, line, outer = np.float32(0.0), b[m, k], a[m, k]
            for j in range(len(row)):
                inner += row[j] * line[j]
            for i in range(len(outer)):
                target[i] += inner * outer[i]


def _add_own_rows(x, ids, owners, a, b):
    """Add the members' low-rank noise to embedded tokens: x[r] += sum_k a[m, k, ids[r]] b[m, k]; x is changed."""
    for r in range(len(x)):
        m, row = owners[r], x[r]
        for k in range(a.shape[1]):
            factor, line = a[m, k, ids[r]], b[m, k]
            for j in range(len(row)):
                row[j] += factor * line[j]


add_own = jit_cached(_add_own, fastmath=_FAST)
add_own_rows = jit_cached(_add_own_rows, fastmath=_FAST)
add_norm = jit_cached(_add_norm, fastmath=_FAST)
attend = jit_cached(_attend, fastmath=_FAST)
silu_product = jit_cached(_silu_product, fastmath=_FAST)
