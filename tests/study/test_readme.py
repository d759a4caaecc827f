"""The README's example: the same data set and reward function train with ES, and with GRPO from what ES trained."""

import json
import os
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from evoalign_study import paths
from helpers import fork, wait
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from evoalign_lib import ledger, tiny

README = (paths.ROOT / "README.md").read_text(encoding="utf-8")

# the example's constants, and what stands for them here
DECLARED = 'model, steps, sigma = "Qwen/Qwen2.5-0.5B-Instruct", 100, 1e-3\n'
HERE = 'model, steps, sigma = "base", 1, 0.05\n'


def kind(value):
    if isinstance(value, dict):
        return {key: kind(item) for key, item in value.items()}
    if isinstance(value, list):
        return sorted({json.dumps(kind(item)) for item in value})
    return "function" if callable(value) else type(value).__name__


def noted(trainer, make):
    """The trainer's `__init__`, with a reward function that notes each call: which trainer called, and with what."""

    def init(self, *arguments, reward_funcs, **keywords):
        def reward(**columns):
            result = reward_funcs(**columns)
            sizes = sorted({len(value) for value in [*columns.values(), result] if isinstance(value, list)})
            with open("calls.jsonl", "a") as file:  # from worker processes too
                file.write(json.dumps({"trainer": trainer, "columns": kind(columns), "sizes": sizes}) + "\n")
            return result

        make(self, *arguments, reward_funcs=reward, **keywords)

    return init


def run_as_it_is(code: str, folder: Path) -> None:
    """Run an example in a folder; its process is not used for anything else."""
    from trl import GRPOTrainer

    from evoalign_lib.es import ESTrainer

    warnings.simplefilter("ignore")
    os.chdir(folder)
    for trainer in (GRPOTrainer, ESTrainer):
        trainer.__init__ = noted(trainer.__name__, trainer.__init__)
    exec(compile(code, "example.py", "exec"), {"__name__": "__main__"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The one block of the README that trains was run here, in a child of this process, from a copy of base A0."""
    folder = tmp_path_factory.mktemp("readme")
    (code,) = [b for b in re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL) if "train()" in b]
    assert code.count(DECLARED) == 1
    for part in tiny.load("A0"):
        part.save_pretrained(folder / "base")
    import trl.trainer.grpo_trainer  # noqa: F401  once for all tests of this process, and not in the child

    assert wait(fork(run_as_it_is, code.replace(DECLARED, HERE), folder), 190) == 0
    return folder


def test_each_run_trains_and_writes_a_model_that_loads(folder):
    for start, end in (("base", "runs/es"), ("runs/es", "runs/back")):
        before, after = (load_file(folder / name / "model.safetensors") for name in (start, end))
        assert before.keys() == after.keys() and all(np.isfinite(after[name]).all() for name in after)
        assert any((before[name] != after[name]).any() for name in after), f"{end} did not move"
        model, tokenizer = (auto.from_pretrained(folder / end) for auto in (AutoModelForCausalLM, AutoTokenizer))
        ids = tokenizer("Add: 1+2", return_tensors="pt")
        assert model.generate(**ids, max_new_tokens=2, do_sample=False).shape[1] == ids["input_ids"].shape[1] + 2
    assert ledger.verify(folder / "runs/es/ledger.jsonl", str(folder / "base")).recomputed


def test_both_trainers_call_the_reward_function_alike(folder):
    calls = [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]
    assert len(calls) >= 1 + 30 and {call["trainer"] for call in calls} == {"GRPOTrainer", "ESTrainer"}
    assert all(len(call["sizes"]) == 1 for call in calls)  # one list per column, one entry per completion
    assert all(call["columns"] == calls[0]["columns"] for call in calls)
    message = [json.dumps([json.dumps({"role": "str", "content": "str"})])]
    columns = calls[0]["columns"]
    assert columns["prompts"] == columns["completions"] == message and columns["answer"] == ['"str"']


def test_what_it_links_to_is_there():
    linked = re.findall(r"\]\(([^)#]+)\)", README)
    assert linked and not [name for name in linked if not (paths.ROOT / name).exists()]
    assert {f"notebooks/{notebook.name}" for notebook in paths.NOTEBOOKS.glob("*.ipynb")} <= set(linked)
