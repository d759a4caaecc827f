"""Load or run: no finished run is ever lost, nothing is run twice or in vain, and ledgers stay with their records."""

import gzip
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest
import torch
from evoalign_study import measures, paths, progress_bar, sweep, training
from evoalign_study.kinds.decode import base_specs
from evoalign_study.kinds.exact import kl_specs
from evoalign_study.kinds.train import audit_specs, train_specs
from evoalign_study.records import append_record, index_problems, ledger_file, read_records, record_files, spec_hash
from evoalign_study.sweep import load_or_run
from helpers import SMALL_RUN, typed
from test_records import contents, record

from evoalign_lib import ledger
from evoalign_lib.cli import app


def at(patch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Committed records and fresh runs, both in this folder."""
    patch.setattr(paths, "RESULTS", folder / "results")
    patch.setenv("EVOALIGN_RUN_DIR", str(folder / "run"))
    return folder


@pytest.fixture
def folders(tmp_path, monkeypatch):
    return at(monkeypatch, tmp_path)


def run_here(specs, notebook, workers, keep):
    """Stands for `sweep._run_all`: the specs run in this process, which is faster."""
    return (sweep.run(spec, notebook, "commit", keep.get(spec_hash(spec))) for spec in specs)


def _await(condition, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.01)


# ---- loading and running

SETTINGS = SMALL_RUN | {"prompts_per_step": 24}


def test_equal_specs_and_foreign_scales_are_refused(folders):
    spec = record(1)["spec"]
    for specs, scale, named in (([spec, dict(spec)], "tiny", "equal"), ([spec], "full", "'tiny'.*'full'")):
        with pytest.raises(ValueError, match=named):
            load_or_run(specs, "nb", scale)


def test_a_dry_run_names_what_is_missing(folders, capsys):
    append_record(folders / "results/01_a/tiny.jsonl", record(1))
    specs = [record(1)["spec"]]
    missing = [{"kind": "train", "arm": "es", "base": "A0", "scale": "tiny", "seed": seed} for seed in range(30)]
    with pytest.raises(sweep.DryRun, match="1 of 31 .*es A0 0, .* 10 more"):
        load_or_run(specs + missing, "nb", "tiny", dry_run=True)
    assert load_or_run(specs, "nb", "tiny", dry_run=True) == [record(1)]


@pytest.mark.parametrize("name", ["results", "run"])
def test_a_folder_that_takes_no_records_is_found_before_any_run(folders, monkeypatch, name):
    (folders / name).write_text("in the way")
    monkeypatch.setattr(sweep, "_run_all", lambda *arguments: pytest.fail("a run began"))
    missing = [{"kind": "train", "arm": "es", "base": "A0", "scale": "tiny", "seed": 0}]
    with pytest.raises(OSError, match="EVOALIGN_RUN_DIR") as error:
        load_or_run(missing, "nb", "tiny", force=name == "run")
    assert error.value.filename.startswith(str(folders / name))


def comparable(r):
    """A record without what a clock decides."""
    budget = {k: v for k, v in r["budget"].items() if "seconds" not in k}
    return {k: v for k, v in r.items() if k not in ("budget", "commit", "notebook")} | {"budget": budget}


def test_the_record_of_an_audit():
    """One change at a time: the float32 master is exact, the other modes lose what they are known to lose."""

    def audit(*mode, **changed):
        [spec] = audit_specs("A0", *mode, [0], SETTINGS | changed, "smoke", largest=60)
        made = sweep.run(spec, "nb", "commit")
        json.dumps(made, allow_nan=False)
        return made

    modes = (("master", "gaussian"), ("kahan", "gaussian"), ("inplace", "gaussian"), ("master", "tied"))
    runs = [audit(*mode, "random", steps=4, sigma=1e-3, alpha=5e-4, curve_points=2) for mode in modes]
    assert all(r["path"]["step"] == [0, 1, 2, 3, 4] and "test" not in r for r in runs)
    exact, pair, released, tied = (r["audit"] for r in runs)
    assert exact["restore_changed"] == exact["restore_drift"] == 0 and exact["update_cosine"] > 0.9999
    assert 0 < 20 * pair["restore_drift"] < released["restore_drift"]
    assert released["update_cosine"] < 0.9 < 0.99 < pair["update_cosine"]
    ends = [r["path"]["cosine"][-1] for r in runs]
    assert ends[0] > 0.9999 and ends[2] < 0.9 < ends[1]
    assert abs(exact["layers_cosine"]) < 0.05 and tied["layers_cosine"] > 0.9999
    assert exact["vectors"] == pytest.approx(576 / 140_928, rel=1e-3) and exact["largest_in_vectors"] < 0.1
    # with rewards the trained model is tested, and the noise is that of the arm "es"
    rewarded = audit("master", "gaussian", "reward")
    assert rewarded["test"]["n"] == SETTINGS["test_problems"] and len(rewarded["curve"]["step"]) == 3
    # members too close together to differ in a token: nothing moves, and there is nothing to compare
    still = audit("master", "gaussian", "reward", sigma=1e-12)
    assert still["counts"]["tied"] == SETTINGS["steps"] and "update_cosine" not in still["audit"]
    assert set(still["path"]["cosine"]) == {None}


@pytest.mark.slow
def test_a_killed_sweep_continues_where_it_was(folders, capsys):
    specs = base_specs(["A0"], SETTINGS, "smoke") + train_specs("es", ["A0"], range(4), SETTINGS, "smoke")
    file = folders / "run/results/smoke.jsonl"
    code = f"from evoalign_study.sweep import load_or_run\nload_or_run({specs!r}, 'nb', 'smoke', workers=1)"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as started:
        _await(lambda: file.is_file() and file.stat().st_size > 0)
        children, workers = psutil.Process(started.pid).children(), _workers(started.pid)
        started.kill()
    assert started.returncode == -signal.SIGKILL and len(workers) == 1
    _await(lambda: not any(map(_alive, children + workers)))  # nobody goes on in the background
    done = read_records(file)
    assert 1 <= len(done) < 5
    # the second call runs the rest; a run that fails is named, and costs none that waits in a process already
    bad = specs[0] | {"base": "no-such-model"}
    capsys.readouterr()
    with pytest.raises(ValueError, match="'no-such-model'") as error:
        load_or_run([*specs[:-1], bad, specs[-1]], "nb", "smoke", workers=1)
    assert "no-such-model" in error.value.__notes__[-1] and "; 1 already started" in capsys.readouterr().err
    records = read_records(file)
    assert records[: len(done)] == done and [r["spec"] for r in records] == specs
    assert load_or_run(specs[::-1], "nb", "smoke") == records[::-1]
    assert capsys.readouterr().out == "loaded 5 records, ran 0\n" and not (folders / "results").exists()
    # the same run in another process, beside others
    assert comparable(sweep.run(specs[-1], "nb", "commit")) == comparable(records[-1])


def test_a_run_of_numbers_that_are_not_finite_fails_as_any_run_does():
    """In its own process: the one that stores records would end all others with it."""
    settings = {"max_completion_length": 8, "kl_problems": 2, "kl_samples": 2}
    [spec] = kl_specs("A0", 1e30, 1, settings, "smoke")
    with pytest.raises(ValueError, match="kl A0 0 .*kl.exact_token_mean = nan"):
        sweep.run(spec, "nb", "commit")


def _after_a_record(patch: pytest.MonkeyPatch, act) -> None:
    """Let `act` get the processes of a sweep soon after it has stored a record: it waits for the next one then."""

    def append(*arguments):
        threading.Timer(0.1, lambda: act(_workers(os.getpid()))).start()
        return append_record(*arguments)

    patch.setattr(sweep.records, "append_record", append)


def _workers(pid: int) -> list[psutil.Process]:
    """Processes that run specs for this one: copies of its server."""
    servers = [p for p in psutil.Process(pid).children() if "multiprocessing.forkserver" in " ".join(p.cmdline())]
    return [worker for server in servers for worker in server.children()]


def _alive(process: psutil.Process) -> bool:
    """Whether a process has not ended; one that is not yet reaped has."""
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def test_an_interrupt_and_a_killed_process_end_a_sweep_at_once_and_cost_no_finished_run(folders, capfd, monkeypatch):
    """The first run of each sweep would take an hour."""
    # a shell that starts pytest in the background has interrupts ignored, and its children inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    file, seen = folders / "run/results/smoke.jsonl", []
    [endless] = train_specs("es", ["A0"], [0], SETTINGS | {"steps": 20_000}, "smoke")
    bases = base_specs(["A0", "A1"], SETTINGS, "smoke")

    def interrupt(workers):  # as a terminal does
        seen.extend(workers)
        for process in (*workers, psutil.Process()):
            process.send_signal(signal.SIGINT)

    _after_a_record(monkeypatch, interrupt)
    with pytest.raises(KeyboardInterrupt) as interrupted:
        load_or_run([endless, bases[0]], "nb", "smoke", workers=2)
    assert "call again" in interrupted.value.__notes__[0]
    assert len(seen) == 2 and not any(map(_alive, seen))
    (first,) = read_records(file)
    out, err = capfd.readouterr()
    assert "Traceback" not in err and "Loading weights" not in err and "nb:" in err

    def kill(workers):
        seen.extend(workers)
        workers[0].kill()

    _after_a_record(monkeypatch, kill)
    with pytest.raises(RuntimeError, match="was killed.*call again"):
        load_or_run([endless, *bases], "nb", "smoke", workers=2)
    assert len(seen) == 4 and not any(map(_alive, seen))
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


def test_a_missing_run_is_stored_by_the_notebook_that_asks_and_force_looks_elsewhere(folders, capsys, monkeypatch):
    monkeypatch.setattr(sweep, "_run_all", run_here)
    specs = base_specs(["A0", "A1"], SETTINGS, "tiny")
    committed = sweep.run(specs[0], "01_a", "commit")
    files = [folders / f"results/{name}/tiny.jsonl" for name in ("01_a", "02_b")]
    append_record(files[0], committed)
    records = load_or_run(specs, "02_b", "tiny")
    assert capsys.readouterr().out == "loaded 1 records, ran 1\n"
    assert records[0] == committed and records[1]["notebook"] == "02_b"
    assert [read_records(file) for file in files] == [[committed], [records[1]]]
    assert index_problems(files[1]) == []  # shares are the means of the results beside them
    assert set(committed["validation"]) == {"greedy", "format", "pass@1", "pass@16", "pass@64"}
    assert committed["test"]["n"] == 10 and committed["test"].keys() >= {"greedy_bits", "t1_counts"}
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
INSTALLED = ("pyproject.toml", "notebooks/pyproject.toml", "constraints.txt", ".venv/.installed")


def test_a_forced_reproduction_goes_on_after_a_kill_and_begins_anew_after_its_end(tmp_path):
    """The Makefile's own rule; the commands that it calls only note whether there were records."""
    commands = {".venv/bin/papermill": NOTEBOOK, ".venv/bin/python": "#!/bin/sh", "bin/latexmk": "#!/bin/sh"}
    for name, text in (dict.fromkeys(("paper/x", "notebooks/01_a.ipynb", *INSTALLED), "") | commands).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    shutil.copy(paths.ROOT / "Makefile", tmp_path)
    environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    (tmp_path / ".venv/.installed").touch()  # after what it was made from

    def reproduce():
        command = ["make", "-C", tmp_path, "reproduce", "FORCE=1"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        return done.returncode == 0, [line for line in done.stdout.splitlines() if line.startswith("records")]

    assert reproduce() == (True, ["records trained"])
    (tmp_path / "killed").touch()
    assert reproduce() == (False, [])  # it has begun anew
    (tmp_path / "killed").unlink()
    (tmp_path / "runs/reproduce/results").mkdir()  # and stored something
    assert reproduce() == (True, ["records loaded"])
    assert reproduce() == (True, ["records trained"])


def test_comparison_with_committed_records():
    def made(seed, digest, greedy):
        return record(seed, digest=digest, test={"greedy": greedy, "t1": 0.5})

    committed = {r["spec_hash"]: r for r in (made(1, "a", 0.25), made(2, "b", 0.25))}
    said = sweep.compare([made(1, "a", 0.25), made(2, "c", 0.24), made(9, "d", 0.9)], committed)
    assert re.findall(r"[\d.]+ of \d|[\d.]+ points", said) == ["2 of 3", "1 of 2", "1.00 points"]
    again, then = (record(4, test={"n": 64, "t0.6": share, "t0.6_counts": "ff"}) for share in (0.5, 0.52))
    assert "2.00 points" in sweep.compare([again], {then["spec_hash"]: then})


PROBE = """
import json, os
from evoalign_study import sweep

def probe(spec, notebook, commit, keep):
    import torch
    from evoalign_lib.engines import _decode_cpu  # which imports numba
    from numba import config
    started = open("/proc/self/environ", "rb").read().decode()  # the server's, of which this is a copy
    found = {name: (os.environ.get(name), name + "=" in started) for name in sweep._INSTRUCTIONS}
    return found | {"used": [torch.backends.cpu.get_cpu_capability(), config.CPU_NAME, config.CPU_FEATURES]}

if __name__ == "__main__":
    sweep.run = probe
    print(json.dumps(list(sweep._run_all([{"kind": "base"}], "nb", 1, {}))[0]))
"""
has_avx2 = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


@pytest.mark.slow
@pytest.mark.skipif(not has_avx2, reason="the CPU has no AVX2 to be held to")
def test_runs_of_the_local_engine_compute_with_avx2(tmp_path):
    """As the committed records were made, on a CPU with AVX-512, too."""
    (tmp_path / "probe.py").write_text(PROBE)
    environment = {name: value for name, value in os.environ.items() if name not in sweep._INSTRUCTIONS}
    with open(tmp_path / "answer.json", "w") as file:  # a pipe would be open for as long as the server is there
        subprocess.run([sys.executable, tmp_path / "probe.py"], env=environment, stdout=file, timeout=250, check=True)
    found = json.loads((tmp_path / "answer.json").read_text())
    assert found.pop("used") == ["AVX2", "haswell", "+avx2"]
    assert found == {name: [value, True] for name, value in sweep._INSTRUCTIONS.items()}


CHOSEN = [
    (True, {}, sweep._INSTRUCTIONS),
    (True, {"ATEN_CPU_CAPABILITY": "default"}, sweep._INSTRUCTIONS | {"ATEN_CPU_CAPABILITY": "default"}),
    (False, {}, dict.fromkeys(sweep._INSTRUCTIONS)),
]


@pytest.mark.skipif(not has_avx2, reason="the CPU has no AVX2 to be held to")
@pytest.mark.parametrize(("local", "given", "expected"), CHOSEN)
def test_the_user_and_other_engines_choose_their_own_instructions(monkeypatch, local, given, expected):
    for name in ("OMP_NUM_THREADS", *sweep._INSTRUCTIONS):
        monkeypatch.setenv(name, "")  # put back afterwards
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    sweep._set_environment(local)
    assert {name: os.environ.get(name) for name in sweep._INSTRUCTIONS} == expected
    assert os.environ["OMP_NUM_THREADS"] == "1"


# ---- the bar


def test_a_run_counts_by_its_steps_and_all_futures_are_yielded(monkeypatch, capsys):
    monkeypatch.setattr(progress_bar, "SECONDS", 0.01)
    monkeypatch.setattr(progress_bar, "QUIET_SECONDS", 0.02)
    shares, spec = [0.0] * 4, {"seed": 3, "steps": 40}
    progress_bar.tell_in({spec_hash(spec): 3}, shares)
    progress_bar.tell(spec, 20)
    progress_bar.tell(spec | {"seed": 4}, 20)  # of no run of the sweep
    progress_bar.tell_in({}, [])
    assert shares == [0, 0, 0, 0.5]
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(time.sleep, i / 10) for i in range(4)]
        assert set(progress_bar.followed(futures, shares, "01")) == set(futures)
    shown = capsys.readouterr().err
    assert re.search(r"01: .* [0-3]\.5/4 runs", shown) and re.search(r"100%.* 4/4 runs", shown)


# ---- ledgers that are kept with records

KEPT = SETTINGS | {"max_completion_length": 6, "validation_problems": 2, "test_problems": 2, "curve_points": 2}
KEPT |= {"steps": 12, "prompts_per_step": 8}


def kept_specs() -> list[dict]:
    return train_specs("es", ["A0"], range(2), KEPT, "tiny")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Committed: two runs, the ledger of the first. Beside: the same, by force. Nothing may change it."""
    with pytest.MonkeyPatch.context() as patch:
        folder = at(patch, tmp_path_factory.mktemp("made"))
        one, other = kept_specs()
        left = folder / f"results/nb/ledgers/{spec_hash(one)}.jsonl.gz"
        left.parent.mkdir(parents=True)
        left.write_bytes(b"of a sweep that was killed before it wrote the record")
        load_or_run([one, other], "nb", "tiny", keep_ledgers=[one], workers=1)
        before = contents(folder / "results")
        patch.setattr(sweep, "_run_all", run_here)
        load_or_run([one], "nb", "tiny", force=True, keep_ledgers=[one], workers=1)
        assert contents(folder / "results") == before
    return folder


@pytest.fixture
def folder(made, tmp_path, monkeypatch) -> Path:
    """A copy, to be damaged."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return at(monkeypatch, tmp_path)


def kept_records(folder: Path) -> list[dict]:
    return sorted(read_records(folder / "results/nb/tiny.jsonl"), key=lambda r: r["spec"]["seed"])


def test_a_record_describes_its_ledger(folder):
    one, other = kept_records(folder)
    path, kept = ledger_file(one), one["ledger"]
    assert "ledger" not in other and path == folder / f"results/nb/ledgers/{one['spec_hash']}.jsonl.gz"
    packed, plain = path.read_bytes(), gzip.decompress(path.read_bytes())
    assert (kept["bytes"], kept["gzip_bytes"]) == (len(plain), len(packed)) and len(packed) < len(plain)
    assert kept["sha256"] == hashlib.sha256(packed).hexdigest() and kept["replay_error"] == 0.0
    run = ledger.read(path)
    assert run.ended and len(run.steps) == KEPT["steps"] and run.weights[12] == kept["weights"]
    assert run.header["model"]["name"] == "A0"
    assert run.header["settings"].items() >= {"seed": 0, "arm": "es", "population_size": 3, "sigma": 0.03}.items()
    # the digest that every record of a run has, from a replay
    assert hashlib.sha256(ledger.replay(path, "A0").tobytes()).hexdigest().startswith(one["digest"])
    files = [f"ledgers/{one['spec_hash']}.jsonl.gz", "tiny.index", "tiny.jsonl"]
    assert sorted(contents(folder)) == [f"{place}/{file}" for place in ("results/nb", "run/results") for file in files]
    assert index_problems(folder / "results/nb/tiny.jsonl") == index_problems(folder / "run/results/tiny.jsonl") == []


def test_a_kept_ledger_is_loaded_with_its_record_and_a_forced_run_keeps_its_own(folder, capsys):
    before = contents(folder)
    for notebook in ("nb", "another"):
        assert load_or_run(kept_specs(), notebook, "tiny", keep_ledgers=kept_specs()[:1]) == kept_records(folder)
    assert capsys.readouterr().out == 2 * "loaded 2 records, ran 0\n" and contents(folder) == before
    (fresh,), (committed, _) = read_records(folder / "run/results/tiny.jsonl"), kept_records(folder)
    assert ledger_file(fresh).parent == folder / "run/results/ledgers"
    assert sweep.check_ledger(fresh).weights == sweep.check_ledger(committed).weights
    assert fresh["ledger"]["sha256"] != committed["ledger"]["sha256"]  # the times of a step differ


def test_what_cannot_be_kept_is_refused_before_any_run(folder):
    one, other = kept_specs()
    base = base_specs(["A0"], KEPT, "tiny")[0]
    for all_of_them, wrong, named in (
        ([one], other, "keep_ledgers"),
        ([one, base], base, "keep_ledgers"),
        ([one, other], other, r"\(es A0 1\) was made without keeping"),
    ):
        with pytest.raises(ValueError, match=named):
            load_or_run(all_of_them, "nb", "tiny", keep_ledgers=[wrong])


def test_a_ledger_that_is_missing_or_another(folder):
    """That a forged chain is found by its digests, the tests of ledgers have."""
    one, _ = kept_records(folder)
    path = ledger_file(one)
    with pytest.raises(ValueError, match="0000000000000000"):
        sweep.check_ledger(one | {"ledger": one["ledger"] | {"weights": "0" * 64}})
    for damage in (lambda: path.write_bytes(path.read_bytes()[:-1] + b"\1"), path.unlink):
        damage()
        for use in (
            lambda: load_or_run(kept_specs(), "nb", "tiny", keep_ledgers=kept_specs()[:1]),
            lambda: sweep.check_ledger(one),
        ):
            with pytest.raises(ValueError, match="restore it from git"):
                use()


def test_a_packed_ledger_depends_on_its_lines_alone(folder, tmp_path, monkeypatch):
    packed = ledger_file(kept_records(folder)[0]).read_bytes()
    text, path = gzip.decompress(packed), tmp_path / "other.jsonl"
    path.write_bytes(text)
    assert ledger.pack(path) == packed
    with pytest.raises(ledger.LedgerError, match="gunzip"):
        ledger.Ledger.open(ledger_file(kept_records(folder)[0]))
    for cut in (text + b'{"step":12', text[: text.rindex(b"\n", 0, -1) + 1]):
        path.write_bytes(cut)
        with pytest.raises(ledger.LedgerError, match="is not closed"):
            ledger.pack(path)
    damaged, named = tmp_path / "bad.jsonl.gz", r"bad.jsonl.gz (is damaged .*: restore it from a copy|has no header)"
    for data in (packed[:5], b"", b"no gzip", packed[:-8] + bytes(8)):
        damaged.write_bytes(data)
        with pytest.raises(ledger.LedgerError, match=named):
            ledger.read(damaged)
    monkeypatch.setattr(ledger, "_MOST_UNPACKED", len(text) - 1)  # some kB can unpack to gigabytes
    with pytest.raises(ledger.LedgerError, match="unpacks to more than"):
        ledger.read(ledger_file(kept_records(folder)[0]))


# ---- the committed ledgers

# those of a real model's runs take half an hour each, and the model must be fetched first
TINY = {record["spec_hash"] for file in record_files("tiny") for record in read_records(file) if "ledger" in record}
LEDGERS = [path for path in paths.RESULTS.glob("*/ledgers/*") if path.name.partition(".")[0] in TINY]
LEDGERS.sort(key=lambda path: path.stat().st_size)


def record_of(path: Path) -> dict:
    """The record beside which a committed ledger is kept."""
    (named,) = read_records(path.parents[1] / "tiny.jsonl", [path.name.partition(".")[0]])
    return named


@pytest.mark.parametrize("path", [LEDGERS[0], *(pytest.param(path, marks=pytest.mark.slow) for path in LEDGERS[1:])])
def test_a_committed_ledger_replays_to_the_weights_of_its_record(path, tmp_path):
    """`evoalign replay` as it is typed: every digest, and the model of a step."""

    def replay(*options: str) -> str:
        code, output = typed(app, "replay", path, *options)
        assert code == 0, output
        return output

    said = replay("--verify")
    assert "all computed again, equal" in said and f"last weights: {record_of(path)['ledger']['weights']}" in said
    assert "the model after step 3, weights " in replay("--step", "3", "--out", str(tmp_path / "model"))
    assert {"model.safetensors", "tokenizer.json"} <= {path.name for path in (tmp_path / "model").iterdir()}


@pytest.mark.slow
@pytest.mark.timeout(1800)  # half a minute, or many times that where other runs have the machine
@pytest.mark.parametrize("path", LEDGERS, ids=lambda path: path.name)
def test_a_replayed_model_answers_as_its_record_says(path):
    record = record_of(path)
    spec = record["spec"]
    model, tokenizer, sets = training.world(spec | {"kind": "base"})
    with closing(training.evaluation_engine(spec, model, tokenizer, sets)) as engine:
        engine.master[:] = ledger.replay(path, spec["base"])
        found = measures.get(spec["task"]).tested(engine, sets["test"])
    assert found == {name: record["test"][name] for name in found}
