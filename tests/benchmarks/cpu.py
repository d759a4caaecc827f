"""What ES costs on this machine's CPU: `make bench`, or `python -m tests.benchmarks.cpu`.

Everything is a ratio within one run: what is compared is measured interleaved, the first round discarded, minimum and
median kept; the ratio of the minima decides about a target. On cores that others use too, ratios hold better than
seconds, but not fully: the load average is recorded. A section that fails records its error and the others go on.
The report is printed, and stored under the device's name.

Models are the shipped base A0 (0.14 M parameters) and two of its architecture enlarged to 1 M and 4 M, with random
weights and the same tokenizer. Prompts and reward are Countdown's. A random model practically never ends a completion,
so that it decodes as many tokens as it may; A0 ends its own.

The "plain" arm is what a direct script does: transformers' `generate` on all prompts, the statements that released
codes share (randn in the parameter's dtype, a multiplication, an addition, tensor after tensor; to restore, the same
with a subtraction), one process.

Sections: `device`; `noise`, the passes over the weights; `iteration`, evaluating a population and moving the weights;
`low_rank`, the same with members of low rank; `account`, where an iteration's core-seconds go; `step`, a decoding step
against its matrix products alone; `memory`, peak bytes a parameter of each precision mode.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from evoalign_study import paths

from evoalign_lib import noise, tiny
from evoalign_lib.engines.decode import Decoder
from evoalign_lib.engines.local import LocalEngine, Prompts
from evoalign_lib.engines.processes import default_workers
from evoalign_lib.rewards import Rewards
from evoalign_lib.tasks import countdown
from evoalign_lib.update_rules import Member
from tests.benchmarks.shared import measure, merge, public_perturb, run_sections

SIGMA, ALPHA = 1e-2, 5e-3  # about those of the tiny runs; the cost depends on neither
# Sizes of A0's architecture: what differs from its configuration.
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
MODELS: dict[str, dict[str, int]] = {
    "0.14M": {},
    "1M": dict(zip(_SIZES, (128, 512, 4, 4, 1), strict=True)),
    "4M": dict(zip(_SIZES, (256, 1024, 4, 4, 2), strict=True)),
    "20M": dict(zip(_SIZES, (512, 2048, 5, 8, 4), strict=True)),
}


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    models: tuple[str, ...] = ("0.14M", "1M", "4M")
    rows: tuple[int, ...] = (16, 200)  # prompts a member
    members: int = 6  # the cost is linear in them
    new: int = 20  # tokens a completion at most
    repeats: int = 5
    quick_repeats: int = 15  # of what takes milliseconds
    accounted: tuple[str, int] = ("1M", 200)  # the cell whose share of generation has a target
    memory: str = "20M"  # large enough for its weights to stand out
    modes: tuple[tuple[str, str], ...] = (
        ("master", "float32"),
        ("master", "bfloat16"),
        ("kahan", "bfloat16"),
        ("inplace", "bfloat16"),
    )  # precision mode and the model's dtype
    low_rank: tuple[tuple[int, int], ...] = ((1, 256), (128, 6))  # prompts a member, and members
    low_rank_models: tuple[str, ...] = ("1M", "4M")
    ranks: tuple[int, ...] = (1, 4, 16)
    own_members: int = 32  # with matrices of their own, of which each takes as long as any other
    default_threads: bool = True  # an arm that takes minutes where others use the cores

    def repeats_of(self, model: str, rows: int) -> int:
        """Three for the largest cell, which takes half a minute a round."""
        return min(3, self.repeats) if (model, rows) == ("4M", 200) else self.repeats


_ONCE: dict[str, Any] = {"repeats": 1, "quick_repeats": 1, "members": 2, "new": 4, "default_threads": False}
_SMALL: dict[str, Any] = {"models": ("0.14M",), "rows": (9,), "accounted": ("0.14M", 9), "memory": "4M"}
_FEW: dict[str, Any] = {"low_rank": ((1, 6), (2, 6)), "low_rank_models": ("0.14M",), "ranks": (2,)}
QUICK = Plan(modes=(("master", "float32"),), **_ONCE, **_SMALL, **_FEW)


# Models, prompts, members


@lru_cache(maxsize=1)
def base() -> tuple[Any, Any]:
    return tiny.load("A0")


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model of its own, so that nobody's changes are another's."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shipped, _ = base()
    settings = dict(MODELS[name])
    layers = settings.get("num_hidden_layers", shipped.config.num_hidden_layers)
    config = Qwen2Config(**shipped.config.to_dict() | settings | {"layer_types": ["full_attention"] * layers})
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = Qwen2ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    if not settings:
        model.load_state_dict(shipped.state_dict())
    return model


def parameters_of(model: Any) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in model.parameters()]


@lru_cache(maxsize=4)
def prompts(n: int) -> Prompts:
    _, tokenizer = base()
    return Prompts(countdown.dataset(tiny.problems("train", n), tokenizer), tokenizer)


def population(n: int) -> tuple[list[Member], np.ndarray, np.ndarray]:
    """Members, and the keys and coefficients of their update."""
    root = noise.run_key("benchmark", 0)
    keys = np.array([noise.member_key(root, 0, i) for i in range(n)], np.uint64)
    z = np.random.default_rng(0).standard_normal(n)
    return [Member(int(key)) for key in keys], keys, (ALPHA / n * z).astype(np.float32)


def engine_of(model: Any, rows: int, plan: Plan, reward: Callable = countdown.reward, **settings: Any) -> LocalEngine:
    _, tokenizer = base()
    chosen = {"train": prompts(rows)}
    return LocalEngine(model, tokenizer, Rewards(reward), chosen, max_completion_length=plan.new, **settings)


def target(what: str, value: float, least: float | None = None, most: float | None = None) -> dict[str, Any]:
    met = (least is None or value >= least) and (most is None or value <= most)
    bound = f"at least {least}" if least is not None else f"at most {most}"
    return {"what": what, "value": round(value, 4), "target": bound, "met": bool(met)}


def ratios(times: dict[str, dict[str, float]], slow: str, fast: str) -> dict[str, float]:
    return {k: times[slow][f"seconds_{k}"] / times[fast][f"seconds_{k}"] for k in ("min", "median")}


# Sections


def device_section(plan: Plan) -> dict:
    import numba
    import transformers

    try:
        describe = ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
        commit = subprocess.run(describe, cwd=paths.ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    return {
        "cpu": cpu_name(),
        "cores": default_workers(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch_default_threads": default_threads(),
        "load_average_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numba": numba.__version__,
        "numpy": np.__version__,
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def device_name() -> str:
    return f"{cpu_name()}, {default_workers()} cores, {torch.backends.cpu.get_cpu_capability()}"


@lru_cache(maxsize=1)
def default_threads() -> int:
    """The threads that torch takes if nobody says anything."""
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    command = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]
    return int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


@contextlib.contextmanager
def threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Passes:
    """The passes over one model's weights, ours and the public ones, for the same population."""

    def __init__(self, name: str, dtype: torch.dtype, plan: Plan):
        model = build(name, dtype)
        self.tensors, self.layout = parameters_of(model), layout_of(model)
        self.members, self.keys, self.coefficients = population(plan.members)
        self.master = np.zeros(self.layout.size, np.float32)
        for view, tensor in zip(self.layout.views(self.master).values(), self.tensors, strict=True):
            view[...] = tensor.float().numpy()
        # a working copy a core, and its parameters as tensors
        self.working = [np.empty_like(self.master) for _ in range(2)]
        self.views = [torch.from_numpy(view) for view in self.layout.views(self.working[0]).values()]

    def perturb(self, members: list[Member] | None = None, core: int = 0) -> None:
        for member in self.members if members is None else members:
            noise.perturb(self.working[core], self.master, self.layout, member.key, SIGMA, member.sign)
            if self.tensors[0].dtype != torch.float32:  # a model in half precision computes with rounded weights
                for tensor, view in zip(self.tensors, self.views, strict=True):
                    tensor.copy_(view)

    def update(self, part: tuple[int, int] = (0, 1)) -> None:
        noise.update(self.master, self.layout, self.keys, self.coefficients, part)

    def public(self) -> None:
        for i in range(len(self.members)):
            public_perturb(self.tensors, i, SIGMA)
            public_perturb(self.tensors, i, SIGMA, subtract=True)

    def public_update(self) -> None:
        for i, coefficient in enumerate(self.coefficients.tolist()):
            public_perturb(self.tensors, i, coefficient)


