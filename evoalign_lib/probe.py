"""Say beforehand whether ES will learn a task: forward passes alone, in minutes, without training (`evoalign probe`).

A probe evaluates members as the first steps of a run would (here in pairs, with +noise and -noise), each again with its
noise scaled to the length that the run's random walk will have, and the model itself, all on the same prompts.

What a step gains. Let F be the mean fitness over prompts, as a function of the weights; member n has the fitness
f_n = F(theta + sigma eps_n) + error, since it is measured on m prompts; S is the standard deviation of f over a
population, and z = (f - mean) / S. By Stein's lemma the mean of f eps is sigma g, with g the gradient of F smoothed by
the noise. So the mean of a step, alpha/N sum z eps, is (alpha sigma / S) g, whatever N: it moves rho alpha along g,
with rho = sigma |g| / S, the correlation in `analysis.attenuation.expected_share`. The rest of a step is noise with the
variance alpha^2 / N in every weight. After T steps it is a random walk, with the standard deviation
w = alpha sqrt(T / N) in every weight, and sqrt(d) w long (`analysis.geometry.es_norm`). The mean of F over walks is F
smoothed by w, F_w. So a run ends, to first order, at F_w + T (alpha sigma / S) g . grad F_w. Call the odd part of the
fitness o = (f(+eps) - f(-eps)) / 2, and o_w the same with w for sigma; then

    gain of a step = (alpha / w) C / S,    C = cov(o, o_w) = sigma w g . grad F_w.

C is estimated by the mean product of o and o_w on two different prompts, in which the errors of prompts cancel; that of
o with itself is O = rho^2 S^2. Where w = sigma the gain is (alpha / sigma) rho^2 S. In the same way
(f(+eps) + f(-eps)) / 2, less its mean over pairs, gives E, the variance of the even part. (O + E) / S^2 is the
reliability of the fitness on m prompts: the mean over all ways to halve the prompts of the correlation of the halves,
lengthened by Spearman and Brown's formula (Cronbach 1951). The correlation of members' effects on two prompts is O + E
over the variance of members on a single prompt.

What a step loses. F - F_w, to second order -tr(H) w^2 / 2 with H the Hessian of F: (alpha / sigma)^2 J / N for each
step, where J = -tr(H) sigma^2 / 2 is the gap between the model and its members. It is measured at w, since w is beyond
sigma in many runs, and divided evenly over the steps. Gain and loss are equal at `members_needed`.

A run of t of the T steps is said to gain R (1 - exp(-t gain / R)) - t loss: the slope falls in proportion to the room
left below the highest reward seen, R = highest - F, which keeps predictions within bounds and vanishes to first order.

What this leaves out: slope and curvature change along a run (in notebook 08 rho falls from .5 to .1); selection repairs
some of the walk's damage, so that long runs lose less; C also holds cubic and higher odd terms; with antithetic pairs
walks are up to 2^.5 longer; other prompts than these; greedy against sampled decoding. Intervals cover the draws of
members only. How it fared on committed runs of the tiny world is in `LOG.md`.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from evoalign_lib import models, noise, tasks, tiny
from evoalign_lib.analysis.attenuation import expected_share
from evoalign_lib.checks import require, whole_number
from evoalign_lib.config import _DEFAULTS, ESConfig
from evoalign_lib.engines.base import score
from evoalign_lib.es import ESTrainer
from evoalign_lib.tiny import dialogues, questions
from evoalign_lib.update_rules import Member, population, standardise

RECOMMENDATIONS = ("ES will learn", "too little signal at this sigma", "no signal", "saturated")
GROUP = 16
"""Samples of a prompt at each temperature: a group of GRPO."""
_DECODINGS: dict[str, dict[str, Any]] = {"greedy": {}}
_DECODINGS |= {f"t{temperature:g}": {"samples": GROUP, "temperature": temperature} for temperature in (0.6, 1.0)}
_UNMOVED = 1e-30  # a sigma that changes no weight, for the model's own fitness
# settings with which the prediction does not apply
_PLAIN = ("fitness", "fitness_shaping", "sigma_schedule", "alpha_schedule", "anchor_decay", "precision")
_GRADED = {"conciseness": 1.0, "safety": 0.05}  # tasks whose completions are not right or wrong -> gain asked for
# task -> most new tokens of shipped bases and of other models
_LENGTHS = {
    "countdown": (16, 1024),
    "arithmetic": (24, 24),
    "conciseness": (24, 128),
    "facts": (24, 24),
    "safety": (32, 512),
}


class Effects(NamedTuple):
    """What pairs of members do to the fitness."""

    odd: np.ndarray
    """(pairs,) unbiased squares of the odd parts of the fitness on all prompts"""
    walked: np.ndarray
    """(pairs,) unbiased products of these with the odd parts at the walk's length"""
    even: np.ndarray
    """(pairs,) as odd, of the even parts less their mean"""
    spread: np.ndarray
    """(pairs,) squares of both parts as measured on the prompts of a step, with their error: in the mean S^2"""
    single: float
    """variance over members of the reward on one prompt, mean over prompts"""


