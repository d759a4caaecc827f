"""What the noise law costs on a GPU: `python -m tests.benchmarks.gpu`.

Models have the shapes of Qwen2.5 and random weights, so that nothing is downloaded. Every cell is measured interleaved
with what it is compared with, the first round discarded; minimum and median are kept. A section that fails records its
error and the others go on. Results are printed and merged into a JSON file under the device's name.

Sections: `device`; `perturb`, a member's weights from the master; `update` of the master by N members; `memory`, bytes
a parameter. "public" are statements that released codes share: randn in the parameter's dtype, a multiplication, an
addition, for one tensor after the other. `tests/equivalence/test_noise_triton.py` shows on the same GPU that the bits
are those of a CPU, and `tests.benchmarks.scaling --gpus` measures what an iteration with vLLM takes.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from evoalign_study import paths

from evoalign_lib import noise
from tests.benchmarks import shared
from tests.benchmarks.shared import merge, population, public_perturb, run_sections
from tests.helpers import qwen

SIGMA = 1e-3
KERNELS = ("gaussian", "byte_sum")
TOY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
MODELS = {size: qwen(size) for size in ("0.5B", "1.5B", "7B")}
MODELS["toy"] = qwen("0.5B", **TOY, vocab_size=96)


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    device: str
    models: tuple[str, ...]
    repeats: int
    members: int  # of a measured update: the cost is linear in them


class Model:
    """A model on the device, in bfloat16, with random weights."""

    def __init__(self, name: str, device: str):
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.device(device), torch.random.fork_rng():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[name]), dtype=torch.bfloat16)
        self.tensors = [parameter.detach() for parameter in model.parameters()]
        self.pieces = [(parameter.detach(), full) for full, parameter in model.named_parameters()]
        self.d = sum(tensor.numel() for tensor in self.tensors)


def measure(plan: Plan, repeats: int, **cases: Callable[[], Any]) -> dict[str, dict[str, float]]:
    return shared.measure(repeats, cases, torch.cuda.synchronize if plan.device == "cuda" else lambda: None)


def of_each_law(weights: Any, call: Callable[[], Any]) -> dict[str, Callable[[], Any]]:
    """A call under each distribution; users make other weights for it, here they share one master's memory."""

    def under(distribution: str) -> None:
        weights._kind = noise._LAWS[distribution][0]
        call()

    return {distribution: partial(under, distribution) for distribution in KERNELS}


def device_section(plan: Plan) -> dict:
    import numba
    import triton

    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    found |= {"triton": triton.__version__, "numba": numba.__version__, "numpy": np.__version__}
    if plan.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"multiprocessors": properties.multi_processor_count, "memory_bytes": properties.total_memory}
        query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,driver_version", "--format=csv,noheader"]
        clocks = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
        found |= {"cuda": torch.version.cuda, "clocks": clocks}
    return found


def copy_bandwidth(plan: Plan) -> float:
    """Bytes read and written a second by a copy on the device."""
    n = 1 << 20 if plan.device == "cpu" else 1 << 31
    source, target = (torch.empty(n, dtype=torch.uint8, device=plan.device) for _ in range(2))
    return 2 * n / measure(plan, 10, copy=lambda: target.copy_(source))["copy"]["seconds_min"]


def perturb_section(plan: Plan) -> dict:
    found: dict[str, Any] = {"copy_bytes_per_second": copy_bandwidth(plan)}
    for name in plan.models:
        model = Model(name, plan.device)
        weights = noise.device_weights(model.pieces)
        cases = {"public": partial(public_perturb, model.tensors, 1, SIGMA)}
        cases |= of_each_law(weights, partial(weights.perturb, 12345, SIGMA))
        times = measure(plan, plan.repeats, **cases)
        for law in KERNELS:
            seconds = times[law]["seconds_min"]
            times[law] |= {
                "parameters_per_second": model.d / seconds,
                # a float32 read, a bfloat16 written
                "fraction_of_copy_bandwidth": 6 * model.d / seconds / found["copy_bytes_per_second"],
                # released codes also restore, by a second pass
                "times_faster_than_public_perturb_and_restore": 2 * times["public"]["seconds_min"] / seconds,
            }
        found[name] = {"parameters": model.d, "tensors": len(model.pieces)} | times
    return found


