"""Helpers for processes: how many to start, their threads, and this process's place in a launch."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch


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
