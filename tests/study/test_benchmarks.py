"""The benchmarks run, compare like with like, and store what they measured beside what others measured."""

import json
import os

import numpy as np
import pytest
import torch
from evoalign_study import paths
from helpers import python

from tests.benchmarks import cpu, peers, shared


@pytest.mark.slow
def test_all_sections_at_the_smallest_sizes_over_what_an_older_run_left(tmp_path):
    out, ours = tmp_path / "results" / "bench.json", cpu.device_name()
    out.parent.mkdir()
    older = {"another": {"cpu": {"noise": 1}}, ours: {"gpu": {"update": 2}, "cpu": {"a section of long ago": 3}}}
    out.write_text(json.dumps(older))
    assert cpu.main(["--quick", "--out", str(out)]) == 0
    results = json.loads(out.read_text())
    assert results["another"] == older["another"] and results[ours]["gpu"] == {"update": 2}
    quick = results[ours]["cpu"]
    assert list(quick) == list(cpu.SECTIONS) and not any("error" in found for found in quick.values())
    device = quick.pop("device")
    assert device["device"] == ours and device["commit"]
    cells = {name: found["cells"] for name, found in quick.items()}
    for name in ("noise", "iteration", "low_rank"):
        for entry in quick[name]["targets"]:
            assert entry["met"] == (entry["value"] >= float(entry["target"].removeprefix("at least ")))
        for cell, row in cells[name].items():
            assert np.isfinite(list(row.values())).all() and min(row.values()) > 0, (name, cell, row)
    (iterated,) = cells["iteration"].values()
    assert iterated["ratio"] == pytest.approx(iterated["plain_s"] / iterated["ours_s"]) and iterated["same_tokens"] == 1


def test_different_tokens_are_noticed(monkeypatch):
    plain = cpu.Plain(cpu.build("0.14M"), 9, cpu.QUICK)
    before, generate = [tensor.clone() for tensor in plain.tensors], plain.generate
    one_other = torch.zeros(9, cpu.QUICK.new, dtype=torch.int64)
    one_other[2, 1] = 1
    assert cpu.same_tokens(plain, cpu.QUICK) == 1
    monkeypatch.setattr(plain, "generate", lambda: generate() + one_other)
    assert cpu.same_tokens(plain, cpu.QUICK) == pytest.approx(8 / 9)
    assert all((a == b).all() for a, b in zip(plain.tensors, before, strict=True)), "the weights came back to the bit"


def test_measuring_discards_the_first_round_and_alternates():
    order = []
    times = shared.measure(3, {name: lambda name=name: order.append(name) for name in "ab"})
    assert "".join(order) == "ab" * 4
    assert 0 < times["a"]["seconds_min"] <= times["a"]["seconds_median"]


def test_a_failing_section_costs_no_other(monkeypatch, tmp_path, capsys):
    def broken(plan):
        raise RuntimeError("no such counter")

    monkeypatch.setitem(cpu.SECTIONS, "noise", broken)
    out, stored = tmp_path / "bench.json", (paths.RESULTS / "bench.json").read_bytes()
    out.write_text(json.dumps({cpu.device_name(): {"cpu": {"step": 5}}}))
    assert cpu.main(["--quick", "--sections", "noise", "device", "--out", str(out)]) == 1
    found = json.loads(out.read_text())[cpu.device_name()]["cpu"]
    assert found["noise"]["error"] == "RuntimeError: no such counter" and "error" not in found["device"]
    assert found["step"] == 5, "a run of some sections leaves the others"
    assert cpu.main(["--quick", "--sections", "device"]) == 0  # without --out, quick numbers are not stored
    assert (paths.RESULTS / "bench.json").read_bytes() == stored
    assert "FAILED: RuntimeError: no such counter" in capsys.readouterr().out


# ---- the GPU's, as far as a machine without one can tell


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")
def test_it_runs_on_a_toy_and_leaves_what_others_measured(tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed; its wheels exist for Linux only")
    out, name = tmp_path / "bench.json", "toy (CPU, Triton's interpreter)"
    out.write_text(json.dumps({"a CPU": {"cpu": {"update": 1}}, name: {"gpu": {"update": 2, "other": 3}}}))
    command = ["-m", "tests.benchmarks.gpu", "--toy", "--out", out]
    python(*command, folder=paths.ROOT, env=os.environ | {"TRITON_INTERPRET": "1"})
    results = json.loads(out.read_text())
    assert results["a CPU"] == {"cpu": {"update": 1}}
    found = results[name]["gpu"]
    assert found.keys() == {"device", "population", "engine", "update", "other"}
    steps, iterations = (found[name]["cells"] for name in ("population", "engine"))
    assert steps["full rank"]["bytes_per_parameter"] == 8 and 4 < steps["low rank"]["bytes_per_parameter"] < 8
    assert all(0 < cell["share_of_pure_inference"] for cell in iterations.values()) and len(iterations) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="says so where there is no GPU")
def test_without_a_gpu_it_says_so(capsys):
    pytest.importorskip("triton")
    from tests.benchmarks import gpu

    assert gpu.main([]) == 2 and "needs a GPU" in capsys.readouterr().err


# ---- that of peers, without their code


def test_what_cannot_be_measured_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for file in peers.Qiu.files:
        (tmp_path / "qiu" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "qiu" / file).touch()
    wrong = {"--qiu FOLDER or --torcheggroll FOLDER": [], peers.Qiu.files[0]: ["--qiu", str(tmp_path)]}
    for named, argv in (wrong | {"OMP_NUM_THREADS=1": ["--qiu", str(tmp_path / "qiu")]}).items():
        with pytest.raises(SystemExit, match="2"):
            peers.main(argv)
        assert named in capsys.readouterr().err


def test_both_decoders_make_the_same_tokens_and_none_ends_early():
    # A0 ends its own completions, unlike random models: the end token has to be taken from both
    plan = cpu.Plan(members=2, rows=(12,), new=20)
    with cpu.threads(1):
        ours, theirs = peers.Ours("0.14M", plan), peers.Peer("0.14M", plan)
        ended = cpu.engine_of(cpu.build("0.14M"), 12, plan).generate("train")[0]
        tokens = ours.greedy()
        assert min(len(raw) for _, raw in ended) < 20
        assert tokens == theirs.greedy() and {len(raw) for raw in tokens} == {20}
        assert (ours.step() > 0).all()
        theirs.generate()
    with pytest.raises(RuntimeError, match="not 2 times"):
        theirs._taken(2)


def test_ratios_are_those_within_a_round():
    seconds = {"ours": np.array([[1.0, 1.0], [2.0, 1.0], [4.0, 2.0]])}
    seconds["qiu"] = seconds["ours"] * np.array([[3.0, 2.0], [5.0, 2.0], [4.0, 2.0]])
    found = peers.summary(seconds, {"ours": [[1], [2]], "qiu": [[1], [3]]}, 8)
    for kind, expected in (("wall", [4, 3, 5]), ("core", [2, 2, 2])):
        assert [found["qiu"][f"{what} ours/theirs, {kind} time"] for what in ("median", "least", "most")] == expected
    assert found["qiu"]["same_tokens"] == 0.5 and found["ours"]["completions_a_second, wall time"] == 4
