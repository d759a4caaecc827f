"""The ledger of an ES run: every weight of the run in some 200 kB, and the point from which a killed run goes on.

Noise is a function of keys (`evoalign_lib.noise`), so a run adds only the rewards of its members to its settings; keys
and coefficients are computed again from these. A ledger is a file of JSON lines.

Line 1, the header, holds the versions of format and noise law, the run key, the settings (the batch plan included), and
name, dtype, parameters and digest of the model. A digest is `precision.digest` of the weights in the form that the
setting `precision` names: the float32 master; with "inplace" the values in the model's dtype; with "kahan" the values
and compensations. The last two lose bits: the members of a step leave their mark on the weights, which `log` measures,
and a replay goes over all of them. `parameters` lists [name, shape], or [name with #, shape, n] for the n layers
# = 0 .. n - 1. The number of the format tells which readers know all settings that decide how rewards become weights:
that of a new run is 4; 5 where its noise has a low `rank` or its update another `update_scaling`, which a header names
only then; 6 for a `search` (see below). Those of older runs are
read, continued and replayed to the same bits; they have `prev` instead of `hash`: 1; 2 for precision, noise, antithetic
pairs, fitness shaping and schedules; 3 for anchored weight decay, which a header names only where it is on.

Of a run that moves a part of its model (an adapter over its base, or a model of which a part is frozen) `parameters`
and all digests are of what moves, and the setting `frozen` is the digest of the rest, which a run that goes on must
share. With an adapter (PEFT) `adapter` in `model` names the folder beside the ledger that holds the adapter as it was
at the start. Over a base that `evoalign_lib.quantisation` made codes of, `quantisation` in `model` says how: `mode`,
`group_size`, the version of `torchao`, and the digest of the plain weights, `base`. It decides rewards, but not how
they become weights, so the number of the format does not change.

Of a run that searches an adapter's singular values by CMA-ES (`evoalign_lib.essa`) the settings name `search`, what
decides it (`_singular.SearchSettings`), its `dimension`, whether the members of a step share their prompts
(`shared_batch`), and the `machine`: CMA-ES decomposes matrices by LAPACK, so the bits of such a run are those of one
machine. On another one a replay compares no digests but `search/sigma` and `search/distance` of the log of every step,
which may differ by `_singular.TOLERANCE`. `warm_start` beside the settings is what fine-tuning before the run cost.

Then one line per step, synced to disk before the weights move:

- `step`: 0, 1, ...
- `rewards`: what the step was computed with (permuted in the null arm "shuffled"), exactly, member by member. "17 23-1"
  with `of` D means 17 / D, and the float64 that lies one unit in the last place nearer to 0 than 23 / D: a mean over
  prompts is nearly always that close to a short fraction. Without `of`: Base64 of the float64s, little endian.
- `tokens` generated; `seconds` of the evaluation; `core`, CPU seconds of the run so far; `counts` of failed rewards.
- `log`: further metrics of the step; `names`: theirs, where they differ from those of the line before.
- `reward_state`, in a run whose reward functions have a state (`evoalign_lib.rewards`): function -> state after the
  step. The header's settings have it before the first step, by the same name. Rewards are recorded, so that a replay
  needs none of it; a resumed run goes on with the last one.
- `weights`, every `digest_every` steps: the digest before the step.
- `hash`, the last entry of every line, the header's included: the first 128 bits of the SHA-256 of the hash of the line
  before (of nothing, for the header) followed by all of this line that stands before `,"hash"`. So a line answers for
  itself and for all before it. The chain finds accidents and careless edits, for which 128 bits do as well as 256; it
  has no secret, so no length would stop a forger. Over 500 steps the other half would cost 16 kB.
- `prev`, in formats 1 to 3: the first 128 bits of the SHA-256 of the previous line (without its newline). Nothing
  answers for the last line of such a ledger.

When `train()` returns, a line with `end` (steps so far) and `weights` (the digest after them) closes the ledger; a run
that goes on continues below it.

A line counts once its newline is there. When a killed run resumes, its torn last line is cut off and the step is
computed again, with the same result. Anything else that is wrong is an error that names the line.

A ledger may come from anybody: its header is checked, and what it asks for is bounded, before anything is made by it.
Of the models that it may name only a shipped base is loaded without the user's word (`start_of`).
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evoalign_lib import _adapters, _singular, files, models, noise, quantisation, tiny, update_rules
from evoalign_lib._anchor import check_decay
from evoalign_lib._interrupts import interrupts_wait
from evoalign_lib.precision import PRECISIONS, Weights, copy_to, digest, open_weights

logger = logging.getLogger(__name__)

FORMATS = (1, 2, 3, 4, 5, 6)
NAME = "ledger.jsonl"
START = "start"
"""folder beside the ledger of an adapter's run: the adapter as it was at the start"""
DIGEST_EVERY = 10  # steps
_PREV = 32  # hexadecimal digits
_HASH = ',"hash":"{}"}}'  # the end of a line
_SINCE_HASHES = 4
_NEW = 4  # the format of a run whose settings need no later one
_BEGIN = b'{"evoalign_ledger":'
_MOST_UNPACKED = 64_000_000  # bytes; at N = 30 that is 150,000 steps
# bounds of what a header may ask for: DeepSeek-V3, of 671 B parameters, has 46,000 tensors
_MOST_TENSORS, _LONGEST_NAME, _MOST_DIMENSIONS, _LARGEST = 200_000, 500, 8, 2**53
_DTYPES = ("float32", "bfloat16", "float16")
_HEADER = {"evoalign_ledger", "noise", "run_key", "settings", "digest_every", "model"}
# Settings that older ledgers do not name, and the values that their runs had: readers of format 1 know no others.
_LATER: dict[str, Any] = {
    "precision": "master",
    "noise": "gaussian",
    "antithetic": False,
    "fitness_shaping": "zscore",
    "sigma_schedule": "constant",
    "alpha_schedule": "constant",
}
# The same for readers of format 2.
_LATER_3 = {"anchor_decay": 0.0}
# And of format 3; None: everything moves.
_LATER_4 = {"frozen": None}
# And of format 4; 0: noise of full rank.
_LATER_5 = {"rank": 0, "update_scaling": "mean"}
# And of format 5; None: members are noise around the weights. The search of `_singular` has settings of its own.
_LATER_6 = {"search": None}
# The same for settings that enter the weights through the rewards alone.
_LATER_EVALUATION = {"sampling": "greedy", "num_generations": 1}
# And for those that a header names only where they differ from this.
_LATER_OPTIONS: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
_LATER_OPTIONS |= {"stop_strings": None, "generation_kwargs": None}


