"""Tables of notebook 06 that its records alone do not make."""

from evoalign_lib.study.views import low_rank_and_cost as view


def test_the_table_of_speed_reads_the_committed_benchmark():
    table = view.speed_table().set_index(["parameters", "prompts a member"])
    assert list(table.members) == ["256", "6", "256", "6"] and set(table["equal completions"]) == {"100 %"}
    few, many = (table.loc[("4M", prompts), "rank 1"] for prompts in ("1", "128"))
    assert float(few) > 4 > 2 > float(many) > 0.5
