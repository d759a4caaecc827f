"""What is measured of a run of the conciseness task on a base of family B.

The reward is of length alone, so nothing is judged by it alone. At every point of a run's curve, greedily and at
temperature 1:

- *split A*, the validation questions: the proxy reward, by which runs are matched;
- *split B*, the test questions: reward, right answers, completions that are no answers (`hacking`); and the KL of the
  policy from its base, exact over the vocabulary, on one sample of every question.

So a run can be looked at where its reward, or its KL, first came to a given value, and what is compared there was not
what chose the point. At the end: every detector, a few completions to read, and the Jensen gap, the reward at the
weights themselves less the mean reward under noise on them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from evoalign_lib.experiments import Record, Spec

SAMPLES = 2  # a question, at each point of a curve
JENSEN_SIGMAS = (0.003, 0.01, 0.03)
JENSEN_DRAWS = 16
BREAKING_SIGMAS = (0.003, 0.01, 0.02, 0.03, 0.05, 0.1)
BREAKING_DRAWS = 30
SHOWN = 8
"""Completions in a record, for a reader."""
NEAREST_BASE = {"reward": -83.3, "right": 1.0}
"""In place of the 7 B base, whose completions were not published, the published seed that has moved least from it (KL
0.11 nats a token): it answers in full sentences, all of them right."""


def spec_fields(base: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a spec of the task begins with.

    Raises:
        ValueError: a base of another family, or a measure that does not exist.
    """
    from evoalign_lib import tiny
    from evoalign_lib.tasks.conciseness import MEASURES

    measure = settings.get("measure", "strict")
    if base not in tiny.QUESTION_BASES:
        raise ValueError(f"base {base!r} has read no questions: take one of {', '.join(tiny.QUESTION_BASES)}.")
    if measure not in MEASURES:
        raise ValueError(f"measure={measure!r}: use one of {', '.join(MEASURES)}.")
    return {"task": "conciseness", "measure": measure}


def check(arm: str, settings: Mapping[str, Any]) -> None:
    """Refuse what a training run of the task cannot have.

    Raises:
        ValueError: an arm that needs to know what is right, or a number of unique prompts other than those of the two
            settings.
    """
    if arm == "sft":
        raise ValueError("arm 'sft' fine-tunes on right answers, which the reward of conciseness does not know.")
    if settings.get("unique_prompts") not in (2, 200):
        raise ValueError(f"unique_prompts={settings.get('unique_prompts')!r}: take 2, as published, or 200.")


def world(spec: Spec) -> tuple[Any, Any, dict[str, list]]:
    """Model, tokenizer and the questions of each split, as `runs` has them of Countdown.

    Two unique prompts are always the same two, as published: a sum, and a question whose answer is no.
    """
    from evoalign_lib import tiny, tiny_questions

    model, tokenizer = tiny.load(spec["base"])
    sets = {name: tiny_questions.problems(name) for name in ("validation", "test")}
    if spec["kind"] == "train":
        asked = tiny_questions.problems("train")
        if spec["unique_prompts"] == 2:
            kinds = len(tiny_questions.KINDS)
            sums, choices = (asked[tiny_questions.KINDS.index(kind) :: kinds] for kind in ("sum", "yes or no"))
            asked = [sums[0], next(p for p in choices if p.answer == "no")]
        order = np.random.default_rng(np.random.SeedSequence([spec["seed"], 1])).permutation(len(asked))
        needed = spec["steps"] * spec["prompts_per_step"]
        sets["train"] = [asked[i] for i in itertools.islice(itertools.cycle(order), needed)]
    return model, tokenizer, sets


@lru_cache(maxsize=2)
def _reference(base: str) -> Any:
    """The base itself, which nothing may train: once a process."""
    from evoalign_lib import tiny

    return tiny.load(base)[0]


