"""The README's example: the same data set and reward function train with ES, and with GRPO from what ES trained."""

import os
import re
import warnings
from pathlib import Path

import numpy as np
from evoalign_study import paths
from helpers import fork, wait
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from evoalign_lib import ledger, tiny

README = (paths.ROOT / "README.md").read_text(encoding="utf-8")

# the example's constants, and what stands for them here
DECLARED = 'model, steps, sigma = "Qwen/Qwen2.5-0.5B-Instruct", 100, 1e-3\n'
HERE = 'model, steps, sigma = "base", 1, 0.05\n'


def run_as_it_is(code: str, folder: Path) -> None:
    """Run an example in a folder; its process is not used for anything else."""
    warnings.simplefilter("ignore")
    os.chdir(folder)
    exec(compile(code, "example.py", "exec"), {"__name__": "__main__"})


def test_the_example_trains_and_writes_models_that_load(tmp_path):
    """The one block of the README that trains runs here, in a child of this process, from a copy of base A0."""
    (code,) = [b for b in re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL) if "train()" in b]
    assert code.count(DECLARED) == 1
    for part in tiny.load("A0"):
        part.save_pretrained(tmp_path / "base")
    import trl.trainer.grpo_trainer  # noqa: F401  once for all tests of this process, and not in the child

    assert wait(fork(run_as_it_is, code.replace(DECLARED, HERE), tmp_path), 190) == 0
    for start, end in (("base", "runs/es"), ("runs/es", "runs/back")):
        before, after = (load_file(tmp_path / name / "model.safetensors") for name in (start, end))
        assert before.keys() == after.keys() and all(np.isfinite(after[name]).all() for name in after)
        assert any((before[name] != after[name]).any() for name in after), f"{end} did not move"
        model, tokenizer = (auto.from_pretrained(tmp_path / end) for auto in (AutoModelForCausalLM, AutoTokenizer))
        ids = tokenizer("Add: 1+2", return_tensors="pt")
        assert model.generate(**ids, max_new_tokens=2, do_sample=False).shape[1] == ids["input_ids"].shape[1] + 2
    assert ledger.verify(tmp_path / "runs/es/ledger.jsonl", str(tmp_path / "base")).recomputed


def test_what_it_links_to_is_there():
    linked = re.findall(r"\]\(([^)#]+)\)", README)
    assert linked and not [name for name in linked if not (paths.ROOT / name).exists()]
    assert {f"notebooks/{notebook.name}" for notebook in paths.NOTEBOOKS.glob("*.ipynb")} <= set(linked)
