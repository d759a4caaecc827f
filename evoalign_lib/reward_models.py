"""Reward and cost models: sequence classifiers that give a completion to a prompt one number.

`RewardModel` computes in this process, `HTTPScorer` asks a server (`evoalign_lib.scoring_server`) that holds the model
elsewhere. Both are called in the same two ways: as a scorer, `scorer(prompts, completions)`, and as a reward function
of the trainers (`evoalign_lib.rewards`). Both raise where they cannot score; none gives a zero instead.

Prompt and completion are two texts, and a *text format* says how the model reads them as one. Nothing is ever split at
turn markers, which a completion may contain. Special tokens that stand in either text, and others that begin turns in
the chat template, are broken by a blank (`</s>` becomes `< /s>`): what a policy writes cannot end its turn, nor begin
another. The formats:

- `beaver`: `BEGINNING OF CONVERSATION: USER: {prompt} ASSISTANT:{completion}` and the end token, as Safe-RLHF trains
  its scorers (Dai et al., arXiv 2310.12773).
- `chat`: both messages by the tokenizer's chat template, as most reward models are trained.
- `continued`: the prompt as a policy reads it (the chat template up to where the assistant answers), the completion and
  the end token, as the scorers of the tiny world are trained.
- `pair`: the tokenizer's encoding of two texts, as cross-encoders are trained.

The score of a decoder is read at its last token, that of an encoder where its architecture reads it. Weights come from
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
from evoalign_lib import _score_models, models, tasks
from evoalign_lib.checks import address, choose, key_in, positive, whole_number
from evoalign_lib.files import canonical_json

TEXTS = ("beaver", "chat", "continued", "pair")
"""Text formats by name; see the module's text."""
TRUNCATIONS = ("right", "refuse")
"""What is done about a text that is too long."""

TextFormat = Callable[[str, str], str]
"""What makes one text of (prompt, completion), special tokens included as the tokenizer writes them."""


class ScorerError(RuntimeError):
    """A scorer gave no scores; the message says why and what to do."""


class ScorerGone(ScorerError):
    """A server gives no scores whatever it is asked: no answer, none that can be read, another model, or no access."""


