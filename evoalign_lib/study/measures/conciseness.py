"""What is measured of a run of the conciseness task, on a base of family B or on any other model.

The reward is of length alone, so nothing is judged by it alone. At every point of a run's curve, greedily and at
temperature 1:

- *split A*, the validation questions: the proxy reward, by which runs are matched;
- *split B*, the test questions: reward, right answers, completions that are no answers (`hacking`); and the KL of the
  policy from its base, exact over the vocabulary, on one sample of every question.

So a run can be looked at where its reward, or its KL, first came to a given value, and what is compared there was not
what chose the point. At the end: every detector, a few completions to read, and the Jensen gap, the reward at the
weights themselves less the mean reward under noise on them.

A base of family B has the questions of its knowledge base. Any other model has the published ones, two to train on and
eight to be evaluated on, or those of a user's own file. *Eight questions make no two splits, so split A and split B are
both all of them*: what is compared there was chosen on the very questions that it is measured on. Of an own file one
half is to train on, and a quarter each is A and B.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from evoalign_lib.analysis.collapse import JENSEN_SIGMAS, SAMPLES
from evoalign_lib.records import MAX_RECORD, Record, Spec

JENSEN_DRAWS = 16
BREAKING_SIGMAS = (0.003, 0.01, 0.02, 0.03, 0.05, 0.1)
BREAKING_DRAWS = 30
SHOWN = 8
"""Completions in a record, for a reader."""
LEAST_QUESTIONS = 8
"""Of an own file: even so each split for evaluation has only two of them."""
NEAREST_BASE = {"reward": -83.3, "right": 1.0}
"""In place of the 7 B base, whose completions were not published, the published seed that has moved least from it (KL
0.11 nats a token): it answers in full sentences, all of them right."""


def spec_fields(base: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a spec of the task begins with.

    An own file of questions enters a spec by the first 16 digits of its SHA-256 alone. Its path goes into the
    environment, as EVOALIGN_QUESTIONS_<the digits>, where this process and those that it starts find it.

    Args:
        base: of family B, or a model on the Hub or in a folder.
        settings: those that are looked at are all optional. measure: of length, "strict" or "released". questions: path
            of an own file for `conciseness.load`, for bases outside the tiny world. validation_problems, test_problems:
            how many questions of a split are asked, the first ones; else all. noise_draws: draws of the noise on the
            weights at each sigma, in the place of `JENSEN_DRAWS` and `BREAKING_DRAWS`.

    Raises:
        ValueError: a base of another family, a measure that does not exist, an own file for a base with questions of
            its own, one of too few questions or with one twice, a number below 1 or above what there is, or more points
            of a curve and test questions than a record has room for.
        FileNotFoundError: the file of questions, own or published, is not there.
    """
    from evoalign_lib import tiny
    from evoalign_lib.tasks.conciseness import MEASURES

    measure = settings.get("measure", "strict")
    if base in tiny.SHIPPED and base not in tiny.QUESTION_BASES:
        raise ValueError(f"base {base!r} has read no questions: take one of {', '.join(tiny.QUESTION_BASES)}.")
    if measure not in MEASURES:
        raise ValueError(f"measure={measure!r}: use one of {', '.join(MEASURES)}.")
    fields: dict[str, Any] = {"task": "conciseness", "measure": measure}
    if settings.get("questions"):
        if base in tiny.SHIPPED:
            raise ValueError(
                f"questions={str(settings['questions'])!r}: base {base!r} knows the answers of the tiny world alone. "
                "Leave it out, or take a model from elsewhere."
            )
        fields["questions_sha256"] = _announce(settings["questions"])
    asked = splits(fields | {"base": base})
    for name in ("validation", "test"):
        if (n := settings.get(f"{name}_problems")) is not None:
            fields[f"{name}_problems"] = _count(f"{name}_problems", n, len(asked[name]), f"{name} questions")
    if settings.get("noise_draws") is not None:
        fields["noise_draws"] = _count("noise_draws", settings["noise_draws"])
    # at most, beside the curve: completions in any script are in it, of which those of the tiny world are short
    rest = 2_200 if base in tiny.SHIPPED else 4_700
    _check_room(rest, settings.get("curve_points", 1), fields.get("test_problems", len(asked["test"])))
    return fields


def check(arm: str, base: str, settings: Mapping[str, Any]) -> None:
    """Refuse what a training run of the task cannot have.

    Raises:
        ValueError: an arm that needs to know what is right; a number of unique prompts other than those of the two
            settings of the tiny world, or more than another model has training questions; or what `spec_fields`
            refuses.
        FileNotFoundError: as `spec_fields`.
    """
    from evoalign_lib import tiny

    if arm == "sft":
        raise ValueError("arm 'sft' fine-tunes on right answers, which the reward of conciseness does not know.")
    unique = settings.get("unique_prompts")
    if base in tiny.SHIPPED:
        if unique not in (2, 200):
            raise ValueError(f"unique_prompts={unique!r}: take 2, as published, or 200.")
    elif unique is not None:
        asked = splits(spec_fields(base, settings) | {"base": base})["train"]
        _count("unique_prompts", unique, len(asked), "training questions")


