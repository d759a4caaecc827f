"""The tiny world: a tokenizer that loses nothing, text of known grades, disjoint splits, a recipe that learns."""

import hashlib
import itertools
import math
import random
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from helpers import tokenizer
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from evoalign_lib import tiny
from evoalign_lib.engines.local import LocalEngine, Prompts
from evoalign_lib.tasks import countdown
from evoalign_lib.tasks.countdown import Problem, grade
from evoalign_lib.tiny import _recipe
from evoalign_lib.tiny import countdown as countdown_text

PHRASES = [
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    "<|im_start|>user\n",
    "<|im_end|>",
    ", ",
    "Add: ",
    "Using the",
]
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


def test_prompts_are_the_real_ones_in_a_dozen_tokens():
    tok = tokenizer()
    problem = Problem((44, 19, 35), "98")
    text = countdown.prompt(problem, tokenizer=tok)
    ids = tok(text, add_special_tokens=False)["input_ids"]
    assert tok.decode(ids) == text
    # head, 44, ", ", 19, ", ", 35, middle, 98, tail: fixed stretches are one token each, digits one each
    assert len(ids) == 13
    user = countdown.USER_TEMPLATE.format(numbers="[44, 19, 35]", target="98")
    assert text == (
        f"<|im_start|>system\n{countdown.SYSTEM_MESSAGE}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n"
        f"<|im_start|>assistant\n{countdown.RESPONSE_PREFIX}"
    )
    assert countdown.dataset([problem], tok)[0]["prompt"] == text


def test_tags_and_end_are_single_tokens():
    tok = tokenizer()
    for tag in ("<think>", "</think>", "<answer>", "</answer>", tiny.END):
        assert len(tok(tag)["input_ids"]) == 1
    assert tok("x" + tiny.END)["input_ids"][-1] == tok.eos_token_id != tok.pad_token_id
    # the tags are text that a grader must see; the end token is not
    assert (
        tok.decode(tok("<answer>1</answer>" + tiny.END)["input_ids"], skip_special_tokens=True) == "<answer>1</answer>"
    )


def test_the_tokenizer_is_the_same_when_saved_and_loaded(tmp_path):
    tokenizer().save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    problem = Problem((1, 2, 30), "99")
    assert countdown.prompt(problem, tokenizer=loaded) == countdown.prompt(problem, tokenizer=tokenizer())
    for text in (countdown.prompt(problem, tokenizer=loaded), "</think>\n<answer>é</answer><|im_end|>", "a, b,c"):
        assert loaded(text)["input_ids"] == tokenizer()(text)["input_ids"]
    assert (loaded.padding_side, loaded.eos_token, loaded.pad_token) == ("left", tiny.END, "<|endoftext|>")


# ---- expressions and answers


@given(st.lists(st.integers(0, 12), min_size=2, max_size=3))
def test_expressions_are_all_attainable_values(numbers):
    found = tiny.expressions(tuple(sorted(numbers)))
    assert set(found) == set(countdown.attainable(numbers))
    assert tiny.expressions((2, 3))[Fraction(6)] == ("2*3", "3*2")  # no bracket that could be left out
    for value, texts in found.items():
        assert len(set(texts)) == len(texts)
        for text in texts:
            assert grade(f"<answer>{text}</answer>", numbers, value).answer == 1


# author -> rewards of their answers, and the share of right ones at most
GRADES = {
    "right": ({1.1}, 1.0),
    "adds up": ({0.1, 1.1}, 0.4),  # the sum may be the target
    "careless": ({0.1, 1.1}, 0.1),
    "wrong numbers": ({0.1, 1.1}, 0.03),  # the other number may be the same by chance
    "broken format": ({0.01, 0.1}, 0.0),
}


