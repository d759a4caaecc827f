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

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from evoalign_lib import noise, tiny
from evoalign_lib.analysis import hacking
from evoalign_lib.checks import choose, whole_number
from evoalign_lib.tasks import conciseness
from evoalign_lib.tiny import questions
from evoalign_study import base_models, trainers
from evoalign_study.collapse import JENSEN_SIGMAS, SAMPLES
from evoalign_study.measures.base import (
    Measures,
    beginning,
    check_room,
    decodings_of_point,
    drift,
    in_own_order,
    known_file,
    label,
    split_sizes,
)
from evoalign_study.records import Record, Spec, pack_bits, pack_counts

JENSEN_DRAWS = 16
BREAKING_SIGMAS = (0.003, 0.01, 0.02, 0.03, 0.05, 0.1)
BREAKING_DRAWS = 30
FURTHER_SIGMAS = 8
"""Sigmas beyond `BREAKING_SIGMAS`, at most, each half or twice the last, for models outside the tiny world."""
SHOWN = 8
"""Completions in a record, for a reader."""
LEAST_QUESTIONS = 8
"""Of an own file: even so each split for evaluation has only two of them."""


def _own_questions(digest: str) -> list[Any]:
    """The questions of the own file with that digest, in file order."""
    known = base_models.file_of(digest)
    asked = conciseness.load(known)
    if len(asked) < LEAST_QUESTIONS:
        raise ValueError(
            f"{known} has {len(asked)} questions, too few to train, validate and test on: write at least "
            f"{LEAST_QUESTIONS}, or leave out the setting questions to take the published ones."
        )
    question, times = Counter(problem.question for problem in asked).most_common(1)[0]
    if times > 1:
        raise ValueError(f"{known} asks {question!r} twice, perhaps in two splits: delete one of the lines.")
    return asked


