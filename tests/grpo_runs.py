"""Small runs of gradient arms that several test files share."""

from functools import lru_cache

import torch

from evoalign_lib import _adapters, grpo, tiny
from evoalign_lib.tasks import countdown

SETTINGS = {"seed": 3, "steps": 2, "prompts_per_step": 2, "num_generations": 4, "learning_rate": 1e-3}
SETTINGS |= {"max_completion_length": 12}
QUIET = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
SAVING = {"save_strategy": "steps", "save_steps": 2}


@lru_cache
def rows(n: int = 4, seed: int = 5):
    return countdown.dataset(tiny.problems("train", n, seed), tiny.tokenizer())


def length_reward(prompts, completions, **columns):
    """Reward completions so that those of a group are unlikely to tie and every step moves the weights."""
    return [len(text) % 7 / 7 + text.count("1") for text in completions]


def built(folder, arm="grpo", reward=length_reward, model=None, data=None, callbacks=(), given=None, **changed):
    """Return a trainer of the arm, and its budget; given: further arguments of `grpo.trainer`."""
    args = grpo.config(arm, output_dir=str(folder), **SETTINGS | QUIET | changed)
    model = tiny.load("A0")[0] if model is None else model
    data = rows() if data is None else data
    return grpo.trainer(model, reward, args, data, tiny.tokenizer(), callbacks, **given or {})


def adapted():
    """Return the base with an adapter whose product is not zero, as after fine-tuning."""
    from evoalign_lib.essa import lora_config

    config = lora_config(4)
    config.init_lora_weights = False
    return _adapters.attach(tiny.load("A0")[0], config, 1)


def weights(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
