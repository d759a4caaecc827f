"""Quantised bases: the codes, what stays as it is, what is refused, and what a ledger says of them."""

import copy
import json

import numpy as np
import pytest
import torch
from helpers import PROMPTS, chained, random_model, tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from evoalign_lib import _adapters, ledger, models
from evoalign_lib.es import ESConfig, ESTrainer
from evoalign_lib.quantisation import quantise, weight_error

peft = pytest.importorskip("peft")
pytest.importorskip("torchao")

ROWS = [{"prompt": p} for p in PROMPTS]
CODES = pytest.mark.parametrize("mode", ["int8", "int4"])
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


def trainer(folder, model, **changed) -> ESTrainer:
    args = ESConfig(
        str(folder), population_size=2, workers=1, max_completion_length=2, disable_tqdm=True, save_strategy="no",
        report_to="none", **{"max_steps": 1} | changed,
    )  # fmt: skip
    return ESTrainer(model, token_sum, args, ROWS, None, tokenizer(), peft_config=lora())


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


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["int8", "int4"]), st.floats(1e-4, 1e4))
def test_no_weight_is_further_from_its_code_than_half_a_scale(seed, mode, spread):
    model = random_model(num_hidden_layers=1)
    layer = model.model.layers[0].mlp.down_proj
    matrix = spread * np.random.default_rng(seed).standard_normal((32, 48), np.float32)
    layer.weight.data = torch.tensor(matrix)
    quantise(model, mode, 16 if mode == "int4" else None)
    scale = layer.weight.scale.numpy().repeat(16 if mode == "int4" else 48, 1)
    assert (np.abs(layer.weight.dequantize().detach().numpy() - matrix) <= scale * 0.5001).all()


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


@CODES
def test_all_weights_of_a_quantised_model_are_refused(tmp_path, mode):
    with pytest.raises(ValueError, match=r"quantised.*torchao.*peft_config=LoraConfig\(...\)"):
        args = ESConfig(str(tmp_path / "run"), report_to="none")
        ESTrainer(quantise(base(tmp_path / "base"), mode), token_sum, args, ROWS, None, tokenizer())


# ---- what a ledger says


def test_another_base_is_refused(tmp_path):
    trainer(tmp_path / "run", quantise(base(tmp_path / "base"), "int4")).train()
    message = "'int4', 'group_size': 32.*quantisation.quantise"
    for other in ("int8", "float32"):
        model = quantise(base(tmp_path / "base"), other)
        with pytest.raises(ledger.LedgerError, match=message):
            trainer(tmp_path / "run", model, max_steps=2).train(resume_from_checkpoint=True)
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
