"""Tricks of ES: which setting is tested, and that their schedules reach the trainer."""

import pytest
from evoalign_study import es_tricks, evolution
from evoalign_study.claims import selection
from evoalign_study.kinds.train import train_specs
from evoalign_study.records import pack_bits
from helpers import SMALL_RUN


def test_the_setting_that_is_right_most_often_at_the_end_is_tested():
    curves = ([0.9, 0.1, 0.1, 0.1], [0, 0.2, 0.3, 0.4], [0, 0.2, 0.3, 0.4])
    trials = [{"spec": {"arm": "es", "sigma": 0, "alpha": 0}, "curve": {"validation_greedy": each}} for each in curves]
    assert es_tricks.chosen(trials, [{"alpha": 1}, {"alpha": 2}, {"alpha": 3}]) == {"alpha": 2}
    right = ([[1, 1], [0, 0], [0, 0]], [[1, 1], [0, 0], [1, 0]])  # at factors 0, 1 and 2, for each alpha
    paths = [{"n": 2, "points": {"greedy_bits": [pack_bits(bits) for bits in each]}} for each in right]
    assert es_tricks.best_mean(paths) == {"alpha": 0.01, "factor": 2}


@pytest.mark.parametrize("own", [{}, {"sigma_schedule": "linear"}])
def test_schedules_reach_the_trainer(own):
    (spec,) = train_specs("es_scheduled", ["A0"], [0], SMALL_RUN | {"alpha_schedule": "linear"} | own, "smoke")
    found = evolution.configuration(spec)
    assert (found.alpha_schedule, found.sigma_schedule) == ("linear", own.get("sigma_schedule", "constant"))


def test_means_of_runs_of_one_setting_are_replicates():
    means = [{"spec": {"seed": i, "of": {"run": {"alpha": 1}, "seeds": [i], "digests": [f"{i}"]}}} for i in range(2)]
    selection.check_alike("means", means, ["seed"])
