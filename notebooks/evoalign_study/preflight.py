"""Whether a run at full scale fits, from the model's config alone: memory by component, and remedies.

`sweep.load_or_run` prints the plans of the training runs and of the sampling that it is about to do, and stops where
one cannot fit. No weights are read and nothing is run: a plan is arithmetic on shapes and settings, and on these
assumptions, which it names where it uses them. Of training it says nothing about hours: time one step of a run.

1. ES on vLLM: every GPU of an engine holds its share of the working copy, in the model's dtype, of the float32 master,
   and with anchor_decay of the starting weights, in the model's dtype. Key and value heads that are fewer than the GPUs
   of an engine are held by several, as vLLM has it. The KV cache is wanted for a completion of full length in each row
   that is decoded at once; where there is room for fewer rows, vLLM lets the others wait, and only less than one row is
   refused. Over an adapter there is no master: every GPU holds the adapters of a batch of members instead.
2. Gradient arms on GPUs: plain data parallel. Every GPU holds all weights, gradients and AdamW's two moments in float32
   (as `grpo` trains), the reference model if beta > 0, with several GPUs the buckets of DistributedDataParallel, and
   vLLM's own copy beside them (TRL's "colocate"), in the model's dtype. Nothing is sharded: there is no configuration
   for it, so more GPUs make no model fit. An adapter has one GPU, where the model itself generates with a KV cache of
   its own, and vLLM's copy measures it.
3. Activations are stored, not recomputed (`grpo` has gradient checkpointing off): 6 h + 5 q + 4 i numbers per token and
   layer (h: hidden size, q: heads times their size, i: intermediate size), which a test holds against the tensors that
   PyTorch keeps. Attention scores are not among them. TRL 1.16 computes log-probabilities from tiles of the logits, so
   these never lie in memory as a whole.
4. The process that drives a run keeps on the CPU the loaded model, the float32 master and a copy of it from the start
   (`training`), toward which anchor_decay pulls; of a gradient arm each process does. Of members that are adapters
   the two are the adapter's alone. Fine-tuning before a run is not counted.
5. Every completion is as long as it may be, and a prompt has the tokens that its task says (`Measures.prompt_tokens`).
6. Sampling (`kinds.sampled`) has hours, too: those of completions as long as they may be, and of half that. A step of
   decoding takes as long as the weights and caches take to be read, or its products to be computed, whichever is more,
   and a fixed time; devices are as fast as `GPU` and `CORE` say. An engine alone keeps all its rows busy; of several,
   and on cores, each draws the samples of a block one after the other. Good to a factor of two or three: time a block.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, prod
from pathlib import Path
from typing import Any, NamedTuple

from evoalign_lib import arms, tiny
from evoalign_lib.engines.memory import (
    MEMBERS_A_BATCH,
    USABLE,
    CannotCount,
    Shape,
    kv_bytes,
    padded_rank,
    rank_parameters,
    shape,
    tensor_parallel_sizes,
)
from evoalign_lib.footprint import TRAINED
from evoalign_study import base_models, judge_memory, measures, trainers

GIB = 2**30
GPU_GIB = 80.0
"""GiB of a GPU where none is visible: assumed."""
RESERVE_GIB = 4.0
"""GiB per GPU for CUDA's context, NCCL, CUDA graphs and the activations of vLLM's prefill: assumed. (vLLM's logs show
0.4 to 2.5 GiB of graphs; a batch of 16,384 tokens of a 72 B model on 8 GPUs has about 2 GiB in its MLP.)"""
CONCURRENT = 256
"""Rows decoded at once by an engine: vLLM's max_num_seqs, and `ESConfig.chunk_rows`."""
MEAN_SHARE = 0.5
"""Mean length of a sampled completion, as a share of the longest: assumed."""
_TILE = 4096, 32768  # tokens and vocabulary of TRL's tiles of logits


class Speed(NamedTuple):
    """How fast a device decodes: assumed."""

    bandwidth: float
    """bytes read, a second"""
    flops: float
    """floating-point operations, a second"""
    step: float
    """seconds of a step of decoding besides: scheduling, sampling"""
    start: float
    """seconds until a run begins to decode: loading, vLLM's start"""


GPU = Speed(1.5e12, 150e12, 0.01, 120.0)
"""Three quarters of an A100's bandwidth, half of its products in bfloat16. With a seed for each row vLLM samples rows
one by one, which takes longer than its plain sampler."""
CORE = Speed(1e10, 2e10, 0.001, 5.0)
"""One core, float32."""


class Part(NamedTuple):
    """A component of memory."""

    name: str
    """in words, for the plan"""
    size: float
    """bytes"""
    of_vllm: bool = False
    """whether vLLM allocates it, from the share of the GPU that it is told"""
    of_micro_batch: bool = False
    """whether a smaller micro_batch makes it smaller"""


