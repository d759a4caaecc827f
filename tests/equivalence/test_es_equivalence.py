"""What must be equal is: the loop and transformers, the step and its formula."""

import math
from hashlib import blake2b

import numpy as np
import pytest
import torch
from es_runs import ROWS, trained
from helpers import PROMPTS, lora, random_model, tokenizer, with_another_head
from helpers import greedy as generated
from hypothesis import given, settings
from hypothesis import strategies as st
from noise_by_numpy import filled, reference_perturb, reference_update
from transformers import AutoModelForCausalLM

from evoalign_lib._adapters import attach
from evoalign_lib.engines.decode import Decoder, greedy, inversion, rows_are_exact, supports
from evoalign_lib.engines.local import LocalEngine, Prompts

# ---- the decoding loop and transformers


def logits(model, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0, -1].double()


def assert_same_tokens(model, prompt: str, one: list[int], other: list[int]) -> None:
    """Equal token by token; a first difference is forgiven where the two logits are equal up to float32 rounding."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            scores = logits(model, tokenizer()(prompt)["input_ids"] + one[:i])
            assert abs(scores[a] - scores[b]) < 1e-4 * scores.abs().max(), (prompt, one, other)
            return
    assert len(one) == len(other), (prompt, one, other)


@st.composite
def models(draw):
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    config = {
        "num_attention_heads": draw(st.sampled_from([4, 8] if kv_heads < 4 else [4])),
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": draw(st.integers(1, 2)),
        "tie_word_embeddings": draw(st.booleans()),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-2])),
        "rope_parameters": {"rope_type": "default", "rope_theta": draw(st.sampled_from([10.0, 1e4, 1e6]))},
    }
    kind = draw(st.sampled_from(["qwen2", "llama"]))
    if kind == "llama":
        config["attention_bias"] = draw(st.booleans())
        config["head_dim"] = draw(st.sampled_from([None, 6]))
    return random_model(kind, seed=draw(st.integers(0, 100)), **config)


@settings(max_examples=25)
@given(
    model=models(),
    prompts=st.lists(st.sampled_from(PROMPTS), min_size=1, max_size=24),
    shared=st.sampled_from(["", "<|im_start|>user\nUsing the numbers", "ab"]),
    length=st.integers(1, 10),
    ends=st.integers(0, 60),
    chunk_rows=st.integers(1, 20),
    temperature=st.sampled_from([0.6, 1.0]),
)
def test_the_loop_is_generate(model, prompts, shared, length, ends, chunk_rows, temperature):
    # many end tokens: rows of a batch end early, and not together
    model.generation_config.eos_token_id = list(range(0, ends + 1))
    prompts = [shared + p for p in prompts]
    rows = [{"prompt": p} for p in prompts]
    results, samples = [], []
    train, sizes = {"train": Prompts(rows, tokenizer())}, {"max_completion_length": length, "chunk_rows": chunk_rows}
    for decoder in ("loop", "generate"):
        engine = LocalEngine(model, tokenizer(), None, train, decoder=decoder, **sizes)
        results.append([ids for _, ids in engine.generate("train")[0]])
        samples.append(sum(engine.generate("train", samples=2, seed=ends, temperature=temperature), []))
    for prompt, one, other in zip(prompts, *results, strict=True):
        assert_same_tokens(model, prompt, one, other)
    assert sum(a != b for a, b in zip(*samples, strict=True)) <= 1  # a number may fall on the edge between two tokens


UNCOVERED = [("llama", {"mlp_bias": True}), ("mistral", {"sliding_window": 3}), ("mistral", {})]
UNCOVERED += [("qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1})]
UNCOVERED += [("llama", {"rope_parameters": {"rope_type": kind, "factor": 2.0}}) for kind in ("linear", "dynamic")]
TARGETS = [None, ["lm_head"], None, ["q_proj", "lm_head"], ["k_proj", "down_proj"]]


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`", "ignore:.*tie_word_embeddings")
@pytest.mark.parametrize("examples", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_what_is_scored_is_what_is_saved(tmp_path_factory, examples):
    """After an update, an engine writes what transformers generates with the model that it reads from a folder."""
    peft, others = pytest.importorskip("peft"), st.sampled_from(UNCOVERED).map(lambda c: random_model(c[0], **c[1]))

    @settings(max_examples=examples)
    @given(models() | others, st.sampled_from(TARGETS), st.sampled_from([True, False]), st.booleans())
    def same(model, targets, own, zero):
        folder, covered = tmp_path_factory.mktemp("saved"), supports(model.config) is None
        model = with_another_head(model) if own else model
        if targets:
            model.save_pretrained(folder / "base")
            how = lora(target_modules=targets, init_lora_weights=zero)
            model = attach(AutoModelForCausalLM.from_pretrained(folder / "base"), how, 0)
        train = {"train": Prompts(ROWS, tokenizer())}
        engine = LocalEngine(model, tokenizer(), None, train, max_completion_length=6)
        assert engine.decoder == ("loop" if covered else "generate")
        engine.update(np.array([5, 6], np.uint64), np.full(2, 0.1, np.float32))
        engine.write_model()
        model.save_pretrained(folder)
        again = AutoModelForCausalLM.from_pretrained(folder / "base" if targets else folder).eval()
        again = peft.PeftModel.from_pretrained(again, folder).eval() if targets else again
        for row, (_, ids), expected in zip(ROWS, engine.generate("train")[0], generated(again), strict=True):
            assert_same_tokens(again, row["prompt"], ids, expected)

    same()


@pytest.mark.parametrize("sampled", [False, True])
def test_dropping_rows_changes_no_bit_of_those_that_go_on(sampled):
    """Ended rows leave in blocks of eight; logits and tokens of the others are those of full batches."""
    rng = np.random.default_rng(0)
    model, tok, n, length = random_model(), tokenizer(), 45, 24
    if not rows_are_exact(model.config, dict(model.named_parameters()), n):
        pytest.skip("the products of this CPU depend on the number of rows: no row is ever dropped here")
    prompts = Prompts([{"prompt": rng.choice(PROMPTS) + str(i)} for i in range(n)], tok)
    ids, mask = torch.from_numpy(prompts.ids), torch.from_numpy(prompts.mask)
    draw = inversion(torch.from_numpy(rng.random((n, length), dtype=np.float32))) if sampled else greedy
    ends = list(range(0, 273, 12))
    seen = {False: [], True: []}

    def decoded(drop):
        decoder = Decoder(model.config, dict(model.named_parameters()), ends, tok.pad_token_id, drop_rows=drop)
        return decoder.generate(ids, mask, length, lambda *given: seen[drop].append(given[0].clone()) or draw(*given))

    full, dropped, (whole, parts) = decoded(False), decoded(True), seen.values()
    sizes = [len(logits) for logits in parts]
    assert torch.equal(full, dropped) and [len(logits) for logits in whole] == [n] * len(sizes)
    assert sizes[0] == n and all(size % 8 == 0 for size in sizes[1:] if size < n) and sizes[-1] <= 16
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) > 3
    for t, (one, other) in enumerate(zip(whole, parts, strict=True)):
        going_on = (full[:, t] != tok.pad_token_id).nonzero().flatten()
        known = {row.numpy().tobytes() for row in other}
        assert all(one[r].numpy().tobytes() in known for r in going_on)


# ---- the step and its formula


def by_hand(model, steps: int, rows_of, decay: float = 0, antithetic: bool = False, law: tuple = ()) -> np.ndarray:
    """The run in NumPy and transformers: nothing of the trainer, the engine or the noise's fast path."""
    n, sigma, alpha, arm, seed = 6, 0.05, 0.05, b"es", 5
    layout, master = filled({name: p.detach() for name, p in model.named_parameters()})
    origin = master.copy()
    # the run key, spelled out
    run = blake2b(len(arm).to_bytes(4, "little") + arm + seed.to_bytes(8, "little"), digest_size=8).digest()
    for step in range(steps):
        keys, fitness = [], []
        for i in range(n // 2 if antithetic else n):
            message = b"v1" + run + step.to_bytes(4, "little") + i.to_bytes(4, "little")
            keys.append(int.from_bytes(blake2b(message, digest_size=8).digest(), "little"))
            for sign in (1, -1) if antithetic else (1,):
                member = reference_perturb(master, layout, keys[-1], sigma, sign, *law)
                with torch.no_grad():
                    for name, view in layout.views(member).items():
                        model.get_parameter(name).copy_(torch.from_numpy(view))
                rewards = []
                for row in rows_of(step):
                    ids = tokenizer()(ROWS[row]["prompt"])["input_ids"]
                    new = model.generate(torch.tensor([ids]), max_new_tokens=4, do_sample=False)[0, len(ids) :]
                    rewards.append(float(new.sum()))
                fitness.append(math.fsum(rewards) / len(rewards))
        mean = math.fsum(fitness) / n
        z = [(f - mean) / math.sqrt(math.fsum((f - mean) ** 2 for f in fitness) / n) for f in fitness]
        terms = [a - b for a, b in zip(z[::2], z[1::2], strict=True)] if antithetic else z
        if decay:
            master = master - np.float32(decay) * (master - origin)
        c = np.array([np.float32(alpha * term / n) for term in terms], np.float32)
        master = reference_update(master, layout, np.array(keys, np.uint64), c, *law)
    return master


BY_HAND = [
    ({}, {"decoder": "loop"}),
    ({}, {"decoder": "generate", "chunk_rows": 1}),
    ({"decay": 0.3}, {"anchor_decay": 0.3, "workers": 2, "chunk_rows": 2}),
    ({"antithetic": True, "law": ("byte_sum",)}, {"antithetic": True, "noise": "byte_sum"}),
    ({"law": ("tied", 3)}, {"noise": "tied", "perturbation": "low_rank", "rank": 3}),
]


@pytest.mark.parametrize(("variant", "how"), BY_HAND, ids=str)
def test_three_steps_by_hand(tmp_path, variant, how):
    order = [np.random.default_rng(np.random.SeedSequence([5, 0, epoch])).permutation(8) for epoch in (0, 1)]
    stream = np.concatenate(order)
    tested = trained(tmp_path, max_steps=3, **how)
    expected = by_hand(random_model(), 3, lambda step: stream[3 * step : 3 * step + 3], **variant)
    assert tested.engine.master.tobytes() == expected.tobytes() and tested.counts["tied"] == 0
