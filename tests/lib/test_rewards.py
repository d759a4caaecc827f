"""Reward functions: one way of calling them, floors for failures, and errors that name what went wrong."""

import asyncio
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import functools
import itertools
import math
import os
import pickle
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pandas as pd
import psutil
import pytest
import torch
from helpers import in_child, refused

from evoalign_lib import tasks
from evoalign_lib._forks import Forks
from evoalign_lib.rewards import _LIMITED, METHODS, RewardError, Rewards, state_metrics


def score(rewards, completions, columns=None, prompts=None, ids=None, state=None):
    prompts = [f"prompt {i}" for i in range(len(completions))] if prompts is None else prompts
    ids = [[1, 2]] * len(completions) if ids is None else ids
    return rewards(prompts, completions, ids, {} if columns is None else columns, state)


def length(completions, **columns):
    return [float(len(c)) for c in completions]


def only_upper(completions, **columns):
    return [1.0 if c.isupper() else None for c in completions]


def parse(completions, **columns):
    """Fails with ValueError on a completion that is no number, as most users' functions do."""
    return [float(c) for c in completions]


# ---- asynchronous functions


class Asked:
    """An asynchronous reward that keeps something of its event loop, as a client of a server does."""

    def __init__(self):
        self.loops = set()

    async def __call__(self, completions, log_metric, **columns):
        self.loops.add(asyncio.get_running_loop())
        await asyncio.sleep(0.001)
        log_metric("asked", len(completions))
        return [float(len(c)) if c else None for c in completions]


def test_an_asynchronous_function_is_awaited_in_one_loop_that_lasts():
    reward = Asked()
    for rewards in (Rewards(reward), Rewards(functools.partial(reward)), Rewards([reward, length], [1.0, 2.0])):
        scored = score(rewards, ["a", "", "abc"])
    assert scored.rewards.tolist() == [3.0, 0.0, 9.0] and scored.metrics["asked"] == [3.0]
    assert scored.counts["none"] == 1 and len(reward.loops) == 1

    async def within():  # a notebook's cells run inside a loop
        return score(Rewards(reward), ["ab"]).rewards.tolist()

    assert asyncio.run(within()) == [2.0] and len(reward.loops) == 1

    def child():  # a forked process has none of its parent's threads
        assert score(Rewards(Asked()), ["abc"]).rewards.tolist() == [3.0]

    assert in_child(child) == 0


def test_what_fails_in_an_asynchronous_function_scores_the_floor():
    async def sometimes(completions, **columns):
        if "exit" in completions:
            sys.exit(3)
        if "slow" in completions:
            await asyncio.sleep(30)
        if "blocks" in completions:
            time.sleep(30)
        return [float(c) for c in completions]

    scored = score(Rewards(sometimes, floor=-1.0, timeout=1.0), ["slow", "1", "blocks", "2", "x", "exit"])
    assert scored.rewards.tolist() == [-1.0, 1.0, -1.0, 2.0, -1.0, -1.0]
    assert (scored.counts["timeout"], scored.counts["exception"]) == (2, 2)
    with pytest.raises(RewardError, match=r"sys.exit\(3\)"):
        score(Rewards(sometimes), ["exit"])


# ---- the table of completions


def test_the_table_has_a_column_for_each_function_and_each_log_extra():
    def judged(completions, log_extra, **columns):
        if len(completions) > 1:
            raise ValueError("one at a time")
        log_extra("first letter", [c[:1] for c in completions])
        return [float(c) for c in completions]

    scored = score(Rewards([only_upper, judged], floor=-1.0, table=True), ["A", "2", "33"])
    assert scored.table == {
        "prompt": ["prompt 0", "prompt 1", "prompt 2"],
        "completion": ["A", "2", "33"],
        "only_upper": [1.0, None, None],
        "judged": [-1.0, 2.0, 33.0],
        "first letter": [None, "2", "3"],  # the call that failed logged nothing
    }
    assert score(Rewards(only_upper), ["A"]).table == {}  # it would travel from the workers for nothing


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize(("column", "named"), [("why", "1 values of 'why' for 2"), ("completion", "'completion'")])
def test_a_column_has_a_value_for_each_completion_and_a_name_of_its_own(table, column, named):
    def logs(completions, log_extra, **columns):
        log_extra(column, completions if column == "completion" else ["one"])
        return [0.0] * len(completions)

    with pytest.raises(ValueError, match=named):
        score(Rewards(logs, floor=0.0, table=table), ["a", "b"])