def splits(spec: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return all questions that runs of a spec may ask, of each split: train, validation (A) and test (B)."""
    if spec["base"] in tiny.SHIPPED:
        return {name: questions.problems(name) for name in questions.SPLITS}
    if "questions_sha256" not in spec:
        # A and B are the same eight, since halves of them would say nothing: see the module
        evaluated = conciseness.load_public("eval")
        return {"train": conciseness.load_public("train"), "validation": evaluated, "test": evaluated}
    asked = _own_questions(spec["questions_sha256"])
    # a file sorted by topic must not train on one and test on another; the same splits whatever the seed of a run
    asked = [asked[i] for i in np.random.default_rng(0).permutation(len(asked))]
    half = len(asked) // 2
    quarter = (len(asked) - half) // 2
    return {"train": asked[:half], "validation": asked[half : half + quarter], "test": asked[half + quarter :]}


def noise_sigmas(base: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return sigmas of noise on a base's weights: of the Jensen gap, and of the search for where answers break.

    Larger models bear less: outside the tiny world they are a tenth. The published ES runs of a 7 B model have sigmas
    of 0.001 to 0.01.
    """
    scale = 1 if base in tiny.SHIPPED else 10
    # rounded, so that a record's key is the very sigma and not 0.00030000000000000003
    jensen, breaking = (tuple(round(s / scale, 6) for s in sigmas) for sigmas in (JENSEN_SIGMAS, BREAKING_SIGMAS))
    return jensen, breaking


def _answers(
    engine: Any, name: str, problems: Sequence[Any], measure: str, samples: int = 0, seed: int = 0, t: float = 1.0
) -> dict[str, Any]:
    """Completions at temperature t with their rewards and grades, each (samples or 1, problems); tokens likewise."""
    return _graded(engine, problems, engine.generate(name, samples=samples, seed=seed, temperature=t), measure)


def _graded(engine: Any, problems: Sequence[Any], rows: Sequence[Sequence[Any]], measure: str) -> dict[str, Any]:
    """Rows of `engine.generate` with their rewards and grades; see `_answers`."""
    texts, targets = [[text for text, _ in row] for row in rows], [p.answer for p in problems]
    right = [[conciseness.is_correct(t, p) for t, p in zip(row, problems, strict=True)] for row in texts]
    return {
        "ids": [[ids for _, ids in row] for row in rows],
        # without the end, so that only a completion that was cut off has as many as it may
        "tokens": [len(ids) - (ids[-1] in engine.eos_ids) for row in rows for _, ids in row],
        "texts": texts,
        "rewards": np.array([conciseness.reward(targets, row, targets, measure) for row in texts]),
        "right": np.array(right),
    }


def _judged(spec: Spec, problems: Sequence[Any], answers: Mapping[str, Any]) -> tuple[Any, np.ndarray]:
    """The detectors' report of all samples, and which completions are right and answers at all: (draws, problems)."""
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


def _tested(spec: Spec, engine: Any, problems: Sequence[Any]) -> Record:
    test: dict[str, Any] = {"n": len(problems)}
    hacks: dict[str, Any] = {}
    for decoding, samples in (("greedy", 0), ("t1", 16)):
        answers = _answers(engine, "test", problems, spec["measure"], samples)
        report, right = _judged(spec, problems, answers)
        right = right.astype(int)
        packed = pack_counts(right.sum(0)) if samples else pack_bits(right[0])
        test |= {decoding: round(float(right.mean()), 6), f"{decoding}_{'counts' if samples else 'bits'}": packed}
        test |= {f"reward_{decoding}": round(float(answers["rewards"].mean()), 5)}
        shares = report.shares | {"degenerate": float(report.degenerate.mean())}
        hacks[decoding] = {name: round(share, 5) for name, share in shares.items() if share}
        if not samples:
            shown = [beginning(text) for text in answers["texts"][0][:SHOWN]]
    return {"test": test, "hacks": hacks, "shown": shown}


def _jensen(spec: Spec, engine: Any, problems: Sequence[Any]) -> dict[str, Any]:
    """Reward at the weights less the mean reward under Gaussian noise on them, greedily, by sigma."""

    def reward() -> float:
        return float(_answers(engine, "validation", problems, spec["measure"])["rewards"].mean())

    centre, draws, gaps = reward(), spec.get("noise_draws", JENSEN_DRAWS), {}
    for sigma in noise_sigmas(spec["base"])[0]:
        moved = [reward() for _ in _perturbed(engine, "jensen", sigma, draws)]
        gaps[f"{sigma:g}"] = round(centre - float(np.mean(moved)), 5)
    return {"centre": round(centre, 5), "gaps": gaps}


def _perturbed(engine: Any, what: str, sigma: float, draws: int):
    """Put noise on the engine's weights, once for each draw."""
    for draw in range(draws):
        with engine.perturbed(noise.member_key(noise.run_key(what, 0), 0, draw), sigma):
            yield draw


def _search(
    shares: Mapping[float, float], half: float, left: Callable[[float], float], right: Callable[[], float]
) -> dict[float, float]:
    """Measure at further sigmas until one leaves more than half of the right answers and another one fewer.

    shares: sigma -> share of right answers under its noise, in rising order. left: measures one. right: the share
    without noise; where it is no more than half, or nothing is right, no sigma can halve it and none is measured.
    """
    found = dict(shares)
    if not half or (found[min(found)] <= half and right() <= half):
        return found
    for _ in range(FURTHER_SIGMAS):
        if found[min(found)] <= half:
            sigma = min(found) / 2
        elif min(found.values()) >= half:
            sigma = max(found) * 2
        else:
            break
        sigma = float(f"{sigma:g}")  # as the record has it
        found[sigma] = left(sigma)
    return dict(sorted(found.items()))


class _Conciseness(Measures):
    task = "conciseness"
    settings = ("measure", "questions", "noise_draws")
    sizes = ()
    prompt_tokens = 50  # a question has about 35 characters; the rest is for the chat template
    validated_by = None  # its validation is a proxy: a reward of length

    def spec_fields(self, base: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a spec of the task begins with.

        An own file of questions enters a spec by the first 16 digits of its SHA-256 alone (`base_models.know_file`).

        Args:
            base: of family B, or a model on the Hub or in a folder.
            settings: all optional. measure: of length, "strict" or "released". questions: path of an own file for
                `conciseness.load`, for bases outside the tiny world. validation_problems, test_problems: how many
                questions of a split are asked, the first ones; else all. noise_draws: draws of the noise on the
                weights at each sigma, in the place of `JENSEN_DRAWS` and `BREAKING_DRAWS`.

        Raises:
            ValueError: a measure that does not exist, an own file for a base with questions of its own, one of too few
                questions or with one twice, a number below 1 or above what there is, or more points of a curve and test
                questions than a record has room for.
            FileNotFoundError: the file of questions, own or published, is not there.
        """
        fields: dict[str, Any] = {"measure": settings.get("measure", "strict")}
        choose("measure", fields["measure"], conciseness.MEASURES)
        if settings.get("questions"):
            if base in tiny.SHIPPED:
                raise ValueError(
                    f"questions={str(settings['questions'])!r}: base {base!r} knows the answers of the tiny world "
                    "alone. Leave it out, or take a model from elsewhere."
                )
            line = '{"question": "...", "answer": "..."}'
            fields["questions_sha256"] = known_file("questions", settings["questions"], line)
        asked = splits(fields | {"base": base})
        fields |= split_sizes(settings, {name: len(there) for name, there in asked.items()}, "questions")
        if settings.get("noise_draws") is not None:
            fields["noise_draws"] = whole_number("noise_draws", settings["noise_draws"])
        further, n = len(settings.get("sampled_at") or ()), fields.get("test_problems", len(asked["test"]))
        # a point's numbers, and its right answers in hexadecimal; beside the curve completions, in any script where the
        # world is not tiny, and the right answers of the end, greedily and of 16 samples
        a_point = 150 + 50 * further + (1 + SAMPLES * (1 + further)) * n // 4
        rest = (2_200 if base in tiny.SHIPPED else 4_700) + n // 4 + (1 + further) * n
        what = f"{n} test questions under {2 + further} decodings"
        check_room(settings.get("curve_points", 1), a_point, rest, what, "test_problems")
        return fields

    def check(self, arm: str, base: str, settings: Mapping[str, Any]) -> None:
        """Refuse an arm that needs to know what is right, and numbers of unique prompts that there are not.

        Raises:
            ValueError: those; in the tiny world, unique prompts other than those of its two settings.
            FileNotFoundError: as `spec_fields`.
        """
        if trainers.of(arm).samples_first:
            raise ValueError(f"arm {arm!r} fine-tunes on right answers, which the reward of conciseness does not know.")
        unique = settings.get("unique_prompts")
        if base in tiny.SHIPPED:
            if unique not in (2, 200):
                raise ValueError(f"unique_prompts={unique!r}: take 2, as published, or 200.")
        elif unique is not None:
            asked = splits(self.spec_fields(base, settings) | {"base": base})["train"]
            whole_number("unique_prompts", unique, most=len(asked), why=f"there are {len(asked)} training questions")

    def sets(self, spec: Spec) -> dict[str, list]:
        """Return the questions of each split.

        In the tiny world two unique prompts are always the same two, as published: a sum, and a question whose answer
        is no. Other models have the first ones of their training questions, or all.

        Raises:
            FileNotFoundError: the file of questions, own or published, is not there.
            ValueError: it is not the one that the spec was made with.
        """
        of_split = splits(spec)
        sets = {name: of_split[name][: spec.get(f"{name}_problems")] for name in ("validation", "test")}
        if spec["kind"] == "train":
            asked, unique = of_split["train"], spec.get("unique_prompts")
            if spec["base"] not in tiny.SHIPPED:
                asked = asked[:unique]
            elif unique == 2:
                kinds = len(questions.KINDS)
                sums, choices = (asked[questions.KINDS.index(kind) :: kinds] for kind in ("sum", "yes or no"))
                asked = [sums[0], next(p for p in choices if p.answer == "no")]
            sets["train"] = in_own_order(spec, asked, spec["steps"] * spec["prompts_per_step"])
        return sets

    def reward(self, spec: Spec) -> Callable[..., list[float | None]]:
        """Return the reward under the spec's measure of length."""
        return partial(conciseness.reward, measure=spec["measure"])

    def right(self, problem: Any, completion: str) -> bool:
        """Say whether a completion holds the answer; that alone makes it no good one (see `hacking`)."""
        return conciseness.is_correct(completion, problem)

    def judged(
        self, spec: Spec, engine: Any, problems: Sequence[Any], row: Sequence[tuple[str, Sequence[int]]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the rewards under the spec's measure, and which answers are right and answers at all (`hacking`)."""
        answers = _graded(engine, problems, [row], spec["measure"])
        return answers["rewards"][0], _judged(spec, problems, answers)[1][0]

    def right_answer(self, problem: Any, rng: random.Random) -> str:
        """Return the answer alone, in as many characters as the reward asks for; nothing is drawn."""
        return problem.answer + tiny.END

    def point(self, spec: Spec, engine: Any, sets: Mapping[str, list], step: int) -> dict[str, Any]:
        """Return what a point of the curve shows of the engine's current weights; see the module.

        Returns:
            For each decoding d: "proxy_d" (mean reward on split A), and of split B "reward_d", "right_d" and
            "degenerate_d" (shares; no completion counts as both) and "right_bits_d" (which questions, hexadecimal; at
            temperature 1 all samples one after the other); and "kl", "kl_token": exact, in nats, a completion and a
            token at temperature 1. Of a spec with `curve_temperature` the first of these at that temperature, and no
            KL.
        """
        shown: dict[str, Any] = {}
        for decoding, samples, temperature in decodings_of_point(spec, SAMPLES):
            a, b = (
                _answers(engine, name, sets[name], spec["measure"], samples, step, temperature)
                for name in ("validation", "test")
            )
            report, right = _judged(spec, sets["test"], b)
            now = {"proxy": a["rewards"], "reward": b["rewards"], "right": right, "degenerate": report.degenerate}
            shown |= {f"{name}_{decoding}": round(float(values.mean()), 4) for name, values in now.items()}
            shown |= {f"right_bits_{decoding}": pack_bits(right.ravel().astype(int))}
            if decoding == "t1" and "curve_temperature" not in spec:
                shown |= drift(spec, engine, b["ids"][0])
        return shown

    def sampled(
        self, spec: Spec, engine: Any, sets: Mapping[str, list], name: str, temperatures: Sequence[float], samples: int
    ) -> dict[str, Any]:
        """Return right answers to the questions of a split at each temperature, and the reward.

        A completion that is no answer (`hacking`) is not right.
        """
        told: dict[str, Any] = {}
        for temperature in temperatures:
            answers = _answers(engine, name, sets[name], spec["measure"], samples, t=temperature)
            counts, decoding = _judged(spec, sets[name], answers)[1].sum(0).astype(int), label(temperature)
            told |= {decoding: round(float(counts.mean()) / samples, 6), f"{decoding}_counts": pack_counts(counts)}
            told[f"reward_{decoding}"] = round(float(answers["rewards"].mean()), 5)
        return told

    def outcome(self, spec: Spec, engine: Any, sets: Mapping[str, list]) -> Record:
        """Return split B with 16 samples, every detector, completions to read, and the Jensen gap."""
        jensen = _jensen(spec, engine, sets["validation"])
        return _tested(spec, engine, sets["test"]) | {"jensen": jensen}

    def base_outcome(self, spec: Spec, engine: Any, sets: Mapping[str, list]) -> Record:
        """Return the same of an untrained base, its first point, and what random perturbations leave of its answers.

        `breaking` has, for each sigma, the mean share of right greedy answers over random perturbations of all weights:
        the sigma at which it is halved is what the safe band of ES is held against. It is looked for beyond the sigmas
        of a model from elsewhere, of which nobody knows how much noise it bears.
        """
        result = self.outcome(spec, engine, sets) | {"point": self.point(spec, engine, sets, 0)}

        def right() -> float:
            return float(_answers(engine, "validation", sets["validation"], spec["measure"])["right"].mean())

        def left(sigma: float) -> float:
            draws = spec.get("noise_draws", BREAKING_DRAWS)
            return round(float(np.mean([right() for _ in _perturbed(engine, "breaking", sigma, draws)])), 5)

        shares = {sigma: left(sigma) for sigma in noise_sigmas(spec["base"])[1]}
        if spec["base"] not in tiny.SHIPPED:
            shares = _search(shares, result["test"]["greedy"] / 2, left, right)
        return result | {"breaking": {f"{sigma:g}": share for sigma, share in shares.items()}}


MEASURES = _Conciseness()
