"""A decoding loop for small decoder-only models on one CPU core.

`transformers.generate` spends most of a decoding step of a small model outside the matrix products (cache
concatenation, mask building, logits processors, one operation after the other). This loop preallocates the cache,
leaves the products to torch and fuses what lies between them (`_decode_cpu`). It covers the Qwen2 and Llama
architectures with default rotary embedding; `supports` says whether a model is one of them.

Three things save work. The prefix that all prompts share (a system prompt, a template) is computed once. Rows that have
ended are dropped, in blocks of `BLOCK` rows. The products of a bfloat16 model are computed in bfloat16 if the CPU has
instructions for it, otherwise in float32 (`product_dtype`). Everything else is float32, so near-ties of a bfloat16
model may be resolved differently than in transformers, which rounds after every operation.

It reads weights and configuration alone; whether the model computes anything else, `agreement` finds out.

A row's numbers depend on the shape of the batch, which is part of the batch plan (see `engines.local`), but not on the
other rows. A product of few rows may be summed in another order than one of many, so rows are dropped only where
`rows_are_exact` found no difference.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from evoalign_lib.engines import _decode_cpu
from evoalign_lib.low_rank import Population

BLOCK = 8
"""rows are dropped in blocks of this many; at least this many are kept"""
Draw = Callable[[Tensor, Tensor, int], Tensor]
"""Chooses tokens: (logits of some rows of a batch, their indices in it, the step 0, 1, ...) -> a token for each"""
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_MODEL_TYPES = {"qwen2", "llama"}
# the products of a layer, each with the matrices that it joins
JOINED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
NORMS = ("input_layernorm", "post_attention_layernorm")


def supports(config: Any) -> str | None:
    """Return None if the loop can decode a model of this configuration, otherwise the reason why not."""
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    activation = getattr(config, "hidden_act", None)
    reasons = {
        f"model_type {config.model_type!r} is not one of {sorted(_MODEL_TYPES)}": config.model_type not in _MODEL_TYPES,
        f"hidden_act {activation!r} is not 'silu'": activation != "silu",
        "sliding-window attention is on": getattr(config, "use_sliding_window", False),
        "its feed-forward layers have biases": getattr(config, "mlp_bias", False),
        f"rope_type {rope!r} is not 'default'": rope != "default",
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def head_dim(config: Any) -> int:
    """Return the size of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def inverse_frequency(config: Any) -> Tensor:
    """Return the angles by which the default rotary embedding turns from one position to the next, (head_dim / 2)."""
    theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta") or getattr(config, "rope_theta", 10000.0)
    return 1.0 / theta ** (torch.arange(0, head_dim(config), 2, dtype=torch.float32) / head_dim(config))


def misfit(config: Any, weights: Mapping[str, Tensor]) -> str | None:
    """Return which of the weights that the loop reads does not fit: missing, of another size, or alone with a bias."""
    dim, hidden = head_dim(config), config.hidden_size
    heads = [n * dim for n in (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)]
    rows = dict(zip((*JOINED["qkv"], *NORMS, "model.norm"), (*heads, hidden, hidden, hidden), strict=True))
    layer = *JOINED.values(), *((norm,) for norm in NORMS)
    groups = [(f"model.layers.{i}.", modules) for i in range(config.num_hidden_layers) for modules in layer]
    for prefix, modules in [*groups, ("", ("model.embed_tokens",)), ("", ("model.norm",))]:
        biases = {f"{prefix}{module}.bias" in weights for module in modules}
        for module in modules:
            name = f"{prefix}{module}.weight"
            fits = name in weights and (module not in rows or weights[name].shape[:1] == (rows[module],))
            if not fits or len(biases) > 1:
                return f"its parameter {name!r} is not what its configuration says"
    return None


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the loop multiplies for a float32 or bfloat16 model, on this CPU."""
    capabilities = torch.cpu.get_capabilities()
    fast = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
    return torch.bfloat16 if dtype == torch.bfloat16 and fast else torch.float32


@torch.inference_mode()
def rows_are_exact(config: Any, weights: Mapping[str, Tensor], rows: int) -> bool:
    """Return whether this CPU computes the model's products bit for bit alike in batches of `rows` and of fewer rows.

    Random inputs are tried with the matrices of one layer and the head, in batches of every multiple of `BLOCK` up to
    64 and of some larger sizes, also between multiples, as a batch may have at its start.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = {*range(BLOCK, min(rows, 65), BLOCK), *(n + i for i in range(3) for n in (9, 33, 96, 128, 192, 256, 512))}
    for name, matrix in _products(config, weights, layers=1):
        x = torch.randn(rows, matrix.shape[1], generator=generator)
        bias = torch.randn(len(matrix), generator=generator).to(matrix.dtype) if name.endswith("qkv") else None
        whole = _multiply(x, matrix, bias)
        for size in sorted(n for n in sizes if n < rows):
            first = (rows - size) // 2  # rows move within the batch when others are dropped
            if not torch.equal(_multiply(x[first : first + size], matrix, bias), whole[first : first + size]):
                return False
    return True


