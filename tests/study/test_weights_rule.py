"""Rule "weights" on planted worlds: signals and walks of known length, merged models, lines with known barriers."""

import numpy as np
import pytest
from claim_worlds import PROBLEMS, SWEEPS, judge, results, runs_of
from evoalign_study.claims.quantities import Chosen, Model, Side
from evoalign_study.records import pack_bits, pack_probabilities

SIZES = {"embedding (tied)": 600, "layer 0": 1200, "layer 1": 2200}
D = sum(SIZES.values())
ALPHA, STEPS, N = 0.005, 208, 30
WALK = ALPHA * np.sqrt(D * STEPS / N)
SKILLS = ("copy", "sort")


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


def merged(end: dict, right: int, kl: float, skill: float) -> dict:
    test = results(right, right)
    test |= {"t0.6_counts": test["t1_counts"]}
    skills = {name: {"greedy": skill, "kl": kl} for name in SKILLS}
    return {"spec": {"kind": "merge", "scale": "tiny"} | end, "status": "finished", "test": test, "skills": skills}


def line(first: dict | None, last: dict, errors: list[float]) -> dict:
    """A path whose error at each point is as given, under every decoding."""
    bits = [pack_bits([0] * (n := round(PROBLEMS * e)) + [1] * (PROBLEMS - n)) for e in errors]
    points = {f"{name}_bits": bits for name in ("greedy", "t0.6", "t1")} | {"nll": [0.0] * len(errors)}
    ends = {name: end for name, end in (("first", first), ("last", last)) if end is not None}
    return {"spec": {"kind": "path", "scale": "tiny"} | ends, "status": "finished", "n": PROBLEMS, "points": points}


RUNS = planted()
TRAINED = [*SWEEPS, *(record for found in RUNS.values() for record in found)]
GRAMS = products(RUNS)


def test_a_longer_walk_is_no_evidence() -> None:
    verdict = judge("C20", [*TRAINED, *GRAMS])
    assert (verdict.verdict, verdict.n) == ("not evidence", 16)
    assert verdict.placebo.startswith("passed by ES with random fitness (n = 8)")
    (ratio,) = verdict.intervals.values()
    # a signal of .15 and a walk of 1, over .3 and .1
    assert np.exp(ratio.value) == pytest.approx(np.hypot(1, 0.15) / np.hypot(0.3, 0.1), rel=0.02)


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


def merges(mean: int, single: int, shrunk: int, drift: tuple[float, float]) -> list[dict]:
    """The models of claim E6, with their right answers and KL; means of random walks solve as much as single ones."""
    es, null, made = RUNS["es"], RUNS["es_random"], []
    for k in range(8):
        four = es[4 * k : 4 * k + 4]
        made.append(merged(end_of([es[k]]), single + k % 3, drift[0], 0.5))
        made.append(merged(end_of(four), mean + k % 2, drift[1], 0.9))
        made.append(merged(end_of([es[k]], as_long_as=four), shrunk, 0.01, 0.9))
        made.append(merged(end_of([null[k]]), 20, drift[0], 0.5))
    for k in range(4):
        four = null[4 * k : 4 * k + 4]
        made.append(merged(end_of(four), 20, drift[1], 0.9))
        made.append(merged(end_of([null[k]], as_long_as=four), 20, 0.01, 0.9))
    return made


def test_a_mean_of_runs_keeps_the_gain() -> None:
    verdict = judge("E6", [*TRAINED, *merges(55, 54, 25, (0.4, 0.1))])
    assert verdict.verdict == "supported", verdict.text
    assert verdict.placebo.startswith("failed by ES with random fitness (n = 4)")
    assert "over ES, KL on other skills 0.25 [0.25, 0.25]" in verdict.text
    for changed in (merges(40, 54, 25, (0.4, 0.1)), merges(55, 54, 25, (0.4, 0.3)), merges(55, 54, 55, (0.4, 0.1))):
        assert judge("E6", [*TRAINED, *changed]).verdict == "contradicted"
    assert judge("E6", TRAINED).verdict == "open"


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


def test_where_half_of_the_gain_lies() -> None:
    climb, late = np.linspace(0.9, 0.6, 21), 0.9 - 0.3 * np.linspace(0, 1, 21) ** 6
    made = []
    for k in range(8):
        made += [line(None, end_of([RUNS[arm][k]]), errors) for arm, errors in (("es", climb), ("grpo", late))]
        made.append(line(None, end_of([RUNS["es_random"][k]]), np.full(21, 0.9)))
    verdict = judge("C28", [*TRAINED, *made])
    assert verdict.verdict == "supported"
    found = verdict.intervals["GRPO - ES, place of half the gain greedy"]
    assert found.value == pytest.approx(0.5 ** (1 / 6) - 0.5, abs=0.03)
    assert "failed by ES with random fitness" in verdict.placebo


