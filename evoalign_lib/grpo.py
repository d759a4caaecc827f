"""The gradient arms: GRPO, Dr.GRPO, DAPO and RLOO from TRL 1.16, and fine-tuning on filtered samples, set up for a fair
comparison with ES.

There is no training loop here: `config` states every setting of TRL that changes the mathematics, and `trainer` gives
TRL's trainer the same reward wrapper as ES (`evoalign_lib.rewards`, which treats None, NaN and exceptions alike) and a
budget that counts the same quantities (`_grpo_callbacks.Budget`). TRL's defaults change between versions (loss_type,
scale_rewards, beta and the bias correction of the KL did), so none is relied upon.

Common to all arms: float32 weights, gradients, optimiser moments and generation (like the master weights of ES); AdamW
without weight decay at a constant learning rate (except for 16 and 17), gradient norm clipped at 1; sampling from the
model's own distribution (temperature 1; no top-k, top-p, min-p or repetition penalty); one batch of
prompts_per_step * num_generations completions per step and one update from it, so that samples are on-policy, the
importance ratio is 1 and its clip inactive; prompts in the order of the data set.

Where `grpo` departs from DeepSeekMath (Shao et al., arXiv 2402.03300, section 4.1):

1. beta is a setting (the paper: 0.04); at 0 there is no reference model. The reference is the starting model
   throughout; the paper's iterative variant replaces it from time to time.
2. One update per batch, as in the paper's own runs; the algorithm box allows several.
3. Advantages are (r - mean) / (std + 1e-4) with the unbiased standard deviation of the group.
4. The KL penalty is k3 per token, as in the paper: its value is unbiased, but its gradient as a loss is not the
   gradient of the KL (`evoalign_lib.analysis.kl`). TRL's correction (`use_bias_correction_kl`) is off.
5. Outcome rewards only.
6. The reference has the weights from which the run starts. (TRL would load it again by the model's name, which gives
   a different model if the weights were changed in memory.)

Where `dr_grpo` departs from Dr.GRPO (Liu et al., arXiv 2503.20783):

7. The loss is the sum over tokens / (completions * max_completion_length), the constant in that paper's code.
8. One update per batch, and beta 0 unless set, as in 2. `scale_rewards` can be set independently of the loss, for a
   factorial design.

Where `dapo` departs from DAPO (Yu et al., arXiv 2503.14476):

9. Only the token-level loss and the raised upper clip (0.28), which is inactive (2). No dynamic sampling, which TRL
   lacks; no overlong filtering (`mask_truncated_completions`) and no length penalty.
10. The paper leaves the KL penalty out (its section 2.3); here beta is a setting as for the other arms, 0 unless set.
   The paper takes several updates per batch, for which the clip is needed; here there is one, as in 2.

Where `rloo` departs from RLOO (Ahmadian et al., arXiv 2402.14740):

11. TRL's trainer clips PPO's ratio at sequence level, which is inactive here. The KL penalty is k1 summed over the
   sequence, inside the reward, as in the paper.

Fine-tuning on filtered samples (`filtered_sft`):

12. Its learning rate is not tuned here: the notebooks use the one chosen by GRPO's sweep, which need not be its best.

On GPUs, where TRL's vLLM engine generates beside the model ("colocate"):

13. Several processes share a step (`accelerate.yaml`, DistributedDataParallel); gradients and budgets cover all of
   them.
14. vLLM decodes with weights in the checkpoint's dtype, mostly bfloat16, while log-probabilities come from the float32
   model, so samples are off-policy by that rounding. TRL's correction for this is a different loss and stays off.
15. vLLM's generator is seeded with a hash of seed and process rank. TRL seeds it with the rank, so that all seeds of an
   experiment would sample with the same random numbers. With the sum of the two, with which TRL seeds everything else,
   process 1 of one seed would share its numbers with process 0 of the next.

Two variants of `grpo` separate the effects of optimiser and rounding from the loss (`grpo_sgd`, `grpo_rounded`, and
both at once):

16. SGD without momentum instead of AdamW, with its own learning rate; the gradient norm is clipped at 1 as well.
17. Weights in bfloat16 without a float32 master, as in published runs of ES and GRPO: they are rounded to the nearest
   bfloat16 before the first step and after every step (`_grpo_callbacks.RoundedWeights`). Gradients, moments and
   activations stay float32, so that only the storage of the weights differs.

With an adapter (PEFT) over a frozen base, from `peft_config` of `trainer` or already in the model, only the adapter is
trained, in float32 like everything else:

18. The reference is the model from which the run starts, as in 6, in TRL's way: for a new adapter, whose B is zero, the
   model with the adapter disabled; for a model that came with an adapter, a copy of that adapter, which TRL calls "ref"
   and which is also saved in checkpoints and models.
19. The budget counts what is computed: forward passes go through base and adapter; so does the gradient with respect to
   activations, once more; gradients of weights are computed for the adapter only. A full model's backward pass costs
   two forward passes, an adapter's a little more than one (`_grpo_callbacks.Budget`).

PPO left TRL in version 1.13; published results for it are listed in separate tables.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from evoalign_lib import _adapters, arms, models
from evoalign_lib._model_checks import check_plain
from evoalign_lib.checks import choose, plain, positive, require, whole_number
from evoalign_lib.engines import agreement
from evoalign_lib.engines.base import Prompts, until_end
from evoalign_lib.engines.decode import Decoder, multinomial, rows_are_exact, supports
from evoalign_lib.engines.processes import rank, world_size
from evoalign_lib.rewards import RewardFunction, Rewards, state_metrics

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from evoalign_lib._grpo_callbacks import Budget

ARMS = {name: arm.options for name, arm in arms.ARMS.items() if arm.family == "gradient"}
"""The settings in which the arms differ."""

SCALES = ("group", "batch", "none")
"""The possible scales of an arm's advantages."""

