"""Generate for a population on one GPU without vLLM: many members decode at once.

`engines.population` decodes. The float32 master lies on the GPU, too (`noise.device_weights`): a member's weights are
written from it by a few kernel launches, an update is one pass over it, and it is read back for digests, checkpoints
and export.

How many members decode at once is decided by the free memory. In float32 on a CPU their number changes no bit; on a GPU
products of another shape may be summed in another order, so it is part of the batch plan, like `chunk_rows`.

At the start the decoder's logits are held against those of the model itself. For a model that the population decoder
does not cover, and for generation_kwargs, transformers decodes with a static cache, one member after the other; a
warning says why, and the batch plan names it. Rewards and weights are those of `engine="local"` wherever no token is a
near-tie. With device "cpu" the same code runs without graphs.
"""

import gc
import logging
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evoalign_lib import noise
from evoalign_lib._adapters import base_of, check_movable, is_adapted, moved, plain_name
from evoalign_lib._noise_host import read_only
from evoalign_lib.checks import require, whole_number
from evoalign_lib.engines import agreement, memory
from evoalign_lib.engines.base import PLAIN, Decoding, Engine
from evoalign_lib.engines.decode import inversion
from evoalign_lib.engines.local import LocalEngine
from evoalign_lib.engines.population import PopulationDecoder, uncovered
from evoalign_lib.engines.processes import one_thread
from evoalign_lib.precision import MasterWeights, layout_of
from evoalign_lib.update_rules import Member

logger = logging.getLogger(__name__)


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
                self.__dict__.pop("decoder", None)  # its copies fill the memory that transformers needs
                gc.collect()
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
        # no vectors where linear layers alone move, no matrices where they alone are frozen
        self._own = [x and noise.device_weights(x, *law, stream=i, stacked=True) for i, x in enumerate(stacks)]
        for factors in filter(None, self._own[1:]):
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
        if a:
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
