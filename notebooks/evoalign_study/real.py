"""Scale "real": the declared runs on SmolLM2-135M-Instruct, made by one command that fits ten minutes of a GPU.

`python -m evoalign_study.real run --minutes 9 --out FOLDER` works through the runs of `Plan` in order of value:

1. the base: test set greedily and at temperatures 0.6 and 1, 16 samples each;
2. the sweep: settings of ES and of GRPO in turn, one seed, on the validation set only, until each arm has tried all or
   the sweep's share of the time is over; both arms have tried equally many. The best has the highest mean of greedy and
   temperature-1 validation accuracy over the last two points of its curve (`chosen`);
3. rounds, seed by seed: ES, GRPO, ES with random fitness. Of `Plan.lengths` the first is taken with which so many seeds
   fit into the time that is left, by the times measured in the sweep (`length`). A length is a number of ES steps and
   the share of ES's forward FLOPs that GRPO gets;
4. products of all displacements; lines between paired ends of ES and GRPO, and of random fitness and GRPO; merges.

A run is started only if its measured cost says that it will end in time. Each record is written as soon as it is made,
and a repeated command goes on from the records in FOLDER and the committed ones. Once a run with a chosen setting is
known, the sweep is closed: setting and lengths stay those of the known runs. Ends of earlier commands come back for 4:
those of ES from their ledgers, those of GRPO by training again, if that gives the recorded weights on this device.
FOLDER then holds `records.jsonl`, `ledgers.zip` and `device.json`. `python -m evoalign_study.real import FOLDER` checks
them and adds them to the committed records, each to those of the notebook that it belongs to.

`--trial` runs the same code with sizes that mean nothing, at scale smoke, on the CPU.

`--task facts` makes the runs of `FACTS` instead, on the CPU: short facts, rewarded for length alone, with task A's
settings (those above) and declared lengths, without a sweep and without 4. `--arms` takes some of them, so that two
processes can share the work, each with its own FOLDER. A repeated command goes on with a killed run of ES from the
steps in its ledger; one of GRPO begins again. CPU and GPU runs have different specs, and are never pooled.
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
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from evoalign_lib import files, smollm2
from evoalign_lib.arms import SWEEP_SEED
from evoalign_lib.checks import require
from evoalign_lib.tasks.arithmetic import MAX_COMPLETION_LENGTH
from evoalign_study import paths, provenance
from evoalign_study.kinds.decode import base_specs
from evoalign_study.kinds.train import train_specs
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
"""Kind -> the notebook whose records have it; all other kinds belong to that of their task."""
_OTHERS = {"arithmetic": "02_grpo_countdown", "facts": "03_conciseness"}
TRAINED = ("es", "grpo", "es_random")
"""The arms, in the order of a round."""


@dataclass(frozen=True)
class Plan:
    """What is run, and at which sizes. A record's spec has all that determines its result."""

    scale: str = "real"
    base: str = smollm2.NAME
    device: str = "cuda"
    dtype: str = "bfloat16"
    """of decoding, in ES and in all measurements"""
    task: str = "arithmetic"
    operation: str = "*"
    """of arithmetic"""
    validation_problems: int = 100
    test_problems: int = 355
    """all that there are"""
    max_completion_length: int = MAX_COMPLETION_LENGTH
    population_size: int = 30
    es_prompts: int = 64
    """prompts of an ES step; greedy decoding"""
    grpo_prompts: int = 16
    num_generations: int = 16
    curve_points: int = 7
    es_sweep: tuple[tuple[float, float], ...] = ((0.002, 0.001), (0.001, 0.0005), (0.002, 0.002), (0.001, 0.001))
    """sigma and alpha; the second pair is that of Qiu et al. (arXiv 2509.24372)"""
    grpo_sweep: tuple[float, ...] = (1e-5, 3e-5, 3e-6, 1e-4)
    """learning rates of AdamW; there is no KL penalty"""
    sweep_steps: tuple[int, int] = (25, 35)
    """of ES and of GRPO"""
    sweep_share: float = 0.22
    """of all minutes"""
    lengths: tuple[tuple[int, int, float], ...] = (
        *((6, 100, 1.0), (6, 80, 1.0), (6, 60, 1.0), (6, 60, 0.5), (6, 50, 0.5), (6, 40, 0.5)),
        *((4, 100, 1.0), (4, 80, 1.0), (4, 60, 1.0), (4, 60, 0.5), (4, 40, 0.5)),
    )
    """seeds, ES steps, and GRPO's forward FLOPs as a share of ES's, best first: the first that fits is taken"""
    steps: tuple[int, int] | None = None
    """of ES and of GRPO, each with the only setting of its sweep, which is then not made; None: by `lengths`"""
    seeds: int = 6
    """at most"""
    path_points: int = 5
    reserve: float = 40.0
    """seconds kept for products, lines and merges"""

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that all runs share."""
        names = ("validation_problems", "test_problems", "max_completion_length", "curve_points")
        own: dict[str, Any] = {"curve_spacing": "log", "operation": self.operation}
        own = own if self.task == "arithmetic" else {"sampled_at": [0.6]}
        return {"task": self.task} | own | {name: getattr(self, name) for name in names}

    def _made(self, spec: Spec, **more: Any) -> Spec:
        where = {} if self.device == "cuda" else {"device": self.device}
        return spec | {"engine": "cuda", "dtype": self.dtype} | where | more

    @property
    def of_base(self) -> Spec:
        """The spec of the untrained base."""
        asked = {k: v for k, v in self.settings.items() if not k.startswith(("curve", "sampled"))}
        return self._made(base_specs([self.base], asked, self.scale)[0])

    def run(self, arm: str, seed: int, setting: Mapping[str, float], steps: int, **changed: Any) -> Spec:
        """Return the spec of a run."""
        own: dict[str, Any] = {"population_size": self.population_size, "prompts_per_step": self.es_prompts}
        if arm == "grpo":
            own = {"num_generations": self.num_generations, "prompts_per_step": self.grpo_prompts, "beta": 0.0}
        asked = self.settings | own | {"steps": steps} | dict(setting) | changed
        products = {"products": "tf32" if self.device == "cuda" else "float32"} if arm == "grpo" else {}
        return self._made(*train_specs(arm, [self.base], [seed], asked, self.scale), **products)

    @property
    def wanted(self) -> dict[str, tuple[dict[str, float], int]]:
        """Arm -> setting and steps of the runs of a plan with `steps`."""
        ((sigma, alpha),), (rate,), (steps, others) = self.es_sweep, self.grpo_sweep, self.steps or (0, 0)
        es = {"sigma": sigma, "alpha": alpha}, steps
        return {"es": es, "grpo": ({"learning_rate": rate}, others), "es_random": es}

    @property
    def sweep(self) -> list[tuple[Spec, Spec]]:
        """The specs of the sweep: a setting of ES and one of GRPO in turn."""
        (steps, others), how = self.sweep_steps, {"test_problems": 0}
        es = [self.run("es", SWEEP_SEED, {"sigma": s, "alpha": a}, steps, **how) for s, a in self.es_sweep]
        grpo = [self.run("grpo", SWEEP_SEED, {"learning_rate": rate}, others, **how) for rate in self.grpo_sweep]
        return list(zip(es, grpo, strict=True))


TRIAL = Plan(
    scale="smoke",
    device="cpu",
    dtype="float32",
    validation_problems=2,
    test_problems=2,
    max_completion_length=3,
    population_size=2,
    es_prompts=2,
    grpo_prompts=1,
    num_generations=2,
    curve_points=3,
    es_sweep=((0.002, 0.001), (0.001, 0.0005)),
    grpo_sweep=(1e-5, 3e-5),
    sweep_steps=(2, 2),
    sweep_share=0.9,
    lengths=((2, 2, 1.0),),
    seeds=2,
    path_points=3,
    reserve=0.0,
)
"""Sizes that mean nothing, for the CPU."""

FACTS = Plan(
    task="facts",
    device="cpu",
    validation_problems=32,
    test_problems=64,
    max_completion_length=20,
    es_prompts=32,
    grpo_prompts=8,
    num_generations=8,
    curve_points=6,
    es_sweep=((0.002, 0.001),),
    grpo_sweep=(3e-5,),
    steps=(24, 12),
    seeds=2,
)
"""Facts rewarded for length, on a CPU: settings are those that the sweep on products chose, by right answers.