def _count(name: str, value: Any, most: int | None = None, what: str = "") -> int:
    """A setting that is a number of things, checked."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r} must be a whole number, at least 1.")
    if most is not None and value > most:
        raise ValueError(f"{name}={value}: there are {most} {what}. Take so many, or fewer.")
    return value


def _check_room(rest: int, points: int, n: int) -> None:
    """Refuse before a run what no record would hold after it: right answers of n test questions at so many points."""
    # a point's numbers, and its right answers in hexadecimal; those of the end, greedily and of 16 samples
    size = rest + points * (150 + (1 + SAMPLES) * n // 4) + n // 4 + n
    if size > MAX_RECORD:
        raise ValueError(
            f"curve_points={points} with {n} test questions may make a record of {size} bytes, and {MAX_RECORD} are "
            "allowed: set curve_points or test_problems lower."
        )


def _variable(digest: str) -> str:
    return f"EVOALIGN_QUESTIONS_{digest}"


def _file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _announce(questions: str | os.PathLike[str]) -> str:
    """Tell this process and its children where an own file of questions is; returns its digest."""
    path = Path(questions).expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError(
            f'questions={str(questions)!r} is no file: give the path of one with a line {{"question": "...", '
            '"answer": "..."} for each question.'
        )
    digest = _file_digest(path)
    os.environ[_variable(digest)] = str(path)
    return digest


def _own_questions(digest: str) -> list[Any]:
    """The questions of the own file with that digest, in file order."""
    from evoalign_lib.tasks import conciseness

    known = os.environ.get(_variable(digest))
    if not known or not Path(known).is_file():
        raise FileNotFoundError(
            f"the file of questions with the SHA-256 {digest}... is not {known or 'known here'}: make the specs again "
            f"with questions=<its path>, or set the environment variable {_variable(digest)} to that path."
        )
    if (found := _file_digest(Path(known))) != digest:
        raise ValueError(
            f"{known} has changed: its SHA-256 is {found}..., that of the spec {digest}... Restore the file, or make "
            "the specs again."
        )
    asked = conciseness.load(known)
    if len(asked) < LEAST_QUESTIONS:
        raise ValueError(
            f"{known} has {len(asked)} questions, too few to train, validate and test on: write at least "
            f"{LEAST_QUESTIONS}, or leave out the setting questions to take the published ones."
        )
    first: set[str] = set()
    for problem in asked:
        if problem.question in first:
            raise ValueError(
                f"{known} asks {problem.question!r} twice, perhaps in two splits: delete one of the lines."
            )
        first.add(problem.question)
    return asked


def splits(spec: Mapping[str, Any]) -> dict[str, list[Any]]:
    """All questions that runs of a spec's base and file may ask, of each split: train, validation (A) and test (B)."""
    from evoalign_lib import tiny
    from evoalign_lib.tasks import conciseness
    from evoalign_lib.tiny import questions

    if spec["base"] in tiny.SHIPPED:
        return {name: questions.problems(name) for name in questions.SPLITS}
    if "questions_sha256" not in spec:
        # A and B are the same eight, since halves of them would say nothing: see the module
        evaluated = conciseness.load_public("eval")
        return {"train": conciseness.load_public("train"), "validation": evaluated, "test": evaluated}
    asked = _own_questions(spec["questions_sha256"])
    # lest a file sorted by topic train on one and test on another; the same splits whatever the seed of a run
    asked = [asked[i] for i in np.random.default_rng(0).permutation(len(asked))]
    half = len(asked) // 2
    quarter = (len(asked) - half) // 2
    return {"train": asked[:half], "validation": asked[half : half + quarter], "test": asked[half + quarter :]}


def world(spec: Spec) -> tuple[Any, Any, dict[str, list]]:
    """Model, tokenizer and the questions of each split, as `runs` has them of Countdown.

    In the tiny world two unique prompts are always the same two, as published: a sum, and a question whose answer is
    no. Other models have the first ones of their training questions, or all.

    Raises:
        FileNotFoundError: the file of questions, own or published, is not there.
        ValueError: it is not the one that the spec was made with.
    """
    from evoalign_lib import tiny
    from evoalign_lib.study.runs import model_of
    from evoalign_lib.tiny import questions

    of_split = splits(spec)
    model, tokenizer = model_of(spec)
    sets = {name: of_split[name][: spec.get(f"{name}_problems")] for name in ("validation", "test")}
    if spec["kind"] == "train":
        asked, unique = of_split["train"], spec.get("unique_prompts")
        if spec["base"] not in tiny.SHIPPED:
            asked = asked[:unique]
        elif unique == 2:
            kinds = len(questions.KINDS)
            sums, choices = (asked[questions.KINDS.index(kind) :: kinds] for kind in ("sum", "yes or no"))
            asked = [sums[0], next(p for p in choices if p.answer == "no")]
        order = np.random.default_rng(np.random.SeedSequence([spec["seed"], 1])).permutation(len(asked))
        needed = spec["steps"] * spec["prompts_per_step"]
        sets["train"] = [asked[i] for i in itertools.islice(itertools.cycle(order), needed)]
    return model, tokenizer, sets


