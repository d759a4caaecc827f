"""Generate for a population with vLLM: members are written into vLLM's weights in place, and no weights are sent.

Each vLLM worker holds a float32 master of its share of the model beside the working copy that it decodes with. It
writes a member in place from the member's key and sigma, and updates the master from keys and coefficients, both by the
noise law (`evoalign_lib.noise`). The training process updates its own copy of the weights in the same way (`Engine`)
but with different code, and compares digests of every tensor when vLLM starts and whenever the ledger notes a digest.

When an adapter is trained (`AdapterEngine`), nothing is written into vLLM's weights: the members are LoRA adapters that
decode in one batch; this process computes them and vLLM's workers read them from memory. Low-rank members of a model
whose linear layers alone move (`LowRankEngine`) are LoRA adapters, too; vLLM's workers make them from their keys.

Differences from generating with plain vLLM:

1. Every decoding setting is stated; the model's own generation_config is not read. End tokens are the same as in
   `engines.local`, prompts are token ids, and vLLM has no tokenizer.
2. The prefix cache is emptied whenever the weights change. Otherwise vLLM would silently go on with keys and values
   computed from the old weights.
3. On a CPU, vLLM's packed copies of the weights are turned off (`_vllm_worker.keep_weights_plain`).
4. vLLM runs in this process unless there are tensor-parallel ranks, because in separate processes greedy decoding was
   seen to give different log-probabilities from call to call. The caller's random state is restored.
5. Ctrl-C ends vLLM; the next call starts it again with the weights of the run.

Greedy tokens in float32 on a CPU equal those of transformers (tested). In bfloat16 on a GPU, near-ties may be resolved
differently in another batch shape; `exact` is then false in the plan, which is part of the record. The ledger's replay
is exact in any case, because it needs only the rewards.
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
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from evoalign_lib import checks, models
from evoalign_lib._adapters import base_of, is_adapted, linear_matrices, lora_layers, moved
from evoalign_lib.engines import processes
from evoalign_lib.engines._vllm_worker import DRIVER, NotMapped, prepare
from evoalign_lib.engines.base import PLAIN, Decoding, Engine, Evaluation, Options
from evoalign_lib.engines.memory import MEMBERS_A_BATCH, held_parameters, padded_rank, room_beside_master
from evoalign_lib.engines.proof import WrongWeights, as_matrix, compare, prove
from evoalign_lib.update_rules import Member

STATED_OF_ENGINES = {"skip_tokenizer_init": True, "generation_config": "vllm", "trust_remote_code": False, "seed": 0}
STATED_OF_ENGINES |= {"load_format": "safetensors", "enable_prefix_caching": True}
STATED_OF_ENGINES |= {"worker_extension_cls": "evoalign_lib.engines._vllm_extension.WorkerExtension"}
"""Arguments of `vllm.LLM` that every engine sets."""
MOST_MEMBERS = 1 << 20
"""largest population; each member takes 12 bytes in a buffer of every worker"""
MOST_TOGETHER = 64
"""low-rank members that decode in one batch, unless engine_kwargs set max_loras"""
Layers = Sequence[tuple[str, int, bytes, bytes]]
"""An adapter: for each layer its name, rank, float32 A (rank, inputs) and scaling * B (outputs, rank), row by row"""

# Set before vLLM is imported, because vLLM reads them only once. The user's own settings take precedence.
_ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
_ON_CPU = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}


def import_vllm(in_process: bool = True) -> Any:
    """Import vLLM after setting the environment variables that it reads only once.

    Args:
        in_process: run engines in this process instead of a separate one.

    Raises:
        ImportError: vLLM is not installed; the message says how to install it.
    """
    # spawn, not fork: if this process has touched the GPU already, a forked one could not use it
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if in_process else {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    for name, value in (_ENVIRONMENT | own | ({} if torch.cuda.is_available() else _ON_CPU)).items():
        os.environ.setdefault(name, value)
    try:
        import vllm
    except ImportError as error:
        raise ImportError(
            "engine='vllm' needs vLLM 0.31: pip install -e '.[gpu]' on a machine with NVIDIA GPUs, or use "
            "engine='local'."
        ) from error
    return vllm


def prepare_process() -> None:
    """Prepare this process for a vLLM engine that other code creates, such as TRL's trainers.

    Raises:
        ImportError: vLLM is not installed; the message says how to install it.
    """
    import_vllm()
    import vllm.platforms  # noqa: F401, needed by `prepare`

    prepare()


class Generator:
    """A vLLM engine with a master in each worker: perturb, generate, update.

    Args:
        folder: the model's folder or its name on the Hub; code in it is never run.
        dtype: dtype of the working copy.
        max_model_len: maximum number of tokens of a prompt with its completion.
        parameters: number of parameters held by one rank (`memory.held_parameters`): on a GPU, memory is left free for
            their master, 4 bytes each, of which vLLM does not know.
        tensor_parallel: ranks that share the model.
        settings: further arguments of `vllm.LLM`, such as gpu_memory_utilization or max_num_seqs.
        law: distribution, anchor_decay and rank of `Engine` where they differ from the defaults, and `moving`, the
            shapes of the parameters that move, by name. With anchor_decay each worker also keeps its starting weights,
            in dtype, and memory is left for them. None: no masters.
        adapter: for decoding with adapters (`put_adapters`, `put_members`), their highest rank, rounded up to one of
            `memory.LORA_RANKS`, and the last parts of their layers' names; None: no adapters.

    Raises:
        ImportError: vLLM is not installed; the message says how to install it.
        NotMapped: noise would not reach a tensor; the message names it.
        RuntimeError: this process has a vLLM engine already.
    """

    _alive: Callable[[], Generator | None] = staticmethod(lambda: None)  # returns this process's engine, if any
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
            stated |= {"enable_lora": True, "max_lora_rank": adapter[0], "lora_target_modules": adapter[1]}
        if on_cpu:  # a prompt computed in parts would need a random generator that can be rewound
            stated["enable_chunked_prefill"] = False
        if tensor_parallel == 1:
            gc.collect()
            if (other := Generator._alive()) is not None and other.llm is not None:
                raise RuntimeError(
                    "a vLLM engine works in this process already, and ending one would end both: call close() on the "
                    "first engine (trainer.engine.close()), or use another process."
                )
            Generator._alive = weakref.ref(self)
        given = dict(settings or {})
        if taken := sorted(stated.keys() & given.keys()):
            raise ValueError(f"{taken[0]!r} is set by the engine: remove it from engine_kwargs.")
        if not on_cpu:
            given.setdefault("max_num_seqs", 256)  # as memory plans assume; vLLM's default depends on the device
            start = dtype.itemsize * bool(law and law.get("anchor_decay"))
            if "gpu_memory_utilization" not in given:
                total = current_platform.get_device_total_memory()
                given["gpu_memory_utilization"] = room_beside_master(total, parameters, start)
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002, vLLM reseeds them
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
        """Call a method in all workers; return their answers by rank."""
        answers = self.llm.collective_rpc(f"evoalign_{method}", args=arguments)
        for refusal in answers:
            if isinstance(refusal, str):
                raise NotMapped(refusal)
        return answers

    def write(self, member: Member | None = None, sigma: float = 0.0) -> None:
        """Write a member's weights, or without a member the unperturbed weights."""
        if member is None:
            self._call("restore")
        else:
            self._call("perturb", int(member.key), float(sigma), int(member.sign))
        _forget(self.llm)

    def update(self, keys: np.ndarray, coefficients: np.ndarray) -> None:
        """Update the masters as `Weights.update` does; the working copies follow with the next `write`."""
        self._call("update", [int(k) for k in keys], [float(c) for c in coefficients])

    def put_adapters(self, adapters: Mapping[int, Layers]) -> None:
        """Register adapters with vLLM, number -> layers; each replaces the one that had its number before.

        Raises:
            NotMapped: vLLM applies no adapter to one of the layers.
        """
        for number, layers in adapters.items():
            self._call("put_adapter", number, layers)
        _forget(self.llm)

    def put_members(self, members: Sequence[Member], sigma: float) -> None:
        """Make members adapters number 1, 2, ... over the unperturbed weights; their noise has low rank.

        Raises:
            NotMapped: vLLM applies no adapter to a matrix that moves.
        """
        self._call("put_members", [int(m.key) for m in members], [int(m.sign) for m in members], float(sigma))
        _forget(self.llm)

    def proof(self) -> list[list[tuple[tuple, str]]]:
        """Return each rank's segments with the SHA-256 of their numbers: of the masters, or without one of vLLM's."""
        return self._call("proof")

    def close(self) -> None:
        """End vLLM and its worker processes, and free the GPU."""
        _end(self)


