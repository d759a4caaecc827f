"""Specs and records of runs: their hashes, their files, their limits, and results packed problem by problem.

A run is a spec, a flat dictionary of everything that decides its result; its hash is its name. A finished run is one
JSON line, in paper/results/<notebook>/<scale>.jsonl for committed scales. `ENGINE_VERSION`, which is part of every
spec, is raised when a change of the library changes results.

The ledger of a run (`evoalign_lib.ledger`) is kept where a notebook asks for it, in the folder `ledgers` beside the
record file, as <spec hash>.jsonl.gz. The record holds its size and SHA-256, and the digest of the run's last weights.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

ENGINE_VERSION = 2
SCALES = ("smoke", "tiny", "full")
MAX_RECORD = 8_000
"""Bytes of a record, at most."""
MAX_CURVE = 50
"""Points of a curve in a record, at most."""
_SAMPLES = 16
_DIGITS = "0123456789abcdefg"

Record = dict[str, Any]
Spec = dict[str, Any]


def canonical_json(value: Any) -> str:
    """Return the one JSON text of a value: sorted keys, no spaces, ASCII. Raises ValueError for NaN and infinities.

    >>> canonical_json({"b": 1, "a": [0.5, None]})
    '{"a":[0.5,null],"b":1}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def spec_hash(spec: Spec) -> str:
    """SHA-256 of the canonical JSON of a spec, 16 hexadecimal digits."""
    return hashlib.sha256(canonical_json(spec).encode()).hexdigest()[:16]


def read_records(path: Path) -> list[Record]:
    """The records of a file, in file order; a torn last line (a killed run) is left out.

    Raises:
        ValueError: a line that is not a record, naming file and line.
    """
    if not path.is_file():
        return []
    records = []
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):  # no newline at its end: the writer was killed
                break
            raise ValueError(f"{path}, line {number} is not JSON: {error}. Restore the file from git.") from error
        if not isinstance(record, dict) or not {"spec", "spec_hash", "status"} <= record.keys():
            raise ValueError(f"{path}, line {number} is not a record: {line:.80}. Restore the file from git.")
        if record["spec_hash"] != spec_hash(record["spec"]):
            raise ValueError(
                f"{path}, line {number}: the spec does not have the hash {record['spec_hash']!r}, so it was edited. "
                "Restore the file from git, or delete the line to run its spec again."
            )
        records.append(record)
    return records


def append_record(path: Path, record: Record, kept: Path | None = None) -> Record:
    """Add one line to a record file, synced to disk; a torn last line of a killed run is cut off first.

    Several processes may write to a file at once: it is locked meanwhile (`fcntl.flock`, which Windows does not have:
    let one process write there). Of two records of one spec the first stays, and the second is left out.

    Args:
        path: of the file, made with its folder where it is not there.
        record: of a finished run.
        kept: the ledger of the run, to be kept beside the file as ledgers/<spec hash>.jsonl.gz.

    Returns:
        The record of this spec that the file holds now; if it is another one, that is printed.

    Raises:
        ValueError: a record over 8 kB, with a curve over 50 points, or with numbers that are not finite.
    """
    line, own = record_line(record).encode(), record["spec_hash"]
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)  # given back where the file is closed
        file.seek(0)
        text = file.read()
        complete = text.rfind(b"\n") + 1
        if _is_json(text[complete:]):  # only the newline is missing: read_records takes it for a record
            line = b"\n" + line
        else:
            text = text[:complete]
            file.truncate(complete)
        for stored in text.splitlines():
            if f'"spec_hash":"{own}"'.encode() in stored:
                print(f"{path} has a record of {run_name(record['spec'])} already, made meanwhile: it stays")
                return json.loads(stored)
        if kept is not None:
            _keep(kept, path.parent / "ledgers" / f"{own}.jsonl.gz")  # first: no record is without its ledger
        _write(file, line)
    return record


def _write(file: BinaryIO, data: bytes) -> None:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


