"""How far and where training moved the weights, compared with nulls that involve no learning.

A displacement is D = end - start. Starts and ends are mappings from a parameter's name to its float32 tensor: state
dicts, or `weights.weights`, which reads one part of a tensor at a time. `measure` goes over the entries once, part by
part, and keeps float64 sums for each tensor: products of all displacements (Gram matrices), |start|^2, and counts. All
norms, shares, cosines and means of runs follow from these sums, for single tensors, for layers (`Displacements.by`) and
for the whole model.

Three nulls say what a number would be if the reward had taught nothing:

- Norm. A step of ES is alpha/N sum_n z_n eps_n, and z-scores have sum z^2 = N whatever the rewards are. So |D| is
  alpha sqrt(d T / N) times chi_d / sqrt(d), T counting the steps whose population was not tied: `es_norm`, `norm_band`.
- Shares. A random direction has a share d_l / d of its squared norm in a tensor of d_l entries: `size_null`. A gradient
  method has the gradient's own share |g_l|^2 / |g|^2 or, where Adam takes steps of equal size whatever the size of the
  gradient, the share of the entries that have a gradient: `measure(None, [gradient])` gives both.
- Cosine. Between random directions it has the standard deviation d^-1/2, or d_eff^-1/2 if tensors weigh differently.

A cosine of 0 between two runs does not mean that they learned different things: most of an ES displacement is noise
that differs from run to run. `attenuation` separates signal from noise by the Gram matrix of several runs.

Undefined ratios, such as shares of a displacement of 0, are NaN. The quantities are those of Qiu et al. (arXiv
2509.24372), Hoy et al. (arXiv 2604.01499: norms, shares, orthogonality) and Mukherjee et al. (arXiv 2505.11711:
sparsity), who report them without nulls.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

from evoalign_lib.analysis.stats import ratio
from evoalign_lib.checks import choose, positive, require, whole_number

if TYPE_CHECKING:  # judging claims and drawing figures use this module without torch
    from torch import Tensor

DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes in which moved entries are counted: float32 as it is, the others after rounding both start and end."""
_PART = 1 << 20  # entries in memory at once, over all models together
_LEAST_PART = 1 << 14  # entries of each model at least, however many models there are
Vector = NDArray[np.float64]
State = Mapping[str, "Tensor"]
"""Name of a parameter -> its tensor."""


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

    name: canonical Hugging Face name, as in Llama, Qwen, GPT-2, GPT-NeoX and models named like them; for any other
    parameter, the part before the first dot is the layer. tied: whether the head is tied to the embedding, which is
    then called "embedding (tied)".

    >>> [layer_of(n) for n in ("model.embed_tokens.weight", "transformer.h.11.ln_1.bias", "embed_out.weight")]
    ['embedding', 'layer 11', 'head']
    """
    layer = next((layer for layer, pattern in _LAYERS.items() if re.search(pattern, name)), name.split(".")[0])
    if layer == "layer":
        return f"layer {int(re.search(_LAYERS[layer], name)[3])}"
    return "embedding (tied)" if tied and layer == "embedding" else layer


def kind_of(name: str, tied: bool = False) -> str:
    """Return the kind of a parameter: "embedding", "attention q", "k", "v", "o", "qkv" (fused), "mlp", "norm", "head".

    Arguments as for `layer_of`, which also describes how other names are treated.

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
    """Return a key that sorts groups from the input of a model to its output, unknown groups last."""
    numbered = re.fullmatch(r"layer (\d+)", group)
    known = "layer" if numbered else group
    return (_ORDER.index(known) if known in _ORDER else len(_ORDER), int(numbered[1]) if numbered else 0, group)


# ---- sums over the entries


