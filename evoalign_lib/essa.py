"""ESSA, Evolution Strategies on singular values: `ESSAConfig` and `ESSATrainer`, with the surface of `ESTrainer`.

A LoRA adapter over a frozen base, normally warm-started by supervised fine-tuning, is decomposed, and CMA-ES searches
additive changes to its singular values (arXiv 2507.04453). Version 3 of the paper decomposes the two matrices of every
adapted layer separately, A = U_A S_A V_A^T and B = U_B S_B V_B^T; version 1 speaks of the decomposition of their
product, B A = U S V^T. U and V are frozen. One step: CMA-ES draws N candidates delta; each changes the leading share of
each matrix's singular values, S + delta, and is scored by its mean reward on a mini-batch, decoding greedily; CMA-ES
moves the mean, the covariance and the step size of its distribution by the ranks of these rewards.

The dimension of the search is (adapted matrices) * 2 * floor(rank * leading_share); in version 1 there is no factor 2.
In version 3 singular vectors of A and of B can be weighted independently: the product's singular vectors turn, too. In
version 1 they stay, and W changes by sum_i delta_i u_i v_i^T.

Numbered differences from the paper:

1. The adapter at the mean of the search distribution is the model: evaluations, checkpoints and the end of a run have
   it. The best candidate of a step is that of a mini-batch, and partly luck.
2. sigma, the initial standard deviation, is that of version 1, 0.32; version 3 names none.
3. A population whose rewards are all tied moves nothing. CMA-ES itself (cma 4.5.0) would rank it by the order of its
   members and move mean, covariance and step size by that. Ties among others are ordered by member index, which says
   nothing about candidates.
4. CMA-ES gets its normals from the noise law (`evoalign_lib.noise`) and maximises. Step sizes are adapted by cumulative
   path length (CSA) in every dimension, where cma changes the rule from 300 dimensions on.
5. Singular values may become negative or change their order: the paper says nothing of bounds, and none is set.
6. Version 1's text decomposes the product and then updates two sets of values. decomposition="product" updates the one
   set that there is. It moves B and keeps A: B + sum_i delta_i u_i (u_i^T B / s_i).
7. An adapter of the paper's form adds B A to W, so `lora_config` sets lora_alpha = r. With another peft_config its
   scaling multiplies B A as always, and singular values are those before it.
8. Fine-tuning before the search is part of the run: its tokens, FLOPs and core-seconds are in the budget from the
   first step on. The paper's comparisons leave it out.

The same machine gives the same bits, with any number of workers, after kill -9 and in a replay of the ledger. On
another machine LAPACK may decompose matrices to other last digits: replays there check the search's step size and
distance at every step, within 1e-6, and say so; a run is resumed on the machine that began it.

Metrics beside those of `ESTrainer`: `search/sigma`, the step size before the step, and `search/distance`, the length of
the mean of delta, both in units of singular values; `forward_flops` and `sft_tokens` so far. core_seconds and
num_tokens have what fine-tuning took, completions has none of it.
"""

import copy
import hashlib
import json
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PrinterCallback

from evoalign_lib import _adapters, ledger, precision
from evoalign_lib._singular import SEARCH, SETTINGS, SingularWeights, machine
from evoalign_lib.config import ESConfig, refused, with_settings
from evoalign_lib.es import ESTrainer
from evoalign_lib.rewards import RewardFunction
from evoalign_lib.update_rules import Member, generator

__all__ = ["ESSAConfig", "ESSATrainer", "fine_tune", "lora_config"]

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
"""the attention projections, which the paper adapts"""
# settings of ES that CMA-ES has no use for -> why
_SCHEDULES = ("sigma_schedule", "alpha_schedule", "sigma_final_fraction", "alpha_final_fraction")
_OF_ES = dict.fromkeys(_SCHEDULES, "CMA-ES adapts its step size") | {
    "alpha": "CMA-ES adapts its step size (the paper's alpha is leading_share)",
    "antithetic": "CMA-ES draws candidates that are independent",
    "fitness_shaping": "CMA-ES knows the ranks of rewards alone",
    "perturbation": "singular values are perturbed, not weights",
    "rank": "the rank of the adapter is r of peft_config, for example lora_config(8)",
    "anchor_decay": "the search begins at the warm-started adapter and has no decay",
    "noise": "CMA-ES draws from normal distributions",
    "precision": "an adapter's master is small",
}
_FORWARD = 2  # FLOPs per parameter and token
_PASSES = 3  # of training: forward, and backward, which counts twice