def update_section(plan: Plan) -> dict:
    found: dict[str, Any] = {"members": plan.members}
    _, keys, coefficients = population(plan.members)
    for name in plan.models:
        model = Model(name, plan.device)
        weights = noise.device_weights(model.pieces)

        def public(tensors=model.tensors) -> None:
            for seed, coefficient in enumerate(coefficients.tolist()):
                public_perturb(tensors, seed, coefficient)

        cases = of_each_law(weights, partial(weights.update, keys, coefficients))
        times = measure(plan, plan.repeats, **cases, public=public)
        for law in KERNELS:
            seconds = times[law]["seconds_min"]
            times[law] |= {
                "normals_per_second": plan.members * model.d / seconds,
                "times_faster_than_public": times["public"]["seconds_min"] / seconds,
            }
        found[name] = {"parameters": model.d} | times
    return found


def memory_section(plan: Plan) -> dict:
    """Bytes a parameter: at rest, and at the peak of perturb and update."""
    if plan.device != "cuda":
        return {"skipped": "only a GPU counts its allocations"}
    found, (_, *moved) = {}, population(plan.members)
    for name in plan.models:
        torch.cuda.empty_cache()
        start = torch.cuda.memory_allocated()
        model = Model(name, plan.device)

        def a_parameter(call: Callable[[], Any] | None = None, start=start, d=model.d) -> float:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            if call is not None:
                call()
                torch.cuda.synchronize()
            return (torch.cuda.max_memory_allocated() - start) / d

        cell = {"working": a_parameter()}
        cell["public_inplace_peak"] = a_parameter(partial(public_perturb, model.tensors, 1, SIGMA))
        weights = noise.device_weights(model.pieces)
        cell["master"] = a_parameter()
        cell["master_peak"] = max(
            a_parameter(partial(weights.perturb, 1, SIGMA)), a_parameter(partial(weights.update, *moved))
        )
        found[name] = cell
        del model, weights, a_parameter
    return found


SECTIONS: dict[str, Callable[[Plan], dict]] = {
    "device": device_section,
    "perturb": perturb_section,
    "update": update_section,
    "memory": memory_section,
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu", description=__doc__.split("\n")[0])
    known = [name for name in MODELS if name != "toy"]
    parser.add_argument("--models", nargs="+", choices=known, default=known)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--repeats", type=int, default=7, help="measured rounds")
    parser.add_argument("--members", type=int, default=6, help="of an update; the cost is linear in them")
    parser.add_argument("--out", type=Path, help="JSON file to merge into (default: paper/results/bench.json)")
    parser.add_argument("--toy", action="store_true", help="a toy on the CPU, interpreted: proves that sections run")
    options = parser.parse_args(argv)
    out = options.out or (None if options.toy else paths.RESULTS / "bench.json")
    if options.toy:
        plan = Plan("cpu", ("toy",), repeats=1, members=1)
        name = "toy (CPU, Triton's interpreter)"
    elif torch.cuda.is_available():
        plan = Plan("cuda", tuple(options.models), options.repeats, options.members)
        name = torch.cuda.get_device_name(0)
    else:
        print("This benchmark needs a GPU that torch sees; --toy shows on a CPU that it runs.", file=sys.stderr)
        return 2

    def measured(section: str) -> dict:
        try:
            return SECTIONS[section](plan)
        finally:
            if plan.device == "cuda":
                torch.cuda.empty_cache()

    return run_sections(
        {section: partial(measured, section) for section in options.sections},
        lambda section, found: print(json.dumps({section: found}, indent=1)),
        lambda results: out and merge(out, name, "gpu", results),
    )


if __name__ == "__main__":
    sys.exit(main())
