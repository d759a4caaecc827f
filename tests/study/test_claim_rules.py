"""The rules of the field's claims on hand-built records: hand-computed quantities, every verdict, every refusal."""

import random
from functools import cache
from math import log

import numpy as np
import pytest
from claim_worlds import (
    DECLARED,
    FAMILY,
    JITTER,
    OTHER,
    PROBLEMS,
    SWEEPS,
    TUNED,
    base_record,
    evaluate,
    judge,
    run_spec,
    runs_of,
    sweep_of,
)
from evoalign_study import claims, collapse
from evoalign_study.claims.findings import Finding
from evoalign_study.claims.rules import check_rule
from evoalign_study.records import pack_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from evoalign_lib import arms
from evoalign_lib.analysis.stats import Interval


def _value(verdict: claims.Verdict, label: str) -> float:
    return verdict.intervals[label].value


@pytest.mark.parametrize("arm", ["es", "grpo"])
def test_the_hand_made_specs_have_the_fields_of_the_committed_ones(arm: str, committed_records: list[dict]) -> None:
    wanted = run_spec(arm, "A0", 3) | {"test_problems": 2000}
    del wanted["base_digest"]
    specs = [record["spec"] for record in committed_records]
    assert wanted in [{name: value for name, value in spec.items() if name != "base_digest"} for spec in specs]


# ---- selection by the setting that won a sweep


def test_runs_with_the_setting_that_won_the_sweep_are_compared() -> None:
    records = [*SWEEPS, *runs_of("es", 60), *runs_of("es_sampled", 50, seeds=8)]
    alone = judge("C31", records)
    assert alone.n == 8 and _value(alone, "ES - ES with sampled fitness, test greedy") == pytest.approx(10 / PROBLEMS)
    maps = runs_of("es", 5, seeds=4, **OTHER["es"]) + runs_of("es_sampled", 90, seeds=4, **OTHER["es"])
    assert judge("C31", [*maps, *records]) == alone


def test_a_sweep_that_is_not_finished_names_no_winner() -> None:
    both = [*runs_of("es", 60), *runs_of("es_sampled", 50)]
    none = judge("C31", both)
    assert (none.verdict, none.text) == ("open", "nothing to compare yet; the sweep of ES on A0 has 0 of 12 settings")
    verdict = judge("C33", [*SWEEPS[1:], *runs_of("es", 60), *runs_of("grpo", 60)])
    assert (verdict.verdict, verdict.text) == (
        "open",
        "nothing to compare yet; the sweep of ES on A0 has 11 of 12 settings",
    )
    # one cell of three without its sweep
    world = [*sweep_of("es"), *sweep_of("grpo")[:7], *runs_of("es", 60), *runs_of("grpo", 50), base_record("A0", 20)]
    assert "0 of GRPO (the sweep of GRPO on A0 has 7 of 12 settings)" in judge("C1", world).text


def test_of_equal_scores_the_first_setting_of_the_sweep_wins_in_any_order() -> None:
    level = [r | {"curve": {"validation_greedy": [0.2] * 3}} for r in sweep_of("es")]
    first = arms.SWEEP["es"][0]
    records = [*runs_of("es", 60, **first), *runs_of("es_sampled", 50, **first)]
    for sweep in (level, level[::-1]):
        assert judge("C31", [*sweep, *records]).n == 16


def test_a_sweep_with_more_settings_than_declared_is_refused() -> None:
    records = [*runs_of("es", 60), *runs_of("es_sampled", 50)]
    thirteenth = sweep_of("es", choices=[{"sigma": 0.1, "alpha": 0.1}])
    with pytest.raises(
        ValueError, match="C31: the sweep of ES on A0 has 13 runs of 13 settings where 12 were declared"
    ):
        judge("C31", [*SWEEPS, *thirteenth, *records])
    again = sweep_of("es", choices=[{"sigma": 0.01, "alpha": 0.01}])
    with pytest.raises(ValueError, match="13 runs of 12 settings"):
        judge("C31", [*SWEEPS, *again, *records])
    elsewhere = [r | {"spec": r["spec"] | {"population_size": 8}} for r in thirteenth]
    assert judge("C31", [*SWEEPS, *elsewhere, *records]).n == 16


# ---- comparisons


def _countdown(es: int = 60, grpo: int = 40, seeds: int = 8) -> list[dict]:
    records = [*SWEEPS, *(base_record(base, 20) for base in ("A0", "A1", "A2"))]
    for base in ("A0", "A1", "A2"):
        records += runs_of("es", es, base, seeds) + runs_of("grpo", grpo, base, seeds)
    return records


def test_three_comparisons_on_three_bases() -> None:
    # at GRPO's last 10,000 completions ES is half way, in logarithms, from 1,000 (.25) to 100,000 (60 of 200)
    verdict = judge("C1", _countdown(es=60, grpo=40))
    assert (verdict.verdict, verdict.n, len(verdict.intervals)) == ("supported", 8, 9)
    for base in ("A0", "A1", "A2"):
        assert _value(verdict, f"{base} ES - base, test greedy") == pytest.approx(40 / PROBLEMS)
        assert _value(verdict, f"{base} ES - GRPO, test greedy") == pytest.approx(20 / PROBLEMS)
        equal = _value(verdict, f"{base} ES - GRPO, validation greedy at equal completions")
        assert equal == pytest.approx((0.25 + 0.3) / 2 - 0.2)
    assert (
        "A0 ES - base, test greedy 20.0 [" in verdict.text and "points from 10.0 % (n = 8, detectable" in verdict.text
    )
    assert verdict.text.endswith("not testable at this scale: the published accuracies")
    assert verdict.key.startswith("A0 ES - GRPO, test greedy 10.0 [") and verdict.key.endswith("] points (n = 8)")


