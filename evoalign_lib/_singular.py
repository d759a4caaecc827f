"""The singular values of an adapter and their search by CMA-ES, shared by `evoalign_lib.essa` and ledger replays.

`decompose` turns an adapter into a list of directions: adding delta_i to the i-th singular value adds delta_i u_i w_i^T
to one of the adapter's tensors. `SingularWeights` holds the weights of a run, those at the mean of a search
distribution over delta. CMA-ES (`cma`) moves this distribution, with normals from the noise law.

The next move of CMA-ES is a function of the rewards so far: its state is never stored but recomputed, from a ledger or
for a checkpoint, which takes no evaluation. Tensors are computed elementwise, with sums in a fixed order, so they
depend on delta alone. Decompositions of matrices come from LAPACK, with one thread, and their bits are those of one
machine (`machine`). The signs of eigenvectors are fixed, so that with another LAPACK the candidates are nearly the same
rather than different ones: on another machine a replay checks the search's sigma and distance at every step, within
`TOLERANCE`, and no digests.
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
from evoalign_lib.checks import positive, require, whole_number
from evoalign_lib.engines.processes import one_thread
from evoalign_lib.precision import MasterWeights
from evoalign_lib.update_rules import Member, population, standardise

SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "population_size": (whole_number, 4, None, "CMA-ES selects the better half"),
    "sigma": (positive,),
    "leading_share": (positive, 1),
}
"""settings that determine how rewards become weights in a search -> the function that checks each (of name, value and
the arguments that follow); `evoalign_lib.essa.ESSAConfig` says what they mean"""
TOLERANCE = 1e-6
"""largest relative difference in sigma and distance that a replay on another machine may show at any step"""
SIGMA, DISTANCE = "search/sigma", "search/distance"
"""metrics of each step: the step size before it, and the length of the mean of delta"""
_NORMALS = noise.parameter_id("the singular values of an adapter")  # an id of the noise law; no parameter has this name
SEARCH = "cma-es"
"""value of the setting `search` in such a run"""


def leading(rank: int, share: float) -> int:
    """Return how many of a matrix's singular values are searched: floor(rank * share), up to rounding errors.

    >>> leading(8, 0.1), leading(100, 0.29), leading(3, 1 / 3)
    (0, 29, 1)
    """
    return math.floor(round(rank * share, 9))


# ---- decompositions


class Part(NamedTuple):
    """The directions in which one tensor of an adapter moves."""

    name: str
    """name of the tensor"""
    first: int
    """coordinate of its first direction"""
    u: np.ndarray
    """float64 (k, rows)"""
    w: np.ndarray
    """float64 (k, columns)"""


class Decomposition(NamedTuple):
    """The singular values of an adapter, with their directions."""

    parts: list[Part]
    values: np.ndarray
    """float64 (dimension,): singular values at the start, matrix by matrix, from the largest down in each"""
    undetermined: str | None
    """why some directions are arbitrary; None: none are"""


def pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the names of A and B for each adapted matrix.

    Args:
        names: names of all parameters that move.

    Raises:
        ValueError: something other than the A and B of LoRA layers moves.
    """
    found = [(name, name.replace(".lora_A.", ".lora_B.")) for name in names if ".lora_A." in name]
    others = [name for name in names if name not in {each for pair in found for each in pair}]
    if others or not found:
        remedy = "use a LoraConfig of plain layers, without bias, DoRA or modules_to_save"
        raise ValueError(f"{(others or list(names))[0]!r} is to be trained but is not A or B of LoRA: {remedy}.")
    return found


