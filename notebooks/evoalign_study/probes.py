"""What a probe (`evoalign_lib.probe`) says beforehand, beside what ES gained in the committed runs of each setting.

`python -m evoalign_study.probes` makes the probes that `paper/results/probes.json` lacks. A cell is a setting of the
arm "es" in the tiny world: task, base, sigma, alpha, N, prompts per step, steps. Its runs are those of all notebooks.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from evoalign_lib import files, tiny
from evoalign_lib.analysis.stats import Interval, interval_of
from evoalign_study import evolution, paths, provenance, records, training

if TYPE_CHECKING:
    from pandas import DataFrame

FILE = paths.RESULTS / "probes.json"
NAMES = ("task", "base", "filler_steps", "sigma", "alpha", "population_size", "prompts_per_step", "steps")
"""Fields of a spec that make a cell."""
GAINED = {"countdown": "validation_greedy", "conciseness": "reward_greedy"}
"""Task -> the curve whose last point less its first is what a run gained: a share, or characters."""
TARGETS = {"countdown": (1.0, 0.05), "conciseness": (None, 1.0)}
UNTRAINED = {"task": "countdown", "base": "untrained", "sigma": 0.01, "alpha": 0.005, "population_size": 30}
UNTRAINED |= {"prompts_per_step": 128, "steps": 104, "max_completion_length": tiny.MAX_COMPLETION_LENGTH}
"""A cell without signal: the architecture of A0 with random weights."""


@cache
def cells() -> dict[tuple, list[records.Record]]:
    """Return the cells with their runs: ES on greedy fitness, with new prompts in every step or on 200 questions."""
    found: dict[tuple, list[records.Record]] = {}
    for record in (each for file in records.record_files("tiny") for each in records.read_records(file)):
        spec = record["spec"]
        if spec["kind"] == "train" and spec["arm"] == "es" and spec["task"] in GAINED:
            if spec.get("unique_prompts") == {"countdown": None, "conciseness": 200}[spec["task"]]:
                found.setdefault(tuple(spec.get(name) for name in NAMES), []).append(record)
    return found


def probed(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the probe of a run's spec; spec: of an ES run, or `UNTRAINED`."""
    import torch
    from transformers import AutoModelForCausalLM

    from evoalign_lib.probe import probe

    drawn = dict(spec) | {"kind": "train", "arm": "es", "seed": 0, "steps": min(spec["steps"], 32), "curve_points": 2}
    model, tokenizer, sets = training.world(drawn | ({"base": "A0"} if spec["base"] == "untrained" else {}))
    if spec["base"] == "untrained":
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(model.config).eval()
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"report_to": "none", "save_strategy": "no", "max_steps": spec["steps"]}
        es, _ = evolution.trainer(drawn, (model, tokenizer, {"train": sets["train"]}), Path(folder), **quiet)
        with closing(es.engine):
            return probe(es, 130_000, *TARGETS[spec["task"]])


def make() -> None:
    """Make the missing probes of all cells and of the untrained base, storing each when it is made."""
    stored = json.loads(FILE.read_text()) if FILE.is_file() else []
    wanted = {key: runs[0]["spec"] for key, runs in cells().items()}
    wanted[tuple(UNTRAINED.get(name) for name in NAMES)] = UNTRAINED
    for key in sorted(wanted.keys() - {tuple(each["cell"]) for each in stored}, key=str):
        made = {"cell": list(key), "probe": probed(wanted[key]), "commit": provenance.commit()}
        stored = sorted([*stored, made], key=lambda each: json.dumps(each["cell"]))
        files.replace_text(FILE, json.dumps(stored, indent=0) + "\n")


def table() -> DataFrame:
    """Return a row per cell: its setting, rho, what the probe foretold and advised, and what its runs gained (in mean).

    predicted, low, high and gained are in points of accuracy, for conciseness in characters; runs: their number.
    """
    from pandas import DataFrame

    rows = []
    for each in json.loads(FILE.read_text()):
        told, runs = each["probe"], cells().get(tuple(each["cell"]), [])
        scale = 100 if told["right"] else 1
        curves = [run["curve"][GAINED[each["cell"][0]]] for run in runs]
        row = dict(zip(NAMES, each["cell"], strict=True)) | {"rho": told["rho"]}
        row |= {"predicted": scale * told["run"]["gain"]} | {end: scale * told["run"][end] for end in ("low", "high")}
        gained = scale * float(np.mean([curve[-1] - curve[0] for curve in curves])) if curves else 0.0  # never moved
        rows.append(row | {"gained": gained, "runs": len(runs), "recommendation": told["recommendation"]})
    return DataFrame(rows)


def in_words(cells: DataFrame) -> DataFrame:
    """Return the rows of `table` as text: base and setting, prediction with its interval, what came, and the advice."""
    from pandas import DataFrame

    rows = []
    for cell in cells.sort_values(["base", "filler_steps", *NAMES[3:]]).to_dict("records"):
        fillers = "" if np.isnan(cell["filler_steps"]) else f", {cell['filler_steps']:g} fillers"
        row = {"base": cell["base"] + fillers} | {name.replace("_", " "): f"{cell[name]:g}" for name in NAMES[3:]}
        row |= {"rho": f"{cell['rho']:.2f}"}
        row |= {"predicted [95 %]": "{predicted:z.1f} [{low:z.1f}, {high:z.1f}]".format(**cell)}
        rows.append(row | {"gained": f"{cell['gained']:.1f}", "runs": cell["runs"], "said": cell["recommendation"]})
    return DataFrame(rows)


def agreement(cells: DataFrame, resamples: int = 10_000) -> Interval:
    """Return Spearman's correlation of predictions with what runs gained, with its bootstrap interval over cells."""
    from scipy.stats import spearmanr

    pairs, rng = cells[["predicted", "gained"]].to_numpy(), np.random.default_rng(0)
    draws = [spearmanr(pairs[rng.integers(len(pairs), size=len(pairs))]).statistic for _ in range(resamples)]
    return interval_of(spearmanr(pairs).statistic, draws, len(pairs))


if __name__ == "__main__":
    make()
