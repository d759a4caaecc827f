"""Hand-built records of Countdown runs, and helpers that judge declared claims from them."""

from collections.abc import Iterable

import numpy as np
from evoalign_study import claims
from evoalign_study.claims.findings import Finding
from evoalign_study.claims.rules import check_rule, find
from evoalign_study.claims.selection import DECODINGS, Evidence
from evoalign_study.records import pack_bits, pack_counts

from evoalign_lib import arms

PROBLEMS = 200
DECLARED = {claim["id"]: claim for claim in claims.load_claims()}
TUNED = {"es": {"sigma": 0.01, "alpha": 0.005}, "grpo": {"learning_rate": 3e-4, "beta": 0.0}}
OTHER = {"es": {"sigma": 0.01, "alpha": 0.02}, "grpo": {"learning_rate": 1e-3, "beta": 0.04}}
GENERAL = {"max_completion_length": 16, "validation_problems": 512, "test_problems": PROBLEMS}
GENERAL |= {"curve_points": 25, "curve_spacing": "log"}
FIXED = {
    "es": GENERAL | {"steps": 208, "population_size": 30, "prompts_per_step": 128},
    "grpo": GENERAL | {"steps": 250, "num_generations": 16, "prompts_per_step": 16},
}
# jitter per seed, with mean 0 over 8, 16 and 32 seeds
JITTER = [1, -1, 2, -2, 0, 0, 1, -1] * 4


def family(arm: str) -> str:
    return arms.get(arm).sweep


def run_spec(arm: str, base: str, seed: int, **more: object) -> dict:
    """Return a run's spec with the fields of the committed ones; `more` changes or adds fields."""
    general = {"kind": "train", "task": "countdown", "grader": "strict", "scale": "tiny", "engine_version": 2}
    own = {"arm": arm, "base": base, "base_digest": f"digest of {base}", "seed": seed}
    return general | own | FIXED[family(arm)] | TUNED[family(arm)] | more


def results(right: dict[str, int]) -> dict:
    """Return results from the number of solved problems per decoding: the first ones, in all 16 samples."""
    packed: dict[str, object] = {"n": PROBLEMS}
    for decoding, n in right.items():
        solved = np.arange(PROBLEMS) < n
        if decoding == "greedy":
            packed["greedy_bits"] = pack_bits(solved)
        else:
            packed[f"{decoding}_counts"] = pack_counts(16 * solved)
    return packed


def trained(arm: str, right: int, base: str = "A0", seed: int = 0, **spec: object) -> dict:
    """Return the record of a run that solves `right` problems; the rest of the record is arbitrary."""
    score, es = right / PROBLEMS, family(arm) == "es"
    spent = [0, 10, 1_000, 100_000] if es else [0, 100, 1_000, 10_000]
    curve = {"step": [0, 1, 2, 4], "completions": spent, "forward_flops": spent}
    curve |= dict.fromkeys(("validation_greedy", "validation_t1"), [0.1, 0.2, 0.25, score])
    kept = {"status": "finished", "digest": f"{arm} {base} {seed}", "test": results({"greedy": right, "t1": 0})}
    return {"spec": run_spec(arm, base, seed, **spec), "curve": curve} | kept


def runs_of(arm: str, right: int, base: str = "A0", seeds: int = 16, jitter: int = 1, **spec: object) -> list[dict]:
    """Return runs that solve `right` problems on average."""
    shifts = enumerate(JITTER[:seeds])
    return [trained(arm, right + jitter * shift, base, seed, **spec) for seed, shift in shifts]


def falling(arm: str, falls: Iterable[float], right: int = 60) -> list[dict]:
    """Return runs whose curves fall by the given amounts before they end."""
    records = []
    for seed, fall in enumerate(falls):
        record = trained(arm, right, seed=seed)
        curve = [0.1, 0.3, 0.3 - fall, 0.3 - fall / 2, 0.4]
        records.append(record | {"curve": record["curve"] | {"validation_greedy": curve, "validation_t1": curve}})
    return records


def sweep_of(arm: str, base: str = "A0", best: dict | None = None, choices: list[dict] | None = None) -> list[dict]:
    """Return a sweep that `best` wins; by default the full sweep, won by the tuned setting."""
    records, short = [], {"steps": FIXED[arm]["steps"] // 2, "test_problems": 0}
    for choice in arms.SWEEP[arm] if choices is None else choices:
        curve = {"validation_greedy": [0.1, 0.2, 0.3 if choice == (best or TUNED[arm]) else 0.2]}
        spec = run_spec(arm, base, arms.SWEEP_SEED, **short, **choice)
        records.append({"spec": spec, "status": "finished", "curve": curve})
    return records


def base_record(base: str, right: int, **more: object) -> dict:
    spec = {"kind": "base", "base": base, "base_digest": f"digest of {base}", "scale": "tiny"} | more
    return {"spec": spec, "status": "finished", "test": results({"greedy": right, "t1": 0})}


def path(first: dict, last: dict, bits: list[str], n: int = PROBLEMS) -> dict:
    """Return the path between two runs, with the packed right answers at each point, equal for all decodings."""
    points = {"nll": [0.0] * len(bits)} | {f"{decoding}_bits": bits for decoding in DECODINGS}
    ends = {"first": first, "last": last}.items()
    named = {place: {"of": {"digests": [run["digest"]]}, "factor": 1.0} for place, run in ends}
    return {"spec": {"kind": "path", "scale": "tiny"} | named, "status": "finished", "n": n, "points": points}


RESAMPLES = 400  # for every interval: the worlds here are clear-cut, and one test judges all records in full


def evaluate(claim: dict, records: list[dict], *family: dict, resamples: int = RESAMPLES) -> claims.Verdict:
    """Judge a claim, together with the claims of the family that shares its correction, if given."""
    return claims.evaluate_named([claim["id"]], records, declared=[claim, *family], resamples=resamples)[0]


def judge(name: str, records: list[dict], **change: object) -> claims.Verdict:
    """Judge a claim by itself, without its family's correction."""
    claim = {key: value for key, value in (DECLARED[name] | change).items() if key != "superseded"}
    return evaluate(claim, records)


def decided(claim: dict, records: list[dict], resamples: int = RESAMPLES) -> tuple[str, list[Finding]]:
    """Return the verdict of a claim from its findings alone, without nulls and other decodings, and the findings."""
    check_rule(claim)
    findings = find(claim, Evidence.of(records, "tiny", resamples))
    return claims.decide(findings, claim["margin"], claim["min_seeds"])[0], findings


SWEEPS = [*sweep_of("es"), *sweep_of("grpo")]
