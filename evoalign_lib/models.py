"""Models: load one from a name, a folder, a shipped base or an object, and identify it by digests."""

import errno
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evoalign_lib import _adapters, precision, smollm2, tiny
from evoalign_lib._interrupts import interrupts_wait
from evoalign_lib._model_checks import check_decoder, check_quantisation, check_reloads
from evoalign_lib.checks import plain, require
from evoalign_lib.files import canonical_json
from evoalign_lib.tiny.base import without_bars

# arguments of from_pretrained that say where the files come from
_HUB = {"revision", "cache_dir", "token", "local_files_only", "subfolder", "gguf_file"}
_SECRET = re.compile("(.*[_-])?(token|key|secret|password|auth|authorization|credentials?|cookies?)", re.IGNORECASE)
# within a text: what stands before the @ of an address, or after a word such as token=, and known kinds of keys; each
# is tried from one place in a word only, as a search from all of them takes seconds in a long one
_ADDRESS = re.compile(r"(?<!\S)((?>\S*?//))\S+(?=@)")
_SECRETS = re.compile(
    r"((?:bearer|basic) |(?:token|key|secret|password)[=:])[^&\s]+"
    r"|(?<![^\s/@])[^\s/:@]++:[^\s/@]+(?=@)|\b(?:hf_|sk-|ghp_)[\w-]{16,}",
    re.IGNORECASE,
)


def load(
    model: Any,
    tokenizer: Any = None,
    keywords: Mapping[str, Any] | None = None,
    *,
    adapters: bool = False,
    quantised: bool = False,
) -> tuple[Any, Any]:
    """Load a model in evaluation mode on the CPU, and its tokenizer, with a padding token.

    Args:
        model: a model object, a folder, the name of a shipped base ("A0", see `evoalign_lib.tiny`), "SmolLM2-135M" once
            it is converted (`evoalign_lib.smollm2`), a GGUF file, or a name on the Hub. A loaded model is float32
            unless keywords say otherwise. Weights are read only from safetensors, or from GGUF where keywords name a
            gguf_file, and code that lies beside them is never run.
        tokenizer: the model's tokenizer; None: the one saved with the model.
        keywords: further arguments of from_pretrained; those that select files on the Hub (`revision`, `cache_dir`,
            ...) apply to the tokenizer, too.
        adapters: whether model may be the folder of a PEFT adapter, which is loaded over its base, ready for training.
        quantised: whether a loaded model may be quantised; an adapter's base always may.

    Raises:
        ValueError: the model cannot be found, needs code of its own, or is not a decoder; it is a PEFT adapter or
            quantised, and that is not allowed; it has no tokenizer; or keywords are given for an object.
        ImportError: the model is an adapter, and PEFT is not installed.
    """
    keywords, beside = with_dtype(keywords or {}), None
    if isinstance(model, (str, os.PathLike)):
        folder = Path(model)
        if folder.suffix == ".gguf" and folder.is_file():
            model, keywords = folder.parent, {"gguf_file": folder.name} | keywords
        if adapters and (folder / "adapter_config.json").is_file():
            of = f", though {str(folder / 'adapter_config.json')!r} names it as the base"
            base = _from_pretrained(_adapters.base_name(folder), keywords, quantised=True, of=of)
            model = _adapters.open_adapter(base, folder)
            beside = str(folder) if (folder / "tokenizer_config.json").is_file() else None
        else:
            model = _from_pretrained(str(model), keywords, quantised)
    elif keywords:
        given = ", ".join(keywords)
        raise ValueError(f"model_init_kwargs ({given}) is for a model given by name, not an object: leave it out.")
    if tokenizer is None:
        origin = {k: v for k, v in keywords.items() if k in _HUB}
        tokenizer = tokenizer_of(beside or model.config._name_or_path, **origin)
    if tokenizer.pad_token_id is None:
        ends = tokenizer.eos_token_id is not None
        require(ends, "the tokenizer has neither a padding nor an end token: set tokenizer.eos_token.")
        tokenizer.pad_token = tokenizer.eos_token
    if not getattr(model, "is_quantized", False):  # some quantised models cannot be moved
        model = model.to("cpu")
    return model.eval(), tokenizer


