"""Print the completions that two steps of GRPO with vLLM sample, for each seed; runs as a separate process.

Arguments: the model's folder, and the seeds.
"""

import json
import sys
import tempfile
from functools import partial

import torch
from grpo_runs import built
from helpers import PROMPTS, tokenizer

from evoalign_lib import models
from evoalign_lib.engines.vllm import _end, import_vllm


def sampled(folder: str, seed: int) -> list[list[int]]:
    seen = []

    def reward(completion_ids, **columns):
        seen.extend(completion_ids)
        return [float(sum(ids) % 5) for ids in completion_ids]

    vllm = {"eos_ids": [tokenizer().eos_token_id], "max_model_length": 128, "gpu_memory": 0.2}
    with tempfile.TemporaryDirectory() as place:
        data, changed = [{"prompt": p} for p in PROMPTS], {"seed": seed, "vllm": vllm, "max_completion_length": 8}
        trainer, budget = built(place, "grpo", reward, models.load(folder)[0], data, **changed)
        trainer.train()
    assert budget.spent(1)["completions"] == len(seen) == 16
    assert budget.spent(1)["generated_tokens"] == sum(map(len, seen))
    _end(trainer.vllm_generation)
    return seen


if __name__ == "__main__":
    torch.set_num_threads(1)
    import_vllm()
    from trl.generation import vllm_generation

    vllm_generation.LLM = partial(vllm_generation.LLM, enforce_eager=True)  # compiling takes longer than all the rest
    print(json.dumps([sampled(sys.argv[1], int(seed)) for seed in sys.argv[2:]]))
