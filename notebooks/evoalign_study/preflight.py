"""Whether a run at full scale fits, from the model's config alone: memory by component, completions, tokens, remedies.

`sweep.load_or_run` prints the plans of the training runs and of the sampling that it is about to do, and stops where
one cannot fit. No weights are read and nothing is run. Memory is that of `evoalign_lib.footprint`, on these
assumptions; of hours a plan says nothing: time one step of a run.

1. ES on vLLM: every GPU of an engine holds its share of the working copy, in the model's dtype, of the float32 master,
   and with anchor_decay of the starting weights. The KV cache is wanted for a completion of full length in each row
   that is decoded at once; where there is room for fewer rows, vLLM lets the others wait, and only less than one row is
   refused. Over an adapter there is no master: every GPU holds the adapters of a batch of members instead.
2. Gradient arms on GPUs: plain data parallel. Every GPU holds all that a method keeps (`footprint.bytes_of`), with
   several GPUs the buckets of DistributedDataParallel, and vLLM's own copy beside them. Nothing is sharded, so more
   GPUs make no model fit. An adapter has one GPU, with the base and a merged copy in float32.
3. The process that drives a run keeps on the CPU the loaded model, the float32 master and a copy of it from the start;
   of a gradient arm each process does.
4. Every completion is as long as it may be, and a prompt has the tokens that its task says (`Measures.prompt_tokens`).
5. Models beside the policy (`judge_models`) are not counted. They are loaded before a run trains: what does not fit
   fails at once.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod
from pathlib import Path
from typing import Any

from evoalign_lib import arms, footprint, tiny
from evoalign_lib.engines import memory
from evoalign_lib.engines.memory import CannotCount, Shape
from evoalign_study import base_models, measures, trainers
from evoalign_study.records import Spec

GIB = 2**30
GPU_GIB = 80.0
"""GiB of a GPU where none is visible: assumed."""
RESERVE_GIB = 4.0
"""GiB per GPU for CUDA's context, NCCL, CUDA graphs and the activations of vLLM's prefill: assumed. (vLLM's logs show
0.4 to 2.5 GiB of graphs; a batch of 16,384 tokens of a 72 B model on 8 GPUs has about 2 GiB in its MLP.)"""
CONCURRENT = 256
"""Rows decoded at once by an engine: vLLM's max_num_seqs, and `ESConfig.chunk_rows`."""
_OF_VLLM = ("rollout copy", "reserve (assumed)", "KV cache")

Memory = dict[str, float]
"""Component -> bytes."""


class DoesNotFit(ValueError):
    """A run that needs more memory than there is; the message has the numbers and what to do."""


@dataclass(frozen=True)
class Plan:
    """What one run needs. Equal plans differ in seeds and in settings that change neither memory nor work."""

    name: str
    """arm or kind, and model"""
    parameters: int
    gpus: int
    """0: on the CPU"""
    gpu_gib: float
    """memory of each GPU, GiB"""
    processes: int
    """that drive runs on the machine"""
    completions: int
    """of the run, at most"""
    new: int
    """tokens of a completion, at most"""
    prompt: int
    """tokens of a prompt, assumed"""
    wanted: int
    """completions that an engine would decode at once if it had the memory"""
    rows: int
    """as many as it has memory for"""
    gpu_memory: Memory
    """of each GPU"""
    host_memory: Memory
    """of each process that drives a run"""
    engines: int = 1
    """of vLLM, or data parallel replicas"""
    tensor_parallel: int = 1
    """GPUs of an engine"""
    host_gib: float | None = None
    """memory of the machine, GiB; None: not known"""
    problem: str = ""
    """why it does not fit, and what to do; empty where it fits"""

    def text(self, which: str = "") -> str:
        """The plan as a table for a reader; which: the runs that have it."""
        lines = [("run", f"{self.name}{which and f', {which}'}"), ("on", "CPU cores: no GPU is used")]
        if self.gpus:
            idle = self.gpus - self.engines * self.tensor_parallel
            split = f"engines {self.engines}, tensor parallel {self.tensor_parallel}{f', idle {idle}' if idle else ''}"
            lines[1] = ("on", f"{self.gpus} GPUs of {self.gpu_gib:g} GiB: {split}")
            lines += _table("each GPU", self.gpu_memory, memory.USABLE * self.gpu_gib)
        lines += _table(f"the host, each of {self.processes} processes", self.host_memory, self.host_gib)
        if self.rows < self.wanted:
            lines.append(("rows", f"{self.rows} at once on an engine, of {self.wanted}: the others wait"))
        tokens = f"at most {self.completions * self.new:,} generated a run, prompts of {self.prompt}"
        lines += [("parameters", f"{self.parameters:,}"), ("completions", f"{self.completions:,} a run")]
        lines += [("tokens", tokens), *([("DOES NOT FIT", self.problem)] if self.problem else [])]
        return "\n".join(f"{name:13}{value}" for name, value in lines)