# ---- what a function is given, and what it may return


def test_the_call_is_that_of_trl():
    seen = {}

    def reward(prompts, completions, completion_ids, trainer_state, log_metric, log_extra, **columns):
        seen.update(locals())
        log_extra("column", ["a", "b"])
        return [0.0, 0.0]

    state = object()
    columns = {"numbers": ([1], [2]), "target": np.array([3, 4])}
    score(Rewards(reward), ["x", "y"], columns, ids=[[7], [8, 9]], state=state)
    assert seen["prompts"] == ["prompt 0", "prompt 1"] and seen["completions"] == ["x", "y"]
    assert seen["completion_ids"] == [[7], [8, 9]] and seen["trainer_state"] is state
    assert seen["columns"] == {"numbers": [[1], [2]], "target": [3, 4]}
    # columns of any kind arrive as lists of their own, so that a function may change them
    assert all(type(value) is list for value in seen["columns"].values())


def test_what_a_function_changes_reaches_nobody_else():
    """As in TRL, whose data sets give lists of their own; a lock, which cannot be copied, is itself."""
    row = {"deep": [1, {"a": [2]}], "pair": ([3], {4}), "array": np.ones(2), "lock": threading.Lock()}
    talk, said, seen = [{"role": "user", "content": "a"}], [{"role": "assistant", "content": "b"}], []

    def uses_up(deep, pair, array, lock, trainer_state, log_metric, log_extra, **others):
        seen.append(repr((others, deep, pair, array)))
        for p, c, ids, d, (first, second), a in zip(*others.values(), deep, pair, array, strict=True):
            p.pop(), c[0].pop("content"), ids.clear(), d.pop()["a"].pop(), first.pop(), second.clear(), a.fill(0)
        others["prompts"].clear()
        return [float(each is row["lock"]) for each in lock]

    columns = {name: [value] * 2 for name, value in row.items()}  # two samples of one prompt
    for _ in range(2):
        found = score(Rewards([uses_up, uses_up]), [said] * 2, columns, [talk] * 2, [[7, 8]] * 2)
        assert found.rewards.tolist() == [2.0, 2.0]
    assert len(seen) == 4 and len(set(seen)) == 1


def test_functions_of_one_name_are_numbered():
    functions = [lambda **columns: [1.0], length, functools.partial(length, more=2), lambda **columns: [4.0]]
    functions += [types.FunctionType(functions[0].__code__, {}, name) for name in ("length_2", "step")]
    scored = score(Rewards(functions, table=True), ["abc"])
    # the table of completions has a column "step", too
    means = {"<lambda>": 1, "length": 3, "length_2": 3, "<lambda>_2": 4, "length_2_2": 1, "step_2": 1}
    assert {name: mean for name, (mean, _) in scored.functions.items()} == means
    assert {name: cells[0] for name, cells in scored.table.items() if name in means} == means


def test_rewards_may_be_any_sequence_of_numbers():
    sequences = [1, 0.5], (1, 0.5), np.array([1, 0.5]), torch.tensor([1, 0.5]), [True, np.float32(0.5)]
    assert Rewards([length], np.float32([2]), np.float64(-1)).weights == [2.0]
    for returned in (*sequences, {"a": 1, "b": 0.5}.values(), map(float, [1, 0.5]), (x for x in [1, 0.5])):
        assert score(Rewards(lambda returned=returned, **kw: returned), ["a", "b"]).rewards.tolist() == [1.0, 0.5]


# ---- None: not applicable


def test_the_weighted_sum_is_over_the_functions_that_apply():
    values = [(1.0, None, 0.5), (None, None, 3.0), (2.0, None, None)]
    functions = [lambda returned=returned, **columns: returned for returned in values]
    scored = score(Rewards(functions, [2.0, -1.0, 10.0]), ["x"] * 3)
    assert scored.rewards.tolist() == pytest.approx([22.0, math.nan, -2.0], nan_ok=True)
    assert scored.counts["none"] == 5 and list(scored.functions.values()) == [(0.75, 0.25), (3.0, 0.0), (2.0, 0.0)]


# ---- failures and floors


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, np.float32("nan"), torch.tensor(math.nan), 10**400])
def test_a_reward_that_is_not_finite_scores_the_floor(bad):
    scored = score(Rewards(lambda **kw: [1.0, bad], floor=-0.5), ["a", "b"])
    assert scored.rewards.tolist() == [1.0, -0.5]
    assert scored.counts == {"none": 0, "nan": 1, "exception": 0, "timeout": 0}


