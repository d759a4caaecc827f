"""Checkpoints of an ES run and its best weights: what `ESTrainer` saves besides the ledger, and how it resumes.

A checkpoint is a folder `checkpoint-<step>` that transformers (PEFT, if an adapter moves) loads as a model. Next to the
model it holds the whole state of the weights (`<precision>.safetensors`), `best.safetensors` with
load_best_model_at_end, transformers' own `trainer_state.json`, and `es_state.json` with whatever else the run needs to
resume: budget, counts, digests, and the hash of the ledger's line that the checkpoint belongs to. `es_state.json` also
contains the SHA-256 of itself and of `trainer_state.json`: a flipped bit in either would otherwise silently change the
budget or the log.

A checkpoint of a gradient arm is TRL's. It counts once `sha256.json` is in it, the SHA-256 of each of its files, which
is written last (`sum_up`) and compared before a run resumes (`sound`): TRL itself would go on from flipped bits.
"""

import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import TrainerState
from transformers.trainer_utils import get_last_checkpoint

from evoalign_lib import files, ledger, models
from evoalign_lib._interrupts import interrupts_wait
from evoalign_lib._ledger_lines import with_defaults
from evoalign_lib.checks import plain, require
from evoalign_lib.files import replace_bytes, sync_folder
from evoalign_lib.precision import Weights

logger = logging.getLogger(__name__)

_PATIENCE = 1.0  # seconds to wait for another run to release the folder
Best = tuple[str, Mapping[str, Tensor]]
"""digest and weights of the best evaluation"""
_STATE, _TRAINER_STATE, _BEST = "es_state.json", "trainer_state.json", "best.safetensors"
SUMS = "sha256.json"
"""name of the file with the SHA-256 of the others in a gradient arm's checkpoint"""


def write(
    folder: Path,
    state: TrainerState,
    weights: Weights,
    best: Best | None,
    spent: Mapping[str, Any],
    save_model: Callable[[Path], None],
) -> None:
    """Write a checkpoint under another name and rename it, so that a kill never leaves an incomplete one.

    Args:
        folder: the checkpoint's folder; an existing one is replaced.
        state: state of the trainer and its callbacks.
        weights: weights of the run.
        best: weights of the best evaluation, if they are kept.
        spent: budget, counts, line (hash of the ledger's line of the last step) and, for readers, settings.
        save_model: writes the model and its tokenizer into a folder.

    Raises:
        OSError: it cannot be written (a full disk). Nothing of it remains; every step is in the ledger.
    """
    message = "the checkpoint could not be written ({}); every step is in the ledger. Make room, then call train()"
    with _whole(folder, message, weights, save_model) as partial:
        state.save_to_json(str(partial / _TRAINER_STATE))
        written = dict(spent) | {"weights": weights.digest()}
        if best is not None:
            written["best"] = best[0]
            safetensors.torch.save_file(dict(best[1]), partial / _BEST)
        written["trainer_state"] = _sha256((partial / _TRAINER_STATE).read_bytes())
        written["sha256"] = _sha256(json.dumps(written).encode())
        (partial / _STATE).write_text(json.dumps(written, indent=1))


@contextmanager
def _whole(folder: Path, message: str, weights: Weights, save_model: Callable[[Path], None]) -> Iterator[Path]:
    """Write model and weights into a temporary folder, to which the block may add, and rename it when complete.

    If writing fails nothing remains.

    Raises OSError with the message, completed by the reason, if it cannot be written. The causes come as various
    errors: safetensors and tokenizers raise their own, which contain the system's error as text.
    """
    partial = folder.with_name(f"partial-{folder.name.removeprefix('checkpoint-')}")
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed run
    try:
        save_model(partial)
        safetensors.torch.save_file(weights.tensors(), partial / f"{weights.precision}.safetensors")
        yield partial
        if folder.exists():
            if _is_foreign(folder, f"{weights.precision}.safetensors"):
                raise FileExistsError(errno.EEXIST, "a folder of that name holds other files: move it elsewhere")
            shutil.rmtree(folder)
        partial.rename(folder)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, (OSError, SafetensorError)) or type(error) is Exception:
            reason = getattr(error, "strerror", None) or error
            raise OSError(getattr(error, "errno", None) or errno.EIO, message.format(reason), str(folder)) from error
        raise


