"""What a spec runs: the specs of runs, and the code that turns each into a record.

`experiments` stores and finds records; here is what is in them. A kind of spec has a function that makes its specs and
one that runs it (`RUNNERS`): "base" measures an untrained model, "train" trains one with an arm, "best_of_n" lets the
reward choose among samples of the base, "audit" repeats an ES run in half precision, "estimator" compares single ES
steps with the exact gradient, "kl" compares estimators of the KL with its exact value, "decoding" measures a model that
another record is of again, under more sampling temperatures.

Every training run of Countdown is evaluated alike: validation accuracy along the way, greedy and at temperature 1, and
the test set once, at the end, with the KL of the trained model from its base. (`conciseness_runs` says what is measured
of the other task.) Evaluation is in no budget. A run whose weights stop
being finite goes on to its end like any other, with a model that answers nothing right: its record has the step after
which that was so, `diverged`, and null for every number that is not finite.

With another engine than the local one the arms that TRL trains run in processes of their own, one for each GPU, which
`python -m evoalign_lib.runs` is the program of (see `grpo` for what they share).
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from evoalign_lib import conciseness_runs, ledger, paths
from evoalign_lib.experiments import (
    ENGINE_VERSION,
    MAX_CURVE,
    Record,
    Spec,
    ledger_file,
    read_records,
    spec_hash,
)

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


def base_digest(model: Any) -> str:
    """SHA-256 of a model's parameters in float32, by name, 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode() + b"\0" + parameter.detach().float().numpy().tobytes())
    return digest.hexdigest()[:16]


def origin_digest(name: str) -> str:
    """What a model of the user's is, without loading it, 16 hexadecimal digits.

    Args:
        name: a folder, of whose weights and configuration it is the SHA-256; or a name on the Hub, of which it is the
            revision's commit, so that no weights are fetched for it.

    Raises:
        ValueError: no such model, or a folder without weights in safetensors files.
    """
    from transformers import AutoConfig

    from evoalign_lib.es import load_model

    folder = Path(name)
    if not folder.is_dir():
        try:
            commit = AutoConfig.from_pretrained(name, trust_remote_code=False)._commit_hash
        except (OSError, ValueError):
            commit = None
        return commit[:16] if commit else base_digest(load_model(name)[0])  # which says what is wrong with the name
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"model {name!r} has no *.safetensors: weights of other formats are not loaded, since they may hold code. "
            "Save it anew with save_pretrained()."
        )
    digest = hashlib.sha256()
    for path in (folder / "config.json", *files):
        digest.update(path.name.encode() + b"\0")
        with open(path, "rb") as file:
            for block in iter(lambda: file.read(1 << 24), b""):
                digest.update(block)
    return digest.hexdigest()[:16]


_EVALUATION = ("max_completion_length", "validation_problems", "test_problems")
_ES = ("population_size", "sigma", "alpha", "steps", "prompts_per_step", "curve_points")
_GRADIENT = ("learning_rate", "beta", "num_generations", "steps", "prompts_per_step", "curve_points")
_SFT = ("learning_rate", "num_generations", "prompts", "batch_size", "epochs")
_OPTIONAL = ("curve_spacing", "unique_prompts", "scale_rewards")
_ENGINE = ("engine", "gpus", "tensor_parallel")

ARMS = {
    "es": _ES,
    "es_shuffled": _ES,
    "es_random": _ES,
    "es_sampled": _ES,
    "grpo": _GRADIENT,
    "dr_grpo": _GRADIENT,
    "dapo": _GRADIENT,
    "rloo": _GRADIENT,
    "grpo_random": _GRADIENT,
    "sft": _SFT,
}
"""The arms that train, and the settings that each needs. Nulls: "es_shuffled" and "es_random" (fitness permuted, or
drawn), "grpo_random" (random reward). "es_sampled" samples its rollouts at temperature 1 with common random numbers.
"sft" fine-tunes on right answers among samples of the base."""


def base_specs(bases: Sequence[str], settings: Mapping[str, Any], scale: str) -> list[Spec]:
    """Specs of the measurement of untrained bases.

    Args:
        bases: shipped bases ("A0", ...), or models on the Hub or in folders, which get the public problems.
        settings: max_completion_length, validation_problems, test_problems; for the tiny world's base "H0" also
            filler_steps, how long all prompts ask it to think (see `tiny.dataset`). With task "conciseness", of bases
            of family B or models from elsewhere: max_completion_length and, where they are there, measure, questions,
            validation_problems, test_problems and noise_draws (see `conciseness_runs.spec_fields`).
        scale: of the notebook.

    Raises:
        ValueError: more test problems than there are; filler_steps missing or for another base, of a length that the
            base has not learned, or longer than completions may be; settings of the task conciseness for the other one;
            or what `conciseness_runs.spec_fields` refuses.
        FileNotFoundError: a file of questions of the task conciseness is not there.
    """
    wanted = {k: settings[k] for k in _evaluation(settings)} | _elsewhere(bases, settings)
    return [_spec("base", base, scale, settings) | wanted for base in bases]


