"""Scale "real": the declared runs on SmolLM2-135M-Instruct, made by commands that fit ten minutes of a GPU each.

`python -m evoalign_study.real run --minutes 9 --out FOLDER` works through the blocks of `real_plan.BLOCKS` in order of
value and goes on where the committed records, and those in FOLDER, end. `... plan --minutes 9` lists the blocks: what
has a record, what is missing, the seconds that it should take, from recorded times, and what fits. It runs nothing. Of
a block are made, each unless it has a record:

1. the base: test set greedily and at temperatures 0.6 and 1, 16 samples each;
2. in A and B the sweep: settings of ES and of GRPO in turn, one seed, on the validation set only, until each arm has
   tried all or the sweep's share of the time is over; both arms have tried equally many. The best has the highest mean
   of greedy and temperature-1 validation accuracy over the last two points of its curve (`chosen`);
3. rounds, seed by seed: one run of each arm. In A, the first of `Plan.lengths` is taken with which so many seeds fit
   into the time that is left, by recorded times (`length`). A length is a number of ES steps and the share of ES's
   forward FLOPs that GRPO gets;
4. what needs ends of runs: products of all displacements; in A lines between paired ends of ES and GRPO, and of random
   fitness and GRPO, and merges; samples for pass@64.

A run is started only if recorded times say that it will end in time. Each record is written as soon as it is made. Once
a run with a chosen setting is known, the sweep is closed: setting and lengths stay those of the known runs. Ends of
earlier commands come back for 4: those of ES from their ledgers, others by training again, if that gives the recorded
weights on this device.
FOLDER then holds `records.jsonl`, `ledgers.zip` and `device.json`. `python -m evoalign_study.real import FOLDER` checks
them and adds them to the committed records, each to those of the notebook that it belongs to.

`--trial` runs the same code with sizes that mean nothing, at scale smoke, on the CPU.

`--blocks` takes some blocks, and `--arms` some arms, so that two processes can share the work, each with its own
FOLDER. The block "facts on a CPU" (`FACTS`) is run by name only. A repeated command goes on with a killed run of ES
from the steps in its ledger; one of GRPO begins again. CPU and GPU runs have different specs, and are never pooled.
"""

import argparse
import hashlib
import io
import json
import os
import shutil
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from evoalign_lib import arms, files
from evoalign_lib.arms import SWEEP_SEED
from evoalign_lib.checks import require
from evoalign_study import paths, provenance
from evoalign_study.real_plan import BLOCKS, FACTS, Known, Plan, chosen, length, of_ends, score, small
from evoalign_study.records import (
    FINISHED,
    Record,
    Spec,
    append_record,
    ledger_file,
    plain_json,
    read_records,
    record_files,
    record_line,
    spec_hash,
)

NOTEBOOK = {"products": "08_weight_geometry", "path": "09_lmc_analysis", "merge": "08_weight_geometry"}
NOTEBOOK |= {"sampled": "07_solution_coverage"}
"""Kind -> the notebook whose records have it; all other kinds belong to that of their task."""
_OTHERS = {"arithmetic": "02_grpo_countdown", "facts": "03_conciseness"}


def home(spec: Spec) -> str:
    """Return the notebook that a record belongs to."""
    return NOTEBOOK.get(spec["kind"], _OTHERS[spec["task"]])


