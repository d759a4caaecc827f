"""The formula of memory against real steps of every method: what they keep to the byte, all of it within 5 %."""

from concurrent.futures import ProcessPoolExecutor

import pytest
from evoalign_study import sweep
from evoalign_study.kinds import memory
from evoalign_study.records import record_line

from evoalign_lib import footprint

pytest.importorskip("peft")
pytest.importorskip("cma")

# components that depend on the weights' number alone; Adam has besides a step of 4 bytes a tensor
EXACT = ("weights", "master", "compensation", "adapter", "gradients", "reference model")


@pytest.mark.parametrize("rows", [4, 8])
@pytest.mark.parametrize("method", footprint.METHODS)
def test_the_formula_is_what_a_step_takes(method, rows):
    if method.startswith("grpo_adam8bit"):
        pytest.importorskip("torchao")
    found = memory._measure(method, "0.14M", rows, 8)
    predicted, measured = found["predicted"], found["measured"]
    assert sum(predicted.values()) == pytest.approx(sum(measured.values()), rel=0.05)
    assert {name: predicted.get(name) for name in EXACT} == {name: measured.get(name) for name in EXACT}
    assert predicted.get("moments", 0) == pytest.approx(measured.get("moments", 0), abs=8 * 100)


@pytest.mark.slow
@pytest.mark.parametrize("size", ["1M", "4M"])
@pytest.mark.parametrize("method", footprint.METHODS)
def test_the_formula_holds_for_larger_models(method, size):
    found = memory._measure(method, size, 16, 8)
    assert sum(found["predicted"].values()) == pytest.approx(sum(found["measured"].values()), rel=0.05)


def test_a_run_has_a_process_of_its_own_and_its_record_can_be_stored(monkeypatch):
    limits = []

    class Pool(ProcessPoolExecutor):
        def __init__(self, *arguments, max_tasks_per_child, **settings):
            limits.append(max_tasks_per_child)
            super().__init__(*arguments, max_tasks_per_child=max_tasks_per_child, **settings)

    monkeypatch.setattr(sweep, "ProcessPoolExecutor", Pool)
    settings = {"memory_rows": [2, 4, 8], "max_completion_length": 6}
    specs = memory.memory_specs(["es_kahan", "es"], ["0.14M"], settings, "smoke")
    records = list(sweep._run_all(specs, "nb", 1, {}))
    assert limits == [1] and [record["spec"]["method"] for record in records] == ["es_kahan", "es"]
    found = records[0]
    assert list(found["cells"]) == ["2", "4", "8"] and set(found["published"]) == set(memory.PUBLISHED)
    for rows, cell in found["cells"].items():
        assert cell["work"]["rows"] == int(rows) and cell["measured"]["weights"] == 2 * found["d"]
        # small tensors come from an arena that grows by pages, and Python takes some memory itself
        assert 0 < cell["resident"] < 2 * sum(cell["measured"].values()) + 4e6
    assert len(record_line(found)) < 6000
