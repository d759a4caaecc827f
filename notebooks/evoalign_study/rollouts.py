"""Rollouts of one method with updates of the other: a policy gradient on perturbed members' rollouts, and the reverse.

ES generates with perturbed weights and weights the perturbations by their rewards; a policy gradient generates with the
weights themselves, at temperature 1, and weights the completions. This module separates the two. The writer of a
completion y to a prompt has a likelihood for it, and another model uses it with the importance ratio of sequences,
p(y) / p_writer(y), clipped at `CLIP`:

- `PerturbedRollouts`: each completion of a group comes from a different member, theta + sigma eps, sampled at
  temperature 1. A completion's advantage is multiplied by min(p_theta / p_member, CLIP); the rest is GRPO.
- `WeightedTrainer`: theta itself samples every completion, and a member's fitness is the mean over prompts of
  sum_j w_j r_j / sum_j w_j, with w_j = min(p_member(y_j) / p_theta(y_j), CLIP) (self-normalised: Owen, Monte Carlo
  theory, methods and examples, 2013, section 9.2). To first order in sigma this is sigma eps times the policy gradient
  from the same completions, with a group's mean reward as baseline. The rest is ES.

Both record an effective sample size: (sum w)^2 / (n sum w^2) of the clipped ratios, over all completions of a step
together, as a share of them (Kish 1965). The members of `PerturbedRollouts` sample with different random numbers, those
of ES with sampled fitness with common ones.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from evoalign_lib import ledger, noise
from evoalign_lib.analysis import coverage, kl
from evoalign_lib.checks import require
from evoalign_lib.engines.base import Prompts, score
from evoalign_lib.es import ESTrainer
from evoalign_lib.precision import copy_to
from evoalign_lib.update_rules import Member

CLIP = 2.0
"""The largest importance ratio, which bounds the effect of a single completion, as in Ionides, Journal of Computational
and Graphical Statistics 2008. Larger ratios are counted."""
TOLD = ("effective_share", "clipped_share", "mean_ratio")
"""Statistics of a run's importance ratios that are recorded."""


def clipped(log_ratios: np.ndarray) -> tuple[np.ndarray, dict[str, float]]:
    """Return importance ratios, clipped at `CLIP`, and statistics of them.

    Args:
        log_ratios: (completions,), nats; values that are not finite give a ratio of 0.

    Returns:
        float64 (completions,) ratios; and "effective_share", their effective sample size over the number of
        completions, "clipped_share", the share of completions whose ratio exceeded `CLIP`, and "mean_ratio", the mean
        of the clipped ratios.
    """
    known = np.isfinite(log_ratios)  # a diverged model gives no likelihoods, so its completions get no weight
    ratios = np.where(known, np.exp(np.clip(np.where(known, log_ratios, 0.0), -700.0, 50.0)), 0.0)
    found = np.minimum(ratios, CLIP)
    effective = float(np.nan_to_num(coverage.effective_samples(found)))
    told = {"effective_share": effective / len(found), "clipped_share": float(np.mean(ratios > CLIP))}
    return found, told | {"mean_ratio": float(found.mean())}


# ---- a policy gradient on rollouts of perturbed members