class Session(Known):
    """One command: what it has made so far, and what time is left.

    Args:
        plans: the blocks to run.
        out: folder for records, ledgers and the device line.
        minutes: time for all of it, from `began` on.
        commit: of the code, where git cannot tell.
        known: records of earlier commands.
        arms: what is run: "base" and arms; empty: all.
        began: `time.monotonic()` at the start of the process.
    """

    def __init__(
        self, plans: Sequence[Plan], out: Path, minutes: float, commit: str, known: Sequence[Record],
        arms: Sequence[str], began: float,
    ):  # fmt: skip
        super().__init__(known)
        self.plans, self.out, self.commit, self.arms = plans, out, commit, arms
        self.minutes, self.began = minutes, began
        self.costs: dict[str, float] = {}  # what is no training -> seconds that the last one took
        self.left_out: list[str] = []
        self.failed: set[tuple[str, str]] = set()  # block and arm of a run that failed, which are not tried again
        self.benches: dict[tuple[str, int], Any] = {}  # by base and adapter
        self.unfinished = out / "unfinished"
        out.mkdir(parents=True, exist_ok=True)

    @property
    def left(self) -> float:
        """Seconds left."""
        return 60 * self.minutes - (time.monotonic() - self.began)

    def say(self, what: str) -> None:
        """Print a line with the seconds since the start."""
        print(f"[{time.monotonic() - self.began:6.1f} s] {what}", flush=True)

    def store(self, spec: Spec, result: Record, wall: float, kept: Path | None = None) -> Record:
        """Write a record, and its ledger, to the folder at once."""
        record = {"spec": spec, "spec_hash": spec_hash(spec), "notebook": home(spec), "commit": self.commit}
        record |= {"status": FINISHED, "environment": provenance.environment("cuda")} | result
        record.setdefault("budget", {})["wall_seconds"] = round(wall, 2)
        if "diverged" in record:
            record = plain_json(json.dumps(record))
        if kept is not None:
            put_in_archive(self.out / "ledgers.zip", f"{record['spec_hash']}.jsonl.gz", kept.read_bytes())
        with open(self.out / "records.jsonl", "a", encoding="utf-8") as file:
            file.write(record_line(record))
            file.flush()
            os.fsync(file.fileno())
        self.records[record["spec_hash"]] = record
        return record

    def attempt(self, what: str, make: Callable[[], Any]) -> Any:
        """Return what a function makes; None if it fails: other runs go on, since a GPU is lent for minutes only.

        The error is printed, and its message stands in the device file.
        """
        try:
            return make()
        except Exception as error:
            self.say(f"{what} FAILED\n{traceback.format_exc()}")
            self.left_out.append(f"{what} failed: {type(error).__name__}: {error}")
            return None

    def train(self, spec: Spec, reserve: float) -> Record | None:
        """Return the record of a run, trained now unless there is one; None if it would not end in time."""
        if (known := self.has(spec)) is not None:
            return known
        arm, name = spec["arm"], f"{self.plan.name}: {spec['arm']} seed {spec['seed']}"
        if (self.plan.name, arm) in self.failed or self.arms and arm not in self.arms:
            return None
        if self.expected(spec) > self.left - reserve:
            self.say(f"no time for {name}")
            self.left_out.append(name)
            return None
        began, keep, es = time.monotonic(), self.out / ".ledger", arms.get(arm).family == "es"

        def make() -> Record:
            result = self.bench.trained(spec, keep if es else None)
            return self.store(spec, result, time.monotonic() - began, keep if keep.exists() else None)

        record = self.attempt(name, make)
        keep.unlink(missing_ok=True)
        if record is not None:
            shutil.rmtree(self.unfinished / record["spec_hash"], ignore_errors=True)
        if record is None:
            self.failed |= {(self.plan.name, arm)} if spec["seed"] < SWEEP_SEED else set()
            return None
        told = _tested(record) if "test" in record else score(record)
        wall, step, rest = (record["budget"][f"{part}_seconds"] for part in ("wall", "step", "rest"))
        self.say(f"{name}: {wall:.1f} s, {step:.3f} s a step and {rest:.1f} s; {told}")
        return record

    def timed(self, what: str, make: Callable[[], Any], expected: float = 0.0) -> bool:
        """Return whether something was made: there was time for as long as the last took, and it did not fail.

        expected: seconds of the first.
        """
        if self.costs.get(what, expected) > self.left:
            self.left_out.append(f"{self.plan.name}: {what}")
            return False
        began = time.monotonic()
        if self.attempt(what, lambda: (make(),)) is None:
            return False
        self.costs[what] = time.monotonic() - began
        self.say(f"{what}: {self.costs[what]:.1f} s")
        return True

    def measure(self, spec: Spec) -> None:
        """Make a record of ends' weights, if there is time."""
        bench, kind, began = self.bench, spec["kind"], time.monotonic()
        make = {"products": bench.products, "path": bench.path, "merge": bench.merged, "sampled": bench.sampled}[kind]
        self.timed(kind, lambda: self.store(spec, make(spec), time.monotonic() - began), self.expected(spec))

    def restore(self, runs: Sequence[Record]) -> None:
        """Bring back ends of one arm's runs; no more of them once one does not come back as recorded."""
        what = f"end of {runs[0]['spec']['arm']} that comes back"
        if sum(map(self.back, runs)) > self.left - self.plan.reserve:
            self.left_out.append(f"{self.plan.name}: {len(runs)} x {what}")
        else:
            all(self.timed(what, partial(self._brought, run)) for run in runs)

    def _brought(self, run: Record) -> None:
        if arms.get(run["spec"]["arm"]).family != "es":
            return self.bench.again(run)
        here, name = self.out / "ledgers.zip", f"{run['spec_hash']}.jsonl.gz"
        kept = here.is_file() and name in zipfile.ZipFile(here).namelist()
        with tempfile.TemporaryDirectory() as place:
            return self.bench.replayed(run, _ledger(run, self.out, Path(place)) if kept else ledger_file(run))

    # ---- the list

    def work(self) -> None:
        """Work through the blocks; one that fails does not end the others, unless the base cannot be loaded."""
        for plan in self.plans:
            missing = self.missing(plan) or self.unmeasured(plan)
            if missing and min(map(self.expected, missing)) > self.left:
                self.left_out.append(f"{plan.name}: no time")
            elif missing:
                if not self.benches:
                    self.open(plan)
                self.attempt(f"block {plan.name}", partial(self.block, plan))

    def open(self, plan: Plan) -> None:
        """Turn to a block: load its base and problems, unless another block has the same."""
        from evoalign_study.real_runs import Bench

        later = self.plans[self.plans.index(plan) :]
        keys = [(spec_hash(each.of_base), each.lora_rank) for each in later]
        self.benches = {key: bench for key, bench in self.benches.items() if key in keys}  # others fill the memory
        if keys[0] not in self.benches:
            self.benches[keys[0]] = Bench(plan.of_base, plan.device, self.unfinished, plan.lora_rank)
        self.plan, self.bench = plan, self.benches[keys[0]]
        self.bench.keeps = {arm for each, key in zip(later, keys, strict=True) if key == keys[0] for arm in each.ends}

    def block(self, plan: Plan) -> None:
        """Make what is missing of a block.

        Raises:
            ValueError: known runs have another setting than its sweep chose.
        """
        self.open(plan)
        begun, began = plan.of_base, time.monotonic()
        self.say(f"block {plan.name}: {plan.base} is on {plan.device}")
        if self.has(begun) is None and (not self.arms or "base" in self.arms):
            self.store(begun, self.bench.untrained(begun), time.monotonic() - began)
        if (wanted := self.settled(plan)) is None:
            es, grpo = self.sweep()
            wanted = self.settled(plan) if plan.steps else self.rounds(es, grpo) if es else None
        if wanted is None:
            self.left_out.append(f"{plan.name}: all runs, since its sweep is not complete")
            return
        for run in self.finals(plan):
            of, setting = run["spec"]["arm"], wanted.get(run["spec"]["arm"], ({}, 0))[0]
            what = f"known runs of {of} do not have {setting}, which the sweep chose: remove one or the other."
            require(setting.items() <= run["spec"].items(), what)
        for spec in plan.rounds(wanted):
            self.train(spec, plan.reserve)
        self.of_weights()

    def sweep(self) -> tuple[list[Record], list[Record]]:
        """Make the sweep; return the records of ES and of GRPO, equally many.

        If no pair is complete, because an arm fails, those of the other arm are returned.
        """
        plan, made, closed = self.plan, [], bool(self.finals(self.plan))
        least = self.left - plan.sweep_share * 60 * self.minutes
        for pair in plan.sweep:
            if closed:
                made.append([self.has(spec) for spec in pair])
                continue
            new = [spec for spec in pair if self.has(spec) is None]
            if self.left - sum(map(self.expected, new)) < least:
                self.left_out.append(f"{plan.name}: {len(plan.sweep) - len(made)} settings an arm of the sweep")
                break
            made.append([self.train(spec, 0.0) for spec in pair])
        whole = [pair for pair in made if all(pair)] or made
        es, grpo = ([record for pair in whole if (record := pair[i]) is not None] for i in (0, 1))
        return es, grpo

    def rounds(self, es: Sequence[Record], grpo: Sequence[Record]) -> dict[str, tuple[Mapping[str, float], int]]:
        """Return arm -> setting and steps of the runs, with the settings that the sweep chose and steps that fit."""
        plan = self.plan
        best, other = chosen(es), chosen(grpo) if grpo else None

        def cost(steps: int, others: int) -> float:
            one = replace(plan, seeds=1).rounds(plan.wanted(best, other, (steps, others)))
            return sum(map(self.expected, one))

        known = {run["spec"]["steps"] for run in self.finals(plan, "es", "es_random")}
        lengths = tuple(each for each in plan.lengths if not known or each[1] in known)
        of_step = [r["budget"]["forward_flops"] / r["spec"]["steps"] for r in (es[-1], *grpo[-1:])]
        steps = length(replace(plan, lengths=lengths), self.left - plan.reserve, cost, of_step[0] / of_step[-1])
        self.say(f"ES {best}, {steps[0]} steps; GRPO {other}, {steps[1]} steps; {self.left:.0f} s left")
        return plan.wanted(best, other, steps)

    def of_weights(self) -> None:
        """Make the records of ends that are missing; ends of earlier commands come back for them."""
        runs = {arm: self.finals(self.plan, arm) for arm in self.plan.ends}
        missing = [spec for spec in of_ends(self.plan, runs) if self.has(spec) is None]
        needed = {digest for spec in missing for digest in digests(spec)} - self.bench.ends.keys()
        for records in runs.values():
            if gone := [run for run in records if run["digest"] in needed]:
                self.restore(gone)
        for spec in missing:
            if digests(spec) <= self.bench.ends.keys():
                self.measure(spec)
            else:
                self.left_out.append(f"{self.plan.name}: {spec['kind']}: an end of an earlier command is not here")

    def finish(self) -> None:
        """Add this command to those in the device file: the machine, the plan, times, and what was left out."""
        seconds = round(time.monotonic() - self.began, 1)
        told = provenance.environment("cuda") | {"seconds": seconds, "minutes": self.minutes}
        told |= {"blocks": [plan.name for plan in self.plans], "costs": self.costs}
        told |= {"left_out": self.left_out, "commit": self.commit}
        path = self.out / "device.json"
        files.replace_text(path, json.dumps([*read_commands(path), told], indent=1) + "\n")
        self.say(f"done; left out: {'; '.join(self.left_out) or 'nothing'}")