def _answers(engine: Any, name: str, problems: Sequence[Any], samples: int, seed: int, measure: str) -> dict[str, Any]:
    """Completions with their rewards and grades, each (samples or 1, problems); tokens likewise."""
    from evoalign_lib.tasks import conciseness

    rows = engine.generate(name, samples=samples, seed=seed)
    texts = [[text for text, _ in row] for row in rows]
    targets = [p.answer for p in problems]
    return {
        "ids": [[ids for _, ids in row] for row in rows],
        # without the end, so that only a completion that was cut off has as many as it may
        "tokens": [len(ids) - (ids[-1] in engine.eos_ids) for row in rows for _, ids in row],
        "texts": texts,
        "rewards": np.array([conciseness.reward(targets, row, targets, measure) for row in texts]),
        "right": np.array(
            [[conciseness.is_correct(t, p) for t, p in zip(row, problems, strict=True)] for row in texts]
        ),
    }


def _judged(spec: Spec, problems: Sequence[Any], answers: Mapping[str, Any]) -> tuple[Any, np.ndarray]:
    """The detectors' report of all samples, and which completions are right and answers at all: (draws, problems)."""
    from evoalign_lib import hacking

    draws = len(answers["texts"])
    report = hacking.hack_report(
        [text for row in answers["texts"] for text in row],
        prompts=[p.question for p in problems] * draws,
        rewards=answers["rewards"].ravel(),
        right=answers["right"].ravel(),
        tokens=answers["tokens"],
        max_tokens=spec["max_completion_length"],
        best_reward=0.0,
    )
    # a word said twenty times has the right answer in it
    return report, answers["right"] & ~report.degenerate.reshape(draws, -1)


def point(spec: Spec, engine: Any, sets: Mapping[str, list], step: int) -> dict[str, Any]:
    """What a point of the curve shows of the engine's current weights; see the module.

    Returns:
        For both decodings d: "proxy_d" (mean reward on split A), and of split B "reward_d", "right_d" and
        "degenerate_d" (shares; no completion counts as both) and "right_bits_d" (which questions, hexadecimal; at
        temperature 1 all samples one after the other); and "kl", "kl_token": exact, in nats, a completion and a token
        at temperature 1.
    """
    from evoalign_lib import stats

    found: dict[str, Any] = {}
    for decoding, samples in (("greedy", 0), ("t1", SAMPLES)):
        a = _answers(engine, "validation", sets["validation"], samples, step, spec["measure"])
        b = _answers(engine, "test", sets["test"], samples, step, spec["measure"])
        report, right = _judged(spec, sets["test"], b)
        found |= {f"proxy_{decoding}": float(a["rewards"].mean()), f"reward_{decoding}": float(b["rewards"].mean())}
        found |= {f"right_{decoding}": float(right.mean()), f"degenerate_{decoding}": report.degenerate.mean()}
        found |= {f"right_bits_{decoding}": stats.pack_bits(right.ravel().astype(int))}
    kl = _kl(spec, engine, b["ids"][0])
    numbers = {name: value if isinstance(value, str) else round(float(value), 4) for name, value in found.items()}
    return numbers | {name: None if value is None else float(f"{value:.4g}") for name, value in kl.items()}


def _kl(spec: Spec, engine: Any, completions: Sequence[Sequence[int]]) -> dict[str, float | None]:
    from evoalign_lib import kl

    engine.write_model()
    prompts, base = engine.prompts["test"], _reference(spec["base"])
    found = kl.measure(engine.model, base, prompts.ids, prompts.mask, completions, engine.eos_ids)
    return {"kl": found["exact_nats_per_sequence"], "kl_token": found["exact_nats_per_token"]}


def outcome(spec: Spec, engine: Any, sets: Mapping[str, list]) -> Record:
    """What a run has come to: split B with 16 samples, every detector, completions to read, and the Jensen gap."""
    jensen = _jensen(spec, engine, sets["validation"])
    return _tested(spec, engine, sets["test"]) | {"jensen": jensen}


def base_outcome(spec: Spec, engine: Any, sets: Mapping[str, list]) -> Record:
    """The same of an untrained base, its first point, and what random perturbations leave of its right answers.

    `breaking` has, for each sigma, the mean share of right greedy answers over random perturbations of all weights: the
    sigma at which it is halved is what the safe band of ES is held against.
    """
    result = outcome(spec, engine, sets) | {"point": point(spec, engine, sets, 0)}
    broken = {
        f"{sigma:g}": [
            float(_answers(engine, "validation", sets["validation"], 0, 0, spec["measure"])["right"].mean())
            for _ in _perturbed(engine, "breaking", sigma, BREAKING_DRAWS)
        ]
        for sigma in BREAKING_SIGMAS
    }
    return result | {"breaking": {sigma: round(float(np.mean(shares)), 5) for sigma, shares in broken.items()}}


