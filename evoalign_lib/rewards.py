"""Call reward functions, in the same way for every arm.

A reward function has the signature of TRL's `GRPOTrainer`: it is called by keyword with `prompts`, `completions`,
`completion_ids`, `trainer_state`, `log_metric`, `log_extra` and every other column of the data set, and returns a
number (or None: not applicable) for each completion, in any sequence or iterator that keeps their order. Rewards are
maximised. It may be asynchronous (`async def`): each process then awaits it in its own event loop, which stays open
between calls. `log_extra(column, values)` adds a column to the table of completions, with one value for each; without
log_completions there is no table. The `trainer_state` of `ESTrainer` has an empty log_history, since the state is sent
to the worker processes with every member and a log would grow. Every call gets copies of prompts, completions and
columns, at any depth, so what a function changes in them reaches nobody else. Functions of one name are numbered in
metrics and tables: reward, reward_2.

A floor is for single failures. A function that fails on every completion of a step stops the run (unless all are of one
prompt, which gives a warning), as does a `DataError` that it raises because of its columns.

A reward that changes during training, such as reward - lambda * cost with the Lagrange multiplier of Safe-RLHF (Dai et
al., arXiv 2310.12773), is an object with three more methods (all or none):

- `state() -> dict[str, float]`: return everything the reward depends on besides its arguments, as finite numbers.
- `load_state(state)`: restore such a state completely: `state()` returns the same numbers afterwards.
- `end_of_step(metrics)`: update the state. Called once per step, in one process, when the whole step is scored.
  metrics: name -> (batches,) values that reward functions logged with `log_metric` in this step, one for each scored
  batch, the mean if several were logged. A batch is the completions of a member with ES, in the order of members, and
  those of a process in TRL's trainers, in the order of processes; one that logged nothing under a name has no value.

The trainer owns the state. It passes the state to wherever rewards are computed, logs it after each step
(`reward_state/<function>/<key>`) and records it; a resumed run continues from it. While a step is scored, the state
does not change.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import copy
import functools
import inspect
import itertools
import math
import mmap
import os
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from numbers import Number, Real
from typing import Any

import numpy as np

from evoalign_lib._forks import Forks, waits_for_ever
from evoalign_lib.checks import plain, positive, require

RewardFunction = Callable[..., Sequence[float | None]]

_Part = tuple[slice, Any, list[tuple[str, float]], list[tuple[str, list]]]
"""Which completions a call scored, what it returned, and what it passed to `log_metric` and `log_extra`."""

States = dict[str, dict[str, float]]
"""Name of a reward function -> its state."""

METHODS = ("state", "load_state", "end_of_step")
"""Methods of a reward function with a state."""

# arguments of a reward function besides the columns of the data set
ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")

# columns of the table of completions besides those of the functions
_COLUMNS = ("step", "member", "prompt", "completion", "advantage")

_GRACE = 0.5  # seconds after the limit in which a call may end by itself
_LIMITED: weakref.WeakKeyDictionary[Rewards, Forks] = weakref.WeakKeyDictionary()
# kinds of rewards that are counted
KINDS = ("none", "nan", "exception", "timeout")


class RewardError(RuntimeError):
    """A reward function failed and has no floor."""


class RewardOutage(RuntimeError):
    """The scorer is gone for all completions: the run stops and can be resumed, rather than continue with floors."""


class DataError(TypeError, ValueError):
    """Raised by a reward function for a column by which no completion can be scored: the run stops, floor or not.

    Also raised for a result that is no list of numbers, and for a column that no process can be sent.
    """


class RewardTimeout(RuntimeError):
    """A call of a reward function took longer than its time limit."""


class _TimeIsUp(BaseException):
    """Raised inside a reward function; a BaseException, so that `except Exception` in the function lets it pass."""


@dataclass
class Scored:
    """The rewards of one batch of completions.

    Attributes:
        rewards: (completions,) float64; NaN where no function applied (all returned None).
        functions: name -> (mean, population standard deviation) of each function's own rewards.
        metrics: name -> values that the functions logged with `log_metric`, in call order.
        counts: how many rewards were "nan" (or infinite), "exception" or "timeout", which score the floor, or "none",
            which are left out.
        table: if requested, column -> (completions,) values: "prompt", "completion", each function by its name (None
            where it did not apply), then the columns from `log_extra`.
        failed: name -> the first failure, and the prompts, of each function that failed on every completion that it
            applies to.
        seconds: CPU time of the process in which functions with a time limit are called; of a call for which it was
            killed, all seconds that it took.
    """

    rewards: np.ndarray
    functions: dict[str, tuple[float, float]]
    metrics: dict[str, list[float]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    table: dict[str, list] = field(default_factory=dict)
    failed: dict[str, tuple[str, set[str]]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def failures(self) -> dict[str, int]:
        """The counts without "none"."""
        return {kind: count for kind, count in self.counts.items() if kind != "none"}


class Rewards:
    """One or several reward functions with weights and a floor.

    Args:
        functions: a reward function or a list of them.
        weights: one weight per function (default: all 1); the reward is the weighted sum over functions that applied.
        floor: reward of a completion whose scoring gives NaN, an infinity (or a number beyond float64), an exception
            (`sys.exit()` in a function included) or a time-out. None: the `REWARD_FLOOR` that the function or its
            module declares, as every task of this library does; a function without one stops the run at its first
            failure, naming the prompt.
        timeout: seconds that a call of a function may take; None: the longest `REWARD_TIMEOUT` that a function or its
            module declares, as tasks do whose graders can hang, otherwise no limit. A batch that takes longer (or
            raises) is scored again, one completion at a time with the same limit for each, so that only the completions
            at fault fail and can be named; this takes little more than (completions + 1) * timeout. The functions are
            then called in a process of their own, forked at the first call (not on Windows), and again when a number or
            text that is their attribute has changed in this process: what they keep stays there, until then; other
            changes of this process, such as of global names, and GPUs that it uses are out of their reach. At the limit
            a function receives an exception that `except Exception` does not catch; if the call has not ended half a
            second later, whatever it does, the process is killed with all that the functions kept.
        table: whether to fill `Scored.table`.

    Attributes:
        stateful: name -> function, for the functions with a state (see the module's docstring).

    Raises:
        TypeError: a function that is not callable, or has only some of the methods of a state.
        ValueError: no functions; weights that are not a list of finite numbers, one per function; a floor that is not a
            finite number; two functions with a state and the same name; a state with values that are not finite
            numbers; or a timeout that is not a positive number, or that this system cannot enforce for lack of signals.
    """

    def __init__(
        self,
        functions: RewardFunction | Sequence[RewardFunction],
        weights: Sequence[float] | None = None,
        floor: float | None = None,
        timeout: float | None = None,
        table: bool = False,
    ):
        several = isinstance(functions, Sequence) and not isinstance(functions, str)
        self.functions = list(functions) if several else [functions]
        require(self.functions, "reward_funcs is empty: pass at least one reward function.")
        for function in self.functions:
            if not callable(function):
                raise TypeError(f"reward function {function!r} is not callable: pass reward(completions, **columns).")
        n = len(self.functions)
        given = [1.0] * n if weights is None else list(weights) if isinstance(weights, Iterable) else []
        fits = len(given) == n and all(map(_is_finite, given))
        require(fits, f"reward_weights={weights!r} for {n} functions: pass a list of finite numbers, one each.")
        self.weights = [float(weight) for weight in given]
        floors = [_declared(f, "REWARD_FLOOR") if floor is None else floor for f in self.functions]
        fits = all(f is None or _is_finite(f) for f in floors)
        require(fits, f"reward_floor={floors!r}: pass a finite number as the score of a failure, or None.")
        self.floors = [None if f is None else float(f) for f in floors]
        own = [limit for f in self.functions if (limit := _declared(f, "REWARD_TIMEOUT")) is not None]
        if timeout is None and own and hasattr(os, "fork"):
            timeout = max(own)
        if timeout is not None:
            positive("reward_timeout", timeout)
            forks = hasattr(os, "fork")
            require(forks, f"reward_timeout={timeout} needs forks, which this system lacks: set it to None.")
        self.timeout, self.table = timeout, table
        names = [getattr(_unwrapped(f), "__name__", type(f).__name__) for f in self.functions]
        self.names: list[str] = []
        for name in names:  # functions of one name, such as lambdas, or of the name of a column of the table
            numbered = itertools.chain([name], (f"{name}_{i}" for i in itertools.count(2)))
            self.names.append(next(each for each in numbered if each not in (*_COLUMNS, *self.names)))
        self.stateful = _stateful(self.functions, names)
        self.load_state(self.state())  # report a state that cannot be recorded now, not after the first step

    def state(self) -> States:
        """Return the state of each function that has one.

        Raises:
            TypeError: a state that is not a dict with strings as keys.
            ValueError: a value that is not a finite number.
        """
        return {name: _checked_state(function.state(), name) for name, function in self.stateful.items()}

    def load_state(self, states: Mapping[str, Mapping[str, float]]) -> None:
        """Restore the state of each function that has one, by name.

        Raises:
            ValueError: states of other functions than those that have one here, or a state that its function refuses or
                does not restore exactly.
        """
        known = f"the state is for the reward functions {sorted(states)}, those here are {sorted(self.stateful)}"
        require(states.keys() == self.stateful.keys(), f"{known}: use the reward functions of the original run.")
        for name, function in self.stateful.items():
            state = dict(states[name])
            try:
                function.load_state(dict(state))
            except Exception as error:
                known = f"reward function {name!r} does not take the state {state} ({error!r})"
                raise ValueError(f"{known}: use the function of the run that recorded it.") from error
            if (found := _checked_state(function.state(), name)) != state:
                known = f"reward function {name!r} has the state {found} after load_state({state})"
                raise ValueError(f"{known}: let load_state restore every number unchanged.")

    def end_of_step(self, metrics: Sequence[Mapping[str, Sequence[float]]]) -> None:
        """Let each function with a state update it, after a step is scored.

        Args:
            metrics: (batches,) the metrics logged in each batch (`Scored.metrics`).

        Raises:
            TypeError, ValueError: as for `state` and `load_state`.
        """
        merged: dict[str, list[float]] = {}
        for batch in metrics:
            for metric, values in batch.items():
                merged.setdefault(metric, []).append(float(np.mean(values)))
        for function in self.stateful.values():
            function.end_of_step({metric: list(values) for metric, values in merged.items()})
        self.load_state(self.state())  # raise before anything is recorded if reloading would lose part of the new state

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
        trainer_state: Any = None,
    ) -> Scored:
        """Score completions.

        Args:
            prompts: (completions,) the prompt of each.
            completions: (completions,) texts, or message lists for conversational prompts.
            completion_ids: (completions,) token ids without padding.
            columns: further columns of the data set, (completions,) each.
            trainer_state: passed through. If it has a `reward_state`, functions with a state restore it first, so that
                every process scores with the state of the step.

        Raises:
            ValueError: a function did not return one reward per completion.
            TypeError: a function does not accept the columns, or did not return a list of numbers (not a dict, a set or
                complex numbers).
            RewardError: a function failed and has no floor.
            RuntimeError: a function that changed its state.
        """
        self.check_columns(columns)
        if (given := getattr(trainer_state, "reward_state", None)) is not None:
            self.load_state(given)
        self._seconds, before, n = 0.0, self.state(), len(completions)
        total, applied, functions = np.zeros(n), np.zeros(n, dtype=bool), {}
        metrics, counts, extra, failed = {}, dict.fromkeys(KINDS, 0), {}, {}
        table: dict[str, list] = {"prompt": list(prompts), "completion": list(completions)}
        given = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **columns}
        for i, (weight, floor, name) in enumerate(zip(self.weights, self.floors, self.names, strict=True)):
            call = functools.partial(self._call, i, given, trainer_state)
            values = np.empty(n)
            failures: list[tuple[str, str]] = []  # kind and cause
            for items, numbers, logged, shown in _calls(call, n, name, floor, prompts, failures):
                values[items] = _floored(numbers, name, floor, prompts[items], failures)
                for metric, value in logged:
                    metrics.setdefault(metric, []).append(value)
                for column, cells in shown:
                    what = f"{len(cells)} values of {column!r} for {len(values[items])} completions: pass one for each."
                    require(len(cells) == len(values[items]), f"reward function {name!r} gave log_extra {what}")
                    extra.setdefault(column, [None] * n)[items] = cells
            table[name] = [None if math.isnan(value) else value for value in values.tolist()]
            has = ~np.isnan(values)
            counts["none"] += n - int(has.sum())
            for kind, _ in failures:
                counts[kind] += 1
            if failures and len(failures) == has.sum():
                failed[name] = failures[0][1], {str(prompts[j]) for j in np.flatnonzero(has)}
            total[has] += weight * values[has]
            applied |= has
            if has.any():
                functions[name] = (float(values[has].mean()), float(values[has].std()))
        for name, after in self.state().items():
            if after != before[name]:  # otherwise the state would depend on the process and the order of members
                moved = f"reward function {name!r} changed its state from {before[name]} to {after}"
                raise RuntimeError(f"{moved} while it scored: change it only in end_of_step.")
        if taken := sorted(extra.keys() & table.keys()):
            raise ValueError(f"log_extra got a column {taken[0]!r}, which the table already has: use another name.")
        rewards = np.where(applied, total, np.nan)
        return Scored(rewards, functions, metrics, counts, table | extra if self.table else {}, failed, self._seconds)

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raise TypeError if a function cannot take these columns, since a wrong signature must not score the floor."""
        for function, name in zip(self.functions, self.names, strict=True):
            try:
                inspect.signature(function).bind(**dict.fromkeys([*ARGUMENTS, *columns]))
            except ValueError:  # some functions written in C have no signature
                continue
            except TypeError as error:
                remedy = f"let it take the columns it needs from {sorted(columns)}, and **columns for the rest"
                raise TypeError(f"reward function {name!r} does not fit its call ({error}): {remedy}.") from None

    def check_failures(self, batches: Sequence[Scored]) -> None:
        """Raise RewardError if a function failed on every completion of a step; batches: all of the step's.

        A floor is for single failures: a step of nothing but floors teaches nothing. If all are of one prompt, the
        fault may be that row's alone: then warn.
        """
        for name in self.names:
            if all(name in batch.failed for batch in batches):
                what = f"reward function {name!r} gave {batches[0].failed[name][0]}"
                if len(set().union(*(batch.failed[name][1] for batch in batches))) > 1:
                    remedy = "Correct it, or the columns that it reads; the floor is for single failures"
                    raise RewardError(f"{what} on every completion of the step. {remedy}.")
                what += " on every completion of the step, which has one prompt"
                warnings.warn(f"{what}: correct that row, or the function.", stacklevel=2)

    def _call(self, i: int, given: Mapping[str, Sequence], trainer_state: Any, items: slice) -> _Part:
        """Call function i with some of the completions."""
        arguments = {name: [_own(value) for value in values[items]] for name, values in given.items()}
        if self.timeout is None:
            return items, *_called(self.functions[i], self.names[i], arguments, trainer_state)
        try:
            *found, after = self._limited(i, self.state(), arguments, trainer_state)
        except Exception:
            if unsendable := [name for name, values in arguments.items() if not _can_be_sent(values)]:
                what = f"column {unsendable[0]!r} cannot be sent to another process"
                raise DataError(f"{what}, where reward_timeout has it scored: set reward_timeout=None.") from None
            raise
        self.load_state(after)  # `__call__` compares it with that before
        return items, *found

    def _limited(self, *task: Any) -> tuple:
        """Return what `_answer` returns in a process of its own; raise RewardTimeout if that takes too long.

        The process is forked at the first call. A signal interrupts a call that has reached the limit; if it swallows
        or blocks that, or runs in C, the process is killed, and the next call forks another one. So does one for which
        a callback, say, has changed an attribute of a function.
        """
        read = _attributes(self.functions, self.stateful.values())
        if (forks := _LIMITED.get(self)) is None or forks.parent != os.getpid() or forks.read != read:
            forks = _LIMITED[self] = Forks(1, self)
            forks.read = read
            forks.seconds = np.frombuffer(mmap.mmap(-1, 8))  # which both processes see
            forks.submit("state").result()  # what starts the process does not count
        future, why, started = None, "", time.perf_counter()
        forks.seconds[:] = np.nan
        try:
            future = forks.submit("_answer", *task)
            if wait([future], self.timeout).done:
                return future.result()
            for process in list(forks._processes.values()):
                stuck = waits_for_ever(process.pid)
                why = f": {forks.why}. Start them in the function, or set it to None" if stuck else ""
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)  # with what the call has started
            wait([future], _GRACE)
            raise RewardTimeout(f"no result within reward_timeout={self.timeout} s{why}")
        except BrokenProcessPool as error:
            raise RuntimeError("the function ended the process in which it is called") from error
        finally:
            known = not np.isnan(forks.seconds[0])
            self._seconds += float(forks.seconds[0] if known else time.perf_counter() - started)
            if future is None or not future.done() or isinstance(future.exception(), BrokenProcessPool):
                del _LIMITED[self]
                forks.end(at_once=True)

    def _answer(self, i: int, states: States, arguments: Mapping[str, list], trainer_state: Any) -> tuple:
        """Call a function in these states; return what `_called` does, and the states after the call."""

        def interrupt(number: int, frame: Any) -> None:
            raise _TimeIsUp

        signal.signal(signal.SIGTERM, interrupt)
        started = time.process_time()
        try:
            self.load_state(states)
            numbers, logged, shown = _called(self.functions[i], self.names[i], arguments, trainer_state)
            if not _can_be_sent(shown := plain(shown)):
                shown = [(column, list(map(repr, cells))) for column, cells in shown]
            return numbers, logged, shown, self.state()
        except BaseException as error:
            if not _can_be_sent(error):
                raise RuntimeError(repr(error)) from error.__cause__
            raise
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the call has just ended
            _LIMITED[self].seconds[:] = time.process_time() - started


