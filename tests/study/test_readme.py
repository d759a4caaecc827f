"""The README's example: the same data set and reward function train with GRPO, with ES, and with GRPO again."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from evoalign_study import paths
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from evoalign_lib import ledger, tiny

README = (paths.ROOT / "README.md").read_text(encoding="utf-8")

# the example's constants, and what stands for them here
DECLARED = 'model, steps, sigma = "Qwen/Qwen2.5-0.5B-Instruct", 100, 1e-3\n'
HERE = 'model, steps, sigma = "base", 2, 0.05\n'
# the same task with texts in the place of messages
AS_TEXT = {'[{"role": "user", "content": q}]': "q", 'c[0]["content"]': "c"}

# Runs examples as they are, and notes each call of a reward function: which trainer called, and with what.
DRIVER = """
import json, os, sys
from pathlib import Path

from trl import GRPOTrainer
from evoalign_lib.es import ESTrainer

def kind(value):
    if isinstance(value, dict):
        return {key: kind(item) for key, item in value.items()}
    if isinstance(value, list):
        return ["list of"] + sorted({json.dumps(kind(item)) for item in value})
    return "function" if callable(value) else type(value).__name__

def noted(trainer, make):
    def init(self, *arguments, reward_funcs, **keywords):
        def reward(**columns):
            result = reward_funcs(**columns)
            sizes = sorted({len(value) for value in [*columns.values(), result] if isinstance(value, list)})
            line = {"trainer": trainer, "columns": kind(columns), "sizes": sizes}
            with open("calls.jsonl", "a") as file:  # from worker processes too
                file.write(json.dumps(line) + "\\n")
            return result

        make(self, *arguments, reward_funcs=reward, **keywords)
    return init

if __name__ == "__main__":
    for trainer in (GRPOTrainer, ESTrainer):
        trainer.__init__ = noted(trainer.__name__, trainer.__init__)
    for name in sys.argv[1:]:
        os.chdir(Path(name).parent)
        code = Path(name).read_text()
        exec(compile(code, name, "exec"), {"__name__": "__main__"})
        os.chdir("..")
"""


def example() -> str:
    """The one block of the README that trains."""
    (block,) = [b for b in re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL) if "train()" in b]
    return block


def run(folder: Path, codes: dict[str, str]) -> None:
    """Run examples one after the other in a process of its own, each in a folder of its own with a copy of base A0."""
    model, tokenizer = tiny.load("A0")
    for name, code in codes.items():
        model.save_pretrained(folder / name / "base")
        tokenizer.save_pretrained(folder / name / "base")
        (folder / name / "example.py").write_text(code)
    (folder / "driver.py").write_text(DRIVER)
    command = [sys.executable, "driver.py", *(str(folder / name / "example.py") for name in codes)]
    environment = {**os.environ, "PYTHONPATH": str(paths.ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The example was run here, once as it is ("messages") and once with texts as prompts ("text")."""
    folder = tmp_path_factory.mktemp("readme")
    code = example()
    assert code.count(DECLARED) == 1 and all(old in code for old in AS_TEXT)
    code = code.replace(DECLARED, HERE)
    text = code
    for old, new in AS_TEXT.items():
        text = text.replace(old, new)
    run(folder, {"messages": code, "text": text})
    return folder


@pytest.mark.parametrize("prompts", ["messages", "text"])
def test_each_run_trains_and_writes_a_model_that_loads(folder, prompts):
    for start, end in (("base", "runs/grpo"), ("base", "runs/es"), ("runs/es", "runs/back")):
        before, after = (load_file(folder / prompts / name / "model.safetensors") for name in (start, end))
        assert before.keys() == after.keys()
        assert all(np.isfinite(after[name]).all() for name in after)
        assert any((before[name] != after[name]).any() for name in after), f"{end} did not move"
        model = AutoModelForCausalLM.from_pretrained(folder / prompts / end)
        tokenizer = AutoTokenizer.from_pretrained(folder / prompts / end)
        ids = tokenizer("Add: 1+2", return_tensors="pt")
        assert model.generate(**ids, max_new_tokens=2, do_sample=False).shape[1] == ids["input_ids"].shape[1] + 2
    assert ledger.verify(folder / prompts / "runs/es/ledger.jsonl", str(folder / prompts / "base")).recomputed


@pytest.mark.parametrize("prompts", ["messages", "text"])
def test_both_trainers_call_the_reward_function_alike(folder, prompts):
    calls = [json.loads(line) for line in (folder / prompts / "calls.jsonl").read_text().splitlines()]
    seen = {"GRPOTrainer": [], "ESTrainer": []}
    for call in calls:
        assert len(call["sizes"]) == 1  # one list per column, one entry per completion
        if call["columns"] not in seen[call["trainer"]]:
            seen[call["trainer"]].append(call["columns"])
    assert len(calls) >= 2 * 2 + 2 * 30
    assert seen["GRPOTrainer"] == seen["ESTrainer"] and len(seen["ESTrainer"]) == 1
    (columns,) = seen["ESTrainer"]
    message = ["list of", json.dumps({"role": "str", "content": "str"})]
    entry = {"messages": json.dumps(message), "text": '"str"'}[prompts]
    assert columns["prompts"] == columns["completions"] == ["list of", entry]
    assert columns["answer"] == ["list of", '"str"']


def test_what_it_links_to_is_there():
    linked = re.findall(r"\]\(([^)#]+)\)", README)
    assert linked and not [name for name in linked if not (paths.ROOT / name).exists()]
    for notebook in paths.ROOT.glob("notebooks/*.ipynb"):
        assert f"notebooks/{notebook.name}" in linked