DECODERS = ("generate", "loop", "population")
"""The decoders for when the model itself generates: transformers, `LoopRollouts` or `PopulationRollouts`."""

_BESIDE = "evoalign_settings"
"""Attribute of args with which `config` passes on to `trainer` what TRL has no fields for: whether weights are rounded,
and the decoder."""

# settings for all of TRL's trainers
_COMMON = {
    **dict.fromkeys(("temperature", "top_p", "repetition_penalty"), 1.0),
    "top_k": 0,
    "router_aux_loss_coef": 0.0,  # mixtures of experts: no loss other than the arm's own
    # TRL gets a single function; the weights of several go to `trainer`
    **dict.fromkeys(("min_p", "chat_template_kwargs", "cache_implementation", "reward_weights"), None),
    **dict.fromkeys(("use_transformers_continuous_batching", "sync_ref_model", "shuffle_dataset", "use_vllm"), False),
    **dict.fromkeys(("mask_truncated_completions", "remove_unused_columns"), False),  # reward functions read columns
    "restore_callback_states_from_checkpoint": False,  # would replace the budget, which restores itself
    "generation_kwargs": {"remove_invalid_values": True},  # finite logits stay as they are; a diverged model can sample
    "num_iterations": 1,
    "epsilon": 0.2,
    "disable_dropout": True,
}
# settings for TRL's GRPO trainer only
_GRPO = {
    **dict.fromkeys(("use_bias_correction_kl", "vllm_importance_sampling_correction"), False),
    **dict.fromkeys(("use_adaptive_entropy", "cast_lm_head_to_fp32"), False),
    **dict.fromkeys(("delta", "off_policy_mask_threshold"), None),
    "importance_sampling_level": "token",
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
    "multi_objective_aggregation": "sum_then_normalize",
}
_VLLM = {
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_tensor_parallel_size": 1,
    "vllm_enable_sleep_mode": False,
    "vllm_model_impl": "vllm",
    "vllm_structured_outputs_regex": None,
    "ddp_timeout": 86_400,  # seconds; processes wait while one of them loads or evaluates
}
_SFT = {
    **dict.fromkeys(("assistant_only_loss", "packing", "padding_free"), False),
    "shuffle_dataset": False,  # each epoch is shuffled anyway
    "completion_only_loss": True,
    "loss_type": "nll",
    "router_aux_loss_coef": 0.0,
    "max_length": None,
}
_OPTIMISER = {
    "optim": "adamw_torch",
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    # pinning memory does not change the mathematics, and warns without a GPU
    **dict.fromkeys(("bf16", "fp16", "gradient_checkpointing", "dataloader_pin_memory"), False),
}


