"""GRPO with vLLM beside the model, on one process and on two, and the evaluation of what it trains."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from evoalign_study import training
from evoalign_study.kinds import train
from evoalign_study.kinds.train import train_specs
from helpers import SMALL_RUN, python, tokenizer
from safetensors.torch import load_file
from small_models import LENGTH, ROWS, SETTINGS, model

from evoalign_lib import noise
from evoalign_lib.engines.local import LocalEngine, Prompts
from evoalign_lib.engines.vllm import Generator, PushedEngine, WrongWeights

pytest.importorskip("vllm", reason="make test-engines has an environment with vLLM")

HERE = Path(__file__).parent
SMALL = SMALL_RUN | {"engine": "vllm", "curve_points": 2, "test_problems": 3}


def test_weights_that_are_pushed_decode_as_in_transformers(folder):
    common = {"max_completion_length": LENGTH}
    ours = PushedEngine(model(), tokenizer(), {"test": Prompts(ROWS, tokenizer())}, folder=folder, **common)
    theirs = LocalEngine(model(), tokenizer(), None, {"test": Prompts(ROWS, tokenizer())}, decoder="generate", **common)
    longest = ours.prompts["test"].width + LENGTH
    ours.llm = Generator(folder, torch.float32, longest, settings=SETTINGS).llm
    try:
        before = theirs.generate("test")
        assert ours.generate("test") == before
        step = np.random.default_rng(0).normal(0, 0.02, ours.layout.size).astype(np.float32)
        for engine in (ours, theirs):
            engine.master[:] += step
        assert ours.generate("test") == theirs.generate("test") != before
        key = noise.member_key(noise.run_key("noise", 0), 0, 0)
        with ours.perturbed(key, 0.05), theirs.perturbed(key, 0.05):
            assert ours.generate("test", np.arange(3)) == theirs.generate("test", np.arange(3))
        assert ours.generate("test") == theirs.generate("test")
        one, two = ours.generate("test", samples=2, seed=5)
        assert one != two and ours.generate("test", np.array([3]), samples=2, seed=5) == [one[3:4], two[3:4]]
        ours.model.to(torch.bfloat16)
        with pytest.raises(WrongWeights, match="vLLM decodes in torch.float32, the run is evaluated in torch.bfloat16"):
            ours.generate("test")
    finally:
        ours.close()


@pytest.mark.slow
def test_every_seed_has_samples_of_its_own(folder):
    """TRL seeds vLLM with the number of the process: all seeds of an experiment would draw the same numbers."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)]), "OMP_NUM_THREADS": "1"}
    done = python(HERE / "sampled_by_seed.py", folder, 0, 1, env=environment)
    first, other = json.loads(done.stdout.splitlines()[-1])
    assert first != other
    assert len({tuple(ids) for ids in first[:4]}) > 1  # a group's completions are samples, too


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [1, 2])
def test_a_run_and_its_record(folder, external_data, tmp_path, monkeypatch, gpus):
    monkeypatch.delenv("VLLM_CPU_CI_ENV", raising=False)  # its process compiles the model, as a user's does
    (spec,) = train_specs("grpo", [folder], [0], SMALL | {"tensor_parallel": 1, "gpus": gpus}, "full")
    assert spec["engine"] == "vllm" and spec["gpus"] == gpus and "tensor_parallel" not in spec
    record = train.run(spec, None, tmp_path)
    assert record["budget"]["completions"] == 2 * 4 * 4 and record["curve"]["completions"] == [0, 32]
    assert record["plan"] == record["plan"] | {"decoder": "vllm", "dtype": "bfloat16", "exact": False}
    assert record["update_norm"] > 0 and 0 <= record["test"]["greedy"] <= 1 and record["test"]["n"] == 3
    assert record["kl_policy_base"]["exact_nats_per_sequence"] > 0
    assert len(json.dumps(record)) < 8000
    # the model that stays is the one that was measured
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert len(list((tmp_path / "runs").rglob("events.out.tfevents.*"))) == 1
    moved = sum(float(((weights[name] - p.detach()).double() ** 2).sum()) for name, p in model().named_parameters())
    assert abs(moved**0.5 - record["update_norm"]) < 1e-5
    training.settle(tmp_path)
    assert not list(tmp_path.glob("checkpoint-*"))


@pytest.mark.slow
def test_what_fails_in_a_process_is_said(folder, external_data, tmp_path):
    (spec,) = train_specs("grpo", [folder], [0], SMALL | {"gpus": 1}, "full")
    with pytest.raises(RuntimeError, match=r"(?s)ended with code 1.*log.txt.*nowhere"):
        train.run(spec | {"base": str(tmp_path / "nowhere")}, None, tmp_path / "run")
