"""Faults in what a run writes: a disk that fills up anywhere, and bits that flip; with `-m slow` hundreds of these."""

import json
import os
import resource
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from es_runs import cut, outcome, trainer
from helpers import in_child, random_model
from test_interrupts import Lines, lines_of
from test_resume import EVALUATING, SAVING, SETTINGS, reward, run

from evoalign_lib import ledger
from evoalign_lib.es import ESTrainer

FLIPS = 200
"""the full size, in each kind of file"""
BEST = {**EVALUATING, **SAVING, "load_best_model_at_end": True}


def in_full(few: int, full: int) -> pytest.MarkDecorator:
    """Run a test with a few faults, and where slow tests are asked for with all."""
    marks = [pytest.mark.slow, pytest.mark.timeout(3600)]
    return pytest.mark.parametrize("faults", [few, pytest.param(full, marks=marks)])


def made(folder: Path, **changed) -> ESTrainer:
    return trainer(folder, reward, **SETTINGS | changed)


# ---- a full disk


def test_a_disk_that_fills_up_at_any_line_of_a_checkpoint(tmp_path):
    """Whichever of its files cannot be written, by whichever library: the remedy is named, and nothing partial left."""

    def limit(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def until_full() -> None:
        tested, folder = made(tmp_path, **BEST | {"max_steps": 2}), tmp_path / "checkpoint-2"
        tested.train()
        files = "/es.py", "/surface.py", "/_checkpoints.py"
        lines = [line for line in lines_of(tested._save_checkpoint) if line[0] in files]
        whole, refused = {path.name: path.read_bytes() for path in folder.iterdir()}, Counter()
        for line in lines:
            try:
                with Lines(line, lambda: limit(10)) as at:
                    tested._save_checkpoint()
            except OSError as error:
                assert "the checkpoint could not be written" in str(error) and "Make room" in str(error)
                refused[line[0]] += 1
            finally:
                limit(resource.RLIM_INFINITY)
            assert at.acted, line
            # the checkpoint that was there is there, and nothing else
            assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole, line
            assert {path.name for path in tmp_path.iterdir()} <= {folder.name, ledger.NAME, f".{ledger.NAME}.lock"}
        assert refused["/es.py"] > 3 and refused["/_checkpoints.py"] > 8
        tested.args.max_steps = 3
        tested.train()  # there is room again

    assert in_child(until_full) == 0


# ---- flipped bits


@pytest.fixture(scope="module")
def left(tmp_path_factory) -> Path:
    """A run that was cut off after 7 steps, with two checkpoints (run), and the same run finished (whole)."""
    folder = tmp_path_factory.mktemp("left")
    cut(folder / "run", 7, reward, **SETTINGS | BEST)
    (folder / "outcome.json").write_text(json.dumps(outcome(run(folder / "whole", **BEST))))
    (folder / "packed.jsonl.gz").write_bytes(ledger.pack(folder / "whole" / ledger.NAME))
    return folder


def flip(path: Path, rng: np.random.Generator, last: bool = False) -> int:
    """Flip one bit of a file, or of its last line; return which."""
    data = bytearray(path.read_bytes())
    first = data.rindex(b"\n", 0, -1) + 1 if last else 0
    bit = int(rng.integers(8 * first, 8 * len(data)))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    return bit


@in_full(20, FLIPS)
@pytest.mark.parametrize("name", ["run/ledger.jsonl", "whole/ledger.jsonl", "packed.jsonl.gz"])
def test_flipped_bits_of_a_ledger(left, tmp_path, name, faults):
    """Half of them in the last line, which nothing follows from. Harmless: a last line that does not count."""
    rng, results, model = np.random.default_rng(len(name)), Counter(), random_model()
    whole, path = ledger.read(left / name), tmp_path / Path(name).name
    for i in range(faults):
        shutil.copy(left / name, path)
        bit = flip(path, rng, last=i % 2 == 0 and path.suffix != ".gz")
        try:
            ledger.verify(path, model)
            found = ledger.read(path)
        except ledger.LedgerError:
            results["found"] += 1
            continue
        lost = len(whole.steps) - len(found.steps)
        assert found.header == whole.header and lost in (0, 1) and (not lost or found.torn), bit
        assert [s.rewards.tobytes() for s in found.steps] == [s.rewards.tobytes() for s in whole.steps][: -lost or None]
        results["harmless"] += 1
    assert results.total() == faults and results["found"] > faults / 2


@in_full(10, FLIPS)
def test_flipped_bits_of_a_checkpoint(left, tmp_path, faults):
    """In any of its files. The resumed run says which checkpoint to remove, or ends as one that was left alone."""
    rng, results = np.random.default_rng(0), Counter()
    whole, files = json.loads((left / "outcome.json").read_text()), sorted(os.listdir(left / "run/checkpoint-6"))
    assert {"best.safetensors", "es_state.json", "master.safetensors", "trainer_state.json"} <= set(files)
    for i in range(faults):
        folder, name = tmp_path / f"run-{i}", files[i % len(files)]
        shutil.copytree(left / "run", folder)
        bit = flip(folder / "checkpoint-6" / name, rng)
        resumed = made(folder, **BEST)
        try:
            resumed.train(resume_from_checkpoint=True)
        except ValueError as error:
            assert "checkpoint-6'" in str(error) and "remove" in str(error)
            results["found"] += 1
            continue
        assert json.loads(json.dumps(outcome(resumed))) == whole, (name, bit)
        results["harmless"] += 1  # what is for readers, such as the model that transformers loads
    assert results.total() == faults


def test_a_flipped_name_of_a_tensor(left, tmp_path):
    shutil.copytree(left / "run", tmp_path / "run")
    file = tmp_path / "run/checkpoint-6/master.safetensors"
    file.write_bytes(file.read_bytes().replace(b"embed_tokens", b"embed_tokenr"))
    with pytest.raises(ValueError, match="checkpoint-6' is damaged.*embed_tokens.*remove"):
        made(tmp_path / "run", **BEST).train(resume_from_checkpoint=True)