@pytest.mark.parametrize(
    ("es", "grpo", "expected"),
    [(60, 50, "supported"), (60, 61, "contradicted"), (15, 10, "contradicted"), (60, 55, "underpowered")],
)
def test_the_worst_comparison_decides(es: int, grpo: int, expected: str) -> None:
    # 60 against 61 problems: the final comparison leaves it open, the one at equal completions (.275, .305) does not
    assert judge("C1", _countdown(es, grpo)).verdict == expected


def test_too_few_seeds_say_how_many_and_what_they_could_detect() -> None:
    verdict = judge("C1", _countdown(seeds=4))
    assert (verdict.verdict, verdict.n, verdict.p) == ("underpowered", 4, None)
    assert "needs 8 a cell, has A0 ES - base, test greedy: 4 of ES, 1 of base; " in verdict.text
    assert "(n = 4, detectable" in verdict.text


def test_a_single_seed_has_no_spread() -> None:
    verdict = judge("C33", [*SWEEPS, *runs_of("es", 60, seeds=1), *runs_of("grpo", 60)])
    assert (verdict.verdict, verdict.n) == ("underpowered", 1)
    assert "largest drawdown of validation greedy not defined (base 0 of the baseline has 1 seed(s)" in verdict.text


@pytest.mark.parametrize(
    ("grpo", "expected", "words"),
    [
        (56, "supported", ""),
        (80, "contradicted", "grpo ahead"),
        (30, "contradicted", "es ahead"),
        (59, "underpowered", ""),
    ],
)
def test_two_arms_match_or_one_is_ahead(grpo: int, expected: str, words: str) -> None:
    # ES has .25 after 1,000 FLOPs and .3 after 100,000: 55 problems at GRPO's last 10,000; the margin is 4 problems
    verdict = judge("C2", [*SWEEPS, *runs_of("es", 60), *runs_of("grpo", grpo)])
    assert (verdict.verdict, verdict.n) == (expected, 16)
    interval = verdict.intervals["GRPO - ES, validation temperature 1 at equal forward flops"]
    assert interval.level == 0.9 and interval.value == pytest.approx((grpo - 55) / PROBLEMS)
    assert (
        "points (90 % interval)" in verdict.text
        and (words in verdict.text)
        and ("ahead" in verdict.text) == bool(words)
    )
    assert (verdict.p < 0.05) == (expected == "supported")


def test_fifteen_seeds_are_too_few_for_a_match() -> None:
    verdict = judge("C2", [*SWEEPS, *runs_of("es", 60, seeds=15), *runs_of("grpo", 56)])
    assert (verdict.verdict, verdict.n) == ("underpowered", 15)


def test_a_match_on_the_test_set_counts_the_problems_too() -> None:
    rule = {
        "kind": "compare",
        "comparisons": [{"measure": {"test": "greedy"}, "of": "grpo", "to": "es", "by": "equivalence"}],
    }
    records = [*SWEEPS, *runs_of("es", 60), *runs_of("grpo", 62)]
    verdict = judge("C2", records, rule=rule, margin=0.05)
    assert verdict.verdict == "supported" and _value(verdict, "GRPO - ES, test greedy") == pytest.approx(0.01)
    assert judge("C2", records, rule=rule, margin=0.01).verdict == "underpowered"


def test_budgets_outside_a_curve_are_refused() -> None:
    late = runs_of("es", 60)
    for record in late:
        record["curve"] = record["curve"] | {"completions": [0, 20_000, 30_000, 40_000]}
    with pytest.raises(ValueError, match="claim C1: a curve from 20000 to 40000 has no score at 10000"):
        judge("C1", [*SWEEPS, *late, *runs_of("grpo", 50), base_record("A0", 20)])
    bare = [record | {"curve": {}} for record in runs_of("grpo", 50)]
    with pytest.raises(ValueError, match="C2: a record's curve has no 'validation_greedy'"):
        judge("C2", [*SWEEPS, *runs_of("es", 60), *bare])


@pytest.mark.parametrize(
    ("es", "grpo", "expected"), [(1, 6, "supported"), (6, 1, "contradicted"), (2, 2, "underpowered")]
)
def test_the_ratio_of_spreads(es: int, grpo: int, expected: str) -> None:
    verdict = judge("C8", [*SWEEPS, *runs_of("es", 60, jitter=es), *runs_of("grpo", 60, jitter=grpo)])
    assert (verdict.verdict, verdict.n) == (expected, 16)
    for label in ("ES over GRPO, test greedy", "ES over GRPO, validation greedy at mean 26 %"):
        assert _value(verdict, label) == pytest.approx(log(es / grpo))
    assert f"ES over GRPO, test greedy {es / grpo:.2f} [" in verdict.text and "detectable 0." in verdict.text


