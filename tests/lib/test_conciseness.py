"""The conciseness task: public data, reward under both measures, own files, and the grader of right answers."""

import hashlib
import json

import pytest
from helpers import refused
from hypothesis import given, settings
from hypothesis import strategies as st

from evoalign_lib.tasks import conciseness
from evoalign_lib.tasks.conciseness import Problem, is_correct, load, measured, reward

FRANCE = Problem("What is the capital of France?", "Paris", ("巴黎",))


@pytest.fixture(scope="module")
def public():
    try:
        return {split: conciseness.load_public(split) for split in conciseness.SPLITS}
    except FileNotFoundError as error:
        pytest.skip(str(error))


# ---------------------------------------------------------------------------------------------------------------- data


def test_the_public_questions_are_two_and_eight_and_each_has_its_other_answers(public):
    assert [p.answer for p in public["train"]] == ["8", "No"]
    assert [p.answer for p in public["eval"]] == ["Paris", "84", "True", "10", "Hola", "30", "Red", "7"]
    asked = {p.question for problems in public.values() for p in problems}
    assert asked == set(conciseness._PUBLIC_ANSWERS)
    for problem in public["train"] + public["eval"]:
        assert is_correct(problem.answer, problem)
        assert all(is_correct(other, problem) for other in problem.accepted)
        assert not any(is_correct(f"{problem.answer}, {other}", problem) for other in problem.rejected)


def test_a_changed_public_file_is_refused(tmp_path, monkeypatch):
    (tmp_path / "conciseness").mkdir()
    (tmp_path / "conciseness/train.jsonl").write_text('{"question": "1 + 1 =", "answer": "2"}')
    monkeypatch.setenv("EVOALIGN_DATA", str(tmp_path))
    digest = hashlib.sha256((tmp_path / "conciseness/train.jsonl").read_bytes()).hexdigest()
    with pytest.raises(ValueError, match=digest):
        conciseness.load_public()


def test_own_questions_are_loaded_with_what_else_is_right_or_wrong(tmp_path):
    path = tmp_path / "own.jsonl"
    rows = [
        {"question": "Which is the largest planet?", "answer": "Jupiter", "id": 3},
        {"question": "Is 7 prime?", "answer": "Yes", "accepted": ["prime"], "rejected": ["no", "not prime"]},
    ]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(json.dumps(row) for row in rows).encode())
    first, second = load(path)
    assert first == Problem("Which is the largest planet?", "Jupiter")
    assert second == Problem("Is 7 prime?", "Yes", ("prime",), ("no", "not prime"))


def load_third(line, folder):
    whole = '{"question": "Is 7 prime?", "answer": "Yes"}\n\n' + line + "\n"
    (folder / "own.jsonl").write_bytes(whole.encode("utf-8", "surrogateescape") if line else b"\n\n")
    load(folder / "own.jsonl")


test_a_malformed_line_is_named_with_what_is_missing = refused(
    ("", "own.jsonl"),
    ('["a", "b"]', "own.jsonl, line 3: .*an object"),
    ('{"answer": "b"}', "own.jsonl, line 3: .*question"),
    ('{"question": " ", "answer": "b"}', "own.jsonl, line 3: .*question"),
    ('{"question": "a", "answer": 7}', "own.jsonl, line 3: .*answer .* 7"),
    ('{"question": "a", "answer": "b", "accepted": "c"}', "own.jsonl, line 3: .*accepted .* 'c'"),
    ('{"question": "a", "answer": "b", "rejected": [1]}', "own.jsonl, line 3: .*rejected"),
    ('{"question": "caf\udce9?", "answer": "a"}', "own.jsonl, line 3: .*utf-8"),
    call=lambda line, tmp_path: load_third(line, tmp_path),
)


# ------------------------------------------------------------------------------------------------------------- rewards


def test_all_published_rewards_are_those_of_the_released_measure(public):
    answers, seen = {p.question: p.answer for p in public["eval"]}, 0
    for name in conciseness.COMPLETIONS:
        for one in conciseness.load_completions(name):
            targets = [answers[question] for question in one.questions]
            assert reward(one.questions, one.completions, targets, "released") == one.rewards
            strict = reward(one.questions, one.completions, targets)
            changed = {text for text, a, b in zip(one.completions, strict, one.rewards, strict=True) if a != b}
            assert all(conciseness.SPECIAL_TOKEN.search(text) for text in changed)
            seen += len(strict)
    assert seen == 5120


