"""The local engine: prompts, decoding, the batch plan, and worker processes that come, work, fail and end."""

import gc
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from helpers import PROMPTS, random_model, reference_perturb, tokenizer
from scipy import stats
from tqdm import tqdm
from tqdm.std import TqdmDefaultWriteLock
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

from evoalign_lib import noise
from evoalign_lib.engines import decode, local, processes
from evoalign_lib.engines.decode import Decoder, supports
from evoalign_lib.engines.local import LocalEngine, Prompts
from evoalign_lib.rewards import RewardError, Rewards
from evoalign_lib.update_rules import Member

ROWS = [{"prompt": p, "number": i} for i, p in enumerate(PROMPTS)]


def engine(model=None, rows=ROWS, rewards=None, **settings) -> LocalEngine:
    settings = {"max_completion_length": 8} | settings
    rewards = None if rewards is None else Rewards(rewards)
    model = random_model() if model is None else model
    return LocalEngine(model, tokenizer(), rewards, {"train": Prompts(rows, tokenizer())}, **settings)


def members(n: int, seed: int = 0) -> list[Member]:
    return [Member(noise.member_key(noise.run_key("test", seed), 0, i)) for i in range(n)]


def token_sum(completion_ids, **columns):
    """Differs between members as soon as one token does."""
    return [float(sum(ids)) + 1000 * len(ids) for ids in completion_ids]


def evaluate(e: LocalEngine, n: int = 5, sigma: float = 0.05) -> np.ndarray:
    evaluations = e.evaluate(members(n), sigma, "train", np.arange(len(e.prompts["train"])))
    return np.array([evaluation.scored.rewards for evaluation in evaluations])


def gpt2() -> GPT2LMHeadModel:
    tok = tokenizer()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tok), n_embd=32, n_layer=1, n_head=2, n_positions=64, initializer_range=0.3,
        eos_token_id=tok.eos_token_id, bos_token_id=None, pad_token_id=tok.pad_token_id,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


@pytest.fixture
def two_workers():
    """Makes engines with two worker processes and ends these after the test."""
    made = []

    def make(**settings):
        made.append(engine(workers=2, **settings))
        return made[-1]

    yield make
    for e in made:
        e.close()


# ---- prompts


def test_prompts_are_padded_on_the_left():
    tok = tokenizer()
    prompts = Prompts([{"prompt": "ab"}, {"prompt": "c"}, {"prompt": "defg"}], tok)
    assert prompts.ids.shape == (3, prompts.width) == (3, 4)
    for row, mask, text in zip(prompts.ids, prompts.mask, ["ab", "c", "defg"], strict=True):
        assert mask.tolist() == [0] * (4 - len(text)) + [1] * len(text)
        assert tok.decode(row[mask == 1]) == text and (row[mask == 0] == tok.pad_token_id).all()
    assert prompts.lengths.tolist() == [2, 1, 4]


def test_conversational_prompts_go_through_the_chat_template():
    messages = [{"role": "user", "content": "hi"}]
    prompts = Prompts([{"prompt": messages, "answer": 3}], tokenizer())
    text = tokenizer().decode(prompts.ids[0])
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompts.conversational and prompts.columns == {"answer": [3]} and prompts.prompts == [messages]


class _WithBos:
    """A tokenizer that puts a start token before a text, as Llama's does."""

    bos_token, pad_token_id = "<s>", 0

    def __call__(self, texts, add_special_tokens, padding):
        assert padding is False
        start = [1] if add_special_tokens else []
        return {"input_ids": [start + [1] * t.startswith("<s>") + [5] for t in texts]}

    def apply_chat_template(self, messages, **settings):
        return "<s>" + messages[0]["content"]


