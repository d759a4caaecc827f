"""Models: load one, given by a name, a folder, a shipped base or an object, and say which one it is."""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evoalign_lib import _adapters, precision, tiny
from evoalign_lib._model_checks import check_decoder, check_quantisation
from evoalign_lib.files import canonical_json
from evoalign_lib.tiny.base import without_bars

# what Llama 3's templates state where they have no clock
_DATE = datetime(2024, 7, 26)
# arguments of from_pretrained that say where the files are
_HUB = {"revision", "cache_dir", "token", "local_files_only", "subfolder"}
_SECRET = re.compile("(.*_)?(token|key|secret|password|authorization)", re.IGNORECASE)


def load(
    model: Any,
    tokenizer: Any = None,
    keywords: Mapping[str, Any] | None = None,
    *,
    adapters: bool = False,
    quantised: bool = False,
) -> tuple[Any, Any]:
    """Return a model in evaluation mode on the CPU, and its tokenizer, which has a padding token.

    Args:
        model: a model object, a folder, the name of a shipped base ("A0", see `evoalign_lib.tiny`), or a name on the
            Hub. What is loaded is float32 unless keywords say otherwise; weights come from safetensors, and no code
            that lies beside them is ever run.
        tokenizer: its tokenizer; None: the one saved with the model.
        keywords: further arguments of from_pretrained; those that say which files of the Hub (`revision`, `cache_dir`,
            ...) hold for the tokenizer, too.
        adapters: whether model may be the folder of a PEFT adapter. It is loaded over its base, to be trained.
        quantised: whether what is loaded may be quantised; the base of an adapter may.

    Raises:
        ValueError: the model cannot be found, needs code of its own, is no decoder, is a PEFT adapter or quantised and
            may not be, it has no tokenizer, or keywords are given for an object.
        ImportError: an adapter, and PEFT is not installed.
    """
    keywords, beside = keywords or {}, None
    if isinstance(model, (str, os.PathLike)):
        folder = Path(model)
        if adapters and (folder / "adapter_config.json").is_file():
            base = _from_pretrained(_adapters.base_name(folder), keywords, quantised=True)
            model = _adapters.open_adapter(base, folder)
            beside = str(folder) if (folder / "tokenizer_config.json").is_file() else None
        else:
            model = _from_pretrained(str(model), keywords, quantised)
    elif keywords:
        given = ", ".join(keywords)
        raise ValueError(f"model_init_kwargs ({given}) is for a model given by name; the model is an object already.")
    if tokenizer is None:
        origin = {k: v for k, v in keywords.items() if k in _HUB}
        tokenizer = tokenizer_of(beside or model.config._name_or_path, **origin)
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has neither a padding nor an end token: set tokenizer.eos_token.")
        tokenizer.pad_token = tokenizer.eos_token
    if not getattr(model, "is_quantized", False):  # of which some refuse to be moved
        model = model.to("cpu")
    return model.eval(), tokenizer


def tokenizer_of(folder: str, **origin: Any) -> Any:
    """Return the tokenizer beside a model. Raises ValueError where there is none.

    folder: of the model, or its name on the Hub; origin: the keywords that say which files of the Hub.
    """
    from transformers import AutoTokenizer

    lacking = f"no tokenizer lies beside the model {folder!r}: save it there, or give it as processing_class. "
    lacking += "A tokenizer.model without tokenizer.json needs the package sentencepiece."
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **origin)
    except (ImportError, OSError, ValueError) as error:
        raise ValueError(lacking) from error
    # without files transformers makes one of the model's kind, which has special tokens alone
    if not tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys():
        raise ValueError(lacking)
    return tokenizer


def _from_pretrained(name: str, keywords: Mapping[str, Any], quantised: bool) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    _refuse_adapter(name)
    if trusted := keywords.get("trust_remote_code"):
        raise ValueError(f"trust_remote_code={trusted!r} would run code beside the model: give it as an object.")
    shipped = name in tiny.SHIPPED
    folder = place(name) if shipped else name
    safe = {"trust_remote_code": False}  # left open, transformers would ask, and `yes |` would answer
    files = {k: v for k, v in keywords.items() if k in _HUB} | safe
    settings = {"dtype": torch.float32, "use_safetensors": True} | dict(keywords) | safe
    with _named(name):
        config = keywords.get("config") or AutoConfig.from_pretrained(folder, **files)
    check_decoder(config)
    if not quantised:
        check_quantisation(keywords.get("quantization_config") or getattr(config, "quantization_config", None))
    with _named(name), without_bars() if shipped else nullcontext():
        return AutoModelForCausalLM.from_pretrained(folder, **settings)


