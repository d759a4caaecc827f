"""Backends for chat judges in this process, by transformers or vLLM."""

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from evoalign_lib import chats
from evoalign_lib._interrupts import interrupts_wait
from evoalign_lib.checks import choose, whole_number
from evoalign_lib.judges.answers import Answer, Keep, Messages


class _Local:
    """Base class of the backends in this process: checks prompts and passes them to the model in batches.

    A subclass has `_limit`, the most tokens in prompt and answer together (None: no limit), and `_generate(prompts)`.
    Prompts are lists of token ids; for each one it returns the ids of the greedy answer, and whether the answer reached
    max_tokens.
    """

    batch_size: int
    _limit: int | None

    def __init__(self, model: str, tokenizer: Any, max_tokens: int, **identity: Any):
        if not tokenizer.chat_template:
            raise ValueError(f"the tokenizer of {model!r} has no chat template: pass a model that was trained to chat.")
        from evoalign_lib import models

        self.model, self.tokenizer, self.max_tokens = model, tokenizer, whole_number("max_tokens", max_tokens)
        made_by = {"tokenizer": models.tokenizer_digest(tokenizer), "max_tokens": max_tokens}
        self._identity = {"model": model} | made_by | identity
        added = tokenizer.added_tokens_decoder
        self.special_tokens = tuple(token.content for token in added.values() if token.special)
        # added tokens that are not special may contain special ones
        self._marks = {i for i, t in added.items() if any(mark in t.content for mark in self.special_tokens)}

    def identity(self) -> dict[str, Any]:
        """Return everything that determines an answer, for the cache's keys and for records."""
        return dict(self._identity)

    def answers(self, conversations: Sequence[Messages], keep: Keep | None = None) -> list[Answer]:
        """Return an answer to each conversation, in their order.

        Args:
            conversations: lists of messages.
            keep: called with each answer that is not a failure as soon as it is generated.

        Raises:
            ValueError: the model's chat template does not accept a system message.
        """
        answers: dict[int, Answer] = {}
        waiting: dict[int, list[int]] = {}
        for i, messages in enumerate(conversations):
            ids, limit = self._ids(messages), self._limit
            if self._special(ids) != self._special(self._ids([{**message, "content": "x"} for message in messages])):
                answers[i] = Answer(None, 0, 0, error="special token", detail="a text holds a special token")
            elif limit is not None and len(ids) + self.max_tokens > limit:
                detail = f"{len(ids)} tokens and {self.max_tokens} for the answer do not fit into {limit}"
                answers[i] = Answer(None, 0, 0, error="too long", detail=detail)
            else:
                waiting[i] = ids
        indices = list(waiting)
        for first in range(0, len(indices), self.batch_size):
            batch = indices[first : first + self.batch_size]
            done = self._generate([waiting[i] for i in batch])
            with interrupts_wait():  # until all generated answers are kept
                for i, (ids, cut) in zip(batch, done, strict=True):
                    text = self.tokenizer.decode(ids if cut else ids[:-1], skip_special_tokens=True)
                    answers[i] = Answer(text, len(waiting[i]), len(ids), cut)
                    if keep is not None:
                        keep(i, answers[i])
        return [answers[i] for i in range(len(conversations))]

    def _ids(self, messages: Messages) -> list[int]:
        """Return the token ids of a prompt, rendered by the chat template."""
        from jinja2 import TemplateError

        try:
            text = chats.rendered(self.tokenizer, list(messages), add_generation_prompt=True)
        except TemplateError as error:
            raise ValueError(
                f"the chat template of {self.model!r} does not accept a system and a user message ({error}): pass "
                "another judge."
            ) from error
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _special(self, ids: Sequence[int]) -> Counter[int]:
        return Counter(i for i in ids if i in self._marks)


