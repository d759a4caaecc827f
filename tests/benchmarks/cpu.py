"""Measure the cost of ES on this machine's CPU: `make bench`, or `python -m tests.benchmarks.cpu`.

Results are ratios within one run: the cases to compare are measured interleaved, the first round is discarded, minimum
and median are kept, and targets are judged by the ratio of the minima. On cores that others use too, ratios are more
stable than seconds, but not fully: the load average is recorded. If a section fails, its error is recorded and the
others are still run. The report is printed, and stored under the device's name.

Models are the shipped base A0 (0.14 M parameters) and its architecture enlarged to 1 M and 4 M, with random weights and
the same tokenizer. Prompts and reward are Countdown's. A random model hardly ever ends a completion, so it decodes the
maximum number of tokens; A0 does end its completions.

The "plain" arm is a straightforward script in one process: transformers' `generate` on all prompts, and the statements
that released codes share (randn in the parameter's dtype, a multiplication, an addition, tensor after tensor; to
restore, the same with a subtraction).

Sections: `device`; `noise`, the passes over the weights; `iteration`, evaluating a population and moving the weights;
`low_rank`, the same with members of low rank. The study's kind `memory` measures bytes per parameter.
"""

import argparse
import contextlib
import datetime
import itertools
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from evoalign_study import paths, provenance
from evoalign_study.kinds import memory

from evoalign_lib import noise, tiny
from evoalign_lib.engines.local import LocalEngine, Prompts
from evoalign_lib.engines.processes import default_workers, threads
from evoalign_lib.precision import layout_of, open_weights
from evoalign_lib.rewards import Rewards
from evoalign_lib.tasks import countdown
from evoalign_lib.update_rules import Member
from tests.benchmarks.shared import measure, merge, population, public_perturb, public_update, run_sections

SIGMA = 1e-2  # about the value in the tiny runs; the cost does not depend on it


@dataclass(frozen=True)
class Plan:
    """How much the benchmark measures."""

    models: tuple[str, ...] = ("0.14M", "1M", "4M")
    rows: tuple[int, ...] = (16, 200)  # prompts per member
    members: int = 6  # the cost is linear in them
    new: int = 20  # most tokens per completion
    repeats: int = 5
    quick_repeats: int = 15  # for cases that take milliseconds
    low_rank: tuple[tuple[int, int], ...] = ((1, 256), (128, 6))  # prompts per member, and members
    low_rank_models: tuple[str, ...] = ("1M", "4M")
    ranks: tuple[int, ...] = (1, 4, 16)
    own_members: int = 32  # full-rank members in the low_rank section; each takes the same time

    def repeats_of(self, model: str, rows: int) -> int:
        """Return the number of repeats: at most three for the largest cell, which takes half a minute a round."""
        return min(3, self.repeats) if (model, rows) == ("4M", 200) else self.repeats


_SMALL: dict[str, Any] = {"models": ("0.14M",), "rows": (9,)}
_SMALL |= {"repeats": 1, "quick_repeats": 1, "members": 2, "new": 4}
_SMALL |= {"low_rank": ((1, 6), (2, 6)), "low_rank_models": ("0.14M",), "ranks": (2,)}
QUICK = Plan(**_SMALL)


# Models, prompts


@lru_cache(maxsize=1)
def base() -> tuple[Any, Any]:
    return tiny.load("A0")


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Build a new model each time, so that changes to one do not affect another."""
    return memory.build(name, str(dtype).removeprefix("torch."))[0]


def parameters_of(model: Any) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in model.parameters()]


@lru_cache(maxsize=4)
def prompts(n: int) -> Prompts:
    _, tokenizer = base()
    return Prompts(countdown.dataset(tiny.problems("train", n), tokenizer), tokenizer)


def engine_of(model: Any, rows: int, plan: Plan, **settings: Any) -> LocalEngine:
    chosen, settings = {"train": prompts(rows)}, {"max_completion_length": plan.new} | settings
    return LocalEngine(model, base()[1], Rewards(countdown.reward), chosen, **settings)


# Results


def target(what: str, value: float, least: float) -> dict[str, Any]:
    return {"what": what, "value": round(float(value), 4), "target": f"at least {least}", "met": bool(value >= least)}


def seconds(times: dict[str, dict[str, float]], case: str) -> np.ndarray:
    """Return the minimum and median seconds of a case, (2,)."""
    return np.array([times[case]["seconds_min"], times[case]["seconds_median"]])


def pairs(**numbers: np.ndarray) -> dict[str, float]:
    """Return a cell's entries for numbers given as (minimum, median): name and name_median."""
    return {name + s: float(n) for name, pair in numbers.items() for s, n in zip(("", "_median"), pair, strict=True)}


# Sections


