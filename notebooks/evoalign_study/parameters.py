"""The parameters of a notebook: their check before any work, and what a notebook says it runs on."""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from evoalign_lib.checks import nearest
from evoalign_lib.engines import ENGINES
from evoalign_study import provenance, sweep
from evoalign_study.records import SCALES

if TYPE_CHECKING:
    from pandas import DataFrame

_EXAMPLES = {"model": "", "engine": "local", "gpus": 0, "seeds": 0, "force": False, "dry_run": False}
PARAMETERS = ("scale", *_EXAMPLES)
_MOST = 1_000_000
_MOST_SEEDS = 10_000  # or GPUs
_MAY_BE_EMPTY = ("prompt_counts",)  # though no scale has it so: then a section of notebook 05 is left out


def check_parameters(namespace: dict[str, Any], presets: Mapping[str, Mapping[str, Any]]) -> SimpleNamespace:
    """Check a notebook's parameters before any work, and give it its settings.

    Args:
        namespace: the notebook's `globals()`, holding the seven common parameters and what `papermill -p` injected
            (which gives the texts "true" and "false" for truth values: they are replaced by these).
        presets: scale -> settings of the notebook at that scale. Each can be overridden one by one with `papermill -p`.

    Returns:
        The seven parameters, the scale's settings with overrides applied, and `aside`: whether this is anything but the
        scale as it stands (force, seeds, model, an override, smoke), so that nothing may be written among the
        committed records and artefacts.

    Raises:
        ValueError: an unknown scale, a name that is neither a parameter nor a setting (with the nearest one), a
            missing parameter, a value of another type than it should have, an empty list, or a number that is not
            finite, negative, zero or huge where no scale has such a one, an unknown engine, a scale without preset.

    >>> check_parameters(
    ...     dict(scale="tiny", model="", engine="local", gpus=0, seeds=0, force=False, dry_run=False, stpes=3),
    ...     {"tiny": {"steps": 100}})
    Traceback (most recent call last):
    ...
    ValueError: unknown parameter 'stpes'. Did you mean 'steps'? Known: ...
    """
    missing = [name for name in PARAMETERS if name not in namespace]
    if missing:
        raise ValueError(f"parameter {missing[0]!r} is not set: run the parameters cell first.")
    scale = namespace["scale"]
    if scale not in SCALES:
        raise ValueError(
            f"unknown scale {scale!r}: use one of {', '.join(SCALES)}.{nearest(scale, SCALES, cutoff=0.0)}"
        )
    if scale not in presets:
        raise ValueError(f"this notebook has no scale {scale!r} yet: use one of {', '.join(presets)}.")
    settings = dict(presets[scale])
    known = {*PARAMETERS, *settings}
    named = [name for name in _of_parameters_cells(namespace.get("In")) if name in namespace]
    # When this cell runs again, the names that later cells define are there too: all are judged the first time only.
    if namespace.get("_parameters_checked") is not check_parameters:
        named += [name for name, value in namespace.items() if value is not presets and _is_given(name, value)]
    for name in named:
        if name not in known:
            raise ValueError(
                f"unknown parameter {name!r}.{nearest(name, known, cutoff=0.5)} Known: {', '.join(sorted(known))}. (In "
                f"JupyterLab, take it out, run 'del {name}', and run the parameters cell again.)"
            )
    for name, default in (_EXAMPLES | settings).items():
        if name in namespace:
            value = namespace[name]
            if isinstance(default, bool) and value in ("true", "false"):
                value = namespace[name] = value == "true"
            if default is not None and not _fits(value, default):
                raise ValueError(
                    f"parameter {name}={value!r} has type {type(value).__name__}, expected {type(default).__name__}, "
                    f"for example {default!r}."
                )
            if name in settings:
                settings[name] = value
                examples = [preset[name] for preset in presets.values() if name in preset]
                _check_value(name, value, examples, _MOST_SEEDS if "seeds" in name else _MOST)
    for name in ("seeds", "gpus"):
        if namespace[name] < 0:
            raise ValueError(f"{name}={namespace[name]!r} must not be negative; 0 takes the scale's own.")
        _check_value(name, namespace[name], [_EXAMPLES[name]], _MOST_SEEDS)
    if namespace["engine"] not in ENGINES:
        raise ValueError(f"unknown engine {namespace['engine']!r}: use one of {', '.join(ENGINES)}.")
    if namespace["gpus"] and namespace["engine"] == "local":
        raise ValueError(f"gpus={namespace['gpus']!r}: engine 'local' runs on CPU cores only, set gpus=0.")
    if namespace["engine"] != "local" and scale != "full":
        raise ValueError(f"engine={namespace['engine']!r} is for scale 'full'; scale {scale!r} has engine 'local'.")
    if namespace["model"] and scale != "full":
        raise ValueError(f"model={namespace['model']!r} is for scale 'full'; scale {scale!r} has models of its own.")
    aside = scale == "smoke" or any(bool(namespace[name]) for name in ("force", "seeds", "model"))
    aside |= settings != dict(presets[scale])
    namespace["_parameters_checked"] = check_parameters
    if scale == "smoke" and "get_ipython" in namespace and not namespace["dry_run"]:
        sweep.begin_imports()  # of the runs that the notebook's next cells make
    return SimpleNamespace(**{name: namespace[name] for name in PARAMETERS}, aside=aside, **settings)


