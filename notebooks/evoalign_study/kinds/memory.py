"""Measure the memory of a step, by component and against the formula of `footprint`, and the disk space of a run.

*memory*: a step runs on a CPU, in a separate process, on the shipped base or an enlarged model like it, with random
weights. It is the second step of a run, when moments and working copies exist. Nothing is learned, and there is no
seed: the values of the weights do not change the number of bytes, so an arm with a random reward has the same bytes.

Steps of ES run in a `LocalEngine`, with two members. transformers generates, except for "es_loop", the engine's
default, and "es_low_rank". For "es", the weights are held as on a GPU: a float32 master, and a member written into the
model in bfloat16 (`noise.device_weights`). GRPO is TRL's trainer with two micro-batches per step: `grpo.trainer` in
float32; for models that `grpo` does not take, TRL's GRPOTrainer itself, with settings of `grpo.config`: bfloat16
weights with a float32 master, an adapter, and Adam with 8-bit moments (torchao's, in eager mode).

*storage*: the bytes that a run leaves on disk: the model, the state that it resumes from after a kill, and its ledger.
The run has the arm's own steps, members and prompts, which determine the length of a ledger, and next to no validation.
It stores checkpoints as a run at scale full does; the last one is counted.
"""

import ctypes
import gc
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evoalign_lib import checks, footprint, grpo, ledger, noise, tiny
from evoalign_lib._adapters import attach
from evoalign_lib.engines.base import Options
from evoalign_lib.engines.local import LocalEngine, Prompts
from evoalign_lib.engines.memory import Shape, shape
from evoalign_lib.low_rank import Population
from evoalign_lib.precision import Weights, layout_of
from evoalign_lib.rewards import Rewards
from evoalign_lib.tasks import countdown
from evoalign_lib.update_rules import population
from evoalign_study import specs, trainers
from evoalign_study.kinds import train
from evoalign_study.memory_profile import NOISE, Allocations, resident
from evoalign_study.records import Record, Settings, Spec

