"""The noise law on a CPU: NumPy runs this code as the reference, and numba compiles the same code as the fast path.

`noise` states the law and checks all arguments; this module and `_noise_triton` only compute. The constants below are
part of the law, and so is the order of every operation.
"""

from collections.abc import Callable

import numpy as np
from numba import njit

# Philox4x32: multipliers and the key's Weyl increments.
M0, M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
W0, W1 = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
ROUNDS = 10


def float32s(*values: float) -> tuple[np.float32, ...]:
    """Return numbers as float32."""
    return tuple(map(np.float32, values))


# log(1 + f) = f - f^2 / 2 + f^3 P(f) for sqrt(1/2) <= 1 + f < sqrt(2): P from Cephes' logf, highest power first.
LOG = float32s(7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1)
LOG += float32s(-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1)
LN2 = np.float32(0.69314718056)
SQRT_HALF_BITS = np.int32(0x3F3504F3)
# sin(pi x) / x and cos(pi x) as polynomials in x^2 for |x| <= 1/4, highest power first.
SIN = float32s(0.07747035, -0.59881765, 2.55012280, -5.16771174, 3.14159274)
COS = float32s(0.22031199, -1.33268464, 4.05856084, -4.93480149, 1.0)
# Adding and subtracting 1.5 * 2^23 rounds a small float32 to the nearest integer, ties to even, on every device;
# the low bits of the sum are that integer.
ROUNDER = np.float32(12582912.0)
_ONE, _HALF, _MINUS_HALF, _MINUS_TWO = np.float32(1.0), np.float32(0.5), np.float32(-0.5), np.float32(-2.0)
_2_22, _2_24, _2_25 = np.float32(2.0**-22), np.float32(2.0**-24), np.float32(2.0**-25)

# 1 / sqrt(21845): the sum of four uniform bytes has the variance 4 (256^2 - 1) / 12 = 21845 and the mean 510.
BYTE_SUM_SCALE = np.float32(0.006765875)
BYTE_SUM_MEAN = 510

# Numbers of the distributions, for the kernels.
GAUSSIAN, BYTE_SUM = 0, 1

# Starting values for sums of noise. -0 + x is x for every x, including both zeros; 0 + -0 is 0.
ZERO, NOTHING = np.float32(0.0), np.float32(-0.0)

ALIGNMENT = 16  # elements: every tensor in a flat buffer starts on a 64-byte line
_COLUMNS = 1024  # columns of low-rank noise summed at a time: two lines of 4 kB in the L1 cache
_BLOCK = 256  # Philox counters generated at a time: 4 kB of normals, well inside the L1 cache


# The numbers, written once: NumPy runs this code on arrays, which is the reference, and numba compiles it for scalars
# into one kernel of vector code. numba's fastmath stays off, so that LLVM never fuses a multiplication with an
# addition; a test checks the assembly for that.


def _numbers_of_law(compiled: Callable, where: Callable) -> tuple[Callable, ...]:
    """Return Philox4x32-10, Box-Muller on two words, and the function of each distribution on four words.

    Args:
        compiled: decorator for each of these functions, such as numba's.
        where: (condition, a, b) -> a or b.
    """

    @compiled
    def philox_words(c0, c1, c2, c3, k0, k1):
        half_width = np.uint64(32)
        for _ in range(ROUNDS):
            p0, p1 = M0 * np.uint64(c0), M1 * np.uint64(c2)
            c0, c1 = np.uint32(p1 >> half_width) ^ c1 ^ k0, np.uint32(p1 & _LOW)
            c2, c3 = np.uint32(p0 >> half_width) ^ c3 ^ k1, np.uint32(p0 & _LOW)
            k0, k1 = np.uint32(k0 + W0), np.uint32(k1 + W1)
        return c0, c1, c2, c3

    @compiled
    def horner(coefficients, x):
        total = coefficients[0]
        for i in range(1, len(coefficients)):
            total = total * x + coefficients[i]
        return total

    @compiled
    def box_muller(w, v):
        # (r cos a, r sin a), float32: step 3 of the law. u = m 2^e with m between sqrt(1/2) and sqrt(2)
        u = np.float32(np.int32(w >> np.uint32(8))) * _2_24 + _2_25
        bits = np.float32(u).view(np.int32)
        e = np.int32(bits - SQRT_HALF_BITS) >> np.int32(23)
        f = np.int32(bits - (e << np.int32(23))).view(np.float32) - _ONE
        f2 = f * f
        log_u = np.float32(e) * LN2 + (f + (f2 * _MINUS_HALF + horner(LOG, f) * f * f2))
        r = np.sqrt(_MINUS_TWO * log_u)

        half_turns = np.float32(np.int32(v >> np.uint32(8))) * _2_22  # 2 a / pi: quadrant plus the angle within it
        shifted = half_turns + ROUNDER
        quadrant = np.float32(shifted).view(np.uint32)
        x = (half_turns - (shifted - ROUNDER)) * _HALF
        x2 = x * x
        near_sin, near_cos = horner(SIN, x2) * x, horner(COS, x2)
        odd = (quadrant & np.uint32(1)) == np.uint32(1)
        sin, cos = np.float32(where(odd, near_cos, near_sin)), np.float32(where(odd, near_sin, near_cos))
        sign, other_sign = quadrant & np.uint32(2), (quadrant + np.uint32(1)) & np.uint32(2)
        sin = np.uint32(sin.view(np.uint32) ^ (sign << np.uint32(30))).view(np.float32)
        cos = np.uint32(cos.view(np.uint32) ^ (other_sign << np.uint32(30))).view(np.float32)
        return r * cos, r * sin

    @compiled
    def gaussian(w0, w1, w2, w3):
        z0, z1 = box_muller(w0, w1)
        z2, z3 = box_muller(w2, w3)
        return z0, z1, z2, z3

    @compiled
    def sum_of_bytes(w):
        # two sums of two bytes each, in the two halves of a word, then their total
        pairs = (w & np.uint32(0x00FF00FF)) + ((w >> np.uint32(8)) & np.uint32(0x00FF00FF))
        total = (pairs + (pairs >> np.uint32(16))) & np.uint32(0xFFFF)
        return np.float32(np.int32(total) - np.int32(BYTE_SUM_MEAN)) * BYTE_SUM_SCALE

    @compiled
    def byte_sum(w0, w1, w2, w3):
        return sum_of_bytes(w0), sum_of_bytes(w1), sum_of_bytes(w2), sum_of_bytes(w3)

    return philox_words, box_muller, gaussian, byte_sum


