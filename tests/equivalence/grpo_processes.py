"""Gradient arms trained on completions that depend on the place in the step alone: one process of a launch.

Arguments: file for the outcomes, arms. Sampling differs with the number of processes, so the samples are given.
"""

import hashlib
import json
import sys
import tempfile

import torch
import trl
from helpers import random_model, tokenizer

from evoalign_lib import grpo
from evoalign_lib.engines.processes import rank

GENERATIONS = 4


def given(self, prompt_ids, *images_and_more):
    first = rank() * len(prompt_ids)
    completions = []
    for i, prompt in enumerate(prompt_ids):
        place = f"{prompt} {(first + i) % GENERATIONS} {self.state.global_step}"
        digest = hashlib.sha256(place.encode()).digest()
        completions.append([17 + byte % 200 for byte in digest[: 2 + digest[-1] % 8]])
    return completions if isinstance(self, trl.RLOOTrainer) else (completions, None)


def reward(completion_ids, **columns):
    return [None if sum(ids) % 11 == 0 else sum(ids) % 7 / 7 for ids in completion_ids]


def main(path: str, *arms: str) -> None:
    torch.set_num_threads(1)
    trl.GRPOTrainer._generate_single_turn = trl.RLOOTrainer._generate_single_turn = given
    with tempfile.TemporaryDirectory() as folder:
        random_model().save_pretrained(folder)  # now: once processes are connected, only the first one writes
        outcomes = {arm: train(arm, folder) for arm in arms}
    if rank() == 0:
        with open(path, "w") as file:
            json.dump(outcomes, file)


def train(arm: str, folder: str) -> dict:
    # of three groups each of two processes has one and a half
    settings = {"steps": 3, "prompts_per_step": 3, "num_generations": GENERATIONS, "learning_rate": 1e-3}
    settings |= {"max_completion_length": 12, "beta": 0.05, "micro_batch": 3, "use_cpu": True}
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    args = grpo.config(arm, output_dir=folder, seed=1, **settings, **quiet)
    rows = [{"prompt": p} for p in ("a", "bc d", "Using the numbers", "12")]
    trainer, budget = grpo.trainer(folder, reward, args, rows, tokenizer())
    trainer.train()
    weights = {name: p.detach().flatten().tolist() for name, p in trainer.model.named_parameters()}
    logged = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    return {"weights": weights, "spent": budget.spent(10), "counts": budget.counts, "rewards": logged}


if __name__ == "__main__":
    main(*sys.argv[1:])
