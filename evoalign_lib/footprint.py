"""Peak memory of one step of each method, in bytes by component, computed from a model's shape.

The peak is the larger of a method's phases: generating and, with gradients, the backward pass or the update. It counts
the tensors and arrays that a method keeps, and what a pass over the model needs besides. Notebook 06 compares it with
real steps on a CPU, where transformers generates; with `gpus` it accounts for three differences on GPUs:

1. vLLM generates. Its cache has a row of full length for each completion and stays allocated, its temporaries are not
   counted, and a gradient method holds a copy of the weights for it in the model's dtype (TRL's "colocate").
2. TRL's log-probabilities come from one tile of logits, on which Triton's kernel works in place; on a CPU PyTorch
   allocates seven more, as wide as the vocabulary.
3. AdamW updates all tensors at once, with a copy of the gradients; on a CPU it updates them one after the other.

What autograd keeps per token and layer of a Qwen2 (h: hidden size; q: number of heads times head size; k: the
same for keys; i: intermediate size; k equals q if there are several key heads, which transformers repeats for all
heads, and the head size if there is one): in float32 6 h + 2 q + 2 k + 4 i numbers. In bfloat16 the norms compute in
float32 and keep their inputs in it: 16 h + 2 (2 q + 2 k + 4 i) bytes. With a LoRA adapter of rank r over a frozen
bfloat16 base, a linear layer keeps only the input of its factors, which PEFT casts to float32 for each of q, k, v and
o: 20 h + 8 q + 4 k + 6 i + 16 r bytes.
Gradients are already allocated when a backward pass begins, as with several micro-batches per step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from evoalign_lib.engines.memory import Shape, kv_bytes

COMPONENTS = ("weights", "working copy", "master", "compensation", "adapter", "gradients", "moments", "reference model")
COMPONENTS += ("rollout copy", "saved activations", "logits", "KV cache", "noise or factors", "search", "temporaries")
"""Components of the memory: "working copy" is what a member is written into, "search" is the state of CMA-ES with the
singular directions, "rollout copy" is vLLM's weights next to the trained ones."""
TRAINED = {"weights": 4, "gradients": 4, "moments": 8}
"""Bytes per parameter kept when training by AdamW in float32."""
TILE = 4096, 32768
"""Tokens and vocabulary of a tile of logits in TRL (TRL 1.16, `kernels.chunked_logprob`)."""
ADAPTER_RANK = 8
"""Rank of adapters, on the projections q, k, v and o (`essa.lora_config`)."""
_LEAST_EIGHT_BITS = 4096  # smallest tensor whose moments have 8 bits (torchao.optim, as bitsandbytes)
_BLOCK = 1 << 18  # weights whose noise is in memory at once (as in `precision`)


@dataclass(frozen=True)
class Work:
    """What is in memory at once during a step."""

    rows: int
    """completions of a member, or of a micro-batch"""
    prompt: int
    """tokens of a prompt, padding included"""
    new: int
    """tokens of a completion"""
    generated: int
    """completions decoded at once, over all members of a batch"""
    members: int = 1
    """low-rank members decoded in one batch"""
    rank: int = 1
    """rank of their noise"""
    population: int = 96
    """candidates of a search"""
    prefix: int = 0
    """tokens that all prompts share at the start, which the decoding loop computes once"""


@dataclass(frozen=True)
class Method:
    """A training method, as far as its memory depends on it."""

    label: str
    gradients: bool
    dtype: str
    """dtype of the weights that matrix products read: "float32" or "bfloat16" """
    kept: Mapping[str, int]
    """component -> bytes per parameter of the model that stay from step to step"""
    adapter: Mapping[str, int] = field(default_factory=dict)
    """the same per parameter of the adapter, if the method trains one"""


_FROZEN = {"weights": 2}
_MEMBERS = {"adapter": 4, "master": 4, "working copy": 4}
_MIXED = {"weights": 2, "gradients": 2, "moments": 8, "master": 4}
METHODS: dict[str, Method] = {
    "es": Method("ES, float32 master", False, "bfloat16", {"working copy": 2, "master": 4}),
    "es_kahan": Method("ES, compensated pair", False, "bfloat16", {"weights": 2, "compensation": 2}),
    "es_inplace": Method("ES, in place", False, "bfloat16", _FROZEN),
    "es_loop": Method(
        "ES, this project's CPU engine", False, "float32", {"weights": 4, "master": 4, "working copy": 4}
    ),
    "es_low_rank": Method("ES, low-rank members in a batch", False, "float32", {"master": 4}),
    "es_lora": Method("ES over LoRA", False, "bfloat16", _FROZEN, _MEMBERS),
    "essa": Method("ESSA", False, "bfloat16", _FROZEN, _MEMBERS),
    "grpo": Method("GRPO", True, "float32", TRAINED),
    "grpo_reference": Method("GRPO, reference model", True, "float32", TRAINED | {"reference model": 4}),
    "grpo_mixed": Method("GRPO, bfloat16 and master", True, "bfloat16", _MIXED),
    "grpo_adam8bit": Method("GRPO, 8-bit Adam", True, "float32", {"weights": 4, "gradients": 4}),
    "grpo_adam8bit_bfloat16": Method("GRPO, 8-bit Adam, bfloat16", True, "bfloat16", {"weights": 2, "gradients": 2}),
    "grpo_lora": Method("GRPO over LoRA", True, "bfloat16", _FROZEN, {"adapter": 4, "gradients": 4, "moments": 8}),
}
"""Name -> method. The master of "es" is held in addition to bfloat16 weights, as on GPUs; "grpo" is trained as in this
project, "grpo_mixed" as on clusters."""


