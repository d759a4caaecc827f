"""GRPO's completions by the decoding loop: the tokens of transformers' generate, and its random state afterwards."""

from types import SimpleNamespace

import grpo_runs
import pytest
import torch
from evoalign_study import sweep
from grpo_runs import weights
from helpers import PROMPTS, lora, random_model, refused, same_bits, tokenizer
from test_runs import spec_of
from transformers import GenerationConfig

from evoalign_lib import _adapters, grpo, tiny
from evoalign_lib.engines.decode import multinomial


def built(folder, decoder, arm="grpo", **changed):
    settings = {"steps": 3, "prompts_per_step": 3, "max_completion_length": 16, "data": grpo_runs.rows(9)}
    return grpo_runs.built(folder, arm, decoder=decoder, **settings | changed)


# ---- tokens


def plain(model, tok, prompts, length, seed):
    """Completions by transformers' generate, as TRL calls it, and the random state afterwards."""
    padded = tok(prompts, padding=True, padding_side="left", return_tensors="pt")
    width = padded.input_ids.shape[1]
    config = GenerationConfig(
        max_new_tokens=length, do_sample=True, temperature=1.0, top_p=1.0, top_k=0, repetition_penalty=1.0,
        pad_token_id=tok.pad_token_id, eos_token_id=[tok.eos_token_id], remove_invalid_values=True,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        mask = padded.attention_mask
        new = model.generate(padded.input_ids, attention_mask=mask, generation_config=config)[:, width:]
        after = torch.get_rng_state()
    ends = (new == tok.eos_token_id).int()
    lengths = torch.where(ends.any(1), ends.argmax(1) + 1, new.shape[1])
    return [row[:n].tolist() for row, n in zip(new, lengths, strict=True)], after


def by_loop(model, tok, prompts, length, seed, drop_rows=None):
    writer = grpo.LoopRollouts()
    writer.drop_rows = drop_rows
    accelerator = SimpleNamespace(unwrap_model=lambda m: m, device=torch.device("cpu"))
    trainer = SimpleNamespace(model=model, processing_class=tok, eos_token_ids=[tok.eos_token_id])
    trainer.accelerator, trainer.max_completion_length = accelerator, length
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        told = writer(prompts, trainer)
        after = torch.get_rng_state()
    assert told["prompt_ids"] == [tok(p)["input_ids"] for p in prompts]
    return told["completion_ids"], after


@pytest.mark.parametrize("drop_rows", [None, False])
@pytest.mark.parametrize(("n", "group", "length"), [(1, 1, 8), (3, 1, 16), (8, 16, 16), (2, 5, 3)])
def test_the_tokens_and_the_random_state_of_transformers(n, group, length, drop_rows):
    """Batches of several shapes, with prompts of unequal length: some rows end long before others."""
    model, tok = tiny.load("A0")
    prompts = [row["prompt"] for row in grpo_runs.rows(n) for _ in range(group)]
    for seed in range(4):
        expected, after = plain(model, tok, prompts, length, seed)
        found, ours = by_loop(model, tok, prompts, length, seed, drop_rows)
        assert found == expected and torch.equal(after, ours)
    assert n == 1 or len({len(tok(p)["input_ids"]) for p in prompts}) > 1
    assert length < 16 or len({len(ids) for ids in found}) > 1


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
@pytest.mark.parametrize("targets", [["lm_head"], ["q_proj", "lm_head"]])
def test_an_adapter_on_a_tied_head_whose_dropout_is_on_in_training(targets):
    how = lora(target_modules=targets, init_lora_weights=False, lora_dropout=0.5)
    model, given = _adapters.attach(random_model(), how, 0), (tokenizer(), PROMPTS, 8, 0)
    assert plain(model.eval(), *given)[0] == by_loop(model.train(), *given)[0]


def test_logits_that_are_not_finite_draw_as_in_transformers():
    """After a divergence, transformers' processor puts zeros and the largest numbers in their places."""
    from transformers import InfNanRemoveLogitsProcessor

    logits = torch.tensor([[float("nan")] * 4, [0.0, float("inf"), 1.0, 2.0], [-float("inf"), 0.0, 1.0, float("nan")]])
    expected = InfNanRemoveLogitsProcessor()(None, logits).softmax(-1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = multinomial(3)(logits, torch.arange(3), 0)
        torch.manual_seed(0)
        assert torch.equal(found, torch.multinomial(expected, 1)[:, 0])


# ---- runs


@pytest.mark.parametrize(
    ("arm", "changed"), [("grpo", {"beta": 0.04}), pytest.param("dapo", {"micro_batch": 4}, marks=pytest.mark.slow)]
)
def test_a_run_ends_with_the_same_bits_with_either_decoder(tmp_path, arm, changed):
    """Where no token is a near-tie, as here; its logs and its budget are the same, too."""
    ends = []
    for decoder in ("generate", "loop"):
        trainer, budget = built(tmp_path, decoder, arm, **changed)
        trainer.train()
        logged = [{k: v for k, v in entry.items() if "time" not in k} for entry in trainer.state.log_history[:-1]]
        spent = {name: value for name, value in budget.spent(1000).items() if name != "core_seconds"}
        ends.append((weights(trainer.model), logged, spent))
    (one, first, ours), (two, second, theirs) = ends
    assert same_bits(one, two) and not same_bits(one, weights(tiny.load("A0")[0]))
    assert first == second and len(first) == 3 and ours == theirs


test_settings_that_are_refused = refused(
    ("grpo", {"decoder": "fast"}, "decoder='fast'"),
    ("rloo", {"decoder": "loop"}, "decoder='loop': TRL's RLOO"),
    ("grpo", {"decoder": "loop", "vllm": {}}, "decoder='loop': vLLM"),
    call=lambda arm, changed: grpo.config(arm, output_dir="x", **grpo_runs.SETTINGS | changed),
)


def test_models_and_rollouts_that_are_refused(tmp_path):
    with pytest.raises(ValueError, match="decoder='loop' has no effect with rollouts"):
        built(tmp_path, "loop", given={"rollouts": lambda prompts, trainer: {}})
    model = random_model()
    model.model.layers[0].register_forward_hook(lambda layer, given, out: 1.1 * out)
    with pytest.raises(ValueError, match="decoder='loop' does not cover this model: its logits"):
        by_loop(model, tokenizer(), PROMPTS, 8, 0)
    model = tiny.load("A0")[0]
    model.config.hidden_act = "gelu"
    trainer, _ = built(tmp_path, "loop", model=model)
    with pytest.raises(ValueError, match="decoder='loop' does not cover this model: hidden_act 'gelu'"):
        trainer.train()


# ---- the study


@pytest.mark.slow
def test_a_record_says_who_decoded_and_is_otherwise_the_same():
    spec = spec_of("grpo")
    plain, loop = (sweep.run(spec | more, "nb", "commit") for more in ({}, {"decoder": "loop"}))
    assert (plain["decoder"], loop["decoder"]) == ("generate", "loop") and plain["digest"] == loop["digest"]
    assert "decoder" not in plain["spec"] and plain["spec_hash"] != loop["spec_hash"]
