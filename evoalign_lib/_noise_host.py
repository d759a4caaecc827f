"""Shared code of the noise law's implementations: checks, and noise for flat buffers and tensors on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from evoalign_lib import _noise_cpu
from evoalign_lib.checks import positive, require, whole_number

if TYPE_CHECKING:
    import torch


_FACTORS = 1 << 22  # numbers of low-rank factors in memory at once, 16 MB
_LEAST_TILE = 64  # smallest side of the tile of a matrix to which factors are added at a time


def unsigned(name: str, value: int, bits: int) -> int:
    """Return the value as an unsigned integer of this many bits; raise ValueError for anything else."""
    return whole_number(name, value, 0, (1 << bits) - 1)


def check_members(keys: np.ndarray, coefficients: np.ndarray) -> None:
    """Raise TypeError or ValueError unless keys are uint64 and coefficients finite float32, (members,) each."""
    if keys.dtype != np.uint64:
        raise TypeError(f"keys must be uint64, got {keys.dtype}")
    if coefficients.dtype != np.float32:
        raise TypeError(f"coefficients must be float32, got {coefficients.dtype}")
    got = f"got {keys.shape} and {coefficients.shape}"
    same = keys.ndim == 1 and keys.shape == coefficients.shape
    require(same, f"keys and coefficients must both have the shape (members,), {got}")
    for member in np.flatnonzero(~np.isfinite(coefficients)):
        raise ValueError(f"coefficients must be finite, got {coefficients[member]} for member {member}")


def signed_sigma(sigma: float, sign: int) -> np.float32:
    """Return fl32(sign * sigma); raise ValueError unless sign is 1 or -1 and sigma positive and finite in float32."""
    require(sign in (1, -1), f"sign must be 1 or -1, got {sign!r}")
    positive("sigma", sigma, float(np.finfo(np.float32).max))
    require(np.float32(sigma) > 0, f"sigma={sigma!r} is 0 in float32: pass a larger one")
    return np.float32(sign * sigma)


class Entry(NamedTuple):
    """One parameter of a Layout."""

    name: str  # canonical Hugging Face name
    shape: tuple[int, ...]
    rows: int  # of the parameter as a matrix
    cols: int
    offset: int  # position of the first element in the flat buffer
    id: int  # parameter id


def factors_of(
    kind: int, param_id: int, keys: np.ndarray, rank: int, rows: tuple[int, int], cols: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return what `noise.factors` returns, given the distribution's number and the id that the kernels use."""
    return (
        rows_of_members(kind, keys, param_id, (0, rank), rows, 1, _noise_cpu.root(rank)),
        rows_of_members(kind, keys, param_id, (0, rank), cols, 2),
    )


def rows_of_members(kind: int, keys, param_id: int, rows, cols, stream: int, scale: float = 1.0) -> np.ndarray:
    """Return scale * each member's numbers in a window, float32 (members, rows, columns).

    kind: number of the distribution; keys: uint64 (members,); rows, cols: (start, stop); stream: as in the noise law.
    """
    drawn = np.full((len(keys), rows[1] - rows[0], cols[1] - cols[0]), _noise_cpu.NOTHING)
    numbers = np.float32(scale), rows[0], cols[0], np.uint32(param_id), np.uint32(stream)
    _noise_cpu.add_rows(kind, drawn, keys, *numbers)
    return drawn


def add_noise(
    kind: int, out, source, start, keys, coefficients, table, first=(0, 0), part=(0, 1), stream: int = 0
) -> None:
    """Set out = source + (start + sum of c_n eps_n) for each tensor of the table, or a share of it, with numba.

    Args:
        kind: number of the distribution.
        out, source: flat float32 buffers.
        start: float32, the value at which the sum starts.
        keys, coefficients: uint64 and float32 (members,).
        table: offsets, rows, columns (int64) and ids (uint32) of the tensors, as `Layout.table`.
        first: row and column of the parameter at which the tensors begin.
        part: (i, n): only the i-th of n shares.
        stream: of the noise law.
    """
    members = read_only(source), start, keys, coefficients
    _noise_cpu.add_noise(kind, out, *members, *table, *first, np.uint32(stream), *part)


def read_only(array: np.ndarray) -> np.ndarray:
    """Return a read-only view. All sources are passed as such, because numba compiles once per kind of argument."""
    view = array.view()
    view.flags.writeable = False
    return view


