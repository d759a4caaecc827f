"""Kinds that decode models: best of n, models of records measured again, and counts of many samples, block by block."""

import json
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from evoalign_study import base_models, kinds, measures, paths, preflight, sweep, weight_cache
from evoalign_study.kinds import decode
from evoalign_study.kinds.decode import (
    base_specs,
    best_of_n_specs,
    decoding_specs,
    measured_spec,
    read_texts,
    sampled_specs,
    texts_file,
)
from evoalign_study.kinds.train import train_specs
from evoalign_study.records import MAX_RECORD, record_line, spec_hash, unpack_counts, unpack_integers
from evoalign_study.sweep import load_or_run
from helpers import random_model, tokenizer

from evoalign_lib import ledger, models, tasks, tiny
from evoalign_lib.engines.local import LocalEngine, Prompts
from evoalign_lib.precision import copy_to

SETTINGS = {
    "max_completion_length": 16, "validation_problems": 6, "test_problems": 10, "steps": 4, "prompts_per_step": 4,
    "curve_points": 4, "curve_spacing": "log", "population_size": 3, "sigma": 0.03, "alpha": 0.01,
    "num_generations": 4, "learning_rate": 1e-3, "beta": 0.0, "prompts": 24, "batch_size": 4, "epochs": 2,
}  # fmt: skip
SAMPLED = {
    "max_completion_length": 16, "sampled_problems": 6, "sampled_block": 4, "sampled_samples": 24,
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
    """Problems, the samples of each as an engine gives them to whoever asks for all at once, and the engine."""
    problems, tok = tiny.problems("test", n), tokenizer()
    prompts = {"test": Prompts(tiny.dataset(problems, tok), tok)}
    engine = LocalEngine(model, tok, None, prompts, max_completion_length=16)
    rows = engine.generate("test", samples=samples, seed=seed, temperature=temperature)
    return problems, list(zip(*rows, strict=True)), engine


def graded(problems, answers):
    return np.array([[MEASURE.right(p, text) for text, _ in row] for p, row in zip(problems, answers, strict=True)])


def test_best_of_n_is_the_share_of_problems_that_n_samples_solve():
    [spec] = best_of_n_specs("A0", [3], 9, SETTINGS | {"test_problems": 40}, "smoke")
    r = run_of(spec)
    problems, answers, engine = drawn(tiny.load("A0")[0], 40, 9, seed=3)
    right = graded(problems, answers)
    assert {n: pytest.approx(right[:, : int(n)].any(1).mean(), abs=1e-6) for n in ("1", "2", "4", "8")} == r[
        "best_of_n"
    ]
    tokens = sum(len(ids) for row in answers for _, ids in row)
    asked = 9 * int(engine.prompts["test"].lengths.sum())
    assert r["budget"]["completions"] == 360 and r["budget"]["generated_tokens"] == tokens
    assert r["budget"]["forward_flops"] == 2 * r["d"] * (tokens + asked)


# ---- records measured again


@pytest.fixture(scope="module")
def trained(place):
    """A run of each trainer; that of ES has its ledger among the committed records."""
    es = train_specs("es", ["A0"], [0], SETTINGS, "tiny")
    [record] = load_or_run(es, "nb", "tiny", workers=1, keep_ledgers=es)
    others = {arm: run_of(train_specs(arm, ["A0"], [0], SETTINGS, "tiny")[0]) for arm in ("grpo", "sft")}
    return {"es": record} | others


def again(record, temperatures=(0.4, 1.0), **arguments):
    [spec] = decoding_specs([record], temperatures, **arguments)
    assert spec_hash(measured_spec(spec)) == spec_hash(record["spec"]) != spec_hash(spec)
    return run_of(spec)


@pytest.mark.parametrize("arm", ["grpo", "sft"])
def test_a_run_is_trained_again_to_the_same_weights(trained, arm, monkeypatch, tmp_path):
    """With another curve than the first time: what is measured at temperature 1 is then what the record has."""
    first, kept = trained[arm], again(trained[arm])
    monkeypatch.setattr(paths, "RUNS", tmp_path)
    second = again(first, **({"curve_temperature": 1.0} if arm == "grpo" else {}))
    assert (kept["made"], second["made"], second["digest"]) == ("kept", "trained again", first["digest"])
    assert (second["test"], second["validation"]) == (kept["test"], kept["validation"])
    assert second["test"].keys() == {"n", "t0.4", "t0.4_counts", "t1", "t1_counts"}
    assert second["test"]["t1_counts"] == first["test"]["t1_counts"] and "validation_at_step" not in second
    assert second["test"]["t0.4"] == pytest.approx(unpack_counts(second["test"]["t0.4_counts"]).mean() / 16, abs=1e-6)
    if arm == "grpo":
        assert second["curve"] == {name: first["curve"][name] for name in ("step", "validation_t1")}
        assert second["validation"]["greedy"] == pytest.approx(first["curve"]["validation_greedy"][-1], abs=1e-5)


def test_a_base_is_loaded():
    [spec] = base_specs(["A0"], SETTINGS, "tiny")
    first = run_of(spec)
    second = again(first)
    assert second["made"] == "loaded" and second["digest"] == spec["base_digest"]
    assert second["test"]["t1_counts"] == first["test"]["t1_counts"]
    assert 1 < np.ptp(unpack_counts(second["validation"]["t0.6_counts"]))
    with pytest.raises(ValueError, match="curve_temperature=0.6"):
        decoding_specs([first], [0.6], curve_temperature=0.6)
    _, answers, _ = drawn(tiny.load("A0")[0], 10, 3, 0.4)
    few = again(first, samples=3)["test"]["t0.4_counts"]
    assert few == "".join(map(str, graded(tiny.problems("test", 10), answers).sum(1)))


def test_a_run_of_es_is_replayed_from_its_ledger_to_any_step(trained, place, monkeypatch, tmp_path):
    first = trained["es"]
    last, before, second = (again(first, at_step=step) for step in (4, 0, 2))
    assert second["made"] == "replayed" and second["test"]["t1_counts"] == first["test"]["t1_counts"]
    assert last["validation_at_step"] == second["validation"] != second["validation_at_step"]
    [base] = base_specs(["A0"], SETTINGS, "tiny")
    assert before["validation_at_step"] == again({"spec": base, "spec_hash": ""})["validation"]
    replayed = again(first, curve_temperature=0.6)
    # who knows nothing of the ledger trains again, and measures the same
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    monkeypatch.setattr(paths, "RUNS", tmp_path)
    anew = again(first, curve_temperature=0.6)
    assert (replayed["made"], anew["made"]) == ("replayed", "trained again")
    assert all(replayed[block] == anew[block] for block in ("curve", "test", "validation"))
    assert again(first, at_step=2)["validation_at_step"] == second["validation_at_step"]


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
    kept = tmp_path / f"results/nb/ledgers/{first['spec_hash']}.jsonl.gz"
    kept.write_bytes(ledger.pack(kept)[:-1])
    with pytest.raises(ValueError, match="restore it from git"):
        again(first)
    file = weight_cache.keep(np.zeros(3, np.float32))
    file.rename(file.with_stem(trained["sft"]["digest"]))
    with pytest.raises(ValueError, match="Remove it"):
        again(trained["sft"])


@pytest.mark.parametrize("base", ["A0", "B0"])
def test_a_run_that_is_sampled_as_it_is_trained_has_what_it_has_measured_again(base):
    """Further temperatures leave no trace in training, nor in what is measured besides."""
    of_task = {"task": "conciseness", "unique_prompts": 2, "noise_draws": 1, "validation_problems": 4}
    changed = {} if base == "A0" else of_task | {"max_completion_length": 24, "curve_points": 3}
    [plain] = train_specs("es", [base], [0], SETTINGS | changed, "smoke")
    [asked] = train_specs("es", [base], [0], SETTINGS | changed | {"sampled_at": [0.6]}, "smoke")
    assert asked == plain | {"sampled_at": [0.6]}
    first, second = (run_of(spec) for spec in (plain, asked))
    later = again(first, [0.6], curve_temperature=0.6)
    assert second["digest"] == first["digest"] and ("validation" in later) == (base == "A0")
    for record in (first, second):
        record["curve"].pop("core_seconds", None)  # a measured time
    for block in ("test", "curve"):
        assert second[block] == first[block] | later[block] != first[block]
    # at temperature 1 it is what the record has
    hot = again(first, [1.0], curve_temperature=1.0)
    assert hot["curve"].items() <= first["curve"].items() and hot["test"].items() <= first["test"].items()


def record_of(**changed):
    spec = train_specs("es", ["A0"], [0], SETTINGS, "tiny")[0] | changed
    return {"spec": spec, "spec_hash": spec_hash(spec), "digest": "0" * 16}


REFUSED = [  # changed spec, arguments, what the error names
    ({"kind": "audit"}, {}, "tiny world"),
    ({"base": "someone/else"}, {}, "tiny world"),
    ({"task": "conciseness"}, {"at_step": 2}, "at_step=2"),
    ({"kind": "base"}, {"at_step": 2}, "at_step=2"),
    ({"arm": "grpo"}, {"at_step": 2}, "at_step=2"),
    ({}, {"at_step": 5}, "at_step=5"),
    ({"test_problems": 0}, {}, "no test set"),
    ({}, {"curve_temperature": 0}, "temperature=0"),
    ({}, {"temperatures": []}, "temperatures="),
    ({}, {"temperatures": [0.4, 0.4]}, "temperatures="),
    ({}, {"temperatures": [0.4, 0]}, "temperature=0"),
    ({}, {"samples": 0}, "samples=0"),
    ({}, {"samples": 17}, "samples=17"),
]


@pytest.mark.parametrize(("changed", "arguments", "named"), REFUSED)
def test_what_is_not_measured_again(changed, arguments, named):
    with pytest.raises(ValueError, match=named):
        decoding_specs([record_of(**changed)], **{"temperatures": [0.4]} | arguments)


def test_a_record_of_the_largest_sets_is_stored(monkeypatch):
    """The longest spec, both validation blocks: below the bytes that a record may have."""
    spec = record_of(scale_rewards="group", unique_prompts=1000, test_problems=2000, validation_problems=512)["spec"]
    validation = {"n": 512, "greedy": 0.123456, "greedy_bits": "f" * 128}
    validation |= {"t0.6": 0.123456, "t0.6_counts": "g" * 512, "t1": 0.123456, "t1_counts": "g" * 512}
    test = {"n": 2000} | {f"t{t}": 0.123456 for t in (0.4, 0.6)} | {f"t{t}_counts": "g" * 2000 for t in (0.4, 0.6)}
    blocks = {"test": test, "validation": validation, "validation_at_step": validation, "made": "trained again"}
    monkeypatch.setattr(decode, "run_decoding", lambda _: blocks | {"digest": "0" * 16})
    [wanted] = decoding_specs([{"spec": spec, "spec_hash": "", "digest": "0" * 16}], [0.4, 0.6], at_step=2)
    assert len(record_line(run_of(wanted))) <= MAX_RECORD


# ---- counts of many samples


def sampled(end=None, **changed):
    return [run_of(spec) for spec in sampled_specs("A0", end, SAMPLED | changed, "tiny")]


def counted(records):
    return np.concatenate([unpack_integers(record["right"]) for record in records]).tolist()


def texts(records):
    return [entry["texts"] for record in records for entry in read_texts(record)]


@pytest.fixture(scope="module")
def records(place):
    return sampled()


def test_counts_are_those_of_direct_grading_and_texts_lie_beside_the_record(records):
    blocks = [(r["spec"]["temperature"], r["spec"]["block"]) for r in records]
    assert blocks == [(t, block) for t in (0.6, 1.0) for block in ([0, 4], [4, 6])]
    for temperature, own in ((0.6, records[:2]), (1.0, records[2:])):
        problems, answers, engine = drawn(tiny.load("A0")[0], 6, 24, temperature)
        assert counted(own) == graded(problems, answers).sum(1).tolist() and sum(counted(own)) > 0
        ids = [tokens for row in answers for _, tokens in row]
        assert sum(r["generated_tokens"] for r in own) == sum(map(len, ids))
        assert sum(r["clipped"] for r in own) == sum(tokens[-1] not in engine.eos_ids for tokens in ids)
        assert sum(r["prompt_tokens"] for r in own) == 24 * engine.prompts["test"].lengths.sum()
        assert texts(own) == [[text for text, _ in row] for row in answers]
    assert counted(records[:2]) != counted(records[2:])
    for record in records:
        line, entries = record_line(record), read_texts(record)
        assert len(line) < 2000 and len(entries) == record["n_problems"]
        assert not any(len(text) > 4 and json.dumps(text)[1:-1] in line for entry in entries for text in entry["texts"])
        assert [sum(entry["right"]) for entry in entries] == unpack_integers(record["right"]).tolist()


def test_counts_do_not_depend_on_blocks_or_on_when_they_are_drawn(records):
    (one,) = sampled(sampled_block=6, sampled_temperatures=[1.0])
    assert counted([one]) == counted(records[2:]) and one["n_problems"] == 6
    assert counted(sampled(sampled_block=6, sampled_seed=1, sampled_temperatures=[1.0])) != counted([one])


@pytest.fixture(scope="module")
def folder(place):
    """An end with weights of another size, and no tokenizer of its own."""
    random_model().save_pretrained(place / "end")
    return place / "end"


def test_ends_answer_with_their_weights_to_the_prompts_of_the_model(folder, place, trained):
    """A model's folder, a ledger, and an adapter over the model."""
    from safetensors.torch import save_file

    replayed, adapted = tiny.load("A0")[0], tiny.load("A0")[0]
    (master,) = weight_cache.of_group(weight_cache.group([trained["es"]]))
    copy_to(replayed, weight_cache.layout_of("A0"), master)
    name, generator = "model.layers.0.mlp.down_proj", torch.Generator().manual_seed(0)
    weight = adapted.get_submodule(name).weight
    a, b = (0.1 * torch.randn(*shape, generator=generator) for shape in ((4, weight.shape[1]), (weight.shape[0], 4)))
    (place / "adapter").mkdir()
    matrices = {f"base_model.model.{name}.lora_{s}.weight": m for s, m in (("A", a), ("B", b))}
    save_file(matrices, place / "adapter" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "base_model_name_or_path": "A0", "r": 4, "lora_alpha": 8}
    (place / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    weight.data += 2 * (b @ a)
    kept = place / f"results/nb/ledgers/{trained['es']['spec_hash']}.jsonl.gz"
    of_folder = models.load(str(folder), tokenizer())[0]
    for end, model in ((folder, of_folder), (kept, replayed), (place / "adapter", adapted)):
        (record,) = sampled(end, sampled_block=6, sampled_temperatures=[1.0])
        _, answers, engine = drawn(model, 6, 24)
        assert texts([record]) == [[text for text, _ in row] for row in answers]
        assert [entry["prompt"] for entry in read_texts(record)] == engine.prompts["test"].prompts
        assert record["spec"]["end"] == base_models.know_end(end) and str(end) not in record_line(record)


def test_texts_that_are_not_those_of_the_record_are_refused(records, monkeypatch, tmp_path):
    before = texts_file(records[1]["spec"]).read_bytes()
    monkeypatch.setenv("EVOALIGN_RUN_DIR", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=records[0]["spec_hash"]):
        read_texts(records[0])
    (tmp_path / "samples").mkdir()
    texts_file(records[0]["spec"]).write_bytes(before)
    with pytest.raises(ValueError, match=records[0]["texts_sha256"][:16]):
        read_texts(records[0])


KILLED = """
import os, signal, sys
from evoalign_lib import files
from evoalign_study import sweep
from evoalign_study.kinds import decode

write, written = files.replace_bytes, []

def killed(path, *given, **how):  # after the samples of the second block are drawn, before its record is stored
    written.append(path)
    if "samples" in str(path) and sum("samples" in str(p) for p in written) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(path, *given, **how)

files.replace_bytes = killed
sweep._run_all = lambda specs, *rest: (sweep.run(spec, "nb", "commit") for spec in specs)
sweep.load_or_run(decode.sampled_specs("A0", None, eval(sys.argv[1]), "smoke"), "nb", "smoke")
"""


def test_a_killed_block_is_drawn_again_and_finished_ones_are_loaded(records, tmp_path, monkeypatch):
    monkeypatch.setenv("EVOALIGN_RUN_DIR", str(tmp_path))
    asked = SAMPLED | {"sampled_temperatures": [0.6]}
    done = subprocess.run([sys.executable, "-c", KILLED, repr(asked)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert (tmp_path / "results" / "smoke.jsonl").read_text().count("\n") == 1
    ran = []
    monkeypatch.setattr(sweep, "_run_all", lambda specs, *rest: (ran.append(s) or run_of(s) for s in specs))
    specs = sampled_specs("A0", None, asked, "smoke")
    loaded = load_or_run(specs, "nb", "smoke")
    assert ran == specs[1:] and [r["texts_sha256"] for r in loaded] == [r["texts_sha256"] for r in records[:2]]


def test_specs_are_what_a_plan_reads(folder, capsys):
    preflight.check(sampled_specs("A0", folder, SAMPLED, "full"), workers=1)
    assert re.search(f"{2 * 6 * 24 * 16:,} (tokens )?generated", capsys.readouterr().out)


NOT_SAMPLED = [
    ({"sampled_samples": 1}, "sampled_samples=1"),
    ({"sampled_samples": 5000}, "sampled_samples=5000"),
    ({"sampled_block": 0}, "sampled_block=0"),
    ({"sampled_problems": 0}, "sampled_problems=0"),
    ({"sampled_problems": 3000}, "test_problems=3000"),
    ({"sampled_temperatures": []}, "sampled_temperatures="),
    ({"sampled_temperatures": [0]}, "temperature=0.0"),
    ({"sampled_seed": -1}, "sampled_seed=-1"),
    ({"engine": "vllm"}, "engine='vllm'"),
    ({"questions": "my.jsonl"}, "questions='my.jsonl'"),
    ({"task": "conciseness"}, "'A0'"),
    ({"task": "plain"}, "task='plain'"),
    ({"sampled_block": ...}, "'sampled_block'"),
]
MEASURES = measures.base.Measures()


@pytest.mark.parametrize(("changed", "named"), NOT_SAMPLED)
def test_what_cannot_be_sampled_is_refused(changed, named, monkeypatch):
    if changed.get("task") == "plain":  # a task whose completions are neither right nor wrong
        monkeypatch.setitem(tasks.TASKS, "plain", "evoalign_lib.tasks.countdown")
        monkeypatch.setitem(sys.modules, "evoalign_study.measures.plain", sys.modules[__name__])
    with pytest.raises(ValueError, match=named):
        sampled_specs("A0", None, {k: v for k, v in (SAMPLED | changed).items() if v is not ...}, "tiny")


def test_an_end_that_is_none_is_refused(place, folder, trained):
    (place / "only a ledger").mkdir()
    (place / "only a ledger" / "ledger.jsonl").touch()
    (place / "only a ledger" / "config.json").write_text("{}")
    random_model("llama").save_pretrained(place / "llama")
    for path, error, named in (
        (place / "nowhere", FileNotFoundError, "nowhere"),
        (folder / "config.json", ValueError, "is no ledger"),
        (tiny.bases_folder(), ValueError, r"no config\.json"),
        (place / "only a ledger", ValueError, r"ledger\.jsonl"),
        (place / "llama", ValueError, "'llama'.*'qwen2'"),
    ):
        with pytest.raises(error, match=named):
            sampled_specs("A0", path, SAMPLED, "tiny")
    random_model(vocab_size=100, eos_token_id=1, pad_token_id=0).save_pretrained(place / "few tokens")
    kept = place / f"results/nb/ledgers/{trained['es']['spec_hash']}.jsonl.gz"
    for base, end, named in (("A0", place / "few tokens", "100 tokens"), ("A1", kept, "started from")):
        with pytest.raises(ValueError, match=named):
            kinds.get("sampled")(sampled_specs(base, end, SAMPLED, "tiny")[0])


def test_an_end_that_has_changed_or_gone_is_refused(folder, place, monkeypatch):
    moved = place / "moved"
    shutil.copytree(folder, moved)
    spec = sampled_specs("A0", moved, SAMPLED, "tiny")[0]
    assert spec["end"] == base_models.know_end(folder), "a copy is the same end"
    base_models.know_end(moved)
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps(config | {"rope_theta": 1.0}))
    with pytest.raises(ValueError, match="moved has changed"):
        kinds.get("sampled")(spec)
    shutil.rmtree(moved)
    with pytest.raises(FileNotFoundError, match="moved is gone"):
        kinds.get("sampled")(spec)
    monkeypatch.setattr(base_models, "_FILES", {})  # as a process that was not told
    with pytest.raises(FileNotFoundError, match=spec["end"]):
        kinds.get("sampled")(spec)
