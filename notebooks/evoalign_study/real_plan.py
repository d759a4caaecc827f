"""What scale "real" runs: blocks in order of value, their settings, and the seconds that they will take.

Each block is a `Plan`, and `BLOCKS` lists them; `evoalign_study.real` works through the list. All start from one base:

- **A**: products of two numbers; ES, GRPO and ES with random fitness. The sweep chooses settings, measured times choose
  lengths. All other blocks repeat A's settings, which its records have (ES: sigma .002, alpha .001, 30 members, 64
  prompts, 60 steps; GRPO: AdamW 3e-5, 16 x 16 completions, 59 steps), but for what is said here.
- **C**: facts, rewarded for length alone. ES has 80 steps, since on a CPU 24 did not reach the level of reward that was
  declared for temperature 1; GRPO 14, where 12 smaller ones were more than enough. 20 new tokens, as on the CPU, whose
  levels apply; the runs there (`FACTS`) have other specs and are not pooled with these.
- **ES sampled**: A with fitness from samples at temperature 1.
- **B**: sums, where right answers are rare, with the two settings an arm that A's sweep tried, at full length: the
  sweep's seed chooses by validation, three other seeds are tested.
- **LoRA-B**: B of an adapter of rank 4 on q and v moves, from 0; A is random, one draw for all runs. In these 92,160
  numbers eight runs can show what they have in common. 32 prompts a step, 60 steps of all arms. sigma .08 moves the
  first token's distribution as far as A's .002 does (mean KL from the base on 24 training prompts, four draws: .0105 at
  .002; .0048, .0177 and .0574 at .05, .1 and .2), alpha is half of it, as in A; AdamW 1e-3 is a guess.
- **GRPO by SGD**: A's GRPO with rate .7. At the base the gradient of 16 x 8 completions has the norm .62, nearly all of
  it noise (one draw, on a CPU), so about .44 for 16 x 16: 59 such steps of .7 go as far as AdamW's, 2.4.
- **filtered SFT**: the right ones of 256 prompts x 64 samples of the base, about GRPO's number, for two epochs.
- **pass@64**: 64 samples of 256 test problems at temperatures .6 and 1, of the base and of A's ends.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from evoalign_lib import arms, smollm2
from evoalign_lib.arms import SWEEP_SEED
from evoalign_lib.tasks.arithmetic import MAX_COMPLETION_LENGTH
from evoalign_study import trainers, weight_cache
from evoalign_study.collapse import SAMPLES
from evoalign_study.kinds.decode import base_specs
from evoalign_study.kinds.train import train_specs
from evoalign_study.records import Record, Spec, spec_hash

TRAINED = ("es", "grpo", "es_random")
"""The arms of task A, in the order of a round."""
ADAPTED = ("q_proj", "v_proj")
"""What LoRA-B adapts."""


@dataclass(frozen=True)
class Plan:
    """A block: what is run, and at which sizes. A record's spec has all that determines its result."""

    name: str = "A"
    why: str = "R0, R3, R4, R8, R9, R11"
    """claims that it is for"""
    arms: tuple[str, ...] = TRAINED
    """in the order of a round"""
    few: tuple[tuple[str, int], ...] = ()
    """arms with fewer seeds, and how many"""
    ends: tuple[str, ...] = ()
    """arms of the block's task whose ends it measures at last: their products, lines and samples"""
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
    """prompts of an ES step"""
    grpo_prompts: int = 16
    num_generations: int = 16
    sft: tuple[int, int] = (256, 64)
    """prompts of filtered SFT, and samples of each"""
    lora_rank: int = 0
    """of an adapter whose B alone moves; 0: all weights do"""
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
    """of ES and of GRPO; None: by `lengths`. If a sweep has a single setting, it is not made"""
    seeds: int = 6
    """at most"""
    path_points: int = 5
    """of lines between ends; 0: neither lines nor merges"""
    samples: tuple[int, int] = (0, 256)
    """samples of each test problem from each of `ends`, and the number of problems"""
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
        family, asked = arms.get(arm).family, dict(self.settings)
        own: dict[str, Any] = {"population_size": self.population_size, "prompts_per_step": self.es_prompts}
        if family == "gradient":
            own = {"num_generations": self.num_generations, "prompts_per_step": self.grpo_prompts, "beta": 0.0}
        elif family == "sft":  # without a curve
            own = dict(zip(("prompts", "num_generations"), self.sft, strict=True))
            own |= {"batch_size": self.grpo_prompts, "epochs": 2}
            asked.pop("curve_spacing")
        asked |= own | {"steps": steps, "lora_rank": self.lora_rank} | dict(setting) | changed
        more: dict[str, Any] = {"lora_moves": "B", "lora_targets": [*ADAPTED]} if self.lora_rank else {}
        more |= {"products": "tf32" if self.device == "cuda" else "float32"} if family != "es" else {}
        return self._made(*train_specs(arm, [self.base], [seed], asked, self.scale), **more)

    def wanted(
        self, es: Mapping[str, float] | None, grpo: Mapping[str, float] | None, steps: Sequence[int]
    ) -> dict[str, tuple[Mapping[str, float], int]]:
        """Return arm -> setting and steps, by the settings and steps of ES and of GRPO; arms without a setting lack."""
        of = {arm: (es, steps[0]) if arms.get(arm).family == "es" else (grpo, steps[1]) for arm in self.arms}
        return {arm: (setting, n) for arm, (setting, n) in of.items() if setting}

    @property
    def first(self) -> dict[str, tuple[Mapping[str, float], int]]:
        """What is wanted before a sweep is known: the first settings, and the given or the longest steps."""
        (sigma, alpha), rate, (_, longest, _) = self.es_sweep[0], self.grpo_sweep[0], self.lengths[0]
        return self.wanted({"sigma": sigma, "alpha": alpha}, {"learning_rate": rate}, self.steps or (longest, longest))

    def rounds(self, wanted: Mapping[str, tuple[Mapping[str, float], int]]) -> list[Spec]:
        """Return the specs of all runs, seed by seed."""
        most = dict.fromkeys(self.arms, self.seeds) | dict(self.few)
        every = product(range(self.seeds), wanted)
        return [self.run(arm, seed, *wanted[arm]) for seed, arm in every if seed < most[arm]]

    @property
    def swept(self) -> bool:
        """Whether the block has a sweep."""
        return self.steps is None or len(self.es_sweep) > 1

    def holds(self, spec: Spec, arms: Sequence[str] = ()) -> bool:
        """Return whether a spec is of a training run by one of the block's arms, or of these, in its task and place."""
        own = {"scale": self.scale, "task": self.task, "device": None if self.device == "cuda" else self.device}
        own |= {"kind": "train", "operation": self.operation if self.task == "arithmetic" else None}
        return own.items() <= {name: spec.get(name) for name in own}.items() and spec["arm"] in (arms or self.arms)

    @property
    def sweep(self) -> list[tuple[Spec, Spec]]:
        """The specs of the sweep: a setting of ES and one of GRPO in turn."""
        (steps, others), how = self.sweep_steps, {"test_problems": 0}
        es = [self.run("es", SWEEP_SEED, {"sigma": s, "alpha": a}, steps, **how) for s, a in self.es_sweep]
        grpo = [self.run("grpo", SWEEP_SEED, {"learning_rate": rate}, others, **how) for rate in self.grpo_sweep]
        return list(zip(es, grpo, strict=True))


