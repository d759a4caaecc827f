"""The singular values of an adapter and their search by CMA-ES: what `evoalign_lib.essa` and a ledger's replay share.

`decompose` makes of an adapter a list of directions: adding delta_i to the i-th singular value adds delta_i u_i w_i^T
to one of the adapter's tensors. `SingularWeights` are the weights of a run, those at the mean of a search distribution
over delta, which CMA-ES (`cma`) moves; its normals come from the noise law.

What CMA-ES does next is a function of the rewards so far: its state is never stored but computed again, from a ledger
or for a checkpoint, which takes no evaluation. Tensors are written with sums in one order, elementwise, so they depend
on delta alone; decompositions of matrices are LAPACK's, with one thread, and their bits are those of one machine
(`machine`). Signs of eigenvectors are fixed, so that another LAPACK draws nearly the same candidates and not others:
there a replay checks the search's sigma and distance at every step, within `TOLERANCE`, and no digests.
"""

import math
import mmap
import platform
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from evoalign_lib import noise
from evoalign_lib._adapters import open_package
from evoalign_lib._interrupts import interrupts_wait
from evoalign_lib.checks import choose, positive, whole_number
from evoalign_lib.engines.processes import one_thread
from evoalign_lib.precision import MasterWeights
from evoalign_lib.update_rules import Member, population, standardise

DECOMPOSITIONS = ("separate", "product")
SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "population_size": (whole_number, 4, None, "CMA-ES selects the better half"),
    "sigma": (positive,),
    "leading_share": (positive, 1),
    "decomposition": (choose, DECOMPOSITIONS),
}
"""settings that decide how rewards become weights in a search -> what checks them, a function of name, value and
further arguments; `evoalign_lib.essa.ESSAConfig` says what they are"""
TOLERANCE = 1e-6
"""relative difference of sigma and distance that a replay on another machine may have at any step"""
SIGMA, DISTANCE = "search/sigma", "search/distance"
"""metrics of each step: the step size before it, and the length of the mean of delta"""
_NORMALS = noise.parameter_id("the singular values of an adapter")  # of the noise law; no parameter has this name
SEARCH = "cma-es"
"""the setting `search` of such a run"""


def leading(rank: int, share: float) -> int:
    """Return how many of a matrix's singular values are searched: floor(rank * share), but for errors of rounding.

    >>> leading(8, 0.1), leading(100, 0.29), leading(3, 1 / 3)
    (0, 29, 1)
    """
    return math.floor(round(rank * share, 9))


# ---- decompositions


class Part(NamedTuple):
    """Directions in which one tensor of an adapter moves."""

    name: str
    """of the tensor"""
    first: int
    """coordinate of the first direction"""
    u: np.ndarray
    """float64 (k, rows)"""
    w: np.ndarray
    """float64 (k, columns)"""


class Decomposition(NamedTuple):
    """An adapter's singular values and the directions that belong to them."""

    parts: list[Part]
    values: np.ndarray
    """float64 (dimension,): singular values at the start, matrix by matrix, the largest of each first"""
    undetermined: str | None
    """why some directions are arbitrary; None: none is"""


def pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the names of the matrices A and B of each adapted matrix.

    Args:
        names: of all that moves.

    Raises:
        ValueError: something else moves than the A and B of LoRA layers.
    """
    found = [(name, name.replace(".lora_A.", ".lora_B.")) for name in names if ".lora_A." in name]
    others = [name for name in names if name not in {each for pair in found for each in pair}]
    if others or not found:
        remedy = "give a LoraConfig of plain layers, without bias, DoRA and modules_to_save"
        raise ValueError(f"{(others or list(names))[0]!r} is to be trained, which is no A or B of LoRA: {remedy}.")
    return found


def decompose(tensors: Mapping[str, np.ndarray], leading_share: float, decomposition: str) -> Decomposition:
    """Return the directions in which the leading singular values of an adapter change it.

    "separate" (ESSA version 3, arXiv 2507.04453v3): A = U_A S_A V_A^T and B = U_B S_B V_B^T, each by itself, so that
    delta gives U (S + diag(delta)) V^T = A + sum_i delta_i u_i v_i^T. "product" (version 1): B A = U S V^T, and
    u_i v_i^T = (u_i u_i^T B / s_i) A moves B by delta_i u_i w_i^T with w_i = B^T u_i / s_i while A stays.

    Args:
        tensors: name -> float32 matrix, A of (rank, inputs) and B of (outputs, rank) for each adapted matrix.
        leading_share: of each one's singular values.
        decomposition: "separate" or "product".

    Returns:
        Directions of unit length with "separate", parts in the order of `pairs`, A before B; the dimension is the
        number of adapted matrices * floor(rank * leading_share), with "separate" twice that.

    Raises:
        ValueError: what moves is no LoRA, no matrix, or has no singular value in that share.
    """
    parts, values, undetermined, first = [], [], None, 0
    for name_a, name_b in pairs(list(tensors)):
        a, b = tensors[name_a], tensors[name_b]
        if a.ndim != 2 or b.ndim != 2:
            raise ValueError(f"{name_a!r} has the shape {a.shape}: only adapters of linear layers are searched.")
        rank = len(a)
        if not (k := leading(rank, leading_share)):
            what = f"leading_share={leading_share} of the {rank} singular values of {name_a!r} is none, rounded down"
            raise ValueError(f"{what}: use at least {math.ceil(1000 / rank) / 1000:g}, or a higher rank.")
        found = [(name_a, *_svd(a)), (name_b, *_svd(b))] if decomposition == "separate" else [(name_b, *_of_b(a, b))]
        for name, u, s, w in found:
            if len(s) < k or s[k - 1] <= s[0] * max(a.shape + b.shape) * np.finfo(np.float64).eps:
                rest = "is zero" if not s[0] else f"has fewer than {k} singular values that are not zero"
                undetermined = undetermined or f"{name!r} {rest}"
            parts.append(Part(name, first, u[:k], w[:k]))
            values.append(s[:k])
            first += len(values[-1])
    return Decomposition(parts, np.concatenate(values), undetermined)


@one_thread()  # with several LAPACK gives other bits
def _svd(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return u (k, rows), singular values (k,) and w (k, columns) of a matrix, float64."""
    u, s, w = torch.linalg.svd(torch.from_numpy(matrix.astype(np.float64)), full_matrices=False)
    return np.ascontiguousarray(u.numpy().T), s.numpy(), np.ascontiguousarray(w.numpy())


