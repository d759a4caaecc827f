"""Adapters on one engine of vLLM, many in a batch, beside transformers with PEFT: the same tokens and the same runs."""

import numpy as np
import pytest
from helpers import tokenizer
from small_models import LENGTH, LORA, ROWS, SETTINGS, adapted, count_letters, engine, members, model
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


def test_more_members_than_a_batch_has_each_with_its_own_prompts(pair):
    own = np.array([[0, 3], [4, 1], [2, 5], [1, 6], [3, 3], [0, 1]])
    found = [[e.scored.rewards.tolist() for e in one.evaluate(members(3), 0.1, "train", own)] for one in pair]
    assert found[0] == found[1] and pair[0].plan["max_loras"] == 4 and pair[0].plan["exact"]
    assert pair[0].generate("train") != engine(LocalEngine).generate("train")  # the adapter matters


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
    with pytest.raises(ValueError, match="the base is quantised, which engine='vllm'"):
        engine(AdapterEngine, peft.get_peft_model(base, peft.LoraConfig(**LORA | {"target_modules": ["q_proj"]})))
    with pytest.raises(ValueError, match="max_loras=0 must be a whole number of at least 1"):
        engine(AdapterEngine, adapted(), settings={"max_loras": 0})


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


def run(kind, config, folder, base, adapter=True, resume=False, **changed):
    """Train and return the digest of the weights, of which the ledger has been replayed."""
    settings = {"population_size": 4, "sigma": 0.1, "max_steps": 3, "prompts_per_step": 4, "save_strategy": "no"}
    settings |= {"output_dir": str(folder), "max_completion_length": LENGTH, "report_to": "none", "disable_tqdm": True}
    given = {"processing_class": tokenizer(), "peft_config": peft.LoraConfig(**LORA) if adapter else None}
    trainer = kind(base, count_letters, config(**settings | changed), ROWS[:6], **given)
    try:
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model()
        trainer.engine.check()
        return ledger.verify(folder / ledger.NAME, folder / ledger.START if adapter else base).weights
    finally:
        trainer.engine.close()


SAVING, LOW_RANK = {"save_strategy": "steps", "save_steps": 1}, {"perturbation": "low_rank", "rank": 2}


@pytest.mark.parametrize(
    ("kind", "config", "adapter", "law", "save"),
    [
        (ESTrainer, ESConfig, False, LOW_RANK | {"anchor_decay": 0.2}, {}),
        pytest.param(ESTrainer, ESConfig, False, LOW_RANK | {"anchor_decay": 0.2}, SAVING, marks=pytest.mark.slow),
        (ESTrainer, ESConfig, False, LOW_RANK | {"anchor_decay": 0.2, "perturb": "linear"}, {}),
        (ESTrainer, ESConfig, True, LOW_RANK | {"anchor_decay": 0.2}, {}),
        (ESSATrainer, ESSAConfig, True, {}, SAVING),
    ],
    ids=["weights, ledger", "weights, checkpoint", "linear", "adapter", "ESSA"],
)
def test_a_run_that_stopped_goes_on_as_the_local_engine_had_run(
    pair, kind, config, adapter, law, save, folder, tmp_path
):
    pair[0].close()
    batches = {"max_loras": 3} if adapter or "perturb" in law else {}
    on_vllm = {"engine": "vllm", "engine_kwargs": SETTINGS | batches} | save | law
    whole = run(kind, config, tmp_path / "whole", folder, adapter, decoder="generate", **law)
    run(kind, config, tmp_path / "run", folder, adapter, **on_vllm | {"max_steps": 2})
    assert run(kind, config, tmp_path / "run", folder, adapter, resume=True, **on_vllm) == whole
