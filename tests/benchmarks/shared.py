"""Code that the benchmarks share."""

import hashlib
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evoalign_lib import noise
from evoalign_lib.update_rules import Member

ALPHA = 5e-3  # about the value in the tiny runs; the cost does not depend on it


def now() -> np.ndarray:
    """Return the wall-clock seconds and this process's CPU seconds, (2,)."""
    return np.array([time.perf_counter(), time.process_time()])


def public_perturb(tensors: Iterable[torch.Tensor], seed: int, scale: float, subtract: bool = False) -> None:
    """Perturb weights for one member by the statements that released ES codes share, written from their description.

    Args:
        tensors: the model's weights, changed in place.
        seed: the member's seed.
        scale: sigma, or the member's coefficient in an update.
        subtract: subtract the noise instead, to restore the weights.
    """
    with torch.no_grad():
        for tensor in tensors:
            generator = torch.Generator(tensor.device).manual_seed(seed)
            eps = torch.randn(tensor.shape, dtype=tensor.dtype, device=tensor.device, generator=generator).mul_(scale)
            (tensor.sub_ if subtract else tensor.add_)(eps)


def public_update(tensors: Iterable[torch.Tensor], coefficients: np.ndarray) -> None:
    """Update weights by the same statements, with one pass per member."""
    for seed, coefficient in enumerate(coefficients.tolist()):
        public_perturb(tensors, seed, coefficient)


def measure(
    repeats: int, cases: Mapping[str, Callable], synchronise: Callable = lambda: None
) -> dict[str, dict[str, float]]:
    """Time all cases interleaved and return their seconds; the first round is discarded.

    Args:
        repeats: measured rounds.
        cases: name -> the call to time.
        synchronise: waits for the device, before and after each call.
    """
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats + 1):
        for name, call in cases.items():
            synchronise()
            start = time.perf_counter()
            call()
            synchronise()
            times[name].append(time.perf_counter() - start)
    return {
        name: {"seconds_min": min(seen[1:]), "seconds_median": statistics.median(seen[1:])}
        for name, seen in times.items()
    }


def population(n: int) -> tuple[list[Member], np.ndarray, np.ndarray]:
    """Return n members, and the keys and coefficients of their update."""
    root = noise.run_key("benchmark", 0)
    keys = np.array([noise.member_key(root, 0, i) for i in range(n)], np.uint64)
    z = np.random.default_rng(0).standard_normal(n)
    return [Member(int(key)) for key in keys], keys, (ALPHA / n * z).astype(np.float32)


def run_sections(sections: Mapping[str, Callable[[], dict]], store: Callable[[dict], Any]) -> int:
    """Run the sections one after the other and print them; if one fails, record its error and run the others.

    Args:
        sections: name -> a call that measures.
        store: called with all results so far, after each section.

    Returns:
        0, or 1 if a section failed.
    """
    results: dict[str, dict] = {}
    for name, section in sections.items():
        start = time.perf_counter()
        try:
            found = section()
        except Exception as error:
            # A failed section must not cost the others' measurements, on a machine that may be rented by the minute.
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        results[name] = found | {"section_seconds": round(time.perf_counter() - start, 1)}
        show(name, results[name])
        sys.stdout.flush()
        store(results)
    return int(any("error" in found for found in results.values()))


def show(name: str, found: dict) -> None:
    """Print a section: its numbers as a table, and its targets."""
    print(f"\n== {name} ({found['section_seconds']} s)")
    if "error" in found:
        print(f"FAILED: {found['error']}")
    for key, value in found.items():
        if key not in ("about", "cells", "targets", "error", "section_seconds"):
            print(f"{key}: {value}")
    print(found.get("about", ""))
    for cell, row in found.get("cells", {}).items():
        print(f"  {cell}: " + ", ".join(f"{key} {value:.4g}" for key, value in row.items()))
    for entry in found.get("targets", []):
        verdict = "met" if entry["met"] else "MISSED"
        print(f"  {verdict:6} {entry['what']}: {entry['value']:.4g} (target {entry['target']})")


def merge(path: Path, device: str, kind: str, results: dict, replace: bool = False) -> None:
    """Write a benchmark's sections into a file, and keep the results of other devices and kinds of benchmark.

    The file's SHA-256 is written beside it, with the suffix .sha256, so that `python -m evoalign_study verify` finds
    edits.

    Args:
        path: JSON file: device -> kind -> section -> measurements.
        device: name of the device.
        kind: "cpu" or "gpu".
        results: section -> measurements.
        replace: drop sections of an earlier run of this benchmark that this run does not have.
    """
    known = json.loads(path.read_text()) if path.exists() else {}
    entry = known.setdefault(device, {})
    entry[kind] = results if replace else entry.get(kind, {}) | results
    path.parent.mkdir(parents=True, exist_ok=True)
    data = (json.dumps(known, indent=1) + "\n").encode()
    path.write_bytes(data)
    path.with_suffix(".sha256").write_text(hashlib.sha256(data).hexdigest() + "\n")
