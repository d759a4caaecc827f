"""A notebook at full scale, as papermill runs it on a user's machine, with vLLM and a small model in a folder."""

import faulthandler
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from evoalign_study import paths

pytest.importorskip("vllm", reason="make test-engines has an environment with vLLM")
pytest.importorskip("seaborn", reason="notebooks need evoalign[analysis,notebooks,adapters] beside it")

SMALL = {"steps": 2, "prompts_per_step": 4, "max_completion_length": 12, "curve_points": 2}
SMALL |= {"validation_problems": 4, "test_problems": 5, "population_size": 4, "sigma": 0.02, "alpha": 0.02}


def papermill(notebook: str, out: Path, folder: str, limit: float = 550, **parameters) -> list[dict]:
    """Run a notebook and return the records that it stored."""
    settings = {"scale": "full", "model": folder, "engine": "vllm"} | parameters
    command = [sys.executable, "-m", "papermill", str(paths.NOTEBOOKS / f"{notebook}.ipynb"), str(out / "out.ipynb")]
    command += ["-k", "python3", "--cwd", str(paths.NOTEBOOKS), "-y", yaml.safe_dump(settings)]
    environment = os.environ | {"EVOALIGN_RUN_DIR": str(out), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in (out / "results" / "full.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_notebook_01_at_full_scale(folder, external_data, tmp_path):
    records = papermill("01_es_countdown", tmp_path, folder, **SMALL, ledger_steps=3, seeds=2)
    trained = [r for r in records if r["spec"]["kind"] == "train"]
    assert [r["spec"]["seed"] for r in trained] == [0, 1, 0]
    assert all(r["plan"]["decoder"] == "vllm" and r["spec"]["base"] == folder for r in records)
    assert len(list((tmp_path / "results" / "ledgers").iterdir())) == 3
    assert list((tmp_path / "training").glob("*/runs/*/events.out.tfevents.*"))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_notebook_06_at_full_scale(folder, external_data, tmp_path):
    from evoalign_study import nb06_low_rank_and_cost as low_rank_and_cost  # which draws, with packages of an extra

    faulthandler.cancel_dump_traceback_later()  # it ends every test after 5 minutes; this one's own limit is above
    sizes = {name: value for name, value in low_rank_and_cost.SMOKE.items() if name not in ("bases", "steps")}
    sizes |= {"max_completion_length": 12, "populations": [4], "micro_batch": 4, "gpus": 1}
    records = papermill("06_low_rank_and_cost", tmp_path, folder, **sizes, limit=1400)
    trained = [r for r in records if r["spec"]["kind"] == "train"]
    assert all(r["plan"]["decoder"] == "vllm" and r["spec"]["base"] == folder for r in trained)
    assert {"es_low_rank", "essa", "es_lora", "grpo", "grpo_lora"} <= {r["spec"]["arm"] for r in trained}
    assert "only the local engine has bases of another precision" in (tmp_path / "out.ipynb").read_text()
