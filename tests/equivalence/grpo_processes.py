"""A gradient arm trained on completions that depend on the place in the step alone: one process of a launch.

Arguments: arm, file for the outcome. Sampling differs with the number of processes, so the samples are given.
"""

import hashlib
import json
import os
import sys
import tempfile

import torch
import trl
from helpers import random_model, tokenizer

from evoalign_lib import grpo

GENERATIONS = 4


def given(self, prompt_ids, *images_and_more):
    first = int(os.environ.get("RANK", "0")) * len(prompt_ids)
    completions = []
    for i, prompt in enumerate(prompt_ids):
        place = f"{prompt} {(first + i) % GENERATIONS} {self.state.global_step}"
        digest = hashlib.sha256(place.encode()).digest()
        completions.append([17 + byte % 200 for byte in digest[: 2 + digest[-1] % 8]])
    return completions if isinstance(self, trl.RLOOTrainer) else (completions, None)


def reward(completion_ids, **columns):
    return [None if sum(ids) % 11 == 0 else sum(ids) % 7 / 7 for ids in completion_ids]


def main(arm: str, path: str) -> None:
    torch.set_num_threads(1)
    trl.GRPOTrainer._generate_single_turn = trl.RLOOTrainer._generate_single_turn = given
    with tempfile.TemporaryDirectory() as folder:
        random_model().save_pretrained(folder)
        # of three groups each of two processes has one and a half
        settings = {"steps": 3, "prompts_per_step": 3, "num_generations": GENERATIONS, "learning_rate": 1e-3}
        settings |= {"max_completion_length": 12, "beta": 0.05, "micro_batch": 3, "use_cpu": True}
        quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
        args = grpo.config(arm, output_dir=folder, seed=1, **settings, **quiet)
        rows = [{"prompt": p} for p in ("a", "bc d", "Using the numbers", "12")]
        trainer, budget = grpo.trainer(folder, reward, args, rows, tokenizer())
        trainer.train()
    if os.environ.get("RANK", "0") == "0":
        weights = {name: p.detach().flatten().tolist() for name, p in trainer.model.named_parameters()}
        logged = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
        result = {"weights": weights, "spent": budget.spent(10), "counts": budget.counts, "rewards": logged}
        with open(path, "w") as file:
            json.dump(result, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