@pytest.mark.parametrize("prompt", ["plain", "<s>rendered", [{"role": "user", "content": "chat"}]])
def test_one_start_token_whoever_wrote_it(prompt):
    assert Prompts([{"prompt": prompt}], _WithBos()).ids.tolist() == [[1, 5]]


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([], ValueError, "the data set is empty"),
        ([{"question": "a"}], ValueError, r"row 0 of the data set has no 'prompt', only \['question'\]"),
        ([{"prompt": "a", "x": 1}, {"prompt": "b"}], ValueError, r"row 1 .* columns \['prompt'\], row 0 .*'x'"),
        ([{"prompt": ""}], ValueError, "the prompt of row 0 is empty"),
        ([{"prompt": "a"}, {"prompt": None}], TypeError, "the prompt of row 1 is None"),
        ([{"prompt": "a"}, {"prompt": [{"role": "user", "content": "b"}]}], TypeError, "the prompt of row 1 is"),
        ([{"prompt": {"role": "user", "content": "b"}}], TypeError, "the prompt of row 0 is"),
        (["a", "b"], TypeError, "row 0 of the data set is 'a'"),
        ({"train": [{"prompt": "a"}]}, TypeError, r"mapping with the keys \['train'\]: give one split"),
        ([{"prompt": "a", "completions": "b"}], ValueError, "the column 'completions' is an argument"),
    ],
)
def test_bad_prompts(rows, error, message):
    with pytest.raises(error, match=message):
        Prompts(rows, tokenizer())


def test_the_digest_tells_prompts_apart():
    digests = {Prompts([{"prompt": p}], tokenizer()).digest for p in PROMPTS}
    assert len(digests) == len(PROMPTS)
    assert Prompts(ROWS, tokenizer()).digest == Prompts([{"prompt": p} for p in PROMPTS], tokenizer()).digest


# ---- which models, which settings


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_type 'linear'"),
        ({"mlp_bias": True}, "its feed-forward layers have biases"),
    ],
)
def test_what_the_loop_does_not_cover_falls_back_to_generate(change, reason):
    model = random_model("llama", **change)
    assert reason in supports(model.config)
    with pytest.raises(ValueError, match=f"decoder='loop' does not cover this model: {reason}.*decoder='generate'"):
        engine(model, decoder="loop")
    assert engine(model).plan["decoder"] == "generate"
    with pytest.raises(ValueError, match="decoder='generate'"):
        Decoder(model.config, {}, [1], 0)


def test_sliding_window_and_half_precision_fall_back_to_generate():
    sliding = random_model(use_sliding_window=True, sliding_window=4, max_window_layers=0)
    assert "sliding-window" in supports(sliding.config)
    half = random_model().to(torch.float16)
    assert supports(half.config) is None and engine(half).decoder == "generate"
    with pytest.raises(ValueError, match="its dtype is torch.float16"):
        engine(half, decoder="loop")


def test_gpt2_is_decoded_by_transformers():
    e = engine(gpt2())
    assert e.plan["decoder"] == e.decoder == "generate"
    with pytest.raises(ValueError, match="model_type 'gpt2' is not one of"):
        engine(gpt2(), decoder="loop")
    (completions,) = e.generate("train")
    assert len({tuple(ids) for _, ids in completions}) > 3
    model = gpt2()
    for row, (_, ids) in zip(ROWS, completions, strict=True):
        assert ids == alone(model, row["prompt"], 8)


def test_a_wrapped_model_with_other_names_falls_back_to_generate():
    model = random_model()
    inner = dict(model.named_parameters())
    model.named_parameters = lambda **settings: ((f"base_model.{name}", p) for name, p in inner.items())
    assert engine(model).decoder == "generate"
    assert engine(model).generate("train") == engine().generate("train")


@pytest.mark.parametrize("bad", [{"workers": 0}, {"chunk_rows": 0}, {"decoder": "vllm"}])
def test_bad_settings(bad):
    with pytest.raises(ValueError, match=str(next(iter(bad.values())))):
        engine(**bad)


def test_no_end_token_anywhere():
    model, tok = random_model(eos_token_id=None), tokenizer()
    model.generation_config.eos_token_id = None

    class Endless:
        eos_token_id, pad_token_id = None, 0

    with pytest.raises(ValueError, match="declares an end token: set tokenizer.eos_token"):
        LocalEngine(model, Endless(), None, {"train": Prompts(ROWS, tok)}, max_completion_length=2)


# ---- decoding


def alone(model, prompt: str, n: int) -> list[int]:
    """Greedy decoding of one prompt by transformers, without padding."""
    ids = torch.tensor([tokenizer()(prompt)["input_ids"]])
    with torch.inference_mode():
        return model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=n)[
            0, ids.shape[1] :
        ].tolist()


