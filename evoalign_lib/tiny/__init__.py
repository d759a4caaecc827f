"""The tiny world: small models that this project trains itself and ships, with the protocol of real ones.

A base is a Qwen2-architecture model of about 0.14 M parameters with a byte-level tokenizer. The tokenizer spends one
token on each fixed stretch of a prompt, so that a tiny model reads exactly the prompt text of a real one in a dozen
tokens; anything else falls back to bytes. `countdown` has families A and H, `questions` has family B,
`dialogues` has family C.
"""

from evoalign_lib.tiny._recipe import STEPS, describe, recipe  # noqa: F401
from evoalign_lib.tiny.base import (  # noqa: F401
    BASES,
    END,
    FILLER_BASES,
    QUESTION_BASES,
    REQUEST_BASES,
    SHIPPED,
    bases_folder,
    load,
    task_of,
)
from evoalign_lib.tiny.countdown import (  # noqa: F401
    AUTHORS,
    FILLER_STEPS,
    FIXED,
    MAX_COMPLETION_LENGTH,
    PROBLEMS,
    SKILL_NAMES,
    answer,
    dataset,
    expressions,
    measure,
    problems,
    right_answers,
    skill_set,
    text,
    tokenizer,
)
