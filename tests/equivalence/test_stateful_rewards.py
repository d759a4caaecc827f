"""A reward with a state, a Lagrange multiplier: one for the run, whoever scores and however often the run is killed."""

import itertools
import json
import os
import signal
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import trl
from grpo_processes import Lagrangian, moved
from helpers import PROMPTS, random_model, tokenizer
from test_resume import TIMING, fork, wait
from transformers import TrainerCallback, TrainerState

from evoalign_lib import es, grpo, ledger, precision, tiny
from evoalign_lib.engines import base, local
from evoalign_lib.es import ESConfig, ESTrainer
from evoalign_lib.tasks import countdown

STEPS = 7
FATAL = (
    4  # the step in which runs are killed: after a checkpoint, and not after an evaluation, which scores in the trainer
)
KEY = "reward_state/Lagrangian/log_lambda"


# ---- ES

ROWS = [{"prompt": p} for p in PROMPTS]


def trainer(folder: Path, reward=None, **changed) -> ESTrainer:
    config = {
        "output_dir": str(folder), "population_size": 6, "sigma": 0.05, "alpha": 0.05, "max_steps": STEPS,
        "prompts_per_step": 3, "max_completion_length": 4, "workers": 1, "disable_tqdm": True, "report_to": "none",
        "save_strategy": "steps", "save_steps": 2, "seed": 5, "eval_strategy": "steps", "eval_steps": 3,
    } | changed  # fmt: skip
    return ESTrainer(
        random_model(), Lagrangian() if reward is None else reward, ESConfig(**config), ROWS, ROWS[:2], tokenizer()
    )


def outcome(tested: ESTrainer) -> dict:
    return {
        "weights": precision.digest(tested.engine.layout, *tested.engine.weights.planes),
        "log": [{k: v for k, v in log.items() if k not in TIMING} for log in tested.state.log_history],
        "log_lambda": [f.log_lambda for f in tested.rewards.functions],
        "ledger": tested._ledger_path.read_text(),
    }


def stop_the_clocks(patch) -> None:
    """Let every evaluation take a second, so that ledgers can be compared to the byte."""
    ticks = itertools.count()
    clocks = types.SimpleNamespace(perf_counter=lambda: float(next(ticks)), process_time=lambda: 0.0)
    for module in (es, base, local):
        patch(module, "time", clocks)


@pytest.fixture
def clocks(monkeypatch):
    stop_the_clocks(monkeypatch.setattr)


def die(*arguments, **keywords):
    os.kill(os.getpid(), signal.SIGKILL)


class Fatal(Lagrangian):
    """Kills its process while it scores, or before or after it moves the state."""

    def __init__(self, where: str):
        super().__init__()
        self.where, self.ends = where, 0

    def __call__(self, trainer_state, **arguments):
        if trainer_state.global_step == FATAL and self.where == "scoring":
            die()
        return super().__call__(**arguments)

    def end_of_step(self, metrics):
        fatal, self.ends = self.ends == FATAL, self.ends + 1
        if fatal and self.where == "before":
            die()
        super().end_of_step(metrics)
        if fatal and self.where == "after":
            die()


Fatal.__name__ = "Lagrangian"


