"""The weights of an ES run in three precision modes: float32 master, compensated pair, or as in released codes.

- `master`, the default: float32 weights that never move during evaluation; members are written to a second buffer.
- `inplace` adds every perturbation to the weights and subtracts it again, and applies an update one member at a time,
  rounding to the weights' dtype each time, as released codes do (2 bytes per parameter with bfloat16). Rounding errors
  of the restores accumulate and small updates are lost; the mode exists to measure that.
- `kahan` stores the rounding error of each weight next to it in the same dtype, after Kahan (1965): 4 bytes per
  parameter, where a float32 master with a bfloat16 working copy takes 6. The pair has about 16 significant bits, and a
  restore is exact to the last of them, not bit for bit: the weights drift, but some hundred times less than with
  `inplace`.

These are the bytes of the weights at rest. The decoding loop also joins matrices and, on a CPU that cannot multiply in
bfloat16, works on a float32 copy (notebook 06 has the peaks); `decoder="generate"` needs neither.

The last two modes keep no master and no second copy: members take turns in a single replica of the weights, and the
model's own parameters are views of it. What a step leaves behind depends only on its noise, never on what was
generated, so a replay of the same members ends with the same bits.

`open_weights` returns a mode's state, a `Weights`. The rest of the module: digests of weights, measures of what is
lost, and the arithmetic on tensors that change in place.

Weights are identified by the digests below, all SHA-256, most of them shortened to 16 hexadecimal digits:

| digest | what it covers | where it is used |
|---|---|---|
| `digest` | names and the whole state, sorted by name | ledgers, checkpoints; actors of a cluster |
| `models.base_digest` | the same of a model's parameters in float32; 16 digits | `base_digest` of specs |
| `models.origin_digest` | files of a user's folder, or the Hub's commit; 16 digits | `base_digest` of specs |
| `models.flat_digest` | the float32 master as stored, padded and without names; 16 digits | `digest` of records |
| `matrix_digest` | one matrix, without a name | vLLM's workers, tensor by tensor |
"""

import hashlib
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evoalign_lib import noise
from evoalign_lib._adapters import check_movable, moved
from evoalign_lib._anchor import TensorAnchor, check_decay
from evoalign_lib.checks import choose, require

_BLOCK = 1 << 18  # weights whose noise is in memory at once, in the modes that keep no second copy
_SAMPLE = 1 << 16  # approximate number of weights in `Weights.sample`


