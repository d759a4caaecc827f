"""Estimators of KL(policy || ref) against enumeration, closed forms and autograd; their gradients as losses, too."""

import json
import math

import numpy as np
import pytest
import torch
from evoalign_study import sweep
from evoalign_study.kinds.exact import kl_specs
from helpers import random_model, tokenizer
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from transformers import GPT2Config, GPT2LMHeadModel

from evoalign_lib.analysis import gradient as enumerated
from evoalign_lib.analysis import kl
from evoalign_lib.engines.decode import Decoder, inversion

END, LENGTH, VOCABULARY = 0, 3, 8
PROMPTS = [[2, 3, 4], [5, 2], [3, 3, 6, 7]]
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 1, "eos_token_id": END, "pad_token_id": None, "spread": 0.3}


@pytest.fixture(scope="module")
def models():
    """A policy and a reference that share most of their weights."""
    policy, other, reference = (random_model(seed=seed, **SMALL) for seed in (0, 1, 0))
    with torch.no_grad():
        for p, q in zip(reference.parameters(), other.parameters(), strict=True):
            p.lerp_(q, 0.5)
    return policy, reference


def samples(prompts, completions, ends=(END,)):
    """Completions of prompts, which are padded here."""
    width = max(map(len, prompts))
    ids = [[1] * (width - len(p)) + p for p in prompts]
    return kl.samples(ids, [[0] * (width - len(p)) + [1] * len(p) for p in prompts], completions, ends)