def _evaluation(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The settings of evaluation that must be there: of the conciseness task the sets have sizes of their own."""
    return _EVALUATION[:1] if settings.get("task") == "conciseness" else _EVALUATION


def _elsewhere(bases: Sequence[str], settings: Mapping[str, Any], arm: str = "base") -> dict[str, Any]:
    """The settings of an engine that is not the local one, which has none in a spec."""
    from evoalign_lib import tiny

    if settings.get("engine", "local") == "local":
        return {}
    for base in bases:
        if base in tiny.SHIPPED:
            raise ValueError(
                f"engine={settings['engine']!r} is for models of the Hub or of a folder; {base!r} is one of the tiny "
                "world's, for which engine='local' is there."
            )
    given = {name: settings[name] for name in _ENGINE if settings.get(name) is not None}
    if ARMS.get(arm, _ES) is _ES:
        return given
    if given["engine"] == "ray" and not given.get("gpus"):
        return {}  # a cluster without GPUs: vLLM would be alone on one of its machines
    # TRL's own vLLM, on GPUs of one machine; fine-tuning is not shared out
    gpus = 1 if arm == "sft" else given.get("gpus") or given.get("tensor_parallel") or 1
    return {"engine": "vllm", "gpus": gpus}


def train_specs(
    arm: str, bases: Sequence[str], seeds: Iterable[int], settings: Mapping[str, Any], scale: str
) -> list[Spec]:
    """Specs of training runs: those of the bases, with arm, seed and hyper-parameters.

    Args:
        arm: one of `ARMS`.
        settings: as for `base_specs`, and those that `ARMS` names: for ES population_size, sigma, alpha; for gradient
            arms learning_rate, beta, num_generations; for both steps, prompts_per_step, curve_points. Where they are
            there: curve_spacing "log" (points evenly spaced in the logarithm of the steps; else evenly in steps),
            unique_prompts (the run sees so many problems, again and again: each equally often in the whole run, in turn
            by a gradient arm and in random order by ES; without it every step has new ones in the tiny world, and other
            models train on all public problems; with task "conciseness" bases of the tiny world need it, 2 or 200, and
            other models train on so many of their training questions, or on all), scale_rewards in the place of the
            arm's own, engine ("local", "vllm" or "ray"), gpus and tensor_parallel as `ESConfig` has them (the arms that
            TRL trains have vLLM beside the model, on as many GPUs of one machine: see `grpo`; "sft" has one GPU, and
            on a cluster without GPUs they run locally), and for GRPO and its relatives micro_batch (completions in a
            backward pass of one GPU; else all of its share of a step, too many for a large model).

    Raises:
        ValueError: an unknown arm, a setting that is missing, fewer curve points than hold the first step and the last
            or more than a record holds, said here and not after the run, an unknown curve_spacing, no prompts or more
            than there are, a step that does not fall into parts for GPUs and micro batches, or what `base_specs`
            refuses.
        FileNotFoundError: as `base_specs`.
    """
    from evoalign_lib import grpo, tiny
    from evoalign_lib.tasks import countdown

    if arm not in ARMS:
        raise ValueError(f"arm {arm!r} is not one of {', '.join(ARMS)}.")
    of_questions = settings.get("task") == "conciseness"
    for base in bases if of_questions else ():
        conciseness_runs.check(arm, base, settings)
    wanted = {}
    for name in _evaluation(settings) + ARMS[arm]:
        if name not in settings:
            raise ValueError(f"arm {arm!r} needs the setting {name!r}.")
        wanted[name] = settings[name]
    optional = (*_OPTIONAL, "micro_batch") if ARMS[arm] is _GRADIENT else _OPTIONAL
    wanted |= {name: settings[name] for name in optional if settings.get(name) is not None}
    wanted |= _elsewhere(bases, settings, arm)
    if ARMS[arm] is _GRADIENT:
        rollouts = wanted["prompts_per_step"] * wanted["num_generations"]
        grpo.shared(rollouts, wanted.get("micro_batch"), wanted.get("gpus", 1))
    if wanted.get("curve_spacing", "log") != "log":
        raise ValueError(f"curve_spacing={wanted['curve_spacing']!r}: use 'log', or leave it out for even spacing.")
    points, least = wanted.get("curve_points", MAX_CURVE), 3 if "curve_spacing" in wanted else 2
    if points > MAX_CURVE:
        raise ValueError(f"curve_points={points} is more than a record holds: at most {MAX_CURVE}.")
    if points < least:
        raise ValueError(f"curve_points={points} leaves out the last step: at least {least} are needed.")
    if wanted.get("unique_prompts", 1) < 1:
        raise ValueError(f"unique_prompts={wanted['unique_prompts']}: give at least 1, or leave it out for new ones.")
    for base in () if of_questions else bases:
        if base not in tiny.SHIPPED and wanted.get("unique_prompts", 1) > countdown.PUBLIC_TRAIN:
            raise ValueError(
                f"unique_prompts={wanted['unique_prompts']}: model {base!r} trains on public problems, of which there "
                f"are {countdown.PUBLIC_TRAIN}. Take so many, or fewer."
            )
    return [
        _spec("train", base, scale, settings) | {"arm": arm, "seed": seed} | wanted for base in bases for seed in seeds
    ]


SWEEP: dict[str, list[dict[str, float]]] = {
    "es": [{"sigma": s, "alpha": a} for s in (3e-3, 1e-2, 3e-2) for a in (2.5e-3, 5e-3, 1e-2, 2e-2)],
    "grpo": [{"learning_rate": r, "beta": b} for r in (3e-5, 1e-4, 3e-4, 1e-3) for b in (0.0, 0.01, 0.04)],
}
"""Twelve settings an arm, from which one is chosen: for ES as published, sigma and alpha; for GRPO, learning rate and
beta."""
SWEEP_SEED = 100


def sweep_specs(
    arm: str, base: str, settings: Mapping[str, Any], scale: str, choices: Sequence[Mapping[str, float]] | None = None
) -> list[Spec]:
    """Specs of a sweep: each setting once, at half length, on the validation set only, with a seed of its own.

    Args:
        arm: "es" or "grpo".
        settings: as for `train_specs`, at full length.
        choices: the settings compared; None: those of `SWEEP`.

    Raises:
        ValueError: the task conciseness, whose validation is a proxy that `ranked` must not rank by.
    """
    if settings.get("task") == "conciseness":
        raise ValueError("a sweep ranks by right answers, and conciseness validates by a reward of length: train a map")
    half = dict(settings) | {"steps": settings["steps"] // 2, "test_problems": 0}
    choices = SWEEP[arm] if choices is None else choices
    return [spec for c in choices for spec in train_specs(arm, [base], [SWEEP_SEED], half | dict(c), scale)]


def ranked(sweep: Sequence[Record]) -> list[tuple[float, dict[str, float]]]:
    """Score and setting of the runs of a sweep, best first.

    The score is greedy validation accuracy, the mean of the last three points of the curve: those of one point differ
    by more than most settings do. Of equal scores the earlier in the sweep comes first.
    """
    scored = []
    for r in sweep:
        names = SWEEP["es" if r["spec"]["arm"].startswith("es") else "grpo"][0]
        score = float(np.mean(r["curve"]["validation_greedy"][-3:]))
        scored.append((score, {name: r["spec"][name] for name in names}))
    return sorted(scored, key=lambda pair: -pair[0])


def best_of_n_specs(
    base: str, seeds: Iterable[int], samples: int, settings: Mapping[str, Any], scale: str
) -> list[Spec]:
    """Specs of best-of-n: the reward chooses among n samples of an untrained base, for n = 1, 2, 4, ... samples.

    Args:
        samples: drawn for each problem, at least 1.
        settings: max_completion_length, test_problems.
    """
    if samples < 1:
        raise ValueError(f"samples={samples} must be at least 1.")
    wanted = {k: settings[k] for k in ("max_completion_length", "test_problems")} | {"samples": samples}
    wanted |= _elsewhere([base], settings)
    return [_spec("best_of_n", base, scale, settings) | wanted | {"seed": seed} for seed in seeds]


def audit_specs(
    base: str,
    precision: str,
    noise: str,
    fitness: str,
    seeds: Iterable[int],
    settings: Mapping[str, Any],
    scale: str,
) -> list[Spec]:
    """Specs of runs of a bfloat16 model that differ in arithmetic or noise alone.

    Args:
        precision: "master", "kahan" or "inplace" (see `precision`).
        noise: "gaussian" or "tied".
        fitness: "reward", or "random", which generates nothing in training: arithmetic alone.
        settings: as for `train_specs`.
    """
    wanted = {k: settings[k] for k in _EVALUATION + _ES}
    arithmetic = {"dtype": "bfloat16", "precision": precision, "noise": noise, "fitness": fitness}
    return [_spec("audit", base, scale, settings) | arithmetic | wanted | {"seed": seed} for seed in seeds]


def estimator_specs(
    base: str, N: int, repeats: int, fitness: str, targets: str, settings: Mapping[str, Any], scale: str
) -> list[Spec]:
    """Specs of the comparison of single ES steps with the exact gradient, on two-number problems.

    Args:
        N: members.
        repeats: populations drawn.
        fitness: "expected" (of temperature 1, exact) or "greedy".
        targets: "any", or "not the sum": problems that the bases' habit, adding up, does not solve.
        settings: sigma, alpha, estimator_problems.

    Raises:
        ValueError: a base outside the tiny world, or one that needs filler_steps.
    """
    wanted = {k: settings[k] for k in ("sigma", "alpha", "estimator_problems")}
    spec = _spec("estimator", base, scale) | wanted | {"fitness": fitness, "targets": targets, "N": N}
    return [spec | {"repeat": repeat} for repeat in range(repeats)]


def kl_specs(base: str, sigma: float, repeats: int, settings: Mapping[str, Any], scale: str) -> list[Spec]:
    """Specs of the comparison of KL estimators with the exact KL, of a base moved by noise from the base itself.

    Args:
        sigma: standard deviation of the noise on every weight: it decides the size of the KL.
        repeats: draws of the noise, each with samples of its own.
        settings: max_completion_length, kl_problems (of the validation set), kl_samples (completions a problem).

    Raises:
        ValueError: an odd number of samples, of which two halves are made; a base outside the tiny world, or one that
            needs filler_steps.
    """
    if settings["kl_samples"] < 2 or settings["kl_samples"] % 2:
        raise ValueError(
            f"kl_samples={settings['kl_samples']} must be even: errors come from two halves of the samples."
        )
    wanted = {k: settings[k] for k in ("max_completion_length", "kl_problems", "kl_samples")}
    spec = _spec("kl", base, scale) | wanted | {"sigma": sigma}
    return [spec | {"repeat": repeat} for repeat in range(repeats)]


_OF_DECODING = ("digest", "temperatures", "samples", "at_step")


def decoding_specs(
    records: Iterable[Record], temperatures: Sequence[float], samples: int = 16, at_step: int | None = None
) -> list[Spec]:
    """Make the specs that measure models again, under more sampling temperatures than their records have.

    A spec is that of the record, of kind "decoding", with the digest of the weights that are measured, `temperatures`,
    `samples` and, where it is given, `at_step`. `trained_spec` takes these away again.

    Args:
        records: of training runs of Countdown in the tiny world, by any arm, or of its untrained bases.
        temperatures: of the samples of the test problems.
        samples: of each problem at each temperature, 1 to 16.
        at_step: an earlier step of ES runs, at which the validation set is measured, too.

    Raises:
        ValueError: a record of something else, or without a test set; temperatures that are none, are there twice or
            are not above 0; too many samples; a step that a run has not, or of a run that is not of ES.
    """
    from evoalign_lib import tiny
    from evoalign_lib.engines.local import check_temperature

    for temperature in temperatures:
        check_temperature(temperature)
    if not temperatures or len({_label(t) for t in temperatures}) < len(temperatures):
        raise ValueError(f"temperatures={list(temperatures)}: give at least one, and each once.")
    if not 1 <= samples <= 16:
        raise ValueError(f"samples={samples}: a record holds counts of 1 to 16.")
    specs = []
    for record in records:
        spec = record["spec"]
        name = f"the record {record['spec_hash']}"
        if spec["kind"] not in ("base", "train") or spec["task"] != "countdown" or spec["base"] not in tiny.SHIPPED:
            raise ValueError(f"{name} is not of a model of the tiny world that was trained on Countdown, or of a base.")
        if not (spec["test_problems"] and spec["validation_problems"]):
            raise ValueError(f"{name} has no test set or no validation set: only complete runs are measured again.")
        digest = spec["base_digest"] if spec["kind"] == "base" else record["digest"]
        made = spec | {"kind": "decoding", "digest": digest, "temperatures": list(temperatures), "samples": samples}
        if at_step is not None:
            if not spec.get("arm", "").startswith("es") or not 0 <= at_step <= spec["steps"]:
                raise ValueError(f"at_step={at_step}: {name} is not of an ES run of so many steps.")
            made["at_step"] = at_step
        specs.append(made)
    return specs


def trained_spec(spec: Spec) -> Spec:
    """Return the spec of the run whose model a spec of `decoding_specs` measures: of kind "train", or "base"."""
    kind = "train" if "arm" in spec else "base"
    return {name: value for name, value in spec.items() if name not in _OF_DECODING} | {"kind": kind}


def _spec(kind: str, base: str, scale: str, settings: Mapping[str, Any] | None = None) -> Spec:
    """What all specs begin with; settings are for the kinds that any model has, with prompts that may need fillers."""
    from evoalign_lib import tiny

    if settings is None and base not in tiny.BASES:
        raise ValueError(
            f"base {base!r} has no specs of kind {kind!r}, which are of plain models of the tiny world alone: take one "
            f"of {', '.join(tiny.BASES)}."
        )
    test_problems = 0
    if settings is not None and settings.get("task") == "conciseness":
        task = conciseness_runs.spec_fields(base, settings)
    elif base in tiny.QUESTION_BASES:
        raise ValueError(f"base {base!r} knows no Countdown: set task='conciseness', or take {', '.join(tiny.BASES)}.")
    elif given := [name for name in ("questions", "noise_draws") if (settings or {}).get(name)]:
        raise ValueError(f"{given[0]}={settings[given[0]]!r}: Countdown has no such thing, set task='conciseness'.")
    else:
        task = {"task": "countdown", "grader": "strict"}
        test_problems = 0 if settings is None else settings["test_problems"]
    if not 0 <= test_problems <= tiny.FIXED:
        raise ValueError(f"test_problems={test_problems}: the test set has {tiny.FIXED}. Take so many, or fewer.")
    spec = {"kind": kind} | task | {"base": base, "scale": scale}
    spec |= {"engine_version": ENGINE_VERSION} | _filler(base, settings or {})
    if base not in _DIGESTS:
        _DIGESTS[base] = base_digest(tiny.load(base)[0]) if base in tiny.SHIPPED else origin_digest(base)
    return spec | {"base_digest": _DIGESTS[base]}


def _filler(base: str, settings: Mapping[str, Any]) -> dict[str, int]:
    """The setting filler_steps where there is one, which is on the base that needs it and on no other."""
    from evoalign_lib import tiny

    steps = settings.get("filler_steps")
    if base not in tiny.FILLER_BASES:
        if steps is None:
            return {}
        raise ValueError(
            f"filler_steps={steps!r}: base {base!r} has not learned to think for a given length. Leave it out, or take "
            f"base {tiny.FILLER_BASES[0]!r}."
        )
    if steps not in tiny.FILLER_STEPS:
        raise ValueError(f"base {base!r} needs filler_steps, one of {list(tiny.FILLER_STEPS)}, got {steps!r}.")
    length, needed = settings["max_completion_length"], steps + tiny.MAX_COMPLETION_LENGTH
    if length < needed:
        raise ValueError(
            f"max_completion_length={length} cuts off {steps} filler steps and their answer: set at least {needed}."
        )
    return {"filler_steps": steps}


_DIGESTS: dict[str, str] = {}


def model_of(spec: Mapping[str, Any]) -> tuple[Any, Any]:
    """Model and tokenizer of a spec's base: float32 locally and to be trained by gradients, else bfloat16.

    The model of an ES run on another engine is its name: the trainer loads it, and the engine must know from where.
    """
    import torch
    from transformers import AutoTokenizer

    from evoalign_lib import tiny
    from evoalign_lib.es import load_model

    if spec["base"] in tiny.SHIPPED:
        return tiny.load(spec["base"])
    trained = spec["kind"] == "train"
    if spec.get("engine", "local") == "local" or (trained and ARMS[spec["arm"]] is not _ES):
        return load_model(spec["base"])
    if trained:
        return spec["base"], AutoTokenizer.from_pretrained(spec["base"])
    return load_model(spec["base"], keywords={"dtype": torch.bfloat16})


def _world(spec: Spec) -> tuple[Any, Any, dict[str, list]]:
    """Model, tokenizer and the problems of each split.

    In the tiny world every step has new training problems, unless the spec has unique_prompts. Other models train on
    the public ones, all of them or as many as unique_prompts says, drawn by the seed; "sft" goes through them again
    until it has as many prompts as its spec says.
    """
    from evoalign_lib import tiny
    from evoalign_lib.tasks import countdown

    if spec["task"] == "conciseness":
        return conciseness_runs.world(spec)
    sizes = {name: spec.get(f"{name}_problems", 0) for name in ("validation", "test")}
    training = spec["kind"] in ("train", "audit")
    if training:
        # a branch of the seed tree that no fixed set uses
        seed = np.random.SeedSequence([spec["seed"], 1])
        needed = spec["prompts"] if "prompts" in spec else spec["steps"] * spec["prompts_per_step"]
    if spec["base"] in tiny.SHIPPED:
        model, tokenizer = model_of(spec)
        sets = {name: tiny.problems(name, size) for name, size in sizes.items() if size}
        if training:
            unique = spec.get("unique_prompts", needed)
            sets["train"] = list(itertools.islice(itertools.cycle(tiny.problems("train", unique, seed)), needed))
        return model, tokenizer, sets
    model, tokenizer = model_of(spec)
    sets = {"train": countdown.load_public("train")}
    if training and not {"unique_prompts", "prompts"}.isdisjoint(spec):
        drawn = np.random.default_rng(seed).permutation(len(sets["train"]))[: spec.get("unique_prompts")]
        sets["train"] = [sets["train"][i] for i in itertools.islice(itertools.cycle(drawn), needed)]
    sets["validation"] = countdown.generate(sizes["validation"], 0, high=99, split="validation")
    sets["test"] = countdown.load_public("test")[: sizes["test"]]
    return model, tokenizer, {name: problems for name, problems in sets.items() if problems}


def _rows(spec: Spec, tokenizer: Any, problems: Sequence[Any]) -> list[dict[str, Any]]:
    """Rows of problems for a trainer or an engine, their prompts as the spec asks for."""
    from evoalign_lib import tiny
    from evoalign_lib.tasks import conciseness

    if spec["task"] == "conciseness":
        return conciseness.dataset(problems, tokenizer)
    return tiny.dataset(problems, tokenizer, spec.get("filler_steps"))


def _reward(spec: Spec) -> Callable[..., Any]:
    """The reward function that a run is trained on."""
    from functools import partial

    from evoalign_lib import grpo
    from evoalign_lib.tasks import conciseness, countdown

    if spec["arm"] == "grpo_random":
        return grpo.random_reward(spec["seed"])
    return partial(conciseness.reward, measure=spec["measure"]) if spec["task"] == "conciseness" else countdown.reward


def _accuracy(
    engine: Any, name: str, problems: Sequence[Any], samples: int, seed: int = 0, temperature: float = 1.0
) -> np.ndarray:
    """Right answers (samples or 1, problems) of the engine's current weights under the strict grader."""
    from evoalign_lib.tasks import countdown

    completions = engine.generate(name, samples=samples, seed=seed, temperature=temperature)
    return np.array(
        [
            [countdown.grade(text, p.numbers, p.target).answer for (text, _), p in zip(row, problems, strict=True)]
            for row in completions
        ]
    )


