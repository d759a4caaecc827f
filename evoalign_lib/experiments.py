"""Runs and their records: specs, load-or-run, budgets.

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
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from evoalign_lib import ledger, paths

ENGINE_VERSION = 2
SCALES = ("smoke", "tiny", "full")
ENGINES = ("local",)
_EXAMPLES = {"model": "", "engine": "local", "gpus": 0, "seeds": 0, "force": False, "dry_run": False}
PARAMETERS = ("scale", *_EXAMPLES)
_MAX_RECORD = 8_000  # bytes
_MAX_CURVE = 50  # points

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
    if namespace["gpus"]:
        raise ValueError(f"gpus={namespace['gpus']!r}: engine 'local' runs on CPU cores only, set gpus=0.")
    if namespace["model"] and scale != "full":
        raise ValueError(f"model={namespace['model']!r} is for scale 'full'; scale {scale!r} has models of its own.")
    aside = scale == "smoke" or any(bool(namespace[name]) for name in ("force", "seeds", "model"))
    aside |= settings != dict(presets[scale])
    namespace["_parameters_checked"] = True
    return SimpleNamespace(**{name: namespace[name] for name in PARAMETERS}, aside=aside, **settings)


def announce(run: SimpleNamespace, notebook: str) -> None:
    """Print what a notebook runs on: scale, device, versions, the code's commit; with `dry_run`, that it will stop."""
    found = environment()
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


