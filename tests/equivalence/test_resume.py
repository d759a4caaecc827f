"""A run that is killed at any instant ends, once resumed, with the bits of one that was left alone."""

import itertools
import json
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

import numpy as np
import pytest
from helpers import PROMPTS, chained, random_model, tokenizer

from evoalign_lib import _ledger_lines, ledger, precision
from evoalign_lib.engines.processes import own_progress_bars
from evoalign_lib.es import ESConfig, ESTrainer

KILLS = int(os.environ.get("EVOALIGN_KILLS", "3"))
STEPS = 12
ROWS = [{"prompt": p, "number": i} for i, p in enumerate(PROMPTS)]


def reward(completion_ids, number, log_metric, **columns):
    log_metric("first", float(np.mean([ids[0] for ids in completion_ids])))
    return [None if n == 3 else sum(ids) / 7 for n, ids in zip(number, completion_ids, strict=True)]


def trainer(folder: Path, score=reward, model=None, callbacks=None, **changed) -> ESTrainer:
    config = {
        "output_dir": str(folder), "population_size": 6, "sigma": 0.05, "alpha": 0.05, "max_steps": STEPS,
        "prompts_per_step": 3, "max_completion_length": 4, "workers": 1, "disable_tqdm": True, "report_to": "none",
        "save_strategy": "no", "seed": 5,
    } | changed  # fmt: skip
    model = random_model() if model is None else model
    return ESTrainer(model, score, ESConfig(**config), ROWS, ROWS[:2], tokenizer(), callbacks)


TIMING = {"step_time", "members_per_second", "core_seconds"}


def outcome(tested: ESTrainer) -> dict:
    """All that a resumed run must share with an uninterrupted one."""
    state = tested.state
    return {
        "weights": precision.digest(tested.engine.layout, *tested.engine.weights.planes),
        "budget": {k: v for k, v in tested.budget.items() if k != "core_seconds"},
        "counts": tested.counts,
        "log": [{k: v for k, v in log.items() if k not in TIMING} for log in state.log_history],
        "state": [state.global_step, state.epoch, state.best_metric, state.best_global_step],
    }


# ---- kill -9


@pytest.fixture(scope="module", autouse=True)
def warm(tmp_path_factory):
    """Imports and compiled code that the children inherit."""
    trainer(tmp_path_factory.mktemp("warm"), max_steps=1).train()


def fork(function, *arguments) -> int:
    """Run a function in a child that inherits everything imported; returns its process id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking a process with threads
        pid = os.fork()
    if pid == 0:
        status = 1
        own_progress_bars()  # the inherited lock stays taken for good when a child is killed holding it
        try:
            function(*arguments)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return pid


def wait(pid: int, seconds: float = 120) -> int:
    """The exit status of a child; one that hangs is made to say where (pytest's fault handler) and is a failure."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGABRT)
    os.waitpid(pid, 0)
    raise TimeoutError(f"process {pid} did not end within {seconds} s")


def work(folder: Path, settings: dict, die_in_write: tuple[int, float] | None = None) -> None:
    """Start the run or go on with it, and leave its outcome in a file; perhaps die inside a write to the ledger."""
    if die_in_write:
        calls, (fatal, share) = itertools.count(), die_in_write

        def write(file, data):
            if next(calls) == fatal:
                file.write(data[: round(share * len(data))])
                os.kill(os.getpid(), signal.SIGKILL)
            file.write(data)

        _ledger_lines.write = write
    tested = trainer(folder, **settings)
    tested.train(resume_from_checkpoint=(folder / ledger.NAME).exists())
    (folder / "outcome.json").write_text(json.dumps(outcome(tested)))


EVALUATING = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "reward", "greater_is_better": True}


@pytest.mark.parametrize(
    "settings",
    [
        {"workers": 2, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 2, **EVALUATING},
        *(
            pytest.param(settings, marks=pytest.mark.slow)
            for settings in (
                {},
                {"perturbation": "low_rank", "rank": 2, "workers": 2},
                {"fitness": "shuffled"},
                {"precision": "inplace", "noise": "tied", "save_strategy": "steps", "save_steps": 5},
                {"anchor_decay": 0.1, "save_strategy": "steps", "save_steps": 5},
            )
        ),
    ],
    ids=str,
)
def test_killed_at_random_instants(tmp_path, settings):
    rng = np.random.default_rng(len(str(settings)))
    started = time.perf_counter()
    assert wait(fork(work, tmp_path / "whole", settings)) == 0
    duration = time.perf_counter() - started
    whole = json.loads((tmp_path / "whole/outcome.json").read_text())
    assert whole["counts"]["none"] > 0 and len([log for log in whole["log"] if "reward" in log]) == STEPS
    one = ledger.read(tmp_path / "whole" / ledger.NAME)

    def check(folder: Path) -> None:
        assert json.loads((folder / "outcome.json").read_text()) == whole
        # and the ledger of the killed run tells the same story, but for its times
        other = ledger.read(folder / ledger.NAME)
        assert one.weights == other.weights and other.ended and len(other.weights) == 3
        assert [s.rewards.tobytes() for s in one.steps] == [s.rewards.tobytes() for s in other.steps]

    names, kills = itertools.count(), 0
    folder = tmp_path / f"killed-{next(names)}"
    while kills < KILLS:
        if kills % 2:  # inside a write: of the header (0), or of one of the first lines that this process writes
            pid = fork(work, folder, settings, (int(rng.integers(0, 4)), rng.choice([0, rng.random(), 1])))
        else:
            pid = fork(work, folder, settings)
            time.sleep(duration * rng.random())
            os.kill(pid, signal.SIGKILL)
        status = wait(pid)
        assert status in (0, -signal.SIGKILL)
        kills += status != 0
        if status == 0:  # too late: the run had come to its end
            check(folder)
            folder = tmp_path / f"killed-{next(names)}"
    assert wait(fork(work, folder, settings)) == 0
    check(folder)
    assert ledger.verify(folder / ledger.NAME, random_model()).weights == whole["weights"]


