"""Measure runs of the conciseness task, on a base of family B or on any other model.

The reward measures length only, so it is never the only measurement. At every point of a run's curve, greedily and at
temperature 1:

- *split A*, the validation questions: the proxy reward, by which runs are matched;
- *split B*, the test questions: reward, right answers, completions that are not answers (`hacking`); and the KL of the
  policy from its base, exact over the vocabulary, on one sample of every question.

So runs can be compared at the point where the reward, or the KL, first reached a given value, on data that did not
choose the point. At the end: every detector, a few completions to read, and the Jensen gap, which is the reward at the
weights themselves minus the mean reward under noise on them.

A base of family B has the questions of its knowledge base. Any other model has the published ones, two for training and
eight for evaluation, or those of a user's own file. *Eight questions are too few to split, so split A and split B both
contain all of them*: points are then chosen on the same questions that they are compared on. Of a user's own file, one
half is for training, and a quarter each is A and B.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from evoalign_lib import noise, tiny
from evoalign_lib.analysis import hacking
from evoalign_lib.checks import choose, require, whole_number
from evoalign_lib.tasks import conciseness
from evoalign_lib.tiny import questions
from evoalign_study import base_models, trainers
from evoalign_study.collapse import JENSEN_SIGMAS, SAMPLES
from evoalign_study.measures import base as common
from evoalign_study.measures.base import Measures, label, tallied
from evoalign_study.records import Record, Settings, Spec, pack_bits

JENSEN_DRAWS = 16
BREAKING_SIGMAS = (0.003, 0.01, 0.02, 0.03, 0.05, 0.1)
BREAKING_DRAWS = 30
ELSEWHERE_SIGMAS = (0.0001, 0.0003, 0.001, 0.002, 0.003, 0.005, 0.01, 0.03, 0.1)
"""Used instead for models outside the tiny world: a wider range, since how much noise they tolerate is unknown."""
SHOWN = 8
"""Number of completions in a record, for a reader."""
LEAST_QUESTIONS = 8
"""Minimum number of questions in a user's own file; each evaluation split then has only two of them."""


