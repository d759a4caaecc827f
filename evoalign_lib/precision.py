"""How weights in half precision take up perturbations and updates: what released codes do, and a compensated mode.

The default keeps a float32 master (`noise.perturb`, `noise.update`) and needs none of this. Here are the two modes
without a master, as arithmetic on tensors that change in place:

- `inplace` adds every perturbation to the weights, subtracts it again and adds the members of an update one after the
  other, each time rounding to the weights' dtype, as released codes do (2 bytes a parameter with bfloat16). Rounding
  errors of the restores accumulate and small updates are lost; it exists to measure that.
- `kahan` carries the rounding error of each weight beside it in the same dtype, after Kahan (1965): 4 bytes a parameter
  against 6 for a float32 master with a bfloat16 working copy. The pair has about 16 significant bits and a restore is
  exact to the last of them, not to the bit: the weights drift, some hundred times less than `inplace`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def inplace_add(weights: Tensor, eps: Tensor, scale: float) -> None:
    """weights = fl(weights + fl(fl(eps) * scale)), each rounding to the weights' dtype: a released code's perturbation.

    Restoring is the same call with -scale; an update is one call a member.

    Args:
        weights: bfloat16 or float16, any shape, changed.
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
    weights.add_(eps.to(weights.dtype).mul_(scale))


def split(weights: Tensor, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """A weight as (value, compensation), both of dtype: the nearest number, and what is missing from it.

    Args:
        weights: float32, any shape.
        dtype: of the pair.

    >>> value, compensation = split(torch.tensor([1.001]))
    >>> value.item(), round(compensation.item(), 6)
    (1.0, 0.000999)
    """
    value = weights.to(dtype)
    return value, (weights - value.float()).to(dtype)


def join(value: Tensor, compensation: Tensor) -> Tensor:
    """The weights that a pair stands for, float32."""
    return value.float() + compensation.float()


def kahan_add(value: Tensor, compensation: Tensor, change: Tensor) -> None:
    """Add to the weights of a pair, keeping in the compensation what the value cannot take up.

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
    if weights.shape != other.shape:
        raise ValueError(f"the shapes must agree, got {tuple(weights.shape)} and {tuple(other.shape)}")
