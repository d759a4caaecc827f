"""Records and their index: no finished run is lost, and whoever edits what is committed is found."""

import hashlib
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from evoalign_study import artifacts, claims, cli, history, paths, records
from evoalign_study.records import append_record, index_problems, read_records, record_files, spec_hash
from helpers import fork, refused, typed, wait
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays


def record(seed: int = 0, **more) -> dict:
    spec = {"kind": "train", "scale": "tiny", "seed": seed}
    return {"spec": spec, "spec_hash": spec_hash(spec), "status": "finished", "test": {"greedy": 0.25}} | more


def text(made: dict) -> bytes:
    return json.dumps(made, sort_keys=True, separators=(",", ":")).encode() + b"\n"


@pytest.fixture
def file(tmp_path) -> Path:
    """Three records of our own."""
    for seed in range(3):
        append_record(tmp_path / "tiny.jsonl", record(seed))
    return tmp_path / "tiny.jsonl"


# ---- specs

PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40)
@given(st.dictionaries(st.text(), PLAIN, max_size=5))
def test_the_hash_of_a_spec_survives_order_and_json(spec):
    reordered = dict(reversed(list(spec.items())))
    assert spec_hash(spec) == spec_hash(reordered) == spec_hash(json.loads(json.dumps(spec)))
    assert spec_hash(spec | {"seed": -7}) != spec_hash(spec | {"seed": -8})
    # records are found by it for years: it must never change
    known = {"kind": "train", "seed": 3, "sigma": 0.01, "bases": ["A0"], "name": "é", "model": None}
    assert spec_hash(known) == "fdf16530714f308e"


NO_JSON = ((bad, "JSON") for bad in (float("nan"), np.int64(3), {1, 2}))
test_a_spec_holds_only_json = refused(*NO_JSON, call=lambda bad: spec_hash({"x": bad}), error=(ValueError, TypeError))


# ---- reading and writing


def test_records_come_back_in_order(tmp_path):
    """Though bytes are checked once, neither a caller's changes nor those of the file are missed."""
    file, asked = tmp_path / "new/folder/tiny.jsonl", {record(n)["spec_hash"] for n in (1, 3, 4)}
    assert read_records(file) == []
    for seed in (3, 1, 2):
        append_record(file, record(seed, note="ünï\nline"))
    assert read_records(file) == [record(seed, note="ünï\nline") for seed in (3, 1, 2)]
    for _ in range(2):
        found = read_records(file, asked)
        assert [r["spec"]["seed"] for r in found] == [3, 1] and found[0]["test"]["greedy"] == 0.25
        found[0]["test"]["greedy"] = 1.0
    file.write_bytes(file.read_bytes().replace(b'"seed":2', b'"seed":9'))  # of a record that nobody asks for
    for _ in range(2):
        with pytest.raises(ValueError, match="line 3"):
            read_records(file, asked)


TOO_MUCH = [
    ({"curve": {"step": list(range(51))}}, "'step' of train 2 .*51"),
    ({"note": "x" * 7_900}, "train 2 has 8"),
    ({"loss": float("nan"), "curve": {"reward": [0.5, -np.inf]}}, "train 2 .*loss = nan"),
]


@pytest.mark.parametrize(("more", "named"), TOO_MUCH)
def test_limits_of_a_record(file, more, named):
    before = file.read_bytes()
    with pytest.raises(ValueError, match=named):
        append_record(file, record(2, **more))
    assert file.read_bytes() == before


def test_the_first_record_of_a_spec_stays_with_its_ledger(tmp_path, capsys):
    """Two sweeps at once ran the same spec."""
    file, made = tmp_path / "results/tiny.jsonl", tmp_path / "made"
    first, second = (
        record(1, ledger={"sha256": hashlib.sha256(text).hexdigest(), "weights": digit * 64})
        for text, digit in ((b"first", "1"), (b"second", "2"))
    )
    for written, own in (("first", first), ("second", second)):
        made.write_text(written)
        assert append_record(file, own, made) == first
    assert append_record(file, record(2)) == record(2) and read_records(file) == [first, record(2)]
    ledger = tmp_path / f"results/ledgers/{first['spec_hash']}.jsonl.gz"
    assert ledger.read_text() == "first" and index_problems(file) == []
    for change in (lambda: ledger.write_text("other"), ledger.unlink):
        change()
        (problem,) = index_problems(file)
        assert str(ledger) in problem and first["spec_hash"] in problem


