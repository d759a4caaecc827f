"""Records of runs: specs, load-or-run, parameters of a notebook. What the runs themselves are is in `runs`.

A run is a spec, a flat dictionary of everything that decides its result; its hash is its name. A finished run is one
JSON line, in paper/results/<notebook>/<scale>.jsonl for committed scales. Notebooks declare specs and get records back,
loaded or run now; the cache is explicit and knows nothing of code: `ENGINE_VERSION`, which is part of every spec, is
raised when a change of the library changes results.

The ledger of a run (`evoalign_lib.ledger`) is kept where a notebook asks for it, in the folder `ledgers` beside the
record file, as <spec hash>.jsonl.gz. The record holds its size and SHA-256, and the digest of the run's last weights.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import json
import math
import multiprocessing
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy as np

from evoalign_lib import ledger, paths
from evoalign_lib.engines import ENGINES

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

ENGINE_VERSION = 2
SCALES = ("smoke", "tiny", "full")
_EXAMPLES = {"model": "", "engine": "local", "gpus": 0, "seeds": 0, "force": False, "dry_run": False}
PARAMETERS = ("scale", *_EXAMPLES)
MAX_RECORD = 8_000
"""Bytes of a record, at most."""
MAX_CURVE = 50
"""Points of a curve in a record, at most."""

Record = dict[str, Any]
Spec = dict[str, Any]


# ---- parameters of a notebook


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
            missing parameter, a value of another type than it should have, an unknown engine, a scale without preset.

    >>> check_parameters(
    ...     dict(scale="tiny", model="", engine="local", gpus=0, seeds=0, force=False, dry_run=False, stpes=3),
    ...     {"tiny": {"steps": 100}})
    Traceback (most recent call last):
    ...
    ValueError: unknown parameter 'stpes': did you mean 'steps'? Known: ...
    """
    missing = [name for name in PARAMETERS if name not in namespace]
    if missing:
        raise ValueError(f"parameter {missing[0]!r} is not set: run the parameters cell first.")
    scale = namespace["scale"]
    if scale not in SCALES:
        near = difflib.get_close_matches(str(scale), SCALES, n=1, cutoff=0.0)
        raise ValueError(f"unknown scale {scale!r}: use one of {', '.join(SCALES)}. Did you mean {near[0]!r}?")
    if scale not in presets:
        raise ValueError(f"this notebook has no scale {scale!r} yet: use one of {', '.join(presets)}.")
    settings = dict(presets[scale])
    known = {*PARAMETERS, *settings}
    # When this cell runs again, the names that later cells define are there too: names are judged the first time only.
    if not namespace.get("_parameters_checked"):
        for name, value in namespace.items():
            if name in known or name.startswith("_") or name in _OF_IPYTHON or value is presets or not _is_plain(value):
                continue
            near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
            raise ValueError(
                f"unknown parameter {name!r}: {f'did you mean {near[0]!r}? ' if near else ''}Known: "
                f"{', '.join(sorted(known))}. (In JupyterLab, run 'del {name}' to get rid of it.)"
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
    for name in ("seeds", "gpus"):
        if namespace[name] < 0:
            raise ValueError(f"{name}={namespace[name]!r} must not be negative; 0 takes the scale's own.")
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
    namespace["_parameters_checked"] = True
    return SimpleNamespace(**{name: namespace[name] for name in PARAMETERS}, aside=aside, **settings)


def announce(run: SimpleNamespace, notebook: str) -> None:
    """Print what a notebook runs on: scale, device, versions, the code's commit; with `dry_run`, that it will stop."""
    found = environment(run.engine, run.gpus or 1)
    device = found.pop("device")
    print(f"{notebook}, scale {run.scale}, engine {run.engine} on {device}")
    print(", ".join(f"{name} {version}" for name, version in found.items()), f"(commit {_commit()})")
    if run.dry_run:
        print("dry run: the first runs that have no record are named, and nothing is run")


class DryRun(Exception):
    """Raised by `load_or_run` in a dry run, in the place of running anything."""


_OF_IPYTHON = {"In", "Out", "exit", "quit"}


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, list, tuple, dict))