class _Scorer:
    """What all scorers share: their `score`, called in two ways.

    Attributes:
        name: for logs and records.
        counts: what happened so far in this process, by kind; each class says which kinds.
    """

    name: str
    counts: Counter[str]

    @property
    def __name__(self) -> str:
        """What trainers call a reward function."""
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
            prompts: (completions,) what each answers.
            completions: (completions,) texts, or conversations, whose assistant messages are scored.
            request: (completions,) what the user wrote. Rows of `tasks.safety.dataset` have this column, since their
                prompts are rendered for the policy already: it is read in the place of prompts.
            log_metric: where given, the share of texts that were cut is logged as "truncated".
            **columns: further dataset columns, not used.
        """
        before = self.counts["truncated"]
        found = self.score(prompts if request is None else request, completions).tolist()
        if log_metric is not None and found:
            log_metric("truncated", (self.counts["truncated"] - before) / len(found))
        return found


# -------------------------------------------------------------------------------------------------------- this process


class Encoded(NamedTuple):
    """Prompts and completions as a model reads them."""

    rows: list[list[int]]
    """Token ids of each text."""
    types: list[list[int]] | None
    """Of a pair, which of the two texts each token belongs to."""
    tally: dict[str, int]
    """What is to be counted: texts, and those that were truncated or changed."""
    completions: list[str]


class RewardModel(_Scorer):
    """A reward or cost model in this process.

    Not made for forked processes where it lies on a GPU: CUDA does not work in them; serve it then. On a CPU it may be
    forked as often as needed, its weights are shared.

    Args:
        model: a sequence classifier with one label, given by name, folder or object; or a score model in the layout of
            Safe-RLHF (`PKU-Alignment/beaver-7b-unified-reward`, `-cost`, ...), given by name or folder. Its config.json
            decides which it is.
        tokenizer: its tokenizer; None: the one saved with the model.
        text: a format of `TEXTS`, or a function (`TextFormat`). None: "beaver" for a model in that layout; other models
            have no default, since a wrong format gives numbers that look right.
        batch_size: texts in one forward pass; texts of similar length go together.
        max_length: tokens of a text at most; None: what the model can read.
        truncation: of longer texts: "right" leaves out their end (with "beaver" the end token goes with it, as in the
            published training) and counts them; "refuse" raises.
        device: None: the CPU, or where the object lies.
        dtype: a torch dtype or its name; None: float32 on a CPU, what the files hold on a GPU; an object stays as is.
        name: for logs; None: the last part of the model's name.

    Attributes:
        counts: "texts", "truncated" and "broken" (texts in which special tokens were broken).

    Raises:
        ValueError: no such model; weights that are not safetensors; a head that was not trained (another kind of
            model), or has several outputs; no text format, or one that the tokenizer cannot make; or a max_length that
            the model cannot read.
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
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"dtype={dtype!r} is no floating-point dtype: give one such as 'float16'.")
        self._folder, origin = None, model
        if isinstance(model, (str, os.PathLike)):
            self._folder = _score_models.folder_of(str(model))
            on_cpu = torch.device(device or "cpu").type == "cpu"
            model = _score_models.load(self._folder, str(origin), dtype or (torch.float32 if on_cpu else "auto"))
            dtype = None  # that of the weights; what normalises scores stays float32
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
        # marks of turns need not be special tokens: all but words that the chat template writes are taken for such
        opening = tasks.chat_prompt("x", self.tokenizer) if self.text in ("chat", "continued") else ""
        added = self.tokenizer.added_tokens_decoder.values()
        special = {t.content for t in added if t.special or t.content in opening and not t.content.strip().isalnum()}
        marks = sorted((t for t in special | set(self.tokenizer.all_special_tokens) if len(t.strip()) > 1), key=len)
        self._marks = re.compile("|".join(map(re.escape, reversed(marks)))) if marks else None
        self._openings: dict[str, str] = {}

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return next(self.model.parameters()).device

    @cached_property
    def identity(self) -> dict[str, Any]:
        """All that decides a score: digests of weights and tokenizer, format, limit, dtype, and this library's version.

        The weights' digest is `models.origin_digest` for a model that was loaded here, and `models.base_digest` for an
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

        A score depends on its own two texts alone, but for the last bits: what else is in a batch moves them.

        Args:
            prompts: (completions,) texts, or conversations of one user message.
            completions: (completions,) texts, or conversations, whose assistant messages count.

        Returns:
            Float64 (completions,); where the model's configuration has a `shift`, as those of the tiny world's cost
            models do, that is subtracted.

        Raises:
            ValueError: columns of different lengths, a text that is too long (truncation="refuse"), or one that ends
                in the token that the model takes for padding.
            TypeError: a prompt or completion of another form.
            ScorerError: a score that is not finite, or a forked process and a GPU.
        """
        return self.score_encoded(self.encode(prompts, completions))

    def encode(self, prompts: Sequence[Any], completions: Sequence[Any]) -> Encoded:
        """Return texts as the tokens that `score` reads; arguments and errors as there.

        Models that read alike, by the same tokenizer, format and max_length, may share them.
        """
        asked, texts = _texts(prompts, completions)
        if not texts:
            return Encoded([], None, {}, [])
        given = list(zip(asked, texts, strict=True))
        pairs = [(self._unmarked(prompt), self._unmarked(completion)) for prompt, completion in given]
        pair = self.text == "pair"
        # formats besides these two bring their special tokens along
        plain = {"add_special_tokens": pair or self.text == "beaver", "return_token_type_ids": None if pair else False}
        plain |= {"return_attention_mask": False, "verbose": False}
        joined = zip(*pairs, strict=True) if pair else [[self._joined(*both) for both in pairs]]
        tokens = self.tokenizer(*map(list, joined), **plain)
        rows, types = tokens["input_ids"], tokens.get("token_type_ids")
        if self.text in ("beaver", "continued"):
            # some tokenizers end every text themselves; no other end token can stand there
            end = [self.tokenizer.eos_token_id]
            rows = [row if row[-1:] == end else row + end for row in rows]
        if [] in rows:
            raise ValueError(
                f"the text of the completion {texts[rows.index([])]!r:.200} has no tokens: correct `text`."
            )
        long = [i for i, row in enumerate(rows) if len(row) > self.max_length]
        if long and self.truncation == "refuse":
            raise ValueError(
                f"{len(long)} texts are longer than {self.max_length} tokens, the first with {len(rows[long[0]])}: "
                "generate fewer tokens, or set truncation='right'."
            )
        for i in long if pair else ():
            cut = self.tokenizer(*pairs[i], truncation="longest_first", max_length=self.max_length, **plain)
            rows[i] = cut["input_ids"]  # special tokens stay
            if types is not None:
                types[i] = cut["token_type_ids"]
        rows = [row[: self.max_length] for row in rows]
        changed = sum(pair != before for pair, before in zip(pairs, given, strict=True))
        return Encoded(rows, types, {"texts": len(rows), "truncated": len(long), "broken": changed}, texts)

    def score_encoded(self, encoded: Encoded) -> np.ndarray:
        """Return a score for each completion, float64 (completions,), of what `encode` returned; see `score`."""
        rows, types, tally, completions = encoded
        if not rows:
            return np.zeros(0)
        if self.device.type == "cuda" and os.getpid() != self._pid:
            raise ScorerError(
                f"{self.name!r} lies on {self.device}, which a forked process cannot use: start a server for it "
                "(evoalign serve-scorer) and give its HTTPScorer as reward, or put the model on the CPU."
            )
        self._check_ends(rows)
        scores = np.empty(len(rows))
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        with torch.inference_mode():
            for first in range(0, len(order), self.batch_size):
                batch = order[first : first + self.batch_size]
                scores[batch] = self._forward([rows[i] for i in batch], types and [types[i] for i in batch])
        if not np.isfinite(scores).all():
            bad = int(np.flatnonzero(~np.isfinite(scores))[0])
            raise ScorerError(
                f"{self.name!r} gave {scores[bad]} for the completion {completions[bad]!r:.200}: use another dtype, "
                "such as bfloat16 or float32 for float16."
            )
        if tally["truncated"] and not self.counts["truncated"]:
            warnings.warn(
                f"{self.name!r} reads {self.max_length} tokens at most and left out the end of a longer text, as "
                "truncation='right' says; such texts are counted as 'truncated'.",
                stacklevel=2,
            )
        self.counts.update(tally)  # what fails is scored once more, text by text
        return scores - self._shift

    # ---- texts to tokens

    def _joined(self, prompt: str, completion: str) -> str:
        if self.text == "beaver":
            return f"BEGINNING OF CONVERSATION: USER: {prompt} ASSISTANT:{completion}"
        if self.text == "chat":
            said = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
            return models.rendered(self.tokenizer, said)
        if self.text != "continued":
            return self.text(prompt, completion)
        if prompt not in self._openings:  # a prompt is answered many times
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
        """Raise where transformers would read another token than the last: the model may have been trained so."""
        if self._head is None or isinstance(self.model, _score_models.ScoreModel):
            return  # read where the architecture says, or by the attention mask
        padding = self.model.config.get_text_config().pad_token_id
        if padding is not None and any(row[-1] == padding for row in rows):
            raise ValueError(
                f"a text ends in token {padding}, which the configuration of {self.name!r} calls padding: transformers "
                "reads its score one token earlier. If the model was trained to be read there, give a `text` that ends "
                "earlier; if not, set another pad_token_id in its configuration."
            )


