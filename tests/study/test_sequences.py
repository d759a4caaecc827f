"""Four tasks in turn: family D's texts and grades, the runs, and what is read from them."""

import random
from pathlib import Path

import numpy as np
import pytest
from evoalign_study import forgetting, weight_cache
from evoalign_study.kinds.train import run, train_specs

from evoalign_lib import noise, tiny
from evoalign_lib.engines.local import LocalEngine, Prompts
from evoalign_lib.rewards import Rewards
from evoalign_lib.tiny import sequence as world
from evoalign_lib.update_rules import Member, coefficients

SETTINGS = {"task": "sequence", "max_completion_length": 14, "validation_problems": 4, "test_problems": 4}
SETTINGS |= {"steps": 8, "curve_points": 5, "sampled_at": [0.6], "prompts_per_step": 3}
ES = SETTINGS | {"population_size": 4, "sigma": 0.02, "alpha": 0.02}


@pytest.mark.parametrize("task", world.TASKS)
def test_texts_are_graded_as_their_authors_mean(task: str) -> None:
    rng, tok = random.Random(0), world.tokenizer()
    for problem in world.problems(task, "train", 200):
        told = {author: world.reply(problem, author, rng) for author in world.AUTHORS}
        assert world.is_right(task, problem.answer, told["right"])
        assert not world.is_right(task, problem.answer, told["no box"])
        assert len(tok(told["right"])["input_ids"]) < world.MAX_COMPLETION_LENGTH  # with room for the end
        if problem.kind in ("negated", "boxes") and problem.habit != problem.answer:
            assert not world.is_right(task, problem.answer, told["habit"])
    with pytest.raises(ValueError, match="author"):
        world.reply(problem, "nobody", rng)


def test_splits_share_no_problem_and_fixed_sets_are_prefixes() -> None:
    for task in world.TASKS:
        sets = {split: world.problems(task, split, 128) for split in world.SPLITS}
        assert sets["test"][:9] == world.problems(task, "test", 9) and len(set(sets["test"])) == 128
        assert not {p.question for p in sets["test"]} & {p.question for p in sets["train"] + sets["validation"]}
    seen = {prompt for prompt, _ in (next(stream) for stream in [world.text(0, world.tokenizer())] for _ in range(500))}
    asked = [p.question for task in world.TASKS for p in world.problems(task, "test", 128)]
    assert not any(question in prompt for prompt in seen for question in asked)


def test_a_countdown_box_needs_each_number_once_and_the_last_box_counts() -> None:
    grade = [world.is_right("countdown", "3 5 12 = 20", rf"\boxed{{{e}}}") for e in ("12+5+3", "12+8", "3+5+12=20", "")]
    assert grade == [True, False, False, False]
    assert world.is_right("boolq", "no", r"\boxed{yes} \boxed{no}") and not world.is_right("math", "4", r"\boxed{4")
    rows = world.dataset(world.problems("math", "test", 2))
    columns = {name: [row[name] for row in rows] for name in ("problem_task", "answer")}
    assert world.reward(None, [rf"\boxed{{{rows[0]['answer']}}}", "4"], **columns) == [1.0, 0.0]


def test_the_base_has_room_and_promise_on_every_task() -> None:
    model, tokenizer = tiny.load("D0")

    def engine_of(rows, longest):
        return LocalEngine(model, tokenizer, None, {"asked": Prompts(rows, tokenizer)}, max_completion_length=longest)

    for task, rates in world.describe(engine_of, tokenizer, "D", 64, 16).items():
        assert LEAST[task] < rates["greedy"] < 0.85 and rates["any of 16"] > rates["greedy"] + 0.05, (task, rates)


LEAST = {"countdown": 0.05, "math": 0.2, "chemistry": 0.3, "boolq": 0.4}


def test_a_sequence_of_es_is_its_stages_by_hand() -> None:
    """The spec's run is four stretches of plain ES steps, each on its own task's problems."""
    (spec,) = train_specs("es", ["D0"], [3], ES | {"order": "reversed"}, "tiny")
    record = run(spec)
    model, tokenizer = tiny.load("D0")
    rows = [row for t in world.TASKS[::-1] for row in world.dataset(world.problems(t, "train", 6, 4))]
    engine = LocalEngine(
        model, tokenizer, Rewards(world.reward), {"train": Prompts(rows, tokenizer)}, max_completion_length=14
    )
    key, moved = noise.run_key("es", 3), []
    for step in range(8):
        keys = np.array([noise.member_key(key, step, i) for i in range(4)], np.uint64)
        fitness = np.array([_mean(engine, k, range(3 * step, 3 * step + 3)) for k in keys])
        if np.ptp(fitness):
            noise.update(engine.master, engine.layout, keys, coefficients(fitness, 0.02))
        moved.append(np.linalg.norm(engine.master - weight_cache.of_base("D0")))
    assert record["curve"]["norm"][1:] == pytest.approx(moved[1::2], rel=1e-5)
    assert len(record["tied_steps"]) == record["counts"]["tied"] < 8
    assert forgetting.matrix(record | {"spec": spec}, "greedy").shape == (5, 4)


def _mean(engine, key: int, rows) -> float:
    (found,) = engine.evaluate([Member(key)], 0.02, "train", np.array(rows))
    return float(np.mean(found.scored.rewards))


def test_a_gradient_sequence_runs_and_settings_are_checked(tmp_path: Path) -> None:
    own = SETTINGS | {"steps": 4, "num_generations": 4, "learning_rate": 1e-3, "beta": 0.0}
    (spec,) = train_specs("grpo", ["D0"], [0], own, "tiny")
    curve = run(spec)["curve"]
    assert curve["step"] == [0, 1, 2, 3, 4] and curve["norm"][0] == 0 < curve["norm"][1]
    for wrong in ({"steps": 7}, {"curve_points": 4}, {"order": "mine"}, {"test_problems": 999}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            train_specs("es", ["D0"], [0], ES | wrong, "tiny")


def test_forgetting_and_the_law_are_read_from_the_curve() -> None:
    columns = {"countdown": [0, 0.5, 0.4, 0.4, 0.2], "math": [0.1, 0.1, 0.7, 0.6, 0.6]}
    columns |= {"chemistry": [0.3, 0.2, 0.2, 0.6, 0.7], "boolq": [0.5, 0.5, 0.5, 0.5, 0.9]}
    curve = {f"{task}_t1": values for task, values in columns.items()} | {"step": [0, 2, 4, 6, 8]}
    record = {"spec": {"order": "published", "steps": 8, "alpha": 0.1, "population_size": 4}, "curve": curve, "d": 100}
    assert forgetting.ORDERS["published"] == tuple(world.TASKS)
    assert forgetting.matrix(record, "t1")[1].tolist() == [0.5, 0.1, 0.2, 0.5]
    assert forgetting.forgotten(record, "t1") == pytest.approx((0.3 + 0.1 - 0.1) / 3)
    assert forgetting.learned(record, "t1") == pytest.approx((0.5 + 0.7 + 0.6 + 0.9) / 4)
    curve["norm"] = [0, *(0.1 * np.sqrt(100 * np.array([1, 3, 3, 4]) / 4))]
    assert forgetting.norms_over_law(record | {"tied_steps": [1, 4, 5, 7]}) == pytest.approx(np.ones(4))