def _tested(record: Record) -> dict[str, float]:
    return {name: record["test"][name] for name in ("greedy", "t0.6", "t1")}


def put_in_archive(path: Path, name: str, data: bytes) -> None:
    """Add a file to a zip archive, in place of one of that name; a kill leaves the old archive or the new one."""
    held = {}
    if path.is_file():
        with zipfile.ZipFile(path) as packed:
            held = {each: packed.read(each) for each in packed.namelist()}
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as packed:
        for each, content in (held | {name: data}).items():
            packed.writestr(each, content)
    files.replace_bytes(path, written.getvalue(), sync=True)


def digests(spec: Any) -> set[str]:
    """Return the digests of all ends that a spec of products, a line or a merge names."""
    if not isinstance(spec, Mapping):
        return set()
    return set(spec.get("digests", ())).union(*map(digests, spec.values()))


def read_commands(path: Path) -> list[dict[str, Any]]:
    """Return the commands in a device file; none if there is no such file. The first such files hold a single one."""
    told = json.loads(path.read_text()) if path.is_file() else []
    return told if isinstance(told, list) else [told]


def committed(plan: Plan) -> list[Record]:
    """Return the committed records of a plan's scale."""
    return [record for path in record_files(plan.scale) for record in read_records(path)]


def checked(out: Path) -> Iterator[tuple[Record, Path | None]]:
    """Yield the records in a folder, each with its unpacked ledger, once all of them have passed.

    Raises:
        ValueError: no records; one that no block declares, or not made on its device; seeds with another setting than
            the sweep chose, or of another length than others; products, a line, a merge or samples of ends that no run
            has; a record of another notebook; a ledger that is missing or not the recorded one. Runs and sweep may be
            committed ones.
    """
    found, plans = read_records(out / "records.jsonl"), (*BLOCKS, FACTS)
    require(found, f"{out} holds no records.jsonl: run `python -m evoalign_study.real run --out {out}` first.")
    known = Known([*committed(plans[0]), *found])
    ends, declared = {r.get("digest") for r in known.records.values()}, set()
    for plan in plans:
        specs, swept = [plan.of_base], [spec for pair in plan.sweep for spec in pair] if plan.swept else []
        for name in ("es", "grpo") if swept else ():
            tried = [r for spec in swept if spec["arm"] == name and (r := known.has(spec)) is not None]
            runs = known.finals(plan, *(arm for arm in plan.arms if (arm == "grpo") == (name == "grpo")))
            mine = [r for r in runs if r in found]
            where = f"{out}, record {mine[0]['spec_hash']}" if mine else ""
            require(tried or not mine, f"{where}: the folder and the committed records lack the sweep of {name}.")
            steps = sorted({run["spec"]["steps"] for run in runs})
            differ = f"{where}: runs of {name}, committed ones included, have {steps} steps."
            require(len(steps) <= 1 or not mine, differ)
            specs += [plan.run(r["spec"]["arm"], r["spec"]["seed"], chosen(tried), steps[0]) for r in runs if tried]
        declared |= set(map(spec_hash, (*specs, *swept, *([] if swept else plan.rounds(plan.first)))))
    for record in found:
        spec, where = record["spec"], f"{out}, record {record['spec_hash']}"
        of_known = spec["kind"] in NOTEBOOK and digests(spec) <= ends
        of_known = (record["spec_hash"] in declared or of_known) and spec["scale"] == plans[0].scale
        require(of_known, f"{where} is not what the blocks and their sweeps declare.")
        device = record["environment"]["device"]
        require((" x " in device) == ("device" not in spec), f"{where} was made on {device}.")
        filed = f"{where} is filed under {record['notebook']}, not {home(spec)}: copy the whole folder again."
        require(record["notebook"] == home(spec), filed)
        evolved = spec["kind"] == "train" and arms.get(spec["arm"]).family == "es"
        require("ledger" in record or not evolved, f"{where}, of ES, names no ledger: copy the whole folder again.")
    with tempfile.TemporaryDirectory() as place:
        kept = {record["spec_hash"]: _ledger(record, out, Path(place)) for record in found if "ledger" in record}
        for record in found:
            yield record, kept.get(record["spec_hash"])


