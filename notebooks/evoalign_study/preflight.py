"""Plan a run at full scale from the model's config alone: whether it fits, memory by component, completions, tokens.

`sweep.load_or_run` prints the plans of the training and sampling runs that it is about to start, and stops if one
cannot fit. No weights are read and nothing is run. A plan does not estimate hours: for those, time one step of a run.
Memory is computed by `evoalign_lib.footprint`, on these assumptions:

1. ES on vLLM: every GPU of an engine holds its share of the working copy in the model's dtype, of the float32 master
   and, with anchor_decay, of the starting weights. The KV cache should hold a completion of full length in each row
   that is decoded at once. If fewer rows fit, vLLM lets the others wait; a run is refused only if not even one row
   fits. With an adapter there is no master: every GPU holds the adapters of a batch of members instead.
2. Gradient arms on GPUs: plain data parallelism. Every GPU holds everything that a method keeps
   (`footprint.bytes_of`), vLLM's own copy and, with several GPUs, the buckets of DistributedDataParallel. Nothing is
   sharded, so more GPUs do not help a model fit. An adapter uses one GPU, with the base and a merged copy in float32.
3. The process that drives a run keeps the loaded model, the float32 master and a copy of its initial weights on the
   CPU; for a gradient arm, each process does.
4. Every completion has the maximum length, and a prompt as many tokens as its task states (`Measures.prompt_tokens`).
5. Judge and reward models loaded next to the policy (`judge_models`) are not counted. They are loaded before a run
   trains, so what does not fit fails at once.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod
from pathlib import Path
from typing import Any

from evoalign_lib import arms, footprint, tiny
from evoalign_lib.checks import require
from evoalign_lib.engines import memory
from evoalign_lib.engines.memory import CannotCount, Shape
from evoalign_study import base_models, measures, trainers
from evoalign_study.records import MAX_RECORD, Spec

GIB = 2**30
GPU_GIB = 80.0
"""Assumed memory of a GPU where none is visible, GiB."""
_PROBLEMS = ("steps", "prompts_per_step", "prompts")
RESERVE_GIB = 4.0
"""Assumed GiB per GPU for CUDA's context, NCCL, CUDA graphs and the activations of vLLM's prefill. (vLLM's logs show
0.4 to 2.5 GiB of graphs; a batch of 16,384 tokens of a 72 B model on 8 GPUs has about 2 GiB in its MLP.)"""
CONCURRENT = 256
"""Rows that an engine decodes at once: vLLM's max_num_seqs, and `ESConfig.chunk_rows`."""
_OF_VLLM = ("rollout copy", "reserve (assumed)", "KV cache")

Memory = dict[str, float]
"""Component -> bytes."""


class DoesNotFit(ValueError):
    """Raised if a run needs more memory than there is; the message has the numbers and the remedies."""


@dataclass(frozen=True)
class Plan:
    """Memory and work that one run needs. Runs with equal plans differ in seeds, or in settings that change neither."""

    name: str
    """arm or kind, and model"""
    parameters: int
    gpus: int
    """0: on the CPU"""
    gpu_gib: float
    """memory of each GPU, GiB"""
    processes: int
    """number of processes that drive runs on the machine"""
    completions: int
    """maximum number of completions in the run"""
    new: int
    """maximum tokens of a completion"""
    prompt: int
    """tokens of a prompt, assumed"""
    wanted: int
    """completions that an engine would decode at once if it had the memory"""
    rows: int
    """completions that it has the memory to decode at once"""
    gpu_memory: Memory
    """needed on each GPU"""
    host_memory: Memory
    """needed by each process that drives a run"""
    engines: int = 1
    """number of vLLM engines, or of data-parallel replicas"""
    tensor_parallel: int = 1
    """GPUs per engine"""
    host_gib: float | None = None
    """memory of the machine, GiB; None: unknown"""
    problem: str = ""
    """why it does not fit, and what to do; empty if it fits"""

    def text(self, which: str = "") -> str:
        """Return the plan as a readable table; which: the runs that have this plan."""
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
    """Return memory components as lines, with their sum and the memory that there is, in GiB."""
    there = "the memory of the machine is unknown here" if room is None else f"of {room:.1f}"
    rows = [f"{size / GIB:9.1f}  {name}" for name, size in parts.items()]
    return [("memory", f"{head}, GiB:"), *(("", row) for row in [*rows, f"{_gib(parts):9.1f}  in all, {there}"])]


