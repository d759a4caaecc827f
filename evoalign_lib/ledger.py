"""The ledger of an ES run: some 200 kB that give the weights after any step and let a killed run resume.

Noise is a function of keys (`evoalign_lib.noise`), so besides its settings a run has to record only the rewards of its
members; keys and coefficients are computed again from these. A ledger is a file of JSON lines.

Line 1, the header, holds the versions of the format and of the noise law, the run key, the settings (with the batch
plan), and the model's name, dtype, parameters and digest. A digest is `precision.digest` of the weights in the form
that the setting `precision` names: the float32 master; for "inplace" the values in the model's dtype; for "kahan" the
values and compensations. The last two modes lose bits: each evaluated member leaves a small error in the weights, which
`log` measures and a replay repeats. `parameters` lists [name, shape], or [name with #, shape, n] for the n layers
# = 0 .. n - 1. The format number tells readers whether they know all settings that decide how rewards become weights.
A new run has format 4; 5 if its noise has a low `rank`, which a header names only then (as does an older run with
another `update_scaling`); 6 for a `search` (see below). Runs of format 1, which have `prev` instead of `hash`, can
still be read, continued and replayed to the same bits; formats 2 and 3 are no longer read.

If a run trains only part of its model (an adapter over its base, or a partly frozen model), `parameters` and all
digests cover that part alone. The setting `frozen` is the digest of the rest, which must be the same when the run
resumes; `perturb` is "linear" if ES itself froze the rest (`ESConfig.perturb`). For a PEFT adapter, `adapter` in
`model` names the folder beside the ledger that holds the adapter as it was at the start. If the base was quantised by
`evoalign_lib.quantisation`, `quantisation` in `model` says how: `mode`, `group_size`, the version of `torchao`, and
`base`, the digest of the unquantised weights. Quantisation affects the rewards but not how they become weights, so it
does not change the format number.

If a run searches an adapter's singular values by CMA-ES (`evoalign_lib.essa`), the settings name the `search`, its own
settings (`_singular.SETTINGS`), its `dimension`, whether the members of a step share their prompts (`shared_batch`),
and the `machine`. CMA-ES decomposes matrices with LAPACK, so only that machine reproduces the run's bits. On another
one, a replay does not compare digests but `search/sigma` and `search/distance` in the log of every step, which may
differ by `_singular.TOLERANCE`. `warm_start`, beside the settings, is what fine-tuning before the run cost.

After the header comes one line per step, synced to disk before the weights move (`_ledger_lines`).

When `train()` returns, it closes the ledger with a line that has `end` (the number of steps so far) and `weights` (the
digest after them). A run that is continued appends its lines below that one.

A line counts once its newline is on disk. When a killed run resumes, a torn last line is cut off and its step is
computed again, with the same result. Any other fault is an error that names the line.

A ledger may come from anyone: its header is checked, and the sizes it asks for are bounded, before they are used. It
may name any model, but only a shipped base is loaded unless the user passes the model (`start_of`).
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from evoalign_lib import _adapters, _ledger_lines, _singular, files, models, noise, quantisation, tiny, update_rules
from evoalign_lib._interrupts import interrupts_wait
from evoalign_lib._ledger_lines import LedgerError, decode_rewards, encode_rewards, pack_shapes, unpack_shapes
from evoalign_lib.checks import require, whole_number
from evoalign_lib.precision import Weights, copy_to, digest, open_weights

logger = logging.getLogger(__name__)

NAME = "ledger.jsonl"
START = "start"
"""name of the folder beside an adapter run's ledger that holds the adapter as it was at the start"""
DIGEST_EVERY = 10  # steps
_MOST_UNPACKED = 64_000_000  # bytes; at N = 30 that is 150,000 steps