def _ledger(record: Record, out: Path, place: Path) -> Path:
    """Unpack a record's ledger, and check its chain of lines. Raises ValueError if it is not the recorded one."""
    from evoalign_lib import ledger

    name = f"{record['spec_hash']}.jsonl.gz"
    with zipfile.ZipFile(out / "ledgers.zip") as packed:
        require(name in packed.namelist(), f"{out}/ledgers.zip lacks {name}: copy the whole folder.")
        data = packed.read(name)
    other = f"{name} in {out}/ledgers.zip is not the ledger that was recorded: copy the folder again."
    require(hashlib.sha256(data).hexdigest() == record["ledger"]["sha256"], other)
    (place / name).write_bytes(data)
    run = ledger.read(place / name)
    steps, last = len(run.steps), run.weights.get(len(run.steps))
    require(steps == record["spec"]["steps"], f"{name} has {steps} steps, its record {record['spec']['steps']}.")
    require(last == record["ledger"]["weights"], f"{name} ends with the weights {last}, its record with others.")
    return place / name


def opened(out: Path | None, blocks: Sequence[str], trial: bool, plan: str) -> tuple[list[Plan], list[Record]]:
    """Return the blocks of these names, all if there are none, and known records; arguments as on the command line.

    Raises ValueError for changes to a plan without a trial, or to what it lacks, and for a folder of another scale.
    """
    changes = {name: _tuples(value) for name, value in json.loads(plan).items()}
    require(trial or not changes, "--plan is for --trial alone: the declared plan stands in the code.")
    unknown = sorted(changes.keys() - {each.name for each in fields(Plan)})
    require(not unknown, f"--plan has {unknown}, which no block has: use the fields of `real_plan.Plan`.")
    plans = [plan for plan in (*BLOCKS, FACTS) if plan.name in blocks] if blocks else [*BLOCKS]
    plans = [replace(small(plan), **changes) for plan in plans] if trial else plans
    made = read_records(out / "records.jsonl") if out else []
    others = {record["spec"]["scale"] for record in made} - {plan.scale for plan in plans}
    require(not others, f"{out} holds records of scale {others}, not {plans[0].scale}: name another folder with --out.")
    return plans, ([] if trial else committed(plans[0])) + made