def _texts(prompts: Sequence[Any], completions: Sequence[Any]) -> tuple[list[str], list[str]]:
    """Return prompts and completions as texts, where some of them are conversations."""
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
    """Return the text format; beaver: whether the model is in that layout, which has a default."""
    if text is None and not beaver:
        raise ValueError(f"say in which format the model reads prompt and completion: text is one of {TEXTS}.")
    text = "beaver" if text is None else text
    if callable(text):
        return text
    choose("text", text, TEXTS)
    if text in ("chat", "continued") and not tokenizer.chat_template:
        raise ValueError(f"text={text!r} needs a chat template, and the tokenizer has none: give another format.")
    if text in ("beaver", "continued") and tokenizer.eos_token_id is None:
        raise ValueError(f"text={text!r} ends in the end token, and the tokenizer has none: set tokenizer.eos_token.")
    return text


def _checked_length(max_length: int | None, config: Any, tokenizer: Any) -> int:
    able = getattr(config.get_text_config(), "max_position_embeddings", None)
    if max_length is not None:
        return whole_number("max_length", max_length, most=able, why="the positions that the model has")
    return int(min(able or 10**9, tokenizer.model_max_length or 10**9, 10**9))  # without a limit it is 10^30


def check(name: str, text: str | None = None, max_length: int | None = None) -> str:
    """Refuse what `RewardModel` would refuse, as far as that is known without the weights, and return the text format.

    Args:
        name: a folder, or a model on the Hub, of which configuration and tokenizer are fetched.
        text: as for `RewardModel`.
        max_length: as for `RewardModel`.

    Raises:
        ValueError: as `RewardModel`.
    """
    config, architecture = _score_models.config_of(name, name)
    tokenizer = _score_models.tokenizer_of(None, name)
    _checked_length(max_length, config, tokenizer)
    return _checked_text(text, architecture.endswith(_score_models.SCORE_MODEL), tokenizer)


