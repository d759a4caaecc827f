"""The local engine: prompts, decoding, the batch plan, and worker processes that come, work, fail and end."""

import asyncio
import gc
import os
import signal
import socket
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
import torch
from helpers import PROMPTS, ROWS, fork, greedy, random_model, refused, token_sum, tokenizer, wait
from torch import nn
from tqdm import tqdm
from tqdm.std import TqdmDefaultWriteLock
from transformers import GenerationConfig

from evoalign_lib import _forks, noise
from evoalign_lib.engines import agreement, decode, local, processes
from evoalign_lib.engines.local import LocalEngine, Prompts
from evoalign_lib.rewards import RewardError, Rewards
from evoalign_lib.update_rules import Member

ALL = np.arange(len(ROWS))


def engine(model=None, rows=ROWS, rewards=None, **settings) -> LocalEngine:
    settings = {"max_completion_length": 8} | settings
    rewards = None if rewards is None else Rewards(rewards)
    model = random_model() if model is None else model
    return LocalEngine(model, tokenizer(), rewards, {"train": Prompts(rows, tokenizer())}, **settings)


def members(n: int) -> list[Member]:
    return [Member(noise.member_key(noise.run_key("test", 0), 0, i)) for i in range(n)]


def evaluate(e: LocalEngine, n: int = 5, rows: np.ndarray = ALL) -> np.ndarray:
    return np.array([evaluation.scored.rewards for evaluation in e.evaluate(members(n), 0.05, "train", rows)])


# ---- prompts, models, settings


def test_prompts_are_rendered_and_padded_on_the_left():
    tok, chat = tokenizer(), [{"role": "user", "content": "hi"}]
    prompts = Prompts([{"prompt": "ab"}, {"prompt": "c"}, {"prompt": "defg"}], tok)
    assert prompts.lengths.tolist() == [2, 1, 4] and prompts.mask[1].tolist() == [0, 0, 0, 1]
    assert tok.batch_decode(prompts.ids, skip_special_tokens=True) == ["ab", "c", "defg"]
    assert prompts.ids[1].tolist() == [tok.pad_token_id] * 3 + tok("c")["input_ids"]
    rendered = Prompts([{"prompt": chat, "answer": 3}], tok)
    assert tok.decode(rendered.ids[0]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert rendered.conversational and rendered.columns == {"answer": [3]} and rendered.prompts == [chat]
    assert Prompts([{"prompt": "a", "image": None}], tok).columns == {"image": [None]}
    assert len({Prompts([{"prompt": p}], tok).digest for p in PROMPTS}) == len(PROMPTS)
    # what all begin with, of which each keeps a token to itself
    assert [len(Prompts([{"prompt": "ab"}, {"prompt": p}], tok).prefix) for p in ("abc", "ba")] == [1, 0]


class _WithBos:
    """A tokenizer that puts a start token before a text, as Llama's does."""

    bos_token, pad_token_id, bos_token_id, eos_token_id = "<s>", 0, 1, 2

    def __call__(self, texts, add_special_tokens, padding):
        return {"input_ids": [[1] * add_special_tokens + [1] * t.startswith("<s>") + [5] for t in texts]}

    def apply_chat_template(self, messages, **settings):
        return "<s>" + messages[0]["content"]


@pytest.mark.parametrize("prompt", ["plain", "<s>rendered", [{"role": "user", "content": "chat"}]])
def test_one_start_token_whoever_wrote_it(prompt):
    assert Prompts([{"prompt": prompt}], _WithBos()).ids.tolist() == [[1, 5]]
    if isinstance(prompt, str):  # each row for itself
        assert Prompts([{"prompt": each} for each in ("<s>a", prompt, "b")], _WithBos()).ids.tolist() == [[1, 5]] * 3


USER, SO = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "so "}
OPEN = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
CALLS = "{% for m in messages %}{{ m.content }}{% if m.calls is defined %}{{ m.calls | length }}{% endif %}{% endfor %}"
PARTS = [{"type": "text", "text": letter, "image": None} for letter in "hi"]
SHOWN = [([USER | {"content": each}], {}, OPEN.replace("hi", each)) for each in ("", "é 你 😀\x00")]
SHOWN += [([USER | {"content": PARTS}], {}, OPEN), ([USER | {"role": "system"}], {}, OPEN.replace("user", "system"))]
SHOWN += [([USER | {"calls": None}], {"chat_template": CALLS}, "hi"), ([USER, SO], {}, OPEN + "so ")]  # is continued
SHOWN += [([USER, SO], {"add_generation_prompt": False, "continue_final_message": True}, OPEN + "so ")]
SHOWN += [([USER, SO], {"add_generation_prompt": True}, OPEN + "so <|im_end|>\n<|im_start|>assistant\n")]
LAST = "{{ messages[-1].content }}"
SHOWN += [([SO | {"content": "", "tool_calls": [{"name": "f"}]}, USER], {"chat_template": LAST}, "hi")]
SHOWN += [([USER], {"continue_final_message": True}, "<|im_start|>user\nhi")]


