"""Reward and cost models: sequence classifiers that score a completion to a prompt with one number.

`RewardModel` runs the model in this process; `HTTPScorer` queries a server (`evoalign_lib.scoring_server`) that holds
it elsewhere. Both can be called as a scorer, `scorer(prompts, completions)`, and as a reward function of the trainers
(`evoalign_lib.rewards`). Both raise an error when they cannot score; neither returns zeros instead.

Prompt and completion are separate texts, and a *text format* says how they are joined for the model. Text is never
split at turn markers, since a completion may contain them. Special tokens inside either text, and other tokens that
open a turn in the chat template, are broken up by a space (`</s>` becomes `< /s>`), so that nothing a policy writes
can end its turn or begin another. The formats:

- `beaver`: `BEGINNING OF CONVERSATION: USER: {prompt} ASSISTANT:{completion}` and the end token, as Safe-RLHF trains
  its scorers (Dai et al., arXiv 2310.12773).
- `chat`: both messages rendered by the tokenizer's chat template, as most reward models are trained.
- `continued`: the prompt as a policy reads it (the chat template up to the start of the assistant's turn), the
  completion and the end token, as the scorers of the tiny world are trained.
- `pair`: the tokenizer's own encoding of two texts, as cross-encoders are trained.

A decoder's score is read at its last token, an encoder's where its architecture reads it. Weights are loaded only from
safetensors files, and no code from the Hub is run.
"""

import atexit
import hashlib
import json
import math
import os
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import evoalign_lib
from evoalign_lib import _bounded_http, _score_models, chats, models, tasks
from evoalign_lib.checks import address, as_told, choose, key_in, positive, require, whole_number
from evoalign_lib.files import canonical_json

TEXTS = ("beaver", "chat", "continued", "pair")
"""Names of the text formats, described in the module's docstring."""
TRUNCATIONS = ("right", "refuse")
"""What to do with a text that is too long."""

TextFormat = Callable[[str, str], str]
"""A function that joins (prompt, completion) into one text, special tokens included as the tokenizer writes them."""


class ScorerError(RuntimeError):
    """A scorer could not score; the message says why and what to do."""


class ScorerGone(ScorerError):
    """A server cannot score anything: no answer, an unreadable one, a different model, or no access."""


class _Scorer:
    """Base class of the scorers: makes `score` callable as a scorer and as a reward function.

    Attributes:
        name: the scorer's name in logs and records.
        counts: event counts of this process so far, by kind; each class lists its kinds.
    """

    name: str
    counts: Counter[str]

    @property
    def __name__(self) -> str:
        """The name under which trainers log this reward function."""
        return self.name

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        request: Sequence[str] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float]:
        """Score completions, as a reward function or as a scorer of `tasks.safety.Objective`.

        Args:
            prompts: (completions,) the prompt of each completion.
            completions: (completions,) texts, or conversations, whose assistant messages are scored.
            request: (completions,) what the user wrote, used instead of prompts. Rows of `tasks.safety.dataset` have
                this column, since their prompts are already rendered for the policy.
            log_metric: if given, receives the share of truncated texts as "truncated".
            **columns: further dataset columns, ignored.
        """
        before = self.counts["truncated"]
        found = self.score(prompts if request is None else request, completions).tolist()
        if log_metric is not None and found:
            log_metric("truncated", (self.counts["truncated"] - before) / len(found))
        return found


# -------------------------------------------------------------------------------------------------------- this process


class Encoded(NamedTuple):
    """Prompts and completions, tokenised for a model."""

    rows: list[list[int]]
    """Token ids of each text."""
    types: list[list[int]] | None
    """Token type ids of text pairs: which of the two texts each token belongs to."""
    tally: dict[str, int]
    """Counts to add to the scorer's: texts, and how many of them were truncated or broken."""
    completions: list[str]