def test_spread_where_a_mean_never_gets_or_nothing_varies() -> None:
    low = judge("C8", [*SWEEPS, *runs_of("es", 60), *runs_of("grpo", 51, jitter=6)])
    assert low.verdict == "underpowered" and low.text.startswith("the interval does not decide on ES over GRPO, valid")
    assert "at mean 26 % not defined (an arm's mean stays below it, at most 30.0 % and 25.5 %)" in low.text
    flat = judge("C8", [*SWEEPS, *runs_of("es", 60, jitter=0), *runs_of("grpo", 60)])
    assert flat.verdict == "underpowered" and "not defined (values: all values, or" in flat.text
    assert flat.key == "ES over GRPO, test greedy not defined (n = 16)"


def _drawdowns(arm: str, falls: list[float]) -> list[dict]:
    records = runs_of(arm, 60, seeds=len(falls))
    for record, fall in zip(records, falls, strict=True):
        record["curve"] = record["curve"] | {"validation_greedy": [0.1, 0.3, 0.3 - fall, 0.3 - fall / 2, 0.4]}
    return records


def test_the_largest_drawdown() -> None:
    steady, falling = [0.01, 0.02] * 8, [0.05, 0.07] * 8
    records = [*SWEEPS, *_drawdowns("es", steady), *_drawdowns("grpo", falling)]
    verdict = evaluate(DECLARED["C33"], records, declared=[], resamples=10_000)
    label = "GRPO - ES, largest drawdown of validation greedy"
    assert verdict.verdict == "supported" and _value(verdict, label) == pytest.approx(0.06 - 0.015)
    assert f"{label} 4.5 [" in verdict.text and "points from 1.5 (n = 16, detectable" in verdict.text
    # all 256 pairs are won: none of 20,000 permutations but the least possible share
    assert verdict.p == pytest.approx(2 / 20_001, rel=0.01)
    back = judge("C33", [*SWEEPS, *_drawdowns("es", falling), *_drawdowns("grpo", steady)])
    assert (back.verdict, back.p) == ("contradicted", 1.0)


@pytest.mark.parametrize(
    ("n8", "n30", "n128", "expected"),
    [(60, 60, 60, "supported"), (60, 50, 50, "contradicted"), (60, 56, 50, "underpowered"), (20, 60, 20, "supported")],
)
def test_not_worse_than_another_population(n8: int, n30: int, n128: int, expected: str) -> None:
    # problems are the same in all arms and solved from the first on, so a difference of 4 problems is 2 points
    records = [*SWEEPS, *runs_of("es", n30)]
    for size, right, steps in ((8, n8, 780), (128, n128, 49)):
        records += runs_of("es", right, seeds=8, population_size=size, steps=steps, alpha=0.005 * size / 30)
    verdict = judge("C10", records)
    assert (verdict.verdict, verdict.n) == (expected, 8)
    assert _value(verdict, "ES n30 - ES n128, test greedy") == pytest.approx((n30 - n128) / PROBLEMS)
    assert f"trend n8 {n8 / 2:.1f} %, n30 {n30 / 2:.1f} %, n128 {n128 / 2:.1f} %; Jonckheere's p " in verdict.text


def test_what_is_only_reported_decides_nothing() -> None:
    records = [*SWEEPS, *runs_of("dr_grpo", 70, seeds=8), *runs_of("grpo", 50)]
    alone = judge("C30", records)
    assert (alone.verdict, list(alone.intervals)) == ("supported", ["Dr.GRPO - GRPO, test greedy"])
    records += runs_of("dr_grpo", 30, seeds=5, scale_rewards="group") + runs_of(
        "grpo", 60, seeds=8, scale_rewards="none"
    )
    verdict = judge("C30", records)
    assert (verdict.verdict, verdict.n, verdict.key) == ("supported", 8, alone.key)
    assert _value(verdict, "Dr.GRPO - Dr.GRPO scaled, test greedy") == pytest.approx(40 / PROBLEMS)
    assert _value(verdict, "GRPO unscaled - GRPO, test greedy") == pytest.approx(10 / PROBLEMS)
    assert "(n = 8 v 16, detectable" in verdict.text


@pytest.mark.parametrize(("es", "expected"), [(62, "supported"), (50, "within margin"), (54, "underpowered")])
def test_a_margin(es: int, expected: str) -> None:
    records = [*SWEEPS, *runs_of("es", es), *runs_of("es_sampled", 50, seeds=8)]
    verdict = judge("C31", records)
    assert (
        verdict.verdict == expected
        and "ES - ES with sampled fitness, test temperature 1 0.0 [0.0, 0.0]" in verdict.text
    )


# ---- sums over cells


def _transfer(shared: dict[str, int], best: dict[str, int], seeds: int = 8) -> list[dict]:
    """Of each arm, problems solved on A1 by the shared and by the best setting; on A2 the shared one is the best."""
    records = list(SWEEPS)
    for arm in ("es", "grpo"):
        choices = DECLARED["C9"]["rule"]["best"]["among"][arm]
        records += sweep_of(arm, "A1", OTHER[arm], choices) + sweep_of(arm, "A2", TUNED[arm], choices)
        records += runs_of(arm, shared[arm], "A1", seeds) + runs_of(arm, best[arm], "A1", seeds, **OTHER[arm])
        records += runs_of(arm, 50, "A2", seeds)
    return records