@pytest.mark.parametrize(("messages", "template", "text"), SHOWN)
def test_a_template_is_given_what_the_messages_say(messages, template, text):
    [ids] = Prompts([{"prompt": messages}], tokenizer(), template).ids
    assert tokenizer().decode(ids) == text


test_prompts_that_cannot_be_rendered = refused(
    *(([bad], {}, f"row 1 .*{named}") for bad, named in (
        ({"from": "human", "value": "hi"}, "maybe_convert_to_chatml"), ({"role": "user", "text": "hi"}, "None"),
        (USER | {"content": None}, "None"), (USER | {"content": [{"type": "image"}]}, "'image'"), ("hi", "'hi'"),
        (USER | {"content": [{"type": "text", "text": None}]}, "message 0"), (USER | {"content": []}, "message 0"),
    )),
    ([USER | {"role": "system"}, USER | {"content": "say hi"}], {"chat_template": LAST}, "row 1 .*message 0"),
    ([USER | {"content": 9 * "hi, "}, USER | {"content": 18 * "hi, "}], {"chat_template": LAST}, "row 1 .*message 0"),
    ([SO | {"tool_calls": [{"name": "f"}]}, USER], {"chat_template": LAST}, "row 1 .*message 0.*empty its content"),
    ([], {}, "row 1"),
    ([SO, USER], {"chat_template": LAST}, "row 1 .*'so '"),  # is left out
    ([SO, USER], {"chat_template": "{{ raise_exception(4) if messages[1:] }}" + LAST}, "row 1 .*4"),
    *(([USER], {name: True}, f"chat_template_kwargs=.*'{name}'") for name in ("tokenize", "truncation")),
    call=lambda messages, template: Prompts([{"prompt": [USER]}, {"prompt": messages}], tokenizer(), template),
)  # fmt: skip


test_bad_prompts = refused(
    ([], ValueError, "empty"),
    ([{"question": "a"}], ValueError, "row 0 .*'question'"),
    ([{"prompt": "a", "x": 1}, {"prompt": "b"}], ValueError, "row 1 .*'x'"),
    ([{"prompt": ""}], ValueError, "row 0"),
    ([{"prompt": "a"}, {"prompt": None}], TypeError, "row 1 is None"),
    ([{"prompt": "a"}, {"prompt": [{"role": "user", "content": "b"}]}], TypeError, "row 1"),
    (["a", "b"], TypeError, "row 0 .*'a'"),
    ({"train": [{"prompt": "a"}]}, TypeError, "'train'"),
    ([{"prompt": "a", "completions": "b"}], ValueError, "'completions'"),
    ([{"prompt": "a", "images": None}, {"prompt": "b", "images": []}], ValueError, "'images'"),
    ([{"prompt": "a"}, {"prompt": "b<|im_end|>"}], ValueError, "row 1 .*'<|im_end|>'"),
    ([{"prompt": "a"}, {"prompt": "b\ud800"}], ValueError, "row 1"),
    call=lambda rows: Prompts(rows, tokenizer()),
)