class LedgerError(ValueError):
    """A ledger that cannot be read, continued or replayed; the message says where and what to do."""


@dataclass
class Step:
    """One step of a run, as its line holds it."""

    step: int
    """0, 1, ..."""
    rewards: np.ndarray
    """(members,) float64, reward units: what the coefficients were computed from"""
    tokens: int = 0
    """generated in this step"""
    seconds: float = 0.0
    """wall time of the evaluation"""
    core: float = 0.0
    """CPU seconds of the run, this evaluation included"""
    counts: dict[str, int] = field(default_factory=dict)
    """failed rewards of this step, by kind"""
    log: dict[str, float] = field(default_factory=dict)
    """metrics that do not follow from the rewards"""
    reward_state: dict[str, dict[str, float]] = field(default_factory=dict)
    """reward function -> its state after the step, of those that have one"""


@dataclass
class Report:
    """What `verify` found."""

    steps: int
    """recorded"""
    ended: bool
    """whether the last line closes the ledger"""
    torn: int
    """bytes of a torn last line, which does not count"""
    digests: int
    """digests of weights in the ledger, the model's included"""
    recomputed: bool
    """whether all of them were computed again"""
    weights: str | None
    """digest of the last weights, if ledger or replay gave it"""
    within: float | None = None
    """of a search that was made on another machine, the tolerance within which a replay agrees; no digest does"""

    def text(self) -> str:
        """Return the report in a few lines."""
        torn = f", and a torn last line of {self.torn} bytes, which does not count" if self.torn else ""
        chain = f"{self.steps} steps, chain intact, {'closed' if self.ended else 'not closed'}{torn}"
        done = "all computed again, equal" if self.recomputed else "not computed again: give the model"
        if self.within is not None:
            done = f"of another machine: here every step's sigma and distance agree within {self.within:g}"
        return f"{chain}\n{self.digests} digests of weights, {done}\nlast weights: {self.weights or 'no digest'}"


class Ledger:
    """A ledger in memory and, for a run that writes it, on disk; made by `create`, `open` or `read`."""

    def __init__(self, path: Path, header: dict[str, Any], line: bytes):
        self.path = path
        self.header = header
        """line 1"""
        self.steps: list[Step] = []
        """the recorded steps"""
        self.weights: dict[int, str] = {0: header["model"]["digest"]}
        """number of steps -> digest of the weights after them, where the ledger has it"""
        self.tips = [_hash(line, "", self._hashed)]
        """by number of steps: hash of the line of the last one"""
        self.ended = False
        """whether the last line closes the ledger"""
        self.torn = b""
        """a torn last line, which does not count"""
        self._last, self._names = self.tips[0], []
        self._text, self._size = line, len(line) + 1  # the last line, and the bytes of all

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the run; where an older header does not name one, the only value there was."""
        return with_defaults(self.header["settings"])

    @property
    def elsewhere(self) -> bool:
        """Whether the bits of the run are those of another machine than this."""
        return self.settings["search"] is not None and self.settings["machine"] != _singular.machine()

    @property
    def _hashed(self) -> bool:
        """Whether a line holds a hash of its own."""
        return self.header["evoalign_ledger"] >= _SINCE_HASHES

    @classmethod
    def create(cls, path: str | os.PathLike, header: dict[str, Any]) -> Ledger:
        """Begin a ledger with the line of `header`, synced to disk; replace a file in which no step is recorded.

        Raises:
            LedgerError: the file holds steps of a run, or is no ledger.
            OSError: it cannot be written.
        """
        path = Path(path)
        refuse_existing(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        line = _dump(header) if header["evoalign_ledger"] < _SINCE_HASHES else _with_hash(header, "")
        path.touch(exist_ok=False)
        try:
            _append(path, 0, b"", line + b"\n", "the start of the run")
        except OSError:
            path.unlink()
            raise
        files.sync_folder(path.parent)  # the new name
        return cls(path, header, line)

    @classmethod
    def open(cls, path: str | os.PathLike) -> Ledger:
        """Read a ledger to go on with it; cut a torn last line off the file and keep it in `torn`.

        Raises:
            LedgerError: as for `read`.
        """
        ledger = read(path)
        if ledger.path.suffix == ".gz":
            raise LedgerError(f"{ledger.path} is compressed: unpack it (gunzip) to go on with it.")
        if ledger.torn:
            os.truncate(ledger.path, ledger._size)
        return ledger

    def append(self, step: Step, weights: str | None = None) -> None:
        """Add one step, synced to disk.

        Args:
            step: the next one.
            weights: digest of the weights before it.

        Raises:
            LedgerError: a step out of order, a wrong number of rewards or one that is not finite, the state of other
                reward functions than the run's, or a file that another process has written to.
            OSError: the line cannot be written (a full disk); the file is then as it was before.
        """
        self._check(step)
        settings = self.settings
        line: dict[str, Any] = {"step": step.step}
        line |= encode_rewards(step.rewards, settings["prompts_per_step"] * settings["num_generations"])
        line |= {"tokens": step.tokens, "seconds": step.seconds, "core": step.core}
        if counts := {name: n for name, n in step.counts.items() if n}:
            line["counts"] = counts
        if (names := list(step.log)) != self._names:
            line["names"] = names
        if names:
            # JSON has no NaN: such values become text that float() reads
            line["log"] = [x if math.isfinite(x) else str(float(x)) for x in step.log.values()]
        if step.reward_state:
            line["reward_state"] = step.reward_state
        if weights is not None:
            line["weights"] = weights
        with interrupts_wait():
            text = self._write(line, f"step {step.step}")
            self.steps.append(step)
            self.tips.append(_hash(text, self._last, self._hashed))
            self._names, self.ended = names, False
            if weights is not None:
                self.weights[step.step] = weights
            self._written(text)

    def end(self, weights: str) -> None:
        """Close the ledger with the digest of the weights after its last step; errors as for `append`."""
        with interrupts_wait():
            text = self._write({"end": len(self.steps), "weights": weights}, "the end of the run")
            self.weights[len(self.steps)], self.ended = weights, True
            self._written(text)

    def check_file(self) -> None:
        """Raise LedgerError if the file is not as this run left it."""
        with open(self.path, "rb", buffering=0) as file:
            _check_end(file, self.path, self._size, self._text + b"\n")

    def _write(self, line: dict[str, Any], what: str) -> bytes:
        """Add a line to the file. Until `_written` knows of it the sizes differ, and nothing more can be added."""
        text = _with_hash(line, self._last) if self._hashed else _dump(line | {"prev": self._last})
        _append(self.path, self._size, self._text + b"\n", text + b"\n", what)
        return text

    def _written(self, text: bytes) -> None:
        self._last = _hash(text, self._last, self._hashed)
        self._text, self._size = text, self._size + len(text) + 1

    def _check(self, step: Step) -> None:
        if step.step != len(self.steps):
            raise LedgerError(f"step {step.step} is out of order: the next one in {self.path} is {len(self.steps)}.")
        n = self.header["settings"]["population_size"]
        if step.rewards.shape != (n,):
            raise LedgerError(
                f"step {step.step} has rewards of shape {step.rewards.shape}, the population has N = {n}."
            )
        if not np.isfinite(step.rewards).all():
            member = int(np.flatnonzero(~np.isfinite(step.rewards))[0])
            raise LedgerError(
                f"member {member} of step {step.step} has the reward {step.rewards[member]}: rewards must be finite; "
                "return None where a reward does not apply."
            )
        stateful = self.header["settings"].get("reward_state", {})
        if step.reward_state.keys() != stateful.keys():
            raise LedgerError(
                f"step {step.step} has the state of the reward functions {sorted(step.reward_state)}, the run is one "
                f"with that of {sorted(stateful)}."
            )


def with_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run; where they do not name one, the only value that there was before it."""
    return _LATER | _LATER_3 | _LATER_4 | _LATER_5 | _LATER_6 | _LATER_EVALUATION | _LATER_OPTIONS | settings


