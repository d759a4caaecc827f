"""Notebook 04's groups at scale full, as a user runs them, killed in the middle and resumed to the same records.

A model in a folder, a reward model, a cost model and a held-out one behind `evoalign serve-scorer`, and vLLM's
OpenAI-compatible server as a judge that chats.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from evoalign_study import paths
from helpers import saved
from small_models import chat_tokenizer, model

from evoalign_lib.tiny import dialogues, scorers

pytest.importorskip("vllm", reason="make test-engines has an environment with vLLM")

DRIVER = """
import json, sys
from evoalign_study import parameters
from evoalign_study import loading, nb04_safety_judges as study

if __name__ == "__main__":  # the processes of runs import this file, too
    given = json.loads(sys.argv[1])
    run = parameters.check_parameters(given, study.presets(given["model"]))
    load = loading.Loader(study.NOTEBOOK, run, study.groups)
    print(load.table())
    load(*sys.argv[2:])
"""
SMALL = {"unique_prompts": 12, "max_completion_length": 12, "validation_problems": 2, "test_problems": 3}
SMALL |= {"kl_requests": 2, "judge_problems": 2, "judge_tokens": 8, "curve_points": 4, "micro_batch": 4}
SMALL |= {"es_population_size": 4, "es_prompts_per_step": 4, "es_steps": 6, "es_sigma": 0.02, "es_alpha": 0.02}
SMALL |= {"grpo_num_generations": 4, "grpo_prompts_per_step": 2, "grpo_steps": 6, "grpo_learning_rate": 1e-3}
SMALL |= {"cost_rule": "signed", "seeds": 1, "force": False, "dry_run": False, "gpus": 0, "scale": "full"}


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def started(command: list, log: Path, settings: dict[str, str]) -> subprocess.Popen:
    """A process in a session of its own, which writes into a file."""
    command, environment = list(map(str, command)), os.environ | settings
    with open(log, "ab") as file:
        pipes = {"stdout": file, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)


@contextlib.contextmanager
def serving(command: list, url: str, log: Path):
    """A server, once it answers."""
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    process = started(command, log, settings)
    try:
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(url, trust_env=False).status_code == 200:
                    break
            time.sleep(0.5)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with what a user brings: models, scorers, a file of requests."""
    place = tmp_path_factory.mktemp("brought")
    saved(place / "policy", model())
    model(seed=3, max_position_embeddings=8192).save_pretrained(place / "chat")
    chat_tokenizer().save_pretrained(place / "chat")
    for name, source in (("reward", "length 1"), ("cost", "length 1"), ("held", "gpt2")):
        shutil.copytree(scorers.folder(source) / ("cost" if name == "cost" else "reward"), place / name)
        dialogues.tokenizer().save_pretrained(place / name)
    lines = [json.dumps({"prompt": f"How do I mend kettle number {i}?"}) for i in range(60)]
    (place / "asked.jsonl").write_text("\n".join(lines))
    return place


@pytest.fixture(scope="module")
def brought(place):
    """Settings of the notebook with all of it, and with the addresses of four servers."""
    evoalign, judge = Path(sys.executable).parent / "evoalign", free_port()
    # what `vllm serve` starts; that command itself looks for a distribution "vllm", and the CPU build is "vllm-cpu"
    chats = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", place / "chat", "--port", judge]
    chats += ["--served-model-name", "judge", "--dtype", "float32", "--max-model-len", 8192, "--enforce-eager"]
    chats += ["--max-num-seqs", 8]
    at = {name: f"http://127.0.0.1:{free_port()}" for name in ("reward", "cost", "held")}
    with contextlib.ExitStack() as served:
        for name, url in at.items():
            command = [evoalign, "serve-scorer", place / name, "--text", "continued", "--port", url.rpartition(":")[2]]
            served.enter_context(serving(command, f"{url}/identity", place / f"{name}.log"))
        url = f"http://127.0.0.1:{judge}/v1"
        served.enter_context(serving(chats, f"{url}/models", place / "judge.log"))
        given = {"model": str(place / "policy"), "requests": str(place / "asked.jsonl"), "reward_model": at["reward"]}
        yield SMALL | given | {"cost_model": at["cost"], "judge": f"{at['held']}, {url}#judge"}


