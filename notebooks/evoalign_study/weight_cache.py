"""A cache of the final weights of runs of the tiny world, which are rebuilt from the records when missing.

A record holds the digest of its weights, not the weights. To rebuild a trained model it is replayed from a ledger or
trained again, which takes minutes. So the final weights of runs at scale tiny, and all weights that were rebuilt, are
kept in `runs/weights` under their digest and read the next time. That folder may be removed at any time.
"""

import io
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """Store flat float32 weights under their digest, and return the file. A file that exists is left as it is."""
    if not (path := _path(models.flat_digest(master))).is_file():
        written = io.BytesIO()
        np.save(written, master, allow_pickle=False)
        files.replace_bytes(path, written.getvalue())
    return path


def kept(digest: str) -> np.ndarray | None:
    """Return the stored flat float32 weights with a digest (`models.flat_digest`); None if they are not stored.

    Raises:
        ValueError: the file of that name holds other weights.
    """
    if not (path := _path(digest)).is_file():
        return None
    master = np.load(path, allow_pickle=False)
    now = models.flat_digest(master)
    require(now == digest, f"{path} is damaged: its weights have the digest {now}. Remove it.")
    return master


def again(spec: Spec, digest: str) -> tuple[np.ndarray, str]:
    """Return the flat float32 weights that a training run ended with, and how they were obtained.

    They are read if they are "kept". If not, they are "replayed" from the ledger of the run's committed record or, if
    there is none, "trained again" without evaluation on the way, and then stored.

    Args:
        spec: of the run.
        digest: of the weights, from the run's record.

    Raises:
        ValueError: the rebuilt weights have another digest.
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
    """Raise ValueError if weights, obtained in the way that `how` names, do not have the digest of their record."""
    weights = f"the weights, {how}, have the digest {found}, not {wanted} as in the record"
    require(found == wanted, f"{weights}: this machine computes differently, or other code made the record.")


def kept_ledger(spec: Spec, digest: str) -> Path | None:
    """Return the ledger of a spec's committed record, or None if no such record has a ledger and these weights.

    digest: of the weights that the run ended with. If a run was repeated on another machine, it ended with other
    weights than the committed one, whose ledger is then not its own.
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


# ---- groups of runs that differ only in their seeds


def group(records: Sequence[Record]) -> dict[str, Any]:
    """Return the entry that names the weights of several runs in a spec: their common spec, seeds and digests.

    Raises:
        ValueError: there are no runs, they differ in more than their seeds, or one of them is not a training run.
    """
    specs = [{name: value for name, value in r["spec"].items() if name != "seed"} for r in records]
    if not specs or any(spec != specs[0] or spec["kind"] not in ("train", "composed") for spec in specs):
        raise ValueError(f"{len(specs)} runs make no group. Pass training runs that differ only in their seeds.")
    seeds, digests = [r["spec"]["seed"] for r in records], [r["digest"] for r in records]
    return {"run": specs[0], "seeds": seeds, "digests": digests}


def of_group(named: Mapping[str, Any]) -> list[np.ndarray]:
    """Return the flat float32 weights of each run of a group, as `again` obtains them."""
    runs = zip(named["seeds"], named["digests"], strict=True)
    return [again(named["run"] | {"seed": seed}, digest)[0] for seed, digest in runs]


def at_steps(named: Mapping[str, Any], steps: Sequence[int]) -> Iterator[list[np.ndarray]]:
    """Yield the flat float32 weights of each ES run of a group after these numbers of steps, in ascending order.

    A run is replayed from its ledger; if that is not among the committed ones, it is trained again first.

    Raises:
        LedgerError: a step that a run did not take, or a ledger that does not fit.
    """
    for seed, digest in zip(named["seeds"], named["digests"], strict=True):
        spec: Spec = named["run"] | {"seed": seed}
        source: Any = kept_ledger(spec, digest)
        if source is None:
            with tempfile.TemporaryDirectory() as place, trainers.train(spec, Path(place)):
                source = ledger.read(Path(place) / ledger.NAME)
        yield ledger.replay_at(source, spec["base"], steps)


# ---- points in weight space that are defined by runs


