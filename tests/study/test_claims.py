"""Claims as they are declared, locked and judged; verdicts of E1 to E4 from hand-built records."""

import copy
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml
from evoalign_study import artifacts, claims, paths
from evoalign_study.claims import evaluate
from evoalign_study.claims.findings import Finding
from evoalign_study.records import pack_bits, pack_counts, seal, spec_hash
from typer.testing import CliRunner

from evoalign_lib import cli
from evoalign_lib.analysis.stats import Interval

PROBLEMS = 40
DECLARED = {claim["id"]: claim for claim in claims.load_claims()}


def _run(base: str, right: int, arm: str | None = "es", seed: int | None = 0, **spec: object) -> dict:
    """A record whose model solves the first `right` of the problems greedily, and none when sampled."""
    bits = [1] * right + [0] * (PROBLEMS - right)
    spec = {"base": base, "base_digest": f"digest of {base}", "scale": "tiny", "sigma": 0.003, "alpha": 0.003} | spec
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
    assert "needs 8 a cell, has A2: 4 of ES, 1 of base" in verdict.text
    assert set(verdict.intervals) == {"A0", "A1", "A2"}


def test_a_missing_cell_is_underpowered_and_no_cell_at_all_is_open() -> None:
    verdict = evaluate(DECLARED["E1"], _world({"A0": 12}))
    assert (verdict.verdict, verdict.n) == ("underpowered", 0)
    assert "A1: 0 of ES, 0 of base" in verdict.text
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


def test_the_order_of_the_committed_records_does_not_matter(committed_records: list[dict]) -> None:
    records = committed_records
    shuffled = [records[i] for i in np.random.default_rng(0).permutation(len(records))]
    in_order, other = (claims.evaluate_together(list(DECLARED.values()), r, resamples=20) for r in (records, shuffled))
    assert in_order == other