def _format(settings: Mapping[str, Any]) -> int:
    """Return the first format whose readers replay a run of these settings rightly."""

    def names(later: Mapping[str, Any]) -> bool:
        return any(settings.get(name, value) != value for name, value in later.items())

    if names(_LATER_6):
        return 6
    return 5 if names(_LATER_5) else 4 if names(_LATER_4) else 3 if names(_LATER_3) else 2 if names(_LATER) else 1


def recorded(path: str | os.PathLike) -> bool:
    """Return whether a file holds a ledger with at least one step (a killed run may leave less than a header)."""
    path = Path(path)
    return path.is_file() and path.read_bytes().count(b"\n") > 1


def refuse_existing(path: str | os.PathLike) -> None:
    """Raise LedgerError if a file holds recorded steps, which a new run would destroy, or is anything but a ledger."""
    path = Path(path)
    if not path.exists():
        return
    data = path.read_bytes() if path.is_file() else None
    if data is None or not (data.startswith(_BEGIN) or _BEGIN.startswith(data)):  # a killed run may leave a part of it
        raise LedgerError(f"{path} is there and is no ledger of a run: use another output_dir, or move it elsewhere.")
    if recorded(path):
        raise LedgerError(
            f"{path} is the ledger of another run: use another output_dir, or train(resume_from_checkpoint=True) to "
            "go on with that run."
        )


def read(path: str | os.PathLike) -> Ledger:
    """Read a ledger, plain or compressed with gzip, and check its chain; the file does not change.

    Returns:
        The ledger, with `header`, `steps`, `weights`, and in `torn` the last line of a killed run.

    Raises:
        LedgerError: no such file, no header, another format or noise law; a line that is damaged, was edited, or does
            not follow from the one before (the message names it); or a compressed file that is damaged or unpacks to
            more than 64 MB.
    """
    path = Path(path)
    if not path.is_file():
        raise LedgerError(f"there is no ledger {str(path)!r}.")
    data = _unpacked(path) if path.suffix == ".gz" else path.read_bytes()
    *lines, torn = data.split(b"\n")
    ledger = None
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            # the machine stopped before all of the line was on disk: there are zeros in its place
            if number == len(lines) > 1 and not torn and b"\0" in text:
                torn = text + b"\n"
                break
            raise _damaged(path, number, f"is not JSON ({error})") from error
        try:
            if ledger is None:
                _check_header(line)
                ledger = Ledger(path, line, text)
                if ledger._hashed:
                    _check_hash(text, "")
                    del line["hash"]
            else:
                _take(ledger, line, text)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            if isinstance(error, LedgerError):
                raise LedgerError(f"{path}, line {number}: {error}") from error
            raise _damaged(path, number, f"is no line of a ledger ({type(error).__name__}: {error})") from error
    if ledger is None:
        raise LedgerError(f"{path} has no header: no step was recorded in it, so nothing is lost if it is deleted.")
    ledger.torn = torn
    return ledger


def _unpacked(path: Path) -> bytes:
    try:
        return files.decompressed(path, _MOST_UNPACKED)
    except ValueError as error:
        raise LedgerError(f"{error}: restore it from a copy.") from error
    except OverflowError as error:
        raise LedgerError(
            f"{error}, unlike any usual ledger (500 steps at N = 30 are 0.25 MB): if you trust it, unpack it (gunzip) "
            "and give the .jsonl."
        ) from error