def changed(change):
    """Return a function that makes a model and changes it."""
    return lambda: (model := random_model("llama"), change(model))[0]


def hooked(place: str, change):
    return changed(lambda model: model.get_submodule(place).register_forward_hook(lambda part, given, out: change(out)))


def logits(change):
    return hooked("", lambda out: type(out)(**{**out, "logits": change(out)}))


def gated(model) -> None:
    layer = model.model.layers[1].mlp.down_proj
    layer.gate = nn.Parameter(torch.zeros(1))  # it moves later
    layer.register_forward_hook(lambda layer, given, out: out * (1 + layer.gate))


BESIDES = [
    hooked("model.embed_tokens", lambda out: out * 32**0.5),
    hooked("model.layers.1", lambda out: out + 0.1 * (out.shape[1] == 1)),  # only while it writes
    logits(lambda out: 5 * torch.tanh(out.logits / 5)),
    logits(lambda out: out.logits.index_fill(-1, torch.tensor([7]), -torch.inf)),
    changed(gated),
    changed(lambda model: setattr(model.model.layers[0].mlp, "act_fn", nn.GELU())),
    changed(lambda model: setattr(model.model, "norm", nn.LayerNorm(32))),
    changed(lambda model: model.model.rotary_emb.inv_freq.mul_(1.05)),
    changed(lambda model: setattr(model.model, "layers", model.model.layers[:1])),
    changed(lambda model: setattr(model.config, "num_attention_heads", 2)),
    changed(lambda model: setattr(model.model.layers[0].mlp.up_proj, "bias", nn.Parameter(torch.zeros(48)))),
]
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: random_model("llama", hidden_act="gelu"), "hidden_act 'gelu'"),
        (lambda: random_model("llama", rope_parameters=LINEAR), "rope_type 'linear'"),
        (lambda: random_model("llama", mlp_bias=True), "biases"),
        (lambda: random_model(use_sliding_window=True, sliding_window=4, max_window_layers=0), "sliding-window"),
        (lambda: random_model().to(torch.float16), "torch.float16"),
        (lambda: random_model("gpt2"), "model_type 'gpt2'"),
        *((make, "its (logits|parameter)") for make in BESIDES),
    ],
)
def test_what_the_loop_does_not_cover_falls_back_to_generate(make, reason, monkeypatch):
    with pytest.raises(ValueError, match=f"decoder='loop'.*{reason}"):
        engine(make(), decoder="loop")
    said = []
    monkeypatch.setattr(local.logger, "warning", lambda *text: said.append(text))
    e = engine(make())
    assert len(said) == (make in BESIDES)
    assert e.plan["decoder"] == e.decoder == "generate"
    if e.model.dtype == torch.float32:
        (completions,) = e.generate("train")
        assert [ids for _, ids in completions] == greedy(make(), 8)


test_settings_that_cannot_be_are_refused = refused(
    *(({name: bad}, 1.0, f"{bad}") for name, bad in (("workers", 0), ("chunk_rows", 0), ("decoder", "vllm"))),
    *(({}, bad, f"temperature={bad}") for bad in (0, -0.5, float("nan"), float("inf"))),
    call=lambda how, temperature: engine(**how).generate("train", samples=1, temperature=temperature),
)


def test_a_model_without_an_end_and_a_system_that_does_not_fork(monkeypatch):
    model, endless = random_model(eos_token_id=None), type("T", (), {"eos_token_id": None, "pad_token_id": 0})()
    model.generation_config.eos_token_id = None
    with pytest.raises(ValueError, match="end token"):
        LocalEngine(model, endless, None, {"train": Prompts(ROWS, tokenizer())}, max_completion_length=2)
    monkeypatch.setattr(local.sys, "platform", "darwin")
    with pytest.raises(ValueError, match="workers=2"):
        engine(workers=2)
    assert processes.default_workers() == 1


