"""Noise on weights, to measure how much of a reward a model keeps under it.

Give every model the same keys: perturbations are then shared as problems are.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from evoalign_lib import noise
from evoalign_lib.checks import choose, require


def perturb(
    weights: Mapping[str, Tensor],
    sigma: float,
    key: int,
    *,
    mode: Literal["isotropic", "per-tensor relative"] = "isotropic",
    only: Callable[[str], bool] | None = None,
) -> dict[str, Tensor]:
    """Return weights with Gaussian noise added, a pure function of key and name; the given weights do not move.

    The noise is that of `noise.normals`: a key gives the same noise at every sigma, to every model and on every
    machine, so differences between models are paired. It is made for one tensor at a time.

    weights: tensors of any shape, tied weights under one name: a second name would get noise of its own. sigma: the
    noise's standard deviation, not negative; in weight units for "isotropic", which gives the bits of `noise.perturb`;
    for "per-tensor relative" in units of the root mean square of each tensor, so that a tensor of zeros stays as it is.
    key: 64 bits, such as `noise.member_key(noise.run_key("robustness", seed), 0, trial)`; the arm's name keeps it apart
    from the noise that a run of ES was trained with. only: whether the tensor of a name is perturbed, by default all
    are.
    Returns new tensors under the same names, copies where nothing was added.
    Raises ValueError for a sigma or key out of range, an unknown mode, and an `only` that no name passes; TypeError for
    tensors that are not float32 on a CPU.
    """
    require(0 <= sigma <= np.finfo(np.float32).max, f"sigma={sigma} must be from 0 to the largest float32")
    choose("mode", mode, ("isotropic", "per-tensor relative"))
    ids = noise.parameter_ids(weights)
    chosen = {name for name in ids if only is None or only(name)}
    require(chosen, f"no tensor is perturbed: `only` refuses all of {len(ids)} names, such as {sorted(ids)[:3]}")
    found = {}
    for name in weights:
        tensor = weights[name].detach()
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            raise TypeError(
                f"{name!r} is {tensor.dtype} on {tensor.device}: give the weights as .float().cpu(), or use"
                " noise.device_weights"
            )
        found[name] = tensor.clone()
        if name in chosen and sigma > 0:
            scale = sigma if mode == "isotropic" else sigma * float(tensor.double().square().mean().sqrt())
            eps = torch.from_numpy(noise.normals(key, ids[name], tensor.shape))
            found[name] += eps.mul_(float(np.float32(scale)))
    return found