def small(plan: Plan) -> Plan:
    """Return a block with sizes that mean nothing, for the CPU."""
    sizes = {"validation_problems": 2, "test_problems": 2, "max_completion_length": 3, "population_size": 2}
    sizes |= {"es_prompts": 2, "grpo_prompts": 1, "num_generations": 2, "sft": (2, 2), "curve_points": 3}
    sizes |= {"scale": "smoke", "device": "cpu", "dtype": "float32", "lengths": ((2, 2, 1.0),), "sweep_steps": (2, 2)}
    few = {"es_sweep": plan.es_sweep[:2], "grpo_sweep": plan.grpo_sweep[:2], "few": (), "seeds": 1 if plan.steps else 2}
    few |= {"steps": plan.steps and (2, 2), "path_points": min(plan.path_points, 3), "sweep_share": 0.9}
    return replace(plan, samples=(min(plan.samples[0], 2), 2), reserve=0.0, **sizes, **few)


_A: dict[str, Any] = {"es_sweep": ((0.002, 0.001),), "grpo_sweep": (3e-5,), "steps": (60, 59), "path_points": 0}
_A |= {"reserve": 0.0}
_TWO = {"es_sweep": ((0.002, 0.001), (0.001, 0.0005)), "grpo_sweep": (3e-5, 1e-5), "sweep_steps": (60, 59)}
_LORA: dict[str, Any] = {"arms": ("es_lora", "es_lora_sampled", "grpo_lora"), "few": (("grpo_lora", 4),), "seeds": 8}
_LORA |= {"lora_rank": 4, "es_sweep": ((0.08, 0.04),), "grpo_sweep": (1e-3,), "steps": (60, 60), "es_prompts": 32}
_SGD: dict[str, Any] = {"grpo_sweep": (0.7,)}
_FACTS: dict[str, Any] = {"task": "facts", "max_completion_length": 20, "curve_points": 8}
_FACTS |= {"validation_problems": 60, "test_problems": 209, "steps": (80, 14)}
BLOCKS = (
    Plan(ends=TRAINED),
    Plan("C", "R7", seeds=3, **_A | _FACTS),
    Plan("ES sampled", "R2", ("es_sampled",), seeds=4, **_A),
    Plan("B", "R5", operation="+", seeds=3, sweep_share=1.0, **_A | _TWO),
    Plan("LoRA-B", "R1, R2", ends=_LORA["arms"], curve_points=3, **_A | _LORA),
    Plan("GRPO by SGD", "R2", ("grpo_sgd",), ends=("es", "es_sampled", "grpo_sgd"), seeds=3, **_A | _SGD),
    Plan("filtered SFT", "every table at an equal budget", ("sft",), seeds=2, **_A),
    Plan("pass@64", "R6", (), ends=TRAINED, samples=(64, 256), seeds=0, **_A),
)
"""The blocks, in order of value."""
_CPU = {"device": "cpu", "validation_problems": 32, "test_problems": 64, "curve_points": 6, "steps": (24, 12)}
_CPU |= {"es_prompts": 32, "grpo_prompts": 8, "num_generations": 8}
FACTS = Plan("facts on a CPU", "R7, to describe", seeds=2, **_A | _FACTS | _CPU)
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