_NAMES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "tie_word_embeddings",
)  # fmt: skip
SIZES: dict[str, dict[str, int]] = {
    "0.14M": {},
    "1M": dict(zip(_NAMES, (128, 512, 4, 4), strict=False)),
    "4M": dict(zip(_NAMES, (256, 1024, 4, 4, 2), strict=False)),
}
"""Model -> how its configuration differs from the base's; empty for the base itself."""
PUBLISHED: dict[str, dict[str, Any]] = {
    size: dict(zip(_NAMES, numbers, strict=True)) | {"model_type": "qwen2", "dtype": "bfloat16"}
    for size, numbers in {
        "0.5B": (896, 4864, 24, 14, 2, 151936, True),
        "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
        "7B": (3584, 18944, 28, 28, 4, 152064, False),
        "32B": (5120, 27648, 64, 40, 8, 152064, False),
        "72B": (8192, 29568, 80, 64, 8, 152064, False),
    }.items()
}
"""Configurations of Qwen2.5, from the config.json of Qwen/Qwen2.5-<size> on the Hub."""
PUBLISHED_WORK = footprint.Work(rows=1, prompt=150, new=1024, generated=64, members=30, rank=1, population=96)
"""Work of a step at full size: 64 completions of 1024 tokens decoded at once, one of them in a backward pass."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of <malloc.h>
SIGMA = 1e-2
MEMBERS, CANDIDATES, LOW_RANK_MEMBERS = 2, 8, 8


def memory_specs(methods: Iterable[str], sizes: Sequence[str], settings: Settings, scale: str) -> list[Spec]:
    """Return the specs that measure the memory of methods, one for each method and model.

    Args:
        methods: keys of `footprint.METHODS`.
        sizes: model sizes, keys of `SIZES`.
        settings: memory_rows (prompts of a member, completions of a micro-batch; each is measured) and
            max_completion_length.
        scale: scale of the notebook.

    Raises:
        ValueError: an unknown method or size, no memory_rows or one below 2, or a setting that is missing.
    """
    taken = specs.take(settings, ("memory_rows", "max_completion_length"), "a run of kind 'memory'")
    rows = list(taken.pop("memory_rows"))
    enough = rows and min(rows) >= 2
    checks.require(enough, f"memory_rows={rows}: a group has at least 2 completions. Pass numbers of at least 2.")
    begun, methods = specs.begin_tiny("memory", "A0", scale, {}) | taken | {"rows": rows}, list(methods)
    for method in methods:
        checks.choose("method", method, footprint.METHODS)
    for size in sizes:
        checks.choose("size", size, SIZES)
    return [begun | {"method": method, "size": size} for method in methods for size in sizes]


def run_memory(spec: Spec) -> Record:
    """Return the memory of a step with each number of rows, as measured and by the formula.

    The record has `d`, the number of parameters; `cells`, number of rows -> `work` (`footprint.Work`), `predicted` and
    `measured`, component -> bytes at the peak, and `resident`, the bytes by which the process, at its own peak, exceeds
    its size before the model was made (without pages that were never written, such as most of a tile of logits where
    the vocabulary is small); and `published`, what the formula gives for models on a GPU (see `published`).

    It permanently changes how this process allocates. `resident` is correct only in a fresh process, as in a sweep
    (`kinds.ALONE`): memory kept from earlier runs would lower it.
    """

    torch.set_num_threads(1)
    resident("VmRSS")  # raises a clear error if the system does not report it
    # take large tensors from the system and return them to it, whatever the process allocated before
    for option in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
        ctypes.CDLL(None).mallopt(option, 65536)
    method, new = spec["method"], spec["max_completion_length"]
    _measure(method, "0.14M", spec["rows"][0], new)  # warm-up: one-off loading and compiling is not part of a step
    cells = {str(rows): _measure(method, spec["size"], rows, new) for rows in spec["rows"]}
    return {"d": shape(_configuration(spec["size"])).d, "cells": cells, "published": published(method)}


def published(method: str) -> dict[str, dict[str, Any]]:
    """Return, for each model of `PUBLISHED`, its parameters `d`, and its `bytes` by component, all on one GPU."""
    shapes = {size: shape(config) for size, config in PUBLISHED.items()}
    work = {"work": PUBLISHED_WORK, "gpus": True}
    return {size: {"d": s.d, "bytes": footprint.bytes_of(method, s, **work)} for size, s in shapes.items()}


# ---- a step


def _measure(method: str, size: str, rows: int, new: int) -> dict[str, Any]:
    """Run two steps, and measure the second."""

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # free memory that the process still holds would be reused unnoticed
    before = resident("VmRSS")
    shaped = shape(_configuration(size))
    seen = Allocations(_named(method, shaped))
    step = _gradient_steps if footprint.METHODS[method].gradients else _es_steps
    with tempfile.TemporaryDirectory() as folder:
        work = step(method, size, rows, new, seen, Path(folder))
    predicted = footprint.bytes_of(method, shaped, work)
    measured = {name: seen.at_peak[name] for name in footprint.COMPONENTS if seen.at_peak.get(name)}
    grown = resident("VmHWM") - before
    return {"work": asdict(work), "predicted": predicted, "measured": measured, "resident": grown}


def _begin(seen: Any) -> None:
    """Reset all peaks, including that of the resident memory."""
    gc.collect()  # numba's first call of a kernel leaves its arguments in a reference cycle
    Path("/proc/self/clear_refs").write_text("5")
    seen.begin()


def _named(method: str, model: Shape) -> Any:
    """Return a function that recognises, by shape, logits and the decoding loop's caches and joined matrices."""
    loop = method in ("es_loop", "es_low_rank")

    def component(operation: str, tensor: Any) -> str | None:
        if loop and tensor.ndim == 5:
            return "KV cache"
        if loop and operation.startswith("aten.cat") and tensor.ndim == 2 and tensor.shape[1] == model.hidden:
            return "working copy"
        return "logits" if tensor.ndim > 1 and tensor.shape[-1] in (model.vocabulary, footprint.TILE[1]) else None

    return component