def _is_foreign(folder: Path, *marks: str) -> bool:
    """Return whether a folder has files, but none of these names: a user's own, which is never deleted."""
    return any(folder.iterdir()) and not any((folder / mark).is_file() for mark in marks)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _state_of(folder: Path) -> dict[str, Any]:
    """Return the contents of `es_state.json`; raise ValueError unless both states are as they were written."""
    saved = json.loads((folder / _STATE).read_text())
    sha256 = saved.pop("sha256", None)  # older checkpoints have none
    if sha256 not in (None, _sha256(json.dumps(saved).encode())):
        raise ValueError(f"{_STATE} does not match the SHA-256 that it contains")
    if saved.pop("trainer_state", None) not in (None, _sha256((folder / _TRAINER_STATE).read_bytes())):
        raise ValueError(f"{_TRAINER_STATE} does not match the SHA-256 that {_STATE} has")
    return saved


def write_start(output_dir: Path, weights: Weights, save_model: Callable[[Path], None], base: str | None) -> None:
    """Write a run's initial adapter, completely or not at all, in the formats that PEFT and `read_start` load.

    base: name of its base in the ledger. A shipped base lies elsewhere on another machine, so it is named, not placed.

    Raises:
        OSError: it cannot be written (a full disk).
    """
    message = "the adapter that the run begins with could not be written ({}). Make room, then call train()"
    with _whole(output_dir / ledger.START, message, weights, save_model) as partial:
        config = json.loads((partial / "adapter_config.json").read_text(encoding="utf-8"))
        if base and config["base_model_name_or_path"] == models.place(base):
            config["base_model_name_or_path"] = base
            (partial / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
        for path in filter(Path.is_file, partial.iterdir()):  # the ledger's next line, which is synced, relies on it
            with open(path, "r+b") as file:
                os.fsync(file.fileno())
    sync_folder(output_dir)


def read_start(run: ledger.Ledger, weights: Weights) -> None:
    """Load the adapter that a run began with, whatever the model holds now; the ledger has its digest.

    Raises:
        ValueError: the folder is missing or damaged; the message says what to do.
    """
    path = run.path.parent / ledger.START / f"{weights.precision}.safetensors"
    try:
        with interrupts_wait():
            tensors = safetensors.torch.load_file(path)
        weights.begin(tensors)
    except (OSError, KeyError, RuntimeError, SafetensorError) as error:
        what = f"{str(path)!r}, the adapter that the run began with, cannot be read ({error})"
        raise ValueError(f"{what}: restore it from a copy, and pass an adapter of the same configuration.") from error


def rotate(newest: Path, limit: int | None, best: str | None = None) -> None:
    """Delete old checkpoints: keep the newest, whatever its number, the limit - 1 before it and, if named, the best.

    A user's own folder stays. limit None: all stay.
    """
    if not limit:
        return
    steps = {p: p.name.removeprefix("checkpoint-") for p in newest.parent.glob("checkpoint-*") if p != newest}
    ours = (p for p, step in steps.items() if step.isdecimal() and p.is_dir() and not _is_foreign(p, _STATE, SUMS))
    others = sorted((p for p in ours if best is None or p != Path(best)), key=lambda p: int(steps[p]))
    for old in others[: max(0, len(others) + 1 - limit)]:
        shutil.rmtree(old)


def read(
    folder: Path, run: ledger.Ledger, weights: Weights, needs_best: bool
) -> tuple[TrainerState, Best | None, dict[str, Any]]:
    """Read a checkpoint of a run and load its weights.

    Args:
        folder: folder of the checkpoint.
        run: the ledger that it must belong to.
        weights: where to load the weights.
        needs_best: whether the run keeps the weights of its best evaluation.

    Returns:
        The state of the trainer and its callbacks, the best weights if they are kept, and the argument `spent` of
        `write`.

    Raises:
        ValueError: a checkpoint that is damaged, belongs to another run or lacks the best weights; the message says
            what to remove.
    """
    remedy = f"remove {str(folder)!r} to resume from an earlier checkpoint, or else from the ledger."
    try:
        saved = _state_of(folder)
        state = TrainerState.load_from_json(str(folder / _TRAINER_STATE))
        with interrupts_wait():  # safetensors turns Ctrl-C into another error, as if the file were damaged
            tensors = safetensors.torch.load_file(folder / f"{weights.precision}.safetensors")
            best = safetensors.torch.load_file(folder / _BEST) if "best" in saved else None
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise ValueError(f"{str(folder)!r} is damaged ({error}): {remedy}") from error
    if not (state.global_step < len(run.tips) and saved.get("line") == run.tips[state.global_step]):
        raise ValueError(f"{str(folder)!r} does not belong to the run in {run.path}: {remedy}")
    if needs_best and best is None and state.best_global_step is not None:
        raise ValueError(f"{str(folder)!r} has no best weights (load_best_model_at_end was not set): {remedy}")
    for expected, found in ((saved.get("best"), best), (saved["weights"], tensors)):
        if found is not None:
            try:
                weights.load(found)
            except (KeyError, RuntimeError) as error:
                what = f"{str(folder)!r} is damaged, in a tensor's name or shape ({error})"
                raise ValueError(f"{what}: {remedy}") from error
            if weights.digest() != expected:
                raise ValueError(f"the weights of {str(folder)!r} differ from those that were saved: {remedy}")
    return state, (saved["best"], best) if needs_best and best is not None else None, saved


# ---- a gradient arm's


def sum_up(folder: Path) -> None:
    """Write the SHA-256 of every file of a checkpoint into it."""
    replace_bytes(folder / SUMS, json.dumps(_sums(folder), indent=1).encode(), sync=True)


def _sums(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SUMS)
    found = {}
    for path in files:
        with open(path, "rb") as file:
            found[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def complete(output_dir: str | os.PathLike[str], mark: str = SUMS) -> list[Path]:
    """Return the checkpoints of a gradient arm that were written to their end, oldest first; a kill leaves others.

    mark: name of the file that tells.
    """
    folders = [path.parent for path in Path(output_dir).glob(f"checkpoint-*/{mark}")]
    steps = {path: path.name.removeprefix("checkpoint-") for path in folders if not (path / _STATE).exists()}
    return sorted((path for path in steps if steps[path].isdecimal()), key=lambda path: int(steps[path]))


def sound(resume_from: bool | str | os.PathLike[str] | None, output_dir: str | os.PathLike[str]) -> str | None:
    """Return the checkpoint that a gradient arm resumes from; None: from none.

    One without sums, as TRL itself writes it, is accepted with a warning if it is asked for or if none has any.

    Args:
        resume_from: a checkpoint's folder; True: the newest complete one in output_dir; or a text as in `asked`.
        output_dir: of the run.

    Raises:
        ValueError: there is none, it is incomplete, or files are damaged; names them, and the other checkpoints.
    """
    if not (resume_from := asked(resume_from)):
        return None
    known = complete(output_dir) or complete(output_dir, _TRAINER_STATE)
    if resume_from is True and not known:
        raise ValueError(f"no complete checkpoint in {str(output_dir)!r}: call train() to start anew.")
    folder = known[-1] if resume_from is True else Path(resume_from)
    if (folder / _TRAINER_STATE).is_file() and _is_foreign(folder, SUMS, _STATE):
        logger.warning("%s has no %s, so nobody can tell whether it is damaged.", folder, SUMS)
        return str(folder)
    try:
        recorded, found = json.loads((folder / SUMS).read_text()), _sums(folder)
        bad = [name for name in recorded if found.get(name) != recorded[name]] if recorded else [SUMS]
    except (OSError, ValueError, TypeError) as error:
        bad = [str(error)]
    others = ", ".join(str(path) for path in known if path != folder) or "none"
    what = f"{str(folder)!r} is damaged or not complete ({', '.join(bad[:3])})"
    require(not bad, f"{what}: name another checkpoint. Complete ones: {others}.")
    return str(folder)


# ---- one run per folder


@contextmanager
def folder_lock(output_dir: str | os.PathLike[str]) -> Iterator[None]:
    """Create an output_dir if necessary and lock it, so that only one run at a time trains in it.

    This covers all processes and threads. The lock is held on a file next to the ledger, `.ledger.jsonl.lock`, which is
    never deleted. The lock of a killed process is released; forked workers do not hold it.

    Raises:
        LedgerError: another run is training there.
        OSError: nothing can be written there.
    """
    folder, held = Path(output_dir), ExitStack()
    try:
        try:
            with interrupts_wait():
                held.enter_context(files.locked(folder / ledger.NAME, wait=_PATIENCE))
        except BlockingIOError as error:
            what = f"another run trains in {str(folder)!r}"
            raise ledger.LedgerError(f"{what}: use another output_dir, or end that run first.") from error
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                message = f"nothing can be written to this output_dir ({error.strerror}): use another one"
                raise OSError(error.errno, message, str(folder)) from error
            logger.warning("%s: this file system has no locks. Make sure that no other run uses the folder.", folder)
        yield
    finally:  # an interrupt may arrive as soon as the lock is held
        with interrupts_wait():
            held.close()


# ---- resuming

_SAID = {"true": True, "last": True, "false": False}


def asked(resume_from: bool | str | os.PathLike[str] | None) -> bool | str | os.PathLike[str] | None:
    """Return what to resume from, with the texts by which command lines say True and False as these.

    Raises:
        ValueError: an empty text.
    """
    if not isinstance(resume_from, str) or resume_from.lower() in _SAID and Path(resume_from).is_dir():
        return plain(resume_from)
    require(resume_from, "resume_from_checkpoint='' is no folder: pass True, a checkpoint's folder, or None.")
    return _SAID.get(resume_from.lower(), resume_from)


def find_run(
    resume_from: bool | str | os.PathLike[str], output_dir: str | os.PathLike[str]
) -> tuple[ledger.Ledger | None, Path | None]:
    """Open the ledger of the run to resume, in output_dir, and find the checkpoint to start from.

    Args:
        resume_from: True: the run in output_dir, from its newest checkpoint; or a checkpoint's folder, possibly
            elsewhere, in which case the ledger next to it is copied.
        output_dir: output folder of the resumed run.

    Returns:
        The ledger; None if the run was killed before its first step was recorded. And the checkpoint's folder; None if
        the run resumes from its starting model.

    Raises:
        ValueError: nothing to resume from, or an output_dir with the ledger of another run.
    """
    output_dir = Path(output_dir)
    if resume_from is True:
        newest = get_last_checkpoint(str(output_dir)) if output_dir.is_dir() else None
        folder = Path(newest) if newest else None
    else:
        folder = Path(resume_from)
        require((folder / _STATE).is_file(), f"{str(folder)!r} is not a checkpoint of ESTrainer: it has no {_STATE}.")
    path = output_dir / ledger.NAME
    source = path if folder is None else folder.parent / ledger.NAME
    if not ledger.recorded(source):
        require(folder is None, f"{str(folder)!r} has no ledger next to it: copy {ledger.NAME} of its run there.")
        if source.exists():
            ledger.refuse_existing(source)
            logger.warning("%s: the run was killed before its first step was recorded, so it starts anew.", source)
            return None, None
        raise ValueError(f"nothing to resume from in {str(output_dir)!r}: call train() to start anew.")
    if source.resolve() != path.resolve():  # the run continues in another folder
        ledger.refuse_existing(path)
        if (start := source.parent / ledger.START).is_dir():
            if links := [path for path in (start, *start.rglob("*")) if path.is_symlink()]:
                what = f"{str(links[0])!r} is a link, and could bring any file into this run"
                raise ValueError(f"{what}: put the file itself there.")
            shutil.copytree(start, output_dir / ledger.START, dirs_exist_ok=True)
        replace_bytes(path, source.read_bytes(), sync=True)
    run = ledger.Ledger.open(path)
    if run.torn:
        logger.warning("%s: a torn last line of %d bytes was cut off; its step is computed again.", path, len(run.torn))
    return run, folder


def check_settings(run: ledger.Ledger, settings: Mapping[str, Any]) -> None:
    """Raise ValueError unless a trainer's settings are those of the run to be resumed."""
    recorded, settings = run.settings, with_defaults(settings)
    # drop_rows may differ: another CPU may keep full batches, with the same bits
    for name in recorded | settings:
        one, other = recorded.get(name), settings.get(name)
        if name != "drop_rows" and one != other:
            what = f"{str(run.path)!r} is of a run with {name}={one!r}, this one has {other!r}"
            raise ValueError(f"{what}: use the same settings to resume, or another output_dir to start anew.")
