"""Which parameters of a model move: those with `requires_grad`, be it all weights or only an adapter's (PEFT).

An adapter moves over a frozen base, which may be quantised: noise never reaches the base. Without an adapter some of
the weights may be frozen, too. This module checks such models, digests what is frozen, makes and loads adapters, and
gives the decoding loop the weights that it computes with.
"""

import copy
import hashlib
import importlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evoalign_lib._model_checks import check_decoder, check_parameter, check_plain
from evoalign_lib.checks import plain, require

QUANTISATION = "evoalign_quantisation"
"""attribute of a model that `quantisation.quantise` has quantised"""
PERTURBED = ("all", "linear")
"""values of `ESConfig.perturb`"""


def moved(model: Any) -> dict[str, torch.nn.Parameter]:
    """Return, by name, the parameters with requires_grad, or all if none has it (a model that is only decoded)."""
    parameters = dict(model.named_parameters())
    return {name: p for name, p in parameters.items() if p.requires_grad} or parameters


def linear_matrices(model: Any) -> set[str]:
    """Return the names of the matrices of a model's linear layers, but for those of its embeddings and its head."""
    ends = {id(end.weight) for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None}
    layers = ((name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    return {f"{name}.weight" for name, module in layers if id(module.weight) not in ends}


def keep_linear(model: Any) -> None:
    """Freeze a model but for its `linear_matrices`. Raises ValueError for one with an adapter, or without such."""
    what = "perturb='linear' selects among a model's own weights, but this one has an adapter, which alone moves"
    require(not is_adapted(model), f"{what}. Remove perturb.")
    linear = linear_matrices(model)
    what = f"perturb='linear': a {type(model).__name__} has no linear layers but its head (torch.nn.Linear)"
    require(linear, f"{what}. Remove perturb.")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name in linear)


def is_adapted(model: Any) -> bool:
    """Return whether a model is a PeftModel, without importing PEFT."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, getattr(peft, "PeftModel", ()))


def base_of(model: Any) -> Any:
    """Return the network itself, including the layers of its adapter, if any."""
    return model.get_base_model() if is_adapted(model) else model


def quantisation_of(model: Any) -> dict[str, Any] | None:
    """Return how `quantisation.quantise` quantised a model's base, as in a ledger's header; None: it did not."""
    return getattr(base_of(model), QUANTISATION, None)


# ---- checks


def check_movable(model: Any) -> None:
    """Raise ValueError unless ES can move the parameters with requires_grad and leave the rest unchanged.

    Without an adapter every parameter must be plain (`check_plain`). With an adapter, what moves must be plain and
    among what PEFT saves; the base may be any decoder.
    """
    if not is_adapted(model):
        check_plain(model)
        return
    check_decoder(base_of(model).config)
    active = list(model.active_adapters)
    kinds = ", ".join(str(getattr(c.peft_type, "value", c.peft_type)) for c in model.peft_config.values())
    inside = len(active) == 1 and not model.peft_config[active[0]].is_prompt_learning
    remedy = "activate one inside the layers, such as a LoraConfig's, by model.set_adapter(NAME)"
    require(inside, f"the model has the active adapters {active} of kind {kinds}: {remedy}.")
    merged = [name for name, module in model.named_modules() if getattr(module, "merged", None) is True]
    if merged:
        raise ValueError(f"the adapter is merged into its base at {merged[0]!r}: call model.unmerge_adapter().")
    for name, parameter in moved(model).items():
        check_parameter(name, parameter)
        at = parameter.device
        require(at.type == "cpu", f"parameter {name!r} is on {at}: load the base with device_map='cpu'.")
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(model, adapter_name=active[0], save_embedding_layers=False)
    saved = {tensor.data_ptr() for tensor in state.values() if isinstance(tensor, Tensor)}
    lost = [name for name, p in model.named_parameters() if p.requires_grad and p.data_ptr() not in saved]
    if lost:
        what = f"parameter {lost[0]!r} is trainable but not part of the adapter {active[0]!r}"
        raise ValueError(f"{what}, and PEFT would not save it: name its module in modules_to_save, or freeze it.")


def check_something_moves(model: Any) -> None:
    """Raise ValueError if every parameter of a model is frozen."""
    what = "no parameter of the model is trainable (requires_grad=False everywhere): call model.requires_grad_(True), "
    require(any(p.requires_grad for p in model.parameters()), f"{what}or from_pretrained(..., is_trainable=True).")


# ---- what is frozen


def frozen_digest(model: Any, moving: Iterable[str]) -> str | None:
    """Return the SHA-256 of everything that does not move, 64 hexadecimal digits; None if every parameter moves.

    It covers the names and bytes of the model's state dict, including codes and scales of quantised weights, except for
    the parameters that move. Compute it before the first forward pass, in which some quantised layers rearrange their
    state.

    Args:
        model: the model at the start of a run.
        moving: names of the parameters that move.
    """
    parameters = dict(model.named_parameters())
    moved_ids = {id(parameters[name]) for name in moving}
    if len(moved_ids) == len(parameters):
        return None
    found, state = hashlib.sha256(), model.state_dict(keep_vars=True)
    for name in sorted(name for name, value in state.items() if id(value) not in moved_ids):
        found.update(name.encode() + b"\0")
        for part in raw_bytes(state[name]):
            found.update(part)
    return found.hexdigest()


def raw_bytes(value: Any) -> Iterator[bytes | memoryview]:
    """Yield the bytes of an entry of a state dict: of a plain tensor, or of the parts of a quantised one."""
    if not isinstance(value, Tensor):
        yield repr(value).encode()
    elif hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from raw_bytes(getattr(value, name))
    else:
        flat = value.detach().cpu().contiguous().reshape(-1)
        yield flat.as_subclass(Tensor).view(torch.uint8).numpy().data


# ---- making and loading


def attach(model: Any, peft_config: Any, seed: int) -> Any:
    """Return a model with a new adapter, drawn from a seed; the model is frozen and holds the new layers.

    Args:
        model: a model without an adapter.
        peft_config: a `peft.PeftConfig`, such as LoraConfig; not changed.
        seed: seed of the adapter's initial weights. The global random state is left unchanged.

    Raises:
        ImportError: PEFT is not installed; the message says how to install it.
        TypeError: peft_config is not a PeftConfig.
        ValueError: the model has an adapter already.
    """
    peft = open_peft()
    if not isinstance(peft_config, peft.PeftConfig):
        raise TypeError(f"peft_config is a {type(peft_config).__name__}: pass a peft.PeftConfig, such as LoraConfig().")
    require(not is_adapted(model), "the model has an adapter, and peft_config adds another: leave one of them out.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return peft.get_peft_model(model, plain_config(peft_config))


def plain_config(peft_config: Any) -> Any:
    """Return a copy of an adapter's configuration, if it is one, without numbers of NumPy, which cannot be saved."""
    settings = getattr(config := copy.deepcopy(peft_config), "__dict__", {})
    settings.update(plain(settings))
    return config


def save_alike(model: Any, folder: str | os.PathLike) -> None:
    """Sort the lists of modules in the configurations of a model's adapters, just saved in a folder.

    PEFT holds them as sets, and writes those in an order that differs between processes (PYTHONHASHSEED).
    """
    for name in getattr(model, "peft_config", ()):
        path = Path(folder, "" if name == "default" else name, "adapter_config.json")
        if path.is_file():
            config = json.loads(path.read_text(encoding="utf-8"))
            found = {
                key: sorted(value) for key, value in config.items() if key.endswith("_modules") and type(value) is list
            }
            path.write_text(json.dumps(config | found, indent=2, sort_keys=True), encoding="utf-8")


def base_name(folder: Path) -> str:
    """Return the name of the model that a saved adapter belongs to.

    Raises:
        ValueError: the folder does not name it, or its weights are not in safetensors format.
    """
    try:
        named = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{str(folder / 'adapter_config.json')!r} cannot be read ({error!r}): restore it.") from error
    what, remedy = f"the adapter {str(folder)!r}", "pass PeftModel.from_pretrained(BASE, FOLDER, is_trainable=True)"
    require(named, f"{what} does not name its base (base_model_name_or_path): {remedy}.")
    remedy = "other formats may hold code and are not loaded. Save it again with save_pretrained()"
    there = (folder / "adapter_model.safetensors").is_file()
    require(there, f"{what} has no adapter_model.safetensors: {remedy}.")
    return str(named)


def base_if_adapter(model: str | os.PathLike) -> str:
    """Return the name or folder of a model's base if the model is an adapter's folder, else its own name."""
    return base_name(Path(model)) if (Path(model) / "adapter_config.json").is_file() else str(model)


def open_adapter(base: Any, folder: Path) -> Any:
    """Load the adapter in a folder onto a base, ready for training.

    If tokens had been added to the base, PEFT has saved the embeddings with the adapter, and the base is resized again.

    Raises:
        ImportError: PEFT is not installed.
        ValueError: the adapter's matrices do not fit the base.
    """
    from safetensors import safe_open

    peft, matrices = open_peft(), (base.get_input_embeddings(), base.get_output_embeddings())
    names = [f"base_model.model.{name}" for name, module in base.named_modules() if module in matrices]
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        saved = {f"{name}.{part}weight" for name in names for part in ("", "base_layer.")} & {*file.keys()}
        rows = {file.get_slice(key).get_shape()[0] for key in saved}
    # what PEFT has not saved is lost: of an untied pair, one of which is adapted, the other
    if len(rows - {len(matrices[0].weight)}) == 1 and (base.config.tie_word_embeddings or len(saved) == len(names)):
        base.resize_token_embeddings(*rows, mean_resizing=False)
    try:
        return peft.PeftModel.from_pretrained(base, str(folder), is_trainable=True)
    except RuntimeError as error:
        said = " ".join(line.strip() for line in str(error).splitlines()[:2])  # one of many tensors is enough
        remedy = "If tokens were added to the base, resize_token_embeddings(), save it, and name it in the adapter"
        what = f"the adapter {str(folder)!r} does not fit its base {base.config._name_or_path!r}: {said}"
        raise ValueError(f"{what} {remedy}'s base_model_name_or_path.") from error


def open_peft() -> Any:
    """Return the module peft. Raises ImportError, which says how to install it."""
    return open_package("peft", "adapters need PEFT")


def open_package(name: str, why: str) -> Any:
    """Import a package of the extra "adapters". Raises ImportError, which says why and how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{why}: pip install 'evoalign[adapters]'.") from error


# ---- the decoding loop


def not_dense(model: Any, apart: bool = False) -> str | None:
    """Return None if `dense` can write a model's weights as matrices without an adapter, else why it cannot.

    apart: the adapter's matrices are not added to the others, so that no dtype rounds them.

    Among quantised bases this covers those of `quantisation.quantise`: others may round activations, too.
    """
    if not is_adapted(model):
        return None
    quantised = quantisation_of(model) is not None
    more = _more_than_lora(model, quantised)
    if more or apart:
        return more
    for name, p in model.named_parameters():
        if p.dtype != torch.float32 or not (quantised or type(p.data) is Tensor):
            # in half precision the sum would lose whatever is small next to W
            return f"parameter {name!r} is not plain float32, so the adapter would be rounded with it"
    return None


def _more_than_lora(model: Any, quantised: bool) -> str | None:
    """Return where an adapter is more than plain LoRA, if it is; quantised: allow layers of `quantisation.quantise`."""
    from peft.tuners.lora import Linear
    from peft.tuners.lora.torchao import TorchaoLoraLinear
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    known = (Linear, TorchaoLoraLinear) if quantised else (Linear,)
    for name, module in base_of(model).named_modules():
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            if type(module) not in known or module.lora_variant or any(module.lora_bias.values()):
                return f"{name!r} is more than a product of two matrices added to a linear layer"
    return None


@torch.inference_mode()
def dense(model: Any, merged: bool = True) -> dict[str, Tensor]:
    """Return weights by their names in the model without adapter; adapted ones as W + scaling * B A, in float32.

    If they are not `merged`, W is alone, and the adapter's matrices have names of their own.

    A quantised W is dequantised: what its codes and scales stand for. An adapted head that shares the embedding's
    matrix has an entry of its own, because PEFT adds to the head alone.
    """
    layers = lora_linears(model) if is_adapted(model) else {}
    (active,) = model.active_adapters if layers else (None,)
    found, seen = {}, set()
    for name, parameter in base_of(model).named_parameters(remove_duplicate=False):
        layer = layers.get(name.removesuffix(".base_layer.weight"))
        if not (merged and ".lora_" in name) and (layer or id(parameter) not in seen):
            weight = parameter.detach() if type(parameter) is torch.nn.Parameter else parameter.dequantize()
            changed = weight if layer is None or not merged else weight.float() + layer.get_delta_weight(active).float()
            found[name.replace(".base_layer.", ".")] = changed
            seen.add(id(parameter))
    return found


def plain_name(name: str) -> str:
    """Return the name that `dense` gives a parameter of a model with an adapter, or without one."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


# ---- vLLM


def lora_layers(model: Any) -> dict[str, Any]:
    """Return the layers that a model's adapter adapts, by their names in the model without adapter.

    Raises ValueError for an adapter that is more than a product of two matrices added to plain linear layers.
    """
    quantised = getattr(base_of(model), "is_quantized", False) or quantisation_of(model) is not None
    more = "the base is quantised" if quantised else _more_than_lora(model, False)
    require(not more, f"{more}, which engine='vllm' does not support yet: use engine='local'.")
    return lora_linears(model)


def lora_linears(model: Any) -> dict[str, Any]:
    """Return the linear layers that the active adapter adapts, by their names in the model without adapter."""
    from peft.tuners.lora import Linear

    (active,) = model.active_adapters
    modules = base_of(model).named_modules()
    return {name: module for name, module in modules if isinstance(module, Linear) and active in module.lora_A}
