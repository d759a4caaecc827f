"""GRPO over adapters: what moves, what the KL is against, what it costs, and that nothing is lost on resumption."""

import numpy as np
import pytest
import torch
from evoalign_study import paths, weight_cache
from evoalign_study.kinds import train
from grpo_runs import SETTINGS, adapted, built, length_reward, rows, same, weights
from test_runs import COLD, spec_of

from evoalign_lib import _adapters, footprint, grpo, models, tiny
from evoalign_lib.engines.local import LocalEngine
from evoalign_lib.engines.memory import shape
from evoalign_lib.essa import lora_config

peft = pytest.importorskip("peft")


def made(folder, model=None, **changed):
    """A run of three steps of a model, or with a new adapter over the base."""
    given = {"peft_config": lora_config(np.int64(4))} if model is None else {}
    return built(folder, model=model, data=rows(6), given=given, **{"steps": 3} | changed)


def part(found, what: str) -> dict[str, torch.Tensor]:
    return {name: p for name, p in found.items() if what in name}


# ---- what moves


@pytest.mark.parametrize(("arm", "own"), [("grpo", False), ("rloo", True)])
def test_the_adapter_alone_moves_and_is_float32(tmp_path, arm, own):
    trainer, _ = made(tmp_path, adapted() if own else None, arm=arm, beta=0.04)
    before = weights(trainer.model)
    trainer.train()
    after = weights(trainer.model)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == set(part(before, ".default.")) and {p.dtype for p in after.values()} == {torch.float32}
    moments = [value for state in trainer.optimizer.state.values() for name, value in state.items() if name != "step"]
    assert len(moments) == 2 * len(moved) and {t.dtype for t in moments} == {torch.float32}


def test_a_new_adapter_is_drawn_from_the_seed(tmp_path):
    def start(seed):
        return part(weights(made(tmp_path, seed=seed)[0].model), "lora_A")

    assert same(start(3), start(3)) and not same(start(3), start(4))
    assert same(start(3), part(weights(_adapters.attach(tiny.load("A0")[0], lora_config(4), 3)), "lora_A"))


# ---- what it is compared with


@pytest.mark.parametrize("own", [False, True])
def test_the_kl_is_against_what_the_run_starts_from(tmp_path, own):
    """Of a new adapter that is the base, with the adapter disabled; of a given one the model with a copy of it."""
    plain = adapted().merge_and_unload() if own else tiny.load("A0")[0]
    trainer, _ = made(tmp_path, adapted() if own else None, beta=0.04, learning_rate=1e-2)
    assert trainer.ref_model is None and ("ref" in trainer.model.peft_config) == own
    score, errors, moves = trainer._generate_and_score_completions, [], []

    def watched(inputs):
        found = score(inputs)
        ids, mask = (torch.cat([found[f"prompt_{what}"], found[f"completion_{what}"]], 1) for what in ("ids", "mask"))
        kept, known = found["completion_ids"].shape[1], found["completion_mask"].bool()
        for model, into in ((plain, errors), (trainer.model, moves)):
            with torch.no_grad():
                logits = model(input_ids=ids, attention_mask=mask).logits[:, -kept - 1 : -1]
            logps = logits.log_softmax(-1).gather(2, found["completion_ids"][..., None])[..., 0]
            into.append((logps - found["ref_per_token_logps"])[known].abs().max().item())
        return found

    trainer._generate_and_score_completions = watched
    trainer.train()
    first, *later = (entry["kl"] for entry in trainer.state.log_history if "kl" in entry)
    assert abs(first) < 1e-6 and all(kl > 1e-5 for kl in later)
    # measured: up to 3e-6 nats, where the adapter is a product beside the base and not merged
    assert max(errors) < 1e-4 and moves[0] < 1e-4 < min(moves[1:])


# ---- budget


@pytest.mark.parametrize(("own", "beta"), [(False, 0.0), (False, 0.04), (True, 0.04)])
def test_the_budget_is_what_is_computed(tmp_path, own, beta):
    """Each product of a matrix of n numbers with a token takes 2 n operations, forward and in each kind of gradient."""
    trainer, budget = made(tmp_path, adapted() if own else None, beta=beta)
    trainer.train()
    d = sum(p.numel() for p in tiny.load("A0")[0].parameters())
    a = sum(p.numel() for name, p in trainer.model.named_parameters() if ".default." in name)
    assert budget.adapter == a == footprint.adapter_parameters(shape(trainer.model.config), 4)
    spent = budget.spent(d)
    tokens = spent["prompt_tokens"] + spent["generated_tokens"]
    generation, loss, activations, of_weights = d + a, d + a, d + a, a
    reference = 0 if not beta else d + a if own else d
    assert spent["forward_flops"] == 2 * tokens * (generation + loss + activations + of_weights + reference)


# ---- what is refused


def frozen_nothing():
    model = adapted()
    model.base_model.model.model.norm.weight.requires_grad_(True)
    return model


def renamed():
    return peft.get_peft_model(tiny.load("A0")[0], lora_config(4), adapter_name="mine")


REFUSED = [
    (frozen_nothing, {}, ValueError, "the adapter 'default'"),
    (lambda: adapted().requires_grad_(False), {}, ValueError, "requires_grad=False"),
    (lambda: adapted().to(torch.bfloat16), {}, ValueError, "bfloat16"),
    (renamed, {}, ValueError, "'mine'"),
    (adapted, {"peft_config": lora_config(4)}, ValueError, "existing adapter"),
    (lambda: tiny.load("A0")[0], {"peft_config": {"r": 4}}, TypeError, "peft_config"),
    (adapted, {"use_vllm": True}, ValueError, "vLLM beside an adapter"),
]


@pytest.mark.parametrize(("make", "given", "error", "named"), REFUSED)
def test_what_is_refused(tmp_path, monkeypatch, make, given, error, named):
    from evoalign_lib.engines import vllm

    monkeypatch.setattr(vllm, "prepare_process", lambda: None)
    args = grpo.config("grpo", output_dir=str(tmp_path), **SETTINGS)
    args.use_vllm = given.pop("use_vllm", False)
    with pytest.raises(error, match=named):
        grpo.trainer(make(), length_reward, args, [{"prompt": "1"}] * 2, tiny.tokenizer(), **given)


# ---- the study


def test_a_run_leaves_its_adapter_in_its_folder_and_its_weights_are_made_again(tmp_path, monkeypatch):
    """What a run by hand has of it, `test_runs` says."""
    spec = spec_of("grpo_lora", **COLD)
    record = train.run(spec, None, tmp_path / "place")
    loaded = peft.PeftModel.from_pretrained(tiny.load("A0")[0], str(tmp_path / "place" / "model")).merge_and_unload()
    engine = LocalEngine(loaded, tiny.tokenizer(), None, {}, max_completion_length=1)
    assert models.flat_digest(engine.master) == record["digest"]
    monkeypatch.setattr(paths, "RUNS", tmp_path)
    master, made = weight_cache.again(spec, record["digest"])
    assert made == "trained again" and models.flat_digest(master) == record["digest"]
    assert np.linalg.norm(master - weight_cache.of_base("A0")) == pytest.approx(record["update_norm"], rel=1e-5)
