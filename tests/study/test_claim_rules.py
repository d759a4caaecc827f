"""The rules of the field's claims on hand-built records: a table of worlds, and what single verdicts say."""

from collections.abc import Callable
from math import log

import numpy as np
import pytest
from claim_worlds import (
    DECLARED,
    JITTER,
    OTHER,
    PROBLEMS,
    SWEEPS,
    TUNED,
    base_record,
    evaluate,
    judge,
    runs_of,
    sweep_of,
)
from evoalign_study import claims
from evoalign_study.claims.findings import Finding
from evoalign_study.records import pack_bits

from evoalign_lib import arms
from evoalign_lib.analysis.stats import Interval


def _countdown(es: int = 60, grpo: int = 40, seeds: int = 8) -> list[dict]:
    records = [*SWEEPS, *(base_record(base, 20) for base in ("A0", "A1", "A2"))]
    for base in ("A0", "A1", "A2"):
        records += runs_of("es", es, base, seeds) + runs_of("grpo", grpo, base, seeds)
    return records


def _drawdowns(arm: str, falls: list[float]) -> list[dict]:
    records = runs_of(arm, 60, seeds=len(falls))
    for record, fall in zip(records, falls, strict=True):
        record["curve"] = record["curve"] | {"validation_greedy": [0.1, 0.3, 0.3 - fall, 0.3 - fall / 2, 0.4]}
    return records


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


def _populations(n8: int, n30: int, n128: int) -> list[dict]:
    records = [*SWEEPS, *runs_of("es", n30)]
    for size, right, steps in ((8, n8, 780), (128, n128, 49)):
        records += runs_of("es", right, seeds=8, population_size=size, steps=steps, alpha=0.005 * size / 30)
    return records


def _few_prompts(es: int, grpo: int) -> list[dict]:
    """So many problems more with each tenfold of prompts, but the cells are not evenly spaced: 2, 50, 200, 1,000."""
    records = list(SWEEPS)
    for arm, rise, steps in (("es", es, 104), ("grpo", grpo, 125)):
        for prompts in (2, 50, 200, 1000):
            right = 40 + round(rise * np.log10(prompts))
            records += runs_of(arm, right, seeds=8, steps=steps, unique_prompts=prompts)
    return records


def _horizons(es: int) -> list[dict]:
    """What lies between the first and the last number of steps counts for nothing."""
    records = []
    for steps, right, other in ((4, 60, 60), (16, 5, 190), (64, es, 40)):
        filler = {"filler_steps": steps, "max_completion_length": steps + 24}
        records += runs_of("es", right, "H0", 8, steps=52, **filler)
        records += runs_of("grpo", other, "H0", 8, steps=125, **filler)
    return records


def _kl(bias: float) -> list[dict]:
    kl = {"exact_token_mean": 0.1, "k1_token_std": 0.6, "k3_token_std": 0.4, "k3_gradient_token_cosine": 0.9}
    step = DECLARED["C29"]["arms"]["treatment"] | {"scale": "tiny"}
    return [
        {"spec": step | {"repeat": r}, "status": "finished", "kl": kl | {"k2_token_bias": bias + r / 10_000}}
        for r in range(8)
    ]


def _slope(rise: int) -> float:
    x = np.log10((2, 50, 200, 1000))
    return np.polyfit(x, [round(rise * v) / PROBLEMS for v in x], 1)[0]


def _spreads(es: int, grpo: int) -> list[dict]:
    return [*SWEEPS, *runs_of("es", 60, jitter=es), *runs_of("grpo", 60, jitter=grpo)]


def _sampled(es: int) -> list[dict]:
    return [*SWEEPS, *runs_of("es", es), *runs_of("es_sampled", 50, seeds=8)]