Before training the rewards of split A were -60 greedily, -63 at .6 and -72 at temperature 1 (seen before the runs).
"""


def score(record: Record) -> float:
    """Return the validation accuracy by which a sweep ranks: mean of both decodings over the last two points."""
    return float(np.mean([record["curve"][f"validation_{decoding}"][-2:] for decoding in ("greedy", "t1")]))


def chosen(records: Sequence[Record]) -> dict[str, float]:
    """Return the best setting of a sweep; of equal scores, the one tried first."""
    best = max(records, key=score)["spec"]
    return {name: best[name] for name in ("sigma", "alpha", "learning_rate") if name in best}


def _tested(record: Record) -> dict[str, float]:
    return {name: record["test"][name] for name in ("greedy", "t0.6", "t1")}


def length(plan: Plan, left: float, cost: Callable[[int, int], float], ratio: float) -> Sequence[int]:
    """Return the numbers of steps of ES and of GRPO: the first of `Plan.lengths` that fits, else the last.

    Args:
        plan: the plan.
        left: seconds left for the rounds.
        cost: (ES steps, GRPO steps) -> seconds of a round.
        ratio: GRPO steps that cost as many FLOPs as a step of ES.
    """
    every = [(seeds, steps, max(1, int(steps * share * ratio))) for seeds, steps, share in plan.lengths]
    fitting = [each for each in every if each[0] * cost(*each[1:]) <= left]
    taken = next(iter(fitting), every[-1])
    print(f"lengths for {taken[0]} seeds{'' if fitting else ', which do not fit'}: {taken[1]} and {taken[2]} steps")
    return taken[1:]


class Session:
    """One command: what it has made so far, and what time is left.

    Args:
        plan: what to run.
        out: folder for records, ledgers and the device line.
        minutes: time for all of it, from `began` on.
        commit: of the code, where git cannot tell.
        known: records of earlier commands.
        arms: what is run, of a plan with `steps`: "base" and arms.
        began: `time.monotonic()` at the start of the process.
    """

    def __init__(
        self, plan: Plan, out: Path, minutes: float, commit: str, known: Sequence[Record], arms: Sequence[str],
        began: float,
    ):  # fmt: skip
        self.plan, self.out, self.commit, self.arms = plan, out, commit, arms
        self.minutes, self.began = minutes, began
        self.records = {record["spec_hash"]: record for record in known}
        self.costs: dict[str, float] = {}  # what is no training -> seconds that the last one took
        self.tested = 0.0  # seconds of a test
        self.left_out: list[str] = []
        self.failed: set[str] = set()  # arms of which a run failed after the sweep, which are not tried again
        out.mkdir(parents=True, exist_ok=True)
        from evoalign_study.real_runs import Bench

        self.unfinished = out / "unfinished" if plan.steps else None
        self.bench = Bench(plan.of_base, plan.device, self.unfinished)
        self.say(f"{plan.base} is on {plan.device}")

    @property
    def left(self) -> float:
        """Seconds left."""
        return 60 * self.minutes - (time.monotonic() - self.began)

    def say(self, what: str) -> None:
        """Print a line with the seconds since the start."""
        print(f"[{time.monotonic() - self.began:6.1f} s] {what}", flush=True)

    def has(self, spec: Spec) -> Record | None:
        """Return the record of a spec, if there is one."""
        return self.records.get(spec_hash(spec))

    def store(self, spec: Spec, result: Record, wall: float, kept: Path | None = None) -> Record:
        """Write a record, and its ledger, to the folder at once."""
        notebook = NOTEBOOK.get(spec["kind"], _OTHERS[spec["task"]])
        record = {"spec": spec, "spec_hash": spec_hash(spec), "notebook": notebook, "commit": self.commit}
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

    def finals(self) -> list[Record]:
        """Return the records of all runs with a chosen setting."""
        return [r for arm in TRAINED for r in self.of_arm(arm) if r["spec"]["seed"] < SWEEP_SEED]

    def of_arm(self, arm: str) -> list[Record]:
        """Return the records of all runs of an arm, those of the sweep included."""
        every = self.records.values()
        return [r for r in every if r["spec"]["kind"] == "train" and r["spec"]["arm"] == arm]

    def cost(self, arm: str) -> tuple[float, float]:
        """Return the seconds of a step, and of all else, of an arm's last known run; 0 if none is known.

        The oldest records have the whole time only, which then counts as that of the steps.
        """
        runs = self.of_arm(arm)
        if not runs and arm == "es_random":  # a walk decodes nothing: a tenth of ES is more than its steps take
            step, rest = self.cost("es")
            return 0.1 * step, rest
        if not runs:
            return 0.0, 0.0
        spec, spent = runs[-1]["spec"], runs[-1]["budget"]
        step = spent.get("step_seconds", spent["wall_seconds"] / spec["steps"])
        return step, spent.get("rest_seconds", 0.0) + (0.0 if spec["test_problems"] else self.tested)

    def expected(self, arm: str, steps: int) -> float:
        """Return the seconds that a run with a test will take."""
        step, rest = self.cost(arm)
        return steps * step + rest

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
        arm, name = spec["arm"], f"{spec['arm']} seed {spec['seed']}, {spec['steps']} steps"
        if arm in self.failed:
            return None
        if self.expected(arm, spec["steps"]) > self.left - reserve:
            self.say(f"no time for {name}")
            self.left_out.append(name)
            return None
        began, keep = time.monotonic(), self.out / ".ledger"

        def make() -> Record:
            result = self.bench.trained(spec, None if arm == "grpo" else keep)
            return self.store(spec, result, time.monotonic() - began, keep if keep.exists() else None)

        record = self.attempt(name, make)
        keep.unlink(missing_ok=True)
        if record is not None and self.unfinished:
            shutil.rmtree(self.unfinished / record["spec_hash"], ignore_errors=True)
        if record is None:
            self.failed |= {arm} if spec["seed"] < SWEEP_SEED else set()
            return None
        told = _tested(record) if "test" in record else score(record)
        wall, (step, rest) = record["budget"]["wall_seconds"], self.cost(arm)
        self.say(f"{name}: {wall:.1f} s, {step:.3f} s a step and {rest:.1f} s; {told}")
        return record

    def timed(self, what: str, make: Callable[[], Any]) -> bool:
        """Return whether something was made: there was time for as long as the last took, and it did not fail."""
        if self.costs.get(what, 0.0) > self.left:
            self.left_out.append(what)
            return False
        began = time.monotonic()
        if self.attempt(what, lambda: (make(),)) is None:
            return False
        self.costs[what] = time.monotonic() - began
        self.say(f"{what}: {self.costs[what]:.1f} s")
        return True

    def measure(self, spec: Spec, made: str) -> None:
        """Make a record of ends' weights, if there is time."""
        began, make = time.monotonic(), getattr(self.bench, made)
        self.timed(made, lambda: self.store(spec, make(spec), time.monotonic() - began))

    def restore(self, runs: Sequence[Record]) -> None:
        """Bring back ends of one arm's runs; no more of them once one does not come back as recorded."""
        if runs[0]["spec"]["arm"] != "grpo":
            with tempfile.TemporaryDirectory() as place:
                all(self.timed("end from its ledger", partial(self._replay, run, Path(place))) for run in runs)
        elif self.expected("grpo", runs[0]["spec"]["steps"]) * len(runs) > self.left - self.plan.reserve:
            self.left_out.append(f"{len(runs)} ends of GRPO, trained again")
        else:
            all(self.timed("end trained again", partial(self.bench.again, run)) for run in runs)

    def _replay(self, run: Record, place: Path) -> None:
        here, name = self.out / "ledgers.zip", f"{run['spec_hash']}.jsonl.gz"
        kept = here.is_file() and name in zipfile.ZipFile(here).namelist()
        self.bench.replayed(run, _ledger(run, self.out, place) if kept else ledger_file(run))

    # ---- the list

    def work(self) -> None:
        """Work through the list."""
        began, spec = time.monotonic(), self.plan.of_base
        if (base := self.has(spec)) is None and "base" in self.arms:
            base = self.store(spec, self.bench.untrained(spec), time.monotonic() - began)
        if self.plan.steps:
            self.made(self.plan.wanted)
            return
        again = time.monotonic()  # without capturing graphs, unless the record was there already
        self.bench.tested()
        self.tested = time.monotonic() - again
        self.say(f"base: {_tested(base)}; {self.tested:.1f} s a test")
        es, grpo = self.sweep()
        if es:
            self.of_weights(self.rounds(es, grpo))

    def sweep(self) -> tuple[list[Record], list[Record]]:
        """Make the sweep, or read it once it is closed; return the records of ES and of GRPO, equally many.

        If no pair is complete, because an arm fails, those of the other arm are returned.
        """
        made: list[list[Record | None]] = []
        least, closed = self.left - self.plan.sweep_share * 60 * self.minutes, bool(self.finals())
        for pair in self.plan.sweep:
            if closed:
                made.append([self.has(spec) for spec in pair])
                continue
            new = [spec for spec in pair if self.has(spec) is None]
            if self.left - sum(self.expected(spec["arm"], spec["steps"]) for spec in new) < least:
                self.left_out.append(f"{len(self.plan.sweep) - len(made)} settings an arm of the sweep")
                break
            made.append([self.train(spec, 0.0) for spec in pair])
        whole = [pair for pair in made if all(pair)] or made
        es, grpo = ([record for pair in whole if (record := pair[i]) is not None] for i in (0, 1))
        return es, grpo

    def rounds(self, es: Sequence[Record], grpo: Sequence[Record]) -> dict[str, list[Record]]:
        """Make the rounds with the settings that the sweep chose; return arm -> its runs, known ones included.

        Raises:
            ValueError: known runs have another setting.
        """
        plan, best, other = self.plan, chosen(es), chosen(grpo) if grpo else None
        known = {record["spec"]["arm"]: record["spec"] for record in self.finals()}
        for arm, setting in {"es": best, "es_random": best, "grpo": other or {}}.items():
            same = arm not in known or setting.items() <= known[arm].items()
            require(same, f"known runs of {arm} do not have {setting}, which the sweep chose: remove one or the other.")

        def cost(steps: int, others: int) -> float:
            return sum(map(self.expected, TRAINED, (steps, others, steps)))

        if {"es", "grpo"} <= known.keys():
            steps: Sequence[int] = known["es"]["steps"], known["grpo"]["steps"]
        else:
            lengths = tuple(each for each in plan.lengths if "es" not in known or each[1] == known["es"]["steps"])
            of_step = [r["budget"]["forward_flops"] / r["spec"]["steps"] for r in (es[-1], *grpo[-1:])]
            steps = length(replace(plan, lengths=lengths), self.left - plan.reserve, cost, of_step[0] / of_step[-1])
        self.say(f"ES {best}, {steps[0]} steps; GRPO {other}, {steps[1]} steps; {self.left:.0f} s left")
        return self.made({"es": (best, steps[0]), "grpo": (other, steps[1]), "es_random": (best, steps[0])})

    def made(self, wanted: Mapping[str, tuple[Any, int]]) -> dict[str, list[Record]]:
        """Make the rounds with these settings and steps; return arm -> its runs, known ones included."""
        plan, found = self.plan, {arm: [] for arm in TRAINED}
        for seed, arm in product(range(plan.seeds), [arm for arm in TRAINED if arm in self.arms]):
            setting, n = wanted[arm]
            if setting and (record := self.train(plan.run(arm, seed, setting, n), plan.reserve)) is not None:
                found[arm].append(record)
        return found

    def of_weights(self, runs: Mapping[str, Sequence[Record]]) -> None:
        """Make the records of products, lines and merges that are missing, in this order.

        Products are those of all known runs of two arms, so that an arm has all of them or none.
        """
        from evoalign_study import real_runs

        plan, groups = self.plan, [records for records in runs.values() if records]
        begun = {k: v for k, v in plan.of_base.items() if k != "validation_problems"}
        wanted = [(spec, "products") for spec in blocks(groups, begun)]
        for arm in ("es", "es_random"):
            lines = pairs(runs[arm], runs["grpo"])
            wanted += [(real_runs.line_spec(begun, *ends, plan.path_points), "path") for ends in lines]
        if len(runs["es"]) > 2:  # the mean of the others must be shorter than the run
            wanted += [(real_runs.without_spec(begun, runs["es"], run), "merged") for run in runs["es"]]
        missing = [(spec, made) for spec, made in wanted if self.has(spec) is None]
        needed = {digest for spec, _ in missing for digest in digests(spec)}
        for records in groups:
            if gone := [run for run in records if run["digest"] in needed and run["digest"] not in self.bench.ends]:
                self.restore(gone)
        for spec, made in missing:
            if digests(spec) <= self.bench.ends.keys():
                self.measure(spec, made)
            else:
                self.left_out.append(f"{made}: an end of an earlier command is not here")

    def told(self) -> None:
        """Add this command to those in the device file: the machine, the plan, times, and what was left out."""
        seconds = round(time.monotonic() - self.began, 1)
        told = provenance.environment("cuda") | {"seconds": seconds, "minutes": self.minutes}
        told |= {"plan": asdict(self.plan), "costs": self.costs, "left_out": self.left_out, "commit": self.commit}
        path = self.out / "device.json"
        files.replace_text(path, json.dumps([*read_commands(path), told], indent=1) + "\n")
        self.say(f"done; left out: {'; '.join(self.left_out) or 'nothing'}")


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