def noise_section(plan: Plan) -> dict:
    """Passes over the weights, in millions of parameters a second and member."""
    cells: dict[str, dict] = {}
    targets = []
    with ThreadPoolExecutor(2) as pool:
        for name in plan.models:
            for dtype in (torch.float32, torch.bfloat16):
                passes = Passes(name, dtype, plan)
                cases: dict[str, Callable] = {
                    "public": passes.public,
                    "perturb": passes.perturb,
                    "public_update": passes.public_update,
                    "update": passes.update,
                }
                if two := dtype == torch.float32 and default_workers() > 1:
                    halves = passes.members[0::2], passes.members[1::2]
                    cases["perturb_on_two"] = lambda p=passes, halves=halves: list(pool.map(p.perturb, halves, (0, 1)))
                    cases["update_on_two"] = lambda p=passes: list(pool.map(p.update, [(0, 2), (1, 2)]))
                times = measure(plan.quick_repeats, cases)
                d = passes.layout.d
                rate = {case: plan.members * d / seen["seconds_min"] / 1e6 for case, seen in times.items()}
                perturb, update = ratios(times, "public", "perturb"), ratios(times, "public_update", "update")
                cell = f"{name} {str(dtype).removeprefix('torch.')}"
                cells[cell] = {
                    "parameters": d,
                    "perturb_restore_public": rate["public"],
                    "perturb_restore_ours": rate["perturb"],
                    "ratio": perturb["min"],
                    "ratio_median": perturb["median"],
                    "update_public": rate["public_update"],
                    "update_ours": rate["update"],
                    "update_ratio": update["min"],
                    "update_ratio_median": update["median"],
                }
                targets += [
                    target(f"perturb and restore, {cell}: times the public rate", perturb["min"], least=9),
                    target(f"update, {cell}: times the public rate", update["min"], least=5),
                ]
                for what in ("perturb", "update") if two else ():
                    gain = ratios(times, what, f"{what}_on_two")
                    cells[cell] |= {f"{what}_second_core": gain["min"], f"{what}_second_core_median": gain["median"]}
                    targets.append(target(f"{what}, {cell}: gain of the second core", gain["min"], least=1.8))
    return {
        "about": "rates in Mparam/s a member; a public update is one such pass a member; ours for bfloat16 perturbs "
        "the float32 master and rounds; two cores are two threads, as the kernels do not hold Python's lock",
        "cells": cells,
        "targets": targets,
    }