def announce(run: SimpleNamespace, notebook: str) -> None:
    """Print what a notebook runs on: scale, device, versions, the code's commit; with `dry_run`, that it will stop.

    In IPython a dry run then ends with its message alone: no traceback, and papermill's exit code is 0.
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
    """Print what a dry run found. None of the cells after it runs, by an error that papermill takes for no failure."""
    print(error)
    shell.showtraceback((SystemExit, SystemExit(0), None), exception_only=True)


def table(presets: Mapping[str, Mapping[str, Any]]) -> DataFrame:
    """Return the settings as a table: those of the first scale, and where another scale differs, its own.

    presets: as for `check_parameters`.
    """
    from pandas import DataFrame

    first, *others = presets.values()
    rows = {
        name: [first.get(name, "")] for name in dict.fromkeys(name for preset in presets.values() for name in preset)
    }
    for preset in others:
        for name, row in rows.items():
            same = name not in preset or (name in first and preset[name] == first[name])
            row.append("" if same else preset[name])
    return DataFrame(rows.values(), index=list(rows), columns=list(presets), dtype=object)


_OF_IPYTHON = {"In": list, "Out": dict}


def _is_given(name: str, value: Any) -> bool:
    """Whether a variable may be a parameter that somebody set: it is plain, and neither private nor IPython's."""
    if name.startswith("_") or isinstance(value, _OF_IPYTHON.get(name, ())):
        return False
    return value is None or isinstance(value, (bool, int, float, str, list, tuple, dict))


def _of_parameters_cells(history: Any) -> list[str]:
    """Return the names that the parameters cell, as it ran last, and what papermill injected after it have set.

    history: the sources of the cells that ran, IPython's `In`. What was injected consists of literals alone.
    """
    names: list[str] = []
    for source in reversed(history if isinstance(history, list) else []):
        try:
            statements = ast.parse(source).body
        except (SyntaxError, ValueError):
            continue
        assigned = [s for s in statements if isinstance(s, (ast.Assign, ast.AnnAssign))]
        targets = [target for s in assigned for target in (s.targets if isinstance(s, ast.Assign) else [s.target])]
        bound = [target.id for target in targets if isinstance(target, ast.Name)]
        if "scale" in bound:
            return [*bound, *names]
        if len(assigned) == len(statements) and all(map(_is_literal, assigned)):
            names = [*bound, *names]
    return []


def _is_literal(statement: ast.Assign | ast.AnnAssign) -> bool:
    """Whether a literal is assigned, or float('nan') and float('inf'), as which papermill writes these."""
    code = ast.unparse(statement.value or ast.Constant(None))
    try:
        ast.literal_eval(code.replace("float('nan')", "0").replace("float('inf')", "0"))
    except (ValueError, TypeError):
        return False
    return True


def _check_value(name: str, value: Any, examples: Collection[Any], most: int = _MOST) -> None:
    """Raise ValueError for a value, or one in a list or dictionary, that is of another kind than those of all scales.

    examples: of each scale. most: that a number may be.
    """
    if value is None and None in examples:
        return
    examples = [example for example in examples if example is not None]
    if examples and not any(_fits(value, example) for example in examples):
        raise ValueError(
            f"{name}={value!r:.80} has type {type(value).__name__}, expected {type(examples[0]).__name__}, for example "
            f"{examples[0]!r:.80}."
        )
    empty = isinstance(value, (str, list, tuple, dict)) and not value
    if empty and examples and all(examples) and name not in _MAY_BE_EMPTY:
        raise ValueError(f"{name}={value!r} must not be empty: use for example {examples[0]!r:.80}.")
    if isinstance(value, (list, tuple, dict)):
        within = [part for example in examples for part in _parts(example)]
        for part in _parts(value):
            _check_value(name, part, [*within, 0] if "seeds" in name else within)  # the first seed is 0
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        numbers = [n for n in examples if isinstance(n, (int, float)) and not isinstance(n, bool)]
        if not -math.inf < value < math.inf:
            raise ValueError(f"{name}={value!r} must be a finite number.")
        if value < 0 and all(n >= 0 for n in numbers):
            raise ValueError(f"{name}={value!r:.80} must not be negative.")
        if value == 0 and numbers and all(n > 0 for n in numbers):
            raise ValueError(f"{name}={value!r} must be greater than 0: use for example {numbers[0]!r}.")
        if value > most:
            raise ValueError(f"{name}={value!r:.80} must be at most {most}.")


def _parts(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else list(value)


def _fits(value: Any, default: Any) -> bool:
    """Whether a value may stand where the default stands: an int for a float, but no bool for a number."""
    if isinstance(value, bool) or isinstance(default, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    if isinstance(default, float):
        return isinstance(value, (int, float))
    return isinstance(value, (list, tuple) if isinstance(default, (list, tuple)) else type(default))