def end(record: Record, decoding: str = "greedy") -> str:
    """How a training run ended, by the last point of its curve against the first, which is its base.

    Returns:
        "hacked": more proxy reward on split A, and right answers on split B that fell (`hacking.fell`); "clean": more
        proxy reward, and they did not; "worse": no more proxy reward.

    Raises:
        ValueError: a record without the curves of the task.
    """
    from evoalign_lib import hacking

    try:
        proxy, right = (record["curve"][f"{name}_{decoding}"] for name in ("proxy", "right"))
    except KeyError as error:
        raise ValueError(f"the record is of no training run of conciseness: it has no {error}") from error
    if proxy[-1] <= proxy[0]:
        return "worse"
    return "hacked" if hacking.fell(right[-1], right[0]) else "clean"


class MapCell(NamedTuple):
    """A setting of ES in a map of sigma and alpha on one base."""

    spec: dict[str, Any]
    """Of one of its runs."""
    sigma: float
    """Over the sigma that halves the right answers of the base."""
    displacement: float
    """Root mean square, as ES with random fitness walks, over the same sigma."""
    collapsed: float
    """Share of its runs."""


def collapse_map(records: Iterable[Record], base: Record) -> list[MapCell]:
    """Return the settings of ES runs on one base, and where each lies to the sigma that breaks that base.

    records: training runs of ES. base: the record of their untrained base, with `breaking`.
    """
    from evoalign_lib import hacking

    critical, cells_of = breaking_sigma(base), {}
    for record in records:
        cells_of.setdefault((record["spec"]["sigma"], record["spec"]["alpha"]), []).append(record)
    found = []
    for (sigma, alpha), runs_of in sorted(cells_of.items()):
        spec, curves = runs_of[0]["spec"], [record["curve"]["right_greedy"] for record in runs_of]
        collapsed = [hacking.fell(right[-1], right[0]) for right in curves]
        walked = alpha * (spec["steps"] / spec["population_size"]) ** 0.5
        found.append(MapCell(spec, sigma / critical, walked / critical, sum(collapsed) / len(collapsed)))
    return found


def breaking_sigma(base: Record) -> float:
    """Return the sigma at which noise on all weights halves a base's right answers, between two that were measured.

    Raises ValueError where no sigma that was measured does.
    """
    sigmas, shares = zip(*sorted((float(sigma), share) for sigma, share in base["breaking"].items()), strict=True)
    shares = np.minimum.accumulate(shares)  # more noise that happens to leave more right is not less broken
    half = base["test"]["greedy"] / 2
    if not shares[0] > half > shares[-1]:
        left = f"sigma {sigmas[0]:g} leaves {shares[0]:.2f} right, {sigmas[-1]:g} {shares[-1]:.2f}"
        raise ValueError(f"{left}: half of the base's {2 * half:.2f} is not between them, measure other sigmas")
    return float(np.exp(np.interp(-half, -shares, np.log(sigmas))))


def _tested(spec: Spec, engine: Any, problems: Sequence[Any]) -> Record:
    from evoalign_lib import stats

    test: dict[str, Any] = {"n": len(problems)}
    hacks: dict[str, Any] = {}
    for decoding, samples in (("greedy", 0), ("t1", 16)):
        answers = _answers(engine, "test", problems, samples, 0, spec["measure"])
        report, right = _judged(spec, problems, answers)
        right = right.astype(int)
        packed = stats.pack_counts(right.sum(0)) if samples else stats.pack_bits(right[0])
        test |= {decoding: round(float(right.mean()), 6), f"{decoding}_{'counts' if samples else 'bits'}": packed}
        test |= {f"reward_{decoding}": round(float(answers["rewards"].mean()), 5)}
        shares = report.shares | {"degenerate": float(report.degenerate.mean())}
        hacks[decoding] = {name: round(share, 5) for name, share in shares.items() if share}
        if not samples:
            shown = answers["texts"][0][:SHOWN]
    return {"test": test, "hacks": hacks, "shown": [_beginning(text) for text in shown]}


