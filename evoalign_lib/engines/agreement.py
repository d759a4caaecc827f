"""Whether a decoder computes what the model computes: its logits are held against those of transformers.

Our decoders read weights and configuration. What else a model does (its own code, hooks, layers that were replaced,
parameters that the configuration does not know) shows in its logits alone. So at the start of a run both compute them
for a short prompt that is padded and for a long one, with noise on all parameters that move: what is zero at first and
would only show later, such as B of a new adapter, shows at once.

The same comparison tells whether padding changes what transformers itself computes, as for models that ignore the mask.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evoalign_lib._adapters import base_of, dense, moved
from evoalign_lib.engines.base import Prompts
from evoalign_lib.engines.decode import Decoder, Draw, inverse_frequency, misfit

TOLERANCE = {torch.float32: 2e-4, torch.float16: 0.03, torch.bfloat16: 0.15}
"""largest difference from the model's own logits, as a share of their norm about the mean over the vocabulary"""
STEPS = 4
"""tokens that follow a prompt"""
LATEST = 128
"""new tokens after which nothing else is expected to begin, unless the configuration has a window of attention"""
_NOISE = 0.01  # standard deviation

Trial = tuple[Tensor, Tensor, Tensor]
"""ids and mask of prompts, (rows, width) int64, padded on the left; and tokens that follow, (rows, steps) int64"""


def trial(model: Any, ids: np.ndarray, mask: np.ndarray, pad: int, new: int = STEPS, longest: bool = False) -> Trial:
    """Return the shortest of some prompts, padded, and the longest, each with random tokens that follow.

    Args:
        model: a model that reads the prompts.
        ids, mask: (rows, width) tokens, padded on the left, and 0 at padding.
        pad: id of padding.
        new: maximum number of new tokens of the run.
        longest: continue the longest prompt to that number, so that what depends on the length shows, too.
    """
    short, long = (ids[i][mask[i] == 1] for i in (mask.sum(1).argmin(), mask.sum(1).argmax()))
    steps = min(new, STEPS)
    width = len(long) + (new - steps if longest else 0)
    more = np.random.default_rng(0).integers(0, len(model.get_input_embeddings().weight), (2, width + steps))
    ids, mask = np.full((2, width), pad), np.ones((2, width), np.int64)
    mask[0, : width - len(short)] = 0
    ids[0, width - len(short) :] = short
    ids[1] = np.append(long, more[1])[:width]
    return torch.from_numpy(ids), torch.from_numpy(mask), torch.from_numpy(more[:, -steps:])