class RewardModel(_Scorer):
    """A reward or cost model in this process.

    On a GPU it cannot be used from forked processes, since CUDA does not work in them; serve the model instead. On the
    CPU it may be forked freely; the processes share its weights.

    Args:
        model: a sequence classifier with one label, given by name, folder or object; or a score model in the layout of
            Safe-RLHF (`PKU-Alignment/beaver-7b-unified-reward`, `-cost`, ...), given by name or folder. Its config.json
            decides which it is.
        tokenizer: the model's tokenizer; None: the one saved with the model.
        text: one of the `TEXTS`, or a function (`TextFormat`). None: "beaver" for a model in Safe-RLHF's layout; other
            models have no default, since a wrong format gives numbers that look right.
        batch_size: texts per forward pass; texts of similar length are batched together.
        max_length: maximum number of tokens of a text; None: what the model can read.
        truncation: what to do with longer texts: "right" cuts off their end (with "beaver" including the end token, as
            in the published training) and counts them; "refuse" raises an error.
        device: where to put the model; None: the CPU, or for an object the device it is on.
        dtype: a torch dtype or its name; None: float32 on the CPU and the dtype of the files on a GPU; an object keeps
            its own.
        name: the name in logs; None: the last part of the model's name.

    Attributes:
        counts: "texts", "truncated" and "broken" (texts in which special tokens were broken up).

    Raises:
        ValueError: no such model; weights that are not safetensors; a model without a trained head (another kind of
            model) or with several outputs; no text format, or one that the tokenizer does not support; or a max_length
            beyond what the model can read.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        text: str | TextFormat | None = None,
        batch_size: int = 64,
        max_length: int | None = None,
        truncation: str = "right",
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        name: str | None = None,
    ):
        self.batch_size = whole_number("batch_size", batch_size)
        choose("truncation", truncation, TRUNCATIONS)
        self.truncation = truncation
        dtype = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
        floats = dtype is None or isinstance(dtype, torch.dtype) and dtype.is_floating_point
        require(floats, f"dtype={dtype!r} is not a floating-point dtype: pass one such as 'float16'.")
        self._folder, origin = None, model
        if isinstance(model, (str, os.PathLike)):
            self._folder = _score_models.folder_of(str(model))
            on_cpu = torch.device(device or "cpu").type == "cpu"
            model = _score_models.load(self._folder, str(origin), dtype or (torch.float32 if on_cpu else "auto"))
            dtype = None  # the weights have it already; the normaliser of the scores stays float32
        else:
            origin = models.name_of(model) or type(model).__name__
        self.name = name or Path(str(origin)).name
        self.tokenizer = _score_models.tokenizer_of(tokenizer, self._folder or models.name_of(model))
        self.text = _checked_text(text, isinstance(model, _score_models.ScoreModel), self.tokenizer)
        self.max_length = _checked_length(max_length, model.config, self.tokenizer)
        moved = {"device": device, "dtype": dtype}
        self.model = model.to(**{name: value for name, value in moved.items() if value is not None}).eval()
        self.counts = Counter(texts=0, truncated=0, broken=0)
        self._pid = os.getpid()
        if not isinstance(self.model, _score_models.ScoreModel):
            _score_models.check_labels(self.model.config)
        self._head = _score_models.decoder_head(self.model)
        self._shift = float(getattr(model.config, "shift", 0.0))
        self._pad = next((i for i in (model.config.pad_token_id, self.tokenizer.pad_token_id) if i is not None), 0)
        # turn markers need not be special tokens: any added token in the chat template that is not a word counts as one
        opening = tasks.chat_prompt("x", self.tokenizer) if self.text in ("chat", "continued") else ""
        added = self.tokenizer.added_tokens_decoder.values()
        special = {t.content for t in added if t.special or t.content in opening and not t.content.strip().isalnum()}
        marks = sorted((t for t in special | set(self.tokenizer.all_special_tokens) if len(t.strip()) > 1), key=len)
        self._marks = re.compile("|".join(map(re.escape, reversed(marks)))) if marks else None
        self._openings: dict[str, str] = {}

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.model.parameters()).device

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that determines a score: digests of weights and tokenizer, format, limit, dtype, library version.

        The weights' digest is `models.origin_digest` for a model loaded from files, and `models.base_digest` for an
        object.
        """
        weights = models.origin_digest(self._folder) if self._folder else models.base_digest(self.model)
        return {
            "name": self.name,
            "weights": weights,
            "tokenizer": models.tokenizer_digest(self.tokenizer),
            "text": self.text if isinstance(self.text, str) else f"{self.text.__module__}.{self.text.__qualname__}",
            "max_length": self.max_length,
            "truncation": self.truncation,
            "dtype": str(next(self.model.parameters()).dtype).removeprefix("torch."),
            "version": evoalign_lib.__version__,
        } | ({"shift": self._shift} if self._shift else {})

    def score(self, prompts: Sequence[Any], completions: Sequence[Any]) -> np.ndarray:
        """Return a score for each completion.

        A score depends only on its own two texts, except that the other texts in the batch can change its last bits.

        Args:
            prompts: (completions,) texts, or conversations of one user message.
            completions: (completions,) texts, or conversations, whose assistant messages are scored.

        Returns:
            Float64 (completions,). If the model's configuration has a `shift`, as for the tiny world's cost models, it
            is subtracted.

        Raises:
            ValueError: columns of different lengths, a text that is too long (truncation="refuse"), or one that ends
                in the model's padding token.
            TypeError: a prompt or completion in another form.
            ScorerError: a score that is not finite, or a model on a GPU used from a forked process.
        """
        return self.score_encoded(self.encode(prompts, completions))

    def encode(self, prompts: Sequence[Any], completions: Sequence[Any]) -> Encoded:
        """Return texts tokenised as `score` reads them; same arguments and errors as there.

        Models with the same tokenizer, format and max_length may share the result.
        """
        asked, texts = _texts(prompts, completions)
        if not texts:
            return Encoded([], None, {}, [])
        given = list(zip(asked, texts, strict=True))
        pairs = [(self._unmarked(prompt), self._unmarked(completion)) for prompt, completion in given]
        pair = self.text == "pair"
        # the text of any other format contains its special tokens already
        plain = {"add_special_tokens": pair or self.text == "beaver", "return_token_type_ids": None if pair else False}
        plain |= {"return_attention_mask": False, "verbose": False}
        joined = zip(*pairs, strict=True) if pair else [[self._joined(*both) for both in pairs]]
        tokens = self.tokenizer(*map(list, joined), **plain)
        rows, types = tokens["input_ids"], tokens.get("token_type_ids")
        if self.text in ("beaver", "continued"):
            # some tokenizers append the end token themselves; one from the texts would have been broken up
            end = [self.tokenizer.eos_token_id]
            rows = [row if row[-1:] == end else row + end for row in rows]
        for text in [text for text, row in zip(texts, rows, strict=True) if not row]:
            raise ValueError(f"the text of the completion {text!r:.200} has no tokens: correct the format `text`.")
        long = [i for i, row in enumerate(rows) if len(row) > self.max_length]
        if long and self.truncation == "refuse":
            what = f"{len(long)} texts are longer than {self.max_length} tokens, the first has {len(rows[long[0]])}"
            raise ValueError(f"{what}: generate fewer tokens, or set truncation='right'.")
        for i in long if pair else ():
            cut = self.tokenizer(*pairs[i], truncation="longest_first", max_length=self.max_length, **plain)
            rows[i] = cut["input_ids"]  # keeps the special tokens
            if types is not None:
                types[i] = cut["token_type_ids"]
        rows = [row[: self.max_length] for row in rows]
        changed = sum(pair != before for pair, before in zip(pairs, given, strict=True))
        return Encoded(rows, types, {"texts": len(rows), "truncated": len(long), "broken": changed}, texts)

    def score_encoded(self, encoded: Encoded) -> np.ndarray:
        """Return the scores, float64 (completions,), of texts that `encode` returned; see `score`."""
        rows, types, tally, completions = encoded
        if not rows:
            return np.zeros(0)
        if self.device.type == "cuda" and os.getpid() != self._pid:
            remedy = (
                "start a server for it (evoalign serve-scorer) and pass its HTTPScorer, or put the model on the CPU"
            )
            raise ScorerError(f"{self.name!r} is on {self.device}, which a forked process cannot use: {remedy}.")
        self._check_ends(rows)
        scores = np.empty(len(rows))
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        with torch.inference_mode():
            for first in range(0, len(order), self.batch_size):
                batch = order[first : first + self.batch_size]
                scores[batch] = self._forward([rows[i] for i in batch], types and [types[i] for i in batch])
        for bad in np.flatnonzero(~np.isfinite(scores)):
            what = f"{self.name!r} gave {scores[bad]} for the completion {completions[bad]!r:.200}"
            raise ScorerError(f"{what}: use another dtype, such as bfloat16 or float32 instead of float16.")
        if tally["truncated"] and not self.counts["truncated"]:
            what = f"{self.name!r} reads {self.max_length} tokens at most, so the end of a longer text was cut off"
            warnings.warn(f"{what} (truncation='right'); such texts are counted as 'truncated'.", stacklevel=2)
        self.counts.update(tally)  # only now: texts of a failed batch are scored again, one by one
        return scores - self._shift

    # ---- texts to tokens

    def _joined(self, prompt: str, completion: str) -> str:
        if self.text == "beaver":
            return f"BEGINNING OF CONVERSATION: USER: {prompt} ASSISTANT:{completion}"
        if self.text == "chat":
            said = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
            return chats.rendered(self.tokenizer, said)
        if self.text != "continued":
            return self.text(prompt, completion)
        if prompt not in self._openings:  # the same prompt comes with many completions
            self._openings[prompt] = tasks.chat_prompt(prompt, self.tokenizer)
        return self._openings[prompt] + completion

    def _unmarked(self, text: str) -> str:
        return text if self._marks is None else self._marks.sub(lambda mark: mark[0][0] + " " + mark[0][1:], text)

    # ---- tokens to scores

    def _forward(self, rows: list[list[int]], types: list[list[int]] | None) -> np.ndarray:
        def filled(values: Iterable[list[int]], filler: int) -> torch.Tensor:
            tensors = [torch.tensor(value) for value in values]
            padded = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=filler)
            return padded.to(self.device)

        inputs = {"input_ids": filled(rows, self._pad), "attention_mask": filled(([1] * len(row) for row in rows), 0)}
        if self._head is None:
            extra = {"token_type_ids": filled(types, 0)} if types is not None else {}
            scores = self.model(**inputs, **extra).logits[:, 0]
        else:
            hidden = self.model.base_model(**inputs, use_cache=False).last_hidden_state
            last = inputs["attention_mask"].sum(1) - 1
            scores = self._head(hidden[torch.arange(len(rows), device=self.device), last])[:, 0]
        return scores.double().cpu().numpy()

    def _check_ends(self, rows: list[list[int]]) -> None:
        """Raise an error if transformers would not read the last token: the model may have been trained that way."""
        if self._head is None or isinstance(self.model, _score_models.ScoreModel):
            return  # an encoder pools in its own way, a score model goes by the attention mask
        padding = self.model.config.get_text_config().pad_token_id
        if padding is not None and any(row[-1] == padding for row in rows):
            what = (
                f"a text ends in token {padding}, the padding token of {self.name!r}, so transformers reads its score"
            )
            what += " one token earlier. If the model was trained that way, pass a format `text` that ends earlier"
            raise ValueError(f"{what}; if not, set another pad_token_id in its configuration.")


