"""A model's weights as a read-only mapping of float32 tensors, read one at a time or in parts.

`weights` opens a Hugging Face folder, a PEFT LoRA adapter over a base, or the ledger of an ES run without loading a
model: names and shapes come from the files' headers, and the files are mapped into memory, not read. So two models of
any size can be compared in the memory of a few parts of one tensor. (A ledger is the exception: its replay holds the
whole model.)

A head that is tied to the embedding appears once, under the embedding's name. Most files store it that way; if a file
stores both names with the same values, and its configuration does not say that they are untied, the head is left out.
Buffers that old files store among the weights (causal masks, rotary frequencies) are left out, too.
"""

import json
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import regex
import torch
from torch import Tensor

from evoalign_lib import ledger, models
from evoalign_lib.checks import positive, require, whole_number

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_PART = 1 << 20  # entries compared at a time
_HEADS = ("lm_head.weight", "embed_out.weight")
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|embed_in|word_embeddings)\.weight$")
_BUFFER = re.compile(r"\.(rotary_emb\.inv_freq|masked_bias)$")
_MASK = re.compile(r"\.(attn|attention)\.bias$")
_MATCHING = 5.0
"""CPU seconds that the patterns in an adapter's configuration may take"""
_NO_PATTERN = (re.error, regex.error, RecursionError, MemoryError)
_LORA = re.compile(r"(.+)\.lora_([AB])\.weight")
# Initialisations that leave the base's weights as they are.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
# Settings that make an adapter more than the product of two matrices added to some weights.
_OTHER_KINDS = ("use_dora", "use_qalora", "use_bdlora", "lora_bias", "layer_replication", "target_parameters")
_OTHER_KINDS += ("arrow_config", "trainable_token_indices", "alora_invocation_tokens")


