"""Compare a loss that is written out by hand with TRL's, on completions that TRL's own trainer samples."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from evoalign_lib import tiny
from evoalign_study import style


def losses_agree(arm: str, written: Callable[..., Any], folder: Path) -> dict[str, str]:
    """Return a table row on whether a loss written out by hand equals TRL's, in value and in gradient.

    TRL's trainer samples four completions for each of eight problems from base A0 and computes their advantages; then
    noise moves the policy, so that ratio, clip and KL all matter, and both losses are computed.

    Args:
        arm: "grpo", "dr_grpo" or "dapo".
        written: the loss; takes log-probabilities under policy, old policy and reference, rewards and mask, by group.
        folder: for the files that TRL writes.
    """
    import torch
    from transformers.utils import logging

    from evoalign_lib import grpo
    from evoalign_lib.tasks import countdown

    logging.disable_progress_bar()  # no bar while TRL loads a reference of half a megabyte
    policy, tokenizer = tiny.load("A0")
    toy = {"steps": 1, "prompts_per_step": 8, "num_generations": 4, "learning_rate": 1e-4, "beta": 0.04}
    toy |= {"max_completion_length": tiny.MAX_COMPLETION_LENGTH, "seed": 0, "report_to": "none"}
    args = grpo.config(arm, output_dir=str(folder), **toy)
    rows = countdown.dataset(tiny.problems("train", 8), tokenizer)
    trainer, _ = grpo.trainer(policy, countdown.reward, args, rows, tokenizer)
    trainer.args.dataloader_pin_memory = False
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    policy, generator = trainer.model, torch.Generator().manual_seed(0)
    with torch.no_grad():
        batch["old_per_token_logps"] = _log_probabilities(policy, batch)
        for weights in policy.parameters():
            weights += 0.02 * torch.randn(weights.shape, generator=generator)
    terms = _log_probabilities(policy, batch), batch["old_per_token_logps"], batch["ref_per_token_logps"]
    *terms, mask = (term.view(8, 4, -1) for term in (*terms, batch["completion_mask"]))
    rewards = torch.tensor(trainer._logs["rewards"]["reward"]).view(8, 4)
    given = {"loss_type": arm, "beta": 0.04, "max_length": tiny.MAX_COMPLETION_LENGTH}
    losses = [written(*terms, rewards, mask, **given, high=0.28 if arm == "dapo" else 0.2)]
    losses.append(trainer.compute_loss(policy, batch))
    ours, trls = (torch.cat([g.ravel() for g in torch.autograd.grad(loss, policy.parameters())]) for loss in losses)
    same = torch.allclose(*losses, atol=1e-6), bool((ours - trls).norm() < 1e-4 * trls.norm())
    value, gradient = ("yes" if one else "no" for one in same)
    return {"loss of": style.ARMS[arm].label, "same value": value, "same gradient": gradient}


def _log_probabilities(policy: Any, batch: Mapping[str, Any]) -> Any:
    """Return log-probabilities of the completions' tokens from the model's plain logits, (completions, tokens)."""
    import torch

    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    seen = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    logits = policy(ids, attention_mask=seen).logits[:, batch["prompt_ids"].shape[1] - 1 : -1]
    return logits.log_softmax(-1).gather(-1, batch["completion_ids"][..., None])[..., 0]
