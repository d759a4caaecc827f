"""Generate for a population with vLLM: members are written where vLLM holds its weights, and no weights travel.

Each vLLM worker holds a float32 master of its share of the model beside the working copy that it decodes with. From a
member's key and sigma it writes the member in place, and from keys and coefficients it moves the master, both by the
noise law (`evoalign_lib.noise`). The process that trains moves its own copy of the weights in the same way (`Engine`),
by other code, and compares digests of every tensor: when vLLM starts, and whenever the ledger notes one.

Over an adapter (`AdapterEngine`) nothing is written into vLLM's weights: members are LoRA adapters of one batch, which
this process makes and vLLM's workers take from memory.

Differences from generating with plain vLLM:

1. Every setting of the decoding is stated; the model's own generation_config is not read. End tokens are those of
   `engines.local`, prompts are token ids, and vLLM has no tokenizer.
2. The prefix cache is emptied after every change of the weights. vLLM would silently go on with keys and values that
   the old weights made.
3. On a CPU vLLM's packed copies of the weights are turned off (`_vllm_worker.keep_weights_plain`).
4. vLLM runs in this process unless there are tensor-parallel ranks, because across processes greedy decoding was seen
   to give other log-probabilities from call to call. The random state of the caller is put back.
5. Ctrl-C ends vLLM; the next call starts it again with the weights of the run.

Greedy tokens in float32 on a CPU are those of transformers (tested). In bfloat16 on a GPU near-ties may go another way
in another batch shape: the plan, which is part of the record, then has `exact` false. The ledger's replay is exact in
any case, because it needs only the rewards.
"""

from __future__ import annotations

import gc
import hashlib
import os
import random
import struct
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from evoalign_lib import checks
from evoalign_lib._adapters import base_of, lora_layers
from evoalign_lib.engines import processes
from evoalign_lib.engines._vllm_worker import DRIVER, NotMapped, Segment, prepare
from evoalign_lib.engines.base import PLAIN, Engine, Evaluation, Options, Prompts, Scorer
from evoalign_lib.engines.memory import MEMBERS_A_BATCH, held_parameters, padded_rank, room_beside_master
from evoalign_lib.engines.proof import WrongWeights, compare, prove
from evoalign_lib.rewards import Rewards
from evoalign_lib.update_rules import Member

EXTENSION = "evoalign_lib.engines._vllm_extension.WorkerExtension"
MOST_MEMBERS = 1 << 20
"""members of a population, at most; each takes 12 bytes in a buffer of every worker"""
_OF_ADAPTERS = ("enable_lora", "max_lora_rank", "lora_target_modules")
Layers = Sequence[tuple[str, int, bytes, bytes]]
"""An adapter: name of a layer, rank, and float32 A (rank, inputs) and scaling * B (outputs, rank), row by row"""

# Set before vLLM is imported, which reads them once. What the user has set stays.
_ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
_ON_CPU = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}


