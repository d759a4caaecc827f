"""Specs and records of runs: hashes, files, seals and limits, and results packed problem by problem.

A run is a spec: a flat dictionary of everything that decides its result. The hash of the spec names the run. A finished
run is one JSON line, in paper/results/<notebook>/<scale>.jsonl for committed scales. `ENGINE_VERSION` is part of every
spec and is raised when a change of the library changes results.

The records of a complete notebook may be packed: `pack` moves the lines of <scale>.jsonl to <scale>.jsonl.gz. A record
file goes by the name <scale>.jsonl in either case: what reads it reads the packed lines first, then those of the plain
file, to which later records go. Seals know nothing of it: they are of the lines, in this order.

The ledger of a run (`evoalign_lib.ledger`) is kept where a notebook asks for it, in the folder `ledgers` beside the
record file, as <spec hash>.jsonl.gz. The record holds its size and SHA-256, and the digest of the run's last weights.

Beside each record file lies its seal, <scale>.seal: one line per record, in the order of the records, with the spec
hash, the SHA-256 of the record's line, for a record with a ledger the SHA-256 of the ledger's file and the digest of
the last weights, and the SHA-256 of the previous line's last field with the rest of this line. Records are appended,
never changed, and so are the lines of the seal; `seal_problems` finds what was changed. Whoever edits a record and
writes the whole chain of the seal anew leaves no trace in it: that shows in the history of git alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Container, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evoalign_lib._interrupts import interrupts_wait
from evoalign_lib.files import canonical_json, compressed, decompressed, locked, replace_bytes, sync_folder
from evoalign_study import paths

ENGINE_VERSION = 2
FINISHED = "finished"
"""The status of a record; a run that did not finish has none."""
SCALES = ("smoke", "tiny", "full")
MAX_RECORD = 8_000
"""Bytes of a record, at most."""
MAX_CURVE = 50
"""Points of a curve in a record, at most."""
_SAMPLES = 16
_DIGITS = "0123456789abcdefg"

Record = dict[str, Any]
Spec = dict[str, Any]


def spec_hash(spec: Spec) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a spec's canonical JSON."""
    return hashlib.sha256(canonical_json(spec).encode()).hexdigest()[:16]


def read_records(path: Path) -> list[Record]:
    """Return the records of a file, packed ones first, in file order; a torn last line (of a killed run) is left out.

    Raises:
        ValueError: a line is not a record, or not one of a finished run, or its spec was edited; names file and line.
            Or the packed file is damaged, or unpacks to what no records are.
    """
    return [record for file, data in _contents(path) for record, _ in _checked(file, data)]


def read_records_of(path: Path, hashes: Container[str]) -> list[Record]:
    """Return the records of specs with these hashes, as `read_records` does, with the same errors.

    Bytes of a file that this process has checked are not checked anew: a notebook reads all files for each group.
    """
    return [_parsed(line) for file, data in _contents(path) for h, line in _checked_lines(file, data) if h in hashes]


def record_files(scale: str = "*") -> list[Path]:
    """Return the committed record files, of one scale or of all, notebook by notebook, as paths of <scale>.jsonl.

    A file that is packed has no plain file of this name until there are later records: give the path to `read_records`.
    """
    found = [path for name in (f"{scale}.jsonl", f"{scale}.jsonl.gz") for path in paths.RESULTS.glob(f"*/{name}")]
    return sorted({path.with_name(path.name.removesuffix(".gz")) for path in found})


def stored_files(path: Path) -> list[Path]:
    """Return the files that hold the lines of a record file, in their order: the packed one, the plain one, or both."""
    return [file for file in (_packed_file(path), path) if file.is_file()]


@lru_cache(maxsize=32)  # two files of each notebook; the committed ones hold a few megabytes together
def _checked_lines(path: Path, data: bytes) -> list[tuple[str, bytes]]:
    """Return the spec hash and the line of each record in the bytes of a file; errors as for `read_records`."""
    return [(record["spec_hash"], line) for record, line in _checked(path, data)]