Memory = tuple[Part, ...]


class DoesNotFit(ValueError):
    """A run that needs more memory than there is; the message has the numbers and what to do."""


# ---- memory


def activation_bytes(model: Shape, tokens: int) -> int:
    """Bytes of float32 that a forward pass keeps for the backward pass of this many tokens (the module's 3)."""
    a_token = 6 * model.hidden + 5 * model.heads * model.head_dim + 4 * model.intermediate
    return 4 * model.layers * a_token * tokens


def es_memory(
    model: Shape, tensor_parallel: int, rows: int, length: int, anchored: bool = False, adapter: int = 0
) -> Memory:
    """Memory of each GPU that evaluates members by vLLM.

    Args:
        model: the model's shape.
        tensor_parallel: GPUs that share it.
        rows: decoded at once.
        length: tokens of a completion and its prompt.
        anchored: whether the starting weights stay, for anchor_decay.
        adapter: parameters of the adapter that members are, of the rank that vLLM makes room for; 0: all weights.
    """
    share = rank_parameters(model, tensor_parallel)
    start = (Part(f"starting weights, {model.dtype}", model.width * share),) if anchored else ()
    moved = (Part("master, float32", 4 * share),)
    if adapter:  # each GPU may hold the whole of them
        moved = (Part(f"{MEMBERS_A_BATCH} adapters, {model.dtype}", MEMBERS_A_BATCH * model.width * adapter),)
    return (
        Part(f"working copy, {model.dtype}", model.width * share),
        *moved,
        *start,
        _RESERVE,
        _caches(rows, length, rows * length * kv_bytes(model, tensor_parallel)),
    )


def adapter_parameters(model: Shape, rank: int) -> int:
    """Parameters of an arm's adapter (`essa.lora_config`): A and B of q, k, v and o."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return 2 * model.layers * rank * (2 * model.hidden + queries + keys)


def gradient_memory(
    model: Shape, gpus: int, rows: int, length: int, micro_batch: int, reference: bool = False, adapter: int = 0
) -> Memory:
    """Memory of each GPU that trains by gradients, with vLLM beside it; or of the process that does on a CPU.

    Args:
        model: the model's shape.
        gpus: data parallel replicas; 0: on a CPU, where the model itself generates, in float32.
        rows: completions generated at once.
        length: tokens of a completion and its prompt.
        micro_batch: completions in a backward pass.
        reference: whether there is a reference model.
        adapter: parameters of the adapter that is trained over the frozen base, which is the reference, too, and is
            measured in a copy; 0: all weights are trained.
    """
    d, moved = model.d, adapter or model.d
    tokens = micro_batch * length
    tile = min(tokens, _TILE[0]) * min(model.vocabulary, _TILE[1])
    # besides: a tile of logits and one of its exponentials, and the gradient of the head before it is added
    activations = activation_bytes(model, tokens) + 4 * (2 * tile + model.vocabulary * model.hidden)
    if gpus:  # when no activations are left, AdamW's loop over tensors makes one more copy of them all
        activations = max(activations, 4 * moved)
    caches = rows * length * kv_bytes(model, width=model.width if gpus else 4)
    trained = [("weights", TRAINED["weights"] * (d + adapter)), ("gradients", TRAINED["gradients"] * moved)]
    trained += [("AdamW's moments", TRAINED["moments"] * moved)]
    trained += [("reference model", 4 * d)] if reference and not adapter else []
    trained += [("merged model", 4 * d)] if adapter else []
    own_caches = rows * length * kv_bytes(model, width=4)  # of the model itself, which generates beside an adapter
    trained += [(f"own KV cache, {rows} x {length} tokens", own_caches)] if adapter and gpus else []
    trained += [("buckets of gradients", 4 * moved)] if gpus > 1 else []
    parts = [Part(f"{name}, float32", size) for name, size in trained]
    stored = f"activations of {micro_batch} x {length} tokens, or AdamW's temporaries, float32"
    parts.append(Part(stored, activations, of_micro_batch=True))
    own = [Part(f"vLLM's copy, {model.dtype}", model.width * d, of_vllm=True), _RESERVE] if gpus else []
    return (*parts, *own, _caches(rows, length, caches))


def _caches(rows: int, length: int, size: float) -> Part:
    return Part(f"KV cache, {rows} x {length} tokens", size, of_vllm=True)


_RESERVE = Part("reserve (assumed)", RESERVE_GIB * GIB, of_vllm=True)


def _held(d: int) -> Memory:
    """What the process that drives a run of so many parameters holds besides the model; see the module's 4."""
    return tuple(Part(name, 4 * d) for name in ("master, float32", "weights at the start, float32"))


def _total(memory: Memory) -> float:
    return sum(part.size for part in memory)


