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

from evoalign_lib import arms, ledger, models, paths, tiny
from evoalign_lib.engines.base import check_temperature
from evoalign_lib.records import Record, Spec, ledger_file, pack_bits, pack_counts, read_records, spec_hash
from evoalign_lib.study import measures, training
from evoalign_lib.study.kinds import train

_OWN_FIELDS = ("digest", "temperatures", "samples", "at_step")
VALIDATED_AT = (0.6, 1.0)
"""Temperatures at which the validation set is measured again."""


def decoding_specs(
    records: Iterable[Record], temperatures: Sequence[float], samples: int = 16, at_step: int | None = None
) -> list[Spec]:
    """Return specs that measure models again, under more sampling temperatures than their records have.

    A spec is that of the record, of kind "decoding", with the digest of the weights that are measured, `temperatures`,
    `samples` and, where it is given, `at_step`. `measured_spec` takes these away again.

    Args:
        records: of training runs by any arm, or of untrained bases, in the tiny world, of a task whose completions are
            right or wrong (`Measures.validated_by`).
        temperatures: of the samples of the test problems.
        samples: of each problem at each temperature, 1 to 16.
        at_step: an earlier step of ES runs, at which the validation set is measured, too.

    Raises:
        ValueError: a record of something else, or without a test set; temperatures that are none, are there twice or
            are not above 0; too many samples; a step that a run has not, or of a run that is not of ES.
    """
    for temperature in temperatures:
        check_temperature(temperature)
    if not temperatures or len({label(t) for t in temperatures}) < len(temperatures):
        raise ValueError(f"temperatures={list(temperatures)}: give at least one, and each once.")
    if not 1 <= samples <= 16:
        raise ValueError(f"samples={samples}: a record holds counts of 1 to 16.")
    made = []
    for record in records:
        spec, name = record["spec"], f"the record {record['spec_hash']}"
        known = spec["kind"] in ("base", "train") and spec["base"] in tiny.SHIPPED
        if not known or measures.get(spec["task"]).validated_by is None:
            raise ValueError(f"{name} is not of a model of the tiny world whose answers are right or wrong.")
        if not (spec["test_problems"] and spec["validation_problems"]):
            raise ValueError(f"{name} has no test set or no validation set: only complete runs are measured again.")
        digest = spec["base_digest"] if spec["kind"] == "base" else record["digest"]
        own = {"kind": "decoding", "digest": digest, "temperatures": list(temperatures), "samples": samples}
        if at_step is not None:
            if not _is_es(spec) or not 0 <= at_step <= spec["steps"]:
                raise ValueError(f"at_step={at_step}: {name} is not of an ES run of so many steps.")
            own["at_step"] = at_step
        made.append(spec | own)
    return made


def measured_spec(spec: Spec) -> Spec:
    """Return the spec of the run whose model a spec of `decoding_specs` measures: of kind "train", or "base"."""
    kind = "train" if "arm" in spec else "base"
    return {name: value for name, value in spec.items() if name not in _OWN_FIELDS} | {"kind": kind}


def label(temperature: float) -> str:
    """Return what a temperature is called in records: "t1", "t0.6"."""
    return f"t{temperature:g}"


def _is_es(spec: Spec) -> bool:
    return spec["kind"] == "train" and arms.get(spec["arm"]).family == "es"


def run(spec: Spec) -> Record:
    """Return the accuracy of the model of another record, sampled at more temperatures.

    Raises:
        ValueError: the weights that there are now are not those of the record. Nothing is measured then.
    """
    measure = measures.get(spec["task"])

    def sampled(name: str, temperatures: Sequence[float]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for temperature in temperatures:
            right = measure.accuracy(engine, name, sets[name], spec["samples"], temperature=temperature)
            counts = right.sum(0).astype(int)
            found[label(temperature)] = round(float(counts.mean()) / spec["samples"], 6)
            found[f"{label(temperature)}_counts"] = pack_counts(counts)
        return found

    def validation() -> dict[str, Any]:
        greedy = measure.accuracy(engine, "validation", sets["validation"], 0)[0]
        found = {
            "n": len(greedy),
            "greedy": round(float(greedy.mean()), 6),
            "greedy_bits": pack_bits(greedy.astype(int)),
        }
        return found | sampled("validation", VALIDATED_AT)

    with tempfile.TemporaryDirectory() as folder, _made_again(measured_spec(spec), Path(folder)) as again:
        made, engine, sets, source = again
        digest = models.base_digest(engine.model) if made == "loaded" else models.flat_digest(engine.master)
        if digest != spec["digest"]:
            raise ValueError(
                f"the weights, {made}, have the digest {digest}, in the record it is {spec['digest']}: this machine "
                "trains otherwise, or the record is of other code. Nothing is measured on other weights."
            )
        test = {"n": len(sets["test"])} | sampled("test", spec["temperatures"])
        result = {"made": made, "digest": digest, "test": test, "validation": validation()}
        if "at_step" in spec:
            engine.master[:] = ledger.replay(source, spec["base"], spec["at_step"])
            result["validation_at_step"] = validation()
        return result


@contextmanager
def _made_again(spec: Spec, place: Path) -> Iterator[tuple[str, Any, Mapping[str, list], Path | None]]:
    """The model that a spec's run ended with, in an engine.

    A base is loaded. A run of ES whose committed record has a ledger is replayed. Any other run is trained again, with
    one point of its curve, since evaluation leaves no trace in training.

    Args:
        spec: of kind "base" or "train".
        place: where trainers write.

    Yields:
        How it was made, "loaded", "replayed" or "trained again"; the engine; the problems of each split; and, of a run
        of ES, its ledger.
    """
    source = None if spec["kind"] == "base" else _kept_ledger(spec)
    if spec["kind"] == "base" or source is not None:
        model, tokenizer, sets = training.world(spec | {"kind": "base"})
        with closing(training.evaluation_engine(spec, model, tokenizer, sets)) as engine:
            if source is not None:
                engine.master[:] = ledger.replay(source, spec["base"])
            yield "loaded" if source is None else "replayed", engine, sets, source
        return
    few = {"curve_points": 1} if "curve_points" in spec else {}
    with train.trained(spec | few, place) as found:
        yield "trained again", found.engine, found.sets, place / ledger.NAME


def _kept_ledger(spec: Spec) -> Path | None:
    """The ledger of the committed record of a spec; None where there is no such record, or it was made without."""
    wanted = spec_hash(spec)
    for path in sorted(paths.RESULTS.glob(f"*/{spec['scale']}.jsonl")):
        for record in read_records(path):
            if record["spec_hash"] == wanted and "ledger" in record:
                return ledger_file(record)
    return None
