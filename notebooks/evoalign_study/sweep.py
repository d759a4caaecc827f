"""Load or run: records of specs that exist are loaded, the others are run now, in parallel processes.

Notebooks declare specs and get records back. The cache is explicit and knows nothing of code: `ENGINE_VERSION`, which
is part of every spec, is raised when a change of the library changes results.
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
from evoalign_lib.checks import require
from evoalign_lib.engines.processes import default_workers, start_worker
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
    """Records of the given specs: those that exist are loaded, the others are run now, in parallel processes.

    Committed records of every notebook of the scale are searched. A run made now is stored at once, so a killed sweep
    continues where it was: at scale smoke, and with force or aside, below the run folder (EVOALIGN_RUN_DIR, default
    runs/<notebook>-<scale>), which is searched then, too; else among the committed records. Two sweeps at once may
    store to one file; of a spec that both run, the first record stays and is returned by both.

    At scale full the plans of the training runs and of the sampling that are missing are printed first (`preflight`),
    dry run or not: their memory and their work. A training run then has a folder of its own, named training/<spec hash>
    below the run folder, with checkpoints and logs for TensorBoard, and goes on there after a kill (see `train.run`);
    `wall_seconds` and `core_seconds_total` of its record are then those of its last process.

    Args:
        specs: the runs.
        notebook: name of the notebook, without suffix.
        scale: of the specs.
        force: do not look at committed records.
        aside: put new records beside the committed ones.
        dry_run: run nothing.
        workers: processes, one run each with one thread; None: one per core.
        keep_ledgers: those of the specs, training runs of ES, whose ledgers are kept with their records.

    Returns:
        (specs,) records in the order of the specs, and prints how many were loaded and how many run.

    Raises:
        ValueError: two equal specs, a spec of another scale, a ledger of something that is no run of ES among the
            specs, or a record whose ledger should have been kept and is not there (see `ledger_file`); among the
            missing runs one of an unknown kind or task, or of a model without weights or tokenizer, which a dry run
            does without.
        DoesNotFit: at scale full, a missing run needs more memory than there is (see `preflight.check`).
        DryRun: runs are missing in a dry run; the message names them.
        RuntimeError: a process that ran specs was killed.
        OSError: records cannot be stored; nothing is run then.

    The error of a run that fails, or whose record may not be stored (see `run`), is raised when the runs that had begun
    are finished and stored; an interrupt ends them at once. In either case, and after a kill, another call runs what is
    missing.
    """
    hashes = [spec_hash(s) for s in specs]
    require(len(set(hashes)) == len(hashes), "two of the specs are equal: every run must differ in at least its seed.")
    others = {spec["scale"] for spec in specs} - {scale}
    require(not others, f"a spec has scale {', '.join(map(repr, others))}, the notebook runs {scale!r}.")
    kept = {spec_hash(s): s for s in keep_ledgers}
    for h, spec in kept.items():
        is_es = spec["kind"] == "train" and trainers.of(spec["arm"]).has_members
        require(is_es and h in hashes, f"keep_ledgers holds a spec that is no run of ES among the specs: {spec}.")
    beside = records.run_folder(notebook, scale) / "results" / f"{scale}.jsonl"
    files = [] if force or scale == "smoke" else records.record_files(scale)
    target = paths.RESULTS / notebook / f"{scale}.jsonl"
    if force or aside or scale == "smoke":
        files, target = [*files, beside], beside
    found = {r["spec_hash"]: r for file in files for r in records.read_records(file, frozenset(hashes))}
    for h in kept.keys() & found.keys():
        records.ledger_file(found[h])  # an error before anything is run
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
        try:  # here, and not when a run of hours has ended
            with locked(target):
                pass
        except OSError as error:
            error.add_note(
                f"no record can be stored in {target.parent}, so that nothing is run: let it be written to, or, where "
                "EVOALIGN_RUN_DIR names it, let that name another"
            )
            raise
    try:
        with tempfile.TemporaryDirectory() as made:
            keep = {h: Path(made) / f"{h}.jsonl.gz" for h in kept}
            # closed at once where storing fails or is interrupted: no process goes on in the background
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
    """Say in one line how runs made again differ from the committed ones of the same specs.

    Args:
        again: made now.
        committed: spec hash -> record.
    """
    pairs = [(r, committed[r["spec_hash"]]) for r in again if r["spec_hash"] in committed]
    text = f"beside committed records: {len(pairs)} of {len(again)} have the same spec"
    if trained := [a["digest"] == b["digest"] for a, b in pairs if "digest" in a]:
        text += f"; final weights have the same bits in {sum(trained)} of {len(trained)}"
    tested = [  # by whichever decodings the runs have: models that are measured again have others
        abs(value - b["test"][decoding])
        for a, b in pairs
        for decoding, value in a.get("test", {}).items()
        if decoding == "greedy" or re.fullmatch(r"t[\d.]+", decoding)
    ]
    if tested:
        text += f"; test accuracy differs by at most {100 * max(tested):.2f} points"
    return text


def check_ledger(record: Record) -> ledger.Report:
    """Replay the ledger kept with a record: chain, every digest, and the record's own digest of the last weights.

    Raises:
        ValueError: no such ledger (see `ledger_file`), or one that does not replay to the record's weights.
    """
    path = records.ledger_file(record)
    report = ledger.verify(path, record["spec"]["base"])
    if report.weights != record["ledger"]["weights"]:
        raise ValueError(
            f"{path} replays to weights with the digest {report.weights:.16}..., the record {record['spec_hash']} has "
            f"{record['ledger']['weights']:.16}...: restore both from git."
        )
    return report


_STORED = "finished runs are stored: call again for the rest"


def _run_all(specs: Sequence[Spec], notebook: str, workers: int | None, keep: Mapping[str, Path]) -> Iterator[Record]:
    """Run specs in processes of their own, yielding records as they finish; they inherit modules and nothing else.

    Runs that must have a process to themselves come after the others. After a run that fails, those that have begun are
    finished and yielded before its error is raised; on an interrupt the processes are ended at once.

    Args:
        keep: spec hash -> where the run's ledger goes.

    Raises:
        RuntimeError: a process was killed.
    """
    for alone in (False, True):
        if own := [s for s in specs if (s["kind"] in kinds.ALONE) is alone]:
            yield from _run_in_pool(own, notebook, workers, keep, 1 if alone else None)


def _run_in_pool(
    specs: Sequence[Spec], notebook: str, workers: int | None, keep: Mapping[str, Path], runs_a_process: int | None
) -> Iterator[Record]:
    """Run specs in processes that have one run or, with None, as many as come; see `_run_all`."""
    from tqdm import tqdm

    _set_environment(any(map(base_models.is_local, specs)))
    local = all(map(base_models.is_local, specs))
    # with another engine a run has all GPUs, or the cluster, and a process of its own, which leaves nothing on a GPU
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
                        "a process that ran specs was killed, perhaps for memory, and the others were ended with it; "
                        f"{_STORED}, with fewer workers if memory was short."
                    ) from error
                elif failure is None:
                    failure = error
                    failure.add_note(f"in the run {futures[future]}; {_STORED}")
                    if begun := sum(not other.cancel() for other in futures if not other.done()):
                        message = f"a run failed ({error!r}); {begun} that had begun are finished first"
                        tqdm.write(message, sys.stderr)
        except BaseException:
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            raise
    if failure is not None:
        raise failure


_INSTRUCTIONS = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
_INSTRUCTIONS |= {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2"}
"""What PyTorch, oneDNN and numba may use of the CPU in a run of the local engine. The committed records were made with
AVX2; left to themselves all take AVX-512 where a CPU has it, whose kernels round differently: a gradient run ends with
other weights, and a run of ES with others after a near-tie of two tokens."""


def _set_environment(local: bool) -> None:
    """Set what the processes of a sweep, and the server that they are copies of, have before they import torch.

    One thread per process; for runs of the local engine AVX2, if the CPU has it and the user has not set another.
    """
    import torch

    os.environ["OMP_NUM_THREADS"] = "1"
    # asked before the variables are set: this process keeps the kernels that it has
    has_avx2 = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    if has_avx2 and local:
        for name, value in _INSTRUCTIONS.items():
            os.environ.setdefault(name, value)


def _server() -> multiprocessing.context.BaseContext:
    """What starts processes: where it is safe, a server that has done the slow imports and forks into each of them.

    Ten seconds of imports for each process, and again for each sweep, are more than a small run takes. The server is
    a fresh interpreter that has imported others' packages and done nothing else: nothing of this process is inherited,
    and our own modules are read anew by each sweep, as they may be edited between two; but for our package itself,
    which comes first and silences torchao. What others' packages read from the environment when they are imported,
    such as HF_HUB_OFFLINE, stays what it was at the first sweep.
    """
    try:  # how a process knows that this one is gone when it is no child of it: Linux 5.3, and not in every sandbox
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    modules = ["evoalign_lib", "torch", "datasets", "transformers.models.auto.modeling_auto", "numba", "scipy.stats"]
    if importlib.util.find_spec("vllm") is None:  # where it is, TRL imports it, which is nothing to make copies of
        modules.append("trl.trainer.grpo_trainer")
    context.set_forkserver_preload(modules)
    return context


def _start_worker(parent: int, environment: Mapping[str, str], known_files: Mapping[str, str], *progress: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal: it is the parent's
    os.environ.clear()  # a server has that of the first sweep
    os.environ.update(environment)
    base_models.know_files(known_files)
    progress_bar.tell_in(*progress)

    import datasets
    from transformers.utils import logging

    start_worker(parent)
    gc.freeze()  # what the server imported is here to stay: no collection goes over it again
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
    records.record_line(record)  # an error of this run, and not of the process that stores it among others
    return record


def _core_seconds() -> float:
    """CPU time of this process and of those that it waited for."""
    spent = os.times()
    return time.process_time() + spent.children_user + spent.children_system


def _training_folder(spec: Spec, notebook: str) -> Path | None:
    """Where a training run at full scale keeps what it goes on from; others are too short to need it."""
    if spec["kind"] != "train" or spec["scale"] != "full":
        return None
    return records.run_folder(notebook, "full") / "training" / spec_hash(spec)
