"""Notebook 03, conciseness: its presets, groups of runs, comparisons, and the numbers that the paper quotes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from evoalign_lib import arms
from evoalign_lib.analysis import hacking, stats
from evoalign_lib.analysis.stats import Interval
from evoalign_study import collapse, loading, runs
from evoalign_study.kinds.base import base_specs
from evoalign_study.kinds.published import published_specs
from evoalign_study.loading import After, Group, Groups, Records, of_runs, own_settings
from evoalign_study.measures import conciseness as measure
from evoalign_study.records import Record

NOTEBOOK = "03_conciseness"
ARMS = ("es", "grpo")
TINY = {
    "bases": ["B0", "B1"],
    "retrain": [],  # groups that `force` makes anew; none: all
    "questions": "",  # at scale full: a file of your own
    "fewer_prompts": 2,  # of section 10; none: no such runs
    **runs.CONCISENESS["tiny"],
    "curve_points": 16,
    "seeds_judge": 16,  # of the declared settings
    "seeds_repeat": 16,  # further seeds of the declared settings, under all decodings
    "seeds_map": 4,  # of the other settings
    "seeds_elsewhere": 2,  # on the other bases
    "sigma": [0.003, 0.01, 0.03],  # from here: the axes of the maps
    "alpha": [0.0015, 0.005, 0.015],
    "learning_rate": [1e-4, 3e-4, 1e-3],
    "beta": [0.0, 0.04, 0.4],
    "repeat_points": 10,  # of the curves of the repeated runs: a record has no room for more
    "shown": 3,  # published completions of each set that are printed
    "questions_shown": 4,
}
SMOKE = TINY | {
    **runs.CONCISENESS["smoke"],
    "curve_points": 3,
    "seeds_judge": 2,
    "seeds_repeat": 2,
    "repeat_points": 3,
    "seeds_map": 1,
    "seeds_elsewhere": 1,
    "sigma": [0.01, 0.03],
    "alpha": [0.005, 0.015],
    "learning_rate": [3e-4],
    "beta": [0.0],
}
FULL = TINY | {
    **runs.CONCISENESS["full"],
    "seeds_repeat": 0,
    "fewer_prompts": None,
    "sigma": [3e-4, 1e-3, 3e-3],
    "alpha": [1.5e-4, 5e-4, 1.5e-3],
    "learning_rate": [1e-6, 3e-6, 1e-5],
}
FEW = ("es_few", "grpo_few")
"""The groups of section 10, which are empty without `fewer_prompts`."""


def presets(model: str = "") -> dict[str, dict[str, Any]]:
    """Return scale -> settings; model: that of scale full, empty for the scale's own."""
    return {"tiny": TINY, "smoke": SMOKE, "full": FULL | {"bases": [model or "Qwen/Qwen2.5-7B-Instruct"]}}


def groups(run: SimpleNamespace, of: Records) -> Groups:
    """Return the runs by name. All but "published" are of the notebook's own models."""
    here, elsewhere = run.bases[:1], run.bases[1:]
    judge, some = run.seeds_judge, run.seeds_map

    def train(
        arm: str, bases: Sequence[str], seeds: int | Sequence[int], changes: Sequence[Mapping[str, Any]] = ({},)
    ) -> Group:
        return Group(arm, bases, seeds, own_settings(run, arm), changes)

    def again(arm: str, seeds: Sequence[int]) -> Group:
        change = {"sampled_at": run.temperatures, "curve_points": run.repeat_points}
        return train(arm, here, seeds, [change])

    further = range(judge, judge + run.seeds_repeat)  # no seed that was looked at before
    nulls = range(min(some, run.seeds_repeat))

    few_es, few_grpo = (
        [{"unique_prompts": run.fewer_prompts, name: value} for value in vars(run)[name] if run.fewer_prompts]
        for name in ("alpha", "beta")
    )
    return {
        "base": base_specs(run.bases, of_runs(vars(run)), run.scale),
        "es": train("es", here, judge),
        "grpo": train("grpo", here, judge),
        "es_repeat": again("es", further),
        "grpo_repeat": again("grpo", further),
        "es_random_repeat": again("es_random", nulls),
        "grpo_random_repeat": again("grpo_random", nulls),
        "es_map": train("es", here, some, _cells(run, "es")),
        "grpo_map": train("grpo", here, some, _cells(run, "grpo")),
        "es_map_elsewhere": train("es", elsewhere, run.seeds_elsewhere, _cells(run, "es")),
        "es_few": train("es", here, some, few_es),
        "grpo_few": train("grpo", here, some, few_grpo),
        "es_sampled": train("es_sampled", here, some),
        "es_random": train("es_random", here, some),
        "grpo_random": train("grpo_random", here, some),
        "published": published_specs(run.scale),
        "decodings": _decodings(run, of),
    }


