"""The tiny world: a tokenizer that loses nothing, text of known grades, disjoint splits, a recipe that learns."""

import hashlib
import itertools
import math
import random
import re

import numpy as np
import pytest
import torch
from helpers import refused, tokenizer
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from evoalign_lib import tiny
from evoalign_lib.engines.local import LocalEngine, Prompts
from evoalign_lib.tasks import countdown
from evoalign_lib.tasks.countdown import Problem, grade
from evoalign_lib.tiny import _recipe, dialogues, questions, scorers
from evoalign_lib.tiny import countdown as countdown_text

PHRASES = [*"<think> </think> <answer> </answer> <|im_end|> Using the".split(), "<|im_start|>user\n", ", ", "Add: "]
UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


# ---- tokenizer


@given(st.lists(st.one_of(UNICODE, st.sampled_from(PHRASES)), max_size=6).map("".join))
def test_any_text_survives_the_tokenizer(text):
    tok = tokenizer()
    ids = tok(text, add_special_tokens=False)["input_ids"]
    assert tok.decode(ids, clean_up_tokenization_spaces=False) == text
    assert all(0 <= i < len(tok) for i in ids)
    # what the engine uses to decode many completions at once
    assert tok.backend_tokenizer.decode_batch([ids], skip_special_tokens=False) == [text]


def test_prompts_are_the_real_ones_in_a_dozen_tokens_whether_saved_or_not(tmp_path):
    tokenizer().save_pretrained(tmp_path)
    user = countdown.USER_TEMPLATE.format(numbers="[44, 19, 35]", target="98")
    expected = (
        f"<|im_start|>system\n{countdown.SYSTEM_MESSAGE}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n"
        f"<|im_start|>assistant\n{countdown.RESPONSE_PREFIX}"
    )
    for tok in (tokenizer(), AutoTokenizer.from_pretrained(tmp_path)):
        (row,) = countdown.dataset([Problem((44, 19, 35), "98")], tok)
        ids = tok(row["prompt"], add_special_tokens=False)["input_ids"]
        # head, 44, ", ", 19, ", ", 35, middle, 98, tail: fixed stretches are one token each, digits one each
        assert row["prompt"] == tok.decode(ids) == expected and len(ids) == 13
        assert {len(tok(tag)["input_ids"]) for tag in PHRASES[:5]} == {1}
        assert tok("x" + tiny.END)["input_ids"][-1] == tok.eos_token_id != tok.pad_token_id
        # the tags are text that a grader must see; the end token is not
        answer = tok("<answer>é</answer>" + tiny.END)["input_ids"]
        assert tok.decode(answer, skip_special_tokens=True) == "<answer>é</answer>" and tok.padding_side == "left"


# ---- problems and text


@pytest.mark.slow
def test_the_file_of_the_fixed_sets_holds_their_draw():
    for split in ("validation", "test"):
        assert sorted(tiny.problems(split, tiny.FIXED), key=str) == sorted(countdown_text.drawn(split), key=str)
    assert tiny.problems("test", 100, 1) != tiny.problems("test", 100)


def test_splits_are_disjoint_fixed_and_solvable():
    validation, test = tiny.problems("validation", 512), tiny.problems("test", 2000)
    train = tiny.problems("train", 2000, 7)
    keys = [{countdown.problem_key(p) for p in part} for part in (train, validation, test)]
    assert [len(k) for k in keys[1:]] == [512, 2000]
    assert not keys[0] & keys[1] and not keys[0] & keys[2] and not keys[1] & keys[2]
    assert validation == tiny.problems("validation", 512)
    # fewer are a choice of the same ones, in their order
    assert keys[2] > {countdown.problem_key(p) for p in tiny.problems("test", 100)}
    for problem in test[:50] + train[:50]:
        assert all(1 <= n <= 30 for n in problem.numbers) and 1 <= int(problem.target) <= 99
        assert countdown.solve(problem.numbers, problem.target) is not None