@dataclass
class Step:
    """One step of a run, as recorded in its line of the ledger."""

    step: int
    """0, 1, ..."""
    rewards: np.ndarray
    """(members,) float64, reward units: the values from which the coefficients were computed"""
    tokens: int = 0
    """tokens generated in this step"""
    seconds: float = 0.0
    """wall time of the evaluation"""
    core: float = 0.0
    """CPU seconds of the run so far, including this evaluation"""
    counts: dict[str, int] = field(default_factory=dict)
    """number of failed rewards in this step, by kind"""
    log: dict[str, float] = field(default_factory=dict)
    """metrics that cannot be computed from the rewards"""
    reward_state: dict[str, dict[str, float]] = field(default_factory=dict)
    """reward function -> its state after the step; only functions that have a state"""


@dataclass
class Report:
    """The result of `verify`."""

    steps: int
    """recorded steps"""
    ended: bool
    """whether the last line closes the ledger"""
    torn: int
    """bytes of a torn last line, which does not count"""
    digests: int
    """digests of weights in the ledger, the model's included"""
    recomputed: bool
    """whether all digests, including the model's, were computed again"""
    weights: str | None
    """digest of the last weights, if the ledger or a replay gave it"""
    within: float | None = None
    """for a search recorded on another machine: the tolerance within which its replay agrees, instead of by digests"""

    def text(self) -> str:
        """Return the report in a few lines."""
        end = f", and a torn last line of {self.torn} bytes, which does not count" if self.torn else ""
        chain = f"{self.steps} steps, chain intact, {'closed' if self.ended else 'not closed'}{end}"
        done = "all computed again, equal" if self.recomputed else "not computed again: give the model"
        if self.within is not None:
            done = f"of another machine: here every step's sigma and distance agree within {self.within:g}"
        return f"{chain}\n{self.digests} digests of weights, {done}\nlast weights: {self.weights or 'no digest'}"


