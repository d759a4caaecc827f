"""Quantised bases: the codes, what stays as it is, and ES and ESSA of an adapter over them."""

import copy
import json
import sys

import numpy as np
import pytest
import torch
from helpers import PROMPTS, chained, random_model, tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from evoalign_lib import _adapters, ledger, models
from evoalign_lib.engines.local import LocalEngine, Prompts
from evoalign_lib.es import ESConfig, ESTrainer
from evoalign_lib.essa import ESSAConfig, ESSATrainer
from evoalign_lib.precision import copy_to
from evoalign_lib.quantisation import quantise, weight_error

peft = pytest.importorskip("peft")
pytest.importorskip("cma")
pytest.importorskip("torchao")

ROWS = [{"prompt": p} for p in PROMPTS]
CODES = pytest.mark.parametrize("mode", ["int8", "int4"])
TRAINERS = pytest.mark.parametrize("search", [False, True], ids=["ES", "ESSA"])
HIGHEST = {"int8": 127, "int4": 7}


def token_sum(completion_ids, **columns):
    return [float(sum(ids)) for ids in completion_ids]


def lora() -> peft.LoraConfig:
    return peft.LoraConfig(
        task_type="CAUSAL_LM", r=3, lora_alpha=12, target_modules=["q_proj", "up_proj"], init_lora_weights=False
    )


def base(folder):
    """A plain model from a folder of its own."""
    if not folder.exists():
        random_model(intermediate_size=64).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    return models.load(str(folder))[0]


def trainer(folder, model, search=False, peft_config=None, score=token_sum, **changed):
    spread = {"sigma": 2.0} if search else {"sigma": 0.1, "alpha": 0.2}
    given = {
        "output_dir": str(folder), "population_size": 4, "max_steps": 3, "prompts_per_step": 4, "workers": 1,
        "max_completion_length": 6, "disable_tqdm": True, "save_strategy": "no", "report_to": "none",
    } | spread | changed  # fmt: skip
    config, kind = (ESSAConfig, ESSATrainer) if search else (ESConfig, ESTrainer)
    tok = None if isinstance(model, str) else tokenizer()
    return kind(model, score, config(**given), ROWS, ROWS, tok, peft_config=peft_config)


def greedy(model, length: int = 6) -> list[list[int]]:
    """Tokens of transformers' generate, one prompt at a time."""
    tok, found = tokenizer(), []
    for prompt in PROMPTS:
        ids = torch.tensor([tok(prompt)["input_ids"]])
        ends = {"eos_token_id": tok.eos_token_id, "pad_token_id": tok.pad_token_id}
        new = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False, **ends
        )
        found.append(new[0, ids.shape[1] :].tolist())
    return found


def own(tested) -> list[list[int]]:
    return [ids for _, ids in tested.engine.generate("train")[0]]


def frozen(model) -> dict[str, bytes]:
    """Bits of all of the base's state, codes and scales among it."""
    state = {name: b"".join(_adapters.raw_bytes(value)) for name, value in model.state_dict().items()}
    return {name: bits for name, bits in state.items() if "lora_" not in name}