def _decodings(run: SimpleNamespace, of: Records) -> After:
    """Runs that measure the first base at the temperatures of the repeated runs."""
    if not run.seeds_repeat:
        return After([], ())
    known = {"base": [r for r in of["base"] if r["spec"]["base"] == run.bases[0]]} if "base" in of else {}
    return loading.decodings(run, known, ["base"])


def _cells(run: SimpleNamespace, arm: str) -> list[dict[str, float]]:
    """Return the settings of an arm's map: every pair of values on its two axes."""
    names = arms.swept(arm)
    return [dict(zip(names, pair, strict=True)) for pair in product(*(vars(run)[name] for name in names))]


def setting(spec: Mapping[str, Any]) -> str:
    """Return the two settings of a run that its arm's map varies, in words."""
    return ", ".join(f"{name.replace('_', ' ')} {spec[name]:g}" for name in arms.swept(spec["arm"]))


def by_setting(found: Sequence[Record]) -> dict[str, list[Record]]:
    """Return the runs of a group by setting, in the order in which they were asked for."""
    names = dict.fromkeys(setting(r["spec"]) for r in found)
    return {name: [r for r in found if setting(r["spec"]) == name] for name in names}


def end(record: Record, name: str) -> Any:
    """Return the last point of a run's curve."""
    return record["curve"][name][-1]


def hacked(found: Sequence[Record], decoding: str = "greedy") -> int:
    """Return how many of some runs ended hacked."""
    return sum(collapse.end(r, decoding) == "hacked" for r in found)


def fell(found: Sequence[Record], base: float, decoding: str) -> int:
    """Return how many runs lost right answers on the test questions, whatever their reward; base: its share of them."""
    return sum(bool(hacking.fell(r["test"][decoding], base)) for r in found)


def rights_of_base(of: Records) -> dict[str, float]:
    """Return decoding -> share of right answers of the first untrained base on the test questions."""
    known = [of["base"][0]["test"], *(r["test"] for r in of["decodings"])]
    return {name: test[name] for test in known for name in ("greedy", "t0.6", "t1") if name in test}


# ---- where a run first comes to a level of proxy reward ("at_proxy") or of KL ("at_kl")


class Crossing(NamedTuple):
    """A run at the first point that reaches a level, and at the point before."""

    before: float
    at: float
    right_before: float
    right: float


def crossing(record: Record, decoding: str, axis: str, level: float) -> Crossing | None:
    """Return where a run crosses a level; None if no point after the first reaches it, or the first does."""
    values = record["curve"][f"proxy_{decoding}" if axis == "at_proxy" else "kl"]
    right = record["curve"][f"right_{decoding}"]
    i = next((i for i, value in enumerate(values) if value >= level), 0)
    return Crossing(values[i - 1], values[i], right[i - 1], right[i]) if i else None


class Matched(NamedTuple):
    """Both arms where each run first comes to a level."""

    right: dict[str, np.ndarray]
    """Arm -> right answers there: (runs that come there, problems)."""
    at: dict[str, list[float]]
    """Arm -> where the runs that cross the level are then, on its axis."""
    difference: Interval | None
    """ES - GRPO, over seeds and problems; None where fewer than two runs of an arm come there."""


def matched(of: Records, decoding: str, axis: str, level: float) -> Matched:
    """Compare the right answers of the declared settings at a level; runs that never get there are left out."""
    reached = {arm: [collapse.right_at(r, decoding, **{axis: level}) for r in of[arm]] for arm in ARMS}
    right = {arm: np.array([one for one in each if one is not None]) for arm, each in reached.items()}
    past = {arm: [c.at for r in of[arm] if (c := crossing(r, decoding, axis, level))] for arm in ARMS}
    enough = min(map(len, right.values())) > 1
    return Matched(right, past, stats.crossed_bootstrap(right["es"], right["grpo"]) if enough else None)


