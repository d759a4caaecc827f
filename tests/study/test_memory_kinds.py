"""What a run leaves on disk; what lies in memory while a step runs, by component; populations on processes."""

import numpy as np
import pytest
import torch
from evoalign_study import sweep
from evoalign_study.kinds.memory import storage_specs
from evoalign_study.kinds.scaling import measured_spec
from evoalign_study.memory_profile import Allocations, resident
from helpers import SMALL_RUN, refused

SETTINGS = SMALL_RUN | {"max_completion_length": 8, "prompts_per_step": 2, "population_size": 4, "num_generations": 2}
SETTINGS |= {"warm_rows": 4}
D = {"es": 140_928, "essa": 1_792, "grpo": 140_928, "grpo_lora": 1_792}
KIB = 1024


def stored(arms, **changed) -> dict:
    specs = storage_specs(dict.fromkeys(arms, SETTINGS | changed), "A0", "smoke")
    return {spec["arm"]: sweep.run(spec, "nb", "commit") for spec in specs}


@pytest.fixture(scope="module")
def records():
    return stored(D)


def test_models_moments_and_ledgers_are_counted(records):
    for arm, record in records.items():
        kept, d = record["bytes"], D[arm]
        assert record["d"] == d and 0 <= kept["model"] - 4 * d < 4_000, arm  # float32 behind a header with names
        if arm in ("grpo", "grpo_lora"):
            assert 8 * d <= kept["moments"] < 8 * d + 60_000 and "packed" not in record
        else:
            assert 0 <= kept["master"] - 4 * d < 4_000 and 0 < record["packed"] < kept["ledger"]
    assert records["es"]["start"] == 0 < records["essa"]["start"] == records["essa"]["bytes"]["model"]


def test_a_ledger_grows_by_its_steps_and_members_and_not_by_the_model(records):
    first = records["es"]["bytes"]
    for more in ({"steps": 4}, {"population_size": 8}):
        grown = stored(["es"], **more)["es"]["bytes"]
        assert first["ledger"] < grown["ledger"] < 3 * first["ledger"] and grown["model"] == first["model"]
    with pytest.raises(ValueError, match="'some/model'"):
        storage_specs({"es": SETTINGS}, "some/model", "smoke")


def kib(*numbers: int) -> torch.Tensor:
    return torch.zeros(*numbers, 256)


def test_the_peak_is_what_was_alive_at_once_and_forgotten_when_a_step_begins():
    with Allocations() as seen:
        first = kib(3)
        del first  # gone before the others come
        second = kib(2)
        third = second + 1
        view = third[0]
        del second, third
        assert seen.at_peak == {"temporaries": 4 * KIB} and sum(seen.now.values()) == 2 * KIB and view.shape == (256,)
        seen.begin()
        view + view
    assert seen.at_peak == {"temporaries": 3 * KIB}


def test_arrays_of_numpy_are_counted_while_they_are_read_or_held():
    held, passing = np.zeros(512, np.float32), np.zeros(1024, np.float32)
    with Allocations() as seen:
        seen.hold("master", held)
        torch.from_numpy(held) * 2
        assert seen.at_peak == {"master": 2 * KIB, "temporaries": 2 * KIB}
        torch.from_numpy(passing) * 2
    assert seen.at_peak == {"master": 2 * KIB, "noise or factors": 4 * KIB, "temporaries": 4 * KIB}


def test_components_by_shape_and_of_views_that_are_one_storage():
    flat = torch.zeros(512)
    with Allocations(lambda operation, tensor: "logits" if tensor.shape[-1] == 256 else None) as seen:
        seen.name("weights", [flat[:256], flat[256:], flat])
        held = kib(1), torch.zeros(512, 2)
    assert seen.at_peak == {"weights": 2 * KIB, "logits": KIB, "temporaries": 4 * KIB} and len(held) == 2


def test_a_status_without_the_field_is_refused():
    assert resident("VmRSS") > 10 * KIB * KIB
    with pytest.raises(RuntimeError, match="VmNone"):
        resident("VmNone")


# ---- populations on processes


TIMED = {
    "max_completion_length": 16, "scaling_workers": [1, 2], "scaling_members": 3, "scaling_prompts": 4,
    "scaling_rounds": 3, "sigma": 0.01,
}  # fmt: skip


def test_a_population_has_the_same_rewards_on_any_number_of_processes():
    record = sweep.run(measured_spec("A0", TIMED, "tiny"), "nb", "commit")
    one, two = record["workers"]["1"], record["workers"]["2"]
    assert record["same_rewards"] and one["speed_up"] == 1
    assert two["speed_up"] == pytest.approx(one["seconds"] / two["seconds"], rel=1e-3)
    for cell in (one, two):
        assert cell["members_per_second"] == pytest.approx(3 / cell["seconds"], rel=1e-3)
        assert cell["seconds"] <= cell["seconds_median"] and 0 < cell["busy"] <= 1.05
    assert len(record["load"]) == 2


test_what_cannot_be_is_refused = refused(
    ("A0", {"scaling_rounds": 1}, "scaling_rounds=1"),
    ("A0", {"scaling_workers": [2, 1]}, "scaling_workers="),
    ("B0", {}, "'B0'"),
    call=lambda base, changed: measured_spec(base, TIMED | changed, "tiny"),
)