@pytest.mark.parametrize("author", tiny.AUTHORS)
def test_grades_of_each_author(author):
    rng = random.Random(0)
    grades, at_most = GRADES[author]
    seen = []
    for problem in tiny.problems("train", 300, 0):
        response = tiny.answer(problem, author, rng)
        assert response.endswith(tiny.END)
        assert author != "right" or len(tokenizer()(response)["input_ids"]) <= tiny.MAX_COMPLETION_LENGTH
        seen.append(round(grade(response, problem.numbers, problem.target, end_token=tiny.END).reward, 6))
        if author == "adds up":
            assert (seen[-1] == 1.1) == (sum(problem.numbers) == int(problem.target))
    assert set(seen) <= grades and min(grades) in seen
    assert np.mean([reward > 1 for reward in seen]) <= at_most


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
    with pytest.raises(ValueError, match="n=2001, count=3: the fixed sets hold 2000 problems"):
        tiny.problems("test", 2001)
    for problem in test[:50] + train[:50]:
        assert all(1 <= n <= 30 for n in problem.numbers) and 1 <= int(problem.target) <= 99
        assert countdown.solve(problem.numbers, problem.target) is not None


@pytest.mark.parametrize(("family", "digest"), [("A", "fc749b84305bbfa6"), ("H", "b7c1876722056403")])
def test_the_text_of_a_family_is_what_the_shipped_bases_read(family, digest):
    """Python's generator and the draw of problems are fixed; no further family may change these."""
    pairs = list(itertools.islice(tiny.text(0, tokenizer(), family), 200))
    assert hashlib.sha256(repr(pairs).encode()).hexdigest()[:16] == digest
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


@pytest.fixture(scope="module")
def recipes(tmp_path_factory):
    """Folders of two scaled-down recipes, of seeds 0 and 1; the second learns nothing."""
    folders = [tmp_path_factory.mktemp(f"base-{seed}") for seed in (0, 1)]
    for seed, folder in enumerate(folders):
        assert tiny.recipe("A", seed, folder, steps=30 if seed == 0 else 1, batch=32, progress=False) is None
    return folders


