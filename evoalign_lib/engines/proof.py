"""Proof that the weights of vLLM's workers are those of the run, byte for byte."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from evoalign_lib import noise
from evoalign_lib.engines._vllm_worker import Segment
from evoalign_lib.precision import matrix_digest


class WrongWeights(RuntimeError):
    """Raised when a generator does not hold the weights of the run; the message names what differs."""


Proof = Sequence[Sequence[tuple[tuple, str]]]
"""For each of vLLM's ranks, its segments, each with the SHA-256 of its numbers, row by row."""


def as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """Return a parameter as a matrix; a vector is one row."""
    return tensor.reshape(1, -1) if tensor.ndim < 2 else tensor.flatten(1)


def prove(model: Any, layout: noise.Layout, master: np.ndarray, proof: Proof) -> None:
    """Compare the weights of vLLM's workers with the run's, byte for byte; raises what `compare` raises.

    Args:
        model: the run's model, whose frozen parameters vLLM holds in its dtype.
        layout, master: the parameters that move, which vLLM's workers hold in float32.
        proof: the workers' proof.
    """
    views = {name: parameter.detach() for name, parameter in model.named_parameters()}
    views |= layout.views(torch.from_numpy(master))
    compare({name: as_matrix(view) for name, view in views.items()}, proof)


def compare(views: Mapping[str, torch.Tensor], proof: Proof) -> None:
    """Compare the weights of vLLM's workers with a model's, byte for byte.

    Args:
        views: the model's matrices by name; a vector is a matrix of one row.
        proof: the workers' proof.

    Raises:
        WrongWeights: a segment is not part of any parameter or holds other numbers, or some rows and columns of a
            parameter are held by no rank.
    """
    held = {name: np.zeros(matrix.shape, bool) for name, matrix in views.items()}
    for rank, segments in enumerate(proof):
        for place, digest in segments:
            segment = Segment(*place)
            where = f"vLLM's rank {rank}, {segment.name!r}"
            if segment.name not in views:
                raise WrongWeights(f"{where}: the model has no parameter of this name, so its weights cannot be held.")
            window = np.s_[segment.row0 : segment.row0 + segment.rows, segment.col0 : segment.col0 + segment.cols]
            part = views[segment.name][window]
            if part.shape != (segment.rows, segment.cols) or matrix_digest(part) != digest:
                raise WrongWeights(
                    f"{where}, rows from {segment.row0} and columns from {segment.col0}: the weights are not those of "
                    "the run. Either the folder that vLLM loaded is not the model that was passed, or vLLM keeps this "
                    "tensor in another layout, in which it cannot be perturbed."
                )
            held[segment.name][window] = True
    for name, cells in held.items():
        if not cells.all():
            raise WrongWeights(f"{name!r}: vLLM holds {cells.mean():.0%} of it, so noise would not reach all of it.")
