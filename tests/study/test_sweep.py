"""Parameters, specs and records: what a notebook is told of its mistakes, and that no finished run is ever lost."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from evoalign_study import paths, sweep
from evoalign_study.kinds.decode import base_specs, best_of_n_specs
from evoalign_study.kinds.exact import estimator_specs, kl_specs
from evoalign_study.kinds.train import audit_specs, train_specs
from evoalign_study.records import (
    ENGINE_VERSION,
    append_record,
    read_records,
    spec_hash,
    unpack_bits,
    unpack_counts,
)
from evoalign_study.sweep import load_or_run

from evoalign_lib import models, tiny

needs_bases = pytest.mark.skipif(
    not all((tiny.bases_folder() / base).is_dir() for base in tiny.BASES), reason="the bases have not been trained yet"
)


# ---- records


def record(seed: int = 0, **more):
    spec = {"kind": "train", "scale": "tiny", "seed": seed}
    return {"spec": spec, "spec_hash": spec_hash(spec), "status": "finished", "test": {"greedy": 0.25}} | more


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Committed records and fresh runs, both in a temporary folder."""
    monkeypatch.setattr(paths, "RESULTS", tmp_path / "results")
    monkeypatch.setenv("EVOALIGN_RUN_DIR", str(tmp_path / "run"))
    return tmp_path


def _await(condition, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.01)


# ---- loading and running

SETTINGS = {
    "max_completion_length": 16,
    "validation_problems": 6,
    "test_problems": 10,
    "population_size": 3,
    "sigma": 0.03,
    "alpha": 0.01,
    "steps": 2,
    "prompts_per_step": 24,
    "curve_points": 3,
}


def test_equal_specs_and_foreign_scales_are_refused(folders):
    spec = record(1)["spec"]
    with pytest.raises(ValueError, match="two of the specs are equal"):
        load_or_run([spec, dict(spec)], "nb", "tiny")
    with pytest.raises(ValueError, match="a spec has scale 'tiny', the notebook runs 'full'"):
        load_or_run([spec], "nb", "full")


def test_records_of_every_notebook_are_found(folders, capsys):
    append_record(folders / "results/01_a/tiny.jsonl", record(1))
    append_record(folders / "results/02_b/tiny.jsonl", record(2))
    append_record(folders / "results/02_b/full.jsonl", record(3))
    specs = [record(seed)["spec"] for seed in (2, 1)]
    assert load_or_run(specs, "03_c", "tiny") == [record(2), record(1)]
    assert capsys.readouterr().out == "loaded 2 records, ran 0\n"
    assert load_or_run([], "03_c", "tiny") == []


def test_a_dry_run_names_what_is_missing(folders, capsys):
    append_record(folders / "results/01_a/tiny.jsonl", record(1))
    specs = [record(1)["spec"]]
    missing = [{"kind": "train", "arm": "es", "base": "A0", "scale": "tiny", "seed": seed} for seed in range(30)]
    with pytest.raises(sweep.DryRun, match="1 of 31 runs have records; to be run: es A0 0, .* and 10 more"):
        load_or_run(specs + missing, "nb", "tiny", dry_run=True)
    assert load_or_run(specs, "nb", "tiny", dry_run=True) == [record(1)]


@pytest.mark.parametrize("name", ["results", "run"])
def test_a_folder_that_takes_no_records_is_found_before_any_run(folders, monkeypatch, name):
    (folders / name).write_text("in the way")
    monkeypatch.setattr(sweep, "_run_all", lambda *arguments: pytest.fail("a run began"))
    missing = [{"kind": "train", "arm": "es", "base": "A0", "scale": "tiny", "seed": 0}]
    with pytest.raises(OSError, match="no record can be stored in this folder .*EVOALIGN_RUN_DIR") as error:
        load_or_run(missing, "nb", "tiny", force=name == "run")
    assert error.value.filename.startswith(str(folders / name))