@dataclass
class ESSAConfig(ESConfig):
    """Settings of an ESSA run: those of `ESConfig` that act here, and those below.

    Defaults are those of the paper's version 3 (arXiv 2507.04453v3: rank 8 by `lora_config`, population 96, alpha 1.0,
    batch 100). A setting that has no effect on the search, such as alpha of `ESConfig`, is an error.

    Raises:
        ValueError, TypeError: as `ESConfig`; the message names all that is wrong.
    """

    population_size: int = field(default=96, metadata={"help": "N, candidates per step; at least 4"})
    """N, candidates per step; at least 4 (ESSA v3: 96; its grid is 8 to 400)"""
    sigma: float = field(default=0.32, metadata={"help": "initial standard deviation, in singular values' units"})
    """initial standard deviation of the changes, in units of singular values (ESSA v1: 0.32; v3 names none); CMA-ES
    adapts it from there"""
    prompts_per_step: int | None = field(default=100, metadata={"help": "prompts per candidate; None: all"})
    """prompts of a candidate's mini-batch (ESSA v3: 100); None: the whole training set"""
    shared_batch: bool = field(default=False, metadata={"help": "one mini-batch a step for all candidates"})
    """whether all candidates of a step have the same prompts, those that members of ES have at that step; False: each
    draws its own, without repetition, as the paper's algorithm says. An epoch counts as many steps either way"""
    leading_share: float = field(default=1.0, metadata={"help": "of each matrix's singular values that are searched"})
    """alpha of the paper: the share of each matrix's singular values, the largest ones, that is searched, rounded down
    (ESSA v3: 1.0; best runs with rank 32 have 0.1)"""
    decomposition: str = field(default="separate", metadata={"help": "separate (v3) or product (v1)"})
    """"separate": singular values of A and of B (ESSA v3); "product": those of B A (ESSA v1)"""
    arm: str = field(default="essa", metadata={"help": "name that enters the run key"})
    """name of the arm, part of the run key: arms never share noise by accident"""

    def _problems(self) -> Iterator[tuple[str, str]]:
        """Yield what is wrong with the settings of the search, and those of ES that it has no use for."""
        for name, why in _OF_ES.items():
            if getattr(self, name) != ESConfig.__dataclass_fields__[name].default:
                yield name, f"{name}={getattr(self, name)!r} has no effect on ESSA: {why}. Remove it."
        if self.engine == "ray":
            yield "engine", "engine='ray' does not evaluate candidates of ESSA: use engine='local' or 'vllm'."
        if not isinstance(self.shared_batch, bool):
            yield "shared_batch", f"shared_batch={self.shared_batch!r} must be True or False."
        yield from super()._problems()
        for name, (check, *bounds) in SETTINGS.items():
            yield from refused(check, name, getattr(self, name), *bounds)


with_settings(ESSAConfig)


def lora_config(rank: int = 8) -> Any:
    """Return the adapter of the paper as a `peft.LoraConfig`: W + B A on the attention projections q, k, v and o.

    Args:
        rank: r (ESSA v3: 8; 2 to 32 in its best runs).

    Raises:
        ImportError: PEFT is not installed.
    """
    peft = _adapters.open_peft()
    return peft.LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=rank, target_modules=list(TARGETS))