def test_the_committed_verdicts(committed_verdicts: list[claims.Verdict]) -> None:
    """In full, as the tables have them: every word that a verdict may be, and the rules of before the placebos."""
    found = {verdict.id: verdict for verdict in committed_verdicts}
    assert {verdict.verdict for verdict in committed_verdicts} <= set(claims.VERDICTS)
    assert found["C1"].verdict == "contradicted" and found["C30"].verdict == "within margin"
    assert found["C2"].text.startswith("superseded by C2b; by its own rule contradicted. contradicted on GRPO - ES")
    assert "hacked runs greedy 31.2 [5.4, 55.6] points from 0 of 16 to 5 of 16" in found["C3"].text
    assert found["C3"].verdict == "depends on decoding" and "the decoding: GRPO - ES, hacked runs." in found["C3"].text
    assert "hacked runs temperature 1 -37.5 [-61.1, -7.3] points from 7 of 16 to 1 of 16" in found["C3"].text
    # what compares arms says what became of the order under each other decoding
    compared = {"E1", "E2", "C1", "C3", "C8", "C9", "C9b", "C10", "C11", "C30", "C31", "C33", "C37", "C37b"}
    assert {v.id for v in committed_verdicts if "temperature 1" in v.decodings} >= compared
    assert {"C4", "C29", "C34", "C38", "E3", "E4"} <= {v.id for v in committed_verdicts if not v.decodings}


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


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("C1", {"rule": {"kind": "compare"}}, "rule of kind compare must declare 'comparisons'"),
        ("C1", {"primary": "03"}, "C1 is primary of 03, which is none of its notebooks"),
        ("C1", {"not_testable": {"smoke": "all"}}, "unknown key 'smoke'; known: tiny, full"),
        ("C1", {"arms": {"es": {"arm": "ees"}}}, r"claim C1, arm es: arm 'ees' is not one of .*Did you mean 'es'\?"),
        (
            "C1",
            {"arms": {"es": {"setting": {"best": 3}}}},
            "setting of arm es: unknown key 'best'; known: best_of, base",
        ),
        ("C1", {"arms": {"es": {}, "base": {}}}, "arm 'grpo' of the rule is not declared; declared: es, base"),
        ("C2", {"margin": 0}, "an equivalence lies within the claim's margin: declare a positive one"),
        ("C9", {"cells": {}}, "a rule of kind regret is made over two cells or more"),
        ("C9", {"rule": DECLARED["C9"]["rule"] | {"best": {"best_of": 4}}}, "setting of best must declare 'base'"),
        ("C10", {"rule": DECLARED["C10"]["rule"] | {"trend": ["n8", "n9"]}}, "arm 'n9' of the rule is not declared"),
        (
            "C37",
            {"rule": DECLARED["C37"]["rule"] | {"contrast": "curve"}},
            "unknown contrast 'curve'; known: slope over",
        ),
        ("C15", {"rule": {"kind": "open", "below": {}}}, "rule of kind open: unknown key 'below'"),
        ("C15", {"rule": {"kind": "regret"}}, "C15 does not declare unit, arms, margin, min_seeds"),
    ],
)
def test_badly_declared_rules(name: str, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        claims.check_claim(DECLARED[name] | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"by": "eye"}, "cannot be compared by 'eye'; known: difference, equivalence, spread"),
        ({"below": 0}, "lies above or below a value: declare one of the two"),
        ({"by": "equivalence"}, "an equivalence lies within the claim's margin"),
        ({"p": "fisher"}, "p must be 'mann_whitney'"),
        ({"by": "spread", "p": "mann_whitney"}, "p must be 'mann_whitney', of a difference"),
        ({"measure": {"train": "greedy"}}, "measure: unknown key 'train'; known: test, validation"),
        (
            {"measure": {"test": "beam"}},
            r"declare one of test, validation, .*, under one of the decodings greedy, t0.6, t1",
        ),
        ({"measure": {"test": "greedy", "drawdown": "greedy"}}, r"declare one of test, "),
        ({"measure": {"validation": "greedy", "at_equal": "steps"}}, "unknown budget 'steps'; known: completions"),
        ({"measure": {"validation": "greedy"}}, "validation is measured at_equal or at_mean, got none"),
        (
            {"measure": {"drawdown": "greedy", "at_mean": 0.2}},
            r"drawdown is measured without a place, got \['at_mean'\]",
        ),
        ({"to": "dapo"}, "arm 'dapo' of the rule is not declared"),
        ({"than": "grpo"}, "comparison: unknown key 'than'"),
    ],
)
def test_badly_declared_comparisons(change: dict, message: str) -> None:
    rule = {"kind": "compare", "comparisons": [DECLARED["C31"]["rule"]["comparisons"][0] | change]}
    with pytest.raises(ValueError, match=f"claim C31.*{message}"):
        claims.check_claim(DECLARED["C31"] | {"rule": rule, "margin": 0.02})


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
    assert claims.rule_hash(claim | {"title": "Shorter", "notebooks": ["02"]}) == original
    assert claims.rule_hash(claim | {"caveat": "One machine.", "superseded": "E1b"}) == original
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


def test_a_superseded_claim_is_still_judged_and_says_by_what_it_is_replaced(tmp_path: Path) -> None:
    world = _world({"A0": 12, "A1": 12, "A2": 12})
    plain = evaluate(DECLARED["E1"], world)
    verdict = evaluate(DECLARED["E1"] | {"superseded": "E1b", "caveat": "On one machine"}, world)
    assert (verdict.verdict, verdict.key, verdict.p) == ("superseded", plain.key, plain.p)
    assert verdict.text == f"superseded by E1b; by its own rule supported. {plain.text}. On one machine"
    path = tmp_path / "claims.yaml"
    path.write_text(yaml.safe_dump([DECLARED["E1"] | {"superseded": "E9"}]))
    with pytest.raises(ValueError, match="claim E1 is superseded by 'E9', which is not declared"):
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
    with pytest.raises(ValueError, match="E4: a record has no 'ledger', from which 'replay_error' is computed"):
        evaluate(DECLARED["E4"], [_run("A0", 10, seed=seed) for seed in range(8)])


# ---- the field's claims


