"""What a model takes on a GPU: counts are those of the models, shares are those of a sum by hand."""

import pytest
import torch
from helpers import CONFIG_NAMES, QWEN, qwen, random_model
from transformers import AutoConfig, AutoModelForCausalLM

from evoalign_lib.engines.memory import USABLE, CannotCount, held_parameters, kv_bytes, room_beside_master, shape

LLAMA_8B = dict(zip(CONFIG_NAMES, (4096, 14336, 32, 32, 8, 128256, False), strict=True)) | {"model_type": "llama"}


CONFIGS = [
    *map(qwen, QWEN),
    LLAMA_8B,
    LLAMA_8B | {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 2},
    LLAMA_8B | {"model_type": "mistral", "num_hidden_layers": 2, "head_dim": 64},
    LLAMA_8B | {"model_type": "qwen3", "num_hidden_layers": 2, "tie_word_embeddings": True},
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config['model_type']}-{config['hidden_size']}")
def test_every_component_has_the_parameters_that_the_model_has(config):
    loaded = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(loaded)
    sizes = {name: p.numel() for name, p in model.named_parameters()}

    def of(*words):
        return sum(n for name, n in sizes.items() if any(word in name for word in words))

    counted = shape(loaded)
    assert counted == shape(config) and counted.d == sum(sizes.values())
    assert counted.embedding == of("embed_tokens") and counted.head == of("lm_head")
    assert counted.queries == of("q_proj") and counted.keys_values == of("k_proj", "v_proj")
    assert counted.output == of("o_proj") and counted.mlp == of(".mlp.") and counted.norms == of("norm")


def test_published_counts_and_caches():
    assert {size: shape(qwen(size)).d for size in QWEN} == {size: values[-1] for size, values in QWEN.items()}
    # 2 x layers x key and value heads x their size x 2 bytes
    assert kv_bytes(shape(qwen("7B"))) == 2 * 28 * 4 * 128 * 2 == 57_344
    assert kv_bytes(shape(qwen("72B")), 8) == 2 * 80 * 1 * 128 * 2
    assert kv_bytes(shape(qwen("3B")), 8) == 2 * 36 * 1 * 128 * 2  # two heads on eight GPUs: each holds one
    assert kv_bytes(shape(qwen("7B")), width=4) == 2 * 57_344


def test_what_cannot_be_counted_is_refused():
    quantised = {"quantization_config": {"quant_method": "awq"}}
    for changed in ({"model_type": "qwen2_moe"}, quantised, {"dtype": "float8_e4m3fn"}):
        with pytest.raises(CannotCount, match="quantised" if changed is quantised else str(*changed.values())):
            shape(qwen("0.5B", **changed))


def test_the_master_of_a_rank_is_counted_with_heads_that_several_hold():
    config = random_model(num_attention_heads=4, num_key_value_heads=1).config
    model = shape(config)
    assert held_parameters(config, model.d, 1) == model.d
    found = held_parameters(config, model.d, 4)
    assert found == (model.d - model.keys_values - model.norms) / 4 + model.keys_values + model.norms > model.d / 4
    config.model_type = "unknown"
    assert held_parameters(config, model.d, 4) == model.d / 4


def test_vllm_gets_what_the_master_leaves():
    assert room_beside_master(80 * 2**30, 0) == USABLE
    assert room_beside_master(80e9, 7e9) == round(USABLE - 28 / 80, 3)
    # with anchor_decay the starting weights stay there, too, here in bfloat16
    assert room_beside_master(80e9, 7e9, 2) == round(USABLE - 42 / 80, 3)
    for parameters, start, named in ((20e9, 0, "20,000,000,000 .* 75 GiB"), (14e9, 2, "78 GiB.*anchor_decay")):
        with pytest.raises(ValueError, match=named):
            room_beside_master(80e9, parameters, start)