def _fits(value: Any, default: Any) -> bool:
    """Whether a value may stand where the default stands: an int for a float, but no bool for a number."""
    if isinstance(value, bool) or isinstance(default, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    if isinstance(default, float):
        return isinstance(value, (int, float))
    return isinstance(value, (list, tuple) if isinstance(default, (list, tuple)) else type(default))


# ---- specs and records


def spec_hash(spec: Spec) -> str:
    """SHA-256 of the canonical JSON of a spec, 16 hexadecimal digits."""
    return hashlib.sha256(_canonical(spec).encode()).hexdigest()[:16]


def read_records(path: Path) -> list[Record]:
    """The records of a file, in file order; a torn last line (a killed run) is left out.

    Raises:
        ValueError: a line that is not a record, naming file and line.
    """
    if not path.is_file():
        return []
    records = []
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):  # no newline at its end: the writer was killed
                break
            raise ValueError(f"{path}, line {number} is not JSON: {error}. Restore the file from git.") from error
        if not isinstance(record, dict) or not {"spec", "spec_hash", "status"} <= record.keys():
            raise ValueError(f"{path}, line {number} is not a record: {line:.80}. Restore the file from git.")
        if record["spec_hash"] != spec_hash(record["spec"]):
            raise ValueError(
                f"{path}, line {number}: the spec does not have the hash {record['spec_hash']!r}, so it was edited. "
                "Restore the file from git, or delete the line to run its spec again."
            )
        records.append(record)
    return records


def append_record(path: Path, record: Record, kept: Path | None = None) -> Record:
    """Add one line to a record file, synced to disk; a torn last line of a killed run is cut off first.

    Several processes may write to a file at once: it is locked meanwhile (`fcntl.flock`, which Windows does not have:
    let one process write there). Of two records of one spec the first stays, and the second is left out.

    Args:
        path: of the file, made with its folder where it is not there.
        record: of a finished run.
        kept: the ledger of the run, to be kept beside the file as ledgers/<spec hash>.jsonl.gz.

    Returns:
        The record of this spec that the file holds now; if it is another one, that is printed.

    Raises:
        ValueError: a record over 8 kB, with a curve over 50 points, or with numbers that are not finite.
    """
    line, own = _line(record).encode(), record["spec_hash"]
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)  # given back where the file is closed
        file.seek(0)
        text = file.read()
        complete = text.rfind(b"\n") + 1
        if _is_json(text[complete:]):  # only the newline is missing: read_records takes it for a record
            line = b"\n" + line
        else:
            text = text[:complete]
            file.truncate(complete)
        for stored in text.splitlines():
            if f'"spec_hash":"{own}"'.encode() in stored:
                print(f"{path} has a record of {_run_name(record['spec'])} already, made meanwhile: it stays")
                return json.loads(stored)
        if kept is not None:
            _keep(kept, path.parent / "ledgers" / f"{own}.jsonl.gz")  # first: no record is without its ledger
        _write(file, line)
    return record


def _write(file: BinaryIO, data: bytes) -> None:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