def interpolated(record: Record, decoding: str, axis: str, level: float) -> float | None:
    """Return right answers on the line between the two points around a level; None where the run does not cross it."""
    if (found := crossing(record, decoding, axis, level)) is None:
        return None
    part = (level - found.before) / (found.at - found.before)
    return found.right_before + (found.right - found.right_before) * part


def best_past(record: Record, decoding: str, axis: str, level: float) -> float | None:
    """Return right answers at the best of all points at or past a level of the proxy; None where it is not crossed.

    Raises ValueError for a level of KL, past which the best point is the one that has gone least far.
    """
    if axis != "at_proxy":
        raise ValueError(f"axis={axis!r}: the best point past a level is asked for on 'at_proxy' alone.")
    if crossing(record, decoding, axis, level) is None:
        return None
    proxy, right = (record["curve"][f"{name}_{decoding}"] for name in ("proxy", "right"))
    return max(y for x, y in zip(proxy, right, strict=True) if x >= level)


READINGS = {"line": interpolated, "best": best_past}
"""Two controls of `matched`, which ask a run's curve otherwise."""


def control(
    of: Records, how: str, decoding: str, axis: str, level: float
) -> tuple[dict[str, list[float]], Interval | None]:
    """Return arm -> right answers of each run that crosses a level, by a reading, and ES - GRPO over seeds.

    how: a key of READINGS. The difference is None where fewer than two runs of an arm cross the level.
    """
    read = {arm: [READINGS[how](r, decoding, axis, level) for r in of[arm]] for arm in ARMS}
    scores = {arm: [one for one in each if one is not None] for arm, each in read.items()}
    if min(map(len, scores.values())) < 2:
        return scores, None
    return scores, stats.stratified_bootstrap([scores["es"]], [scores["grpo"]])


# ---- the map of ES


def on_map(of: Records, base: str) -> list[Record]:
    """Return the runs of the map of ES on a base."""
    return [r for group in ("es_map", "es_map_elsewhere") for r in of[group] if r["spec"]["base"] == base]


def untrained(of: Records) -> dict[str, Record]:
    """Return base -> the record of the untrained base."""
    return {r["spec"]["base"]: r for r in of["base"]}


def collapsed(found: Sequence[Record]) -> float:
    """Return the share of runs whose greedy right answers fell from their first point to their last."""
    return float(np.mean([hacking.fell(r["curve"]["right_greedy"][-1], r["curve"]["right_greedy"][0]) for r in found]))


def beyond_lines(of: Records) -> dict[bool, list[bool]]:
    """Return whether each setting of the map collapses: of those beyond one of the two lines, and of those within both.

    The lines are the sigma that breaks the base, and a walk of that length (`collapse.MapCell`).
    """
    bases, found = untrained(of), {False: [], True: []}
    for base in bases:
        for cell in collapse.collapse_map(on_map(of, base), bases[base]):
            found[max(cell.relative_sigma, cell.displacement) > 1].append(cell.collapsed >= 0.5)
    return found


# ---- the paper's numbers

_Numbers = dict[str, tuple[Any, str]]
_MACROS = {"greedy": "Greedy", "t1": "Sampled"}


def numbers(run: SimpleNamespace, of: Records) -> _Numbers:
    """Return macro -> value and format, of the notebook's own models."""
    found = {"TinyHackSeeds": (len(of["es"]), "d")}
    for arm in ARMS:
        found |= _ends(arm.title(), of[arm])
    for name, (axis, level) in {"Five": ("at_proxy", -5), "Two": ("at_proxy", -2), "Half": ("at_kl", 0.5)}.items():
        difference = matched(of, "greedy", axis, level).difference
        found[f"TinyRightAt{name}"] = ("-" if difference is None else difference.format(), "")
    controls = {"LineHalf": ("line", "at_kl", 0.5), "LineFive": ("line", "at_proxy", -5)}
    controls |= {"BestFive": ("best", "at_proxy", -5)}
    for name, (how, axis, level) in controls.items():
        _, difference = control(of, how, "greedy", axis, level)
        found[f"Tiny{name}"] = ("none" if difference is None else difference.format(), "")
    grpo, es = ((hacked(of[arm]), len(of[arm])) for arm in ("grpo", "es"))
    found["TinyHackedFisher"] = (f"{stats.fisher(*grpo, *es):.2g}", "")
    return found | _repeat_numbers(of) | _map_numbers(run, of) | _few_numbers(of)


