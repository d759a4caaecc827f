"""Decode without training: a base, best of n, the model of a record measured again, and counts of right samples.

*decoding* measures trained models again, at more sampling temperatures than their records have: ES optimises greedy
decoding and GRPO samples at temperature 1, so a comparison under either one favours an arm. A record of this kind holds
the digest of the weights that it measures. They are replayed from a ledger, or trained again; other weights are not
measured.

*sampled* counts how many of many samples of each test problem are right, for a model of any size and for ends of
training from it, whose answers cannot be enumerated as kind "coverage" does in the tiny world. A record has the counts
of a block of problems at one temperature, never a text. The texts go to a separate file below `runs`, which may be
deleted. An end is a model's folder, a LoRA adapter or a ledger over the model (`base_models.know_end`); it gets the
model's own prompts, token by token, since the model's tokenizer makes them.
"""

import gzip
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from evoalign_lib import files, ledger, models, tasks, tiny, weight_files
from evoalign_lib.checks import require, whole_number
from evoalign_lib.engines.base import Prompts, check_temperature
from evoalign_study import base_models, measures, specs, trainers, training, weight_cache
from evoalign_study.measures.base import Measures, label, read_beside, tallied
from evoalign_study.measures.base import temperatures as checked
from evoalign_study.records import Record, Settings, Spec, pack_integers, spec_hash

# ---- untrained bases


def base_specs(bases: Sequence[str], settings: Settings, scale: str) -> list[Spec]:
    """Return the specs that measure untrained bases.

    Args:
        bases: shipped bases ("A0", ...), or models on the Hub or in folders, which get the task's public problems.
        settings: task, max_completion_length and the sizes that the task needs (`Measures.sizes`); for the tiny world's
            base "H0" also filler_steps, how long all prompts ask it to think (see `tiny.dataset`); engine, gpus and
            tensor_parallel as in `ESConfig`.
        scale: scale of the notebook.

    Raises:
        ValueError: a setting that no run reads, whatever `specs.begin` refuses, or a shipped base with an engine other
            than the local one.
        FileNotFoundError: a file that the settings name does not exist.
    """
    specs.check_names(settings)
    wanted = specs.sizes(settings) | specs.engine_fields(bases, settings)
    return [specs.begin("base", base, scale, settings) | wanted for base in bases]


def run_base(spec: Spec) -> Record:
    """Return the measurements of an untrained base (`Measures.base_outcome`)."""
    measure = measures.of(spec)
    measure.prepare(spec)
    with training.opened(spec) as (engine, sets):
        plan = base_models.plan(spec, engine)
        return measure.base_outcome(spec, engine, sets) | plan


# ---- best of n


def best_of_n_specs(base: str, seeds: Iterable[int], samples: int, settings: Settings, scale: str) -> list[Spec]:
    """Return specs of best-of-n: the reward chooses among n samples of an untrained base, for n = 1, 2, 4, ...

    Args:
        base: as for `base_specs`.
        seeds: seeds of the samples.
        samples: number of samples for each problem, at least 1.
        settings: as for `base_specs`; max_completion_length and test_problems are required.
        scale: scale of the notebook.

    Raises:
        ValueError: no samples; a task whose reward does not know right answers; or whatever `base_specs` refuses.
    """
    specs.check_names(settings)
    measures.get(settings.get("task", "countdown")).check_validates("best of n chooses right answers")
    wanted = specs.sizes(settings, ("test_problems",)) | {"samples": whole_number("samples", samples)}
    wanted |= specs.engine_fields([base], settings)
    return [specs.begin("best_of_n", base, scale, settings) | wanted | {"seed": seed} for seed in seeds]