def pack(path: str | os.PathLike) -> bytes:
    """Return a finished ledger compressed with gzip: a function of its lines alone, without name or time of the file.

    Raises:
        LedgerError: an invalid ledger, or one that is not closed.
    """
    run = read(path)
    if not run.ended or run.torn:
        raise LedgerError(f"{path} is not closed after step {len(run.steps)}: let train() finish the run first.")
    return files.compressed(run.path.read_bytes())


def _damaged(path: Path, number: int, what: str) -> LedgerError:
    return LedgerError(
        f"{path}, line {number} {what}: restore the file from a copy, or cut it off before this line (head -n "
        f"{number - 1}) and resume the run."
    )


def _check_header(line: Any) -> None:
    if not isinstance(line, dict) or not line.keys() >= _HEADER:
        raise LedgerError("this is not the header of a ledger: the file has lost its first line, or is something else.")
    for what, found, known in (
        ("format", line["evoalign_ledger"], FORMATS),
        ("noise law", line["noise"], (noise.NOISE_VERSION,)),
    ):
        if found not in known:
            *first, last = map(str, known)
            raise LedgerError(
                f"the run has version {found!r:.80} of the {what}, this evoalign has version "
                f"{', '.join(first)}{' and ' * bool(first)}{last}: use an evoalign that has version {found!r:.80}."
            )
    settings, model = line["settings"], line["model"]
    for name, value in (("settings", settings), ("model", model)):
        if not isinstance(value, dict):
            raise _edited(name, value)
    settings = with_defaults(settings)
    scheduled = [name for name in ("sigma", "alpha") if settings[f"{name}_schedule"] != "constant"]
    whole = [("population_size", 2), ("prompts_per_step", 1), ("num_generations", 1)]
    for name, least in whole + [("max_steps", 1)] * bool(scheduled):
        if not _is_whole(settings[name], least):
            raise _edited(name, settings[name])
    if settings["search"] is not None:
        _check_search(settings)
    largest = dict.fromkeys(["sigma"] if settings["search"] else ["sigma", "alpha"], sys.float_info.max)
    largest |= {f"{name}_final_fraction": 1 for name in scheduled}
    for name, most in largest.items():
        value = settings[name]
        if isinstance(value, bool) or not (isinstance(value, float | int) and 0 < value <= most):  # nor NaN
            raise _edited(name, value)
    choices = {"precision": PRECISIONS, "noise": noise.DISTRIBUTIONS, "fitness_shaping": update_rules.SHAPINGS}
    choices["update_scaling"] = update_rules.SCALINGS
    choices |= dict.fromkeys(("sigma_schedule", "alpha_schedule"), update_rules.SCHEDULES)
    choices["antithetic"] = (False,) if settings["population_size"] % 2 else (False, True)
    for name, known in choices.items():
        if settings[name] not in known:
            raise LedgerError(f"{name} is {settings[name]!r:.80}, none of {known}: the header was edited.")
    if (frozen := settings["frozen"]) is not None and not re.fullmatch("[0-9a-f]{64}", str(frozen)):
        raise LedgerError(f"frozen is {frozen!r:.80}, no digest: the header was edited.")
    _states(settings.get("reward_state", {}))
    if not _is_whole(settings["rank"], 0) or settings["rank"] >= 1 << 16:
        raise _edited("rank", settings["rank"])
    try:
        check_decay(settings["anchor_decay"], settings["precision"])
    except ValueError as error:
        raise LedgerError(
            f"anchor_decay is {settings['anchor_decay']!r:.80}: the header was edited. {error!s:.400}"
        ) from error
    if line["evoalign_ledger"] < (least := _format(settings)):
        raise LedgerError(
            f"the format is {line['evoalign_ledger']!r}, but the settings need format {least}: the header was edited."
        )
    if not _is_whole(line["digest_every"], 1):
        raise _edited("digest_every", line["digest_every"])
    for name, value, form in (
        ("run_key", line["run_key"], "0x[0-9a-f]{16}"),
        ("digest", model["digest"], "[0-9a-f]{64}"),
    ):
        if not (isinstance(value, str) and re.fullmatch(form, value)):
            raise _edited(name, value)
    if not (model["name"] is None or isinstance(model["name"], str)):
        raise _edited("the model's name", model["name"])
    if model["dtype"] not in _DTYPES:
        raise _edited("dtype", model["dtype"])
    if "quantisation" in model:
        _check_quantised(model["quantisation"])
    _check_parameters(model["parameters"])


def _check_quantised(how: Any) -> None:
    """Raise LedgerError unless a header says how `quantisation.quantise` made its base."""
    fits = isinstance(how, dict) and how.keys() == {"mode", "group_size", "torchao", "base"}
    fits = fits and how["mode"] in quantisation.QUANTISED and isinstance(how["torchao"], str)
    fits = fits and (_is_whole(how["group_size"], 1) if how["mode"] == "int4" else how["group_size"] is None)
    if not (fits and isinstance(how["base"], str) and re.fullmatch("[0-9a-f]{16}", how["base"])):
        raise _edited("quantisation", how)


def _check_search(settings: Mapping[str, Any]) -> None:
    """Raise LedgerError unless a header names a search that `_singular` can make."""
    choices: dict[str, Any] = {"search": (_singular.SEARCH,), "precision": ("master",), "noise": ("gaussian",)}
    choices |= {"antithetic": (False,), "anchor_decay": (0.0,), "rank": (0,), "sigma_schedule": ("constant",)}
    for name, known in choices.items():
        if settings[name] not in known:
            raise _edited(name, settings[name])
    if not isinstance(settings["machine"], str):
        raise _edited("machine", settings["machine"])
    try:
        _singular.SearchSettings.of(settings).check()
    except ValueError as error:
        raise LedgerError(f"{error!s:.400} The header was edited.") from error


def _edited(name: str, value: Any) -> LedgerError:
    return LedgerError(f"{name} is {value!r:.80}: the header was edited.")


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _LARGEST


