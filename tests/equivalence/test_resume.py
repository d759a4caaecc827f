"""A run that is killed at any instant ends, once resumed, with the bits of one that was left alone."""

import itertools
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from es_runs import ROWS, Ending, Lagrangian, cut, outcome, read, trained, trainer
from helpers import chained, fork, random_model, wait

from evoalign_lib import _ledger_lines, ledger
from evoalign_lib.es import ESTrainer

KILLS = int(os.environ.get("EVOALIGN_KILLS", "3"))
STEPS = 12
SETTINGS = {"max_steps": STEPS, "eval_dataset": ROWS[:2]}
EVALUATING = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "reward", "greater_is_better": True}
SAVING = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}


def reward(completion_ids, number, log_metric, **columns):
    log_metric("first", float(np.mean([ids[0] for ids in completion_ids])))
    return [None if n == 3 else sum(ids) / 7 for n, ids in zip(number, completion_ids, strict=True)]


def run(folder: Path, score=reward, **changed) -> ESTrainer:
    return trained(folder, score, **SETTINGS | changed)


@pytest.fixture(scope="module", autouse=True)
def whole(tmp_path_factory) -> ESTrainer:
    """A run that was left alone; its imports and compiled code are those of the children, too."""
    return run(tmp_path_factory.mktemp("whole"))


# ---- kill -9


