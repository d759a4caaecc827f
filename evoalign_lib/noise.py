"""Noise law, version 1: the perturbation of every weight is a pure function of key, name, row and column.

A CPU, a GPU, an engine with sharded tensors and a replay years later regenerate the same float32 numbers from the same
64-bit member key, so only keys and coefficients are ever stored or sent. The law is part of the ledger's format:
changing a single bit of it would make a version 2.

1. Keys. ``run_key = BLAKE2b-64(u32 length of arm, arm in UTF-8, u64 seed)`` and ``member_key = BLAKE2b-64("v1", u64 run
   key, u32 step, u32 pair)``; all integers little endian, digests read as little-endian integers.
2. Words. Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). Its key is the low and the
   high half of the member key, its counter (column >> 2, row, parameter id, stream). A tensor is treated as the matrix
   [shape[0], product of the rest]; one with a single dimension is one row, one without dimensions is one element.
3. Numbers. The four words of a counter give columns 4q, ..., 4q + 3, by one of these distributions, all with zero mean
   and unit variance:

   - ``gaussian``, the default. Box-Muller on the words (w0, w1) gives columns 4q and 4q + 1 as r cos a and r sin a;
     (w2, w3) gives the next two. With w the first word and w' the second: u = (w >> 8) 2^-24 + 2^-25,
     r = sqrt(-2 log u), a = pi (w' >> 8) 2^-23.
   - ``byte_sum``. Word w_i gives column 4q + i from its bytes b0 to b3: (b0 + b1 + b2 + b3 - 510) / sqrt(21845),
     with the integer as a float32, multiplied by the float32 0.006765875. At most 3.451; excess kurtosis -0.30.
   - ``tied``. ``gaussian`` with 0 for every parameter id, so that tensors of equal shape share their noise, as in
     released codes, which reset the seed for each tensor. It exists to reproduce and measure that effect.
4. Low rank. With a rank r above 0, the noise of a tensor of two or more dimensions is E = A B^T / sqrt(r) (EGGROLL,
   arXiv 2511.16652), also with zero mean and unit variance. A[i, k] is the number at row k and column i of stream 1,
   B[j, k] the one at row k and column j of stream 2, and E[i, j] the sum over k = 0, 1, ... of a[k, i] b[k, j] with
   a[k, i] = A[i, k] s and s the float32 nearest to 1 / sqrt(r). Tensors with a single dimension (norms, biases) have
   few weights and get full-rank noise; EGGROLL's code can do the same, but freezes them by default.
5. Arithmetic. IEEE 754 float32 with + - * sqrt and bit operations only, in the order written here, never a fused
   multiply-add, with the polynomials of ``_noise_cpu``. Each of these operations is correctly rounded on every device,
   so the results are equal bit for bit; a library's log or cos would not be. No normal exceeds 5.89, and none is
   further than 1.4e-6 from Box-Muller in real arithmetic on the same float32 u.

Numba on a CPU and Triton on a GPU (``_noise_triton``; ``device_weights`` keeps a model there) give the same bits, and
so does NumPy, with which the tests run the source of the first (``_noise_cpu``) as the reference.
``noise_vectors.json`` beside this file has known answers for all three, and the tests compute the law independently,
with Python's integers and libm's functions.
"""

from __future__ import annotations

import math
import operator
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from evoalign_lib import _noise_cpu
from evoalign_lib._anchor import TensorAnchor, check_decay
from evoalign_lib._noise_host import (
    Entry,
    HostWeights,
    add_noise,
    add_products,
    check_members,
    factors_of,
    read_only,
    rows_of_members,
    signed_sigma,
    unsigned,
)
from evoalign_lib.checks import choose, require

if TYPE_CHECKING:
    import torch

    from evoalign_lib._noise_triton import DeviceWeights

NOISE_VERSION = 1
# For each name, its distribution in the kernels and whether tensors keep their own ids.
_LAWS = {
    "gaussian": (_noise_cpu.GAUSSIAN, True),
    "byte_sum": (_noise_cpu.BYTE_SUM, True),
    "tied": (_noise_cpu.GAUSSIAN, False),
}
DISTRIBUTIONS = tuple(_LAWS)


# Keys and parameter ids.