def by_hand(matrix: np.ndarray, highest: int, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes, and the matrix that they stand for: float32, symmetric, one scale for each group of a row."""
    parts = matrix.reshape(len(matrix), -1, group)
    scale = np.abs(parts).max(2, keepdims=True) / np.float32(highest + 0.5)
    codes = np.clip(np.rint(parts * (1 / scale)), -highest - 1, highest)
    return codes.reshape(matrix.shape), (codes * scale).reshape(matrix.shape)


# ---- the function


@CODES
def test_the_linear_layers_are_those_of_the_formula_and_the_rest_stays(mode):
    plain = random_model(intermediate_size=64, tie_word_embeddings=False)
    model = copy.deepcopy(plain)
    assert quantise(model, mode) is model
    changed = 0
    for name, parameter in plain.named_parameters():
        found = model.get_parameter(name)
        if not name.endswith("proj.weight"):
            assert type(found) is torch.nn.Parameter and torch.equal(found, parameter)
            continue
        matrix = parameter.detach().numpy()
        codes, expected = by_hand(matrix, HIGHEST[mode], matrix.shape[1] if mode == "int8" else 32)
        assert (found.qdata.numpy() == codes).all()
        np.testing.assert_allclose(found.dequantize().detach().numpy(), expected, rtol=1e-6)
        changed += 1
    assert changed == 14
    how = {"mode": mode, "group_size": {"int8": None, "int4": 32}[mode], "base": models.base_digest(plain)}
    made = _adapters.quantisation_of(model)
    assert made == how | {"torchao": made["torchao"]} and json.loads(json.dumps(made)) == made
    errors = [np.abs(p.detach().numpy() - model.get_parameter(n).dequantize().detach().numpy()).ravel()
              for n, p in plain.named_parameters() if n.endswith("proj.weight")]  # fmt: skip
    assert weight_error(model, plain) == pytest.approx(np.concatenate(errors).mean(dtype=np.float64), rel=1e-6)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["int8", "int4"]), st.floats(1e-4, 1e4))
def test_no_weight_is_further_from_its_code_than_half_a_scale(seed, mode, spread):
    model = random_model(num_hidden_layers=1)
    layer = model.model.layers[0].mlp.down_proj
    matrix = spread * np.random.default_rng(seed).standard_normal((32, 48), np.float32)
    layer.weight.data = torch.tensor(matrix)
    quantise(model, mode, 16 if mode == "int4" else None)
    scale = layer.weight.scale.numpy().repeat(16 if mode == "int4" else 48, 1)
    assert (np.abs(layer.weight.dequantize().detach().numpy() - matrix) <= scale * 0.5001).all()


def test_the_other_modes_are_those_of_a_load(tmp_path):
    base(tmp_path / "base")
    for mode in ("bfloat16", "float32"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=getattr(torch, mode))
        model = quantise(base(tmp_path / "base"), mode)
        assert model.dtype == loaded.dtype
        assert _adapters.quantisation_of(model) is None
        for (name, found), expected in zip(model.named_parameters(), loaded.parameters(), strict=True):
            assert found.dtype == expected.dtype and torch.equal(found, expected), name
        for (name, found), expected in zip(model.named_buffers(), loaded.buffers(), strict=True):
            assert found.dtype == expected.dtype and torch.equal(found, expected), name
    assert weight_error(quantise(base(tmp_path / "base"), "float32"), base(tmp_path / "base")) == 0


def test_the_group_is_torchaos_where_the_widths_allow_it():
    wide = random_model(hidden_size=128, intermediate_size=256)
    assert _adapters.quantisation_of(quantise(wide, "int4"))["group_size"] == 128
    assert (
        quantise(random_model(intermediate_size=64), "int4", 16).model.layers[0].mlp.up_proj.weight.block_size[1] == 16
    )
    with pytest.raises(ValueError, match="group_size=32 does not divide the 48 inputs of '.*down_proj'.*it is 16"):
        quantise(random_model(), "int4", 32)
    with pytest.raises(ValueError, match="'.*down_proj' has 45 inputs, .*use mode='int8'"):
        quantise(random_model(intermediate_size=45), "int4")


def test_what_cannot_be_quantised_is_refused_and_left_alone():
    model = random_model()
    before = frozen(model)
    for arguments, message in (
        (("int3",), "int3.*int8"),
        (("int8", 16), "group_size=16 has no effect on mode='int8'"),
        (("float32", 16), "group_size=16 has no effect"),
        (("int4", 0), "group_size"),
    ):
        with pytest.raises(ValueError, match=message):
            quantise(model, *arguments)
    assert frozen(model) == before
    with pytest.raises(ValueError, match="has PEFT adapters"):
        quantise(peft.get_peft_model(random_model(), lora()), "int8")
    with pytest.raises(ValueError, match="is quantised .*torchao"):
        quantise(quantise(model, "int8"), "int4")


def test_without_torchao_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    model = random_model()
    with pytest.raises(ImportError, match=r"pip install 'evoalign\[adapters\]'"):
        quantise(model, "int8")
    quantise(model, "bfloat16")


@CODES
def test_all_weights_of_a_quantised_model_are_refused(tmp_path, mode):
    with pytest.raises(ValueError, match=r"quantised.*torchao.*peft_config=LoraConfig\(...\)"):
        trainer(tmp_path / "run", quantise(base(tmp_path / "base"), mode))


# ---- an adapter over it


@TRAINERS
@CODES
@pytest.mark.parametrize("decoder", ["loop", "generate"])
def test_an_adapter_moves_over_codes_that_do_not(tmp_path, mode, decoder, search):
    model = quantise(base(tmp_path / "base"), mode)
    tested = trainer(tmp_path / "run", model, search, lora(), decoder=decoder)
    before, weights = frozen(tested.model), tested.engine.weights.digest()
    first = greedy(tested.model)
    assert own(tested) == first
    tested.train()
    assert frozen(tested.model) == before and tested.engine.weights.digest() != weights
    assert own(tested) == greedy(tested.model) != first
    # members write what transformers writes with their weights
    member = tested.ask(tested.state.global_step)[1]
    with tested.engine.weights.member(member.key, 0.5, member.sign) as flat:
        written = tested.engine.until_end(tested.engine._decode(flat, "train", np.arange(len(ROWS)), None))
        copy_to(tested.model, tested.engine.layout, flat)
        assert [list(ids) for ids in written] == greedy(tested.model)
    head = json.loads((tmp_path / "run" / ledger.NAME).read_bytes().splitlines()[0])
    assert head["evoalign_ledger"] == (6 if search else 4)
    assert head["model"]["quantisation"] == _adapters.quantisation_of(model)
    assert head["model"]["quantisation"]["base"] == models.base_digest(base(tmp_path / "base"))
    assert head["settings"]["decoder"] == decoder
    assert head["settings"].get("weights") == ("dequantised" if decoder == "loop" else None)


@TRAINERS
@CODES
def test_saved_replayed_and_gone_on_with(tmp_path, mode, search):
    def made():
        return quantise(base(tmp_path / "base"), mode)

    tested = trainer(tmp_path / "run", made(), search, lora())
    tested.train()
    tested.save_model()
    saved = {path.name for path in (tmp_path / "run").iterdir()}
    assert "adapter_model.safetensors" in saved and "model.safetensors" not in saved
    again = peft.PeftModel.from_pretrained(made(), tmp_path / "run").eval()
    assert greedy(again) == greedy(tested.model)
    # a replay makes the base anew from the plain weights that the adapter names
    path, digest = tmp_path / "run" / ledger.NAME, tested.engine.weights.digest()
    loaded, _ = ledger._load(ledger.read(path), tmp_path / "run" / "start")
    assert frozen(loaded) == frozen(tested.model)
    assert ledger.verify(path, tmp_path / "run" / "start").weights == digest
    assert ledger.write_model(path, tmp_path / "again") == digest
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "run" / name).read_bytes()
    longer = trainer(tmp_path / "run", made(), search, lora(), max_steps=5)
    longer.train(resume_from_checkpoint=True)
    whole = trainer(tmp_path / "whole", made(), search, lora(), max_steps=5, workers=2)
    whole.train()
    assert longer.engine.weights.digest() == whole.engine.weights.digest() != digest


def test_another_base_is_refused(tmp_path):
    trainer(tmp_path / "run", quantise(base(tmp_path / "base"), "int4"), peft_config=lora()).train()
    for other in ("int8", "float32"):
        model = quantise(base(tmp_path / "base"), other)
        with pytest.raises(
            ledger.LedgerError, match="a base of mode 'int4' with group_size=32 .*quantisation.quantise"
        ):
            trainer(tmp_path / "run", model, peft_config=lora(), max_steps=4).train(resume_from_checkpoint=True)
    path = tmp_path / "run" / ledger.NAME
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    for changed, message in (
        ({"mode": "int8"}, "the header was edited"),
        ({"mode": "int8", "group_size": None}, "torchao .* makes other codes of the base than torchao"),
        ({"group_size": 16}, "torchao .* makes other codes"),
        ({"base": "0" * 16}, "has weights with the digest .*restore the model"),
        ({"more": 1}, "the header was edited"),
        ({"torchao": 7}, "the header was edited"),
        ({"group_size": 0}, "the header was edited"),
    ):
        edited = copy.deepcopy(lines)
        edited[0]["model"]["quantisation"] |= changed
        path.write_bytes(chained(edited))
        with pytest.raises(ledger.LedgerError, match=message):
            ledger.verify(path, tmp_path / "run" / "start")


def test_a_ledger_without_codes_names_none(tmp_path):
    trainer(tmp_path / "run", quantise(base(tmp_path / "base"), "bfloat16"), peft_config=lora(), max_steps=1).train()
    head = json.loads((tmp_path / "run" / ledger.NAME).read_bytes().splitlines()[0])
    assert "quantisation" not in head["model"] and "weights" not in head["settings"]
    assert head["model"]["dtype"] == "bfloat16" and head["settings"]["decoder"] == "generate"


@CODES
def test_an_adapter_is_evaluated_over_the_quantised_and_over_the_plain_base(tmp_path, mode):
    """As the page on one's own model says: the folder of the adapter names the plain base."""
    tested = trainer(tmp_path / "run", quantise(base(tmp_path / "base"), mode), peft_config=lora())
    tested.train()
    tested.save_model()
    plain = trainer(tmp_path / "plain", str(tmp_path / "run"))
    over_plain = peft.PeftModel.from_pretrained(base(tmp_path / "base"), tmp_path / "run").eval()
    assert plain.engine.weights.digest() == tested.engine.weights.digest()
    tokens = {"quantised": own(tested), "plain": own(plain)}
    assert tokens == {"quantised": greedy(tested.model), "plain": greedy(over_plain)}
    for one, name in ((tested, "quantised"), (plain, "plain")):
        assert one.evaluate()["eval_reward"] == np.mean([sum(ids) for ids in tokens[name]])
    if mode == "int4":
        assert tokens["quantised"] != tokens["plain"]


@CODES
def test_essa_fine_tunes_over_codes_and_goes_on(tmp_path, mode):
    rows = [{"prompt": p, "completion": str(i)} for i, p in enumerate(PROMPTS)]

    def made(steps):
        args = ESSAConfig(
            str(tmp_path / "run"), population_size=4, max_steps=steps, prompts_per_step=4, workers=1, report_to="none",
            max_completion_length=3, disable_tqdm=True, save_strategy="no",
        )  # fmt: skip
        model = quantise(base(tmp_path / "base"), mode)
        return ESSATrainer(model, token_sum, args, ROWS, None, tokenizer(), sft_dataset=rows)

    tested = made(1)
    before = frozen(tested.model)
    tested.train()
    assert frozen(tested.model) == before
    assert all(p.dtype == torch.float32 and p.abs().sum() > 0 for p in _adapters.moved(tested.model).values())
    again = made(2)
    again.train(resume_from_checkpoint=True)
    assert ledger.verify(tmp_path / "run" / ledger.NAME, tmp_path / "run" / "start").recomputed


def test_low_rank_noise_and_a_new_adapter_are_the_base_itself(tmp_path):
    """A new adapter's B is zero: with it the engine decodes the quantised base."""
    model = quantise(base(tmp_path / "base"), "int4")
    alone = greedy(model)
    tested = trainer(
        tmp_path / "run", model, peft_config=peft.LoraConfig(task_type="CAUSAL_LM"), perturbation="low_rank"
    )
    assert own(tested) == alone
    tested.train()
    assert ledger.verify(tmp_path / "run" / ledger.NAME, tmp_path / "run" / "start").recomputed


def test_codes_that_others_made_are_decoded_by_transformers(tmp_path):
    """They may round activations, too; and their runs have this in their ledgers."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    how = TorchAoConfig(Int8WeightOnlyConfig(set_inductor_config=False))
    base(tmp_path / "base")
    given = {"quantization_config": how, "dtype": torch.float32, "device_map": "cpu"}
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base", **given)
    ours = quantise(base(tmp_path / "base"), "int8")
    assert frozen(ours) == frozen(theirs)
    model = peft.get_peft_model(theirs, lora())
    assert (
        LocalEngine(model, tokenizer(), None, {"train": Prompts(ROWS, tokenizer())}, max_completion_length=2).decoder
        == "generate"
    )
    # PEFT merges over ours as over theirs
    adapter = peft.get_peft_model(ours, lora())
    adapter.load_state_dict(model.state_dict())
    assert frozen(adapter.merge_and_unload()) == frozen(model.merge_and_unload())