def noisy(runs: list[dict], clean: float, kept: float) -> list[dict]:
    each = {name: [[clean * kept] * 2] for name in ("greedy", "t0.6", "t1")}
    made = []
    for i, run in enumerate(runs[:8]):
        spec = {"kind": "noise", "scale": "tiny", "end": end_of([run])}
        start = dict.fromkeys(each, clean + 0.001 * i)
        made.append({"spec": spec, "status": "finished", "clean": start, "isotropic": each, "relative": each})
    return made


def test_who_keeps_more_under_noise_must_have_learned_something() -> None:
    grpo = noisy(RUNS["grpo"], 0.3, 0.7)
    learned = judge("C27", [*TRAINED, *noisy(RUNS["es"], 0.28, 0.9), *grpo, *noisy(RUNS["es_random"], 0.12, 1.0)])
    assert learned.verdict == "supported", learned.text
    assert "failed by ES with random fitness" in learned.placebo
    assert learned.intervals["ES - GRPO, accuracy kept under isotropic noise greedy"].value == pytest.approx(
        0.2, abs=0.02
    )
    nothing = judge("C27", [*TRAINED, *noisy(RUNS["es"], 0.12, 1.0), *grpo, *noisy(RUNS["es_random"], 0.12, 1.0)])
    assert nothing.verdict == "contradicted"


def covered(end: dict | None, share: float, problems: int = 300, hot: float | None = None, greedy: float = 0.1) -> dict:
    """A model that solves this share of the problems half of the time, and the others never; at 1.4 another share."""
    chances = {label: [0.5] * (n := round(problems * share)) + [0.0] * (problems - n) for label in ("t0.6", "t1")}
    bits = pack_bits([1] * (n := round(problems * greedy)) + [0] * (problems - n))
    chances["t1.4"] = [0.5] * (n := round(problems * (hot or share))) + [0.0] * (problems - n)
    spec = {"kind": "coverage", "scale": "tiny", "test_problems": problems} | ({"end": end} if end else {})
    validation = {"t0.6": share, "t1": share, "t1.4": hot or share - 0.01}
    reach = {label: pack_probabilities(each) for label, each in chances.items()}
    return {
        "spec": spec,
        "status": "finished",
        "n": problems,
        "validation": validation,
        "reach": reach,
        "greedy_bits": bits,
    }


def coverages(es: float, grpo: float, null: float, hot: float | None = None, greedy: float = 0.3) -> list[dict]:
    """Runs of notebook 07 with what they solve; the base solves half of the problems."""
    made = [covered(None, 0.5)]
    for arm, share in {"es": es, "grpo": grpo, "es_random": null}.items():
        for run in runs_of(arm, 54, seeds=8, curve_points=13):
            seed = run["spec"]["seed"] + 32
            run |= {"spec": run["spec"] | {"seed": seed}, "digest": f"{arm} {seed}"}
            right = 0.12 if arm == "es_random" else greedy
            made += [run, covered(end_of([run]), share, hot=hot if arm == "grpo" else None, greedy=right)]
    return made


def test_who_keeps_the_problems_that_sampling_solves() -> None:
    verdict = judge("C18", [*SWEEPS, *coverages(es=0.55, grpo=0.4, null=0.3)])
    assert (verdict.verdict, verdict.n) == ("not evidence", 8), verdict.text
    assert "by itself supported" in verdict.text
    found = {label: interval.value for label, interval in verdict.intervals.items()}
    assert found["ES, net change of support temperature 1"] == pytest.approx(15 / 165)
    assert found["GRPO, net change of support temperature 0.6"] == pytest.approx(-30 / 150)
    assert found["ES - GRPO, net change of support temperature 1"] == pytest.approx(15 / 165 + 30 / 150)
    # what changes nothing keeps its coverage
    assert verdict.placebo.startswith("passed by the untrained base; failed by ES with random fitness (n = 8)")
    assert judge("C18", [*SWEEPS, *coverages(es=0.4, grpo=0.3, null=0.3)]).verdict == "contradicted"
    assert judge("C18", [*SWEEPS, *coverages(es=0.55, grpo=0.6, null=0.3)]).verdict == "contradicted"
    both = judge("C18", [*SWEEPS, *coverages(es=0.55, grpo=0.4, null=0.5)])
    assert both.placebo.startswith("passed by ES with random fitness (n = 8), the untrained base")


