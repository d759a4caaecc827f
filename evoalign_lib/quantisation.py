"""Quantised bases: linear layers in 8 or 4 bits, over which an adapter is trained and evaluated.

`quantise` does it by torchao to a loaded model, weights only: activations, embeddings, norms, biases and the output
layer (lm_head, which may share its weights with the embeddings) stay as they are. What it makes is what transformers
makes of a `TorchAoConfig` as it loads a model, so PEFT and transformers treat the two alike.

- "int8": one scale for each row (output channel), symmetric: torchao's `Int8WeightOnlyConfig`.
- "int4": one scale for each group of weights of a row, symmetric, codes from -8 to 7: torchao's `IntxWeightOnlyConfig`.
  (Its `Int4WeightOnlyConfig` has kernels for GPUs alone, and PEFT takes no adapter over it.) A code is held in a byte,
  so the numbers are those of 4 bits and the memory is that of 8.

Both work on CPU and GPU. For float32 activations torchao has no kernel that multiplies codes: its own forward pass
makes float weights of them at each product. The decoding loop of the local engine does so once for each member, with
the adapter added, W + scaling * B A, and multiplies in float32: the same function but for the order of sums. The
ledger's header says which of the two decoded: the setting `decoder`, and with the loop `weights`, "dequantised".

The header's `model` has `quantisation`: mode, group size, version of torchao, and the digest of the plain weights
(`models.base_digest`). A replay makes the same base from these, and compares the codes with the setting `frozen`.
"""

import math
from typing import Any

import torch
from torch import nn

from evoalign_lib import _adapters, models
from evoalign_lib._model_checks import check_plain
from evoalign_lib.checks import choose, whole_number

__all__ = ["GROUP", "MODES", "QUANTISED", "quantise"]

QUANTISED = ("int8", "int4")
"""modes in which weights are codes"""
MODES = ("float32", "bfloat16", *QUANTISED)
"""what `quantise` makes of a model"""
GROUP = 128
"""weights that share a scale with "int4": the default of torchao's `Int4WeightOnlyConfig`"""
_LEAST_GROUP = 8  # below it scales of 32 bits take as much room as the codes save


def quantise(model: Any, mode: str, group_size: int | None = None) -> Any:
    """Change the weights of a model in place, and return it.

    Args:
        model: a plain one, without adapter: give it one afterwards (peft_config of `ESTrainer`, or PeftModel).
        mode: "int8" or "int4": its linear layers but the output layer, weights only. Or "float32" or "bfloat16": all
            of its parameters are of this dtype then, as if it had been loaded so.
        group_size: with "int4", how many weights of a row share a scale; it must divide the width of each layer. None:
            `GROUP` where it does, else the largest power of two that does.

    Raises:
        ValueError: an unknown mode, a group_size that does not fit or has no effect, a model that has no linear layers,
            is quantised already or has an adapter.
        ImportError: torchao is not installed; the message says how.
    """
    from transformers import TorchAoConfig
    from transformers.quantizers import AutoHfQuantizer

    choose("mode", mode, MODES)
    if group_size is not None and mode != "int4":
        raise ValueError(f"group_size={group_size!r} has no effect on mode={mode!r}: it is for 'int4'. Remove it.")
    check_plain(model)
    if mode not in QUANTISED:
        dtype = getattr(torch, mode)
        for parameter in model.parameters():  # not the buffers: the frequencies of rotary embeddings stay float32
            parameter.data = parameter.data.to(dtype)
        return model
    output = model.get_output_embeddings()
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not output}
    if not layers:
        raise ValueError(f"{type(model).__name__} has no nn.Linear below its output layer: nothing would be quantised.")
    group = _group(layers, group_size) if mode == "int4" else None
    torchao = _adapters.open_package("torchao", "quantised bases need torchao")
    how = {"mode": mode, "group_size": group, "torchao": torchao.__version__, "base": models.base_digest(model)}
    quantization = torchao.quantization
    if mode == "int8":  # without settings of torch's compiler, which hold for the whole process
        settings = quantization.Int8WeightOnlyConfig(set_inductor_config=False)
    else:
        settings = quantization.IntxWeightOnlyConfig(torch.int4, quantization.PerGroup(group))
    torchao.quantize_(model, settings, filter_fn=lambda module, name: name in layers)
    # what transformers leaves on a model that it quantises, from which PEFT knows how to merge; not `is_quantized`,
    # with which transformers' Trainer would refuse to train adapters over 4 bits, and TRL's would round them
    left = [name for name, module in model.named_modules() if module is output]
    model.config.quantization_config = TorchAoConfig(settings, modules_to_not_convert=left)
    model.hf_quantizer = AutoHfQuantizer.from_config(model.config.quantization_config, pre_quantized=False)
    setattr(model, _adapters.QUANTISATION, how)
    return model


def _group(layers: dict[str, nn.Linear], size: int | None) -> int:
    """Return the group size that all layers have; raise ValueError where there is none."""
    if size is None:
        group = math.gcd(GROUP, *(layer.in_features for layer in layers.values()))
        if group < _LEAST_GROUP:
            name, layer = next((n, m) for n, m in layers.items() if m.in_features % _LEAST_GROUP)
            raise ValueError(f"{name!r} has {layer.in_features} inputs: too few common factors. Use mode='int8'.")
        return group
    whole_number("group_size", size, _LEAST_GROUP, why="weights that share a scale")
    for name, layer in layers.items():
        if layer.in_features % size:
            other = _group(layers, None)
            raise ValueError(f"group_size={size} does not divide {layer.in_features}, inputs of {name!r}: try {other}.")
    return size