def run_best_of_n(spec: Spec) -> Record:
    """Return the accuracy if the reward chooses the best of n samples of the base; no weights change.

    The reward that chooses is also the one measured, so this is the share of problems that n samples solve: an upper
    bound on what choosing alone can give, at n completions for each test problem.
    """
    measure = measures.get(spec["task"])
    with training.opened(spec) as (engine, sets):
        cpu, problems = time.process_time(), sets["test"]
        samples = engine.generate("test", samples=spec["samples"], seed=spec["seed"])
        plan = base_models.plan(spec, engine)
    rewards, right = np.stack([measure.judged(spec, engine, problems, row) for row in samples], axis=1)
    accuracy = {}
    for n in (2**k for k in range(spec["samples"].bit_length())):
        best = rewards[:n].argmax(0)  # the first, if several are best
        accuracy[str(n)] = round(float(right[best, np.arange(len(problems))].mean()), 6)
    tokens = sum(len(ids) for row in samples for _, ids in row)
    asked, d = int(engine.prompts["test"].lengths.sum()) * len(samples), engine.layout.d
    budget = {"completions": right.size, "generated_tokens": tokens, "prompt_tokens": asked}
    budget |= {"forward_flops": 2 * d * (tokens + asked), "core_seconds": round(time.process_time() - cpu, 2)}
    return {"budget": budget, "d": d, "best_of_n": accuracy} | plan


# ---- the model of a record, measured again

_OWN_FIELDS = ("digest", "temperatures", "samples", "at_step", "curve_temperature")
VALIDATED_AT = (0.6, 1.0)
"""Temperatures at which the validation set is measured again."""


def decoding_specs(
    records: Iterable[Record],
    temperatures: Sequence[float],
    samples: int = 16,
    *,
    at_step: int | None = None,
    curve_temperature: float | None = None,
) -> list[Spec]:
    """Return specs that measure models again, at more sampling temperatures than their records have.

    Each is the spec of a record with kind "decoding", the digest of the weights to measure, `temperatures`, `samples`
    and, if given, `at_step` and `curve_temperature`. `measured_spec` removes these again.

    Args:
        records: records of training runs by any arm, or of untrained bases, in the tiny world.
        temperatures: sampling temperatures on the test problems.
        samples: samples of each problem at each temperature, 1 to 16.
        at_step: an earlier step of ES runs, at which the validation set is measured, too.
        curve_temperature: sampling temperature at which every point of the run's curve is measured again.

    Raises:
        ValueError: a record of something else, or without a test set; no temperatures, one that is repeated or not
            above 0; too many samples; an `at_step` that a run does not have, or of a run that is not an ES run or whose
            task validates by a proxy; a `curve_temperature` for a run without a curve.
    """
    if curve_temperature is not None:
        check_temperature(curve_temperature)
    own = {"kind": "decoding", "temperatures": list(temperatures)}
    checked("temperatures", temperatures)
    own["samples"] = whole_number("samples", samples, 1, 16, "a record holds such counts")
    given = {"at_step": at_step, "curve_temperature": curve_temperature}
    own |= {name: value for name, value in given.items() if value is not None}
    made = []
    for record in records:
        spec, name = record["spec"], f"the record {record['spec_hash']}"
        known = spec["kind"] in ("base", "train") and spec["base"] in tiny.SHIPPED
        require(known, f"{name} is not of a model of the tiny world.")
        # a task without these settings uses all its questions
        whole = spec.get("test_problems", 1) and spec.get("validation_problems", 1)
        require(whole, f"{name} has no test set or no validation set: only complete runs are measured again.")
        is_es = spec["kind"] == "train" and trainers.of(spec["arm"]).has_members
        if at_step is not None and not (is_es and _validates(spec) and 0 <= at_step <= spec["steps"]):
            raise ValueError(f"at_step={at_step}: {name} is not an ES run with so many steps and a validation.")
        if curve_temperature is not None and "curve_points" not in spec:
            raise ValueError(f"curve_temperature={curve_temperature}: {name} has no curve.")
        made.append(spec | own | {"digest": spec["base_digest"] if spec["kind"] == "base" else record["digest"]})
    return made


def measured_spec(spec: Spec) -> Spec:
    """Return the spec of the run, of kind "train" or "base", whose model a spec of `decoding_specs` measures."""
    kind = "train" if "arm" in spec else "base"
    return {name: value for name, value in spec.items() if name not in _OWN_FIELDS} | {"kind": kind}


def _validates(spec: Spec) -> bool:
    """Return whether the task's validation knows right answers; if not, it is a proxy, measured on curves only."""
    return measures.get(spec["task"]).validated_by is not None


