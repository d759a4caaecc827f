"""Arithmetic: disjoint splits, and a grader that survives what instruct models write."""

import pytest

from evoalign_lib import tasks
from evoalign_lib.tasks import arithmetic


@pytest.mark.parametrize(("operation", "pairs"), [("*", 711), ("+", 1176), ("-", 4005)])
def test_splits_share_no_pair_of_operands_and_hold_all_of_them(operation: str, pairs: int) -> None:
    splits = {name: arithmetic.problems(name, operation) for name in ("train", "validation", "test")}
    unordered = {name: {frozenset((p.left, p.right)) for p in made} for name, made in splits.items()}
    assert {name: len(made) for name, made in splits.items()} == {n: len(made) for n, made in unordered.items()}
    assert (len(splits["train"]), len(splits["validation"])) == (256, 100)
    assert len(set.union(*unordered.values())) == sum(map(len, splits.values())) == pairs
    assert all(p.answer == eval(f"{p.left} {p.operation} {p.right}") >= 1 for p in splits["test"])  # noqa: S307
    turned = [p.left > p.right for p in splits["test"]]
    assert all(turned) if operation == "-" else 0.4 < sum(turned) / len(turned) < 0.6


WRITTEN = ["84", "The answer is 84.", "12 x 7 = 84", "12*7=84", "**84**", "84 apples", "$\\boxed{84}$", "84.0"]


@pytest.mark.parametrize("completion", [*WRITTEN, "12 \u00d7 7 is 84!", "12 x 7 = ...84"])
def test_the_last_number_is_the_answer_however_it_is_written(completion: str) -> None:
    assert arithmetic.grade(completion, 84)


def test_thousands_signs_and_what_is_no_answer() -> None:
    assert arithmetic.grade("It is 1,240.", 1240) and arithmetic.grade("= 1240,", 1240)
    assert arithmetic.grade("\u22125", -5) and not arithmetic.grade("-5", 5) and arithmetic.grade("7-5", 5)
    for wrong in ("", "no idea", "84 is not 85", "0.84", ".84", "-.84", "8 4", "840", "x84", "84 83 82", "eighty-four"):
        assert not arithmetic.grade(wrong, 84), wrong


def test_rewards_take_texts_and_messages() -> None:
    asked = arithmetic.problems("test")[:2]
    rows, task = arithmetic.dataset(asked), tasks.get("arithmetic")
    assert rows[0]["prompt"][0]["content"].startswith(f"What is {asked[0].left} * {asked[0].right}?")
    answers = [row["answer"] for row in rows]
    said = [str(answers[0]), [{"role": "assistant", "content": f"{answers[1] + 1}"}]]
    assert task.reward(rows, said, answers) == [1.0, 0.0] and task.REWARD_FLOOR == 0.0
    with pytest.raises(ValueError, match="answer 1"):
        task.reward(rows, said, answers[:1])
