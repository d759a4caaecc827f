"""How a training step of ES and of GRPO scales over GPUs: a simulation, and laws of scaling fitted to its times.

The simulation is one of discrete events (simpy). A GPU decodes by continuous batching: a decode step takes
`step` + `sequence` x running sequences, as where memory is the limit, and the place of a sequence that ends goes to the
next one. All times are in one unit that the caller chooses; bandwidth is in bytes per that unit, a length in tokens.

What it leaves out: a GPU holds a whole model; computing hides no communication; the reward takes no time; and times of
equal work are equal, so that all spread is that of the lengths.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil, inf, log2, nan, sqrt
from typing import Any

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

from evoalign_lib.analysis.arrays import array, require
from evoalign_lib.analysis.stats import Interval
from evoalign_lib.checks import choose, whole_number

MESSAGE = 8
"""Bytes that ES sends for a member: its reward and its seed."""
LAWS = {"amdahl": ("serial",), "usl": ("sigma", "kappa")}
"""Law of scaling -> its parameters."""


@dataclass(frozen=True)
class Machine:
    """What work costs on a GPU, and messages between GPUs. Times in the caller's unit."""

    slots: int
    """Sequences that a GPU decodes at once, at most."""
    step: float
    """Time of a decode step, whatever it decodes: a read of the weights."""
    sequence: float
    """Time that each running sequence adds to a decode step: a read of its keys and values."""
    prefill: float = 0.0
    """Time to read one prompt."""
    member: float = 0.0
    """Time to write the weights of a member, a pass over them."""
    update: float = 0.0
    """Time of one member's part of the update of ES, on a GPU."""
    train_token: float = 0.0
    """Time of a forward and a backward pass, per token."""
    optimizer: float = 0.0
    """Time of an optimizer's step, on a GPU."""
    parameters: int = 0
    """Of the model, which travel as 2 bytes each."""
    latency: float = 0.0
    """Time of a message without content."""
    bandwidth: float = inf
    """Bytes per unit of time that a GPU sends."""

    def rewards(self, members: int, gpus: int) -> float:
        """Return the time until every GPU has `MESSAGE` bytes of every member: an all-gather."""
        return self.latency * _rounds(gpus) + MESSAGE * members * (gpus - 1) / gpus / self.bandwidth

    def gradients(self, gpus: int) -> float:
        """Return the time to sum gradients of 2 bytes a parameter over all GPUs: a ring all-reduce.

        2 (G - 1) messages, each of a G-th of the gradient (Patarasuk and Yuan 2009).
        """
        return 2 * (gpus - 1) * (self.latency + 2 * self.parameters / gpus / self.bandwidth)

    def weights(self, gpus: int) -> float:
        """Return the time to bring 2 bytes a parameter from the trainer to all generators, a pipelined broadcast."""
        return self.latency * _rounds(gpus) + (2 * self.parameters / self.bandwidth if gpus > 1 else 0.0)


def _rounds(gpus: int) -> int:
    return ceil(log2(gpus))


@dataclass(frozen=True)
class Step:
    """Where the time of a training step goes."""

    generation: float
    """Until the last completion ends."""
    update: float
    """Of the weights, with the backward pass of GRPO."""
    communication: float
    """Messages that all GPUs wait for."""
    idle: float
    """Share of the GPUs' time in generation during which they had no work left."""

    @property
    def total(self) -> float:
        """Time of the step."""
        return self.generation + self.update + self.communication


# ---- simulation