def comparable(r):
    """A record without what a clock decides."""
    budget = {k: v for k, v in r["budget"].items() if "seconds" not in k}
    return {k: v for k, v in r.items() if k not in ("budget", "commit", "notebook")} | {"budget": budget}


@needs_bases
def test_specs_state_what_decides_a_run():
    [base] = base_specs(["A0"], SETTINGS, "smoke")
    assert base["kind"] == "base" and base["engine_version"] == ENGINE_VERSION
    assert base["base_digest"] == models.base_digest(tiny.load("A0")[0]) and len(base["base_digest"]) == 16
    train = train_specs("es", ["A0", "A1"], range(2), SETTINGS, "smoke")
    assert [(s["base"], s["seed"]) for s in train] == [("A0", 0), ("A0", 1), ("A1", 0), ("A1", 1)]
    assert train[0]["base_digest"] != train[2]["base_digest"] and train[0]["steps"] == 2
    assert len({spec_hash(s) for s in [base, *train]}) == 5


FILLED = SETTINGS | {"filler_steps": 16, "max_completion_length": 36}


@needs_bases
def test_specs_of_a_base_that_thinks_name_how_long():
    short, long = FILLED | {"filler_steps": 4}, FILLED
    specs = [
        *base_specs(["H0"], short, "smoke"),
        *base_specs(["H0"], long, "smoke"),
        *train_specs("es", ["H0"], [0], short, "smoke"),
        *train_specs("es", ["H0"], [0], long, "smoke"),
        *best_of_n_specs("H0", [0], 2, long, "smoke"),
        *audit_specs("H0", "kahan", "gaussian", "random", [0], long, "smoke"),
    ]
    assert [s["filler_steps"] for s in specs] == [4, 16, 4, 16, 16, 16] and len(set(map(spec_hash, specs))) == 6


@needs_bases
@pytest.mark.parametrize(
    ("base", "changed", "message"),
    [
        ("A0", {}, "filler_steps=16: base 'A0' has not learned to think for a given length. .* base 'H0'"),
        ("H0", {"filler_steps": None}, r"base 'H0' needs filler_steps, one of \[4, 16, 64\], got None"),
        ("H0", {"filler_steps": 5}, r"one of \[4, 16, 64\], got 5"),
        ("H0", {"max_completion_length": 31}, "=31 cuts off 16 filler steps and their answer: set at least 32"),
    ],
)
def test_filler_steps_that_a_base_cannot_have(base, changed, message):
    settings = FILLED | changed
    for make in (
        lambda: base_specs([base], settings, "smoke"),
        lambda: train_specs("es", [base], [0], settings, "smoke"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


@needs_bases
@pytest.mark.parametrize("base", ["H0", "org/some-model", str(tiny.bases_folder() / "A0")])
def test_kinds_of_plain_tiny_models_refuse_any_other_base(base):
    settings = FILLED | {"estimator_problems": 4, "kl_problems": 4, "kl_samples": 2}
    message = "base '.*' has no runs of kind '{}': they take plain models of the tiny world, one of A0"
    with pytest.raises(ValueError, match=message.format("estimator")):
        estimator_specs(base, 2, 1, "expected", "any", settings, "smoke")
    with pytest.raises(ValueError, match=message.format("kl")):
        kl_specs(base, 0.1, 1, settings, "smoke")


@needs_bases
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"task": "conciseness"}, "base 'A0' was trained for the task 'countdown', not 'conciseness': set task="),
        ({"task": "cuntdown"}, "Did you mean 'countdown'"),
        ({"measure": "strict"}, "measure='strict': task 'countdown' has no such setting"),
        ({"filler_steps": 16}, "filler_steps=16: base 'A0' has not learned to think"),
        ({"engine": "vllm"}, "engine='vllm' is for models of the Hub or of a folder; 'A0' is one of the tiny world's"),
    ],
)
def test_kinds_of_plain_tiny_models_refuse_what_they_would_ignore(changed, message):
    settings = SETTINGS | {"estimator_problems": 4, "kl_problems": 4, "kl_samples": 2}
    makers = (
        lambda s: estimator_specs("A0", 2, 1, "expected", "any", s, "smoke"),
        lambda s: kl_specs("A0", 0.1, 1, s, "smoke"),
    )
    for make in makers:
        assert len(make(settings)) == 1
        with pytest.raises(ValueError, match=message):
            make(settings | changed)


