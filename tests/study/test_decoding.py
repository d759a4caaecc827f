"""Records of kind "decoding": made of the very weights of another record, however they are got, or not at all."""

import shutil

import numpy as np
import pytest
from evoalign_study import kinds, paths, sweep, training
from evoalign_study import weight_cache as trained_weights
from evoalign_study.kinds.decode import base_specs, decoding_specs, measured_spec
from evoalign_study.kinds.train import train_specs
from evoalign_study.records import spec_hash, unpack_counts
from evoalign_study.sweep import load_or_run

from evoalign_lib import ledger, tiny
from evoalign_lib.tasks import countdown

pytestmark = pytest.mark.skipif(
    not all((tiny.bases_folder() / base).is_dir() for base in tiny.BASES), reason="the bases have not been trained yet"
)

SETTINGS = {
    "max_completion_length": 16, "validation_problems": 6, "test_problems": 10, "steps": 4, "prompts_per_step": 4,
    "curve_points": 4, "curve_spacing": "log", "population_size": 3, "sigma": 0.03, "alpha": 0.01,
    "num_generations": 4, "learning_rate": 1e-3, "beta": 0.0, "prompts": 24, "batch_size": 4, "epochs": 2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    """Weights are kept where no other test finds them."""
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")


def trained(arm: str, **changed) -> dict:
    [spec] = train_specs(arm, ["A0"], [0], SETTINGS | changed, "tiny")
    return sweep.run(spec, "nb", "commit")


def again(record: dict, **arguments) -> dict:
    [spec] = decoding_specs([record], [0.4, 1.0], **arguments)
    assert spec_hash(measured_spec(spec)) == record["spec_hash"] != spec_hash(spec)
    return sweep.run(spec, "nb", "commit")


@pytest.mark.parametrize("arm", ["es", "grpo", "sft"])
def test_a_run_is_trained_again_to_the_same_weights(arm):
    """With another curve than the first time: what is measured at temperature 1 is then what the record has."""
    first = trained(arm)
    assert trained_weights.kept(first["digest"]) is not None
    shutil.rmtree(paths.RUNS)
    second = again(first)
    assert second["made"] == "trained again" and second["digest"] == first["digest"]
    assert {name: second["test"][name] for name in ("n", "t1", "t1_counts")} == {
        name: first["test"][name] for name in ("n", "t1", "t1_counts")
    }
    assert second["test"].keys() == {"n", "t0.4", "t0.4_counts", "t1", "t1_counts"}
    assert second["validation"].keys() == {"n", "greedy", "greedy_bits", "t0.6", "t0.6_counts", "t1", "t1_counts"}
    assert second["test"]["t0.4"] == pytest.approx(unpack_counts(second["test"]["t0.4_counts"]).mean() / 16, abs=1e-6)
    if "curve" in first:
        assert second["validation"]["greedy"] == pytest.approx(first["curve"]["validation_greedy"][-1], abs=1e-5)
    assert "validation_at_step" not in second and "curve" not in second
    third = again(first)
    assert third["made"] == "kept" and (third["test"], third["validation"]) == (second["test"], second["validation"])


def test_weights_kept_damaged_are_refused():
    first = trained("es")
    shutil.rmtree(paths.RUNS)
    file = trained_weights.keep(np.zeros(3, np.float32))
    assert trained_weights.kept(file.stem) is not None and trained_weights.kept(first["digest"]) is None
    file.rename(file.with_stem(first["digest"]))
    with pytest.raises(ValueError, match="Remove it"):
        again(first)


def test_a_base_is_loaded():
    [spec] = base_specs(["A0"], SETTINGS, "tiny")
    first = sweep.run(spec, "nb", "commit")
    second = again(first)
    assert second["made"] == "loaded" and second["digest"] == spec["base_digest"]
    assert second["test"]["t1_counts"] == first["test"]["t1_counts"]
    assert 1 < np.ptp(unpack_counts(second["validation"]["t0.6_counts"]))


def test_a_run_of_es_is_replayed_from_its_ledger_to_any_step(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    specs = train_specs("es", ["A0"], range(1), SETTINGS, "tiny")
    [first] = load_or_run(specs, "nb", "tiny", workers=1, keep_ledgers=specs)
    wanted = decoding_specs([first], [0.4, 1.0], at_step=2)
    second = sweep.run(wanted[0], "nb", "commit")
    assert second["made"] == "replayed" and second["digest"] == first["digest"]
    assert second["test"]["t1_counts"] == first["test"]["t1_counts"]
    # the steps between which it lies: the last one, and the base
    last, before = (
        kinds.get("decoding").run(decoding_specs([first], [0.4], at_step=step)[0])["validation_at_step"]
        for step in (4, 0)
    )
    [base] = base_specs(["A0"], SETTINGS, "tiny")
    assert last == second["validation"] != second["validation_at_step"] != before
    assert before == again({"spec": base, "spec_hash": spec_hash(base)})["validation"]
    # other processes know nothing of the folder here: they train again, and measure the same
    [stored] = load_or_run(wanted, "other", "tiny", workers=1)
    assert load_or_run(wanted, "third", "tiny", workers=1) == [stored] and stored["notebook"] == "other"
    for block in ("test", "validation", "validation_at_step"):
        assert stored[block] == second[block]
    assert stored["made"] == "trained again"
    # a ledger that is not the record's is not replayed
    kept = tmp_path / f"nb/ledgers/{spec_hash(specs[0])}.jsonl.gz"
    kept.write_bytes(ledger.pack(kept)[:-1])
    with pytest.raises(ValueError, match="restore it from git"):
        kinds.get("decoding").run(wanted[0])


def test_the_ledger_of_other_weights_is_not_replayed(tmp_path, monkeypatch):
    """Another machine trains a committed run to weights of its own; they are measured, and not those of the record."""
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    specs = train_specs("es", ["A0"], range(1), SETTINGS, "tiny")
    [committed] = load_or_run(specs, "nb", "tiny", workers=1, keep_ledgers=specs)
    master = trained_weights.again(specs[0], committed["digest"])[0]
    others = trained_weights.keep(master + np.float32(1e-3)).stem
    elsewhere = again(committed | {"digest": others})
    assert (elsewhere["made"], elsewhere["digest"]) == ("kept", others)
    assert elsewhere["test"] != again(committed)["test"]


@pytest.mark.parametrize("arm", ["es", "grpo"])
def test_the_curve_is_measured_again_at_a_temperature(arm):
    """At temperature 1 it is what the record has; at another it has other answers, and nothing else."""
    first = trained(arm)
    hot, warm = (again(first, curve_temperature=t)["curve"] for t in (1.0, 0.6))
    assert hot == {name: first["curve"][name] for name in ("step", "validation_t1")}
    assert warm.keys() == {"step", "validation_t0.6"} and warm["step"] == hot["step"]
    assert warm["validation_t0.6"] != hot["validation_t1"]


def test_a_replayed_run_has_the_curve_of_one_trained_again(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    specs = train_specs("es", ["A0"], range(1), SETTINGS, "tiny")
    [first] = load_or_run(specs, "nb", "tiny", workers=1, keep_ledgers=specs)
    replayed = again(first, curve_temperature=0.6)
    (tmp_path / "nb/tiny.jsonl").unlink()
    anew = again(first, curve_temperature=0.6)
    assert (replayed["made"], anew["made"]) == ("replayed", "trained again")
    assert replayed["curve"] == anew["curve"] and replayed["test"] == anew["test"]


@pytest.mark.skipif(not (tiny.bases_folder() / "B0").is_dir(), reason="the base has not been trained yet")
@pytest.mark.parametrize("arm", ["es", None])
def test_conciseness_is_measured_again_by_its_own_measures(arm):
    settings = {"task": "conciseness", "max_completion_length": 24, "validation_problems": 4, "test_problems": 12}
    settings |= {name: SETTINGS[name] for name in ("steps", "prompts_per_step", "population_size", "sigma", "alpha")}
    settings |= {"curve_points": 3, "unique_prompts": 2, "noise_draws": 1}
    made = base_specs(["B0"], settings, "tiny") if arm is None else train_specs(arm, ["B0"], [0], settings, "tiny")
    first = sweep.run(made[0], "nb", "commit")
    [spec] = decoding_specs([first], [0.6, 1.0], **({} if arm is None else {"curve_temperature": 1.0}))
    second = sweep.run(spec, "nb", "commit")
    for name in ("t1", "t1_counts", "reward_t1"):
        assert second["test"][name] == first["test"][name]
    assert second["test"].keys() >= {"t0.6", "t0.6_counts", "reward_t0.6"} and "validation" not in second
    if arm is not None:
        names = ("proxy_t1", "reward_t1", "right_t1", "degenerate_t1", "right_bits_t1")
        assert second["curve"] == {name: first["curve"][name] for name in ("step", *names)}


@pytest.mark.skipif(not (tiny.bases_folder() / "B0").is_dir(), reason="the base has not been trained yet")
@pytest.mark.parametrize("task", ["countdown", "conciseness"])
def test_a_run_that_is_sampled_as_it_is_trained_has_what_it_has_measured_again(task):
    """Further temperatures leave no trace in training, nor in what is measured besides."""
    of_task = {"task": task, "unique_prompts": 2, "noise_draws": 1, "validation_problems": 4, "curve_points": 3}
    base, changed = ("A0", {}) if task == "countdown" else ("B0", of_task | {"max_completion_length": 24})
    [plain] = train_specs("es", [base], [0], SETTINGS | changed, "tiny")
    [asked] = train_specs("es", [base], [0], SETTINGS | changed | {"sampled_at": [0.6]}, "tiny")
    assert asked == plain | {"sampled_at": [0.6]}
    first, second = (sweep.run(spec, "nb", "commit") for spec in (plain, asked))
    [spec] = decoding_specs([first], [0.6], curve_temperature=0.6)
    later = sweep.run(spec, "nb", "commit")
    assert second["digest"] == first["digest"]
    for record in (first, second):
        record["curve"].pop("core_seconds", None)  # a measured time
    for block in ("test", "curve"):
        assert second[block] == first[block] | later[block] != first[block]
    # measured again, it has what it had; and its curve can be had at yet another temperature
    [again_spec] = decoding_specs([second], [0.6], curve_temperature=0.4)
    other = sweep.run(again_spec, "nb", "commit")
    assert other["test"] == later["test"] and not {name for name in other["curve"] if "0.6" in name}


def test_what_has_no_curve_is_not_measured_along_it():
    [spec] = base_specs(["A0"], SETTINGS, "tiny")
    with pytest.raises(ValueError, match="curve_temperature=0.6: the record .* has no curve"):
        decoding_specs([{"spec": spec, "spec_hash": spec_hash(spec)}], [0.6], curve_temperature=0.6)


@pytest.mark.parametrize("arm", ["grpo", "es", None])
def test_nothing_is_measured_on_other_weights(arm, monkeypatch):
    [spec] = base_specs(["A0"], SETTINGS, "tiny") if arm is None else train_specs(arm, ["A0"], [0], SETTINGS, "tiny")
    record = {"spec": spec, "spec_hash": spec_hash(spec), "digest": "0123456789abcdef"}
    [wanted] = decoding_specs([record], [0.4])
    wanted["digest"] = record["digest"]
    monkeypatch.setattr(kinds.get("decoding"), "label", lambda _: pytest.fail("measured"))
    with pytest.raises(ValueError, match=r"have the digest [0-9a-f]{16}, in the record it is 0123456789abcdef"):
        kinds.get("decoding").run(wanted)


def record_of(**changed) -> dict:
    [spec] = train_specs("es", ["A0"], [0], SETTINGS, "tiny")
    spec |= changed
    return {"spec": spec, "spec_hash": spec_hash(spec), "digest": "0" * 16}


@pytest.mark.parametrize(
    ("changed", "arguments", "message"),
    [
        ({"kind": "audit"}, {}, "is not of a model of the tiny world"),
        ({"task": "conciseness"}, {"at_step": 2}, "is not of an ES run of so many steps that is validated"),
        ({}, {"curve_temperature": 0}, "temperature=0 must be above 0"),
        ({"kind": "base"}, {"at_step": 2}, "is not of an ES run"),
        ({"base": "someone/else"}, {}, "is not of a model of the tiny world"),
        ({"test_problems": 0}, {}, "has no test set or no validation set"),
        ({}, {"temperatures": []}, r"temperatures=\[\]: give at least one"),
        ({}, {"temperatures": [0.4, 0.4]}, "and each once"),
        ({}, {"temperatures": [0.4, 0]}, "temperature=0 must be above 0"),
        ({}, {"samples": 0}, "samples=0: a record holds counts of 1 to 16"),
        ({}, {"samples": 17}, "samples=17: a record holds"),
        ({}, {"at_step": 5}, "at_step=5: the record .* is not of an ES run of so many steps"),
        ({"arm": "grpo"}, {"at_step": 2}, "at_step=2: the record .* is not of an ES run"),
    ],
)
def test_what_has_no_spec(changed, arguments, message):
    with pytest.raises(ValueError, match=message):
        decoding_specs([record_of(**changed)], **{"temperatures": [0.4]} | arguments)


def test_a_record_of_the_largest_sets_is_stored(monkeypatch):
    """The longest spec, both validation blocks: below the bytes that a record may have."""
    spec = record_of(scale_rewards="group", unique_prompts=1000, test_problems=2000, validation_problems=512)["spec"]
    counts = lambda n: "g" * n  # noqa: E731
    validation = {"n": 512, "greedy": 0.123456, "greedy_bits": "f" * 128, "t0.6": 0.123456, "t0.6_counts": counts(512)}
    validation |= {"t1": 0.123456, "t1_counts": counts(512)}
    test = {"n": 2000} | {f"t{t}": 0.123456 for t in (0.4, 0.6)} | {f"t{t}_counts": counts(2000) for t in (0.4, 0.6)}
    blocks = {"test": test, "validation": validation, "validation_at_step": validation}
    monkeypatch.setattr(kinds.get("decoding"), "run", lambda _: blocks | {"made": "trained again", "digest": "0" * 16})
    [wanted] = decoding_specs([{"spec": spec, "spec_hash": "", "digest": "0" * 16}], [0.4, 0.6], at_step=2)
    assert sweep.run(wanted, "02_grpo_countdown", "0123456789ab+")["made"] == "trained again"


def test_the_samples_of_a_temperature_are_those_of_the_engine():
    [spec] = base_specs(["A0"], SETTINGS, "tiny")
    record = again({"spec": spec, "spec_hash": spec_hash(spec)}, samples=3)
    model, tokenizer, sets = training.world(spec)
    engine = training.evaluation_engine(spec, model, tokenizer, sets)
    drawn = engine.generate("test", samples=3, seed=0, temperature=0.4)
    right = [
        [countdown.grade(t, p.numbers, p.target).answer for (t, _), p in zip(row, sets["test"], strict=True)]
        for row in drawn
    ]
    assert record["test"]["t0.4_counts"] == "".join(map(str, np.sum(right, 0, dtype=int)))
