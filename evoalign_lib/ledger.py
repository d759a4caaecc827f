"""The ledger of an ES run: every weight of the run in some 200 kB, and the point from which a killed run goes on.

Noise is a function of keys (`evoalign_lib.noise`), so a run adds only the rewards of its members to its settings; keys
and coefficients are computed again from these. A ledger is a file of JSON lines.

Line 1, the header, holds the versions of format and noise law, the run key, the settings (the batch plan included), and
name, dtype, parameters and digest of the model. A digest is `precision.digest` of the weights in the form that the
setting `precision` names: the float32 master; with "inplace" the values in the model's dtype; with "kahan" the values
and compensations. The last two lose bits: the members of a step leave their mark on the weights, which `log` measures,
and a replay goes over all of them. `parameters` lists [name, shape], or [name with #, shape, n] for the n layers
# = 0 .. n - 1. The number of the format tells which readers know all settings that decide how rewards become weights:
that of a new run is 4; 5 where its noise has a low `rank`, which a header names only then (so has an older run whose
update has another `update_scaling`); 6 for a `search` (see below). Runs of format 1, which have `prev` instead of
`hash`, are read, continued and replayed to the same bits; 2 and 3 are no longer read.

Of a run that moves a part of its model (an adapter over its base, or a model of which a part is frozen) `parameters`
and all digests are of what moves, and the setting `frozen` is the digest of the rest, which a run that goes on must
share. With an adapter (PEFT) `adapter` in `model` names the folder beside the ledger that holds the adapter as it was
at the start. Over a base that `evoalign_lib.quantisation` made codes of, `quantisation` in `model` says how: `mode`,
`group_size`, the version of `torchao`, and the digest of the plain weights, `base`. It decides rewards, but not how
they become weights, so the number of the format does not change.

Of a run that searches an adapter's singular values by CMA-ES (`evoalign_lib.essa`) the settings name `search`, what
decides it (`_singular.SETTINGS`), its `dimension`, whether the members of a step share their prompts
(`shared_batch`), and the `machine`: CMA-ES decomposes matrices by LAPACK, so the bits of such a run are those of one
machine. On another one a replay compares no digests but `search/sigma` and `search/distance` of the log of every step,
which may differ by `_singular.TOLERANCE`. `warm_start` beside the settings is what fine-tuning before the run cost.

Then one line per step, synced to disk before the weights move (`_ledger_lines`).

When `train()` returns, a line with `end` (steps so far) and `weights` (the digest after them) closes the ledger; a run
that goes on continues below it.

A line counts once its newline is there. When a killed run resumes, its torn last line is cut off and the step is
computed again, with the same result. Anything else that is wrong is an error that names the line.

A ledger may come from anybody: its header is checked, and what it asks for is bounded, before anything is made by it.
Of the models that it may name only a shipped base is loaded without the user's word (`start_of`).
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evoalign_lib import _adapters, _ledger_lines, _singular, files, models, noise, quantisation, tiny, update_rules
from evoalign_lib._interrupts import interrupts_wait
from evoalign_lib._ledger_lines import LedgerError, decode_rewards, encode_rewards, pack_shapes, unpack_shapes
from evoalign_lib.precision import Weights, copy_to, digest, open_weights

logger = logging.getLogger(__name__)

NAME = "ledger.jsonl"
START = "start"
"""folder beside the ledger of an adapter's run: the adapter as it was at the start"""
DIGEST_EVERY = 10  # steps
_MOST_UNPACKED = 64_000_000  # bytes; at N = 30 that is 150,000 steps


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

    run: Ledger
    """the ledger, with steps, digests of weights, and what stands at its end"""
    recomputed: bool
    """whether all digests, the model's included, were computed again"""
    weights: str | None
    """digest of the last weights, if ledger or replay gave it"""
    within: float | None = None
    """of a search that was made on another machine, the tolerance within which a replay agrees; no digest does"""

    def text(self) -> str:
        """Return the report in a few lines."""
        run, torn = self.run, len(self.run.torn)
        end = f", and a torn last line of {torn} bytes, which does not count" if torn else ""
        chain = f"{len(run.steps)} steps, chain intact, {'closed' if run.ended else 'not closed'}{end}"
        done = "all computed again, equal" if self.recomputed else "not computed again: give the model"
        if self.within is not None:
            done = f"of another machine: here every step's sigma and distance agree within {self.within:g}"
        return f"{chain}\n{len(run.weights)} digests of weights, {done}\nlast weights: {self.weights or 'no digest'}"


