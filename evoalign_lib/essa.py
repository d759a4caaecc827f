"""ESSA, Evolution Strategies on singular values: `ESSAConfig` and `ESSATrainer`, with the interface of `ESTrainer`.

A LoRA adapter over a frozen base, normally warm-started by supervised fine-tuning, is decomposed, and CMA-ES searches
for additive changes to its singular values (arXiv 2507.04453). Version 3 of the paper decomposes the two matrices of
every adapted layer separately, A = U_A S_A V_A^T and B = U_B S_B V_B^T; version 1 decomposes their product,
B A = U S V^T. U and V are frozen. One step: CMA-ES draws N candidates delta; each changes the leading share of each
matrix's singular values to S + delta and is scored by its mean reward on a mini-batch, decoding greedily; CMA-ES uses
the ranks of these rewards to update the mean, the covariance and the step size of its distribution.

The search has (adapted matrices) * 2 * floor(rank * leading_share) dimensions; in version 1 there is no factor 2. In
version 3 the singular vectors of A and of B can be weighted independently, so those of the product turn, too. In
version 1 they are fixed, and W changes by sum_i delta_i u_i v_i^T.

Numbered differences from the paper:

1. The model is the adapter at the mean of the search distribution: evaluations, checkpoints and the final model use it.
   The best candidate of a step is best on one mini-batch only, and partly by luck.
2. sigma, the initial standard deviation, is that of version 1, 0.32; version 3 does not state one.
3. A population whose rewards are all tied moves nothing. CMA-ES itself (cma 4.5.0) would rank it by the order of its
   members and move mean, covariance and step size accordingly. In other populations ties are broken by member index,
   which carries no information about the candidates.
4. CMA-ES gets its normals from the noise law (`evoalign_lib.noise`) and maximises. Step sizes are adapted by cumulative
   path length (CSA) in every dimension, whereas cma changes the rule from 300 dimensions on.
5. Singular values may become negative or change their order: the paper mentions no bounds, and none are set.
6. An adapter in the paper's form adds B A to W, so `lora_config` sets lora_alpha = r. With another peft_config its
   scaling multiplies B A as usual, and singular values are taken before scaling.
7. Fine-tuning before the search is part of the run: its tokens, FLOPs and core-seconds are in the budget from the first
   step on. The paper's comparisons leave them out.

The same machine gives the same bits, with any number of workers, after kill -9 and in a replay of the ledger. On
another machine LAPACK may give decompositions that differ in the last digits: replays there check the search's step
size and distance at every step, within 1e-6, and say so; a run can be resumed only on the machine that began it.

Metrics in addition to those of `ESTrainer`: `search/sigma`, the step size before the step, and `search/distance`, the
length of the mean of delta, both in units of singular values; and totals so far, `forward_flops` and `sft_tokens`.
core_seconds and num_tokens include fine-tuning, completions does not.
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
from evoalign_lib.checks import require
from evoalign_lib.config import ESConfig, refused, with_settings
from evoalign_lib.es import ESTrainer
from evoalign_lib.rewards import RewardFunction
from evoalign_lib.update_rules import Member, generator

__all__ = ["ESSAConfig", "ESSATrainer", "fine_tune", "lora_config"]

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
"""the attention projections, which the paper adapts"""
# settings of ES that have no effect on CMA-ES -> why
_SCHEDULES = ("sigma_schedule", "alpha_schedule", "sigma_final_fraction", "alpha_final_fraction")
_OF_ES = dict.fromkeys(_SCHEDULES, "CMA-ES adapts its step size") | {
    "alpha": "CMA-ES adapts its step size (the paper's alpha is leading_share)",
    "antithetic": "CMA-ES draws independent candidates",
    "fitness_shaping": "CMA-ES uses only the ranks of rewards",
    "perturbation": "singular values are perturbed, not weights",
    "rank": "the adapter's rank is r of peft_config, for example lora_config(8)",
    "anchor_decay": "the search starts at the warm-started adapter and has no decay",
    "noise": "CMA-ES draws from normal distributions",
    "precision": "an adapter always has a float32 master, which is small",
}
_FORWARD = 2  # FLOPs per parameter and token
_PASSES = 3  # of a training step: forward once, and backward, which counts twice


@dataclass
class ESSAConfig(ESConfig):
    """Settings of an ESSA run: those of `ESConfig` that apply here, and those below.

    Defaults are those of the paper's version 3 (arXiv 2507.04453v3: rank 8 by `lora_config`, population 96, alpha 1.0,
    batch 100). A setting that has no effect on the search, such as alpha of `ESConfig`, is an error.

    Raises:
        ValueError, TypeError: as for `ESConfig`; the message lists everything that is wrong.
    """

    population_size: int = field(default=96, metadata={"help": "N, candidates per step; at least 4"})
    """N, candidates per step; at least 4 (ESSA v3: 96; its grid is 8 to 400)"""
    sigma: float = field(default=0.32, metadata={"help": "initial standard deviation, in singular values' units"})
    """initial standard deviation of the changes, in units of singular values (ESSA v1: 0.32; v3 states none); CMA-ES
    adapts it from there"""
    prompts_per_step: int | None = field(default=100, metadata={"help": "prompts per candidate; None: all"})
    """prompts in a candidate's mini-batch (ESSA v3: 100); None: the whole training set"""
    shared_batch: bool = field(default=False, metadata={"help": "one mini-batch a step for all candidates"})
    """True: all candidates of a step get the same prompts, those that the members of ES get at that step; False: each
    draws its own, without repetition, as in the paper's algorithm. An epoch has the same number of steps either way"""
    leading_share: float = field(default=1.0, metadata={"help": "of each matrix's singular values that are searched"})
    """alpha of the paper: the share of each matrix's singular values that is searched, from the largest down; the
    number is rounded down (ESSA v3: 1.0; its best runs with rank 32 use 0.1)"""
    arm: str = field(default="essa", metadata={"help": "name that enters the run key"})
    """name of the arm, part of the run key, so that arms never share noise by accident"""

    def _problems(self) -> Iterator[tuple[str, str]]:
        """Yield what is wrong with the settings of the search, and the settings of ES that have no effect on it."""
        for name, why in _OF_ES.items():
            if getattr(self, name) != ESConfig.__dataclass_fields__[name].default:
                yield name, f"{name}={getattr(self, name)!r} has no effect on ESSA: {why}. Remove it."
        if self.engine in ("cuda", "ray"):
            yield "engine", f"engine={self.engine!r} cannot evaluate ESSA candidates: use engine='local' or 'vllm'."
        if not isinstance(self.shared_batch, bool):
            yield "shared_batch", f"shared_batch={self.shared_batch!r} must be True or False."
        yield from super()._problems()
        for name, (check, *bounds) in SETTINGS.items():
            yield from refused(check, name, getattr(self, name), *bounds)