TEXTS = {
    "A": (tiny.text, tokenizer, "fc749b84305bbfa6"),
    "H": (lambda seed, tok: tiny.text(seed, tok, "H"), tokenizer, "b7c1876722056403"),
    "B": (questions.text, questions.tokenizer, "4602da7052e458da"),
    "C": (dialogues.text, dialogues.tokenizer, "3927671641219130"),
}


@pytest.mark.parametrize("family", TEXTS)
def test_the_text_of_a_family_is_what_the_shipped_bases_read(family):
    """Python's generator, the draw of problems and what the families know are fixed: nothing may change these."""
    text, tokenizer_of, digest = TEXTS[family]
    pairs = list(itertools.islice(text(0, tokenizer_of()), 200 if family in "AH" else 4000))
    assert hashlib.sha256(repr(pairs).encode()).hexdigest()[:16] == digest
    assert tokenizer_of().get_vocab() == tiny.load(f"{family}0")[1].get_vocab()
    for prompt, completion in pairs[:50] if family == "H" else []:
        if asked := re.search(r"<think>([0-9]+):$", prompt):  # it thinks as long as it is asked to
            thought = completion[: completion.index("</think>")]
            assert len(thought) == int(asked[1]) == len(tokenizer()(thought)["input_ids"])


# ---- recipe


def loss(model) -> float:
    """Mean next-token loss on completions that no recipe here reads."""
    ids, labels = _recipe._batch(list(itertools.islice(tiny.text(99, tokenizer()), 64)), tokenizer())
    with torch.inference_mode():
        return float(model(input_ids=ids, labels=labels).loss)


def test_labels_are_the_completion_alone():
    tok = tokenizer()
    ids, labels = _recipe._batch([("ab", "cd<|im_end|>"), ("a", "b")], tok)
    assert ids.shape == labels.shape == (2, 5)
    assert labels[0].tolist() == [-100, -100, *tok("cd<|im_end|>")["input_ids"]]
    assert labels[1].tolist() == [-100, *tok("b")["input_ids"], -100, -100, -100]
    assert tok.decode(ids[1]) == "ab" + tok.pad_token * 3


def test_the_recipe_learns_and_is_reproducible(tmp_path):
    torch.manual_seed(123)  # the state of the caller's generator is neither used nor changed
    state = torch.random.get_rng_state()
    for name, seed, steps in (("first", 0, 30), ("same", 0, 30), ("other", 1, 1)):
        assert tiny.recipe("A", seed, tmp_path / name, steps=steps, batch=8, progress=False) is None
    assert (torch.random.get_rng_state() == state).all()
    first, same, other = ((tmp_path / n / "model.safetensors").read_bytes() for n in ("first", "same", "other"))
    assert first == same != other
    # an untrained model knows nothing: log(273) nats a token
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    assert loss(model) < 0.85 * math.log(273) and model.dtype == torch.float32
    assert model.generation_config.eos_token_id == tokenizer().eos_token_id


def test_bases_that_are_not_shipped_go_on_from_one_or_have_other_sizes_and_authors(tmp_path):
    for name, family, how in (
        ("H", "H", {}),
        ("A", "A", {"start": "A0"}),
        ("wide", "A", {"sizes": {"hidden_size": 8}}),
    ):
        tiny.recipe(family, 0, tmp_path / name, steps=0, progress=False, **how)
    starts = [(folder / "model.safetensors").read_bytes() for folder in (tmp_path / "H", tmp_path / "A")]
    assert starts == [(tiny.bases_folder() / "A0/model.safetensors").read_bytes()] * 2
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "wide").lm_head.weight.shape[1] == 8
    habit = dict.fromkeys(tiny.AUTHORS, 0.0) | {"divides": 0.5, "leaves out": 0.5}
    written = (answer for _, answer in itertools.islice(tiny.text(0, tokenizer(), "A", habit), 200))
    told = [answer for answer in written if "<answer>" in answer]
    assert len(told) > 100 and all(re.search(r"<answer>\d+(/\d+){1,2}</|>\d+([-+*]\d+)?</", answer) for answer in told)


