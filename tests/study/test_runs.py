"""What specs run: the records of every arm, and that nothing but the spec decides them."""

from functools import lru_cache

import numpy as np
import pytest
from evoalign_study import base_models, series, sweep, trainers, training, weight_cache
from evoalign_study.kinds import train
from evoalign_study.kinds.decode import base_specs, best_of_n_specs
from evoalign_study.kinds.exact import estimator_specs, kl_specs
from evoalign_study.kinds.train import audit_specs, sweep_specs, train_specs
from evoalign_study.records import MAX_CURVE, accuracy_matrix, append_record, read_records, spec_hash
from grpo_runs import QUIET
from helpers import SMALL_RUN, refused
from hypothesis import given
from hypothesis import strategies as st

from evoalign_lib import arms, grpo, ledger, models, tiny
from evoalign_lib.engines.local import LocalEngine, Prompts
from evoalign_lib.essa import lora_config
from evoalign_lib.tasks import countdown

SETTINGS = SMALL_RUN | {"steps": 4, "curve_points": 4, "curve_spacing": "log", "rank": 1}
SETTINGS |= {"prompts": 24, "batch_size": 4, "epochs": 2}
COLD = dict.fromkeys(("warm_rows", "warm_epochs", "warm_learning_rate"))
AXES = ("completions", "generated_tokens", "forward_flops", "core_seconds")


def spec_of(arm: str, seed: int = 0, **changed):
    own = {"anchor_decay": 0.1} if "anchor_decay" in arms.get(arm).settings else {}
    entry = arms.get(arm)
    own |= {"alpha_schedule": "linear"} if "alpha_schedule" in entry.settings else {}
    # the least that CMA-ES takes, and two pairs
    own |= {"population_size": 4} if entry.family == "cma" or "antithetic" in entry.options else {}
    own |= {"sigma": 0.3} if arm.startswith("es_lora") else {}  # of an adapter whose B is small
    [spec] = train_specs(arm, ["A0"], [seed], SETTINGS | own | changed, "smoke")
    return spec


@lru_cache
def record_of(arm: str):
    return sweep.run(spec_of(arm), "nb", "commit")


ONE_OF_EACH = ("es", "es_weighted", "es_random", "es_lora", "essa", "grpo", "grpo_lora", "sft")
ARMS = [arm if arm in ONE_OF_EACH else pytest.param(arm, marks=pytest.mark.slow) for arm in arms.ARMS]