def run_key(arm: str, seed: int) -> int:
    """Return the key of a run, the root of all its noise.

    Args:
        arm: name of the arm, such as ``"es"``; different arms draw different noise from the same seed.
        seed: run seed, an unsigned 64-bit integer.

    Returns:
        BLAKE2b-64 of (u32 byte length of the arm's UTF-8 form, these bytes, u64 seed), little endian.

    Raises:
        ValueError: the arm is empty or the seed is out of range.

    >>> hex(run_key("es", 0))
    '0xdebd773ecefc2c89'
    """
    require(arm, f"arm must be a non-empty name, got {arm!r}")
    name = arm.encode()
    return _digest(struct.pack("<I", len(name)) + name + struct.pack("<Q", unsigned("seed", seed, 64)), 8)


def member_key(run_key: int, step: int, pair: int) -> int:
    """Return the key of a population member, or of an antithetic pair, at a step.

    Args:
        run_key: the run's 64-bit key.
        step: index of the step, an unsigned 32-bit integer.
        pair: index of the member in its population (or of the pair, if members are antithetic pairs), 32 bits.

    Returns:
        BLAKE2b-64 of ("v1", u64 run key, u32 step, u32 pair), little endian. Philox takes the low half as k0.

    Raises:
        ValueError: a number is out of range.

    >>> hex(member_key(run_key("es", 0), step=0, pair=0))
    '0x55360781ffe7ef06'
    """
    numbers = (unsigned("run_key", run_key, 64), unsigned("step", step, 32), unsigned("pair", pair, 32))
    return _digest(struct.pack("<2sQII", b"v1", *numbers), 8)


def parameter_id(name: str) -> int:
    """Return the BLAKE2b-32 of a parameter's canonical Hugging Face name (tied weights have one name).

    >>> hex(parameter_id("model.embed_tokens.weight"))
    '0x126f5613'
    """
    return _digest(name.encode(), 4)


def parameter_ids(names: Iterable[str]) -> dict[str, int]:
    """Return the ids of all parameters of a model, which must be distinct.

    Args:
        names: canonical Hugging Face names.

    Returns:
        The id of each name.

    Raises:
        ValueError: two names share an id and would share their noise.
    """
    ids = {name: parameter_id(name) for name in names}
    owners: dict[int, str] = {}
    for name, number in ids.items():
        if (owner := owners.setdefault(number, name)) != name:
            what = f"parameters {owner!r} and {name!r} share the noise id {number:#010x}"
            raise ValueError(f"{what}; rename one of them in the model")
    return ids


def _digest(message: bytes, size: int) -> int:
    return int.from_bytes(blake2b(message, digest_size=size).digest(), "little")


# Numbers.


def normals(
    key: int,
    param_id: int,
    shape: Sequence[int],
    *,
    rows: tuple[int, int] | None = None,
    cols: tuple[int, int] | None = None,
    stream: int = 0,
    distribution: str = "gaussian",
) -> np.ndarray:
    """Return the noise of a tensor or a window of it: normals, or a distribution with the same mean and variance.

    Args:
        key: 64-bit member key.
        param_id: the tensor's 32-bit parameter id.
        shape: the whole tensor's shape, treated as [shape[0], product of the rest] (one row if one-dimensional).
        rows: (start, stop) of the window's rows; None: all.
        cols: (start, stop) of the window's columns; None: all.
        stream: 0 full-rank noise, 1 and 2 low-rank factors A and B, 3 stochastic rounding, 4 sampling.
        distribution: "gaussian", "byte_sum" or "tied"; see step 3 of the law.

    Returns:
        float32: the whole tensor in its shape, or the window as a matrix if rows or cols is given.

    Raises:
        ValueError: a window outside the tensor, a number out of range, an unknown distribution.

    >>> tensor = normals(7, 1, (4, 6))
    >>> bool((normals(7, 1, (4, 6), rows=(1, 3), cols=(3, 6)) == tensor[1:3, 3:]).all())
    True
    """
    key, stream = unsigned("key", key, 64), unsigned("stream", stream, 32)
    n_rows, n_cols = _matrix_shape(shape)
    kind, number = _law(distribution, param_id)
    where = number, _window("rows", rows, n_rows, shape), _window("cols", cols, n_cols, shape), stream
    (window,) = rows_of_members(kind, np.array([key], np.uint64), *where)
    return window.reshape(tuple(shape)) if rows is None and cols is None else window


