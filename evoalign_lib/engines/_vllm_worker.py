"""Code that runs inside vLLM's workers and applies the noise law to the weights that vLLM decodes with.

vLLM mixes `WorkerExtension` into its worker class (see `_vllm_extension`). Nothing is imported from vLLM outside a
worker.

vLLM joins tensors (queries, keys and values; gate and up) and cuts them into shards for tensor-parallel ranks. The
*segment map* says which rows and columns of which Hugging Face parameter lie where. It is read from the attributes of
vLLM's layers, and `engines.vllm` proves it by comparing the bytes of every segment with those of the model.
"""

import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from evoalign_lib import noise, precision
from evoalign_lib._forks import end_with
from evoalign_lib.engines.processes import cores

DRIVER = "EVOALIGN_VLLM_DRIVER"
"""environment variable: process id of the driver while it starts a vLLM that runs in separate processes"""


class Segment(NamedTuple):
    """A block of a Hugging Face parameter, seen as a matrix, and the row of vLLM's tensor where it begins."""

    name: str
    """canonical Hugging Face name"""
    row0: int
    col0: int
    rows: int
    cols: int
    at: int = 0
    """first row in vLLM's tensor"""


class NotMapped(ValueError):
    """A tensor in vLLM has no place in the segment map; the message names it."""


