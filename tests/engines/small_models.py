"""Models, prompts and engines that the tests of engines share."""

import copy

import numpy as np
import torch
from helpers import PROMPTS, random_model, tokenizer

from evoalign_lib import noise
from evoalign_lib.engines.local import Prompts
from evoalign_lib.engines.vllm import VLLMEngine
from evoalign_lib.rewards import Rewards
from evoalign_lib.update_rules import Member

# The longest is of 300 tokens and more: the prefix cache keeps whole blocks of 128.
ROWS = [{"prompt": p} for p in PROMPTS] + [{"prompt": p + " again and again" * 20} for p in PROMPTS]
LENGTH = 12
SETTINGS = {"enforce_eager": True, "max_num_seqs": 64}


def model(seed: int = 2, **config):
    """A model whose heads are wide enough for vLLM's attention on a CPU; biases, four heads on two of keys."""
    shape = {"hidden_size": 128, "intermediate_size": 160, "max_position_embeddings": 1024}
    return random_model(seed=seed, **shape | config)


# Layers that vLLM joins (q and v, gate) and single ones, ranks that differ and are none of vLLM's, a scaling.
LORA = {"r": 3, "lora_alpha": 7, "rank_pattern": {"down_proj": 5}, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
LORA |= {"target_modules": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]}


def chat_tokenizer():
    """The tokenizer, with a template; all tests share the one without."""
    tok = copy.deepcopy(tokenizer())
    tok.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    return tok


def adapted(**changed):
    """The model with an adapter of random weights."""
    import peft

    with torch.random.fork_rng():
        torch.manual_seed(4)
        return peft.get_peft_model(model(), peft.LoraConfig(**LORA | changed))


def count_letters(prompts, completions, **columns):
    return [float(sum(c.isalpha() for c in text)) for text in completions]


count_letters.reward_floor = -1.0


def engine(kind=VLLMEngine, model=None, rows=ROWS, rewards=count_letters, **settings):
    if issubclass(kind, VLLMEngine):
        settings = {"settings": SETTINGS} | settings
    else:
        settings = {"decoder": "generate"} | settings
    prompts = {"train": Prompts(rows, tokenizer())}
    model = globals()["model"]() if model is None else model
    return kind(model, tokenizer(), Rewards(rewards), prompts, max_completion_length=LENGTH, **settings)


def members(n: int) -> list[Member]:
    keys = [noise.member_key(noise.run_key("test", 0), 0, i) for i in range(n)]
    return [Member(key, sign) for key in keys for sign in (1, -1)]


def move(engines, n: int = 3, seed: int = 0) -> None:
    """The same update in each."""
    keys = np.array([noise.member_key(noise.run_key("move", seed), 1, i) for i in range(n)], np.uint64)
    for one in engines:
        one.update(keys, np.float32([0.01, -0.02, 0.03][:n]))
