"""How many of many samples of each test problem are right: of a model of any size, and of ends of training from it.

A record has the counts of a block of problems at one temperature, never a text: what cannot be enumerated, as
`kinds.coverage` does in the tiny world, is counted. The texts go to a file of their own below `runs`, which may be
removed. An end is a model's folder, a LoRA adapter or a ledger over the model (`worlds.know_end`); its prompts are
those of the model, token by token, since the model's tokenizer makes them.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from evoalign_lib import files, models, tasks, weight_files
from evoalign_lib.checks import whole_number
from evoalign_lib.engines.base import Prompts
from evoalign_study import base_models, measures, paths, specs, training
from evoalign_study.measures.base import Measures, temperatures
from evoalign_study.records import Record, Spec, pack_integers, spec_hash

MOST_SAMPLES = 4095
"""Samples of a problem, at most, which a record can count."""
MOST_PROBLEMS = 2000
"""Problems of a block, at most: a record has room for so many counts."""
_SETTINGS = (
    "max_completion_length", "sampled_problems", "sampled_block", "sampled_samples", "sampled_temperatures",
)  # fmt: skip


def sampled_specs(
    model: str, end: str | os.PathLike[str] | None, settings: Mapping[str, Any], scale: str
) -> list[Spec]:
    """Return the specs that sample a model, or an end of training from it: one for each temperature and block.

    Args:
        model: a shipped base, or a model on the Hub or in a folder.
        end: folder of a model or of a LoRA adapter, or a ledger of ES, each of a run that started from the model; None:
            the model itself.
        settings: max_completion_length; sampled_problems, of the test set; sampled_block, problems of a record, 1 to
            2,000, at once the work that a kill may lose; sampled_samples of each problem, 2 to 4,095;
            sampled_temperatures. Optional: task, what only that reads, sampled_seed (0), and engine, gpus and
            tensor_parallel as `ESConfig` has them.
        scale: of the notebook.

    Raises:
        ValueError: a setting that is missing or out of range, a task whose completions are neither right nor wrong, an
            end that is none or of another type of model, or what `specs.begin` and `specs.engine_fields` refuse.
        FileNotFoundError: there is no such end, or a file that the settings name is not there.
    """
    taken = specs.take(settings, _SETTINGS, "sampling a model")
    task = settings.get("task", "countdown")
    if type(measures.get(task)).right is Measures.right:
        raise ValueError(f"task={task!r}: its completions are neither right nor wrong, so there is nothing to count.")
    problems = whole_number("sampled_problems", taken["sampled_problems"])
    size = whole_number("sampled_block", taken["sampled_block"], most=MOST_PROBLEMS, why="a record holds so many")
    samples = whole_number(
        "sampled_samples", taken["sampled_samples"], 2, MOST_SAMPLES, "halves are compared, and a record counts so far"
    )
    own = {"max_completion_length": taken["max_completion_length"], "test_problems": problems}
    of_tasks = {"task", *(name for known in tasks.TASKS for name in measures.get(known).settings)}
    asked = {name: value for name, value in settings.items() if name in of_tasks} | own
    spec = specs.begin("sampled", model, scale, asked) | own
    spec |= {"samples": samples, "seed": whole_number("sampled_seed", settings.get("sampled_seed", 0), 0)}
    spec |= specs.engine_fields([model], settings)
    if end is not None:
        spec["end"] = base_models.know_end(end)
        _check_type(model, base_models.end_of(spec["end"]))
    return [
        spec | {"temperature": temperature, "block": [first, min(first + size, problems)]}
        for temperature in temperatures("sampled_temperatures", taken["sampled_temperatures"])
        for first in range(0, problems, size)
    ]


def run(spec: Spec) -> Record:
    """Return how many samples of each problem of a block are right.

    The samples of a problem depend on the seed and on its place in the test set, not on its block. The record has
    `n_problems`; `right`, how many of its samples are right for each problem (`records.pack_integers`);
    `generated_tokens` and `prompt_tokens` (once for each sample, though vLLM's prefix cache computes a prompt once);
    `clipped`, samples without an end token; and `texts_sha256`, of the texts (`read_texts`).

    Raises:
        ValueError: the end has changed, or it does not fit the model.
        FileNotFoundError: the end is gone.
    """
    measure, (first, stop) = measures.get(spec["task"]), spec["block"]
    with _opened(spec) as (engine, problems):
        drawn = {"samples": spec["samples"], "seed": spec["seed"], "temperature": spec["temperature"]}
        rows = engine.generate("test", np.arange(first, stop), **drawn)
        plan = base_models.plan(spec, engine)
        asked, lengths, ends = engine.prompts["test"].prompts, engine.prompts["test"].lengths, set(engine.eos_ids)
    lines, right, tokens, clipped = [], [], 0, 0
    for i, answers in zip(range(first, stop), zip(*rows, strict=True), strict=True):
        grades = [int(measure.right(problems[i], text)) for text, _ in answers]
        right.append(sum(grades))
        tokens += sum(len(ids) for _, ids in answers)
        clipped += sum(ids[-1] not in ends for _, ids in answers)
        line = {"problem": i, "prompt": asked[i], "right": grades, "texts": [text for text, _ in answers]}
        lines.append(json.dumps(line, sort_keys=True))
    return {
        "n_problems": stop - first,
        "right": pack_integers(np.array(right)),
        "generated_tokens": tokens,
        "prompt_tokens": int(lengths[first:stop].sum()) * spec["samples"],
        "clipped": clipped,
        "texts_sha256": _write_texts(spec, lines),
    } | plan


# ---- texts


def texts_file(spec: Spec) -> Path:
    """Return where the texts of a record go: samples/<spec hash>.jsonl.gz below EVOALIGN_RUN_DIR, or below runs."""
    return Path(os.environ.get("EVOALIGN_RUN_DIR") or paths.RUNS) / "samples" / f"{spec_hash(spec)}.jsonl.gz"


def read_texts(record: Record) -> list[dict[str, Any]]:
    """Return the texts of a record, an entry per problem: its place in the test set, prompt, grades and texts.

    Raises:
        FileNotFoundError: they are not on this machine.
        ValueError: the file holds others.
    """
    path = texts_file(record["spec"])
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there: texts stay on the machine that drew them, copy the file here.")
    found = gzip.decompress(path.read_bytes())
    if (digest := hashlib.sha256(found).hexdigest()) != record["texts_sha256"]:
        raise ValueError(
            f"{path} has the SHA-256 {digest:.16}..., in the record it is {record['texts_sha256']:.16}...: the samples "
            "were drawn again, elsewhere or after it. Take the file that belongs to the record."
        )
    return [json.loads(line) for line in found.decode().splitlines()]


def _write_texts(spec: Spec, lines: Sequence[str]) -> str:
    """Write the texts in one piece, before there is a record of them; return their SHA-256."""
    data = "".join(f"{line}\n" for line in lines).encode()
    files.replace_bytes(texts_file(spec), gzip.compress(data, 6, mtime=0), sync=True)
    return hashlib.sha256(data).hexdigest()


# ---- the model that is sampled


@contextmanager
def _opened(spec: Spec) -> Iterator[tuple[Any, list]]:
    """Yield an engine with the model or the end, whose prompts "test" are all test problems, and these problems.

    All are there whichever block is asked: a row's random numbers, and the width to which prompts are padded, are then
    those of every block.
    """
    problems = measures.get(spec["task"]).sets(spec)["test"]
    with _model(spec) as (model, tokenizer, folder):
        asked = {"test": training.rows(spec, tokenizer, problems)}
        highest, known = int(Prompts(asked["test"], tokenizer).ids.max()), model.get_input_embeddings().num_embeddings
        if highest >= known:  # the engine would refuse them without a word of the end
            raise ValueError(
                f"a prompt of {spec['base']!r} has the token {highest}, and {folder} knows {known} tokens: it is "
                "no end of training from that model. Give the model that it started from."
            )
        with closing(base_models.evaluation_engine(spec | {"base": folder}, model, tokenizer, asked)) as engine:
            yield engine, problems


@contextmanager
def _model(spec: Spec) -> Iterator[tuple[Any, Any, str]]:
    """Yield model and tokenizer, and the folder or name from which an engine can load the same model."""
    if "end" not in spec:
        yield *base_models.model_of(spec), spec["base"]
        return
    end = base_models.end_of(spec["end"])
    if end.is_dir() and not base_models.is_adapter(end):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(models.place(spec["base"]), trust_remote_code=False)
        yield *models.load(str(end), tokenizer, base_models.loaded_as(spec)), str(end)
        return
    model, tokenizer = base_models.model_of(spec)
    _take(model, weight_files.weights(end, spec["base"]))
    with tempfile.TemporaryDirectory(prefix="evoalign-") as made:
        if not base_models.is_local(spec):  # which loads a model from files
            model.save_pretrained(made)
        yield model, tokenizer, made


def _take(model: Any, moved: weight_files.StateDict) -> None:
    """Copy weights over a model, rounded once to its dtype."""
    import torch

    parameters = dict(model.named_parameters())
    if missing := sorted(parameters.keys() - moved.shapes.keys()):
        raise ValueError(
            f"{moved.source} has no {missing[0]!r}, which the model has: write a folder of it first (evoalign replay "
            "--out, or merge_and_unload() and save_pretrained()), and give that."
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(moved[name])


def _check_type(model: str, end: Path) -> None:
    """Raise ValueError for a folder with another type of model than that from which it is said to come."""
    if end.is_file() or base_models.is_adapter(end):
        return  # compared with the model's own weights when they are read
    from transformers import AutoConfig

    safe = {"trust_remote_code": False}
    types = [AutoConfig.from_pretrained(place, **safe).model_type for place in (models.place(model), end)]
    if types[0] != types[1]:
        raise ValueError(
            f"the end {str(end)!r} is of type {types[1]!r}, model {model!r} of {types[0]!r}: it is no end of training "
            "from that model. Give the model that it started from."
        )
