"""Adapters on one engine of vLLM, many in a batch, beside transformers with PEFT: the same tokens and the same runs."""

import numpy as np
import pytest
from helpers import tokenizer
from small_models import LENGTH, LORA, ROWS, SETTINGS, adapted, count_letters, engine, members, model, move
from transformers import AutoModelForCausalLM

from evoalign_lib import ledger
from evoalign_lib.engines._vllm_worker import NotMapped
from evoalign_lib.engines.local import LocalEngine, Prompts
from evoalign_lib.engines.vllm import AdapterEngine, WrongWeights
from evoalign_lib.es import ESConfig, ESTrainer
from evoalign_lib.essa import ESSAConfig, ESSATrainer
from evoalign_lib.quantisation import quantise

pytest.importorskip("vllm", reason="make test-engines has an environment with vLLM")
peft = pytest.importorskip("peft")


@pytest.fixture(scope="module")
def pair():
    """One engine of each kind; in vLLM a batch has four members."""
    settings = {"max_loras": 4} | SETTINGS
    both = engine(AdapterEngine, adapted(), settings=settings), engine(LocalEngine, adapted())
    yield both
    both[0].close()


def test_greedy_tokens_are_those_of_peft_and_the_adapter_matters(pair):
    (ours,), (theirs,) = (one.generate("train") for one in pair)
    plain = engine(LocalEngine)
    assert ours == theirs != plain.generate("train")[0]
    assert pair[0].plan["max_loras"] == 4 and pair[0].plan["exact"]


def test_members_of_one_batch_are_those_of_peft_one_by_one(pair):
    rows = np.arange(len(ROWS))
    found = [one.evaluate(members(5), 0.1, "train", rows) for one in pair]
    for ours, theirs in zip(*found, strict=True):
        assert ours.scored.rewards.tolist() == theirs.scored.rewards.tolist()
        assert ours.lengths.tolist() == theirs.lengths.tolist()
    assert len({tuple(e.scored.rewards) for e in found[0]}) == 10, "members that do alike show nothing"
    own = np.array([[0, 3], [4, 1], [2, 5]])  # each member its own prompts
    found = [[e.scored.rewards.tolist() for e in one.evaluate(members(2)[:3], 0.1, "train", own)] for one in pair]
    assert found[0] == found[1]
    twice = pair[0].evaluate([members(1)[0]] * 2, 0.05, "train", np.arange(4), sampling=(7, 3))
    other = pair[0].evaluate(members(1)[:1], 0.05, "train", np.arange(4), sampling=(8, 3))
    assert twice[0].lengths.shape == (12,)  # common random numbers
    assert twice[0].scored.rewards.tolist() == twice[1].scored.rewards.tolist() != other[0].scored.rewards.tolist()


def test_after_updates_and_noise_on_the_weights_tokens_are_those_of_peft(pair):
    before = pair[0].generate("train")
    move(pair)
    ours, theirs = (one.generate("train") for one in pair)
    assert ours == theirs != before
    noisy = []
    for one in pair:
        with one.perturbed(members(1)[0].key, 0.1):
            noisy.append(one.generate("train"))
    assert noisy[0] == noisy[1] != ours
    assert pair[0].generate("train") == ours


def test_a_layer_to_which_vllm_gives_no_adapter_is_an_error(pair):
    kept = pair[0].generate("train")
    (layer, *_) = pair[0]._adapter(pair[0].master)
    with pytest.raises(NotMapped, match="vLLM gives .lm_head. no adapter: leave it out"):
        pair[0].generator.put_adapters({1: [("lm_head", *layer[1:])]})
    assert pair[0].generate("train") == kept


@pytest.mark.parametrize("changed", [{"use_dora": True}, {"lora_bias": True}, {"modules_to_save": ["lm_head"]}])
def test_more_than_plain_lora_is_refused_before_vllm_starts(changed):
    with pytest.raises(ValueError, match="is more than a product of two matrices.*use engine='local'"):
        engine(AdapterEngine, adapted(**changed))


def test_a_quantised_base_and_settings_without_effect_are_refused_before_vllm_starts():
    pytest.importorskip("torchao")
    base = quantise(model(), "int8")
    with pytest.raises(ValueError, match="the base is quantised, which engine='vllm' does not take so far"):
        engine(AdapterEngine, peft.get_peft_model(base, peft.LoraConfig(**LORA | {"target_modules": ["q_proj"]})))
    for settings, message in (
        ({"max_loras": 0}, "max_loras=0 must be a whole number of at least 1"),
        ({"enable_lora": True}, "'enable_lora' is set by the engine"),
    ):
        with pytest.raises(ValueError, match=message):
            engine(AdapterEngine, adapted(), settings=settings)


def test_another_base_than_the_runs_is_found_before_anything_is_decoded(pair, folder):
    """Some adapters begin with a change of the base itself, of which the folder that vLLM loads knows nothing."""
    pair[0].close()
    base = AutoModelForCausalLM.from_pretrained(folder)
    changed = peft.get_peft_model(base, peft.LoraConfig(**LORA | {"init_lora_weights": "pissa", "rank_pattern": {}}))
    from_folder = engine(AdapterEngine, changed, settings=SETTINGS, folder=folder)
    with pytest.raises(WrongWeights, match="the weights are not those of the run"):
        from_folder.generate("train")
    written = engine(AdapterEngine, changed, settings=SETTINGS)  # vLLM gets the base as it is here
    assert written.generate("train") == engine(LocalEngine, changed).generate("train")
    written.close()


def test_longer_prompts_come_at_any_time(pair):
    rows = [{"prompt": ROWS[0]["prompt"] + " again and again" * 30}]
    for one in pair:
        one.put_prompts("longer", Prompts(rows, tokenizer()))
    assert pair[0].generate("longer") == pair[1].generate("longer")


def run(kind, config, folder, base, resume=False, **changed):
    """Train an adapter and return the digests of its weights, of which the ledger has been replayed."""
    settings = {"population_size": 4, "sigma": 0.1, "max_steps": 3, "prompts_per_step": 4, "save_strategy": "no"}
    settings |= {"output_dir": str(folder), "max_completion_length": LENGTH, "report_to": "none", "disable_tqdm": True}
    given = {"processing_class": tokenizer(), "peft_config": peft.LoraConfig(**LORA)}
    trainer = kind(base, count_letters, config(**settings | changed), ROWS[:6], **given)
    try:
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model()
        return ledger.verify(folder / ledger.NAME, folder / ledger.START).weights
    finally:
        trainer.engine.close()


@pytest.mark.parametrize(
    ("kind", "config", "save"),
    [
        (ESTrainer, ESConfig, {"save_strategy": "no"}),
        (ESSATrainer, ESSAConfig, {"save_strategy": "steps", "save_steps": 1}),
    ],
)
def test_a_run_that_stopped_goes_on_as_the_local_engine_had_run(pair, kind, config, folder, tmp_path, save):
    pair[0].close()
    on_vllm = {"engine": "vllm", "engine_kwargs": SETTINGS | {"max_loras": 3}}
    law = {"anchor_decay": 0.2, "perturbation": "low_rank", "rank": 2} if kind is ESTrainer else {}
    whole = run(kind, config, tmp_path / "whole", folder, decoder="generate", **law)
    run(kind, config, tmp_path / "run", folder, **on_vllm | save | law | {"max_steps": 2})
    assert run(kind, config, tmp_path / "run", folder, resume=True, **on_vllm | save | law) == whole