def _gib(parts: Memory) -> float:
    return sum(parts.values()) / GIB


def plan(
    config: Any, spec: Spec, *, gpus: int = 1, gpu_gib: float = GPU_GIB, host_gib: float | None = None, runs: int = 1
) -> Plan:
    """Plan one training or sampling run.

    Args:
        config: the model's config, as for `memory.shape`.
        spec: from `train_specs` or `sampled_specs`, or a dictionary with the same settings.
        gpus: number of GPUs for the run; 0: CPU cores.
        gpu_gib: memory of each GPU, GiB.
        host_gib: memory of the machine, GiB; None: unknown, and no reason to refuse a run.
        runs: number of runs at once on the machine.

    Raises:
        ValueError: an unknown arm or task, a rank that no matrix has, or a tensor_parallel that does not suit the GPUs
            and the model.
        CannotCount: see `memory.shape`.
    """
    model, sampled = memory.shape(config), spec.get("kind") == "sampled"
    _check_ranks(spec, model.hidden)
    members = sampled or trainers.of(spec["arm"]).has_members
    work = footprint.Work(1, measures.get(spec["task"]).prompt_tokens, spec["max_completion_length"], 1)
    if sampled:
        completions = (spec["block"][1] - spec["block"][0]) * spec["samples"]
    else:
        completions = prod(spec[name] for name in trainers.of(spec["arm"]).completions)
        completions *= arms.get(spec["arm"]).options.get("fitness") != "random"  # a random fitness generates none
    place = _place_members if members else _place_gradients
    placed = place(model, spec, work, gpus, gpu_gib, completions)
    host, processes = _gib(placed["host_memory"]), runs * (1 if members else max(1, gpus))
    if not placed.get("problem") and host_gib is not None and processes * host > host_gib:
        fewer, parts = int(host_gib * runs // (host * processes)), placed["host_memory"]
        placed["problem"] = (
            f"{model.d:,} parameters need {host:.1f} GiB of the host's memory in each of {processes} processes, most "
            f"of it for: {max(parts, key=parts.get)}; this machine has {host_gib:.1f} GiB. Use "
            f"{f'workers={fewer}, ' if fewer else ''}a smaller micro_batch or model, or a machine with more memory."
        )
    name, counts = f"{spec.get('arm', 'sampled')} of {spec['base']}", (completions, work.new, work.prompt)
    return Plan(name, model.d, gpus, gpu_gib, processes, *counts, host_gib=host_gib, **placed)


def _place_members(
    model: Shape, spec: Spec, work: footprint.Work, gpus: int, gpu_gib: float, completions: int
) -> dict[str, Any]:
    """Place an ES or sampling run at the smallest tensor parallel size whose KV cache holds all rows, or else most."""
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
        if adapter:  # each GPU may hold all of them
            moved = {f"adapters of {memory.MEMBERS_A_BATCH} members": memory.MEMBERS_A_BATCH * model.width * adapter}
        starts = {f"starting weights, {model.dtype}": model.width * share} if anchored else {}
        parts = {f"working copy, {model.dtype}": model.width * share} | moved | starts
        return parts | {"reserve (assumed)": RESERVE_GIB * GIB, "KV cache": rows * length * memory.kv_bytes(model, t)}

    def tokens(t: int) -> int:
        return int((room_gib - _gib(held(t, 0))) * GIB // memory.kv_bytes(model, t))

    sizes = memory.tensor_parallel_sizes(model, gpus)
    if (chosen := spec.get("tensor_parallel")) is not None:
        if chosen not in sizes:
            raise ValueError(f"tensor_parallel={chosen} does not suit {gpus} GPUs and this model: use one of {sizes}.")
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
            f"cache for one completion, but only {room_gib:.1f} may be used. "
            f"Use {', '.join([*remedies, 'larger GPUs or a smaller model'])}."
        )
    host = {f"model, {model.dtype}": model.width * model.d, "master, float32": 4.0 * (adapter or model.d)} | start
    split = {"engines": gpus // t, "tensor_parallel": t, "rows": rows, "wanted": wanted, "problem": problem}
    return split | {"gpu_memory": held(t, rows), "host_memory": host}


def _place_gradients(
    model: Shape, spec: Spec, work: footprint.Work, gpus: int, gpu_gib: float, completions: int
) -> dict[str, Any]:
    """Place everything on every GPU, with a KV cache for as many rows as fit; or everything on the CPU."""
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
        # the last one is the largest at which the KV cache holds all rows, if there is one
        smaller = [m for many in (1, wanted) for m in divisors if _gib(needs(many, m)) <= room]
        alone = gpus > 1 and _gib(needs(1, 1, gpus=1)) <= room
        remedy = f"Set {'batch_size' if sft else 'micro_batch'}={(smaller or [0])[-1]}."
        if not smaller:
            remedies = ["1 GPU, which needs no buckets"] * alone + ["a smaller max_completion_length", "larger GPUs"]
            remedy = f"Nothing is sharded: more GPUs do not help. Use {', '.join(remedies)}, a smaller model, or ES."
        problem = (
            f"{model.d:,} parameters need {one:.1f} GiB on every GPU with {micro} rows in a backward pass, but only "
            f"{room:.1f} may be used. {remedy}"
        )
    host = {f"model in which it is measured, {model.dtype}": model.width * model.d} | starts
    split = {"engines": gpus, "rows": rows, "wanted": wanted, "problem": problem}
    return split | {"gpu_memory": needs(rows, micro), "host_memory": host}


# ---- the checks before runs are made


def check_settings(specs: Sequence[Spec]) -> None:
    """Raise ValueError for the first training run that would be refused only once it runs, or never end.

    Each run's trainer configuration is made, without its model; and the run must not need a million problems or more,
    completions longer than the model's context, or a record that is longer than allowed.
    """
    from evoalign_lib._model_checks import context_of  # imported here: it brings torch, which no plan needs

    for spec in {str(sorted((k, v) for k, v in spec.items() if k != "seed")): spec for spec in specs}.values():
        if spec["kind"] != "train":
            continue
        names = trainers.of(spec["arm"]).completions
        for drawn, most, what in ((_PROBLEMS, 10**6, "problems"), (names, 10**8, "completions")):
            sizes = {name: spec[name] for name in names if name in drawn}
            require(prod(sizes.values()) < most, f"{sizes}: a run takes fewer than {most:,} {what}, lower one of them.")
        trainers.check(spec)
        n, further = spec.get("test_problems") or 0, len(spec.get("sampled_at", ()))
        what = f"test_problems={n} at {further + 2} decodings do not fit into a record"
        require(n // 4 + n * (1 + further) <= MAX_RECORD, f"{what}: take fewer problems or temperatures.")
        if spec["base"] in tiny.SHIPPED:  # a trainer refuses what is too long for another model before its first step
            config, new = _config(spec["base"]), spec["max_completion_length"]
            context = context_of(config)
            require(new < context, f"max_completion_length={new}: {spec['base']!r} reads {context} tokens.")
            _check_ranks(spec, config.hidden_size)


def _check_ranks(spec: Spec, most: int) -> None:
    for name in {"rank", "lora_rank"} & spec.keys():
        what = f"{name}={spec[name]} is larger than the matrices of {spec['base']!r}, whose rank is {most} at most"
        require(spec[name] <= most, f"{what}: take a smaller one, such as 8.")


def check(specs: Sequence[Spec], *, workers: int | None = None) -> None:
    """Print the plans of the training and sampling runs among specs, equal ones once, and refuse what cannot fit.

    Args:
        specs: specs of the runs about to be made, with their engine and gpus (see `train_specs`); other kinds are
            skipped. With an engine other than "local", 0 GPUs mean tensor_parallel GPUs.
        workers: number of processes of engine "local"; None: one per core.

    Raises:
        DoesNotFit: a run needs more memory than there is; raised after all plans are printed.
        ValueError: as for `plan`; or a gradient arm has more GPUs than are visible.
    """
    from evoalign_lib.engines.processes import default_workers  # imported here: it brings torch, which no plan needs

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
        # only members can go to other machines of a cluster
        if 0 < seen < gpus and trained and ("lora_rank" in spec or not trainers.of(spec["arm"]).has_members):
            raise ValueError(f"gpus={gpus}: arm {spec['arm']!r} runs on one machine, and this one has {seen}.")
        host_gib = _host_gib() if seen or not gpus else None  # otherwise the run is for another machine
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
        more = f" ({len(problems) - 1} more of the printed plans do not fit.)" if len(problems) > 1 else ""
        raise DoesNotFit(problems[0] + more)
    print(f"{len(planned)} runs, {runs} at once: {completions:,} completions, at most {tokens:,} tokens generated")


def _scorer_problems(specs: Sequence[Spec], seen: int) -> list[str]:
    """Return why some runs cannot place their scorers on the devices that they name."""
    from evoalign_study import judge_models  # imported here: it brings torch

    asked = {(one.at, _gpus_of(spec)) for spec in specs for one in judge_models.of(spec) if one.at.startswith("cuda:")}
    numbered = sorted((int(at.removeprefix("cuda:")), gpus) for at, gpus in asked)
    return [
        f"scorer_device='cuda:{index}' is one of the run's {gpus} GPUs, or none of the {seen} of this machine: "
        f"use 'cuda:{gpus}' or 'cpu', or serve the models elsewhere (evoalign serve-scorer)."
        for index, gpus in numbered
        if index < gpus or 0 < seen <= index
    ]


def colocated_share(spec: Spec) -> float:
    """Return the share of a GPU's memory planned for vLLM in a gradient arm: its copy, its caches and the reserve.

    A model whose parameters cannot be counted gets 0.3, TRL's own default.

    Raises:
        DoesNotFit: the run does not fit.
    """
    gpu_gib = _visible_gpus()[1] or GPU_GIB
    try:
        found = plan(_config(spec["base"]), spec, gpus=spec["gpus"], gpu_gib=gpu_gib)
    except CannotCount as error:
        print(f"vLLM gets 0.3 of each GPU's memory, TRL's own default: {error}")
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
    """Return where the model that a run loads lies; if its end is an adapter or a ledger, that is the base."""
    end = base_models.known_files().get(spec.get("end", ""))
    return end if end and (Path(end) / "config.json").is_file() else spec["base"]


def _gpus_of(spec: Spec) -> int:
    if spec.get("engine") in ("cuda", "vllm") or spec.get("gpus"):
        return spec.get("gpus") or spec.get("tensor_parallel", 1)
    return 0


def _visible_gpus() -> tuple[int, float]:
    """Return the number of visible GPUs, and the memory of the smallest, GiB."""
    import torch

    sizes = [torch.cuda.get_device_properties(i).total_memory / GIB for i in range(torch.cuda.device_count())]
    return len(sizes), round(min(sizes, default=0.0), 1)


def _host_gib() -> float | None:
    """Return the memory of this machine or its container, GiB; None if the system does not say."""
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # Windows
        return None
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return (size if text == "max" else min(size, int(text))) / GIB
