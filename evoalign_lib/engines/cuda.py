"""Generate for a population on one GPU without vLLM: many members decode at once.

The working copies of the members lie stacked, (members, out, in), so that a decoding step of all of them is one batched
product per matrix. Members of low rank, and members over a LoRA adapter, share the matrices and bring thin factors: the
product x W^T is one for all of them, and each adds its (x B) A^T, so that hundreds fit beside one model. The cache is
static, and a decoding step, like the pass over the prompts, is captured in a CUDA graph per shape. What all prompts
begin with is computed once per member. Decoding ends when every row has ended, which is looked up every `CHECK` steps,
so that the GPU rarely waits for this process; a stop string cuts a completion afterwards. The float32 master lies on
the GPU, too (`noise.device_weights`): a member's weights are written from it by a few kernel launches, an update is one
pass over it, and it is read back for digests, checkpoints and export.

How many members decode at once is decided by the free memory. In float32 on a CPU their number changes no bit; on a GPU
products of another shape may be summed in another order, so it is part of the batch plan, like `chunk_rows`.

It covers what the decoding loop covers (`decode.supports`): Qwen2 and Llama with default rotary embedding, in float32,
bfloat16 or float16. At the start the decoder's logits are held against those of the model itself. For any other model,
and for generation_kwargs, transformers decodes with a static cache, one member after the other; a warning says why, and
the batch plan names it. Rewards and weights are those of `engine="local"` wherever no token is a near-tie. With device
"cpu" the same code runs without graphs.
"""

import gc
import logging
import math
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from evoalign_lib import noise
from evoalign_lib._adapters import base_of, check_movable, dense, is_adapted, lora_linears, moved, not_dense, plain_name
from evoalign_lib._noise_host import read_only
from evoalign_lib.checks import require, whole_number
from evoalign_lib.engines import agreement, decode, memory
from evoalign_lib.engines.base import PLAIN, Decoding, Engine
from evoalign_lib.engines.decode import EMBEDDING, HEAD, JOINED, NORM, NORMS, Draw, inversion, supports
from evoalign_lib.engines.local import LocalEngine
from evoalign_lib.engines.processes import one_thread
from evoalign_lib.precision import MasterWeights, layout_of
from evoalign_lib.update_rules import Member

logger = logging.getLogger(__name__)
CHECK = 8
"""steps between two looks at whether every row has ended"""
SHAPES = 4
"""shapes whose buffers and graphs are kept, the last ones used"""
_DRAWN = 1 << 26  # probabilities in memory at once when sampling: 256 MB, and a few times that in between

How = tuple[float, int, float] | None
"""temperature, top_k and top_p of samples; None: greedy decoding"""


class _Product(NamedTuple):
    """What multiplies an input: y = x W^T + bias + (x B^T * scaling) A, with the members' own parts of each."""

    matrices: Tensor
    """W, (members, rows, columns), or (1, rows, columns) if they share it; or the gains of a norm"""
    biases: Tensor | None = None
    """(members, rows)"""
    factors: tuple[Tensor, Tensor, Tensor | None] | None = None
    """A, (members, ranks, rows); B, (members, ranks, columns); and scaling, (ranks); matrices that are used as one have
    blocks of A, which is zero elsewhere"""