def run_decoding(spec: Spec) -> Record:
    """Return measurements of another record's model, sampled at more temperatures.

    Raises:
        ValueError: the weights found are not those of the record; nothing is measured then.
    """
    measure = measures.get(spec["task"])

    def sampled(name: str, temperatures: Sequence[float]) -> dict[str, Any]:
        return measure.sampled(spec, engine, sets, name, temperatures, spec["samples"])

    def validation() -> dict[str, Any]:
        greedy = measure.accuracy(engine, "validation", sets["validation"])
        return {"n": greedy.size} | tallied("greedy", greedy) | sampled("validation", VALIDATED_AT)

    with tempfile.TemporaryDirectory() as folder, _made_again(spec, Path(folder)) as again:
        made, engine, sets, source, curve = again
        digest = models.base_digest(engine.model) if made == "loaded" else models.flat_digest(engine.master)
        weight_cache.check_digest(digest, spec["digest"], made)
        if made == "trained again":
            weight_cache.keep(engine.master)
        result = {"made": made, "digest": spec["digest"]}
        result["test"] = {"n": len(sets["test"])} | sampled("test", spec["temperatures"])
        if _validates(spec):
            result["validation"] = validation()
        if "at_step" in spec:
            engine.master[:] = ledger.replay(source, spec["base"], spec["at_step"])
            result["validation_at_step"] = validation()
        return result | curve


@contextmanager
def _made_again(wanted: Spec, place: Path) -> Iterator[tuple[Any, ...]]:
    """Yield an engine with the model that a run ended with.

    A base is loaded. An ES run is replayed if its committed record has a ledger that ends with these weights. Any other
    run is trained again, evaluating only the points of its curve that are wanted (evaluation does not affect training);
    or, if no earlier step is wanted, its end is read from where it was kept (`weight_cache`).

    Args:
        wanted: a spec of kind "decoding".
        place: folder that trainers write to.

    Yields:
        How the model was made: "loaded", "replayed", "trained again" or "kept"; the engine; the problems of each split;
        the ledger of an ES run; and, if the spec has `curve_temperature`, the block `curve` of its record.
    """
    spec = measured_spec(wanted)
    warm = {name: wanted[name] for name in ("curve_temperature",) if name in wanted}
    source = None if spec["kind"] == "base" else weight_cache.kept_ledger(spec, wanted["digest"])
    if spec["kind"] == "train" and source is None and (warm or "at_step" in wanted):
        few = {} if warm or "curve_points" not in spec else {"curve_points": 1}
        with trainers.train(spec | few | warm, place) as ended:
            ends = tuple(f"_{label(temperature)}" for temperature in warm.values())
            own = {k: each for k, each in ended.result.get("curve", {}).items() if k == "step" or k.endswith(ends)}
            yield "trained again", ended.engine, ended.sets, place / ledger.NAME, {"curve": own} if warm else {}
        return
    with training.opened(spec | {"kind": "base"}) as (engine, sets):
        made, progress = "loaded", training.Progress(None)
        if source is not None:
            made, kept = "replayed", ledger.read(source)
            for step in sorted(training.points(spec)[0]) if warm else ():
                engine.master[:] = ledger.replay(kept, spec["base"], step)
                measured = measures.get(spec["task"]).point(spec | warm, engine, sets, step)
                progress.add({"step": step} | training.rounded(measured))
            engine.master[:] = ledger.replay(kept, spec["base"])
        elif spec["kind"] == "train":
            engine.master[:], made = weight_cache.again(spec, wanted["digest"])
        yield made, engine, sets, source, {"curve": progress.curve} if warm else {}


# ---- samples to be counted

MOST_SAMPLES = 4095
"""Maximum number of samples of a problem that a record can count."""
MOST_PROBLEMS = 2000
"""Maximum number of problems in a block, whose counts fit into a record."""
_SETTINGS = (
    "max_completion_length", "sampled_problems", "sampled_block", "sampled_samples", "sampled_temperatures",
)  # fmt: skip


