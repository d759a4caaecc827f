"""What the specs of every kind of run begin with, and the fields that an engine brings.

A spec is flat: everything that decides the result, and nothing else. Each kind makes its own specs (`kinds`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from evoalign_lib import arms, tasks, tiny
from evoalign_lib.checks import nearest
from evoalign_study import base_models, measures, trainers
from evoalign_study.records import ENGINE_VERSION, Spec


def begin(kind: str, base: str, scale: str, settings: Mapping[str, Any]) -> Spec:
    """Return what a spec begins with: kind, task, base, scale, and what the task adds.

    Args:
        kind: of run, one of `kinds.KINDS`.
        base: a shipped one ("A0", ...), or a model on the Hub or in a folder.
        scale: of the notebook.
        settings: task ("countdown" where it is missing), and what its measures read.

    Raises:
        ValueError: an unknown task, a base that has not learned the task, a setting that only another task reads, or
            what the task refuses (`Measures.spec_fields`).
    """
    task = settings.get("task", "countdown")
    measure = measures.get(task)
    if base in tiny.SHIPPED and tiny.task_of(base) != task:
        known = [name for name in tiny.SHIPPED if tiny.task_of(name) == task]
        raise ValueError(
            f"base {base!r} was trained for the task {tiny.task_of(base)!r}, not {task!r}: set "
            f"task={tiny.task_of(base)!r}, or take one of {', '.join(known) or 'your own models'}."
        )
    for other in tasks.TASKS.keys() - {task}:
        for name in measures.get(other).settings:
            if settings.get(name) and name not in measure.settings:
                raise ValueError(f"{name}={settings[name]!r}: task {task!r} has no such setting, set task={other!r}.")
    spec = {"kind": kind, "task": task, "base": base, "scale": scale, "engine_version": ENGINE_VERSION}
    fields = measure.for_base(base).spec_fields(base, settings)
    return spec | {"base_digest": base_models.base_digest(base)} | fields


def begin_tiny(
    kind: str, base: str, scale: str, settings: Mapping[str, Any], bases: Sequence[str] = tiny.BASES
) -> Spec:
    """Return what a spec begins with that only plain models of the tiny world can run, locally.

    Args:
        kind, base, scale, settings: as for `begin`.
        bases: those that can run it, by default Countdown's.

    Raises:
        ValueError: any other base, task or engine, and what `begin` refuses.
    """
    if base not in bases:
        raise ValueError(
            f"base {base!r} has no runs of kind {kind!r}: they take plain models of the tiny world, one of "
            f"{', '.join(bases)}."
        )
    engine_fields([base], settings)  # refuses any but the local one
    return begin(kind, base, scale, settings)


def settings_of_runs() -> set[str]:
    """Return the names of all settings that the specs of some arm, task or engine are made from."""
    found = {"task", "max_completion_length", *base_models.ENGINE_FIELDS}
    for measure in map(measures.get, tasks.TASKS):
        found.update(measure.settings, measure.sizes)
    for arm in arms.ARMS.values():
        found.update(arm.settings, arm.optional)
    return found


def check_names(settings: Mapping[str, Any]) -> None:
    """Raise ValueError, with the nearest known name, for a setting that no run reads.

    One that another arm reads is accepted, so that several arms can be given the same settings.
    """
    known = settings_of_runs()
    for name in settings:
        if name not in known:
            raise ValueError(
                f"unknown setting {name!r}: no run reads it, remove it.{nearest(name, known)} Known: "
                f"{', '.join(sorted(known))}."
            )


def sizes(settings: Mapping[str, Any], names: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the fields that say how long completions may be and how many problems are asked.

    Args:
        settings: of the notebook.
        names: those wanted; None: all that the task needs.

    Raises:
        ValueError: one that is missing.
    """
    names = measures.get(settings.get("task", "countdown")).sizes if names is None else names
    return take(settings, ("max_completion_length", *names), "every run of the task")


def take(settings: Mapping[str, Any], names: Sequence[str], whose: str) -> dict[str, Any]:
    """Return the settings of these names.

    Raises:
        ValueError: one that is missing, saying whose it is.
    """
    if missing := [name for name in names if name not in settings]:
        raise ValueError(f"{whose} needs the setting {missing[0]!r}.")
    return {name: settings[name] for name in names}


def engine_fields(
    bases: Sequence[str], settings: Mapping[str, Any], family: trainers.Family | None = None, adapter: bool = False
) -> dict[str, Any]:
    """Return the fields of an engine that is not the local one; the local one has none in a spec.

    The arms that TRL trains have vLLM beside the model, on GPUs of one machine; fine-tuning is on one GPU, and on a
    cluster without GPUs both run locally.

    Args:
        bases: of the runs.
        settings: of the notebook.
        family: of the arm that trains; None: nothing is trained.
        adapter: whether an adapter is trained: its members share one engine of vLLM, on `tensor_parallel` GPUs, and
            gradients have one GPU, however many there are.

    Raises:
        ValueError: a base of the tiny world, which has the local engine alone.
    """
    if base_models.is_local(settings):
        return {}
    if shipped := [base for base in bases if base in tiny.SHIPPED]:
        raise ValueError(
            f"engine={settings['engine']!r} is for models of the Hub or of a folder; {shipped[0]!r} is one of the tiny "
            "world's, for which engine='local' is there."
        )
    given = {name: settings[name] for name in base_models.ENGINE_FIELDS if settings.get(name) is not None}
    if family is None or family.has_members and not adapter:
        return given
    if given["engine"] == "ray" and not given.get("gpus"):
        return {}  # a cluster without GPUs: vLLM would be alone on one of its machines
    if family.has_members:
        return {"engine": "vllm", "tensor_parallel": given.get("tensor_parallel") or 1}
    one = family.samples_first or adapter
    gpus = 1 if one else given.get("gpus") or given.get("tensor_parallel") or 1
    return {"engine": "vllm", "gpus": gpus}