class StateDict(Mapping[str, Tensor]):
    """Weights by canonical Hugging Face name, each read on access. Get one from `weights`."""

    source: str
    """what was opened"""
    shapes: dict[str, tuple[int, ...]]
    """shape of each tensor, known without reading it"""
    dtypes: frozenset[str]
    """dtypes in which the tensors are stored, such as {"bfloat16"}: differences below their rounding are lost"""
    run: ledger.Ledger | None = None
    """the ledger, if one was opened"""
    repeated: int = 0
    """entries of a head that are also those of the embedding (`untied`)"""

    def part(self, name: str, start: int, stop: int) -> Tensor:
        """Return a copy of the entries start to stop of a tensor in row-major order, float32 (stop - start,).

        Raises KeyError for an unknown name.
        """
        raise NotImplementedError

    def __getitem__(self, name: str) -> Tensor:
        """Return a copy of one tensor, float32 in its shape. Raises KeyError for an unknown name."""
        shape = self.shapes[name]
        return self.part(name, 0, math.prod(shape)).reshape(shape)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, in the order in which they are stored."""
        return iter(self.shapes)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self.shapes)


class _Untied(StateDict):
    """Weights whose head is tied to the embedding, with a head of its own that has the same entries."""

    def __init__(self, tied: StateDict, head: str, embedding: str):
        self.source, self.dtypes, self.run = tied.source, tied.dtypes, tied.run
        self.shapes = tied.shapes | {head: tied.shapes[embedding]}
        self._tied, self._names, self.repeated = tied, {head: embedding}, math.prod(tied.shapes[embedding])

    def part(self, name: str, start: int, stop: int) -> Tensor:
        return self._tied.part(self._names.get(name, name), start, stop)


def untied(state: StateDict, names: Iterable[str]) -> StateDict:
    """Return weights with a head of its own if one is among these names and theirs is tied to the embedding."""
    heads = [name for name in names if name.endswith(_HEADS) and name not in state]
    embeddings = [name for name in state if _EMBEDDING.search(name)]
    return _Untied(state, heads[0], embeddings[0]) if heads and len(embeddings) == 1 else state


def weights(source: str | os.PathLike[str], base: str | os.PathLike[str] | StateDict | None = None) -> StateDict:
    """Open a model's weights, to be read one tensor at a time as float32.

    - A Hugging Face folder with one or several safetensors files; a shipped base, such as "A0"; or a model in the
      Hub's cache (nothing is fetched).
    - A PEFT LoRA adapter: its base, as float32, plus scaling * B @ A, not rounded to the base's dtype. Supported are
      matrices on linear layers, also with ranks and alphas that patterns in the adapter set per module, and whole
      weights saved with the adapter (modules_to_save), which replace those of the base.
    - A run's ledger: the weights after its last step, replayed when the first of them is read. Names are those of the
      loaded model; if the model's folder stores others (the head of GPT-NeoX, fused experts), first write a folder
      from the ledger (evoalign replay --out).

    Args:
        source: folder or name of a model, folder of an adapter, or a file .jsonl or .jsonl.gz.
        base: for an adapter: its base, if not at the place that the adapter names, or as opened weights; for a ledger:
            name or folder of the model that the run started from. None: the name in the adapter, or the shipped base
            that the ledger names.

    Returns:
        The weights. Each read returns a copy; the files are not changed.

    Raises:
        ValueError: no such file or folder; weights in other formats, which may hold code, or quantised; tensors that
            are not float32, bfloat16 or float16; a damaged file; an adapter of another kind or over another base; an
            invalid ledger. The message names the source and the remedy.
    """
    text = str(source)
    if text.endswith((".jsonl", ".jsonl.gz")):
        require(not isinstance(base, StateDict), f"{text!r} is a ledger: pass its base's name or folder, not weights.")
        return _Ledger(text, base)
    folder = _folder(text)
    if (folder / "adapter_config.json").is_file():
        return _Adapter(folder, base)
    return _Files(folder, text)


def _folder(source: str, of: str = "") -> Path:
    folder = Path(models.place(source))
    if os.path.isdir(folder):
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, local_files_only=True))
    except (OSError, ValueError) as error:
        remedy = "pass a folder with a model, a run's ledger.jsonl, or a name after hf download NAME"
        raise ValueError(f"{source!r:.300}{of} does not exist, here or in the Hub's cache: {remedy}.") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}): restore it from a copy.") from error


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read ({error}): restore it from a copy, or fetch it again.") from error


class _Files(StateDict):
    """The safetensors files of a folder, mapped into memory."""

    def __init__(self, folder: Path, source: str):
        self.source = source
        configuration = _json(folder / "config.json") if (folder / "config.json").is_file() else {}
        quantised = configuration.get("quantization_config")
        what = f"{source!r} is quantised (quantization_config={quantised!r:.200})"
        require(not quantised, f"{what}: pass the unquantised model.")
        self._files: dict[str, Any] = {}
        for path, expected in _shards(folder, source).items():
            file = _open(path)
            missing = sorted(expected - set(file.keys()))
            require(not missing, f"{path} lacks {missing[:1]}, which the index lists: fetch the folder again.")
            self._files |= dict.fromkeys(sorted(file.keys()), file)
        self.shapes, stored = {}, set()
        for name, file in self._files.items():
            entries = file.get_slice(name)
            shape, dtype = tuple(entries.get_shape()), entries.get_dtype()
            if _BUFFER.search(name) or (_MASK.search(name) and len(shape) == 4):
                continue
            kind = f"{name!r} of {source!r} is stored as {dtype}, which is not supported"
            require(dtype in _DTYPES, f"{kind}: save the model as one of {', '.join(_DTYPES)}.")
            self.shapes[name] = shape
            stored.add(_DTYPES[dtype])
        self.dtypes = frozenset(stored)
        if configuration.get("tie_word_embeddings") is not False:
            self._drop_tied_head()

    def _drop_tied_head(self) -> None:
        heads = [name for name in self.shapes if name.endswith(_HEADS)]
        embeddings = [name for name in self.shapes if _EMBEDDING.search(name)]
        if len(heads) != 1 or len(embeddings) != 1 or self.shapes[heads[0]] != self.shapes[embeddings[0]]:
            return
        (head,), (embedding,), size = heads, embeddings, math.prod(self.shapes[heads[0]])
        parts = ((i, min(i + _PART, size)) for i in range(0, size, _PART))
        if all(torch.equal(self.part(head, *part), self.part(embedding, *part)) for part in parts):
            del self.shapes[head]

    def part(self, name: str, start: int, stop: int) -> Tensor:
        self.shapes[name]
        # a view of the file: only the pages of this part are read
        return self._files[name].get_tensor(name).reshape(-1)[start:stop].to(torch.float32, copy=True)


def _shards(folder: Path, source: str) -> dict[Path, set[str]]:
    """Return a folder's weight files, each with the names that the index says it holds."""
    name, index = "model.safetensors", folder / "model.safetensors.index.json"
    if (folder / name).is_file() or not index.is_file():
        return {_safetensors(folder, name, source): set()}
    shards: dict[Path, set[str]] = {}
    places = _json(index).get("weight_map")
    require(isinstance(places, dict) and places, f"{index} has no weight_map: fetch the folder again.")
    for name, file in places.items():
        there = Path(str(file)).name == file and os.path.isfile(folder / file)
        require(
            there, f"{index} places {name!r:.200} in {file!r:.200}, which is not a file there: fetch the folder again."
        )
        shards.setdefault(folder / file, set()).add(name)
    return shards