def keep_weights_plain() -> None:
    """On a CPU, make vLLM compute with a layer's weight itself instead of a packed copy.

    When vLLM's CPU backend loads a model, it packs the weight of every linear layer for its own kernels and leaves an
    empty tensor behind. Perturbing the parameters would then change only embeddings and norms, without an error.
    """
    from vllm.model_executor.layers import utils

    def plain(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain


def mind_llvmlite() -> None:
    """Let vLLM start in a process that has loaded numba.

    On a CPU vLLM searches the attributes of all modules for Triton kernels and assumes that `vars(value)` is a
    dictionary. llvmlite's handle of its library returns a function for any attribute, `__dict__` included.
    """
    from vllm.triton_utils import dispatcher

    def attributes(value: object) -> dict:
        found = vars(value)
        return found if isinstance(found, dict) else {}

    dispatcher.vars = attributes


def shard(total: int, rank: int, size: int) -> tuple[int, int]:
    """Return (first, number) of the rows or columns in a tensor-parallel rank's even share of `total`.

    >>> shard(12, 1, 4)
    (3, 3)
    """
    if total % size:
        raise ValueError(f"{total} rows or columns cannot be divided evenly among {size} ranks")
    return rank * (total // size), total // size


def joined_rows(names: Sequence[str], totals: Sequence[int], ranks: Sequence[tuple[int, int]]) -> list[tuple]:
    """Return where the parameters stacked in one tensor lie: (name, first row, rows, row in the tensor) of each.

    Args:
        names: names of the parameters, from the top.
        totals: rows of each whole parameter.
        ranks: (rank, size), the share of each parameter. Where vLLM replicates the heads of keys and values, these are
            divided among fewer ranks than there are.

    >>> joined_rows(["q", "k", "v"], [8, 4, 4], [(1, 4), (0, 2), (0, 2)])  # rank 1 of 4, each key head on two ranks
    [('q', 2, 2, 0), ('k', 0, 2, 2), ('v', 0, 2, 4)]
    """
    held = [shard(total, *rank) for total, rank in zip(totals, ranks, strict=True)]
    ends = itertools.accumulate((rows for _, rows in held), initial=0)
    return [(name, *part, at) for name, part, at in zip(names, held, ends, strict=False)]


def segments_of(layer: torch.nn.Module, name: str, tensor: Tensor, packed: dict[str, list[str]]) -> list[Segment]:
    """Return the segments of Hugging Face parameters that make up a tensor in vLLM.

    Args:
        layer: the module that holds the tensor.
        name: the tensor's name in vLLM's model, such as "model.layers.0.self_attn.qkv_proj.weight".
        tensor: the tensor.
        packed: vLLM's `packed_modules_mapping`: {"qkv_proj": ["q_proj", "k_proj", "v_proj"], ...}.

    Raises:
        NotMapped: an empty tensor, one whose dtype is not a plain float, or a layer that the map does not know.
    """
    if tensor.numel() == 0:
        raise NotMapped(f"{name!r} is empty in vLLM: its backend keeps a packed copy, which noise would not reach.")
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise NotMapped(
            f"{name!r} is {tensor.dtype} in vLLM: a quantised model cannot be perturbed. Load the original."
        )
    kind = {cls.__name__ for cls in type(layer).__mro__}
    module, _, leaf = name.rpartition(".")
    parent, _, own = module.rpartition(".")
    names = [f"{parent}.{part}.{leaf}" if parent else f"{part}.{leaf}" for part in packed.get(own, [own])]
    if own in packed and len(names) == 1:
        raise NotMapped(f"{name!r} is joined in the checkpoint as well, a layout the segment map does not know.")
    shape = tensor.shape if tensor.ndim else (1,)
    rows, cols = (1, shape[0]) if len(shape) == 1 else (shape[0], int(np.prod(shape[1:])))
    rank, size = getattr(layer, "tp_rank", 0), getattr(layer, "tp_size", 1)
    if "QKVParallelLinear" in kind:
        fewer = (rank // layer.num_kv_head_replicas, size // layer.num_kv_head_replicas)
        totals = [layer.total_num_heads * layer.head_size, layer.total_num_kv_heads * layer.head_size]
        totals.append(layer.total_num_kv_heads * layer.v_head_size)
        found = joined_rows(names, totals, [(rank, size), fewer, fewer])
    elif "MergedColumnParallelLinear" in kind:
        found = joined_rows(names, layer.output_sizes, [(rank, size)] * len(names))
    elif "VocabParallelEmbedding" in kind:  # the head, too; the padding rows below belong to no parameter
        held = layer.shard_indices
        first, last = held.org_vocab_start_index, held.org_vocab_end_index
        return [Segment(name, first, 0, last - first, cols)]
    elif "ColumnParallelLinear" in kind:
        found = joined_rows(names, [layer.output_size], [(rank, size)])
    elif "RowParallelLinear" in kind and leaf == "weight":
        first, n = shard(layer.input_size, rank, size)
        return [Segment(name, 0, first, rows, n)]
    elif len(names) == 1:  # assumed whole on every rank, as norms and biases of row-parallel layers; the proof tests it
        return [Segment(name, 0, 0, rows, cols)]
    else:
        raise NotMapped(f"{name!r} joins {names} in a {type(layer).__name__}, which the segment map does not know.")
    if len(shape) == 1:  # a bias is one row, whose columns correspond to the rows of the weight
        return [Segment(n, 0, first, 1, count, at) for n, first, count, at in found]
    return [Segment(n, first, 0, count, cols, at) for n, first, count, at in found]


def part_of(tensor: Tensor, segment: Segment) -> Tensor:
    """Return a segment of a tensor in vLLM as a matrix, a view."""
    if tensor.ndim <= 1:
        return tensor.view(1, -1)[:, segment.at : segment.at + segment.cols]
    return tensor.view(len(tensor), -1)[segment.at : segment.at + segment.rows]


class WorkerExtension:
    """Methods that `engines.vllm` calls in every worker by `collective_rpc`, with plain values in and out."""

    def evoalign_open(self, most_members: int, law: Mapping[str, Any] | None) -> str | None:
        """Build the segment map and, given a law, a float32 master of the parameters that move.

        law: arguments of `noise.device_weights`, and `moving`, the shape of each parameter that moves.

        Returns:
            None, or the message of `NotMapped`: an exception from another process would lose its type on the way.
        """
        try:
            self.evoalign_parts = list(self._evoalign_parts())
        except NotMapped as error:
            return str(error)
        self.evoalign_moving: dict[str, tuple[int, ...]] = {}
        if law is not None:
            self.evoalign_law = dict(law)
            self.evoalign_moving = self.evoalign_law.pop("moving")
            parts = [part for part in self.evoalign_parts if part[0].name in self.evoalign_moving]
            pieces = [noise.Piece(part, s.name, s.row0, s.col0, vector) for s, part, vector in parts]
            self.evoalign_weights = noise.device_weights(pieces, most_members=most_members, **self.evoalign_law)
        return None

    def _evoalign_parts(self) -> Iterator[tuple[Segment, Tensor, bool]]:
        """Iterate over the segments of vLLM's weights: each with its matrix and whether its parameter is a vector.

        Layers that can have an adapter keep the base's parameters in `base_layer`.
        """
        model = self.model_runner.model
        packed, layers = getattr(model, "packed_modules_mapping", {}), dict(model.named_modules())
        for name, parameter in model.named_parameters():
            layer, plain = layers[name.rpartition(".")[0]], name.replace(".base_layer.", ".")
            for segment in segments_of(layer, plain, parameter, packed):
                yield segment, part_of(parameter.data, segment), parameter.ndim < 2

    def evoalign_proof(self) -> list[tuple[tuple, str]]:
        """Return each segment with the SHA-256 of its numbers in the master, or in vLLM if it does not move."""
        held = iter(self.evoalign_weights.views()) if self.evoalign_moving else iter(())
        tensors = [next(held) if s.name in self.evoalign_moving else part for s, part, _ in self.evoalign_parts]
        return [(tuple(s), precision.matrix_digest(t)) for (s, *_), t in zip(self.evoalign_parts, tensors, strict=True)]

    def evoalign_perturb(self, key: int, sigma: float, sign: int) -> None:
        """Write a member's weights; see `DeviceWeights.perturb`."""
        self.evoalign_weights.perturb(key, sigma, sign)

    def evoalign_restore(self) -> None:
        """Write the unperturbed weights."""
        self.evoalign_weights.restore()

    def evoalign_update(self, keys: Sequence[int], coefficients: Sequence[float]) -> None:
        """Move the master; the working tensors follow with the next perturb or restore."""
        self.evoalign_weights.update(np.array(keys, np.uint64), np.array(coefficients, np.float32))

    def evoalign_put_adapter(self, number: int, layers: Sequence[tuple[str, int, bytes, bytes]]) -> str | None:
        """Register an adapter under a number, replacing the one that had it before.

        Args:
            number: from 1 to max_loras.
            layers: see `engines.vllm.Layers`.

        Returns:
            None, or a message that names a layer to which vLLM applies no adapter: requests would silently do without.
        """
        from vllm.lora.lora_weights import LoRALayerWeights

        known, dtype, found = self._evoalign_places(), self._evoalign_manager.lora_config.lora_dtype, {}
        for name, rank, a, b in layers:
            if name not in known:
                return f"vLLM gives {name!r} no adapter: leave it out of the adapter's target_modules."
            pair = (torch.frombuffer(bytearray(raw), dtype=torch.float32).to(dtype) for raw in (a, b))
            first, second = (matrix.view(shape) for matrix, shape in zip(pair, ((rank, -1), (-1, rank)), strict=True))
            found[name] = LoRALayerWeights(name, rank, rank, first, second)
        from vllm.lora.lora_model import LoRAModel

        self._evoalign_activate(LoRAModel(number, max(layer.rank for layer in found.values()), found))
        return None

    @property
    def _evoalign_manager(self) -> Any:
        """vLLM's manager of adapters."""
        return self.model_runner.lora_manager._adapter_manager

    def _evoalign_places(self) -> dict[str, tuple[Tensor, Tensor] | None]:
        """Return the slots of all adapters, A and B, for each layer that can have one, by Hugging Face's names.

        None: vLLM keeps the layer's adapters in another form, as those of experts.
        """
        manager, found = self._evoalign_manager, {}
        for name, layer in manager.modules.items():
            names = manager.packed_modules.get(name, [name])
            slots = [*zip(*(getattr(layer, f"lora_{part}_stacked", ()) for part in "ab"), strict=False)]
            found |= zip(names, slots if len(slots) == len(names) else [None] * len(names), strict=True)
        return found

    def _evoalign_activate(self, adapter: Any) -> None:
        """Put vLLM's adapter into a slot, in place of the one with its number."""
        self._evoalign_manager.remove_adapter(adapter.id)
        self._evoalign_manager.add_adapter(adapter)
        self._evoalign_manager.activate_adapter(adapter.id)

    def evoalign_put_members(self, keys: Sequence[int], signs: Sequence[int], sigma: float) -> str | None:
        """Make low-rank members adapters 1, 2, ... over the unperturbed weights, each from its key and sign.

        Returns:
            None, or a message that names a matrix to which vLLM applies no adapter.
        """
        places, rank, moving = self._evoalign_places(), self.evoalign_law["rank"], self.evoalign_moving
        if other := [name for name in moving if places.get(name.removesuffix(".weight")) is None]:
            return f"vLLM gives {other[0]!r} no adapter, and members cannot decode together: use engine='local'."
        manager, numbers = self._evoalign_manager, range(1, len(keys) + 1)
        for number in numbers:
            if number not in manager.lora_index_to_id:  # zeros, which are overwritten below
                self._evoalign_activate(manager.create_dummy_lora(number, 1, {}))
        slots = [manager.lora_index_to_id.index(number) for number in numbers]
        scales = np.array([noise.signed_sigma(sigma, sign) for sign in signs])[:, None, None]
        segments = [segment for segment, *_ in self.evoalign_parts if segment.name in moving]

        def drawn(segment: Segment) -> tuple[np.ndarray, np.ndarray]:
            name, row0, col0, rows, cols, _ = segment
            window = {"rows": (row0, row0 + rows), "cols": (col0, col0 + cols)}
            law = {"distribution": self.evoalign_law["distribution"], **window}
            return noise.factors(np.array(keys, np.uint64), noise.parameter_id(name), moving[name], rank, **law)

        self.evoalign_weights.restore()
        with ThreadPoolExecutor(cores()) as pool:  # numba releases Python's lock
            for segment, (outputs, inputs) in zip(segments, pool.map(drawn, segments), strict=True):
                a, b = places[segment.name.removesuffix(".weight")]
                a[slots, 0, :rank] = torch.from_numpy(inputs).to(a)
                b[slots, 0, :, :rank] = torch.from_numpy((outputs * scales).swapaxes(1, 2)).to(b)
        return None


def end_with_driver() -> None:
    """Make this vLLM process end when the process that drives the run is gone.

    vLLM's workers end with its EngineCore, and the EngineCore with its workers, but both outlive a driver that is
    killed, and would keep the GPUs.
    """
    if driver := os.environ.get(DRIVER):
        end_with(int(driver))


def prepare() -> None:
    """Patch vLLM before it starts in this process, which has loaded `vllm.platforms` already."""
    mind_llvmlite()
    if sys.modules["vllm.platforms"].current_platform.is_cpu():
        keep_weights_plain()
        # Linux kills a process that uses Intel's matrix unit (AMX) without asking first, as vLLM's bfloat16 attention
        # does; on a CPU without AMX this has no effect
        torch.cpu._init_amx()
