"""Models that are not supported yet are refused by name, by everything that would train or perturb them."""

import copy
import importlib.util
import json
import warnings

import pytest
import torch
from evoalign_study import base_models, sweep
from evoalign_study.kinds.decode import base_specs
from evoalign_study.kinds.train import train_specs
from helpers import PROMPTS, random_model, tokenizer
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GPT2Config, T5Config
from trl import GRPOConfig

from evoalign_lib import grpo, models, precision
from evoalign_lib._model_checks import check_decoder
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


def test_peft_models(tmp_path):
    with pytest.raises(ValueError, match=r"has PEFT adapters \(PeftModel.*\).*give model.merge_and_unload\(\)"):
        fine_tune(adapted(), tmp_path)


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
    args = ESConfig(output_dir=str(tmp_path), max_completion_length=8, report_to="none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE=2: each of the 2 processes of this launch would train"):
        ESTrainer(random_model(), score, args, ROWS, None, tokenizer())
    monkeypatch.setenv("WORLD_SIZE", "1")
    ESTrainer(random_model(), score, args, ROWS, None, tokenizer())


def config_of(kind):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return AutoConfig.for_model(kind, vocab_size=len(tokenizer()), **sizes)


@pytest.mark.parametrize("kind", ["bert", "distilbert", "modernbert"])
def test_encoders_have_no_next_token(kind, tmp_path):
    config_of(kind).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    for use in (models.load, base_models.base_digest):
        with pytest.raises(ValueError, match=f"of type '{kind}', an encoder, .*: give a decoder-only model, such as"):
            use(str(tmp_path))


@EVERYWHERE
def test_an_encoder_that_is_an_object(use, tmp_path):
    with pytest.raises(ValueError, match="of type 'bert', an encoder"):
        use(AutoModelForCausalLM.from_config(config_of("bert")), tmp_path)
    config = config_of("bert")
    config.is_decoder = True  # with this it writes from left to right
    check_decoder(config)


def test_encoders_with_decoders(tmp_path):
    config = T5Config(vocab_size=len(tokenizer()), d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    model = AutoModel.from_config(config)
    with pytest.raises(ValueError, match="of type 't5', an encoder-decoder: give a decoder-only model"):
        train_by_es(model, tmp_path)
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="of type 't5', an encoder-decoder"):
        models.load(str(tmp_path), tokenizer())


def short(kind, context):
    """A model whose context ends after so many tokens."""
    if kind == "qwen2":
        return random_model(max_position_embeddings=context)
    tok = tokenizer()
    ends = {"eos_token_id": tok.eos_token_id, "bos_token_id": None}
    config = GPT2Config(vocab_size=len(tok), n_embd=32, n_layer=1, n_head=2, n_positions=context, **ends)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_a_context_without_room_for_prompt_and_completion(kind, tmp_path):
    longest = max(len(tokenizer()(prompt)["input_ids"]) for prompt in PROMPTS)
    args = ESConfig(str(tmp_path), population_size=2, max_completion_length=5, workers=1, report_to="none")
    with pytest.raises(
        ValueError,
        match=f"context of {longest + 4} tokens is shorter than the longest train prompt, {longest} tokens in row "
        "[0-9], with a completion of max_completion_length=5: set that lower, or leave out long prompts",
    ):
        ESTrainer(short(kind, longest + 4), score, args, ROWS, None, tokenizer())
    ESTrainer(short(kind, longest + 5), score, args, ROWS, None, tokenizer())
    prompts = {"train": Prompts(ROWS[:1], tokenizer())}
    engine = LocalEngine(short(kind, longest + 4), tokenizer(), None, prompts, max_completion_length=5)
    with pytest.raises(ValueError, match="longest further prompt"):
        engine.add_prompts("further", ROWS)
    assert set(engine.prompts) == {"train"}


def test_scaled_positions_make_a_context_longer():
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    for limit in (16, 64):  # some configurations have the scaled length already
        model = random_model(max_position_embeddings=limit, rope_parameters=yarn)
        prompts = {"train": Prompts(ROWS, tokenizer())}
        LocalEngine(model, tokenizer(), None, prompts, max_completion_length=30)
        with pytest.raises(ValueError, match="context of 64 tokens"):
            LocalEngine(model, tokenizer(), None, prompts, max_completion_length=60)


