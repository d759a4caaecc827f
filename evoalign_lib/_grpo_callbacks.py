"""Parts of a gradient arm's trainer: the budget that it spends, rounding of weights to bfloat16, and checkpoints.

A separate module because its classes derive from transformers', whose import takes seconds; specs of runs import `grpo`
without it.
"""

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from evoalign_lib import _checkpoints
from evoalign_lib.checks import require
from evoalign_lib.engines.processes import rank
from evoalign_lib.rewards import KINDS, Rewards


class RoundedWeights(TrainerCallback):
    """Rounds the weights of a model to the nearest bfloat16 before the first step and after every step.

    Callbacks that are called later see the rounded weights.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Round the weights at the start, also of a resumed run, and after each step of the optimiser."""
        self.apply(model)

    on_step_end = on_train_begin

    @staticmethod
    def apply(model: Any) -> None:
        """Round the weights of a model in place."""
        for parameter in model.parameters():
            parameter.data.copy_(parameter.data.bfloat16())


class SummedCheckpoints:
    """Base of a gradient arm's trainer, before TRL's: sums up each checkpoint, and resumes from an undamaged one."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
        (folder / _checkpoints.SUMS).unlink(missing_ok=True)  # of a checkpoint that is replaced
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        self.accelerator.wait_for_everyone()  # each process writes its random state
        if self.args.should_save:
            torch.save(self.args, folder / "training_args.bin")  # with the limit
            _checkpoints.sum_up(folder)
            _checkpoints.rotate(folder, limit, self.state.best_model_checkpoint)  # not before the new one counts

    def train(self, resume_from_checkpoint: Any = None, *others: Any, **more: Any) -> Any:
        """Train as TRL does, but from no checkpoint that is damaged or incomplete (`_checkpoints.sound`)."""
        return super().train(_checkpoints.sound(resume_from_checkpoint, self.args.output_dir), *others, **more)


_SPENT = ("completions", "generated_tokens", "prompt_tokens", "core_seconds")


class Budget(TrainerCallback, ExportableState):
    """The budget of a gradient arm in the quantities counted for ES: completions, tokens, FLOPs, core-seconds.

    A forward pass costs 2 floating-point operations per parameter and token (attention products are left out, as for
    ES), a backward pass twice that. All passes are over the prompts and completions of the step, without padding: one
    for generation, three for the loss and its gradient, one for the reference model if there is one, one for the
    log-probabilities before the update if TRL computes them, and two for importance ratios if completions come from
    `rollouts`. One of these passes is for the gradient of the weights. With an adapter (PEFT) that pass is over the
    adapter only, because no gradient of the frozen base is computed; the gradient with respect to activations passes
    through base and adapter and counts in full (the first layer's inputs need none, which is not subtracted). If the
    reference is the model with its adapter disabled, its pass is over the base only. Checkpoints hold the budget, and a
    resumed run continues it. After each step it covers all processes of the launch. The state of reward functions
    (`rewards`) is kept in the same way.

    Attributes:
        total: completions, generated_tokens and prompt_tokens so far (a prompt counts once for each of its
            completions); core_seconds, CPU time in training steps, without evaluation in other callbacks; and how many
            single rewards were "none", "nan", "exception" or "timeout" (`rewards`).
        adapter: number of parameters of the trained adapter over a frozen base; 0: all weights are trained.
        reference_adapted: whether the reference has its own adapter.
    """

    def __init__(self, rewards: Rewards, old_logprobs: bool, reference: bool, ratios: int = 0):
        self._score = rewards
        self.total: Counter[str] = Counter(dict.fromkeys((*_SPENT, *KINDS), 0))
        self._own: Counter[str] = Counter()  # spent in this process since the last step
        self.passes = 4 + int(old_logprobs) + int(reference) + ratios
        self.model: Any = None
        self.adapter, self.reference_adapted = 0, False
        self._reference = reference
        self._logged: list[dict[str, list[float]]] = []  # metrics logged in this process since the last step
        self._started, self._seen = 0.0, 0

    @property
    def counts(self) -> dict[str, int]:
        """Number of single rewards of each kind that `rewards` counts."""
        return {kind: self.total[kind] for kind in KINDS}

    @property
    def reward(self) -> Callable[..., list[float | None]]:
        """The reward function that TRL calls: all functions in one, with their rewards counted."""

        def reward(
            prompts, completions, completion_ids, trainer_state=None, log_metric=None, log_extra=None, **columns
        ):
            scored = self._score(prompts, completions, completion_ids, columns, trainer_state)
            if self.model is None or self.model.training:
                self._score.check_failures([scored])
                tokens = sum(map(len, completion_ids))
                self._own.update(scored.counts, completions=len(completions), generated_tokens=tokens)
                self._own["core_seconds"] += scored.seconds
                if self._score.stateful:
                    self._logged.append(scored.metrics)
            if log_metric is not None:
                for name, values in scored.metrics.items():
                    log_metric(name, float(np.mean(values)))
            if log_extra is not None:
                known = {"prompt", "completion", *self._score.names}
                for column in scored.table.keys() - known:
                    log_extra(column, scored.table[column])
            return [None if np.isnan(r) else float(r) for r in scored.rewards]

        reward.__name__ = "+".join(self._score.names)
        return reward

    def state(self) -> dict[str, Any]:
        """Return what transformers writes into a checkpoint."""
        spent = {name: self.total[name] for name in _SPENT}
        return {"args": {}, "attributes": spent | {"counts": self.counts, "reward_state": self._score.state()}}

    def on_train_begin(self, args, state, control, **kwargs):
        """Restore the budget and the state of reward functions if the run resumes from a checkpoint.

        Raises:
            ValueError: a checkpoint without a budget, or a state that does not belong to these reward functions.
        """
        saved = state.stateful_callbacks.get(type(self).__name__)
        require(saved, "the checkpoint holds no budget. Resume from one that a grpo.trainer() has written.")
        saved = saved["attributes"]
        self.total = Counter({name: saved[name] for name in _SPENT} | saved["counts"])
        self._score.load_state(saved.get("reward_state", {}))
        self._share_state(args)
        self._own.clear()  # left from an interrupted step
        self._logged.clear()

    def on_step_begin(self, args, state, control, **kwargs):
        """Start the clock."""
        self._started, self._seen = time.process_time(), int(state.num_input_tokens_seen)

    def on_step_end(self, args, state, control, **kwargs):
        """Stop the clock, read TRL's count of tokens (in all processes), and add what the other processes spent."""
        self._own["core_seconds"] += time.process_time() - self._started
        step = sum(_everywhere(args, [self._own]), Counter())
        step["prompt_tokens"] = int(state.num_input_tokens_seen) - self._seen - step["generated_tokens"]
        self.total.update(step)
        self._own.clear()
        if self._score.stateful:  # updated in the first process, then shared with all
            logged, self._logged = _everywhere(args, self._logged), []
            if logged and rank() == 0:  # nothing is logged if an earlier step's completions serve this step, too
                self._score.end_of_step(logged)
            self._share_state(args)

    def _share_state(self, args) -> None:
        """Copy the state of reward functions from the first process to all."""
        self._score.load_state(_everywhere(args, [self._score.state()])[0])

    def spent(self, d: int) -> dict[str, Any]:
        """Return the budget so far, for a record; d: parameters of the model, without those of an adapter."""
        passed = self.passes * d
        if self.adapter:
            without = int(self._reference and not self.reference_adapted)
            passed = (self.passes - 1) * d + (self.passes - without) * self.adapter
        spent = {name: self.total[name] for name in _SPENT[:3]}
        flops = 2 * passed * (self.total["prompt_tokens"] + self.total["generated_tokens"])
        return spent | {"forward_flops": flops, "core_seconds": round(self.total["core_seconds"], 2)}


def _everywhere(args: Any, entries: list) -> list:
    """Join the lists of all processes of the launch, in the order of their ranks."""
    if args.world_size == 1:
        return entries
    from accelerate.utils import gather_object

    return gather_object(entries)
