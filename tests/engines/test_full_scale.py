"""A notebook at full scale, as papermill runs it on a user's machine, with vLLM and a small model in a folder."""

import faulthandler
import json
import os
import subprocess
import sys

import pytest
import yaml
from evoalign_study import paths

pytest.importorskip("vllm", reason="make test-engines has an environment with vLLM")
pytest.importorskip("seaborn", reason="notebooks need evoalign[analysis,notebooks,adapters] beside it")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_notebook_06_at_full_scale(folder, external_data, tmp_path):
    from evoalign_study import nb06_low_rank_and_cost as low_rank_and_cost  # which draws, with packages of an extra

    faulthandler.cancel_dump_traceback_later()  # it ends every test after 5 minutes; this one's own limit is above
    sizes = {name: value for name, value in low_rank_and_cost.SMOKE.items() if name not in ("bases", "steps")}
    sizes |= {"max_completion_length": 12, "populations": [4], "micro_batch": 4, "gpus": 1}
    settings = {"scale": "full", "model": folder, "engine": "vllm"} | sizes
    notebook, out = paths.NOTEBOOKS / "06_low_rank_and_cost.ipynb", tmp_path / "out.ipynb"
    command = [sys.executable, "-m", "papermill", str(notebook), str(out), "-k", "python3"]
    command += ["--cwd", str(paths.NOTEBOOKS), "-y", yaml.safe_dump(settings)]
    environment = os.environ | {"EVOALIGN_RUN_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, done.stderr[-3000:]
    records = [json.loads(line) for line in (tmp_path / "results" / "full.jsonl").read_text().splitlines()]
    trained = [r for r in records if r["spec"]["kind"] == "train"]
    assert all(r["plan"]["decoder"] == "vllm" and r["spec"]["base"] == folder for r in trained)
    assert {"es_low_rank", "essa", "es_lora", "grpo", "grpo_lora"} <= {r["spec"]["arm"] for r in trained}
    assert "only the local engine has bases of another precision" in out.read_text()
    assert list((tmp_path / "training").glob("*/runs/*/events.out.tfevents.*"))