def work(folder: Path, settings: dict, where: str = "") -> None:
    """Start the run or go on with it and leave its outcome in a file; perhaps die in step FATAL."""
    stop_the_clocks(setattr)
    resume = (folder / ledger.NAME).exists()
    reward = Fatal(where) if where in ("scoring", "before", "after") else Lagrangian()
    tested = trainer(folder, reward, **settings)
    if where in ("half", "whole"):  # of the line of the step is written
        lines = itertools.count(-1)  # the header is one, too

        def write(file, data):
            fatal = next(lines) == FATAL
            file.write(data[: len(data) // 2] if fatal and where == "half" else data)
            if fatal:
                die()

        ledger._write = write
    elif where == "moved":  # the weights, before the step is counted
        tell = tested.tell

        def told(members, fitness):
            tied = tell(members, fitness)
            return die() if tested.state.global_step == FATAL else tied

        tested.tell = told
    tested.train(resume_from_checkpoint=resume)
    (folder / "outcome.json").write_text(json.dumps(outcome(tested)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict:
    """A run that nobody disturbed, in one process."""
    folder = tmp_path_factory.mktemp("whole")
    assert wait(fork(work, folder, {})) == 0
    return json.loads((folder / "outcome.json").read_text())


def test_the_state_follows_from_the_logged_costs(whole):
    header, *lines = map(json.loads, whole["ledger"].splitlines())
    assert header["settings"]["reward_state"] == {"Lagrangian": {"log_lambda": 0.0}}
    logs = [log for log in whole["log"] if "reward" in log]
    log_lambda, names = 0.0, None
    for line, log in zip(lines[:-1], logs, strict=True):
        names = line.get("names", names)
        cost = dict(zip(names, line["log"], strict=True))["cost"]
        log_lambda = moved(log_lambda, cost)
        assert line["reward_state"] == {"Lagrangian": {"log_lambda": log_lambda}}
        assert log[KEY] == log_lambda and log["cost"] == cost
    assert whole["log_lambda"] == [log_lambda] and "reward_state" not in lines[-1]
    steps = np.diff([0.0, *(log[KEY] for log in logs)])
    assert (np.abs(steps) > 0.01).all() and len(logs) == STEPS


def test_the_multiplier_of_a_step_weighs_its_costs(tmp_path):
    """Rewards differ from those of a multiplier that stands still from the second step on, not before."""
    moving = trainer(tmp_path / "moving")
    moving.train()

    class Still(Lagrangian):
        def end_of_step(self, metrics):
            pass

    still = trainer(tmp_path / "still", Still())
    still.train()
    ones, others = ([step.rewards for step in run.ledger.steps] for run in (moving, still))
    assert (ones[0] == others[0]).all() and not (ones[1] == others[1]).any()
    assert {str(step.reward_state) for step in still.ledger.steps} == {"{'Still': {'log_lambda': 0.0}}"}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("where", ["scoring", "before", "after", "half", "whole", "moved"])
def test_killed_and_resumed(tmp_path, whole, where, workers):
    settings = {"workers": workers}
    if where == "scoring" and workers == 2:  # the worker dies, and train() says so
        assert wait(fork(work, tmp_path, settings, where)) == 1
    else:
        assert wait(fork(work, tmp_path, settings, where)) == -signal.SIGKILL
    assert len(ledger.read(tmp_path / ledger.NAME).steps) == FATAL + (where in ("whole", "moved"))
    assert wait(fork(work, tmp_path, settings)) == 0
    assert json.loads((tmp_path / "outcome.json").read_text()) == whole


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("workers", [1, 2])
def test_the_same_trainer_goes_on(tmp_path, clocks, whole, where, workers):
    """An error between scoring and recording: the function may have moved its state, the run has not."""
    reward = Fatal("")
    tested = trainer(tmp_path, reward, workers=workers)
    end = reward.end_of_step

    def failing(metrics):
        if where == "after":
            end(metrics)
        raise KeyboardInterrupt

    class Stop(TrainerCallback):
        def on_step_begin(self, args, state, control, **keywords):
            if state.global_step == FATAL:
                reward.end_of_step = failing

    tested.callback_handler.add_callback(Stop())
    with pytest.raises(KeyboardInterrupt):
        tested.train()
    tested.callback_handler.pop_callback(Stop)
    reward.end_of_step = end
    tested.train()
    assert outcome(tested) == whole


def test_a_step_after_one_that_was_interrupted(tmp_path):
    reward = Lagrangian()
    tested, undisturbed = trainer(tmp_path / "run", reward, workers=2), trainer(tmp_path / "whole")
    expected = [undisturbed.step()[KEY] for _ in range(2)]
    found, end = [tested.step()[KEY]], reward.end_of_step

    def late(metrics):
        end(metrics)
        raise KeyboardInterrupt

    reward.end_of_step = late
    with pytest.raises(KeyboardInterrupt):
        tested.step()
    reward.end_of_step = end
    assert [*found, tested.step()[KEY]] == expected


def test_a_run_that_ends_at_its_checkpoint_has_the_state_of_then(tmp_path, whole):
    assert wait(fork(work, tmp_path, {})) == 0
    tested = trainer(tmp_path, max_steps=4)
    tested.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    (expected,) = (log[KEY] for log in whole["log"] if log["step"] == 4 and KEY in log)
    assert tested.rewards.functions[0].log_lambda == expected
    tested.evaluate()
    assert tested.rewards.functions[0].log_lambda == expected != whole["log_lambda"][0]


def test_a_worker_that_is_killed(tmp_path, clocks, whole):
    """New workers are forked from a process whose function is in another step's state than the one that died."""
    folder = tmp_path / "run"

    class Mortal(Lagrangian):
        def __call__(self, trainer_state, **arguments):
            if trainer_state.global_step == FATAL and not (tmp_path / "died").exists():
                (tmp_path / "died").touch()
                die()
            return super().__call__(**arguments)

    Mortal.__name__ = "Lagrangian"
    tested = trainer(folder, Mortal(), workers=2)
    with pytest.raises(RuntimeError, match="a worker process ended unexpectedly"):
        tested.train()
    tested.train()
    assert outcome(tested) == whole


def test_without_checkpoints_and_in_another_folder(tmp_path, clocks, whole):
    assert wait(fork(work, tmp_path / "run", {}, "scoring")) == -signal.SIGKILL
    elsewhere = trainer(tmp_path / "elsewhere")
    elsewhere.train(resume_from_checkpoint=str(tmp_path / f"run/checkpoint-{FATAL - 2}"))
    assert outcome(elsewhere) == whole
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / ledger.NAME).write_bytes((tmp_path / "run" / ledger.NAME).read_bytes())
    resumed = trainer(bare, save_strategy="no")
    resumed.train(resume_from_checkpoint=True)
    assert outcome(resumed) == whole


def test_a_replay_needs_no_reward_function(tmp_path, whole):
    path = tmp_path / "copy.jsonl"
    path.write_text(whole["ledger"])
    assert ledger.verify(path, random_model()).weights == whole["weights"]


def test_null_arms(tmp_path):
    """Shuffled rewards move the multiplier as costs say; random ones score nothing, and it stays."""
    shuffled, random = (trainer(tmp_path / fitness, fitness=fitness) for fitness in ("shuffled", "random"))
    for tested in (shuffled, random):
        tested.train()
    log_lambda = 0.0
    for step in shuffled.ledger.steps:
        log_lambda = moved(log_lambda, step.log["cost"])
        assert step.reward_state == {"Lagrangian": {"log_lambda": log_lambda}}
    assert log_lambda != 0 and not random.rewards.functions[0].seen
    assert all(step.reward_state == {"Lagrangian": {"log_lambda": 0.0}} for step in random.ledger.steps)


def test_steps_before_the_ledger_begins(tmp_path):
    """step() moves weights and multiplier; the ledger begins with both as they are then."""
    tested = trainer(tmp_path / "run")
    first = tested.step()[KEY]
    tested.train()
    run = ledger.read(tmp_path / "run" / ledger.NAME)
    assert run.settings["reward_state"] == {"Lagrangian": {"log_lambda": first}} and first != 0
    assert run.steps[0].reward_state["Lagrangian"]["log_lambda"] == moved(first, run.steps[0].log["cost"])


def test_one_value_a_member_in_their_order(tmp_path):
    reward = Lagrangian()
    tested = trainer(tmp_path, reward, workers=2, max_steps=1)
    tested.train()
    (metrics,) = reward.seen  # in this process alone, once
    assert list(metrics) == ["cost"] and len(metrics["cost"]) == 6 and len(set(metrics["cost"])) > 1
    alone = Lagrangian()
    trainer(tmp_path / "alone", alone, max_steps=1).train()
    assert alone.seen == [metrics]


def other() -> Lagrangian:
    reward = Lagrangian()
    reward.__name__ = "other"
    return reward


def plain(completion_ids, **columns):
    return [float(sum(ids)) for ids in completion_ids]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (Lagrangian, other, "with reward_state={'Lagrangian': {'log_lambda': 0.0}}, this one has {'other': {"),
        (Lagrangian, lambda: plain, "with reward_state={'Lagrangian': {'log_lambda': 0.0}}, this one has None"),
        (lambda: plain, Lagrangian, "with reward_state=None, this one has {'Lagrangian'"),
        (Lagrangian, lambda: Lagrangian(0.5), "this one has {'Lagrangian': {'log_lambda': 0.5}}: use the same"),
    ],
)
def test_a_run_of_other_functions_does_not_go_on(tmp_path, first, second, message):
    trainer(tmp_path, first(), max_steps=2, save_strategy="no").train()
    before = (tmp_path / ledger.NAME).read_bytes()
    tested = trainer(tmp_path, second(), save_strategy="no")
    with pytest.raises(ValueError) as raised:
        tested.train(resume_from_checkpoint=True)
    assert message in str(raised.value) and (tmp_path / ledger.NAME).read_bytes() == before


def test_a_ledger_with_a_state_that_the_function_refuses(tmp_path):
    trainer(tmp_path, max_steps=2, save_strategy="no").train()
    path = tmp_path / ledger.NAME
    first, last = path.read_bytes().splitlines()[1:3]
    # A line of another state with the hash that belongs to it, as a run of another function would write it.
    step = json.loads(last) | {"reward_state": {"Lagrangian": {"log_lambda": 9.5}}}
    del step["hash"]
    path.write_bytes(
        path.read_bytes()[: path.read_bytes().index(last)] + ledger._with_hash(step, json.loads(first)["hash"]) + b"\n"
    )
    with pytest.raises(
        ledger.LedgerError, match=r"step 1: reward function 'Lagrangian' does not take .*9.5.*too large"
    ):
        trainer(tmp_path, save_strategy="no").train(resume_from_checkpoint=True)


def test_a_state_that_leaves_the_numbers_is_not_recorded(tmp_path):
    class Explodes(Lagrangian):
        def end_of_step(self, metrics):
            super().end_of_step(metrics)
            self.log_lambda = self.log_lambda if len(self.seen) < 3 else float("inf")

    tested = trainer(tmp_path, Explodes(), save_strategy="no")
    with pytest.raises(ValueError, match="'log_lambda' in the state of reward function 'Explodes' is inf"):
        tested.train()
    assert len(ledger.read(tmp_path / ledger.NAME).steps) == 2


@pytest.mark.parametrize("workers", [1, 2])
def test_a_function_that_adapts_while_it_scores_is_refused(tmp_path, workers):
    class Adapts(Lagrangian):
        def __call__(self, **arguments):
            self.log_lambda += 0.01
            return super().__call__(**arguments)

    tested = trainer(tmp_path, Adapts(), workers=workers)
    with pytest.raises(RuntimeError, match="'Adapts' changed its state from .*0.0.* to .*0.01.* while it scored"):
        tested.train()


# ---- gradient arms

SETTINGS = {"prompts_per_step": 2, "num_generations": 4, "max_completion_length": 8, "learning_rate": 1e-3}
SETTINGS |= {"micro_batch": 4, "steps": 4, "save_strategy": "steps", "save_steps": 2}
SETTINGS |= {"report_to": "none", "disable_tqdm": True, "logging_steps": 1, "seed": 3}


def gradient(folder: Path, reward, arm="grpo", iterations=1, **changed):
    args = grpo.config(arm, output_dir=str(folder), **SETTINGS | changed)
    args.num_iterations = iterations
    rows = countdown.dataset(tiny.problems("train", 4, 5), tiny.tokenizer())
    return grpo.trainer(tiny.load("A0")[0], reward, args, rows, tiny.tokenizer())


def curve(tested) -> list[float]:
    return [log[KEY] for log in tested.state.log_history if "loss" in log]


@pytest.mark.parametrize("arm", ["grpo", "rloo"])
def test_a_gradient_arm_goes_on_with_its_multiplier(tmp_path, arm):
    reward = Lagrangian()
    undisturbed, _ = gradient(tmp_path, reward, arm)
    undisturbed.train()
    # once a step, in spite of two micro batches, from one batch of completions
    assert [len(metrics["cost"]) for metrics in reward.seen] == [1] * 4
    expected = list(itertools.accumulate((m["cost"] for m in reward.seen), moved, initial=0.0))
    assert curve(undisturbed) == expected[1:] and len(set(expected)) == 5
    saved = TrainerState.load_from_json(str(tmp_path / "checkpoint-2/trainer_state.json")).stateful_callbacks["Budget"]
    assert saved["attributes"]["reward_state"] == {"Lagrangian": {"log_lambda": expected[2]}}
    # a function that moved on elsewhere goes back to the checkpoint's state
    resumed, _ = gradient(tmp_path, Lagrangian(0.7), arm)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert curve(resumed) == curve(undisturbed) and resumed.state.global_step == 4
    for one, two in zip(resumed.model.parameters(), undisturbed.model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_the_multiplier_weighs_the_costs_of_a_gradient_arm(tmp_path):
    moving, still = Lagrangian(), Lagrangian()
    still.end_of_step = lambda metrics: None
    runs = []
    for reward in (moving, still):  # one after the other: making a trainer seeds what it samples with
        runs.append(gradient(tmp_path / str(len(runs)), reward)[0])
        runs[-1].train()
    ones, others = ([log["reward"] for log in run.state.log_history if "loss" in log] for run in runs)
    assert ones[0] == others[0] and ones[1] != others[1]
    assert curve(runs[1]) == [0.0] * 4


def test_a_generation_that_serves_two_steps_moves_the_state_once(tmp_path):
    reward = Lagrangian()
    tested, _ = gradient(tmp_path, reward, iterations=2)
    tested.train()
    assert tested.state.global_step == 4 and len(reward.seen) == 2
    one, two, three, four = curve(tested)
    assert one == two == moved(0.0, reward.seen[0]["cost"]) and three == four == moved(two, reward.seen[1]["cost"])


def test_evaluation_moves_nothing(tmp_path):
    from datasets import Dataset

    reward = Lagrangian()
    tested, _ = gradient(tmp_path, reward, steps=1)
    tested.train()
    before = reward.state()
    rows = countdown.dataset(tiny.problems("train", 4, 5), tiny.tokenizer())
    tested.evaluate(Dataset.from_list([dict(row) for row in rows]))
    assert reward.state() == before and len(reward.seen) == 1
    assert not any(KEY in log for log in tested.state.log_history if "eval_loss" in log)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (Lagrangian, lambda: plain, r"state is that of .*\['Lagrangian'\], those with a state here are \[\]: use the"),
        (lambda: plain, Lagrangian, r"state is that of the reward functions \[\], those with .* \['Lagrangian'\]"),
        (Lagrangian, other, r"\['Lagrangian'\], those with a state here are \['other'\]"),
    ],
)
def test_a_checkpoint_of_other_functions(tmp_path, first, second, message):
    gradient(tmp_path, first(), steps=1, save_steps=1)[0].train()
    tested, _ = gradient(tmp_path, second(), steps=2, save_steps=1)
    with pytest.raises(ValueError, match=message):
        tested.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_a_run_without_states_has_the_trainer_and_checkpoints_of_before(tmp_path):
    tested, budget = gradient(tmp_path, plain, steps=1, save_steps=1)
    assert type(tested) is trl.GRPOTrainer and "reward_state" not in budget.state()["attributes"]
    tested.train()
    assert not any(name.startswith("reward_state") for log in tested.state.log_history for name in log)