def test_what_begins_late_is_seen_and_the_model_stays_as_it_is():
    late = logits(lambda out: -out.logits if out.past_key_values.get_seq_length() > 40 else out.logits)
    assert [engine(late(), max_completion_length=n).decoder for n in (22, 40)] == ["loop", "generate"]
    # a long run is compared to its end only where attention has a window, as it has in transformers' cache here
    seen, models = [], [random_model("llama", max_position_embeddings=512) for _ in range(2)]
    models[0].register_forward_hook(lambda model, given, out: seen.append(out.past_key_values.get_seq_length()))
    models[1].config.sliding_window = 300
    assert [engine(model, max_completion_length=400).decoder for model in models] == ["loop", "generate"]
    assert max(seen) < 200
    model = random_model().to(torch.bfloat16).train()  # with rounded rotary frequencies, which are not saved
    tensors = {**model.state_dict(keep_vars=True), **dict(model.named_buffers())}
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in tensors.items()}
    assert agreement.loop_differs(model, Prompts(ROWS, tokenizer()), 0, 8) is None
    assert all(t.data_ptr() == before[name][0] and t.equal(before[name][1]) for name, t in tensors.items())
    assert all(module.training for module in model.modules())


def test_a_model_that_reads_padding_is_refused_where_there_is_some():
    model = random_model("rwkv", attention_hidden_size=32, context_length=64)
    for call, asked in ((engine, [model]), (engine(model, ROWS[2:3]).add_prompts, ["more", ROWS])):
        with pytest.raises(ValueError, match="'rwkv'.*one length"):
            call(*asked)


# ---- decoding


@pytest.mark.parametrize("decoder", ["loop", "generate"])
def test_end_tokens_of_model_and_tokenizer_end_a_completion(decoder):
    model, seen = random_model(), []
    free = [ids for _, ids in engine(model).generate("train")[0]]
    assert all(len(ids) == 8 for ids in free)  # no end token by chance: the next lines bring it in
    stop = {free[0][2], free[1][4]}
    model.generation_config.eos_token_id = sorted(stop)
    e = engine(model, decoder=decoder, rewards=lambda completion_ids, **_: seen.extend(completion_ids) or [0.0] * 8)
    assert e.eos_ids == sorted(stop | {tokenizer().eos_token_id})
    # a perturbation that is far too small to change a token
    (evaluation,) = e.evaluate(members(1), 1e-9, "train", ALL)
    ended = [bool(stop & set(ids)) for ids in free]
    assert any(ended) and not all(ended) and evaluation.clipped.tolist() == [not end for end in ended]
    assert evaluation.lengths.tolist() == [len(ids) for ids in seen]
    for (text, ids), full, given in zip(e.generate("train")[0], free, seen, strict=True):
        end = next((i + 1 for i, token in enumerate(full) if token in stop), 8)
        assert ids == given == full[:end] and text == tokenizer().decode(ids, skip_special_tokens=True)
    # an end token in the last place is an end all the same
    (last,) = engine(model, rewards=token_sum, max_completion_length=3).evaluate(members(1), 1e-9, "train", ALL[:1])
    assert last.lengths.tolist() == [3] and last.clipped.tolist() == [False]


def test_a_models_own_generation_settings_change_nothing():
    model = random_model()
    plain = engine(model, decoder="generate").generate("train", samples=1, seed=1)
    own = {"suppress_tokens": plain[0][0][1][:2], "repetition_penalty": 3.0, "min_new_tokens": 4}
    own |= {"no_repeat_ngram_size": 1, "top_k": 1, "eos_token_id": tokenizer().eos_token_id}
    model.generation_config = own = GenerationConfig(**own)
    assert engine(model, decoder="generate").generate("train", samples=1, seed=1) == plain
    assert model.generation_config is own


