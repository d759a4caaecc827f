"""Kinds that decode models: best of n, models of records measured again, and counts of many samples, block by block."""

import json
import shutil
import sys

import numpy as np
import pytest
from evoalign_study import base_models, kinds, measures, paths, sweep, weight_cache
from evoalign_study.kinds import decode
from evoalign_study.kinds.train import train_specs
from evoalign_study.records import append_record, record_line, spec_hash, unpack_counts, unpack_integers
from evoalign_study.sweep import load_or_run
from grpo_runs import adapted
from helpers import SMALL_RUN, each_named, random_model, refused, tokenizer

from evoalign_lib import files, ledger, models, tasks, tiny
from evoalign_lib.engines.local import LocalEngine, Prompts
from evoalign_lib.precision import copy_to

SETTINGS = SMALL_RUN | {"curve_spacing": "log", "alpha": 0.05, "prompts": 12, "batch_size": 4, "epochs": 1}
SAMPLED = {
    "max_completion_length": 16, "sampled_problems": 5, "sampled_block": 3, "sampled_samples": 12,
    "sampled_temperatures": [0.6, 1.0],
}  # fmt: skip
MEASURE = measures.get("countdown")


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory):
    """A run folder and results of the file's own; returns where ends are made."""
    made = tmp_path_factory.mktemp("decode")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVOALIGN_RUN_DIR", str(made / "run"))
        patch.setattr(paths, "RUNS", made / "runs")
        patch.setattr(paths, "RESULTS", made / "results")
        yield made


def run_of(spec, keep=None):
    return sweep.run(spec, "nb", "commit", keep)


def drawn(model, n, samples, temperature=1.0, seed=0):
    """The samples of each problem as an engine gives them to whoever asks for all at once, which are right; engine."""
    problems, tok = tiny.problems("test", n), tokenizer()
    prompts = {"test": Prompts(tiny.dataset(problems, tok), tok)}
    engine = LocalEngine(model, tok, None, prompts, max_completion_length=16)
    answers = list(zip(*engine.generate("test", samples=samples, seed=seed, temperature=temperature), strict=True))
    right = [[MEASURE.right(p, text) for text, _ in row] for p, row in zip(problems, answers, strict=True)]
    return answers, np.array(right), engine


def test_best_of_n_is_the_share_of_problems_that_n_samples_solve():
    [spec] = decode.best_of_n_specs("A0", [3], 9, SETTINGS | {"test_problems": 40}, "smoke")
    r = run_of(spec)
    answers, right, engine = drawn(tiny.load("A0")[0], 40, 9, seed=3)
    assert r["best_of_n"] == pytest.approx({str(n): right[:, :n].any(1).mean() for n in (1, 2, 4, 8)}, abs=1e-6)
    tokens, asked = sum(len(ids) for row in answers for _, ids in row), 9 * int(engine.prompts["test"].lengths.sum())
    budget = {"completions": 360, "generated_tokens": tokens, "prompt_tokens": asked}
    budget["forward_flops"] = 2 * r["d"] * (tokens + asked)
    assert {name: r["budget"][name] for name in budget} == budget


# ---- records measured again


@pytest.fixture(scope="module")
def trained(place):
    """A run of each trainer; that of ES has its ledger among the committed records."""
    [es] = train_specs("es", ["A0"], [0], SETTINGS, "tiny")
    kept = place / "kept.jsonl.gz"
    record = append_record(paths.RESULTS / "nb" / "tiny.jsonl", run_of(es, kept), kept)
    others = {arm: run_of(train_specs(arm, ["A0"], [0], SETTINGS, "tiny")[0]) for arm in ("grpo", "sft")}
    return {"es": record} | others


def kept_ledger(place, trained):
    return place / f"results/nb/ledgers/{trained['es']['spec_hash']}.jsonl.gz"


def again(record, temperatures=(0.4, 1.0), **arguments):
    [spec] = decode.decoding_specs([record], temperatures, **arguments)
    assert spec_hash(decode.measured_spec(spec)) == spec_hash(record["spec"]) != spec_hash(spec)
    return run_of(spec)