def _concise(arm: str, right: tuple[int, int], proxy: float = -1.0, seeds: int = 16, kl: float = 3.0) -> list[dict]:
    """Runs that are right on so many of 200 questions at a proxy of -4 and at their end; the base is right on all."""
    fields = {k: v for k, v in DECLARED["C3"]["arms"][arm].items() if k != "measure"}
    records = []
    for seed, shift in zip(range(seeds), JITTER, strict=False):
        solved = [PROBLEMS, PROBLEMS, right[0] + shift, right[1] + shift]
        bits = [[1] * n + [0] * (PROBLEMS - n) for n in solved]
        curve = {"step": [0, 1, 2, 4], "kl": [0.0, 0.1, 0.3, kl]}
        for decoding, draws in (("greedy", 1), ("t1", 2)):
            curve[f"proxy_{decoding}"] = [-27.0, -20.0, -4.0, proxy]
            curve[f"right_{decoding}"] = [n / PROBLEMS for n in solved]
            curve[f"right_bits_{decoding}"] = [pack_bits(row * draws) for row in bits]
        spec = fields | {"measure": "strict", "scale": "tiny", "seed": seed, "base_digest": "digest of B0"}
        records.append({"spec": spec, "status": "finished", "curve": curve, "test": {"n": PROBLEMS}})
    return records


def _c3(es: list[dict], grpo: list[dict]) -> claims.Verdict:
    """The verdict without what is only reported, which takes as long again."""
    rule = {key: value for key, value in DECLARED["C3"]["rule"].items() if key != "also"}
    return evaluate(DECLARED["C3"] | {"rule": rule}, es + grpo, declared=[])


@pytest.mark.parametrize(
    ("es", "grpo", "expected"),
    [
        ((190, 180), (120, 60), "supported"),  # GRPO hacks, ES does not
        ((120, 60), (190, 180), "contradicted"),
        ((120, 60), (120, 60), "underpowered"),  # both hack alike
        ((190, 180), (190, 170), "underpowered"),  # neither hacks, though ES is right more often
    ],
)
def test_who_hacks_more(es: tuple, grpo: tuple, expected: str) -> None:
    verdict = _c3(_concise("es", es), _concise("grpo", grpo))
    assert verdict.verdict == expected


def test_matched_points_are_the_first_that_get_there_and_the_others_are_counted() -> None:
    es = _concise("es", (190, 180), seeds=16)
    verdict = _c3(es, _concise("grpo", (120, 60)))
    # at -5 the third point, at -2 and at KL 0.5 the last one; jitter has mean 0 over sixteen seeds
    for label, points in {"at proxy -5": 35.0, "at proxy -2": 60.0, "at KL 0.5": 60.0}.items():
        (found,) = [i for name, i in verdict.intervals.items() if label in name and "greedy" in name]
        assert found.value == pytest.approx(points / 100)
    (rate,) = [i for name, i in verdict.intervals.items() if "hacked runs greedy" in name]
    assert rate.value == 1 and rate.n == 16
    assert "16 v 16 get there" in verdict.text and "from 0 of 16 to 16 of 16" in verdict.text
    # two runs that stop short: too few to judge the level, and it says so
    short = _concise("grpo", (120, 60))
    for record in short[:2]:
        record["curve"]["proxy_greedy"][-1] = -3.0
    verdict = _c3(es, short)
    assert verdict.verdict == "underpowered" and "14 of 16 runs of an arm get there" in verdict.text


def test_a_hack_needs_more_reward_and_fewer_right_answers() -> None:
    worse = _concise("grpo", (120, 60), proxy=-30.0)
    (rate,) = [
        i for name, i in _c3(_concise("es", (190, 180)), worse).intervals.items() if "hacked runs greedy" in name
    ]
    assert rate.value == 0
    (just,) = [
        i
        for name, i in _c3(_concise("es", (190, 180)), _concise("grpo", (190, 162))).intervals.items()
        if "hacked runs greedy" in name
    ]
    assert just.value == 0  # 19 points fewer, one or two more or less


@pytest.mark.parametrize(
    ("comparison", "message"),
    [
        ({"measure": {"hacked": "greedy"}, "of": "es", "to": "grpo", "above": 0}, "hacked runs are compared by rate"),
        ({"measure": {"test": "greedy"}, "of": "es", "to": "grpo", "by": "rate", "above": 0}, "and nothing else is"),
        (
            {"measure": {"right": "greedy"}, "of": "es", "to": "grpo", "above": 0},
            "right is measured at_proxy or",
        ),
        ({"measure": {"right": "t1", "at_mean": 1}, "of": "es", "to": "grpo", "above": 0}, r"at_kl, got \['at_mean'\]"),
    ],
)
def test_measures_of_hacking_are_declared_whole(comparison: dict, message: str) -> None:
    claim = DECLARED["C3"] | {"rule": {"kind": "compare", "comparisons": [comparison]}}
    with pytest.raises(ValueError, match=message):
        check_rule(claim)


