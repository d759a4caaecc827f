"""Rules "judged" and "laws", on made records whose verdict is known."""

import numpy as np
import pytest
from claim_worlds import DECLARED, decided

from evoalign_lib.analysis import overoptimisation

JUDGES = ("length 1", "praise 1")
STEPS = [0, 1, 2, 4, 8]


SHARED = {"task": "safety", "base": "C0", "scale": "tiny", "base_digest": "b"}


def _run(arm, judge, seed, gain=3.0, win=0.6, **more):
    """A run whose curves are straight lines of its steps, with a little noise at the end that is the seed's."""
    at, noise = np.linspace(0, 1, len(STEPS)), np.random.default_rng([seed, len(arm)]).normal(0, 0.01)
    curve = {"step": STEPS, "completions": STEPS, "kl": list(16 * at)}
    for d in ("greedy", "t0.6", "t1"):
        curve[f"proxy_{d}"] = list(1 + gain * at)
        curve[f"{judge}_{d}"] = list(0.5 + (0.3 + noise) * at)
        for other in ("bert", "gpt2", "rule"):
            curve[f"{other}_{d}"] = list(0.5 + (win - 0.5 + noise) * at)
        curve[f"true_{d}"] = list((0.3 + noise) * at)
    curve |= more
    settings = {"sigma": 0.01, "alpha": 0.02} if arm == "es" else {"learning_rate": 1e-4, "beta": 0.0}
    spec = SHARED | {"kind": "train", "steps": 8, "arm": arm, "judge": judge, "seed": seed} | settings
    return {"spec": spec, "status": "finished", "curve": curve}


FOUR = (*JUDGES, "disclaimer 1", "length 2")


def _claim(judges=JUDGES, **rule):
    arms = {name: {"kind": "train", "task": "safety", "base": "C0", "arm": name} for name in ("es", "grpo")}
    kept = DECLARED["C5"]["rule"] | {"also": [], "gain": 1.0} | rule
    return DECLARED["C5"] | {"arms": arms, "cells": {"judge": list(judges)}, "rule": kept}


def _world(es, grpo, judges=JUDGES):
    """Runs of both arms on the judges; options, or a function that gives them by seed, or a mapping by judge."""
    runs = [
        _run(arm, judge, seed, **(options(seed) if callable(options) else options.get(judge, options)))
        for arm, options in (("es", es), ("grpo", grpo))
        for judge in judges
        for seed in range(8)
    ]
    units = {judge: [0.0, 2.0] for judge in judges}
    return [{"spec": SHARED | {"kind": "base"}, "status": "finished", "test": {}, "units": units}, *runs]


def test_more_wins_under_other_judges_alone_support():
    verdict, findings = decided(_claim(), _world({"win": 0.7}, {"win": 0.5}))
    assert verdict == "supported" and len(findings) == 12
    # at the level, 1 + 1 * 2.0, two thirds of the way to the end
    assert findings[0].interval.value == pytest.approx(2 / 3 * 0.2, abs=0.01)


def test_runs_that_never_get_there_are_censored_and_counted():
    records = _world(lambda seed: {"win": 0.7, "gain": 0.5 if seed < 3 else 3.0}, {})
    verdict, findings = decided(_claim(), records, 100)
    assert verdict == "underpowered" and "5 of 8 runs of es on length 1 get there" in findings[0].context
    assert decided(_claim(there=5), records, 100)[0] == "supported"


WINS = {"comparisons": [{"quantity": "win", "judge": "bert", "of": "es", "to": "grpo", "above": 0}]}
OVER_JUDGES = {"judges": FOUR, "min_judges": 4} | WINS


def test_a_verdict_over_judges_is_about_others_like_them():
    mixed = {judge: {"win": win} for judge, win in zip(FOUR, (0.9, 0.85, 0.5, 0.45), strict=True)}
    world = _world(mixed, {"win": 0.5}, FOUR)
    assert decided(_claim(FOUR, **WINS), world)[0] == "supported"  # of these four judges
    verdict, (finding, *_) = decided(_claim(**OVER_JUDGES), world)
    assert verdict == "underpowered" and finding.interval.n == 4 and finding.interval.low < 0
    assert decided(_claim(**OVER_JUDGES), _world({"win": 0.7}, {"win": 0.5}, FOUR))[0] == "supported"


def test_too_few_judges_decide_nothing():
    world = _world({"win": 0.9}, {"win": 0.5}, FOUR)
    for fewer in (_claim(JUDGES, min_judges=4, **WINS), _claim(**OVER_JUDGES, contrast="last - first")):
        verdict, (finding, *_) = decided(fewer, world)
        assert verdict == "underpowered" and finding.interval is None and "4 judges needed" in finding.context
    with pytest.raises(ValueError, match="min_judges 1: declare 4"):
        decided(_claim(**OVER_JUDGES | {"min_judges": 1}), world)


def test_both_ends_of_the_gap_in_which_a_run_comes_to_the_level_must_agree():
    jump = {f"{curve}_{d}": [0.5, 0.5, 0.5, 0.9, 0.9] for curve in ("bert",) for d in ("greedy", "t1")}
    jump |= {f"proxy_{d}": [1, 1.1, 1.2, 9, 9] for d in ("greedy", "t1")}
    # between the points, on the line, other runs win more often; at the point past the level, those that jumped
    verdict, (finding, *_) = decided(_claim(**OVER_JUDGES), _world(jump, {"win": 0.8}, FOUR))
    assert verdict == "underpowered" and finding.interval.low < 0 < finding.interval.high
    assert decided(_claim(FOUR, **WINS), _world(jump, {"win": 0.8}, FOUR))[0] == "contradicted"
    assert all(f" {place} it" in finding.context for place in ("before", "past"))


def _bent(seed):
    kl = np.linspace(0, 6, len(STEPS)) ** 2 * (1 + 0.05 * seed)
    return {"true_t1": list(overoptimisation.Fit("rl", 1.0, 0.5).at(overoptimisation.distance(kl))), "kl": list(kl)}


def test_a_law_that_holds_is_supported_and_a_straight_line_is_not_the_law():
    law = {"kind": "laws", "of": "es", "beside": "grpo", "favours": "es", "law": "rl", "about": ["true"]}
    verdict, findings = decided(_claim() | {"rule": law | {"above": 0.8}}, _world(_bent, _bent), 200)
    assert verdict == "supported" and findings[0].interval.value > 0.99
    kl = np.linspace(0, 6, len(STEPS)) ** 2
    straight = {"true_t1": list(np.sqrt(kl)), "kl": list(kl)}
    assert decided(_claim() | {"rule": law | {"above": 0.5}}, _world(straight, straight), 200)[0] != "supported"
