"""Generate for a population on this machine's CPU cores, with members in parallel worker processes.

The workers share the float32 master in memory. A worker writes a member's weights from the master into its own working
copy (one pass; the master is only read), decodes the prompts, scores the completions and sends back rewards; no weights
are sent. Workers are forked, so reward functions need not be picklable, and use one torch thread each: two threads on
two shared cores are many times slower than two processes. A reward function with the methods of a state
(`evoalign_lib.rewards`) has the run's state in every worker; anything else that it keeps is separate in each worker.
(The precision modes without a master keep one replica of the weights, which one process perturbs and restores.)

A member's completions are decoded in chunks of a fixed number of rows and a fixed prompt width (the batch plan).
Low-rank members with few prompts share a chunk, as many as fit, each as factors applied beside the master
(`evoalign_lib.low_rank`). Floating-point results depend on that plan alone, not on the number of workers.
"""

import itertools
import logging
import sys
import time
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evoalign_lib import noise
from evoalign_lib._adapters import dense, is_adapted, not_dense, quantisation_of
from evoalign_lib._forks import Forks
from evoalign_lib.checks import choose, require
from evoalign_lib.engines import agreement
from evoalign_lib.engines.base import Engine, Options, Prompts
from evoalign_lib.engines.decode import Decoder, Draw, greedy, inversion, product_dtype, rows_are_exact, supports
from evoalign_lib.engines.processes import one_thread
from evoalign_lib.low_rank import Population
from evoalign_lib.precision import copy_to

__all__ = ["DECODERS", "LocalEngine", "Prompts"]


logger = logging.getLogger(__name__)
DECODERS = ("auto", "loop", "generate")
LEAST_MEMBERS = 4
"""low-rank members that must fit into a chunk; with less room each is decoded alone, with full matrices"""


