"""Find, check and load the files of reward and cost models.

Weights are loaded only from safetensors files, and no code from the Hub is run.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from evoalign_lib import models
from evoalign_lib.checks import require

SCORE_MODEL, _CLASSIFIER = "ForScore", "ForSequenceClassification"  # suffixes of architecture names


class ScoreModel(torch.nn.Module):
    """A score model in the layout of Safe-RLHF: a decoder body, a linear head and optionally a normaliser.

    Args:
        body: a transformers decoder without a head.
        weight, bias: the head's parameters, (1, hidden) and (1,), in the dtype of the body; bias may be None.
        mean, std: the normaliser's statistics, (1,) each: score = (output - mean) / (std + 1e-8). None: no normaliser.
    """

    def __init__(
        self,
        body: Any,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        mean: torch.Tensor | None = None,
        std: torch.Tensor | None = None,
    ):
        super().__init__()
        self.base_model, self.config = body, body.config
        for name, tensor in (("weight", weight), ("bias", bias), ("mean", mean), ("std", std)):
            self.register_buffer(name, tensor)

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the scores of hidden states: (n, hidden) -> (n, 1), float32."""
        scores = torch.nn.functional.linear(hidden, self.weight, self.bias).float()
        return scores if self.mean is None else (scores - self.mean.float()) / (self.std.float() + 1e-8)


def folder_of(name: str) -> str:
    """Return a model's folder, fetched from the Hub (without files that hold code) unless `name` is a folder."""
    if os.path.isdir(name):
        return os.path.abspath(name)
    import huggingface_hub

    try:
        return huggingface_hub.snapshot_download(
            name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
        )
    except (OSError, ValueError) as error:  # the Hub's own errors are subclasses of these
        what = f"model {name!r} is not a folder and cannot be fetched from the Hub ({str(error).splitlines()[0]:.200})"
        raise ValueError(f"{what}: pass a folder, a name on the Hub, or a model object.") from error


def tokenizer_of(tokenizer: Any, folder: str | None) -> Any:
    if tokenizer is not None:
        return tokenizer
    found = models.tokenizer_of(str(folder))
    converted = os.path.isdir(str(folder)) and not os.path.isfile(os.path.join(folder, "tokenizer.json"))
    if converted and type(found).__name__ == "LlamaTokenizer" and "add_bos_token" not in found.init_kwargs:
        found.add_bos_token = True  # Llama's default before transformers 5, which dropped it
    return found


def config_of(folder: str, name: str) -> tuple[Any, str]:
    """Return the configuration and architecture of a classifier or score model, after checking both."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        why = str(error).splitlines()[0]
        raise ValueError(f"model {name!r} is not a folder or a name on the Hub with a config.json: {why}") from error
    architecture = next(iter(config.architectures or ()), "")
    # otherwise a language model would get a random head, which check_labels accepts if num_labels is 1
    what = f"model {name!r} is no sequence classifier but a {architecture or 'model without architecture'}"
    require(architecture.endswith((SCORE_MODEL, _CLASSIFIER)), f"{what}: pass a reward or cost model.")
    if not architecture.endswith(SCORE_MODEL):
        check_labels(config)
    elif config.model_type != "llama":
        raise ValueError(f"model {name!r} is a {architecture} of type {config.model_type!r}: only llama is supported.")
    stored = not os.path.isdir(folder) or any(Path(folder).glob("*.safetensors"))
    remedy = "other formats may hold code and are not loaded. Save it again with save_pretrained()"
    require(stored, f"model {name!r} has no *.safetensors: {remedy}.")
    return config, architecture


def check_labels(config: Any) -> None:
    if (outputs := getattr(config, "num_labels", None)) != 1:
        raise ValueError(f"the model has {outputs} labels: pass a reward or cost model, which has one.")


def load(folder: str, name: str, dtype: torch.dtype | str) -> Any:
    """Load a classifier or a score model, depending on its config.json."""
    from transformers import AutoModel, AutoModelForSequenceClassification

    config, architecture = config_of(folder, name)
    known = AutoModel if architecture.endswith(SCORE_MODEL) else AutoModelForSequenceClassification
    safe = {"use_safetensors": True, "trust_remote_code": False}
    model, info = known.from_pretrained(folder, config=config, dtype=dtype, output_loading_info=True, **safe)
    if missing := sorted(info["missing_keys"]):
        what = f"the files of model {name!r} lack {', '.join(missing[:3])}{', ...' if missing[3:] else ''}"
        remedy = "pass a model that was trained as a reward or cost model"
        raise ValueError(f"{what}, which would be random numbers: {remedy}.")
    return _with_head(model, folder, name) if known is AutoModel else model


def _with_head(body: Any, folder: str, name: str) -> ScoreModel:
    """Return a score model: the body with the head and the normaliser from its files."""
    from safetensors import safe_open

    config, held = body.config, {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = [key for key in file.keys() if key.startswith(("score_head.", "normalizer."))]  # noqa: SIM118
            held |= {key: file.get_tensor(key) for key in names}
    head = [held[key].to(body.dtype) if key in held else None for key in ("score_head.weight", "score_head.bias")]
    fits = head[0] is not None and head[0].shape == (1, config.hidden_size)
    what = f"model {name!r} has no score_head.weight of shape (1, {config.hidden_size}) in its *.safetensors"
    require(fits, f"{what}: pass a reward or cost model with one output.")
    if not getattr(config, "do_normalize", False):
        return ScoreModel(body, *head)
    kind = getattr(config, "score_type", "reward")
    require(kind in ("reward", "cost"), f"model {name!r} has score_type {kind!r}: pass a reward or cost model.")
    # values in the weight files override those of the configuration, as when a state dict is loaded
    mean, var = (held.get(f"normalizer.{key}", getattr(config, key, None)) for key in ("mean", "var"))
    if mean is None or var is None:
        raise ValueError(f"model {name!r} has do_normalize, but no normalizer.mean and normalizer.var: save both.")
    mean, var = (torch.as_tensor(value, dtype=torch.float32).reshape(1) for value in (mean, var))
    # a cost is not centred: its zero is the border between safe and unsafe
    return ScoreModel(body, *head, mean if kind == "reward" else torch.zeros(1), var.sqrt())


def decoder_head(model: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return the function from a decoder's hidden states to scores; None for an encoder, which pools in its own way."""
    if isinstance(model, ScoreModel):
        return model.scores
    head = getattr(model, "score", None)  # its name in all decoders of transformers
    return head if isinstance(head, torch.nn.Linear) and model.base_model is not model else None
