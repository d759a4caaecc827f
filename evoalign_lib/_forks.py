"""Worker processes that are forked: each begins with all that this process has loaded or made, and ends with it."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import platform
import re
import select
import selectors
import signal
import socket
import sys
import threading
import time
import warnings
import weakref
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from evoalign_lib._interrupts import interrupts_wait

_FUTEX = {"x86_64": "202", "aarch64": "98"}.get(platform.machine())  # Linux's number of the call that waits for a lock
_LOOK, _STUCK = 2.0, 5  # seconds between two looks at a pool; looks until a process counts as stuck
_OWN = re.compile("_MainThread|_ExecutorManager|TMonitor| (evoalign-|QueueFeeder)")  # threads that nobody waits for
_owner: Any = None  # in a fork: the object whose methods it calls


class Forks(ProcessPoolExecutor):
    """A pool of forked processes that call methods of an object, and leave Ctrl-C to this process.

    A fork has none of the threads that ran before it, and shares the selectors of event loops. It gets new ones for
    executors and for asyncio's loops; whatever waits for another thread waits for ever (`waits_for_ever`). Connections
    over a network that were open before are closed in it, so that its clients open their own. What it starts ends with
    it if it is killed.

    Args:
        workers: number of processes.
        owner: the object; the pool holds no reference to it.
        watch: whether to kill a process that waits for ever, which breaks the pool.

    Attributes:
        parent: id of the process that forks.
        why: what forks lack, for errors.
        stuck: whether a process was killed because it waited for ever.
    """

    stuck = False

    def __init__(self, workers: int, owner: Any, watch: bool = False):
        self.parent = os.getpid()
        super().__init__(workers, multiprocessing.get_context("fork"), _start, (self.parent, weakref.ref(owner)))
        own = weakref.ref(self)
        # if this process is such a fork itself, it would wait for them before it ends them
        multiprocessing.util.Finalize(self, lambda: (pool := own()) and pool.end(at_once=True), exitpriority=100)
        others = [each.name for each in threading.enumerate() if not _OWN.search(f"{type(each)} {each.name}")]
        self.why = f"forked processes lack the threads that ran before ({', '.join(others) or 'of libraries'})"
        if watch:
            threading.Thread(target=_watch, args=(own,), name="evoalign-forks", daemon=True).start()

    def submit(self, method: str, *arguments: Any) -> Future:
        """Call a method in one of the processes; the first call forks all of them, without an interrupt in between."""
        with warnings.catch_warnings(), interrupts_wait():
            # Python 3.12 warns about forking a process with threads
            warnings.simplefilter("ignore", DeprecationWarning)
            return super().submit(_call, method, *arguments)

    def end(self, at_once: bool = False) -> None:
        """End the processes, killing them if `at_once`."""
        for process in list((self._processes or {}).values()) if at_once else ():
            _kill(process)
        self.shutdown(wait=not at_once, cancel_futures=True)


def _start(parent: int, owner: Any) -> None:
    global _owner
    _owner = owner
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setsid()  # so that what it starts can be killed with it
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads are gone, too
    _close_connections()
    start_worker(parent)
    for found in gc.get_referrers(ThreadPoolExecutor, asyncio.SelectorEventLoop):
        if type(found) is ThreadPoolExecutor and not found._shutdown:
            found.__init__(found._max_workers, found._thread_name_prefix, found._initializer, found._initargs)
        elif type(found) is asyncio.SelectorEventLoop and not found.is_closed():
            found._selector = selectors.DefaultSelector()
            found._make_self_pipe()


def _close_connections() -> None:
    """Put a socket at its end in place of each connection, which would mix this process's requests with others'."""
    dead, other = socket.socketpair()
    other.close()
    for number in map(int, os.listdir("/proc/self/fd" if sys.platform == "linux" else "/dev/fd")):
        try:
            with socket.socket(fileno=os.dup(number)) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.getpeername():
                    os.dup2(dead.fileno(), number, inheritable=False)
        except OSError:  # no socket, or one without a connection
            continue
    dead.close()


def _kill(process: Any) -> None:
    """Kill a fork and all that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it has just been forked
        process.kill()


def _call(method: str, *arguments: Any) -> Any:
    return getattr(_owner(), method)(*arguments)


def _watch(reference: weakref.ref) -> None:
    looks: dict[int, int] = {}
    while (pool := reference()) is not None and pool._processes is not None:
        for number, process in list(pool._processes.items()):
            looks[number] = looks.get(number, 0) + 1 if waits_for_ever(number) else 0
            if looks[number] == _STUCK:
                pool.stuck = True
                _kill(process)
        del pool
        time.sleep(_LOOK)


def waits_for_ever(process: int) -> bool:
    """Return whether a worker waits without limit for another of its threads, though all of these wait, too.

    Also False where the system does not tell.
    """
    try:
        calls = {task.name: (task / "syscall").read_text().split() for task in Path(f"/proc/{process}/task").iterdir()}
    except OSError:
        return False
    # for a lock that no other process has (bit 7), and without a limit of time
    waiting = [name for name, c in calls.items() if c[0] == _FUTEX and int(c[2], 16) & 128 and int(c[4], 16) == 0]
    return str(process) in waiting and len(calls) - len(waiting) <= 1  # the other one is that of `end_with`


def start_worker(parent: int) -> None:
    """Set up a worker process: one thread, its own progress-bar lock, and an end when its parent ends or is killed.

    Args:
        parent: process id of the parent.
    """
    import torch

    torch.set_num_threads(1)
    own_progress_bars()
    end_with(parent)


def own_progress_bars() -> None:
    """Give this process a lock of its own for progress bars.

    tqdm's lock is a semaphore that forked processes share: a process that dies while holding it would block all others.
    Subclasses are set as well: one used before its base class (transformers uses tqdm.auto) has a lock of its own.
    """
    from tqdm import tqdm

    lock, bars = threading.RLock(), [tqdm]
    for bar in bars:  # the list grows in the loop
        bar.set_lock(lock)
        bars += bar.__subclasses__()


def end_with(process: int) -> None:
    """Make this process end within half a second after another one ends or is killed.

    Args:
        process: process id of the parent, or of any other process of this user on this machine.
    """
    parent = os.getppid() == process
    try:  # the system may reuse an id for another process; a file descriptor refers to this one only
        watched = None if parent else os.pidfd_open(process)
    except ProcessLookupError:
        os._exit(1)

    def watch() -> None:
        while os.getppid() == process if parent else not select.select([watched], [], [], 0)[0]:
            time.sleep(0.5)
        if os.getsid(0) == os.getpid():
            os.killpg(0, signal.SIGKILL)  # with what it has started
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