@needs_bases
@pytest.mark.parametrize("arm", ["grpo", *(pytest.param(arm, marks=pytest.mark.slow) for arm in ("es", "sft"))])
def test_training_thinks_as_long_as_the_spec_says(arm):
    """In the training set, where tokens are counted, and in the sets that measure, where formats are kept."""
    gradient = {"learning_rate": 1e-6, "beta": 0.0, "num_generations": 8, "prompts": 24, "batch_size": 8, "epochs": 1}
    settings = FILLED | gradient | {"sigma": 1e-4, "alpha": 1e-4, "prompts_per_step": 8, "test_problems": 40}
    [spec] = train_specs(arm, ["H0"], [0], settings, "smoke")
    r = sweep.run(spec, "nb", "commit")
    spent = r["budget"]
    # 16 letters, then 10 to 15 tokens of an answer
    assert 16 + 10 < spent["generated_tokens"] / spent["completions"] <= 16 + 15
    [base] = base_specs(["H0"], settings, "smoke")
    untrained = sweep.run(base, "nb", "commit")
    assert untrained["validation"]["format"] > 0.99
    assert r["test"]["t1"] == pytest.approx(untrained["test"]["t1"], abs=0.1) and untrained["test"]["t1"] > 0


@needs_bases
def test_the_record_of_a_base():
    [spec] = base_specs(["A0"], SETTINGS | {"validation_problems": 3}, "smoke")
    r = sweep.run(spec, "nb", "commit")
    assert r["status"] == "finished" and r["spec_hash"] == spec_hash(spec) and r["notebook"] == "nb"
    assert set(r["validation"]) == {"greedy", "format", "pass@1", "pass@16", "pass@64"}
    assert r["test"]["n"] == 10 and 0 <= r["test"]["greedy"] <= 1
    assert unpack_bits(r["test"]["greedy_bits"], 10).mean() == pytest.approx(r["test"]["greedy"])
    assert unpack_counts(r["test"]["t1_counts"]).mean() / 16 == pytest.approx(r["test"]["t1"])
    json.dumps(r, allow_nan=False)


@needs_bases
@pytest.mark.parametrize("arm", ["es", "es_shuffled"])
def test_the_record_of_a_training_run(arm):
    one, other = train_specs(arm, ["A0"], [0, 1], SETTINGS, "smoke")
    r, again, different = (sweep.run(spec, "nb", "commit") for spec in (one, one, other))
    assert comparable(r) == comparable(again) and r["digest"] != different["digest"]
    assert r["curve"]["step"] == [0, 1, 2] and r["curve"]["completions"] == [0, 72, 144]
    assert r["curve"]["reward"][0] is None and all(0 <= x <= 1.1 for x in r["curve"]["reward"][1:])
    assert all(len(values) == 3 for values in r["curve"].values())
    assert r["budget"]["completions"] == 144
    tokens = r["budget"]["prompt_tokens"] + r["budget"]["generated_tokens"]
    assert r["budget"]["forward_flops"] == 2 * r["d"] * tokens
    assert r["plan"]["decoder"] == "loop" and r["counts"]["exception"] == 0
    # two steps of alpha * sqrt(d / N) each, at right angles to one another; fewer if a population was tied
    steps = 2 - r["counts"]["tied"]
    assert r["update_norm"] == pytest.approx(0.01 * (r["d"] * steps / 3) ** 0.5, rel=0.1)
    # the base's own weights, before anything moved
    base = sweep.run(base_specs(["A0"], SETTINGS, "smoke")[0], "nb", "commit")
    assert r["curve"]["validation_greedy"][0] == pytest.approx(base["validation"]["greedy"], abs=1e-4)