def test_end_tokens_of_model_and_tokenizer_end_a_completion():
    model = random_model()
    free = [ids for _, ids in engine(model).generate("train")[0]]
    assert all(len(ids) == 8 for ids in free)  # no end token by chance: the next lines bring it in
    stop = {free[0][2], free[1][4]}
    model.generation_config.eos_token_id = sorted(stop)
    e = engine(model)
    assert e.eos_ids == sorted(stop | {tokenizer().eos_token_id})
    for decoder in ("loop", "generate"):
        completions = engine(model, decoder=decoder).generate("train")[0]
        for (text, ids), full in zip(completions, free, strict=True):
            end = next((i + 1 for i, token in enumerate(full) if token in stop), 8)
            assert ids == full[:end]  # with its end token
            assert text == tokenizer().decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("decoder", ["loop", "generate"])
def test_a_row_that_has_ended_is_filled_with_padding(decoder):
    model = random_model()
    e = engine(model, decoder=decoder)
    free = e._decode(e.master, "train", np.arange(8), None)
    e.eos_ids = [int(free[0, 1])]
    ended = e._decode(e.master, "train", np.arange(8), None)
    assert ended.shape == free.shape == (8, 8)
    assert ended[0].tolist() == free[0, :2].tolist() + [tokenizer().pad_token_id] * 6
    assert (ended[1:] == free[1:]).all(axis=1).any()  # while others go on


def test_lengths_and_clipped_flags():
    model = random_model()
    free = [ids for _, ids in engine(model).generate("train")[0]]
    model.generation_config.eos_token_id = [free[0][2]]
    seen = []

    def reward(completion_ids, **columns):
        seen.extend(completion_ids)
        return [0.0] * len(completion_ids)

    e = engine(model, rewards=reward)
    # a perturbation that is far too small to change a token
    (evaluation,) = e.evaluate(members(1), 1e-9, "train", np.arange(8))
    ended = [free[0][2] in ids for ids in free]
    assert any(ended) and not all(ended)
    assert evaluation.clipped.tolist() == [not end for end in ended]
    assert evaluation.lengths.tolist() == [len(ids) for ids in seen]
    assert all(ids[-1] == free[0][2] for ids, end in zip(seen, ended, strict=True) if end)
    # an end token in the last place is an end all the same
    last = engine(model, rewards=reward, max_completion_length=3).evaluate(members(1), 1e-9, "train", np.arange(1))
    assert last[0].lengths.tolist() == [3] and last[0].clipped.tolist() == [False]


def test_special_tokens_are_in_the_ids_and_not_in_the_text():
    e = engine()
    tok = tokenizer()
    ids = np.array([[*tok("a<|im_start|>b")["input_ids"], tok.eos_token_id, tok.pad_token_id]])
    assert e.completions(e.until_end(ids)) == [("ab", ids[0, :4].tolist())]


@pytest.mark.parametrize(
    "name", ["no_repeat_ngram_size", "repetition_penalty", "suppress_tokens", "min_new_tokens", "top_k"]
)
def test_a_models_own_generation_settings_change_nothing(name):
    model = random_model()
    plain = engine(model, decoder="generate").generate("train", samples=1, seed=1)
    value = {"suppress_tokens": plain[0][0][1][:2], "repetition_penalty": 3.0, "min_new_tokens": 4}.get(name, 1)
    own = GenerationConfig(**{name: value, "eos_token_id": tokenizer().eos_token_id})
    model.generation_config = own
    assert engine(model, decoder="generate").generate("train", samples=1, seed=1) == plain
    assert model.generation_config is own


def test_samples_depend_on_seed_draw_and_row_only():
    e = engine(chunk_rows=3)
    first = e.generate("train", samples=3, seed=1)
    assert first == e.generate("train", samples=3, seed=1)
    assert first[:2] == e.generate("train", samples=2, seed=1)
    assert len({str(draw) for draw in first}) == 3
    assert first != e.generate("train", samples=3, seed=2)
    rows = np.array([5, 0])
    assert e.generate("train", rows, samples=3, seed=1) == [[draw[5], draw[0]] for draw in first]
    assert [len(draw) for draw in e.generate("train", np.array([], int), samples=2)] == [0, 0]


@pytest.mark.parametrize("decoder", ["loop", "generate"])
def test_a_temperature_of_1_changes_nothing_and_one_near_0_is_greedy(decoder):
    e = engine(chunk_rows=3, decoder=decoder)
    plain, (greedy,) = e.generate("train", samples=2, seed=1), e.generate("train")
    assert e.generate("train", samples=2, seed=1, temperature=1.0) == plain != [greedy] * 2
    assert e.generate("train", samples=2, seed=1, temperature=1e-6) == [greedy] * 2
    assert e.generate("train", samples=2, seed=1, temperature=0.7) != plain
    assert e.generate("train", temperature=0.7) == [greedy]