def config(
    arm: str,
    *,
    output_dir: str,
    seed: int,
    steps: int,
    prompts_per_step: int,
    num_generations: int,
    max_completion_length: int,
    learning_rate: float,
    beta: float = 0.0,
    scale_rewards: str | None = None,
    micro_batch: int | None = None,
    vllm: Mapping[str, Any] | None = None,
    decoder: str = "generate",
    **others: Any,
) -> Any:
    """Return TRL's configuration of an arm, with every setting that changes the mathematics stated.

    In a launch of several processes (`accelerate launch`, torchrun) the settings are for the whole run, and the
    processes share the completions of a step.

    Args:
        arm: one of `ARMS`; see the module's docstring.
        output_dir: where TRL writes.
        seed: seed of the sampling.
        steps: number of batches of rollouts, with one update each.
        prompts_per_step, num_generations: prompts per step, and completions of each (the group).
        max_completion_length: maximum number of new tokens per completion.
        learning_rate: the optimiser's learning rate, constant.
        beta: weight of the KL penalty; 0: no penalty and no reference model.
        scale_rewards: "group", "batch" or "none" instead of the arm's own; not for an arm without scaling ("rloo").
        micro_batch: completions in memory at once, a divisor of a process's share of a step; None, or more than the
            share: all of it. It changes gradients only by rounding.
        vllm: None: the model itself generates. Otherwise TRL's vLLM engine in each process ("colocate") does, with
            eos_ids (token ids that end a completion), max_model_length (maximum tokens of a prompt with its completion)
            and gpu_memory (its share of the GPU's memory). See 14 in the module's docstring.
        decoder: the decoder if the model itself generates: "generate" (transformers) or, for Llama and Qwen2 with
            TRL's GRPO trainer, one of our own: "loop" (`LoopRollouts`, on a CPU) or "population"
            (`PopulationRollouts`, made for a GPU).
        others: further settings of `transformers.TrainingArguments`, such as report_to, save_steps or use_cpu, and of
            TRL's logging.

    Returns:
        A GRPOConfig or an RLOOConfig, whichever the arm's trainer takes.

    Raises:
        ValueError: an unknown arm or scale_rewards, steps, prompts_per_step or max_completion_length below 1, a group
            of fewer than two, a learning rate that is not positive, a negative beta, a micro batch that does not divide
            a process's share of a step, a number of processes that does not divide the step, an unknown decoder,
            one of ours together with vLLM or with an arm of another trainer, or a setting that this module fixes.
    """
    choose("arm", arm, ARMS)
    whole_number("steps", steps)
    whole_number("prompts_per_step", prompts_per_step)
    whole_number("max_completion_length", max_completion_length)
    whole_number("num_generations", num_generations, 2, why="completions of a group are compared")
    positive("learning_rate", learning_rate)
    require(beta >= 0, f"beta={beta!r} must be 0 (no KL penalty) or more.")
    maths = dict(ARMS[arm])
    if scale_rewards is not None:
        check_scale(arm, scale_rewards)
        maths["scale_rewards"] = scale_rewards
    share, micro_batch = shared(prompts_per_step * num_generations, micro_batch, world_size())
    trainer_name = arms.get(arm).trl
    choose("decoder", decoder, DECODERS)
    why = "vLLM generates" if vllm is not None else f"TRL's {trainer_name} trainer generates by itself"
    ours = decoder == "generate" or (vllm is None and trainer_name == "GRPO")
    require(ours, f"decoder={decoder!r}: {why}. Use decoder='generate'.")
    stated = _COMMON | _OPTIMISER | maths | (_GRPO if trainer_name == "GRPO" else {})
    if vllm is not None:
        stated |= _VLLM | {
            "vllm_max_model_length": vllm["max_model_length"],
            "vllm_gpu_memory_utilization": vllm["gpu_memory"],
            # only these token ids end a completion, not those of the model's generation_config
            "generation_kwargs": {"stop_token_ids": list(vllm["eos_ids"]), "ignore_eos": True},
        }
    stated |= {"output_dir": output_dir, "seed": seed, "max_steps": steps, "learning_rate": learning_rate, "beta": beta}
    stated |= {"num_generations": num_generations, "max_completion_length": max_completion_length}
    stated |= {"per_device_train_batch_size": micro_batch}
    stated |= dict.fromkeys(("gradient_accumulation_steps", "steps_per_generation"), share // micro_batch)
    _refuse(others, stated)
    if isinstance(load := others.get("model_init_kwargs"), Mapping):
        others["model_init_kwargs"] = models.with_dtype(load)

    import trl

    args = getattr(trl, f"{trainer_name}Config")(**plain(stated | others))  # checkpoints take no numbers of NumPy
    what = f"{world_size()} processes were launched and TRL has found {args.world_size}: each would train a separate"
    require(args.world_size == world_size(), f"{what} model. Without GPUs set use_cpu=True.")
    setattr(args, _BESIDE, (arms.get(arm).weights == "bfloat16", decoder))
    return args


def check_scale(arm: str, scale_rewards: str) -> None:
    """Raise ValueError unless an arm can scale its advantages in this way (`SCALES`)."""
    what = f"scale_rewards={scale_rewards!r}: arm {arm!r} does not scale advantages. Leave it out."
    require("scale_rewards" in ARMS[arm], what)
    choose("scale_rewards", scale_rewards, SCALES)


def shared(rollouts: int, micro_batch: int | None, processes: int) -> tuple[int, int]:
    """Return each process's share of a step's completions, and the size of its micro-batches.

    Args:
        rollouts: completions of a step.
        micro_batch: completions per backward pass; None: all of a process's share.
        processes: processes that share the step.

    Returns:
        Completions per process, and completions per backward pass.

    Raises:
        ValueError: the completions cannot be divided evenly.

    >>> shared(64, 16, 8)
    (8, 8)
    """
    what = f"the {rollouts} completions of a step cannot be divided evenly among {processes} processes: change"
    require(rollouts % processes == 0, f"{what} prompts_per_step, num_generations or the number of GPUs.")
    share = rollouts // processes
    micro_batch = share if micro_batch is None else min(micro_batch, share)
    divides = micro_batch >= 1 and share % micro_batch == 0
    require(divides, f"micro_batch={micro_batch} must divide the {share} completions of a process in a step.")
    return share, micro_batch


def _refuse(others: Mapping[str, Any], stated: Mapping[str, Any]) -> None:
    if taken := sorted(others.keys() & stated.keys()):
        name = taken[0]
        raise ValueError(f"{name}={others[name]!r}: it is fixed at {stated[name]!r} for this arm. Remove it.")


def _check_trainable(model: Any, adapters: bool = True) -> None:
    """Raise ValueError unless a model, or (if `adapters`) its adapter over a frozen base, can be trained in float32."""
    if not adapters or not _adapters.is_adapted(model):
        check_plain(model)
    else:
        _adapters.check_something_moves(model)
        _adapters.check_movable(model)
        (name,) = model.active_adapters
        remedy = "load it as 'default', PEFT's own name, the only one that TRL can resume"
        require(name == "default", f"the active adapter is {name!r}: {remedy}.")
    if other := {str(p.dtype) for p in model.parameters()} - {"torch.float32"}:
        raise ValueError(f"the model has weights in {', '.join(sorted(other))}: load it in float32, as for every arm.")


def trainer(
    model: Any,
    reward_funcs: RewardFunction | Sequence[RewardFunction],
    args: Any,
    train_dataset: Iterable[Mapping[str, Any]],
    processing_class: Any = None,
    callbacks: Sequence[TrainerCallback] = (),
    *,
    reward_weights: Sequence[float] | None = None,
    reward_floor: float | None = None,
    reward_timeout: float | None = None,
    rollouts: Any = None,
    peft_config: Any = None,
) -> tuple[Any, Budget]:
    """Return TRL's trainer for an arm, and its budget.

    `train(resume_from_checkpoint=...)` of a trainer created from the starting model continues with the same bits and
    the same budget as an uninterrupted run; it raises ValueError for a checkpoint that is incomplete or damaged.

    Args:
        model: a float32 model, or a folder or name (TRL loads it in float32), or a float32 PeftModel whose base is
            frozen and whose adapter is named "default" (PEFT's own name). Its generation settings are reset to plain
            ones, because generate() would take any setting that TRL leaves open from them, such as a ban on repeated
            n-grams.
        reward_funcs: as for `ESTrainer`, called through the same wrapper (`rewards.Rewards`): a failure scores the
            floor or stops the run, and None is left out. Stateful functions are updated at the end of each optimiser
            step, in the first process, from what all processes have logged since the last update; a generation that
            serves several steps updates them only at the end of the first. The state is shared with all processes,
            logged as `reward_state/<function>/<key>`, and saved in checkpoints with the budget.
        args: from `config`.
        train_dataset: rows with "prompt" and further columns, at least as many as a step needs; they are used in order,
            and again from the start when they run out.
        processing_class: the tokenizer.
        callbacks: called after the budget has been updated.
        reward_weights, reward_floor, reward_timeout: as in `ESConfig`.
        rollouts: generates the completions instead of the model, with GRPO's trainer only: TRL's `rollout_func`, which
            also returns a factor for each completion's advantage, as `importance_ratio`, and is a callback, too.
        peft_config: for a new adapter, such as a `peft.LoraConfig`; it is initialised from the seed in args, the base
            is frozen, and only the adapter is trained (18 and 19 in the module's docstring). None: the adapter that the
            model has is trained, or without one the whole model.

    Returns:
        The GRPOTrainer or RLOOTrainer, and its `Budget`.

    Raises:
        ValueError: args that are not from `config`; a model that is not float32 or has quantised weights, or, without
            an adapter, has no name although beta is not 0; an adapter whose base is not frozen, with another name, or
            together with vLLM; peft_config for a model that has an adapter; prompts of unlike length for a model that
            reads padding; or fewer rows than prompts in a step.
        TypeError: a peft_config that is not one.
        ImportError: PEFT is not installed.
    """
    if args.use_vllm:  # before TRL is imported, which imports vLLM
        from evoalign_lib.engines.vllm import prepare_process

        prepare_process()
    from accelerate.utils import set_seed
    from datasets import Dataset
    from transformers import GenerationConfig
    from trl import GRPOTrainer, RLOOConfig, RLOOTrainer

    from evoalign_lib._grpo_callbacks import Budget, RoundedWeights

    rows = [dict(row) for row in train_dataset]
    prompts = args.generation_batch_size // args.num_generations
    remedy = "Pass what `grpo.config` returned"
    require(hasattr(args, _BESIDE), f"args lack settings of `grpo.config` (are they a copy?). {remedy}.")
    what = f"a step needs {prompts} prompts, the training set has {len(rows)}"
    require(len(rows) >= prompts, f"{what}: lower prompts_per_step.")
    adapted = peft_config is not None or _adapters.is_adapted(model)
    merges = adapted and args.use_vllm
    require(not merges, "vLLM beside an adapter: TRL would merge it, which rounds the base. Use vllm=None.")
    if not isinstance(model, str):
        _check_trainable(model)
        if args.beta > 0 and not adapted and not model.config._name_or_path:
            what = f"beta={args.beta}: TRL loads the reference model by name, and this model has none"
            raise ValueError(f"{what}: save it with save_pretrained(folder), and pass the folder.")
    kind = RLOOTrainer if isinstance(args, RLOOConfig) else GRPOTrainer
    rounded, decoder = getattr(args, _BESIDE)
    rewards = Rewards(reward_funcs, reward_weights, reward_floor, reward_timeout, args.log_completions)
    given: dict[str, Any] = {"peft_config": _adapters.plain_config(peft_config)} if adapted else {}
    reweighted, ours = rollouts is not None, {"loop": LoopRollouts, "population": PopulationRollouts}.get(decoder)
    alone = reweighted and kind is RLOOTrainer
    require(not alone, "rollouts need GRPO's trainer: TRL's RLOOTrainer generates by itself. Use an arm of GRPO.")
    both = reweighted and ours
    require(not both, f"decoder={decoder!r} has no effect with rollouts, which bring their own: use 'generate'.")
    if ours:
        rollouts = ours()
    given |= {"rollout_func": rollouts} if reweighted or ours else {}
    ratios = 2 if reweighted else 0
    budget = Budget(rewards, old_logprobs=kind is RLOOTrainer, reference=args.beta > 0, ratios=ratios)
    own = [budget, *([RoundedWeights()] if rounded else []), *([rollouts] if reweighted else [])]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are using 'rollout_func'")  # experimental, but tested here
        built = _extended(kind, rewards, adapted, reweighted)(
            model=model,
            reward_funcs=budget.reward,
            args=args,
            # cycled here, because TRL drops rows at the end of the set that do not fill a step
            train_dataset=Dataset.from_list(list(itertools.islice(itertools.cycle(rows), args.max_steps * prompts))),
            processing_class=processing_class,
            callbacks=[*own, *callbacks],
            **given,
        )
    _check_trainable(built.model)
    found = Prompts(rows, built.processing_class)  # refuses now what would be refused at a later step
    if not found.mask.all():  # TRL pads, too: to write completions, and to compute their loss
        agreement.check_padding(built.model.eval(), found.ids, found.mask, built.processing_class.pad_token_id)
    models.check_saving(built.model, built.processing_class)
    budget.model = built.model
    if adapted:
        budget.adapter = sum(p.numel() for p in built.model.parameters() if p.requires_grad)
        budget.reference_adapted = "ref" in built.model.peft_config
    network = _adapters.base_of(built.model)
    names, kept = ("bos_token_id", "eos_token_id", "pad_token_id"), network.generation_config
    network.generation_config = GenerationConfig(**{name: getattr(kept, name) for name in names})
    if rounded:  # before the reference below gets the starting weights
        RoundedWeights.apply(built.model)
    if args.beta > 0 and not adapted:
        built.ref_model.load_state_dict(built.model.state_dict())
    if args.use_vllm:
        mixed = hashlib.blake2b(f"{args.seed} {rank()}".encode(), digest_size=4).digest()
        set_seed(int.from_bytes(mixed, "little"))  # see 15 above
    # transformers logs the settings and pickles them with every checkpoint, so remove tokens and keys
    built.args = copy.copy(built.args)
    built.args.model_init_kwargs = models.masked(args.model_init_kwargs)
    if not args.push_to_hub:
        built.args.hub_token = None
    return built, budget


class LoopRollouts:
    """A `rollout_func` for TRL that generates a gradient arm's completions with the decoding loop.

    It draws the same tokens as transformers' generate from the same random state (float32, temperature 1, one draw per
    step for the whole batch) and leaves the random state as generate does. The loop's logits differ from those of
    transformers in the last digits, because sums are taken in another order. Where a random number falls almost on the
    boundary between two tokens, the other one may be drawn, and the run differs from there on, as on another CPU.

    Attributes:
        drop_rows: whether rows that have ended are dropped, which needs a CPU that computes the other rows exactly
            alike without them; None: not tested yet.
    """

    drop_rows: bool | None = None

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Return the token ids of prompts and completions.

        Raises:
            ValueError: a model that the loop does not cover, or one that is not on the CPU.
        """
        model, tokenizer = trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class
        reason = supports(model.config) or _adapters.not_dense(model)
        if not reason and trainer.accelerator.device.type != "cpu":
            reason = f"it is on {trainer.accelerator.device}, where 'population' decodes"
        found, pad, new = Prompts(_rows(prompts), tokenizer), tokenizer.pad_token_id, trainer.max_completion_length
        if not reason and self.drop_rows is None:  # the first rollouts
            reason = agreement.loop_differs(model, found, pad, new)
        require(not reason, f"decoder='loop' does not cover this model: {reason}. Use decoder='generate'.")
        weights = _adapters.dense(model)
        if self.drop_rows is None:
            self.drop_rows = rows_are_exact(model.config, weights, len(found))
        ends, prefix = list(trainer.eos_token_ids), torch.from_numpy(found.prefix)
        decoder = Decoder(model.config, weights, ends, pad, prefix, self.drop_rows)
        ids, mask = torch.from_numpy(found.ids), torch.from_numpy(found.mask)
        written = decoder.generate(ids, mask, new, multinomial(len(found))).numpy()
        return _told(found, until_end(written, ends))


class PopulationRollouts:
    """A `rollout_func` for TRL that generates a gradient arm's completions as `engine="cuda"` does for ES.

    The policy's weights are copied into a `PopulationDecoder` (`engines.population`) before each batch of rollouts.
    Samples are drawn from logits in the policy's own dtype, which for these arms is float32, at temperature 1 by
    inversion, one number per token from torch's global random state on the CPU. So they are on-policy to the last
    digits, and a resumed run draws the same numbers; they are not the tokens of transformers' generate.
    """

    _decoder: Any = None

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Return the token ids of prompts and completions.

        Raises:
            ValueError: a model that the decoder does not cover, or prompts that are not of the training set.
        """
        from evoalign_lib.engines.population import PopulationDecoder

        model, tokenizer = trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class
        found = Prompts(_rows(prompts), tokenizer)
        if self._decoder is None:
            # one shape for all batches, because each costs the capture of a graph
            every = Prompts(_rows(trainer.train_dataset["prompt"]), tokenizer)
            self._width, self._prefix = every.width, len(every.prefix)
            self._decoder = PopulationDecoder(model, 1, trainer.accelerator.device, chunk_rows=len(found))
            self._decoder.check(model, every.ids, every.mask, tokenizer.pad_token_id, self._prefix)
        else:
            self._decoder.load(_adapters.dense(model))
        if found.width > self._width:
            raise ValueError(f"prompts of {found.width} tokens: those of the training set have at most {self._width}.")
        ends, new = list(trainer.eos_token_ids), trainer.max_completion_length
        ids, mask = (np.pad(a, ((0, 0), (self._width - found.width, 0))) for a in (found.ids, found.mask))
        uniforms = torch.rand(len(found), new).numpy()
        written = self._decoder.decode(ids, mask, new, ends, uniforms, prefix=self._prefix)[0]
        return _told(found, until_end(written, ends))


def _rows(prompts: Iterable[Any]) -> list[dict[str, Any]]:
    return [{"prompt": prompt} for prompt in prompts]


def _told(prompts: Any, completions: list[list[int]]) -> dict[str, Any]:
    """Return what TRL expects from a `rollout_func`: the ids of prompts (`engines.base.Prompts`) and completions."""
    ids = [row[known == 1].tolist() for row, known in zip(prompts.ids, prompts.mask, strict=True)]
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}  # TRL reads these only for vLLM