def test_committed_records_are_those_of_every_notebook(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    one, other = (tmp_path / name / "tiny.jsonl" for name in ("01_a", "02_b"))
    append_record(one, record(1)), append_record(other, record(2)), append_record(other, record(3))
    append_record(other.with_name("full.jsonl"), record(4))
    assert record_files("tiny") == [one, other] and len(record_files()) == 3
    other.write_bytes(other.read_bytes()[:-9])  # its writer was killed
    assert claims.committed_records("tiny") == [record(1), record(2)]
    append_record(one, record(2, note="of a merge"))
    with pytest.raises(ValueError, match=f"{record(2)['spec_hash']} .*01_a.*02_b"):
        claims.committed_records("tiny")


# ---- several writers, and writers that are killed


def write(file: Path, first: int, count: int, begin: int) -> None:
    """Append records once there is a byte to be read."""
    os.read(begin, 1)
    for seed in range(first, first + count):
        append_record(file, record(seed, filler="x" * 7000))


def test_a_killed_writer_and_two_at_once_lose_no_finished_record(tmp_path):
    """Unlocked, each of two would cut off what it takes for a torn line of the other."""
    file, end, (begin, begins) = tmp_path / "tiny.jsonl", time.monotonic() + 100, os.pipe()
    killed = fork(write, file, 0, 10**6, begin)
    os.write(begins, b"1")
    while not (file.is_file() and len(read_records(file)) >= 5):
        assert time.monotonic() < end
    os.kill(killed, signal.SIGKILL)
    assert wait(killed) == -signal.SIGKILL
    records.index(file)  # mends what it left
    known, count = len(read_records(file)), 40
    assert [r["spec"]["seed"] for r in read_records(file)] == list(range(known)) and known >= 5
    both = [fork(write, file, first, count, begin) for first in (known, known + count)]
    os.write(begins, b"23")
    assert [wait(pid) for pid in both] == [0, 0]
    seeds = [r["spec"]["seed"] for r in read_records(file)]
    assert sorted(seeds) == list(range(known + 2 * count)) and seeds != sorted(seeds)  # they did take turns
    assert index_problems(file) == []


def test_a_writer_killed_at_any_byte_leaves_what_the_next_one_mends(tmp_path):
    """Of two records the second is torn: in the record's line, between the two files, or in the index."""
    file, index = tmp_path / "tiny.jsonl", tmp_path / "tiny.index"
    append_record(file, record(1)), append_record(file, record(2, note="ü"))
    whole, indexed = file.read_bytes(), index.read_bytes()
    first = indexed[: indexed.index(b"\n") + 1]
    states = [(whole[:end], first) for end in range(whole.index(b"\n") + 1, len(whole) + 1, 7)]
    states += [(whole[:-1], first)] + [(whole, indexed[:end]) for end in range(len(first), len(indexed), 9)]
    for written, in_index in states:
        complete = len(written) >= len(whole) - 1  # but for its end
        known = [record(1), record(2, note="ü")][: 1 + complete]
        for mend in (records.index, lambda file: append_record(file, record(3))):
            file.write_bytes(written), index.write_bytes(in_index)
            assert read_records(file) == known
            assert bool(index_problems(file)) == (len(written) > whole.index(b"\n") + 1)
            mend(file)
            assert read_records(file)[: len(known)] == known and index_problems(file) == []
            assert index.read_bytes().startswith(first)


def test_what_was_merged_is_named_until_it_is_indexed(file):
    file.write_bytes(text(record(7)) + text(record(8)) + file.read_bytes())
    assert [problem.split(" (")[0] for problem in index_problems(file)] == [f"{file}, line {n}" for n in (1, 2)]
    assert records.index(file) == 2 and records.index(file) == 0 and index_problems(file) == []
    file.with_suffix(".index").unlink()
    assert len(index_problems(file)) == 1 and records.index(file) == 5 and index_problems(file) == []
    file.unlink()
    assert len(index_problems(file)) == 5 and records.index(file) == 0  # an index stays


# ---- what is committed, and who edits it


@pytest.mark.parametrize("committed_file", record_files(), ids=lambda file: file.parent.name)
def test_the_committed_index(committed_file):
    """Written down here: it is read for years."""
    lines = committed_file.read_bytes().splitlines()
    made = [json.loads(line) for line in lines]
    ledgers = [r["ledger"]["sha256"] if "ledger" in r else "-" for r in made]
    digests = [hashlib.sha256(line).hexdigest() for line in lines]
    wanted = [f"{r['spec_hash']} {own} {ledger}" for r, own, ledger in zip(made, digests, ledgers, strict=True)]
    assert committed_file.with_suffix(".index").read_text().splitlines() == wanted
    beside = (line for file in committed_file.parent.glob("*.jsonl") for line in file.read_bytes().splitlines())
    kept = {f"{r['spec_hash']}.jsonl.gz" for r in map(json.loads, beside) if "ledger" in r}
    assert kept == {path.name for path in (committed_file.parent / "ledgers").glob("*")}
    assert index_problems(committed_file) == []


def test_one_changed_byte_is_found_in_records_and_index(file):
    chosen = random.Random(0)
    for edited in (file, file.with_suffix(".index")):
        whole = edited.read_bytes()
        for place in chosen.sample(range(len(whole)), 8):
            edited.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            number, problems = whole[:place].count(b"\n") + 1, index_problems(file)
            assert any(f", line {number}" in problem for problem in problems), problems
            assert edited == file or records.index(file) == 0
        edited.write_bytes(whole)


CHANGES = {
    "deleted": lambda lines: lines.pop(1),
    "moved": lambda lines: lines.insert(0, lines.pop()),
    "repeated": lambda lines: lines.insert(1, lines[0]),
    "inserted": lambda lines: lines.insert(1, text(record(9))),
    "no text": lambda lines: lines.__setitem__(1, b"\xff" + lines[1]),
}


@pytest.mark.parametrize("suffix", [".jsonl", ".index"])
@pytest.mark.parametrize("change", CHANGES)
def test_deleted_moved_repeated_and_inserted_lines_are_found(file, change, suffix):
    edited = file.with_suffix(suffix)
    lines = edited.read_bytes().splitlines(keepends=True)
    CHANGES[change](lines)
    edited.write_bytes(b"".join(lines))
    assert index_problems(file)


DAMAGE = {
    "half": lambda line: line[:40],
    "deep": lambda line: line[:-1] + b',"deep":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "NaN": lambda line: line[:-1] + b',"rate":NaN}',
    "no object": lambda line: b"[1,2]",
    "no status": lambda line: line.replace(b'"status":', b'"state":'),
    "hash": lambda line: line.replace(b'"spec_hash":"', b'"spec_hash":7,"hash":"'),
    "ledger": lambda line: line[:-1] + b',"ledger":{"sha":"0"}}',
    "status": lambda line: line.replace(b'"finished"', b"[0]"),
    "spec": lambda line: line.replace(b'"seed":1', b'"seed":9'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_line_is_named_with_its_file(file, damage):
    lines = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join([lines[0], DAMAGE[damage](lines[1]), lines[2]]) + b"\n")
    for reads in (read_records, records.index, lambda file: append_record(file, record(9))):
        with pytest.raises(ValueError, match=r"tiny\.jsonl, line 2 .*from git"):
            reads(file)
    assert any(problem.startswith(f"{file}, line 2 ") for problem in index_problems(file))


CONTRADICTIONS = [
    ({"greedy": 0.9}, "test.greedy"),
    ({"t1": 0.99}, "test.t1"),
    ({"t1_counts": "0" * 1999}, "test.t1_counts: 1999 results"),
    ({"t1_counts": "z" * 2000}, "test.t1_counts: 'z'"),
    ({"greedy_bits": "zz"}, "test.greedy_bits: "),
    ({"greedy": None}, "test.greedy is None"),
    ({"n": None}, "test.greedy_bits: "),
]


@pytest.mark.parametrize(("change", "named"), CONTRADICTIONS)
def test_a_record_that_contradicts_itself_is_found_though_its_index_was_made_anew(tmp_path, change, named):
    test = {"n": 2000, "greedy": 0.5, "t1": 0.25, "greedy_bits": "f0" * 250, "t1_counts": "4" * 2000}
    file = tmp_path / "tiny.jsonl"
    append_record(file, record(0, test=test))
    assert index_problems(file) == []
    append_record(file, record(1, test=test | change))
    problems = index_problems(file)
    assert any(named in problem for problem in problems) and all(", line 2 " in problem for problem in problems)


# ---- the history of git


def git(*arguments: str) -> None:
    user = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *user, *arguments], cwd=paths.ROOT, check=True, capture_output=True)


