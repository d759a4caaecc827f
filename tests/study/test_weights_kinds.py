"""Kinds that look at weights: coverage, answers, noise, lines, merged models and products, of the same short runs."""

import itertools
import random
import re

import numpy as np
import pytest
from evoalign_study import measures, sweep, training, weight_cache
from evoalign_study.kinds import weights
from evoalign_study.kinds.decode import base_specs
from evoalign_study.kinds.train import train_specs
from evoalign_study.records import record_line, unpack_bits, unpack_counts, unpack_integers, unpack_probabilities
from helpers import SMALL_RUN, refused
from hypothesis import given
from hypothesis import strategies as st

from evoalign_lib import ledger, tiny
from evoalign_lib.tasks import countdown

LONGEST, SAMPLES = weights.LONGEST, 200
SETTINGS = SMALL_RUN | {"validation_problems": 20, "alpha": 0.03, "reach_at": [0.6, 1]}
RUNS = [("es", 3)]
SIZES = {
    "max_completion_length": 16, "validation_problems": 20, "test_problems": 10, "skill_messages": 12,
    "coverage_problems": 24, "coverage_samples": SAMPLES, "coverage_temperatures": [0.6, 1.0, 1.4],
    "coverage_sampled_at": [0.6, 1.0], "noise_sigmas": [1e-9, 0.05], "noise_trials": 2, "path_points": 3,
    "perturbed_members": 12, "perturbed_problems": 24, "perturbed_validation": 10,
}  # fmt: skip
MEASURE = measures.get("countdown")


def run_of(spec):
    return sweep.run(spec, "nb", "commit")


@pytest.fixture(scope="module")
def runs(es_runs):
    return es_runs[0]


@pytest.fixture(scope="module")
def end(runs):
    return weight_cache.end(runs[:1])


@pytest.fixture(scope="module")
def covered(end):
    return run_of(weights.coverage_spec("A0", end, SIZES, "tiny"))


# ---- coverage


def test_the_chances_are_those_of_samples(covered):
    for name, drawn in covered["drawn"].items():
        exact, counts = unpack_probabilities(covered["reach"][name]), unpack_integers(drawn["right"])
        assert len(exact) == len(counts) == covered["n"] == 24
        assert counts.sum() == drawn["right_samples"] and drawn["listed"] >= 0.97 * drawn["right_samples"]
        spread = np.sqrt(SAMPLES * exact * (1 - exact))
        assert (np.abs(counts - SAMPLES * exact) < 5 * spread + 3).all()
        # together they tell a bias of a few percent
        assert abs(counts.sum() - SAMPLES * exact.sum()) < 4 * np.sqrt((spread**2).sum()) + 3
        assert 0 < drawn["entropy"] < drawn["entropy_corrected"] < np.log(SAMPLES)
        # an answer that most samples give is the vote
        assert unpack_bits(drawn["vote_bits"], 24)[exact > 0.6].all()


def test_what_a_run_reaches_at_its_end_is_in_its_curve(runs, covered):
    curve = runs[0]["curve"]
    assert covered["validation"].keys() == {"t0.6", "t1", "t1.4"}
    for name in ("t0.6", "t1"):
        ends = [curve[f"reach_{name}@{k}"] for k in (1, 16, 256)]
        assert all(0 < one[-1] < more[-1] for one, more in itertools.pairwise(ends))
        assert ends[1][-1] < covered["validation"][name] < ends[2][-1]
        # before the first step the run is its base: what it wins and loses against it is chance
        assert curve[f"won_{name}"][0] == pytest.approx(curve[f"lost_{name}"][0], abs=1e-5)
        change = curve[f"won_{name}"][-1] - curve[f"lost_{name}"][-1]
        assert change == pytest.approx(ends[2][-1] - ends[2][0], abs=3e-5)
    # looking at a run does not change it
    [unseen] = train_specs("es", ["A0"], [0], SETTINGS | {"reach_at": None}, "smoke")
    assert run_of(unseen)["digest"] == runs[0]["digest"]


# ---- noise in the place of samples


