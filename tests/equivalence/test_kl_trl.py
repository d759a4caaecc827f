"""The KL that TRL's GRPOTrainer logs is our k3 per token, on the very completions and weights of the step."""

import numpy as np
import pytest
import torch
from grpo_runs import built, rows
from transformers import TrainerCallback

from evoalign_lib import tiny
from evoalign_lib.analysis import kl
from evoalign_lib.engines.local import Prompts


class Watch(TrainerCallback):
    """Moves the policy by noise before the first step, and keeps the weights that every step begins with."""

    def __init__(self):
        self.policies = []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 0:
            generator = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
        # into a model of its own: a copy of the trainer's would keep calling the trainer's, whose forward is wrapped
        policy, _ = tiny.load("A0")
        policy.load_state_dict(model.state_dict())
        self.policies.append(policy)


def test_the_logged_kl_is_k3_per_token(tmp_path):
    watch, batches, (reference, tokenizer) = Watch(), [], tiny.load("A0")

    def reward(prompts, completions, completion_ids, **columns):
        batches.append((prompts, completion_ids))
        return [float(len(set(ids))) for ids in completion_ids]

    trainer, _ = built(tmp_path, reward=reward, callbacks=[watch], data=rows(8), beta=0.1, prompts_per_step=4)
    trainer.train()
    logged, measured = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry], []
    for policy, (asked, ids) in zip(watch.policies, batches, strict=True):
        prompts = Prompts([{"prompt": prompt} for prompt in asked], tokenizer)
        samples = kl.samples(prompts.ids, prompts.mask, ids, [tokenizer.eos_token_id])
        measured.append(kl.measure(kl.compare(policy, reference, samples)))
    lengths = np.array([len(each) for each in batches[0][1]])
    assert (lengths == 12).any() and (lengths < 12).any()  # some are cut off, and others not
    assert logged == pytest.approx([m["k3_nats_per_token"] for m in measured], rel=1e-4) and min(logged) > 0.01
    assert [m["tokens"] for m in measured] == [sum(map(len, ids)) for _, ids in batches]
    # and it is none of the other numbers, so that the agreement says something
    for other in ("k1_nats_per_token", "k2_nats_per_token", "exact_nats_per_token", "k3_nats_per_sequence"):
        assert logged != pytest.approx([m[other] for m in measured], rel=1e-3)