def add_products(
    kind: int, out, source, start, keys, coefficients, entry: Entry, rank: int, first=(0, 0), part=(0, 1)
) -> None:
    """Set out = source + (start + sum of c_n E_n) for one matrix in flat buffers, or a share of it.

    The factors of many members are large, so the matrix is done in tiles whose factors have about `_FACTORS` numbers.
    `entry` says where the matrix lies and which id the kernels use; the matrix is the window of its parameter that
    begins at `first`. The other arguments are those of `add_noise`.
    """
    side = max(_LEAST_TILE, _FACTORS // max(1, 2 * rank * len(keys)))
    begin, end = (entry.rows * i // part[1] for i in (part[0], part[0] + 1))
    row0, col0 = first
    for row in range(begin, end, side):
        rows = row0 + row, row0 + min(row + side, end)
        for col in range(0, entry.cols, side):
            cols = col0 + col, col0 + min(col + side, entry.cols)
            a, b = factors_of(kind, entry.id, keys, rank, rows, cols)
            place = entry.offset + row * entry.cols + col
            _noise_cpu.add_products(out, read_only(source), start, coefficients, a, b, place, entry.cols)


class MasterOnDevice:
    """A float32 master on one device, together with the working tensors to which members' weights are written.

    Args:
        matrices: the working tensors as (rows, cols), columns adjacent.
        windows: (parameter id, first row, first column) of each tensor in its parameter.
        ranks: rank of each tensor's noise, either 0 (full rank) or a number above 0 that all low-rank tensors share.
        kind: number of the distribution.
        most_members: largest population of an update.
        anchor: the starting weights, if updates decay toward them.
        stream: the noise law's stream for full-rank noise.
        aparts: how many elements after each tensor the same one of the next member begins, for `perturb_each`.
    """

    def __init__(
        self, matrices, windows, ranks, kind: int, most_members: int, anchor=None, stream: int = 0, aparts=None
    ):
        import torch

        self._matrices, self._windows, self._ranks = list(matrices), list(windows), list(ranks)
        self._kind, self.most_members, self._anchor, self._stream = kind, most_members, anchor, stream
        self._aparts = aparts or [0] * len(matrices)
        self._offsets, size = [], 0
        for matrix in matrices:
            self._offsets.append(size)
            size = -(-(size + matrix.numel()) // _noise_cpu.ALIGNMENT) * _noise_cpu.ALIGNMENT
        self.master = torch.zeros(size, dtype=torch.float32, device=matrices[0].device)
        """float32 (size,): the tensors one after the other, at the positions that a `Layout` in this order has"""
        for view, matrix in zip(self.views(), matrices, strict=True):
            view.copy_(matrix)

    def views(self) -> list[torch.Tensor]:
        """Return views of the master, one for each working tensor, float32 (rows, cols)."""
        return [
            self.master[offset : offset + matrix.numel()].view(matrix.shape)
            for offset, matrix in zip(self._offsets, self._matrices, strict=True)
        ]

    def restore(self) -> None:
        """Write the master itself, cast to the working tensors' dtypes."""
        for view, matrix in zip(self.views(), self._matrices, strict=True):
            matrix.copy_(view)

    def perturb(self, key: int, sigma: float, sign: int = 1) -> None:
        """Write one member's weights, cast(fl(master + fl(fl32(sign * sigma) * eps))).

        Args:
            key: 64-bit member key.
            sigma: standard deviation of the perturbation, weight units.
            sign: -1 for the second member of an antithetic pair.

        Raises:
            TypeError, ValueError: an invalid key, sigma or sign.
        """
        keys, scale = np.array([unsigned("key", key, 64)], np.uint64), np.array([signed_sigma(sigma, sign)])
        self._add(keys, scale, False)

    def perturb_each(self, keys: np.ndarray, scales: np.ndarray) -> None:
        """Write each member's weights into its own working tensors, cast(fl(master + fl(scale * eps))); full rank only.

        Args:
            keys: uint64 (members,), member keys.
            scales: float32 (members,), fl32(sign * sigma) for the weights of members.
        """
        check_members(keys, scales)
        self._add(keys, scales, False, True)

    def update(self, keys: np.ndarray, coefficients: np.ndarray) -> None:
        """Add the members' noise to the master in one pass, with the same bits as `noise.update`.

        With an anchor, the master first decays toward it, even without members. The working tensors do not change
        until the next `perturb` or `restore`.

        Args:
            keys: uint64 (members,), member keys.
            coefficients: float32 (members,), weight units.

        Raises:
            TypeError, ValueError: an array with the wrong dtype or length, a coefficient that is not finite, or more
                members than `most_members`.
        """
        check_members(keys, coefficients)
        most = self.most_members
        require(len(keys) <= most, f"{len(keys)} members, but these weights were made for most_members={most}")
        if self._anchor is not None:
            self._anchor.decay(self.views())
        self._add(keys, coefficients, True)

    def _add(self, keys: np.ndarray, coefficients: np.ndarray, to_master: bool, each: bool = False) -> None:
        """Write master + (0 + sum of c_n eps_n) to the master, or, cast and without the 0, to the working tensors.

        each: write master + c_n eps_n to the working tensors of the n-th member.
        """
        raise NotImplementedError


class HostWeights(MasterOnDevice):
    """The counterpart of `DeviceWeights` for tensors on a CPU: numba generates the noise, one tensor at a time."""

    def _add(self, keys, coefficients, to_master, each=False):
        import torch

        if each:
            first = self._matrices
            for j in range(len(keys)):
                moved = zip(first, self._aparts, strict=True)
                self._matrices = [m.as_strided(m.shape, m.stride(), m.storage_offset() + j * by) for m, by in moved]
                self._add(keys[j : j + 1], coefficients[j : j + 1], False)
            self._matrices = first
            return
        used = coefficients != 0  # as in `noise.update`: a term of +-0 changes no sum
        members = _noise_cpu.ZERO if to_master else _noise_cpu.NOTHING, keys[used], coefficients[used]
        for view, matrix, (param_id, *first), rank in zip(
            self.views(), self._matrices, self._windows, self._ranks, strict=True
        ):
            (rows, cols), source = view.shape, view.numpy().reshape(-1)
            out = source if to_master else np.empty_like(source)
            if rank:
                entry = Entry("", (rows, cols), rows, cols, 0, param_id)
                add_products(self._kind, out, source, *members, entry, rank, tuple(first))
            else:
                table = (*(np.array([number], np.int64) for number in (0, rows, cols)), np.array([param_id], np.uint32))
                add_noise(self._kind, out, source, *members, table, tuple(first), stream=self._stream)
            if not to_master:
                matrix.copy_(torch.from_numpy(out).view(matrix.shape))