def test_copies_with_noise_solve_other_problems_and_those_without_are_the_base():
    record, others = (run_of(spec) for spec in weights.perturbed_specs("A0", [0.03], 2, SIZES, "tiny"))
    assert all(record[name] != others[name] for name in ("drawn", "validation", "member"))
    counts = unpack_integers(record["drawn"]["right"])
    assert counts.mean() / 12 == pytest.approx(record["member"]["mean"], abs=1e-6)
    assert record["member"]["sd"] > 0 < record["drawn"]["entropy"] and ((counts > 0) & (counts < 12)).any()
    # the vote of one copy is what it answers
    assert record["best"]["1"]["mean"] == pytest.approx(record["best"]["1"]["vote"], abs=1e-6)
    still = run_of(weights.perturbed_specs("A0", [1e-9], 1, SIZES, "tiny")[0])
    assert set(unpack_integers(still["drawn"]["right"])) <= {0, 12} and still["member"]["sd"] == 0
    assert still["best"] == {"1": dict.fromkeys(("mean", "vote"), still["member"]["mean"])}


# ---- answers


@pytest.mark.parametrize("whose", ["base", "run"])
def test_the_texts_are_those_of_the_engine_and_are_graded_whole(end, runs, whose):
    spec = weights.answers_spec("A0", end if whose == "run" else None, SIZES | {"coverage_problems": 64}, "tiny")
    record, problems = run_of(spec), tiny.problems("test", 64)
    with training.opened(spec) as (engine, sets):
        assert sets["test"] == problems and record["longest"] == LONGEST
        if whose == "run":
            (engine.master[:],) = weight_cache.of_group(end["of"])
        for decoding, samples in (("greedy", 0), ("t1", 1)):
            (row,) = engine.generate("test", samples=samples, seed=0)
            right = unpack_bits(record[f"{decoding}_bits"], 64)
            written = weights.unpack_texts(record[decoding], 64)
            for problem, (text, _), one, is_right in zip(problems, row, written, right, strict=True):
                answer = MEASURE.answer(text)
                assert one == (answer or text[:LONGEST], answer is not None, answer is None and len(text) > LONGEST)
                assert is_right == MEASURE.right(problem, text)
            assert len(set(written)) > 30


@pytest.mark.parametrize("text", ["\ufffd" * 200, '"\\\n' * 60])
def test_texts_of_any_kind_fit_into_a_record(monkeypatch, text):
    monkeypatch.setattr(weights, "_answered", lambda measure, completion: (text, False))
    sizes = SIZES | {"coverage_problems": 256, "max_completion_length": 1}
    record = run_of(weights.answers_spec("A0", None, sizes, "tiny"))
    assert record_line(record)  # or it is too long
    (one,) = set(weights.unpack_texts(record["t1"], 256))
    assert one.text == text[: record["longest"]] and one.cut == (len(text) > record["longest"])


# surrogates are no characters of a text that a tokenizer decodes
@given(st.lists(st.tuples(st.text(st.characters(exclude_categories=["Cs"])), st.booleans()), min_size=1, max_size=20))
def test_packed_texts_come_back(texts):
    packed = weights.pack_texts(texts)
    assert packed.isascii() and not {'"', "\\", "\n"} & set(packed)
    assert weights.unpack_texts(packed, len(texts)) == [(t[:LONGEST], a, len(t) > LONGEST) for t, a in texts]


# ---- noise on trained models


def test_noise_begins_from_the_models_own_weights_and_differs_by_draw(runs, end):
    shaken = run_of(weights.noise_spec("A0", end, SIZES, "tiny"))
    assert shaken["clean"]["greedy"] == pytest.approx(runs[0]["curve"]["validation_greedy"][-1], abs=1e-5)
    for part in weights.PARTS:
        for decoding, clean in shaken["clean"].items():
            still, loud = shaken[part][decoding]
            assert still == [clean, clean] and len(loud) == 2  # what the loud noise before left would show
    assert any(len(set(shaken[part][name][1])) == 2 for part in weights.PARTS for name in shaken["clean"])


# ---- lines


def line_to(run, sizes):
    """The line from the base of a run to the run."""
    return run_of(weights.path_spec(run["spec"]["base"], None, weight_cache.end([run]), sizes, "tiny"))


@pytest.fixture(scope="module")
def line(runs):
    return line_to(runs[0], SIZES)


def check_ends(run, record):
    """The first point is the base and the last one the run; returns the points."""
    spec, points, measure = record["spec"], record["points"], measures.get(record["spec"]["task"])
    assert record["n"] == 20 and points["kl"][0] == 0 < points["kl"][1] < points["kl"][2]
    assert record["distance"] == pytest.approx(run["update_norm"], rel=1e-6)
    with training.opened(spec) as (engine, sets):
        asked = {"validation": sets["validation"]}
        for i, master in ((0, engine.master.copy()), (-1, weight_cache.of_group(weight_cache.group([run]))[0])):
            engine.master[:] = master
            said = measure.sampled(spec, engine, asked, "validation", [0.6, 1.0], 1)
            for name in ("t0.6", "t1"):
                right = unpack_bits(points[f"{name}_bits"][i], 20)
                assert right.tolist() == unpack_counts(said[f"{name}_counts"]).tolist()
    return points


