"""Reward functions: one way of calling them, floors for failures, and errors that name what went wrong."""

import asyncio
import concurrent.futures
import functools
import itertools
import math
import pickle
import signal
import sys
import time
import types

import numpy as np
import pytest
import torch
from helpers import in_child
from hypothesis import given
from hypothesis import strategies as st

from evoalign_lib import tasks
from evoalign_lib.rewards import METHODS, RewardError, Rewards, state_metrics

# the limits under test have the timer that would cut off a test that hangs
pytestmark = pytest.mark.timeout(method="thread")


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
        answers = await asyncio.gather(*(self.ask(c) for c in completions))
        log_metric("asked", len(answers))
        return answers

    async def ask(self, completion):
        await asyncio.sleep(0.001)
        return float(len(completion)) if completion else None


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


def test_what_fails_in_an_asynchronous_function_scores_the_floor(alarms):
    async def sometimes(completions, **columns):
        if "exit" in completions:
            sys.exit(3)
        if "slow" in completions:
            await asyncio.sleep(30)
        return [float(c) for c in completions]

    scored = score(Rewards(sometimes, floor=-1.0, timeout=0.2), ["1", "slow", "x", "exit"])
    assert scored.rewards.tolist() == [1.0, -1.0, -1.0, -1.0]
    assert (scored.counts["timeout"], scored.counts["exception"]) == (1, 2)
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
def test_a_column_has_a_value_for_each_completion_and_a_name_of_its_own(table):
    def short(completions, log_extra, **columns):
        log_extra("why", ["one"])
        return [0.0] * len(completions)

    def again(completions, log_extra, **columns):
        log_extra("completion", completions)
        return [0.0] * len(completions)

    with pytest.raises(ValueError, match="'short' gave log_extra 1 values of 'why' for 2 completions: give one"):
        score(Rewards(short, floor=0.0, table=table), ["a", "b"])
    with pytest.raises(ValueError, match="a column 'completion', which the table has already"):
        score(Rewards(again, table=table), ["a", "b"])


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


def test_rewards_may_be_any_sequence_of_numbers():
    sequences = [1, 0.5], (1, 0.5), np.array([1, 0.5]), torch.tensor([1, 0.5]), [True, np.float32(0.5)]
    for returned in (*sequences, {"a": 1, "b": 0.5}.values(), map(float, [1, 0.5]), (x for x in [1, 0.5])):
        assert score(Rewards(lambda returned=returned, **kw: returned), ["a", "b"]).rewards.tolist() == [1.0, 0.5]


# ---- None: not applicable


@given(
    st.lists(
        st.tuples(*[st.one_of(st.none(), st.floats(-1e3, 1e3))] * 3),
        min_size=1,
        max_size=6,
    ),
    st.tuples(*[st.floats(-10, 10)] * 3),
)
def test_weighted_sum_over_the_functions_that_apply(table, weights):
    functions = [lambda j=j, **kw: [row[j] for row in table] for j in range(3)]
    scored = score(Rewards(functions, weights), ["x"] * len(table))
    for row, reward in zip(table, scored.rewards, strict=True):
        applied = [w * r for w, r in zip(weights, row, strict=True) if r is not None]
        assert reward == pytest.approx(sum(applied), abs=1e-9) if applied else math.isnan(reward)
    assert scored.counts["none"] == sum(r is None for row in table for r in row)


# ---- failures and floors


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, np.float32("nan"), torch.tensor(math.nan), 10**400])
def test_a_reward_that_is_not_finite_scores_the_floor(bad):
    scored = score(Rewards(lambda **kw: [1.0, bad], floor=-0.5), ["a", "b"])
    assert scored.rewards.tolist() == [1.0, -0.5]
    assert scored.counts == {"none": 0, "nan": 1, "exception": 0, "timeout": 0}


def test_an_exception_costs_only_the_completion_that_raised_it():
    # a ValueError among them: a parser's commonest, and no error of the run
    scored = score(Rewards(parse, floor=-1.0), ["1.5", "x", "2", "", "nan"])
    assert scored.rewards.tolist() == [1.5, -1.0, 2.0, -1.0, -1.0]
    assert scored.counts == {"none": 0, "nan": 1, "exception": 2, "timeout": 0}

    def logs(completions, log_metric, **columns):
        log_metric("seen", len(completions))
        log_metric("seen", 9)
        return [float(c) for c in completions]

    assert score(Rewards(logs, floor=0.0), ["1", "2"]).metrics == {"seen": [2.0, 9.0]}
    assert score(Rewards(logs, floor=0.0), ["1", "x"]).metrics == {"seen": [1.0, 9.0]}  # none of a call that failed


