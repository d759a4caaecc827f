"""Counts of many samples, block by block: those of direct grading, whatever the blocks, kills and places of the ends;
and what a dry run says of them before anything is drawn."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from math import ceil

import numpy as np
import pytest
from evoalign_study import base_models, measures, paths, preflight, sweep, weight_cache
from evoalign_study.kinds import decode as sampled
from evoalign_study.kinds.decode import read_texts, sampled_specs, texts_file
from evoalign_study.kinds.train import train_specs
from evoalign_study.preflight import DoesNotFit
from evoalign_study.records import record_line, spec_hash, unpack_integers
from helpers import qwen, random_model, tokenizer

from evoalign_lib import models, tasks, tiny
from evoalign_lib.engines.local import LocalEngine, Prompts
from evoalign_lib.engines.memory import kv_bytes, shape
from evoalign_lib.precision import copy_to
from evoalign_lib.tasks import countdown

SETTINGS = {
    "max_completion_length": 16, "sampled_problems": 6, "sampled_block": 4, "sampled_samples": 24,
    "sampled_temperatures": [0.6, 1.0],
}  # fmt: skip
MEASURE = measures.get("countdown")
pytestmark = pytest.mark.skipif(not (tiny.bases_folder() / "A0").is_dir(), reason="the bases have not been trained")


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory):
    """A run folder of the file's own; returns where ends are made."""
    made = tmp_path_factory.mktemp("sampled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVOALIGN_RUN_DIR", str(made / "run"))
        patch.setattr(paths, "RUNS", made / "runs")
        yield made


@pytest.fixture(scope="module")
def folder(place):
    """An end with weights of another size, and no tokenizer of its own."""
    random_model().save_pretrained(place / "end")
    return place / "end"


@pytest.fixture(scope="module")
def ledger(place):
    """The ledger of a short run of ES on A0."""
    settings = {"validation_problems": 4, "test_problems": 4, "steps": 2, "prompts_per_step": 4, "curve_points": 2}
    settings |= {"max_completion_length": 16, "population_size": 3, "sigma": 0.05, "alpha": 0.2}
    (spec,) = train_specs("es", ["A0"], [0], settings, "tiny")
    record = sweep.run(spec, "nb", "commit", place / "ledger.jsonl.gz")
    return place / "ledger.jsonl.gz", weight_cache.kept(record["digest"])


def run_all(end=None, **changed):
    return [sweep.run(spec, "nb", "commit") for spec in sampled_specs("A0", end, SETTINGS | changed, "tiny")]


@pytest.fixture(scope="module")
def records():
    return run_all()


def drawn(model, temperature):
    """Problems, and the samples of each, as an engine gives them to whoever asks for all at once."""
    problems, tok = tiny.problems("test", 6), tokenizer()
    prompts = {"test": Prompts(tiny.dataset(problems, tok), tok)}
    with closing(LocalEngine(model, tok, None, prompts, max_completion_length=16)) as engine:
        rows = engine.generate("test", samples=24, seed=0, temperature=temperature)
        return problems, list(zip(*rows, strict=True)), engine


def graded(problems, answers):
    return [sum(MEASURE.right(p, text) for text, _ in row) for p, row in zip(problems, answers, strict=True)]


def counted(records):
    return np.concatenate([unpack_integers(record["right"]) for record in records]).tolist()


def test_counts_are_those_of_direct_grading(records):
    assert [(r["spec"]["temperature"], r["spec"]["block"]) for r in records] == [
        (t, block) for t in (0.6, 1.0) for block in ([0, 4], [4, 6])
    ]
    for temperature, own in ((0.6, records[:2]), (1.0, records[2:])):
        problems, answers, engine = drawn(tiny.load("A0")[0], temperature)
        assert counted(own) == graded(problems, answers) and sum(counted(own)) > 0
        ids = [found for row in answers for _, found in row]
        assert sum(r["generated_tokens"] for r in own) == sum(map(len, ids))
        assert sum(r["clipped"] for r in own) == sum(found[-1] not in engine.eos_ids for found in ids)
        assert sum(r["prompt_tokens"] for r in own) == 24 * engine.prompts["test"].lengths.sum()
        texts = [entry["texts"] for r in own for entry in read_texts(r)]
        assert texts == [[text for text, _ in row] for row in answers]
    assert counted(records[:2]) != counted(records[2:])


