"""How evaluation scales: measured over worker processes, and simulated over GPUs.

Records of sort "measured" time a population on a tiny base with several numbers of worker processes. Those of sort
"simulated" say so in a field of their own: no GPU was used, only their constants (`MACHINES`) and lengths of real
completions. A simulated step may be fitted to published times (`PUBLISHED`).
"""

import os
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np

from evoalign_lib import noise
from evoalign_lib.analysis import scaling
from evoalign_lib.analysis.scaling import Machine, Step
from evoalign_lib.checks import choose, require
from evoalign_lib.engines.local import LocalEngine, Prompts
from evoalign_lib.engines.processes import default_workers
from evoalign_lib.rewards import Rewards
from evoalign_lib.tasks import conciseness
from evoalign_lib.update_rules import Member
from evoalign_study import measures, specs, training
from evoalign_study.measures.base import significant
from evoalign_study.records import Record, Settings, Spec

PROMPT_TOKENS = 100
"""Tokens of a prompt, for which the constants below hold."""
_PARAMETERS = 7_616_000_000
_COPY, _GEMM = 4.3e12, 780e12  # bytes and floating-point operations per second
_FULL = Machine(
    slots=200,
    step=2 * _PARAMETERS / _COPY,
    sequence=57_344 * (PROMPT_TOKENS + 128) / _COPY,
    prefill=0.391 / 200,
    member=12e-3,
    update=0.352 / 30,
    train_token=6 * _PARAMETERS / _GEMM,
    optimizer=28 * _PARAMETERS / _COPY,
    parameters=_PARAMETERS,
    latency=10e-6,
    bandwidth=50e9,
)
_ADAPTERS = replace(
    _FULL, step=1.07 * _FULL.step, sequence=1.07 * _FULL.sequence, member=0.0, update=2 * _PARAMETERS / _GEMM
)
MACHINES: dict[str, Machine] = {"es": _FULL, "es_adapters": _ADAPTERS, "grpo": _FULL}
"""What is simulated -> the constants of a 7 B model in bfloat16 on one H200 or a like GPU, in seconds. They are derived
from the rates of the hardware (copies at 4.3 TB/s, matrix products at 780 TFLOP/s), not measured:

- `step`: one read of all weights, 2 bytes each, 3.5 ms. `sequence`: one read of the keys and values of 228 tokens (the
  prompt and half of 256), 57,344 bytes each (28 layers, 4 heads of 128, keys and values, 2 bytes), 3 us. Up to 215
  running sequences memory is the limit, so that a step is linear in them: 200 slots.
- `prefill`: 391 ms for 200 prompts of 100 tokens. `member`: a fused pass with Box-Muller noise, 12 ms. `update`: a
  thirtieth of the update of 30 members in one pass, 352 ms.
- `train_token`: 6 operations per parameter and token, at the full rate. `optimizer`: AdamW in float32 reads 16 and
  writes 12 bytes per parameter, 50 ms.
- `bandwidth`, `latency`: assumed, one 400 Gbit/s adapter per GPU (as in NVIDIA's DGX H100) and 10 us.

Members as adapters of rank 1: no weights are written; kernels of their own cost 7 % of a decode step; the update is one
matrix product, 2 operations per parameter and member."""

WORKLOADS: dict[str, tuple[int, int]] = {"es": (30, 200), "es_adapters": (30, 200), "grpo": (128, 8)}
"""What is simulated -> the completions of a step: members x prompts, as Qiu et al. (arXiv 2509.24372) have for ES;
prompts x completions of each, their batch of 1,024 in groups of 8, for GRPO."""

RELEASED = "ES_alpha0.0005_sigma0.001"
"""The released completions whose lengths are taken: those of the setting that moved least from its base."""
LENGTHS = ("tiny", "released")
"""Whose lengths are simulated: those of the tiny base, or of released completions of a 7 B model."""


class Published(NamedTuple):
    """Times to an accuracy on several numbers of GPUs, as read off a figure of ESSA (arXiv 2507.04453)."""

    what: str
    """Method, version of the paper, target."""
    simulated: str
    """The key of `MACHINES` that is fitted to them."""
    workload: tuple[int, int]
    """As in `WORKLOADS`: the paper's defaults, since it does not give those of the figure."""
    gpus: tuple[int, ...]
    minutes: tuple[float, ...]
    """"Under 20" and "under 80" are taken as 20 and 80."""