@needs_bases
def test_the_record_of_an_audit():
    """One change at a time: the float32 master is exact, the other modes lose what they are known to lose."""
    settings = SETTINGS | {"steps": 4, "sigma": 1e-3, "alpha": 5e-4, "curve_points": 2}
    r = {}
    for key in (("master", "gaussian"), ("kahan", "gaussian"), ("inplace", "gaussian"), ("master", "tied")):
        [spec] = audit_specs("A0", *key, "random", [0], settings, "smoke")
        r[key] = sweep.run(spec, "nb", "commit")
        json.dumps(r[key], allow_nan=False)
        assert r[key]["path"]["step"] == [0, 1, 2, 3, 4] and "test" not in r[key]
    exact, pair, released, tied = (record["audit"] for record in r.values())
    assert exact["restore_changed"] == exact["restore_drift"] == 0 and exact["update_cosine"] > 0.9999
    assert 0 < 20 * pair["restore_drift"] < released["restore_drift"]
    assert released["update_cosine"] < 0.9 < 0.99 < pair["update_cosine"]
    ends = [record["path"]["cosine"][-1] for record in r.values()]
    assert ends[0] > 0.9999 and ends[2] < 0.9 < ends[1]
    assert abs(exact["layers_cosine"]) < 0.05 and tied["layers_cosine"] > 0.9999
    # with rewards the trained model is tested, and the noise is that of the arm "es"
    [spec] = audit_specs("A0", "master", "gaussian", "reward", [0], SETTINGS, "smoke")
    rewarded = sweep.run(spec, "nb", "commit")
    assert rewarded["test"]["n"] == SETTINGS["test_problems"] and len(rewarded["curve"]["step"]) == 3
    # members too close together to differ in a token: nothing moves, and there is nothing to compare
    [spec] = audit_specs("A0", "master", "gaussian", "reward", [0], SETTINGS | {"sigma": 1e-12}, "smoke")
    still = sweep.run(spec, "nb", "commit")
    json.dumps(still, allow_nan=False)
    assert (
        still["counts"]["tied"] == SETTINGS["steps"] and not {"update_cosine", "layers_cosine"} & still["audit"].keys()
    )
    assert set(still["path"]["cosine"]) == {None}


SWEEP = """
import json, sys
from evoalign_study.sweep import load_or_run

if __name__ == "__main__":
    load_or_run(json.loads(sys.argv[1]), "nb", "smoke", workers=1)
"""


@needs_bases
def test_a_killed_sweep_continues_where_it_was(folders, capsys):
    specs = base_specs(["A0"], SETTINGS, "smoke") + train_specs("es", ["A0"], range(4), SETTINGS, "smoke")
    script, file = folders / "sweep.py", folders / "run/results/smoke.jsonl"
    script.write_text(textwrap.dedent(SWEEP))
    with subprocess.Popen([sys.executable, script, json.dumps(specs)], stderr=subprocess.DEVNULL) as started:
        _await(lambda: file.is_file() and file.stat().st_size > 0)
        children, workers = _children(started.pid), _workers(started.pid)
        started.kill()
    assert started.returncode == -signal.SIGKILL and len(workers) == 1
    # nobody goes on in the background (Z: ended, not yet reaped)
    _await(lambda: not _alive(children + workers))
    done = read_records(file)
    assert 1 <= len(done) < 5
    # the second call runs the rest; a run that fails is named, and costs none that waits in a process already
    with pytest.raises(ValueError, match="model 'no-such-model' is neither"):
        base_specs(["no-such-model"], SETTINGS, "smoke")  # before any work
    bad = specs[0] | {"base": "no-such-model"}
    capsys.readouterr()
    with pytest.raises(ValueError, match="model 'no-such-model' is neither") as error:
        load_or_run([*specs[:-1], bad, specs[-1]], "nb", "smoke", workers=1)
    assert "in the run {" in error.value.__notes__[-1] and "no-such-model" in error.value.__notes__[-1]
    assert "a run failed (ValueError(" in (err := capsys.readouterr().err) and "; 1 that had begun" in err
    records = read_records(file)
    assert records[: len(done)] == done and [r["spec"] for r in records] == specs
    assert load_or_run(specs[::-1], "nb", "smoke") == records[::-1]
    assert capsys.readouterr().out == "loaded 5 records, ran 0\n" and not (folders / "results").exists()
    # the same run in another process, beside others
    assert comparable(sweep.run(specs[-1], "nb", "commit")) == comparable(records[-1])