def device_section(plan: Plan) -> dict:
    import numba

    return provenance.environment() | {
        "device": device_name(),
        "load_average_before": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "numba": numba.__version__,
        "commit": provenance.commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def device_name() -> str:
    name = provenance.environment()["device"].partition(" (CPU")[0]
    return f"{name}, {default_workers()} cores, {torch.backends.cpu.get_cpu_capability()}"


class Passes:
    """The passes over a model's weights, ours and the public ones, for the same population."""

    def __init__(self, name: str, dtype: torch.dtype, plan: Plan):
        model = build(name, dtype)
        self.tensors, self.layout = parameters_of(model), layout_of(model)
        self.members, self.keys, self.coefficients = population(plan.members)
        self.master = open_weights(model).float32()
        # a working copy per core, and the first one's parameters as tensors
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

    def public_perturb(self) -> None:
        for i in range(len(self.members)):
            public_perturb(self.tensors, i, SIGMA)
            public_perturb(self.tensors, i, SIGMA, subtract=True)

    def public_update(self) -> None:
        public_update(self.tensors, self.coefficients)


def noise_section(plan: Plan) -> dict:
    """Measure the passes over the weights, in millions of parameters per second and member."""
    cells: dict[str, dict] = {}
    targets = []
    with ThreadPoolExecutor(2) as pool:
        for name, dtype in itertools.product(plan.models, (torch.float32, torch.bfloat16)):
            passes = Passes(name, dtype, plan)
            cases = {case: getattr(passes, case) for case in ("public_perturb", "perturb", "public_update", "update")}
            if two := dtype == torch.float32 and default_workers() > 1:
                halves = passes.members[0::2], passes.members[1::2]
                cases["perturb_on_two"] = lambda p=passes, halves=halves: list(pool.map(p.perturb, halves, (0, 1)))
                cases["update_on_two"] = lambda p=passes: list(pool.map(p.update, [(0, 2), (1, 2)]))
            times = measure(plan.quick_repeats, cases)
            cell, d = f"{name} {str(dtype).removeprefix('torch.')}", passes.layout.d
            cells[cell] = {"parameters": d}
            passed = ("perturb", "perturb and restore", "", 9), ("update", "update", "update_", 5)
            for what, said, prefix, least in passed:
                for who, case in (("public", f"public_{what}"), ("ours", what)):
                    rate = plan.members * d / times[case]["seconds_min"] / 1e6
                    cells[cell][f"{said.replace(' and ', '_')}_{who}"] = rate
                ratio = seconds(times, f"public_{what}") / seconds(times, what)
                cells[cell] |= pairs(**{f"{prefix}ratio": ratio})
                targets.append(target(f"{said}, {cell}: times the public rate", ratio[0], least=least))
                if two:
                    gain = seconds(times, what) / seconds(times, f"{what}_on_two")
                    cells[cell] |= pairs(**{f"{what}_second_core": gain})
                    targets.append(target(f"{what}, {cell}: gain of the second core", gain[0], least=1.8))
    return {
        "about": "rates in Mparam/s a member; ours for bfloat16 perturbs the float32 master and rounds",
        "cells": cells,
        "targets": targets,
    }


class Plain:
    """The plain script: one iteration with transformers and the public statements."""

    def __init__(self, model: Any, rows: int, plan: Plan):
        self.model, self.tensors, self.prompts = model, parameters_of(model), prompts(rows)
        self.plan, (_, self.tokenizer) = plan, base()
        self.ids, self.mask = torch.from_numpy(self.prompts.ids), torch.from_numpy(self.prompts.mask)

    def generate(self, **changed: Any) -> torch.Tensor:
        """Return new token ids, (rows, at most plan.new)."""
        settings = {"max_new_tokens": self.plan.new, "pad_token_id": self.tokenizer.pad_token_id} | changed
        new = self.model.generate(input_ids=self.ids, attention_mask=self.mask, do_sample=False, **settings)
        return new[:, self.ids.shape[1] :]

    def __call__(self) -> None:
        for i in range(self.plan.members):
            public_perturb(self.tensors, i, SIGMA)
            texts = self.tokenizer.batch_decode(self.generate(), skip_special_tokens=True)
            countdown.reward(self.prompts.prompts, texts, **self.prompts.columns)
            public_perturb(self.tensors, i, SIGMA, subtract=True)
        public_update(self.tensors, population(self.plan.members)[2])


def same_tokens(plain: Plain, plan: Plan) -> float:
    """Return the share of prompts with the same greedy tokens in both arms, for the plain arm's first member."""
    before = [tensor.clone() for tensor in plain.tensors]
    public_perturb(plain.tensors, 0, SIGMA)
    (ours,) = engine_of(plain.model, len(plain.prompts), plan).generate("train")
    new = plain.generate().tolist()
    for tensor, was in zip(plain.tensors, before, strict=True):
        tensor.copy_(was)
    pad = plain.tokenizer.pad_token_id
    agree = [raw == row[: len(raw)] and set(row[len(raw) :]) <= {pad} for (_, raw), row in zip(ours, new, strict=True)]
    return float(np.mean(agree))


class Ours:
    """An iteration with LocalEngine."""

    def __init__(self, model: Any, rows: int, plan: Plan, members: int | None = None, **settings: Any):
        self.population = population(plan.members if members is None else members)
        self.engine, self.rows = engine_of(model, rows, plan, **settings), rows

    def __call__(self) -> None:
        members, keys, coefficients = self.population
        self.evaluations = self.engine.evaluate(members, SIGMA, "train", np.arange(self.rows))
        self.engine.update(keys, coefficients)


def iteration_section(plan: Plan) -> dict:
    """Compare an iteration (evaluate a population, move the weights) of LocalEngine and of the plain script."""
    cells, targets = {}, []
    for name, rows in itertools.product(plan.models, plan.rows):
        cell, repeats = f"{name}, {rows} prompts", plan.repeats_of(name, rows)
        plain, ours = Plain(build(name), rows, plan), Ours(build(name), rows, plan, workers=default_workers())
        agreement = same_tokens(plain, plan)
        with contextlib.closing(ours.engine):
            times = measure(repeats, {"ours": ours, "plain": plain})
        each = {case: seconds(times, case) for case in times}
        ratio = each["plain"] / each["ours"]
        lengths = np.mean([evaluation.lengths for evaluation in ours.evaluations])
        cells[cell] = pairs(ours_s=each["ours"], plain_s=each["plain"], ratio=ratio)
        cells[cell] |= {"tokens_a_completion": float(lengths), "same_tokens": agreement, "repeats": repeats}
        targets.append(target(f"iteration, {cell}: times the plain script", ratio[0], least=3 if rows > 16 else 5))
        targets.append(target(f"tokens, {cell}: share equal in both arms", agreement, least=1))
    return {
        "about": f"{plan.members} members, at most {plan.new} new tokens",
        "cells": cells,
        "targets": targets,
    }


def low_rank_section(plan: Plan) -> dict:
    """Compare an iteration (evaluate a population, move the weights) with low-rank and with full-rank members."""
    cells, targets = {}, []
    for name, (rows, n) in itertools.product(plan.low_rank_models, plan.low_rank):
        # one batch per worker, if a batch has room for that many members
        together, cases = min(256, max(4 * rows, -(-n // default_workers()) * rows)), {}
        for rank in (0, *plan.ranks):
            own = {"members": n, "chunk_rows": together} if rank else {"members": min(n, plan.own_members)}
            case = f"rank {rank}" if rank else "full rank"
            cases[case] = Ours(build(name), rows, plan, rank=rank, workers=default_workers(), **own)
        with contextlib.ExitStack() as stack:
            for ours in cases.values():
                stack.enter_context(contextlib.closing(ours.engine))
            times = measure(min(3, plan.repeats), cases)
        rates = {case: len(ours.evaluations) * rows / seconds(times, case) for case, ours in cases.items()}
        cell = f"{name}, {n} members of {rows} prompts"
        ratios = {case: rate / rates["full rank"] for case, rate in rates.items() if case != "full rank"}
        cells[cell] = {f"completions_a_second, {case}": float(rate[0]) for case, rate in rates.items()}
        for i, kept in enumerate(("ratio", "ratio_median")):
            cells[cell] |= {f"{kept}, {case}": float(ratio[i]) for case, ratio in ratios.items()}
        first, least = f"rank {plan.ranks[0]}", {1: 4.0, 128: 1.0}.get(rows)
        if least and name in Plan.low_rank_models:
            targets.append(target(f"{first}, {cell}: times full rank", ratios[first][0], least=least))
    return {
        "about": f"at most {plan.new} new tokens, one worker a core, at most {plan.own_members} full-rank members",
        "cells": cells,
        "targets": targets,
    }


SECTIONS: dict[str, Callable[[Plan], dict]] = {
    "device": device_section,
    "noise": noise_section,
    "iteration": iteration_section,
    "low_rank": low_rank_section,
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.cpu", description=__doc__.split("\n")[0])
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="run the smallest cells once, without storing, as a check")
    parser.add_argument("--out", type=Path, help="JSON file to merge into (default: paper/results/bench.json)")
    options = parser.parse_args(argv)
    plan, whole = QUICK if options.quick else Plan(), set(options.sections) == set(SECTIONS)
    out = options.out or (None if options.quick else paths.RESULTS / "bench.json")
    sections = {name: partial(SECTIONS[name], plan) for name in options.sections}
    with threads(1):
        return run_sections(sections, lambda found: out and merge(out, device_name(), "cpu", found, replace=whole))


if __name__ == "__main__":
    sys.exit(main())