def _texts(prompts: Sequence[Any], completions: Sequence[Any]) -> tuple[list[str], list[str]]:
    """Return prompts and completions as texts; some of them may be conversations."""
    tasks.check_lengths(prompts=prompts, completions=completions)
    asked = []
    for prompt in prompts:
        match prompt:
            case str(text) | [{"role": "user", "content": str(text)}]:
                asked.append(text)
            case _:
                raise TypeError(f"a prompt must be a text or a conversation of one user message, got {prompt!r:.200}")
    return asked, [tasks.completion_text(completion) for completion in completions]


def _checked_text(text: str | TextFormat | None, beaver: bool, tokenizer: Any) -> str | TextFormat:
    """Return the checked text format; beaver: whether the model has Safe-RLHF's layout, which has a default."""
    known = text is not None or beaver
    require(known, f"no default text format for this model: pass the one it reads; text is one of {TEXTS}.")
    text = "beaver" if text is None else text
    if callable(text):
        return text
    choose("text", text, TEXTS)
    if text in ("chat", "continued") and not tokenizer.chat_template:
        raise ValueError(f"text={text!r} needs a chat template, but the tokenizer has none: pass another format.")
    if text in ("beaver", "continued") and tokenizer.eos_token_id is None:
        raise ValueError(f"text={text!r} ends in the end token, but the tokenizer has none: set tokenizer.eos_token.")
    return text


