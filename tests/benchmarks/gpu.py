"""Measure the cost of the noise law on a GPU: `python -m tests.benchmarks.gpu`.

Models have the shapes of Qwen2.5 and random weights, so nothing is downloaded. All cases of a model are measured
interleaved, the first round is discarded, and minimum and median are kept. If a model fails, its error is recorded and
the others are still run. Results are printed and merged into a JSON file under the device's name.

Cases: `perturb`, which computes a member's weights from the master, and `update` of the master by N members, under each
distribution; and the same with the "public" statements that released codes share: randn in the parameter's dtype, a
multiplication, an addition, tensor after tensor; released codes also need a second pass to restore. `memory` has bytes
per parameter. `tests/equivalence/test_noise_triton.py` checks that the same GPU gives the bits of a CPU, and
`tests.benchmarks.scaling --gpus` measures the time of an iteration with vLLM.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from evoalign_study import paths, provenance

from evoalign_lib import noise
from tests.benchmarks.shared import measure, merge, population, public_perturb, public_update, run_sections
from tests.helpers import qwen

SIGMA = 1e-3
LAWS = ("gaussian", "byte_sum")
TOY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
MODELS = {size: qwen(size) for size in ("0.5B", "1.5B", "7B")}
MODELS["toy"] = qwen("0.5B", **TOY, vocab_size=96)


def model_section(name: str, device: str, repeats: int, members: int) -> dict:
    """Measure a bfloat16 model with random weights: rates and, on a GPU, peak memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    synchronise = torch.cuda.synchronize if device == "cuda" else lambda: None
    start = torch.cuda.memory_allocated() if device == "cuda" else 0
    with torch.device(device), torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[name]), dtype=torch.bfloat16)
    tensors = [parameter.detach() for parameter in model.parameters()]
    d, (_, *moved) = sum(tensor.numel() for tensor in tensors), population(members)

    def a_parameter(call: Callable[[], Any] = lambda: None) -> float:
        """Return the peak bytes per parameter during a call."""
        torch.cuda.reset_peak_memory_stats()
        call()
        synchronise()
        return (torch.cuda.max_memory_allocated() - start) / d

    memory, public = {}, partial(public_perturb, tensors, 1, SIGMA)
    if device == "cuda":
        memory |= {"working": a_parameter(), "public_inplace_peak": a_parameter(public)}
    weights = noise.device_weights([(parameter.detach(), full) for full, parameter in model.named_parameters()])
    if device == "cuda":
        calls = partial(weights.perturb, 1, SIGMA), partial(weights.update, *moved)
        memory |= {"master": a_parameter(), "master_peak": max(map(a_parameter, calls))}

    def under(law: str, call: Callable[..., Any], *arguments: Any) -> None:
        weights._kind = noise._LAWS[law][0]  # users create new weights per law; here all laws share one master's memory
        call(*arguments)

    cases: dict[str, Callable[[], Any]] = {
        "perturb, public": public,
        "update, public": partial(public_update, tensors, moved[1]),
    }
    for law in LAWS:
        cases[f"perturb, {law}"] = partial(under, law, weights.perturb, 12345, SIGMA)
        cases[f"update, {law}"] = partial(under, law, weights.update, *moved)
    cells = measure(repeats, cases, synchronise)
    for case, cell in cells.items():
        passes = members if case.startswith("update") else 1
        theirs = cells[f"{case.partition(',')[0]}, public"]["seconds_min"]
        cell["parameters_per_second"] = passes * d / cell["seconds_min"]
        cell["times_faster_than_public"] = theirs / cell["seconds_min"]
    return {"parameters": d, "members": members, "cells": cells, "memory": memory}


def device_section(device: str) -> dict:
    import numba
    import triton

    found = provenance.environment() | {module.__name__: module.__version__ for module in (torch, triton, numba)}
    n = 1 << 20 if device == "cpu" else 1 << 31
    source, copied = (torch.empty(n, dtype=torch.uint8, device=device) for _ in range(2))
    synchronise = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = measure(10, {"copy": lambda: copied.copy_(source)}, synchronise)
    found["copy_bytes_per_second"] = 2 * n / times["copy"]["seconds_min"]
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,driver_version", "--format=csv,noheader"]
        clocks = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
        found |= {"cuda": torch.version.cuda, "clocks": clocks}
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu", description=__doc__.split("\n")[0])
    known = [name for name in MODELS if name != "toy"]
    parser.add_argument("--models", nargs="+", choices=known, default=known)
    parser.add_argument("--repeats", type=int, default=7, help="measured rounds")
    parser.add_argument("--members", type=int, default=6, help="members of an update; the cost is linear in them")
    parser.add_argument("--out", type=Path, help="JSON file to merge into (default: paper/results/bench.json)")
    parser.add_argument("--toy", action="store_true", help="run a toy model on the CPU, interpreted, as a check")
    options = parser.parse_args(argv)
    if options.toy:
        name, device, models, how, out = "toy (CPU, Triton's interpreter)", "cpu", ["toy"], (1, 1), options.out
    elif torch.cuda.is_available():
        name, device, models = torch.cuda.get_device_name(0), "cuda", options.models
        how = options.repeats, options.members
        out = options.out or paths.RESULTS / "bench.json"
    else:
        print("This benchmark needs a GPU that torch sees. Pass --toy to check it on a CPU.", file=sys.stderr)
        return 2
    sections = {"device": partial(device_section, device)}
    sections |= {model: partial(model_section, model, device, *how) for model in models}
    return run_sections(sections, lambda results: out and merge(out, name, "gpu", results))


if __name__ == "__main__":
    sys.exit(main())
