"""The tiny world: small models that this project trains and ships, and that are used exactly like real ones.

A base is a model of about 0.14 M parameters with the Qwen2 architecture and a byte-level tokenizer. The tokenizer uses
one token for each fixed stretch of a prompt, so that a tiny model reads the same prompt text as a real one in a dozen
tokens; anything else falls back to bytes. Families A and H are in `countdown`, family B in `questions`, family C in
`dialogues`, family D in `sequence`.
"""

from evoalign_lib.tiny._recipe import STEPS, describe, recipe  # noqa: F401
from evoalign_lib.tiny.base import (  # noqa: F401
    BASES,
    END,
    FILLER_BASES,
    QUESTION_BASES,
    REQUEST_BASES,
    SEQUENCE_BASES,
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