@dataclass(frozen=True, eq=False)
class Displacements:
    """K displacements from one start, as sums over the entries of each tensor, or of each group of tensors."""

    names: tuple[str, ...]
    """names of the tensors or groups"""
    entries: NDArray[np.int64]
    """(groups,) d_l, number of entries"""
    start: Vector
    """(groups,) |theta_0|^2, weight units squared; 0 without a start"""
    gram: Vector
    """(groups, K, K) products D_i . D_j, weight units squared"""
    moved: Mapping[str, NDArray[np.int64]]
    """dtype -> (groups, K): entries that differ from the start after both are rounded to the dtype"""
    tied: bool
    """whether the head is tied to the embedding, that is, no tensor is a head"""

    @property
    def total(self) -> Vector:
        """(K, K) Gram matrix of the whole model, weight units squared."""
        return self.gram.sum(0)

    @property
    def d(self) -> int:
        """Number of entries of the whole model."""
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
        """(groups,) d_l / d, the expected shares of a random direction."""
        return self.entries / self.d

    def unmoved(self, dtype: str = "float32") -> Vector:
        """Return (groups, K), the share of entries that did not change. Raises KeyError for a dtype not counted."""
        entries = self.entries[:, None]
        return ratio(entries - self.moved[dtype], entries)

    def by(self, key: str | Callable[[str], str]) -> Displacements:
        """Return the sums over groups of tensors, with groups sorted from the model's input to its output.

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
        """Return the rows of each group, with groups sorted."""
        if isinstance(key, str):
            functions = {"layer": partial(layer_of, tied=self.tied), "kind": partial(kind_of, tied=self.tied)}
            choose("key", key, (*functions, "all"))
            key = functions.get(key, lambda name: "all")
        groups = np.array([key(name) for name in self.names])
        return {group: np.flatnonzero(groups == group) for group in sorted(set(groups.tolist()), key=_place)}


def measure(start: State | None, ends: Sequence[State], dtypes: Sequence[str] = DTYPES) -> Displacements:
    """Go over the entries of all tensors once and return the sums from which everything else follows.

    Differences are taken in float64, where they are exact, and summed in float64. Memory: about a million entries of
    all models together at a time, and K x K numbers per tensor.

    Args:
        start: name -> tensor, float32 (or a dtype that converts to it exactly); None: `ends` themselves are
            displacements or gradients.
        ends: K trained models, with the names and shapes of the start.
        dtypes: those of `DTYPES` in which moved entries are counted. Rounding is to nearest, as in a cast.

    Raises:
        ValueError: no end, names or shapes that differ (the message names the first), an unknown dtype, or weights
            that are not finite.
    """
    import torch

    require(ends, "no ends of training: pass at least one")
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
        require(finite, f"{name!r} has weights that are not finite, so it has no norm: leave the run out")
    tied = not any(layer_of(name) == "head" for name in names)
    return Displacements(names, entries, square, gram, moved, tied)


def check_same(*states: State) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes that all these weights share, or raise a ValueError that names the first mismatch."""
    first = _shapes(states[0])
    for number, state in enumerate(states[1:], 1):
        other = _shapes(state)
        name = next((name for name in (*first, *other) if first.get(name) != other.get(name)), None)
        if name is not None:
            said = [f"has the shape {shapes[name]}" if name in shapes else "is missing" for shapes in (first, other)]
            where = [getattr(s, "source", None) or f"number {i}" for i, s in ((0, states[0]), (number, state))]
            what = f"these are not weights of one model: {name!r} {said[0]} in {where[0]} and {said[1]} in {where[1]}"
            remedy = "Pass a start and ends trained from it, all saved under the same names (save_pretrained)"
            raise ValueError(f"{what}. {remedy}.")
    require(first, "the weights have no tensors: pass those of a model")
    return first


def _shapes(state: State) -> dict[str, tuple[int, ...]]:
    known = getattr(state, "shapes", None)
    return dict(known) if known is not None else {name: tuple(state[name].shape) for name in state}


def _part(state: State, name: str, first: int, last: int) -> Tensor:
    """Return entries of a tensor as float32; only this part is read if the weights can read parts."""
    import torch

    read: Any = getattr(state, "part", None)
    part = read(name, first, last) if read else torch.as_tensor(state[name]).detach().reshape(-1)[first:last]
    return part.to("cpu", torch.float32)


def _rounded_difference(end: Tensor, start: Tensor, dtype: str) -> Vector:
    import torch

    rounded = [tensor.to(getattr(torch, dtype)).double().numpy() for tensor in (end, start)]
    with np.errstate(invalid="ignore"):  # both overflow the dtype: inf - inf is NaN, which does not count as moved
        return rounded[0] - rounded[1]


# ---- shares


def total_variation(shares: ArrayLike, others: ArrayLike) -> float:
    """Return the total variation distance of two share vectors, sum |p - q| / 2: 0 if equal, 1 if disjoint.

    >>> total_variation([0.5, 0.5], [0.75, 0.25])
    0.25
    """
    p, q = np.asarray(shares, np.float64), np.asarray(others, np.float64)
    require(p.shape == q.shape, f"shares have the shapes {p.shape} and {q.shape}: pass those of the same groups")
    return float(np.abs(p - q).sum() / 2)


