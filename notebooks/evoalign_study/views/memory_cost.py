"""What the records of memory say: tables of bytes by component, and of ratios of methods."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from evoalign_lib import footprint
from evoalign_study.records import Record

if TYPE_CHECKING:
    from pandas import DataFrame

LESS = ("es", "es_kahan", "es_inplace", "es_low_rank", "es_lora", "essa")
MORE = ("grpo", "grpo_reference", "grpo_mixed", "grpo_lora", "grpo_adam8bit", "grpo_adam8bit_bfloat16")
"""Methods whose ratio is given: MORE over LESS."""
_PASSING = ("saved activations", "logits", "KV cache", "temporaries")
KEPT = tuple(name for name in footprint.COMPONENTS if name not in _PASSING)
"""Components that a method keeps from step to step, however many tokens a step has."""


def cells(records: Sequence[Record]) -> DataFrame:
    """Return a row for each component of each measured step.

    Columns: method, model, rows, component ("in all" for the sum), predicted and measured (bytes), error, the
    difference as a share of all that was measured.
    """
    import pandas as pd

    return pd.DataFrame(
        _cells(records), columns=["method", "model", "rows", "component", "predicted", "measured", "error"]
    )


def _cells(records: Sequence[Record]) -> Iterator[tuple]:
    for record in records:
        label, size = footprint.METHODS[record["spec"]["method"]].label, record["spec"]["size"]
        for rows, cell in record["cells"].items():
            predicted, measured = cell["predicted"], cell["measured"]
            total = sum(measured.values())
            for name in footprint.COMPONENTS:
                if name in predicted or name in measured:
                    p, m = predicted.get(name, 0), measured.get(name, 0)
                    yield label, size, int(rows), name, p, m, (p - m) / total
            yield label, size, int(rows), "in all", sum(predicted.values()), total, sum(predicted.values()) / total - 1


def errors(records: Sequence[Record]) -> DataFrame:
    """Return a row for each method: steps measured, and the largest error in all, of either sign."""
    found = cells(records)
    found = found[found.component == "in all"]
    named = [method.label for method in footprint.METHODS.values()]
    rows = found.groupby("method").error.agg(steps="size", largest=lambda e: e.loc[e.abs().idxmax()])
    return rows.reindex([name for name in named if name in rows.index]).reset_index()


def errors_table(records: Sequence[Record]) -> DataFrame:
    """Return, a row for each method, steps counted, how far the formula missed one, and what the system says, as text.

    The last column is by how much a process grew over what was counted, the range over numbers of rows, of the largest
    model alone: beside it the interpreter's own allocations are small.
    """
    largest = max(record["d"] for record in records)
    grown = {}
    for record in (record for record in records if record["d"] == largest):
        ratios = [cell["resident"] / sum(cell["measured"].values()) for cell in record["cells"].values()]
        grown[footprint.METHODS[record["spec"]["method"]].label] = f"{min(ratios):.2f} to {max(ratios):.2f}"
    size = next(record["spec"]["size"] for record in records if record["d"] == largest)
    found = errors(records)
    found["largest"] = found.largest.map("{:+.1%}".format)
    found[f"resident / counted, {size}"] = found.method.map(grown)
    return found.rename(columns={"steps": "steps counted", "largest": "formula's largest error"})


def bytes_a_parameter(records: Sequence[Record], size: str) -> DataFrame:
    """Return what the formula gives for a model on a GPU: a row for each of LESS and MORE, a column for each component.

    size: a key of `kinds.memory.PUBLISHED`.
    """
    import pandas as pd

    rows = {}
    published = _published(records)
    for method in (name for name in (*LESS, *MORE) if name in published):
        at = published[method][size]
        rows[footprint.METHODS[method].label] = {
            name: at["bytes"].get(name, 0) / at["d"] for name in footprint.COMPONENTS
        }
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=list(footprint.COMPONENTS))
    return frame.loc[:, frame.any()]


def ratios(records: Sequence[Record], kept: bool = False) -> DataFrame:
    """Return how many times the memory of each method of ES a method of GRPO needs, a row for each pair.

    Columns: method, against, and the models.

    Args:
        records: of kind "memory".
        kept: count `KEPT` alone.
    """
    import pandas as pd

    found = _published(records)

    def total(method: str, size: str) -> float:
        return sum(value for name, value in found[method][size]["bytes"].items() if not kept or name in KEPT)

    rows = []
    for less in (name for name in LESS if name in found):
        for more in (name for name in MORE if name in found):
            names = {"method": footprint.METHODS[less].label, "against": footprint.METHODS[more].label}
            sizes = sorted(found[less], key=lambda size: found[less][size]["d"])
            rows.append(names | {size: total(more, size) / total(less, size) for size in sizes})
    return pd.DataFrame(rows)


def ratios_table(records: Sequence[Record], sizes: Sequence[str] = ("0.5B", "7B", "72B")) -> DataFrame:
    """Return how many times the bytes of ES gradient training takes, as text: a row for each way of ES, a column for
    each of GRPO, in a cell the ratios at some sizes."""
    found = ratios(records)
    found["cell"] = [" / ".join(f"{row[size]:.2g}" for size in sizes) for _, row in found.iterrows()]
    table = found.pivot(index="method", columns="against", values="cell")
    order = [list(dict.fromkeys(found[name])) for name in ("method", "against")]
    return table.loc[order[0], order[1]].rename_axis(columns=None).reset_index()


def in_words(records: Sequence[Record], size: str = "7B") -> str:
    """Return, for a model, how many times the bytes of ES three methods of GRPO take, and of two ways to spare them."""
    found = ratios(records).set_index(["method", "against"])[size]
    against = [method for method in ("grpo", "grpo_adam8bit", "grpo_lora") if method in _published(records)]
    said = []
    for less in (method for method in ("es", "es_inplace", "es_lora") if method in _published(records)):
        name = footprint.METHODS[less].label
        each = [
            f"{found[name, footprint.METHODS[more].label]:.2g} ({footprint.METHODS[more].label})" for more in against
        ]
        said.append(f"{name}: {', '.join(each)}")
    return f"By the formula at {size}, bytes of gradient training over those of {'; '.join(said)}."


def _published(records: Sequence[Record]) -> dict[str, dict]:
    """Return method -> what the formula gives, in the order of `footprint.METHODS`."""
    found = {record["spec"]["method"]: record["published"] for record in records}
    return {method: found[method] for method in footprint.METHODS if method in found}
