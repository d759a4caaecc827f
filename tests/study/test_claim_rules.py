"""The rules of the field's claims on hand-built records: a table of worlds, and what single verdicts say."""

from collections.abc import Callable
from math import log

import claim_worlds as worlds
import numpy as np
import pytest
from claim_worlds import DECLARED, PROBLEMS, SWEEPS, base_record, decided, evaluate, falling, judge, runs_of, sweep_of
from evoalign_study import claims
from evoalign_study.claims.findings import Finding
from evoalign_study.records import pack_bits

from evoalign_lib.analysis.stats import Interval


def _countdown(es: int = 60, grpo: int = 40, seeds: int = 8) -> list[dict]:
    records = [*SWEEPS, *(base_record(base, 20) for base in ("A0", "A1", "A2"))]
    for base in ("A0", "A1", "A2"):
        records += runs_of("es", es, base, seeds) + runs_of("grpo", grpo, base, seeds)
    return records


def _transfer(shared: dict[str, int], best: dict[str, int], seeds: int = 8) -> list[dict]:
    """Of each arm, problems solved on A1 by the shared and by the best setting; on A2 the shared one is the best."""
    records = list(SWEEPS)
    for arm in ("es", "grpo"):
        choices = DECLARED["C9"]["rule"]["best"]["among"][arm]
        records += sweep_of(arm, "A1", worlds.OTHER[arm], choices) + sweep_of(arm, "A2", worlds.TUNED[arm], choices)
        records += runs_of(arm, shared[arm], "A1", seeds) + runs_of(arm, best[arm], "A1", seeds, **worlds.OTHER[arm])
        records += runs_of(arm, 50, "A2", seeds)
    return records


def _concise(arm: str, right: tuple[int, int], proxy: float = -1.0, seeds: int = 16, kl: float = 3.0) -> list[dict]:
    """Runs that are right on so many of 200 questions at a proxy of -4 and at their end; the base is right on all."""
    fields = {k: v for k, v in DECLARED["C3"]["arms"][arm].items() if k != "measure"}
    records = []
    for seed, shift in zip(range(seeds), worlds.JITTER, strict=False):
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


def _spreads(es: int, grpo: int) -> list[dict]:
    return [*SWEEPS, *runs_of("es", 60, jitter=es), *runs_of("grpo", 60, jitter=grpo)]


HACKS, KEEPS = (120, 60), (190, 180)
EQUAL = "GRPO - ES, validation temperature 1 at equal forward flops"
WORLDS: list[tuple[str, Callable[[], list[dict]], str, dict[str, float]]] = [
    # at GRPO's last 10,000 completions ES is half way, in logarithms, from 1,000 (.25) to 100,000 (60 of 200)
    ("C1", lambda: _countdown(60, 40), "supported", {"A0 ES - GRPO, validation greedy at equal completions": 0.075}),
    ("C1", lambda: _countdown(60, 61), "contradicted", {"A0 ES - base, test greedy": 40 / PROBLEMS}),
    ("C1", lambda: _countdown(seeds=4), "underpowered", {}),
    # 55 problems at GRPO's last 10,000 FLOPs; the margin is 4 problems
    ("C2", lambda: [*SWEEPS, *runs_of("es", 60), *runs_of("grpo", 56)], "supported", {EQUAL: 1 / PROBLEMS}),
    ("C2", lambda: [*SWEEPS, *runs_of("es", 60), *runs_of("grpo", 80)], "contradicted", {EQUAL: 25 / PROBLEMS}),
    ("C2", lambda: [*SWEEPS, *runs_of("es", 60), *runs_of("grpo", 59)], "underpowered", {EQUAL: 4 / PROBLEMS}),
    ("C8", lambda: _spreads(1, 6), "supported", {"ES over GRPO, test greedy": log(1 / 6)}),
    ("C8", lambda: _spreads(0, 1), "underpowered", {}),
    ("C31", lambda: [*SWEEPS, *runs_of("es", 50), *runs_of("es_sampled", 50, seeds=8)], "within margin", {}),
    ("C3", lambda: _concise("es", KEEPS) + _concise("grpo", HACKS), "supported", {"GRPO - ES, hacked runs greedy": 1}),
    # on A2 the best setting is the shared one: 0 there, half of the difference on A1
    ("C9", lambda: _transfer({"es": 50, "grpo": 40}, {"es": 52, "grpo": 70}), "supported", {"regret, GRPO - ES": 0.07}),
]