def draw_lengths(histogram: Mapping[int, int], shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw lengths from an empirical distribution.

    Args:
        histogram: length in tokens -> how often it was seen.
        shape: of the result.
        rng: makes the draw reproducible.
    """
    values, counts = np.array(list(histogram)), np.array(list(histogram.values()), np.float64)
    return rng.choice(values, size=shape, p=counts / counts.sum())


def evolution_step(machine: Machine, lengths: ArrayLike, gpus: int, shared: bool = False) -> Step:
    """Simulate a step of ES on some GPUs.

    Every GPU updates itself, a pass per member, from the rewards of all.

    Args:
        machine: what work and messages cost.
        lengths: (members, prompts), tokens of each completion, above 0.
        gpus: at least 1.
        shared: members are adapters, and requests of any members share the batch of a GPU. Otherwise a GPU decodes one
            member at a time, whose weights it writes first; GPUs beyond the number of members have no work then.

    Returns:
        The step. Without `shared`, further GPUs never make generation longer. With it they may where `sequence` is
        above 0, since requests are dealt out before their lengths are known.

    Raises:
        ValueError: no GPU, or lengths of another shape, or not above 0.
    """
    matrix = _checked(lengths, gpus)
    members = len(matrix)
    generation, idle = _generation(machine, matrix.ravel() if shared else matrix, gpus)
    update = members * machine.update
    return Step(generation, update, machine.rewards(members, gpus), idle)


def policy_step(machine: Machine, lengths: ArrayLike, gpus: int, prompt_tokens: int = 0) -> Step:
    """Simulate a step of GRPO on some GPUs that generate first and train then.

    The backward pass is data-parallel: completions are dealt to the GPUs in turn, and all wait for the one with the
    most tokens. Gradients are summed over all GPUs, and new weights sent to the generators.

    Args:
        machine: what work and messages cost.
        lengths: (prompts, completions of each), tokens of each completion, above 0.
        gpus: at least 1.
        prompt_tokens: before each completion, that are trained on, too.

    Raises:
        ValueError: no GPU, or lengths of another shape, or not above 0.
    """
    flat = _checked(lengths, gpus).ravel()
    generation, idle = _generation(machine, flat, gpus)
    most = max(float((flat[i::gpus] + prompt_tokens).sum()) for i in range(gpus))
    update = most * machine.train_token + machine.optimizer
    return Step(generation, update, machine.gradients(gpus) + machine.weights(gpus), idle)


def stragglers(step: Callable[[NDArray[np.float64]], Step], lengths: ArrayLike) -> float:
    """Return the share of a step's time that is lost because completions differ in length.

    That is 1 - time if every completion had the mean length / time. It can be a little below 0 where the equal lengths
    happen to fill the slots worse.

    Args:
        step: simulates a step from lengths.
        lengths: as `step` takes them.
    """
    matrix = np.asarray(lengths, np.float64)
    return 1 - step(np.full_like(matrix, matrix.mean())).total / step(matrix).total


def _checked(lengths: ArrayLike, gpus: int) -> NDArray[np.float64]:
    found = array("lengths", lengths, 2)
    require((found > 0).all(), f"lengths are {found.min():g} at least: give numbers above 0.")
    whole_number("gpus", gpus)
    return found


def _generation(machine: Machine, work: NDArray[np.float64], gpus: int) -> tuple[float, float]:
    """Return the time until all is decoded, and the idle share.

    work: (members, prompts), a member to a GPU at a time; or (requests,), which any GPU takes when it has a free slot.
    """
    import simpy

    env, queue, ended = simpy.Environment(), deque(work.tolist()), []

    def serve(first: list[float]) -> Iterator[Any]:
        if work.ndim == 1:
            yield from _decode(env, machine, queue, first)
        else:
            while queue:
                own = deque(queue.popleft())
                yield env.timeout(machine.member)
                yield from _decode(env, machine, own, [])
        ended.append(env.now)  # work never stops before: a GPU is busy from the start to here

    dealt: list[list[float]] = [[] for _ in range(gpus)]
    if work.ndim == 1:  # the first requests go to all GPUs in turn, else the first GPU would fill up alone
        for i in range(min(len(queue), gpus * machine.slots)):
            dealt[i % gpus].append(queue.popleft())
    for first in dealt:
        env.process(serve(first))
    env.run()
    return float(env.now), 1 - sum(ended) / (gpus * env.now)


def _decode(env: Any, machine: Machine, queue: deque[float], first: list[float]) -> Iterator[Any]:
    """Decode requests on one GPU: those it was given first, and those that it takes from a queue until that is empty.

    Between two ends of sequences the steps are all alike, and one event.
    """
    running: list[float] = []  # a heap of the steps at which sequences end
    now, waiting = 0.0, deque(first)
    while waiting or queue or running:
        taken = 0
        while len(running) < machine.slots and (waiting or queue):
            heappush(running, now + (waiting or queue).popleft())
            taken += 1
        yield env.timeout(
            taken * machine.prefill + (running[0] - now) * (machine.step + machine.sequence * len(running))
        )
        now = running[0]
        while running and running[0] == now:
            heappop(running)


# ---- laws of scaling


@dataclass(frozen=True)
class Fit:
    """A law of scaling, fitted to times."""

    law: str
    """A key of `LAWS`."""
    parameters: Mapping[str, Interval]
    """Amdahl: `serial`, the share of the time on one GPU that more do not shorten. Universal scalability law: `sigma`,
    the share of contention, and `kappa`, of coherence, which grows with every pair of GPUs."""
    one: float
    """Time on one GPU, by the law."""
    error: float
    """Root mean square of law / time - 1."""


def usl(gpus: ArrayLike, sigma: float, kappa: float = 0.0) -> NDArray[np.float64]:
    """Return the speed-up of the universal scalability law, G / (1 + sigma (G - 1) + kappa G (G - 1)).

    Gunther, Guerrilla Capacity Planning (2007). With kappa = 0 it is Amdahl's law (1967), sigma the serial share.

    >>> float(usl(16, 0.0))
    16.0
    """
    g = np.asarray(gpus, np.float64)
    return g / (1 + sigma * (g - 1) + kappa * g * (g - 1))


def fit(law: str, gpus: ArrayLike, times: ArrayLike, n_resamples: int = 1000, seed: int = 0) -> Fit:
    """Fit a law to times of a step, or to a target, on several numbers of GPUs.

    Speed-ups are ratios of times, and the time on one GPU is fitted with the law, so that times which begin at 16 GPUs
    can be fitted, too. As a time a law is linear, p / G + q + r (G - 1) with p, q, r >= 0, so that non-negative least
    squares of law / time - 1 find the one best fit: every number of GPUs counts the same.

    Args:
        law: a key of `LAWS`.
        gpus: (counts,), at least two different ones.
        times: (counts,) or (draws, counts), above 0; the means over draws are fitted.
        n_resamples: bootstrap resamples of the draws; 95 % percentile intervals.
        seed: of the resamples.

    Returns:
        The fit; intervals are NaN where there is one draw.

    Raises:
        ValueError: an unknown law, other shapes, or times that are not above 0.
    """
    g, draws = np.asarray(gpus, np.float64), np.atleast_2d(np.asarray(times, np.float64))
    choose("law", law, LAWS)
    fits = draws.shape[1] == g.size and len(set(g.tolist())) > 1 and (draws > 0).all()
    require(fits, f"times of shape {draws.shape} at {g.size} numbers of GPUs: give one above 0 for each, 2 or more.")
    columns = [1 / g, np.ones_like(g), g - 1][: 1 + len(LAWS[law])]

    def fitted(mean: NDArray[np.float64]) -> tuple[float, list[float], float]:
        """Return the time on one GPU, the parameters, and the relative error."""
        x, error = _least_squares(columns, mean)
        one = float(x[0] + x[1])
        return one, [float(value) / one for value in x[1:]], error

    one, values, error = fitted(draws.mean(0))
    ends = np.full((2, len(values)), nan)
    if len(draws) > 1:
        chosen = np.random.default_rng(seed).integers(len(draws), size=(n_resamples, len(draws)))
        ends = np.percentile([fitted(draws[rows].mean(0))[1] for rows in chosen], [2.5, 97.5], axis=0)
    found = zip(LAWS[law], values, *ends.tolist(), strict=True)
    return Fit(law, {name: Interval(*interval, len(draws)) for name, *interval in found}, one, error)


@dataclass(frozen=True)
class Overlay:
    """Published times as a simulated step and what it lacks; all but the error in the unit of the published times."""

    scale: float
    """Published time per simulated time: how many steps it takes to the target, and units."""
    overhead: float
    """Time that is the same on any number of GPUs."""
    work: float
    """Time on one GPU that divides evenly: what the simulation counts too low of computing."""
    error: float
    """Root mean square of fitted / published - 1."""

    def times(self, gpus: ArrayLike, simulated: ArrayLike) -> NDArray[np.float64]:
        """Return scale x simulated + overhead + work / gpus, (counts,)."""
        return self.scale * np.asarray(simulated) + self.overhead + self.work / np.asarray(gpus)


def fit_published(gpus: ArrayLike, simulated: ArrayLike, published: ArrayLike) -> Overlay:
    """Fit simulated times to published ones, by non-negative least squares of fitted / published - 1.

    Two parameters are free: the scale and, where the published times scale worse than the simulated ones, an overhead;
    where they scale better, work that divides evenly. Of two points nothing is left that could contradict the fit,
    unless the scale comes to 0: the published times then scale at least as well as work that divides evenly.

    Args:
        gpus: (counts,).
        simulated: (counts,), times of a step.
        published: (counts,), times to a target, in any unit.

    Raises:
        ValueError: other shapes, fewer than two counts, or times that are not above 0.
    """
    g, model, goal = (np.asarray(values, np.float64) for values in (gpus, simulated, published))
    fits = g.shape == model.shape == goal.shape and g.ndim == 1 and g.size > 1 and min(model.min(), goal.min()) > 0
    require(fits, f"times of shapes {model.shape} and {goal.shape} at {g.shape}: give 2 or more above 0 of each.")
    (scale, overhead), error = _least_squares([model, np.ones_like(g)], goal)
    work = 0.0
    if overhead == 0:
        (scale, work), error = _least_squares([model, 1 / g], goal)
    return Overlay(float(scale), float(overhead), float(work), error)


def _least_squares(columns: list[NDArray[np.float64]], goal: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Return the non-negative weights of the columns whose sum is nearest to the goal, and the relative error."""
    x, rest = scipy.optimize.nnls(np.stack(columns, 1) / goal[:, None], np.ones_like(goal))
    return x, float(rest) / sqrt(len(goal))


# ---- break-even


def break_even_members(machine: Machine, gpus: int) -> float:
    """Return the population at which ES and GRPO spend equally long on all but generation and the backward pass.

    Derived here, not quoted. ES sends 8 bytes a member and makes a pass over the weights for each, on every GPU; GRPO
    sums gradients of 2 d bytes, steps its optimizer and sends 2 d bytes of weights:

        N update + rewards(N, G)  <=  gradients(G) + optimizer + weights(G)

    The left side is linear in N. Update passes, optimizer and all-reduce are all in proportion to d: without latency
    the largest N depends on the rate of the noise and on the bandwidth, not on the size of the model. A smaller
    population has the cheaper step; which arm is sooner at a target also depends on how many steps each takes.

    Returns:
        The number of members, 0 where none is cheap enough, inf where members cost nothing.

    Raises:
        ValueError: no GPU.
    """
    whole_number("gpus", gpus)
    spared = machine.gradients(gpus) + machine.optimizer + machine.weights(gpus) - machine.rewards(0, gpus)
    each = machine.update + machine.rewards(1, gpus) - machine.rewards(0, gpus)
    return max(spared, 0.0) / each if each else inf
