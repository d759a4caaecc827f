"""What the benchmarks have in common."""

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

ALPHA = 5e-3  # about that of the tiny runs; the cost does not depend on it


def now() -> np.ndarray:
    """(2,) seconds: of the clock, and of this process on its core."""
    return np.array([time.perf_counter(), time.process_time()])


def public_perturb(tensors: Iterable[torch.Tensor], seed: int, scale: float, subtract: bool = False) -> None:
    """The statements that released ES codes share, written from their description, for one member.

    Args:
        tensors: the model's weights, changed in place.
        seed: the member's.
        scale: sigma, or the member's coefficient in an update.
        subtract: restore what was added.
    """
    with torch.no_grad():
        for tensor in tensors:
            generator = torch.Generator(tensor.device).manual_seed(seed)
            eps = torch.randn(tensor.shape, dtype=tensor.dtype, device=tensor.device, generator=generator).mul_(scale)
            (tensor.sub_ if subtract else tensor.add_)(eps)


def public_update(tensors: Iterable[torch.Tensor], coefficients: np.ndarray) -> None:
    """An update by the same statements, one such pass a member."""
    for seed, coefficient in enumerate(coefficients.tolist()):
        public_perturb(tensors, seed, coefficient)


def measure(
    repeats: int, cases: Mapping[str, Callable], synchronise: Callable = lambda: None, fewer: Mapping | None = None
) -> dict[str, dict[str, float]]:
    """Seconds of each case, interleaved, the first round discarded.

    Args:
        repeats: measured rounds.
        cases: name -> what is timed.
        synchronise: waits for the device, before and after each call.
        fewer: case -> measured rounds, for one that takes part in the first ones only.
    """
    times: dict[str, list[float]] = {name: [] for name in cases}
    for i in range(repeats + 1):
        for name, call in cases.items():
            if fewer and i > fewer.get(name, repeats):
                continue
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
    """Members, and the keys and coefficients of their update."""
    root = noise.run_key("benchmark", 0)
    keys = np.array([noise.member_key(root, 0, i) for i in range(n)], np.uint64)
    z = np.random.default_rng(0).standard_normal(n)
    return [Member(int(key)) for key in keys], keys, (ALPHA / n * z).astype(np.float32)


def run_sections(
    sections: Mapping[str, Callable[[], dict]], show: Callable[[str, dict], Any], store: Callable[[dict], Any]
) -> int:
    """Run one section after the other; one that fails records its error, and the others go on.

    Args:
        sections: name -> a call that measures.
        show: gets name and result of each section.
        store: gets all results so far, after each section.

    Returns:
        0, or 1 if a section failed.
    """
    results: dict[str, dict] = {}
    for name, section in sections.items():
        start = time.perf_counter()
        try:
            found = section()
        except Exception as error:
            # One section's failure must not cost the others' measurements, on a machine that may be lent by the minute.
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        results[name] = found | {"section_seconds": round(time.perf_counter() - start, 1)}
        show(name, results[name])
        sys.stdout.flush()
        store(results)
    return int(any("error" in found for found in results.values()))


def show(name: str, found: dict) -> None:
    """Print a section: its numbers as a table, its targets, the account of what limits it."""
    print(f"\n== {name} ({found['section_seconds']} s)")
    if "error" in found:
        print(f"FAILED: {found['error']}")
    for key, value in found.items():
        if key not in ("about", "cells", "targets", "account", "error", "section_seconds"):
            print(f"{key}: {value}")
    print(found.get("about", ""))
    for what in ("cells", "account"):
        for cell, row in found.get(what, {}).items():
            print(f"  {cell}: " + ", ".join(f"{key} {value:.4g}" for key, value in row.items()))
    for entry in found.get("targets", []):
        verdict = "met" if entry["met"] else "MISSED"
        print(f"  {verdict:6} {entry['what']}: {entry['value']:.4g} (target {entry['target']})")


def merge(path: Path, device: str, kind: str, results: dict, replace: bool = False) -> None:
    """Write a benchmark's sections into the file; what other devices and the other benchmark wrote stays.

    Beside it, with the suffix .sha256, its SHA-256 is written, by which `python -m evoalign_study verify` finds
    what was edited.

    Args:
        path: JSON file: device -> kind -> section -> what was measured.
        device: its name.
        kind: "cpu" or "gpu".
        results: sections.
        replace: drop the sections that an earlier run of this benchmark left and this one does not have.
    """
    known = json.loads(path.read_text()) if path.exists() else {}
    entry = known.setdefault(device, {})
    entry[kind] = results if replace else entry.get(kind, {}) | results
    path.parent.mkdir(parents=True, exist_ok=True)
    data = (json.dumps(known, indent=1) + "\n").encode()
    path.write_bytes(data)
    path.with_suffix(".sha256").write_text(hashlib.sha256(data).hexdigest() + "\n")