def splits(spec: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return all questions that runs of a spec may use, by split: train, validation (A) and test (B)."""
    if spec["base"] in tiny.SHIPPED:
        return {name: questions.problems(name) for name in questions.SPLITS}
    if "questions_sha256" not in spec:
        # A and B are the same eight, which are too few to split: see the module docstring
        evaluated = conciseness.load_public("eval")
        return {"train": conciseness.load_public("train"), "validation": evaluated, "test": evaluated}
    file = base_models.place_of(spec["questions_sha256"])
    asked = conciseness.load(file)
    few = f"{file} has {len(asked)} questions: write {LEAST_QUESTIONS} or more, or use the published ones."
    require(len(asked) >= LEAST_QUESTIONS, few)
    question, times = Counter(problem.question for problem in asked).most_common(1)[0]
    require(times == 1, f"{file} asks {question!r} twice, perhaps in two splits: delete one of the lines.")
    # a file may be sorted by topic, so it is shuffled; the splits do not depend on a run's seed
    asked = [asked[i] for i in np.random.default_rng(0).permutation(len(asked))]
    half = len(asked) // 2
    rest = half + (len(asked) - half) // 2
    return {"train": asked[:half], "validation": asked[half:rest], "test": asked[rest:]}


def noise_sigmas(base: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return sigmas of noise on a base's weights, for the Jensen gap and for the search for where answers break.

    Larger models tolerate less noise: outside the tiny world, the Jensen gap's sigmas are a tenth. The published ES
    runs of a 7 B model have sigmas of 0.001 to 0.01.
    """
    if base in tiny.SHIPPED:
        return JENSEN_SIGMAS, BREAKING_SIGMAS
    # rounded, so that a record's key is the sigma and not 0.00030000000000000003
    return tuple(round(sigma / 10, 6) for sigma in JENSEN_SIGMAS), ELSEWHERE_SIGMAS


def _graded(spec: Spec, problems: Sequence[Any], rows: Sequence[Sequence[Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Return rewards and grades of rows of `engine.generate`, each (rows, problems)."""
    targets = [p.answer for p in problems]
    rewards = [conciseness.reward(targets, [text for text, _ in row], targets, spec["measure"]) for row in rows]
    return np.array(rewards), MEASURES.graded(problems, rows)


def _judged(spec: Spec, engine: Any, problems: Sequence[Any], rows: Sequence[Any]) -> tuple[Any, ...]:
    """Return rewards, which completions are right and not degenerate, each (rows, problems), and the hacking report."""
    rewards, right = _graded(spec, problems, rows)
    pairs = [pair for row in rows for pair in row]
    report = hacking.hack_report(
        [text for text, _ in pairs],
        prompts=[p.question for p in problems] * len(rows),
        rewards=rewards.ravel(),
        right=right.ravel(),
        # without the end token, so that only a completion that was cut off has the maximum
        tokens=[len(ids) - (ids[-1] in engine.eos_ids) for _, ids in pairs],
        max_tokens=spec["max_completion_length"],
        best_reward=0.0,
    )
    # a word repeated twenty times may contain the right answer
    return rewards, right & ~report.degenerate.reshape(right.shape), report


def _tested(spec: Spec, engine: Any, problems: Sequence[Any]) -> Record:
    test: dict[str, Any] = {"n": len(problems)}
    hacks: dict[str, Any] = {}
    shown: list[str] = []
    for decoding, how in common.decodings(16, [1.0]).items():
        rows = engine.generate("test", **how)
        rewards, right, report = _judged(spec, engine, problems, rows)
        test |= tallied(decoding, right) | {f"reward_{decoding}": round(float(rewards.mean()), 5)}
        shares = report.shares | {"degenerate": float(report.degenerate.mean())}
        hacks[decoding] = {name: round(share, 5) for name, share in shares.items() if share}
        shown = shown or [common.beginning(text) for text, _ in rows[0][:SHOWN]]
    return {"test": test, "hacks": hacks, "shown": shown}


def _under_noise(engine: Any, what: str, sigma: float, draws: int, measured: Callable[[], float]) -> float:
    """Return the mean of a measure over draws of Gaussian noise on the engine's weights."""
    values = []
    for draw in range(draws):
        with engine.perturbed(noise.member_key(noise.run_key(what, 0), 0, draw), sigma):
            values.append(measured())
    return float(np.mean(values))


def _jensen(spec: Spec, engine: Any, problems: Sequence[Any]) -> dict[str, Any]:
    """Return the reward at the weights minus the mean reward under Gaussian noise on them, greedily, by sigma."""

    def reward() -> float:
        return float(_graded(spec, problems, engine.generate("validation"))[0].mean())

    centre, draws = reward(), spec.get("noise_draws", JENSEN_DRAWS)
    moved = {f"{s:g}": _under_noise(engine, "jensen", s, draws, reward) for s in noise_sigmas(spec["base"])[0]}
    return {"centre": round(centre, 5), "gaps": {sigma: round(centre - mean, 5) for sigma, mean in moved.items()}}


class _Conciseness(Measures):
    task = "conciseness"
    settings = ("measure", "questions", "noise_draws")
    sizes = ()
    prompt_tokens = 50  # a question has about 35 characters; the rest is for the chat template
    validated_by = None  # its validation is a proxy: a reward of length

    def spec_fields(self, base: str, settings: Settings) -> dict[str, Any]:
        """Return the fields of a spec that only this task has.

        A user's own file of questions enters a spec only as the first 16 digits of its SHA-256
        (`base_models.know_file`).

        Args:
            base: a base of family B, or a model on the Hub or in a folder.
            settings: all optional. measure: measure of length, "strict" or "released". questions: path of a user's own
                file for `conciseness.load`, for bases outside the tiny world. validation_problems, test_problems: use
                only this many questions of a split, from the first. noise_draws: draws of the noise on the weights at
                each sigma, instead of `JENSEN_DRAWS` and `BREAKING_DRAWS`.

        Raises:
            ValueError: a measure that does not exist; an own file for a base that has its own questions, or a file with
                too few or repeated questions; a number below 1 or above the size of a split; or more points of a curve
                and test questions than a record has room for.
            FileNotFoundError: the file of questions, own or published, does not exist.
        """
        fields: dict[str, Any] = {"measure": settings.get("measure", "strict")}
        choose("measure", fields["measure"], conciseness.MEASURES)
        if settings.get("questions"):
            own, tells = f"questions={str(settings['questions'])!r}", f"base {base!r} knows only the tiny world"
            require(base not in tiny.SHIPPED, f"{own}: {tells}. Leave it out, or use another model.")
            line = '{"question": "...", "answer": "..."}'
            fields["questions_sha256"] = base_models.know_file("questions", settings["questions"], line)
        asked = splits(fields | {"base": base})
        fields |= common.split_sizes(settings, {name: len(there) for name, there in asked.items()}, "questions")
        if settings.get("noise_draws") is not None:
            fields["noise_draws"] = whole_number("noise_draws", settings["noise_draws"])
        further, n = len(settings.get("sampled_at") or ()), fields.get("test_problems", len(asked["test"]))
        # a point has its numbers, and right answers in hexadecimal; the rest are completions, in any script outside the
        # tiny world, and right answers at the end, greedily and for 16 samples
        a_point = 150 + 50 * further + (1 + SAMPLES * (1 + further)) * n // 4
        rest = (2_200 if base in tiny.SHIPPED else 4_700) + n // 4 + (1 + further) * n
        what = f"{n} test questions under {2 + further} decodings"
        common.check_room(settings.get("curve_points", 1), a_point, rest, what, "test_problems")
        return fields

    def check(self, arm: str, base: str, settings: Settings) -> None:
        """Refuse an arm that needs right answers, and an invalid number of unique prompts.

        Raises:
            ValueError: either of these; in the tiny world, unique_prompts must be 2 or 200.
            FileNotFoundError: as for `spec_fields`.
        """
        imitates = f"arm {arm!r} fine-tunes on right answers, which the reward of conciseness does not know."
        require(not trainers.of(arm).samples_first, imitates)
        unique = settings.get("unique_prompts")
        if base in tiny.SHIPPED:
            require(unique in (2, 200), f"unique_prompts={unique!r}: set 2, as published, or 200.")
        elif unique is not None:
            asked = splits(self.spec_fields(base, settings) | {"base": base})["train"]
            whole_number("unique_prompts", unique, most=len(asked), why=f"there are {len(asked)} training questions")

    def sets(self, spec: Spec) -> dict[str, list]:
        """Return the questions of each split.

        In the tiny world, two unique prompts are always the same two, as published: a sum, and a question whose answer
        is no. Other models have the first unique_prompts of their training questions, or all of them.

        Raises:
            FileNotFoundError: the file of questions, own or published, does not exist.
            ValueError: the file is not the one that the spec was made with.
        """
        of_split = splits(spec)
        sets = {name: of_split[name][: spec.get(f"{name}_problems")] for name in ("validation", "test")}
        if spec["kind"] == "train":
            asked, unique = of_split["train"], spec.get("unique_prompts")
            if spec["base"] in tiny.SHIPPED and unique == 2:
                kinds = len(questions.KINDS)
                sums, choices = (asked[questions.KINDS.index(kind) :: kinds] for kind in ("sum", "yes or no"))
                asked = [sums[0], next(p for p in choices if p.answer == "no")]
            asked = asked[:unique]
            sets["train"] = common.in_own_order(spec, asked, spec["steps"] * spec["prompts_per_step"])
        return sets

    def reward(self, spec: Spec) -> Callable[..., list[float | None]]:
        """Return the reward under the spec's measure of length."""
        return partial(conciseness.reward, measure=spec["measure"])

    def right(self, problem: Any, completion: str) -> bool:
        """Return whether a completion contains the answer, which does not yet make it a good one (see `hacking`)."""
        return conciseness.is_correct(completion, problem)

    def judged(self, spec: Spec, engine: Any, problems: Sequence[Any], row: Sequence[Any]) -> tuple[Any, Any]:
        """Return the rewards under the spec's measure, and which answers are right and not degenerate (`hacking`)."""
        rewards, right, _ = _judged(spec, engine, problems, [row])
        return rewards[0], right[0]

    def right_answer(self, problem: Any, rng: random.Random) -> str:
        """Return the answer alone, of exactly the length that the reward asks for; nothing is drawn."""
        return problem.answer + tiny.END

    def point(self, spec: Spec, engine: Any, sets: Mapping[str, list], step: int) -> dict[str, Any]:
        """Return the measurements of the engine's current weights at a point of the curve; see the module.

        Returns:
            For each decoding d: "proxy_d" (mean reward on split A), and on split B "reward_d", "right_d" and
            "degenerate_d" (shares; no completion counts as both) and "right_bits_d" (which questions, hexadecimal; at
            temperature 1, all samples one after the other). Also "kl" and "kl_token": exact KL at temperature 1, nats
            per completion and per token. With `curve_temperature`, the measurements at that temperature only, and no
            KL.
        """
        shown: dict[str, Any] = {}
        for decoding, how in common.decodings_of_point(spec, SAMPLES, step).items():
            a, b = (engine.generate(name, **how) for name in ("validation", "test"))
            rewards, right, report = _judged(spec, engine, sets["test"], b)
            proxy, _ = _graded(spec, sets["validation"], a)
            now = {"proxy": proxy, "reward": rewards, "right": right, "degenerate": report.degenerate}
            shown |= {f"{name}_{decoding}": round(float(values.mean()), 4) for name, values in now.items()}
            shown |= {f"right_bits_{decoding}": pack_bits(right.ravel())}
            if decoding == "t1" and "curve_temperature" not in spec:
                shown |= common.drift(spec, engine, [ids for _, ids in b[0]])
        return shown

    def sampled(
        self, spec: Spec, engine: Any, sets: Mapping[str, list], name: str, temperatures: Sequence[float], samples: int
    ) -> dict[str, Any]:
        """Return the right answers to the questions of a split at each temperature, and the reward.

        A completion that is not an answer (`hacking`) is not right.
        """
        told: dict[str, Any] = {}
        for t in temperatures:
            rows = engine.generate(name, samples=samples, temperature=t)
            rewards, right, _ = _judged(spec, engine, sets[name], rows)
            told |= tallied(label(t), right) | {f"reward_{label(t)}": round(float(rewards.mean()), 5)}
        return told

    def outcome(self, spec: Spec, engine: Any, sets: Mapping[str, list]) -> Record:
        """Return results on split B with 16 samples, every detector, completions to read, and the Jensen gap."""
        jensen = _jensen(spec, engine, sets["validation"])
        return _tested(spec, engine, sets["test"]) | {"jensen": jensen}

    def base_outcome(self, spec: Spec, engine: Any, sets: Mapping[str, list]) -> Record:
        """Return `outcome` and first point of an untrained base, and how its answers survive random perturbations.

        `breaking` has, for each sigma, the mean share of right greedy answers over random perturbations of all weights.
        The sigma at which it is halved is the reference for the safe band of ES.
        """

        def right() -> float:
            return float(self.accuracy(engine, "validation", sets["validation"]).mean())

        result, draws = self.outcome(spec, engine, sets), spec.get("noise_draws", BREAKING_DRAWS)
        point, sigmas = self.point(spec, engine, sets, 0), noise_sigmas(spec["base"])[1]
        breaking = {f"{s:g}": round(_under_noise(engine, "breaking", s, draws, right), 5) for s in sigmas}
        return result | {"point": point, "breaking": breaking}


MEASURES = _Conciseness()