@settings(max_examples=50)
@given(st.text(max_size=60), st.text(min_size=1, max_size=20).filter(str.strip))
def test_the_reward_is_never_positive_and_zero_only_at_the_targets_length(text, target):
    found, *same = reward([""] * 3, [text, f"  {text}\n", text + "<|im_end|>"], [target] * 3)
    assert found == -abs(len(measured(text)) - len(target.strip())) and str(found) != "-0.0"
    assert same == [found] * 2


def test_an_end_of_text_alone_is_thirteen_characters_as_released_and_none_in_truth():
    ended = ["<|endoftext|>", "<|im_end|><|endoftext|>", "</s>", ""]
    assert reward([""] * 4, ended, ["Paris"] * 4, "released") == [-8, -18, -1, -5]
    assert reward([""] * 4, ended, ["Paris"] * 4) == [-5] * 4
    # what only looks like a token is text
    assert measured("a < b > c <- [x]") == "a < b > c <- [x]"


def test_conversations_are_scored_and_metrics_logged():
    logged = {}
    said = [{"role": "user", "content": "never counted"}, {"role": "assistant", "content": "Paris"}]
    found = reward(["", ""], [said, " "], ["Paris", "8"], log_metric=logged.__setitem__, completion_ids=None)
    assert found == [0, -1]
    assert logged == {"length": 2.5, "empty": 0.5}
    assert reward([], [], []) == []


test_what_is_refused = refused(
    (lambda: reward([""], ["a"], ["a", "b"]), ValueError, "answer 2"),
    (lambda: reward([""], ["a"], ["a"], "loose"), ValueError, "'loose'"),
    (lambda: reward([""], ["a"], [7]), TypeError, "7"),
    (lambda: reward([""], [7], ["a"]), TypeError, "7"),
    (lambda: conciseness.prompt(FRANCE), ValueError, "tokenizer"),
    (lambda: Problem("a", ""), ValueError, "answer"),
    (lambda: conciseness.load_public("test"), ValueError, "'test'"),
    (lambda: conciseness.load_completions("ES"), ValueError, "'ES'"),
    (lambda: load("nowhere.jsonl"), FileNotFoundError, "nowhere.jsonl"),
)


# ------------------------------------------------------------------------------------------------------------- grading

PRODUCT = Problem("Calculate: 12 × 7 =", "84", ("eighty-four", "八十四"))
CATS = Problem("True or false?", "True", ("正确",), ("false", "不正确"))


CHINESE = ["法国的首都是巴黎（Ｐａｒｉｓ）。", "法国的首都是Paris。"]
PRODUCTS = ["12 × 7 = 84", "84.", "等于84。", "84.0", "八十四", "Eighty-four"]
NO_PRODUCTS = ["84000", "84,000", "0.84", "84.5", "-84", "84%", "x84", "八十四万", "8 4"]
NOT_PARIS = ["Parisians", "Pari", "法国的首都", "", "<|endoftext|>"]
GRADED = [
    (FRANCE, ["Paris", "PARIS!", "It’s “Paris”.<|im_end|>", *CHINESE], NOT_PARIS),
    (PRODUCT, PRODUCTS, NO_PRODUCTS),
    (CATS, ["True", "这个陈述是正确的"], ["true or false", "这个陈述是不正确的", "untrue"]),
]


@pytest.mark.parametrize(("problem", "right", "wrong"), GRADED)
def test_a_reader_would_agree(problem, right, wrong):
    assert [is_correct(text, problem) for text in right + wrong] == [True] * len(right) + [False] * len(wrong)


@given(st.text(max_size=80))
def test_grading_never_fails_and_does_not_depend_on_case_or_tokens(text):
    found = is_correct(text, PRODUCT)
    assert found == is_correct(f"<|im_start|>{text}<|im_end|>", PRODUCT)
    assert is_correct(f"{text} = 84 .", PRODUCT)


def test_a_hostile_text_is_graded_in_no_time():
    for text in ("8" * 1_000_000, "84," * 300_000, "-" * 1_000_000, "Par" * 300_000):
        assert not is_correct(text, FRANCE)
        is_correct(text, PRODUCT)