@needs_bases
def test_a_run_of_numbers_that_are_not_finite_fails_as_any_run_does():
    """In its own process: the one that stores records would end all others with it."""
    settings = {"max_completion_length": 8, "kl_problems": 2, "kl_samples": 2}
    [spec] = kl_specs("A0", 1e30, 1, settings, "smoke")
    with pytest.raises(ValueError, match="run kl A0 0 has .* not finite: kl.exact_token_mean = nan, .* and 35 more"):
        sweep.run(spec, "nb", "commit")


def _sweep(specs, file, act):
    """Run specs in two processes; `act` gets their ids as soon as one record more is there than before."""
    before = len(read_records(file))

    def wait():
        try:
            _await(lambda: len(read_records(file)) > before)
        finally:  # else the sweep would go on for an hour
            act(_workers(os.getpid()))

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        load_or_run(specs, "nb", "smoke", workers=2)
    finally:
        thread.join()


def _children(pid: int) -> list[int]:
    return [child for child, (parent, _) in _processes().items() if parent == pid]


def _workers(pid: int) -> list[int]:
    """Processes that run specs for this one: copies of its server."""
    servers = [p for p in _children(pid) if b"multiprocessing.forkserver" in Path(f"/proc/{p}/cmdline").read_bytes()]
    return [worker for server in servers for worker in _children(server)]


@needs_bases
def test_an_interrupt_and_a_killed_process_end_a_sweep_at_once_and_cost_no_finished_run(folders, capfd):
    """The first run of each sweep would take an hour."""
    # a shell that starts pytest in the background has interrupts ignored, and its children inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    file, seen = folders / "run/results/smoke.jsonl", []
    [endless] = train_specs("es", ["A0"], [0], SETTINGS | {"steps": 20_000}, "smoke")
    bases = base_specs(["A0", "A1"], SETTINGS, "smoke")

    def interrupt(workers):  # as a terminal does
        seen.extend(workers)
        for pid in (*workers, os.getpid()):
            os.kill(pid, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as interrupted:
        _sweep([endless, bases[0]], file, interrupt)
    assert interrupted.value.__notes__ == ["finished runs are stored: call again for the rest"]
    assert len(seen) == 2 and not _alive(seen)
    (first,) = read_records(file)
    out, err = capfd.readouterr()
    assert "Traceback" not in err and "Loading weights" not in err and "nb:" in err

    def kill(workers):
        seen.extend(workers)
        os.kill(workers[0], signal.SIGKILL)

    with pytest.raises(RuntimeError, match="was killed, perhaps for memory.*finished runs are stored: call again for"):
        _sweep([endless, *bases], file, kill)
    assert len(seen) == 4 and not _alive(seen)
    records = read_records(file)
    assert [r["spec"] for r in records] == bases and records[0] == first
    capfd.readouterr()
    assert load_or_run(bases, "nb", "smoke") == records and capfd.readouterr().out == "loaded 2 records, ran 0\n"


def test_where_the_end_of_this_process_cannot_be_watched_no_server_is_used(monkeypatch):
    def refused(*_):
        raise PermissionError("seccomp")

    assert sweep._server().get_start_method() == "forkserver"
    monkeypatch.setattr(os, "pidfd_open", refused)
    assert sweep._server().get_start_method() == "spawn"


PROBE = """
import json, os, sys
import torch
from evoalign_study import sweep

NAMES = ("OMP_NUM_THREADS", *sweep._INSTRUCTIONS)

def probe(spec, notebook, commit, keep):
    import torch
    found = {name: os.environ.get(name) for name in NAMES} | {"torch": torch.backends.cpu.get_cpu_capability()}
    started = open("/proc/self/environ", "rb").read().decode().split("\\0")  # the server's, of which this is a copy
    from evoalign_lib.engines import _decode_cpu# which imports numba
    from numba import config
    found["numba"] = [config.CPU_NAME, config.CPU_FEATURES]
    return found | {"at the start": {name: any(entry.startswith(f"{name}=") for entry in started) for name in NAMES}}

if __name__ == "__main__":
    own, sweep.run = torch.backends.cpu.get_cpu_capability(), probe
    engine = json.loads(sys.argv[1])
    ((found),) = sweep._run_all([{"kind": "base"} | engine], "nb", 1, {})
    assert torch.backends.cpu.get_cpu_capability() == own
    print(json.dumps(found))
"""


needs_avx2 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="the CPU has no AVX2 to be held to"
)


