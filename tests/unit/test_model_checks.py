"""Models that are not supported yet are refused by name, by everything that would train or perturb them."""

import importlib.util
import json
import warnings

import pytest
import torch
from helpers import PROMPTS, random_model, tokenizer

from evoalign_lib import grpo, models, precision
from evoalign_lib.engines.local import LocalEngine, Prompts
from evoalign_lib.es import ESConfig, ESTrainer

ROWS = [{"prompt": p} for p in PROMPTS]


def score(completions, **columns):
    raise AssertionError("nothing may run")


def train_by_es(model, folder):
    args = ESConfig(output_dir=str(folder), population_size=2, max_steps=1, workers=1, report_to="none")
    ESTrainer(model, score, args, ROWS, None, tokenizer()).train()


def train_by_gradients(model, folder):
    settings = {"seed": 0, "steps": 1, "prompts_per_step": 2, "num_generations": 2, "max_completion_length": 2}
    args = grpo.config("grpo", output_dir=str(folder), learning_rate=1e-3, report_to="none", **settings)
    grpo.trainer(model, score, args, ROWS, tokenizer())


def fine_tune(model, folder):
    grpo.filtered_sft(model, tokenizer(), [([1], [2])], output_dir=str(folder), seed=0, learning_rate=1, batch_size=1)


def decode(model, folder):
    prompts = {"train": Prompts(ROWS, tokenizer())}
    LocalEngine(model, tokenizer(), None, prompts, max_completion_length=2)


def weights(model, folder):
    precision.open_weights(model)


EVERYWHERE = pytest.mark.parametrize("use", [train_by_es, train_by_gradients, fine_tune, decode, weights])


def adapted():
    """A model with a LoRA adapter: PEFT's own where it is installed; else what its class shows of itself."""
    model = random_model()
    if importlib.util.find_spec("peft"):
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))

    class PeftModelForCausalLM(type(model)):
        pass

    PeftModelForCausalLM.__module__ = "peft.peft_model"
    model.__class__ = PeftModelForCausalLM
    return model


@pytest.mark.parametrize("use", [train_by_gradients, fine_tune])
def test_peft_models(use, tmp_path):
    with pytest.raises(ValueError, match=r"has PEFT adapters \(PeftModel.*\).*give model.merge_and_unload\(\)"):
        use(adapted(), tmp_path)


def test_adapters_inside_a_model_of_its_own_class(tmp_path):
    model = random_model()
    model.model.layers[1].mlp.up_proj.__class__ = type("Linear", (torch.nn.Linear,), {"__module__": "peft.tuners.lora"})
    with pytest.raises(ValueError, match=r"has PEFT adapters \(Linear\)"):
        decode(model, tmp_path)
    model = random_model()
    model._hf_peft_config_loaded = True  # what transformers' add_adapter() leaves
    with pytest.raises(ValueError, match=r"has PEFT adapters \(Qwen2ForCausalLM\)"):
        decode(model, tmp_path)


def test_a_folder_with_an_adapter(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="is a PEFT adapter, which is not supported here: merge it"):
        models.load(str(tmp_path), tokenizer())


@pytest.mark.parametrize(
    ("dtype", "found"),
    [(torch.int8, "int8"), (torch.uint8, "uint8"), (torch.float8_e4m3fn, "float8_e4m3fn"), (torch.float64, "float64")],
)
@EVERYWHERE
def test_parameters_that_are_no_plain_floats(use, dtype, found, tmp_path):
    model = random_model()
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach().to(dtype), requires_grad=False)
    with pytest.raises(ValueError, match=f"parameter 'model.layers.1.mlp.up_proj.weight' is torch.{found}: noise on"):
        use(model, tmp_path)


class Packed(torch.Tensor):
    """A tensor that says it is float32 and is another thing, as those of torchao."""


def test_tensors_of_another_kind(tmp_path):
    model = random_model()
    layer = model.model.layers[0].mlp.down_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach().as_subclass(Packed))
    with pytest.raises(ValueError, match="parameter 'model.layers.0.mlp.down_proj.weight' is Packed"):
        weights(model, tmp_path)


def test_layers_whose_weights_are_no_parameters(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will remove this kind of quantisation
        model = torch.ao.quantization.quantize_dynamic(random_model(), {torch.nn.Linear}, dtype=torch.qint8)
        with pytest.raises(ValueError, match="module 'model.layers.0.self_attn.q_proj' holds packed, quant"):
            decode(model, tmp_path)


QUANTISED = {"quant_method": "gptq", "bits": 4}


@EVERYWHERE
def test_models_that_say_they_are_quantised(use, tmp_path):
    model = random_model()
    model.config.quantization_config = QUANTISED
    with pytest.raises(ValueError, match="is quantised .*quant_method='gptq'.* Give the model as it was before"):
        use(model, tmp_path)


def test_a_quantised_folder_is_refused_before_its_weights_are_read(tmp_path):
    random_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTISED}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="is quantised .*quant_method='gptq'"):
        models.load(str(tmp_path), tokenizer())
    config_of_bitsandbytes = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    with pytest.raises(ValueError, match="is quantised .*quant_method='bitsandbytes'"):
        models.load("A0", None, config_of_bitsandbytes)


def test_processes_of_a_launch(tmp_path, monkeypatch):
    args = ESConfig(output_dir=str(tmp_path), report_to="none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE=2: each of the 2 processes of this launch would train"):
        ESTrainer(random_model(), score, args, ROWS, None, tokenizer())
    monkeypatch.setenv("WORLD_SIZE", "1")
    ESTrainer(random_model(), score, args, ROWS, None, tokenizer())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_plain_models_pass(dtype, tmp_path):
    weights(random_model().to(dtype), tmp_path)