class PerturbedRollouts(TrainerCallback, ExportableState):
    """Rollouts for a policy gradient, written by perturbed members: one member for each position in a group.

    It serves as TRL's `rollout_func`, called with the prompts of a step, each repeated once per member of the group;
    and as a callback, whose counts are saved in checkpoints. All members of a step answer all of its prompts once each,
    as in ES.

    Args:
        engine: decodes with the weights of the run; its master is perturbed and restored.
        arm, seed: arm and seed of the run key, as for an ES run (`noise.run_key`).
        sigma: standard deviation of the noise, weight units.
        num_generations: completions per prompt, and members per step.
        take: copies the weights of the model being trained into the engine.
    """

    def __init__(self, engine: Any, arm: str, seed: int, sigma: float, num_generations: int, take: Any):
        self._engine, self._sigma, self._group, self._take = engine, sigma, num_generations, take
        self._run_key = noise.run_key(arm, seed)
        self.batches, self.totals = 0, dict.fromkeys(TOLD, 0.0)

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Return the token ids of prompts and completions, and `importance_ratio`, (completions,)."""
        step, engine, group = trainer.state.global_step, self._engine, self._group
        asked = [prompts[i] for i in range(0, len(prompts), group)]
        if any(prompts[i] != asked[i // group] for i in range(len(prompts))):
            raise RuntimeError("TRL's prompts are not in groups of num_generations: install a TRL that groups them.")
        self._take()
        engine.prompts["rollouts"] = found = Prompts([{"prompt": prompt} for prompt in asked], engine.tokenizer)
        rows, sampling = np.arange(len(asked)), noise.sampling_key(self._run_key, step)
        written, own = [], []
        for member in range(group):
            with engine.perturbed(noise.member_key(self._run_key, step, member), self._sigma):
                row = [ids for _, ids in engine.generate_rows("rollouts", rows, seed=sampling, draw=member)]
                engine.write_model()
                own.append(_log_likelihoods(engine, found, rows, row))
            written.append(row)
        engine.write_model()
        theirs = [_log_likelihoods(engine, found, rows, row) for row in written]
        ratios, told = clipped((np.array(theirs) - np.array(own)).T.reshape(-1))  # prompt by prompt, as in TRL
        self.batches += 1
        self.totals = {name: total + told[name] for name, total in self.totals.items()}
        return {
            "prompt_ids": [found.ids[i][found.mask[i] == 1].tolist() for i in rows for _ in range(group)],
            "completion_ids": [written[member][i] for i in rows for member in range(group)],
            "logprobs": None,  # TRL reads them only with vLLM
            "importance_ratio": ratios.tolist(),
        }

    def summary(self) -> dict[str, float]:
        """Return the statistics of the ratios for a record (`clipped`): means over steps."""
        return {name: round(total / max(1, self.batches), 5) for name, total in self.totals.items()}

    def state(self) -> dict[str, Any]:
        """Return the state that transformers writes into a checkpoint."""
        return {"args": {}, "attributes": {"batches": self.batches, "totals": self.totals}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restore the counts from the checkpoint, if the run resumes from one."""
        saved = state.stateful_callbacks.get(type(self).__name__)
        if saved is None:
            raise ValueError("the checkpoint has no ratios of rollouts: resume from one of a run with such rollouts.")
        self.batches, self.totals = saved["attributes"]["batches"], saved["attributes"]["totals"]


def _log_likelihoods(
    engine: Any, prompts: Prompts, rows: np.ndarray, completions: Sequence[Sequence[int]]
) -> np.ndarray:
    """Return the log-likelihoods of completions of rows of prompts under the engine's model, nats, float64 (rows,).

    Completions that occur several times for a prompt are computed once.
    """
    pairs = [(int(row), tuple(ids)) for row, ids in zip(rows, completions, strict=True)]
    place = {pair: i for i, pair in enumerate(dict.fromkeys(pairs))}
    asked, written = [row for row, _ in place], [ids for _, ids in place]
    samples = kl.samples(prompts.ids[asked], prompts.mask[asked], written, engine.eos_ids)
    return kl.log_probabilities(engine.model, samples)[0].numpy()[[place[pair] for pair in pairs]]


def greedy_answers(engine: Any, names: Sequence[str], run_key: int, sigma: float, members: int) -> dict[str, list[Any]]:
    """Return the greedy answers of perturbed copies of the engine's weights, as `Engine.generate` returns them.

    Args:
        engine: its master is perturbed and restored.
        names: names of the sets of prompts to answer.
        run_key: key of the noise.
        sigma: standard deviation of the noise, weight units.
        members: number of copies.

    Returns:
        Name -> a row of answers for each copy.
    """
    found: dict[str, list[Any]] = {name: [] for name in names}
    for member in range(members):
        with engine.perturbed(noise.member_key(run_key, 0, member), sigma):
            for name, rows in found.items():
                rows += engine.generate(name)
    return found


# ---- ES on rollouts of the unperturbed weights


