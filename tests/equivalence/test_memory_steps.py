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


ONE_OF_EACH = ("es", "es_lora", "grpo_reference")
FAST = [(method, "0.14M", 4) for method in ONE_OF_EACH]
SLOW = [(method, "0.14M", rows) for method in footprint.METHODS for rows in (4, 8)]
SLOW += [(method, size, 16) for method in footprint.METHODS for size in ("1M", "4M")]


CASES = FAST + [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW if case not in FAST]


@pytest.mark.parametrize(("method", "size", "rows"), CASES)
def test_the_formula_is_what_a_step_takes(method, size, rows):
    if method.startswith("grpo_adam8bit"):
        pytest.importorskip("torchao")
    cell = memory._measure(method, size, rows, 8)
    predicted, measured = cell["predicted"], cell["measured"]
    assert sum(predicted.values()) == pytest.approx(sum(measured.values()), rel=0.05)
    assert {name: predicted.get(name) for name in EXACT} == {name: measured.get(name) for name in EXACT}
    assert predicted.get("moments", 0) == pytest.approx(measured.get("moments", 0), abs=8 * 100)


@pytest.mark.slow
def test_a_run_has_a_process_of_its_own_and_its_record_can_be_stored(monkeypatch):
    limits = []

    class Pool(ProcessPoolExecutor):
        def __init__(self, *arguments, max_tasks_per_child, **settings):
            limits.append(max_tasks_per_child)
            super().__init__(*arguments, max_tasks_per_child=max_tasks_per_child, **settings)

    monkeypatch.setattr(sweep, "ProcessPoolExecutor", Pool)
    settings = {"memory_rows": [2, 4], "max_completion_length": 6}
    specs = memory.memory_specs(["es_kahan", "es"], ["0.14M"], settings, "smoke")
    records = list(sweep._run_all(specs, "nb", 1, {}))
    assert limits == [1] and [record["spec"]["method"] for record in records] == ["es_kahan", "es"]
    record = records[0]
    assert list(record["cells"]) == ["2", "4"] and set(record["published"]) == set(memory.PUBLISHED)
    for rows, cell in record["cells"].items():
        assert cell["work"]["rows"] == int(rows) and cell["measured"]["weights"] == 2 * record["d"]
        # small tensors come from an arena that grows by pages, and Python takes some memory itself
        assert 0 < cell["resident"] < 2 * sum(cell["measured"].values()) + 4e6
    assert len(record_line(record)) < 6000
