"""Weights that runs of the tiny world ended with: made again from their records, and kept on this machine.

A record names the digest of its weights and not the weights. To look at a trained model again, it is replayed from a
ledger or trained again, which takes minutes: so what a run of scale tiny ended with, and what was made again, is kept
in `runs/weights`, by its digest, and read the next time. That folder may be removed at any time.
"""

import io
import tempfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from evoalign_lib import files, ledger, models, noise, precision, tiny
from evoalign_lib.analysis import geometry
from evoalign_lib.checks import require
from evoalign_study import paths, trainers
from evoalign_study.records import Record, Spec, ledger_file, read_records, record_files, spec_hash


def keep(master: np.ndarray) -> Path:
    """Keep flat float32 weights, and return the file. What is there already stays."""
    if not (path := _path(models.flat_digest(master))).is_file():
        written = io.BytesIO()
        np.save(written, master, allow_pickle=False)
        files.replace_bytes(path, written.getvalue())
    return path


def kept(digest: str) -> np.ndarray | None:
    """Return the flat float32 weights that have a digest (`models.flat_digest`); None where they are not kept here.

    Raises:
        ValueError: the file of that name holds others.
    """
    if not (path := _path(digest)).is_file():
        return None
    master = np.load(path, allow_pickle=False)
    now = models.flat_digest(master)
    require(now == digest, f"{path} holds weights with the digest {now}: it is damaged. Remove it.")
    return master


def again(spec: Spec, digest: str) -> tuple[np.ndarray, str]:
    """Return the flat float32 weights that a training run ended with, and how they were made.

    They are read where they are "kept"; or "replayed" from the ledger of the run's committed record, or else "trained
    again" without looking at the run on its way, and then kept.

    Args:
        spec: of the run.
        digest: of its record.

    Raises:
        ValueError: what is made has another digest.
    """
    if (master := kept(digest)) is not None:
        return master, "kept"
    if (source := kept_ledger(spec, digest)) is not None:
        master, made = ledger.replay(source, spec["base"]), "replayed"
    else:
        few = {"curve_points": 1} if "curve_points" in spec else {}
        with tempfile.TemporaryDirectory() as place, trainers.train(spec | few, Path(place)) as found:
            master, made = found.engine.master.copy(), "trained again"
    check_digest(models.flat_digest(master), digest, made)
    keep(master)
    return master, made


def check_digest(found: str, wanted: str, how: str) -> None:
    """Raise ValueError where the digest of weights, made in the way that `how` says, is not that of a record."""
    weights = f"the weights, {how}, have the digest {found}, in the record it is {wanted}"
    require(found == wanted, f"{weights}: this machine trains otherwise, or the record is of other code.")


def kept_ledger(spec: Spec, digest: str) -> Path | None:
    """Return the ledger of the committed record of a spec, or None: without such a record, ledger, or these weights.

    digest: of the weights that the run ended with. A run made anew on another machine ends with others than the
    committed one, whose ledger is then not its own.
    """
    for path in record_files(spec["scale"]):
        for record in read_records(path, [spec_hash(spec)]):
            if record.get("digest") == digest and "ledger" in record:
                return ledger_file(record)
    return None


def of_base(base: str) -> np.ndarray:
    """Return the flat float32 weights of a shipped base, from which its runs start."""
    return precision.open_weights(tiny.load(base)[0]).float32()


@lru_cache(maxsize=8)
def layout_of(base: str) -> noise.Layout:
    """Return where each parameter of a shipped base lies in flat weights."""
    return precision.open_weights(tiny.load(base)[0]).layout


# ---- groups of runs that differ in their seeds alone


def group(records: Sequence[Record]) -> dict[str, Any]:
    """Return how a spec names the weights of several runs: their common spec, their seeds and their digests.

    Raises:
        ValueError: no runs, runs that differ in more than their seeds, or what is no training run.
    """
    specs = [{name: value for name, value in r["spec"].items() if name != "seed"} for r in records]
    if not specs or any(spec != specs[0] or spec["kind"] not in ("train", "composed") for spec in specs):
        raise ValueError(f"{len(specs)} runs make no group: take training runs that differ in their seeds alone.")
    seeds, digests = [r["spec"]["seed"] for r in records], [r["digest"] for r in records]
    return {"run": specs[0], "seeds": seeds, "digests": digests}


def of_group(named: Mapping[str, Any]) -> list[np.ndarray]:
    """Return the flat float32 weights of each run of a group, made as `again` makes them."""
    runs = zip(named["seeds"], named["digests"], strict=True)
    return [again(named["run"] | {"seed": seed}, digest)[0] for seed, digest in runs]


# ---- points in the space of weights that runs define


def end(
    records: Sequence[Record], *, factor: float = 1.0, as_long_as: Sequence[Record] = (), draw: int | None = None
) -> dict[str, Any]:
    """Return how a spec names the point base + factor * (mean of the runs' weights - base).

    Args:
        records: of the runs, which make a group; one alone is where it ended.
        factor: what the mean displacement is multiplied by.
        as_long_as: runs whose mean displacement gives this one its length, before the factor; none: its own length.
        draw: instead of the mean displacement a random direction, the draw of this number, with the same norm in each
            tensor. None: the mean itself.

    Raises:
        ValueError: runs that make no group, runs from another base, or a factor that is not finite.
    """
    require(np.isfinite(factor), f"factor={factor} must be a finite number.")
    named: dict[str, Any] = {"of": group(records), "factor": float(factor)}
    if as_long_as:
        named["as_long_as"] = group(as_long_as)
        base, other = (named[name]["run"]["base"] for name in ("of", "as_long_as"))
        require(base == other, f"as_long_as: runs from base {other!r} for runs from {base!r}.")
    return named if draw is None else named | {"draw": draw}


def at_end(spec: Spec, end: Mapping[str, Any] | None) -> Spec:
    """Return the spec of what is asked of a base, or of a model that was trained from it.

    Args:
        spec: what is asked.
        end: the model, of `end`; None: the base itself.

    Raises:
        ValueError: an end of another base.
    """
    if end is None:
        return spec
    begun = end["of"]["run"]["base"]
    require(begun == spec["base"], f"the model started from base {begun!r}, the spec is of {spec['base']!r}.")
    return spec | {"end": dict(end)}


def displacement(named: Mapping[str, Any], start: np.ndarray, layout: noise.Layout) -> np.ndarray:
    """Return the displacement from the base that `end` names, float64 (layout.size,).

    Args:
        named: of `end`.
        start: flat float32 weights of the base.
        layout: of the weights.

    Raises:
        ValueError: weights that are not those of their record.
    """
    mean = _mean(named["of"], start)
    if "as_long_as" in named:
        own = np.linalg.norm(mean)
        mean *= np.linalg.norm(_mean(named["as_long_as"], start)) / own if own else 0.0
    if "draw" in named:
        parts = layout.views(mean)
        norms = {name: float(np.linalg.norm(part)) for name, part in parts.items()}
        direction = geometry.random_like(norms, {name: part.shape for name, part in parts.items()}, named["draw"])
        for name, part in parts.items():
            part[...] = direction[name].numpy()
    return named["factor"] * mean


def moved(start: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Return float32 weights moved by a float64 displacement, rounded once."""
    return (start + by).astype(np.float32)


def _mean(named: Mapping[str, Any], start: np.ndarray) -> np.ndarray:
    return np.mean([master.astype(np.float64) - start for master in of_group(named)], axis=0)


def _path(digest: str) -> Path:
    return paths.RUNS / "weights" / f"{digest}.npy"