def _safetensors(folder: Path, name: str, source: str) -> Path:
    run, there = folder / ledger.NAME, (folder / name).is_file()
    require(there or not run.is_file(), f"{source!r} holds no model, but a ledger: give {str(run)!r}.")
    why = "other formats may hold code and are not read. Save the model again with save_pretrained()."
    require(there, f"{source!r} has no {name}: {why}")
    return folder / name


class _Adapter(StateDict):
    """A LoRA adapter's base plus its low-rank products, each computed when it is read."""

    def __init__(self, folder: Path, base: str | os.PathLike[str] | StateDict | None):
        self.source = str(folder)
        settings = _json(folder / "adapter_config.json")
        plain = {"peft_type": ("LORA",), "bias": ("none", None), "init_lora_weights": _PLAIN_STARTS}
        plain |= dict.fromkeys(("use_rslora", "fan_in_fan_out"), (True, False, None))
        for name, known in (plain | dict.fromkeys(_OTHER_KINDS, (False, None, [], {}))).items():
            self._require(settings.get(name) in known, f"{name} is {settings.get(name)!r}")
        self._base = self._open_base(settings.get("base_model_name_or_path"), base)
        self._file = _open(_safetensors(folder, "adapter_model.safetensors", self.source))
        factors: dict[str, dict[str, str]] = {}
        self._whole: dict[str, str] = {}
        for key in sorted(self._file.keys()):
            name = key.removeprefix("base_model.model.").replace(".base_layer.", ".")
            dtype = self._file.get_slice(key).get_dtype()
            self._require(dtype in _DTYPES, f"{key!r:.200} is stored as {dtype}")
            if found := _LORA.fullmatch(name):
                factors.setdefault(f"{found[1]}.weight", {})[found[2]] = key
            else:
                self._whole[name] = key
        self._base = untied(self._base, (*factors, *self._whole))
        self.shapes = dict(self._base.shapes)
        for name in (*factors, *self._whole):
            self._require(name in self.shapes, f"it changes {name!r}, which its base does not have")
        for name, key in self._whole.items():
            shape, wanted = tuple(self._file.get_slice(key).get_shape()), self.shapes[name]
            self._require(shape == wanted, f"{name!r} has the shape {shape}, but in its base {wanted}")
        self._transposed, self._until = bool(settings.get("fan_in_fan_out")), time.process_time() + _MATCHING
        self._factors = {name: self._product(name, keys, settings) for name, keys in factors.items()}
        self.dtypes = frozenset({"float32"})

    def _require(self, holds: Any, why: str) -> None:
        remedy = "merge it with PEFT (merge_and_unload(), then save_pretrained(), in float32) and pass that folder"
        require(holds, f"the adapter {self.source!r} cannot be read: {why}: {remedy}.")

    def _open_base(self, named: Any, base: str | os.PathLike[str] | StateDict | None) -> StateDict:
        if isinstance(base, StateDict):
            return base
        printable = named is None or isinstance(named, str) and named.isprintable()
        self._require(printable, f"base_model_name_or_path is {named!r:.200}")
        require(base or named, f"the adapter {self.source!r} does not name its base: pass it as base.")
        base = str(named if base is None else base)
        remedy = "pass that base, or correct base_model_name_or_path in its adapter_config.json"
        other = f"the adapter {self.source!r} was trained over {named!r:.300}, not over {base!r}: {remedy}."
        require(not named or _same_model(str(named), base), other)
        found = _folder(base, f", the base of the adapter {self.source!r},")
        second = (found / "adapter_config.json").is_file()
        require(not second, f"the base {base!r} is an adapter itself: merge it first (merge_and_unload()).")
        return _Files(found, base)

    def _product(self, name: str, keys: Mapping[str, str], settings: Mapping[str, Any]) -> tuple[Tensor, Tensor, float]:
        """Return the float32 matrices left and right and the scaling: the weight gains scaling * left @ right."""
        self._require(keys.keys() == {"A", "B"}, f"{name!r} has only one of its two matrices")
        a, b = (self._file.get_tensor(keys[side]).float() for side in "AB")
        self._require(len(self.shapes[name]) == a.ndim == b.ndim == 2, f"{name!r} is not a matrix")
        module = name.removesuffix(".weight")
        try:
            rank = whole_number("r", self._of_pattern(settings.get("rank_pattern"), module, settings["r"]))
            alpha = self._of_pattern(settings.get("alpha_pattern"), module, settings["lora_alpha"])
            positive("lora_alpha", alpha)
        except (*_NO_PATTERN, TimeoutError, KeyError, AttributeError, TypeError, ValueError) as error:
            self._require(False, f"one of its ranks or alphas is no pattern or no positive number ({error!r:.300})")
        left, right = (a.T, b.T) if self._transposed else (b, a)
        fits = a.shape[0] == b.shape[1] == rank and (left.shape[0], right.shape[1]) == self.shapes[name]
        matrices = f"{tuple(b.shape)} and {tuple(a.shape)} with rank {rank}"
        self._require(fits, f"{name!r} has matrices {matrices}, but its base has the shape {self.shapes[name]}")
        return left, right, alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)

    def _of_pattern(self, patterns: Any, module: str, default: Any) -> Any:
        """Return a module's rank or alpha: that of the first pattern that matches as in PEFT, or the default."""
        for pattern, value in ({} if patterns is None else patterns).items():
            left = max(0.001, self._until - time.process_time())  # some patterns would take for ever
            if _compiled(pattern).match(module, timeout=left):
                return value
        return default

    def part(self, name: str, start: int, stop: int) -> Tensor:
        if name in self._whole:
            entries = self._file.get_tensor(self._whole[name]).reshape(-1)[start:stop].to(torch.float32, copy=True)
        else:
            entries = self._base.part(name, start, stop)
        if name in self._factors and stop > start:
            left, right, scaling = self._factors[name]
            columns = self.shapes[name][1]
            first, last = start // columns, -(-stop // columns)  # the rows that hold the requested entries
            added = scaling * (left[first:last] @ right)
            entries += added.reshape(-1)[start - first * columns : stop - first * columns]
        return entries


