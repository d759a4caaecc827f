"""The shipped bases: their names, tasks and loader, and the tokenizer that all families build on."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evoalign_lib.checks import choose

FAMILIES = ("A", "B", "C", "D", "H")
BASES = ("A0", "A1", "A2")
"""Family A's bases, which stand in for different model families."""
FILLER_BASES = ("H0",)
"""Family H's base, whose prompts say how long to think (see `tiny.countdown.dataset`)."""
QUESTION_BASES = ("B0", "B1", "B2")
"""Family B's bases (see `tiny.questions`)."""
REQUEST_BASES = ("C0",)
"""Family C's base (see `tiny.dialogues`)."""
SEQUENCE_BASES = ("D0",)
"""Family D's base (see `tiny.sequence`)."""
SHIPPED = BASES + FILLER_BASES + QUESTION_BASES + REQUEST_BASES + SEQUENCE_BASES
"""Every base that `load` knows."""
_TASKS = {"A": "countdown", "H": "countdown", "B": "conciseness", "C": "safety", "D": "sequence"}
END = "<|im_end|>"
_PAD = "<|endoftext|>"
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def task_of(base: str) -> str:
    """Return the task that a shipped base was trained on. Raises KeyError for any other model.

    >>> task_of("B0")
    'conciseness'
    """
    if base not in SHIPPED:
        raise KeyError(base)
    return _TASKS[base[0]]


def bases_folder() -> Path:
    """Return the package's folder of shipped bases."""
    return Path(__file__).resolve().parent / "bases"


def load(base: str) -> tuple[Any, Any]:
    """Load a shipped base.

    Args:
        base: one of `SHIPPED`. The bases of a family, such as "A0", "A1" and "A2", differ in their initialisation and
            data order.

    Returns:
        The model (float32, evaluation mode) and its tokenizer.

    Raises:
        ValueError: an unknown base.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    choose("base", base, SHIPPED)
    folder = bases_folder() / base
    with without_bars():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


@contextmanager
def without_bars() -> Iterator[None]:
    """Suppress transformers' progress bars while loading; for half a megabyte they would only clutter notebooks."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def split_range(split: str, sizes: Mapping[str, int]) -> slice:
    """Return the slice of a split among consecutive splits of these sizes. Raises ValueError for an unknown one."""
    choose("split", split, sizes)
    names = list(sizes)
    first = sum(sizes[name] for name in names[: names.index(split)])
    return slice(first, first + sizes[split])


def around(tok: Any) -> list[str]:
    """Return the text that the chat template puts before and after a user's message."""
    message = [{"role": "user", "content": "{}"}]
    return tok.apply_chat_template(message, tokenize=False, add_generation_prompt=True).split("{}")


def byte_tokenizer(pieces: Iterable[str]) -> Any:
    """Return a tokenizer with 256 bytes, the special tokens, the chat template, and one token for each piece."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([_PAD, "<|im_start|>", END])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, pad_token=_PAD, padding_side="left", model_max_length=256
    )
    wrapped.chat_template = _CHAT_TEMPLATE
    wrapped.add_tokens([AddedToken(piece, normalized=False) for piece in dict.fromkeys(pieces)])
    return wrapped
