"""Rules "judged" and "laws", on made records whose verdict is known."""

import numpy as np
import pytest
from evoalign_study.claims.decision import decide
from evoalign_study.claims.rules import check_rule, find
from evoalign_study.claims.selection import Evidence

from evoalign_lib.analysis import overoptimisation

JUDGES = ("length 1", "praise 1")
STEPS = [0, 1, 2, 4, 8]


def _spec(arm, judge, seed, **more):
    settings = {"sigma": 0.01, "alpha": 0.02} if arm.startswith("es") else {"learning_rate": 1e-4, "beta": 0.0}
    spec = {"kind": "train", "task": "safety", "base": "C0", "scale": "tiny", "base_digest": "b", "steps": 8}
    return spec | settings | {"arm": arm, "judge": judge, "seed": seed} | more


def _run(arm, judge, seed, gain=3.0, win=0.6, own=0.8, true=0.3, alternative=0.2, template=0.2, kl=16.0, **more):
    """A run whose curves are straight lines of its steps, with a little noise at the end that is the seed's."""
    at, noise = np.linspace(0, 1, len(STEPS)), np.random.default_rng([seed, len(arm)]).normal(0, 0.01)
    curve = {"step": STEPS, "completions": STEPS, "kl": list(kl * at)}
    for d in ("greedy", "t0.6", "t1"):
        curve[f"proxy_{d}"] = list(1 + gain * at)
        curve[f"{judge}_{d}"] = list(0.5 + (own - 0.5) * at + noise * at)
        for other in ("bert", "gpt2", "rule"):
            curve[f"{other}_{d}"] = list(0.5 + (win - 0.5 + noise) * at)
        curve[f"true_{d}"] = list((true + noise) * at)
        curve[f"alternative_{d}"] = list((alternative + noise) * at)
    curve["template_greedy"] = list((template + noise) * at)
    curve |= more
    return {"spec": _spec(arm, judge, seed), "status": "finished", "curve": curve, "spec_hash": f"{arm}{judge}{seed}"}


def _base():
    spec = {"kind": "base", "task": "safety", "base": "C0", "scale": "tiny", "base_digest": "b"}
    return {"spec": spec, "status": "finished", "test": {}, "units": {j: [0.0, 2.0] for j in JUDGES}}


def _claim(**rule):
    arms = {name: {"kind": "train", "task": "safety", "base": "C0", "arm": name} for name in ("es", "grpo")}
    comparisons = [
        {"quantity": "win", "judge": judge, "of": "es", "to": "grpo", "above": 0} for judge in ("bert", "gpt2", "rule")
    ]
    comparisons += [each | {"less": True} for each in comparisons]
    kept = {"kind": "judged", "favours": "es", "gain": 1.0, "there": 6, "decodings": ["greedy", "t1"]}
    found = {"id": "X", "arms": arms, "unit": "seed", "margin": 0, "min_seeds": 8, "cells": {"judge": list(JUDGES)}}
    return found | {"rule": kept | {"comparisons": comparisons} | rule}


def _evidence(es, grpo, *more, seeds=8):
    arms = (("es", es), ("grpo", grpo), *more)
    runs = [_run(arm, judge, seed, **options) for arm, options in arms for judge in JUDGES for seed in range(seeds)]
    return Evidence.of([_base(), *runs], "tiny", resamples=400)


def _verdict(claim, evidence):
    check_rule(claim)
    findings = find(claim, evidence)
    return decide(findings, claim["margin"], claim["min_seeds"])[0], findings


def test_more_wins_under_other_judges_alone_support():
    verdict, findings = _verdict(_claim(), _evidence({"win": 0.7}, {"win": 0.5}))
    assert verdict == "supported" and len(findings) == 12
    # at the level, 1 + 1 * 2.0, two thirds of the way to the end
    assert findings[0].interval.value == pytest.approx(2 / 3 * 0.2, abs=0.01)


def test_runs_that_never_get_there_are_censored_and_counted():
    runs = [_run("es", judge, seed, win=0.7, gain=0.5 if seed < 3 else 3.0) for judge in JUDGES for seed in range(8)]
    runs += [_run("grpo", judge, seed) for judge in JUDGES for seed in range(8)]
    verdict, findings = _verdict(_claim(), Evidence.of([_base(), *runs], "tiny", resamples=100))
    assert verdict == "underpowered" and "5 of 8 runs of es on length 1 get there" in findings[0].context
    assert _verdict(_claim(there=5), Evidence.of([_base(), *runs], "tiny", resamples=100))[0] == "supported"


def _law_claim(**rule):
    kept = {"kind": "laws", "of": "es", "beside": "grpo", "favours": "es", "law": "rl", "about": ["true"], "above": 0.8}
    claim = _claim()
    return claim | {"rule": kept | rule}


def _bent(seed, a=1.0, b=0.5):
    kl = np.linspace(0, 6, len(STEPS)) ** 2 * (1 + 0.05 * seed)
    fit = overoptimisation.Fit("rl", a, b)
    return {"true_t1": list(fit.at(overoptimisation.distance(kl))), "kl": list(kl)}


def test_a_law_that_holds_is_supported_and_a_straight_line_is_not_the_law():
    bent = [_run(arm, j, s) for arm in ("es", "grpo") for j in JUDGES for s in range(8)]
    for run in bent:
        run["curve"] |= _bent(run["spec"]["seed"])
    verdict, findings = _verdict(_law_claim(), Evidence.of([_base(), *bent], "tiny", resamples=200))
    assert verdict == "supported" and findings[0].interval.value > 0.99
    straight = [_run(arm, j, s) for arm in ("es", "grpo") for j in JUDGES for s in range(8)]
    for run in straight:
        kl = np.linspace(0, 6, len(STEPS)) ** 2
        run["curve"] |= {"true_t1": list(np.sqrt(kl)), "kl": list(kl)}
    assert _verdict(_law_claim(above=0.5), Evidence.of([_base(), *straight], "tiny", resamples=200))[0] != "supported"