@pytest.mark.parametrize("arm", ["grpo", "sft"])
def test_a_run_is_trained_again_to_the_same_weights(trained, arm, monkeypatch, tmp_path):
    """With another curve than the first time: what is measured at temperature 1 is then what the record has."""
    first, kept = trained[arm], again(trained[arm])
    monkeypatch.setattr(paths, "RUNS", tmp_path)
    second = again(first, **({"curve_temperature": 1.0} if arm == "grpo" else {}))
    assert (kept["made"], second["made"], second["digest"]) == ("kept", "trained again", first["digest"])
    test = second["test"]
    assert (test, second["validation"]) == (kept["test"], kept["validation"])
    assert test.keys() == {"n", "t0.4", "t0.4_counts", "t1", "t1_counts"} and "validation_at_step" not in second
    assert test["t1_counts"] == first["test"]["t1_counts"]
    assert test["t0.4"] == pytest.approx(unpack_counts(test["t0.4_counts"]).mean() / 16, abs=1e-6)
    if arm == "grpo":
        assert second["curve"] == {name: first["curve"][name] for name in ("step", "validation_t1")}
        assert second["validation"]["greedy"] == pytest.approx(first["curve"]["validation_greedy"][-1], abs=1e-5)


def test_a_base_is_loaded():
    [spec] = decode.base_specs(["A0"], SETTINGS, "tiny")
    first = run_of(spec)
    second, few = again(first), again(first, (0.4,), samples=3)
    assert second["made"] == "loaded" and second["digest"] == spec["base_digest"]
    assert second["test"]["t1_counts"] == first["test"]["t1_counts"]
    assert 1 < np.ptp(unpack_counts(second["validation"]["t0.6_counts"]))
    with pytest.raises(ValueError, match="curve_temperature=0.6"):
        decode.decoding_specs([first], [0.6], curve_temperature=0.6)
    _, right, _ = drawn(tiny.load("A0")[0], 10, 3, 0.4)
    assert few["test"]["t0.4_counts"] == "".join(map(str, right.sum(1)))


def test_a_run_of_es_is_replayed_from_its_ledger_to_any_step(trained, place, monkeypatch, tmp_path):
    first = trained["es"]
    second, (before, last) = again(first, at_step=1), (again(first, (1.0,), samples=4, at_step=s) for s in (0, 2))
    assert second["made"] == "replayed" and second["test"]["t1_counts"] == first["test"]["t1_counts"]
    assert last["validation_at_step"] == last["validation"] and second["validation"] != second["validation_at_step"]
    [base] = decode.base_specs(["A0"], SETTINGS, "tiny")
    of_base = again({"spec": base, "spec_hash": ""}, (1.0,), samples=4)
    assert before["validation_at_step"] == of_base["validation"] != last["validation"]
    replayed = again(first, (1.0,), samples=2, curve_temperature=0.6)
    # who knows nothing of the ledger trains again, and measures the same
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    monkeypatch.setattr(paths, "RUNS", tmp_path)
    anew = again(first, (1.0,), samples=2, curve_temperature=0.6)
    assert (replayed["made"], anew["made"]) == ("replayed", "trained again")
    assert all(replayed[block] == anew[block] for block in ("curve", "test", "validation"))


