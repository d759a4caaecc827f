"""How far and where training moved the weights, read against what needs no learning at all.

A displacement is D = end - start. Ends and starts are mappings from a parameter's name to its float32 tensor: state
dicts, or `weights.weights`, which reads a part of a tensor at a time. `measure` goes over the entries once, a part at a
time, and keeps sums in float64 for each tensor: products of all displacements (Gram matrices), |start|^2, and counts.
Everything about norms, shares, cosines and means of runs follows from these sums, for single tensors, for layers
(`Displacements.by`) and for the model.

Three nulls say what a number would be if the reward had taught nothing:

- Norm. A step of ES is alpha/N sum_n z_n eps_n, and z-scores have sum z^2 = N whatever was rewarded. So |D| is
  alpha sqrt(d T / N) times chi_d / sqrt(d), T being the steps whose population was not tied: `es_norm`, `norm_band`.
- Shares. A random direction has the share d_l / d of its squared norm in a tensor of d_l entries: `size_null`. That of
  a gradient method is the gradient's own share |g_l|^2 / |g|^2, and where Adam takes steps of equal size whatever the
  gradient's, the share of the entries with a gradient: `measure(None, [gradient])` gives both.
- Cosine. That of random directions has the standard deviation d^-1/2, and d_eff^-1/2 where tensors weigh differently.

A cosine of 0 between two runs does not say that they learned different things: most of an ES displacement is noise that
differs from run to run. `attenuation` tells signal from noise by the Gram matrix of several runs.

Ratios that are not defined, such as shares of a displacement of 0, are NaN. The quantities are
those of Qiu et al. (arXiv 2509.24372), Hoy et al. (arXiv 2604.01499: norms, shares, orthogonality) and Mukherjee et al.
(arXiv 2505.11711: sparsity), without their nulls.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

from evoalign_lib.analysis.stats import ratio
from evoalign_lib.checks import choose, positive, require, whole_number

if TYPE_CHECKING:  # claims are judged, and artefacts drawn, by what stands here, without torch
    from torch import Tensor

DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes in which entries that moved are counted: as they are, and after both ends were rounded."""
_PART = 1 << 20  # entries in memory at once, of all models together
_LEAST_PART = 1 << 14  # of each, however many they are
Vector = NDArray[np.float64]
State = Mapping[str, "Tensor"]
"""Name of a parameter -> its entries."""


# ---- names


_LAYERS = {
    "head": r"(^|\.)(lm_head|embed_out)\.|^output\.weight$",
    "embedding": r"(^|\.)(embed_tokens|wte|embed_in|word_embeddings|tok_embeddings)\.weight$",
    "positions": r"(^|\.)(wpe|embed_positions|position_embeddings)\.weight$",
    "layer": r"(^|\.)(layers|h|blocks)\.(\d+)\.",
    "final norm": r"(^|\.)(norm|norm_f|ln_f|final_layer_norm|final_layernorm)\.(weight|bias)$",
}
_NORM = re.compile(r"norm|^ln_")
_QKV = re.compile(r"^(c_attn|query_key_value|qkv_proj|W_?qkv)$")


def layer_of(name: str, tied: bool = False) -> str:
    """Return the layer of a parameter: "embedding", "positions", "layer 0", ..., "final norm" or "head".

    name: canonical Hugging Face name of Llama, Qwen, GPT-2, GPT-NeoX and models named alike; of any other parameter the
    part before the first dot is the layer. tied: whether the head is tied to the embedding, which is then called
    "embedding (tied)".

    >>> [layer_of(n) for n in ("model.embed_tokens.weight", "transformer.h.11.ln_1.bias", "embed_out.weight")]
    ['embedding', 'layer 11', 'head']
    """
    layer = next((layer for layer, pattern in _LAYERS.items() if re.search(pattern, name)), name.split(".")[0])
    if layer == "layer":
        return f"layer {int(re.search(_LAYERS[layer], name)[3])}"
    return "embedding (tied)" if tied and layer == "embedding" else layer


