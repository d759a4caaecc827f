"""Tournaments of models that were trained on one judge."""

import json

import numpy as np
import pytest
from evoalign_study.kinds import judged as tournament
from evoalign_study.kinds import train
from evoalign_study.measures import safety
from evoalign_study.records import MAX_RECORD, spec_hash

SETTINGS = {"task": "safety", "judge": "praise 1", "max_completion_length": 16, "validation_problems": 4}
SETTINGS |= {"test_problems": 12, "curve_points": 3, "steps": 2, "prompts_per_step": 4}
OWN = {
    "es": {"population_size": 4, "sigma": 0.05, "alpha": 0.2},
    "es_random": {"population_size": 4, "sigma": 0.05, "alpha": 0.2},
}


@pytest.fixture(scope="module")
def runs():
    """Two runs of each of two arms, with the digests of their weights."""
    found = {}
    for arm, own in OWN.items():
        specs = train.train_specs(arm, ["C0"], [0, 1], SETTINGS | own, "tiny")
        found[arm] = [train.run(spec) | {"spec": spec, "spec_hash": spec_hash(spec)} for spec in specs]
    return found


def test_every_run_plays_the_base_and_the_runs_of_its_seed(runs):
    spec = tournament.tournament_spec(runs, SETTINGS, "tiny")
    record = tournament.run(spec)
    # each of the four runs plays the base, and the two arms meet at two seeds
    assert record["games"] == 6 * 12 and len(json.dumps(record | {"spec": spec})) < MAX_RECORD
    assert list(record["judges"]) == list(safety.JUDGES)
    for said in record["judges"].values():
        assert list(said["wins"]) == list(runs) and all(0 <= x <= 1 for each in said["wins"].values() for x in each)
    for of_player in record["sides"].values():
        assert list(of_player) == ["rule", "praise 1"]
        assert all(sum(shares) == pytest.approx(1, abs=1e-3) for shares in of_player.values())
    assert set(record["sides"]) == {"base", *runs}


def test_strengths_are_those_of_the_games():
    """ES wins three of four games against the base and all ties are half a win; the other arm wins one of four."""
    spec = {"arms": {"es": {"seeds": [0, 1]}, "sft": {"seeds": [0, 1]}}}
    games = [(seed, pair) for pair in (("base", "es"), ("base", "sft"), ("es", "sft")) for seed in (0, 1)]
    lost, won, even = [0, 0, 0, 1], [1, 1, 1, 0], [0.5, 0.5, 1, 0]
    told = tournament._told(spec, games, np.array([lost, lost, won, won, even, even], float))
    assert told["wins"] == {"es": [0.625, 0.625], "sft": [0.375, 0.375]}
    es, sft = (told["strengths"][arm][0] for arm in ("es", "sft"))
    assert es == pytest.approx(-sft, abs=0.2) and 0 < es < 191  # held back by its even games with the weaker arm
    assert told["lead"]["requests"][0] == pytest.approx(es - sft, abs=0.2)
    low, high = told["lead"]["seeds"][1:]
    assert low == high == told["lead"]["seeds"][0]  # both seeds played alike


def test_strengths_that_are_not_finite_are_none():
    spec = {"arms": {"es": {"seeds": [0]}, "sft": {"seeds": [0]}}}
    games = [(0, pair) for pair in (("base", "es"), ("base", "sft"), ("es", "sft"))]
    told = tournament._told(spec, games, np.array([[0, 0], [0, 1], [1, 1]], float))
    assert told["strengths"] is told["lead"] is None and told["wins"]["es"] == [1.0]


def test_runs_that_do_not_belong_together_are_refused(runs):
    with pytest.raises(ValueError, match="a tournament of es: give the runs of two arms"):
        tournament.tournament_spec({"es": runs["es"]}, SETTINGS, "tiny")
    with pytest.raises(ValueError, match="base and judge .'C0', 'praise 1'.*'length 2'"):
        tournament.tournament_spec(runs, SETTINGS | {"judge": "length 2"}, "tiny")
    with pytest.raises(ValueError, match="give at least one run|make no group"):
        tournament.tournament_spec({"es": runs["es"], "es_random": []}, SETTINGS, "tiny")