def _checked(path: Path, data: bytes) -> Iterator[tuple[Record, bytes]]:
    """Yield each record in the bytes of a file, and its line; errors as for `read_records`."""
    lines = data.split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        where = f"{path}, line {number}"
        try:
            record = _parsed(line)
        except ValueError as error:
            if number == len(lines):  # no newline at its end: the writer was killed
                return
            raise ValueError(f"{where} {error}. Restore the file from git.") from error
        if not _is_record(record):
            raise ValueError(f"{where} is not a record: {line.decode():.80}. Restore the file from git.")
        if record["spec_hash"] != spec_hash(record["spec"]):
            raise ValueError(
                f"{where}: the spec does not have the hash {record['spec_hash']!r}, it was edited. "
                "Restore the file from git; in a run folder, delete the line to run its spec again."
            )
        if record["status"] != FINISHED:
            raise ValueError(
                f"{where} ({run_name(record['spec'])}): status {record['status']!r:.80}, but only runs that "
                f"{FINISHED} are stored: it was edited. Restore the file from git."
            )
        yield record, line


def append_record(path: Path, record: Record, kept: Path | None = None) -> Record:
    """Add one line to a record file and one to its seal, both synced to disk.

    Several processes may write to a file at once: it is locked meanwhile, and Ctrl-C waits until both are written. What
    a killed writer left is mended first: a torn last line is cut off, and records without seal at the end are sealed,
    which is printed. Of two records of one spec the first stays. Where records are packed, the line goes to the plain
    file beside them.

    Args:
        path: of the file, made with its folder if need be.
        record: of a finished run.
        kept: the ledger of the run, to be kept beside the file as ledgers/<spec hash>.jsonl.gz.

    Returns:
        The record of this spec that the file holds now; if it is another one, that is printed.

    Raises:
        ValueError: a record over 8 kB, with a curve over 50 points, or with numbers that are not finite; or a packed
            file that cannot be read (see `read_records`).
    """
    line, own = record_line(record).encode(), record["spec_hash"]
    with locked(path), interrupts_wait():
        lines, seals = _whole_lines(path)
        if number := _append_seals(path, _unsealed(lines, seals), seals):
            what = "1 record" if number == 1 else f"{number} records"
            print(f"sealed {what} at the end of {path} that had no seal")
        for stored in lines:
            if f'"spec_hash":"{own}"'.encode() in stored:
                print(f"{path} has a record of {run_name(record['spec'])} already, made meanwhile: it stays")
                return json.loads(stored)
        if kept is not None:  # first: no record is without its ledger
            replace_bytes(_ledger_file(path, own), kept.read_bytes(), sync=True)
        _append(path, line)
        _append_seals(path, [line.rstrip(b"\n")], seals)
    return record


def record_line(record: Record) -> str:
    """Return a record as its line in a file; raise ValueError, naming the run, if it may not be stored."""
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
        raise ValueError(f"the record of {name} has {len(line)} bytes: at most {MAX_RECORD} are allowed.")
    return line


