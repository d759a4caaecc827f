"""What notebook 06 says and tabulates of scaling: worker processes measured, GPUs simulated, published times beside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from evoalign_lib.analysis import scaling
from evoalign_study.kinds.scaling import MACHINES, PUBLISHED, Published
from evoalign_study.records import Record

if TYPE_CHECKING:
    from pandas import DataFrame

LABELS = {"es": "ES, weights of their own", "es_adapters": "ES, adapters", "grpo": "GRPO"}
"""Key of `MACHINES` -> name in tables and legends: how ES holds its members, or GRPO."""
WHOSE = {"tiny": "tiny base, stretched", "released": "released, 7 B, stretched"}
"""Whose lengths are simulated -> name in tables."""
PUBLISHED_CAPTION = "Published, other models: minutes to an accuracy, as read off figures, and not of a step."


def simulated(found: Sequence[Record], lengths: str | None = None) -> list[Record]:
    """Return the simulated records among any that are fitted to nothing; with `lengths`, those of these lengths."""
    of = [record for record in found if record.get("simulation") and "fitted" not in record]
    return [record for record in of if lengths in (None, record["spec"]["lengths"])]


def speed_ups(record: Record) -> NDArray[np.float64]:
    """Return time on one GPU / time on so many, for each draw of the lengths, (draws, counts)."""
    times = np.array(record["total"])
    return times[:, :1] / times


def table(found: Sequence[Record]) -> DataFrame:
    """Return a row per simulated step and number of GPUs: time, speed-up, efficiency, what stragglers cost."""
    from pandas import DataFrame

    rows = []
    for record in simulated(found):
        for i, gpus in enumerate(record["gpus"]):
            speed_up = speed_ups(record)[:, i].mean()
            row = {"simulated": LABELS[record["spec"]["what"]], "lengths": WHOSE[record["spec"]["lengths"]]}
            row |= {"GPUs": gpus, "seconds a step": f"{np.mean(record['total'], axis=0)[i]:.3g}"}
            row |= {"speed-up": f"{speed_up:.1f}", "efficiency, %": f"{100 * speed_up / gpus:.0f}"}
            row |= {"without work, %": f"{100 * record['idle'][i] + 0.0:.0f}"}
            rows.append(row | {"lost to stragglers, %": f"{max(0.0, 100 * record['stragglers'][i]):.0f}"})
    return DataFrame(rows)


def laws(record: Record) -> dict[str, scaling.Fit]:
    """Return law -> its fit to the times of a simulated step."""
    return {law: scaling.fit(law, record["gpus"], record["total"]) for law in scaling.LAWS}


def laws_table(found: Sequence[Record]) -> DataFrame:
    """Return a row per simulated step: the parameters of both laws, and how far they miss its times."""
    from pandas import DataFrame

    rows = []
    for record in simulated(found):
        amdahl, usl = laws(record).values()
        row = {"simulated": LABELS[record["spec"]["what"]], "lengths": WHOSE[record["spec"]["lengths"]]}
        row |= {"serial share, % [95 %]": amdahl.parameters["serial"].format(digits=2)}
        row |= {"Amdahl's error, %": f"{100 * amdahl.error:.0f}"}
        row |= {"sigma, % [95 %]": usl.parameters["sigma"].format(digits=2)}
        row |= {"kappa, % [95 %]": usl.parameters["kappa"].format(digits=4), "error, %": f"{100 * usl.error:.0f}"}
        rows.append(row)
    return DataFrame(rows)


def measured_table(found: Sequence[Record]) -> DataFrame:
    """Return a row per number of worker processes, measured on the tiny base, with the load of the machine."""
    from pandas import DataFrame

    rows = []
    for record in (record for record in found if record["spec"]["sort"] == "measured"):
        for n, cell in record["workers"].items():
            row = {"base": record["spec"]["base"], "processes": int(n), "cores": record["cores"]}
            row |= {"members a second": f"{cell['members_per_second']:.3g}", "speed-up": f"{cell['speed_up']:.2f}"}
            row |= {
                "efficiency, %": f"{100 * cell['speed_up'] / int(n):.0f}",
                "on a core, %": f"{100 * cell['busy']:.0f}",
            }
            rows.append(row | {"load average": " to ".join(f"{load:.1f}" for load in record["load"])})
    return DataFrame(rows)


# ---- published


def gain(published: Published) -> tuple[float, float]:
    """Return how many times faster the last number of GPUs was than the first, and how many times the GPUs it was."""
    return published.minutes[0] / published.minutes[-1], published.gpus[-1] / published.gpus[0]


def published_table(found: Sequence[Record]) -> DataFrame:
    """Return a row per published pair of times: its speed-up, and where a simulated step was fitted, what that lacks.

    A scale of 0 says that no part of the simulated step is seen in times that scale better than it.
    """
    from pandas import DataFrame

    fitted = {record["spec"]["fitted_to"]: record["fitted"] for record in found if "fitted" in record}
    rows = []
    for name, published in PUBLISHED.items():
        faster, more = gain(published)
        row = {"published": published.what, "GPUs": " to ".join(map(str, published.gpus))}
        row |= {"minutes": " to ".join(f"{m:g}" for m in published.minutes), "times faster": f"{faster:.1f}"}
        row |= {"times the GPUs": f"{more:.0f}", "efficiency, %": f"{100 * faster / more:.0f}"}
        serial = scaling.fit("amdahl", published.gpus, published.minutes)
        row |= {"serial share, %": f"{100 * serial.parameters['serial'].value:.1f}"}
        if name in fitted:
            of = fitted[name]
            row |= {"steps' scale": f"{of['scale']:.3g}", "overhead, minutes": f"{of['overhead']:.3g}"}
            row |= {"further work, GPU minutes": f"{of['work']:.0f}", "error, %": f"{100 * of['error']:.0f}"}
        rows.append(row)
    return DataFrame(rows)


# ---- break-even


def break_even_table(gpus: Sequence[int]) -> DataFrame:
    """Return a row per number of GPUs: the population up to which a step of ES spends less outside of generation."""
    from pandas import DataFrame

    rows = []
    for n in gpus:
        row = {"GPUs": n, "GRPO: gradients, optimizer, weights, ms": f"{1e3 * _exchanged(n):.0f}"}
        for what in ("es", "es_adapters"):
            members = scaling.break_even_members(MACHINES[what], n)
            row[f"members, {LABELS[what]}"] = f"{members:,.0f}"
        rows.append(row)
    return DataFrame(rows)


def _exchanged(gpus: int) -> float:
    machine = MACHINES["grpo"]
    return machine.gradients(gpus) + machine.optimizer + machine.weights(gpus)


# ---- answers


def answers(found: Sequence[Record], lengths: str = "released") -> dict[str, str]:
    """Return question -> the sentence that answers it, from records of both sorts."""
    of = simulated(found, lengths)
    said = {"Does a step of ES scale almost linearly over GPUs, by the simulation?": _scaling_in_words(of)}
    said["What do stragglers cost?"] = _stragglers_in_words(of)
    said["What do the published times say?"] = _published_in_words()
    return said


def efficiency(record: Record, gpus: int) -> NDArray[np.float64]:
    """Return time on one GPU / (GPUs x time on so many), for each draw, (draws,). Raises ValueError for other GPUs."""
    if gpus not in record["gpus"]:
        raise ValueError(f"no time on {gpus} GPUs: the record has {', '.join(map(str, record['gpus']))}.")
    return speed_ups(record)[:, record["gpus"].index(gpus)] / gpus


def _scaling_in_words(found: Sequence[Record]) -> str:
    each, gpus = [], found[0]["gpus"][-1]
    for record in found:
        half = max(g for g in record["gpus"] if efficiency(record, g).mean() >= 0.5)
        first, last = (f"{seconds:.3g}" for seconds in np.mean(record["total"], axis=0)[[0, -1]])
        speed_up = speed_ups(record)[:, -1].mean()
        each.append(
            f"{_name(record)}: {speed_up:.1f} times ({first} s, then {last} s), half the ideal or more up to {half}"
        )
    return (
        f"Simulated, over {len(found[0]['total'])} draws of the lengths, {gpus} GPUs are faster than one so much: "
        f"{'; '.join(each)}. A step that wastes more on one GPU has the higher speed-up: compare the seconds."
    )


def _stragglers_in_words(found: Sequence[Record]) -> str:
    each = []
    for record in found:
        first, last = (f"{max(0.0, 100 * record['stragglers'][i]):.0f} %" for i in (0, -1))
        each.append(f"{_name(record)} {first} of its time on one GPU and {last} on {record['gpus'][-1]}")
    return f"At equal lengths the same step would save: {'; '.join(each)}."


def _published_in_words() -> str:
    each = []
    for published in PUBLISHED.values():
        faster, more = gain(published)
        each.append(
            f"{published.what}: {faster:.1f} times faster with {more:.0f} times the GPUs ({100 * faster / more:.0f} %)"
        )
    return f"{'; '.join(each)}. These are times to an accuracy, single runs, two points each."


def _name(record: Record) -> str:
    return LABELS[record["spec"]["what"]]