def run(out: Path, minutes: float, commit: str, arms: Sequence[str], began: float, **which: Any) -> None:
    """Make the runs that are missing, in order of value, until the time is over; arguments as on the command line."""
    plans, known = opened(out, **which)
    session = Session(plans, out, minutes, commit or provenance.commit(), known, arms, began)
    try:
        session.work()
    except Exception as error:  # `main` prints the message alone, and the device may be gone when it is read
        traceback.print_exc()
        session.left_out.append(f"all that follows: {type(error).__name__}: {error}")
        raise
    finally:
        session.finish()


def show(out: Path | None, minutes: float, **which: Any) -> None:
    """Print the blocks, what has a record, what is missing, its seconds, and what fits; arguments as for `run`."""
    plans, known = opened(out, **which)
    print("\n".join(Known(known).told(plans, minutes)))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def take(folder: Path) -> None:
    """Check the records and ledgers of a folder, and add them to the committed records of their notebooks.

    Its commands, with what each left out, are added to `real.device.json` beside the records of the runs.
    """
    for record, kept in checked(folder):
        path = paths.RESULTS / record["notebook"] / f"{record['spec']['scale']}.jsonl"
        append_record(path, record, kept)
        print(f"{record['spec_hash']} {record['spec']['kind']} {record['spec'].get('arm', '')} -> {path}")
    spec = read_records(folder / "records.jsonl")[0]["spec"]
    path = paths.RESULTS / _OTHERS[spec["task"]] / f"{spec['scale']}.device.json"
    told = read_commands(path)
    told += [command for command in read_commands(folder / "device.json") if command not in told]
    files.replace_text(path, json.dumps(told, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; an error that says what to do is printed without a traceback."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m evoalign_study.real", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True, dest="command")
    running = commands.add_parser("run", help="make the runs that are missing")
    running.add_argument("--out", type=Path, required=True, help="folder for records, ledgers and the device line")
    running.add_argument("--commit", default="", help="commit of the code, where git cannot tell")
    every = ["base", *dict.fromkeys(arm for plan in BLOCKS for arm in plan.arms)]
    running.add_argument("--arms", nargs="+", choices=every, default=[], help="what this process runs; all by default")
    listing = commands.add_parser("plan", help="show the blocks, what is missing, and what fits; runs nothing")
    listing.add_argument("--out", type=Path, help="folder of an earlier command, whose records count, too")
    for each in (running, listing):
        each.add_argument("--minutes", type=float, default=9.0, help="time for all of it, loading included")
        each.add_argument("--trial", action="store_true", help="sizes that mean nothing, on the CPU, at scale smoke")
        named = [plan.name for plan in (*BLOCKS, FACTS)]
        each.add_argument("--blocks", nargs="+", choices=named, default=[], help="some blocks, not all in turn")
        each.add_argument("--plan", default="{}", help='changes to the blocks of a trial as JSON, such as {"seeds": 1}')
    commands.add_parser("import", help="add them to the committed records").add_argument("folder", type=Path)
    given = vars(parser.parse_args(arguments))
    try:
        command = {"run": partial(run, began=began), "plan": show, "import": take}[given.pop("command")]
        command(**given)
    except (ValueError, OSError) as error:
        raise SystemExit(f"{error}") from error


if __name__ == "__main__":
    main()