def test_the_ends_are_the_base_and_the_run(runs, line):
    check_ends(runs[0], line)
    asked = {"task": "conciseness", "max_completion_length": 24}
    more = asked | {"unique_prompts": 200, "noise_draws": 1, "reach_at": None}
    concise = run_of(train_specs("es", ["B0"], [0], SETTINGS | more, "tiny")[0])
    rewards = check_ends(concise, line_to(concise, SIZES | asked))["reward_greedy"]
    assert [rewards[0], rewards[-1]] == pytest.approx([concise["curve"]["proxy_greedy"][i] for i in (0, -1)], abs=1e-3)


def test_the_middle_of_two_runs_is_their_mean_and_lines_have_no_direction(runs, line):
    ends = [weight_cache.end([run]) for run in runs[:2]]
    between = run_of(weights.path_spec("A0", *ends, SIZES, "tiny"))["points"]
    mean = run_of(weights.path_spec("A0", weight_cache.end(runs[:2]), None, SIZES, "tiny"))["points"]
    assert {name: values[1] for name, values in between.items()} == {name: v[0] for name, v in mean.items()}
    assert np.ptp(between["nll"]) > 0
    assert {name: values[0] for name, values in line["points"].items()} == {name: v[2] for name, v in mean.items()}


def test_right_answers_to_public_problems_are_right_and_end_as_the_model_does(external_data):
    asked, rng = countdown.load_public("train"), random.Random(0)
    assert {len(problem.numbers) for problem in asked} == {3, 4}
    for problem in asked:
        assert MEASURE.score(problem, MEASURE.right_answer(problem, rng).removesuffix(tiny.END)) == 1.1
    with pytest.raises(ValueError, match="98000"):
        MEASURE.right_answer(countdown.Problem((44, 19, 35, 3), "98000"), rng)
    other = tiny.tokenizer()
    other.eos_token = other.pad_token
    rows = training.warm_rows({"task": "countdown", "base": "some/model", "seed": 0, "warm_rows": 40}, other)
    assert len(rows) == 40 and all(row["completion"].endswith(f"</answer>{other.eos_token}") for row in rows)


# ---- merged models


def merged(records, **how):
    return run_of(weights.merge_specs(records, SIZES, "tiny", **how))


def outcome(record):
    return {name: record["test"][name] for name in ("n", "greedy", "greedy_bits", "t1", "t1_counts")}


def test_one_run_alone_is_the_run_and_nothing_of_it_the_base(runs):
    alone, nothing = merged(runs[:1]), merged(runs, factor=0.0)
    sizes = {name: SIZES[name] for name in ("max_completion_length", "validation_problems", "test_problems")}
    assert outcome(alone) == outcome(runs[0]) and outcome(nothing) == outcome(run_of(base_specs(["A0"], sizes, "t")[0]))
    assert alone["norm"] == pytest.approx(runs[0]["update_norm"], rel=1e-6) and nothing["norm"] == 0
    assert alone["kl_policy_base"]["exact_nats_per_token"] > 0 == nothing["kl_policy_base"]["exact_nats_per_token"]
    assert alone["skills"].keys() == set(tiny.SKILL_NAMES) and "t0.6_counts" in alone["test"]
    assert all(skill["kl"] == 0 for skill in nothing["skills"].values())
    assert nothing["skills"]["copy"]["greedy"] == 1  # what the base has learned


def moved(records, **how):
    end = weight_cache.end(records, **how)
    return weight_cache.displacement(end, weight_cache.of_base("A0"), weight_cache.layout_of("A0"))


def test_lengths_of_means_and_of_what_is_made_as_long(runs):
    start = weight_cache.of_base("A0")
    masters = [master.astype(np.float64) for master in weight_cache.of_group(weight_cache.group(runs))]
    short = float(np.linalg.norm(moved(runs)))
    # walks of their own average to less
    assert short == pytest.approx(np.linalg.norm(np.mean(masters, axis=0) - start)) and short < runs[0]["update_norm"]
    lengths = [moved(runs[:1], as_long_as=runs), moved(runs, factor=2.0), moved(runs, draw=0)]
    assert list(map(np.linalg.norm, lengths)) == pytest.approx([short, 2 * short, short], rel=1e-6)
    random, again, other = (moved(runs, draw=draw) for draw in (0, 0, 1))
    assert np.array_equal(random, again) and abs(random @ other) < 0.1 * short**2