test_what_is_refused = refused(
    (tiny.recipe, ("H", 3, "nowhere"), "'A3'"),
    (tiny.recipe, ("Z", 0, "nowhere"), "'Z'"),
    (tiny.recipe, ("A", -1, "nowhere"), "seed=-1"),
    (tiny.load, ("A9",), "'A9'"),
    (tiny.answer, (Problem((1, 2), "3"), "lazy", random.Random(0)), "'lazy'"),
    (tiny.problems, ("test", 2001), "2001"),
    (tiny.problems, ("validation", 5, 0, 2), "count=2"),
    (tiny.skill_set, ("sing", 1), "'sing'"),
    (tiny.skill_set, ("sort", 501), "501"),
    (dialogues.requests, ("tets",), "'tets'"),
    (dialogues.body, (dialogues.requests("test")[0], "rude", random.Random(0)), "'rude'"),
    (scorers.folder, ("lenght 1",), "'length 1'"),
    (questions.problems, ("eval",), "'eval'"),
    (questions.reply, ("sum", *questions._questions()["sum"][0], "poet", random.Random(0)), "'poet'"),
    call=lambda function, given: function(*given),
)


def test_measure_estimates_pass_at_k():
    """Hand-computed: of 16 samples of each of two problems, 1 and 0 are right."""

    class Fixed:
        def generate(self, name, samples=0, seed=0):
            right, wrong = ("</think>\n<answer>1+2</answer>", [1]), ("</think>\n<answer>1*2</answer>", [1])
            return [[right, wrong]] if not samples else [[right if i == 0 else wrong, wrong] for i in range(16)]

    result = tiny.measure(Fixed(), [Problem((1, 2), "3")] * 2, "validation", samples=16)
    assert result == {"greedy": 0.5, "format": 1.0, "pass@1": 0.03125, "pass@16": 0.5}


# base -> steps of thinking that its prompts ask for, and its accuracy on the validation set (LOG.md)
MEASURED = {"A0": (None, 0.14258), "A1": (None, 0.13867), "A2": (None, 0.13867), "H0": (4, 0.14453)}


@pytest.mark.parametrize("base", MEASURED)
def test_the_shipped_bases(base):
    """Each keeps the format nearly always and is right sometimes: room at both ends."""
    (model, tok), (steps, accuracy), chosen = tiny.load(base), MEASURED[base], tiny.problems("validation", 512)
    prompts = {"asked": Prompts(tiny.dataset(chosen, tok, steps), tok)}
    engine = LocalEngine(model, tok, None, prompts, max_completion_length=tiny.MAX_COMPLETION_LENGTH + (steps or 0))
    (completions,) = engine.generate("asked")
    grades = [grade(t, p.numbers, p.target) for (t, _), p in zip(completions, chosen, strict=True)]
    assert np.mean([g.format for g in grades]) > 0.7
    assert np.mean([g.answer for g in grades]) == pytest.approx(accuracy, abs=0.01)
    if steps:  # it thinks as long as it is asked to
        assert np.mean([text.find("</think>") == steps for text, _ in completions]) > 0.99


def test_every_base_that_is_shipped_is_named_and_no_other():
    assert sorted(path.name for path in tiny.bases_folder().iterdir()) == sorted(tiny.SHIPPED)


# ---- family B: its knowledge base, the authors of its replies, and its tokenizer


def test_the_splits_of_family_b_share_no_question_and_have_as_many_of_each_kind():
    sets = {split: questions.problems(split) for split in questions.SPLITS}
    assert {split: len(found) for split, found in sets.items()} == {"train": 200, "validation": 128, "test": 256}
    asked = [p.question for found in sets.values() for p in found]
    assert len(set(asked)) == len(asked)
    for found in sets.values():
        assert all("capital" in p.question for p in found[::4]) and all("+" in p.question for p in found[2::4])
        assert {p.answer for p in found[3::4]} == {"yes", "no"}