class Ledger:
    """A ledger in memory and, for a run that writes it, on disk; made by `create`, `open` or `read`."""

    def __init__(self, path: Path, header: dict[str, Any]):
        text, last = _ledger_lines.sealed(header, "", header["evoalign_ledger"])
        self.path = path
        self.header = header
        """line 1"""
        self.steps: list[Step] = []
        """the recorded steps"""
        self.weights: dict[int, str] = {0: header["model"]["digest"]}
        """number of steps -> digest of the weights after them, where the ledger has it"""
        self.tips = [last]
        """by number of steps: hash of the line of the last one"""
        self.ended = False
        """whether the last line closes the ledger"""
        self.torn = b""
        """a torn last line, which does not count"""
        self._last, self._text, self._size = last, text, len(text) + 1  # hash and text of the last line, bytes of all

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the run; where an older header does not name one, the only value there was."""
        return _ledger_lines.with_defaults(self.header["settings"])

    @property
    def elsewhere(self) -> bool:
        """Whether the bits of the run are those of another machine than this."""
        return self.settings["search"] is not None and self.settings["machine"] != _singular.machine()

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
        ledger = cls(path, header)
        path.write_bytes(b"")  # less than a header, perhaps, of a run that was killed
        try:
            _ledger_lines.append(path, 0, b"", ledger._text + b"\n", "the start of the run")
        except OSError:
            path.unlink()
            raise
        files.sync_folder(path.parent)  # the new name
        return ledger

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
        names, values = list(step.log), step.log.values()
        line = {"step": step.step}
        line |= encode_rewards(step.rewards, self.settings["prompts_per_step"] * self.settings["num_generations"])
        line |= {"tokens": step.tokens, "seconds": step.seconds, "core": step.core}
        optional = {
            "counts": {name: n for name, n in step.counts.items() if n} or None,
            "names": names if names != self._names() else None,
            # JSON has no NaN: such values become text that float() reads
            "log": [x if math.isfinite(x) else str(float(x)) for x in values] or None,
            "reward_state": step.reward_state or None,
            "weights": weights,
        }
        line |= {name: value for name, value in optional.items() if value is not None}
        self._add(line, f"step {step.step}", weights, step)

    def end(self, weights: str) -> None:
        """Close the ledger with the digest of the weights after its last step; errors as for `append`."""
        self._add({"end": len(self.steps), "weights": weights}, "the end of the run", weights)

    def check_file(self) -> None:
        """Raise LedgerError if the file is not as this run left it."""
        with open(self.path, "rb", buffering=0) as file:
            _ledger_lines.check_end(file, self.path, self._size, self._text + b"\n")

    def _add(self, line: dict[str, Any], what: str, weights: str | None, step: Step | None = None) -> None:
        with interrupts_wait():
            text, last = _ledger_lines.sealed(line, self._last, self.header["evoalign_ledger"])
            _ledger_lines.append(self.path, self._size, self._text + b"\n", text + b"\n", what)
            self._take(text, last, weights, step)

    def _take(self, text: bytes, last: str, weights: str | None, step: Step | None) -> None:
        """Know of a line that the file has, with its hash: that of a step, or None where it closes the ledger."""
        self._last, self._text, self._size = last, text, self._size + len(text) + 1
        if weights is not None:
            self.weights[len(self.steps)] = weights
        if step is not None:
            self.steps.append(step)
            self.tips.append(last)
        self.ended = step is None

    def _names(self) -> list[str]:
        """Return the metrics of the last step."""
        return list(self.steps[-1].log) if self.steps else []

    def _check(self, step: Step) -> None:
        n, stateful = self.header["settings"]["population_size"], self.header["settings"].get("reward_state", {})
        if step.step != len(self.steps):
            raise LedgerError(f"step {step.step} is out of order: the next one in {self.path} is {len(self.steps)}.")
        if (shape := step.rewards.shape) != (n,):
            raise LedgerError(f"step {step.step} has rewards of shape {shape}, the population has N = {n}.")
        for member in np.flatnonzero(~np.isfinite(step.rewards)):
            what = f"member {member} of step {step.step} has the reward {step.rewards[member]}"
            raise LedgerError(f"{what}: rewards must be finite; return None where one does not apply.")
        if (found := step.reward_state.keys()) != stateful.keys():
            raise LedgerError(f"step {step.step} has the state of {sorted(found)}, the run that of {sorted(stateful)}.")


def recorded(path: str | os.PathLike) -> bool:
    """Return whether a file holds a ledger with at least one step (a killed run may leave less than a header)."""
    path = Path(path)
    return path.is_file() and path.read_bytes().count(b"\n") > 1


def refuse_existing(path: str | os.PathLike) -> None:
    """Raise LedgerError if a file holds recorded steps, which a new run would destroy, or is anything but a ledger."""
    path = Path(path)
    if not path.exists():
        return
    data = path.read_bytes() if path.is_file() else b"\0"
    # a killed run may leave a part of it
    if not (data.startswith(_ledger_lines.BEGIN) or _ledger_lines.BEGIN.startswith(data)):
        raise LedgerError(f"{path} is there and is no ledger of a run: use another output_dir, or move it elsewhere.")
    if recorded(path):
        remedy = "another output_dir, overwrite_output_dir=True, or resume_from_checkpoint=True to go on with it"
        raise LedgerError(f"{path} is the ledger of another run: use {remedy}.")


def read(path: str | os.PathLike | Ledger) -> Ledger:
    """Read a ledger, plain or compressed with gzip, and check its chain; the file does not change.

    One that is read already is returned as it is.

    Returns:
        The ledger, with `header`, `steps`, `weights`, and in `torn` the last line of a killed run.

    Raises:
        LedgerError: no such file, no header, another format or noise law; a line that is damaged, was edited, or does
            not follow from the one before (the message names it); or a compressed file that is damaged or unpacks to
            more than 64 MB.
    """
    if isinstance(path, Ledger):
        return path
    path = Path(path)
    if not path.is_file():
        raise LedgerError(f"there is no ledger {str(path)!r}.")
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
            # the machine stopped before all of the line was on disk: there are zeros in its place
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
            raise _damaged(path, number, f"is no line of a ledger ({type(error).__name__}: {error})") from error
    if ledger is None:
        raise LedgerError(f"{path} has no header: no step was recorded in it, so nothing is lost if it is deleted.")
    ledger.torn = torn
    return ledger


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
    remedy = f"restore the file from a copy, or cut it off before this line (head -n {number - 1}) and resume the run"
    return LedgerError(f"{path}, line {number} {what}: {remedy}.")


def _read_line(ledger: Ledger, line: Any, text: bytes) -> None:
    """Check a line of a file and take it into the ledger."""
    last, n = _ledger_lines.followed(text, line, ledger._last, ledger.header["evoalign_ledger"]), len(ledger.steps)
    step, weights = None, str(line["weights"]) if "weights" in line else None
    if "end" not in line:
        rewards = decode_rewards(line)
        names = line.get("names", ledger._names() if "log" in line else [])
        log = dict(zip(map(str, names), map(float, line.get("log", [])), strict=True))
        counts = {str(name): int(count) for name, count in line.get("counts", {}).items()}
        known = int(line["tokens"]), float(line["seconds"]), float(line["core"]), counts, log
        step = Step(line["step"], rewards, *known, _ledger_lines.states(line.get("reward_state", {})))
        ledger._check(step)
    elif line["end"] != n or weights is None:
        raise LedgerError(f"it closes the ledger after {line['end']!r} steps, but {n} are recorded.")
    ledger._take(text, last, weights, step)


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
    return _replay(read(source), model, step).float32()


def replay_by_name(source: str | os.PathLike | Ledger, model: Any, step: int | None = None) -> dict[str, np.ndarray]:
    """Return the weights that `replay` gives as float32 arrays by canonical name, in their shapes, without padding.

    Arguments and errors: as for `replay`.
    """
    weights = _replay(read(source), model, step)
    return weights.layout.views(weights.float32())


def _replay(ledger: Ledger, model: Any, step: int | None) -> Weights:
    n = len(ledger.steps) if step is None else step
    if not 0 <= n <= len(ledger.steps):
        raise LedgerError(f"step {n} is not in {ledger.path}, which has {len(ledger.steps)}: choose one of 0 to these.")
    if isinstance(model, (str, os.PathLike)):
        model, _ = _load(ledger, model)
    settings, recorded = ledger.settings, ledger.header["model"]["dtype"]
    precision = settings["precision"]
    if precision != "master" and (dtype := str(model.dtype).removeprefix("torch.")) != recorded:
        raise LedgerError(f"the run computed in {recorded}, this model is {dtype}: load it in {recorded}.")
    if settings["search"] is None:
        decay, rank = settings["anchor_decay"], settings["rank"]
        layout = _layout(ledger, model)
        weights = open_weights(model, layout, precision, settings["noise"], anchor_decay=decay, rank=rank)
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
    if ledger.elsewhere:
        there = ledger.settings["machine"]
        logger.warning(f"{ledger.path} is of {there}: here sigma and distance are compared, and no digests.")
    _adapters.check_movable(model)
    key = int(ledger.header["run_key"], 16)
    return _singular.SingularWeights(model, _layout(ledger, model), key, ledger.settings)


def _layout(ledger: Ledger, model: Any) -> noise.Layout:
    """Return the layout of what the run moved: all parameters, or those that the header names."""
    shapes, frozen = {name: tuple(p.shape) for name, p in model.named_parameters()}, ledger.settings["frozen"]
    if frozen is not None:
        names = {name for name, _ in unpack_shapes(ledger.header["model"]["parameters"])}
        if missing := sorted(names - shapes.keys()):
            what = f"the model has no parameter {missing[0]!r}, which the run moved"
            raise LedgerError(f"{what}: give the adapter that it started from, {START!r} beside its ledger.")
        shapes = {name: shape for name, shape in shapes.items() if name in names}
        if not _adapters.is_adapted(model) and (found := _adapters.frozen_digest(model, names)) != frozen:
            what = f"the frozen weights are not those of the run: they have the digest {found:.16}, not {frozen:.16}"
            raise LedgerError(f"{what}. Give the model that the run started from.")
    return noise.Layout.from_shapes(shapes.items())


def verify(source: str | os.PathLike | Ledger, model: Any = None) -> Report:
    """Check form and chain of a ledger and, given the model, every digest in it by a replay.

    Args:
        source: a ledger, or its path.
        model: the model that the run started from, as for `replay`; None: no replay.

    Raises:
        LedgerError: what is wrong, and where.
    """
    ledger = read(source)
    elsewhere = model is not None and ledger.elsewhere
    return Report(
        run=ledger,
        recomputed=model is not None and not elsewhere,
        weights=ledger.weights.get(len(ledger.steps)) if model is None else _replay(ledger, model, None).digest(),
        within=_singular.TOLERANCE if elsewhere else None,
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
        LedgerError: as for `replay`.
        ValueError: the folder exists.
    """
    ledger = read(source)
    files.check_new_folder(out)
    loaded, tokenizer = _load(ledger, start_of(ledger, model))
    weights = _replay(ledger, loaded, step)
    copy_to(loaded, weights.layout, weights.flat)
    loaded.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return weights.digest()


