"""The KL that TRL's GRPOTrainer logs is our k3 per token, on the very completions and weights of the step."""

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from evoalign_lib import tiny
from evoalign_lib.analysis import kl
from evoalign_lib.engines.local import Prompts
from evoalign_lib.tasks import countdown


class Watch(TrainerCallback):
    """Moves the policy by noise before the first step, and keeps the weights that every step begins with."""

    def __init__(self, sigma):
        self.sigma, self.policies = sigma, []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 0:
            generator = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(self.sigma * torch.randn(parameter.shape, generator=generator))
        # into a model of its own: a copy of the trainer's would keep calling the trainer's, whose forward is wrapped
        policy, _ = tiny.load("A0")
        policy.load_state_dict(model.state_dict())
        self.policies.append(policy)


def train(folder, sigma=0.02, **settings):
    """A GRPO run of A0; returns what was seen: the policies, (prompts, completion ids) of each batch, logged KLs."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    _, tokenizer = tiny.load("A0")
    batches = []

    def reward(prompts, completions, completion_ids, **columns):
        batches.append((prompts, completion_ids))
        return [float(len(set(ids))) for ids in completion_ids]

    stated = {"per_device_train_batch_size": 16, "num_generations": 4, "max_steps": 2, "learning_rate": 1e-3}
    stated |= {"bf16": False, "use_cpu": True, "gradient_checkpointing": False, "logging_steps": 1, "seed": 0}
    stated |= {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "log_completions": False, "beta": 0.1}
    stated |= {"max_completion_length": 12}  # cuts some completions off, and not others
    config, watch = GRPOConfig(output_dir=str(folder), **stated | settings), Watch(sigma)
    rows = Dataset.from_list(countdown.dataset(tiny.problems("validation", 32), tokenizer))
    given = {"train_dataset": rows, "processing_class": tokenizer, "callbacks": [watch]}
    trainer = GRPOTrainer(str(tiny.bases_folder() / "A0"), reward, config, **given)
    with torch.random.fork_rng():
        trainer.train()
    logged = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
    return watch.policies, batches, logged


def ours(policy, batch, temperature=1.0):
    """Our measurement of one batch, and our view of it token by token."""
    reference, tokenizer = tiny.load("A0")
    prompts = Prompts([{"prompt": prompt} for prompt in batch[0]], tokenizer)
    samples = kl.samples(prompts.ids, prompts.mask, batch[1], [tokenizer.eos_token_id])
    compared = kl.compare(policy, reference, samples, temperature)
    return kl.measure(compared), compared


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7}, {"use_bias_correction_kl": True}])
def test_the_logged_kl_is_k3_per_token(tmp_path, settings):
    """On the policy's own samples the ratio of the bias correction is 1, so it shows in the gradient only."""
    settings = {"use_bias_correction_kl": False} | settings
    policies, batches, logged = train(tmp_path, **settings)
    assert len(policies) == len(batches) == len(logged) == 2
    lengths = np.array([len(ids) for ids in batches[0][1]])
    assert (lengths == 12).any() and (lengths < 12).any()
    temperature = settings.get("temperature", 1.0)
    measured = [ours(policy, batch, temperature)[0] for policy, batch in zip(policies, batches, strict=True)]
    assert logged == pytest.approx([m["k3_nats_per_token"] for m in measured], rel=1e-4) and min(logged) > 0.01
    assert [m["tokens"] for m in measured] == [sum(map(len, ids)) for _, ids in batches]
    # and it is none of the other numbers, so that the agreement says something
    for other in ("k1_nats_per_token", "k2_nats_per_token", "exact_nats_per_token", "k3_nats_per_sequence"):
        assert logged != pytest.approx([m[other] for m in measured], rel=1e-3)


@pytest.mark.parametrize("correction", [False, True])
def test_in_a_second_iteration_the_correction_weighs_each_token(tmp_path, correction):
    """The second step is made on samples of the weights before the first: k3, times the ratio where it is corrected."""
    policies, batches, logged = train(tmp_path, num_iterations=2, use_bias_correction_kl=correction)
    assert len(policies) == len(logged) == 2 and len(batches) == 1
    (_, old), (_, new) = (ours(policy, batches[0]) for policy in policies)
    k3 = kl.kl_policy_ref_tokens(new.log_policy, new.log_ref, new.mask).k3
    ratio = (new.log_policy - old.log_policy).exp()
    plain, weighted = (values[new.mask].mean().item() for values in (k3, k3 * ratio))
    assert abs(weighted / plain - 1) > 0.01
    assert logged[1] == pytest.approx(weighted if correction else plain, rel=1e-4)
