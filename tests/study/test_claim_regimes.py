"""The rule of claim C26 on hand-built runs: regimes that are there, one cloud, runs that are left out, and nulls."""

from itertools import combinations

import numpy as np
import pytest
from claim_worlds import DECLARED, evaluate, path
from evoalign_study.claims import Verdict
from evoalign_study.claims.selection import DECODINGS
from evoalign_study.records import pack_bits

N, POINTS = 100, 11


def judge(records: list[dict], *decodings: str) -> Verdict:
    """Judge the claim under some decodings, all by default, from few resamples."""
    claim = DECLARED["C26"]
    rule = claim["rule"] | {"decodings": list(decodings or DECODINGS)}
    return evaluate(claim | {"rule": rule}, records, resamples=80)


def run(name: str, seed: int, fate: str, **more: object) -> dict:
    """A run of an arm of the claim, hacked, unhacked or worse; its KL follows its fate."""
    fields = DECLARED["C26"]["arms"][name]
    spec = {key: value for key, value in fields.items() if key != "seeds"}
    spec |= {"seed": seed, "scale": "tiny", "base_digest": "digest of B0"} | more
    ends = {"hacked": (0.3, -3.0, 8.0), "unhacked": (0.95, -10.0, 0.3), "worse": (0.3, -40.0, 9.0)}
    right, proxy, kl = ends[fate]
    curve = {"step": [0, 1, 2], "kl": [0.0, 0.1, kl + seed / 100]}
    for decoding in DECODINGS:
        curve |= {f"right_{decoding}": [0.97, 0.96, right], f"proxy_{decoding}": [-30.0, -29.0, proxy]}
    digest = f"{more.get('arm', name)} {seed}"
    return {"spec": spec, "status": "finished", "digest": digest, "curve": curve, "fate": fate}


def line(first: dict, last: dict, height: float, rng: np.random.Generator) -> dict:
    """A line in whose middle the error is higher by `height`, a share of the problems."""
    bump = height * (1 - np.abs(np.linspace(-1, 1, POINTS)))
    luck = (rng.permutation(N) + 0.5) / N  # every line has the stated height, to a problem
    bits = [pack_bits((luck > 0.2 + b).astype(int)) for b in bump]
    return path(first, last, bits, N)


def arms() -> list[dict]:
    fates = {"es_small": "unhacked", "grpo_small": "unhacked", "es_large": "hacked", "grpo_large": "hacked"}
    return [run(name, seed, fate) for name, fate in fates.items() for seed in range(16, 20)]


def lines(runs: list[dict], within: float, between: float, seed: int = 0) -> list[dict]:
    """All lines: low barriers between two runs of one fate, higher ones between two fates."""
    rng = np.random.default_rng(seed)
    pairs = list(combinations(runs, 2))
    heights = [within if first["fate"] == last["fate"] else between for first, last in pairs]
    order = [pair[:: rng.choice([-1, 1])] for pair in pairs]  # some lines run backwards
    return [line(*pair, height, rng) for pair, height in zip(order, heights, strict=True)]


def test_two_regimes_are_found_under_every_decoding() -> None:
    runs = arms()
    verdict = judge(runs + lines(runs, 0.02, 0.5))
    assert verdict.verdict == "supported", verdict.text
    assert len(verdict.findings) == 12 and {finding.n for finding in verdict.findings} == {8}
    agree = verdict.intervals["two clusters v hacked and unhacked, adjusted Rand index greedy"]
    assert agree.value == agree.low == agree.high == 1
    basin = verdict.intervals["barrier hacked to unhacked - hacked to hacked temperature 1"]
    assert basin.low < 0.48 < basin.high + 0.05 and 0.4 < basin.value < 0.55


def test_one_cloud_is_no_two_regimes() -> None:
    runs = arms()
    verdict = judge(runs + lines(runs, 0.2, 0.2), "greedy", "t1")
    assert verdict.verdict in ("underpowered", "contradicted")
    assert verdict.intervals["two clusters, silhouette over that of one greedy"].value < 0
    assert verdict.intervals["two clusters v hacked and unhacked, adjusted Rand index greedy"].value < 0.5


@pytest.mark.parametrize(("height", "passes"), [(0.02, True), (0.5, False)])
def test_a_null_takes_the_place_of_runs_with_large_steps(height: float, passes: bool) -> None:
    """Runs that learned nothing pass only if they, too, share a basin."""
    runs = arms()
    nulls = [run("es_large", seed, "worse", arm="es_random") for seed in range(16, 20)]
    rng = np.random.default_rng(1)
    small = [r for r in runs if r["fate"] == "unhacked"]
    apart = [line(first, last, 0.5, rng) for first in nulls for last in small]
    together = [line(first, last, height, rng) for first, last in combinations(nulls, 2)]
    verdict = judge(runs + nulls + lines(runs, 0.02, 0.5) + apart + together, "greedy", "t1")
    assert ("not evidence" == verdict.verdict) == passes, verdict.placebo
    assert ("passed by" if passes else "failed by") + " ES with random fitness (n = 4)" in verdict.placebo