class LocalEngine(Engine):
    """Engine on CPU cores, with transformers or our decoding loop.

    Args:
        model: a Hugging Face decoder-only model; its parameters become the master at the start (if some are frozen, the
            ones with requires_grad). For a plain LoRA adapter over a float32 base the loop decodes with
            W + scaling * B A; likewise over a base made by `quantisation.quantise`, where W holds the dequantised
            weights. With any other adapter or base, transformers decodes.
        tokenizer: its tokenizer, with a padding token.
        rewards: scores completions, in the workers.
        prompts: name -> prompts (for example "train" and "eval").
        chunk_rows: rows decoded at once.
        workers: number of processes; 1: only this process.
        decoder: "loop" (our loop), "generate" (transformers), or "auto": the loop if it covers the model (a warning
            says if only its logits show that it does not; see `agreement`) and there are no generation_kwargs.
        **common: max_completion_length and further arguments of `Engine` except threads.

    Raises:
        ValueError: a decoder that is unknown or does not cover the model, a model of transformers that padding changes
            and prompts of unlike length, workers or chunk_rows below 1, several workers without a master, or what
            `Engine` raises.
    """

    def __init__(self, model, tokenizer, rewards, prompts, *, chunk_rows=256, workers=1, decoder="auto", **common: Any):
        if workers < 1 or chunk_rows < 1:
            raise ValueError(f"workers and chunk_rows must be at least 1, got {workers} and {chunk_rows}.")
        choose("decoder", decoder, DECODERS)
        if workers > 1 and not sys.platform.startswith("linux"):
            raise ValueError(f"workers={workers} needs Linux, as workers are forked. Set workers=1 on {sys.platform}.")
        precision = common.get("precision", "master")
        what = f"precision={precision!r} keeps a single replica of the weights, which members use in turn"
        alone = workers == 1 or precision == "master"
        require(alone, f"workers={workers} needs precision='master': {what}. Set workers=1.")
        super().__init__(model, tokenizer, rewards, prompts, threads=workers, **common)
        self.chunk_rows, self.workers = chunk_rows, workers
        self._pool: Forks | None = None
        self._whole = len(self.layout.entries) == len(list(model.parameters()))
        reason, first = _why_no_loop(model, self.options), prompts.get("train") or next(iter(prompts.values()), None)
        if first and not reason and decoder != "generate":
            with one_thread():
                reason = agreement.loop_differs(model, first, tokenizer.pad_token_id, self.max_completion_length)
            if reason and decoder == "auto":
                lost = "A saved model does what its class does: hooks, and what else was set by hand, are not saved"
                logger.warning("transformers decodes, as the loop does not cover this model: %s. %s.", reason, lost)
        if decoder == "loop" and reason:
            raise ValueError(f"decoder='loop' does not cover this model: {reason}. Use decoder='generate'.")
        self.decoder = "generate" if decoder == "generate" or reason else "loop"
        for each in prompts.values():
            self._check_padding(each)
        self._dequantised = self.decoder == "loop" and quantisation_of(model) is not None
        with one_thread():
            loop = self.decoder == "loop"
            self._drop_rows = loop and rows_are_exact(model.config, self._views(self.weights.flat), chunk_rows)
        # with a rounded working copy, unrounded factors would be different members
        self._joins = self.weights.rank > 0 and loop and not is_adapted(model) and model.dtype == torch.float32

    # ---- called by the trainer

    @property
    def plan(self) -> dict[str, Any]:
        """The batch plan of training; floating-point results depend on it.

        drop_rows is false if this CPU computes a row's products differently in smaller batches: batches then stay full.
        """
        prompts = self.prompts["train"]
        plan = {"decoder": self.decoder, "chunk_rows": self.chunk_rows, "width": prompts.width}
        if self.decoder == "loop":
            products = str(product_dtype(self.model.dtype)).removeprefix("torch.")
            plan |= {"prefix": len(prompts.prefix), "products": products, "drop_rows": self._drop_rows}
            plan |= {"weights": "dequantised"} if self._dequantised else {}
        return plan | ({"least_members": LEAST_MEMBERS} if self._joins else {})

    def evaluate(self, members, sigma, name, indices, trainer_state=None, sampling=None):
        rows, rest = np.shape(indices)[-1], (trainer_state, sampling)
        n = self.chunk_rows // (rows * (sampling[1] if sampling else 1))
        if not self._joins or n < LEAST_MEMBERS or np.ndim(indices) > 1:
            each = np.broadcast_to(indices, (len(members), rows))
            return self._run([("evaluate_member", i, m, sigma, name, each[i], *rest) for i, m in enumerate(members)])
        parts = [(i, members[i : i + n], n, sigma, name, indices, *rest) for i in range(0, len(members), n)]
        return list(itertools.chain(*self._run([("evaluate_together", *part) for part in parts])))

    def _at_once(self, rows):
        return self.chunk_rows

    def _generate(self, parts):
        return self._run([("generate_rows", *part) for part in parts])

    def put_prompts(self, name, prompts):
        super().put_prompts(name, prompts)
        self._check_padding(prompts)
        self.close()

    def _check_padding(self, prompts: Prompts) -> None:
        """Raise ValueError for prompts that are padded if transformers decodes, and the model ignores the mask."""
        if self.decoder == "generate" and not prompts.mask.all():
            pad, new = self.tokenizer.pad_token_id, self.max_completion_length
            with one_thread():
                agreement.check_padding(self.model, prompts.ids, prompts.mask, pad, new)

    def close(self, at_once: bool = False) -> None:
        """End the worker processes, killing them if `at_once`; the next call starts new ones."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.end(at_once)

    # ---- processes

    def _run(self, tasks: list[tuple]) -> list:
        """Call methods in the workers, (name, arguments ...) each, and return their results."""
        if self.workers == 1 or len(tasks) == 1:
            with one_thread():  # as in the workers: several threads may split products differently
                return [getattr(self, method)(*arguments) for method, *arguments in tasks]
        if self._pool is None:
            self._pool = Forks(self.workers, self, watch=True)
        try:
            futures = [self._pool.submit(*task) for task in tasks]
            for future in as_completed(futures):
                future.result()  # raises the first failure of any worker at once
        except BrokenProcessPool as error:
            pool, self._pool = self._pool, None
            if pool.stuck:
                what = f"a reward function ({', '.join(self.rewards.names)}) waits for ever in a worker process"
                raise RuntimeError(f"{what}: {pool.why}. Start them in the function, or set workers=1.") from error
            raise RuntimeError(
                "a worker process ended unexpectedly (killed, or out of memory). Every recorded step is in the ledger: "
                "call train(resume_from_checkpoint=True), with fewer workers if memory ran out."
            ) from error
        except BaseException:  # without waiting for reward functions that still run in the workers
            self.close(at_once=True)
            raise
        return [future.result() for future in futures]

    # ---- evaluating members, in a worker or in this process

    def evaluate_together(self, first, members, together, sigma, name, indices, trainer_state=None, sampling=None):
        """Evaluate low-rank members in one batch, in this process.

        Args:
            first: index of the first member, for errors.
            members: at most `together` members.
            together: members per batch; if there are fewer, the last one's rows are repeated to fill the batch.
            sigma, name, indices, trainer_state, sampling: as for `evaluate`, like the result.
        """
        started = time.process_time()
        indices, uniforms = self._drawn(indices, sampling)
        rows, weights = len(indices), self.weights
        population = Population(self.master, self.layout, members, sigma, weights.distribution, weights.rank)
        owners = np.repeat(np.minimum(np.arange(together), len(members) - 1), rows)
        uniforms = None if uniforms is None else np.tile(uniforms, (together, 1))
        decoder = self._decoder(weights.flat, name, population)
        ids = self._chunk(decoder, name, np.tile(indices, together), uniforms, self.options.temperature, owners)
        evaluations = []
        for i, own in enumerate(np.split(ids.numpy()[: rows * len(members)], len(members))):
            completions = self.completions(self.until_end(own))
            evaluations.append(self.scored(first + i, name, indices, completions, trainer_state, started))
        seconds = (time.process_time() - started) / len(members)
        return [replace(each, core_seconds=seconds + each.scored.seconds) for each in evaluations]

    def _numbers(self, key, rows, sample):
        return noise.uniforms(key, rows, self.max_completion_length, sample)

    def _seeded(self, name, rows, seed, draw):
        rng = np.random.default_rng(np.random.SeedSequence([seed, draw]))
        return rng.random((len(self.prompts[name]), self.max_completion_length), dtype=np.float32)[rows]

    # ---- decoding

    def _decode(self, name, rows, numbers, temperature, member=None):
        """Decode in chunks; see `Decoding._decode`."""
        with self._weights_of(member) as weights:
            decoder = self._decoder(weights, name) if self.decoder == "loop" else None
            if decoder is None:
                copy_to(self.model, self.layout, weights)
            out = []
            for start in range(0, len(rows), self.chunk_rows):
                # a short last chunk is padded with its last row, so that every product has the planned shape
                size = self.chunk_rows if len(rows) > self.chunk_rows else len(rows)
                chunk = np.minimum(np.arange(start, start + size), len(rows) - 1)
                new = self._chunk(decoder, name, rows[chunk], None if numbers is None else numbers[chunk], temperature)
                out.append(new[: len(rows) - start].numpy())
        return self.completions(self.until_end(np.concatenate(out)))

    def _views(self, weights: np.ndarray | Tensor) -> dict[str, Tensor]:
        """Return all weights by name, rounded to the model's dtype, in the dtype that the loop multiplies in."""
        dtype = product_dtype(self.model.dtype)
        if self._whole:
            return self.layout.views(torch.as_tensor(weights).to(self.model.dtype).to(dtype))
        copy_to(self.model, self.layout, weights)
        return {name: t.to(self.model.dtype).to(dtype) for name, t in dense(self.model).items()}

    def _decoder(self, weights: np.ndarray | Tensor, name: str, population: Population | None = None) -> Decoder:
        views, prefix = self._views(weights), torch.from_numpy(self.prompts[name].prefix)
        pad, drop = self.tokenizer.pad_token_id, self._drop_rows
        return Decoder(self.model.config, views, self.eos_ids, pad, prefix, drop, population)

    def _chunk(self, decoder: Decoder | None, name, indices, uniforms, temperature, owners=None) -> Tensor:
        """Decode one batch of prompts, with transformers if there is no decoder."""
        prompts, options = self.prompts[name], self.options
        ids, mask = (torch.from_numpy(a[indices]) for a in (prompts.ids, prompts.mask))
        draw = greedy
        if uniforms is not None:
            draw = inversion(torch.from_numpy(uniforms), temperature, options.top_k, options.top_p)
        if decoder is None:
            return self._transformers_generate(ids, mask, draw)
        stopped = self.just_stopped if options.stop_strings else None
        return decoder.generate(ids, mask, self.max_completion_length, draw, stopped, owners)

    def _transformers_generate(self, ids: Tensor, mask: Tensor, draw: Draw) -> Tensor:
        options, width, most = self.options, ids.shape[1], self.max_completion_length

        def stop(input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
            """End rows at a stop string in their completion; stop strings in the prompt do not count."""
            return torch.tensor(self.just_stopped(input_ids[:, width:].tolist()), device=input_ids.device)

        given, pad = options.generation_kwargs or {}, self.tokenizer.pad_token_id
        how = None if draw is greedy else draw, stop if options.stop_strings else None
        ends = {"eos_token_id": self.eos_ids, "pad_token_id": pad}
        new = agreement.by_transformers(self.model, ids, mask, most, *how, **ends, **given)
        return torch.nn.functional.pad(new, (0, most - new.shape[1]), value=pad)


def _why_no_loop(model: Any, options: Options) -> str | None:
    """Return why the loop cannot decode this model; None if it can."""
    if reason := supports(model.config) or not_dense(model):
        return reason
    if model.dtype not in (torch.float32, torch.bfloat16):
        return f"its dtype is {model.dtype}, the loop computes float32 and bfloat16 models"
    return "generation_kwargs are for transformers" if options.generation_kwargs else None
