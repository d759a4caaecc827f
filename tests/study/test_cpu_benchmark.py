"""The CPU benchmark runs, compares like with like, and stores what it measured beside what others measured."""

import json

import numpy as np
import pytest
import torch
from evoalign_study.paths import ROOT
from torch.utils.flop_counter import FlopCounterMode

from tests.benchmarks import cpu, shared


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """All sections at the smallest sizes, stored over an older run's."""
    out = tmp_path_factory.mktemp("bench") / "results" / "bench.json"
    out.parent.mkdir()
    ours = cpu.device_name()
    older = {"another": {"cpu": {"noise": 1}}, ours: {"gpu": {"update": 2}, "cpu": {"a section of long ago": 3}}}
    out.write_text(json.dumps(older))
    assert cpu.main(["--quick", "--out", str(out)]) == 0
    results = json.loads(out.read_text())
    assert results["another"] == older["another"]
    assert results[ours].keys() == {"gpu", "cpu"} and results[ours]["gpu"] == {"update": 2}
    return results[ours]["cpu"]


@pytest.mark.slow
def test_all_sections_run_and_replace_what_an_older_run_left(quick):
    assert list(quick) == list(cpu.SECTIONS)
    assert all("error" not in found for found in quick.values())
    assert all(quick[name]["cells"] for name in cpu.SECTIONS if name != "device")
    device = quick["device"]
    assert device["instructions"] == torch.backends.cpu.get_cpu_capability()
    assert len(device["commit"].removesuffix("+")) == 12 or device["commit"] == "unknown"


@pytest.mark.slow
def test_times_and_ratios_are_positive(quick):
    for name in ("noise", "iteration", "low_rank", "step"):
        for entry in quick[name]["targets"]:
            bound, number = entry["target"].rsplit(" ", 1)
            value, least = entry["value"], bound == "at least"
            assert entry["met"] == (value >= float(number) if least else value <= float(number))
        for cell, row in quick[name]["cells"].items():
            # a step is the difference of two times, of either sign where a busy machine stretches one of them
            rest = {k: v for k, v in row.items() if name != "step" or "floor" in k or "prompt" in k}
            assert np.isfinite(list(row.values())).all(), (name, cell, row)
            assert all(value > 0 for value in rest.values()), (name, cell, row)
    for row in quick["iteration"]["cells"].values():
        assert row["ratio"] == pytest.approx(row["plain_s"] / row["ours_s"])
    for row in quick["step"]["cells"].values():
        assert row["ratio"] == pytest.approx(row["step_ms"] / row["floor_ms"])


@pytest.mark.slow
def test_both_arms_give_the_same_tokens(quick):
    assert [row["same_tokens"] for row in quick["iteration"]["cells"].values()] == [1.0]
    assert [row["same_tokens"] for row in quick["low_rank"]["cells"].values()] == [1.0, 1.0]


@pytest.mark.slow
def test_the_account_adds_up(quick):
    for row in quick["account"]["cells"].values():
        parts = [row[part] for part in (*cpu.PARTS, "detokenise and the rest", "pool", "update")]
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(1)
        assert row["not_generation"] == pytest.approx(1 - row["generate"])


@pytest.mark.slow
def test_the_master_costs_what_its_copies_cost(quick):
    """A float32 model, a float32 master, a float32 working copy; joined projections and little else come on top."""
    (row,) = quick["memory"]["cells"].values()
    assert row["parameters"] > 1e6
    assert 3.5 < row["model"] < 5
    assert 7.5 < row["engine_at_rest"] < 10
    assert 11.5 < row["peak"] < 18


def test_different_tokens_are_noticed(monkeypatch):
    plan, plain = cpu.QUICK, cpu.Plain(cpu.build("0.14M"), 9, cpu.QUICK)
    before = [tensor.clone() for tensor in plain.tensors]
    generate = plain.generate

    def other(**changed):
        new = generate(**changed)
        new[2, 1] += 1
        return new

    monkeypatch.setattr(plain, "generate", other)
    assert cpu.same_tokens(plain, plan) == pytest.approx(8 / 9)
    assert all((a == b).all() for a, b in zip(plain.tensors, before, strict=True)), "the weights came back to the bit"


@pytest.mark.parametrize(
    ("name", "parameters"), [("0.14M", 140_928), ("1M", 987_136), ("4M", 4_006_400), ("20M", 19_811_328)]
)
def test_models_have_the_sizes_they_are_called(name, parameters):
    assert cpu.build(name).num_parameters() == parameters


def test_every_formulation_of_a_product_has_its_operations():
    """All formulations of one kind do the same number of multiplications, so that the cheapest is a fair floor."""
    products = cpu.products_of(cpu.build("1M"), rows=3, length=11)
    config = cpu.build("1M").config
    h, f, n, v = config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.vocab_size
    kv = config.num_key_value_heads * h // config.num_attention_heads
    expected = {
        "qkv": n * h * (h + 2 * kv),
        "attention output": n * h * h,
        "gate and up": n * h * 2 * f,
        "down": n * f * h,
        "head": v * h,
        "attention products": 2 * n * h * 11,
    }
    assert products.keys() == expected.keys()
    for kind, ways in products.items():
        for how, call in ways.items():
            with FlopCounterMode(display=False) as counter:
                call()
            if how != "fused":  # torch does not count this operation on a CPU
                assert counter.get_total_flops() == 2 * 3 * expected[kind], (kind, how)


def test_measuring_discards_the_first_round_and_alternates():
    order = []
    cases = {name: lambda name=name: order.append(name) for name in "ab"}
    times = shared.measure(3, cases, fewer={"b": 1})
    assert "".join(order) == "ab" + "ab" + "a" + "a"
    assert times.keys() == {"a", "b"}
    assert 0 < times["a"]["seconds_min"] <= times["a"]["seconds_median"]


def test_a_failing_section_costs_no_other(monkeypatch, tmp_path, capsys):
    def broken(plan):
        raise RuntimeError("no such counter")

    monkeypatch.setitem(cpu.SECTIONS, "noise", broken)
    monkeypatch.setattr(cpu, "default_threads", lambda: 2)
    out = tmp_path / "bench.json"
    out.write_text(json.dumps({cpu.device_name(): {"cpu": {"step": 5}}}))
    assert cpu.main(["--quick", "--sections", "noise", "device", "--out", str(out)]) == 1
    found = json.loads(out.read_text())[cpu.device_name()]["cpu"]
    assert found["noise"]["error"] == "RuntimeError: no such counter"
    assert "error" not in found["device"]
    assert found["step"] == 5, "a run of some sections leaves the others"
    stored = (ROOT / "paper" / "results" / "bench.json").read_bytes()
    assert cpu.main(["--quick", "--sections", "device"]) == 0  # without --out, quick numbers are not stored
    assert (ROOT / "paper" / "results" / "bench.json").read_bytes() == stored
    printed = capsys.readouterr()
    assert "FAILED: RuntimeError: no such counter" in printed.out and "no such counter" in printed.err


def test_a_memory_mode_that_fails_is_an_error(monkeypatch):
    monkeypatch.setattr(cpu.sys, "executable", "/bin/false")  # a process that fails
    found = cpu.memory_section(cpu.Plan(modes=(("master", "float33"), ("kahan", "bfloat16"))))
    assert found["cells"] == {}
    errors = "master, a float33 model: torch has no dtype 'float33'; kahan, a bfloat16 model: no output"
    assert found["error"] == errors