class Weights:
    """The weights of a run in one precision mode, and the operations of a step on them; made by `open_weights`."""

    precision: str
    """the mode: `master`, `kahan` or `inplace`"""
    drifts: bool
    """whether evaluating a member changes the weights, because restoring them rounds"""
    start: np.ndarray | None = None
    """with anchor_decay a copy of the starting weights, in the form of `planes[0]` and never written to; else None"""

    def __init__(self, layout: noise.Layout, distribution: str, rank: int, planes: tuple[np.ndarray | Tensor, ...]):
        self.layout = layout
        """layout of the model's parameters"""
        self.distribution = distribution
        """distribution of the noise"""
        self.rank = rank
        """rank of the noise of matrices; 0: full rank"""
        self.planes = planes
        """the whole state, as buffers (layout.size,): the master; the values; or values and compensations"""

    @property
    def flat(self) -> np.ndarray | Tensor:
        """The weights that the model computes with, (layout.size,): float32 (`master`) or the model's dtype."""
        return self.planes[0]

    @contextmanager
    def member(self, key: int, sigma: float, sign: int = 1) -> Iterator[np.ndarray | Tensor]:
        """Provide the weights of a member, in the form of `flat`, for the duration of the context.

        Args:
            key: key of its noise, 64 bits.
            sigma: standard deviation of the perturbation, weight units.
            sign: -1 for the second member of an antithetic pair.
        """
        raise NotImplementedError

    def retrace(self, members: Iterable[tuple[int, int]], sigma: float) -> None:
        """Change the weights as evaluating these members, (key, sign) each, in this order would."""
        if self.drifts:
            for key, sign in members:
                with self.member(key, sigma, sign):
                    pass

    def update(self, keys: np.ndarray, coefficients: np.ndarray) -> None:
        """Move the weights by sum c_n eps_n: keys uint64 (members,), coefficients float32 (members,), weight units.

        With anchor_decay they first move back by that share of their distance from the start, even if there are no
        members.
        """
        raise NotImplementedError

    def metrics(self) -> dict[str, float]:
        """Return metrics of the weights before a step, to be logged with it."""
        return {}

    def float32(self) -> np.ndarray:
        """Return the weights in float32, (layout.size,): the master itself; in the other modes a copy."""
        return join(*self.planes).numpy()

    def tensors(self) -> dict[str, Tensor]:
        """Return the whole state by name, sharing its memory; the compensation of NAME is NAME#compensation."""
        named = zip(("", "#compensation"), map(self.layout.views, self.planes), strict=False)
        return {name + suffix: torch.as_tensor(view) for suffix, views in named for name, view in views.items()}

    def copy(self) -> dict[str, Tensor]:
        """Return a copy of the whole state, named as in `tensors`."""
        return {name: tensor.clone() for name, tensor in self.tensors().items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load a state in the form that `copy` or `tensors` returns."""
        for name, tensor in self.tensors().items():
            tensor.copy_(tensors[name])

    def begin(self, tensors: Mapping[str, Tensor]) -> None:
        """Load a state from which the run starts and towards which its weights decay."""
        self.load(tensors)
        self.anchor()

    def anchor(self) -> None:
        """Make the current weights the start towards which they decay, if they do."""

    def digest(self) -> str:
        """Return the `digest` of the whole state."""
        return digest(self.layout, *self.planes)

    def sample(self) -> Tensor:
        """Return every k-th weight of each parameter, a float32 copy of about 65,000 in all (all of a small model)."""
        k = -(-self.layout.d // _SAMPLE) | 1  # odd, so as not to hit the same columns of every row
        parts = [[t.flatten()[::k] for t in map(torch.as_tensor, self.layout.views(p).values())] for p in self.planes]
        return join(*map(torch.cat, parts))


class MasterWeights(Weights):
    """Float32 weights in memory that forked processes share; each member is written to a second buffer."""

    precision, drifts = "master", False

    def __init__(self, model, layout, distribution: str, rank: int, threads: int = 1, anchor_decay: float = 0.0):
        self.threads, self.anchor_decay = threads, anchor_decay
        # anonymous shared memory: forked workers see every update; not /dev/shm, which may be small
        master = np.frombuffer(mmap.mmap(-1, 4 * layout.size), dtype=np.float32)
        parameters = dict(model.named_parameters())
        for name, view in layout.views(master).items():
            view[...] = parameters[name].detach().float().numpy()
        super().__init__(layout, distribution, rank, (master,))
        self.anchor()
        self.working: np.ndarray | None = None
        """the last member's weights; each evaluating process has one such buffer"""

    def anchor(self):
        if self.anchor_decay:
            self._anchor = TensorAnchor([torch.from_numpy(self.flat)], self.anchor_decay)
            self.start = self._anchor.starts[0].numpy()
            self.start.flags.writeable = False

    @contextmanager
    def member(self, key, sigma, sign=1):
        if self.working is None:
            self.working = np.empty_like(self.flat)
        noise.perturb(self.working, self.flat, self.layout, key, sigma, sign, self.distribution, self.rank)
        yield self.working

    def update(self, keys, coefficients):
        if self.anchor_decay:
            self._anchor.decay([torch.from_numpy(self.flat)])
        update, law = partial(noise.update, self.flat, self.layout, keys, coefficients), (self.distribution, self.rank)
        if self.threads == 1:
            update((0, 1), *law)
            return
        # the kernel releases Python's lock; the threads end before another process is forked
        with ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(lambda i: update((i, self.threads), *law), range(self.threads)))

    def float32(self):
        return self.flat


_DTYPES = {
    "kahan": (torch.bfloat16, torch.float16),
    "inplace": (torch.bfloat16, torch.float16, torch.float32),
}
PRECISIONS = ("master", *_DTYPES)