def build(size: str, dtype: str = "float32") -> tuple[Any, Any]:
    """Build a model of `SIZES`; return it with the base's tokenizer."""
    from transformers import AutoModelForCausalLM

    shipped, tokenizer = tiny.load("A0")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(_configuration(size)).eval()
    if not SIZES[size]:
        model.load_state_dict(shipped.state_dict())
    return model.to(getattr(torch, dtype)), tokenizer


def _configuration(size: str) -> Any:
    from transformers import AutoConfig

    shipped, changed = AutoConfig.from_pretrained(tiny.bases_folder() / "A0"), SIZES[size]
    layers = changed.get("num_hidden_layers", shipped.num_hidden_layers)
    return AutoConfig.for_model(**shipped.to_dict() | changed | {"layer_types": ["full_attention"] * layers})


# ---- ES

_QUIET = {"report_to": "none", "disable_tqdm": True}
_TWO_STEPS = {"seed": 0, "steps": 2, "prompts_per_step": 2, "learning_rate": 1e-5, "use_cpu": True} | _QUIET
_TWO_STEPS |= {"save_strategy": "no", "logging_strategy": "no"}


def _es_steps(method: str, size: str, rows: int, new: int, seen: Any, folder: Path) -> footprint.Work:
    """Take two steps of an ES method, and measure the second."""

    model, tokenizer = build(size, footprint.METHODS[method].dtype)
    data = countdown.dataset(tiny.problems("train", rows), tokenizer)
    prompts = Prompts(data, tokenizer)
    work = footprint.Work(rows, prompts.width, new, rows, prefix=len(prompts.prefix))
    with seen:
        if method == "essa":
            return replace(_essa_steps(model, tokenizer, data, new, seen, folder), prompt=prompts.width)
        engine = _engine(method, model, tokenizer, prompts, new, seen)
        weights, root = engine.weights, noise.run_key("memory", 0)
        many = LOW_RANK_MEMBERS if method == "es_low_rank" else MEMBERS
        for step in range(2):
            members = population(root, step, many)
            engine.evaluate(members, SIGMA, "train", np.arange(rows))
            keys = np.array([member.key for member in members], np.uint64)
            engine.update(keys, np.full(many, SIGMA / many, np.float32))
            if step == 0:
                if getattr(weights, "working", None) is not None:
                    seen.hold("working copy", weights.working)
                if method == "es_low_rank":
                    _hold_factors(engine, seen)
                _begin(seen)
    return replace(work, members=many, generated=many * rows) if method == "es_low_rank" else work


def _engine(method: str, model: Any, tokenizer: Any, prompts: Any, new: int, seen: Any) -> Any:
    """Return the engine of a method, with the tensors that it keeps named for `seen`."""
    from evoalign_lib.essa import lora_config

    settings: dict[str, Any] = {"max_completion_length": new}
    if method not in ("es_loop", "es_low_rank"):
        settings |= {"decoder": "generate", "options": Options(generation_kwargs={"min_new_tokens": new})}
    if method == "es":
        settings["weights"] = _under_noise(model, seen)
    elif method in ("es_kahan", "es_inplace"):
        settings["precision"] = method.removeprefix("es_")
    elif method == "es_low_rank":
        settings |= {"rank": 1, "chunk_rows": LOW_RANK_MEMBERS * len(prompts)}  # all members in one batch
    elif method == "es_lora":
        model = attach(model, lora_config(footprint.ADAPTER_RANK), 0)
        seen.name("adapter", [p for p in model.parameters() if p.requires_grad])
    engine = LocalEngine(model, tokenizer, Rewards(countdown.reward), {"train": prompts}, **settings)
    seen.follow(model)
    if method in ("es_kahan", "es_inplace"):
        for name, plane in zip(("weights", "compensation"), engine.weights.planes, strict=False):
            seen.name(name, [plane])
    elif method != "es":
        seen.name("weights", [p for p in model.parameters() if method != "es_lora" or not p.requires_grad])
        seen.hold("master", engine.weights.planes[0])
    return engine


