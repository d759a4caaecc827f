"""ES and ESSA of an adapter over a quantised base: members, ledger, resumed and replayed runs, evaluation."""

import json

import numpy as np
import pytest
import torch
from helpers import PROMPTS, greedy, random_model, tokenizer

from evoalign_lib import _adapters, ledger, models
from evoalign_lib.es import ESConfig, ESTrainer
from evoalign_lib.essa import ESSAConfig, ESSATrainer
from evoalign_lib.precision import copy_to
from evoalign_lib.quantisation import quantise

peft = pytest.importorskip("peft")
pytest.importorskip("cma")
pytest.importorskip("torchao")

ROWS = [{"prompt": p} for p in PROMPTS]
CODES = pytest.mark.parametrize("mode", [pytest.param("int8", marks=pytest.mark.slow), "int4"])
TRAINERS = pytest.mark.parametrize("search", [False, True], ids=["ES", "ESSA"])


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


def trainer(folder, model, search=False, peft_config=None, **changed):
    spread = {"sigma": 2.0} if search else {"sigma": 0.1, "alpha": 0.2}
    given = {
        "output_dir": str(folder), "population_size": 4, "max_steps": 3, "prompts_per_step": 4, "workers": 1,
        "max_completion_length": 6, "disable_tqdm": True, "save_strategy": "no", "report_to": "none",
    } | spread | changed  # fmt: skip
    config, kind = (ESSAConfig, ESSATrainer) if search else (ESConfig, ESTrainer)
    tok = None if isinstance(model, str) else tokenizer()
    return kind(model, token_sum, config(**given), ROWS, ROWS, tok, peft_config=peft_config)


def own(tested) -> list[list[int]]:
    return [ids for _, ids in tested.engine.generate("train")[0]]


def frozen(model) -> dict[str, bytes]:
    """Bits of all of the base's state, codes and scales among it."""
    state = {name: b"".join(_adapters.raw_bytes(value)) for name, value in model.state_dict().items()}
    return {name: bits for name, bits in state.items() if "lora_" not in name}


@CODES
@pytest.mark.parametrize(
    ("decoder", "search"), [("loop", False), pytest.param("generate", True, marks=pytest.mark.slow)]
)
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
    written = tested.engine._decode("train", np.arange(len(ROWS)), None, 1.0, (member, 0.5))
    with tested.engine.weights.member(member.key, 0.5, member.sign) as flat:
        copy_to(tested.model, tested.engine.layout, flat)
        assert [list(ids) for _, ids in written] == greedy(tested.model)
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