def append_record(path: Path, record: Record) -> None:
    """Add one line to a record file, synced to disk; a torn last line of a killed run is cut off first.

    Raises:
        ValueError: a record over 8 kB or with a curve over 50 points.
    """
    line = _canonical(record) + "\n"
    if len(line) > _MAX_RECORD:
        raise ValueError(f"the record of {record['spec_hash']} has {len(line)} bytes: at most {_MAX_RECORD} may be.")
    for name, values in record.get("curve", {}).items():
        if len(values) > _MAX_CURVE:
            raise ValueError(f"curve {name!r} has {len(values)} points, at most {_MAX_CURVE} are allowed.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        file.seek(0)
        text = file.read()
        complete = text.rfind(b"\n") + 1
        if _is_json(text[complete:]):  # only the newline is missing: read_records takes it for a record
            line = "\n" + line
        else:
            file.truncate(complete)
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


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
    runs/<notebook>-<scale>), which is searched then, too; else among the committed records.

    Args:
        specs: the runs.
        notebook: name of the notebook, without suffix.
        scale: of the specs.
        force: do not look at committed records.
        aside: put new records beside the committed ones.
        dry_run: run nothing.
        workers: processes, one run each with one thread; None: one a core.
        keep_ledgers: those of the specs, training runs, whose ledgers are kept with their records.

    Returns:
        (specs,) records in the order of the specs, and prints how many were loaded and how many run.

    Raises:
        ValueError: two equal specs, a spec of another scale, a ledger of something that is no training run among the
            specs, or a record whose ledger should have been kept and is not there (see `ledger_file`).
        DryRun: runs are missing in a dry run; the message names them.
    """
    hashes = [spec_hash(s) for s in specs]
    if len(set(hashes)) < len(hashes):
        raise ValueError("two of the specs are equal: every run must differ in at least its seed.")
    for spec in specs:
        if spec["scale"] != scale:
            raise ValueError(f"a spec has scale {spec['scale']!r}, the notebook runs {scale!r}.")
    kept = {spec_hash(s): s for s in keep_ledgers}
    for h, spec in kept.items():
        if h not in hashes or spec["kind"] != "train":
            raise ValueError(f"keep_ledgers holds a spec that is no training run among the specs: {spec}.")
    beside = run_folder(notebook, scale) / "results" / f"{scale}.jsonl"
    files = [] if force or scale == "smoke" else sorted(paths.RESULTS.glob(f"*/{scale}.jsonl"))
    target = paths.RESULTS / notebook / f"{scale}.jsonl"
    if force or aside or scale == "smoke":
        files, target = [*files, beside], beside
    found = {r["spec_hash"]: r for file in files for r in read_records(file) if r["status"] == "finished"}
    for h in kept.keys() & found.keys():
        ledger_file(found[h])  # an error before anything is run
    missing = [s for s in specs if spec_hash(s) not in found]
    if dry_run and missing:
        names = ", ".join(
            f"{s.get('arm', s['kind'])} {s['base']} {s.get('seed', s.get('repeat', ''))}" for s in missing[:20]
        )
        more = f" and {len(missing) - 20} more" if len(missing) > 20 else ""
        raise DryRun(f"{len(specs) - len(missing)} of {len(specs)} runs have records; to be run: {names}{more}.")
    keep = {h: target.parent / "ledgers" / f"{h}.jsonl.gz" for h in kept}
    for record in _run_all(missing, notebook, workers, keep):
        append_record(target, record)
        found[record["spec_hash"]] = record
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
    tested = [abs(a["test"][key] - b["test"][key]) for a, b in pairs if "test" in a for key in ("greedy", "t1")]
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
            f"the record {record['spec_hash']} of {record['notebook']} ({spec.get('arm', spec['kind'])} {spec['base']} "
            f"{spec.get('seed', '')}) was made without keeping the run's ledger: delete its line to run it again, or "
            "leave its spec out of keep_ledgers."
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


def _run_all(specs: Sequence[Spec], notebook: str, workers: int | None, keep: Mapping[str, Path]) -> Iterable[Record]:
    """Run specs in processes of their own (spawned: nothing is inherited), yielding records as they finish.

    keep: spec hash -> where the run's ledger goes.
    """
    import multiprocessing

    from tqdm import tqdm

    from evoalign_lib.engines.local import default_workers, start_worker

    if not specs:
        return
    # one thread a process; set before the children import torch
    os.environ["OMP_NUM_THREADS"] = "1"
    workers = min(workers or default_workers(), len(specs))
    commit, context = _commit(), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=start_worker, initargs=(os.getpid(),)) as pool:
        futures = {pool.submit(run, s, notebook, commit, keep.get(spec_hash(s))): s for s in specs}
        try:
            for future in tqdm(as_completed(futures), total=len(futures), unit="run", desc=notebook):
                if error := future.exception():
                    error.add_note(f"in the run {futures[future]}; finished runs are stored, call again for the rest")
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def run(spec: Spec, notebook: str, commit: str, keep: Path | None = None) -> Record:
    """Run one spec in this process and return its record; with `keep`, a training run's ledger is written there."""
    import torch

    torch.set_num_threads(1)
    wall, cpu = time.perf_counter(), time.process_time()
    result = RUNNERS[spec["kind"]](spec) if keep is None else _run_train(spec, keep)
    budget = result.setdefault("budget", {})
    budget["core_seconds_total"] = round(time.process_time() - cpu, 2)
    budget["wall_seconds"] = round(time.perf_counter() - wall, 2)
    return {
        "spec": spec,
        "spec_hash": spec_hash(spec),
        "notebook": notebook,
        "status": "finished",
        "commit": commit,
        "environment": environment(),
        **result,
    }


def environment() -> dict[str, str]:
    """Versions and the device's name, for a record."""
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
        "device": _device(),
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


# ---- Countdown runs


