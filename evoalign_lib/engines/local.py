"""Generate for a population on this machine's CPU cores, members in parallel worker processes.

The float32 master lies in memory that the workers share. A worker writes a member's weights from the master into its
own working copy (one pass, the master never moves), decodes the prompts, scores the completions and sends back rewards;
no weights travel. Workers are forked, so the reward functions need not be picklable, and use one torch thread each: two
threads on two shared cores are many times slower than two processes. A reward function that keeps a state keeps one in
each worker. (The precision modes without a master keep one replica of the weights, which one process perturbs and
restores.)

Completions of one member are decoded in chunks of a fixed number of rows and a fixed prompt width (the batch plan).
Floating-point results depend on that plan and on nothing else, not on the number of workers.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from evoalign_lib import noise
from evoalign_lib.engines.decode import Decoder, product_dtype, rows_are_exact, supports
from evoalign_lib.precision import Weights, copy_to, open_weights
from evoalign_lib.rewards import ARGUMENTS, RewardError, Rewards, Scored

logger = logging.getLogger(__name__)

DECODERS = ("auto", "loop", "generate")


class Member(NamedTuple):
    """One member of a population: the key of its noise, the sign of the perturbation."""

    key: int
    sign: int = 1


@dataclass
class Evaluation:
    """What one member did on the prompts of a step."""

    scored: Scored
    """rewards of its completions, (completions,): one a prompt, or several samples of each in turn"""
    lengths: np.ndarray
    """(completions,) generated tokens, the end token included"""
    clipped: np.ndarray
    """(completions,) bool: no end token within the limit"""
    core_seconds: float
    """CPU time of the worker"""


class Prompts:
    """Tokenised prompts, padded on the left to one width.

    Args:
        rows: the data set: mappings with "prompt" (a string, or a list of messages) and further columns.
        tokenizer: the model's tokenizer.

    Raises:
        ValueError: no rows, rows without "prompt", or rows of different columns.
        TypeError: something that is not a sequence of rows, or prompts of different types.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]], tokenizer):
        if isinstance(rows, Mapping):
            raise TypeError(f"the data set is a mapping with the keys {sorted(rows)}: give one split, a list of rows.")
        rows = list(rows)
        for i, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise TypeError(f"row {i} of the data set is {row!r:.200}: give mappings with a 'prompt'.")
        if not rows:
            raise ValueError("the data set is empty: give at least one row with a 'prompt'.")
        names = set(rows[0])
        for i, row in enumerate(rows):
            if "prompt" not in row:
                raise ValueError(f"row {i} of the data set has no 'prompt', only {sorted(row)}.")
            if set(row) != names:
                raise ValueError(f"row {i} of the data set has the columns {sorted(row)}, row 0 has {sorted(names)}.")
        if taken := sorted(names & set(ARGUMENTS)):
            raise ValueError(f"the column {taken[0]!r} is an argument of reward functions: give it another name.")
        self.prompts = [row["prompt"] for row in rows]
        self.conversational = not isinstance(self.prompts[0], str)
        for i, prompt in enumerate(self.prompts):
            if not isinstance(prompt, list if self.conversational else str):
                raise TypeError(f"the prompt of row {i} is {prompt!r:.200}: give strings everywhere, or message lists.")
        texts = self.prompts
        if self.conversational:
            texts = [tokenizer.apply_chat_template(p, tokenize=False, add_generation_prompt=True) for p in texts]
        self.columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
        # a rendered chat template already holds its special tokens; any other text gets those the tokenizer adds
        rendered = self.conversational or bool(tokenizer.bos_token and texts[0].startswith(tokenizer.bos_token))
        ids = tokenizer(texts, add_special_tokens=not rendered, padding=False)["input_ids"]
        for i, row in enumerate(ids):
            if not row:
                raise ValueError(f"the prompt of row {i} is empty after tokenisation: {self.prompts[i]!r}.")
        self.lengths = np.array([len(row) for row in ids])
        # what all prompts begin with; the last token of the shortest one is left to it
        same = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*ids, strict=False))
        self.prefix = np.array(ids[0][: min(len(list(same)), self.lengths.min() - 1)], dtype=np.int64)
        """(p) tokens that all prompts begin with"""
        self.digest = hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]
        self.width = int(self.lengths.max())
        self.ids = np.full((len(ids), self.width), tokenizer.pad_token_id, dtype=np.int64)
        self.mask = np.zeros_like(self.ids)
        for i, row in enumerate(ids):
            self.ids[i, self.width - len(row) :] = row
            self.mask[i, self.width - len(row) :] = 1

    def __len__(self) -> int:
        return len(self.prompts)


