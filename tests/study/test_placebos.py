"""Rules with other arms in the places of their own: nulls where an arm wins, the comparator where it is challenged."""

from dataclasses import replace

import pytest
from claim_worlds import DECLARED, SWEEPS, base_record, falling, judge, runs_of
from evoalign_study import claims
from evoalign_study.claims.rules import RULES
from evoalign_study.claims.selection import Case, Evidence


def about(fall: float, seeds: int = 16) -> list[float]:
    """Falls of so much, a little more or less."""
    return [fall * (1 + 0.2 * (i % 2)) for i in range(seeds)]


def asked(verdict: claims.Verdict) -> str:
    """The placebos of a verdict, without the nulls that have no runs."""
    return verdict.placebo.partition("; no runs of ")[0]


# ---- rules that arms which learned nothing win


def test_steadier_curves_are_won_by_arms_that_never_move() -> None:
    records = [*SWEEPS, base_record("A0", 20), *falling("es", about(0.02), 60), *falling("grpo", about(0.06), 80)]
    alone = judge("C33", records)
    assert alone.verdict == "not evidence"
    nulls = "ES with shuffled fitness, ES with random fitness, GRPO with random reward"
    assert alone.placebo == f"passed by the untrained base; no runs of {nulls}"
    verdict = judge("C33", [*records, *falling("es_random", about(0.01, 8), 22)])
    assert asked(verdict) == "passed by ES with random fitness (n = 8), the untrained base"
    # what was found of the claim itself is what it would be without nulls
    bare = judge("C33", [r for r in records if r["spec"]["kind"] != "base"])
    assert (bare.verdict, asked(bare)) == ("supported", "no null runs")
    assert (verdict.intervals, verdict.p, verdict.key) == (bare.intervals, bare.p, bare.key)


# ---- what becomes of the verdict


def test_a_contradiction_that_a_null_gives_as_well_is_no_evidence() -> None:
    """A null where GRPO wins, that is; in the place of ES, which loses, random fitness passes or fails for itself."""
    world = [*SWEEPS, *falling("es_random", about(0.01, 8), 22)]
    worse = [*world, *falling("es", about(0.06), 60), *falling("grpo", about(0.02), 80)]
    verdict = judge("C33", worse)
    assert (verdict.verdict, asked(verdict)) == ("not evidence", "passed by ES with random fitness (n = 8)")
    restless = [*SWEEPS, *falling("es_random", about(0.09, 8), 22)]
    verdict = judge("C33", restless + worse[len(world) :])
    assert (verdict.verdict, asked(verdict)) == ("contradicted", "failed by ES with random fitness (n = 8)")
    # what has to be learned, no null wins
    verdict = judge("C31", [*SWEEPS, base_record("A0", 20), *runs_of("es", 40), *runs_of("es_sampled", 60, seeds=8)])
    assert (verdict.verdict, asked(verdict)) == ("contradicted", "failed by the untrained base")


def test_a_null_that_passes_leaves_nothing_of_a_rule_that_does_not_decide() -> None:
    world = [*SWEEPS, base_record("A0", 20)]
    alike = [*world, *falling("es", about(0.02), 60), *falling("grpo", about(0.02), 80)]
    verdict = judge("C33", alike)
    assert verdict.verdict == "not evidence" and "; by itself underpowered. " in verdict.text


@pytest.mark.parametrize("warm", [0, 7])
def test_random_fitness_spends_nothing_and_wins_nothing_at_equal_budgets(warm: int) -> None:
    """Nothing at all, or nothing after a warm start, of which every run costs a little more or less."""
    spent = {"completions": [0, 0, 0, 0], "forward_flops": [0, 0, 0, 0]}
    random = [r | {"curve": r["curve"] | spent} for r in runs_of("es_random", 90, seeds=8)]
    for i, record in enumerate(random):
        record["curve"]["completions"] = [warm and warm + i] * 4
    at_equal = {"kind": "compare", "comparisons": [DECLARED["C1"]["rule"]["comparisons"][2]]}
    verdict = judge("C1", [*SWEEPS, *runs_of("es", 60), *runs_of("grpo", 40), *random], rule=at_equal)
    failed = "failed by ES with random fitness (n = 8)"
    assert (verdict.verdict, asked(verdict)) == ("underpowered", failed)  # A1, A2: no runs


# ---- which runs stand in


def steady(arm: str = "es_random", seeds: int = 8, **spec: object) -> list[dict]:
    return [r | {"spec": r["spec"] | spec} for r in falling(arm, about(0.0, seeds), 22)]