def _extended(kind: type, rewards: Rewards, adapted: bool, reweighted: bool) -> type:
    """Return one of TRL's trainers, extended in four ways, two of them optional.

    The trainer always reads prompts as `ESTrainer` does, and logs the state of reward functions after a step,
    unrounded: logged by the functions themselves as a metric, it would be the state before the step, rounded to
    float32. Its checkpoints are summed up.

    Args:
        kind: class of the trainer.
        rewards: the reward functions.
        adapted: on resuming, load the trained adapter explicitly. PEFT saves the adapter "default" in the folder of a
            checkpoint and TRL's "ref" in a subfolder. If transformers (5.17) finds a subfolder, it loads only adapters
            in subfolders, and training would silently continue from the starting adapter.
        reweighted: multiply each advantage by the ratio that the `rollout_func` returned.
    """

    from transformers.trainer_utils import get_last_checkpoint

    from evoalign_lib._grpo_callbacks import SummedCheckpoints

    class Extended(SummedCheckpoints, kind):
        def log(self, logs, start_time=None):
            if "loss" in logs and rewards.stateful:  # logs of a training step
                logs = logs | state_metrics(rewards.state())
            super().log(plain(logs), start_time)

        def save_model(self, output_dir=None, _internal_call=False):
            last = get_last_checkpoint(self.args.output_dir)
            with models.saving(output_dir, f"the last checkpoint is {last!r}"):
                super().save_model(output_dir, _internal_call)
                if self.args.should_save:
                    _adapters.save_alike(self.model, output_dir or self.args.output_dir)

        def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            if adapted:
                trained = self.model if model is None else model
                trained.load_adapter(resume_from_checkpoint, "default", is_trainable=True)

        def _tokenize_prompts(self, prompts):  # TRL would begin another answer after one that is to be continued
            return _told(Prompts(_rows(prompts), self.processing_class), [])["prompt_ids"], None, {}

        def _generate_and_score_completions(self, inputs):
            made = super()._generate_and_score_completions(inputs)
            if not reweighted:
                return made
            ratios = made["advantages"].new_tensor([row["importance_ratio"] for row in inputs])
            return made | {"advantages": made["advantages"] * ratios}

    Extended.__name__ = kind.__name__  # TRL uses it in model cards and logs
    return Extended