@pytest.mark.parametrize("decoder", ["loop", "generate"])
def test_samples_depend_on_seed_draw_row_and_temperature_only(decoder):
    e = engine(chunk_rows=3, decoder=decoder, max_completion_length=4)
    first, (greedy,) = e.generate("train", samples=3, seed=1), e.generate("train")
    assert first == e.generate("train", samples=3, seed=1, temperature=1.0)
    assert first[:2] == e.generate("train", samples=2, seed=1)
    two = engine(workers=2, decoder=decoder, max_completion_length=4)  # processes
    assert first == two.generate("train", samples=3, seed=1)
    assert len({str(draw) for draw in first}) == 3 and first != e.generate("train", samples=3, seed=2)
    rows = np.array([5, 0])
    assert e.generate("train", rows, samples=3, seed=1) == [[draw[5], draw[0]] for draw in first]
    assert [len(draw) for draw in e.generate("train", np.array([], int), samples=2)] == [0, 0]
    assert e.generate("train", samples=3, seed=1, temperature=1e-6) == [greedy] * 3 != first
    assert e.generate("train", samples=3, seed=1, temperature=0.7) != first
    assert e.generate("train", temperature=0.7) == [greedy]


# ---- the batch plan


def test_the_plan_names_what_results_depend_on():
    loop = {"decoder": "loop", "chunk_rows": 5, "width": 17, "prefix": 0, "products": "float32", "drop_rows": True}
    assert engine(chunk_rows=5).plan == loop  # five rows are never dropped
    assert engine(chunk_rows=5, decoder="generate").plan == {"decoder": "generate", "chunk_rows": 5, "width": 17}


def test_where_few_rows_are_computed_otherwise_batches_stay_full(monkeypatch):
    """A CPU whose products of fewer than 16 rows end in other bits, played by one that adds a bit to them."""
    multiply = decode._multiply

    def inexact(x, matrix, bias=None):
        product = multiply(x, matrix, bias)
        return product if len(x) >= 16 else torch.nextafter(product, torch.tensor(9.0))

    rows, model = [{"prompt": p} for p in PROMPTS * 3], random_model()
    model.generation_config.eos_token_id = list(range(0, 273, 9))
    expected = engine(model, rows).generate("train")
    monkeypatch.setattr(decode, "_multiply", inexact)
    e = engine(model, rows)
    assert e.plan["drop_rows"] is False
    assert e.generate("train") == expected
    assert engine(model, rows, chunk_rows=8).plan["drop_rows"] is True  # no smaller batch can come


# ---- worker processes


def test_a_worker_uses_one_thread_and_ignores_interrupts():
    e = engine(workers=2, rewards=lambda completions, **kw: [torch.get_num_threads()] * len(completions))
    e.add_prompts("more", [{"prompt": "z"}])
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert (evaluate(e, 2) == 1).all() and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    for process in e._pool._processes.values():  # Ctrl-C reaches them, too, and the trainer handles it
        os.kill(process.pid, signal.SIGINT)
    assert (evaluate(e, 2) == 1).all() and len(e.generate("more")[0]) == 1


def test_a_failed_reward_names_member_and_prompt():
    def fails(prompts, completions, **columns):
        raise ZeroDivisionError("no")

    for e in (engine(rewards=fails), engine(workers=2, rewards=fails)):
        with pytest.raises(RewardError, match=r"member \d: reward function 'fails' gave ZeroDivisionError.*prompt 'a'"):
            evaluate(e)


def test_a_killed_worker_is_an_error_with_a_remedy_and_not_the_end():
    e = engine(workers=2, rewards=token_sum)
    evaluate(e, 2)
    victim = next(iter(e._pool._processes.values()))
    victim.kill()
    victim.join()
    with pytest.raises(RuntimeError, match="resume_from_checkpoint=True"):
        for _ in range(20):
            evaluate(e, 4)
    # new workers take over
    assert (evaluate(e, 3) == evaluate(engine(rewards=token_sum), 3)).all()