# ------------------------------------------------------------------------------------------------ as TRL's trainers do


class ModelReward:
    """A sequence classifier as a reward function, with the texts of TRL's `GRPOTrainer`.

    It reads prompt and completion as one text, without further special tokens; conversations by the chat template of
    its own tokenizer. Unlike `RewardModel` it breaks no special tokens that a policy writes out.

    Args:
        model: a sequence classifier of transformers with one label, an object, a folder or a name on the Hub, from
            where no code is run; what is loaded is float32, on the CPU.
        tokenizer: its own; None: the one that lies beside it.
        chat_template_kwargs: for its chat template.

    Raises:
        ValueError: no such model, one that is no classifier, has other than one label or lacks weights, or no
            tokenizer.
    """

    rows = 32
    """completions that are scored at once"""

    def __init__(self, model: Any, tokenizer: Any = None, chat_template_kwargs: Mapping[str, Any] | None = None):
        folder = None
        if isinstance(model, (str, os.PathLike)):
            name, folder = str(model), _score_models.folder_of(str(model))
            model = _score_models.load(folder, name, torch.float32)
            if isinstance(model, _score_models.ScoreModel):
                raise ValueError(
                    f"model {name!r} is a score model of Safe-RLHF, which TRL does not read: give "
                    f"reward_models.RewardModel({name!r}) as the reward function."
                )
        else:
            name = getattr(model.config, "_name_or_path", "") or type(model).__name__
        _score_models.check_labels(model.config)
        self.__name__ = name.rstrip("/").split("/")[-1]
        self.model, self.template = model.eval(), dict(chat_template_kwargs or {})
        self.tokenizer = _score_models.tokenizer_of(tokenizer, folder or name)
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        # a decoder's score is read at the last token that is no padding
        model.config.get_text_config().pad_token_id = self.tokenizer.pad_token_id

    @torch.inference_mode()
    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        """Score completions, (completions,), texts or messages as the prompts are."""
        texts = [
            prompt + said
            if isinstance(prompt, str)
            else models.rendered(self.tokenizer, prompt + said, **self.template)
            for prompt, said in zip(prompts, completions, strict=True)
        ]
        how = {"return_tensors": "pt", "padding": True, "padding_side": "right", "add_special_tokens": False}
        scores: list[float] = []
        for first in range(0, len(texts), self.rows):
            inputs = self.tokenizer(text=texts[first : first + self.rows], **how).to(self.model.device)
            scores += self.model(**inputs).logits[:, 0].double().tolist()
        return scores


def as_functions(
    rewards: Any, tokenizers: Any = None, chat_template_kwargs: Mapping[str, Any] | None = None
) -> list[Any]:
    """Return reward functions, with every model among them as a `ModelReward`.

    Args:
        rewards: one or a list: a function, or a model as a name, a folder or an object.
        tokenizers: one or a list as long: the tokenizer of each model; None: the one that lies beside it.
        chat_template_kwargs: for the models' chat templates.

    Raises:
        ValueError: another number of tokenizers, one for a function, or what `ModelReward` raises.
    """
    several = isinstance(rewards, Sequence) and not isinstance(rewards, str)
    functions = list(rewards) if several else [rewards]
    given = [tokenizers] * (len(functions) if tokenizers is None else 1)
    given = list(tokenizers) if isinstance(tokenizers, (list, tuple)) else given
    if len(given) != len(functions):
        raise ValueError(
            f"reward_processing_classes has {len(given)} entries for {len(functions)} reward functions: give one each, "
            "None for a function."
        )
    for i, (function, tokenizer) in enumerate(zip(functions, given, strict=True)):
        if isinstance(function, (str, os.PathLike, torch.nn.Module)):
            functions[i] = ModelReward(function, tokenizer, chat_template_kwargs)
        elif tokenizer is not None:
            raise ValueError(
                f"reward_processing_classes has a tokenizer for {function!r:.100}, which is a function and has no use "
                "for it: give None in its place."
            )
    return functions


# ----------------------------------------------------------------------------------------------------------- over HTTP

_FIRST_WAIT, _LONGEST_WAIT = 0.5, 8.0  # seconds


