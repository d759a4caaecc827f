"""Generate for a population on a Ray cluster: members are distributed over actors, and no weights are sent.

An actor is a process with its own engine: our decoding loop or transformers on a CPU core (`engines.local`); on GPUs
vLLM (`engines.vllm`), or `engines.cuda` if vLLM is not installed. What all actors need (model, tokenizer, prompts,
reward functions) goes into the cluster's object store at the start. After that a task carries a member's key and rows
of the prompts, and its answer rewards and lengths; an update carries keys and coefficients, from which every actor
updates its own weights. Whenever an actor is idle it takes the next member, which balances the load (an actor with
`engines.cuda` takes its share of the population at once); results keep the order of the members.

This process holds the run's weights, too, and every update so far. Losing an actor therefore costs only time: a new
process takes its place, loads the starting weights, replays the updates and is compared with the run before it gets any
work. Each task says how many updates its actor must have applied, and an actor that lacks some is replaced. Whenever
the ledger notes a digest, all actors are compared with the run, and those whose weights differ are replaced as well.
Every repair is logged as a warning and counted (`RayEngine.repairs`). If a task ends its process `MOST_DEATHS` times,
an error names the task.

With actors on CPUs, a run gives the same bits as `engines.local` under the same batch plan.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
import os
import secrets
import socket
import tempfile
import time
import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import torch

from evoalign_lib import models, precision
from evoalign_lib.checks import require, whole_number
from evoalign_lib.engines.base import Engine, Evaluation
from evoalign_lib.engines.cuda import CudaEngine
from evoalign_lib.engines.local import LocalEngine
from evoalign_lib.engines.processes import default_workers
from evoalign_lib.engines.proof import WrongWeights, prove
from evoalign_lib.engines.vllm import Generator, LowRankEngine, VLLMDecoding, kind_of
from evoalign_lib.update_rules import Member

logger = logging.getLogger(__name__)

PLACEMENT_SECONDS = 300
"""how long the cluster may take to find room for the actors"""
START_SECONDS = 1800
"""how long an actor may take to load its model and replay the run"""
MOST_DEATHS = 3
"""failures after which a task is given up, and failures in a row that a place is allowed before one can work"""
OBJECT_STORE = 100 << 20
"""bytes of the object store of a cluster that is started here, not counting a model object"""

_OF_ACTORS = ("chunk_rows", "decoder", "tensor_parallel", "settings")
_NEW = "a process that has not answered yet"


class RayEngine(Engine):
    """Engine on the actors of a Ray cluster.

    Args:
        model, tokenizer, rewards, prompts: as for `Engine`. The reward functions run in the actors, so they must be
            picklable (functions defined in a notebook are).
        workers: number of actors without GPUs; None: one for each core of the cluster.
        gpus: GPUs to use; a multiple of tensor_parallel.
        folder: where the model was loaded from, a folder that every machine has or a name on the Hub; None: the model
            itself is sent to every actor, and a copy of it is kept here.
        load: the arguments of from_pretrained that it was loaded with.
        vllm: whether actors on GPUs decode with vLLM, otherwise with `CudaEngine`; None: if vLLM is installed.
        device, population, step_rows: as for `CudaEngine`.
        **alike: chunk_rows and decoder of `LocalEngine`; with GPUs tensor_parallel and settings of `VLLMEngine`, of
            which `CudaEngine` takes only members; max_completion_length, options, distribution, anchor_decay and rank
            of `Engine`.

    The engine uses the cluster of `ray.init()` if that was called, otherwise the one named by RAY_ADDRESS, otherwise it
    starts one on this machine, which ends with the engine. The first call that generates joins the cluster and starts
    the actors.

    Raises:
        ImportError: Ray is not installed; the message says how to install it.
        ValueError: what `LocalEngine` or `VLLMEngine` refuses; tensor_parallel or settings that need vLLM, without it.
    """

    workers = 0
    perturbed = Engine._perturbed_elsewhere

    def __init__(
        self, model, tokenizer, rewards, prompts, *, workers=None, gpus=0, folder: str | None = None, load=None,
        vllm: bool | None = None, device: str = "cuda", population: int = 30, step_rows: int | None = None, **alike,
    ):  # fmt: skip
        _ray()
        own = {name: alike.pop(name) for name in _OF_ACTORS if name in alike}
        common = model, tokenizer, rewards, prompts
        self.gpus, self.chunk_rows = gpus, own.get("chunk_rows", 256)
        self.tensor_parallel = own.get("tensor_parallel", 1)
        self._vllm = bool(gpus) and (find_spec("vllm") is not None if vllm is None else vllm)
        if self.tensor_parallel > 1:  # one actor holds all the GPUs, so vLLM must not spread over Ray actors of its own
            own["settings"] = {"distributed_executor_backend": "mp"} | dict(own.get("settings") or {})
        # an engine like the actors' own: it knows the batch plan and holds the weights, but never generates
        self._alike: Engine | None = None
        if gpus and not self._vllm:
            shape = {"population": math.ceil(population / gpus), "step_rows": step_rows, "device": device}
            own = shape | _without_vllm(own) | {"chunk_rows": self.chunk_rows}
        elif gpus:
            own.pop("chunk_rows", None)
            kind = kind_of(model, alike.get("rank", 0))
            self._alike = kind(*common, folder=folder or "never opened", **own, **alike)
        else:
            self._alike = LocalEngine(*common, workers=default_workers(), **own, **alike)
        super().__init__(*common, **alike | ({"weights": self._alike.weights} if self._alike else {}))
        self.places: list[Place] = []
        """places of the actors; empty before they start"""
        self.sent_bytes, self.received_bytes = 0, 0
        """serialised size of all messages to and from actors after their start"""
        self.repairs = {"actors/restarted": 0, "actors/rebuilt": 0}
        self._wanted_actors = gpus // self.tensor_parallel if gpus else workers
        self._once = {
            "model": None if folder else copy.deepcopy(model),  # the run changes its parameters; actors start afresh
            "folder": folder,
            "moving": {entry.name for entry in self.layout.entries},  # a folder does not say
            "load": dict(load or {}) | {"dtype": model.dtype},
            "kind": CudaEngine if gpus else LocalEngine,
            "own": alike if self._vllm else own | alike | ({} if gpus else {"decoder": self._alike.decoder}),
        }
        self._updates: list[tuple[np.ndarray, np.ndarray]] = []  # every update since the starting weights
        self._cluster: _Cluster | None = None

    @property
    def plan(self):
        if self._alike is None:
            plan = {"decoder": "cuda", "chunk_rows": self.chunk_rows}
            plan |= {"width": self.prompts["train"].width} if "train" in self.prompts else {}
        else:
            plan = self._alike.plan
        return plan | {"exact": False} if self.gpus else plan

    # ---- called by the trainer

    def evaluate(self, members, sigma, name, indices, trainer_state=None, sampling=None):
        step = getattr(trainer_state, "global_step", None)
        where = "" if step is None else f" of step {step}"
        rest = sigma, name, np.asarray(indices), trainer_state, sampling
        if self._alike is None or isinstance(self._alike, LowRankEngine):  # an actor decodes many members at once
            self._start()
            size = math.ceil(len(members) / len(self.places))
            if self._alike is not None:
                size = min(size, self._alike.settings["max_loras"])
            spans = [(i, min(i + size, len(members))) for i in range(0, len(members), size)]
            tasks = [(f"members {i} to {j - 1}{where}", "together", members[i:j], *rest, i) for i, j in spans]
            return list(itertools.chain(*self._serve(tasks)))
        tasks = [(f"member {i}{where}", "evaluate", i, *member, *rest) for i, member in enumerate(members)]
        return self._serve(tasks)

    def _at_once(self, rows):
        self._start()
        # on CPUs, the chunks of `LocalEngine`; vLLM forms its own batches, the more rows the better
        return math.ceil(rows / len(self.places)) if self.gpus else self.chunk_rows

    def _generate(self, parts):
        tasks = []
        for name, chunk, *how in parts:
            label = f"prompts {name!r}, rows {chunk[0]} to {chunk[-1]},"
            tasks.append((label, "generate", self._noise, name, chunk, *how))
        return self._serve(tasks)

    def put_prompts(self, name, prompts):
        super().put_prompts(name, prompts)
        self.close()

    def update(self, keys, coefficients):
        update = np.array(keys, np.uint64), np.array(coefficients, np.float32)
        for place in self.places:  # actors update their weights while this process updates its own
            self._send(place, "update", [update])
        self._updates.append(update)
        super().update(*update)

    def follow(self, updates):
        self._updates = list(updates)
        for place in self.places:  # the running processes have replayed other updates
            self._launch(place)

    def check(self):
        for place in self.places:
            if place.awaited is None:
                self._ask_proof(place)
        # actors that are still starting are compared once they have started
        while any(place.proved and place.awaited is not None for place in self.places):
            self._next_answer()

    def close(self):
        """End the actors, and Ray itself if it was started here and no other engine uses it."""
        if self._cluster is not None:
            self._cluster.leave()
        self.places, self._cluster = [], None

    # ---- actors

    def _start(self) -> None:
        """Join the cluster and start the actors."""
        if self.places:
            return
        ray, model = _ray(), self._once["model"]
        size = 0 if model is None else sum(p.numel() * p.itemsize for p in model.parameters())
        own_gpus = 0 if self._once["own"].get("device") == "cpu" or not self.gpus else self.tensor_parallel
        self._cluster = cluster = _Cluster(self._wanted_actors, own_gpus, size)
        weakref.finalize(self, cluster.leave).atexit = False  # when the interpreter ends, Ray ends everything itself
        once = self._once | {"scoring": (self.tokenizer, self.rewards, self.prompts)}
        if self._vllm:
            once |= {"end": (self.eos_ids, self.max_completion_length, self.options)}
            once |= {"vllm": self._alike.loading(self.longest())}
        try:
            self._sent_once = ray.put(once)
        except TypeError as error:
            cluster.leave()
            raise TypeError(
                "model, tokenizer, prompts and reward functions are sent to actors, and one of them cannot be pickled: "
                f"{error.__cause__ or error}. Use a reward function that holds no open file, lock or the like, or set "
                "engine='local'."
            ) from error
        self.places = [Place(i) for i in range(cluster.size)]
        for place in self.places:
            self._launch(place)

    def _launch(self, place: Place) -> None:
        """Start a process in a place, ending the one that was there, and have it replay the run."""
        if place.actor is not None:
            _ray().kill(place.actor)
        place.actor = self._cluster.actor(place.number, self._sent_once)
        place.process, place.proved, place.started = _NEW, False, time.monotonic()
        self._send(place, "update", self._updates)
        self._ask_proof(place)

    def _ask_proof(self, place: Place) -> None:
        place.task, place.awaited = None, self._send(place, "work", len(self._updates), "proof")

    def _send(self, place: Place, method: str, *arguments: Any) -> Any:
        """Call a method of an actor; return the reference to its answer."""
        self.sent_bytes += len(_ray().cloudpickle.dumps(arguments))
        return getattr(place.actor, method).remote(*arguments)

    # ---- tasks

    def _serve(self, tasks: Sequence[tuple]) -> list:
        """Distribute tasks over idle actors and return the results in the order of the tasks.

        Args:
            tasks: (label for errors, method of the actors, its arguments ...) each.
        """
        self._start()
        queue, done, failures = deque(range(len(tasks))), {}, Counter()
        try:
            while len(done) < len(tasks):
                for place in self.places:
                    if place.awaited is None and queue:
                        place.task = queue.popleft()
                        place.awaited = self._send(place, "work", len(self._updates), *tasks[place.task][1:])
                place, task, answer = self._next_answer()
                if task is None:
                    continue
                if answer is not None:
                    done[task] = answer
                    place.finished += 1
                    continue
                queue.appendleft(task)
                failures[task] += 1
                if failures[task] == MOST_DEATHS:
                    raise RuntimeError(
                        f"{tasks[task][0]} ended the process that it was given to {MOST_DEATHS} times, most recently "
                        f"{place.end}. Either its reward function ends the process, or memory ran out "
                        "(lower chunk_rows, workers, or with vLLM gpu_memory_utilization). Every recorded step is "
                        "in the ledger: fix the cause and call train(resume_from_checkpoint=True)."
                    )
        except BaseException:
            for place in self.places:
                if place.task is not None:  # drop its answer; the next task queues behind it in the actor
                    place.task = place.awaited = None
            raise
        return [done[i] for i in range(len(tasks))]

    def _next_answer(self) -> tuple[Place, int | None, Any]:
        """Wait for any actor; return its place, its task (None: a proof was due) and its answer (None: it failed)."""
        ray = _ray()
        awaited = {place.awaited: place for place in self.places if place.awaited is not None}
        starting = [place for place in awaited.values() if not place.proved]
        first = min(starting, key=lambda place: place.started, default=None)
        patience = None if first is None else max(0.0, first.started + START_SECONDS - time.monotonic())
        ready, _ = ray.wait(list(awaited), timeout=patience)
        if not ready:
            raise RuntimeError(
                f"{first} has not started within {START_SECONDS} s. {_resources()} If a machine is gone, bring it "
                "back or set fewer workers or gpus, and call train(resume_from_checkpoint=True) in a new process; if "
                "the model takes longer to load, raise evoalign_lib.engines.ray.START_SECONDS."
            )
        place = awaited[ready[0]]
        task, place.task, place.awaited = place.task, None, None
        try:
            applied, answer = ray.get(ready[0])
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, Exception):
                raise error.cause from error  # the actor's own exception, such as a RewardError
            raise
        except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
            # the end of Ray's message says why the actor died, or what it raised while starting
            place.end = f"{place.process}: {' '.join(str(error).split())[-500:]}"
            if getattr(error, "actor_init_failed", False):
                raise RuntimeError(
                    f"actor {place.number} cannot start, {place.end}. Install evoalign_lib and its dependencies on "
                    "every machine of the cluster, and copy the model's folder, if it is one, to the same path there."
                ) from error
            self._replace(place, "restarted", f"actor {place.number} died, {place.end}.")
            return place, task, None
        self.received_bytes += len(ray.cloudpickle.dumps(answer))
        if answer is None:
            place.end = f"{place.process}: it lacked updates"
            self._replace(place, "rebuilt", f"{place} has applied {applied} of {len(self._updates)} updates.")
        elif task is None:
            self._judge(place, applied, *answer)
        return place, task, answer

    # ---- failures and repairs

    def _replace(self, place: Place, repair: str, what: str) -> None:
        """Start a new process in a place; raise RuntimeError after too many failures without a proof in between."""
        place.failures += 1
        if place.failures > MOST_DEATHS:
            raise RuntimeError(
                f"actor {place.number} failed {place.failures} times in a row before it could work, most recently: "
                f"{what} Check the memory of its machine and Ray's logs there. Every recorded step is in the ledger."
            )
        self.repairs[f"actors/{repair}"] += 1
        logger.warning("%s A new process takes its place and replays %d updates.", what, len(self._updates))
        self._launch(place)

    def _judge(self, place: Place, applied: int, process: str, proof: Any) -> None:
        """Compare an actor's weights with the run's; let it work, or start a new process in its place."""
        if applied < len(self._updates):  # the run has been updated since
            self._ask_proof(place)
            return
        place.process, wrong = process, None
        if self._vllm:
            try:
                prove(self.model, self.layout, self.master, proof)
            except WrongWeights as error:
                wrong = str(error)
        elif proof != (own := precision.digest(self.layout, self.master)):
            wrong = f"their digest is {proof:.16}..., the run's is {own:.16}..."
        if wrong is None:
            place.proved, place.failures = True, 0
            return
        what = f"{place}: after {applied} updates its weights are not those of the run: {wrong}"
        if not place.proved:
            raise WrongWeights(
                f"{what} A new process that has replayed the run differs, so nothing can be repaired. Either it did "
                "not load the model that was passed, or its machine computes the noise differently. Run the tests of "
                "evoalign_lib.noise there to find out."
            )
        self._replace(place, "rebuilt", what)


@dataclass
class Place:
    """The place of an actor, which successive processes may fill."""

    number: int
    finished: int = 0
    """tasks done here"""
    process: str = _NEW
    """id and machine of the process"""
    end: str = ""
    """why the last process ended"""
    actor: Any = None
    awaited: Any = None
    """reference to the answer that is due; None: the actor is idle"""
    task: int | None = None
    """number of its current task; None: a proof is due, or the actor is idle"""
    proved: bool = False
    """whether its weights have been compared with the run's since its process started"""
    failures: int = 0
    """number of failures since the last proof"""
    started: float = 0.0

    def __str__(self):
        return f"actor {self.number} ({self.process})"