def header(settings: Mapping[str, Any], run_key: int, model: Any, layout: noise.Layout, weights: str) -> dict:
    """Return the header of a run that starts now.

    Args:
        settings: of the run. Replays need population_size, sigma, alpha and prompts_per_step; with schedules max_steps,
            sigma_final_fraction and alpha_final_fraction; those of `_ledger_lines._SINCE` that are not what they were
            before they were named; of a search those of `_singular.SETTINGS` and machine instead of alpha.
        run_key: of its noise.
        model: the Hugging Face model, for name and dtype.
        layout: of those of its parameters that move.
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
            what = f"{name!r} has the shape {shapes.get(name)}, in the run {recorded.get(name)}"
            raise LedgerError(f"this is not the model that the run started from ({model['name']}): {what}.")
    _check_start_digest(ledger, weights.digest())


def check_quantisation(ledger: Ledger, model: Any) -> None:
    """Raise LedgerError unless a model's base is quantised as that of the run, whatever the version of torchao.

    Versions may make other codes of the same weights: the setting `frozen` tells.
    """
    recorded, found = ledger.header["model"].get("quantisation"), _adapters.quantisation_of(model)
    if recorded is None:  # by transformers, perhaps
        return
    for name in ("mode", "group_size", "base"):
        if (found or {}).get(name) != recorded[name]:
            what = f"the run of {ledger.path} has a base with the quantisation {recorded}, this one {found or 'none'}"
            raise LedgerError(f"{what}: make it by evoalign_lib.quantisation.quantise from the same model.")


def check_start(ledger: Ledger, weights: Weights) -> None:
    """Raise LedgerError unless weights that decay do so toward those that the run started from."""
    if weights.start is not None:
        _check_start_digest(ledger, digest(weights.layout, weights.start))


def _check_start_digest(ledger: Ledger, found: str) -> None:
    if found != (model := ledger.header["model"])["digest"]:
        what = f"these are not the weights that the run started from ({model['name']})"
        raise LedgerError(f"{what}: they have the digest {found:.16}, not {model['digest']:.16}. Load that model anew.")


def check_weights(ledger: Ledger, step: int, weights: Weights) -> None:
    """Raise LedgerError if these weights do not have the digest that the ledger notes after this many steps, if any.

    Of a search that was made on another machine these are nearly the sigma and distance in the log of the next step.
    """
    if ledger.elsewhere and step:
        recorded = ledger.steps[step].log if step < len(ledger.steps) else weights.metrics()
        for name, value in weights.metrics().items():
            if not math.isclose(value, recorded.get(name, math.nan), rel_tol=_singular.TOLERANCE):
                what = f"after {step} steps {name} is {value:.10g}, in {ledger.path} {recorded.get(name)}"
                raise LedgerError(f"{what}, more than another machine explains: rewards or log were edited.")
        return
    expected = ledger.weights.get(step)
    if expected is not None and (found := weights.digest()) != expected:
        what = f"after {step} steps the weights have the digest {found:.16}, in {ledger.path} {expected:.16}"
        raise LedgerError(f"{what}: rewards or digest were edited, or this machine computes other noise.")


def updates(ledger: Ledger, steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the updates of the first steps: (keys, coefficients) of each that was not tied.

    With anchor_decay tied ones are among them, without keys: they decay all the same.

    Args:
        ledger: of a run.
        steps: how many of its steps.
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
    if name not in tiny.SHIPPED:
        raise LedgerError(f"{ledger.path} names {name!r:.200}, which is no shipped base: give the model (--model).")
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
        what = f"{_adapters.base_name(folder)!r}, the base of {str(folder)!r}, has the digest {found}"
        raise LedgerError(f"{what}, in {ledger.path} it is {how['base']}: restore the model that the run started from.")
    quantisation.quantise(base, how["mode"], how["group_size"])
    model = _adapters.open_adapter(base, folder).eval()
    names = {name for name, _ in unpack_shapes(ledger.header["model"]["parameters"])}
    if names <= dict(model.named_parameters()).keys():  # else `_layout` says what is missing
        if _adapters.frozen_digest(model, names) != ledger.settings["frozen"]:
            made = _adapters.quantisation_of(model)["torchao"]
            raise LedgerError(f"torchao {made} makes other codes of the base: pip install torchao=={how['torchao']}.")
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
    columns = ("model", "parameters", "form", "bytes", "checkpoint", "ratio")
    pairs = itertools.product(models.items(), forms.items())
    rows = ((name, d, form, size, itemsize * d, itemsize * d / size) for (name, d), (form, size) in pairs)
    return [dict(zip(columns, row, strict=True)) for row in rows]