PUBLISHED: dict[str, Published] = {
    "essa_v1": Published("ESSA v1, to .76", "es_adapters", (96, 100), (8, 128), (290.0, 80.0)),
    "essa_v3": Published("ESSA v3, to .835", "es_adapters", (96, 100), (16, 128), (200.0, 20.0)),
    "grpo_v3": Published("GRPO in ESSA v3, to .835", "grpo", (80, 4), (16, 128), (400.0, 150.0)),
}


# ---- specs


def measured_spec(base: str, settings: Settings, scale: str) -> Spec:
    """Return the spec of a timed population on worker processes.

    Args:
        base: a plain one of the tiny world.
        settings: max_completion_length; sigma; scaling_workers (numbers of processes, rising from 1); scaling_members
            and scaling_prompts (of a population); scaling_rounds (timed, at least 2: the first is discarded).
        scale: of the notebook.

    Raises:
        ValueError: numbers out of range, a setting that is missing, or a base outside the tiny world.
    """
    begun = specs.begin_tiny("scaling", base, scale, {}) | {"sort": "measured"}
    sizes = ("scaling_members", "scaling_prompts", "scaling_rounds", "scaling_workers")
    return begun | _taken(settings, (*sizes, "sigma", "max_completion_length"))


def simulated_spec(
    what: str, lengths: str, settings: Settings, scale: str, *, base: str = "A0", fitted_to: str | None = None
) -> Spec:
    """Return the spec of a simulated step over GPUs.

    Args:
        what: a key of `MACHINES`.
        lengths: one of `LENGTHS`.
        settings: scaling_gpus (rising from 1); scaling_draws (of the lengths, at least 1); scaling_tokens (mean length
            to which the lengths are stretched, above 0; 0: as they are); for the lengths of the tiny base also
            max_completion_length and validation_problems.
        scale: of the notebook, in whose file the record is kept; it is about no model of that scale.
        base: whose lengths are "tiny".
        fitted_to: a key of `PUBLISHED`: its workload is simulated, and its times fitted.

    Raises:
        ValueError: an unknown name, numbers out of range, or a setting that is missing.
    """
    choose("what", what, MACHINES)
    choose("lengths", lengths, LENGTHS)
    if fitted_to is not None:
        choose("fitted_to", fitted_to, [name for name, times in PUBLISHED.items() if times.simulated == what])
    names = ("scaling_draws", "scaling_tokens", "scaling_gpus")
    if lengths == "tiny":
        begun = specs.begin_tiny("scaling", base, scale, {})
        names = (*names, "max_completion_length", "validation_problems")
    else:
        begun = {"kind": "scaling", "task": "conciseness", "scale": scale, "set": RELEASED}
    workload = WORKLOADS[what] if fitted_to is None else PUBLISHED[fitted_to].workload
    spec = begun | {"sort": "simulated", "what": what, "lengths": lengths} | _taken(settings, names)
    spec |= {"machine": asdict(MACHINES[what]), "workload": list(workload)}
    return spec | ({} if fitted_to is None else {"fitted_to": fitted_to})


_LEAST = {"scaling_members": 1, "scaling_prompts": 1, "scaling_rounds": 2, "scaling_draws": 1, "scaling_tokens": 0}
"""The least that each of these settings may be."""


def _taken(settings: Settings, names: Sequence[str]) -> dict[str, Any]:
    """Return the settings of these names, checked."""
    taken = specs.take(settings, names, "scaling")
    for name, least in _LEAST.items():
        require(taken.get(name, least) >= least, f"{name}={taken.get(name)}: take at least {least}.")
    for name in {"scaling_workers", "scaling_gpus"} & taken.keys():
        values = list(taken[name])
        rising = len(values) > 1 and values[0] == 1 and values == sorted(set(values))
        require(rising, f"{name}={values}: give 1 and, rising, at least one more.")
    return taken


# ---- runs


def run(spec: Spec) -> Record:
    """Return times of a population by number of worker processes, or simulated times of a step by number of GPUs.

    A measured record has for each number of processes the seconds of a population (minimum and median of the rounds),
    members per second, the share of the processes' time on a core, the rest being waits for work or for a core that
    others use, and the speed-up, a ratio of minima; whether all had the same rewards; cores, and the load average
    before and after.

    A simulated one has `simulation`, the histogram of lengths, for each draw the seconds of a step on each number of
    GPUs, and means over draws of its parts, of the idle share and of what stragglers cost. `fitted`, where
    published times are: scale (minutes per second of a step), overhead and work (minutes), of which one is free, the
    relative error, and the minutes to the target that follow.
    """
    return _measured(spec) if spec["sort"] == "measured" else _simulated(spec)


