"""The table of arms: what it must hold of every arm, and how it refuses a name that it does not know."""

import pytest
from helpers import refused

from evoalign_lib import arms


@pytest.mark.parametrize("name", arms.ARMS)
def test_every_arm_is_complete(name):
    arm = arms.get(name)
    assert arm.settings and arm.label and arm.marker and arm.color.startswith("#")
    assert arm.sweep is None or set(arms.swept(name)) <= set(arm.settings)


def test_nulls_are_told_apart_by_what_they_are_trained_on():
    """A null is trained on something other than the task's reward, and nothing else is."""
    for name, arm in arms.ARMS.items():
        informed = arm.reward == "task" and arm.options.get("fitness", "reward") == "reward"
        assert arm.null != informed, name


test_an_unknown_arm_is_refused = refused(  # none is taken for another by its spelling
    *((call, name, f"'{name}'") for call in (arms.get, arms.swept) for name in ("grppo", "esx", "base")),
    (arms.swept, "sft", "'sft'"),
    call=lambda function, name: function(name),
)


def test_a_sweep_is_ranked_by_the_end_of_its_curves():
    def run(arm, sigma, *points):
        setting = {"sigma": sigma, "alpha": 0.1}
        return {"spec": {"arm": arm} | setting, "curve": {"validation_greedy": list(points)}}

    sweep = [run("es", 1, 0.9, 0.1, 0.1, 0.1), run("es_sampled", 2, 0, 0.2, 0.3, 0.4), run("es", 3, 0, 0.2, 0.3, 0.4)]
    assert [setting["sigma"] for _, setting in arms.ranked(sweep)] == [2, 3, 1]
    assert arms.ranked(sweep)[0] == (pytest.approx(0.3), {"sigma": 2, "alpha": 0.1})