def _check_parameters(rows: Any) -> None:
    """Raise LedgerError unless `unpack_shapes` makes a list of bounded size of these."""
    if not isinstance(rows, list):
        raise _edited("parameters", rows)
    tensors = 0
    for row in rows:
        if not (isinstance(row, list) and len(row) in (2, 3) and isinstance(row[0], str) and isinstance(row[1], list)):
            raise _edited("a row of parameters", row)
        name, shape, *layers = row
        numbers = all(_is_whole(n, 0) for n in shape) and all(_is_whole(n, 1) for n in layers)
        if not (len(name) <= _LONGEST_NAME and len(shape) <= _MOST_DIMENSIONS and numbers):
            raise _edited("a row of parameters", row)
        tensors += layers[0] if layers else 1
    if tensors > _MOST_TENSORS:
        raise LedgerError(f"parameters has {tensors} tensors, at most are {_MOST_TENSORS}: the header was edited.")


def _take(ledger: Ledger, line: Any, text: bytes) -> None:
    """Check a line of a file and take it into the ledger."""
    if ledger._hashed:
        _check_hash(text, ledger._last)
    elif line["prev"] != ledger._last:
        raise LedgerError(
            "it does not follow from the line before it: one of the two was edited, or lines are missing. Restore the "
            "file from a copy."
        )
    n = len(ledger.steps)
    if "end" in line:
        if line["end"] != n:
            raise LedgerError(f"it closes the ledger after {line['end']!r} steps, but {n} are recorded.")
        ledger.weights[n] = str(line["weights"])
    else:
        rewards = decode_rewards(line)
        names = line.get("names", ledger._names if "log" in line else [])
        log = dict(zip(map(str, names), map(float, line.get("log", [])), strict=True))
        counts = {str(name): int(count) for name, count in line.get("counts", {}).items()}
        known = int(line["tokens"]), float(line["seconds"]), float(line["core"]), counts, log
        step = Step(line["step"], rewards, *known, _states(line.get("reward_state", {})))
        ledger._check(step)
        ledger.steps.append(step)
        ledger._names = names
        if "weights" in line:
            ledger.weights[n] = str(line["weights"])
    ledger.ended = "end" in line
    ledger._written(text)
    if not ledger.ended:
        ledger.tips.append(ledger._last)


def _states(found: Any) -> dict[str, dict[str, float]]:
    """Return the state of each reward function as a line has it; raise LedgerError for anything else."""
    states = found.values() if isinstance(found, dict) else [found]
    for state in states:
        values = state.values() if isinstance(state, dict) else [state]
        if not (isinstance(state, dict) and all(isinstance(x, float) and math.isfinite(x) for x in values)):
            raise LedgerError(f"reward_state {str(found):.80} is no state of reward functions: the line was edited.")
    return found


# ---- replay


def replay(source: str | os.PathLike | Ledger, model: Any, step: int | None = None) -> np.ndarray:
    """Compute the weights of a run after any step again, with the same bits.

    Args:
        source: a ledger, or its path.
        model: the model that the run started from: an object (not changed), a folder, or a name. Of an adapter's run:
            the adapter over its base, or the folder START beside the ledger.
        step: how many steps to replay; None: all.

    Returns:
        The weights, float32 in the order of `noise.Layout` over the model's parameters, padding included: the master,
        or what the values (and compensations) of the other precision modes stand for. Of a run that moved a part of
        them these alone, whatever requires_grad says.

    Raises:
        LedgerError: an invalid ledger, another model, a step that is not recorded, or weights that differ from a
            digest of the ledger.
    """
    ledger = source if isinstance(source, Ledger) else read(source)
    return _replay(ledger, model, step).float32()


def replay_by_name(source: str | os.PathLike | Ledger, model: Any, step: int | None = None) -> dict[str, np.ndarray]:
    """Return the weights that `replay` gives as float32 arrays by canonical name, in their shapes, without padding.

    Arguments and errors: as for `replay`.
    """
    weights = _replay(source if isinstance(source, Ledger) else read(source), model, step)
    return weights.layout.views(weights.float32())


def _replay(ledger: Ledger, model: Any, step: int | None) -> Weights:
    n = len(ledger.steps) if step is None else step
    if not 0 <= n <= len(ledger.steps):
        raise LedgerError(
            f"step {n} is not in {ledger.path}, which has {len(ledger.steps)} steps: choose one of 0 to these."
        )
    if isinstance(model, (str, os.PathLike)):
        model, _ = _load(ledger, model)
    precision, recorded = ledger.settings["precision"], ledger.header["model"]["dtype"]
    if precision != "master" and (dtype := str(model.dtype).removeprefix("torch.")) != recorded:
        raise LedgerError(
            f"the run computed in {recorded} (precision={precision!r}), this model is {dtype}: load it in {recorded}."
        )
    laws = {"distribution": ledger.settings["noise"]} | {n: ledger.settings[n] for n in ("anchor_decay", "rank")}
    if ledger.settings["search"] is None:
        weights = open_weights(model, _layout(ledger, model), precision, **laws)
    else:
        weights = _searched(ledger, model)
    check_model(ledger, weights)
    for record in ledger.steps[:n]:
        check_weights(ledger, record.step, weights)
        _move(ledger, record, weights)
    check_weights(ledger, n, weights)
    return weights


def _searched(ledger: Ledger, model: Any) -> _singular.SingularWeights:
    """Return the weights of a search at its start."""
    key, search = int(ledger.header["run_key"], 16), _singular.SearchSettings.of(ledger.settings)
    if ledger.elsewhere:
        logger.warning(
            "%s was made on another machine (%s): its bits are not promised here (%s). Sigma and distance of the "
            "search are compared at every step instead, within %g.",
            ledger.path,
            ledger.settings["machine"],
            _singular.machine(),
            _singular.TOLERANCE,
        )
    _adapters.check_movable(model)
    return _singular.SingularWeights(model, _layout(ledger, model), key, search)


