"""The Countdown task: data, generator, solver, prompts and graders.

`_published_*` restate the published scorer with its regular expressions and Python's `eval`. They see only strings that
this file generates itself, without `**`, and check that the library, which never evaluates text, decides alike.
"""

import json
import re
import sys
import time
import warnings
from fractions import Fraction
from itertools import combinations_with_replacement, permutations

import numpy as np
import pytest
from helpers import refused
from hypothesis import example, given
from hypothesis import strategies as st

from evoalign_lib import tasks
from evoalign_lib.tasks import countdown
from evoalign_lib.tasks.countdown import Grade, Problem, generate, grade, problem_key, solve


@pytest.fixture(scope="module")
def rows(external_data):
    """The objects of the public file, the fields that the library does not read included."""
    path = tasks.public_file("countdown.json", countdown.PUBLIC_PATH, countdown.PUBLIC_SHA256)
    return json.loads(path.read_text(encoding="utf-8"))


def _answer(text, numbers, target, grader="strict"):
    return grade(f"<answer>{text}</answer>", numbers, target, grader).answer


def _refused(call, error, named, *values):
    return [(call, value, error, named) for value in values]


test_what_is_refused = refused(
    *_refused(tasks.get, ValueError, "'countdown'", "contdown"),
    *_refused(countdown.load_public, ValueError, "'validation'", "validation"),
    *_refused(lambda n: Problem(n, "3"), ValueError, "numbers", [1], (1, True), (1, -2), (), (1, "2")),
    *_refused(lambda t: Problem((1, 2), t), ValueError, "target", 3, "three", "1e999999999", "٣", "1/0"),
    *_refused(lambda n: generate(n, 0), ValueError, "n=-1", -1),
    *_refused(lambda n: generate(1, 0, count=n), ValueError, "count=[17]", 1, 7),
    *_refused(lambda n: generate(1, 0, low=n, high=8), ValueError, "low=(9|-1)", 9, -1),
    *_refused(lambda n: generate(1, 0, high=n, count=6), ValueError, "high=10000", 10**4),
    *_refused(lambda n: generate(1, 0, target_low=n, target_high=4), ValueError, "5 > 4", 5),
    *_refused(lambda n: generate(1, 0, split=n), ValueError, "'dev'", "dev"),
    *_refused(lambda n: generate(10, 0, high=5, target_low=n, target_high=n), ValueError, "only 0 of 10", 9999),
    *_refused(countdown.attainable, ValueError, "got [07]", [], [1] * 7),
    *_refused(countdown.prompt, ValueError, "tokenizer", Problem((1, 2), "3")),
    *_refused(lambda t: _answer("3", [3], t), ValueError, "target", "x", "1e9", float("nan"), None, [3], "9" * 40),
    *_refused(lambda n: countdown.reward("pp", "aa", n, "11"), ValueError, "numbers 1", [[1]]),
    *_refused(lambda g: countdown.reward("p", "a", [[1]], "1", grader=g), ValueError, "'lenient'", "lenient"),
    *_refused(lambda c: countdown.reward("p", [c], [[1]], "1"), TypeError, "completion", None, b"a", ["a"]),
    *_refused(lambda n: grade("", n, 98), TypeError, "numbers", ["44"], "44 19", [44.0], [True, 19], [None]),
    *_refused(lambda r: grade(r, [1], 1), TypeError, "NoneType", None),
    call=lambda function, value: function(value),
)


# ------------------------------------------------------------------------------------------------------- public data


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_public_problems_prompts_and_solutions(rows, every):
    """Of which one in so many is solved."""
    everything = countdown.load_public("all")
    assert [p.id for p in everything] == list(range(2200)) == [row["id"] for row in rows]
    assert countdown.load_public("train") == everything[:200] and countdown.load_public("test") == everything[200:]
    assert everything[0] == Problem((44, 19, 35), "98", 0)
    keys = [problem_key(p) for p in everything]
    assert not set(keys[:200]) & set(keys[200:])
    assert [countdown.prompt(p, chat_template=False) for p in everything] == [row["context"] for row in rows]
    found = {row["id"]: solve(row["numbers"], row["target"]) for row in rows[::every]}
    for row in rows[::every]:
        scores = [_answer(found[row["id"]], row["numbers"], row["target"], grader) for grader in countdown.GRADERS]
        assert scores == [found[row["id"]] is not None] * 2
    # all in the test part: the attainable ceiling of the published evaluation is 1986 of 2000
    known = [263, 281, 566, 640, 798, 800, 1085, 1178, 1340, 1444, 1560, 1574, 1847, 1984]
    assert [i for i, text in found.items() if text is None] == [i for i in known if i % every == 0]