class HTTPScorer(_Scorer):
    """A reward or cost model behind a server of this library (`evoalign serve-scorer`).

    The server is asked at once which model it holds. A later answer from another model, or another format, is an error:
    scores of two models are never mixed. Connections are kept open, one set in each process, so that it may be forked
    and pickled.

    Args:
        url: of the server, such as http://127.0.0.1:8100.
        name: for logs; None: what the server calls the model.
        timeout: seconds without a byte from the server after which a request is given up.
        retries: of a request after a time-out, a lost connection, an HTTP error from 500 or an answer that is none. The
            waits between are 0.5, 1, 2, 4, 8, 8, ... s; a server that is started anew within them is found again.
        batch_size: texts in one request.
        api_key_env: the environment variable with the server's key, read at each request and kept nowhere.

    Attributes:
        identity: what the server said of its model.
        counts: "texts", "truncated", "retries"; what went wrong with single requests: "timeout",
            "connection", "http" (errors of the server), "malformed" (no JSON, not one finite number each), "identity",
            "refused" (other HTTP errors); and "failed", calls that ended in an error. Those of this process.

    Raises:
        ValueError: an address that is none, or no key or one that no HTTP header can hold.
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
        """Return a score for each completion, float64 (completions,): those of the server's model, bit for bit.

        Raises:
            ValueError: columns of different lengths.
            TypeError: a prompt or completion of another form.
            ScorerError: the server refused the texts, or failed on them in all retries.
            ScorerGone: it gives no scores whatever it is asked.
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
            raise _OtherModel(f"its model is {answer['identity']!r:.40}, it was {self._fingerprint!r}")
        numbers = type(scores) is list and {*map(type, scores)} <= {int, float} and all(map(math.isfinite, scores))
        if not numbers or len(scores) != n or type(cut) is not int or not 0 <= cut <= n:
            raise ValueError(f"not {n} finite numbers, or truncated={cut!r:.40}: {scores!r:.100}")
        return scores, cut

    def _ask(self, method: str, path: str, body: bytes | None, read: Callable[[Any], Any]) -> Any:
        """Return what `read` makes of the server's answer, after as many requests as it takes."""
        import httpx

        headers = {"Content-Type": "application/json"}
        if self.api_key_env is not None:
            headers["Authorization"] = f"Bearer {key_in(self.api_key_env)}"
        for attempt in range(self.retries + 1):
            if attempt:
                self.counts["retries"] += 1
                time.sleep(min(_FIRST_WAIT * 2 ** (attempt - 1), _LONGEST_WAIT))
            gone = True
            try:
                client = _client(self.url, self.timeout, os.getpid())
                answer = client.request(method, path, content=body, headers=headers)
                if answer.status_code < 400:
                    return read(answer.json())
                kind = "refused" if answer.status_code < 500 else "http"
                what, gone = f"HTTP {answer.status_code}: {answer.text:.300}", answer.status_code in (401, 404)
            except httpx.TimeoutException as error:
                kind, what = "timeout", f"no answer within {self.timeout:g} s ({type(error).__name__})"
            except httpx.HTTPError as error:
                kind, what = "connection", f"{type(error).__name__}: {error}"
            except _OtherModel as error:
                kind, what = "identity", str(error)
            except (ValueError, KeyError, TypeError, RecursionError) as error:  # not JSON is a ValueError, too
                kind, what = "malformed", f"an answer that is none of this server's ({error!r:.200})"
            self.counts[kind] += 1
            if kind in ("identity", "refused"):
                break  # once more would give the same
        self.counts["failed"] += 1
        raise (ScorerGone if gone else ScorerError)(
            f"the scorer at {self.url} gave no scores ({attempt + 1} requests), the last time: {what}. See whether "
            "evoalign serve-scorer runs there with the model of this run."
        )


@lru_cache(maxsize=64)
def _client(url: str, timeout: float, process: int) -> Any:
    """Return the connections to a server, a set in each process: one that two write to would mix their requests."""
    import httpx

    # proxies of the environment are for the Internet, and would see the texts
    client = httpx.Client(base_url=url, timeout=timeout, trust_env=False)
    atexit.register(client.close)
    return client


class _OtherModel(Exception):
    """The server holds another model than before."""


def _read_identity(answer: Any) -> dict[str, Any]:
    if not all(isinstance(answer[key], str) for key in ("name", "weights", "tokenizer", "text")):
        raise ValueError(f"not what a scorer says of itself: {answer!r:.100}")
    return answer


def fingerprint(identity: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits of an identity, its name left out: what a server adds to every answer."""
    decisive = {key: value for key, value in identity.items() if key != "name"}
    return hashlib.sha256(canonical_json(decisive).encode()).hexdigest()[:16]