def _layout(ledger: Ledger, model: Any) -> noise.Layout:
    """Return the layout of what the run moved: all parameters, or those that the header names."""
    shapes, frozen = {name: tuple(p.shape) for name, p in model.named_parameters()}, ledger.settings["frozen"]
    adapted = _adapters.is_adapted(model)
    if frozen is None and adapted:
        raise LedgerError(f"the run of {ledger.path} moved all weights of a model: give that model, without adapter.")
    if frozen is not None:
        names = {name for name, _ in unpack_shapes(ledger.header["model"]["parameters"])}
        if missing := sorted(names - shapes.keys()):
            raise LedgerError(
                f"the model has no parameter {missing[0]!r}, which the run moved: give the adapter that it started "
                f"from, the folder {START!r} beside its ledger."
            )
        shapes = {name: shape for name, shape in shapes.items() if name in names}
        if not adapted and (found := _adapters.frozen_digest(model, names)) != frozen:
            raise LedgerError(
                f"the frozen weights are not those of the run: their digest is {found:.16}..., in {ledger.path} "
                f"{frozen:.16}... Give the model that the run started from."
            )
    return noise.Layout.from_shapes(shapes.items())


def verify(source: str | os.PathLike | Ledger, model: Any = None) -> Report:
    """Check form and chain of a ledger and, given the model, every digest in it by a replay.

    Args:
        source: a ledger, or its path.
        model: the model that the run started from, as for `replay`; None: no replay.

    Raises:
        LedgerError: what is wrong, and where.
    """
    ledger = source if isinstance(source, Ledger) else read(source)
    last = ledger.weights.get(len(ledger.steps))
    if model is not None:
        weights = _replay(ledger, model, None)
        last = digest(weights.layout, *weights.planes)
    return Report(
        steps=len(ledger.steps),
        ended=ledger.ended,
        torn=len(ledger.torn),
        digests=len(ledger.weights),
        recomputed=model is not None and not ledger.elsewhere,
        weights=last,
        within=_singular.TOLERANCE if model is not None and ledger.elsewhere else None,
    )


def write_model(
    source: str | os.PathLike | Ledger, out: str | os.PathLike, model: str | None = None, step: int | None = None
) -> str:
    """Write the Hugging Face folder of any step of a run, with the weights that `ESTrainer.save_model` wrote then.

    Args:
        source: a ledger, or its path.
        out: a new folder.
        model: folder or name of the model that the run started from; None: the shipped base that the ledger names, or
            of an adapter's run the folder START beside it, from which an adapter is written.
        step: how many steps to replay; None: all.

    Returns:
        The digest of the weights. (The folder holds them in the model's dtype, without compensations.)

    Raises:
        LedgerError: as for `replay`; or the folder exists.
    """
    ledger = source if isinstance(source, Ledger) else read(source)
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise LedgerError(f"{str(out)!r} exists: give a new folder.")
    loaded, tokenizer = _load(ledger, start_of(ledger, model))
    weights = _replay(ledger, loaded, step)
    copy_to(loaded, weights.layout, weights.flat)
    loaded.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return digest(weights.layout, *weights.planes)


def header(settings: Mapping[str, Any], run_key: int, model: Any, layout: noise.Layout, weights: str) -> dict:
    """Return the header of a run that starts now.

    Args:
        settings: of the run. Replays need population_size, sigma, alpha, prompts_per_step, num_generations, those of
            `_LATER`, with schedules max_steps, sigma_final_fraction and alpha_final_fraction, and anchor_decay, frozen,
            rank and update_scaling if on; of a search those of `SearchSettings` and machine instead of alpha and
            `_LATER`.
        run_key: of its noise.
        model: the Hugging Face model, for name and dtype.
        layout: of those of its parameters that move.
        weights: digest of the starting weights.
    """
    return {
        "evoalign_ledger": max(_NEW, _format(settings)),
        "noise": noise.NOISE_VERSION,
        "run_key": f"{run_key:#018x}",
        "settings": dict(settings),
        "digest_every": DIGEST_EVERY,
        "model": {
            "name": models.name_of(model),
            "dtype": str(model.dtype).removeprefix("torch."),
            "digest": weights,
            "parameters": pack_shapes((e.name, e.shape) for e in layout.entries),
        }
        | ({"adapter": START} if _adapters.is_adapted(model) else {})
        | ({"quantisation": how} if (how := _adapters.quantisation_of(model)) else {}),
    }


def check_model(ledger: Ledger, weights: Weights) -> None:
    """Raise LedgerError unless these are the weights that the run started from."""
    model, layout = ledger.header["model"], weights.layout
    name = f" ({model['name']})" if model["name"] else ""
    recorded_shapes = {n: tuple(shape) for n, shape in unpack_shapes(model["parameters"])}
    shapes = {e.name: e.shape for e in layout.entries}
    if shapes != recorded_shapes:
        other = sorted(n for n in shapes.keys() | recorded_shapes.keys() if shapes.get(n) != recorded_shapes.get(n))[0]
        raise LedgerError(
            f"this is not the model that the run started from{name}: {other!r} has the shape {shapes.get(other)}, in "
            f"the run {recorded_shapes.get(other)}."
        )
    if (found := digest(layout, *weights.planes)) != model["digest"]:
        raise _other_start(ledger, found)


def check_quantisation(ledger: Ledger, model: Any) -> None:
    """Raise LedgerError unless a model's base is quantised as that of the run, whatever the version of torchao.

    Versions may make other codes of the same weights: the setting `frozen` tells.
    """
    recorded, found = ledger.header["model"].get("quantisation"), _adapters.quantisation_of(model)
    if recorded is None:  # by transformers, perhaps
        return
    for name in ("mode", "group_size", "base"):
        if (found or {}).get(name) != recorded[name]:
            raise LedgerError(
                f"the run of {ledger.path} has a base of mode {recorded['mode']!r} with group_size="
                f"{recorded['group_size']} of weights with the digest {recorded['base']}, this one {found or 'none'}: "
                "make its base by evoalign_lib.quantisation.quantise from the same model."
            )


