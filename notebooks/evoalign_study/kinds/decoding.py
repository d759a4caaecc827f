"""Trained models measured again, under more sampling temperatures than their records have.

ES optimises greedy decoding and GRPO samples at temperature 1, so that a comparison under one of the two favours an
arm. A record of this kind names the digest of the weights that it measures; they are replayed from a ledger, or trained
again, and nothing is measured on others.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from evoalign_lib import ledger, models, tiny
from evoalign_lib.engines.base import check_temperature
from evoalign_study import measures, trainers, training, weight_cache
from evoalign_study.kinds import train
from evoalign_study.measures.base import label
from evoalign_study.records import Record, Spec, pack_bits

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
    """Return specs that measure models again, under more sampling temperatures than their records have.

    A spec is that of the record, of kind "decoding", with the digest of the weights that are measured, `temperatures`,
    `samples` and, where they are given, `at_step` and `curve_temperature`. `measured_spec` takes these away again.

    Args:
        records: of training runs by any arm, or of untrained bases, in the tiny world.
        temperatures: of the samples of the test problems.
        samples: of each problem at each temperature, 1 to 16.
        at_step: an earlier step of ES runs, at which the validation set is measured, too.
        curve_temperature: of the samples by which every point of the run's curve is measured again.

    Raises:
        ValueError: a record of something else, or without a test set; temperatures that are none, are there twice or
            are not above 0; too many samples; a step that a run has not, or of a run that is not of ES, or of a task
            that validates by a proxy; a curve of a run that has none.
    """
    for temperature in [*temperatures, *([] if curve_temperature is None else [curve_temperature])]:
        check_temperature(temperature)
    if not temperatures or len({label(t) for t in temperatures}) < len(temperatures):
        raise ValueError(f"temperatures={list(temperatures)}: give at least one, and each once.")
    if not 1 <= samples <= 16:
        raise ValueError(f"samples={samples}: a record holds counts of 1 to 16.")
    made = []
    for record in records:
        spec, name = record["spec"], f"the record {record['spec_hash']}"
        if spec["kind"] not in ("base", "train") or spec["base"] not in tiny.SHIPPED:
            raise ValueError(f"{name} is not of a model of the tiny world.")
        # a task without these settings asks all its questions
        if not (spec.get("test_problems", 1) and spec.get("validation_problems", 1)):
            raise ValueError(f"{name} has no test set or no validation set: only complete runs are measured again.")
        digest = spec["base_digest"] if spec["kind"] == "base" else record["digest"]
        own = {"kind": "decoding", "digest": digest, "temperatures": list(temperatures), "samples": samples}
        if at_step is not None:
            if not (_is_es(spec) and _validates(spec) and 0 <= at_step <= spec["steps"]):
                raise ValueError(f"at_step={at_step}: {name} is not of an ES run of so many steps that is validated.")
            own["at_step"] = at_step
        if curve_temperature is not None:
            if "curve_points" not in spec:
                raise ValueError(f"curve_temperature={curve_temperature}: {name} has no curve.")
            own["curve_temperature"] = curve_temperature
        made.append(spec | own)
    return made


def measured_spec(spec: Spec) -> Spec:
    """Return the spec of the run whose model a spec of `decoding_specs` measures: of kind "train", or "base"."""
    kind = "train" if "arm" in spec else "base"
    return {name: value for name, value in spec.items() if name not in _OWN_FIELDS} | {"kind": kind}


def _is_es(spec: Spec) -> bool:
    return spec["kind"] == "train" and trainers.of(spec["arm"]).has_members


def _validates(spec: Spec) -> bool:
    """Return whether the task's validation says what is right; else it is a proxy, which curves alone measure."""
    return measures.get(spec["task"]).validated_by is not None


def run(spec: Spec) -> Record:
    """Return what the model of another record does, sampled at more temperatures.

    Raises:
        ValueError: the weights that there are now are not those of the record. Nothing is measured then.
    """
    measure = measures.get(spec["task"])

    def sampled(name: str, temperatures: Sequence[float]) -> dict[str, Any]:
        return measure.sampled(spec, engine, sets, name, temperatures, spec["samples"])

    def validation() -> dict[str, Any]:
        greedy = measure.accuracy(engine, "validation", sets["validation"], 0)[0]
        found = {
            "n": len(greedy),
            "greedy": round(float(greedy.mean()), 6),
            "greedy_bits": pack_bits(greedy.astype(int)),
        }
        return found | sampled("validation", VALIDATED_AT)

    with tempfile.TemporaryDirectory() as folder, _made_again(spec, Path(folder)) as again:
        made, engine, sets, source, curve = again
        if made == "loaded":
            weight_cache.check_digest(models.base_digest(engine.model), spec["digest"], made)
        else:
            weight_cache.check(engine.master, spec["digest"], made)
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
def _made_again(
    wanted: Spec, place: Path
) -> Iterator[tuple[str, Any, Mapping[str, list], Path | None, dict[str, Any]]]:
    """The model that a run ended with, in an engine.

    A base is loaded. A run of ES is replayed where its committed record has a ledger and ended with these weights. Any
    other run is trained again, with no more points of its curve than are wanted, since evaluation leaves no trace in
    training; or its end is read where it was kept (`trained`), if no earlier step is wanted.

    Args:
        wanted: of kind "decoding".
        place: where trainers write.

    Yields:
        How it was made, "loaded", "replayed", "trained again" or "kept"; the engine; the problems of each split; of a
        run of ES its ledger; and, where the spec has `curve_temperature`, the block `curve` of its record.
    """
    spec = measured_spec(wanted)
    warm = {name: wanted[name] for name in ("curve_temperature",) if name in wanted}
    source = None if spec["kind"] == "base" else weight_cache.kept_ledger(spec, wanted["digest"])
    if spec["kind"] == "base" or source is not None:
        model, tokenizer, sets = training.world(spec | {"kind": "base"})
        with closing(training.evaluation_engine(spec, model, tokenizer, sets)) as engine:
            progress, kept = training.Progress(None), None if source is None else ledger.read(source)
            for step in sorted(training.points(spec)[0]) if warm else ():
                engine.master[:] = ledger.replay(kept, spec["base"], step)
                measured = measures.get(spec["task"]).point(spec | warm, engine, sets, step)
                progress.add({"step": step} | training.rounded(measured))
            if kept is not None:
                engine.master[:] = ledger.replay(kept, spec["base"])
            made = "loaded" if source is None else "replayed"
            yield made, engine, sets, source, {"curve": progress.curve} if warm else {}
        return
    if not warm and "at_step" not in wanted:
        master, made = weight_cache.again(spec, wanted["digest"])
        model, tokenizer, sets = training.world(spec | {"kind": "base"})
        with closing(training.evaluation_engine(spec, model, tokenizer, sets)) as engine:
            engine.master[:] = master
            yield made, engine, sets, None, {}
        return
    few = {} if warm or "curve_points" not in spec else {"curve_points": 1}
    with train.trained(spec | few | warm, place) as found:
        curve = {}
        if warm:
            end, every = f"_{label(warm['curve_temperature'])}", found.result["curve"]
            curve = {"curve": {name: each for name, each in every.items() if name == "step" or name.endswith(end)}}
        yield "trained again", found.engine, found.sets, place / ledger.NAME, curve
