"""What runs that train tasks in turn lost of earlier ones, and how far they went, read from their records."""

import numpy as np

from evoalign_study.records import Record

_PUBLISHED = ("countdown", "math", "chemistry", "boolq")
ORDERS = {"published": _PUBLISHED, "reversed": _PUBLISHED[::-1]}
"""Orders of the tasks; the first is that of Hoy et al. (arXiv 2604.01499)."""


def matrix(record: Record, decoding: str) -> np.ndarray:
    """Return a run's accuracy on the tasks in the order of its training, (1 + tasks, tasks): a row before the first
    task and one after each."""
    return np.array([record["curve"][f"{task}_{decoding}"] for task in ORDERS[record["spec"]["order"]]]).T


def forgotten(record: Record, decoding: str) -> float:
    """Return what a run lost on the earlier tasks after it had trained them, the mean over all tasks but the last.

    It is minus the backward transfer of Lopez-Paz and Ranzato (arXiv 1706.08840): accuracy on a task right after it was
    trained, less that at the end.
    """
    right = matrix(record, decoding)
    return float(np.mean(np.diagonal(right[1:])[:-1] - right[-1, :-1]))


def learned(record: Record, decoding: str) -> float:
    """Return how often a run is right on a task right after it was trained, the mean over all tasks."""
    return float(np.mean(np.diagonal(matrix(record, decoding)[1:])))


def knows_ties(record: Record) -> bool:
    """Return whether a record lists all of its tied steps; those of the first runs do not."""
    return len(record.get("tied_steps", ())) == record["counts"]["tied"]


def norms_over_law(record: Record) -> np.ndarray:
    """Return an ES run's norm after each task over alpha sqrt(d T / N), T without tied steps, (tasks,)."""
    spec, steps = record["spec"], np.array(record["curve"]["step"][1:])
    moved = steps - np.searchsorted(record.get("tied_steps", []), steps)  # a run without ties may list none
    law = spec["alpha"] * np.sqrt(record["d"] * moved / spec["population_size"])
    return np.array(record["curve"]["norm"][1:]) / law