def layout_of(model: Any) -> noise.Layout:
    return noise.Layout.from_shapes((name, tuple(p.shape)) for name, p in model.named_parameters())


class Plain:
    """The direct script: one iteration with transformers and the public statements."""

    def __init__(self, model: Any, rows: int, plan: Plan):
        self.model, self.tensors, self.prompts = model, parameters_of(model), prompts(rows)
        self.plan, (_, self.tokenizer) = plan, base()
        self.ids, self.mask = torch.from_numpy(self.prompts.ids), torch.from_numpy(self.prompts.mask)
        self.coefficients = population(plan.members)[2].tolist()

    def generate(self, **changed: Any) -> torch.Tensor:
        """New token ids, (rows, at most plan.new)."""
        settings = {"max_new_tokens": self.plan.new, "pad_token_id": self.tokenizer.pad_token_id} | changed
        new = self.model.generate(input_ids=self.ids, attention_mask=self.mask, do_sample=False, **settings)
        return new[:, self.ids.shape[1] :]

    def __call__(self) -> None:
        for i in range(self.plan.members):
            public_perturb(self.tensors, i, SIGMA)
            texts = self.tokenizer.batch_decode(self.generate(), skip_special_tokens=True)
            countdown.reward(self.prompts.prompts, texts, **self.prompts.columns)
            public_perturb(self.tensors, i, SIGMA, subtract=True)
        for i, coefficient in enumerate(self.coefficients):
            public_perturb(self.tensors, i, coefficient)