BETTER = {"test": {"greedy": 1.0}}
FORGED = [[record(0, **BETTER), record(1)], [record(0)], [record(1, **BETTER), record(0)], []]


@pytest.mark.parametrize("forged", FORGED)
def test_whoever_rewrites_records_and_index_is_found_by_the_history(tmp_path, monkeypatch, forged):
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    monkeypatch.setattr(paths, "RESULTS", tmp_path / "paper/results")
    file = paths.RESULTS / "01_a/tiny.jsonl"
    assert artifacts.lost_from_history() == []  # no git here
    git("init", "-q")
    for seed in range(2):
        append_record(file, record(seed)), git("add", "."), git("commit", "-qm", "a record")
    assert artifacts.record_problems() == []
    lost = set(file.with_suffix(".index").read_text().splitlines())
    file.unlink(), file.with_suffix(".index").unlink()
    for made in forged:
        append_record(file, made)
    if forged:
        assert index_problems(file) == []
        lost -= set(file.with_suffix(".index").read_text().splitlines())
    for _ in range(2):  # a commit of the forgery changes nothing
        named = artifacts.record_problems()
        assert len(named) == len(lost) > 0
        assert all(any(line[:16] in problem and str(file.parent) in problem for problem in named) for line in lost)
        git("add", "."), git("commit", "-qm", "forged", "--allow-empty")
    (tmp_path / "LOG.md").write_text("Withdrawn: " + ", ".join(line[17:29] for line in lost))
    assert artifacts.record_problems() == []