def test_all_claims_of_the_field_are_declared() -> None:
    first = [name for name in DECLARED if name[-1].isdigit()]
    assert first == [f"E{i}" for i in range(1, 14)] + [f"C{i}" for i in range(1, 40)]
    # a rule that was changed after a look at the data is another claim, and no primary one
    again = {name: DECLARED[name] for name in DECLARED if name.endswith("b")}
    assert list(again) == ["E1b", "E6b", "C2b", "C3b", "C9b", "C15b", "C18b", "C33b", "C37b"]
    assert all("primary" not in claim and "Declared after the data of" in claim["note"] for claim in again.values())
    # declared after a look at older data, and before any of its own
    assert "before any of the runs that judge it" in DECLARED["C3c"]["note"] and "primary" not in DECLARED["C3c"]
    assert "before any run of GRPO over an adapter" in DECLARED["C15c"]["note"] and "primary" not in DECLARED["C15c"]
    superseded = {name: claim["superseded"] for name, claim in DECLARED.items() if "superseded" in claim}
    assert superseded == {"C2": "C2b", "C3b": "C3c", "C15b": "C15c"}
    ruled = {name for name in first if name[0] == "C" and DECLARED[name]["rule"]["kind"] != "open"}
    assert ruled == {f"C{i}" for i in (*range(1, 15), 16, *range(18, 39))}
    primary = {name: claim["primary"] for name, claim in DECLARED.items() if "primary" in claim}
    declared = {
        "02": ("C1", "C2", "C30", "C31"),
        "03": ("C3", "C34"),
        "04": ("C5", "C6", "C7", "C35"),
        "05": ("C8", "C9", "C10", "C33"),
    }
    declared |= {"07": ("E12", "C18", "C19", "C36"), "08": ("E6", "E8", "C21", "C23"), "09": ("C25", "C27", "C28")}
    assert primary == {name: notebook for notebook, names in declared.items() for name in names}
    without = {
        "C2": "superseded",
        "C3b": "superseded",
        "C15b": "superseded",
        "C15": "not testable at this scale",
        "C17": "not testable at this scale",
    }
    for verdict in claims.evaluate_together(list(DECLARED.values()), []):
        assert verdict.verdict == without.get(verdict.id, "open")
        assert (verdict.n, verdict.intervals, verdict.p, verdict.key, verdict.placebo) == (0, {}, None, "", "")
    assert evaluate(DECLARED["C15"], [], scale="full").text == "no rule yet"
    assert evaluate(DECLARED["C32"], []).text == "nothing to compare yet. not testable at this scale: throughput"
    assert evaluate(DECLARED["C17"], []).text == "wall-clock time on accelerators"
    assert evaluate(DECLARED["C17"], [], scale="full").verdict == "open"


def test_a_notebook_has_four_primary_claims_at_most(tmp_path: Path) -> None:
    path = tmp_path / "claims.yaml"
    fifth = DECLARED["C29"] | {"primary": "02"}
    path.write_text(yaml.safe_dump([*(c for c in DECLARED.values() if c["id"] != "C29"), fifth]))
    with pytest.raises(ValueError, match="notebook 02 has 5 primary claims: at most 4"):
        claims.load_claims(path)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (-0.01, 0.019, "supported"),
        (0.02, 0.05, "contradicted"),
        (-0.05, -0.02, "contradicted"),
        (0.01, 0.03, "underpowered"),
        (-0.03, 0.03, "underpowered"),
        (-0.02, 0.01, "underpowered"),
    ],
)
def test_decide_a_match(low: float, high: float, expected: str) -> None:
    finding = Finding("x", 16, "x: 16", Interval((low + high) / 2, low, high, 16, 0.9), side="within", test=0.01)
    assert claims.decide([finding], 0.02, 16)[0] == expected


def test_decide_with_findings_that_have_no_value_or_decide_nothing() -> None:
    good = Finding("g", 8, "g: 8", Interval(3.0, 2.0, 4.0, 8))
    undefined = Finding("u", 8, "u: 8", None, value="not defined")
    aside = Finding("a", 2, "a: 2", Interval(-3.0, -4.0, -2.0, 2), decisive=False)
    assert claims.decide([good, undefined], 0, 8) == ("underpowered", "the interval does not decide on u")
    assert claims.decide([good, aside], 0, 8) == ("supported", "")


def test_decide_after_holms_correction() -> None:
    good, bad = (Finding(name, 8, name, Interval(x, x - 1, x + 1, 8)) for name, x in (("g", 3), ("b", -3)))
    assert claims.decide([good], 0, 8, (0.049, 4)) == ("supported", "")
    words = "supported by itself, but p = 0.05 after Holm's correction, family of 4"
    assert claims.decide([good], 0, 8, (0.05, 4)) == ("underpowered", words)
    # nothing else is changed by it
    assert claims.decide([bad], 0, 8, (1.0, 4))[0] == "contradicted"
    assert claims.decide([good], 5, 8, (1.0, 4))[0] == "within margin"