def _products(config: Any, weights: Mapping[str, Tensor], layers: int) -> Iterator[tuple[str, Tensor]]:
    """Iterate over (name, matrix) of the products of the first layers and the head, matrices of one input joined."""
    for i in range(layers):
        p = f"model.layers.{i}."
        for product, names in JOINED.items():
            parts = [weights[f"{p}{name}.weight"] for name in names]
            yield p + product, torch.cat(parts) if len(parts) > 1 else parts[0]
    yield "head", weights[_head_name(weights)]


def _head_name(weights: Mapping[str, Tensor]) -> str:
    return HEAD if HEAD in weights else EMBEDDING


def _multiply(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x matrix^T + bias in float32, computed in the dtype of the matrix."""
    return F.linear(x.to(matrix.dtype), matrix, bias).float()


def kept(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Return logits, (rows, vocabulary), set to -inf for tokens that top_k and top_p exclude.

    Args:
        logits: after division by the temperature.
        top_k: keep this many of the most probable tokens; 0: all.
        top_p: then keep the most probable tokens that together have this share of the probability; 1: all.

    Source: Fan et al., arXiv 1805.04833; Holtzman et al., arXiv 1904.09751; computed by transformers.
    """
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    if top_k:
        logits = TopKLogitsWarper(top_k)(None, logits)
    return logits if top_p == 1 else TopPLogitsWarper(top_p)(None, logits)


def greedy(logits: Tensor, rows: Tensor, step: int) -> Tensor:
    """Return the most probable token of each row, among ties the first; see `Draw`."""
    return torch.from_numpy(logits.numpy().argmax(1))


def inversion(uniforms: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Draw:
    """Return a `Draw` that samples by inverting the cumulative distribution function.

    Args:
        uniforms: (rows, steps) numbers in [0, 1), one for each token.
        temperature: above 0; the logits are divided by it.
        top_k, top_p: as for `kept`.
    """

    def draw(logits: Tensor, rows: Tensor, step: int) -> Tensor:
        cumulative = kept(logits / temperature, top_k, top_p).softmax(-1).cumsum(-1)
        # the cumulative sum may end just below 1: scale the uniform number so that it never runs off the end
        token = (cumulative <= uniforms[rows, step, None] * cumulative[:, -1:]).sum(-1)
        return token.clamp_(max=logits.shape[-1] - 1)

    return draw


def multinomial(batch: int) -> Draw:
    """Return a `Draw` that uses torch.multinomial and torch's global random state, as transformers at temperature 1.

    Each step draws for all rows of the batch, including those that have ended, so that the random state ends up where
    transformers' generate leaves it. A row's token depends only on its own probabilities and its place in the batch, so
    the other rows may hold anything. Non-finite logits are made finite, as with transformers' remove_invalid_values.
    """

    def draw(logits: Tensor, rows: Tensor, step: int) -> Tensor:
        probabilities = torch.ones(batch, logits.shape[1])
        probabilities[rows] = torch.nan_to_num(logits).softmax(-1)
        return torch.multinomial(probabilities, 1)[rows, 0]

    return draw


class Decoder:
    """Decode batches of prompts.

    Args:
        config: the model's Hugging Face configuration.
        weights: canonical Hugging Face name -> tensor, in the dtype to multiply in (see `product_dtype`). Some are
            copied, so new weights need a new decoder.
        eos_ids: token ids that end a completion.
        pad_id: id that fills a finished row.
        prefix: token ids with which all prompts begin; they are computed here, once.
        drop_rows: stop computing rows that have ended.
        population: low-rank members to decode with instead of the unperturbed weights, which must then be float32.

    Raises:
        ValueError: the architecture is not covered; the message says why.
    """

    @torch.inference_mode()
    def __init__(
        self,
        config: Any,
        weights: Mapping[str, Tensor],
        eos_ids: Iterable[int],
        pad_id: int,
        prefix: Tensor | None = None,
        drop_rows: bool = False,
        population: Population | None = None,
    ):
        if reason := supports(config):
            raise ValueError(f"the decoding loop does not cover this model: {reason}. Use decoder='generate'.")
        self.config, self.pad_id, self.drop_rows = config, pad_id, drop_rows
        self.eos_ids = torch.tensor(sorted(eos_ids))
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = head_dim(config)
        self._inverse_frequency = inverse_frequency(config)
        self._embedding = weights[EMBEDDING]
        self._population = population
        # gains of norms, float32: (members, hidden), or (1, hidden) without a population
        gains = {name: t.float()[None].numpy() for name, t in weights.items() if name.endswith("norm.weight")}
        if population:  # those that do not move are the same for all members
            gains = {n: population.vectors.get(n, np.repeat(g, population.size, 0)) for n, g in gains.items()}
        self._gains = gains
        self._products = {}
        for product, matrix in _products(config, weights, config.num_hidden_layers):
            layer, _, kind = product.rpartition(".")
            names = [f"{layer}.{name}" for name in JOINED[kind]] if layer else [_head_name(weights)[: -len(".weight")]]
            self._products[product] = _Product(matrix, names, weights, population)
        self._prefix = torch.empty(0, dtype=torch.int64) if prefix is None else prefix
        # keys and values of the prefix: (layers, members, kv_heads, length, head_dim)
        members = population.size if population else 1
        self._past = self._cache(members, len(self._prefix))
        if p := len(self._prefix):
            turns, each, pads = self._rotation(p), np.arange(members), np.zeros(members, np.int64)
            self._compute(self._prefix.repeat(members), p, self._past, turns, each, each, pads, 0)

    @torch.inference_mode()
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        max_new_tokens: int,
        draw: Draw = greedy,
        stopped: Callable[[list[list[int]]], list[bool]] | None = None,
        owners: np.ndarray | None = None,
    ) -> Tensor:
        """Decode one batch.

        Args:
            input_ids: (rows, width) int64, padded on the left; every prompt has at least one token after the prefix.
            attention_mask: (rows, width), 0 at padding.
            max_new_tokens: maximum number of new tokens per row.
            draw: chooses the tokens: `greedy`, or what `inversion` or `multinomial` returns.
            stopped: given the new tokens of some rows, says of each row whether it ends here without an end token.
            owners: (rows) int64, the member that decodes each row; None: the unperturbed weights.

        Returns:
            (rows, max_new_tokens) int64: the new tokens up to and with the end token, then `pad_id`.
        """
        (rows, width), p = input_ids.shape, len(self._prefix)
        owners = np.zeros(rows, np.int64) if owners is None else owners
        pads = (width - attention_mask.sum(1)).numpy()
        # columns: the prefix, then the rest of each prompt, padded on the left, then new tokens
        cache, turns = self._cache(rows, width + max_new_tokens), self._rotation(width + max_new_tokens)
        for held, past in zip(cache, self._past, strict=True):
            held[:, :, :, :p] = past[:, owners] if self._population else past
        active = torch.arange(rows)  # rows that are still computed, some of which may have ended
        finished = torch.zeros(rows, dtype=torch.bool)
        out = torch.full((rows, max_new_tokens), self.pad_id, dtype=torch.int64)
        hidden = self._compute(input_ids[:, p:].reshape(-1), width - p, cache, turns, active.numpy(), owners, pads, p)
        for t in range(max_new_tokens):
            logits = self._products["head"](hidden, owners[active.numpy()])
            token = draw(logits, active, t)
            token[finished] = self.pad_id
            out[active, t] = token
            finished |= torch.isin(token, self.eos_ids)
            if stopped is not None and len(going := (~finished).nonzero()[:, 0]):
                finished[going] = torch.tensor(stopped(out[active[going], : t + 1].tolist()))
            left = len(active) - int(finished.sum())
            if t + 1 == max_new_tokens or not left:
                break
            if self.drop_rows and (size := -(-left // BLOCK) * BLOCK) < len(active):
                # the unfinished rows, and enough finished ones to fill the last block, in the order of the batch
                keep = torch.argsort(finished, stable=True)[:size].sort().values
                active, token, finished = active[keep], token[keep], finished[keep]
            hidden = self._compute(token, 1, cache, turns, active.numpy(), owners, pads, width + t)
        return out

    def _cache(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Allocate keys and values, each (layers, rows, kv_heads, columns, head_dim)."""
        shape = self.config.num_hidden_layers, rows, self.kv_heads, columns, self.head_dim
        return torch.empty(shape), torch.empty(shape)

    def _compute(self, ids: Tensor, length: int, cache, turns, slots, owners, pads, first: int) -> Tensor:
        """Pass new tokens through all layers.

        Args:
            ids: (rows * length) tokens, row by row.
            length: tokens per row.
            cache: filled up to column `first`; the new tokens' keys and values are added.
            turns: `_rotation` for at least as many columns as are filled afterwards.
            slots: (rows) each row's entry in the cache.
            owners: (entries) the member of each entry.
            pads: (entries) columns of padding after the prefix.
            first: column of the first new token.

        Returns:
            (rows, hidden) final hidden states of the last tokens, after the last norm.
        """
        owner = np.repeat(owners[slots], length)  # of each token
        x = self._embedding[ids].float()
        if self._population and (own := self._population.matrices.get(EMBEDDING)):
            _decode_cpu.add_own_rows(x.numpy(), ids.numpy(), owner, *own)
        change = torch.zeros_like(x)
        for i, (keys, values) in enumerate(zip(*(held.numpy() for held in cache), strict=True)):
            p = f"model.layers.{i}."
            normed = self._add_norm(x, change, p + "input_layernorm.weight", owner)
            projected = self._products[p + "qkv"](normed, owner)
            mixed = torch.empty(len(x), self.heads * self.head_dim)
            _decode_cpu.attend(
                projected.numpy(), length, *turns, keys, values, slots, pads, len(self._prefix), first, mixed.numpy()
            )
            if i == self.config.num_hidden_layers - 1:  # past attention, the last layer is needed for last tokens only
                last = slice(length - 1, None, length)
                x, mixed, owner = x[last].contiguous(), mixed[last].contiguous(), owner[last].copy()
            change = self._products[p + "o"](mixed, owner)
            normed = self._add_norm(x, change, p + "post_attention_layernorm.weight", owner)
            both = self._products[p + "gate_up"](normed, owner)
            gated = torch.empty(len(x), both.shape[1] // 2)
            _decode_cpu.silu_product(both.numpy(), gated.numpy())
            change = self._products[p + "down"](gated, owner)
        return self._add_norm(x, change, NORM, owner)

    def _rotation(self, columns: int) -> tuple[np.ndarray, np.ndarray]:
        """Return cosines and sines of the rotary embedding, (columns, head_dim / 2)."""
        angles = torch.arange(columns, dtype=torch.float32)[:, None] * self._inverse_frequency
        return angles.cos().numpy(), angles.sin().numpy()

    def _add_norm(self, x: Tensor, change: Tensor, name: str, owners: np.ndarray) -> Tensor:
        """Add change to x in place; return x / rms(x) * gain, with the gains of the member that owns the row."""
        out, eps = torch.empty_like(x), np.float32(self.config.rms_norm_eps)
        _decode_cpu.add_norm(x.numpy(), change.numpy(), self._gains[name], owners, eps, out.numpy())
        return out


class _Product:
    """A matrix product of a decoding step: the joined matrices of one input, with the members' low-rank terms.

    Args:
        matrix: (n, cols), the joined matrices.
        names: names of the modules that it joins.
        weights: the model's weights, for the biases.
        population: as for `Decoder`.
    """

    def __init__(self, matrix: Tensor, names: list[str], weights: Mapping[str, Tensor], population: Population | None):
        self.matrix = matrix
        biases = [f"{name}.bias" for name in names if f"{name}.bias" in weights]
        self.bias = torch.cat([weights[name] for name in biases]) if biases else None
        self.own: list[tuple[int, np.ndarray, np.ndarray]] = []
        first, self.own_bias = 0, None
        for name in names if population else []:
            if own := population.matrices.get(f"{name}.weight"):
                self.own.append((first, *own))
            first += len(weights[f"{name}.weight"])
        if population and biases:
            each = (population.vectors.get(n, weights[n].expand(population.size, -1)) for n in biases)
            self.own_bias = torch.from_numpy(np.concatenate(list(each), 1))

    def __call__(self, x: Tensor, owners: np.ndarray) -> Tensor:
        """Return x matrix^T + bias in float32, with the weights of the member that owns each row, if any."""
        if not self.own and self.own_bias is None:
            return _multiply(x, self.matrix, self.bias)
        y = _multiply(x, self.matrix)
        if self.own_bias is not None:
            y += self.own_bias[owners]
        for first, a, b in self.own:
            _decode_cpu.add_own(x.numpy(), y.numpy(), first, owners, a, b)
        return y
