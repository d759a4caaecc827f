"""The interface that the study needs from a task: its data sets, its reward, and the measurements of a run.

Each task provides one instance of `Measures` (`MEASURES` in its file; the registry is `tasks.TASKS`). The defaults here
suit a task whose completions are right or wrong, such as Countdown: accuracy on the validation set during training,
greedily and at temperature 1, and on the test set once, at the end, with the KL of the trained model from its base. A
task overrides what differs.
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
    """Return the name of a temperature in records, such as "t1" or "t0.6"."""
    return f"t{temperature:g}"


def temperatures(name: str, given: Sequence[float], without: Sequence[float] = ()) -> list[float]:
    """Return the temperatures of a setting as numbers.

    Args:
        name: name of the setting.
        given: value of the setting.
        without: temperatures that it may not contain, since they are used in any case.

    Raises:
        ValueError: no temperatures, one that is not above 0 or is repeated, or one of `without`.
    """
    numbers = [float(temperature) for temperature in given]
    for temperature in numbers:
        check_temperature(temperature)
    if not numbers or len({label(t) for t in (*numbers, *without)}) < len(numbers) + len(without):
        besides = f" besides {', '.join(f'{t:g}' for t in without)}" if without else ""
        raise ValueError(f"{name}={list(given)}: pass temperatures{besides}, each once.")
    return numbers


def significant(value: Any, digits: int = 6) -> float:
    """Return a number rounded to significant digits.

    >>> significant(1234567.0), significant(0.00123456789, 3)
    (1234570.0, 0.00123)
    """
    return float(f"{value:.{digits}g}")


def read_beside(path: Path, sha256: str, unpacked: Callable[[bytes], bytes] = bytes) -> bytes:
    """Return the unpacked contents of a file kept beside the records, checked against the record's SHA-256.

    Raises:
        FileNotFoundError: the file is not on this machine.
        ValueError: the file has other contents.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: texts stay on the machine that made them. Copy the file here.")
    data = unpacked(path.read_bytes())
    digest = hashlib.sha256(data).hexdigest()
    other = f"{path} has the SHA-256 {digest:.16}..., not {sha256:.16}..."
    require(digest == sha256, f"{other}: use the record's own file.")
    return data


def in_own_order(spec: Spec, problems: Sequence[Any], needed: int, unique: int | None = None) -> list[Any]:
    """Return as many training problems as a run needs, cycling through them in an order drawn by its seed.

    Args:
        spec: spec with the seed; no fixed set uses this branch of its seed tree.
        problems: all training problems.
        needed: number of problems to return.
        unique: number of different problems; None: all.
    """
    order = np.random.default_rng(np.random.SeedSequence([spec["seed"], 1])).permutation(len(problems))[:unique]
    return [problems[i] for i in itertools.islice(itertools.cycle(order), needed)]


def split_sizes(settings: Settings, there: Mapping[str, int], what: str, least_test: int = 1) -> dict[str, int]:
    """Return the numbers of validation and test problems that the settings give, if any.

    Raises:
        ValueError: a number below 1 (for the test set: `least_test`), or above the number of problems in `there`.
    """
    wanted = {}
    for name, least in (("validation", 1), ("test", least_test)):
        field = f"{name}_problems"
        if (n := settings.get(field)) is not None:
            wanted[field] = whole_number(field, n, least, there[name], f"there are {there[name]} {name} {what}")
    return wanted