def _test(engine: Any, problems: Sequence[Any], samples: int = 16) -> dict[str, Any]:
    """Accuracy on the test set, greedy and at temperature 1 (mean of 16 samples), with the outcome of every problem."""
    return _greedy(engine, "test", problems) | _sampled(engine, "test", problems, [1.0], samples)


def _greedy(engine: Any, name: str, problems: Sequence[Any]) -> dict[str, Any]:
    """How many problems there are, and greedy accuracy with the outcome of every problem."""
    from evoalign_lib import stats

    greedy = _accuracy(engine, name, problems, 0)[0]
    share, bits = round(float(greedy.mean()), 6), stats.pack_bits(greedy.astype(int))
    return {"n": len(problems), "greedy": share, "greedy_bits": bits}


def _sampled(
    engine: Any, name: str, problems: Sequence[Any], temperatures: Sequence[float], samples: int
) -> dict[str, Any]:
    """Accuracy at each temperature (mean of the samples), with the number of right samples of every problem."""
    from evoalign_lib import stats

    found: dict[str, Any] = {}
    for temperature in temperatures:
        counts = _accuracy(engine, name, problems, samples, temperature=temperature).sum(0).astype(int)
        label = _label(temperature)
        found[label] = round(float(counts.mean()) / samples, 6)
        found[f"{label}_counts"] = stats.pack_counts(counts)
    return found


