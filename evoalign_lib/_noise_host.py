"""What the noise law and its implementations share: checks, and its numbers in flat buffers and tensors on a CPU."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from evoalign_lib import _noise_cpu

if TYPE_CHECKING:
    import torch

    from evoalign_lib._anchor import TensorAnchor

_FACTORS = 1 << 22  # numbers of low-rank factors in memory at once, 16 MB
_LEAST_TILE = 64  # rows and columns of a matrix to which they are added at a time, at least


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


class Entry(NamedTuple):
    """One parameter of a Layout."""

    name: str  # canonical Hugging Face name
    shape: tuple[int, ...]
    rows: int  # of the matrix that the noise law sees
    cols: int
    offset: int  # position of the first element in the flat buffer
    id: int  # parameter id


def factors_of(
    kind: int, keys: np.ndarray, param_id: int, rank: int, rows: tuple[int, int], cols: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return what `factors` returns, given the number of the distribution and the id that it uses."""
    return (
        rows_of_members(kind, keys, param_id, rank, rows, 1, _noise_cpu.root(rank)),
        rows_of_members(kind, keys, param_id, rank, cols, 2),
    )


def rows_of_members(
    kind: int,
    keys: np.ndarray,
    param_id: int,
    rows: int,
    cols: tuple[int, int],
    stream: int,
    scale: np.float32 = np.float32(1),  # noqa: B008, a number
) -> np.ndarray:
    """Return scale * the numbers of each member in the first rows and in these columns, float32 (members, rows, n)."""
    drawn = np.full((len(keys), rows, cols[1] - cols[0]), _noise_cpu.NOTHING)
    _noise_cpu.add_rows(kind, drawn, keys, scale, cols[0], np.uint32(param_id), np.uint32(stream))
    return drawn


def add_noise(
    kind: int,
    out: np.ndarray,
    source: np.ndarray,
    start: np.float32,
    keys: int | np.ndarray,
    coefficients: np.ndarray,
    table: tuple[np.ndarray, ...],
    first: tuple[int, int] = (0, 0),
    stream: int = 0,
    part: tuple[int, int] = (0, 1),
) -> None:
    """out = source + (start + sum of c_n eps_n) for each tensor of the table, in numba."""
    source = read_only(source)
    keys = np.array([keys], np.uint64) if isinstance(keys, int) else keys
    _noise_cpu.add_noise(kind, out, source, start, keys, coefficients, *table, *first, np.uint32(stream), *part)


def read_only(array: np.ndarray) -> np.ndarray:
    """Return a read-only view, as all sources are: numba compiles anew for each kind of argument."""
    view = array.view()
    view.flags.writeable = False
    return view


