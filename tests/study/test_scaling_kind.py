"""Runs of kind scaling: populations timed on processes, and steps simulated."""

import numpy as np
import pytest
from evoalign_study import sweep
from evoalign_study.kinds.scaling import MACHINES, PUBLISHED, RELEASED, WORKLOADS, measured_spec, simulated_spec
from evoalign_study.records import record_line

from evoalign_lib.analysis import scaling

SETTINGS = {
    "scaling_gpus": [1, 4, 64], "scaling_draws": 2, "scaling_tokens": 256, "max_completion_length": 16,
    "validation_problems": 30, "scaling_workers": [1, 2], "scaling_members": 3, "scaling_prompts": 4,
    "scaling_rounds": 3, "sigma": 0.01,
}  # fmt: skip


def _run(spec):
    return sweep.run(spec, "nb", "commit")


@pytest.fixture(scope="module")
def simulated():
    return {what: _run(simulated_spec(what, "tiny", SETTINGS, "tiny")) for what in MACHINES}


def test_a_population_has_the_same_rewards_on_any_number_of_processes():
    record = _run(measured_spec("A0", SETTINGS, "tiny"))
    one, two = record["workers"]["1"], record["workers"]["2"]
    assert record["same_rewards"] and one["speed_up"] == 1
    assert two["speed_up"] == pytest.approx(one["seconds"] / two["seconds"], rel=1e-3)
    for cell in (one, two):
        assert cell["members_per_second"] == pytest.approx(3 / cell["seconds"], rel=1e-3)
        assert cell["seconds"] <= cell["seconds_median"] and 0 < cell["busy"] <= 1.05
    assert len(record["load"]) == 2


def test_a_simulated_record_says_so_and_is_the_same_when_it_is_made_again(simulated):
    for what, record in simulated.items():
        assert record["simulation"] is True and len(record_line(record)) < 8_000
        assert np.shape(record["total"]) == (2, 3)
        parts = sum(np.array(record[name]) for name in ("generation", "update", "communication"))
        assert np.mean(record["total"], axis=0) == pytest.approx(parts, rel=1e-4)
        assert record["simulated_lengths"]["mean"] == pytest.approx(256, rel=0.02)
        assert record["total"][0] != record["total"][1]
        spec = record["spec"] | {"scaling_gpus": [1, 4]}
        assert [row[:2] for row in record["total"]] == _run(spec)["total"], what
    assert sum(simulated["es"]["histogram"]["counts"]) == 4 * 30


def test_a_record_is_what_its_spec_says(simulated):
    record, rng = simulated["grpo"], np.random.default_rng(np.random.SeedSequence([1]))
    seen = dict(zip(*record["histogram"].values(), strict=True))
    stretch = 256 / np.average(list(seen), weights=list(seen.values()))
    drawn = scaling.draw_lengths(seen, WORKLOADS["grpo"], rng)
    step = scaling.policy_step(scaling.Machine(**record["spec"]["machine"]), np.rint(stretch * drawn), 4, 100)
    assert record["total"][1][1] == pytest.approx(step.total, rel=1e-5)


def test_published_times_are_met_where_two_parameters_can():
    few = SETTINGS | {"scaling_draws": 1}
    for name, published in PUBLISHED.items():
        record = _run(simulated_spec(published.simulated, "tiny", few, "tiny", fitted_to=name))
        fitted = record["fitted"]
        assert record["spec"]["workload"] == list(published.workload) and not (fitted["overhead"] and fitted["work"])
        if name == "essa_v3":  # 10 times with 8 times the GPUs
            assert fitted["scale"] == 0 and round(100 * fitted["error"]) == 11
        else:
            assert fitted["error"] < 1e-6


def test_lengths_of_released_completions_are_taken_as_numbers(external_data):
    if not (external_data / f"conciseness_completions/{RELEASED}.json").is_file():
        pytest.skip("EVOALIGN_DATA has no released completions")
    record = _run(simulated_spec("grpo", "released", SETTINGS | {"scaling_tokens": 0}, "tiny"))
    tokens, counts = record["histogram"].values()
    assert sum(counts) == 4 * 8 * 20 and 1 <= min(tokens) and max(tokens) <= 128
    assert record["simulated_lengths"]["mean"] == pytest.approx(np.average(tokens, weights=counts), rel=0.1)


REFUSED = [
    (lambda s: simulated_spec("ppo", "tiny", s, "tiny"), {}, "what='ppo'"),
    (lambda s: simulated_spec("es", "long", s, "tiny"), {}, "lengths='long'"),
    (lambda s: simulated_spec("es", "tiny", s, "tiny"), {"scaling_gpus": [2, 4]}, "scaling_gpus="),
    (lambda s: simulated_spec("es", "tiny", s, "tiny"), {"scaling_gpus": [1, 4, 2]}, "scaling_gpus="),
    (lambda s: simulated_spec("es", "tiny", s, "tiny"), {"scaling_draws": 0}, "scaling_draws=0"),
    (lambda s: simulated_spec("grpo", "tiny", s, "tiny", fitted_to="essa_v1"), {}, "fitted_to='essa_v1'"),
    (lambda s: measured_spec("A0", s, "tiny"), {"scaling_rounds": 1}, "scaling_rounds=1"),
    (lambda s: measured_spec("A0", s, "tiny"), {"scaling_workers": [2, 1]}, "scaling_workers="),
    (lambda s: measured_spec("B0", s, "tiny"), {}, "'B0'"),
]


@pytest.mark.parametrize(("make", "changed", "named"), REFUSED)
def test_what_cannot_be_is_refused(make, changed, named):
    with pytest.raises(ValueError, match=named):
        make(SETTINGS | changed)