def decompose(tensors: Mapping[str, np.ndarray], leading_share: float) -> Decomposition:
    """Return the directions along which an adapter changes with its leading singular values.

    A = U_A S_A V_A^T and B = U_B S_B V_B^T are decomposed separately (ESSA version 3, arXiv 2507.04453v3), so that
    delta gives U (S + diag(delta)) V^T = A + sum_i delta_i u_i v_i^T.

    Args:
        tensors: name -> float32 matrix: A (rank, inputs) and B (outputs, rank) of each adapted matrix.
        leading_share: share of each matrix's singular values.

    Returns:
        The parts in the order of `pairs`, A before B; directions have unit length. The dimension is twice the number of
        adapted matrices * floor(rank * leading_share).

    Raises:
        ValueError: what moves is not LoRA, not a matrix, or has no singular value in that share.
    """
    parts, values, undetermined, first = [], [], None, 0
    for name_a, name_b in pairs(list(tensors)):
        a, b = tensors[name_a], tensors[name_b]
        require(a.ndim == b.ndim == 2, f"{name_a!r} has the shape {a.shape}: use an adapter of linear layers only.")
        rank = len(a)
        if not (k := leading(rank, leading_share)):
            what = f"leading_share={leading_share} of the {rank} singular values of {name_a!r} rounds down to none"
            raise ValueError(f"{what}: use at least {math.ceil(1000 / rank) / 1000:g}, or a higher rank.")
        for name, u, s, w in ((name_a, *_svd(a)), (name_b, *_svd(b))):
            if len(s) < k or s[k - 1] <= s[0] * max(a.shape + b.shape) * np.finfo(np.float64).eps:
                rest = "is zero" if not s[0] else f"has fewer than {k} singular values that are not zero"
                undetermined = undetermined or f"{name!r} {rest}"
            parts.append(Part(name, first, u[:k], w[:k]))
            values.append(s[:k])
            first += len(values[-1])
    return Decomposition(parts, np.concatenate(values), undetermined)