def _without_vllm(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `CudaEngine` in place of those for vLLM; raise ValueError if only vLLM could follow them."""
    settings = own.get("settings") or {}
    one = own.get("tensor_parallel", 1) == 1
    require(one, f"tensor_parallel={own.get('tensor_parallel')} needs vLLM, which is not installed. Set it to 1.")
    more = sorted(settings.keys() - {"members"})
    what = f"engine_kwargs: {', '.join(more)} needs vLLM, which is not installed; engine 'cuda' takes members only"
    require(not more, f"{what}. Remove it.")
    if settings.get("members") is not None:
        whole_number("members", settings["members"], 1)
    return dict(settings)


# ---- in the actor's process


class _Actor:
    """The actor itself: an engine in a process of the cluster, and the number of updates applied to its weights."""

    def __init__(self, once: dict[str, Any]):
        self.engine = _Replica(once) if "vllm" in once else _whole_engine(once)
        self.applied = 0

    def update(self, updates: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Apply updates, (keys, coefficients) each."""
        for update in updates:
            self.engine.update(*update)
        self.applied += len(updates)

    def work(self, applied: int, method: str, *arguments: Any) -> tuple[int, Any]:
        """Return the number of updates applied so far and, if it equals `applied`, a method's result, else None."""
        return self.applied, getattr(self, method)(*arguments) if applied == self.applied else None

    def proof(self) -> tuple[str, Any]:
        """Return this process's id and machine, and the digest or proof of its weights."""
        if isinstance(self.engine, Engine):
            proof = precision.digest(self.engine.layout, self.engine.master)
        else:
            proof = self.engine.generator.proof()
        return f"process {os.getpid()} on {socket.gethostname()}", proof

    def evaluate(self, index: int, key: int, sign: int, *rest: Any) -> Evaluation:
        """Evaluate a member."""
        return self.engine.evaluate_member(index, Member(key, sign), *rest)

    def together(self, *arguments: Any) -> list[Evaluation]:
        """Evaluate members together; arguments: those of `Engine.evaluate`, and the number of the first member."""
        of_vllm = isinstance(self.engine, VLLMDecoding)
        return (self.engine.evaluate_together if of_vllm else self.engine.evaluate)(*arguments)

    def generate(self, noise: tuple[Member, float] | None, *arguments: Any) -> list[tuple[str, list[int]]]:
        """Return completions; noise: a member and sigma to perturb the weights with, or None."""
        with self.engine.perturbed(noise[0].key, noise[1]) if noise else nullcontext():
            return self.engine.generate_rows(*arguments)


def _whole_engine(once: Mapping[str, Any]) -> Engine:
    torch.set_num_threads(1)
    model, (tokenizer, rewards, prompts) = once["model"], once["scoring"]
    if model is None:
        model, _ = models.load(once["folder"], tokenizer, once["load"])
        for own, parameter in model.named_parameters():
            parameter.requires_grad_(own in once["moving"])
    return once["kind"](model, tokenizer, rewards, prompts, **once["own"])


class _Replica(VLLMDecoding):
    """vLLM with the run's prompts and rewards; only vLLM's workers hold weights."""

    def __init__(self, once: Mapping[str, Any]):
        super().__init__(*once["scoring"], *once["end"])
        with tempfile.TemporaryDirectory() as made:
            if (folder := once["folder"]) is None:
                folder = made
                models.save(once["model"], folder)
            self.generator = Generator(folder, **once["vllm"])
        self.update = self.generator.update


# ---- the cluster


class _Cluster:
    """Resources for actors, reserved on a Ray cluster.

    Args:
        size: number of actors; None: one for each core.
        gpus: GPUs of each actor.
        model_bytes: size of the model in the object store, bytes.

    Raises:
        RuntimeError: the cluster finds no room in time.
    """

    _open: set[_Cluster] = set()
    _started_here = False

    def __init__(self, size: int | None, gpus: int, model_bytes: int):
        ray = _ray()
        if not ray.is_initialized():
            _join(size, model_bytes)
        _Cluster._open.add(self)
        self.size = size or max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._bundle = {"CPU": 1} | ({"GPU": gpus} if gpus else {})
        self._group = ray.util.placement_group([self._bundle] * self.size, strategy="PACK")
        lacks = any(ray.cluster_resources().get(k, 0) < self.size * n for k, n in self._bundle.items())
        # a cluster that was started here has only this machine and cannot grow: do not wait
        if (lacks and _Cluster._started_here) or not self._group.wait(PLACEMENT_SECONDS):
            held = _resources()
            self.leave()
            raise RuntimeError(
                f"the cluster has no room for {self.size} actors of {self._bundle} each (waited for at most "
                f"{PLACEMENT_SECONDS} s). {held} Set fewer workers or gpus, add machines, or release what is in use "
                "(trainer.engine.close() of a trainer that is done)."
            )

    def actor(self, number: int, *arguments: Any) -> Any:
        """Start an actor in the place of this number."""
        ray = _ray()
        placed = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._group, number)
        options = {"num_cpus": 1, "num_gpus": self._bundle.get("GPU", 0), "scheduling_strategy": placed}
        # no restarts by Ray: they would bring back the starting weights without the driver's knowledge
        return ray.remote(_Actor).options(**options, max_restarts=0, max_task_retries=0).remote(*arguments)

    def leave(self) -> None:
        """Release the resources, which ends the actors; end Ray if it was started here and no other engine uses it."""
        ray = _ray()
        if self not in _Cluster._open:
            return
        _Cluster._open.remove(self)
        if not ray.is_initialized():  # shut down elsewhere
            return
        ray.util.remove_placement_group(self._group)
        if _Cluster._started_here and not _Cluster._open:
            _Cluster._started_here = False
            ray.shutdown()