class Ledger:
    """A ledger in memory and, while a run writes it, on disk. Get one from `create`, `open` or `read`."""

    def __init__(self, path: Path, header: dict[str, Any]):
        text, last = _ledger_lines.sealed(header, "", header["evoalign_ledger"])
        self.path = path
        self.header = header
        """line 1"""
        self.steps: list[Step] = []
        """the recorded steps"""
        self.weights: dict[int, str] = {0: header["model"]["digest"]}
        """number of steps -> digest of the weights after them, where the ledger records one"""
        self.tips = [last]
        """hash of the last line after each number of steps, 0 included"""
        self.ended = False
        """whether the last line closes the ledger"""
        self.torn = b""
        """bytes of a torn last line, which does not count"""
        self._last, self._text, self._size = last, text, len(text) + 1  # hash and text of the last line, bytes in all

    @property
    def settings(self) -> dict[str, Any]:
        """The run's settings, with defaults for those that an older header does not name."""
        return _ledger_lines.with_defaults(self.header["settings"])

    @property
    def elsewhere(self) -> bool:
        """Whether another machine recorded this run and only that machine can reproduce its bits."""
        return self.settings["search"] is not None and self.settings["machine"] != _singular.machine()

    @classmethod
    def create(cls, path: str | os.PathLike, header: dict[str, Any]) -> Ledger:
        """Create a ledger that holds its header, synced to disk; replace a file in which no step is recorded.

        Raises:
            LedgerError: the file holds steps of a run, or is not a ledger.
            OSError: the file cannot be written.
        """
        path = Path(path)
        refuse_existing(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        ledger = cls(path, header)
        path.write_bytes(b"")  # a killed run may have left part of a header
        try:
            _ledger_lines.append(path, 0, b"", ledger._text + b"\n", "the start of the run")
        except OSError:
            path.unlink()
            raise
        files.sync_folder(path.parent)  # so that the file's name is on disk, too
        return ledger

    @classmethod
    def open(cls, path: str | os.PathLike) -> Ledger:
        """Read a ledger in order to continue it; cut a torn last line off the file and keep it in `torn`.

        Raises:
            LedgerError: as for `read`, or the file is compressed.
        """
        ledger = read(path)
        if ledger.path.suffix == ".gz":
            raise LedgerError(f"{ledger.path} is compressed: unpack it with gunzip to resume the run.")
        if ledger.torn:
            os.truncate(ledger.path, ledger._size)
        return ledger

    def append(self, step: Step, weights: str | None = None) -> None:
        """Append one step, synced to disk.

        Args:
            step: the next step.
            weights: digest of the weights before the step.

        Raises:
            LedgerError: the step is out of order, has a wrong number of rewards or one that is not finite, or its
                reward states are not of the run's reward functions; or another process has written to the file.
            OSError: the line cannot be written (a full disk, say); the file is left as it was.
        """
        self._check(step)
        names, values = list(step.log), step.log.values()
        line = {"step": step.step}
        line |= encode_rewards(step.rewards, self.settings["prompts_per_step"] * self.settings["num_generations"])
        line |= {"tokens": step.tokens, "seconds": step.seconds, "core": step.core}
        optional = {
            "counts": {name: n for name, n in step.counts.items() if n} or None,
            "names": names if names != self._names() else None,
            # JSON has no NaN and no infinities: they are written as text that float() reads
            "log": [x if math.isfinite(x) else str(float(x)) for x in values] or None,
            "reward_state": step.reward_state or None,
            "weights": weights,
        }
        line |= {name: value for name, value in optional.items() if value is not None}
        self._add(line, f"step {step.step}", weights, step)

    def end(self, weights: str) -> None:
        """Close the ledger with the digest of the weights after its last step. Raises as `append`."""
        self._add({"end": len(self.steps), "weights": weights}, "the end of the run", weights)

    def check_file(self) -> None:
        """Raise LedgerError if the file has changed since this run last wrote to it."""
        with open(self.path, "rb", buffering=0) as file:
            _ledger_lines.check_end(file, self.path, self._size, self._text + b"\n")

    def _add(self, line: dict[str, Any], what: str, weights: str | None, step: Step | None = None) -> None:
        with interrupts_wait():
            text, last = _ledger_lines.sealed(line, self._last, self.header["evoalign_ledger"])
            _ledger_lines.append(self.path, self._size, self._text + b"\n", text + b"\n", what)
            self._take(text, last, weights, step)

    def _take(self, text: bytes, last: str, weights: str | None, step: Step | None) -> None:
        """Take note of a line that is in the file; last: its hash; step: None for the line that closes the ledger."""
        self._last, self._text, self._size = last, text, self._size + len(text) + 1
        if weights is not None:
            self.weights[len(self.steps)] = weights
        if step is not None:
            self.steps.append(step)
            self.tips.append(last)
        self.ended = step is None

    def _names(self) -> list[str]:
        """Return the names of the last step's metrics."""
        return list(self.steps[-1].log) if self.steps else []

    def _check(self, step: Step) -> None:
        n, stateful = self.header["settings"]["population_size"], self.header["settings"].get("reward_state", {})
        if step.step != len(self.steps):
            raise LedgerError(f"step {step.step} is out of order: the next one in {self.path} is {len(self.steps)}.")
        if (shape := step.rewards.shape) != (n,):
            raise LedgerError(f"step {step.step} has rewards of shape {shape}, but the population has N = {n}.")
        for member in np.flatnonzero(~np.isfinite(step.rewards)):
            what = f"member {member} of step {step.step} has the reward {step.rewards[member]}"
            raise LedgerError(f"{what}: rewards must be finite. Return None where a reward does not apply.")
        if (found := step.reward_state.keys()) != stateful.keys():
            raise LedgerError(f"step {step.step} has states of {sorted(found)}, but the run of {sorted(stateful)}.")


def recorded(path: str | os.PathLike) -> bool:
    """Return whether a file holds a ledger with at least one step (a killed run may leave part of a header)."""
    path = Path(path)
    return path.is_file() and path.read_bytes().count(b"\n") > 1


def refuse_existing(path: str | os.PathLike) -> None:
    """Raise LedgerError if a path holds recorded steps, which a new run would destroy, or anything but a ledger."""
    path = Path(path)
    if not path.exists():
        return
    data = path.read_bytes() if path.is_file() else b"\0"
    # a killed run may leave part of a header
    if not (data.startswith(_ledger_lines.BEGIN) or _ledger_lines.BEGIN.startswith(data)):
        raise LedgerError(f"{path} exists and is no ledger of a run: set another output_dir, or move it elsewhere.")
    if recorded(path):
        remedy = "another output_dir, delete that run, or continue it by resume_from_checkpoint=True"
        raise LedgerError(f"{path} is the ledger of another run: use {remedy}.")


def read(path: str | os.PathLike | Ledger) -> Ledger:
    """Read a ledger, plain or compressed with gzip, and check its hash chain; the file is not changed.

    A `Ledger` object is returned as it is.

    Returns:
        The ledger, with `header`, `steps` and `weights`; `torn` holds the last line if a killed run left it incomplete.

    Raises:
        LedgerError: there is no such file, or no header, or its format or noise law is not known here; a line is
            damaged, was edited, or does not follow from the one before (the message names it); or a compressed file
            is damaged or unpacks to more than 64 MB.
    """
    if isinstance(path, Ledger):
        return path
    path = Path(path)
    if not path.is_file():
        raise LedgerError(f"{str(path)!r} does not exist: pass the path of a ledger.")
    try:
        data = files.decompressed(path, _MOST_UNPACKED) if path.suffix == ".gz" else path.read_bytes()
    except ValueError as error:
        raise LedgerError(str(error)) from error
    *lines, torn = data.split(b"\n")
    ledger = None
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text, parse_constant=_ledger_lines.no_number)
        except (ValueError, RecursionError) as error:
            # the machine stopped before the whole line was on disk: the file has zeros there instead
            if number == len(lines) > 1 and not torn and b"\0" in text:
                torn = text + b"\n"
                break
            raise _damaged(path, number, f"is not JSON ({error})") from error
        try:
            if ledger is None:
                _ledger_lines.check_header(line)
                _ledger_lines.followed(text, line, "", line["evoalign_ledger"])
                ledger = Ledger(path, line)
            else:
                _read_line(ledger, line, text)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            if isinstance(error, LedgerError):
                raise LedgerError(f"{path}, line {number}: {error}") from error
            raise _damaged(path, number, f"is not a line of a ledger ({type(error).__name__}: {error})") from error
    if ledger is None:
        raise LedgerError(f"{path} has no header: no step was recorded in it. Delete it; nothing is lost.")
    ledger.torn = torn
    return ledger


