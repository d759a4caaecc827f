"""Measure how a population scales over the actors of a Ray cluster: `python -m tests.benchmarks.scaling`.

A step is an update and the evaluation of a population: random models of the architecture of base A0 (or the one that
--model names), Countdown's prompts and reward. With the same actors, steps are measured in turn with one of them
working, with two, and so on; the first round is discarded, and minimum and median of the others are kept. Ratios are
within one run and are more stable than seconds on cores that others use too. There are no targets.

For each number of actors:
- `seconds`: of a step, and `speed_up`, relative to a step with one actor;
- `sent`, `received`: bytes of a step's messages, serialised, to and from all actors, counted where they are sent
  (idle actors get updates, too); for comparison `weights`, the bytes of the model;
- `idle`: 1 - the members' CPU time / (working actors x wall time): the share lost to updates, members of uneven length,
  messages, and this process.

--gpus N uses vLLM, on N GPUs of the cluster that RAY_ADDRESS names or of this machine.
"""

import argparse
import itertools
import os
import statistics
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import torch
from evoalign_study import paths

from evoalign_lib import models, tiny
from evoalign_lib.engines import check_gpus
from evoalign_lib.engines.local import Prompts
from evoalign_lib.engines.processes import default_workers, threads
from evoalign_lib.engines.ray import RayEngine
from evoalign_lib.rewards import Rewards
from evoalign_lib.tasks import countdown
from tests.benchmarks.cpu import SIGMA, base, build, device_name
from tests.benchmarks.shared import merge, population, run_sections


def measure_step(engine: RayEngine, actors: int, options: argparse.Namespace) -> dict[str, float]:
    """Run some steps with the given number of actors; return a step's mean seconds and bytes, and the idle share."""
    members, keys, coefficients = population(options.members)
    engine.most_active = actors
    engine.check()  # wait until all actors are idle
    busy, sent, received = 0.0, engine.sent_bytes, engine.received_bytes
    start = time.perf_counter()
    for _ in range(options.steps):
        engine.update(keys, coefficients)
        evaluations = engine.evaluate(members, SIGMA, "train", np.arange(options.prompts))
        busy += sum(evaluation.core_seconds for evaluation in evaluations)
    wall = time.perf_counter() - start
    return {
        "seconds": wall / options.steps,
        "sent": (engine.sent_bytes - sent) / options.steps,
        "received": (engine.received_bytes - received) / options.steps,
        "idle": 1 - busy / (actors * wall),
    }


def model_section(name: str, options: argparse.Namespace) -> dict:
    """Measure a model with one actor, two, four, and so on up to all."""
    if options.model is None:
        model, (_, tokenizer), where = build(name), base(), {}
    else:
        model, tokenizer = models.load(name, None, {"dtype": torch.bfloat16 if options.gpus else torch.float32})
        where = {"folder": name}
    if options.gpus:
        where |= {"gpus": options.gpus, "tensor_parallel": options.tensor_parallel}
    else:
        where |= {"workers": options.workers}
    most = options.gpus // options.tensor_parallel or options.workers
    prompts = {"train": Prompts(countdown.dataset(tiny.problems("train", options.prompts), tokenizer), tokenizer)}
    rewards = Rewards(countdown.reward)
    counts = sorted({*(2**i for i in range(most.bit_length())), most})
    seen: dict[int, list[dict]] = {n: [] for n in counts}
    with closing(RayEngine(model, tokenizer, rewards, prompts, max_completion_length=options.new, **where)) as engine:
        start = time.perf_counter()
        engine.generate("train", np.arange(1))
        started = time.perf_counter() - start
        for _, n in itertools.product(range(options.repeats + 1), counts):
            seen[n].append(measure_step(engine, n, options))
    cells = {n: min(rows[1:], key=lambda row: row["seconds"]) for n, rows in seen.items()}
    for n, cell in cells.items():
        cell["seconds_median"] = statistics.median(row["seconds"] for row in seen[n][1:])
        cell["speed_up"] = cells[1]["seconds"] / cell["seconds"]
        cell["speed_up_median"] = cells[1]["seconds_median"] / cell["seconds_median"]
        cell["weights"] = sum(p.numel() * p.itemsize for p in model.parameters())
    return {
        "about": f"{options.members} members a step, {options.prompts} prompts, {options.new} tokens at most; the "
        f"first answer took {started:.1f} s, the load average is {os.getloadavg()[0]:.1f} on {default_workers()} cores",
        "cells": {f"{n} actors": cell for n, cell in cells.items()},
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.scaling", description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["0.14M", "1M", "4M"], help="sizes of tests.benchmarks.cpu")
    parser.add_argument("--model", help="a folder or a name on the Hub, instead of --models")
    parser.add_argument("--workers", type=int, default=2, help="most actors, on CPU cores")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs; every tensor_parallel of them form a vLLM actor")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs per actor")
    parser.add_argument("--members", type=int, default=12, help="members of the population")
    parser.add_argument("--prompts", type=int, default=50, help="prompts per step")
    parser.add_argument("--new", type=int, default=20, help="most tokens per completion")
    parser.add_argument("--steps", type=int, default=3, help="steps per round")
    parser.add_argument("--repeats", type=int, default=5, help="measured rounds")
    parser.add_argument("--out", type=Path, default=paths.RUNS / "scaling.json", help="JSON file to merge into")
    options = parser.parse_args(argv)
    check_gpus(options.gpus, options.tensor_parallel)
    names = options.models if options.model is None else [options.model]
    kind = f"scaling over {options.gpus} GPUs" if options.gpus else "scaling over CPU actors"
    sections = {name: partial(model_section, name, options) for name in names}
    with threads(1):
        return run_sections(sections, lambda results: merge(options.out, device_name(), kind, results))


if __name__ == "__main__":
    sys.exit(main())