def line_spec(begun: Spec, first: Record, last: Record, points: int) -> Spec:
    """Return the spec of the line from the end of one run to that of another."""
    ends = {"first": weight_cache.end([first]), "last": weight_cache.end([last])}
    return begun | {"kind": "path", "path_points": points} | ends


def without_spec(begun: Spec, runs: Sequence[Record], run: Record) -> Spec:
    """Return the spec of the mean of all other runs with a fresh walk that makes it as long as this run."""
    others = [each for each in runs if each["spec"]["seed"] != run["spec"]["seed"]]
    end = weight_cache.end(others, as_long_as=[run], walk=run["spec"]["seed"])
    return begun | {"kind": "merge", "arm": run["spec"]["arm"]} | end


def of_ends(plan: Plan, runs: Mapping[str, Sequence[Record]]) -> list[Spec]:
    """Return the specs of what a block measures of ends: samples, or products, lines and merges, in this order.

    Products are those of all runs of two arms, so that an arm has all of them or none.

    runs: arm -> its runs, by seed.
    """
    begun = {k: v for k, v in plan.of_base.items() if k != "validation_problems"}
    if plan.samples[0]:
        own = {"kind": "sampled", "samples": plan.samples[0], "sampled_problems": plan.samples[1]}
        every = sorted((run for arm in plan.ends for run in runs[arm]), key=lambda run: run["spec"]["seed"])
        return [begun | own, *(begun | own | {"end": weight_cache.end([run])} for run in every)]
    groups = [weight_cache.group(runs[arm]) for arm in plan.ends if runs[arm]]
    kept = {k: v for k, v in begun.items() if k not in ("test_problems", "max_completion_length")}
    wanted = [kept | {"kind": "products", "a": a, "b": b} for i, a in enumerate(groups) for b in groups[i:]]
    if plan.path_points:
        for arm in ("es", "es_random"):
            other = {run["spec"]["seed"]: run for run in runs["grpo"]}
            lines = ((run, other[run["spec"]["seed"]]) for run in runs[arm] if run["spec"]["seed"] in other)
            wanted += [line_spec(begun, *line, plan.path_points) for line in lines]
        if len(runs["es"]) > 2:  # the mean of the others must be shorter than the run
            wanted += [without_spec(begun, runs["es"], run) for run in runs["es"]]
    return wanted