with_settings(ESSAConfig)


def lora_config(rank: int = 8) -> Any:
    """Return the paper's adapter as a `peft.LoraConfig`: W + B A on the attention projections q, k, v and o.

    Args:
        rank: r (ESSA v3: 8; 2 to 32 in its best runs).

    Raises:
        ImportError: PEFT is not installed.
    """
    peft = _adapters.open_peft()
    return peft.LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=rank, target_modules=list(TARGETS))


class ESSATrainer(ESTrainer):
    """Search the singular values of a language model's adapter by CMA-ES, with the interface of `ESTrainer`.

    Args:
        model, reward_funcs, train_dataset, eval_dataset, processing_class, callbacks, reward_processing_classes,
            quantization_config: as for `ESTrainer`.
        args: an `ESSAConfig`.
        peft_config: configuration of a new adapter, a `peft.LoraConfig` of plain layers; None: the model's own adapter,
            or a new one by `lora_config()` if it has none.
        sft_dataset: rows on which to fine-tune the adapter before the search, in a format of TRL's SFTTrainer: with
            "prompt" and "completion", with "messages" or with "text". train() does this when a run begins, or
            `warm_start` earlier; a resumed run and a replay take the fine-tuned adapter from output_dir/start.
        sft_args: a `trl.SFTConfig`; None: 3 epochs at a learning rate of 2e-4, in batches of 8, on the CPU (we do not
            know the paper's settings).

    Raises:
        ValueError: as for `ESTrainer`; a leading_share that leaves no singular value; without sft_dataset, an adapter
            with matrices that are zero, such as B of a new one; trainable parameters other than plain LoRA layers;
            sft_args without sft_dataset.
        TypeError: as for `ESTrainer`; rows of sft_dataset that are not mappings.
        ImportError: PEFT or cma is not installed; the message says how to install it.
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
            raise TypeError(f"args is a {type(args).__name__}: pass an ESSAConfig (see help(ESSAConfig)).")
        self._sft_rows = _rows(sft_dataset)
        self._sft_args = sft_args
        if sft_args is not None:
            from trl import SFTConfig

            if not isinstance(sft_args, SFTConfig):
                raise TypeError(f"sft_args is a {type(sft_args).__name__}: pass a trl.SFTConfig.")
            has_rows = self._sft_rows is not None
            require(has_rows, "sft_args has no effect without sft_dataset: pass rows, or remove it.")
        self.warm_start_cost: dict[str, Any] | None = None
        """cost of fine-tuning before the search: tokens, steps, forward_flops (backward counts twice), core_seconds,
        seconds, device, and completions (0)"""
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

        Raises RuntimeError if the adapter has yet to be fine-tuned.
        """
        if self._sft_rows is not None and self.warm_start_cost is None:
            raise RuntimeError("the adapter is not yet fine-tuned on sft_dataset: call warm_start() first, or train().")
        return self.engine.weights.ask(step)

    def tell(self, members: Sequence[Member], fitness: np.ndarray) -> bool:
        """Move the search distribution according to the ranks of the rewards, and the weights to its mean.

        Args:
            members: the members that the last call of `ask` returned.
            fitness: (N,) reward units.

        Returns:
            Whether the population was tied, so that nothing moved.
        """
        tied = not self.engine.weights.tell(fitness)
        self.counts["tied"] += int(tied)
        return tied

    def _coefficients(self, fitness):
        """Raise ValueError for rewards that cannot be ranked; there are no coefficients."""
        finite = np.isfinite(fitness).all()
        require(finite, f"the rewards {fitness.tolist()!s:.200} are not all finite and cannot be ranked.")

    def _indices(self, step):
        if self._shared_batch:
            return super()._indices(step)
        rng, n = generator(self.args.seed, step, "batches"), len(self.train_prompts)
        return np.stack([rng.permutation(n)[: self.prompts_per_step] for _ in range(self.args.population_size)])

    @property
    def _shared_batch(self) -> bool:
        """Whether the members of a step have the same prompts: by the setting, or because each has all of them."""
        return self.args.shared_batch or self.prompts_per_step == len(self.train_prompts)

    # ---- the warm start

    def warm_start(self) -> dict[str, Any]:
        """Fine-tune the adapter on sft_dataset with TRL's SFTTrainer, and start the search from the result.

        train() calls it if it has not been called. The global random state is left unchanged.

        Returns:
            The cost, `warm_start_cost`.

        Raises:
            ValueError: there is no sft_dataset, or fine-tuning left a matrix of the adapter at zero.
            RuntimeError: the adapter is fine-tuned already, or the run has steps.
        """
        require(self._sft_rows is not None, "warm_start() needs rows to fine-tune on: pass sft_dataset.")
        if self.warm_start_cost is not None or self.ledger is not None or self._parted:
            raise RuntimeError("the search has begun, or the adapter is fine-tuned already: make a new trainer.")
        self.engine.close()  # worker processes would keep the directions of the previous adapter
        self.engine.write_model()
        try:
            cost = self._fine_tune()
        except BaseException:
            self.engine.write_model()  # restore the adapter
            raise
        moved = _adapters.moved(self.model)
        self.engine.weights.begin({name: p.detach().float() for name, p in moved.items()})
        self.engine.weights.check()
        self._account(cost)
        return cost

    def _fine_tune(self) -> dict[str, Any]:
        """Fine-tune the adapter in the model; return the cost."""
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
        """Charge the cost of fine-tuning to the budget."""
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
        self.engine.close()  # worker processes would keep the directions of the previous adapter
        super()._resume(resume_from)
        if self.ledger is not None:
            cost = self.ledger.header.get("warm_start")
            if self.state.global_step:
                self.warm_start_cost = cost  # already in the checkpoint's budget
            else:
                self._account(cost)

    def _catch_up(self, run):
        weights = self.engine.weights
        there = weights.digest()
        for record in run.steps[: self.state.global_step]:  # repeat the search, whose state no file holds
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
        settings |= {"leading_share": self.args.leading_share, "shared_batch": self._shared_batch}
        settings |= {"decomposition": "separate", "cma_options": {}}  # older runs could set them
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
    """Fine-tune a model's adapter in place with TRL's SFTTrainer; the model ends on the CPU, in its own dtypes.

    The global random state is left unchanged.

    Args:
        model: a model with an adapter over a frozen base.
        processing_class: its tokenizer.
        rows: rows in a format of SFTTrainer.
        args: a `trl.SFTConfig`. With disable_tqdm `datasets` shows no progress bars, either; with logging_strategy="no"
            nothing is printed.

    Returns:
        The cost: completions, 0; tokens; steps; forward_flops (backward counts twice); core_seconds; seconds; device.
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
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002, restored below
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
                tuner.remove_callback(PrinterCallback)  # which transformers adds instead of a progress bar
            tuner.train()
    finally:
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002
        if hidden:
            datasets.enable_progress_bars()
        hook.remove()
        for name, parameter in _adapters.moved(model).items():
            parameter.data = parameter.data.to(dtypes[name])  # TRL rounds adapters over quantised bases
        if model.device.type != "cpu":
            model.to("cpu")
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()  # the engine that generates next plans with all of it
        model.eval()
        model.zero_grad(set_to_none=True)
        network.config.use_cache = use_cache
    passes = _PASSES + bool(args.gradient_checkpointing)  # checkpointing repeats the forward pass
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
    """Return the rows to fine-tune on; None: none were given."""
    if dataset is None:
        return None
    rows = list(dataset)
    require(rows, "sft_dataset is empty: pass rows, or leave it out to start from the adapter as it is.")
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):  # iterating over a mapping of splits gives their names
            raise TypeError(f"row {i} of sft_dataset is {row!r:.200}: pass a single split, whose rows are mappings.")
    return [dict(row) for row in rows]


_PLACES = ("output_dir", "logging_dir", "run_name", "report_to", "disable_tqdm", "hub_token")


def _digest(rows: Sequence[Mapping[str, Any]], given: Any) -> str:
    """Return 16 hexadecimal digits that identify the fine-tuning rows and arguments, for the run's settings."""
    how = {} if given is None else {k: v for k, v in given.to_dict().items() if k not in _PLACES}
    return hashlib.sha256(json.dumps([rows, how], sort_keys=True, default=str).encode()).hexdigest()[:16]
