"""How well one ES step estimates a gradient that can be computed exactly.

The objective is the expected reward of a model that samples at temperature 1, J = mean over prompts x of
sum_y p(y | x) R(y). On problems small enough to enumerate the completions y, J and g = dJ/dtheta are exact up to the
probability that the enumeration leaves out. Let s_n = eps_n . g be a member's projection and rho the correlation of
fitness and s over a population. The step alpha/N sum_n z_n eps_n then has step . g = alpha rho std(s): for any fitness,

    cosine(step, g) = rho sqrt(N/d) * [std(s) / |g|] * [alpha sqrt(d/N) / |step|],

where d is the number of weights and both brackets are close to 1 (the first within 1/sqrt(2N), since s / |g| is
standard normal). The cosine is small for every N in use. What the rest of the step does has to be measured: `decompose`
splits the step, and `evoalign_study.kinds.exact` measures the reward along both parts.

Greedy decoding, which ES uses for its fitness, has a different objective: the greedy reward is a step function of the
weights, which the population smooths over sigma. Its gradient need not be g.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from evoalign_lib import noise, update_rules
from evoalign_lib.analysis.arrays import array
from evoalign_lib.checks import require, whole_number

_ROWS = 1024  # prefixes per forward pass of the enumeration
_MASK_ELEMENTS = 1 << 18  # in the attention mask of one forward pass over trees; 1 MB stays in the cache of a core


# ---- enumeration


@dataclass(frozen=True, eq=False)
class Enumeration:
    """Completions of some prompts with their probabilities, sorted by prompt."""

    prompts: list[list[int]]
    """token ids"""
    prompt: np.ndarray
    """int64 (completions,), index of the prompt that each completes"""
    tokens: np.ndarray
    """int32 (completions, longest), ids up to and including the end token, then -1"""
    log_probability: np.ndarray
    """float64 (completions,), natural logarithm, at temperature 1 and the weights of the enumeration"""
    covered: np.ndarray
    """float64 (prompts,), total probability of each prompt's completions"""

    def __len__(self) -> int:
        return len(self.prompt)

    def completions(self) -> list[list[int]]:
        """Return the token ids of each completion, without padding."""
        lengths = (self.tokens >= 0).sum(1)
        return [row[:n].tolist() for row, n in zip(self.tokens, lengths, strict=True)]