def same_tokens(plain: Plain, plan: Plan) -> float:
    """Share of prompts whose greedy tokens are the same in both arms, for the plain arm's first member."""
    before = [tensor.clone() for tensor in plain.tensors]
    public_perturb(plain.tensors, 0, SIGMA)
    engine = engine_of(plain.model, len(plain.prompts), plan)
    (ours,) = engine.generate("train")
    new = plain.generate().tolist()
    for tensor, was in zip(plain.tensors, before, strict=True):
        tensor.copy_(was)
    pad = plain.tokenizer.pad_token_id
    agree = [raw == row[: len(raw)] and set(row[len(raw) :]) <= {pad} for (_, raw), row in zip(ours, new, strict=True)]
    return sum(agree) / len(agree)


def iteration_section(plan: Plan) -> dict:
    """Evaluate a population and move the weights: LocalEngine with a worker a core, against the plain script."""
    cells, account, targets = {}, {}, []
    members, keys, coefficients = population(plan.members)
    many = default_threads()
    for name in plan.models:
        for rows in plan.rows:
            cell, repeats = f"{name}, {rows} prompts", plan.repeats_of(name, rows)
            plain, other = Plain(build(name), rows, plan), Plain(build(name), rows, plan)
            agreement = same_tokens(plain, plan)
            engine = engine_of(build(name), rows, plan, workers=default_workers())
            alone = engine_of(build(name), rows, plan)
            lengths: list[np.ndarray] = []

            def ours(engine=engine, rows=rows, lengths=lengths) -> None:
                evaluations = engine.evaluate(members, SIGMA, "train", np.arange(rows))
                engine.update(keys, coefficients)
                lengths[:] = [evaluation.lengths for evaluation in evaluations]

            def with_default_threads(other=other) -> None:
                with threads(many):
                    other()

            cases = {"ours": ours, "plain": plain, "one_worker": partial(ours, alone)}
            if plan.default_threads:
                cases["default"] = with_default_threads
            try:
                times = measure(repeats, cases, fewer={"default": 1})
            finally:
                engine.close()
            one = ratios(times, "plain", "ours")
            cells[cell] = {
                "ours_s": times["ours"]["seconds_min"],
                "ours_s_median": times["ours"]["seconds_median"],
                "plain_s": times["plain"]["seconds_min"],
                "plain_s_median": times["plain"]["seconds_median"],
                "ratio": one["min"],
                "ratio_median": one["median"],
                "tokens_a_completion": float(np.mean(lengths)),
                "same_tokens": agreement,
                "repeats": repeats,
            }
            if plan.default_threads:
                cells[cell]["ratio_default_threads"] = ratios(times, "default", "ours")["min"]
            account[cell] = {
                "ratio with one worker": ratios(times, "plain", "one_worker")["min"],
                f"gain of {engine.workers} workers": ratios(times, "one_worker", "ours")["min"],
            }
            least = 3 if rows > 16 else 5
            targets.append(target(f"iteration, {cell}: times the plain script", one["min"], least=least))
            targets.append(target(f"tokens, {cell}: share equal in both arms", agreement, least=1))
    return {
        "about": f"{plan.members} members, at most {plan.new} new tokens; the plain script at torch's default of "
        f"{many} threads is many times slower where others use the cores, so it is measured in one round only",
        "cells": cells,
        "targets": targets,
        "account": account,
    }


