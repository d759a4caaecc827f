"""Comparisons under several decodings: which records say what was decoded, and verdicts that depend on it."""

import pytest
from claim_worlds import DECLARED, PROBLEMS, SWEEPS, judge, results, runs_of
from evoalign_study.claims.rules import RULES
from evoalign_study.claims.selection import DECODINGS, Evidence
from evoalign_study.records import accuracy_matrix, spec_hash

ES = {"greedy": 60, "t0.6": 50, "t1": 40}
"""Problems that ES solves in most of these worlds."""


def decoded(arm: str, right: dict[str, int], seeds: int = 16, at: dict | None = None, **spec: object) -> list[dict]:
    """Runs of an arm that solve so many problems under each decoding, and their decoding records.

    at: problems solved at the step that the decoding records measured besides, and `step`.
    """
    records, own = [], {"kind": "decoding", "temperatures": [0.4, 0.6], "samples": 16}
    for seed, run in enumerate(runs_of(arm, right["greedy"], seeds=seeds, **spec)):
        shifted = {name: n + seed % 3 - 1 for name, n in right.items()}
        run["test"] = results({name: shifted[name] for name in ("greedy", "t1")})
        measures = {"test": results({"t0.6": shifted["t0.6"]}), "validation": results(shifted)}
        if at is not None:
            own |= {"at_step": at["step"]}
            measures |= {"validation_at_step": results({name: at[name] + seed % 3 - 1 for name in right})}
        records += [run, measured(run, own | {"digest": run["digest"]}) | measures]
    return records


def measured(run: dict, own: dict) -> dict:
    spec = run["spec"] | own
    return {"spec": spec, "spec_hash": spec_hash(spec), "status": "finished"}


def without_decodings(records: list[dict], keep: int = 0) -> list[dict]:
    """Records without those of kind decoding, but for the first ones."""
    kept = [r for r in records if r["spec"]["kind"] == "decoding"][:keep]
    return [r for r in records if r["spec"]["kind"] != "decoding"] + kept


# ---- the records


def test_a_run_finds_its_decoding_record_by_its_spec() -> None:
    records = decoded("es", ES, seeds=3, at={"step": 2} | dict.fromkeys(ES, 30))
    evidence = Evidence.of(records[::-1], "tiny")
    joined = sorted(evidence.records, key=lambda r: r["spec"]["seed"])
    assert [r["spec"]["kind"] for r in joined] == ["train"] * 3
    # seeds solve one problem less, as many, and one more
    for decoding, right in ES.items():
        assert accuracy_matrix(joined, decoding).sum(axis=1).tolist() == [right - 1, right, right + 1]
    assert joined[0]["decoded"]["validation_at"] == {2: records[1]["validation_at_step"]}
    assert joined[0]["decoded"]["validation"] == records[1]["validation"]
    # a run of another seed is none of theirs
    other = runs_of("es", 60, seeds=5)[4]
    assert "decoded" not in Evidence.of([*records, other], "tiny").records[-1]
    with pytest.raises(ValueError, match=r"unknown decoding 't0.6': 1 of 4 records have no 't0.6_counts'; use one of "):
        accuracy_matrix([*joined, other], "t0.6")


def test_a_decoding_record_of_something_else_is_refused() -> None:
    run, record = decoded("es", ES, seeds=1)
    for change, names in (({"digest": "of others"}, "weights of others, its run"), ({"samples": 8}, "has 8 samples")):
        with pytest.raises(ValueError, match=names):
            Evidence.of([run, record | {"spec": record["spec"] | change}], "tiny")


# ---- verdicts


COMPARISON = {"measure": {"test": "greedy"}, "of": "grpo", "to": "es", "above": 0}
GREEDILY = {"kind": "compare", "comparisons": [COMPARISON]}
THREE = GREEDILY | {"decodings": list(DECODINGS)}


UNDER_THREE = [
    ({"greedy": 80, "t0.6": 70, "t1": 60}, "supported"),
    ({"greedy": 40, "t0.6": 30, "t1": 20}, "contradicted"),
    ({"greedy": 80, "t0.6": 70, "t1": 40}, "underpowered"),
    ({"greedy": 40, "t0.6": 50, "t1": 60}, "depends on decoding"),
]


@pytest.mark.parametrize(("grpo", "expected"), UNDER_THREE)
def test_a_comparison_under_three_decodings(grpo: dict, expected: str) -> None:
    verdict = judge("C2b", [*SWEEPS, *decoded("es", ES), *decoded("grpo", grpo)], rule=THREE)
    assert (verdict.verdict, verdict.n, len(verdict.intervals)) == (expected, 16, 3), verdict.text
    for decoding, words in {"greedy": "greedy", "t0.6": "temperature 0.6", "t1": "temperature 1"}.items():
        difference = (grpo[decoding] - ES[decoding]) / PROBLEMS
        assert verdict.intervals[f"GRPO - ES, test {words}"].value == pytest.approx(difference)


def test_a_decoding_that_few_runs_have_is_named_and_decides_nothing() -> None:
    # it would turn the verdict
    grpo = decoded("grpo", {"greedy": 80, "t0.6": 30, "t1": 60})
    records = [*SWEEPS, *decoded("es", ES), *without_decodings(grpo, 15)]
    verdict = judge("C2b", records, rule=THREE)
    assert (verdict.verdict, verdict.n) == ("supported", 16)
    assert list(verdict.intervals) == ["GRPO - ES, test greedy", "GRPO - ES, test temperature 1"]
    # with as many as the claim needs it decides, on the runs that have it
    verdict = judge("C2b", records, min_seeds=8, rule=THREE)
    assert verdict.verdict == "depends on decoding"
    assert verdict.intervals["GRPO - ES, test temperature 0.6"].n == 15


