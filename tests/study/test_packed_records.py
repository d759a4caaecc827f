"""Packed records: read and sealed as plain ones are, whatever is appended later; damage and bombs are refused."""

import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from evoalign_study import artifacts, claims, paths, sweep, weight_cache
from evoalign_study.records import (
    MAX_RECORD,
    append_record,
    pack,
    read_records,
    record_files,
    record_line,
    seal,
    seal_problems,
    spec_hash,
    stored_files,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from evoalign_lib import cli
from evoalign_lib.files import compressed, decompressed

SEALED = "restore it from git"


def record(seed: int, **more) -> dict:
    spec = {"kind": "train", "scale": "tiny", "seed": seed}
    return {"spec": spec, "spec_hash": spec_hash(spec), "status": "finished"} | more


def packed_file(file: Path) -> Path:
    return file.with_name(file.name + ".gz")


def edit(file: Path, change) -> None:
    """Let a function change the list of a packed file's lines."""
    lines = gzip.decompress(file.read_bytes()).splitlines(keepends=True)
    change(lines)
    file.write_bytes(compressed(b"".join(lines)))


@pytest.fixture
def results(tmp_path, monkeypatch) -> Path:
    """A folder of committed records, and of nothing else."""
    for name in ("RESULTS", "NOTEBOOKS", "GENERATED", "RUNS"):
        monkeypatch.setattr(paths, name, tmp_path / name.lower())
    monkeypatch.setenv("EVOALIGN_RUN_DIR", str(tmp_path / "run"))
    paths.RESULTS.mkdir()
    return paths.RESULTS


@pytest.fixture
def committed(results) -> Path:
    """A copy of notebook 01's records, seal and ledgers, packed."""
    shutil.copytree(paths.ROOT / "paper/results/01_es_countdown", results / "01_es_countdown")
    file = results / "01_es_countdown" / "tiny.jsonl"
    assert pack(file) == len(read_records(file)) > 100
    return file


# ---- reading, sealing, appending


@settings(max_examples=15)
@given(st.lists(st.tuples(st.text(max_size=30), st.sampled_from(["append", "pack", "seal"])), max_size=5))
def test_packing_changes_neither_records_nor_seal(steps):
    """Packed at any time, any number of times, a file has the records, their order and the seal of a plain one."""
    with tempfile.TemporaryDirectory() as folder:
        plain, file = Path(folder, "plain/tiny.jsonl"), Path(folder, "other/tiny.jsonl")
        for seed, (note, then) in enumerate(steps):
            made = record(seed, note=note)
            assert append_record(plain, made) == append_record(file, made) == made
            if then == "pack":
                waiting = file.read_bytes().count(b"\n")
                assert pack(file) == waiting and pack(file) == 0 and not file.exists()
                assert packed_file(file).read_bytes() == compressed(plain.read_bytes())
            assert then != "seal" or seal(file) == 0
            assert append_record(file, record(0, note="another")) == read_records(plain)[0]  # the first one stays
            assert read_records(file) == read_records(plain)
            assert file.with_suffix(".seal").read_bytes() == plain.with_suffix(".seal").read_bytes()
            assert seal_problems(file) == []
        assert pack(file) == 0 or not file.exists()
        assert read_records(file) == read_records(plain)


@settings(max_examples=30)
@given(st.binary(max_size=300))
def test_compression_depends_on_the_data_alone(data):
    with tempfile.TemporaryDirectory() as folder:
        for name in ("a.gz", "another.gz"):
            Path(folder, name).write_bytes(compressed(data))
            assert decompressed(Path(folder, name), len(data)) == data
            if data:
                with pytest.raises(OverflowError, match="unpacks to more than 0 MB"):
                    decompressed(Path(folder, name), len(data) - 1)
    assert compressed(data)[3:8] == bytes(5)  # no flag, so no name; no time


def test_a_record_after_packing_goes_to_the_plain_file(committed, capsys):
    packed, before = packed_file(committed), packed_file(committed).read_bytes()
    known, sealed = read_records(committed), committed.with_suffix(".seal").read_bytes()
    assert append_record(committed, record(7)) == record(7)
    assert stored_files(committed) == [packed, committed] and packed.read_bytes() == before
    assert committed.read_text() == record_line(record(7))
    assert read_records(committed) == [*known, record(7)] and seal_problems(committed) == []
    assert committed.with_suffix(".seal").read_bytes().startswith(sealed)  # it only grows
    capsys.readouterr()
    again = known[0] | {"note": "made again"}
    assert append_record(committed, again) == known[0] and "already, made meanwhile" in capsys.readouterr().out
    # unsealed ones behind packed ones are sealed, as always
    committed.with_suffix(".seal").write_bytes(sealed)
    assert len(seal_problems(committed)) == 1 and seal(committed) == 1 and seal_problems(committed) == []
    assert pack(committed) == 1 and not committed.exists() and read_records(committed) == [*known, record(7)]
    # and back
    packed.rename(committed.with_suffix(".gz"))
    committed.write_bytes(gzip.decompress(committed.with_suffix(".gz").read_bytes()))
    assert read_records(committed) == [*known, record(7)] and seal_problems(committed) == []


def test_packed_records_are_found_wherever_committed_ones_are(committed, results):
    known = read_records(committed)
    append_record(committed, record(7))
    append_record(results / "02_b/tiny.jsonl", record(8))
    append_record(results / "02_b/full.jsonl", record(9))
    (results / "03_c/ledgers").mkdir(parents=True)
    (results / "03_c/ledgers/tiny.jsonl.gz").write_bytes(compressed(b"a ledger\n"))
    assert record_files("tiny") == [committed, results / "02_b/tiny.jsonl"] and record_files("smoke") == []
    assert record_files() == [committed, results / "02_b/full.jsonl", results / "02_b/tiny.jsonl"]
    assert claims.committed_records("tiny") == [*known, record(7), record(8)]
    wanted = [record(7)["spec"], known[3]["spec"], record(8)["spec"]]
    assert sweep.load_or_run(wanted, "04_d", "tiny") == [record(7), known[3], record(8)]
    kept = next(r for r in known if "ledger" in r)
    ledger = committed.parent / "ledgers" / f"{kept['spec_hash']}.jsonl.gz"
    assert weight_cache.kept_ledger(kept["spec"], kept["digest"]) == ledger
    assert artifacts.undrawn() == ["01_es_countdown", "02_b"] and artifacts.unsealed() == []


def test_a_spec_that_is_packed_and_plain_is_an_error(committed):
    again = read_records(committed)[4] | {"note": "of a merge"}
    committed.write_text(record_line(again))
    (problem,) = seal_problems(committed)
    assert problem.startswith(f"{committed}, line 1 (") and "is a second record of its spec: delete one" in problem
    with pytest.raises(ValueError, match=f"the spec {again['spec_hash']} has two records, in "):
        claims.committed_records("tiny")
    seal(committed)
    assert committed.read_text() == record_line(again) and seal_problems(committed)  # only what is equal is taken away


# ---- a writer that was killed, and a merge

KILLED = """
import os, signal, sys
from pathlib import Path
from evoalign_study import records

Path.unlink = lambda *given, **options: os.kill(os.getpid(), signal.SIGKILL)
records.pack(Path(sys.argv[1]))
"""


@pytest.mark.parametrize("mend", [seal, pack, lambda file: append_record(file, record(3))])
def test_what_a_killed_pack_leaves_is_mended_by_the_next_writer(tmp_path, mend):
    file, known = tmp_path / "tiny.jsonl", [record(1), record(2)]
    for made in known:
        append_record(file, made)
    lines, sealed = (path.read_bytes() for path in (file, file.with_suffix(".seal")))
    assert subprocess.run([sys.executable, "-c", KILLED, file], cwd=paths.ROOT).returncode == -signal.SIGKILL
    assert packed_file(file).is_file() and file.is_file()
    assert seal_problems(file) == [
        f"{file} repeats 2 packed lines, left by a killed `pack` or a merge: run `python -m evoalign_study seal`"
    ]
    mend(file)
    assert read_records(file)[:2] == known and seal_problems(file) == []
    assert file.is_file() == (len(read_records(file)) == 3)
    assert gzip.decompress(packed_file(file).read_bytes()) == lines
    assert file.with_suffix(".seal").read_bytes().startswith(sealed)


def test_a_merge_of_a_packed_file_with_a_longer_plain_one(tmp_path):
    """One branch packed the records, another appended to them: git asks, and both files may be kept."""
    file = tmp_path / "tiny.jsonl"
    append_record(file, record(1))
    packed_file(file).write_bytes(compressed(file.read_bytes()))
    (tmp_path / "other").mkdir()
    other = tmp_path / "other/tiny.jsonl"
    shutil.copy(file, other), shutil.copy(file.with_suffix(".seal"), other.with_suffix(".seal"))
    append_record(other, record(2))
    shutil.copy(other, file), shutil.copy(other.with_suffix(".seal"), file.with_suffix(".seal"))
    (problem,) = seal_problems(file)
    assert "repeats 1 packed lines" in problem and "run `python -m evoalign_study seal`" in problem
    assert seal(file) == 0 and file.read_text() == record_line(record(2)) and seal_problems(file) == []
    assert read_records(file) == [record(1), record(2)]


# ---- packed lines that were changed


def where(file: Path, number: int) -> str:
    made = json.loads(gzip.decompress(packed_file(file).read_bytes()).splitlines()[number - 1])
    return f"{packed_file(file)}, line {number} ({made['spec']['arm']} {made['spec']['base']} {made['spec']['seed']}, "


def test_changed_packed_lines_are_found_with_file_and_line(committed):
    packed, whole = packed_file(committed), packed_file(committed).read_bytes()
    specs = [made["spec_hash"] for made in read_records(committed)]
    edit(packed, lambda lines: lines.__setitem__(6, lines[6].replace(b'"commit":"', b'"commit":"0', 1)))
    (problem,) = seal_problems(committed)
    assert problem.startswith(where(committed, 7))
    assert problem.endswith(f"is not the record that was sealed, it was edited: {SEALED}")
    with pytest.raises(ValueError, match="nothing was packed: .*tiny.jsonl.gz, line 7 .* was edited"):
        pack(committed)
    packed.write_bytes(whole)
    edit(packed, lambda lines: lines.pop(3))
    assert seal_problems(committed) == [f"{committed} lacks the record of spec {specs[3]}, sealed in line 4: {SEALED}"]
    packed.write_bytes(whole)
    edit(packed, lambda lines: lines.insert(3, lines.pop(8)))
    assert seal_problems(committed) == [
        f"{committed} has the record of spec {specs[8]} where spec {specs[3]} was sealed: {SEALED}"
    ]
    packed.write_bytes(whole)
    edit(packed, lambda lines: lines.__setitem__(6, lines[6][:40] + b"\n"))
    torn = f"{packed}, line 7 is not a record: {SEALED}"
    assert any(problem.startswith(torn) for problem in seal_problems(committed))
    with pytest.raises(ValueError, match=r"tiny\.jsonl\.gz, line 7 is not JSON: .*Restore the file from git"):
        read_records(committed)
    packed.unlink()
    assert seal_problems(committed) == [f"{committed} holds no records, but has a seal: {SEALED}"]
    assert artifacts.unsealed() == seal_problems(committed)


def refused(file: Path, fault: str) -> None:
    """Whoever reads or writes the record file is told of the packed one, and of the remedy; no file is changed."""
    before = {path: path.read_bytes() for path in file.parent.iterdir() if path.suffix != ".lock"}
    (problem,) = seal_problems(file)
    assert problem.startswith(f"{packed_file(file)} {fault}") and problem.endswith(f": {SEALED}"), problem
    for reads in (read_records, seal, pack, lambda file: append_record(file, record(99))):
        with pytest.raises(ValueError) as found:
            reads(file)
        assert str(found.value) == problem
    assert {path: path.read_bytes() for path in before} == before
    assert {path for path in file.parent.iterdir() if path.suffix != ".lock"} == before.keys()


def test_a_damaged_packed_file_is_refused(tmp_path):
    file = tmp_path / "tiny.jsonl"
    for seed in range(4):
        append_record(file, record(seed, note="x" * seed))
    lines = file.read_bytes()
    pack(file)
    whole, packed = packed_file(file).read_bytes(), packed_file(file)
    for end in [*range(1, len(whole), 7), len(whole) - 1]:
        packed.write_bytes(whole[:end])
        refused(file, "is damaged (")
    for bad in (b"no gzip", whole + b"and more", whole[:-8] + bytes(8)):
        packed.write_bytes(bad)
        refused(file, "is damaged (")
    for bad in (b"", compressed(b""), compressed(lines[:-1]), compressed(lines + b'{"spec"')):
        packed.write_bytes(bad)
        refused(file, "does not end with a whole line")
    # a flipped bit is found, or changes nothing that is read: the time, the system and the level in the head
    chosen, harmless = random.Random(0), set()
    for _ in range(100):
        place, bit = chosen.randrange(len(whole)), 1 << chosen.randrange(8)
        packed.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
        if seal_problems(file):
            refused(file, "is damaged (")
        else:
            assert [made["spec"]["seed"] for made in read_records(file)] == [0, 1, 2, 3]
            harmless.add(place)
    assert harmless <= {3, *range(4, 10)}
    packed.write_bytes(whole)
    assert seal_problems(file) == []


BOMBS = """
import resource, sys
from pathlib import Path
from evoalign_study import records

used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for file in map(Path, sys.argv[1:]):
    for reads in (records.read_records, records.seal):
        try:
            reads(file)
        except ValueError as error:
            print(error)
    print(*records.seal_problems(file), sep="\\n")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used)
"""


def test_a_small_packed_file_cannot_exhaust_the_memory(tmp_path):
    bombs = [
        (b" " * 2**24, 64, "unpacks to more than 64 MB"),  # 1 GB in 1 MB
        (b"1\n" * 2**20, 30, "holds more than 64 MB or 100000 lines"),  # each line would be an object, and a problem
        (b"[]," * 2**20 + b"[]\n", 20, f"has a line of more than {MAX_RECORD} bytes"),  # as JSON a gigabyte
    ]
    files = [tmp_path / f"{number}.jsonl" for number in range(len(bombs))]
    for file, (block, times, _) in zip(files, bombs, strict=True):
        packed_file(file).write_bytes(gzip.compress(block) * times)
        assert packed_file(file).stat().st_size < 1_200_000
    command = [sys.executable, "-c", BOMBS, *map(str, files)]
    environment = {**os.environ, "PYTHONPATH": str(paths.ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True)
    *problems, kilobytes = done.stdout.splitlines()
    faults = [f"{packed_file(file)} {fault}: {SEALED}" for file, (*_, fault) in zip(files, bombs, strict=True)]
    assert problems == [fault for fault in faults for _ in range(3)]
    assert int(kilobytes) < 300_000


def test_what_could_not_be_read_again_is_not_packed(tmp_path, monkeypatch):
    file = tmp_path / "tiny.jsonl"
    monkeypatch.setattr("evoalign_study.records._MOST_LINES", 2)
    for seed in range(3):
        append_record(file, record(seed))
    with pytest.raises(ValueError, match="nothing was packed: .*tiny.jsonl holds more than 64 MB or 2 lines. Leave it"):
        pack(file)
    assert read_records(file) == [record(0), record(1), record(2)] and stored_files(file) == [file]


# ---- the command


def test_the_command_packs_a_notebook_and_no_other(results):
    one, other = (results / name / "tiny.jsonl" for name in ("01_a", "02_b"))
    for seed, file in enumerate((one, one, other)):
        append_record(file, record(seed))
    one.with_suffix(".seal").unlink()  # sealed first
    done = CliRunner().invoke(cli.app, ["seal", "--pack", "1"])
    said = f"{one}: 2 records sealed\nevery record is sealed\n{one}.gz: 2 records packed\n"
    assert (done.exit_code, done.output) == (0, said)
    assert stored_files(one) == [packed_file(one)] and stored_files(other) == [other]
    done = CliRunner().invoke(cli.app, ["seal", "--pack", "01_a"])
    assert (done.exit_code, done.output) == (0, f"every record is sealed\n{one}.gz: 0 records packed\n")
    assert CliRunner().invoke(cli.app, ["seal", "--pack", "09"]).exit_code == 2
    # nothing is packed where anything does not match its seal
    other.write_text(other.read_text().replace("finished", "incomplete"))
    done = CliRunner().invoke(cli.app, ["seal", "--pack", "02_b"])
    assert done.exit_code == 1 and "it was edited" in done.output and stored_files(other) == [other]
