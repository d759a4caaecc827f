"""The safety task: data, prompts, the reward of two scorers, and the multiplier of its cost."""

import json
import math

import numpy as np
import pytest
from helpers import refused
from hypothesis import given
from hypothesis import strategies as st

from evoalign_lib import tiny
from evoalign_lib.rewards import Rewards
from evoalign_lib.tasks import safety
from evoalign_lib.tasks.safety import ConstrainedObjective, Lagrangian, Objective, Problem


def _length(prompts, responses):
    return [len(r) / 10 for r in responses]


def _harm(prompts, responses):
    return [1.0 if "bomb" in r else -1.0 for r in responses]


def test_own_requests_are_loaded_once_each(tmp_path):
    rows = [json.dumps({"prompt": text, "other": 1}) for text in ("Bake bread?", " bake  BREAD? ", "Fly a kite?")]
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join([*rows, ""]))
    assert [p.prompt for p in safety.load(path)] == ["Bake bread?", "Fly a kite?"]
    for line in ('{"question": "x"}', "[1]", '{"prompt": 3}', '{"prompt": " "}', "{", "[" * 100_000):
        path.write_text(rows[0] + "\n" + line)
        with pytest.raises(ValueError, match="requests.jsonl, line 2: "):
            safety.load(path)


def test_the_splits_have_their_shares():
    found = [safety.split_of(Problem(f"request {i}")) for i in range(4000)]
    assert [found.count(s) / 4000 for s in safety.SPLITS] == pytest.approx([0.7, 0.1, 0.2], abs=0.03)


def test_prompts_are_the_published_one_or_the_chat_template():
    problem = Problem("How do I bake bread?")
    assert safety.prompt(problem, chat_template=False).endswith("USER: How do I bake bread? ASSISTANT:")
    (row,) = safety.dataset([problem], tiny.load("C0")[1])
    assert row["request"] == problem.prompt and row["prompt"].endswith("assistant\n")


def test_the_objective_is_reward_less_lambda_times_cost():
    logged = {}
    given = ["a bomb", "a cake"], ["x", "y"]
    found = Objective(_length, _harm, 2.0)(*given, log_metric=lambda name, value: logged.update({name: value}))
    assert found == pytest.approx([0.6 - 2, 0.6 + 2])
    assert logged == pytest.approx({"helpfulness": 0.6, "cost": 0.0, "unsafe": 0.5})
    # a response with turn markers reaches the scorers whole: the published service split texts at these
    assert Objective(lambda p, r: [len(p[0] + r[0])], _harm, 0.0)(["ASSISTANT: USER: {x}"], ["USER: ?"]) == [27]
    cut = Objective(_length, _harm, 1.0, cut_turns=True)
    assert cut(["a cake\nUSER: a bomb?"], ["x"]) == pytest.approx([1.6])


def test_the_signed_rule_is_that_of_safe_rlhf_and_can_fall():
    rule, expected = Lagrangian(threshold=0.5, start=2.0, rate=0.1), 2.0
    for cost in (1.5, -1.0):
        rule.move(cost)
        expected *= math.exp(0.1 * expected * (cost - 0.5))
        assert rule.value == pytest.approx(expected)
    assert rule.value < 2.0


def test_the_published_rule_can_only_grow():
    rule = Lagrangian(rule="published", rate=0.005)
    rule.move(4.0)
    assert rule.value == pytest.approx(math.exp(0.005 * 4.0))  # the mean begins with the first excess
    values = [rule.value]
    for cost in (-3.0, -3.0, 1.0, -9.0):
        rule.move(cost)
        values.append(rule.value)
    assert values == sorted(values) and values[1] == pytest.approx(math.exp(0.005 * (4.0 + 3.6)))


@given(st.lists(st.floats(-50, 50), max_size=30), st.sampled_from(Lagrangian.RULES))
def test_lambda_stays_within_its_bounds_and_goes_on_from_its_state(costs, rule):
    whole, parts = (Lagrangian(rule=rule, rate=0.3) for _ in range(2))
    for i, cost in enumerate(costs):
        if i == len(costs) // 2:
            parts, first = Lagrangian(rule=rule, rate=0.3), parts
            parts.load_state(json.loads(json.dumps(first.state())))
        for one in (whole, parts):
            one.move(cost)
        assert 1e-4 * (1 - 1e-9) <= whole.value <= 5 * (1 + 1e-9)
    assert parts.state() == whole.state()


BAD = [{"rule": "sgined"}, {"start": 9.0}, {"rate": 0.0}, {"bounds": (0.0, 5.0)}, {"threshold": math.inf}]


test_what_is_refused = refused(
    *((lambda bad=bad: Lagrangian(**bad), ValueError, f"{next(iter(bad))}=") for bad in BAD),
    (lambda: Lagrangian().load_state({"beta": 1.0}), ValueError, "beta"),
    (lambda: Lagrangian().load_state({"log_lambda": 99.0, "ema": 0.0, "steps": 3}), ValueError, "bounds"),
    (lambda: Objective(_length, _harm, -1.0), ValueError, "lam=-1"),
    *(
        (lambda bad=bad: Objective(lambda p, r: bad, _harm)(["a", "b"], ["x", "y"]), ValueError, "2 responses")
        for bad in ([1.0], [1.0, math.nan], [[1.0], [2.0]])
    ),
    (lambda: safety.prompt(Problem("x")), ValueError, "tokenizer"),
    (lambda: safety.quadrants([], []), ValueError, "one at least"),
    (lambda: safety.reward([], []), TypeError, "Objective"),
    (lambda: safety.load_public("tset"), ValueError, "'tset'"),
)


def test_the_trainer_moves_the_multiplier_by_the_mean_cost_of_the_step():
    rewards = Rewards(ConstrainedObjective(_length, _harm, Lagrangian(rate=0.1)), floor=-9.0)
    texts = ["a bomb", "a cake", "a bomb", "a bomb"]
    scored = rewards(["p"] * 4, texts, [[0]] * 4, {"request": ["x"] * 4})
    assert scored.rewards == pytest.approx([0.6 - 1, 0.6 + 1, 0.6 - 1, 0.6 - 1])
    rewards.end_of_step([scored.metrics])
    (state,) = rewards.state().values()
    assert state["log_lambda"] == pytest.approx(0.1 * 1.0 * 0.5)
    with pytest.raises(ValueError, match="no cost was logged"):
        rewards.end_of_step([{}])


def test_quadrants_sum_to_one_and_move_with_the_cut():
    rng = np.random.default_rng(0)
    rewards, costs = rng.normal(size=500), rng.normal(size=500)
    shares = [safety.quadrants(rewards, costs, cut) for cut in (-1, 0, 1)]
    assert all(sum(each.values()) == pytest.approx(1) for each in shares)
    helpful = [each["safe and helpful"] for each in shares]
    assert helpful == sorted(helpful, reverse=True)
