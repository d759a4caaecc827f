"""Ctrl-C at any line of a step leaves a valid ledger and a trainer that goes on and ends with the same bits."""

import inspect
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import es_runs
import pytest
import safetensors.torch
from es_runs import ROWS
from helpers import random_model
from transformers import TrainerCallback

from evoalign_lib import files, ledger
from evoalign_lib.es import ESTrainer

LIBRARY = str(Path(ledger.__file__).parent)
MODEL = random_model(num_hidden_layers=1)
START = {name: tensor.clone() for name, tensor in MODEL.state_dict().items()}


def reward(completion_ids, number, **columns):
    return [sum(ids) / 7 + n for n, ids in zip(number, completion_ids, strict=True)]


class Limit(TrainerCallback):
    """Ends a run, as Ctrl-C would, after a step that it should not have come to."""

    last = 0

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step > self.last:
            raise KeyboardInterrupt(f"nothing stopped the run before step {state.global_step}")


def trainer(folder: Path, eval_dataset=None, **changed) -> ESTrainer:
    MODEL.load_state_dict(START)  # trainers copy it and, but for their callbacks, never look at it again
    settings = {"population_size": 2, "max_steps": 100_000, "prompts_per_step": 2, "max_completion_length": 2}
    settings |= {"chunk_rows": 4, "eval_dataset": eval_dataset}
    return es_runs.trainer(folder, reward, MODEL, [Limit()], **settings | changed)


@pytest.fixture(autouse=True)
def every_step_has_a_digest_and_no_disk_is_waited_for(monkeypatch):
    monkeypatch.setattr(ledger, "DIGEST_EVERY", 1)
    monkeypatch.setattr(os, "fsync", lambda file: None)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background process ignores it
    yield
    signal.signal(signal.SIGINT, before)


def deferred() -> bool:
    """Whether an interrupt would wait now."""
    return signal.getsignal(signal.SIGINT) is not signal.default_int_handler


source, first = inspect.getsourcelines(files.locked)
LOCKING = {("/files.py", first + i) for i in range(len(source))}

Line = tuple[str, int, bool]
"""File of this library, number, and whether an interrupt would wait there."""


class Lines:
    """Notes which lines of this library run in the block, and does something the first time that one of them does."""

    def __init__(self, at: Line | None = None, act: Callable[[], None] | None = None):
        self.at, self.act, self.seen, self.acted = at, act, Counter(), False

    def __enter__(self):
        sys.settrace(self._call)
        return self

    def __exit__(self, *exception):
        sys.settrace(None)

    def _call(self, frame, event, argument):
        return self._line if frame.f_code.co_filename.startswith(LIBRARY) else None

    def _line(self, frame, event, argument):
        if event == "line" and not self.acted:
            line = frame.f_code.co_filename.removeprefix(LIBRARY), frame.f_lineno, deferred()
            self.seen[line] += 1
            if line == self.at:
                self.acted = True
                self.act()
        return self._line


SOME = pytest.mark.parametrize("every", [25, pytest.param(1, marks=pytest.mark.slow)])
"""Lines at which a test interrupts: one of so many, or all"""


def ctrl_c():
    signal.raise_signal(signal.SIGINT)


def finish(tested: ESTrainer, steps: int, **how) -> None:
    Limit.last = tested.args.max_steps = steps
    tested.train(**how)


def logged(tested: ESTrainer) -> list[int]:
    """The steps that have an entry in the log."""
    return [log["step"] for log in tested.state.log_history if "reward" in log]


def assert_every_step_is_logged_once(tested: ESTrainer) -> None:
    assert logged(tested) == list(range(1, tested.state.global_step + 1))


def assert_undisturbed(tested: ESTrainer, whole: ESTrainer) -> None:
    """A finished run has the weights, the counters and the ledger of one that was left alone."""
    steps = tested.state.global_step
    finish(whole, steps)
    assert tested.engine.master.tobytes() == whole.engine.master.tobytes()
    budgets = [{k: v for k, v in t.budget.items() if k != "core_seconds"} for t in (tested, whole)]
    assert budgets[0] == budgets[1] and tested.counts == whole.counts
    one, other = (ledger.read(t.ledger.path) for t in (tested, whole))
    assert [s.rewards.tobytes() for s in one.steps] == [s.rewards.tobytes() for s in other.steps]
    assert one.weights == other.weights and len(one.weights) == steps + 1
    assert (one.ended, one.torn, other.ended) == (True, b"", True)


def lines_of(run: Callable[[], object]) -> Counter[Line]:
    with Lines() as lines:
        run()
    return lines.seen


def one_step(tested: ESTrainer) -> None:
    """train() for one step, cut off when the next begins."""
    Limit.last = tested.state.global_step
    with pytest.raises(KeyboardInterrupt, match="nothing stopped"):
        tested.train()