# ---- decodings that a claim does not declare


UNDER_OTHERS = [
    ({"greedy": 80, "t0.6": 70, "t1": 60}, "supported", "same order", "same order"),
    ({"greedy": 80, "t0.6": 50, "t1": 60}, "supported", "no clear order", "same order"),
    ({"greedy": 80, "t0.6": 70, "t1": 30}, "depends on decoding", "same order", "reversed"),
    ({"greedy": 40, "t0.6": 70, "t1": 30}, "depends on decoding", "reversed", "same order"),
    # without an order where the claim declares one there is none to keep
    ({"greedy": 60, "t0.6": 70, "t1": 30}, "underpowered", "no clear order", "no clear order"),
]


@pytest.mark.parametrize(("grpo", "expected", "warm", "hot"), UNDER_OTHERS)
def test_a_comparison_is_made_again_under_other_decodings(grpo: dict, expected: str, warm: str, hot: str) -> None:
    records = [*SWEEPS, *decoded("es", ES), *decoded("grpo", grpo)]
    verdict = judge("C2b", records, rule=GREEDILY)
    assert (verdict.verdict, verdict.decodings) == (expected, f"temperature 0.6: {warm}; temperature 1: {hot}")
    assert list(verdict.intervals) == ["GRPO - ES, test greedy"]  # nothing else rests on them
    # what is not measured says so and changes nothing
    without = judge("C2b", without_decodings(records), rule=GREEDILY)
    assert without.decodings.startswith("temperature 0.6: not measured; temperature 1: ")


def test_every_rule_that_compares_arms_is_asked_under_other_decodings() -> None:
    for claim in DECLARED.values():
        kind = claim["rule"]["kind"]
        others = [RULES[kind].under(claim, decoding) for decoding in DECODINGS]
        asked = kind in ("compare", "interval_above", "interaction", "regret", "regrets")
        declared = set(claim["rule"].get("decodings", ()))
        assert any(others) == (asked and declared != set(DECODINGS)), claim["id"]
        for decoding, other in zip(DECODINGS, others, strict=True):
            assert other is None or (other["rule"]["decodings"] == (decoding,) and decoding not in declared)


def test_a_curve_that_was_measured_again_joins_that_of_its_run() -> None:
    run = runs_of("es", 60, seeds=1)[0]
    own = {"kind": "decoding", "digest": run["digest"], "temperatures": [0.6], "samples": 16, "curve_temperature": 0.6}
    again = {"step": run["curve"]["step"], "validation_t0.6": [0.1, 0.3, 0.2, 0.2]}
    record = measured(run, own) | {"test": results({"t0.6": 50}), "curve": again}
    (joined,) = Evidence.of([run, record], "tiny").records
    assert joined["curve"] == run["curve"] | again and joined["decoded"] == {"validation": {}, "validation_at": {}}
    with pytest.raises(ValueError, match="has a curve at other steps than its run"):
        Evidence.of([run, record | {"curve": again | {"step": [0, 1, 2]}}], "tiny")


# ---- problem by problem at an equal budget


def at_equal(grpo: dict[str, int], there: dict[str, int], last: int = 100_000) -> list[dict]:
    """Runs of GRPO decoded at their end, and of ES at a step after which they have spent 1,000."""
    records = [*decoded("es", ES, at={"step": 2} | there), *decoded("grpo", grpo)]
    spent = {"es": [0, 10, 1_000, last], "grpo": [0, 100, 500, 1_020]}
    for record in records:
        if "curve" in record:
            record["curve"]["forward_flops"] = spent[record["spec"]["arm"]]
    return [*SWEEPS, *records]


AT_EQUAL = [
    ({"greedy": 60, "t0.6": 49, "t1": 39}, "supported"),  # half a point less is within two
    ({"greedy": 60, "t0.6": 50, "t1": 30}, "underpowered"),  # one of three intervals, which Holm takes away
    ({"greedy": 60, "t0.6": 50, "t1": 20}, "contradicted"),
    ({"greedy": 80, "t0.6": 50, "t1": 30}, "depends on decoding"),
]


@pytest.mark.parametrize(("grpo", "expected"), AT_EQUAL)
def test_not_worse_at_equal_budget(grpo: dict[str, int], expected: str) -> None:
    # ES ends with more, and is measured after the step that has spent 2 % less than GRPO at its end
    verdict = judge("C2b", at_equal(grpo, {"greedy": 60, "t0.6": 50, "t1": 40}))
    assert (verdict.verdict, verdict.n) == (expected, 16), verdict.text
    label = "GRPO - ES, validation problems greedy at equal forward flops"
    assert verdict.intervals[label].value == pytest.approx((grpo["greedy"] - 60) / PROBLEMS)


def test_an_arm_that_ends_with_the_budget_is_taken_at_its_end() -> None:
    records = at_equal(dict.fromkeys(ES, 60), dict.fromkeys(ES, 10), last=1_030)
    label = "GRPO - ES, validation problems temperature 1 at equal forward flops"
    assert judge("C2b", records).intervals[label].value == pytest.approx(0.1)