STEADY, FALLING = [0.01, 0.02] * 8, [0.05, 0.07] * 8
HACKS, KEEPS = (120, 60), (190, 180)
EQUAL = "GRPO - ES, validation temperature 1 at equal forward flops"
SPREAD = "ES over GRPO, validation greedy at mean 26 %"
FALL = "GRPO - ES, largest drawdown of validation greedy"
WORLDS: list[tuple[str, Callable[[], list[dict]], str, dict[str, float]]] = [
    # at GRPO's last 10,000 completions ES is half way, in logarithms, from 1,000 (.25) to 100,000 (60 of 200)
    ("C1", lambda: _countdown(60, 40), "supported", {"A1 ES - GRPO, test greedy": 20 / PROBLEMS}),
    ("C1", lambda: _countdown(60, 40), "supported", {"A0 ES - GRPO, validation greedy at equal completions": 0.075}),
    ("C1", lambda: _countdown(60, 61), "contradicted", {"A0 ES - base, test greedy": 40 / PROBLEMS}),
    ("C1", lambda: _countdown(60, 55), "underpowered", {}),
    ("C1", lambda: _countdown(seeds=4), "underpowered", {}),
    # 55 problems at GRPO's last 10,000 FLOPs; the margin is 4 problems
    ("C2", lambda: [*SWEEPS, *runs_of("es", 60), *runs_of("grpo", 56)], "supported", {EQUAL: 1 / PROBLEMS}),
    ("C2", lambda: [*SWEEPS, *runs_of("es", 60), *runs_of("grpo", 80)], "contradicted", {EQUAL: 25 / PROBLEMS}),
    ("C2", lambda: [*SWEEPS, *runs_of("es", 60), *runs_of("grpo", 59)], "underpowered", {EQUAL: 4 / PROBLEMS}),
    ("C2", lambda: [*SWEEPS, *runs_of("es", 60, seeds=15), *runs_of("grpo", 56)], "underpowered", {}),
    ("C8", lambda: _spreads(1, 6), "supported", {SPREAD: log(1 / 6), "ES over GRPO, test greedy": log(1 / 6)}),
    ("C8", lambda: _spreads(6, 1), "contradicted", {SPREAD: log(6)}),
    ("C8", lambda: _spreads(2, 2), "underpowered", {SPREAD: 0.0}),
    ("C8", lambda: _spreads(0, 1), "underpowered", {}),
    ("C33", lambda: [*SWEEPS, *_drawdowns("es", STEADY), *_drawdowns("grpo", FALLING)], "supported", {FALL: 0.045}),
    ("C33", lambda: [*SWEEPS, *_drawdowns("es", FALLING), *_drawdowns("grpo", STEADY)], "contradicted", {}),
    # problems are the same in all arms and solved from the first on, so a difference of 4 problems is 2 points
    ("C10", lambda: _populations(60, 60, 60), "supported", {"ES n30 - ES n128, test greedy": 0.0}),
    ("C10", lambda: _populations(60, 50, 50), "contradicted", {"ES n30 - ES n8, test greedy": -0.05}),
    ("C10", lambda: _populations(60, 56, 50), "underpowered", {}),
    ("C31", lambda: _sampled(62), "supported", {"ES - ES with sampled fitness, test greedy": 0.06}),
    ("C31", lambda: _sampled(50), "within margin", {}),
    ("C31", lambda: _sampled(54), "underpowered", {}),
    (
        "C3",
        lambda: _concise("es", KEEPS) + _concise("grpo", HACKS),
        "supported",
        {"GRPO - ES, hacked runs greedy": 1.0},
    ),
    ("C3", lambda: _concise("es", HACKS) + _concise("grpo", KEEPS), "contradicted", {}),
    (
        "C3",
        lambda: _concise("es", HACKS) + _concise("grpo", HACKS),
        "underpowered",
        {"GRPO - ES, hacked runs greedy": 0},
    ),
    ("C34", lambda: _c34(3.0, 1.0, 1.0), "supported", {"hacked GRPO - hacked ES, gap at 0.01": 2.0}),
    ("C34", lambda: _c34(1.0, 3.0, 0.0), "contradicted", {}),
    ("C34", lambda: _c34(3.0, 1.0, 4.0), "contradicted", {}),  # so are clean ends
    ("C34", lambda: _c34(2.0, 2.0, 0.0), "underpowered", {}),
    (
        "C4",
        lambda: _mapped(lambda a, b: a + b > -1 or (a, b) == (-1, 0)),
        "supported",
        {"settings without collapse": 2 / 9},
    ),
    ("C4", lambda: _mapped(lambda a, b: a + b > -1), "underpowered", {"settings without collapse": 3 / 9}),
    ("C4", lambda: _mapped(lambda a, b: a + b > 1), "contradicted", {"settings without collapse": 8 / 9}),
    ("C4", lambda: _mapped(lambda a, b: b > -1), "underpowered", {}),  # sigma has nothing to say
    ("C4", lambda: _mapped(lambda a, b: True), "underpowered", {"settings without collapse": 0.0}),  # nothing to rank
    # on A2 the best setting is the shared one: 0 there, half of the difference on A1
    ("C9", lambda: _transfer({"es": 50, "grpo": 40}, {"es": 52, "grpo": 70}), "supported", {"regret, GRPO - ES": 0.07}),
    (
        "C9",
        lambda: _transfer({"es": 50, "grpo": 40}, {"es": 80, "grpo": 42}),
        "contradicted",
        {"regret, GRPO - ES": -0.07},
    ),
    (
        "C9",
        lambda: _transfer({"es": 50, "grpo": 40}, {"es": 70, "grpo": 60}),
        "underpowered",
        {"regret, GRPO - ES": 0.0},
    ),
    ("C37", lambda: _few_prompts(2, 8), "supported", {"slope over log10, GRPO - ES": _slope(8) - _slope(2)}),
    ("C37", lambda: _few_prompts(8, 2), "contradicted", {}),
    ("C37", lambda: _few_prompts(5, 5), "underpowered", {}),
    ("C11", lambda: _horizons(55), "supported", {"last less first, ES - GRPO": 15 / PROBLEMS}),
    ("C11", lambda: _horizons(30), "contradicted", {}),
    ("C11", lambda: _horizons(40), "underpowered", {}),
    ("C29", lambda: _kl(0.05), "supported", {"k1_over_k3_std": 1.5, "k2_relative_bias": 0.5035}),
    ("C29", lambda: _kl(0.005), "contradicted", {}),
]