def _refuse_adapter(name: str) -> None:
    if (Path(name) / "adapter_config.json").is_file():
        raise ValueError(f"model {name!r} is a PEFT adapter: merge it (merge_and_unload()), or give the base model.")


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Let errors of transformers name the model that it does not find, and what to give."""
    try:
        yield
    except (OSError, ValueError) as error:
        remedy = "Give a folder, a model object, or a name on the Hub, which is fetched once, with a network"
        what = f"model {name!r} is neither a folder with a model nor could it be loaded from the Hub"
        raise ValueError(f"{what}: {str(error).splitlines()[0]} {remedy}.") from error


def masked(keywords: Any) -> Any:
    """Return arguments for `load` as they may be written down: without tokens, keys and passwords, at any depth.

    >>> masked({"revision": "main", "token": "hf_abc", "headers": [{"api_key": "x"}], "max_tokens": 3})
    {'revision': 'main', 'token': '<TOKEN>', 'headers': [{'api_key': '<API_KEY>'}], 'max_tokens': 3}
    """
    if isinstance(keywords, Mapping):
        return {
            name: f"<{str(name).upper()}>" if isinstance(value, str) and _SECRET.fullmatch(str(name)) else masked(value)
            for name, value in keywords.items()
        }
    return [masked(value) for value in keywords] if isinstance(keywords, (list, tuple)) else keywords


def place(model: str | os.PathLike) -> str:
    """Return where a model given by name lies: a folder as every process finds it, or its name on the Hub."""
    if str(model) in tiny.SHIPPED:
        return str(tiny.bases_folder() / str(model))
    return os.path.abspath(model) if os.path.isdir(model) else str(model)


def name_of(model: Any) -> str | None:
    """Return the name or folder that a model was loaded from; None if it has none.

    Of a shipped base it is the name alone, since its folder is another one on every machine.
    """
    origin = getattr(model.config, "_name_or_path", "")
    return Path(origin).name if origin and Path(origin).parent == tiny.bases_folder() else origin or None


def rendered(tokenizer: Any, messages: Sequence[Mapping[str, str]], **settings: Any) -> str:
    """Return messages by a tokenizer's chat template, the same on every day: one that states the date has a fixed one.

    settings: further arguments of apply_chat_template.
    """
    return tokenizer.apply_chat_template(messages, tokenize=False, strftime_now=_DATE.strftime, **settings)


# ---- identity: what a spec says of its base (`precision` says which digest is which)


def base_digest(model: Any) -> str:
    """Return the first 16 hexadecimal digits of `precision.digest` of a model's parameters in float32."""
    parameters = sorted(model.named_parameters())
    return precision.digest_by_name((name, (p.detach().float(),)) for name, p in parameters)[:16]


def stored_digest(file: Path) -> str:
    """Return `base_digest` of a model from its file of weights: making a model of it takes seconds of imports.

    Args:
        file: safetensors with all parameters under their names, and nothing else.
    """
    from safetensors.torch import load_file

    stored = load_file(file)
    return precision.digest_by_name((name, (stored[name].float(),)) for name in sorted(stored))[:16]


def flat_digest(master: np.ndarray) -> str:
    """Return what a record calls the `digest` of trained weights: SHA-256 of the flat float32 master, 16 digits."""
    return hashlib.sha256(master.tobytes()).hexdigest()[:16]


NO_WEIGHTS = "no weights"
"""What a folder with a configuration alone has in the place of a digest: enough for the plan of a run."""


def plan_digest(name: str) -> str:
    """Return `origin_digest`, or NO_WEIGHTS for a folder that holds a configuration and no weights of PyTorch.

    Raises ValueError as `origin_digest`, and for a model that is no decoder.
    """
    from transformers import AutoConfig

    folder = Path(name)
    files = {path.suffix for path in folder.iterdir()} if folder.is_dir() else set()
    bare = (folder / "config.json").is_file() and not files & {".safetensors", ".bin"}
    digest = NO_WEIGHTS if bare else origin_digest(name)
    check_decoder(AutoConfig.from_pretrained(name, trust_remote_code=False))
    return digest


def origin_digest(name: str) -> str:
    """Return what identifies a user's model without loading it, 16 hexadecimal digits.

    Args:
        name: a folder: the SHA-256 of its configuration and weights (names and bytes of the files). Or a name on the
            Hub: the commit of the revision, so that no weights are fetched for it.

    Raises:
        ValueError: no such model, an adapter, or a folder without configuration or without weights in safetensors
            files.
    """
    from transformers import AutoConfig

    folder = Path(name)
    if not folder.is_dir():
        try:
            commit = AutoConfig.from_pretrained(name, trust_remote_code=False)._commit_hash
        except (OSError, ValueError):
            commit = None
        return commit[:16] if commit else base_digest(load(name)[0])  # which says what is wrong with the name
    _refuse_adapter(name)
    if not (folder / "config.json").is_file():
        raise ValueError(f"model {name!r} is a folder without config.json: save it with save_pretrained().")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"model {name!r} has no *.safetensors: other formats may hold code. Save it anew.")
    found = hashlib.sha256()
    for path in (folder / "config.json", *files):
        found.update(path.name.encode() + b"\0")
        with open(path, "rb") as file:
            hashlib.file_digest(file, lambda: found)  # goes on with what is hashed so far
    return found.hexdigest()[:16]


def tokenizer_digest(tokenizer: Any) -> str:
    """Return what identifies a tokenizer, its special tokens' roles and its chat template, 16 hexadecimal digits."""
    if backend := getattr(tokenizer, "backend_tokenizer", None):
        known = {k: v for k, v in json.loads(backend.to_str()).items() if k not in ("truncation", "padding")}
    else:
        known = tokenizer.get_vocab()
    roles = {role: str(token) for role, token in tokenizer.special_tokens_map.items()}
    return hashlib.sha256(canonical_json([known, roles, str(tokenizer.chat_template)]).encode()).hexdigest()[:16]