@pytest.mark.skipif(sys.platform != "linux", reason="the cache folder follows XDG_CACHE_HOME on Linux only")
def test_without_folder_and_network_the_error_names_the_remedy(tmp_path, monkeypatch):
    for name in ("EVOALIGN_DATA", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    # a proxy that refuses every connection stands for a machine without a network
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(FileNotFoundError, match="EVOALIGN_DATA.* countdown.json"):
        countdown.load_public()


# ----------------------------------------------------------------------------------------------------------- generator


def test_the_generator_follows_its_seed():
    # a pinned draw: validation and test sets are made by seed, so they must not move
    pinned = [Problem((26, 31, 49), "54"), Problem((20, 43, 28), "5"), Problem((1, 7, 1), "6")]
    assert generate(3, 0) == generate(3, np.random.SeedSequence(0)) == pinned != generate(3, 1)


def test_generated_problems_are_solvable_distinct_and_in_range():
    problems = generate(500, 2, count=4, low=2, high=13, target_low=-5, target_high=30)
    assert len({problem_key(p) for p in problems}) == 500 and {len(p.numbers) for p in problems} == {4}
    drawn, targets = {n for p in problems for n in p.numbers}, {int(p.target) for p in problems}
    assert (min(drawn), max(drawn), min(targets), max(targets)) == (2, 13, -5, 30)
    assert all(_answer(solve(p.numbers, p.target), p.numbers, p.target) == 1 for p in problems)
    # all-zero numbers: most expressions divide by zero, and numpy's warnings are errors here
    assert {p.target for p in generate(20, 0, low=0, high=0, target_low=0, distinct=False)} == {"0"}
    assert all(0 < int(p.target) <= 99**6 for p in generate(50, 0, count=6, high=99, target_high=10**13))


def test_the_generator_reaches_every_solvable_problem_and_says_when_there_are_no_more():
    possible = {
        (numbers, str(value))
        for numbers in combinations_with_replacement(range(1, 6), 3)
        for value in countdown.attainable(numbers)
        if value.denominator == 1 and 1 <= value <= 100
    }
    assert {problem_key(p) for p in generate(len(possible), 0, high=5)} == possible
    with pytest.raises(ValueError, match=f"only {len(possible)} of {len(possible) + 1}"):
        generate(len(possible) + 1, 0, high=5)
    assert len(generate(3 * len(possible), 0, high=5, distinct=False)) == 3 * len(possible)


def test_splits_are_disjoint_have_their_shares_and_do_not_move():
    parts = [{problem_key(p) for p in generate(1000, i, split=s)} for i, s in enumerate(countdown.SPLITS)]
    assert len(set.union(*parts)) == sum(map(len, parts))
    shares = [countdown.split_of(p) for p in generate(20_000, 3)]
    # binomial standard deviation of a 5 % share of 20,000 is 31
    assert [shares.count(split) for split in ("test", "validation")] == pytest.approx([1000, 1000], abs=150)
    # the first eight bytes, little endian and modulo 20, of `printf '1,2,3=24' | b2sum -l 64` and so on
    splits = {"1": "train", "24": "test", "26": "validation", "38": "test", "46": "test", "60": "train"}
    for target, split in splits.items():  # whatever the order of the numbers
        assert {countdown.split_of(Problem(order, target)) for order in permutations((1, 2, 3))} == {split}


# -------------------------------------------------------------------------------------------------------------- solver


def _values(numbers):
    """Values of all expressions, by brute force."""
    if len(numbers) == 1:
        return set(numbers)
    found = set()
    for i, j in permutations(range(len(numbers)), 2):
        a, b = numbers[i], numbers[j]
        rest = [n for k, n in enumerate(numbers) if k not in (i, j)]
        for value in [a + b, a - b, a * b] + ([a / b] if b else []):
            found |= _values([*rest, value])
    return found


@pytest.mark.parametrize(
    "numbers", [(5,), (3, 8), (0, 4), (2, 2), (1, 2, 3), (0, 0, 7), (4, 4, 4), (13, 7, 29), (3, 3, 8, 8), (2, 5, 7, 11)]
)
def test_the_solver_agrees_with_brute_force(numbers):
    found = countdown.attainable(numbers)
    assert found.keys() == _values([*map(Fraction, numbers)])
    assert all(_answer(text, numbers, value) == 1 for value, text in found.items())
    assert all((solve(numbers, target) is not None) == (target in found) for target in range(-30, 31))
    assert numbers != (3, 3, 8, 8) or solve(numbers, 24) == "8 / (3 - (8 / 3))"  # the only way


# -------------------------------------------------------------------------------------------------------------- format


def _published_format(response):
    text = "<think>" + response
    if re.match(r"^<think>.*?</think>\n<answer>.*?</answer>$", text, re.DOTALL):
        return 1.0
    think, answer = (re.search(f"<{tag}>.*?</{tag}>", text, re.DOTALL) for tag in ("think", "answer"))
    return (0.1 if think else 0.0) + (0.5 if answer else 0.0)


_FRAGMENTS = ["<think>", "</think>", "<answer>", "</answer>", "</think>\n<answer>", *"\n<>/x\r", "<eos>"]


@given(st.lists(st.sampled_from(_FRAGMENTS), max_size=9).map("".join))
@example("<think></think>\n<answer></answer>\n")
@example("x</think>\n<answer>1</answer>\n\n")
@example("</think>\n<answer>")  # the middle must not overlap the end
def test_the_format_is_that_of_the_published_expressions(response):
    expected = _published_format(response)
    assert expected == grade(response, [1], 1).format == grade("<think>" + response, [1], 1).format


# -------------------------------------------------------------------------------------------------------------- answer


def _published_answer(response, numbers, target):
    """The published decision, for strings without `**`."""
    assert "**" not in response
    blocks = re.findall(r"<answer>(.*?)</answer>", response, re.DOTALL)
    if not blocks or not re.match(r"^[0-9+\-*/() ]+$", blocks[-1]):
        return 0.0
    if sorted(int(n) for n in re.findall(r"\d+", blocks[-1])) != sorted(numbers):
        return 0.0
    try:
        return float(abs(float(_python_value(blocks[-1])) - float(target)) < 1e-5)
    except Exception:
        return 0.0


def _python_value(text, **names):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SyntaxWarning: 'int' object is not callable; perhaps you missed a comma?
        return eval(text, {"__builtins__": None}, names)


def _exact_value(text):
    """Value under the strict rules; None where the text breaks them."""
    try:
        value = _python_value(re.sub(r"\d+", r"whole(\g<0>)", text.strip(" ")), whole=Fraction)
    except Exception:
        return None
    broken = "//" in text or re.search(r"(^|[-+*/(]) *\+", text) or not isinstance(value, Fraction)
    return None if broken else value


_BLANK = st.sampled_from(["", "", " "])
_EXPRESSION = st.recursive(
    st.sampled_from(["0", "00", "1", "2", "3", "7", "10", "02"]),
    lambda inner: (
        st.tuples(st.sampled_from(["-", "+", "--", "- +"]), _BLANK, inner).map("".join)
        | st.tuples(st.just("("), _BLANK, inner, _BLANK, st.just(")")).map("".join)
        | st.tuples(inner, _BLANK, st.sampled_from([*"+-*/+-*/", "//", "", "/ /"]), _BLANK, inner).map("".join)
    ),
    max_leaves=4,
)
_SYMBOLS = st.text("0123456789+-*/() ", max_size=12).filter(lambda text: "**" not in text)


@given(_EXPRESSION | _SYMBOLS, st.sampled_from(["", "\n", "\n\n"]), st.sampled_from([0, 0, 5e-6, -5e-6, 2e-5, 1]))
@example("()", "", 0)
@example("3(4)", "", 0)
@example("1 2", "", 0)
@example("7/ /2", "", 0)
@example("07 - 2", "", 0)
@example("+-+3", "", 0)
@example(" ", "\n", 0)
def test_answers_equal_the_references_on_safe_strings(text, ending, shift):
    numbers = [int(n) for n in re.findall(r"\d+", text)]
    try:
        goal = float(_python_value(text)) + shift
    except Exception:
        goal = 1.0
    response = f"<answer>{text}{ending}</answer>"
    assert grade(response, numbers, goal, "released").answer == _published_answer(response, numbers, goal)

    exact = _exact_value(text) if ending != "\n\n" else None
    target = exact if exact is not None else Fraction(1)
    assert grade(response, numbers, target).answer == (exact is not None)
    assert grade(response, numbers, target + Fraction(1, 10**6)).answer == 0
    # whatever strict accepts, released accepts
    assert grade(response, numbers, target).answer <= grade(response, numbers, target, "released").answer


@given(st.lists(st.sampled_from(["<answer>", "</answer>", "<answer>3</answer>", *"34+\n"]), max_size=9).map("".join))
@example("<answer>4<answer>3</answer>")  # the block starts at the first opening tag
@example("<answer>3</answer>4</answer>")
def test_the_last_answer_block_is_that_of_the_published_expression(response):
    for grader in countdown.GRADERS:
        assert grade(response, [3], 3, grader).answer == _published_answer(response, [3], 3)


_POWERS = (
    {"2**3": 8, "-2**2": -4, "(-2)**2": 4, "2**-1": 0.5, "2**+1": 2, "2**3**2": 512, "(2**3)**2": 64}
    | {"2**-2**2": 0.0625, "2**2*3": 12, "3*2**2": 12, "-2**-2": -0.25, "4**(1/2)": 2, "2 ** 3": 8}
    | {"7//2": 3, "-7//2": -4, "7//2*2": 6, "7/2//1": 3, "8//3/2": 1, "0**9**9": 0, "1**9**9": 1}
    | {"0 * 9 ** 8192": 0, "0 * 9 ** 8193": None}
    | dict.fromkeys(["2* *3", "2***3", "2**", "**2", "2//", "2**3**", "(2**3", "2**3)", "0**-1"])
    | dict.fromkeys(["(-8)**(1/3)", "9**9**9", "(-8)**(1/3)*0"])
)


# powers and floor division count under "released" alone; without a value one is broken, complex or above 32,768 bits
POWERS = [
    (text, [int(n) for n in re.findall(r"\d+", text)], target, 0, target == value)
    for text, value in _POWERS.items()
    for target in ((0, 1, 8) if value is None else (value, value + 1))
]


def test_limits_of_length_and_depth():
    for depth, expected in ((200, 1), (201, 0)):  # as Python's
        text = "(" * depth + "3" + ")" * depth
        assert [_answer(text, [3], 3, grader) for grader in countdown.GRADERS] == [expected] * 2
    # the length counts without blanks
    assert _answer("-" * 1998 + " " * 5000 + "3", [3], 3) == 1 and _answer("-" * 2000 + "3", [3], 3) == 0
    right = "</think>\n<answer>3</answer>"
    assert grade(right.rjust(65_536, "x"), [3], 3) == Grade(1.0, 1.0)
    assert grade(right.rjust(65_537, "x"), [3], 3) == Grade(0.0, 0.0)


_RIGHT = ["44 + 19 + 35", " (44+19) +35 ", "35 - -19 - -44", "44+19+35\n"]
_WRONG = [f"44 + 19 + 35{end}" for end in ("\n\n", " = 98", ".", " + 0")] + ["", "\n44 + 19 + 35", "44 + 19\t+ 35"]
_WRONG += ["44 + 54", "44 + 44 + 19 + 35 - 44", "4419 + 35", "44 + 19 35", "044 + 19 + 35", "44 − 19 + 35", "٤٤+19+35"]


BY_HAND = [
    *((f"1 - 1 / {large}", [1, 1, large], 1, 0, 1) for large in (10**6, 10**12)),
    ("+3 + 4", [3, 4], 7, 0, 1),
    ("4 + 4", [4, 2], 8, 0, 0),
    # non-integer targets of the file are rounded doubles
    ("800 / 3", [800, 3], "266.6666666666667", 1, 1),
    ("800 / 3", [800, 3], "266.66667", 0, 1),
    *((text, [44, 19, 35], "98", text in _RIGHT, text in _RIGHT) for text in _RIGHT + _WRONG),
    *(("3 - 14", [14, 3], t, 1, 1) for t in ("-11", -11.0, Fraction(-11), "-11.0", np.int64(-11), np.float64(-11))),
    *(("137 / 5", np.array([5, 137]), target, 1, 1) for target in ("27.4", 27.4, Fraction(137, 5), "137/5")),
    *POWERS,
]


@pytest.mark.parametrize(("text", "numbers", "target", "strict", "released"), BY_HAND)
def test_answers_by_hand(text, numbers, target, strict, released):
    assert [_answer(text, numbers, target, grader) for grader in countdown.GRADERS] == [strict, released]


def test_the_reward_takes_text_and_conversations_and_logs():
    text, logged = "x</think>\n<answer>1 + 2</answer>", {}
    conversation = [{"role": "assistant", "content": text}]
    columns = {"numbers": [[1, 2]] * 4, "target": ["3"] * 4, "other": [0] * 4, "log_metric": logged.__setitem__}
    rewards = countdown.reward(["p"] * 4, [text, conversation, "x</think>", []], **columns)
    assert rewards == [1.1, 1.1, pytest.approx(0.01), 0.0]
    assert logged == {"accuracy": 0.5, "format": pytest.approx(0.525)}
    assert countdown.reward([], [], [], []) == []
    (row,) = countdown.dataset([Problem((7, 2), "3")], None, chat_template=False)
    asked = [row["prompt"]], ["<answer>7//2</answer>"], [row["numbers"]], [row["target"]]
    assert (countdown.reward(*asked), countdown.reward(*asked, grader="released")) == ([0.05], [1.05])


# ------------------------------------------------------------------------------------------------------- hostile input

_TAGS = ("<think>", "<answer>", "</think>\n<answe", "<answer", "</answer", "<answer></answer>", "<answer>3</answer>")
_HOSTILE = {
    "tower of powers": ("9**9**9", [9, 9, 9]),
    "tower over one": ("1**9**9**9", [1, 9, 9, 9]),
    "long power": ("(9**9999)//(3**9999)", [9, 9999, 3, 9999]),
    "powers that divide": ("(99**99)**9//(98**99)**8/97", [99, 99, 9, 98, 99, 8, 97]),
    "10,000 brackets": ("(" * 10_000 + "3" + ")" * 10_000, [3]),
    "signs and brackets": ("-(" * 900 + "3", [3]),
    "signs in brackets": ("(" * 199 + "-" * 1500 + "3" + ")" * 199, [3]),
    "blanks": (" " * 60_000 + "3", [3]),
    "blanks, then no": ("3" + " " * 60_000 + "x", [3]),
    "1 MB of digits": ("9" * 1_000_000, [9]),
    "1,900 digits": ("9" * 1_900, [9]),
    "many numbers": ("3 " * 30_000, [3]),
    **{f"64 kB of {tag!r}": (tag * (65_500 // len(tag)), [3]) for tag in _TAGS},
    "lone surrogate": ("\ud8003\udfff\0", [3]),
}


@pytest.mark.parametrize("grader", countdown.GRADERS)
@pytest.mark.parametrize("name", _HOSTILE)
def test_hostile_input_scores_nothing_in_ten_milliseconds(name, grader):
    text, numbers = _HOSTILE[name]
    seconds = []
    for _ in range(5):
        countdown._has_value.cache_clear()
        start = time.thread_time()  # of this thread alone, whatever else the machine does
        result = grade(text if "<" in text else f"<answer>{text}</answer>", numbers, 98, grader)
        seconds.append(time.thread_time() - start)
    assert result.answer == 0 and min(seconds) < 0.010