def test_tokens_without_an_embedding(tmp_path):
    args = ESConfig(str(tmp_path), max_completion_length=8, report_to="none")
    padded = copy.deepcopy(tokenizer())
    padded.add_special_tokens({"pad_token": "<new>"})
    n = len(tokenizer())
    with pytest.raises(
        ValueError, match=f"padding token '<new>' has the id {n}, and the model has {n} embeddings: set tokenizer.pad_"
    ):
        ESTrainer(random_model(), score, args, ROWS, None, padded)
    model = random_model()
    model.resize_token_embeddings(n + 1)
    ESTrainer(model, score, args, ROWS, None, padded)
    last = tokenizer().convert_ids_to_tokens(n - 1)
    with pytest.raises(ValueError, match=f"the train prompt of row 1 has a token with the id {n - 1}, and the model"):
        ESTrainer(random_model(vocab_size=n - 1), score, args, [ROWS[0], {"prompt": last}], None, tokenizer())


def test_a_folder_without_tokenizer(tmp_path):
    random_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no tokenizer lies beside the model .*: save it there, or give it as"):
        ESTrainer(str(tmp_path), score, ESConfig(str(tmp_path / "out"), report_to="none"), ROWS)
    models.load(str(tmp_path), tokenizer())


@pytest.mark.parametrize("args", [GRPOConfig, dict, str])
def test_arguments_of_another_trainer(args, tmp_path):
    given = GRPOConfig(str(tmp_path), bf16=False, report_to="none") if args is GRPOConfig else args()
    with pytest.raises(TypeError, match=f"args is a {args.__name__}: give an ESConfig, whose settings help.ESConfig."):
        ESTrainer(random_model(), score, given, ROWS, None, tokenizer())


# ---- runs of the study: refused when their specs are made, or before the first run

SETTINGS = {"max_completion_length": 8, "validation_problems": 2, "test_problems": 2}


def test_a_folder_that_is_no_model_has_no_specs(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="is a folder without config.json: give one that save_pretrained"):
        base_specs([str(tmp_path)], SETTINGS, "full")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="is a PEFT adapter, which is not supported here: merge it"):
        base_specs([str(tmp_path)], SETTINGS, "full")


def test_a_plan_needs_a_configuration_alone_and_a_run_all_files(tmp_path, capsys):
    model = random_model()
    model.config.save_pretrained(tmp_path)
    base = str(tmp_path)

    def specs():
        es = {"steps": 1, "prompts_per_step": 2, "population_size": 2, "sigma": 0.1, "alpha": 0.1, "curve_points": 2}
        return base_specs([base], SETTINGS, "full") + train_specs("es", [base], [0], SETTINGS | es, "full")

    planned = specs()
    with pytest.raises(sweep.DryRun, match="0 of 2 runs have records"):
        sweep.load_or_run(planned, "nb", "full", dry_run=True)
    assert "parameters" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"has no \*.safetensors"):
        sweep.load_or_run(planned, "nb", "full")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="had no weights when the specs were made: make them again"):
        sweep.load_or_run(planned, "nb", "full")
    whole = specs()
    assert whole[0]["base_digest"] == models.origin_digest(base)
    with pytest.raises(ValueError, match="no tokenizer lies beside the model"):
        sweep.load_or_run(whole, "nb", "full")


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_spec_of_an_unknown_task_or_kind(dry_run):
    (spec,) = base_specs(["A0"], SETTINGS, "smoke")
    with pytest.raises(ValueError, match="unknown task 'cuntdown'.* Did you mean 'countdown'"):
        sweep.load_or_run([spec | {"task": "cuntdown"}], "nb", "smoke", dry_run=dry_run)
    with pytest.raises(ValueError, match="unknown kind of run 'bsae'.* Did you mean 'base'"):
        sweep.load_or_run([spec | {"kind": "bsae"}], "nb", "smoke", dry_run=dry_run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_plain_models_pass(dtype, tmp_path):
    weights(random_model().to(dtype), tmp_path)
