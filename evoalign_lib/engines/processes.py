"""Processes: how many to start, how they end together, and which one of a launch this is."""

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
    """Return the number of cores that this process may use, 1 where the system does not say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def default_workers() -> int:
    """Return one single-thread worker per core that this process may use (1 where processes cannot be forked)."""
    return cores() if sys.platform.startswith("linux") else 1


def world_size() -> int:
    """Return the number of processes in this launch, as torchrun and `accelerate launch` set it; 1 without a launch."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Return the number of this process in its launch; 0 without a launch."""
    return int(os.environ.get("RANK", "0"))


def gpus_here() -> int:
    """Return the number of GPUs that torch sees in this process; nothing is started on them."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@contextmanager
def threads(n: int) -> Iterator[None]:
    """Let torch compute with n threads in this process while the context lasts."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(n)
        yield
    finally:
        torch.set_num_threads(before)


one_thread = partial(threads, 1)


def start_worker(parent: int) -> None:
    """Set up a worker process: one thread, its own lock for progress bars, and it ends with its parent, killed or not.

    Args:
        parent: process id of the parent.
    """
    torch.set_num_threads(1)
    own_progress_bars()
    end_with(parent)


def own_progress_bars() -> None:
    """Give this process a lock of its own for progress bars.

    tqdm's lock is a semaphore that forked processes share: one that dies while holding it would stop all others. A
    class of bars that was used before its base, as transformers uses tqdm.auto, has a lock that is not its base's.
    """
    lock, bars = threading.RLock(), [tqdm]
    for bar in bars:  # which grows
        bar.set_lock(lock)
        bars += bar.__subclasses__()


def end_with(process: int) -> None:
    """End this process within half a second after another one has ended, killed or not.

    Args:
        process: process id, of the parent or of any other process of the user's on this machine.
    """
    parent = os.getppid() == process
    try:  # an id may be given to another process; a file descriptor stands for this one alone
        watched = None if parent else os.pidfd_open(process)
    except ProcessLookupError:
        os._exit(1)

    def watch() -> None:
        while os.getppid() == process if parent else not select.select([watched], [], [], 0)[0]:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