def base_digest(model: Any) -> str:
    """SHA-256 of a model's parameters in float32, by name, 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode() + b"\0" + parameter.detach().float().numpy().tobytes())
    return digest.hexdigest()[:16]


_EVALUATION = ("max_completion_length", "validation_problems", "test_problems")
_TRAINING = ("population_size", "sigma", "alpha", "steps", "prompts_per_step", "curve_points")


def base_specs(bases: Sequence[str], settings: Mapping[str, Any], scale: str) -> list[Spec]:
    """Specs of the measurement of untrained bases.

    Args:
        bases: shipped bases ("A0", ...), or models on the Hub or in folders, which get the public problems.
        settings: max_completion_length, validation_problems, test_problems.
        scale: of the notebook.
    """
    return [_spec("base", base, scale) | {k: settings[k] for k in _EVALUATION} for base in bases]


def train_specs(
    arm: str, bases: Sequence[str], seeds: Iterable[int], settings: Mapping[str, Any], scale: str
) -> list[Spec]:
    """Specs of training runs: those of the bases, with arm ("es" or the null "es_shuffled"), seed and hyper-parameters.

    Args:
        settings: as for `base_specs`, and population_size, sigma, alpha, steps, prompts_per_step, curve_points.

    Raises:
        ValueError: more curve points than a record holds, said here and not after the run.
    """
    if settings["curve_points"] > _MAX_CURVE:
        raise ValueError(f"curve_points={settings['curve_points']} is more than a record holds: at most {_MAX_CURVE}.")
    wanted = {k: settings[k] for k in _EVALUATION + _TRAINING}
    return [_spec("train", base, scale) | {"arm": arm, "seed": seed} | wanted for base in bases for seed in seeds]


def audit_specs(
    base: str,
    precision: str,
    noise: str,
    fitness: str,
    seeds: Iterable[int],
    settings: Mapping[str, Any],
    scale: str,
) -> list[Spec]:
    """Specs of runs of a bfloat16 model that differ in arithmetic or noise alone.

    Args:
        precision: "master", "kahan" or "inplace" (see `precision`).
        noise: "gaussian" or "tied".
        fitness: "reward", or "random", which generates nothing in training: arithmetic alone.
        settings: as for `train_specs`.
    """
    wanted = {k: settings[k] for k in _EVALUATION + _TRAINING}
    arithmetic = {"dtype": "bfloat16", "precision": precision, "noise": noise, "fitness": fitness}
    return [_spec("audit", base, scale) | arithmetic | wanted | {"seed": seed} for seed in seeds]


def estimator_specs(
    base: str, N: int, repeats: int, fitness: str, targets: str, settings: Mapping[str, Any], scale: str
) -> list[Spec]:
    """Specs of the comparison of single ES steps with the exact gradient, on two-number problems.

    Args:
        N: members.
        repeats: populations drawn.
        fitness: "expected" (of temperature 1, exact) or "greedy".
        targets: "any", or "not the sum": problems that the bases' habit, adding up, does not solve.
        settings: sigma, alpha, estimator_problems.
    """
    wanted = {k: settings[k] for k in ("sigma", "alpha", "estimator_problems")}
    spec = _spec("estimator", base, scale) | wanted | {"fitness": fitness, "targets": targets, "N": N}
    return [spec | {"repeat": repeat} for repeat in range(repeats)]


def _spec(kind: str, base: str, scale: str) -> Spec:
    from evoalign_lib import tiny
    from evoalign_lib.es import load_model

    spec = {"kind": kind, "task": "countdown", "grader": "strict", "base": base, "scale": scale}
    spec["engine_version"] = ENGINE_VERSION
    if base not in _DIGESTS:
        _DIGESTS[base] = base_digest((tiny.load(base) if base in tiny.BASES else load_model(base))[0])
    return spec | {"base_digest": _DIGESTS[base]}


_DIGESTS: dict[str, str] = {}


def _world(spec: Spec) -> tuple[Any, Any, dict[str, list]]:
    """Model, tokenizer and the problems of each split; in the tiny world every step has new training problems."""
    from evoalign_lib import tiny
    from evoalign_lib.es import load_model
    from evoalign_lib.tasks import countdown

    sizes = {name: spec.get(f"{name}_problems", 0) for name in ("validation", "test")}
    if spec["base"] in tiny.BASES:
        model, tokenizer = tiny.load(spec["base"])
        sets = {name: tiny.problems(name, size) for name, size in sizes.items()}
        if spec["kind"] in ("train", "audit"):
            # a branch of the seed tree that no fixed set uses
            seed = np.random.SeedSequence([spec["seed"], 1])
            sets["train"] = tiny.problems("train", spec["steps"] * spec["prompts_per_step"], seed)
        return model, tokenizer, sets
    model, tokenizer = load_model(spec["base"])
    validation = countdown.generate(sizes["validation"], 0, high=99, split="validation")
    test = countdown.load_public("test")[: sizes["test"]]
    return model, tokenizer, {"train": countdown.load_public("train"), "validation": validation, "test": test}


def _accuracy(engine: Any, name: str, problems: Sequence[Any], samples: int, seed: int = 0) -> np.ndarray:
    """Right answers (samples or 1, problems) of the engine's current weights under the strict grader."""
    from evoalign_lib.tasks import countdown

    completions = engine.generate(name, samples=samples, seed=seed)
    return np.array(
        [
            [countdown.grade(text, p.numbers, p.target).answer for (text, _), p in zip(row, problems, strict=True)]
            for row in completions
        ]
    )