def test_a_fresh_walk_makes_the_mean_of_the_others_as_long_as_the_run(runs):
    mean = moved(runs[1:])
    one, again, other = (moved(runs[1:], as_long_as=runs[:1], walk=walk) for walk in (0, 0, 1))
    assert np.array_equal(one, again) and np.linalg.norm(one) == pytest.approx(runs[0]["update_norm"], rel=1e-6)
    walks, d = np.array([one - mean, other - mean]), runs[0]["d"]
    assert abs(np.corrcoef(walks)[0, 1]) < 0.02 and all(abs(walk @ mean) < 0.02 * short(walk, mean) for walk in walks)
    for part in weight_cache.layout_of("A0").views(walks[0]).values():  # spread evenly over all weights
        assert np.linalg.norm(part) == pytest.approx(np.linalg.norm(walks[0]) * np.sqrt(part.size / d), rel=1e-3)


def test_a_part_of_a_run_is_set_back_or_replaced(runs):
    sizes = SIZES | {"pruned_shares": [0.5]}
    record = run_of(weights.pruned_specs(runs, sizes, "tiny")[0])
    own, others = moved(runs[:1]), moved(runs[1:])
    small = np.argsort(np.abs(own), kind="stable")[: round(len(own) / 2)]
    cut, filled = own.copy(), own.copy()
    cut[small], filled[small] = 0, others[small]
    left = {name: part @ part / (own @ own) for name, part in (("smallest_50", cut), ("mean_50", filled))}
    assert {name: record["squares"][name] for name in left} == pytest.approx(left, rel=1e-3)
    assert record["squares"]["random_50"] == pytest.approx(0.5, abs=0.02) and record["squares"]["whole"] == 1
    assert outcome(record["models"]["whole"]) == outcome(runs[0])


def short(*vectors):
    return np.prod(np.linalg.norm(vectors, axis=1))


def test_weights_that_are_not_the_records_are_never_merged(runs):
    with pytest.raises(ValueError, match="0" * 16):
        merged([runs[0] | {"digest": "0" * 16}])


# ---- products


def test_blocks_are_the_products_of_the_weights(runs, monkeypatch):
    monkeypatch.setattr(weights, "BLOCK", 2)
    specs = weights.products_specs([runs, runs[:1]], "tiny")
    sizes = [(len(s["a"]["seeds"]), len(s["b"]["seeds"])) for s in specs]
    assert sizes == [(2, 2), (2, 1), (2, 1), (1, 1), (1, 1), (1, 1)]
    start, records = weight_cache.of_base("A0"), [run_of(spec) for spec in specs[:2]]
    for record in records:
        a, b = ([m.astype(np.float64) - start for m in weight_cache.of_group(record["spec"][side])] for side in "ab")
        total = np.sum([layer["products"] for layer in record["layers"].values()], axis=0)
        assert total == pytest.approx(np.array([[x @ y for y in b] for x in a]), rel=1e-5, abs=1e-7)
    own = records[0]["layers"]
    assert sum(layer["entries"] for layer in own.values()) == records[0]["d"] == runs[0]["d"]
    assert sum(layer["start"] for layer in own.values()) == pytest.approx(start @ start, rel=1e-5)
    for layer in own.values():
        unrounded, rounded = (layer["moved"][dtype] for dtype in ("float32", "bfloat16"))
        assert all(0 < r < f <= layer["entries"] for r, f in zip(rounded, unrounded, strict=True))
    assert "moved" not in records[1]["layers"]["layer 0"]


def test_stretches_of_runs_add_up_to_the_runs(runs):
    specs = weights.stretch_specs(runs, runs[1:2], [(0, 1), (1, 2), (0, 2)], "tiny")
    records = [run_of(spec) for spec in specs]
    start, masters = weight_cache.of_base("A0"), weight_cache.of_group(weight_cache.group(runs))
    moved = np.array([master.astype(np.float64) - start for master in masters])
    scale = np.square(moved).sum(1).mean()
    assert weights.gram_of_stretch(records[2]) == pytest.approx(moved @ moved.T, abs=2e-6 * scale)
    assert records[2]["along"][1] == pytest.approx(runs[1]["update_norm"], rel=1e-4)  # along itself
    first, second, both = (np.array(record["along"]) for record in records)
    assert first + second == pytest.approx(both, abs=1e-4 * np.sqrt(scale))
    steps = [np.square(record["norms"]) for record in records]
    assert steps[0] + steps[1] == pytest.approx(steps[2], rel=0.1)  # all but at right angles
    with pytest.raises(ledger.LedgerError, match="step 3"):
        run_of(weights.stretch_specs(runs, runs, [(0, 3)], "tiny")[0])