STAND_INS = [
    # nobody tunes a null; the setting with most runs counts
    (steady(sigma=0.1, alpha=0.1), "passed by ES with random fitness (n = 8)"),
    (steady() + steady(seeds=16, sigma=0.1), "passed by ES with random fitness (n = 16)"),
    (steady(seeds=4), "passed by ES with random fitness (n = 4)"),
    (steady(seeds=3), "no null runs"),
    (steady(steps=100), "no null runs"),
    (steady(base_digest="another"), "no null runs"),
    (steady(scale="smoke"), "no null runs"),
    ([{k: v for k, v in r.items() if k != "test"} for r in steady()], "no null runs"),
    # as long as GRPO's runs, in the place of ES
    (steady("grpo_random"), "passed by GRPO with random reward (n = 8)"),
    (steady("grpo_random", steps=208), "no null runs"),
    (steady("es_sampled"), "no null runs"),  # learns
]


@pytest.mark.parametrize(("nulls", "expected"), STAND_INS)
def test_a_null_is_taken_as_it_is_where_the_favoured_arm_was(nulls: list[dict], expected: str) -> None:
    records = [*SWEEPS, *falling("es", about(0.02), 60), *falling("grpo", about(0.06), 80)]
    assert asked(judge("C33", records + nulls)) == expected


def test_the_untrained_base_spends_what_a_run_spent_and_stays_at_its_start() -> None:
    (run,) = runs_of("es", 60, seeds=1)
    base = base_record("A0", 20)
    elsewhere = base | {"spec": base["spec"] | {"base_digest": "another"}}
    evidence = Evidence.of([run, elsewhere, base], "tiny")
    ((frozen,), have, *_) = Case(DECLARED["C33"], replace(evidence, null="base")).stand_in("es", {"es": [run]})
    assert have == "1 of base" and frozen["spec"] == run["spec"] | {"arm": "base"}
    assert frozen["test"] == base["test"]
    assert frozen["curve"]["completions"] == run["curve"]["completions"]
    assert frozen["curve"]["validation_greedy"] == [0.1, 0.1, 0.1, 0.1] != run["curve"]["validation_greedy"]
    without = Case(DECLARED["C33"], Evidence([run, elsewhere], null="base"))
    assert without.stand_in("es", {"es": [run]}).records == []


# ---- the comparator in the place of the challenger


@pytest.mark.parametrize(
    ("es", "grpo", "expected"),
    [
        (60, 80, "supported"),
        (22, 80, "contradicted"),
        (22, 22, "undecided"),  # five points are asked where the comparator gains one
        (60, 22, "undecided"),
    ],
)
def test_a_threshold_that_the_comparator_fails_is_void(es: int, grpo: int, expected: str) -> None:
    falls = [*falling("es", about(0.02), es), *falling("grpo", about(0.06), grpo)]
    verdict = judge("C33b", [*SWEEPS, base_record("A0", 20), *falls])
    assert verdict.verdict == expected, verdict.text
    failed = "passed 0 of 1; failed GRPO - base, test greedy 1.0 ["
    assert verdict.control.startswith(failed if grpo == 22 else "passed 1 of 1")
    assert ("its own comparator fails it; without what is void supported" in verdict.text) == (grpo == 22)
    assert verdict.intervals["ES - base, test greedy"].value == pytest.approx((es - 20) / 200)


CONTROLLED = [(1, 56, "supported"), (9, 56, "undecided"), (9, 90, "contradicted")]


@pytest.mark.parametrize(("jitter", "grpo", "expected"), CONTROLLED)
def test_arms_match_only_if_the_comparator_matches_itself(jitter: int, grpo: int, expected: str) -> None:
    """An interval that is too wide for equal arms to match contradicts all the same where the arms are far apart."""
    verdict = judge("C2", [*SWEEPS, *runs_of("es", 60, jitter=jitter), *runs_of("grpo", grpo)])
    assert verdict.verdict == expected, verdict.text
    passed = "passed 2 of 2" if jitter == 1 else "passed 0 of 2; failed ES - ES again, validation"
    assert verdict.control.startswith(passed)


CONTROLS = {"C2": 2, "C2b": 1, "C10": 2, "C14": 8, "C25": 1, "C32": 2, "E6b": 1, "E9": 1, "E10": 2}  # tolerances
CONTROLS |= {"C7": 1, "C9b": 1, "C18b": 1, "C27": 1, "C33b": 1, "C35": 1, "C37b": 1, "E11": 3}  # and thresholds
CONTROLS |= dict.fromkeys(("C1", "C3c", "C8", "C13", "C20", "C22", "C28", "C36", "E1b", "E5", "E7", "E8"), 0)


@pytest.mark.parametrize("name", CONTROLS)
def test_the_comparator_is_asked_what_equal_arms_pass_and_nothing_else(name: str) -> None:
    """Not to be better than itself, nor what the claim says that it lacks."""
    assert len([*RULES[DECLARED[name]["rule"]["kind"]].controls(DECLARED[name])]) == CONTROLS[name]