def _test(engine: Any, problems: Sequence[Any], samples: int = 16) -> dict[str, Any]:
    """Accuracy on the test set, greedy and at temperature 1 (mean of 16 samples), with the outcome of every problem."""
    from evoalign_lib import stats

    greedy = _accuracy(engine, "test", problems, 0)[0]
    counts = _accuracy(engine, "test", problems, samples).sum(0).astype(int)
    return {
        "n": len(problems),
        "greedy": round(float(greedy.mean()), 6),
        "greedy_bits": stats.pack_bits(greedy.astype(int)),
        "t1": round(float(counts.mean()) / samples, 6),
        "t1_counts": stats.pack_counts(counts),
    }


def _run_base(spec: Spec) -> Record:
    """Accuracy of an untrained base: on the validation set with pass@k, and on the test set."""
    from evoalign_lib import tiny
    from evoalign_lib.engines.local import LocalEngine, Prompts
    from evoalign_lib.tasks import countdown

    model, tokenizer, sets = _world(spec)
    prompts = {name: Prompts(countdown.dataset(sets[name], tokenizer), tokenizer) for name in ("validation", "test")}
    length = spec["max_completion_length"]
    engine = LocalEngine(model, tokenizer, None, prompts, max_completion_length=length)
    test = _test(engine, sets["test"])
    return {"validation": tiny.measure(engine, sets["validation"], "validation"), "test": test}


def _run_train(spec: Spec, keep: Path | None = None) -> Record:
    """One ES run: accuracy on the validation set along the way, on the test set once, at the end.

    keep: where the ledger goes, compressed; None: it is not kept.
    """
    import tempfile

    from evoalign_lib.es import ESTrainer

    model, tokenizer, sets = _world(spec)
    with tempfile.TemporaryDirectory() as folder:
        fitness = {"es": "reward", "es_shuffled": "shuffled"}[spec["arm"]]
        trainer, curve = _trainer(ESTrainer, spec, model, tokenizer, sets, folder, fitness=fitness)
        start = trainer.engine.master.copy()
        trainer.train()
        kept = {} if keep is None else {"ledger": _keep_ledger(trainer, spec["base"], keep)}
    engine = trainer.engine
    moved = np.linalg.norm((engine.master - start).astype(np.float64))
    budget = dict(trainer.budget)
    # a forward pass costs 2 floating-point operations a parameter and token; attention products are left out
    budget["forward_flops"] = 2 * engine.layout.d * (budget["prompt_tokens"] + budget["generated_tokens"])
    budget["core_seconds"] = round(budget["core_seconds"], 2)
    return {
        "budget": budget,
        "counts": dict(trainer.counts),
        "plan": engine.plan,
        "d": engine.layout.d,
        "update_norm": round(float(moved), 6),
        "digest": hashlib.sha256(engine.master.tobytes()).hexdigest()[:16],
        "curve": curve,
        **kept,
        "test": _test(engine, sets["test"]),
    }


