"""Gaussian noise on weights, to measure how much of its reward a model keeps.

Use the same keys for every model: then models share perturbations as they share problems.
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
    """Return a copy of weights with Gaussian noise added; the noise is a pure function of key and name.

    The noise is that of `noise.normals`: a key gives the same noise at every sigma, for every model and on every
    machine, so differences between models are paired. It is generated one tensor at a time.

    weights: tensors of any shape, tied weights under one name only, since a second name would get different noise.
    sigma: the noise's standard deviation, not negative; in weight units for "isotropic", which gives the same bits as
    `noise.perturb`; for "per-tensor relative" in units of each tensor's root mean square, so that a tensor of zeros
    does not change. key: 64 bits, such as `noise.member_key(noise.run_key("robustness", seed), 0, trial)`; the name of
    the arm keeps it distinct from the noise that a run of ES was trained with. only: whether to perturb the tensor of a
    name; all by default.
    Returns new tensors under the same names, plain copies where nothing was added.
    Raises ValueError for a sigma or key out of range, an unknown mode, or an `only` that rejects every name; TypeError
    for tensors that are not float32 on a CPU.
    """
    require(0 <= sigma <= np.finfo(np.float32).max, f"sigma={sigma} must lie between 0 and the largest float32")
    choose("mode", mode, ("isotropic", "per-tensor relative"))
    ids = noise.parameter_ids(weights)
    chosen = {name for name in ids if only is None or only(name)}
    require(chosen, f"no tensor to perturb: `only` must accept one of the {len(ids)} names, such as {sorted(ids)[:3]}")
    found = {}
    for name in weights:
        tensor = weights[name].detach()
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            remedy = "pass the weights as .float().cpu(), or use noise.device_weights"
            raise TypeError(f"{name!r} is {tensor.dtype} on {tensor.device}: {remedy}")
        found[name] = tensor.clone()
        if name in chosen and sigma > 0:
            scale = sigma if mode == "isotropic" else sigma * float(tensor.double().square().mean().sqrt())
            eps = torch.from_numpy(noise.normals(key, ids[name], tensor.shape))
            found[name] += eps.mul_(float(np.float32(scale)))
    return found
