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


@given(UNICODE)
def test_a_text_costs_at_most_its_bytes(text):
    assert len(tokenizer()(text)["input_ids"]) <= len(text.encode())


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
    for value, texts in found.items():
        assert len(set(texts)) == len(texts)
        for text in texts:
            assert grade(f"<answer>{text}</answer>", numbers, value).answer == 1
            if "(" in text:  # no bracket that could be left out
                bare = grade(f"<answer>{re.sub('[()]', '', text)}</answer>", numbers, value)
                assert bare.answer == 0 or _differs_in_general(text, numbers)


def _differs_in_general(text: str, numbers: list[int]) -> bool:
    """Whether leaving the bracket out changes the value for some other numbers, as in 0*(1+0)."""
    for other in itertools.permutations((7, 11, 13), len(numbers)):
        renamed = re.sub("[0-9]+", "{}", text).format(*other)
        values = [
            value
            for bracketed in (renamed, re.sub("[()]", "", renamed))
            for value, texts in countdown.attainable(other).items()
            if grade(f"<answer>{bracketed}</answer>", other, value).answer
        ]
        if values[0] != values[1]:
            return True
    return False


def test_all_two_number_expressions():
    assert tiny.expressions((2, 3)) == {
        Fraction(5): ("2+3", "3+2"),
        Fraction(-1): ("2-3",),
        Fraction(1): ("3-2",),
        Fraction(6): ("2*3", "3*2"),
        Fraction(2, 3): ("2/3",),
        Fraction(3, 2): ("3/2",),
    }


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
        seen.append(round(grade(response, problem.numbers, problem.target, end_token=tiny.END).reward, 6))
        if author == "adds up":
            assert (seen[-1] == 1.1) == (sum(problem.numbers) == int(problem.target))
    assert set(seen) <= grades and min(grades) in seen
    assert np.mean([reward > 1 for reward in seen]) <= at_most


def test_an_unknown_author():
    with pytest.raises(ValueError, match="author 'lazy' is not one of"):
        tiny.answer(Problem((1, 2), "3"), "lazy", random.Random(0))


def test_every_right_answer_fits_the_completion_length():
    rng = random.Random(0)
    longest = 0
    for problem in tiny.problems("test", 300):
        longest = max(longest, len(tokenizer()(tiny.answer(problem, "right", rng))["input_ids"]))
    assert 12 <= longest <= tiny.MAX_COMPLETION_LENGTH
    assert len(tokenizer()("</think>\n<answer>(30-29)*28</answer>" + tiny.END)["input_ids"]) == 15


def test_skills_are_answered_rightly():
    rng = random.Random(0)
    names = set()
    for _ in range(400):
        question, reply = tiny.skill(rng)
        name, text = question.split(": ")
        names.add(name)
        expected = {
            "Add": lambda t: str(sum(map(int, t.split("+")))),
            "Copy": lambda t: t,
            "Sort": lambda t: "".join(sorted(t)),
            "Reverse": lambda t: t[::-1],
        }[name](text)
        assert reply == expected
    assert len(names) == 4


# ---- problems and text


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


def test_the_text_is_of_training_problems_and_of_the_declared_mixture():
    pairs = list(itertools.islice(tiny.text(3, tokenizer()), 1000))
    head = countdown.prompt(Problem((1, 2), "3"), tokenizer=tokenizer()).split("1, 2")[0]
    asked = [(p, c) for p, c in pairs if p.startswith(head)]
    pattern = re.compile(r"numbers \[([0-9, ]+)\], create an equation that equals ([0-9]+)\. You")
    two, right = 0, 0
    for prompt, completion in asked:
        numbers, target = pattern.search(prompt).groups()
        problem = Problem(tuple(int(n) for n in numbers.split(", ")), target)
        assert prompt == countdown.prompt(problem, tokenizer=tokenizer())
        assert countdown.split_of(problem) == "train"
        two += len(problem.numbers) == 2
        right += grade(completion, problem.numbers, target, end_token=tiny.END).answer
    # four standard deviations of shares of 1,000 draws
    assert 1 - len(asked) / 1000 == pytest.approx(countdown_text.SKILLS, abs=0.04)
    assert two / len(asked) == pytest.approx(countdown_text.TWO_NUMBERS, abs=0.05)
    assert tiny.AUTHORS["right"] - 0.06 < right / len(asked) < tiny.AUTHORS["right"] + 0.2
    assert all(c.endswith(tiny.END) for _, c in pairs)
    assert pairs[:20] != list(itertools.islice(tiny.text(4, tokenizer()), 20))


def test_the_text_of_family_a_is_what_the_shipped_bases_read():
    """Python's generator and the draw of problems are fixed; no further family may change this one."""
    pairs = list(itertools.islice(tiny.text(0, tokenizer()), 200))
    assert hashlib.sha256(repr(pairs).encode()).hexdigest()[:16] == "fc749b84305bbfa6"


def thinking(completion: str) -> str:
    return completion[: completion.index("</think>")]


