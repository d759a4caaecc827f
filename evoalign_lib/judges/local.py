"""Chat judges in this process: transformers, or vLLM."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from evoalign_lib._interrupts import interrupts_wait
from evoalign_lib.checks import choose, whole_number
from evoalign_lib.judges.answers import Answer, Keep, Messages


class _Encoder:
    """Turns messages into token ids by a chat template, and sees to it that texts hold no special token."""

    def __init__(self, tokenizer: Any, name: str):
        if not tokenizer.chat_template:
            raise ValueError(f"the tokenizer of {name!r} has no chat template: give a model that was trained to chat.")
        self.tokenizer, self.name = tokenizer, name
        added = tokenizer.added_tokens_decoder
        self.special = tuple(token.content for token in added.values() if token.special)
        # added tokens that are not special may have special ones inside
        self._marks = {i for i, token in added.items() if any(mark in token.content for mark in self.special)}

    def ids(self, messages: Messages) -> list[int] | None:
        """Return the token ids of a prompt; None where a text in it brings special tokens along."""
        ids, plain = (self._ids(m) for m in (messages, [{**message, "content": "x"} for message in messages]))
        found, expected = (Counter(i for i in row if i in self._marks) for row in (ids, plain))
        return ids if found == expected else None

    def _ids(self, messages: Messages) -> list[int]:
        from jinja2 import TemplateError

        from evoalign_lib import models

        try:
            text = models.rendered(self.tokenizer, list(messages), add_generation_prompt=True)
        except TemplateError as error:
            raise ValueError(
                f"the chat template of {self.name!r} refuses a system and a user message ({error}): take another judge."
            ) from error
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


class _Local:
    """What the backends in this process share: prompts are checked, and go through the model in batches."""

    model: str
    max_tokens: int
    batch_size: int
    _encoder: _Encoder
    _identity: dict[str, Any]

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Those of the tokenizer, which are broken in judged texts."""
        return self._encoder.special

    def identity(self) -> dict[str, Any]:
        """Return all that decides an answer, for the cache's keys and for records."""
        return dict(self._identity)

    def answers(self, conversations: Sequence[Messages], keep: Keep | None = None) -> list[Answer]:
        """Return an answer to each conversation, in their order.

        Args:
            conversations: messages each.
            keep: takes each answer that is no failure as soon as it is there.

        Raises:
            ValueError: the model's chat template takes no system message.
        """
        answers: dict[int, Answer] = {}
        waiting: dict[int, list[int]] = {}
        for i, messages in enumerate(conversations):
            ids, limit = self._encoder.ids(messages), self._context()
            if ids is None:
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
            with interrupts_wait():  # until all that is generated is kept
                for i, (text, n, cut) in zip(batch, done, strict=True):
                    answers[i] = Answer(text, len(waiting[i]), n, cut)
                    if keep is not None:
                        keep(i, answers[i])
        return [answers[i] for i in range(len(conversations))]

    def _context(self) -> int | None:
        """Return how many tokens prompt and answer may have."""
        raise NotImplementedError

    def _generate(self, prompts: list[list[int]]) -> list[tuple[str, int, bool]]:
        """Return (text, tokens, whether it reached max_tokens) of the greedy answer to each prompt."""
        raise NotImplementedError