def _label(temperature: float) -> str:
    """What a temperature is called in records: t1, t0.6."""
    return f"t{temperature:g}"


def _run_base(spec: Spec) -> Record:
    """Accuracy of an untrained base: on the validation set with pass@k, and on the test set."""
    from evoalign_lib import tiny

    model, tokenizer, sets = _world(spec)
    with closing(_evaluation_engine(spec, model, tokenizer, sets)) as engine:
        plan = _plan(spec, engine)
        if spec["task"] == "conciseness":
            return conciseness_runs.base_outcome(spec, engine, sets) | plan
        test = _test(engine, sets["test"])
        return {"validation": tiny.measure(engine, sets["validation"], "validation"), "test": test} | plan


def run_train(spec: Spec, keep: Path | None = None, folder: Path | None = None) -> Record:
    """Return the record of a training run: validation accuracy along the way, that on the test set once, at the end.

    Args:
        spec: of `train_specs`.
        keep: where the ledger of an ES run goes, compressed; None: it is not kept.
        folder: where the run keeps checkpoints, logs for TensorBoard and the points of its curve, and from where it
            goes on if it was killed ("sft" starts anew), until `settle` is told that its record is stored. Of a
            gradient arm the trained model stays there (an ES run's ledger stands for it). None: nothing is kept.

    Raises:
        RuntimeError: another process works in the folder; or the processes of a gradient arm failed, saying how.
    """
    with _workplace(folder) as place:
        if spec["arm"].startswith("es") or spec.get("engine", "local") == "local":
            return _train_and_measure(spec, place, folder is not None, keep)
        return _launched(spec, place, folder is not None)


def _train_and_measure(spec: Spec, place: Path, lasting: bool, keep: Path | None = None) -> Record:
    with _trained(spec, place, lasting, keep) as run:
        return run.result | _outcome(spec, run.engine, run.start, run.sets, run.diverged)


class _Trained(NamedTuple):
    """A model that was trained just now."""

    engine: Any
    """which holds its weights, and decodes the problems of the sets"""
    start: np.ndarray
    """(layout.size,) float32: the weights that it was trained from"""
    sets: Mapping[str, list]
    """the problems of each split"""
    result: Record
    """what its record has so far"""
    diverged: Sequence[int]
    """the steps after which its weights were not finite"""


@contextmanager
def _trained(spec: Spec, place: Path, lasting: bool, keep: Path | None = None) -> Iterator[_Trained]:
    """A model trained as a spec says; its engine is closed where the context ends.

    Args:
        spec: of `train_specs`.
        place: where trainers write.
        lasting: whether that is kept, as `run_train` says.
        keep: where the ledger of an ES run goes, compressed.
    """
    if spec["arm"].startswith("es"):
        run = _train_by_es(spec, place, lasting, keep)
    else:
        run = (_train_by_sft if spec["arm"] == "sft" else _train_by_gradients)(spec, place, lasting)
    with run as trained:
        yield trained


_SETTLED = "settled"


@contextmanager
def _workplace(folder: Path | None) -> Iterator[Path]:
    """A temporary folder; or one that stays, emptied where the run in it was settled, for this process alone."""
    if folder is None:
        with tempfile.TemporaryDirectory() as made:
            yield Path(made)
        return
    if (folder / _SETTLED).exists():  # asked for again: nothing of the finished run may stand in for it
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        if fcntl is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise RuntimeError(f"another process trains in {folder}: wait for it, or end it.") from error
        with open(folder / "starts.txt", "a") as starts:
            starts.write(time.strftime("%Y-%m-%dT%H:%M:%SZ\n", time.gmtime()))
        yield folder


def settle(folder: Path) -> None:
    """Remove what a run kept in case it was killed; its record is stored. A run there begins anew from now on."""
    (folder / _SETTLED).touch()
    for pattern in ("checkpoint-*", "partial-*"):
        for left in folder.glob(pattern):
            shutil.rmtree(left)


def _launched(spec: Spec, place: Path, lasting: bool) -> Record:
    """Run a gradient arm in processes of its own, one a GPU, which see no other GPUs.

    Raises:
        RuntimeError: they failed; the message has the end of what they wrote, and says where all of it is.
    """
    files = {name: place / f"{name}.json" for name in ("spec", "result")}
    files["spec"].write_text(json.dumps(spec))
    files["result"].unlink(missing_ok=True)
    command = [sys.executable, "-m"]
    if (gpus := spec["gpus"]) > 1:
        config = Path(__file__).with_name("accelerate.yaml")
        command += ["accelerate.commands.launch", "--config_file", str(config), "--num_processes", str(gpus), "-m"]
    command += ["evoalign_lib.runs", str(place), str(os.getpid()), *(["--lasting"] if lasting else [])]
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [str(i) for i in range(gpus)] if seen is None else seen.split(",")[:gpus]
    if seen and len(devices) < gpus:
        raise ValueError(f"gpus={gpus}, but CUDA_VISIBLE_DEVICES={seen!r} names {len(devices)}: take so many.")
    log = place / "log.txt"
    with open(log, "ab") as file:
        begun = file.tell()
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(devices)}
        code = subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    if code or not files["result"].is_file():
        lines = log.read_bytes()[begun:].decode(errors="replace").splitlines()
        # of several processes what one that failed said, and not what their launcher says of it
        failed = next((line.partition(":")[0] for line in lines if re.match(r"\[rank\d+\]: Traceback", line)), None)
        end = [line for line in lines if failed is None or line.startswith(failed)][-30:]
        where = f"all of it is in {log}" if lasting else "run it with a folder to keep all of it"
        raise RuntimeError("\n".join([f"the processes of {spec['arm']} ended with code {code}; {where}:", *end]))
    return json.loads(files["result"].read_text())