def pairs(first: Sequence[Record], last: Sequence[Record]) -> Iterator[tuple[Record, Record]]:
    """Yield the runs of two arms that have the same seed."""
    other = {record["spec"]["seed"]: record for record in last}
    return ((run, other[run["spec"]["seed"]]) for run in first if run["spec"]["seed"] in other)


def blocks(groups: Sequence[Sequence[Record]], begun: Spec) -> list[Spec]:
    """Return the specs of all products among the runs of groups."""
    from evoalign_study import weight_cache

    named = list(map(weight_cache.group, groups))
    kept = {k: v for k, v in begun.items() if k not in ("test_problems", "max_completion_length")}
    return [kept | {"kind": "products", "a": a, "b": b} for i, a in enumerate(named) for b in named[i:]]


def read_commands(path: Path) -> list[dict[str, Any]]:
    """Return the commands in a device file; none if there is no such file. The first such files hold a single one."""
    told = json.loads(path.read_text()) if path.is_file() else []
    return told if isinstance(told, list) else [told]


def committed(plan: Plan) -> list[Record]:
    """Return the committed records of a plan's scale and task."""
    every = (record for path in record_files(plan.scale) for record in read_records(path))
    return [record for record in every if record["spec"]["task"] == plan.task]


def plan_of(records: Sequence[Record]) -> Plan:
    """Return the declared plan of records, by the task of the first."""
    return FACTS if records and records[0]["spec"]["task"] == FACTS.task else Plan()


