"""What the study asks of a task: its sets, its reward, and what is measured of a run.

A task answers with one object of this class (`MEASURES` in its file; the registry is `tasks.TASKS`). What is written
here is the measurement of a task whose completions are right or wrong, such as Countdown: accuracy on the validation
set along the way, greedily and at temperature 1, and on the test set once, at the end, with the KL of the trained model
from its base. A task overrides what is different about it.
"""

import hashlib
import itertools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from evoalign_lib import tasks
from evoalign_lib.analysis import kl
from evoalign_lib.checks import require, whole_number
from evoalign_lib.engines.base import check_temperature
from evoalign_study import base_models
from evoalign_study.records import MAX_RECORD, Record, Settings, Spec, pack_bits, pack_counts


def label(temperature: float) -> str:
    """Return what a temperature is called in records: "t1", "t0.6"."""
    return f"t{temperature:g}"


def temperatures(name: str, given: Sequence[float], without: Sequence[float] = ()) -> list[float]:
    """Return the temperatures of a setting as numbers.

    Args:
        name: of the setting.
        given: its value.
        without: temperatures that it may not have, since they are asked in any case.

    Raises:
        ValueError: none, one that is not above 0, one that is there twice, or one of `without`.
    """
    numbers = [float(temperature) for temperature in given]
    for temperature in numbers:
        check_temperature(temperature)
    if not numbers or len({label(t) for t in (*numbers, *without)}) < len(numbers) + len(without):
        besides = f" besides {', '.join(f'{t:g}' for t in without)}" if without else ""
        raise ValueError(f"{name}={list(given)}: give temperatures{besides}, each once.")
    return numbers


def significant(value: Any, digits: int = 6) -> float:
    """Return a number rounded to significant digits.

    >>> significant(1234567.0), significant(0.00123456789, 3)
    (1234570.0, 0.00123)
    """
    return float(f"{value:.{digits}g}")


