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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch

from evoalign_lib import checks
from evoalign_lib._adapters import base_of, lora_layers
from evoalign_lib.engines import processes
from evoalign_lib.engines._vllm_worker import DRIVER, NotMapped, prepare
from evoalign_lib.engines.base import PLAIN, Decoding, Engine, Evaluation, Options
from evoalign_lib.engines.memory import MEMBERS_A_BATCH, held_parameters, padded_rank, room_beside_master
from evoalign_lib.engines.proof import WrongWeights, compare, prove
from evoalign_lib.update_rules import Member

STATED_OF_ENGINES = {"skip_tokenizer_init": True, "generation_config": "vllm", "trust_remote_code": False, "seed": 0}
STATED_OF_ENGINES |= {"load_format": "safetensors", "enable_prefix_caching": True}
STATED_OF_ENGINES |= {"worker_extension_cls": "evoalign_lib.engines._vllm_extension.WorkerExtension"}
"""Arguments of `vllm.LLM` that every engine has."""
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
    # other processes are not forked: this one may have touched the GPU, which they could not use then
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if in_process else {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    for name, value in (_ENVIRONMENT | own | ({} if torch.cuda.is_available() else _ON_CPU)).items():
        os.environ.setdefault(name, value)
    try:
        import vllm
    except ImportError as error:
        raise ImportError(
            "engine='vllm' and VLLMChat need vLLM 0.31: pip install -e '.[gpu]' on a machine with NVIDIA GPUs, or take "
            "engine='local' or LocalChat."
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
        max_model_len: tokens of a prompt and its completion at most.
        parameters: held by one rank (`memory.held_parameters`): on a GPU room is left for their master, 4 bytes each,
            which vLLM does not know about.
        tensor_parallel: ranks that share the model.
        settings: further arguments of `vllm.LLM`, such as gpu_memory_utilization or max_num_seqs.
        law: distribution, anchor_decay and rank of `Engine`, where they are not its defaults; with anchor_decay each
            worker keeps its starting weights, too, in dtype, and room is left for them. None: workers hold no master.
        adapter: of those that it decodes with (`put_adapters`) the highest rank, one of `memory.LORA_RANKS`, and the
            last parts of the names of their layers; None: it decodes with none.

    Raises:
        ImportError: vLLM is not installed; the message says how.
        NotMapped: noise would not reach a tensor; the message names it.
        RuntimeError: this process has a vLLM engine already.
    """

    _alive: Callable[[], Generator | None] = staticmethod(lambda: None)  # that of this process, if any
    llm: Any = None

    def __init__(
        self,
        folder: str,
        dtype: torch.dtype,
        max_model_len: int,
        parameters: float = 0,
        tensor_parallel: int = 1,
        settings: Mapping[str, Any] | None = None,
        law: Mapping[str, Any] | None = None,
        adapter: tuple[int, Sequence[str]] | None = None,
    ):
        vllm = import_vllm(in_process=tensor_parallel == 1)
        from vllm.platforms import current_platform

        prepare()
        on_cpu = current_platform.is_cpu()
        stated = STATED_OF_ENGINES | {"model": folder, "dtype": str(dtype).removeprefix("torch.")}
        stated |= {"max_model_len": max_model_len, "tensor_parallel_size": tensor_parallel}
        if adapter is not None:
            stated |= dict(zip(_OF_ADAPTERS, (True, *adapter), strict=True))
        if on_cpu:  # a prompt computed in parts would need a random generator that can go back
            stated["enable_chunked_prefill"] = False
        if tensor_parallel == 1:
            gc.collect()
            if (other := Generator._alive()) is not None and other.llm is not None:
                raise RuntimeError(
                    "a vLLM engine works in this process already, and what ends one ends both: call close() of the "
                    "first engine (trainer.engine.close()), or use another process."
                )
            Generator._alive = weakref.ref(self)
        given = dict(settings or {})
        if taken := sorted(stated.keys() & given.keys()):
            raise ValueError(f"{taken[0]!r} is set by the engine: remove it from engine_kwargs.")
        if not on_cpu:
            given.setdefault("max_num_seqs", 256)  # as plans have it; vLLM's own number depends on the device
            start = dtype.itemsize * bool(law and law.get("anchor_decay"))
            if "gpu_memory_utilization" not in given:
                total = current_platform.get_device_total_memory()
                given["gpu_memory_utilization"] = room_beside_master(total, parameters, start)
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
        if law is not None or adapter is not None:
            try:
                self._call("open", MOST_MEMBERS, law)
            except BaseException:
                self.close()
                raise

    def _call(self, method: str, *arguments: Any) -> list:
        """Call a method of all workers; return what they answer, by rank."""
        answers = self.llm.collective_rpc(f"evoalign_{method}", args=arguments)
        for refusal in answers:
            if isinstance(refusal, str):
                raise NotMapped(refusal)
        return answers

    def write(self, member: Member | None = None, sigma: float = 0.0) -> None:
        """Write a member's weights, or with none the weights themselves."""
        if member is None:
            self._call("restore")
        else:
            self._call("perturb", int(member.key), float(sigma), int(member.sign))
        _forget(self.llm)

    def update(self, keys: np.ndarray, coefficients: np.ndarray) -> None:
        """Move the masters, as `Weights.update`; the working copies follow with the next `write`."""
        self._call("update", [int(k) for k in keys], [float(c) for c in coefficients])

    def put_adapters(self, adapters: Mapping[int, Layers]) -> None:
        """Give vLLM adapters, number -> layers, each in the place of the one that had its number before.

        Raises:
            NotMapped: a layer that vLLM gives no adapter.
        """
        for number, layers in adapters.items():
            self._call("put_adapter", number, layers)
        _forget(self.llm)

    def proof(self) -> list[list[tuple[tuple, str]]]:
        """Return by rank its segments, each with the SHA-256 of its numbers: masters, or without them the base."""
        return self._call("proof")

    def close(self) -> None:
        """End vLLM and its worker processes, and leave the GPU."""
        _end(self)


def _forget(llm: Any) -> None:
    """Empty the prefix cache, whose keys and values are of other weights."""
    if not llm.reset_prefix_cache():
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
    eos_ids: Iterable[int],
    ids: Sequence[Sequence[int]],
    max_new_tokens: int,
    seeds: np.ndarray | None = None,
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
        seeds: None for greedy decoding; else the seed of each row, which is sampled.
        temperature: of the samples, above 0.
        options: top_k and top_p of the samples, and generation_kwargs. Stop strings are for the caller.
        adapters: the number of each row's adapter (`Generator.put_adapters`); None: no row has one.

    Returns:
        Token ids of each completion, with the end token where there is one.

    Raises:
        ValueError: a temperature that vLLM would replace.
    """
    from vllm import SamplingParams

    # stop_token_ids alone say what ends a completion
    common = {"max_tokens": max_new_tokens, "stop_token_ids": list(eos_ids), "ignore_eos": True, "detokenize": False}
    common |= {**STATED, **(options.generation_kwargs or {})}
    if seeds is None:
        how = [SamplingParams(temperature=0.0, **common)] * len(ids)
    else:
        _check_temperature(temperature)
        common |= {"top_p": options.top_p, "top_k": options.top_k}
        how = [SamplingParams(temperature=temperature, seed=int(seed), **common) for seed in seeds]
    prompts, requests = [{"prompt_token_ids": list(map(int, row))} for row in ids], None
    if adapters is not None:
        from vllm.lora.request import LoRARequest

        # vLLM has them already; it would look for one that it has lost in a folder that is not there
        nowhere = "nowhere: evoalign_put_adapter put it into memory"
        requests = [LoRARequest(f"adapter {n}", n, nowhere) for n in adapters]
    completed = llm.generate(prompts, how, lora_request=requests, use_tqdm=False)
    return [list(done.outputs[0].token_ids) for done in completed]


def _end(holder: Any) -> None:
    """End the vLLM engine in an object's `llm`, and free what its worker held."""
    llm, holder.llm = holder.llm, None
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()  # vLLM's own collection ran while its worker was still referenced
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _plan(dtype: torch.dtype, tensor_parallel: int, exact: bool) -> dict[str, Any]:
    """Return the batch plan of an engine that decodes with vLLM."""
    plan = {"decoder": "vllm", "vllm": import_vllm(tensor_parallel == 1).__version__}
    dtype = str(dtype).removeprefix("torch.")
    return plan | {"dtype": dtype, "tensor_parallel": tensor_parallel, "exact": exact}


class VLLMDecoding(Decoding):
    """Evaluates members and generates with a `generator`, in whichever process."""

    generator: Generator

    def perturbed(self, key: int, sigma: float) -> AbstractContextManager[None]:
        """Do what `Engine.perturbed` does, where the generator is."""
        return self._with_noise((Member(key), sigma))

    def _numbers(self, key, rows, sample):
        return np.array([sample_seed(key, int(row), sample) for row in rows], np.int64)

    def _all_rows(self, name: str, rows: np.ndarray, samples: int, seed: int, temperature: float) -> list[list]:
        """Return what `Engine.generate` does, all samples at once: the larger vLLM's batches, the better."""
        if not samples:
            return [self._decode(name, rows, None, temperature)]
        seeds = np.concatenate([self._seeded(name, rows, seed, draw) for draw in range(samples)])
        done = self._decode(name, np.tile(rows, samples), seeds, temperature)
        return [done[draw * len(rows) : (draw + 1) * len(rows)] for draw in range(samples)]

    def _write(self, member: tuple[Member, float] | None) -> None:
        """Write the weights that decode next: a member's, or None: the weights themselves."""
        self.generator.write(*(member or self._noise or ()))

    def _decode(self, name, rows, numbers, temperature, member=None, adapters=None):
        """Write the weights and decode; adapters: of each row, written already. See `Decoding._decode`."""
        if adapters is None:
            self._write(member)
        prompts = self.prompts[name]
        ids = [prompts.ids[row, prompts.width - prompts.lengths[row] :].tolist() for row in rows]
        return self.completions(self.until_stop(self._tokens(ids, numbers, temperature, adapters)))

    def _tokens(self, ids, seeds, temperature, adapters):
        how = seeds, temperature, self.options, adapters
        return decode(self.generator.llm, self.eos_ids, ids, self.max_completion_length, *how)


class VLLMEngine(VLLMDecoding, Engine):
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

    def __init__(self, model, tokenizer, rewards, prompts, *, folder=None, tensor_parallel=1, settings=None, **common):
        _check_temperature(common.get("options", PLAIN).temperature)
        super().__init__(model, tokenizer, rewards, prompts, **common | {"threads": processes.cores()})
        self.folder, self._anchor_decay = folder, common.get("anchor_decay", 0.0)
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
            generator = Generator(self.folder, **self.loading(self.longest()))
            try:
                for update in self._updates:
                    generator.update(*update)
                self._prove(generator)
            except BaseException:
                generator.close()
                raise
            self._generator = generator
        return self._generator

    def loading(self, longest: int) -> dict[str, Any]:
        """Return the arguments of `Generator` after the folder."""
        shared = {"tensor_parallel": self.tensor_parallel, "settings": self.settings}
        return {"dtype": self.model.dtype, "max_model_len": longest} | shared | self._held()

    def _held(self) -> dict[str, Any]:
        """Return those that say what workers hold beside the model."""
        weights = self.weights
        law = {"distribution": weights.distribution, "anchor_decay": self._anchor_decay, "rank": weights.rank}
        return {"law": law, "parameters": held_parameters(self.model.config, self.layout.d, self.tensor_parallel)}

    def _prove(self, generator: Generator) -> None:
        prove(self.layout, self.master, generator.proof())

    def _save_model(self, folder: str) -> None:
        self.model.save_pretrained(folder)

    def evaluate(self, members, sigma, name, indices, trainer_state=None, sampling=None):
        rest = sigma, name, indices, trainer_state, sampling
        with self._ended_by_interrupts():
            return [self.evaluate_member(i, member, *rest) for i, member in enumerate(members)]

    def generate(self, name, indices=None, *, samples=0, seed=0, temperature=1.0):
        with self._ended_by_interrupts():
            return self._all_rows(name, self._rows(name, indices, temperature), samples, seed, temperature)

    @contextmanager
    def _ended_by_interrupts(self) -> Iterator[None]:
        """End vLLM where Ctrl-C comes; the next call starts it again with the weights of the run.

        Otherwise it would go on with the requests that were cut off. Processes of its own get the interrupt, too.
        """
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            self.close()
            raise

    def put_prompts(self, name, prompts):
        longest = self.longest()
        super().put_prompts(name, prompts)
        if self.longest() > longest:  # vLLM has room for the longest that it was started with
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
            self._prove(self._generator)

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
        super().__init__(model, tokenizer, rewards, prompts, settings=given, **settings)
        self._names = {id(p): name for name, p in model.named_parameters()}

    @property
    def plan(self):
        return super().plan | {"max_loras": self.settings["max_loras"]}

    def _held(self):
        return {"adapter": (self._rank, sorted({name.rpartition(".")[2] for name in self._layers}))}

    def _prove(self, generator):
        """Prove that vLLM's base is the one that the adapter was made over."""
        compare(self._base(), generator.proof())

    def _base(self) -> dict[str, torch.Tensor]:
        """Return the base's parameters as matrices, by the names of the model without adapter."""
        parameters = _without_adapter(base_of(self.model).named_parameters())
        values = {name: parameter.detach() for name, parameter in parameters.items()}
        return {name: value[None] if value.ndim < 2 else value.flatten(1) for name, value in values.items()}

    def _save_model(self, folder: str) -> None:
        base = base_of(self.model)
        base.save_pretrained(folder, state_dict=_without_adapter(base.state_dict().items()))

    def evaluate(self, members, sigma, name, indices, trainer_state=None, sampling=None):
        found: list[Evaluation] = []
        each = np.broadcast_to(indices, (len(members), np.shape(indices)[-1]))
        size = self.settings["max_loras"]
        with self._ended_by_interrupts():
            for first in range(0, len(members), size):
                started, part = time.process_time(), members[first : first + size]
                adapters = {}
                for number, (key, sign) in enumerate(part, 1):
                    with self.weights.member(key, sigma, sign) as flat:
                        adapters[number] = self._adapter(flat)
                self.generator.put_adapters(adapters)
                # one row after the other: a row's samples have the numbers 0, 1, ... whichever member it is of
                rows, seeds = self._drawn(each[first : first + len(part)].reshape(-1), sampling)
                numbers = np.repeat(list(adapters), len(rows) // len(part)).tolist()
                done = self._decode(name, rows, seeds, self.options.temperature, adapters=numbers)
                for i, own in enumerate(np.split(np.arange(len(rows)), len(part)), first):
                    completions = done[own[0] : own[-1] + 1]
                    found.append(self.scored(i, name, rows[own], completions, trainer_state, started))
                    started = time.process_time()  # the first member has the time of their common batch
        return found

    def _write(self, member):
        with self._weights_of(member) as flat:
            self.generator.put_adapters({1: self._adapter(flat)})

    def _tokens(self, ids, seeds, temperature, adapters):
        return super()._tokens(ids, seeds, temperature, adapters or [1] * len(ids))

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


def _without_adapter(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the tensors of a base, by the names of the model without adapter."""
    return {name.replace(".base_layer.", "."): value for name, value in named if ".lora_" not in name}


class PushedEngine(VLLMDecoding, Engine):
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
        self._own: Generator | None = None  # of `llm`, where that is not of other code

    @property
    def plan(self):
        return _plan(self.model.dtype, 1, exact=False)

    def generate(self, name, indices=None, *, samples=0, seed=0, temperature=1.0):
        return self._all_rows(name, self._rows(name, indices, temperature), samples, seed, temperature)

    def _decode(self, name, rows, numbers, temperature, member=None):
        n, own = processes.world_size(), np.arange(processes.rank(), len(rows), processes.world_size())
        done = super()._decode(name, rows[own], None if numbers is None else numbers[own], temperature)
        if n == 1:
            return done
        from accelerate.utils import gather_object

        pairs = gather_object(list(zip(own.tolist(), done, strict=True)))
        return [completion for _, completion in sorted(pairs, key=lambda pair: pair[0])]

    def _write(self, member):
        """Push the weights into vLLM."""
        if self.llm is None:
            self._own = Generator(self.folder, self.model.dtype, self.longest(), settings=self.settings)
            self.llm = self._own.llm
        if (dtype := self.llm.llm_engine.model_config.dtype) != self.model.dtype:
            raise WrongWeights(
                f"vLLM decodes in {dtype}, the run is measured in {self.model.dtype}: save the model in the latter."
            )
        tensors = self.weights.tensors()

        def load(model: torch.nn.Module) -> list[str]:
            loaded = model.load_weights(tensors.items())
            return sorted({name for name, _ in model.named_parameters()} - set(loaded))

        if missed := self.llm.apply_model(load)[0]:
            raise WrongWeights(f"vLLM did not take new weights for {missed[0]!r} and {len(missed) - 1} more.")
        _forget(self.llm)

    def _tokens(self, ids, seeds, temperature, adapters):
        return decode(self.llm, self.eos_ids, ids, self.max_completion_length, seeds, temperature)

    def close(self):
        self._own = None
        if self.llm is not None:
            _end(self)


def sample_seed(key: int, row: int, sample: int) -> int:
    """Return the seed of a sampled completion, the same for every member of a population: common random numbers.

    >>> sample_seed(7, 0, 0) == sample_seed(7, 0, 0) != sample_seed(7, 0, 1)
    True
    """
    message = struct.pack("<QQQ", key & (1 << 64) - 1, row, sample)
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little") >> 1
