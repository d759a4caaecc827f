"""ES and ESSA of an adapter over a quantised base: members, ledger, resumed and replayed runs, evaluation."""

import json

import numpy as np
import pytest
import torch
from helpers import ROWS, SFT_ROWS, base_bits, greedy, lora, saved_base, short_run, token_sum, tokenizer

from evoalign_lib import _adapters, ledger, models
from evoalign_lib.es import ESConfig, ESTrainer
from evoalign_lib.essa import ESSAConfig, ESSATrainer
from evoalign_lib.precision import copy_to
from evoalign_lib.quantisation import quantise

peft = pytest.importorskip("peft")
pytest.importorskip("cma")
pytest.importorskip("torchao")

CODES = pytest.mark.parametrize("mode", [pytest.param("int8", marks=pytest.mark.slow), "int4"])
TRAINERS = pytest.mark.parametrize("search", [False, True], ids=["ES", "ESSA"])


def trainer(folder, model, search=False, **changed):
    spread = {"sigma": 2.0} if search else {"sigma": 0.1, "alpha": 0.2}
    given = {"population_size": 4, "prompts_per_step": 4, "max_completion_length": 6} | spread | changed
    config, kind = (ESSAConfig, ESSATrainer) if search else (ESConfig, ESTrainer)
    adapter = lora(init_lora_weights=False)
    return kind(model, token_sum, short_run(folder, config, **given), ROWS, ROWS, tokenizer(), peft_config=adapter)


def own(tested) -> list[list[int]]:
    return [ids for _, ids in tested.engine.generate("train")[0]]


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
    assert head["evoalign_ledger"] == (6 if search else 4)
    assert head["model"]["quantisation"] == _adapters.quantisation_of(model)
    assert head["model"]["quantisation"]["base"] == models.base_digest(saved_base(tmp_path / "base"))
    assert head["settings"]["decoder"] == decoder
    assert head["settings"].get("weights") == ("dequantised" if decoder == "loop" else None)


@TRAINERS
@CODES
def test_saved_replayed_and_gone_on_with(tmp_path, mode, search):
    def made():
        return quantise(saved_base(tmp_path / "base"), mode)

    tested = trainer(tmp_path / "run", made(), search)
    tested.train()
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
    longer = trainer(tmp_path / "run", made(), search, max_steps=5)
    longer.train(resume_from_checkpoint=True)
    whole = trainer(tmp_path / "whole", made(), search, max_steps=5, workers=2)
    whole.train()
    assert longer.engine.weights.digest() == whole.engine.weights.digest() != digest


@CODES
def test_essa_fine_tunes_over_codes_and_goes_on(tmp_path, mode):
    def made(steps):
        args = short_run(tmp_path / "run", ESSAConfig, population_size=4, max_steps=steps, prompts_per_step=4)
        model = quantise(saved_base(tmp_path / "base"), mode)
        return ESSATrainer(model, token_sum, args, ROWS, None, tokenizer(), sft_dataset=SFT_ROWS)

    tested = made(1)
    before = base_bits(tested.model)
    tested.train()
    assert base_bits(tested.model) == before
    assert all(p.dtype == torch.float32 and p.abs().sum() > 0 for p in _adapters.moved(tested.model).values())
    again = made(2)
    again.train(resume_from_checkpoint=True)
    assert ledger.verify(tmp_path / "run" / ledger.NAME, tmp_path / "run" / "start").recomputed