def _trainer(
    kind: type, spec: Spec, model: Any, tokenizer: Any, sets: Mapping[str, list], folder: str, **changed: Any
) -> tuple[Any, dict[str, list]]:
    """A trainer for a spec, and the curve that its training fills in: validation accuracy at evenly spaced steps."""
    from transformers import TrainerCallback

    from evoalign_lib.es import ESConfig
    from evoalign_lib.tasks import countdown

    points = set(np.linspace(0, spec["steps"], spec["curve_points"]).round().astype(int).tolist())
    curve: dict[str, list] = {"step": [], "completions": [], "validation_greedy": [], "validation_t1": [], "reward": []}

    class Curve(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            self.on_log(args, state, control)

        def on_log(self, args, state, control, **kwargs):  # after each step, when its reward is known
            step = state.global_step
            if step not in points:
                return
            curve["step"].append(step)
            curve["completions"].append(trainer.budget["completions"])
            for name, samples in (("greedy", 0), ("t1", 4)):
                right = _accuracy(trainer.engine, "validation", sets["validation"], samples, seed=step)
                curve[f"validation_{name}"].append(round(float(right.mean()), 5))
            curve["reward"].append(round(state.log_history[-1]["reward"], 5) if state.log_history else None)

    config = ESConfig(
        output_dir=folder,
        seed=spec["seed"],
        max_steps=spec["steps"],
        max_completion_length=spec["max_completion_length"],
        workers=1,
        disable_tqdm=True,
        report_to="none",
        save_strategy="no",
        **{k: spec[k] for k in ("population_size", "sigma", "alpha", "prompts_per_step")},
        **changed,
    )
    rows = countdown.dataset(sets["train"], tokenizer)
    trainer = kind(model, countdown.reward, config, rows, None, tokenizer, [Curve()])
    for name in ("validation", "test"):
        trainer.engine.add_prompts(name, countdown.dataset(sets[name], tokenizer))
    return trainer, curve


def _run_audit(spec: Spec) -> Record:
    """One ES run of a bfloat16 model, with the arithmetic and the noise of the spec: what became of its updates.

    Of each step: the share of weights that restoring the members changed, and how far (rms); cosine and gain of the
    applied update against the intended one. Of the whole path: the same two, restores included; and the cosine of the
    displacements of two layers' tensors of equal name, which independent noise leaves near 0.
    """
    import tempfile

    import torch

    from evoalign_lib import noise, precision
    from evoalign_lib.es import ESTrainer, coefficients

    model, tokenizer, sets = _world(spec)
    updates: list[tuple[float, float]] = []
    path: dict[str, list] = {"step": [0], "cosine": [None], "gain": [None]}

    class Audited(ESTrainer):
        def tell(self, members, fitness):
            weights, layout = self.engine.weights, self.engine.layout
            before = weights.float32().copy()
            tied = super().tell(members, fitness)
            if not tied:
                step = np.zeros(layout.size, np.float32)
                keys = np.array([m.key for m in members], np.uint64)
                noise.update(step, layout, keys, coefficients(fitness, self.args.alpha), distribution=self.args.noise)
                updates.append(precision.agreement(step, weights.float32() - before))
                self.intended += step
            if (done := self.state.global_step + 1) % max(1, spec["steps"] // 20) == 0:
                applied = weights.float32() - self.start
                # nothing is intended as long as all populations were tied
                found = precision.agreement(self.intended, applied) if self.intended.any() else (None, None)
                path["step"].append(done)
                for name, value in zip(("cosine", "gain"), found, strict=True):
                    path[name].append(value if value is None else round(value, 5))
            return tied

    with tempfile.TemporaryDirectory() as folder:
        changed = {k: spec[k] for k in ("fitness", "precision", "noise")}
        # the noise of the arm "es" whatever the fitness: the very run of section 4, as far as arithmetic lets it be
        audited = Audited, spec, model.to(torch.bfloat16), tokenizer, sets, folder
        trainer, curve = _trainer(*audited, arm="es", **changed)
        trainer.start = trainer.engine.weights.float32().copy()
        trainer.intended = np.zeros(trainer.engine.layout.size)
        trainer.train()
    engine = trainer.engine
    views = engine.layout.views(engine.weights.float32() - trainer.start)
    alike = [
        precision.agreement(view, views[twin])[0]
        for name, view in views.items()
        if view.ndim == 2 and view.any() and (twin := name.replace(".layers.0.", ".layers.1.")) != name
    ]
    log = [entry for entry in trainer.state.log_history if "reward" in entry]
    restores = {
        f"restore_{what}": float(np.mean([entry.get(f"restore_{what}", 0.0) for entry in log]))
        for what in ("changed", "drift")
    }
    audit = restores
    if updates:  # else all populations were tied
        audit |= {"layers_cosine": np.mean(alike)} if alike else {}
        audit |= dict(zip(("update_cosine", "update_gain"), np.mean(updates, axis=0), strict=True))
    result = {"audit": {k: float(f"{v:.6g}") for k, v in audit.items()}, "path": path, "counts": dict(trainer.counts)}
    result |= {"plan": engine.plan, "d": engine.layout.d, "curve": curve}
    return result | ({"test": _test(engine, sets["test"])} if spec["fitness"] == "reward" else {})


def _keep_ledger(trainer: Any, base: str, path: Path) -> dict[str, Any]:
    """Replay a finished run's ledger from the base loaded anew, write it compressed, and describe it."""
    run, source = trainer.ledger, trainer.ledger.path
    error = np.abs(ledger.replay(source, base) - trainer.engine.master).max()
    packed = ledger.pack(source)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"partial-{path.name}")
    with open(partial, "wb") as file:
        file.write(packed)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)  # complete, or not there
    return {
        "bytes": source.stat().st_size,
        "gzip_bytes": len(packed),
        "sha256": hashlib.sha256(packed).hexdigest(),
        "weights": run.weights[len(run.steps)],
        "replay_error": float(error),
    }


