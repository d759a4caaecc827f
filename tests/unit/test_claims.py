"""Verdicts from hand-built records: each kind of rule, each verdict, each refusal."""

import copy
from pathlib import Path

import numpy as np
import pytest
import yaml

from evoalign_lib import claims
from evoalign_lib.claims import Finding, evaluate
from evoalign_lib.stats import Interval, pack_bits, pack_counts

PROBLEMS = 40
DECLARED = {claim["id"]: claim for claim in claims.load_claims()}


def _run(base: str, right: int, arm: str | None = "es", seed: int | None = 0, **spec: object) -> dict:
    """A record whose model solves the first `right` of the problems greedily, and none when sampled."""
    bits = [1] * right + [0] * (PROBLEMS - right)
    spec = {"base": base, "base_digest": f"digest of {base}", "scale": "tiny", "sigma": 0.003} | spec
    spec |= (
        {"kind": "base"}
        if arm is None
        else {"kind": "train", "task": "countdown", "arm": arm, "seed": seed, "steps": 100}
    )
    test = {"n": PROBLEMS, "greedy_bits": pack_bits(bits), "t1_counts": pack_counts([0] * PROBLEMS)}
    return {"spec": spec, "status": "finished", "test": test}


def _world(gains: dict[str, int], seeds: int = 8) -> list[dict]:
    """Bases and shuffled runs that solve 10 problems, ES runs that solve 10 + gain, one more or less by seed."""
    records = []
    for base, gain in gains.items():
        records.append(_run(base, 10, arm=None))
        for seed in range(seeds):
            records.append(_run(base, 10 + gain + seed % 3 - 1, seed=seed))
            records.append(_run(base, 10, "es_shuffled", seed))
    return records


def _estimators(cosine: float, aligned: float, orthogonal: float, repeats: int = 8) -> list[dict]:
    """Estimator records; cosines alternate in sign, so that their mean would hide their size."""
    step = DECLARED["E3"]["arms"]["treatment"]
    return [
        {
            "spec": {**step, "repeat": r, "scale": "tiny"},
            "status": "finished",
            "estimator": {
                "cosine": (-1) ** r * (cosine + 0.001 * r),
                "gain_aligned": aligned + 0.001 * r,
                "gain_orthogonal": (-1) ** r * orthogonal,
            },
        }
        for r in range(repeats)
    ]


@pytest.mark.parametrize("claim", ["E1", "E2"])
@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ({"A0": 12, "A1": 12, "A2": 12}, "supported"),
        ({"A0": 12, "A1": 12, "A2": -9}, "contradicted"),
        ({"A0": 12, "A1": 12, "A2": 0}, "underpowered"),
    ],
)
def test_gain_claims(claim: str, gains: dict[str, int], expected: str) -> None:
    # E2 is declared for one base; here it is judged on three, as E1 is
    verdict = evaluate(DECLARED[claim] | {"cells": DECLARED["E1"]["cells"]}, _world(gains))
    assert (verdict.verdict, verdict.n) == (expected, 8)
    assert list(verdict.intervals) == ["A0", "A1", "A2"]
    # seeds add -1, 0, 1, -1, 0, 1, -1, 0 problems: their mean is -1/8
    assert verdict.intervals["A0"].value == pytest.approx((12 - 1 / 8) / PROBLEMS)


def test_the_words_of_a_verdict() -> None:
    decided = evaluate(DECLARED["E1"], _world({"A0": 12, "A1": 12, "A2": 12}))
    assert decided.text.startswith("A0 29.7 [")
    assert "points from 25.0 % (n = 8, detectable" in decided.text
    undecided = evaluate(DECLARED["E1"], _world({"A0": 12, "A1": 12, "A2": 0}))
    assert undecided.text.startswith("the interval does not decide on A2. A0 29.7 [")


def test_too_few_runs_are_named_and_the_interval_is_still_given() -> None:
    verdict = evaluate(DECLARED["E1"], _world({"A0": 12, "A1": 12, "A2": 12})[:-8])
    assert (verdict.verdict, verdict.n) == ("underpowered", 4)
    assert "needs 8 a cell, has A2: 4 of es, 1 of base" in verdict.text
    assert set(verdict.intervals) == {"A0", "A1", "A2"}