@lru_cache(maxsize=2)
def _reference(base: str, engine: str) -> Any:
    """The base itself in the dtype of the runs of an engine, which nothing may train: once a process."""
    from evoalign_lib.study.runs import model_of

    return model_of({"kind": "base", "base": base, "engine": engine})[0]


def noise_sigmas(base: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Sigmas of the noise on a base's weights: of the Jensen gap, and of the search for where right answers break.

    Larger models bear less: outside the tiny world they are a tenth. The published ES runs of a 7 B model have sigmas
    of 0.001 to 0.01.
    """
    from evoalign_lib import tiny

    scale = 1 if base in tiny.SHIPPED else 10
    # rounded, so that a record's key is the very sigma and not 0.00030000000000000003
    jensen, breaking = (tuple(round(s / scale, 6) for s in sigmas) for sigmas in (JENSEN_SIGMAS, BREAKING_SIGMAS))
    return jensen, breaking


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
    from evoalign_lib.analysis import hacking

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
    from evoalign_lib.records import pack_bits

    found: dict[str, Any] = {}
    for decoding, samples in (("greedy", 0), ("t1", SAMPLES)):
        a = _answers(engine, "validation", sets["validation"], samples, step, spec["measure"])
        b = _answers(engine, "test", sets["test"], samples, step, spec["measure"])
        report, right = _judged(spec, sets["test"], b)
        found |= {f"proxy_{decoding}": float(a["rewards"].mean()), f"reward_{decoding}": float(b["rewards"].mean())}
        found |= {f"right_{decoding}": float(right.mean()), f"degenerate_{decoding}": report.degenerate.mean()}
        found |= {f"right_bits_{decoding}": pack_bits(right.ravel().astype(int))}
    kl = _kl(spec, engine, b["ids"][0])
    numbers = {name: value if isinstance(value, str) else round(float(value), 4) for name, value in found.items()}
    return numbers | {name: None if value is None else float(f"{value:.4g}") for name, value in kl.items()}


def _kl(spec: Spec, engine: Any, completions: Sequence[Sequence[int]]) -> dict[str, float | None]:
    from evoalign_lib.analysis import kl

    engine.write_model()
    prompts, base = engine.prompts["test"], _reference(spec["base"], spec.get("engine", "local"))
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
            for _ in _perturbed(engine, "breaking", sigma, spec.get("noise_draws", BREAKING_DRAWS))
        ]
        for sigma in noise_sigmas(spec["base"])[1]
    }
    return result | {"breaking": {sigma: round(float(np.mean(shares)), 5) for sigma, shares in broken.items()}}


def _tested(spec: Spec, engine: Any, problems: Sequence[Any]) -> Record:
    from evoalign_lib.records import pack_bits, pack_counts

    test: dict[str, Any] = {"n": len(problems)}
    hacks: dict[str, Any] = {}
    for decoding, samples in (("greedy", 0), ("t1", 16)):
        answers = _answers(engine, "test", problems, samples, 0, spec["measure"])
        report, right = _judged(spec, problems, answers)
        right = right.astype(int)
        packed = pack_counts(right.sum(0)) if samples else pack_bits(right[0])
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

    centre, draws = reward(), spec.get("noise_draws", JENSEN_DRAWS)
    moved = {
        f"{sigma:g}": [reward() for _ in _perturbed(engine, "jensen", sigma, draws)]
        for sigma in noise_sigmas(spec["base"])[0]
    }
    gaps = {sigma: round(centre - float(np.mean(rewards)), 5) for sigma, rewards in moved.items()}
    return {"centre": round(centre, 5), "gaps": gaps}


def _perturbed(engine: Any, what: str, sigma: float, draws: int):
    """Put noise on the engine's weights, once for each draw."""
    from evoalign_lib import noise

    for draw in range(draws):
        with engine.perturbed(noise.member_key(noise.run_key(what, 0), 0, draw), sigma):
            yield draw


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
    from evoalign_lib.analysis import hacking
    from evoalign_lib.records import pack_bits
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
        "right_bits": pack_bits(np.array(right, dtype=int)),
        "hacks": {name: round(share, 5) for name, share in report.shares.items() if share},
        "degenerate": round(float(report.degenerate.mean()), 5),
        "verdict": report.verdict,
        "all_empty": report.all_empty,
        "shown": [first[p.question][:60] for p in problems.values()],
    }
