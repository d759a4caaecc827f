"""Measure engine "cuda" on a GPU: `python -m tests.benchmarks.gpu`.

The model has the shape of SmolLM2-135M and random weights, so nothing is downloaded. All cases of a section are
measured interleaved, the first round is discarded, and the minimum is kept. If a section fails, its error is recorded
and the other is still run. Results are printed and merged into a JSON file under the device's name.

Cases: members of full rank; many members of rank 1 with one prompt each; and inference, the rows of the latter with the
model itself. `population` measures a decoding step, against the time in which this device copies the bytes that the
step must read (weights and cache); for low rank also against inference. `engine` measures an iteration, evaluation and
update, of which decoding is the share of pure inference.

The noise law's rates in bench.json are those of this file at commit ff48bd6.
"""

import argparse
import itertools
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from evoalign_study import paths, provenance

from evoalign_lib import tiny
from evoalign_lib.engines import memory
from evoalign_lib.engines.cuda import CudaEngine
from evoalign_lib.engines.local import Prompts
from evoalign_lib.engines.population import PopulationDecoder
from evoalign_lib.rewards import Rewards
from tests.benchmarks.shared import measure, merge, population, run_sections


class Size(NamedTuple):
    """What the sections on engine "cuda" measure."""

    config: dict
    members: int
    """of full rank"""
    many: int
    """members of rank 1, each with one prompt"""
    prompts: int
    """of each member of full rank"""
    width: int
    """tokens of a prompt"""
    new: int
    """tokens of a completion"""


