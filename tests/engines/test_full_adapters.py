"""Arms over an adapter at full scale, with vLLM, on a small model in a folder."""

import json

import pytest
from evoalign_study.kinds import train
from evoalign_study.kinds.train import train_specs

pytest.importorskip("vllm", reason="make test-engines has an environment with vLLM")
pytest.importorskip("peft")

SMALL = {"max_completion_length": 12, "validation_problems": 4, "test_problems": 3, "engine": "vllm", "steps": 2}
SMALL |= {"prompts_per_step": 4, "curve_points": 2, "lora_rank": 4}
WARM = {"warm_rows": 8, "warm_epochs": 1, "warm_learning_rate": 1e-3}
SEARCH = {"population_size": 4, "sigma": 0.02}
GRADIENT = {"learning_rate": 1e-3, "beta": 0.0, "num_generations": 4}


@pytest.mark.parametrize(
    ("arm", "settings"),
    [
        pytest.param("es_lora", SEARCH | {"alpha": 0.02}, marks=pytest.mark.slow),
        ("es_lora", SEARCH | {"alpha": 0.02} | WARM),
        ("essa", SEARCH | {"leading_share": 0.5} | WARM),
        pytest.param("grpo_lora", GRADIENT, marks=pytest.mark.slow),
        ("grpo_lora", GRADIENT | WARM),
    ],
    ids=["ES", "ES, warm", "ESSA", "GRPO", "GRPO, warm"],
)
def test_a_run_and_its_record(folder, external_data, tmp_path, arm, settings):
    (spec,) = train_specs(arm, [folder], [0], SMALL | settings, "full")
    assert spec["engine"] == "vllm"
    record = train.run(spec, None, tmp_path)
    assert record["plan"]["decoder"] == "vllm" and record["plan"]["dtype"] == "bfloat16"
    assert record["update_norm"] > 0 and 0 <= record["test"]["greedy"] <= 1
    assert ("sft_tokens" in record["budget"]) == ("warm_rows" in spec)
    assert record["kl_policy_base"]["exact_nats_per_sequence"] > 0
    assert len(json.dumps(record)) < 8000