@SOME
def test_ctrl_c_at_every_line_of_a_step(tmp_path, every):
    tested = trainer(tmp_path / "cut")
    one_step(tested)
    lines = lines_of(lambda: one_step(tested))
    assert 300 < len(lines) and 100 < sum(waits for *_, waits in lines)
    skipped = 0
    for line in list(lines)[::every]:
        while True:
            before = Limit.last = tested.state.global_step
            owed = len(logged(tested)) < before
            with pytest.raises(KeyboardInterrupt), Lines(line, ctrl_c) as at:
                tested.train()
            if at.acted:
                break
            assert (skipped := skipped + 1) < 20, line  # a few depend on the rewards of a step
        assert not deferred(), line
        # header and steps, each line whole; the chain is checked when the run is finished
        _, *steps, rest = tested.ledger.path.read_bytes().split(b"\n")
        assert (len(steps), rest) == (tested.state.global_step, b"") and len(steps) <= before + 1, line
        # it waited for the act, or for the log entry that the call before owed; the folder's lock is no part of a step
        waited = line[-1] and line[0] not in ("/_checkpoints.py", "/_interrupts.py") and line[:2] not in LOCKING
        assert not waited or tested.state.global_step == before + 1 or (owed and before in logged(tested)), line
    finish(tested, tested.state.global_step + 2)
    assert_every_step_is_logged_once(tested)
    assert_undisturbed(tested, trainer(tmp_path / "whole"))


@SOME
def test_ctrl_c_at_every_line_of_what_follows_a_step(tmp_path, every):
    """Log entry, evaluation, its best weights and the checkpoint come in the next call, whatever line was cut off."""
    settings = {
        "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "save_strategy": "steps",
        "save_steps": 1, "save_total_limit": 1,
    }  # fmt: skip

    tested = trainer(tmp_path / "cut", ROWS[:2], **settings)
    one_step(tested)
    lines = list(lines_of(lambda: one_step(tested)))
    source, start = inspect.getsourcelines(ESTrainer._follow_step)
    within = range(start, start + len(source))
    first = next(i for i, (file, number, _) in enumerate(lines) if file == "/es.py" and number in within)
    follows = [line for line in lines[first:] if line[0] in ("/es.py", "/surface.py", "/_checkpoints.py")]
    assert len(follows) > 60
    for line in follows[::every]:
        Limit.last = tested.state.global_step
        with pytest.raises(KeyboardInterrupt), Lines(line, ctrl_c):
            tested.train()
    finish(tested, tested.state.global_step + 1)
    assert_every_step_is_logged_once(tested)
    logs = [log for log in tested.state.log_history if "eval_reward" in log]
    assert {log["step"] for log in logs} == set(range(1, tested.state.global_step + 1))
    assert tested.state.best_metric == max(log["eval_reward"] for log in logs)
    assert [p.name for p in (tmp_path / "cut").glob("checkpoint-*")] == [f"checkpoint-{tested.state.global_step}"]


@SOME
def test_ctrl_c_at_the_ends_of_a_run(tmp_path, every):
    """At the lines that only the first step has, which begins the ledger, and the end of the run, which closes it."""
    tested = trainer(tmp_path / "middle")
    one_step(tested)
    middle = lines_of(lambda: one_step(tested))
    tested = trainer(tmp_path / "one")
    lines = [line for line in lines_of(lambda: finish(tested, 1)) if line not in middle]
    whole = trainer(tmp_path / "whole")
    finish(whole, 1)
    assert {name for name, *_ in lines} >= {"/es.py", "/ledger.py"} and any(waits for *_, waits in lines)
    for i, line in enumerate(lines[::every]):
        tested = trainer(tmp_path / f"cut-{i}")
        with pytest.raises(KeyboardInterrupt), Lines(line, ctrl_c):
            finish(tested, 1)
        finish(tested, 1)
        assert_undisturbed(tested, whole)


def test_ctrl_c_ends_a_run_whose_reward_hangs_in_a_worker(tmp_path):
    """At once, and the workers with it: they would keep the process from ending."""
    hang = tmp_path / "hang"

    def hanging(trainer_state, **columns):
        if trainer_state.global_step == 1 and not hang.exists():
            hang.touch()
            os.kill(os.getppid(), signal.SIGINT)
        while trainer_state.global_step == 1 and not (tmp_path / "go").exists():
            time.sleep(0.01)
        return reward(**columns)

    tested = trainer(tmp_path / "cut", workers=2, population_size=6)
    tested.rewards.functions[0] = hanging
    before = set(multiprocessing.active_children())
    with pytest.raises(KeyboardInterrupt):
        finish(tested, 3)
    workers = set(multiprocessing.active_children()) - before
    end = time.monotonic() + 10
    while any(worker.exitcode is None for worker in workers) and time.monotonic() < end:
        time.sleep(0.05)  # the pool's own thread may be the one that waits for a worker
    assert [worker.exitcode for worker in workers] == [-signal.SIGKILL] * len(workers)
    assert tested.state.global_step == 1
    (tmp_path / "go").touch()
    finish(tested, 3)
    assert_undisturbed(tested, trainer(tmp_path / "whole", population_size=6))
    tested.engine.close()


def test_ctrl_c_waits_while_a_checkpoint_is_read(tmp_path, monkeypatch):
    """Within safetensors it becomes a ValueError, by which the user was told to remove a checkpoint that is whole."""
    settings = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "save_strategy": "steps"}
    tested = trainer(tmp_path, ROWS[:2], save_steps=1, **settings)
    finish(tested, 1)
    load, waits = safetensors.torch.load_file, []

    def noted(path):
        waits.append(deferred())
        return load(path)

    monkeypatch.setattr(safetensors.torch, "load_file", noted)
    finish(trainer(tmp_path, ROWS[:2], save_steps=1, **settings), 2, resume_from_checkpoint=True)
    assert waits == [True, True]