def alone(model, prompt, completion, temperature=1.0):
    """Log-probabilities (tokens, vocabulary) of one completion by itself: no padding, no batch, float64."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    return (logits.double() / temperature).log_softmax(-1)


def sampled(model, n, seed):
    """n samples of each prompt in turn."""
    rng, completions = np.random.default_rng(seed), []
    decoder = Decoder(model.config, {k: p.detach() for k, p in model.named_parameters()}, [END], pad_id=1)
    for prompt in PROMPTS:
        ids = torch.tensor([prompt] * n)
        draw = inversion(torch.from_numpy(rng.random((n, LENGTH), dtype=np.float32)))
        completions.append(decoder.generate(ids, torch.ones_like(ids), LENGTH, draw).tolist())
    return samples(PROMPTS * n, [row[i] for i in range(n) for row in completions])


# logits of a policy and of a reference over one vocabulary
SIZES = st.tuples(st.just(2), st.integers(2, 6))
PAIRS = hnp.arrays(np.float64, SIZES, elements=st.floats(-6, 6)).map(torch.from_numpy)


# ---- estimators and exact value


@given(hnp.arrays(np.float64, (2, 3, 4), elements=st.floats(-3, 0)), hnp.arrays(bool, (3, 4)))
def test_masks(values, mask):
    spoiled = np.where(mask, values, [[[np.nan]], [[-np.inf]]])
    tokens, sequences = kl.kl_policy_ref_tokens(*spoiled, mask), kl.kl_policy_ref_sequences(*spoiled, mask)
    for k, known in zip(tokens, kl.kl_policy_ref_tokens(*values), strict=True):
        assert np.array_equal(k.numpy(), np.where(mask, known, 0))
    log_ratio = np.where(mask, values[1] - values[0], 0).sum(-1)
    by_hand = -log_ratio, log_ratio**2 / 2, np.exp(log_ratio) - 1 - log_ratio
    for k, known in zip(sequences, by_hand, strict=True):
        assert k.numpy() == pytest.approx(known)


# ---- gradients as losses


@given(PAIRS)
def test_gradients_of_the_losses_are_those_of_autograd(pair):
    """Each loss is differentiated at every token, held fixed, and the gradients are added up with its probability."""
    theta, log_ref = pair[0].requires_grad_(), pair[1].log_softmax(-1)
    p = theta.detach().softmax(-1)
    found = kl.loss_gradients(theta.detach(), pair[1])

    def expected(loss):
        total = torch.zeros_like(p)
        for x in range(len(p)):
            log_p = theta.log_softmax(-1)[x]
            total += p[x] * torch.autograd.grad(loss(log_p, log_ref[x]), theta)[0]
        return total

    tokens = kl.kl_policy_ref_tokens
    k1, k2, k3 = (expected(lambda a, b, name=name: getattr(tokens(a, b), name)) for name in kl.ESTIMATORS)
    k3_ratio = expected(lambda a, b: kl.kl_policy_ref_tokens(a, b).k3 * (a - a.detach()).exp())
    forward, true = (
        torch.autograd.grad(kl.exact_kl_policy_ref_tokens(*both), theta)[0]
        for both in ((log_ref, theta), (theta, log_ref))
    )
    rounding = 1e-12 * (1 + (log_ref - p.log()).max().exp().item())  # k3 adds ratios as large as that
    equal = [(found["k2"], k2), (found["k3"], k3), (k2, true), (k3_ratio, true), (k3, forward), (k1, 0 * k1)]
    for one, other in equal:
        assert one.numpy() == pytest.approx(other.numpy(), abs=rounding)


# ---- two models on completions


@pytest.mark.parametrize(("temperature", "elements"), [(1.0, None), (0.6, None), (1.0, 4 * 6 * 200)])
def test_log_probabilities_are_those_of_single_completions(temperature, elements, monkeypatch):
    """Whatever stands beside them, in blocks of rows, too; and of models with dropout, whose mode is left as it was."""
    policy, reference = random_model(attention_dropout=0.5).train(), random_model(seed=3)
    if elements:
        monkeypatch.setattr(kl, "_ELEMENTS", elements)
    rng = np.random.default_rng(0)
    prompts, completions = ([rng.integers(3, 200, n).tolist() for n in ns] for ns in ((3, 7, 1, 5, 5), (4, 1, 6, 0, 6)))
    end = tokenizer().eos_token_id
    completions[0][-1] = end
    ended = [completions[0] + [end, 9, end], *completions[1:]]  # padding, and what a sampler may leave behind the end
    found = kl.compare(policy, reference, samples(prompts, ended, {end}), temperature)
    assert policy.training and not reference.training and all(p.grad is None for p in policy.parameters())
    policy.eval()
    assert found.mask.sum(1).tolist() == [len(c) for c in completions]
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        n = len(completion)
        if n:
            one, other = (alone(model, prompt, completion, temperature) for model in (policy, reference))
            exact = (one.exp() * (one - other)).sum(-1)
            assert found.log_policy[row, :n].numpy() == pytest.approx(one[range(n), completion].numpy(), abs=1e-4)
            assert found.log_ref[row, :n].numpy() == pytest.approx(other[range(n), completion].numpy(), abs=1e-4)
            assert found.exact[row, :n].numpy() == pytest.approx(exact.numpy(), rel=1e-3)
        for values in (found.log_policy, found.log_ref, found.exact):
            assert not values[row, n:].any() and values.dtype == torch.float64


def test_padding_does_not_shift_absolute_positions():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16, "initializer_range": 0.5}
        policy = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes)).eval()
    completions = [[3, 4], [5, END], [6, 7]]
    found = kl.compare(policy, policy, samples(PROMPTS, completions))
    for row, (prompt, completion) in enumerate(zip(PROMPTS, completions, strict=True)):
        known = alone(policy, prompt, completion)[range(2), completion]
        assert found.log_policy[row].numpy() == pytest.approx(known.numpy(), abs=1e-4)


# ---- for records


def test_measure_is_pooled_over_tokens_and_averaged_over_sequences(models):
    """By hand, from two completions of different length, and of an empty one."""
    completions = [[3, END], [4, 5, 6]]
    one, other = ([alone(m, *pair) for pair in zip(PROMPTS, completions, strict=False)] for m in models)
    d = [(a - b)[range(len(c)), c] for a, b, c in zip(one, other, completions, strict=True)]
    exact = torch.stack([(a.exp() * (a - b)).sum() for a, b in zip(one, other, strict=True)])
    by_hand = {"tokens": 5, "sequences": 2, "exact_nats_per_token": exact.sum() / 5}
    by_hand["exact_nats_per_sequence"] = exact.mean()
    for unit, x in (("token", torch.cat(d)), ("sequence", torch.stack([each.sum() for each in d]))):
        estimates = {"k1": x.mean(), "k2": (x**2).mean() / 2, "k3": ((-x).exp() - 1 + x).mean()}
        by_hand |= {f"{name}_nats_per_{unit}": value for name, value in estimates.items()}
    found = kl.measure(kl.compare(*models, samples(PROMPTS[:2], completions)))
    assert found == pytest.approx({k: float(v) for k, v in by_hand.items()}, rel=1e-4)
    beside = kl.measure(kl.compare(*models, samples(PROMPTS, [*completions, []])))
    assert beside["tokens"] == 5 and beside["k3_nats_per_token"] == pytest.approx(found["k3_nats_per_token"], rel=1e-4)
    assert beside["k3_nats_per_sequence"] == pytest.approx(found["k3_nats_per_sequence"] * 2 / 3, rel=1e-4)


def test_what_has_no_kl(models):
    """A policy that has not moved, completions that are empty, none at all, and a policy that diverged."""
    same = kl.measure(kl.compare(models[0], models[0], sampled(models[0], 4, seed=1)))
    assert same.pop("tokens") > same.pop("sequences") == 12 and set(same.values()) == {0.0}
    none = kl.measure(kl.compare(*models, samples(PROMPTS, [[], [], []])))
    assert none.pop("tokens") == 0 and none.pop("sequences") == 3
    assert none == {name: 0.0 if "sequence" in name else None for name in none}
    nobody = kl.measure(kl.compare(*models, kl.samples(np.zeros((0, 3), int), np.zeros((0, 3), int), [], [END])))
    assert nobody["sequences"] == 0 and nobody["exact_nats_per_sequence"] is None
    broken = random_model(seed=0, **SMALL)
    with torch.no_grad():
        broken.model.norm.weight.fill_(math.nan)
    found = kl.measure(kl.compare(broken, models[1], samples(PROMPTS, [[3, END]] * 3)))
    assert found["tokens"] == 6 and found["k1_nats_per_token"] is found["exact_nats_per_sequence"] is None
    json.dumps(found, allow_nan=False)


def test_errors_of_the_estimators_by_hand():
    mask = torch.tensor([[True, True], [True, False]])
    zero = torch.zeros(2, 2, dtype=torch.float64)
    log_ref = torch.tensor([[-1.0, 1.0], [-2.0, 9.0]], dtype=torch.float64).masked_fill(~mask, 0)
    exact = torch.tensor([[0.5, 0.25], [0.75, 0.0]], dtype=torch.float64)
    found = kl.estimator_errors(kl.Comparison(zero, log_ref, exact, mask))
    d = np.array([1.0, -1.0, 2.0])
    k3 = np.exp(-d) - 1 + d
    by_hand = {"exact_token_mean": 0.5, "exact_token_std": 0.25, "exact_sequence_mean": 0.75, "exact_sequence_std": 0}
    by_hand |= {"k1_token_bias": 2 / 3 - 0.5, "k1_token_std": d.std(ddof=1), "k2_token_bias": 1 - 0.5}
    by_hand |= {"k3_token_std": k3.std(ddof=1), "k3_sum_bias": k3.sum() / 2 - 0.75, "k2_sum_std": math.sqrt(0.5)}
    by_hand |= {"k3_sequence_bias": k3[2] / 2 - 0.75}
    by_hand |= dict.fromkeys(("k1_sum_std", "k1_sequence_std", "k2_sequence_std"), math.sqrt(2))
    assert {name: found[name] for name in by_hand} == pytest.approx(by_hand) and len(found) == 4 + 3 * 3 * 2


# ---- gradients of models


@pytest.fixture(scope="module")
def gradients(models):
    """Batches of gradients, each from samples of its own."""
    return [kl.parameter_gradients(*models, sampled(models[0], 400, seed)) for seed in range(8)]


@pytest.fixture(scope="module")
def exact(models):
    """The true gradients, and those of k3 as a loss, by enumeration and autograd alone."""
    policy, reference = models
    full = enumerated.enumerate_completions(policy, PROMPTS, eos_ids=[END], max_new_tokens=LENGTH, min_probability=0.0)
    values = dict.fromkeys(("token", "sequence", "k3"), 0.0)
    for prompt in range(len(PROMPTS)):
        completions = torch.from_numpy(full.tokens[full.prompt == prompt]).long()
        mask, start = completions >= 0, len(PROMPTS[prompt]) - 1
        ids = torch.cat([torch.tensor([PROMPTS[prompt]]).repeat(len(completions), 1), completions.clamp(min=0)], 1)
        log_p, log_q = (model(input_ids=ids).logits[:, start:-1].double().log_softmax(-1) for model in models)
        token = completions.clamp(min=0)[..., None]
        log_tokens = (log_p.gather(-1, token)[..., 0] * mask).sum(-1)
        d = (log_p - log_q.detach()).gather(-1, token)[..., 0] * mask
        p, held = log_tokens.exp(), log_tokens.detach().exp()
        values["sequence"] += (p * d.sum(-1)).sum()
        values["token"] += (held * ((log_p.exp() * (log_p - log_q.detach())).sum(-1) * mask).sum(-1)).sum()
        values["k3"] += (held * ((-d).exp() - 1 + d).sum(-1)).sum()
    found = {}
    for name, value in values.items():
        parts = torch.autograd.grad(value / len(PROMPTS), list(policy.parameters()), retain_graph=True)
        found[name] = torch.cat([part.flatten() for part in parts])
    return found


def test_gradients_of_samples_are_those_of_all_completions(exact, gradients):
    known = {name: exact[name] for name in ("token", "sequence", "k3")}
    known |= {"k2": exact["token"], "k2_sampled": exact["token"], "k3_sampled": exact["k3"]}
    known |= {"k1_sampled": torch.zeros_like(exact["token"])}
    assert gradients[0].keys() == known.keys()
    for name, true in known.items():
        batches = torch.stack([batch[name] for batch in gradients])
        error = batches.std(0).norm().item() / math.sqrt(len(batches))
        assert (batches.mean(0) - true).norm() < 1.6 * error + 1e-5, name
        assert error < 0.2 * exact["token"].norm() or name == "k1_sampled"
    # and these errors are small against what tells the gradients apart
    error = torch.stack([batch["sequence"] for batch in gradients]).std(0).norm().item() / math.sqrt(len(gradients))
    assert (exact["sequence"] - exact["token"]).norm() > 4 * error
    assert (exact["k3"] - exact["token"]).norm() > 4 * error


# ---- records

SETTINGS = {"max_completion_length": 16, "kl_problems": 8, "kl_samples": 4}


def test_the_record_of_the_estimators():
    spec, other = kl_specs("A0", 0.01, 2, SETTINGS, "smoke")
    [far] = kl_specs("A0", 0.03, 1, SETTINGS, "smoke")
    one, again, second, moved = (sweep.run(s, "nb", "commit")["kl"] for s in (spec, spec, other, far))
    json.dumps(one, allow_nan=False)
    assert one == again and one != second
    assert one["sequences"] == 32 and 32 < one["tokens"] <= 32 * 16
    assert one["exact_sequence_mean"] * 32 == pytest.approx(one["exact_token_mean"] * one["tokens"], rel=1e-4)
    assert 0 < 5 * one["exact_token_mean"] < moved["exact_token_mean"]
    assert one["k2_gradient_token_cosine"] == pytest.approx(1, abs=1e-4) and one["k1_gradient_token_cosine"] is None
    assert -1 <= one["k3_gradient_sequence_cosine"] <= 1