class LocalChat(_Local):
    """A chat model in this process, decoded greedily by transformers.

    Every decoding setting is explicit; only the end tokens are taken from the model's own generation_config. The batch
    size is not part of the identity, although padding in low precision can flip a near-tie between two tokens.

    Args:
        model: a name, a folder, a shipped base or a model object, as for `models.load`.
        tokenizer: its tokenizer; None: the one saved with the model.
        device: torch device.
        batch_size: prompts per batch.
        max_tokens: most tokens in an answer.
        dtype: in which a model given by name is loaded.

    Raises:
        ValueError: the model does not exist, or has no chat template.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        device: str = "cpu",
        batch_size: int = 8,
        max_tokens: int = 512,
        dtype: str = "float32",
    ):
        import torch

        from evoalign_lib import models
        from evoalign_lib.engines.base import _eos_ids

        self.batch_size = whole_number("batch_size", batch_size)
        choose("dtype", dtype, ("float32", "bfloat16", "float16"))
        named = isinstance(model, (str, os.PathLike))
        loaded, tokenizer = models.load(model, tokenizer, {"dtype": getattr(torch, dtype)} if named else None)
        self._ends = _eos_ids(loaded, tokenizer)
        digest = models.origin_digest(models.place(model)) if named else models.base_digest(loaded)
        own = {"digest": digest, "dtype": str(loaded.dtype).removeprefix("torch."), "ends": self._ends}
        called = models.name_of(loaded) or type(loaded).__name__
        super().__init__(called, tokenizer, max_tokens, backend="transformers", **own)
        self._loaded, self._pads = loaded.to(device), False  # whether it is known that padding changes nothing
        self._limit = getattr(loaded.config.get_text_config(), "max_position_embeddings", None)

    def _generate(self, prompts: list[list[int]]) -> list[tuple[list[int], bool]]:
        import torch

        from evoalign_lib.engines import agreement

        pad, width = self.tokenizer.pad_token_id, max(map(len, prompts))
        ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        if not self._pads and not mask.all():
            agreement.check_padding(self._loaded, ids.numpy(), mask.numpy(), pad, self.max_tokens)
            self._pads = True
        ends = {"eos_token_id": self._ends, "pad_token_id": pad}
        rows = agreement.by_transformers(self._loaded, ids, mask, self.max_tokens, **ends).tolist()
        lengths = [next((n for n, token in enumerate(row, 1) if token in self._ends), None) for row in rows]
        return [(row[:n], n is None) for row, n in zip(rows, lengths, strict=True)]


class VLLMChat(_Local):
    """A chat model in this process, decoded greedily by vLLM, with every decoding setting explicit.

    Args:
        model: a folder or a name on the Hub.
        max_tokens: most tokens in an answer.
        engine: further arguments of `vllm.LLM`, such as dtype, max_model_len or tensor_parallel_size.

    Raises:
        ImportError: vLLM is not installed.
        ValueError: the model has no chat template.
    """

    batch_size = 256  # answers are kept after each batch; vLLM itself decides how many it decodes at once

    def __init__(self, model: str, max_tokens: int = 512, **engine: Any):
        from evoalign_lib import models
        from evoalign_lib.engines.vllm import import_vllm, prepare_process

        vllm = import_vllm()
        prepare_process()
        place = models.place(str(model))
        safe = {"trust_remote_code": False, "load_format": "safetensors"}
        self._llm = vllm.LLM(model=place, seed=0, **safe, **engine)
        self._limit = self._llm.llm_engine.model_config.max_model_len
        own = {"digest": models.origin_digest(place), "engine": {name: str(value) for name, value in engine.items()}}
        super().__init__(str(model), self._llm.get_tokenizer(), max_tokens, backend="vllm", **own)

    def _generate(self, prompts: list[list[int]]) -> list[tuple[list[int], bool]]:
        from vllm import SamplingParams

        from evoalign_lib.engines.vllm import STATED

        # given parameters, vLLM takes only the end tokens from the model's generation_config
        greedy = SamplingParams(temperature=0.0, max_tokens=self.max_tokens, **STATED)
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        # vLLM's own text drops the bytes of a character that was cut off; its tokens keep them
        done = [request.outputs[0] for request in self._llm.generate(asked, greedy, use_tqdm=False)]
        return [(list(output.token_ids), output.finish_reason == "length") for output in done]