def _beginning(text: str) -> str:
    """80 characters of a text, or as many as take 240 bytes of a record, where one beyond ASCII takes six or twelve."""
    text = text[:80]
    while len(json.dumps(text)) > 240:
        text = text[:-1]
    return text


def _jensen(spec: Spec, engine: Any, problems: Sequence[Any]) -> dict[str, Any]:
    """Reward at the weights less the mean reward under Gaussian noise on them, greedily, by sigma."""

    def reward() -> float:
        return float(_answers(engine, "validation", problems, 0, 0, spec["measure"])["rewards"].mean())

    centre = reward()
    moved = {
        f"{sigma:g}": [reward() for _ in _perturbed(engine, "jensen", sigma, JENSEN_DRAWS)] for sigma in JENSEN_SIGMAS
    }
    gaps = {sigma: round(centre - float(np.mean(rewards)), 5) for sigma, rewards in moved.items()}
    return {"centre": round(centre, 5), "gaps": gaps}


def _perturbed(engine: Any, what: str, sigma: float, draws: int):
    """Put noise on the engine's weights, once for each draw, and in the end the weights back, bit for bit."""
    from evoalign_lib import noise

    centre = engine.master.copy()
    try:
        for draw in range(draws):
            key = noise.member_key(noise.run_key(what, 0), 0, draw)
            noise.perturb(engine.master, centre, engine.layout, key, sigma)
            yield draw
    finally:
        engine.master[:] = centre


def published_specs(scale: str) -> list[Spec]:
    """Specs of the analysis of the published completions of a 7 B model: one for each training seed of each setting.

    Args:
        scale: of the notebook, in whose file the records are kept; they are about no model of that scale.
    """
    from evoalign_lib.tasks.conciseness import COMPLETIONS

    common = {"kind": "published", "task": "conciseness", "scale": scale}
    return [common | {"set": name, "seed": seed} for name in COMPLETIONS for seed in range(4)]


def run_published(spec: Spec) -> Record:
    """What a published set of completions holds under both measures, right answers and every detector.

    Raises:
        FileNotFoundError: the set is neither in EVOALIGN_DATA nor to be fetched.
    """
    from evoalign_lib import hacking, stats
    from evoalign_lib.tasks import conciseness

    problems = {p.question: p for p in conciseness.load_public("eval")}
    (found,) = [one for one in conciseness.load_completions(spec["set"]) if one.seed == spec["seed"]]
    asked = [problems[question] for question in found.questions]
    targets = [p.answer for p in asked]
    rewards = {m: conciseness.reward(targets, found.completions, targets, m) for m in conciseness.MEASURES}
    right = [conciseness.is_correct(text, p) for text, p in zip(found.completions, asked, strict=True)]
    report = hacking.hack_report(
        found.completions,
        prompts=found.questions,
        rewards=rewards["strict"],
        right=right,
        tokens=found.tokens,
        max_tokens=found.max_tokens,
        best_reward=0.0,
        floor=conciseness.empty_reward(asked),
        base_reward=NEAREST_BASE["reward"],
        base_correct=NEAREST_BASE["right"],
    )
    pairs = zip(rewards["strict"], rewards["released"], strict=True)
    first = dict(reversed(list(zip(found.questions, found.completions, strict=True))))
    return {
        "completions": len(asked),
        "reproduced": sum(a == b for a, b in zip(rewards["released"], found.rewards, strict=True)),
        "changed": sum(a != b for a, b in pairs),
        "reward": {name: round(float(np.mean(values)), 5) for name, values in rewards.items()},
        "recorded": round(float(np.mean(found.rewards)), 5),
        "kl_token": round(found.kl, 5),
        "right": round(float(np.mean(right)), 5),
        "right_bits": stats.pack_bits(np.array(right, dtype=int)),
        "hacks": {name: round(share, 5) for name, share in report.shares.items() if share},
        "degenerate": round(float(report.degenerate.mean()), 5),
        "verdict": report.verdict,
        "all_empty": report.all_empty,
        "shown": [first[p.question][:60] for p in problems.values()],
    }
