"""Load the records of specs that have been run, and run the others in parallel processes.

Notebooks declare specs and get records back. The cache looks at specs only, never at code: `ENGINE_VERSION`, which
is part of every spec, is raised when a change to the library changes results.
"""

import gc
import importlib.util
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from pathlib import Path
from typing import Any

from evoalign_lib import ledger, tasks
from evoalign_lib._forks import start_worker
from evoalign_lib.checks import require
from evoalign_lib.engines.processes import default_workers
from evoalign_lib.files import locked
from evoalign_study import base_models, kinds, paths, preflight, progress_bar, provenance, records, trainers, training
from evoalign_study.records import Record, Spec, spec_hash


class DryRun(Exception):
    """Raised by `load_or_run` in a dry run, instead of running anything."""


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
    """Return the records of the given specs: load those that exist, run the others in parallel processes.

    The committed records of every notebook at this scale are searched. A new run is stored at once, so a killed sweep
    continues where it was: at scale smoke, and with force or aside, below the run folder (EVOALIGN_RUN_DIR, default
    runs/<notebook>-<scale>), which is then searched, too; otherwise among the committed records. Two sweeps at once may
    write to one file; if both run the same spec, the first record stays and both return it.

    At scale full, the plans of the missing training and sampling runs, with their memory and work, are printed first
    (`preflight`), dry run or not. Each training run then has its own folder, training/<spec hash> below the run folder,
    with checkpoints and TensorBoard logs, and resumes there after a kill (see `train.run`); `wall_seconds` and
    `core_seconds_total` of its record are then those of its last process.

    Args:
        specs: the runs.
        notebook: name of the notebook, without suffix.
        scale: scale of the specs.
        force: ignore the committed records.
        aside: store new records below the run folder instead of among the committed ones.
        dry_run: run nothing.
        workers: number of processes, each with one run and one thread; None: one per core.
        keep_ledgers: the specs, ES training runs, whose ledgers are kept with their records.

    Returns:
        (specs,) records in the order of the specs. Prints how many were loaded and how many were run.

    Raises:
        ValueError: two specs are equal; a spec has another scale; `keep_ledgers` holds anything but ES runs among the
            specs; a record's ledger should have been kept but is missing (see `ledger_file`); or a missing run has an
            unknown kind or task, or a model without weights or tokenizer (which a dry run does not check).
        DoesNotFit: at scale full, a missing run needs more memory than there is (see `preflight.check`).
        DryRun: runs are missing in a dry run; the message names them.
        RuntimeError: a process that ran specs was killed.
        OSError: records cannot be stored; nothing is run then.

    If a run fails, or its record may not be stored (see `run`), the error is raised once the runs already started have
    been finished and stored; an interrupt ends them at once. In either case, and after a kill, another call runs what
    is missing.
    """
    hashes = [spec_hash(s) for s in specs]
    require(len(set(hashes)) == len(hashes), "two of the specs are equal: every run must differ in at least its seed.")
    others = {spec["scale"] for spec in specs} - {scale}
    require(not others, f"a spec has scale {', '.join(map(repr, others))}, but the notebook runs {scale!r}.")
    kept = {spec_hash(s): s for s in keep_ledgers}
    for h, spec in kept.items():
        is_es = spec["kind"] == "train" and trainers.of(spec["arm"]).has_members
        require(is_es and h in hashes, f"keep_ledgers holds a spec that is not an ES run among the specs: {spec}.")
    beside = records.run_folder(notebook, scale) / "results" / f"{scale}.jsonl"
    files = [] if force or scale == "smoke" else records.record_files(scale)
    target = paths.RESULTS / notebook / f"{scale}.jsonl"
    if force or aside or scale == "smoke":
        files, target = [*files, beside], beside
    found = {r["spec_hash"]: r for file in files for r in records.read_records(file, frozenset(hashes))}
    for h in kept.keys() & found.keys():
        records.ledger_file(found[h])  # raises before anything is run
    missing = [s for s in specs if spec_hash(s) not in found]
    for spec in missing:
        kinds.get(spec["kind"])
        if "base" in spec and "task" in spec:
            tasks.get(spec["task"])
    if missing and scale == "full":
        preflight.check(missing, workers=workers)
        for spec in () if dry_run else {spec.get("base"): spec for spec in missing}.values():
            base_models.check_base(spec)
    if dry_run and missing:
        names = ", ".join(map(records.run_name, missing[:20]))
        more = f" and {len(missing) - 20} more" if len(missing) > 20 else ""
        raise DryRun(f"{len(specs) - len(missing)} of {len(specs)} runs have records; to be run: {names}{more}.")
    if missing:
        try:  # now, and not after a run of hours
            with locked(target):
                pass
        except OSError as error:
            error.add_note(
                f"no record can be stored in {target.parent}, so nothing was run: make it writable, or, if "
                "EVOALIGN_RUN_DIR names it, set that to another folder"
            )
            raise
    try:
        with tempfile.TemporaryDirectory() as made:
            keep = {h: Path(made) / f"{h}.jsonl.gz" for h in kept}
            # closed at once if storing fails or is interrupted, so that no process goes on in the background
            with closing(_run_all(missing, notebook, workers, keep)) as finished:
                for record in finished:
                    h = record["spec_hash"]
                    found[h] = records.append_record(target, record, keep.get(h))
                    if (folder := _training_folder(record["spec"], notebook)) is not None:
                        training.settle(folder)
    except KeyboardInterrupt as error:
        error.add_note(_STORED)
        raise
    print(f"loaded {len(specs) - len(missing)} records, ran {len(missing)}")
    if force:
        committed = {r["spec_hash"]: r for file in records.record_files(scale) for r in records.read_records(file)}
        print(compare([found[h] for h in hashes], committed))
    return [found[h] for h in hashes]