class PopulationDecoder:
    """Stacked working copies of a model's weights, and a decoder for all of them at once.

    Args:
        model: a Llama or Qwen2 of Hugging Face, on any device, perhaps with a LoRA adapter. Its configuration and
            weights are read; all working copies start with them.
        members: number of working copies.
        device: where they lie and are computed with, such as "cuda" or "cpu".
        dtype: of working copies, products and cache; None: the model's.
        chunk_rows: rows that a member decodes at once.
        rank: if above 0, the members share all matrices, and each has factors of this rank (`factors`), at first zero.
        apart: the members share the weights under an adapter, and each has its own of the adapter's matrices; otherwise
            they have the sum.

    Raises:
        ValueError: an architecture or a dtype that is not covered; the message says why.
    """

    def __init__(
        self, model: Any, members: int = 1, device: str = "cuda", dtype=None, chunk_rows: int = 256, rank: int = 0,
        apart: bool = False,
    ):  # fmt: skip
        self.members, self.chunk_rows, self.rank, self.apart = members, chunk_rows, rank, apart
        self.device, self.dtype = torch.device(device), dtype or model.dtype
        config = model.config
        weights = dense(model, not apart) if (reason := uncovered(model, self.dtype, apart)) is None else {}
        self._lora = lora_linears(model) if apart and not reason else {}
        self._places: dict[str, Tensor] = {}  # name -> (members, rows, columns), or of 1 if they share it
        self.factors: dict[str, tuple[Tensor, Tensor]] = {}
        """with a rank, name of a matrix -> the members' factors, (members, rank, rows) and (members, rank, columns)"""
        if reason is None:
            self._layers = [self._layer(f"model.layers.{i}.", weights) for i in range(config.num_hidden_layers)]
            self._embedding, self._norm = self._joined([EMBEDDING], weights), _Product(self._stack([NORM], weights))
            self._head = self._joined([HEAD], weights) if HEAD in weights else self._embedding
            unknown = sorted(name for name in weights.keys() - self._places.keys() if ".lora_" not in name)
            reason = f"the parameter {unknown[0]!r} has no place in it" if unknown else None
        require(not reason, f"the population decoder does not cover this model: {reason}. Use engine='local'.")
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.inverse_frequency = decode.head_dim(config), decode.inverse_frequency(config)
        self.layers, self._eps = config.num_hidden_layers, config.rms_norm_eps
        self.vocabulary, self.hidden = self._embedding.matrices.shape[1:]
        self._batches: dict[tuple, _Batch] = {}
        self.load(weights, slice(None))

    def _stack(self, names: Sequence[str], weights: Mapping[str, Tensor]) -> Tensor:
        """Make the working copies of parameters that are used as one: (members, sum of their rows, columns)."""
        rows, rest = [len(weights[name]) for name in names], weights[names[0]].shape[1:]
        copies = 1 if rest and (self.rank or self.apart) else self.members
        stacked = torch.zeros((copies, sum(rows), *rest), dtype=self.dtype, device=self.device)
        self._places |= zip(names, stacked.split(rows, 1), strict=True)
        return stacked

    def _layer(self, prefix: str, weights: Mapping[str, Tensor]) -> dict[str, _Product]:
        """Return a layer's parts by name."""
        parts = {}
        for part, modules in JOINED.items():
            parts[part] = self._joined([f"{prefix}{module}.weight" for module in modules], weights)
        for norm in NORMS:
            parts[norm] = _Product(self._stack([f"{prefix}{norm}.weight"], weights))
        return parts

    def _joined(self, names: Sequence[str], weights: Mapping[str, Tensor]) -> _Product:
        """Return matrices that are used as one, with their biases and factors."""
        modules = [name.removesuffix(".weight") for name in names]
        biases = [f"{module}.bias" for module in modules if f"{module}.bias" in weights]
        matrices = self._stack(names, weights)
        return _Product(matrices, self._stack(biases, weights) if biases else None, self._thin(modules, weights))

    def _thin(
        self, modules: Sequence[str], weights: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Make the members' factors of modules that are used as one; None if they have none."""
        matrices, adapters = [weights[f"{module}.weight"] for module in modules], [*map(self._lora.get, modules)]
        active = next((layer.active_adapters[0] for layer in adapters if layer), None)
        ranks = [layer.r[active] if layer else self.rank for layer in adapters]
        if not any(ranks):
            return None
        zeros, rows = partial(torch.zeros, dtype=self.dtype, device=self.device), [*map(len, matrices)]
        a = zeros(self.members, sum(ranks), sum(rows))
        if not self.rank:  # as the adapter's own matrix lies in memory
            a = zeros(self.members, sum(rows), sum(ranks)).transpose(1, 2)
        b = zeros(self.members, sum(ranks), matrices[0].shape[1])
        for i, (module, rank) in enumerate(zip(modules, ranks, strict=True)):
            first, row = sum(ranks[:i]), sum(rows[:i])
            own = a[:, first : first + rank, row : row + rows[i]], b[:, first : first + rank]
            if adapters[i]:
                self._places[f"{module}.lora_A.{active}.weight"] = own[1]
                self._places[f"{module}.lora_B.{active}.weight"] = own[0].transpose(1, 2)
            elif self.rank:
                self.factors[f"{module}.weight"] = own
        scaling = [float(layer.scaling[active]) if layer else 0.0 for layer in adapters]
        scales = torch.tensor(scaling).repeat_interleave(torch.tensor(ranks)).to(self.device, self.dtype)
        return a, b, scales if active else None

    def working(self, name: str, member: int | slice = 0) -> Tensor:
        """Return a member's working copy of a parameter, a view; members that share it have the same one."""
        stacked = self._places[name]
        return stacked[member if len(stacked) > 1 or isinstance(member, slice) else 0]

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], member: int | slice = 0) -> None:
        """Copy weights, by the model's names and of any dtype and device, into a member's working copy, or all.

        Names that the decoder does not have are ignored, such as the head of a model that ties it to its embedding.
        """
        for name in self._places:
            self.working(name, member).copy_(weights[name].to(self.device))

    def close(self) -> None:
        """Free buffers and graphs; the next call makes new ones."""
        self._batches.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def decode(
        self,
        ids: np.ndarray,
        mask: np.ndarray,
        new: int,
        eos: Sequence[int],
        uniforms: np.ndarray | None = None,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        prefix: int = 0,
        members: int = 1,
    ) -> np.ndarray:
        """Decode prompts with the weights of the first members, each prompt with each of them.

        Args:
            ids, mask: (rows, width) tokens, padded on the left, and 0 at padding; any number of rows.
            new: maximum number of new tokens.
            eos: tokens that end a completion.
            uniforms: (rows, new) numbers in [0, 1), which draw the same tokens for every member by inversion
                (`decode.inversion`); None: greedy decoding.
            temperature, top_k, top_p: how to sample. On a GPU, top_k and top_p are computed outside CUDA graphs.
            prefix: number of tokens with which all prompts begin, less than the shortest has; they are computed once.
            members: number of members.

        Returns:
            (members, rows, new) int64; what follows a row's end token is arbitrary.

        Raises:
            ValueError: a prefix or a number of members that is too large, a row that begins with other tokens than the
                first, or arrays of different shapes.
        """
        rows, shortest = len(ids), int(mask.sum(1).min(initial=ids.shape[1]))
        if mask.shape != ids.shape or uniforms is not None and uniforms.shape != (rows, new):
            shapes = f"{ids.shape}, {mask.shape} and {None if uniforms is None else uniforms.shape}"
            raise ValueError(f"ids, mask and uniforms are {shapes}: pass (rows, width) twice, and (rows, {new}).")
        if not 0 <= prefix < max(1, shortest):
            raise ValueError(f"prefix={prefix}: the shortest prompt has {shortest} tokens. Leave its last token out.")
        begins = np.take_along_axis(ids, ids.shape[1] - mask.sum(1)[:, None] + np.arange(prefix), 1)
        if (begins != begins[:1]).any():
            raise ValueError(f"prefix={prefix}: the prompts do not all begin with the same {prefix} tokens.")
        require(1 <= members <= self.members, f"members={members}, but the decoder was made for {self.members}.")
        size, found = min(rows, self.chunk_rows), np.empty((members, rows, new), np.int64)
        width = -(-ids.shape[1] // 8) * 8  # few different shapes, and rows of masks aligned as the fast kernels want
        ids, mask = (np.pad(array, ((0, 0), (width - array.shape[1], 0))) for array in (ids, mask))
        how = None if uniforms is None else (float(temperature), int(top_k), float(top_p))
        for start in range(0, rows, max(1, size)):  # a short last chunk is filled with its last row
            chunk = np.minimum(np.arange(start, start + size), rows - 1)
            batch = self._batch(members, size, width, new, prefix)
            batch.start(ids[chunk], mask[chunk], None if uniforms is None else uniforms[chunk])
            found[:, start : start + size] = batch.decode(eos, how)[:, : rows - start]
        return found

    def check(self, model: Any, ids: np.ndarray, mask: np.ndarray, pad: int, prefix: int = 0) -> float:
        """Hold the first member's logits against the model's own, with noise on all that moves (`agreement`).

        Args:
            model: the model; the first member gets its weights.
            ids, mask, prefix: as for `decode`; the shortest and the longest prompt are tried.
            pad: id of padding.

        Returns:
            The difference, as a share of the norm of the model's logits about their mean.

        Raises:
            ValueError: it exceeds `agreement.TOLERANCE`, or is not a number.
        """
        with agreement.shaken(model):
            self.load(dense(model, not self.apart))
            trial = agreement.trial(model, ids, mask, pad)
            error = agreement.difference(model, trial, partial(self._generate, prefix))
        self.load(dense(model, not self.apart))
        if not error <= (most := agreement.TOLERANCE[self.dtype]):
            what = f"the population decoder's logits differ from the model's by {error:.3g} of their norm, and rounding"
            raise ValueError(f"{what} in {self.dtype} by {most} at most. Use engine='local'.")
        return error

    @torch.inference_mode()
    def _generate(self, prefix: int, ids: Tensor, mask: Tensor, new: int, draw: Draw) -> None:
        """Decode with the first member, letting `draw` choose the tokens."""
        pads = -ids.shape[1] % 8
        batch = _Batch(self, 1, len(ids), pads + ids.shape[1], new, prefix)
        batch.start(*(np.pad(array.numpy(), ((0, 0), (pads, 0))) for array in (ids, mask)), None)
        for step in range(new):
            logits = batch.step() if step else batch.prefill()
            batch.tokens.copy_(draw(logits[0], batch.row, step))

    def _batch(self, *shape: int) -> "_Batch":
        batch = self._batches.pop(shape, None)
        while batch is None and len(self._batches) >= SHAPES:
            del self._batches[next(iter(self._batches))]
        if batch is None:
            gc.collect()  # nothing must be freed on a GPU while a graph is captured
            batch = _Batch(self, *shape)
        self._batches[shape] = batch
        return batch

    # ---- the network; the first dimension is the member

    def network(self, ids: Tensor, rows: int, attend: Callable[..., Tensor]) -> Tensor:
        """Pass new tokens through all layers.

        Args:
            ids: (members, rows * length) tokens, row by row.
            rows: number of rows.
            attend: attention: (layer, queries and keys, values of the new tokens), (members * rows, heads, length,
                head_dim) each -> the same for the queries.

        Returns:
            (members, rows, vocabulary) logits of the tokens that follow.
        """
        n, length = len(ids), ids.shape[1] // rows
        widths = [heads * self.head_dim for heads in (self.heads + self.kv_heads, self.kv_heads)]
        x = self._embedded(ids)
        for i, layer in enumerate(self._layers):
            y = self._product(self._normed(x, layer["input_layernorm"]), layer["qkv"])
            parts = (t.reshape(n * rows, length, -1, self.head_dim).transpose(1, 2) for t in y.split(widths, -1))
            mixed = attend(i, *parts).transpose(1, 2).reshape(n, rows * length, -1)
            x = x + self._product(mixed, layer["o"])
            both = self._product(self._normed(x, layer["post_attention_layernorm"]), layer["gate_up"])
            gate, up = both.chunk(2, -1)
            x = x + self._product(F.silu(gate) * up, layer["down"])
        last = x.view(n, rows, length, self.hidden)[:, :, -1]
        return self._product(self._normed(last, self._norm), self._head)

    def _embedded(self, ids: Tensor) -> Tensor:
        n, (matrices, _, factors) = len(ids), self._embedding
        first = torch.arange(n, device=self.device)[:, None] * (self.vocabulary if len(matrices) > 1 else 0)
        x = matrices.view(-1, self.hidden)[(ids + first).view(-1)].view(*ids.shape, self.hidden)
        if not self.rank:  # if the head has an adapter, the embedding has not
            return x
        a, b, _ = factors
        return torch.baddbmm(x, a[:n].transpose(1, 2).gather(1, ids[..., None].expand(-1, -1, a.shape[1])), b[:n])

    def _normed(self, x: Tensor, gains: _Product) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], None, self._eps) * gains.matrices[: len(x), None]

    def _product(self, x: Tensor, product: _Product) -> Tensor:
        n, (matrices, biases, factors) = len(x), product
        transposed = matrices[:n].transpose(1, 2)
        if len(matrices) == 1 < n and self.device.type != "cpu":  # one product for all members
            y = x @ transposed[0] if biases is None else x @ transposed[0] + biases[:n, None]
        else:  # on a CPU the number of members must not change how a sum is rounded
            each = transposed.expand(n, -1, -1)
            y = torch.bmm(x, each) if biases is None else torch.baddbmm(biases[:n, None], x, each)
        if factors is None:
            return y
        a, b, scaling = factors
        inner = torch.bmm(x, b[:n].transpose(1, 2))
        return torch.baddbmm(y, inner if scaling is None else inner * scaling, a[:n])


