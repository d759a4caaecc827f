"""Ledgers kept with records: found by their record and replayed to its weights, the committed ones too."""

import gzip
import hashlib
import json
import shutil
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
    "max_completion_length": 6, "validation_problems": 2, "test_problems": 2, "population_size": 3, "sigma": 0.03,
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
        load_or_run([one], "nb", "tiny", force=True, keep_ledgers=[one], workers=1)
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
    path, kept = sweep.ledger_file(one), one["ledger"]
    assert "ledger" not in other and path == folder / f"results/nb/ledgers/{one['spec_hash']}.jsonl.gz"
    packed, plain = path.read_bytes(), gzip.decompress(path.read_bytes())
    assert (kept["bytes"], kept["gzip_bytes"]) == (len(plain), len(packed)) and len(packed) < len(plain)
    assert kept["sha256"] == hashlib.sha256(packed).hexdigest() and kept["replay_error"] == 0.0
    run = ledger.read(path)
    assert run.ended and len(run.steps) == SETTINGS["steps"] and run.weights[12] == kept["weights"]
    assert run.header["model"]["name"] == "A0"
    assert run.header["settings"].items() >= {"seed": 0, "arm": "es", "population_size": 3, "sigma": 0.03}.items()
    # the digest that every record of a run has, from a replay
    assert hashlib.sha256(ledger.replay(path, "A0").tobytes()).hexdigest().startswith(one["digest"])
    files = [f"ledgers/{one['spec_hash']}.jsonl.gz", "tiny.index", "tiny.jsonl"]
    assert sorted(contents(folder)) == [f"{place}/{file}" for place in ("results/nb", "run/results") for file in files]
    assert index_problems(folder / "results/nb/tiny.jsonl") == index_problems(folder / "run/results/tiny.jsonl") == []


def test_a_kept_ledger_is_loaded_with_its_record_and_a_forced_run_keeps_its_own(folder, capsys):
    before = contents(folder)
    for notebook in ("nb", "another"):
        assert load_or_run(specs(), notebook, "tiny", keep_ledgers=specs()[:1]) == records(folder)
    assert capsys.readouterr().out == 2 * "loaded 2 records, ran 0\n" and contents(folder) == before
    (fresh,), (committed, _) = read_records(folder / "run/results/tiny.jsonl"), records(folder)
    assert sweep.ledger_file(fresh).parent == folder / "run/results/ledgers"
    assert sweep.check_ledger(fresh).weights == sweep.check_ledger(committed).weights
    assert fresh["ledger"]["sha256"] != committed["ledger"]["sha256"]  # the times of a step differ


def test_what_cannot_be_kept_is_refused_before_any_run(folder):
    one, other = specs()
    base = base_specs(["A0"], SETTINGS, "tiny")[0]
    for all_of_them, wrong, named in (
        ([one], other, "keep_ledgers"),
        ([one, base], base, "keep_ledgers"),
        ([one, other], other, r"\(es A0 1\) was made without keeping"),
    ):
        with pytest.raises(ValueError, match=named):
            load_or_run(all_of_them, "nb", "tiny", keep_ledgers=[wrong])


def test_a_ledger_that_is_missing_or_another(folder):
    one, _ = records(folder)
    path = sweep.ledger_file(one)
    for damage in (lambda: path.write_bytes(path.read_bytes()[:-1] + b"\1"), path.unlink):
        damage()
        for use in (
            lambda: load_or_run(specs(), "nb", "tiny", keep_ledgers=specs()[:1]),
            lambda: sweep.check_ledger(one),
        ):
            with pytest.raises(ValueError, match="restore it from git"):
                use()
        (problem,) = index_problems(folder / "results/nb/tiny.jsonl")
        assert f"its ledger {path} is " in problem


def test_a_ledger_of_another_run_is_found(folder):
    one, _ = records(folder)
    with pytest.raises(ValueError, match="0000000000000000"):
        sweep.check_ledger(one | {"ledger": one["ledger"] | {"weights": "0" * 64}})
    # a forger's chain: it is whole, and its digests are the record's, not those of its rewards
    path = sweep.ledger_file(one)
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    lines[12] |= {"of": 8, "rewards": "1 2 9"}  # after the last digest but one
    path.write_bytes(gzip.compress(chained(lines)))
    sha = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(ledger.LedgerError, match="after 12 steps the weights have the digest"):
        sweep.check_ledger(one | {"ledger": one["ledger"] | {"sha256": sha}})


def test_a_packed_ledger_depends_on_its_lines_alone(folder, tmp_path, monkeypatch):
    packed = sweep.ledger_file(records(folder)[0]).read_bytes()
    text, path = gzip.decompress(packed), tmp_path / "other.jsonl"
    path.write_bytes(text)
    assert ledger.pack(path) == packed
    for cut in (text + b'{"step":12', text[: text.rindex(b"\n", 0, -1) + 1]):
        path.write_bytes(cut)
        with pytest.raises(ledger.LedgerError, match="is not closed"):
            ledger.pack(path)
    monkeypatch.setattr(ledger, "_MOST_UNPACKED", len(text) - 1)  # some kB can unpack to gigabytes
    with pytest.raises(ledger.LedgerError, match="unpacks to more than"):
        ledger.read(sweep.ledger_file(records(folder)[0]))


@pytest.mark.parametrize("damage", [lambda b: b[:5], lambda b: b"", lambda b: b"no gzip", lambda b: b[:-8] + bytes(8)])
def test_a_packed_ledger_that_is_damaged(folder, tmp_path, damage):
    path = tmp_path / "bad.jsonl.gz"
    path.write_bytes(damage(sweep.ledger_file(records(folder)[0]).read_bytes()))
    with pytest.raises(ledger.LedgerError, match=r"bad.jsonl.gz (is damaged|has no header)"):
        ledger.read(path)


# ---- the command


def replay_command(path: Path, out: Path, record: dict, step: int) -> None:
    """`evoalign replay` as it is typed, for a ledger of a record: every digest, and the model of a step."""
    call = CliRunner().invoke(app, ["replay", str(path), "--verify"])
    assert call.exit_code == 0, call.output
    assert "all computed again, equal" in call.output and f"last weights: {record['ledger']['weights']}" in call.output
    call = CliRunner().invoke(app, ["replay", str(path), "--step", str(step), "--out", str(out)])
    assert call.exit_code == 0 and f"the model after step {step}, weights " in call.output, call.output
    assert (out / "model.safetensors").is_file() and (out / "tokenizer.json").is_file()


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
