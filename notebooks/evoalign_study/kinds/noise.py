"""Noise on the weights of trained models: how much of what they can do is left.

Every model gets the same noise, draw by draw, and answers the same problems with the same random numbers, so that
models differ by nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

import numpy as np
import torch

from evoalign_lib import noise
from evoalign_lib.analysis import geometry, robustness
from evoalign_study import measures, specs, training, weight_cache
from evoalign_study.kinds.path import DECODINGS
from evoalign_study.records import Record, Spec

_SIZES = ("max_completion_length", "validation_problems", "noise_sigmas", "noise_trials")
_HEADS = ("head", "embedding (tied)")


def _is_head(name: str) -> bool:
    return geometry.layer_of(name, tied=True) in _HEADS


PARTS: dict[str, tuple[str, Callable[[str], bool] | None]] = {
    "isotropic": ("isotropic", None),
    "relative": ("per-tensor relative", None),
    "head": ("isotropic", _is_head),
    "body": ("isotropic", lambda name: not _is_head(name)),
}
"""Part -> how its noise is scaled, and which tensors have it; None: all. A sigma is the standard deviation in weight
units; relative noise is in proportion to the root mean square of each tensor, with the squared length that isotropic
noise of this sigma has on the base."""


def noise_spec(base: str, end: Mapping[str, Any] | None, settings: Mapping[str, Any], scale: str) -> Spec:
    """Return the spec of a model under noise on its weights.

    Args:
        base: that the runs started from, a plain one of the tiny world.
        end: the model, of `trained.end`; None: the base itself.
        settings: max_completion_length, validation_problems, noise_sigmas (weight units, each above 0, at most 8) and
            noise_trials (draws of each noise, 1 to 8).
        scale: of the notebook.

    Raises:
        ValueError: sigmas or trials out of range, an end of another base, a setting that is missing, or a base outside
            the tiny world.
    """
    spec = specs.begin_tiny("noise", base, scale, {}) | specs.take(settings, _SIZES, "noise")
    sigmas, trials = spec["noise_sigmas"], spec["noise_trials"]
    if not 1 <= len(sigmas) <= 8 or not all(0 < sigma < np.inf for sigma in sigmas):
        raise ValueError(f"noise_sigmas={sigmas}: take 1 to 8 finite standard deviations above 0.")
    if not 1 <= trials <= 8:
        raise ValueError(f"noise_trials={trials}: take 1 to 8.")
    return weight_cache.at_end(spec, end)


def run(spec: Spec) -> Record:
    """Return the accuracy of a model on the validation set, without noise and with each.

    The record has `clean`, decoding -> accuracy, and for each of `PARTS` decoding -> accuracies, a list per sigma with
    one per draw. All are fractions.
    """
    measure = measures.get(spec["task"])
    model, tokenizer, sets = training.world(spec)
    with closing(training.evaluation_engine(spec, model, tokenizer, sets)) as engine:
        start, layout = engine.master.copy(), engine.layout
        if "end" in spec:
            engine.master[:] = weight_cache.moved(start, weight_cache.displacement(spec["end"], start, layout))
        own = engine.master.copy()
        weights = {name: torch.from_numpy(part) for name, part in layout.views(own).items()}
        size = float(np.sqrt(np.mean(np.square(start, dtype=np.float64))))

        def accuracies() -> dict[str, float]:
            found = {}
            for name, how in DECODINGS.items():
                (row,) = engine.generate("validation", **how)
                right = [
                    measure.right(problem, text) for (text, _), problem in zip(row, sets["validation"], strict=True)
                ]
                found[name] = round(float(np.mean(right)), 5)
            return found

        result: Record = {"n": len(sets["validation"]), "clean": accuracies()}
        run_key = noise.run_key("robustness", 0)
        for part, (mode, only) in PARTS.items():
            result[part] = {name: [[] for _ in spec["noise_sigmas"]] for name in DECODINGS}
            for i, sigma in enumerate(spec["noise_sigmas"]):
                scale = sigma / size if part == "relative" else sigma
                for trial in range(spec["noise_trials"]):
                    key = noise.member_key(run_key, 0, trial)
                    moved = robustness.perturb(weights, scale, key, mode=mode, only=only)
                    for name, view in layout.views(engine.master).items():
                        view[...] = moved[name].numpy()
                    for name, value in accuracies().items():
                        result[part][name][i].append(value)
        return result
