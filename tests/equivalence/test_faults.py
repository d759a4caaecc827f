"""Faults by chance, in small and in full: interrupts at random instants, and flipped bits in all that a run leaves.

Every run of the tests takes a few of each; with `-m slow` hundreds.
"""

import json
import os
import resource
import select
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from es_runs import cut, outcome, read, trainer
from helpers import fork, in_child, random_model, wait
from test_interrupts import Lines, lines_of
from test_resume import EVALUATING, SETTINGS, STEPS, reward, run

from evoalign_lib import ledger
from evoalign_lib.es import ESTrainer

INTERRUPTS, FLIPS = 300, 200
"""the full size: over all settings, and in each kind of file"""
AT_ONCE = 60.0
"""seconds that an interrupt may take, however busy the machine is"""
SAVING = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
KINDS = {
    "plain": {},
    "checkpoints": SAVING,
    "workers": {"workers": 2},
    "best": {**EVALUATING, **SAVING, "load_best_model_at_end": True, "workers": 2},
    "inplace": {"precision": "inplace", "noise": "tied", **SAVING},
    "sampled": {"sampling": "common", "num_generations": 2, "antithetic": True, "anchor_decay": 0.1},
}
BEST = KINDS["best"] | {"workers": 1}
FULL = [pytest.mark.slow, pytest.mark.timeout(3600)]


def in_full(few: int, full: int) -> pytest.MarkDecorator:
    """Run a test with a few faults, and where slow tests are asked for with all."""
    return pytest.mark.parametrize("faults", [few, pytest.param(full, marks=FULL)])


def made(folder: Path, **changed) -> ESTrainer:
    return trainer(folder, reward, **SETTINGS | changed)


@pytest.fixture(scope="module", autouse=True)
def warm(tmp_path_factory):
    """Imports and compiled code that the children inherit."""
    for name in ("best", "inplace", "sampled"):
        run(tmp_path_factory.mktemp(name), **KINDS[name] | {"max_steps": 1, "workers": 1})


# ---- interrupts

READY, ENDED = b".", b""


def work(folder: Path, settings: dict, ready: int, calls: int) -> None:
    """Train until the run is finished, calling train() again after an interrupt, as in a notebook.

    Args:
        folder: of the run.
        settings: of the trainer.
        ready: file descriptor that is told whenever an interrupt may come.
        calls: of train(), after which the process ends, so that the run goes on in a new one.
    """
    tested = None
    for _ in range(calls):
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.write(ready, READY)
            tested = tested or made(folder, **settings)
            tested.train(resume_from_checkpoint=tested.ledger is None and ledger.recorded(folder / ledger.NAME))
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            (folder / "outcome.json").write_text(json.dumps(outcome(tested)))
            break
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    if tested is not None:
        tested.engine.close()


def started(folder: Path, settings: dict, calls: int) -> tuple[int, int]:
    """Process id of a process that works on the run, and the file descriptor on which it says that it is ready."""
    heard, said = os.pipe()

    def child() -> None:
        os.close(heard)
        os.setpgid(0, 0)  # Ctrl-C in a terminal reaches the workers, too
        work(folder, settings, said, calls)

    pid = fork(child)
    os.close(said)
    return pid, heard


def told(heard: int) -> bytes:
    """What a process says next: ready, or nothing, because it has ended. One that says neither in time is a failure."""
    assert select.select([heard], [], [], AT_ONCE)[0], "an interrupt did not end train()"
    return os.read(heard, 1)


def running(group: int) -> bool:
    """Whether a process of a group is left, zombies aside."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it has ended meanwhile
            continue
        if int(its_group) == group and state != "Z":
            return True
    return False


def interrupt(folder: Path, settings: dict, seconds: float, most: int, rng: np.random.Generator) -> int:
    """Interrupt a run at random instants until it is finished; return how often train() was cut off."""
    times = 0
    while not (folder / "outcome.json").exists():
        # weights without a master have moved when an evaluation is cut off: train() says so, and a new trainer goes on
        calls = 1 if settings.get("precision") == "inplace" else int(rng.integers(1, 5))
        pid, heard = started(folder, settings, calls)
        try:
            assert told(heard) == READY
            while times < most:
                time.sleep(seconds * rng.random())
                try:
                    (os.killpg if rng.random() < 0.5 else os.kill)(pid, signal.SIGINT)
                except ProcessLookupError:  # it has ended, and its group with it
                    break
                if told(heard) == ENDED:
                    break
                times += 1
        finally:
            os.close(heard)
        assert wait(pid) == 0
        times += not (folder / "outcome.json").exists()  # the interrupt that ended the process
        end = time.monotonic() + AT_ONCE
        while running(pid):
            assert time.monotonic() < end
            time.sleep(0.1)
    return times


@pytest.mark.parametrize(
    ("name", "faults"),
    [
        ("checkpoints", 2),
        *(pytest.param(name, INTERRUPTS // len(KINDS), marks=FULL, id=f"{name}-full") for name in KINDS),
    ],
)
def test_interrupts_at_random_instants(tmp_path, name, faults):
    """Weights, budget, log entries and ledger of the finished run are those of one that was left alone."""
    settings, rng = KINDS[name], np.random.default_rng(list(name.encode()))
    begun = time.perf_counter()
    assert wait(fork(work, tmp_path / "whole", settings, os.open(os.devnull, os.O_WRONLY), 1)) == 0
    seconds = time.perf_counter() - begun
    whole = json.loads((tmp_path / "whole/outcome.json").read_text())
    one = read(tmp_path / "whole")
    assert one.ended and len(one.steps) == STEPS == len([log for log in whole["log"] if "reward" in log])
    times = runs = 0
    while times < faults:
        folder = tmp_path / f"cut-{runs}"
        times, runs = times + interrupt(folder, settings, seconds / 2, faults - times, rng), runs + 1
        assert json.loads((folder / "outcome.json").read_text()) == whole
        other = read(folder)
        assert other.ended and not other.torn and one.weights == other.weights
        assert [s.rewards.tobytes() for s in one.steps] == [s.rewards.tobytes() for s in other.steps]
        assert list(folder.glob("partial*")) == []


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