def pack(path: str | os.PathLike) -> bytes:
    """Return a finished ledger, compressed with gzip; the bytes depend on its lines only, not on file name or time.

    Raises:
        LedgerError: the ledger is invalid or not closed.
    """
    run = read(path)
    if not run.ended or run.torn:
        raise LedgerError(f"{path} is not closed after step {len(run.steps)}: let train() finish the run first.")
    return files.compressed(run.path.read_bytes())


def _damaged(path: Path, number: int, what: str) -> LedgerError:
    remedy = f"restore the file from a copy, or cut it off before this line (head -n {number - 1}) and resume the run"
    return LedgerError(f"{path}, line {number} {what}: {remedy}.")


def _read_line(ledger: Ledger, line: Any, text: bytes) -> None:
    """Check a line of a file and add it to the ledger in memory."""
    last, n = _ledger_lines.followed(text, line, ledger._last, ledger.header["evoalign_ledger"]), len(ledger.steps)
    step, weights = None, str(line["weights"]) if "weights" in line else None
    if "end" not in line:
        rewards = decode_rewards(line)
        names = line.get("names", ledger._names() if "log" in line else [])
        log = dict(zip(map(str, names), map(float, line.get("log", [])), strict=True))
        counts = {str(name): whole_number(name, count, 0) for name, count in line.get("counts", {}).items()}
        seconds = float(line["seconds"]), float(line["core"])
        require(all(0 <= spent < math.inf for spent in seconds), f"seconds and core are {seconds}.")
        known = whole_number("tokens", line["tokens"], 0), *seconds, counts, log
        number = whole_number("step", line["step"], 0)
        step = Step(number, rewards, *known, _ledger_lines.states(line.get("reward_state", {})))
        ledger._check(step)
    elif whole_number("end", line["end"], 0) != n or weights is None:
        raise LedgerError(f"it closes the ledger after {line['end']!r} steps, but {n} are recorded.")
    ledger._take(text, last, weights, step)