def test_counts_do_not_depend_on_blocks_or_on_when_they_are_drawn(records):
    one = run_all(sampled_block=6, sampled_temperatures=[1.0])
    assert counted(one) == counted(records[2:]) and one[0]["n_problems"] == 6
    last = sampled_specs("A0", None, SETTINGS, "tiny")[-1]
    again = sweep.run(last, "nb", "commit")
    assert {k: v for k, v in again.items() if k != "budget"} == {k: v for k, v in records[-1].items() if k != "budget"}
    other = run_all(sampled_seed=1, sampled_temperatures=[1.0])
    assert counted(other) != counted(one)


def test_a_folder_answers_with_its_weights_to_the_prompts_of_the_model(folder):
    (record,) = run_all(folder, sampled_block=6, sampled_temperatures=[1.0])
    _, answers, engine = drawn(models.load(str(folder), tokenizer())[0], 1.0)
    assert [entry["texts"] for entry in read_texts(record)] == [[text for text, _ in row] for row in answers]
    assert [entry["prompt"] for entry in read_texts(record)] == engine.prompts["test"].prompts
    assert record["spec"]["base_digest"] == base_models.base_digest("A0")
    assert record["spec"]["end"] == base_models.know_end(folder) and str(folder) not in record_line(record)


def test_a_ledger_answers_with_the_weights_of_its_run(ledger, records):
    path, master = ledger
    (record,) = run_all(path, sampled_block=6, sampled_temperatures=[1.0])
    model = tiny.load("A0")[0]
    copy_to(model, weight_cache.layout_of("A0"), master)
    problems, answers, _ = drawn(model, 1.0)
    assert counted([record]) == graded(problems, answers)
    assert [e["texts"] for e in read_texts(record)] != [e["texts"] for r in records[2:] for e in read_texts(r)]


def test_an_adapter_answers_with_the_weights_of_base_and_product(place):
    from safetensors.torch import save_file

    model, name = tiny.load("A0")[0], "model.layers.0.mlp.down_proj"
    generator = torch_generator()
    weight = model.get_submodule(name).weight
    a, b = (generator(4, weight.shape[1]), generator(weight.shape[0], 4))
    adapter = place / "adapter"
    adapter.mkdir()
    save_file({f"base_model.model.{name}.lora_{s}.weight": m for s, m in (("A", a), ("B", b))},
              adapter / "adapter_model.safetensors")  # fmt: skip
    settings = {"peft_type": "LORA", "base_model_name_or_path": "A0", "r": 4, "lora_alpha": 8}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    (record,) = run_all(adapter, sampled_block=6, sampled_temperatures=[1.0])
    weight.data += 2 * (b @ a)
    _, answers, _ = drawn(model, 1.0)
    assert [entry["texts"] for entry in read_texts(record)] == [[text for text, _ in row] for row in answers]


def torch_generator():
    import torch

    seeded = torch.Generator().manual_seed(0)
    return lambda *shape: 0.1 * torch.randn(*shape, generator=seeded)


# ---- texts


def test_texts_lie_in_runs_and_never_in_a_record(records):
    for record in records:
        path = texts_file(record["spec"])
        assert path.name == f"{spec_hash(record['spec'])}.jsonl.gz" and "run/samples" in path.as_posix()
        line, entries = record_line(record), read_texts(record)
        assert len(line) < 2000 and len(entries) == record["n_problems"]
        assert not any(len(text) > 4 and json.dumps(text)[1:-1] in line for entry in entries for text in entry["texts"])
        assert [sum(entry["right"]) for entry in entries] == unpack_integers(record["right"]).tolist()


def test_texts_that_are_not_those_of_the_record_are_refused(records, monkeypatch, tmp_path):
    monkeypatch.setenv("EVOALIGN_RUN_DIR", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="texts stay on the machine that drew them"):
        read_texts(records[0])
    with pytest.raises(ValueError, match="the samples were drawn again"):
        sampled._write_texts(records[0]["spec"], ["{}"])
        read_texts(records[0])


# ---- a kill

KILLED = """
import os, signal, sys
from evoalign_study import sweep
from evoalign_study.kinds import decode as sampled

settings, kill = eval(sys.argv[1]), int(sys.argv[2])
write, written = sampled._write_texts, []

def killed(spec, lines):  # after the samples of a block are drawn, before its record is stored
    written.append(spec)
    if len(written) == kill:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(spec, lines)

sampled._write_texts = killed
sweep._run_all = lambda specs, *rest: (sweep.run(spec, "nb", "commit") for spec in specs)
sweep.load_or_run(sampled.sampled_specs("A0", None, settings, "smoke"), "nb", "smoke")
"""


