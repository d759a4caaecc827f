"""Print the completions that two steps of GRPO with vLLM sample, for each seed; runs as a separate process.

Arguments: the model's folder, and the seeds.
"""

import json
import sys
import tempfile
from functools import partial

import torch
from helpers import PROMPTS, tokenizer

from evoalign_lib import grpo, models
from evoalign_lib.engines.vllm import _end, import_vllm


def sampled(folder: str, seed: int) -> list[list[int]]:
    seen = []

    def reward(completion_ids, **columns):
        seen.extend(completion_ids)
        return [float(sum(ids) % 5) for ids in completion_ids]

    settings = {"vllm": {"eos_ids": [tokenizer().eos_token_id], "max_model_length": 128, "gpu_memory": 0.2}}
    settings |= {"steps": 2, "prompts_per_step": 2, "num_generations": 4, "max_completion_length": 8}
    settings |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "learning_rate": 1e-3}
    with tempfile.TemporaryDirectory() as place:
        args = grpo.config("grpo", output_dir=place, seed=seed, **settings)
        rows = [{"prompt": p} for p in PROMPTS]
        trainer, budget = grpo.trainer(models.load(folder)[0], reward, args, rows, tokenizer())
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
