"""What a run leaves on disk: counted in real checkpoints."""

import pytest
from evoalign_study import sweep
from evoalign_study.kinds import storage

SETTINGS = {"max_completion_length": 16, "steps": 3, "prompts_per_step": 4, "population_size": 4, "sigma": 0.03}
SETTINGS |= {"alpha": 0.01, "num_generations": 4, "learning_rate": 1e-3, "beta": 0.0, "lora_rank": 2}
SETTINGS |= {"leading_share": 1.0, "warm_rows": 8, "warm_epochs": 1, "warm_learning_rate": 1e-3}
ARMS = ("es", "essa", "grpo", "grpo_lora")


@pytest.fixture(scope="module")
def records() -> dict:
    specs = storage.storage_specs(dict.fromkeys(ARMS, SETTINGS), "A0", "smoke")
    return {spec["arm"]: sweep.run(spec, "nb", "commit") for spec in specs}


def test_models_moments_and_ledgers_are_counted(records):
    assert {arm: record["d"] for arm, record in records.items()} == {
        "es": 140_928,
        "essa": 1_792,
        "grpo": 140_928,
        "grpo_lora": 1_792,
    }
    for arm, record in records.items():
        stored, d = record["bytes"], record["d"]
        assert 0 <= stored["model"] - 4 * d < 4_000, arm  # float32 behind a header with names
        if arm in ("grpo", "grpo_lora"):
            assert 8 * d <= stored["moments"] < 8 * d + 60_000 and "packed" not in record
        else:
            assert 0 <= stored["master"] - 4 * d < 4_000 and 0 < record["packed"] < stored["ledger"]
    assert records["es"]["start"] == 0 < records["essa"]["start"] == records["essa"]["bytes"]["model"]


def test_a_ledger_grows_by_its_steps_and_members_and_not_by_the_model(records):
    changed = {"longer": {"steps": 6}, "wider": {"population_size": 8}}
    grown = {}
    for name, more in changed.items():
        [spec] = storage.storage_specs({"es": SETTINGS | more}, "A0", "smoke")
        grown[name] = sweep.run(spec, "nb", "commit")["bytes"]
    first = records["es"]["bytes"]
    assert all(first["ledger"] < stored["ledger"] < 3 * first["ledger"] for stored in grown.values())
    assert all(first["model"] == stored["model"] for stored in grown.values())


def test_a_step_of_es_sends_keys_and_coefficients_and_a_gradient_step_what_it_changed(records):
    sent = {arm: storage.sent(record["spec"], record["d"]) for arm, record in records.items()}
    assert sent == {"es": 12 * 4, "essa": None, "grpo": 2 * 140_928, "grpo_lora": 2 * 1_792}


def test_a_base_from_outside_is_refused():
    with pytest.raises(ValueError, match="plain models of the tiny world"):
        storage.storage_specs({"es": SETTINGS}, "some/model", "smoke")