def test_a_killed_block_is_drawn_again_and_finished_ones_are_loaded(records, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("EVOALIGN_RUN_DIR", str(tmp_path))
    command = [sys.executable, "-c", KILLED, repr(SETTINGS), "3"]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    stored = (tmp_path / "results" / "smoke.jsonl").read_text()
    assert stored.count("\n") == 2 and len(list((tmp_path / "samples").glob("*"))) == 2
    ran = []

    def in_this_process(specs, *rest):
        for spec in specs:
            ran.append(spec)
            yield sweep.run(spec, "nb", "commit")

    monkeypatch.setattr(sweep, "_run_all", in_this_process)
    specs = sampled_specs("A0", None, SETTINGS, "smoke")
    found = sweep.load_or_run(specs, "nb", "smoke")
    assert ran == specs[2:] and "loaded 2 records, ran 2" in capsys.readouterr().out
    assert (tmp_path / "results" / "smoke.jsonl").read_text().startswith(stored)
    assert [r["texts_sha256"] for r in found] == [r["texts_sha256"] for r in records]


# ---- refusals


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sampled_samples": 1}, "sampled_samples=1 must be a whole number from 2 to 4095"),
        ({"sampled_samples": 5000}, "sampled_samples=5000"),
        ({"sampled_block": 0}, "sampled_block=0 must be a whole number from 1 to 2000"),
        ({"sampled_problems": 0}, "sampled_problems=0"),
        ({"sampled_problems": 3000}, "the test set has 2000"),
        ({"sampled_temperatures": []}, r"sampled_temperatures=\[\]: give temperatures, each once"),
        ({"sampled_temperatures": [0]}, "temperature=0.0 must be above 0"),
        ({"sampled_seed": -1}, "sampled_seed=-1"),
        ({"engine": "vllm"}, "'A0' is one of the tiny world's"),
        ({"questions": "my.jsonl"}, "task 'countdown' has no such setting"),
        ({"task": "conciseness"}, "'A0' was trained for the task 'countdown'"),
    ],
)
def test_what_cannot_be_sampled_is_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        sampled_specs("A0", None, SETTINGS | changed, "tiny")


def test_a_missing_setting_and_a_task_without_right_answers_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="sampling a model needs the setting 'sampled_block'"):
        sampled_specs("A0", None, {k: v for k, v in SETTINGS.items() if k != "sampled_block"}, "tiny")
    monkeypatch.setitem(tasks.TASKS, "plain", "evoalign_lib.tasks.countdown")
    monkeypatch.setitem(sys.modules, "evoalign_study.measures.plain", sys.modules[__name__])
    with pytest.raises(ValueError, match="task='plain': its completions are neither right nor wrong"):
        sampled_specs("A0", None, SETTINGS | {"task": "plain"}, "tiny")


MEASURES = measures.base.Measures()


def test_every_task_with_right_answers_is_sampled():
    (spec,) = sampled_specs("B0", None, SETTINGS | {"task": "conciseness", "sampled_temperatures": [1.0],
                                                    "sampled_block": 6}, "tiny")  # fmt: skip
    record = sweep.run(spec, "nb", "commit")
    measure = measures.get("conciseness")
    problems = measure.sets(spec)["test"]
    texts = [entry["texts"] for entry in read_texts(record)]
    expected = [sum(measure.right(p, t) for t in of) for p, of in zip(problems, texts, strict=True)]
    assert counted([record]) == expected and len(problems) == 6