def check_start(ledger: Ledger, weights: Weights) -> None:
    """Raise LedgerError unless weights that decay do so toward those that the run started from."""
    if weights.start is not None and (found := digest(weights.layout, weights.start)) != ledger.weights[0]:
        raise _other_start(ledger, found)


def _other_start(ledger: Ledger, found: str) -> LedgerError:
    name, digest = (ledger.header["model"][key] for key in ("name", "digest"))
    return LedgerError(
        f"these are not the weights that the run started from{f' ({name})' if name else ''}: their digest is "
        f"{found:.16}..., in the ledger {digest:.16}... Load that model anew (a trained model object has moved on)."
    )


def check_weights(ledger: Ledger, step: int, weights: Weights) -> None:
    """Raise LedgerError if these weights do not have the digest that the ledger notes after this many steps, if any."""
    if ledger.elsewhere and step:
        _check_near(ledger, step, weights)
        return
    expected = ledger.weights.get(step)
    if expected is not None and (found := digest(weights.layout, *weights.planes)) != expected:
        raise LedgerError(
            f"after {step} steps the weights have the digest {found:.16}..., in {ledger.path} it is {expected:.16}...: "
            "rewards or digest were edited, or this machine computes the noise differently (its tests tell)."
        )


def _check_near(ledger: Ledger, step: int, weights: Weights) -> None:
    """Raise LedgerError unless a search has nearly the sigma and distance that the log of the next step names."""
    recorded = ledger.steps[step].log if step < len(ledger.steps) else {}
    for name, value in weights.metrics().items():
        if recorded and not math.isclose(value, recorded.get(name, math.nan), rel_tol=_singular.TOLERANCE):
            raise LedgerError(
                f"after {step} steps {name} is {value:.10g}, in {ledger.path} it is {recorded.get(name)}: the run was "
                "made on another machine, but that moves digits beyond the sixth only. Rewards or log were edited."
            )