def work(folder: Path, settings: dict, die_in_write: tuple[int, float] | None = None) -> None:
    """Start the run or go on with it, and leave its outcome in a file; perhaps die inside a write to the ledger."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if die_in_write:
        calls, (fatal, share) = itertools.count(), die_in_write

        def write(file, data):
            if next(calls) == fatal:
                file.write(data[: round(share * len(data))])
                os.kill(os.getpid(), signal.SIGKILL)
            file.write(data)

        _ledger_lines.write = write
    tested = run(folder, resume=(folder / ledger.NAME).exists(), **settings)
    (folder / "outcome.json").write_text(json.dumps(outcome(tested)))


SLOW = [{}, {"perturbation": "low_rank", "rank": 2, "workers": 2}, {"anchor_decay": 0.1, **SAVING}]
SLOW += [{"precision": "inplace", "noise": "tied", **SAVING}]
KILLED = [{"workers": 2, **SAVING, **EVALUATING}, *(pytest.param(how, marks=pytest.mark.slow) for how in SLOW)]


@pytest.mark.parametrize("settings", KILLED, ids=str)
def test_killed_at_random_instants(tmp_path, settings):
    rng = np.random.default_rng(len(str(settings)))
    started = time.perf_counter()
    assert wait(fork(work, tmp_path / "whole", settings)) == 0
    duration = time.perf_counter() - started
    left_alone, one = json.loads((tmp_path / "whole/outcome.json").read_text()), read(tmp_path / "whole")
    assert left_alone["counts"]["none"] > 0 and len([log for log in left_alone["log"] if "reward" in log]) == STEPS

    def check(folder: Path) -> None:
        assert json.loads((folder / "outcome.json").read_text()) == left_alone
        other = read(folder)  # tells the same story, but for its times
        assert one.weights == other.weights and other.ended and len(other.weights) == 3
        assert [s.rewards.tobytes() for s in one.steps] == [s.rewards.tobytes() for s in other.steps]

    names, kills = itertools.count(), 0
    folder = tmp_path / f"killed-{next(names)}"
    while kills < KILLS:
        if kills % 3 == 1:  # inside a write: of the header (0), or of one of the first lines that this process writes
            pid = fork(work, folder, settings, (int(rng.integers(0, 4)), rng.choice([0, rng.random(), 1])))
        else:  # Ctrl-C in a terminal reaches the workers, too
            pid = fork(work, folder, settings)
            os.setpgid(pid, pid)
            time.sleep(duration * rng.random())
            os.killpg(pid, signal.SIGINT if kills % 3 else signal.SIGKILL)
        status = wait(pid)
        assert status in (0, 1 if kills % 3 == 2 else -signal.SIGKILL)
        kills += status != 0
        if status == 0:  # too late: the run had come to its end
            check(folder)
            folder = tmp_path / f"killed-{next(names)}"
    assert wait(fork(work, folder, settings)) == 0
    check(folder)


WRITES = {"torn": (0.5, {}), "whole": (1, {})}
WRITES["a reward with a state"] = (0.5, {"score": Lagrangian(), "workers": 2, **SAVING, **EVALUATING})


@pytest.mark.parametrize(("share", "settings"), WRITES.values(), ids=WRITES)
def test_killed_in_every_write(tmp_path, share, settings):
    """Header, each line, and the line that closes the ledger: the run advances by a step a life."""
    folder, lives, settings = tmp_path / "run", 0, {"max_steps": 4} | settings
    while (status := wait(fork(work, folder, settings, (1, share)))) == -signal.SIGKILL:
        lives += 1
        if (folder / ledger.NAME).read_bytes().count(b"\n") <= 1:
            # header and first step are two writes of one life: with the second torn the first is all there is
            assert share < 1
            assert wait(fork(work, folder, settings, (2, share))) == -signal.SIGKILL
        assert lives < 10
    assert status == 0
    whole = run(tmp_path / "whole", **settings | {"workers": 1})
    assert json.loads((folder / "outcome.json").read_text()) == outcome(whole)


# ---- what a resumed run has of the one before


@pytest.mark.parametrize("when", [3, 8])
def test_an_interruption_inside_an_update_is_noticed(tmp_path, whole, when):
    """In a step that is replayed, and in a new one: the weights may have moved or not."""

    class Interrupted(ESTrainer):
        def tell(self, members, fitness):
            tied = super().tell(members, fitness)
            if self.state.global_step == when:
                raise KeyboardInterrupt
            return tied

    cut(tmp_path, 6, reward, **SETTINGS)
    tested = trainer(tmp_path, reward, kind=Interrupted, **SETTINGS)
    with pytest.raises(KeyboardInterrupt):
        tested.train(resume_from_checkpoint=True)
    for resume in (None, True):
        with pytest.raises(RuntimeError, match=f"not those after step {when}"):
            tested.train(resume_from_checkpoint=resume)
    assert outcome(run(tmp_path, resume=True)) == outcome(whole)


def test_a_run_goes_on_in_another_folder(tmp_path, whole):
    cut(tmp_path / "run", 7, reward, **SETTINGS, **SAVING)
    before = (tmp_path / "run" / ledger.NAME).read_bytes()
    checkpoint = str(tmp_path / "run/checkpoint-4")
    assert outcome(run(tmp_path / "elsewhere", resume=checkpoint)) == outcome(whole)
    assert (tmp_path / "run" / ledger.NAME).read_bytes() == before
    assert ledger.verify(tmp_path / "elsewhere" / ledger.NAME, random_model()).steps == STEPS
    with pytest.raises(ledger.LedgerError, match="is the ledger of another run"):
        run(tmp_path / "elsewhere", resume=checkpoint)


def test_a_checkpoint_does_not_say_where_weights_decay_to(tmp_path):
    """The model does: another one is refused, whose weights a checkpoint would replace otherwise."""
    settings = {"max_steps": 2, "anchor_decay": 0.3, "fitness": "random", **SAVING}
    run(tmp_path, **settings)
    with pytest.raises(ledger.LedgerError, match="not the weights that the run started from"):
        run(tmp_path, resume=True, model=random_model(seed=9), **settings)


def test_weights_that_come_out_otherwise_stop_the_resumed_run(tmp_path):
    """An edited ledger with a forged chain; or another law of noise on this machine."""
    cut(tmp_path, 11, reward, **SETTINGS)
    path = tmp_path / ledger.NAME
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[3] |= ledger.encode_rewards(ledger.decode_rewards(lines[3])[::-1].copy(), 3)
    path.write_bytes(forged := chained(lines))
    with pytest.raises(ledger.LedgerError, match="after 10 steps the weights have the digest"):
        run(tmp_path, resume=True)
    assert path.read_bytes() == forged


def test_a_torn_line_is_reported_and_computed_again(tmp_path, whole, caplog):
    cut(tmp_path, 7, reward, **SETTINGS)
    path = tmp_path / ledger.NAME
    path.write_bytes(path.read_bytes()[:-40])
    resumed = run(tmp_path, resume=True)
    assert "a torn last line" in caplog.text and outcome(resumed) == outcome(whole)


# ---- a chat template that states the date


def test_a_date_in_the_template_is_that_of_the_run(tmp_path, monkeypatch):
    template = {"chat_template": "{{ strftime_now('%d %b %Y') }} {{ messages[-1].content }}"}
    rows = [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    settings = {"rows": rows, "chat_template_kwargs": template}
    trained(tmp_path, callbacks=[Ending(2)], **settings)
    assert read(tmp_path).settings["template_date"] == "2024-07-26"
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", None)  # nobody asks for the time
    assert len(trained(tmp_path, resume=True, **settings).ledger.steps) == 4