def test_family_h_thinks_as_long_as_asked_and_answers_like_family_a():
    tok, counts = tokenizer(), dict.fromkeys(tiny.FILLER_STEPS, 0)
    letters, right, skills = [], 0, 0
    for prompt, completion in itertools.islice(tiny.text(3, tok, "H"), 1500):
        if "<think>" not in prompt:
            skills += 1
            continue
        numbers, target, asked = re.search(r"\[(.*)\], .* equals ([0-9]+)\. .*<think>([0-9]+):$", prompt, re.S).groups()
        problem = Problem(tuple(int(n) for n in numbers.split(", ")), target)
        assert prompt == tiny.dataset([problem], tok, int(asked))[0]["prompt"]
        assert countdown.split_of(problem) == "train"
        thought = thinking(completion)
        assert len(thought) == int(asked) == len(tok(thought)["input_ids"])
        counts[len(thought)] += 1
        letters += thought
        # the block that the prompt opened is closed: what precedes the closing tag is in no grade
        both = completion, completion[len(thought) :]
        grades = [grade(text, problem.numbers, target, end_token=tiny.END) for text in both]
        assert grades[0] == grades[1]
        right += grades[0].answer
    total = sum(counts.values())
    # four standard deviations: of shares of 1,500 draws, and of a tenth of some 37,000 letters
    assert skills / 1500 == pytest.approx(countdown_text.SKILLS, abs=0.04)
    assert all(n / total == pytest.approx(1 / len(counts), abs=0.05) for n in counts.values())
    assert tiny.AUTHORS["right"] - 0.06 < right / total < tiny.AUTHORS["right"] + 0.2
    assert set(letters) == set(tiny.FILLERS) and len(letters) > 30_000
    for letter in tiny.FILLERS:
        assert letters.count(letter) / len(letters) == pytest.approx(0.1, abs=4 * 0.3 / math.sqrt(len(letters)))
    # whatever went before: pairs of neighbours are as frequent as chance makes them
    repeated = np.mean([a == b for a, b in itertools.pairwise(letters)])
    assert repeated == pytest.approx(0.1, abs=4 * 0.3 / math.sqrt(len(letters)))


def test_the_prompt_asks_for_a_length_of_thinking():
    tok, problem = tokenizer(), Problem((44, 19, 35), "98")
    (plain,) = tiny.dataset([problem], tok)
    (asked,) = tiny.dataset([problem], tok, 16)
    assert [plain] == countdown.dataset([problem], tok)
    assert asked == plain | {"prompt": plain["prompt"] + "16:"} and asked["prompt"].endswith("\n<think>16:")
    assert tok(asked["prompt"])["input_ids"] == tok(plain["prompt"])["input_ids"] + tok("16:")["input_ids"]


def test_the_authors_share_out_the_whole():
    assert (
        math.isclose(sum(tiny.AUTHORS.values()), 1)
        and 0 < countdown_text.SKILLS < 1
        and 0 < countdown_text.TWO_NUMBERS < 1
    )


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
    """Folders of two scaled-down recipes, of seeds 0 and 1."""
    folders = [tmp_path_factory.mktemp(f"base-{seed}") for seed in (0, 1)]
    for seed, folder in enumerate(folders):
        assert tiny.recipe("A", seed, folder, steps=30, batch=32, progress=False) is None
    return folders


def test_the_recipe_lowers_the_loss(recipes):
    # an untrained model knows nothing: log(273) nats a token
    assert loss(AutoModelForCausalLM.from_pretrained(recipes[0])) < 0.85 * math.log(273)


def test_the_recipe_is_reproducible(recipes, tmp_path):
    torch.manual_seed(123)  # the state of the caller's generator is neither used nor changed
    state = torch.random.get_rng_state()
    tiny.recipe("A", 0, tmp_path, steps=30, batch=32, progress=False)
    assert (torch.random.get_rng_state() == state).all()
    same, other = recipes
    assert (tmp_path / "model.safetensors").read_bytes() == (same / "model.safetensors").read_bytes()
    assert (tmp_path / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_bases_start_from_weights_of_their_own(tmp_path):
    for seed in (0, 1):
        tiny.recipe("A", seed, tmp_path / str(seed), steps=0, progress=False)
    one, other = ((tmp_path / seed / "model.safetensors").read_bytes() for seed in "01")
    assert one != other


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
    torch.manual_seed(123)
    state = torch.random.get_rng_state()
    for name in ("one", "same"):
        tiny.recipe("H", 0, tmp_path / name, steps=2, batch=12, progress=False)
    assert (torch.random.get_rng_state() == state).all()
    tiny.recipe("H", 0, tmp_path / "start", steps=0, progress=False)
    one, same, start = ((tmp_path / n / "model.safetensors").read_bytes() for n in ("one", "same", "start"))
    assert one == same != start
    assert start == (tiny.bases_folder() / "A0/model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="base 'A3' is not one of"):
        tiny.recipe("H", 3, tmp_path)


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


def test_unknown_family_and_base(tmp_path):
    with pytest.raises(ValueError, match="family 'Z' is not one of"):
        tiny.recipe("Z", 0, tmp_path)
    with pytest.raises(ValueError, match="base 'A9' is not one of"):
        tiny.load("A9")


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


@pytest.mark.parametrize("steps", tiny.FILLER_STEPS)
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