def test_an_end_that_is_none_is_refused(place, folder):
    for path, error, message in (
        (place / "nowhere", FileNotFoundError, "nowhere' does not exist: give the path"),
        (folder / "config.json", ValueError, "config.json' is no ledger"),
        (tiny.bases_folder(), ValueError, r"has no config\.json: give the folder of a model"),
    ):
        with pytest.raises(error, match=message):
            sampled_specs("A0", path, SETTINGS, "tiny")
    run_folder = place / "only a ledger"
    run_folder.mkdir()
    (run_folder / "ledger.jsonl").touch()
    (run_folder / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds no model, but a ledger: give its ledger\.jsonl"):
        base_models.know_end(run_folder)
    random_model("llama").save_pretrained(place / "llama")
    with pytest.raises(ValueError, match="of type 'llama', model 'A0' of 'qwen2'.*Give the model that it started from"):
        sampled_specs("A0", place / "llama", SETTINGS, "tiny")
    random_model(vocab_size=100, eos_token_id=1, pad_token_id=0).save_pretrained(place / "few tokens")
    with pytest.raises(ValueError, match="knows 100 tokens: it is no end of training from that model"):
        sampled.run(sampled_specs("A0", place / "few tokens", SETTINGS, "tiny")[0])


def test_a_ledger_of_another_model_is_refused(ledger):
    with pytest.raises(ValueError, match="not the weights that the run started from"):
        sampled.run(sampled_specs("A1", ledger[0], SETTINGS, "tiny")[0])


def test_an_end_that_has_changed_or_gone_is_refused(folder, place, monkeypatch):
    moved = place / "moved"
    shutil.copytree(folder, moved)
    spec = sampled_specs("A0", moved, SETTINGS, "tiny")[0]
    assert spec["end"] == base_models.know_end(folder), "a copy is the same end"
    base_models.know_end(moved)
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps(config | {"rope_theta": 1.0}))
    with pytest.raises(ValueError, match="moved has changed: .* Restore the end of training, or make the specs again"):
        sampled.run(spec)
    (moved / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"moved' has no \*\.safetensors"):
        sampled.run(spec)
    shutil.rmtree(moved)
    with pytest.raises(FileNotFoundError, match="moved is gone. Make the specs again with the path of the end"):
        sampled.run(spec)
    known = base_models.known_files()
    monkeypatch.setattr(base_models, "_FILES", {})  # as a process that was not told
    with pytest.raises(FileNotFoundError, match="this process was not told where it is"):
        base_models.end_of(spec["end"])
    base_models.know_files(known | {spec["end"]: str(folder)})
    assert base_models.end_of(spec["end"]) == folder.resolve()


# ---- a dry run