def _ended(arm: str, right: int, gap: float, seeds: int, **spec: object) -> list[dict]:
    """Runs of C34: right on so many of 200 questions at the end, with a Jensen gap at every sigma."""
    fields = DECLARED["C34"]["arms"][f"{arm}_map"] | {"scale": "tiny", "base_digest": "digest of B0"} | spec
    curve = {"proxy_greedy": [-27.0, -1.0], "right_greedy": [1.0, right / PROBLEMS]}
    gaps = [dict.fromkeys(("0.003", "0.01", "0.03"), gap + 0.1 * shift) for shift in JITTER[:seeds]]
    return [
        {"spec": fields | {"seed": seed}, "status": "finished", "curve": curve, "jensen": {"gaps": of_run}}
        for seed, of_run in enumerate(gaps)
    ]


def _c34(hacked_grpo: float, hacked_es: float, clean_grpo: float) -> list[dict]:
    here = {"es": {"sigma": 0.01, "alpha": 0.005}, "grpo": {"learning_rate": 3e-4, "beta": 0.0}}
    records = _ended("es", 100, hacked_es, 8, **here["es"]) + _ended("grpo", 100, hacked_grpo, 8, **here["grpo"])
    for beta in (0.01, 0.04, 0.1):
        records += _ended("grpo", 190, clean_grpo, 4, learning_rate=1e-4, beta=beta)
        records += _ended("grpo", 120, hacked_grpo, 4, learning_rate=1e-3, beta=beta)
    return records


@pytest.mark.parametrize(
    ("gaps", "expected"),
    [
        ((3.0, 1.0, 1.0), "supported"),
        ((1.0, 3.0, 0.0), "contradicted"),  # hacks of ES are the more fragile
        ((3.0, 1.0, 4.0), "contradicted"),  # so are clean ends
        ((2.0, 2.0, 0.0), "underpowered"),
    ],
)
def test_hacks_must_be_the_more_fragile_ends(gaps: tuple, expected: str) -> None:
    verdict = evaluate(DECLARED["C34"], _c34(*gaps), declared=[])
    assert verdict.verdict == expected
    found = verdict.intervals["hacked GRPO - hacked ES, gap at 0.01"]
    assert found.value == pytest.approx(gaps[0] - gaps[1]) and found.n == 8
    found = verdict.intervals["hacked GRPO map - clean GRPO map, gap at 0.01"]
    assert found.value == pytest.approx(gaps[0] - gaps[2], abs=0.1) and found.n == 12


def test_gaps_without_an_end_of_a_kind_are_underpowered() -> None:
    records = [r for r in _c34(3.0, 1.0, 1.0) if r["curve"]["right_greedy"][-1] < 0.9]
    verdict = evaluate(DECLARED["C34"], records, declared=[])
    assert verdict.verdict == "underpowered" and "0 of 20 runs, of 0 settings" in verdict.text
    # without any run of an arm there is nothing to judge
    assert evaluate(DECLARED["C34"], [r for r in records if r["spec"]["arm"] == "grpo"], declared=[]).n == 0


def test_a_map_takes_no_runs_that_are_not_of_it() -> None:
    records = _c34(3.0, 1.0, 1.0)
    foreign = records[-1] | {"spec": records[-1]["spec"] | {"noise_draws": 1, "seed": 9}}
    with pytest.raises(ValueError, match="C34: grpo_map: runs of a map differ in noise_draws"):
        evaluate(DECLARED["C34"], [*records, foreign], declared=[])
    with pytest.raises(ValueError, match="two records of one setting have seed 3"):
        evaluate(DECLARED["C34"], [*records, records[-1]], declared=[])
    mapped = _mapped(lambda a, b: a + b > -1)
    again = mapped[0] | {"spec": mapped[0]["spec"] | {"noise_draws": 1}}
    with pytest.raises(ValueError, match="claim C4: base"):
        evaluate(DECLARED["C4"], [*mapped, again])


def _mapped(collapses: object, seeds: int = 4) -> list[dict]:
    """A map of C4 on both bases; collapses(a, b): of setting (a, b), -1 to 1 in sigma and in alpha."""
    fields = dict(DECLARED["C4"]["arms"]["treatment"].items()) | {"scale": "tiny", "population_size": 30}
    records = []
    for base in ("B0", "B1"):
        own = {"base": base, "base_digest": f"digest of {base}"}
        spec = DECLARED["C4"]["arms"]["base"] | {"scale": "tiny"} | own
        breaking = {"breaking": {"0.01": 0.9, "0.03": 0.1}, "test": {"greedy": 1.0}}
        records.append({"spec": spec, "status": "finished"} | breaking)
        for a in (-1, 0, 1):
            for b in (-1, 0, 1):
                here = fields | own | {"sigma": 0.01 * 3**a, "alpha": 0.005 * 3**b}
                for seed in range(seeds):
                    right = [1.0, 0.5 if collapses(a, b) else 0.9]
                    run = {"spec": here | {"seed": seed}, "status": "finished", "curve": {"right_greedy": right}}
                    records.append(run)
    return records