def factors(
    keys: np.ndarray,
    param_id: int,
    shape: Sequence[int],
    rank: int,
    *,
    rows: tuple[int, int] | None = None,
    cols: tuple[int, int] | None = None,
    distribution: str = "gaussian",
) -> tuple[np.ndarray, np.ndarray]:
    """Return the factors of members' low-rank noise for a matrix, E[i, j] = sum_k a[k, i] b[k, j].

    Args:
        keys: uint64 (members,), member keys.
        param_id: the tensor's 32-bit parameter id.
        shape: the whole tensor's shape, two dimensions or more, treated as [shape[0], product of the rest].
        rank: r, 1 or more.
        rows, cols: (start, stop) of a window of the matrix; None: all.
        distribution: distribution of the factors' numbers.

    Returns:
        a, float32 (members, rank, rows), which includes the 1 / sqrt(rank); b, float32 (members, rank, cols).

    Raises:
        ValueError: as for `normals`, or a rank below 1.
    """
    require((rank := check_rank(rank)) > 0, f"rank={rank} has no factors: pass 1 or more")
    n_rows, n_cols = _matrix_shape(shape)
    windows = _window("rows", rows, n_rows, shape), _window("cols", cols, n_cols, shape)
    return factors_of(*_law(distribution, param_id), keys, rank, *windows)


def vectors(keys: np.ndarray, param_id: int, length: int, distribution: str = "gaussian") -> np.ndarray:
    """Return members' noise for a tensor with one dimension, float32 (members, length).

    Takes the arguments and raises the errors of `factors`.
    """
    kind, number = _law(distribution, param_id)
    return rows_of_members(kind, keys, number, (0, 1), (0, length), 0)[:, 0]


def eps(key: int, param_id: int, shape: Sequence[int], rank: int = 0, **how: Any) -> np.ndarray:
    """Return a member's noise for a tensor or a window of it, of low rank if the rank is above 0.

    Arguments (including rows, cols and distribution), result and errors are as for `normals` (stream 0) and `factors`.
    """
    if not is_low_rank(shape, rank):
        return normals(key, param_id, shape, **how)
    a, b = factors(np.array([unsigned("key", key, 64)], np.uint64), param_id, shape, rank, **how)
    window = np.full((a.shape[2], b.shape[2]), _noise_cpu.NOTHING)
    flat, one = window.reshape(-1), np.ones(1, np.float32)
    _noise_cpu.add_products(flat, read_only(flat), _noise_cpu.NOTHING, one, a, b, 0, b.shape[2])
    return window if how.get("rows") or how.get("cols") else window.reshape(tuple(shape))


def check_rank(rank: int) -> int:
    """Return the rank of low-rank noise, or 0 for full rank; raise ValueError for any other value."""
    return unsigned("rank", rank, 16)


def is_low_rank(shape: Sequence[int], rank: int) -> bool:
    """Return whether a tensor of this shape gets low-rank noise: two dimensions or more, and a rank above 0."""
    return check_rank(rank) > 0 and len(shape) >= 2


def sampling_key(run_key: int, step: int) -> int:
    """Return the key of a step's sampling, shared by all members: `member_key` of the last index, which no pair has."""
    return member_key(run_key, step, (1 << 32) - 1)


