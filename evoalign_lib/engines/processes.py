"""Processes: how many to start, how they end together, and which part a process of a launch has."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from tqdm import tqdm


def default_workers() -> int:
    """One single-thread worker for each core this process may use (1 where processes cannot be forked)."""
    return len(os.sched_getaffinity(0)) if sys.platform.startswith("linux") else 1


def world_size() -> int:
    """Number of processes in this launch, from what torchrun and `accelerate launch` set; 1 without a launch."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Number of this process in its launch; 0 without a launch."""
    return int(os.environ.get("RANK", "0"))


@contextmanager
def one_thread() -> Iterator[None]:
    """While the context lasts torch computes with one thread in this process."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(threads)


def start_worker(parent: int) -> None:
    """Set up a worker process: one thread, a lock of its own for progress bars, and it ends with its parent, even with
    one that is killed.

    Args:
        parent: process id of the parent.
    """
    torch.set_num_threads(1)
    # tqdm's lock is a semaphore that forked processes share: one that dies holding it would stop all others for good
    tqdm.set_lock(threading.RLock())

    end_with(parent)


def end_with(process: int) -> None:
    """End this process, within half a second, when another one is gone, even one that was killed.

    Args:
        process: process id, of the parent or of any other process of the user's on this machine.
    """
    if os.getppid() == process:

        def gone() -> bool:
            return os.getppid() != process
    else:  # its id may be given to another process: what is opened stands for this one alone
        try:
            opened = select.poll()
            opened.register(os.pidfd_open(process), select.POLLIN)
        except ProcessLookupError:
            os._exit(1)

        def gone() -> bool:
            return bool(opened.poll(0))

    def watch() -> None:
        while not gone():
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
