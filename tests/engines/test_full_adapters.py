"""Arms over an adapter at full scale, with vLLM, on a small model in a folder."""

import json

import pytest
from evoalign_study.kinds import train
from evoalign_study.kinds.train import train_specs
from helpers import SMALL_RUN

pytest.importorskip("vllm", reason="make test-engines has an environment with vLLM")
pytest.importorskip("peft")

SMALL = SMALL_RUN | {"engine": "vllm"}
COLD = {name: value for name, value in SMALL.items() if not name.startswith("warm_")}


@pytest.mark.parametrize(
    ("arm", "settings"),
    [
        pytest.param("es_lora", COLD, marks=pytest.mark.slow),
        ("es_lora", SMALL),
        ("essa", SMALL | {"population_size": 4}),
        pytest.param("grpo_lora", COLD, marks=pytest.mark.slow),
        ("grpo_lora", SMALL),
    ],
    ids=["ES", "ES, warm", "ESSA", "GRPO", "GRPO, warm"],
)
def test_a_run_and_its_record(folder, external_data, tmp_path, arm, settings):
    (spec,) = train_specs(arm, [folder], [0], settings, "full")
    assert spec["engine"] == "vllm"
    record = train.run(spec, None, tmp_path)
    assert record["plan"]["decoder"] == "vllm" and record["plan"]["dtype"] == "bfloat16"
    assert record["update_norm"] > 0 and 0 <= record["test"]["greedy"] <= 1
    assert ("sft_tokens" in record["budget"]) == ("warm_rows" in spec)
    assert record["kl_policy_base"]["exact_nats_per_sequence"] > 0
    assert len(json.dumps(record)) < 8000