@pytest.mark.parametrize("temperature", [0, 0.0, -0.5, float("nan"), float("inf")])
def test_temperatures_that_are_refused(temperature):
    with pytest.raises(ValueError, match=r"must be above 0: greedy decoding is samples=0"):
        engine().generate("train", samples=1, temperature=temperature)


@pytest.mark.parametrize("decoder", ["loop", "generate"])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_sampling_has_the_frequencies_of_the_softmax(decoder, temperature):
    n = 1500
    model = random_model(spread=0.1)
    e = engine(model, [{"prompt": "a"}] * n, max_completion_length=1, decoder=decoder, chunk_rows=500)
    (draws,) = e.generate("train", samples=1, seed=0, temperature=temperature)
    with torch.inference_mode():
        logits = model(torch.tensor([tokenizer()("a")["input_ids"]])).logits[0, -1].double()
    p = (logits / temperature).softmax(-1).numpy()
    counts = np.bincount([ids[0] for _, ids in draws], minlength=len(p))
    # tokens of less than five expected draws are counted together
    rare = n * p < 5
    observed, expected = [*counts[~rare], counts[rare].sum()], [*(n * p[~rare]), n * p[rare].sum()]
    assert len(observed) > 50
    assert stats.chisquare(observed, expected).pvalue > 0.01


def test_sampling_by_inversion_at_the_ends_of_the_unit_interval():
    model = random_model()
    weights = dict(model.named_parameters())
    decoder = Decoder(model.config, weights, [tokenizer().eos_token_id], tokenizer().pad_token_id)
    ids, mask = torch.full((2, 1), 40), torch.ones(2, 1, dtype=torch.int64)
    tokens = decoder.generate(ids, mask, 1, torch.tensor([[0.0], [float(np.nextafter(np.float32(1), np.float32(0)))]]))
    with torch.inference_mode():
        possible = torch.nonzero(model(ids).logits[0, -1].softmax(-1)).flatten()
    assert tokens[0, 0] == possible[0] and tokens[1, 0] <= possible[-1]


# ---- the batch plan


@pytest.mark.parametrize("decoder", ["loop", "generate"])
def test_chunks_change_no_token(decoder):
    rewards = [evaluate(engine(rewards=token_sum, chunk_rows=rows, decoder=decoder)) for rows in (1, 3, 8, 256)]
    assert len(np.unique(rewards[0])) > 20
    for other in rewards[1:]:
        assert (other == rewards[0]).all()
    assert len({str(engine(chunk_rows=rows, decoder=decoder).generate("train")) for rows in (1, 3, 8, 256)}) == 1


def test_numbers_of_a_sample_follow_their_rows_through_the_chunks():
    uniforms = np.random.default_rng(0).random((8, 8), dtype=np.float32)
    one, other = (engine(chunk_rows=rows) for rows in (3, 8))
    decoded = [e._decode(e.master, "train", np.arange(8), uniforms) for e in (one, other)]
    assert (decoded[0] == decoded[1]).all()


def test_rows_in_any_order_and_number():
    e = engine(rewards=token_sum, chunk_rows=2)
    order = np.array([3, 3, 0, 7, 1])
    (some,), (whole,) = (e.evaluate(members(1), 0.05, "train", rows) for rows in (order, np.arange(8)))
    assert (some.scored.rewards == whole.scored.rewards[order]).all()


def test_columns_follow_their_rows():
    seen = []

    def reward(prompts, number, trainer_state, **columns):
        seen.append((prompts, number, trainer_state))
        return [0.0] * len(prompts)

    state = object()
    engine(rewards=reward).evaluate(members(1), 0.1, "train", np.array([4, 2]), state)
    assert seen == [([PROMPTS[4], PROMPTS[2]], [4, 2], state)]


def test_the_plan_names_what_results_depend_on():
    loop = {"decoder": "loop", "chunk_rows": 5, "width": 17, "prefix": 0, "products": "float32", "drop_rows": True}
    assert engine(chunk_rows=5).plan == loop  # five rows are never dropped
    assert engine(chunk_rows=5, decoder="generate").plan == {"decoder": "generate", "chunk_rows": 5, "width": 17}