@pytest.mark.slow
@needs_avx2
def test_runs_of_the_local_engine_compute_with_avx2(tmp_path):
    """As the committed records were made, on a CPU with AVX-512, too; this process keeps what it has."""
    script, answer = tmp_path / "probe.py", tmp_path / "answer.json"
    script.write_text(PROBE)
    environment = {name: value for name, value in os.environ.items() if name not in sweep._INSTRUCTIONS}
    with open(answer, "w") as file:  # a pipe would be open for as long as the server of the sweep is there
        environment |= {"PYTHONPATH": str(paths.ROOT)}
        done = subprocess.run([sys.executable, script, "{}"], env=environment, stdout=file, timeout=250)
    assert done.returncode == 0
    found = json.loads(answer.read_text())
    assert {name: found[name] for name in sweep._INSTRUCTIONS} == sweep._INSTRUCTIONS
    assert found["OMP_NUM_THREADS"] == "1"
    assert found["torch"] == "AVX2" and all(found["at the start"].values())
    assert found["numba"] == ["haswell", "+avx2"]


@needs_avx2
@pytest.mark.parametrize(
    ("engine", "given", "expected"),
    [
        ({}, {}, sweep._INSTRUCTIONS),
        ({}, {"ATEN_CPU_CAPABILITY": "default"}, sweep._INSTRUCTIONS | {"ATEN_CPU_CAPABILITY": "default"}),
        ({"engine": "vllm"}, {}, dict.fromkeys(sweep._INSTRUCTIONS)),
    ],
)
def test_the_user_and_other_engines_choose_their_own_instructions(monkeypatch, engine, given, expected):
    for name in ("OMP_NUM_THREADS", *sweep._INSTRUCTIONS):
        monkeypatch.setenv(name, "")  # put back afterwards
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    sweep._set_environment(local=not engine)
    assert {name: os.environ.get(name) for name in sweep._INSTRUCTIONS} == expected
    assert os.environ["OMP_NUM_THREADS"] == "1"


def _alive(pids) -> list[int]:
    processes = _processes()
    return [pid for pid in pids if processes.get(pid, (0, "Z"))[1] != "Z"]