def end(
    records: Sequence[Record],
    *,
    factor: float = 1.0,
    as_long_as: Sequence[Record] = (),
    draw: int | None = None,
    walk: int | None = None,
) -> dict[str, Any]:
    """Return the entry that names the point base + factor * (mean of the runs' weights - base) in a spec.

    Args:
        records: of the runs, which must form a `group`; a single run gives the weights that it ended with.
        factor: what the mean displacement is multiplied by.
        as_long_as: runs whose mean displacement sets the length of this one, before the factor; empty: its own length.
        draw: number of a random direction that replaces the mean displacement, with the same norm in each tensor. None:
            the mean itself.
        walk: number of a fresh random walk, spread evenly over all weights, that is added to the mean displacement to
            make it `as_long_as` those runs, where otherwise it is scaled. None: no walk.

    Raises:
        ValueError: the runs do not form a group, start from different bases, or the factor is not finite; or a walk
            without a length.
    """
    require(np.isfinite(factor), f"factor={factor} must be a finite number.")
    named: dict[str, Any] = {"of": group(records), "factor": float(factor)}
    if as_long_as:
        named["as_long_as"] = group(as_long_as)
        base, other = (named[name]["run"]["base"] for name in ("of", "as_long_as"))
        require(base == other, f"as_long_as has runs from base {other!r}. Pass runs from {base!r}.")
    require(walk is None or as_long_as, f"walk={walk} has no length: pass runs in as_long_as.")
    return named | {name: n for name, n in {"draw": draw, "walk": walk}.items() if n is not None}


def at_end(spec: Spec, end: Mapping[str, Any] | None) -> Spec:
    """Return the spec of a measurement, on its base or on a model that was trained from that base.

    Args:
        spec: of the measurement on the base.
        end: the model, from `end`; None: the base itself.

    Raises:
        ValueError: the model was trained from another base.
    """
    if end is None:
        return spec
    begun = end["of"]["run"]["base"]
    require(begun == spec["base"], f"the model started from base {begun!r}, but the spec is of {spec['base']!r}.")
    return spec | {"end": dict(end)}


def displacement(named: Mapping[str, Any], start: np.ndarray, layout: noise.Layout) -> np.ndarray:
    """Return the displacement from the base that `end` names, float64 (layout.size,).

    Args:
        named: entry made by `end`.
        start: flat float32 weights of the base.
        layout: of the weights.

    Raises:
        ValueError: rebuilt weights are not those of their record, or the mean alone is longer than a walk may make it.
    """
    mean = _mean(named["of"], start)
    length = np.linalg.norm(_mean(named["as_long_as"], start)) if "as_long_as" in named else None
    if "walk" in named:
        walk = np.zeros_like(mean)
        _draw(layout.views(walk), lambda part: np.sqrt(part.size), named["walk"])
        square, along, short = walk @ walk, mean @ walk, length**2 - mean @ mean
        require(short >= 0, f"a mean of length {np.linalg.norm(mean):g} is longer than {length:g}: average more runs.")
        mean += walk * (np.sqrt(along**2 + square * short) - along) / square
    elif length is not None:
        own = np.linalg.norm(mean)
        mean *= length / own if own else 0.0
    if "draw" in named:
        _draw(layout.views(mean), np.linalg.norm, named["draw"])
    return named["factor"] * mean


def _draw(parts: Mapping[str, np.ndarray], norm: Callable[[np.ndarray], Any], key: int) -> None:
    """Replace each tensor by a random direction with the norm that a function gives for it."""
    norms = {name: float(norm(part)) for name, part in parts.items()}
    direction = geometry.random_like(norms, {name: part.shape for name, part in parts.items()}, key)
    for name, part in parts.items():
        part[...] = direction[name].numpy()


def moved(start: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Return float32 weights moved by a float64 displacement, rounded once."""
    return (start + by).astype(np.float32)


def _mean(named: Mapping[str, Any], start: np.ndarray) -> np.ndarray:
    return np.mean([master.astype(np.float64) - start for master in of_group(named)], axis=0)


def _path(digest: str) -> Path:
    return paths.RUNS / "weights" / f"{digest}.npy"