@pytest.mark.parametrize(
    ("collapses", "expected"),
    [
        (lambda a, b: a + b > -1 or (a, b) == (-1, 0), "supported"),  # 2 of 9 safe
        (lambda a, b: a + b > -1, "underpowered"),  # 3 of 9: six of eighteen may be half
        (lambda a, b: a + b > 1, "contradicted"),  # 8 of 9 safe
        (lambda a, b: b > -1, "underpowered"),  # sigma has nothing to say
        (lambda a, b: True, "underpowered"),  # nothing to rank
    ],
)
def test_a_map_of_settings(collapses: object, expected: str) -> None:
    verdict = evaluate(DECLARED["C4"], _mapped(collapses))
    assert verdict.verdict == expected, verdict.text
    safe = sum(not collapses(a, b) for a in (-1, 0, 1) for b in (-1, 0, 1)) / 9
    assert verdict.intervals["settings without collapse"].value == pytest.approx(safe) and verdict.n == 9


def test_half_a_map_is_not_judged() -> None:
    one_base = [r for r in _mapped(lambda a, b: a + b > -1) if r["spec"]["base"] == "B0"]
    assert evaluate(DECLARED["C4"], one_base).verdict == "open"
    small = [r for r in _mapped(lambda a, b: a + b > -1) if r["spec"].get("sigma") != 0.03]
    assert evaluate(DECLARED["C4"], small).verdict == "underpowered"


def test_the_breaking_point_lies_between_two_measured_sigmas() -> None:
    base = {"breaking": {"0.01": 0.8, "0.04": 0.3, "0.1": 0.35}, "test": {"greedy": 0.9}}
    assert collapse.breaking_sigma(base) == pytest.approx(0.01 * 4**0.7)
    for breaking, greedy in (({"0.01": 0.8, "0.04": 0.6}, 0.9), ({"0.01": 0.0, "0.04": 0.0}, 0.0)):
        with pytest.warns(
            UserWarning, match="was not reached: sigma 0.01 leaves 0.[08]0 right, 0.04 0.[06]0, and half"
        ):
            assert np.isnan(collapse.breaking_sigma({"breaking": breaking, "test": {"greedy": greedy}}))


def test_a_base_that_no_measured_noise_breaks_ranks_nothing() -> None:
    records = _mapped(lambda a, b: a + b > -1)
    unbroken = [r | {"breaking": {"0.01": 0.9, "0.03": 0.8}} if "breaking" in r else r for r in records]
    with pytest.warns(UserWarning, match="was not reached"):
        verdict = evaluate(DECLARED["C4"], unbroken)
    assert verdict.verdict == "underpowered" and "no measured noise halves the right answers" in verdict.text
    assert (
        verdict.intervals["settings without collapse"].value
        == evaluate(DECLARED["C4"], records).intervals["settings without collapse"].value
    )


