"""Specs and records of runs: hashes, files, index, size limits, and results packed per problem.

A spec is a flat dictionary of everything that determines the result of a run; its hash identifies the run. A finished
run is one JSON line, in paper/results/<notebook>/<scale>.jsonl for committed scales. `ENGINE_VERSION` is part of every
spec and is raised when a change to the library changes results.

If a notebook asks for it, the ledger of a run (`evoalign_lib.ledger`) is kept beside the record file, as
ledgers/<spec hash>.jsonl.gz. The record then holds its size and SHA-256, and the digest of the run's final weights.

Beside each record file lies its index, <scale>.index: one line per record, in the order of the records, with the spec
hash, the SHA-256 of the record's line, and the SHA-256 of the ledger's file ("-" without one). `index_problems`
recomputes them and reports what does not match. An edit of both a record and its index shows in the git history: an
index line that was ever committed must stay (`artifacts.lost_from_history`).
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evoalign_lib._interrupts import interrupts_wait
from evoalign_lib.analysis import curves
from evoalign_lib.checks import require
from evoalign_lib.files import canonical_json, locked, replace_bytes
from evoalign_study import paths

ENGINE_VERSION = 2
FINISHED = "finished"
"""The status of every record; a run that did not finish has no record."""
SCALES = ("smoke", "tiny", "full", "real")
MAX_RECORD = 8_000
"""Maximum size of a record, bytes."""
MAX_CURVE = 50
"""Maximum number of points of a curve in a record."""
_SAMPLES = 16
_DIGITS = "0123456789abcdefg"


Settings = Mapping[str, Any]
"""Settings of a notebook, from which specs are built: name -> value."""


class Spec(TypedDict, total=False):
    """Everything that determines the result of a run: these entries, and those of its kind, task and arm."""

    kind: str
    """One of `kinds.KINDS`."""
    task: str
    base: str
    """A shipped base ("A0", ...), a model on the Hub, or a folder."""
    base_digest: str
    scale: str
    engine_version: int
    arm: str
    """Training runs only: a key of `arms.ARMS`."""
    seed: int
    steps: int


class Record(TypedDict, total=False):
    """What is stored about a finished run: these entries, and those of its kind and task."""

    spec: Spec
    spec_hash: str
    notebook: str
    status: str
    commit: str
    environment: dict[str, str]
    budget: dict[str, float]
    test: dict[str, Any]
    curve: dict[str, list]
    digest: str
    """Digest of the final weights of a training run."""
    ledger: dict[str, Any]


def spec_hash(spec: Spec) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a spec's canonical JSON."""
    return _sha256(canonical_json(spec).encode())[:16]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def read_records(path: Path, hashes: Container[str] | None = None) -> list[Record]:
    """Return the records of a file in file order; a torn last line, left by a killed run, is skipped.

    Bytes that this process has checked are not checked again: a notebook reads all files for each group.

    Args:
        path: the record file.
        hashes: spec hashes of the records wanted; None: all.

    Raises:
        ValueError: a line is not a record of a finished run, or its spec was edited; names file and line.
    """
    lines = _checked_lines(path, _bytes(path))
    return [json.loads(line) for spec, line in lines if hashes is None or spec in hashes]


def record_files(scale: str = "*") -> list[Path]:
    """Return the committed record files, of one scale or of all, notebook by notebook."""
    return sorted(paths.RESULTS.glob(f"*/{scale}.jsonl"))


@lru_cache(maxsize=32)  # one file per notebook, and fresh ones; the committed files are a few megabytes together
def _checked_lines(path: Path, data: bytes) -> list[tuple[str, bytes]]:
    """Return the spec hash and the line of each record in the bytes of a file; errors as for `read_records`."""
    lines = []
    for number, line in _numbered(_whole(data)):
        try:
            lines.append((_record(line)["spec_hash"], line))
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number} {error}. Restore the file from git; in a run folder, delete the line to run "
                "its spec again."
            ) from error
    return lines


def _whole(data: bytes) -> bytes:
    """Return the bytes of a record file without a last line that was torn by a killed writer."""
    last = data.rpartition(b"\n")[2]
    try:
        json.loads(last or b"0")
    except (ValueError, RecursionError):
        return data.removesuffix(last)
    return data