def add_products(
    out: np.ndarray,
    source: np.ndarray,
    start: np.float32,
    keys: np.ndarray,
    coefficients: np.ndarray,
    entry: Entry,
    rank: int,
    kind: int,
    first: tuple[int, int] = (0, 0),
    part: tuple[int, int] = (0, 1),
) -> None:
    """out = source + (start + sum of c_n E_n) for one matrix in flat buffers, or its i-th of n shares.

    Factors of many members are large: a tile of the matrix is done at a time, for which `_FACTORS` numbers suffice.
    Entry: where the matrix lies, a window of its parameter that begins at `first`, and the id that the kernels use.
    """
    side = max(_LEAST_TILE, _FACTORS // max(1, 2 * rank * len(keys)))
    begin, end = (entry.rows * i // part[1] for i in (part[0], part[0] + 1))
    row0, col0 = first
    for row in range(begin, end, side):
        rows = row0 + row, row0 + min(row + side, end)
        for col in range(0, entry.cols, side):
            cols = col0 + col, col0 + min(col + side, entry.cols)
            a, b = factors_of(kind, keys, entry.id, rank, rows, cols)
            place = entry.offset + row * entry.cols + col
            _noise_cpu.add_products(out, read_only(source), start, coefficients, a, b, place, entry.cols)


class MasterOnDevice:
    """A float32 master of tensors on one device, which members' weights are written to.

    Args:
        matrices: the working tensors as (rows, cols), columns adjacent.
        kind: number of the distribution.
        anchor: where the tensors started, if updates decay toward it.
    """

    def __init__(self, matrices: Sequence[torch.Tensor], kind: int, anchor: TensorAnchor | None):
        import torch

        self._matrices, self._kind, self._anchor = list(matrices), kind, anchor
        self._offsets, size = [], 0
        for matrix in matrices:
            self._offsets.append(size)
            size = -(-(size + matrix.numel()) // _noise_cpu.ALIGNMENT) * _noise_cpu.ALIGNMENT
        self.master = torch.zeros(size, dtype=torch.float32, device=matrices[0].device)
        """float32 (size,): the tensors one after the other, as a `Layout` of them in this order has them"""
        for view, matrix in zip(self.views(), matrices, strict=True):
            view.copy_(matrix)

    def views(self) -> list[torch.Tensor]:
        """Return the master of each working tensor, float32 (rows, cols), without a copy."""
        return [
            self.master[offset : offset + matrix.numel()].view(matrix.shape)
            for offset, matrix in zip(self._offsets, self._matrices, strict=True)
        ]

    def restore(self) -> None:
        """Write the master itself, cast to the working tensors' dtypes."""
        for view, matrix in zip(self.views(), self._matrices, strict=True):
            matrix.copy_(view)


class HostWeights(MasterOnDevice):
    """What `DeviceWeights` is on a GPU, for tensors on a CPU: a float32 master and members written from it.

    Made by `device_weights`, which checks the arguments: working tensors as (rows, cols), (parameter id, first row,
    first column) of each in its parameter, the number of the distribution, the tensors' start if updates decay toward
    it, and the rank of each tensor's noise.
    """

    def __init__(
        self,
        matrices: Sequence[torch.Tensor],
        windows: Sequence[tuple[int, int, int]],
        kind: int,
        anchor: TensorAnchor | None = None,
        ranks: Sequence[int] = (),
    ):
        super().__init__(matrices, kind, anchor)
        self._windows, self._ranks = list(windows), list(ranks) or [0] * len(self._matrices)

    def perturb(self, key: int, sigma: float, sign: int = 1) -> None:
        """Write one member's weights; arguments, bits and errors are those of `DeviceWeights.perturb`."""
        import torch

        key, scale = unsigned("key", key, 64), np.array([signed_sigma(sigma, sign)])
        keys = np.array([key], np.uint64)
        for view, matrix, *place in zip(self.views(), self._matrices, self._windows, self._ranks, strict=True):
            member = np.empty(view.numel(), np.float32)
            self._add(member, view, _noise_cpu.NOTHING, keys, scale, *place)
            matrix.copy_(torch.from_numpy(member).view(matrix.shape))

    def update(self, keys: np.ndarray, coefficients: np.ndarray) -> None:
        """Add the members' noise to the master; arguments, bits and errors are those of `DeviceWeights.update`."""
        check_members(keys, coefficients)
        if self._anchor is not None:
            self._anchor.decay(self.views())
        used = coefficients != 0  # as in `update`: a term of +-0 changes no sum
        for view, *place in zip(self.views(), self._windows, self._ranks, strict=True):
            self._add(view.numpy().reshape(-1), view, _noise_cpu.ZERO, keys[used], coefficients[used], *place)

    def _add(self, out, view, start, keys, coefficients, window, rank) -> None:
        param_id, *first = window
        rows, cols = view.shape
        if rank:
            entry, source = Entry("", (rows, cols), rows, cols, 0, param_id), view.numpy().reshape(-1)
            add_products(out, source, start, keys, coefficients, entry, rank, self._kind, tuple(first))
            return
        table = (*(np.array([number], np.int64) for number in (0, rows, cols)), np.array([param_id], np.uint32))
        add_noise(self._kind, out, view.numpy().reshape(-1), start, keys, coefficients, table, tuple(first))