@pytest.mark.parametrize("arm", ARMS)
def test_the_record_of_every_arm(arm, tmp_path):
    r, entry = record_of(arm), arms.get(arm)
    append_record(tmp_path / "x.jsonl", r)
    assert read_records(tmp_path / "x.jsonl") == [r] and r["spec_hash"] == spec_hash(spec_of(arm))
    adapter = "lora_rank" in entry.settings
    # of an adapter that TRL trains the merged model is measured
    assert r["d"] == (1_792 if adapter and arm != "grpo_lora" else 140_928)
    assert r["update_norm"] > 0 and r["test"]["n"] == 10 and len(r["digest"]) == 16
    budget, whole = r["budget"], 140_928 + (1_792 if adapter else 0)
    assert budget["core_seconds"] <= budget["core_seconds_total"]
    # those of GRPO over an adapter are no multiple (`test_grpo_adapters`)
    assert budget["forward_flops"] % (2 * whole) == 0 or arm == "grpo_lora"
    warm = 3 * 2 * whole * budget.get("sft_tokens", 0)
    if entry.options.get("fitness") == "random":  # generates nothing
        assert [budget[axis] for axis in AXES[:3]] == [0, 0, warm]
        return
    asked = {"es": 4 if arm in ("es_weighted", "es_pairs") else 3, "cma": 4, "sft": 6}.get(entry.family, 4)
    assert budget["completions"] == 16 * asked
    assert 0 < budget["generated_tokens"] <= 16 * budget["completions"] < budget["forward_flops"]
    assert ("sft_tokens" in budget) == adapter and ("trl" in r) != ("plan" in r) == arm.startswith("es")
    if entry.rollouts != "own" and entry.family != "sft":
        assert 0 < r["rollouts"]["effective_share"] <= 1
    if entry.family == "sft":
        assert 0 < r["counts"]["kept"] <= 4 * 24 and "curve" not in r
        return
    curve = r["curve"]
    assert curve["step"] == [0, 1, 2, 4] and {len(values) for values in curve.values()} == {4}
    assert curve["completions"] == [budget["completions"] * s // 4 for s in (0, 1, 2, 4)]
    assert curve["forward_flops"][0] == warm
    for axis in AXES:
        # a step may take less than the hundredth of a second to which times are rounded
        assert (np.diff(curve[axis]) >= (0 if axis == "core_seconds" else 1)).all()
        assert curve[axis][-1] == pytest.approx(budget[axis], abs=0.01)
    assert curve["reward"][0] is None and all(0 <= reward <= 1.1 for reward in curve["reward"][1:])


def test_a_base_that_is_never_right_is_left_as_it_is_and_the_record_says_so(tmp_path):
    spec = spec_of("sft", prompts=2, num_generations=1)
    with trainers.train(spec, tmp_path, lasting=True) as ended:
        r = ended.result | training.outcome(spec, ended)
        assert (tmp_path / "model" / "model.safetensors").is_file()
    assert r["counts"] == {"kept": 0} and r["update_norm"] == 0
    assert r["digest"] == models.flat_digest(weight_cache.of_base("A0"))


PRECISIONS = [pytest.param("float32", True, marks=pytest.mark.slow), ("int4", False)]


@pytest.mark.parametrize(("precision", "same"), PRECISIONS)
def test_an_adapter_over_another_precision_is_tested_over_the_base_as_loaded_too(precision, same):
    """With the precision that the base is loaded in both tests are one; a run over it is the run without."""
    r = sweep.run(spec_of("essa", test_problems=100, base_precision=precision), "nb", "commit")
    over, plain = r["over_loaded"], record_of("essa")
    assert over.keys() == {name for name in r["test"] if not name.endswith("_counts")} and over["n"] == 100
    assert (over == {name: r["test"][name] for name in over}) is same
    assert "over_loaded" not in plain and (r["digest"] == plain["digest"]) is same


DIVERGING = [
    ("es", {"alpha": 1.7e38}, 1),
    ("grpo", {"learning_rate": 1e36}, 2),
    pytest.param("rloo", {"learning_rate": 1e36, "beta": 0.1}, 2, marks=pytest.mark.slow),
    pytest.param("sft", {"learning_rate": 1e36}, 2, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("arm", "changed", "step"), DIVERGING)
def test_a_run_that_diverges_is_recorded_like_any_other(arm, changed, step, tmp_path):
    kept = tmp_path / "kept.jsonl.gz" if arm == "es" else None
    r, healthy = sweep.run(spec_of(arm, **changed), "nb", "commit", kept), record_of(arm)
    append_record(tmp_path / "x.jsonl", r)
    assert r["status"] == "finished" and r["diverged"] == step and "diverged" not in healthy
    assert r["update_norm"] is None and r["kl_policy_base"]["exact_nats_per_sequence"] is None
    # it spent what a healthy run spends, and its model answers nothing right
    assert r["budget"]["completions"] == healthy["budget"]["completions"]
    assert not any(accuracy_matrix([r], decoding).any() for decoding in ("greedy", "t1"))
    if arm != "sft":
        assert all(r["curve"][f"validation_{decoding}"][-1] == 0 for decoding in ("greedy", "t1"))
    if kept is not None:  # its ledger replays to weights that are not finite
        assert r["ledger"]["replay_error"] == 0 and ledger.verify(kept, "A0").weights == r["ledger"]["weights"]


BY_HAND = [("dr_grpo", {"scale_rewards": "group", "micro_batch": 8}), ("grpo_lora", {})]


@pytest.mark.parametrize(("arm", "more"), BY_HAND)
def test_a_gradient_run_is_the_one_of_its_spec_and_evaluation_leaves_no_trace_in_it(arm, more, tmp_path):
    """The same run made by hand, without a curve, ends with the same weights (W + B A) and the same accuracy."""
    spec = spec_of(arm, seed=5, beta=0.04, **COLD, **more)
    record = sweep.run(spec, "nb", "commit")
    model, tokenizer = tiny.load("A0")
    names = ("seed", "steps", "prompts_per_step", "num_generations", "max_completion_length", "learning_rate", "beta")
    args = grpo.config(arm, output_dir=str(tmp_path), **{name: spec[name] for name in names}, **more, **QUIET)
    rows = countdown.dataset(tiny.problems("train", 16, np.random.SeedSequence([5, 1])), tokenizer)
    adapter = lora_config(spec["lora_rank"]) if arm == "grpo_lora" else None
    trainer, budget = grpo.trainer(model, countdown.reward, args, rows, tokenizer, peft_config=adapter)
    trainer.train()
    ended = trainer.model.merge_and_unload() if adapter else trainer.model
    problems = tiny.problems("validation", 6)
    prompts = {"validation": Prompts(countdown.dataset(problems, tokenizer), tokenizer)}
    engine = LocalEngine(ended, tokenizer, None, prompts, max_completion_length=16)
    assert record["digest"] == models.flat_digest(engine.master) != spec["base_digest"]
    moved = np.linalg.norm((engine.master - weight_cache.of_base("A0")).astype(np.float64))
    assert record["update_norm"] == pytest.approx(moved, rel=1e-5) and moved > 0.01
    (greedy,) = engine.generate("validation")
    answers = zip(greedy, problems, strict=True)
    right = [countdown.grade(text, p.numbers, p.target).answer for (text, _), p in answers]
    assert record["curve"]["validation_greedy"][-1] == pytest.approx(np.mean(right), abs=1e-5)
    assert all(record["budget"][axis] == budget.spent(140_928)[axis] for axis in AXES[:3])
    assert record["kl_policy_base"]["exact_nats_per_token"] > 0


def test_fine_tuning_keeps_right_answers_alone(monkeypatch):
    kept, original = [], grpo.filtered_sft
    noted = lambda m, t, pairs, **how: kept.extend(pairs) or original(m, t, pairs, **how)  # noqa: E731
    monkeypatch.setattr(grpo, "filtered_sft", noted)
    record = train.run(spec_of("sft"))
    _, tokenizer, sets = training.world(spec_of("sft"))
    texts = [row["prompt"] for row in countdown.dataset(sets["train"], tokenizer)]
    by_prompt = {tuple(tokenizer(text)["input_ids"]): p for text, p in zip(texts, sets["train"], strict=True)}
    assert len(kept) == record["counts"]["kept"] > 0
    for prompt, completion in kept:
        problem, text = by_prompt[tuple(prompt)], tokenizer.decode(completion, skip_special_tokens=True)
        assert countdown.grade(text, problem.numbers, problem.target).answer == 1
        assert completion[-1] == tokenizer.eos_token_id and tokenizer.eos_token_id not in completion[:-1]
    assert record["digest"] == record_of("sft")["digest"]  # the same run again
    # sampling, and three passes over what was kept, twice
    trained = 2 * sum(len(prompt) + len(completion) for prompt, completion in kept)
    sampled = record["budget"]["generated_tokens"] + record["budget"]["prompt_tokens"]
    assert record["budget"]["forward_flops"] == 2 * record["d"] * (sampled + 3 * trained)


# ---- specs; those of the committed records are made by the groups of their notebooks (test_notebooks)


def trains(arm, base="A0", **more):
    return lambda s: train_specs(arm, [base], [0], s | more, "smoke")


def audits(precision, base="A0"):
    return lambda s: audit_specs(base, precision, "tied", "reward", [0], s | {"curve_spacing": None}, "smoke")


EXACT = {"estimator_problems": 4, "kl_problems": 4, "kl_samples": 2}
EXACT_MAKERS = (
    lambda s, base="A0": estimator_specs(base, 2, 1, "expected", "any", s | EXACT, "smoke"),
    lambda s, base="A0": kl_specs(base, 0.1, 1, s | EXACT, "smoke"),
)
FILLED = {"filler_steps": 16, "max_completion_length": 36}
VALUES = {  # arm: settings that are refused, named with their values
    "grpo": [("curve_spacing", "linear"), ("curve_points", 51), ("curve_points", 2)],
    "es": [("unique_prompts", 0), ("anchor_decay", 1.5), ("test_problems", 2001), ("test_problems", -1)],
    "es_anchored": [("anchor_decay", 0.0)], "rloo": [("micro_batch", 5)], "es_low_rank": [("rank", 0)],
    "es_lora": [("lora_rank", 0)], "grpo_lora": [("lora_rank", 0), ("lora_rank", 2.5)], "essa": [("warm_rows", 0)],
}  # fmt: skip
test_settings_that_are_refused_before_any_run = refused(  # maker, settings (...: missing), words
    *((trains(arm), {k: v}, f"{k}={v!r}") for arm, settings in VALUES.items() for k, v in settings),
    *((trains("es"), {"sampled_at": values}, "sampled_at=") for values in ([], [0.6, 1.0], [0.6, 0.6])),
    (trains("ppo"), {}, "ppo"),
    (lambda s: kl_specs("A0", 0.01, 1, s | EXACT | {"kl_samples": 3}, "smoke"), {}, "kl_samples=3 must be even"),
    (trains("grpo"), {"beta": ...}, "beta"),
    (trains("es"), {"curve_points": 1, "curve_spacing": None}, "curve_points=1"),
    (trains("grpo"), {"sampled_at": [-0.5]}, "temperature=-0.5"),
    (trains("es"), {"reach_at": []}, "reach_at="),
    (trains("es", "H0", **FILLED), {"reach_at": [1]}, "reach_at"),
    (trains("es_lora"), {"warm_epochs": None}, "warm_epochs"),
    (trains("essa"), {"base_precision": "int3"}, "'int8'"),
    (trains("es"), {"curve_spacng": None}, "'curve_spacing'"),
    (trains("es_weighted", "x/y"), {"engine": "vllm", "gpus": 1}, "engine='vllm'"),
    (trains("es"), FILLED, "filler_steps=16.*'H0'"),
    (trains("es", "H0"), {"max_completion_length": 36}, r"filler_steps.*\[4, 16, 64\].*None"),
    (trains("es", "H0"), FILLED | {"max_completion_length": 31}, "=31 .*32"),
    (lambda s: sweep_specs("es", "B0", s, "smoke"), {"task": "conciseness"}, "conciseness"),
    (lambda s: base_specs(["A0"], s, "smoke"), {"xyz": 1}, "'xyz'"),
    (lambda s: best_of_n_specs("A0", [0], 2, s, "smoke"), {"xyz": 1}, "'xyz'"),
    (lambda s: best_of_n_specs("A0", [0], 0, s, "smoke"), {}, "samples=0"),
    (lambda s: best_of_n_specs("B0", [0], 2, s, "smoke"), {"task": "conciseness"}, "conciseness"),
    (audits("master"), {"xyz": 1}, "'xyz'"),
    (audits("master"), {"unique_prompts": 3}, "unique_prompts"),
    *((lambda s, make=make: make(s, "org/model"), {}, "'org/model'.* one of A0") for make in EXACT_MAKERS),
    *((make, changed, named) for make in EXACT_MAKERS for changed, named in (
        ({"task": "conciseness"}, "'countdown', not 'conciseness'"), ({"task": "cuntdown"}, "'countdown'"),
        ({"measure": "strict"}, "measure='strict'"), ({"filler_steps": 16}, "filler_steps=16"),
        ({"engine": "vllm"}, "engine='vllm'.*'A0'"),
    )),
    call=lambda make, changed: make({n: v for n, v in (SETTINGS | changed).items() if v is not ...}),
)  # fmt: skip


def test_optional_settings_are_part_of_a_spec_only_where_they_are_set():
    plain = SETTINGS | {"curve_spacing": None, "unique_prompts": None}
    [spec] = train_specs("grpo", ["A0"], [0], plain, "smoke")
    assert not {"curve_spacing", "unique_prompts", "scale_rewards", "micro_batch"} & spec.keys()
    assert spec_hash(spec) != spec_hash(spec_of("grpo")) != spec_hash(spec_of("grpo", unique_prompts=3))
    # of the arms that take gradients of a step's completions alone
    assert spec_of("dapo", micro_batch=8)["micro_batch"] == 8
    assert all(spec_of(arm, micro_batch=8) == spec_of(arm) for arm in ("es", "sft"))
    # of ES alone, and where it does something
    assert spec_of("es_random", anchor_decay=0.1) == spec_of("es_random") | {"anchor_decay": 0.1}
    assert spec_of("es", anchor_decay=0) == spec_of("es", anchor_decay=None) == spec_of("es")
    assert spec_of("grpo", anchor_decay=0.1) == spec_of("grpo")


def test_a_spec_with_a_decay_trains_with_it(tmp_path):
    kept = tmp_path / "kept.jsonl.gz"
    with trainers.train(spec_of("es_random", anchor_decay=0.5), tmp_path, keep=kept) as ended:
        moved = np.linalg.norm((ended.engine.master - ended.start).astype(np.float64))
        assert ended.start.tobytes() == ledger.replay(kept, "A0", 0).tobytes()
    assert ledger.read(kept).header["settings"]["anchor_decay"] == 0.5 and ended.result["ledger"]["replay_error"] == 0
    # four steps of squared length alpha^2 d / N, of which a quarter is left after each
    assert moved == pytest.approx(0.01 * (140_928 / 3 * (1 + 1 / 4 + 1 / 16 + 1 / 64)) ** 0.5, rel=0.02)


@pytest.mark.parametrize(("unique", "expected"), [(None, 16), (1, 1), (5, 5), (99, 16)])
def test_training_problems_are_new_or_come_again_in_turn(unique, expected):
    more = {} if unique is None else {"unique_prompts": unique}
    spec = spec_of("grpo", **more)
    problems = training.world(spec)[2]["train"]
    assert len(problems) == 16 and len({countdown.problem_key(p) for p in problems}) == expected
    assert all(p == problems[i % expected] for i, p in enumerate(problems))
    # other problems for another seed, the same for another arm
    assert training.world(spec | {"seed": 1})[2]["train"][0] != problems[0]
    assert training.world(spec_of("es", **more))[2]["train"] == problems


def test_a_model_from_elsewhere_trains_on_as_many_public_problems_as_asked(external_data):
    folder = str(tiny.bases_folder() / "A0")

    def problems(arm, seed=0, **changed):
        [spec] = train_specs(arm, [folder], [seed], SETTINGS | changed, "full")
        return training.world(spec)[2]["train"]

    public = countdown.load_public("train")
    assert problems("es") == problems("grpo") == public
    few = problems("grpo", unique_prompts=5)
    assert len(few) == 16 and len(set(few)) == 5 and set(few) < set(public) and few[:11] == few[5:]
    assert problems("es", unique_prompts=5) == few != problems("grpo", seed=1, unique_prompts=5)
    filtered = problems("sft", prompts=210)
    assert len(filtered) == 210 and set(filtered) == set(public) and filtered[:10] == filtered[200:]
    with pytest.raises(ValueError, match="unique_prompts=201"):
        problems("es", unique_prompts=201)


def test_a_base_that_is_not_shipped_is_made_and_checked_by_its_digest(tmp_path, monkeypatch):
    monkeypatch.setenv("EVOALIGN_RUN_DIR", str(tmp_path))
    how = {"start": "A0", "seed": 0, "steps": 1, "batch": 4, "authors": {"right": 0.01}}
    digest = models.stored_digest(base_models.made(how) / "model.safetensors")
    monkeypatch.setitem(series.SERIES, "rare", {"few": (how, digest)})
    wanted = {spec["kind"] + spec.get("arm", ""): spec for spec in series.series_specs("rare")}
    assert {spec["base"] for spec in wanted.values()} == {"few"} and len(wanted) == 4
    small = {"validation_problems": 4, "population_size": 2}
    signal = sweep.run(wanted["signal"] | small | {"signal_populations": 1}, "nb", "commit")["signal"]
    assert 0 < signal["pass@1"] < 1 and signal["gradient"] > 0 and {"greedy", "sampled"} <= signal.keys()
    run = wanted["traines_sampled"] | small | {"steps": 1, "curve_points": 3}  # greedily members may tie
    assert sweep.run(run, "nb", "commit")["update_norm"] > 0
    with pytest.raises(ValueError, match="another base"):
        sweep.run(run | {"base_digest": "0" * 16}, "nb", "commit")


@given(st.integers(1, 6000), st.integers(3, MAX_CURVE), st.booleans())
def test_the_points_of_a_curve(steps, count, log):
    spec = {"steps": steps, "curve_points": count} | ({"curve_spacing": "log"} if log else {})
    points, axes = training.points(spec)
    assert {0, steps} <= points <= set(range(steps + 1)) and len(points) <= count
    assert ("core_seconds" in axes) == log and (not log or 1 in points)
    even = {"steps": 1000, "curve_points": 8, "curve_spacing": "log"}
    assert sorted(training.points(even)[0]) == [0, 1, 3, 10, 32, 100, 316, 1000]


@pytest.mark.parametrize("arm", ["es", "grpo"])
def test_a_sweep_of_any_model_on_disk_has_a_validation_set_alone(arm, external_data, tmp_path, monkeypatch):
    monkeypatch.setenv("EVOALIGN_RUN_DIR", str(tmp_path))
    folder = str(tiny.bases_folder() / "A0")
    setting = {name: SETTINGS[name] for name in arms.SWEEP[arm][0]}
    [spec] = sweep_specs(arm, folder, SETTINGS, "full", [setting])
    r = sweep.run(spec, "nb", "commit")
    assert "test" not in r and len(r["curve"]["validation_greedy"]) == len(r["curve"]["step"]) == 3
    # what a run at full scale leaves beside its record
    (place,) = (made for made in (tmp_path / "training").iterdir() if made.is_dir())
    assert place.name == r["spec_hash"] and list(place.glob("runs/*/events.out.tfevents.*"))
    assert list(place.glob("checkpoint-*"))  # until `load_or_run` has stored the record
    if arm == "es":
        assert ledger.Ledger.open(place / ledger.NAME).ended
    else:
        assert models.base_digest(models.load(str(place / "model"))[0]) != r["spec"]["base_digest"]
