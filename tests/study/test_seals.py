"""The seal of a record file: every hand edit of committed records is found, and no kill leaves a record unsealed."""

import hashlib
import json
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from evoalign_study import paths
from evoalign_study.records import append_record, read_records, record_files, run_name, seal, seal_problems, spec_hash

FILES = record_files()


@pytest.fixture
def committed(tmp_path) -> Path:
    """A copy of notebook 01's records, seal and ledgers, to be damaged."""
    shutil.copytree(paths.RESULTS / "01_es_countdown", tmp_path / "01_es_countdown")
    return tmp_path / "01_es_countdown" / "tiny.jsonl"


def edit(file: Path, change) -> None:
    """Let a function change the list of a file's lines."""
    lines = file.read_bytes().splitlines(keepends=True)
    change(lines)
    file.write_bytes(b"".join(lines))


def where(file: Path, number: int) -> str:
    """How a problem of a line begins."""
    record = json.loads(file.read_bytes().splitlines()[number - 1])
    return f"{file}, line {number} ({run_name(record['spec'])}, spec {record['spec_hash']})"


def swap(lines: list, one: int, other: int) -> None:
    lines[one], lines[other] = lines[other], lines[one]


# ---- what is committed


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_committed_records_are_as_they_were_sealed(file):
    assert seal_problems(file) == []
    assert len(file.with_suffix(".seal").read_bytes().splitlines()) == len(read_records(file)) > 0


def test_the_format_of_a_seal(committed):
    """Written down here: seals are read for years."""
    lines, chain = committed.read_bytes().splitlines(), "0" * 64
    for line, sealed in zip(lines, committed.with_suffix(".seal").read_text().splitlines(), strict=True):
        record = json.loads(line)
        ledger = record.get("ledger", {"sha256": "-", "weights": "-"})
        fields = [record["spec_hash"], hashlib.sha256(line).hexdigest(), ledger["sha256"], ledger["weights"]]
        chain = hashlib.sha256(" ".join([chain, *fields]).encode()).hexdigest()
        assert sealed == " ".join([*fields, chain])
    assert sum("ledger" in json.loads(line) for line in lines) == len(list(committed.parent.glob("ledgers/*")))


# ---- records that were changed


def test_one_changed_digit_is_found_with_its_file_and_line(committed):
    whole, chosen = committed.read_bytes(), random.Random(0)
    digits = [i for i, byte in enumerate(whole) if byte in b"0123456789"]
    for place in chosen.sample(digits, 40):
        new = chosen.choice([digit for digit in b"0123456789" if digit != whole[place]])
        committed.write_bytes(whole[:place] + bytes([new]) + whole[place + 1 :])
        number = whole[:place].count(b"\n") + 1
        problems = seal_problems(committed)
        assert problems[0].startswith(f"{committed}, line {number} ("), problems
        if len(problems) == 1:
            assert problems[0].endswith("is not the record that was sealed, it was edited: restore it from git")
        else:  # the digit was one of the spec's hash: a record unknown, and one gone
            assert len(problems) == 2 and f"sealed in line {number}:" in problems[1]


def test_an_accuracy_made_better_is_named_by_its_run(committed):
    def better(lines):
        record = json.loads(lines[6])
        record["test"]["greedy"] += 0.01
        lines[6] = json.dumps(record, sort_keys=True, separators=(",", ":")).encode() + b"\n"

    edit(committed, better)
    assert [problem.split(") ")[0] + ")" for problem in seal_problems(committed)] == [where(committed, 7)]


def test_deleted_moved_and_repeated_records_are_found(committed):
    whole = committed.read_bytes()
    specs = [record["spec_hash"] for record in read_records(committed)]
    for number in (1, 100, len(specs)):
        edit(committed, lambda lines, number=number: lines.pop(number - 1))
        assert seal_problems(committed) == [
            f"{committed} lacks the record of spec {specs[number - 1]}, sealed in line {number}: restore it from git"
        ]
        committed.write_bytes(whole)
    edit(committed, lambda lines: swap(lines, 4, 9))
    assert seal_problems(committed) == [
        f"{committed} has the record of spec {specs[9]} where spec {specs[4]} was sealed: restore it from git"
    ]
    committed.write_bytes(whole)
    edit(committed, lambda lines: lines.insert(9, lines[4]))
    (repeated,) = [problem for problem in seal_problems(committed) if "where spec" not in problem]
    assert repeated == f"{where(committed, 10)} is a second record of its spec: delete one of the two"
    committed.write_bytes(whole)
    edit(committed, lambda lines: lines.insert(9, lines[4][:40] + b"\n"))
    assert seal_problems(committed) == [
        f"{committed}, line 10 is not a record: restore it from git, or delete the line if it is the last and torn"
    ]
    committed.unlink()
    assert seal_problems(committed) == [f"{committed} holds no records, but has a seal: restore it from git"]