# ---- work


@dataclass(frozen=True)
class Work:
    """What a run generates, at most."""

    factors: tuple[tuple[str, int], ...]
    """(what, how many): completions are their product"""
    new: int
    """tokens of a completion"""
    prompt: int
    """tokens of a prompt"""

    @property
    def completions(self) -> int:
        """Completions of training."""
        return prod(count for _, count in self.factors)


def work(spec: Mapping[str, Any]) -> Work:
    """Return what a training run of a spec of `train_specs` generates at most. Raises ValueError for an unknown arm."""
    factors = tuple((name, spec[name]) for name in trainers.of(spec["arm"]).completions)
    if arms.get(spec["arm"]).options.get("fitness") == "random":
        factors = (*factors, ("completions, since the fitness is drawn", 0))
    return Work(factors, spec["max_completion_length"], measures.get(spec["task"]).prompt_tokens)


class Placement(NamedTuple):
    """Where the parts of a run lie."""

    engines: int
    """of vLLM, or data parallel replicas; 1 on the CPU"""
    tensor_parallel: int
    """GPUs of an engine"""
    rows: int
    """completions decoded at once by an engine"""
    wanted: int
    """as many as it would decode at once if it had the memory"""
    gpu_memory: Memory
    """of each GPU"""
    host_memory: Memory
    """of each process that drives the run"""
    processes: int
    """that drive the run on a machine"""
    problem: str
    """why it does not fit, and what to do; empty where it fits"""


# ---- plans


@dataclass(frozen=True)
class Plan:
    """What one training run needs. Equal plans differ in seeds and in settings that change neither memory nor work."""

    name: str
    """of the model"""
    arm: str
    model: Shape
    work: Work
    gpus: int
    """0: on the CPU"""
    gpu_gib: float
    """memory of each GPU, GiB"""
    placement: Placement
    runs: int
    """at once on the machine"""
    host_gib: float | None
    """memory of the machine, GiB; None: not known"""
    problem: str
    """why it does not fit, and what to do; empty where it fits"""

    @property
    def fits(self) -> bool:
        """Whether the run has the memory that it needs."""
        return not self.problem

    def text(self, which: str = "") -> str:
        """The plan as a table for a reader; which: the runs that have it."""
        m, job, at = self.model, self.work, self.placement
        lines = [("run", f"{self.arm} of {self.name}{which and f', {which}'}")]
        if not self.gpus:
            lines.append(("on", "CPU cores: no GPU is used"))
        elif trainers.of(self.arm).has_members:
            idle = self.gpus - at.engines * at.tensor_parallel
            split = f"engines {at.engines}, tensor parallel {at.tensor_parallel}{f', idle {idle}' if idle else ''}"
            lines.append(("on", f"{_gpus(self.gpus, self.gpu_gib)}: {split}"))
        else:
            lines.append(("on", f"{_gpus(self.gpus, self.gpu_gib)}: replicas {at.engines}, nothing sharded"))
        parts = f"embedding {_count(m.embedding)}, head {_count(m.head) if m.head else 'tied'}, layers and last norm "
        lines.append(("parameters", f"{_count(m.d)}: {parts}{_count(m.d - m.embedding - m.head)}"))
        if self.gpus:
            lines += _table("each GPU", at.gpu_memory, f"of {_room(self.gpu_gib)}")
        each = self.runs * at.processes
        room = f"of {self.host_gib:.1f}" if self.host_gib else "what the machine has is not known here"
        lines += _table("the host, each process", at.host_memory, f"processes {each}, {room}")
        if self.fits and at.rows < at.wanted:
            lines.append(("rows", f"{at.rows} at once on an engine, of {at.wanted}: the others wait"))
        product = " x ".join(f"{count} {name}" for name, count in job.factors)
        lines.append(("completions", f"{job.completions:,} = {product}"))
        generated = f"at most {job.completions * job.new:.2g} generated ({job.new} per completion)"
        lines.append(
            ("tokens", f"{generated}, {job.completions * job.prompt:.2g} of prompts ({job.prompt} each, assumed)")
        )
        if not self.fits:
            lines.append(("DOES NOT FIT", self.problem))
        return "\n".join(f"{name:13}{value}" for name, value in lines)


def _table(whose: str, memory: Memory, room: str) -> list[tuple[str, str]]:
    rows = [("", f"  {part.size / GIB:9.1f}  {part.name}") for part in memory]
    return [("memory", f"of {whose}, GiB"), *rows, ("", f"  {_total(memory) / GIB:9.1f}  in all; {room}")]


def _count(n: float) -> str:
    return f"{n / 1e9:.2f} B" if n >= 1e8 else f"{n / 1e6:.2f} M"


def _gpus(n: int, gib: float) -> str:
    return f"{n} GPU{'s' if n > 1 else ''} of {gib:g} GiB"


