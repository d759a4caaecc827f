"""Models that are not supported yet, each refused by name before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ADAPTER = "; or let ESTrainer train an adapter over the quantised model (peft_config=LoraConfig(...))"


def check_plain(model: Any) -> None:
    """Raise ValueError for a model with PEFT adapters or quantised weights: updates would be lost, or move codes."""
    adapted = next((type(m).__name__ for m in model.modules() if type(m).__module__.partition(".")[0] == "peft"), None)
    # transformers puts adapters into a model of its own class
    if adapted or getattr(model, "peft_config", None) or getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            f"the model has PEFT adapters ({adapted or type(model).__name__}), which are not supported here: give "
            "model.merge_and_unload(), or the base model without adapters. (ESTrainer takes peft_config=, and what "
            "get_peft_model() returns; not what add_adapter() leaves.)"
        )
    check_quantisation(getattr(getattr(model, "config", None), "quantization_config", None))
    for name, parameter in model.named_parameters():
        check_parameter(name, parameter)
    packed = next((name for name, module in model.named_modules() if hasattr(module, "_packed_params")), None)
    if packed is not None:
        raise ValueError(
            f"module {packed!r} holds packed, quantised weights, which noise would not reach: load the model "
            f"unquantised{_ADAPTER}."
        )


def check_parameter(name: str, parameter: torch.nn.Parameter) -> None:
    """Raise ValueError unless a parameter is a plain tensor of a dtype that takes noise."""
    if parameter.dtype not in _DTYPES or type(parameter.data) is not torch.Tensor:
        kind = parameter.dtype if type(parameter.data) is torch.Tensor else type(parameter.data).__name__
        raise ValueError(
            f"parameter {name!r} is {kind}: noise on anything but plain float32, bfloat16 and float16 weights is "
            f"not supported. Load the model unquantised, in one of these dtypes{_ADAPTER}."
        )


def check_quantisation(quantisation: Any) -> None:
    """Raise ValueError for a quantization_config, of a model or of the arguments that load it; None is fine."""
    if quantisation:
        found = quantisation if isinstance(quantisation, Mapping) else vars(quantisation)
        method = getattr(found.get("quant_method"), "value", found.get("quant_method"))
        raise ValueError(
            f"the model is quantised (quantization_config: quant_method={method!r}), which is not supported: noise "
            "would move codes, not weights. Give the model as it was before it was quantised"
            f"{_ADAPTER}."
        )
