"""Rules that a dead arm cannot win: nulls in the place of the favoured arm, and floors on what was learned."""

import numpy as np
import pytest
from claim_worlds import DECLARED, OTHER, PROBLEMS, SWEEPS, base_record, judge, runs_of, sweep_of
from evoalign_study import claims
from evoalign_study.claims.selection import Evidence


def falling(arm: str, right: int, fall: float, seeds: int = 16) -> list[dict]:
    """Runs whose curve falls by so much, a little more or less, on its way to the end."""
    records = runs_of(arm, right, seeds=seeds)
    for i, record in enumerate(records):
        by = fall * (1 + 0.2 * (i % 2))
        curve = [0.1, 0.3, 0.3 - by, 0.3 - by / 2, 0.4]
        record["curve"] = record["curve"] | {"validation_greedy": curve, "validation_t1": curve}
    return records


def asked(verdict: claims.Verdict) -> str:
    """The placebos of a verdict, without the nulls that have no runs."""
    return verdict.placebo.partition("; no runs of ")[0]


# ---- rules that arms which learned nothing win


def test_steadier_curves_are_won_by_arms_that_never_move() -> None:
    records = [*SWEEPS, base_record("A0", 20), *falling("es", 60, 0.02), *falling("grpo", 80, 0.06)]
    alone = judge("C33", records)
    assert alone.verdict == "not evidence"
    nulls = "ES with shuffled fitness, ES with random fitness, GRPO with random reward"
    assert alone.placebo == f"passed by the untrained base; no runs of {nulls}"
    verdict = judge("C33", [*records, *falling("es_random", 22, 0.01, seeds=8)])
    assert asked(verdict) == "passed by ES with random fitness (n = 8), the untrained base"
    assert verdict.text.startswith(
        "the rule holds as well for ES with random fitness (n = 8), the untrained base "
        "(GRPO - ES with random fitness, largest drawdown of validation greedy 5.5 ["
    )
    assert "; GRPO - base, largest drawdown of validation greedy 6.6 [" in verdict.text
    assert "); by itself supported. GRPO - ES, largest drawdown of validation greedy 4.4 [" in verdict.text
    # what was found of the claim itself is what it would be without nulls
    bare = judge("C33", [r for r in records if r["spec"]["kind"] != "base"])
    assert (bare.verdict, asked(bare)) == ("supported", "no null runs")
    assert (verdict.intervals, verdict.p, verdict.key) == (bare.intervals, bare.p, bare.key)


def few_prompts(es: int, grpo: int) -> list[dict]:
    """So many problems more with each tenfold of prompts, from 40 on; the untrained base solves 20."""
    records = [*SWEEPS, base_record("A0", 20)]
    for arm, rise, steps in (("es", es, 104), ("grpo", grpo, 125)):
        for prompts in (2, 50, 200, 1000):
            right = 40 + round(rise * np.log10(prompts))
            records += runs_of(arm, right, seeds=8, steps=steps, unique_prompts=prompts)
    return records


def test_a_flat_curve_over_prompts_needs_to_lie_above_the_base() -> None:
    verdict = judge("C37", few_prompts(2, 8))
    assert (verdict.verdict, asked(verdict)) == ("not evidence", "passed by the untrained base")
    assert "base 2 10.0 %, 50 10.0 %, 200 10.0 %, 1000 10.0 %" in verdict.text
    learned = judge("C37b", few_prompts(2, 8))
    assert (learned.verdict, asked(learned)) == ("supported", "failed by the untrained base")
    # 40 problems and 1, 3, 5, 6 more; the floor is 5 points, 10 problems
    assert learned.intervals["gain over base, ES"].value == pytest.approx((40 + 15 / 4 - 20) / PROBLEMS)
    base = [base_record("A0", 40)] + [r for r in few_prompts(2, 8) if r["spec"]["kind"] != "base"]
    assert judge("C37b", base).verdict == "contradicted"
    no_base = judge("C37b", [r for r in few_prompts(2, 8) if r["spec"]["kind"] != "base"])
    assert no_base.verdict == "underpowered" and "0 of base" in no_base.text


def transfer(es: tuple[int, int], grpo: tuple[int, int]) -> list[dict]:
    """Problems solved on A1 and on A2 by the shared setting and by the best one, which differs from it."""
    records = [*SWEEPS, base_record("A1", 20), base_record("A2", 20)]
    for arm, (shared, best) in (("es", es), ("grpo", grpo)):
        choices = DECLARED["C9"]["rule"]["best"]["among"][arm]
        for name in ("A1", "A2"):
            records += sweep_of(arm, name, OTHER[arm], choices) + runs_of(arm, shared, name, 8)
            records += runs_of(arm, best, name, 8, **OTHER[arm])
    return records


