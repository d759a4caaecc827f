"""Whole runs with vLLM, and engines that refuse: each test has an engine of its own, one at a time."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from evoalign_study import kinds
from evoalign_study.kinds.decode import base_specs
from evoalign_study.kinds.train import train_specs
from helpers import random_model, tokenizer
from small_models import LENGTH, ROWS, SETTINGS, count_letters, engine, members, model, move
from transformers import AutoModelForCausalLM

from evoalign_lib import ledger
from evoalign_lib.engines import _vllm_worker
from evoalign_lib.engines.local import LocalEngine
from evoalign_lib.es import ESConfig, ESTrainer

pytest.importorskip("vllm", reason="make test-engines has an environment with vLLM")

from vllm.model_executor.layers import utils  # noqa: E402

from evoalign_lib.engines.vllm import Generator, WrongWeights  # noqa: E402

PACKING = utils.dispatch_cpu_unquantized_gemm  # as vLLM comes, before an engine replaces it


@pytest.fixture(autouse=True)
def one_engine_at_a_time():
    """A process has room for one: what a test leaves open is closed."""
    yield
    if (left := Generator._alive()) is not None and left.llm is not None:
        left.close()


def test_settings_of_the_engine_are_refused():
    with pytest.raises(ValueError, match="'seed' is set by the engine"):
        engine(settings={"seed": 3}).generate("train")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_proved_too_and_the_plan_says_that_tokens_may_differ(dtype):
    ours = engine(model=model().to(dtype), anchor_decay=0.3)  # toward what vLLM has loaded, in that dtype
    start = ours.master.copy()
    for keys in ([3], [4], []):  # the first is replayed when vLLM starts, the last is that of a tied population
        ours.update(np.array(keys, np.uint64), np.full(len(keys), 0.01, np.float32))
        ours.evaluate(members(1), 0.01, "train", np.arange(2))
        ours.check()
    # two steps of squared length alpha^2 d, of which 0.7^4 and 0.7^2 are left
    length = 0.01 * (ours.layout.d * (0.7**4 + 0.7**2)) ** 0.5
    assert np.linalg.norm(ours.master - start) == pytest.approx(length, rel=0.02)
    assert ours.plan["exact"] is False and ours.plan["dtype"] == str(dtype).removeprefix("torch.")


def test_an_untied_head_and_another_architecture():
    for one in (model(tie_word_embeddings=False), random_model("llama", hidden_size=128, max_position_embeddings=1024)):
        both = engine(model=one), engine(LocalEngine, model=one)
        move(both)
        (ours,), (theirs,) = (e.generate("train") for e in both)
        assert ours == theirs
        both[0].check()
        both[0].close()


def test_packed_weights_are_refused_by_name(monkeypatch):
    # as vLLM comes: its CPU backend leaves an empty tensor where a weight was
    monkeypatch.setattr(_vllm_worker, "keep_weights_plain", lambda: None)
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", PACKING)
    with pytest.raises(_vllm_worker.NotMapped, match="'model.layers.0.self_attn.qkv_proj.weight' is empty in vLLM"):
        engine().generate("train")


def test_another_folder_is_refused_by_name(tmp_path):
    other = model(seed=3)
    other.save_pretrained(tmp_path)
    with pytest.raises(WrongWeights, match="'model.embed_tokens.weight'.*not those of the run"):
        engine(folder=str(tmp_path)).generate("train")


def test_weights_that_parted_are_found():
    ours = engine()
    ours.generate("train", np.arange(1))
    ours.check()
    ours.master[ours.layout.entries[3].offset] += 1e-3
    with pytest.raises(WrongWeights, match=ours.layout.entries[3].name):
        ours.check()


# ---- whole runs


def config(folder, **settings):
    common = {"output_dir": str(folder), "max_steps": 4, "population_size": 6, "sigma": 0.05, "alpha": 0.1, "seed": 1}
    common |= {"max_completion_length": LENGTH, "prompts_per_step": 5, "report_to": [], "disable_tqdm": True}
    return ESConfig(**common | settings)


def run(folder, out, **settings):
    with_vllm = {"engine": "vllm", "engine_kwargs": SETTINGS}
    return ESTrainer(folder, count_letters, config(out, **with_vllm | settings), ROWS, eval_dataset=ROWS[:4])


def test_a_run_is_the_run_of_the_local_engine_and_replays_in_transformers(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    ours = run(folder, tmp_path / "vllm")
    ours.train()
    assert not any(b"hf_very_secret" in p.read_bytes() for p in (tmp_path / "vllm").rglob("*") if p.is_file())
    metrics = ours.evaluate()
    theirs = run(folder, tmp_path / "local", engine="local", engine_kwargs=None, decoder="generate", workers=1)
    theirs.train()
    one, other = (ledger.read(tmp_path / name / ledger.NAME) for name in ("vllm", "local"))
    assert [s.rewards.tolist() for s in one.steps] == [s.rewards.tolist() for s in other.steps]
    assert one.ended and one.weights == other.weights
    assert metrics["eval_reward"] == theirs.evaluate()["eval_reward"]
    assert one.settings["decoder"] == "vllm" and one.settings["exact"] is True
    # plain transformers, which have not seen vLLM
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    report = ledger.verify(tmp_path / "vllm" / ledger.NAME, plain)
    assert report.recomputed and report.weights == one.weights[4]
    # the folder that a user takes home
    ours.save_model(tmp_path / "out")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="float32")
    texts, master = ours.engine.generate("train"), ours.engine.master.tobytes()
    ours.engine.close()
    again = engine(model=saved, folder=str(tmp_path / "out"))
    assert again.master.tobytes() == master and again.generate("train") == texts
    again.close()


def test_a_model_that_is_an_object_and_the_random_arm(tmp_path):
    settings = config(tmp_path, engine="vllm", engine_kwargs=SETTINGS, fitness="random")
    ours = ESTrainer(model(), count_letters, settings, ROWS, processing_class=tokenizer())
    ours.train()  # needs no text: vLLM does not start
    assert ours.engine._generator is None
    (texts,) = ours.engine.generate("train")
    moved = engine(LocalEngine, model=ours.model)
    assert texts == moved.generate("train")[0]
    ours.engine.close()


@pytest.mark.slow
def test_runs_at_full_scale_have_the_records_of_the_local_engine(folder, external_data):
    """A base and a run of ES, as notebooks ask for them: trained in bfloat16, evaluated, their KL measured."""
    settings = {"max_completion_length": 24, "validation_problems": 4, "test_problems": 6, "engine": "vllm", "gpus": 0}
    settings |= {"population_size": 4, "sigma": 0.02, "alpha": 0.05, "steps": 3, "prompts_per_step": 5}
    settings |= {"curve_points": 2, "tensor_parallel": 1, "unique_prompts": None}
    (base,), (spec,) = base_specs([folder], settings, "full"), train_specs("es", [folder], [0], settings, "full")
    assert base["engine"] == spec["engine"] == "vllm" and spec["tensor_parallel"] == 1
    here = train_specs("es", [folder], [0], settings | {"engine": "local"}, "full")[0]
    assert spec.items() - here.items() == {("engine", "vllm"), ("gpus", 0), ("tensor_parallel", 1)}
    assert 0 <= kinds.get("base")(base)["test"]["greedy"] <= 1
    record = kinds.get("train")(spec)
    assert record["plan"]["decoder"] == "vllm" and record["plan"]["dtype"] == "bfloat16"
    assert record["budget"]["completions"] == 4 * 5 * 3 and record["update_norm"] > 0
    assert record["curve"]["step"] == [0, 3] and record["kl_policy_base"]["exact_nats_per_sequence"] > 0
    assert len(json.dumps(record)) < 8000
    # the arms that TRL trains have its own vLLM, on the GPUs of one machine
    own = {"learning_rate": 1e-4, "beta": 0.0, "num_generations": 5}
    for gpus, found in ((0, 1), (5, 5)):
        (gradient,) = train_specs("grpo", [folder], [0], settings | own | {"gpus": gpus}, "full")
        assert gradient["engine"] == "vllm" and gradient["gpus"] == found and "tensor_parallel" not in gradient
    (gradient,) = train_specs("grpo", [folder], [0], settings | own | {"engine": "ray"}, "full")
    assert "engine" not in gradient


RANKS = """
import sys
import time
sys.path[:0] = sys.argv[1:]
if __name__ == "__main__":  # vLLM's processes import this file, too; on a CPU they must not find numba loaded
    import numpy as np
    from evoalign_lib.engines.local import LocalEngine
    from evoalign_lib.engines.vllm import AdapterEngine, LowRankEngine
    from small_models import SETTINGS, adapted, engine, linear, members, model, move

    def alike(both):
        assert both[0].generate("train") == both[1].generate("train")
        found = [one.evaluate(members(1), 0.05, "train", np.arange(6)) for one in both]
        assert [e.scored.rewards.tolist() for e in found[0]] == [e.scored.rewards.tolist() for e in found[1]]

    settings = {"settings": {"max_loras": 2} | SETTINGS, "tensor_parallel": 2}
    over_adapters = engine(AdapterEngine, adapted(), **settings), engine(LocalEngine, adapted())
    low_rank = engine(LowRankEngine, linear(), rank=3, **settings), engine(LocalEngine, linear(), rank=3)
    for both in (over_adapters, low_rank):
        alike(both)
        both[0].close()
    shape = {"num_attention_heads": 4, "num_key_value_heads": 1}  # one head of keys on both ranks
    both = engine(model=model(**shape), tensor_parallel=2), engine(LocalEngine, model=model(**shape))
    alike(both)
    assert len(both[0].generator.proof()) == 2
    move(both)
    both[0].check()
    assert both[0].generate("train") == both[1].generate("train")
    print("right", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_two_ranks_share_a_model_and_end_with_a_driver_that_is_killed(tmp_path):
    """Tensor parallel, in processes of vLLM's own: every rank holds its part of the map, and gets the noise of it.

    The processes would go on holding the GPUs.
    """
    (tmp_path / "driver.py").write_text(RANKS)
    here = Path(__file__).parent
    command = [sys.executable, str(tmp_path / "driver.py"), str(here.parent.parent), str(here.parent), str(here)]
    # as a user's process has it: an engine of one GPU, in a test before, let vLLM work in the process itself
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    with (
        (tmp_path / "errors").open("w") as errors,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as driver,
    ):
        right = any(line == "right\n" for line in driver.stdout)
        below = psutil.Process(driver.pid).children(recursive=True)
        driver.kill()
    assert right, (tmp_path / "errors").read_text()[-2000:]
    assert driver.returncode == -signal.SIGKILL and len(below) >= 3  # EngineCore and two workers
    _, left = psutil.wait_procs(below, timeout=60)
    for process in left:
        process.kill()
    assert not left, "they go on without their driver"