def compare(again: Sequence[Record], committed: Mapping[str, Record]) -> str:
    """Return one line on how repeated runs differ from the committed records of the same specs.

    Args:
        again: records made now.
        committed: spec hash -> record.
    """
    pairs = [(r, committed[r["spec_hash"]]) for r in again if r["spec_hash"] in committed]
    text = f"beside committed records: {len(pairs)} of {len(again)} have the same spec"
    if trained := [a["digest"] == b["digest"] for a, b in pairs if "digest" in a]:
        text += f"; final weights have the same bits in {sum(trained)} of {len(trained)}"
    tested = [  # whichever decodings the runs have: a model that is measured again has others
        abs(value - b["test"][decoding])
        for a, b in pairs
        for decoding, value in a.get("test", {}).items()
        if decoding == "greedy" or re.fullmatch(r"t[\d.]+", decoding)
    ]
    if tested:
        text += f"; test accuracy differs by at most {100 * max(tested):.2f} points"
    return text


def check_ledger(record: Record) -> ledger.Report:
    """Replay the ledger kept with a record, checking its chain, every digest and the record's final weights.

    Raises:
        ValueError: there is no such ledger (see `ledger_file`), or it does not replay to the record's weights.
    """
    path = records.ledger_file(record)
    report = ledger.verify(path, record["spec"]["base"])
    if report.weights != record["ledger"]["weights"]:
        raise ValueError(
            f"{path} replays to weights with the digest {report.weights:.16}..., the record {record['spec_hash']} has "
            f"{record['ledger']['weights']:.16}...: restore both from git."
        )
    return report


_STORED = "finished runs are stored: call again to run the rest"


def _run_all(specs: Sequence[Spec], notebook: str, workers: int | None, keep: Mapping[str, Path]) -> Iterator[Record]:
    """Run specs in separate processes, which inherit modules and nothing else; yield records as they finish.

    Runs that need a process to themselves come last. If a run fails, those already started are finished and yielded
    before its error is raised; on an interrupt the processes are ended at once.

    Args:
        keep: spec hash -> path that the run's ledger is written to.

    Raises:
        RuntimeError: a process was killed.
    """
    for alone in (False, True):
        if own := [s for s in specs if (s["kind"] in kinds.ALONE) is alone]:
            yield from _run_in_pool(own, notebook, workers, keep, 1 if alone else None)


def _run_in_pool(
    specs: Sequence[Spec], notebook: str, workers: int | None, keep: Mapping[str, Path], runs_a_process: int | None
) -> Iterator[Record]:
    """Run specs in a pool of processes, each for at most `runs_a_process` runs (None: no limit); see `_run_all`."""
    from tqdm import tqdm

    _set_environment(any(map(base_models.is_local, specs)))
    local = all(map(base_models.is_local, specs))
    # on other engines each run has all GPUs or the cluster, and its own process, which leaves nothing on a GPU
    workers = min((workers or default_workers()) if local else 1, len(specs))
    commit, failure = provenance.commit(), None
    others = set(multiprocessing.active_children())
    context = _server() if local else multiprocessing.get_context("spawn")
    shares, places = context.RawArray("d", len(specs)), {spec_hash(s): place for place, s in enumerate(specs)}
    start = os.getpid(), dict(os.environ), base_models.known_files(), places, shares
    how = {"mp_context": context, "max_tasks_per_child": runs_a_process if local else 1}
    with ProcessPoolExecutor(workers, initializer=_start_worker, initargs=start, **how) as pool:
        try:
            futures = {pool.submit(run, s, notebook, commit, keep.get(spec_hash(s))): s for s in specs}
            for future in progress_bar.followed(list(futures), shares, notebook):
                if future.cancelled():
                    continue
                error = future.exception()
                if error is None:
                    yield future.result()
                elif isinstance(error, BrokenProcessPool):
                    raise RuntimeError(
                        "a process that ran specs was killed, perhaps out of memory, and the others ended with it; "
                        f"{_STORED}, with fewer workers if memory was short."
                    ) from error
                elif failure is None:
                    failure = error
                    failure.add_note(f"in the run {futures[future]}; {_STORED}")
                    if begun := sum(not other.cancel() for other in futures if not other.done()):
                        message = f"a run failed ({error!r}); {begun} already started will finish first"
                        tqdm.write(message, sys.stderr)
        except BaseException:
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            raise
    if failure is not None:
        raise failure