def _main(place: str, driver: str, *lasting: str) -> None:
    """One process of a gradient arm's run: read the spec, run it, and write the result if it is the first."""
    from evoalign_lib.engines.local import end_with

    end_with(int(driver))
    folder = Path(place)
    result = _train_and_measure(json.loads((folder / "spec.json").read_text()), folder, bool(lasting))
    if os.environ.get("RANK", "0") == "0":
        partial = folder / "result.partial"
        partial.write_text(json.dumps(result))
        partial.replace(folder / "result.json")


_FITNESS = {"es": "reward", "es_shuffled": "shuffled", "es_random": "random", "es_sampled": "reward"}
_CHECKPOINTS = 10
"""checkpoints of a run that keeps them, over its steps, of which the last one stays"""


def _kept(spec: Spec, lasting: bool) -> dict[str, Any]:
    """What a trainer is told to write beside the record."""
    if not lasting:
        return {"report_to": "none", "save_strategy": "no"}
    every = max(1, spec.get("steps", 1) // _CHECKPOINTS)
    return {"report_to": "tensorboard", "save_strategy": "steps", "save_steps": every, "save_total_limit": 1}


@contextmanager
def _train_by_es(spec: Spec, place: Path, lasting: bool, keep: Path | None = None) -> Iterator[_Trained]:
    from evoalign_lib.es import ESTrainer

    model, tokenizer, sets = _world(spec)
    changed = {"fitness": _FITNESS[spec["arm"]]} | _kept(spec, lasting)
    if spec["arm"] == "es_sampled":
        changed |= {"sampling": "common", "arm": "es_sampled"}
    trainer, progress = _trainer(ESTrainer, spec, model, tokenizer, sets, place, **changed)
    with closing(trainer.engine) as engine:
        start = engine.master.copy()
        _watch_divergence(trainer, progress)
        trainer.train(resume_from_checkpoint=(place / ledger.NAME).is_file())
        kept = {} if keep is None else {"ledger": _keep_ledger(trainer, spec["base"], keep)}
        budget = _spent_by_es(trainer)
        budget["core_seconds"] = round(budget["core_seconds"], 2)
        result = {"budget": budget, "counts": dict(trainer.counts), "plan": engine.plan, "curve": progress.curve}
        yield _Trained(engine, start, sets, result | kept, progress.diverged)


def _spent_by_es(trainer: Any) -> dict[str, Any]:
    """The budget of an ES run so far."""
    budget = dict(trainer.budget)
    # a forward pass costs 2 floating-point operations a parameter and token; attention products are left out
    tokens = budget["prompt_tokens"] + budget["generated_tokens"]
    return budget | {"forward_flops": 2 * trainer.engine.layout.d * tokens}


@contextmanager
def _train_by_gradients(spec: Spec, place: Path, lasting: bool) -> Iterator[_Trained]:
    """One run of TRL's trainers; see `grpo`."""
    import trl

    model, tokenizer, sets = _world(spec)
    with closing(_evaluation_engine(spec, model, tokenizer, sets)) as engine:
        _take_weights(engine, model)  # the engine's own model may have another dtype
        start = engine.master.copy()
        result, diverged = _run_trl(spec, place, lasting, model, tokenizer, sets, engine)
        _take_weights(engine, model)
        del model  # and with it the trainer's optimiser, which may have filled a GPU
        gc.collect()
        yield _Trained(engine, start, sets, result | {"trl": trl.__version__}, diverged)


def _run_trl(
    spec: Spec, place: Path, lasting: bool, model: Any, tokenizer: Any, sets: Mapping[str, list], engine: Any
) -> tuple[Record, list[int]]:
    """Train a model by one of TRL's trainers, and measure it by an engine along the way.

    Returns:
        Budget, counts, curve and, of another engine than the local one, its plan; and the steps after which the model
        had weights that were not finite.
    """
    from transformers import PrinterCallback, TrainerCallback

    from evoalign_lib import grpo

    class Watch(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            progress.go_on(state.global_step)
            if not state.global_step:  # a checkpoint's point is known
                self.on_log(args, state, control, logs={})

        def on_log(self, args, state, control, logs=None, **kwargs):  # after each step, when its reward is known
            if "train_runtime" in logs:  # the summary at the end
                return
            if state.global_step in points:
                _take_weights(engine, model)
                record(state.global_step, budget.spent(engine.layout.d), logs.get("reward"), engine)

    progress = _Progress(place if lasting else None)
    points, record = _curve(spec, sets, progress)
    arm = "grpo" if spec["arm"] == "grpo_random" else spec["arm"]
    names = ("seed", "steps", "prompts_per_step", "num_generations", "max_completion_length", "learning_rate", "beta")
    settings = {name: spec[name] for name in names}
    settings |= {name: spec.get(name) for name in ("scale_rewards", "micro_batch")}
    rows = _rows(spec, tokenizer, sets["train"])
    if colocated := spec.get("engine", "local") != "local":
        settings["vllm"] = _beside(spec, tokenizer, rows[: spec["steps"] * spec["prompts_per_step"]], engine)
    general = _kept(spec, lasting) | {"disable_tqdm": True, "logging_steps": 1} | _device(spec)
    args = grpo.config(arm, output_dir=str(place), **settings, **general)
    trainer, budget = grpo.trainer(model, _reward(spec), args, rows, tokenizer, [Watch()])
    if colocated:
        engine.llm = trainer.vllm_generation.llm
    trainer.remove_callback(PrinterCallback)
    _watch_divergence(trainer, progress)
    trainer.train(resume_from_checkpoint=_last_checkpoint(place, grpo.processes()))
    counts = dict(budget.counts)
    if spec.get("scale_rewards") != "batch":  # where TRL logs whether the whole batch has no spread
        zero_std = [e["frac_reward_zero_std"] for e in trainer.state.log_history if "frac_reward_zero_std" in e]
        counts["zero_std_groups"] = round(float(np.mean(zero_std)), 5)
    if lasting:
        trainer.save_model(str(place / "model"))
    result = {"budget": budget.spent(engine.layout.d), "counts": counts, "curve": progress.curve}
    return result | _plan(spec, engine), progress.diverged


def _last_checkpoint(place: Path, n: int) -> str | None:
    """The newest checkpoint of a gradient arm on n processes that no kill left incomplete."""
    complete = []
    for folder in place.glob("checkpoint-*"):
        try:
            json.loads((folder / "trainer_state.json").read_text())  # what the first process writes last
        except (OSError, ValueError):
            continue
        if n == 1 or all((folder / f"rng_state_{rank}.pth").is_file() for rank in range(n)):
            complete.append(str(folder))
    return max(complete, key=lambda name: int(name.rpartition("-")[2]), default=None)


def _beside(spec: Spec, tokenizer: Any, rows: Sequence[Mapping[str, Any]], engine: Any) -> dict[str, Any]:
    """What `grpo.config` is told of vLLM beside the model: the memory is that of the run's plan."""
    from evoalign_lib import preflight
    from evoalign_lib.engines.local import Prompts

    width = max(p.width for p in (Prompts(rows, tokenizer), *engine.prompts.values()))
    return {
        "eos_ids": engine.eos_ids,
        "max_model_length": width + spec["max_completion_length"],
        "gpu_memory": preflight.colocated_share(spec),
    }


def _device(spec: Spec) -> dict[str, bool]:
    """Where TRL trains: with the local engine on the CPU, as ES does, even on a machine with GPUs."""
    import torch

    from evoalign_lib import grpo

    gpus = torch.cuda.is_available()
    elsewhere = spec.get("engine", "local") != "local" and gpus
    # said only where TRL would find out something else by itself
    return {"use_cpu": True} if not elsewhere and (gpus or grpo.processes() > 1) else {}


@contextmanager
def _train_by_sft(spec: Spec, place: Path, lasting: bool) -> Iterator[_Trained]:
    """Fine-tune on the right answers among the base's samples (rejection sampling); see `grpo.filtered_sft`."""
    import trl
    from transformers import PrinterCallback

    from evoalign_lib import grpo
    from evoalign_lib.engines.local import Prompts
    from evoalign_lib.tasks import countdown

    model, tokenizer, sets = _world(spec)
    engine = _evaluation_engine(spec, model, tokenizer, sets)
    _take_weights(engine, model)
    start, cpu = engine.master.copy(), time.process_time()
    engine.prompts["train"] = prompts = Prompts(_rows(spec, tokenizer, sets["train"]), tokenizer)
    samples = engine.generate("train", samples=spec["num_generations"], seed=spec["seed"])
    pairs = [
        (prompts.ids[i][prompts.mask[i] == 1].tolist(), ids)
        for row in samples
        for i, ((text, ids), p) in enumerate(zip(row, sets["train"], strict=True))
        if countdown.grade(text, p.numbers, p.target).answer and ids[-1] in engine.eos_ids
    ]
    core_seconds = time.process_time() - cpu
    sampled = {
        "completions": len(samples) * len(prompts),
        "generated_tokens": sum(len(ids) for row in samples for _, ids in row),
        "prompt_tokens": int(prompts.lengths.sum()) * len(samples),
    }
    engine.close()  # the model has the GPU for itself
    settings = {name: spec[name] for name in ("seed", "learning_rate", "batch_size", "epochs")}
    general = _kept(spec, lasting) | {"save_strategy": "no", "disable_tqdm": True} | _device(spec)
    trainer = grpo.filtered_sft(model, tokenizer, pairs, output_dir=str(place), **settings, **general)
    trainer.remove_callback(PrinterCallback)
    progress = _Progress(None)
    _watch_divergence(trainer, progress)
    cpu = time.process_time()  # importing and making a trainer is no training
    trainer.train()
    core_seconds += time.process_time() - cpu
    if lasting:
        trainer.save_model(str(place / "model"))
    _take_weights(engine, model)
    del trainer, model
    gc.collect()
    trained = spec["epochs"] * sum(len(prompt) + len(ids) for prompt, ids in pairs)
    passes = sampled["generated_tokens"] + sampled["prompt_tokens"] + 3 * trained
    budget = sampled | {"forward_flops": int(2 * engine.layout.d * passes)}
    budget |= {"core_seconds": round(core_seconds, 2)}
    result = {"budget": budget, "counts": {"kept": len(pairs)}, "trl": trl.__version__}
    with closing(engine):
        yield _Trained(engine, start, sets, result | _plan(spec, engine), progress.diverged)


_VALIDATED_AT = (0.6, 1.0)
"""temperatures at which the validation set is measured again"""


def _run_decoding(spec: Spec) -> Record:
    """Accuracy of the model of another record, sampled at more temperatures; see `decoding_specs`.

    Raises:
        ValueError: the weights that there are now are not those of the record. Nothing is measured then.
    """
    with tempfile.TemporaryDirectory() as folder, _made_again(trained_spec(spec), Path(folder)) as again:
        made, engine, sets, source = again
        digest = base_digest(engine.model) if made == "loaded" else _digest(engine)
        if digest != spec["digest"]:
            raise ValueError(
                f"the weights, {made}, have the digest {digest}, in the record it is {spec['digest']}: this machine "
                "trains otherwise, or the record is of other code. Nothing is measured on other weights."
            )
        samples = spec["samples"]

        def validation() -> dict[str, Any]:
            problems = sets["validation"]
            greedy = _greedy(engine, "validation", problems)
            return greedy | _sampled(engine, "validation", problems, _VALIDATED_AT, samples)

        test = {"n": len(sets["test"])} | _sampled(engine, "test", sets["test"], spec["temperatures"], samples)
        result = {"made": made, "digest": digest, "test": test, "validation": validation()}
        if "at_step" in spec:
            engine.master[:] = ledger.replay(source, spec["base"], spec["at_step"])
            result["validation_at_step"] = validation()
        return result


@contextmanager
def _made_again(spec: Spec, place: Path) -> Iterator[tuple[str, Any, Mapping[str, list], Path]]:
    """The model that a spec's run ended with, in an engine.

    A base is loaded. A run of ES whose committed record has a ledger is replayed. Any other run is trained again, with
    one point of its curve, since evaluation leaves no trace in training.

    Args:
        spec: of kind "base" or "train".
        place: where trainers write.

    Returns:
        How it was made, "loaded", "replayed" or "trained again"; the engine; the problems of each split; and, of a run
        of ES, its ledger.
    """
    source = None if spec["kind"] == "base" else _kept_ledger(spec)
    if spec["kind"] == "base" or source is not None:
        model, tokenizer, sets = _world(spec | {"kind": "base"})
        with closing(_evaluation_engine(spec, model, tokenizer, sets)) as engine:
            if source is not None:
                engine.master[:] = ledger.replay(source, spec["base"])
            yield "loaded" if source is None else "replayed", engine, sets, source
        return
    few = {"curve_points": 1} if "curve_points" in spec else {}
    with _trained(spec | few, place, lasting=False) as run:
        yield "trained again", run.engine, run.sets, place / ledger.NAME


def _kept_ledger(spec: Spec) -> Path | None:
    """The ledger of the committed record of a spec; None where there is no such record, or it was made without."""
    wanted = spec_hash(spec)
    for path in sorted(paths.RESULTS.glob(f"*/{spec['scale']}.jsonl")):
        for record in read_records(path):
            if record["spec_hash"] == wanted and "ledger" in record:
                return ledger_file(record)
    return None


def _run_best_of_n(spec: Spec) -> Record:
    """Accuracy when the reward chooses the best of n samples of the base, n = 1, 2, 4, ...: no weights change.

    The choice is by the very reward that is measured, so it is the share of problems that n samples solve: the bound of
    what choosing alone can give, at n completions for each test problem.
    """
    from evoalign_lib.tasks import countdown

    model, tokenizer, sets = _world(spec)
    cpu, problems = time.process_time(), sets["test"]
    with closing(_evaluation_engine(spec, model, tokenizer, sets)) as engine:
        samples = engine.generate("test", samples=spec["samples"], seed=spec["seed"])
        plan = _plan(spec, engine)
    grades = [
        [countdown.grade(text, p.numbers, p.target) for (text, _), p in zip(row, problems, strict=True)]
        for row in samples
    ]
    rewards = np.array([[grade.reward for grade in row] for row in grades])
    right = np.array([[grade.answer for grade in row] for row in grades])
    accuracy = {}
    for n in (2**k for k in range(spec["samples"].bit_length())):
        best = rewards[:n].argmax(0)  # the first of the best
        accuracy[str(n)] = round(float(right[best, np.arange(len(problems))].mean()), 6)
    tokens = sum(len(ids) for row in samples for _, ids in row)
    prompt_tokens = int(engine.prompts["test"].lengths.sum()) * len(samples)
    budget = {"completions": right.size, "generated_tokens": tokens, "prompt_tokens": prompt_tokens}
    budget |= {"forward_flops": 2 * engine.layout.d * (tokens + prompt_tokens)}
    budget |= {"core_seconds": round(time.process_time() - cpu, 2)}
    return {"budget": budget, "d": engine.layout.d, "best_of_n": accuracy} | plan


def _evaluation_engine(spec: Spec, model: Any, tokenizer: Any, sets: Mapping[str, list]) -> Any:
    """An engine that decodes the validation and test problems with weights that somebody else trains."""
    from evoalign_lib.engines import open_engine
    from evoalign_lib.engines.local import LocalEngine, Prompts
    from evoalign_lib.es import ESConfig

    prompts = {name: Prompts(_rows(spec, tokenizer, sets[name]), tokenizer) for name in sets if name != "train"}
    common = {"max_completion_length": spec["max_completion_length"]}
    if spec.get("engine", "local") == "local":
        return LocalEngine(model, tokenizer, None, prompts, **common)
    if spec["kind"] == "train":  # in the dtype in which ES is measured; it holds the float32 weights beside
        from evoalign_lib.engines.vllm import PushedEngine

        measured, _ = model_of(spec | {"kind": "base"})
        return PushedEngine(measured, tokenizer, prompts, folder=spec["base"], **common)
    args = ESConfig(output_dir="", report_to="none", **common, **{k: spec[k] for k in _ENGINE if k in spec})
    return open_engine(model, tokenizer, None, prompts, args, spec["base"])


def _plan(spec: Spec, engine: Any) -> Record:
    """How another engine than the local one decodes, for a record that trains nothing or by gradients."""
    return {} if spec.get("engine", "local") == "local" else {"plan": engine.plan}


def _take_weights(engine: Any, model: Any) -> None:
    parameters = dict(model.named_parameters())
    for name, tensor in engine.weights.tensors().items():
        tensor.copy_(parameters[name].detach())


class _Progress:
    """What a run has shown so far, on disk where a killed run is to go on.

    Attributes:
        curve: the points measured.
        diverged: the steps after which the model had weights that were not finite.
    """

    def __init__(self, folder: Path | None):
        self.curve: dict[str, list] = {}
        self.diverged: list[int] = []
        self._path = None if folder is None else folder / "progress.json"
        if self._path is not None and self._path.is_file():
            found = json.loads(self._path.read_text())
            self.curve, self.diverged = found["curve"], found["diverged"]

    def go_on(self, step: int) -> None:
        """Forget what came after a step: the run begins, or goes on from a checkpoint, there."""
        known = sum(s <= step for s in self.curve.get("step", ())) if step else 0
        self.curve = {name: values[:known] for name, values in self.curve.items() if known}
        self.diverged = [s for s in self.diverged if s <= step]

    def add(self, point: Mapping[str, Any]) -> None:
        """Add a point of the curve."""
        for name, value in point.items():
            self.curve.setdefault(name, []).append(value)
        self._save()

    def diverge(self, step: int) -> None:
        """Note that after a step the weights are not finite."""
        self.diverged.append(step)
        self._save()

    def _save(self) -> None:
        if self._path is not None and os.environ.get("RANK", "0") == "0":
            partial = self._path.with_name("progress.partial")
            partial.write_text(json.dumps({"curve": self.curve, "diverged": self.diverged}))
            partial.replace(self._path)


def _watch_divergence(trainer: Any, progress: _Progress) -> None:
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if not all(p.isfinite().all() for p in model.parameters()):
                progress.diverge(state.global_step)

    trainer.callback_handler.add_callback(Watch())


def _outcome(spec: Spec, engine: Any, start: np.ndarray, sets: Mapping[str, list], diverged: Sequence[int]) -> Record:
    """What is measured of every trained model, and the first step after which it had weights that were not finite."""
    # in blocks: all at once it would take 12 bytes a weight
    blocks = (slice(i, i + (1 << 24)) for i in range(0, start.size, 1 << 24))
    moved = np.linalg.norm([np.linalg.norm((engine.master[b] - start[b]).astype(np.float64)) for b in blocks])
    outcome = {"d": engine.layout.d, "update_norm": round(float(moved), 6)}
    outcome |= {"digest": _digest(engine)}
    outcome |= {"diverged": diverged[0]} if diverged else {}
    if spec["task"] == "conciseness":
        return outcome | conciseness_runs.outcome(spec, engine, sets)
    if "test" not in sets:
        return outcome
    return outcome | {"test": _test(engine, sets["test"]), "kl_policy_base": _kl_from_base(spec, engine)}


def _digest(engine: Any) -> str:
    """SHA-256 of an engine's weights, 16 hexadecimal digits."""
    return hashlib.sha256(engine.master.tobytes()).hexdigest()[:16]


def _kl_from_base(spec: Spec, engine: Any) -> dict[str, Any]:
    """KL(trained || base) in nats, on one sample at temperature 1 of every validation prompt (see `kl.measure`)."""
    import torch

    from evoalign_lib import kl

    engine.write_model()
    base, _ = model_of(spec | {"kind": "base"})
    prompts = engine.prompts["validation"]
    (samples,) = engine.generate("validation", samples=1, seed=spec["seed"])
    completions = [ids for _, ids in samples]
    models, device = (engine.model, base), "cpu"
    if spec.get("engine", "local") != "local":  # what generated makes room on the GPU
        engine.close()
        device = _roomy_device(sum(p.numel() * p.itemsize for m in models for p in m.parameters()))
    try:
        for model in models:
            model.to(device)
        found = kl.measure(engine.model, base, prompts.ids, prompts.mask, completions, engine.eos_ids)
    finally:
        if device != "cpu":  # the next run's engine is another process, and finds nothing of this one there
            for model in models:
                model.to("cpu")
            gc.collect()
            torch.cuda.empty_cache()
    return {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in found.items()}


def _roomy_device(needed: int, seconds: int = 60) -> str:
    """The GPU, as soon as what generated has left it so many bytes; the CPU, slower, where that takes too long."""
    import torch

    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
    for _ in range(seconds if torch.cuda.is_available() else 0):
        if torch.cuda.mem_get_info()[0] > needed + (4 << 30):  # and some for activations
            return "cuda"
        time.sleep(1)
    return "cpu"


def _points(spec: Spec) -> tuple[set[int], list[str]]:
    """The steps after which a run is evaluated, and the axes of its budget that its curve has."""
    steps, count = spec["steps"], spec["curve_points"]
    if spec.get("curve_spacing") == "log":
        axes = ["completions", "generated_tokens", "forward_flops", "core_seconds"]
        spaced = np.append(0, np.geomspace(1, steps, count - 1))
    else:
        axes, spaced = ["completions"], np.linspace(0, steps, count)
    return set(spaced.round().astype(int).tolist()), axes


def _curve(
    spec: Spec, sets: Mapping[str, list], progress: _Progress
) -> tuple[set[int], Callable[[int, Mapping[str, Any], float | None, Any], None]]:
    """The steps after which a run is evaluated, and the function that adds a point to its progress."""
    points, axes = _points(spec)

    def record(step: int, budget: Mapping[str, Any], reward: float | None, engine: Any) -> None:
        point = {"step": step} | {axis: round(budget[axis], 2) for axis in axes}
        if spec["task"] == "conciseness":
            measured = conciseness_runs.point(spec, engine, sets, step)
        else:
            accuracy = {n: _accuracy(engine, "validation", sets["validation"], n, seed=step) for n in (0, 4)}
            measured = {f"validation_{name}": float(accuracy[n].mean()) for name, n in (("greedy", 0), ("t1", 4))}
        for name, value in (measured | {"reward": reward}).items():
            point[name] = round(value, 5) if isinstance(value, float) else value
        progress.add(point)

    return points, record


def _trainer(
    kind: type, spec: Spec, model: Any, tokenizer: Any, sets: Mapping[str, list], folder: Path, **changed: Any
) -> tuple[Any, _Progress]:
    """An ES trainer for a spec, and the progress that its training fills in, which is kept where checkpoints are."""
    from transformers import TrainerCallback

    from evoalign_lib.es import ESConfig

    general = {"report_to": "none", "save_strategy": "no"} | changed
    progress = _Progress(None if general["save_strategy"] == "no" else folder)
    points, record = _curve(spec, sets, progress)

    class Curve(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            progress.go_on(state.global_step)
            if not state.global_step:  # a checkpoint's point is known
                self.on_log(args, state, control)

        def on_log(self, args, state, control, **kwargs):  # after each step, when its reward is known
            if state.global_step in points:
                reward = state.log_history[-1]["reward"] if state.log_history else None
                record(state.global_step, _spent_by_es(trainer), reward, trainer.engine)

    where: dict[str, Any] = {"workers": 1}
    if spec.get("engine", "local") != "local":
        where = {k: spec[k] for k in _ENGINE if k in spec} | {"model_init_kwargs": {"dtype": "bfloat16"}}
    config = ESConfig(
        output_dir=str(folder),
        seed=spec["seed"],
        max_steps=spec["steps"],
        max_completion_length=spec["max_completion_length"],
        disable_tqdm=True,
        **where,
        **{k: spec[k] for k in ("population_size", "sigma", "alpha", "prompts_per_step")},
        **general,
    )
    rows = _rows(spec, tokenizer, sets["train"])
    trainer = kind(model, _reward({"arm": "es"} | spec), config, rows, None, tokenizer, [Curve()])
    for name in sets.keys() - {"train"}:
        trainer.engine.add_prompts(name, _rows(spec, tokenizer, sets[name]))
    return trainer, progress


def _run_audit(spec: Spec) -> Record:
    """One ES run of a bfloat16 model, with the arithmetic and the noise of the spec: what became of its updates.

    Of each step: the share of weights that restoring the members changed, and how far (rms); cosine and gain of the
    applied update against the intended one. Of the whole path: the same two, restores included; and the cosine of the
    displacements of two layers' tensors of equal name, which independent noise leaves near 0.
    """
    import torch

    from evoalign_lib import noise, precision
    from evoalign_lib.es import ESTrainer, coefficients

    model, tokenizer, sets = _world(spec)
    updates: list[tuple[float, float]] = []
    path: dict[str, list] = {"step": [0], "cosine": [None], "gain": [None]}

    class Audited(ESTrainer):
        def tell(self, members, fitness):
            weights, layout = self.engine.weights, self.engine.layout
            before = weights.float32().copy()
            tied = super().tell(members, fitness)
            if not tied:
                step = np.zeros(layout.size, np.float32)
                keys = np.array([m.key for m in members], np.uint64)
                noise.update(step, layout, keys, coefficients(fitness, self.args.alpha), distribution=self.args.noise)
                updates.append(precision.agreement(step, weights.float32() - before))
                self.intended += step
            if (done := self.state.global_step + 1) % max(1, spec["steps"] // 20) == 0:
                applied = weights.float32() - self.start
                # nothing is intended as long as all populations were tied
                found = precision.agreement(self.intended, applied) if self.intended.any() else (None, None)
                path["step"].append(done)
                for name, value in zip(("cosine", "gain"), found, strict=True):
                    path[name].append(value if value is None else round(value, 5))
            return tied

    with tempfile.TemporaryDirectory() as folder:
        changed = {k: spec[k] for k in ("fitness", "precision", "noise")}
        # the noise of the arm "es" whatever the fitness: the very run of section 4, as far as arithmetic lets it be
        audited = Audited, spec, model.to(torch.bfloat16), tokenizer, sets, Path(folder)
        trainer, progress = _trainer(*audited, arm="es", **changed)
        trainer.start = trainer.engine.weights.float32().copy()
        trainer.intended = np.zeros(trainer.engine.layout.size)
        trainer.train()
    engine = trainer.engine
    views = engine.layout.views(engine.weights.float32() - trainer.start)
    alike = [
        precision.agreement(view, views[twin])[0]
        for name, view in views.items()
        if view.ndim == 2 and view.any() and (twin := name.replace(".layers.0.", ".layers.1.")) != name
    ]
    log = [entry for entry in trainer.state.log_history if "reward" in entry]
    restores = {
        f"restore_{what}": float(np.mean([entry.get(f"restore_{what}", 0.0) for entry in log]))
        for what in ("changed", "drift")
    }
    audit = restores
    if updates:  # else all populations were tied
        audit |= {"layers_cosine": np.mean(alike)} if alike else {}
        audit |= dict(zip(("update_cosine", "update_gain"), np.mean(updates, axis=0), strict=True))
    result = {"audit": {k: float(f"{v:.6g}") for k, v in audit.items()}, "path": path, "counts": dict(trainer.counts)}
    result |= {"plan": engine.plan, "d": engine.layout.d, "curve": progress.curve}
    return result | ({"test": _test(engine, sets["test"])} if spec["fitness"] == "reward" else {})


def _keep_ledger(trainer: Any, base: str, path: Path) -> dict[str, Any]:
    """Replay a finished run's ledger from the base loaded anew, write it compressed, and describe it."""
    run, source = trainer.ledger, trainer.ledger.path
    replayed, last = ledger.replay(source, base), trainer.engine.master
    differ = replayed.view(np.uint32) != last.view(np.uint32)  # in bits: NaN equals nothing
    error = np.abs(replayed[differ] - last[differ]).max(initial=0)
    packed = ledger.pack(source)
    path.write_bytes(packed)
    return {
        "bytes": source.stat().st_size,
        "gzip_bytes": len(packed),
        "sha256": hashlib.sha256(packed).hexdigest(),
        "weights": run.weights[len(run.steps)],
        "replay_error": float(error),
    }


def _run_estimator(spec: Spec) -> Record:
    """One ES step against the exact gradient of expected reward (see `geometry`)."""
    objective = _objective(spec["base"], spec["estimator_problems"], spec["targets"])
    arguments = {k: spec[k] for k in ("N", "sigma", "alpha", "repeat", "fitness")}
    result = objective.run(**arguments)
    return {
        "estimator": {k: round(v, 9) if isinstance(v, float) else v for k, v in result.items() if k not in arguments}
    }


@lru_cache(maxsize=2)
def _objective(base: str, n: int, targets: str):
    """The enumeration of a base's completions takes longer than a step: once a process."""
    from evoalign_lib import geometry, tiny
    from evoalign_lib.tasks import countdown

    drawn = countdown.generate(4 * n, 0, split="train", **tiny.PROBLEMS | {"count": 2})
    chosen = [p for p in drawn if targets == "any" or sum(p.numbers) != int(p.target)][:n]
    if len(chosen) < n:
        raise ValueError(f"only {len(chosen)} of {n} two-number problems have targets {targets!r}: ask for fewer.")
    # against 1e-6 the gradient's cosine is 0.99999998, and a step takes a third of the time
    return geometry.ExactObjective(*tiny.load(base), chosen, min_probability=1e-5)


def _run_kl(spec: Spec) -> Record:
    """KL(policy || ref) of a base moved by noise, by every estimator, and their gradients as losses (see `kl`)."""
    from evoalign_lib import kl, noise, tiny
    from evoalign_lib.engines.local import LocalEngine, Prompts
    from evoalign_lib.tasks import countdown

    (policy, tokenizer), (reference, _) = tiny.load(spec["base"]), tiny.load(spec["base"])
    problems = tiny.problems("validation", spec["kl_problems"])
    prompts = Prompts(countdown.dataset(problems, tokenizer), tokenizer)
    length = spec["max_completion_length"]
    engine = LocalEngine(policy, tokenizer, None, {"validation": prompts}, max_completion_length=length)
    key = noise.member_key(noise.run_key("kl", spec["repeat"]), 0, 0)
    noise.perturb(engine.master, engine.master.copy(), engine.layout, key, spec["sigma"])
    engine.write_model()
    samples = engine.generate("validation", samples=spec["kl_samples"], seed=spec["repeat"])
    completions = [ids for sample in samples for _, ids in sample]
    repeated = [np.tile(a, (spec["kl_samples"], 1)) for a in (prompts.ids, prompts.mask)]
    arguments = policy, reference, *repeated, completions, engine.eos_ids
    comparison = kl.compare(*arguments)
    result = {"sequences": len(completions), "tokens": int(comparison.mask.sum())}
    result |= kl.estimator_errors(comparison) | kl.gradient_errors(*arguments)
    return {"kl": {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in result.items()}}


RUNNERS: dict[str, Callable[[Spec], Record]] = {
    "base": _run_base,
    "train": run_train,
    "best_of_n": _run_best_of_n,
    "audit": _run_audit,
    "estimator": _run_estimator,
    "kl": _run_kl,
    "decoding": _run_decoding,
    "published": conciseness_runs.run_published,
}


if __name__ == "__main__":
    _main(*sys.argv[1:])