def test_a_missing_cell_is_underpowered_and_no_cell_at_all_is_open() -> None:
    verdict = evaluate(DECLARED["E1"], _world({"A0": 12}))
    assert (verdict.verdict, verdict.n) == ("underpowered", 0)
    assert "A1: 0 of es, 0 of base" in verdict.text
    assert evaluate(DECLARED["E1"], []).verdict == "open"
    incomplete = [record | {"status": "incomplete"} for record in _world({"A0": 12})]
    assert evaluate(DECLARED["E1"], incomplete).verdict == "open"


def test_other_scales() -> None:
    assert evaluate(DECLARED["E1"], [], scale="full").verdict == "not testable at this scale"
    smoke = [record | {"spec": record["spec"] | {"scale": "smoke"}} for record in _world({"A0": 12})]
    assert evaluate(DECLARED["E1"], smoke).verdict == "open"


@pytest.mark.parametrize(
    ("cosine", "aligned", "orthogonal", "expected"),
    [
        (0.05, 0.02, 0.01, "supported"),
        (0.30, 0.02, 0.01, "contradicted"),
        (0.05, 0.01, 0.05, "contradicted"),
        (0.0965, 0.02, 0.01, "underpowered"),  # .0965 to .1035: the interval holds the bound .1
    ],
)
def test_estimator_claim(cosine: float, aligned: float, orthogonal: float, expected: str) -> None:
    verdict = evaluate(DECLARED["E3"], _estimators(cosine, aligned, orthogonal))
    assert (verdict.verdict, verdict.n) == (expected, 8)
    assert verdict.intervals["absolute_cosine"].value == pytest.approx(cosine + 0.0035)
    gain = verdict.intervals["aligned_over_orthogonal_gain"]
    assert gain.value == pytest.approx(aligned + 0.0035 - orthogonal)


def test_estimator_claim_reads_only_its_population() -> None:
    others = [record | {"spec": record["spec"] | {"N": 8}} for record in _estimators(0.9, 0.0, 1.0)]
    assert evaluate(DECLARED["E3"], others + _estimators(0.05, 0.02, 0.01)).verdict == "supported"
    assert evaluate(DECLARED["E3"], others + _estimators(0.05, 0.02, 0.01, repeats=3)).verdict == "underpowered"


@pytest.mark.parametrize(
    ("low", "high", "margin", "above", "expected"),
    [
        (0.01, 0.05, 0.0, True, "supported"),
        (-0.05, -0.01, 0.0, True, "contradicted"),
        (-0.01, 0.01, 0.0, True, "underpowered"),
        (-0.01, 0.01, 0.02, True, "within margin"),
        (0.01, 0.05, 0.02, True, "underpowered"),
        (0.03, 0.05, 0.02, True, "supported"),
        (-0.05, 0.01, 0.02, True, "contradicted"),  # surely not above the margin
        (-0.05, -0.03, 0.02, False, "supported"),
        (0.03, 0.05, 0.02, False, "contradicted"),
        (-0.01, 0.01, 0.02, False, "within margin"),
    ],
)
def test_decide_one_finding(low: float, high: float, margin: float, above: bool, expected: str) -> None:
    for bound in (0.0, 1.0):
        interval = Interval(bound + (low + high) / 2, bound + low, bound + high, 8)
        finding = Finding("x", 8, "x: 8", interval, bound=bound, side="above" if above else "below")
        assert claims.decide([finding], margin, min_seeds=8)[0] == expected


def test_decide_lets_the_worst_finding_speak() -> None:
    def finding(label: str, low: float, high: float) -> Finding:
        return Finding(label, 8, label, Interval((low + high) / 2, low, high, 8))

    good, tied, unsure, bad = (finding(*f) for f in (("g", 3, 4), ("t", -1, 1), ("u", -1, 4), ("b", -4, -3)))
    assert claims.decide([good, good], 2, 8) == ("supported", "")
    assert claims.decide([good, tied], 2, 8)[0] == "within margin"
    assert claims.decide([good, tied, unsure], 2, 8)[0] == "underpowered"
    assert claims.decide([good, tied, unsure, bad], 2, 8) == ("contradicted", "contradicted on b")


def test_cells_refuse_records_that_do_not_belong_together() -> None:
    world = _world({"A0": 12, "A1": 12, "A2": 12})
    with pytest.raises(ValueError, match="two records of one seed"):
        evaluate(DECLARED["E1"], [*world, _run("A0", 20, seed=3)])
    with pytest.raises(ValueError, match="runs differ in sigma"):
        evaluate(DECLARED["E1"], [*world, _run("A0", 20, seed=9, sigma=0.1)])
    with pytest.raises(ValueError, match="2 records without 'seed'"):
        evaluate(DECLARED["E1"], [*world, _run("A0", 11, arm=None)])
    with pytest.raises(ValueError, match="different bases"):
        evaluate(DECLARED["E1"], [*world[1:], _run("A0", 10, arm=None, base_digest="another")])


