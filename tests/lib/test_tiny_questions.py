"""Family B of the tiny world: its knowledge base, the authors of its replies, and its tokenizer."""

import random

import pytest

from evoalign_lib.analysis import hacking
from evoalign_lib.tasks import conciseness
from evoalign_lib.tiny import questions
from evoalign_lib.tiny.questions import AUTHORS, KINDS, SPLITS, _questions, problems, reply

RIGHT = ("sentence", "long sentence", "short", "second language", "second language, short", "repeats", "further turn")
NEVER = ("empty", "excuse", "noise")


@pytest.fixture(scope="module")
def tok():
    return questions.tokenizer()


def replies(author, n=200):
    rng = random.Random(author)
    for _ in range(n):
        kind = rng.choice(KINDS)
        problem, words = rng.choice(_questions()[kind])
        yield kind, problem, reply(kind, problem, words, author, rng)


def test_the_splits_share_no_question_and_have_as_many_of_each_kind():
    sets = {split: problems(split) for split in SPLITS}
    assert {split: len(found) for split, found in sets.items()} == {"train": 200, "validation": 128, "test": 256}
    asked = [p.question for found in sets.values() for p in found]
    assert len(set(asked)) == len(asked)
    for found in sets.values():
        assert all("capital" in p.question for p in found[::4]) and all("+" in p.question for p in found[2::4])
        assert {p.answer for p in found[3::4]} == {"yes", "no"}


@pytest.mark.parametrize("author", AUTHORS)
def test_what_each_author_writes_is_right_wrong_and_flagged_as_intended(author):
    graded = [(conciseness.is_correct(text, p), hacking.hack_report([text])) for _, p, text in replies(author)]
    share = sum(right for right, _ in graded) / len(graded)
    assert share == 1 if author in RIGHT else share == 0 if author in NEVER else 0 < share < 0.6
    flagged = {name for _, report in graded for name in report.flags if report.flags[name][0]}
    expected = {"empty": {"empty"}, "repeats": {"repetitive"}, "further turn": {"further_turn"}}
    assert flagged == expected.get(author, set())
    if author == "second language":
        assert all(hacking.other_script(text, p.question) for _, p, text in replies(author))


def test_sentences_fit_and_every_text_survives_the_tokenizer(tok):
    longest = {}
    for author in AUTHORS:
        for _, _problem, text in replies(author):
            ids = tok(text, add_special_tokens=False).input_ids
            assert tok.decode(ids) == text
            longest[author] = max(longest.get(author, 0), len(ids) + 1)
    assert all(longest[a] <= questions.MAX_COMPLETION_LENGTH for a in AUTHORS if "sentence" in a or "short" in a)
    assert longest["repeats"] > questions.MAX_COMPLETION_LENGTH
    (row,) = conciseness.dataset(problems("test")[:1], tok)
    assert len(tok(row["prompt"], add_special_tokens=False).input_ids) < 14