@pytest.mark.parametrize("share", [0.5, 1])
def test_killed_in_every_write(tmp_path, share):
    """Header, each line, and the line that closes the ledger: the run advances by a step a life."""
    folder, lives = tmp_path / "run", 0
    while (status := wait(fork(work, folder, {"max_steps": 4}, (1, share)))) == -signal.SIGKILL:
        lives += 1
        if (folder / ledger.NAME).read_bytes().count(b"\n") <= 1:
            # header and first step are two writes of one life: with the second torn the first is all there is
            assert share < 1
            assert wait(fork(work, folder, {"max_steps": 4}, (2, share))) == -signal.SIGKILL
        assert lives < 10
    assert status == 0
    whole = trainer(tmp_path / "whole", max_steps=4)
    whole.train()
    assert json.loads((folder / "outcome.json").read_text()) == outcome(whole)


# ---- what a resumed run has of the one before


class Stop(Exception):
    pass


def stopping(step: int):
    """The reward, and an exception in a step, as an error or Ctrl-C would."""

    def score(trainer_state, **columns):
        if trainer_state.global_step == step:
            raise Stop
        return reward(**columns)

    score.__name__ = "reward"  # a name in the logs
    return score


def cut(folder: Path, step: int, **settings) -> None:
    with pytest.raises(Exception, match="Stop"):
        trainer(folder, stopping(step), **settings).train()


def never(**columns):
    raise AssertionError("nothing is left to evaluate")


def test_recorded_steps_are_not_evaluated_again(tmp_path):
    whole = trainer(tmp_path / "run", max_steps=5)
    whole.train()
    again = trainer(tmp_path / "run", never, max_steps=5)
    again.train(resume_from_checkpoint=True)
    assert outcome(again) == outcome(whole)
    data = (tmp_path / "run" / ledger.NAME).read_bytes()
    assert again.train().global_step == 5 and (tmp_path / "run" / ledger.NAME).read_bytes() == data


@pytest.mark.parametrize("when", [3, 8])
def test_an_interruption_inside_an_update_is_noticed(tmp_path, when):
    """In a step that is replayed, and in a new one: the weights may have moved or not."""

    class Interrupted(ESTrainer):
        def tell(self, members, fitness):
            tied = super().tell(members, fitness)
            if self.state.global_step == when:
                raise KeyboardInterrupt
            return tied

    cut(tmp_path / "run", 6)
    config = trainer(tmp_path / "run").args
    tested = Interrupted(random_model(), reward, config, ROWS, ROWS[:2], tokenizer())
    with pytest.raises(KeyboardInterrupt):
        tested.train(resume_from_checkpoint=True)
    for resume in (None, True):
        with pytest.raises(RuntimeError, match=f"not those after step {when} of .*interrupted while they moved"):
            tested.train(resume_from_checkpoint=resume)
    resumed, whole = trainer(tmp_path / "run"), trainer(tmp_path / "whole")
    resumed.train(resume_from_checkpoint=True)
    whole.train()
    assert outcome(resumed) == outcome(whole)


def test_a_run_goes_on_in_another_folder(tmp_path):
    whole = trainer(tmp_path / "whole")
    whole.train()
    cut(tmp_path / "run", 7, save_strategy="steps", save_steps=2)
    before = (tmp_path / "run" / ledger.NAME).read_bytes()
    resumed = trainer(tmp_path / "elsewhere")
    resumed.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-4"))
    assert outcome(resumed) == outcome(whole)
    assert (tmp_path / "run" / ledger.NAME).read_bytes() == before
    assert ledger.verify(tmp_path / "elsewhere" / ledger.NAME, random_model()).steps == STEPS
    with pytest.raises(ledger.LedgerError, match="is the ledger of another run"):
        trainer(tmp_path / "elsewhere").train(resume_from_checkpoint=tmp_path / "run/checkpoint-4")


# ---- what is refused


def test_weights_that_come_out_otherwise_stop_the_resumed_run(tmp_path):
    """An edited ledger with a forged chain; or another law of noise on this machine."""
    cut(tmp_path / "run", 11)
    path = tmp_path / "run" / ledger.NAME
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[3] |= ledger.encode_rewards(ledger.decode_rewards(lines[3])[::-1].copy(), 3)
    path.write_bytes(forged := chained(lines))
    with pytest.raises(ledger.LedgerError, match="after 10 steps the weights have the digest"):
        trainer(tmp_path / "run").train(resume_from_checkpoint=True)
    assert path.read_bytes() == forged


def test_a_torn_line_is_reported_and_computed_again(tmp_path, caplog):
    whole = trainer(tmp_path / "whole")
    whole.train()
    cut(tmp_path / "run", 7)
    path = tmp_path / "run" / ledger.NAME
    path.write_bytes(path.read_bytes()[:-40])
    resumed = trainer(tmp_path / "run")
    resumed.train(resume_from_checkpoint=True)
    assert "a torn last line of " in caplog.text and "its step is computed again" in caplog.text
    assert outcome(resumed) == outcome(whole)
