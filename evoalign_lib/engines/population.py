"""Decode with the weights of many members of a population at once, on one GPU.

The working copies of the members lie stacked, (members, out, in), so that a decoding step of all of them is one batched
product per matrix. Members of low rank, and members over a LoRA adapter, share the matrices and bring thin factors: the
product x W^T is one for all of them, and each adds its (x B) A^T, so that hundreds fit beside one model. The cache is
static, and a decoding step, like the pass over the prompts, is captured in a CUDA graph per shape. What all prompts
begin with is computed once per member. Decoding ends when every row has ended, which is looked up every `CHECK` steps,
so that the GPU rarely waits for this process; a stop string cuts a completion afterwards.

It covers what the decoding loop covers (`decode.supports`): Qwen2 and Llama with default rotary embedding, in float32,
bfloat16 or float16. With device "cpu" the same code runs without graphs.
"""

import gc
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from evoalign_lib._adapters import dense, lora_linears, moved, not_dense
from evoalign_lib.checks import require
from evoalign_lib.engines import agreement, decode
from evoalign_lib.engines.decode import EMBEDDING, HEAD, JOINED, NORM, NORMS, Draw, inversion, supports

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
        self._lora, self._moving = lora_linears(model) if apart and not reason else {}, moved(model).keys()
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
        own_ranks = [self.rank if f"{module}.weight" in self._moving else 0 for module in modules]
        ranks = [layer.r[active] if layer else own for layer, own in zip(adapters, own_ranks, strict=True)]
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
            elif rank:
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
        if not self.rank or factors is None:  # if the head has an adapter, the embedding has not
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


def uncovered(model: Any, dtype: torch.dtype, apart: bool = False) -> str | None:
    """Return why the population decoder cannot decode a model in a dtype, perhaps `apart`; None if it can."""
    more = supports(model.config) or not_dense(model, apart) or decode.misfit(model.config, dense(model))
    return more or (None if dtype in agreement.TOLERANCE else f"its dtype is {dtype}, which it does not compute")