_INSTRUCTIONS = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
_INSTRUCTIONS |= {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2"}
"""Instruction sets that PyTorch, oneDNN and numba may use in a run of the local engine. The committed records were made
with AVX2; by default all three use AVX-512 where the CPU has it, whose kernels round differently: a gradient run then
ends with different weights, and so does an ES run after a near-tie between two tokens."""


def _set_environment(local: bool) -> None:
    """Set the environment that the processes of a sweep, and the server they are forked from, import torch with.

    One thread per process; for runs of the local engine also AVX2, if the CPU has it and the user chose no other.
    """
    import torch

    os.environ["OMP_NUM_THREADS"] = "1"
    # asked before the variables are set: they do not change the kernels of this process
    has_avx2 = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    if has_avx2 and local:
        for name, value in _INSTRUCTIONS.items():
            os.environ.setdefault(name, value)


def _server() -> multiprocessing.context.BaseContext:
    """Return the context that starts processes: where it is safe, a fork server that has done the slow imports.

    Ten seconds of imports for each process, and again for each sweep, are more than a small run takes. The server is
    a fresh interpreter that has imported third-party packages and nothing else. It inherits nothing from this process,
    and each sweep imports our own modules again, as they may be edited between two sweeps. The exception is
    `evoalign_lib` itself, which is imported first and silences torchao. What third-party packages read from the
    environment on import, such as HF_HUB_OFFLINE, stays as it was at the first sweep.
    """
    try:  # by a pidfd, processes that are not our children see that we are gone: Linux 5.3, and not in every sandbox
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    modules = ["evoalign_lib", "torch", "datasets", "transformers.models.auto.modeling_auto", "numba", "scipy.stats"]
    if importlib.util.find_spec("vllm") is None:  # where it is installed, TRL imports it, and it must not be forked
        modules.append("trl.trainer.grpo_trainer")
    context.set_forkserver_preload(modules)
    return context


def _start_worker(parent: int, environment: Mapping[str, str], known_files: Mapping[str, str], *progress: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal: the parent handles it
    os.environ.clear()  # a fork server still has that of the first sweep
    os.environ.update(environment)
    base_models.know_files(known_files)
    progress_bar.tell_in(*progress)

    import datasets
    from transformers.utils import logging

    start_worker(parent)
    gc.freeze()  # what the server imported stays for good: the garbage collector need not scan it
    # one bar for the sweep, and none for loading the files of each run
    logging.disable_progress_bar()
    datasets.disable_progress_bars()


def run(spec: Spec, notebook: str, commit: str, keep: Path | None = None) -> Record:
    """Run one spec in this process and return its record; `keep`: path to write a training run's ledger to.

    Raises:
        ValueError: the record may not be stored; names the run and what is wrong: it is too large, or has numbers that
            are not finite although all weights were (in the record of a run that diverged they become null).
    """
    import torch

    torch.set_num_threads(1)
    wall, cpu = time.perf_counter(), _core_seconds()
    run_kind = kinds.get(spec["kind"])
    if spec["kind"] == "train":
        result = run_kind(spec, keep, _training_folder(spec, notebook))
    else:
        result = run_kind(spec)
    spent = {"core_seconds_total": _core_seconds() - cpu, "wall_seconds": time.perf_counter() - wall}
    result.setdefault("budget", {}).update({name: round(seconds, 2) for name, seconds in spent.items()})
    if "diverged" in result:
        result = records.plain_json(json.dumps(result))
    gpus = spec.get("gpus") or spec.get("tensor_parallel", 1)
    record = {"spec": spec, "spec_hash": spec_hash(spec), "notebook": notebook, "commit": commit}
    record["status"] = records.FINISHED
    record |= {"environment": provenance.environment(spec.get("engine", "local"), gpus)} | result
    records.record_line(record)  # raises here, in this run, and not in the process that stores all records
    return record


def _core_seconds() -> float:
    """Return the CPU time of this process and of the children that it waited for, seconds."""
    spent = os.times()
    return time.process_time() + spent.children_user + spent.children_system


def _training_folder(spec: Spec, notebook: str) -> Path | None:
    """Return the folder that a training run at full scale resumes from; None for others, too short to need it."""
    if spec["kind"] != "train" or spec["scale"] != "full":
        return None
    return records.run_folder(notebook, "full") / "training" / spec_hash(spec)