def _room(gpu_gib: float) -> str:
    return f"{USABLE * gpu_gib:.1f} ({100 * USABLE:.0f} % of {gpu_gib:g})"


def plan(
    config: Any,
    spec: Mapping[str, Any],
    *,
    engine: str = "vllm",
    gpus: int = 1,
    gpu_gib: float = GPU_GIB,
    host_gib: float | None = None,
    runs: int = 1,
) -> Plan:
    """Plan one training run.

    Args:
        config: the model's, as for `shape`.
        spec: of `train_specs`, or a dictionary with the same settings: base, arm, task and the arm's own.
        engine: "vllm" on GPUs, or "local" on CPU cores.
        gpus: GPUs for the run; 0 with engine "local".
        gpu_gib: memory of each GPU, GiB.
        host_gib: memory of the machine, GiB; None: not known, and nothing is refused for it.
        runs: at once on the machine.

    Raises:
        ValueError: an unknown engine or arm, or GPUs that the engine does not take.
        CannotCount: see `shape`.
    """
    if engine not in ("local", "vllm"):
        raise ValueError(f"engine {engine!r} cannot be planned: take 'local' or 'vllm'.")
    if engine == "local" and gpus:
        raise ValueError(f"gpus={gpus}: engine 'local' runs on CPU cores only, set gpus=0, or engine='vllm'.")
    if engine == "vllm" and gpus < 1:
        raise ValueError(f"gpus={gpus}: engine 'vllm' needs at least 1.")
    model, job = shape(config), work(spec)
    place = _place_es if trainers.of(spec["arm"]).has_members else _place_gradient
    placed = place(model, spec, job, gpus, gpu_gib)
    return Plan(
        name=str(spec["base"]),
        arm=spec["arm"],
        model=model,
        work=job,
        gpus=gpus,
        gpu_gib=gpu_gib,
        placement=placed,
        runs=runs,
        host_gib=host_gib,
        problem=placed.problem or _host_problem(model, placed, runs, host_gib),
    )


