"""KL divergence of a policy from a reference: three estimators, the exact value, and the gradients of each as a loss.

The divergence is always KL(policy || ref) = E[log policy(x) - log ref(x)] for x drawn from the policy, in nats. With
r = ref(x) / policy(x), the estimators of J. Schulman, "Approximating KL Divergence" (2020), are

    k1 = -log r              unbiased, of either sign
    k2 = (log r)^2 / 2       biased, never negative
    k3 = (r - 1) - log r     unbiased, never negative, with a heavy tail where ref(x) >> policy(x)

Tokens and sequences. A token's KL is that of the next token's distribution, given the tokens before it; the KL of a
sequence is the expected sum of its tokens' KL. The ratio of a sequence is the product of its tokens' ratios, so k1 of
the sequence is the sum of its tokens' k1. This is not so for k3: k3 of the sequence's ratio (`kl_policy_ref_sequences`)
and the sum of the tokens' k3 (`kl_policy_ref_tokens(...).k3.sum(-1)`) both estimate the KL without bias, but the first
has the heavy tail of a product of many ratios. The sum of the tokens' exact KL at the sampled prefixes replaces each
log ratio by its expectation given the prefix (Rao-Blackwell, token by token): it is also unbiased, and usually, but not
always, varies less than k1.

Losses. With S = grad log policy(x), and the sample x held fixed as in any training step, the gradients of k1, k2 and k3
are S, log(policy/ref) S and (1 - r) S. Their expectations over the policy are 0, the gradient of KL(policy || ref), and
the gradient of KL(ref || policy): k3 is unbiased as a value, but its gradient is that of another divergence. k3 times
the ratio policy / old policy of an importance-weighted loss (TRL's use_bias_correction_kl) has, sample by sample, the
gradient of k2 where the two policies are equal. For sequences all this holds given the prefixes; `parameter_gradients`
explains what a sum over tokens leaves out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from evoalign_lib.checks import require

ESTIMATORS = ("k1", "k2", "k3")

_ELEMENTS = 1 << 22  # in the logits of one forward pass; 32 MB each for half a dozen float64 tensors


class Estimates(NamedTuple):
    """Three estimates of KL(policy || ref) from the same samples, nats; see the module."""

    k1: Tensor
    k2: Tensor
    k3: Tensor


class Comparison(NamedTuple):
    """Log-probabilities and KL of sampled completions: (rows, tokens) tensors on the CPU, 0 outside the mask."""

    log_policy: Tensor
    """float64, log-probability of each token under the policy, nats"""
    log_ref: Tensor
    """float64, the same under the reference"""
    exact: Tensor
    """float64, KL(policy || ref) over the vocabulary at each token's prefix, nats per token"""
    mask: Tensor
    """bool, whether a position is a token of the completion, the end token included"""


# ---- estimators


def kl_policy_ref_tokens(log_policy: ArrayLike, log_ref: ArrayLike, mask: ArrayLike | None = None) -> Estimates:
    """Estimate KL(policy || ref) from each token that the policy sampled.

    Args:
        log_policy: log-probabilities of the sampled tokens under the policy, nats, any shape; gradients pass through.
        log_ref: the same under the reference.
        mask: which tokens count, of the same shape; None: all. Values outside it may be anything, including NaN.

    Returns:
        Estimates of the same shape, float64, nats per token, 0 outside the mask.

    >>> policy, reference = torch.tensor([[0.5, 0.5], [0.25, 1.0]]).double().log()
    >>> k1, k2, k3 = kl_policy_ref_tokens(policy, reference)
    >>> [[round(x, 4) for x in k.tolist()] for k in (k1, k2, k3)]
    [[0.6931, -0.6931], [0.2402, 0.2402], [0.1931, 0.3069]]
    """
    difference = torch.as_tensor(log_policy).double() - torch.as_tensor(log_ref).double()
    if mask is not None:
        difference = torch.where(torch.as_tensor(mask).bool(), difference, 0.0)
    # expm1 gives r - 1 without rounding r, which matters for ratios near 1
    return Estimates(difference, difference**2 / 2, torch.expm1(-difference) + difference)


