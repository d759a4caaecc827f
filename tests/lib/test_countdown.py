"""The Countdown task: data, generator, solver, prompts and graders.

`_published_*` restate the published scorer with its regular expressions and Python's `eval`. They see only strings that
this file generates itself, without `**`, and check that the library, which never evaluates text, decides alike.
"""

import ast
import json
import operator
import re
import subprocess
import sys
import time
import warnings
from fractions import Fraction
from itertools import combinations_with_replacement, permutations, product

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evoalign_lib import tasks
from evoalign_lib.tasks import countdown
from evoalign_lib.tasks.countdown import Grade, Problem, grade, solve


@pytest.fixture(scope="module")
def rows():
    """The objects of the public file, the fields that the library does not read included."""
    try:
        path = countdown.public_file()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    return json.loads(path.read_text(encoding="utf-8"))


def _answer(text, numbers, target, grader="strict"):
    return grade(f"<answer>{text}</answer>", numbers, target, grader).answer


# ------------------------------------------------------------------------------------------------------------ registry


def test_registry_returns_the_module_and_suggests_the_nearest_name():
    assert tasks.get("countdown") is countdown
    with pytest.raises(ValueError, match=r"'contdown'; .* 'countdown'\?"):
        tasks.get("contdown")


def test_registry_is_lazy_and_countdown_needs_no_heavy_package():
    heavy = {"torch", "transformers", "trl", "datasets", "pooch", "papermill", "pandas"}
    code = (
        "import sys; import evoalign_lib.tasks as t; assert 'numpy' not in sys.modules; t.get('countdown');"
        "print(' '.join(m for m in sys.modules if '.' not in m))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "numpy" in loaded and not heavy & set(loaded)


# ---------------------------------------------------------------------------------------------------------------- data


def test_public_file_has_200_training_and_2000_test_problems(rows):
    everything = countdown.load_public("all")
    assert [p.id for p in everything] == list(range(2200)) == [row["id"] for row in rows]
    assert countdown.load_public("train") == everything[:200]
    assert countdown.load_public("test") == everything[200:]
    assert everything[0] == Problem((44, 19, 35), "98", 0)
    keys = [countdown.problem_key(p) for p in everything]
    assert not set(keys[:200]) & set(keys[200:])
    with pytest.raises(ValueError, match="'validation'"):
        countdown.load_public("validation")


@pytest.mark.skipif(sys.platform != "linux", reason="the cache folder follows XDG_CACHE_HOME on Linux only")
def test_without_folder_and_network_the_error_names_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("EVOALIGN_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # a proxy that refuses every connection stands for a machine without a network
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(FileNotFoundError, match="set EVOALIGN_DATA to a folder that holds countdown.json"):
        countdown.load_public()


@pytest.mark.parametrize(
    "change",
    [{"id": 8}, {"numbers": "12"}, {"numbers": [1, "2"]}, {"numbers": [1, True]}, {"numbers": [1, -2]}, {"numbers": []}]
    + [{"target": target} for target in (3, "three", "1e999999999", "٣", "1/0")],
)
def test_bad_items_are_named(change):
    row = {"id": 7, "numbers": [1, 2], "target": "3"}
    countdown._problem(row, 7)
    for bad in (row | change, {name: row[name] for name in row if name not in change}, list(row)):
        with pytest.raises(ValueError, match="item 7: "):
            countdown._problem(bad, 7)


# ----------------------------------------------------------------------------------------------------------- generator


def test_generator_is_reproducible_and_follows_the_seed():
    first = countdown.generate(300, 0)
    assert first == countdown.generate(300, 0) == countdown.generate(300, np.random.SeedSequence(0))
    assert first != countdown.generate(300, 1)
    # a pinned draw: validation and test sets are made by seed, so they must not move
    assert countdown.generate(3, 0) == [
        Problem((26, 31, 49), "54"),
        Problem((20, 43, 28), "5"),
        Problem((1, 7, 1), "6"),
    ]


def test_generated_problems_are_solvable_distinct_and_in_range():
    problems = countdown.generate(500, 2, count=4, low=2, high=13, target_low=-5, target_high=30)
    assert len({countdown.problem_key(p) for p in problems}) == 500
    assert all(len(p.numbers) == 4 and min(p.numbers) >= 2 and max(p.numbers) <= 13 for p in problems)
    assert {2, 13} <= {n for p in problems for n in p.numbers}
    targets = {int(p.target) for p in problems}
    assert targets <= set(range(-5, 31)) and {-5, 30} <= targets
    for problem in problems:
        assert _answer(solve(problem.numbers, problem.target), problem.numbers, problem.target) == 1


def test_generator_reaches_every_solvable_problem_and_says_when_there_are_no_more():
    possible = {
        (numbers, str(value))
        for numbers in combinations_with_replacement(range(1, 6), 3)
        for value in countdown.attainable(numbers)
        if value.denominator == 1 and 1 <= value <= 100
    }
    problems = countdown.generate(len(possible), 0, high=5)
    assert {countdown.problem_key(p) for p in problems} == possible
    with pytest.raises(ValueError, match=f"found only {len(possible)} of {len(possible) + 1} problems"):
        countdown.generate(len(possible) + 1, 0, high=5)
    repeated = countdown.generate(3 * len(possible), 0, high=5, distinct=False)
    assert len(repeated) == 3 * len(possible)
    with pytest.raises(ValueError, match="found only 0 of 10 problems"):
        countdown.generate(10, 0, high=5, target_low=10_000, target_high=20_000)


def test_splits_are_disjoint_by_construction():
    drawn = {
        split: {countdown.problem_key(p) for p in countdown.generate(1000, seed, split=split)}
        for seed, split in enumerate(countdown.SPLITS)
    }
    for one, other in (("train", "validation"), ("train", "test"), ("validation", "test")):
        assert not drawn[one] & drawn[other]
    shares = [countdown.split_of(p) for p in countdown.generate(20_000, 3)]
    # binomial standard deviation of a 5 % share of 20,000 is 31
    assert shares.count("test") == pytest.approx(1000, abs=150)
    assert shares.count("validation") == pytest.approx(1000, abs=150)
    # the order of the numbers must not carry a problem from one split to another
    for problem in countdown.generate(50, 4):
        orders = {countdown.split_of(Problem(order, problem.target)) for order in permutations(problem.numbers)}
        assert len(orders) == 1


def test_split_assignment_is_pinned():
    # the first eight bytes, little endian and modulo 20, of `printf '1,2,3=24' | b2sum -l 64` and so on
    splits = {"1": "train", "24": "test", "26": "validation", "38": "test", "46": "test", "60": "train"}
    for target, split in splits.items():
        assert countdown.split_of(Problem((3, 1, 2), target)) == split


@pytest.mark.parametrize(
    ("arguments", "named"),
    [({"n": -1}, "n=-1"), ({"count": 1}, "count=1"), ({"count": 7}, "count=7"), ({"low": 9, "high": 8}, "low=9")]
    + [({"low": -1}, "low=-1"), ({"count": 6, "high": 10**4}, "high=10000"), ({"split": "dev"}, "'dev'")]
    + [({"target_low": 5, "target_high": 4}, "5 > 4")],
)
def test_generator_refuses_bad_arguments(arguments, named):
    with pytest.raises(ValueError, match=named):
        countdown.generate(**({"n": 1, "seed": 0} | arguments))


def test_generator_never_divides_by_zero_or_overflows():
    # all-zero numbers: most expressions divide by zero, and numpy's warnings are errors here
    assert {p.target for p in countdown.generate(20, 0, low=0, high=0, target_low=0, distinct=False)} == {"0"}
    problems = countdown.generate(50, 0, count=6, high=99, target_high=10**13)
    assert all(0 < int(p.target) <= 99**6 for p in problems)


# -------------------------------------------------------------------------------------------------------------- solver


def _values_by_brute_force(numbers):
    """Values of all expressions: every order, every operator string, every bracketing as reverse Polish notation."""
    signs = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
    count = len(numbers)
    shapes = [s for s in product("nb", repeat=2 * count - 1) if s.count("n") == count and _is_rpn(s)]
    values = set()
    for order in set(permutations(numbers)):
        for shape, chosen in product(shapes, product(signs, repeat=count - 1)):
            stack, operands, operations = [], iter(order), iter(chosen)
            try:
                for kind in shape:
                    if kind == "n":
                        stack.append(Fraction(next(operands)))
                    else:
                        b, a = stack.pop(), stack.pop()
                        stack.append(signs[next(operations)](a, b))
            except ZeroDivisionError:
                continue
            values.add(stack[0])
    return values


def _is_rpn(shape):
    heights = [shape[:i].count("n") - shape[:i].count("b") for i in range(1, len(shape) + 1)]
    return min(heights) >= 1 and heights[-1] == 1


@pytest.mark.parametrize(
    "numbers", [(5,), (3, 8), (0, 4), (2, 2), (1, 2, 3), (0, 0, 7), (4, 4, 4), (13, 7, 29), (3, 3, 8, 8)]
)
def test_solver_agrees_with_brute_force(numbers):
    values = _values_by_brute_force(numbers)
    assert numbers != (3, 3, 8, 8) or solve(numbers, 24) == "8 / (3 - (8 / 3))"  # the only way
    found = countdown.attainable(numbers)
    assert set(found) == values
    for value, text in found.items():
        assert _answer(text, numbers, value) == 1
    for target in range(-30, 31):
        assert (solve(numbers, target) is not None) == (target in values)


def test_number_of_values_matches_the_known_sequence():
    # distinct rational values from n generic numbers, OEIS A140606: 1, 6, 68, 1170, ...
    generic = [10**3 + 9, 10**5 + 3, 10**7 + 19, 10**9 + 7]
    assert [len(countdown.attainable(generic[:n])) for n in (1, 2, 3, 4)] == [1, 6, 68, 1170]


def test_solver_takes_six_numbers_and_no_more():
    numbers = [2, 3, 5, 7, 1, 4]
    assert _answer(solve(numbers, 840), numbers, 840) == 1
    with pytest.raises(ValueError, match="1 to 6 numbers, got 7"):
        solve([1] * 7, 3)
    with pytest.raises(ValueError, match="1 to 6 numbers, got 0"):
        countdown.attainable([])


def test_every_public_item_but_fourteen_is_solvable(rows):
    unsolvable, null_but_solvable = [], 0
    for row in rows:
        text = solve(row["numbers"], row["target"])
        if text is None:
            unsolvable.append(row["id"])
            continue
        null_but_solvable += row["solution"] is None
        for grader in countdown.GRADERS:
            assert _answer(text, row["numbers"], row["target"], grader) == 1
    # all in the test part: the attainable ceiling of the published evaluation is 1986 of 2000
    assert unsolvable == [263, 281, 566, 640, 798, 800, 1085, 1178, 1340, 1444, 1560, 1574, 1847, 1984]
    assert null_but_solvable == 19 == sum(row["solution"] is None for row in rows)


# ------------------------------------------------------------------------------------------------------------- prompts


def test_raw_prompt_is_the_published_context_byte_for_byte(rows):
    for problem, row in zip(countdown.load_public("all"), rows, strict=True):
        assert countdown.prompt(problem, chat_template=False) == row["context"]


def test_dataset_rows_feed_the_reward():
    problems = countdown.generate(5, 0)
    table = countdown.dataset(problems, None, chat_template=False)
    assert [row["prompt"] for row in table] == [countdown.prompt(p, chat_template=False) for p in problems]
    columns = {name: [row[name] for row in table] for name in ("numbers", "target")}
    completions = [f"</think>\n<answer>{solve(p.numbers, p.target)}</answer>" for p in problems]
    assert countdown.reward([row["prompt"] for row in table], completions, **columns, id=range(5)) == [1.1] * 5
    with pytest.raises(ValueError, match="needs a tokenizer"):
        countdown.prompt(problems[0])


# -------------------------------------------------------------------------------------------------------------- format


def _published_format(response, end_token=None):
    text = "<think>" + response
    if end_token and text.endswith(end_token):
        text = text[: len(text) - len(end_token)]
    if re.match(r"^<think>.*?</think>\n<answer>.*?</answer>$", text, re.DOTALL):
        return 1.0
    think = re.search(r"<think>.*?</think>", text, re.DOTALL)
    answer = re.search(r"<answer>.*?</answer>", text, re.DOTALL)
    return (0.1 if think else 0.0) + (0.5 if answer else 0.0)


@pytest.mark.parametrize(
    ("expected", "responses"),
    [
        (1.0, ["x</think>\n<answer>1</answer>", "<think>x</think>\n<answer>1</answer>", "</think>\n<answer></answer>"]),
        (1.0, ["x</think>\n<answer>1</answer>\n", "x</think>\n<answer>1</answer> y <answer>2</answer>"]),
        (0.6, [f"x</think>\n<answer>1</answer>{end}" for end in ("\n\n", "\r", " ")]),
        (0.6, [f"x</think>{between}<answer>1</answer>" for between in ("\n\n", "", " ")]),
        (0.6, ["<answer>1</answer></think>\n<answer>"]),
        (0.1, ["x</think>\n</answer>", "x</think>\n<answer>1", "x</think>"]),
        (0.5, ["<answer>1</answer>", "x</THINK>\n<answer>1</answer>"]),
        (0.0, ["</answer><answer>", "x", ""]),
    ],
)
def test_format_by_hand(responses, expected):
    for response in responses:
        assert grade(response, [1], 1).format == expected == _published_format(response)


_FRAGMENTS = ["<think>", "</think>", "<answer>", "</answer>", "</think>\n<answer>", *"\n<>/x\r", "<eos>"]


@given(
    st.lists(st.sampled_from(_FRAGMENTS), max_size=9).map("".join), st.sampled_from([None, "", "<eos>", "\n", "think>"])
)
@example("<think></think>\n<answer></answer>\n", None)
@example("</think>\n<answer>", None)  # the middle must not overlap the end
@example("", "think>")  # eats into the opening tag
def test_format_by_string_search_equals_the_published_expressions(response, end_token):
    result = grade(response, [1], 1, end_token=end_token).format
    assert result == _published_format(response, end_token)
    assert result == grade("<think>" + response, [1], 1, end_token=end_token).format or end_token == "think>"


def test_end_token_is_removed_once_from_the_end():
    assert grade("x</think>\n<answer>3</answer><|im_end|>", [3], 3, end_token="<|im_end|>") == Grade(1.0, 1.0)
    assert grade("x</think>\n<answer>3</answer><|im_end|>", [3], 3) == Grade(0.6, 1.0)
    assert grade("x</think>\n<answer>3</answer><|im_end|><|im_end|>", [3], 3, end_token="<|im_end|>").format == 0.6


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


def _python_value(text):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SyntaxWarning: 'int' object is not callable; perhaps you missed a comma?
        return eval(text, {"__builtins__": None}, {})


def _exact_value(text):
    """Value under the strict rules by way of `ast`, None if the text breaks them."""
    binary = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}

    def value(node):
        match node:
            case ast.Constant(value=int(n)):
                return Fraction(n)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in binary:
                return binary[type(op)](value(left), value(right))
        raise ValueError("not allowed")

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return value(ast.parse(text.strip(" "), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


_BLANK = st.sampled_from(["", "", " "])
_NUMBER = st.sampled_from(["0", "00", "1", "2", "3", "7", "10", "02"])
_EXPRESSION = st.recursive(
    _NUMBER,
    lambda inner: (
        st.tuples(st.sampled_from(["-", "+", "--", "- +"]), _BLANK, inner).map("".join)
        | st.tuples(st.just("("), _BLANK, inner, _BLANK, st.just(")")).map("".join)
        | st.tuples(
            inner, _BLANK, st.sampled_from(["+", "-", "*", "/", "//", "+", "-", "*", "/", "", "/ /"]), _BLANK, inner
        ).map("".join)
    ),
    max_leaves=4,
)
_SYMBOLS = st.text("0123456789+-*/() ", max_size=12).filter(lambda text: "**" not in text)


@given(_EXPRESSION | _SYMBOLS, st.sampled_from(["", "\n", "\n\n"]), st.sampled_from([0, 0, 5e-6, -5e-6, 2e-5, 1]))
@example("()", "", 0)
@example("3(4)", "", 0)
@example("1 2", "", 0)
@example("(*3)", "", 0)
@example("7/ /2", "", 0)
@example("07 - 2", "", 0)
@example("1/0", "", 0)
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


_BLOCKS = ["<answer>", "</answer>", "<answer>3</answer>", "3", "4", "+", "<think>", "\n"]


@given(st.lists(st.sampled_from(_BLOCKS), max_size=9).map("".join))
@example("<answer>4<answer>3</answer>")  # the block starts at the first opening tag
@example("<answer>3</answer>4</answer>")
def test_the_last_answer_block_is_that_of_the_published_expression(response):
    for grader in countdown.GRADERS:
        assert grade(response, [3], 3, grader).answer == _published_answer(response, [3], 3)


@pytest.mark.parametrize(
    ("text", "value"),
    (
        {"2**3": 8, "-2**2": -4, "(-2)**2": 4, "2**-1": 0.5, "2**+1": 2, "2**3**2": 512, "(2**3)**2": 64}
        | {"2**-2**2": 0.0625, "2**2*3": 12, "3*2**2": 12, "-2**-2": -0.25, "4**(1/2)": 2, "2 ** 3": 8}
        | {"7//2": 3, "-7//2": -4, "7//2*2": 6, "7/2//1": 3, "8//3/2": 1, "0**9**9": 0, "1**9**9": 1}
        | dict.fromkeys(["2* *3", "2***3", "2**", "**2", "2//", "2**3**", "(2**3", "2**3)", "0**-1"])
        | dict.fromkeys(["(-8)**(1/3)", "9**9**9", "(-8)**(1/3)*0"])
    ).items(),
)
def test_powers_and_floor_division_count_under_released_only(text, value):
    """Without a value: the power is broken, complex or too large."""
    numbers = [int(n) for n in re.findall(r"\d+", text)]
    for target in (0, 1, 8) if value is None else (value, value + 1):
        assert _answer(text, numbers, target, "strict") == 0
        assert _answer(text, numbers, target, "released") == (target == value)


def test_released_bounds_powers_at_32768_bits():
    assert _answer("0 * 9 ** 8192", [0, 9, 8192], 0, "released") == 1
    assert _answer("0 * 9 ** 8193", [0, 9, 8193], 0, "released") == 0


def test_deep_brackets_end_where_pythons_do():
    for depth, expected in ((200, 1), (201, 0)):
        text = "(" * depth + "3" + ")" * depth
        assert [_answer(text, [3], 3, grader) for grader in countdown.GRADERS] == [expected] * 2
        assert _published_answer(f"<answer>{text}</answer>", [3], 3) == expected
    # the length counts without blanks
    assert _answer("-" * 1998 + " " * 5000 + "3", [3], 3) == 1
    assert _answer("-" * 2000 + "3", [3], 3) == 0


def test_the_two_graders_differ_where_they_should():
    # exact integer against a tolerance of 1e-5
    for large in (10**6, 10**12):
        near = f"1 - 1 / {large}"
        assert (_answer(near, [1, 1, large], 1), _answer(near, [1, 1, large], 1, "released")) == (0, 1)
    # unary plus
    assert (_answer("+3 + 4", [3, 4], 7), _answer("+3 + 4", [3, 4], 7, "released")) == (0, 1)
    # non-integer targets of the file are rounded doubles
    assert _answer("800 / 3", [800, 3], "266.6666666666667") == 1
    assert _answer("800 / 3", [800, 3], "266.66667") == 0
    assert _answer("800 / 3", [800, 3], "266.66667", "released") == 1


@pytest.mark.parametrize("grader", countdown.GRADERS)
def test_answers_by_hand(grader):
    right = ["44 + 19 + 35", " (44+19) +35 ", "44 + 19 + 35\n", "35 - -19 - -44"]
    wrong = ["\n44 + 19 + 35", "44 + 19 + 35\n\n", "44 + 19\t+ 35", "44 + 19 + 35 = 98", "44 + 19 + 35.", "44 + 54"]
    wrong += ["44 + 19 + 35 + 0", "44 + 44 + 19 + 35 - 44", "4419 + 35", "44 + 19 35", "044 + 19 + 35"]
    wrong += ["44 − 19 + 35", "٤٤ + 19 + 35", "98", "", " "]
    assert [_answer(text, [44, 19, 35], "98", grader) for text in right + wrong] == [1] * 4 + [0] * 16


@pytest.mark.parametrize("grader", countdown.GRADERS)
def test_target_may_be_text_or_number(grader):
    for target in ("-11", -11, -11.0, Fraction(-11), "-11.0", np.int64(-11), np.float64(-11)):
        assert _answer("3 - 14", [14, 3], target, grader) == 1
        assert _answer("14 - 3", [14, 3], target, grader) == 0
    for target in ("27.4", 27.4, Fraction(137, 5), "137/5"):
        assert _answer("137 / 5", [5, 137], target, grader) == 1
    for target in ("", "x", "1e9", "nan", float("nan"), float("inf"), None, [3], "1/0", "9" * 40):
        with pytest.raises(ValueError, match="target"):
            _answer("3", [3], target, grader)


# --------------------------------------------------------------------------------------------------- the public file


def test_shipped_solutions_get_the_documented_rewards(rows):
    rows = [row for row in rows if row["solution"] is not None]
    assert len(rows) == 2181
    completions = [f"x</think>\n<answer>{row['solution']}</answer>" for row in rows]
    columns = {name: [row[name] for row in rows] for name in ("numbers", "target")}
    scores = {g: countdown.reward(completions, completions, grader=g, **columns) for g in countdown.GRADERS}
    # the two graders agree on all; 15 shipped solutions break the rule "each number exactly once"
    assert scores["strict"] == scores["released"]
    assert [scores["strict"].count(value) for value in (1.1, 0.1)] == [2166, 15]
    for row, score in zip(rows, scores["strict"], strict=True):
        used = sorted(int(n) for n in re.findall(r"\d+", row["solution"]))
        assert (score == 1.1) == (used == sorted(row["numbers"]))
        assert score == 0.1 + _published_answer(f"<answer>{row['solution']}</answer>", row["numbers"], row["target"])


# -------------------------------------------------------------------------------------------------------------- reward


def test_reward_takes_text_and_conversations_and_logs():
    text, logged = "x</think>\n<answer>1 + 2</answer>", {}
    conversation = [{"role": "assistant", "content": text}]
    columns = {"numbers": [[1, 2]] * 4, "target": ["3"] * 4, "other": [0] * 4, "log_metric": logged.__setitem__}
    rewards = countdown.reward(["p"] * 4, [text, conversation, "x</think>", []], **columns)
    assert rewards == [1.1, 1.1, pytest.approx(0.01), 0.0]
    assert logged == {"accuracy": 0.5, "format": pytest.approx(0.525)}
    assert countdown.reward([], [], [], []) == []
    assert countdown.reward(["p"], ["<answer>7//2</answer>"], [[7, 2]], [3]) == [0.05]
    assert countdown.reward(["p"], ["<answer>7//2</answer>"], [[7, 2]], [3], grader="released") == [1.05]


def test_reward_refuses_bad_columns():
    with pytest.raises(ValueError, match="prompts 2, completions 2, numbers 1, target 2"):
        countdown.reward(["p"] * 2, ["a"] * 2, [[1]], ["1"] * 2)
    with pytest.raises(ValueError, match="grader='lenient'"):
        countdown.reward(["p"], ["a"], [[1]], ["1"], grader="lenient")
    for completion in (None, 3, b"a", ["a"], [{"role": "assistant", "content": None}]):
        with pytest.raises(TypeError, match="a completion must be"):
            countdown.reward(["p"], [completion], [[1]], ["1"])
    for numbers in (["44", "19", "35"], "44 19 35", [44, 19, "35"], [44.0, 19.0, 35.0], [True, 19, 35], [None]):
        with pytest.raises(TypeError, match="numbers must be whole numbers"):
            countdown.reward(["p"], ["<answer>1</answer>"], [numbers], ["98"])
    assert grade("<answer>44 + 19 + 35</answer>", np.array([44, 19, 35]), "98").answer == 1
    with pytest.raises(TypeError, match="NoneType"):
        grade(None, [1], 1)


# ------------------------------------------------------------------------------------------------------- hostile input

_TAGS = ("<think>", "<answer>", "</think>\n<answe", "<answer", "</answer", "<answer></answer>", "<answer>3</answer>")
_HOSTILE = {
    "tower of powers": ("<answer>9**9**9</answer>", [9, 9, 9]),
    "tower over one": ("<answer>1**9**9**9</answer>", [1, 9, 9, 9]),
    "long power": ("<answer>(9**9999)//(3**9999)</answer>", [9, 9999, 3, 9999]),
    "long exponent": ("<answer>1**(9**9999)</answer>", [1, 9, 9999]),
    "powers that divide": ("<answer>(99**99)**9//(98**99)**8/97</answer>", [99, 99, 9, 98, 99, 8, 97]),
    "10,000 brackets": ("<answer>" + "(" * 10_000 + "3" + ")" * 10_000 + "</answer>", [3]),
    "brackets without end": ("<answer>3" + "(" * 60_000 + "</answer>", [3]),
    "signs": ("<answer>" + "-" * 60_000 + "3</answer>", [3]),
    "signs and brackets": ("<answer>" + "-(" * 900 + "3</answer>", [3]),
    "blanks": ("<answer>" + " " * 60_000 + "3</answer>", [3]),
    "blanks, then no": ("<answer>3" + " " * 60_000 + "x</answer>", [3]),
    "1 MB of digits": ("<answer>" + "9" * 1_000_000 + "</answer>", [9]),
    "60 kB of digits": ("<answer>" + "9" * 60_000 + "</answer>", [9]),
    "1,900 digits": ("<answer>" + "9" * 1_900 + "</answer>", [9]),
    "many numbers": ("<answer>" + "3 " * 30_000 + "</answer>", [3]),
    "300 kB of half-open tags": ("<think><answer>" * 20_000, [3]),
    **{f"64 kB of {tag!r}": (tag * (65_500 // len(tag)), [3]) for tag in _TAGS},
    "unicode digits": ("<answer>٣ + ３ + ³</answer>", [3, 3, 3]),
    "NUL": ("<answer>3\0</answer>\0", [3]),
    "division by zero": ("<answer>1/0</answer>", [1, 0]),
    "zero to a negative power": ("<answer>0**-1</answer>", [0, 1]),
    "lone surrogate": ("\ud800<answer>3\udfff</answer>", [3]),
}


@pytest.mark.parametrize("grader", countdown.GRADERS)
@pytest.mark.parametrize("name", _HOSTILE)
def test_hostile_input_scores_nothing_in_ten_milliseconds(name, grader):
    response, numbers = _HOSTILE[name]
    seconds = []
    for _ in range(7):
        countdown._has_value.cache_clear()
        start = time.thread_time()  # of this thread alone, whatever else the machine does
        result = grade(response, numbers, 98, grader, end_token="</s>")
        seconds.append(time.thread_time() - start)
    assert result.answer == 0
    assert result.format in (0, 0.1, 0.5, 0.6, 1)
    assert min(seconds) < 0.010


def test_long_responses_score_zero_unread():
    right = "</think>\n<answer>3</answer>"
    padding = 65_536 - len(right)
    assert grade("x" * padding + right, [3], 3) == Grade(1.0, 1.0)
    assert grade("x" * (padding + 1) + right, [3], 3) == Grade(0.0, 0.0)