def _measured(spec: Spec) -> Record:
    measure = measures.get(spec["task"])
    members = [Member(noise.member_key(noise.run_key("scaling", 0), 0, i)) for i in range(spec["scaling_members"])]
    rows = np.arange(spec["scaling_prompts"])
    engines, seconds, core, rewards = {}, {}, {}, {}
    load = [os.getloadavg()[0]]
    with ExitStack() as opened:
        for n in spec["scaling_workers"]:
            model, tokenizer, sets = training.world(spec | {"validation_problems": len(rows)})
            asked = training.rows(spec, tokenizer, sets["validation"])
            own = {"max_completion_length": spec["max_completion_length"], "workers": n}
            prompts = {"asked": Prompts(asked, tokenizer)}
            engines[n] = LocalEngine(model, tokenizer, Rewards(measure.reward(spec)), prompts, **own)
            opened.callback(engines[n].close)
            seconds[n], core[n] = [], []
        for _ in range(spec["scaling_rounds"]):
            for n, engine in engines.items():
                start = time.perf_counter()
                done = engine.evaluate(members, spec["sigma"], "asked", rows)
                seconds[n].append(time.perf_counter() - start)
                core[n].append(sum(each.core_seconds for each in done))
                rewards[n] = [each.scored.rewards.tolist() for each in done]
    load.append(os.getloadavg()[0])
    cells = {}
    for n, times in seconds.items():
        best = min(range(1, len(times)), key=times.__getitem__)  # the first round starts the processes
        cell = {
            "seconds": times[best],
            "seconds_median": statistics.median(times[1:]),
            "members_per_second": len(members) / times[best],
            "busy": core[n][best] / (n * times[best]),
            "speed_up": min(seconds[1][1:]) / times[best],
        }
        cells[str(n)] = {name: significant(value, 4) for name, value in cell.items()}
    return {
        "workers": cells,
        "same_rewards": all(own == rewards[1] for own in rewards.values()),
        "cores": default_workers(),
        "load": [round(value, 2) for value in load],
    }


def _simulated(spec: Spec) -> Record:
    seen, machine, gpus = _lengths(spec), Machine(**spec["machine"]), spec["scaling_gpus"]

    def step(lengths: np.ndarray, n: int) -> Step:
        if spec["what"] == "grpo":
            return scaling.policy_step(machine, lengths, n, PROMPT_TOKENS)
        return scaling.evolution_step(machine, lengths, n, shared=spec["what"] == "es_adapters")

    stretch = spec["scaling_tokens"] / (np.average(list(seen), weights=list(seen.values()))) or 1.0
    drawn = []
    for draw in range(spec["scaling_draws"]):
        rng = np.random.default_rng(np.random.SeedSequence([draw]))
        lengths = scaling.draw_lengths(seen, tuple(spec["workload"]), rng)
        drawn.append(np.maximum(np.rint(stretch * lengths), 1))
    steps = [[step(lengths, n) for n in gpus] for lengths in drawn]
    lost = [[scaling.stragglers(lambda m, n=n: step(m, n), lengths) for n in gpus] for lengths in drawn]
    totals = [[significant(each.total) for each in row] for row in steps]
    stretched = np.concatenate([each.ravel() for each in drawn])
    result = {"simulation": True, "unit": "seconds", "gpus": list(gpus), "total": totals}
    result["histogram"] = {"tokens": list(seen), "counts": list(seen.values())}
    result["simulated_lengths"] = {"mean": significant(stretched.mean()), "std": significant(stretched.std())}
    result["stragglers"] = [significant(value) for value in np.mean(lost, axis=0)]
    for name in ("generation", "update", "communication", "idle"):
        result[name] = [significant(np.mean([getattr(row[i], name) for row in steps])) for i in range(len(gpus))]
    if "fitted_to" in spec:
        published = PUBLISHED[spec["fitted_to"]]
        simulated = [np.mean([step(lengths, n).total for lengths in drawn]) for n in published.gpus]
        fit = scaling.fit_published(published.gpus, simulated, published.minutes)
        minutes = [significant(t) for t in fit.times(gpus, np.mean(totals, axis=0))]
        result["fitted"] = {name: significant(value) for name, value in asdict(fit).items()} | {"minutes": minutes}
    return result


def _lengths(spec: Spec) -> dict[int, int]:
    """Return how many completions have each length; one without a token took a step to end, too."""
    if spec["lengths"] == "released":
        lengths = [n for one in conciseness.load_completions(spec["set"]) for n in one.tokens]
    else:
        with training.opened(spec) as (engine, _):
            lengths = [len(ids) for row in engine.generate("validation", samples=4) for _, ids in row]
    return dict(sorted(Counter(max(1, n) for n in lengths).items()))