def test_a_damaged_ledger_and_weights_that_are_not_the_records_are_refused(trained, place, monkeypatch, tmp_path):
    first = trained["es"]
    # another machine trains a committed run to weights of its own; they are measured, and not those of the record
    others = weight_cache.keep(weight_cache.again(first["spec"], first["digest"])[0] + np.float32(1e-3)).stem
    elsewhere = again(first | {"digest": others})
    assert (elsewhere["made"], elsewhere["digest"]) == ("kept", others)
    for record in (first, trained["sft"]):
        with pytest.raises(ValueError, match="0123456789abcdef"):
            again(record | {"digest": "0123456789abcdef"})
    shutil.copytree(place / "results", tmp_path / "results")
    monkeypatch.setattr(paths, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(paths, "RUNS", tmp_path)
    kept = kept_ledger(tmp_path, trained)
    kept.write_bytes(ledger.pack(kept)[:-1])
    with pytest.raises(ValueError, match="restore it from git"):
        again(first)
    file = weight_cache.keep(np.zeros(3, np.float32))
    file.rename(file.with_stem(trained["sft"]["digest"]))
    with pytest.raises(ValueError, match="Remove it"):
        again(trained["sft"])


@pytest.mark.parametrize("base", ["A0", pytest.param("B0", marks=pytest.mark.slow)])
def test_a_run_that_is_sampled_as_it_is_trained_has_what_it_has_measured_again(base):
    """Further temperatures leave no trace in training, nor in what is measured besides."""
    of_task = {"task": "conciseness", "unique_prompts": 2, "noise_draws": 1, "validation_problems": 4}
    changed = {} if base == "A0" else of_task | {"max_completion_length": 24, "curve_points": 3}
    first, second = (
        run_of(train_specs("es", [base], [0], SETTINGS | changed | more, "smoke")[0])
        for more in ({}, {"sampled_at": [0.6]})
    )
    later, hot = (again(first, [t], curve_temperature=t) for t in (0.6, 1.0))
    assert second["digest"] == first["digest"] and ("validation" in later) == (base == "A0")
    for record in (first, second):
        record["curve"].pop("core_seconds", None)  # a measured time
    for block in ("test", "curve"):
        assert second[block] == first[block] | later[block] != first[block]
        assert hot[block].items() <= first[block].items()  # at temperature 1 it is what the record has


def record_of(**changed):
    spec = train_specs("es", ["A0"], [0], SETTINGS, "tiny")[0] | changed
    return {"spec": spec, "spec_hash": spec_hash(spec), "digest": "0" * 16}


test_what_is_not_measured_again = refused(
    ({"kind": "audit"}, {}, "tiny world"),
    ({"task": "conciseness"}, {"at_step": 2}, "at_step=2"),
    ({"arm": "grpo"}, {"at_step": 2}, "at_step=2"),
    ({}, {"at_step": 3}, "at_step=3"),
    ({"test_problems": 0}, {}, "no test set"),
    ({}, {"curve_temperature": 0}, "temperature=0"),
    ({}, {"temperatures": [0.4, 0.4]}, "temperatures="),
    ({}, {"samples": 17}, "samples=17"),
    call=lambda changed, more: decode.decoding_specs([record_of(**changed)], **{"temperatures": [0.4]} | more),
)


# ---- counts of many samples


def sampled(end=None, **changed):
    return [run_of(spec) for spec in decode.sampled_specs("A0", end, SAMPLED | changed, "tiny")]


def counted(records):
    return np.concatenate([unpack_integers(record["right"]) for record in records]).tolist()


def texts(records):
    return [entry["texts"] for record in records for entry in decode.read_texts(record)]


@pytest.fixture(scope="module")
def records(place):
    return sampled()


def test_counts_are_those_of_direct_grading_and_texts_lie_beside_the_record(records):
    blocks = [(r["spec"]["temperature"], r["spec"]["block"]) for r in records]
    assert blocks == [(t, block) for t in (0.6, 1.0) for block in ([0, 3], [3, 5])]
    for temperature, own in ((0.6, records[:2]), (1.0, records[2:])):
        answers, right, engine = drawn(tiny.load("A0")[0], 5, 12, temperature)
        assert counted(own) == right.sum(1).tolist() and right.any()
        ids = [tokens for row in answers for _, tokens in row]
        clipped = sum(tokens[-1] not in engine.eos_ids for tokens in ids)
        sums = [sum(r[name] for r in own) for name in ("generated_tokens", "clipped", "prompt_tokens")]
        assert sums == [sum(map(len, ids)), clipped, 12 * engine.prompts["test"].lengths.sum()]
        assert texts(own) == [[text for text, _ in row] for row in answers]
    for record in records:
        line, entries = record_line(record), decode.read_texts(record)
        assert len(line) < 2000 and len(entries) == record["n_problems"]
        assert not any(len(text) > 4 and json.dumps(text)[1:-1] in line for entry in entries for text in entry["texts"])
        assert [sum(entry["right"]) for entry in entries] == unpack_integers(record["right"]).tolist()
    # whatever the blocks, and whenever they are drawn
    (one,) = sampled(sampled_block=5, sampled_temperatures=[1.0])
    assert counted([one]) == counted(records[2:]) != counted(records[:2]) and one["n_problems"] == 5
    assert counted(sampled(sampled_block=5, sampled_seed=1, sampled_temperatures=[1.0])) != counted([one])


@pytest.fixture(scope="module")
def folder(place):
    """An end with weights of another size, and no tokenizer of its own."""
    random_model().save_pretrained(place / "end")
    return place / "end"


def test_ends_answer_with_their_weights_to_the_prompts_of_the_model(folder, place, trained):
    """A model's folder, a ledger, and an adapter over the model."""
    replayed, over = tiny.load("A0")[0], adapted()
    (master,) = weight_cache.of_group(weight_cache.group([trained["es"]]))
    copy_to(replayed, weight_cache.layout_of("A0"), master)
    over.peft_config["default"].base_model_name_or_path = "A0"
    over.save_pretrained(place / "adapter", save_embedding_layers=False)
    ends = {folder: models.load(str(folder), tokenizer())[0], kept_ledger(place, trained): replayed}
    for end, model in (ends | {place / "adapter": over.merge_and_unload()}).items():
        (record,) = sampled(end, sampled_block=5, sampled_temperatures=[1.0])
        answers, _, engine = drawn(model, 5, 12)
        assert texts([record]) == [[text for text, _ in row] for row in answers]
        assert [entry["prompt"] for entry in decode.read_texts(record)] == engine.prompts["test"].prompts
        assert record["spec"]["end"] == base_models.know_end(end) and str(end) not in record_line(record)


def test_texts_that_are_not_those_of_the_record_are_refused(records, monkeypatch, tmp_path):
    before = decode.texts_file(records[1]["spec"]).read_bytes()
    monkeypatch.setenv("EVOALIGN_RUN_DIR", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=records[0]["spec_hash"]):
        decode.read_texts(records[0])
    (tmp_path / "samples").mkdir()
    decode.texts_file(records[0]["spec"]).write_bytes(before)
    with pytest.raises(ValueError, match=records[0]["texts_sha256"][:16]):
        decode.read_texts(records[0])


def test_a_block_that_is_cut_short_is_drawn_again_and_finished_ones_are_loaded(records, tmp_path, monkeypatch):
    monkeypatch.setenv("EVOALIGN_RUN_DIR", str(tmp_path))
    specs = decode.sampled_specs("A0", None, SAMPLED | {"sampled_temperatures": [0.6]}, "smoke")
    ran, write = [], files.replace_bytes

    def cut_short(path, *given, **how):  # after the samples of the second block are drawn, before its record is stored
        if path == decode.texts_file(specs[1]) and len(ran) == 2:
            raise KeyboardInterrupt
        write(path, *given, **how)

    monkeypatch.setattr(files, "replace_bytes", cut_short)
    monkeypatch.setattr(sweep, "_run_all", lambda specs, *rest: (ran.append(s) or run_of(s) for s in specs))
    with pytest.raises(KeyboardInterrupt):
        load_or_run(specs, "nb", "smoke")
    loaded = load_or_run(specs, "nb", "smoke")
    assert ran == [*specs, specs[1]] and [r["texts_sha256"] for r in loaded] == [r["texts_sha256"] for r in records[:2]]


NOT_SAMPLED = [
    *each_named({"sampled_samples": 1}, {"sampled_seed": -1}, {"engine": "vllm"}, {"questions": "my.jsonl"}),
    *each_named({"task": "plain"}),
    ({"sampled_problems": 3000}, "test_problems=3000"),
    ({"sampled_temperatures": [0]}, "temperature=0.0"),
    ({"task": "conciseness"}, "'A0'"),
    ({"sampled_block": ...}, "'sampled_block'"),
]
MEASURES = measures.base.Measures()


@pytest.mark.parametrize(("changed", "named"), NOT_SAMPLED)
def test_what_cannot_be_sampled_is_refused(changed, named, monkeypatch):
    if changed.get("task") == "plain":  # a task whose completions are neither right nor wrong
        monkeypatch.setitem(tasks.TASKS, "plain", "evoalign_lib.tasks.countdown")
        monkeypatch.setitem(sys.modules, "evoalign_study.measures.plain", sys.modules[__name__])
    with pytest.raises(ValueError, match=named):
        decode.sampled_specs("A0", None, {k: v for k, v in (SAMPLED | changed).items() if v is not ...}, "tiny")


def test_an_end_that_is_none_is_refused(place, folder, trained):
    (place / "only a ledger").mkdir()
    for name in ("ledger.jsonl", "config.json"):
        (place / "only a ledger" / name).write_text("{}")
    random_model("llama").save_pretrained(place / "llama")
    for path, error, named in (
        (place / "nowhere", FileNotFoundError, "nowhere"),
        (folder / "config.json", ValueError, "is no ledger"),
        (tiny.bases_folder(), ValueError, r"no config\.json"),
        (place / "only a ledger", ValueError, r"ledger\.jsonl"),
        (place / "llama", ValueError, "'llama'.*'qwen2'"),
    ):
        with pytest.raises(error, match=named):
            decode.sampled_specs("A0", path, SAMPLED, "tiny")
    random_model(vocab_size=100, eos_token_id=1, pad_token_id=0).save_pretrained(place / "few")
    for base, end, named in (("A0", place / "few", "100 tokens"), ("A1", kept_ledger(place, trained), "started from")):
        with pytest.raises(ValueError, match=named):
            kinds.get("sampled")(decode.sampled_specs(base, end, SAMPLED, "tiny")[0])


def test_an_end_that_has_changed_is_refused(folder, place):
    """As one that is gone (`test_measures_conciseness`)."""
    moved = place / "moved"
    shutil.copytree(folder, moved)
    spec = decode.sampled_specs("A0", moved, SAMPLED, "tiny")[0]
    assert spec["end"] == base_models.know_end(folder), "a copy is the same end"
    base_models.know_end(moved)
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps(config | {"rope_theta": 1.0}))
    with pytest.raises(ValueError, match="moved has changed"):
        kinds.get("sampled")(spec)