class ESSATrainer(ESTrainer):
    """Search the singular values of a language model's adapter by CMA-ES, where `ESTrainer` or `GRPOTrainer` stood.

    Args:
        model, reward_funcs, train_dataset, eval_dataset, processing_class, callbacks, reward_processing_classes,
            quantization_config: of `ESTrainer`.
        args: an `ESSAConfig`.
        peft_config: of a new adapter, a `peft.LoraConfig` of plain layers; None: that of the model, or `lora_config()`
            where it has none.
        sft_dataset: rows on which the adapter is fine-tuned before the search, in a form of TRL's SFTTrainer: with
            "prompt" and "completion", with "messages" or with "text". train() does it when a run begins, and
            `warm_start` before that; a resumed run and a replay take the fine-tuned adapter from output_dir/start.
        sft_args: a `trl.SFTConfig`; None: 3 epochs at a learning rate of 2e-4, in batches of 8, on the CPU (the paper's
            settings are not known to us).

    Raises:
        ValueError: as `ESTrainer`; a leading_share that leaves no singular value; an adapter with matrices that are
            zero, as a new one's B is, without sft_dataset; more than plain LoRA layers to be trained; sft_args without
            sft_dataset.
        TypeError: as `ESTrainer`; rows of sft_dataset that are no mappings.
        ImportError: PEFT or cma is not installed; the message says how.
    """

    args: ESSAConfig

    def __init__(
        self,
        model: Any,
        reward_funcs: RewardFunction | Sequence[RewardFunction],
        args: ESSAConfig | None = None,
        *others: Any,
        sft_dataset: Iterable[Mapping[str, Any]] | None = None,
        sft_args: Any = None,
        **named: Any,
    ):
        if not isinstance(args, ESSAConfig | None):
            raise TypeError(f"args is a {type(args).__name__}: give an ESSAConfig (see help(ESSAConfig)).")
        self._sft_rows = _rows(sft_dataset)
        self._sft_args = sft_args
        if sft_args is not None:
            from trl import SFTConfig

            if not isinstance(sft_args, SFTConfig):
                raise TypeError(f"sft_args is a {type(sft_args).__name__}: give a trl.SFTConfig.")
            if self._sft_rows is None:
                raise ValueError("sft_args has no effect without sft_dataset: give rows, or remove it.")
        self.warm_start_cost: dict[str, Any] | None = None
        """what fine-tuning before the search took: tokens, steps, forward_flops (backward counts twice), core_seconds,
        seconds, device, and completions, 0"""
        super().__init__(model, reward_funcs, ESSAConfig() if args is None else args, *others, **named)
        self._parameters = sum(p.numel() for p in self.model.parameters())
        self.budget |= {"sft_tokens": 0, "forward_flops": 0}

    # ---- what differs from ES

    def _attach(self, peft_config):
        if peft_config is None and not _adapters.is_adapted(self.model):
            peft_config = lora_config()
        super()._attach(peft_config)

    def _weights(self) -> SingularWeights:
        weights = SingularWeights(self.model, precision.layout_of(self.model), self.run_key, vars(self.args))
        if self._sft_rows is None:
            weights.check()
        return weights

    def ask(self, step: int) -> list[Member]:
        """Return the members of a step: N keys of the noise law, from whose normals CMA-ES makes the candidates.

        Raises RuntimeError where the adapter is still to be fine-tuned.
        """
        if self._sft_rows is not None and self.warm_start_cost is None:
            raise RuntimeError("the adapter is not fine-tuned on sft_dataset yet: call warm_start() first, or train().")
        return self.engine.weights.ask(step)

    def tell(self, members: Sequence[Member], fitness: np.ndarray) -> bool:
        """Move the search distribution by the ranks of rewards, and the weights to its mean.

        Args:
            members: of `ask`, which was called last.
            fitness: (N,) reward units.

        Returns:
            Whether the population was tied, so that nothing moved.
        """
        tied = not self.engine.weights.tell(fitness)
        self.counts["tied"] += int(tied)
        return tied

    def _coefficients(self, fitness):
        """Raise ValueError for rewards that have no ranks; there are no coefficients."""
        if not np.isfinite(fitness).all():
            raise ValueError(f"the rewards {fitness.tolist()!s:.200} are not all finite: they have no ranks.")

    def _indices(self, step):
        if self._shared_batch:
            return super()._indices(step)
        rng, n = generator(self.args.seed, step, "batches"), len(self.train_prompts)
        return np.stack([rng.permutation(n)[: self.prompts_per_step] for _ in range(self.args.population_size)])

    @property
    def _shared_batch(self) -> bool:
        """Whether the members of a step have the same prompts: as set, or because each has all."""
        return self.args.shared_batch or self.prompts_per_step == len(self.train_prompts)

    # ---- the warm start

    def warm_start(self) -> dict[str, Any]:
        """Fine-tune the adapter on sft_dataset by TRL's SFTTrainer, and let the search begin there.

        train() does it unless it was done. The global random state is left alone.

        Returns:
            Its cost, `warm_start_cost`.

        Raises:
            ValueError: there is no sft_dataset, or fine-tuning left a matrix of the adapter zero.
            RuntimeError: it was done, or the run has steps.
        """
        if self._sft_rows is None:
            raise ValueError("warm_start() needs rows to fine-tune on: give sft_dataset.")
        if self.warm_start_cost is not None or self.ledger is not None or self._parted:
            raise RuntimeError("the search has begun, or the adapter is fine-tuned already: make a new trainer.")
        self.engine.close()  # worker processes would go on with the directions of another adapter
        self.engine.write_model()
        try:
            cost = self._fine_tune()
        except BaseException:
            self.engine.write_model()  # as if nothing had happened
            raise
        moved = _adapters.moved(self.model)
        self.engine.weights.begin({name: p.detach().float() for name, p in moved.items()})
        self.engine.weights.check()
        self._account(cost)
        return cost

    def _fine_tune(self) -> dict[str, Any]:
        """Fine-tune the adapter in the model; return what it took."""
        from trl import SFTConfig

        given = self._sft_args
        if given is None:
            folder, quiet = str(Path(self.args.output_dir) / "sft"), self.args.disable_tqdm
            usual = {"learning_rate": 2e-4, "num_train_epochs": 3, "per_device_train_batch_size": 8}
            usual |= {"gradient_checkpointing": False, "bf16": False, "use_cpu": True, "save_strategy": "no"}
            usual |= {"logging_strategy": "no", "report_to": "none", "disable_tqdm": quiet}
            given = SFTConfig(output_dir=folder, seed=self.args.seed, **usual)
        return fine_tune(self.model, self.processing_class, self._sft_rows, given)

    def _account(self, cost: dict[str, Any] | None) -> None:
        """Let the budget begin with what fine-tuning took."""
        self.warm_start_cost = cost
        if cost is not None:
            self.budget["sft_tokens"] = cost["tokens"]
            self.budget["forward_flops"] += cost["forward_flops"]
            self.budget["core_seconds"] += cost["core_seconds"]

    # ---- the run

    def _begin(self):
        if self._sft_rows is not None and self.warm_start_cost is None:
            self.warm_start()

    def _resume(self, resume_from):
        self.engine.close()  # worker processes would go on with the directions of another adapter
        super()._resume(resume_from)
        if self.ledger is not None:
            cost = self.ledger.header.get("warm_start")
            if self.state.global_step:
                self.warm_start_cost = cost  # the checkpoint's budget has it
            else:
                self._account(cost)

    def _catch_up(self, run):
        weights = self.engine.weights
        there = weights.digest()
        for record in run.steps[: self.state.global_step]:  # the search, of which no file has the state
            weights.ask(record.step)
            weights.tell(record.rewards)
        if weights.digest() != there:
            what = f"{str(run.path)!r} does not lead to the checkpoint after step {self.state.global_step}"
            raise ledger.LedgerError(f"{what}: remove the checkpoint to resume from the ledger.")

    def _header(self, digest):
        cost = self.warm_start_cost
        return super()._header(digest) | ({"warm_start": cost} if cost is not None else {})

    def _settings(self):
        settings = {name: value for name, value in super()._settings().items() if name not in _OF_ES}
        settings |= {"search": SEARCH, "dimension": self.engine.weights.dimension, "machine": machine()}
        settings |= {"leading_share": self.args.leading_share, "decomposition": self.args.decomposition}
        settings |= {"cma_options": {}, "shared_batch": self._shared_batch}  # there were options of cma once
        return settings | ({} if self._sft_rows is None else {"sft": _digest(self._sft_rows, self._sft_args)})

    def _count(self, record):
        before = self.budget["prompt_tokens"] + self.budget["generated_tokens"]
        super()._count(record)
        tokens = self.budget["prompt_tokens"] + self.budget["generated_tokens"] - before
        self.budget["forward_flops"] += _FORWARD * self._parameters * tokens

    def _metrics(self, record, tied, seconds):
        metrics = super()._metrics(record, tied, seconds)
        spent = {name: self.budget[name] for name in ("sft_tokens", "forward_flops")}
        return metrics | spent | {"num_tokens": metrics["num_tokens"] + spent["sft_tokens"]}