@contextmanager
def shaken(model: Any, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Give a model, in evaluation mode, noise on all parameters that move; afterwards it is as before, bit for bit.

    dtype: to compute in meanwhile; None: the model's. Products in float32 are not rounded to TF32, and rotary
    frequencies that were rounded with the model are exact, as they are when the model is loaded again.
    """
    with ExitStack() as stack:
        for changed, name, value in _changes(model, dtype):
            stack.callback(setattr, changed, name, getattr(changed, name))
            setattr(changed, name, value)
        yield


def _changes(model: Any, dtype: torch.dtype | None) -> Iterator[tuple[Any, str, Any]]:
    """Iterate over what `shaken` sets: (object, attribute, value)."""
    yield torch.backends.cuda.matmul, "fp32_precision", "ieee"
    for module in model.modules():
        yield module, "training", False
        if isinstance(turns := getattr(module, "inv_freq", None), Tensor):
            exact = inverse_frequency(model.config).to(turns.device)
            yield module, "inv_freq", exact if torch.equal(turns, exact.to(turns.dtype)) else turns
    moving, rng = {id(parameter) for parameter in moved(model).values()}, np.random.default_rng(0)
    for parameter in model.parameters():
        if type(data := parameter.data) is Tensor and data.is_floating_point():
            data = data.to(dtype or data.dtype)
            if id(parameter) in moving:
                noise = rng.standard_normal(min(data.numel(), 65_521), np.float32)  # repeated: drawing takes long
                data = data + _NOISE * torch.from_numpy(np.resize(noise, data.shape)).to(data)
            yield parameter, "data", data


def difference(model: Any, trial: Trial, generate: Callable[..., Any]) -> float:
    """Return how far logits are from those that transformers computes for each prompt alone, without padding.

    Args:
        model: a model of transformers.
        trial: prompts and tokens, which take the place of those that would be chosen.
        generate: computes the logits; has the first four arguments of `Decoder.generate`.

    Returns:
        The norm of the difference, as a share of that of the logits about their mean over the vocabulary.
    """
    alone = [(row[known == 1][None], token[None]) for row, known, token in zip(*trial, strict=True)]
    plain = partial(by_transformers, model)
    expected = torch.cat([_logits(plain, row, torch.ones_like(row), token) for row, token in alone])
    found = _logits(generate, *trial)
    if found.shape != expected.shape:
        return float("inf")
    found, expected = (each.double().clamp(min=-1e4) for each in (found, expected))  # -inf excludes a token
    return float((found - expected).norm() / (expected - expected.mean(-1, keepdim=True)).norm())


def _logits(generate: Callable[..., Any], ids: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
    """Return the logits from which each of the tokens of a trial would be chosen, (rows, steps, vocabulary)."""
    seen: list[Tensor] = []

    def given(logits: Tensor, rows: Tensor, step: int) -> Tensor:
        seen.append(logits.float().cpu().clone())
        return tokens[:, step]

    generate(ids, mask, tokens.shape[1], given)
    return torch.stack(seen, 1)


def loop_differs(model: Any, prompts: Prompts, pad: int, new: int) -> str | None:
    """Return why the decoding loop, which covers a model's configuration, does not compute what the model computes.

    Args:
        model: a model on the CPU that `decode.supports`, perhaps with a LoRA adapter.
        prompts: its prompts.
        pad: id of padding.
        new: maximum number of new tokens.
    """
    if reason := misfit(model.config, dense(model)):
        return reason
    new = new if getattr(model.config, "sliding_window", None) else min(new, LATEST)
    with shaken(model, torch.float32):
        decoder = Decoder(model.config, dense(model), (), pad, torch.from_numpy(prompts.prefix))
        error = difference(model, trial(model, prompts.ids, prompts.mask, pad, new, longest=True), decoder.generate)
    what = f"its logits differ from the model's by {error:.3g} of their norm"
    return None if error <= TOLERANCE[torch.float32] else what


def check_padding(model: Any, ids: np.ndarray, mask: np.ndarray, pad: int, new: int = STEPS, **settings: Any) -> None:
    """Raise ValueError if padding changes the logits of a model of transformers, which decodes with some settings.

    The other arguments are those of `trial`.
    """
    error = difference(model, trial(model, ids, mask, pad, new), partial(by_transformers, model, **settings))
    if not error <= TOLERANCE[torch.bfloat16]:  # some quantised layers round a row by what else is there
        what = f"padding changes the logits of a model of type {model.config.model_type!r} by {error:.3g} of their norm"
        raise ValueError(f"{what}: pass prompts of one length, or another model.")


@torch.inference_mode()
def by_transformers(
    model: Any, ids: Tensor, mask: Tensor, new: int, draw: Draw | None = None, stop: Any = None, **settings: Any
) -> Tensor:
    """Decode one batch with transformers' generate.

    Args:
        model: any decoder-only model of transformers.
        ids, mask, new: as the first three of `Decoder.generate`.
        draw: chooses the tokens; None: transformers does.
        stop: a stopping criterion of transformers.
        settings: of transformers' GenerationConfig.

    Returns:
        (rows, at most new) int64: the new tokens.
    """
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

    network, width = base_of(model), ids.shape[1]

    def chosen(given: Tensor, scores: Tensor) -> Tensor:
        """Mask every token but the one that is drawn, in the same way as in the loop."""
        token = draw(scores.float(), torch.arange(len(scores)), given.shape[1] - width)
        return torch.full_like(scores, -torch.inf).scatter_(1, token[:, None].to(scores.device), 0.0)

    how = GenerationConfig(do_sample=False, num_beams=1, max_new_tokens=new, **settings)
    given = {"input_ids": ids.to(network.device), "attention_mask": mask.to(network.device), "generation_config": how}
    chooses, stops = LogitsProcessorList([chosen] if draw else []), StoppingCriteriaList([stop] if stop else [])
    # generate() fills unset settings from the model's own config, such as a ban on repeated n-grams
    own = network.generation_config
    try:
        network.generation_config = GenerationConfig()
        return network.generate(**given, logits_processor=chooses, stopping_criteria=stops)[:, width:]
    finally:
        network.generation_config = own
