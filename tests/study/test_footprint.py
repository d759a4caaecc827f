"""The formula of memory: sums by hand for published models, and laws that hold for any shape."""

from dataclasses import replace

from evoalign_study.kinds import memory
from evoalign_study.kinds.memory import PUBLISHED, PUBLISHED_WORK, SIZES, memory_specs
from helpers import qwen, refused

from evoalign_lib import footprint
from evoalign_lib.engines.memory import kv_bytes, shape
from evoalign_lib.footprint import METHODS, Work, bytes_of

WORK = Work(rows=1, prompt=150, new=1024, generated=64, members=30)
SETTINGS = {"memory_rows": [4, 8], "max_completion_length": 8}


def kept(method: str, size: str = "7B") -> dict[str, float]:
    """Bytes a parameter of what weights and their training take, to two decimals."""
    model = shape(qwen(size))
    found = bytes_of(method, model, WORK, gpus=True)
    apart = ("saved activations", "logits", "KV cache", "temporaries")
    return {name: round(value / model.d, 2) for name, value in found.items() if name not in apart}


def test_state_a_parameter_by_hand():
    assert kept("es") == {"working copy": 2, "master": 4}
    assert kept("es_kahan") == {"weights": 2, "compensation": 2}
    assert kept("es_inplace") == {"weights": 2}
    assert kept("grpo") == {"weights": 4, "gradients": 4, "moments": 8, "rollout copy": 2}
    assert kept("grpo_reference") == kept("grpo") | {"reference model": 4}
    assert kept("grpo_mixed") == {"weights": 2, "master": 4, "gradients": 2, "moments": 8, "rollout copy": 2}
    assert kept("grpo_adam8bit") == {"weights": 4, "gradients": 4, "moments": 2.03, "rollout copy": 2}
    assert kept("grpo_adam8bit_bfloat16") == {"weights": 2, "gradients": 2, "moments": 2.03, "rollout copy": 2}
    lora, es_lora = kept("grpo_lora"), kept("es_lora")
    assert (lora["weights"], lora["rollout copy"], es_lora["weights"]) == (2, 2, 2)
    assert sum(lora.values()) < 4.03 and sum(es_lora.values()) < 2.02


def test_caches_and_activations_at_7b_by_hand():
    model, tokens = shape(qwen("7B")), 150 + 1024
    assert bytes_of("es", model, WORK, gpus=True)["KV cache"] == 64 * tokens * kv_bytes(model)
    h, q, i = 3584, 28 * 128, 18944
    kept = tokens * (28 * (4 * (6 * h + 4 * q + 4 * i) + 4 * 30) + 16 * h)
    assert footprint.activation_bytes("grpo", model, tokens) == kept
    found = bytes_of("grpo", model, replace(WORK, rows=8, generated=8), gpus=True)
    assert found["saved activations"] == 8 * kept and found["logits"] == 4 * 4096 * 32768


test_specs_that_cannot_be_are_refused = refused(
    (["ppo"], ["1M"], {}, "method='ppo'"),
    (["es"], ["7B"], {}, "size='7B'"),
    (["es"], ["1M"], {"memory_rows": [1, 4]}, "at least 2"),
    (["es"], ["1M"], {"memory_rows": []}, "memory_rows"),
    call=lambda methods, sizes, changed: memory_specs(methods, sizes, SETTINGS | changed, "smoke"),
)


def test_specs_are_one_for_each_method_and_model_and_published_bytes_are_the_formulas():
    assert {name for name in SIZES if shape(memory.build(name)[0].config).d < 5e6} == set(SIZES)
    made = memory_specs(["es", "grpo"], list(SIZES), SETTINGS, "smoke")
    assert len(made) == 6 and len({(s["method"], s["size"]) for s in made}) == 6
    assert (made[0]["kind"], made[0]["base"], made[0]["rows"]) == ("memory", "A0", [4, 8])
    for method in METHODS:
        found = memory.published(method)
        assert set(found) == set(PUBLISHED)
        assert found["7B"]["bytes"] == bytes_of(method, shape(qwen("7B")), PUBLISHED_WORK, gpus=True)
