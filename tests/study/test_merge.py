"""Models merged from several runs: exactly the weights that a spec names, measured as every run is."""

import itertools

import numpy as np
import pytest
from evoalign_study import sweep, weight_cache
from evoalign_study.kinds.decode import base_specs
from evoalign_study.kinds.weights import merge_specs

from evoalign_lib import tiny

SIZES = {"max_completion_length": 16, "validation_problems": 6, "test_problems": 10, "skill_messages": 12}
SETTINGS = {
    "max_completion_length": 16, "validation_problems": 6, "test_problems": 10, "steps": 2, "prompts_per_step": 4,
    "curve_points": 2, "population_size": 3, "sigma": 0.03, "alpha": 0.01,
}  # fmt: skip
RUNS = [("es", 3)]


@pytest.fixture(scope="module")
def runs(es_runs):
    (found,) = es_runs
    return found


def merged(records, **how):
    return sweep.run(merge_specs(records, SIZES, "tiny", **how), "nb", "commit")


def outcome(record):
    return {name: record["test"][name] for name in ("n", "greedy", "greedy_bits", "t1", "t1_counts")}


def test_one_run_alone_is_the_run(runs):
    found = merged(runs[:1])
    assert outcome(found) == outcome(runs[0])
    assert found["norm"] == pytest.approx(runs[0]["update_norm"], rel=1e-6)
    assert found["kl_policy_base"]["exact_nats_per_token"] > 0
    assert found["skills"].keys() == set(tiny.SKILL_NAMES) and "t0.6_counts" in found["test"]


def test_nothing_of_a_run_is_the_base(runs):
    found = merged(runs, factor=0.0)
    base = sweep.run(
        base_specs(["A0"], {k: v for k, v in SIZES.items() if k != "skill_messages"}, "tiny")[0], "nb", "c"
    )
    assert outcome(found) == outcome(base) and found["norm"] == 0
    assert found["kl_policy_base"]["exact_nats_per_token"] == 0
    assert all(skill["kl"] == 0 for skill in found["skills"].values())
    assert found["skills"]["copy"]["greedy"] == 1  # what the base has learned


def test_lengths_of_means_and_of_what_is_made_as_long(runs):
    masters = [master.astype(np.float64) for master in weight_cache.of_group(weight_cache.group(runs))]
    apart = sum(np.sum((one - other) ** 2) for one, other in itertools.combinations(masters, 2))
    squared = (3 * sum(r["update_norm"] ** 2 for r in runs) - apart) / 9  # of the mean of three, by their distances
    short, long = merged(runs), merged(runs[:1])
    assert short["norm"] == pytest.approx(squared**0.5, rel=1e-5)
    assert short["norm"] < long["norm"]  # walks of their own average to less
    shrunk = merged(runs[:1], as_long_as=runs)
    assert shrunk["norm"] == pytest.approx(short["norm"], rel=1e-6)
    assert merged(runs, factor=2.0)["norm"] == pytest.approx(2 * short["norm"], rel=1e-6)
    random, again, other = (merged(runs, draw=draw) for draw in (0, 0, 1))
    assert random["norm"] == pytest.approx(short["norm"], rel=1e-6)
    comparable = [{k: v for k, v in r.items() if k in ("norm", "test", "skills")} for r in (random, again, other)]
    assert comparable[0] == comparable[1] != comparable[2]


def test_what_makes_no_group_is_refused(runs):
    other = {**runs[1], "spec": runs[1]["spec"] | {"sigma": 0.02}}
    for records in ([], [runs[0], other], [{**runs[0], "spec": runs[0]["spec"] | {"kind": "base"}}]):
        with pytest.raises(ValueError, match="differ in their seeds alone"):
            merge_specs(records, SIZES, "tiny")
    with pytest.raises(ValueError, match="factor=nan"):
        merge_specs(runs, SIZES, "tiny", factor=float("nan"))
    with pytest.raises(ValueError, match="needs the setting 'skill_messages'"):
        merge_specs(runs, {k: v for k, v in SIZES.items() if k != "skill_messages"}, "tiny")
    elsewhere = {**runs[1], "spec": runs[1]["spec"] | {"base": "A1"}}
    with pytest.raises(ValueError, match="runs from base 'A1' for runs from 'A0'"):
        merge_specs(runs[:1], SIZES, "tiny", as_long_as=[elsewhere])


def test_weights_that_are_not_the_records_are_never_merged(runs):
    forged = {**runs[0], "digest": "0" * 16}
    with pytest.raises(ValueError, match="Nothing is measured on other weights"):
        merged([forged])