def lazily(completions, **columns):
    """Fails only when its rewards are read."""
    return (float(c) for c in completions)


def leaves(completions, **columns):
    """sys.exit() would end the process with status 0, as if the run had finished."""
    return [float(c) if c != "x" else sys.exit() for c in completions]


@pytest.mark.parametrize("timeout", [None, 5.0])
@pytest.mark.parametrize(("function", "kind"), [(lazily, "ValueError"), (leaves, "SystemExit"), (parse, "ValueError")])
def test_a_failure_scores_the_floor_or_stops_the_run_naming_the_prompt(function, kind, timeout):
    scored = score(Rewards(function, floor=-1.0, timeout=timeout), ["1.5", "x"])
    assert scored.rewards.tolist() == [1.5, -1.0] and scored.counts["exception"] == 1
    with pytest.raises(RewardError, match=f"'{function.__name__}' gave {kind}.*'prompt 1'.*reward_floor"):
        score(Rewards(function, timeout=timeout), ["1.5", "x"])
    with pytest.raises(RewardError, match="nan .*'prompt 2'"):
        score(Rewards(function), ["1", "2", "nan"])


def test_floor_declared_by_the_module_or_by_the_function(monkeypatch):
    def reward(completions, **columns):
        return [1 / 0 for _ in completions]

    monkeypatch.setitem(sys.modules, "a_task", types.ModuleType("a_task"))
    reward.__module__ = "a_task"
    assert Rewards(reward).floors == [None]
    sys.modules["a_task"].REWARD_FLOOR = -2
    assert score(Rewards(reward), ["x"]).rewards.tolist() == [-2.0]
    reward.REWARD_FLOOR = -3
    assert score(Rewards(functools.partial(functools.partial(reward))), ["x"]).rewards.tolist() == [-3.0]
    # what the run is configured with goes before what a task declares
    assert score(Rewards(reward, floor=-4.0), ["x"]).rewards.tolist() == [-4.0]
    assert all(Rewards(tasks.get(name).reward).floors == [tasks.get(name).REWARD_FLOOR] for name in tasks.TASKS)


@pytest.mark.parametrize(("function", "cause"), [(parse, "ValueError.*x'"), (lambda **_: [None, 1e999, 1e999], "inf")])
def test_a_floor_is_for_single_failures(function, cause):
    """A function that fails whatever is written shows a fault of its own, or of its columns."""
    rewards = Rewards([length, function], floor=-1.0)
    bad, good = score(rewards, ["x", "y", "z"]), score(Rewards(length), ["x"])
    rewards.check_failures([bad, good])
    with pytest.raises(RewardError, match=f"'{function.__name__}' gave {cause}"):
        rewards.check_failures([bad, bad])
    one = score(rewards, ["x", "y", "z"], prompts=["the one row at fault"] * 3)
    with pytest.warns(UserWarning, match=f"'{function.__name__}' gave {cause}"):
        rewards.check_failures([one, one])


COUNTDOWN = [{"numbers": bad, "target": "3"} for bad in ([1.0], "[1, 2]", torch.tensor([1, 2]), None, 5)]
COUNTDOWN += [{"target": bad, "numbers": [1, 2]} for bad in ("1,003", None, [3])]


@pytest.mark.parametrize("floor", [None, 0.0])
@pytest.mark.parametrize(
    ("task", "columns"),
    [*(("countdown", row) for row in COUNTDOWN), ("arithmetic", {"answer": "56"}), ("conciseness", {"answer": 5})],
)
def test_a_column_by_which_nothing_can_be_scored_stops_the_run(task, columns, floor):
    """None: the floor that the task declares."""
    with pytest.raises(TypeError, match=re.escape(repr(next(iter(columns.values()))))):
        score(Rewards(tasks.get(task).reward, floor=floor), ["a"], {name: [value] for name, value in columns.items()})


# ---- functions with a state


class Multiplied:
    """-scale for each completion; after a step the scale grows by the mean of the logged lengths."""

    REWARD_FLOOR = -9.0

    def __init__(self, scale=1.0):
        self.scale = scale

    def __call__(self, completions, log_metric, **columns):
        log_metric("length", np.mean([len(c) for c in completions]))
        return [-self.scale / len(c) for c in completions]

    def state(self):
        return {"scale": self.scale}

    def load_state(self, state):
        self.scale = state["scale"]

    def end_of_step(self, metrics):
        self.scale += sum(metrics["length"]) / len(metrics["length"])