def _run_estimator(spec: Spec) -> Record:
    """One ES step against the exact gradient of expected reward (see `geometry`)."""
    objective = _objective(spec["base"], spec["estimator_problems"], spec["targets"])
    arguments = {k: spec[k] for k in ("N", "sigma", "alpha", "repeat", "fitness")}
    result = objective.run(**arguments)
    return {
        "estimator": {k: round(v, 9) if isinstance(v, float) else v for k, v in result.items() if k not in arguments}
    }


@lru_cache(maxsize=2)
def _objective(base: str, n: int, targets: str):
    """The enumeration of a base's completions takes longer than a step: once a process."""
    from evoalign_lib import geometry, tiny
    from evoalign_lib.tasks import countdown

    drawn = countdown.generate(4 * n, 0, split="train", **tiny.PROBLEMS | {"count": 2})
    chosen = [p for p in drawn if targets == "any" or sum(p.numbers) != int(p.target)][:n]
    if len(chosen) < n:
        raise ValueError(f"only {len(chosen)} of {n} two-number problems have targets {targets!r}: ask for fewer.")
    # against 1e-6 the gradient's cosine is 0.99999998, and a step takes a third of the time
    return geometry.ExactObjective(*tiny.load(base), chosen, min_probability=1e-5)


RUNNERS: dict[str, Callable[[Spec], Record]] = {
    "base": _run_base,
    "train": _run_train,
    "audit": _run_audit,
    "estimator": _run_estimator,
}