def state_metrics(states: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return states as metrics to log.

    >>> state_metrics({"Objective": {"log_lambda": -0.5}})
    {'reward_state/Objective/log_lambda': -0.5}
    """
    return {f"reward_state/{name}/{key}": value for name, state in states.items() for key, value in state.items()}


def _stateful(functions: Sequence[RewardFunction], names: Sequence[str]) -> dict[str, Any]:
    """Return the functions that have a state, by name."""
    found: dict[str, Any] = {}
    for function, name in zip(map(_unwrapped, functions), names, strict=True):
        has = [method for method in METHODS if callable(getattr(function, method, None))]
        if not has:
            continue
        if missing := [method for method in METHODS if method not in has]:
            raise TypeError(f"reward function {name!r} has the method {has[0]} but no {missing[0]}: add all or none.")
        once = name not in found
        require(once, f"two reward functions with a state are called {name!r}: give each its own __name__.")
        found[name] = function
    return found


def _checked_state(state: Any, name: str) -> dict[str, float]:
    """Return the state of a function as floats; raise an error if it holds anything else."""
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        raise TypeError(f"reward function {name!r} has the state {state!r}: let state() return a dict of numbers.")
    for key, value in state.items():
        what = f"{key!r} in the state of reward function {name!r} is {value!r}"
        require(_is_finite(value), f"{what}: let state() return finite numbers.")
    return {key: float(value) for key, value in state.items()}


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _called(function: RewardFunction, name: str, arguments: Mapping[str, list], trainer_state: Any) -> tuple:
    """Call a function; return its rewards as numbers, and what it passed to `log_metric` and `log_extra`."""
    prompts, logged, shown = list(arguments["prompts"]), [], []
    given = arguments | {
        "trainer_state": trainer_state,
        "log_metric": lambda metric, value: logged.append((metric, float(value))),
        "log_extra": lambda column, values: shown.append((column, list(values))),
    }
    return _numbers(_result(function, given), name, prompts), logged, shown


def _can_be_sent(value: Any) -> bool:
    """Return whether a value arrives in another process."""
    try:
        ForkingPickler.loads(ForkingPickler.dumps(value))
    except Exception:  # whatever its class raises
        return False
    return True


def _result(function: RewardFunction, arguments: Mapping[str, Any]) -> Any:
    """Return the result of a function, and wait for that of an asynchronous one."""
    called = _unwrapped(function)
    if not (inspect.iscoroutinefunction(called) or inspect.iscoroutinefunction(type(called).__call__)):
        return function(**arguments)

    async def guarded() -> Any:
        try:
            return await function(**arguments)
        except SystemExit as error:  # would end the event loop, so the result would never come
            raise RuntimeError(f"the function called sys.exit({error.code!r})") from error

    future = asyncio.run_coroutine_threadsafe(guarded(), _event_loop(os.getpid()))
    try:
        return future.result()
    except BaseException as error:  # Ctrl-C, or a time-out
        future.cancel()
        if isinstance(error, _TimeIsUp):  # a function that blocks the loop would block later calls: wait to be killed
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), _event_loop(os.getpid())).result()
        raise


@functools.cache
def _event_loop(process: int) -> asyncio.AbstractEventLoop:
    """Return the event loop of this process, which runs in its own thread, as a notebook's runs in the main one.

    The loop stays open, since things that functions keep, such as connections, are bound to it. A forked process does
    not inherit its parent's threads and needs another loop.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="evoalign-rewards", daemon=True)
    thread.start()

    @atexit.register
    def end() -> None:
        if process == os.getpid():
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    return loop


_ATOMS = frozenset((str, int, float, bool, bytes, type(None)))


def _own(value: Any) -> Any:
    """Return a copy of a value in which a function may change anything; an object that cannot be copied is itself."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind in (list, tuple):
        return kind(value) if _ATOMS.issuperset(map(type, value)) else kind(map(_own, value))
    if kind is dict:
        return {name: _own(entry) for name, entry in value.items()}
    try:
        return copy.deepcopy(value)
    except Exception:  # a lock, a socket: whatever its class raises
        return value


def _unwrapped(function: RewardFunction) -> RewardFunction:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _attributes(functions: Sequence[RewardFunction], known: Iterable[Any]) -> list:
    """Return the numbers and texts among the attributes of functions without a known state."""
    fields = [getattr(f, "__dict__", {}) for f in functions if not any(f is each for each in known)]
    return [(name, x) for each in fields for name, x in each.items() if isinstance(x, (str, Number))]


def _declared(function: RewardFunction, name: str) -> float | None:
    function = _unwrapped(function)
    return getattr(function, name, getattr(inspect.getmodule(function), name, None))


def _calls(
    call: Callable[[slice], _Part], n: int, name: str, floor: float | None, prompts: Sequence, failures: list
) -> list[_Part]:
    """Call a function for n completions at once or, if that fails, for each of them, and return the results."""

    def parts(items: slice, whole: bool) -> list[_Part]:
        try:
            return [call(items)]
        except (RewardOutage, DataError):
            raise
        except (Exception, SystemExit) as error:  # or sys.exit() would end the run with status 0, as if complete
            singly = [part for i in range(n) for part in parts(slice(i, i + 1), False)] if whole else []
            if floor is None:
                where = f"on {n} prompts at once, though on no single one" if whole else _shown(prompts[items.start])
                raise RewardError(_failure(name, where, repr(error))) from error
            if whole:
                return singly
            failures.append(("timeout" if isinstance(error, RewardTimeout) else "exception", f"{error!r:.500}"))
            return [(items, [floor], [], [])]

    return parts(slice(0, n), True)


def _numbers(returned: Any, name: str, prompts: Sequence) -> list[float | None]:
    """Return the rewards that a function returned as numbers, with None where it did not apply."""
    remedy = "return a list with a number (or None) for each completion"
    named = isinstance(returned, (Mapping, Set, str, bytes)) or hasattr(returned, "columns")  # iterates over names
    if named or not hasattr(returned, "__iter__"):
        raise DataError(f"reward function {name!r} returned a {type(returned).__name__}, {returned!r:.200}: {remedy}.")
    # a generator, a map or another lazy iterable is computed only here, which may fail, hang or never end
    returned = list(returned if hasattr(returned, "__len__") else itertools.islice(returned, len(prompts) + 1))
    if len(returned) != len(prompts):
        what = f"{len(returned)} rewards for {len(prompts)} completions"
        raise DataError(f"reward function {name!r} returned {what}: {remedy}.")
    return [v if v is None else _number(v, name, prompt) for v, prompt in zip(returned, prompts, strict=True)]


def _floored(numbers: Sequence, name: str, floor: float | None, prompts: Sequence, failures: list) -> np.ndarray:
    """Return the rewards of a call, with None as NaN and non-finite numbers as the floor."""
    values = np.array(numbers, dtype=float)
    for i in np.flatnonzero(~np.isfinite(values)):
        if (number := numbers[i]) is not None:
            if floor is None:
                raise RewardError(_failure(name, _shown(prompts[i]), str(number)))
            failures.append(("nan", str(number)))
            values[i] = floor
    return values


def _number(value: Any, name: str, prompt: Any) -> float:
    # float() would accept strings, and drop the imaginary part of a complex number
    if not isinstance(value, (str, bytes, complex)) and "complex" not in str(getattr(value, "dtype", "")):
        try:
            return float(value)
        except OverflowError:  # an integer beyond float64
            return math.inf
        except (TypeError, ValueError, RuntimeError):
            pass
    raise DataError(f"reward function {name!r} returned {value!r:.200} {_shown(prompt)}: return a number or None.")


def _failure(name: str, where: str, what: str) -> str:
    remedy = "Correct it, or set reward_floor so that failures score the floor and are counted."
    return f"reward function {name!r} gave {what} {where}. {remedy}"


def _shown(prompt: Any) -> str:
    return f"on prompt {str(prompt)[:200]!r}"