def random_reward(seed: int) -> RewardFunction:
    """Return a null reward: 0 or 1 with equal probability, whatever the completion (as in arXiv 2506.10947).

    It depends only on seed, step and position in the batch, so that a resumed run draws the same rewards.
    """

    def random(prompts, completions, trainer_state=None, **columns):
        step = 0 if trainer_state is None else trainer_state.global_step
        process = f" {rank()}" if world_size() > 1 else ""  # each process has its own completions
        key = hashlib.blake2b(f"random reward {seed} {step}{process}".encode(), digest_size=8).digest()
        draws = np.random.default_rng(int.from_bytes(key, "little")).integers(0, 2, len(completions))
        return [float(r) for r in draws]

    return random


def filtered_sft(
    model: Any,
    tokenizer: Any,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    output_dir: str,
    seed: int,
    learning_rate: float,
    batch_size: int,
    epochs: float = 1,
    callbacks: Sequence[TrainerCallback] = (),
    **others: Any,
) -> Any:
    """Return TRL's SFTTrainer for fine-tuning on samples that passed a reward filter (rejection sampling).

    The loss is the mean cross-entropy of the completion tokens, including the end token; prompts do not count.

    Args:
        model: a float32 model; it is trained in place.
        tokenizer: its tokenizer.
        pairs: token ids of the prompts and completions that passed the filter, completions with their end token.
        output_dir, seed: as for `config`.
        learning_rate: AdamW's learning rate, constant.
        batch_size: completions per update.
        epochs: passes over the pairs, each in a new random order.
        callbacks: callbacks of transformers.
        others: further settings of `transformers.TrainingArguments`.

    Raises:
        ValueError: no pairs, because nothing passed the filter; a model that is not float32; or a setting that this
            module fixes.
    """
    require(pairs, "no completion passed the filter: draw more samples per prompt, or lower the threshold.")
    _check_trainable(model, adapters=False)
    stated = _SFT | _OPTIMISER | {"output_dir": output_dir, "seed": seed, "num_train_epochs": epochs}
    stated |= {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": 1}
    stated |= {"learning_rate": learning_rate}
    _refuse(others, stated)
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from evoalign_lib._grpo_callbacks import SummedCheckpoints

    rows = [
        {"input_ids": [*prompt, *completion], "completion_mask": [0] * len(prompt) + [1] * len(completion)}
        for prompt, completion in pairs
    ]
    args, train = SFTConfig(**stated, **others), Dataset.from_list(rows)
    kind = type("SFTTrainer", (SummedCheckpoints, SFTTrainer), {})
    return kind(model, args, train_dataset=train, processing_class=tokenizer, callbacks=list(callbacks))