class WeightedTrainer(ESTrainer):
    """ES whose members generate nothing: their fitness is importance-weighted on the unperturbed weights' completions.

    args: an `ESConfig` with sampling="common" and num_generations completions per prompt. A step costs one set of
    completions, whatever the population size, and one forward pass over them for every member and for the weights
    themselves. The ledger is that of any run of ES.

    Raises:
        ValueError: members that decode greedily, a null fitness, or a single completion per prompt, whose weight would
            cancel in every member's mean.
    """

    def __init__(self, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        args = self.args
        fit = args.sampling == "common" and args.fitness == "reward" and args.num_generations >= 2
        given = f"sampling={args.sampling!r}, fitness={args.fitness!r}, num_generations={args.num_generations}"
        wanted = "fitness is a weighted mean of rewards over samples: set 'common', 'reward' and at least 2."
        require(fit, f"{given}: {wanted}")

    @property
    def passes(self) -> int:
        """Passes over a step's prompts and completions: one to generate, one for the likelihoods, one per member."""
        return 2 + self.args.population_size

    def summary(self) -> dict[str, float]:
        """Return the statistics of the ratios for a record (`clipped`): means over the ledger's steps and members."""
        steps = [] if self.ledger is None else self.ledger.steps
        return {name: round(float(np.mean([s.log[f"rollouts/{name}"] for s in steps])), 5) for name in TOLD if steps}

    def _evaluate_members(self, step: int, members: Sequence[Member]) -> ledger.Step:
        started, cpu = time.perf_counter(), time.process_time()
        engine, indices = self.engine, self._indices(step)
        prompts, samples = engine.prompts["train"], self.args.num_generations
        key = noise.sampling_key(self.run_key, step)
        written = [engine.generate_rows("train", indices, seed=key, draw=draw) for draw in range(samples)]
        rows, pairs = np.tile(indices, samples), [pair for row in written for pair in row]
        scored = score(self.rewards, prompts, rows, pairs, self._light_state())
        rewards, completions = scored.rewards.reshape(samples, -1), [ids for _, ids in pairs]
        engine.write_model()
        own = _log_likelihoods(engine, prompts, rows, completions)
        sigma, fitness, told = self._at_step("sigma", step), [], []
        for member in members:
            with engine.weights.member(member.key, sigma, member.sign) as weights:
                copy_to(engine.model, engine.layout, weights)
            ratios, of_member = clipped(_log_likelihoods(engine, prompts, rows, completions) - own)
            fitness.append(_weighted_mean(rewards, ratios.reshape(samples, -1)))
            told.append(of_member)
        engine.write_model()
        self._coefficients(np.array(fitness))  # fails, before anything is recorded, if rewards give no coefficients
        log = {f"rollouts/{name}": float(np.mean([each[name] for each in told])) for name in TOLD}
        log |= {name: float(np.mean(values)) for name, values in scored.metrics.items()}
        log["completions/clipped_ratio"] = float(np.mean([ids[-1] not in engine.eos_ids for ids in completions]))
        core = round(self.budget["core_seconds"] + time.process_time() - cpu, 3)
        state = self._next_reward_state([scored.metrics])
        seconds = float(f"{time.perf_counter() - started:.4g}")
        tokens = sum(map(len, completions))
        return ledger.Step(step, np.array(fitness), tokens, seconds, core, scored.counts, log, state)

    def _metrics(self, record: ledger.Step, tied: bool, seconds: float) -> dict[str, float]:
        found = super()._metrics(record, tied, seconds)
        # a step has the completions of one model, not of every member
        return found | {"completions/mean_length": found["completions/mean_length"] * self.args.population_size}

    def _count(self, record: ledger.Step) -> None:
        before = dict(self.budget)
        super()._count(record)
        for name in ("completions", "prompt_tokens"):  # members generate no completions
            self.budget[name] = before[name] + (self.budget[name] - before[name]) // self.args.population_size

    def _settings(self) -> dict[str, Any]:
        return super()._settings() | {"rollouts": "unperturbed", "ratio_clip": CLIP}


def _weighted_mean(rewards: np.ndarray, ratios: np.ndarray) -> float:
    """Return the mean over prompts of the self-normalised estimate of a member's reward.

    rewards, ratios: (samples, prompts). A prompt is left out if none of its completions has both a reward (NaN: no
    reward function applied) and a weight. If no completion has a weight, as after divergence, the mean is 0.

    Raises:
        ValueError: no completion has a reward.
    """
    given = ~np.isnan(rewards)
    none = "every reward function returned None on a whole step: pass one that applies to at least one prompt per step."
    require(given.any(), none)
    weights = np.where(given, ratios, 0.0)
    total = weights.sum(0)
    weighted = (np.nan_to_num(rewards) * weights).sum(0)
    known = total > 0
    return float(np.mean(weighted[known] / total[known])) if known.any() else 0.0
