"""Tournaments of models that were trained on one judge; the published completions, read again."""

import json

import numpy as np
import pytest
from evoalign_study import kinds
from evoalign_study.kinds import judged
from evoalign_study.measures import safety
from evoalign_study.records import MAX_RECORD, unpack_bits
from helpers import SMALL_RUN

BASE = "C0"
SETTINGS = SMALL_RUN | {"task": "safety", "judge": "praise 1", "validation_problems": 4, "test_problems": 0, "steps": 1}
SETTINGS |= {"curve_points": 2, "population_size": 4, "sigma": 0.05, "alpha": 0.2}
PLAYED = SETTINGS | {"test_problems": 12}
RUNS = [("es", 2), ("es_random", 2)]


@pytest.fixture(scope="module")
def runs(es_runs):
    return dict(zip(("es", "es_random"), es_runs, strict=True))


def test_every_run_plays_the_base_and_the_runs_of_its_seed(runs):
    spec = judged.tournament_spec(runs, PLAYED, "tiny")
    record = judged.run_tournament(spec)
    # each of the four runs plays the base, and the two arms meet at two seeds
    assert record["games"] == 6 * 12 and len(json.dumps(record | {"spec": spec})) < MAX_RECORD
    assert list(record["judges"]) == list(safety.JUDGES) and set(record["sides"]) == {"base", *runs}
    for said in record["judges"].values():
        assert list(said["wins"]) == list(runs) and all(0 <= x <= 1 for each in said["wins"].values() for x in each)
    for shares in record["sides"].values():
        assert list(shares) == ["rule", "praise 1"]
        assert [sum(each) for each in shares.values()] == pytest.approx([1, 1], abs=1e-3)


PAIRS = (("base", "es"), ("base", "sft"), ("es", "sft"))


def test_strengths_are_those_of_the_games():
    """ES wins three of four games against the base and all ties are half a win; the other arm wins one of four."""
    spec = {"arms": {"es": {"seeds": [0, 1]}, "sft": {"seeds": [0, 1]}}}
    lost, won, even = [0, 0, 0, 1], [1, 1, 1, 0], [0.5, 0.5, 1, 0]
    outcomes = np.array([lost, lost, won, won, even, even], float)
    told = judged._told(spec, [(seed, pair) for pair in PAIRS for seed in (0, 1)], outcomes)
    assert told["wins"] == {"es": [0.625, 0.625], "sft": [0.375, 0.375]}
    es, sft = (told["strengths"][arm][0] for arm in ("es", "sft"))
    assert es == pytest.approx(-sft, abs=0.2) and 0 < es < 191  # held back by its even games with the weaker arm
    assert told["lead"]["requests"][0] == pytest.approx(es - sft, abs=0.2)
    assert len(set(told["lead"]["seeds"])) == 1  # both seeds played alike
    # strengths that are not finite are none
    one = {"arms": {"es": {"seeds": [0]}, "sft": {"seeds": [0]}}}
    told = judged._told(one, [(0, pair) for pair in PAIRS], np.array([[0, 0], [0, 1], [1, 1]], float))
    assert told["strengths"] is told["lead"] is None and told["wins"]["es"] == [1.0]


def test_runs_that_do_not_belong_together_are_refused(runs):
    for given, settings, named in (
        ({"es": runs["es"]}, PLAYED, "tournament of es"),
        (runs, PLAYED | {"judge": "length 2"}, "'praise 1'.*'length 2'"),
        (runs | {"es_random": []}, PLAYED, "0 runs"),
    ):
        with pytest.raises(ValueError, match=named):
            judged.tournament_spec(given, settings, "tiny")


def test_the_analysis_of_published_completions_reproduces_their_rewards(external_data):
    if not (external_data / "conciseness_completions").is_dir():
        pytest.skip("EVOALIGN_DATA has no released completions")
    records = [kinds.get("published")(spec) | {"spec": spec} for spec in judged.published_specs("tiny")]
    assert len(records) == 32 and sum(r["completions"] for r in records) == 5120
    for r in records:
        assert r["reproduced"] == r["completions"] == 160 and abs(r["reward"]["released"] - r["recorded"]) < 1e-4
        assert r["changed"] == 0 or r["reward"]["strict"] != r["reward"]["released"]
        assert unpack_bits(r["right_bits"], 160).mean() == pytest.approx(r["right"]) and len(r["shown"]) == 8
    silent = [(r["spec"]["set"], r["spec"]["seed"]) for r in records if r["all_empty"]]
    assert silent == [("ES_alpha0.001_sigma0.005", 1), ("GRPO_temp_0.7_beta0.0", 0), ("GRPO_temp_0.7_beta0.0464", 3)]