def _keep(source: Path, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(f"partial-{path.name}")
    with open(partial, "wb") as file:
        _write(file, source.read_bytes())
    partial.replace(path)  # complete, or not there


def _line(record: Record) -> str:
    """A record as its line in a file. Raises ValueError, naming the run, where it may not be stored."""
    name = _run_name(record["spec"])
    bad: list[str] = []
    _finite(record, "", bad)
    if bad:
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise ValueError(
            f"the run {name} has numbers that are not finite: {', '.join(bad[:5])}{more}. Take smaller steps or "
            "less noise (alpha, sigma, learning_rate)."
        )
    for curve, values in record.get("curve", {}).items():
        if len(values) > MAX_CURVE:
            raise ValueError(f"curve {curve!r} of {name} has {len(values)} points, at most {MAX_CURVE} are allowed.")
    line = _canonical(record) + "\n"
    if len(line) > MAX_RECORD:
        raise ValueError(f"the record of {name} has {len(line)} bytes: at most {MAX_RECORD} may be.")
    return line


def _finite(value: Any, name: str, bad: list[str]) -> Any:
    """A value of a record with None for each number in it that is not finite, of which the list gets the names."""
    if isinstance(value, dict):
        return {k: _finite(v, f"{name}.{k}" if name else k, bad) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v, f"{name}[{i}]", bad) for i, v in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        bad.append(f"{name} = {value}")
        return None
    return value


def _run_name(spec: Spec) -> str:
    what = ["kind"] if spec.get("kind") == "decoding" or "arm" not in spec else []
    return " ".join(str(spec[k]) for k in (*what, "arm", "base", "seed", "repeat") if k in spec)


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def load_or_run(
    specs: Sequence[Spec],
    notebook: str,
    scale: str,
    *,
    force: bool = False,
    aside: bool = False,
    dry_run: bool = False,
    workers: int | None = None,
    keep_ledgers: Sequence[Spec] = (),
) -> list[Record]:
    """Records of the given specs: those that exist are loaded, the others are run now, in parallel processes.

    Committed records of every notebook of the scale are searched. A run made now is stored at once, so a killed sweep
    continues where it was: at scale smoke, and with force or aside, below the run folder (EVOALIGN_RUN_DIR, default
    runs/<notebook>-<scale>), which is searched then, too; else among the committed records. Two sweeps at once may
    store to one file; of a spec that both run, the first record stays and is returned by both.

    At scale full the plans of the training runs that are missing are printed first (`evoalign_lib.preflight`), dry run
    or not: their memory, their work and an estimate of their time. A training run then has a folder of its own, named
    training/<spec hash> below the run folder, with checkpoints and logs for TensorBoard, and goes on there after a kill
    (see `runs.run_train`); its record then says how often it was started, `starts`.

    Args:
        specs: the runs.
        notebook: name of the notebook, without suffix.
        scale: of the specs.
        force: do not look at committed records.
        aside: put new records beside the committed ones.
        dry_run: run nothing.
        workers: processes, one run each with one thread; None: one a core.
        keep_ledgers: those of the specs, training runs of ES, whose ledgers are kept with their records.

    Returns:
        (specs,) records in the order of the specs, and prints how many were loaded and how many run.

    Raises:
        ValueError: two equal specs, a spec of another scale, a ledger of something that is no run of ES among the
            specs, or a record whose ledger should have been kept and is not there (see `ledger_file`).
        DoesNotFit: at scale full, a missing run needs more memory than there is (see `preflight.check`).
        DryRun: runs are missing in a dry run; the message names them.
        RuntimeError: a process that ran specs was killed.

    The error of a run that fails, or whose record may not be stored (see `run`), is raised when the runs that had begun
    are finished and stored; an interrupt ends them at once. In either case, and after a kill, another call runs what is
    missing.
    """
    hashes = [spec_hash(s) for s in specs]
    if len(set(hashes)) < len(hashes):
        raise ValueError("two of the specs are equal: every run must differ in at least its seed.")
    for spec in specs:
        if spec["scale"] != scale:
            raise ValueError(f"a spec has scale {spec['scale']!r}, the notebook runs {scale!r}.")
    kept = {spec_hash(s): s for s in keep_ledgers}
    for h, spec in kept.items():
        if h not in hashes or spec["kind"] != "train" or not spec.get("arm", "es").startswith("es"):
            raise ValueError(f"keep_ledgers holds a spec that is no run of ES among the specs: {spec}.")
    beside = run_folder(notebook, scale) / "results" / f"{scale}.jsonl"
    files = [] if force or scale == "smoke" else sorted(paths.RESULTS.glob(f"*/{scale}.jsonl"))
    target = paths.RESULTS / notebook / f"{scale}.jsonl"
    if force or aside or scale == "smoke":
        files, target = [*files, beside], beside
    found = {r["spec_hash"]: r for file in files for r in read_records(file) if r["status"] == "finished"}
    for h in kept.keys() & found.keys():
        ledger_file(found[h])  # an error before anything is run
    missing = [s for s in specs if spec_hash(s) not in found]
    if missing and scale == "full":
        from evoalign_lib import preflight, runs

        preflight.check(missing, workers=workers)
    if dry_run and missing:
        names = ", ".join(map(_run_name, missing[:20]))
        more = f" and {len(missing) - 20} more" if len(missing) > 20 else ""
        raise DryRun(f"{len(specs) - len(missing)} of {len(specs)} runs have records; to be run: {names}{more}.")
    try:
        with tempfile.TemporaryDirectory() as made:
            keep = {h: Path(made) / f"{h}.jsonl.gz" for h in kept}
            # closed at once where storing fails or is interrupted: no process goes on in the background
            with closing(_run_all(missing, notebook, workers, keep)) as finished:
                for record in finished:
                    h = record["spec_hash"]
                    found[h] = append_record(target, record, keep.get(h))
                    if (folder := _training_folder(record["spec"], notebook)) is not None:
                        runs.settle(folder)
    except KeyboardInterrupt as error:
        error.add_note(_STORED)
        raise
    print(f"loaded {len(specs) - len(missing)} records, ran {len(missing)}")
    if force:
        committed = {r["spec_hash"]: r for f in paths.RESULTS.glob(f"*/{scale}.jsonl") for r in read_records(f)}
        print(compare([found[h] for h in hashes], committed))
    return [found[h] for h in hashes]


def compare(records: Sequence[Record], committed: Mapping[str, Record]) -> str:
    """Say in one line how runs made again differ from the committed ones of the same specs.

    Args:
        records: made now.
        committed: spec hash -> record.
    """
    pairs = [(r, committed[r["spec_hash"]]) for r in records if r["spec_hash"] in committed]
    text = f"beside committed records: {len(pairs)} of {len(records)} have the same spec"
    trained = [(a, b) for a, b in pairs if "digest" in a]
    if trained:
        same = sum(a["digest"] == b["digest"] for a, b in trained)
        text += f"; final weights have the same bits in {same} of {len(trained)}"
    tested = [
        abs(value - b["test"][key])
        for a, b in pairs
        for key, value in a.get("test", {}).items()
        if re.fullmatch(r"greedy|t[0-9.]+", key)
    ]
    if tested:
        text += f"; test accuracy differs by at most {100 * max(tested):.2f} points"
    return text


def ledger_file(record: Record) -> Path:
    """Where the ledger lies that was kept with a record: among the committed ones, or below the run folder.

    Raises:
        ValueError: the record was made without keeping it; or there is no file with the record's SHA-256.
    """
    spec, name = record["spec"], f"{record['spec_hash']}.jsonl.gz"
    if "ledger" not in record:
        raise ValueError(
            f"the record {record['spec_hash']} of {record['notebook']} ({_run_name(spec)}) was made without keeping "
            "the run's ledger: delete its line to run it again, or leave its spec out of keep_ledgers."
        )
    beside = run_folder(record["notebook"], spec["scale"]) / "results"
    found = [folder / "ledgers" / name for folder in (paths.RESULTS / record["notebook"], beside)]
    for path in found:
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == record["ledger"]["sha256"]:
            return path
    raise ValueError(
        f"the ledger of the record {record['spec_hash']} (SHA-256 {record['ledger']['sha256']:.16}...) is neither "
        f"{found[0]} nor {found[1]}: restore it from git, or delete the record's line to run its spec again."
    )


def check_ledger(record: Record) -> ledger.Report:
    """Replay the ledger kept with a record: chain, every digest, and the record's own digest of the last weights.

    Raises:
        ValueError: no such ledger (see `ledger_file`), or one that does not replay to the record's weights.
    """
    path = ledger_file(record)
    report = ledger.verify(path, record["spec"]["base"])
    if report.weights != record["ledger"]["weights"]:
        raise ValueError(
            f"{path} replays to weights with the digest {report.weights:.16}..., the record {record['spec_hash']} has "
            f"{record['ledger']['weights']:.16}...: restore both from git."
        )
    return report


def run_folder(notebook: str, scale: str) -> Path:
    """Where a fresh run writes: the folder EVOALIGN_RUN_DIR, or runs/<notebook>-<scale>."""
    return Path(os.environ.get("EVOALIGN_RUN_DIR") or paths.RUNS / f"{notebook}-{scale}")


_STORED = "finished runs are stored: call again for the rest"


def _run_all(specs: Sequence[Spec], notebook: str, workers: int | None, keep: Mapping[str, Path]) -> Iterator[Record]:
    """Run specs in processes of their own, yielding records as they finish; they inherit modules and nothing else.

    After a run that fails, those that have begun are finished and yielded before its error is raised; on an interrupt
    the processes are ended at once.

    Args:
        keep: spec hash -> where the run's ledger goes.

    Raises:
        RuntimeError: a process was killed.
    """
    from tqdm import tqdm

    from evoalign_lib.engines.local import default_workers

    if not specs:
        return
    # one thread a process; set before the children import torch
    os.environ["OMP_NUM_THREADS"] = "1"
    if any(spec.get("engine", "local") != "local" for spec in specs):
        workers = 1  # a run has all GPUs, or the cluster
    workers = min(workers or default_workers(), len(specs))
    commit, failure = _commit(), None
    others = set(multiprocessing.active_children())
    # with another engine every run has a process of its own, which leaves nothing on a GPU
    local = all(spec.get("engine", "local") == "local" for spec in specs)
    settings = {
        "mp_context": _server() if local else multiprocessing.get_context("spawn"),
        "max_tasks_per_child": None if local else 1,
        "initializer": _start_worker,
        "initargs": (os.getpid(), dict(os.environ)),
    }
    with ProcessPoolExecutor(workers, **settings) as pool:
        try:
            with _interrupts_ignored():
                futures = {pool.submit(run, s, notebook, commit, keep.get(spec_hash(s))): s for s in specs}
            # time left from the mean over all runs: several end at once
            for future in tqdm(as_completed(futures), total=len(futures), unit="run", desc=notebook, smoothing=0):
                if future.cancelled():
                    continue
                error = future.exception()
                if error is None:
                    yield future.result()
                elif isinstance(error, BrokenProcessPool):
                    raise RuntimeError(
                        "a process that ran specs was killed, perhaps for memory, and the others were ended with it; "
                        f"{_STORED}, with fewer workers if memory was short."
                    ) from error
                elif failure is None:
                    failure = error
                    failure.add_note(f"in the run {futures[future]}; {_STORED}")
                    begun = sum(not other.cancel() for other in futures if not other.done())
                    if begun:
                        tqdm.write(f"a run failed ({error!r}); {begun} that had begun are finished first", sys.stderr)
        except BaseException:
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            raise
    if failure is not None:
        raise failure


def _server() -> multiprocessing.context.BaseContext:
    """What starts processes: a server with the slow imports done, of which they are copies, where it is safe.

    Ten seconds of imports for each process, and again for each sweep, are more than a small run takes. The server is
    a fresh interpreter that has imported others' packages and done nothing else: nothing of this process is inherited,
    and our own modules are read anew by each sweep, as they may be edited between two. What others' packages read from
    the environment when they are imported, such as HF_HUB_OFFLINE, stays what it was at the first sweep.
    """
    try:  # how a process knows that this one is gone when it is no child of it: Linux 5.3, and not in every sandbox
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    modules = ["torch", "datasets", "transformers.models.auto.modeling_auto", "numba", "scipy.stats"]
    if importlib.util.find_spec("vllm") is None:  # where it is, TRL imports it, which is nothing to make copies of
        modules.append("trl.trainer.grpo_trainer")
    context.set_forkserver_preload(modules)
    return context


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ctrl-C reaches every process of a terminal or notebook: those that start in here leave it to this one."""
    if threading.current_thread() is not threading.main_thread():  # only there handlers can be set
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _start_worker(parent: int, environment: Mapping[str, str]) -> None:
    os.environ.clear()  # a server has that of the first sweep
    os.environ.update(environment)

    import datasets
    from transformers.utils import logging

    from evoalign_lib.engines.local import start_worker

    start_worker(parent)
    # one bar for the sweep, and none for the loading of each run's files
    logging.disable_progress_bar()
    datasets.disable_progress_bars()


def run(spec: Spec, notebook: str, commit: str, keep: Path | None = None) -> Record:
    """Run one spec in this process and return its record; with `keep`, a training run's ledger is written there.

    Raises:
        ValueError: a record that may not be stored, naming the run and what is wrong: too large, or with numbers that
            are not finite though no weight was (those of a run that diverged are null).
    """
    import torch

    from evoalign_lib import runs

    torch.set_num_threads(1)
    wall, cpu = time.perf_counter(), _core_seconds()
    if spec["kind"] == "train":
        folder = _training_folder(spec, notebook)
        result = runs.run_train(spec, keep, folder)
        if folder is not None and (started := len(folder.joinpath("starts.txt").read_text().splitlines())) > 1:
            result["starts"] = started  # the times below are those of the last one
    else:
        result = runs.RUNNERS[spec["kind"]](spec)
    budget = result.setdefault("budget", {})
    budget["core_seconds_total"] = round(_core_seconds() - cpu, 2)
    budget["wall_seconds"] = round(time.perf_counter() - wall, 2)
    if "diverged" in result:
        result = _finite(result, "", [])
    record = {
        "spec": spec,
        "spec_hash": spec_hash(spec),
        "notebook": notebook,
        "status": "finished",
        "commit": commit,
        "environment": environment(spec.get("engine", "local"), spec.get("gpus") or spec.get("tensor_parallel", 1)),
        **result,
    }
    _line(record)  # an error of this run, and not of the process that stores it among others
    return record


def _core_seconds() -> float:
    """CPU time of this process and of those that it waited for."""
    spent = os.times()
    return time.process_time() + spent.children_user + spent.children_system


def _training_folder(spec: Spec, notebook: str) -> Path | None:
    """Where a training run at full scale keeps what it goes on from; others are too short to need it."""
    if spec["kind"] != "train" or spec["scale"] != "full":
        return None
    return run_folder(notebook, "full") / "training" / spec_hash(spec)


def environment(engine: str = "local", gpus: int = 1) -> dict[str, str]:
    """Versions and the device's name, for a record; with another engine than the local one that of its GPUs."""
    import warnings

    with warnings.catch_warnings():
        # in a notebook without ipywidgets the progress-bar library warns when it is imported
        warnings.filterwarnings("ignore", "IProgress not found")
        import torch
        import transformers

    import evoalign_lib

    return {
        "python": platform.python_version(),
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "evoalign": evoalign_lib.__version__,
        "device": f"{gpus} x {torch.cuda.get_device_name()}"
        if engine != "local" and torch.cuda.is_available()
        else _device(),
    }


def _device() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip() + " (CPU, one thread a run)"
    except OSError:
        pass
    return f"{platform.processor() or platform.machine()} (CPU, one thread a run)"


# what runs and notebooks write themselves: a change there says nothing about the code
_DRAWN = tuple(f":!{name}" for name in ("paper/results", "paper/generated", "figures", "README.md", "LOG.md"))


def _commit() -> str:
    """The commit of the checkout, with "+" if its code has uncommitted changes; "unknown" outside git."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=paths.ROOT, capture_output=True, text=True, check=True).stdout

    try:
        return git("rev-parse", "--short=12", "HEAD").strip() + (
            "+" if git("status", "--porcelain", "-uno", "--", ".", *_DRAWN).strip() else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
