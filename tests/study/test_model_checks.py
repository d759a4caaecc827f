"""Models that are not supported yet are refused by name, by everything that would train or perturb them."""

import copy
import warnings

import pytest
import torch
from evoalign_study import base_models, sweep
from evoalign_study.kinds.decode import base_specs
from evoalign_study.kinds.train import train_specs
from helpers import PROMPTS, random_model, refused, tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, Qwen2Config, T5Config
from trl import GRPOConfig

from evoalign_lib import grpo, models, precision
from evoalign_lib._model_checks import check_decoder
from evoalign_lib.engines.local import LocalEngine, Prompts
from evoalign_lib.es import ESConfig, ESTrainer

peft = pytest.importorskip("peft")
ROWS = [{"prompt": p} for p in PROMPTS]


def score(completions, **columns):
    raise AssertionError("nothing may run")


def es(model, folder, rows=ROWS, tok=None, **changed):
    args = ESConfig(str(folder), **{"max_completion_length": 5, "workers": 1, "report_to": "none"} | changed)
    return ESTrainer(model, score, args, rows, None, tok or tokenizer())


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


def changed(**attributes):
    """A model with other attributes."""
    model = random_model()
    vars(model).update(attributes)
    return model


def adapted():
    return peft.get_peft_model(random_model(), peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))


def adapted_inside():
    model = random_model()
    model.model.layers[1].mlp.up_proj.__class__ = type("Linear", (torch.nn.Linear,), {"__module__": "peft.tuners.lora"})
    return model


def with_weight(make):
    """A model of which one weight is another parameter."""
    model = random_model()
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = torch.nn.Parameter(make(layer.weight.detach()), requires_grad=False)
    return model


class Packed(torch.Tensor):
    """A tensor that says it is float32 and is another thing, as those of torchao."""


def packed():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will remove this kind of quantisation
        return torch.ao.quantization.quantize_dynamic(random_model(), {torch.nn.Linear}, dtype=torch.qint8)


def config_of(kind):
    if kind == "t5":
        return T5Config(vocab_size=len(tokenizer()), d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return AutoConfig.for_model(kind, vocab_size=len(tokenizer()), **sizes)


QUANTISED = {"quant_method": "gptq", "bits": 4}
UP = "'model.layers.1.mlp.up_proj.weight'"
MODELS = [
    (adapted, "PeftModel"),
    (adapted_inside, r"\(Linear\)"),
    (lambda: changed(_hf_peft_config_loaded=True), "Qwen2ForCausalLM"),  # what transformers' add_adapter() leaves
    (lambda: with_weight(lambda w: w.double()), f"{UP} is torch.float64"),
    (lambda: with_weight(lambda w: w.as_subclass(Packed)), f"{UP} is Packed"),
    (lambda: changed(config=Qwen2Config(tie_word_embeddings=False)), "tie_word_embeddings=False"),
    (packed, "'model.layers.0.self_attn.q_proj'"),
    (lambda: changed(config=Qwen2Config(quantization_config=QUANTISED)), "'gptq'"),
    (lambda: AutoModelForCausalLM.from_config(config_of("bert")), "'bert', an encoder"),
    (lambda: AutoModelForSeq2SeqLM.from_config(config_of("t5")), "'t5', an encoder-decoder"),
]


USES = [es, train_by_gradients, fine_tune, decode, weights]
PAIRS = [(use, *case) for use in USES for case in MODELS if case[0] is not adapted or use is fine_tune]
# the others take what PEFT makes
test_models_that_are_refused = refused(*PAIRS, call=lambda use, make, tmp_path: use(make(), tmp_path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_plain_models_pass(dtype, tmp_path):
    weights(random_model().to(dtype), tmp_path)
    config = config_of("bert")
    config.is_decoder = True  # with this it writes from left to right
    check_decoder(config)


@pytest.mark.parametrize(
    ("config", "named"),
    [(config_of(kind), f"'{kind}', an encoder") for kind in ("bert", "distilbert", "modernbert", "t5")]
    + [(Qwen2Config(quantization_config=QUANTISED), "'gptq'")],
)
def test_folders_are_refused_before_their_weights_are_read(tmp_path, config, named):
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=named):
        models.load(str(tmp_path), tokenizer())
    if "gptq" not in named:
        with pytest.raises(ValueError, match=named):
            base_models.base_digest(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    for use in (models.load, models.origin_digest):
        with pytest.raises(ValueError, match="PEFT adapter"):
            use(str(tmp_path))


test_arguments_of_load_that_are_refused = refused(
    (("A0", None, {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}), "bits"),
    (("A0", None, {"trust_remote_code": True}), "trust_remote_code=True"),
    ((random_model(), None, {"dtype": "float32"}), "model_init_kwargs"),
    (("no/such-model",), "'no/such-model' is neither"),
    call=lambda given: models.load(*given),
)


def test_processes_of_a_launch(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE=2"):
        es(random_model(), tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "1")
    es(random_model(), tmp_path)


def test_a_context_without_room_for_prompt_and_completion(tmp_path):
    longest = max(len(tokenizer()(prompt)["input_ids"]) for prompt in PROMPTS)
    short = random_model(max_position_embeddings=longest + 4)
    wrong = f"context of {longest + 4} .* train prompt, {longest} .*max_completion_length=5"
    with pytest.raises(ValueError, match=wrong):
        es(short, tmp_path)
    es(random_model(max_position_embeddings=longest + 5), tmp_path)
    engine = LocalEngine(short, tokenizer(), None, {"train": Prompts(ROWS[:1], tokenizer())}, max_completion_length=5)
    with pytest.raises(ValueError, match="further prompt"):
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
    padded, n = copy.deepcopy(tokenizer()), len(tokenizer())
    padded.add_special_tokens({"pad_token": "<new>"})
    with pytest.raises(ValueError, match=f"'<new>' has the id {n}"):
        es(random_model(), tmp_path, tok=padded)
    es(random_model(vocab_size=n + 1), tmp_path, tok=padded)
    last = {"prompt": tokenizer().convert_ids_to_tokens(n - 1)}
    with pytest.raises(ValueError, match=f"row 1 has a token with the id {n - 1}"):
        es(random_model(vocab_size=n - 1), tmp_path, [ROWS[0], last])


@pytest.mark.parametrize("args", [GRPOConfig, dict, str])
def test_arguments_of_another_trainer(args, tmp_path):
    given = GRPOConfig(str(tmp_path), bf16=False, report_to="none") if args is GRPOConfig else args()
    with pytest.raises(TypeError, match=f"args is a {args.__name__}"):
        ESTrainer(random_model(), score, given, ROWS, None, tokenizer())


# ---- runs of the study: refused when their specs are made, or before the first run

SETTINGS = {"max_completion_length": 8, "validation_problems": 2, "test_problems": 2}


def test_a_folder_that_is_no_model_has_no_specs(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="without config.json"):
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
