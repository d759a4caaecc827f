"""GPU memory of a model's weights and caches, calculated from its config alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

USABLE = 0.9
"""Share of a GPU's memory that plans may use: vLLM's long-standing default of gpu_memory_utilization."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters for which vLLM can allocate (MaxLoRARanks in its config/lora.py)."""
MEMBERS_A_BATCH = 16
"""Adapters in one batch of vLLM unless engine_kwargs set max_loras."""
_BYTES = {"float32": 4, "None": 4, "bfloat16": 2, "float16": 2}  # without a dtype transformers means float32


class CannotCount(ValueError):
    """Raised for a model whose parameters this module cannot count."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a dense decoder-only model: parameters by component, over all layers, and what memory depends on."""

    embedding: int
    """token embedding"""
    head: int
    """output head; 0 if it is tied to the embedding"""
    queries: int
    """query projections with their biases"""
    keys_values: int
    """key and value projections with their biases; groups of query heads share these heads"""
    output: int
    """output projections of the attention"""
    mlp: int
    """gate, up and down projections"""
    norms: int
    """norms of the layers, the final norm, and those of queries and keys if there are any"""
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    dtype: str
    """dtype of the published weights"""

    @property
    def d(self) -> int:
        """Number of parameters, tied ones counted once."""
        attention = self.queries + self.keys_values + self.output
        return self.embedding + self.head + attention + self.mlp + self.norms

    @property
    def width(self) -> int:
        """Bytes per weight in the model's dtype."""
        return _BYTES[self.dtype]


def shape(config: Any) -> Shape:
    """Count a model's parameters by component.

    Args:
        config: a config of transformers, or the contents of a config.json; types llama, mistral, qwen2 and qwen3.

    Raises:
        CannotCount: another type, quantised weights, or a dtype other than float32, bfloat16 and float16.

    >>> shape({"model_type": "qwen2", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
    ...     "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 10, "tie_word_embeddings": True}).d
    696
    """
    kind = config.get("model_type") if isinstance(config, Mapping) else config.model_type
    if kind not in ("llama", "mistral", "qwen2", "qwen3"):
        raise CannotCount(
            f"the parameters of model type {kind!r} cannot be counted. Use llama, mistral, qwen2 or qwen3, dense "
            "models whose layers are all alike."
        )
    if isinstance(config, Mapping):
        from transformers import AutoConfig

        config = AutoConfig.for_model(**config)  # fills in the defaults of its type
    if getattr(config, "quantization_config", None):
        raise CannotCount("the weights are quantised, which no arm can train. Use the model's unquantised weights.")
    dtype = str(getattr(config, "dtype", None)).removeprefix("torch.")
    if dtype not in _BYTES:
        raise CannotCount(f"dtype {dtype} is not one of float32, bfloat16 and float16. Use weights in one of them.")
    h, i, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads or heads
    head_dim = getattr(config, "head_dim", None) or h // heads
    q, kv = heads * head_dim, kv_heads * head_dim
    biased = getattr(config, "attention_bias", False)
    inputs = h + (biased or kind == "qwen2")
    return Shape(
        embedding=config.vocab_size * h,
        head=0 if config.tie_word_embeddings else config.vocab_size * h,
        queries=layers * inputs * q,
        keys_values=layers * inputs * 2 * kv,
        output=layers * (q + biased) * h,
        mlp=layers * (3 * h * i + (2 * i + h) * getattr(config, "mlp_bias", False)),
        norms=layers * (2 * h + 2 * head_dim * (kind == "qwen3")) + h,
        layers=layers,
        hidden=h,
        intermediate=i,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=config.vocab_size,
        dtype=dtype,
    )


def rank_parameters(model: Shape, tensor_parallel: int) -> int:
    """Return the number of parameters that one GPU of an engine holds, without the padding of the vocabulary."""
    shared = model.embedding + model.head + model.queries + model.output + model.mlp
    shards = min(tensor_parallel, model.kv_heads)
    return ceil(shared / tensor_parallel) + ceil(model.keys_values / shards) + model.norms


def kv_bytes(model: Shape, tensor_parallel: int = 1, width: int | None = None) -> int:
    """Return the bytes of KV cache per token on one GPU of an engine; width: bytes per number (None: the model's)."""
    heads = max(1, model.kv_heads // tensor_parallel)
    return 2 * model.layers * heads * model.head_dim * (width or model.width)


def tensor_parallel_sizes(model: Shape, most: int) -> list[int]:
    """Return the numbers of GPUs, powers of two up to `most`, over which vLLM can split a model, ascending.

    Each divides the heads and the MLP, and divides the key and value heads or is a multiple of them.
    """

    def fits(t: int) -> bool:
        return not (model.heads % t or model.intermediate % t or (model.kv_heads % t and t % model.kv_heads))

    return [t for t in (2**k for k in range(most.bit_length())) if fits(t)]


def held_parameters(config: Any, parameters: int, tensor_parallel: int) -> float:
    """Return the number of parameters that one tensor-parallel rank holds; an equal share for unknown architectures.

    Args:
        config: the model's config of transformers.
        parameters: number of the model's parameters.
        tensor_parallel: ranks that share the model.
    """
    if tensor_parallel == 1:
        return parameters
    try:
        whole = shape(config)
        return rank_parameters(whole, tensor_parallel) * parameters / whole.d
    except CannotCount:
        return parameters / tensor_parallel


def room_beside_master(total: float, parameters: float, start_width: int = 0) -> float:
    """Return the share of a GPU's memory to give to vLLM, leaving room for the float32 master of the rank's parameters.

    Args:
        total: memory of the GPU, bytes.
        parameters: number of parameters held by one rank.
        start_width: bytes per parameter of the starting weights, which are also kept with anchor_decay.

    Raises:
        ValueError: the master and the starting weights leave no memory for vLLM.

    >>> room_beside_master(80 * 2**30, 7.6e9)
    0.546
    """
    held = (4 + start_width) * parameters
    share = USABLE - held / total
    if share <= 0:
        start, less = (" and the starting weights", ", remove anchor_decay") if start_width else ("", "")
        raise ValueError(
            f"the float32 master{start} of {parameters:,.0f} parameters takes {held / 2**30:.0f} GiB of a GPU that has "
            f"{total / 2**30:.0f}: split the model over more GPUs (tensor_parallel){less}, or use a smaller one."
        )
    return round(share, 3)


def padded_rank(rank: int) -> int:
    """Return the rank for which vLLM allocates to serve adapters of this rank. Raises ValueError if it is too high.

    >>> padded_rank(4)
    8
    """
    if rank > LORA_RANKS[-1]:
        raise ValueError(f"rank {rank} is too high: vLLM's adapters have {LORA_RANKS[-1]} at most. Use engine='local'.")
    return next(known for known in LORA_RANKS if known >= rank)
