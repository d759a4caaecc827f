"""Files of reward and cost models: where they lie, what kind they are, and how they are loaded.

Weights come from safetensors files, and no code from the Hub is run.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from evoalign_lib import models

SCORE_MODEL, _CLASSIFIER = "ForScore", "ForSequenceClassification"  # how the names of architectures end


class ScoreModel(torch.nn.Module):
    """A score model in the layout of Safe-RLHF: a decoder's body, a linear head and, maybe, a normaliser.

    Args:
        body: the decoder without a head, of transformers.
        weight, bias: of the head, (1, hidden) and (1,), in the dtype of the body; bias None: none.
        mean, std: of the normaliser, (1,) each: score = (output - mean) / (std + 1e-8). None: the output itself.
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
        """Return scores of hidden states: (n, hidden) -> (n, 1), float32."""
        scores = torch.nn.functional.linear(hidden, self.weight, self.bias).float()
        return scores if self.mean is None else (scores - self.mean.float()) / (self.std.float() + 1e-8)


def folder_of(name: str) -> str:
    """Return the folder of a model: as given, or what is fetched of it from the Hub, without files that hold code."""
    if os.path.isdir(name):
        return os.path.abspath(name)
    import huggingface_hub

    try:
        return huggingface_hub.snapshot_download(
            name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
        )
    except (OSError, ValueError) as error:  # the Hub's own errors are among these
        why = str(error).splitlines()[0]
        raise ValueError(
            f"model {name!r} is no folder, and cannot be fetched from the Hub ({why:.200}): give a folder, a name on "
            "the Hub, or a model object."
        ) from error


def tokenizer_of(tokenizer: Any, folder: str | None) -> Any:
    if tokenizer is not None:
        return tokenizer
    found = models.tokenizer_of(str(folder))
    converted = os.path.isdir(str(folder)) and not os.path.isfile(os.path.join(folder, "tokenizer.json"))
    if converted and type(found).__name__ == "LlamaTokenizer" and "add_bos_token" not in found.init_kwargs:
        found.add_bos_token = True  # Llama's default until transformers 5, which leaves it out
    return found


def config_of(folder: str, name: str) -> tuple[Any, str]:
    """Return the configuration of a classifier or score model, and its architecture, as far as they are right."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        why = str(error).splitlines()[0]
        raise ValueError(f"model {name!r} is no folder or name on the Hub with a config.json: {why}") from error
    architecture = next(iter(config.architectures or ()), "")
    # else a language model would get a head of random numbers; its number of labels is 2 unless something says 1
    if not architecture.endswith((SCORE_MODEL, _CLASSIFIER)):
        raise ValueError(
            f"model {name!r} is a {architecture or 'model without architecture'}, no sequence classifier: give a "
            "reward or cost model."
        )
    if not architecture.endswith(SCORE_MODEL):
        check_labels(config)
    elif config.model_type != "llama":
        raise ValueError(f"model {name!r} is a {architecture} of type {config.model_type!r}: only llama is supported.")
    if os.path.isdir(folder) and not any(Path(folder).glob("*.safetensors")):
        raise ValueError(
            f"model {name!r} has no *.safetensors: weights of other formats are not loaded, since they may hold code. "
            "Save it anew with save_pretrained()."
        )
    return config, architecture


def check_labels(config: Any) -> None:
    if (outputs := getattr(config, "num_labels", None)) != 1:
        raise ValueError(f"the model has {outputs} labels: give a reward or cost model, which has one.")


def load(folder: str, name: str, dtype: torch.dtype | str) -> Any:
    """Load a classifier or a score model; what its config.json says decides which."""
    from transformers import AutoModel, AutoModelForSequenceClassification

    config, architecture = config_of(folder, name)
    known = AutoModel if architecture.endswith(SCORE_MODEL) else AutoModelForSequenceClassification
    safe = {"use_safetensors": True, "trust_remote_code": False}
    model, info = known.from_pretrained(folder, config=config, dtype=dtype, output_loading_info=True, **safe)
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"the files of model {name!r} lack {', '.join(missing[:3])}{', ...' if missing[3:] else ''}, which would "
            "be random numbers: give a model that was trained as a reward or cost model."
        )
    return _with_head(model, folder, name) if known is AutoModel else model


def _with_head(body: Any, folder: str, name: str) -> ScoreModel:
    """Return a score model, with the head and the normaliser that its files hold."""
    from safetensors import safe_open

    config, held = body.config, {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = [key for key in file.keys() if key.startswith(("score_head.", "normalizer."))]  # noqa: SIM118
            held |= {key: file.get_tensor(key) for key in names}
    head = [held[key].to(body.dtype) if key in held else None for key in ("score_head.weight", "score_head.bias")]
    if head[0] is None or head[0].shape != (1, config.hidden_size):
        raise ValueError(
            f"model {name!r} has no score_head.weight of shape (1, {config.hidden_size}) in its *.safetensors: give a "
            "reward or cost model with one output."
        )
    if not getattr(config, "do_normalize", False):
        return ScoreModel(body, *head)
    kind = getattr(config, "score_type", "reward")
    if kind not in ("reward", "cost"):
        raise ValueError(f"model {name!r} has score_type {kind!r}: give a reward or cost model.")
    # what the files hold goes over what the configuration states, as where a state is loaded into a model
    mean, var = (held.get(f"normalizer.{key}", getattr(config, key, None)) for key in ("mean", "var"))
    if mean is None or var is None:
        raise ValueError(f"model {name!r} normalises its scores, but has no normalizer.mean and normalizer.var.")
    mean, var = (torch.as_tensor(value, dtype=torch.float32).reshape(1) for value in (mean, var))
    # a cost keeps its border
    return ScoreModel(body, *head, mean if kind == "reward" else torch.zeros(1), var.sqrt())


def decoder_head(model: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return what makes scores of a decoder's hidden states; None for an encoder, which pools in its own way."""
    if isinstance(model, ScoreModel):
        return model.scores
    head = getattr(model, "score", None)  # transformers' name for it in all decoders
    return head if isinstance(head, torch.nn.Linear) and model.base_model is not model else None