FULL = {"kind": "sampled", "task": "countdown", "scale": "full", "samples": 512, "max_completion_length": 1024}


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """No GPU, 64 GiB, no records; returns a function that makes specs of a model of which there is the config alone."""
    monkeypatch.setattr(paths, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(preflight, "_visible_gpus", lambda: (0, 0.0))
    monkeypatch.setattr(preflight, "_host_gib", lambda: 64.0)

    def specs(size, blocks=((0, 128), (128, 256)), temperatures=(0.6, 1.0), **changed):
        folder = tmp_path / size
        folder.mkdir(exist_ok=True)
        kind = {"model_type": changed.pop("model_type")} if "model_type" in changed else {}
        (folder / "config.json").write_text(json.dumps(qwen(size, **kind)))
        common = FULL | {"base": str(folder), "seed": 0} | changed
        return [common | {"temperature": t, "block": list(block)} for t in temperatures for block in blocks]

    return specs


def dry_run(specs, **options):
    with pytest.raises(sweep.DryRun, match=f"0 of {len(specs)} runs have records"):
        sweep.load_or_run(specs, "nb", "full", dry_run=True, **options)


def by_hand(size, rows, batches, length, prompts, runs):
    """Hours on one GPU: 1.5 TB/s, 150 TFLOP/s, 10 ms a step, 2 minutes a start; 2 bytes a weight."""
    model = shape(qwen(size))
    read = (2 * model.d + rows * (150 + length / 2) * kv_bytes(model)) / 1.5e12
    step = 0.01 + max(read, 2 * model.d * rows / 150e12)
    return runs * (120 + batches * length * step + prompts * 150 * 2 * model.d / 150e12) / 3600


def hours(out):
    found = re.findall(r"^hours +at most ([\d.,]+), ([\d.,]+) at", out, re.M)
    return [tuple(float(text.replace(",", "")) for text in both) for both in found]


def test_a_dry_run_says_tokens_and_hours_of_each_model_and_of_all(elsewhere, capsys, folder):
    gpu = {"engine": "vllm"}
    model = elsewhere("7B", **gpu)
    end = elsewhere("7B", temperatures=[1.0], end=base_models.know_end(folder), **gpu)
    dry_run([*model, *end])
    out = capsys.readouterr().out
    assert "no GPU is visible here: plans assume GPUs of 80 GiB" in out
    assert f"end {folder.resolve()}: runs 2 of up to 128 problems, samples of each 512, temperatures 1" in out
    completions = 2 * 256 * 512
    assert f"completions  {completions:,}\n" in out and f"completions  {completions // 2:,}\n" in out
    all_of_it = (
        f"at most {completions * 3 // 2 * 1024:,} generated, {completions * 3 // 4 * 1024:,} at the assumed mean"
    )
    assert f"tokens       {all_of_it} length, {completions * 3 // 2 * 150:,} of prompts" in out
    assert "sampling in all: 6 runs, 1 at once" in out
    of_model, of_end, total = hours(out)
    most, mean = (by_hand("7B", 256, 128 * 512 // 256, length, 128, 4) for length in (1024, 512))
    assert of_model == (pytest.approx(most, abs=0.006), pytest.approx(mean, abs=0.006))
    assert total == pytest.approx(np.add(of_model, of_end), abs=0.011)
    # the end is the small one that lies in the folder: its start takes nearly all of it
    assert of_end[0] < 2 * (120 + 256 * 1024 * 0.0101) / 3600 + 0.01
    # the memory of an engine with its master: 6 bytes a parameter, which is most of an 80 GiB GPU
    assert re.search(r"14\.2  working copy, bfloat16\n.* 28\.4  master, float32", out)


def test_a_dry_run_on_cores_counts_the_draws_of_a_block(elsewhere, capsys):
    dry_run(elsewhere("0.5B", blocks=[(0, 300)], temperatures=[1.0]), workers=2)
    out = capsys.readouterr().out
    assert "CPU cores, runs at once 1: no GPU is used" in out
    model, batches = shape(qwen("0.5B")), 512 * ceil(300 / 256)
    step = 0.001 + 2 * model.d * 256 / 2e10
    by_cores = (5 + batches * 1024 * step + 512 * 300 * 150 * 2 * model.d / 2e10) / 3600
    assert hours(out)[0][0] == pytest.approx(by_cores, rel=1e-4)


def test_several_engines_share_the_problems_of_a_block(elsewhere, capsys):
    dry_run(elsewhere("7B", blocks=[(0, 1024)], temperatures=[1.0], engine="ray", gpus=4))
    out = capsys.readouterr().out
    assert "4 GPUs of 80 GiB: engines 4, tensor parallel 1" in out
    assert hours(out)[0][0] == pytest.approx(by_hand("7B", 256, 512, 1024, 256, 1), rel=1e-3)


@pytest.mark.parametrize("dry", [True, False])
def test_what_cannot_fit_is_refused_with_its_tokens_and_hours_printed(elsewhere, capsys, monkeypatch, dry):
    monkeypatch.setattr(sweep, "_run_all", lambda *arguments: pytest.fail("a run began"))
    with pytest.raises(DoesNotFit, match="436 GB for the float32 master .* Take 8 GPUs"):
        sweep.load_or_run(elsewhere("72B", engine="vllm"), "nb", "full", dry_run=dry)
    out = capsys.readouterr().out
    assert "DOES NOT FIT" in out and "sampling in all: 4 runs" in out
    with pytest.raises(DoesNotFit, match=r"this machine has 64\.0 GiB"):
        sweep.load_or_run(elsewhere("14B"), "nb", "full", dry_run=dry)


def test_a_model_that_cannot_be_counted_has_tokens_without_hours(elsewhere, capsys):
    dry_run(elsewhere("0.5B", engine="vllm", model_type="gpt2"))
    out = capsys.readouterr().out
    assert "neither memory nor hours of" in out and "model type 'gpt2' cannot be counted" in out
    assert f"at most {2 * 256 * 512 * 1024:,} generated" in out
    assert "hours        at most 0.00, 0.00" in out and "without the models that cannot be counted" in out


def test_specs_are_what_a_plan_reads(folder, capsys):
    """Settings keep their names on the way from a notebook into a plan."""
    specs = sampled_specs("A0", folder, SETTINGS, "full")
    preflight.check(specs, workers=1)
    out = capsys.readouterr().out
    assert "sampling in all: 4 runs, 1 at once" in out and f"at most {2 * 6 * 24 * 16:,} generated" in out
    assert countdown.PUBLIC_TRAIN == 200 and "parameters   0.02 M" in out
