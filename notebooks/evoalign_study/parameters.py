"""Check a notebook's parameters before any work, and announce what it runs on."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml

from evoalign_lib.checks import nearest, plain, require
from evoalign_lib.engines.processes import gpus_here
from evoalign_study import provenance, real_panels, style, sweep

if TYPE_CHECKING:
    from pandas import DataFrame

_COMMON = {"model": "", "engine": "local", "gpus": 0, "seeds": 0, "force": False, "dry_run": False}
PARAMETERS = ("scale", *_COMMON)
_MOST = 1_000_000
_MOST_SEEDS = 10_000  # also for GPUs
_MOST_LISTED = 100  # entries of a list, except of seeds
_PLAIN = (type(None), bool, int, float, str, list, tuple, dict)
_MAY_BE_EMPTY = ("prompt_counts",)  # though no scale leaves it empty: notebook 05 then skips a section


def check_parameters(namespace: dict[str, Any], presets: Mapping[str, Mapping[str, Any]]) -> SimpleNamespace:
    """Check a notebook's parameters before any work, and return them with its settings.

    Args:
        namespace: the notebook's `globals()`, with the seven common parameters and whatever `papermill -p` injected.
            It passes truth values, lists and dicts as texts, such as "true" and "[2, 4]", which are replaced here by
            the values; so are NumPy's numbers, by Python's.
        presets: scale -> the notebook's settings at that scale. `papermill -p` can override them one by one. Scale
            "real" has none. Where a notebook has a section on it, the notebook's other cells then only say that they
            were skipped: `records` and `of`, the notebook's own runs, are set to none.

    Returns:
        The seven parameters, the scale's settings with overrides applied, and `aside`: whether this run departs from
        the plain scale (force, seeds, model, an override, smoke, real), so that nothing may be written among the
        committed records and artefacts.

    Raises:
        ValueError: an unknown scale; "real" in a notebook without a section on it, or with anything else to change,
            since its runs are made elsewhere; a name that is neither a parameter nor a setting (suggests the nearest
            one); a missing parameter; a value of the wrong type; an empty list, or a number that is not finite,
            negative, zero or huge, where no scale has such a value; an unknown engine; a scale without presets.

    >>> check_parameters(
    ...     dict(scale="tiny", model="", engine="local", gpus=0, seeds=0, force=False, dry_run=False, stpes=3),
    ...     {"tiny": {"steps": 100}})
    Traceback (most recent call last):
    ...
    ValueError: unknown parameter 'stpes'. Did you mean 'steps'? Known: ...
    """
    if missing := [name for name in PARAMETERS if name not in namespace]:
        raise ValueError(f"parameter {missing[0]!r} is not set: run the parameters cell first.")
    scale = namespace["scale"]
    if scale == "real":
        study, presets = namespace.get("study"), {"real": {}}
        notebook = study.NOTEBOOK if study else ""
        known = ", ".join(name[:2] for name in real_panels.NOTEBOOKS)
        require(notebook in real_panels.NOTEBOOKS, f"scale='real': its records are in notebooks {known}. Execute one.")
    hint = f"use one of {', '.join(presets)}.{nearest(scale, presets, 0.0)}"
    require(scale in list(presets), f"unknown scale={scale!r}: {hint}")
    settings = dict(presets[scale])
    for name in (_COMMON | settings).keys() & namespace.keys():
        namespace[name] = _read(plain(namespace[name]), [own.get(name) for own in (_COMMON, *presets.values())])
    given = {name: namespace[name] for name in _given(namespace, presets)}
    if scale == "real":
        own = _COMMON | {name: given[name] for name in ("scale", "dry_run")}
        others = ", ".join(f"{name}={value!r:.80}" for name, value in given.items() if value != own.get(name))
        made = "its runs are made by `python -m evoalign_study.real run`, and shown as they were recorded"
        require(not others, f"scale='real' takes no {others}: {made}. Leave it out.")
    _check(given, presets)
    settings |= {name: value for name, value in given.items() if name in settings}
    engine, gpus, model = (namespace[name] for name in ("engine", "gpus", "model"))
    local = engine == "local"
    require(not (gpus and local), f"gpus={gpus!r}: engine 'local' runs on CPU cores only. Set gpus=0.")
    if engine == "cuda":
        require(gpus <= 1, f"gpus={gpus!r}: engine 'cuda' uses one GPU. Set gpus=0, or engine='ray'.")
        require(gpus_here(), "engine='cuda': torch sees no GPU. Set engine='local'.")
    own = scale == "full" or (local and not model)
    require(own, f"engine={engine!r}, model={model!r}: scale {scale!r} has own models on 'local'. Set scale='full'.")
    aside = scale in ("smoke", "real") or any(bool(namespace[name]) for name in ("force", "seeds", "model"))
    aside |= settings != dict(presets[scale])
    namespace["_parameters_checked"] = check_parameters
    _skip_others(scale == "real")
    if scale == "real":  # what the set-up cell, which is skipped, does at other scales
        style.use()
        namespace |= {"notebook": notebook, "records": {}, "of": {}}
    return SimpleNamespace(**{name: namespace[name] for name in PARAMETERS}, aside=aside, **settings)


def _read(value: Any, examples: Sequence[Any]) -> Any:
    """Return the truth value, list or dict that papermill gave as text, if one of the examples is one."""
    kinds = tuple({type(example) for example in examples} & {bool, list, tuple, dict})
    # YAML takes 1e-3 for a text and yes for a truth value; JSON takes neither .5 nor a name without quotes
    for read in (json.loads,) if bool in kinds else (json.loads, yaml.safe_load):
        if isinstance(value, str) and kinds:
            with suppress(ValueError, yaml.YAMLError):
                found = read(value)
                return found if isinstance(found, (*kinds, list)) else value
    return value


def _skip_others(skip: bool) -> None:
    """In IPython, skip the cells of a notebook that need runs that scale "real" lacks; or no longer skip any."""
    ipython = sys.modules.get("IPython")
    if shell := ipython and ipython.get_ipython():
        transforms = shell.input_transformers_cleanup
        transforms[:] = [each for each in transforms if each is not _of_scale_real] + [_of_scale_real] * skip
        if skip:
            print("scale real: only the section 'On a real model' has records and is executed; other cells are skipped")


def _of_scale_real(lines: list[str]) -> list[str]:
    """Return the lines of parameters, their check and the section as they are; of others, that they are skipped."""
    kept = re.search(r"^scale\b.*=|check_parameters\(|real_panels\.", "".join(lines), re.MULTILINE)
    return lines if kept else ["print('skipped at scale real')\n"]


def announce(run: SimpleNamespace, notebook: str) -> None:
    """Print what a notebook runs on: scale, device, versions, code commit; with `dry_run`, also that it will stop.

    In IPython, a dry run then ends with its message only: no traceback, and papermill exits with code 0.
    """
    found = provenance.environment(run.engine, run.gpus or 1)
    device = found.pop("device")
    print(f"{notebook}, scale {run.scale}, engine {run.engine} on {device}")
    print(", ".join(f"{name} {version}" for name, version in found.items()), f"(commit {provenance.commit()})")
    if run.dry_run:
        print("dry run: the first runs that have no record are named, and nothing is run")
        ipython = sys.modules.get("IPython")
        if shell := ipython and ipython.get_ipython():
            shell.set_custom_exc((sweep.DryRun,), _end_of_dry_run)


def _end_of_dry_run(shell: Any, kind: type, error: BaseException, trace: Any, tb_offset: int | None = None) -> None:
    """Print what a dry run found, and stop the notebook; papermill does not count this stop as a failure."""
    print(error)
    shell.showtraceback((SystemExit, SystemExit(0), None), exception_only=True)


def table(presets: Mapping[str, Mapping[str, Any]]) -> DataFrame:
    """Return the settings as a table: all of the first scale, and of each other scale those that differ.

    presets: as for `check_parameters`.
    """
    from pandas import DataFrame

    first, columns = next(iter(presets.values())), {}
    names = list(dict.fromkeys(name for preset in presets.values() for name in preset))
    for scale, preset in presets.items():
        own = {k: v for k, v in preset.items() if preset is first or k not in first or v != first[k]}
        columns[scale] = [own.get(name, "") for name in names]
    return DataFrame(columns, index=names, dtype=object)


def _given(namespace: Mapping[str, Any], presets: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the names that are parameters or were meant to be: plain values, neither IPython's nor private.

    If the parameters cell runs again, the namespace also holds what later cells defined. Then only the names that the
    cell set in its latest run are returned, and the scale's settings.
    """
    names = [name for name in PARAMETERS if name in namespace]
    if namespace.get("_parameters_checked") is check_parameters:
        cells = [source for source in namespace.get("In", ()) if re.search(r"^scale\b.*=", source, re.MULTILINE)]
        names += re.findall(r"^(\w+)\s*(?::[^=]*)?=(?!=)", cells[-1] if cells else "", re.MULTILINE)
        names += presets[namespace["scale"]]
    else:
        of_ipython = {name for name, kind in (("In", list), ("Out", dict)) if isinstance(namespace.get(name), kind)}
        plain = [name for name, value in namespace.items() if isinstance(value, _PLAIN) and name not in of_ipython]
        names += [name for name in plain if not name.startswith("_")]
    return [name for name in dict.fromkeys(names) if name in namespace and name != "presets"]