@torch.inference_mode()
def enumerate_completions(
    model: Any,
    prompts_ids: Sequence[Sequence[int]],
    *,
    eos_ids: Collection[int],
    max_new_tokens: int,
    min_probability: float = 1e-7,
) -> Enumeration:
    """Enumerate the completions that sampling at temperature 1 can produce, by expanding their prefix tree.

    The tree is expanded breadth first in blocks of prefixes. If there are more prefixes than fit into a block, all
    descendants of one block come before the next block, which bounds the memory. As in the engines, a completion ends
    with an end token, or without one at max_new_tokens.

    Args:
        model: a Hugging Face decoder-only model.
        prompts_ids: (prompts) token ids of each prompt.
        eos_ids: ids that end a completion.
        max_new_tokens: largest number of tokens per completion.
        min_probability: prefixes, and so completions, less probable than this are left out; 0 keeps everything.

    Returns:
        The completions. The expectation of a reward in [0, b] lies within b * (1 - covered) of the sum over them.

    Raises:
        ValueError: no prompt, an empty prompt, or a number out of range.
    """
    from transformers import DynamicCache

    prompts = [list(map(int, ids)) for ids in prompts_ids]
    require(prompts and all(prompts), f"every prompt needs a token or more, got {len(prompts)} prompts: {prompts[:3]}")
    whole_number("max_new_tokens", max_new_tokens)
    require(0 <= min_probability < 1, f"min_probability={min_probability} must be at least 0 and below 1")
    threshold = math.log(min_probability) if min_probability else -math.inf
    ends = torch.tensor(sorted(eos_ids))
    width = max(map(len, prompts))
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    # padding is masked, so any id will do
    ids = torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts])

    found = []
    # blocks of prefixes to expand: prompt, new tokens and log-probability of each, and the location of the keys and
    # values of all but the last token: the cache of the parents' block and the parents' rows in it
    root = torch.empty(len(prompts), 0, dtype=torch.int64), torch.zeros(len(prompts), dtype=torch.float64)
    blocks = [(torch.arange(len(prompts)), *root, None, None)]
    while blocks:
        prompt, tokens, log_probability, cache, parents = blocks.pop()
        depth = tokens.shape[1]
        attention = torch.cat([mask[prompt], torch.ones_like(tokens)], 1)
        if cache is None:
            positions, new = (attention.cumsum(1) - 1).clamp_(min=0), ids[prompt]
        else:
            positions, new = attention.sum(1, keepdim=True) - 1, tokens[:, -1:]
            cache = DynamicCache([(layer.keys[parents], layer.values[parents]) for layer in cache.layers])
        out = model(
            input_ids=new,
            attention_mask=attention,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        total = log_probability[:, None] + out.logits[:, -1].double().log_softmax(-1)
        row, token = torch.nonzero(total >= threshold, as_tuple=True)
        children, log_probability = torch.cat([tokens[row], token[:, None]], 1), total[row, token]
        ended = torch.isin(token, ends) | (depth + 1 == max_new_tokens)
        found.append((prompt[row[ended]], children[ended].to(torch.int32), log_probability[ended]))
        live = torch.nonzero(~ended)[:, 0]
        for i in range(0, len(live), _ROWS):
            part = live[i : i + _ROWS]
            blocks.append((prompt[row[part]], children[part], log_probability[part], out.past_key_values, row[part]))

    longest = max(tokens.shape[1] for _, tokens, _ in found)
    found = [(prompt, pad(tokens, (0, longest - tokens.shape[1]), value=-1), log) for prompt, tokens, log in found]
    prompt, tokens, log_probability = (torch.cat(parts).numpy() for parts in zip(*found, strict=True))
    order = np.argsort(prompt, kind="stable")
    prompt, tokens, log_probability = prompt[order], tokens[order], log_probability[order]
    covered = np.bincount(prompt, np.exp(log_probability), minlength=len(prompts))
    return Enumeration(prompts, prompt, tokens, log_probability, covered)


# ---- the objective and its gradient


class Trees(NamedTuple):
    """Completions of a few prompts as prefix trees, each packed after its prompt into one row of a forward pass."""

    ids: Tensor  # int64 (rows, length): the prompt, then the inner nodes of its tree, then padding
    positions: Tensor  # int64 (rows, length)
    mask: Tensor  # float32 (rows, 1, length, length): 0 where a token may attend to another, which is in its prefix
    edges: tuple[Tensor, Tensor, Tensor]  # for every node: row, position of the parent, the node's token
    paths: Tensor  # int64 (completions, longest): the edges of each completion, padded with the number of edges
    rewards: Tensor  # float64 (completions,)


def expected_reward_gradient(model: Any, enumeration: Enumeration, rewards: np.ndarray) -> dict[str, np.ndarray]:
    """Return the gradient of the expected reward with respect to the model's weights, by backpropagation.

    Args:
        model: a Hugging Face decoder-only model.
        enumeration, rewards: as for `pack`, with the same errors.

    Returns:
        Canonical Hugging Face name (tied weights once) -> float32 array of the parameter's shape, reward units per
        weight unit. `flat` turns it into one vector.
    """
    parameters = dict(model.named_parameters())
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for trees in pack(enumeration, rewards):
        value = _value(model, trees) / len(enumeration.prompts)
        for gradient, part in zip(total.values(), torch.autograd.grad(value, list(parameters.values())), strict=True):
            gradient += part
    return {name: gradient.float().numpy() for name, gradient in total.items()}


def flat(layout: noise.Layout, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Return arrays by parameter name, such as a gradient, as one float32 (layout.size,) vector with 0 in the padding.

    >>> layout = noise.Layout.from_shapes([("weight", (2, 2))])
    >>> flat(layout, {"weight": np.array([[1, 2], [3, 4]])})[:6]
    array([1., 2., 3., 4., 0., 0.], dtype=float32)
    """
    vector = np.zeros(layout.size, np.float32)
    for name, view in layout.views(vector).items():
        view[...] = arrays[name]
    return vector


def pack(enumeration: Enumeration, rewards: np.ndarray) -> list[Trees]:
    """Return the completions whose reward is not 0 as prefix trees, batched by forward pass, for `expected`.

    rewards: (completions,). Raises ValueError unless they are one finite number per completion.
    """
    rewards, n = array("rewards", rewards, 1), len(enumeration)
    require(len(rewards) == n, f"{len(rewards)} rewards for {n} completions: pass one for each")
    trees: dict[int, _Tree] = {}
    for i in np.flatnonzero(rewards):
        prompt, ids = int(enumeration.prompt[i]), enumeration.tokens[i]
        tree = trees.setdefault(prompt, _Tree(enumeration.prompts[prompt]))
        tree.add(ids[ids >= 0].tolist(), float(rewards[i]))
    batches: list[list[_Tree]] = []
    for tree in sorted(trees.values(), key=lambda tree: len(tree.ids)):
        # trees come in ascending length, so this one would set the length of the batch
        if not batches or (len(batches[-1]) + 1) * len(tree.ids) ** 2 > _MASK_ELEMENTS:
            batches.append([])
        batches[-1].append(tree)
    return [_pad(batch) for batch in batches]


class _Tree:
    """The prefix tree of one prompt's completions, built one completion at a time."""

    def __init__(self, prompt: list[int]):
        self.ids = list(prompt)  # the prompt, then the inner nodes, whose logits are needed
        self.parents = list(range(-1, len(prompt) - 1))  # slot of each slot's predecessor
        self.slots = {(): len(prompt) - 1}  # prefix of a completion -> slot of its last token
        self.edges: dict[tuple[int, ...], int] = {}  # prefix -> number of its last edge
        self.paths: list[list[int]] = []
        self.rewards: list[float] = []

    def add(self, ids: list[int], reward: float) -> None:
        prefixes = [tuple(ids[:n]) for n in range(1, len(ids) + 1)]
        self.paths.append([self.edges.setdefault(prefix, len(self.edges)) for prefix in prefixes])
        self.rewards.append(reward)
        for prefix in prefixes[:-1]:
            if prefix not in self.slots:
                self.slots[prefix] = len(self.ids)
                self.ids.append(prefix[-1])
                self.parents.append(self.slots[prefix[:-1]])


def _pad(batch: list[_Tree]) -> Trees:
    rows, length = len(batch), max(len(tree.ids) for tree in batch)
    ids, positions = np.zeros((rows, length), np.int64), np.zeros((rows, length), np.int64)
    sees = np.zeros((rows, length, length), bool)
    sees[:, range(length), range(length)] = True
    edges, paths, rewards = [], [], []
    for r, tree in enumerate(batch):
        ids[r, : len(tree.ids)] = tree.ids
        for slot, parent in enumerate(tree.parents):
            if parent >= 0:
                sees[r, slot] |= sees[r, parent]
        positions[r] = sees[r].sum(1) - 1
        paths += [[len(edges) + edge for edge in path] for path in tree.paths]
        edges += [(r, tree.slots[prefix[:-1]], prefix[-1]) for prefix in tree.edges]
        rewards += tree.rewards
    longest = max(map(len, paths))
    row, slot, token = torch.tensor(edges).T
    return Trees(
        torch.from_numpy(ids),
        torch.from_numpy(positions),
        torch.zeros(sees.shape).masked_fill_(~torch.from_numpy(sees), torch.finfo(torch.float32).min)[:, None],
        (row, slot, token),
        torch.tensor([path + [len(edges)] * (longest - len(path)) for path in paths]),
        torch.tensor(rewards, dtype=torch.float64),
    )


def _value(model: Any, trees: Trees) -> Tensor:
    """Return the sum of p R over the completions, float64."""
    row, slot, token = trees.edges
    first = int(slot.min())  # earlier slots are prompt tokens, where nothing branches
    logits = model(
        input_ids=trees.ids,
        attention_mask=trees.mask,
        position_ids=trees.positions,
        use_cache=False,
        logits_to_keep=trees.ids.shape[1] - first,
    ).logits
    edges = (logits[row, slot - first, token] - logits.logsumexp(-1)[row, slot - first]).double()
    return trees.rewards @ torch.cat([edges, edges.new_zeros(1)])[trees.paths].sum(1).exp()


@torch.inference_mode()
def expected(model: Any, packed: list[Trees], prompts: int) -> float:
    """Return the expected reward of a model over this number of prompts, from completions that `pack` arranged."""
    return sum(_value(model, trees).item() for trees in packed) / prompts


# ---- one step


def step(layout: noise.Layout, keys: np.ndarray, z: np.ndarray, alpha: float) -> np.ndarray:
    """Return the displacement of one ES step, alpha/N sum_n z_n eps_n.

    Args:
        layout: the layout of the parameters.
        keys: uint64 (members,), member keys.
        z: (members,) standardised fitness.
        alpha: step size that includes the factor 1/sigma, weight units.

    Returns:
        float32 (layout.size,), weight units, 0 in the padding.
    """
    displacement = np.zeros(layout.size, np.float32)
    noise.update(displacement, layout, keys, (alpha * np.asarray(z) / len(keys)).astype(np.float32))
    return displacement


def projections(layout: noise.Layout, keys: np.ndarray, direction: np.ndarray) -> np.ndarray:
    """Return eps_n . direction for each member, float64 (members,).

    keys: uint64 (members,). direction: (layout.size,).
    """
    direction = direction.astype(np.float64)
    return np.array([noise.noise_vector(layout, int(key)) @ direction for key in keys])


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Return the cosine of two vectors, computed in float64; NaN if either is 0.

    >>> cosine(np.array([3.0, 4.0]), np.array([1.0, 0.0]))
    0.6
    """
    a, b = a.astype(np.float64), b.astype(np.float64)
    norms = np.linalg.norm(a) * np.linalg.norm(b)
    return float(a @ b / norms) if norms > 0 else math.nan


def decompose(step: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split a step into its projection on a direction and the rest.

    Args:
        step: (size,).
        g: (size,), not 0.

    Returns:
        The parts along and across the direction, float64 (size,) each; their sum is the step.

    Raises:
        ValueError: g is 0.

    >>> decompose(np.array([3.0, 4.0]), np.array([2.0, 0.0]))
    (array([3., 0.]), array([0., 4.]))
    """
    step, g = step.astype(np.float64), g.astype(np.float64)
    norm = np.linalg.norm(g)
    require(norm, "the direction is 0 everywhere: pass one with a positive norm to project on")
    unit = g / norm
    aligned = (step @ unit) * unit
    return aligned, step - aligned


def fitness_correlation(fitness: np.ndarray, projections: np.ndarray) -> float:
    """Return rho, Pearson's correlation of fitness and eps . g over a population; NaN if the population is tied.

    Args:
        fitness: (members,) reward units.
        projections: (members,) eps_n . g.

    >>> fitness_correlation(np.array([1.0, 2.0, 4.0]), np.array([10.0, 20.0, 40.0]))
    1.0
    """
    # the step is made of the same z, so ties are decided by the same rule
    z, s = update_rules.standardise(fitness), update_rules.standardise(projections)
    return float(np.clip(z @ s / len(z), -1, 1)) if z.any() and s.any() else math.nan