_inline = njit(error_model="numpy", inline="always")
_reference_words, _box_muller, *_REFERENCES = _numbers_of_law(lambda function: function, np.where)
_philox_words, _normal_pair, _gaussian, _byte_sum = _numbers_of_law(_inline, _inline(lambda c, a, b: a if c else b))


# The reference, in NumPy.


def philox(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Apply Philox4x32-10 to uint32 (..., 4) counters, with the halves of a key; return uint32 (..., 4) words."""
    with np.errstate(over="ignore"):  # the sums of the key are modulo 2^32
        return np.stack(_reference_words(*np.moveaxis(counter, -1, 0), *map(np.uint32, key)), axis=-1)


def words(key: int, rows: np.ndarray, quads: np.ndarray, third: int, fourth: int) -> np.ndarray:
    """Return the words of the counters (quad, row, third, fourth), uint32 (rows, quads, 4)."""
    counter = np.empty((len(rows), len(quads), 4), np.uint32)
    counter[..., 0], counter[..., 1] = quads, np.asarray(rows)[:, None]
    counter[..., 2], counter[..., 3] = third, fourth
    return philox(counter, (key & 0xFFFFFFFF, key >> 32))


# The fast path, in numba.


def _loop_over_counters(four_numbers: Callable) -> Callable:
    """Return the innermost loop, which takes nearly all the time, for one distribution."""

    @_inline
    def add_member(total, counters, n, param_id, stream, k0, k1, coefficient):
        # total[i, j] += coefficient * (number i of counter j) for j < n
        for j in range(n):
            w0, w1, w2, w3 = _philox_words(counters[0, j], counters[1, j], param_id, stream, k0, k1)
            z0, z1, z2, z3 = four_numbers(w0, w1, w2, w3)
            total[0, j] += coefficient * z0
            total[1, j] += coefficient * z1
            total[2, j] += coefficient * z2
            total[3, j] += coefficient * z3

    return add_member


_add_gaussian, _add_byte_sum = _loop_over_counters(_gaussian), _loop_over_counters(_byte_sum)


def _add_noise_kernel(
    kind, out, master, start, keys, coefficients, offsets, rows, cols, ids, row0, col0, stream, part, parts
):
    """Set out = master + (start + c_0 eps_0 + c_1 eps_1 + ...) for each tensor in a buffer, rounding each operation.

    A tensor gets the window of its parameter's noise that begins at ``row0`` and ``col0``; both are 0 if it is whole.
    """
    counters = np.zeros((2, _BLOCK), np.uint32)
    total = np.empty((4, _BLOCK), np.float32)
    line = np.empty(4 * _BLOCK, np.float32)
    first_quad, lead = col0 >> 2, col0 & 3
    for i in range(len(offsets)):
        # Quads of four columns, counted across all rows including partial ones; a share is a range of quads.
        row_quads = ((col0 + cols[i] + 3) >> 2) - first_quad
        quads = rows[i] * row_quads
        stop = quads * (part + 1) // parts
        for begin in range(quads * part // parts, stop, _BLOCK):
            n = min(_BLOCK, stop - begin)
            row, quad = begin // row_quads, begin % row_quads
            j = 0
            while j < n:
                # A slice, because LLVM does not vectorise indices with an offset, which might be negative.
                piece = counters[:, j : j + min(n - j, row_quads - quad)]
                for x in range(piece.shape[1]):
                    piece[0, x] = np.uint32(first_quad + quad + x)
                    piece[1, x] = np.uint32(row0 + row)
                j, row, quad = j + piece.shape[1], row + 1, 0

            # Whole vectors only; the surplus numbers come from stale counters and are not used.
            padded = (n + 15) // 16 * 16
            total[:] = start
            for m in range(len(keys)):
                k0, k1 = np.uint32(keys[m]), np.uint32(keys[m] >> np.uint64(32))
                if kind == GAUSSIAN:
                    _add_gaussian(total, counters, padded, ids[i], stream, k0, k1, coefficients[m])
                else:
                    _add_byte_sum(total, counters, padded, ids[i], stream, k0, k1, coefficients[m])
            for j in range(n):
                for x in range(4):
                    line[4 * j + x] = total[x, j]

            row, quad = begin // row_quads, begin % row_quads
            j = 0
            while j < n:
                taken = min(n - j, row_quads - quad)
                # The columns of this piece within the row, and their position in the line.
                left, right = max(4 * quad - lead, 0), min(4 * (quad + taken) - lead, cols[i])
                shift, base = 4 * (j - quad) + lead, offsets[i] + row * cols[i]
                noise = line[shift + left : shift + right]
                source, target = master[base + left : base + right], out[base + left : base + right]
                for x in range(right - left):
                    target[x] = source[x] + noise[x]
                j, row, quad = j + taken, row + 1, 0


def jit_cached(kernel: Callable, **options) -> Callable:
    """Compile a kernel at its first call and cache the machine code on disk for worker processes and later runs."""
    try:
        return njit(error_model="numpy", nogil=True, cache=True, **options)(kernel)
    except RuntimeError:
        # Neither the package's folder nor the user's cache folder is writable: every process compiles for itself.
        return njit(error_model="numpy", nogil=True, **options)(kernel)


add_noise = jit_cached(_add_noise_kernel)


# Low-rank noise: a product of two factors for each matrix.
_add_one = njit(error_model="numpy")(_add_noise_kernel)


def root(rank: int) -> np.float32:
    """Return 1 / sqrt(rank), rounded as the law prescribes and thus equal on every machine."""
    return np.float32(1 / np.sqrt(np.float64(rank)))


def _add_rows_kernel(kind, out, keys, scale, row0, col0, param_id, stream):
    """Add scale * each member's numbers, from row row0 and column col0 on, to out: (members, rows, n)."""
    shape = np.array([out.shape[1]]), np.array([out.shape[2]])
    zero, one, ids = np.zeros(1, np.int64), np.full(1, scale), np.full(1, param_id)
    for n in range(len(keys)):
        flat = out[n].reshape(out.shape[1] * out.shape[2])
        _add_one(kind, flat, flat, NOTHING, keys[n : n + 1], one, zero, *shape, ids, row0, col0, stream, 0, 1)


def _add_products_kernel(out, source, start, coefficients, a, b, base, stride):
    """Set out = source + (start + c_0 E_0 + c_1 E_1 + ...), rounding each operation.

    E_n[i, j] is the sum over k of a[n, k, i] b[n, k, j].

    Args:
        out, source: flat buffers that hold a matrix.
        start: value at which the sum starts.
        coefficients: (members).
        a, b: (members, rank, rows) and (members, rank, cols).
        base, stride: position in the buffers of the first of these rows and cols, and distance between rows.
    """
    members, rank, cols = b.shape
    total, product = np.empty(_COLUMNS, np.float32), np.empty(_COLUMNS, np.float32)
    for i in range(a.shape[2]):
        for first in range(0, cols, _COLUMNS):
            width = min(_COLUMNS, cols - first)
            total[:width] = start
            for n in range(members):
                c, last = coefficients[n], first + width
                factor, line = a[n, 0, i], b[n, 0, first:last]
                if rank == 1:
                    for j in range(width):
                        total[j] += c * (factor * line[j])
                    continue
                for j in range(width):
                    product[j] = factor * line[j]
                k = 1
                while k + 4 <= rank:  # same order of additions as one by one, with fewer passes over the line
                    f0, f1, f2, f3 = a[n, k, i], a[n, k + 1, i], a[n, k + 2, i], a[n, k + 3, i]
                    l0, l1 = b[n, k, first:last], b[n, k + 1, first:last]
                    l2, l3 = b[n, k + 2, first:last], b[n, k + 3, first:last]
                    for j in range(width):
                        product[j] = (((product[j] + f0 * l0[j]) + f1 * l1[j]) + f2 * l2[j]) + f3 * l3[j]
                    k += 4
                while k < rank:
                    factor, line = a[n, k, i], b[n, k, first:last]
                    for j in range(width):
                        product[j] += factor * line[j]
                    k += 1
                for j in range(width):
                    total[j] += c * product[j]
            place = base + i * stride + first
            given, written = source[place : place + width], out[place : place + width]
            for j in range(width):
                written[j] = given[j] + total[j]


add_rows = jit_cached(_add_rows_kernel)
add_products = jit_cached(_add_products_kernel)