@one_thread()  # with several threads LAPACK gives other bits
def _svd(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return u (k, rows), singular values (k,) and w (k, columns) of a matrix, float64."""
    u, s, w = torch.linalg.svd(torch.from_numpy(matrix.astype(np.float64)), full_matrices=False)
    return np.ascontiguousarray(u.numpy().T), s.numpy(), np.ascontiguousarray(w.numpy())


@one_thread()
def _eigh(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return eigenvalues and eigenvectors; the largest component of each eigenvector is made positive."""
    values, vectors = (found.numpy() for found in torch.linalg.eigh(torch.from_numpy(matrix)))
    largest = vectors[np.abs(vectors).argmax(0), np.arange(len(matrix))]
    return values, vectors * np.where(largest < 0, -1.0, 1.0)


@cache
def machine() -> str:
    """Return what the bits of decompositions depend on: the processor and the versions of the libraries.

    (In searches of some hundred dimensions they also depend on the threads of NumPy's BLAS, OMP_NUM_THREADS.)
    """
    cpu, path = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if path.is_file():
        named = [line.split(":", 1)[1].strip() for line in path.read_text().splitlines() if "model name" in line]
        cpu = named[0] if named else cpu
    return f"{cpu}, numpy {np.__version__}, torch {torch.__version__}, cma {_cma().__version__}"


def _cma() -> Any:
    return open_package("cma", "ESSA searches by CMA-ES, from the package cma")


# ---- the search


class SingularWeights(MasterWeights):
    """The weights of a search: the adapter at the mean of a distribution over delta; members are its candidates.

    CMA-ES moves the distribution, starting from 0, by ask and tell; it maximises and uses only the ranks of rewards.
    Step sizes are adapted by cumulative path length (CSA) in any dimension; from 300 dimensions on cma would use
    another rule (TPA), whose first two candidates are not draws. Candidates are not mirrored.

    Args:
        model: the model with the adapter.
        layout: layout of the parameters that move.
        run_key: run key of the noise.
        settings: settings of the run, including those of `SETTINGS`.

    Raises:
        ValueError: an adapter that does not consist of plain LoRA layers, or a leading_share that leaves no singular
            value.
        ImportError: cma is not installed.
    """

    def __init__(self, model: Any, layout: noise.Layout, run_key: int, settings: Mapping[str, Any]):
        self.run_key, self.settings = run_key, settings
        super().__init__(model, layout, "gaussian", rank=0)
        # in shared memory, so that processes forked later see a step's keys and candidates
        n, size = settings["population_size"], self.dimension
        self._keys = np.frombuffer(mmap.mmap(-1, 8 * n), np.uint64)
        self._candidates = np.frombuffer(mmap.mmap(-1, 8 * n * size), np.float64).reshape(n, size)

    def anchor(self):
        """Start the search at the current weights."""
        self.start = self.flat.copy()
        self.start.flags.writeable = False
        views = self.layout.views(self.start)
        self.decomposition = decompose(views, self.settings["leading_share"])
        cma = _cma()
        options = {"popsize": self.settings["population_size"], "seed": np.nan, "CMA_eigenmethod": _eigh}
        options["randn"] = lambda *shape: self._normals.reshape(shape).copy()  # a copy, as cma may change it
        options |= {"AdaptSigma": cma.sigma_adaptation.CMAAdaptSigmaCSA, "CMA_mirrors": 0}
        options |= {"verbose": -10, "verb_log": 0, "verb_disp": 0}
        self.es = cma.CMAEvolutionStrategy(np.zeros(self.dimension), self.settings["sigma"], options)
        """the search itself: `mean`, that of the distribution of delta, and `sigma`, the overall step size"""
        self._step: int | None = None  # the step asked for and not yet told

    @property
    def dimension(self) -> int:
        """Dimension of delta: the number of singular values that are searched."""
        return len(self.decomposition.values)

    def check(self) -> None:
        """Raise ValueError if directions of the adapter are arbitrary: whatever a search found would be, too."""
        if why := self.decomposition.undetermined:
            remedy = "warm-start the adapter (sft_dataset), pass a trained one, or set init_lora_weights=False"
            raise ValueError(f"{why}, so its singular vectors are arbitrary: {remedy}.")

    def ask(self, step: int) -> list[Member]:
        """Return the members of a step and draw their candidates, for `member`. Raises the errors of `check`."""
        self.check()
        members = population(self.run_key, step, self.settings["population_size"])
        if self._step != step:  # if equal, an evaluation was interrupted: keep its candidates
            self._keys[:] = [member.key for member in members]
            normals = [noise.normals(member.key, _NORMALS, (self.dimension,)) for member in members]
            with interrupts_wait():  # ask() may first decompose the covariance
                self._normals = np.stack(normals).astype(np.float64)
                self._asked = self.es.ask()
                del self._normals
            self._candidates[:] = self._asked
            self._step = step
        return members

    def tell(self, fitness: np.ndarray) -> bool:
        """Move the search by the rewards, (members,), of the members last asked for, and the weights to its mean.

        cma orders candidates by their values, breaks ties as its sort does, and gives the first ones the most weight: a
        tied population would move mean, covariance and sigma by the mere order of its members. Such a population is
        therefore not told, and nothing moves; in others ties are broken by member index.

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
        raise TypeError("the weights of a search have no update(): call tell() with the rewards of a step.")

    def metrics(self):
        return {SIGMA: float(self.es.sigma), DISTANCE: float(np.sqrt(np.square(self.es.mean).sum()))}

    def _write(self, flat: np.ndarray, delta: np.ndarray) -> None:
        """Write the adapter at delta, a change of its leading singular values; zeros give the bits of the start."""
        flat[:] = self.start
        starts, views = self.layout.views(self.start), self.layout.views(flat)
        for part in self.decomposition.parts:
            total = starts[part.name].astype(np.float64)
            for i, (u, w) in enumerate(zip(part.u, part.w, strict=True), part.first):
                total += np.multiply.outer(delta[i] * u, w)  # elementwise: sums do not depend on threads or batches
            views[part.name][...] = total