def test_an_inserted_record_is_found_and_not_sealed_by_the_next_run(committed):
    made = record(7)
    edit(committed, lambda lines: lines.insert(9, json.dumps(made).encode() + b"\n"))
    inserted = f"{committed}, line 10 (train 7, spec {made['spec_hash']}) has no seal: restore it from git"
    assert seal_problems(committed) == [inserted]
    assert seal(committed) == 0
    append_record(committed, record(8))
    assert seal_problems(committed) == [inserted]


# ---- seals that were changed


def test_a_record_edited_together_with_its_seal_breaks_the_chain(committed):
    edit(committed, lambda lines: lines.__setitem__(6, lines[6].replace(b'"commit":"', b'"commit":"0', 1)))
    sha = hashlib.sha256(committed.read_bytes().splitlines()[6]).hexdigest().encode()

    def forge(lines):
        fields = lines[6].split(b" ")
        lines[6] = b" ".join([fields[0], sha, *fields[2:]])

    sealed = committed.with_suffix(".seal")
    edit(sealed, forge)
    broken = "breaks the chain, it or the line before it was changed, moved or deleted: restore it from git"
    assert seal_problems(committed) == [f"{sealed}, line 7 {broken}"]

    def forge_link(lines):
        fields, chain = lines[6].split(b" ")[:4], lines[5].split(b" ")[4].strip()
        lines[6] = b" ".join([*fields, hashlib.sha256(b" ".join([chain, *fields])).hexdigest().encode() + b"\n"])

    edit(sealed, forge_link)
    assert seal_problems(committed) == [f"{sealed}, line 8 {broken}"]
    # the whole chain from there on written anew: only the history of git tells
    edit(sealed, lambda lines: lines.__delitem__(slice(6, None)))
    assert seal(committed) == len(read_records(committed)) - 6 and seal_problems(committed) == []


@pytest.mark.parametrize(
    ("change", "broken", "others"),
    [
        (lambda lines: lines.pop(4), [5], 1),  # and a record without seal
        (lambda lines: swap(lines, 4, 5), [5, 6, 7], 1),  # and another order
        (lambda lines: lines.insert(4, lines[8]), [5, 6], 1),
        (lambda lines: lines.__setitem__(4, b"nonsense\n"), [5, 6], 1),
        (lambda lines: lines.__setitem__(4, b"\xff" + lines[4]), [5, 6], 1),
    ],
)
def test_changes_of_the_seal_are_found(committed, change, broken, others):
    sealed = committed.with_suffix(".seal")
    edit(sealed, change)
    problems = seal_problems(committed)
    chain = [problem for problem in problems if "breaks the chain" in problem]
    assert [problem.split(" breaks")[0] for problem in chain] == [f"{sealed}, line {number}" for number in broken]
    assert len(problems) == len(broken) + others


def test_a_seal_that_is_gone_or_shortened(committed):
    sealed = committed.with_suffix(".seal")
    whole = sealed.read_bytes()
    edit(sealed, lambda lines: lines.__delitem__(slice(-2, None)))
    last = len(whole.splitlines())
    remedy = "has no seal: if its writer was killed, or it was merged, run `python -m evoalign_study seal`"
    assert seal_problems(committed) == [f"{where(committed, number)} {remedy}" for number in (last - 1, last)]
    assert seal(committed) == 2 and sealed.read_bytes() == whole and seal(committed) == 0
    sealed.unlink()
    missing = f"{committed} has no seal: restore {sealed} from git, or make it by `python -m evoalign_study seal`"
    assert seal_problems(committed) == [missing]
    assert seal(committed) == last and sealed.read_bytes() == whole
    assert seal_problems(committed.with_name("full.jsonl")) == []  # neither records nor seal


# ---- records that were forged, seal and all