def _checked_length(max_length: int | None, config: Any, tokenizer: Any) -> int:
    able = getattr(config.get_text_config(), "max_position_embeddings", None)
    if max_length is not None:
        return whole_number("max_length", max_length, most=able, why="the model has no more positions")
    return int(min(able or 10**9, tokenizer.model_max_length or 10**9, 10**9))  # tokenizers without a limit say 10^30


def check(name: str, text: str | None = None, max_length: int | None = None) -> str:
    """Check arguments of `RewardModel`, as far as possible without the weights, and return the text format.

    Args:
        name: a folder, or a model on the Hub, whose configuration and tokenizer are fetched.
        text: as for `RewardModel`.
        max_length: as for `RewardModel`.

    Raises:
        ValueError: as for `RewardModel`.
    """
    config, architecture = _score_models.config_of(name, name)
    tokenizer = _score_models.tokenizer_of(None, name)
    _checked_length(max_length, config, tokenizer)
    return _checked_text(text, architecture.endswith(_score_models.SCORE_MODEL), tokenizer)


# ------------------------------------------------------------------------------------------------ as TRL's trainers do


class ModelReward:
    """A sequence classifier as a reward function that reads texts as TRL's `GRPOTrainer` does.

    Prompt and completion are concatenated without further special tokens; conversations are rendered by the chat
    template of the model's own tokenizer. Unlike `RewardModel`, it does not break up special tokens that a policy
    writes out.

    Args:
        model: a transformers sequence classifier with one label: an object, a folder or a name on the Hub, whose code
            is not run; a model given by name or folder is loaded in float32 on the CPU.
        tokenizer: the model's tokenizer; None: the one saved with the model.
        chat_template_kwargs: arguments of its chat template.

    Raises:
        ValueError: no such model; a model that is not a classifier, does not have exactly one label, or lacks weights;
            or no tokenizer.
    """

    rows = 32
    """Completions per forward pass."""

    def __init__(self, model: Any, tokenizer: Any = None, chat_template_kwargs: Mapping[str, Any] | None = None):
        folder = None
        if isinstance(model, (str, os.PathLike)):
            name, folder = str(model), _score_models.folder_of(str(model))
            model = _score_models.load(folder, name, torch.float32)
            own = isinstance(model, _score_models.ScoreModel)
            remedy = f"pass reward_models.RewardModel({name!r}) as the reward function"
            require(not own, f"model {name!r} is a score model of Safe-RLHF, which TRL cannot read: {remedy}.")
        else:
            name = getattr(model.config, "_name_or_path", "") or type(model).__name__
        _score_models.check_labels(model.config)
        self.__name__ = name.rstrip("/").split("/")[-1]
        self.model, self.template = model.eval(), dict(chat_template_kwargs or {})
        for opening in ("add_generation_prompt", "continue_final_message"):  # of a prompt, not of a whole conversation
            self.template.pop(opening, None)
        self.tokenizer = _score_models.tokenizer_of(tokenizer, folder or name)
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        # a decoder's score is read at the last token that is not padding
        model.config.get_text_config().pad_token_id = self.tokenizer.pad_token_id

    @torch.inference_mode()
    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        """Score completions, (completions,): texts, or messages if the prompts are messages."""
        texts = [self._joined(prompt, said) for prompt, said in zip(prompts, completions, strict=True)]
        how = {"return_tensors": "pt", "padding": True, "padding_side": "right", "add_special_tokens": False}
        scores: list[float] = []
        for first in range(0, len(texts), self.rows):
            inputs = self.tokenizer(text=texts[first : first + self.rows], **how).to(self.model.device)
            scores += self.model(**inputs).logits[:, 0].double().tolist()
        return scores

    def _joined(self, prompt: Any, said: Any) -> str:
        if isinstance(prompt, str):
            return prompt + said
        *before, last, written = chats.plain(prompt + said)
        if last["role"] == "assistant":  # the completion continues it
            said = [last | {"content": last["content"] + written["content"]}]
        else:
            said = [last, written]
        return chats.rendered(self.tokenizer, [*before, *said], **self.template)