def test_the_state_moves_with_one_value_a_batch():
    function, seen = Multiplied(), []
    rewards = Rewards([function, length])
    end = function.end_of_step
    function.end_of_step = lambda metrics: seen.append(metrics) or end(metrics)
    assert rewards.state() == {"Multiplied": {"scale": 1.0}}
    one = score(rewards, ["ab", "abcd"])
    other = score(rewards, ["", "a"])  # the empty one fails: both are scored singly, and log one value each
    assert other.metrics == {"length": [1.0]} and other.counts["exception"] == 1
    assert rewards.state() == {"Multiplied": {"scale": 1.0}}
    rewards.end_of_step([one.metrics, {"more": [1.0, 4.0]}, other.metrics])
    assert seen == [{"length": [3.0, 1.0], "more": [2.5]}]
    assert rewards.state() == {"Multiplied": {"scale": 3.0}} and function.scale == 3
    assert state_metrics(rewards.state()) == {"reward_state/Multiplied/scale": 3.0}
    assert Rewards(functools.partial(function)).state() == {"partial": {"scale": 3.0}}


def test_a_call_takes_over_the_state_that_comes_with_it():
    state = types.SimpleNamespace(reward_state={"Multiplied": {"scale": 8.0}})
    # also in a copy that was sent elsewhere before the state moved, and in the process of a limit
    limited = Rewards(Multiplied(), timeout=60)
    for rewards in (Rewards(Multiplied()), pickle.loads(pickle.dumps(Rewards(Multiplied()))), limited):
        assert score(rewards, ["ab", "abcd"], state=state).rewards.tolist() == [-4.0, -2.0]
        assert score(rewards, ["ab"]).rewards.tolist() == [-4.0]  # where none comes, that of before stays
    assert state.reward_state == {"Multiplied": {"scale": 8.0}}


class Clipped(Multiplied):
    def load_state(self, state):
        self.scale = min(state["scale"], 2.0)


def stating(state):
    """A function whose state is this."""
    function = Multiplied()
    function.state = lambda: state
    return function


def loading(state):
    Rewards([Multiplied(), length]).load_state(state)


test_states_that_are_refused = refused(
    *((lambda name: Rewards(type("Part", (Multiplied,), {name: None})()), m, TypeError, f"'Part'.* {m}")
      for m in METHODS),
    (Rewards, [Multiplied(), Multiplied()], ValueError, "'Multiplied'"),
    *((Rewards, Multiplied(bad), ValueError, "'scale' in .*'Multiplied'")
      for bad in (math.nan, -math.inf, "1", None, True, [1.0], 1j)),
    *((Rewards, stating(bad), TypeError, "'Multiplied'") for bad in (None, 1.0, [("scale", 1.0)], {1: 1.0})),
    *((loading, bad, ValueError, r"\['Multiplied'\]")
      for bad in ({}, {"length": {}}, {"Multiplied": {"scale": 1.0}, "length": {}})),
    *((loading, {"Multiplied": bad}, ValueError, "'size'") for bad in ({"size": 1.0}, {"scale": 1.0, "size": 2.0})),
    (Rewards, Clipped(3.0), ValueError, "'Clipped' has the state {'scale': 2.0}"),
    (lambda step: Rewards(Clipped()).end_of_step(step), [{"length": [5.0]}], ValueError, "'Clipped' has the state"),
    call=lambda function, given: function(given),
)  # fmt: skip


@pytest.mark.parametrize("timeout", [None, 60])
def test_a_state_stays_while_completions_are_scored(timeout):
    class Adapts(Multiplied):
        def __call__(self, **arguments):
            self.scale *= 2
            return super().__call__(**arguments)

    with pytest.raises(RuntimeError, match="'Adapts' changed its state from {'scale': 1.0} to {'scale': 2.0} while it"):
        score(Rewards(Adapts(), timeout=timeout), ["ab"])


# ---- mistakes of a function's author stop the run, floor or no floor


WRONG = {
    ValueError: [[1.0], [1.0] * 3, [], itertools.repeat(0.5)],
    TypeError: [None, 0.5, "ab", b"ab", {0: 0.5, 1: 1.0}, {0.5, 1.0}, {0.5: "x", 1.0: "y"}.keys()]
    + [[0.5, "1"], [0.5, [1.0]], [torch.ones(2), 1.0], [0.5, 1 + 2j]]
    + [np.array([0.5, 1 + 2j]), torch.tensor([0.5, 1 + 0j]), pd.DataFrame([[7.0, 8.0]])],
}