@pytest.mark.parametrize(("name", "records", "expected", "values"), WORLDS)
def test_a_world_has_the_verdict_and_the_quantities_that_were_planted(name, records, expected, values) -> None:
    # without what is only reported, which takes as long again
    rule = {key: value for key, value in DECLARED[name]["rule"].items() if key != "also"}
    verdict = judge(name, records(), rule=rule)
    assert verdict.verdict == expected, verdict.text
    assert {label: verdict.intervals[label].value for label in values} == pytest.approx(values)


# ---- what single verdicts say


def test_a_sweep_that_is_not_finished_names_no_winner() -> None:
    verdict = judge("C33", [*SWEEPS[1:], *runs_of("es", 60), *runs_of("grpo", 60)])
    lacks = "nothing to compare yet; the sweep of ES on A0 has 11 of 12 settings"
    assert (verdict.verdict, verdict.text) == ("open", lacks)
    # one cell of three without its sweep
    world = [*sweep_of("es"), *sweep_of("grpo")[:7], *runs_of("es", 60), *runs_of("grpo", 50), base_record("A0", 20)]
    assert "0 of GRPO (the sweep of GRPO on A0 has 7 of 12 settings)" in judge("C1", world).text


def test_the_loss_of_a_walk_is_taken_off_before_arms_are_compared() -> None:
    arms = {name: {"kind": "train", "task": "countdown", "arm": name} for name in ("es", "grpo", "es_random")}
    compared = {"measure": {"test": "greedy"}, "of": "es", "to": "grpo", "above": 0}
    right = {"es": 100, "es_random": 90, "grpo": 110}
    records = [base_record("A0", 120), *(run for arm, n in right.items() for run in runs_of(arm, n))]

    def judged(**more: str) -> tuple[str, Finding]:
        rule = {"kind": "compare", "comparisons": [compared | more]}
        verdict, (finding,) = decided(DECLARED["C2b"] | {"arms": arms, "rule": rule}, records)
        return verdict, finding

    for verdict, ahead, more in (("contradicted", -10, {}), ("supported", 20, {"walk": "es_random"})):
        found, finding = judged(**more)
        assert found == verdict and finding.interval.value == pytest.approx(ahead / PROBLEMS)
        assert ("less its walk's" in finding.label) == bool(more)
    with pytest.raises(ValueError, match="a walk's loss"):
        judged(**more, by="spread")


def test_regret_pairs_the_seeds_that_all_cells_have() -> None:
    records = _transfer({"es": 50, "grpo": 40}, {"es": 50, "grpo": 70})
    missing = [r for r in records if (r["spec"]["base"], r["spec"]["arm"], r["spec"]["seed"]) != ("A2", "es", 3)]
    verdict = judge("C9", missing)
    assert (verdict.verdict, verdict.n) == ("underpowered", 7)
    assert "A1 best: 8 of GRPO, 8 of ES; A1 shared: 8 of GRPO, 8 of ES; A2 best: 8 of GRPO, 7 of ES;" in verdict.text


def test_what_does_not_belong_together_is_refused() -> None:
    both = [*runs_of("es", 60), *runs_of("es_sampled", 50)]
    thirteenth = sweep_of("es", choices=[{"sigma": 0.1, "alpha": 0.1}])
    with pytest.raises(ValueError, match="claim C31: .*13 runs of 13 settings where 12 were declared"):
        judge("C31", [*SWEEPS, *thirteenth, *both])
    without = [{**r, "curve": {}} for r in runs_of("grpo", 50)]
    with pytest.raises(ValueError, match="claim C2: .*'validation_greedy'"):
        judge("C2", [*SWEEPS, *runs_of("es", 60), *without])