def as_functions(
    rewards: Any, tokenizers: Any = None, chat_template_kwargs: Mapping[str, Any] | None = None
) -> list[Any]:
    """Return the reward functions, with every model wrapped in a `ModelReward`.

    Args:
        rewards: one reward or a list of them: functions, or models given by name, folder or object.
        tokenizers: the tokenizer of each model, one or a list of the same length; None: the one saved with the model.
        chat_template_kwargs: arguments of the models' chat templates.

    Raises:
        ValueError: not as many tokenizers as rewards, a tokenizer for a function, or what `ModelReward` raises.
    """
    several = isinstance(rewards, Sequence) and not isinstance(rewards, str)
    functions = list(rewards) if several else [rewards]
    given = [tokenizers] * (len(functions) if tokenizers is None else 1)
    given = list(tokenizers) if isinstance(tokenizers, (list, tuple)) else given
    what = f"reward_processing_classes has {len(given)} entries for {len(functions)} reward functions"
    require(len(given) == len(functions), f"{what}: pass one each, None for a function.")
    for i, (function, tokenizer) in enumerate(zip(functions, given, strict=True)):
        if isinstance(function, (str, os.PathLike, torch.nn.Module)):
            functions[i] = ModelReward(function, tokenizer, chat_template_kwargs)
        elif tokenizer is not None:
            what = f"reward_processing_classes has a tokenizer for {function!r:.100}, which is a function and uses none"
            raise ValueError(f"{what}: pass None instead.")
    return functions


