"""How evaluation scales over worker processes: a population on a tiny base, timed."""

import os
import statistics
import time
from contextlib import ExitStack

import numpy as np

from evoalign_lib import noise
from evoalign_lib.checks import require
from evoalign_lib.engines.local import LocalEngine, Prompts
from evoalign_lib.engines.processes import default_workers
from evoalign_lib.rewards import Rewards
from evoalign_lib.update_rules import Member
from evoalign_study import measures, specs, training
from evoalign_study.measures.base import significant
from evoalign_study.records import Record, Settings, Spec

_LEAST = {"scaling_members": 1, "scaling_prompts": 1, "scaling_rounds": 2}


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
    names = (*_LEAST, "scaling_workers", "sigma", "max_completion_length")
    taken = specs.take(settings, names, "scaling")
    for name, least in _LEAST.items():
        require(taken[name] >= least, f"{name}={taken[name]}: take at least {least}.")
    workers = list(taken["scaling_workers"])
    rising = len(workers) > 1 and workers[0] == 1 and workers == sorted(set(workers))
    require(rising, f"scaling_workers={workers}: give 1 and, rising, at least one more.")
    return specs.begin_tiny("scaling", base, scale, {}) | {"sort": "measured"} | taken


def run(spec: Spec) -> Record:
    """Time a population on several numbers of worker processes, in turn.

    The record has for each number of processes the seconds of a population (minimum and median of the rounds), members
    per second, the share of the processes' time on a core, the rest being waits for work or for a core that others use,
    and the speed-up, a ratio of minima; whether all had the same rewards; cores, and the load average before and after.
    """
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