@pytest.mark.parametrize("kind", ["executor", "event loop"])
def test_executors_and_event_loops_that_were_used_before_work_in_workers(kind):
    loop, pool = asyncio.new_event_loop(), ThreadPoolExecutor(1)

    async def lengths(completions):
        return [float(await loop.run_in_executor(pool, len, c)) for c in completions]

    def judge(completions, **columns):
        return pool.map(len, completions) if kind == "executor" else loop.run_until_complete(lengths(completions))

    alone = evaluate(engine(rewards=judge), 9)  # in this process
    assert (evaluate(engine(workers=2, rewards=judge), 9) == alone).all()
    loop.close()
    pool.shutdown()


def test_workers_have_no_connection_of_this_process():
    """Their requests would be mixed with others'; clients open another one in place of one that is at its end."""

    def judge(completions, **columns):
        client.sendall(b".")
        return [0.0] * len(completions)

    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        evaluate(engine(rewards=judge), 1)
        with pytest.raises(RewardError, match="BrokenPipeError"):
            evaluate(engine(workers=2, rewards=judge), 2)
        evaluate(engine(rewards=judge), 1)


def test_a_worker_that_waits_for_ever_is_named(monkeypatch):
    lock = threading.Lock()

    def judge(completions, **columns):
        with lock:  # nobody opens it in a worker, where the thread that holds it does not exist
            return [0.0] * len(completions)

    monkeypatch.setattr(_forks, "_LOOK", 0.05)
    with lock, pytest.raises(RuntimeError, match=r"\(judge\).*workers=1"):
        evaluate(engine(workers=2, rewards=judge))


class Bar(tqdm):
    """Has a lock of its own, as tqdm.auto where transformers has shown a bar before any other was shown."""

    _lock = TqdmDefaultWriteLock()


@pytest.mark.parametrize("bar", [tqdm, Bar])
def test_a_worker_killed_inside_a_progress_bar_blocks_no_other(bar):
    """tqdm's lock is a semaphore that forked processes share, and dies with nobody."""

    def dies(completion_ids, **columns):
        with bar.get_lock():
            os.kill(os.getpid(), signal.SIGKILL)

    ours = bar.get_lock()
    with pytest.raises(RuntimeError, match="a worker process ended unexpectedly"):
        evaluate(engine(workers=2, rewards=dies), 2)
    assert bar.get_lock() is ours
    held = [lock for lock in ours.locks if not lock.acquire(timeout=5)]
    for lock in ours.locks:
        lock.release()
    assert not held


def all_gone(pids: list[int]) -> bool:
    """Whether processes have ended, after 20 seconds at most (one that init has yet to reap counts as ended)."""
    end, left = time.monotonic() + 20, pids
    while left and time.monotonic() < end:
        time.sleep(0.05)
        left = [p.pid for p in psutil.process_iter(["status"]) if p.pid in pids and p.info["status"] != "zombie"]
    return not left


def test_workers_end_with_a_parent_that_is_killed():
    heard, said = os.pipe()

    def parent():
        e = engine(workers=2, rewards=token_sum)
        evaluate(e, 2)
        os.write(said, " ".join(map(str, e._pool._processes)).encode())
        time.sleep(60)

    pid = fork(parent)
    pids = [int(number) for number in os.read(heard, 100).split()]
    assert len(pids) == 2 and all(os.path.exists(f"/proc/{worker}") for worker in pids)
    os.kill(pid, signal.SIGKILL)
    assert wait(pid) == -signal.SIGKILL and all_gone(pids)


def test_an_engine_that_nobody_uses_ends_with_its_workers():
    e = engine(workers=2, rewards=token_sum)
    evaluate(e, 2)
    pids, reference = list(e._pool._processes), weakref.ref(e)
    del e
    gc.collect()
    assert reference() is None and all_gone(pids)