def test_a_generator_fails_within_the_call():
    """What it computes is computed when the list is made of it, and only its own completion scores the floor."""
    scored = score(Rewards(lambda completions, **kw: map(float, completions), floor=-1.0), ["1.5", "x"])
    assert scored.rewards.tolist() == [1.5, -1.0] and scored.counts["exception"] == 1
    with pytest.raises(RewardError, match=r"gave ValueError.*on prompt 'prompt 1'.*reward_floor"):
        score(Rewards(lambda completions, **kw: (float(c) for c in completions)), ["1.5", "x"])


@pytest.mark.parametrize("timeout", [None, 5.0])
def test_an_exit_in_a_reward_is_a_failure(timeout):
    """sys.exit() would end the process with status 0, as if the run had finished."""

    def leaves(completions, **columns):
        return [float(c) if c != "x" else sys.exit() for c in completions]

    scored = score(Rewards(leaves, floor=-1.0, timeout=timeout), ["1.5", "x"])
    assert scored.rewards.tolist() == [1.5, -1.0] and scored.counts["exception"] == 1
    with pytest.raises(RewardError, match=r"'leaves' gave SystemExit.* on prompt 'prompt 1'.*reward_floor"):
        score(Rewards(leaves, timeout=timeout), ["1.5", "x"])


def test_without_a_floor_a_failure_stops_the_run_and_names_the_prompt():
    with pytest.raises(RewardError, match=r"'parse' gave ValueError.*on prompt 'prompt 1'.*reward_floor"):
        score(Rewards(parse), ["1", "x", "y"])
    with pytest.raises(RewardError, match=r"gave nan on prompt 'prompt 2'"):
        score(Rewards(parse), ["1", "2", "nan"])


def test_a_failure_of_the_batch_alone_is_named_as_such():
    def at_most_one(completions, **columns):
        if len(completions) > 1:
            raise MemoryError("too many")
        return [1.0]

    with pytest.raises(RewardError, match="on 2 prompts at once, though on none alone"):
        score(Rewards(at_most_one), ["a", "b"])
    scored = score(Rewards(at_most_one, floor=0.0), ["a", "b"])
    assert scored.rewards.tolist() == [1.0, 1.0] and scored.counts["exception"] == 0


def test_floor_declared_by_the_module_or_by_the_function(monkeypatch):
    def reward(completions, **columns):
        return [1 / 0 for _ in completions]

    monkeypatch.setitem(sys.modules, "a_task", types.ModuleType("a_task"))
    reward.__module__ = "a_task"
    assert Rewards(reward).floors == [None]
    sys.modules["a_task"].REWARD_FLOOR = -2
    assert score(Rewards(reward), ["x"]).rewards.tolist() == [-2.0]
    reward.REWARD_FLOOR = -3
    assert score(Rewards(reward), ["x"]).rewards.tolist() == [-3.0]
    # what the run is configured with goes before what a task declares
    assert score(Rewards(reward, floor=-4.0), ["x"]).rewards.tolist() == [-4.0]


@pytest.mark.parametrize("name", tasks.TASKS)
def test_every_task_declares_a_floor_that_its_variants_keep(name):
    task = tasks.get(name)
    assert Rewards(task.reward).floors == [task.REWARD_FLOOR]
    variant = functools.partial(functools.partial(task.reward))
    assert Rewards(variant).floors == [task.REWARD_FLOOR]
    assert Rewards(variant).names == ["reward"]


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
    rewards = Rewards(Multiplied())
    state = types.SimpleNamespace(reward_state={"Multiplied": {"scale": 8.0}})
    assert score(rewards, ["ab", "abcd"], state=state).rewards.tolist() == [-4.0, -2.0]
    assert score(rewards, ["ab"]).rewards.tolist() == [-4.0]  # where none comes, that of before stays
    assert state.reward_state == {"Multiplied": {"scale": 8.0}}
    # also in a copy that was sent elsewhere before the state moved
    copied = pickle.loads(pickle.dumps(Rewards(Multiplied())))
    assert score(copied, ["ab"], state=state).rewards.tolist() == [-4.0]


@pytest.mark.parametrize("missing", METHODS)
def test_a_part_of_a_state_is_refused(missing):
    part = type("Part", (Multiplied,), {missing: None})
    with pytest.raises(
        TypeError, match=f"'Part' has the method .* but no {missing}: one with a state needs state, load"
    ):
        Rewards(part())