def checked(out: Path) -> Iterator[tuple[Record, Path | None]]:
    """Yield the records in a folder, each with its unpacked ledger, once all of them have passed.

    Raises:
        ValueError: no records; one that the plan does not declare, or not made on its device; seeds with another
            setting than the sweep chose, or of another length than others; products, a line or a merge of ends that no
            run has; a ledger that is missing or not the recorded one. Runs and sweep may be committed ones.
    """
    found = read_records(out / "records.jsonl")
    plan = plan_of(found)
    require(found, f"{out} holds no records.jsonl: run `python -m evoalign_study.real run --out {out}` first.")
    runs = [r for r in (*committed(plan), *found) if r["spec"]["kind"] == "train"]
    sweep = {arm: [r for r in runs if r["spec"]["seed"] == SWEEP_SEED and r["spec"]["arm"] == arm] for arm in TRAINED}
    ends, specs = {r["digest"] for r in runs}, [plan.of_base]
    if plan.steps:
        specs += [plan.run(arm, seed, *plan.wanted[arm]) for arm in TRAINED for seed in range(plan.seeds)]
    else:
        specs += [spec for pair in plan.sweep for spec in pair]
    declared = set(map(spec_hash, specs))
    for record in found:
        spec, where = record["spec"], f"{out}, record {record['spec_hash']}"
        if spec["kind"] == "train" and spec["seed"] != SWEEP_SEED and not plan.steps:
            arm = "grpo" if spec["arm"] == "grpo" else "es"
            require(sweep[arm], f"{where}: the folder and the committed records lack the sweep of {arm}.")
            alike = [r["spec"] for r in runs if (r["spec"]["arm"] == "grpo") == (arm == "grpo")]
            steps = sorted({each["steps"] for each in alike if each["seed"] < SWEEP_SEED})
            require(len(steps) == 1, f"{where}: runs of {arm}, committed ones included, have {steps} steps.")
            declared.add(spec_hash(plan.run(spec["arm"], spec["seed"], chosen(sweep[arm]), spec["steps"])))
        known = record["spec_hash"] in declared or (spec["kind"] in NOTEBOOK and digests(spec) <= ends)
        require(known and spec["scale"] == plan.scale, f"{where} is not what the plan and its sweep declare.")
        device = record["environment"]["device"]
        require((" x " in device) == (plan.device == "cuda"), f"{where} was made on {device}.")
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


