"""Tables of notebook 06 that its records alone do not make."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
from evoalign_study.records import pack_bits, pack_counts
from evoalign_study.views import low_rank_and_cost as view

from evoalign_lib.analysis.stats import Interval


def test_the_table_of_speed_reads_the_committed_benchmark():
    table = view.speed_table().set_index(["parameters", "prompts a member"])
    assert list(table.members) == ["256", "6", "256", "6"] and set(table["equal completions"]) == {"100 %"}
    few, many = (table.loc[("4M", prompts), "rank 1"] for prompts in ("1", "128"))
    assert float(few) > 4 > 2 > float(many) > 0.5


def test_a_quantised_base_is_shown_over_itself_and_over_the_base_as_it_is_loaded():
    def tested(right: int) -> dict:
        counts = pack_counts([16] * right + [0] * (8 - right))
        return {
            "n": 8,
            "greedy_bits": pack_bits([1] * right + [0] * (8 - right)),
            "t1_counts": counts,
            "t0.6_counts": counts,
        }

    def run(right: int, loaded: int) -> dict:
        return {"spec": {"arm": "essa"}, "test": tested(right), "over_loaded": tested(loaded)}

    of = {"precision=int8": [run(8, 4), run(4, 0)], "random precision=int8": [run(1, 0)]}
    (row,) = view.precisions_table(
        of, SimpleNamespace(engine="local", precisions=["int8"], temperatures=[0.6])
    ).to_dict("records")
    assert row["test, greedy, %"].startswith("75.0 [") and row["test, t0.6, %"] == row["test, t1, %"]
    assert (row["greedy, over float32, %"], row["random fitness, greedy, %"]) == ("25.0", "12.5")
    assert (row["base in"], row["seeds"]) == ("int8", "2, 1")


def test_what_only_the_local_engine_runs_is_said_to_be_left_out():
    run = SimpleNamespace(engine="vllm", precisions=["int8", "int4"])
    rows = view.precisions_table({}, run).to_dict("records")
    assert [row["base in"] for row in rows] == ["int8", "int4"]
    assert {row["runs"] for row in rows} == {"none: only the local engine has bases of another precision"}
    assert view._precisions_in_words({}, run).startswith("Not run: only the local engine")


def _searched(start: float, end: float, flops: tuple[float, float], **spec: object) -> dict:
    curve = {"completions": [0, 100, 10_000], "core_seconds": [1.0, 2.0, 8.0]}
    curve |= {"forward_flops": [flops[0], flops[1] / 10, flops[1]], "validation_greedy": [start, start, end]}
    tested = {"n": 4, "greedy_bits": pack_bits([1, 0, 0, 0]), "t1_counts": pack_counts([16, 0, 0, 0])}
    return {"spec": {"arm": "essa", "lora_rank": 8} | spec, "curve": curve, "test": tested}


def test_arms_are_compared_after_what_the_cheapest_run_spent():
    of = {
        "adapter 8": [_searched(0.1, 0.3, (2e12, 8e12))] * 2,
        "grpo_lora, start=cold": [_searched(0.2, 0.4, (1e12, 80e12), arm="grpo_lora")] * 2,
    }
    essa, grpo = view.equal_table(of, list(of)).to_dict("records")
    assert essa["arm"] == "ESSA, adapter of rank 8" and grpo["arm"] == "GRPO, adapter of rank 8, cold"
    key = "after 8e12 forward FLOPs, % [95 %]"
    assert essa[key].startswith("30.0 [") and grpo[key].startswith("20.0 [")
    assert grpo["after 10 thousand completions, % [95 %]"].startswith("40.0 [")


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ({"arm": "es"}, "ES, full rank"),
        ({"arm": "es_random"}, "ES, random fitness"),
        ({"arm": "es_low_rank_random", "rank": 4}, "ES, rank 4, random fitness"),
        ({"arm": "es_lora_random", "lora_rank": 8, "warm_rows": 64}, "ES, adapter of rank 8, warm, random fitness"),
        ({"arm": "es_lora", "lora_rank": 8}, "ES, adapter of rank 8, cold"),
        ({"arm": "essa", "lora_rank": 8, "warm_rows": 64}, "ESSA, adapter of rank 8"),
        ({"arm": "grpo"}, "GRPO"),
    ],
)
def test_a_name_says_what_is_searched_from_where_and_by_what(spec, name):
    assert view.name({"runs": [{"spec": spec}]}, "runs") == name


def test_a_run_whose_warm_start_or_first_measured_steps_cost_more_has_no_score_yet():
    of = {
        "adapter 8": [_searched(0.1, 0.3, (9e12, 10e12))] * 2,
        "grpo": [_searched(0.2, 0.4, (0, 8e12), arm="grpo")] * 2,
        "es": [_searched(0.2, 0.4, (0, 8e12), arm="es"), _searched(0.2, 0.4, (0, 100e12), arm="es")],
    }
    essa, grpo, es = view.equal_table(of, list(of)).to_dict("records")
    key = "after 8e12 forward FLOPs, % [95 %]"
    assert essa[key] == es[key] == "no score yet" and grpo[key].startswith("40.0 [")


def test_groups_are_held_against_each_other_and_grpo_moves_its_adapter():
    run = _searched(0.1, 0.3, (1.0, 2.0)) | {"d": 7168}
    run["budget"] = dict.fromkeys(view.AXES, 10.0)
    worse = run | {"test": {"n": 4, "greedy_bits": pack_bits([0, 0, 0, 0]), "t1_counts": pack_counts([16, 0, 0, 0])}}
    of = {
        "adapter 8": [run] * 2,
        "grpo_lora, start=warm": [worse | {"spec": run["spec"] | {"arm": "grpo_lora", "warm_rows": 8}, "d": 140_928}]
        * 2,
    }
    (row,) = view.differences_table(of, [("adapter 8", "grpo_lora, start=warm")]).to_dict("records")
    assert row["arms"] == "ESSA, adapter of rank 8 - GRPO, adapter of rank 8, warm" and row["seeds"] == "2, 2"
    assert row["greedy, points [95 %]"].startswith("25.0 [") and row["temperature 1, points [95 %]"].startswith("0.0 [")
    moved = view.costs_table(of, list(of)).set_index("arm")["parameters moved"]
    assert set(moved) == {"7,168"}


def test_what_a_larger_warm_start_gives_is_split_into_start_and_search():
    run = SimpleNamespace(warm_shares=[8, 32])
    of = {f"warm start {n}": [_searched(n / 100, 0.4, (n, 100.0))] * 2 for n in run.warm_shares}
    of |= {f"random warm start {n}": [_searched(n / 100, 0.0, (n, n + 1.0))] * 2 for n in run.warm_shares}
    few, many = view.shares_table(of, run).to_dict("records")
    assert (few["of the most"], few["of a run's FLOPs"], few["start, %"]) == ("25 %", "8.0 %", "8.0")
    assert few["search adds [95 %]"].startswith("32.0 [") and many["of the most"] == "100 %"
    assert many["random fitness adds [95 %]"].startswith("-32.0 [") and many["seeds"] == "2, 2"


def test_numbers_quote_intervals_of_verdicts_and_leave_out_what_is_not_judged():
    judged = SimpleNamespace(intervals={"ESSA rank 4 - ESSA rank 32, test greedy": Interval(-0.026, -0.039, -0.014, 8)})
    found = view.numbers(defaultdict(lambda: SimpleNamespace(intervals={}), C13=judged))
    assert {name: format(value, form) for name, (value, form) in found.items()} == {
        "CostRankFourValue": "-2.6",
        "CostRankFourLow": "-3.9",
        "CostRankFourHigh": "-1.4",
    }
