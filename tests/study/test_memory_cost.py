"""Tables and the figure of memory, from records whose formula is the real one and whose steps are made up."""

import pytest
from evoalign_study.kinds import memory
from evoalign_study.views import memory_cost, memory_cost_figures

from evoalign_lib import footprint
from evoalign_lib.engines.memory import shape


@pytest.fixture(scope="module")
def records() -> list[dict]:
    """A record of each method; what was measured is a tenth less weights, and temporaries that nobody predicted."""
    found = []
    for method in footprint.METHODS:
        predicted = {"weights": 900, "KV cache": 90}
        cells = {"4": {"predicted": predicted, "measured": {"weights": 810, "KV cache": 90, "temporaries": 100}}}
        cells["8"] = {"predicted": predicted, "measured": predicted}
        cells = {rows: cell | {"resident": 990 + 11 * int(rows)} for rows, cell in cells.items()}
        spec = {"kind": "memory", "method": method, "size": "1M"}
        found.append({"spec": spec, "d": 225, "cells": cells, "published": memory.published(method)})
    return found[::-1]


def test_cells_have_a_row_for_each_component_and_one_for_all(records):
    frame = memory_cost.cells(records)
    own = frame[(frame.method == "GRPO") & (frame.rows == 4)].set_index("component")
    assert list(own.index) == ["weights", "KV cache", "temporaries", "in all"]
    assert own.error.tolist() == pytest.approx([0.09, 0, -0.1, -0.01]) and own.measured["in all"] == 1000


def test_errors_are_the_largest_of_each_method_in_the_order_of_methods(records):
    frame = memory_cost.errors(records)
    assert list(frame.method) == [method.label for method in footprint.METHODS.values()]
    assert set(frame.steps) == {2} and frame.largest.tolist() == pytest.approx([-0.01] * len(frame))


def test_the_table_has_what_the_system_says_beside_the_errors(records):
    row = memory_cost.errors_table(records).set_index("method").loc["GRPO"]
    assert list(row.index) == ["steps counted", "formula's largest error", "resident / counted, 1M"]
    assert row.tolist() == [2, "-1.0%", f"{1034 / 1000:.2f} to {1078 / 990:.2f}"]


def test_bytes_a_parameter_sum_to_the_formula(records):
    frame = memory_cost.bytes_a_parameter(records, "7B")
    model = shape(memory.PUBLISHED["7B"])
    whole = footprint.bytes_of("grpo", model, memory.PUBLISHED_WORK, gpus=True)
    assert frame.loc["GRPO"].sum() == pytest.approx(sum(whole.values()) / model.d)
    assert frame.loc["ES, float32 master", "master"] == 4 and (frame.sum() > 0).all()


def test_ratios_by_hand(records):
    kept = memory_cost.ratios(records, kept=True).set_index(["method", "against"])["7B"]
    # weights, gradients, moments and vLLM's copy over a working copy and a master
    assert kept["ES, float32 master", "GRPO"] == pytest.approx((4 + 4 + 8 + 2) / 6, rel=0.01)
    assert kept["ES, in place", "GRPO over LoRA"] == pytest.approx(4 / 2, rel=0.02)
    assert kept["ES, float32 master", "GRPO over LoRA"] < 1
    whole = memory_cost.ratios(records)
    assert list(whole.columns) == ["method", "against", *memory.PUBLISHED] and len(whole) == 6 * 6
    assert (whole.iloc[:, 2:] > 0).all().all()


def test_the_table_of_ratios_has_the_sizes_side_by_side(records):
    found = memory_cost.ratios(records).set_index(["method", "against"]).loc[("ESSA", "GRPO over LoRA")]
    assert list(found.index) == list(memory.PUBLISHED)
    table = memory_cost.ratios_table(records)
    assert table.shape == (6, 7) and list(table.method)[-1] == "ESSA"
    cell = table.set_index("method").loc["ESSA", "GRPO over LoRA"]
    assert cell == " / ".join(f"{found[size]:.2g}" for size in ("0.5B", "7B", "72B"))


def test_ratios_in_words(records):
    said = memory_cost.in_words(records)
    found = memory_cost.ratios(records).set_index(["method", "against"])["7B"]
    assert f"ES, in place: {found['ES, in place', 'GRPO']:.2g} (GRPO), " in said and said.count("GRPO over LoRA") == 3


def test_the_figure_draws_every_component_and_total(records):
    fig, data = memory_cost_figures.bars(records)
    (ax,) = fig.axes
    lengths = sum(bar.get_width() for bar in ax.patches)
    assert lengths == pytest.approx(data.drop(columns="method").to_numpy().sum())
    assert len(ax.texts) == len(footprint.METHODS) - 1 and set(memory_cost_figures._LOOKS) == set(footprint.COMPONENTS)
    looks = list(memory_cost_figures._LOOKS.values())
    assert len(set(looks)) >= len(looks) - 1