def updates(ledger: Ledger, steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the updates of the first steps: (keys, coefficients) of each that was not tied.

    With anchor_decay tied ones are among them, without keys: they decay all the same.

    Args:
        ledger: of a run.
        steps: how many of its steps.
    """
    found = (_update(ledger, record, _members(ledger, record)) for record in ledger.steps[:steps])
    return [update for update in found if update is not None]


def _members(ledger: Ledger, record: Step) -> list:
    key, settings = int(ledger.header["run_key"], 16), ledger.settings
    return update_rules.population(key, record.step, settings["population_size"], settings["antithetic"])


def _update(ledger: Ledger, record: Step, members: Sequence) -> tuple[np.ndarray, np.ndarray] | None:
    settings, alpha = ledger.settings, update_rules.step_size(ledger.settings, record.step)
    c = update_rules.coefficients(record.rewards, alpha, settings["fitness_shaping"], settings["antithetic"])
    return None if c is None and not settings["anchor_decay"] else update_rules.update_of(members, c)


def _move(ledger: Ledger, record: Step, weights: Weights) -> None:
    if isinstance(weights, _singular.SingularWeights):
        weights.ask(record.step)
        weights.tell(record.rewards)
        return
    members = _members(ledger, record)
    weights.retrace(members, update_rules.at_step(ledger.settings, "sigma", record.step))
    update = _update(ledger, record, members)
    if update is not None:
        weights.update(*update)


def start_of(ledger: Ledger, model: str | None = None) -> str:
    """Return folder or name of the model to replay a run from: what the user gives, or the shipped base it names.

    Of an adapter's run it is the folder START beside the ledger; no code of its base is run, as of no model.

    Args:
        ledger: of the run.
        model: folder or name of the model that the run started from; None: the user gave none.

    Raises:
        LedgerError: no model is given, and the ledger names none, or one that is not shipped. Whoever wrote the ledger
            would choose what is loaded here.
    """
    if model is not None:
        return model
    if "adapter" in ledger.header["model"]:
        return str(ledger.path.parent / START)
    name = ledger.header["model"]["name"]
    if name is None:
        raise LedgerError(
            f"{ledger.path} has no name of the model that the run started from: give its folder or name (--model)."
        )
    if name not in tiny.SHIPPED:
        raise LedgerError(
            f"{ledger.path} says that the run started from {name!r:.200}, which is no shipped base: give the folder or "
            "name of that model yourself (--model)."
        )
    return name


def _load(ledger: Ledger, name: str | os.PathLike) -> tuple[Any, Any]:
    """Return model and tokenizer of a folder or a name; an adapter over a base that is quantised as that of the run."""
    how, folder = ledger.header["model"].get("quantisation"), Path(name)
    keywords = {"dtype": getattr(torch, ledger.header["model"]["dtype"])}
    if how is None or not (folder / "adapter_config.json").is_file():
        return models.load(name, None, keywords, adapters=True)
    tokenizer = models.tokenizer_of(str(folder)) if (folder / "tokenizer_config.json").is_file() else None
    base, tokenizer = models.load(_adapters.base_name(folder), tokenizer, keywords)
    if (found := models.base_digest(base)) != how["base"]:
        raise LedgerError(
            f"{_adapters.base_name(folder)!r}, the base of the adapter {str(folder)!r}, has weights with the digest "
            f"{found}, in {ledger.path} it is {how['base']}: restore the model that the run started from."
        )
    quantisation.quantise(base, how["mode"], how["group_size"])
    model = _adapters.open_adapter(base, folder).eval()
    names = {name for name, _ in unpack_shapes(ledger.header["model"]["parameters"])}
    if names <= dict(model.named_parameters()).keys():  # else `_layout` says what is missing
        if _adapters.frozen_digest(model, names) != ledger.settings["frozen"]:
            made = _adapters.quantisation_of(model)["torchao"]
            raise LedgerError(
                f"torchao {made} makes other codes of the base than torchao {how['torchao']} of the run in "
                f"{ledger.path}: pip install torchao=={how['torchao']}."
            )
    return model, tokenizer


# ---- size


def storage(
    population: int, steps: int, stored: Mapping[str, int], models: Mapping[str, int], itemsize: int = 2
) -> list[dict[str, Any]]:
    """Return what a run costs to keep, beside a checkpoint of the model that it trained.

    Args:
        population: N, members per step.
        steps: T.
        stored: form of the run -> its bytes, such as those of the ledger, plain and compressed.
        models: name -> parameters d.
        itemsize: bytes per parameter in a checkpoint (2: bfloat16); optimiser states are not counted.

    Returns:
        One row per model and form: model, parameters, form, bytes, checkpoint (bytes), ratio (checkpoint / bytes). The
        first form of each model is "seeds and coefficients": 12 N T bytes, one 64-bit key and one float32 per member.

    >>> [row["ratio"] for row in storage(30, 500, {"ledger": 200_000}, {"0.5B": 500_000_000})]
    [5555.555555555556, 5000.0]
    """
    forms = {"seeds and coefficients": 12 * population * steps} | dict(stored)
    return [
        {
            "model": name,
            "parameters": d,
            "form": form,
            "bytes": size,
            "checkpoint": itemsize * d,
            "ratio": itemsize * d / size,
        }
        for name, d in models.items()
        for form, size in forms.items()
    ]


# ---- lines


def encode_rewards(rewards: np.ndarray, prompts: int) -> dict[str, Any]:
    """Return rewards in the shorter of the two exact forms that the module's docstring describes.

    Args:
        rewards: (members,) float64.
        prompts: over which they are means; says which fractions to try.

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
        # neighbouring floats are neighbours as integers, and integer arithmetic is exact both ways
        off = rewards.view(np.int64) - (k / of).view(np.int64)
        if ((off >= -9) & (off <= 9)).all():
            text = " ".join(f"{a}{b:+d}" if b else str(a) for a, b in zip(k.tolist(), off.tolist(), strict=True))
            return {"of": of, "rewards": text} if len(text) + len(f'"of":{of},') < len(exact) else {"rewards": exact}
    return {"rewards": exact}


_FRACTION = re.compile(r"(-?[0-9]{1,16})([+-][1-9])?", re.ASCII)


def decode_rewards(line: Mapping[str, Any]) -> np.ndarray:
    """Return the rewards of a line, (members,) float64, with the bits that `encode_rewards` was given.

    Raises:
        LedgerError: neither of the two forms.

    >>> decode_rewards({"of": 20, "rewards": "10 6+1 5"}).tolist()
    [0.5, 0.30000000000000004, 0.25]
    """
    text, of = line["rewards"], line.get("of")
    if of is None:
        data = base64.b64decode(text, validate=True)
        if len(data) % 8:
            raise LedgerError(f"rewards has {len(data)} bytes, which are no float64s.")
        return np.frombuffer(data, "<f8").astype(np.float64)
    found = [_FRACTION.fullmatch(part) for part in text.split(" ")]
    if not (isinstance(of, int) and 0 < of < 2**53) or None in found:
        raise LedgerError(f"rewards {text:.80} of {of!r} are no fractions.")
    k = np.array([int(m[1]) for m in found], np.int64)
    return ((k / of).view(np.int64) + np.array([int(m[2] or 0) for m in found])).view(np.float64)


def pack_shapes(shapes: Iterable[tuple[str, Sequence[int]]]) -> list[list]:
    """Return names and shapes of parameters, with layers of one form written once.

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
    """Return the (name, shape) of each parameter from what `pack_shapes` made, in any order."""
    return [
        (name.replace("#", str(i)) if n else name, shape) for name, shape, *n in packed for i in range(n[0] if n else 1)
    ]


def _dump(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line, separators=(",", ":"), allow_nan=False).encode()


def _sha(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()[:_PREV]


def _hash(text: bytes, last: str, hashed: bool) -> str:
    """Return the hash of a line, which the next one takes up; last: that of the line before."""
    return _sha(last.encode() + text[: -len(_HASH.format(" " * _PREV))]) if hashed else _sha(text)


def _with_hash(line: Mapping[str, Any], last: str) -> bytes:
    """Return a line that ends with the hash of itself and of all lines before it."""
    text = _dump(line)[:-1]
    return text + _HASH.format(_sha(last.encode() + text)).encode()


def _check_hash(text: bytes, last: str) -> None:
    """Raise LedgerError unless a line ends with the hash of itself and of all lines before it."""
    if not text.endswith(_HASH.format(_hash(text, last, True)).encode()):
        raise LedgerError(
            "its hash is another: the line is damaged or was edited, or does not follow from the line before it. "
            "Restore the file from a copy, or cut it off before this line and resume the run."
        )


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _check_end(file: Any, path: Path, size: int, end: bytes) -> None:
    """Raise LedgerError unless an open file has this size and this end, after which it then stands."""
    found = file.seek(0, os.SEEK_END)
    if found == size:
        file.seek(size - len(end))
        if file.read(len(end)) == end:
            return
        difference = "ends with another line than this run wrote"
    else:
        difference = f"has {found} bytes, this run left it with {size}"
    raise LedgerError(
        f"{path} {difference}: another process writes to it, or it was edited. End the other run, and resume this one "
        "in a new process."
    )


def _append(path: Path, size: int, end: bytes, data: bytes, what: str) -> None:
    """Add bytes to a file of known size and end and sync it; leave one that cannot take all of them as it was."""
    try:
        with open(path, "r+b", buffering=0) as file:
            _check_end(file, path, size, end)
            try:
                _write(file, data)
                os.fsync(file.fileno())
            except BaseException:
                file.truncate(size)
                raise
    except OSError as error:
        raise OSError(
            error.errno,
            f"{what} could not be recorded ({error.strerror}): the run stops, and what is recorded stays. Make room, "
            "then call train(), or train(resume_from_checkpoint=True) in a new process",
            str(path),
        ) from error


def _write(file: Any, data: bytes) -> None:
    while data:  # a disk that is nearly full takes a part first
        data = data[file.write(data) :]