def check_room(points: int, a_point: int, rest: int, what: str, fewer: str) -> None:
    """Refuse a run in advance if its record would be too long.

    Args:
        points: number of points of the curve.
        a_point: maximum bytes of a point.
        rest: maximum bytes of the rest of the record.
        what: what makes the points so long, in words.
        fewer: what else, besides points, there could be fewer of.

    Raises:
        ValueError: a record might be longer than `MAX_RECORD`.
    """
    if (size := rest + points * a_point) > MAX_RECORD:
        most = max(2, (MAX_RECORD - rest) // a_point)
        what = f"curve_points={points} with {what} may make a record of {size} bytes, over the {MAX_RECORD} allowed"
        raise ValueError(f"{what}: set curve_points={most} or less, or fewer {fewer}.")


def drift(spec: Spec, engine: Any, completions: Sequence[Sequence[int]]) -> dict[str, float | None]:
    """Return the exact KL from the base on completions of the first test problems, for a point of a curve.

    "kl" is in nats per completion, "kl_token" in nats per token; None if all completions are empty.
    """
    engine.write_model()
    prompts, base = engine.prompts["test"], base_models.reference(spec["base"], spec.get("engine", "local"))
    n = len(completions)
    written = kl.samples(prompts.ids[:n], prompts.mask[:n], completions, engine.eos_ids)
    exact = kl.measure(kl.compare(engine.model, base, written))
    named = {"kl": exact["exact_nats_per_sequence"], "kl_token": exact["exact_nats_per_token"]}
    return {name: None if value is None else significant(value, 4) for name, value in named.items()}


def decodings(samples: int, temperatures: Sequence[float] = (0.6, 1.0), **how: Any) -> dict[str, dict[str, Any]]:
    """Return the greedy decoding and those at temperatures: name -> arguments of `engine.generate`."""
    return {"greedy": {}} | {label(t): {"samples": samples, "temperature": t} | how for t in temperatures}


def decodings_of_point(spec: Spec, samples: int, step: int) -> dict[str, dict[str, Any]]:
    """Return the decodings at a point of a run's curve, in the form of `decodings`.

    They are greedy, temperature 1 and the spec's `sampled_at`, if any; but with `curve_temperature` (kind "decoding"),
    only that temperature.
    """
    if (alone := spec.get("curve_temperature")) is not None:
        return {label(alone): {"samples": samples, "temperature": alone, "seed": step}}
    return decodings(samples, (1.0, *spec.get("sampled_at", ())), seed=step)


def tallied(decoding: str, right: np.ndarray) -> dict[str, Any]:
    """Return the accuracy under a decoding and the result on every problem; right: (samples or 1, problems)."""
    counts = right.sum(0).astype(int)
    packed = {"greedy_bits": pack_bits(counts)} if decoding == "greedy" else {f"{decoding}_counts": pack_counts(counts)}
    return {decoding: round(float(counts.mean()) / len(right), 6)} | packed


def beginning(text: str) -> str:
    """Return the first 80 characters of a text, or as many as fit in 240 bytes of JSON (one may take 6 or 12)."""
    return next(text[:n] for n in range(80, -1, -1) if len(json.dumps(text[:n])) <= 240)


TIE = 1e-4
"""Difference of two scores below which neither reply wins; the scores of a shipped judge have a spread of 2 to 5."""


def wins(scores: np.ndarray, others: np.ndarray) -> float:
    """Return the share of replies that beat others; a tie counts as half a win.

    The last bits of a reply's score depend on what else is in its batch, so scores that differ by less than `TIE` are a
    tie. A score that is NaN is ignored.

    Args:
        scores: float64 (rows * n,), rows of n replies, one after the other.
        others: float64 (n,), what each row is compared with.
    """
    difference = scores - np.tile(others, len(scores) // len(others))
    return float((np.nanmean(np.sign(np.where(np.abs(difference) < TIE, 0.0, difference))) + 1) / 2)


class Measures:
    """Training data, measurements and record fields of the runs of one task."""

    task: str
    """Its name in `tasks.TASKS`."""
    settings: tuple[str, ...] = ()
    """Settings that only this task reads; other tasks refuse them."""
    sizes: tuple[str, ...] = ("validation_problems", "test_problems")
    """Settings that every spec of the task needs besides max_completion_length."""
    prompt_tokens: int = 150
    """Assumed tokens of a prompt where no data are read; Countdown's text has about 470 characters, a token about 4."""
    in_order: bool = False
    """Whether runs take their training problems in order, without shuffling them."""
    validated_by: str | None = "validation_greedy"
    """Curve that ranks a sweep; None: no curve of the task knows right answers."""

    @property
    def module(self) -> ModuleType:
        """The module of the task: data, prompts, graders, reward."""
        return tasks.get(self.task)

    def for_base(self, base: str) -> "Measures":
        """Return the measures of runs from a base; tasks override it if they differ between bases."""
        return self

    # ---- specs

    def spec_fields(self, base: str, settings: Settings) -> dict[str, Any]:
        """Check the settings, and return the fields of a spec that only this task has.

        Args:
            base: the model that a run starts from.
            settings: settings of the run.

        Raises:
            ValueError: an invalid setting; the message says which.
        """
        return {}

    def check(self, arm: str, base: str, settings: Settings) -> None:
        """Refuse a training run that is impossible for the task.

        Raises:
            ValueError: the message says which setting is wrong, and what to set.
        """

    def check_validates(self, what: str) -> None:
        """Refuse a use that needs right answers if the task validates by a proxy.

        Args:
            what: the use, in words.

        Raises:
            ValueError: the task has no validation by right answers.
        """
        unknown = f"{what}, and the reward of task {self.task!r} does not know them. Use task 'countdown'."
        require(self.validated_by is not None, unknown)

    # ---- data

    def sets(self, spec: Spec) -> dict[str, list]:
        """Return the problems of each split that the run uses: validation, test and, for a training run, train."""
        raise NotImplementedError

    def rows(self, spec: Spec, tokenizer: Any, problems: Sequence[Any]) -> list[dict[str, Any]]:
        """Return problems as rows for a trainer or an engine, with the prompts that the spec specifies."""
        return self.module.dataset(problems, tokenizer)

    # ---- rewards and grades

    def reward(self, spec: Spec) -> Callable[..., list[float | None]]:
        """Return the reward function that a run is trained on."""
        return self.module.reward

    def right(self, problem: Any, completion: str) -> bool:
        """Return whether a completion is a right answer."""
        raise NotImplementedError

    def score(self, problem: Any, completion: str) -> float:
        """Return the reward of one completion, by which best-of-n chooses."""
        raise NotImplementedError

    def graded(self, problems: Sequence[Any], rows: Sequence[Sequence[Any]]) -> np.ndarray:
        """Return which completions in rows of `engine.generate` are right, bool (rows, problems)."""
        return np.array([[self.right(p, text) for p, (text, _) in zip(problems, row, strict=True)] for row in rows])

    def imitated(self, spec: Spec, problems: Sequence[Any], samples: Sequence[Sequence[Any]]) -> np.ndarray:
        """Return which samples filtered fine-tuning imitates, bool (samples, problems): by default the right answers.

        samples: rows of `engine.generate`.
        """
        return self.graded(problems, samples)

    def judged(self, spec: Spec, engine: Any, problems: Sequence[Any], row: Sequence[Any]) -> tuple[Any, Any]:
        """Return the rewards of a row of `engine.generate`, and which answers are right, each (problems,)."""
        rewards = np.array([self.score(problem, text) for problem, (text, _) in zip(problems, row, strict=True)])
        return rewards, self.graded(problems, [row])[0]

    def lists_answers(self, base: str) -> bool:
        """Return whether all right answers of a base are listed (`right_answers`)."""
        return False

    def right_answers(self, problem: Any) -> list[str]:
        """Return the right answers to a problem of the tiny world, each with its end token; see `lists_answers`."""
        raise NotImplementedError

    def answer(self, completion: str) -> str | None:
        """Return the answer in a completion, so that equal answers can be counted together; None if there is none."""
        raise NotImplementedError

    def right_answer(self, problem: Any, rng: random.Random) -> str:
        """Return a right answer to a problem; in the tiny world, with its end token."""
        raise NotImplementedError

    # ---- judge and reward models loaded next to the model being trained

    def prepare(self, spec: Spec) -> None:
        """Raise an error, before anything is trained, if a run could not reach these models."""

    def finished(self, spec: Spec, result: Record) -> Record:
        """Complete the record of a run, once it has ended and its GPUs are free."""
        return result

    # ---- what is measured

    def accuracy(self, engine: Any, name: str, problems: Sequence[Any], **how: Any) -> np.ndarray:
        """Return which answers of the current weights are right, (samples or 1, problems); how: for `generate`."""
        return self.graded(problems, engine.generate(name, **how))

    def reach(self, engine: Any, name: str, problems: Sequence[Any], temperatures: Sequence[float]) -> np.ndarray:
        """Return the probability that one sample is right, summed over the listed answers without drawing a sample.

        Args:
            engine: engine with the model that gives the probabilities.
            name: name of the prompts.
            problems: problems whose `right_answers` are listed.
            temperatures: sampling temperatures.

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
        """Return the measurements of the engine's current weights at a point of the curve."""
        return {
            f"validation_{name}": float(self.accuracy(engine, "validation", sets["validation"], **how).mean())
            for name, how in decodings_of_point(spec, 4, step).items()
        }

    def logged(self, spec: Spec, logs: Mapping[str, float]) -> dict[str, Any]:
        """Return what a point of the curve takes from the trainer's logs of its step; empty before the first step."""
        return {}

    def outcome(self, spec: Spec, engine: Any, sets: Mapping[str, list]) -> Record:
        """Return the final measurements of a trained model; none for a run without a test set."""
        if "test" not in sets:
            return {}
        return {"test": self.tested(engine, sets["test"]), "kl_policy_base": base_models.kl_from_base(spec, engine)}

    def base_outcome(self, spec: Spec, engine: Any, sets: Mapping[str, list]) -> Record:
        """Return the measurements of an untrained base."""
        return {"test": self.tested(engine, sets["test"])}

    def tested(self, engine: Any, problems: Sequence[Any]) -> dict[str, Any]:
        """Return the accuracy on the test set, greedily and at temperature 1, with the result on every problem."""
        told: dict[str, Any] = {"n": len(problems)}
        for name, how in decodings(16, [1.0]).items():
            told |= tallied(name, self.accuracy(engine, "test", problems, **how))
        return told

    def sampled(
        self, spec: Spec, engine: Any, sets: Mapping[str, list], name: str, temperatures: Sequence[float], samples: int
    ) -> dict[str, Any]:
        """Return the accuracy on one of the sets at each temperature, with the number of right samples per problem."""
        told: dict[str, Any] = {}
        for t in temperatures:
            told |= tallied(label(t), self.accuracy(engine, name, sets[name], samples=samples, temperature=t))
        return told