def test_where_few_rows_are_computed_otherwise_batches_stay_full(monkeypatch, caplog):
    """A CPU whose products of fewer than 16 rows end in other bits, played by one that adds a bit to them."""
    multiply = decode._multiply

    def inexact(x, matrix, bias=None):
        product = multiply(x, matrix, bias)
        return product if len(x) >= 16 else torch.nextafter(product, torch.tensor(9.0))

    rows = [{"prompt": p} for p in PROMPTS * 3]
    model = random_model()
    model.generation_config.eos_token_id = list(range(0, 273, 9))
    expected = engine(model, rows).generate("train")
    caplog.set_level(logging.INFO, logger="evoalign_lib")
    monkeypatch.setattr(decode, "_multiply", inexact)
    e = engine(model, rows)
    assert e.plan["drop_rows"] is False
    assert "rows that have ended are computed to the end of their batch" in caplog.text
    assert e.generate("train") == expected
    assert engine(model, rows, chunk_rows=8).plan["drop_rows"] is True  # no smaller batch can come


# ---- members and the master


@pytest.mark.parametrize("decoder", ["loop", "generate"])
def test_a_member_is_the_master_plus_its_noise(decoder):
    e = engine(rewards=token_sum, decoder=decoder)
    plus, minus = e.evaluate([Member(members(1)[0].key, sign) for sign in (1, -1)], 0.05, "train", np.arange(8))
    for evaluation, sign in ((plus, 1), (minus, -1)):
        model = random_model()
        weights = reference_perturb(e.master, e.layout, members(1)[0].key, 0.05, sign)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.from_numpy(e.layout.views(weights)[name]))
        expected = token_sum([alone(model, row["prompt"], 8) for row in ROWS])
        assert evaluation.scored.rewards.tolist() == expected
    assert (plus.scored.rewards != minus.scored.rewards).any()


@pytest.mark.parametrize("workers", [1, 2])
def test_evaluation_and_generation_leave_the_master_alone(workers, two_workers):
    e = two_workers(rewards=token_sum) if workers == 2 else engine(rewards=token_sum)
    before = e.master.tobytes()
    evaluate(e)
    e.generate("train", samples=1)
    assert e.master.tobytes() == before


def test_results_come_in_the_order_of_the_members_whoever_is_done_first(two_workers):
    def slow_at_first(completion_ids, **columns):
        if (os.getpid() + len(done)) % 2:
            time.sleep(0.05)
        done.append(1)
        return token_sum(completion_ids)

    done = []
    e = two_workers(rewards=slow_at_first)
    results = e.evaluate(members(6), 0.05, "train", np.arange(8))
    assert ([r.scored.rewards.tolist() for r in results] == evaluate(engine(rewards=token_sum), 6)).all()
    assert done == []


def test_a_bfloat16_model_has_a_float32_master():
    e = engine(random_model().to(torch.bfloat16), rewards=token_sum)
    assert e.master.dtype == np.float32
    moved = e.master + np.float32(1e-6)
    e.master[:] = moved
    evaluate(e, 2)
    assert (e.master == moved).all()
    e.write_model()
    assert e.model.dtype == torch.bfloat16


# ---- worker processes


def test_workers_give_what_one_process_gives(two_workers):
    one, two = engine(rewards=token_sum), two_workers(rewards=lambda completion_ids, **kw: token_sum(completion_ids))
    assert (evaluate(one) == evaluate(two)).all()
    keys = np.array([m.key for m in members(5)], np.uint64)
    for e in (one, two):  # the workers see the updated master
        e.update(keys, np.full(5, 0.05, np.float32))
    assert one.master.tobytes() == two.master.tobytes()
    assert (evaluate(one) == evaluate(two)).all()
    assert one.generate("train", samples=2, seed=4) == two.generate("train", samples=2, seed=4)


def test_a_worker_uses_one_thread(two_workers):
    e = two_workers(rewards=lambda completions, **kw: [torch.get_num_threads()] * len(completions))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert (evaluate(e, 2) == 1).all() and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_a_failed_reward_names_member_and_prompt(two_workers):
    def fails(prompts, completions, **columns):
        raise ZeroDivisionError("no")

    for e in (engine(rewards=fails), two_workers(rewards=fails)):
        with pytest.raises(RewardError, match=r"member \d: reward function 'fails' gave ZeroDivisionError.*prompt 'a'"):
            evaluate(e)