class LocalChat(_Local):
    """A chat model in this process, decoded greedily by transformers.

    Every setting of the decoding is stated, and the model's own generation_config is not read but for its end tokens.
    The batch size is no part of the identity; in low precision, padding can turn a near-tie of two tokens.

    Args:
        model: a name, a folder, a shipped base or a model object, as for `models.load`.
        tokenizer: its tokenizer; None: the one saved with the model.
        device: where to compute, as torch names it.
        batch_size: prompts at once.
        max_tokens: of an answer.
        dtype: to load a model given by name in.

    Raises:
        ValueError: no such model, or one without a chat template.
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

        self.batch_size = whole_number("batch_size", batch_size)
        self.max_tokens = whole_number("max_tokens", max_tokens)
        choose("dtype", dtype, ("float32", "bfloat16", "float16"))
        named = isinstance(model, (str, os.PathLike))
        loaded, tokenizer = models.load(model, tokenizer, {"dtype": getattr(torch, dtype)} if named else None)
        self.model = models.name_of(loaded) or type(loaded).__name__
        self._encoder = _Encoder(tokenizer, self.model)
        digest = models.origin_digest(models.place(model)) if named else models.base_digest(loaded)
        ends = (loaded.generation_config.eos_token_id, loaded.config.get_text_config().eos_token_id)
        ids: set[int] = set()
        for value in (*ends, tokenizer.eos_token_id):
            ids |= set() if value is None else {value} if isinstance(value, int) else set(value)
        self._ends = sorted(ids)
        self._identity = {
            "backend": "transformers",
            "model": self.model,
            "digest": digest,
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "tokenizer": models.tokenizer_digest(self._encoder.tokenizer),
            "ends": self._ends,
            "max_tokens": self.max_tokens,
        }
        self._loaded = loaded.to(device)

    def _context(self) -> int | None:
        return getattr(self._loaded.config.get_text_config(), "max_position_embeddings", None)

    def _generate(self, prompts: list[list[int]]) -> list[tuple[str, int, bool]]:
        import torch
        from transformers import GenerationConfig

        tokenizer, width = self._encoder.tokenizer, max(map(len, prompts))
        ids = torch.full((len(prompts), width), tokenizer.pad_token_id)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):  # padded on the left
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        settings = GenerationConfig(
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            max_new_tokens=self.max_tokens,
            eos_token_id=self._ends,
            pad_token_id=tokenizer.pad_token_id,
        )
        # generate() fills what the settings leave open from the model's own, such as a list of forbidden words
        own, device = self._loaded.generation_config, self._loaded.device
        try:
            self._loaded.generation_config = GenerationConfig()
            with torch.inference_mode():
                new = self._loaded.generate(
                    input_ids=ids.to(device), attention_mask=mask.to(device), generation_config=settings
                )[:, width:].tolist()
        finally:
            self._loaded.generation_config = own
        out = []
        for row in new:
            n = next((i for i, token in enumerate(row) if token in self._ends), None)
            text = tokenizer.decode(row[:n], skip_special_tokens=True)
            out.append((text, len(row) if n is None else n + 1, n is None))
        return out


class VLLMChat(_Local):
    """A chat model in vLLM in this process, decoded greedily, every setting of the decoding stated.

    Args:
        model: a folder or a name on the Hub.
        max_tokens: of an answer.
        engine: further arguments of `vllm.LLM`, such as dtype, max_model_len or tensor_parallel_size.

    Raises:
        ImportError: vLLM is not installed.
        ValueError: a model without a chat template.
    """

    batch_size = 256  # answers are kept after each batch; vLLM itself decides how many it decodes at once

    def __init__(self, model: str, max_tokens: int = 512, **engine: Any):
        from evoalign_lib import models
        from evoalign_lib.engines.vllm import import_vllm, prepare_process

        self.model, self.max_tokens = str(model), whole_number("max_tokens", max_tokens)
        try:
            vllm = import_vllm()
        except ImportError as error:
            raise ImportError(
                f"the judge {self.model!r} needs vLLM: pip install -e '.[gpu]', or take LocalChat, or an Endpoint."
            ) from error
        prepare_process()
        place = models.place(self.model)
        safe = {"trust_remote_code": False, "load_format": "safetensors"}
        self._llm = vllm.LLM(model=place, seed=0, **safe, **engine)
        self._encoder = _Encoder(self._llm.get_tokenizer(), self.model)
        self._identity = {
            "backend": "vllm",
            "model": self.model,
            "digest": models.origin_digest(place),
            "engine": {name: str(value) for name, value in engine.items()},
            "tokenizer": models.tokenizer_digest(self._encoder.tokenizer),
            "max_tokens": self.max_tokens,
        }

    def _context(self) -> int | None:
        return self._llm.llm_engine.model_config.max_model_len

    def _generate(self, prompts: list[list[int]]) -> list[tuple[str, int, bool]]:
        from vllm import SamplingParams

        from evoalign_lib.engines.vllm import STATED

        # vLLM adds the end tokens of the model's generation_config, and with given parameters nothing else of it
        greedy = SamplingParams(temperature=0.0, max_tokens=self.max_tokens, **STATED)
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        done = [request.outputs[0] for request in self._llm.generate(asked, greedy, use_tqdm=False)]
        # vLLM's own text leaves out the bytes of a character that was cut off: decoded here, as `LocalChat` does
        decode = self._llm.get_tokenizer().decode
        texts = [decode(list(output.token_ids), skip_special_tokens=True) for output in done]
        lengths = [(len(output.token_ids), output.finish_reason == "length") for output in done]
        return [(text, *length) for text, length in zip(texts, lengths, strict=True)]