class Known:
    """Records, and what follows from them: settings, what is missing, and the seconds that it will take.

    Args:
        records: of earlier commands.
    """

    def __init__(self, records: Sequence[Record]):
        self.records = {record["spec_hash"]: record for record in records}

    def has(self, spec: Spec) -> Record | None:
        """Return the record of a spec, if there is one."""
        return self.records.get(spec_hash(spec))

    def finals(self, plan: Plan, *arms: str) -> list[Record]:
        """Return the records of all runs of a block, or of its task by these arms, by seed; without its sweep."""
        every = (r for r in self.records.values() if plan.holds(r["spec"], arms) and r["spec"]["seed"] < SWEEP_SEED)
        return sorted(every, key=lambda record: record["spec"]["seed"])

    def settled(self, plan: Plan) -> dict[str, tuple[Mapping[str, float], int]] | None:
        """Return the settings and steps of a block's runs; None as long as its sweep is not closed."""
        if not plan.swept:
            return plan.first
        finals = {run["spec"]["arm"]: run["spec"]["steps"] for run in self.finals(plan)}
        pairs = [[self.has(spec) for spec in pair] for pair in plan.sweep]
        whole = [pair for pair in pairs if all(pair)]
        if not whole or not (finals.keys() >= {"es", "grpo"} or plan.steps and whole == pairs):
            return None
        es, grpo = (chosen(runs) for runs in zip(*whole, strict=True))
        return plan.wanted(es, grpo, plan.steps or (finals["es"], finals["grpo"]))

    def missing(self, plan: Plan) -> list[Spec]:
        """Return the specs of a block that have no record; of an open sweep, runs with its first setting."""
        wanted = self.settled(plan)
        sweep = [] if wanted is not None else [spec for pair in plan.sweep for spec in pair]
        runs = plan.rounds(plan.first if wanted is None else wanted)
        return [spec for spec in (plan.of_base, *sweep, *runs) if self.has(spec) is None]

    def unmeasured(self, plan: Plan) -> list[Spec]:
        """Return the specs of a block's ends that have no record, those of runs included that are still missing."""
        made = [{"spec": spec, "digest": ""} for spec in self.missing(plan) if spec["kind"] == "train"]
        made = [run for run in made if run["spec"]["seed"] < SWEEP_SEED]
        runs = {a: self.finals(plan, a) + [run for run in made if run["spec"]["arm"] == a] for a in plan.ends}
        return [spec for spec in of_ends(plan, runs) if self.has(spec) is None]

    # ---- seconds

    def _on(self, spec: Spec, kind: str) -> list[Record]:
        """Return the records of a kind that were made on a spec's device."""
        every = (r for r in self.records.values() if r["spec"]["kind"] == kind)
        return [record for record in every if record["spec"].get("device") == spec.get("device")]

    def a_completion(self, spec: Spec) -> float:
        """Return the seconds of a completion in a measurement on a spec's device, by a base; 0 if none is known."""
        bases = self._on(spec, "base")
        return bases[-1]["budget"]["wall_seconds"] / measured(bases[-1]["spec"]) if bases else 0.0

    def cost(self, spec: Spec) -> tuple[float, float]:
        """Return the seconds of a run's steps, and of all else; 0 if no run is like it.

        They are those of the last run by its arm on its task and device, else by its arm or by ES or GRPO on any task,
        in proportion to the completions that are trained on or measured. The oldest records have no such seconds: there
        steps take the CPU's time, and those of a walk, which decodes nothing, what else it takes longer than ES.
        """
        runs = self._on(spec, "train")
        own = [r for r in runs if r["spec"]["arm"] == spec["arm"]]
        here = [r for r in own if all(r["spec"].get(name) == spec.get(name) for name in ("task", "operation"))]
        like = "es" if arms.get(spec["arm"]).family == "es" else "grpo"
        alike = [r for r in runs if r["spec"]["arm"] == like]
        for run in (here or own or alike)[-1:]:
            known, spent = run["spec"], run["budget"]
            steps = spent.get("train_seconds", spent["core_seconds"])
            rest = spent.get("rest_seconds", spent["wall_seconds"] - steps)
            if known["arm"] == "es_random" and "train_seconds" not in spent and alike:
                rest = min(rest, self.cost(alike[-1]["spec"])[1])
                steps = spent["wall_seconds"] - rest
            less = 0.1 if spec["arm"] == "es_random" != known["arm"] else 1.0  # more than the steps of a walk take
            more = (measured(spec) - measured(known)) * self.a_completion(spec)
            return less * steps * _drawn(spec) / _drawn(known), max(0.0, rest + more)
        return 0.0, 0.0

    def back(self, run: Record) -> float:
        """Return the seconds to bring back the end of a run: of ES from its ledger, as long as a walk, or trained."""
        es = arms.get(run["spec"]["arm"]).family == "es"
        return self.cost(run["spec"] | {"arm": "es_random"})[0] if es else sum(self.cost(run["spec"]))

    def expected(self, spec: Spec) -> float:
        """Return the seconds that a run, or a measurement of a base or of ends, will take."""
        if spec["kind"] == "train":
            return sum(self.cost(spec))
        if spec["kind"] in ("base", "sampled"):
            return measured(spec) * self.a_completion(spec)
        same = self._on(spec, spec["kind"])
        return same[-1]["budget"]["wall_seconds"] if same else 0.0

    def told(self, plans: Sequence[Plan], minutes: float) -> Iterator[str]:
        """Yield a table of blocks: what has a record, what is missing, its seconds, and how far the minutes reach."""
        left, here = 60 * minutes, set()
        yield f"{'block':14} {'for':29} recorded missing seconds  left"
        for plan in plans:
            missing, unmeasured = self.missing(plan), self.unmeasured(plan)
            runs = self.finals(plan, *plan.ends) if unmeasured else []
            gone = [run for run in runs if run["digest"] not in here]
            here |= {run["digest"] for run in runs}
            seconds = sum(map(self.expected, (*missing, *unmeasured))) + sum(map(self.back, gone))
            fits, left = "fits" if left >= seconds else "in part" if left > 0 else "no time", left - seconds
            numbers = f"{len(self.finals(plan)):8} {len(missing) + len(unmeasured):7} {seconds:7.0f} {left:5.0f}"
            yield f"{plan.name:14} {plan.why:29} {numbers} {fits if seconds else ''}"
            parts = Counter(s["arm"] if s["kind"] == "train" else s["kind"] for s in (*missing, *unmeasured))
            parts |= Counter({"ends that come back": len(gone)})
            for arm, (setting, steps) in (self.settled(plan) or plan.first).items():
                told = ", ".join(f"{name} {value:g}" for name, value in setting.items())
                yield f"    {arm}: {told}; {dict(plan.few).get(arm, plan.seeds)} seeds, {steps} steps"
            yield f"    missing: {', '.join(f'{n} {name}' for name, n in parts.items() if n) or 'nothing'}"


def measured(spec: Spec) -> int:
    """Return the number of completions by which a run, a base or an end is measured."""
    if spec["kind"] == "sampled":
        return 2 * spec["samples"] * spec["sampled_problems"]
    a, b = spec["validation_problems"], spec["test_problems"]
    if spec["kind"] == "base":
        return 33 * (a + b)
    point = (a + b) * (1 + 2 * SAMPLES) if spec["task"] == "facts" else 5 * a
    return 33 * b + spec.get("curve_points", 0) * point


def _drawn(spec: Spec) -> int:
    return math.prod(spec[name] for name in trainers.of(spec["arm"]).completions)