def fine_tune(model: Any, processing_class: Any, rows: Sequence[Mapping[str, Any]], args: Any) -> dict[str, Any]:
    """Fine-tune a model's adapter by TRL's SFTTrainer, in place, and leave the model on the CPU, in its own dtypes.

    The global random state is left alone.

    Args:
        model: a model with an adapter over a frozen base.
        processing_class: its tokenizer.
        rows: in a form of SFTTrainer.
        args: a `trl.SFTConfig`. With disable_tqdm `datasets` shows no bars, either; with logging_strategy="no" nothing
            is printed.

    Returns:
        What it took: completions, 0; tokens; steps; forward_flops (backward counts twice); core_seconds; seconds;
        device.
    """
    import datasets
    from trl import SFTTrainer

    tokens, network = 0, _adapters.base_of(model)
    dtypes, use_cache = {name: p.dtype for name, p in _adapters.moved(model).items()}, network.config.use_cache

    def count(module: Any, positional: Any, named: Mapping[str, Any]) -> None:
        nonlocal tokens
        mask = named.get("attention_mask")
        tokens += int(named["input_ids"].numel() if mask is None else mask.sum())

    started, cpu = time.perf_counter(), time.process_time()
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002, kept as it is
    hidden = args.disable_tqdm and not datasets.are_progress_bars_disabled()
    if hidden:
        datasets.disable_progress_bars()
    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        with torch.random.fork_rng():
            dataset = datasets.Dataset.from_list([dict(row) for row in rows])
            tokenizer = copy.deepcopy(processing_class)
            tuner = SFTTrainer(model, args, train_dataset=dataset, processing_class=tokenizer)
            if args.logging_strategy == "no":
                tuner.remove_callback(PrinterCallback)  # which stands where a bar would
            tuner.train()
    finally:
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002
        if hidden:
            datasets.enable_progress_bars()
        hook.remove()
        for name, parameter in _adapters.moved(model).items():
            parameter.data = parameter.data.to(dtypes[name])  # TRL rounds adapters of quantised bases
        if model.device.type != "cpu":
            model.to("cpu")
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()  # whoever generates next has a plan for all of it
        model.eval()
        model.zero_grad(set_to_none=True)
        network.config.use_cache = use_cache
    passes = _PASSES + bool(args.gradient_checkpointing)  # which goes forward once more
    return {
        "completions": 0,
        "tokens": tokens,
        "steps": tuner.state.global_step,
        "forward_flops": _FORWARD * passes * sum(p.numel() for p in model.parameters()) * tokens,
        "core_seconds": round(time.process_time() - cpu, 3),
        "seconds": round(time.perf_counter() - started, 3),
        "device": str(args.device.type),
    }


def _rows(dataset: Iterable[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return the rows to fine-tune on; None: none are given."""
    if dataset is None:
        return None
    rows = list(dataset)
    if not rows:
        raise ValueError("sft_dataset is empty: give rows, or leave it out to search from the adapter as it is.")
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):  # of a mapping of splits, the name of one
            raise TypeError(f"row {i} of sft_dataset is {row!r:.200}: give one split, of mappings with 'prompt'.")
    return [dict(row) for row in rows]


_PLACES = ("output_dir", "logging_dir", "run_name", "report_to", "disable_tqdm", "hub_token")


def _digest(rows: Sequence[Mapping[str, Any]], given: Any) -> str:
    """Return 16 hexadecimal digits of what the adapter is fine-tuned on, and how, for the settings of the run."""
    how = {} if given is None else {k: v for k, v in given.to_dict().items() if k not in _PLACES}
    return hashlib.sha256(json.dumps([rows, how], sort_keys=True, default=str).encode()).hexdigest()[:16]