# ----------------------------------------------------------------------------------------------------------- over HTTP

_FIRST_WAIT, _LONGEST_WAIT = 0.5, 8.0  # seconds


class HTTPScorer(_Scorer):
    """A reward or cost model behind a server of this library (`evoalign serve-scorer`).

    The constructor asks the server which model it holds. A later answer from another model, or in another text format,
    is an error, so scores of two models are never mixed. Connections are kept open, a set per process, so that a scorer
    may be forked and pickled.

    Args:
        url: address of the server, such as http://127.0.0.1:8100.
        name: the name in logs; None: the server's name for the model.
        timeout: seconds after which a request is abandoned, however slowly the server still answers.
        retries: how often a request is repeated after a time-out, a lost connection, an HTTP status of 500 or above, or
            a malformed answer. The waits are 0.5, 1, 2, 4, 8, 8, ... s, so that a server may restart meanwhile.
        batch_size: texts per request.
        api_key_env: the environment variable with the server's key, read at each request and never stored.

    Attributes:
        identity: the server's description of its model.
        counts: "texts", "truncated", "retries"; failures of single requests: "timeout", "connection", "http" (server
            errors), "malformed" (not JSON, or not one finite number per text), "identity", "refused" (other HTTP
            errors); and "failed", calls that ended in an error. All are counts of this process.

    Raises:
        ValueError: an invalid address; or a key that is missing or that no HTTP header can hold.
        ScorerGone: the server does not answer.
    """

    def __init__(
        self,
        url: str,
        name: str | None = None,
        *,
        timeout: float = 60.0,
        retries: int = 4,
        batch_size: int = 64,
        api_key_env: str | None = None,
    ):
        positive("timeout", timeout)
        self.url = address("url", url)
        self.timeout = float(timeout)
        self.api_key_env = api_key_env
        self.retries = whole_number("retries", retries, least=0)
        self.batch_size = whole_number("batch_size", batch_size)
        self.counts = Counter()
        self.identity = self._ask("GET", "/identity", None, _read_identity)
        self._fingerprint = fingerprint(self.identity)
        self.name = name or self.identity["name"]

    def score(self, prompts: Sequence[Any], completions: Sequence[Any]) -> np.ndarray:
        """Return the scores, float64 (completions,), bit for bit those of the server's model.

        Raises:
            ValueError: columns of different lengths.
            TypeError: a prompt or completion in another form.
            ScorerError: the server refused the texts, or failed on them in all retries.
            ScorerGone: the server cannot score anything.
        """
        asked, texts = _texts(prompts, completions)
        scores = np.zeros(len(texts))
        for first in range(0, len(texts), self.batch_size):
            part = slice(first, first + self.batch_size)
            body = json.dumps({"prompts": asked[part], "completions": texts[part]}).encode()
            n = len(texts[part])
            scores[part], cut = self._ask("POST", "/score", body, lambda answer, n=n: self._read_scores(answer, n))
            self.counts.update(texts=n, truncated=cut)
        return scores

    def _read_scores(self, answer: Any, n: int) -> tuple[list[float], int]:
        scores, cut = answer["scores"], answer["truncated"]
        if answer["identity"] != self._fingerprint:
            raise _OtherModel(f"its model is now {answer['identity']!r}, before it was {self._fingerprint!r}")
        numbers = type(scores) is list and {*map(type, scores)} <= {int, float} and all(map(math.isfinite, scores))
        if not numbers or len(scores) != n or type(cut) is not int or not 0 <= cut <= n:
            raise ValueError(f"not {n} finite numbers, or a wrong count truncated={cut!r}: {scores!r}")
        return scores, cut

    def _ask(self, method: str, path: str, body: bytes | None, read: Callable[[Any], Any]) -> Any:
        """Send a request, with retries, and return what `read` makes of the answer."""
        import httpx

        headers, key = {"Content-Type": "application/json"}, ""
        if self.api_key_env is not None:
            headers["Authorization"] = f"Bearer {(key := key_in(self.api_key_env))}"
        for attempt in range(self.retries + 1):
            if attempt:
                self.counts["retries"] += 1
                time.sleep(min(_FIRST_WAIT * 2 ** (attempt - 1), _LONGEST_WAIT))
            gone = True
            try:
                client = _client(self.url, self.timeout, os.getpid())
                answer = client.request(method, path, content=body, headers=headers)
                if answer.status_code < 300:
                    return read(answer.json())
                kind = "refused" if answer.status_code < 500 else "http"
                what, gone = f"HTTP {answer.status_code}: {answer.text}", answer.status_code in (401, 404)
            except httpx.TimeoutException as error:
                kind, what = "timeout", f"no answer within {self.timeout:g} s ({type(error).__name__})"
            except httpx.HTTPError as error:
                kind, what = "connection", f"{type(error).__name__}: {error}"
            except _OtherModel as error:
                kind, what = "identity", str(error)
            except (ValueError, LookupError, TypeError, RecursionError, OverflowError) as error:  # ValueError: no JSON
                kind, what = "malformed", f"an answer that does not come from evoalign serve-scorer: {error}"
            self.counts[kind] += 1
            if kind in ("identity", "refused"):
                break  # a retry would give the same
        self.counts["failed"] += 1
        told = as_told(what, key, 300)
        what = f"the scorer at {self.url} gave no scores ({attempt + 1} requests); the last failure: {told}"
        remedy = "Check that evoalign serve-scorer runs there with the model of this run"
        raise (ScorerGone if gone else ScorerError)(f"{what}. {remedy}.")


@lru_cache(maxsize=64)
def _client(url: str, timeout: float, process: int) -> Any:
    """Return the connections to a server, a set per process: on a shared one, two processes' requests would mix."""
    import httpx

    # no proxies from the environment: they are meant for the Internet, and would see the texts
    client = _bounded_http.client(httpx, timeout, base_url=url, trust_env=False)
    atexit.register(client.close)
    return client


class _OtherModel(Exception):
    """The server holds a different model than before."""


def _read_identity(answer: Any) -> dict[str, Any]:
    parts = [answer[key] for key in ("name", "weights", "tokenizer", "text")]
    if not all(isinstance(part, str) and part.isprintable() for part in parts):  # logs show them in terminals
        raise ValueError(f"not the identity of a scorer: {answer!r}")
    fingerprint(answer)  # raises for what is no JSON
    return answer


def fingerprint(identity: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits that identify a model regardless of its name; a server adds them to every answer."""
    decisive = {key: value for key, value in identity.items() if key != "name"}
    return hashlib.sha256(canonical_json(decisive).encode()).hexdigest()[:16]