@lru_cache(maxsize=1 << 14)
def _compiled(pattern: str) -> Any:
    """Return PEFT's pattern for the names that end in one; `re`, which PEFT uses, has no time limit, but its syntax."""
    return regex.compile(rf"(.*\.)?({re.compile(pattern).pattern})$")


def _same_model(named: str, base: str) -> bool:
    one, other = models.place(named), models.place(base)
    same = one == other or os.path.realpath(one) == os.path.realpath(other)
    # a folder may be a copy of the model that the adapter names by its Hub name or another path
    return same or (not (os.path.isdir(one) and os.path.isdir(other)) and Path(one).name == Path(other).name)


class _Ledger(StateDict):
    """The weights after the last step of an ES run, replayed when the first of them is read."""

    def __init__(self, source: str, base: str | os.PathLike[str] | None):
        self.source = source
        self.run: ledger.Ledger = ledger.read(source)
        remedy = "write the model or adapter of its last step (evoalign replay --out FOLDER), and pass that folder"
        require(self.run.settings["frozen"] is None, f"the run of {source} moves a part of its model only: {remedy}.")
        self._model = ledger.start_of(self.run, None if base is None else str(base))
        self.shapes = {name: tuple(s) for name, s in ledger.unpack_shapes(self.run.header["model"]["parameters"])}
        self.dtypes = frozenset({"float32"})

    @cached_property
    def _tensors(self) -> dict[str, Any]:
        return ledger.replay_by_name(self.run, self._model)

    def part(self, name: str, start: int, stop: int) -> Tensor:
        return torch.from_numpy(self._tensors[name].reshape(-1)[start:stop].copy())
