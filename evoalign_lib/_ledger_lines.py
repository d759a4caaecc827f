"""The lines of a ledger (`evoalign_lib.ledger`): checks of the header, encoding of rewards, hash chain, file access.

After the header there is one line per step:

- `step`: 0, 1, ...
- `rewards`: the rewards used for the update (permuted in the null arm "shuffled"), exactly, in the order of the
  members. "17 23-1" with `of` D means 17 / D and the float64 one unit in the last place nearer to 0 than 23 / D: a mean
  over prompts is nearly always that close to a short fraction. Without `of`: Base64 of the float64s, little endian.
- `tokens` generated; `seconds` of the evaluation; `core`, CPU seconds of the run so far; `counts` of failed rewards.
- `log`: values of further metrics; `names`: their names, where they differ from those of the line before.
- `reward_state`, in a run whose reward functions have a state (`evoalign_lib.rewards`): function -> state after the
  step. The state before the first step is in the header's settings, under the same name. A resumed run takes up the
  last state; a replay needs none, because the rewards are recorded.
- `weights`, every `digest_every` steps: the digest before the step.
- `hash`, the last entry of every line, the header included: the first 128 bits of the SHA-256 of the previous line's
  hash (of nothing, for the header) followed by everything in this line before `,"hash"`. So the hash covers this line
  and all lines before it. The chain finds accidents and careless edits, for which 128 bits do as well as 256; it uses
  no secret, so no length would stop a forger. Over 500 steps the other 128 bits would cost 16 kB.
- `prev`, in format 1: the first 128 bits of the SHA-256 of the previous line (without its newline). Nothing covers the
  last line of such a ledger.
"""

import base64
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evoalign_lib import _singular, noise, quantisation, update_rules
from evoalign_lib._adapters import PERTURBED
from evoalign_lib._anchor import check_decay
from evoalign_lib.checks import choose, positive, require, single, whole_number
from evoalign_lib.precision import PRECISIONS