def test_the_order_of_the_records_does_not_matter() -> None:
    world = _world({"A0": 5, "A1": 3, "A2": 1})
    shuffled = [world[i] for i in np.random.default_rng(0).permutation(len(world))]
    assert evaluate(DECLARED["E2"], world) == evaluate(DECLARED["E2"], shuffled)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"margn": 1}, "claim E1, claim: unknown key 'margn'"),
        ({"margin": -1}, "margin -1 is negative"),
        ({"min_seeds": 4}, "at least 8"),
        ({"rule": {"kind": "eyeball"}}, "unknown rule kind 'eyeball'; known: interval_above, estimator_bounds"),
        ({"rule": {"kind": "interval_above", "decoding": "greedy", "python": "1"}}, "unknown key 'python'"),
        ({"rule": {"kind": "interval_above"}}, "must declare 'decoding'"),
        ({"rule": {"kind": "estimator_bounds", "below": {"luck": 1}, "above": {}}}, "unknown key 'comparison'"),
        ({"arms": {"treatment": {}}}, "must declare 'comparison'"),
        ({"scales": ["tny"]}, "unknown key 'tny'; known: tiny, full"),
        ({"cells": {"base": ["A0"], "task": ["countdown"]}}, "cells vary one field"),
    ],
)
def test_badly_declared_claims(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(DECLARED["E1"] | change, [])
    assert evaluate(DECLARED["E1"], []).verdict == "open"


def test_unknown_estimator_quantity_and_missing_field() -> None:
    claim = copy.deepcopy(DECLARED["E3"])
    claim["rule"]["below"] = {"luck": 1}
    with pytest.raises(ValueError, match="unknown key 'luck'; known: absolute_cosine"):
        claims.check_claim(claim)
    del claim["source"]
    with pytest.raises(ValueError, match="claim E3 does not declare source"):
        claims.check_claim(claim)


def test_rule_hash_follows_the_rule_and_not_the_note() -> None:
    claim = DECLARED["E1"]
    original = claims.rule_hash(claim)
    assert claims.rule_hash(claim | {"note": "seen once, in passing"}) == original
    assert claims.rule_hash(dict(reversed(claim.items()))) == original
    for change in ({"margin": 0.01}, {"min_seeds": 16}, {"rule": {"kind": "interval_above", "decoding": "t1"}}):
        assert claims.rule_hash(claim | change) != original
    assert evaluate(claim, []).rule_hash == original


def test_the_ledger_is_data(tmp_path: Path) -> None:
    path = tmp_path / "claims.yaml"
    path.write_text(yaml.safe_dump([DECLARED["E1"], DECLARED["E1"]]))
    with pytest.raises(ValueError, match="'E1' is used 2 times"):
        claims.load_claims(path)
    path.write_text("id: E1")
    with pytest.raises(ValueError, match="must be a list"):
        claims.load_claims(path)
    path.write_text("- !!python/object/apply:os.getcwd []")
    with pytest.raises(yaml.YAMLError):
        claims.load_claims(path)


def _ledgers(error: float = 0.0, size: int = 40_000, gzipped: int = 15_000) -> list[dict]:
    """Runs of E4, whose ledgers differ by a few bytes."""
    ledger = {"replay_error": error, "gzip_bytes": gzipped}
    return [_run("A0", 10, seed=seed) | {"ledger": ledger | {"bytes": size + seed}} for seed in range(8)]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "supported"),
        ({"error": 2.0**-149}, "contradicted"),  # the smallest float32 above 0
        ({"size": 60_000}, "contradicted"),
        ({"gzipped": 21_000}, "contradicted"),
    ],
)
def test_the_ledger_claim(changed: dict[str, float], expected: str) -> None:
    verdict = evaluate(DECLARED["E4"], _ledgers(**changed))
    assert (verdict.verdict, verdict.n) == (expected, 8)
    assert verdict.intervals["ledger_bytes_a_step"].value == pytest.approx((changed.get("size", 40_000) + 3.5) / 100)


def test_a_record_without_what_the_rule_asks_for() -> None:
    with pytest.raises(ValueError, match="E4: a record has no 'ledger', of which 'replay_error' is made"):
        evaluate(DECLARED["E4"], [_run("A0", 10, seed=seed) for seed in range(8)])
