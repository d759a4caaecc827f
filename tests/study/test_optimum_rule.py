"""Rules "optimum" and "reach", on made records whose optimum, and completions to a gain, are known."""

from itertools import product

import numpy as np
import pytest
from claim_worlds import DECLARED, decided
from evoalign_study.claims import placebos
from evoalign_study.claims.selection import Evidence
from hypothesis import given, settings
from hypothesis import strategies as st

from evoalign_lib.analysis.curves import minimum

LEVELS = [8, 16, 32, 64, 128, 256]


def _run(population, seed, needed, arm="essa", end=0.24, points=12):
    """A run that starts at 14 %, climbs in the logarithm of completions, and is right in `end` of cases at `needed`."""
    drawn = np.append(0, np.geomspace(100, 144_000, points - 1)).round()
    noise = np.random.default_rng([seed, population]).normal(0, 0.1)
    climb = np.log(np.maximum(drawn, 1)) / (np.log(needed) + noise)
    spec = {"kind": "train", "task": "countdown", "base": "A0", "scale": "tiny", "base_digest": "b", "arm": arm}
    spec |= {"population_size": population, "seed": seed, "sigma": 0.1, "leading_share": 1.0, "curve_points": points}
    curve = {"completions": list(drawn), "validation_greedy": list(0.14 + (end - 0.14) * np.minimum(climb, 1))}
    return {"spec": spec, "status": "finished", "curve": curve}


def _world(best, seeds=8, end=0.24, nulls=0, null_end=0.14):
    """Runs that need the fewest completions at a population of `best`, four times as many four octaves away."""
    needed = {n: 8_000 * 4 ** ((np.log2(n / best) / 4) ** 2) for n in LEVELS}
    runs = [_run(n, seed, needed[n], end=end) for n in LEVELS for seed in range(seeds)]
    runs += [_run(n, seed, 8_000, "essa_random", null_end, 3) for n in LEVELS for seed in range(nulls)]
    base = {"kind": "base", "task": "countdown", "base": "A0", "scale": "tiny", "base_digest": "b"}
    return [{"spec": base, "status": "finished", "test": {}}, *runs]


def _claim(**rule):
    searched = {"kind": "train", "task": "countdown", "base": "A0", "arm": "essa"}
    return DECLARED["C12"] | {"arms": {"searched": searched}, "rule": DECLARED["C12"]["rule"] | rule}


def test_an_optimum_inside_supports_and_one_outside_contradicts():
    assert decided(_claim(), _world(192))[0] == "supported"
    assert decided(_claim(), _world(24))[0] == "contradicted"
    assert decided(_claim(between=[8, 64]), _world(192))[0] == "contradicted"
    assert decided(_claim(), _world(192, end=0.15))[0] == "contradicted"  # what was not learned has no optimum
    # too few seeds, and none, have none either
    assert decided(_claim(), _world(192, seeds=5))[0] == "underpowered"
    assert decided(_claim(), _world(192, seeds=0))[0] == "open"


def test_each_level_needs_runs_that_get_there_if_the_rule_says_so():
    stuck = [_run(8, seed, 8_000, end=0.2) for seed in range(8)]
    world = stuck + [record for record in _world(192) if record["spec"].get("population_size") != 8]
    assert decided(_claim(there=6), _world(192))[0] == decided(_claim(), world)[0] == "supported"
    verdict, findings = decided(_claim(there=6), world)
    assert verdict == "underpowered" and "of 8 a level get there 0 with 8" in findings[0].context


def test_random_fitness_is_asked_and_fails_unless_it_learns():
    for end, passes in ((0.14, False), (0.3, True)):
        evidence = Evidence.of(_world(192, nulls=4, null_end=end), "tiny", resamples=300)
        (asked,) = (placebo for placebo in placebos.ask(_claim(), evidence) if placebo.null == "essa_random")
        assert asked.passed == passes


@settings(max_examples=20)
@given(st.floats(8, 256), st.floats(0.05, 3))
def test_the_minimum_of_a_parabola_is_found(best, curvature):
    levels = np.array(LEVELS, float)
    needed = [np.array([2.0 ** (10 + curvature * np.log2(n / best) ** 2)]) for n in levels]
    assert minimum(levels, needed) == pytest.approx(best, rel=1e-3)


CENSORED = [((1e6, 1e4, 1e4), "supported"), ((1e5, 1e6, 1e5), "underpowered"), ((1e6, 1e6, 1e4), "underpowered")]
CENSORED += [((1e5, 1e6, 1e4), "contradicted")]  # never reached, which only makes the ratio larger


@pytest.mark.parametrize(("needed", "verdict"), CENSORED)
def test_a_censored_run_bounds_the_ratio_of_completions_from_one_side(needed, verdict):
    """needed: of ES in the dense and in the sparse cell, and of GRPO in the sparse one."""
    runs, claim, (dense, sparse, grpo) = [], DECLARED["E23"], needed
    for base, pair in zip(claim["cells"]["base"], ((dense, 1e4), (sparse, grpo)), strict=True):
        for arm, seed in product(claim["arms"], range(8)):
            run = _run(30, seed, pair[arm == "grpo"] ** (1 / 0.3), arm)
            run["curve"]["validation_t1"] = run["curve"]["validation_greedy"]
            named = {"base": base, "seed": seed, "scale": "tiny", "base_digest": base}
            runs.append(run | {"spec": claim["arms"][arm] | named})
    assert decided(claim, runs)[0] == verdict