def _under_noise(model: Any, seen: Any) -> Any:
    """Return weights held as on a GPU: a float32 master, and the model that a member is written into."""

    class DeviceMaster(Weights):
        precision, drifts = "master", False

        def __init__(self):
            layout = layout_of(model)
            flat, parameters = torch.zeros(layout.size, dtype=model.dtype), dict(model.named_parameters())
            for name, view in layout.views(flat).items():
                view.copy_(parameters[name].detach())
                parameters[name].data = view
            pieces = [(view, name) for name, view in layout.views(flat).items()]
            self.device, self.model_weights = noise.device_weights(pieces), flat
            super().__init__(layout, "gaussian", 0, (self.device.master.numpy(),))

        @contextmanager
        def member(self, key: int, sigma: float, sign: int = 1) -> Iterator[Any]:
            self.device.perturb(key, sigma, sign)
            yield self.model_weights

        def update(self, keys: Any, coefficients: Any) -> None:
            self.device.update(keys, coefficients)

    weights = DeviceMaster()
    seen.name("working copy", [weights.model_weights])
    seen.name("master", [weights.device.master])
    return weights


def _hold_factors(engine: Any, seen: Any) -> None:
    """Count the factors of low-rank members from when the engine's decoder gets them."""
    make = engine._decoder

    def decoder(weights: Any, name: str, members: Population) -> Any:
        for array in (*members.vectors.values(), *(each for pair in members.matrices.values() for each in pair)):
            seen.hold(NOISE, array)
        return make(weights, name, members)

    engine._decoder = decoder


def _essa_steps(model: Any, tokenizer: Any, data: list, new: int, seen: Any, folder: Path) -> footprint.Work:
    """Take two steps of ESSA, a search over an adapter with random matrices, and measure the second."""

    from evoalign_lib.essa import ESSAConfig, ESSATrainer, lora_config

    config = lora_config(footprint.ADAPTER_RANK)
    config.init_lora_weights = False
    model = attach(model, config, 0)
    seen.name("adapter", [p for p in model.parameters() if p.requires_grad])
    seen.name("weights", [p for p in model.parameters() if not p.requires_grad])
    sizes = {"population_size": CANDIDATES, "prompts_per_step": None, "workers": 1, "max_completion_length": new}
    args = ESSAConfig(output_dir=str(folder), generation_kwargs={"min_new_tokens": new}, **sizes, **_QUIET)
    trainer = ESSATrainer(model, countdown.reward, args, data, processing_class=tokenizer)
    engine, weights = trainer.engine, trainer.engine.weights
    seen.follow(model)
    for step in range(2):
        members = trainer.ask(step)
        engine.evaluate(members, 0.0, "train", np.arange(len(data)))
        trainer.tell(members, np.arange(CANDIDATES, dtype=np.float64))
        if step == 0:
            seen.hold("master", weights.flat)
            seen.hold("working copy", weights.working)
            for array in _arrays(weights, {id(weights.flat), id(weights.working)}):
                seen.hold("search", array)
            _begin(seen)
    return footprint.Work(len(data), 0, new, len(data), population=CANDIDATES)