def gini(shares: ArrayLike, sizes: ArrayLike) -> float:
    """Return the Gini coefficient of shares relative to sizes: 0 if they are proportional, near 1 if concentrated.

    It is 1 - 2 times the area below the Lorenz curve of the groups' shares over their sizes, sorted by their ratio.

    shares: (groups,) of the squared norm, sum 1. sizes: (groups,) entries, or their shares. NaN if a share is NaN.
    Raises ValueError for different shapes, or a size that is not positive.

    >>> gini([0.25, 0.75], [1, 3]), gini([1.0, 0.0], [1, 3])
    (0.0, 0.75)
    """
    s, w = np.asarray(shares, np.float64), np.asarray(sizes, np.float64)
    fit = s.shape == w.shape and s.ndim == 1 and (w > 0).all()
    require(fit, f"shares {s.shape} and sizes {w.shape}: pass both for the same groups, with positive sizes")
    if np.isnan(s).any():
        return math.nan
    order = np.argsort(s / w, kind="stable")
    s, w = s[order] / s.sum(), w[order] / w.sum()
    heights = np.concatenate(([0.0], np.cumsum(s)))
    return float(1 - w @ (heights[1:] + heights[:-1]))


def head_concentration(displacements: Displacements) -> Vector:
    """Return (K,), the head's share of the squared norm over its share of the entries; 1 for a random direction.

    displacements: of tensors, not of groups. If the head is tied to the embedding, the shared matrix is used. NaN if
    there is neither, or D is 0.
    """
    layers = displacements.by("layer")
    name = "embedding (tied)" if displacements.tied else "head"
    if name not in layers.names:
        return np.full(displacements.gram.shape[1], np.nan)
    row = layers.names.index(name)
    return ratio(layers.shares[row], layers.size_shares[row])


class SizeNull(NamedTuple):
    """Thresholds that the shares of a random direction exceed by chance only."""

    distance: float
    """`total_variation` from the size shares that 5 % of random directions exceed (at the default level)"""
    gini: float
    """the same for `gini`"""


def size_null(entries: ArrayLike, level: float = 0.95, draws: int = 2000, seed: int = 0) -> SizeNull:
    """Return how far a random direction's shares lie from the size shares by chance.

    Its |D_l|^2 has a chi^2 distribution with d_l degrees of freedom.

    entries: (groups,) d_l. level: share of random directions that stay below. Raises ValueError as `gini` does.
    """
    sizes = np.asarray(entries, np.float64)
    squares = np.random.default_rng(seed).chisquare(sizes, (draws, len(sizes)))
    shares, own = squares / squares.sum(1, keepdims=True), sizes / sizes.sum()
    distances = np.abs(shares - own).sum(1) / 2
    ginis = [gini(share, sizes) for share in shares]
    return SizeNull(float(np.quantile(distances, level)), float(np.quantile(ginis, level)))


# ---- the norm of ES