def forged(file: Path, change) -> list[str]:
    """What is found after a change of the first record with a test set, with all seals made anew."""
    lines = file.read_bytes().splitlines()
    number = next(i for i, line in enumerate(lines) if b'"greedy_bits"' in line and b'"t1_counts"' in line)
    made = json.loads(lines[number])
    change(made)
    lines[number] = json.dumps(made, sort_keys=True, separators=(",", ":")).encode()
    file.write_bytes(b"\n".join(lines) + b"\n")
    file.with_suffix(".seal").unlink()
    assert seal(file) == len(lines)
    problems = seal_problems(file)
    start = where(file, number + 1) + ": "
    assert all(problem.startswith(start) and problem.endswith(": restore it from git") for problem in problems)
    return [problem.removeprefix(start).removesuffix(": restore it from git") for problem in problems]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (
            lambda test: test.update(greedy=0.9),
            r"test.greedy is 0.9, but by test.greedy_bits the mean of 2000 results is",
        ),
        (lambda test: test.update(t1=test["t1"] + 2e-6), r"test.t1 is 0\.\d+, but by test.t1_counts the mean of 2000 "),
        (lambda test: test.update(t1_counts=test["t1_counts"][1:]), "but by test.t1_counts n is 2000"),
        (lambda test: test.update(t1_counts="z" * 2000), "test.t1_counts cannot be read ('z' is not a base-17 digit"),
        (lambda test: test.update(greedy_bits="zz"), "test.greedy_bits cannot be read (non-hexadecimal number"),
        (lambda test: test.update(greedy=None), "test.greedy_bits cannot be read (unsupported operand"),
        (lambda test: test.update(greedy=float("inf")), "line is not JSON"),
        (lambda test: test.pop("n"), "test.greedy_bits cannot be read ("),
    ],
)
def test_a_record_that_contradicts_itself_is_found_though_it_was_sealed(committed, change, found):
    if found == "line is not JSON":
        with pytest.raises(
            ValueError, match="a line without seal is not a record: .* Delete it, or restore it from git"
        ):
            forged(committed, lambda record: change(record["test"]))
        return
    problems = forged(committed, lambda record: change(record["test"]))
    assert problems and any(re.search(found.replace("(", r"\("), problem) for problem in problems), problems


def test_another_status_is_named_and_drops_no_run(committed):
    assert forged(committed, lambda record: record.update(status="incomplete")) == [
        "status 'incomplete', not 'finished'"
    ]
    with pytest.raises(
        ValueError, match=r"line \d+ \(.*\): status 'incomplete', but only runs that finished are stored"
    ):
        read_records(committed)


# ---- records that cannot be read


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda line: line[:40], "is not JSON: "),
        (lambda line: b"\xff" + line, "is not UTF-8 text: "),
        (lambda line: line[:-1] + b',"deep":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "is nested too deeply"),
        (lambda line: line[:-1] + b',"many":' + b"9" * 5000 + b"}", "is not JSON: Exceeds the limit"),
        (lambda line: line[:-1] + b',"rate":NaN}', "is not JSON: NaN is no number of JSON"),
        (lambda line: b"[1,2]", r"is not a record: \[1,2\]"),
        (lambda line: line.replace(b'"status":', b'"state":'), "is not a record: "),
        (lambda line: line.replace(b'"spec_hash":"', b'"spec_hash":7,"hash":"'), "is not a record: "),
        (lambda line: line.replace(b'"sha256":', b'"sha":'), "is not a record: "),
        (lambda line: line.replace(b'"finished"', b"[0]"), r"status \[0\], but only runs that finished are stored"),
    ],
)
def test_a_damaged_line_is_named_with_its_file_and_the_remedy(committed, damage, named):
    edit(committed, lambda lines: lines.__setitem__(6, damage(lines[6].rstrip(b"\n")) + b"\n"))
    with pytest.raises(ValueError, match=rf"tiny\.jsonl, line 7 .*{named}.*[Rr]estore the file from git"):
        read_records(committed)
    assert any(
        problem.startswith(f"{committed}, line 7 ") and "restore it" in problem for problem in seal_problems(committed)
    )


# ---- ledgers


def test_a_ledger_that_is_another_or_missing_is_found(committed):
    number, kept = next((i, r) for i, r in enumerate(read_records(committed), 1) if "ledger" in r)
    ledger = committed.parent / "ledgers" / f"{kept['spec_hash']}.jsonl.gz"
    data = ledger.read_bytes()
    ledger.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    another = f"its ledger {ledger} is not the one that was sealed: restore it from git"
    assert seal_problems(committed) == [f"{where(committed, number)}: {another}"]
    ledger.unlink()
    missing = f"its ledger {ledger} is missing: restore it from git"
    assert seal_problems(committed) == [f"{where(committed, number)}: {missing}"]