def without_nonfinite(value: Any, name: str, bad: list[str]) -> Any:
    """Return a value of a record with None for each number that is not finite; add the names of these to `bad`."""
    if isinstance(value, dict):
        return {k: without_nonfinite(v, f"{name}.{k}" if name else k, bad) for k, v in value.items()}
    if isinstance(value, list):
        return [without_nonfinite(v, f"{name}[{i}]", bad) for i, v in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        bad.append(f"{name} = {value}")
        return None
    return value


def run_name(spec: Spec) -> str:
    """Return the name of a run for readers: its arm or kind, base and seed."""
    return " ".join(str(spec[k]) for k in ("arm" if "arm" in spec else "kind", "base", "seed", "repeat") if k in spec)


# ---- seals


class _Seal(NamedTuple):
    """One line of a seal: the fields, with a space between them."""

    spec: str  # hash of the record's spec
    record: str  # SHA-256 of the record's line
    ledger: str  # SHA-256 of the file of the ledger that is kept with the record, or "-"
    weights: str  # digest of the ledger's last weights, or "-"
    chain: str  # SHA-256 of the chain so far and the other fields

    @classmethod
    def of(cls, line: bytes, previous: Sequence[_Seal]) -> _Seal:
        """Seal a record's line, behind the previous ones."""
        record = _record(line)
        if record is None:
            raise ValueError(f"a line without seal is not a record: {line[:80]!r}. Delete it, or {_RESTORE}.")
        fields = record["spec_hash"], _sha(line), *_ledger_digests(record)
        return cls(*fields, _chained(previous, fields))

    @classmethod
    def read(cls, text: bytes) -> _Seal:
        """Read a line; one that is no seal gets empty fields, which match nothing."""
        return cls(*text.decode().split(" ")) if _is_seal(text) else cls("", "", "", "", "")


_SEAL = re.compile(rb"[0-9a-f]{16} [0-9a-f]{64} (- -|[0-9a-f]{64} [0-9a-f]{64}) [0-9a-f]{64}")
_RESTORE, _SEAL_IT = "restore it from git", "run `python -m evoalign_study seal`"
_LEDGER_DIGESTS = ("sha256", "weights")
_ROUNDED = 1e-6  # means are stored with six decimals


def seal(path: Path) -> int:
    """Add to the seal of a record file the lines that it lacks at its end; return their number.

    They are for the record of a killed writer, or for records that were merged from another branch. Nothing is added
    where the records before them do not match the seal: see `seal_problems`. Raises ValueError for a line without seal
    that is not a record, or a packed file that cannot be read (see `read_records`).
    """
    with locked(path), interrupts_wait():
        lines, seals = _whole_lines(path)
        return _append_seals(path, _unsealed(lines, seals), seals)


def pack(path: Path) -> int:
    """Move the lines of a record file behind the packed ones, in <scale>.jsonl.gz; return how many were moved.

    The packed file is a function of the lines alone: no name, no time. The seal stays as it is. `gunzip` takes it back,
    where there is no plain file.

    Raises:
        ValueError: records and seal do not match (see `seal_problems`), or there are more lines than can be read again.
    """
    with locked(path), interrupts_wait():
        lines, _ = _whole_lines(path)
        if problems := seal_problems(path):
            more = f" And {len(problems) - 1} more." if len(problems) > 1 else ""
            raise ValueError(f"nothing was packed: {problems[0]}.{more}")
        if not lines or not path.is_file():
            return 0
        moved, data = len(_numbered(path)), b"".join(line + b"\n" for line in lines)
        if fault := _unlike_records(data):
            raise ValueError(f"nothing was packed: {path} {fault}. Leave it as it is.")
        replace_bytes(_packed_file(path), compressed(data), sync=True)
        path.unlink()
        sync_folder(path.parent)
        return moved


def seal_problems(path: Path) -> list[str]:
    """Say where a record file, its seal and its ledgers do not match, in one line per problem; empty: nowhere.

    Found are records that were edited, inserted, deleted or moved, changes of the seal itself, ledgers that are missing
    or not those that were sealed, and sealed records that contradict themselves: an accuracy is the mean of the results
    that stand beside it. A problem names file, line and spec, and the remedy.
    """
    seal_file = _seal_file(path)
    try:
        contents = _contents(path)
    except ValueError as error:
        return [str(error)]
    repeated = _repeated(*(data for _, data in contents))
    numbered = [
        (f"{file}, line {number}", line)
        for file, data in contents
        for number, line in _split(data)
        if file != path or line not in repeated
    ]
    if numbered and not seal_file.is_file():
        return [f"{path} has no seal: restore {seal_file} from git, or make it by `python -m evoalign_study seal`"]
    if not numbered and seal_file.is_file():
        return [f"{path} holds no records, but has a seal: {_RESTORE}"]
    seals, problems = _read_seals(seal_file)
    if repeated:
        problems.append(f"{path} repeats {len(repeated)} packed lines, left by a killed `pack` or a merge: {_SEAL_IT}")
    sealed = {line.spec: line for line in reversed(seals)}
    new = _unsealed([text for _, text in numbered], seals)
    specs: list[str] = []
    for where, text in numbered:
        record = _record(text)
        if record is None:
            problems.append(f"{where} is not a record: {_RESTORE}, or delete the line if it is the last and torn")
            continue
        spec = record["spec_hash"]
        where += f" ({run_name(record['spec'])}, spec {spec})"
        if spec in specs:
            problems.append(f"{where} is a second record of its spec: delete one of the two")
        elif spec not in sealed:
            remedy = "if its writer was killed, or it was merged, run `python -m evoalign_study seal`" if text in new else _RESTORE
            problems.append(f"{where} has no seal: {remedy}")
        elif _sha(text) != sealed[spec].record:
            problems.append(f"{where} is not the record that was sealed, it was edited: {_RESTORE}")
        else:
            problems += [f"{where}: {fault}: {_RESTORE}" for fault in _ledger_faults(path, record, sealed[spec])]
            problems += [f"{where}: {fault}: {_RESTORE}" for fault in _contradictions(record)]
        specs.append(spec)
    for number, line in enumerate(seals, 1):
        if line.spec and line.spec not in specs:
            problems.append(f"{path} lacks the record of spec {line.spec}, sealed in line {number}: {_RESTORE}")
    order = [line.spec for line in seals if line.spec in specs]
    for here, there in zip([spec for spec in specs if spec in sealed], order, strict=False):
        if here != there:
            problems.append(f"{path} has the record of spec {here} where spec {there} was sealed: {_RESTORE}")
            break
    return problems


def _read_seals(path: Path) -> tuple[list[_Seal], list[str]]:
    """Return the lines of a seal, and what is wrong with them by themselves: a torn end, or a broken chain."""
    numbered, problems, seals = _numbered(path), [], []
    if numbered and not path.read_bytes().endswith(b"\n") and not _is_seal(numbered[-1][1]):
        number, _ = numbered.pop()
        problems.append(f"{path}, line {number} is torn, its writer was killed: {_SEAL_IT}")
    for number, text in numbered:
        line = _Seal.read(text)
        if line.chain != _chained(seals, line[:-1]):
            why = "it or the line before it was changed, moved or deleted"
            problems.append(f"{path}, line {number} breaks the chain, {why}: {_RESTORE}")
        seals.append(line)
    return seals, problems


def _ledger_faults(path: Path, record: Record, line: _Seal) -> list[str]:
    """Return what is wrong with the ledger of a record that is as it was sealed."""
    if (line.ledger, line.weights) != _ledger_digests(record):
        return ["its seal names another ledger than the record"]
    file = _ledger_file(path, record["spec_hash"])
    if line.ledger == "-" or (file.is_file() and _sha(file.read_bytes()) == line.ledger):
        return []
    return [f"its ledger {file} is not the one that was sealed" if file.is_file() else f"its ledger {file} is missing"]


def _ledger_digests(record: Record) -> tuple[str, str]:
    return tuple(record["ledger"][name] for name in _LEDGER_DIGESTS) if "ledger" in record else ("-", "-")


def _ledger_file(path: Path, spec: str) -> Path:
    return path.parent / "ledgers" / f"{spec}.jsonl.gz"


def _seal_file(path: Path) -> Path:
    return path.with_suffix(".seal")


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _chained(previous: Sequence[_Seal], fields: Sequence[str]) -> str:
    return _sha(" ".join([previous[-1].chain if previous else "0" * 64, *fields]).encode())


def _is_seal(text: bytes) -> bool:
    return _SEAL.fullmatch(text) is not None


def _parsed(text: bytes) -> Any:
    """Return the value of a line of JSON. Raises ValueError, saying what the line is instead."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no number of JSON")

    try:
        return json.loads(text.decode(), parse_constant=refuse)
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text: {error}") from error
    except RecursionError as error:
        raise ValueError("is nested too deeply for a record") from error
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from error


def _is_json(text: bytes) -> bool:
    try:
        _parsed(text)
    except ValueError:
        return False
    return True


def _is_record(value: Any) -> bool:
    """Return whether a value has what every record has, each of its type; a ledger is named by two texts."""
    if not isinstance(value, dict) or not isinstance(value.get("spec"), dict) or "status" not in value:
        return False
    ledger = value.get("ledger", {"sha256": "", "weights": ""})
    named = [value.get("spec_hash"), *(ledger.get(k) if isinstance(ledger, dict) else None for k in _LEDGER_DIGESTS)]
    return all(isinstance(name, str) for name in named)


def _record(text: bytes) -> Record | None:
    value = _parsed(text) if _is_json(text) else None
    return value if _is_record(value) else None


def _contradictions(record: Record) -> list[str]:
    """Return what a record says of itself that cannot be: its status, and each mean beside its packed results."""
    faults = [] if record["status"] == FINISHED else [f"status {record['status']!r:.80}, not {FINISHED!r}"]
    blocks = [("", record)]
    for name, block in blocks:  # which grows: the blocks of a block come behind it
        blocks += [(f"{name}.{key}" if name else key, value) for key, value in block.items() if isinstance(value, dict)]
        for key, packed in block.items():
            what, _, kind = key.rpartition("_")
            if kind not in ("bits", "counts") or not isinstance(packed, str) or isinstance(block.get(what, ""), str):
                continue
            of = f"{name}.{what}" if name else what
            try:
                n = block.get("n", record.get("completions"))
                results = unpack_bits(packed, n) if kind == "bits" else unpack_counts(packed) / _SAMPLES
                wrong = len(results) != n or not abs(results.mean() - block[what]) <= _ROUNDED
            except (TypeError, ValueError) as error:
                faults.append(f"{of}_{kind} cannot be read ({error})")
                continue
            if wrong:
                said = f"the mean of {n} results is {results.mean():.6g}" if len(results) == n else f"n is {n}"
                faults.append(f"{of} is {block[what]!r}, but by {of}_{kind} {said}")
    return faults


def _numbered(path: Path) -> list[tuple[int, bytes]]:
    """Return the lines of a file that are not empty, with their numbers from 1; none where there is no file."""
    return _split(path.read_bytes() if path.is_file() else b"")


def _split(data: bytes) -> list[tuple[int, bytes]]:
    return [(number, line) for number, line in enumerate(data.split(b"\n"), 1) if line]


def _whole_lines(path: Path) -> tuple[list[bytes], list[_Seal]]:
    """Return the lines of a record file and of its seal, after mending the ends of both, and what a killed `pack` left.

    Raises ValueError for a packed file that cannot be read.
    """
    (_, first), _ = _contents(path)
    seals = _mended(_seal_file(path), _is_seal)
    lines = _mended(path, _is_json)
    if repeated := _repeated(first, b"\n".join(lines)):
        lines = [line for line in lines if line not in repeated]
        replace_bytes(path, b"".join(line + b"\n" for line in lines), sync=True)
        if not lines:
            path.unlink()
    return [line for _, line in _split(first)] + lines, [_Seal.read(text) for text in seals]


def _mended(path: Path, is_whole: Callable[[bytes], bool]) -> list[bytes]:
    """Return the lines of a file, after cutting off a torn last one, or ending a whole one that lacks its newline."""
    lines = [line for _, line in _numbered(path)]
    if lines and not path.read_bytes().endswith(b"\n"):
        with open(path, "rb+") as file:
            end = file.seek(0, os.SEEK_END)
            if is_whole(lines[-1]):
                file.write(b"\n")
            else:
                file.truncate(end - len(lines.pop()))
    return lines


def _unsealed(lines: Sequence[bytes], seals: Sequence[_Seal]) -> list[bytes]:
    """Return the records behind the last sealed one; none where those before it are not the sealed ones."""
    match = [line.record for line in seals] == [_sha(line) for line in lines[: len(seals)]]
    return list(lines[len(seals) :]) if match else []


def _append_seals(path: Path, lines: Sequence[bytes], seals: list[_Seal]) -> int:
    """Seal records of a file, behind those that it has: `seals`, to which the new ones are added. Return how many."""
    had = len(seals)
    for line in lines:
        seals.append(_Seal.of(line, seals))
    if lines:
        _append(_seal_file(path), "".join(" ".join(line) + "\n" for line in seals[had:]).encode())
    return len(lines)


def _append(path: Path, data: bytes) -> None:
    new = not path.exists()
    with open(path, "ab") as file:
        _write(file, data)
    if new:
        sync_folder(path.parent)


def _write(file: BinaryIO, data: bytes) -> None:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


# ---- packed records

_MOST_UNPACKED, _MOST_LINES = 64_000_000, 100_000
"""Bytes and lines of a packed file: the committed records of all notebooks together are fewer."""


def _packed_file(path: Path) -> Path:
    return path.with_name(path.name + ".gz")


def _contents(path: Path) -> list[tuple[Path, bytes]]:
    """Return the two files of a record file, each with its bytes, none where there is no file: packed, then plain.

    Raises ValueError, with the remedy, for a packed file that cannot be read.
    """
    plain = path.read_bytes() if path.is_file() else b""  # read first: `pack` removes it last
    file, data = _packed_file(path), b""
    if file.is_file():
        try:
            data = decompressed(file, _MOST_UNPACKED)
        except (ValueError, OverflowError) as error:
            raise ValueError(f"{error}: {_RESTORE}") from error
        if fault := _unlike_records(data):
            raise ValueError(f"{file} {fault}: {_RESTORE}")
    return [(file, data), (path, plain)]


def _unlike_records(data: bytes) -> str | None:
    """Return what is wrong with the bytes that are packed, before memory is spent on their lines; None: nothing."""
    if len(data) > _MOST_UNPACKED or data.count(b"\n") > _MOST_LINES:
        return f"holds more than {_MOST_UNPACKED // 10**6} MB or {_MOST_LINES} lines"
    if not data.endswith(b"\n"):
        return "does not end with a whole line"
    if max(map(len, data.split(b"\n"))) >= MAX_RECORD:
        return f"has a line of more than {MAX_RECORD} bytes"
    return None


def _repeated(first: bytes, plain: bytes) -> set[bytes]:
    """Return the lines that the packed and the plain file share."""
    return {line for _, line in _split(first)} & {line for _, line in _split(plain)}


def run_folder(notebook: str, scale: str) -> Path:
    """Where a fresh run writes: the folder EVOALIGN_RUN_DIR, or runs/<notebook>-<scale>."""
    return Path(os.environ.get("EVOALIGN_RUN_DIR") or paths.RUNS / f"{notebook}-{scale}")


def ledger_file(record: Record) -> Path:
    """Where the ledger lies that was kept with a record: among the committed ones, or below the run folder.

    Raises:
        ValueError: the record was made without keeping it; or there is no file with the record's SHA-256.
    """
    spec, name = record["spec"], f"{record['spec_hash']}.jsonl.gz"
    if "ledger" not in record:
        raise ValueError(
            f"the record {record['spec_hash']} of {record['notebook']} ({run_name(spec)}) was made without keeping "
            "the run's ledger: delete its line to run it again, or leave its spec out of keep_ledgers."
        )
    beside = run_folder(record["notebook"], spec["scale"]) / "results"
    found = [folder / "ledgers" / name for folder in (paths.RESULTS / record["notebook"], beside)]
    for path in found:
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == record["ledger"]["sha256"]:
            return path
    raise ValueError(
        f"the ledger of the record {record['spec_hash']} (SHA-256 {record['ledger']['sha256']:.16}...) is neither "
        f"{found[0]} nor {found[1]}: restore it from git, or delete the record's line to run its spec again."
    )


# ---- results, packed problem by problem


def accuracy_matrix(records: Sequence[dict[str, Any]], decoding: str = "greedy") -> NDArray[np.float64]:
    """Return the test results of runs as a matrix (seeds, problems), rows in the order of the records.

    records: run records with a `test` block. decoding: "greedy" (0 or 1), or a temperature such as "t1" or "t0.6"
    (share of 16 samples).
    Raises ValueError for no records, a decoding that a record lacks, and records with unequal numbers of problems.
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
    """Return 0/1 results as hexadecimal text, eight problems per byte, the first one in the highest bit.

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
    """Return the number of right samples of 16 for each problem as text, one base-17 digit (0-9a-g) per problem.

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
        raise ValueError(f"{strange[0]!r} is not a base-17 digit (0-9a-g): damaged record")
    # in ASCII the digits rise
    digits, codes = (np.frombuffer(each.encode(), np.uint8) for each in (_DIGITS, text))
    return np.searchsorted(digits, codes).astype(np.int64)


_BASE64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
_LOG_STEP = 0.005
"""Nats between two numbers that `pack_probabilities` tells apart."""
_NEVER = 64**2 - 1


def pack_integers(values: ArrayLike) -> str:
    """Return integers as text, two characters (base 64) for each.

    values: (problems,), integers 0..4095. Raises ValueError for other values.

    >>> pack_integers([0, 64, 4095])
    'AABA__'
    """
    row = np.asarray(values)
    if row.ndim != 1 or not (np.issubdtype(row.dtype, np.integer) and ((row >= 0) & (row <= _NEVER)).all()):
        raise ValueError(f"values must be one row of integers 0..{_NEVER}, got shape {row.shape}: {row.ravel()[:5]}")
    return "".join(_BASE64[value // 64] + _BASE64[value % 64] for value in row.tolist())


def unpack_integers(text: str) -> NDArray[np.int64]:
    """Return the (problems,) integers that `pack_integers` wrote. Raises ValueError for any other text."""
    strange = sorted(set(text) - set(_BASE64))
    if strange or len(text) % 2:
        what = f"{strange[0]!r} is no digit of base 64" if strange else f"{len(text)} digits are no pairs"
        raise ValueError(f"{what}: damaged record")
    digits = np.array([_BASE64.index(digit) for digit in text], dtype=np.int64)
    return digits[::2] * 64 + digits[1::2]


def pack_probabilities(values: ArrayLike) -> str:
    """Return probabilities as text, two characters for each, to a quarter of a percent of themselves.

    values: (problems,), 0 to 1, by a rounding above 1 at most 1e-9. What is below 1.3e-9 becomes 0. Raises ValueError
    for other values.

    >>> unpack_probabilities(pack_probabilities([1, 0.5, 0.001, 0])).round(5).tolist()
    [1.0, 0.49907, 0.001, 0.0]
    """
    row = np.asarray(values, dtype=np.float64)
    if row.ndim != 1 or not ((row >= 0) & (row <= 1 + 1e-9)).all():
        raise ValueError(f"values must be one row of probabilities, got shape {row.shape}: {row.ravel()[:5]}")
    with np.errstate(divide="ignore"):
        steps = np.rint(-np.log(row.clip(max=1)) / _LOG_STEP)
    return pack_integers(np.minimum(steps, _NEVER).astype(np.int64))


def unpack_probabilities(text: str) -> NDArray[np.float64]:
    """Return the (problems,) probabilities that `pack_probabilities` wrote. Raises ValueError for any other text."""
    steps = unpack_integers(text)
    return np.where(steps == _NEVER, 0.0, np.exp(-_LOG_STEP * steps))