# ---- replay


def replay(source: str | os.PathLike | Ledger, model: Any, step: int | None = None) -> np.ndarray:
    """Replay a run and return its weights after any step, with the same bits.

    Args:
        source: a ledger, or its path.
        model: the model that the run started from: an object (not changed), a folder, or a name. For an adapter's run:
            the adapter over its base, or the folder START beside the ledger.
        step: number of steps to replay; None: all.

    Returns:
        The weights, float32 in the order of `noise.Layout` over the model's parameters, padding included: the master,
        or in the other precision modes the numbers that the values (and compensations) represent. If the run trained
        only some parameters, only these, whatever requires_grad says.

    Raises:
        LedgerError: the ledger is invalid, the model is not the one that the run started from, the step is not
            recorded, or the weights differ from a digest in the ledger.
    """
    return _replay(read(source), model, step).float32()


def replay_at(source: str | os.PathLike | Ledger, model: Any, steps: Sequence[int]) -> list[np.ndarray]:
    """Replay a run once and return its weights after several numbers of steps, in ascending order; see `replay`."""
    return [weights.float32().copy() for weights in _replayed(read(source), model, steps)]


def replay_by_name(source: str | os.PathLike | Ledger, model: Any, step: int | None = None) -> dict[str, np.ndarray]:
    """Replay a run and return its weights as float32 arrays by canonical name, in their shapes, without padding.

    Takes the arguments of `replay` and raises its errors.
    """
    weights = _replay(read(source), model, step)
    return weights.layout.views(weights.float32())


def _replay(ledger: Ledger, model: Any, step: int | None) -> Weights:
    (weights,) = _replayed(ledger, model, [len(ledger.steps) if step is None else step])
    return weights


def _replayed(ledger: Ledger, model: Any, steps: Sequence[int]) -> Iterator[Weights]:
    """Yield the weights, the same object each time, after each of these numbers of steps, in ascending order."""
    for n in steps:
        if not 0 <= n <= len(ledger.steps):
            raise LedgerError(f"step {n} is not in {ledger.path}: pass a step from 0 to {len(ledger.steps)}.")
    if isinstance(model, (str, os.PathLike)):
        model, _ = _load(ledger, model)
    settings, recorded = ledger.settings, ledger.header["model"]["dtype"]
    precision = settings["precision"]
    if precision != "master" and (dtype := str(model.dtype).removeprefix("torch.")) != recorded:
        raise LedgerError(f"the run computed in {recorded}, but this model is {dtype}: load it in {recorded}.")
    if settings["search"] is None:
        decay, rank = settings["anchor_decay"], settings["rank"]
        layout = _layout(ledger, model)
        weights = open_weights(model, layout, precision, settings["noise"], anchor_decay=decay, rank=rank)
    else:
        weights = _searched(ledger, model)
    check_model(ledger, weights)
    for first, last in itertools.pairwise([0, *steps]):
        # shown in a terminal if it takes long, which population and steps of the ledger decide
        for record in tqdm(ledger.steps[first:last], "replay", delay=10, disable=None, leave=False):
            check_weights(ledger, record.step, weights)
            _move(ledger, record, weights)
        check_weights(ledger, last, weights)
        yield weights