@pytest.mark.parametrize(
    ("es", "grpo", "expected"),
    [
        ((50, 50), (40, 60), "supported"),
        ((60, 50), (59, 60), "contradicted"),  # GRPO's setting serves as well: half a point is less than two
        ((50, 60), (40, 60), "contradicted"),  # ES needs tuning, too
        ((20, 20), (40, 60), "contradicted"),  # ES has learned nothing
        ((50, 53), (40, 60), "underpowered"),  # 1.5 points, with an interval over problems
    ],
)
def test_regrets_with_a_floor(es: tuple, grpo: tuple, expected: str) -> None:
    verdict = judge("C9b", transfer(es, grpo))
    assert (verdict.verdict, verdict.n) == (expected, 8), verdict.text
    assert verdict.intervals["regret, ES"].value == pytest.approx((es[1] - es[0]) / PROBLEMS)
    assert verdict.intervals["regret, GRPO"].value == pytest.approx((grpo[1] - grpo[0]) / PROBLEMS)
    assert asked(verdict) == "failed by the untrained base"


# ---- what becomes of the verdict


def test_a_rule_that_a_null_passes_contradicts_all_the_same() -> None:
    world = [*SWEEPS, base_record("A0", 20)]
    worse = [*world, *falling("es", 60, 0.06), *falling("grpo", 80, 0.02)]
    verdict = judge("C33", worse)
    assert (verdict.verdict, asked(verdict)) == ("contradicted", "passed by the untrained base")
    alike = [*world, *falling("es", 60, 0.02), *falling("grpo", 80, 0.02)]
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
    assert (verdict.verdict, asked(verdict)) == (
        "underpowered",
        "failed by ES with random fitness (n = 8)",
    )  # A1, A2: no runs


# ---- which runs stand in


def steady(arm: str = "es_random", seeds: int = 8, **spec: object) -> list[dict]:
    return [r | {"spec": r["spec"] | spec} for r in falling(arm, 22, 0.0, seeds)]


@pytest.mark.parametrize(
    ("nulls", "expected"),
    [
        (steady(), "passed by ES with random fitness (n = 8)"),
        (steady(sigma=0.1, alpha=0.1), "passed by ES with random fitness (n = 8)"),  # nobody tunes a null
        (
            steady() + steady(seeds=16, sigma=0.1),
            "passed by ES with random fitness (n = 16)",
        ),  # the setting with most runs
        (steady(seeds=4), "passed by ES with random fitness (n = 4)"),
        (steady(seeds=3), "no null runs"),
        (steady(steps=100), "no null runs"),
        (steady(population_size=8), "no null runs"),
        (steady(base_digest="another"), "no null runs"),
        (steady(scale="smoke"), "no null runs"),
        ([{k: v for k, v in r.items() if k != "test"} for r in steady()], "no null runs"),
        (
            steady("grpo_random"),
            "passed by GRPO with random reward (n = 8)",
        ),  # as long as GRPO's runs, in the place of ES
        (steady("grpo_random", steps=208), "no null runs"),
        (steady("es_sampled"), "no null runs"),  # learns
    ],
)
def test_a_null_is_taken_as_it_is_where_the_favoured_arm_was(nulls: list[dict], expected: str) -> None:
    records = [*SWEEPS, *falling("es", 60, 0.02), *falling("grpo", 80, 0.06)]
    assert asked(judge("C33", records + nulls)) == expected


def test_the_untrained_base_spends_what_a_run_spent_and_stays_at_its_start() -> None:
    (run,) = runs_of("es", 60, seeds=1)
    base = base_record("A0", 20)
    elsewhere = base | {"spec": base["spec"] | {"base_digest": "another"}}
    evidence = Evidence.of([run, elsewhere, base], "tiny")
    ((frozen,), have, _) = Evidence(evidence.records, null="base").stand_in([[run]], "seed")
    assert have == "1 of base" and frozen["spec"] == run["spec"] | {"arm": "base"}
    assert frozen["test"] == base["test"]
    assert frozen["curve"]["completions"] == run["curve"]["completions"]
    assert frozen["curve"]["validation_greedy"] == [0.1, 0.1, 0.1, 0.1] != run["curve"]["validation_greedy"]
    assert Evidence([run, elsewhere], null="base").stand_in([[run]], "seed").records == []


def test_an_interval_that_reaches_the_bound_does_not_pass() -> None:
    """The value of the null lies beyond the bound (falls of 0.066 less 0.05), its interval does not."""
    records = [*SWEEPS, *falling("es", 60, 0.0), *falling("grpo", 80, 0.06)]
    close = falling("es_random", 22, 0.0, seeds=4)
    for i, record in enumerate(close):
        by = 0.2 * (i == 0)
        record["curve"] = record["curve"] | {"validation_greedy": [0.1, 0.3, 0.3 - by, 0.4, 0.4]}
    assert asked(judge("C33", records + close)) == "failed by ES with random fitness (n = 4)"