# ---- p-values and Holm's correction


def _finding(value: float, low: float, side: str = "above", bound: float = 0.0, test: float | None = None) -> Finding:
    interval = Interval(value, low, 2 * value - low, 8)
    return Finding("x", 8, "x: 8", interval, bound, side, test)


P_VALUES = [
    (Finding.p, _finding(3.0, 2.0, bound=1.0), 1.0, 0.05),  # the interval just touches the bound and the margin
    (Finding.p, _finding(1.0, 0.5), 0.0, 0.0000885),  # 3.92 standard errors
    (Finding.p, _finding(-1.0, -2.0, "below"), 0.0, 0.05),
    (Finding.p, _finding(1.0, 0.0, "below"), 0.0, 1.0),
    (Finding.p, _finding(1.0, 1.0), 0.0, 0.0),  # no spread at all
    (Finding.p, _finding(-1.0, -1.5, test=0.03), 0.0, 1.0),
    (Finding.p, _finding(0.0, -0.5, "within", test=0.2), 1.0, 0.2),
    (Finding.p_against, _finding(1.0, 0.0, "below"), 0.0, 0.05),
    (Finding.p_against, _finding(0.0, -1.0), 1.0, 0.05),  # the interval just touches the margin
    (Finding.p_against, _finding(1.0, 0.0), 0.0, 1.0),
    (Finding.p_against, _finding(-1.0, -1.0), 0.0, 0.0),
    (Finding.p_against, _finding(-3.0, -5.0, "within"), 1.0, 0.05),
    (Finding.p_against, _finding(3.0, 1.0, "within"), 1.0, 0.05),
    (Finding.p_against, _finding(0.5, 0.4, "within"), 1.0, 1.0),
]


@pytest.mark.parametrize(("p", "finding", "margin", "expected"), P_VALUES)
def test_p_values_of_and_against_a_claim(p: Callable, finding: Finding, margin: float, expected: float) -> None:
    assert p(finding, margin) == pytest.approx(expected, rel=1e-3)


def test_holm_within_a_notebook() -> None:
    arms_of = {"V": "es_sampled", "W": "dr_grpo", "X": "dapo", "Y": "rloo", "Z": "grpo"}
    comparison = {"measure": {"drawdown": "greedy"}, "of": "a", "to": "es", "above": 0}
    claim = {k: v for k, v in DECLARED["C33"].items() if k != "primary"}
    claim |= {"rule": {"kind": "compare", "comparisons": [comparison]}, "primary": "05"}
    family = [
        claim | {"id": name, "arms": {"a": {"kind": "train", "arm": arm}, "es": {"kind": "train", "arm": "es"}}}
        for name, arm in arms_of.items()
    ]
    del family[0]["primary"]
    falls = np.linspace(0, 0.02, 16)  # the difference of two such means has a standard error of .0022
    records = falling("es", list(falls))
    for name, by in (("V", 0.0048), ("W", 0.0048), ("X", 0.0046), ("Y", 0.05)):
        records += falling(arms_of[name], list(falls + by))
    raw = {c["id"]: evaluate(c, records, resamples=4_000) for c in family}
    assert [raw[name].verdict for name in "VWXYZ"] == ["supported"] * 4 + ["open"]
    assert 0.025 < raw["W"].p < raw["X"].p < 0.05 and raw["Y"].p < 1e-6 and raw["Z"].p is None
    # Z has no runs and counts all the same, as p = 1; V is no primary claim
    verdicts = {v.id: v for v in claims.evaluate_named(list(arms_of), records, declared=family, resamples=4_000)}
    assert [verdicts[name].verdict for name in "WXYZ"] == ["underpowered", "underpowered", "supported", "open"]
    assert verdicts["Y"].p == pytest.approx(4 * raw["Y"].p) and verdicts["V"] == raw["V"]
    assert evaluate(family[1], records, *family[2:], resamples=4_000) == verdicts["W"]
