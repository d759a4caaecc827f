"""What the runs of a real model found, by name, and the table of what the tiny world predicted of them.

The records are the committed ones of scale "real". Nothing is decided here: the claims R0 to R11 are judged by their
rules, and `predictions` sets their verdicts beside the numbers of the tiny world.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pandas import DataFrame

from evoalign_lib.analysis import connectivity, coverage, stats
from evoalign_study import collapse, path_points
from evoalign_study.claims import Verdict, load_claims
from evoalign_study.records import Record, accuracy_matrix, unpack_counts
from evoalign_study.results import Results, answered
from evoalign_study.style import STROKES

Groups = Mapping[str, Sequence[Record]]
"""Arm, "base", "products", or "ARM to grpo" for lines -> records, by seed."""
ARMS = ("es", "grpo", "es_random")
_LEVELS = {"greedy": -50, "t0.6": -50, "t1": -60}
"""Decoding -> length reward at which runs on facts are read, set before these runs were made."""
_OUTCOMES = {"supported": "hit", "within margin": "hit", "contradicted": "miss", "depends on decoding": "miss"}


def groups(records: Sequence[Record], task: str = "arithmetic") -> dict[str, list[Record]]:
    """Return the records of products, or of facts, at scale "real": no sweep (which has no test), merge or adapter.

    Runs of a CPU count only where ES has none on a GPU; the two are never pooled.
    """
    found: dict[str, list[Record]] = {}
    asked = {"task": task, "operation": "*" if task == "arithmetic" else None, "lora_rank": None}
    known = [r for r in records if all(r["spec"].get(name) == value for name, value in asked.items())]
    devices = {r["spec"].get("device", "cuda") for r in known if r["spec"].get("arm") == "es"}
    device = "cuda" if "cuda" in devices else "cpu"
    for record in sorted(known, key=lambda r: r["spec"].get("seed", 0)):
        spec, kind = record["spec"], record["spec"]["kind"]
        here = spec.get("device", "cuda") == device
        if here and (kind in ("products", "path") or (kind in ("base", "train") and "test" in record)):
            line = kind == "path" and f"{spec['first']['of']['run']['arm']} to grpo"
            found.setdefault(line or spec.get("arm", kind), []).append(record)
    return found


def pass_at(runs: Sequence[Record], decoding: str, k: int | Sequence[int]) -> NDArray[np.float64]:
    """Return pass@k from 16 samples a problem, (runs, problems), for several k (runs, problems, len(k))."""
    counts = [unpack_counts(run["test"][f"{decoding}_counts"]) for run in runs]
    return coverage.estimate_pass_at(np.array(counts), 16, k)


def results(real: Groups, facts: Groups, verdicts: Sequence[Verdict] = ()) -> dict[str, Any]:
    """Return what the real model's runs found, by name; what lacks runs is left out.

    Args:
        real, facts: `groups` of the two tasks. Accuracies and pass@16 have crossed intervals over runs and problems.
        verdicts: on claims, whose intervals have the names "ID: LABEL".
    """
    found: dict[str, Any] = {f"{v.id}: {label}": each for v in verdicts for label, each in v.intervals.items()}
    found |= {"predictions": len(verdicts), "decided": sum(v.verdict in _OUTCOMES for v in verdicts)}
    for decoding in STROKES:
        right = {arm: accuracy_matrix(real[arm], decoding) for arm in ("base", *ARMS) if arm in real}
        within = {a: pass_at(real[a], decoding, 16) for a in right} if decoding != "greedy" else {}
        for what, of in {"": right, "within 16, ": within}.items():
            found |= {f"{what}{arm} {decoding}": stats.crossed_bootstrap(each) for arm, each in of.items()}
            for a, b in (*product(ARMS, ["base"]), ("grpo", "es")):
                if {a, b} <= of.keys():
                    other = of[b][0] if b == "base" else of[b]
                    found[f"{what}{a} - {b} {decoding}"] = stats.crossed_bootstrap(of[a], other)
        found |= {f"std {a} {decoding}": each.mean(axis=1).std(ddof=1) for a, each in right.items() if len(each) > 1}
        found |= _on_facts(facts, decoding)
    for line in [name for name in real if name.endswith(" to grpo")]:  # as R8 does, with its null
        barrier = path_points.mean_barrier(path_points.errors(real[line], "greedy"), 1000)
        high = max(barrier.interval.high, connectivity.upper_bound(barrier))
        found[f"barrier {line}"] = replace(barrier.interval, high=high)
    if "base" in real:
        found["problems"] = real["base"][0]["test"]["n"]
    if {"es", "grpo"} <= real.keys():
        spent = {arm: np.mean([run["budget"]["forward_flops"] for run in real[arm]]) for arm in ("es", "grpo")}
        found["share of FLOPs"] = spent["grpo"] / spent["es"]
    for name in [name for name in found if name.startswith("R9: ")]:  # random directions have a cosine of 1 / sqrt(d)
        each, unit = found[name], real["es"][0]["d"] ** 0.5
        found["cosine"] = replace(each, value=unit * each.value, low=unit * each.low, high=unit * each.high)
    return found


def _on_facts(of: Groups, decoding: str) -> dict[str, Any]:
    """Return the change of right answers since the base, and right answers where runs first come to the level.

    Those of ES are also "freed": what the walk of the same seed has lost by then is given back.
    """
    found: dict[str, Any] = {"facts on": "CPU" if any("device" in r["spec"] for r in of.get("es", ())) else "GPU"}
    for arm in (arm for arm in ARMS if arm in of and "base" in of):
        before = of["base"][0]["test"][decoding]
        there = [collapse.right_at(run, decoding, _LEVELS[decoding]) for run in of[arm]]
        reached = [right.mean() for right in there if right is not None]
        found[f"facts {arm} n"], found[f"facts {arm} come {decoding}"] = len(of[arm]), len(reached)
        found[f"facts {arm} change {decoding}"] = np.mean([run["test"][decoding] - before for run in of[arm]])
        found[f"facts {arm} there {decoding}"] = np.mean(reached) if reached else None
    walks = {run["spec"]["seed"]: run for run in of.get("es_random", ())}
    pairs = [(run, walk) for run in of.get("es", ()) if (walk := walks.get(run["spec"]["seed"]))]
    freed = [collapse.right_at(run, decoding, _LEVELS[decoding], walk=walk) for run, walk in pairs]
    known = [right.mean() for right in freed if right is not None]
    return found | {f"facts es freed {decoding}": np.mean(known) if known else None}


def predictions(verdicts: Sequence[Verdict], found: Results, numbers: Mapping[str, str]) -> DataFrame:
    """Return what was predicted and found: a row a claim of scale "real", all cells text.

    Args:
        verdicts: on all claims.
        found: `results`.
        numbers: the numbers that the paper quotes of the tiny world, macro -> text.
    """
    predicted, seen = answered("predicted of a real model", numbers), answered("found on a real model", found)
    notes = {claim["id"]: claim.get("note", "") for claim in load_claims()}
    rows = []
    for v in (v for v in verdicts if v.scale == "real"):
        why = f" ({v.verdict})" if v.verdict not in ("open", *_OUTCOMES) else ""
        row = {"claim": v.id, "predicted in the tiny world": predicted.get(v.id, v.title)}
        row["found on a real model"] = seen.get(v.id) or v.key or f"Not run. {notes.get(v.id, '')}".strip()
        rows.append(row | {"outcome": _OUTCOMES.get(v.verdict, "open") + why})
    return DataFrame(rows)