def start(out: Path, given: dict, *groups: str) -> subprocess.Popen:
    """The driver of a notebook's groups, in a session of its own."""
    (out / "driver.py").write_text(DRIVER)
    path = os.pathsep.join([str(paths.ROOT), str(paths.NOTEBOOKS)])
    settings = {"EVOALIGN_RUN_DIR": str(out), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return started([sys.executable, out / "driver.py", json.dumps(given), *groups], out / "log.txt", settings)


def records(out: Path) -> dict[str, dict]:
    """Arm or kind -> record, without what may differ: times, and what servers were asked since the last start."""
    found = {}
    for line in (out / "results" / "full.jsonl").read_text().splitlines():
        record = json.loads(line)
        for name in ("core_seconds", "core_seconds_total", "wall_seconds"):
            record["budget"].pop(name, None)
            record.get("curve", {}).pop(name, None)
        found[record["spec"].get("arm", record["spec"]["kind"])] = record
    return found


def ended(process: subprocess.Popen, out: Path) -> None:
    assert process.wait(timeout=550) == 0, (out / "log.txt").read_text()[-4000:]


def killed(process: subprocess.Popen, out: Path, middle) -> None:
    """Kill all processes of a run by SIGKILL as soon as it is in the middle."""
    end = time.monotonic() + 400
    while not middle():
        assert process.poll() is None, (out / "log.txt").read_text()[-4000:]
        assert time.monotonic() < end, (out / "log.txt").read_text()[-4000:]
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow
@pytest.mark.timeout(280)  # and the servers start in here, before what takes long itself
def test_a_dry_run_names_what_is_missing_and_runs_nothing(brought, tmp_path):
    process = start(tmp_path, brought | {"engine": "vllm", "dry_run": True, "seeds": 0}, "base", "es", "grpo")
    assert process.wait(timeout=300) != 0
    said = (tmp_path / "log.txt").read_text()
    assert "DryRun: 0 of 17 runs have records" in said and not (tmp_path / "results").exists()


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize(("engine", "arm"), [("vllm", "es"), ("vllm", "grpo"), ("local", "es"), ("local", "grpo")])
def test_a_run_with_servers_is_killed_and_ends_with_the_same_record(brought, tmp_path, engine, arm):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir(), broken.mkdir()
    given = brought | {"engine": engine}
    ended(start(whole, given, *(["base"] if engine == "local" else []), arm), whole)
    found = records(whole)
    first = found[arm]
    assert first["spec"]["reward_at"] == first["spec"]["cost_at"] == "server"
    assert first["curve"]["step"] == [0, 1, 2, 6] and first["curve"]["lambda"][0] == 1 != first["curve"]["lambda"][-1]
    assert first["curve"]["win 0_greedy"][0] == 0.5 and first["test"]["n"] == 3
    for said in first["held_out"]:  # a random model gives no verdicts, and says so in both orders
        assert said["judge"] == "judge" and said["unparsed"] == 2 and said["failed"] == 0 and said["win_rate"] is None
    assert first["scorers"]["reward"]["texts"] > 0 and first["counts"]["exception"] == 0
    if engine == "vllm":
        assert first["plan"]["decoder"] == "vllm"
    else:
        assert first["curve"]["reward_greedy"][0] == found["base"]["test"]["greedy"]["reward"]
    ledgers = "training/*/ledger.jsonl"  # of the run of ES, with a header

    def middle() -> bool:
        if arm == "es":
            return sum(len(path.read_bytes().splitlines()) for path in broken.glob(ledgers)) >= 4
        return any(broken.glob("training/*/checkpoint-3"))

    killed(start(broken, given, arm), broken, middle)
    assert not (broken / "results" / "full.jsonl").exists()
    ended(start(broken, given, arm), broken)
    second = records(broken)[arm]
    asked = [record.pop("scorers")["reward"]["texts"] for record in (first, second)]  # since the last start
    assert asked[0] > asked[1] > 0
    for record in (first, second):
        for said in record["held_out"]:
            said.pop("errors")
    assert first == second