CELLS = {"es_weighted": 0.5, "grpo": 0.4, "es_members": 0.5, "grpo_perturbed": 0.4}


def two_by_two(**shares: float) -> list[dict]:
    """Runs of the four cells with what they solve; the base solves half of the problems."""
    made = [covered(None, 0.5)]
    few = {"population_size": 16, "prompts_per_step": 16, "steps": 250}
    for name, share in (CELLS | shares).items():
        arm = "es_sampled" if name == "es_members" else name
        spec = few if name.startswith("es") else {"curve_points": 13}
        like = "es" if name.startswith("es") else "grpo"
        for run in runs_of(like, 54, seeds=8, **spec):
            seed = run["spec"]["seed"] + 32
            run |= {"spec": run["spec"] | {"seed": seed, "arm": arm}, "digest": f"{name} {seed}"}
            made += [run, covered(end_of([run]), share)]
    return made


def test_which_of_two_factors_does_more() -> None:
    verdict = judge("C19", [*SWEEPS, *two_by_two()])
    assert (verdict.verdict, verdict.n, verdict.placebo) == ("contradicted", 8, "favours no arm"), verdict.text
    found = {label: interval.value for label, interval in verdict.intervals.items()}
    (one,) = [value for label, value in found.items() if "size" in label and "support temperature 1" in label]
    assert one == pytest.approx(-30 / 150)
    # the update changes nothing, the rollouts everything
    rollouts = judge("C19", [*SWEEPS, *two_by_two(grpo=0.5, es_members=0.4)])
    assert rollouts.verdict == "supported", rollouts.text
    assert judge("C19", [*SWEEPS, *two_by_two(es_members=0.4, grpo_perturbed=0.3)]).verdict == "underpowered"
    assert judge("C19", [*SWEEPS, *two_by_two()[:-4]]).verdict != "contradicted"


def curved(records: list[dict], paths: dict[str, tuple[list[float], list[float]]]) -> list[dict]:
    """The same runs with curves: single samples that are right, and problems won - lost."""
    for run in records:
        if "digest" in run and (path := paths.get(run["digest"].split(" ")[0])):
            one, net = path
            for at in ("t0.6", "t1"):
                run["curve"] = run["curve"] | {f"reach_{at}@1": one, f"won_{at}": net, f"lost_{at}": [0.0] * len(net)}
    return records


def test_factors_are_compared_where_single_samples_are_equally_often_right() -> None:
    """GRPO loses more at its end and as much on the way there; the level is half of the least gain, .15."""
    flat, steep = ([0.1, 0.2], [0.0, -0.1]), ([0.1, 0.2, 0.4], [0.0, -0.1, -0.6])
    alike = {"es_weighted": flat, "es_members": flat, "grpo": steep, "grpo_perturbed": steep}
    verdict = judge("E13", [*SWEEPS, *curved(two_by_two(), alike)])
    found = {label: interval.value for label, interval in verdict.intervals.items()}
    assert len(found) == 8 and all(abs(value) < 1e-12 for value in found.values()), found
    assert "where 15.0 % of single samples are right, n = 8 v 8 v 8 v 8" in verdict.text
    written = alike | {"es_members": ([0.1, 0.2], [0.0, -0.3]), "grpo_perturbed": ([0.1, 0.2], [0.0, -0.3])}
    assert judge("E13", [*SWEEPS, *curved(two_by_two(), written)]).verdict == "supported"
    updated = alike | {"grpo": ([0.1, 0.2], [0.0, -0.3]), "grpo_perturbed": ([0.1, 0.2], [0.0, -0.3])}
    assert judge("E13", [*SWEEPS, *curved(two_by_two(), updated)]).verdict == "contradicted"


def test_models_are_named_by_the_digests_of_their_runs() -> None:
    runs = [{"digest": letter, "spec": {"seed": seed}} for seed, letter in enumerate("abcde")]
    assert Chosen(Side("es", mean=2), runs).models() == [Model(("a", "b")), Model(("c", "d"))]
    assert Chosen(Side("es", shrunk=2), runs).models() == [Model(("a",), ("a", "b")), Model(("b",), ("c", "d"))]
    assert Chosen(Side("es", random=True), runs[:1]).models() == [Model(("a",), draw=0)]
