"""Rule "weights" on planted worlds: signals and walks of known length, merged models, lines with known barriers."""

import numpy as np
import pytest
from claim_worlds import PROBLEMS, SWEEPS, judge, runs_of
from evoalign_study.records import pack_bits

SIZES = {"embedding (tied)": 600, "layer 0": 1200, "layer 1": 2200}
D = sum(SIZES.values())
ALPHA, STEPS, N = 0.005, 208, 30
WALK = ALPHA * np.sqrt(D * STEPS / N)


def planted(shared: float = 0.0, seed: int = 0) -> dict[str, list[dict]]:
    """Runs with displacements: ES is a walk with a short signal, GRPO mostly signal, of which ES's shares so much."""
    rng = np.random.default_rng(seed)
    unit = rng.standard_normal((2, D))
    unit[1] -= unit[1] @ unit[0] / (unit[0] @ unit[0]) * unit[0]
    own, other = unit / np.linalg.norm(unit, axis=1, keepdims=True)
    signal = shared * own + np.sqrt(1 - shared**2) * other
    runs = {"es": runs_of("es", 54), "es_random": runs_of("es_random", 22, seeds=8), "grpo": runs_of("grpo", 62)}
    for i in range(16, 32):
        runs["es"].append(runs["es"][i - 16] | {"spec": runs["es"][i - 16]["spec"] | {"seed": i}})
        if i < 24:
            runs["es_random"].append(
                runs["es_random"][i - 16] | {"spec": runs["es_random"][i - 16]["spec"] | {"seed": i}}
            )
    for arm, found in runs.items():
        for record in found:
            walk = rng.standard_normal(D)
            walk *= WALK / np.linalg.norm(walk)
            by = {"es": walk + 0.15 * WALK * signal, "es_random": walk, "grpo": 0.3 * WALK * own + 0.1 * walk}[arm]
            record |= {"digest": f"{arm} {record['spec']['seed']}", "by": by, "counts": {"tied": 0}}
    return runs


def products(runs: dict[str, list[dict]], size: int = 8) -> list[dict]:
    blocks = [found[i : i + size] for found in runs.values() for i in range(0, len(found), size)]
    ends = np.cumsum([0, *SIZES.values()])
    made = []
    for i, a in enumerate(blocks):
        for b in blocks[i:]:
            layers = {}
            for name, first, last in zip(SIZES, ends, ends[1:], strict=False):
                x, y = (np.array([run["by"][first:last] for run in block]) for block in (a, b))
                layers[name] = {"entries": int(last - first), "start": 1.0, "products": (x @ y.T).tolist()}
                if a is b:
                    counts = [int(last - first)] * len(a)
                    layers[name]["moved"] = {"float32": counts, "bfloat16": [count // 2 for count in counts]}
            spec = {"kind": "products", "scale": "tiny"} | {
                side: {"digests": [run["digest"] for run in block]} for side, block in (("a", a), ("b", b))
            }
            made.append({"spec": spec, "status": "finished", "layers": layers})
    return made


def end_of(runs: list[dict], **more: object) -> dict:
    """How a spec names a point; `as_long_as` takes runs, too."""
    named = {"of": {"digests": [run["digest"] for run in runs]}, "factor": 1.0} | more
    if "as_long_as" in more:
        named["as_long_as"] = {"digests": [run["digest"] for run in more["as_long_as"]]}
    return named


def line(first: dict | None, last: dict, errors: list[float]) -> dict:
    """A path whose error at each point is as given, under every decoding."""
    bits = [pack_bits([0] * (n := round(PROBLEMS * e)) + [1] * (PROBLEMS - n)) for e in errors]
    points = {f"{name}_bits": bits for name in ("greedy", "t0.6", "t1")} | {"nll": [0.0] * len(errors)}
    ends = {name: end for name, end in (("first", first), ("last", last)) if end is not None}
    return {"spec": {"kind": "path", "scale": "tiny"} | ends, "status": "finished", "n": PROBLEMS, "points": points}


RUNS = planted()
TRAINED = [*SWEEPS, *(record for found in RUNS.values() for record in found)]
GRAMS = products(RUNS)


@pytest.mark.parametrize(("shared", "expected"), [(0.1, "supported"), (0.9, "contradicted")])
def test_the_cosine_of_what_runs_have_in_common_is_recovered(shared: float, expected: str) -> None:
    runs = planted(shared, seed=1)
    records = [*SWEEPS, *(record for found in runs.values() for record in found), *products(runs)]
    verdict = judge("E8", records)
    assert verdict.verdict == expected
    found = verdict.intervals["ES to GRPO, cosine of what runs have in common"]
    assert found.low < shared < found.high
    assert found.value == pytest.approx(shared, abs=0.15)
    # a walk has nothing in common with anything
    assert verdict.placebo.startswith("failed by ES with random fitness")
    raw = judge("C22", records)
    assert raw.verdict == ("not evidence" if shared < 0.2 else raw.verdict)


def test_the_share_of_the_signal_and_how_many_runs_count() -> None:
    verdict = judge("E5", [*TRAINED, *GRAMS])
    share = verdict.intervals["ES, share of a run's squared norm that all have, below 0.01"]
    assert share.value == pytest.approx(0.15**2 / (1 + 0.15**2), abs=0.004)
    assert share.n == 32
    assert judge("C20", [*TRAINED, *GRAMS]).n == 16  # further seeds change no verdict that does not ask for them


def lines(height: float, null: float = 0.0) -> list[dict]:
    """Lines from ES to GRPO with a bump of so many hundredths in the middle, and the same from random fitness."""
    straight = np.linspace(0.73, 0.69, 21)
    bump = np.sin(np.linspace(0, np.pi, 21)) ** 2
    ends = {arm: [end_of([run]) for run in found] for arm, found in RUNS.items()}
    made = []
    for k in range(8):
        made.append(line(ends["es"][k], ends["grpo"][k], straight + height * bump))
        # recorded the other way round
        made.append(line(ends["grpo"][k], ends["es_random"][k], straight[::-1] + null * bump))
    return made


def test_a_planted_barrier_is_found_and_a_null_without_one_takes_the_evidence_away() -> None:
    high = judge("C25", [*TRAINED, *lines(0.2)])
    assert high.verdict == "contradicted"
    assert high.intervals["ES to GRPO, barrier of the error greedy"].value == pytest.approx(0.2, abs=0.04)
    both = judge("C25", [*TRAINED, *lines(-0.1, null=-0.1)])
    assert (both.verdict, both.placebo.split(";")[0]) == ("not evidence", "passed by ES with random fitness (n = 8)")
    kept = judge("C25", [*TRAINED, *lines(-0.1, null=0.2)])
    assert (kept.verdict, kept.placebo.split(";")[0]) == ("supported", "failed by ES with random fitness (n = 8)")
