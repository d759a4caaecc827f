"""Measure models at points in weight space: at the ends of runs, between and around them, and what ends share.

- *coverage*: what a model can solve within k samples, computed exactly from a list of right answers, and counted from
  samples. A model of family A writes an answer in few ways, and all right ones are listed (`Measures.reach`). So the
  chance that one sample is right is a sum of probabilities, at any temperature and without drawing a sample, and pass@k
  has no sampling noise. It misses right answers written in another way; the samples show how many there are.
- *answers*: what a model answers to each test problem, as short texts (`pack_texts`).
- *perturbed*: what a base can solve when its weights are perturbed: each perturbed copy answers greedily, once. That is
  how a generation of ES explores. A copy is to perturbation what a sample is to temperature. A vote among the copies
  that do best on the validation set is the training-free baseline of arXiv 2603.12228.
- *noise*: how much of a model's ability survives noise on its weights. Every model gets the same noise, draw by draw,
  and answers the same problems with the same random numbers.
- *path*: straight lines between two models: error, likelihood of right answers, reward and KL at points along them. The
  barriers of linear mode connectivity (Frankle et al. 2020, arXiv 1912.05671) are read off these curves
  (`analysis.connectivity`).
- *merge*: the average of several runs. Runs of one arm from one base share what the reward taught them, and each also
  took its own random walk: K walks of equal length average to 1/sqrt(K) of that length. The same measurements of one
  run shrunk to that length, and of a random direction, show how much of the effect is due to the shorter length.
- *products*: a block of the Gram matrix of displacements, which gives norms, shares and cosines, so that runs can be
  added without measuring the others again.
- *stretch*: the same for what ES runs moved between two of their steps, replayed from ledgers: where along a run its
  signal is.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import numpy as np
import torch

from evoalign_lib import noise, tiny
from evoalign_lib.analysis import coverage, geometry, kl, robustness
from evoalign_lib.checks import require, whole_number
from evoalign_lib.files import canonical_json
from evoalign_study import base_models, measures, specs, training, weight_cache
from evoalign_study.measures.base import Measures, decodings, label, significant, temperatures
from evoalign_study.records import MAX_RECORD, Record, Settings, Spec, pack_bits, pack_integers, pack_probabilities

DECODINGS = decodings(1)
"""One completion of every problem, at every point of a path and under all noise. When sampling, all use the same random
numbers."""


@contextmanager
def _at_end(spec: Spec) -> Iterator[tuple[Any, dict[str, list]]]:
    """Yield an engine with the weights of the end in a spec, or of its base if there is none, and the problems."""
    with training.opened(spec) as (engine, sets):
        if "end" in spec:
            start = engine.master.copy()
            moved = weight_cache.displacement(spec["end"], start, engine.layout)
            engine.master[:] = weight_cache.moved(start, moved)
        engine.write_model()
        yield engine, sets


def _check_sigmas(name: str, sigmas: Sequence[float], most: int) -> None:
    """Raise ValueError unless there are 1 to `most` distinct standard deviations, finite and above 0."""
    distinct, given = {sigma for sigma in sigmas if 0 < sigma < np.inf}, list(sigmas)
    fits = 0 < len(given) == len(distinct) <= most
    require(fits, f"{name}={given}: pass finite standard deviations above 0, each once, at most {most}.")


# ---- coverage

VALIDATED_BY = 64
"""Samples within which a validation problem counts as solved when a model's best temperature is chosen."""
_COVERAGE = (
    "max_completion_length", "validation_problems", "coverage_problems", "coverage_temperatures", "coverage_samples",
    "coverage_sampled_at",
)  # fmt: skip
_COUNTED = "their distribution is estimated, and a record counts no further"


def coverage_spec(base: str, end: Mapping[str, Any] | None, settings: Settings, scale: str) -> Spec:
    """Return the spec that measures what a model can solve.

    Args:
        base: base that the runs started from, one of the tiny world whose right answers are listed.
        end: the model, from `weight_cache.end`; None: the base itself.
        settings: max_completion_length; validation_problems, on which temperatures are compared; coverage_problems,
            number of test problems; coverage_temperatures, at which everything is exact; coverage_samples, 2 to 4,095
            of each problem at each of coverage_sampled_at.
        scale: scale of the notebook.

    Raises:
        ValueError: no temperatures, one that is repeated or not above 0; too few samples or too many; too many test
            problems; an end of another base; a setting that is missing; or a base whose right answers are not listed.
    """
    spec = specs.begin_tiny("coverage", base, scale, {}) | specs.take(settings, _COVERAGE, "coverage")
    for name in ("coverage_temperatures", "coverage_sampled_at"):
        spec[name] = temperatures(name, spec[name])
    whole_number("coverage_samples", spec["coverage_samples"], 2, 4095, _COUNTED)
    spec["test_problems"] = spec.pop("coverage_problems")
    measures.get(spec["task"]).spec_fields(base, spec)  # refuses too many test problems
    return weight_cache.at_end(spec, end)