@pytest.mark.parametrize("floor", [None, 0.0])
@pytest.mark.parametrize(("error", "returned"), [(error, bad) for error, bads in WRONG.items() for bad in bads])
def test_wrong_results(floor, returned, error):
    with pytest.raises(error, match="'<lambda>' returned "):
        score(Rewards(lambda **columns: returned, floor=floor), ["a", "b"])


test_functions_that_do_not_take_the_columns = refused(
    (lambda prompts, completions: [0.0], "'<lambda>'"),
    (lambda answer, **columns: [0.0], r"'<lambda>'.*'answer'.*\['target'\]"),
    call=lambda function: score(Rewards(function, floor=0.0), ["a"], {"target": ["1"]}),
    error=TypeError,
)


test_settings_that_cannot_be_are_named = refused(
    (([],), ValueError, "reward_funcs"),
    *(((bad,), TypeError, "not callable") for bad in ("my/reward-model", ["my/reward-model"], 7)),
    *((([length, parse], bad), ValueError, "for 2") for bad in ([1.0], [1.0, 2.0, 3.0])),
    *((([length], bad), ValueError, "reward_weights=") for bad in ("a", ["a"], 1.0, [None], [math.nan])),
    *((([length], None, bad), ValueError, "reward_floor=") for bad in ("low", -math.inf)),
    *((([length], None, None, bad), ValueError, f"reward_timeout={bad!r}") for bad in (0, math.nan, math.inf, "3")),
    call=lambda arguments: Rewards(*arguments),
)


# ---- time-outs


def hangs_on_x(completions, log_metric, **columns):
    """What a parser without a limit does; as many users do, it takes any exception for a wrong answer."""
    for c in completions:
        try:
            while c == "x":
                pass
        except Exception:
            return [0.5] * len(completions)
    log_metric("scored", len(completions))
    return [float(len(c)) for c in completions]


def test_a_time_out_costs_only_the_completion_that_hangs_in_any_thread():
    started = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        scored = pool.submit(score, Rewards(hangs_on_x, floor=-1.0, timeout=1.0), ["a", "x", "bbb"]).result()
    assert time.monotonic() - started >= 2.0  # the batch, then the culprit alone
    assert scored.rewards.tolist() == [1.0, -1.0, 3.0]
    assert scored.counts == {"none": 0, "nan": 0, "exception": 0, "timeout": 1}
    assert scored.metrics == {"scored": [1.0, 1.0]} and scored.seconds > 0.02  # both times it hung in a busy loop
    with pytest.raises(RewardError, match="'hangs_on_x' gave RewardTimeout.*0.05 s.*'prompt 0'"):
        score(Rewards(hangs_on_x, timeout=0.05), ["x", "a"])


def test_a_limit_lets_a_function_read_its_changed_attributes_and_keep_what_it_made():
    def reward(completions, **columns):
        made.append(1)
        return [reward.scale * len(made) for _ in completions]

    made, reward.scale, rewards = [], 1.0, Rewards([reward, Multiplied()], timeout=60)
    first = [score(rewards, ["a"]).rewards[0] for _ in range(2)]
    reward.scale = 5.0
    assert [*first, score(rewards, ["a"]).rewards[0]] == [0.0, 1.0, 4.0]
    rewards.load_state({"Multiplied": {"scale": 2.0}})  # which is sent with every call
    assert score(rewards, ["a"]).rewards[0] == 8.0


def test_equal_functions_are_called_each_for_itself():
    fields = [("value", float, dataclasses.field(compare=False))]
    Equal = dataclasses.make_dataclass("Equal", fields, namespace={"__call__": lambda self, **columns: [self.value]})
    assert score(Rewards([Equal(1.0), Equal(10.0)], timeout=60), ["a"]).rewards.tolist() == [11.0]


def test_a_batch_that_is_slow_though_no_completion_is():
    def slow(completions, **columns):
        time.sleep(0.01 if len(completions) == 1 else 60)
        return [1.0] * len(completions)

    scored = score(Rewards(slow, floor=0.0, timeout=2.0), ["a"] * 4)
    assert scored.rewards.tolist() == [1.0] * 4 and scored.counts["timeout"] == 0
    with pytest.raises(RewardError, match="2.0 s.* on 4 prompts"):
        score(Rewards(slow, timeout=2.0), ["a"] * 4)


def test_a_limit_needs_forks(monkeypatch):
    monkeypatch.delattr(os, "fork")
    with pytest.raises(ValueError, match="reward_timeout=3"):
        Rewards(length, timeout=3)