def _arrays(thing: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the NumPy arrays that an object holds, each buffer once."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, np.ndarray):
        yield from _arrays(thing.base, seen) if isinstance(thing.base, np.ndarray) else [thing]
    elif not isinstance(thing, type):
        parts = getattr(thing, "__dict__", thing)
        parts = list(parts.values()) if isinstance(parts, Mapping) else parts
        for part in parts if isinstance(parts, list | tuple) else ():
            yield from _arrays(part, seen)


# ---- GRPO


def _gradient_steps(method: str, size: str, rows: int, new: int, seen: Any, folder: Path) -> footprint.Work:
    """Take two steps of TRL's trainer with two micro-batches each, and measure the second."""
    from transformers import TrainerCallback

    class Second(TrainerCallback):
        def on_step_end(self, args, state, control, optimizer=None, **others):
            if state.global_step == 1:
                inner = getattr(optimizer, "optimizer", optimizer)
                seen.name("master", getattr(inner, "masters", []))
                seen.name("moments", _plain(inner.state))
                _begin(seen)

    model, tokenizer = build(size, footprint.METHODS[method].dtype)
    data = countdown.dataset(tiny.problems("train", 4), tokenizer)
    prompt = Prompts(data, tokenizer).width
    beta = 0.04 if method == "grpo_reference" else 0.0
    sizes = {"num_generations": rows, "micro_batch": rows, "max_completion_length": new}
    args = grpo.config("grpo", output_dir=str(folder), beta=beta, **sizes, **_TWO_STEPS)
    lengths: list[tuple[int, int]] = []

    def noted(module: Any, given: Any, named: Mapping[str, Any]) -> None:
        if torch.is_grad_enabled():
            lengths.append(tuple(named["input_ids"].shape))

    with seen, torch.compiler.set_stance("force_eager"):
        if method == "grpo_reference":  # TRL loads the reference by name
            model.save_pretrained(folder / "model")
            model = str(folder / "model")
        trainer = _trainer(method, model, tokenizer, args, data, Second())
        trained = trainer.model
        moved = [p for p in trained.parameters() if p.requires_grad]
        if method == "grpo_lora":
            seen.name("adapter", moved)
        seen.name("weights", [p for p in trained.parameters() if method != "grpo_lora" or not p.requires_grad])
        if method == "grpo_reference":
            seen.name("reference model", trainer.ref_model.parameters())
        seen.follow(trained)
        trained.register_forward_pre_hook(noted, with_kwargs=True)
        trainer.train()
    most, length = max(lengths[-2:], key=lambda pair: pair[0] * pair[1])
    return footprint.Work(most, prompt, length - prompt, 2 * rows)


def _trainer(method: str, model: Any, tokenizer: Any, args: Any, data: list, callback: Any) -> Any:

    if method in ("grpo", "grpo_reference"):
        return grpo.trainer(model, countdown.reward, args, data, tokenizer, [callback])[0]
    from datasets import Dataset
    from trl import GRPOTrainer

    from evoalign_lib.essa import lora_config

    given: dict[str, Any] = {"args": args, "train_dataset": Dataset.from_list(data), "processing_class": tokenizer}
    if method == "grpo_lora":
        given["peft_config"] = lora_config(footprint.ADAPTER_RANK)
    elif method == "grpo_mixed":
        given["optimizers"] = (_master_adamw(model), None)
    else:
        try:
            from torchao.optim import AdamW8bit
        except ImportError as error:
            raise ImportError("8-bit Adam needs torchao: pip install 'evoalign[analysis]'.") from error
        given["optimizers"] = (AdamW8bit(model.parameters(), lr=1e-5, weight_decay=0.0), None)
    return GRPOTrainer(model=model, reward_funcs=countdown.reward, callbacks=[callback], **given)


def _master_adamw(model: Any) -> Any:
    """Return AdamW that updates a float32 master of bfloat16 weights, with one float32 gradient at a time."""

    class MasterAdamW(torch.optim.AdamW):
        def __init__(self):
            self.parameters = list(model.parameters())
            self.masters = [p.detach().float().requires_grad_() for p in self.parameters]
            groups = [{"params": [master]} for master in self.masters]
            super().__init__(groups, lr=1e-5, weight_decay=0.0, foreach=False)

        @torch.no_grad()
        def step(self, closure=None):
            groups = self.param_groups
            for group, parameter, master in zip(groups, self.parameters, self.masters, strict=True):
                self.param_groups = [group]  # one parameter at a time, so that only one gradient is float32
                master.grad = parameter.grad.float()
                super().step()
                master.grad = None
                parameter.copy_(master)
            self.param_groups = groups

        def zero_grad(self, set_to_none=True):
            for parameter in self.parameters:
                parameter.grad = None

    return MasterAdamW()


def _plain(state: Mapping[Any, Mapping[str, Any]]) -> list[Any]:
    """Return the tensors of an optimiser's state; an 8-bit tensor is replaced by its parts."""
    parts = []
    for tensor in (value for values in state.values() for value in values.values() if hasattr(value, "shape")):
        names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else []
        parts += [getattr(tensor, name) for name in names] or [tensor]
    return parts


# ---- a run on disk

_FEW = {"validation_problems": 2, "test_problems": 0, "curve_points": 3}
_NAMED = {
    "model.safetensors": "model",
    "adapter_model.safetensors": "model",
    "master.safetensors": "master",
    "optimizer.pt": "moments",
}
"""Name of a file -> what it holds; every other file of a checkpoint is small ("other")."""


def storage_specs(arms: Mapping[str, Mapping[str, Any]], base: str, scale: str) -> list[Spec]:
    """Return the specs that measure what a run of each arm leaves on disk.

    Args:
        arms: arm -> settings, as for `train_specs`; validation, test and curve are replaced by smaller ones.
        base: a shipped base of Countdown.
        scale: scale of the notebook.

    Raises:
        ValueError: another base, or whatever `train_specs` refuses.
    """
    wanted = []
    for arm, settings in arms.items():
        specs.begin_tiny("storage", base, scale, settings)  # refuses other bases
        [spec] = train.train_specs(arm, [base], [0], {**settings, **_FEW}, scale)
        wanted.append(spec | {"kind": "storage"})
    return wanted


def run_storage(spec: Spec) -> Record:
    """Train one run, and return the bytes that it stores.

    The record has `d`, the number of parameters in the model's file (those of the adapter, if one is trained); `bytes`
    of the last checkpoint: "model", "master", "moments", "other", and the "ledger" beside it. A run with a ledger also
    has `packed`, the ledger's bytes with gzip, and `start`, the bytes of the adapter that it begins from, without which
    it cannot be replayed (0: none).
    """
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        with trainers.train(spec | {"kind": "train"}, folder, lasting=True):
            pass
        checkpoint = folder / f"checkpoint-{spec['steps']}"
        [model] = (file for file in checkpoint.glob("*.safetensors") if _NAMED[file.name] == "model")
        record: Record = {"d": sum(tensor.numel() for tensor in load_file(model).values())}
        record["bytes"] = dict(_bytes(checkpoint))
        if (kept := folder / ledger.NAME).is_file():
            record["bytes"]["ledger"] = kept.stat().st_size
            record["packed"] = len(ledger.pack(kept))
            record["start"] = _bytes(folder / "start")["model"]
        return record


def _bytes(folder: Path) -> Counter[str]:
    """Return the bytes of a folder's files, by what they hold."""
    sizes: Counter[str] = Counter()
    for file in folder.glob("*"):
        sizes[_NAMED.get(file.name, "other")] += file.stat().st_size
    return sizes


def sent(spec: Spec, d: int) -> int | None:
    """Return the bytes that a step sends to each process that generates but does not train.

    An ES update is a key (8 bytes) and a coefficient (4) for each member, with which every process moves its own
    weights (`engines.ray`); a gradient step sends what it changed, in bfloat16. None for ESSA, whose candidates only
    the local engine evaluates.
    """
    if "leading_share" in spec:
        return None
    return 12 * spec["population_size"] if "population_size" in spec else 2 * d
