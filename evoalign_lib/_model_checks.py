"""Models that are not supported yet, each refused by name before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_plain(model: Any) -> None:
    """Raise ValueError for a model with PEFT adapters or quantised weights: updates would be lost, or move codes."""
    adapted = next((type(m).__name__ for m in model.modules() if type(m).__module__.partition(".")[0] == "peft"), None)
    # transformers puts adapters into a model of its own class
    if adapted or getattr(model, "peft_config", None) or getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            f"the model has PEFT adapters ({adapted or type(model).__name__}), which are not supported yet: give "
            "model.merge_and_unload(), or the base model without adapters."
        )
    check_quantisation(getattr(getattr(model, "config", None), "quantization_config", None))
    for name, parameter in model.named_parameters():
        if parameter.dtype not in _DTYPES or type(parameter.data) is not torch.Tensor:
            kind = parameter.dtype if type(parameter.data) is torch.Tensor else type(parameter.data).__name__
            raise ValueError(
                f"parameter {name!r} is {kind}: noise on anything but plain float32, bfloat16 and float16 weights is "
                "not supported. Load the model unquantised, in one of these dtypes."
            )
    packed = next((name for name, module in model.named_modules() if hasattr(module, "_packed_params")), None)
    if packed is not None:
        raise ValueError(
            f"module {packed!r} holds packed, quantised weights, which noise would not reach: load the model "
            "unquantised."
        )


def check_quantisation(quantisation: Any) -> None:
    """Raise ValueError for a quantization_config, of a model or of the arguments that load it; None is fine."""
    if quantisation:
        found = quantisation if isinstance(quantisation, Mapping) else vars(quantisation)
        method = getattr(found.get("quant_method"), "value", found.get("quant_method"))
        raise ValueError(
            f"the model is quantised (quantization_config: quant_method={method!r}), which is not supported: noise "
            "would move codes, not weights. Give the model as it was before it was quantised."
        )


def check_nothing_frozen(model: Any) -> None:
    """Raise ValueError for a model with weights that are not to be trained: ES would move them like all others."""
    parameters = list(model.named_parameters())
    frozen = [name for name, parameter in parameters if not parameter.requires_grad]
    if frozen:
        raise ValueError(
            f"{len(frozen)} of {len(parameters)} parameters are frozen (requires_grad=False), the first is "
            f"{frozen[0]!r}: training a part of the weights is not supported yet, and all would move. Call "
            "model.requires_grad_(True) if they may."
        )
