"""The noise law on a GPU, in Triton: one kernel launch perturbs a whole model and one updates it.

`noise` states the law; the operations and their order are the same as in `_noise_cpu`, and so are the bits. A launch
runs over tiles of Philox counters of all tensors; a table in device memory says where each tensor lies. Tensors with
low-rank noise have a separate launch over tiles of their rows and columns: a tile's factors are few compared with its
weights and are drawn where they are used. Keys and coefficients are read from device memory and nothing is allocated,
so that a launch disturbs no CUDA graph. Without a GPU the same code runs in Triton's interpreter, if TRITON_INTERPRET=1
is set before Triton is imported.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from evoalign_lib import _noise_cpu
from evoalign_lib._noise_host import MasterOnDevice

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr
except ImportError as error:
    raise ImportError("the noise law on a GPU needs Triton. Install torch's CUDA wheels (Linux).") from error

INTERPRETED = bool(triton.knobs.runtime.interpret)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Philox counters per tile, and warps that share a tile. In the interpreter an operation costs the same at any width.
TILE, WARPS = (1 << 14, 1) if INTERPRETED else (512, 4)

# Columns of the table of tensors, all int64.
_ID, _STREAM, _FIRST_ROW, _FIRST_QUAD, _LEAD, _COLS = map(constexpr, range(6))
_ROW_QUADS, _QUADS, _FIRST_TILE, _MASTER, _WORKING, _STRIDE = map(constexpr, range(6, 12))
_APART = constexpr(12)
_WIDTH = constexpr(13)

# Rows and columns of a tile of low-rank noise.
TILE_ROWS, TILE_COLS = (64, 1 << 8) if INTERPRETED else (32, 128)

# Columns of the table of tensors with low-rank noise, all int64. Quads are four rows or columns of the parameter.
_L_ID, _L_ROW_QUAD, _L_ROW_LEAD, _L_ROWS, _L_COL_QUAD, _L_COL_LEAD = map(constexpr, range(6))
_L_COLS, _L_ACROSS, _L_FIRST_TILE, _L_MASTER, _L_WORKING, _L_STRIDE = map(constexpr, range(6, 12))

# The law's constants as Python numbers, which Triton converts back to float32 and uint32.
_ROUNDS = constexpr(_noise_cpu.ROUNDS)
_M0, _M1, _W0, _W1 = (constexpr(int(n)) for n in (_noise_cpu.M0, _noise_cpu.M1, _noise_cpu.W0, _noise_cpu.W1))
_LOG, _SIN, _COS = (constexpr(tuple(map(float, c))) for c in (_noise_cpu.LOG, _noise_cpu.SIN, _noise_cpu.COS))
_NUMBERS = _noise_cpu.LN2, _noise_cpu.ROUNDER, _noise_cpu.BYTE_SUM_SCALE
_LN2, _ROUNDER, _SCALE = (constexpr(float(n)) for n in _NUMBERS)
_MEAN = constexpr(_noise_cpu.BYTE_SUM_MEAN)
_SQRT_HALF_BITS = constexpr(int(_noise_cpu.SQRT_HALF_BITS))
_2_22, _2_24, _2_25 = constexpr(2.0**-22), constexpr(2.0**-24), constexpr(2.0**-25)
_GAUSSIAN = constexpr(_noise_cpu.GAUSSIAN)
# Where a GPU rounds to the nearest bfloat16, the interpreter truncates.
_ROUND_BY_HAND = constexpr(INTERPRETED)


# Numbers.


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):
    for _ in tl.static_range(_ROUNDS):
        high0, low0 = tl.umulhi(c0, _M0), c0 * _M0
        high1, low1 = tl.umulhi(c2, _M1), c2 * _M1
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _W0, k1 + _W1
    return c0, c1, c2, c3


@triton.jit
def _horner(coefficients: constexpr, n: constexpr, x):
    total = x * coefficients[0] + coefficients[1]
    for i in tl.static_range(2, n):
        total = total * x + coefficients[i]
    return total


@triton.jit
def _normal_pair(w, v):
    u = (w >> 8).to(tl.int32).to(tl.float32) * _2_24 + _2_25
    bits = u.to(tl.int32, bitcast=True)
    e = (bits - _SQRT_HALF_BITS) >> 23
    f = (bits - (e << 23)).to(tl.float32, bitcast=True) - 1.0
    f2 = f * f
    log_u = e.to(tl.float32) * _LN2 + (f + (f2 * -0.5 + _horner(_LOG, 9, f) * f * f2))
    r = tl.sqrt_rn(log_u * -2.0)

    half_turns = (v >> 8).to(tl.int32).to(tl.float32) * _2_22
    shifted = half_turns + _ROUNDER
    quadrant = shifted.to(tl.uint32, bitcast=True)
    x = (half_turns - (shifted - _ROUNDER)) * 0.5
    x2 = x * x
    near_sin, near_cos = _horner(_SIN, 5, x2) * x, _horner(_COS, 5, x2)
    odd = (quadrant & 1) == 1
    sin, cos = tl.where(odd, near_cos, near_sin), tl.where(odd, near_sin, near_cos)
    sin = (sin.to(tl.uint32, bitcast=True) ^ ((quadrant & 2) << 30)).to(tl.float32, bitcast=True)
    cos = (cos.to(tl.uint32, bitcast=True) ^ (((quadrant + 1) & 2) << 30)).to(tl.float32, bitcast=True)
    return r * cos, r * sin


@triton.jit
def _sum_of_bytes(w):
    pairs = (w & 0x00FF00FF) + ((w >> 8) & 0x00FF00FF)
    total = (pairs + (pairs >> 16)) & 0xFFFF
    return (total.to(tl.int32) - _MEAN).to(tl.float32) * _SCALE


@triton.jit
def _numbers(c0, c1, c2, c3, key, KIND: constexpr):
    """Return four arrays, float32 (tile,): the numbers for the four columns of each counter."""
    w0, w1, w2, w3 = _philox(c0, c1, c2, c3, key.to(tl.uint32), (key >> 32).to(tl.uint32))
    if KIND == _GAUSSIAN:
        z0, z1 = _normal_pair(w0, w1)
        z2, z3 = _normal_pair(w2, w3)
    else:
        z0, z1, z2, z3 = _sum_of_bytes(w0), _sum_of_bytes(w1), _sum_of_bytes(w2), _sum_of_bytes(w3)
    return z0, z1, z2, z3


@triton.jit
def _columns(z0, z1, z2, z3, BLOCK: constexpr):
    """Join four arrays (tile,) into (tile, 4). Each join adds a last axis, hence z0 with z2 and z1 with z3 first."""
    return tl.reshape(tl.join(tl.join(z0, z2), tl.join(z1, z3)), (BLOCK, 4))


@triton.jit
def _cast(x, like: constexpr):
    """Round x to the nearest value of another dtype, ties to even."""
    if _ROUND_BY_HAND and like == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, nearest, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(like)


# Kernels.


@triton.jit
def _place(table, of_tile, FLAT: constexpr, BLOCK: constexpr):
    """Locate this program's tile.

    Returns its counters (quads, rows, parameter id, stream), uint32, the first two (BLOCK,); the positions of its
    weights in the master and in the working tensor, int64 (BLOCK, 4); and a mask of those that exist.
    """
    tile = tl.program_id(0)
    entry = table + tl.load(of_tile + tile).to(tl.int64) * _WIDTH
    inside = tl.arange(0, BLOCK).to(tl.uint32)
    begin = (tile - tl.load(entry + _FIRST_TILE)).to(tl.uint32) * BLOCK
    # 32-bit divisions are cheap enough, 64-bit ones are not; no tensor has 2**32 quads.
    row_quads = tl.load(entry + _ROW_QUADS).to(tl.uint32)
    row, quad = (begin + inside) // row_quads, (begin + inside) % row_quads
    c0 = tl.load(entry + _FIRST_QUAD).to(tl.uint32) + quad
    c1 = tl.load(entry + _FIRST_ROW).to(tl.uint32) + row
    c2, c3 = tl.load(entry + _ID).to(tl.uint32), tl.load(entry + _STREAM).to(tl.uint32)
    exists = (begin + inside < tl.load(entry + _QUADS).to(tl.uint32))[:, None]
    master = tl.load(entry + _MASTER)
    working = tl.load(entry + _WORKING) + tl.program_id(1).to(tl.int64) * tl.load(entry + _APART)
    fours = tl.arange(0, 4)[None, :]
    if FLAT:
        # The tensor consists of whole, aligned quads, so that four elements are loaded and stored at a time.
        first, column = begin.to(tl.int64) * 4, (inside.to(tl.int32) * 4)[:, None] + fours
        master = tl.multiple_of(master + first, 4) + column
        working = tl.multiple_of(working + first, 4) + column
    else:
        column = (quad.to(tl.int64) * 4 - tl.load(entry + _LEAD))[:, None] + fours
        row = row.to(tl.int64)[:, None]
        exists = exists & (column >= 0) & (column < tl.load(entry + _COLS))
        master = master + row * tl.load(entry + _COLS) + column
        working = working + row * tl.load(entry + _STRIDE) + column
    return c0, c1, c2, c3, master, working, exists


@triton.jit
def _start(shape: constexpr, UPDATE: constexpr):
    """Return the starting value of a sum of noise: 0 in an update, else -0, which changes no bit of the first term."""
    zero = tl.zeros(shape, tl.float32)
    return zero if UPDATE else zero * -1.0


@triton.jit
def _add_kernel(
    target, master, table, tiles, keys, coefs, n, UPDATE: constexpr, KIND: constexpr, FLAT: constexpr, BLOCK: constexpr
):
    """Set target = cast(master + (start + c_0 eps_0 + c_1 eps_1 + ...)), rounding each operation.

    n: members of the sum, the first of which is this program's second number.
    """
    first = tl.program_id(1)
    c0, c1, c2, c3, source, working, exists = _place(table, tiles, FLAT, BLOCK)
    t0 = _start((BLOCK,), UPDATE)
    t1, t2, t3 = t0, t0, t0
    for m in range(first, first + tl.load(n)):
        z0, z1, z2, z3 = _numbers(c0, c1, c2, c3, tl.load(keys + m), KIND)
        c = tl.load(coefs + m)
        t0, t1, t2, t3 = t0 + c * z0, t1 + c * z1, t2 + c * z2, t3 + c * z3
    weights = tl.load(master + source, exists, 0.0) + _columns(t0, t1, t2, t3, BLOCK)
    tl.store(target + (source if UPDATE else working), _cast(weights, target.dtype.element_ty), exists)


@triton.jit
def _low_rank_place(table, of_tile, ROWS: constexpr, COLS: constexpr):
    """Locate this program's tile of a tensor with low-rank noise.

    Returns the quads of its rows, (ROWS / 4,), and columns, (COLS / 4,), uint32; the parameter id; the positions of its
    weights in the master and in the working tensor, int64 (ROWS, COLS); and a mask of those that exist.
    """
    tile = tl.program_id(0)
    entry = table + tl.load(of_tile + tile).to(tl.int64) * _WIDTH
    place, across = (tile - tl.load(entry + _L_FIRST_TILE)).to(tl.int32), tl.load(entry + _L_ACROSS).to(tl.int32)
    down, right = place // across, place % across
    row_quads = (down * (ROWS // 4) + tl.arange(0, ROWS // 4)).to(tl.uint32)
    row_quads = tl.load(entry + _L_ROW_QUAD).to(tl.uint32) + row_quads
    col_quads = (right * (COLS // 4) + tl.arange(0, COLS // 4)).to(tl.uint32)
    col_quads = tl.load(entry + _L_COL_QUAD).to(tl.uint32) + col_quads
    row = (down.to(tl.int64) * ROWS - tl.load(entry + _L_ROW_LEAD) + tl.arange(0, ROWS))[:, None]
    col = (right.to(tl.int64) * COLS - tl.load(entry + _L_COL_LEAD) + tl.arange(0, COLS))[None, :]
    cols = tl.load(entry + _L_COLS)
    exists = (row >= 0) & (row < tl.load(entry + _L_ROWS)) & (col >= 0) & (col < cols)
    master = tl.load(entry + _L_MASTER) + row * cols + col
    working = tl.load(entry + _L_WORKING) + row * tl.load(entry + _L_STRIDE) + col
    return row_quads, col_quads, tl.load(entry + _L_ID).to(tl.uint32), master, working, exists


@triton.jit
def _factor(quads, k, param_id, stream: constexpr, key, KIND: constexpr, N: constexpr):
    """Return row k of a factor for N // 4 quads, float32 (N,)."""
    same = tl.zeros((N // 4,), tl.int32)
    c1, c3 = (same + k).to(tl.uint32), (same + stream).to(tl.uint32)
    z0, z1, z2, z3 = _numbers(quads, c1, same.to(tl.uint32) + param_id, c3, key, KIND)
    return tl.reshape(_columns(z0, z1, z2, z3, N // 4), (N,))


@triton.jit
def _add_low_rank_kernel(
    target,
    master,
    table,
    tiles,
    keys,
    coefs,
    n,
    root,
    rank,
    UPDATE: constexpr,
    KIND: constexpr,
    ROWS: constexpr,
    COLS: constexpr,
):
    """Set target = cast(master + (start + c_0 E_0 + c_1 E_1 + ...)), rounding each operation."""
    row_quads, col_quads, param_id, source, working, exists = _low_rank_place(table, tiles, ROWS, COLS)
    total = _start((ROWS, COLS), UPDATE)
    for m in range(tl.load(n)):
        key = tl.load(keys + m)
        a = _factor(row_quads, 0, param_id, 1, key, KIND, ROWS) * root
        noise = a[:, None] * _factor(col_quads, 0, param_id, 2, key, KIND, COLS)[None, :]
        for k in range(1, rank):
            a = _factor(row_quads, k, param_id, 1, key, KIND, ROWS) * root
            noise = noise + a[:, None] * _factor(col_quads, k, param_id, 2, key, KIND, COLS)[None, :]
        total = total + tl.load(coefs + m) * noise
    weights = tl.load(master + source, exists, 0.0) + total
    tl.store(target + (source if UPDATE else working), _cast(weights, target.dtype.element_ty), exists)


# A model on a device.


class _Launch(NamedTuple):
    """The tensors of one launch, alike in dtype, kind of noise, and whether they are flat (see `_place`)."""

    target: torch.Tensor  # any of the tensors; the table's addresses are relative to it
    flat: bool
    low_rank: bool  # if so, the table has the columns _L_...
    table: torch.Tensor  # int64 (tensors, _WIDTH)
    of_tile: torch.Tensor  # int32 (tiles,)


class DeviceWeights(MasterOnDevice):
    """A float32 master on a GPU, together with the working tensors to which members' weights are written.

    Created by `noise.device_weights`, which checks the arguments; they are those of `MasterOnDevice`.

    Raises:
        RuntimeError: tensors that are not on a GPU, outside Triton's interpreter.
    """

    def __init__(self, matrices: Sequence[torch.Tensor], windows: Sequence[tuple[int, int, int]], *law: Any):
        device = matrices[0].device
        if not (INTERPRETED or device.type == "cuda"):
            raise RuntimeError(
                f"Triton's kernels need a GPU, got tensors on {device}; to run them in Triton's interpreter, set "
                "TRITON_INTERPRET=1 before Triton is imported"
            )
        super().__init__(matrices, windows, *law)
        self._launches = self._plan()
        # read by the kernels at fixed addresses
        self._keys = torch.zeros(self.most_members, dtype=torch.int64, device=device)
        self._coefficients = torch.zeros(self.most_members, dtype=torch.float32, device=device)
        self._members = torch.zeros(1, dtype=torch.int32, device=device)

    def _add(self, keys, coefficients, to_master, each=False):
        n, rank = len(keys), max(self._ranks)
        self._keys[:n].copy_(torch.from_numpy(keys.view(np.int64)))
        self._coefficients[:n].copy_(torch.from_numpy(coefficients))
        self._members.fill_(1 if each else n)
        # the law forbids fused multiply-adds
        common = {"UPDATE": to_master, "KIND": self._kind, "num_warps": WARPS, "enable_fp_fusion": False}
        population = self._keys, self._coefficients, self._members
        with torch.cuda.device_of(self.master):
            for launch in self._launches:
                target = self.master if to_master else launch.target
                grid = len(launch.of_tile), n if each else 1
                given = target, self.master, launch.table, launch.of_tile, *population
                if launch.low_rank:
                    given += float(_noise_cpu.root(rank)), rank
                    _add_low_rank_kernel[grid](*given, ROWS=TILE_ROWS, COLS=TILE_COLS, **common)
                else:
                    _add_kernel[grid](*given, FLAT=launch.flat, BLOCK=TILE, **common)

    def _plan(self) -> list[_Launch]:
        """Return launches over all non-empty tensors, one for each combination of dtype, flatness and kind of noise."""
        groups: dict[tuple[torch.dtype, bool, bool], tuple[torch.Tensor, list, list]] = {}
        every = zip(self._matrices, self._offsets, self._windows, self._ranks, self._aparts, strict=True)
        for matrix, offset, (param_id, row0, col0), rank, apart in every:
            if not matrix.numel():
                continue
            (rows, cols), (quad, lead), is_low = matrix.shape, divmod(col0, 4), rank > 0
            if is_low:
                across = -(-(lead + cols) // TILE_COLS)
                size = tiles = -(-((row0 & 3) + rows) // TILE_ROWS) * across
                place = [row0 >> 2, row0 & 3, rows, quad, lead, cols, across]
            else:
                across = (lead + cols + 3) >> 2
                size, tiles = rows * across, -(-rows * across // TILE)
                place = [self._stream, row0, quad, lead, cols, across, size]
            if size >= (1 << 31 if is_low else (1 << 32) - TILE):
                shape = tuple(matrix.shape)
                raise ValueError(f"a tensor of {shape} has too many elements for one launch; split it into pieces")
            in_fours = all(n % 4 == 0 for n in (lead, cols, apart, matrix.data_ptr() // matrix.element_size()))
            flat = not is_low and in_fours and matrix.is_contiguous()
            target, entries, counts = groups.setdefault((matrix.dtype, flat, is_low), (matrix, [], []))
            # where the tensor begins, in elements from the group's first one
            begin = (matrix.data_ptr() - target.data_ptr()) // matrix.element_size()
            entries.append([param_id, *place, sum(counts), offset, begin, matrix.stride(0), apart])
            counts.append(tiles)
        launches, device = [], self.master.device
        for (_, flat, is_low), (target, entries, counts) in groups.items():
            table = torch.tensor(entries, dtype=torch.int64, device=device)
            of_tile = torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32), torch.tensor(counts))
            launches.append(_Launch(target, flat, is_low, table, of_tile.to(device)))
        return launches