def _record(line: bytes) -> Record:
    """Return the record in a line. Raises ValueError, saying what is wrong with the line."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not a JSON number")

    try:
        record = json.loads(line.decode(), parse_constant=refuse)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise ValueError(f"is not JSON: {error}") from error
    ledger = record.get("ledger", {"sha256": "", "weights": ""}) if isinstance(record, dict) else None
    if not (isinstance(ledger, dict) and isinstance(record.get("spec"), dict)) or not all(
        isinstance(name, str) for name in (record.get("spec_hash"), ledger.get("sha256"), ledger.get("weights"))
    ):
        raise ValueError(f"is not a record: {line.decode():.80}")
    if record["spec_hash"] != spec_hash(record["spec"]):
        raise ValueError(f"was edited: its spec does not have the hash {record['spec_hash']!r}")
    if record.get("status") != FINISHED:
        name, status = run_name(record["spec"]), record.get("status")
        raise ValueError(f"({name}) was edited: status {status!r:.80}, but only runs that {FINISHED} are stored")
    return record


def append_record(path: Path, record: Record, kept: Path | None = None) -> Record:
    """Append one line to a record file and one to its index, both synced to disk.

    Several processes may write to a file at once: it is locked meanwhile, and Ctrl-C waits until both lines are
    written. What a killed writer left is repaired first: a torn last line is cut off, and records without an index line
    get one, which is reported. If two records have the same spec, the first one stays.

    Args:
        path: the record file; it and its folder are created if need be.
        record: the record of a finished run.
        kept: the ledger of the run, to be stored beside the file as ledgers/<spec hash>.jsonl.gz.

    Returns:
        The record that the file now holds for this spec; if it is another one, a message is printed.

    Raises:
        ValueError: a record over 8 kB, with a curve over 50 points, or with numbers that are not finite; or a file that
            cannot be read (see `read_records`).
    """
    line, own = record_line(record).encode().rstrip(b"\n"), record["spec_hash"]
    with locked(path), interrupts_wait():
        stored, index = _mended(path)
        if missing := _add_missing(path, stored, index):
            what = "1 record" if missing == 1 else f"{missing} records"
            print(f"indexed {what} of {path} that had no line in its index")
        for spec, first in stored:
            if spec == own:
                print(f"{path} already has a record of {run_name(record['spec'])}, made meanwhile: it stays")
                return json.loads(first)
        if kept is not None:  # first, so that no record lacks its ledger
            replace_bytes(_ledger_file(path.parent, own), kept.read_bytes(), sync=True)
        for file, own_line in ((path, line), (_index_file(path), _index_line(record, line))):
            replace_bytes(file, _bytes(file) + own_line + b"\n", sync=True)
    return record


def record_line(record: Record) -> str:
    """Return a record as a line of a record file.

    Raises:
        ValueError: the record may not be stored; names the run.
    """
    name = run_name(record["spec"])
    if bad := list(_nonfinite(record)):
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise ValueError(
            f"the run {name} has numbers that are not finite: {', '.join(bad[:5])}{more}. Take smaller steps or "
            "less noise (alpha, sigma, learning_rate)."
        )
    for curve, values in record.get("curve", {}).items():
        fits = len(values) <= MAX_CURVE
        require(fits, f"curve {curve!r} of {name} has {len(values)} points, at most {MAX_CURVE} are allowed.")
    line = canonical_json(record) + "\n"
    require(len(line) <= MAX_RECORD, f"the record of {name} has {len(line)} bytes: at most {MAX_RECORD} are allowed.")
    return line


def _nonfinite(value: Any, name: str = "") -> Iterator[str]:
    """Yield name and value of each number in a record that is not finite."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _nonfinite(part, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for i, part in enumerate(value):
            yield from _nonfinite(part, f"{name}[{i}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{name} = {value}"


def plain_json(text: str) -> Any:
    """Parse Python's JSON, with None for each number that is not finite, which standard JSON does not have."""
    return json.loads(text, parse_constant=lambda name: None)


def run_name(spec: Spec) -> str:
    """Return a readable name of a run: its arm or kind, base and seed."""
    return " ".join(str(spec[k]) for k in ("arm" if "arm" in spec else "kind", "base", "seed", "repeat") if k in spec)


# ---- the index

_RESTORE, _INDEX_IT = "restore it from git", "run `python -m evoalign_study seal`"
_ROUNDED = 1e-6  # means are stored with six decimals


def index(path: Path) -> int:
    """Add the missing lines to the index of a record file; return how many were added.

    Lines are missing after a writer was killed, or after records were merged from another branch. Nothing is added if
    some line of the index has no record (see `index_problems`).

    Raises:
        ValueError: a line of the file is not a record.
    """
    with locked(path), interrupts_wait():
        return _add_missing(path, *_mended(path))


def index_problems(path: Path) -> list[str]:
    """Return where a record file, its index and its ledgers disagree, one line per problem; empty if they agree.

    It finds records that were edited, inserted, deleted or moved, changes to the index itself, ledgers that are missing
    or are not those recorded, and records that contradict themselves: an accuracy must be the mean of the results
    stored with it. Each problem names file, line and spec, and the remedy.
    """
    data, index_file = _bytes(path), _index_file(path)
    index = _bytes(index_file)
    if data and not index:
        return [f"{path} has no index: restore {index_file} from git, or make it with `python -m evoalign_study seal`"]
    kept = {line[:16]: line for _, line in _numbered(index)}
    whole: dict[bytes, bytes] = {}
    problems = []
    for number, line in _numbered(data):
        where = f"{path}, line {number}"
        try:
            record = _record(line)
        except ValueError as error:
            problems.append(f"{where} {error}: {_RESTORE}, or delete the line if it is the last one and torn")
            continue
        spec, indexed = record["spec_hash"].encode(), _index_line(record, line)
        if spec in whole:
            faults = ["is a second record of its spec: delete one of the two"]
        elif spec not in kept:
            faults = [f"is not in the index: if its writer was killed, or it was merged, {_INDEX_IT}"]
        elif indexed != kept[spec]:
            faults = [f"does not match its line in the index, one of them was edited: {_RESTORE}"]
        else:
            faults = [f"{fault}: {_RESTORE}" for fault in _ledger_faults(path, record) + _contradictions(record)]
        problems += [f"{where} ({run_name(record['spec'])}, spec {record['spec_hash']}) {fault}" for fault in faults]
        whole.setdefault(spec, indexed)
    for number, line in _numbered(index):
        if line[:16] not in whole:
            name = line[:16].decode(errors="replace")
            problems.append(f"{index_file}, line {number}: there is no record of spec {name!r}: {_RESTORE}")
    if not problems and index != _lines(whole.values()):
        problems.append(f"{index_file} has lines that are out of order, repeated or torn: {_RESTORE}, or {_INDEX_IT}")
    return problems


def _index_line(record: Record, line: bytes) -> bytes:
    """Return the index line, without its newline, of the record in a line."""
    ledger = record["ledger"]["sha256"] if "ledger" in record else "-"
    return f"{record['spec_hash']} {_sha256(line)} {ledger}".encode()


def _mended(path: Path) -> tuple[list[tuple[str, bytes]], list[bytes]]:
    """Repair what a killed writer left torn; return spec hash and line of each record, and the lines of the index."""
    data, index = _whole(_bytes(path)), _bytes(_index_file(path))
    data += b"\n" if data and not data.endswith(b"\n") else b""  # only the newline was not written
    index = index[: index.rfind(b"\n") + 1]
    for file, mended in ((path, data), (_index_file(path), index)):
        if mended != _bytes(file):
            replace_bytes(file, mended, sync=True)
    return _checked_lines(path, data), [line for _, line in _numbered(index)]


def _add_missing(path: Path, stored: list[tuple[str, bytes]], index: list[bytes]) -> int:
    """Write an index with a line for each record, unless that would lose a line; return how many were added."""
    if [line[:16].decode(errors="replace") for line in index] == [spec for spec, _ in stored]:
        return 0
    whole = [_index_line(json.loads(line), line) for _, line in stored]
    if not set(index) <= set(whole):
        return 0
    replace_bytes(_index_file(path), _lines(whole), sync=True)
    return len(set(whole) - set(index))


def _lines(lines: Iterable[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)


def _ledger_faults(path: Path, record: Record) -> list[str]:
    """Return what is wrong with the ledger that was kept with a record."""
    file = _ledger_file(path.parent, record["spec_hash"])
    if "ledger" not in record or _sha256(_bytes(file)) == record["ledger"]["sha256"]:
        return []
    return [f"its ledger {file} is {'not the one that was recorded' if file.is_file() else 'missing'}"]


def _ledger_file(folder: Path, spec: str) -> Path:
    return folder / "ledgers" / f"{spec}.jsonl.gz"


def _index_file(path: Path) -> Path:
    return path.with_suffix(".index")


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _numbered(data: bytes) -> list[tuple[int, bytes]]:
    """Return the lines that are not empty, with their numbers from 1."""
    return [(number, line) for number, line in enumerate(data.split(b"\n"), 1) if line]


def _contradictions(record: Record) -> list[str]:
    """Return a record's contradictions: means that are not those of its packed results."""
    faults, blocks = [], [("", record)]
    for name, block in blocks:  # the list grows: blocks within a block are appended
        blocks += [(f"{name}.{key}" if name else key, value) for key, value in block.items() if isinstance(value, dict)]
        for key, packed in block.items():
            what, _, kind = key.rpartition("_")
            if kind not in ("bits", "counts") or not isinstance(packed, str) or isinstance(block.get(what, ""), str):
                continue
            try:
                mean = _results(packed, kind, block.get("n", record.get("completions"))).mean()
                require(abs(mean - block[what]) <= _ROUNDED, f"their mean is {mean:.6g}")
            except (TypeError, ValueError) as error:
                path = f"{name}.{what}" if name else what
                faults.append(f"{path} is {block[what]!r}, which contradicts {path}_{kind}: {error}")
    return faults


def _results(packed: str, kind: str, n: int) -> NDArray[np.float64]:
    """Return n results, packed as "bits" or as "counts", as shares. Raises ValueError if there are not n."""
    results = unpack_bits(packed, n) if kind == "bits" else unpack_counts(packed) / _SAMPLES
    require(len(results) == n, f"{len(results)} results where n is {n}: damaged record")
    return results.astype(np.float64)


def run_folder(notebook: str, scale: str) -> Path:
    """Return the folder that a fresh run writes to: EVOALIGN_RUN_DIR, or runs/<notebook>-<scale>."""
    return Path(os.environ.get("EVOALIGN_RUN_DIR") or paths.RUNS / f"{notebook}-{scale}")


def ledger_file(record: Record) -> Path:
    """Return the path of the ledger kept with a record: among the committed ones, or below the run folder.

    Raises:
        ValueError: the record was made without keeping its ledger, or no file has the recorded SHA-256.
    """
    spec = record["spec"]
    if "ledger" not in record:
        raise ValueError(
            f"the record {record['spec_hash']} of {record['notebook']} ({run_name(spec)}) was made without keeping "
            "the run's ledger: delete its line to run it again, or leave its spec out of keep_ledgers."
        )
    beside = run_folder(record["notebook"], spec["scale"]) / "results"
    found = [_ledger_file(folder, record["spec_hash"]) for folder in (paths.RESULTS / record["notebook"], beside)]
    for path in found:
        if _sha256(_bytes(path)) == record["ledger"]["sha256"]:
            return path
    raise ValueError(
        f"the ledger of the record {record['spec_hash']} (SHA-256 {record['ledger']['sha256']:.16}...) is neither "
        f"{found[0]} nor {found[1]}: restore it from git, or delete the record's line to run its spec again."
    )


# ---- results, packed problem by problem


def spent_to_gain(record: Mapping[str, Any], decoding: str, gain: float) -> tuple[float, bool]:
    """Return the completions after which validation accuracy was first so much above its first point, and if it was.

    Without it, all completions are returned. Random fitness, which draws none, counts like ES of as many steps.
    """
    spec, points = record["spec"], record["curve"]
    scores, spent = np.array(points[f"validation_{decoding}"], float), points["completions"]
    if not spent[-1]:
        spent = np.multiply(points["step"], spec["population_size"] * spec["prompts_per_step"])
    return curves.spent_until(spent, scores, scores[0] + gain), bool(scores.max() >= scores[0] + gain)


def accuracy_matrix(records: Sequence[dict[str, Any]], decoding: str = "greedy") -> NDArray[np.float64]:
    """Return the test results of runs as a matrix (seeds, problems), rows in the order of the records.

    Args:
        records: records with a `test` block.
        decoding: "greedy" (0 or 1), or a temperature such as "t1" or "t0.6" (share of 16 samples).

    Raises:
        ValueError: no records, a decoding that a record lacks, or records with unequal numbers of problems.
    """
    key = "greedy_bits" if decoding == "greedy" else f"{decoding}_counts"
    if lacking := [record for record in records if key not in record["test"]]:
        known = sorted(name.removesuffix("_counts") for name in lacking[0]["test"] if name.endswith("_counts"))
        raise ValueError(
            f"unknown decoding {decoding!r}: {len(lacking)} of {len(records)} records have no {key!r}; use one of "
            f"{', '.join(['greedy', *known])}"
        )
    sizes = sorted({record["test"]["n"] for record in records})
    require(len(sizes) == 1, f"runs with {sizes} test problems do not form one matrix: select runs of one test set")
    kind = key.rpartition("_")[2]
    return np.stack([_results(record["test"][key], kind, sizes[0]) for record in records])


def _row(values: ArrayLike, what: str, fits: Callable[[NDArray], Any]) -> NDArray:
    """Return values as a one-dimensional array. Raises ValueError for another shape, or a value that does not fit."""
    row = np.asarray(values)
    whole = row.ndim == 1 and np.all(fits(row))
    require(whole, f"values must be one row of {what}, got shape {row.shape}: {row.ravel()[:5]}")
    return row


def _values(text: str, digits: str) -> NDArray[np.int64]:
    """Return the values of the digits in a text. Raises ValueError for any other character."""
    if strange := sorted(set(text) - set(digits)):
        raise ValueError(f"{strange[0]!r} is not a digit of base {len(digits)}: damaged record")
    values = bytes.maketrans(digits.encode(), bytes(range(len(digits))))
    return np.frombuffer(text.encode().translate(values), np.uint8).astype(np.int64)


def pack_bits(bits: ArrayLike) -> str:
    """Return 0/1 results as hexadecimal text, eight problems per byte, the first one in the highest bit.

    Args:
        bits: (problems,), 0 or 1.

    Raises:
        ValueError: other values.

    >>> pack_bits([1, 0, 0, 0, 0, 0, 0, 1, 1])
    '8180'
    """
    row = _row(bits, "0 and 1", lambda row: np.isin(row, (0, 1)))
    return np.packbits(row.astype(np.uint8)).tobytes().hex()


def unpack_bits(text: str, n: int) -> NDArray[np.uint8]:
    """Return the (n,) 0/1 results that `pack_bits` wrote.

    Raises:
        ValueError: the text does not hold n problems.
    """
    packed, needed = np.frombuffer(bytes.fromhex(text), np.uint8), (n + 7) // 8
    whole = len(packed) == needed
    require(whole, f"{len(packed)} bytes of results where {n} problems need {needed}: damaged record")
    bits = np.unpackbits(packed)
    require(not bits[n:].any(), f"bits are set beyond problem {n}: the record belongs to a larger test set")
    return bits[:n]


def pack_counts(counts: ArrayLike) -> str:
    """Return the number of correct samples out of 16 as text, one base-17 digit (0-9a-g) per problem.

    Args:
        counts: (problems,), integers 0..16.

    Raises:
        ValueError: other values.

    >>> pack_counts([0, 9, 10, 16])
    '09ag'
    """
    row = _row(counts, f"integers 0..{_SAMPLES}", lambda row: np.isin(row, np.arange(_SAMPLES + 1)))
    return "".join(_DIGITS[int(count)] for count in row)


def unpack_counts(text: str) -> NDArray[np.int64]:
    """Return the (problems,) counts 0..16 that `pack_counts` wrote.

    Raises:
        ValueError: any other character.
    """
    return _values(text, _DIGITS)


_BASE64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
_LOG_STEP = 0.005
"""Resolution of `pack_probabilities`, nats."""
_NEVER = 64**2 - 1


def pack_integers(values: ArrayLike) -> str:
    """Return integers as text, two characters (base 64) for each.

    Args:
        values: (problems,), integers 0..4095.

    Raises:
        ValueError: other values.

    >>> pack_integers([0, 64, 4095])
    'AABA__'
    """
    row = _row(values, f"integers 0..{_NEVER}", lambda row: row.dtype.kind in "iu" and (row >= 0) & (row <= _NEVER))
    return "".join(_BASE64[value // 64] + _BASE64[value % 64] for value in row.tolist())


def unpack_integers(text: str) -> NDArray[np.int64]:
    """Return the (problems,) integers that `pack_integers` wrote.

    Raises:
        ValueError: any other text.
    """
    digits = _values(text, _BASE64)
    require(len(digits) % 2 == 0, f"{len(digits)} digits do not form pairs: damaged record")
    return digits[::2] * 64 + digits[1::2]


def pack_probabilities(values: ArrayLike) -> str:
    """Return probabilities as text, two characters for each, to a relative error of a quarter of a percent.

    Values below 1.3e-9 become 0.

    Args:
        values: (problems,), 0 to 1; rounding errors may exceed 1 by at most 1e-9.

    Raises:
        ValueError: other values.

    >>> unpack_probabilities(pack_probabilities([1, 0.5, 0.001, 0])).round(5).tolist()
    [1.0, 0.49907, 0.001, 0.0]
    """
    row = _row(np.asarray(values, dtype=np.float64), "probabilities", lambda row: (row >= 0) & (row <= 1 + 1e-9))
    with np.errstate(divide="ignore"):
        steps = np.rint(-np.log(row.clip(max=1)) / _LOG_STEP)
    return pack_integers(np.minimum(steps, _NEVER).astype(np.int64))


def unpack_probabilities(text: str) -> NDArray[np.float64]:
    """Return the (problems,) probabilities that `pack_probabilities` wrote.

    Raises:
        ValueError: any other text.
    """
    steps = unpack_integers(text)
    return np.where(steps == _NEVER, 0.0, np.exp(-_LOG_STEP * steps))