def test_a_seal_that_names_another_ledger_than_its_record(tmp_path):
    file, other = tmp_path / "tiny.jsonl", tmp_path / "other.jsonl"
    line = f"{spec_hash(record(1)['spec'])} {{}} {'b' * 64} {'c' * 64}"
    append_record(other, record(1))
    shutil.copy(other, file)
    fields = line.format(hashlib.sha256(file.read_bytes().rstrip(b"\n")).hexdigest())
    chain = hashlib.sha256(f"{'0' * 64} {fields}".encode()).hexdigest()
    file.with_suffix(".seal").write_text(f"{fields} {chain}\n")
    (problem,) = seal_problems(file)
    assert problem.endswith("its seal names another ledger than the record: restore it from git")


# ---- writers that are killed


def record(seed: int) -> dict:
    spec = {"kind": "train", "scale": "tiny", "seed": seed}
    return {"spec": spec, "spec_hash": spec_hash(spec), "status": "finished"}


WRITER = """
import itertools, json, os, signal, sys
from pathlib import Path
from evoalign_study import records

fatal, share = int(sys.argv[2]), float(sys.argv[3])
calls, write = itertools.count(), records._write

def die(file, data):
    if next(calls) == fatal:
        file.write(data[: round(share * len(data))])
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    write(file, data)

records._write = die
for made in json.loads(sys.argv[4]):
    records.append_record(Path(sys.argv[1]), made)
"""


@pytest.mark.parametrize("share", [0, 0.5, 0.995, 1])
@pytest.mark.parametrize("fatal", [0, 1, 2, 3])
def test_a_writer_killed_in_any_write_leaves_what_the_next_one_mends(tmp_path, fatal, share):
    """Two records are four writes: record, seal, record, seal. 0.995: all but the newline."""
    file = tmp_path / "tiny.jsonl"
    command = [sys.executable, "-c", WRITER, str(file), str(fatal), str(share), json.dumps([record(1), record(2)])]
    assert subprocess.run(command, cwd=paths.ROOT).returncode == -signal.SIGKILL
    # a record of which each byte was written is one, sealed or not
    in_seal, stored = fatal % 2 == 1, [record(1), record(2)][: fatal // 2]
    stored += [record(fatal // 2 + 1)] if in_seal or share > 0.9 else []
    assert read_records(file) == stored
    problems = seal_problems(file)
    assert bool(problems) == (share < 0.9 if in_seal else share > 0)
    assert all(
        "`python -m evoalign_study seal`" in problem or "delete the line if it is the last and torn" in problem for problem in problems
    )
    mended = tmp_path / "mended"
    shutil.copytree(tmp_path, mended)
    assert seal(mended / "tiny.jsonl") == (share < 0.9 if in_seal else share > 0.9)
    assert read_records(mended / "tiny.jsonl") == stored and seal_problems(mended / "tiny.jsonl") == []
    append_record(file, record(3))
    assert read_records(file) == [*stored, record(3)] and seal_problems(file) == []


def test_a_record_that_is_stored_already_is_sealed_when_it_comes_again(tmp_path, capsys):
    file = tmp_path / "tiny.jsonl"
    append_record(file, record(1))
    whole = file.with_suffix(".seal").read_bytes()
    file.with_suffix(".seal").unlink()
    assert append_record(file, record(1)) == record(1)
    assert file.with_suffix(".seal").read_bytes() == whole and seal_problems(file) == []
    assert f"sealed 1 record at the end of {file} that had no seal\n" in capsys.readouterr().out


def test_what_was_merged_is_sealed_by_the_next_writer_who_says_so(tmp_path, capsys):
    file, other = tmp_path / "tiny.jsonl", tmp_path / "other.jsonl"
    append_record(file, record(1))
    for seed in (2, 3):
        append_record(other, record(seed))
    file.write_bytes(file.read_bytes() + other.read_bytes())
    assert len(seal_problems(file)) == 2 and not capsys.readouterr().out
    append_record(file, record(4))
    assert seal_problems(file) == []
    assert capsys.readouterr().out == f"sealed 2 records at the end of {file} that had no seal\n"
