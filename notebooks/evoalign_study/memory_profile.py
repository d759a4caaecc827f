"""Peak memory of a training step by component, counted from the storages of tensors.

`Allocations` is a dispatch mode of PyTorch: it sees each operation, forward and backward, and counts a storage from its
first tensor to its last. Each storage has a component: the name that its owner gives it (weights, moments), saved
activations if autograd keeps it, gradients once they are accumulated, or keys and values once attention caches them. A
NumPy array that an operation reads counts as noise unless somebody holds it; the rest are temporaries. Memory that a
single operation takes and frees again is not seen here, only in the resident memory of the process.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

NOISE = "noise or factors"
TEMPORARIES = "temporaries"


class Allocations(TorchDispatchMode):
    """Counter of the storages alive, by component, while its context lasts.

    Args:
        named: takes an operation's name and a new tensor, and returns the tensor's component; None: a temporary.
    """

    def __init__(self, named: Callable[[str, torch.Tensor], str | None] = lambda operation, tensor: None):
        super().__init__()
        self._named = named
        self._storages: dict[int, tuple[int, str, int]] = {}  # size, component, address
        self._arrays: list[tuple[int, int]] = []
        self.now: Counter[str] = Counter()
        """component -> bytes alive"""
        self.at_peak: dict[str, int] = {}
        """component -> bytes at the peak"""
        self._peak = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._saved, lambda tensor: tensor)

    def __enter__(self):
        self._hooks.__enter__()
        return super().__enter__()

    def __exit__(self, *raised):
        super().__exit__(*raised)
        self._hooks.__exit__(*raised)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
        if any(map(is_traceable_wrapper_subclass, given)):
            return NotImplemented  # it wraps plain tensors, whose operations come here
        for tensor in given:
            if _key(tensor) not in self._storages and not self._is_held(tensor):
                self._count(tensor, NOISE)
        out = func(*args, **(kwargs or {}))
        known = set(map(_key, given))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor) and _key(tensor) not in known and _key(tensor) not in self._storages:
                self._count(tensor, self._named(str(func), tensor) or TEMPORARIES)
        self._look()
        return out

    # ---- components

    def name(self, component: str, tensors: Iterable[torch.Tensor]) -> None:
        """Assign tensors to a component, including those made before the context began."""
        for tensor in tensors:
            if _key(tensor) in self._storages:
                self._move(_key(tensor), component)
            else:
                self._count(tensor, component)

    def hold(self, component: str, array: np.ndarray) -> None:
        """Count a NumPy array from here on; if it lies in a tensor's storage, assign that to the component instead."""
        first = array.__array_interface__["data"][0]
        for key, (size, _, start) in self._storages.items():
            if start <= first < start + size:
                self._move(key, component)
                return
        self._arrays.append((first, first + array.nbytes))
        self.now[component] += array.nbytes

    def follow(self, model: torch.nn.Module) -> None:
        """Assign components to a model's gradients when they are accumulated, and to keys and values when cached."""
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p: self.name("gradients", [p.grad]))
        for name, module in model.named_modules():
            if name.endswith("self_attn"):
                module.register_forward_hook(self._cached, with_kwargs=True)

    def _cached(self, module: Any, given: Any, named: Mapping[str, Any], output: Any) -> None:
        if (cache := named.get("past_key_values")) is not None:
            layer = cache.layers[module.layer_idx]
            self.name("KV cache", [layer.keys, layer.values])

    def _saved(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._storages.get(_key(tensor), (0, TEMPORARIES, 0))[1] == TEMPORARIES:
            self.name("saved activations", [tensor])
        return tensor.detach()

    # ---- the peak

    def begin(self) -> None:
        """Forget the peak so far."""
        self._peak, self.at_peak = 0, {}
        self._look()

    def _look(self) -> None:
        if (total := sum(self.now.values())) > self._peak:
            self._peak, self.at_peak = total, {name: size for name, size in self.now.items() if size}

    def _count(self, tensor: torch.Tensor, component: str) -> None:
        storage = tensor.untyped_storage()
        key, size = _key(tensor), storage.nbytes()
        self._storages[key] = size, component, storage.data_ptr()
        self.now[component] += size
        weakref.finalize(storage, self._gone, key)

    def _move(self, key: int, component: str) -> None:
        size, before, start = self._storages[key]
        self._storages[key] = size, component, start
        self.now[before] -= size
        self.now[component] += size

    def _gone(self, key: int) -> None:
        size, component, _ = self._storages.pop(key)
        self.now[component] -= size

    def _is_held(self, tensor: torch.Tensor) -> bool:
        return any(first <= tensor.data_ptr() < last for first, last in self._arrays)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def resident(field: str) -> int:
    """Return a field of this process's /proc/self/status, bytes.

    Raises:
        RuntimeError: there is no such field.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}. Measure on Linux.")