def test_the_history_is_read_whatever_git_is_told_and_an_index_does_not_begin_anew(repository, tmp_path):
    file = paths.RESULTS / "01_a/tiny.jsonl"
    git("init", "-q", "-b", "main"), git("config", "diff.noprefix", "true")
    (repository / ".gitattributes").write_text("*.index binary\n")
    append_record(file, record(0)), git("add", "."), git("commit", "-qm", "one")
    git("checkout", "-qb", "side"), git("commit", "-qm", "side", "--allow-empty"), git("checkout", "-q", "main")
    git("merge", "-q", "--no-ff", "--no-commit", "side")
    append_record(file, record(1)), git("add", "."), git("commit", "-qm", "a merge that adds a record")
    assert artifacts.record_problems() == [] and history.commits("paper/results") == (2, False)
    file.write_text(file.read_text().replace("0.25", "1.0")), file.with_suffix(".index").unlink()
    for forged in (False, True):
        assert typed(cli.app, "seal")[0] == 1 and not file.with_suffix(".index").exists()
        assert len(artifacts.lost_from_history()) == 2
        if not forged:
            git("commit", "-qam", "forged")
    git("clone", "-q", "--depth", "1", f"file://{repository}", "shallow")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "ROOT", repository / "shallow")
        assert history.commits("paper/results") == (1, True)


# ---- packed numbers


@given(arrays(np.float64, st.integers(0, 50), elements=st.floats(0, 1)))
def test_packed_probabilities_come_back_to_a_quarter_of_a_percent(values):
    back, small = records.unpack_probabilities(records.pack_probabilities(values)), values < 1.3e-9
    assert np.allclose(back[~small], values[~small], rtol=0.0026, atol=0)
    assert (back[small] < 1.4e-9).all() and (back[values == 1] == 1).all() and (back[values == 0] == 0).all()


test_what_is_no_row_of_numbers_is_refused = refused(
    *((records.pack_integers, values, "one row of integers") for values in ([-1], [4096], [0.5], [[1]])),
    *(
        (records.pack_probabilities, values, "one row of probabilities")
        for values in ([-0.1], [1.1], [float("nan")], [[0.5]])
    ),
    *((records.unpack_integers, text, "damaged record") for text in ("A", "A+")),
    call=lambda function, value: function(value),
)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder but git's and locks, which stay where they were held."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.match(".*.lock")]
    found = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    return {name: data for name, data in found.items() if not name.startswith(".git")}
