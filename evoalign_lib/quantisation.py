"""Quantised bases: linear layers in 8 or 4 bits, over which an adapter is trained and evaluated.

`quantise` quantises a loaded model with torchao, weights only: activations, embeddings, norms, biases and the output
layer (lm_head, which may share its weights with the embeddings) stay as they are. The result is what transformers
produces when it loads a model with a `TorchAoConfig`, so PEFT and transformers treat the two alike.

- "int8": one scale for each row (output channel), symmetric: torchao's `Int8WeightOnlyConfig`.
- "int4": one scale for each group of weights in a row, symmetric, codes from -8 to 7: torchao's `IntxWeightOnlyConfig`.
  (Its `Int4WeightOnlyConfig` has kernels only for GPUs, and PEFT supports no adapter over it.) Each code is stored in a
  byte, so the numbers are those of 4 bits but the memory is that of 8.

Both work on CPU and GPU. torchao has no kernel that multiplies codes with float32 activations: its own forward pass
dequantises the weights at each product. The decoding loop of the local engine dequantises once per member, adds the
adapter, W + scaling * B A, and multiplies in float32: the same function up to the order of sums. The ledger's header
says which of the two decoded: the setting `decoder`, and with the loop `weights`, "dequantised".

The header's `model` has `quantisation`: mode, group size, version of torchao, and the digest of the plain weights
(`models.base_digest`). From these a replay makes the same base, and it compares the codes with the setting `frozen`.
"""

import math
from typing import Any

import torch
from torch import nn

from evoalign_lib import _adapters, models
from evoalign_lib._model_checks import check_plain
from evoalign_lib.checks import choose, require, whole_number

__all__ = ["GROUP", "MODES", "QUANTISED", "quantise"]

QUANTISED = ("int8", "int4")
"""modes in which weights are stored as codes"""
MODES = ("float32", "bfloat16", *QUANTISED)
"""modes that `quantise` accepts"""
GROUP = 128
"""number of weights that share a scale with "int4": the default of torchao's `Int4WeightOnlyConfig`"""
_LEAST_GROUP = 8  # with fewer, 32-bit scales take as much memory as the codes save


def quantise(model: Any, mode: str, group_size: int | None = None) -> Any:
    """Quantise or cast the weights of a model in place, and return it.

    Args:
        model: a plain model without an adapter: add one afterwards (peft_config of `ESTrainer`, or PeftModel).
        mode: "int8" or "int4": quantise its linear layers except the output layer, weights only. Or "float32" or
            "bfloat16": cast all of its parameters to this dtype, as if it had been loaded that way.
        group_size: with "int4", how many weights in a row share a scale; it must divide the width of each layer. None:
            `GROUP` if it does, else the largest power of two that does.

    Raises:
        ValueError: an unknown mode, a group_size that does not fit or has no effect, or a model that has no linear
            layers, is quantised already or has an adapter.
        ImportError: torchao is not installed; the message says how to install it.
    """
    from transformers import TorchAoConfig
    from transformers.quantizers import AutoHfQuantizer

    choose("mode", mode, MODES)
    if group_size is not None and mode != "int4":
        raise ValueError(f"group_size={group_size!r} has no effect on mode={mode!r}, only on 'int4'. Remove it.")
    check_plain(model)
    if mode not in QUANTISED:
        dtype = getattr(torch, mode)
        for parameter in model.parameters():  # not buffers: the frequencies of rotary embeddings stay float32
            parameter.data = parameter.data.to(dtype)
        return model
    output = model.get_output_embeddings()
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not output}
    require(layers, f"{type(model).__name__} has no nn.Linear but its output layer: there is nothing to quantise.")
    group = _group(layers, group_size) if mode == "int4" else None
    torchao = _adapters.open_package("torchao", "quantised bases need torchao")
    how = {"mode": mode, "group_size": group, "torchao": torchao.__version__, "base": models.base_digest(model)}
    quantization = torchao.quantization
    if mode == "int8":  # leave alone the settings of torch's compiler, which hold for the whole process
        settings = quantization.Int8WeightOnlyConfig(set_inductor_config=False)
    else:
        settings = quantization.IntxWeightOnlyConfig(torch.int4, quantization.PerGroup(group))
    torchao.quantize_(model, settings, filter_fn=lambda module, name: name in layers)
    # what transformers sets on a model that it quantises, which PEFT needs for merging; not `is_quantized`,
    # which would make transformers' Trainer refuse adapters over 4 bits, and TRL's round them
    left = [name for name, module in model.named_modules() if module is output]
    model.config.quantization_config = TorchAoConfig(settings, modules_to_not_convert=left)
    model.hf_quantizer = AutoHfQuantizer.from_config(model.config.quantization_config, pre_quantized=False)
    setattr(model, _adapters.QUANTISATION, how)
    return model


def _group(layers: dict[str, nn.Linear], size: int | None) -> int:
    """Return the group size for all layers; raise ValueError if there is none."""
    if size is None:
        group = math.gcd(GROUP, *(layer.in_features for layer in layers.values()))
        if group < _LEAST_GROUP:
            name, layer = next((n, m) for n, m in layers.items() if m.in_features % _LEAST_GROUP)
            raise ValueError(f"{name!r} has {layer.in_features} inputs, which no group size divides. Use mode='int8'.")
        return group
    whole_number("group_size", size, _LEAST_GROUP, why="it is how many weights share a scale")
    for name, layer in layers.items():
        if layer.in_features % size:
            other = _group(layers, None)
            raise ValueError(f"group_size={size} does not divide {layer.in_features} inputs of {name!r}: try {other}.")
    return size
