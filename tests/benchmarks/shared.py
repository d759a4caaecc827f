"""What the benchmarks of CPU and GPU have in common; it needs torch alone."""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch


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
            if subtract:
                tensor.sub_(eps)
            else:
                tensor.add_(eps)


def measure(
    repeats: int,
    cases: Mapping[str, Callable[[], Any]],
    synchronise: Callable[[], Any] = lambda: None,
    fewer: Mapping[str, int] | None = None,
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


def run_sections(
    sections: Mapping[str, Callable[[], dict]], show: Callable[[str, dict], Any], store: Callable[[dict], Any]
) -> dict[str, dict]:
    """Run one section after the other; one that fails records its error, and the others go on.

    Args:
        sections: name -> a call that measures.
        show: gets name and result of each section.
        store: gets all results so far, after each section.
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
    return results


def merge(path: Path, device: str, kind: str, results: dict, replace: bool = False) -> None:
    """Write a benchmark's sections into the file; what other devices and the other benchmark wrote stays.

    Beside it, with the suffix .sha256, its SHA-256 is written, by which `python -m evoalign_study verify` finds what
    was edited.

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