def run_coverage(spec: Spec) -> Record:
    """Return the measurement of what a model can solve.

    The record has `greedy_bits`; `reach`, temperature -> the chance that one sample of a test problem is right
    (`records.pack_probabilities`); `validation`, temperature -> pass@64 on the validation set; and `drawn`, temperature
    -> results from samples: the number of right samples of each test problem (`records.pack_integers`), whether the
    most frequent answer is right (`vote_bits`), the mean entropy of the answers, nats, plain and corrected for few
    samples, and how many of all right samples are listed answers.
    """
    measure = measures.get(spec["task"])
    with _at_end(spec) as (engine, sets):
        asked, names = spec["coverage_temperatures"], [label(t) for t in spec["coverage_temperatures"]]
        reached, validated = (measure.reach(engine, name, sets[name], asked) for name in ("test", "validation"))
        solved = coverage.pass_at(validated, VALIDATED_BY).mean(axis=1)
        greedy = measure.accuracy(engine, "test", sets["test"])[0]
        drawn = {}
        for temperature in spec["coverage_sampled_at"]:
            rows = engine.generate("test", samples=spec["coverage_samples"], temperature=temperature)
            texts = [[text for text, _ in row] for row in rows]
            drawn[label(temperature)] = summary(measure, engine, sets["test"], texts)
        return {
            "n": len(sets["test"]),
            "greedy_bits": pack_bits(greedy),
            "reach": dict(zip(names, map(pack_probabilities, reached), strict=True)),
            "validation": dict(zip(names, (round(float(share), 6) for share in solved), strict=True)),
            "drawn": drawn,
        }