def kl_policy_ref_sequences(log_policy: ArrayLike, log_ref: ArrayLike, mask: ArrayLike | None = None) -> Estimates:
    """Estimate KL(policy || ref) from the ratio of each whole sequence, instead of summing its tokens' estimates.

    Args:
        log_policy, log_ref, mask: (..., tokens), as for `kl_policy_ref_tokens`.

    Returns:
        Estimates (...), float64, nats per sequence.
    """
    difference = kl_policy_ref_tokens(log_policy, log_ref, mask).k1.sum(-1)
    return kl_policy_ref_tokens(difference, torch.zeros_like(difference))


def exact_kl_policy_ref_tokens(policy_logits: Tensor, ref_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the exact KL(policy || ref) over the whole vocabulary, at each position.

    Args:
        policy_logits: (..., vocabulary), of any floating dtype; gradients pass through.
        ref_logits: the same for the reference.
        temperature: sampling temperature, by which both logits are divided.

    Returns:
        float64 (...), nats per token. Infinite where the policy gives probability to a token that the reference
        excludes.

    Raises:
        ValueError: logits of different shapes, or a temperature that is not positive (see `check_sampling`).

    >>> exact_kl_policy_ref_tokens(torch.tensor([0.0, 0.0]), torch.tensor([0.0, math.log(3)])).item()  # log(2/sqrt(3))
    0.143841...
    """
    log_policy, log_ref = _of_both(policy_logits, ref_logits, temperature)
    p = log_policy.exp()
    return (p * torch.where(p > 0, log_policy - log_ref, 0.0)).sum(-1)


def check_sampling(temperature: float) -> None:
    """Check that KL(policy || ref) can be measured at a temperature.

    Raises:
        ValueError: a temperature that is not positive and finite, such as 0 for greedy decoding.
    """
    why = "greedy decoding (0) puts all probability on one token, so the KL is 0 or infinite. Measure it on samples."
    require(0 < temperature < math.inf, f"temperature={temperature!r} must be positive and finite: {why}")


# ---- gradients as losses


def loss_gradients(policy_logits: Tensor, ref_logits: Tensor) -> dict[str, Tensor]:
    """Return the expected gradients of k2 and k3 as losses, for a policy softmax(logits) and a token drawn from it.

    The loss is differentiated with the token held fixed, then averaged over the policy: E[f(x) grad log policy(x)] =
    p (f - E f), with f = log(policy/ref) for k2 and 1 - r for k3. For k1, f = 1 and the gradient is 0.

    Args:
        policy_logits: (..., vocabulary), finite.
        ref_logits: the same for the reference.

    Returns:
        Gradients with respect to the policy's logits, float64 (..., vocabulary), nats: "k2", the gradient of
        KL(policy || ref), and "k3", the gradient of KL(ref || policy), which is p - ref.

    Raises:
        ValueError: logits of different shapes.
    """
    log_policy, log_ref = _of_both(policy_logits, ref_logits)
    p, difference = log_policy.exp(), log_policy - log_ref

    def expected(f: Tensor) -> Tensor:
        return p * (f - (p * f).sum(-1, keepdim=True))

    return {"k2": expected(difference), "k3": expected(-torch.expm1(-difference))}


def parameter_gradients(policy: Any, reference: Any, samples: Samples) -> dict[str, Tensor]:
    """Return the gradients of KL(policy || ref) and of the estimators as losses, for all weights of the policy.

    Losses are sums over the tokens of a sequence, averaged over sequences, at temperature 1. (TRL divides by a number
    of tokens; if it is the same for the whole batch, only the gradient's length changes.) There are two true gradients.
    With s_t the prefix of token t and KL_t its exact KL,

        token      E[sum_t grad KL_t(s_t)]: each token's KL, the prefixes held fixed where they were sampled;
        sequence   token + E[sum_t (KL_t+1 + KL_t+2 + ...) grad log policy(token t | s_t)]: grad KL of the sequence.

    The second term is what a policy gains by moving towards prefixes after which it differs less from the reference. A
    sum over tokens of k1, k2 or k3 misses it, with or without each token's ratio. (k2 of the sequence's ratio includes
    it: its expected gradient is "sequence".) It is estimated here with the mean of the other rows as baseline.

    Args:
        policy: a Hugging Face decoder-only model; its weights and their `grad` do not change.
        reference: another such model, with the same vocabulary.
        samples: completions that the policy sampled at temperature 1.

    Returns:
        float32 (weights,) vectors, nats per weight unit, in the order of `policy.parameters()`: "token" and "sequence";
        "k2" and "k3", the expectation over each token given its prefix (0 for k1); "k1_sampled", "k2_sampled" and
        "k3_sampled", for the sampled tokens. All are averages over the given rows.

    Raises:
        ValueError: different vocabularies, or no token at all.
    """
    n = len(samples.mask)
    require(samples.mask.any(), f"none of the {n} completions has a token: pass some that are not empty.")
    parameters = list(policy.parameters())
    with _evaluation(policy, reference):
        logits = _logits(policy, samples)
        with torch.no_grad():
            ref_logits = _logits(reference, samples).to(logits.device)
    mask, ids = samples.mask.to(logits.device), samples.ids.to(logits.device)
    exact = torch.where(mask, exact_kl_policy_ref_tokens(logits, ref_logits), 0.0)
    log_policy, log_ref = _of_tokens(_log_softmax(logits), ids), _of_tokens(_log_softmax(ref_logits), ids)
    with torch.no_grad():
        to_go = exact.flip(1).cumsum(1).flip(1) - exact
        others = (to_go.sum(0) - to_go) / (mask.sum(0) - 1).clamp(min=1)
        expected = loss_gradients(logits, ref_logits)
    losses = {"token": exact.sum(), "prefixes": ((to_go - others) * torch.where(mask, log_policy, 0.0)).sum()}
    sampled = kl_policy_ref_tokens(log_policy, log_ref, mask)
    losses |= {f"{k}_sampled": values.sum() for k, values in zip(ESTIMATORS, sampled, strict=True)}

    def flat(output: Tensor, weight: Tensor | None = None) -> Tensor:
        parts = torch.autograd.grad(output, parameters, weight, retain_graph=True)
        return torch.cat([part.flatten() for part in parts]).float() / n

    gradients = {name: flat(loss) for name, loss in losses.items()}
    for name in ("k2", "k3"):
        gradients[name] = flat(logits, torch.where(mask[..., None], expected[name], 0.0).to(logits.dtype))
    gradients["sequence"] = gradients["token"] + gradients.pop("prefixes")
    return gradients


# ---- models


class Samples(NamedTuple):
    """Completions of prompts as tensors on the CPU; made by `samples`."""

    prompt_ids: Tensor
    """(rows, width), padded on the left."""
    prompt_mask: Tensor
    """(rows, width), 1 at the prompt's tokens."""
    ids: Tensor
    """(rows, tokens) of the completions, up to and including the end token, padded on the right."""
    mask: Tensor
    """bool (rows, tokens), True at the completions' tokens."""

    def take(self, rows: slice) -> Samples:
        """Return some of the rows, trimmed to their longest completion."""
        longest = int(self.mask[rows].sum(1).max())
        parts = (self.ids[rows, :longest], self.mask[rows, :longest])
        return Samples(self.prompt_ids[rows], self.prompt_mask[rows], *parts)


def samples(
    prompt_ids: ArrayLike, prompt_mask: ArrayLike, completion_ids: Sequence[Sequence[int]], eos_ids: Collection[int]
) -> Samples:
    """Check completions of prompts and return them in the form that this module's functions take.

    Args:
        prompt_ids: (rows, width) ids, padded on the left, as `Prompts.ids`.
        prompt_mask: (rows, width) 1 at the prompt's tokens, 0 at padding.
        completion_ids: (rows) ids of each completion. Anything after the first end token is dropped, so rows may be
            padded; a completion that was cut off has no end token, an empty one no tokens.
        eos_ids: ids that end a completion; the end token is part of it.

    Raises:
        ValueError: arrays that do not fit together, or prompts that are not padded on the left.
    """
    prompt_ids, prompt_mask = torch.as_tensor(prompt_ids).cpu(), torch.as_tensor(prompt_mask).long().cpu()
    shapes = f"{tuple(prompt_ids.shape)} and {tuple(prompt_mask.shape)}"
    same = prompt_ids.ndim == 2 and prompt_ids.shape == prompt_mask.shape
    require(same, f"prompt_ids and prompt_mask must have the same shape (rows, width), got {shapes}.")
    n, prompts = len(completion_ids), len(prompt_ids)
    require(n == prompts, f"{n} completions do not fit {prompts} prompts: pass one prompt per completion.")
    left = (prompt_mask[:, -1:] == 1).all() and (prompt_mask.diff(dim=1) >= 0).all()
    require(left, "every prompt must be padded on the left and have at least one token: check prompt_mask.")
    ends = frozenset(eos_ids)
    kept = [_until_end(ids, ends) for ids in completion_ids]
    lengths = torch.tensor([len(ids) for ids in kept], dtype=torch.int64)
    mask = torch.arange(max(map(len, kept), default=0)) < lengths[:, None]
    ids = torch.zeros(mask.shape, dtype=torch.int64)  # a position outside the mask may hold any id
    ids[mask] = torch.tensor([token for row in kept for token in row], dtype=torch.int64)
    return Samples(prompt_ids, prompt_mask, ids, mask)


def compare(policy: Any, reference: Any, samples: Samples, temperature: float = 1.0) -> Comparison:
    """Return log-probabilities of sampled completions under two models, and the exact KL at every token.

    Each model does one forward pass, in blocks of rows if the logits are large, in evaluation mode (no dropout).

    Args:
        policy: the Hugging Face decoder-only model that sampled the completions.
        reference: another such model, with the same vocabulary.
        samples: completions that the policy sampled.
        temperature: sampling temperature; sampling must not use top-k, top-p or min-p, which make the KL infinite.

    Returns:
        The comparison, as wide as the longest completion.

    Raises:
        ValueError: different vocabularies, or a temperature that is not positive.
    """
    check_sampling(temperature)
    exact, log_policy, log_ref = (torch.zeros(samples.mask.shape, dtype=torch.float64) for _ in range(3))
    with torch.inference_mode(), _evaluation(policy, reference):
        for at, part in _blocks(samples, policy):
            logits = _logits(policy, part)
            ref_logits = _logits(reference, part).to(logits.device)
            exact[at] = exact_kl_policy_ref_tokens(logits, ref_logits, temperature).cpu()
            for values, z in ((log_policy, logits), (log_ref, ref_logits)):
                values[at] = _of_tokens(_log_softmax(z, temperature), part.ids.to(z.device)).cpu()
    outside = ~samples.mask
    return Comparison(*(x.masked_fill_(outside, 0.0) for x in (log_policy, log_ref, exact)), samples.mask)


def log_probabilities(model: Any, samples: Samples, temperatures: Sequence[float] = (1.0,)) -> Tensor:
    """Return the log-probabilities of given completions under a model, at several temperatures.

    One forward pass over the completions serves all temperatures.

    Args:
        model: a Hugging Face decoder-only model.
        samples: completions from any model. For a completion with an end token, the probability is that of sampling
            exactly this completion.
        temperatures: sampling temperatures, without top-k, top-p or min-p.

    Returns:
        float64 (temperatures, rows), on the CPU: the sum of the log-probabilities of each completion's tokens, nats.

    Raises:
        ValueError: a temperature that is not positive.
    """
    for temperature in temperatures:
        check_sampling(temperature)
    found = torch.zeros((len(temperatures), len(samples.ids)), dtype=torch.float64)
    with torch.inference_mode(), _evaluation(model):
        for at, part in _blocks(samples, model):
            logits = _logits(model, part)
            ids, mask = part.ids.to(logits.device), part.mask.to(logits.device)
            exact = logits.double()
            for i, temperature in enumerate(temperatures):
                scaled = exact if temperature == 1 else exact / temperature
                tokens = _of_tokens(scaled, ids) - scaled.logsumexp(-1)
                found[i, at] = torch.where(mask, tokens, 0.0).sum(-1).cpu()
    return found


def measure(found: Comparison) -> dict[str, float | int | None]:
    """Return mean estimates of KL(policy || ref) from completions that the policy sampled, for a record.

    Args:
        found: the result of `compare`.

    Returns:
        "tokens" and "sequences", their numbers; "k1_nats_per_token", ..., "exact_nats_per_token", means over all
        tokens; "k1_nats_per_sequence", ..., means over sequences of the estimators of the sequence's ratio, and
        "exact_nats_per_sequence", of the sum of the tokens' exact KL. (The sum of the tokens' k3 is k3_nats_per_token *
        tokens / sequences.) None if there is nothing to average, or if the mean is not finite, as for a diverged
        policy, since JSON has no such numbers.
    """
    tokens, sequences = int(found.mask.sum()), len(found.mask)

    def mean(values: Tensor, n: int) -> float | None:
        value = values.sum().item() / n if n else math.nan
        return value if math.isfinite(value) else None

    arguments, result = (found.log_policy, found.log_ref, found.mask), {"tokens": tokens, "sequences": sequences}
    units = (("token", tokens, kl_policy_ref_tokens), ("sequence", sequences, kl_policy_ref_sequences))
    for unit, n, estimate in units:
        estimates = estimate(*arguments)._asdict() | {"exact": found.exact}
        result |= {f"{name}_nats_per_{unit}": mean(values, n) for name, values in estimates.items()}
    return result


def estimator_errors(comparison: Comparison) -> dict[str, float]:
    """Return bias and standard deviation of the estimators of KL(policy || ref) on sampled completions, nats.

    Biases are relative to the exact KL at the same prefixes, so their only noise is that of the sampled tokens.
    Standard deviations are over tokens or sequences and include the differences between prefixes and prompts.

    Args:
        comparison: comparison of at least two completions.

    Returns:
        "exact_token_mean" and "_std"; "exact_sequence_mean" and "_std" (sums of the tokens' exact KL); for each of k1,
        k2 and k3 "k1_token_bias" and "_std", per token; "k1_sum_bias" and "_std", of the sum over a sequence's tokens;
        "k1_sequence_bias" and "_std", of the sequence's ratio.

    Raises:
        ValueError: fewer than two completions, or fewer than two tokens in all of them together.
    """
    n, tokens = len(comparison.mask), int(comparison.mask.sum())
    require(min(n, tokens) > 1, f"{n} completions of {tokens} tokens have no standard deviation: pass 2 of each.")
    arguments = comparison.log_policy, comparison.log_ref, comparison.mask
    tokens, sequences = kl_policy_ref_tokens(*arguments), kl_policy_ref_sequences(*arguments)
    exact = {"token": comparison.exact[comparison.mask], "sequence": comparison.exact.sum(-1)}
    result = {}
    for level, values in exact.items():
        result |= {f"exact_{level}_mean": values.mean().item(), f"exact_{level}_std": values.std().item()}
    for name in ESTIMATORS:
        values = getattr(tokens, name)
        levels = {"token": values[comparison.mask], "sum": values.sum(-1), "sequence": getattr(sequences, name)}
        for level, values in levels.items():
            true = exact["token" if level == "token" else "sequence"]
            result[f"{name}_{level}_bias"] = (values - true).mean().item()
            result[f"{name}_{level}_std"] = values.std().item()
    return result


def gradient_errors(policy: Any, reference: Any, samples: Samples) -> dict[str, float | None]:
    """Return how far each estimator's gradient as a loss is from the true gradients (see `parameter_gradients`).

    Args:
        policy, reference, samples: as for `parameter_gradients`; the two halves of the rows should have the same
            prompts.

    Returns:
        "gradient_token_norm" and "gradient_sequence_norm", the norms of the two true gradients, nats per weight unit;
        "gradient_sequence_noise", the standard error of the second (from the halves' difference in the term that only
        it has) over its norm. For k1, k2 and k3, averaged over each token given its prefix: "k1_gradient_token_cosine"
        and "_norm_ratio" against the first, "k1_gradient_sequence_cosine" and "_norm_ratio" against the second;
        "k1_gradient_noise", the norm of the sampled tokens' deviation from this average over the norm of the first. The
        gradient of k1 is 0, so its cosines are None.

    Raises:
        ValueError: as for `parameter_gradients`, or an odd number of completions or none.
    """
    half, rest = divmod(len(samples.ids), 2)
    require(half and not rest, f"{len(samples.ids)} completions do not make two halves: pass an even number of them.")
    parts = slice(half), slice(half, None)
    halves = [parameter_gradients(policy, reference, samples.take(part)) for part in parts]
    mean = {name: (halves[0][name].double() + halves[1][name].double()) / 2 for name in halves[0]}
    one, other = (gradients["sequence"] - gradients["token"] for gradients in halves)
    result: dict[str, float | None] = {f"gradient_{name}_norm": mean[name].norm().item() for name in _TRUE}
    result["gradient_sequence_noise"] = ((one - other).norm() / 2 / mean["sequence"].norm()).item()
    for name in ESTIMATORS:
        expected = mean[name] if name in mean else torch.zeros_like(mean["token"])
        for true in _TRUE:
            ratio = (expected.norm() / mean[true].norm()).item()
            cosine = (expected @ mean[true] / (expected.norm() * mean[true].norm())).item() if ratio else None
            result |= {f"{name}_gradient_{true}_cosine": cosine, f"{name}_gradient_{true}_norm_ratio": ratio}
        noise = mean[f"{name}_sampled"] - expected
        result[f"{name}_gradient_noise"] = (noise.norm() / mean["token"].norm()).item()
    return result


_TRUE = ("token", "sequence")


def _blocks(rows: Samples, model: Any) -> Iterator[tuple[slice, Samples]]:
    """Yield blocks of rows that fit into one forward pass, each with its slice."""
    size = max(1, _ELEMENTS // max(1, rows.ids.shape[1] * model.config.vocab_size))
    for start in range(0, len(rows.ids) if rows.mask.any() else 0, size):
        at = slice(start, start + size)
        yield at, Samples(*(tensor[at] for tensor in rows))


def _until_end(ids: Sequence[int], eos_ids: frozenset[int]) -> list[int]:
    """Return a completion up to and including its first end token."""
    kept = list(map(int, ids))
    return kept[: next((i for i, token in enumerate(kept, 1) if token in eos_ids), None)]


def _logits(model: Any, rows: Samples) -> Tensor:
    """Return (rows, tokens, vocabulary), the logits from which each token of the completions was drawn."""
    attention = torch.cat([rows.prompt_mask, rows.mask.long()], 1).to(model.device)
    return model(
        input_ids=torch.cat([rows.prompt_ids, rows.ids], 1).to(model.device),
        attention_mask=attention,
        position_ids=(attention.cumsum(1) - 1).clamp_(min=0),
        use_cache=False,
        logits_to_keep=rows.ids.shape[1] + 1,
    ).logits[:, :-1]


def _log_softmax(logits: Tensor, temperature: float = 1.0) -> Tensor:
    check_sampling(temperature)
    return (logits.double() / temperature).log_softmax(-1)


def _of_tokens(log_probabilities: Tensor, ids: Tensor) -> Tensor:
    return log_probabilities.gather(-1, ids[..., None])[..., 0]


def _of_both(policy_logits: Tensor, ref_logits: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return both models' log-probabilities over their common vocabulary."""
    shapes = f"{tuple(policy_logits.shape)} and {tuple(ref_logits.shape)}"
    same = policy_logits.shape == ref_logits.shape
    require(same, f"logits have the shapes {shapes}: use a policy and reference with one vocabulary, without padding.")
    return _log_softmax(policy_logits, temperature), _log_softmax(ref_logits, temperature)


@contextmanager
def _evaluation(*models: Any) -> Iterator[None]:
    """Put models into evaluation mode, and restore their modes afterwards."""
    training = [model.training for model in models]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for model, mode in zip(models, training, strict=True):
            model.train(mode)