def _check(given: Mapping[str, Any], presets: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ValueError, naming the parameter, for an unknown name or a value unlike those of all scales."""
    from pydantic import ConfigDict, Field, ValidationError, create_model

    scale = given["scale"]
    examples = {name: [preset[name] for preset in presets.values() if name in preset] for name in presets[scale]}
    fields: dict[str, Any] = {name: (_type([value]), value) for name, value in _COMMON.items()}
    fields |= {"scale": (str, scale), "engine": (Literal["local", "cuda", "vllm", "ray"], "local")}
    fields |= dict.fromkeys(("seeds", "gpus"), (Annotated[int, Field(strict=True, ge=0, le=_MOST_SEEDS)], 0))
    for name, values in examples.items():
        fields[name] = (_type(values, _MOST_SEEDS if "seeds" in name else _MOST, name), None)
    try:
        create_model("Parameters", __config__=ConfigDict(extra="forbid"), **fields)(**given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            raise ValueError(
                f"unknown parameter {name!r}.{nearest(name, fields, cutoff=0.5)} Known: {', '.join(sorted(fields))}. "
                f"(In JupyterLab, remove it, run 'del {name}', then run the parameters cell again.)"
            ) from None
        example = next((e for e in examples.get(name, ()) if e is not None), _COMMON.get(name))
        value = f"{first['input']!r:.80}" if isinstance(first["input"], _PLAIN) else type(first["input"]).__name__
        raise ValueError(f"parameter {name}={value}: {first['msg']}; use for example {example!r:.80}.") from None
    for name in given.keys() & examples.keys():
        value = given[name] if isinstance(given[name], (list, tuple)) else ()
        if repeated := [x for i, x in enumerate(value) if isinstance(x, (int, float)) and x in value[:i]]:
            raise ValueError(f"parameter {name}={value!r:.80} repeats {repeated[0]!r}: give each value once.")


def _type(examples: Sequence[Any], most: int = _MOST, name: str = "") -> Any:
    """Return the type that pydantic checks a value against, inferred from the values of all scales.

    An empty text or list, zero, a negative number and None are accepted only where some scale has such a value.
    """
    from pydantic import Field

    some = [example for example in examples if example is not None]
    if not some:
        return Any
    first, least = some[0], 0 if name in _MAY_BE_EMPTY or not all(some) else 1
    if isinstance(first, bool):
        found: Any = Annotated[bool, Field(strict=True)]
    elif isinstance(first, (int, float)):
        low = {} if min(some) < 0 else {"gt": 0} if min(some) > 0 and "seeds[" not in name else {"ge": 0}
        real = {"allow_inf_nan": False} if any(isinstance(number, float) for number in some) else {}
        found = Annotated[float if real else int, Field(strict=True, le=most, **low, **real)]
    elif isinstance(first, str):
        found = Annotated[str, Field(strict=True, min_length=least)]
    elif isinstance(first, dict):
        parts = [part for example in some for part in example.values()]
        found = Annotated[dict[str, _type(parts, most)], Field(min_length=least)]
    else:
        parts = [part for example in some for part in example]
        longest = most if "seeds" in name else _MOST_LISTED
        found = Annotated[Sequence[_type(parts, most, f"{name}[")], Field(min_length=least, max_length=longest)]
    return found | None if None in examples else found
