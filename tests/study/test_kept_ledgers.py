"""Ledgers kept with records: found by their record and replayed to its weights, the committed ones too."""

import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from evoalign_study import measures, paths, sweep, training
from evoalign_study.kinds.decode import base_specs
from evoalign_study.kinds.train import train_specs
from evoalign_study.records import index_problems, read_records, record_files, spec_hash
from evoalign_study.sweep import load_or_run
from helpers import chained
from typer.testing import CliRunner

from evoalign_lib import ledger
from evoalign_lib.cli import app

SETTINGS = {
    "max_completion_length": 8, "validation_problems": 4, "test_problems": 4, "population_size": 3, "sigma": 0.03,
    "alpha": 0.01, "steps": 12, "prompts_per_step": 8, "curve_points": 2,
}  # fmt: skip


def specs(scale: str = "tiny") -> list[dict]:
    return train_specs("es", ["A0"], range(2), SETTINGS, scale)


def at(patch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Committed records and fresh runs, both in this folder."""
    patch.setattr(paths, "RESULTS", folder / "results")
    patch.setenv("EVOALIGN_RUN_DIR", str(folder / "run"))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but locks, which stay where they were held."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Committed: two runs, the ledger of the first. Beside: the same, by force. Nothing may change it."""
    with pytest.MonkeyPatch.context() as patch:
        folder = at(patch, tmp_path_factory.mktemp("made"))
        one, other = specs()
        left = folder / f"results/nb/ledgers/{spec_hash(one)}.jsonl.gz"
        left.parent.mkdir(parents=True)
        left.write_bytes(b"of a sweep that was killed before it wrote the record")
        load_or_run([one, other], "nb", "tiny", keep_ledgers=[one], workers=1)
        before = contents(folder / "results")
        load_or_run([one], "nb", "tiny", force=True, keep_ledgers=[one])
        assert contents(folder / "results") == before
    return folder


@pytest.fixture
def folder(made, tmp_path, monkeypatch) -> Path:
    """A copy, to be damaged."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return at(monkeypatch, tmp_path)


def records(folder: Path) -> list[dict]:
    return sorted(read_records(folder / "results/nb/tiny.jsonl"), key=lambda r: r["spec"]["seed"])


def test_a_record_describes_its_ledger(folder):
    one, other = records(folder)
    assert "ledger" not in other
    path = sweep.ledger_file(one)
    assert path == folder / f"results/nb/ledgers/{one['spec_hash']}.jsonl.gz"
    kept, packed, plain = one["ledger"], path.read_bytes(), gzip.decompress(path.read_bytes())
    assert (kept["bytes"], kept["gzip_bytes"]) == (len(plain), len(packed)) and len(packed) < len(plain)
    assert kept["sha256"] == hashlib.sha256(packed).hexdigest()
    assert kept["replay_error"] == 0.0
    run = ledger.read(path)
    assert run.ended and len(run.steps) == SETTINGS["steps"] and run.weights[12] == kept["weights"]
    assert run.header["model"]["name"] == "A0"
    assert run.header["settings"].items() >= {"seed": 0, "arm": "es", "population_size": 3, "sigma": 0.03}.items()
    # the digest that every record of a run has, from a replay
    master = ledger.replay(path, "A0")
    assert hashlib.sha256(master.tobytes()).hexdigest().startswith(one["digest"])
    assert sorted(contents(folder)) == [
        f"results/nb/ledgers/{one['spec_hash']}.jsonl.gz",
        "results/nb/tiny.index",
        "results/nb/tiny.jsonl",
        f"run/results/ledgers/{one['spec_hash']}.jsonl.gz",
        "run/results/tiny.index",
        "run/results/tiny.jsonl",
    ]
    assert index_problems(folder / "results/nb/tiny.jsonl") == index_problems(folder / "run/results/tiny.jsonl") == []


def test_a_kept_ledger_is_loaded_with_its_record(folder, capsys):
    before = contents(folder)
    assert load_or_run(specs(), "nb", "tiny", keep_ledgers=specs()[:1]) == records(folder)
    assert load_or_run(specs(), "another", "tiny", keep_ledgers=specs()[:1]) == records(folder)
    assert capsys.readouterr().out == 2 * "loaded 2 records, ran 0\n" and contents(folder) == before


def test_a_forced_run_keeps_its_own_beside(folder):
    (fresh,) = read_records(folder / "run/results/tiny.jsonl")
    (committed, _) = records(folder)
    assert sweep.ledger_file(fresh).parent == folder / "run/results/ledgers"
    assert sweep.check_ledger(fresh).weights == sweep.check_ledger(committed).weights
    assert fresh["ledger"]["sha256"] != committed["ledger"]["sha256"]  # the times of a step differ


def test_what_cannot_be_kept_is_refused_before_any_run(folder):
    one, other = specs()
    base = base_specs(["A0"], SETTINGS, "tiny")[0]
    for all_of_them, wrong in (([one], other), ([one, base], base)):
        with pytest.raises(ValueError, match="keep_ledgers holds a spec that is no run of ES among the specs: {"):
            load_or_run(all_of_them, "nb", "tiny", keep_ledgers=[wrong])
    with pytest.raises(
        ValueError, match=r"of nb \(es A0 1\) was made without keeping the run's ledger: delete its line to run it"
    ):
        load_or_run([one, other], "nb", "tiny", keep_ledgers=[other])


def test_a_ledger_that_is_missing_or_another(folder):
    one, _ = records(folder)
    path = sweep.ledger_file(one)
    for damage in (lambda: path.write_bytes(path.read_bytes()[:-1] + b"\1"), path.unlink):
        damage()
        with pytest.raises(ValueError, match=r"SHA-256 .*is neither .*results/nb/ledgers.*restore it from git, or del"):
            load_or_run(specs(), "nb", "tiny", keep_ledgers=specs()[:1])
        with pytest.raises(ValueError, match="restore it from git"):
            sweep.check_ledger(one)
        (problem,) = index_problems(folder / "results/nb/tiny.jsonl")
        assert f"its ledger {path} is " in problem


def test_a_ledger_of_another_run_is_found(folder):
    one, _ = records(folder)
    with pytest.raises(
        ValueError, match=r"replays to weights with the digest .*, the record .* has 0000000000000000\.\.\."
    ):
        sweep.check_ledger(one | {"ledger": one["ledger"] | {"weights": "0" * 64}})
    # a forger's chain: it is whole, and its digests are the record's, not those of its rewards
    path = sweep.ledger_file(one)
    lines = gzip.decompress(path.read_bytes()).splitlines()
    step = json.loads(lines[12])
    assert step["step"] == 11  # after the last digest but one
    forged = [*map(json.loads, lines[:12]), step | {"of": 8, "rewards": "1 2 9"}, json.loads(lines[13])]
    path.write_bytes(gzip.compress(chained(forged)))
    sha = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(ledger.LedgerError, match="after 12 steps the weights have the digest"):
        sweep.check_ledger(one | {"ledger": one["ledger"] | {"sha256": sha}})


def test_a_packed_ledger_depends_on_its_lines_alone(folder, tmp_path):
    one, _ = records(folder)
    packed = sweep.ledger_file(one).read_bytes()
    for name in ("a.jsonl", "sub/other.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.decompress(packed))
        os.utime(path, (0, len(name)))
        assert ledger.pack(path) == packed
    for cut in (b"", b'{"step":12'):
        text = gzip.decompress(packed)
        path.write_bytes(text + cut if cut else text[: text.rindex(b"\n", 0, -1) + 1])
        with pytest.raises(ledger.LedgerError, match="is not closed after step 12: let train"):
            ledger.pack(path)


# ---- a packed ledger from elsewhere


def test_a_packed_ledger_that_is_damaged(folder, tmp_path):
    one, _ = records(folder)
    good = sweep.ledger_file(one).read_bytes()
    path = tmp_path / "bad.jsonl.gz"
    middle = len(good) // 2
    for bad in (
        good[:-20],
        good[:5],
        b"",
        b"no gzip",
        good[:middle] + bytes(b ^ 255 for b in good[middle : middle + 8]) + good[middle + 8 :],
        good[:12] + b"\xff" * 20 + good[32:],
        good[:-8] + b"\0" * 8,
        good + b"and more",
    ):
        path.write_bytes(bad)
        with pytest.raises(ledger.LedgerError, match=r"bad.jsonl.gz (is damaged .*: restore it from|has no header)"):
            ledger.read(path)


def test_a_packed_ledger_that_unpacks_to_gigabytes(folder, tmp_path):
    one, _ = records(folder)
    path, block = tmp_path / "bomb.jsonl.gz", gzip.compress(b" " * 2**24)
    path.write_bytes(sweep.ledger_file(one).read_bytes() + block * 64)  # 1 GB in 1 MB
    script = (
        "import resource, sys\n"
        "from evoalign_lib import ledger\n"
        "used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n    ledger.read(sys.argv[1])\n"
        "except ledger.LedgerError as error:\n    print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(paths.ROOT)}
    command = [sys.executable, "-c", script, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    message, kilobytes = done.stdout.splitlines()
    assert "unpacks to more than 64 MB" in message and "if you trust it, unpack it (gunzip)" in message
    assert int(kilobytes) < 300_000


# ---- the command


def replay_command(path: Path, out: Path, record: dict, step: int) -> None:
    """`evoalign replay` as it is typed, for a ledger of a record: every digest, and the model of a step."""
    call = CliRunner().invoke(app, ["replay", str(path), "--verify"])
    assert call.exit_code == 0, call.output
    assert "all computed again, equal" in call.output and f"last weights: {record['ledger']['weights']}" in call.output
    call = CliRunner().invoke(app, ["replay", str(path), "--step", str(step), "--out", str(out)])
    assert call.exit_code == 0 and f"the model after step {step}, weights " in call.output, call.output
    assert (out / "model.safetensors").is_file() and (out / "tokenizer.json").is_file()


def test_the_command_replays_a_kept_ledger(folder):
    one, _ = records(folder)
    path = sweep.ledger_file(one)
    replay_command(path, folder / "seven", one, 7)
    # the whole of it, in a process of its own
    command = [sys.executable, "-m", "evoalign_lib.cli", "replay", path, "--out", folder / "last"]
    environment = {**os.environ, "PYTHONPATH": str(paths.ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"the model after step 12, weights {one['ledger']['weights']}" in done.stdout


# ---- what is committed

NAMED = [
    (file.parent / "ledgers" / f"{r['spec_hash']}.jsonl.gz", r)
    for file in record_files()
    for r in read_records(file)
    if "ledger" in r
]


def test_records_and_ledgers_that_are_committed_name_one_another():
    there = sorted(path for path in paths.RESULTS.rglob("*") if path.is_file() and path.parent.name == "ledgers")
    assert there == sorted(path for path, _ in NAMED)


def _replays() -> Iterator[Any]:
    """The shortest of each notebook in every run of the tests, the others where there is time for it."""
    seen = set()
    for path, record in sorted(NAMED, key=lambda named: named[1]["spec"]["steps"]):
        group = record["notebook"]
        yield pytest.param(path, record, id=path.name, marks=[pytest.mark.slow] if group in seen else [])
        seen.add(group)


@pytest.mark.parametrize(("path", "record"), list(_replays()))
def test_a_committed_ledger_replays_to_the_weights_of_its_record(path, record, tmp_path):
    replay_command(path, tmp_path / "model", record, 3)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # half a minute, or many times that where other runs have the machine
@pytest.mark.parametrize(("path", "record"), NAMED, ids=[path.name for path, _ in NAMED])
def test_a_replayed_model_answers_as_its_record_says(path, record):
    spec = record["spec"]
    model, tokenizer, sets = training.world(spec | {"kind": "base"})
    with closing(training.evaluation_engine(spec, model, tokenizer, sets)) as engine:
        engine.master[:] = ledger.replay(path, spec["base"])
        found = measures.get(spec["task"]).tested(engine, sets["test"])
    assert found == {name: record["test"][name] for name in found}


@pytest.mark.parametrize(("path", "record"), NAMED, ids=[path.name for path, _ in NAMED])
def test_a_committed_ledger_is_the_one_of_its_record_and_whole(path, record):
    assert sweep.ledger_file(record) == path  # by the SHA-256 of the file
    run, spec = ledger.read(path), record["spec"]
    assert run.ended and len(run.steps) == spec["steps"] and run.header["model"]["name"] == spec["base"]
    assert all(
        run.header["settings"][name] == spec[name] for name in ("arm", "seed", "population_size", "sigma", "alpha")
    )