def _ends(arm: str, found: Sequence[Record]) -> _Numbers:
    """Where the runs of a declared setting end, and how far their reward falls under noise of the middle sigma."""
    sigma = f"{measure.noise_sigmas(found[0]['spec']['base'])[0][1]:g}"
    numbers = {f"Tiny{arm}Kl": (np.mean([end(r, "kl") for r in found]), ".1f")}
    numbers[f"Tiny{arm}Gap"] = (np.mean([r["jensen"]["gaps"][sigma] for r in found]), ".2f")
    for decoding, name in _MACROS.items():
        numbers[f"Tiny{arm}Hacked{name}"] = (hacked(found, decoding), "d")
        for what, factor in (("right", 100), ("proxy", -1)):
            mean = factor * np.mean([end(r, f"{what}_{decoding}") for r in found])
            numbers[f"Tiny{arm}{what.title()}{name}"] = (mean, ".1f")
    return numbers


def _repeat_numbers(of: Records) -> _Numbers:
    """Repeated runs: how many lost right answers on the test questions under each decoding."""
    found: _Numbers = {}
    for arm in ARMS if of["es_repeat"] else ():
        runs, name = of[f"{arm}_repeat"], f"TinyAgain{arm.title()}"
        found[f"{name}Runs"] = (len(runs), "d")
        for decoding, word in (("greedy", "Greedy"), ("t0.6", "Warm"), ("t1", "Sampled")):
            found[f"{name}Fell{word}"] = (fell(runs, rights_of_base(of)[decoding], decoding), "d")
    return found


def _map_numbers(run: SimpleNamespace, of: Records) -> _Numbers:
    cells = [found for base in run.bases for found in by_setting(on_map(of, base)).values()]
    found = {"TinySafe": (sum(collapsed(cell) < 0.5 for cell in cells), "d"), "TinyMapped": (len(cells), "d")}
    found["TinyBreaking"] = (collapse.breaking_sigma(untrained(of)[run.bases[0]]), ".3f")
    for beyond, each in beyond_lines(of).items():
        name = "Beyond" if beyond else "Within"
        found |= {f"Tiny{name}": (len(each), "d"), f"Tiny{name}Collapsed": (sum(each), "d")}
    return found


def _few_numbers(of: Records) -> _Numbers:
    """Two training questions: runs, hacked runs, how far they go, and how often ES stood still."""
    found = {}
    for group in [group for group in FEW if of[group]]:
        name = f"TinyFew{group.removesuffix('_few').title()}"
        found |= {f"{name}Runs": (len(of[group]), "d"), f"{name}Hacked": (hacked(of[group]), "d")}
        found[f"{name}Kl"] = (np.median([end(r, "kl") for r in of[group]]), ".1f")
    if of["es_few"]:
        tied = np.mean([r["counts"]["tied"] / r["spec"]["steps"] for r in of["es_few"]])
        found["TinyFewTied"] = (100 * tied, ".0f")
    return found


def published_numbers(found: Sequence[Record]) -> _Numbers:
    """Return macro -> value and format, of the published completions of a 7 B model."""
    totals = {"Published": "completions", "Reproduced": "reproduced", "Changed": "changed"}
    numbers = {f"Concise{name}": (sum(r[key] for r in found), ",d") for name, key in totals.items()}
    numbers["ConciseAllEmpty"] = (sum(r["all_empty"] for r in found), "d")
    for arm in ("ES", "GRPO"):
        own = [r for r in found if r["spec"]["set"].startswith(f"{arm}_")]
        numbers[f"Concise{arm.title()}Runs"] = (len(own), "d")
        numbers[f"Concise{arm.title()}Hacked"] = (sum(r["verdict"] == "hacked" for r in own), "d")
    return numbers