def _forget(llm: Any) -> None:
    """Empty the prefix cache, whose keys and values belong to other weights."""
    if not llm.reset_prefix_cache():
        raise RuntimeError(
            "vLLM did not empty its prefix cache because requests are still running, and would go on with keys and "
            "values of other weights. Call the engine from one thread only."
        )


STATED = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}
STATED |= {"frequency_penalty": 0.0, "watermarking": False}
"""Neutral settings of SamplingParams, stated so that no default of vLLM changes the decoding."""
LEAST_TEMPERATURE = 0.01
"""Lowest temperature: vLLM replaces lower ones with it and a warning (`_MAX_TEMP` in its sampling_params.py)."""


def _check_temperature(temperature: float) -> None:
    if temperature < LEAST_TEMPERATURE:
        raise ValueError(
            f"temperature={temperature} is below vLLM's minimum: it would sample at {LEAST_TEMPERATURE}. Set at least "
            "that, decode greedily, or use another engine."
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
    """Decode prompts with a vLLM engine, stating every setting.

    Args:
        llm: the engine.
        eos_ids: token ids that end a completion.
        ids: token ids of each prompt, without padding.
        max_new_tokens: maximum number of new tokens per completion.
        seeds: the seed of each row, which is then sampled; None: greedy decoding.
        temperature: sampling temperature, above 0.
        options: top_k and top_p of the samples, and generation_kwargs. Stop strings are left to the caller.
        adapters: the number of each row's adapter (`Generator.put_adapters`); None: no row has one.

    Returns:
        Token ids of each completion, including the end token if there is one.

    Raises:
        ValueError: a temperature that vLLM would replace with a higher one.
    """
    from vllm import SamplingParams

    # only stop_token_ids decide what ends a completion
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

        # vLLM has the adapters in memory; should it have lost one, it would search this folder, which does not exist
        nowhere = "nowhere: evoalign_put_adapter put it into memory"
        requests = [LoRARequest(f"adapter {n}", n, nowhere) for n in adapters]
    completed = llm.generate(prompts, how, lora_request=requests, use_tqdm=False)
    return [list(done.outputs[0].token_ids) for done in completed]


def _end(holder: Any) -> None:
    """End the vLLM engine in an object's `llm`, and free the memory of its worker."""
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
    """Evaluates members and generates with a `generator`, in any process."""

    generator: Generator

    perturbed = Decoding._perturbed_elsewhere

    def _numbers(self, key, rows, sample):
        return np.array([sample_seed(key, int(row), sample) for row in rows], np.int64)

    def _generate(self, parts):
        """See `Engine._generate`; all parts, which are samples of the same rows, go into one batch of vLLM."""
        if not parts:
            return []
        (name, rows, seed, first, temperature), n = parts[0], len(parts)
        seeds = None if first is None else np.concatenate([self._seeded(name, rows, seed, i) for i in range(n)])
        done = self._decode(name, np.tile(rows, n), seeds, temperature)
        return [done[i * len(rows) : (i + 1) * len(rows)] for i in range(n)]

    def _write(self, member: tuple[Member, float] | None) -> None:
        """Write the weights to decode with next: a member's, or with None the run's own."""
        self.generator.write(*(member or self._noise or ()))

    def _decode(self, name, rows, numbers, temperature, member=None, adapters=None):
        """Write the weights, unless `adapters` of the rows are written already, and decode; see `Decoding._decode`."""
        if adapters is None:
            self._write(member)
        prompts = self.prompts[name]
        ids = [prompts.ids[row, prompts.width - prompts.lengths[row] :].tolist() for row in rows]
        return self.completions(self.until_stop(self._tokens(ids, numbers, temperature, adapters)))

    def _tokens(self, ids, seeds, temperature, adapters):
        how = seeds, temperature, self.options, adapters
        return decode(self.generator.llm, self.eos_ids, ids, self.max_completion_length, *how)

    def _put(self, members: Sequence[Member], sigma: float) -> None:
        """Make the members adapters 1, 2, ... in vLLM."""
        self.generator.put_members(members, sigma)

    def evaluate_together(self, members, sigma, name, indices, trainer_state=None, sampling=None, first: int = 0):
        """Evaluate members, the first one being number `first`, in one batch of vLLM; see `Engine.evaluate`."""
        started, n = time.process_time(), len(members)
        self._put(members, sigma)
        # rows of all members in one list; a row draws the same random numbers whichever member it belongs to
        each = np.broadcast_to(indices, (n, np.shape(indices)[-1]))
        rows, seeds = self._drawn(each.reshape(-1), sampling)
        numbers = np.repeat(np.arange(1, n + 1), len(rows) // n).tolist()
        done = self._decode(name, rows, seeds, self.options.temperature, adapters=numbers)
        found: list[Evaluation] = []
        for i, own in enumerate(np.split(np.arange(len(rows)), n), first):
            completions = done[own[0] : own[-1] + 1]
            found.append(self.scored(i, name, rows[own], completions, trainer_state, started))
            started = time.process_time()  # the time of the shared batch counts for its first member
        return found


class VLLMEngine(VLLMDecoding, Engine):
    """Engine on a single vLLM that this process drives.

    Args:
        model, tokenizer, rewards, prompts: as for `Engine`; the model has the dtype of vLLM's working copy.
        folder: where the model was loaded from, a folder or a name on the Hub; None: it is written to a temporary one.
        tensor_parallel: GPUs that share the model.
        settings: further arguments of `vllm.LLM`.
        anchor_decay: as for `Engine`.
        **common: max_completion_length and further arguments of `Engine` except threads and precision. vLLM goes on
            decoding after a stop string, and the rest is cut off.

    The first call that generates starts vLLM.
    """

    def __init__(self, model, tokenizer, rewards, prompts, *, folder=None, tensor_parallel=1, settings=None, **common):
        _check_temperature(common.get("options", PLAIN).temperature)
        super().__init__(model, tokenizer, rewards, prompts, **common | {"threads": processes.cores()})
        self.folder, self._anchor_decay = folder, common.get("anchor_decay", 0.0)
        if folder is None:  # saved now, because the run will change the object's weights
            self._made = tempfile.TemporaryDirectory(prefix="evoalign-")
            self.folder = self._made.name
            self._save_model(self.folder)
        self.tensor_parallel, self.settings = tensor_parallel, dict(settings or {})
        self._generator: Generator | None = None
        self._updates: list[tuple[np.ndarray, np.ndarray]] = []  # every update since the starting weights

    @property
    def plan(self):
        exact = self.model.dtype == torch.float32 and not torch.cuda.is_available()
        return _plan(self.model.dtype, self.tensor_parallel, exact)

    @property
    def generator(self) -> Generator:
        """vLLM, started when it is first needed and then proved to hold the run's weights.

        Raises:
            WrongWeights: vLLM does not hold the run's weights; the message names the parameter.
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
        """Return the arguments of `Generator` other than the folder."""
        shared = {"tensor_parallel": self.tensor_parallel, "settings": self.settings}
        return {"dtype": self.model.dtype, "max_model_len": longest} | shared | self._held()

    def _held(self) -> dict[str, Any]:
        """Return the arguments of `Generator` for what workers hold beside the model."""
        weights = self.weights
        law = {"distribution": weights.distribution, "anchor_decay": self._anchor_decay, "rank": weights.rank}
        law["moving"] = {entry.name: entry.shape for entry in self.layout.entries}
        return {"law": law, "parameters": held_parameters(self.model.config, self.layout.d, self.tensor_parallel)}

    def _prove(self, generator: Generator) -> None:
        prove(self.model, self.layout, self.master, generator.proof())

    def _save_model(self, folder: str) -> None:
        models.save(self.model, folder)

    def evaluate(self, members, sigma, name, indices, trainer_state=None, sampling=None):
        rest = sigma, name, indices, trainer_state, sampling
        with self._ended_by_interrupts():
            return [self.evaluate_member(i, member, *rest) for i, member in enumerate(members)]

    def _generate(self, parts):
        with self._ended_by_interrupts():
            return super()._generate(parts)

    @contextmanager
    def _ended_by_interrupts(self) -> Iterator[None]:
        """End vLLM on Ctrl-C; the next call starts it again with the run's weights.

        Otherwise vLLM would go on with the interrupted requests. Its separate processes get the interrupt, too.
        """
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            self.close()
            raise

    def put_prompts(self, name, prompts):
        longest = self.longest()
        super().put_prompts(name, prompts)
        if self.longest() > longest:  # max_model_len was fixed when vLLM started
            self.close()

    def update(self, keys, coefficients):
        self._updates.append((keys, coefficients))
        if self._generator is not None:
            self._generator.update(keys, coefficients)
        super().update(keys, coefficients)

    def follow(self, updates):
        if self._generator is not None:
            raise RuntimeError("vLLM is running already, with other weights: resume with a new trainer.")
        self._updates = list(updates)

    def check(self):
        if self._generator is not None:
            self._prove(self._generator)

    def close(self):
        if self._generator is not None:
            self._generator.close()
            self._generator = None


class _Together(VLLMEngine):
    """An engine whose members decode in batches of up to `settings["max_loras"]`, each as an adapter."""

    def __init__(self, model, tokenizer, rewards, prompts, *, most: int = MEMBERS_A_BATCH, settings=None, **common):
        settings = {"max_loras": most} | dict(settings or {})
        checks.whole_number("engine_kwargs: max_loras", settings["max_loras"], 1, why="members in a batch")
        super().__init__(model, tokenizer, rewards, prompts, settings=settings, **common)

    @property
    def plan(self):
        return super().plan | {"max_loras": self.settings["max_loras"]}

    def evaluate(self, members, sigma, name, indices, trainer_state=None, sampling=None):
        each, n = np.broadcast_to(indices, (len(members), np.shape(indices)[-1])), self.settings["max_loras"]
        found: list[Evaluation] = []
        with self._ended_by_interrupts():
            for i in range(0, len(members), n):
                part = members[i : i + n], sigma, name, each[i : i + n], trainer_state, sampling
                found += self.evaluate_together(*part, i)
        return found


class LowRankEngine(_Together):
    """Engine for low-rank members on a single vLLM, of a model whose linear layers alone move: they decode together.

    A member is W + sigma A B^T / sqrt(rank) (`evoalign_lib.low_rank`), hence an adapter over the unperturbed weights.
    vLLM's workers make both factors from the member's key, each rank for its own share. A batch has the rows of up to
    `settings["max_loras"]` members (default: `MOST_TOGETHER`, or the population). Sums are rounded in another order
    than with a member's weights written in place, which `generate` inside `perturbed` decodes with, so near-ties may be
    resolved differently. In half precision the members themselves differ, too: the factors are rounded, not the sum.

    Args:
        population: members of a step.
        **settings: as for `VLLMEngine`.

    Raises:
        ValueError: a rank for which vLLM has no adapters, or what `VLLMEngine` raises.
    """

    def __init__(self, model, tokenizer, rewards, prompts, *, population: int = MOST_TOGETHER, **settings: Any):
        self._rank = padded_rank(settings["rank"])
        super().__init__(model, tokenizer, rewards, prompts, most=min(population, MOST_TOGETHER), **settings)

    @property
    def plan(self):
        return super().plan | {"exact": False}

    def _held(self):
        layers = sorted({entry.name.split(".")[-2] for entry in self.layout.entries})
        return super()._held() | {"adapter": (self._rank, layers)}


class AdapterEngine(_Together):
    """Engine for a population of adapters on a single vLLM: members decode together, in one batch.

    The base stays unchanged in vLLM. This process computes each member's adapter by the noise law, and vLLM's workers
    read it from memory. A batch has the rows of up to `settings["max_loras"]` members (default: `MEMBERS_A_BATCH`),
    each with its own adapter added to the products of the base. Adapters are rounded to the model's dtype, in which
    vLLM decodes.

    Args:
        model: a model with an adapter of plain LoRA layers over an unquantised base (`_adapters.lora_layers`).
        folder: where the base was loaded from; all other arguments are as for `VLLMEngine`.

    Raises:
        ValueError: another kind of adapter, or one of a higher rank than vLLM supports.
    """

    perturbed = Engine.perturbed  # perturbs the weights here, from which adapters are computed

    def __init__(self, model, tokenizer, rewards, prompts, **settings: Any):
        self._layers = lora_layers(model)
        (self._active,) = model.active_adapters
        self._rank = padded_rank(max(len(layer.lora_A[self._active].weight) for layer in self._layers.values()))
        super().__init__(model, tokenizer, rewards, prompts, **settings)
        self._names = {id(p): name for name, p in model.named_parameters()}

    def _held(self):
        return {"adapter": (self._rank, sorted({name.rpartition(".")[2] for name in self._layers}))}

    def _prove(self, generator):
        """Prove that vLLM's base is the one under the adapter."""
        compare(self._base(), generator.proof())

    def _base(self) -> dict[str, torch.Tensor]:
        """Return the base's parameters as matrices, by their names in the model without the adapter."""
        parameters = _without_adapter(base_of(self.model).named_parameters())
        return {name: as_matrix(parameter.detach()) for name, parameter in parameters.items()}

    def _save_model(self, folder: str) -> None:
        base = base_of(self.model)
        base.save_pretrained(folder, state_dict=_without_adapter(base.state_dict().items()))

    def _put(self, members, sigma):
        adapters = {}
        for number, (key, sign) in enumerate(members, 1):
            with self.weights.member(key, sigma, sign) as flat:
                adapters[number] = self._adapter(flat)
        self.generator.put_adapters(adapters)

    def _write(self, member):
        with self._weights_of(member) as flat:
            self.generator.put_adapters({1: self._adapter(flat)})

    def _tokens(self, ids, seeds, temperature, adapters):
        return super()._tokens(ids, seeds, temperature, adapters or [1] * len(ids))

    def _adapter(self, flat: np.ndarray) -> Layers:
        """Return an adapter in the form that vLLM's workers read; flat: its weights, (layout.size,) float32."""
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
        """Do nothing, because vLLM gets every adapter from this process."""

    def check(self):
        """Do nothing, because vLLM keeps none of the run's weights between calls."""


def kind_of(model: Any, rank: int) -> type[VLLMEngine]:
    """Return the class of the engine on a single vLLM for a model and the rank of the noise (0: full)."""
    if is_adapted(model):
        return AdapterEngine
    return LowRankEngine if rank and moved(model).keys() <= linear_matrices(model) else VLLMEngine


def _without_adapter(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the tensors of a base, by their names in the model without the adapter."""
    return {name.replace(".base_layer.", "."): value for name, value in named if ".lora_" not in name}


class PushedEngine(VLLMDecoding, Engine):
    """Engine for weights that other code trains; they are pushed into vLLM before each call.

    In a launch of several processes, each must make every call; it decodes its share of the rows and gets all
    completions.

    Args:
        model, tokenizer, prompts, max_completion_length: as for `Engine`; the model has the dtype in which its weights
            are evaluated, and `master` holds the weights, which the training code keeps up to date.
        folder: where the model was loaded from, a folder or a name on the Hub.

    Attributes:
        settings: further arguments of `vllm.LLM`, if one is started.
        llm: the vLLM engine, such as the one that TRL's trainer has beside its model; None: started when needed.
    """

    llm: Any = None
    perturbed = Engine.perturbed  # perturbs the weights here, which are then pushed into vLLM

    def __init__(self, model, tokenizer, prompts, *, max_completion_length: int, folder: str):
        super().__init__(model, tokenizer, None, prompts, max_completion_length=max_completion_length)
        self.folder = folder
        self.settings: dict[str, Any] = {}
        self._own: Generator | None = None  # the generator of `llm`, unless other code started it

    @property
    def plan(self):
        return _plan(self.model.dtype, 1, exact=False)

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
                f"vLLM decodes in {dtype}, the run is evaluated in {self.model.dtype}: save the model in the latter."
            )
        tensors = self.weights.tensors()

        def load(model: torch.nn.Module) -> list[str]:
            loaded = model.load_weights(tensors.items())
            return sorted({name for name, _ in model.named_parameters()} - set(loaded))

        if missed := self.llm.apply_model(load)[0]:
            raise WrongWeights(f"vLLM did not load new weights for {missed[0]!r} and {len(missed) - 1} more.")
        _forget(self.llm)

    def _tokens(self, ids, seeds, temperature, adapters):
        return decode(self.llm, self.eos_ids, ids, self.max_completion_length, seeds, temperature)

    def close(self):
        self._own = None
        if self.llm is not None:
            _end(self)


def sample_seed(key: int, row: int, sample: int) -> int:
    """Return the seed of a sampled completion; all members of a population share it (common random numbers).

    >>> sample_seed(7, 0, 0) == sample_seed(7, 0, 0) != sample_seed(7, 0, 1)
    True
    """
    message = struct.pack("<QQQ", key & (1 << 64) - 1, row, sample)
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little") >> 1
