"""Anchored weight decay: each step moves the weights back by a share of their distance from the start.

With theta_0 the starting weights and lambda the setting `anchor_decay`, the update of an ES step becomes

    theta' = theta - lambda (theta - theta_0) + (alpha / N) sum_n z_n eps_n.

The name and the idea come from Schweighofer et al. (arXiv 2605.30148): nearly all of an ES step is a random walk in
directions that the reward does not constrain, and that drift costs ability on other tasks. Without decay its squared
norm grows as alpha^2 d T / N over T steps; with decay it levels off at alpha^2 d / (N (1 - (1 - lambda)^2)), while a
push that every step repeats adds up to 1 / lambda steps. Weights decay towards where they started, not towards 0, which
would undo the pretraining. lambda is not multiplied by alpha and does not follow alpha's schedule.

In float32, for each weight, before the step's noise is added as in `noise.update`:

    theta = fl(theta - fl(fl32(lambda) * fl(theta - theta_0)))

Subtractions and products of IEEE 754 are the same everywhere, so every engine gets the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

_BLOCK = 1 << 22  # weights per block, three kernel launches each on a GPU; takes 16 MB beside the buffers


def check_decay(value: Any, precision: str = "master") -> float:
    """Check the setting anchor_decay and return it as a float, 0 if it is off.

    Args:
        value: the share of the distance from the starting weights that a step takes back.
        precision: precision mode of the weights.

    Raises:
        ValueError: not a number from 0 up to, but not including, 1 (in float32); or a precision without a float32
            master.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and (value == 0 or 0 < value < 1 and 0 < np.float32(value) < 1)):
        share = "the share of the distance from the start that each step takes back, for example 0.01"
        raise ValueError(f"anchor_decay={value!r} must be 0 (off) or a number above 0 and below 1, {share}.")
    if value and precision != "master":
        why = f"precision={precision!r} keeps no copy of the start and would lose part of the decay to rounding"
        raise ValueError(f"anchor_decay={value!r} needs precision='master': {why}. Remove one of the two.")
    return float(value)


class TensorAnchor:
    """The starting weights of tensors on a device, towards which `decay` moves them, on that device.

    They are kept in the tensors' own dtype, from which their float32 master was made: with bfloat16 that takes 2 bytes
    per parameter and loses nothing. Nothing is allocated after the start.

    Args:
        tensors: the working tensors, as they are at the start.
        rate: lambda, from 0 to 1.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], rate: float):
        import torch

        self.starts = [t.detach().clone(memory_format=torch.contiguous_format).view(-1) for t in tensors]
        self._rate = float(np.float32(rate))  # rounded to float32 here, so that no kernel rounds it differently
        size = max(1, min(max(map(len, self.starts)), _BLOCK))
        self._moved = torch.empty(size, dtype=torch.float32, device=self.starts[0].device)

    def decay(self, masters: Sequence[torch.Tensor]) -> None:
        """Move masters (float32, contiguous, one per tensor; changed in place) part of the way back to the start."""
        import torch

        size = len(self._moved)
        for master, start in zip(masters, self.starts, strict=True):
            blocks = zip(master.view(-1).split(size), start.split(size), strict=True)
            for theta, origin in blocks if len(start) else ():
                moved = self._moved[: len(theta)]
                torch.sub(theta, origin, out=moved)
                moved.mul_(self._rate)
                theta.sub_(moved)
