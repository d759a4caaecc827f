"""Quantised bases: codes, what is refused, and ES and ESSA of an adapter over them: members, ledger, resumed runs."""

import copy
import json

import numpy as np
import pytest
import torch
from es_runs import ROWS, token_sum
from helpers import SFT_ROWS, base_bits, chained, greedy, lora, ran, random_model, saved_base, short_run, tokenizer
from transformers import AutoModelForCausalLM, GPT2Config

from evoalign_lib import _adapters, ledger, models
from evoalign_lib.es import ESConfig, ESTrainer
from evoalign_lib.essa import ESSAConfig, ESSATrainer
from evoalign_lib.precision import copy_to
from evoalign_lib.quantisation import quantise

peft = pytest.importorskip("peft")
pytest.importorskip("cma")
pytest.importorskip("torchao")

CODES = pytest.mark.parametrize("mode", [pytest.param("int8", marks=pytest.mark.slow), "int4"])
MODES = pytest.mark.parametrize("mode", ["int8", "int4"])
HIGHEST = {"int8": 127, "int4": 7}
TRAINERS = pytest.mark.parametrize("search", [False, True], ids=["ES", "ESSA"])


def trainer(folder, model, search=False, sft=None, **changed):
    spread = {"sigma": 2.0} if search else {"sigma": 0.1, "alpha": 0.2}
    given = {"population_size": 4, "prompts_per_step": 4, "max_completion_length": 6} | spread | changed
    config, kind = (ESSAConfig, ESSATrainer) if search else (ESConfig, ESTrainer)
    rest = {"sft_dataset": sft} if sft else {"peft_config": lora(init_lora_weights=False)}
    return kind(model, token_sum, short_run(folder, config, **given), ROWS, ROWS, tokenizer(), **rest)


def own(tested) -> list[list[int]]:
    return [ids for _, ids in tested.engine.generate("train")[0]]


def by_hand(matrix: np.ndarray, highest: int, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes, and the matrix that they stand for: float32, symmetric, one scale for each group of a row."""
    parts = matrix.reshape(len(matrix), -1, group)
    scale = np.abs(parts).max(2, keepdims=True) / np.float32(highest + 0.5)
    codes = np.clip(np.rint(parts * (1 / scale)), -highest - 1, highest)
    return codes.reshape(matrix.shape), (codes * scale).reshape(matrix.shape)


# ---- the function


@MODES
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


GPT2 = GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2)
REFUSED = [
    (random_model, ("int3",), "'int3'.*int8"),
    (random_model, ("int8", 16), "group_size=16.*'int8'"),
    (random_model, ("float32", 16), "group_size=16"),
    (random_model, ("int4", 0), "group_size=0"),
    (random_model, ("int4", 10), "group_size=10 .* 32"),
    (lambda: random_model(intermediate_size=50), ("int4",), "50 inputs"),
    (lambda: peft.get_peft_model(random_model(), lora()), ("int8",), "PEFT"),
    (lambda: quantise(random_model(), "int8"), ("int4", 16), "torchao"),
    (lambda: AutoModelForCausalLM.from_config(GPT2), ("int8",), "GPT2.*nn.Linear"),
]


@pytest.mark.parametrize(("make", "given", "named"), REFUSED)
def test_what_cannot_be_quantised_is_refused_and_left_alone(make, given, named):
    model = make()
    before = base_bits(model)
    with pytest.raises(ValueError, match=named):
        quantise(model, *given)
    assert base_bits(model) == before


@MODES
def test_all_weights_of_a_quantised_model_are_refused(tmp_path, mode):
    with pytest.raises(ValueError, match="torchao.*peft_config"):
        args = ESConfig(str(tmp_path / "run"), report_to="none")
        ESTrainer(quantise(saved_base(tmp_path / "base"), mode), token_sum, args, ROWS, None, tokenizer())


# ---- what a ledger says


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of one step over a base of 4 bits, and of that base before."""
    folder = tmp_path_factory.mktemp("quantised")
    trainer(folder / "run", quantise(saved_base(folder / "base"), "int4"), max_steps=1).train()
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


# ---- runs


@CODES
@pytest.mark.parametrize(
    ("decoder", "search"), [("loop", False), pytest.param("generate", True, marks=pytest.mark.slow)]
)
def test_an_adapter_moves_over_codes_that_do_not(tmp_path, mode, decoder, search):
    model = quantise(saved_base(tmp_path / "base"), mode)
    tested = trainer(tmp_path / "run", model, search, decoder=decoder)
    before, weights = base_bits(tested.model), tested.engine.weights.digest()
    first = greedy(tested.model)
    assert own(tested) == first
    tested.train()
    assert base_bits(tested.model) == before and tested.engine.weights.digest() != weights
    assert own(tested) == greedy(tested.model) != first
    # members write what transformers writes with their weights
    member = tested.ask(tested.state.global_step)[1]
    written = tested.engine._decode("train", np.arange(len(ROWS)), None, 1.0, (member, 0.5))
    with tested.engine.weights.member(member.key, 0.5, member.sign) as flat:
        copy_to(tested.model, tested.engine.layout, flat)
        assert [list(ids) for _, ids in written] == greedy(tested.model)
    head = json.loads((tmp_path / "run" / ledger.NAME).read_bytes().splitlines()[0])
    assert head["model"]["quantisation"] == _adapters.quantisation_of(model)
    assert head["settings"].get("weights") == ("dequantised" if decoder == "loop" else None)


@TRAINERS
@CODES
def test_saved_replayed_and_gone_on_with(tmp_path, mode, search):
    def made():
        return quantise(saved_base(tmp_path / "base"), mode)

    tested = ran(trainer(tmp_path / "run", made(), search))
    tested.save_model()
    saved = {path.name for path in (tmp_path / "run").iterdir()}
    assert "adapter_model.safetensors" in saved and "model.safetensors" not in saved
    again = peft.PeftModel.from_pretrained(made(), tmp_path / "run").eval()
    assert greedy(again) == greedy(tested.model)
    # a replay makes the base anew from the plain weights that the adapter names
    path, digest = tmp_path / "run" / ledger.NAME, tested.engine.weights.digest()
    loaded, _ = ledger._load(ledger.read(path), tmp_path / "run" / "start")
    assert base_bits(loaded) == base_bits(tested.model)
    assert ledger.verify(path, tmp_path / "run" / "start").weights == digest
    assert ledger.write_model(path, tmp_path / "again") == digest
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "run" / name).read_bytes()
    longer = ran(trainer(tmp_path / "run", made(), search, max_steps=5), True)
    whole = ran(trainer(tmp_path / "whole", made(), search, max_steps=5, workers=2))
    assert longer.engine.weights.digest() == whole.engine.weights.digest() != digest


@CODES
def test_essa_fine_tunes_over_codes_and_goes_on(tmp_path, mode):
    def made(steps):
        return trainer(tmp_path / "run", quantise(saved_base(tmp_path / "base"), mode), True, SFT_ROWS, max_steps=steps)

    tested = made(1)
    before = base_bits(tested.model)
    tested.train()
    assert base_bits(tested.model) == before
    assert all(p.dtype == torch.float32 and p.abs().sum() > 0 for p in _adapters.moved(tested.model).values())
    ran(made(2), True)
    assert ledger.verify(tmp_path / "run" / ledger.NAME, tmp_path / "run" / "start").recomputed
