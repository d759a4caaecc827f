"""Say beforehand whether ES will learn a task: forward passes alone, in minutes, without training (`evoalign probe`).

A probe evaluates members as the first steps of a run would (here in pairs, with +noise and -noise), the model itself on
the same prompts, and some random walks as long as the whole run.

What a step gains. Let F be the mean fitness over prompts, as a function of the weights; member n has the fitness
f_n = F(theta + sigma eps_n) + error, since it is measured on m prompts; S is the standard deviation of f over a
population, and z = (f - mean) / S. By Stein's lemma the mean of f eps is sigma g, with g the gradient of F smoothed by
the noise. So the mean of a step, alpha/N sum z eps, is (alpha sigma / S) g, which moves rho alpha along g / |g| with
rho = sigma |g| / S, the correlation in `analysis.attenuation.expected_share`; to first order it gains

    (alpha / sigma) O / S,    O = sigma^2 |g|^2 = rho^2 S^2,

whatever N. O is the variance over members of the part of F that is linear in the noise. It is estimated by the odd
part, o = (f(+eps) - f(-eps)) / 2, as the mean product of o on two different prompts, in which the errors of prompts
cancel. In the same way the mean product of (f(+eps) + f(-eps)) / 2, less its mean over pairs, gives E, the variance of
the even part. (O + E) / S^2 is the reliability of the fitness on m prompts: the mean over all ways to halve the prompts
of the correlation of the halves, lengthened by Spearman and Brown's formula (Cronbach 1951). The correlation of
members' effects on two prompts is O + E over the variance of members on a single prompt.

What a step loses. The rest of a step is noise with the variance alpha^2 / N in every weight. To second order it costs
-tr(H) alpha^2 / (2 N), where H is the Hessian of F; members lose -tr(H) sigma^2 / 2 in the mean, the gap J between the
model and its members; so a step loses (alpha / sigma)^2 J / N. Over T steps the noise is a random walk, with the
standard deviation alpha sqrt(T / N) in every weight, and alpha sqrt(d T / N) long (`analysis.geometry.es_norm`). That
is beyond sigma in many runs, so its cost is measured at that distance: q is the share of the fitness, above the lowest
reward seen, that walks of this length leave to the model.

A run of t of the T steps. Two assumptions keep it within bounds, and vanish to first order: the slope falls in
proportion to the room left below the highest reward seen, R = highest - F, and a walk takes the same share of what was
learned as of what the model could do. The fitness, above the lowest reward, is then

    (F - lowest + R (1 - exp(-t (alpha / sigma) O / (S R)))) q^(t / T).

What this leaves out: slope and curvature change along a run (in notebook 08 rho falls from .5 to .1); selection repairs
some of the walk's damage, so that long runs lose less; O also holds cubic and higher odd terms; g belongs to F smoothed
by sigma, not to F; other prompts than these; greedy against sampled decoding. Intervals cover the draws of members and
walks only. On committed runs of the tiny world it was tested as `LOG.md` says.
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
_LENGTHS = {"countdown": (16, 1024), "arithmetic": (24, 24), "conciseness": (24, 128), "safety": (32, 512)}


class Effects(NamedTuple):
    """What pairs of members do to the fitness."""

    odd: np.ndarray
    """(pairs,) unbiased squares of the odd parts of the fitness on all prompts"""
    even: np.ndarray
    """(pairs,) those of the even parts, less their mean"""
    measured: np.ndarray
    """(pairs,) squares of the odd parts on the prompts of a step, mean over steps: with the error of few prompts"""
    spread: np.ndarray
    """(pairs,) those of odd and even parts: in the mean the variance of the fitness on the prompts of a step"""
    single: float
    """variance over members of the reward on one prompt, mean over prompts"""


def effects(rewards: np.ndarray) -> Effects:
    """Return the effects of members on their fitness.

    rewards: (members, steps, prompts of a step); members 2i and 2i + 1 have the same noise with opposite signs. NaN:
    the reward functions do not apply. Raises ValueError if they apply to fewer than two prompts.
    """
    pairs, known = len(rewards) // 2, rewards[:, ~np.isnan(rewards).any(0)]
    n = known.shape[1]
    require(n > 1, f"the reward functions apply to {n} prompt(s) for every member: at least 2 are needed.")

    def squares(part: np.ndarray) -> np.ndarray:  # products of different prompts
        return (np.square(part.sum(1)) - np.square(part).sum(1)) / (n * (n - 1))

    scale = math.sqrt(pairs / (pairs - 1))  # of the even parts, whose mean is taken off; that of the odd ones is 0

    def halves(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # odd and even
        return (values[::2] - values[1::2]) / 2, scale * ((mean := (values[::2] + values[1::2]) / 2) - mean.mean(0))

    (odd, even), parts = halves(known), [np.square(part).mean(1) for part in halves(np.nanmean(rewards, 2))]
    return Effects(squares(odd), squares(even), parts[0], sum(parts), 2 * float(np.square([odd, even]).mean()))


def run_gain(slope: Any, room: float, above: float, kept: Any, steps: int, taken: Any = None) -> Any:
    """Return what a run gains, reward units (see the module's docstring); arrays are broadcast.

    Args:
        slope: first-order gain of a step, reward units.
        room, above: distance of the model's fitness from the highest and the lowest reward.
        kept: share of `above` that a walk of `steps` steps leaves.
        steps: T.
        taken: steps that the run takes of these, or beyond them; None: all.
    """
    t = steps if taken is None else taken
    gained = -room * np.expm1(-np.maximum(slope, 0) * t / room) if room > 0 else 0.0
    return (above + gained) * kept ** (t / steps) - above


def probe(trainer: ESTrainer, completions: int = 72_000, right: float | None = 1.0, target: float = 0.05) -> dict:
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
    own, each = (1 + GROUP * 2) * m, (2 * pairs + 3) * m * samples
    affordable = (whole_number("completions", completions) - own) // each
    least = f"the model takes {own}, a population {each}: pass at least {own + each}, or set fewer prompts or members."
    require(affordable > 0, f"completions={completions} are too few: {least}")
    steps = min(4, n // m, affordable)  # on whose prompts a population is evaluated: more sharpen the estimates
    populations = affordable // steps
    from tqdm import tqdm

    T, state, seen = trainer.max_steps, trainer._light_state(), []
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
        found, differ, means = [], [], []
        for k, rows in enumerate(order):
            own_answers = answered([Member(0)], _UNMOVED, rows, k)
            answers = answered(population(run_key, k, 2 * pairs, antithetic=True), args.sigma, rows, k)
            found.append(effects(answers))
            differ += [bool(standardise(fitness).any()) for fitness in np.nanmean(answers[:N], 2).T]
            means += zip(np.nanmean(own_answers, 2)[0], np.nanmean(answers, 2).mean(0), strict=True)
        odd, even, measured, spread = (np.concatenate(part) for part in list(zip(*found, strict=True))[:4])
        untied, S2 = float(np.mean(differ)), float(spread.mean())
        # the z-scores of a pair are not independent: their difference multiplies its noise
        longer = 2 * float(measured.mean()) / S2 if args.antithetic and untied else 1.0
        walk, walks = args.alpha * math.sqrt(longer * T / N), []
        for i, rows in enumerate(np.concatenate(order).reshape(-1, m)):
            key = noise.member_key(run_key, i // steps, pairs + i % steps)
            walks.append(np.nanmean(answered([Member(key), Member(key, -1)], walk, rows, i // steps)))
    F, of_members = np.mean(means, 0).tolist()
    lost = np.array(walks) - np.array(means)[:, 0]
    everything = np.concatenate([np.ravel(part) for part in (*base.values(), *seen)])
    low, high = float(np.nanmin(everything)), float(np.nanmax(everything))
    above, room = F - low, high - F

    def rates(odd: Any, spread: Any, lost: Any) -> tuple[Any, Any]:  # S is that of populations that are not tied
        slope = untied**1.5 * args.alpha / args.sigma * odd / np.sqrt(np.maximum(spread, 1e-300))
        return slope, np.clip(1 + lost / above, 0, None) if above > 0 else 1.0

    slope, kept = map(float, rates(odd.mean(), S2, lost.mean()))
    pair, walker = (rng.integers(len(units), size=(2000, len(units))) for units in (odd, lost))
    slopes, all_kept = rates(odd[pair].mean(1), spread[pair].mean(1), lost[walker].mean(1))
    low_end, high_end = np.quantile(run_gain(slopes, room, above, all_kept, T), (0.025, 0.975)).tolist()
    loss, signal = -above * math.log(max(kept, 1e-9)) / T, float(odd.mean() + even.mean())
    rho = math.sqrt(untied * max(odd.mean(), 0.0) / S2) if untied else 0.0
    times = np.arange(1, 10 * T + 1)
    reach = np.flatnonzero(run_gain(slope, room, above, kept, T, times) >= target)
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
        "fitness": {"model": F, "members": of_members, "sd": math.sqrt(S2), "tied": 1 - untied},
        "reliability": min(max(signal / S2, 0.0), 1.0) if untied else 0.0,
        "prompt_correlation": signal / float(np.mean([each.single for each in found])) if untied else 0.0,
        "rho": rho,
        "common_share": expected_share(rho, T, N, engine.layout.d),
        "walk": {"sd": walk, "kept": kept},
        "step": {"gain": slope, "loss": loss},
        "run": {"gain": float(run_gain(slope, room, above, kept, T)), "low": low_end, "high": high_end},
        "target": target,
        "completions_to_target": int(times[reach[0]]) * m * N * samples if len(reach) else None,
        "members_needed": max(2, math.ceil(N * loss / slope)) if slope > 0 else None,
    }
    record["recommendation"], record["advice"] = _advised(record, right)
    return record


def _advised(record: dict[str, Any], right: float | None) -> tuple[str, str]:
    """Return the recommendation, and what to try."""
    rewards, run, step, set_, fitness = (record[k] for k in ("rewards", "run", "step", "setting", "fitness"))
    (learns, little, none, saturated), sigma, alpha = RECOMMENDATIONS, set_["sigma"], set_["alpha"]
    if right is not None and record["right"]["greedy"] > 1 - record["target"]:
        return saturated, "greedy completions are right already: use harder problems."
    if rewards["low"] == rewards["high"] or right is not None and rewards["high"] < right and run["low"] <= 0:
        wrong = "every completion is wrong" if right is not None else f"every completion has reward {rewards['low']:g}"
        return none, f"{wrong}: use a stronger model, easier problems, or a reward for parts of an answer."
    if run["low"] > 0 and run["gain"] >= record["target"]:
        return learns, "train with these settings."
    if fitness["members"] < (fitness["model"] + rewards["low"]) / 2:
        return little, f"members lose most of what the model can do: try sigma={sigma / 3:.2g}."
    if fitness["tied"] > 0.5 or record["reliability"] < 0.1:
        return (
            little,
            f"members differ by chance: try sigma={sigma * 3:.2g}, or {4 * set_['prompts']} prompts per step.",
        )
    if 0 < step["gain"] < 2 * step["loss"]:
        best, more = alpha * step["gain"] / step["loss"] / 2, 2 * record["members_needed"]
        return little, f"the random walk costs too much: try alpha={best:.2g}, or {more} members."
    if record["completions_to_target"] and run["low"] > 0:
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
        "ES": f"fitness {fitness['model']:.4g}, of members {fitness['members']:.4g}, s.d. {fitness['sd']:.2g}; "
        f"{fitness['tied']:.0%} of {record['populations']} populations tied",
        "signal": f"reliability {record['reliability']:.2f}, between prompts {record['prompt_correlation']:.3f}, "
        f"rho {record['rho']:.2f}; runs will share {record['common_share']:.2g} of their squared length",
        "step": f"{per_step * set_['num_generations']} completions gain {step['gain']:.2g} and lose {step['loss']:.2g} "
        f"to the random walk; members needed for a gain: {record['members_needed'] or 'none suffice'}",
        "run": f"{set_['steps']} steps gain {run['gain']:.2g} [{run['low']:.2g}, {run['high']:.2g}]; to gain "
        f"{record['target']:g} takes {f'{reached:,} completions' if reached else 'over ten such runs, if it comes'}",
        record["recommendation"]: record["advice"],
    }
    return "\n".join(f"{name}: {said}" for name, said in lines.items())


def trainer_of(model: str, task: str, rows: int, **settings: Any) -> tuple[ESTrainer, float | None, float]:
    """Return a trainer for a task of this library, and `right` and `target` of `probe`.

    Args:
        model: what `models.load` takes by name. Shipped bases get the tiny world's problems ("H0" those that ask for
            the fewest filler steps, "C0" rewards by the rule that knows the truth), other models the public ones.
        task: one of `tasks.TASKS`.
        rows: number of problems to draw, where they are drawn.
        **settings: fields of `ESConfig`; None: the default, or for max_completion_length and prompts_per_step the
            usual one of the task.

    Raises:
        ValueError: an unknown task, "safety" without a reward, or what `ESTrainer` refuses.
    """
    module, shipped, tokenizer = tasks.get(task), model in tiny.SHIPPED, models.tokenizer_of(models.place(model))
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
        require(task != "safety" and public, remedy)
        asked = module.dataset(public("train"), tokenizer)
    usual = {"max_completion_length": longest, "prompts_per_step": min(128, len(asked)), "report_to": "none"}
    args = ESConfig(**usual | {name: value for name, value in settings.items() if value is not None})
    right = None if task in _GRADED else 1.0
    return ESTrainer(model, reward, args, asked, processing_class=tokenizer), right, _GRADED.get(task, 0.05)


def _true_reward(completions: list[str], verb: list[str], object: list[str], **columns: Any) -> list[float]:
    asked = map(dialogues.Request, verb, object)
    return [dialogues.truth(request, said).reward for request, said in zip(asked, completions, strict=True)]