@one_thread()
def _of_b(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the singular values of B A, and u and w by which B moves when they change; as of `_svd`."""
    a, b = (torch.from_numpy(matrix.astype(np.float64)) for matrix in (a, b))
    q, r = torch.linalg.qr(b)  # a product of thin matrices: its singular values are those of a small one
    u, s, _ = torch.linalg.svd(r @ torch.linalg.qr(a.T)[1].T, full_matrices=False)
    u = (q @ u).T
    w = u @ b / torch.where(s > 0, s, 1.0)[:, None]  # of a zero, which `decompose` reports
    return np.ascontiguousarray(u.numpy()), s.numpy(), np.ascontiguousarray(w.numpy())


@one_thread()
def _eigh(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return eigenvalues and eigenvectors, of which each one's largest component is positive."""
    values, vectors = (found.numpy() for found in torch.linalg.eigh(torch.from_numpy(matrix)))
    largest = vectors[np.abs(vectors).argmax(0), np.arange(len(matrix))]
    return values, vectors * np.where(largest < 0, -1.0, 1.0)


@cache
def machine() -> str:
    """Return what the bits of decompositions depend on: processor and versions of the libraries.

    (And the threads of NumPy's BLAS, OMP_NUM_THREADS, in searches of some hundred dimensions.)
    """
    cpu, path = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if path.is_file():
        named = [line.split(":", 1)[1].strip() for line in path.read_text().splitlines() if "model name" in line]
        cpu = named[0] if named else cpu
    return f"{cpu}, numpy {np.__version__}, torch {torch.__version__}, cma {_cma().__version__}"


def _cma() -> Any:
    return open_package("cma", "ESSA searches by CMA-ES of the package cma")


# ---- the search


class SingularWeights(MasterWeights):
    """The weights of a search: the adapter at the mean of a distribution over delta; members are its candidates.

    CMA-ES moves the distribution, by ask and tell, from 0; it maximises, and knows rewards by their ranks alone. Step
    sizes are adapted by cumulative path length (CSA) in any dimension; cma would take another rule (TPA) from 300 on,
    whose first two candidates are no draws. Candidates are not mirrored.

    Args:
        model: with the adapter.
        layout: of what moves.
        run_key: of the noise.
        settings: of the run, those of `SETTINGS` among them.

    Raises:
        ValueError: an adapter that is none of plain LoRA layers, or a leading_share that leaves no singular value.
        ImportError: cma is not installed.
    """

    def __init__(self, model: Any, layout: noise.Layout, run_key: int, settings: Mapping[str, Any]):
        self.run_key, self.settings = run_key, settings
        super().__init__(model, layout, "gaussian", rank=0)
        # keys and candidates of a step lie in memory that processes forked later see
        n, size = settings["population_size"], self.dimension
        self._keys = np.frombuffer(mmap.mmap(-1, 8 * n), np.uint64)
        self._candidates = np.frombuffer(mmap.mmap(-1, 8 * n * size), np.float64).reshape(n, size)

    def anchor(self):
        """Begin the search at the weights as they are."""
        self.start = self.flat.copy()
        self.start.flags.writeable = False
        views = self.layout.views(self.start)
        self.decomposition = decompose(views, self.settings["leading_share"], self.settings["decomposition"])
        cma = _cma()
        options = {"popsize": self.settings["population_size"], "seed": np.nan, "CMA_eigenmethod": _eigh}
        options["randn"] = lambda *shape: self._normals.reshape(shape).copy()  # cma may change them
        options |= {"AdaptSigma": cma.sigma_adaptation.CMAAdaptSigmaCSA, "CMA_mirrors": 0}
        options |= {"verbose": -10, "verb_log": 0, "verb_disp": 0}
        self.es = cma.CMAEvolutionStrategy(np.zeros(self.dimension), self.settings["sigma"], options)
        """the search itself: `mean` of the distribution of delta, and `sigma`, the overall step size"""
        self._step: int | None = None  # that was asked for and not told

    @property
    def dimension(self) -> int:
        """Of delta: the singular values that are searched."""
        return len(self.decomposition.values)

    def check(self) -> None:
        """Raise ValueError where directions of the adapter are arbitrary: what a search found in them would be, too."""
        if why := self.decomposition.undetermined:
            remedy = "warm-start the adapter (sft_dataset), give a trained one, or set init_lora_weights=False"
            raise ValueError(f"{why}, so that its singular vectors are arbitrary: {remedy}.")

    def ask(self, step: int) -> list[Member]:
        """Return the members of a step, whose candidates `member` gives then. Errors as for `check`."""
        self.check()
        members = population(self.run_key, step, self.settings["population_size"])
        if self._step != step:  # else an evaluation was interrupted: the same candidates
            self._keys[:] = [member.key for member in members]
            normals = [noise.normals(member.key, _NORMALS, (self.dimension,)) for member in members]
            with interrupts_wait():  # it may decompose the covariance first
                self._normals = np.stack(normals).astype(np.float64)
                self._asked = self.es.ask()
                del self._normals
            self._candidates[:] = self._asked
            self._step = step
        return members

    def tell(self, fitness: np.ndarray) -> bool:
        """Move the search by the rewards, (members,), of the members asked for last, and the weights to its mean.

        cma orders candidates by their values, ties as its sort leaves them, and lets the first ones weigh most: of a
        tied population it would move mean, covariance and sigma by the order of the members alone. Here such a
        population is not told, and nothing moves; among others ties are ordered by member index.

        Returns:
            Whether anything moved: a tied population moves nothing.
        """
        self._step = None
        with np.errstate(over="ignore", invalid="ignore"):
            tied = not standardise(fitness).any()
        if tied:
            return False
        order = np.argsort(-fitness, kind="stable")
        with interrupts_wait():
            self.es.tell(self._asked, np.argsort(order).astype(float).tolist())
        self._write(self.flat, self.es.mean)
        return True

    @contextmanager
    def member(self, key, sigma, sign=1):
        if self.working is None:
            self.working = np.empty_like(self.flat)
        (row,) = np.flatnonzero(self._keys == np.uint64(key))
        self._write(self.working, self._candidates[row])
        yield self.working

    def update(self, keys, coefficients):
        raise TypeError("a search moves by tell(), with the rewards of a step.")

    def metrics(self):
        return {SIGMA: float(self.es.sigma), DISTANCE: float(np.sqrt(np.square(self.es.mean).sum()))}

    def _write(self, flat: np.ndarray, delta: np.ndarray) -> None:
        """Write the adapter whose leading singular values have changed by delta; zeros give the bits of the start."""
        flat[:] = self.start
        starts, views = self.layout.views(self.start), self.layout.views(flat)
        for part in self.decomposition.parts:
            total = starts[part.name].astype(np.float64)
            for i, (u, w) in enumerate(zip(part.u, part.w, strict=True), part.first):
                total += np.multiply.outer(delta[i] * u, w)  # elementwise: no thread or batch changes a sum
            views[part.name][...] = total