@pytest.mark.parametrize(
    ("comparison", "message"),
    [
        ({"of": ["grpo", "hacked"], "to": ["es", "odd"], "sigma": "0.01", "above": 0}, "hacked or clean"),
        ({"of": ["grpo", "hacked"], "to": ["es", "clean"], "sigma": "0.02", "above": 0}, "sigma '0.02'"),
        ({"of": ["sft", "hacked"], "to": ["es", "clean"], "sigma": "0.01", "above": 0}, "'sft' of the rule"),
    ],
)
def test_gaps_are_declared_whole(comparison: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_rule(DECLARED["C34"] | {"rule": {"kind": "gaps", "comparisons": [comparison]}})


@pytest.mark.parametrize(
    ("es", "grpo", "expected"), [(2, 30, "supported"), (30, 2, "contradicted"), (20, 20, "underpowered")]
)
def test_regret(es: int, grpo: int, expected: str) -> None:
    records = _transfer({"es": 50, "grpo": 40}, {"es": 50 + es, "grpo": 40 + grpo})
    verdict = judge("C9", records)
    assert (verdict.verdict, verdict.n) == (expected, 8)
    # on A2 the best setting is the shared one: 0 there, half of the difference on A1
    assert _value(verdict, "regret, GRPO - ES") == pytest.approx((grpo - es) / 2 / PROBLEMS)
    assert "GRPO A1 best " in verdict.text and "A2 best 25.0 %, A2 shared 25.0 %; ES A1 best" in verdict.text


def test_regret_without_the_sweep_on_a_base_is_open_and_pairs_the_seeds_that_all_have() -> None:
    records = _transfer({"es": 50, "grpo": 40}, {"es": 50, "grpo": 70})
    of_sweep = [r for r in records if r["spec"]["base"] == "A2" and r["spec"]["seed"] == arms.SWEEP_SEED]
    verdict = judge("C9", [r for r in records if r is not of_sweep[0]])
    assert (verdict.verdict, verdict.text) == (
        "open",
        "nothing to compare yet; the sweep of ES on A2 has 3 of 4 settings",
    )
    missing = [r for r in records if (r["spec"]["base"], r["spec"]["arm"], r["spec"]["seed"]) != ("A2", "es", 3)]
    verdict = judge("C9", missing)
    assert (verdict.verdict, verdict.n) == ("underpowered", 7)
    assert "A1 best: 8 of GRPO, 8 of ES; A1 shared: 8 of GRPO, 8 of ES; A2 best: 8 of GRPO, 7 of ES;" in verdict.text


def test_regret_over_other_settings_than_the_declared_ones_is_refused() -> None:
    records = _transfer({"es": 50, "grpo": 40}, {"es": 50, "grpo": 70})
    choices = [*DECLARED["C9"]["rule"]["best"]["among"]["es"][:3], {"sigma": 0.03, "alpha": 0.02}]
    of_sweep = {"base": "A1", "arm": "es", "seed": arms.SWEEP_SEED}.items()
    records = [r for r in records if not of_sweep <= r["spec"].items()] + sweep_of("es", "A1", TUNED["es"], choices)
    with pytest.raises(
        ValueError, match=r"sweep of ES on A1 has sigma and alpha \(0.03, 0.02\), which the claim does not"
    ):
        judge("C9", records)


@pytest.mark.parametrize(
    ("es", "grpo", "expected"), [(2, 8, "supported"), (8, 2, "contradicted"), (5, 5, "underpowered")]
)
def test_the_slope_over_unique_prompts(es: int, grpo: int, expected: str) -> None:
    # so many problems more with each tenfold of prompts, but the cells are not evenly spaced: 2, 50, 200, 1,000
    records, cells = list(SWEEPS), (2, 50, 200, 1000)
    for arm, rise, steps in (("es", es, 104), ("grpo", grpo, 125)):
        for prompts in cells:
            records += runs_of(arm, 40 + round(rise * np.log10(prompts)), seeds=8, steps=steps, unique_prompts=prompts)
    verdict = judge("C37", records)
    assert (verdict.verdict, verdict.n) == (expected, 8)
    x = np.log10(cells)
    slopes = {rise: np.polyfit(x, [round(rise * v) / PROBLEMS for v in x], 1)[0] for rise in (es, grpo)}
    assert _value(verdict, "slope over log10, GRPO - ES") == pytest.approx(slopes[grpo] - slopes[es])
    assert "GRPO 2 2" in verdict.text and ", 1000 " in verdict.text


@pytest.mark.parametrize(("es", "expected"), [(55, "supported"), (30, "contradicted"), (40, "underpowered")])
def test_the_change_with_the_horizon(es: int, expected: str) -> None:
    records = []
    for steps, of_es, of_grpo in ((4, 60, 60), (16, 5, 190), (64, es, 40)):
        filler = {"filler_steps": steps, "max_completion_length": steps + 24}
        records += runs_of("es", of_es, "H0", 8, steps=52, **filler)
        records += runs_of("grpo", of_grpo, "H0", 8, steps=125, **filler)
    verdict = judge("C11", records)
    # what is in between counts for nothing
    assert _value(verdict, "last less first, ES - GRPO") == pytest.approx((es - 40) / PROBLEMS)
    assert (verdict.verdict, verdict.n) == (expected, 8)
    other = [r | {"spec": r["spec"] | {"base_digest": "another"}} if r["spec"]["arm"] == "es" else r for r in records]
    with pytest.raises(ValueError, match="claim C11: 4: runs start from different bases"):
        judge("C11", other)


# ---- bounds


def test_bounds_of_tuned_runs_and_of_kl_records() -> None:
    ledger = {"replay_error": 0.0, "bytes": 208 * 400, "gzip_bytes": 208 * 150}
    tuned = [record | {"ledger": ledger} for record in runs_of("es", 60)]
    verdict = judge("C38", [*SWEEPS, *tuned])
    assert (verdict.verdict, verdict.n, _value(verdict, "ledger_bytes_a_step")) == ("supported", 16, 400.0)
    kl = {"exact_token_mean": 0.1, "k1_token_std": 0.6, "k3_token_std": 0.4, "k3_gradient_token_cosine": 0.9}
    step = DECLARED["C29"]["arms"]["treatment"] | {"scale": "tiny"}
    for bias, expected in ((0.05, "supported"), (0.005, "contradicted")):
        records = [
            {"spec": step | {"repeat": r}, "status": "finished", "kl": kl | {"k2_token_bias": bias + r / 10_000}}
            for r in range(8)
        ]
        verdict = judge("C29", records)
        assert (verdict.verdict, _value(verdict, "k1_over_k3_std")) == (expected, pytest.approx(1.5))
        assert _value(verdict, "k2_relative_bias") == pytest.approx(10 * bias + 0.0035)


# ---- p-values and Holm's correction


def _finding(value: float, low: float, side: str = "above", bound: float = 0.0, test: float | None = None) -> Finding:
    interval = Interval(value, low, 2 * value - low, 8)
    return Finding("x", 8, "x: 8", interval, bound, side, test)


@pytest.mark.parametrize(
    ("finding", "margin", "expected"),
    [
        (_finding(1.0, 0.0), 0.0, 0.05),  # the interval just touches the bound
        (_finding(3.0, 2.0), 2.0, 0.05),
        (_finding(2.0, 1.0, bound=1.0), 0.0, 0.05),
        (_finding(1.0, 0.5), 0.0, 0.0000885),  # 3.92 standard errors
        (_finding(-1.0, -2.0), 0.0, 1.0),
        (_finding(-1.0, -2.0, "below"), 0.0, 0.05),
        (_finding(1.0, 0.0, "below"), 0.0, 1.0),
        (_finding(1.0, 1.0), 0.0, 0.0),  # no spread at all
        (_finding(1.0, 0.5, test=0.03), 0.0, 0.03),
        (_finding(-1.0, -1.5, test=0.03), 0.0, 1.0),
        (_finding(0.0, -0.5, "within", test=0.2), 1.0, 0.2),
    ],
)
def test_p_values(finding: Finding, margin: float, expected: float) -> None:
    assert finding.p(margin) == pytest.approx(expected, rel=1e-3)


def test_holm_within_a_notebook() -> None:
    of_claim = {"V": "es_sampled", "W": "dr_grpo", "X": "dapo", "Y": "rloo", "Z": "grpo"}

    def claim(name: str, primary: str | None = "05") -> dict:
        compared = {"a": {"kind": "train", "arm": of_claim[name]}, "b": {"kind": "train", "arm": "es"}}
        rule = {
            "kind": "compare",
            "comparisons": [{"measure": {"drawdown": "greedy"}, "of": "a", "to": "b", "above": 0}],
        }
        declared = {k: v for k, v in DECLARED["C33"].items() if k != "primary"}
        return declared | {"id": name, "arms": compared, "rule": rule} | ({"primary": primary} if primary else {})

    family = [claim("W"), claim("X"), claim("Y"), claim("Z"), claim("V", None)]
    falls = np.linspace(0, 0.02, 16)  # the difference of two such means has a standard error of .0022
    records = _drawdowns("es", list(falls))
    for name, by in (("V", 0.0048), ("W", 0.0048), ("X", 0.0046), ("Y", 0.05)):
        records += _drawdowns(of_claim[name], list(falls + by))
    raw = {c["id"]: evaluate(c, records, declared=[], resamples=4_000) for c in family}
    assert [raw[name].verdict for name in "VWXYZ"] == ["supported"] * 4 + ["open"]
    assert 0.025 < raw["W"].p < raw["X"].p < 0.05 and raw["Y"].p < 1e-6 and raw["Z"].p is None
    # Z has no runs and counts all the same, as p = 1; V is no primary claim
    verdicts = {verdict.id: verdict for verdict in claims.evaluate_together(family, records, resamples=4_000)}
    assert [verdicts[name].verdict for name in "VWXYZ"] == [
        "supported",
        "underpowered",
        "underpowered",
        "supported",
        "open",
    ]
    assert verdicts["W"].p == verdicts["X"].p == pytest.approx(3 * raw["W"].p)
    assert verdicts["Y"].p == pytest.approx(4 * raw["Y"].p) and verdicts["V"] == raw["V"]
    assert verdicts["W"].text.startswith("supported by itself, but p = 0.0")
    assert "after Holm's correction, family of 4. Dr.GRPO a - ES b, largest drawdown" in verdicts["W"].text
    assert verdicts["Y"].text.endswith("after Holm's correction, family of 4")
    assert evaluate(family[0], records, declared=family, resamples=4_000) == verdicts["W"]


# ---- all of them together


def _field() -> list[dict]:
    """Records by which the comparisons of arms, the regret and the ledgers can be judged."""
    ledger = {"replay_error": 0.0, "bytes": 208 * 400, "gzip_bytes": 208 * 150}
    records = _transfer({"es": 62, "grpo": 40}, {"es": 63, "grpo": 60}) + [base_record(f"A{i}", 20) for i in range(3)]
    records += [record | {"ledger": ledger} for record in runs_of("es", 62)] + runs_of("grpo", 40, jitter=3)
    records += runs_of("es_sampled", 50, seeds=8) + runs_of("dr_grpo", 41, seeds=8)
    records += runs_of("es", 60, seeds=8, population_size=8, steps=780, alpha=0.005 * 8 / 30)
    return records + runs_of("es", 61, seeds=8, population_size=128, steps=49, alpha=0.005 * 128 / 30)


@settings(max_examples=2, deadline=None)
@given(st.randoms(use_true_random=False))
def test_the_order_of_the_records_does_not_matter(rng: random.Random) -> None:
    shuffled = _field()
    rng.shuffle(shuffled)
    assert claims.evaluate_together(FAMILY, shuffled, resamples=20) == _in_order(20)


@cache
def _in_order(resamples: int) -> list[claims.Verdict]:
    return claims.evaluate_together(FAMILY, _field(), resamples=resamples)


def test_the_field_is_judged() -> None:
    found = {verdict.id: verdict.verdict for verdict in _in_order(400)}
    for expected, names in {
        "supported": {"C9b", "C10", "C31", "C33b", "C38"},
        "not evidence": {"C9", "C33"},  # an untrained base has neither regret nor drawdown
        "contradicted": set(),
        "superseded": {"C2", "C3b", "C15b"},  # ES is 8 points ahead; no run of conciseness or of ESSA is here
        "within margin": {"C30"},
        "underpowered": {"C1", "C8"},  # on A2 both arms solve 50 problems; GRPO's mean never reaches 26 %
        "not testable at this scale": {"C15", "C17"},
    }.items():
        assert {name for name, verdict in found.items() if verdict == expected} == names