class ReplicaWeights(Weights):
    """Weights in the model's dtype, perturbed and restored in place; noise is generated one block at a time.

    "inplace": values alone, rounded at every step, as in released codes. "kahan": values and their rounding errors; a
    restore is exact to the last bit of the pair, not to every bit.
    """

    drifts = True

    def __init__(self, model, layout, distribution: str, rank: int, precision: str, bind: bool):
        self.precision = precision
        every = dict(model.named_parameters())
        parameters = {e.name: every[e.name] for e in layout.entries}
        dtype = next(iter(parameters.values())).dtype
        if mixed := [f"{name!r} is {p.dtype}" for name, p in parameters.items() if p.dtype != dtype]:
            what = f"precision={precision!r} needs a single dtype, but {mixed[0]} and others are {dtype}"
            raise ValueError(f"{what}: load the model in one dtype, or use precision='master'.")
        if dtype not in _DTYPES[precision]:
            what = f"precision={precision!r} is for {', '.join(map(str, _DTYPES[precision]))}, but the model is {dtype}"
            remedy = "load it with model_init_kwargs={'dtype': 'bfloat16'}, or use precision='master'"
            raise ValueError(f"{what}: {remedy}.")
        planes = tuple(torch.zeros(layout.size, dtype=dtype) for _ in range(2 if precision == "kahan" else 1))
        for name, view in layout.views(planes[0]).items():
            view.copy_(parameters[name].detach())
            if bind:  # the parameter becomes a view of the replica, which frees its own memory
                parameters[name].data = view
        super().__init__(layout, distribution, rank, planes)

    @contextmanager
    def member(self, key, sigma, sign=1):
        self.update([key], [sign * sigma])
        try:
            yield self.flat
        finally:
            self.update([key], [-sign * sigma])

    def update(self, keys, coefficients):
        for entry in self.layout.entries:
            step = max(1, _BLOCK // max(1, entry.cols))  # whole rows, few enough for their noise to fit in memory
            for first in range(0, entry.rows, step):
                rows = first, min(first + step, entry.rows)
                start, stop = (entry.offset + row * entry.cols for row in rows)
                law = {"rank": self.rank, "rows": rows, "distribution": self.distribution}
                eps = partial(noise.eps, param_id=entry.id, shape=entry.shape, **law)
                terms = zip(map(int, keys), map(float, coefficients), strict=True)
                self._add([plane[start:stop] for plane in self.planes], eps, terms)

    def _add(self, planes: list[Tensor], eps: Callable[[int], np.ndarray], terms: Iterable[tuple[int, float]]) -> None:
        """Add c * eps(key) for each term (key, c) to a slice of the planes."""
        if self.precision == "inplace":
            for key, c in terms:
                inplace_add(*planes, torch.from_numpy(eps(key).reshape(-1)), c)
            return
        total = torch.zeros(len(planes[0]))
        for key, c in terms:  # the noise has no name that would keep it until the end
            total += torch.from_numpy(eps(key).reshape(-1)).mul_(c)
        kahan_add(*planes, total)


def open_weights(
    model: Any,
    layout: noise.Layout | None = None,
    precision: str = "master",
    distribution: str = "gaussian",
    bind: bool = False,
    threads: int = 1,
    anchor_decay: float = 0.0,
    rank: int = 0,
) -> Weights:
    """Return a model's weights in one precision mode.

    Args:
        model: a model on the CPU, whose parameters are the starting weights.
        layout: layout of the parameters that move; None: those with requires_grad, for example an adapter's (PEFT), or
            all if none has it.
        precision: "master", "kahan" or "inplace".
        distribution: distribution of the noise: "gaussian", "byte_sum" or "tied".
        bind: make the model's parameters views of the replica that "kahan" and "inplace" work on, so that the model
            takes no memory of its own; False: leave the model unchanged.
        threads: threads that share an update of the master (its bits do not depend on them); other modes use one.
        anchor_decay: share of the distance from the start that each update first takes back, from 0 (off) to below 1;
            the copy of the start takes 4 bytes per parameter. Only with "master".
        rank: rank of the noise of matrices; 0: full rank.

    Raises:
        ValueError: no such mode, distribution or rank, an anchor_decay that is out of range or used in a mode without a
            master, a model that is not supported (`_adapters.check_movable`), or one whose dtype the mode does not
            support.
    """
    choose("precision", precision, PRECISIONS)
    choose("distribution", distribution, noise.DISTRIBUTIONS)
    anchor_decay, rank = check_decay(anchor_decay, precision), noise.check_rank(rank)
    check_movable(model)
    layout = layout or layout_of(model)
    if precision == "master":
        return MasterWeights(model, layout, distribution, rank, threads, anchor_decay)
    return ReplicaWeights(model, layout, distribution, rank, precision, bind)


def layout_of(model: Any) -> noise.Layout:
    """Return the layout of a model's parameters that move."""
    return noise.Layout.from_shapes((name, tuple(p.shape)) for name, p in moved(model).items())


def copy_to(model: Any, layout: noise.Layout, flat: np.ndarray | Tensor) -> None:
    """Copy flat weights (layout.size,) into a model's parameters, in their dtype, unless they are views of it."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, view in layout.views(flat).items():
            parameter, view = parameters[name], torch.as_tensor(view)
            if parameter.data_ptr() != view.data_ptr():
                parameter.copy_(view)


# ---- digests


def digest(layout: noise.Layout, *planes: np.ndarray | Tensor) -> str:
    """Return the SHA-256 of weights, 64 hexadecimal digits; see `digest_by_name`.

    Args:
        layout: layout of the parameters.
        planes: (layout.size,) float32, bfloat16 or float16 each: `Weights.planes`, such as the master alone.
    """
    views = [layout.views(plane) for plane in planes]
    return digest_by_name((name, [view[name] for view in views]) for name in sorted(e.name for e in layout.entries))


def digest_by_name(parameters: Iterable[tuple[str, Sequence[np.ndarray | Tensor]]]) -> str:
    """Return the SHA-256 of (name, zero byte, little-endian bytes of each plane) of each parameter.

    Args:
        parameters: (name, planes), sorted by name.

    >>> digest_by_name([("bias", [np.float32([1, 2])]), ("weight", [np.float32([[3]])])])[:16]
    '26951eb600e12e4f'
    """
    found = hashlib.sha256()
    for name, planes in parameters:
        found.update(name.encode() + b"\0")
        for plane in planes:
            found.update(np.ascontiguousarray(_bits(plane)).data)
    return found.hexdigest()


def model_digest(model: Any) -> str:
    """Return what `models.base_digest` does, for modules that `models` imports."""
    parameters = sorted(model.named_parameters())
    return digest_by_name((name, (p.detach().float(),)) for name, p in parameters)[:16]


def matrix_digest(matrix: Tensor) -> str:
    """Return the SHA-256 of a matrix, row by row, as little-endian bytes."""
    return hashlib.sha256(_bits(matrix.detach().contiguous().cpu()).data).hexdigest()


def _bits(values: np.ndarray | Tensor) -> np.ndarray:
    """Return the bits of floats as little-endian integers, without a copy on little-endian machines.

    Args:
        values: float32, bfloat16 or float16, any shape.
    """
    if not isinstance(values, np.ndarray):
        values = values.view({2: torch.int16, 4: torch.int32}[values.itemsize]).numpy()
    return values.view(f"i{values.itemsize}").astype(f"<i{values.itemsize}", copy=False)


# ---- what is lost


def drift(before: np.ndarray | Tensor, after: np.ndarray | Tensor) -> tuple[float, float]:
    """Measure how far evaluating a population moved weights that it should have left unchanged.

    Args:
        before, after: the weights before and after, of the same dtype and shape: float32, bfloat16 or float16.

    Returns:
        The share of weights whose bits differ, and the root mean square difference, weight units (in float64).

    Raises:
        ValueError: shapes differ.

    >>> drift(np.float32([1, 2, 3, 4]), np.float32([1, 2, 3, 5]))
    (0.25, 0.5)
    """
    before, after = torch.as_tensor(before), torch.as_tensor(after)
    _same_shape(before, after)
    bits = torch.int32 if before.dtype == torch.float32 else torch.int16
    changed = (before.view(bits) != after.view(bits)).double().mean()
    return float(changed), float((after.double() - before.double()).square().mean().sqrt())


def agreement(intended: np.ndarray | Tensor, applied: np.ndarray | Tensor) -> tuple[float, float]:
    """Measure how much of an intended update reached the weights.

    Args:
        intended: the update sum c_n eps_n, any shape, weight units.
        applied: weights after the update - weights before it, same shape.

    Returns:
        The cosine of the two, and the gain |applied| / |intended|, both in float64; (0, 0) if nothing was applied.
        Their product is the share of the intended update that arrived.

    Raises:
        ValueError: shapes differ, or the intended update is zero.

    >>> agreement(np.float32([3, 4]), np.float32([0, 2.5]))
    (0.8, 0.5)
    """
    one, other = torch.as_tensor(intended).double().flatten(), torch.as_tensor(applied).double().flatten()
    _same_shape(one, other)
    wanted, got = (one @ one).sqrt(), (other @ other).sqrt()
    require(wanted != 0, "the intended update is zero: there is nothing to compare with")
    return (float(one @ other / (wanted * got)) if got else 0.0), float(got / wanted)


# ---- arithmetic in place


def inplace_add(weights: Tensor, eps: Tensor, scale: float) -> None:
    """Perturb as released codes do: weights = fl(weights + fl(fl(eps) * scale)), fl rounding to their dtype.

    To restore, call it with -scale; for an update, call it once per member.

    Args:
        weights: bfloat16, float16 or float32, any shape, changed.
        eps: float32, the member's noise, same shape.
        scale: sigma, or the member's coefficient, weight units.

    Raises:
        ValueError: the shapes differ, which would broadcast.

    >>> weights = torch.tensor([0.02, 1.0], dtype=torch.bfloat16)
    >>> inplace_add(weights, torch.ones(2), 1e-4)
    >>> weights.tolist()  # units in the last place are 1.2e-4 and 7.8e-3
    [0.0201416015625, 1.0]
    """
    _same_shape(weights, eps)
    weights.add_(eps.to(weights.dtype) * scale)


def split(weights: Tensor, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Split weights into (value, compensation), both of dtype: the nearest number, and its rounding error.

    Args:
        weights: float32, any shape.
        dtype: dtype of the pair.

    >>> value, compensation = split(torch.tensor([1.001]))
    >>> value.item(), round(compensation.item(), 6)
    (1.0, 0.000999)
    """
    value = weights.to(dtype)
    return value, (weights - value.float()).to(dtype)


def join(value: Tensor, compensation: Tensor | None = None) -> Tensor:
    """Return the float32 weights that a pair, or a value alone, represents: a copy."""
    whole = value.to(torch.float32, copy=True)
    return whole if compensation is None else whole.add_(compensation)


def kahan_add(value: Tensor, compensation: Tensor, change: Tensor) -> None:
    """Add to the weights of a pair, keeping in the compensation what the value cannot represent.

    Args:
        value: bfloat16 or float16, any shape, changed.
        compensation: same dtype and shape, changed.
        change: float32, same shape: sigma * eps, its negative to restore, or an update's accumulated sum.

    Raises:
        ValueError: the shapes differ, which would broadcast.

    >>> value, compensation = split(torch.tensor([1.0]))
    >>> for _ in range(40):
    ...     kahan_add(value, compensation, torch.tensor([1e-4]))
    >>> value.item(), round(join(value, compensation).item(), 3)  # 1.004 is nearer to 1.0078125 than to 1
    (1.0078125, 1.004)
    """
    _same_shape(value, compensation)
    _same_shape(value, change)
    total = join(value, compensation) + change
    for held, new in zip((value, compensation), split(total, value.dtype), strict=True):
        held.copy_(new)


def _same_shape(weights: Tensor, other: Tensor) -> None:
    require(weights.shape == other.shape, f"the shapes must agree, got {tuple(weights.shape)} and {tuple(other.shape)}")
