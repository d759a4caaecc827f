"""Rule "optimum", on made records whose optimum is known."""

import numpy as np
import pytest
from evoalign_study.claims import placebos
from evoalign_study.claims.judgement import decide
from evoalign_study.claims.rules import RULES, check_rule
from evoalign_study.claims.selection import Evidence
from hypothesis import given
from hypothesis import strategies as st

from evoalign_lib.analysis.curves import minimum, spent_until

LEVELS = [8, 16, 32, 64, 128, 256]


def _run(population, seed, needed, arm="essa", end=0.24, points=12):
    """A run that starts at 14 %, climbs in the logarithm of completions, and is right in `end` of cases at `needed`."""
    drawn = np.append(0, np.geomspace(100, 144_000, points - 1)).round()
    noise = np.random.default_rng([seed, population]).normal(0, 0.1)
    climb = np.log(np.maximum(drawn, 1)) / (np.log(needed) + noise)
    spec = {"kind": "train", "task": "countdown", "base": "A0", "scale": "tiny", "base_digest": "b", "arm": arm}
    spec |= {"population_size": population, "seed": seed, "sigma": 0.1, "leading_share": 1.0, "curve_points": points}
    curve = {"completions": list(drawn), "validation_greedy": list(0.14 + (end - 0.14) * np.minimum(climb, 1))}
    return {"spec": spec, "status": "finished", "curve": curve, "spec_hash": f"{arm} {population} {seed}"}


def _world(best, seeds=8, end=0.24, nulls=0, null_end=0.14):
    """Runs that need the fewest completions at a population of `best`, four times as many four octaves away."""
    needed = {n: 8_000 * 4 ** ((np.log2(n / best) / 4) ** 2) for n in LEVELS}
    runs = [_run(n, seed, needed[n], end=end) for n in LEVELS for seed in range(seeds)]
    runs += [_run(n, seed, 8_000, "essa_random", null_end, 3) for n in LEVELS for seed in range(nulls)]
    base = {"kind": "base", "task": "countdown", "base": "A0", "scale": "tiny", "base_digest": "b"}
    return Evidence.of([{"spec": base, "status": "finished", "test": {}}, *runs], "tiny", resamples=300)


def _claim(**rule):
    searched = {"kind": "train", "task": "countdown", "base": "A0", "arm": "essa"}
    kept = {"kind": "optimum", "share": 0.95, "between": [96, 384], "gain": 0.02}
    found = {"id": "X", "arms": {"searched": searched}, "unit": "seed", "margin": 0, "min_seeds": 8}
    return found | {"cells": {"population_size": LEVELS}, "rule": kept | rule}


def _verdict(claim, evidence):
    check_rule(claim)
    return decide(RULES["optimum"].find(claim, evidence), claim["margin"], claim["min_seeds"])[0]


def test_an_optimum_inside_supports_and_one_outside_contradicts():
    assert _verdict(_claim(), _world(192)) == "supported"
    assert _verdict(_claim(), _world(24)) == "contradicted"
    assert _verdict(_claim(between=[8, 64]), _world(192)) == "contradicted"


def test_an_interval_over_the_bound_does_not_decide():
    world = _world(96)
    found = RULES["optimum"].find(_claim(), world)[0].interval
    assert found.low < found.value < found.high
    assert _verdict(_claim(between=[found.value, 384]), world) == "underpowered"


def test_too_few_seeds_and_none_do_not_either():
    assert _verdict(_claim(), _world(192, seeds=5)) == "underpowered"
    assert _verdict(_claim(), _world(192, seeds=0)) == "open"


def test_what_was_not_learned_has_no_optimum():
    assert _verdict(_claim(), _world(192, end=0.15)) == "contradicted"


def test_random_fitness_is_asked_and_fails_unless_it_learns():
    (failed,) = [p for p in placebos.ask(_claim(), _world(192, nulls=4)) if p.null == "essa_random"]
    assert not failed.passed
    (passed,) = [p for p in placebos.ask(_claim(), _world(192, nulls=4, null_end=0.3)) if p.null == "essa_random"]
    assert passed.passed


@given(st.floats(8, 256), st.floats(0.05, 3))
def test_the_minimum_of_a_parabola_is_found(best, curvature):
    levels = np.array(LEVELS, float)
    needed = [np.array([2.0 ** (10 + curvature * np.log2(n / best) ** 2)]) for n in levels]
    assert minimum(levels, needed) == pytest.approx(best, rel=1e-3)


def test_without_a_minimum_inside_the_better_edge_is_it():
    levels = np.array(LEVELS, float)
    assert minimum(levels, [np.array([1000 / n]) for n in levels]) == 256
    assert minimum(levels, [np.array([1000.0 - (n - 100) ** 2 / 100]) for n in levels]) == 256  # the sides fall


def test_completions_to_a_target_are_read_in_the_logarithm():
    run = [0, 100, 10_000], [0.1, 0.1, 0.3]
    assert spent_until(*run, 0.2) == pytest.approx(1_000)
    assert spent_until(*run, 0.05) == 1 and spent_until(*run, 0.4) == 10_000


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rule": {"share": 1.5}}, "share=1.5 must lie in"),
        ({"rule": {"between": [384, 96]}}, r"between=\[384, 96\] must rise"),
        ({"cells": {"population_size": [8, 16]}}, "three levels at least"),
    ],
)
def test_a_wrong_declaration_is_refused(change, message):
    claim = _claim(**change.get("rule", {})) | {k: v for k, v in change.items() if k != "rule"}
    with pytest.raises(ValueError, match=message):
        check_rule(claim)
