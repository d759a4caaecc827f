"""Tables of notebook 06 that its records alone do not make."""

from collections import defaultdict
from types import SimpleNamespace

from evoalign_lib.analysis.stats import Interval
from evoalign_lib.records import pack_bits, pack_counts
from evoalign_lib.study.views import low_rank_and_cost as view


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
    (row,) = view.precisions_table(of, SimpleNamespace(precisions=["int8"], temperatures=[0.6])).to_dict("records")
    assert row["test, greedy, %"].startswith("75.0 [") and row["test, t0.6, %"] == row["test, t1, %"]
    assert (row["greedy, over float32, %"], row["random fitness, greedy, %"]) == ("25.0", "12.5")
    assert (row["base in"], row["seeds"]) == ("int8", "2, 1")


def test_numbers_quote_intervals_of_verdicts_and_leave_out_what_is_not_judged():
    judged = SimpleNamespace(intervals={"ESSA rank 4 - ESSA rank 32, test greedy": Interval(-0.026, -0.039, -0.014, 8)})
    found = view.numbers(defaultdict(lambda: SimpleNamespace(intervals={}), C13=judged))
    assert {name: format(value, form) for name, (value, form) in found.items()} == {
        "CostRankFourValue": "-2.6",
        "CostRankFourLow": "-3.9",
        "CostRankFourHigh": "-1.4",
    }
