"""Quantised bases: the codes, what stays as it is, what is refused, and what a ledger says of them."""

import copy
import json

import numpy as np
import pytest
import torch
from helpers import ROWS, base_bits, chained, lora, random_model, saved_base, short_run, token_sum, tokenizer
from transformers import AutoModelForCausalLM, GPT2Config

from evoalign_lib import _adapters, ledger, models
from evoalign_lib.es import ESConfig, ESTrainer
from evoalign_lib.quantisation import quantise

peft = pytest.importorskip("peft")
pytest.importorskip("torchao")

CODES = pytest.mark.parametrize("mode", ["int8", "int4"])
HIGHEST = {"int8": 127, "int4": 7}


def trainer(folder, model, **changed) -> ESTrainer:
    args = short_run(folder, ESConfig, **{"population_size": 2, "max_steps": 1} | changed)
    return ESTrainer(model, token_sum, args, ROWS, None, tokenizer(), peft_config=lora(init_lora_weights=False))


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


REFUSED = [
    (random_model, ("int3",), "'int3'.*int8"),
    (random_model, ("int8", 16), "group_size=16.*'int8'"),
    (random_model, ("float32", 16), "group_size=16"),
    (random_model, ("int4", 0), "group_size=0"),
    (random_model, ("int4", 10), "group_size=10 .* 32"),
    (lambda: random_model(intermediate_size=50), ("int4",), "50 inputs"),
    (lambda: peft.get_peft_model(random_model(), lora()), ("int8",), "PEFT"),
    (lambda: quantise(random_model(), "int8"), ("int4", 16), "torchao"),
    (
        lambda: AutoModelForCausalLM.from_config(
            GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2)
        ),
        ("int8",),
        "GPT2.*nn.Linear",
    ),
]


@pytest.mark.parametrize(("make", "given", "named"), REFUSED)
def test_what_cannot_be_quantised_is_refused_and_left_alone(make, given, named):
    model = make()
    before = base_bits(model)
    with pytest.raises(ValueError, match=named):
        quantise(model, *given)
    assert base_bits(model) == before


@CODES
def test_all_weights_of_a_quantised_model_are_refused(tmp_path, mode):
    with pytest.raises(ValueError, match="torchao.*peft_config"):
        args = ESConfig(str(tmp_path / "run"), report_to="none")
        ESTrainer(quantise(saved_base(tmp_path / "base"), mode), token_sum, args, ROWS, None, tokenizer())


# ---- what a ledger says


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of one step over a base of 4 bits, and of that base before."""
    folder = tmp_path_factory.mktemp("quantised")
    trainer(folder / "run", quantise(saved_base(folder / "base"), "int4")).train()
    return folder


@pytest.mark.parametrize("mode", ["int8", "float32"])
def test_a_run_goes_on_over_its_own_base_alone(run, mode):
    with pytest.raises(ledger.LedgerError, match="'int4', 'group_size': 32.*quantise"):
        trainer(run / "run", quantise(saved_base(run / "base"), mode), max_steps=2).train(resume_from_checkpoint=True)


OTHER_BASES = [
    *((bad, "the header was edited") for bad in ({"mode": "int8"}, {"more": 1}, {"torchao": 7}, {"group_size": 0})),
    ({"mode": "int8", "group_size": None}, "other codes of the base"),
    ({"group_size": 16}, "other codes"),
    ({"base": "0" * 16}, "digest"),
]


@pytest.mark.parametrize(("changed", "named"), OTHER_BASES)
def test_a_header_that_says_another_base_is_refused(run, tmp_path, changed, named):
    lines = [json.loads(line) for line in (run / "run" / ledger.NAME).read_bytes().splitlines()]
    lines[0]["model"]["quantisation"] |= changed
    (tmp_path / ledger.NAME).write_bytes(chained(lines))
    with pytest.raises(ledger.LedgerError, match=named):
        ledger.verify(tmp_path / ledger.NAME, run / "run" / "start")