def test_two_states_of_one_name_are_refused():
    with pytest.raises(ValueError, match="'Multiplied'"):
        Rewards([Multiplied(), Multiplied()])
    second = Multiplied(2.0)
    second.__name__ = "second"
    assert Rewards([Multiplied(), second]).state() == {"Multiplied": {"scale": 1.0}, "second": {"scale": 2.0}}


@pytest.mark.parametrize("state", [None, 1.0, [("scale", 1.0)], {1: 1.0}])
@pytest.mark.parametrize("scale", [math.nan, -math.inf, "1", None, True, [1.0], 1j])
def test_a_state_that_holds_no_finite_numbers(scale, state):
    with pytest.raises(ValueError, match="'scale' in the state of reward function 'Multiplied' is "):
        Rewards(Multiplied(scale))
    function = Multiplied()
    function.state = lambda: state
    with pytest.raises(TypeError, match="'Multiplied' has the state "):
        Rewards(function)


def test_states_that_do_not_fit():
    class Clipped(Multiplied):
        def load_state(self, state):
            self.scale = min(state["scale"], 2.0)

    rewards = Rewards([Multiplied(), length])
    for other in ({}, {"length": {}}, {"Multiplied": {"scale": 1.0}, "length": {}}):
        with pytest.raises(ValueError, match=r"\['Multiplied'\]"):
            rewards.load_state(other)
    for state in ({"size": 1.0}, {"scale": 1.0, "size": 2.0}):
        with pytest.raises(ValueError, match="'Multiplied' .*'size'"):
            rewards.load_state({"Multiplied": state})
    with pytest.raises(ValueError, match="'Clipped' has the state {'scale': 2.0}"):
        Rewards(Clipped(3.0))
    with pytest.raises(ValueError, match="'Clipped' has the state"):
        Rewards(Clipped()).end_of_step([{"length": [5.0]}])


def test_a_state_stays_while_completions_are_scored():
    class Adapts(Multiplied):
        def __call__(self, **arguments):
            self.scale *= 2
            return super().__call__(**arguments)

    with pytest.raises(RuntimeError, match="'Adapts' changed its state from {'scale': 1.0} to {'scale': 2.0} while it"):
        score(Rewards(Adapts()), ["ab"])


# ---- mistakes of a function's author stop the run, floor or no floor


@pytest.mark.parametrize("floor", [None, 0.0])
@pytest.mark.parametrize(
    ("returned", "error"),
    [
        *((bad, ValueError) for bad in ([1.0], [1.0] * 3, [], itertools.repeat(0.5))),
        *(
            (bad, TypeError)
            for bad in (None, 0.5, "ab", b"ab", {0: 0.5, 1: 1.0}, {0.5, 1.0}, {0.5: "x", 1.0: "y"}.keys())
        ),
        *((bad, TypeError) for bad in ([0.5, "1"], [0.5, [1.0]], [torch.ones(2), 1.0], [0.5, 1 + 2j])),
        *((bad, TypeError) for bad in (np.array([0.5, 1 + 2j]), torch.tensor([0.5, 1 + 0j]))),
    ],
)
def test_wrong_results(floor, returned, error):
    def reward(**columns):
        return returned

    with pytest.raises(error, match="'reward' returned "):
        score(Rewards(reward, floor=floor), ["a", "b"])


@pytest.mark.parametrize("floor", [None, 0.0])
def test_a_function_that_does_not_take_the_columns(floor):
    def narrow(prompts, completions):
        return [0.0] * len(completions)

    def needs(prompts, completions, answer, **columns):
        return [0.0] * len(completions)

    with pytest.raises(TypeError, match=r"'narrow' does not fit its call .*\*\*columns"):
        score(Rewards(narrow, floor=floor), ["a"], {"target": ["1"]})
    with pytest.raises(TypeError, match=r"'needs' does not fit its call .*'answer'.*\['target'\]"):
        score(Rewards(needs, floor=floor), ["a"], {"target": ["1"]})


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        (([],), ValueError, "reward_funcs"),
        *(((bad,), TypeError, "not callable") for bad in ("my/reward-model", ["my/reward-model"], 7)),
        *((([length, parse], bad), ValueError, f"{len(bad)} entries for 2") for bad in ([1.0], [1.0, 2.0, 3.0])),
        *((([length], bad), ValueError, "reward_weights=") for bad in ("a", ["a"], 1.0, [None])),
        (([length], None, "low"), ValueError, "'low'"),
        (([length], [math.nan]), ValueError, "reward_weights holds nan"),
        (([length], None, -math.inf), ValueError, "reward_floor holds -inf"),
        *((([length], None, None, bad), ValueError, f"reward_timeout={bad!r}") for bad in (0, math.nan, math.inf, "3")),
    ],
)
def test_settings_that_cannot_be_are_named(arguments, error, named):
    with pytest.raises(error, match=named):
        Rewards(*arguments)
    assert Rewards([length], np.float32([2]), np.float64(-1)).weights == [2.0]


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