def read_beside(path: Path, sha256: str, unpacked: Callable[[bytes], bytes] = bytes) -> bytes:
    """Return what lies in a file beside the records, as the record says by its SHA-256.

    Raises:
        FileNotFoundError: it is not on this machine.
        ValueError: the file holds something else.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there: texts stay on the machine that made them, copy the file here.")
    data = unpacked(path.read_bytes())
    digest = hashlib.sha256(data).hexdigest()
    other = f"{path} has the SHA-256 {digest:.16}..., not {sha256:.16}..."
    require(digest == sha256, f"{other}: take the record's own file.")
    return data


def in_own_order(spec: Spec, problems: Sequence[Any], needed: int, unique: int | None = None) -> list[Any]:
    """Return as many training problems as a run needs, in an order of its seed's own, again and again.

    Args:
        spec: with the seed; its branch of the seed tree is one that no fixed set uses.
        problems: that there are.
        needed: how many are returned.
        unique: how many different ones; None: all.
    """
    order = np.random.default_rng(np.random.SeedSequence([spec["seed"], 1])).permutation(len(problems))[:unique]
    return [problems[i] for i in itertools.islice(itertools.cycle(order), needed)]


def split_sizes(settings: Settings, there: Mapping[str, int], what: str, least_test: int = 1) -> dict[str, int]:
    """Return how many validation and test problems settings ask for, where they say so.

    Raises:
        ValueError: a number below 1 (of the test set: `least_test`), or above what is there.
    """
    wanted = {}
    for name, least in (("validation", 1), ("test", least_test)):
        field = f"{name}_problems"
        if (n := settings.get(field)) is not None:
            wanted[field] = whole_number(field, n, least, there[name], f"there are {there[name]} {name} {what}")
    return wanted


def check_room(points: int, a_point: int, rest: int, what: str, fewer: str) -> None:
    """Refuse before a run what no record would hold after it.

    Args:
        points: of its curve.
        a_point: bytes of a point, at most.
        rest: bytes of the record beside them, at most.
        what: makes the points as long as they are, in words.
        fewer: what else than points there may be fewer of.

    Raises:
        ValueError: a record might be longer than `MAX_RECORD`.
    """
    if (size := rest + points * a_point) > MAX_RECORD:
        most = max(2, (MAX_RECORD - rest) // a_point)
        what = f"curve_points={points} with {what} may make a record of {size} bytes, over the {MAX_RECORD} allowed"
        raise ValueError(f"{what}: set curve_points={most} or less, or fewer {fewer}.")


def drift(spec: Spec, engine: Any, completions: Sequence[Sequence[int]]) -> dict[str, float | None]:
    """Return the exact KL from the base on completions of the first test problems, at a point of a curve.

    "kl" is in nats a completion, "kl_token" in nats a token; None where nothing was written.
    """
    engine.write_model()
    prompts, base = engine.prompts["test"], base_models.reference(spec["base"], spec.get("engine", "local"))
    n = len(completions)
    written = kl.samples(prompts.ids[:n], prompts.mask[:n], completions, engine.eos_ids)
    exact = kl.measure(kl.compare(engine.model, base, written))
    named = {"kl": exact["exact_nats_per_sequence"], "kl_token": exact["exact_nats_per_token"]}
    return {name: None if value is None else significant(value, 4) for name, value in named.items()}


def decodings(samples: int, temperatures: Sequence[float] = (0.6, 1.0), **how: Any) -> dict[str, dict[str, Any]]:
    """Return how completions are drawn greedily and at temperatures: name -> arguments of `engine.generate`."""
    return {"greedy": {}} | {label(t): {"samples": samples, "temperature": t} | how for t in temperatures}


def decodings_of_point(spec: Spec, samples: int, step: int) -> dict[str, dict[str, Any]]:
    """Return how a point of a run's curve draws completions, as `decodings` does.

    Greedily, at temperature 1 and at those of `sampled_at`, if the spec has it; where it has `curve_temperature` (kind
    "decoding"), at that one alone.
    """
    if (alone := spec.get("curve_temperature")) is not None:
        return {label(alone): {"samples": samples, "temperature": alone, "seed": step}}
    return decodings(samples, (1.0, *spec.get("sampled_at", ())), seed=step)


def tallied(decoding: str, right: np.ndarray) -> dict[str, Any]:
    """Return the accuracy under a decoding, with the outcome of every problem; right: (samples or 1, problems)."""
    counts = right.sum(0).astype(int)
    packed = {"greedy_bits": pack_bits(counts)} if decoding == "greedy" else {f"{decoding}_counts": pack_counts(counts)}
    return {decoding: round(float(counts.mean()) / len(right), 6)} | packed


def beginning(text: str) -> str:
    """Return 80 characters of a text, or as many as take 240 bytes of a record, where one may take six or twelve."""
    return next(text[:n] for n in range(80, -1, -1) if len(json.dumps(text[:n])) <= 240)


TIE = 1e-4
"""Difference of two scores below which neither reply wins; the scores of a shipped judge spread by 2 to 5."""


def wins(scores: np.ndarray, others: np.ndarray) -> float:
    """Return the share of replies that beat others; a tie is half a win.

    The same reply does not always get the same last bits, since what else is in a batch moves them: scores that differ
    by less than `TIE` are a tie. A score that is NaN is left out.

    Args:
        scores: float64 (rows * n,), one row of n replies after the other.
        others: float64 (n,), what each row is compared with.
    """
    difference = scores - np.tile(others, len(scores) // len(others))
    return float((np.nanmean(np.sign(np.where(np.abs(difference) < TIE, 0.0, difference))) + 1) / 2)


class Measures:
    """What is trained on, measured and recorded of the runs of one task."""

    task: str
    """Its name in `tasks.TASKS`."""
    settings: tuple[str, ...] = ()
    """Settings that this task alone reads; other tasks refuse them."""
    sizes: tuple[str, ...] = ("validation_problems", "test_problems")
    """Settings that every spec of the task needs beside max_completion_length."""
    prompt_tokens: int = 150
    """Tokens of a prompt, assumed where nothing is read; Countdown's text has about 470 characters, a token about 4."""
    validated_by: str | None = "validation_greedy"
    """The curve by which a sweep is ranked; None: the task has none that says what is right."""

    @property
    def module(self) -> ModuleType:
        """The task's own module: data, prompts, graders, reward."""
        return tasks.get(self.task)

    def for_base(self, base: str) -> "Measures":
        """Return what is trained on, measured and recorded of runs from a base, where bases of a task differ in it."""
        return self

    # ---- specs

    def spec_fields(self, base: str, settings: Settings) -> dict[str, Any]:
        """Return the fields of a spec that only this task has, checked.

        Args:
            base: the model that a run starts from.
            settings: those of the run.

        Raises:
            ValueError: a setting that no run can have; the message says which.
        """
        return {}

    def check(self, arm: str, base: str, settings: Settings) -> None:
        """Refuse a training run that the task cannot have.

        Raises:
            ValueError: the message says which setting, and what to set.
        """

    def check_validates(self, what: str) -> None:
        """Refuse what needs right answers, where the task validates by a proxy.

        Args:
            what: needs them, in words.

        Raises:
            ValueError: the task has no validation by right answers.
        """
        unknown = f"{what}, and the reward of task {self.task!r} does not know them: take 'countdown'."
        require(self.validated_by is not None, unknown)

    # ---- data

    def sets(self, spec: Spec) -> dict[str, list]:
        """Return the problems of each split that the run asks: validation, test, and of a training run train."""
        raise NotImplementedError

    def rows(self, spec: Spec, tokenizer: Any, problems: Sequence[Any]) -> list[dict[str, Any]]:
        """Return rows of problems for a trainer or an engine, with the prompts that the spec asks for."""
        return self.module.dataset(problems, tokenizer)

    # ---- rewards and grades

    def reward(self, spec: Spec) -> Callable[..., list[float | None]]:
        """Return the reward function that a run is trained on."""
        return self.module.reward

    def right(self, problem: Any, completion: str) -> bool:
        """Say whether a completion is a right answer."""
        raise NotImplementedError

    def score(self, problem: Any, completion: str) -> float:
        """Return the reward of one completion, by which best-of-n chooses."""
        raise NotImplementedError

    def graded(self, problems: Sequence[Any], rows: Sequence[Sequence[Any]]) -> np.ndarray:
        """Say which completions are right, bool (rows, problems), of rows of `engine.generate`."""
        return np.array([[self.right(p, text) for p, (text, _) in zip(problems, row, strict=True)] for row in rows])

    def imitated(self, spec: Spec, problems: Sequence[Any], samples: Sequence[Sequence[Any]]) -> np.ndarray:
        """Say which samples filtered fine-tuning imitates, bool (samples, problems): here the right answers.

        samples: rows of `engine.generate`.
        """
        return self.graded(problems, samples)

    def judged(self, spec: Spec, engine: Any, problems: Sequence[Any], row: Sequence[Any]) -> tuple[Any, Any]:
        """Return the rewards, and which answers are right, each (problems,), of a row of `engine.generate`."""
        rewards = np.array([self.score(problem, text) for problem, (text, _) in zip(problems, row, strict=True)])
        return rewards, self.graded(problems, [row])[0]

    def lists_answers(self, base: str) -> bool:
        """Say whether all right answers of a base are known by a list (`right_answers`)."""
        return False

    def right_answers(self, problem: Any) -> list[str]:
        """Return the right answers to a problem of the tiny world, each with its end token; see `lists_answers`."""
        raise NotImplementedError

    def answer(self, completion: str) -> str | None:
        """Return what a completion answers, by which completions that say the same are counted together; None: none."""
        raise NotImplementedError

    def right_answer(self, problem: Any, rng: random.Random) -> str:
        """Return a right answer to a problem, of the tiny world with its end token."""
        raise NotImplementedError

    # ---- models beside the one that is trained

    def prepare(self, spec: Spec) -> None:
        """Raise an error where a run could not reach these models, before anything is trained."""

    def finished(self, spec: Spec, result: Record) -> Record:
        """Return what becomes the record of a run, once it has ended and its GPUs are free."""
        return result

    # ---- what is measured

    def accuracy(self, engine: Any, name: str, problems: Sequence[Any], **how: Any) -> np.ndarray:
        """Return right answers, (samples or 1, problems), of the engine's current weights; how: of `generate`."""
        return self.graded(problems, engine.generate(name, **how))

    def reach(self, engine: Any, name: str, problems: Sequence[Any], temperatures: Sequence[float]) -> np.ndarray:
        """Return how likely one sample is a right answer, summed over the listed ones: no sample is drawn.

        Args:
            engine: with the model whose probabilities are taken.
            name: of the prompts.
            problems: whose `right_answers` are listed.
            temperatures: of the sampling.

        Returns:
            float64 (temperatures, problems), probabilities.
        """
        listed = [self.right_answers(problem) for problem in problems]
        tokens = engine.tokenizer([text for texts in listed for text in texts], add_special_tokens=False)["input_ids"]
        rows = np.repeat(np.arange(len(problems)), [len(texts) for texts in listed])
        fits = [i for i, ids in enumerate(tokens) if len(ids) <= engine.max_completion_length]
        rows, tokens, reached = rows[fits], [tokens[i] for i in fits], np.zeros((len(temperatures), len(problems)))
        asked = engine.prompts[name]
        written = kl.samples(asked.ids[rows], asked.mask[rows], tokens, engine.eos_ids)
        logs = kl.log_probabilities(engine.model, written, temperatures)
        for row, values in zip(reached, logs.exp().numpy(), strict=True):
            np.add.at(row, rows, values)
        return reached

    def point(self, spec: Spec, engine: Any, sets: Mapping[str, list], step: int) -> dict[str, Any]:
        """Return what a point of the curve shows of the engine's current weights."""
        return {
            f"validation_{name}": float(self.accuracy(engine, "validation", sets["validation"], **how).mean())
            for name, how in decodings_of_point(spec, 4, step).items()
        }

    def logged(self, spec: Spec, logs: Mapping[str, float]) -> dict[str, Any]:
        """Return what a point of the curve takes from the trainer's logs of its step; none before the first step."""
        return {}

    def outcome(self, spec: Spec, engine: Any, sets: Mapping[str, list]) -> Record:
        """Return what a trained model has come to; a run without test set is measured along the way only."""
        if "test" not in sets:
            return {}
        return {"test": self.tested(engine, sets["test"]), "kl_policy_base": base_models.kl_from_base(spec, engine)}

    def base_outcome(self, spec: Spec, engine: Any, sets: Mapping[str, list]) -> Record:
        """Return what is measured of an untrained base."""
        return {"test": self.tested(engine, sets["test"])}

    def tested(self, engine: Any, problems: Sequence[Any]) -> dict[str, Any]:
        """Return the accuracy on the test set, greedily and at temperature 1, with the outcome of every problem."""
        told: dict[str, Any] = {"n": len(problems)}
        for name, how in decodings(16, [1.0]).items():
            told |= tallied(name, self.accuracy(engine, "test", problems, **how))
        return told

    def sampled(
        self, spec: Spec, engine: Any, sets: Mapping[str, list], name: str, temperatures: Sequence[float], samples: int
    ) -> dict[str, Any]:
        """Return the accuracy on one of the sets at each temperature, with how many samples of a problem are right."""
        told: dict[str, Any] = {}
        for t in temperatures:
            told |= tallied(label(t), self.accuracy(engine, name, sets[name], samples=samples, temperature=t))
        return told