def kind_of(name: str, tied: bool = False) -> str:
    """Return the kind of a parameter: "embedding", "attention q", "k", "v", "o", "qkv" (fused), "mlp", "norm", "head".

    Arguments: as for `layer_of`, which also says what other names become.

    >>> [kind_of(n) for n in ("model.layers.0.self_attn.q_norm.weight", "transformer.h.0.attn.c_proj.weight")]
    ['norm', 'attention o']
    """
    layer = layer_of(name, tied)
    if layer in ("head", "positions", "final norm") or layer.startswith("embedding"):
        return "norm" if layer == "final norm" else layer
    modules = name.split(".")[:-1]
    own = modules[-1] if modules else name
    if _NORM.search(own):
        return "norm"
    if any("attn" in module or "attention" in module for module in modules):
        one = own[0] if own in ("q_proj", "k_proj", "v_proj") else "o"
        return f"attention {'qkv' if _QKV.match(own) else one}"
    return "mlp" if {"mlp", "feed_forward", "ffn", "experts"} & set(modules) else layer


_ORDER = ("embedding", "embedding (tied)", "positions", "layer", "attention q", "attention k", "attention v")
_ORDER += ("attention qkv", "attention o", "mlp", "norm", "final norm", "head")


def _place(group: str) -> tuple[int, int, str]:
    """Return what sorts groups from the input of a model to its output, unknown ones last."""
    numbered = re.fullmatch(r"layer (\d+)", group)
    known = "layer" if numbered else group
    return (_ORDER.index(known) if known in _ORDER else len(_ORDER), int(numbered[1]) if numbered else 0, group)


# ---- sums over the entries


@dataclass(frozen=True, eq=False)
class Displacements:
    """K displacements from one start, as sums over the entries of each tensor, or of each group of tensors."""

    names: tuple[str, ...]
    """of the tensors or groups"""
    entries: NDArray[np.int64]
    """(groups,) d_l"""
    start: Vector
    """(groups,) |theta_0|^2, weight units squared; 0 without a start"""
    gram: Vector
    """(groups, K, K) products D_i . D_j, weight units squared"""
    moved: Mapping[str, NDArray[np.int64]]
    """dtype -> (groups, K): entries that differ from the start once both ends are rounded to the dtype"""
    tied: bool
    """whether the head is tied to the embedding: no tensor is called a head"""

    @property
    def total(self) -> Vector:
        """(K, K) Gram matrix of the whole model, weight units squared."""
        return self.gram.sum(0)

    @property
    def d(self) -> int:
        """Entries of the whole model."""
        return int(self.entries.sum())

    @property
    def squares(self) -> Vector:
        """(groups, K) |D_l|^2, weight units squared."""
        return np.diagonal(self.gram, axis1=1, axis2=2)

    @property
    def norms(self) -> Vector:
        """(groups, K) |D_l|, weight units."""
        return np.sqrt(self.squares)

    @property
    def relative_norms(self) -> Vector:
        """(groups, K) |D_l| / |theta_0l|; NaN where the start is 0."""
        return np.sqrt(ratio(self.squares, self.start[:, None]))

    @property
    def shares(self) -> Vector:
        """(groups, K) s_l = |D_l|^2 / |D|^2; NaN where D is 0."""
        return ratio(self.squares, self.squares.sum(0))

    @property
    def size_shares(self) -> Vector:
        """(groups,) d_l / d, the shares of a random direction."""
        return self.entries / self.d

    def unmoved(self, dtype: str = "float32") -> Vector:
        """Return (groups, K): the share of entries that are exactly as they were. Raises KeyError for a dtype."""
        entries = self.entries[:, None]
        return ratio(entries - self.moved[dtype], entries)

    def by(self, key: str | Callable[[str], str]) -> Displacements:
        """Return the sums over groups of tensors, sorted from the input of the model to its output.

        key: "layer" (`layer_of`), "kind" (`kind_of`), "all" (one group), or a function of the tensor's name.
        Raises ValueError for another key.
        """
        members = self._members(key)

        def sums(values: NDArray) -> NDArray:
            return np.stack([values[rows].sum(0) for rows in members.values()])

        moved = {dtype: sums(counts) for dtype, counts in self.moved.items()}
        entries, start, gram = map(sums, (self.entries, self.start, self.gram))
        return replace(self, names=tuple(members), entries=entries, start=start, gram=gram, moved=moved)

    def _members(self, key: str | Callable[[str], str]) -> dict[str, NDArray[np.int64]]:
        """Return the rows of each group, groups sorted."""
        if isinstance(key, str):
            functions = {"layer": partial(layer_of, tied=self.tied), "kind": partial(kind_of, tied=self.tied)}
            choose("key", key, (*functions, "all"))
            key = functions.get(key, lambda name: "all")
        groups = np.array([key(name) for name in self.names])
        return {group: np.flatnonzero(groups == group) for group in sorted(set(groups.tolist()), key=_place)}