@pytest.fixture
def alarms():
    """The signal's handler and timer, which a limit has to leave as they were."""
    heard = []
    previous = signal.signal(signal.SIGALRM, lambda number, frame: heard.append(number))
    yield heard
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, previous)


def test_a_time_out_costs_only_the_completion_that_hangs(alarms):
    handler = signal.getsignal(signal.SIGALRM)
    started = time.monotonic()
    scored = score(Rewards(hangs_on_x, floor=-1.0, timeout=1.0), ["a", "x", "bbb"])
    assert time.monotonic() - started >= 2.0  # the batch, then the culprit alone
    assert scored.rewards.tolist() == [1.0, -1.0, 3.0]
    assert scored.counts == {"none": 0, "nan": 0, "exception": 0, "timeout": 1}
    assert scored.metrics == {"scored": [1.0, 1.0]}
    assert signal.getsignal(signal.SIGALRM) is handler and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert alarms == []


@pytest.mark.parametrize("ends", ["returns", "raises"])
def test_a_time_out_that_the_function_swallows_counts(alarms, ends):
    def swallows(completions, **columns):
        values = []
        for c in completions:
            try:
                while c == "x":
                    time.sleep(0.01)
            except:  # noqa: E722
                values.append(0.5)
        return values if ends == "returns" else [float("none")]

    # the batch hangs twice: the second completion too has to be interrupted
    scored = score(Rewards(swallows, floor=-1.0, timeout=0.1), ["x", "x"])
    assert scored.rewards.tolist() == [-1.0, -1.0]
    assert scored.counts == {"none": 0, "nan": 0, "exception": 0, "timeout": 2}
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0) and alarms == []


def test_a_time_out_reaches_a_generator():
    def hangs(completions, **columns):
        for c in completions:
            while c == "x":
                pass
            yield 1.0

    scored = score(Rewards(hangs, floor=-1.0, timeout=0.2), ["a", "x"])
    assert scored.rewards.tolist() == [1.0, -1.0] and scored.counts["timeout"] == 1


def test_a_time_out_without_a_floor_names_the_prompt():
    with pytest.raises(RewardError, match=r"'hangs_on_x' gave RewardTimeout\('no result within 0.05 s'\) on prompt 'h"):
        score(Rewards(hangs_on_x, timeout=0.05), ["x", "a"], prompts=["hangs", "ends"])
    assert score(Rewards(hangs_on_x, timeout=60), ["a", "bb"]).rewards.tolist() == [1.0, 2.0]


def test_a_batch_that_is_slow_though_no_completion_is():
    def slow(completions, **columns):
        time.sleep(0.01 if len(completions) == 1 else 60)
        return [1.0] * len(completions)

    scored = score(Rewards(slow, floor=0.0, timeout=1.0), ["a"] * 4)
    assert scored.rewards.tolist() == [1.0] * 4 and scored.counts["timeout"] == 0
    with pytest.raises(RewardError, match="'no result within 1.0 s'.* on 4 prompts at once, though on none alone"):
        score(Rewards(slow, timeout=1.0), ["a"] * 4)


def test_the_timer_of_somebody_else_goes_on(alarms):
    signal.setitimer(signal.ITIMER_REAL, 300, 400)
    score(Rewards(hangs_on_x, floor=0.0, timeout=0.1), ["x"])
    left, interval = signal.getitimer(signal.ITIMER_REAL)
    assert alarms == [] and 0 < left < 300 - 0.15 and interval == 400  # twice 0.1 s have passed
    # one that falls due meanwhile comes late, not never, and once
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    score(Rewards(hangs_on_x, floor=0.0, timeout=0.3), ["x"])
    deadline = time.monotonic() + 60
    while not alarms and time.monotonic() < deadline:
        time.sleep(0.01)
    assert alarms == [signal.SIGALRM] and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_time_out_outside_the_main_thread_is_refused():
    rewards = Rewards(hangs_on_x, floor=-1.0, timeout=0.05)
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="side") as pool:
        with pytest.raises(RuntimeError, match="reward_timeout=0.05 works in the main thread .*not in 'side_0'.*None"):
            pool.submit(score, rewards, ["a"]).result()
        assert pool.submit(score, Rewards(hangs_on_x), ["a"]).result().rewards.tolist() == [1.0]