def sampled_specs(model: str, end: str | os.PathLike[str] | None, settings: Settings, scale: str) -> list[Spec]:
    """Return the specs that sample a model, or an end of training from it, one for each temperature and block.

    Args:
        model: a shipped base, or a model on the Hub or in a folder.
        end: folder of a model or of a LoRA adapter, or a ledger of ES, each from a run that started from the model;
            None: the model itself.
        settings: max_completion_length; sampled_problems, number of test problems; sampled_block, problems per record,
            1 to 2,000, which is also the work that a kill may lose; sampled_samples, samples per problem, 2 to 4,095;
            sampled_temperatures. Optional: task, settings that only the task reads, sampled_seed (0), and engine, gpus
            and tensor_parallel as in `ESConfig`.
        scale: scale of the notebook.

    Raises:
        ValueError: a setting that is missing or out of range; a task whose completions are neither right nor wrong; an
            end that is not one, or of another type of model; or whatever `specs.begin` and `specs.engine_fields`
            refuse.
        FileNotFoundError: the end, or a file that the settings name, does not exist.
    """
    taken = specs.take(settings, _SETTINGS, "sampling a model")
    task = settings.get("task", "countdown")
    counts = type(measures.get(task).for_base(model)).right is not Measures.right
    require(counts, f"task={task!r}: its completions are neither right nor wrong, so there is nothing to count.")
    problems = whole_number("sampled_problems", taken["sampled_problems"])
    size = whole_number("sampled_block", taken["sampled_block"], most=MOST_PROBLEMS, why="a record holds so many")
    why = "halves are compared, and a record counts no further"
    samples = whole_number("sampled_samples", taken["sampled_samples"], 2, MOST_SAMPLES, why)
    own = {"max_completion_length": taken["max_completion_length"], "test_problems": problems}
    of_tasks = {"task", *(name for known in tasks.TASKS for name in measures.get(known).settings)}
    asked = {name: value for name, value in settings.items() if name in of_tasks} | own
    spec = specs.begin("sampled", model, scale, asked) | own
    spec |= {"samples": samples, "seed": whole_number("sampled_seed", settings.get("sampled_seed", 0), 0)}
    spec |= specs.engine_fields([model], settings)
    if end is not None:
        spec["end"] = base_models.know_end(end)
        _check_type(model, base_models.place_of(spec["end"]))
    return [
        spec | {"temperature": temperature, "block": [first, min(first + size, problems)]}
        for temperature in checked("sampled_temperatures", taken["sampled_temperatures"])
        for first in range(0, problems, size)
    ]


def run_sampled(spec: Spec) -> Record:
    """Return the number of right samples of each problem of a block.

    The samples of a problem depend on the seed and on its place in the test set, not on its block. The record has
    `n_problems`; `right`, the number of right samples of each problem (`records.pack_integers`); `generated_tokens`
    and `prompt_tokens` (once per sample, though vLLM's prefix cache computes a prompt once); `clipped`, the number of
    samples without an end token; and `texts_sha256`, the digest of the texts (`read_texts`).

    Raises:
        ValueError: the end has changed, or does not fit the model.
        FileNotFoundError: the end no longer exists.
    """
    measure, (first, stop) = measures.of(spec), spec["block"]
    with _opened(spec) as (engine, problems):
        drawn = {"samples": spec["samples"], "seed": spec["seed"], "temperature": spec["temperature"]}
        rows = engine.generate("test", np.arange(first, stop), **drawn)
        plan = base_models.plan(spec, engine)
        asked, lengths, ends = engine.prompts["test"].prompts, engine.prompts["test"].lengths, set(engine.eos_ids)
    right, lines = measure.graded(problems[first:stop], rows).astype(int), []
    for i, grades, answers in zip(range(first, stop), right.T.tolist(), zip(*rows, strict=True), strict=True):
        line = {"problem": i, "prompt": asked[i], "right": grades, "texts": [text for text, _ in answers]}
        lines.append(json.dumps(line, sort_keys=True) + "\n")
    # written in one piece, before the record that names them
    texts = "".join(lines).encode()
    files.replace_bytes(texts_file(spec), gzip.compress(texts, 6, mtime=0), sync=True)
    tokens = [ids for row in rows for _, ids in row]
    return {
        "n_problems": stop - first,
        "right": pack_integers(right.sum(0)),
        "generated_tokens": sum(map(len, tokens)),
        "prompt_tokens": int(lengths[first:stop].sum()) * spec["samples"],
        "clipped": sum(ids[-1] not in ends for ids in tokens),
        "texts_sha256": hashlib.sha256(texts).hexdigest(),
    } | plan