class Scorer:
    """Turns decoded ids into texts and rewards.

    Args:
        tokenizer: the model's tokenizer.
        rewards: scores completions.
        prompts: name -> prompts (for example "train" and "eval").
        eos_ids: token ids that end a completion.
        max_completion_length: new tokens at most.
    """

    def __init__(
        self,
        tokenizer,
        rewards: Rewards | None,
        prompts: Mapping[str, Prompts],
        eos_ids: Sequence[int],
        max_completion_length: int,
    ):
        self.tokenizer, self.rewards, self.prompts = tokenizer, rewards, dict(prompts)
        self.eos_ids, self.max_completion_length = list(eos_ids), max_completion_length

    def until_end(self, ids: np.ndarray) -> list[list[int]]:
        """Decoded ids (rows, width), each row up to and with its end token."""
        ends = np.isin(ids, self.eos_ids)
        lengths = np.where(ends.any(1), ends.argmax(1) + 1, ids.shape[1])
        return [row[:n].tolist() for row, n in zip(ids, lengths, strict=True)]

    def completions(self, raw: list[list[int]]) -> list[tuple[str, list[int]]]:
        """Completions as texts without special tokens, and their ids."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:  # one call into the tokenizers library, instead of a Python loop over rows
            texts = backend.decode_batch(raw, skip_special_tokens=True)
        else:
            texts = self.tokenizer.batch_decode(raw, skip_special_tokens=True)
        return list(zip(texts, raw, strict=True))

    def scored(
        self, index: int, name: str, indices: np.ndarray, completions: list, trainer_state: Any, started: float
    ) -> Evaluation:
        """What the member of this index did: its completions of rows of the prompts, scored.

        Args:
            index: of the member, for errors.
            name, indices: which prompts, one row a completion.
            completions: pairs of text and token ids.
            trainer_state: passed to the reward functions.
            started: CPU time of this process when the member began, seconds.
        """
        try:
            scored = score(self.rewards, self.prompts[name], indices, completions, trainer_state)
        except RewardError as error:
            raise RewardError(f"member {index}: {error}") from error
        lengths = np.array([len(raw) for _, raw in completions])
        clipped = np.array([raw[-1] not in self.eos_ids for _, raw in completions])
        return Evaluation(scored, lengths, clipped, time.process_time() - started)


class Engine(Scorer):
    """What every engine has: prompts, a model with its tokenizer, and the weights of the run in this process.

    Whatever generates, the weights of the run are held here, too, and follow every update: their digest goes into the
    ledger, checkpoints and folders are written from them, and a generator elsewhere is checked against them.

    Args:
        model: a Hugging Face decoder-only model; its parameters are the weights at the start.
        tokenizer: its tokenizer, with a padding token.
        rewards: scores completions.
        prompts: name -> prompts (for example "train" and "eval").
        max_completion_length: new tokens at most.
        threads: of this process, that share an update of its weights.
        precision: "master", "kahan" or "inplace" (see `evoalign_lib.precision`); in the last two the model's parameters
            become views of the engine's weights.
        distribution: of the noise (see `evoalign_lib.noise`).
        weights: those of the run, where they exist already; then threads, precision and distribution are theirs.

    Raises:
        ValueError: a precision or distribution that does not exist, or a precision that does not take the model's
            dtype.
    """

    workers = 1
    """processes that evaluate; 1: this one; 0: none of this machine's"""
    mended: Mapping[str, int] = {}
    """what broke and was mended so far, by name: the trainer logs what is not zero"""

    def __init__(
        self,
        model,
        tokenizer,
        rewards: Rewards | None,
        prompts: Mapping[str, Prompts],
        *,
        max_completion_length: int,
        threads: int = 1,
        precision: str = "master",
        distribution: str = "gaussian",
        weights: Weights | None = None,
    ):
        super().__init__(tokenizer, rewards, prompts, _eos_ids(model, tokenizer), max_completion_length)
        self.model = model
        shapes = ((name, tuple(p.shape)) for name, p in model.named_parameters())
        self.layout = noise.Layout.from_shapes(shapes)
        self.weights = weights or open_weights(model, self.layout, precision, distribution, bind=True, threads=threads)

    @property
    def master(self) -> np.ndarray:
        """The float32 master, (layout.size,). Raises AttributeError in the modes that keep none."""
        if self.weights.precision != "master":
            raise AttributeError(f"precision={self.weights.precision!r} keeps no master: use engine.weights.float32().")
        return self.weights.flat

    @property
    def plan(self) -> dict[str, Any]:
        """The batch plan of training, on which floating-point results depend."""
        raise NotImplementedError

    def evaluate(
        self,
        members: Sequence[Member],
        sigma: float,
        name: str,
        indices: np.ndarray,
        trainer_state: Any = None,
        sampling: tuple[int, int] | None = None,
    ) -> list[Evaluation]:
        """Evaluate a population; every member decodes the same prompts under one perturbation.

        Args:
            members: (members,) keys and signs.
            sigma: standard deviation of the perturbation, weight units.
            name: which prompts.
            indices: rows of them.
            trainer_state: passed to the reward functions, pickled with every member where other processes score.
            sampling: None for greedy decoding; else the key of the random numbers, which are the same for every member
                (see `noise.uniforms`), and the number of completions a prompt, at temperature 1.

        Returns:
            (members,) in the order of `members`.
        """
        raise NotImplementedError

    def generate(
        self,
        name: str,
        indices: np.ndarray | None = None,
        *,
        samples: int = 0,
        seed: int = 0,
        temperature: float = 1.0,
    ) -> list[list[tuple[str, list[int]]]]:
        """Completions of the weights themselves.

        Args:
            name: which prompts.
            indices: rows of them (default: all).
            samples: 0 for greedy decoding, else the number of samples a prompt (plain: no top-k, top-p or repetition
                penalty).
            seed: of the samples; row i of the prompts gets the same numbers in any chunk, and at any temperature.
            temperature: of the samples, which the logits are divided by.

        Returns:
            (max(1, samples)) lists of (prompts) pairs of text and token ids.

        Raises:
            ValueError: a temperature that is not a number above 0.
        """
        raise NotImplementedError

    @contextmanager
    def perturbed(self, key: int, sigma: float) -> Iterator[None]:
        """While the context lasts `generate` decodes with noise on the weights; then they are back, bit for bit.

        Args:
            key: of the noise, 64 bits.
            sigma: its standard deviation, weight units.
        """
        centre = self.master.copy()
        noise.perturb(self.master, centre, self.layout, key, sigma, distribution=self.weights.distribution)
        try:
            yield
        finally:
            self.master[:] = centre

    def add_prompts(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add a set of prompts for `generate`; before the first call that starts what generates elsewhere.

        Raises:
            RuntimeError: that runs already and would not see it.
        """
        self.prompts[name] = Prompts(rows, self.tokenizer)

    def update(self, keys: np.ndarray, coefficients: np.ndarray) -> None:
        """Move the weights: keys uint64 (members,), coefficients float32 (members,); see `noise.update`."""
        self.weights.update(keys, coefficients)

    def follow(self, updates: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Let what generates elsewhere catch up with weights that were loaded here.

        Args:
            updates: (keys, coefficients) of every update from the starting model to these weights.
        """

    def check(self) -> None:
        """Compare the weights of everything that generates with those of this process, and mend or refuse."""

    def write_model(self) -> None:
        """Copy the weights into the model's parameters, in the model's dtype."""
        copy_to(self.model, self.layout, self.weights.flat)

    def close(self) -> None:
        """End what the engine has started."""


class LocalEngine(Engine):
    """A population on CPU cores.

    Args:
        model: a Hugging Face decoder-only model; its parameters become the master at the start.
        tokenizer: its tokenizer, with a padding token.
        rewards: scores completions, in the workers.
        prompts: name -> prompts (for example "train" and "eval").
        max_completion_length: new tokens at most.
        chunk_rows: rows decoded at once.
        workers: processes; 1 works in this process.
        decoder: "loop" (our loop), "generate" (transformers), "auto": the loop where it covers the model.
        precision, distribution: of `Engine`.

    Raises:
        ValueError: a decoder that does not exist or does not cover the model, workers or chunk_rows below 1, a
            precision or distribution that does not exist, a precision that does not take the model's dtype, or several
            workers without a master.
    """

    def __init__(
        self,
        model,
        tokenizer,
        rewards: Rewards | None,
        prompts: Mapping[str, Prompts],
        *,
        max_completion_length: int,
        chunk_rows: int = 256,
        workers: int = 1,
        decoder: str = "auto",
        precision: str = "master",
        distribution: str = "gaussian",
    ):
        if workers < 1 or chunk_rows < 1:
            raise ValueError(f"workers and chunk_rows must be at least 1, got {workers} and {chunk_rows}.")
        if decoder not in DECODERS:
            raise ValueError(f"decoder {decoder!r} is not one of {DECODERS}.")
        if workers > 1 and not sys.platform.startswith("linux"):
            raise ValueError(f"workers={workers} needs Linux (processes are forked); set workers=1 on {sys.platform}.")
        if workers > 1 and precision != "master":
            raise ValueError(
                f"workers={workers} needs precision='master': precision={precision!r} keeps one replica of the "
                "weights, in which members take their turns. Set workers=1."
            )
        super().__init__(
            model,
            tokenizer,
            rewards,
            prompts,
            max_completion_length=max_completion_length,
            threads=workers,
            precision=precision,
            distribution=distribution,
        )
        self.chunk_rows, self.workers = chunk_rows, workers
        self._pool: ProcessPoolExecutor | None = None
        reason = supports(model.config)
        if not reason and "model.embed_tokens.weight" not in dict(model.named_parameters()):
            reason = f"the parameters of {type(model).__name__} have other names"
        if not reason and model.dtype not in (torch.float32, torch.bfloat16):
            reason = f"its dtype is {model.dtype}, the loop computes float32 and bfloat16 models"
        if decoder == "loop" and reason:
            raise ValueError(f"decoder='loop' does not cover this model: {reason}. Use decoder='generate'.")
        self.decoder = "generate" if decoder == "generate" or reason else "loop"
        with _one_thread():
            self._drop_rows = self.decoder == "loop" and rows_are_exact(
                model.config, self._views(self.weights.flat), chunk_rows
            )
        if self.decoder == "loop" and not self._drop_rows:
            logger.warning(
                "This CPU computes products of few rows otherwise than products of many: rows that have ended are "
                "computed to the end of their batch, which costs time and changes no result."
            )
        self._id = next(_IDS)
        _ENGINES[self._id] = self

    # ---- what the trainer calls

    @property
    def plan(self) -> dict[str, Any]:
        """The batch plan of training, on which floating-point results depend.

        drop_rows is false where this CPU's products are not exact by row: then full batches are kept.
        """
        prompts = self.prompts["train"]
        plan = {"decoder": self.decoder, "chunk_rows": self.chunk_rows, "width": prompts.width}
        if self.decoder == "loop":
            products = str(product_dtype(self.model.dtype)).removeprefix("torch.")
            plan |= {"prefix": len(prompts.prefix), "products": products, "drop_rows": self._drop_rows}
        return plan

    def evaluate(self, members, sigma, name, indices, trainer_state=None, sampling=None):
        tasks = [(_evaluate, (i, m, sigma, name, indices, trainer_state, sampling)) for i, m in enumerate(members)]
        return self._run(tasks)

    def generate(self, name, indices=None, *, samples=0, seed=0, temperature=1.0):
        check_temperature(temperature)
        indices = np.arange(len(self.prompts[name])) if indices is None else np.asarray(indices)
        chunks = [indices[i : i + self.chunk_rows] for i in range(0, len(indices), self.chunk_rows)]
        draws: list[int | None] = list(range(samples)) if samples else [None]
        tasks = [(_generate, (name, chunk, seed, draw, temperature)) for draw in draws for chunk in chunks]
        done = iter(self._run(tasks))
        return [[pair for _ in chunks for pair in next(done)] for _ in draws]

    def add_prompts(self, name, rows):
        if self._pool is not None:
            raise RuntimeError(f"prompts {name!r} come too late: add them before the workers start.")
        super().add_prompts(name, rows)

    def close(self) -> None:
        """End the worker processes."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    # ---- processes

    def _run(self, tasks: list[tuple[Callable, tuple]]) -> list:
        if self.workers == 1 or len(tasks) == 1:
            with _one_thread():  # as the workers have: products may be split otherwise among several
                return [function(self._id, *arguments) for function, arguments in tasks]
        if self._pool is None:
            context = multiprocessing.get_context("fork")
            self._pool = ProcessPoolExecutor(
                self.workers, mp_context=context, initializer=_start_worker, initargs=(os.getpid(),)
            )
            weakref.finalize(self, self._pool.shutdown, wait=False)  # at the latest before the interpreter ends
        futures = []
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of forking a process with threads; the workers only compute and never touch them
                warnings.simplefilter("ignore", DeprecationWarning)
                for function, arguments in tasks:  # the first one forks the workers
                    futures.append(self._pool.submit(function, self._id, *arguments))
            for future in as_completed(futures):
                future.result()  # the first failure is raised at once, whoever's it is
        except BrokenProcessPool as error:
            self._pool = None
            raise RuntimeError(
                "a worker process ended unexpectedly (killed, or out of memory). Every recorded step is in the ledger: "
                "call train(resume_from_checkpoint=True), with fewer workers if memory was short."
            ) from error
        except BaseException:
            for future in futures:
                future.cancel()
            raise
        return [future.result() for future in futures]

    # ---- work on one member, in a worker or here

    def evaluate_member(
        self,
        index: int,
        member: Member,
        sigma: float,
        name: str,
        indices: np.ndarray,
        trainer_state: Any = None,
        sampling: tuple[int, int] | None = None,
    ) -> Evaluation:
        """Evaluate one member in this process; index: its own, for errors, and the rest as for `evaluate`."""
        started, uniforms = time.process_time(), None
        if sampling is not None:
            key, samples = sampling
            drawn = [noise.uniforms(key, indices, self.max_completion_length, sample) for sample in range(samples)]
            indices, uniforms = np.repeat(indices, samples), np.stack(drawn, 1).reshape(-1, self.max_completion_length)
        with self.weights.member(member.key, sigma, member.sign) as weights:
            ids = self._decode(weights, name, indices, uniforms)
        return self.scored(index, name, indices, self.completions(self.until_end(ids)), trainer_state, started)

    def generate_rows(
        self, name: str, indices: np.ndarray, seed: int = 0, draw: int | None = None, temperature: float = 1.0
    ) -> list:
        """Completions of the weights themselves, (text, ids) each, in this process.

        Args:
            name: which prompts.
            indices: rows of them.
            seed: of the samples.
            draw: which sample of each prompt; None: greedy decoding.
            temperature: of the samples, above 0.
        """
        uniforms = None
        if draw is not None:
            rng = np.random.default_rng(np.random.SeedSequence([seed, draw]))
            uniforms = rng.random((len(self.prompts[name]), self.max_completion_length), dtype=np.float32)[indices]
        return self.completions(self.until_end(self._decode(self.weights.flat, name, indices, uniforms, temperature)))

    def _views(self, weights: np.ndarray | Tensor) -> dict[str, Tensor]:
        """Flat weights as tensors by name: rounded to the model's dtype, in the dtype that the loop multiplies in."""
        flat = torch.as_tensor(weights).to(self.model.dtype).to(product_dtype(self.model.dtype))
        return self.layout.views(flat)

    def _decode(
        self,
        weights: np.ndarray | Tensor,
        name: str,
        indices: np.ndarray,
        uniforms: np.ndarray | None,
        temperature: float = 1.0,
    ):
        """Decode rows of the prompts with the given flat weights; returns (rows, max_completion_length) ids."""
        prompts, rows = self.prompts[name], len(indices)
        if self.decoder == "loop":
            decoder = Decoder(
                self.model.config,
                self._views(weights),
                self.eos_ids,
                self.tokenizer.pad_token_id,
                torch.from_numpy(prompts.prefix),
                self._drop_rows,
            )
        else:
            copy_to(self.model, self.layout, weights)
        out = []
        for start in range(0, rows, self.chunk_rows):
            chunk = np.arange(start, start + self.chunk_rows)
            # a short last chunk is filled up with its last row, so that every product has the planned shape
            chunk = np.minimum(chunk, rows - 1) if rows > self.chunk_rows else np.arange(rows)
            ids, mask = (torch.from_numpy(a[indices[chunk]]) for a in (prompts.ids, prompts.mask))
            u = None if uniforms is None else torch.from_numpy(uniforms[chunk])
            if self.decoder == "loop":
                new = decoder.generate(ids, mask, self.max_completion_length, u, temperature)
            else:
                new = self._transformers_generate(ids, mask, u, temperature)
            out.append(new[: min(self.chunk_rows, rows - start)].numpy())
        return np.concatenate(out)

    @torch.inference_mode()
    def _transformers_generate(self, ids, mask, uniforms, temperature):
        from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

        class _Invert(LogitsProcessor):
            """Sampling by inversion of the distribution function with given numbers, as the loop does."""

            def __call__(self, input_ids, scores):
                scores = scores.float() if temperature == 1 else scores.float() / temperature
                cumulative = scores.softmax(-1).cumsum(-1)
                u = uniforms[:, input_ids.shape[1] - ids.shape[1], None] * cumulative[:, -1:]
                token = (cumulative <= u).sum(-1).clamp_(max=scores.shape[-1] - 1)
                return torch.full_like(scores, -torch.inf).scatter_(1, token[:, None], 0.0)

        settings = GenerationConfig(
            do_sample=False,
            num_beams=1,
            max_new_tokens=self.max_completion_length,
            eos_token_id=self.eos_ids,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        processors = LogitsProcessorList([] if uniforms is None else [_Invert()])
        # generate() fills whatever the settings leave open from the model's own, such as a ban of repeated n-grams
        own, self.model.generation_config = self.model.generation_config, GenerationConfig()
        try:
            new = self.model.generate(
                input_ids=ids, attention_mask=mask, generation_config=settings, logits_processor=processors
            )[:, ids.shape[1] :]
        finally:
            self.model.generation_config = own
        out = torch.full((len(ids), self.max_completion_length), self.tokenizer.pad_token_id)
        out[:, : new.shape[1]] = new
        return out


def check_temperature(temperature: float) -> None:
    """Raise ValueError unless this is a temperature to sample at, a finite number above 0."""
    if not 0 < temperature < np.inf:
        raise ValueError(f"temperature={temperature} must be above 0: greedy decoding is samples=0.")


def default_workers() -> int:
    """One single-thread worker for each core this process may use (1 where processes cannot be forked)."""
    return len(os.sched_getaffinity(0)) if sys.platform.startswith("linux") else 1


_IDS = itertools.count()
# Forked workers find their engine here; nothing is pickled. An engine that nobody uses any more ends with its workers.
_ENGINES: weakref.WeakValueDictionary[int, LocalEngine] = weakref.WeakValueDictionary()


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def start_worker(parent: int) -> None:
    """Set up a worker process: one thread, a lock of its own for progress bars, and it ends with its parent, even with
    one that is killed.

    Args:
        parent: process id of the parent.
    """
    torch.set_num_threads(1)
    # tqdm's lock is a semaphore that forked processes share: one that dies holding it would stop all others for good
    tqdm.set_lock(threading.RLock())

    end_with(parent)


def end_with(process: int) -> None:
    """End this process, within half a second, when another one is gone, even one that was killed.

    Args:
        process: process id, of the parent or of any other process of the user's on this machine.
    """
    if os.getppid() == process:

        def gone() -> bool:
            return os.getppid() != process
    else:  # its id may be given to another process: what is opened stands for this one alone
        try:
            opened = select.poll()
            opened.register(os.pidfd_open(process), select.POLLIN)
        except ProcessLookupError:
            os._exit(1)

        def gone() -> bool:
            return bool(opened.poll(0))

    def watch() -> None:
        while not gone():
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _start_worker(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process: it is the trainer's to handle
    start_worker(parent)


def _evaluate(engine_id: int, *arguments: Any) -> Evaluation:
    return _ENGINES[engine_id].evaluate_member(*arguments)


def _generate(engine_id: int, *arguments: Any) -> list:
    return _ENGINES[engine_id].generate_rows(*arguments)


def score(rewards: Rewards, prompts: Prompts, indices: np.ndarray, completions, trainer_state: Any = None) -> Scored:
    """Score completions of rows of the prompts, in the form (strings or messages) of the prompts themselves."""
    texts = [text for text, _ in completions]
    if prompts.conversational:
        texts = [[{"role": "assistant", "content": text}] for text in texts]
    columns = {key: [values[i] for i in indices] for key, values in prompts.columns.items()}
    chosen = [prompts.prompts[i] for i in indices]
    return rewards(chosen, texts, [raw for _, raw in completions], columns, trainer_state)


def _eos_ids(model, tokenizer) -> list[int]:
    """The end tokens of the model's configurations and of its tokenizer."""
    found: set[int] = set()
    for value in (model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id):
        found |= set() if value is None else {value} if isinstance(value, int) else set(value)
    if not found:
        raise ValueError("neither the model nor the tokenizer declares an end token: set tokenizer.eos_token.")
    return sorted(found)