def test_the_engine_works_on_after_a_failed_reward(two_workers):
    def fails_in_row_0(number, completion_ids, **columns):
        if number[0] == 0:
            raise ValueError(number)
        return token_sum(completion_ids)

    e = two_workers(rewards=fails_in_row_0)
    with pytest.raises(RewardError):
        evaluate(e)
    rows = np.arange(1, 8)
    results = e.evaluate(members(3), 0.05, "train", rows)
    assert ([r.scored.rewards for r in results] == evaluate(engine(rewards=token_sum), 3)[:, rows]).all()


@pytest.mark.parametrize("when", ["during", "between"])
def test_a_killed_worker_is_an_error_with_a_remedy_and_not_the_end(when, two_workers):
    def slow(completion_ids, **columns):
        time.sleep(0.05)
        return token_sum(completion_ids)

    e = two_workers(rewards=slow)
    e.evaluate(members(2), 0.05, "train", np.arange(8))
    victim = next(iter(e._pool._processes.values()))
    if when == "during":
        threading.Timer(0.1, os.kill, (victim.pid, signal.SIGKILL)).start()
    else:
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
    with pytest.raises(RuntimeError, match=r"a worker process ended unexpectedly.*resume_from_checkpoint=True"):
        for _ in range(20):
            e.evaluate(members(4), 0.05, "train", np.arange(8))
    # new workers take over
    assert (evaluate(e, 3) == evaluate(engine(rewards=token_sum), 3)).all()


class Bar(tqdm):
    """Has a lock of its own, as tqdm.auto where transformers has shown a bar before any other was shown."""

    _lock = TqdmDefaultWriteLock()


@pytest.mark.parametrize("bar", [tqdm, Bar])
def test_a_worker_killed_inside_a_progress_bar_blocks_no_other(two_workers, bar):
    """tqdm's lock is a semaphore that forked processes share, and dies with nobody."""

    def dies(completion_ids, **columns):
        with bar.get_lock():
            os.kill(os.getpid(), signal.SIGKILL)

    ours = bar.get_lock()
    e = two_workers(rewards=dies)
    with pytest.raises(RuntimeError, match="a worker process ended unexpectedly"):
        e.evaluate(members(2), 0.05, "train", np.arange(8))
    assert bar.get_lock() is ours
    held = [lock for lock in ours.locks if not lock.acquire(timeout=5)]
    for lock in ours.locks:
        lock.release()
    assert not held


def test_an_interrupt_leaves_the_workers_alive(two_workers):
    e = two_workers(rewards=token_sum)
    expected = evaluate(e)
    for process in e._pool._processes.values():
        os.kill(process.pid, signal.SIGINT)
    assert (evaluate(e) == expected).all()


def _gone(pid: int) -> bool:
    """Whether a process has ended (one that init has yet to reap counts as ended)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _await(condition, seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent("""
        import os, time
        from multiprocessing import get_context
        from concurrent.futures import ProcessPoolExecutor
        from evoalign_lib.engines.local import _start_worker

        pool = ProcessPoolExecutor(2, get_context("fork"), initializer=_start_worker, initargs=(os.getpid(),))
        pool.submit(time.sleep, 0).result()
        print(*pool._processes, flush=True)
        time.sleep(60)
        """)
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2 and not any(map(_gone, pids))
        parent.kill()
    assert _await(lambda: all(map(_gone, pids)))


def test_an_engine_that_nobody_uses_ends_with_its_workers():
    e = engine(workers=2, rewards=token_sum)
    evaluate(e, 2)
    pids, reference = list(e._pool._processes), weakref.ref(e)
    del e
    gc.collect()
    assert reference() is None
    assert _await(lambda: all(map(_gone, pids)))


def test_close_ends_the_workers_and_a_later_call_starts_new_ones():
    e = engine(workers=2, rewards=token_sum)
    first = evaluate(e, 2)
    pids = list(e._pool._processes)
    e.close()
    assert all(map(_gone, pids))
    assert (evaluate(e, 2) == first).all()
    e.close()


def test_prompts_cannot_come_after_the_workers(two_workers):
    e = two_workers(rewards=token_sum)
    e.add_prompts("more", [{"prompt": "z"}])
    evaluate(e, 2)
    assert len(e.generate("more")[0]) == 1
    with pytest.raises(RuntimeError, match="prompts 'late' come too late"):
        e.add_prompts("late", [{"prompt": "y"}])


def test_workers_need_linux(monkeypatch):
    monkeypatch.setattr(local.sys, "platform", "darwin")
    with pytest.raises(ValueError, match="workers=2 needs Linux.*set workers=1 on darwin"):
        engine(workers=2)
    assert processes.default_workers() == 1