def import_vllm(in_process: bool = True) -> Any:
    """Import vLLM with the settings that it reads from the environment once.

    Args:
        in_process: let engines work in this process instead of one of their own.

    Raises:
        ImportError: vLLM is not installed; the message says how.
    """
    chosen = dict(_ENVIRONMENT)
    if in_process:
        chosen["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    else:  # this process may have touched the GPU, which a forked one could not use
        chosen["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if not torch.cuda.is_available():
        chosen |= _ON_CPU
    for name, value in chosen.items():
        os.environ.setdefault(name, value)
    try:
        import vllm
    except ImportError as error:
        raise ImportError(
            "engine='vllm' needs vLLM 0.31: pip install -e '.[gpu]' on a machine with NVIDIA GPUs, or take "
            "engine='local'."
        ) from error
    return vllm


def prepare_process() -> None:
    """Prepare this process for a vLLM engine that other code makes, such as TRL's trainers.

    Raises:
        ImportError: vLLM is not installed; the message says how.
    """
    import_vllm()
    import vllm.platforms  # noqa: F401, what `prepare` asks

    prepare()


class Generator:
    """A vLLM engine with a master in each worker: perturb, generate, update.

    Args:
        folder: the model's folder or its name on the Hub; no code from there is run.
        dtype: of the working copy.
        eos_ids: token ids that end a completion.
        max_model_len: tokens of a prompt and its completion at most.
        parameters: held by one rank (`memory.held_parameters`): on a GPU room is left for their master, 4 bytes each,
            which vLLM does not know about.
        distribution: of the noise.
        tensor_parallel: ranks that share the model.
        settings: further arguments of `vllm.LLM`, such as gpu_memory_utilization or max_num_seqs.
        master: whether workers hold a master; without one there is only `generate`.
        anchor_decay: of `Engine`; above 0 each worker keeps its starting weights, too, in dtype, and room is left for
            them.
        rank: of `Engine`.
        adapter: of those that it decodes with (`put_adapters`) the highest rank, one of `memory.LORA_RANKS`, and the
            last parts of the names of their layers; None: it decodes with none.

    Raises:
        ImportError: vLLM is not installed; the message says how.
        NotMapped: noise would not reach a tensor; the message names it.
        RuntimeError: this process has a vLLM engine already.
    """

    _alive: weakref.ref[Generator] | None = None
    llm: Any = None

    def __init__(
        self,
        folder: str,
        dtype: torch.dtype,
        eos_ids: Sequence[int],
        max_model_len: int,
        parameters: float,
        distribution: str = "gaussian",
        tensor_parallel: int = 1,
        settings: Mapping[str, Any] | None = None,
        master: bool = True,
        anchor_decay: float = 0.0,
        rank: int = 0,
        adapter: tuple[int, list[str]] | None = None,
    ):
        vllm = import_vllm(in_process=tensor_parallel == 1)
        from vllm.platforms import current_platform

        prepare()
        self.device = current_platform.device_type
        self.eos_ids, self.tensor_parallel = list(eos_ids), tensor_parallel
        stated = {
            "model": folder,
            "dtype": str(dtype).removeprefix("torch."),
            "max_model_len": max_model_len,
            "tensor_parallel_size": tensor_parallel,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "trust_remote_code": False,
            "load_format": "safetensors",
            "enable_prefix_caching": True,
            "worker_extension_cls": EXTENSION,
            "seed": 0,
        }
        if adapter is not None:
            stated |= dict(zip(_OF_ADAPTERS, (True, *adapter), strict=True))
        if self.device == "cpu":  # a prompt computed in parts would need a random generator that can go back
            stated["enable_chunked_prefill"] = False
        if tensor_parallel == 1:
            gc.collect()
            if Generator._alive is not None and (other := Generator._alive()) is not None and other.llm is not None:
                raise RuntimeError(
                    "a vLLM engine works in this process already, and what ends one ends both: call close() of the "
                    "first engine (trainer.engine.close()), or use another process."
                )
            Generator._alive = weakref.ref(self)
        given = dict(settings or {})
        if taken := sorted(stated.keys() & given.keys()):
            raise ValueError(f"{taken[0]!r} is set by the engine: remove it from engine_kwargs.")
        if self.device != "cpu":
            given.setdefault("max_num_seqs", 256)  # as plans have it; vLLM's own number depends on the device
        if self.device != "cpu" and "gpu_memory_utilization" not in given:
            total = current_platform.get_device_total_memory()
            given["gpu_memory_utilization"] = room_beside_master(total, parameters, dtype.itemsize * bool(anchor_decay))
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002, vLLM seeds them anew
        try:
            if tensor_parallel > 1:
                os.environ[DRIVER] = str(os.getpid())
            self.llm = vllm.LLM(**stated, **given)
        finally:
            os.environ.pop(DRIVER, None)
            random.setstate(states[0])
            np.random.set_state(states[1])  # noqa: NPY002
            torch.set_rng_state(states[2])
        if not master:
            return
        try:
            opened = self.llm.collective_rpc("evoalign_open", args=(distribution, MOST_MEMBERS, anchor_decay, rank))
            for refusal in opened:
                if isinstance(refusal, str):
                    raise NotMapped(refusal)
        except BaseException:
            self.close()
            raise
        self.segments = [[Segment(*segment) for segment in rank] for rank in opened]
        """by rank: where its tensors come from"""

    def perturb(self, member: Member, sigma: float) -> None:
        """Write a member's weights."""
        self.llm.collective_rpc("evoalign_perturb", args=(int(member.key), float(sigma), int(member.sign)))
        self._forget()

    def restore(self) -> None:
        """Write the weights themselves."""
        self.llm.collective_rpc("evoalign_restore")
        self._forget()

    def update(self, keys: np.ndarray, coefficients: np.ndarray) -> None:
        """Move the masters, as `Weights.update`; the working copies follow with the next `perturb` or `restore`."""
        self.llm.collective_rpc("evoalign_update", args=([int(k) for k in keys], [float(c) for c in coefficients]))

    def put_adapters(self, adapters: Mapping[int, Layers]) -> None:
        """Give vLLM adapters, number -> layers, each in the place of the one that had its number before.

        Raises:
            NotMapped: a layer that vLLM gives no adapter.
        """
        for number, layers in adapters.items():
            for refusal in self.llm.collective_rpc("evoalign_put_adapter", args=(number, layers)):
                if refusal:
                    raise NotMapped(refusal)
        self._forget()

    def base_digests(self) -> tuple[list[list[Segment]], list[list[str]]]:
        """Return by rank where the tensors that vLLM decodes with come from, and the SHA-256 of each.

        Raises:
            NotMapped: a tensor that has no place in the segment map.
        """
        segments, digests = [], []
        for found in self.llm.collective_rpc("evoalign_base_digests"):
            if isinstance(found, str):
                raise NotMapped(found)
            segments.append([Segment(*segment) for segment, _ in found])
            digests.append([digest for _, digest in found])
        return segments, digests

    def digests(self) -> list[list[str]]:
        """Return by rank the SHA-256 of the float32 master of each of its segments."""
        return self.llm.collective_rpc("evoalign_digests")

    def generate(self, ids: Sequence[Sequence[int]], max_new_tokens: int, *how: Any, **named: Any) -> list:
        """Decode prompts with the weights that were written last.

        Args:
            ids: token ids of each prompt, without padding.
            max_new_tokens: new tokens per completion, at most.
            *how, **named: seeds, temperature, options and adapters of `decode`.

        Returns:
            Token ids of each completion, with the end token where there is one.
        """
        return decode(self.llm, self.eos_ids, ids, max_new_tokens, *how, **named)

    def close(self) -> None:
        """End vLLM and its worker processes, and leave the GPU."""
        _end(self)

    def _forget(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(
                "vLLM did not empty its prefix cache and would go on with keys and values of other weights: requests "
                "are still running. Call the engine from one thread only."
            )


STATED = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}
STATED |= {"frequency_penalty": 0.0, "watermarking": False}
"""Settings of SamplingParams that change nothing, stated so that no default of vLLM's does."""
LEAST_TEMPERATURE = 0.01
"""Below it vLLM logs a warning and takes this one (`_MAX_TEMP` in its sampling_params.py)."""


def _check_temperature(temperature: float) -> None:
    if temperature < LEAST_TEMPERATURE:
        raise ValueError(
            f"temperature={temperature}: vLLM would sample at {LEAST_TEMPERATURE}, its least. Set that or more, decode "
            "greedily, or take another engine."
        )


def decode(
    llm: Any,
    eos_ids: Sequence[int],
    ids: Sequence[Sequence[int]],
    max_new_tokens: int,
    seeds: Sequence[int] | None = None,
    temperature: float = 1.0,
    options: Options = PLAIN,
    adapters: Sequence[int] | None = None,
) -> list[list[int]]:
    """Decode prompts with a vLLM engine, every setting stated.

    Args:
        llm: the engine.
        eos_ids: token ids that end a completion.
        ids: token ids of each prompt, without padding.
        max_new_tokens: new tokens per completion, at most.
        seeds: None for greedy decoding; else one seed per row, which is sampled.
        temperature: of the samples, above 0.
        options: top_k and top_p of the samples, and generation_kwargs. Stop strings are for the caller.
        adapters: the number of each row's adapter (`Generator.put_adapters`); None: no row has one.

    Returns:
        Token ids of each completion, with the end token where there is one.

    Raises:
        ValueError: a temperature that vLLM would replace.
    """
    from vllm import SamplingParams

    if seeds is not None:
        _check_temperature(temperature)
    # stop_token_ids alone say what ends a completion
    common = {"max_tokens": max_new_tokens, "stop_token_ids": list(eos_ids), "ignore_eos": True, "detokenize": False}
    common |= {**STATED, **(options.generation_kwargs or {})}
    if seeds is None:
        how = [SamplingParams(temperature=0.0, **common)] * len(ids)
    else:
        common |= {"top_p": options.top_p, "top_k": options.top_k}
        how = [SamplingParams(temperature=temperature, seed=seed, **common) for seed in seeds]
    prompts = [{"prompt_token_ids": list(map(int, row))} for row in ids]
    requests = None
    if adapters is not None:
        from vllm.lora.request import LoRARequest

        # vLLM has them already; it would look for one that it has lost in a folder that is not there
        requests = [
            LoRARequest(f"adapter {n}", n, "nowhere: evoalign_put_adapter put it into memory") for n in adapters
        ]
    found = llm.generate(prompts, how, lora_request=requests, use_tqdm=False)
    return [list(done.outputs[0].token_ids) for done in found]


def _end(holder: Any) -> None:
    """End the vLLM engine in an object's `llm`, and free what its worker held."""
    llm, holder.llm = holder.llm, None
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()  # vLLM's own collection ran while its worker was still referenced
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _drawn(indices: np.ndarray, sampling: tuple[int, int] | None) -> tuple[np.ndarray, list[int] | None]:
    """Return the rows of a member's prompts, each once a sample, and their seeds, None for greedy."""
    if sampling is None:
        return indices, None
    key, samples = sampling
    rows = np.repeat(indices, samples)
    return rows, [sample_seed(key, int(row), i % samples) for i, row in enumerate(rows)]


def _plan(dtype: torch.dtype, tensor_parallel: int, exact: bool) -> dict[str, Any]:
    """Return the batch plan of an engine that decodes with vLLM."""
    return {
        "decoder": "vllm",
        "vllm": import_vllm(tensor_parallel == 1).__version__,
        "dtype": str(dtype).removeprefix("torch."),
        "tensor_parallel": tensor_parallel,
        "exact": exact,
    }


class Decoding(Scorer):
    """Evaluates members and generates with a `generator`, in whichever process."""

    generator: Generator
    _noise: tuple[Member, float] | None = None

    def evaluate_member(self, index, member, sigma, name, indices, trainer_state=None, sampling=None) -> Evaluation:
        """Evaluate one member; index: its own, for errors; the rest as for `Engine.evaluate`."""
        started = time.process_time()
        rows, seeds = _drawn(np.asarray(indices), sampling)
        self.generator.perturb(member, sigma)
        completions = self._decode(name, rows, seeds, self.options.temperature)
        return self.scored(index, name, rows, completions, trainer_state, started)

    def generate_rows(self, name, indices, seed=0, draw=None, temperature=1.0) -> list:
        """Return completions of the weights themselves, (text, ids) each.

        Args:
            name: which prompts.
            indices: rows of them.
            seed: of the samples.
            draw: which sample of each prompt; None: greedy decoding.
            temperature: of the samples, above 0.
        """
        seeds = None if draw is None else [sample_seed(seed, int(row), draw) for row in indices]
        self._write_weights()
        return self._decode(name, indices, seeds, temperature)

    @contextmanager
    def perturbed(self, key: int, sigma: float) -> Iterator[None]:
        """Do what `Engine.perturbed` does, where the generator is."""
        self._noise = Member(key), sigma
        try:
            yield
        finally:
            self._noise = None

    def _write_weights(self) -> None:
        if self._noise is None:
            self.generator.restore()
        else:
            self.generator.perturb(*self._noise)

    def _decode(
        self, name: str, rows: np.ndarray, seeds: Sequence[int] | None, temperature: float = 1.0
    ) -> list[tuple[str, list[int]]]:
        prompts = self.prompts[name]
        ids = [prompts.ids[row, prompts.width - prompts.lengths[row] :].tolist() for row in rows]
        return self.completions(self.until_stop(self._tokens(ids, seeds, temperature)))

    def _tokens(self, ids: Sequence[Sequence[int]], seeds: Sequence[int] | None, temperature: float) -> list[list[int]]:
        return self.generator.generate(ids, self.max_completion_length, seeds, temperature, self.options)


class VLLMEngine(Decoding, Engine):
    """A population on a vLLM engine of this process.

    Args:
        model, tokenizer, rewards, prompts: of `Engine`; the model has the dtype of vLLM's working copy.
        folder: where the model was loaded from, a folder or a name on the Hub; None: it is written to a temporary one.
        tensor_parallel: GPUs that share the model.
        settings: further arguments of `vllm.LLM`.
        anchor_decay: of `Engine`.
        **common: max_completion_length and further arguments of `Engine`, but for threads and precision. vLLM decodes
            on after a stop string, and the rest is cut off.

    The first call that generates starts vLLM.
    """

    def __init__(
        self,
        model,
        tokenizer,
        rewards: Rewards | None,
        prompts: Mapping[str, Prompts],
        *,
        folder: str | None = None,
        tensor_parallel: int = 1,
        settings: Mapping[str, Any] | None = None,
        anchor_decay: float = 0.0,
        **common: Any,
    ):
        _check_temperature(common.get("options", PLAIN).temperature)
        threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        common |= {"threads": threads, "anchor_decay": anchor_decay}
        super().__init__(model, tokenizer, rewards, prompts, **common)
        self.folder, self.anchor_decay = folder, anchor_decay
        self._made = None
        if folder is None:  # now: the object's weights move with the run
            self._made = tempfile.TemporaryDirectory(prefix="evoalign-")
            self.folder = self._made.name
            self._save_model(self.folder)
        self.tensor_parallel, self.settings = tensor_parallel, dict(settings or {})
        self._generator: Generator | None = None
        self._updates: list[tuple[np.ndarray, np.ndarray]] = []  # all since the starting weights

    @property
    def plan(self):
        exact = self.model.dtype == torch.float32 and not torch.cuda.is_available()
        return _plan(self.model.dtype, self.tensor_parallel, exact)

    @property
    def generator(self) -> Generator:
        """vLLM, started when it is first needed and proved to hold the weights of the run.

        Raises:
            WrongWeights: it does not; the message names the parameter.
        """
        if self._generator is None:
            longest = max(p.width for p in self.prompts.values()) + self.max_completion_length
            self._generator = self._start(longest)
        return self._generator

    def _start(self, longest: int) -> Generator:
        held = held_parameters(self.model.config, self.layout.d, self.tensor_parallel)
        common = self.model.dtype, self.eos_ids, longest, held, self.weights.distribution
        law = {"anchor_decay": self.anchor_decay, "rank": self.weights.rank}
        generator = Generator(self.folder, *common, self.tensor_parallel, self.settings, **law)
        try:
            for update in self._updates:
                generator.update(*update)
            prove(self.layout, self.master, generator.segments, generator.digests())
        except BaseException:
            generator.close()
            raise
        return generator

    def _save_model(self, folder: str) -> None:
        self.model.save_pretrained(folder)

    def evaluate(self, members, sigma, name, indices, trainer_state=None, sampling=None):
        rest = sigma, name, indices, trainer_state, sampling
        with self._ended_by_interrupts():
            return [self.evaluate_member(i, member, *rest) for i, member in enumerate(members)]

    def generate(self, name, indices=None, *, samples=0, seed=0, temperature=1.0):
        rows = self._rows(name, indices, temperature)
        with self._ended_by_interrupts():
            if not samples:
                return [self.generate_rows(name, rows)]
            # all draws at once: vLLM makes batches of its own, the larger the better, and each row has its seed
            seeds = [sample_seed(seed, int(row), draw) for draw in range(samples) for row in rows]
            self._write_weights()
            found = self._decode(name, np.tile(rows, samples), seeds, temperature)
        return [found[draw * len(rows) : (draw + 1) * len(rows)] for draw in range(samples)]

    @contextmanager
    def _ended_by_interrupts(self) -> Iterator[None]:
        """End vLLM where Ctrl-C comes; the next call starts it again with the weights of the run.

        Otherwise it would go on with the requests that were cut off. Processes of its own get the interrupt, too.
        """
        try:
            yield
        except Exception:
            raise
        except BaseException:
            self.close()
            raise

    @property
    def started(self):
        return self._generator is not None

    def put_prompts(self, name, prompts):
        longest = max(p.width for p in self.prompts.values())
        super().put_prompts(name, prompts)
        if prompts.width > longest:  # vLLM has room for the longest that it was started with
            self.close()

    def update(self, keys, coefficients):
        self._updates.append((keys, coefficients))
        if self._generator is not None:
            self._generator.update(keys, coefficients)
        super().update(keys, coefficients)

    def follow(self, updates):
        if self._generator is not None:
            raise RuntimeError("vLLM runs already, with weights of its own: resume with a new trainer.")
        self._updates = list(updates)

    def check(self):
        if self._generator is not None:
            prove(self.layout, self.master, self._generator.segments, self._generator.digests())

    def close(self):
        if self._generator is not None:
            self._generator.close()
            self._generator = None


class AdapterEngine(VLLMEngine):
    """A population of adapters on a vLLM engine of this process: members decode together, in one batch.

    The base stays in vLLM as it is. This process writes each member's adapter from the noise law, and vLLM's workers
    take it from memory; a batch has the rows of `settings["max_loras"]` members at once (default: `MEMBERS_A_BATCH`),
    each with its own adapter beside the products of the base. Adapters are rounded to the model's dtype, which vLLM
    decodes with.

    Args:
        model: with an adapter of plain LoRA layers over a base that is not quantised (`_adapters.lora_layers`).
        folder: where the base was loaded from; the rest is of `VLLMEngine`.

    Raises:
        ValueError: another kind of adapter, or one of a higher rank than vLLM takes.
    """

    perturbed = Engine.perturbed  # the weights here, from which adapters are made

    def __init__(self, model, tokenizer, rewards, prompts, **settings: Any):
        self._layers = lora_layers(model)
        (self._active,) = model.active_adapters
        self._rank = padded_rank(max(len(layer.lora_A[self._active].weight) for layer in self._layers.values()))
        given = {"max_loras": MEMBERS_A_BATCH} | dict(settings.pop("settings", None) or {})
        checks.whole_number("engine_kwargs: max_loras", given["max_loras"], 1, why="members that decode in one batch")
        if taken := [name for name in _OF_ADAPTERS if name in given]:
            raise ValueError(f"{taken[0]!r} is set by the engine: remove it from engine_kwargs.")
        super().__init__(model, tokenizer, rewards, prompts, settings=given, **settings)
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._numbers: np.ndarray | None = None  # of the adapters of the rows that are decoded; None: all have 1

    @property
    def plan(self):
        return super().plan | {"max_loras": self.settings["max_loras"]}

    def _start(self, longest: int) -> Generator:
        """Start vLLM, and prove that its base is the one that the adapter was made over."""
        rest = self.tensor_parallel, self.settings
        common = self.model.dtype, self.eos_ids, longest, 0, self.weights.distribution
        adapter = self._rank, sorted({name.rpartition(".")[2] for name in self._layers})
        generator = Generator(self.folder, *common, *rest, master=False, adapter=adapter)
        try:
            compare(self._base(), *generator.base_digests())
        except BaseException:
            generator.close()
            raise
        return generator

    def _base(self) -> dict[str, torch.Tensor]:
        """Return the base's parameters as matrices, by the names of the model without adapter."""
        found = {}
        for name, parameter in base_of(self.model).named_parameters():
            if ".lora_" not in name:
                value = parameter.detach()
                found[name.replace(".base_layer.", ".")] = value.reshape(1, -1) if value.ndim < 2 else value.flatten(1)
        return found

    def _save_model(self, folder: str) -> None:
        base = base_of(self.model)
        own = {name.replace(".base_layer.", "."): value for name, value in base.state_dict().items()}
        base.save_pretrained(folder, state_dict={name: value for name, value in own.items() if ".lora_" not in name})

    def evaluate(self, members, sigma, name, indices, trainer_state=None, sampling=None):
        found: list[Evaluation] = []
        indices = np.asarray(indices)
        each = np.broadcast_to(indices, (len(members), indices.shape[-1]))
        with self._ended_by_interrupts():
            for first in range(0, len(members), self.settings["max_loras"]):
                part = range(first, min(first + self.settings["max_loras"], len(members)))
                started, adapters = time.process_time(), {}
                for number, i in enumerate(part, 1):
                    with self.weights.member(members[i].key, sigma, members[i].sign) as flat:
                        adapters[number] = self._adapter(flat)
                self.generator.put_adapters(adapters)
                # one row after the other: a row's samples have the numbers 0, 1, ... whichever member it is of
                rows, seeds = _drawn(each[first : first + len(part)].reshape(-1), sampling)
                size = len(rows) // len(part)
                self._numbers = np.repeat(list(adapters), size)
                done = self._decode(name, rows, seeds, self.options.temperature)
                for own, i in zip(range(0, len(rows), size), part, strict=True):
                    where = slice(own, own + size)
                    found.append(self.scored(i, name, rows[where], done[where], trainer_state, started))
                    started = time.process_time()  # the first member has the time of their common batch
        return found

    def _write_weights(self) -> None:
        self.generator.put_adapters({1: self._adapter(self.weights.flat)})
        self._numbers = None

    def _tokens(self, ids, seeds, temperature):
        numbers = np.ones(len(ids), int) if self._numbers is None else self._numbers
        how = seeds, temperature, self.options
        return self.generator.generate(ids, self.max_completion_length, *how, adapters=numbers.tolist())

    def _adapter(self, flat: np.ndarray) -> Layers:
        """Return an adapter as vLLM's workers take it; flat: its weights, (layout.size,) float32."""
        moved, found = self.layout.views(flat), []
        for name, layer in self._layers.items():
            a, b = (
                np.asarray(moved.get(self._names[id(p)], p.detach().float()), np.float32)
                for p in (layer.lora_A[self._active].weight, layer.lora_B[self._active].weight)
            )
            scaled = b * np.float32(layer.scaling[self._active])
            found.append((name, len(a), a.tobytes(), scaled.tobytes()))
        return found

    def update(self, keys, coefficients):
        Engine.update(self, keys, coefficients)

    def follow(self, updates):
        """Do nothing: vLLM gets every adapter from here."""

    def check(self):
        """Do nothing: vLLM holds no weights of the run from one call to the next."""


class PushedEngine(Decoding, Engine):
    """Decodes with weights that other code trains and that are pushed into a vLLM engine before each call.

    In a launch of several processes each makes every call, decodes its part of the rows, and gets all completions.

    Args:
        model, tokenizer, prompts, max_completion_length: of `Engine`; the model has the dtype in which its weights are
            measured, and `master` holds the weights, which the code that trains keeps up to date.
        folder: where the model was loaded from, a folder or a name on the Hub.

    Attributes:
        settings: further arguments of `vllm.LLM`, where one is started.
        llm: the vLLM engine, such as the one beside the model of TRL's trainer; None: one is started when it is needed.
    """

    llm: Any = None
    perturbed = Engine.perturbed  # the weights here, which vLLM gets

    def __init__(self, model, tokenizer, prompts, *, max_completion_length: int, folder: str):
        super().__init__(model, tokenizer, None, prompts, max_completion_length=max_completion_length)
        self.folder = folder
        self.settings: dict[str, Any] = {}
        self._own: Generator | None = None  # where `llm` is not that of other code

    @property
    def plan(self):
        return _plan(self.model.dtype, 1, exact=False)

    def generate(self, name, indices=None, *, samples=0, seed=0, temperature=1.0):
        rows = self._rows(name, indices, temperature)
        size, seeds = len(rows), None
        if samples:
            rows = np.tile(rows, samples)
            seeds = [sample_seed(seed, int(row), i // size) for i, row in enumerate(rows)]
        self._push()
        n, mine = processes.world_size(), processes.rank()
        own = np.arange(mine, len(rows), n)
        found = self._decode(name, rows[own], seeds and [seeds[i] for i in own], temperature)
        if n > 1:
            from accelerate.utils import gather_object

            pairs = gather_object(list(zip(own.tolist(), found, strict=True)))
            found = [completion for _, completion in sorted(pairs, key=lambda pair: pair[0])]
        return [found[i : i + size] for i in range(0, len(found), size)]

    def _push(self) -> None:
        if self.llm is None:
            longest = max(p.width for p in self.prompts.values()) + self.max_completion_length
            common = self.folder, self.model.dtype, self.eos_ids, longest, 0
            self._own = Generator(*common, settings=self.settings, master=False)
            self.llm = self._own.llm
        if self.llm.llm_engine.model_config.dtype != self.model.dtype:
            raise WrongWeights(
                f"vLLM decodes in {self.llm.llm_engine.model_config.dtype}, the run is measured in {self.model.dtype}: "
                "save the model in the latter."
            )
        tensors = self.weights.tensors()

        def load(model: torch.nn.Module) -> list[str]:
            loaded = model.load_weights(tensors.items())
            return sorted({name for name, _ in model.named_parameters()} - set(loaded))

        if missed := self.llm.apply_model(load)[0]:
            raise WrongWeights(f"vLLM did not take new weights for {missed[0]!r} and {len(missed) - 1} more.")
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache, since requests are still running.")

    def _tokens(self, ids, seeds, temperature):
        return decode(self.llm, self.eos_ids, ids, self.max_completion_length, seeds, temperature) if ids else []

    def close(self):
        if self._own is not None:
            own, self._own, self.llm = self._own, None, None
            own.close()
        elif self.llm is not None:
            _end(self)


def sample_seed(key: int, row: int, sample: int) -> int:
    """Return the seed of a sampled completion, the same for every member of a population: common random numbers.

    >>> sample_seed(7, 0, 0) == sample_seed(7, 0, 0) != sample_seed(7, 0, 1)
    True
    """
    message = struct.pack("<QQQ", key & (1 << 64) - 1, row, sample)
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little") >> 1