FORMATS = (1, 4, 5, 6)
NEW = 4  # format of a run whose settings need no later one; from this format on every line holds its own hash
PREV = 32  # hexadecimal digits
BEGIN = b'{"evoalign_ledger":'
# bounds on the sizes in a header; for comparison, DeepSeek-V3 with 671 B parameters has 46,000 tensors
_MOST_TENSORS, _LONGEST_NAME, _MOST_DIMENSIONS, _LARGEST = 200_000, 500, 8, 2**53
MOST_MEMBERS = 2**20
"""bound on population_size: reading a step takes two seconds"""
_HEADER = {"evoalign_ledger", "noise", "run_key", "settings", "digest_every", "model"}
# settings that affect the weights and that readers of older formats do not know: format -> value in runs without them
_SINCE: dict[int, dict[str, Any]] = {
    4: {
        "precision": "master",
        "noise": "gaussian",
        "antithetic": False,
        "fitness_shaping": "zscore",
        "sigma_schedule": "constant",
        "alpha_schedule": "constant",
        "anchor_decay": 0.0,
        "frozen": None,  # all parameters are trained
    },
    5: {"rank": 0, "update_scaling": "mean"},  # noise of full rank
    6: {"search": None},  # members are noise around the weights
}
# settings that affect the weights only through the rewards, so that any reader can replay the run
_SINCE[1] = {"sampling": "greedy", "num_generations": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
_SINCE[1] |= {"stop_strings": None, "generation_kwargs": None, "perturb": "all"}  # the header says what moves


class LedgerError(ValueError):
    """A ledger cannot be read, continued or replayed; the message says where the fault is and what to do."""


def with_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run; for settings that did not exist then, the value that all runs had."""
    return _SINCE[1] | _SINCE[4] | _SINCE[5] | _SINCE[6] | settings


def format_of(settings: Mapping[str, Any]) -> int:
    """Return the lowest format whose readers replay a run with these settings correctly."""
    needs = (n for n, later in _SINCE.items() if any(settings.get(k, value) != value for k, value in later.items()))
    return max(needs, default=1)


# ---- the header


def _hexadecimal(name: str, value: Any, digits: int, prefix: str = "") -> None:
    fits = isinstance(value, str) and re.fullmatch(f"{prefix}[0-9a-f]{{{digits}}}", value)
    require(fits, f"{name}={value!r:.80} must be {f'{prefix} and ' if prefix else ''}{digits} hexadecimal digits.")


def _is(name: str, value: Any, *kinds: type) -> None:
    require(isinstance(value, kinds), f"{name}={value!r:.80} must be a {kinds[0].__name__}.")


# setting -> its check: a function of name and value, and the function's further arguments
_SETTINGS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("prompts_per_step", "num_generations"), (whole_number, 1, _LARGEST)),
    **dict.fromkeys(("sigma_schedule", "alpha_schedule"), (choose, update_rules.SCHEDULES)),
    "population_size": (whole_number, 2, MOST_MEMBERS),
    "rank": (whole_number, 0, 2**16 - 1),
    "sigma": (single,),
    "precision": (choose, PRECISIONS),
    "noise": (choose, noise.DISTRIBUTIONS),
    "fitness_shaping": (choose, update_rules.SHAPINGS),
    "update_scaling": (choose, update_rules.SCALINGS),
    "antithetic": (_is, bool),
    "perturb": (choose, PERTURBED),
    "search": (choose, (None, _singular.SEARCH)),
}
# settings that must have their defaults in a search, whose members are not noise around the weights
_PLAIN = ("precision", "noise", "antithetic", "rank", "anchor_decay", "sigma_schedule")
_SEARCH = {name: (choose, ((_SINCE[4] | _SINCE[5])[name],)) for name in _PLAIN} | dict(_singular.SETTINGS)
_SEARCH |= {"machine": (_is, str), "cma_options": (choose, ({},)), "decomposition": (choose, ("separate",))}
_MODEL = {
    "digest": (_hexadecimal, 64),
    "name": (_is, str, type(None)),
    "dtype": (choose, ("float32", "bfloat16", "float16")),
}
_QUANTISED = {"mode": (choose, quantisation.QUANTISED), "torchao": (_is, str), "base": (_hexadecimal, 16)}


def check_header(line: Any) -> None:
    """Raise LedgerError unless the line is a header that this version can read and replay."""
    if not isinstance(line, dict) or not line.keys() >= _HEADER:
        raise LedgerError("this is not the header of a ledger: the file lost its first line, or is not a ledger.")
    versions = {"format": (line["evoalign_ledger"], FORMATS), "noise law": (line["noise"], (noise.NOISE_VERSION,))}
    for what, (version, known) in versions.items():
        if version not in known:
            has = f"the run has {what} version {version!r:.80}, but this evoalign knows {', '.join(map(str, known))}"
            raise LedgerError(f"{has}: install an evoalign that knows that version.")
    try:
        _check(line, {"run_key": (_hexadecimal, 16, "0x"), "digest_every": (whole_number, 1, _LARGEST)})
        _check(line, dict.fromkeys(("settings", "model"), (_is, dict)))
        _check_settings(with_defaults(line["settings"]))
        _check_model(line["model"])
    except ValueError as error:
        raise LedgerError(f"{error!s:.400} No run writes such a value: the header was edited.") from error
    if (number := line["evoalign_ledger"]) < (least := format_of(line["settings"])):
        raise LedgerError(f"the format is {number!r}, but the settings need format {least}: the header was edited.")


def _check(entries: Mapping[str, Any], checks: Mapping[str, tuple[Any, ...]]) -> None:
    for name, (check, *bounds) in checks.items():
        check(name, entries[name], *bounds)


def _check_settings(settings: Mapping[str, Any]) -> None:
    _check(settings, _SETTINGS)
    _check(settings, _SEARCH if settings["search"] else {"alpha": (single,)})
    if falling := [name for name in ("sigma", "alpha") if settings[f"{name}_schedule"] != "constant"]:
        _check(settings, {f"{name}_final_fraction": (positive, 1) for name in falling})
        _check(settings, {"max_steps": (whole_number, 1, _LARGEST)})
    if settings["antithetic"]:
        require(settings["population_size"] % 2 == 0, "population_size must be even for antithetic pairs.")
    if settings["frozen"] is not None:
        _hexadecimal("frozen", settings["frozen"], 64)
    check_decay(settings["anchor_decay"], settings["precision"])
    states(settings.get("reward_state", {}))


def _check_model(model: Mapping[str, Any]) -> None:
    _check(model, _MODEL)
    rows = model["parameters"]
    fits = isinstance(rows, list) and all(map(_is_shape, rows))
    fits = fits and sum(row[2] if len(row) > 2 else 1 for row in rows) <= _MOST_TENSORS
    require(fits, f"parameters={rows!r:.80} must be a list of names and shapes.")
    if "quantisation" in model:
        how = model["quantisation"]
        _is("quantisation", how, dict)
        _check(how, _QUANTISED)
        _check(how, {"group_size": (whole_number, 1, _LARGEST) if how["mode"] == "int4" else (choose, (None,))})
        require(how.keys() == {*_QUANTISED, "group_size"}, f"quantisation={how!r:.80} has unknown entries.")


def _is_shape(row: Any) -> bool:
    """Return whether a row is valid for `unpack_shapes` and within the bounds on sizes."""
    if not (isinstance(row, list) and len(row) in (2, 3) and isinstance(row[0], str) and isinstance(row[1], list)):
        return False
    name, shape, *layers = row
    numbers = all(type(n) is int and 0 <= n <= _LARGEST for n in (*shape, *layers)) and 0 not in layers
    return len(name) <= _LONGEST_NAME and len(shape) <= _MOST_DIMENSIONS and numbers


def states(found: Any) -> dict[str, dict[str, float]]:
    """Return `found` if it maps reward functions to their states; raise LedgerError otherwise."""

    def is_state(state: Any) -> bool:
        return isinstance(state, dict) and all(isinstance(x, float) and math.isfinite(x) for x in state.values())

    if not isinstance(found, dict) or not all(map(is_state, found.values())):
        raise LedgerError(f"reward_state {str(found):.80} must map reward functions to states: the line was edited.")
    return found


# ---- lines


def encode_rewards(rewards: np.ndarray, prompts: int) -> dict[str, Any]:
    """Encode rewards in the shorter of the two exact forms that the module's docstring describes.

    Args:
        rewards: (members,) float64.
        prompts: number of prompts over which each reward is a mean; decides which denominators are tried.

    >>> encode_rewards(np.array([0.5, 0.1 + 0.2, 0.25]), 2)
    {'of': 20, 'rewards': '10 6+1 5'}
    """
    exact = base64.b64encode(rewards.astype("<f8").tobytes()).decode()
    for places in range(5):
        of = prompts * 10**places
        with np.errstate(over="ignore"):
            scaled = rewards * of
        if not (np.abs(scaled) < 2**53).all():
            break
        k = np.rint(scaled).astype(np.int64)
        # adjacent floats are adjacent as integers, and integer arithmetic is exact in both directions
        off = rewards.view(np.int64) - (k / of).view(np.int64)
        if ((off >= -9) & (off <= 9)).all():
            text = " ".join(f"{a}{b:+d}" if b else str(a) for a, b in zip(k.tolist(), off.tolist(), strict=True))
            return {"of": of, "rewards": text} if len(text) + len(f'"of":{of},') < len(exact) else {"rewards": exact}
    return {"rewards": exact}


_FRACTION = re.compile(r"(-?[0-9]{1,16})([+-][1-9])?", re.ASCII)


def decode_rewards(line: Mapping[str, Any]) -> np.ndarray:
    """Decode the rewards of a line, (members,) float64, to the bits that `encode_rewards` was given.

    Raises:
        LedgerError: the line has neither of the two forms.

    >>> decode_rewards({"of": 20, "rewards": "10 6+1 5"}).tolist()
    [0.5, 0.30000000000000004, 0.25]
    """
    text, of = line["rewards"], line.get("of")
    if of is None:
        data = base64.b64decode(text, validate=True)
        if len(data) % 8:
            raise LedgerError(f"rewards has {len(data)} bytes, not a multiple of 8.")
        return np.frombuffer(data, "<f8").astype(np.float64)
    found = [_FRACTION.fullmatch(part) for part in text.split(" ")]
    if not (isinstance(of, int) and 0 < of < 2**53) or None in found:
        raise LedgerError(f"rewards {text:.80} of {of!r} are not fractions.")
    k = np.array([int(m[1]) for m in found], np.int64)
    return ((k / of).view(np.int64) + np.array([int(m[2] or 0) for m in found])).view(np.float64)


def pack_shapes(shapes: Iterable[tuple[str, Sequence[int]]]) -> list[list]:
    """Pack the names and shapes of parameters: those that repeat over the layers are written once.

    >>> pack_shapes([("embed", (5, 2)), ("h.0.w", (3,)), ("h.1.w", (3,)), ("h.2.w", (4,))])
    [['embed', [5, 2]], ['h.#.w', [3], 2], ['h.2.w', [4]]]
    """
    groups: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, shape in shapes:
        template = name if "#" in name else re.sub(r"(?<=\.)[0-9]+(?=\.)", "#", name, count=1)
        groups.setdefault((template, tuple(shape)), []).append(name)
    packed: list[list] = []
    for (template, shape), names in groups.items():
        n = len(names)
        if n > 1 and set(names) == {template.replace("#", str(i)) for i in range(n)}:
            packed.append([template, list(shape), n])
        else:
            packed += [[name, list(shape)] for name in names]
    return packed


def unpack_shapes(packed: Iterable[Sequence]) -> list[tuple[str, list[int]]]:
    """Return the (name, shape) of each parameter from the result of `pack_shapes`, in any order."""
    return [
        (name.replace("#", str(i)) if n else name, shape) for name, shape, *n in packed for i in range(n[0] if n else 1)
    ]


def sealed(line: Mapping[str, Any], last: str, number: int) -> tuple[bytes, str]:
    """Write a line as text chained to the line before; return the text and its hash, for the next line.

    Args:
        line: the entries, without hash or prev.
        last: hash of the line before; "" for the header.
        number: format number.
    """
    old = number < NEW
    line = line | ({"prev": last} if old and last else {})
    text = json.dumps(line, separators=(",", ":"), allow_nan=False).encode()
    found = hashlib.sha256(text if old else last.encode() + text[:-1]).hexdigest()[:PREV]
    return text if old else text[:-1] + f',"hash":"{found}"}}'.encode(), found


def followed(text: bytes, line: dict[str, Any], last: str, number: int) -> str:
    """Check that a line follows from the one before, remove its hash and prev, and return its hash.

    Raises LedgerError if it does not follow.
    """
    for name in ("hash", "prev"):
        line.pop(name, None)
    expected, found = sealed(line, last, number)
    if text != expected:
        what = "its hash is wrong: the line is damaged, was edited, or does not follow from the line before it"
        raise LedgerError(f"{what}. Restore the file from a copy, or truncate it before this line and resume the run.")
    return found


def no_number(name: str) -> None:
    """Raise ValueError for a constant that JSON does not have."""
    raise ValueError(f"{name} is no number of JSON")


# ---- the file


def check_end(file: Any, path: Path, size: int, end: bytes) -> None:
    """Raise LedgerError unless an open file has this size and ends with these bytes; leave it at its end."""
    found = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - len(end)))
    if found != size or file.read(len(end)) != end:
        what = f"{path} has {found} bytes, or a different end than when this run last wrote it ({size} bytes)"
        remedy = "Stop the other run, and resume this one in a new process"
        raise LedgerError(f"{what}: another process writes to it, or it was edited. {remedy}.")


def append(path: Path, size: int, end: bytes, data: bytes, what: str) -> None:
    """Append bytes to a file of known size and end, and sync it; if they do not all fit, leave it as it was."""
    try:
        with open(path, "r+b", buffering=0) as file:
            check_end(file, path, size, end)
            try:
                write(file, data)
                os.fsync(file.fileno())
            except BaseException:
                file.truncate(size)
                raise
    except OSError as error:
        remedy = "make room, then call train(), or train(resume_from_checkpoint=True) in a new process"
        raise OSError(error.errno, f"{what} could not be recorded ({error.strerror}): {remedy}", str(path)) from error


def write(file: Any, data: bytes) -> None:
    """Write all of the data."""
    while data:  # a nearly full disk first accepts only part
        data = data[file.write(data) :]