def _keep(source: Path, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(f"partial-{path.name}")
    with open(partial, "wb") as file:
        _write(file, source.read_bytes())
    partial.replace(path)  # complete, or not there


def record_line(record: Record) -> str:
    """A record as its line in a file. Raises ValueError, naming the run, where it may not be stored."""
    name = run_name(record["spec"])
    bad: list[str] = []
    without_nonfinite(record, "", bad)
    if bad:
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise ValueError(
            f"the run {name} has numbers that are not finite: {', '.join(bad[:5])}{more}. Take smaller steps or "
            "less noise (alpha, sigma, learning_rate)."
        )
    for curve, values in record.get("curve", {}).items():
        if len(values) > MAX_CURVE:
            raise ValueError(f"curve {curve!r} of {name} has {len(values)} points, at most {MAX_CURVE} are allowed.")
    line = canonical_json(record) + "\n"
    if len(line) > MAX_RECORD:
        raise ValueError(f"the record of {name} has {len(line)} bytes: at most {MAX_RECORD} may be.")
    return line


def without_nonfinite(value: Any, name: str, bad: list[str]) -> Any:
    """A value of a record with None for each number in it that is not finite, of which the list gets the names."""
    if isinstance(value, dict):
        return {k: without_nonfinite(v, f"{name}.{k}" if name else k, bad) for k, v in value.items()}
    if isinstance(value, list):
        return [without_nonfinite(v, f"{name}[{i}]", bad) for i, v in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        bad.append(f"{name} = {value}")
        return None
    return value


def run_name(spec: Spec) -> str:
    """Return what a reader may call a run: its arm or kind, base and seed."""
    return " ".join(str(spec[k]) for k in ("arm" if "arm" in spec else "kind", "base", "seed", "repeat") if k in spec)


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


# ---- results, packed problem by problem


def accuracy_matrix(records: Sequence[dict[str, Any]], decoding: str = "greedy") -> NDArray[np.float64]:
    """Return the test results of runs as a matrix (seeds x problems), rows in the order of the records.

    records: run records with a `test` block. decoding: "greedy" (0 or 1), or a temperature such as "t1" or "t0.6"
    (share of 16 samples).
    Raises ValueError for no records, a decoding that a record has not, and records with other numbers of problems.
    """
    key = "greedy_bits" if decoding == "greedy" else f"{decoding}_counts"
    lacking = [record for record in records if key not in record["test"]]
    if lacking:
        known = sorted(name.removesuffix("_counts") for name in lacking[0]["test"] if name.endswith("_counts"))
        raise ValueError(
            f"unknown decoding {decoding!r}: {len(lacking)} of {len(records)} records have no {key!r}; use one of "
            f"{', '.join(['greedy', *known])}"
        )
    sizes = {record["test"]["n"] for record in records}
    if len(sizes) != 1:
        raise ValueError(f"runs with {sorted(sizes)} test problems do not form one matrix: select runs of one test set")
    (n,) = sizes
    if decoding == "greedy":
        return np.stack([unpack_bits(record["test"][key], n) for record in records]).astype(np.float64)
    rows = [unpack_counts(record["test"][key]) for record in records]
    if any(len(row) != n for row in rows):
        raise ValueError(f"{key} of length {[len(row) for row in rows]} where n = {n}: the record is damaged")
    return np.stack(rows) / _SAMPLES


def pack_bits(bits: ArrayLike) -> str:
    """Return 0/1 results as hexadecimal text, eight problems a byte, the first one in the highest bit.

    bits: (problems,), 0 or 1. Raises ValueError for other values.

    >>> pack_bits([1, 0, 0, 0, 0, 0, 0, 1, 1])
    '8180'
    """
    row = np.asarray(bits)
    if row.ndim != 1 or not np.isin(row, (0, 1)).all():
        raise ValueError(f"bits must be one row of 0 and 1, got shape {row.shape} with values {np.unique(row)[:5]}")
    return np.packbits(row.astype(np.uint8)).tobytes().hex()


def unpack_bits(text: str, n: int) -> NDArray[np.uint8]:
    """Return the (n,) 0/1 results that `pack_bits` wrote. Raises ValueError if the text is not that of n problems."""
    packed = np.frombuffer(bytes.fromhex(text), np.uint8)
    if len(packed) != (n + 7) // 8:
        raise ValueError(f"{len(packed)} bytes of results where {n} problems need {(n + 7) // 8}: damaged record")
    bits = np.unpackbits(packed)
    if bits[n:].any():
        raise ValueError(f"bits are set beyond problem {n}: the record belongs to a larger test set")
    return bits[:n]


def pack_counts(counts: ArrayLike) -> str:
    """Return the number of right samples of 16 for each problem as text, one base-17 digit (0-9a-g) a problem.

    counts: (problems,), integers 0..16. Raises ValueError for other values.

    >>> pack_counts([0, 9, 10, 16])
    '09ag'
    """
    row = np.asarray(counts)
    if row.ndim != 1 or not np.isin(row, np.arange(_SAMPLES + 1)).all():
        raise ValueError(f"counts must be one row of integers 0..{_SAMPLES}, got shape {row.shape}: {row.ravel()[:5]}")
    return "".join(_DIGITS[int(count)] for count in row)


def unpack_counts(text: str) -> NDArray[np.int64]:
    """Return the (problems,) counts 0..16 that `pack_counts` wrote. Raises ValueError for any other character."""
    strange = sorted(set(text) - set(_DIGITS))
    if strange:
        raise ValueError(f"{strange[0]!r} is no base-17 digit (0-9a-g): damaged record")
    return np.array([_DIGITS.index(digit) for digit in text], dtype=np.int64)