def _searched(ledger: Ledger, model: Any) -> _singular.SingularWeights:
    """Return the starting weights of a search."""
    if ledger.elsewhere:
        there = ledger.settings["machine"]
        logger.warning(f"{ledger.path} was recorded on {there}: this machine compares sigma and distance, not digests.")
    _adapters.check_movable(model)
    key = int(ledger.header["run_key"], 16)
    return _singular.SingularWeights(model, _layout(ledger, model), key, ledger.settings)


def _layout(ledger: Ledger, model: Any) -> noise.Layout:
    """Return the layout of the parameters that the run trained: all of them, or those that the header names."""
    shapes, frozen = {name: tuple(p.shape) for name, p in model.named_parameters()}, ledger.settings["frozen"]
    if frozen is not None:
        names = {name for name, _ in unpack_shapes(ledger.header["model"]["parameters"])}
        if missing := sorted(names - shapes.keys()):
            what = f"the model has no parameter {missing[0]!r}, which the run trained"
            raise LedgerError(f"{what}: give the adapter that the run started from, {START!r} beside its ledger.")
        shapes = {name: shape for name, shape in shapes.items() if name in names}
        if not _adapters.is_adapted(model) and (found := _adapters.frozen_digest(model, names)) != frozen:
            what = f"the frozen weights are not those of the run: they have the digest {found:.16}, not {frozen:.16}"
            raise LedgerError(f"{what}. Pass the model that the run started from.")
    return noise.Layout.from_shapes(shapes.items())


def verify(source: str | os.PathLike | Ledger, model: Any = None) -> Report:
    """Check a ledger's format and hash chain and, given the model, replay the run to check every digest.

    Args:
        source: a ledger, or its path.
        model: the model that the run started from, as for `replay`; None: no replay.

    Raises:
        LedgerError: a check failed; the message says what is wrong, and where.
    """
    ledger = read(source)
    elsewhere = model is not None and ledger.elsewhere
    return Report(
        steps=len(ledger.steps),
        ended=ledger.ended,
        torn=len(ledger.torn),
        digests=len(ledger.weights),
        recomputed=model is not None and not elsewhere,
        weights=ledger.weights.get(len(ledger.steps)) if model is None else _replay(ledger, model, None).digest(),
        within=_singular.TOLERANCE if elsewhere else None,
    )


def write_model(
    source: str | os.PathLike | Ledger, out: str | os.PathLike, model: str | None = None, step: int | None = None
) -> str:
    """Replay a run and write the model after any step as `ESTrainer.save_model` would: a Hugging Face folder.

    Args:
        source: a ledger, or its path.
        out: a new folder.
        model: folder or name of the model that the run started from; None: the shipped base that the ledger names, or
            for an adapter's run the folder START beside the ledger (an adapter is then written).
        step: number of steps to replay; None: all.

    Returns:
        The digest of the weights. (The folder holds them in the model's dtype, without compensations.)

    Raises:
        LedgerError: as for `replay`.
        ValueError: the folder exists.
    """
    ledger = read(source)
    files.check_new_folder(out)
    loaded, tokenizer = _load(ledger, start_of(ledger, model))
    weights = _replay(ledger, loaded, step)
    copy_to(loaded, weights.layout, weights.flat)
    models.save(loaded, out, tokenizer)
    return weights.digest()