def bytes_of(method: str, model: Shape, work: Work, gpus: bool = False) -> dict[str, int]:
    """Return the bytes of each component present at the peak, in the order of `COMPONENTS`.

    Args:
        method: a key of `METHODS`.
        model: shape of the model; the dtype is the method's, and for a rollout copy the model's own.
        work: what is in memory at once.
        gpus: compute it for GPUs, see the module's docstring.

    Raises:
        KeyError: no such method.
    """
    state = _state(method, model, work, gpus)
    phases = [state | extra for extra in _phases(method, model, work, gpus)]
    peak = max(phases, key=lambda phase: sum(phase.values()))
    return {name: round(peak[name]) for name in COMPONENTS if peak.get(name)}


def adapter_parameters(model: Shape, rank: int = ADAPTER_RANK) -> int:
    """Return the number of parameters of a LoRA adapter on q, k, v and o."""
    return sum(rank * (rows + cols) for rows, cols in _adapted(model))


def _adapted(model: Shape) -> list[tuple[int, int]]:
    """Return (outputs, inputs) of each adapted matrix."""
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    layer = [(q, model.hidden), (kv, model.hidden), (kv, model.hidden), (model.hidden, q)]
    return layer * model.layers


def _matrices(model: Shape) -> list[tuple[int, int]]:
    """Return (rows, columns) of each matrix of the model."""
    head = [(model.vocabulary, model.hidden)] * (2 if model.head else 1)
    layer = [(model.intermediate, model.hidden)] * 2 + [(model.hidden, model.intermediate)]
    return head + _adapted(model) + layer * model.layers


def _vectors(model: Shape) -> list[int]:
    """Return the size of each bias and norm of the model; norms outside the residual stream count as one vector."""
    q, kv, h, layers = model.heads * model.head_dim, model.kv_heads * model.head_dim, model.hidden, model.layers
    biases = [q, kv, kv] * layers if model.queries > layers * h * q else []
    found = [h] * (2 * layers + 1) + biases
    rest = model.d - sum(found) - sum(rows * cols for rows, cols in _matrices(model))
    return [*found, rest] if rest else found


def _largest(model: Shape) -> int:
    return max(rows * cols for rows, cols in _matrices(model))


# ---- memory that stays


def _state(method: str, model: Shape, work: Work, gpus: bool) -> dict[str, float]:
    """Return the memory that a method keeps from step to step."""
    d, adapter = model.d, adapter_parameters(model)
    kept = {name: width * d for name, width in METHODS[method].kept.items()}
    kept |= {name: width * adapter for name, width in METHODS[method].adapter.items()}
    if method.startswith("grpo_adam8bit"):
        sizes = np.array([*(rows * cols for rows, cols in _matrices(model)), *_vectors(model)])
        small = (sizes < _LEAST_EIGHT_BITS) | (sizes % 256 > 0)
        # one byte per number, one float32 per block of 256, a table of 256
        moment = np.where(small, _width(method) * sizes, sizes + 4 * sizes / 256 + 4 * 256)
        kept["moments"] = 2 * float(moment.sum())
    elif method == "es_loop":
        kept["working copy"] += 4 * _joined(model)
    elif method == "es_low_rank":
        factors = sum(work.rank * (rows + cols) for rows, cols in _matrices(model))
        kept["noise or factors"] = 4 * work.members * (factors + sum(_vectors(model)))
        # on a GPU products read a bfloat16 copy; the CPU's engine reads the master itself, and joins matrices
        kept |= {"working copy": 2 * d} if gpus else {"weights": 4 * d, "working copy": 4 * _joined(model)}
    elif method == "essa":
        n = 2 * ADAPTER_RANK * len(_adapted(model))
        directions = sum(ADAPTER_RANK * (rows + cols + 2 * ADAPTER_RANK) for rows, cols in _adapted(model))
        # the start; in float64: directions, candidates (in their table and twice within cma), C and its eigenvectors,
        # and 14 vectors: mean, paths, scales and the like (cma 4.5)
        kept["search"] = 4 * adapter + 8 * (directions + (3 * work.population + 14) * n + 2 * n * n)
    if gpus and METHODS[method].gradients:
        kept["rollout copy"] = model.width * d
    return kept


def _width(method: str) -> int:
    return 2 if METHODS[method].dtype == "bfloat16" else 4


def _joined(model: Shape) -> int:
    """Return the size of the matrices and biases that the decoding loop joins: queries, keys, values; gate, up."""
    return model.queries + model.keys_values + 2 * model.layers * model.hidden * model.intermediate


# ---- memory that comes and goes


