"""Helpers for processes: how many to start, how to end them together, and this process's place in a launch."""

import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from tqdm import tqdm


def cores() -> int:
    """Return the number of cores that this process may use, or 1 if the system does not say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def default_workers() -> int:
    """Return the default number of workers: one per core that this process may use (1 if it cannot fork)."""
    return cores() if sys.platform.startswith("linux") else 1


def world_size() -> int:
    """Return the number of processes in this launch, as torchrun and `accelerate launch` set it; 1 without a launch."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Return the rank of this process in its launch; 0 without a launch."""
    return int(os.environ.get("RANK", "0"))


def gpus_here() -> int:
    """Return the number of GPUs that torch sees in this process, without starting anything on them."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@contextmanager
def threads(n: int) -> Iterator[None]:
    """Make torch compute with n threads in this process inside the context."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(n)
        yield
    finally:
        torch.set_num_threads(before)


one_thread = partial(threads, 1)


def start_worker(parent: int) -> None:
    """Set up a worker process: one thread, its own progress-bar lock, and an end when its parent ends or is killed.

    Args:
        parent: process id of the parent.
    """
    torch.set_num_threads(1)
    own_progress_bars()
    end_with(parent)


def own_progress_bars() -> None:
    """Give this process a lock of its own for progress bars.

    tqdm's lock is a semaphore that forked processes share: a process that dies while holding it would block all others.
    Subclasses are set as well: one used before its base class (transformers uses tqdm.auto) has a lock of its own.
    """
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
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
