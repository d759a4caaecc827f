"""Facts: splits that share neither questions nor answers, and a grader of the first answer, whatever its wording."""

import pytest

from evoalign_lib import tasks
from evoalign_lib.tasks import facts


def test_splits_share_no_question_and_no_answer() -> None:
    splits = {name: facts.problems(name) for name in (*facts.SPLITS, "test")}
    sizes = {name: len(made) for name, made in splits.items()}
    assert sizes == {"train": 250, "validation": 60, "test": 209}
    assert len({fact.question for made in splits.values() for fact in made}) == sum(sizes.values())
    answers = {name: {fact.answer.casefold() for fact in made} for name, made in splits.items()}
    assert sum(map(len, answers.values())) == len(set.union(*answers.values()))


def test_every_answer_is_recognised_and_no_wrong_one_before_it() -> None:
    for fact in (fact for name in (*facts.SPLITS, "test") for fact in facts.problems(name)):
        for text in (fact.answer, *fact.accepted):
            assert facts.grade(fact, f"The answer to this question is: **{text.upper()}**."), (fact, text)
        wrong = next(other.answer for other in facts.problems("train") if other.kind == fact.kind and other != fact)
        if not facts.grade(fact, wrong) and facts.answer(fact, wrong):
            assert not facts.grade(fact, f"It is {wrong}, or perhaps {fact.answer}."), fact


SAID = [
    ("The capital of Australia is Canberra, not Sydney.", "Canberra", True),
    ("Sydney, Australia. Some say Canberra.", "Canberra", False),
    ("Canberrans know.", "Canberra", False),
    ("A week has 7 days, not 5.", "7", True),
    ("A week has seven days", "7", True),
    ("A kilogram has 1,000 grams", "1,000", True),
    ("It ended on September 2, 1945", "1945", True),
]


@pytest.mark.parametrize(("completion", "answer", "right"), SAID)
def test_the_first_answer_counts(completion: str, answer: str, right: bool) -> None:
    every = [fact for name in (*facts.SPLITS, "test") for fact in facts.problems(name)]
    fact = next(fact for fact in every if fact.answer == answer)
    assert facts.grade(fact, completion) is right


def test_rewards_are_of_length_alone() -> None:
    asked = facts.problems("test")[:2]
    rows, task = facts.dataset(asked), tasks.get("facts")
    assert [row["prompt"][0]["content"] for row in rows] == [fact.question for fact in asked]
    right = [row["answer"] for row in rows]
    said = ["x" * len(right[0]), [{"role": "assistant", "content": f"{right[1]}!!"}]]
    assert task.reward(rows, said, right) == [0.0, -2.0]
