"""Models, prompts and engines that the engine tests share."""

import copy

import numpy as np
import torch
from helpers import PROMPTS, random_model, tokenizer

from evoalign_lib import _adapters, noise
from evoalign_lib.engines.local import Prompts
from evoalign_lib.engines.vllm import VLLMEngine
from evoalign_lib.rewards import Rewards
from evoalign_lib.update_rules import Member

# The longest has more than 300 tokens, because the prefix cache keeps whole blocks of 128.
ROWS = [{"prompt": p} for p in PROMPTS] + [{"prompt": p + " again and again" * 20} for p in PROMPTS]
LENGTH = 12
SETTINGS = {"enforce_eager": True, "max_num_seqs": 64}


def model(seed: int = 2, **config):
    """Return a model with biases, four heads, two key-value heads, and heads wide enough for vLLM on a CPU."""
    shape = {"hidden_size": 128, "intermediate_size": 160, "max_position_embeddings": 1024}
    return random_model(seed=seed, **shape | config)


# Layers that vLLM fuses (q and v, gate) and single ones, different ranks that vLLM does not have, a scaling.
LORA = {"r": 3, "lora_alpha": 7, "rank_pattern": {"down_proj": 5}, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
LORA |= {"target_modules": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]}


def linear():
    """Return the model with an untied head, of which the matrices of linear layers alone move."""
    _adapters.keep_linear(found := model(tie_word_embeddings=False))
    return found


def chat_tokenizer():
    """Return a copy of the tokenizer with a chat template; the tokenizer that all tests share has none."""
    tok = copy.deepcopy(tokenizer())
    tok.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    return tok


def adapted(**changed):
    """Return the model with an adapter of random weights."""
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
    """Apply the same update to each engine."""
    keys = np.array([noise.member_key(noise.run_key("move", seed), 1, i) for i in range(n)], np.uint64)
    for one in engines:
        one.update(keys, np.float32([0.01, -0.02, 0.03][:n]))