def header(settings: Mapping[str, Any], run_key: int, model: Any, layout: noise.Layout, weights: str) -> dict:
    """Return the header of a run that starts now.

    Args:
        settings: of the run. Replays need population_size, sigma, alpha and prompts_per_step; with schedules max_steps,
            sigma_final_fraction and alpha_final_fraction; those in `_ledger_lines._SINCE` that differ from the value
            given there; for a search `_singular.SETTINGS` and machine instead of alpha.
        run_key: of the run's noise.
        model: the Hugging Face model, which gives name and dtype.
        layout: of the parameters that the run trains.
        weights: digest of the starting weights.
    """
    about: dict[str, Any] = {"name": models.name_of(model), "dtype": str(model.dtype).removeprefix("torch.")}
    about |= {"digest": weights, "parameters": pack_shapes((e.name, e.shape) for e in layout.entries)}
    about |= {"adapter": START} if _adapters.is_adapted(model) else {}
    about |= {"quantisation": how} if (how := _adapters.quantisation_of(model)) else {}
    return {
        "evoalign_ledger": max(_ledger_lines.NEW, _ledger_lines.format_of(settings)),
        "noise": noise.NOISE_VERSION,
        "run_key": f"{run_key:#018x}",
        "settings": dict(settings),
        "digest_every": DIGEST_EVERY,
        "model": about,
    }


def check_model(ledger: Ledger, weights: Weights) -> None:
    """Raise LedgerError unless these are the weights that the run started from."""
    model, layout = ledger.header["model"], weights.layout
    recorded = {n: tuple(shape) for n, shape in unpack_shapes(model["parameters"])}
    shapes = {e.name: e.shape for e in layout.entries}
    for name in sorted(shapes.keys() | recorded.keys()):
        if shapes.get(name) != recorded.get(name):
            what = f"{name!r} has the shape {shapes.get(name)}, but in the run {recorded.get(name)}"
            raise LedgerError(f"this is not the model that the run started from ({model['name']}): {what}.")
    _check_start_digest(ledger, weights.digest())


def check_quantisation(ledger: Ledger, model: Any) -> None:
    """Raise LedgerError unless a model's base is quantised as in the run; the version of torchao may differ.

    If another version gives different codes for the same weights, the digest in the setting `frozen` shows it.
    """
    recorded, found = ledger.header["model"].get("quantisation"), _adapters.quantisation_of(model)
    if recorded is None:  # not quantised by this library; perhaps by transformers
        return
    for name in ("mode", "group_size", "base"):
        if (found or {}).get(name) != recorded[name]:
            what = f"the base in {ledger.path} has the quantisation {recorded}, but this one has {found or 'none'}"
            raise LedgerError(f"{what}: make it with evoalign_lib.quantisation.quantise from the same model.")


def check_start(ledger: Ledger, weights: Weights) -> None:
    """Raise LedgerError if weights decay toward an anchor that is not the run's starting weights."""
    if weights.start is not None:
        _check_start_digest(ledger, digest(weights.layout, weights.start))


def _check_start_digest(ledger: Ledger, found: str) -> None:
    if found != (model := ledger.header["model"])["digest"]:
        what = f"these are not the weights that the run started from ({model['name']})"
        raise LedgerError(f"{what}: they have the digest {found:.16}, not {model['digest']:.16}. Load the right model.")


def check_weights(ledger: Ledger, step: int, weights: Weights) -> None:
    """Raise LedgerError if the weights differ from the digest that the ledger has after this many steps, if any.

    For a search recorded on another machine, compare sigma and distance with the next step's log, within a tolerance.
    """
    if ledger.elsewhere and step:
        recorded = ledger.steps[step].log if step < len(ledger.steps) else weights.metrics()
        for name, value in weights.metrics().items():
            if not math.isclose(value, recorded.get(name, math.nan), rel_tol=_singular.TOLERANCE):
                what = f"after {step} steps {name} is {value:.10g}, but in {ledger.path} {recorded.get(name)}"
                raise LedgerError(f"{what}: machines differ by less, so the rewards or the log were edited.")
        return
    expected = ledger.weights.get(step)
    if expected is not None and (found := weights.digest()) != expected:
        what = f"after {step} steps the weights have the digest {found:.16}, but in {ledger.path} {expected:.16}"
        raise LedgerError(f"{what}: rewards or digest were edited, or this machine computes different noise.")