def run(
    out: Path, minutes: float, commit: str, trial: bool, plan: str, task: str, arms: Sequence[str], began: float
) -> None:
    """Make the runs that are missing, in order of value, until the time is over; arguments as on the command line."""
    changes = {name: _tuples(value) for name, value in json.loads(plan).items()}
    require(trial or not changes, "--plan is for --trial alone: the declared plan stands in the code.")
    wanted = replace(TRIAL, **changes) if trial else FACTS if task == FACTS.task else Plan()
    known = [*([] if trial else committed(wanted)), *read_records(out / "records.jsonl")]
    session = Session(wanted, out, minutes, commit or provenance.commit(), known, arms, began)
    try:
        session.work()
    except Exception as error:  # `main` prints the message alone, and the device may be gone when it is read
        traceback.print_exc()
        session.left_out.append(f"all that follows: {type(error).__name__}: {error}")
        raise
    finally:
        session.told()


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
    plan = plan_of(read_records(folder / "records.jsonl"))
    path = paths.RESULTS / _OTHERS[plan.task] / f"{plan.scale}.device.json"
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
    running.add_argument("--minutes", type=float, default=9.0, help="time for all of it, loading included")
    running.add_argument("--commit", default="", help="commit of the code, where git cannot tell")
    running.add_argument("--trial", action="store_true", help="sizes that mean nothing, on the CPU, at scale smoke")
    running.add_argument("--task", choices=[*_OTHERS], default="arithmetic", help="facts: the block on the CPU")
    every = ["base", *TRAINED]
    running.add_argument("--arms", nargs="+", choices=every, default=every, help="of facts: what this process runs")
    running.add_argument("--plan", default="{}", help='changes to the plan of a trial as JSON, such as {"seeds": 1}')
    commands.add_parser("import", help="add them to the committed records").add_argument("folder", type=Path)
    given = vars(parser.parse_args(arguments))
    try:
        take(given["folder"]) if given.pop("command") == "import" else run(began=began, **given)
    except (ValueError, OSError) as error:
        raise SystemExit(f"{error}") from error


if __name__ == "__main__":
    main()