@pytest.mark.parametrize(("name", "records", "expected", "values"), WORLDS)
def test_a_world_has_the_verdict_and_the_quantities_that_were_planted(name, records, expected, values) -> None:
    # without what is only reported, which takes as long again
    rule = {key: value for key, value in DECLARED[name]["rule"].items() if key != "also"}
    verdict = judge(name, records(), rule=rule)
    assert verdict.verdict == expected, verdict.text
    assert {label: verdict.intervals[label].value for label in values} == pytest.approx(values)


# ---- what single verdicts say


def test_the_words_of_a_verdict() -> None:
    verdict = judge("C1", _countdown(60, 40))
    assert "A0 ES - base, test greedy 20.0 [" in verdict.text
    assert "points from 10.0 % (n = 8, detectable" in verdict.text
    assert verdict.text.endswith("not testable at this scale: the published accuracies")
    assert verdict.key.startswith("A0 ES - GRPO, test greedy 10.0 [") and verdict.key.endswith("] points (n = 8)")
    ahead = judge("C2", [*SWEEPS, *runs_of("es", 60), *runs_of("grpo", 80)])
    assert "points (90 % interval), grpo ahead" in ahead.text and ahead.intervals[EQUAL].level == 0.9
    flat = judge("C8", _spreads(0, 1))
    assert flat.key == "ES over GRPO, test greedy not defined (n = 16)"
    trend = judge("C10", _populations(60, 50, 50))
    assert "trend n8 30.0 %, n30 25.0 %, n128 25.0 %; Jonckheere's p " in trend.text


def test_runs_with_the_setting_that_won_the_sweep_are_compared() -> None:
    records = [*SWEEPS, *runs_of("es", 60), *runs_of("es_sampled", 50, seeds=8)]
    alone = judge("C31", records)
    assert alone.n == 8 and alone.intervals["ES - ES with sampled fitness, test greedy"].value == pytest.approx(
        10 / PROBLEMS
    )
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


def test_what_is_only_reported_decides_nothing() -> None:
    records = [*SWEEPS, *runs_of("dr_grpo", 70, seeds=8), *runs_of("grpo", 50)]
    alone = judge("C30", records)
    assert (alone.verdict, list(alone.intervals)) == ("supported", ["Dr.GRPO - GRPO, test greedy"])
    records += runs_of("dr_grpo", 30, seeds=5, scale_rewards="group") + runs_of(
        "grpo", 60, seeds=8, scale_rewards="none"
    )
    verdict = judge("C30", records)
    assert (verdict.verdict, verdict.n, verdict.key) == ("supported", 8, alone.key)
    assert verdict.intervals["Dr.GRPO - Dr.GRPO scaled, test greedy"].value == pytest.approx(40 / PROBLEMS)
    assert verdict.intervals["GRPO unscaled - GRPO, test greedy"].value == pytest.approx(10 / PROBLEMS)
    assert "(n = 8 v 16, detectable" in verdict.text


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


def test_runs_that_do_not_get_to_a_level_are_counted() -> None:
    es, short = _concise("es", KEEPS), _concise("grpo", HACKS)
    for record in short[:2]:
        record["curve"]["proxy_greedy"][-1] = -3.0
    verdict = judge("C3", es + short)
    assert verdict.verdict == "underpowered" and "14 of 16 runs of an arm get there" in verdict.text


def test_what_does_not_belong_together_is_refused() -> None:
    both = [*runs_of("es", 60), *runs_of("es_sampled", 50)]
    thirteenth = sweep_of("es", choices=[{"sigma": 0.1, "alpha": 0.1}])
    mapped, ends = _mapped(lambda a, b: a + b > -1), _c34(3.0, 1.0, 1.0)
    moved = [r | {"spec": r["spec"] | {"base_digest": "x"}} if r["spec"]["arm"] == "es" else r for r in _horizons(50)]
    odd = ends[-1] | {"spec": ends[-1]["spec"] | {"noise_draws": 1, "seed": 9}}
    for name, records, names in (
        ("C31", [*SWEEPS, *thirteenth, *both], "13 runs of 13 settings where 12 were declared"),
        ("C11", moved, "4: runs start from different bases"),
        ("C34", [*ends, odd], "runs of a map differ in noise_draws"),
        ("C34", [*ends, ends[-1]], "two records of one setting have seed 3"),
        ("C4", [*mapped, mapped[0] | {"spec": mapped[0]["spec"] | {"noise_draws": 1}}], "base"),
        (
            "C2",
            [*SWEEPS, *runs_of("es", 60), *({**r, "curve": {}} for r in runs_of("grpo", 50))],
            "'validation_greedy'",
        ),
    ):
        with pytest.raises(ValueError, match=f"claim {name}: .*{names}"):
            judge(name, records)


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