# ---- what is refused


def chosen(more):
    return {name: value for name, value in (SIZES | more).items() if value is not ...}


def of_base(maker, base="A0", **more):
    return lambda end: maker(base, None, chosen(more), "tiny")


def line_of(base, *at_end, **more):
    return lambda end: weights.path_spec(base, *(end if own else None for own in at_end), chosen(more), "tiny")


def copies(sigmas, repeats=1, **more):
    return lambda end: weights.perturbed_specs("A0", sigmas, repeats, chosen(more), "tiny")


OTHERS = [{"spec": {"kind": "train", "base": base, "seed": 0}, "digest": ""} for base in ("A0", "A1")]
ASKED = {"task": "conciseness"}
OUT_OF_RANGE = (  # what makes a spec, a setting, and values that it may not have
    (weights.coverage_spec, "coverage_temperatures", ([], [1, 1.0])),
    (weights.coverage_spec, "coverage_samples", (1, 5000)),
    (weights.answers_spec, "coverage_problems", (0, 321)),
    (weights.noise_spec, "noise_sigmas", ([], [0.01, -1.0], [float("nan")], [1, 2, 3, 4, 5, 6, 7, 8, 9])),
    (weights.noise_spec, "noise_trials", (0,)),
)
test_what_cannot_be_measured_is_refused = refused(  # what makes a spec from an end, and what the error names
    *((of_base(make, **{name: v}), re.escape(f"{name}={v}")) for make, name, values in OUT_OF_RANGE for v in values),
    (of_base(weights.coverage_spec, coverage_sampled_at=[0.0]), "temperature=0.0"),
    (of_base(weights.coverage_spec, coverage_problems=3000), "test_problems=3000"),
    (of_base(weights.answers_spec, max_completion_length=...), "'max_completion_length'"),
    (of_base(weights.answers_spec, "B0"), "'B0'"),
    (copies([0.1, 0.1]), "sigmas="),
    (copies([0.1], 0), "repeats=0"),
    (copies([0.1], perturbed_members=1), "perturbed_members=1"),
    (copies([0.1], perturbed_problems=3000), "test_problems=3000"),
    (line_of("A0", True, True), "same model"),
    (line_of("A0", False, True, path_points=2), "path_points=2"),
    (line_of("A0", False, True, max_completion_length=...), "a path needs"),
    (line_of("A0", False, True, path_points=50, validation_problems=256), "12800"),
    (line_of("A1", False, True), "'A0'.*'A1'"),
    (line_of("H0", False, True), "'H0'"),
    (line_of("B0", False, False), "task='conciseness'"),
    (line_of("B0", False, False, **ASKED, measure="words"), "'words'"),
    (line_of("B0", False, False, **ASKED, validation_problems=129), "=129"),
    (lambda end: weights.merge_specs([], SIZES, "tiny"), "0 runs"),
    (lambda end: weights.unpack_texts("a b", 3), "2 texts where there are 3 problems"),
    (lambda end: weights.products_specs([OTHERS[:1], OTHERS[1:]], "t"), "A0, A1"),
    (lambda end: weights.coverage_spec("A1", end, SIZES, "tiny"), "'A0'.*'A1'"),
    call=lambda make, end: make(end),
)


def test_what_makes_no_group_is_refused(runs):
    other = runs[1] | {"spec": runs[1]["spec"] | {"sigma": 0.02}}
    for records in ([runs[0], other], [runs[0] | {"spec": runs[0]["spec"] | {"kind": "base"}}]):
        with pytest.raises(ValueError, match="make no group"):
            weights.merge_specs(records, SIZES, "tiny")
    with pytest.raises(ValueError, match="factor=nan"):
        weights.merge_specs(runs, SIZES, "tiny", factor=float("nan"))
    with pytest.raises(ValueError, match="'A1'.*'A0'"):
        weights.merge_specs(runs[:1], SIZES, "tiny", as_long_as=OTHERS[1:])
    with pytest.raises(ValueError, match="walk=3 has no length"):
        weights.merge_specs(runs, SIZES, "tiny", walk=3)