# ---- the lock


def test_rules_are_the_locked_ones() -> None:
    assert claims.lock_problems() == []


def test_the_rules_that_were_changed_were_changed_once() -> None:
    changed = {name: len(hashes) for name, hashes in claims.read_lock().items() if len(hashes) > 1}
    assert changed == dict.fromkeys(("E1", "E2", "C3", "C9", "C10", "C11", "C13", "C16"), 2)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of the claims C1 (open here), C10 and E1, locked before any record."""
    for name, folder in {"ROOT": ".", "PAPER": "paper", "RESULTS": "paper/results"}.items():
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr(paths, name, tmp_path / folder)
    _declare(tmp_path)
    assert [line.split()[:2] for line in claims.lock("2026-01-01")] == [["C10", "2026-01-01"], ["E1", "2026-01-01"]]
    return tmp_path


def _declare(repository: Path, **changes: dict) -> None:
    """Write claims.yaml with changes by claim."""
    declared = [DECLARED["C1"] | {"rule": {"kind": "open"}}, DECLARED["C10"], DECLARED["E1"]]
    changed = [claim | changes.get(claim["id"], {}) for claim in declared]
    (repository / "paper/claims.yaml").write_text(yaml.safe_dump(changed))


def _record(repository: Path, *records: dict) -> None:
    (repository / "paper/results/01_toy").mkdir(exist_ok=True)
    lines = "".join(json.dumps(record | {"spec_hash": spec_hash(record["spec"])}) + "\n" for record in records)
    file = repository / "paper/results/01_toy/tiny.jsonl"
    file.write_text(lines)
    file.with_suffix(".index").unlink(missing_ok=True)
    seal(file)


def _log(repository: Path, name: str) -> None:
    (claim,) = (claim for claim in claims.load_claims() if claim["id"] == name)
    (repository / "LOG.md").write_text(f"## Why\n\n{name} is {claims.rule_hash(claim)[:12]} now.\n")


def test_a_locked_claim_may_change_in_title_note_and_notebooks_alone(repository: Path) -> None:
    assert claims.lock_problems() == [] and claims.lock("2026-01-02") == []
    _declare(repository, E1={"title": "Other", "note": "Other", "notebooks": ["05"]})
    assert claims.lock_problems() == [] and claims.lock("2026-01-02") == []


def test_a_changed_rule_needs_the_log(repository: Path) -> None:
    _record(repository, _run("A0", 10))
    before = (repository / "paper/claims.lock").read_text()
    _declare(repository, E1={"margin": 0.01})
    problem = "claim E1 is not what claims.lock holds: it was changed, or the lock was"
    assert claims.lock_problems() == [problem]
    with pytest.raises(ValueError, match="claim E1 was locked with another rule: say in LOG.md why .* and quote"):
        claims.lock("2026-01-02")
    assert (repository / "paper/claims.lock").read_text() == before

    _log(repository, "E1")
    (line,) = claims.lock("2026-01-02")
    assert (repository / "paper/claims.lock").read_text() == f"{before}{line}\n"
    assert claims.lock_problems() == []
    (repository / "LOG.md").write_text("")
    assert claims.lock_problems() == [f"claim E1 was changed: LOG.md must say why and quote {line.split()[2][:12]}"]
    # and back: the lock's last line counts, not any
    _declare(repository)
    changed = f"claim E1 was changed: LOG.md must say why and quote {line.split()[2][:12]}"
    assert claims.lock_problems() == [problem, changed]
    # each line but the first is quoted, not the last alone
    with open(repository / "paper/claims.lock", "a") as file:
        file.write(f"E1 2026-01-03 {before.split()[5]}\n")
    _log(repository, "E1")
    assert claims.lock_problems() == [changed]


def _git(repository: Path, *arguments: str) -> None:
    user = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *user, *arguments], cwd=repository, check=True, capture_output=True)


def test_a_line_of_the_lock_that_was_replaced_is_found_by_the_history_of_git(repository: Path) -> None:
    lock = repository / "paper/claims.lock"
    assert claims.once_locked() is None
    _git(repository, "init", "-q"), _git(repository, "add", "."), _git(repository, "commit", "-qm", "Locked")
    assert [name for name, _ in claims.once_locked()] == ["C10", "E1"]
    old = lock.read_text().split()[5]
    _declare(repository, E1={"margin": 0.01})
    (changed,) = (claims.rule_hash(claim) for claim in claims.load_claims() if claim["id"] == "E1")
    lock.write_text(lock.read_text().replace(old, changed))
    lost = f"claims.lock has lost the rule {old[:12]} of claim E1, which its history has: restore the line from git, "
    lost += f"or say in LOG.md why it went, and quote {old[:12]}"
    assert claims.lock_problems() == [lost]
    _git(repository, "commit", "-qam", "Locked otherwise")
    assert claims.lock_problems() == [lost]
    (repository / "LOG.md").write_text(f"{old[:12]} was a mistake.\n")
    assert claims.lock_problems() == []


def test_a_rule_is_declared_before_its_runs_or_the_log_says_why(repository: Path) -> None:
    rule = {"C1": {"rule": DECLARED["C1"]["rule"]}}
    # a measured base is no run of the claim, and neither is a run of another length
    _record(repository, _run("A0", 10, arm=None), _run("A0", 10))
    _declare(repository, **rule)
    assert claims.lock_problems() == [
        "claim C1 has a rule and no line in claims.lock: run python -m evoalign_study claims --lock"
    ]
    before = (repository / "paper/claims.lock").read_text()
    run = _run("A1", 10)
    _record(repository, run | {"spec": run["spec"] | {"steps": 208}})
    with pytest.raises(ValueError, match="claim C1 has runs already: say in LOG.md why"):
        claims.lock("2026-01-02")
    _record(repository, _run("A0", 10, arm=None), _run("A0", 10))
    assert [line.split()[0] for line in claims.lock("2026-01-02")] == ["C1"]
    (repository / "paper/claims.lock").write_text(before)
    _record(repository, run | {"spec": run["spec"] | {"steps": 208}})
    _log(repository, "C1")
    assert [line.split()[0] for line in claims.lock("2026-01-02")] == ["C1"]


def test_a_claim_cannot_go_and_its_rule_cannot_be_withdrawn(repository: Path) -> None:
    (repository / "paper/claims.yaml").write_text(yaml.safe_dump([DECLARED["C10"] | {"rule": {"kind": "open"}}]))
    assert claims.lock_problems() == [
        "claim C10 is not what claims.lock holds: it was changed, or the lock was",
        "claim E1 is in claims.lock and no longer declared: a claim stays",
    ]


def test_a_damaged_lock_is_refused(repository: Path) -> None:
    with open(repository / "paper/claims.lock", "a") as file:
        file.write("E1 yesterday 123\n")
    with pytest.raises(ValueError, match="claims.lock, line 3 is not 'id date hash': 'E1 yesterday 123'"):
        claims.read_lock()


# ---- the command


def test_the_command_prints_all_claims_or_one_in_full(repository: Path) -> None:
    _record(repository, *_world({"A0": 12, "A1": 12, "A2": 12}))
    result = CliRunner().invoke(cli.app, ["claims"])
    lines = result.output.splitlines()
    assert result.exit_code == 0 and len(lines) == 4
    assert lines[0] == "C1   open                        ES improves Countdown on every base and beats RL"
    assert lines[2] == "E1   supported                   ES learns Countdown on every tiny base"
    assert lines[3].startswith(" " * 33 + "A0 29.7 [") and lines[3].endswith("] points (n = 8)")
    result = CliRunner().invoke(cli.app, ["claims", "--id", "E1"])
    lines = result.output.splitlines()
    assert lines[0] == "E1  SUPPORTED" and lines[1].startswith("    ES learns Countdown. On each")
    assert lines[2].count("points from 25.0 % (n = 8, detectable") == 3 and len(lines) == 3
    result = CliRunner().invoke(cli.app, ["claims", "--id", "C99"], env={"COLUMNS": "200"})
    assert result.exit_code == 2 and "no claim 'C99'." in result.output and "There are: C1, C10, E1" in result.output


@pytest.mark.parametrize("arguments", [[], ["--lock"]])
def test_the_command_names_damaged_records_and_judges_nothing(repository: Path, arguments: list[str]) -> None:
    _record(repository, *_world({"A0": 12}))
    file = repository / "paper/results/01_toy/tiny.jsonl"
    whole = file.read_bytes()
    for old, new in ((b'"finished"', b'"incomplete"'), (b'"greedy_bits"', b'"bits"'), (b'{"', b'{"\xff'), (b"}", b"")):
        file.write_bytes(whole.replace(old, new, 1))
        result = CliRunner().invoke(cli.app, ["claims", *arguments])
        assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
        assert result.output.startswith(f"{file}, line 1 ") and "restore it from git" in result.output
    # sealed as it is: still named, now by what could not be read in it
    record = _run("A0", 10, arm=None)
    del record["test"]["n"]
    _record(repository, record, *_world({"A0": 12})[1:])
    result = CliRunner().invoke(cli.app, ["claims"])
    assert result.exit_code == 1 and "claim E1: a record lacks the field 'n'" in result.output
    del record["spec"]["kind"]
    _record(repository, record)
    result = CliRunner().invoke(cli.app, ["claims"])
    assert (
        result.exit_code == 1 and f"{file}: the spec {spec_hash(record['spec'])} has no kind: restore" in result.output
    )


def test_the_command_locks(repository: Path) -> None:
    _record(repository, _run("A0", 10))
    assert CliRunner().invoke(cli.app, ["claims", "--lock"]).output == "every rule is locked\n"
    _declare(repository, E1={"margin": 0.01})
    result = CliRunner().invoke(cli.app, ["claims", "--lock"])
    assert result.exit_code == 1 and "claim E1 was locked with another rule" in result.output
    _log(repository, "E1")
    result = CliRunner().invoke(cli.app, ["claims", "--lock"])
    assert (result.exit_code, result.output.split()[0]) == (0, "E1")
    assert claims.lock_problems() == []


def test_claims_are_judged_by_name_with_their_families() -> None:
    records = _world({"A0": 12, "A1": 12, "A2": 12})
    named = claims.evaluate_named(["E2", "E1"], records)
    assert [verdict.id for verdict in named] == ["E2", "E1"]
    assert named == [claims.evaluate(DECLARED[name], records) for name in ("E2", "E1")]
    with pytest.raises(ValueError, match=r"no claim 'E1c' in claims.yaml. Did you mean 'E1"):
        claims.evaluate_named(["E1", "E1c"], records)


def test_verdicts_as_tables() -> None:
    records = _world({"A0": 12, "A1": 12, "A2": 12})
    verdicts = claims.evaluate_named(["E1b", "E2", "C17"], records)
    table = claims.table_of_verdicts(verdicts)
    assert list(table["claim"]) == ["E1b", "E2", "C17"] and list(table["verdict"]) == [v.verdict for v in verdicts]
    assert list(table["closest comparison"]) == [v.key for v in verdicts]
    assert list(table["placebo"]) == [v.placebo for v in verdicts] and verdicts[0].placebo
    assert list(table["other decodings"]) == [v.decodings for v in verdicts] and verdicts[0].decodings

    rows = claims.table_of_comparisons(verdicts)
    assert not rows.duplicated(["claim", "comparison", "decoding"]).any()
    first = rows[rows["claim"] == "E1b"]
    assert list(first["decides"]) == ["yes"] * 3
    assert list(first["decoding"]) == ["greedy"] * 3 and list(first["n"]) == [8] * 3
    assert list(first["estimate [95 %]"]) == [f.value for f in verdicts[0].findings if f.decisive]
    assert all("[" in value and "points" in value for value in rows["estimate [95 %]"])
    sampled = {f.compared: f.value for f in verdicts[0].findings if f.decoding == "t1"}
    beside = [f"temperature 0.6: not measured; temperature 1: {value}" for value in sampled.values()]
    assert len(beside) == 3 and list(first["other decodings"]) == beside  # they have no rows of their own
    assert "C17" not in set(rows["claim"])
    # at scale smoke no claim has records: the tables are empty, and are shown
    for empty in (claims.table_of_verdicts([]), claims.table_of_comparisons([])):
        assert all(name in repr(artifacts.show(empty, "Nothing")) for name in ("Nothing", *empty.columns))
