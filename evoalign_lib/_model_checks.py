"""Checks that refuse, before anything runs, models that cannot be trained or cannot decode here."""

import copy
from collections.abc import Mapping
from typing import Any

import torch

from evoalign_lib.checks import require

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PLAIN = "load it unquantised, or let ESTrainer train an adapter over it (peft_config=LoraConfig(...))"


def check_plain(model: Any) -> None:
    """Raise ValueError for a model with PEFT adapters or quantised weights: updates would be lost, or change codes.

    Models that do not write from left to right are refused, too (`check_decoder`), and those whose head is tied to the
    embedding although their configuration denies it.
    """
    check_decoder(getattr(model, "config", None))
    adapted = next((type(m).__name__ for m in model.modules() if type(m).__module__.partition(".")[0] == "peft"), None)
    # transformers adds adapters without changing the model's class
    if adapted or getattr(model, "peft_config", None) or getattr(model, "_hf_peft_config_loaded", False):
        remedy = "pass model.merge_and_unload(), the base, or to ESTrainer the result of get_peft_model()"
        raise ValueError(f"the model has PEFT adapters ({adapted or type(model).__name__}): {remedy}.")
    check_quantisation(getattr(getattr(model, "config", None), "quantization_config", None))
    matrices = [getattr(model, f"get_{side}_embeddings", lambda: None)() for side in ("input", "output")]
    embedding, head = (getattr(module, "weight", None) for module in matrices)
    if head is not None and head is embedding and not model.config.tie_word_embeddings:
        remedy = "set model.config.tie_word_embeddings = True, or a saved model would get a new head when it is loaded"
        raise ValueError(f"the head is the embedding, but the configuration has tie_word_embeddings=False: {remedy}.")
    for name, parameter in model.named_parameters():
        check_parameter(name, parameter)
    packed = next((name for name, module in model.named_modules() if hasattr(module, "_packed_params")), None)
    require(packed is None, f"module {packed!r} holds packed, quantised weights: {_PLAIN}.")


def check_reloads(model: Any) -> None:
    """Raise ValueError for parameters that a saved model would lose: its class makes others from its configuration.

    A class that needs more than a configuration is not checked. Weights that the class ties may differ: both are saved.
    """
    try:
        with torch.random.fork_rng([]), torch.device("meta"):
            made = _parameters(type(model)(copy.deepcopy(model.config)))
    except Exception:  # it may be the user's own class
        return
    found = _parameters(model)
    for name in sorted(found | made):
        own, other = found.get(name, "missing"), made.get(name, "missing")
        if own not in (other, other.partition(", tied")[0]):
            what = f"{name!r} is {own}, but {other} in the {type(model).__name__} that a saved configuration makes"
            raise ValueError(f"{what}: change model.config as well, or use a class of your own.")


def _parameters(model: Any) -> dict[str, str]:
    """Return each parameter's shape, and the first of its names if it has several."""
    first: dict[int, str] = {}
    named = [(n, p.shape, first.setdefault(id(p), n)) for n, p in model.named_parameters(remove_duplicate=False)]
    return {n: f"{tuple(shape)}" + (f", tied to {twin!r}" if twin != n else "") for n, shape, twin in named}


def check_parameter(name: str, parameter: torch.nn.Parameter) -> None:
    """Raise ValueError unless a parameter is a plain tensor of a dtype to which noise can be added."""
    kind = parameter.dtype if type(parameter.data) is torch.Tensor else type(parameter.data).__name__
    require(kind in _DTYPES, f"parameter {name!r} is {kind}, not plain float32, bfloat16 or float16: {_PLAIN}.")


def check_quantisation(quantisation: Any) -> None:
    """Raise ValueError if a quantization_config, of a model or in the arguments that load it, is set."""
    if quantisation:
        found = quantisation if isinstance(quantisation, Mapping) else vars(quantisation)
        method = getattr(found.get("quant_method"), "value", found.get("quant_method"))
        raise ValueError(f"the model is quantised (quantization_config: quant_method={method!r}): {_PLAIN}.")


def check_decoder(config: Any) -> None:
    """Raise ValueError for the config of an encoder or encoder-decoder: these do not write from left to right."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    kind, causal = getattr(config, "model_type", None), ("is_decoder", "causal")
    if getattr(config, "is_encoder_decoder", False):
        what = "an encoder-decoder"
    elif kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not any(getattr(config, name, False) for name in causal):
        what = "an encoder, whose tokens see those that come after them"
    else:
        return
    raise ValueError(f"the model is of type {kind!r}, {what}: pass a decoder-only model, such as Qwen2 or Llama.")


def check_padding(model: Any, tokenizer: Any) -> None:
    """Raise ValueError for a padding token that the model has no embedding for."""
    pad, rows = tokenizer.pad_token_id, _embeddings(model)
    what = f"the padding token {tokenizer.pad_token!r} has the id {pad}, but the model has {rows} embeddings"
    require(pad < rows, f"{what}: set tokenizer.pad_token = tokenizer.eos_token, or resize_token_embeddings().")


def check_prompts(model: Any, name: str, prompts: Any, max_completion_length: int) -> None:
    """Raise ValueError for prompts (`engines.base.Prompts`) with unknown tokens or no room for a completion.

    name: of the prompts, for the error. max_completion_length: new tokens.
    """
    rows, most = _embeddings(model), prompts.ids.max(axis=1)
    what = f"the {name} prompt of row {int(most.argmax())} has a token with the id {most.max()}"
    other = f"but the model has {rows} embeddings: pass the tokenizer that belongs to the model."
    require(most.max() < rows, f"{what}, {other}")
    context = context_of(model.config)
    if context is not None and prompts.width + max_completion_length > context:
        longest = f"the longest {name} prompt, {prompts.width} tokens in row {int(prompts.lengths.argmax())}"
        what = f"the model's context of {context} tokens is too short for {longest}, and {max_completion_length=}"
        raise ValueError(f"{what}: lower max_completion_length, or leave out long prompts.")


def _embeddings(model: Any) -> int:
    return model.get_input_embeddings().weight.shape[0]


def context_of(config: Any) -> int | None:
    """Return the most tokens that a model reads, with its scaling of rotary positions; None if its config is silent."""
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        return None
    rope = getattr(text, "rope_parameters", None) or {}
    for scaling in (rope, *rope.values()):  # one setting for all layers, or one for each kind of layer
        if isinstance(scaling, Mapping) and scaling.get("factor"):
            limit = max(limit, int(scaling["factor"] * (scaling.get("original_max_position_embeddings") or limit)))
    return limit