def test_the_recipe_learns_and_is_reproducible(recipes, tmp_path):
    torch.manual_seed(123)  # the state of the caller's generator is neither used nor changed
    state = torch.random.get_rng_state()
    tiny.recipe("A", 0, tmp_path, steps=30, batch=32, progress=False)
    assert (torch.random.get_rng_state() == state).all()
    same, other = recipes
    # an untrained model knows nothing: log(273) nats a token
    assert loss(AutoModelForCausalLM.from_pretrained(same)) < 0.85 * math.log(273)
    assert (tmp_path / "model.safetensors").read_bytes() == (same / "model.safetensors").read_bytes()
    assert (tmp_path / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_the_recipe_gives_a_base_that_loads_and_decodes(recipes):
    folder = recipes[0]
    model, tok = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert 100_000 < sum(p.numel() for p in model.parameters()) < 300_000 and model.dtype == torch.float32
    assert model.generation_config.eos_token_id == tok.eos_token_id
    chosen = tiny.problems("validation", 6)
    prompts = {"validation": Prompts(countdown.dataset(chosen, tok), tok)}
    engine = LocalEngine(model.eval(), tok, None, prompts, max_completion_length=tiny.MAX_COMPLETION_LENGTH)
    assert engine.decoder == "loop" and engine.eos_ids == [tok.eos_token_id]
    assert set(tiny.measure(engine, chosen, "validation", samples=2)) == {"greedy", "format", "pass@1"}


def test_family_h_goes_on_from_family_a(tmp_path):
    tiny.recipe("H", 0, tmp_path / "start", steps=0, progress=False)
    start = (tmp_path / "start/model.safetensors").read_bytes()
    assert start == (tiny.bases_folder() / "A0/model.safetensors").read_bytes()
    for call, named in (
        (lambda: tiny.recipe("H", 3, tmp_path), "'A3'"),
        (lambda: tiny.recipe("Z", 0, tmp_path), "'Z'"),
        (lambda: tiny.load("A9"), "'A9'"),
        (lambda: tiny.answer(Problem((1, 2), "3"), "lazy", random.Random(0)), "'lazy'"),
    ):
        with pytest.raises(ValueError, match=named):
            call()


def test_texts_of_one_length_of_thinking_make_a_part():
    """The parts are the step's texts, each once; padding is what family A has, not the longest thinking."""
    pairs = list(itertools.islice(tiny.text(3, tokenizer(), "H"), 100))
    parts = _recipe._parts(pairs, "H")
    assert sorted(pair for part in parts for pair in part) == sorted(pairs)
    assert len(parts) == 1 + len(tiny.FILLER_STEPS)
    for part in parts:
        ids, _ = _recipe._batch(part, tokenizer())
        shortest = min(len(tokenizer()(p + c)["input_ids"]) for p, c in part)
        assert ids.shape[1] - shortest < 20
    assert _recipe._parts(iter(pairs), "A") == [pairs]


def test_measure_estimates_pass_at_k():
    """Hand-computed: of 16 samples of each of two problems, 1 and 0 are right."""

    class Fixed:
        def generate(self, name, samples=0, seed=0):
            right, wrong = ("</think>\n<answer>1+2</answer>", [1]), ("</think>\n<answer>1*2</answer>", [1])
            return [[right, wrong]] if not samples else [[right if i == 0 else wrong, wrong] for i in range(16)]

    result = tiny.measure(Fixed(), [Problem((1, 2), "3")] * 2, "validation", samples=16)
    assert result == {"greedy": 0.5, "format": 1.0, "pass@1": 0.03125, "pass@16": 0.5}


@pytest.mark.skipif(not (tiny.bases_folder() / "A0").is_dir(), reason="the bases have not been trained yet")
@pytest.mark.parametrize("base", tiny.BASES)
def test_the_shipped_bases(base):
    model, tok = tiny.load(base)
    problem = tiny.problems("test", 1)[0]
    prompt = countdown.prompt(problem, tokenizer=tok)
    assert tok(prompt)["input_ids"] == tokenizer()(prompt)["input_ids"]
    prompts = {"test": Prompts(countdown.dataset(tiny.problems("test", 200), tok), tok)}
    engine = LocalEngine(model, tok, None, prompts, max_completion_length=tiny.MAX_COMPLETION_LENGTH)
    completions = engine.generate("test")[0]
    # it keeps the format nearly always and is right sometimes: room at both ends
    grades = [grade(t, p.numbers, p.target) for (t, _), p in zip(completions, tiny.problems("test", 200), strict=True)]
    assert np.mean([g.format for g in grades]) > 0.7
    assert 0.02 < np.mean([g.answer for g in grades]) < 0.7


def test_every_base_that_is_shipped_is_named_and_no_other():
    assert sorted(path.name for path in tiny.bases_folder().iterdir()) == sorted(tiny.SHIPPED)
    weights = sum((tiny.bases_folder() / base / "model.safetensors").stat().st_size for base in tiny.SHIPPED)
    assert weights < 4_000_000  # of the repository's 6 million, which the scorers share


# accuracy on the validation set, measured by the recipe: greedy, and at temperature 1 over 64 samples (LOG.md)
MEASURED = {4: (0.14453, 0.12787), 16: (0.14453, 0.12402), 64: (0.14648, 0.12405)}


@pytest.mark.parametrize("steps", [4, 16, pytest.param(64, marks=pytest.mark.slow)])
def test_the_base_of_family_h_differs_by_the_horizon_alone(steps):
    model, tok = tiny.load("H0")
    chosen = tiny.problems("validation", 512)
    prompts = {"validation": Prompts(tiny.dataset(chosen, tok, steps), tok)}
    engine = LocalEngine(model, tok, None, prompts, max_completion_length=tiny.MAX_COMPLETION_LENGTH + steps)
    for samples, accuracy in enumerate(MEASURED[steps]):
        (completions,) = engine.generate("validation", samples=samples)
        assert np.mean([ids[-1] == tok.eos_token_id for _, ids in completions]) > 0.99
        assert np.mean([text.find("</think>") == steps for text, _ in completions]) > 0.99
        right = [grade(text, p.numbers, p.target).answer for (text, _), p in zip(completions, chosen, strict=True)]
        # near-ties may go another way on another CPU; one sample of 512 problems has a standard deviation of 1.5 points
        assert np.mean(right) == pytest.approx(accuracy, abs=0.05 if samples else 0.01)
    # sampled thinking is as random as the text it was learned from: log2(10) = 3.32 bits a step
    letters = "".join(text[:steps] for text, _ in completions)
    shares = np.array([letters.count(c) / len(letters) for c in tiny.FILLERS])
    assert -(shares * np.log2(shares)).sum() > 3.3