def catches_all(times=10**6):
    for _ in range(times):
        try:
            time.sleep(60)
        except BaseException:
            pass
    return [0.5]


@pytest.mark.parametrize(
    "hang",
    [
        lambda: (signal.alarm(5), signal.alarm(0), signal.signal(signal.SIGALRM, signal.SIG_IGN), time.sleep(60)),
        lambda: (signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()), time.sleep(60)),
        lambda: ctypes.CDLL(None).sleep(60),
        catches_all,
        lambda: catches_all(1),  # what it returns then comes too late
    ],
    ids=["an alarm of its own", "no signals", "C", "every exception", "the first exception"],
)
def test_no_call_outlives_its_limit_and_the_next_one_begins_anew(hang):
    kept, started = [], time.monotonic()

    def counts(completions, **columns):
        kept.append(completions)
        return hang() if completions == ["x"] else [float(len(kept))]

    rewards = Rewards(counts, floor=-1.0, timeout=0.5)
    scored = [score(rewards, [completion]) for completion in ("a", "b", "x")]
    assert [each.rewards[0] for each in scored] == [1.0, 2.0, -1.0] and scored[2].counts["timeout"] == 1
    assert time.monotonic() - started < 30 and kept == []  # in a process of its own
    assert scored[0].seconds < 0.5 and (hang is not catches_all or scored[2].seconds > 1.0)  # it was killed twice
    score(rewards, ["a"])
    for process in _LIMITED[rewards]._processes.values():
        process.kill()
        process.join()
    assert score(rewards, ["a"]).rewards.tolist() == [1.0]


@pytest.mark.parametrize("start", [os.system, functools.partial(subprocess.run, shell=True)], ids=["system", "run"])
def test_what_a_call_has_started_ends_with_it_at_the_limit(start, tmp_path):
    def shell(completions, **columns):
        start(f"echo $$ > {tmp_path}/id; sleep 60; true")
        return [0.0]

    assert score(Rewards(shell, floor=-1.0, timeout=0.5), ["x"]).counts["timeout"] == 1
    with contextlib.suppress(psutil.NoSuchProcess):  # it may not have been collected yet
        psutil.Process(int((tmp_path / "id").read_text())).wait(5)


Local = type("Local", (ValueError,), {"__module__": "nowhere"})


FAILURES = [(subprocess.CalledProcessError(3, "x"), r"CalledProcessError\(3, 'x'\)"), (None, "ended the process")]
FAILURES += [(Local("cause"), r"Local\('cause'\)"), (ValueError("cause", threading.Lock()), r"ValueError\('cause', ")]


@pytest.mark.parametrize(("error", "named"), FAILURES)
def test_a_failure_that_no_process_can_send_is_named_and_counted(error, named):
    def fails(completions, **columns):
        raise error or os._exit(1)

    assert score(Rewards(fails, floor=-1.0, timeout=60), ["a"]).counts["exception"] == 1
    with pytest.raises(RewardError, match=f"'fails' gave .*{named}.*'prompt 0'"):
        score(Rewards(fails, timeout=60), ["a"])


def test_rewards_and_columns_that_no_process_can_send():
    def odd(completions, log_extra, **columns):
        log_extra("why", [threading.Lock() for _ in completions])
        return {c: type("Own", (float,), {})(len(c)) for c in completions}.values()

    scored = score(Rewards(odd, timeout=60, table=True), ["a", "bc"])
    assert scored.rewards.tolist() == [1.0, 2.0] and all("lock" in cell for cell in scored.table["why"])
    with pytest.raises(TypeError, match="column 'check' cannot be sent.*reward_timeout=None"):
        score(Rewards(length, floor=-1.0, timeout=60), ["a"], {"check": [lambda text: True]})


def test_a_wait_for_another_thread_is_named_with_the_users_threads_alone():
    """Those of pools and of this library nobody waits for."""
    asked, told, own = queue.Queue(), queue.Queue(), Forks(1, hangs_on_x, watch=True)
    threading.Thread(target=lambda: told.put(asked.get()), name="a user's", daemon=True).start()
    own.submit("__repr__").result()

    def waits(completions, **columns):
        asked.put(1)
        return [told.get()]

    theirs = r"before \((?!.*evoalign-|.*QueueFeeder).*a user's\)"  # and those that other tests have left
    with pytest.raises(RewardError, match=f"'waits' gave RewardTimeout.* {theirs}.*the function"):
        score(Rewards(waits, timeout=2.0), ["a"])
    asked.put(1)
    own.end()
