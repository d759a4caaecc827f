"""One process of a launch that trains gradient arms on completions that depend only on their place in the step.

Argument: folder for the outcomes, one file per process. Sampling depends on the number of processes, so the completions
are fixed.
"""

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import trl
from es_runs import KEY, Lagrangian
from grpo_runs import built
from helpers import random_model
from transformers import TrainerCallback

from evoalign_lib.engines.processes import rank

GENERATIONS = 4
ARMS = ("grpo", "rloo")


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


def main(path: str) -> None:
    torch.set_num_threads(1)
    trl.GRPOTrainer._generate_single_turn = trl.RLOOTrainer._generate_single_turn = given
    with tempfile.TemporaryDirectory() as folder:
        random_model().save_pretrained(folder)  # now, because once processes are connected only the first one writes
        outcomes = {arm: train(arm, folder) for arm in ARMS} | {"multiplier": train_with_multiplier(folder)}
    Path(path, f"{rank()}.json").write_text(json.dumps(outcomes))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        # the outcome is written; shutting down gloo's threads with the interpreter sometimes hangs or aborts
        os._exit(0)


def trainer(arm: str, folder: str, reward, callbacks=(), **changed) -> tuple:
    # three groups, so that each of two processes has one and a half
    settings = {"seed": 1, "steps": 3, "prompts_per_step": 3, "num_generations": GENERATIONS, "micro_batch": 3}
    rows = [{"prompt": p} for p in ("a", "bc d", "Using the numbers", "12")]
    return built(folder, arm, reward, folder, rows, callbacks, use_cpu=True, **settings | changed)


def train(arm: str, folder: str) -> dict:
    tested, budget = trainer(arm, folder, reward, beta=0.05)
    tested.train()
    weights = {name: p.detach().flatten().tolist() for name, p in tested.model.named_parameters()}
    logged = [entry["reward"] for entry in tested.state.log_history if "reward" in entry]
    return {"weights": weights, "spent": budget.spent(10), "counts": budget.counts, "rewards": logged}


def train_with_multiplier(folder: str) -> dict:
    """Train with a reward that has a state, which starts with a different value in each process."""
    multiplier, seen = Lagrangian(0.1 + rank()), []

    class Note(TrainerCallback):
        def on_step_end(self, args, state, control, **keywords):
            seen.append(multiplier.log_lambda)

    tested, _ = trainer("grpo", folder, multiplier, [Note()])
    tested.train()
    logged = [log[KEY] for log in tested.state.log_history if KEY in log]
    return {"log_lambda": seen, "metrics": multiplier.seen, "logged": logged}


if __name__ == "__main__":
    main(sys.argv[1])