SIGMA = 1e-3
TOY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
SMOLLM = {"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
SMOLLM |= {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49_152, "tie_word_embeddings": True}
WHOLE = Size(SMOLLM, 30, 256, 64, 64, 40)
SMALL = Size(SMOLLM | TOY | {"num_key_value_heads": 2, "vocab_size": 300}, 2, 3, 2, 8, 4)


def random_model(config: dict, device: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device(device), torch.random.fork_rng():
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype).eval()


def population_section(device: str, repeats: int, size: Size) -> dict:
    """Measure a decoding step: the difference between short and long completions, by the number of tokens."""
    model, synchronise = random_model(size.config, device), torch.cuda.synchronize if device == "cuda" else lambda: None
    ids, calls, cells = np.random.default_rng(0).integers(0, 270, (max(size.prompts, size.many), size.width)), {}, {}
    d, bandwidth = sum(p.numel() for p in model.parameters()), copy_rate(device, synchronise)
    cases = {"full rank": (size.members, size.prompts, 0), "low rank": (size.many, 1, 1)}
    cases["inference"] = (1, size.many, 0)
    for case, (members, rows, rank) in cases.items():
        decoder = PopulationDecoder(model, members, device, None, rows, rank)
        for new in (1, size.new):
            how = ids[:rows], np.ones_like(ids[:rows]), new, [-1], None, 1.0, 0, 1.0, 0, members
            calls[f"{case}, {new}"] = partial(decoder.decode, *how)
        held = [*decoder._places.values(), *itertools.chain(*decoder.factors.values())]
        weights = sum(tensor.numel() * tensor.itemsize for tensor in held)
        cache = memory.kv_bytes(memory.shape(model.config), width=model.dtype.itemsize) * (size.width + size.new)
        cells[case] = {"bytes_per_parameter": weights / d, "floor": (weights + members * rows * cache) / bandwidth}
    times = measure(repeats, calls, synchronise)
    for case, (members, rows, _) in cases.items():
        long, short = (times[f"{case}, {new}"]["seconds_min"] for new in (size.new, 1))
        step = (long - short) / (size.new - 1)
        cells[case] |= {"step": step, "times_the_floor": step / cells[case]["floor"], "rows": members * rows}
    cells["low rank"]["times_inference"] = cells["low rank"]["step"] / cells["inference"]["step"]
    return {"parameters": d, "cells": cells}


def engine_section(device: str, repeats: int, size: Size) -> dict:
    """Measure iterations of ES, and the decoding in them alone."""
    model, synchronise = random_model(size.config, device), torch.cuda.synchronize if device == "cuda" else lambda: None
    tok, rewards = tiny.tokenizer(), Rewards(lambda completion_ids, **_: [*map(len, completion_ids)])
    calls, cells = {}, {}

    def iterate(engine: CudaEngine, rows: np.ndarray, members: list, keys: np.ndarray, coefficients: Any) -> None:
        engine.evaluate(members, SIGMA, "train", rows)
        engine.update(keys, coefficients)

    for case, (n, rows, rank) in {"full rank": (size.members, size.prompts, 0), "low rank": (size.many, 1, 1)}.items():
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        asked = Prompts([{"prompt": f"{i:0{size.width}}"} for i in range(rows)], tok)
        at_once = {"members": n, "population": n, "device": device, "max_completion_length": size.new}
        engine = CudaEngine(model, tok, rewards, {"train": asked}, rank=rank, **at_once)
        calls[f"{case}, iteration"] = partial(iterate, engine, np.arange(rows), *population(n))
        calls[f"{case}, decoding"] = partial(engine._ids, "train", np.arange(rows), None, 1.0, n)
        cells[case] = {"members": n, "prompts": rows}
    times = measure(repeats, calls, synchronise)
    for case, cell in cells.items():
        whole, decoding = (times[f"{case}, {what}"]["seconds_min"] for what in ("iteration", "decoding"))
        cell |= {"seconds": whole, "share_of_pure_inference": decoding / whole}
    d = sum(p.numel() for p in model.parameters())
    peak = {"peak_bytes_per_parameter": torch.cuda.max_memory_allocated() / d} if device == "cuda" else {}
    return {"parameters": d, "cells": cells, "memory": peak}


def copy_rate(device: str, synchronise: Callable[[], Any]) -> float:
    """Return the bytes that a copy on the device reads and writes in a second."""
    n = 1 << 20 if device == "cpu" else 1 << 31
    source, copied = (torch.empty(n, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * n / measure(10, {"copy": lambda: copied.copy_(source)}, synchronise)["copy"]["seconds_min"]


def device_section(device: str) -> dict:
    import numba
    import triton

    found = provenance.environment() | {module.__name__: module.__version__ for module in (torch, triton, numba)}
    found["copy_bytes_per_second"] = copy_rate(device, torch.cuda.synchronize if device == "cuda" else lambda: None)
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,driver_version", "--format=csv,noheader"]
        clocks = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
        found |= {"cuda": torch.version.cuda, "clocks": clocks}
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=7, help="measured rounds")
    parser.add_argument("--out", type=Path, help="JSON file to merge into (default: paper/results/bench.json)")
    parser.add_argument("--sections", nargs="+", help="only these: device, population, engine")
    parser.add_argument("--toy", action="store_true", help="run a toy model on the CPU, interpreted, as a check")
    options = parser.parse_args(argv)
    if options.toy:
        name, device, how, out = "toy (CPU, Triton's interpreter)", "cpu", (1, SMALL), options.out
    elif torch.cuda.is_available():
        name, device, how = torch.cuda.get_device_name(0), "cuda", (options.repeats, WHOLE)
        out = options.out or paths.RESULTS / "bench.json"
    else:
        print("This benchmark needs a GPU that torch sees. Pass --toy to check it on a CPU.", file=sys.stderr)
        return 2
    sections = {"device": partial(device_section, device), "population": partial(population_section, device, *how)}
    sections["engine"] = partial(engine_section, device, *how)
    if options.sections:
        sections = {name: section for name, section in sections.items() if name in options.sections}
    return run_sections(sections, lambda results: out and merge(out, name, "gpu", results))


if __name__ == "__main__":
    sys.exit(main())