def measure(start: State | None, ends: Sequence[State], dtypes: Sequence[str] = DTYPES) -> Displacements:
    """Go over the entries of all tensors once and return the sums from which everything else follows.

    Differences are taken in float64, so that they are exact, and summed in float64. Memory: a million entries of each
    model at a time, and K x K numbers per tensor.

    Args:
        start: name -> tensor, float32 (or a dtype that converts to it exactly); None: `ends` are displacements, or
            gradients, themselves.
        ends: K of them, with the names and shapes of the start.
        dtypes: in which moved entries are counted, of `DTYPES`. Rounding is to nearest, as a cast does it.

    Raises:
        ValueError: no end, names or shapes that differ (the message names the first), an unknown dtype, or weights
            that are not finite.
    """
    import torch

    require(ends, "measure needs at least one end of training, got none")
    for dtype in dtypes:
        choose("dtype", dtype, DTYPES)
    shapes = check_same(*([] if start is None else [start]), *ends)
    names = tuple(shapes)
    entries = np.array([math.prod(shapes[name]) for name in names], np.int64)
    square, gram = np.zeros(len(names)), np.zeros((len(names), len(ends), len(ends)))
    moved = {dtype: np.zeros((len(names), len(ends)), np.int64) for dtype in dtypes}
    size = max(_LEAST_PART, _PART // (len(ends) + 1))
    for row, name in enumerate(names):
        for first in range(0, entries[row], size):
            last = min(first + size, entries[row])
            origin = torch.zeros(last - first) if start is None else _part(start, name, first, last)
            parts = [_part(end, name, first, last) for end in ends]
            exact = np.stack([part.double().numpy() for part in parts])
            before = origin.double().numpy()
            exact -= before
            square[row] += before @ before
            gram[row] += exact @ exact.T
            for dtype, counts in moved.items():
                for k, part in enumerate(parts):
                    by = exact[k] if dtype == "float32" else _rounded_difference(part, origin, dtype)
                    counts[row, k] += (np.abs(by) > 0).sum()
        finite = np.isfinite(gram[row]).all() and np.isfinite(square[row])
        require(finite, f"{name!r} has weights that are not finite, of which no norm can be taken: leave the run out")
    tied = not any(layer_of(name) == "head" for name in names)
    return Displacements(names, entries, square, gram, moved, tied)


def check_same(*states: State) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes that all these weights have; raise ValueError, naming the first that differs."""
    first = _shapes(states[0])
    for number, state in enumerate(states[1:], 1):
        other = _shapes(state)
        name = next((name for name in (*first, *other) if first.get(name) != other.get(name)), None)
        if name is not None:
            said = [f"has the shape {shapes[name]}" if name in shapes else "is missing" for shapes in (first, other)]
            where = [getattr(s, "source", None) or f"number {i}" for i, s in ((0, states[0]), (number, state))]
            raise ValueError(
                f"these are not weights of one model: {name!r} {said[0]} in {where[0]} and {said[1]} in {where[1]}. "
                "Give a start and ends trained from it, all written under the same names (save_pretrained)."
            )
    require(first, "the weights have no tensor: there is nothing to measure")
    return first


def recorded(records: Iterable[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> Displacements:
    """Return the displacements of runs by layer, from the blocks of products in which they are.

    Args:
        records: of kind "products"; each has one block, (runs of a, runs of b), for each layer.
        runs: of training, from one base, each known by the digest of its weights; runs that stood still share theirs.

    Returns:
        As `measure(...).by("layer")`: K = len(runs), dtypes float32 and bfloat16.

    Raises:
        ValueError: no run, or products of two of the runs that no record has.
    """
    digests = list(dict.fromkeys(run["digest"] for run in runs))
    place, first = {digest: row for row, digest in enumerate(digests)}, None
    for record in records:
        a, b = (
            [(i, place[digest]) for i, digest in enumerate(record["spec"][side]["digests"]) if digest in place]
            for side in ("a", "b")
        )
        if not a or not b:
            continue
        layers = record["layers"]
        if first is None:
            first, size = layers, len(digests)
            products = np.full((len(layers), size, size), np.nan)
            moved = {dtype: np.zeros((len(layers), size), np.int64) for dtype in DTYPES[:2]}
        for row, layer in enumerate(layers.values()):
            block = np.array(layer["products"])
            for i, k in a:
                for j, m in b:
                    products[row, k, m] = products[row, m, k] = block[i, j]
            for dtype, counts in layer.get("moved", {}).items():
                for i, k in a:
                    moved[dtype][row, k] = counts[i]
    if first is None or np.isnan(products).any():
        pair = [0, 0] if first is None else np.argwhere(np.isnan(products[0]))[0]
        named = " and ".join(digests[row] for row in dict.fromkeys(pair)) if digests else "no run"
        raise ValueError(f"no record has the products of the runs that ended with the weights {named}: measure them")
    rows = [place[run["digest"]] for run in runs]
    products = products[:, rows][:, :, rows]
    moved = {dtype: counts[:, rows] for dtype, counts in moved.items()}
    return Displacements(
        tuple(first),
        np.array([layer["entries"] for layer in first.values()]),
        np.array([layer["start"] for layer in first.values()]),
        products,
        moved,
        any("tied" in name for name in first),
    )


def _shapes(state: State) -> dict[str, tuple[int, ...]]:
    known = getattr(state, "shapes", None)
    return dict(known) if known is not None else {name: tuple(state[name].shape) for name in state}


def _part(state: State, name: str, first: int, last: int) -> Tensor:
    """Return entries of a tensor as float32; weights that can read a part of a tensor read no more."""
    import torch

    read: Any = getattr(state, "part", None)
    part = read(name, first, last) if read else torch.as_tensor(state[name]).detach().reshape(-1)[first:last]
    return part.to("cpu", torch.float32)


def _rounded_difference(end: Tensor, start: Tensor, dtype: str) -> Vector:
    import torch

    rounded = [tensor.to(getattr(torch, dtype)).double().numpy() for tensor in (end, start)]
    with np.errstate(invalid="ignore"):  # both beyond the dtype: no difference, and NaN is not above 0
        return rounded[0] - rounded[1]


# ---- shares


def total_variation(shares: ArrayLike, others: ArrayLike) -> float:
    """Return the total variation distance of two share vectors, sum |p - q| / 2: 0 equal, 1 nothing in common.

    >>> total_variation([0.5, 0.5], [0.75, 0.25])
    0.25
    """
    p, q = np.asarray(shares, np.float64), np.asarray(others, np.float64)
    require(p.shape == q.shape, f"shares have the shapes {p.shape} and {q.shape}: give those of the same groups")
    return float(np.abs(p - q).sum() / 2)


def gini(shares: ArrayLike, sizes: ArrayLike) -> float:
    """Return the Gini coefficient of shares relative to sizes: 0 if each has its size's, near 1 if a small one has all.

    It is 1 - 2 times the area below the Lorenz curve of the groups' shares over their sizes, sorted by their ratio.

    shares: (groups,) of the squared norm, sum 1. sizes: (groups,) entries, or their shares. NaN if a share is NaN.
    Raises ValueError for different shapes and a size that is not positive.

    >>> gini([0.25, 0.75], [1, 3]), gini([1.0, 0.0], [1, 3])
    (0.0, 0.75)
    """
    s, w = np.asarray(shares, np.float64), np.asarray(sizes, np.float64)
    fit = s.shape == w.shape and s.ndim == 1 and (w > 0).all()
    require(fit, f"shares {s.shape} and sizes {w.shape} must be those of the same groups, sizes positive")
    if np.isnan(s).any():
        return math.nan
    order = np.argsort(s / w, kind="stable")
    s, w = s[order] / s.sum(), w[order] / w.sum()
    heights = np.concatenate(([0.0], np.cumsum(s)))
    return float(1 - w @ (heights[1:] + heights[:-1]))


def head_concentration(displacements: Displacements) -> Vector:
    """Return (K,): the head's share of the squared norm over its share of the entries, 1 for a random direction.

    displacements: of tensors. Where the head is tied to the embedding, it is the one matrix that both share. NaN where
    there is neither, or D is 0.
    """
    layers = displacements.by("layer")
    name = "embedding (tied)" if displacements.tied else "head"
    if name not in layers.names:
        return np.full(displacements.gram.shape[1], np.nan)
    row = layers.names.index(name)
    return ratio(layers.shares[row], layers.size_shares[row])


class SizeNull(NamedTuple):
    """What a random direction of the same size gives by chance."""

    distance: float
    """`total_variation` of its shares from the size shares: exceeded by 5 % of random directions, or another level"""
    gini: float
    """the same for `gini`"""


def size_null(entries: ArrayLike, level: float = 0.95, draws: int = 2000, seed: int = 0) -> SizeNull:
    """Return how far from the size shares a random direction's shares are by chance: |D_l|^2 is chi^2 of d_l.

    entries: (groups,) d_l. level: share of random directions that stay below. Raises ValueError as `gini`.
    """
    sizes = np.asarray(entries, np.float64)
    squares = np.random.default_rng(seed).chisquare(sizes, (draws, len(sizes)))
    shares, own = squares / squares.sum(1, keepdims=True), sizes / sizes.sum()
    distances = np.abs(shares - own).sum(1) / 2
    ginis = [gini(share, sizes) for share in shares]
    return SizeNull(float(np.quantile(distances, level)), float(np.quantile(ginis, level)))


# ---- the norm of ES


def es_norm(alpha: float, d: int, steps: int, population: int) -> float:
    """Return the norm that T steps of ES have whatever is rewarded, weight units: alpha sqrt(d T / N).

    Each step is sum_n c_n eps_n, and steps are independent, so E|D|^2 = d sum_t sum_n c_n^2. Members are drawn
    independently, and their fitness is z-scored: c_n = alpha z_n / N and sum z^2 = N, so E|D|^2 = alpha^2 d T / N,
    exactly, for any rewards that are not tied. For antithetic pairs and other shapings take `norm_of_coefficients`.

    Args:
        alpha: step size, 1/sigma digested, weight units.
        d: weights that move.
        steps: T_eff, steps whose population was not tied; the others move nothing.
        population: N, members per step.

    Raises:
        ValueError: a number that is not positive (steps may be 0), or N below 2.

    Source:
        Hoy et al. (arXiv 2604.01499).

    >>> round(es_norm(alpha=7.5e-4, d=4_020_000_000, steps=100, population=30), 2)  # Hoy et al. report 87.28
    86.82
    """
    fit = alpha > 0 and d > 0 and steps >= 0 and population >= 2
    require(fit, f"alpha {alpha}, d {d}, steps {steps}, N {population}: alpha and d are positive, N at least 2")
    return float(alpha * math.sqrt(d * steps * population) / population)


def norm_of_coefficients(coefficients: Sequence[ArrayLike], d: int) -> float:
    """Return the same from what multiplied each noise: sqrt(d sum c^2), weight units, for any shaping and schedule.

    coefficients: (members,) of each step, weight units, as `update_rules.coefficients` gives them. d: weights.

    >>> norm_of_coefficients([[0.5, -0.5]], d=8)
    2.0
    """
    return math.sqrt(d * sum(float(np.square(np.asarray(c, np.float64)).sum()) for c in coefficients))


def norm_band(d: float, level: float = 0.95) -> tuple[float, float]:
    """Return the ends of the ratio |D| / expected root mean square of |D| under the null: chi_d / sqrt(d).

    Given the coefficients, D is Gaussian with equal variances, since Gaussian noise is independent of them under the
    null. The ratio's standard deviation is nearly 1 / sqrt(2 d).

    d: independent coordinates: the weights, or fewer (with tied noise, those of the largest tensor).
    Raises ValueError unless d is positive.

    >>> [round(end, 3) for end in norm_band(10_000)]
    [0.986, 1.014]
    """
    positive("d", d)
    return tuple(float(math.sqrt(scipy.stats.chi2.ppf(p, d) / d)) for p in ((1 - level) / 2, (1 + level) / 2))


def tied_d(shapes: Mapping[str, Sequence[int]]) -> float:
    """Return the independent coordinates of |D|^2 under tied noise, for `norm_band`: d^2 / sum_x m_x^2.

    m_x is the number of tensors that take their entry from position x, (row, column), of one matrix of noise: with a
    Gaussian matrix, |D|^2 has the mean d and the variance 2 sum m^2, in units of the step.

    shapes: name -> shape of each tensor; one with a single dimension is one row.

    >>> tied_d({"a": (2, 3), "b": (2, 3)}), tied_d({"a": (2, 3), "b": (6,)})
    (6.0, 8.0)
    """
    sides = np.array([(1, math.prod(s)) if len(s) < 2 else (s[0], math.prod(s[1:])) for s in shapes.values()], float)
    shared = np.minimum.outer(sides[:, 0], sides[:, 0]) * np.minimum.outer(sides[:, 1], sides[:, 1])
    return float(sides.prod(1).sum() ** 2 / shared.sum())


# ---- cosines


@dataclass(frozen=True)
class Cosine:
    """The cosine of two displacements, and what random directions give."""

    value: float
    """NaN if one of them is 0"""
    d: int
    """entries"""
    effective_d: float
    """that of random directions with the same norm in each tensor: |a|^2 |b|^2 / sum_l |a_l|^2 |b_l|^2 / d_l"""

    @property
    def std(self) -> float:
        """That of random directions with the same norm in each tensor, d_eff^-1/2."""
        return self.effective_d**-0.5

    @property
    def z(self) -> float:
        """The value in such standard deviations."""
        return self.value / self.std

    def band(self, level: float = 0.95) -> float:
        """Return b, where a share `level` of random directions has a cosine from -b to b."""
        return NormalDist().inv_cdf((1 + level) / 2) * self.std


def cosine(tensors: Displacements, a: int = 0, b: int = 1, rows: slice | NDArray[np.int64] = slice(None)) -> Cosine:
    """Return the cosine of two displacements. tensors: ungrouped, since each has its own norm. rows: those that count.

    Raises IndexError for a displacement that is not there.
    """
    entries, products = tensors.entries[rows], tensors.gram[rows, a, b]
    one, other = tensors.squares[rows, a], tensors.squares[rows, b]
    both, spread = one.sum() * other.sum(), (one * other / entries).sum()
    value = float(products.sum() / math.sqrt(both)) if both > 0 else math.nan
    return Cosine(value, int(entries.sum()), float(both / spread) if spread > 0 else math.nan)


def cosines(tensors: Displacements, key: str | Callable[[str], str], a: int = 0, b: int = 1) -> dict[str, Cosine]:
    """Return the same by layer or kind, sorted as `Displacements.by`, whose `key` it takes; errors are its own."""
    return {group: cosine(tensors, a, b, rows) for group, rows in tensors._members(key).items()}


# ---- a random direction


def random_like(norms: Mapping[str, float], shapes: Mapping[str, Sequence[int]], key: int) -> dict[str, Tensor]:
    """Return a random direction with the norm of a displacement in each tensor, float32: the null of a direction.

    Each tensor is Gaussian, from NumPy's Philox with a seed of its own by (key, parameter id), then scaled: neither
    order nor choice of tensors changes what is drawn. The same key, name and shape give the same entries, with one
    version of NumPy. It is a displacement: add it to the start.

    norms: name -> |D_l|, weight units, such as `dict(zip(found.names, found.norms[:, k]))`. shapes: name -> shape.
    key: of the draws, at least 0.
    Raises ValueError for a norm that is negative or not finite or without a shape, and a negative key.
    """
    import torch

    from evoalign_lib import noise

    whole_number("key", key, least=0)
    direction = {}
    for name, norm in norms.items():
        fit = name in shapes and math.isfinite(norm) and norm >= 0
        require(fit, f"{name!r} has the norm {norm} and the shape {shapes.get(name)}: give both, the norm finite")
        seeds = np.random.SeedSequence(key, spawn_key=(noise.parameter_id(name),))
        drawn = np.random.Generator(np.random.Philox(seeds)).standard_normal(tuple(shapes[name]), dtype=np.float32)
        length = math.sqrt(float(np.square(drawn, dtype=np.float64).sum()))
        direction[name] = torch.from_numpy(drawn * np.float32(norm / length if length else 0.0))
    return direction