def _processes() -> dict[int, tuple[int, str]]:
    """Process id -> (parent, state) of every process."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        found[int(folder.name)] = (int(parent), state)
    return found


@needs_bases
def test_a_missing_run_is_stored_by_the_notebook_that_asks_and_force_looks_elsewhere(folders, capsys):
    specs = base_specs(["A0", "A1"], SETTINGS, "tiny")
    committed = sweep.run(specs[0], "01_a", "commit")
    files = [folders / f"results/{name}/tiny.jsonl" for name in ("01_a", "02_b")]
    append_record(files[0], committed)
    records = load_or_run(specs, "02_b", "tiny")
    assert capsys.readouterr().out == "loaded 1 records, ran 1\n"
    assert records[0] == committed and records[1]["notebook"] == "02_b"
    assert [read_records(file) for file in files] == [[committed], [records[1]]]
    before = [file.read_bytes() for file in files]
    # what a forced run made earlier, beside the committed records
    fresh = [r | {"commit": "fresh"} for r in records]
    for r in fresh:
        append_record(folders / "run/results/tiny.jsonl", r)
    assert load_or_run(specs, "02_b", "tiny", force=True) == fresh
    assert capsys.readouterr().out == (
        "loaded 2 records, ran 0\n"
        "beside committed records: 2 of 2 have the same spec; test accuracy differs by at most 0.00 points\n"
    )
    assert [file.read_bytes() for file in files] == before
    with pytest.raises(sweep.DryRun, match="0 of 1 runs have records"):
        load_or_run(base_specs(["A2"], SETTINGS, "tiny"), "02_b", "tiny", force=True, dry_run=True)


NOTEBOOK = """#!/bin/sh
test ! -e killed || exit 1
found=loaded
test -e "$EVOALIGN_RUN_DIR/results" || found=trained
mkdir -p "$EVOALIGN_RUN_DIR/results"
echo "records $found"
"""


def test_a_forced_reproduction_goes_on_after_a_kill_and_begins_anew_after_its_end(tmp_path):
    """The Makefile's own rule; the commands that it calls only note whether there were records."""
    for name in ("notebooks", "paper", "bin", ".venv/bin"):
        (tmp_path / name).mkdir(parents=True)
    installed = ("pyproject.toml", "notebooks/pyproject.toml", "constraints.txt", ".venv/.installed")
    for name in ("notebooks/01_a.ipynb", *installed):
        (tmp_path / name).touch()
    shutil.copy(paths.ROOT / "Makefile", tmp_path)
    for name, text in (
        (".venv/bin/papermill", NOTEBOOK),
        (".venv/bin/python", "#!/bin/sh"),
        ("bin/latexmk", "#!/bin/sh"),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def reproduce(*arguments):
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        command = ["make", "-C", tmp_path, "reproduce", *arguments]
        done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True)
        return done.returncode == 0, [line for line in done.stdout.splitlines() if line.startswith("records")]

    assert reproduce("FORCE=1") == (True, ["records trained"])
    (tmp_path / "killed").touch()
    assert reproduce("FORCE=1") == (False, [])  # it has begun anew
    (tmp_path / "killed").unlink()
    (tmp_path / "runs/reproduce/results").mkdir()  # and stored something
    assert reproduce("FORCE=1") == (True, ["records loaded"])
    assert reproduce("FORCE=1") == (True, ["records trained"])
    (tmp_path / "bin/latexmk").write_text("#!/bin/sh\nexit 1")  # no reason to train again
    assert reproduce("FORCE=1") == (False, ["records trained"])
    assert reproduce("FORCE=1") == (False, ["records loaded"])


def test_comparison_with_committed_records():
    def made(seed, digest, greedy):
        return record(seed, digest=digest, test={"greedy": greedy, "t1": 0.5})

    committed = {
        r["spec_hash"]: r for r in (made(1, "a", 0.25), made(2, "b", 0.25), record(3, test={"greedy": 0, "t1": 0}))
    }
    assert sweep.compare([made(1, "a", 0.25), made(2, "c", 0.24), made(9, "d", 0.9)], committed) == (
        "beside committed records: 2 of 3 have the same spec; final weights have the same bits in 1 of 2; "
        "test accuracy differs by at most 1.00 points"
    )
    assert sweep.compare([made(9, "d", 0.9)], committed) == ("beside committed records: 0 of 1 have the same spec")
    again, then = (record(4, test={"n": 64, "t0.6": share, "t0.6_counts": "ff"}) for share in (0.5, 0.52))
    assert sweep.compare([again], {then["spec_hash"]: then}) == (
        "beside committed records: 1 of 1 have the same spec; test accuracy differs by at most 2.00 points"
    )
