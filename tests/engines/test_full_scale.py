"""A notebook at full scale, as papermill runs it on a user's machine, with vLLM and a small model in a folder."""

import faulthandler
import json
import os

import pytest
import yaml
from evoalign_study import paths
from helpers import python

pytest.importorskip("vllm", reason="make test-engines has an environment with vLLM")
pytest.importorskip("seaborn", reason="notebooks need evoalign[analysis,notebooks,adapters] beside it")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_notebook_01_at_full_scale(folder, external_data, tmp_path):
    from evoalign_study import nb01_es_countdown  # which draws, with packages of an extra

    faulthandler.cancel_dump_traceback_later()  # it ends every test after 5 minutes; this one's own limit is above
    full = nb01_es_countdown.FULL.keys() - {"bases", "null_bases", "sigma", "alpha"}
    sizes = {name: value for name, value in nb01_es_countdown.SMOKE.items() if name in full}
    sizes |= {"max_completion_length": 12, "seeds": 1, "gpus": 1}
    settings = {"scale": "full", "model": folder, "engine": "vllm"} | sizes
    notebook, out = paths.NOTEBOOKS / "01_es_countdown.ipynb", tmp_path / "out.ipynb"
    command = ["-m", "papermill", notebook, out, "-k", "python3", "--cwd", paths.NOTEBOOKS]
    environment = os.environ | {"EVOALIGN_RUN_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    python(*command, "-y", yaml.safe_dump(settings), env=environment)
    records = [json.loads(line) for line in (tmp_path / "results" / "full.jsonl").read_text().splitlines()]
    trained = [r for r in records if r["spec"]["kind"] == "train"]
    assert trained and all(r["plan"]["decoder"] == "vllm" and r["spec"]["base"] == folder for r in trained)
    assert list((tmp_path / "training").glob("*/runs/*/events.out.tfevents.*"))