def effects(rewards: np.ndarray, walks: np.ndarray) -> Effects:
    """Return the effects of members on their fitness.

    rewards, walks: (members, steps, prompts of a step), with noise of sigma and of the walk's length; members 2i and
    2i + 1 have the same noise with opposite signs. NaN: the reward functions do not apply. Raises ValueError if they
    apply to fewer than two prompts.
    """
    pairs, known = len(rewards) // 2, ~np.isnan(rewards + walks).any(0)
    n, scale = int(known.sum()), math.sqrt(pairs / (pairs - 1))  # of the even parts, whose mean is taken off
    require(n > 1, f"the reward functions apply to {n} prompt(s) for every member: at least 2 are needed.")

    def halves(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # odd and even
        return (values[::2] - values[1::2]) / 2, scale * ((mean := (values[::2] + values[1::2]) / 2) - mean.mean(0))

    def products(a: np.ndarray, b: np.ndarray) -> np.ndarray:  # of different prompts
        return (a.sum(1) * b.sum(1) - (a * b).sum(1)) / (n * (n - 1))

    (odd, even), (odd_w, _) = halves(rewards[:, known]), halves(walks[:, known])
    spread = np.square(halves(np.nanmean(rewards, 2))).sum(0).mean(1)
    single = 2 * float(np.square([odd, even]).mean())
    return Effects(products(odd, odd), products(odd, odd_w), products(even, even), spread, single)


def run_gain(gain: Any, loss: Any, room: float, steps: Any) -> Any:
    """Return what steps gain, reward units; arrays are broadcast.

    gain, loss: of a step. room: how far the fitness is from the highest reward.
    """
    return (-room * np.expm1(-np.maximum(gain, 0) * steps / room) if room > 0 else 0.0) - loss * steps


def probe(trainer: ESTrainer, completions: int = 130_000, right: float | None = 1.0, target: float = 0.05) -> dict:
    """Measure a run's model, members and walks before it trains, and predict whether it will learn.

    Args:
        trainer: the trainer of the run, which has not trained yet; its weights do not change. Its engine, settings and
            reward functions are used, and the prompts are those of the run's steps.
        completions: most completions to generate, in all.
        right: a completion is right if its reward is at least this; None: completions are not right or wrong.
        target: gain for which the number of completions is stated, reward units.

    Returns:
        The record, for JSON; `text` says what is in it. `recommendation` is one of `RECOMMENDATIONS`.

    Raises:
        ValueError: another kind of trainer, or one that has trained; a setting to which the prediction does not apply;
            too few completions; or fewer than 2 prompts per step to which the reward functions apply.
    """
    args, engine, m, N = trainer.args, trainer.engine, trainer.prompts_per_step, trainer.args.population_size
    new = type(trainer) is ESTrainer and not trainer.state.global_step
    require(new, f"{trainer!r:.99} is not an ESTrainer, or has trained: pass a new ESTrainer.")
    for name in _PLAIN:
        given = getattr(args, name)
        require(given == _DEFAULTS[name], f"{name}={given!r}: the prediction does not apply to it. Leave it out.")
    samples, pairs, n = args.num_generations, max(2, math.ceil(N / 2)), len(trainer.train_prompts)
    own, each = (1 + GROUP * 2) * m, (4 * pairs + 1) * m * samples
    affordable = (whole_number("completions", completions) - own) // each
    least = f"the model takes {own}, a population {each}: pass at least {own + each}, or set fewer prompts or members."
    require(affordable > 0, f"completions={completions} are too few: {least}")
    steps = min(4, n // m, affordable)  # on whose prompts a population is evaluated: more sharpen the estimates
    populations = affordable // steps
    from tqdm import tqdm

    T, state, seen, walked = trainer.max_steps, trainer._light_state(), [], []
    run_key, rng = noise.run_key("probe", args.seed), np.random.default_rng(args.seed)
    with tqdm(total=own + populations * steps * each, unit=" answers", disable=args.disable_tqdm, desc="probe") as bar:

        def answered(members: list[Member], sigma: float, rows: np.ndarray, k: int) -> np.ndarray:
            sampling = (noise.sampling_key(run_key, k), samples) if args.sampling == "common" else None
            for part in rows.reshape(-1, m):  # no more at once than in training, for which there is memory
                found = engine.evaluate(members, sigma, "train", part, state, sampling)
                seen.append(np.array([each.scored.rewards for each in found]))
                bar.update(seen[-1].size)
            return np.stack(seen[-len(rows) // m :], 1).reshape(len(members), -1, m, samples).mean(3)

        order, base = [rng.permutation(n)[: steps * m] for _ in range(populations)], {}
        for name, how in _DECODINGS.items():
            written = [pair for row in engine.generate("train", order[0][:m], seed=args.seed, **how) for pair in row]
            asked = np.resize(order[0][:m], len(written))
            base[name] = score(trainer.rewards, engine.prompts["train"], asked, written, state).rewards.reshape(-1, m)
            bar.update(len(written))
        found, differ, means, walk = [], [], [], args.alpha * math.sqrt(T / N)
        for k, rows in enumerate(order):
            members = population(run_key, k, 2 * pairs, antithetic=True)
            answers = answered(members, args.sigma, rows, k), answered(members, walk, rows, k)
            found.append(effects(*answers))
            differ += [bool(standardise(fitness).any()) for fitness in np.nanmean(answers[0][:N], 2).T]
            means.append([np.nanmean(each) for each in (answered([Member(0)], _UNMOVED, rows, k), *answers)])
            walked.append(np.nanmean(answers[1], (1, 2)).reshape(pairs, 2).mean(1) - means[-1][0])
    odd, products, even, spread = (np.concatenate(part) for part in list(zip(*found, strict=True))[:4])
    F, of_members, of_walks = np.mean(means, 0).tolist()
    untied, S2, lost = float(np.mean(differ)), float(spread.mean()), -np.concatenate(walked) / T
    everything = np.concatenate([np.ravel(part) for part in (*base.values(), *seen)])
    low, high = float(np.nanmin(everything)), float(np.nanmax(everything))

    def gain_of(products: Any, spread: Any) -> Any:  # S is that of populations that are not tied
        return untied**1.5 * args.alpha / walk * products / np.sqrt(np.maximum(spread, 1e-300))

    gain, loss = float(gain_of(products.mean(), S2)), float(lost.mean())
    drawn = rng.integers(len(odd), size=(2000, len(odd)))
    gains = gain_of(products[drawn].mean(1), spread[drawn].mean(1))
    low_end, high_end = np.quantile(run_gain(gains, lost[drawn].mean(1), high - F, T), (0.025, 0.975)).tolist()
    rho, signal = math.sqrt(untied * max(odd.mean(), 0.0) / S2) if untied else 0.0, float(odd.mean() + even.mean())
    reach = np.flatnonzero(run_gain(gain, loss, high - F, times := np.arange(1, T + 1)) >= target)
    names = ("sigma", "alpha", "population_size", "antithetic", "sampling", "num_generations", "seed", "engine")
    record: dict[str, Any] = {
        "model": models.name_of(trainer.model),
        "setting": {name: getattr(args, name) for name in names} | {"prompts": m, "steps": T, "d": engine.layout.d},
        "completions": own + populations * steps * each,
        "populations": populations * steps,
        "rewards": {name: float(np.nanmean(given)) for name, given in base.items()} | {"low": low, "high": high},
        "right": None if right is None else {name: float((given >= right).mean()) for name, given in base.items()},
        "mixed_groups": None if right is None else float(np.ptp(1.0 * (base["t1"] >= right), axis=0).mean()),
        "unequal_groups": float((np.ptp(base["t1"], axis=0) > 0).mean()),
        "fitness": {"model": F, "members": of_members, "walks": of_walks, "sd": math.sqrt(S2), "tied": 1 - untied},
        "reliability": min(max(signal / S2, 0.0), 1.0) if untied else 0.0,
        "prompt_correlation": signal / float(np.mean([each.single for each in found])) if untied else 0.0,
        "rho": rho,
        "common_share": expected_share(rho, T, N, engine.layout.d),
        "walk": walk,
        "step": {"gain": gain, "loss": loss},
        "run": {"gain": float(run_gain(gain, loss, high - F, T)), "low": low_end, "high": high_end},
        "target": target,
        "completions_to_target": int(times[reach[0]]) * m * N * samples if len(reach) else None,
        "members_needed": max(2, math.ceil(N * loss / gain)) if gain > 0 else None,
    }
    record["recommendation"], record["advice"] = _advised(record, right)
    return record


def _advised(record: dict[str, Any], right: float | None) -> tuple[str, str]:
    """Return the recommendation, and what to try."""
    rewards, run, step, set_, fitness = (record[k] for k in ("rewards", "run", "step", "setting", "fitness"))
    (learns, little, none, saturated), sigma, alpha = RECOMMENDATIONS, set_["sigma"], set_["alpha"]
    if right is not None and record["right"]["greedy"] > 1 - record["target"]:
        return saturated, "greedy completions are right already: use harder problems."
    if run["low"] > 0 and run["gain"] >= record["target"]:
        return learns, "train with these settings."
    if rewards["low"] == rewards["high"] or right is not None and rewards["high"] < right:
        wrong = "every completion is wrong" if right is not None else f"every completion has reward {rewards['low']:g}"
        return none, f"{wrong}: use a stronger model, easier problems, or a reward for parts of an answer."
    if fitness["members"] < (fitness["model"] + rewards["low"]) / 2:
        return little, f"members lose most of what the model can do: try sigma={sigma / 3:.2g}."
    if fitness["tied"] > 0.5 or record["reliability"] < 0.1:
        more = 4 * set_["prompts"]
        return little, f"members differ by chance: try sigma={sigma * 3:.2g}, or {more} prompts per step."
    if 0 < step["gain"] < 2 * step["loss"]:
        best, more = alpha * step["gain"] / step["loss"] / 2, 2 * record["members_needed"]
        return little, f"the random walk costs too much: try alpha={best:.2g}, or {more} members."
    if run["low"] > 0:
        return little, f"gains come slowly: take more steps, or try alpha={alpha * 2:.2g}."
    return little, f"no gain can be told from none: try sigma={sigma * 3:.2g}, or probe with more completions."


def text(record: dict[str, Any]) -> str:
    """Return a record of `probe` in words."""
    run, step, given, fitness, set_ = (record[k] for k in ("run", "step", "rewards", "fitness", "setting"))
    reached, per_step = record["completions_to_target"], set_["population_size"] * set_["prompts"]
    what, form, shown = ("right", ".1%", record["right"]) if record["right"] else ("reward", ".3g", given)
    lines = {
        what: ", ".join(f"{name} {shown[name]:{form}}" for name in _DECODINGS),
        "GRPO": f"{record['unequal_groups']:.0%} of groups of {GROUP} at temperature 1 have unequal rewards, others no "
        f"gradient; a step of {GROUP} groups is {GROUP * GROUP} completions. How fast it learns is not predicted",
        "ES": f"fitness {fitness['model']:.4g}, members {fitness['members']:.4g}, walks {fitness['walks']:.4g}; "
        f"{fitness['tied']:.0%} of {record['populations']} populations tied",
        "signal": f"reliability {record['reliability']:.2f}, between prompts {record['prompt_correlation']:.3f}, "
        f"rho {record['rho']:.2f}; runs will share {record['common_share']:.2g} of their squared length",
        "step": f"{per_step * set_['num_generations']} completions gain {step['gain']:.2g} and lose {step['loss']:.2g} "
        f"to the random walk; members needed for a gain: {record['members_needed'] or 'none suffice'}",
        "run": f"{set_['steps']} steps gain {run['gain']:.2g} [{run['low']:.2g}, {run['high']:.2g}]; to gain "
        f"{record['target']:g} takes {f'{reached:,} completions' if reached else 'more steps, or other settings'}",
        record["recommendation"]: record["advice"],
    }
    return "\n".join(f"{name}: {said}" for name, said in lines.items())


def trainer_of(model: str, task: str, rows: int, **settings: Any) -> tuple[ESTrainer, float | None, float]:
    """Return a trainer for a task of this library, and `right` and `target` of `probe`.

    Args:
        model: what `models.load` takes by name. Shipped bases get the tiny world's problems ("H0" those that ask for
            the fewest filler steps, "C0" rewards by the rule that knows the truth), other models the public ones.
        task: one of `tasks.TASKS`; with several sets of problems, one of them, as in "reasoning:mini_sudoku".
        rows: number of problems to draw, where they are drawn.
        **settings: fields of `ESConfig`; None: the default, or for max_completion_length and prompts_per_step the
            usual one of the task.

    Raises:
        ValueError: an unknown task, "safety" without a reward, "sequence", or what `ESTrainer` refuses.
    """
    (module, name), task = tasks.named(task), task.partition(":")[0]
    shipped, tokenizer = model in tiny.SHIPPED, models.tokenizer_of(models.place(model))
    reward, longest = module.reward, _LENGTHS.get(task, (1024, 1024))[not shipped]
    if task == "countdown" and shipped:
        filler = tiny.FILLER_STEPS[0] if model in tiny.FILLER_BASES else None
        longest += filler or 0
        asked = tiny.dataset(tiny.problems("train", rows, settings["seed"]), tokenizer, filler)
    elif task == "safety" and shipped:
        asked, reward = dialogues.dataset(dialogues.requests("train"), tokenizer), _true_reward
    elif task == "conciseness" and shipped:
        asked = module.dataset(questions.problems("train"), tokenizer)
    else:
        public = getattr(module, "load_public", None) or getattr(module, "problems", None)
        remedy = (
            f"pass a trainer to evoalign_lib.probe.probe, since the task {task!r} has no reward or data of its own."
        )
        require(task not in ("safety", "sequence") and public, remedy)
        asked = module.dataset(public("train", *name), tokenizer)
    usual = {"max_completion_length": longest, "prompts_per_step": min(128, len(asked)), "report_to": "none"}
    args = ESConfig(**usual | {name: value for name, value in settings.items() if value is not None})
    right = None if task in _GRADED else 1.0
    return ESTrainer(model, reward, args, asked, processing_class=tokenizer), right, _GRADED.get(task, 0.05)


def _true_reward(completions: list[str], verb: list[str], object: list[str], **columns: Any) -> list[float]:
    asked = map(dialogues.Request, verb, object)
    return [dialogues.truth(request, said).reward for request, said in zip(asked, completions, strict=True)]