def texts_file(spec: Spec) -> Path:
    """Return the path of a record's texts: samples/<spec hash>.jsonl.gz below EVOALIGN_RUN_DIR, or below runs."""
    return base_models.kept("samples") / f"{spec_hash(spec)}.jsonl.gz"


def read_texts(record: Record) -> list[dict[str, Any]]:
    """Return the texts of a record, one entry per problem: its place in the test set, prompt, grades and texts.

    Raises:
        FileNotFoundError: they are not on this machine.
        ValueError: the file holds other texts.
    """
    texts = read_beside(texts_file(record["spec"]), record["texts_sha256"], gzip.decompress)
    return [json.loads(line) for line in texts.decode().splitlines()]


@contextmanager
def _opened(spec: Spec) -> Iterator[tuple[Any, list]]:
    """Yield an engine with the model or the end, its prompts "test" being all test problems, and these problems.

    All problems are loaded whichever block is wanted, so that a row's random numbers, and the width that prompts are
    padded to, are the same for every block.
    """
    problems = measures.of(spec).sets(spec)["test"]
    with _model(spec) as (model, tokenizer, folder):
        asked = {"test": training.rows(spec, tokenizer, problems)}
        highest, known = int(Prompts(asked["test"], tokenizer).ids.max()), model.get_input_embeddings().num_embeddings
        # the engine would refuse them, too, but without naming the end
        end = f"{folder} knows {known} tokens, and a prompt of {spec['base']!r} has number {highest}"
        require(highest < known, f"{end}: it was not trained from that model. Pass the model that it started from.")
        with closing(base_models.evaluation_engine(spec | {"base": folder}, model, tokenizer, asked)) as engine:
            yield engine, problems


@contextmanager
def _model(spec: Spec) -> Iterator[tuple[Any, Any, str]]:
    """Yield model and tokenizer, and the folder or name from which an engine can load the same model."""
    if "end" not in spec:
        yield *base_models.model_of(spec), spec["base"]
        return
    end = base_models.place_of(spec["end"])
    if end.is_dir() and not base_models.is_adapter(end):
        tokenizer = models.tokenizer_of(models.place(spec["base"]))
        yield *models.load(str(end), tokenizer, base_models.loaded_as(spec)), str(end)
        return
    model, tokenizer = base_models.model_of(spec)
    _take(model, weight_files.weights(end, spec["base"]))
    with tempfile.TemporaryDirectory(prefix="evoalign-") as made:
        if not base_models.is_local(spec):  # other engines load a model from files
            model.save_pretrained(made)
        yield model, tokenizer, made


def _take(model: Any, moved: weight_files.StateDict) -> None:
    """Copy weights into a model, rounded once to its dtype."""
    import torch

    parameters = dict(model.named_parameters())
    if missing := sorted(parameters.keys() - moved.shapes.keys()):
        remedy = "write it to a folder (evoalign replay --out, or merge_and_unload() and save_pretrained())"
        raise ValueError(f"{moved.source} has no {missing[0]!r}, which the model has: {remedy}, and pass that.")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(moved[name])


def _check_type(model: str, end: Path) -> None:
    """Raise ValueError if a folder holds another type of model than the one it is said to come from."""
    if end.is_file() or base_models.is_adapter(end):
        return  # compared with the model's own weights when they are read
    from transformers import AutoConfig

    places = (models.place(model), end)
    before, after = (AutoConfig.from_pretrained(one, trust_remote_code=False).model_type for one in places)
    differ = f"the end {str(end)!r} is of type {after!r}, model {model!r} of {before!r}"
    require(before == after, f"{differ}: it was not trained from that model. Pass the model that it started from.")