def with_dtype(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of from_pretrained with `torch_dtype`, the older name of `dtype`, under the newer one.

    Raises:
        ValueError: both are given and differ.
    """
    found = dict(keywords)
    if (older := found.pop("torch_dtype", None)) is not None:
        one, other = (str(dtype).removeprefix("torch.") for dtype in (older, found.setdefault("dtype", older)))
        require(one == other, f"torch_dtype={one} and dtype={other} mean the same setting: leave out one of them.")
    return found


def save(model: Any, folder: str | os.PathLike, *beside: Any) -> None:
    """Write a model and what belongs beside it, such as its tokenizer, as a Hugging Face folder.

    Its generation_config is written as it is: transformers loads some that it refuses to write.
    """
    from transformers import GenerationConfig

    network = _adapters.base_of(model)
    own, network.generation_config = network.generation_config, GenerationConfig()
    try:
        model.save_pretrained(folder)
    finally:
        network.generation_config = own
    if (path := Path(folder) / "generation_config.json").is_file():  # an adapter has none
        own.to_json_file(path, keys_to_pop=["compile_config"])
    _adapters.save_alike(model, folder)
    for part in beside:
        part.save_pretrained(folder)


def check_saving(model: Any, tokenizer: Any, callbacks: Iterable[Any] = ()) -> None:
    """Raise ValueError, before a run depends on it, if a configuration, tokenizer or callback's state cannot be saved.

    Likewise if a saved model without an adapter would be loaded with other parameters (`check_reloads`).

    callbacks: those whose state() checkpoints hold.
    """
    if not _adapters.is_adapted(model):
        check_reloads(model)
    parts = (_adapters.base_of(model).config, tokenizer, *getattr(model, "peft_config", {}).values(), *callbacks)
    with interrupts_wait(), tempfile.TemporaryDirectory() as folder:  # or one might leave the folder behind
        for part in parts:
            try:
                part.save_pretrained(folder) if hasattr(part, "save_pretrained") else json.dumps(plain(part.state()))
            except Exception as error:  # tokenizers raises no other kind
                disk = isinstance(error, OSError) or "os error" in str(error)  # that of the temporary folder
                require(disk, f"the {type(part).__name__} cannot be saved ({error!r}): correct it before the run.")


@contextmanager
def saving(folder: str | os.PathLike, remedy: str) -> Iterator[None]:
    """Turn any error in the block, which saves a model, into an OSError that also says where there is one."""
    try:
        yield
    except Exception as error:
        what = f"the model could not be written, but {remedy} ({error})"
        raise OSError(getattr(error, "errno", None) or errno.EIO, what, str(folder)) from error


def tokenizer_of(folder: str, **origin: Any) -> Any:
    """Load the tokenizer saved beside a model. Raises ValueError if there is none.

    folder: of the model, or its name on the Hub; origin: keywords that select files on the Hub.
    """
    from transformers import AutoTokenizer

    lacking = f"no tokenizer lies beside the model {folder!r}: save it there, or pass it as processing_class. "
    lacking += "A tokenizer.model without tokenizer.json needs the package sentencepiece."
    folder = place(folder) if folder == smollm2.NAME else folder
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **origin)
    except (ImportError, OSError, ValueError) as error:
        raise ValueError(lacking) from error
    # if the files are missing, transformers makes a tokenizer of the model's kind with special tokens only
    require(tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys(), lacking)
    return tokenizer


def _from_pretrained(name: str, keywords: Mapping[str, Any], quantised: bool, of: str = "") -> Any:
    import transformers

    _refuse_adapter(name)
    trusted = keywords.get("trust_remote_code")
    require(not trusted, f"trust_remote_code={trusted!r} would run code beside the model: pass a model object.")
    shipped = name in tiny.SHIPPED
    folder = place(name) if shipped or name == smollm2.NAME else name
    safe = {"trust_remote_code": False}  # unset, transformers would ask the user, and `yes |` would answer
    files = {k: v for k, v in keywords.items() if k in _HUB} | safe
    settings = {"dtype": torch.float32, "use_safetensors": True} | dict(keywords) | safe
    if "gguf_file" in keywords and hasattr(transformers, "GgufConfig"):  # newer versions would keep its weights packed
        settings.setdefault("quantization_config", transformers.GgufConfig(dequantize=True))
    with _named(name, of):
        config = keywords.get("config") or transformers.AutoConfig.from_pretrained(folder, **files)
    check_decoder(config)
    if not quantised:
        check_quantisation(keywords.get("quantization_config") or getattr(config, "quantization_config", None))
    with _named(name, of), without_bars() if shipped else nullcontext():
        return transformers.AutoModelForCausalLM.from_pretrained(folder, **settings)


def _refuse_adapter(name: str) -> None:
    adapter = Path(name, "adapter_config.json").is_file()
    require(not adapter, f"model {name!r} is a PEFT adapter: merge it (merge_and_unload()), or pass the base model.")


@contextmanager
def _named(name: str, of: str = "") -> Iterator[None]:
    """Turn transformers' errors in the block into a ValueError that names the model (of: of what) and the remedy."""
    try:
        yield
    except (OSError, ValueError) as error:
        remedy = "Pass a folder, a model object, or a name on the Hub, which is fetched once, with a network"
        where = "" if os.path.isabs(name) else f" in {os.getcwd()!r}"
        what = f"model {name!r} is neither a folder with a model{where} nor could it be loaded from the Hub{of}"
        raise ValueError(f"{what}: {str(error).splitlines()[0]} {remedy}.") from error


def masked(keywords: Any, secret: str = "") -> Any:
    """Return arguments of `load` with tokens, keys and passwords masked at any depth, so that they may be recorded.

    They are known by their names, also as pairs, and within texts by their form.

    Args:
        keywords: the arguments, or a part of them.
        secret: what replaces every text of the part, if it is under such a name.

    >>> masked({"revision": "main", "token": "hf_abc", "headers": [{"api_key": "x"}], "max_tokens": 3})
    {'revision': 'main', 'token': '<TOKEN>', 'headers': [{'api_key': '<API_KEY>'}], 'max_tokens': 3}
    >>> masked({"proxies": {"https": "http://user:pass@proxy:80"}, "auth": ("user", "pass"), "headers": [("key", "x")]})
    {'proxies': {'https': 'http://***@proxy:80'}, 'auth': ['<AUTH>', '<AUTH>'], 'headers': [['key', '<KEY>']]}
    """
    if isinstance(keywords, str | bytes) and secret:
        return secret
    if isinstance(keywords, str):
        return _SECRETS.sub(lambda found: f"{found[1] or ''}***", _ADDRESS.sub(r"\1***", keywords))
    if isinstance(keywords, Mapping):
        return {name: masked(value, _mask(name) or secret) for name, value in keywords.items()}
    if isinstance(keywords, list | tuple):
        pair = _mask(keywords[0]) if len(keywords) == 2 else ""
        return [*keywords[:1], masked(keywords[1], pair)] if pair else [masked(value, secret) for value in keywords]
    return keywords


def _mask(name: Any) -> str:
    """Return what replaces a secret of this name; empty if it names none."""
    return f"<{str(name).upper()}>" if _SECRET.fullmatch(str(name)) else ""


def place(model: str | os.PathLike) -> str:
    """Return where a named model is: the absolute path of its folder, or its name on the Hub.

    Raises ValueError for the model of `evoalign_lib.smollm2` if it is not converted yet.
    """
    if str(model) in tiny.SHIPPED:
        return str(tiny.bases_folder() / str(model))
    if str(model) == smollm2.NAME:
        return smollm2.place()
    return os.path.abspath(model) if os.path.isdir(model) else str(model)


def name_of(model: Any) -> str | None:
    """Return the name or folder that a model was loaded from; None if it has none.

    For a shipped base, or the converted one, it is the name alone, because its folder differs between machines.
    """
    origin = getattr(model.config, "_name_or_path", "")
    named = origin and (Path(origin).parent == tiny.bases_folder() or Path(origin) == smollm2.folder())
    return Path(origin).name if named else origin or None


# ---- identity: the digests by which a spec identifies its base (`precision` tells the kinds of digest apart)


def base_digest(model: Any) -> str:
    """Return the first 16 hexadecimal digits of `precision.digest` of a model's parameters in float32."""
    return precision.model_digest(model)


def stored_digest(file: Path) -> str:
    """Return the `base_digest` of a model from its weights file, without the seconds that loading the model takes.

    Args:
        file: safetensors with all parameters under their names, and nothing else.
    """
    from safetensors.torch import load_file

    stored = load_file(file)
    return precision.digest_by_name((name, (stored[name].float(),)) for name in sorted(stored))[:16]


def flat_digest(master: np.ndarray) -> str:
    """Return the `digest` of trained weights in a record: 16 digits of the SHA-256 of the flat float32 master."""
    return hashlib.sha256(master.tobytes()).hexdigest()[:16]


NO_WEIGHTS = "no weights"
"""Stands for the digest of a folder that has only a configuration, which is enough to plan a run."""


def plan_digest(name: str) -> str:
    """Return `origin_digest`, or NO_WEIGHTS for a folder that holds a configuration but no PyTorch weights.

    Raises ValueError as `origin_digest` does, and for a model that is not a decoder.
    """
    from transformers import AutoConfig

    if name == smollm2.NAME:
        return smollm2.DIGEST
    folder = Path(name)
    files = {path.suffix for path in folder.iterdir()} if folder.is_dir() else set()
    bare = (folder / "config.json").is_file() and not files & {".safetensors", ".bin"}
    digest = NO_WEIGHTS if bare else origin_digest(name)
    check_decoder(AutoConfig.from_pretrained(name, trust_remote_code=False))
    return digest


def origin_digest(name: str) -> str:
    """Return 16 hexadecimal digits that identify a user's model, without loading it.

    Args:
        name: a folder, identified by the SHA-256 of its configuration and weights (file names and bytes); or a name on
            the Hub, identified by the commit of the revision, so that no weights are fetched.

    Raises:
        ValueError: there is no such model, it is an adapter, or the folder has no configuration or no safetensors
            files.
    """
    from transformers import AutoConfig

    folder = Path(name)
    if not folder.is_dir():
        try:
            commit = AutoConfig.from_pretrained(name, trust_remote_code=False)._commit_hash
        except (OSError, ValueError):
            commit = None
        return commit[:16] if commit else base_digest(load(name)[0])  # load() says what is wrong with the name
    _refuse_adapter(name)
    whole, files = (folder / "config.json").is_file(), sorted(folder.glob("*.safetensors"))
    require(whole, f"model {name!r} is a folder without config.json: save it with save_pretrained().")
    require(files, f"model {name!r} has no *.safetensors: other formats may hold code. Save it again.")
    found = hashlib.sha256()
    for path in (folder / "config.json", *files):
        found.update(path.name.encode() + b"\0")
        with open(path, "rb") as file:
            hashlib.file_digest(file, lambda: found)  # adds to what is hashed so far
    return found.hexdigest()[:16]


def tokenizer_digest(tokenizer: Any) -> str:
    """Return 16 hexadecimal digits that identify a tokenizer, its special tokens' roles and its chat template."""
    if backend := getattr(tokenizer, "backend_tokenizer", None):
        known = {k: v for k, v in json.loads(backend.to_str()).items() if k not in ("truncation", "padding")}
    else:
        known = tokenizer.get_vocab()
    roles = {role: str(token) for role, token in tokenizer.special_tokens_map.items()}
    return hashlib.sha256(canonical_json([known, roles, str(tokenizer.chat_template)]).encode()).hexdigest()[:16]