def low_rank_section(plan: Plan) -> dict:
    """Evaluate a population and move the weights: low-rank members in batches, against full-rank members."""
    cells, targets = {}, []
    for name in plan.low_rank_models:
        for rows, n in plan.low_rank:
            indices, cases, sizes, engines = np.arange(rows), {}, {}, []
            for rank in (0, *plan.ranks):
                # as many batches as workers, where one batch has room for all members
                chunk = 256 if rank == 0 else min(256, max(4 * rows, -(-n // default_workers()) * rows))
                engine = engine_of(build(name), rows, plan, rank=rank, workers=default_workers(), chunk_rows=chunk)
                size = n if rank else min(n, plan.own_members)
                members, keys, coefficients = population(size)

                def iteration(engine=engine, members=members, update=(keys, coefficients), indices=indices) -> None:
                    engine.evaluate(members, SIGMA, "train", indices)
                    engine.update(*update)

                cases[f"rank {rank}" if rank else "full rank"] = iteration
                sizes[f"rank {rank}" if rank else "full rank"] = size
                engines.append(engine)
            try:
                times = measure(min(3, plan.repeats), cases)
            finally:
                for engine in engines:
                    engine.close()
            rates = {
                kind: {case: sizes[case] * rows / times[case][f"seconds_{kind}"] for case in cases}
                for kind in ("min", "median")
            }
            cell = f"{name}, {n} members of {rows} prompts"
            cells[cell] = {f"completions_a_second, {case}": rate for case, rate in rates["min"].items()}
            for kind, suffix in (("min", ""), ("median", "_median")):
                found = rates[kind]
                cells[cell] |= {f"ratio{suffix}, {c}": found[c] / found["full rank"] for c in found if c != "full rank"}
            agreement = same_members(name, rows, min(n, 16), plan)
            cells[cell]["same_tokens"] = agreement
            first = plan.ranks[0]
            least = {1: 4.0, 128: 1.0}.get(rows)
            if least and name in Plan.low_rank_models:
                ratio = cells[cell][f"ratio, rank {first}"]
                targets.append(target(f"rank {first}, {cell}: times full rank", ratio, least=least))
            targets.append(target(f"tokens, {cell}: share equal to those of own matrices", agreement, least=1))
    return {
        "about": f"at most {plan.new} new tokens, one worker a core; full-rank members are at most {plan.own_members}, "
        "since each takes as long as any other; members of low rank that share no chunk have matrices of their own",
        "cells": cells,
        "targets": targets,
    }


def same_members(name: str, rows: int, n: int, plan: Plan) -> float:
    """Share of completions that low-rank members write in a batch as with matrices of their own."""
    members, _, _ = population(n)
    seen: list[list] = []
    for chunk in (256, rows):  # room for many, and for one
        tokens: list = []

        def reward(prompts, completions, numbers, target, completion_ids, tokens=tokens, **columns):
            tokens += completion_ids
            return countdown.reward(prompts, completions, numbers, target, **columns)

        engine = engine_of(build(name), rows, plan, reward, rank=plan.ranks[0], chunk_rows=chunk)
        engine.evaluate(members, SIGMA, "train", np.arange(rows))
        seen.append(tokens)
    return float(np.mean([a == b for a, b in zip(*seen, strict=True)]))


# The parts of an iteration inside a worker that `accounted` times, in its shared memory's order.
PARTS = ("perturb", "generate", "reward")


@contextlib.contextmanager
def accounted(reward: Callable) -> Iterator[tuple[Callable, Any, Any]]:
    """Count CPU seconds and calls of the parts, in this process and in those that it forks.

    Yields:
        The reward function to use instead, the seconds and the calls, shared arrays in the order of PARTS.
    """
    context = multiprocessing.get_context("fork")
    seconds, calls = context.Array("d", len(PARTS)), context.Array("q", len(PARTS))

    def counting(part: str, function: Callable) -> Callable:
        i = PARTS.index(part)

        def timed(*arguments: Any, **named: Any) -> Any:
            start = time.process_time()
            result = function(*arguments, **named)
            spent = time.process_time() - start
            with seconds.get_lock():
                seconds[i] += spent
                calls[i] += 1
            return result

        return timed

    def scoring(prompts, completions, numbers, target, **columns):
        return timed_reward(prompts, completions, numbers, target, **columns)

    timed_reward = counting("reward", reward)
    perturb, generate = noise.perturb, Decoder.generate
    noise.perturb, Decoder.generate = counting("perturb", perturb), counting("generate", generate)
    try:
        yield scoring, seconds, calls
    finally:
        noise.perturb, Decoder.generate = perturb, generate


def account_section(plan: Plan) -> dict:
    """Core-seconds of an iteration by part; prompts are tokenised once a run, before it."""
    cells, targets = {}, []
    members, keys, coefficients = population(plan.members)
    for name in plan.models:
        for rows in plan.rows:
            with accounted(countdown.reward) as (reward, seconds, calls):
                engine = engine_of(build(name), rows, plan, reward, workers=default_workers())
                rounds = []
                for _ in range(plan.repeats_of(name, rows) + 1):
                    seconds[:], calls[:] = [0.0] * len(PARTS), [0] * len(PARTS)
                    wall, parent = time.perf_counter(), time.process_time()
                    evaluations = engine.evaluate(members, SIGMA, "train", np.arange(rows))
                    evaluated, parent = time.perf_counter() - wall, time.process_time() - parent
                    start = time.process_time()
                    engine.update(keys, coefficients)
                    update = time.process_time() - start
                    wall = time.perf_counter() - wall
                    if min(calls[:]) < plan.members:
                        raise RuntimeError(f"the parts were called {calls[:]} times for {plan.members} members")
                    inside = sum(evaluation.core_seconds for evaluation in evaluations)
                    parts = dict(zip(PARTS, seconds[:], strict=True))
                    parts["detokenise and the rest"] = inside - sum(parts.values())
                    # with one worker the members' work is the parent's own
                    parts["pool"] = max(0.0, parent - (inside if engine.workers == 1 else 0.0))
                    parts["update"] = update
                    waiting = engine.workers * evaluated - inside + (engine.workers - 1) * (wall - evaluated)
                    rounds.append((sum(parts.values()), parts, waiting / (engine.workers * wall)))
                engine.close()
            total, parts, _ = min(rounds[1:], key=lambda r: r[0])
            shares = [1 - r[1]["generate"] / r[0] for r in rounds[1:]]
            cell = f"{name}, {rows} prompts"
            cells[cell] = {
                "core_seconds": total,
                "not_generation": (share := 1 - parts["generate"] / total),
                "not_generation_median": float(np.median(shares)),
                **{part: value / total for part, value in parts.items()},
                "cores_waiting": min(r[2] for r in rounds[1:]),
            }
            if (name, rows) == plan.accounted:
                targets.append(target(f"iteration, {cell}: share that is not generation", share, most=0.03))
    return {
        "about": "shares of the CPU time of parent and workers, of the round that took least; 'pool' is the parent's "
        "share of an evaluation; 'cores_waiting' is the share of cores x wall time in which a worker computes nothing: "
        "uneven numbers of members, the update on one core, and other processes on this machine",
        "cells": cells,
        "targets": targets,
    }


def step_section(plan: Plan) -> dict:
    """A decoding step of the loop against the best single matrix products of its shapes."""
    cells, account, targets = {}, {}, []
    for name in plan.models:
        model = build(name)
        weights = {n: p.detach() for n, p in model.named_parameters()}
        for rows in plan.rows:
            chosen = prompts(rows)
            ids, mask = torch.from_numpy(chosen.ids), torch.from_numpy(chosen.mask)
            nobody = [model.config.vocab_size]  # no token ends a completion, so that every step is a full one
            decoder = Decoder(model.config, weights, nobody, model.config.pad_token_id)
            plain = Plain(model, rows, plan)
            cases: dict[str, Callable] = {}
            for n in (1, plan.new):
                cases[f"{n}"] = partial(decoder.generate, ids, mask, n)
                cases[f"plain {n}"] = partial(plain.generate, max_new_tokens=n, eos_token_id=nobody)
            products = products_of(model, rows, chosen.width + plan.new // 2)
            flat = {f"{kind}: {how}": call for kind, ways in products.items() for how, call in ways.items()}
            with torch.inference_mode():
                rare = {f"plain {n}": plan.repeats_of(name, rows) for n in (1, plan.new)}
                times = measure(plan.quick_repeats, cases | flat, fewer=rare)
            first = times["1"]
            step, plain_step = (
                {k: (times[f"{arm}{plan.new}"][k] - times[f"{arm}1"][k]) / (plan.new - 1) for k in first}
                for arm in ("", "plain ")
            )
            best = {kind: min(ways, key=lambda how, kind=kind: times[f"{kind}: {how}"]["seconds_min"])
                    for kind, ways in products.items()}  # fmt: skip
            cost = {k: {kind: times[f"{kind}: {how}"][k] for kind, how in best.items()} for k in first}
            floor = {k: sum(cost[k].values()) for k in first}
            cell = f"{name}, {rows} rows"
            cells[cell] = {
                "step_ms": 1e3 * step["seconds_min"],
                "step_ms_median": 1e3 * step["seconds_median"],
                "floor_ms": 1e3 * floor["seconds_min"],
                "floor_ms_median": 1e3 * floor["seconds_median"],
                "ratio": step["seconds_min"] / floor["seconds_min"],
                "ratio_median": step["seconds_median"] / floor["seconds_median"],
                "prompt_and_first_token_ms": 1e3 * first["seconds_min"],
                "plain_step_ms": 1e3 * plain_step["seconds_min"],
                "plain_prompt_and_first_token_ms": 1e3 * times["plain 1"]["seconds_min"],
            }
            account[cell] = {f"floor: {kind} ({best[kind]}), ms": 1e3 * s for kind, s in cost["seconds_min"].items()}
            targets.append(target(f"decoding step, {cell}: times its floor", cells[cell]["ratio"], most=2))
    return {
        "about": f"mean step of {plan.new} tokens after {prompts(plan.rows[-1]).width} of the prompt",
        "cells": cells,
        "targets": targets,
        "account": account,
    }


def products_of(model: Any, rows: int, length: int) -> dict[str, dict[str, Callable[[], Any]]]:
    """The matrix products of one decoding step, each in several equivalent formulations, every layer's own operands.

    Args:
        model: gives the shapes.
        rows: of the batch.
        length: keys and values a row, this step's included.
    """
    config = model.config
    h, f, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    kv_heads, group = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
    head = h // config.num_attention_heads
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    found: dict[str, dict[str, Callable]] = {}
    for kind, out, into, n in (
        ("qkv", h + 2 * kv_heads * head, h, layers),
        ("attention output", h, h, layers),
        ("gate and up", 2 * f, h, layers),
        ("down", h, f, layers),
        ("head", config.vocab_size, h, 1),
    ):
        x, x_columns, matrices = numbers(rows, into), numbers(into, rows), [numbers(out, into) for _ in range(n)]
        transposed = [matrix.t().contiguous() for matrix in matrices]
        found[kind] = {
            "x W'": lambda x=x, matrices=matrices: [F.linear(x, m) for m in matrices],
            "x W, transposed once": lambda x=x, matrices=transposed: [x @ m for m in matrices],
            "W x": lambda x=x_columns, matrices=matrices: [m @ x for m in matrices],
        }
    q = numbers(rows, kv_heads, group, head)
    keys, values = ([numbers(rows, kv_heads, length, head) for _ in range(layers)] for _ in range(2))
    keys_columns = [k.transpose(2, 3).contiguous() for k in keys]
    p = numbers(rows, kv_heads, group, length)

    def both(products: list[torch.Tensor]) -> list[torch.Tensor]:
        return [p @ v for v in values] + products

    found["attention products"] = {
        "q k'": lambda: both([q @ k.transpose(2, 3) for k in keys]),
        "q k, transposed once": lambda: both([q @ k for k in keys_columns]),
        "k q'": lambda: both([k @ q.transpose(2, 3) for k in keys]),
        "fused": lambda: [F.scaled_dot_product_attention(q, k, v) for k, v in zip(keys, values, strict=True)],
    }
    return found


def memory_section(plan: Plan) -> dict:
    """Peak bytes a parameter of each precision mode, each in a process of its own."""
    cells, errors = {}, []
    for precision, dtype in plan.modes:
        cell = f"{precision}, a {dtype} model"
        if not isinstance(getattr(torch, dtype, None), torch.dtype):  # before a process is started for it
            errors.append(f"{cell}: torch has no dtype {dtype!r}")
            continue
        command = [
            sys.executable,
            "-c",
            f"from tests.benchmarks import cpu; cpu.memory_child{plan.memory, precision, dtype}",
        ]
        # Large tensors come from the system and return to it, whatever the process allocated before.
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        done = subprocess.run(command, cwd=paths.ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            errors.append(f"{cell}: {(done.stderr.strip() or 'no output').splitlines()[-1]}")
        else:
            cells[cell] = json.loads(done.stdout.splitlines()[-1])
    found: dict[str, Any] = {
        "about": "resident memory of one process over that before the model was built: with the model at rest, with "
        "the engine at rest, and the peak of evaluating two members (one prompt, one token) and an update; each "
        "further worker adds its working copy and what its decoder joins or converts",
        "cells": cells,
    }
    return found | ({"error": "; ".join(errors)} if errors else {})


def memory_child(name: str, precision: str, dtype: str) -> None:
    """Print the memory of one mode as JSON; runs alone in a process."""
    torch.set_num_threads(1)
    kind = getattr(torch, dtype)
    # the default needs no keyword
    settings = {} if precision == "master" else {"precision": precision}
    plan, (members, keys, coefficients) = Plan(new=1), population(2)

    def work(model: Any) -> LocalEngine:
        engine = engine_of(model, 1, plan, **settings)
        resident.append(status("VmRSS"))
        engine.evaluate(members, SIGMA, "train", np.arange(1))
        engine.update(keys, coefficients)
        return engine

    resident: list[int] = []
    work(build("0.14M", kind))  # what is loaded and compiled once is no weight's
    gc.collect()
    resident.clear()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts anew from here
    model = build(name, kind)
    d = sum(tensor.numel() for tensor in parameters_of(model))
    built = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    work(model)
    peak = status("VmHWM")
    used = {"model": built, "engine_at_rest": resident[0], "peak": peak}
    print(json.dumps({"parameters": d} | {what: (bytes_ - before) / d for what, bytes_ in used.items()}))


def status(field: str) -> int:
    """A line of this process's /proc/self/status, bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}: this section needs Linux")


SECTIONS: dict[str, Callable[[Plan], dict]] = {
    "device": device_section,
    "noise": noise_section,
    "iteration": iteration_section,
    "low_rank": low_rank_section,
    "account": account_section,
    "step": step_section,
    "memory": memory_section,
}


# Report


def show(name: str, found: dict) -> None:
    """Print a section: its numbers as a table, its targets, the account of what limits it."""
    print(f"\n== {name} ({found['section_seconds']} s)")
    if "error" in found:
        print(f"FAILED: {found['error']}")
    for key, value in found.items():
        if key not in ("about", "cells", "targets", "account", "error", "section_seconds"):
            print(f"{key}: {value}")
    if "about" in found:
        print(found["about"])
    for cell, row in found.get("cells", {}).items():
        print(f"  {cell}: " + ", ".join(f"{key} {value:.4g}" for key, value in row.items()))
    for entry in found.get("targets", []):
        verdict = "met" if entry["met"] else "MISSED"
        print(f"  {verdict:6} {entry['what']}: {entry['value']:.4g} (target {entry['target']})")
    for key, value in found.get("account", {}).items():
        inside = ", ".join(f"{k} {v:.3g}" for k, v in value.items()) if isinstance(value, dict) else value
        print(f"  account of {key}: {inside if isinstance(inside, str) else f'{inside:.3g}'}")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.cpu", description=__doc__.split("\n")[0])
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="the smallest cells once, not stored: shows that all runs")
    parser.add_argument("--out", type=Path, help="JSON file to merge into (default: paper/results/bench.json)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    plan = QUICK if options.quick else Plan()
    out = options.out or (None if options.quick else paths.RESULTS / "bench.json")

    whole = set(options.sections) == set(SECTIONS)

    def store(results: dict) -> None:
        if out is not None:
            merge(out, device_name(), "cpu", results, replace=whole)

    with threads(1):
        results = run_sections({name: partial(SECTIONS[name], plan) for name in options.sections}, show, store)
    return int(any("error" in found for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
