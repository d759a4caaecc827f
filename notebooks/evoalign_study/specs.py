"""The fields that the specs of every kind of run begin with, and those of an engine.

A spec is a flat dictionary of everything that determines the result, and nothing else. Each kind of run builds its own
specs (`kinds`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from evoalign_lib import arms, tasks, tiny
from evoalign_lib.checks import nearest, require
from evoalign_study import base_models, measures, trainers
from evoalign_study.records import ENGINE_VERSION, Spec


def begin(kind: str, base: str, scale: str, settings: Mapping[str, Any]) -> Spec:
    """Return the first fields of a spec: kind, task, base, scale, and those that the task adds.

    Args:
        kind: kind of run, one of `kinds.KINDS`.
        base: a shipped base ("A0", ...), or a model on the Hub or in a folder.
        scale: scale of the notebook.
        settings: task (default "countdown"), and the settings that its measures read.

    Raises:
        ValueError: an unknown task, a base that was not trained for the task, a setting that only another task reads,
            or settings that the task refuses (`Measures.spec_fields`).
    """
    task = settings.get("task", "countdown")
    measure = measures.get(task)
    if base in tiny.SHIPPED and tiny.task_of(base) != task:
        known = [name for name in tiny.SHIPPED if tiny.task_of(name) == task]
        of, others = tiny.task_of(base), ", ".join(known) or "your own models"
        what = f"base {base!r} was trained for the task {of!r}, not {task!r}"
        raise ValueError(f"{what}: set task={of!r}, or use one of {others}.")
    for other in tasks.TASKS.keys() - {task}:
        for name in measures.get(other).settings:
            if settings.get(name) and name not in measure.settings:
                raise ValueError(f"{name}={settings[name]!r}: task {task!r} has no such setting. Set task={other!r}.")
    spec = {"kind": kind, "task": task, "base": base, "scale": scale, "engine_version": ENGINE_VERSION}
    fields = measure.for_base(base).spec_fields(base, settings)
    return spec | {"base_digest": base_models.base_digest(base)} | fields


def begin_tiny(
    kind: str, base: str, scale: str, settings: Mapping[str, Any], bases: Sequence[str] = tiny.BASES
) -> Spec:
    """Return the first fields of a spec that only plain models of the tiny world can run, on the local engine.

    Args:
        kind, base, scale, settings: as for `begin`.
        bases: bases that can run it, by default Countdown's.

    Raises:
        ValueError: any other base, task or engine, and whatever `begin` refuses.
    """
    what = f"base {base!r} has no runs of kind {kind!r}, which are for plain models of the tiny world"
    require(base in bases, f"{what}. Use one of {', '.join(bases)}.")
    engine_fields([base], settings)  # refuses any engine but the local one
    return begin(kind, base, scale, settings)


def settings_of_runs() -> set[str]:
    """Return the names of all settings that go into the specs of any arm, task or engine."""
    found = {"task", "max_completion_length", *base_models.ENGINE_FIELDS}
    for measure in map(measures.get, tasks.TASKS):
        found.update(measure.settings, measure.sizes)
    for arm in arms.ARMS.values():
        found.update(arm.settings, arm.optional)
    return found


def check_names(settings: Mapping[str, Any]) -> None:
    """Raise ValueError, suggesting the nearest known name, for a setting that no run reads.

    A setting that another arm reads is accepted, so that several arms can share the same settings.
    """
    known = settings_of_runs()
    for name in sorted(settings.keys() - known):
        what = f"unknown setting {name!r}: no run reads it, remove it.{nearest(name, known)}"
        raise ValueError(f"{what} Known: {', '.join(sorted(known))}.")


def sizes(settings: Mapping[str, Any], names: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the fields that set the maximum length of completions and the number of problems.

    Args:
        settings: settings of the notebook.
        names: settings wanted; None: all that the task needs.

    Raises:
        ValueError: a setting is missing.
    """
    names = measures.get(settings.get("task", "countdown")).sizes if names is None else names
    return take(settings, ("max_completion_length", *names), "every run of the task")


def take(settings: Mapping[str, Any], names: Sequence[str], whose: str) -> dict[str, Any]:
    """Return the settings with the given names.

    Raises:
        ValueError: a setting is missing; the message says what needs it.
    """
    if missing := [name for name in names if name not in settings]:
        raise ValueError(f"{whose} needs the setting {missing[0]!r}.")
    return {name: settings[name] for name in names}


def engine_fields(
    bases: Sequence[str], settings: Mapping[str, Any], family: trainers.Family | None = None, adapter: bool = False
) -> dict[str, Any]:
    """Return the spec fields of an engine; the local engine has none.

    The arms that TRL trains run vLLM next to the model, on the GPUs of one machine, with engine "cuda" on its only one;
    fine-tuning uses one GPU. On a cluster without GPUs, both run locally.

    Args:
        bases: bases of the runs.
        settings: settings of the notebook.
        family: family of the arm that trains; None: nothing is trained.
        adapter: whether an adapter is trained: its members share one vLLM engine, on `tensor_parallel` GPUs, and
            gradient arms use one GPU, however many there are.

    Raises:
        ValueError: a base of the tiny world, which runs on the local engine only.
    """
    if base_models.is_local(settings):
        return {}
    if shipped := [base for base in bases if base in tiny.SHIPPED]:
        raise ValueError(
            f"engine={settings['engine']!r} is for models from the Hub or a folder; {shipped[0]!r} is a model of the "
            "tiny world. Set engine='local' for it."
        )
    given = {name: settings[name] for name in base_models.ENGINE_FIELDS if settings.get(name) is not None}
    if given["engine"] == "cuda" and (family is None or family.has_members):
        return {"engine": "cuda"}
    if family is None or family.has_members and not adapter:
        return given
    if given["engine"] == "ray" and not given.get("gpus"):
        return {}  # a cluster without GPUs: vLLM would use only one of its machines
    if family.has_members:
        return {"engine": "vllm", "tensor_parallel": given.get("tensor_parallel") or 1}
    one = family.samples_first or adapter
    gpus = 1 if one else given.get("gpus") or given.get("tensor_parallel") or 1
    return {"engine": "vllm", "gpus": gpus}
