"""Runs of kind scaling: populations timed on processes."""

import pytest
from evoalign_study import sweep
from evoalign_study.kinds.scaling import measured_spec
from helpers import refused

SETTINGS = {
    "max_completion_length": 16, "scaling_workers": [1, 2], "scaling_members": 3, "scaling_prompts": 4,
    "scaling_rounds": 3, "sigma": 0.01,
}  # fmt: skip


def test_a_population_has_the_same_rewards_on_any_number_of_processes():
    record = sweep.run(measured_spec("A0", SETTINGS, "tiny"), "nb", "commit")
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
    call=lambda base, changed: measured_spec(base, SETTINGS | changed, "tiny"),
)