def summary(measure: Measures, engine: Any, problems: Sequence[Any], rows: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return the results from samples of each problem, for a record: `drawn` of `run_coverage`.

    Args:
        measure: measures of the task.
        engine: the engine, whose end token the listed answers have.
        problems: the problems that were asked.
        rows: (samples, problems) completions, without their end tokens.
    """
    n_right, voted, entropies, among_listed, end = [], [], [], 0, engine.tokenizer.eos_token
    for problem, texts in zip(problems, zip(*rows, strict=True), strict=True):
        listed = {answer.removesuffix(end) for answer in measure.right_answers(problem)}
        right = {text: n for text, n in Counter(texts).items() if measure.right(problem, text)}
        answers = Counter(map(measure.answer, texts))
        n_right.append(sum(right.values()))
        voted.append(vote_is_right(measure, problem, texts))
        entropies.append(coverage.answer_entropy(list(answers.values())))
        among_listed += sum(n for text, n in right.items() if text in listed)
    plain, corrected = np.mean(entropies, axis=0)
    return {
        "right": pack_integers(np.array(n_right)),
        "vote_bits": pack_bits(np.array(voted, dtype=int)),
        "entropy": round(float(plain), 5),
        "entropy_corrected": round(float(corrected), 5),
        "right_samples": sum(n_right),
        "listed": among_listed,
    }


def vote_is_right(measure: Measures, problem: Any, texts: Sequence[str]) -> bool:
    """Return whether the most frequent answer to a problem is right; if most completions give none, it is not."""
    answers = [measure.answer(text) for text in texts]
    chosen = coverage.vote(answers)
    return chosen is not None and measure.right(problem, texts[answers.index(chosen)])


# ---- answers

ANSWERED = {"greedy": 0, "t1": 1}
"""Name in a record of answers -> number of samples drawn per problem; 0: greedy decoding."""
MOST = 320
"""Maximum number of problems in a record of answers."""
LONGEST = 40
"""Maximum number of characters of a text; fewer if the record has no room for so many."""
_REST = 700
"""Bytes of a record besides its spec, its texts and its bits: budget, commit, environment, names."""
_NONE, _CUT = "!", "$"
_SAFE = "+*/()=-.,:;<>?@[]^_{|}~#&'`"  # not "!", "$", "%", or what JSON escapes


class Written(NamedTuple):
    """What a model wrote in reply to a problem."""

    text: str
    """The answer, or the whole completion if it gives none."""
    answered: bool
    """Whether the text is an answer that the task found in the completion."""
    cut: bool
    """Whether the end of the text was cut off."""


def answers_spec(base: str, end: Mapping[str, Any] | None, settings: Settings, scale: str) -> Spec:
    """Return the spec that records what a model answers.

    Args:
        base: base that the runs started from, a plain one of the tiny world.
        end: the model, from `weight_cache.end`; None: the base itself.
        settings: max_completion_length; and coverage_problems, number of test problems, 1 to 320.
        scale: scale of the notebook.

    Raises:
        ValueError: too few test problems or too many, an end of another base, a setting that is missing, or a base
            outside the tiny world.
    """
    taken = specs.take(settings, ("max_completion_length", "coverage_problems"), "a run of kind 'answers'")
    n = whole_number("coverage_problems", taken["coverage_problems"], most=MOST, why="a record has room for so many")
    own = {"max_completion_length": taken["max_completion_length"], "test_problems": n}
    return weight_cache.at_end(specs.begin_tiny("answers", base, scale, {}) | own, end)


def run_answers(spec: Spec) -> Record:
    """Return a model's answers to the test problems as short texts: greedy, and one sample at temperature 1.

    A text is the answer that `Measures.answer` finds in a completion, or the completion itself if it finds none.
    Whether it is right is graded on the whole completion.

    The record has `n`, the number of problems; `longest`, the number of characters that texts are cut to so that they
    fit; `greedy` and `t1`, the texts (`pack_texts`); and `greedy_bits` and `t1_bits`, which of them are right
    (`records.pack_bits`). All models draw their sample with the same random numbers.

    Raises:
        ValueError: the spec is so long that the record has no room for the texts, or the weights are not those of
            their record.
    """
    measure = measures.get(spec["task"])
    with _at_end(spec) as (engine, sets):
        problems = sets["test"]
        rows = {name: engine.generate("test", samples=samples) for name, samples in ANSWERED.items()}
    bits = {f"{name}_bits": pack_bits(measure.graded(problems, row)[0]) for name, row in rows.items()}
    written = {name: [_answered(measure, text) for text, _ in row] for name, (row,) in rows.items()}
    room = MAX_RECORD - _REST - len(canonical_json(spec)) - sum(map(len, bits.values()))
    for longest in range(LONGEST, -1, -1):
        packed = {name: pack_texts(texts, longest) for name, texts in written.items()}
        if sum(map(len, packed.values())) <= room:
            return {"n": len(problems), "longest": longest} | bits | packed
    raise ValueError(f"no room for {len(problems)} answers in {room} bytes: set a smaller coverage_problems.")


def _answered(measure: Measures, completion: str) -> tuple[str, bool]:
    """Return the answer of a completion, or else the completion, and whether it is an answer."""
    answer = measure.answer(completion)
    return (completion, False) if answer is None else (answer, True)


def pack_texts(texts: Sequence[tuple[str, bool]], longest: int = LONGEST) -> str:
    """Return texts as one ASCII text, in order, separated by spaces.

    Each is percent-encoded (RFC 3986), so that it has no space, quote or backslash. "!" before a text marks a
    completion without an answer, and "$" after it an end that was cut off.

    Args:
        texts: (problems,) pairs of a text and whether it is an answer.
        longest: number of characters that a text is cut to.

    Raises:
        ValueError: there are no texts.

    >>> pack_texts([("3*(2+4)", True), ("a b", False), ("123456", True)], longest=5)
    '3*(2+$ !a%20b 12345$'
    """
    require(texts, "no texts: pass at least one answer.")
    return " ".join(
        ("" if answered else _NONE)
        + quote(text[:longest], safe=_SAFE, errors="replace")
        + (_CUT if len(text) > longest else "")
        for text, answered in texts
    )


def unpack_texts(packed: str, n: int) -> list[Written]:
    """Return the (n,) texts that `pack_texts` wrote.

    Raises:
        ValueError: there are not n texts.

    >>> unpack_texts("3*(2+$ !a%20b", 2)
    [Written(text='3*(2+', answered=True, cut=True), Written(text='a b', answered=False, cut=False)]
    """
    parts = packed.split(" ")
    require(len(parts) == n, f"{len(parts)} texts where there are {n} problems: damaged record")
    return [
        Written(unquote(part.removeprefix(_NONE).removesuffix(_CUT)), not part.startswith(_NONE), part.endswith(_CUT))
        for part in parts
    ]


# ---- perturbed copies

BEST = (1, 16, 64)
"""Numbers of copies, the best on the validation set, that vote."""
_PERTURBED = ("max_completion_length", "perturbed_members", "perturbed_problems", "perturbed_validation")


def perturbed_specs(base: str, sigmas: Sequence[float], repeats: int, settings: Settings, scale: str) -> list[Spec]:
    """Return the specs of a base with noise on its weights, one for each sigma and repeat.

    Args:
        base: one of the tiny world whose right answers are listed.
        sigmas: standard deviations of the noise, weight units.
        repeats: number of repeats, each with its own noise.
        settings: max_completion_length; perturbed_members, number of copies, 2 to 4,095; perturbed_problems, number of
            test problems; perturbed_validation, number of problems on which the best copies are chosen.
        scale: scale of the notebook.

    Raises:
        ValueError: no sigmas, one that is repeated or not above 0; no repeats; too few copies or too many; too many
            test problems; a setting that is missing.
    """
    _check_sigmas("sigmas", sigmas, most=100)
    whole_number("repeats", repeats)
    taken = specs.take(settings, _PERTURBED, "noise on the weights")
    whole_number("perturbed_members", taken["perturbed_members"], 2, 4095, _COUNTED)
    sizes = {"test_problems": taken["perturbed_problems"], "validation_problems": taken["perturbed_validation"]}
    common = specs.begin_tiny("perturbed", base, scale, sizes) | sizes
    common |= {"max_completion_length": taken["max_completion_length"], "members": taken["perturbed_members"]}
    return [common | {"sigma": float(sigma), "repeat": repeat} for sigma in sigmas for repeat in range(repeats)]


def run_perturbed(spec: Spec) -> Record:
    """Return the measurement of what perturbed copies of a base solve, each answering greedily.

    The record has `drawn`, as for kind "coverage" but with copies instead of samples; `validation`, the number of
    copies that solve each validation problem; `member`, mean and standard deviation of the test accuracy over copies;
    and `best`, number of copies chosen on the validation set -> their mean test accuracy, and that of their vote.
    """
    from evoalign_study.rollouts import greedy_answers

    measure = measures.get(spec["task"])
    run_key = noise.run_key("perturbed", spec["repeat"])
    with training.opened(spec) as (engine, sets):
        answered = greedy_answers(engine, ["test", "validation"], run_key, spec["sigma"], spec["members"])
        texts = [[text for text, _ in row] for row in answered["test"]]
        right = {name: measure.graded(sets[name], rows) for name, rows in answered.items()}
        accuracies = right["test"].mean(1)
        # of equally good copies, the earlier comes first
        order = np.argsort(-right["validation"].mean(1), kind="stable")
        best = {}
        for size in (size for size in BEST if size <= spec["members"]):
            chosen = zip(*(texts[i] for i in order[:size]), strict=True)
            votes = [vote_is_right(measure, *pair) for pair in zip(sets["test"], chosen, strict=True)]
            mean = round(float(accuracies[order[:size]].mean()), 6)
            best[str(size)] = {"mean": mean, "vote": round(float(np.mean(votes)), 6)}
        return {
            "n": len(sets["test"]),
            "drawn": summary(measure, engine, sets["test"], texts),
            "validation": pack_integers(right["validation"].sum(0)),
            "member": {"mean": round(float(accuracies.mean()), 6), "sd": round(float(accuracies.std(ddof=1)), 6)},
            "best": best,
        }


# ---- noise on the weights of trained models

_NOISE = ("max_completion_length", "validation_problems", "noise_sigmas", "noise_trials")


def _is_head(name: str) -> bool:
    return geometry.layer_of(name, tied=True) in ("head", "embedding (tied)")


PARTS: dict[str, tuple[str, Callable[[str], bool] | None]] = {
    "isotropic": ("isotropic", None),
    "relative": ("per-tensor relative", None),
    "head": ("isotropic", _is_head),
    "body": ("isotropic", lambda name: not _is_head(name)),
}
"""Part -> how its noise is scaled, and which tensors get it; None: all. A sigma is the standard deviation in weight
units; relative noise is proportional to the root mean square of each tensor, with the squared length that isotropic
noise of this sigma has on the base."""


def noise_spec(base: str, end: Mapping[str, Any] | None, settings: Settings, scale: str) -> Spec:
    """Return the spec of a model with noise on its weights.

    Args:
        base: base that the runs started from, a plain one of the tiny world.
        end: the model, from `weight_cache.end`; None: the base itself.
        settings: max_completion_length, validation_problems, noise_sigmas (weight units, each above 0, at most 8 of
            them) and noise_trials (draws of each noise, 1 to 8).
        scale: scale of the notebook.

    Raises:
        ValueError: sigmas or trials out of range, an end of another base, a setting that is missing, or a base outside
            the tiny world.
    """
    taken = specs.take(settings, _NOISE, "noise")
    spec = specs.begin_tiny("noise", base, scale, taken) | taken
    _check_sigmas("noise_sigmas", spec["noise_sigmas"], most=8)
    whole_number("noise_trials", spec["noise_trials"], most=8, why="a record has room for so many")
    return weight_cache.at_end(spec, end)


def run_noise(spec: Spec) -> Record:
    """Return the accuracy of a model on the validation set, without noise and with each kind of it.

    The record has `clean`, decoding -> accuracy, and for each of `PARTS` decoding -> a list for each sigma, with one
    accuracy per draw. All are fractions.
    """
    measure = measures.get(spec["task"])
    with _at_end(spec) as (engine, sets):
        layout = engine.layout
        weights = {name: torch.from_numpy(part) for name, part in layout.views(engine.master.copy()).items()}
        size = float(np.sqrt(np.mean(np.square(weight_cache.of_base(spec["base"]), dtype=np.float64))))

        def accuracies() -> dict[str, float]:
            asked = "validation", sets["validation"]
            right = {name: measure.accuracy(engine, *asked, **how) for name, how in DECODINGS.items()}
            return {name: round(float(each.mean()), 5) for name, each in right.items()}

        def shaken(part: str, sigma: float, trial: int) -> dict[str, float]:
            mode, only = PARTS[part]
            key = noise.member_key(noise.run_key("robustness", 0), 0, trial)
            scale = sigma / size if part == "relative" else sigma
            moved = robustness.perturb(weights, scale, key, mode=mode, only=only)
            for name, view in layout.views(engine.master).items():
                view[...] = moved[name].numpy()
            return accuracies()

        result: Record = {"n": len(sets["validation"]), "clean": accuracies()}
        for part in PARTS:
            told = [[shaken(part, s, trial) for trial in range(spec["noise_trials"])] for s in spec["noise_sigmas"]]
            result[part] = {name: [[draw[name] for draw in draws] for draws in told] for name in DECODINGS}
        return result


# ---- straight lines between two models

_PATH = ("max_completion_length", "validation_problems", "path_points")
_JUDGED = ("task", "measure", "validation_problems")
"""Settings that `specs.begin` reads: the task, the measure of length that rewards conciseness, and the number of
its questions, which cannot exceed its split."""


def begin_path(base: str, settings: Settings, scale: str) -> Spec:
    """Return a `path_spec` without its ends, which refuses settings before there are ends."""
    asked = {name: settings[name] for name in _JUDGED if name in settings}
    spec = specs.begin_tiny("path", base, scale, asked, tiny.BASES + tiny.QUESTION_BASES)
    spec |= specs.take(settings, _PATH, "a path")
    points, problems = whole_number("path_points", spec["path_points"], 3, 50), spec["validation_problems"]
    asked = f"path_points={points} on {problems} problems are {points * problems} answers"
    require(points * problems <= 7000, f"{asked}, but a record has room for 7,000: use 21 points on 256 problems, say.")
    return spec


def path_spec(
    base: str, first: Mapping[str, Any] | None, last: Mapping[str, Any] | None, settings: Settings, scale: str
) -> Spec:
    """Return the spec of the line (1 - a) * first + a * last, for a from 0 to 1.

    Args:
        base: base that all runs started from, a plain one of the tiny world that was trained for the task.
        first, last: ends, from `weight_cache.end`; None: the base itself.
        settings: max_completion_length, validation_problems (asked at every point) and path_points, 3 to 50; task
            (default "countdown"), and for conciseness its measure.
        scale: scale of the notebook.

    Raises:
        ValueError: both ends are the same; ends of another base; too few or too many points; a setting that is missing;
            a base outside the tiny world or of another task; or whatever the task refuses.
    """
    spec = begin_path(base, settings, scale)
    require(first != last, "both ends of the path are the same model: pass two.")
    for name, end in (("first", first), ("last", last)):
        if end is not None:
            spec[name] = weight_cache.at_end({"base": base}, end)["end"]
    return spec


def run_path(spec: Spec) -> Record:
    """Measure every point of a line on the same problems, with the same random numbers.

    The record has the distance between the ends and, in lists with one entry per point: for each of `DECODINGS`, which
    problems are answered rightly, and the mean reward; the negative log-likelihood of a right answer, one fixed answer
    per problem, nats per answer; and the KL from the base along these answers, nats per token. The task defines what is
    right, the reward and the right answer (`Measures.judged`, `Measures.right_answer`).
    """
    measure, rng = measures.get(spec["task"]), random.Random("answers of paths")
    base, tokenizer = base_models.model_of(spec | {"kind": "base"})
    points: list[dict[str, Any]] = []
    with training.opened(spec) as (engine, sets):
        problems, prompts = sets["validation"], engine.prompts["validation"]
        texts = [measure.right_answer(problem, rng) for problem in problems]
        answers = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        written = kl.samples(prompts.ids, prompts.mask, answers, engine.eos_ids)
        start = engine.master.copy()
        ends = [
            weight_cache.displacement(spec[name], start, engine.layout) if name in spec else np.zeros(len(start))
            for name in ("first", "last")
        ]
        for a in np.linspace(0, 1, spec["path_points"]):
            engine.master[:] = weight_cache.moved(start, (1 - a) * ends[0] + a * ends[1])
            engine.write_model()
            drift = kl.compare(engine.model, base, written)
            point: dict[str, Any] = {
                "nll": significant(-float(drift.log_policy.sum()) / len(problems)),
                "kl": significant(float(drift.exact.sum() / drift.mask.sum())),
            }
            for name, how in DECODINGS.items():
                (row,) = engine.generate("validation", **how)
                rewards, right = measure.judged(spec, engine, problems, row)
                point[f"reward_{name}"] = significant(rewards.mean())
                point[f"{name}_bits"] = pack_bits(right.astype(int))
            points.append(point)
        distance = significant(np.linalg.norm(ends[1] - ends[0]), 7)
    return {"n": len(problems), "distance": distance, "points": {k: [p[k] for p in points] for k in points[0]}}


# ---- models merged from the weights of several runs

TEMPERATURE = 0.6
"""Temperature at which a merged model samples the test set, besides greedy decoding and temperature 1."""
_MERGE = ("max_completion_length", "validation_problems", "test_problems", "skill_messages")


def merge_specs(records: Sequence[Record], settings: Settings, scale: str, **how: Any) -> Spec:
    """Return the spec that measures the model at base + factor * (mean of the runs' weights - base).

    Args:
        records: records of training runs of one arm and setting from one plain base of the tiny world, which differ in
            their seeds. A single run is measured as it is.
        settings: max_completion_length, validation_problems, test_problems, skill_messages (per skill).
        scale: scale of the notebook.
        **how: factor, as_long_as and draw, as for `weight_cache.end`.

    Raises:
        ValueError: runs that do not form a group (`weight_cache.group`), a factor that is not finite, a setting that is
            missing, or a base outside the tiny world or of another task.
    """
    end = weight_cache.end(records, **how)
    taken, task = specs.take(settings, _MERGE, "a merged model"), {"task": end["of"]["run"]["task"]}
    return (
        specs.begin_tiny("merge", end["of"]["run"]["base"], scale, taken | task, (*tiny.BASES, *tiny.SEQUENCE_BASES))
        | taken
        | {"arm": end["of"]["run"]["arm"]}
        | end
    )


def run_merge(spec: Spec) -> Record:
    """Return the distance of a merged model from its base, and what it can do.

    The record has the norm of the displacement; results on the test set, greedily, at `TEMPERATURE` and at temperature
    1; the KL from the base on the task; and accuracy and KL on each skill that no reward touches.
    """
    measure = measures.get(spec["task"])
    with training.opened(spec) as (engine, sets):
        moved = weight_cache.displacement(spec, engine.master, engine.layout)
        engine.master[:] = weight_cache.moved(engine.master, moved)
        return {
            "d": engine.layout.d,
            "norm": significant(np.linalg.norm(moved), 7),
            "test": measure.tested(engine, sets["test"])
            | measure.sampled(spec, engine, sets, "test", [TEMPERATURE], 16),
            "kl_policy_base": base_models.kl_from_base(spec | {"seed": 0}, engine),
            "skills": measure.skills(spec, engine),
        }


# ---- runs without a part of what they moved

_PRUNED = ("max_completion_length", "test_problems", "pruned_shares")
PRUNED = ("smallest", "random", "mean")
"""Ways to take a share of the weights back to the base: those that moved least, any, or those that moved least, which
get the mean displacement of other runs instead."""


def pruned_specs(records: Sequence[Record], settings: Settings, scale: str) -> list[Spec]:
    """Return the specs that measure each run without shares of its displacement, one for each run.

    Args:
        records: records of runs that form a group, at least two; the others of a run give the mean.
        settings: max_completion_length, test_problems, and pruned_shares, between 0 and 1.
        scale: scale of the notebook.

    Raises:
        ValueError: runs that form no group, a base outside the tiny world, or a setting that is missing.
    """
    taken, found = specs.take(settings, _PRUNED, "a pruned run"), []
    for i, record in enumerate(records):
        end, others = weight_cache.end([record]), weight_cache.group([*records[:i], *records[i + 1 :]])
        begun = specs.begin_tiny("pruned", end["of"]["run"]["base"], scale, taken) | taken
        found.append(begun | {"arm": end["of"]["run"]["arm"], "others": others} | end)
    return found


def run_pruned(spec: Spec) -> Record:
    """Return what a run solves, `whole` and without each share of its displacement in each of the ways `PRUNED`.

    `models` has the results on the test set by name, such as "smallest_78"; `squares` the share of |D|^2 that is left.
    """
    measure, models, squares = measures.get(spec["task"]), {}, {}
    with training.opened(spec) as (engine, sets):
        start = engine.master.copy()
        own = weight_cache.displacement(spec, start, engine.layout)
        mean = np.mean([master.astype(np.float64) - start for master in weight_cache.of_group(spec["others"])], axis=0)
        least, drawn = np.argsort(np.abs(own), kind="stable"), np.random.default_rng(0).permutation(len(own))
        ways = {"smallest": (least, 0 * own), "random": (drawn, 0 * own), "mean": (least, mean)}
        parts = {"whole": own}
        for share in spec["pruned_shares"]:
            for how, (order, instead) in ways.items():
                left, gone = own.copy(), order[: round(share * len(own))]
                left[gone] = instead[gone]
                parts[f"{how}_{100 * share:.0f}"] = left
        for name, part in parts.items():
            engine.master[:] = weight_cache.moved(start, part)
            models[name] = {"test": measure.tested(engine, sets["test"])}
            squares[name] = significant(part @ part / (own @ own), 4)
    return {"d": engine.layout.d, "models": models, "squares": squares}


# ---- products of displacements

BLOCK = 8
"""Maximum number of runs of each group in one record of products; with more, it would grow too long."""


def products_specs(groups: Sequence[Sequence[Record]], scale: str) -> list[Spec]:
    """Return the specs of all products among the runs of several groups, one for each pair of blocks of `BLOCK` runs.

    Args:
        groups: records of training runs; those of a group differ only in their seeds, and all start from one plain base
            of the tiny world.
        scale: scale of the notebook.

    Raises:
        ValueError: runs that do not form a group, groups from several bases, or a base outside the tiny world.
    """
    parts = [records[first : first + BLOCK] for records in groups for first in range(0, len(records), BLOCK)]
    blocks = list(map(weight_cache.group, parts))
    bases = sorted({block["run"]["base"] for block in blocks})
    named = ", ".join(bases) or "no base"
    require(len(bases) == 1, f"displacements from {named} have no products: pass runs from one base.")
    begun = specs.begin_tiny("products", bases[0], scale, {})
    return [begun | {"a": a, "b": b} for i, a in enumerate(blocks) for b in blocks[i:]]


def run_products(spec: Spec) -> Record:
    """Return the inner products of the displacements of block a with those of block b, by layer.

    For each layer (`geometry.layer_of`), the record has the number of entries, |start|^2, and the matrix of products,
    (runs of a, runs of b), weight units squared. For a block with itself, it also has the number of entries of each run
    that moved at all, in float32 and after rounding both ends to bfloat16.
    """
    start, layout = weight_cache.of_base(spec["base"]), weight_cache.layout_of(spec["base"])
    a, own = weight_cache.of_group(spec["a"]), spec["a"] == spec["b"]
    b = [] if own else weight_cache.of_group(spec["b"])
    views = [layout.views(torch.from_numpy(master)) for master in (start, *a, *b)]
    dtypes = ("float32", "bfloat16")
    layered = geometry.measure(views[0], views[1:], dtypes).by("layer")
    columns = slice(0, len(a)) if own else slice(len(a), None)
    layers = {}
    for i, name in enumerate(layered.names):
        products = [[significant(x, 7) for x in row] for row in layered.gram[i, : len(a), columns]]
        layer = {"entries": int(layered.entries[i]), "start": significant(layered.start[i], 7), "products": products}
        moved = {dtype: layered.moved[dtype][i].tolist() for dtype in dtypes}
        layers[name] = layer | ({"moved": moved} if own else {})
    return {"d": layout.d, "layers": layers}


# ---- products along runs


def stretch_specs(
    records: Sequence[Record], along: Sequence[Record], stretches: Sequence[Sequence[int]], scale: str
) -> list[Spec]:
    """Return the specs of the products of what ES runs moved in a stretch of their steps, one for each stretch.

    Args:
        records: records of ES runs that differ only in their seeds, from a plain base of the tiny world.
        along: records of runs of another arm from that base, whose mean displacement is a direction to project on.
        stretches: pairs of numbers of steps, from the first to the last.
        scale: scale of the notebook.

    Raises:
        ValueError: runs that do not form a group, or a base outside the tiny world.
    """
    runs, others = weight_cache.group(records), weight_cache.group(along)
    steps = sorted({step for stretch in stretches for step in stretch})
    begun = specs.begin_tiny("stretch", runs["run"]["base"], scale, {})
    begun |= {"runs": runs, "along": others, "steps": steps}
    return [begun | {"first": first, "last": last} for first, last in stretches]


def run_stretch(spec: Spec) -> Record:
    """Return the products of what runs moved in a stretch of their steps, with one another and with a direction.

    The record has `norms`, of each run; `cosines` of each run with those before it, run by run, in millionths; and
    `along`, the component of each run along the mean displacement of the other arm's runs. Norms and components are in
    weight units.
    """
    start = weight_cache.of_base(spec["base"])
    after = _after(canonical_json(spec["runs"]), tuple(spec["steps"]))
    first, last = (after[:, spec["steps"].index(spec[name])].astype(np.float64) for name in ("first", "last"))
    moved = last - first
    direction = np.mean([master.astype(np.float64) - start for master in weight_cache.of_group(spec["along"])], axis=0)
    norms = np.linalg.norm(moved, axis=1)
    sizes = np.outer(norms, norms)
    cosines = np.divide(moved @ moved.T, sizes, out=np.zeros_like(sizes), where=sizes > 0)  # all steps may be tied
    return {
        "d": weight_cache.layout_of(spec["base"]).d,
        "norms": [significant(norm) for norm in norms],
        "cosines": [round(1e6 * float(cosine)) for i, row in enumerate(cosines) for cosine in row[:i]],
        "along": [significant(x, 5) for x in moved @ direction / np.linalg.norm(direction)],
    }


@lru_cache(maxsize=1)  # the stretches of one group share a replay of each run
def _after(runs: str, steps: tuple[int, ...]) -> np.ndarray:
    """Return the weights (runs, steps, weights) of the runs of a group, given as JSON, after numbers of steps."""
    return np.array(list(weight_cache.at_steps(json.loads(runs), steps)))


def gram_of_stretch(record: Record) -> np.ndarray:
    """Return the products (runs, runs) of what runs moved in a stretch, weight units squared, as `run_stretch` has."""
    norms = np.array(record["norms"])
    cosines = np.zeros((len(norms), len(norms)))
    cosines[np.tril_indices(len(norms), -1)] = np.array(record["cosines"]) / 1e6
    return (cosines + cosines.T + np.eye(len(norms))) * np.outer(norms, norms)
