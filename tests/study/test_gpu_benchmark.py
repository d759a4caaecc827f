"""The GPU benchmark runs, as far as a machine without a GPU can tell, and decodes what transformers decodes."""

import importlib.util
import json
import os
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from evoalign_study import paths

from evoalign_lib import noise

FILE = paths.ROOT / "tests" / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_benchmark", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for their module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("tied", [True, False])
def test_its_decoder_gives_the_tokens_of_transformers(gpu, tied):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = gpu.Shape(32, 48, 2, 4, 2, 96, tied)
    model = gpu.Model(shape, "cpu", torch.float32, seed=3)
    for piece in model.pieces:  # weights large enough for tokens that differ
        piece.tensor.mul_(10 if piece.tensor.ndim > 1 else 1)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tied, "rms_norm_eps": 1e-6}
    config = Qwen2Config(**sizes, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    reference = Qwen2ForCausalLM(config).eval()
    missing, unexpected = reference.load_state_dict({p.name: p.tensor for p in model.pieces}, strict=False)
    assert unexpected == []
    assert missing == (["lm_head.weight"] if tied else [])
    prompts = torch.randint(0, 96, (3, 7), generator=torch.Generator().manual_seed(0))
    model.prepare(rows=3, width=7, new=9)
    tokens = model.generate(prompts)
    expected = prompts
    with torch.no_grad():
        for _ in range(9):
            expected = torch.cat([expected, reference(expected).logits[:, -1:].argmax(-1)], 1)
    assert len(tokens.unique()) > 5
    assert (tokens == expected[:, 7:]).all()
    assert (model.generate(prompts) == tokens).all(), "a second member starts from a clean cache"


@pytest.mark.parametrize(
    ("name", "parameters"), [("0.5B", 494_032_768), ("1.5B", 1_543_714_304), ("7B", 7_615_616_512)]
)
def test_the_shapes_are_those_of_qwen(gpu, name, parameters):
    shape = gpu.MODELS[name]
    kv = shape.kv_heads * shape.hidden // shape.heads
    attention = 2 * shape.hidden**2 + 2 * kv * shape.hidden + shape.hidden + 2 * kv
    layer = attention + 3 * shape.hidden * shape.intermediate + 2 * shape.hidden
    matrices = (1 if shape.tied else 2) * shape.vocabulary * shape.hidden
    assert shape.layers * layer + matrices + shape.hidden == parameters


@pytest.mark.slow
def test_sections_run_on_a_toy(tmp_path):
    """Those that an interpreter of the kernels runs in a moment; their bits are `test_noise_triton`'s matter."""
    pytest.importorskip("triton", reason="Triton is not installed; its wheels exist for Linux only")
    out = tmp_path / "results" / "bench.json"
    out.parent.mkdir()
    out.write_text(json.dumps({"a CPU": {"cpu": {"update": 1}}}))
    sections = ["device", "equality", "memory"]
    command = [sys.executable, "-m", "tests.benchmarks.gpu", "--toy", "--out", str(out), "--sections", *sections]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=paths.ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text())
    assert results.pop("a CPU") == {"cpu": {"update": 1}}
    (found,) = (device["gpu"] for device in results.values())
    assert list(found) == sections
    for distribution in noise.DISTRIBUTIONS:
        assert found["equality"][distribution]["compared"] > 0
        assert found["equality"][distribution]["differing"] == 0
    assert found["equality"]["known_answers"]["wrong"] == []
    assert found["equality"]["model"]["master_differing"] == found["equality"]["model"]["working_differing"] == 0


def test_a_failing_section_costs_no_other(gpu, monkeypatch, tmp_path, capsys):
    def broken(plan):
        raise RuntimeError("no such counter")

    monkeypatch.setitem(gpu.SECTIONS, "device", broken)
    out = tmp_path / "bench.json"
    assert torch.cuda.is_available() or gpu.main([]) == 2  # says so where there is no GPU
    assert gpu.main(["--toy", "--sections", "device", "memory", "--out", str(out)]) == 1
    ((_, found),) = json.loads(out.read_text()).items()
    assert found["gpu"]["device"]["error"] == "RuntimeError: no such counter"
    assert "skipped" in found["gpu"]["memory"]
    assert "no such counter" in capsys.readouterr().err