def _place_es(model: Shape, spec: Mapping[str, Any], job: Work, gpus: int, gpu_gib: float) -> Placement:
    """The smallest tensor parallel size with a KV cache for all rows; else the one with most rows."""
    adapter = adapter_parameters(model, padded_rank(spec["lora_rank"])) if "lora_rank" in spec else 0
    together = min(MEMBERS_A_BATCH, spec["population_size"]) if adapter and gpus else 1
    wanted, length = min(CONCURRENT, together * spec["prompts_per_step"]), job.prompt + job.new
    if not gpus:
        caches = _caches(wanted, length, wanted * length * kv_bytes(model, width=4))
        own = Part("model, float32", 4 * model.d), Part("a member's weights, float32", 4 * model.d), caches
        return Placement(1, 1, wanted, wanted, (), own + _held(model.d), 1, "")
    capacity, anchored = USABLE * gpu_gib * GIB, bool(spec.get("anchor_decay"))

    def room(t: int) -> int:
        free = capacity - _total(es_memory(model, t, 0, length, anchored, adapter))
        return min(wanted, int(free // (length * kv_bytes(model, t))))

    sizes = tensor_parallel_sizes(model, gpus)
    if (chosen := spec.get("tensor_parallel")) is not None:
        if chosen not in sizes:
            raise ValueError(f"tensor_parallel={chosen} does not suit {gpus} GPUs and this model: take one of {sizes}.")
        sizes = [chosen]
    t = next((t for t in sizes if room(t) == wanted), None) or max(sizes, key=room)
    rows = max(1, room(t))
    memory = es_memory(model, t, rows, length, anchored, adapter)
    host = (Part(f"model, {model.dtype}", model.width * model.d), *_held(adapter or model.d))
    problem = ""
    if room(t) < 1:
        fixed, copies = _total(es_memory(model, t, 0, length, anchored, adapter)), 2 if anchored else 1
        all_of_it = ((0 if adapter else 4) + copies * model.width) * model.d / 1e9
        held = f"the {model.dtype} copies of weights and start" if anchored else f"the {model.dtype} copy"
        held = held if adapter else f"the float32 master and {held}"
        problem = (
            f"{_count(model.d)} parameters need {all_of_it:,.0f} GB for {held}: "
            f"with the reserve and a KV cache for one completion {_total(memory) / GIB:.1f} GiB per GPU at tensor "
            f"parallel {t}, the most that {_gpus(gpus, gpu_gib)} allow, and {_room(gpu_gib)} may be used. "
        )
        more = next((s for s in tensor_parallel_sizes(model, 1024) if room(s) >= 1), None)
        remedies = [f"{more} GPUs" if more > gpus and not adapter else f"tensor_parallel={more}"] if more else []
        remedies += ["no anchor_decay"] if anchored else []
        if fixed + job.prompt * kv_bytes(model, t) < capacity:
            most = int((capacity - fixed) // kv_bytes(model, t)) - job.prompt
            remedies.append(f"max_completion_length={most} or less")
        problem += f"Take {', '.join([*remedies, 'larger GPUs or a smaller model'])}."
    return Placement(gpus // t, t, rows, wanted, memory, host, 1, problem)


def _place_gradient(model: Shape, spec: Mapping[str, Any], job: Work, gpus: int, gpu_gib: float) -> Placement:
    """All on every GPU, with a KV cache for as many rows as there is room for; or all on the CPU."""
    replicas, length, sft = max(1, gpus), job.prompt + job.new, trainers.of(spec["arm"]).samples_first
    rollouts = job.completions // spec.get("steps", 1)
    mine = ceil(rollouts / replicas)
    wanted = min(CONCURRENT, mine) if sft else mine
    micro = min(mine, spec["batch_size"] if sft else spec.get("micro_batch", rollouts))

    def memory(rows: int, micro: int, gpus: int = gpus) -> Memory:
        adapter = adapter_parameters(model, spec["lora_rank"]) if "lora_rank" in spec else 0
        return gradient_memory(model, gpus, rows, length, micro, spec.get("beta", 0) > 0, adapter)

    if not gpus:
        return Placement(1, 1, wanted, wanted, (), memory(wanted, micro) + _held(model.d), 1, "")
    capacity, per_row = USABLE * gpu_gib * GIB, length * kv_bytes(model)
    rows = min(wanted, max(1, int((capacity - _total(memory(0, micro))) // per_row)))
    found, problem = memory(rows, micro), ""
    if _total(found) > capacity:
        has = f"{_room(gpu_gib)} may be used"
        least = gradient_memory(model, gpus, 1, 1, 1, spec.get("beta", 0) > 0)
        divisors = [m for m in range(1, micro) if sft or mine % m == 0]
        # the last one is the largest with which all rows have their KV cache, if there is one
        fitting = [m for many in (1, wanted) for m in divisors if _total(memory(many, m)) <= capacity]
        needs = f"{_count(model.d)} parameters need {16 * model.d / 1e9:,.0f} GB for weights, gradients and AdamW's "
        needs += f"moments in float32 on every GPU, {_total(memory(1, 1)) / GIB:.1f} GiB with all else for one "
        needs += f"completion of {length} tokens, and {has}. Nothing is sharded, so more GPUs do not help. Take "
        if fitting:
            setting = "batch_size" if sft else "micro_batch"
            problem = (
                f"{setting}={micro}: the activations of {micro} completions of {length} tokens make it "
                f"{_total(found) / GIB:.1f} GiB on a GPU, and {has}. Set {setting}={fitting[-1]}."
            )
        elif gpus > 1 and _total(memory(1, 1, gpus=1)) <= capacity:
            problem = f"{needs}1 GPU, which needs no buckets of gradients, or a smaller model."
        else:
            shorter = "a smaller max_completion_length, " if _total(least) <= capacity else ""
            problem = f"{needs}{shorter}larger GPUs, a smaller model, or ES."
    host = (Part(f"model in which it is measured, {model.dtype}", model.width * model.d), *_held(model.d))
    return Placement(gpus, 1, rows, wanted, found, host, gpus, problem)


def _host_problem(model: Shape, placed: Placement, runs: int, host_gib: float | None) -> str:
    """Why runs do not fit into the machine's memory; empty where they do, or where it is not known."""
    each, processes = _total(placed.host_memory) / GIB, runs * placed.processes
    if host_gib is None or processes * each <= host_gib:
        return ""
    most = max(placed.host_memory, key=lambda part: part.size)
    fewer = int(host_gib // (each * placed.processes))
    remedies = [f"workers={fewer}"] if fewer else []
    remedies += ["a smaller micro_batch"] if most.of_micro_batch else []
    return (
        f"{_count(model.d)} parameters need {each:.1f} GiB of the host's memory in each of {processes} processes, "
        f"{most.size / GIB:.1f} of them for: {most.name}; this machine has {host_gib:.1f} GiB. "
        f"Take {', '.join([*remedies, 'a machine with more memory or a smaller model'])}."
    )


# ---- sampling


@dataclass(frozen=True)
class Sampling:
    """What it takes to sample a model, or an end of training from it, at all temperatures and in all blocks missing."""

    name: str
    """of the model, and its end"""
    runs: int
    """a block at a temperature each, one record"""
    which: str
    """which they are, in words"""
    completions: int
    new: int
    """tokens of a completion, at most"""
    prompt: int
    """tokens of a prompt, assumed"""
    gpus: int
    """0: on CPU cores"""
    gpu_gib: float
    """memory of each GPU, GiB"""
    at_once: int
    """runs on the machine"""
    host_gib: float | None
    """memory of the machine, GiB; None: not known"""
    model: Shape | None = None
    """None: its parameters cannot be counted, so that there are neither memory nor hours"""
    placement: Placement | None = None
    hours: tuple[float, float] = (0.0, 0.0)
    """with completions as long as they may be, and with shorter ones (`MEAN_SHARE`)"""
    problem: str = ""
    """why it does not fit, and what to do; empty where it fits"""

    @property
    def generated(self) -> tuple[int, int]:
        """Tokens generated: at most, and with completions of the assumed mean length."""
        return self.completions * self.new, round(self.completions * MEAN_SHARE * self.new)

    def text(self) -> str:
        """The plan as a table for a reader."""
        m, at = self.model, self.placement
        lines = [("run", f"sampled of {self.name}: {self.which}")]
        if m is not None and at is not None:
            if self.gpus:
                split = f"engines {at.engines}, tensor parallel {at.tensor_parallel}"
                lines.append(("on", f"{_gpus(self.gpus, self.gpu_gib)}: {split}"))
            else:
                lines.append(("on", f"CPU cores, runs at once {self.at_once}: no GPU is used"))
            lines.append(("parameters", _count(m.d)))
            if self.gpus:
                lines += _table("each GPU", at.gpu_memory, f"of {_room(self.gpu_gib)}")
            room = f"of {self.host_gib:.1f}" if self.host_gib else "what the machine has is not known here"
            lines += _table("the host, each process", at.host_memory, f"processes {self.at_once}, {room}")
            if not self.problem and at.rows < at.wanted:
                lines.append(("rows", f"{at.rows} at once on an engine, of {at.wanted}: the others wait"))
        lines.append(("completions", f"{self.completions:,}"))
        lines.append(("tokens", _tokens_in_words(self.generated, self.completions * self.prompt)))
        if m is not None:
            lines.append(("hours", _hours_in_words(self.hours)))
        if self.problem:
            lines.append(("DOES NOT FIT", self.problem))
        return "\n".join(f"{name:13}{value}" for name, value in lines)


def _tokens_in_words(generated: tuple[int, int], prompts: int) -> str:
    most, mean = generated
    return f"at most {most:,} generated, {mean:,} at the assumed mean length, {prompts:,} of prompts (assumed)"


def _hours_in_words(hours: tuple[float, float]) -> str:
    return "at most {:,.2f}, {:,.2f} at the assumed mean length, at assumed speeds: time one block".format(*hours)


def sampling(
    config: Any,
    specs: Sequence[Mapping[str, Any]],
    *,
    name: str,
    gpus: int = 0,
    gpu_gib: float = GPU_GIB,
    host_gib: float | None = None,
    at_once: int = 1,
) -> Sampling:
    """Plan the sampling of one model or end.

    Args:
        config: the model's, as for `shape`; None: it has none.
        specs: of `sampled_specs`, all of the same model, end and engine.
        name: of model and end, for the reader.
        gpus: for each run; 0: on CPU cores.
        gpu_gib: memory of each GPU, GiB.
        host_gib: memory of the machine, GiB; None: not known, and nothing is refused for it.
        at_once: runs on the machine.

    Raises:
        ValueError: a tensor_parallel that does not suit the GPUs and the model.
        CannotCount: see `shape`.
    """
    first, blocks = specs[0], [spec["block"][1] - spec["block"][0] for spec in specs]
    samples, new = first["samples"], first["max_completion_length"]
    heat = ", ".join(f"{t:g}" for t in sorted({spec["temperature"] for spec in specs}))
    found = Sampling(
        name=name,
        runs=len(specs),
        which=f"runs {len(specs)} of up to {max(blocks)} problems, samples of each {samples}, temperatures {heat}",
        completions=sum(blocks) * samples,
        new=new,
        prompt=measures.get(first["task"]).prompt_tokens,
        gpus=gpus,
        gpu_gib=gpu_gib,
        at_once=at_once,
        host_gib=host_gib,
    )
    if config is None:
        return found
    model = shape(config)
    placed = _place_sampling(model, first, found, max(blocks))
    hours = tuple(
        sum(_block_seconds(model, found, placed, block, samples, length) for block in blocks) / 3600 / at_once
        for length in (new, MEAN_SHARE * new)
    )
    problem = placed.problem or _host_problem(model, placed, at_once, host_gib)
    return replace(found, model=model, placement=placed, hours=(hours[0], hours[1]), problem=problem)


def _place_sampling(model: Shape, spec: Mapping[str, Any], job: Sampling, block: int) -> Placement:
    """As members of ES lie on engines, since the same engines decode; on cores without a member's weights."""
    tensor_parallel = spec.get("tensor_parallel", 1)
    if job.gpus:
        engines = max(1, job.gpus // tensor_parallel)
        wanted = min(CONCURRENT, block * spec["samples"] if engines == 1 else ceil(block / engines))
        asked = {"prompts_per_step": wanted, "tensor_parallel": tensor_parallel}
        found = _place_es(model, asked, Work((), job.new, job.prompt), job.gpus, job.gpu_gib)
        return found._replace(host_memory=found.host_memory[:2])  # nobody keeps the weights at the start
    wanted, length = min(CONCURRENT, block), job.prompt + job.new
    own = Part("model, float32", 4 * model.d), Part("weights as products take them, float32", 4 * model.d)
    caches = _caches(wanted, length, wanted * length * kv_bytes(model, width=4))
    return Placement(1, 1, wanted, wanted, (), (*own, caches, _held(model.d)[0]), 1, "")


def _block_seconds(model: Shape, job: Sampling, at: Placement, block: int, samples: int, length: float) -> float:
    """Seconds of a run whose completions have this many tokens; the module's 6."""
    device, t = (GPU, at.tensor_parallel) if job.gpus else (CORE, 1)
    rows = min(at.rows, block * samples)
    if job.gpus and at.engines == 1:
        batches, prompts = ceil(block * samples / rows), block  # the prefix cache has them after the first sample
    else:
        rows = min(rows, ceil(block / at.engines))
        batches = samples * ceil(block / (rows * at.engines))
        prompts = rows if job.gpus else samples * block
    width = model.width if job.gpus else 4
    read = width * model.d / t + rows * (job.prompt + length / 2) * kv_bytes(model, t, width)
    step = device.step + max(read / device.bandwidth, 2 * model.d * rows / t / device.flops)
    return device.start + batches * length * step + prompts * job.prompt * 2 * model.d / t / device.flops


# ---- what load_or_run asks


def check(specs: Sequence[Mapping[str, Any]], *, workers: int | None = None) -> None:
    """Print the plans of training runs and of sampling among specs, equal ones once, and refuse what cannot fit.

    Args:
        specs: of runs that are about to be made, with their engine and gpus (see `train_specs`); other kinds are left
            out. With another engine than "local" 0 GPUs mean tensor_parallel of them.
        workers: processes of engine "local"; None: one per core.

    Raises:
        DoesNotFit: a run needs more memory than there is; raised when all plans are printed.
        ValueError: as `plan`; or a gradient arm with more GPUs than are visible.
    """
    from evoalign_lib.engines.processes import default_workers  # here: with it comes torch, which no plan needs

    trained, sampled = ([spec for spec in specs if spec["kind"] == kind] for kind in ("train", "sampled"))
    planned = [*trained, *sampled]
    if not planned:
        return
    seen, gpu_gib = _visible_gpus()
    runs = 1 if any(_engine(spec) != "local" for spec in planned) else min(workers or default_workers(), len(specs))
    gpus = max(map(_gpus_of, planned))
    if not seen and gpus:
        print(f"no GPU is visible here: plans assume GPUs of {GPU_GIB:g} GiB")
    problems, held = _check_training(trained, runs, seen, gpu_gib) if trained else ([], 0.0)
    problems += _check_sampling(sampled, runs, seen, gpu_gib) if sampled else []
    host_gib = _host_gib() if seen or not gpus else None
    left = None if host_gib is None else max(host_gib - held, 0.0)
    problems += judge_memory.check(trained, runs, seen, gpu_gib or GPU_GIB, left)
    if problems:
        more = f" ({len(problems) - 1} more of the plans printed do not fit.)" if len(problems) > 1 else ""
        raise DoesNotFit(problems[0] + more)
    if trained:
        print(f"{len(trained)} training runs, {runs} at once")


def _check_training(
    trained: Sequence[Mapping[str, Any]], runs: int, seen: int, gpu_gib: float
) -> tuple[list[str], float]:
    """Print the plans of training runs, equal ones once; return why some do not fit, and the host's GiB they take."""
    found: dict[Plan, list[Mapping[str, Any]]] = {}
    unknown: dict[str, str] = {}
    for spec in trained:
        options: dict[str, Any] = {"engine": _engine(spec), "gpus": _gpus_of(spec), "runs": runs}
        # members go to any machine of a cluster
        if 0 < seen < options["gpus"] and ("lora_rank" in spec or not trainers.of(spec["arm"]).has_members):
            raise ValueError(
                f"gpus={options['gpus']}: arm {spec['arm']!r} runs on one machine, and this one has {seen}."
            )
        if options["gpus"]:
            options["gpu_gib"] = gpu_gib or GPU_GIB
        if not options["gpus"] or seen:  # else the run is for another machine
            options["host_gib"] = _host_gib()
        try:
            found.setdefault(plan(_config(spec["base"]), spec, **options), []).append(spec)
        except (CannotCount, OSError) as error:
            unknown[spec["base"]] = str(error)
    for planned, own in found.items():
        seeds = sorted({spec["seed"] for spec in own})
        settings = {str(sorted((k, v) for k, v in spec.items() if k != "seed")) for spec in own}
        print(
            planned.text(f"runs {len(own)}: settings {len(settings)}, seeds {', '.join(map(str, seeds))}"), end="\n\n"
        )
    for base, reason in unknown.items():
        print(f"no plan of {base}: {reason}")
    held = max((p.runs * p.placement.processes * _total(p.placement.host_memory) for p in found), default=0.0)
    return [p.problem for p in found if p.problem], held / GIB


def _check_sampling(sampled: Sequence[Mapping[str, Any]], runs: int, seen: int, gpu_gib: float) -> list[str]:
    """Print what sampling each model takes, and all of them; return why some do not fit."""
    of_model: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for spec in sampled:
        fields = ("base", "end", "engine", "gpus", "tensor_parallel", "task", "samples", "max_completion_length")
        of_model.setdefault(tuple(spec.get(field) for field in fields), []).append(spec)
    found = []
    for own in of_model.values():
        spec, gpus = own[0], _gpus_of(own[0])
        options = {"gpus": gpus, "gpu_gib": gpu_gib or GPU_GIB, "at_once": min(runs, len(sampled))}
        options["host_gib"] = _host_gib() if not gpus or seen else None
        end = base_models.known_files().get(spec.get("end", ""))
        options["name"] = f"{spec['base']}{', end ' + str(end or spec['end']) if 'end' in spec else ''}"
        # an adapter or a ledger is of the model itself
        place = end if end and (Path(end) / "config.json").is_file() else spec["base"]
        try:
            found.append(sampling(_config(place), own, **options))
        except (CannotCount, OSError) as error:
            print(f"neither memory nor hours of {options['name']}: {error}")
            found.append(sampling(None, own, **options))
        print(found[-1].text(), end="\n\n")
    most, mean = (sum(planned.generated[i] for planned in found) for i in range(2))
    prompts = sum(planned.completions * planned.prompt for planned in found)
    hours = sum(planned.hours[0] for planned in found), sum(planned.hours[1] for planned in found)
    without = ", without the models that cannot be counted" if any(p.model is None for p in found) else ""
    print(f"sampling in all: {len(sampled)} runs, {options['at_once']} at once")
    print(f"tokens       {_tokens_in_words((most, mean), prompts)}")
    print(f"hours        {_hours_in_words(hours)}{without}")
    return [planned.problem for planned in found if planned.problem]


def colocated_share(spec: Mapping[str, Any]) -> float:
    """The share of a GPU's memory that the plan of a gradient arm has for vLLM: its copy, its caches and the reserve.

    Raises:
        DoesNotFit: what `plan` finds.

    A model whose parameters cannot be counted gets 0.3, TRL's own default.
    """
    gpu_gib = _visible_gpus()[1] or GPU_GIB
    try:
        found = plan(_config(spec["base"]), spec, gpus=spec["gpus"], gpu_gib=gpu_gib)
    except CannotCount as error:
        print(f"vLLM gets 0.3 of each GPU's memory, which is TRL's own default: {error}")
        return 0.3
    if not found.fits:
        raise DoesNotFit(found.problem)
    own = sum(part.size for part in found.placement.gpu_memory if part.of_vllm)
    return round(own / (gpu_gib * GIB), 3)


@lru_cache(maxsize=8)
def _config(base: str) -> Any:
    from transformers import AutoConfig

    place = tiny.bases_folder() / base if base in tiny.SHIPPED else base
    return AutoConfig.from_pretrained(place, trust_remote_code=False)


def _engine(spec: Mapping[str, Any]) -> str:
    """Who generates: "vllm" on GPUs, whichever engine hands the members out, else "local"."""
    return "vllm" if spec.get("engine") == "vllm" or spec.get("gpus") else "local"


def _gpus_of(spec: Mapping[str, Any]) -> int:
    return (spec.get("gpus") or spec.get("tensor_parallel", 1)) if _engine(spec) == "vllm" else 0


def _visible_gpus() -> tuple[int, float]:
    """How many GPUs there are, and the GiB of the smallest."""
    import torch

    sizes = [torch.cuda.get_device_properties(i).total_memory / GIB for i in range(torch.cuda.device_count())]
    return len(sizes), round(min(sizes, default=0.0), 1)


def _host_gib() -> float | None:
    """Memory of this machine, or of the container; None where the system does not say."""
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # Windows
        return None
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return (size if text == "max" else min(size, int(text))) / GIB