def uniforms(key: int, rows: np.ndarray, length: int, sample: int = 0) -> np.ndarray:
    """Return numbers for sampling tokens by inversion, uniform over the multiples of 2^-24 in [0, 1), from stream 4.

    Word w_i of the counter (q, row, sample, 4) gives position 4q + i: (w >> 8) 2^-24.

    Args:
        key: 64-bit key, such as one from `sampling_key`.
        rows: (rows,) indices of the prompts, below 2^32; the numbers of one prompt do not depend on the others.
        length: positions per row.
        sample: index of the completion of the prompt, below 2^32.

    Returns:
        float32 (rows, length).

    Raises:
        ValueError: key or sample out of range.
    """
    key, sample = unsigned("key", key, 64), unsigned("sample", sample, 32)
    words = _noise_cpu.words(key, rows, np.arange(-(-length // 4)), sample, 4)
    return ((words >> 8).astype(np.float32) * np.float32(2**-24)).reshape(len(rows), -1)[:, :length]


def _law(distribution: str, param_id: int) -> tuple[int, int]:
    """Return the kernels' number of a distribution, and the id that they must use for a parameter."""
    choose("distribution", distribution, DISTRIBUTIONS)
    kind, own_ids = _LAWS[distribution]
    return kind, unsigned("param_id", param_id, 32) if own_ids else 0


def _matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the rows and columns of a tensor as the noise law's matrix."""
    n_rows, n_cols = (1, math.prod(shape)) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))
    size, covered = f"{n_rows} x {n_cols}", 0 <= n_rows <= 1 << 32 and 0 <= n_cols <= 1 << 34
    require(covered, f"shape {tuple(shape)} is {size}; the noise law covers 2**32 rows of 2**34 columns at most")
    return n_rows, n_cols


def _window(name: str, window: tuple[int, int] | None, length: int, shape: Sequence[int]) -> tuple[int, int]:
    if window is None:
        return 0, length
    start, stop = (operator.index(end) for end in window)
    where = f"0 to {length}, the {name} of shape {tuple(shape)}"
    require(0 <= start <= stop <= length, f"{name}=({start}, {stop}) is not a range within {where}")
    return start, stop


@dataclass(frozen=True, eq=False)
class Layout:
    """The position of each parameter of a model in one flat float32 buffer."""

    entries: tuple[Entry, ...]
    """the parameters in buffer order, each starting at a multiple of 16 elements"""
    size: int
    """length of the buffer in elements, including padding"""
    d: int
    """number of parameters, in elements without padding"""
    table: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
    """offsets, rows, cols (int64) and ids (uint32) of the entries as arrays, for the kernels"""
    padding: np.ndarray
    """int64 (size - d,), positions in the buffer that belong to no parameter"""

    @classmethod
    def from_shapes(cls, shapes: Iterable[tuple[str, Sequence[int]]]) -> Layout:
        """Lay out parameters one after the other.

        Args:
            shapes: (canonical Hugging Face name, shape) of each parameter, tied weights once.

        Returns:
            The layout, parameters in the given order.

        Raises:
            ValueError: a repeated name, two names with the same parameter id, or no parameter at all.

        >>> layout = Layout.from_shapes([("weight", (3, 5)), ("bias", (3,))])
        >>> layout.size, layout.d, [entry.offset for entry in layout.entries]
        (32, 18, [0, 16])
        """
        named = [(name, tuple(operator.index(n) for n in shape)) for name, shape in shapes]
        ids = parameter_ids(name for name, _ in named)
        require(named, "a layout needs at least one parameter, got none")
        names = [name for name, _ in named]
        require(len(ids) == len(named), f"names must differ, got {names}; list tied weights once")
        entries, padding, size = [], [], 0
        for name, shape in named:
            rows, cols = _matrix_shape(shape)
            entries.append(Entry(name, shape, rows, cols, size, ids[name]))
            end = size + rows * cols
            size = -(-end // _noise_cpu.ALIGNMENT) * _noise_cpu.ALIGNMENT
            padding.extend(range(end, size))
        _, _, *numbers, id_column = zip(*entries, strict=True)
        rows, cols, offsets = (np.array(column, np.int64) for column in numbers)
        return cls(
            entries=tuple(entries),
            size=size,
            d=size - len(padding),
            table=(offsets, rows, cols, np.array(id_column, np.uint32)),
            padding=np.array(padding, np.int64),
        )

    def views(self, buffer: np.ndarray | torch.Tensor) -> dict[str, np.ndarray | torch.Tensor]:
        """Return views of the parameters in a buffer, without copying.

        Args:
            buffer: (size,), an array or a tensor of any dtype.

        Returns:
            Name -> a view of the buffer in the parameter's shape.

        Raises:
            ValueError: the buffer is not (size,).
        """
        fits = buffer.shape == (self.size,)
        require(fits, f"the buffer must have the layout's shape ({self.size},), got {buffer.shape}")
        return {e.name: buffer[e.offset : e.offset + e.rows * e.cols].reshape(e.shape) for e in self.entries}


def perturb(
    out: np.ndarray,
    master: np.ndarray,
    layout: Layout,
    key: int,
    sigma: float,
    sign: Literal[1, -1] = 1,
    distribution: str = "gaussian",
    rank: int = 0,
) -> None:
    """Write one member's weights, out = fl(master + fl(fl32(sign * sigma) * eps)), in one pass that only reads master.

    Args:
        out: float32 (layout.size,), overwritten; its padding is copied from the master.
        master: float32 (layout.size,), not overlapping out.
        layout: the parameters in both buffers.
        key: 64-bit member key.
        sigma: standard deviation of the perturbation, weight units.
        sign: -1 for the second member of an antithetic pair.
        distribution: "gaussian", "byte_sum" or "tied".
        rank: rank of the matrices' noise; 0: full rank.

    Raises:
        TypeError, ValueError: a buffer with the wrong dtype or length, overlapping buffers, or an invalid key, sigma,
            sign, distribution or rank.
    """
    _check_buffer("out", out, layout, written=True)
    _check_buffer("master", master, layout)
    apart = not np.may_share_memory(out, master)
    require(apart, "out and master overlap; pass a separate buffer as out, since the master must not change")
    key, scale = unsigned("key", key, 64), np.array([signed_sigma(sigma, sign)])
    _add_members(out, master, layout, _noise_cpu.NOTHING, np.array([key], np.uint64), scale, distribution, rank)
    out[layout.padding] = master[layout.padding]


def update(
    master: np.ndarray,
    layout: Layout,
    keys: np.ndarray,
    coefficients: np.ndarray,
    part: tuple[int, int] = (0, 1),
    distribution: str = "gaussian",
    rank: int = 0,
) -> None:
    """Add the members' noise to the master, in place and in one pass over it.

    For each weight, acc = 0; for n in order, acc = fl(acc + fl(c_n * eps_n)); then master = fl(master + acc). By the
    rules of IEEE 754, a weight of -0 becomes 0 even if every c_n is 0.

    Args:
        master: float32 (layout.size,), changed in place except for its padding.
        layout: the parameters in it.
        keys: uint64 (members,), member keys.
        coefficients: float32 (members,), weight units; fl32(alpha * z_n / N) in an ES step.
        part: (i, n) updates only the i-th of n equal shares. Shares do not overlap, so n threads or processes that
            share a master get the same bits as a single call.
        distribution: "gaussian", "byte_sum" or "tied".
        rank: rank of the matrices' noise; 0: full rank.

    Raises:
        TypeError, ValueError: an array with the wrong dtype or length, a coefficient that is not finite, or an invalid
            part, distribution or rank.
    """
    _check_buffer("master", master, layout, written=True)
    check_members(keys, coefficients)
    index, count = (operator.index(number) for number in part)
    require(0 <= index < count, f"part must be (i, n) with 0 <= i < n, got {part}")
    # acc starts at +0, and a sum is -0 only if both terms are: adding 0 * eps = +-0 never changes acc.
    used = coefficients != 0
    keys, coefficients, share = keys[used], coefficients[used], (index, count)
    _add_members(master, master, layout, _noise_cpu.ZERO, keys, coefficients, distribution, rank, share)


def _add_members(out, source, layout: Layout, start, keys, coefficients, distribution, rank, part=(0, 1)) -> None:
    """Set out = source + (start + sum of c_n eps_n) for all parameters of a layout."""
    kind, _ = _law(distribution, 0)
    low = np.array([is_low_rank(entry.shape, rank) for entry in layout.entries])
    *place, ids = (column[~low] for column in layout.table)
    table = *place, ids if _LAWS[distribution][1] else np.zeros_like(ids)
    add_noise(kind, out, source, start, keys, coefficients, table, part=part)
    for i in np.flatnonzero(low):
        entry = layout.entries[i]._replace(id=_law(distribution, layout.entries[i].id)[1])
        add_products(kind, out, source, start, keys, coefficients, entry, rank, part=part)


def noise_vector(layout: Layout, key: int, distribution: str = "gaussian", rank: int = 0) -> np.ndarray:
    """Return a member's noise in a flat buffer.

    Args:
        layout: the parameters.
        key: 64-bit member key.
        distribution: "gaussian", "byte_sum" or "tied".
        rank: rank of the matrices' noise; 0: full rank.

    Returns:
        float32 (layout.size,), zero mean and unit variance, 0 in the padding.

    Raises:
        ValueError: a key or rank out of range, or an unknown distribution.
    """
    vector = np.zeros(layout.size, np.float32)
    for entry, view in zip(layout.entries, layout.views(vector).values(), strict=True):
        view[...] = eps(key, entry.id, entry.shape, rank, distribution=distribution)
    return vector


class Piece(NamedTuple):
    """A tensor on a device that holds a parameter or a part of one."""

    tensor: torch.Tensor
    """float32, bfloat16 or float16; may be a view into a fused tensor if its columns are adjacent"""
    name: str
    """canonical Hugging Face name of the parameter"""
    row0: int = 0
    """where the tensor begins in the parameter as a matrix, first row and (`col0`) column; above 0 in sharded models"""
    col0: int = 0
    vector: bool = False
    """whether the parameter has a single dimension although this tensor has two; its noise then has full rank"""


def device_weights(
    pieces: Iterable[Piece | tuple[torch.Tensor, str]],
    distribution: str = "gaussian",
    most_members: int = 4096,
    anchor_decay: float = 0.0,
    rank: int = 0,
    stream: int = 0,
    stacked: bool = False,
) -> DeviceWeights | HostWeights:
    """Create a float32 master for a model on its device; the model's tensors become the working copy.

    The master takes 4 bytes per parameter. On a GPU no address changes afterwards and nothing is allocated, so captured
    graphs of the model stay valid. On a CPU numba generates the noise, one tensor at a time.

    Args:
        pieces: all tensors to perturb, on one device, tied weights once.
        distribution: "gaussian", "byte_sum" or "tied".
        most_members: largest population of an update.
        anchor_decay: share of the distance from these starting weights that each update first takes back (`_anchor`);
            above 0, a copy of the tensors is kept in their dtype.
        rank: rank of the noise of tensors with two dimensions or more; 0: full rank.
        stream: stream of noise of full rank; 1 and 2 give the factors of that of low rank, (rank, rows or columns).
        stacked: the tensors have one dimension more, the first, for the members to which `perturb_each` writes.

    Returns:
        The weights, with `perturb`, `restore`, `update` and `master`. The master of a whole model has the order and
        the positions of `Layout.from_shapes` for the same names.

    Raises:
        ValueError: no piece, two names with the same parameter id, a tensor of unsupported dtype or memory layout, or
            on another device, two tensors at one address, or an anchor_decay or a rank out of range.
        RuntimeError: tensors on a device that is neither a CPU nor a GPU that Triton supports.
    """
    import torch

    rank = check_rank(rank)
    pieces = [Piece(*piece) for piece in pieces]
    require(pieces, "device_weights needs at least one tensor, got none")
    aparts = [piece.tensor.stride(0) if stacked else 0 for piece in pieces]
    pieces = [piece._replace(tensor=piece.tensor[0]) for piece in pieces] if stacked else pieces
    ids = parameter_ids(piece.name for piece in pieces)
    matrices, owners = [], {}
    for tensor, name, row0, col0, _ in pieces:
        dtypes, (first, place, *_) = (torch.float32, torch.bfloat16, torch.float16), pieces[0]
        require(tensor.dtype in dtypes, f"{name!r} is {tensor.dtype}; the noise law supports {dtypes}")
        require(tensor.device == first.device, f"{name!r} is on {tensor.device}, {place!r} on {first.device}")
        matrices.append(_matrix(name, tensor.detach()))
        rows, cols = matrices[-1].shape
        covered = row0 >= 0 and row0 + rows <= 1 << 32 and col0 >= 0 and col0 + cols <= 1 << 34 and cols < 1 << 33
        what = f"{name!r}: {rows} rows from {row0} and {cols} columns from {col0}"
        require(covered, f"{what} are beyond the noise law")
        if tensor.numel() and (owner := owners.setdefault(tensor.data_ptr(), name)) != name:
            raise ValueError(f"{owner!r} and {name!r} are at one address; list tied weights once")
    windows = [(_law(distribution, ids[piece.name])[1], piece.row0, piece.col0) for piece in pieces]
    anchor = TensorAnchor(matrices, anchor_decay) if check_decay(anchor_decay) else None
    ranks = [rank if is_low_rank(piece.tensor.shape, rank) and not piece.vector else 0 for piece in pieces]
    if pieces[0].tensor.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        kind_of_weights = HostWeights
    else:
        from evoalign_lib import _noise_triton

        kind_of_weights = _noise_triton.DeviceWeights
    return kind_of_weights(matrices, windows, ranks, _law(distribution, 0)[0], most_members, anchor, stream, aparts)


def _matrix(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as the matrix of the noise law, sharing its memory."""
    matrix = (
        tensor if tensor.ndim == 2 else tensor.view(_matrix_shape(tensor.shape)) if tensor.is_contiguous() else None
    )
    adjacent = matrix is not None and (matrix.shape[1] <= 1 or matrix.stride(1) == 1)
    require(adjacent, f"{name!r} has the strides {tensor.stride()}; its columns must be adjacent in memory")
    return matrix


def _check_buffer(name: str, buffer: np.ndarray, layout: Layout, written: bool = False) -> None:
    if buffer.dtype != np.float32:
        raise TypeError(f"{name} must be float32, got {buffer.dtype}")
    size, flags = (layout.size,), buffer.flags
    require(buffer.shape == size, f"{name} must have the layout's shape {size}, got {buffer.shape}")
    require(flags.c_contiguous, f"{name} must be contiguous, got strides {buffer.strides}; copy it first")
    require(flags.writeable or not written, f"{name} is read-only; pass a copy of it")