class _Batch:
    """Buffers for one shape, at fixed addresses, and what is computed in them, on a GPU as CUDA graphs.

    Columns of the cache: the shared prefix, padding, the rest of each prompt, new tokens, and room up to a multiple
    of 16.
    """

    def __init__(self, decoder: PopulationDecoder, members: int, rows: int, width: int, new: int, prefix: int):
        self.decoder = weakref.proxy(decoder)  # which holds this: without a cycle its memory is free at once
        self.members, self.rows, self.width, self.prefix = members, rows, width, prefix
        columns = -(-(width + new) // 16) * 16
        integers = partial(torch.zeros, dtype=torch.int64, device=decoder.device)
        numbers = partial(torch.zeros, dtype=decoder.dtype, device=decoder.device)
        self.start_ids, self.ids = integers(prefix), integers(rows, width - prefix)
        self.positions, self.out = integers(rows, columns), integers(members, rows, new)
        # what a step changes besides the cache and the result
        self.column, self.next = integers(1), integers(1)  # column of the tokens to be read; index of the new token
        self.tokens, self.visible = integers(members, rows), numbers(rows, columns)  # added to scores: 0 or -inf
        self.row = torch.arange(rows, device=decoder.device)
        self.uniforms = torch.zeros(rows, new, device=decoder.device)
        cache = len(decoder._layers), members * rows, decoder.kv_heads, columns, decoder.head_dim
        self.keys, self.values = numbers(cache), numbers(cache)
        # as `visible`, for the prefix and for the rest of the prompts, once for each head of a group (see `_attention`)
        group, aligned = decoder.heads // decoder.kv_heads, -(-prefix // 8) * 8
        self.prefix_mask = numbers(1, 1, group, prefix, aligned)[..., :prefix]
        self.prefix_mask += numbers(prefix, prefix).fill_(-math.inf).triu_(1)
        self.prompt_mask = numbers(members * rows, 1, group, width - prefix, width)
        angles = torch.arange(columns, dtype=torch.float32)[:, None] * decoder.inverse_frequency
        cos, sin = angles.cos(), angles.sin()
        self.cos, self.sin = (torch.cat(two, 1).to(decoder.device, decoder.dtype) for two in ((cos, cos), (-sin, sin)))
        self.graphs: dict[tuple[str, How], Any] = {}

    def start(self, ids: np.ndarray, mask: np.ndarray, uniforms: np.ndarray | None) -> None:
        """Put prompts, (rows, width) padded on the left, and random numbers, (rows, new), into the buffers."""
        p, width, device = self.prefix, self.width, self.decoder.device
        lengths = mask.sum(1)
        self.start_ids.copy_(torch.from_numpy(ids[0, width - lengths[0] :][:p]))
        # without its first p columns, a row holds padding or tokens of the prefix, then the rest of its prompt
        self.ids.copy_(torch.from_numpy(np.ascontiguousarray(ids[:, p:])))
        pads = torch.from_numpy(width - lengths).to(device)[:, None]
        column = torch.arange(self.positions.shape[1], device=device)
        self.positions.copy_((column - pads * (column >= p)).clamp_(min=0))
        known = ((column < p) | (column >= p + pads))[:, :width]
        self.visible.fill_(-math.inf)
        self.visible[:, :width].masked_fill_(known, 0.0)
        read, own = column[:width], column[p:width, None]
        seen = known[:, None] & (read <= own) | (read == own)  # padding sees itself, so that no row is empty
        masks = self.prompt_mask.view(self.members, self.rows, -1, width - p, width)
        masks.fill_(-math.inf).masked_fill_(seen[:, None], 0.0)
        self.column.fill_(width)
        self.next.fill_(0)
        if uniforms is not None:
            self.uniforms.copy_(torch.from_numpy(np.ascontiguousarray(uniforms)))

    def decode(self, eos: Sequence[int], how: How) -> np.ndarray:
        """Decode what `start` put into the buffers; return (members, rows, new)."""
        ends, new = torch.tensor(list(eos), device=self.decoder.device), self.out.shape[2]
        self._run("prefill", how)
        for t in range(1, new):
            if t % CHECK == 0 and bool(torch.isin(self.out[:, :, :t], ends).any(-1).all()):
                break
            self._run("step", how)
        return self.out.cpu().numpy()

    def _run(self, what: str, how: How) -> None:
        """Compute logits and choose tokens: by replaying a graph on a GPU, which is captured the first time."""
        if self.decoder.device.type != "cuda" or how is not None and how[1:] != (0, 1.0):
            self.choose(getattr(self, what)(), how)
            return
        if (what, how) not in self.graphs:
            self.graphs[what, how] = self._captured(lambda: self.choose(getattr(self, what)(), how))
        self.graphs[what, how].replay()

    def _captured(self, compute: Callable[[], None]) -> Any:
        """Capture a CUDA graph, after one trial on another stream as torch asks for; the state stays as it is."""
        state = self.column, self.next, self.tokens, self.visible
        before = [tensor.clone() for tensor in state]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            compute()
        for tensor, held in zip(state, before, strict=True):
            tensor.copy_(held)
        return graph

    def prefill(self) -> Tensor:
        """Read the prompts; return the logits of their first new tokens, (members, rows, vocabulary)."""
        decoder, n, p, width = self.decoder, self.members, self.prefix, self.width
        if p:
            self._turn_to(torch.arange(p, device=decoder.device)[None])

            def attend(i: int, qk: Tensor, v: Tensor) -> Tensor:
                q, k = self._turned(qk)
                for cache, part in ((self.keys, k), (self.values, v)):
                    cache[i].view(n, self.rows, *cache.shape[2:])[:, :, :, :p] = part[:, None]
                return self._attention(q, k, v, self.prefix_mask.flatten(2, 3))

            decoder.network(self.start_ids.expand(n, -1), 1, attend)
        self._turn_to(self.positions[:, p:width])

        def attend(i: int, qk: Tensor, v: Tensor) -> Tensor:
            q, k = self._turned(qk)
            for cache, part in ((self.keys, k), (self.values, v)):
                cache[i][:, :, p:width] = part
            k, v = (cache[i][:, :, :width] for cache in (self.keys, self.values))
            return self._attention(q, k, v, self.prompt_mask.flatten(2, 3))

        return decoder.network(self.ids.view(1, -1).expand(n, -1), self.rows, attend)

    def step(self) -> Tensor:
        """Read the last tokens; return the logits of those that follow, (members, rows, vocabulary)."""
        decoder, n, rows = self.decoder, self.members, self.rows
        self.visible.index_fill_(1, self.column, 0.0)
        self._turn_to(self.positions.index_select(1, self.column))
        mask = self.visible[None, :, None, None].expand(n, -1, 1, 1, -1).reshape(n * rows, 1, 1, -1)

        def attend(i: int, qk: Tensor, v: Tensor) -> Tensor:
            q, k = self._turned(qk)
            self.keys[i].index_copy_(2, self.column, k)
            self.values[i].index_copy_(2, self.column, v)
            return self._attention(q, self.keys[i], self.values[i], mask)

        logits = decoder.network(self.tokens, rows, attend)
        self.next.add_(1)
        self.column.add_(1)
        return logits

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Compute attention; the query heads that share keys stand where more queries of one head would."""
        grouped = q.reshape(len(q), k.shape[1], -1, q.shape[3])
        mask = mask.expand(len(q), k.shape[1], grouped.shape[2], -1)
        return F.scaled_dot_product_attention(grouped, k, v, mask).reshape(q.shape)

    def choose(self, logits: Tensor, how: How) -> None:
        """Choose the next token of each row: the most probable one, among ties the first, or a sample."""
        if how is None:
            self.tokens.copy_(logits.argmax(-1))
        else:
            draw, at_once = inversion(self.uniforms, *how), max(1, _DRAWN // logits[0].numel())
            for part, tokens in zip(logits.split(at_once), self.tokens.split(at_once), strict=True):
                drawn = draw(part.float().flatten(0, 1), self.row.repeat(len(part)), self.next)
                tokens.copy_(drawn.view(tokens.shape))
        self.out.index_copy_(2, self.next, self.tokens[..., None])

    def _turn_to(self, positions: Tensor) -> None:
        """Look up the rotary embedding of the tokens that are read next, by their positions, (rows, length)."""
        positions = positions.repeat(self.members, 1)
        self._turns = self.cos[positions][:, None], self.sin[positions][:, None]

    def _turned(self, x: Tensor) -> Sequence[Tensor]:
        """Rotate queries and keys, (members * rows, heads, length, head_dim); return queries, then keys."""
        (cos, sin), (low, high) = self._turns, x.chunk(2, -1)
        turned = x * cos + torch.cat([high, low], -1) * sin  # the sines of the first half are negative
        return turned.split([self.decoder.heads, self.decoder.kv_heads], 1)


class GenerateDecoder:
    """transformers' generate with the interface of `PopulationDecoder`, for one member.

    Args:
        model: any decoder-only model, which is moved to the device; its own parameters are the working copy.
        device: where to compute.
        chunk_rows: rows decoded at once; a short last chunk is filled with its last row.
        pad: id of padding.
        most: largest number of tokens of a prompt and its completion, for which the cache has room.
        settings: further settings of transformers' GenerationConfig.
    """

    members, rank, factors = 1, 0, {}

    def __init__(self, model: Any, device: str, chunk_rows: int, pad: int, most: int, settings: Mapping[str, Any]):
        self.model, self.device, self.chunk_rows, self._pad = model.to(device), torch.device(device), chunk_rows, pad
        static = {"cache_implementation": "static", "max_cache_len": most, "disable_compile": True}
        cache = {} if settings.keys() & {"cache_implementation", "use_cache"} else static
        self._cache, self._how = cache, cache | {"pad_token_id": pad} | settings
        self._parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}

    def working(self, name: str, member: int = 0) -> Tensor:
        """See `PopulationDecoder.working`."""
        return self._parameters[name].data

    def check(self, ids: np.ndarray, mask: np.ndarray) -> None:
        """Raise ValueError if this cache, or padding, changes the model's logits for the shortest or longest prompt."""
        agreement.check_padding(self.model, ids, mask, self._pad, **self._cache)

    def decode(self, ids, mask, new, eos, uniforms=None, temperature=1.0, top_k=0, top_p=1.0, prefix=0, members=1):
        """See `PopulationDecoder.decode`."""
        at = str(self.model.device)
        require(at.startswith(self.device.type), f"the model was moved to {at}: leave it on {self.device}.")
        size, found = min(len(ids), self.chunk_rows), np.full((1, len(ids), new), self._pad)
        for start in range(0, len(ids), max(1, size)):
            chunk, draw = np.minimum(np.arange(start, start + size), len(ids) - 1), None
            if uniforms is not None:
                draw = inversion(torch.from_numpy(uniforms[chunk]).to(self.device), temperature, top_k, top_p)
            prompts = torch.from_numpy(ids[chunk]), torch.from_numpy(mask[chunk])
            written = agreement.by_transformers(self.model, *prompts, new, draw, eos_token_id=list(eos), **self._how)
            found[0, start : start + size, : written.shape[1]] = written[: len(ids) - start].cpu().numpy()
        return found

    def close(self) -> None:
        """Do nothing: no buffers are kept."""


def uncovered(model: Any, dtype: torch.dtype, apart: bool = False) -> str | None:
    """Return why the population decoder cannot decode a model in a dtype, perhaps `apart`; None if it can."""
    more = supports(model.config) or not_dense(model, apart) or decode.misfit(model.config, dense(model))
    return more or (None if dtype in agreement.TOLERANCE else f"its dtype is {dtype}, which it does not compute")


class DeviceMaster(MasterWeights):
    """The float32 master on a device; this process's copy follows when it is read."""

    _stale = False

    def attach(self, held: Any) -> None:
        """Keep the weights in a `noise.DeviceWeights` (or `HostWeights`) of all parameters, in the layout's order."""
        self._held = held
        self.push()

    @property
    def on_device(self) -> Tensor:
        """The master itself, float32 (layout.size,) on the device."""
        return self._held.master

    @property
    def planes(self) -> tuple[np.ndarray]:
        """The whole state: this process's copy of the master."""
        self.pull()
        return self._planes

    @planes.setter
    def planes(self, planes: tuple[np.ndarray]) -> None:
        self._planes = planes

    def pull(self) -> None:
        """Bring this process's copy up to the master."""
        if self._stale:
            torch.from_numpy(self._planes[0]).copy_(self.on_device)
            self._stale = False

    def push(self) -> None:
        """Bring the master up to this process's copy."""
        self.on_device.copy_(torch.from_numpy(self._planes[0]))
        self._stale = False

    def load(self, tensors):
        super().load(tensors)
        self.push()

    def update(self, keys, coefficients):
        self._held.update(np.asarray(keys), np.asarray(coefficients))
        self._stale = True


class CudaEngine(Engine):
    """Engine on one GPU, without vLLM.

    Args:
        model: a decoder of Hugging Face on the CPU; its parameters that move are the master at the start. Members over
            a plain LoRA adapter share the base, in its dtype, which may be another. If transformers decodes, the model
            is moved to the device.
        tokenizer: its tokenizer, with a padding token.
        rewards: scores completions, in this process.
        prompts: name -> prompts (for example "train" and "eval").
        device: "cuda", or "cpu" for tests.
        members: members decoded at once; None: as many as the free memory has room for.
        population: size of the population: no more members decode at once.
        step_rows: completions of a member in a step; None: one of each prompt of the largest set.
        chunk_rows: rows of a member decoded at once.
        distribution: distribution of the noise.
        anchor_decay: as in `ESConfig`.
        rank: rank of the noise of matrices. Members of a whole model share its matrices and have factors beside them,
            which in half precision are not rounded with the matrix, as they are in engine "local".
        **common: max_completion_length and options of `Engine`.

    Raises:
        ValueError: no GPU, too little memory for a single member, several members at once where transformers decodes,
            or a model that padding or a static cache changes there; or what `Engine` raises.
    """

    perturbed = Decoding._perturbed_elsewhere
    _numbers, _seeded = LocalEngine._numbers, LocalEngine._seeded  # the same random numbers

    def __init__(
        self, model, tokenizer, rewards, prompts, *, device: str = "cuda", members: int | None = None,
        population: int = 30, step_rows: int | None = None, chunk_rows: int = 256, distribution: str = "gaussian",
        anchor_decay: float = 0.0, rank: int = 0, options=PLAIN, **common: Any,
    ):  # fmt: skip
        for name, number in {"members": members, "population": population, "chunk_rows": chunk_rows}.items():
            if number is not None:
                whole_number(name, number, 1)
        found = device != "cuda" or torch.cuda.is_available()
        require(found, "engine='cuda' cannot run this: torch sees no GPU. Use engine='local'.")
        check_movable(model)
        layout = layout_of(model)
        weights = DeviceMaster(model, layout, distribution, rank, 1, anchor_decay)
        super().__init__(model, tokenizer, rewards, prompts, options=options, weights=weights, **common)
        self.chunk_rows, self.device, pad = chunk_rows, torch.device(device), tokenizer.pad_token_id
        if not (reason := self._why_generate()):
            apart, dtype = is_adapted(model), base_of(model).dtype
            self.members = min(population, members or self._room(step_rows, apart or rank > 0))
            how = self.members, device, dtype, chunk_rows, 0 if apart else rank, apart
            self.decoder: PopulationDecoder | GenerateDecoder
            try:
                self.decoder = PopulationDecoder(model, *how)
                first = prompts["train"] if "train" in prompts else next(iter(prompts.values()))
                self.decoder.check(model, first.ids, first.mask, pad, len(first.prefix))
            except ValueError as error:
                reason = str(error).removesuffix(" Use engine='local'.")
        if reason:
            one = members in (None, 1)
            require(one, f"members={members}: transformers decodes one member at a time, because {reason}. Remove it.")
            logger.warning("transformers decodes, one member at a time: %s.", reason.removesuffix("."))
            settings = options.generation_kwargs or {}
            self.members, self.decoder = 1, GenerateDecoder(model, device, chunk_rows, pad, self.longest(), settings)
            for each in prompts.values():
                self.decoder.check(each.ids, each.mask)
        law = distribution, max(4096, population)
        self._held: list[Any] = []  # of each member with a working copy of its own: that copy, all beside one master
        for j in range(1 if self.decoder.rank else self.members):
            pieces = [noise.Piece(self.decoder.working(plain_name(e.name), j), e.name) for e in layout.entries]
            self._held.append(noise.device_weights(pieces, *law, 0.0 if j else anchor_decay, rank))
            self._held[j].master = self._held[0].master
        weights.attach(self._held[0])
        if self.decoder.rank:
            self._members_own(layout, *law)
        if self.device.type == "cuda" and not reason:
            for parameter in moved(model).values():  # so that `write_model` copies at the bus's full speed
                parameter.data = parameter.data.pin_memory()

    def _why_generate(self) -> str | None:
        """Return why transformers must decode; None: the population decoder may cover the model."""
        given, adapted, dtype = self.options.generation_kwargs, is_adapted(self.model), base_of(self.model).dtype
        named = [(name, parameter.dtype) for name, parameter in self.model.named_parameters()]
        base, adapter = ({kind for name, kind in named if (".lora_" in name) == own} for own in (False, True))
        reasons = {
            f"generation_kwargs={given!r} are its settings": given,
            f"the weights are {' and '.join(sorted(map(str, base)))}, not of one dtype": len(base) > 1,
            # the anchor is the working copy, in the base's dtype
            f"with anchor_decay, an adapter must be in its base's {dtype}": self.weights.anchor_decay
            and adapter - base,
        }
        return next((why for why, holds in reasons.items() if holds), None) or uncovered(self.model, dtype, adapted)

    @property
    def master(self):
        """Float32 master, (layout.size,), as it is now; read-only, because the one that counts is on the device."""
        return read_only(self.weights.flat)

    @property
    def plan(self):
        """The batch plan of training; floating-point results depend on it."""
        population, prompts = isinstance(self.decoder, PopulationDecoder), self.prompts.get("train")
        plan = {"decoder": "population" if population else "generate", "device": self.device.type}
        plan |= {"chunk_rows": self.chunk_rows, "members": self.members}
        if prompts is None:
            return plan
        return plan | {"width": prompts.width} | ({"prefix": len(prompts.prefix)} if population else {})

    def evaluate(self, members, sigma, name, indices, trainer_state=None, sampling=None, index: int = 0):
        """See `Engine.evaluate`; index: that of the first member, for errors."""
        rows, uniforms = self._drawn(np.asarray(indices), sampling)
        size = -(-len(members) // -(-len(members) // self.members))  # parts of nearly equal size
        found = []
        for first in range(0, len(members), size):
            started, part = time.process_time(), members[first : first + size]
            self._perturb(part, sigma)
            # a short last part is filled with members of the one before, so that all have one shape
            ids = self._ids(name, rows, uniforms, self.options.temperature, size)[: len(part)]
            each = (time.process_time() - started) / len(part)
            for i, own in enumerate(ids):
                started = time.process_time() - each
                completions = self.completions(self.until_end(own))
                found.append(self.scored(index + first + i, name, rows, completions, trainer_state, started))
        return found

    def put_prompts(self, name, prompts):
        super().put_prompts(name, prompts)
        if isinstance(self.decoder, GenerateDecoder):
            self.decoder.check(prompts.ids, prompts.mask)

    def _generate(self, parts):
        return [self.generate_rows(*part) for part in parts]

    def _decode(self, name, rows, numbers, temperature, member=None):
        """See `Decoding._decode`."""
        if (member := member or self._noise) is None:
            self._held[0].restore()
            for a, _ in self.decoder.factors.values():
                a[0].zero_()
        else:
            self._perturb([member[0]], member[1])
        (ids,) = self._ids(name, rows, numbers, temperature, 1)
        return self.completions(self.until_end(ids))

    def _members_own(self, layout: noise.Layout, *law: Any) -> None:
        """Prepare to write what members of low rank have of their own: vectors, and both factors of each matrix."""
        every, names = slice(None), [entry.name for entry in layout.entries]
        self._vectors = [i for i, name in enumerate(names) if name not in self.decoder.factors]
        stacks = [[(self.decoder.working(names[i], every), names[i]) for i in self._vectors]]
        for side in (0, 1):
            stacks.append([(own[side], name) for name, own in self.decoder.factors.items() if name in names])
        # no vectors where linear layers alone move
        self._own = [x and noise.device_weights(x, *law, stream=i, stacked=True) for i, x in enumerate(stacks)]
        for factors in self._own[1:]:
            factors.master.fill_(-0.0)  # which added to a number leaves it as it is

    def _perturb(self, members: Sequence[Member], sigma: float) -> None:
        """Write members' weights into the first working copies, or beside shared matrices their factors."""
        if not self.decoder.rank:
            for held, (key, sign) in zip(self._held, members, strict=False):
                held.perturb(key, sigma, sign)
            return
        self._held[0].restore()
        vectors, a, b = self._own
        keys = np.array([member.key for member in members], np.uint64)
        scales = np.array([noise.signed_sigma(sigma, member.sign) for member in members])
        if vectors:
            weights = self._held[0].views()
            for own, i in zip(vectors.views(), self._vectors, strict=True):
                own.copy_(weights[i].view(own.shape))
            vectors.perturb_each(keys, scales)
        a.perturb_each(keys, scales / np.float32(self.decoder.rank**0.5))
        b.perturb_each(keys, np.ones_like(scales))

    def _ids(self, name: str, rows: np.ndarray, uniforms, temperature: float, members: int) -> np.ndarray:
        """Decode rows of a set of prompts with the first members' weights, (members, rows, new)."""
        prompts, options = self.prompts[name], self.options
        how = uniforms, temperature, options.top_k, options.top_p, len(prompts.prefix), members
        ids, mask, new = prompts.ids[rows], prompts.mask[rows], self.max_completion_length
        with one_thread() if self.device.type == "cpu" else nullcontext():
            return self.decoder.decode(ids, mask, new, self.eos_ids, *how)

    @torch.no_grad()
    def write_model(self):
        parameters = dict(self.model.named_parameters())
        for entry, weights in zip(self.layout.entries, self._held[0].views(), strict=True):
            parameters[entry.name].copy_(weights.view(entry.shape), non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def begin_digest(self):
        self.weights.pull()  # here, because only one thread may talk to the GPU
        pool = ThreadPoolExecutor(1)
        pending = pool.submit(self.weights.digest)  # hashing takes a second per GB and leaves Python's lock to others
        pool.shutdown(wait=False)
        return pending.result

    def close(self):
        self.decoder.close()

    def _room(self, step_rows: int | None, thin: bool) -> int:
        """Return how many members the free memory has room for, beside the master.

        Args:
            step_rows: rows of each in a step.
            thin: whether they share the model's matrices.

        Raises:
            ValueError: not even for one.
        """
        network = base_of(self.model)
        shape, width, item = memory.shape(network.config), self.longest(), network.dtype.itemsize
        entries, rank = self.layout.entries, self.weights.rank
        if thin and not is_adapted(self.model):
            own = sum(rank * (e.rows + e.cols) if noise.is_low_rank(e.shape, rank) else e.cols for e in entries)
        else:
            own = self.layout.d
        # of matrices that are used as one, three at most, each factor takes the rows of all
        shared, own = (shape.d * item, 3 * own * item) if thin else (0, shape.d * item)
        if self.device.type == "cuda":  # what torch keeps for later is free, too
            free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        else:
            pages = next(name for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES") if name in os.sysconf_names)
            free = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
        # of a row: its cache; and the pass over its prompt, with masks and float32 scores, and the logits of a step
        cache = memory.kv_bytes(shape, width=item) * (width + 24)
        passing = width * (8 * shape.hidden + 4 * shape.intermediate) * item + 10 * shape.heads * width**2
        passing += 2 * shape.vocabulary * item
        rows = min(self.chunk_rows, max(map(len, self.prompts.values())))
        master, least = 4 * self.layout.d, shared + own + rows * cache
        if (left := memory.USABLE * free - master) < least:
            needed, there = ((n / 2**30) for n in (least + master, free))
            what = f"a member with {rows} rows and the master take {needed:.1f} GiB, and {there:.1f} GiB are free"
            raise ValueError(f"{what} on {self.device}: lower chunk_rows={self.chunk_rows}, or use a smaller model.")
        left -= shared + rows * (cache + passing)  # to decode with the run's own weights
        return max(1, int(left // (own + min(self.chunk_rows, step_rows or rows) * (cache + passing))))


class PushedEngine(CudaEngine):
    """The same for weights that other code writes into `master`, on the host; each call decodes with them."""

    perturbed, master = Engine.perturbed, Engine.master

    def _decode(self, *arguments, **how):
        self.weights.push()
        return super()._decode(*arguments, **how)

    def write_model(self):
        self.weights.push()
        super().write_model()