def updates(ledger: Ledger, steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the updates of the first steps as (keys, coefficients); steps whose rewards were all tied have none.

    With anchor_decay, tied steps are included with empty keys, because their weights still decay.

    Args:
        ledger: of the run.
        steps: number of steps.
    """
    found = (_update(ledger, record) for record in ledger.steps[:steps])
    return [update for update in found if update is not None]


def _members(ledger: Ledger, step: int) -> list[update_rules.Member]:
    settings = ledger.settings
    key, n = int(ledger.header["run_key"], 16), settings["population_size"]
    return update_rules.population(key, step, n, settings["antithetic"])


def _update(ledger: Ledger, record: Step) -> tuple[np.ndarray, np.ndarray] | None:
    settings, alpha = ledger.settings, update_rules.step_size(ledger.settings, record.step)
    c = update_rules.coefficients(record.rewards, alpha, settings["fitness_shaping"], settings["antithetic"])
    if c is None and not settings["anchor_decay"]:
        return None
    return update_rules.update_of(_members(ledger, record.step), c)


def _move(ledger: Ledger, record: Step, weights: Weights) -> None:
    if isinstance(weights, _singular.SingularWeights):
        weights.ask(record.step)
        weights.tell(record.rewards)
        return
    weights.retrace(_members(ledger, record.step), update_rules.at_step(ledger.settings, "sigma", record.step))
    if (update := _update(ledger, record)) is not None:
        weights.update(*update)


def start_of(ledger: Ledger, model: str | None = None) -> str:
    """Return the folder or name of the model to replay a run from: the user's, or the shipped base in the ledger.

    For an adapter's run it is the folder START beside the ledger. As with any model, no code beside the base is run.

    Args:
        ledger: of the run.
        model: folder or name of the model that the run started from; None: the user gave none.

    Raises:
        LedgerError: no model is given, and the ledger names none or one that is not shipped. Otherwise the ledger's
            author would decide what is loaded here.
    """
    if model is not None:
        return model
    if "adapter" in ledger.header["model"]:
        return str(ledger.path.parent / START)
    name = ledger.header["model"]["name"]
    if name not in tiny.SHIPPED:
        raise LedgerError(
            f"{ledger.path} names {name!r:.200}, which is no shipped base: pass the model (base, or --model)."
        )
    return name


def _load(ledger: Ledger, name: str | os.PathLike) -> tuple[Any, Any]:
    """Load model and tokenizer from a folder or by name; quantise an adapter's base as the run did."""
    how, folder = ledger.header["model"].get("quantisation"), Path(name)
    keywords = {"dtype": getattr(torch, ledger.header["model"]["dtype"])}
    if how is None or not (folder / "adapter_config.json").is_file():
        return models.load(name, None, keywords, adapters=True)
    tokenizer = models.tokenizer_of(str(folder)) if (folder / "tokenizer_config.json").is_file() else None
    base, tokenizer = models.load(_adapters.base_name(folder), tokenizer, keywords)
    if (found := models.base_digest(base)) != how["base"]:
        what = f"{_adapters.base_name(folder)!r}, the base of {str(folder)!r}, has the digest {found}"
        raise LedgerError(f"{what}, not {how['base']} as in {ledger.path}: restore the model that the run began with.")
    quantisation.quantise(base, how["mode"], how["group_size"])
    model = _adapters.open_adapter(base, folder).eval()
    names = {name for name, _ in unpack_shapes(ledger.header["model"]["parameters"])}
    if names <= dict(model.named_parameters()).keys():  # otherwise `_layout` says what is missing
        if _adapters.frozen_digest(model, names) != ledger.settings["frozen"]:
            made = _adapters.quantisation_of(model)["torchao"]
            raise LedgerError(f"torchao {made} makes other codes of the base: pip install torchao=={how['torchao']}.")
    return model, tokenizer
