"""Notebooks on a user's own folder of model and data, as papermill runs them, at the sizes of scale smoke."""

import faulthandler
import json
import os
import shutil
from importlib import import_module

import pytest
import yaml
from evoalign_study import paths

from evoalign_lib import tiny
from evoalign_lib.tiny import dialogues, questions, scorers
from tests.helpers import python, saved

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def small(module):
    """The settings of scale smoke that scale full has, too, but for its models and what only tiny ones allow."""
    own = {"bases", "task", "horizons", "horizon_steps", "unique_prompts", "fewer_prompts", "seeds_repeat"}
    sizes = {name: value for name, value in module.SMOKE.items() if name in module.FULL and name not in own}
    return sizes | {"max_completion_length": 16, "scale": "full"}


def brought_to(module, place):
    """Settings that name a user's own data, written into a folder; 01, 02 and 05 make their problems themselves."""
    if module.NOTEBOOK == "03_conciseness":
        lines = [{"question": p.question, "answer": p.answer} for p in questions.problems("test")[:16]]
        (place / "my questions.jsonl").write_text("\n".join(map(json.dumps, lines)))
        return {"questions": str(place / "my questions.jsonl"), "validation_problems": None, "test_problems": None}
    if module.NOTEBOOK == "04_safety_judges":
        for side in ("reward", "cost"):
            shutil.copytree(scorers.folder("length 1") / side, place / side)
            dialogues.tokenizer().save_pretrained(place / side)
        lines = [json.dumps({"prompt": f"How do I mend kettle number {i}?"}) for i in range(120)]
        (place / "my dialogues.jsonl").write_text("\n".join(lines))
        scored = {f"{side}_model": str(place / side) for side in ("reward", "cost")}
        scored |= {f"{side}_text": "continued" for side in ("reward", "cost")}
        fewer = {"unique_prompts": 12, "kl_requests": 2, "micro_batch": 4}
        return scored | fewer | {"requests": str(place / "my dialogues.jsonl")}
    return {}


RUNS = [
    ("01_es_countdown", "A0"),
    ("02_grpo_countdown", "A0"),
    ("03_conciseness", "B0"),
    ("03_conciseness", "random"),  # it answers nothing right
    ("04_safety_judges", "random"),
    ("05_stability", "A0"),
    ("06_low_rank_and_cost", "A0"),
]


@pytest.mark.parametrize(("name", "base"), RUNS)
def test_a_notebook_runs_on_an_own_model_and_own_data(name, base, external_data, tmp_path):
    faulthandler.cancel_dump_traceback_later()  # it ends every test after 5 minutes; this one's own limit is above
    module, folder = import_module(f"evoalign_study.nb{name}"), tmp_path / "my model"
    if base == "random":
        saved(folder)
    else:
        shutil.copytree(tiny.bases_folder() / base, folder)
    settings = small(module) | {"model": str(folder)} | brought_to(module, tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    command = ["-m", "papermill", paths.NOTEBOOKS / f"{name}.ipynb", out / "out.ipynb", "-k", "python3"]
    command += ["--cwd", paths.NOTEBOOKS, "-y", yaml.safe_dump(settings)]
    python(*command, env=os.environ | {"EVOALIGN_RUN_DIR": str(out), "PYTHONPATH": str(paths.ROOT)})
    records = [json.loads(line) for line in (out / "results" / "full.jsonl").read_text().splitlines()]
    assert {r["spec"].get("base", str(folder)) for r in records} == {str(folder)}
    if (name, base) == ("03_conciseness", "random"):
        assert "was not reached" in (out / "out.ipynb").read_text()