def _resources() -> str:
    """Return a sentence on the cluster's resources."""
    whole, free = _ray().cluster_resources(), _ray().available_resources()
    kinds = ", ".join(f"{whole.get(k, 0):g} {k} ({free.get(k, 0):g} free)" for k in ("CPU", "GPU"))
    return f"It has {kinds}."


def _ray() -> ModuleType:
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            "engine='ray', and several vLLM engines, need Ray: pip install -e '.[cluster]', or set engine='local'."
        ) from error
    return ray


def _join(workers: int | None, model_bytes: int) -> None:
    """Connect to the cluster that RAY_ADDRESS names, or start one on this machine."""
    ray = _ray()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address := os.environ.get("RAY_ADDRESS"):
        ray.init(address, **quiet)
        return
    if not any(f"RAY_AUTH_{name}" in os.environ for name in ("MODE", "TOKEN", "TOKEN_PATH")):
        # Ray listens on the network, and anyone who can reach it can run code here. By default it requires a token and
        # stores one in the home folder; this token exists only for this process and its children.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    ray.init(
        "local",
        num_cpus=max(workers or 1, default_workers()),
        object_store_memory=OBJECT_STORE + 2 * model_bytes,
        include_dashboard=False,
        **quiet,
    )
    _Cluster._started_here = True