def es_norm(alpha: float, d: int, steps: int, population: int) -> float:
    """Return the norm of T steps of ES under any reward, weight units: alpha sqrt(d T / N).

    Each step is sum_n c_n eps_n, and steps are independent, so E|D|^2 = d sum_t sum_n c_n^2. Members are drawn
    independently, and their fitness is z-scored: c_n = alpha z_n / N and sum z^2 = N, so E|D|^2 = alpha^2 d T / N,
    exactly, for any rewards that are not tied. For antithetic pairs and other shapings use `norm_of_coefficients`.

    Args:
        alpha: step size that includes the factor 1/sigma, weight units.
        d: number of weights that move.
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
    require(fit, f"alpha {alpha}, d {d}, steps {steps}, N {population}: pass positive alpha and d, and N of at least 2")
    return float(alpha * math.sqrt(d * steps * population) / population)


def norm_of_coefficients(coefficients: Sequence[ArrayLike], d: int) -> float:
    """Return the norm of ES from the coefficients of its noise, for any shaping and schedule: sqrt(d sum c^2).

    coefficients: (members,) of each step, weight units, as `update_rules.coefficients` gives them. d: number of weights
    that move. The norm is in weight units.

    >>> norm_of_coefficients([[0.5, -0.5]], d=8)
    2.0
    """
    return math.sqrt(d * sum(float(np.square(np.asarray(c, np.float64)).sum()) for c in coefficients))


def norm_band(d: float, level: float = 0.95) -> tuple[float, float]:
    """Return the interval, under the null, of |D| over its expected root mean square: that of chi_d / sqrt(d).

    Given the coefficients, D is Gaussian with equal variances, since under the null the noise is independent of them.
    The ratio's standard deviation is close to 1 / sqrt(2 d).

    d: number of independent coordinates: all weights, or fewer with tied noise (`tied_d`: about those of the largest
    tensor).
    Raises ValueError unless d is positive.

    >>> [round(end, 3) for end in norm_band(10_000)]
    [0.986, 1.014]
    """
    positive("d", d)
    return tuple(float(math.sqrt(scipy.stats.chi2.ppf(p, d) / d)) for p in ((1 - level) / 2, (1 + level) / 2))


def tied_d(shapes: Mapping[str, Sequence[int]]) -> float:
    """Return the number of independent coordinates of |D|^2 under tied noise, for `norm_band`: d^2 / sum_x m_x^2.

    m_x is the number of tensors that take an entry from position x, (row, column), of the one matrix of noise. If it is
    Gaussian, |D|^2 has mean d and variance 2 sum m^2, in units of the step.

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
    """The cosine of two displacements, with its distribution for random directions."""

    value: float
    """NaN if either displacement is 0"""
    d: int
    """number of entries"""
    effective_d: float
    """d of random directions with the same norm in each tensor: |a|^2 |b|^2 / sum_l |a_l|^2 |b_l|^2 / d_l"""

    @property
    def std(self) -> float:
        """Standard deviation for random directions with the same norm in each tensor, d_eff^-1/2."""
        return self.effective_d**-0.5

    @property
    def z(self) -> float:
        """The value in units of `std`."""
        return self.value / self.std

    def band(self, level: float = 0.95) -> float:
        """Return b such that a share `level` of random directions has a cosine between -b and b."""
        return NormalDist().inv_cdf((1 + level) / 2) * self.std


def cosine(tensors: Displacements, a: int = 0, b: int = 1, rows: slice | NDArray[np.int64] = slice(None)) -> Cosine:
    """Return the cosine of two displacements.

    tensors: not grouped, since each tensor has its own norm. rows: the tensors that count. Raises IndexError for a
    displacement that does not exist.
    """
    entries, products = tensors.entries[rows], tensors.gram[rows, a, b]
    one, other = tensors.squares[rows, a], tensors.squares[rows, b]
    both, spread = one.sum() * other.sum(), (one * other / entries).sum()
    value = float(products.sum() / math.sqrt(both)) if both > 0 else math.nan
    return Cosine(value, int(entries.sum()), float(both / spread) if spread > 0 else math.nan)


def cosines(tensors: Displacements, key: str | Callable[[str], str], a: int = 0, b: int = 1) -> dict[str, Cosine]:
    """Return the cosines by layer or kind; `key`, order and errors as for `Displacements.by`."""
    return {group: cosine(tensors, a, b, rows) for group, rows in tensors._members(key).items()}


# ---- a random direction


def random_like(norms: Mapping[str, float], shapes: Mapping[str, Sequence[int]], key: int) -> dict[str, Tensor]:
    """Return a random direction with a displacement's norm in each tensor, float32: the null for its direction.

    Each tensor is Gaussian, drawn from NumPy's Philox with a seed derived from (key, parameter id), then scaled, so
    neither the order nor the choice of tensors changes the draws. Within one version of NumPy, the same key, name and
    shape give the same entries. The result is a displacement: add it to the start.

    norms: name -> |D_l|, weight units, such as `dict(zip(found.names, found.norms[:, k]))`. shapes: name -> shape.
    key: key of the draws, at least 0.
    Raises ValueError for a norm that is negative, not finite or without a shape, or a negative key.
    """
    import torch

    from evoalign_lib import noise

    whole_number("key", key, least=0)
    direction = {}
    for name, norm in norms.items():
        fit = name in shapes and math.isfinite(norm) and norm >= 0
        require(fit, f"{name!r} has the norm {norm} and the shape {shapes.get(name)}: pass a shape and a finite norm")
        seeds = np.random.SeedSequence(key, spawn_key=(noise.parameter_id(name),))
        drawn = np.random.Generator(np.random.Philox(seeds)).standard_normal(tuple(shapes[name]), dtype=np.float32)
        length = math.sqrt(float(np.square(drawn, dtype=np.float64).sum()))
        direction[name] = torch.from_numpy(drawn * np.float32(norm / length if length else 0.0))
    return direction