def _table(head: str, parts: Memory, room: float | None) -> list[tuple[str, str]]:
    """Return components of memory as lines, with their sum and what there is, in GiB."""
    there = "what the machine has is not known here" if room is None else f"of {room:.1f}"
    rows = [f"{size / GIB:9.1f}  {name}" for name, size in parts.items()]
    return [("memory", f"{head}, GiB:"), *(("", row) for row in [*rows, f"{_gib(parts):9.1f}  in all, {there}"])]


def _gib(parts: Memory) -> float:
    return sum(parts.values()) / GIB


def plan(
    config: Any, spec: Spec, *, gpus: int = 1, gpu_gib: float = GPU_GIB, host_gib: float | None = None, runs: int = 1
) -> Plan:
    """Plan one run of training, or of sampling.

    Args:
        config: the model's, as for `memory.shape`.
        spec: of `train_specs` or `sampled_specs`, or a dictionary with the same settings.
        gpus: GPUs for the run; 0 on CPU cores.
        gpu_gib: memory of each GPU, GiB.
        host_gib: memory of the machine, GiB; None: not known, and nothing is refused for it.
        runs: at once on the machine.

    Raises:
        ValueError: an unknown arm or task, or a tensor_parallel that does not suit the GPUs and the model.
        CannotCount: see `memory.shape`.
    """
    model, sampled = memory.shape(config), spec.get("kind") == "sampled"
    members = sampled or trainers.of(spec["arm"]).has_members
    work = footprint.Work(1, measures.get(spec["task"]).prompt_tokens, spec["max_completion_length"], 1)
    if sampled:
        completions = (spec["block"][1] - spec["block"][0]) * spec["samples"]
    else:
        completions = prod(spec[name] for name in trainers.of(spec["arm"]).completions)
        completions *= arms.get(spec["arm"]).options.get("fitness") != "random"  # which generates none
    place = _place_members if members else _place_gradients
    placed = place(model, spec, work, gpus, gpu_gib, completions)
    host, processes = _gib(placed["host_memory"]), runs * (1 if members else max(1, gpus))
    if not placed.get("problem") and host_gib is not None and processes * host > host_gib:
        fewer, parts = int(host_gib * runs // (host * processes)), placed["host_memory"]
        placed["problem"] = (
            f"{model.d:,} parameters need {host:.1f} GiB of the host's memory in each of {processes} processes, most "
            f"of it for: {max(parts, key=parts.get)}; this machine has {host_gib:.1f} GiB. Take "
            f"{f'workers={fewer}, ' if fewer else ''}a smaller micro_batch or model, or a machine with more memory."
        )
    name, counts = f"{spec.get('arm', 'sampled')} of {spec['base']}", (completions, work.new, work.prompt)
    return Plan(name, model.d, gpus, gpu_gib, processes, *counts, host_gib=host_gib, **placed)


def _place_members(
    model: Shape, spec: Spec, work: footprint.Work, gpus: int, gpu_gib: float, completions: int
) -> dict[str, Any]:
    """The smallest tensor parallel size with a KV cache for all rows; else the one with most rows."""
    sampled, length = spec.get("kind") == "sampled", work.prompt + work.new
    rank = memory.padded_rank(spec["lora_rank"]) if "lora_rank" in spec else 0
    adapter = footprint.adapter_parameters(model, rank) if rank else 0
    together = min(memory.MEMBERS_A_BATCH, spec["population_size"]) if adapter and gpus else 1
    wanted = min(CONCURRENT, completions if sampled else together * spec["prompts_per_step"])
    start = {} if sampled else {"weights at the start, float32": 4.0 * (adapter or model.d)}
    if not gpus:
        work = footprint.Work(1, work.prompt, work.new, wanted)
        host = footprint.bytes_of("es_lora" if adapter else "es_loop", model, work) | start
        return {"wanted": wanted, "rows": wanted, "gpu_memory": {}, "host_memory": host}
    room_gib, anchored = memory.USABLE * gpu_gib, bool(spec.get("anchor_decay"))

    def held(t: int, rows: int) -> Memory:
        share = memory.rank_parameters(model, t)
        moved = {"master, float32": 4.0 * share}
        if adapter:  # each GPU may hold the whole of them
            moved = {f"adapters of {memory.MEMBERS_A_BATCH} members": memory.MEMBERS_A_BATCH * model.width * adapter}
        starts = {f"starting weights, {model.dtype}": model.width * share} if anchored else {}
        parts = {f"working copy, {model.dtype}": model.width * share} | moved | starts
        return parts | {"reserve (assumed)": RESERVE_GIB * GIB, "KV cache": rows * length * memory.kv_bytes(model, t)}

    def tokens(t: int) -> int:
        return int((room_gib - _gib(held(t, 0))) * GIB // memory.kv_bytes(model, t))

    sizes = memory.tensor_parallel_sizes(model, gpus)
    if (chosen := spec.get("tensor_parallel")) is not None:
        if chosen not in sizes:
            raise ValueError(f"tensor_parallel={chosen} does not suit {gpus} GPUs and this model: take one of {sizes}.")
        sizes = [chosen]
    t = max(sizes, key=lambda size: (min(wanted, tokens(size) // length), -size))
    rows, problem = min(wanted, max(1, tokens(t) // length)), ""
    if tokens(t) < length:
        more = next((s for s in memory.tensor_parallel_sizes(model, 1024) if tokens(s) >= length), 0)
        remedies = [f"{more} GPUs" if more > gpus else f"tensor_parallel={more}"] if more else []
        remedies += ["no anchor_decay"] * anchored
        spare = tokens(t) - work.prompt
        remedies += [f"max_completion_length={spare} or less"] if spare > 0 else []
        problem = (
            f"{model.d:,} parameters need {_gib(held(t, 1)):.1f} GiB on each GPU at tensor parallel {t}, with a KV "
            f"cache for one completion, and {room_gib:.1f} may be used. "
            f"Take {', '.join([*remedies, 'larger GPUs or a smaller model'])}."
        )
    host = {f"model, {model.dtype}": model.width * model.d, "master, float32": 4.0 * (adapter or model.d)} | start
    split = {"engines": gpus // t, "tensor_parallel": t, "rows": rows, "wanted": wanted, "problem": problem}
    return split | {"gpu_memory": held(t, rows), "host_memory": host}


def _place_gradients(
    model: Shape, spec: Spec, work: footprint.Work, gpus: int, gpu_gib: float, completions: int
) -> dict[str, Any]:
    """All on every GPU, with a KV cache for as many rows as there is room for; or all on the CPU."""
    sft, rollouts = trainers.of(spec["arm"]).samples_first, completions // spec.get("steps", 1)
    mine = ceil(rollouts / max(1, gpus))
    wanted = min(CONCURRENT, mine) if sft else mine
    micro = min(mine, spec["batch_size"] if sft else spec.get("micro_batch", rollouts))
    adapter = "lora_rank" in spec
    method = "grpo_lora" if adapter else "grpo_reference" if spec.get("beta", 0) > 0 else "grpo"

    def needs(rows: int, micro: int, gpus: int = gpus) -> Memory:
        parts = footprint.bytes_of(method, model, footprint.Work(micro, work.prompt, work.new, rows), bool(gpus))
        if adapter:  # footprint's base is in bfloat16, this project's in float32, and a merged copy is measured
            parts |= {"base and merged model, float32": 6.0 * model.d}
        if adapter and gpus:  # the model itself generates
            parts |= {"own KV cache": 2 * parts.get("KV cache", 0.0)}
        parts |= {"buckets of gradients": 4.0 * model.d} if gpus > 1 else {}
        return parts | ({"reserve (assumed)": RESERVE_GIB * GIB} if gpus else {})

    starts = dict.fromkeys(("master, float32", "weights at the start, float32"), 4.0 * model.d)
    if not gpus:
        return {"wanted": wanted, "rows": wanted, "gpu_memory": {}, "host_memory": needs(wanted, micro) | starts}
    room, problem = memory.USABLE * gpu_gib, ""
    without, one = _gib(needs(0, micro)), _gib(needs(1, micro))
    rows = min(wanted, max(1, int((room - without) // (one - without))))
    if one > room:
        divisors = [m for m in range(1, micro) if sft or mine % m == 0]
        # the last one is the largest with which all rows have their KV cache, if there is one
        smaller = [m for many in (1, wanted) for m in divisors if _gib(needs(many, m)) <= room]
        alone = gpus > 1 and _gib(needs(1, 1, gpus=1)) <= room
        remedy = f"Set {'batch_size' if sft else 'micro_batch'}={(smaller or [0])[-1]}."
        if not smaller:
            remedies = ["1 GPU, which needs no buckets"] * alone + ["a smaller max_completion_length", "larger GPUs"]
            remedy = f"Nothing is sharded: more GPUs do not help. Take {', '.join(remedies)}, a smaller model, or ES."
        problem = (
            f"{model.d:,} parameters need {one:.1f} GiB on every GPU with {micro} rows in a backward pass, and "
            f"{room:.1f} may be used. {remedy}"
        )
    host = {f"model in which it is measured, {model.dtype}": model.width * model.d} | starts
    split = {"engines": gpus, "rows": rows, "wanted": wanted, "problem": problem}
    return split | {"gpu_memory": needs(rows, micro), "host_memory": host}


# ---- what load_or_run asks


def check(specs: Sequence[Spec], *, workers: int | None = None) -> None:
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

    if not (planned := [spec for spec in specs if spec["kind"] in ("train", "sampled")]):
        return
    seen, gpu_gib = _visible_gpus()
    gpu_gib, local = gpu_gib or GPU_GIB, all(map(base_models.is_local, planned))
    runs = min(workers or default_workers(), len(specs)) if local else 1
    if not seen and any(map(_gpus_of, planned)):
        print(f"no GPU is visible here: plans assume GPUs of {GPU_GIB:g} GiB")
    plans: dict[str, tuple[Plan, list[Spec]]] = {}
    for spec in planned:
        gpus, trained = _gpus_of(spec), spec["kind"] == "train"
        # members go to any machine of a cluster
        if 0 < seen < gpus and trained and ("lora_rank" in spec or not trainers.of(spec["arm"]).has_members):
            raise ValueError(f"gpus={gpus}: arm {spec['arm']!r} runs on one machine, and this one has {seen}.")
        host_gib = _host_gib() if seen or not gpus else None  # else the run is for another machine
        try:
            config = _config(_model_of(spec))
            own = plan(config, spec, gpus=gpus, gpu_gib=gpu_gib, host_gib=host_gib, runs=runs)
            plans.setdefault(own.text(), (own, []))[1].append(spec)
        except (CannotCount, OSError) as error:
            print(f"no plan of {spec['base']}: {error}")
    for own, alike in plans.values():
        settings = {str(sorted((k, v) for k, v in spec.items() if k != "seed")) for spec in alike}
        seeds = ", ".join(str(seed) for seed in sorted({spec["seed"] for spec in alike}))
        print(own.text(f"runs {len(alike)}: settings {len(settings)}, seeds {seeds}"), end="\n\n")
    completions = sum(own.completions * len(alike) for own, alike in plans.values())
    tokens = sum(own.completions * own.new * len(alike) for own, alike in plans.values())
    problems = [own.problem for own, _ in plans.values() if own.problem]
    problems += _scorer_problems([spec for spec in planned if "reward_model" in spec], seen)
    if problems:
        more = f" ({len(problems) - 1} more of the plans printed do not fit.)" if len(problems) > 1 else ""
        raise DoesNotFit(problems[0] + more)
    print(f"{len(planned)} runs, {runs} at once: {completions:,} completions, at most {tokens:,} tokens generated")


def _scorer_problems(specs: Sequence[Spec], seen: int) -> list[str]:
    """Return why some runs cannot have their scorers where they are asked for."""
    from evoalign_study import judge_models  # here: with it comes torch

    asked = {(one.at, _gpus_of(spec)) for spec in specs for one in judge_models.of(spec) if one.at.startswith("cuda:")}
    numbered = sorted((int(at.removeprefix("cuda:")), gpus) for at, gpus in asked)
    return [
        f"scorer_device='cuda:{index}' is one of the run's {gpus} GPUs, or none of the {seen} of this machine: "
        f"take 'cuda:{gpus}' or 'cpu', or serve the models elsewhere (evoalign serve-scorer)."
        for index, gpus in numbered
        if index < gpus or 0 < seen <= index
    ]


def colocated_share(spec: Spec) -> float:
    """The share of a GPU's memory that the plan of a gradient arm has for vLLM: its copy, its caches and the reserve.

    A model whose parameters cannot be counted gets 0.3, TRL's own default.

    Raises:
        DoesNotFit: what `plan` finds.
    """
    gpu_gib = _visible_gpus()[1] or GPU_GIB
    try:
        found = plan(_config(spec["base"]), spec, gpus=spec["gpus"], gpu_gib=gpu_gib)
    except CannotCount as error:
        print(f"vLLM gets 0.3 of each GPU's memory, which is TRL's own default: {error}")
        return 0.3
    if found.problem:
        raise DoesNotFit(found.problem)
    return round(sum(size for name, size in found.gpu_memory.items() if name in _OF_VLLM) / (gpu_gib * GIB), 3)


@lru_cache(maxsize=32)
def _config(base: str) -> Any:
    from transformers import AutoConfig

    place = tiny.bases_folder() / base if base in tiny.SHIPPED else base
    return AutoConfig.from_pretrained(place, trust_remote_code=False)


def _model_of(spec: Spec) -> str:
    """Where the model lies that a run loads; an end that is an adapter or a ledger is of the base itself."""
    end = base_models.known_files().get(spec.get("end", ""))
    return end if end and (Path(end) / "config.json").is_file() else spec["base"]


def _gpus_of(spec: Spec) -> int:
    if spec.get("engine") == "vllm" or spec.get("gpus"):
        return spec.get("gpus") or spec.get("tensor_parallel", 1)
    return 0


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