def _phases(method: str, model: Shape, work: Work, gpus: bool) -> list[Mapping[str, float]]:
    """Return the memory of each phase beyond the state; a component that the state has, too, is replaced."""
    generating = _generating(method, model, work, gpus)
    if not METHODS[method].gradients:
        return [generating] if gpus else [generating, _perturbing(method, model)]
    stays = generating if gpus else {}
    trained = _backward(method, model, work, gpus), _moving(method, model, gpus)
    return [generating | {"gradients": 0}, *(stays | phase for phase in trained)]


def _generating(method: str, model: Shape, work: Work, gpus: bool) -> dict[str, float]:
    """Return caches and temporaries of decoding, at its peak: the prompts' pass or the last token."""
    width, rows, h = _width(method), work.generated, model.hidden
    length = work.prompt + work.new
    if gpus:
        return {"KV cache": rows * length * kv_bytes(model, width=model.width)}
    if method in ("es_loop", "es_low_rank"):
        tokens = rows * (work.prompt - work.prefix)
        cached = (rows * length + work.members * work.prefix) * kv_bytes(model, width=4)
        heads, i = 2 * (model.heads + model.kv_heads) * model.head_dim, model.intermediate
        # in a layer: the stream, its change and a normed copy, and the results of attention and MLP; the previous
        # layer's stay until they are replaced, and the last layer's MLP runs on the last tokens only
        wide = max(2 * heads + 3 * i, (heads + 5 * i) * (model.layers > 2))
        return {"KV cache": cached, "temporaries": 4 * tokens * (3 * h + wide)}
    tokens = rows * work.prompt
    # in the prompts' pass: embeddings, a layer's input, the stream, a normed copy, and three of the MLP's width;
    # cosines and sines of the positions, and three integers
    prompts = tokens * (width * (4 * h + 3 * model.intermediate + 2 * model.head_dim) + 24)
    first = {"KV cache": tokens * kv_bytes(model, width=width), "temporaries": prompts}
    # a layer's cache exists twice while it grows by a token
    cached = rows * (length - 1) * kv_bytes(model, width=width)
    last = {"KV cache": cached, "temporaries": cached / model.layers / 2}
    return max(first, last, key=lambda phase: sum(phase.values()))


def _perturbing(method: str, model: Shape) -> dict[str, float]:
    """Return what writing a member into the weights takes on a CPU: noise, and sums of a tensor or a block."""
    largest = _largest(model)
    block = min(_BLOCK, largest)
    taken = {"es": {"noise or factors": 4 * largest}}  # a member in float32, one tensor at a time
    taken |= {"es_kahan": {"temporaries": 18 * block}}
    taken |= {"es_inplace": {"noise or factors": 4 * block, "temporaries": 4 * block}}
    return taken.get(method, {})


def activation_bytes(method: str, model: Shape, tokens: int) -> int:
    """Return the bytes that autograd keeps of a forward pass of this many tokens, the head's input included."""
    h, i = model.hidden, model.intermediate
    q = model.heads * model.head_dim
    k = q if model.kv_heads > 1 else model.head_dim
    if METHODS[method].adapter:  # the first layer's input is the frozen embedding's
        layer, ends = 20 * h + 8 * q + 4 * k + 6 * i + 16 * ADAPTER_RANK, 8 * h - 4 * h
    elif METHODS[method].dtype == "bfloat16":
        layer, ends = 16 * h + 2 * (2 * q + 2 * k + 4 * i), 8 * h + 2 * h
    else:
        layer, ends = 4 * (6 * h + 2 * q + 2 * k + 4 * i), 12 * h + 4 * h
    small = 4 * (2 + model.heads)  # each norm keeps a root, attention the logarithm of a sum
    return tokens * (model.layers * (layer + small) + ends)


def _backward(method: str, model: Shape, work: Work, gpus: bool) -> dict[str, float]:
    """Return what is in memory when a backward pass has reached the logits."""
    tokens, width = work.rows * (work.prompt + work.new), _width(method)
    scored = work.rows * (work.new if gpus else work.prompt + work.new - 1)
    tile = min(scored, TILE[0])
    logits = width * tile * TILE[1]
    if not gpus:
        logits += 4 * 7.25 * tile * min(model.vocabulary, TILE[1])
    head = 0 if METHODS[method].adapter else 4 * model.vocabulary * model.hidden
    return {
        "saved activations": activation_bytes(method, model, tokens),
        "logits": logits,
        "temporaries": head + 4 * scored * model.hidden,
    }


def _moving(method: str, model: Shape, gpus: bool) -> dict[str, float]:
    """Return the temporaries of AdamW: of all tensors on GPUs, of one at a time on a CPU."""
    if method == "grpo_lora":
        moved, largest = adapter_parameters(model), ADAPTER_RANK * max(model.hidden, model.heads * model.head_dim)
    else:
        moved, largest = model.d, _largest(model)
    eight = method.startswith("grpo_adam8bit")
    if gpus:
        return {"temporaries": 0 if eight else 4 * moved}
    # 40 bytes per number: in eager mode the eight-bit codes are int64 for a while
    return {"temporaries": (40 if eight else 12 if method == "grpo_mixed" else 8) * largest}
