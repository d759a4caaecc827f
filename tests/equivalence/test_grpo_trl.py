"""TRL's losses are the ones that notebook 02 writes out: equal values and gradients, on the rollouts of a real step."""

import pytest
import torch
from evoalign_study.trl_loss import _log_probabilities as log_probabilities
from grpo_runs import built, rows
from helpers import written_out

GROUPS, G, LENGTH = 3, 4, 12


(grpo_loss,) = written_out("02_grpo_countdown", "grpo_loss")


def rollouts(folder, monkeypatch, arm, beta=0.0):
    """TRL's trainer after a step that moved nothing: what its loss was given, in groups, and the rewards.

    With a penalty, the reference is another model than the policy.
    """
    seen, rewards = [], []

    def reward(prompts, completions, **columns):
        rewards.extend(0.1 * len(text) + text.count("1") for text in completions)
        return rewards

    # TRL shuffles completions before it splits them into micro batches: here the groups stay together
    monkeypatch.setattr(f"trl.trainer.{'rloo' if arm == 'rloo' else 'grpo'}_trainer.shuffle_sequence_dict", dict)
    settings = {"seed": 1, "steps": 1, "prompts_per_step": GROUPS, "learning_rate": 1e-30, "logging_steps": 500}
    trainer, _ = built(folder, arm, reward, data=rows(GROUPS, 2), beta=beta, **settings)
    if beta:
        with torch.no_grad():
            trainer.ref_model.model.norm.weight.mul_(0.9)
    loss = trainer._compute_loss
    monkeypatch.setattr(trainer, "_compute_loss", lambda model, inputs: seen.append(inputs) or loss(model, inputs))
    trainer.train()
    monkeypatch.undo()
    (inputs,) = seen
    lengths = inputs["completion_mask"].sum(1)
    assert lengths.min() < lengths.max()
    return trainer, inputs, torch.tensor(rewards)


def assert_same(ours, theirs, model, rel: float) -> None:
    """Two losses have the same value and the same gradient."""
    assert ours.item() == pytest.approx(theirs.item(), rel=rel, abs=rel / 10)
    grads = (torch.autograd.grad(loss, list(model.parameters())) for loss in (ours, theirs))
    one, other = (torch.cat([part.flatten() for part in parts]) for parts in grads)
    assert (one - other).norm() < rel * other.norm() and other.norm() > 0


SLOW = [pytest.param(arm, marks=pytest.mark.slow) for arm in ("dr_grpo", "dapo")]


@pytest.mark.parametrize("arm", ["grpo", *SLOW])
def test_the_loss_of_the_notebook_is_the_one_of_trl(tmp_path, monkeypatch, arm):
    trainer, inputs, rewards = rollouts(tmp_path, monkeypatch, arm)
    model = trainer.model.train()
    policy = log_probabilities(model, inputs).detach()
    draw = torch.Generator().manual_seed(0)
    off = inputs | {
        "old_per_token_logps": policy + 0.3 * torch.randn(policy.shape, generator=draw),
        "ref_per_token_logps": policy + 0.5 * torch.randn(policy.shape, generator=draw),
    }
    on = inputs | {"ref_per_token_logps": off["ref_per_token_logps"]}
    for case, beta in ((on, 0.0), (off, 0.0), (off, 0.04), (on, 5.0)):
        trainer.beta = beta
        theirs = trainer._compute_loss(model, case)
        logp = log_probabilities(model, case)
        old = case.get("old_per_token_logps", logp.detach())
        terms = [x.view(GROUPS, G, -1) for x in (logp, old, case["ref_per_token_logps"])]
        mask = case["completion_mask"].view(GROUPS, G, -1)
        settings = {"loss_type": arm, "beta": beta, "max_length": LENGTH, "high": 0.28 if arm == "dapo" else 0.2}
        ours = grpo_loss(*terms, rewards.view(GROUPS, G), mask, **settings)
        assert_same(ours, theirs, model, 1e-5)
        if case is off:  # ratios on both sides of the clip, with advantages of both signs
            clipped = trainer._metrics["train"]["clip_ratio/region_mean"][-1]
            assert 0.1 < clipped < 0.9 and trainer._metrics["train"]["clip_ratio/low_mean"][-1] > 0
        if beta:
            log_r = terms[2] - terms[0]
            k3 = (((log_r.exp() - 1 - log_r) * mask).sum() / mask.sum()).item()
            assert trainer._metrics["train"]["kl"][-1] == pytest.approx(k3, rel=1e-5) and k3 > 0.01


def test_the_loss_of_rloo(tmp_path, monkeypatch):
    """A completion's reward less beta * k1 of its tokens, against the mean of the others of its group; not scaled."""
    beta = 0.5
    trainer, inputs, rewards = rollouts(tmp_path, monkeypatch, "rloo", beta)
    model, mask = trainer.model.train(), inputs["completion_mask"]
    policy, reference = (log_probabilities(m, inputs).detach() for m in (model, trainer.ref_model))
    k1 = ((policy - reference) * mask).sum(1)
    scores = (rewards - beta * k1).view(GROUPS, G)
    advantage = (scores - (scores.sum(1, keepdim=True) - scores) / (G - 1)).flatten()
    assert k1.abs().max() > 0.1
    torch.testing.assert_close(inputs["advantages"], advantage, rtol=1e-5, atol=1e-5)
    old = (policy * mask).sum(1) + 0.3 * torch.randn(GROUPS * G, generator=torch.Generator().manual_seed(0))
    for case in (inputs, inputs | {"old_logps": old}):
        theirs = trainer._compute_loss(model, case)
        ratio = ((log_probabilities(model, case) * mask).sum(1) - case["old_logps"]).exp()  # of whole completions
        ours = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        assert_same(ours, theirs, model, 1e-4)
